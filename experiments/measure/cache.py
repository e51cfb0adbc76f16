"""Measure a cell of kind cache: the batches of a trace through real and ideal caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.config.schema import Order
from experiments.config.sweep import COMPUTED_ARMS, EXACT_CACHES, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender
from experiments.contenders.key_checks import CHECKED_KEYS, verify_key_table
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import Unsupported, build
from experiments.measure.outcome import Outcome, make_record, pool_entries
from experiments.measure.session import Session
from experiments.measure.timing import task_of
from experiments.results.store import Record
from experiments.workloads import cache_bounds
from experiments.workloads.distributions import Ids
from experiments.workloads.keys import KeySpace, values_of
from experiments.workloads.trace_files import TraceError
from experiments.workloads.workload import (
    WAYS,
    Batch,
    Pool,
    TableShape,
    cache_sets,
    make_pool,
    probabilities,
    table_shapes,
)


def cache_cell(cell: Cell, session: Session, seconds: float = 0.0) -> list[Record]:
    """Return one record per arm: a contender, or an ideal cache, at a size of the cache.

    The samples of a record are {counter: counts per batch} (`Contender.counters`): of all batches
    for a contender, of those after the warm-up for an ideal cache. The record of the offline
    optimum has `most_lookup_hits`, an upper bound for all caches. The record of static_top has
    `expected_lookup_hit_rate` and `expected_row_hit_rate`, unless the lookups are from a file. If
    two fractions are rounded to the same size, only the first has a record.

    Args:
        cell: cell to measure; its `cache` has the numbers of batches.
        session: run and process.
        seconds: not used.

    Raises:
        TraceError: the trace has too few batches, or cannot be read.
    """
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    num_batches = cell.cache.warm_batches + cell.cache.batches
    pool = make_pool(cell.workload, shapes, num_batches, session.config.seed)
    if len(pool.batches) < num_batches:
        raise TraceError(
            f"{Path(cell.workload.file).name} has {len(pool.batches)} batches of "
            f"{cell.workload.B:,} samples, cache.warm_batches + cache.batches asks for "
            f"{num_batches}: lower them, or workload.B"
        )
    trace = trace_of(pool, shapes, cell.cache.warm_batches)
    records, measured_sizes = [], set()
    for arm in cell.arms:
        outcome = Outcome(arm)
        samples: dict[str, list[int]] = {}
        extra: dict[str, Any] = {}
        cache_rows = WAYS * cache_sets(shapes, arm.cache)
        if (arm.contender, cache_rows) in measured_sizes:
            continue  # fractions of a small table may be rounded to the same number of sets
        measured_sizes.add((arm.contender, cache_rows))
        session.note(f"{arm.key}|running the trace")
        with outcome.catching():
            if registry.entry_of(arm.contender).keyed:
                ids = [_global_rows(batch, shapes) for batch in pool.batches]
                samples = run_keys(arm.contender, ids, cache_rows, session)
            elif arm.contender in COMPUTED_ARMS:
                samples, extra = _run_ideal(arm.contender, trace, cache_rows, cell, shapes)
            else:
                samples = _visit_batches(build(arm.contender, task_of(cell, arm, session)), pool)
        records.append(
            make_record(cell, outcome, session)
            | pool_entries(pool)
            | {"samples": samples, **extra}
            | {"cache_rows": cache_rows, "batches": cell.cache.batches}
        )
    return records


def trace_of(
    pool: Pool, shapes: tuple[TableShape, ...], num_warm_batches: int
) -> cache_bounds.RowTrace:
    """Return the trace of a pool whose tables share one cache.

    Row r of a table gets the number r plus the rows of all tables before it. The first
    `num_warm_batches` batches fill the cache and are not counted.
    """
    return cache_bounds.RowTrace.of(
        [_global_rows(batch, shapes) for batch in pool.batches], num_warm_batches
    )


def _global_rows(batch: Batch, shapes: tuple[TableShape, ...]) -> Ids:
    """Return the row numbers of a batch's lookups, as `trace_of` numbers them, int64 [lookups]."""
    first_rows = np.cumsum([0, *(shape.rows for shape in shapes)])
    rows_by_table = [
        batch.feature(table)[0].numpy() + first_rows[table] for table in range(len(shapes))
    ]
    return np.concatenate(rows_by_table)


def _visit_batches(contender: Contender, pool: Pool) -> dict[str, list[int]]:
    """Run the batches through a contender's cache; return the increase of each counter per batch.

    Raises:
        Unsupported: the contender has no cache.
    """
    contender.reset_counters()
    counters_before = contender.counters()
    if not counters_before:
        raise Unsupported("it has no cache, so there is nothing to count")
    samples: dict[str, list[int]] = {name: [] for name in counters_before}
    for batch in pool.batches:
        contender.visit(contender.prepare(batch))
        counters = contender.counters()
        for name, value in counters.items():
            samples[name].append(value - counters_before[name])
        counters_before = counters
    return samples


def _run_ideal(
    name: str,
    trace: cache_bounds.RowTrace,
    cache_rows: int,
    cell: Cell,
    shapes: tuple[TableShape, ...],
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the counters of an ideal cache per counted batch, and further entries of a record."""
    if name in EXACT_CACHES:
        hits = cache_bounds.run_policy(trace, cache_rows, cache_bounds.Policy[name])
        return cache_bounds.counter_samples(trace, hits), {}
    if name == "offline":
        samples = cache_bounds.counter_samples(trace, cache_bounds.offline_hits(trace, cache_rows))
        return samples, {"most_lookup_hits": cache_bounds.max_lookup_hits(trace, cache_rows)}
    samples = cache_bounds.counter_samples(trace, cache_bounds.static_top_hits(trace, cache_rows))
    workload = cell.workload
    row_probabilities = [
        per_row for shape in shapes if (per_row := probabilities(workload, shape.rows)) is not None
    ]
    if not row_probabilities:
        return samples, {}
    num_lookups = len(shapes) * workload.B * workload.L
    lookup_hit_rate, row_hit_rate = cache_bounds.expected_hit_rates(
        np.concatenate(row_probabilities) / len(shapes), cache_rows, num_lookups
    )
    return samples, {
        "expected_lookup_hit_rate": lookup_hit_rate,
        "expected_row_hit_rate": row_hit_rate,
    }


def run_keys(
    contender: str, batches: Sequence[Ids], num_slots: int, session: Session
) -> dict[str, list[int]]:
    """Run batches of ids through a hash table; return its counters per batch.

    A hit is an id that was present before its batch was inserted. The contender is checked first,
    on a separate table that is large enough for all checked keys.

    Args:
        contender: name of a contender that is a hash table.
        batches: ids of each batch, int64 [lookups].
        num_slots: number of slots of the table.
        session: run and process.

    Returns:
        {counter: value per batch}, with the counters lookups, lookup_hits, rows and row_hits.

    Raises:
        WrongResult: the contender failed the check.
    """

    def build_table(num_slots: int) -> KeyTable:
        return build(contender, KeyTask(num_slots, 1, session.device, num_slots))

    def prepare(ids: Ids) -> Any:
        return table.prepare(torch.from_numpy(ids.astype(np.int64)), torch.zeros(len(ids), 1))

    space, checked_table = KeySpace(Order.permuted, session.seed), build_table(4 * CHECKED_KEYS)
    keys = space.key_range(0, CHECKED_KEYS)
    checked_table.fill(keys, values_of(keys, 1))
    verify_key_table(checked_table, space, keys)
    table = build_table(num_slots)
    counters = ("lookups", "lookup_hits", "rows", "row_hits")
    samples: dict[str, list[int]] = {counter: [] for counter in counters}
    for ids in batches:
        distinct_ids, counts = np.unique(ids, return_counts=True)
        is_present = table.find_slots(prepare(distinct_ids)).cpu().numpy() != table.absent
        table.find_or_insert_slots(prepare(ids))
        samples["lookups"].append(len(ids))
        samples["lookup_hits"].append(int(counts[is_present].sum()))
        samples["rows"].append(len(distinct_ids))
        samples["row_hits"].append(int(is_present.sum()))
    return samples
