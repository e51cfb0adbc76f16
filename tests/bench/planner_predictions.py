"""Predicted and measured steps of sharded collections, over gloo on this machine.

    python -m tests.bench.planner_predictions

The ranks, of one thread each, measure the constants of the planner's cost model, and then run steps
under several plans in turn. Predicted / measured is printed per workload and plan, with the phases
of the prediction. Measured is the fastest of all rounds, on the slower rank: constants are minimums
too, so that other programs on the machine matter least. With `--realtime` messages and
steps are measured before all other programs, for some seconds, where the system allows that.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, optim
from emblib.sharding import RankGroup, ShardingPlan, World
from emblib.sharding.plan import plan_from_shapes
from emblib.sharding.planner import Calibration, Planner, TableConstraints, Topology
from emblib.sharding.planner.measure import Sizes, calibrate
from emblib.sharding.planner.simulate import compare
from emblib.sharding.sharding_types import (
    TableShape,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from tests.bench.local_ranks import run_ranks

# Constants that ranks measure together; processor time has the others.
_WAITING = ("exchange_s", "message_s", "copies_s", "blocks_s", "step_s", "link_bytes_per_s")


@dataclass(frozen=True)
class Workload:
    """Tables by rows, columns and ids per bag; and examples per rank."""

    tables: tuple[tuple[int, int, float], ...]
    batch: int


_MIXED = ((1000, 16, 1.0), (200_000, 64, 1.0), (50_000, 32, 5.0), (200_000, 128, 2.0))
WORKLOADS = {
    "26 tables, 1 id": Workload(((100_000, 64, 1.0),) * 26, 2048),
    "10 tables, 20 ids": Workload(((200_000, 64, 20.0),) * 10, 512),
    "12 mixed tables": Workload(_MIXED * 3, 2048),
    "26 tables, 64 examples": Workload(((1000, 32, 1.0),) * 26, 64),
}
PLANS = {
    "table-wise": lambda t, world: table_wise(t % world),
    "row-wise": lambda t, world: row_wise(),
    "column-wise": lambda t, world: column_wise(),
    "mixed": lambda t, world: [table_wise(t % world), row_wise(), column_wise()][t % 3],
    "data-parallel": lambda t, world: data_parallel(),
}


def main() -> None:
    """Print a line per workload and plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--calibration", type=Path, help="read the constants, or save them here")
    arguments = parser.parse_args()
    run_ranks(arguments.ranks, _rank, arguments)


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    path = arguments.calibration
    ranks = RankGroup()
    if path is not None and path.exists():
        constants = Calibration.load(path)
    else:
        constants = calibrate(ranks)
        if arguments.realtime:
            _schedule(os.SCHED_RR, 1)
            links = calibrate(ranks, Sizes(1 << 20, 5))
            _schedule(os.SCHED_OTHER, 0)
            constants = replace(constants, **{name: getattr(links, name) for name in _WAITING})
        if path is not None and rank == 0:
            constants.save(path)
    if rank == 0:
        print(constants.to_json(), flush=True)
    for name, workload in WORKLOADS.items():
        _compare(name, workload, ranks, constants, arguments)


def _schedule(policy: int, priority: int) -> None:
    """Set how the system schedules all threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def _compare(
    name: str,
    workload: Workload,
    ranks: RankGroup,
    constants: Calibration,
    arguments: argparse.Namespace,
) -> None:
    configs = [
        EmbeddingBagConfig(rows, dim, f"t{t}") for t, (rows, dim, _) in enumerate(workload.tables)
    ]
    module = EmbeddingBagCollection(configs, device="meta", optimizer=optim.SGD(0.01))
    limits = {
        f"t{t}": TableConstraints(pooling_factor=ids)
        for t, (_, _, ids) in enumerate(workload.tables)
    }
    topology = Topology.detect(ranks.size, ranks.local_size, device="cpu", calibration=constants)
    planner = Planner(topology, workload.batch, limits)
    world = World(ranks.size, ranks.local_size)
    shapes = {c.name: TableShape(c.num_embeddings, c.embedding_dim) for c in configs}
    plans = {}
    for kind, rule_of in PLANS.items():
        rules = {c.name: rule_of(t, ranks.size) for t, c in enumerate(configs)}
        plans[kind] = ShardingPlan({"": plan_from_shapes(shapes, rules, world)}, world)
    if arguments.realtime:
        _schedule(os.SCHED_RR, 1)
    points = compare(planner, module, plans, ranks, rounds=arguments.rounds)
    if arguments.realtime:
        _schedule(os.SCHED_OTHER, 0)
    if ranks.rank:
        return
    for point in points:
        phases = planner.predict(module, plans[point.name]).phases
        parts = ", ".join(f"{phase} {1e3 * s:.2f}" for phase, s in phases.items())
        print(
            f"{name}, {point.name}: predicted {1e3 * point.predicted_s:.2f} ms, measured "
            f"{1e3 * point.measured_s:.2f} ms, predicted / measured "
            f"{point.predicted_s / point.measured_s:.2f} ({parts})",
            flush=True,
        )


if __name__ == "__main__":
    main()
