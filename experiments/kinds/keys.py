"""The kinds `keys` and `growth`: operations on hash tables timed together, and tables that fill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import OPERATIONS, Mode
from experiments.kinds.base import (
    KEYS,
    ArmRules,
    CellKinds,
    Kind,
    Measurement,
    Reporting,
    Sort,
    median_of,
)
from experiments.results import metrics
from experiments.results.store import Record
from experiments.timing import statistics

YARDSTICK = "find_slots"  # of the subject at the same load: what ratios are to
PHASE = "insert"  # what a table that grows is timed at


class Keys(Kind):
    """How many keys per second does each operation of a hash table process?"""

    name = KEYS
    measurement = Measurement("experiments.measure.keys:keys_cell")
    reporting = Reporting("experiments.kind_reports.keys")

    def progress(self, records: Sequence[Record]) -> str:
        return " · ".join(_rate_of(record) for record in records)

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return operations.csv: a row per table, mode and operation."""
        return {"operations": frame(records, str(settings.subject))}


class Growth(Keys):
    """How long does a growing hash table pause, and how much memory does it take?"""

    name = "growth"
    cell_kinds = CellKinds(cases="growth")
    arms = ArmRules(contenders=Sort.KEYED)
    measurement = Measurement("experiments.measure.growth:growth_cell", modes=(Mode.hot,))
    reporting = Reporting("experiments.kind_reports.growth")

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return growth.csv: a row per table."""
        return {"growth": growth(records)}


def _rate_of(record: Record) -> str:
    """Return million keys per second of a table's first operation."""
    if record["status"] != "ok":
        return f"{record['label']}: {record['status']}"
    name = next(iter(record["samples"]))
    rate = record["lookups"] / median_of(record, name) / 1e6
    return f"{record['label']} {name} {rate:.3g} M keys/s"


def frame(records: Sequence[Record], subject: str) -> pd.DataFrame:
    """Return a row per arm, mode and operation of a cell, all its processes together."""
    return metrics.phase_rows(
        records,
        Keys.name,
        lambda record: f"{subject}@{record['load']:g}",
        _row,
        phases_of=lambda group: metrics.sampled_phases(group, ""),
        pair=as_yardstick,
    )


def _row(
    group: Sequence[Record], phase: str, base: Sequence[Record], pools: metrics.Pools
) -> dict[str, Any]:
    taken = metrics.good(group)
    record = taken[0] if taken else group[0]
    time = metrics.summarise_processes([metrics.seconds(r, phase) for r in taken], pools.times)
    effect = metrics.ratio(taken, as_yardstick(metrics.good(base), phase), phase, pools.ratios)
    names = ("section", "cell", "contender", "arm", "label", "load", "rows_scale", "lookups")
    return {
        **{name: record[name] for name in names},
        "mode": metrics.mode_of(record),
        "phase": phase,
        "operation": OPERATIONS.get(phase, phase),
        "status": metrics.status_of(group),
        "reason": record["reason"],
        **record["params"],
        "slots": record.get("slots", math.nan),
        "keys_there": record.get("keys_there", math.nan),
        "hits": record.get("hits", math.nan),
        **time.columns(),
        "samples": time.n,
        "processes": len(taken),
        "keys_per_s": record["lookups"] / time.median,
        **effect.columns(),
        "bytes": record.get("weights_bytes"),
    }


def as_yardstick(base: Sequence[Record], phase: str) -> list[Record]:
    """Return the records with the yardstick's samples in the place of a phase's."""
    return [
        r | {"samples": {phase: r["samples"].get(YARDSTICK, [])}}
        for r in base
        if r["samples"].get(YARDSTICK)
    ]


def growth(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per table that grew, all its processes together."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.get("kind") == Growth.name:
            groups.setdefault((record["cell"], record["arm"]), []).append(record)
    return pd.DataFrame([_grown(group) for group in groups.values()])


def _grown(group: Sequence[Record]) -> dict[str, Any]:
    taken = metrics.good(group)
    record = taken[0] if taken else group[0]
    each = [metrics.seconds(r, PHASE) for r in taken]
    time = statistics.summarise([s for seconds in each for s in seconds])
    ends = statistics.tail([s for seconds in each for s in seconds])
    # The longest call of each process; of several processes the middle one.
    longest = statistics.summarise([max(seconds) for seconds in each if seconds])
    total = statistics.summarise([sum(seconds) for seconds in each if seconds])
    peak, final = (_middle(taken, name) for name in ("peak_bytes", "kept_bytes"))
    names = ("section", "cell", "contender", "arm", "label", "lookups")
    return {
        **{name: record[name] for name in names},
        **record["params"],
        "status": metrics.status_of(group),
        "reason": record["reason"],
        "keys_there": record.get("keys_there", math.nan),
        "calls": len(each[0]) if each else 0,
        "processes": len(taken),
        "median_s": time.median,
        "p99_s": ends.p99,
        "longest_s": longest.median,
        "total_s": total.median,
        "peak_bytes": peak,
        "kept_bytes": final,
        "peak_over_kept": peak / final if final and not math.isnan(peak) else math.nan,
    }


def _middle(taken: Sequence[Record], name: str) -> float:
    values = [float(r[name]) for r in taken if r.get(name) is not None]
    return statistics.summarise(values).median
