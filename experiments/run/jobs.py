"""Jobs: each measures one cell in one fresh process; results of earlier runs are reused."""

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

START_SECONDS = 1.5  # a process, its imports and its first batches, on a machine of two cores
BLOCK = 4  # cells whose processes take turns
# Without a new request these are not tried again: the outcome would be the same. What is missing
# has another point_key once it is installed.
GOOD = ("ok", "unsupported", "missing")
SETTLED = (*GOOD, "oom", "timeout", "wrong")


@dataclass(frozen=True)
class Job:
    """One replicate of one cell."""

    cell: Cell
    replicate: int
    order: int  # its place in the run
    number: int = 0  # of the cell, in the order of the experiment

    def key(self, config: Config) -> tuple[str, int]:
        """Return a key that is the same in every run that asks for the same measurement."""
        packages = kinds.find(self.cell.kind).measurement.packages
        return point_key(self.cell, config, packages), self.replicate


def replicates(cell: Cell, config: Config) -> int:
    """Return the number of fresh processes that measure the cell; counts are the same in each."""
    once = kinds.find(cell.kind).measurement.effort is Effort.ONCE
    return 1 if once else config.timing.replicates


def seconds_of(cell: Cell, config: Config) -> float:
    """Estimate the seconds of one process from above, without building tables."""
    if kinds.find(cell.kind).measurement.effort is Effort.ONCE:
        return START_SECONDS
    timing = config.timing
    warm = len(cell.arms) * timing.warmup_seconds
    return START_SECONDS + len(timing.modes) * (timing.cell_seconds + warm)


def passes(cells: Sequence[Cell], config: Config) -> Iterator[list[Job]]:
    """Measure the answer's cells to their end, then the other cells block by block.

    Each list is a pass: some cells once, each in its own process. The cells of a block take turns
    until each has all its processes. So a run that is short of time ends with fewer cells, not with
    fewer processes per cell, and a single process gives no error. Passes after the first are
    shuffled, so that a drift does not always meet the same cells.
    """
    headline = config.report.headline
    answer = [cell for cell in cells if headline and cell.section == headline]
    others = _axes_in_turn([cell for cell in cells if cell not in answer])
    blocks = [answer, *(others[at : at + BLOCK] for at in range(0, len(others), BLOCK))]
    numbers = {cell.key: number for number, cell in enumerate(cells)}
    order = 0
    for block in blocks:
        for replicate in range(max((replicates(c, config) for c in block), default=0)):
            chosen = [cell for cell in block if replicate < replicates(cell, config)]
            if replicate:
                random.Random(config.seed + order).shuffle(chosen)
            yield [
                Job(cell, replicate, order + place, numbers[cell.key])
                for place, cell in enumerate(chosen)
            ]
            order += len(chosen)


def _axes_in_turn(cells: Sequence[Cell]) -> list[Cell]:
    """Order cells so that stopping anywhere leaves out values of every axis alike.

    Cases come first, then the base point of the sweep, then the axes in turn: both ends of each,
    then what lies between.
    """
    cases = [cell for cell in cells if cell.section != SWEEP]
    swept = [cell for cell in cells if cell.section == SWEEP]
    lines: dict[tuple[str, ...], list[Cell]] = {}
    for cell in swept[1:]:
        base = swept[0].workload
        axes = tuple(a for a in AXES if getattr(cell.workload, a) != getattr(base, a))
        lines.setdefault(axes, []).append(cell)
    ends_first = [[line[0], *line[:0:-1][:1], *line[1:-1]] for line in lines.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ends_first))
    return [*cases, *swept[:1], *(cell for cell in turns if cell is not None)]


Done = Mapping[tuple[str, int], list[Record]]


def done_before(folder: Path, config: Config, context_id: str) -> Done:
    """Find complete jobs of earlier runs of the experiment under `folder`, the latest of each.

    `rerun=failed` ignores jobs with a failure, `rerun=all` ignores every job. A timeout under
    another limit_seconds does not count, because this limit may suffice.
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
            continue  # a damaged run is not a source; its own report says so
        for record in records:
            if record.get("context_id") == context_id:
                jobs.setdefault((record["point_key"], record["replicate"]), []).append(record)
        for key, parts in jobs.items():
            complete = len(parts) == parts[0]["job_records"]
            other = any(r["status"] == "timeout" and r.get("limit_s") != limit for r in parts)
            if complete and not other and all(r["status"] in accepted for r in parts):
                jobs_by_key[key] = parts
    return jobs_by_key
