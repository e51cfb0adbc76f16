"""Bounds on caches: hits that no policy can exceed on a trace, and the best fixed choice of rows.

A trace is a sequence of batches; a batch is a set of distinct rows with a number of lookups each. A
cache in front of a table probes all rows of a batch before it changes, so that all lookups of a row
hit or all miss. Then it may insert rows of the batch and evict any rows. A cache has only rows that
were looked up before, and need not insert the rows that it missed. The first `num_warm_batches`
batches fill the cache and are not counted. A capacity is a number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.workloads.distributions import Reals

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]

# Next access, and rank, of an access whose row is not accessed again.
NEVER = np.iinfo(np.int64).max
# Subgradient step k of `max_lookup_hits` has the length FIRST_STEP / (1 + k / DECAY_STEPS) × bound
# ÷ norm. The bound is valid with any values; how tight it is with others was not measured.
FIRST_STEP, DECAY_STEPS, NUM_STEPS = 0.05, 20, 400


@dataclass(frozen=True)
class RowTrace:
    """Accesses of a trace; an access is a distinct row of a batch, with all its lookups there.

    Accesses are numbered over the trace, by batch and in a batch by row.

    Attributes:
        rows: row of each access, int64 [accesses].
        lookup_counts: number of lookups of each access, int64 [accesses].
        batch_starts: first access of each batch, and the number of accesses, int64 [batches + 1].
        num_warm_batches: number of first batches that are not counted.
        first_lookups: index in its batch of the first lookup of each access, int64 [accesses].
    """

    rows: Integers
    lookup_counts: Integers
    batch_starts: Integers
    num_warm_batches: int
    first_lookups: Integers

    @classmethod
    def of(cls, batches: Sequence[Integers], num_warm_batches: int) -> RowTrace:
        """Build from at least one batch of ids >= 0, int64 [lookups] in any order, with repetition.

        `num_warm_batches` is the number of first batches that are not counted.
        """
        accesses = [np.unique(ids, return_index=True, return_counts=True) for ids in batches]
        batch_starts = np.cumsum([0, *(len(rows) for rows, _, _ in accesses)])
        rows, first_lookups, lookup_counts = (
            np.concatenate(blocks).astype(np.int64) for blocks in zip(*accesses, strict=True)
        )
        return cls(rows, lookup_counts, batch_starts, num_warm_batches, first_lookups)

    @property
    def access_batches(self) -> Integers:
        """Return the number of the batch of each access."""
        return np.repeat(np.arange(len(self.batch_starts) - 1), np.diff(self.batch_starts))

    def counted_batches(self) -> Iterator[slice]:
        """Yield the slice of accesses of each counted batch."""
        for start, end in itertools.pairwise(self.batch_starts[self.num_warm_batches :].tolist()):
            yield slice(start, end)

    def next_accesses(self) -> Integers:
        """Return per access the next access to its row, or NEVER."""
        return shifted_accesses(self.rows, -1, NEVER)


def shifted_accesses(rows: Integers, periods: int, fill: int) -> Integers:
    """Return per access the access to the same row `periods` accesses of that row earlier.

    Args:
        rows: row of each access, int64 [accesses].
        periods: number of accesses to the same row to go back; negative to go forward.
        fill: result for accesses that have none.

    Returns:
        Numbers of accesses, int64 [accesses].
    """
    accesses = pd.Series(np.arange(len(rows)))
    return accesses.groupby(rows).shift(periods, fill_value=fill).to_numpy()


@dataclass(frozen=True)
class BatchHits:
    """Hits per counted batch: distinct rows that the cache had, and the lookups of these rows."""

    row_hits: list[int]
    lookup_hits: list[int]


def hits_per_batch(trace: RowTrace, is_hit: Bools) -> BatchHits:
    """Return the hits per counted batch; `is_hit` is bool [accesses], for all of the trace."""
    batches = list(trace.counted_batches())
    lookup_hits = is_hit * trace.lookup_counts
    return BatchHits(
        [int(is_hit[accesses].sum()) for accesses in batches],
        [int(lookup_hits[accesses].sum()) for accesses in batches],
    )


def offline_hits(trace: RowTrace, capacity: int) -> BatchHits:
    """Return the hits of Belady's MIN: no cache that begins empty serves more accesses.

    After each batch the cache keeps, of its rows and the batch's, those that are looked up again
    soonest. If several rows recur in the same batch, it prefers those with more lookups there: that
    serves more lookups and equally many rows.
    """
    next_accesses = trace.next_accesses()
    is_last = next_accesses == NEVER
    next_accesses = np.where(is_last, 0, next_accesses)  # valid indices; `is_last` masks them
    # A rank that has both criteria: the lowest is looked up soonest, then has the most lookups.
    ranks_per_batch = int(trace.lookup_counts.max(initial=0)) + 1
    ranks = (
        trace.access_batches[next_accesses] * ranks_per_batch - trace.lookup_counts[next_accesses]
    )
    ranks = np.where(is_last, NEVER, ranks)
    num_rows = int(trace.rows.max(initial=0)) + 1
    is_row_cached, rank_of_row = np.zeros(num_rows, bool), np.full(num_rows, NEVER)
    warm_accesses = slice(0, int(trace.batch_starts[trace.num_warm_batches]))
    warm_rows = trace.rows[warm_accesses]
    rank_of_row[warm_rows] = ranks[warm_accesses]  # a later access to a row overwrites
    cached_rows = _lowest_ranked(np.unique(warm_rows), rank_of_row, capacity)
    is_row_cached[cached_rows] = True
    is_hit = np.zeros(len(trace.rows), bool)
    for accesses in trace.counted_batches():
        rows = trace.rows[accesses]
        is_cached = is_row_cached[rows]
        is_hit[accesses] = is_cached
        rank_of_row[rows] = ranks[accesses]
        candidates = np.concatenate([cached_rows, rows[~is_cached]])
        is_row_cached[cached_rows] = False
        cached_rows = _lowest_ranked(candidates, rank_of_row, capacity)
        is_row_cached[cached_rows] = True
    return hits_per_batch(trace, is_hit)


def _lowest_ranked(rows: Integers, rank_of_row: Integers, capacity: int) -> Integers:
    """Return up to `capacity` of the rows, those of lowest rank; drop rows whose rank is NEVER."""
    rows = rows[rank_of_row[rows] != NEVER]
    if len(rows) <= capacity:
        return rows
    if not capacity:
        return rows[:0]
    return rows[np.argpartition(rank_of_row[rows], capacity - 1)[:capacity]]


def static_top_hits(trace: RowTrace, capacity: int) -> BatchHits:
    """Return the hits of a cache of the `capacity` rows with the most lookups in the whole trace.

    Each of these rows is in the cache from its first access on.
    """
    lookups_of_row = np.bincount(trace.rows, trace.lookup_counts)
    is_row_cached = np.zeros(len(lookups_of_row), bool)
    is_row_cached[np.argsort(-lookups_of_row, kind="stable")[:capacity]] = True
    is_first_access = np.ones(len(trace.rows), bool)
    next_accesses = trace.next_accesses()
    is_first_access[next_accesses[next_accesses != NEVER]] = False
    return hits_per_batch(trace, is_row_cached[trace.rows] & ~is_first_access)


def max_lookup_hits(trace: RowTrace, capacity: int) -> float:
    """Return an upper bound on the lookups that a cache of `capacity` rows can serve.

    An access hits if the cache has had its row since the previous access to it. So a policy is a
    choice of intervals between accesses, at most `capacity` of them at a time; the best choice
    solves a linear program. Its dual problem has a price per batch for a row of the cache. Any
    prices bound the optimum from above; up to NUM_STEPS subgradient steps look for a low bound.
    """
    begin, end, gain, num_rows = _cacheable_intervals(trace)
    num_batches = len(trace.batch_starts) - 1 - trace.num_warm_batches
    price = np.zeros(num_batches)
    lowest_bound = float((gain * num_rows).sum())
    for step_index in range(NUM_STEPS):
        cumulative_price = np.concatenate([[0.0], np.cumsum(price)])
        profit = gain - (cumulative_price[end] - cumulative_price[begin])
        cached_rows = num_rows * (profit > 0)
        bound = capacity * price.sum() + float((profit * cached_rows).sum())
        lowest_bound = min(lowest_bound, bound)
        change = np.bincount(begin, cached_rows, num_batches + 1) - np.bincount(
            end, cached_rows, num_batches + 1
        )
        excess_rows = np.cumsum(change)[:num_batches] - capacity
        squared_norm = float((excess_rows * excess_rows).sum())
        if squared_norm == 0.0:
            break
        step_size = FIRST_STEP / (1.0 + step_index / DECAY_STEPS)
        price = np.maximum(
            price + excess_rows * step_size * max(lowest_bound, 1.0) / squared_norm, 0.0
        )
    return lowest_bound


def _cacheable_intervals(trace: RowTrace) -> tuple[Integers, Integers, Reals, Reals]:
    """Return the intervals [begin, end) of batches between two accesses to a row.

    The four arrays are: begin, end, the lookups served if a row is cached through the interval, and
    the number of rows for which these three are equal. Batch 0 is the first counted one.
    """
    next_accesses = trace.next_accesses()
    accesses = np.flatnonzero(next_accesses != NEVER)
    next_accesses = next_accesses[accesses]
    batch_of_access = trace.access_batches - trace.num_warm_batches
    is_counted = batch_of_access[next_accesses] >= 0
    begin = np.maximum(batch_of_access[accesses[is_counted]] + 1, 0)
    end = batch_of_access[next_accesses[is_counted]] + 1
    gain = trace.lookup_counts[next_accesses[is_counted]]
    intervals, num_rows = np.unique(np.stack([begin, end, gain]), axis=1, return_counts=True)
    begin, end, gain = intervals
    return begin, end, gain.astype(np.float64), num_rows.astype(np.float64)


def expected_hit_rates(probabilities: Reals, capacity: int, lookups: int) -> tuple[float, float]:
    """Return the expected hit rates, per lookup and per distinct row, of the most likely rows.

    The cache has the `capacity` rows with the largest `probabilities`, float64 [rows], of which the
    sum is 1. A batch has n = `lookups` independent draws, so that a row of probability p is in it
    with probability 1 - (1 - p)^n.
    """
    descending = np.sort(probabilities)[::-1]
    batch_probability = -np.expm1(lookups * np.log1p(-np.minimum(descending, 1 - 1e-15)))
    cached_ranks = slice(0, capacity)
    return float(descending[cached_ranks].sum()), float(
        batch_probability[cached_ranks].sum() / batch_probability.sum()
    )


class Policy(Enum):
    """Eviction policy: the row of the lowest rank is evicted; the value says what the rank is."""

    exact_lru = "the batch of its last lookup"
    exact_lfu = "its lookups since its insertion"


def run_policy(trace: RowTrace, capacity: int, policy: Policy) -> BatchHits:
    """Run the trace through a fully associative cache; return the hits of the counted batches.

    The cache does not evict rows of the current batch; of rows with equal rank it evicts the lowest
    row first. If not all new rows of a batch fit, it inserts those that the batch looks up first.
    """
    num_rows = int(trace.rows.max(initial=0)) + 1
    is_row_cached = np.zeros(num_rows, bool)
    rank_of_row = np.zeros(num_rows, np.int64)
    is_hit = np.zeros(len(trace.rows), bool)
    for batch, (start, end) in enumerate(itertools.pairwise(trace.batch_starts)):
        rows, lookup_counts = trace.rows[start:end], trace.lookup_counts[start:end]
        is_cached = is_row_cached[rows]
        is_hit[start:end] = is_cached
        new_rows = rows[~is_cached][np.argsort(trace.first_lookups[start:end][~is_cached])]
        cached_rows = np.flatnonzero(is_row_cached)
        candidates = np.setdiff1d(cached_rows, rows, assume_unique=True)
        num_excess = len(cached_rows) + len(new_rows) - capacity
        if num_excess > 0:
            num_evicted = min(num_excess, len(candidates))
            order = np.argsort(rank_of_row[candidates] * num_rows + candidates)
            is_row_cached[candidates[order[:num_evicted]]] = False
            new_rows = new_rows[: len(new_rows) - (num_excess - num_evicted)]
        is_row_cached[new_rows] = True
        if policy is Policy.exact_lru:
            rank_of_row[rows] = batch
        else:
            rank_of_row[rows] = np.where(is_cached, rank_of_row[rows], 0) + lookup_counts
    return hits_per_batch(trace, is_hit)


def counter_samples(trace: RowTrace, hits: BatchHits) -> dict[str, list[int]]:
    """Return the samples of a record: {counter: value per counted batch}.

    The counters are lookups, lookup_hits, rows and row_hits.
    """
    batches = list(trace.counted_batches())
    return {
        "lookups": [int(trace.lookup_counts[accesses].sum()) for accesses in batches],
        "lookup_hits": hits.lookup_hits,
        "rows": [accesses.stop - accesses.start for accesses in batches],
        "row_hits": hits.row_hits,
    }
