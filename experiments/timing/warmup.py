"""Warm-up: every batch, every phase, until times and hit rates no longer change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from experiments.config.schema import TimingConfig
from experiments.timing import statistics
from experiments.timing.clock import Clock, Phase, SampleTask

STEADY_SHARE = 0.02  # maximum difference of the medians of two passes, as a share
STEADY_HIT_RATE_CHANGE = 0.005  # maximum difference of the hit rates of two passes

Counters = Callable[[], Mapping[str, int]]  # running totals of a cache; {} without a cache


@dataclass
class Warm:
    """The state of a contender after its warm-up.

    Attributes:
        passes: complete passes over the pool.
        seconds: cost of the warm-up.
        steady: True if the last two passes were alike, and both minima of the warm-up are reached.
        hit_rate: share of the last pass's lookups that a cache served; None without a cache.
        filling: True if the hit rate was still changing, or if only one pass has one.
        typical: median seconds of each phase in the last pass.
    """

    passes: int = 0
    seconds: float = 0.0
    steady: bool = False
    hit_rate: float | None = None
    filling: bool = False
    typical: dict[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the entries of the record."""
        facts: dict[str, Any] = {
            "passes": self.passes,
            "seconds": round(self.seconds, 4),
            "steady": self.steady,
        }
        if self.hit_rate is not None:
            facts["hit_rate"] = round(self.hit_rate, 5)
        return facts


def warm_up(
    phases: Mapping[str, Phase],
    clock: Clock,
    timing: TimingConfig,
    *,
    key: str = "",
    max_seconds: float | None = None,
    counters: Counters = dict,
) -> Warm:
    """Repeat passes over the pool until two are alike or the time is used up.

    Args:
        phases: phases of the contender.
        clock: clock of the race.
        timing: amount of measuring; `warmup` and `warmup_seconds` are minima. Without `warmup`
            nothing is run.
        key: name of the contender in the keys of tasks.
        max_seconds: maximum duration, by default timing.warmup_cap. A slow contender gets as many
            batches as fit, at least one, and does not count as steady.
        counters: running totals of its cache, which are read between passes.
    """
    warm, cap = Warm(), timing.warmup_cap if max_seconds is None else max_seconds
    totals = dict(counters())
    while timing.warmup:
        complete, seconds, medians = _pass(phases, clock, timing.pool, key, cap - warm.seconds)
        warm.seconds += seconds
        medians_before, warm.typical = warm.typical, medians
        if not complete:
            return warm
        warm.passes += 1
        rate_before, totals_before, totals = warm.hit_rate, totals, dict(counters())
        warm.hit_rate = _hit_rate(totals_before, totals)
        warm.filling = warm.hit_rate is not None and (
            rate_before is None or abs(warm.hit_rate - rate_before) >= STEADY_HIT_RATE_CHANGE
        )
        is_stable = medians_before.keys() == medians.keys() and all(
            abs(medians[phase] - medians_before[phase]) <= STEADY_SHARE * medians_before[phase]
            for phase in medians
        )
        has_minimum = warm.passes >= timing.warmup and warm.seconds >= timing.warmup_seconds
        warm.steady = is_stable and has_minimum and not warm.filling
        if warm.steady or warm.seconds >= cap:
            return warm
    return warm


def _pass(
    phases: Mapping[str, Phase], clock: Clock, pool: int, key: str, max_seconds: float
) -> tuple[bool, float, dict[str, float]]:
    """Run every phase on every batch, until `max_seconds` are used up but at least on the first.

    Return whether all batches were run, the cost in seconds, and the median of each phase.
    """
    times: dict[str, list[float]] = {phase: [] for phase in phases}
    cost, number = 0.0, 0
    for number in range(pool):
        tasks = [
            SampleTask(partial(run, number), f"{key}/{phase}") for phase, run in phases.items()
        ]
        for phase, reading in zip(phases, clock.read(tasks), strict=True):
            times[phase].append(reading.seconds)
            cost += reading.cost
        if cost > max_seconds:
            break
    medians = {phase: statistics.summarise(s).median for phase, s in times.items() if s}
    return number + 1 >= pool, cost, medians


def _hit_rate(before: Mapping[str, int], now: Mapping[str, int]) -> float | None:
    if "lookup_hits" not in before or "lookup_hits" not in now:
        return None
    lookups = now["lookups"] - before["lookups"]
    return (now["lookup_hits"] - before["lookup_hits"]) / lookups if lookups else None
