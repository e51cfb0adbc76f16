"""Looked-at traces as tables: a row per table, and a row per size of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import Kind
from experiments.results.store import Record
from experiments.workloads.trace_analysis import SHARES

POLICIES = ("lru", "offline", "static_top")
COLUMNS = (
    *("rows", "lookups", "distinct", "batch_distinct_share", "bag_mean", "bag_max"),
    *("bags_empty", "once", "cache", "offline", "lru"),
)


def looked_at(records: Sequence[Record]) -> list[Record]:
    """Those of the kind that have a result."""
    return [r for r in records if r.get("kind") == Kind.trace.value and r["status"] == "ok"]


def tables(records: Sequence[Record]) -> pd.DataFrame:
    """A row per cell and table."""
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
    """A row per cell, policy and size of one cache for all tables."""
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
