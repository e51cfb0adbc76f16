"""The jobs of a run: each measures a cell in a fresh process, or reuses earlier records.

A cell is a workload with its arms (contenders); a job measures it once. `job_passes` orders the
jobs, and `earlier_jobs` finds the records that need not be measured again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import kinds
from experiments.config.schema import AXES, Config, Rerun
from experiments.config.sweep import SWEEP, Cell
from experiments.kinds.base import Repetition
from experiments.results.identity import point_key
from experiments.results.store import Record, read_records

START_SECONDS = 1.5  # for the start of a process, imports and first batches, on two cores
BLOCK_CELLS = 4  # number of cells per block; the processes of the cells of a block take turns
# Statuses of records that are reused: SETTLED_STATUSES by default, GOOD_STATUSES with rerun=failed.
# Once a missing package is installed, the point_key changes, so that the job is measured.
GOOD_STATUSES = ("ok", "unsupported", "missing")
SETTLED_STATUSES = (*GOOD_STATUSES, "oom", "timeout", "wrong")
JobKey = tuple[str, int]  # (point_key, replicate)


@dataclass(frozen=True)
class Job:
    """One measurement of a cell in a fresh process.

    Attributes:
        cell: cell to measure.
        replicate: number of the process among the cell's processes.
        order: position of the job in the run.
        cell_number: position of the cell in the experiment.
    """

    cell: Cell
    replicate: int
    order: int
    cell_number: int = 0

    def key(self, config: Config) -> JobKey:
        """Return the key by which a later run finds the records of the job."""
        packages = kinds.find(self.cell.kind).measurement.packages
        return point_key(self.cell, config, packages), self.replicate


def num_replicates(cell: Cell, config: Config) -> int:
    """Return the number of processes that measure a cell; 1 for kinds of `Repetition.ONCE`."""
    is_once = kinds.find(cell.kind).measurement.repetition is Repetition.ONCE
    return 1 if is_once else config.timing.replicates


def max_job_seconds(cell: Cell, config: Config) -> float:
    """Return about the longest time of a job in seconds, without the time for building tables.

    The warm-up of a cache may take longer. Kinds of `Repetition.TRAINED` have no limit: for them
    the result means nothing.
    """
    if kinds.find(cell.kind).measurement.repetition is Repetition.ONCE:
        return START_SECONDS
    timing = config.timing
    warmup_s = len(cell.arms) * timing.warmup_seconds
    return START_SECONDS + len(timing.modes) * (timing.cell_seconds + warmup_s)


def job_passes(cells: Sequence[Cell], config: Config) -> Iterator[list[Job]]:
    """Yield the jobs of a run pass by pass: first the headline's cells, then blocks of the others.

    A pass has a job for each cell of a block that still needs a process; the cells of a block take
    turns until each has all its processes. So a run that is short of time has fewer cells, not
    fewer processes per cell, because an interval needs several processes. The first pass of each
    block is in the order of the cells. The other passes are in random order, so that a drift does
    not always affect the same cells.
    """
    headline = config.report.headline
    headline_cells = [cell for cell in cells if headline and cell.section == headline]
    other_cells = _order_by_axis([cell for cell in cells if cell not in headline_cells])
    blocks = [
        headline_cells,
        *(
            other_cells[start : start + BLOCK_CELLS]
            for start in range(0, len(other_cells), BLOCK_CELLS)
        ),
    ]
    cell_numbers = {cell.key: number for number, cell in enumerate(cells)}
    order = 0
    for block in blocks:
        for replicate in range(max((num_replicates(cell, config) for cell in block), default=0)):
            pass_cells = [cell for cell in block if replicate < num_replicates(cell, config)]
            if replicate:
                random.Random(config.seed + order).shuffle(pass_cells)
            yield [
                Job(cell, replicate, order + position, cell_numbers[cell.key])
                for position, cell in enumerate(pass_cells)
            ]
            order += len(pass_cells)


def _order_by_axis(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells in an order by which a run that ends early has values of every axis.

    The order is: the base point of the sweep (its first cell), which is the answer if no case is,
    cases, then a value of each axis in turn. Both ends of an axis come before the values between.
    """
    case_cells = [cell for cell in cells if cell.section != SWEEP]
    swept_cells = [cell for cell in cells if cell.section == SWEEP]
    cells_by_axes: dict[tuple[str, ...], list[Cell]] = {}
    for cell in swept_cells[1:]:
        base = swept_cells[0].workload
        axes = tuple(axis for axis in AXES if getattr(cell.workload, axis) != getattr(base, axis))
        cells_by_axes.setdefault(axes, []).append(cell)
    # Of each axis the first value, the last value unless it is the first, then the others.
    ends_first = [[line[0], *line[1:][-1:], *line[1:-1]] for line in cells_by_axes.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ends_first))
    return [*swept_cells[:1], *case_cells, *(cell for cell in turns if cell is not None)]


EarlierJobs = Mapping[JobKey, list[Record]]


def earlier_jobs(folder: Path, config: Config, context_id: str) -> EarlierJobs:
    """Return the records that may be reused, by key of their job (`Job.key`).

    A job may be reused if it is complete, its records have this `context_id`, and all its statuses
    are in SETTLED_STATUSES, or with `rerun=failed` in GOOD_STATUSES. With `rerun=all` none may.
    A job with a timeout by another limit_seconds is ignored, because the present limit may suffice.
    If several runs have a job, the records of the latest run count.

    Args:
        folder: folder of the experiment's runs. Runs with damaged or packed records are skipped.
        config: configuration of the present run.
        context_id: identity of machine and code (`identity.context_of`).
    """
    reusable_jobs: dict[JobKey, list[Record]] = {}
    if config.rerun is Rerun.all:
        return reusable_jobs
    accepted_statuses = GOOD_STATUSES if config.rerun is Rerun.failed else SETTLED_STATUSES
    limit = config.timing.limit_seconds
    for points in sorted(folder.glob("*/points.jsonl")):
        jobs: dict[JobKey, list[Record]] = {}
        try:
            records = read_records(points.parent)
        except ValueError:
            continue  # the report of a damaged run states the damage
        for record in records:
            if record.get("context_id") == context_id:
                jobs.setdefault((record["point_key"], record["replicate"]), []).append(record)
        for key, job_records in jobs.items():
            # An interrupted writer leaves fewer records than the job has.
            is_complete = len(job_records) == job_records[0]["job_records"]
            is_accepted = all(record["status"] in accepted_statuses for record in job_records)
            has_other_limit = any(
                record["status"] == "timeout" and record.get("limit_s") != limit
                for record in job_records
            )
            if is_complete and is_accepted and not has_other_limit:
                reusable_jobs[key] = job_records
    return reusable_jobs
