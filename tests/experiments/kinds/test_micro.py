"""Micro-benchmarks in the store: times of one call, failures as rows, wrong files refused."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import cli, configure
from experiments.config.schema import UsageError
from experiments.kinds.micro import failures_of, frame, records_of
from experiments.report.data import Run
from experiments.results.store import read_json, read_records
from experiments.run import micro as leader

IDENTITY = {"run_id": "r", "context_id": "c"}


def benchmark(name: str, group: str, seconds: list[float], **extra: Any) -> dict[str, Any]:
    """As pytest-benchmark writes it: a sample is 8 calls."""
    stats = {"data": [8 * s for s in seconds], "iterations": 1}
    facts = {"device": "cpu", "executions": 8, "lookups": 10, "D": 64, **extra}
    return {"name": name, "group": group, "extra_info": facts, "stats": stats}


FOUND = {
    "benchmarks": [
        benchmark("test_lookup[cpu-one lookup]", "lookup", [5e-5] * 3, lookups=1),
        benchmark("test_lookup_op[cpu]", "lookup, the op alone", [2e-5] * 3, lookups=1),
        benchmark("test_step[cpu-sgd]", "step", [1e-3, 2e-3, 3e-3]),
    ],
    "emblib": {"device": "a CPU", "git": {"sha": "abc"}},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(FOUND))
    return path


def test_a_sample_becomes_the_time_of_one_call() -> None:
    record = records_of(FOUND, IDENTITY, replicate=2)[2]
    assert record["samples"]["call"] == [[0, 1e-3], [1, 2e-3], [2, 3e-3]]
    assert (record["cell"], record["section"]) == ("step[cpu-sgd]", "step")
    assert (record["replicate"], record["run_id"], record["params"]) == (2, "r", {"D": 64})
    other = {
        "name": "test_x",
        "group": None,
        "extra_info": {},
        "stats": {"data": [1.0], "iterations": 9},
    }
    (foreign,) = records_of({"benchmarks": [other]}, IDENTITY)
    assert foreign["samples"] == {"call": [[0, 1.0]]}


def test_processes_of_a_benchmark_are_one_row() -> None:
    again = [b | {"stats": {"data": [0.032], "iterations": 1}} for b in FOUND["benchmarks"]]
    records = records_of(FOUND, IDENTITY) + records_of({"benchmarks": again}, IDENTITY, 1)
    row = frame(records).set_index("benchmark").loc["step[cpu-sgd]"]
    assert (row["samples"], row["processes"]) == (4, 2)
    assert row["median_s"] == pytest.approx(2.5e-3)  # of 1, 2, 3 and 4 ms
    assert row["lo_s"] < math.sqrt(2e-3 * 4e-3) < row["hi_s"]  # over the medians of both


def test_failed_tests_are_rows() -> None:
    output = (
        "FAILED tests/bench/test_op_latency.py::test_step[cpu-sgd] - AssertionError: not close\n"
        "ERROR tests/bench/test_op_latency.py::test_group[cpu-1]\n"
        "2 failed in 1.00s\n"
    )
    found = failures_of(output, IDENTITY)
    assert [(r["cell"], r["status"], r["reason"]) for r in found] == [
        ("step[cpu-sgd]", "error", "AssertionError: not close"),
        ("group[cpu-1]", "error", "failed"),
    ]
    row = frame([*records_of(FOUND, IDENTITY), *found]).set_index("benchmark")
    assert row.loc["step[cpu-sgd]", "status"] == "error"
    assert row.loc["lookup[cpu-one lookup]", "status"] == "ok"


def test_somebody_elses_json_becomes_a_run(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(saved), "--folder", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert (
        "looks up one row takes 50.0 µs (cpu), of which the operation itself takes 20.0 µs" in said
    )
    (folder,) = (tmp_path / "runs" / "micro").iterdir()
    assert said.splitlines()[-2] == f"report: {folder / 'index.html'}"
    assert len(read_records(folder)) == 3
    table = pd.read_csv(folder / "latency.csv")
    assert list(table["median_s"]) == pytest.approx([5e-5, 2e-5, 2e-3])
    assert "step[cpu-sgd]" in (folder / "report.md").read_text()
    assert Run.read(folder).kind.name == "micro"
    assert (folder / "latency.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not the JSON of pytest-benchmark"),
        ('{"other": 1}', "is not the JSON of pytest-benchmark"),
        ('{"benchmarks": []}', "was --benchmark-enable left out?"),
        ('{"benchmarks": [{"stats": {"median": 1}}]}', "has no single times"),
        ('{"benchmarks": [{"name": "a", "stats": {"data": [1]}}]}', "is not the JSON of pytest-"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["report", str(tmp_path / "x.json"), "--folder", str(tmp_path / "runs")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def pretend(monkeypatch: pytest.MonkeyPatch, status: int, output: str = "") -> list[list[str]]:
    """pytest ends as told."""
    commands: list[list[str]] = []

    def start(command: list[str], **ignored: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = next(
            (a.partition("=")[2] for a in command if a.startswith("--benchmark-json")), ""
        )
        if target and status in (0, 1):
            Path(target).write_text(json.dumps(FOUND))
        return subprocess.CompletedProcess(command, status, output, "")

    monkeypatch.setattr(leader.subprocess, "run", start)
    monkeypatch.setattr("experiments.run.micro.survey", lambda *a: {"device": "a CPU"})
    return commands


@pytest.mark.parametrize(
    ("status", "output", "expected", "outcomes"),
    [
        (0, "", 0, {"ok": 6}),
        (1, "FAILED tests/bench/test_op_latency.py::test_x - no", 5, {"ok": 6, "error": 2}),
        (2, "ImportError", 1, {}),
        (5, "no tests ran", 1, {}),
    ],
)
def test_every_ending_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    output: str,
    expected: int,
    outcomes: dict[str, int],
) -> None:
    commands = pretend(monkeypatch, status, output)
    words = ["+experiment=micro", "device=cpu", "timing.replicates=2", f"report.folder={tmp_path}"]
    config = configure.load([*words, "report.figures=false"])
    assert leader.run(config, question="?", words=words) == expected
    (folder,) = (tmp_path / "micro").iterdir()
    assert read_json(folder, "run.json")["outcomes"] == outcomes
    assert (folder / "index.html").is_file()
    assert len(commands) == (2 if outcomes else 1)
    assert "--benchmark-enable" in commands[0]
    assert commands[0][commands[0].index("-k") + 1] == "cpu"


def test_a_smoke_run_takes_few_and_a_dry_run_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pretend(monkeypatch, 0)
    words = ["+experiment=micro", "device=cpu", "timing=smoke", "dry_run=true"]
    assert leader.run(configure.load(words), question="?", words=words) == 0
    assert "--collect-only" in commands[0]
    assert "one or" in commands[0][commands[0].index("-k") + 1]


def test_without_pytest_benchmark_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader.importlib.util, "find_spec", lambda name: None)
    words = ["+experiment=micro", "device=cpu"]
    with pytest.raises(UsageError, match=r"pip install '\.\[test\]'"):
        leader.run(configure.load(words), question="?", words=words)


def test_a_pytest_that_writes_nothing_is_no_finished_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that fails leaves no file, and pytest's status is that of a failed test."""

    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "2 passed", "AttributeError: in a hook")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(RuntimeError, match=r"(?s)wrote no benchmark.*AttributeError: in a hook"):
        leader.run_benchmarks(configure.load(["+experiment=micro", "device=cpu"]), IDENTITY, 0)
