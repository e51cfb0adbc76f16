"""Measure a cell of kind trace: analyse its lookups, without tables, contenders or timing.

`workloads.trace_analysis` computes the numbers; its TypedDicts name the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.config.schema import Distribution
from experiments.config.sweep import Cell
from experiments.measure.outcome import Outcome, describe, facts
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.workloads import production, trace_analysis
from experiments.workloads.trace_analysis import Lookups
from experiments.workloads.trace_files import TraceError
from experiments.workloads.workload import make_pool, table_rows, table_shapes

MIN_BATCHES = 4  # two halves for the fit, and batches before and after the warm-up of caches


def trace_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record, about all tables and about each; `seconds` is not used.

    Raises:
        TraceError: the trace has fewer than MIN_BATCHES batches, or cannot be read.
    """
    arm = cell.arms[0]
    session.note(f"{arm.key}|reading")
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    num_batches = cell.cache.warm_batches + cell.cache.batches
    pool = make_pool(cell.workload, shapes, num_batches, session.seed)
    if len(pool.batches) < MIN_BATCHES:
        raise TraceError(
            f"{cell.workload.file} has {len(pool.batches)} batches of {cell.workload.B:,} samples; "
            f"at least {MIN_BATCHES} are needed: lower workload.B"
        )
    session.note(f"{arm.key}|analysing")
    stated_rows = table_rows(cell.workload)
    rows = [s.rows if r else 0 for s, r in zip(shapes, stated_rows, strict=True)]
    warm = _warm_batches(cell, len(pool.batches))
    names = cell.workload.columns or [f"table {f}" for f in range(len(shapes))]
    by_table, tables = [], []
    for f in range(len(shapes)):
        features = [batch.feature(f) for batch in pool.batches]
        lookups = Lookups([ids.numpy() for ids, _ in features])
        lengths = np.concatenate([offsets.diff().numpy() for _, offsets in features])
        by_table.append(lookups)
        tables.append(
            trace_analysis.analyse_table(lookups, lengths, name=names[f], rows=rows[f], warm=warm)
        )
    analysis = analyse_together(by_table, cell.cache.fractions, warm)
    record = describe(cell, Outcome(arm), session) | facts(pool)
    record |= {
        "rows": sum(table["rows"] for table in tables),
        "batches": len(pool.batches),
        "tables": tables,
        "analysis": analysis,
        "samples": analysis.pop("samples"),
    }
    if cell.workload.distribution is Distribution.production:
        record["published_window"] = sum(production.published_lookups(r) for r in rows)
    return [record]


def _warm_batches(cell: Cell, batches: int) -> int:
    """Return the number of batches that fill caches: the same share of a short trace."""
    share = cell.cache.warm_batches / (cell.cache.warm_batches + cell.cache.batches)
    return min(max(1, round(share * batches)), batches - 1)


def analyse_together(
    by_table: Sequence[Lookups], fractions: Sequence[float], warm: int
) -> dict[str, Any]:
    """Analyse all tables in one numbering, as a cache in front of all of them sees the rows.

    Args:
        by_table: lookups of each table; all tables must have the same number of batches.
        fractions: cached rows ÷ rows that the trace looks up.
        warm: number of first batches, which fill the caches and are not counted.

    Returns:
        `samples` (`batch_counts`), `distinct` (rows looked up), `warm_batches`, `spectrum`,
        `distances`, `hit_rates`; of the table with most lookups `busiest`: its position `table` and
        the pairs `ranked` (`shares_by_rank`).
    """
    # Rows are numbered from 0 per table, without gaps; together table f has f, f + T, f + 2T, ...
    tables = len(by_table)
    batches = zip(*(table.slices() for table in by_table), strict=True)
    lookups = Lookups(
        [np.concatenate([rows * tables + f for f, rows in enumerate(batch)]) for batch in batches]
    )
    trace = lookups.trace(warm)
    busiest = max(range(tables), key=lambda f: len(by_table[f].rows))
    return {
        "samples": trace_analysis.batch_counts(lookups),
        "distinct": len(lookups.counts),
        "warm_batches": warm,
        "spectrum": trace_analysis.spectrum(lookups),
        "distances": trace_analysis.distance_histogram(lookups),
        "hit_rates": trace_analysis.hit_rates(trace, fractions),
        "busiest": {"table": busiest, "ranked": trace_analysis.shares_by_rank(by_table[busiest])},
    }
