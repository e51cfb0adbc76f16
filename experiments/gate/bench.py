"""The work of a gate's worker: build, verify, warm up and time points, and count their bytes."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from experiments.config.sweep import Cell
from experiments.contenders.base import Contender
from experiments.contenders.registry import build
from experiments.gate.points import BuildResult, Point, Setup
from experiments.machine import memory
from experiments.measure.outcome import status_of, verify
from experiments.measure.process import note
from experiments.measure.session import Session
from experiments.measure.timing import counting_pass, make_check_batch, task_of, whole_steps
from experiments.timing.clock import Clock, Phase, SampleTask, clock_for
from experiments.timing.warmup import warm_up
from experiments.workloads.workload import Pool, make_pool, table_shapes


@dataclass
class ReadyPoint:
    """A point that is built and can be timed."""

    contender: Contender
    timed_phase: Phase  # adapted to the clock; takes the number of a batch in the pool
    step: Phase  # a whole step, for counters and memory; takes the number of a batch, too
    clock: Clock  # measures the samples of `timed_phase`


class Bench:
    """The points of one worker process, with the methods that messages name (see points.py).

    The constructor changes the whole process: its allocator, and its core and number of threads if
    the setup names them. Methods write notes, "point|activity", from which `pairs` reads which
    point a worker was measuring when it died. Methods that take the `name` of a point raise
    KeyError unless `build` has built that point.

    Args:
        setup: points and settings.
        now_ns: clock that returns nanoseconds.

    Attributes:
        ready_points: points that `build` has built, by name.
        pools: batches by key of their cell.
    """

    def __init__(self, setup: Setup, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.setup, self.now_ns = setup, now_ns
        self.device = torch.device(setup.device)
        self.ready_points: dict[str, ReadyPoint] = {}
        self.pools: dict[str, Pool] = {}
        if setup.core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {setup.core})
        if setup.config.device.threads:
            torch.set_num_threads(setup.config.device.threads)
        memory.keep_freed_blocks()

    def build(self) -> dict[str, BuildResult]:
        """Build all points and return the result of each by name; no error is raised."""
        results = {}
        for point in self.setup.points:
            note(f"{point.name}|building")
            try:
                self.ready_points[point.name] = self._build_point(point)
                results[point.name] = BuildResult()
            except Exception as error:  # any error is a result of the point
                results[point.name] = BuildResult(
                    status_of(error), f"{type(error).__name__}: {error}"
                )
        return results

    def _build_point(self, point: Point) -> ReadyPoint:
        """Build a point and its batches; if `setup.check`, compare it with the reference."""
        config = dataclasses.replace(self.setup.config, optimizer=point.optimizer)
        session = Session(config, self.device, "gate")
        contender = build(point.arm.contender, task_of(point.cell, point.arm, session))
        if self.setup.check:
            verify(contender, make_check_batch(point.cell, self.setup.seed))
        pool = self._pool_of(point.cell)
        phases = whole_steps(contender, pool)
        clock = clock_for(self.device, config.timing.modes[0])
        timed_phase = clock.adapt(phases[point.phase], len(pool.batches))
        return ReadyPoint(contender, timed_phase, phases["step"], clock)

    def _pool_of(self, cell: Cell) -> Pool:
        """Return the batches of a cell, which all its points share."""
        if cell.key not in self.pools:
            shapes = table_shapes(cell.workload, scale=cell.rows_scale)
            num_batches = self.setup.config.timing.pool
            self.pools[cell.key] = make_pool(cell.workload, shapes, num_batches, self.setup.seed)
        return self.pools[cell.key]

    def stop_garbage_collection(self) -> None:
        """Switch garbage collection off, because a collection within a sample would be noise."""
        gc.freeze()
        gc.disable()

    def warm(self, name: str) -> float:
        """Warm up a built point; return the median seconds of one call, 0 if it is unknown."""
        ready, timing = self.ready_points[name], self.setup.config.timing
        note(f"{name}|warming up")
        counters = ready.contender.counters
        warm_state = warm_up(
            {name: ready.timed_phase}, ready.clock, timing, key=name, counters=counters
        )
        note(f"{name}|timing")
        return warm_state.median_s.get(name, 0.0)

    def take_samples(self, name: str, batches: Sequence[int], executions: int) -> list[float]:
        """Return one sample per batch, in seconds per call.

        An uncounted sample precedes each sample, because the other worker has just filled the
        caches, and the scheduler may have to wake this process.

        Args:
            name: name of a built point.
            batches: numbers of batches in the pool.
            executions: calls per sample, at least 1: on the batch and on its successors in the
                pool, in turns.
        """
        ready, samples = self.ready_points[name], []
        for batch in batches:
            call = partial(self._execute, ready.timed_phase, batch, executions)
            for _ in range(2):
                (reading,) = ready.clock.read([SampleTask(call, name)])
                self._wait(reading.seconds * (self.setup.idle - 1))
            samples.append(reading.seconds / executions)
        return samples

    def _execute(self, phase: Phase, batch: int, executions: int) -> None:
        """Execute a phase on `executions` successive batches.

        With `setup.slow` > 1, then wait until the call has taken `setup.slow` times as long.
        """
        begin_ns = self.now_ns()
        for offset in range(executions):
            phase((batch + offset) % self.setup.config.timing.pool)
        if self.setup.slow > 1:
            self._wait((self.now_ns() - begin_ns) / 1e9 * (self.setup.slow - 1))

    def _wait(self, seconds: float) -> None:
        """Wait by spinning, because a sleeping process would lose its core and its warm caches."""
        end_ns = self.now_ns() + 1e9 * seconds
        while self.now_ns() < end_ns:
            pass

    def count_resources(self, name: str) -> dict[str, float]:
        """Return the bytes and the hit rate of a point; call it after all samples of the point.

        Keys: those of `Contender.nbytes`, followed by "_bytes"; "hit_rate", a share of the lookups,
        if there is a cache; "peak_bytes" of a step, if the system counts it. The method executes
        steps, which change the parameters.
        """
        ready, contender = self.ready_points[name], self.ready_points[name].contender
        resources: dict[str, float] = {
            f"{label}_bytes": num_bytes for label, num_bytes in contender.nbytes().items()
        }
        totals = counting_pass(contender, ready.step, self.setup.config.timing.pool)
        if totals.get("lookups"):
            resources["hit_rate"] = totals["lookup_hits"] / totals["lookups"]
        peak = memory.peak_bytes(partial(ready.step, 0), self.device)
        return resources if peak is None else resources | {"peak_bytes": peak}
