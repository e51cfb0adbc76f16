"""Order statistics of raw samples: medians, quartiles, and distribution-free 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
SETTLED_WINDOW, SETTLED_WITHIN = 32, 0.05


@dataclass(frozen=True)
class Summary:
    """A sample in five numbers; lo and hi bound the median with 95 % confidence (nan if n < 6)."""

    n: int
    median: float
    q25: float
    q75: float
    lo: float
    hi: float

    @property
    def precision(self) -> float:
        """Half-width of the interval relative to the median; inf while there is no interval."""
        width = (self.hi - self.lo) / 2
        return width / abs(self.median) if self.median and math.isfinite(width) else math.inf

    @property
    def spread(self) -> float:
        """Distance of the quartiles relative to the median: how noisy, whatever the number."""
        return (self.q75 - self.q25) / abs(self.median) if self.median else math.inf


def quantile(ordered: Sequence[float], p: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    at = p * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def interval_rank(n: int) -> int | None:
    """Largest k with P(k-th smallest <= median <= k-th largest) >= 95 %; None if n is too small."""
    tail, found = 0.0, None
    for k in range(1, n // 2 + 1):
        tail += math.comb(n, k - 1) / 2**n
        if 1 - 2 * tail < CONFIDENCE:
            break
        found = k
    return found


def summarise(samples: Sequence[float]) -> Summary:
    """Every sample counts; nothing is dropped."""
    ordered = sorted(samples)
    if not ordered:
        return Summary(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    k = interval_rank(len(ordered))
    lo, hi = (ordered[k - 1], ordered[-k]) if k else (math.nan, math.nan)
    q25, median, q75 = (quantile(ordered, p) for p in (0.25, 0.5, 0.75))
    return Summary(len(ordered), median, q25, q75, lo, hi)


@dataclass(frozen=True)
class Tail:
    """What the median does not tell of a sample."""

    least: float
    p90: float
    p99: float


def tail(samples: Sequence[float]) -> Tail:
    """The ends of a sample; nan where there is none."""
    ordered = sorted(samples)
    if not ordered:
        return Tail(math.nan, math.nan, math.nan)
    return Tail(ordered[0], quantile(ordered, 0.9), quantile(ordered, 0.99))


def settled(noise: Sequence[float]) -> bool:
    """The last 32 estimates of a noise, each from more samples than the last, agree to 5 %."""
    last = noise[-SETTLED_WINDOW:]
    if len(noise) < SETTLED_WINDOW:
        return False
    return max(last) - min(last) <= SETTLED_WITHIN * quantile(sorted(last), 0.5)


def paired_ratio(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Summary:
    """arm / baseline by round: the median of per-round log ratios, exponentiated, its interval.

    Only rounds in which both ran count: what slows the whole machine for a moment then slows both
    sides of a pair and cancels.
    """
    logs = [math.log(arm[r] / baseline[r]) for r in sorted(arm.keys() & baseline.keys())]
    s = summarise(logs)
    return Summary(
        s.n, math.exp(s.median), math.exp(s.q25), math.exp(s.q75), math.exp(s.lo), math.exp(s.hi)
    )
