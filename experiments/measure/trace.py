"""Measure a cell of kind trace: analyse its lookups, without tables, contenders or timing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from experiments.config.schema import Distribution
from experiments.config.sweep import Cell
from experiments.measure.outcome import Outcome, describe, facts
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.workloads import production, trace_analysis
from experiments.workloads.trace_analysis import Lookups, Numbers
from experiments.workloads.trace_files import TraceError
from experiments.workloads.workload import Pool, make_pool, table_rows, table_shapes

TABLE_CACHE_SHARE = 0.1  # cached rows ÷ rows that the trace looks up, for a cache per table
MIN_BATCHES = 4  # two halves for the fit, and batches before and after the warm-up of caches


def trace_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return a record about all tables and about each; `seconds` is not used."""
    started = time.monotonic()
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
    tables = [analyse_table(pool, f, rows[f], warm) for f in range(len(shapes))]
    analysis = analyse_together(pool, len(shapes), cell.cache.fractions, warm)
    names = cell.workload.columns or [f"table {f}" for f in range(len(shapes))]
    for name, table in zip(names, tables, strict=True):
        table["name"] = name
    record = describe(cell, Outcome(arm), session, facts(pool))
    record |= {
        "rows": sum(table["rows"] for table in tables),
        "batches": len(pool.batches),
        "tables": tables,
        "analysis": analysis,
        "samples": analysis.pop("samples"),
        "analysis_s": round(time.monotonic() - started, 2),
    }
    if cell.workload.distribution is Distribution.production:
        record["published_window"] = sum(production.published_lookups(r) for r in rows)
    return [record]


def lookups_of(pool: Pool, feature: int) -> Lookups:
    """Return the lookups of one table."""
    return Lookups([b.feature(feature)[0].numpy() for b in pool.batches])


def analyse_table(pool: Pool, feature: int, rows: int, warm: int) -> Numbers:
    """Analyse one table, with the hit rates of a cache for TABLE_CACHE_SHARE of its rows."""
    lookups = lookups_of(pool, feature)
    lengths = np.concatenate([b.feature(feature)[1].diff().numpy() for b in pool.batches])
    rates = trace_analysis.hit_rates(lookups.trace(warm), [TABLE_CACHE_SHARE])
    (offline,) = rates["offline"]
    lru = next(rate for rate in rates["lru"] if rate["cache_rows"] == offline["cache_rows"])
    return trace_analysis.table_numbers(lookups, lengths, rows) | {
        "cache": TABLE_CACHE_SHARE,
        "offline": offline["lookups"],
        "lru": lru["lookups"],
    }


def _warm_batches(cell: Cell, batches: int) -> int:
    """Return the number of batches that fill caches: the same share of a short trace."""
    share = cell.cache.warm_batches / (cell.cache.warm_batches + cell.cache.batches)
    return min(max(1, round(share * batches)), batches - 1)


def analyse_together(pool: Pool, tables: int, fractions: Sequence[float], warm: int) -> Numbers:
    """Analyse all tables in one numbering, as a cache in front of all of them sees the rows."""
    by_table = [lookups_of(pool, f) for f in range(tables)]
    # Rows are numbered from 0 per table, without gaps; together table f has f, f + F, f + 2F, ...
    batches = zip(*(table.slices() for table in by_table), strict=True)
    lookups = Lookups(
        [np.concatenate([i * tables + f for f, i in enumerate(ids)]) for ids in batches]
    )
    trace = lookups.trace(warm)
    busiest = max(range(tables), key=lambda f: len(by_table[f].ids))
    return {
        "samples": trace_analysis.batch_counts(lookups),
        "distinct": len(lookups.counts),
        "warm_batches": warm,
        "spectrum": trace_analysis.spectrum(lookups),
        "distances": trace_analysis.distance_histogram(lookups),
        "hit_rates": trace_analysis.hit_rates(trace, fractions),
        "busiest": {"table": busiest, "ranked": trace_analysis.shares_by_rank(by_table[busiest])},
    }
