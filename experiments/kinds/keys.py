"""The kinds `keys` (operations on hash tables) and `growth` (tables that fill).

A *record* has the samples of one hash table in one process, by *phase* (an operation). Their frames
combine the records of all processes: `frame` to a row per operation, `growth_frame` to a row per
table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import GROWTH_PHASE, OPERATIONS, Mode
from experiments.config.sweep import Arm
from experiments.kinds import base
from experiments.results import metrics
from experiments.results.store import Record
from experiments.timing import statistics

# The base of ratios: a time is divided by the time of this operation of the subject, at equal load.
BASE_OPERATION = "find_slots"


class Keys(base.Kind):
    """Answer how many keys per second each operation of a hash table processes."""

    name = base.KEYS
    measurement = base.Measurement(
        "experiments.measure.keys:keys_cell", ignores=("keys.first", *base.UPDATE_RULE)
    )
    reporting = base.Reporting(
        "experiments.kind_reports.keys", comparability=base.Comparability.PROCESSES
    )

    def progress(self, records: Sequence[Record]) -> str:
        return " · ".join(_rate_text(record) for record in records)

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return operations.csv: a row per table, mode and operation."""
        return {"operations": frame(records, str(settings.subject))}


class Growth(Keys):
    """Answer how long a growing hash table pauses, and how much memory it needs."""

    name = "growth"
    cell_kinds = base.CellKinds(cases="")
    arms = base.ArmRules(contenders=base.ContenderType.KEYED)
    measurement = base.Measurement(
        "experiments.measure.growth:growth_cell",
        modes=(Mode.hot,),
        ignores=(
            *("workload.s", "workload.q", "workload.distribution"),
            *("keys.loads", "keys.hits", "keys.operations"),
            *base.UPDATE_RULE,
            *base.AMOUNT,  # only a filled table ends it
        ),
    )
    reporting = base.Reporting(  # nothing is warmed up, and there are no rounds
        "experiments.kind_reports.growth", comparability=base.Comparability.MACHINES
    )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return growth.csv: a row per table."""
        return {"growth": growth_frame(records)}


def _rate_text(record: Record) -> str:
    """Return million keys per second of a table's first operation."""
    if record["status"] != "ok":
        return f"{record['label']}: {record['status']}"
    name = next(iter(record["samples"]))
    rate = record["lookups"] / base.median_seconds(record, name) / 1e6
    return f"{record['label']} {name} {rate:.3g} M keys/s"


def frame(records: Sequence[Record], subject: str) -> pd.DataFrame:
    """Return operations.csv: a row per hash table, load, mode and operation, over all processes.

    Columns: `load` (keys ÷ slots), `slots`, `keys_there` (keys stored), `lookups` (keys per call),
    `hits` (share of a call's keys that are present), `keys_per_s`, `bytes` of the table, and those
    of `metrics.timed_columns`. `ratio` is the time ÷ that of BASE_OPERATION of the contender
    `subject` at the same load.
    """
    return metrics.phase_rows(
        records,
        Keys.name,
        lambda record: Arm(subject, load=record["load"]).key,
        _row,
        phases_of=lambda group: metrics.sampled_phases(group, ""),
        pooled_base=with_base_samples,
    )


def _row(
    records: Sequence[Record],
    phase: str,
    base_records: Sequence[Record],
    pools: metrics.PooledSpreads,
) -> dict[str, Any]:
    """Return a row of `frame`; arguments as for `row_of` of `metrics.phase_rows`."""
    ok_records = metrics.usable_records(records)
    record = (ok_records or records)[0]
    timed = metrics.timed_columns(
        ok_records, with_base_samples(metrics.usable_records(base_records), phase), phase, pools
    )
    names = ("section", "cell", "contender", "arm", "label", "load", "rows_scale", "lookups")
    return {
        **{name: record[name] for name in names},
        "mode": metrics.mode_of(record),
        "phase": phase,
        "operation": OPERATIONS.get(phase, phase),
        **metrics.outcome_of(records),
        **record["params"],
        "slots": record.get("slots", math.nan),
        "keys_there": record.get("keys_there", math.nan),
        "hits": record.get("hits", math.nan),
        **timed,
        "keys_per_s": record["lookups"] / timed["median_s"],
        "bytes": record.get("weights_bytes"),
    }


def with_base_samples(records: Sequence[Record], phase: str) -> list[Record]:
    """Return copies of records, with the samples of BASE_OPERATION as those of `phase`.

    Records without samples of BASE_OPERATION are skipped.
    """
    return [
        record | {"samples": {phase: record["samples"].get(BASE_OPERATION, [])}}
        for record in records
        if record["samples"].get(BASE_OPERATION)
    ]


def growth_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return growth.csv: a row per table that was to grow, over all processes.

    `section`, `cell`, `contender`, `arm`, `label`, and the axes of the workload identify the table.
    `status` and `reason` are the outcome, `processes` the number of good records. Of the first
    process: `lookups` (new keys per call), `calls`, and `keys_there` (keys of all calls).
    Seconds: `median_s` and `p99_s` of all calls; `longest_s` and `total_s`, medians over processes
    of the longest call and of the sum of all. Bytes: `peak_bytes` while it grows, `kept_bytes` at
    the end, and their ratio `peak_over_kept`; nan where the system does not measure memory.
    """
    groups = metrics.group_records(
        records, Growth.name, lambda record: (record["cell"], record["arm"])
    )
    return pd.DataFrame([_growth_row(group) for group in groups.values()])


def _growth_row(records: Sequence[Record]) -> dict[str, Any]:
    """Return a row of `growth_frame` from the records of a table, one per process."""
    ok_records = metrics.usable_records(records)
    record = (ok_records or records)[0]
    seconds_by_process = [metrics.seconds(record, GROWTH_PHASE) for record in ok_records]
    call_seconds = [call_s for seconds in seconds_by_process for call_s in seconds]
    call_time, call_tails = statistics.summarise(call_seconds), statistics.tail_of(call_seconds)
    longest_calls = statistics.summarise(
        [max(seconds) for seconds in seconds_by_process if seconds]
    )
    total_times = statistics.summarise([sum(seconds) for seconds in seconds_by_process if seconds])
    peak_bytes, final_bytes = (_median(ok_records, name) for name in ("peak_bytes", "kept_bytes"))
    has_memory = bool(final_bytes) and not math.isnan(peak_bytes)
    names = ("section", "cell", "contender", "arm", "label", "lookups")
    return {
        **{name: record[name] for name in names},
        **record["params"],
        **metrics.outcome_of(records),
        "keys_there": record.get("keys_there", math.nan),
        "calls": len(seconds_by_process[0]) if seconds_by_process else 0,
        "processes": len(ok_records),
        "median_s": call_time.median,
        "p99_s": call_tails.p99,
        "longest_s": longest_calls.median,
        "total_s": total_times.median,
        "peak_bytes": peak_bytes,
        "kept_bytes": final_bytes,
        "peak_over_kept": peak_bytes / final_bytes if has_memory else math.nan,
    }


def _median(records: Sequence[Record], name: str) -> float:
    """Return the median of an entry over the records that have it; nan if none has it."""
    values = [float(record[name]) for record in records if record.get(name) is not None]
    return statistics.summarise(values).median
