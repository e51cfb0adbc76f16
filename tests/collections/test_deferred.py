"""Deferred updates: gradients that wait for `FusedOptimizer.step`, as in `torch.optim`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from emblib import (
    CacheConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Placement,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.collections.optimizers import (
    CombinedOptimizer,
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)
from emblib.sharding import clip_grad_norm_
from emblib.storage import Dense, Hash, Storage, TensorTrain
from tests.collections.cases import bag_configs, batch, features_of
from tests.optimizer_cases import CASES

KINDS = ("plain", "tt", "dynamic", "plain")
PLAIN = ("plain", "plain", "plain")
OPTIMIZERS = {
    name: optimizer
    for name, optimizer in CASES.items()
    if getattr(optimizer, "global_decay", None) is None
}
COMMON = {k: v for k, v in OPTIMIZERS.items() if not hasattr(v, "swap_every") and v.name == k}


STORAGES: dict[str, Storage] = {
    "dense": Dense(),
    "host": Dense(Placement.MANAGED),
    "cached": Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1)),
    "hash": Hash(),
    "tensor train": TensorTrain(ranks=(2, 2)),
}


class Model(nn.Module):
    """Tables and a dense layer."""

    def __init__(self, optimizer: optim.Optimizer | None, kinds: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = EmbeddingBagCollection(bag_configs(kinds), optimizer=optimizer)
        self.over = nn.Linear(self.sparse.groups.output_dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the sum of the squared outputs of the layer."""
        return self.over(self.sparse(features).values()).square().sum()


def deferred(optimizer: optim.Optimizer) -> optim.Optimizer:
    return replace(optimizer, deferred=True)


def a_batch(seed: int, size: int = 4, kinds: tuple[str, ...] = KINDS) -> KeyedJaggedTensor:
    torch.manual_seed(seed)
    return batch(features_of(bag_configs(kinds)), size)


def pair(
    optimizer: optim.Optimizer, kinds: tuple[str, ...] = KINDS
) -> tuple[Model, Model, FusedOptimizer]:
    """Return equal models, updated in backward and deferred, and the optimizer of the latter."""
    now, later = Model(optimizer, kinds), Model(deferred(optimizer), kinds)
    later.load_state_dict(now.state_dict())
    return now, later, FusedOptimizer.of(later)


def assert_equal_tables(a: Model, b: Model) -> None:
    torch.testing.assert_close(a.sparse.state_dict(), b.sparse.state_dict(), rtol=0, atol=0)
    states = FusedOptimizer.of(a).state_dict()["state"]
    torch.testing.assert_close(states, FusedOptimizer.of(b).state_dict()["state"], rtol=0, atol=0)


def tables_close(a: Model, b: Model, **tolerance: float) -> None:
    torch.testing.assert_close(a.sparse.state_dict(), b.sparse.state_dict(), **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_per_backward_is_the_update_in_backward(name: str) -> None:
    kinds = KINDS if name in COMMON and "ensemble" not in name else PLAIN
    now, later, optimizer = pair(OPTIMIZERS[name], kinds)
    for seed in range(3):
        features = a_batch(seed, kinds=kinds)
        for model in (now, later):
            model(features).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_tables(now, later)


@pytest.mark.parametrize("name", COMMON)
def test_micro_batches_are_one_large_batch(name: str) -> None:
    model = Model(deferred(COMMON[name]))
    large, optimizer = copy.deepcopy(model), FusedOptimizer.of(model)
    large_optimizer = FusedOptimizer.of(large)
    for step in range(3):
        features = [a_batch(10 * step + i) for i in range(4)]
        for micro in features:
            model(micro).backward()
        sum(large(micro) for micro in features).backward()
        for one in (optimizer, large_optimizer):
            one.step()
            one.zero_grad()
    tables_close(model, large, rtol=2e-4, atol=2e-5)
    assert {module.step for table in model.sparse.fused_tables() for module in table.modules} == {3}


def test_gradients_are_those_of_embedding_bags() -> None:
    configs = bag_configs(PLAIN)
    model = Model(optim.SGD(0.1, deferred=True), PLAIN)
    weights = {
        config.name: model.sparse.embedding_bags[config.name].weight.detach().clone()
        for config in configs
    }
    features = a_batch(3, kinds=PLAIN)
    want = {name: value.clone().requires_grad_() for name, value in weights.items()}
    columns = []
    for config in configs:
        for name in config.feature_names:
            ids = features[name]
            bags = nn.functional.embedding_bag(
                ids.values(), want[config.name], ids.offsets()[:-1], mode="sum"
            )
            columns.append(bags)
    model.over(torch.cat(columns, 1)).square().sum().backward()
    model(features).backward()
    for name, weight in want.items():
        grad = model.sparse.embedding_bags[name].weight.grad
        assert grad.is_sparse
        torch.testing.assert_close(grad.to_dense(), weight.grad)


def test_nothing_changes_before_the_step() -> None:
    _, model, optimizer = pair(optim.Adagrad(0.1))
    features = a_batch(0)
    first = model(features)
    before = copy.deepcopy(model.sparse.state_dict())
    first.backward()
    torch.testing.assert_close(model.sparse.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.sparse.state_dict(), before, rtol=0, atol=0)


def test_a_step_without_gradients_is_no_step() -> None:
    kinds = ("plain", "tt")
    _, model, optimizer = pair(optim.Adam(0.1), kinds)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    model(a_batch(0, kinds=kinds)).backward()
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_two_lookups_retained_graphs_and_closures() -> None:
    _, model, optimizer = pair(optim.SGD(0.1), PLAIN)
    twice = copy.deepcopy(model)
    features = a_batch(1, kinds=PLAIN)
    loss = model(features)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()

    def closure() -> Tensor:
        loss = twice(features) + twice(features)
        loss.backward()
        return loss

    result = FusedOptimizer.of(twice).step(closure)
    torch.testing.assert_close(result, 2 * loss)
    tables_close(model, twice, rtol=1e-6, atol=1e-7)


def test_a_scheduler_sets_the_rate_of_the_next_step() -> None:
    _, model, optimizer = pair(optim.SGD(1.0), PLAIN)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in range(3):
        model(a_batch(seed, kinds=PLAIN)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    modules = {module.learning_rate for t in model.sparse.fused_tables() for module in t.modules}
    assert modules == {0.125}


@pytest.mark.parametrize("kinds", [PLAIN, KINDS])
def test_grad_scaler_unscales_and_skips(kinds: tuple[str, ...]) -> None:
    """As without a scaler, with the batch that overflows left out."""
    plain, scaled = (Model(optim.Adam(0.05, deferred=True), kinds) for _ in range(2))
    optimizers = [_combined(model) for model in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        features = a_batch(step, kinds=kinds)
        overflow = step == 2
        expected = plain(features)  # hash tables insert keys, whatever becomes of the step
        if not overflow:
            expected.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        loss = scaled(features)
        scaler.scale(loss * torch.inf if overflow else loss).backward()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()
    assert scaler.get_scale() == 2.0**9
    torch.testing.assert_close(plain.over.state_dict(), scaled.over.state_dict())
    tables_close(plain, scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_of_weights_are_those_of_an_update_in_backward(storage: str) -> None:
    def gradient(optimizer: optim.Optimizer | None) -> Tensor:
        torch.manual_seed(0)
        config = EmbeddingBagConfig(50, 4, "t", ("f",), storage=STORAGES[storage])
        bags = EmbeddingBagCollection([config], is_weighted=True, optimizer=optimizer)
        weights = torch.linspace(0.5, 2, 4).requires_grad_()
        ids, lengths = torch.tensor([1, 2, 3, 2]), torch.tensor([3, 1])
        pooled = bags(KeyedJaggedTensor(["f"], ids, weights=weights, lengths=lengths))
        pooled.values().square().sum().backward()
        assert weights.grad is not None
        return weights.grad

    optimizer = optim.SGD(0.1)
    torch.testing.assert_close(gradient(deferred(optimizer)), gradient(optimizer))


def _combined(model: Model) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(model.over.named_parameters("over")))
    over = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.01))
    return CombinedOptimizer([FusedOptimizer.of(model), over])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_the_norm_of_dense_and_sparse_gradients(norm_type: float) -> None:
    model = Model(optim.SGD(0.1, deferred=True))
    dense = Model(None)
    dense.load_state_dict(model.state_dict())
    for seed in range(2):  # accumulated gradients are coalesced
        model(a_batch(seed)).backward()
        dense(a_batch(seed)).backward()
    norms = [
        clip_grad_norm_(model, 0.5, norm_type),
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5, norm_type),
    ]
    torch.testing.assert_close(*norms)
    for (name, one), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        grad = one.grad.to_dense() if one.grad.is_sparse else one.grad
        torch.testing.assert_close(grad, other.grad, msg=name)


@pytest.mark.parametrize(
    "batches", [([[], [], [3]], [[1, 4], [3], []]), ([[3], [], [1, 4]], [[], [1, 2, 7], [3]])]
)
def test_gradients_of_tables_without_lookups_accumulate(batches: Any) -> None:
    """Torch grows an empty sparse gradient in place: its memory is not that of other tables."""
    configs = [EmbeddingBagConfig(8, 4, name, [name]) for name in "abc"]
    bags, dense = (
        EmbeddingBagCollection(configs, optimizer=optimizer)
        for optimizer in (optim.SGD(0.1, deferred=True), None)
    )
    factors = torch.arange(1.0, 13.0)
    for ids in batches:
        lengths = torch.tensor([len(ids_of_table) for ids_of_table in ids])
        all_ids = torch.tensor([row for ids_of_table in ids for row in ids_of_table])
        features = KeyedJaggedTensor(list("abc"), all_ids, lengths=lengths)
        for collection in (bags, dense):
            (collection(features).values() * factors).sum().backward()
    for sparse, expected in zip(bags.parameters(), dense.parameters(), strict=True):
        assert sparse.grad is not None
        assert expected.grad is not None
        assert torch.equal(sparse.grad.to_dense(), expected.grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("given", ["nothing", "rows", "a layer"])
def test_clipping_gradients_of_which_some_are_empty(norm_type: float, given: str) -> None:
    """A batch without lookups leaves no rows, and torch has no maximum of none."""
    table, layer = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3))
    empty = nn.Parameter(torch.ones(0, 2))
    empty.grad, layer.grad = torch.ones(0, 2), None
    rows = torch.tensor([[3.0, -1.0]] if given == "rows" else []).view(-1, 2)
    at = torch.full((1, len(rows)), 2)
    table.grad = torch.sparse_coo_tensor(at, rows.clone(), (4, 2), is_coalesced=True)
    if given == "a layer":
        layer.grad = torch.tensor([5.0, 0.0, -2.0])
    every = rows.flatten() if layer.grad is None else layer.grad.clone()
    expected = torch.linalg.vector_norm(torch.cat([every, torch.zeros(1)]), norm_type)
    norm = clip_grad_norm_([table, layer, empty], 0.5, norm_type)
    torch.testing.assert_close(norm, expected)
    found = table.grad._values().flatten() if layer.grad is None else layer.grad
    torch.testing.assert_close(found, every * (0.5 / expected).clamp(max=1.0), atol=1e-6, rtol=1e-5)
    assert clip_grad_norm_([empty], 0.5, norm_type) == 0
    assert clip_grad_norm_([], 0.5, norm_type) == 0


def test_clipping_by_value() -> None:
    model = Model(optim.SGD(1.0, deferred=True), PLAIN)
    before = copy.deepcopy(model.sparse.state_dict())
    optimizer = GradientClippingOptimizer(FusedOptimizer.of(model), GradientClipping.VALUE, 1e-3)
    model(a_batch(0, kinds=PLAIN)).backward()
    optimizer.step()
    moved = {k: (v - before[k]).abs().max() for k, v in model.sparse.state_dict().items()}
    assert 0 < max(moved.values()) <= 1.001e-3


def test_torch_clips_sparse_gradients_or_refuses() -> None:
    """Up to torch 2.13 it raises rather than skips them: nothing is silently left unclipped."""
    model = Model(optim.SGD(1.0, deferred=True), PLAIN)
    model(a_batch(0, kinds=PLAIN)).backward()
    if TorchVersion(torch.__version__) < (2, 14):
        with pytest.raises((NotImplementedError, RuntimeError)):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(nn.utils.get_total_norm(grads), torch.tensor(0.1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kinds", [PLAIN, ("tt", "tt"), ("dynamic", "dynamic")])
def test_frozen_tables_get_no_gradient_and_go_on(kinds: tuple[str, ...]) -> None:
    model = Model(optim.SGD(1.0, deferred=True), kinds)
    model(a_batch(9, kinds=kinds)).backward()
    optimizer = FusedOptimizer.of(model)
    optimizer.zero_grad()
    model.sparse.requires_grad_(requires_grad=False)
    before = copy.deepcopy(model.sparse.state_dict())
    model(a_batch(0, kinds=kinds)).backward()
    optimizer.step()
    torch.testing.assert_close(model.sparse.state_dict(), before, rtol=0, atol=0)
    model.sparse.requires_grad_(requires_grad=True)
    model(a_batch(0, kinds=kinds)).backward()
    optimizer.step()
    assert any(not torch.equal(v, before[k]) for k, v in model.sparse.state_dict().items())


def test_narrow_weights_get_float32_gradients() -> None:
    configs = [replace(config, data_type=torch.float16) for config in bag_configs(PLAIN)]
    model = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1, deferred=True))
    (model(a_batch(0, kinds=PLAIN)).values() * 1e-9).sum().backward()
    for bag in model.embedding_bags.values():
        assert bag.weight.grad.dtype == torch.float32
        assert 0 < float(bag.weight.grad._values().abs().max()) < 1e-7


@pytest.mark.parametrize("placement", ["managed", "managed_caching", "disk"])
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_tables_outside_the_device(name: str, placement: str, tmp_path: Path) -> None:
    """The same bits as on the device, through a cache of fewer rows than a batch has."""
    optimizer = deferred(OPTIMIZERS[name])
    cached = placement != "managed"
    cache = CacheConfig(sets=1, directory=tmp_path) if cached else None
    one_set = Dense(Placement(placement), cache)
    plain = [replace(c, embedding_dim=8, num_embeddings=200) for c in bag_configs(PLAIN)]
    models = [
        EmbeddingBagCollection([replace(c, storage=s) for c in plain], optimizer=optimizer)
        for s in (Dense(), one_set)
    ]
    models[1].load_state_dict(models[0].state_dict())
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for _ in range(2):
            ids = torch.randint(200, (5 * 40,), generator=generator)
            features = KeyedJaggedTensor(features_of(plain), ids, lengths=torch.full((5 * 8,), 5))
            for model in models:
                model(features).values().square().sum().backward()
        for model in models:
            model.embedding_bags["t1"].requires_grad_(step != 1)
            fused = FusedOptimizer.of(model)
            fused.step()
            fused.zero_grad()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    states = [FusedOptimizer.of(model).state_dict()["state"] for model in models]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.External(deferred=True), "makes no update that could be deferred"),
        (
            lambda: optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.1), deferred=True),
            "leave deferred out",
        ),
        (
            lambda: TableBatchedEmbeddingBags(
                [TableSpec(9, 4, "t", Placement.MANAGED)], optim.SGD(0.1, deferred=True)
            ),
            "or, with deferred=True, use an EmbeddingBagCollection",
        ),
    ],
)
def test_what_cannot_be_deferred(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_copies_and_checkpoints_have_the_same_entries() -> None:
    """Deferral is not part of a checkpoint: it loads either way."""
    now, later, optimizer = pair(optim.Adam(0.1))
    assert now.state_dict().keys() == later.state_dict().keys()
    saved = FusedOptimizer.of(now).state_dict()
    optimizer.load_state_dict(saved)
    twin = copy.deepcopy(later)
    for model in (later, twin):
        model(a_batch(0)).backward()
        FusedOptimizer.of(model).step()
    assert_equal_tables(later, twin)


def _pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("kind", ["optimizer", "clipped", "combined", "in the model"])
def test_the_groups_of_a_copied_optimizer_have_the_parameters_of_the_copied_model(
    kind: str, copied: Any
) -> None:
    """They had copies of the parameters, so that `zero_grad` and clipping did nothing."""
    tables = [EmbeddingBagConfig(6, 2, "t", ["f"])]
    model = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.5, deferred=True))
    optimizer: Any = FusedOptimizer.of(model)
    if kind == "clipped":
        optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.5)
    elif kind == "combined":
        optimizer = CombinedOptimizer([("tables", optimizer)])
    elif kind == "in the model":
        model.optimizer_of_tables = optimizer
    twins = [(model, optimizer), copied((model, optimizer))]
    for collection, its_optimizer in twins:
        for _ in range(2):
            its_optimizer.zero_grad()
            batch_of_one = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.ones(1).long())
            collection(batch_of_one).values().sum().backward()
            its_optimizer.step()
        (weight,) = collection.parameters()
        assert its_optimizer.param_groups[0]["params"] == [weight]
        assert [*map(id, its_optimizer.params.values())] == [id(weight)]
    assert torch.equal(*(next(collection.parameters()) for collection, _ in twins))


def test_a_pickled_optimizer_has_no_copy_of_the_tables() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(5_000, 8, "t")], optimizer=optim.SGD(0.5))
    combined = CombinedOptimizer([FusedOptimizer.of(model)])
    assert len(pickle.dumps((model, combined))) < 1.1 * len(pickle.dumps(model))
