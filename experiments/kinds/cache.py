"""Traces through caches as numbers: hit rates of a record, and a table of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.config.schema import Kind
from experiments.results.store import Record

FORMULA = (
    "A cache is probed with all distinct rows of a batch before any row moves, so that a row is a "
    "hit or a miss together with all its lookups in that batch. Hit rate per lookup: lookups of "
    "rows that were there ÷ lookups. Hit rate per distinct row: rows that were there ÷ distinct "
    "rows, batch by batch; this is the one that says how many rows must be moved. Both are over "
    "the counted batches, after those that fill the cache."
)
IDEALS = (
    "'Offline optimum' is Belady's MIN on batches: of the rows it holds and those of the batch it "
    "keeps the ones looked up again soonest. No cache of that size serves more distinct rows of "
    "this trace. Among rows due in the same batch it keeps those with more lookups.",
    "'Static top-k' takes in the k most frequent rows of the trace and no others. Both ideals know "
    "the whole trace; as any cache, they can hold a row only after its first lookup.",
    "The dotted line is the law's own top-k: the expected hit rate if the k most likely rows were "
    "always there, as in an endless trace. It can lie above the others where a trace is too short "
    "for every popular row to have been looked up once.",
)


@dataclass(frozen=True)
class Rates:
    """Hit rates of the counted batches."""

    lookups: float
    rows: float


def counted(record: Record) -> Rates:
    """Sums over the counted batches; the ideals' samples begin with these."""
    samples = record["samples"]
    skip = len(samples["rows"]) - record["batches"]
    total = {name: sum(values[skip:]) for name, values in samples.items()}
    return Rates(_share(total, "lookup"), _share(total, "row"))


def _share(total: dict[str, int], of: str) -> float:
    return total[f"{of}_hits"] / total[f"{of}s"] if total[f"{of}s"] else math.nan


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row per trace, contender and size; failed ones without numbers."""
    traced = [r for r in records if r.get("kind") == Kind.cache.value]
    return pd.DataFrame([_row(r) for r in traced])


def _row(record: Record) -> dict[str, Any]:
    ok = record["status"] == "ok"
    found = counted(record) if ok else Rates(math.nan, math.nan)
    lookups = sum(record["samples"]["lookups"][-record["batches"] :]) if ok else 0
    most = record.get("most_lookup_hits", math.nan)
    size = record.get("cache_rows", math.nan)  # a process that died did not get so far
    names = ("section", "cell", "contender", "arm", "label", "status", "reason", "cache")
    return {
        **{k: record[k] for k in names},
        **record["params"],
        "rows": record["rows"],
        "cache_rows": size,
        "fraction": size / record["rows"],
        "batches": record.get("batches", 0),
        "lookup_hit_rate": found.lookups,
        "row_hit_rate": found.rows,
        "most_lookup_hit_rate": most / lookups if lookups else math.nan,
        "law_lookup_hit_rate": record.get("law_lookup_hit_rate", math.nan),
        "law_row_hit_rate": record.get("law_row_hit_rate", math.nan),
        "rows_scale": record["rows_scale"],
    }
