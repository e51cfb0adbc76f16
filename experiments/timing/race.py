"""Interleaved timing: a round times all phases of all contenders, in random order and reversed.

A *round* takes two samples of every phase (a timed call) of every arm (a contender): in random
order, then in the reverse order. The arms stop together: when all are precise or no longer change,
when the budget is used up, or after the last round. An arm that uses half of the budget alone stops
earlier, and an arm that fails stops at once. Reports compare samples of the same round only.
"""

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
from experiments.timing.clock import Clock, Phase, Reading, SampleTask
from experiments.timing.warmup import WarmUpResult, warm_up

Samples = dict[str, list[tuple[int, float]]]  # {phase: [(round, seconds per call), ...]}
MAX_EXPOSED_SHARE = 0.1  # share of samples with launches that raises the flag `launch_exposed`
MAX_EXECUTIONS = 64  # maximum number of calls in a sample
SLOW_MIN_ROUNDS = 3  # minimum number of rounds of a very slow contender
MAX_RETRIES = 3  # maximum repetitions of a round in which the machine was throttled
BACK_OFF_SECONDS, BACK_OFF_GROWTH = 0.05, 2.5  # wait before the first repetition; its growth


@dataclass
class Race:
    """The contenders of a cell in one process; `run` times them interleaved.

    An exception of a contender's phase, or of a function about it, makes only this contender fail.

    Attributes:
        phases_by_arm: phases of each contender by the arm's key, {arm: {phase: call}}.
        timing: amount of measuring; `cell_seconds` is the budget of the race without warm-up.
        clock: clock that takes the samples.
        seed: seed of the order of samples.
        after_warmup: function that is called with an arm after its warm-up, unless that failed.
        counters: function that returns the running totals of an arm's cache; {} without a cache.
        telemetry: observer of the machine, which the race starts and stops.
        note: function that is called with "arm|activity" before each warm-up and each sample.
        sleep: function that waits for some seconds.
        results: samples and other observations by arm, filled by `run`.
        spent_s: seconds that each arm has used of the budget.
        throttled_rounds: rounds that count although the machine was throttled in them.
    """

    phases_by_arm: Mapping[str, Mapping[str, Phase]]
    timing: TimingConfig
    clock: Clock
    seed: int = 0
    after_warmup: Callable[[str], object] = lambda arm: None
    counters: Callable[[str], Mapping[str, int]] = lambda arm: {}
    telemetry: Telemetry = field(default_factory=Telemetry)
    note: Callable[[str], object] = lambda text: None
    sleep: Callable[[float], object] = time.sleep
    results: dict[str, RaceResult] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    throttled_rounds: list[int] = field(default_factory=list)
    # Phases as `Clock.adapt` returned them.
    _adapted_phases: dict[str, dict[str, Phase]] = field(default_factory=dict)

    def run(self) -> dict[str, RaceResult]:
        """Warm up, run up to timing.max_rounds rounds, return `results`.

        Rounds end earlier once each contender has a reason to stop. A contender that failed has
        `error`, and the samples before it. Python's garbage collection is off during the race.
        Call it once.
        """
        for arm, phases in self.phases_by_arm.items():
            self.results[arm] = RaceResult({phase: [] for phase in phases})
            self._adapted_phases[arm] = dict(phases)
        rng = random.Random(self.seed)
        with _no_garbage_collection():
            for arm in rng.sample(sorted(self.phases_by_arm), len(self.phases_by_arm)):
                self._guard(arm, partial(self._warm_up, arm))
                self._guard(arm, partial(self.after_warmup, arm))
            self.spent_s = dict.fromkeys(self.phases_by_arm, 0.0)
            with self.telemetry:
                for round_number in range(self.timing.max_rounds):
                    self._run_round(round_number, rng)
                    if all(result.stop_reason for result in self.results.values()):
                        break
        hardware, flags = self.telemetry.summary(), self.telemetry.flags()
        if self.throttled_rounds:
            hardware["throttled_rounds"] = self.throttled_rounds
            flags = [*flags, "throttled"]
        for result in self.results.values():
            result.stop_reason = result.stop_reason or "max_rounds"
            result.conclude(flags, hardware)
        return self.results

    def _guard(self, arm: str, action: Callable[[], object]) -> None:
        """Call `action` unless the contender has failed; its exception fails this contender."""
        result = self.results[arm]
        if result.error:
            return
        try:
            action()
        except Exception as error:
            result.error, result.stop_reason = error, "failed"

    def _warm_up(self, arm: str) -> None:
        """Adapt the phases of a contender to the clock, warm it up, and set its calls per sample.

        The warm-up may take timing.warmup_cap or the contender's share of timing.cell_seconds,
        whichever is shorter; with a cache timing.cell_seconds, except in a smoke run.
        """
        timing, phases, result = self.timing, self._adapted_phases[arm], self.results[arm]
        self.note(f"{arm}|warming up")
        for phase, call in phases.items():
            phases[phase] = self.clock.adapt(call, timing.pool)
        counters = partial(self.counters, arm)
        max_s = min(timing.warmup_cap, timing.cell_seconds / len(self.phases_by_arm))
        # The times of a contender change until its cache is full.
        if counters() and not timing.max_rows:
            max_s = max(max_s, timing.cell_seconds)
        warm_up_result = warm_up(
            phases, self.clock, timing, key=arm, max_seconds=max_s, counters=counters
        )
        result.warm_up_result = warm_up_result
        if timing.warmup and (not warm_up_result.passes or warm_up_result.is_filling):
            result.flags.add("not_warm")
        min_sample_s = self.clock.min_sample_seconds  # several shorter calls form one sample
        for phase in phases:
            seconds = warm_up_result.median_s.get(phase, math.inf)
            num_calls = math.ceil(min_sample_s / seconds) if 0 < seconds < min_sample_s else 1
            result.executions[phase] = min(MAX_EXECUTIONS, num_calls)

    def _run_round(self, round_number: int, rng: random.Random) -> None:
        """Take two samples of every phase of every contender that has not stopped.

        The second samples are taken in reverse order, so that a drift affects all phases alike.
        """
        running_arms = [arm for arm, result in self.results.items() if not result.stop_reason]
        turns = [(arm, phase) for arm in running_arms for phase in self.phases_by_arm[arm]]
        rng.shuffle(turns)
        order = [
            Turn(arm, phase, round_number, 2 * round_number + half)
            for half, turns_of_half in enumerate((turns, turns[::-1]))
            for arm, phase in turns_of_half
        ]
        for turn, reading in self._take_undisturbed(round_number, order):
            self.results[turn.arm].add(turn.phase, round_number, reading)
        for arm in running_arms:
            self.results[arm].end_round()
        self._set_stop_reasons(round_number + 1)

    def _take_undisturbed(self, round_number: int, order: list[Turn]) -> list[tuple[Turn, Reading]]:
        """Take the samples of a round; repeat them up to MAX_RETRIES times if it was throttled.

        If it is throttled each time, its last samples count, `throttled_rounds` names the round,
        and no later round is repeated.
        """
        for attempt in range(MAX_RETRIES + 1):
            samples = self._take_samples(order)
            if not self.telemetry.check():
                return samples
            if attempt == MAX_RETRIES or self.throttled_rounds:
                break
            for turn, reading in samples:
                self.results[turn.arm].add_throttled(turn.phase, round_number, reading)
            self.sleep(BACK_OFF_SECONDS * BACK_OFF_GROWTH**attempt)
        self.throttled_rounds.append(round_number)
        return samples

    def _take_samples(self, order: list[Turn]) -> list[tuple[Turn, Reading]]:
        """Take one sample per turn; return the samples whose calls raised nothing.

        Turns of contenders that have failed are left out. If the clock itself fails, all contenders
        of these turns fail, without a sample.
        """
        requested: list[Turn] = []
        finished: set[int] = set()  # indices of requested turns that raised nothing

        def call(turn: Turn, index: int) -> None:
            self._guard(turn.arm, partial(self._run_turn, turn))
            if not self.results[turn.arm].error:
                finished.add(index)

        def tasks() -> Iterator[SampleTask]:
            for turn in order:
                if not self.results[turn.arm].error:
                    requested.append(turn)
                    self.note(f"{turn.arm}|timing, round {turn.round_number + 1}")
                    index = len(requested) - 1
                    yield SampleTask(partial(call, turn, index), f"{turn.arm}/{turn.phase}")

        try:
            readings = self.clock.read(tasks())
        except Exception as error:  # a GPU fails after the call: any contender may be the cause
            for arm in {turn.arm for turn in order}:
                self.results[arm].error, self.results[arm].stop_reason = error, "failed"
            return []
        samples = list(zip(requested, readings, strict=True))
        for turn, reading in samples:
            self.spent_s[turn.arm] += reading.cost_s
        return [sample for index, sample in enumerate(samples) if index in finished]

    def _run_turn(self, turn: Turn) -> None:
        phases = self._adapted_phases[turn.arm]
        # The phases of a round use different batches: else a phase would find its rows in a cache
        # after the phase before it.
        batch_shift = list(phases).index(turn.phase) * self.timing.pool // len(phases)
        call = phases[turn.phase]
        for call_index in range(self.results[turn.arm].executions.get(turn.phase, 1)):
            call((turn.batch + batch_shift + call_index) % self.timing.pool)

    def _set_stop_reasons(self, num_rounds: int) -> None:
        """Set the stop reasons after `num_rounds` rounds.

        "budget": all running contenders together have used up the budget, or one has used half of
        it alone. Before timing.min_rounds a contender stops only if it has used twice the budget
        and has SLOW_MIN_ROUNDS. "precise" and "stabilised" are set once every running contender is
        one of these, because contenders are compared over common rounds.
        """
        timing, has_min_rounds = self.timing, num_rounds >= self.timing.min_rounds
        running_arms = {
            arm: result for arm, result in self.results.items() if not result.stop_reason
        }
        budget_s = timing.cell_seconds
        slow_limit_s = 2 * budget_s if num_rounds >= SLOW_MIN_ROUNDS else math.inf
        max_seconds_of_one = budget_s / 2 if has_min_rounds else slow_limit_s
        is_budget_used_up = (
            has_min_rounds and sum(self.spent_s[arm] for arm in running_arms) > budget_s
        )
        for arm in list(running_arms):
            if is_budget_used_up or self.spent_s[arm] > max_seconds_of_one:
                running_arms.pop(arm).stop_reason = "budget"
        if not has_min_rounds:
            return
        reason_of_arm = {}
        for arm, result in running_arms.items():
            is_precise = result.is_precise(timing.precision, timing.min_seconds)
            reason_of_arm[arm] = "precise" if is_precise else "stabilised" * result.is_stabilised()
        if all(reason_of_arm.values()):
            for arm, reason in reason_of_arm.items():
                running_arms[arm].stop_reason = reason


@dataclass(frozen=True)
class Turn:
    """A sample to take: which arm and phase, in which round, on which batch."""

    arm: str
    phase: str
    round_number: int
    batch: int


@dataclass
class RaceResult:
    """The raw samples of a contender, and further observations of it.

    Attributes:
        samples: samples that count, two per phase and round, in seconds per call.
        stop_reason: "precise", "stabilised", "budget", "max_rounds" or "failed"; "" while running.
            Kinds without a race set words of their own.
        error: exception that ended the contender; None without one.
        warm_up_result: result of the warm-up; None if it failed.
        executions: calls per sample by phase; 1 for a phase without an entry.
        throttled_samples: samples of rounds that were repeated.
        wall_samples: seconds per call on the host, for samples from which they differ.
        flags: flags of the contender, keys of `machine.flags.ADVICE`.
        hardware: observations of the telemetry.
        noise: interquartile range ÷ median of all samples so far, after each round, by phase.
        num_exposed: number of samples in which the GPU waited for the host.
    """

    samples: Samples = field(default_factory=dict)
    stop_reason: str = ""
    error: Exception | None = None
    warm_up_result: WarmUpResult | None = None
    executions: dict[str, int] = field(default_factory=dict)
    throttled_samples: Samples = field(default_factory=dict)
    wall_samples: Samples = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    hardware: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, list[float]] = field(default_factory=dict)
    num_exposed: int = 0

    def is_precise(self, target: float, seconds: float) -> bool:
        """Return whether every phase has `seconds` of samples and a precision of `target`.

        The precision is the half-width of the median's 95 % interval ÷ the median; smaller is
        better (`statistics.Summary.precision`).
        """
        samples_by_phase = {
            phase: [samples_s for _, samples_s in samples]
            for phase, samples in self.samples.items()
        }
        return all(
            sum(samples_s) * self.executions.get(phase, 1) >= seconds
            and statistics.summarise(samples_s).precision <= target
            for phase, samples_s in samples_by_phase.items()
        )

    def is_stabilised(self) -> bool:
        """Return whether the noise of every phase has settled, see `statistics.has_settled`."""
        return bool(self.noise) and all(
            statistics.has_settled(noise) for noise in self.noise.values()
        )

    def add(self, phase: str, round_number: int, reading: Reading) -> None:
        """Add a sample of `phase` in round `round_number`, as seconds per call."""
        per_call = 1 / self.executions.get(phase, 1)
        self.samples[phase].append((round_number, reading.seconds * per_call))
        if reading.wall_s != reading.seconds:
            self.wall_samples.setdefault(phase, []).append(
                (round_number, reading.wall_s * per_call)
            )
        self.num_exposed += reading.is_exposed

    def add_throttled(self, phase: str, round_number: int, reading: Reading) -> None:
        """Add a sample of a throttled round, which is repeated, to `throttled_samples`."""
        per_call = 1 / self.executions.get(phase, 1)
        self.throttled_samples.setdefault(phase, []).append(
            (round_number, reading.seconds * per_call)
        )

    def end_round(self) -> None:
        """Append the noise of each phase to `noise`."""
        for phase, samples in self.samples.items():
            summary = statistics.summarise([seconds for _, seconds in samples])
            if summary.n:
                self.noise.setdefault(phase, []).append(summary.spread)

    def conclude(self, flags: Sequence[str], hardware: dict[str, Any]) -> None:
        """Add flags and observations of the machine, at the end of the race.

        The flag `launch_exposed` is added if the GPU waited for the host in too many samples.
        """
        self.flags |= set(flags)
        if self.num_exposed > MAX_EXPOSED_SHARE * sum(map(len, self.samples.values())):
            self.flags.add("launch_exposed")
        self.hardware |= hardware

    def entries(self) -> dict[str, Any]:
        """Return entries of a record: stop_reason, flags, warm, hardware, and others if not empty.

        The others are executions, throttled_samples and wall_samples; not `samples`.
        """
        entries: dict[str, Any] = {
            "stop_reason": self.stop_reason,
            "flags": sorted(self.flags),
            "warm": self.warm_up_result.entries() if self.warm_up_result else {},
            "hardware": self.hardware,
        }
        if any(num_calls > 1 for num_calls in self.executions.values()):
            entries["executions"] = self.executions
        if self.throttled_samples:
            entries["throttled_samples"] = self.throttled_samples
        if self.wall_samples:
            entries["wall_samples"] = self.wall_samples
        return entries


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
