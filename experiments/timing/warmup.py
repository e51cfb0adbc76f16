"""Warm-up: every batch, every phase, until times and hit rates no longer change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from experiments.config.schema import TimingConfig
from experiments.timing import statistics
from experiments.timing.clock import Clock, Phase, Work

STEADY = 0.02  # medians of two passes in a row may differ by this much
STEADY_HIT_RATE = 0.005

Counters = Callable[[], Mapping[str, int]]  # running totals of a cache; empty without one


@dataclass
class Warm:
    """The state of a contender when its first sample was taken."""

    passes: int = 0
    seconds: float = 0.0
    steady: bool = False
    hit_rate: float | None = None  # of the lookups of the last pass
    filling: bool = False  # the hit rate was still changing
    typical: dict[str, float] = field(default_factory=dict)  # phase -> median of the last pass

    def describe(self) -> dict[str, Any]:
        """Return the entries of the record."""
        found: dict[str, Any] = {
            "passes": self.passes,
            "seconds": round(self.seconds, 4),
            "steady": self.steady,
        }
        if self.hit_rate is not None:
            found["hit_rate"] = round(self.hit_rate, 5)
        return found


def warm_up(
    phases: Mapping[str, Phase],
    clock: Clock,
    timing: TimingConfig,
    *,
    key: str = "",
    most: float | None = None,
    counters: Counters = dict,
) -> Warm:
    """Repeat passes over the pool: at least `warmup` and `warmup_seconds`, until two are alike.

    At most `most` seconds (timing.warmup_cap unless given): a slow contender gets as many batches
    as fit, but at least one, and is not called steady. Hit rates are looked at between passes.
    """
    warm, most = Warm(), timing.warmup_cap if most is None else most
    hits = _totals(counters)
    while timing.warmup:
        taken = _pass(phases, clock, timing.pool, key, most - warm.seconds)
        warm.seconds += taken.cost
        before, warm.typical = warm.typical, taken.medians()
        if not taken.whole:
            return warm
        warm.passes += 1
        rate_before, last = warm.hit_rate, hits
        hits = _totals(counters)
        warm.hit_rate = _rate(last, hits)
        warm.filling = _is_filling(rate_before, warm.hit_rate)
        warm.steady = (
            _alike(before, warm.typical)
            and not warm.filling
            and warm.passes >= timing.warmup
            and warm.seconds >= timing.warmup_seconds
        )
        if warm.steady or warm.seconds >= most:
            return warm
    return warm


@dataclass
class _Pass:
    """Times of one pass over the pool."""

    seconds: dict[str, list[float]]
    cost: float = 0.0
    whole: bool = True

    def medians(self) -> dict[str, float]:
        return {phase: statistics.summarise(s).median for phase, s in self.seconds.items() if s}


def _pass(phases: Mapping[str, Phase], clock: Clock, pool: int, key: str, most: float) -> _Pass:
    """Run every phase on every batch until the time is used up; the first batch in any case."""
    taken = _Pass({phase: [] for phase in phases})
    for number in range(pool):
        works = [Work(partial(run, number), f"{key}/{phase}") for phase, run in phases.items()]
        for phase, reading in zip(phases, clock.read(works), strict=True):
            taken.seconds[phase].append(reading.seconds)
            taken.cost += reading.cost
        if taken.cost > most and number + 1 < pool:
            taken.whole = False
            return taken
    return taken


def _alike(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return before.keys() == now.keys() and all(
        abs(now[phase] - before[phase]) <= STEADY * before[phase] for phase in now
    )


def _is_filling(before: float | None, now: float | None) -> bool:
    """Return whether a cache is still filling; without a cache nothing is."""
    return now is not None and (before is None or abs(now - before) >= STEADY_HIT_RATE)


def _totals(counters: Counters) -> tuple[int, int] | None:
    found = counters()
    return (found["lookups"], found["lookup_hits"]) if "lookup_hits" in found else None


def _rate(last: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    if last is None or now is None or now[0] == last[0]:
        return None
    return (now[1] - last[1]) / (now[0] - last[0])
