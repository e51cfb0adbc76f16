"""Measure cells of the kinds sharding and calibration, and predict steps with the cost model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from emblib.collections import EmbeddingBagCollection
from emblib.sharding import ShardingPlan, World, planner
from emblib.sharding.planner import Calibration
from emblib.sharding.planner.measure import Sizes, calibrate
from experiments.config.schema import Scaling
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, Task
from experiments.contenders.sharded import ranks_of
from experiments.measure.outcome import Outcome, describe
from experiments.measure.session import Session
from experiments.measure.timing import measure_cell, whole_steps
from experiments.results.store import Record
from experiments.timing.race import Phase
from experiments.workloads.workload import Pool, table_shapes

SMALL = Sizes(1 << 20, 1)  # of a smoke run


def constants(session: Session) -> Calibration:
    """Measure the cost model's constants on the ranks of this session; a collective."""
    session.note("|calibrating")
    sizes = SMALL if session.config.timing.max_rows else Sizes()
    return calibrate(ranks_of(session.device), sizes)


def as_data(calibration: Calibration) -> Record:
    """Convert to what `Calibration.load` reads."""
    data: Record = json.loads(calibration.to_json())
    return data


def calibration_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record with the constants; the planner decides how long that takes."""
    outcome = Outcome(cell.arms[0])
    record: Record = {}
    try:
        nodes = ranks_of(session.device).nodes
        record = {"calibration": as_data(constants(session)), "nodes": nodes}
        outcome.measured.stop_reason = "calibrated"
    except Exception as error:  # whatever it is becomes the row
        outcome.fail(error)
    session.sync.settle({cell.arms[0].key: outcome})
    return [describe(cell, outcome, session) | record | {"threads": torch.get_num_threads()}]


@dataclass(frozen=True)
class Predictor:
    """Predictions for the arms of a cell, from constants that its ranks have measured."""

    cell: Cell
    session: Session
    found: planner.Calibration | None  # none: nothing is predicted
    cores: int

    @classmethod
    def calibrated(cls, cell: Cell, session: Session) -> Predictor:
        """Measure the constants, where the experiment asks for predictions.

        In the first process of a cell only: the model is the same in each.
        """
        if not session.config.sharding.beyond or session.replicate:
            return cls(cell, session, None, 1)
        return cls(cell, session, constants(session), cores_of(session))

    def of(self, contender: str) -> Record:
        """Return the prediction for a contender; empty where it has no plan."""
        if self.found is None or not contender.startswith(registry.SHARDED):
            return {}
        here, scaling = self.cell.ranks, self.cell.scaling
        told = [self._step(contender, here, scaling, self.found)]
        if 1 < here <= self.cores:  # constants of links that no rank had to wait for a core on
            asked = self.session.config.sharding
            beyond = [ranks for ranks in asked.beyond if ranks > max(asked.worlds)]
            links = self.found.link_bytes_per_s  # links between nodes were not measured
            costs = dataclasses.replace(self.found, network_bytes_per_s=links)
            told += [self._step(contender, ranks, scaling, costs) for ranks in beyond]
        return {"predicted": told, "calibration": as_data(self.found)}

    def _step(
        self, contender: str, ranks: int, scaling: Scaling, costs: planner.Calibration
    ) -> dict[str, Any]:
        """Predict a step; measured worlds share this machine's cores, others have one per rank."""
        # The batch that one rank has where this one is scaled from.
        bags = self.cell.workload.B * (self.cell.ranks if scaling is Scaling.strong else 1)
        batch = max(1, bags // ranks) if scaling is Scaling.strong else bags
        entry: Any = registry.find(contender).load()
        task = self._task()
        world = World(ranks, entry.node_of(ranks))
        cores = self.cores if ranks == self.cell.ranks else ranks
        plan = ShardingPlan({"": entry.plan(task, world)}, world)
        topology = planner.Topology(
            *world,
            memory=1 << 40,  # nothing is asked of the memory
            device=self.session.device.type,
            processors=max(1, cores * world.local_size // ranks),
            calibration=costs,
        )
        collection = EmbeddingBagCollection(
            entry.configs(task), device="meta", optimizer=entry.optimizer_of(task)
        )
        limits = {
            config.name: planner.TableConstraints(pooling_factor=float(self.cell.workload.L))
            for config in collection.embedding_bag_configs()
        }
        step = planner.Planner(topology, batch, limits).predict(collection, plan)
        return {
            "ranks": ranks,
            "scaling": scaling.value,
            "batch": batch,
            "step_s": step.step_s,
            "compute_s": step.compute_s,
            "phases": dict(step.phases),
        }

    def _task(self) -> Task:
        config = self.session.config
        shapes = table_shapes(self.cell.workload, scale=self.cell.rows_scale)
        return Task(shapes, config.optimizer, config.lr, self.session.device)


def cores_of(session: Session) -> int:
    """Return how many cores all ranks together may use; each may be restricted to its own."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    every = session.sync.exchange(mine)
    return len({core for cores in every for core in cores}) or os.cpu_count() or 1


def sharding_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return a record per arm and mode, with the parts of a step and the prediction.

    The constants of the prediction are measured first, in this process and by the same ranks, while
    nothing else has touched the machine's caches or memory.
    """
    session.note("|calibrating")
    predictor = Predictor.calibrated(cell, session)
    records = measure_cell(cell, session, seconds, steps_and_parts)
    known = {"scaling": cell.scaling.value, "threads": torch.get_num_threads()}
    return [record | known | predictor.of(record["contender"]) for record in records]


def steps_and_parts(contender: Contender, pool: Pool) -> dict[str, Phase]:
    """Return whole steps, and the parts of a step that the contender can run separately.

    A contender that fails at its parts has failed: every phase of it says why.
    """
    phases = whole_steps(contender, pool)
    try:
        each = [contender.parts(contender.prepare(batch)) for batch in pool.batches]
    except Exception as error:
        return dict.fromkeys(phases, partial(_fail, error))
    return phases | {name: partial(_at, [parts[name] for parts in each]) for name in each[0]}


def _at(works: list[Callable[[], object]], number: int) -> object:
    return works[number]()


def _fail(error: Exception, number: int) -> object:
    raise error
