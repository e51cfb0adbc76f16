"""The JSON of pytest-benchmark as records of the store, and these as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import Kind, Mode
from experiments.results.metrics import summarise_processes
from experiments.results.store import Record

AXES = ("T", "E", "D", "B", "L", "rank", "optimizer", "slots")
FAILED = re.compile(r"^(FAILED|ERROR) (\S+::.+?)(?: - (.*))?$")


def records_of(
    found: Mapping[str, Any], identity: Mapping[str, Any], replicate: int = 0
) -> list[Record]:
    """One record a benchmark; seconds are those of one call."""
    return [
        _record(benchmark, identity, replicate) | {"order": order}
        for order, benchmark in enumerate(found["benchmarks"])
    ]


def _record(benchmark: Mapping[str, Any], identity: Mapping[str, Any], replicate: int) -> Record:
    extra, stats = benchmark["extra_info"], benchmark["stats"]
    calls = int(extra.get("executions", 1))  # benchmarks of others time one call
    return {
        **_common(
            identity, replicate, str(benchmark["name"]), str(benchmark["group"] or "ungrouped")
        ),
        "params": {k: extra[k] for k in AXES if k in extra},
        "device": extra.get("device"),
        "lookups": extra.get("lookups"),
        "status": "ok",
        "reason": "",
        "stop_reason": "budget",
        "executions": calls,
        "iterations": stats["iterations"],  # of a sample, which is their mean
        "samples": {"call": [[i, s / calls] for i, s in enumerate(stats["data"])]},
    }


def failures_of(output: str, identity: Mapping[str, Any], replicate: int = 0) -> list[Record]:
    """One record for each test that pytest's closing lines list."""
    matches = [m for line in output.splitlines() if (m := FAILED.match(line.strip()))]
    return [
        _common(identity, replicate, m[2].partition("::")[2], "failed")
        | {"params": {}, "device": None, "lookups": None, "status": "error", "order": -1}
        | {"reason": m[3] or "failed", "stop_reason": "failed", "samples": {}}
        for m in matches
    ]


def _common(identity: Mapping[str, Any], replicate: int, name: str, group: str) -> Record:
    """What a record of any kind has; the cell is the test, without the name of its function."""
    short = re.sub(r"^test_", "", name)
    return {
        **identity,
        "replicate": replicate,
        "experiment": "micro",
        "kind": Kind.micro.value,
        "section": group,
        "title": group,
        "cell": short,
        "contender": group,
        "rank": 0,
        "cache": 0.0,
        "arm": short,
        "label": short,
        "mode": Mode.hot.value,
        "optimizer": "",
        "seed": 0,
        "rows_scale": 1.0,
        "unique_rows": None,
    }


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a benchmark, its processes together: seconds of one call."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get("kind") == Kind.micro.value:
            groups.setdefault(record["cell"], []).append(record)
    return pd.DataFrame([_row(group) for group in groups.values()])


def _row(group: Sequence[Record]) -> dict[str, Any]:
    first = group[0]
    taken = [[s for _, s in r["samples"].get("call", [])] for r in group if r["status"] == "ok"]
    time = summarise_processes(taken)
    return {
        "operation": first["section"],
        "benchmark": first["cell"],
        "device": first["device"],
        **{name: first["params"].get(name) for name in AXES},
        "lookups": first["lookups"],
        "status": next((r["status"] for r in group if r["status"] != "ok"), "ok"),
        "median_s": time.median,
        "q25_s": time.q25,
        "q75_s": time.q75,
        "lo_s": time.lo,
        "hi_s": time.hi,
        "samples": time.n,
        "processes": len(taken),
    }
