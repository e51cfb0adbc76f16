"""Interleaved timing: every round runs each contender's phases in random order, then in reverse."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from experiments.config.schema import TimingConfig
from experiments.timing import stats
from experiments.timing.clock import Clock

Phase = Callable[[int], object]  # runs batch number n of the pool
PHASES = ("forward", "step")


@dataclass
class Measured:
    """Raw samples of one contender: phase -> (round, seconds), ... Nothing is ever dropped."""

    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    stop_reason: str = ""
    error: Exception | None = None

    def precise(self, target: float) -> bool:
        """Every phase's median is known to within `target`."""
        seconds = [[s for _, s in taken] for taken in self.samples.values()]
        return all(stats.summarise(s).precision <= target for s in seconds)


@dataclass(frozen=True)
class Turn:
    """One sample to take."""

    arm: str
    phase: str
    round: int
    batch: int


@dataclass
class Race:
    """The contenders of one cell in one process; `run` measures them side by side."""

    arms: Mapping[str, Mapping[str, Phase]]
    timing: TimingConfig
    clock: Clock
    seed: int = 0
    warmed: Callable[[str], object] = lambda name: None  # told each contender's end of warm-up
    spent: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, Measured]:
        """Warm up, then rounds until each contender has a reason to stop."""
        results = {
            name: Measured({phase: [] for phase in phases}) for name, phases in self.arms.items()
        }
        rng = random.Random(self.seed)
        with _no_garbage_collection():
            for name in rng.sample(sorted(self.arms), len(self.arms)):
                self._guard(results[name], partial(self._warm_up, name))
                self._guard(results[name], partial(self.warmed, name))
            self.spent = dict.fromkeys(self.arms, 0.0)
            for number in range(self.timing.max_rounds):
                if not self._round(number, results, rng):
                    break
        for result in results.values():
            result.stop_reason = result.stop_reason or "max_rounds"
        return results

    def _round(self, number: int, results: dict[str, Measured], rng: random.Random) -> bool:
        """Two samples of every phase of every contender still running; False when none is.

        The second time in reverse order, so that what drifts during a round meets all alike.
        """
        active = [name for name, r in results.items() if not r.stop_reason]
        turns = [(name, phase) for name in active for phase in self.arms[name]]
        rng.shuffle(turns)
        for half, order in enumerate((turns, turns[::-1])):
            for name, phase in order:
                result = results[name]
                turn = Turn(name, phase, number, 2 * number + half)
                self._guard(result, partial(self._sample, result, turn))
        running = {n: r for n, r in results.items() if not r.stop_reason}
        for name in self._over_budget(number + 1, list(running)):
            running.pop(name).stop_reason = "budget"
        done = number + 1 >= self.timing.min_rounds
        if done and all(r.precise(self.timing.precision) for r in running.values()):
            for result in running.values():
                result.stop_reason = "precise"
        return any(not r.stop_reason for r in results.values())

    def _over_budget(self, rounds: int, running: list[str]) -> list[str]:
        """All when the cell's time is used up; before that, one that takes most of it alone.

        A very slow contender may leave before min_rounds, but not before three.
        """
        budget, enough = self.timing.cell_seconds, rounds >= self.timing.min_rounds
        if enough and sum(self.spent[name] for name in running) > budget:
            return running
        alone = budget / 2 if enough else (2 * budget if rounds >= 3 else math.inf)
        return [name for name in running if self.spent[name] > alone]

    def _sample(self, result: Measured, turn: Turn) -> None:
        phases = self.arms[turn.arm]
        # Phases look at different batches in a round, so that none finds its rows warm.
        shift = list(phases).index(turn.phase) * self.timing.pool // len(phases)
        work = partial(phases[turn.phase], (turn.batch + shift) % self.timing.pool)
        seconds = self.clock.time(work)
        result.samples[turn.phase].append((turn.round, seconds))
        self.spent[turn.arm] += seconds

    def _warm_up(self, name: str) -> None:
        """All batches, all phases; a slow contender gets as many as fit, but at least one."""
        spent = 0.0
        for number in range(self.timing.warmup * self.timing.pool):
            for run in self.arms[name].values():
                spent += self.clock.time(partial(run, number % self.timing.pool))
            if spent > self.timing.warmup_seconds:
                return

    @staticmethod
    def _guard(result: Measured, work: Callable[[], object]) -> None:
        """A contender that raises leaves the race; the others go on."""
        if result.stop_reason:
            return
        try:
            work()
        except Exception as error:
            result.error, result.stop_reason = error, "failed"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
