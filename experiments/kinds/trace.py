"""The kind `trace`: what a trace of lookups is like; no tables, nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.config.schema import Config
from experiments.config.sweep import Cell
from experiments.kinds.base import Kind
from experiments.results.store import Record
from experiments.workloads.trace_analysis import SHARES

if TYPE_CHECKING:
    from experiments.report.data import Run
    from experiments.report.tables import Table

POLICIES = ("lru", "offline", "static_top")
COLUMNS = (
    *("rows", "lookups", "distinct", "batch_distinct_share", "bag_mean", "bag_max"),
    *("bags_empty", "once", "cache", "offline", "lru"),
)


class Trace(Kind):
    """How skewed is a trace, what is its working set, and what could caches serve?"""

    name = "trace"
    case_kind = "trace"
    swept_first = True  # the user's own trace; cases are what it is compared with
    only_arm = "lookups"
    makes_tables = False
    measures = "experiments.measure.trace:trace_cell"
    timed = False
    has_modes = False
    report = "experiments.kinds.trace_report"
    side_by_side = False
    comparable = False
    done = "None: all {count} sets of lookups were read."

    def case_cells(self, config: Config) -> list[Cell]:
        """Return the cases with the run's caches, which is what curves are compared at."""
        cells = super().case_cells(config)
        return [replace(cell, cache=config.cache, kind=self.name) for cell in cells]

    def progress(self, records: Sequence[Record]) -> str:
        """Return how many distinct rows are looked up."""
        if any(r["status"] != "ok" for r in records):
            return super().progress(records)
        found = [r["analysis"]["distinct"] for r in records]
        return f"distinct rows: {', '.join(f'{n:,}' for n in found)}"

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return tables.csv and ideal_hit_rates.csv."""
        return {"tables": tables(records), "ideal_hit_rates": curves(records)}

    def section_table(self, run: Run, section: str) -> Table | None:
        """Return the numbers of every table of the trace."""
        found: Table = self._report().section_table(run, section)
        return found


def looked_at(records: Sequence[Record]) -> list[Record]:
    """Return the records of the kind that have a result."""
    return [r for r in records if r.get("kind") == Trace.name and r["status"] == "ok"]


def tables(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per cell and table."""
    return pd.DataFrame([row for r in looked_at(records) for row in _tables(r)])


def _tables(record: Record) -> Iterator[dict[str, Any]]:
    for own in record["tables"]:
        fit = own["fit"] or {"s": None, "q": None, "misfit": None}
        yield {
            "section": record["section"],
            "cell": record["cell"],
            "table": own["name"],
            **{name: own[name] for name in COLUMNS},
            **{f"rows_of_{share:g}": own["rows_of"][f"{share:g}"] for share in SHARES},
            **fit,
        }


def curves(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per cell, policy and size of one cache for all tables."""
    rows = []
    for record in looked_at(records):
        found = record["analysis"]["hit_rates"]
        for policy in POLICIES:
            for point in found[policy]:
                rows.append(
                    {
                        "section": record["section"],
                        "cell": record["cell"],
                        "policy": policy,
                        "cache_rows": point["cache_rows"],
                        "fraction": point["cache_rows"] / found["distinct"],
                        "lookup_hit_rate": point["lookups"],
                        "row_hit_rate": point["rows"],
                    }
                )
    return pd.DataFrame(rows)
