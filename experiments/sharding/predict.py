"""What the planner's cost model says of the steps that are measured, and of larger worlds."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from emblib.collections import EmbeddingBagCollection
from emblib.sharding import ShardingPlan, World, planner
from experiments.config.schema import Scaling
from experiments.config.sweep import Cell
from experiments.contenders import Task, registry
from experiments.results.store import Record
from experiments.run.session import Session
from experiments.sharding.calibration import as_data, constants
from experiments.sharding.numbers import OURS
from experiments.work.workload import table_shapes


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
        """What a record says of it: nothing of contenders that have no plan."""
        if self.found is None or not contender.startswith(OURS):
            return {}
        here, scaling = self.cell.ranks, self.cell.scaling
        told = [self._step(contender, here, scaling, self.found)]
        if 1 < here <= self.cores:  # constants of links that no rank had to wait for a core on
            asked = self.session.config.sharding
            beyond = [ranks for ranks in asked.beyond if ranks > max(asked.worlds)]
            links = self.found.link_bytes_per_s  # between nodes nobody measured any
            costs = dataclasses.replace(self.found, network_bytes_per_s=links)
            told += [self._step(contender, ranks, scaling, costs) for ranks in beyond]
        return {"predicted": told, "calibration": as_data(self.found)}

    def _step(
        self, contender: str, ranks: int, scaling: Scaling, costs: planner.Calibration
    ) -> dict[str, Any]:
        """A step on `ranks` ranks: those that are here share its cores, others have one each."""
        # The batch that one rank has where this one is scaled from.
        whole = self.cell.workload.B * (self.cell.ranks if scaling is Scaling.strong else 1)
        batch = max(1, whole // ranks) if scaling is Scaling.strong else whole
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
    """The cores that all ranks together may use: each may have been given its own."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    every = session.team.exchange(mine)
    return len({core for cores in every for core in cores}) or os.cpu_count() or 1
