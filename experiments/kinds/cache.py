"""The kind `cache`: hit rates of traces through real and ideal caches of several sizes.

A *record* has the hits of the batches of a trace, in order, in one cache (the arm) of one size. Hit
rates are those of the counted batches, the last `record["batches"]` ones; earlier ones fill it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.config.schema import Config, Mode, UsageError
from experiments.config.sweep import EXACT_CACHES, IDEAL_CACHES
from experiments.contenders import registry
from experiments.kinds import base
from experiments.results.store import Record


class Cache(base.Kind):
    """Answer which share of the lookups a cache of a given size serves."""

    name = "cache"
    arms = base.ArmRules(
        computed_arms=tuple(IDEAL_CACHES),
        optional_arms=tuple(EXACT_CACHES),
        contenders=base.ContenderType.BOTH,
    )
    measurement = base.Measurement(
        "experiments.measure.cache:cache_cell",
        repetition=base.Repetition.ONCE,
        modes=(Mode.hot,),
        ignores=(base.KEYS, *base.UPDATE_RULE),
    )
    reporting = base.Reporting(
        "experiments.kind_reports.cache",
        success="None: all {count} measurements ran, and what was timed agreed with the reference.",
    )

    def check(self, config: Config) -> None:
        super().check(config)
        entries = registry.entries().items()
        permitted_names = (
            *(name for name, entry in entries if entry.variants == "cache"),
            *EXACT_CACHES,
        )
        if not set(config.contenders) <= set(permitted_names):
            raise UsageError(
                f"contenders: traces (kind=cache) are for {', '.join(permitted_names)}"
            )

    def progress(self, records: Sequence[Record]) -> str:
        """Return the hit rates at the middle size."""
        cache_sizes = sorted({record["cache_rows"] for record in records if "cache_rows" in record})
        middle_size = cache_sizes[(len(cache_sizes) - 1) // 2] if cache_sizes else None
        shown_records = [
            record for record in records if record.get("cache_rows", middle_size) == middle_size
        ]
        return base.progress_line(
            "% of lookups served",
            shown_records,
            lambda record: f"{100 * counted_hit_rates(record).lookups:.0f}",
        )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return hit_rates.csv: a row per trace, contender and size."""
        return {"hit_rates": frame(records)}


@dataclass(frozen=True)
class HitRates:
    """Hit rates of the counted batches, per lookup and per distinct row."""

    lookups: float
    rows: float


def counted_hit_rates(record: Record) -> HitRates:
    """Return the hit rates of a record over its counted batches."""
    samples = record["samples"]
    num_warm_batches = len(samples["rows"]) - record["batches"]
    totals = {name: sum(values[num_warm_batches:]) for name, values in samples.items()}
    return HitRates(_hit_rate(totals, "lookup"), _hit_rate(totals, "row"))


def _hit_rate(totals: dict[str, int], unit: str) -> float:
    return totals[f"{unit}_hits"] / totals[f"{unit}s"] if totals[f"{unit}s"] else math.nan


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return hit_rates.csv: a row per trace, contender and size of the cache.

    Rates are shares of 1 over the counted batches: `lookup_hit_rate`, `row_hit_rate` (of distinct
    rows per batch), `most_lookup_hit_rate` (a bound for every cache; only in rows of the offline
    optimum), `expected_*` (expected hit rates of the most likely rows; only in rows of static_top).
    `fraction` is `cache_rows` ÷ all rows. `cache` is the fraction that the experiment asked for,
    before rounding to sets. A number that is unknown is nan.
    """
    cache_records = [record for record in records if record.get("kind") == Cache.name]
    return pd.DataFrame([_row(record) for record in cache_records])


def _row(record: Record) -> dict[str, Any]:
    """Return a row of the frame from a record; nan for what the record does not have."""
    is_ok = record["status"] == "ok"
    rates = counted_hit_rates(record) if is_ok else HitRates(math.nan, math.nan)
    lookups = sum(record["samples"]["lookups"][-record["batches"] :]) if is_ok else 0
    max_hits = record.get("most_lookup_hits", math.nan)
    cache_rows = record.get("cache_rows", math.nan)  # absent from the record of a process that died
    names = ("section", "cell", "contender", "arm", "label", "status", "reason", "cache")
    return {
        **{name: record[name] for name in names},
        **record["params"],
        "rows": record["rows"],
        "cache_rows": cache_rows,
        "fraction": cache_rows / record["rows"],
        "batches": record.get("batches", 0),
        "lookup_hit_rate": rates.lookups,
        "row_hit_rate": rates.rows,
        "most_lookup_hit_rate": max_hits / lookups if lookups else math.nan,
        "expected_lookup_hit_rate": record.get("expected_lookup_hit_rate", math.nan),
        "expected_row_hit_rate": record.get("expected_row_hit_rate", math.nan),
        "rows_scale": record["rows_scale"],
    }
