"""Tensor-train tables in parts over ranks train as they do in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib import optim
from emblib.collections.configs import EmbeddingBagConfig
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard
from emblib.sharding.tensor_train import SharedCores, sum_over_owners
from emblib.specs import Pooling
from emblib.storage import TensorTrain
from tests.sharding import worlds
from tests.sharding.sharded_cases import Case, make_sharded, make_source, sequences, train

SUM, MEAN = Pooling.SUM, Pooling.MEAN
# By rows, of which core 0 has 4 * 6; by columns, of which it has 2 * 4 or more.
KINDS = {
    2: TensorTrain((6,), (8, 8), (4, 4)),
    3: TensorTrain((5, 4), (8, 4, 2), (4, 2, 2)),
    4: TensorTrain((5, 4, 2), (8, 2, 2, 2), (4, 2, 2, 1)),
}
OPTIMIZERS = {
    "sgd": optim.SGD(0.5),
    "adam": optim.Adam(0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(0.5),
}


def _tables(cores: int, data_type: torch.dtype = torch.float32) -> Any:
    kind = KINDS[cores]
    small = TensorTrain((2, 2))
    options: dict[str, Any] = {"data_type": data_type}
    both = ("f1", "f2")
    return (
        EmbeddingBagConfig(60, 16, "t0", ("f0",), pooling=SUM, storage=kind, **options),
        EmbeddingBagConfig(57, 16, "t1", both, pooling=MEAN, storage=kind, **options),
        EmbeddingBagConfig(14, 16, "t2", ("f0",), pooling=SUM, storage=small, **options),
        EmbeddingBagConfig(20, 8, "t3", ("f3",), pooling=SUM),
    )


# A plan spreads the two halves of a row whatever number of cores they have.
@pytest.mark.parametrize(("cores", "size"), [(3, 1), (3, 3), (3, 4), (2, 2), (4, 4)])
@pytest.mark.parametrize("plan", ["rw", "cw", "grid", "twrw"])
def test_parts_train_as_the_whole(cores: int, plan: str, size: int) -> None:
    local = 2 if size == 4 else size
    case = Case(_tables(cores), (plan,) * 4, local_size=local, tolerance=2e-5)
    assert set(worlds.run(size, train, case)) == {"equal"}


@pytest.mark.parametrize("plan", ["rw", "tw", "twrw"])
def test_projected_rows_train_as_the_whole(plan: str) -> None:
    kind = TensorTrain.projected(3)
    tables = tuple(replace(t, storage=kind) for t in _tables(3)[:2])
    case = Case(tables, (plan,) * 2, optimizer=optim.Adagrad(0.1), tolerance=2e-5)
    worlds.run(3, train, case)


@pytest.mark.parametrize(("name", "size"), [("sgd", 2), ("adam", 4), ("rowwise_adagrad", 3)])
def test_every_optimizer(name: str, size: int) -> None:
    case = Case(_tables(3), ("rw",) * 4, optimizer=OPTIMIZERS[name], tolerance=1e-4)
    worlds.run(size, train, case)


@pytest.mark.parametrize("batches", [(0, 3, 0, 2), (7, 0, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("pooled", [True, False])
def test_batches_may_differ_and_be_empty(batches: Any, *, pooled: bool) -> None:
    configs = _tables(3) if pooled else sequences(_tables(3))
    for size in (2,) if batches[0] else (4,):
        case = Case(configs, ("rw", "rw", "tw", "rw"), batches=batches, tolerance=2e-5)
        worlds.run(size, train, case)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_parts_on_one_rank_and_any_order(size: int) -> None:
    """Four shards of one table by rows and columns, on ranks that have one, two or none."""
    owners = (0, size - 1, size - 1, 0)
    spans = [((0, 24), (0, 8)), ((0, 24), (8, 16)), ((24, 60), (0, 8)), ((24, 60), (8, 16))]
    shards = tuple(Shard(rank, *span) for rank, span in zip(owners, spans, strict=True))
    case = Case(_tables(3), (shards, "rw", "dp", "tw"), tolerance=2e-5)
    worlds.run(size, train, case)


def _common_bits(ranks: RankGroup, case: Case) -> list[list[bytes]]:
    """Cores 1 and on of the first table, as this rank has them after a training run."""
    torch.manual_seed(0)
    sharded = make_sharded(case, ranks, make_source(case))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ranks.rank)
        batch = _batch(generator)
        sharded(batch).values().square().sum().backward()
    views = sharded.groups.views(0)
    names = [name for name in sorted(views) if name.startswith("cores.")][1:]
    assert {views[name].dtype for name in names} == {case.configs[0].data_type}
    return [[views[name].contiguous().view(torch.uint8).numpy().tobytes() for name in names]]


def _batch(generator: torch.Generator) -> Any:
    keys = ["f0", "f1", "f2", "f3"]
    ids = torch.randint(0, 9, (4 * 6,), generator=generator)
    return emblib.KeyedJaggedTensor(keys, ids, lengths=torch.full((4 * 3,), 2))


@pytest.mark.parametrize(
    ("cores", "plan", "dtype"),
    [
        *((2, "rw", torch.bfloat16), (2, "grid", torch.bfloat16), (4, "cw", torch.bfloat16)),
        *((3, plan, torch.bfloat16) for plan in ("rw", "cw", "grid", "tw")),
        *((3, "rw", torch.float16), (3, "grid", torch.float16)),
    ],
)
def test_parts_in_16_bits_train_as_the_whole(cores: int, plan: str, dtype: torch.dtype) -> None:
    """Within the roundings of values whose sums the ranks make in another order."""
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    tables = _tables(cores, dtype)
    case = Case(tables, (plan,) * 4, optimizer=optim.SGD(0.1), local_size=2, tolerance=tolerance)
    assert set(worlds.run(2, train, case)) == {"equal"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_cores_stay_equal_bit_by_bit(dtype: torch.dtype) -> None:
    case = Case(_tables(3, dtype), ("rw",) * 4, optimizer=optim.Adam(0.1))
    first, *others = worlds.run(3, _common_bits, case)
    assert first[0]
    assert all(other == first for other in others)


def _sums(ranks: RankGroup, numel: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(ranks.rank))
    return sum_over_owners(values, ranks, range(ranks.size))


@pytest.mark.parametrize("numel", [0, 1, 3, 1000])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks(numel: int, size: int) -> None:
    want = torch.zeros(numel)
    for rank in range(size):
        want += torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    for found in worlds.run(size, _sums, numel):
        assert torch.equal(found, want)


def _dense_gradients(ranks: RankGroup, case: Case) -> list[Tensor]:
    """Gradients of the cores of the first table, which no optimizer of ours has taken."""
    sharded = make_sharded(case, ranks, make_source(case))
    sharded(_batch(torch.Generator().manual_seed(ranks.rank))).values().sum().backward()
    return [p.grad for p in sharded.groups.parameters_of(0).values() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_without_a_fused_optimizer_have_summed_gradients(dtype: torch.dtype) -> None:
    case = Case(_tables(3, dtype), ("rw",) * 4, optimizer=optim.External())
    (whole,) = worlds.run(1, _whole_gradients, case)
    parts = worlds.run(2, _dense_gradients, case)
    for k in (1, 2):
        assert torch.equal(parts[0][k], parts[1][k])
        torch.testing.assert_close(parts[0][k], whole[k])
    torch.testing.assert_close(torch.cat([grads[0] for grads in parts]), whole[0])


def _whole_gradients(ranks: RankGroup, case: Case) -> list[Tensor]:
    """The same in one process, for both batches."""
    source = make_source(case)
    for rank in range(2):
        batch = _batch(torch.Generator().manual_seed(rank))
        source(batch).values().sum().backward()
    return [p.grad for p in source.groups.parameters_of(0).values() if p.grad is not None]


def test_wrong_plans_are_refused() -> None:
    shards = (Shard(0, (0, 24), (0, 16)), Shard(0, (24, 60), (0, 16)))
    case = Case(_tables(3), (shards, "tw", "tw", "tw"), optimizer=optim.External())
    with pytest.raises(worlds.RankError, match="only a fused optimizer can add up"):
        worlds.run(1, _dense_gradients, case)
    uneven = (Shard(0, (0, 20), (0, 16)), Shard(0, (20, 60), (0, 16)))
    with pytest.raises(worlds.RankError, match=r"multiple"):
        worlds.run(1, _dense_gradients, Case(_tables(3), (uneven, "tw", "tw", "tw")))


def test_half_a_backward_pass_is_told() -> None:
    shared = SharedCores("t", RankGroup.single(), [0], 2)
    grads = [nn.Parameter(torch.ones(2, 2)).detach(), torch.ones(3)]
    used: list[list[Tensor]] = []
    shared.adder_of(0)(grads, used.append)
    assert not used
    shared.adder_of(1)(grads, used.append)
    assert [u[1].tolist() for u in used] == [[2.0] * 3] * 2
    shared.adder_of(1)(grads, used.append)
    with pytest.raises(RuntimeError, match="the backward of one ran twice"):
        shared.adder_of(1)(grads, used.append)
