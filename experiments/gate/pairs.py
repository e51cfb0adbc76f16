"""Pairs of workers, base and head, measured alternately in fresh processes.

A pair is one process per revision. Both build the same points (a phase of one contender on one
workload) and then take turns, block by block: base head head base, or the reverse. A *trial* is all
pairs of one run of the gate; `TrialRunner` measures them until `rules.next_request` returns None.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.gate.instructions import Counts
from experiments.gate.points import BuildResult, Point, Setup
from experiments.gate.rules import Evidence, Request, Rules, Stage, next_request
from experiments.measure.process import Child, ChildDied, Limits
from experiments.results.store import Record, RunStore
from experiments.run.progress import Display
from experiments.timing import statistics

WORKER = "experiments.gate.worker:serve"
# Shorter calls are repeated within one sample, because waking a worker costs 10 us.
MIN_SAMPLE_SECONDS = 300e-6
MAX_EXECUTIONS = 64
PAIR_SEEDS = 1_000_003  # step between the pair seeds of successive run seeds (a prime)


class Side(Enum):
    """The two sides: base is the revision that a change starts from, head has the change."""

    base = "base"
    head = "head"


# The folder of `emblib/` for each side; "" for the package that is imported by default.
SideFolders = Mapping[Side, str]


@dataclass(frozen=True)
class PairJob:
    """One pair of processes: its points and settings.

    Attributes:
        points: points to measure.
        config: configuration of the run.
        device: device as torch names it, such as "cpu" or "cuda".
        number: number of the pair in its run; with config.seed it determines all random numbers.
        slow: factor by which head is slowed.
        check: True to compare points with the reference, and to count their bytes and hit rates
            (`Bench.count_resources`).
    """

    points: Sequence[Point]
    config: Config
    device: str
    number: int
    slow: float = 1.0
    check: bool = False


@dataclass
class PointSamples:
    """The samples of one point from one pair.

    Attributes:
        seconds: samples of each side, [blocks][2], in seconds; a sample is the mean of
            `executions` calls.
        executions: calls per sample.
        resources: results of `Bench.count_resources` by name of the side; {} unless the job has
            `check`.
    """

    seconds: dict[Side, list[list[float]]] = field(
        default_factory=lambda: {side: [] for side in Side}
    )
    executions: int = 1
    resources: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def effect(self) -> float:
        """Return the median over the blocks of log(head ÷ base), of the faster sample of each.

        Raises:
            ValueError: there is no block.
        """
        fastest = {side: dict(enumerate(map(min, self.seconds[side]))) for side in Side}
        return statistics.process_effect(fastest[Side.head], fastest[Side.base])


@dataclass
class PairResult:
    """The result of a pair, by point: samples, and failures by side."""

    samples: dict[str, PointSamples] = field(default_factory=dict)
    failures: dict[str, dict[Side, BuildResult]] = field(default_factory=dict)

    def add_failure(self, point: str, side: Side, status: str, reason: str) -> None:
        """Record that one side cannot run a point, and drop the point's samples."""
        self.failures.setdefault(point, {})[side] = BuildResult(status, reason)
        self.samples.pop(point, None)


# Function (side, folder of emblib) that starts a worker; leaving the context ends the worker.
WorkerFactory = Callable[[Side, str], AbstractContextManager[Child]]
# Function (side, message, point) that sends a message to a worker and returns its answer. If the
# worker dies, WorkerLost names the point.
Ask = Callable[[Side, object, str], Any]


def start_worker(limit_seconds: float, side: Side, package: str) -> Child:
    """Start a worker in a fresh process, killed after `limit_seconds` of silence (0: never)."""
    return Child(WORKER, (package,), limits=Limits(limit_seconds or math.inf))


def run_pair(job: PairJob, folders: SideFolders, start: WorkerFactory | None = None) -> PairResult:
    """Measure all points of the job in one pair of processes, or in several after crashes.

    Only the point at which a process crashed fails: a new pair measures the others. If that point
    is unknown, all points that are not measured yet fail. Every point of the job is then in
    `samples` or in `failures` of the result.

    Args:
        job: points and settings.
        folders: folder of emblib by side.
        start: function that starts a worker; None for `start_worker` with timing.limit_seconds.
    """
    result, points = PairResult(), list(job.points)
    start = start or partial(start_worker, job.config.timing.limit_seconds)
    while points:
        try:
            _measure_pair(dataclasses.replace(job, points=points), folders, start, result)
            break
        except WorkerLost as loss:
            names = [loss.point] if loss.point else [point.name for point in points]
            for name in names:
                result.add_failure(name, loss.side, loss.death.status, str(loss.death))
        points = [
            point for point in points if point.name not in {*result.samples, *result.failures}
        ]
    return result


class WorkerLost(Exception):
    """A worker died: at the point that `point` names, or before the first point ("")."""

    def __init__(self, side: Side, point: str, death: ChildDied) -> None:
        super().__init__(str(death))
        self.side, self.point, self.death = side, point, death


def _measure_pair(
    job: PairJob, folders: SideFolders, start: WorkerFactory, result: PairResult
) -> None:
    """Measure all points in one pair of processes, in random order; add them to `result`.

    The numbers of the seed and of the pair determine every random choice, so that a pair can be
    repeated.

    Raises:
        WorkerLost: a process died. `result` has the points that were complete by then.
    """
    seed = PAIR_SEEDS * job.config.seed + job.number
    rng = random.Random(seed)
    # Random, because the process that starts first gets the better memory.
    start_order = rng.sample(list(Side), 2)
    core = None
    if job.config.device.threads == 1 and job.device == "cpu" and hasattr(os, "sched_getaffinity"):
        # The workers take turns, so one core serves both, and differences of cores cancel out.
        core = rng.choice(sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        workers = {side: stack.enter_context(start(side, folders[side])) for side in start_order}

        def ask(side: Side, message: object, point: str = "") -> Any:
            """Return a worker's answer; raise WorkerLost with the point at which it died.

            Without `point`, that point is read from the worker's last note, "point|activity".
            """
            try:
                workers[side].send(message)
                return workers[side].receive()
            except ChildDied as death:
                raise WorkerLost(
                    side, point or workers[side].note.partition("|")[0], death
                ) from None

        for side in start_order:
            is_head = side is Side.head
            setup = Setup(
                job.points,
                job.config,
                job.device,
                seed,
                slow=job.slow if is_head else 1.0,
                idle=1.0 if is_head else job.slow,
                check=job.check,
                core=core,
            )
            for name, build_result in ask(side, setup).items():
                if build_result.status != "ok":
                    result.add_failure(name, side, build_result.status, build_result.reason)
        names = [point.name for point in job.points if point.name not in result.failures]
        for name in rng.sample(names, len(names)):
            result.samples[name] = _measure_point(job, name, ask, rng)
        for worker in workers.values():
            with suppress(ChildDied):  # without harm: all points are measured
                worker.send(None)


def _measure_point(job: PairJob, name: str, ask: Ask, rng: random.Random) -> PointSamples:
    """Warm up one point and measure its blocks: base head head base, or the reverse, at random.

    If the job has `check`, also count the resources of the point on both sides.
    """
    samples = PointSamples()
    call_s = min(ask(side, ("warm", name), name) for side in rng.sample(list(Side), 2))
    if 0 < call_s < MIN_SAMPLE_SECONDS:
        samples.executions = min(MAX_EXECUTIONS, math.ceil(MIN_SAMPLE_SECONDS / call_s))
    num_batches = job.config.timing.pool
    for block in range(job.config.timing.min_rounds):
        outer, inner = rng.sample(list(Side), 2)
        # The same two batches on both sides.
        first, second = 2 * block % num_batches, (2 * block + 1) % num_batches
        outer_first, inner_both, outer_second = (
            ask(side, ("take_samples", name, batches, samples.executions), name)
            for side, batches in ((outer, (first,)), (inner, (first, second)), (outer, (second,)))
        )
        samples.seconds[outer].append([*outer_first, *outer_second])
        samples.seconds[inner].append(list(inner_both))
    if job.check:
        for side in Side:
            samples.resources[side.value] = ask(side, ("count_resources", name), name)
    return samples


Measure = Callable[[PairJob, SideFolders], PairResult]  # `run_pair`, or a substitute in tests


@dataclass
class Trial:
    """One run of the gate's procedure, with its results so far.

    Attributes:
        number: number of the trial in the run; a gate has one trial, the kind power many.
        slow: factor by which head is slowed.
        attempt: 1, or more if earlier attempts at the trial had a failure and were dropped.
        evidence: effects of the pairs so far.
        failures: failures by point and side.
        resources: results of `Bench.count_resources` and counted instructions, by point, name of
            the side and name of the number.
    """

    number: int = 0
    slow: float = 1.0
    attempt: int = 1
    evidence: Evidence = field(default_factory=Evidence)
    failures: dict[str, dict[Side, BuildResult]] = field(default_factory=dict)
    resources: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def add_record(self, record: Record) -> None:
        """Add a stored record: the effect of a pair, or a failure of one side."""
        if record["status"] == "ok":
            stage = Stage(record["stage"])
            self.evidence.add(stage, record["point"], record["effect"])
            if record.get("weight"):
                self.resources[record["point"]] = record["weight"]
        else:
            side = Side(record["side"])
            build_result = BuildResult(record["status"], record["reason"])
            self.failures.setdefault(record["point"], {})[side] = build_result
            self.evidence.lost_points.add(record["point"])

    def add_counts(self, counts: Counts) -> None:
        """Add the counted instructions to the resources of each point and side."""
        for point, counts_by_side in counts.items():
            resources = self.resources.setdefault(point, {})
            for side, side_counts in counts_by_side.items():
                resources[side] = {**resources.get(side, {}), **side_counts}


@dataclass
class TrialRunner:
    """Run the trials of a gate: start pairs, append their records to points.jsonl, update trials.

    A trial changes only by what is stored: records (`Trial.add_record`) and counts of instructions
    (`Trial.add_counts`). So a resumed run continues exactly where these end.

    Attributes:
        config: configuration of the run.
        device: device of the points.
        points: all points of the run; `finish` measures those that `rules` gate.
        rules: numbers of pairs and margins.
        folders: folder of emblib by side.
        store: directory of the run.
        display: progress on the terminal.
        measure: function that measures a pair.
        num_pairs: pairs so far, which is the number of the next pair.
    """

    config: Config
    device: torch.device
    points: Sequence[Point]
    rules: Rules
    folders: SideFolders
    store: RunStore
    display: Display
    measure: Measure = run_pair
    num_pairs: int = 0

    def finish(self, trial: Trial) -> None:
        """Measure until the rules request no more; `trial` has the results, also after Ctrl-C."""
        names = [point.name for point in self.points if point.name in self.rules.margins]
        while request := next_request(names, trial.evidence, self.rules):
            self.measure_pair(trial, request)

    def measure_pair(self, trial: Trial, request: Request) -> None:
        """Run a pair of processes, store its records, and add them to the trial.

        After a crash, `run_pair` runs several pairs with the same number.
        """
        begin_s = time.monotonic()
        is_first = trial.number == 0 and not trial.evidence.first
        job = PairJob(
            [point for point in self.points if point.name in request.points],
            self.config,
            str(self.device),
            self.num_pairs,
            slow=trial.slow,
            check=is_first,
        )
        self.display.begin(f"{request.stage.value} set, {len(job.points)} points")
        result = self.measure(job, self.folders)
        wall_s = round(time.monotonic() - begin_s, 3)
        records = self._make_records(trial, request, job, result, wall_s)
        self.store.append(*records)
        for record in records:
            trial.add_record(record)
        self.num_pairs += 1

    def _make_records(
        self, trial: Trial, request: Request, job: PairJob, result: PairResult, wall_s: float
    ) -> list[Record]:
        """Return one record per measured point, and one per side that could not run a point."""
        mode = self.config.timing.modes[0].value
        records = []
        for point in job.points:
            shared: Record = {
                "run_id": self.store.path.name,
                "experiment": self.config.name,
                "kind": self.config.kind,
                "point": point.name,
                "section": point.cell.section,
                "cell": point.cell.key,
                "contender": point.arm.contender,
                "arm": point.arm.key,
                "phase": point.phase,
                "mode": mode,
                "trial": trial.number,
                "attempt": trial.attempt,
                "slow": trial.slow,
                "stage": request.stage.value,
                "pair": job.number,
                "wall_s": wall_s,
            }
            for side, build_result in result.failures.get(point.name, {}).items():
                records.append(shared | dataclasses.asdict(build_result) | {"side": side.value})
            if point.name in result.samples and point.name not in result.failures:
                samples = result.samples[point.name]
                samples_ns = {
                    f"{side.value}_ns": [
                        [round(1e9 * sample) for sample in block] for block in blocks
                    ]
                    for side, blocks in samples.seconds.items()
                }
                records.append(
                    shared
                    | {"status": "ok", "effect": samples.effect, "executions": samples.executions}
                    | {"weight": samples.resources, **samples_ns}
                )
        return records


def faster_samples(records: Sequence[Record], point: str, side: Side) -> list[float]:
    """Return the seconds of the faster sample of every block, over all pairs with a result."""
    key = f"{side.value}_ns"
    blocks_by_pair = [
        record[key] for record in records if record["point"] == point and record["status"] == "ok"
    ]
    return [min(block) / 1e9 for blocks in blocks_by_pair for block in blocks]
