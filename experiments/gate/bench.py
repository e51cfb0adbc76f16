"""The points of one worker: build, verify, warm up and time them, and count their bytes."""

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
from experiments.measure.timing import check_batch, counting_pass, task_of, whole_steps
from experiments.timing.clock import Clock, Phase, SampleTask, clock_for
from experiments.timing.warmup import warm_up
from experiments.workloads.workload import Pool, make_pool, table_shapes


@dataclass
class ReadyPoint:
    """A point that is built and can be timed."""

    contender: Contender
    run: Phase  # the timed phase, as the clock adapts it
    step: Phase  # a whole step, for counters and memory
    clock: Clock


class Bench:
    """The work of one worker process, whose methods messages name (see points.py).

    Notes are "point|activity": `pairs` reads the point of a worker that died from them. `now` is a
    clock in nanoseconds. The constructor changes the whole process: its core, where one is asked
    for, its number of threads, and its allocator.
    """

    def __init__(self, setup: Setup, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.setup, self.now = setup, now
        self.device = torch.device(setup.device)
        self.ready: dict[str, ReadyPoint] = {}
        self.pools: dict[str, Pool] = {}
        if setup.core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {setup.core})
        if setup.config.device.threads:
            torch.set_num_threads(setup.config.device.threads)
        memory.keep_freed_blocks()

    def build(self) -> dict[str, BuildResult]:
        """Build all points and return the result of each; a failure does not stop the others."""
        results = {}
        for point in self.setup.points:
            note(f"{point.name}|building")
            try:
                self.ready[point.name] = self._build(point)
                results[point.name] = BuildResult()
            except Exception as error:  # any error is a result of the point
                results[point.name] = BuildResult(
                    status_of(error), f"{type(error).__name__}: {error}"
                )
        return results

    def _build(self, point: Point) -> ReadyPoint:
        """Build a point, check it against the reference if the setup asks, prepare its batches."""
        config = dataclasses.replace(self.setup.config, optimizer=point.optimizer)
        session = Session(config, self.device, "gate")
        contender = build(point.arm.contender, task_of(point.cell, point.arm, session))
        if self.setup.check:
            verify(contender, check_batch(point.cell, self.setup.seed))
        pool = self._pool(point.cell)
        phases = whole_steps(contender, pool)
        clock = clock_for(self.device, config.timing.modes[0])
        run = clock.adapt(phases[point.phase], len(pool.batches))
        return ReadyPoint(contender, run, phases["step"], clock)

    def _pool(self, cell: Cell) -> Pool:
        """Return the batches of a case, which all its points share."""
        if cell.key not in self.pools:
            shapes = table_shapes(cell.workload, scale=cell.rows_scale)
            count = self.setup.config.timing.pool
            self.pools[cell.key] = make_pool(cell.workload, shapes, count, self.setup.seed)
        return self.pools[cell.key]

    def settle(self) -> None:
        """Switch garbage collection off; a collection inside a sample would count as noise."""
        gc.freeze()
        gc.disable()

    def warm(self, name: str) -> float:
        """Warm up a built point; return the seconds of one execution, 0 without a warm-up."""
        ready, timing = self.ready[name], self.setup.config.timing
        note(f"{name}|warming up")
        counters = ready.contender.counters
        phase = {name: ready.run}
        warm = warm_up(phase, ready.clock, timing, key=name, counters=counters)
        note(f"{name}|timing")
        return warm.typical.get(name, 0.0)

    def take_samples(self, name: str, batches: Sequence[int], executions: int) -> list[float]:
        """Return one sample per batch, in seconds per execution.

        A sample executes the point `executions` times, on the batch and its successors in the pool.
        An uncounted sample precedes each: the other worker has just filled the caches, and the
        scheduler may have to wake this process.
        """
        ready, samples = self.ready[name], []
        for batch in batches:
            call = partial(self._execute, ready.run, batch, executions)
            for _ in range(2):
                (reading,) = ready.clock.read([SampleTask(call, name)])
                self._wait(reading.seconds * (self.setup.idle - 1))
            samples.append(reading.seconds / executions)
        return samples

    def _execute(self, run: Phase, batch: int, executions: int) -> None:
        start = self.now()
        for number in range(executions):
            run((batch + number) % self.setup.config.timing.pool)
        if self.setup.slow > 1:
            self._wait((self.now() - start) / 1e9 * (self.setup.slow - 1))

    def _wait(self, seconds: float) -> None:
        """Wait by spinning: a sleeping process would lose its core and its warm caches."""
        end = self.now() + 1e9 * seconds
        while self.now() < end:
            pass

    def weigh(self, name: str) -> dict[str, float]:
        """Measure what does not depend on time; less is better, except for hit rates.

        This executes steps, which change the parameters. Keys are the keys of `Contender.nbytes`
        with "_bytes"; with a cache "hit_rate", a share of the lookups; and "peak_bytes" of a step
        where the system counts it.
        """
        ready, contender = self.ready[name], self.ready[name].contender
        weights: dict[str, float] = {f"{k}_bytes": v for k, v in contender.nbytes().items()}
        totals = counting_pass(contender, ready.step, self.setup.config.timing.pool)
        if totals.get("lookups"):
            weights["hit_rate"] = totals["lookup_hits"] / totals["lookups"]
        peak = memory.peak_bytes(partial(ready.step, 0), self.device)
        return weights if peak is None else weights | {"peak_bytes": peak}
