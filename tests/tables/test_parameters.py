"""Gradients that arrive at tables that backward updates from elsewhere than lookups: refused."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Placement,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTEmbeddingBag,
    TTSpec,
    optim,
    storage,
)

ROWS, DIM = 12, 4
REFUSED = "a gradient arrived at the weights of a table that backward updates"
_TRAIN = TTSpec(ROWS, DIM, (2,), (3, 4), (2, 2), name="t")


def _bare(placement: Placement, **options: Any) -> nn.Module:
    tables = [TableSpec(ROWS, DIM, "near"), TableSpec(ROWS, DIM, "t", placement)]
    return TableBatchedEmbeddingBags(tables, optim.SGD(0.5), feature_tables=[1], **options)


def _collection(kind: storage.Storage) -> nn.Module:
    config = EmbeddingBagConfig(ROWS, DIM, "t", ("f",), storage=kind)
    return EmbeddingBagCollection([config], optimizer=optim.SGD(0.5))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: _bare(Placement.DEVICE),
    "managed": lambda: _bare(Placement.MANAGED),
    "cached": lambda: _bare(Placement.MANAGED_CACHING, cache=CacheConfig(sets=1)),
    "disk": lambda: _bare(
        Placement.DISK, cache=CacheConfig(sets=1, directory=Path(tempfile.mkdtemp()) / "t")
    ),
    "train": lambda: TTEmbeddingBag(_TRAIN, optim.SGD(0.5)),
    "cached train": lambda: CachedTTEmbeddingBags([_TRAIN], TTCache(4), optim.SGD(0.5)),
    "dynamic": lambda: DynamicEmbeddingBags([DynamicSpec(32, DIM, name="t")], optim.SGD(0.5)),
    "collection": lambda: _collection(storage.Dense()),
    "cached collection": lambda: _collection(storage.Dense(Placement.MANAGED_CACHING)),
    "collection of trains": lambda: _collection(storage.TensorTrain((2,), (3, 4), (2, 2))),
    "collection of hash tables": lambda: _collection(storage.Hash()),
}


def _look_up(module: nn.Module) -> Tensor:
    ids = torch.arange(4)
    if isinstance(module, EmbeddingBagCollection):
        return module(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))).values()
    return module(ids, torch.arange(5))


@pytest.mark.parametrize("kind", MODULES)
def test_a_penalty_is_refused_and_leaves_no_gradient(kind: str) -> None:
    module = MODULES[kind]()
    _look_up(module).sum().backward()  # lookups themselves train
    parameters = list(module.parameters())
    assert all(p.requires_grad for p in parameters)
    for penalised in parameters:
        with pytest.raises(RuntimeError, match=REFUSED):
            (_look_up(module).sum() + penalised.abs().sum()).backward()
        assert penalised.grad is None
    _look_up(module).sum().backward()


def _shared(weights: Tensor) -> Tensor:
    layer = nn.Linear(ROWS, 2 * DIM, bias=False)
    layer.weight = weights
    return layer(torch.ones(DIM)).sum()


USES: dict[str, Callable[[Tensor], Any]] = {
    "weight tying": lambda w: (torch.ones(3, DIM) @ w.view(-1, DIM).T).sum().backward(),
    "a view": lambda w: w.view(-1)[:3].sum().backward(),
    "another loss": lambda w: (w * 2).pow(2).mean().backward(retain_graph=True),
    "autograd.grad": lambda w: torch.autograd.grad(w.norm(), w),
    "F.embedding": lambda w: nn.functional.embedding(torch.tensor([1]), w).sum().backward(),
}


@pytest.mark.parametrize("use", USES)
def test_other_uses_of_the_weights(use: str) -> None:
    module = _collection(storage.Dense())
    with pytest.raises(RuntimeError, match=REFUSED):
        USES[use](next(module.parameters()))


@pytest.mark.parametrize("kind", ["plain", "train", "dynamic", "collection"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_refuse_too(kind: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    module = copied(MODULES[kind]())
    with pytest.raises(RuntimeError, match=REFUSED):
        next(module.parameters()).sum().backward()


@pytest.mark.parametrize("kind", ["plain", "train", "collection"])
def test_what_is_allowed(kind: str) -> None:
    """Reading without a gradient; frozen tables, whose penalty has no gradient in torch either."""
    module = MODULES[kind]()
    weights = next(module.parameters())
    before = weights.detach().clone()
    (_look_up(module).sum() * 0 + weights.detach().square().sum()).backward()
    with torch.no_grad():
        assert weights.norm() == before.norm()
    module.requires_grad_(False)
    layer = nn.Linear(2, 1)
    (layer(torch.ones(2)).sum() + weights.square().sum()).backward()
    module.requires_grad_(True)
    with pytest.raises(RuntimeError, match=REFUSED):
        weights.square().sum().backward()


def test_a_table_that_gets_its_optimizer_later() -> None:
    """Dense gradients before; refused once backward updates the table."""
    collection = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", ("f",))])
    weights = next(collection.parameters())
    weights.square().sum().backward()
    assert weights.grad is not None
    collection.set_optimizers({"t": optim.SGD(0.5)})
    with pytest.raises(RuntimeError, match=REFUSED):
        weights.square().sum().backward()


def test_a_deferred_table_applies_a_penalty() -> None:
    """As torch.optim.SGD does: rows of the batch and all others together."""
    module = TableBatchedEmbeddingBags([TableSpec(ROWS, DIM)], optim.SGD(0.5, deferred=True))
    expected = nn.Parameter(module.weights.detach().clone())
    oracle = torch.optim.SGD([expected], lr=0.5)
    (_look_up(module).sum() + 0.3 * module.weights.square().sum()).backward()
    module.apply_gradients()
    (expected[:4].sum() + 0.3 * expected.square().sum()).backward()
    oracle.step()
    torch.testing.assert_close(module.weights.detach(), expected.detach())


@pytest.mark.parametrize("kind", ["managed", "cached", "disk"])
def test_compiled_writes_of_incomplete_parameters_are_refused(kind: str) -> None:
    module = MODULES[kind]()
    torch._dynamo.reset()
    read = torch.compile(lambda: module.weights.detach() * 1, backend="aot_eager")
    double = torch.compile(torch.no_grad()(lambda: module.weights.mul_(2)), backend="aot_eager")
    for _ in range(2):
        _look_up(module).sum().backward()
        with pytest.raises(RuntimeError, match="table_weights"):
            double()
        assert torch.equal(read(), module.weights.detach() * 1)


@pytest.mark.parametrize("kind", ["cached collection", "cached train"])
def test_compiled_code_reads_and_writes_values_behind_a_cache(kind: str) -> None:
    module = MODULES[kind]()
    parameter = next(module.parameters())
    torch._dynamo.reset()
    read = torch.compile(lambda: parameter.detach() * 1, backend="aot_eager")
    double = torch.compile(torch.no_grad()(lambda: parameter.mul_(2)), backend="aot_eager")
    for _ in range(2):
        _look_up(module).sum().backward()
        values = read()
        assert torch.equal(values, parameter.detach() * 1)
    double()
    assert torch.equal(parameter.detach() * 1, 2 * values)
    assert torch.equal(read(), 2 * values)


@pytest.mark.parametrize(
    "kind", ["plain", "train", "collection", "collection of trains", "cached collection"]
)
def test_in_a_compiled_graph(kind: str) -> None:
    module = MODULES[kind]()
    torch._dynamo.reset()
    look_up = torch.compile(lambda: _look_up(module).sum(), backend="aot_eager")
    look_up().backward()  # reads the weights, which get no gradient
    *_, penalised = module.parameters()
    penalty = torch.compile(lambda: penalised.square().sum(), backend="aot_eager")
    both = torch.compile(
        lambda: _look_up(module).sum() + penalised.square().sum(), backend="aot_eager"
    )
    for loss in (penalty, both):
        with pytest.raises(RuntimeError, match=REFUSED):
            loss().backward()
    assert penalised.grad is None


def test_only_arrays_over_a_table_behind_a_cache_are_read_only() -> None:
    collection = MODULES["cached collection"]()
    parameter = next(collection.parameters())
    assert not parameter.detach().numpy().flags.writeable
    assert np.asarray(parameter.detach(), dtype=np.float64).flags.writeable  # a copy


def test_a_lookup_of_torch_that_renormalises_rows_writes_a_table_behind_a_cache() -> None:
    plain, cached = MODULES["collection"](), MODULES["cached collection"]()
    cached.load_state_dict(plain.state_dict())
    ids = torch.arange(ROWS)
    for module in (plain, cached):
        _look_up(module).sum().backward()  # rows are in the cache
        with torch.no_grad():
            nn.functional.embedding(ids, next(module.parameters()), max_norm=0.1)
    assert torch.equal(_look_up(cached), _look_up(plain))
