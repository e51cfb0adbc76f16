"""Analysis of a trace: repetition, skew, reuse distances and hit rates; pure functions."""

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

NEVER = -1  # before the first lookup of a row there is none


def stack_distances(rows: Ids) -> Ids:
    """Return per access the distinct other rows since the last access to its row, else NEVER.

    A cache of C rows that always gives up the least recently used one serves exactly the accesses
    with a distance below C (Mattson et al. 1970), so that these numbers give its hit rate at every
    size at once.

    With p the previous access to the row of i: between them lie as many distinct rows as there are
    accesses j < i, j > p whose own previous access is not after p. Those before p all qualify, so
    it is the number of j < i with previous(j) <= p, less p + 1.
    """
    previous = _previous(rows)
    earlier = _not_above_before(previous)
    return np.where(previous < 0, NEVER, earlier - (previous + 1))


def batch_distances(trace: RowTrace) -> Ids:
    """Return stack distances for caches that probe a whole batch before any row moves.

    For each row of a batch: how many rows were used more recently than it before the batch began. A
    cache of C rows that keeps the most recent ones has it if that is below C. Of the rows of one
    batch those with more lookups count as more recent.
    """
    order = np.lexsort((trace.lookups, trace.batch))
    previous = _previous(trace.rows[order])
    ends = zip(trace.starts[:-1], trace.starts[1:], strict=True)
    within = [_not_above_before(previous[a:b]) for a, b in ends]
    earlier = _not_above_before(previous) - np.concatenate([*within, np.zeros(0, np.int64)])
    distances_of = np.empty(len(previous), np.int64)
    distances_of[order] = np.where(previous < 0, NEVER, earlier - (previous + 1))
    return distances_of


def _previous(rows: Ids) -> Ids:
    """Return the last access to the same row, -1 for the first."""
    return cache_bounds.shifted(rows, 1, -1)


def _not_above_before(values: Ids) -> Ids:
    """Return for each i how many j < i have values[j] <= values[i].

    The counts of a merge sort: whenever two neighbouring blocks are merged, each value of the later
    block counts the values of the earlier one that are sorted before it.
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


EXACT_RANKS = 256  # masses of so many ranks are summed, those of the others integrated
MAX_S = 4.0
POINTS, ROUNDS, ZOOM = 11, 9, 0.45


@dataclass(frozen=True)
class ZipfFit:
    """The most likely zipf distribution, and how far the lookups differ from it."""

    s: float
    q: float
    misfit: float  # largest difference of the cumulative shares by rank, of the other half


@dataclass(frozen=True)
class Blocks:
    """Rows with equal counts in one half, most popular first: ranks, and lookups of the other."""

    last: Ids  # the block's last rank, from 1
    lookups: Ids

    @classmethod
    def of(cls, ranking: Ids, judged: Ids, rows: int) -> Blocks:
        """Build from each row's lookups in both halves; further rows have none in either."""
        counts, where = np.unique(-ranking, return_inverse=True)
        sizes = np.bincount(where, minlength=len(counts))
        lookups = np.bincount(where, judged, minlength=len(counts)).astype(np.int64)
        rest = rows - len(ranking)
        if rest > 0 and len(counts) and counts[-1] == 0:
            sizes[-1] += rest
        elif rest > 0:
            sizes, lookups = np.append(sizes, rest), np.append(lookups, 0)
        return cls(np.cumsum(sizes), lookups)


def fit(ranking: Ids, judged: Ids, rows: int) -> ZipfFit | None:
    """Fit a zipf distribution to each row's lookups in two halves; None where they are too few."""
    blocks = Blocks.of(ranking, judged, rows)
    if len(blocks.last) < 3 or blocks.lookups.sum() < 100:
        return None
    low, high = np.array([0.0, 0.0]), np.array([MAX_S, np.log1p(rows)])
    best = (0.0, 0.0)
    for _ in range(ROUNDS):
        s = np.linspace(low[0], high[0], POINTS)
        log_q = np.linspace(low[1], high[1], POINTS)
        likely = np.stack([_log_likelihood(blocks, s, float(np.expm1(t))) for t in log_q])
        at = np.unravel_index(int(likely.argmax()), likely.shape)
        best = (float(s[at[1]]), float(log_q[at[0]]))
        half = (high - low) * ZOOM / 2
        low = np.maximum(np.array(best) - half, 0.0)
        high = np.array(best) + half
    s_best, q_best = best[0], float(np.expm1(best[1]))
    mass = masses(blocks, np.array([s_best]), q_best)[0]
    seen = np.cumsum(blocks.lookups) / blocks.lookups.sum()
    return ZipfFit(s_best, q_best, float(np.abs(np.cumsum(mass) - seen).max()))


def _log_likelihood(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return [s]: the log-likelihood of the judged lookups; rows of a block are equally likely."""
    mass = masses(blocks, s, q)
    size = np.diff(blocks.last, prepend=0)
    return np.asarray((blocks.lookups * np.log(np.maximum(mass, 1e-300) / size)).sum(1))


def masses(blocks: Blocks, s: Reals, q: float) -> Reals:
    """Return [s, blocks]: the probability of each block."""
    ranks = np.arange(1, EXACT_RANKS + 1, dtype=np.float64)
    exponent = s[:, None]
    head = np.cumsum(np.exp(-exponent * np.log(ranks + q)), axis=1)
    head = np.concatenate([np.zeros((len(s), 1)), head], axis=1)
    until = head[:, np.minimum(blocks.last, EXACT_RANKS)]
    if blocks.last[-1] > EXACT_RANKS:
        ends = np.maximum(blocks.last, EXACT_RANKS) + 0.5
        tail = np.stack([integral(ends, float(x), q) for x in s])
        start = np.array([integral(np.array(EXACT_RANKS + 0.5), float(x), q) for x in s])
        until = until + (tail - start[:, None])
    return np.diff(until, axis=1, prepend=0.0) / until[:, -1:]


SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)  # of the lookups: how many rows have them
CURVE_POINTS = 48  # of a curve over sizes or ranks
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Lookups:
    """Batches of ids of one table, or of several under one numbering; ids may be any integers."""

    batches: Sequence[Ids]

    @cached_property
    def ids(self) -> Ids:
        """Return all lookups, with rows numbered from 0 in order of their ids."""
        every = np.concatenate(self.batches) if self.batches else np.zeros(0, np.int64)
        return np.unique(every, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def counts(self) -> Ids:
        """Return the lookups of each row that has any."""
        return np.bincount(self.ids)

    @cached_property
    def starts(self) -> Ids:
        """Return where each batch begins in `ids`, and the end."""
        return np.cumsum([0, *(len(batch) for batch in self.batches)])

    def slices(self) -> list[Ids]:
        """Return `ids` batch by batch."""
        return [self.ids[a:b] for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def trace(self, warm: int) -> RowTrace:
        """Return the trace as caches see it; the first `warm` batches are not counted."""
        return RowTrace.of(self.slices(), warm)


def samples(lookups: Lookups) -> dict[str, list[int]]:
    """Count per batch: lookups, distinct rows, and rows that no batch before had."""
    seen = np.zeros(len(lookups.counts), bool)
    found: dict[str, list[int]] = {"lookups": [], "rows": [], "new": []}
    for ids in lookups.slices():
        rows = np.unique(ids)
        found["lookups"].append(len(ids))
        found["rows"].append(len(rows))
        found["new"].append(int((~seen[rows]).sum()))
        seen[rows] = True
    return found


def table(lookups: Lookups, lengths: Ids, rows: int) -> Numbers:
    """Analyse one table: repetition, concentration, skew. `rows` 0: those that were looked up."""
    counts = np.sort(lookups.counts)[::-1]
    total = int(counts.sum())
    per_batch = samples(lookups)
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
        "fit": fitted(lookups, rows or len(counts)),
    }


def fitted(lookups: Lookups, rows: int) -> Numbers | None:
    """Fit a zipf distribution that even batches rank and odd ones judge."""
    parts = lookups.slices()
    size = len(lookups.counts)
    none = np.zeros(0, np.int64)
    halves = [np.concatenate([none, *parts[first::2]]) for first in (0, 1)]
    ranking, judged = (np.bincount(ids, minlength=size) for ids in halves)
    found = fit(ranking, judged, max(rows, size))
    return None if found is None else dataclasses.asdict(found)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def spectrum(lookups: Lookups) -> Numbers:
    """Return shares of rows and lookups by lookups per row, in the bins of `production.EDGES`."""
    rows, share = production.histograms(lookups.counts)
    return {"edges": list(production.EDGES), "rows": rows.tolist(), "lookups": share.tolist()}


def ranked(lookups: Lookups) -> list[list[float]]:
    """Return [rank, share of the lookups per row] by falling count, log-spaced."""
    counts = np.sort(lookups.counts)[::-1]
    if not len(counts):
        return []
    ends = _spaced(len(counts))
    firsts = np.concatenate([[0], ends[:-1]])
    until = np.concatenate([[0], np.cumsum(counts)])
    share = (until[ends] - until[firsts]) / (ends - firsts) / counts.sum()
    middle = np.sqrt((firsts + 1) * ends)
    return [[float(m), float(v)] for m, v in zip(middle, share, strict=True)]


def _spaced(last: int) -> Ids:
    """Return distinct whole numbers from 1 to `last`, evenly spaced in their logarithm."""
    return np.unique(np.rint(np.geomspace(1, max(last, 1), CURVE_POINTS)).astype(np.int64))


def distances(lookups: Lookups) -> Numbers:
    """Return how many other rows are looked up between two lookups of a row.

    Shares of all lookups: `reuse[b]` with distances from `edges[b]` to below `edges[b + 1]`, and
    `first` without any. `within_batch` are lookups of a row that their batch has looked up before.
    """
    found = stack_distances(lookups.ids)
    again = found[found != NEVER]
    bits = int(again.max(initial=1)).bit_length()
    edges = [0, *(2**k for k in range(bits + 1))]
    inside = np.histogram(again, edges)[0]
    total = len(found)
    distinct = sum(len(np.unique(ids)) for ids in lookups.slices())
    return {
        "edges": edges,
        "reuse": [_share(int(n), total) for n in inside],
        "first": _share(total - len(again), total),
        "within_batch": _share(total - distinct, total),
        "median": float(np.median(again)) if len(again) else math.nan,
    }


def hit_rates(trace: RowTrace, fractions: Sequence[float]) -> Numbers:
    """Return what caches serve of the counted batches.

    LRU at any size, ideals at `fractions` of the distinct rows of the trace.
    """
    counted = slice(int(trace.starts[trace.warm]), None)
    distance, weight = batch_distances(trace)[counted], trace.lookups[counted]
    total = int(weight.sum())

    def rates(size: int, lookups: int, rows: int) -> Numbers:
        return {
            "cache_rows": size,
            "lookups": _share(lookups, total),
            "rows": _share(rows, len(weight)),
        }

    def least_recently_used(size: int) -> Numbers:
        hit = (distance != NEVER) & (distance < size)
        return rates(size, int(weight[hit].sum()), int(hit.sum()))

    def ideal(serve: Callable[[RowTrace, int], cache_bounds.Hits], size: int) -> Numbers:
        hits = serve(trace, size)
        return rates(size, sum(hits.lookups), sum(hits.rows))

    distinct = len(np.unique(trace.rows))
    sizes = sorted({max(1, round(f * distinct)) for f in fractions})
    every = sorted({*_spaced(distinct).tolist(), *sizes})
    return {
        "distinct": distinct,
        "lru": [least_recently_used(size) for size in every],
        "offline": [ideal(cache_bounds.offline, size) for size in sizes],
        "static_top": [ideal(cache_bounds.static_top, size) for size in sizes],
    }
