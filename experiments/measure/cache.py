"""Measure a cell of kind cache: the same batches through caches of every size and ideal ones."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiments.config.schema import Order
from experiments.config.sweep import COMPUTED, EXACT, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, build
from experiments.contenders.key_checks import CHECKED_KEYS, verify_keyed
from experiments.contenders.keys import KeyTable, KeyTask, build_keyed
from experiments.contenders.registry import Unsupported
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
    """Return a record per contender and size, ideal ones included; `seconds` is not used.

    A contender visits every batch; what its cache counted is read after each, so
    that a record holds the hits batch by batch, those of the warm-up too.
    """
    gc.collect()
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    pool = make_pool(
        cell.workload, shapes, cell.cache.warm_batches + cell.cache.batches, session.config.seed
    )
    wanted = cell.cache.warm_batches + cell.cache.batches
    if len(pool.batches) < wanted:
        raise TraceError(
            f"{cell.workload.file} has {len(pool.batches)} batches of {cell.workload.B:,} samples, "
            f"cache.warm_batches + cache.batches asks for {wanted}: lower them, or workload.B"
        )
    trace = trace_of(pool, shapes, cell.cache.warm_batches)
    records, measured = [], set()
    for arm in cell.arms:
        outcome = Outcome(arm)
        samples: dict[str, list[int]] = {}
        extra: dict[str, Any] = {}
        size = WAYS * cache_sets(shapes, arm.cache)
        if (arm.contender, size) in measured:
            continue  # two fractions of a small table are the same number of sets
        measured.add((arm.contender, size))
        session.note(f"{arm.key}|running the trace")
        try:
            if registry.facts_of(arm.contender).keyed:
                ids = [_linear(batch, shapes) for batch in pool.batches]
                samples = run_keys(arm.contender, ids, size, session)
            elif arm.contender in COMPUTED:
                samples, extra = _ideal(arm.contender, trace, size, cell, shapes)
            else:
                samples = _run(build(arm.contender, task_of(cell, arm, session)), pool)
        except Exception as error:  # whatever it is becomes this contender's row
            outcome.fail(error)
        records.append(
            describe(cell, outcome, session, facts(pool))
            | {"samples": samples, **extra}
            | {"cache_rows": size, "batches": cell.cache.batches}
        )
    return records


def trace_of(pool: Pool, shapes: tuple[TableShape, ...], warm: int) -> cache_bounds.RowTrace:
    """Return the rows of all tables under one numbering, batch by batch."""
    return cache_bounds.RowTrace.of([_linear(b, shapes) for b in pool.batches], warm)


def _linear(batch: Batch, shapes: tuple[TableShape, ...]) -> Ids:
    bases = np.cumsum([0, *(s.rows for s in shapes)])
    parts = [batch.feature(f)[0].numpy() + bases[f] for f in range(len(shapes))]
    return np.concatenate(parts)


def _run(contender: Contender, pool: Pool) -> dict[str, list[int]]:
    """Return what each batch of the trace added to the contender's counters."""
    contender.reset_counters()
    before = contender.counters()
    if not before:
        raise Unsupported("it has no cache, so there is nothing to count")
    samples: dict[str, list[int]] = {name: [] for name in before}
    for batch in pool.batches:
        contender.visit(contender.prepare(batch))
        now = contender.counters()
        for name, value in now.items():
            samples[name].append(value - before[name])
        before = now
    return samples


def _ideal(
    name: str, trace: cache_bounds.RowTrace, size: int, cell: Cell, shapes: tuple[TableShape, ...]
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the hits of the counted batches, and what bounds or predicts them."""
    if name in EXACT:
        return cache_bounds.samples(
            trace, cache_bounds.run(trace, size, cache_bounds.Policy[name])
        ), {}
    hits = (
        cache_bounds.offline(trace, size)
        if name == "offline"
        else cache_bounds.static_top(trace, size)
    )
    samples = cache_bounds.samples(trace, hits)
    if name == "offline":
        return samples, {"most_lookup_hits": cache_bounds.most_lookups(trace, size)}
    work = cell.workload
    distributions_of_tables = [probabilities(work, s.rows) for s in shapes]
    every = [p / len(shapes) for p in distributions_of_tables if p is not None]
    if not every:
        return samples, {}
    lookups = len(shapes) * work.B * work.L
    by_lookup, by_row = cache_bounds.expected_top(np.concatenate(every), size, lookups)
    return samples, {"expected_lookup_hit_rate": by_lookup, "expected_row_hit_rate": by_row}


def run_keys(
    contender: str, batches: Sequence[Ids], slots: int, session: Session
) -> dict[str, list[int]]:
    """Count per batch the keys that were present before the batch was inserted.

    A table of the same contender is checked first, with other keys and more slots.
    """
    space = KeySpace(Order.permuted, session.seed)
    checked = _build_for_trace(contender, 4 * CHECKED_KEYS, session)
    keys = space.run(0, CHECKED_KEYS)
    checked.fill(keys, values_of(keys, 1))
    verify_keyed(checked, space, keys)
    table = _build_for_trace(contender, slots, session)
    samples: dict[str, list[int]] = {k: [] for k in ("lookups", "lookup_hits", "rows", "row_hits")}
    for ids in batches:
        rows, lookups = np.unique(ids, return_counts=True)
        slots_of = table.find_slots(_prepare_trace(table, rows)).cpu().numpy()
        present = slots_of != table.absent
        table.find_or_insert_slots(_prepare_trace(table, ids))
        samples["lookups"].append(len(ids))
        samples["lookup_hits"].append(int(lookups[present].sum()))
        samples["rows"].append(len(rows))
        samples["row_hits"].append(int(present.sum()))
    return samples


def _build_for_trace(contender: str, slots: int, session: Session) -> KeyTable:
    return build_keyed(contender, KeyTask(slots, 1, session.device, slots))


def _prepare_trace(table: KeyTable, ids: Ids) -> Any:
    keys = torch.from_numpy(ids.astype(np.int64))
    return table.prepare(keys, torch.zeros(len(ids), 1))
