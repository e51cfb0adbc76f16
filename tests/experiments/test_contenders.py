"""Every contender computes the same thing, and one that does not is found out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from experiments.config.schema import CONTENDERS, Optimizer, WorkloadConfig
from experiments.contenders import Task, Unsupported, build
from experiments.contenders.tables import BatchedTables
from experiments.contenders.tt import TTTables
from experiments.run.verify import Wrong, verify
from experiments.work.workload import Batch, TableShape, make_pool

SHAPES = (TableShape(7, 8), TableShape(400, 8), TableShape(90, 8))
WORK = WorkloadConfig(T=3, E=400, D=8, B=9, L=5, s=1.1)


def task(optimizer: Optimizer = Optimizer.sgd, tt_tables: int = 3) -> Task:
    return Task(SHAPES, optimizer, 0.05, torch.device("cpu"), rank=6, tt_tables=tt_tables)


def batches(count: int = 1) -> tuple[Batch, ...]:
    return make_pool(WORK, SHAPES, count, seed=2).batches


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_agree_with_plain_pytorch(name: str, optimizer: Optimizer) -> None:
    if (name, optimizer) == ("torch", Optimizer.rowwise_adagrad):
        with pytest.raises(Unsupported, match="no row-wise Adagrad"):
            build(name, task(optimizer))
        return
    verify(build(name, task(optimizer)), batches()[0])


@pytest.mark.parametrize("tt_tables", [1, 2])
def test_tt_leaves_the_smaller_tables_plain(tt_tables: int) -> None:
    contender = build("tt", task(tt_tables=tt_tables))
    assert isinstance(contender, TTTables)
    assert contender.compressed == {1: [1], 2: [1, 2]}[tt_tables]
    verify(contender, batches()[0])


def test_nbytes_of_plain_tables() -> None:
    dense = (7 + 400 + 90) * 8 * 4
    for name in ("tbe", "torch", "reference_tbe"):
        own = build(name, task()).nbytes()
        assert own.pop("cache", 0) == 0
        assert own == {"weights": dense, "optimizer_state": 0}
    for name in ("cached_lru", "disk_lfu"):  # rows and tags of 4 sets
        own = build(name, task()).nbytes()
        assert own["weights"] == dense
        assert own["cache"] > 4 * 32 * 8 * 4
    rowwise = build("tbe", task(Optimizer.rowwise_adagrad)).nbytes()
    assert rowwise["optimizer_state"] == (7 + 400 + 90) * 4


def test_nbytes_of_tt_are_those_of_its_cores_and_plain_tables() -> None:
    contender = build("tt", task(tt_tables=1))
    assert isinstance(contender, TTTables)
    (module,) = contender.modules
    ranks = (1, *module.spec.ranks, 1)
    cores = sum(
        p * a * q * b
        for p, q, a, b in zip(
            module.spec.row_factors, module.spec.dim_factors, ranks, ranks[1:], strict=False
        )
    )
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
    with pytest.raises(Wrong, match=what):
        verify(wrong(task()), batches()[0])
