"""Every contender computes the same thing, and one that does not is found out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from experiments.config.schema import Optimizer, WorkloadConfig
from experiments.contenders import registry
from experiments.contenders.base import (
    GRADIENT_ROUNDING,
    Task,
    first_update,
    update_rounding,
)
from experiments.contenders.registry import Unsupported, WrongResult, build
from experiments.contenders.tables import BatchedTables
from experiments.contenders.tt import TTTables
from experiments.measure.outcome import verify
from experiments.workloads.workload import Batch, TableShape, make_pool
from tests.compat.peer import peer_module, skip_without_peers

# What peers call of torch that is deprecated is not for this suite to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPES = (TableShape(7, 8), TableShape(400, 8), TableShape(90, 8))
WORK = WorkloadConfig(T=3, E=400, D=8, B=9, L=5, s=1.1)


def task(optimizer: Optimizer = Optimizer.sgd, tt_tables: int = 3) -> Task:
    return Task(SHAPES, optimizer, 0.05, torch.device("cpu"), rank=6, tt_tables=tt_tables)


def batches(count: int = 1) -> tuple[Batch, ...]:
    return make_pool(WORK, SHAPES, count, seed=2).batches


@pytest.mark.parametrize(
    "name", ["dynamic", "dynamic_new_5", "tiered_lru", "tt", "reference_tt", "tbe", "torch"]
)
def test_a_table_without_lookups_is_verified(name: str) -> None:
    lengths = torch.tensor([[0, 0], [2, 1], [1, 0]]).view(-1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    batch = Batch(torch.tensor([3, 3, 1, 2]), offsets, torch.randn(2, 24))
    new_keys = registry.find(name).new_keys
    verify(build(name, dataclasses.replace(task(), new_keys=new_keys)), batch)


@pytest.mark.parametrize("name", ["tiered_lru", "tiered_hybrid", "tiered_disk", "cached_lru"])
def test_the_bytes_of_a_table_are_those_of_all_its_tiers(name: str) -> None:
    shapes = (TableShape(2000, 16), TableShape(500, 8))
    for optimizer in (Optimizer.sgd, Optimizer.adagrad):
        tiers = build(name, dataclasses.replace(task(optimizer), shapes=shapes, cache=0.1))
        weights, states = (tiers.nbytes()[use] for use in ("weights", "optimizer_state"))
        assert 1 <= weights / (4 * (2000 * 16 + 500 * 8)) < 1.2  # with keys of the fast tier
        assert states == 0 if optimizer is Optimizer.sgd else states / weights > 0.9


CANNOT = {
    ("torch", Optimizer.rowwise_adagrad): "no row-wise Adagrad",
    ("torchrec_unsharded", Optimizer.rowwise_adagrad): "no row-wise Adagrad",
    ("tensorly", Optimizer.rowwise_adagrad): "no row-wise Adagrad",
    **{(f"fbgemm_{n}", o): "on CUDA only" for n in ("managed", "lru", "lfu") for o in Optimizer},
}


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize(
    "name",
    [name for name, entry in registry.entries().items() if not (entry.keyed or entry.served)],
)
def test_contenders_agree_with_plain_pytorch(name: str, optimizer: Optimizer) -> None:
    skip_without_peers(name)
    if (name, optimizer) in CANNOT:
        with pytest.raises(Unsupported, match=CANNOT[name, optimizer]):
            build(name, task(optimizer))
        return
    contender = build(name, task(optimizer))
    verify(contender, batches()[0])
    # Enough tables that sorting them by name would not give them in order.
    many = tuple(TableShape(30 + number, 8) for number in range(12))
    work = dataclasses.replace(WORK, T=12, E=42)
    wide = dataclasses.replace(task(optimizer, tt_tables=12), shapes=many)
    verify(build(name, wide), make_pool(work, many, 1, seed=3).batches[0])


def test_what_the_rounding_of_a_gradient_may_change() -> None:
    """A run once called a right contender wrong: Adagrad moves by -lr or lr for a tiny gradient."""
    size = torch.logspace(-8, 1, 200)
    gradients = torch.stack([size, -size])
    start = torch.zeros_like(gradients)
    update = first_update(Optimizer.adagrad, start, gradients, 0.05)
    allowed = update_rounding(Optimizer.adagrad, update, 0.05)
    for off in (GRADIENT_ROUNDING, -GRADIENT_ROUNDING):
        other = first_update(Optimizer.adagrad, start, gradients + off, 0.05)
        assert ((other - update).abs() <= 1.01 * allowed + 1e-6).all()
    assert (allowed[:, size > 2e-5] < 1e-3 * 0.05).all()
    still = torch.zeros(3)
    assert update_rounding(Optimizer.adagrad, still, 0.05).count_nonzero() == 0
    assert update_rounding(Optimizer.sgd, update, 0.05).count_nonzero() == 0


@pytest.mark.parametrize("tt_tables", [1, 2])
def test_tt_leaves_the_smaller_tables_plain(tt_tables: int) -> None:
    contender = build("tt", task(tt_tables=tt_tables))
    assert isinstance(contender, TTTables)
    assert contender.compressed == {1: [1], 2: [1, 2]}[tt_tables]
    verify(contender, batches()[0])


def test_nbytes_of_plain_tables() -> None:
    dense = (7 + 400 + 90) * 8 * 4
    for name in ("tbe", "torch"):
        own = build(name, task()).nbytes()
        assert own.pop("cache", 0) == 0
        assert own == {"weights": dense, "optimizer_state": 0}
    for name in ("cached_lru", "disk_lru"):  # rows and tags of 4 sets
        own = build(name, task()).nbytes()
        assert own["weights"] == dense
        assert own["cache"] > 4 * 32 * 8 * 4
    rowwise = build("tbe", task(Optimizer.rowwise_adagrad)).nbytes()
    assert rowwise["optimizer_state"] == (7 + 400 + 90) * 4


def test_nbytes_of_tt_are_those_of_its_cores_and_plain_tables() -> None:
    contender = build("tt", task(tt_tables=1))
    assert isinstance(contender, TTTables)
    (spec,) = contender.trains.tables
    ranks = spec.full_ranks
    cores = sum(
        p * a * q * b
        for p, q, a, b in zip(spec.row_factors, spec.dim_factors, ranks, ranks[1:], strict=False)
    )
    assert spec.nbytes == 4 * cores
    assert contender.nbytes()["weights"] == 4 * (cores + (7 + 90) * 8)


class Forgetful(BatchedTables):
    """Never updates."""

    def step(self, prepared: Any) -> None:
        self.forward(prepared)


class Careless(BatchedTables):
    """Updates with a slightly wrong gradient."""

    def step(self, prepared: Any) -> None:
        super().step((prepared[0], prepared[1], prepared[2] * 1.01))


class Shifted(BatchedTables):
    """Looks up the row before."""

    def prepare(self, batch: Batch) -> Any:
        indices = (batch.indices - 1).clamp(min=0)
        return super().prepare(dataclasses.replace(batch, indices=indices))


class NotFinite(BatchedTables):
    """Returns NaN."""

    def forward(self, prepared: Any) -> torch.Tensor:
        return super().forward(prepared) * torch.nan


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(Forgetful, "update"), (Careless, "update"), (Shifted, "forward"), (NotFinite, "forward")],
)
def test_a_wrong_contender_is_found_out(wrong: type[BatchedTables], what: str) -> None:
    with pytest.raises(WrongResult, match=what):
        verify(wrong(task()), batches()[0])


def test_fbgemm_is_asked_for_what_its_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA tables cannot be built here; what would be built them with can be seen."""
    fbgemm = peer_module("experiments.contenders.fbgemm")
    asked: list[tuple[list[Any], dict[str, Any]]] = []

    class Fake:
        def __init__(self, specs: list[Any], **options: Any) -> None:
            asked.append((specs, options))

        def split_embedding_weights(self) -> list[torch.Tensor]:
            return [torch.empty(s.rows, s.dim) for s in SHAPES]

    monkeypatch.setattr(fbgemm, "SplitTableBatchedEmbeddingBagsCodegen", Fake)
    cuda = dataclasses.replace(task(), device=torch.device("cuda"), cache=0.3)
    places = {"fbgemm": "DEVICE", "fbgemm_managed": "MANAGED", "fbgemm_lfu": "MANAGED_CACHING"}
    for name, place in places.items():
        build(name, cuda)
        specs, options = asked.pop()
        assert [s[:2] for s in specs] == [(s.rows, s.dim) for s in SHAPES]
        assert {(s[2].name, s[3].name) for s in specs} == {(place, "CUDA")}
        assert options["device"] == torch.device("cuda")
    assert (options["cache_algorithm"].name, options["cache_load_factor"]) == ("LFU", 0.3)


def test_fbgemm_gets_narrow_ids_while_they_can_count_all_rows() -> None:
    fbgemm = peer_module("experiments.contenders.fbgemm")
    assert fbgemm.id_type(task()) is torch.int32
    huge = dataclasses.replace(task(), shapes=(TableShape(2**30, 4), TableShape(2**30, 4)))
    assert fbgemm.id_type(huge) is torch.int64


def test_fbgemm_says_which_dimensions_it_has() -> None:
    peer_module("fbgemm_gpu")
    odd = dataclasses.replace(task(), shapes=(TableShape(9, 6),))
    with pytest.raises(Unsupported, match="D divisible by 4, got 6"):
        build("fbgemm", odd)


def test_torchrec_is_not_spread_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrec = peer_module("experiments.contenders.torchrec")
    monkeypatch.setattr(torchrec.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torchrec.dist, "get_world_size", lambda: 4)
    with pytest.raises(Unsupported, match="spread over 4"):
        build("torchrec", task())
    verify(build("torchrec_fused", task()), batches()[0])


@pytest.mark.parametrize("tt_tables", [1, 2])
def test_tensor_trains_that_compress_everything_say_so(tt_tables: int) -> None:
    peer_module("tltorch")
    for name in ("tensorly", "reference_tt"):
        with pytest.raises(Unsupported, match="compresses every table"):
            build(name, task(tt_tables=tt_tables))


def test_tensor_trains_have_the_same_cores() -> None:
    peer_module("tltorch")
    sizes = {name: build(name, task()).nbytes() for name in ("tt", "tensorly", "reference_tt")}
    assert sizes["tensorly"] == sizes["tt"] == sizes["reference_tt"]


@pytest.mark.parametrize("name", ["tt", "reference_tt"])
def test_a_rank_that_no_table_can_use_is_not_measured_under_its_name(name: str) -> None:
    high = dataclasses.replace(task(), rank=1000)
    with pytest.raises(Unsupported, match=r"rank 1000 is more than .* can use, which is \d+"):
        build(name, high)
    build(name, dataclasses.replace(high, shrunk=True))  # the report says that tables were shrunk
