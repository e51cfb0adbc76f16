"""The ideal caches, against every choice there is on tiny traces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.workloads import cache_bounds, distributions

Batches = list[list[int]]

traces = st.lists(st.lists(st.integers(0, 4), max_size=7), min_size=1, max_size=6)


def trace_of(batches: Sequence[Sequence[int]], warm: int) -> cache_bounds.RowTrace:
    return cache_bounds.RowTrace.of([np.array(b, np.int64) for b in batches], warm)


def best(batches: Batches, warm: int, capacity: int, *, lookups: bool) -> int:
    """The most hits, by trying everything that a cache could hold after each batch."""
    served: dict[frozenset[int], int] = {frozenset(): 0}  # content -> hits so far
    for number, batch in enumerate(batches):
        after: dict[frozenset[int], int] = {}
        for content, hits in served.items():
            if number >= warm:
                there = [row for row in batch if row in content]
                hits += len(there) if lookups else len(set(there))
            candidates = content | set(batch)
            for size in range(min(capacity, len(candidates)) + 1):
                for kept in itertools.combinations(sorted(candidates), size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits)
        served = after
    return max(served.values())


@given(batches=traces, warm=st.integers(0, 3), capacity=st.integers(0, 4))
@settings(deadline=None, max_examples=150)
def test_offline_serves_as_many_rows_as_the_best_of_all_choices(
    batches: Batches, warm: int, capacity: int
) -> None:
    warm = min(warm, len(batches))
    hits = cache_bounds.offline_hits(trace_of(batches, warm), capacity)
    assert sum(hits.row_hits) == best(batches, warm, capacity, lookups=False)
    assert len(hits.row_hits) == len(batches) - warm


@given(batches=traces, warm=st.integers(0, 3), capacity=st.integers(0, 4))
@settings(deadline=None, max_examples=150)
def test_no_choice_serves_more_lookups_than_the_bound(
    batches: Batches, warm: int, capacity: int
) -> None:
    warm = min(warm, len(batches))
    trace = trace_of(batches, warm)
    most = best(batches, warm, capacity, lookups=True)
    assert most <= cache_bounds.max_lookup_hits(trace, capacity) + 1e-9
    assert sum(cache_bounds.offline_hits(trace, capacity).lookup_hits) <= most
    assert sum(cache_bounds.static_top_hits(trace, capacity).lookup_hits) <= most
    assert sum(cache_bounds.static_top_hits(trace, capacity).row_hits) <= sum(
        cache_bounds.offline_hits(trace, capacity).row_hits
    )


def test_offline_literally() -> None:
    batches = [[1, 1, 2], [3, 1], [2, 3, 3], [1]]
    hits = cache_bounds.offline_hits(trace_of(batches, 0), 1)
    # Row 1 is held for batch 1, then row 3, due next with two lookups, rather than row 2.
    assert hits == cache_bounds.BatchHits([0, 1, 1, 0], [0, 1, 2, 0])
    assert cache_bounds.offline_hits(trace_of(batches, 2), 2) == cache_bounds.BatchHits(
        [2, 0], [3, 0]
    )
    assert cache_bounds.offline_hits(trace_of(batches, 2), 3) == cache_bounds.BatchHits(
        [2, 1], [3, 1]
    )


def test_static_top_takes_in_the_most_frequent_rows_at_their_first_lookup() -> None:
    batches = [[5, 6], [5, 5, 7], [6, 7, 5], [7]]
    assert cache_bounds.static_top_hits(trace_of(batches, 0), 1) == cache_bounds.BatchHits(
        [0, 1, 1, 0], [0, 2, 1, 0]
    )
    assert cache_bounds.static_top_hits(trace_of(batches, 2), 2) == cache_bounds.BatchHits(
        [2, 1], [2, 1]
    )


def test_the_bound_is_close_to_what_offline_serves() -> None:
    rng = np.random.default_rng(3)
    batches = [distributions.zipf_ranks(rng, 3000, 5000, 1.05) for _ in range(40)]
    trace = cache_bounds.RowTrace.of(batches, 20)
    lookups = sum(int(trace.lookup_counts[s].sum()) for s in trace.counted_batches())
    for capacity in (50, 500, 2000):
        served = sum(cache_bounds.offline_hits(trace, capacity).lookup_hits)
        most = cache_bounds.max_lookup_hits(trace, capacity)
        assert served <= most <= served + 0.01 * lookups


def test_law_top_is_what_a_long_trace_gives() -> None:
    rows, lookups, capacity = 300, 200, 30
    rng = np.random.default_rng(5)
    batches = [distributions.zipf_ranks(rng, lookups, rows, 1.0) for _ in range(600)]
    trace = cache_bounds.RowTrace.of(batches, 300)
    chosen = (trace.rows >= 1) & (trace.rows <= capacity)
    hits = cache_bounds.hits_per_batch(trace, chosen)
    distinct = sum(s.stop - s.start for s in trace.counted_batches())
    by_lookup, by_row = cache_bounds.expected_hit_rates(
        distributions.zipf_probabilities(rows, 1.0), capacity, lookups
    )
    assert sum(hits.lookup_hits) / (300 * lookups) == pytest.approx(by_lookup, abs=0.01)
    assert sum(hits.row_hits) / distinct == pytest.approx(by_row, abs=0.01)
    assert cache_bounds.expected_hit_rates(np.full(4, 0.25), 1, 10)[0] == pytest.approx(0.25)
