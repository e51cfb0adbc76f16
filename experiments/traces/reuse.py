"""Reuse distances: how many other rows are looked up between two lookups of the same row."""

from __future__ import annotations

import numpy as np

from experiments.caches.ideal import Trace
from experiments.work.laws import Ids

NEVER = -1  # before the first lookup of a row there is none


def stack_distances(rows: Ids) -> Ids:
    """For each access, the distinct other rows since the last one to its row; NEVER for the first.

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


def batch_distances(trace: Trace) -> Ids:
    """The same for caches that probe a whole batch before anything moves, [accesses].

    For each row of a batch: how many rows were used more recently than it before the batch began. A
    cache of C rows that keeps the most recent ones has it if that is below C. Of the rows of one
    batch those with more lookups count as more recent.
    """
    order = np.lexsort((trace.lookups, trace.batch))
    previous = _previous(trace.rows[order])
    ends = zip(trace.starts[:-1], trace.starts[1:], strict=True)
    within = [_not_above_before(previous[a:b]) for a, b in ends]
    earlier = _not_above_before(previous) - np.concatenate([*within, np.zeros(0, np.int64)])
    found = np.empty(len(previous), np.int64)
    found[order] = np.where(previous < 0, NEVER, earlier - (previous + 1))
    return found


def _previous(rows: Ids) -> Ids:
    """The last access to the same row, -1 for the first."""
    order = np.argsort(rows, kind="stable")
    same = rows[order[1:]] == rows[order[:-1]]
    found = np.full(len(rows), -1)
    found[order[1:][same]] = order[:-1][same]
    return found


def _not_above_before(values: Ids) -> Ids:
    """For each i, how many j < i have values[j] <= values[i].

    All positions in ascending order of value are split by one bit of the position after another,
    highest first, in place of a merge sort's merging. At each bit the positions of a block that
    have it are after all that do not; those of the latter that come first in order are counted.
    """
    count = len(values)
    found = np.zeros(count, np.int64)
    order = np.argsort(values, kind="stable")
    bits = max(count - 1, 0).bit_length()
    starts = np.zeros(1, np.int64)  # of the blocks within `order`
    for bit in range(bits - 1, -1, -1):
        upper = (order >> bit) & 1
        block = order >> (bit + 1)
        before = np.cumsum(1 - upper) - (1 - upper)  # lower ones before this place, of all blocks
        first = starts[block]
        lower = before - before[first]
        is_upper = upper == 1
        found[order[is_upper]] += lower[is_upper]
        # Stable partition of every block: its lower positions, then its upper ones.
        total = np.append(before, before[-1] + 1 - upper[-1])
        ends = np.append(starts[1:], count)
        lowers = total[ends] - total[starts]
        place = np.arange(count)
        target = np.where(is_upper, first + lowers[block] + (place - first - lower), first + lower)
        moved = np.empty_like(order)
        moved[target] = order
        order = moved
        starts = np.minimum(np.arange(0, count, 1 << bit), count)
    return found
