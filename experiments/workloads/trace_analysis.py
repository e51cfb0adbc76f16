"""Analysis of a trace of lookups: repetition, skew, reuse distances and hit rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from experiments.workloads import cache_bounds, production
from experiments.workloads.cache_bounds import RowTrace
from experiments.workloads.distributions import Ids, Reals, integral

NEVER = -1  # distance of the first lookup of a row


def stack_distances(rows: Ids) -> Ids:
    """Return per access the number of distinct other rows since the last access to its row.

    The first access to a row has NEVER. An LRU cache of C rows serves exactly the accesses with a
    distance below C (Mattson et al. 1970), so the distances give its hit rate at every size.

    Let p be the previous access to the row of access i. The distinct rows between them are the
    accesses j with p < j < i and previous(j) <= p. All j <= p have previous(j) <= p too, so their
    number is that of all j < i with previous(j) <= p, minus p + 1.
    """
    previous = _previous(rows)
    earlier = _not_above_before(previous)
    return np.where(previous < 0, NEVER, earlier - (previous + 1))


def batch_distances(trace: RowTrace) -> Ids:
    """Return stack distances of caches that probe all rows of a batch before any row moves.

    The distance of a row of a batch is the number of rows that were used more recently before the
    batch began; an LRU cache of C rows has the row if the distance is below C. Among the rows of
    one batch, those with more lookups count as more recent.
    """
    order = np.lexsort((trace.lookups, trace.batch))
    previous = _previous(trace.rows[order])
    batch_ranges = zip(trace.starts[:-1], trace.starts[1:], strict=True)
    jumps_in_batch = [_not_above_before(previous[a:b]) for a, b in batch_ranges]
    rows_before_batch = _not_above_before(previous) - np.concatenate(
        [*jumps_in_batch, np.zeros(0, np.int64)]
    )
    batch_distance = np.empty(len(previous), np.int64)
    batch_distance[order] = np.where(previous < 0, NEVER, rows_before_batch - (previous + 1))
    return batch_distance


def _previous(rows: Ids) -> Ids:
    """Return per access the previous one to the same row, -1 for the first."""
    return cache_bounds.shifted_positions(rows, 1, -1)


def _not_above_before(values: Ids) -> Ids:
    """Return for each i the number of j < i with values[j] <= values[i].

    Merge sort counts them: when two neighbouring blocks are merged, each value of the later block
    adds the number of values of the earlier block that are sorted before it.
    """
    count = len(values)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(count)
    counts_before = np.zeros(count, np.int64)
    width = 1
    while width < count:
        padding = (0, -count % (2 * width))
        pairs = np.pad(ranks, padding, constant_values=count).reshape(-1, 2 * width)
        order = np.argsort(pairs, axis=1)
        later = order >= width
        counts = np.empty_like(pairs)
        np.put_along_axis(counts, order, later * np.cumsum(~later, axis=1), axis=1)
        counts_before += counts.ravel()[:count]
        width *= 2
    return counts_before


EXACT_RANKS = 256  # first ranks, whose probabilities are summed; those of the others are integrated
MAX_S = 4.0  # largest exponent that is fitted
POINTS, ROUNDS, ZOOM = 11, 9, 0.45  # grid per parameter, grid searches, shrinkage per search


@dataclass(frozen=True)
class ZipfFit:
    """The most likely Zipf distribution, P(rank) ~ (rank + q)^-s.

    Attributes:
        s: exponent.
        q: offset.
        misfit: largest difference of the cumulative shares of lookups by rank.
    """

    s: float
    q: float
    misfit: float


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows with equal counts in the ranking half of a trace, the most popular first.

    Attributes:
        last: last rank of each block, counted from 1.
        lookups: lookups of each block's rows in the judging half.
    """

    last: Ids
    lookups: Ids

    @classmethod
    def of(cls, ranking: Ids, lookups_to_fit: Ids, rows: int) -> Blocks:
        """Build from the lookups per row in both halves; `rows` counts rows without lookups too."""
        counts, block = np.unique(-ranking, return_inverse=True)
        sizes = np.bincount(block, minlength=len(counts))
        lookups = np.bincount(block, lookups_to_fit, minlength=len(counts)).astype(np.int64)
        rows_without_lookups = rows - len(ranking)
        if rows_without_lookups > 0 and len(counts) and counts[-1] == 0:
            sizes[-1] += rows_without_lookups
        elif rows_without_lookups > 0:
            sizes, lookups = np.append(sizes, rows_without_lookups), np.append(lookups, 0)
        return cls(np.cumsum(sizes), lookups)


def fit(ranking: Ids, lookups_to_fit: Ids, rows: int) -> ZipfFit | None:
    """Fit a Zipf distribution; return None for too few lookups.

    Args:
        ranking: lookups per row in the half that ranks the rows.
        lookups_to_fit: lookups per row in the half whose likelihood is maximised.
        rows: number of rows of the table.
    """
    blocks = Blocks.of(ranking, lookups_to_fit, rows)
    if len(blocks.last) < 3 or blocks.lookups.sum() < 100:
        return None
    low, high = np.array([0.0, 0.0]), np.array([MAX_S, np.log1p(rows)])
    limits = high
    best = (0.0, 0.0)
    for _ in range(ROUNDS):
        s = np.linspace(low[0], high[0], POINTS)
        log_q = np.linspace(low[1], high[1], POINTS)
        likelihood = np.stack([_log_likelihood(blocks, s, float(np.expm1(t))) for t in log_q])
        at_q, at_s = np.unravel_index(int(likelihood.argmax()), likelihood.shape)
        best = (float(s[at_s]), float(log_q[at_q]))
        half = (high - low) * ZOOM / 2
        low = np.maximum(np.array(best) - half, 0.0)
        high = np.minimum(np.array(best) + half, limits)
    s_best, q_best = best[0], float(np.expm1(best[1]))
    mass = block_masses(blocks, np.array([s_best]), q_best)[0]
    observed = np.cumsum(blocks.lookups) / blocks.lookups.sum()
    return ZipfFit(s_best, q_best, float(np.abs(np.cumsum(mass) - observed).max()))


def _log_likelihood(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return the log-likelihood of the judged lookups per exponent, [s]."""
    mass = block_masses(blocks, s, q)
    size = np.diff(blocks.last, prepend=0)
    return np.asarray((blocks.lookups * np.log(np.maximum(mass, 1e-300) / size)).sum(1))


def block_masses(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return the probability of each block per exponent, [s, blocks]."""
    ranks = np.arange(1, EXACT_RANKS + 1, dtype=np.float64)
    exponent = s[:, None]
    head = np.cumsum(np.exp(-exponent * np.log(ranks + q)), axis=1)
    head = np.concatenate([np.zeros((len(s), 1)), head], axis=1)
    mass_up_to = head[:, np.minimum(blocks.last, EXACT_RANKS)]
    if blocks.last[-1] > EXACT_RANKS:
        ends = np.maximum(blocks.last, EXACT_RANKS) + 0.5
        tail = np.stack([integral(ends, float(x), q) for x in s])
        start = np.array([integral(np.array(EXACT_RANKS + 0.5), float(x), q) for x in s])
        mass_up_to = mass_up_to + (tail - start[:, None])
    return np.diff(mass_up_to, axis=1, prepend=0.0) / mass_up_to[:, -1:]


SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)  # shares of the lookups to count the rows of
CURVE_POINTS = 48  # points of a curve over sizes or ranks
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Lookups:
    """Batches of ids, any integers, of one table or of several in one numbering."""

    batches: Sequence[Ids]

    @cached_property
    def ids(self) -> Ids:
        """Return the row of each lookup; rows are numbered from 0 in the order of ids."""
        ids = np.concatenate(self.batches) if self.batches else np.zeros(0, np.int64)
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def counts(self) -> Ids:
        """Return the number of lookups of each row."""
        return np.bincount(self.ids)

    @cached_property
    def starts(self) -> Ids:
        """Return the first lookup of each batch, and the end, [batches + 1]."""
        return np.cumsum([0, *(len(batch) for batch in self.batches)])

    def slices(self) -> list[Ids]:
        """Return `ids` batch by batch."""
        return [self.ids[a:b] for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def trace(self, warm: int) -> RowTrace:
        """Return the trace of distinct rows; the first `warm` batches are not counted."""
        return RowTrace.of(self.slices(), warm)


def batch_counts(lookups: Lookups) -> dict[str, list[int]]:
    """Return per batch the lookups, the distinct rows, and the rows that are new in the trace."""
    is_used = np.zeros(len(lookups.counts), bool)
    counts: dict[str, list[int]] = {"lookups": [], "rows": [], "new": []}
    for ids in lookups.slices():
        rows = np.unique(ids)
        counts["lookups"].append(len(ids))
        counts["rows"].append(len(rows))
        counts["new"].append(int((~is_used[rows]).sum()))
        is_used[rows] = True
    return counts


def table_numbers(lookups: Lookups, lengths: Ids, rows: int) -> Numbers:
    """Return repetition, concentration and skew of the lookups of a table.

    Args:
        lookups: lookups of the table.
        lengths: lookups per bag, of all bags.
        rows: rows of the table; 0 if unknown, then those that were looked up.
    """
    counts = np.sort(lookups.counts)[::-1]
    total = int(counts.sum())
    per_batch = batch_counts(lookups)
    ranks = np.searchsorted(np.cumsum(counts), np.array(SHARES) * total - 1e-9)
    return {
        "rows": rows or len(counts),
        "rows_known": bool(rows),
        "lookups": total,
        "distinct": len(counts),
        "batch_distinct_share": _share(sum(per_batch["rows"]), total),
        "bag_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "bag_max": int(lengths.max(initial=0)),
        "bags_empty": float((lengths == 0).mean()) if len(lengths) else 0.0,
        "rows_of": {
            f"{share:g}": int(min(rank + 1, len(counts)))
            for share, rank in zip(SHARES, ranks, strict=True)
        },
        "once": _share(int((counts == 1).sum()), len(counts)),
        "fit": fit_halves(lookups, rows or len(counts)),
    }


def fit_halves(lookups: Lookups, rows: int) -> Numbers | None:
    """Fit a Zipf distribution: even batches rank the rows, odd ones judge it."""
    batches, size = lookups.slices(), len(lookups.counts)
    no_ids = np.zeros(0, np.int64)
    halves = [np.concatenate([no_ids, *batches[first::2]]) for first in (0, 1)]
    ranking, lookups_to_fit = (np.bincount(ids, minlength=size) for ids in halves)
    zipf = fit(ranking, lookups_to_fit, max(rows, size))
    return None if zipf is None else dataclasses.asdict(zipf)


def _share(count: float, total: float) -> float:
    return count / total if total else math.nan


def spectrum(lookups: Lookups) -> Numbers:
    """Return the shares of rows and of lookups by lookups per row, in the bins of `production`."""
    rows, share = production.histograms(lookups.counts)
    return {"edges": list(production.EDGES), "rows": rows.tolist(), "lookups": share.tolist()}


def shares_by_rank(lookups: Lookups) -> list[list[float]]:
    """Return [rank, share of the lookups per row] at log-spaced ranks, the most popular first."""
    counts = np.sort(lookups.counts)[::-1]
    if not len(counts):
        return []
    ends = _spaced(len(counts))
    firsts = np.concatenate([[0], ends[:-1]])
    lookups_up_to = np.concatenate([[0], np.cumsum(counts)])
    share = (lookups_up_to[ends] - lookups_up_to[firsts]) / (ends - firsts) / counts.sum()
    mean_rank = np.sqrt((firsts + 1) * ends)
    return [[float(m), float(v)] for m, v in zip(mean_rank, share, strict=True)]


def _spaced(last: int) -> Ids:
    """Return distinct whole numbers from 1 to `last`, evenly spaced in their logarithm."""
    return np.unique(np.rint(np.geomspace(1, max(last, 1), CURVE_POINTS)).astype(np.int64))


def distance_histogram(lookups: Lookups) -> Numbers:
    """Return a histogram of stack distances, as shares of all lookups.

    `reuse[b]` is the share with distances in [edges[b], edges[b + 1]), `first` that of first
    lookups, and `within_batch` that of lookups of a row that their batch has looked up before.
    `median` is the median distance, without first lookups.
    """
    distance = stack_distances(lookups.ids)
    reused = distance[distance != NEVER]
    bits = int(reused.max(initial=1)).bit_length()
    edges = [0, *(2**k for k in range(bits + 1))]
    counts = np.histogram(reused, edges)[0]
    total = len(distance)
    distinct = sum(len(np.unique(ids)) for ids in lookups.slices())
    return {
        "edges": edges,
        "reuse": [_share(int(n), total) for n in counts],
        "first": _share(total - len(reused), total),
        "within_batch": _share(total - distinct, total),
        "median": float(np.median(reused)) if len(reused) else math.nan,
    }


def hit_rates(trace: RowTrace, fractions: Sequence[float]) -> Numbers:
    """Return the hit rates of the counted batches, per lookup and per distinct row.

    LRU has a curve over all sizes; the ideals have points at `fractions` of the distinct rows.
    """
    counted_entries = slice(int(trace.starts[trace.warm]), None)
    distance, num_lookups = batch_distances(trace)[counted_entries], trace.lookups[counted_entries]
    total = int(num_lookups.sum())

    def rates(size: int, lookups: int, rows: int) -> Numbers:
        return {
            "cache_rows": size,
            "lookups": _share(lookups, total),
            "rows": _share(rows, len(num_lookups)),
        }

    def least_recently_used(size: int) -> Numbers:
        hit = (distance != NEVER) & (distance < size)
        return rates(size, int(num_lookups[hit].sum()), int(hit.sum()))

    def ideal(serve: Callable[[RowTrace, int], cache_bounds.Hits], size: int) -> Numbers:
        hits = serve(trace, size)
        return rates(size, sum(hits.lookups), sum(hits.rows))

    distinct = len(np.unique(trace.rows))
    sizes = sorted({max(1, round(f * distinct)) for f in fractions})
    curve_sizes = sorted({*_spaced(distinct).tolist(), *sizes})
    return {
        "distinct": distinct,
        "lru": [least_recently_used(size) for size in curve_sizes],
        "offline": [ideal(cache_bounds.offline, size) for size in sizes],
        "static_top": [ideal(cache_bounds.static_top, size) for size in sizes],
    }
