"""Jobs: each measures a cell in a fresh process, or reuses the records of an earlier run.

A cell is a workload with its arms (contenders); a job measures it once. `job_passes` orders the
jobs, and `earlier_jobs` finds those whose records need not be measured again.
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
from experiments.kinds.base import Effort
from experiments.results.identity import point_key
from experiments.results.store import Record, read_records

START_SECONDS = 1.5  # start of a process, imports and first batches, on a machine of two cores
BLOCK = 4  # number of cells per block; the processes of the cells of a block take turns
# Statuses of jobs whose records are reused: SETTLED by default, GOOD with rerun=failed. A missing
# package changes the point_key once it is installed, so its job is then measured.
GOOD = ("ok", "unsupported", "missing")
SETTLED = (*GOOD, "oom", "timeout", "wrong")


@dataclass(frozen=True)
class Job:
    """A replicate of a cell.

    Attributes:
        cell: cell to measure.
        replicate: number of the process among the cell's processes.
        order: position of the job in the run.
        number: position of the cell in the experiment.
    """

    cell: Cell
    replicate: int
    order: int
    number: int = 0

    def key(self, config: Config) -> tuple[str, int]:
        """Return a key that is equal for the same measurement in any run."""
        packages = kinds.find(self.cell.kind).measurement.packages
        return point_key(self.cell, config, packages), self.replicate


def num_replicates(cell: Cell, config: Config) -> int:
    """Return the number of processes that measure a cell; 1 for a kind that only counts."""
    once = kinds.find(cell.kind).measurement.effort is Effort.ONCE
    return 1 if once else config.timing.replicates


def max_job_seconds(cell: Cell, config: Config) -> float:
    """Return a rough maximum of the seconds of a job, without building tables.

    A cache may warm up for longer. Kinds of `Effort.TRAINED` have no limit: the caller must not use
    the result for them.
    """
    if kinds.find(cell.kind).measurement.effort is Effort.ONCE:
        return START_SECONDS
    timing = config.timing
    warm = len(cell.arms) * timing.warmup_seconds
    return START_SECONDS + len(timing.modes) * (timing.cell_seconds + warm)


def job_passes(cells: Sequence[Cell], config: Config) -> Iterator[list[Job]]:
    """Yield the jobs of a run pass by pass: first the headline's cells, then blocks of the others.

    A pass is a job for each cell of a block that still needs a process; the cells of a block take
    turns until each has all its processes. So a run that is short of time has fewer cells, not
    fewer processes per cell: an interval needs several processes. The first pass of each block is
    in the order of the cells. Its other passes are in random order, so that a drift does not always
    affect the same cells.
    """
    headline = config.report.headline
    headline_cells = [cell for cell in cells if headline and cell.section == headline]
    other_cells = _axes_in_turn([cell for cell in cells if cell not in headline_cells])
    blocks = [
        headline_cells,
        *(other_cells[n : n + BLOCK] for n in range(0, len(other_cells), BLOCK)),
    ]
    numbers = {cell.key: number for number, cell in enumerate(cells)}
    order = 0
    for block in blocks:
        for replicate in range(max((num_replicates(c, config) for c in block), default=0)):
            cells_of_pass = [cell for cell in block if replicate < num_replicates(cell, config)]
            if replicate:
                random.Random(config.seed + order).shuffle(cells_of_pass)
            yield [
                Job(cell, replicate, order + position, numbers[cell.key])
                for position, cell in enumerate(cells_of_pass)
            ]
            order += len(cells_of_pass)


def _axes_in_turn(cells: Sequence[Cell]) -> list[Cell]:
    """Order cells so that a run that ends early has values of every axis.

    The order is: cases, the base point of the sweep, then a value of each axis in turn, both ends
    of an axis before the values between.
    """
    cases = [cell for cell in cells if cell.section != SWEEP]
    swept = [cell for cell in cells if cell.section == SWEEP]
    lines: dict[tuple[str, ...], list[Cell]] = {}
    for cell in swept[1:]:
        base = swept[0].workload
        axes = tuple(a for a in AXES if getattr(cell.workload, a) != getattr(base, a))
        lines.setdefault(axes, []).append(cell)
    # Of each axis the first value, the last value unless it is the first, then the others.
    ends_first = [[line[0], *line[1:][-1:], *line[1:-1]] for line in lines.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ends_first))
    return [*cases, *swept[:1], *(cell for cell in turns if cell is not None)]


EarlierJobs = Mapping[tuple[str, int], list[Record]]


def earlier_jobs(folder: Path, config: Config, context_id: str) -> EarlierJobs:
    """Return {key of a job: its records} of the latest run in `folder` that may be reused per job.

    Only complete jobs of runs with the same `context_id` count, whose statuses are all SETTLED,
    with `rerun=failed` GOOD; `rerun=all` ignores all jobs. A job with a timeout by another
    limit_seconds is ignored, because the present limit may suffice. Runs with damaged or packed
    records are skipped.
    """
    jobs_by_key: dict[tuple[str, int], list[Record]] = {}
    if config.rerun is Rerun.all:
        return jobs_by_key
    accepted = GOOD if config.rerun is Rerun.failed else SETTLED
    limit = config.timing.limit_seconds
    for points in sorted(folder.glob("*/points.jsonl")):
        jobs: dict[tuple[str, int], list[Record]] = {}
        try:
            records = read_records(points.parent)
        except ValueError:
            continue  # a damaged run is reported by its own report
        for record in records:
            if record.get("context_id") == context_id:
                jobs.setdefault((record["point_key"], record["replicate"]), []).append(record)
        for key, parts in jobs.items():
            complete = len(parts) == parts[0]["job_records"]
            is_other_limit = any(
                r["status"] == "timeout" and r.get("limit_s") != limit for r in parts
            )
            if complete and not is_other_limit and all(r["status"] in accepted for r in parts):
                jobs_by_key[key] = parts
    return jobs_by_key
