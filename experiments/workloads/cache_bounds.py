"""Bounds on caches: what no policy can beat on a trace, and the best fixed choice of rows.

A trace is a sequence of batches; a batch is a set of distinct rows, each with its lookups. That is
how a cache in front of a table sees it: all rows of a batch are probed at once, before anything
moves, so that a row is a hit or a miss with all its lookups; then any of the batch's rows may be
inserted and any rows evicted. A cache holds only rows that have been looked up before, and it
may leave out what it missed. The first `warm` batches fill it and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from experiments.workloads.distributions import Ids, Reals

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class RowTrace:
    """Batch b looks up rows[starts[b]:starts[b + 1]], which are distinct, so many times each."""

    rows: Ids
    lookups: Ids
    starts: Ids  # [batches + 1]
    warm: int  # batches that are not counted
    positions: Ids  # where in its batch each row is looked up first

    @classmethod
    def of(cls, batches: Sequence[Ids], warm: int) -> RowTrace:
        """Build from the ids of each batch, in any order and with repetitions."""
        sets = [np.unique(ids, return_index=True, return_counts=True) for ids in batches]
        starts = np.cumsum([0, *(len(rows) for rows, _, _ in sets)])
        rows, positions, lookups = (
            np.concatenate(parts).astype(np.int64) for parts in zip(*sets, strict=True)
        )
        return cls(rows, lookups, starts, warm, positions)

    @property
    def batch(self) -> Ids:
        """Return the batch of each access, [accesses]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def slices(self) -> Iterator[slice]:
        """Return the accesses of each counted batch."""
        for b in range(self.warm, len(self.starts) - 1):
            yield slice(int(self.starts[b]), int(self.starts[b + 1]))

    def following(self) -> Ids:
        """Return the next access to the same row, [accesses]; NEVER for the last one."""
        return shifted(self.rows, -1, NEVER)


def shifted(rows: Ids, periods: int, fill: int) -> Ids:
    """Return where each access's row was looked up `periods` of its accesses before, or `fill`."""
    positions = pd.Series(np.arange(len(rows)))
    return positions.groupby(rows).shift(periods, fill_value=fill).to_numpy()


@dataclass(frozen=True)
class Hits:
    """What a cache served of each counted batch."""

    rows: list[int]  # distinct rows that were there
    lookups: list[int]  # their lookups


def served(trace: RowTrace, hit: Reals | Ids) -> Hits:
    """Sum a 0/1 mark of every access per counted batch."""
    marks = [(hit[s], trace.lookups[s]) for s in trace.slices()]
    return Hits([int(h.sum()) for h, _ in marks], [int((h * n).sum()) for h, n in marks])


def offline(trace: RowTrace, capacity: int) -> Hits:
    """Return the hits of Belady's MIN: no cache of `capacity` rows serves more distinct rows.

    After each batch, of the cached rows and those of the batch, the cache keeps the ones that are
    looked up again soonest. Among rows due in the same batch, the choice makes no difference to the
    number of rows served; those with more lookups are kept, so that more lookups are served.
    """
    following = trace.following()
    last = following == NEVER
    due = np.where(last, 0, following)
    # Sooner first, then more lookups: one number to select by.
    scale = int(trace.lookups.max(initial=0)) + 1
    urgency = np.where(last, NEVER, trace.batch[due] * scale - trace.lookups[due])
    size = int(trace.rows.max(initial=0)) + 1
    cached, value = np.zeros(size, bool), np.full(size, NEVER)
    warm = slice(0, int(trace.starts[trace.warm]))
    value[trace.rows[warm]] = urgency[warm]  # of several accesses the last stands
    content = _soonest(np.unique(trace.rows[warm]), value, capacity)
    cached[content] = True
    hit = np.zeros(len(trace.rows), np.int64)
    for accesses in trace.slices():
        rows = trace.rows[accesses]
        is_cached = cached[rows]
        hit[accesses] = is_cached
        value[rows] = urgency[accesses]
        candidates = np.concatenate([content, rows[~is_cached]])
        cached[content] = False
        content = _soonest(candidates, value, capacity)
        cached[content] = True
    return served(trace, hit)


def _soonest(rows: Ids, value: Ids, capacity: int) -> Ids:
    rows = rows[value[rows] != NEVER]
    if len(rows) <= capacity:
        return rows
    return rows[np.argpartition(value[rows], capacity - 1)[:capacity]] if capacity else rows[:0]


def static_top(trace: RowTrace, capacity: int) -> Hits:
    """Return the hits of a cache of only the `capacity` most frequent rows of the trace."""
    counts = np.bincount(trace.rows, trace.lookups)
    chosen = np.zeros(len(counts), bool)
    chosen[np.argsort(-counts, kind="stable")[:capacity]] = True
    first = np.ones(len(trace.rows), bool)
    following = trace.following()
    first[following[following != NEVER]] = False
    return served(trace, (chosen[trace.rows] & ~first).astype(np.int64))


def most_lookups(trace: RowTrace, capacity: int, rounds: int = 400) -> float:
    """Return an upper bound on the lookups that a cache of `capacity` rows can serve.

    A row that a batch is served must have been cached since its previous lookup. So a policy is a
    choice of such intervals, at most `capacity` of them at any time, and the best one is a linear
    program. Its dual has a price per batch and slot; every choice of prices bounds the optimum from
    above, and subgradient steps find good ones.
    """
    since, until, gain, many = _intervals(trace)
    batches = len(trace.starts) - 1 - trace.warm
    price = np.zeros(batches)
    best = bound = float((gain * many).sum())
    for number in range(rounds):
        paid = np.concatenate([[0.0], np.cumsum(price)])
        profit = gain - (paid[until] - paid[since])
        chosen = many * (profit > 0)
        bound = capacity * price.sum() + float((profit * chosen).sum())
        best = min(best, bound)
        change = np.bincount(since, chosen, batches + 1) - np.bincount(until, chosen, batches + 1)
        over = np.cumsum(change)[:batches] - capacity
        norm = float((over * over).sum())
        if norm == 0.0:
            break
        reach = 1.0 / (1.0 + number / 20)
        price = np.maximum(price + over * reach * 0.05 * max(best, 1.0) / norm, 0.0)
    return best


def _intervals(trace: RowTrace) -> tuple[Ids, Ids, Reals, Reals]:
    """Return the intervals [since, until) between two lookups of a row.

    For each distinct one: since, until, the lookups that caching a row through it serves, and how
    many rows have it.
    """
    following = trace.following()
    first = np.flatnonzero(following != NEVER)
    second = following[first]
    batch = trace.batch - trace.warm
    counted = batch[second] >= 0
    since = np.maximum(batch[first[counted]] + 1, 0)
    until = batch[second[counted]] + 1
    gain = trace.lookups[second[counted]]
    kinds, many = np.unique(np.stack([since, until, gain]), axis=1, return_counts=True)
    return kinds[0], kinds[1], kinds[2].astype(np.float64), many.astype(np.float64)


def expected_top(probabilities: Reals, capacity: int, lookups: int) -> tuple[float, float]:
    """Return the expected hit rates per lookup and per distinct row of the likeliest rows.

    For batches of `lookups` independent draws; a row is in one with probability 1 - (1 - p)^n.
    """
    ordered = np.sort(probabilities)[::-1]
    present = -np.expm1(lookups * np.log1p(-np.minimum(ordered, 1 - 1e-15)))
    top = slice(0, capacity)
    return float(ordered[top].sum()), float(present[top].sum() / present.sum())


class Policy(Enum):
    """What determines a row's rank."""

    exact_lru = "the batch of its last lookup"
    exact_lfu = "its lookups since it was taken in"


def run(trace: RowTrace, capacity: int, policy: Policy) -> Hits:
    """Run the whole trace through the cache; return the hits of the counted batches.

    Of a batch with more new rows than can be taken in, those that it looks up first are.
    """
    size = int(trace.rows.max(initial=0)) + 1
    cached = np.zeros(size, bool)
    rank = np.zeros(size, np.int64)
    hit = np.zeros(len(trace.rows), np.int64)
    for batch, (start, end) in enumerate(zip(trace.starts, trace.starts[1:], strict=False)):
        rows, lookups = trace.rows[start:end], trace.lookups[start:end]
        is_cached = cached[rows]
        hit[start:end] = is_cached
        new = rows[~is_cached][np.argsort(trace.positions[start:end][~is_cached])]
        content = np.flatnonzero(cached)
        candidates = np.setdiff1d(content, rows, assume_unique=True)
        over = len(content) + len(new) - capacity
        if over > 0:
            evicted = min(over, len(candidates))
            order = np.argsort(rank[candidates] * size + candidates)
            cached[candidates[order[:evicted]]] = False
            new = new[: len(new) - (over - evicted)]
        cached[new] = True
        if policy is Policy.exact_lru:
            rank[rows] = batch
        else:
            rank[rows] = np.where(is_cached, rank[rows], 0) + lookups
    return served(trace, hit)


def samples(trace: RowTrace, hits: Hits) -> dict[str, list[int]]:
    """Convert hits of the counted batches to the counters of a cache."""
    accesses = list(trace.slices())
    return {
        "lookups": [int(trace.lookups[s].sum()) for s in accesses],
        "lookup_hits": hits.lookups,
        "rows": [s.stop - s.start for s in accesses],
        "row_hits": hits.rows,
    }
