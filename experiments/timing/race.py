"""Interleaved timing: every round runs each contender's phases in random order, then in reverse."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from experiments.config.schema import TimingConfig
from experiments.machine.telemetry import Telemetry
from experiments.timing import statistics
from experiments.timing.clock import Clock, Phase, Reading, Work
from experiments.timing.warmup import Warm, warm_up

Samples = dict[str, list[tuple[int, float]]]  # phase -> (round, seconds), ...
MAX_EXPOSED_SHARE = 0.1  # a larger share of samples with launches inside is worth a flag
MAX_EXECUTIONS = 64  # calls that share a sample
MAX_RETRIES = 3  # of a round during which the machine was throttled
BACK_OFF_SECONDS, BACK_OFF_GROWTH = (
    0.05,
    2.5,
)  # seconds before the first, and how much longer each is


@dataclass
class Race:
    """The contenders of one cell in one process; `run` measures them side by side."""

    arms: Mapping[str, Mapping[str, Phase]]
    timing: TimingConfig
    clock: Clock
    seed: int = 0
    warmed: Callable[[str], object] = lambda name: None  # called when a contender is warm
    counters: Callable[[str], Mapping[str, int]] = lambda name: {}  # running totals of its cache
    telemetry: Telemetry = field(default_factory=Telemetry)
    note: Callable[[str], object] = lambda text: None  # called with "arm|doing" before each sample
    sleep: Callable[[float], object] = time.sleep
    results: dict[str, Measured] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by contender
    throttled_rounds: list[int] = field(default_factory=list)
    _ready: dict[str, dict[str, Phase]] = field(default_factory=dict)  # phases as the clock times

    def run(self) -> dict[str, Measured]:
        """Warm up, then rounds until each contender has a reason to stop."""
        for name, phases in self.arms.items():
            self.results[name] = Measured({phase: [] for phase in phases})
            self._ready[name] = dict(phases)
        rng = random.Random(self.seed)
        with _no_garbage_collection():
            for name in rng.sample(sorted(self.arms), len(self.arms)):
                self._guard(name, partial(self._warm_up, name))
                self._guard(name, partial(self.warmed, name))
            self.spent = dict.fromkeys(self.arms, 0.0)
            self.telemetry.start()
            try:
                for number in range(self.timing.max_rounds):
                    self._round(number, rng)
                    if all(r.stop_reason for r in self.results.values()):
                        break
            finally:
                self.telemetry.stop()
        hardware, flags = self.telemetry.summary(), self.telemetry.flags()
        if self.throttled_rounds:
            hardware["throttled_rounds"] = self.throttled_rounds
            flags = [*flags, "throttled"]
        for result in self.results.values():
            result.stop_reason = result.stop_reason or "max_rounds"
            result.conclude(flags, hardware, self.clock.describe())
        return self.results

    def _guard(self, name: str, work: Callable[[], object]) -> None:
        """Remove a contender that raises from the race; the others go on."""
        result = self.results[name]
        if result.error:
            return
        try:
            work()
        except Exception as error:
            result.error, result.stop_reason = error, "failed"

    def _warm_up(self, name: str) -> None:
        """Warm up this contender, for no longer than measuring it may take."""
        timing, phases, result = self.timing, self._ready[name], self.results[name]
        self.note(f"{name}|warming up")
        for phase, run in phases.items():
            phases[phase] = self.clock.adapt(run, timing.pool)
        counters = partial(self.counters, name)
        cap = min(timing.warmup_cap, timing.cell_seconds / len(self.arms))
        # A cache that is not full yet would give another contender's times; those of a smoke run
        # mean nothing.
        if counters() and not timing.max_rows:
            cap = max(cap, timing.cell_seconds)
        warm = warm_up(phases, self.clock, timing, key=name, max_seconds=cap, counters=counters)
        result.warm = warm
        if timing.warmup and (not warm.passes or warm.filling):
            result.flags.add("not_warm")
        shortest = self.clock.min_sample_seconds  # calls that take less share a sample
        for phase in phases:
            seconds = warm.typical.get(phase, math.inf)
            calls = math.ceil(shortest / seconds) if 0 < seconds < shortest else 1
            result.executions[phase] = min(MAX_EXECUTIONS, calls)

    def _round(self, number: int, rng: random.Random) -> None:
        """Take two samples of every phase of every contender still running.

        The second time in reverse order, so that what drifts during a round meets all alike.
        """
        active = [name for name, r in self.results.items() if not r.stop_reason]
        turns = [(name, phase) for name in active for phase in self.arms[name]]
        rng.shuffle(turns)
        order = [
            Turn(name, phase, number, 2 * number + half)
            for half, side in enumerate((turns, turns[::-1]))
            for name, phase in side
        ]
        for turn, reading in self._undisturbed(number, order):
            self.results[turn.arm].add(turn.phase, number, reading)
        for name in active:
            self.results[name].end_round()
        self._stop(number + 1)

    def _undisturbed(self, number: int, order: list[Turn]) -> list[tuple[Turn, Reading]]:
        """Take the samples of a round; repeat them a few times while the machine is throttled.

        If the machine stays throttled its samples count and are marked, and later rounds are taken
        once.
        """
        for attempt in range(MAX_RETRIES + 1):
            taken = self._take(order)
            if not self.telemetry.check():
                return taken
            if attempt == MAX_RETRIES or self.throttled_rounds:
                break
            for turn, reading in taken:
                self.results[turn.arm].set_aside(turn.phase, number, reading)
            self.sleep(BACK_OFF_SECONDS * BACK_OFF_GROWTH**attempt)
        self.throttled_rounds.append(number)
        return taken

    def _take(self, order: list[Turn]) -> list[tuple[Turn, Reading]]:
        """Take one sample per turn of those contenders that have not failed."""
        requested: list[Turn] = []
        finished: set[int] = set()  # indices of requested turns that raised nothing

        def call(turn: Turn, index: int) -> None:
            self._guard(turn.arm, partial(self._execute, turn))
            if not self.results[turn.arm].error:
                finished.add(index)

        def works() -> Iterator[Work]:
            for turn in order:
                if not self.results[turn.arm].error:
                    requested.append(turn)
                    self.note(f"{turn.arm}|timing, round {turn.round + 1}")
                    index = len(requested) - 1
                    yield Work(partial(call, turn, index), f"{turn.arm}/{turn.phase}")

        try:
            readings = self.clock.read(works())
        except Exception as error:  # a GPU that failed later than it was called: all are suspect
            for name in {turn.arm for turn in order}:
                self.results[name].error, self.results[name].stop_reason = error, "failed"
            return []
        taken = list(zip(requested, readings, strict=True))
        for turn, reading in taken:
            self.spent[turn.arm] += reading.cost
        return [pair for index, pair in enumerate(taken) if index in finished]

    def _execute(self, turn: Turn) -> None:
        phases = self._ready[turn.arm]
        # Phases use different batches in a round, so that none finds its rows warm.
        shift = list(phases).index(turn.phase) * self.timing.pool // len(phases)
        run = phases[turn.phase]
        for number in range(self.results[turn.arm].executions.get(turn.phase, 1)):
            run((turn.batch + shift + number) % self.timing.pool)

    def _stop(self, rounds: int) -> None:
        """Set the reason of the contenders that need not, or may not, go on.

        All stop when the cell's time is used up; earlier, a contender that takes most of it. A very
        slow contender may leave before min_rounds, but not before three.
        """
        timing, enough = self.timing, rounds >= self.timing.min_rounds
        running = {name: r for name, r in self.results.items() if not r.stop_reason}
        budget = timing.cell_seconds
        alone = budget / 2 if enough else (2 * budget if rounds >= 3 else math.inf)
        used_up = enough and sum(self.spent[name] for name in running) > budget
        for name in list(running):
            if used_up or self.spent[name] > alone:
                running.pop(name).stop_reason = "budget"
        if not enough:
            return
        reasons = {}
        for name, result in running.items():
            precise = result.precise(timing.precision, timing.min_seconds)
            reasons[name] = "precise" if precise else "stabilised" * result.stabilised()
        if all(reasons.values()):
            for name, reason in reasons.items():
                running[name].stop_reason = reason


@dataclass(frozen=True)
class Turn:
    """One sample to take."""

    arm: str
    phase: str
    round: int
    batch: int


@dataclass
class Measured:
    """The raw samples of one contender: phase -> (round, seconds), ...; none is ever dropped."""

    samples: Samples = field(default_factory=dict)
    stop_reason: str = ""
    error: Exception | None = None
    warm: Warm | None = None
    executions: dict[str, int] = field(default_factory=dict)  # phase -> calls that share a sample
    throttled: Samples = field(default_factory=dict)  # of rounds that were taken again
    walls: Samples = field(default_factory=dict)  # on the host, where that is another number
    flags: set[str] = field(default_factory=set)
    hardware: dict[str, Any] = field(default_factory=dict)
    clock: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, list[float]] = field(default_factory=dict)  # phase -> spread after each round
    exposed: int = 0  # samples in which the GPU waited for the host

    def precise(self, target: float, seconds: float = 0.0) -> bool:
        """Return whether every phase was sampled long enough and is known to `target`."""
        times = {phase: [s for _, s in taken] for phase, taken in self.samples.items()}
        return all(
            sum(s) * self.executions.get(phase, 1) >= seconds
            and statistics.summarise(s).precision <= target
            for phase, s in times.items()
        )

    def stabilised(self) -> bool:
        """Return whether the noise of each phase has not changed for many rounds."""
        return bool(self.noise) and all(statistics.settled(n) for n in self.noise.values())

    def add(self, phase: str, number: int, reading: Reading) -> None:
        """Add a sample; its seconds are divided by its number of calls."""
        share = 1 / self.executions.get(phase, 1)
        self.samples[phase].append((number, reading.seconds * share))
        if reading.wall != reading.seconds:
            self.walls.setdefault(phase, []).append((number, reading.wall * share))
        self.exposed += reading.exposed

    def set_aside(self, phase: str, number: int, reading: Reading) -> None:
        """Keep a sample of a throttled machine that will be taken again."""
        share = 1 / self.executions.get(phase, 1)
        self.throttled.setdefault(phase, []).append((number, reading.seconds * share))

    def end_round(self) -> None:
        """Note how noisy the phases are."""
        for phase, taken in self.samples.items():
            s = statistics.summarise([seconds for _, seconds in taken])
            if s.n:
                self.noise.setdefault(phase, []).append(s.spread)

    def conclude(
        self, flags: Sequence[str], hardware: dict[str, Any], clock: dict[str, Any]
    ) -> None:
        """Add what was seen of the machine once the race is over."""
        taken = sum(map(len, self.samples.values()))
        self.flags |= set(flags)
        if self.exposed > MAX_EXPOSED_SHARE * taken:
            self.flags.add("launch_exposed")
        self.hardware, self.clock = {**self.hardware, **hardware}, clock

    def describe(self) -> dict[str, Any]:
        """Return all but the samples, for the record."""
        facts: dict[str, Any] = {
            "stop_reason": self.stop_reason,
            "flags": sorted(self.flags),
            "warm": self.warm.describe() if self.warm else {},
            "hardware": self.hardware,
            "clock": self.clock,
        }
        if any(n > 1 for n in self.executions.values()):
            facts["executions"] = self.executions
        if self.throttled:
            facts["throttled_samples"] = self.throttled
        if self.walls:
            facts["wall_samples"] = self.walls
        return facts


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
