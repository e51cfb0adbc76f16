"""The kind `micro`: single calls of operations, timed by pytest-benchmark."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config.schema import Config, Mode, UsageError
from experiments.kinds import base
from experiments.results import metrics
from experiments.results.store import Record, RunStore

AXES = ("T", "E", "D", "B", "L", "rank", "optimizer", "slots")
FAILURE_LINE = re.compile(r"^(FAILED|ERROR) (\S+::.+?)(?: - (.*))?$")


class Micro(base.Kind):
    """Answer how long a call of each operation takes."""

    name = "micro"
    cell_kinds = base.CellKinds(sweep=base.TIME)
    runner = "experiments.run.micro:run"
    measurement = base.Measurement(  # the benchmarks have their own sizes
        ignores=(
            *("workload", "contenders", "tt", "cache", base.KEYS, "rerun"),
            *("timing.pool", "timing.total_seconds", "timing.limit_seconds"),
            *(*base.UPDATE_RULE, *base.RACE, *base.WARM_UP),
        )
    )
    reporting = base.Reporting(
        "experiments.kind_reports.micro", comparability=base.Comparability.MACHINES
    )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return latency.csv: a row per benchmark."""
        return {"latency": frame(records)}


def records_of(
    benchmarks: Mapping[str, Any], identity: Mapping[str, Any], replicate: int = 0
) -> list[Record]:
    """Return a record per benchmark, with the seconds of a call.

    Args:
        benchmarks: JSON of pytest-benchmark with single times (`stats.data`).
        identity: entries that every record has, such as run_id.
        replicate: number of the process that measured.
    """
    return [
        _record(benchmark, identity, replicate) | {"order": order}
        for order, benchmark in enumerate(benchmarks["benchmarks"])
    ]


def _record(benchmark: Mapping[str, Any], identity: Mapping[str, Any], replicate: int) -> Record:
    """Return the record of a benchmark, an entry of pytest-benchmark's JSON."""
    extra_info, stats = benchmark["extra_info"], benchmark["stats"]
    num_calls = int(extra_info.get("executions", 1))  # other benchmarks time one call per iteration
    return {
        **_common(
            identity, replicate, str(benchmark["name"]), str(benchmark["group"] or "ungrouped")
        ),
        "params": {axis: extra_info[axis] for axis in AXES if axis in extra_info},
        "device": extra_info.get("device"),
        "lookups": extra_info.get("lookups"),
        "status": "ok",
        "reason": "",
        "stop_reason": "budget",
        "executions": num_calls,
        "iterations": stats["iterations"],  # a sample is the mean of its iterations
        "samples": {
            "call": [
                [round_number, seconds / num_calls]
                for round_number, seconds in enumerate(stats["data"])
            ]
        },
    }


def failures_of(output: str, identity: Mapping[str, Any], replicate: int = 0) -> list[Record]:
    """Return a record per failed test in the summary of pytest's output.

    `identity` and `replicate` are those of `records_of`.
    """
    matches = [match for line in output.splitlines() if (match := FAILURE_LINE.match(line.strip()))]
    return [
        _common(identity, replicate, match[2].partition("::")[2], "failed")
        | {"params": {}, "device": None, "lookups": None, "status": "error", "order": -1}
        | {"reason": match[3] or "failed", "stop_reason": "failed", "samples": {}}
        for match in matches
    ]


def _common(identity: Mapping[str, Any], replicate: int, name: str, group: str) -> Record:
    """Return the entries that successes and failures share; the cell is the test's name."""
    short_name = re.sub(r"^test_", "", name)
    return {
        **identity,
        "replicate": replicate,
        "experiment": "micro",
        "kind": Micro.name,
        "section": group,
        "title": group,
        "cell": short_name,
        "contender": group,
        "rank": 0,
        "cache": 0.0,
        "arm": short_name,
        "label": short_name,
        "mode": Mode.hot.value,
        "optimizer": "",
        "seed": 0,
        "rows_scale": 1.0,
        "unique_rows": None,
    }


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return latency.csv: a row per benchmark, over all processes.

    Columns: `operation` (group of the test), `benchmark` (its name), `device`, AXES, `lookups` per
    call, `status` (the first that is not "ok"), median_s, q25_s, q75_s, lo_s and hi_s in seconds of
    a call, `samples`, `processes`.
    """
    groups = metrics.group_records(records, Micro.name, lambda record: str(record["cell"]))
    return pd.DataFrame([_row(group) for group in groups.values()])


def _row(records: Sequence[Record]) -> dict[str, Any]:
    """Return the row of a benchmark from its records, one per process."""
    first_record = records[0]
    seconds_by_process = [
        [call_s for _, call_s in record["samples"].get("call", [])]
        for record in records
        if record["status"] == "ok"
    ]
    time_summary = metrics.summarise_processes(seconds_by_process)
    return {
        "operation": first_record["section"],
        "benchmark": first_record["cell"],
        "device": first_record["device"],
        **{name: first_record["params"].get(name) for name in AXES},
        "lookups": first_record["lookups"],
        "status": next((record["status"] for record in records if record["status"] != "ok"), "ok"),
        **time_summary.columns(),
        "samples": time_summary.n,
        "processes": len(seconds_by_process),
    }


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the entries of run.json about records: `cells`, `jobs` (records), `outcomes`."""
    return {
        "cells": len({record["cell"] for record in records}),
        "jobs": len(records),
        "outcomes": dict(Counter(record["status"] for record in records)),
    }


def import_benchmarks(path: Path, folder: Path) -> Path:
    """Create a run's directory in `folder` from a JSON file of pytest-benchmark; return it.

    Raises:
        UsageError: the file cannot be read, is no such JSON, or lacks benchmarks or single times;
            nothing is created then.
    """
    try:
        content = json.loads(path.read_text())
        if any("data" not in benchmark["stats"] for benchmark in content["benchmarks"]):
            raise UsageError(
                f"{path} has no single times: use --benchmark-json or --benchmark-save-data"
            )
        records = records_of(content, {"run_id": "", "context_id": None})
        environment = _environment_of(content) | {"command": f"pytest, {path.name}"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path} is not the JSON of pytest-benchmark ({error!r})") from error
    if not records:
        raise UsageError(f"{path} has no benchmarks in it: was --benchmark-enable left out?")
    store = RunStore.create(folder, "micro")
    store.write_config(dataclasses.replace(Config(), name="micro", kind=Micro.name))
    store.write_json("environment.json", environment)
    store.append(*(record | {"run_id": store.path.name} for record in records))
    question = "how long does one call of each operation take?"
    run_entries = {
        "experiment": "micro",
        "question": question,
        "status": "finished",
        **summary(records),
    }
    store.write_json("run.json", run_entries)
    return store.path


def _environment_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment in pytest-benchmark's JSON: that of emblib's benchmarks, if stored."""
    environment: dict[str, Any] = content.get("emblib") or {
        "time_utc": content.get("datetime"),
        "device": ((content.get("machine_info") or {}).get("cpu") or {}).get("brand_raw"),
        "git": {"sha": str((content.get("commit_info") or {}).get("id") or "")[:12] or None},
    }
    return environment
