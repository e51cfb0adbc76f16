"""Cells of kind time: what happens to the other arms if one cannot be measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.config.schema import (
    Config,
    Distribution,
    Format,
    Mode,
    TimingConfig,
    WorkloadConfig,
)
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, Task
from experiments.contenders.tables import BatchedTables
from experiments.measure import timing
from experiments.measure.session import Session
from experiments.workloads.workload import Batch, make_pool, table_shapes


class RefusesFullBatches(BatchedTables):
    """Prepares the small batch of the check only."""

    def prepare(self, batch: Batch) -> Any:
        if batch.gradient.size(0) > timing.CHECKED_BATCH:
            raise ValueError("this batch cannot be prepared")
        return super().prepare(batch)


def test_an_arm_that_cannot_prepare_its_batches_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(name: str, task: Task) -> Contender:
        return RefusesFullBatches(task) if name == "managed" else registry.build(name, task)

    monkeypatch.setattr(timing, "build", build)
    work = WorkloadConfig(T=2, E=50, D=4, B=2 * timing.CHECKED_BATCH, L=2)
    config = Config(name="x", timing=TimingConfig(pool=2, warmup=0, max_rounds=1))
    cell = Cell("sweep", "", work, (Arm("managed"), Arm("tbe")))
    records = timing.measure_cell(cell, Session(config, torch.device("cpu"), "run"), 1.0)
    by_arm = {record["arm"]: record for record in records}
    assert by_arm["managed"]["status"] == "error"
    assert by_arm["managed"]["reason"].startswith("ValueError: this batch cannot be prepared")
    assert by_arm["tbe"]["status"] == "ok"
    assert len(by_arm["tbe"]["samples"]["step"]) == 2


def test_a_trace_of_fewer_batches_than_the_pool_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("item\n" + "".join(f"{number % 7}\n" for number in range(40)))
    work = WorkloadConfig(
        distribution=Distribution.trace, file=str(path), format=Format.csv, T=1, E=7, D=4, B=16
    )
    config = Config(name="x", timing=TimingConfig(pool=8, warmup=1, min_rounds=3, max_rounds=3))
    cell = Cell("sweep", "", work, (Arm("cached_lru", cache=1.0), Arm("tbe")))
    session = Session(config, torch.device("cpu"), "run")
    for record in timing.measure_cell(cell, session, 1.0):
        assert (record["status"], record["pool_batches"]) == ("ok", 2), record["reason"]
    pool = make_pool(work, table_shapes(work), 8, 1)
    contender = registry.build(
        "tbe", Task(table_shapes(work), config.optimizer, 0.1, session.device)
    )
    phases = timing.whole_steps(contender, pool)
    assert phases["forward"](7).shape == (16, 4)  # as the gate calls it


def test_a_mode_without_a_clock_is_unsupported_and_leaves_the_others() -> None:
    work = WorkloadConfig(T=1, E=50, D=4, B=8, L=2)
    modes = [Mode.graph, Mode.hot]  # a CPU has no clock of the first
    config = Config(name="x", timing=TimingConfig(modes=modes, pool=2, warmup=0, max_rounds=1))
    cell = Cell("sweep", "", work, (Arm("tbe"),))
    records = timing.measure_cell(cell, Session(config, torch.device("cpu"), "run"), 1.0)
    assert [(r["mode"], r["status"]) for r in records] == [("graph", "unsupported"), ("hot", "ok")]
    assert "mode graph" in records[0]["reason"]


def test_counters_are_those_of_one_pass_over_all_batches() -> None:
    steps = [9, 9]
    contender: Any = SimpleNamespace(
        counters=lambda: {"lookups": len(steps)}, reset_counters=steps.clear
    )
    assert timing.counting_pass(contender, steps.append, 3) == {"lookups": 3}
    assert steps == [0, 1, 2]
    contender.counters = dict
    assert timing.counting_pass(contender, steps.append, 3) == {}
    assert steps == [0, 1, 2]
