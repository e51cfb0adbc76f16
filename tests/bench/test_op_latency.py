"""Latency of single operations: lookup, grouping, update, tensor-train rows, cache; and of Python.

`python -m pytest tests/bench --benchmark-enable --benchmark-only` times them; without these words
each runs once. `python run.py +experiment=micro` keeps the times. Every one is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import emblib
from emblib.ops import cache, primitives
from emblib.ops.codes import CACHE_POLICY, POOLING
from emblib.ops.tbe import group as group_lookups
from tests.bench.conftest import EXECUTIONS, Latency

pytest.importorskip("pytest_benchmark")

LR = 0.1
OPTIMIZERS = {
    "sgd": emblib.optim.SGD,
    "rowwise_adagrad": emblib.optim.RowwiseAdagrad,
    "adam": emblib.optim.Adam,
}


@dataclass(frozen=True)
class Size:
    """T tables of `rows` rows; B bags of L lookups each."""

    T: int
    rows: int
    D: int
    B: int
    L: int

    @property
    def lookups(self) -> int:
        return self.T * self.B * self.L

    def facts(self) -> dict[str, int]:
        return {"T": self.T, "E": self.rows, "D": self.D, "B": self.B, "L": self.L}


SIZES = {
    "one lookup": Size(1, 1000, 16, 1, 1),
    "small": Size(4, 10_000, 64, 64, 5),
    "medium": Size(8, 50_000, 64, 512, 10),
}
sized = pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))


@dataclass(frozen=True)
class Batches:
    """Distinct batches of uniform ids."""

    indices: list[Tensor]
    offsets: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, size: Size, device: torch.device) -> Batches:
        generator = torch.Generator().manual_seed(1)
        return cls(
            [
                torch.randint(size.rows, (size.lookups,), generator=generator).to(device)
                for _ in range(EXECUTIONS)
            ],
            torch.arange(0, size.lookups + 1, size.L, device=device),
            torch.randn(size.B, size.T * size.D, generator=generator).to(device),
        )


def tables(size: Size, device: torch.device, **options: Any) -> emblib.TableBatchedEmbeddingBags:
    specs = [emblib.TableSpec(size.rows, size.D)] * size.T
    optimizer = options.pop("optimizer", emblib.optim.SGD)(LR)
    return emblib.TableBatchedEmbeddingBags(specs, optimizer, device=device, **options)


def pooled(weights: list[Tensor], batches: Batches, number: int, size: Size) -> Tensor:
    """By plain PyTorch, [B, T * D]."""
    each = batches.indices[number].view(size.T, -1)
    starts = torch.arange(0, size.B * size.L, size.L, device=each.device)
    outputs = [
        functional.embedding_bag(ids, w, starts, mode="sum")
        for ids, w in zip(each, weights, strict=True)
    ]
    return torch.cat(outputs, dim=1)


@sized
def test_lookup(latency: Latency, size: Size) -> None:
    module, batches = tables(size, latency.device), Batches.of(size, latency.device)
    with torch.no_grad():
        found = module(batches.indices[0], batches.offsets)
        torch.testing.assert_close(found, pooled(module.table_weights(), batches, 0, size))
        latency(
            "lookup",
            lambda n: module(batches.indices[n], batches.offsets),
            lookups=size.lookups,
            **size.facts(),
        )


@sized
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_step(latency: Latency, size: Size, optimizer: str) -> None:
    """Forward, backward, update."""
    module = tables(size, latency.device, optimizer=OPTIMIZERS[optimizer])
    batches = Batches.of(size, latency.device)
    before = [w.detach().clone() for w in module.table_weights()]

    def step(number: int) -> None:
        module(batches.indices[number], batches.offsets).backward(batches.gradient)

    step(0)
    if optimizer == "sgd":
        leaves = [w.clone().requires_grad_() for w in before]
        pooled(leaves, batches, 0, size).backward(batches.gradient)
        for w, leaf in zip(module.table_weights(), leaves, strict=True):
            torch.testing.assert_close(w, leaf.detach() - LR * leaf.grad)
    latency(f"step, {optimizer}", step, lookups=size.lookups, optimizer=optimizer, **size.facts())


@pytest.mark.parametrize("lookups", [1, 1024, 65536])
def test_group(latency: Latency, lookups: int) -> None:
    rows = 100_000
    size = Size(1, rows, 1, lookups, 1)
    keys = Batches.of(size, latency.device).indices
    unique, _, _, count = primitives.group(keys[0], rows)
    torch.testing.assert_close(unique[: int(count)], keys[0].unique())
    latency("group", lambda n: primitives.group(keys[n], rows), lookups=lookups, E=rows)


@pytest.mark.parametrize("rank", [8, 32])
@pytest.mark.parametrize("phase", ["forward", "step"])
def test_tensor_train(latency: Latency, rank: int, phase: str) -> None:
    size = Size(1, 50_000, 64, 256, 5)
    spec = emblib.TTSpec(size.rows, size.D, ranks=(rank, rank))
    module = emblib.TTEmbeddingBag(spec, emblib.optim.SGD(LR), device=latency.device)
    batches = Batches.of(size, latency.device)
    with torch.no_grad():
        found = module(batches.indices[0], batches.offsets)
        expected = pooled([module.to_dense()], batches, 0, size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def forward(number: int) -> None:
        with torch.no_grad():
            module(batches.indices[number], batches.offsets)

    def step(number: int) -> None:
        module(batches.indices[number], batches.offsets).backward(batches.gradient)

    works: dict[str, Callable[[int], None]] = {"forward": forward, "step": step}
    latency(f"tensor-train, {phase}", works[phase], lookups=size.lookups, rank=rank, **size.facts())


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("held", ["all", "tenth"])
def test_cache_plan(latency: Latency, policy: str, held: str) -> None:
    """Where each distinct row of a batch goes; nothing is moved."""
    rows, lookups, device = 100_000, 4096, latency.device
    sets = 2 * rows // cache.WAYS if held == "all" else rows // 10 // cache.WAYS
    tags = torch.full((sets, cache.WAYS), cache.EMPTY, dtype=torch.int64, device=device)
    code = CACHE_POLICY[policy]
    counts = torch.zeros(rows if policy == "lfu" else 0, dtype=torch.int32, device=device)
    features = torch.tensor([[0, 0, rows, 4, 0, 1, 0, 4]], device=device)
    state = [tags, torch.full_like(tags, -1), counts]
    counters = torch.zeros((2, len(cache.COUNTERS)), dtype=torch.int64, device=device)
    clock = torch.zeros(2, dtype=torch.int64, device=device)
    batches = Batches.of(Size(1, rows, 1, lookups, 1), device)
    groups = [group_lookups(features, ids, batches.offsets, rows) for ids in batches.indices]

    def plan(number: int) -> tuple[Tensor, Tensor]:
        clock.add_(1)  # a batch enters, and those before it have left
        g = groups[number]
        return cache.plan_(*state, counters, clock, features, g.rows, g.segments, g.count, code)

    slots, _ = plan(0)
    placed = slots[: int(groups[0].count)]
    here = placed >= 0
    assert torch.equal(tags.view(-1)[placed[here].long()], groups[0].rows[: placed.numel()][here])
    assert bool(here.any())
    latency(f"cache plan, {policy}", plan, lookups=lookups, E=rows, slots=sets * cache.WAYS)


def test_lookup_op(latency: Latency) -> None:
    """The op on one lookup, without the module: the difference from 'lookup[one lookup]'."""
    size = SIZES["one lookup"]
    device = latency.device
    module, batches = tables(size, device), Batches.of(size, device)
    (weights,) = module.table_weights()
    features = torch.tensor([[0, 0, size.rows, size.D, 0, 0, 0, 0]], device=device)

    def op(number: int) -> Tensor:
        return emblib.ops.tbe.tbe_lookup(
            [weights.detach().view(-1)],
            features,
            batches.indices[number],
            batches.offsets,
            None,
            None,
            None,
            POOLING["sum"],
            size.D,
            torch.float32,
        )

    torch.testing.assert_close(op(0), pooled([weights], batches, 0, size))
    latency("lookup, the op alone", op, lookups=size.lookups, **size.facts())
