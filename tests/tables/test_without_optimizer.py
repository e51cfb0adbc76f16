"""Table modules without an optimizer leave dense gradients, as nn.EmbeddingBag does."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib import (
    BackingStore,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    HostRows,
    Placement,
    RowEviction,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTEmbeddingBag,
    TTSpec,
)

INDICES, OFFSETS = torch.tensor([3, 1, 3]), torch.tensor([0, 2, 3])
TT = TTSpec(40, 8, (2, 2))
MODULES: dict[str, Callable[..., nn.Module]] = {
    "dense": lambda *o: TableBatchedEmbeddingBags([TableSpec(40, 8)], *o),
    "train": lambda *o: TTEmbeddingBag(TT, *o),
    "trains": lambda *o: TableBatchedTTEmbeddingBags([TT], *o),
    "cached train": lambda *o: CachedTTEmbeddingBags([TT], TTCache(8), *o),
    "hash": lambda *o: DynamicEmbeddingBags([DynamicSpec(64, 8)], *o),
}


def backward(module: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        module(INDICES, OFFSETS).square().sum().backward()


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", MODULES)
def test_backward_leaves_dense_gradients(kind: str) -> None:
    module = MODULES[kind]()
    module(INDICES, OFFSETS)  # a hash table inserts the keys
    before = values(module)
    backward(module)
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    assert all(g.layout is torch.strided for g in gradients)
    assert any(g.any() for g in gradients)


@pytest.mark.parametrize("kind", ["dense", "train", "trains"])
def test_an_optimizer_of_torch_makes_the_step_of_the_fused_one(kind: str) -> None:
    fused = MODULES[kind](emblib.optim.SGD(0.5))
    module = MODULES[kind]()
    with torch.no_grad():
        for own, other in zip(module.parameters(), fused.parameters(), strict=True):
            own.view(-1).copy_(other.view(-1))
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        backward(module)
        optimizer.step()
        backward(fused)
    for own, other in zip(module.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(own.view(-1), other.view(-1))


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_that_nobody_uses_are_reported_once(kind: str) -> None:
    module = MODULES[kind]()
    with pytest.warns(UserWarning, match=r"backward has left gradients.*emblib.optim.SGD\(0.01\)"):
        backward(module, times=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(module, times=12)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("use", ["step", "accumulate", "named"])
def test_gradients_that_are_used_are_not_reported(kind: str, use: str) -> None:
    named = emblib.optim.External(gradient=emblib.optim.Gradient.DENSE)
    module = MODULES[kind](*[named] if use == "named" else [])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(24):
            backward(module)
            if use == "step" or (use == "accumulate" and i % 4 == 3):
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("kind", MODULES)
def test_forwards_that_train_nothing_are_no_passes(kind: str) -> None:
    module = MODULES[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(module)
        with torch.no_grad():
            for _ in range(12):
                module(INDICES, OFFSETS)
        module.requires_grad_(False)
        for _ in range(12):
            module(INDICES, OFFSETS)


def test_a_copy_watches_on_its_own() -> None:
    module = copy.deepcopy(MODULES["dense"]())
    with pytest.warns(UserWarning, match="backward has left gradients"):
        backward(module, times=12)


WRONG: dict[str, Callable[[], nn.Module]] = {
    "cached": lambda: TableBatchedEmbeddingBags(
        [TableSpec(40, 8, placement=Placement.MANAGED_CACHING)]
    ),
    "backed": lambda: DynamicEmbeddingBags(
        [DynamicSpec(64, 8)], backing=BackingStore(HostRows(100))
    ),
    "growing": lambda: DynamicEmbeddingBags([DynamicSpec(1024, 8, initial_capacity=64)]),
    "spilling": lambda: CachedTTEmbeddingBags([TT], TTCache(8, eviction=RowEviction.SPILL)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_tables_that_cannot_leave_gradients_ask_for_an_optimizer(kind: str) -> None:
    with pytest.raises(ValueError, match="optimizer that backward applies"):
        WRONG[kind]()
