"""Optimizers with maximize=True: the update of the negated gradient, on every path of an update."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    Placement,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.collections.optimizers import FusedOptimizer, from_torch

ROWS, DIM = 12, 4
IDS, OFFSETS = torch.tensor([3, 1, 3, 7]), torch.tensor([0, 1, 3, 4])
_TRAIN = TTSpec(ROWS, DIM, (2,), (3, 4), (2, 2))

MODULES: dict[str, Callable[[optim.Optimizer], nn.Module]] = {
    "plain": lambda o: TableBatchedEmbeddingBags([TableSpec(ROWS, DIM)], o),
    "cached": lambda o: TableBatchedEmbeddingBags(
        [TableSpec(ROWS, DIM, "t", Placement.MANAGED_CACHING)], o, cache=CacheConfig(sets=1)
    ),
    "train": lambda o: TTEmbeddingBag(_TRAIN, o),
    "cached train": lambda o: CachedTTEmbeddingBags([_TRAIN], TTCache(4), o),
    "dynamic": lambda o: DynamicEmbeddingBags([DynamicSpec(32, DIM)], o),
}


def _loss(module: nn.Module, weights: Tensor | None) -> Tensor:
    if weights is None:
        return module(IDS, OFFSETS).square().sum()
    return module(IDS, OFFSETS, weights).square().sum()


@pytest.mark.parametrize("deferred", [False, True], ids=["fused", "deferred"])
@pytest.mark.parametrize("kind", MODULES)
def test_the_loss_rises_as_it_would_fall_negated(kind: str, deferred: bool) -> None:
    if deferred and "cached" in kind:
        pytest.skip("refuses deferred optimizers")
    optimizer = optim.Adam(0.1, deferred=deferred, weight_decay=optim.L2(0.1))
    torch.manual_seed(0)
    module = MODULES[kind](replace(optimizer, maximize=True))
    torch.manual_seed(0)
    twin = MODULES[kind](optimizer)
    twin.load_state_dict(copy.deepcopy(module.state_dict()))
    for sample_weights in (None, torch.rand(4, requires_grad=True), torch.rand(4)):
        found = []
        for one, sign in ((module, 1.0), (twin, -1.0)):
            weights = None if sample_weights is None else sample_weights.detach().clone()
            if weights is not None:
                weights.requires_grad_(sample_weights.requires_grad)
            (_loss(one, weights) * sign).backward()
            FusedOptimizer.of(one).step()
            FusedOptimizer.of(one).zero_grad()
            if weights is not None and weights.grad is not None:
                found.append(weights.grad * sign)  # the gradient of weights is not negated
        assert not found or torch.allclose(*found)
    module.requires_grad_(False)
    twin.requires_grad_(False)
    assert torch.equal(module(IDS, OFFSETS), twin(IDS, OFFSETS))


def test_classes_of_torch_that_maximize() -> None:
    made = from_torch(torch.optim.Adagrad, {"lr": 0.1, "maximize": True})
    assert made == optim.Adagrad(0.1, 1e-10, maximize=True)
    with pytest.raises(ValueError, match="'differentiable': True"):
        from_torch(torch.optim.SGD, {"lr": 0.1, "differentiable": True})
    with pytest.raises(ValueError, match="External makes no update"):
        optim.External(maximize=True)
