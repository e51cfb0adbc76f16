"""Bounds on caches: hits that no policy can exceed on a trace, and the best fixed choice of rows.

A trace is a sequence of batches; a batch is a set of distinct rows with a number of lookups each. A
cache in front of a table probes all rows of a batch before any row moves, so a row is a hit or a
miss with all its lookups. Then rows of the batch may be inserted and any rows evicted. A cache
holds only rows that were looked up before, and need not insert the rows that it missed. The first
`warm` batches fill the cache and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from experiments.workloads.distributions import Ids, Reals

NEVER = np.iinfo(np.int64).max  # position of the next access to a row that has none
# Subgradient step k of `max_lookup_hits` is FIRST_STEP / (1 + k / DECAY) × bound ÷ norm long.
# Any values give a valid bound; how tight it is with others was not measured.
FIRST_STEP, DECAY = 0.05, 20


@dataclass(frozen=True)
class RowTrace:
    """Distinct rows per batch with their lookups; an access is a row of a batch.

    Attributes:
        rows: row of each access, int64 [accesses]; batch b has rows[starts[b]:starts[b + 1]].
        lookups: number of lookups of each access, int64 [accesses].
        starts: first access of each batch, and the end, int64 [batches + 1].
        warm: number of first batches that are not counted.
        positions: index in its batch of the first lookup of each access, int64 [accesses].
    """

    rows: Ids
    lookups: Ids
    starts: Ids
    warm: int
    positions: Ids

    @classmethod
    def of(cls, batches: Sequence[Ids], warm: int) -> RowTrace:
        """Build from the ids >= 0 of each batch, at least one, which may repeat in any order."""
        sets = [np.unique(ids, return_index=True, return_counts=True) for ids in batches]
        starts = np.cumsum([0, *(len(rows) for rows, _, _ in sets)])
        rows, positions, lookups = (
            np.concatenate(parts).astype(np.int64) for parts in zip(*sets, strict=True)
        )
        return cls(rows, lookups, starts, warm, positions)

    @property
    def batch(self) -> Ids:
        """Return the number of the batch of each access."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def slices(self) -> Iterator[slice]:
        """Yield the accesses of each counted batch."""
        for b in range(self.warm, len(self.starts) - 1):
            yield slice(int(self.starts[b]), int(self.starts[b + 1]))

    def following(self) -> Ids:
        """Return per access the position of the next access to its row; NEVER for the last one."""
        return shifted_positions(self.rows, -1, NEVER)


def shifted_positions(rows: Ids, periods: int, fill: int) -> Ids:
    """Return per access the position of the access to its row `periods` earlier, or `fill`.

    Negative `periods` look ahead.
    """
    positions = pd.Series(np.arange(len(rows)))
    return positions.groupby(rows).shift(periods, fill_value=fill).to_numpy()


@dataclass(frozen=True)
class Hits:
    """Hits per counted batch: distinct rows that the cache had, and the lookups of these rows."""

    rows: list[int]
    lookups: list[int]


def hits_per_batch(trace: RowTrace, is_hit: Reals | Ids) -> Hits:
    """Return the hits per counted batch; `is_hit` is 1 or 0 per access of the whole trace."""
    pairs = [(is_hit[s], trace.lookups[s]) for s in trace.slices()]
    return Hits([int(h.sum()) for h, _ in pairs], [int((h * n).sum()) for h, n in pairs])


def offline_hits(trace: RowTrace, capacity: int) -> Hits:
    """Return the hits of Belady's MIN, which serves the most accesses with `capacity` rows.

    After each batch the cache keeps the rows that are looked up again soonest, among its own rows
    and the rows of the batch. If several rows recur in the same batch, it prefers those with more
    lookups: that serves more lookups and equally many rows.
    """
    following = trace.following()
    is_last = following == NEVER
    next_access = np.where(is_last, 0, following)
    # Combine both criteria in one number: the lowest is needed soonest, then has most lookups.
    scale = int(trace.lookups.max(initial=0)) + 1
    urgency = np.where(
        is_last, NEVER, trace.batch[next_access] * scale - trace.lookups[next_access]
    )
    size = int(trace.rows.max(initial=0)) + 1
    cached, urgency_of_row = np.zeros(size, bool), np.full(size, NEVER)
    warm = slice(0, int(trace.starts[trace.warm]))
    urgency_of_row[trace.rows[warm]] = urgency[warm]  # the last access to a row wins
    cached_rows = _soonest_used(np.unique(trace.rows[warm]), urgency_of_row, capacity)
    cached[cached_rows] = True
    is_hit = np.zeros(len(trace.rows), np.int64)
    for accesses in trace.slices():
        rows = trace.rows[accesses]
        is_cached = cached[rows]
        is_hit[accesses] = is_cached
        urgency_of_row[rows] = urgency[accesses]
        candidates = np.concatenate([cached_rows, rows[~is_cached]])
        cached[cached_rows] = False
        cached_rows = _soonest_used(candidates, urgency_of_row, capacity)
        cached[cached_rows] = True
    return hits_per_batch(trace, is_hit)


def _soonest_used(rows: Ids, urgency_of_row: Ids, capacity: int) -> Ids:
    """Return the `capacity` rows of lowest urgency; drop rows whose urgency is NEVER."""
    rows = rows[urgency_of_row[rows] != NEVER]
    if len(rows) <= capacity:
        return rows
    if not capacity:
        return rows[:0]
    return rows[np.argpartition(urgency_of_row[rows], capacity - 1)[:capacity]]


def static_top_hits(trace: RowTrace, capacity: int) -> Hits:
    """Return the hits of a cache that holds the `capacity` most frequent rows of the trace.

    Each row is in the cache from its first lookup on.
    """
    counts = np.bincount(trace.rows, trace.lookups)
    is_cached = np.zeros(len(counts), bool)
    is_cached[np.argsort(-counts, kind="stable")[:capacity]] = True
    is_first_use = np.ones(len(trace.rows), bool)
    next_use = trace.following()
    is_first_use[next_use[next_use != NEVER]] = False
    return hits_per_batch(trace, (is_cached[trace.rows] & ~is_first_use).astype(np.int64))


def max_lookup_hits(trace: RowTrace, capacity: int, rounds: int = 400) -> float:
    """Return an upper bound on the lookups that a cache of `capacity` rows can serve.

    A lookup is a hit if the cache has held its row since the row's previous lookup. So a policy is
    a choice of intervals between lookups, at most `capacity` of them at a time; the best choice is
    the solution of a linear program. Its dual has a price per batch and slot. Any prices bound the
    optimum from above; `rounds` subgradient steps find good ones.
    """
    begin, end, gain, counts = _intervals(trace)
    batches = len(trace.starts) - 1 - trace.warm
    price = np.zeros(batches)
    best = bound = float((gain * counts).sum())
    for step_index in range(rounds):
        price_up_to = np.concatenate([[0.0], np.cumsum(price)])
        profit = gain - (price_up_to[end] - price_up_to[begin])
        served_rows = counts * (profit > 0)
        bound = capacity * price.sum() + float((profit * served_rows).sum())
        best = min(best, bound)
        change = np.bincount(begin, served_rows, batches + 1) - np.bincount(
            end, served_rows, batches + 1
        )
        excess_rows = np.cumsum(change)[:batches] - capacity
        squared_norm = float((excess_rows * excess_rows).sum())
        if squared_norm == 0.0:
            break
        step_size = FIRST_STEP / (1.0 + step_index / DECAY)
        price = np.maximum(price + excess_rows * step_size * max(best, 1.0) / squared_norm, 0.0)
    return best


def _intervals(trace: RowTrace) -> tuple[Ids, Ids, Reals, Reals]:
    """Return the distinct intervals [begin, end) of batches between two lookups of a row.

    The four arrays are: begin, end, the lookups served if a row is cached through the interval, and
    the number of rows with such an interval. Batches count from the first one after the warm-up.
    """
    next_use = trace.following()
    uses = np.flatnonzero(next_use != NEVER)
    next_uses = next_use[uses]
    batch = trace.batch - trace.warm
    is_counted = batch[next_uses] >= 0
    begin = np.maximum(batch[uses[is_counted]] + 1, 0)
    end = batch[next_uses[is_counted]] + 1
    gain = trace.lookups[next_uses[is_counted]]
    distinct, counts = np.unique(np.stack([begin, end, gain]), axis=1, return_counts=True)
    begin, end, gain = distinct
    return begin, end, gain.astype(np.float64), counts.astype(np.float64)


def expected_top(probabilities: Reals, capacity: int, lookups: int) -> tuple[float, float]:
    """Return the expected hit rates, per lookup and per distinct row, of the most likely rows.

    A batch has n = `lookups` independent draws, so it has a row with probability 1 - (1 - p)^n.
    `probabilities`, [rows], are those of a draw; the `capacity` largest ones are cached.
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


def run_policy(trace: RowTrace, capacity: int, policy: Policy) -> Hits:
    """Run the trace through a fully associative cache; return the hits of the counted batches.

    Rows of the present batch are not evicted. If not all new rows of a batch fit, the cache inserts
    those that the batch looks up first.
    """
    size = int(trace.rows.max(initial=0)) + 1
    cached = np.zeros(size, bool)
    rank = np.zeros(size, np.int64)
    is_hit = np.zeros(len(trace.rows), np.int64)
    for batch, (start, end) in enumerate(zip(trace.starts, trace.starts[1:], strict=False)):
        rows, lookups = trace.rows[start:end], trace.lookups[start:end]
        is_cached = cached[rows]
        is_hit[start:end] = is_cached
        new_rows = rows[~is_cached][np.argsort(trace.positions[start:end][~is_cached])]
        cached_rows = np.flatnonzero(cached)
        candidates = np.setdiff1d(cached_rows, rows, assume_unique=True)
        excess_rows = len(cached_rows) + len(new_rows) - capacity
        if excess_rows > 0:
            num_evicted = min(excess_rows, len(candidates))
            order = np.argsort(rank[candidates] * size + candidates)
            cached[candidates[order[:num_evicted]]] = False
            new_rows = new_rows[: len(new_rows) - (excess_rows - num_evicted)]
        cached[new_rows] = True
        if policy is Policy.exact_lru:
            rank[rows] = batch
        else:
            rank[rows] = np.where(is_cached, rank[rows], 0) + lookups
    return hits_per_batch(trace, is_hit)


def counter_samples(trace: RowTrace, hits: Hits) -> dict[str, list[int]]:
    """Return hits as the counters of a cache, {counter: value per counted batch}."""
    accesses = list(trace.slices())
    return {
        "lookups": [int(trace.lookups[s].sum()) for s in accesses],
        "lookup_hits": hits.lookups,
        "rows": [s.stop - s.start for s in accesses],
        "row_hits": hits.rows,
    }
