"""Measure a cell of kind trace: analyse its lookups, without tables, contenders or timing.

`workloads.trace_analysis` computes the numbers; its TypedDicts name the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config.schema import Distribution
from experiments.config.sweep import Cell
from experiments.measure.outcome import Outcome, make_record, pool_entries
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.workloads import production, trace_analysis
from experiments.workloads.trace_analysis import MIN_BATCHES, Lookups
from experiments.workloads.trace_files import TraceError
from experiments.workloads.workload import make_pool, table_rows, table_shapes


def trace_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record, in a list: the analysis of all tables together and of each.

    Its entries are those of `make_record` and `pool_entries`; `batches` (number), `tables` (list of
    `TableNumbers`), `analysis` and `samples` (`analyse_together`); and `published_window` for
    production-like ids. `seconds` is not used.

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
            f"{Path(cell.workload.file).name} has {len(pool.batches)} batches of "
            f"{cell.workload.B:,} samples; at least {MIN_BATCHES} are needed: lower workload.B"
        )
    session.note(f"{arm.key}|analysing")
    stated_rows = table_rows(cell.workload)
    rows_by_table = [
        shape.rows if stated else 0 for shape, stated in zip(shapes, stated_rows, strict=True)
    ]
    num_warm_batches = _num_warm_batches(cell, len(pool.batches))
    table_names = cell.workload.columns or [
        f"table {table_index}" for table_index in range(len(shapes))
    ]
    lookups_by_table, tables = [], []
    for table_index in range(len(shapes)):
        features = [batch.feature(table_index) for batch in pool.batches]
        lookups = Lookups([ids.numpy() for ids, _ in features])
        lengths = np.concatenate([offsets.diff().numpy() for _, offsets in features])
        lookups_by_table.append(lookups)
        tables.append(
            trace_analysis.analyse_table(
                lookups,
                lengths,
                name=table_names[table_index],
                num_rows=rows_by_table[table_index],
                num_warm_batches=num_warm_batches,
            )
        )
    analysis = analyse_together(lookups_by_table, cell.cache.fractions, num_warm_batches)
    record = make_record(cell, Outcome(arm), session) | pool_entries(pool)
    record |= {
        "rows": sum(table["rows"] for table in tables),
        "batches": len(pool.batches),
        "tables": tables,
        "analysis": analysis,
        "samples": analysis.pop("samples"),
    }
    if cell.workload.distribution is Distribution.production:
        record["published_window"] = sum(
            production.published_lookups(rows) for rows in rows_by_table
        )
    return [record]


def _num_warm_batches(cell: Cell, num_batches: int) -> int:
    """Return how many of the `num_batches` batches fill the caches, at least 1, but not all.

    If the trace has fewer batches than the cell asks for, the same share of them fills the caches.
    """
    share = cell.cache.warm_batches / (cell.cache.warm_batches + cell.cache.batches)
    return min(max(1, round(share * num_batches)), num_batches - 1)


def analyse_together(
    lookups_by_table: Sequence[Lookups], fractions: Sequence[float], num_warm_batches: int
) -> dict[str, Any]:
    """Analyse the lookups of all tables together, for one cache that all tables share.

    Args:
        lookups_by_table: lookups of each table; all tables must have the same number of batches.
        fractions: cached rows ÷ rows that the trace looks up.
        num_warm_batches: number of first batches that fill the caches. They are not counted.

    Returns:
        A dictionary with `samples` (`batch_counts`), `distinct` (number of distinct rows),
        `warm_batches`, `spectrum`, `distances`, `hit_rates`, and `busiest` about the table with
        most lookups: its index `table`, and `ranked` (`shares_by_rank`).
    """
    # Row r of table f of T tables becomes r * T + f, so that no two rows share a number.
    num_tables = len(lookups_by_table)
    batches = zip(*(table.slices() for table in lookups_by_table), strict=True)
    lookups = Lookups(
        [
            np.concatenate(
                [rows * num_tables + table_index for table_index, rows in enumerate(batch)]
            )
            for batch in batches
        ]
    )
    trace = lookups.trace(num_warm_batches)
    busiest = max(range(num_tables), key=lambda table: len(lookups_by_table[table].row_of_lookup))
    return {
        "samples": trace_analysis.batch_counts(lookups),
        "distinct": len(lookups.counts),
        "warm_batches": num_warm_batches,
        "spectrum": trace_analysis.spectrum(lookups),
        "distances": trace_analysis.distance_histogram(lookups),
        "hit_rates": trace_analysis.hit_rates(trace, fractions),
        "busiest": {
            "table": busiest,
            "ranked": trace_analysis.shares_by_rank(lookups_by_table[busiest]),
        },
    }
