"""Measure a cell of kind cache: the batches of a trace through real and ideal caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiments.config.schema import Order
from experiments.config.sweep import COMPUTED, EXACT, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender
from experiments.contenders.key_checks import CHECKED_KEYS, verify_keyed
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import Unsupported, build
from experiments.measure.outcome import Outcome, describe, facts
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
    """Return a record per contender or ideal cache and size; `seconds` is not used.

    A contender visits every batch, and its counters are read after each one. So the samples of a
    record are the counts of each batch by counter (`Contender.counters`), those of the warm-up too.
    Ideal caches have no counts of the warm-up. Their records may have `most_lookup_hits` (the bound
    of the offline optimum), or `expected_lookup_hit_rate` and `expected_row_hit_rate` (static_top,
    unless the lookups are from a file). Fractions that give the same size have one record.

    Raises:
        TraceError: the trace has too few batches.
    """
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    num_batches = cell.cache.warm_batches + cell.cache.batches
    pool = make_pool(cell.workload, shapes, num_batches, session.config.seed)
    if len(pool.batches) < num_batches:
        raise TraceError(
            f"{cell.workload.file} has {len(pool.batches)} batches of {cell.workload.B:,} samples, "
            f"cache.warm_batches + cache.batches asks for {num_batches}: lower them, or workload.B"
        )
    trace = trace_of(pool, shapes, cell.cache.warm_batches)
    records, measured_sizes = [], set()
    for arm in cell.arms:
        outcome = Outcome(arm)
        samples: dict[str, list[int]] = {}
        extra: dict[str, Any] = {}
        size = WAYS * cache_sets(shapes, arm.cache)
        if (arm.contender, size) in measured_sizes:
            continue  # fractions of a small table may be rounded to the same number of sets
        measured_sizes.add((arm.contender, size))
        session.note(f"{arm.key}|running the trace")
        with outcome.catching():
            if registry.facts_of(arm.contender).keyed:
                ids = [_global_rows(batch, shapes) for batch in pool.batches]
                samples = run_keys(arm.contender, ids, size, session)
            elif arm.contender in COMPUTED:
                samples, extra = _run_ideal(arm.contender, trace, size, cell, shapes)
            else:
                samples = _visit_batches(build(arm.contender, task_of(cell, arm, session)), pool)
        records.append(
            describe(cell, outcome, session)
            | facts(pool)
            | {"samples": samples, **extra}
            | {"cache_rows": size, "batches": cell.cache.batches}
        )
    return records


def trace_of(pool: Pool, shapes: tuple[TableShape, ...], warm: int) -> cache_bounds.RowTrace:
    """Return the trace of a pool, with the rows of all tables in one numbering."""
    return cache_bounds.RowTrace.of([_global_rows(b, shapes) for b in pool.batches], warm)


def _global_rows(batch: Batch, shapes: tuple[TableShape, ...]) -> Ids:
    bases = np.cumsum([0, *(s.rows for s in shapes)])
    parts = [batch.feature(f)[0].numpy() + bases[f] for f in range(len(shapes))]
    return np.concatenate(parts)


def _visit_batches(contender: Contender, pool: Pool) -> dict[str, list[int]]:
    """Return the increase of each counter per batch; raise Unsupported without a cache."""
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
    name: str, trace: cache_bounds.RowTrace, size: int, cell: Cell, shapes: tuple[TableShape, ...]
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the counters of an ideal cache per counted batch, and bounds or predictions."""
    if name in EXACT:
        hits = cache_bounds.run_policy(trace, size, cache_bounds.Policy[name])
        return cache_bounds.counter_samples(trace, hits), {}
    if name == "offline":
        samples = cache_bounds.counter_samples(trace, cache_bounds.offline(trace, size))
        return samples, {"most_lookup_hits": cache_bounds.max_lookup_hits(trace, size)}
    samples = cache_bounds.counter_samples(trace, cache_bounds.static_top(trace, size))
    work = cell.workload
    row_probabilities = [p for p in (probabilities(work, s.rows) for s in shapes) if p is not None]
    if not row_probabilities:
        return samples, {}
    lookups = len(shapes) * work.B * work.L
    by_lookup, by_row = cache_bounds.expected_top(
        np.concatenate(row_probabilities) / len(shapes), size, lookups
    )
    return samples, {"expected_lookup_hit_rate": by_lookup, "expected_row_hit_rate": by_row}


def run_keys(
    contender: str, batches: Sequence[Ids], slots: int, session: Session
) -> dict[str, list[int]]:
    """Run batches of ids through a hash table of `slots` slots; return its counters per batch.

    A hit is an id that was present before its batch was inserted. First, another table of the
    contender, whose slots suffice for all its keys, is checked.
    """

    def table_of(slots: int) -> KeyTable:
        return build(contender, KeyTask(slots, 1, session.device, slots))

    def prepare(ids: Ids) -> Any:
        return table.prepare(torch.from_numpy(ids.astype(np.int64)), torch.zeros(len(ids), 1))

    space, checked = KeySpace(Order.permuted, session.seed), table_of(4 * CHECKED_KEYS)
    keys = space.run(0, CHECKED_KEYS)
    checked.fill(keys, values_of(keys, 1))
    verify_keyed(checked, space, keys)
    table = table_of(slots)
    samples: dict[str, list[int]] = {k: [] for k in ("lookups", "lookup_hits", "rows", "row_hits")}
    for ids in batches:
        rows, lookups = np.unique(ids, return_counts=True)
        is_present = table.find_slots(prepare(rows)).cpu().numpy() != table.absent
        table.find_or_insert_slots(prepare(ids))
        samples["lookups"].append(len(ids))
        samples["lookup_hits"].append(int(lookups[is_present].sum()))
        samples["rows"].append(len(rows))
        samples["row_hits"].append(int(is_present.sum()))
    return samples
