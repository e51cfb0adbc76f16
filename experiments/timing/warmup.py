"""Warm-up: passes of all phases over all batches, until times and hit rates no longer change."""

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

# Running totals of a cache by `lookups`, `lookup_hits` and other names; {} without a cache.
Counters = Callable[[], Mapping[str, int]]


@dataclass
class WarmUpResult:
    """The result of a contender's warm-up.

    Attributes:
        passes: number of complete passes over the pool.
        seconds: cost of the warm-up.
        is_steady: whether the last two passes were alike (medians of all phases within
            STEADY_SHARE, no change of the hit rate) and both minima of the warm-up were met.
        hit_rate: share of the last complete pass's lookups that a cache served; None without a
            cache or lookups.
        is_filling: whether the hit rate was still changing, or is known of one pass only.
        median_s: median seconds of each phase in the last pass, which may be incomplete.
    """

    passes: int = 0
    seconds: float = 0.0
    is_steady: bool = False
    hit_rate: float | None = None
    is_filling: bool = False
    median_s: dict[str, float] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """Return the entries of a record's `warm`: passes, seconds, steady, hit_rate if known."""
        entries: dict[str, Any] = {
            "passes": self.passes,
            "seconds": round(self.seconds, 4),
            "steady": self.is_steady,
        }
        if self.hit_rate is not None:
            entries["hit_rate"] = round(self.hit_rate, 5)
        return entries


def warm_up(
    phases: Mapping[str, Phase],
    clock: Clock,
    timing: TimingConfig,
    *,
    key: str = "",
    max_seconds: float | None = None,
    counters: Counters = dict,
) -> WarmUpResult:
    """Repeat passes over the pool until two are alike or the time is used up.

    Args:
        phases: phases of the contender, as `clock.adapt` returned them.
        clock: clock of the race.
        timing: amount of measuring. `pool` is the number of batches of a pass; `warmup` (passes)
            and `warmup_seconds` are minima; with warmup=0 nothing is run.
        key: name of the contender, which begins the keys of tasks.
        max_seconds: maximum cost, by default timing.warmup_cap; the last batch may exceed it. A
            contender that needs longer for a pass gets as many batches as fit, at least one, and is
            not steady.
        counters: function that returns the running totals of the contender's cache; it is called
            before the first pass and after each complete one.

    An exception of a phase or of the clock is passed on.
    """
    result, max_s = WarmUpResult(), timing.warmup_cap if max_seconds is None else max_seconds
    totals = dict(counters())
    while timing.warmup:
        is_complete, seconds, medians_s = _run_pass(
            phases, clock, timing.pool, key, max_s - result.seconds
        )
        result.seconds += seconds
        previous_medians_s, result.median_s = result.median_s, medians_s
        if not is_complete:
            return result
        result.passes += 1
        previous_hit_rate, previous_totals, totals = result.hit_rate, totals, dict(counters())
        result.hit_rate = _hit_rate(previous_totals, totals)
        result.is_filling = result.hit_rate is not None and (
            previous_hit_rate is None
            or abs(result.hit_rate - previous_hit_rate) >= STEADY_HIT_RATE_CHANGE
        )
        is_stable = previous_medians_s.keys() == medians_s.keys() and all(
            abs(medians_s[phase] - previous_medians_s[phase])
            <= STEADY_SHARE * previous_medians_s[phase]
            for phase in medians_s
        )
        has_minimum = result.passes >= timing.warmup and result.seconds >= timing.warmup_seconds
        result.is_steady = is_stable and has_minimum and not result.is_filling
        if result.is_steady or result.seconds >= max_s:
            return result
    return result


def _run_pass(
    phases: Mapping[str, Phase], clock: Clock, num_batches: int, key: str, max_seconds: float
) -> tuple[bool, float, dict[str, float]]:
    """Run every phase on batch 0, then on batch 1, ...; stop once the cost exceeds `max_seconds`.

    The first batch always runs. Return whether all batches were run, the cost in seconds, and the
    median seconds of each phase.
    """
    samples_by_phase: dict[str, list[float]] = {phase: [] for phase in phases}
    cost_s, batch_number = 0.0, 0
    for batch_number in range(num_batches):
        tasks = [
            SampleTask(partial(call, batch_number), f"{key}/{phase}")
            for phase, call in phases.items()
        ]
        for phase, reading in zip(phases, clock.read(tasks), strict=True):
            samples_by_phase[phase].append(reading.seconds)
            cost_s += reading.cost_s
        if cost_s > max_seconds:
            break
    medians_s = {
        phase: statistics.summarise(samples_s).median
        for phase, samples_s in samples_by_phase.items()
        if samples_s
    }
    return batch_number + 1 >= num_batches, cost_s, medians_s


def _hit_rate(before: Mapping[str, int], now: Mapping[str, int]) -> float | None:
    if "lookup_hits" not in before or "lookup_hits" not in now:
        return None
    lookups = now["lookups"] - before["lookups"]
    return (now["lookup_hits"] - before["lookup_hits"]) / lookups if lookups else None
