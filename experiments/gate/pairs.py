"""Pairs of workers, base and head, measured alternately in fresh processes.

A pair is one process per revision. Both build the same points (a phase of one contender on one
workload) and then take turns, block by block: base head head base, or the reverse. A *trial* is all
pairs of one run of the gate; `TrialRunner` measures them until `rules.next_request` has enough.
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
from experiments.measure.process import Child, Died, Limits
from experiments.results.store import Record, RunStore
from experiments.run.progress import Display
from experiments.timing import statistics

WORKER = "experiments.gate.worker:serve"
# Faster calls are repeated within one sample, because waking a worker costs 10 us.
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
        number: number of the pair in its run; with config.seed it gives all random numbers.
        slow: factor by which head is slowed.
        check: True to check correctness too, and to measure what does not depend on time.
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
        weight: answers of `Bench.weigh` by side; {} if the job did not ask for them.
    """

    seconds: dict[Side, list[list[float]]] = field(
        default_factory=lambda: {side: [] for side in Side}
    )
    executions: int = 1
    weight: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def effect(self) -> float:
        """Return the median over the blocks of log(head / base), of the faster of two samples."""
        fastest = {side: dict(enumerate(map(min, self.seconds[side]))) for side in Side}
        return statistics.process_effect(fastest[Side.head], fastest[Side.base])


@dataclass
class PairResult:
    """The outcome of a pair: the samples, and the points that could not be measured."""

    taken: dict[str, PointSamples] = field(default_factory=dict)
    failed: dict[str, dict[Side, BuildResult]] = field(default_factory=dict)

    def fail(self, point: str, side: Side, status: str, reason: str) -> None:
        """Record a point that one side cannot run; it is not measured on the other either."""
        self.failed.setdefault(point, {})[side] = BuildResult(status, reason)
        self.taken.pop(point, None)


# Starts a worker for a side that imports emblib from a folder. Leaving the context ends the worker.
WorkerFactory = Callable[[Side, str], AbstractContextManager[Child]]
# Sends (side, message, point at which the worker counts as lost); returns the worker's answer, as
# the method of `Bench` that the message names.
Ask = Callable[[Side, object, str], Any]


def start_worker(seconds: float, side: Side, package: str) -> Child:
    """Start a worker in a fresh process, which `seconds` of silence end; 0 for no limit."""
    return Child(WORKER, (package,), limits=Limits(seconds or math.inf))


def run_pair(job: PairJob, folders: SideFolders, start: WorkerFactory | None = None) -> PairResult:
    """Measure all points of the job, in one pair of processes, or in more after crashes.

    A crash costs only the point at which it happened: a new pair measures the others. If that point
    is unknown, all points that are not measured yet count as failed. `start` is None for
    `start_worker` with the time limit of the configuration.
    """
    outcome, points = PairResult(), list(job.points)
    start = start or partial(start_worker, job.config.timing.limit_seconds)
    while points:
        try:
            _measure_pair(dataclasses.replace(job, points=points), folders, start, outcome)
            break
        except WorkerLost as loss:
            names = [loss.point] if loss.point else [p.name for p in points]
            for name in names:
                outcome.fail(name, loss.side, loss.death.status, str(loss.death))
        points = [p for p in points if p.name not in outcome.taken and p.name not in outcome.failed]
    return outcome


class WorkerLost(Exception):
    """A worker died, at a point or before the first one."""

    def __init__(self, side: Side, point: str, death: Died) -> None:
        super().__init__(str(death))
        self.side, self.point, self.death = side, point, death


def _measure_pair(
    job: PairJob, folders: SideFolders, start: WorkerFactory, outcome: PairResult
) -> None:
    """Measure all points in one pair of processes, in random order; add them to `outcome`.

    Raises:
        WorkerLost: a process died. `outcome` has the points that were complete by then.
    """
    seed = PAIR_SEEDS * job.config.seed + job.number
    rng = random.Random(seed)
    order = rng.sample(list(Side), 2)  # the process that starts first gets the better memory
    core = None
    if job.config.device.threads == 1 and job.device == "cpu" and hasattr(os, "sched_getaffinity"):
        # The workers take turns, so one core serves both, and differences of cores cancel out.
        core = rng.choice(sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        workers = {side: stack.enter_context(start(side, folders[side])) for side in order}

        def ask(side: Side, message: object, point: str = "") -> Any:
            """Return a worker's answer; raise WorkerLost with the point at which it died.

            Without `point`, it is the one in the worker's last `note`, which is "point|activity".
            """
            try:
                workers[side].send(message)
                return workers[side].receive()
            except Died as death:
                raise WorkerLost(
                    side, point or workers[side].note.partition("|")[0], death
                ) from None

        for side in order:
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
                    outcome.fail(name, side, build_result.status, build_result.reason)
        ready = [p.name for p in job.points if p.name not in outcome.failed]
        for name in rng.sample(ready, len(ready)):
            outcome.taken[name] = _measure_point(job, name, ask, rng)
        for worker in workers.values():
            with suppress(Died):  # all its points are measured
                worker.send(None)


def _measure_point(job: PairJob, name: str, ask: Ask, rng: random.Random) -> PointSamples:
    """Warm up one point and measure its blocks: base head head base, or the reverse, at random.

    If the job checks, also weigh the point on both sides.
    """
    samples = PointSamples()
    seconds = min(ask(side, ("warm", name), name) for side in rng.sample(list(Side), 2))
    if 0 < seconds < MIN_SAMPLE_SECONDS:
        samples.executions = min(MAX_EXECUTIONS, math.ceil(MIN_SAMPLE_SECONDS / seconds))
    pool = job.config.timing.pool
    for block in range(job.config.timing.min_rounds):
        outer, inner = rng.sample(list(Side), 2)
        pair = (2 * block % pool, (2 * block + 1) % pool)  # the same batches on both sides
        first, middle, last = (
            ask(side, ("take_samples", name, batches, samples.executions), name)
            for side, batches in ((outer, pair[:1]), (inner, pair), (outer, pair[1:]))
        )
        samples.seconds[outer].append([*first, *last])
        samples.seconds[inner].append(list(middle))
    if job.check:
        for side in Side:
            samples.weight[side.value] = ask(side, ("weigh", name), name)
    return samples


Measure = Callable[[PairJob, SideFolders], PairResult]


@dataclass
class Trial:
    """One run of the gate's procedure, with its results so far.

    Attributes:
        number: number of the trial in the run; a gate has one trial, the kind power many.
        slow: factor by which head is slowed.
        attempt: 1, or more if earlier attempts at the trial had a failure and were dropped.
        evidence: effects of the pairs so far.
        failed: failures by point and side.
        weights: numbers that do not depend on time, by point, side and name (`Bench.weigh`).
    """

    number: int = 0
    slow: float = 1.0
    attempt: int = 1
    evidence: Evidence = field(default_factory=Evidence)
    failed: dict[str, dict[Side, BuildResult]] = field(default_factory=dict)
    weights: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def remember(self, record: Record) -> None:
        """Add a stored record as if it had just been measured."""
        if record["status"] == "ok":
            stage = Stage(record["stage"])
            self.evidence.add(stage, record["point"], record["effect"])
            if record.get("weight"):
                self.weights[record["point"]] = record["weight"]
        else:
            side = Side(record["side"])
            build_result = BuildResult(record["status"], record["reason"])
            self.failed.setdefault(record["point"], {})[side] = build_result
            self.evidence.lost.add(record["point"])

    def add_counts(self, counts: Counts) -> None:
        """Add the counted instructions to the weights of each point and side."""
        for point, sides in counts.items():
            weights = self.weights.setdefault(point, {})
            for side, counted in sides.items():
                weights[side] = {**weights.get(side, {}), **counted}


@dataclass
class TrialRunner:
    """Run the trials of a gate: start pairs, append their records to points.jsonl, update trials.

    A trial changes only by what is stored (`Trial.remember`), so that a resumed run continues
    exactly where the stored records end.
    """

    config: Config
    device: torch.device
    points: Sequence[Point]
    rules: Rules
    folders: SideFolders
    store: RunStore
    display: Display
    measure: Measure = run_pair
    pairs: int = 0  # number of pairs so far; the seed of the next one follows from it

    def finish(self, trial: Trial) -> Trial:
        """Measure until the rules request no more; return the same trial."""
        names = [p.name for p in self.points if p.name in self.rules.margins]
        while request := next_request(names, trial.evidence, self.rules):
            self.step(trial, request)
        return trial

    def step(self, trial: Trial, request: Request) -> None:
        """Run a pair of processes, store its records, and add them to the trial.

        After a crash it is several pairs with the same seed.
        """
        started = time.monotonic()
        is_first = trial.number == 0 and not trial.evidence.first
        job = PairJob(
            [p for p in self.points if p.name in request.points],
            self.config,
            str(self.device),
            self.pairs,
            slow=trial.slow,
            check=is_first,
        )
        self.display.begin(f"{request.stage.value} set, {len(job.points)} points")
        outcome = self.measure(job, self.folders)
        wall_s = round(time.monotonic() - started, 3)
        records = self._records(trial, request, job, outcome, wall_s)
        self.store.append(*records)
        for record in records:
            trial.remember(record)
        self.pairs += 1

    def _records(
        self, trial: Trial, request: Request, job: PairJob, outcome: PairResult, wall_s: float
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
            for side, build_result in outcome.failed.get(point.name, {}).items():
                records.append(shared | dataclasses.asdict(build_result) | {"side": side.value})
            if point.name in outcome.taken and point.name not in outcome.failed:
                taken = outcome.taken[point.name]
                samples = {
                    f"{side.value}_ns": [[round(1e9 * s) for s in block] for block in blocks]
                    for side, blocks in taken.seconds.items()
                }
                records.append(
                    shared
                    | {"status": "ok", "effect": taken.effect, "executions": taken.executions}
                    | {"weight": taken.weight, **samples}
                )
        return records


def faster_samples(records: Sequence[Record], point: str, side: Side) -> list[float]:
    """Return the seconds of the faster sample of every block, over all pairs with a result."""
    key = f"{side.value}_ns"
    blocks_by_pair = [r[key] for r in records if r["point"] == point and r["status"] == "ok"]
    return [min(block) / 1e9 for blocks in blocks_by_pair for block in blocks]
