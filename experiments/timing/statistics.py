"""Statistics of raw samples and of effects over processes: intervals, tests and verdicts.

Samples of one process are summarised by order statistics, with a distribution-free interval of the
median; effects over processes by the mean of their logarithms, with Student's interval. Functions
import scipy on use: processes that measure do not need it, and the command line starts faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

CONFIDENCE = 0.95  # probability of every interval
SETTLED_WINDOW = 32  # number of estimates of the noise that must agree
SETTLED_WITHIN = 0.05  # their maximum range ÷ their median


@dataclass(frozen=True)
class Summary:
    """A summary of `n` samples: quartiles, and the 95 % interval of the median (nan if n < 6)."""

    n: int
    median: float
    q25: float
    q75: float
    lo: float
    hi: float

    @property
    def precision(self) -> float:
        """Return the half-width of the interval ÷ the median; inf without an interval."""
        width = (self.hi - self.lo) / 2
        return width / abs(self.median) if self.median and math.isfinite(width) else math.inf

    @property
    def spread(self) -> float:
        """Return the interquartile range ÷ the median."""
        return (self.q75 - self.q25) / abs(self.median) if self.median else math.inf

    def columns(self) -> dict[str, float]:
        """Return the values as columns of a table, in seconds."""
        return {f"{name}_s": getattr(self, name) for name in ("median", "q25", "q75", "lo", "hi")}


def quantile(ordered: Sequence[float], p: float) -> float:
    """Return the p-quantile of sorted values, at least one, interpolated linearly as by numpy."""
    position = p * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def interval_rank(n: int) -> int | None:
    """Return the largest k with P(k-th smallest <= median <= k-th largest of n) >= 95 %.

    None if there is no such k, which is so for n < 6.
    """
    tail_probability, rank = 0.0, None
    for k in range(1, n // 2 + 1):
        tail_probability += math.comb(n, k - 1) / 2**n
        if 1 - 2 * tail_probability < CONFIDENCE:
            break
        rank = k
    return rank


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise samples in any order; no value is dropped. Without samples all numbers are nan."""
    ordered_samples = sorted(samples)
    if not ordered_samples:
        return Summary(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    rank = interval_rank(len(ordered_samples))
    lo, hi = (ordered_samples[rank - 1], ordered_samples[-rank]) if rank else (math.nan, math.nan)
    q25, median, q75 = (quantile(ordered_samples, p) for p in (0.25, 0.5, 0.75))
    return Summary(len(ordered_samples), median, q25, q75, lo, hi)


@dataclass(frozen=True)
class Tail:
    """The minimum and the upper quantiles of samples."""

    minimum: float
    p90: float
    p99: float


def tail_of(samples: Sequence[float]) -> Tail:
    """Return the minimum and the upper quantiles of samples in any order; nan without samples."""
    ordered_samples = sorted(samples)
    if not ordered_samples:
        return Tail(math.nan, math.nan, math.nan)
    return Tail(ordered_samples[0], quantile(ordered_samples, 0.9), quantile(ordered_samples, 0.99))


def has_settled(noise: Sequence[float]) -> bool:
    """Return whether the last SETTLED_WINDOW estimates of the noise agree to SETTLED_WITHIN.

    False for fewer estimates.
    """
    last = noise[-SETTLED_WINDOW:]
    if len(noise) < SETTLED_WINDOW:
        return False
    return max(last) - min(last) <= SETTLED_WITHIN * quantile(sorted(last), 0.5)


MIN_PROCESSES = 2  # minimum for an interval over processes
NOISE_FACTOR = 3.0  # minimum of a margin, in median deviations of an A/A effect


@dataclass(frozen=True)
class Effect:
    """A ratio of times over processes, with its 95 % t-interval.

    Attributes:
        ratio: exponential of the mean of the processes' log ratios; nan without a process.
        lo: lower end of the interval; nan for fewer than two processes.
        hi: upper end of the interval; nan for fewer than two processes.
        processes: number of processes.
        spread: standard deviation of the log ratios by which the interval was computed; nan for
            fewer than two processes.
    """

    ratio: float
    lo: float
    hi: float
    processes: int
    spread: float

    def columns(self) -> dict[str, float]:
        """Return the ratio and its interval as columns of a table."""
        return {"ratio": self.ratio, "ratio_lo": self.lo, "ratio_hi": self.hi}


class Verdict(Enum):
    """The conclusion about an effect, given a margin."""

    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SAME = "SAME"
    UNSURE = "UNSURE"


def process_effect(arm: Mapping[int, float], base: Mapping[int, float]) -> float:
    """Return the median of log(arm / base) over common rounds; both are {round: seconds > 0}.

    Raises:
        ValueError: there is no common round.
    """
    common = sorted(arm.keys() & base.keys())
    if not common:
        raise ValueError("the arms have no round in common, so there is nothing to pair")
    return statistics.median(math.log(arm[number] / base[number]) for number in common)


@dataclass(frozen=True)
class ProcessSpread:
    """The variation between processes, pooled over the comparisons of one run.

    Attributes:
        spread: standard deviation of log ratios (or log times) within a comparison.
        degrees_of_freedom: sum over the comparisons of the number of processes minus one.
    """

    spread: float
    degrees_of_freedom: int


def pool_spreads(comparisons: Iterable[Sequence[float]]) -> ProcessSpread | None:
    """Pool the variance within comparisons, each given by one log per process.

    Comparisons of one process do not count; None if there are no others.
    """
    groups = [logs for logs in comparisons if len(logs) >= MIN_PROCESSES]
    degrees_of_freedom = sum(len(logs) - 1 for logs in groups)
    if not degrees_of_freedom:
        return None
    sum_of_squares = sum((len(logs) - 1) * statistics.variance(logs) for logs in groups)
    return ProcessSpread(math.sqrt(sum_of_squares / degrees_of_freedom), degrees_of_freedom)


def combine_processes(logs: Sequence[float], pooled: ProcessSpread | None = None) -> Effect:
    """Return the effect over processes from one log ratio per process.

    `pooled` is the spread of all comparisons of the run; None if it is unknown. Only two processes
    use it: with one degree of freedom, an interval from their own spread is mostly far too wide,
    sometimes far too narrow. If the pool has more degrees of freedom, two processes use these, and
    the larger of both spreads.
    """
    num_processes = len(logs)
    if not num_processes:
        return Effect(math.nan, math.nan, math.nan, 0, math.nan)
    mean = statistics.fmean(logs)
    if num_processes < MIN_PROCESSES:
        return Effect(math.exp(mean), math.nan, math.nan, num_processes, math.nan)
    spread, degrees_of_freedom = statistics.stdev(logs), num_processes - 1
    if (
        num_processes == MIN_PROCESSES
        and pooled is not None
        and pooled.degrees_of_freedom > degrees_of_freedom
    ):
        spread, degrees_of_freedom = max(spread, pooled.spread), pooled.degrees_of_freedom
    half_width = t_quantile(degrees_of_freedom) * spread / math.sqrt(num_processes)
    return Effect(
        math.exp(mean),
        math.exp(mean - half_width),
        math.exp(mean + half_width),
        num_processes,
        spread,
    )


def verdict(effect: Effect, margin: float) -> Verdict:
    """Return the conclusion about an effect; `margin` is a relative difference, e.g. 0.05.

    SLOWER: the interval is above 1, and the ratio above 1 + margin. FASTER: the interval is below
    1, and the ratio below 1 / (1 + margin). SAME: the interval is between 1 / (1 + margin) and
    1 + margin. Else UNSURE, also without an interval.
    """
    if effect.lo > 1 and effect.ratio > 1 + margin:
        return Verdict.SLOWER
    if effect.hi < 1 and effect.ratio < 1 / (1 + margin):
        return Verdict.FASTER
    if effect.lo > 1 / (1 + margin) and effect.hi < 1 + margin:
        return Verdict.SAME
    return Verdict.UNSURE


def smallest_detectable(effect: Effect, margin: float) -> float:
    """Return the smallest relative effect that would be called slower or faster, approximately.

    It is the margin plus half the width of the logarithmic interval; inf for fewer than two
    processes.
    """
    if effect.processes < MIN_PROCESSES:
        return math.inf
    return margin + math.log(effect.hi / effect.lo) / 2


def gate_margin(min_effect: float, mad_aa: float, num_pairs: int) -> float:
    """Return the margin of a gate over `num_pairs` pairs.

    It is the larger of `min_effect` and NOISE_FACTOR median deviations of the mean of `num_pairs`
    effects. `mad_aa` is the median deviation of a single effect in an A/A comparison.
    """
    return max(min_effect, NOISE_FACTOR * mad_aa / math.sqrt(num_pairs))


def median_deviation(logs: Sequence[float]) -> float:
    """Return the median of |log ratio|, of at least one; an A/A comparison should be near 0."""
    return statistics.median(abs(log) for log in logs)


def p_value(logs: Sequence[float], direction: int) -> float:
    """Return the p-value of a one-sided t-test: small if the mean is in `direction` (+1 or -1).

    It is 1 for fewer than two values. Equal values give 0 if they are in that direction, else 1.
    """
    n = len(logs)
    if n < MIN_PROCESSES:
        return 1.0
    mean, spread = direction * statistics.fmean(logs), statistics.stdev(logs)
    if not spread:
        return 0.0 if mean > 0 else 1.0
    from scipy.special import stdtr

    return float(stdtr(n - 1, -mean * math.sqrt(n) / spread))


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple comparisons by Holm's method, in the same order.

    A comparison is significant if its adjusted p-value is below the level of all together.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted_p_values, running_maximum = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running_maximum = max(running_maximum, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted_p_values[index] = running_maximum
    return adjusted_p_values


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the rate hits ÷ trials; (0, 1) without a trial."""
    if not trials:
        return 0.0, 1.0
    from scipy.stats import binomtest

    lo, hi = binomtest(hits, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(lo), float(hi)


@cache
def t_quantile(degrees_of_freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t such that Student's variable is in [-t, t] with probability `confidence`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
