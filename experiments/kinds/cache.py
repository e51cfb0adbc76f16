"""The kind `cache`: traces of lookups through caches of every size, and through ideal caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from experiments.config.schema import Config, UsageError
from experiments.config.sweep import EXACT, IDEALS
from experiments.contenders import registry
from experiments.kinds.base import Kind
from experiments.results import metrics
from experiments.results.store import Record

if TYPE_CHECKING:
    from experiments.report.data import Run
    from experiments.report.tables import Table

FORMULA = (
    "A cache is probed with all distinct rows of a batch before any row moves, so that a row is a "
    "hit or a miss together with all its lookups in that batch. Hit rate per lookup: lookups of "
    "rows that were there ÷ lookups. Hit rate per distinct row: rows that were there ÷ distinct "
    "rows, batch by batch; this is the one that says how many rows must be moved. Both are over "
    "the counted batches, after those that fill the cache."
)
NOTES_ON_IDEALS = (
    "'Offline optimum' is Belady's MIN on batches: of the rows it holds and those of the batch it "
    "keeps the ones looked up again soonest. No cache of that size serves more distinct rows of "
    "this trace. Among rows due in the same batch it keeps those with more lookups.",
    "'Static top-k' takes in the k most frequent rows of the trace and no others. Both ideals know "
    "the whole trace; as any cache, they can hold a row only after its first lookup.",
    "The dotted line is the top-k of the distribution: the expected hit rate if the k most likely "
    "rows were always there, as in an endless trace. It can lie above the others where a trace is "
    "too short for every popular row to have been looked up once.",
)


class Cache(Kind):
    """How much of the lookups does a cache of a given size serve?"""

    name = "cache"
    extra_arms = tuple(IDEALS)
    choices = tuple(EXACT)
    keyed: ClassVar[bool | None] = None  # a trace goes through tables of both sorts
    measures = "experiments.measure.cache:cache_cell"
    timed = False
    has_modes = False
    report = "experiments.kinds.cache_report"
    notes = (FORMULA, *NOTES_ON_IDEALS, metrics.FORMULA)
    done = "None: all {count} measurements ran, and what was timed agreed with the reference."

    def check(self, config: Config) -> None:
        """Check that all contenders have a cache."""
        super().check(config)
        cached = (*registry.cached(), *EXACT)
        if not set(config.contenders) <= set(cached):
            raise UsageError(f"contenders: traces (kind=cache) are for {', '.join(cached)}")

    def progress(self, records: Sequence[Record]) -> str:
        """Return the hit rates at the middle size."""
        sizes = sorted({r["cache_rows"] for r in records if "cache_rows" in r})
        middle = sizes[(len(sizes) - 1) // 2] if sizes else None
        return "% of lookups served: " + " · ".join(
            f"{r['label']}: {r['status']}"
            if r["status"] != "ok"
            else f"{r['label']} {100 * counted(r).lookups:.0f}"
            for r in records
            if r.get("cache_rows", middle) == middle
        )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return hit_rates.csv: a row per trace, contender and size."""
        return {"hit_rates": frame(records)}

    def section_table(self, run: Run, section: str) -> Table | None:
        """Return hit rates where there are any, else times."""
        if not len(run.traces) or not (run.traces["section"] == section).any():
            return super().section_table(run, section)
        found: Table = self._report().section_table(run, section)
        return found

    def readme_lines(self, run: Run, command: str, link: str) -> list[str] | None:
        """Return hit rates and times of the headline."""
        if run.table.empty:
            return None
        return [f"{command}.", *self._report().readme_lines(run), "", link]


@dataclass(frozen=True)
class HitRates:
    """Hit rates of the counted batches."""

    lookups: float
    rows: float


def counted(record: Record) -> HitRates:
    """Sum over the counted batches; return the hit rates."""
    samples = record["samples"]
    skip = len(samples["rows"]) - record["batches"]
    total = {name: sum(values[skip:]) for name, values in samples.items()}
    return HitRates(_share(total, "lookup"), _share(total, "row"))


def _share(total: dict[str, int], of: str) -> float:
    return total[f"{of}_hits"] / total[f"{of}s"] if total[f"{of}s"] else math.nan


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per trace, contender and size; failed ones without numbers."""
    traced = [r for r in records if r.get("kind") == Cache.name]
    return pd.DataFrame([_row(r) for r in traced])


def _row(record: Record) -> dict[str, Any]:
    ok = record["status"] == "ok"
    found = counted(record) if ok else HitRates(math.nan, math.nan)
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
        "expected_lookup_hit_rate": record.get("expected_lookup_hit_rate", math.nan),
        "expected_row_hit_rate": record.get("expected_row_hit_rate", math.nan),
        "rows_scale": record["rows_scale"],
    }
