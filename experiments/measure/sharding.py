"""Measure cells of the kinds sharding and calibration; predict steps by the cost model.

All ranks of a cell run these functions together; `Session.sync` synchronises them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from emblib.collections import EmbeddingBagCollection
from emblib.sharding import ShardingPlan, World, planner
from emblib.sharding.planner import Calibration
from emblib.sharding.planner.measure import Sizes, calibrate
from experiments.config.schema import Scaling
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, Task
from experiments.contenders.sharded import ranks_of
from experiments.contenders.tables import optimizer_of
from experiments.machine.cpu import usable_cores
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.session import Session
from experiments.measure.timing import measure_cell, whole_steps
from experiments.results.store import Record
from experiments.timing.race import Phase
from experiments.workloads.workload import Pool, table_shapes

UNLIMITED_BYTES = 1 << 40  # memory of a rank that does not limit its plan
SMOKE_SIZES = Sizes(1 << 20, 1)  # sizes of a calibration in a smoke run


def calibrate_ranks(session: Session) -> Calibration:
    """Measure the constants of the cost model on the ranks of the session; a collective."""
    session.note("|calibrating")
    sizes = SMOKE_SIZES if session.config.timing.max_rows else Sizes()
    return calibrate(ranks_of(session.device), sizes)


def calibration_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return the record of the only arm, in a list; `seconds` is not used. A collective.

    Unless this rank failed, the record has `calibration` (the content of the calibration's file)
    and `nodes` (number of nodes).
    """
    outcome = Outcome(cell.arms[0])
    record: Record = {}
    with outcome.catching():
        nodes = ranks_of(session.device).nodes
        record = {"calibration": json.loads(calibrate_ranks(session).to_json()), "nodes": nodes}
        outcome.race_result.stop_reason = "calibrated"
    session.sync.share_failures({cell.arms[0].key: outcome})
    return [make_record(cell, outcome, session) | record]


@dataclass(frozen=True)
class Predictor:
    """A predictor of the steps of a cell's arms, by constants that its ranks have measured.

    Attributes:
        cell: cell of the arms.
        session: run and process.
        calibration: measured constants.
        num_cores: number of cores that all ranks together may use.
    """

    cell: Cell
    session: Session
    calibration: Calibration
    num_cores: int

    def predict(self, contender: str) -> Record:
        """Return `predicted` (a list of `_predict_step`) and `calibration` (its file's content).

        Return {} for a contender that is not a sharded one of emblib. Larger worlds are predicted
        only if the cell has several ranks, and a core for each.
        """
        if not contender.startswith(registry.SHARDED):
            return {}
        ranks, calibration = self.cell.ranks, self.calibration
        predicted = [self._predict_step(contender, ranks, calibration)]
        if 1 < ranks <= self.num_cores:  # else ranks waited for cores while links were measured
            worlds = self.session.config.sharding
            larger_worlds = [world for world in worlds.beyond if world > max(worlds.worlds)]
            links = calibration.link_bytes_per_s  # links between nodes were not measured
            costs = dataclasses.replace(calibration, network_bytes_per_s=links)
            predicted += [self._predict_step(contender, world, costs) for world in larger_worlds]
        return {"predicted": predicted, "calibration": json.loads(calibration.to_json())}

    def _predict_step(self, contender: str, ranks: int, calibration: Calibration) -> dict[str, Any]:
        """Predict a step of `ranks` ranks; a world larger than the cell's has a core per rank.

        Returns:
            `ranks`, `scaling`, `batch` (bags per rank and table); in seconds `step_s`, `compute_s`
            and `phases`, as `Planner.predict` defines them.
        """
        scaling = self.cell.scaling
        # The batch of one rank in a world of one rank.
        base_batch = self.cell.workload.B * (self.cell.ranks if scaling is Scaling.strong else 1)
        batch = max(1, base_batch // ranks) if scaling is Scaling.strong else base_batch
        contender_class: Any = registry.find(contender).load()
        shapes = table_shapes(self.cell.workload, scale=self.cell.rows_scale)
        config = self.session.config
        task = Task(shapes, config.optimizer, config.lr, self.session.device)
        world = World(ranks, contender_class.ranks_per_node(ranks))
        num_cores = self.num_cores if ranks == self.cell.ranks else ranks
        topology = planner.Topology(
            *world,
            memory=UNLIMITED_BYTES,
            device=self.session.device.type,
            max_ranks_at_once=max(1, num_cores * world.local_size // ranks),
            calibration=calibration,
        )
        collection = EmbeddingBagCollection(
            contender_class.configs(task), device="meta", optimizer=optimizer_of(task)
        )
        plan = ShardingPlan({"": contender_class.plan(collection, world)}, world)
        pooling = planner.TableConstraints(pooling_factor=float(self.cell.workload.L))
        constraints = dict.fromkeys(
            (table.name for table in collection.embedding_bag_configs()), pooling
        )
        predicted_step = planner.Planner(topology, batch, constraints).predict(collection, plan)
        return {
            "ranks": ranks,
            "scaling": scaling.value,
            "batch": batch,
            "step_s": predicted_step.step_s,
            "compute_s": predicted_step.compute_s,
            "phases": dict(predicted_step.phases),
        }


def sharding_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record per arm and mode, with the parts of a step as phases. A collective.

    If `sharding.beyond` names worlds, the records of the first replicate have predictions too
    (`Predictor.predict`); other replicates would have the same. The ranks measure the constants for
    it first, before anything else uses caches or memory. `seconds` is the budget for timing all
    arms.
    """
    predictor = None
    if session.config.sharding.beyond and not session.replicate:
        calibration = calibrate_ranks(session)
        cores = {
            core for rank_cores in session.sync.exchange(usable_cores()) for core in rank_cores
        }
        predictor = Predictor(cell, session, calibration, len(cores))
    return [
        record
        | {"scaling": cell.scaling.value}
        | (predictor.predict(record["contender"]) if predictor else {})
        for record in measure_cell(cell, session, seconds, steps_and_parts)
    ]


def steps_and_parts(contender: Contender, pool: Pool) -> dict[str, Phase]:
    """Return forward, step, and the parts of a step of a contender as phases. A collective."""
    parts_by_batch = [contender.parts(contender.prepare(batch)) for batch in pool.batches]
    return whole_steps(contender, pool) | {
        name: partial(_run_nth, [parts[name] for parts in parts_by_batch])
        for name in parts_by_batch[0]
    }


def _run_nth(calls_by_batch: list[Callable[[], object]], batch_number: int) -> object:
    return calls_by_batch[batch_number]()
