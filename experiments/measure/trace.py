"""Measure a cell of kind trace: analyse lookups; no tables, no contenders, nothing is timed."""

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
from experiments.workloads.distributions import Ids
from experiments.workloads.trace_analysis import Lookups, Numbers
from experiments.workloads.trace_files import TraceError
from experiments.workloads.workload import Pool, make_pool, table_rows, table_shapes

TABLE_CACHE_SHARE = 0.1  # of the rows that the trace looks up in a table
MIN_BATCHES = 4  # two halves for the fit; some to fill caches and some to count


def trace_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record: all tables together, and each of them; `seconds` is not used."""
    started = time.monotonic()
    arm = cell.arms[0]
    session.note(f"{arm.key}|reading")
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    wanted = cell.cache.warm_batches + cell.cache.batches
    pool = make_pool(cell.workload, shapes, wanted, session.seed)
    if len(pool.batches) < MIN_BATCHES:
        raise TraceError(
            f"{cell.workload.file} has {len(pool.batches)} batches of {cell.workload.B:,} samples; "
            f"at least {MIN_BATCHES} are needed: lower workload.B"
        )
    session.note(f"{arm.key}|analysing")
    known = table_rows(cell.workload)
    rows = [s.rows if r else 0 for s, r in zip(shapes, known, strict=True)]
    warm = _warm(cell, len(pool.batches))
    tables = [per_table(pool, f, rows[f], warm) for f in range(len(shapes))]
    analysis = together(pool, len(shapes), cell.cache.fractions, warm)
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
    """Return the ids of one table."""
    return Lookups([b.feature(feature)[0].numpy() for b in pool.batches])


def per_table(pool: Pool, feature: int, rows: int, warm: int) -> Numbers:
    """Analyse one table; include what a cache of a tenth of its rows could serve."""
    lookups = lookups_of(pool, feature)
    lengths = np.concatenate([b.feature(feature)[1].diff().numpy() for b in pool.batches])
    served = trace_analysis.hit_rates(lookups.trace(warm), [TABLE_CACHE_SHARE])
    (best,) = served["offline"]
    recent = next(r for r in served["lru"] if r["cache_rows"] == best["cache_rows"])
    return trace_analysis.table(lookups, lengths, rows) | {
        "cache": TABLE_CACHE_SHARE,
        "offline": best["lookups"],
        "lru": recent["lookups"],
    }


def _warm(cell: Cell, batches: int) -> int:
    """Return how many batches fill caches; of a file that ends early, the same share."""
    share = cell.cache.warm_batches / (cell.cache.warm_batches + cell.cache.batches)
    return min(max(1, round(share * batches)), batches - 1)


def together(pool: Pool, tables: int, fractions: Sequence[float], warm: int) -> Numbers:
    """Analyse all tables under one numbering, as one cache in front of them sees them."""
    lookups = Lookups([_linear(batch, tables) for batch in _numbered(pool, tables)])
    trace = lookups.trace(warm)
    sizes = {f: lookups_of(pool, f) for f in range(tables)}
    busiest = max(sizes, key=lambda f: len(sizes[f].ids))
    return {
        "samples": trace_analysis.samples(lookups),
        "distinct": len(lookups.counts),
        "warm_batches": warm,
        "spectrum": trace_analysis.spectrum(lookups),
        "distances": trace_analysis.distances(lookups),
        "hit_rates": trace_analysis.hit_rates(trace, fractions),
        "busiest": {"table": busiest, "ranked": trace_analysis.ranked(sizes[busiest])},
    }


def _numbered(pool: Pool, tables: int) -> list[list[Ids]]:
    """Return [batches][tables] ids, each table's numbered from 0 without gaps."""
    slices = [lookups_of(pool, f).slices() for f in range(tables)]
    return [list(parts) for parts in zip(*slices, strict=True)]


def _linear(parts: list[Ids], tables: int) -> Ids:
    """Return the rows of all tables in one numbering: table f has f, f + F, f + 2F, ..."""
    return np.concatenate([ids * tables + f for f, ids in enumerate(parts)])
