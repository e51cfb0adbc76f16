"""What there is to do: one job measures one cell in one fresh process; done work is found again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.config.schema import Config, Kind, Rerun
from experiments.config.sweep import Cell
from experiments.results.identity import point_key
from experiments.results.store import Record, read_records

START_SECONDS = 1.5  # a process, its imports and its first batches, on a machine of two cores
TIMED = (Kind.time, Kind.keys, Kind.growth, Kind.sharding)  # kinds of cells whose samples are times
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

    def key(self, config: Config) -> tuple[str, int]:
        """The same in every run that asks for the same."""
        return point_key(self.cell, config), self.replicate


def replicates(cell: Cell, config: Config) -> int:
    """Fresh processes that the cell asks for; what a trace counts is the same in each."""
    return config.timing.replicates if cell.kind in TIMED else 1


def seconds_of(cell: Cell, config: Config) -> float:
    """Of one process, from above: a rule of thumb, not a measurement; tables cost time besides."""
    if cell.kind not in TIMED:
        return START_SECONDS
    timing = config.timing
    warm = len(cell.arms) * timing.warmup_seconds
    return START_SECONDS + len(timing.modes) * (timing.cell_seconds + warm)


def passes(cells: Sequence[Cell], config: Config) -> Iterator[list[Job]]:
    """Every cell once, then the answer's cells to their end, then every other cell once more, ...

    So a run that ends early has all cells, and its answer in full. The first pass keeps the order
    of the experiment; later ones are shuffled, so that what drifts over a run does not always meet
    the same cells.
    """
    headline = config.report.headline
    answer = [cell for cell in cells if headline and cell.section == headline]
    others = [cell for cell in cells if cell not in answer]
    most = max((replicates(c, config) for c in cells), default=0)
    plan = [[(cell, 0) for cell in cells]]
    plan += [[(cell, number) for number in range(1, most) for cell in answer]]
    plan += [[(cell, number) for cell in others] for number in range(1, most)]
    order = 0
    for number, wanted in enumerate(plan):
        chosen = [(c, r) for c, r in wanted if r < replicates(c, config)]
        if number:
            random.Random(config.seed + number).shuffle(chosen)
        if chosen:
            yield [Job(c, r, order + place) for place, (c, r) in enumerate(chosen)]
            order += len(chosen)


Done = Mapping[tuple[str, int], list[Record]]


def done_before(folder: Path, config: Config, context_id: str) -> Done:
    """Complete jobs of earlier runs of the experiment under `folder`, the latest of each.

    `rerun=failed` forgets those with a failure in them, `rerun=all` all. Who ran out of time under
    another limit may not under this one.
    """
    found: dict[tuple[str, int], list[Record]] = {}
    if config.rerun is Rerun.all:
        return found
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
            whole = len(parts) == parts[0]["job_records"]
            other = any(r["status"] == "timeout" and r.get("limit_s") != limit for r in parts)
            if whole and not other and all(r["status"] in accepted for r in parts):
                found[key] = parts
    return found
