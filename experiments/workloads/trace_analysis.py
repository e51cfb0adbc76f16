"""Analysis of a trace of lookups: repetition, skew, reuse distances and hit rates.

The results are TypedDicts, because a record stores them as JSON. Shares and hit rates are
fractions of 1, and nan without a lookup. Nothing here draws random numbers or needs torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np

from experiments.workloads import cache_bounds, production
from experiments.workloads.cache_bounds import RowTrace
from experiments.workloads.distributions import Ids, Reals, integral

NEVER = -1  # distance of the first lookup of a row
EXACT_RANKS = 256  # first ranks, whose probabilities are summed; the other ranks are integrated
MAX_S = 4.0  # largest exponent that is fitted
GRID_POINTS = 11  # values per parameter in a grid search
GRID_SEARCHES = 9  # searches, each around the best point of the previous search
GRID_SHRINKAGE = 0.45  # width of a grid ÷ width of the previous grid
MIN_BLOCKS, MIN_LOOKUPS = 3, 100  # minima for a fit: two blocks would fit many (s, q) alike
MIN_BATCHES = 4  # of a trace: two halves for the fit, and batches before and after the warm-up
TINY_MASS = 1e-300  # stands for a probability that underflows, which has no logarithm
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)  # shares of the lookups to count the rows of
ROUNDING = 1e-9  # in lookups; a share × the lookups may exceed a whole number by rounding
CURVE_POINTS = 48  # maximum number of points of a curve over sizes or ranks
TABLE_CACHE_SHARE = 0.1  # cached rows ÷ rows looked up, for a cache per table


def stack_distances(rows: Ids) -> Ids:
    """Return, for each access, the number of distinct other rows since the last access to its row.

    `rows` are the rows of all accesses in their order, int64 [accesses].

    The first access to a row has NEVER. An LRU cache of C rows serves exactly the accesses with a
    distance below C (Mattson et al. 1970), so the distances give its hit rate at every size.

    Let p be the previous access to the row of access i. Each distinct row between them has exactly
    one access j with p < j < i and previous(j) <= p. All j <= p have previous(j) <= p too. So the
    number of these rows is the number of all j < i with previous(j) <= p, minus p + 1.
    """
    previous = _previous_accesses(rows)
    num_earlier = _count_earlier_at_most(previous)
    return np.where(previous < 0, NEVER, num_earlier - (previous + 1))


def batch_distances(trace: RowTrace) -> Ids:
    """Return stack distances of caches that probe all rows of a batch before any row moves.

    The distance of a row of a batch is the number of rows that were used more recently before the
    batch began; an LRU cache of C rows has the row if the distance is below C. Among the rows of
    one batch, those with more lookups count as more recent.

    The derivation is that of `stack_distances`, with j < (first access of the batch) in place of
    j < i. So the count over the trace is reduced by the accesses j < i of the batch itself.
    """
    order = np.lexsort((trace.lookup_counts, trace.access_batches))
    previous = _previous_accesses(trace.rows[order])
    num_earlier = _count_earlier_at_most(previous)
    for begin, end in itertools.pairwise(trace.batch_starts):
        num_earlier[begin:end] -= _count_earlier_at_most(previous[begin:end])
    distances = np.empty(len(previous), np.int64)
    distances[order] = np.where(previous < 0, NEVER, num_earlier - (previous + 1))
    return distances


def _previous_accesses(rows: Ids) -> Ids:
    """Return, for each access, the previous access to the same row, -1 for the first."""
    return cache_bounds.shifted_accesses(rows, 1, -1)


def _count_earlier_at_most(values: Ids) -> Ids:
    """Return for each i the number of j < i with values[j] <= values[i].

    Merge sort counts them: when two neighbouring blocks are merged, each value of the later block
    adds the number of values of the earlier block that are sorted before it.
    """
    count = len(values)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(count)
    counts_before = np.zeros(count, np.int64)
    block_size = 1
    while block_size < count:
        padding = (0, -count % (2 * block_size))
        pairs = np.pad(ranks, padding, constant_values=count).reshape(-1, 2 * block_size)
        order = np.argsort(pairs, axis=1)
        is_later = order >= block_size
        counts = np.empty_like(pairs)
        np.put_along_axis(counts, order, is_later * np.cumsum(~is_later, axis=1), axis=1)
        counts_before += counts.ravel()[:count]
        block_size *= 2
    return counts_before


@dataclass(frozen=True)
class ZipfFit:
    """The most likely Zipf distribution, P(rank) ~ (rank + q)^-s.

    Attributes:
        s: exponent, in [0, MAX_S].
        q: offset >= 0.
        misfit: largest difference, over the blocks of ranks, between the fitted and the observed
            cumulative share of the lookups (Kolmogorov-Smirnov).
    """

    s: float
    q: float
    misfit: float


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows with equal counts in the ranking half of a trace, the most popular first.

    Attributes:
        last_ranks: last rank of each block, counted from 1, int64 [blocks].
        lookups: lookups of each block's rows in the other half, int64 [blocks].
    """

    last_ranks: Ids
    lookups: Ids

    @classmethod
    def of(cls, ranking: Ids, lookups_to_fit: Ids, num_rows: int) -> Blocks:
        """Build from the lookups per row in both halves; `num_rows` includes unused rows."""
        # Negated, because the most popular rows come first.
        negated_counts, block, sizes = np.unique(-ranking, return_inverse=True, return_counts=True)
        lookups = np.bincount(block, lookups_to_fit, minlength=len(sizes)).astype(np.int64)
        num_unused = num_rows - len(ranking)  # may be far more than fit into memory
        if num_unused > 0 and len(sizes) and negated_counts[-1] == 0:
            sizes[-1] += num_unused
        elif num_unused > 0:
            sizes, lookups = np.append(sizes, num_unused), np.append(lookups, 0)
        return cls(np.cumsum(sizes), lookups)


def fit_zipf(ranking: Ids, lookups_to_fit: Ids, num_rows: int) -> ZipfFit | None:
    """Fit a Zipf distribution by grid searches; return None for too few lookups or blocks.

    Args:
        ranking: lookups per row in the half that ranks the rows, int64 [rows looked up].
        lookups_to_fit: lookups per row in the half whose likelihood is maximised, the same rows.
        num_rows: number of rows of the table, at least len(ranking).
    """
    blocks = Blocks.of(ranking, lookups_to_fit, num_rows)
    if len(blocks.last_ranks) < MIN_BLOCKS or blocks.lookups.sum() < MIN_LOOKUPS:
        return None
    # A point is (s, log(1 + q)), because q varies over orders of magnitude.
    low, high = np.array([0.0, 0.0]), np.array([MAX_S, np.log1p(num_rows)])
    limits, best_point = high, low
    for _ in range(GRID_SEARCHES):
        s, log_q = np.linspace(low, high, GRID_POINTS).T
        likelihood = np.stack([_log_likelihood(blocks, s, float(np.expm1(x))) for x in log_q])
        q_index, s_index = np.unravel_index(int(likelihood.argmax()), likelihood.shape)
        best_point = np.array([s[s_index], log_q[q_index]])
        half_width = (high - low) * GRID_SHRINKAGE / 2
        low = np.maximum(best_point - half_width, 0.0)
        high = np.minimum(best_point + half_width, limits)
    s_best, q_best = float(best_point[0]), float(np.expm1(best_point[1]))
    mass = block_masses(blocks, np.array([s_best]), q_best)[0]
    observed_shares = np.cumsum(blocks.lookups) / blocks.lookups.sum()
    return ZipfFit(s_best, q_best, float(np.abs(np.cumsum(mass) - observed_shares).max()))


def _log_likelihood(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return the log-likelihood of the blocks' lookups per exponent, [len(s)]."""
    mass = block_masses(blocks, s, q)
    size = np.diff(blocks.last_ranks, prepend=0)
    return np.asarray((blocks.lookups * np.log(np.maximum(mass, TINY_MASS) / size)).sum(1))


def block_masses(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return the probability of each block for each exponent of `s` and the offset `q`.

    The result is float64 [len(s), blocks].
    """
    ranks = np.arange(1, EXACT_RANKS + 1, dtype=np.float64)
    exponent = s[:, None]
    head = np.cumsum(np.exp(-exponent * np.log(ranks + q)), axis=1)
    head = np.concatenate([np.zeros((len(s), 1)), head], axis=1)
    mass_up_to = head[:, np.minimum(blocks.last_ranks, EXACT_RANKS)]
    if blocks.last_ranks[-1] > EXACT_RANKS:
        ends = np.maximum(blocks.last_ranks, EXACT_RANKS) + 0.5
        tail = np.stack([integral(ends, float(x), q) for x in s])
        start = np.array([integral(np.array(EXACT_RANKS + 0.5), float(x), q) for x in s])
        mass_up_to = mass_up_to + (tail - start[:, None])
    return np.diff(mass_up_to, axis=1, prepend=0.0) / mass_up_to[:, -1:]


@dataclass(frozen=True)
class Lookups:
    """The lookups of one table, or of several with one numbering, in batches.

    Attributes:
        batches: ids of each batch, any integers, [lookups].
    """

    batches: Sequence[Ids]

    @cached_property
    def row_of_lookup(self) -> Ids:
        """Return the row of each lookup, int64 [lookups].

        The distinct ids are numbered from 0 in ascending order: these numbers are the rows.
        """
        ids = np.concatenate(self.batches) if self.batches else np.zeros(0, np.int64)
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def counts(self) -> Ids:
        """Return the number of lookups of each row, int64 [distinct ids], all > 0."""
        return np.bincount(self.row_of_lookup)

    @cached_property
    def starts(self) -> Ids:
        """Return the first lookup of each batch, and the end, int64 [batches + 1]."""
        return np.cumsum([0, *(len(batch) for batch in self.batches)])

    def slices(self) -> list[Ids]:
        """Return `row_of_lookup` batch by batch."""
        return np.split(self.row_of_lookup, self.starts[1:-1]) if self.batches else []

    def trace(self, num_warm_batches: int) -> RowTrace:
        """Return the trace of distinct rows; `num_warm_batches` first batches are not counted."""
        return RowTrace.of(self.slices(), num_warm_batches)


def batch_counts(lookups: Lookups) -> dict[str, list[int]]:
    """Return the lookups, the distinct rows and the new rows of each batch.

    The keys are "lookups", "rows" and "new". A row is new in the first batch that looks it up.
    """
    is_used = np.zeros(len(lookups.counts), bool)
    counts: dict[str, list[int]] = {"lookups": [], "rows": [], "new": []}
    for rows in lookups.slices():
        distinct = np.unique(rows)
        counts["lookups"].append(len(rows))
        counts["rows"].append(len(distinct))
        counts["new"].append(int((~is_used[distinct]).sum()))
        is_used[distinct] = True
    return counts


class TableNumbers(TypedDict):
    """The analysis of one table."""

    name: str
    rows: int  # number of rows that the trace states, else of rows looked up
    rows_known: bool  # whether the trace states the number
    lookups: int
    distinct: int  # number of rows looked up
    batch_distinct_share: float  # sum of the distinct rows of each batch ÷ lookups
    bag_mean: float  # ids per bag
    once: float  # share of the distinct rows that are looked up exactly once
    rows_of: dict[str, int]  # fewest rows that have each share (SHARES) of the lookups
    fit: dict[str, float] | None  # s, q, misfit of `ZipfFit`; None for too few lookups
    offline: float  # hit rate per lookup of a cache of TABLE_CACHE_SHARE, managed optimally
    lru: float  # hit rate per lookup of the same cache with the least-recently-used policy


def analyse_table(
    lookups: Lookups, bag_lengths: Ids, *, name: str, num_rows: int, num_warm_batches: int
) -> TableNumbers:
    """Analyse one table, with the hit rates of a cache of TABLE_CACHE_SHARE of the rows looked up.

    Args:
        lookups: lookups of the table.
        bag_lengths: lookups per bag, of all bags.
        name: name of the table.
        num_rows: number of rows of the table; 0 if unknown: then the rows looked up are counted.
        num_warm_batches: number of first batches, which fill the cache and are not counted.
    """
    counts = np.sort(lookups.counts)[::-1]
    total = int(counts.sum())
    per_batch = batch_counts(lookups)
    ranks = np.searchsorted(np.cumsum(counts), np.array(SHARES) * total - ROUNDING)
    rates = hit_rates(lookups.trace(num_warm_batches), [TABLE_CACHE_SHARE])
    (offline,) = rates["offline"]
    (lru,) = (rate for rate in rates["lru"] if rate["cache_rows"] == offline["cache_rows"])
    return {
        "name": name,
        "rows": num_rows or len(counts),
        "rows_known": bool(num_rows),
        "lookups": total,
        "distinct": len(counts),
        "batch_distinct_share": _share(sum(per_batch["rows"]), total),
        "bag_mean": float(bag_lengths.mean()) if len(bag_lengths) else 0.0,
        "rows_of": {
            f"{share:g}": int(min(rank + 1, len(counts)))
            for share, rank in zip(SHARES, ranks, strict=True)
        },
        "once": _share(int((counts == 1).sum()), len(counts)),
        "fit": _fit_halves(lookups, num_rows or len(counts)),
        "offline": offline["lookups"],
        "lru": lru["lookups"],
    }


def _fit_halves(lookups: Lookups, num_rows: int) -> dict[str, float] | None:
    """Fit a Zipf distribution: even batches rank the rows; odd batches give the likelihood."""
    batches, size = lookups.slices(), len(lookups.counts)
    no_rows = np.zeros(0, np.int64)
    halves = [np.concatenate([no_rows, *batches[parity::2]]) for parity in (0, 1)]
    ranking, lookups_to_fit = (np.bincount(half, minlength=size) for half in halves)
    zipf = fit_zipf(ranking, lookups_to_fit, max(num_rows, size))
    return None if zipf is None else dataclasses.asdict(zipf)


def _share(count: float, total: float) -> float:
    return count / total if total else math.nan


class Spectrum(TypedDict):
    """Shares of rows and of lookups by lookups per row, in the bins of `production`."""

    edges: list[int]  # lower edge of each bin: its rows have more lookups, up to the next edge
    rows: list[float]
    lookups: list[float]


def spectrum(lookups: Lookups) -> Spectrum:
    """Return the shares of rows and of lookups in each bin."""
    row_shares, lookup_shares = (s.tolist() for s in production.histograms(lookups.counts))
    return {"edges": list(production.EDGES), "rows": row_shares, "lookups": lookup_shares}


def shares_by_rank(lookups: Lookups) -> list[list[float]]:
    """Return [rank, share of the lookups per row] pairs, the most popular rows first.

    Each pair summarises a range of ranks: their geometric mean, and the mean share of their rows.
    The ends of the ranges are log-spaced.
    """
    counts = np.sort(lookups.counts)[::-1]
    if not len(counts):
        return []
    ends = _log_spaced(len(counts))
    firsts = np.concatenate([[0], ends[:-1]])
    lookups_up_to = np.concatenate([[0], np.cumsum(counts)])
    share = (lookups_up_to[ends] - lookups_up_to[firsts]) / (ends - firsts) / counts.sum()
    mean_rank = np.sqrt((firsts + 1) * ends)
    return [[float(m), float(v)] for m, v in zip(mean_rank, share, strict=True)]


def _log_spaced(last: int) -> Ids:
    """Return distinct whole numbers from 1 to `last`, evenly spaced in their logarithm."""
    return np.unique(np.rint(np.geomspace(1, max(last, 1), CURVE_POINTS)).astype(np.int64))


class Distances(TypedDict):
    """A histogram of stack distances; first lookups have none and are in no bin."""

    edges: list[int]  # 0, then powers of two, [bins + 1]
    reuse: list[float]  # share of all lookups with a distance in [edges[b], edges[b + 1])


def distance_histogram(lookups: Lookups) -> Distances:
    """Return the histogram of the stack distances of all lookups."""
    distances = stack_distances(lookups.row_of_lookup)
    reuse_distances = distances[distances != NEVER]
    num_bits = int(reuse_distances.max(initial=1)).bit_length()
    edges = [0, *(2**k for k in range(num_bits + 1))]
    counts = np.histogram(reuse_distances, edges)[0]
    return {"edges": edges, "reuse": [_share(int(count), len(distances)) for count in counts]}


class HitRate(TypedDict):
    """The hit rate of a cache over the counted batches."""

    cache_rows: int  # rows that the cache holds
    lookups: float  # share of the lookups served
    rows: float  # share of the distinct rows per batch served


class HitRatesByPolicy(TypedDict):
    """Hit rates of ideal caches by policy, ascending in size."""

    distinct: int  # rows that the trace looks up
    lru: list[HitRate]  # a curve over all sizes
    offline: list[HitRate]  # Belady's MIN, at the given fractions of `distinct`
    static_top: list[HitRate]  # the most frequent rows, at the same sizes


def hit_rates(trace: RowTrace, fractions: Sequence[float]) -> HitRatesByPolicy:
    """Return the hit rates of caches of `fractions` of the distinct rows; of LRU at more sizes.

    Sizes are rounded to whole rows, at least 1, and equal sizes are listed once. The batches that
    are not counted fill the caches.
    """
    counted_accesses = slice(int(trace.batch_starts[trace.num_warm_batches]), None)
    distances = batch_distances(trace)[counted_accesses]
    num_lookups = trace.lookup_counts[counted_accesses]
    total = int(num_lookups.sum())

    def hit_rate(size: int, lookups: int, rows: int) -> HitRate:
        lookup_share, row_share = _share(lookups, total), _share(rows, len(num_lookups))
        return {"cache_rows": size, "lookups": lookup_share, "rows": row_share}

    def lru_hit_rate(size: int) -> HitRate:
        is_hit = (distances != NEVER) & (distances < size)
        return hit_rate(size, int(num_lookups[is_hit].sum()), int(is_hit.sum()))

    def hit_rate_of_policy(
        hits_of: Callable[[RowTrace, int], cache_bounds.BatchHits], size: int
    ) -> HitRate:
        hits = hits_of(trace, size)
        return hit_rate(size, sum(hits.lookup_hits), sum(hits.row_hits))

    distinct = len(np.unique(trace.rows))
    sizes = sorted({max(1, round(fraction * distinct)) for fraction in fractions})
    curve_sizes = sorted({*_log_spaced(distinct).tolist(), *sizes})
    return {
        "distinct": distinct,
        "lru": [lru_hit_rate(size) for size in curve_sizes],
        "offline": [hit_rate_of_policy(cache_bounds.offline_hits, size) for size in sizes],
        "static_top": [hit_rate_of_policy(cache_bounds.static_top_hits, size) for size in sizes],
    }
