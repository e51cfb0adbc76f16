"""The kind `micro`: single calls of operations, timed by pytest-benchmark."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config.configure import device_kind
from experiments.config.schema import Config, Mode, UsageError
from experiments.kinds.base import TIME, Kind
from experiments.paths import ROOT
from experiments.results.metrics import summarise_processes
from experiments.results.store import Record, RunStore

AXES = ("T", "E", "D", "B", "L", "rank", "optimizer", "slots")
FAILED = re.compile(r"^(FAILED|ERROR) (\S+::.+?)(?: - (.*))?$")


class Micro(Kind):
    """How long does one call of each operation take?"""

    name = "micro"
    swept_kind = TIME
    leads = "experiments.kinds.micro:run"
    report = "experiments.kinds.micro_report"
    side_by_side = False

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return latency.csv: a row per benchmark."""
        return {"latency": frame(records)}


def records_of(
    found: Mapping[str, Any], identity: Mapping[str, Any], replicate: int = 0
) -> list[Record]:
    """Return a record per benchmark; seconds are those of one call."""
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
    """Return a record per test that pytest's closing lines list."""
    matches = [m for line in output.splitlines() if (m := FAILED.match(line.strip()))]
    return [
        _common(identity, replicate, m[2].partition("::")[2], "failed")
        | {"params": {}, "device": None, "lookups": None, "status": "error", "order": -1}
        | {"reason": m[3] or "failed", "stop_reason": "failed", "samples": {}}
        for m in matches
    ]


def _common(identity: Mapping[str, Any], replicate: int, name: str, group: str) -> Record:
    """Return what every record has; the cell is the test's name."""
    short = re.sub(r"^test_", "", name)
    return {
        **identity,
        "replicate": replicate,
        "experiment": "micro",
        "kind": Micro.name,
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
    """Return a row per benchmark, its processes together: seconds of one call."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get("kind") == Micro.name:
            groups.setdefault(record["cell"], []).append(record)
    return pd.DataFrame([_row(group) for group in groups.values()])


def _row(group: Sequence[Record]) -> dict[str, Any]:
    first = group[0]
    taken = [[s for _, s in r["samples"].get("call", [])] for r in group if r["status"] == "ok"]
    taken_s = summarise_processes(taken)
    return {
        "operation": first["section"],
        "benchmark": first["cell"],
        "device": first["device"],
        **{name: first["params"].get(name) for name in AXES},
        "lookups": first["lookups"],
        "status": next((r["status"] for r in group if r["status"] != "ok"), "ok"),
        "median_s": taken_s.median,
        "q25_s": taken_s.q25,
        "q75_s": taken_s.q75,
        "lo_s": taken_s.lo,
        "hi_s": taken_s.hi,
        "samples": taken_s.n,
        "processes": len(taken),
    }


FILES = "tests/bench/test_*latency.py"
SMOKE = "one or lookup_op or 1024 or lru-tenth or forward-8"
SHARE = 0.2  # of timing.cell_seconds, for one benchmark
NONE_COLLECTED = 5  # pytest's exit status


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Lead a run in which each replicate is one process for all benchmarks."""
    try:
        if importlib.util.find_spec("pytest_benchmark") is None:
            raise UsageError("micro-benchmarks need pytest-benchmark: pip install 'emblib[test]'")
        if not list(ROOT.glob(FILES)):
            raise UsageError(f"micro-benchmarks are in the source tree ({FILES}), not installed")
        from experiments.run import runner
        from experiments.run.worker import survey

        device = runner.device_of(config)
        if config.dry_run:
            return subprocess.run([*command(config), "--collect-only"], cwd=ROOT).returncode
        environment = survey(config, device, words)
        store = RunStore.begin(config, environment)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    identity = {"run_id": store.path.name, "context_id": environment.get("context_id")}
    started, records, status = time.monotonic(), [], "finished"
    try:
        for replicate in range(config.timing.replicates):
            found = measure(config, identity, replicate)
            store.append(*found)
            records += found
            print(f"process {replicate + 1} of {config.timing.replicates}: {len(found)} benchmarks")
    except KeyboardInterrupt:
        status = "interrupted"
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        status = f"pytest: {str(error).splitlines()[0]}"
    extra = summary(records) | {"seconds": round(time.monotonic() - started, 1)}
    return runner.finish(store, config, status=status, question=question, extra=extra)


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the entries of run.json."""
    return {
        "cells": len({r["cell"] for r in records}),
        "jobs": len(records),
        "outcomes": dict(Counter(r["status"] for r in records)),
    }


def command(config: Config) -> list[str]:
    """Return pytest's command; a smoke run leaves out what is large."""
    only = device_kind(config.device.kind)
    if config.timing.max_rows:
        only += f" and ({SMOKE})"
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(FILES))
    return [
        *(sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-k", only),
        *("--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc"),
        f"--benchmark-min-rounds={config.timing.min_rounds}",
        f"--benchmark-max-time={SHARE * config.timing.cell_seconds:g}",
    ]


def measure(config: Config, identity: Mapping[str, Any], replicate: int) -> list[Record]:
    """Run all benchmarks in one fresh process; raises RuntimeError if pytest itself broke."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if config.device.threads:
        variables["OMP_NUM_THREADS"] = str(config.device.threads)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "benchmarks.json"
        done = subprocess.run(
            [*command(config), f"--benchmark-json={target}"],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            why = "found no benchmark" if done.returncode == NONE_COLLECTED else "broke"
            raise RuntimeError(f"pytest {why} (exit status {done.returncode})\n{tail}")
        timed = json.loads(target.read_text()) if target.exists() and target.stat().st_size else {}
    failed = failures_of(done.stdout, identity, replicate)
    return [*records_of({"benchmarks": [], **timed}, identity, replicate), *failed]


def take(path: Path, folder: Path) -> Path:
    """Make a run directory from the JSON of pytest-benchmark; raises UsageError."""
    try:
        found = json.loads(path.read_text())
        benchmarks = found["benchmarks"]
        if any("data" not in b["stats"] for b in benchmarks):
            raise UsageError(f"{path} has no single times: use --benchmark-json or -save-data")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the JSON of pytest-benchmark ({error!r})") from error
    if not benchmarks:
        raise UsageError(f"{path} has no benchmarks in it: was --benchmark-enable left out?")
    store = RunStore.create(folder, "micro")
    store.write_config(dataclasses.replace(Config(), name="micro", kind=Micro.name))
    environment = found.get("emblib") or {
        "time_utc": found.get("datetime"),
        "device": (found.get("machine_info", {}).get("cpu") or {}).get("brand_raw"),
        "git": {"sha": str(found.get("commit_info", {}).get("id") or "")[:12] or None},
    }
    store.write_json("environment.json", environment | {"command": f"pytest, {path.name}"})
    identity = {"run_id": store.path.name, "context_id": None}
    records = records_of(found, identity)
    store.append(*records)
    question = "how long does one call of each operation take?"
    ended = {"experiment": "micro", "question": question, "status": "finished", **summary(records)}
    store.write_json("run.json", ended)
    return store.path
