"""Numbers of a trace, from the ids of its batches; pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from experiments.caches import ideal
from experiments.traces import reuse, skew
from experiments.work import production
from experiments.work.laws import Ids

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)  # of the lookups: how many rows have them
CURVE_POINTS = 48  # of a curve over sizes or ranks
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Lookups:
    """Batches of ids of one table, or of several under one numbering; ids may be any integers."""

    batches: Sequence[Ids]

    @cached_property
    def ids(self) -> Ids:
        """All lookups, with rows numbered from 0 in order of their ids."""
        whole = np.concatenate(self.batches) if self.batches else np.zeros(0, np.int64)
        return np.unique(whole, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def counts(self) -> Ids:
        """Lookups of each row that has any."""
        return np.bincount(self.ids)

    @cached_property
    def starts(self) -> Ids:
        """Where each batch begins in `ids`, and the end."""
        return np.cumsum([0, *(len(batch) for batch in self.batches)])

    def slices(self) -> list[Ids]:
        """`ids` batch by batch."""
        return [self.ids[a:b] for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def trace(self, warm: int) -> ideal.Trace:
        """As caches see it; the first `warm` batches are not counted."""
        return ideal.Trace.of(self.slices(), warm)


def samples(lookups: Lookups) -> dict[str, list[int]]:
    """Batch by batch: lookups, distinct rows, and rows that no batch before had."""
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
    """One table: repetition, concentration, skew. `rows` 0: as many as were looked up."""
    counts = np.sort(lookups.counts)[::-1]
    total = int(counts.sum())
    per_batch = samples(lookups)
    return {
        "rows": rows or len(counts),
        "rows_known": bool(rows),
        "lookups": total,
        "distinct": len(counts),
        "batch_distinct_share": _share(sum(per_batch["rows"]), total),
        "bag_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "bag_max": int(lengths.max(initial=0)),
        "bags_empty": float((lengths == 0).mean()) if len(lengths) else 0.0,
        "rows_of": {f"{share:g}": _rows_of(counts, share) for share in SHARES},
        "once": _share(int((counts == 1).sum()), len(counts)),
        "fit": fitted(lookups, rows or len(counts)),
    }


def fitted(lookups: Lookups, rows: int) -> Numbers | None:
    """The zipf law that even batches rank and odd ones judge."""
    parts = lookups.slices()
    size = len(lookups.counts)
    halves = []
    for first in (0, 1):
        own = parts[first::2]
        ids = np.concatenate(own) if own else np.zeros(0, np.int64)
        halves.append(np.bincount(ids, minlength=size))
    found = skew.fit(halves[0], halves[1], max(rows, size))
    return None if found is None else dataclasses.asdict(found)


def _rows_of(counts: Ids, share: float) -> int:
    """The fewest rows that have this share of the lookups; `counts` descend."""
    if not len(counts):
        return 0
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum() - 1e-9)) + 1


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def spectrum(lookups: Lookups) -> Numbers:
    """Share of the rows and of the lookups by how often a row is looked up, in the bins of
    `production.EDGES`."""
    rows, share = production.histograms(lookups.counts)
    return {"edges": list(production.EDGES), "rows": rows.tolist(), "lookups": share.tolist()}


def ranked(lookups: Lookups) -> list[list[float]]:
    """[rank, share of the lookups per row] along the rows by falling count, log-spaced."""
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
    """Distinct whole numbers from 1 to `last`, evenly spaced in their logarithm."""
    return np.unique(np.rint(np.geomspace(1, max(last, 1), CURVE_POINTS)).astype(np.int64))


def distances(lookups: Lookups) -> Numbers:
    """How many other rows are looked up between two lookups of a row, lookup by lookup.

    Shares of all lookups: `reuse[b]` with distances from `edges[b]` to below `edges[b + 1]`, and
    `first` without any. `within_batch` are lookups of a row that their batch has looked up before.
    """
    found = reuse.stack_distances(lookups.ids)
    again = found[found != reuse.NEVER]
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


def least_recently_used(trace: ideal.Trace, distance: Ids, sizes: Sequence[int]) -> list[Numbers]:
    """Hit rates of a cache that keeps the most recently used rows, from `reuse.batch_distances`."""
    counted = slice(int(trace.starts[trace.warm]), None)
    near, weight = distance[counted], trace.lookups[counted]
    there = near != reuse.NEVER
    found = []
    for size in sizes:
        hit = there & (near < size)
        rows, lookups = int(hit.sum()), int(weight[hit].sum())
        found.append(_rates(size, lookups, rows, trace))
    return found


def _rates(size: int, lookups: int, rows: int, trace: ideal.Trace) -> Numbers:
    counted = slice(int(trace.starts[trace.warm]), None)
    weight = trace.lookups[counted]
    return {
        "cache_rows": size,
        "lookups": _share(lookups, int(weight.sum())),
        "rows": _share(rows, len(weight)),
    }


def hit_rates(trace: ideal.Trace, fractions: Sequence[float]) -> Numbers:
    """What caches could serve of the counted batches, by size: LRU at any, ideals at `fractions` of
    the distinct rows of the trace."""
    distinct = len(np.unique(trace.rows))
    sizes = sorted({max(1, round(f * distinct)) for f in fractions})
    distance = reuse.batch_distances(trace)
    every = sorted({*_spaced(distinct).tolist(), *sizes})
    offline = [ideal.offline(trace, size) for size in sizes]
    static = [ideal.static_top(trace, size) for size in sizes]
    return {
        "distinct": distinct,
        "lru": least_recently_used(trace, distance, every),
        "offline": [_summed(s, h, trace) for s, h in zip(sizes, offline, strict=True)],
        "static_top": [_summed(s, h, trace) for s, h in zip(sizes, static, strict=True)],
    }


def _summed(size: int, hits: ideal.Hits, trace: ideal.Trace) -> Numbers:
    return _rates(size, sum(hits.lookups), sum(hits.rows), trace)
