"""What a race found out about one contender: samples, why it stopped, what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.timing import stats
from experiments.timing.clock import Reading
from experiments.timing.warmup import Warm

Samples = dict[str, list[tuple[int, float]]]  # phase -> (round, seconds), ...
EXPOSED = 0.1  # a larger share of samples with launches inside is worth a flag


@dataclass
class Measured:
    """Raw samples of one contender: phase -> (round, seconds), ... Nothing is ever dropped."""

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
        """Every phase was sampled for so long, and its median is known to within `target`."""
        times = {phase: [s for _, s in taken] for phase, taken in self.samples.items()}
        return all(
            sum(s) * self.executions.get(phase, 1) >= seconds
            and stats.summarise(s).precision <= target
            for phase, s in times.items()
        )

    def stabilised(self) -> bool:
        """How noisy each phase is has not changed for many rounds: more would show no more."""
        return bool(self.noise) and all(stats.settled(n) for n in self.noise.values())

    def add(self, phase: str, number: int, reading: Reading) -> None:
        """One sample; several calls in it count as one call each."""
        share = 1 / self.executions.get(phase, 1)
        self.samples[phase].append((number, reading.seconds * share))
        if reading.wall != reading.seconds:
            self.walls.setdefault(phase, []).append((number, reading.wall * share))
        self.exposed += reading.exposed

    def set_aside(self, phase: str, number: int, reading: Reading) -> None:
        """A sample of a throttled machine that will be taken again; it is kept."""
        share = 1 / self.executions.get(phase, 1)
        self.throttled.setdefault(phase, []).append((number, reading.seconds * share))

    def end_round(self) -> None:
        """Note how noisy the phases are."""
        for phase, taken in self.samples.items():
            s = stats.summarise([seconds for _, seconds in taken])
            if s.n:
                self.noise.setdefault(phase, []).append(s.spread)

    def conclude(
        self, flags: Sequence[str], hardware: dict[str, Any], clock: dict[str, Any]
    ) -> None:
        """The race is over; what was seen of the machine belongs to all who ran."""
        taken = sum(map(len, self.samples.values()))
        self.flags |= set(flags)
        if self.exposed > EXPOSED * taken:
            self.flags.add("launch_exposed")
        self.hardware, self.clock = {**self.hardware, **hardware}, clock

    def describe(self) -> dict[str, Any]:
        """All but the samples, for the record."""
        found: dict[str, Any] = {
            "stop_reason": self.stop_reason,
            "flags": sorted(self.flags),
            "warm": self.warm.describe() if self.warm else {},
            "hardware": self.hardware,
            "clock": self.clock,
        }
        if any(n > 1 for n in self.executions.values()):
            found["executions"] = self.executions
        if self.throttled:
            found["throttled_samples"] = self.throttled
        if self.walls:
            found["wall_samples"] = self.walls
        return found
