"""Training with dynamic tables gives what training with plain tables of the same ids gives."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    DynamicEmbeddingBags,
    DynamicSpec,
    Pooling,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.collections.optimizers import FusedOptimizer
from emblib.dynamic.saving import snapshots
from emblib.init import Constant, Normal
from emblib.ops.hash import rule_of
from emblib.reference import hash
from emblib.tables import optimizer_hooks
from tests.optimizer_cases import CASES

EDGES = [0, 1, -1, -2, -3, -4, 4, 2**63 - 1, -(2**63)]
# Those that look at whole tables from time to time are refused, see test_dynamic.py.
OPTIMIZERS = [
    name
    for name, optimizer in CASES.items()
    if not optimizer_hooks.is_periodic(optimizer)
    and optimizer_hooks.find_global_decay(optimizer) is None
]
ALL = [(name, Pooling.SUM) for name in OPTIMIZERS]
FEW = [(name, pooling) for name in ("sgd", "adam") for pooling in (Pooling.MEAN, Pooling.NONE)]


@functools.cache
def _first_rows(
    rule: tuple[float, ...], seed: int, stream: int, keys: tuple[int, ...], dim: int
) -> Tensor:
    """By the definition, which is slow."""
    return torch.stack([hash.initial_row(rule, seed, stream, key, dim) for key in keys]).float()


class _Twins:
    """A dynamic module, and a plain one whose row r is that of key `keys[r]`."""

    def __init__(self, dynamic: DynamicEmbeddingBags, keys: Tensor) -> None:
        self.dynamic, self.keys = dynamic, keys.sort().values
        specs = [TableSpec(keys.numel(), spec.dim, spec.name) for spec in dynamic.tables]
        self.plain = TableBatchedEmbeddingBags(
            specs,
            dynamic.optimizer,
            pooling=dynamic.pooling,
            feature_tables=dynamic.feature_tables,
            precision=dynamic.precision,
            device=dynamic.hyperparams.device,
        )
        streams = dynamic.row_initializer.row_layout[:, 0, 4].tolist()
        for spec, stream, weight in zip(
            dynamic.tables, streams, self.plain.table_weights(), strict=True
        ):
            rule = rule_of(spec.initializer, spec)
            first = _first_rows(rule, dynamic.seed, stream, tuple(self.keys.tolist()), spec.dim)
            weight.copy_(first.to(weight))

    def check_rows(self) -> int:
        """Rows and states of all keys that are there are those of the plain table; how many are."""
        present = 0
        plain = zip(self.plain.table_weights(), self.plain.table_optimizer_states(), strict=True)
        for t, (weight, states) in enumerate(plain):
            slots = self.dynamic.find(t, self.keys)
            there = slots >= 0
            present += int(there.sum())
            mine = self.dynamic.table_rows(t)
            for name, want in {"weight": weight, **states}.items():
                got = mine[name][slots[there]]
                assert torch.equal(got, want[there.to(want.device)]), name
        return present


def _batch(
    generator: torch.Generator, keys: Tensor, bags: int, longest: int = 4
) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, longest + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    # Some keys are asked for often.
    picks = torch.rand(int(offsets[-1]), generator=generator).pow(2) * keys.numel()
    return keys[picks.long()], offsets


def _keys(generator: torch.Generator, count: int) -> Tensor:
    random = torch.randint(-(2**62), 2**62, (count - len(EDGES),), generator=generator)
    return torch.cat([torch.tensor(EDGES), random])


@pytest.mark.parametrize(("name", "pooling"), ALL + FEW)
def test_same_weights_step_by_step(device: torch.device, name: str, pooling: Pooling) -> None:
    """Tables that grow on the way, of unequal dims, one of them read by two features."""
    optimizer = CASES[name]
    generator = torch.Generator().manual_seed(1)
    keys = _keys(generator, 300)
    dims = (8, 8) if pooling is Pooling.NONE else (12, 5)
    specs = [
        DynamicSpec(500, dims[0], name="a", initial_capacity=32),
        DynamicSpec(400, dims[1], name="b"),
    ]
    features = [1, 0, 1]
    dynamic = DynamicEmbeddingBags(
        specs, optimizer, pooling=pooling, feature_tables=features, seed=5, device=device
    )
    twins = _Twins(dynamic, keys)
    for step in range(12):
        ids, offsets = _batch(generator, keys, 3 * 16)
        weights = None
        if pooling is not Pooling.NONE and step % 2:
            weights = torch.rand(ids.numel(), generator=generator).to(device)
        rows = torch.searchsorted(twins.keys, ids)
        out = dynamic(ids.to(device), offsets.to(device), weights)
        want = twins.plain(rows.to(device), offsets.to(device), weights)
        assert torch.equal(out, want)
        grad = torch.randn(out.shape, generator=generator).to(device)
        out.backward(grad)
        want.backward(grad)
        present = twins.check_rows()
    assert present > 300, "most of the keys of both tables were seen"
    assert dynamic.capacity(0) > 32, "the first table grew"
    stats = dynamic.stats()
    assert stats["a"]["evicted"] == stats["a"]["refused"] == stats["b"]["refused"] == 0
    assert dynamic.step == twins.plain.step == 12


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16])
def test_same_weights_in_16_bits(device: torch.device, weights: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    keys = _keys(generator, 100)
    precision = Precision(weights=weights, output=weights, states=weights)
    dynamic = DynamicEmbeddingBags(
        [DynamicSpec(200, 8, initial_capacity=32)],
        optim.Adam(lr=0.1),
        precision=precision,
        device=device,
    )
    twins = _Twins(dynamic, keys)
    for _ in range(6):
        ids, offsets = _batch(generator, keys, 20)
        rows = torch.searchsorted(twins.keys, ids)
        out = dynamic(ids.to(device), offsets.to(device))
        want = twins.plain(rows.to(device), offsets.to(device))
        assert torch.equal(out, want)
        for result in (out, want):
            result.float().square().sum().backward()
        twins.check_rows()


def test_stochastic_rounding_stays_unbiased(device: torch.device) -> None:
    """A thousand steps far below half a unit in the last place add up."""
    precision = Precision(weights=torch.bfloat16, stochastic_rounding=StochasticRounding(seed=3))
    table = DynamicEmbeddingBags(
        [DynamicSpec(64, 64, initializer=Normal(1.0, 0.0))],
        optim.SGD(lr=1e-4),
        precision=precision,
        device=device,
    )
    ids, offsets = torch.arange(32, device=device), torch.arange(33, device=device)
    for _ in range(1000):
        table(ids, offsets).sum().backward()
    rows = table.table_rows(0)["weight"][table.find(0, ids)].float()
    assert abs(float(rows.mean()) - 0.9) < 0.01


@pytest.mark.parametrize("gradient", [optim.Gradient.SPARSE, optim.Gradient.DENSE])
def test_external_optimizer(device: torch.device, gradient: optim.Gradient) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = _keys(generator, 60)
    dynamic = DynamicEmbeddingBags(
        [DynamicSpec(100, 8), DynamicSpec(100, 8)],
        optim.External(gradient=gradient),
        device=device,
    )
    twins = _Twins(dynamic, keys)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dynamic, twins.plain)]
    for _ in range(5):
        ids, offsets = _batch(generator, keys, 20)
        rows = torch.searchsorted(twins.keys, ids)
        out = dynamic(ids.to(device), offsets.to(device))
        want = twins.plain(rows.to(device), offsets.to(device))
        assert torch.equal(out, want)
        for result, optimizer in zip((out, want), optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
        twins.check_rows()


def test_states_of_an_outside_optimizer_begin_anew(device: torch.device) -> None:
    """A key that takes the row of another is trained as in a table that never had that one."""
    generator = torch.Generator().manual_seed(9)
    small, large = (
        DynamicEmbeddingBags(
            [DynamicSpec(capacity, 4, name="a", initializer=Normal()), DynamicSpec(64, 4)],
            optim.External(gradient=optim.Gradient.DENSE),
            feature_tables=[1, 0],
            device=device,
        )
        for capacity in (32, 320)
    )
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (small, large)]
    small.track_optimizer_state(optimizers[0])
    for step in range(8):
        # Other keys every time, so that all of them find their row as first drawn.
        ids = (step * 100 + torch.randperm(64, generator=generator)[:32]).to(device)
        ids = torch.cat([torch.arange(10, 20, device=device), ids])
        offsets = torch.cat([torch.arange(0, 10), torch.arange(10, 43, 3)[:11]]).to(device)
        offsets[-1] = ids.numel()
        outs = [table(ids, offsets) for table in (small, large)]
        torch.testing.assert_close(*outs)
        for out, optimizer in zip(outs, optimizers, strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    assert small.stats()["a"]["evicted"] > 0
    keys = small.index.export(0).keys
    rows = [m.table_rows(0)["weight"].detach()[m.find(0, keys)] for m in (small, large)]
    torch.testing.assert_close(*rows)
    with pytest.raises(ValueError, match="among its own"):
        small.track_optimizer_state(optimizers[1])


@pytest.mark.parametrize(
    ("optimizer", "dims"),
    [
        (None, (2, 2)),
        (None, (2, 4)),
        (optim.External(), (2, 2)),
        (optim.SGD(1.0, deferred=True), (2, 2)),
    ],
)
def test_accumulated_gradients_of_evicted_keys_leave_new_keys_alone(
    optimizer: optim.Optimizer | None, dims: tuple[int, int], device: torch.device
) -> None:
    specs = [DynamicSpec(32, dim, initializer=Constant(0.0)) for dim in dims]
    table = DynamicEmbeddingBags(specs, optimizer, device=device)
    step = torch.optim.SGD([table.weights], lr=1.0).step
    if optimizer is not None and optimizer.deferred:
        step = FusedOptimizer.of(table).step
    for first in (0, 100):
        ids = torch.arange(first, first + 32, device=device).repeat(2)
        table(ids, torch.arange(65, device=device)).sum().backward()
    step()
    rows = [table.table_rows(t)["weight"][table.find(t, ids[:32])] for t in (0, 1)]
    assert all((row == -1.0).all() for row in rows)
    assert int(table.dropped_updates) == 0


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.External()])
def test_ids_overwritten_before_their_backward_raise(
    device: torch.device, optimizer: optim.Optimizer
) -> None:
    """As in dense tables: backward looks the keys up again, and would find those of another."""
    table = DynamicEmbeddingBags([DynamicSpec(64, 4)], optimizer, device=device)
    ids, offsets = torch.tensor([5, 6], device=device), torch.tensor([0, 2], device=device)
    out = table(ids, offsets)
    ids.copy_(torch.tensor([7, 8]))
    out = out + table(ids, offsets)
    with pytest.raises(RuntimeError, match="changed in place before its backward"):
        out.sum().backward()


def test_variable_batch_sizes(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = _keys(generator, 40)
    dynamic = DynamicEmbeddingBags(
        [DynamicSpec(64, 4), DynamicSpec(64, 8)], feature_tables=[0, 1, 1], device=device
    )
    twins = _Twins(dynamic, keys)
    sizes = [[2, 3], [1, 0], [4, 2]]
    ids, offsets = _batch(generator, keys, 12)
    rows = torch.searchsorted(twins.keys, ids)
    out = dynamic(ids.to(device), offsets.to(device), batch_sizes=sizes)
    want = twins.plain(rows.to(device), offsets.to(device), batch_sizes=sizes)
    assert torch.equal(out, want)
    for result in (out, want):
        result.square().sum().backward()
    twins.check_rows()


def test_gradient_of_sample_weights(device: torch.device) -> None:
    """Of ids that are there, and of those that read `missing`."""
    generator = torch.Generator().manual_seed(6)
    spec = DynamicSpec(32, 4, eviction="none", default_value=0.5)
    table = DynamicEmbeddingBags([spec], optim.SGD(lr=0.1), device=device)
    ids = torch.arange(50, device=device)
    offsets = torch.arange(0, 51, 5, device=device)
    weights = torch.rand(50, generator=generator).to(device).requires_grad_()
    out = table(ids, offsets, weights)
    slots = table.find(0, ids)
    rows = torch.full((50, 4), 0.5, device=device)
    rows[slots >= 0] = table.table_rows(0)["weight"][slots[slots >= 0]]
    rows.requires_grad_()
    copy = weights.detach().clone().requires_grad_()
    want = (rows * copy[:, None]).view(10, 5, 4).sum(1)
    assert int((slots < 0).sum()) == 18
    torch.testing.assert_close(out, want)
    grad = torch.randn(out.shape, generator=generator).to(device)
    out.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(weights.grad, copy.grad)
    trained = table.table_rows(0)["weight"][slots[slots >= 0]]
    torch.testing.assert_close(trained, (rows - 0.1 * rows.grad)[slots >= 0].detach())

    table.eval()
    before = table.table_rows(0)["weight"].clone()
    weights.grad = copy.grad = None
    out = table(ids, offsets, weights)
    rows = rows.detach()
    rows[slots >= 0] = trained
    want = (rows * copy[:, None]).view(10, 5, 4).sum(1)
    torch.testing.assert_close(out, want)
    out.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(weights.grad, copy.grad)
    assert torch.equal(before, table.table_rows(0)["weight"]), "eval trains nothing"
    assert table.step == 1


@pytest.mark.parametrize("training", [True, False])
def test_sample_weights_of_two_lookups_in_one_loss(device: torch.device, training: bool) -> None:
    """Where no key left, the second backward reads the rows that the first one has updated."""
    spec = DynamicSpec(64, 4, initial_capacity=32, default_value=0.5)
    table = DynamicEmbeddingBags([spec], optim.SGD(lr=0.1), device=device)
    ids, offsets = torch.arange(4, device=device), torch.arange(0, 5, 2, device=device)
    table(ids, offsets).sum().backward()
    rows = table.table_rows(0)["weight"][table.find(0, ids)].clone()
    table.train(training)
    weights = [torch.full((4,), value, device=device, requires_grad=True) for value in (1.0, 2.0)]
    first, second = (table(ids, offsets, given) for given in weights)
    table.train()
    table(torch.arange(100, 140, device=device), torch.tensor([0, 40], device=device))  # it grows
    second.backward(torch.full_like(second, 3.0))
    torch.testing.assert_close(weights[1].grad, 3.0 * rows.sum(1))
    if training:
        rows -= 0.1 * 2.0 * 3.0
    first.backward(torch.full_like(first, 3.0))
    torch.testing.assert_close(weights[0].grad, 3.0 * rows.sum(1))
    if training:
        rows -= 0.1 * 1.0 * 3.0
    now = table.table_rows(0)["weight"][table.find(0, ids)]
    torch.testing.assert_close(now, rows)
    assert int(table.dropped_updates) == 0


def test_same_bytes_on_any_number_of_threads(thread_counts: list[int]) -> None:
    """Growth, then eviction; index and rows."""
    results: list[Any] = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(8)
        table = DynamicEmbeddingBags(
            [DynamicSpec(2000, 8, initial_capacity=100)], optim.RowwiseAdagrad(lr=0.1), seed=0
        )
        for _ in range(12):
            ids = torch.randint(0, 4000, (1500,), generator=generator)
            table(ids, torch.arange(1501)).square().sum().backward()
        assert table.stats()["table_0"]["evicted"] > 0
        results.append(snapshots.take(table))
    first, *others = results
    for other in others:
        for name in ("tags", "entries"):
            assert torch.equal(first["index"][name][0], other["index"][name][0])
        for mine, theirs in zip(first["rows"][0], other["rows"][0], strict=True):
            assert torch.equal(mine, theirs)
