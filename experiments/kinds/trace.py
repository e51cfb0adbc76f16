"""The kind `trace`: skew, working set and possible hit rates of a trace of lookups.

A *record* has the analysis of one trace (`workloads.trace_analysis`), for all tables together and
for each table. Nothing is timed, so one process suffices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict, cast

import pandas as pd

from experiments.config.schema import Config, Mode, require
from experiments.config.sweep import Cell
from experiments.kinds import base
from experiments.results.store import Record
from experiments.workloads.trace_analysis import MIN_BATCHES, SHARES, TableNumbers

POLICIES = ("lru", "offline", "static_top")
COLUMNS = ("rows", "lookups", "distinct", "batch_distinct_share", "bag_mean", "once")
HIT_RATES = ("offline", "lru")


class TraceRecord(TypedDict):
    """The record of one trace: the keys that its tables and report read."""

    status: str
    section: str
    cell: str
    params: dict[str, Any]  # the workload
    features: int  # tables
    tables: list[TableNumbers]
    analysis: dict[str, Any]  # of all tables together, see `measure.trace.analyse_together`
    samples: dict[str, list[int]]  # per batch: `lookups`, distinct `rows`, and `new` ones
    published_window: NotRequired[int]  # lookups like those published, for production-like ids


class Trace(base.Kind):
    """Answer how skewed a trace is, how large its working set, and what caches could serve."""

    name = "trace"
    # The sweep is the user's trace; cases are for comparison.
    cell_kinds = base.CellKinds(cases="", sweep_first=True)
    arms = base.ArmRules(only_arm="lookups")
    measurement = base.Measurement(
        "experiments.measure.trace:trace_cell",
        repetition=base.Repetition.ONCE,
        modes=(Mode.hot,),
        makes_tables=False,
        ignores=("workload.D", base.KEYS, *base.UPDATE_RULE),
    )
    reporting = base.Reporting(
        "experiments.kind_reports.trace",
        comparability=base.Comparability.NOTHING,
        success="None: all {count} sets of lookups were read.",
    )

    def check(self, config: Config) -> None:
        super().check(config)
        num_batches = config.cache.warm_batches + config.cache.batches
        rule = f"cache.warm_batches + cache.batches must be >= {MIN_BATCHES}"
        require(rule, num_batches, holds=num_batches >= MIN_BATCHES)

    def case_cells(self, config: Config) -> list[Cell]:
        """Return the cases with the caches of the run, so that curves can be compared."""
        cells = super().case_cells(config)
        return [replace(cell, cache=config.cache, kind=self.name) for cell in cells]

    def progress(self, records: Sequence[Record]) -> str:
        if any(record["status"] != "ok" for record in records):
            return super().progress(records)
        counts = [record["analysis"]["distinct"] for record in records]
        return f"distinct rows: {', '.join(f'{count:,}' for count in counts)}"

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return tables.csv and ideal_hit_rates.csv."""
        return {"tables": tables(records), "ideal_hit_rates": ideal_hit_rates(records)}


def good_records(records: Sequence[Record]) -> list[TraceRecord]:
    """Return the records of traces that were analysed without an error."""
    return [
        cast(TraceRecord, record)
        for record in records
        if record.get("kind") == Trace.name and record["status"] == "ok"
    ]


def tables(records: Sequence[Record]) -> pd.DataFrame:
    """Return tables.csv: a row per cell and table.

    COLUMNS are numbers of `TableNumbers`. HIT_RATES are hit rates per lookup of a cache that has a
    tenth of the distinct rows. `rows_of_X` is the smallest number of rows with a share X of the
    lookups. `s`, `q` and `misfit` describe the fitted Zipf distribution; None for too few lookups.
    """
    return pd.DataFrame([row for record in good_records(records) for row in _table_rows(record)])


def _table_rows(record: TraceRecord) -> Iterator[dict[str, Any]]:
    """Yield the rows of tables.csv for the tables of a record."""
    for table in record["tables"]:
        numbers: Mapping[str, Any] = table
        zipf_fit: Mapping[str, float | None] = table["fit"] or dict.fromkeys(("s", "q", "misfit"))
        yield {
            "section": record["section"],
            "cell": record["cell"],
            "table": table["name"],
            **{name: numbers[name] for name in (*COLUMNS, *HIT_RATES)},
            **{f"rows_of_{share:g}": table["rows_of"][f"{share:g}"] for share in SHARES},
            **zipf_fit,
        }


def ideal_hit_rates(records: Sequence[Record]) -> pd.DataFrame:
    """Return ideal_hit_rates.csv: a row per cell, policy (POLICIES) and size of one cache for all.

    `fraction` is `cache_rows` ÷ distinct rows of the trace; the hit rates are shares of 1.
    """
    return pd.DataFrame(
        {
            "section": record["section"],
            "cell": record["cell"],
            "policy": policy,
            "cache_rows": point["cache_rows"],
            "fraction": point["cache_rows"] / record["analysis"]["hit_rates"]["distinct"],
            "lookup_hit_rate": point["lookups"],
            "row_hit_rate": point["rows"],
        }
        for record in good_records(records)
        for policy in POLICIES
        for point in record["analysis"]["hit_rates"][policy]
    )
