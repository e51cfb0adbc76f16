"""Run the micro-benchmarks of tests/bench as a run; each replicate is a process of pytest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config.schema import Config, UsageError, device_kind
from experiments.kinds.micro import failures_of, records_of, summary
from experiments.paths import ROOT
from experiments.results.store import Record, RunStore
from experiments.run import runner
from experiments.run.worker import survey

BENCHMARK_FILES = "tests/bench/test_*latency.py"
SMOKE_SELECTION = "one or lookup_op or 1024 or lru-tenth or forward-8"  # benchmarks of a smoke run
TIME_SHARE = 0.2  # maximum seconds of a benchmark ÷ timing.cell_seconds
NO_TESTS_STATUS = 5  # exit status of pytest without tests


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Run all benchmarks in each replicate, write the report, and return the exit status.

    A dry run lists the benchmarks instead, and returns pytest's exit status. The arguments are
    those of `runner.run`.

    Raises:
        UsageError: pytest-benchmark or the benchmarks are missing, or the device is unusable.
    """
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise UsageError("micro-benchmarks need pytest-benchmark: pip install '.[test]'")
    if not list(ROOT.glob(BENCHMARK_FILES)):
        raise UsageError(
            f"micro-benchmarks are in the source tree ({BENCHMARK_FILES}), not installed"
        )
    device = runner.device_of(config)
    if config.dry_run:
        return subprocess.run([*pytest_command(config), "--collect-only"], cwd=ROOT).returncode
    environment = survey(config, device, words)
    store = RunStore.begin(config, environment)
    identity = {"run_id": store.path.name, "context_id": environment.get("context_id")}
    begin_s, records, status = time.monotonic(), [], "finished"
    try:
        for replicate in range(config.timing.replicates):
            new_records = run_benchmarks(config, identity, replicate)
            store.append(*new_records)
            records += new_records
            process = f"process {replicate + 1} of {config.timing.replicates}"
            print(f"{process}: {len(new_records)} benchmarks")
    except KeyboardInterrupt:
        status = "interrupted"
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        status = f"pytest: {str(error).splitlines()[0]}"
    run_entries = summary(records) | {"seconds": round(time.monotonic() - begin_s, 1)}
    return runner.finish(store, config, status=status, question=question, extra=run_entries)


def pytest_command(config: Config) -> list[str]:
    """Return the command of pytest for the device of the run; a smoke run has fewer benchmarks."""
    selection = device_kind(config.device.kind)
    if config.timing.max_rows:
        selection += f" and ({SMOKE_SELECTION})"
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(BENCHMARK_FILES))
    return [
        *(sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-k", selection),
        *("--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc"),
        f"--benchmark-min-rounds={config.timing.min_rounds}",
        f"--benchmark-max-time={TIME_SHARE * config.timing.cell_seconds:g}",
    ]


def run_benchmarks(config: Config, identity: Mapping[str, Any], replicate: int) -> list[Record]:
    """Run all benchmarks in a fresh process; return a record per benchmark and per failed test.

    Args:
        config: configuration of the run.
        identity: entries of every record.
        replicate: number of the process.

    Raises:
        RuntimeError: pytest itself or a hook fails, or pytest finds no benchmark.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if config.device.threads:
        variables["OMP_NUM_THREADS"] = str(config.device.threads)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "benchmarks.json"
        completed = subprocess.run(
            [*pytest_command(config), f"--benchmark-json={target}"],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
        )
        tail = "\n".join((completed.stdout + completed.stderr).strip().splitlines()[-8:])
        if completed.returncode not in (0, 1):
            problem = "found no benchmark" if completed.returncode == NO_TESTS_STATUS else "broke"
            raise RuntimeError(f"pytest {problem} (exit status {completed.returncode})\n{tail}")
        has_output = target.exists() and target.stat().st_size
        output = json.loads(target.read_text()) if has_output else {}
    failures = failures_of(completed.stdout, identity, replicate)
    records = [*records_of({"benchmarks": [], **output}, identity, replicate), *failures]
    if not records:  # a hook failed: pytest's exit status is 1, as for a failed test
        raise RuntimeError(f"pytest wrote no benchmark, and no test failed\n{tail}")
    return records
