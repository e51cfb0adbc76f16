"""The store: whole lines whatever happens, and a report for every ending."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import experiments
from experiments import cli
from experiments.contenders import Contender
from experiments.results.store import RunStore, read_json, read_records
from experiments.run import cell, runner

QUICK = (
    "+experiment=tt_vs_tbe",
    "timing=smoke",
    "device=cpu",
    "report=tables",
    "timing.max_cells=1",
)


def only_run(folder: Path) -> Path:
    (path,) = (folder / "tt_vs_tbe").iterdir()
    return path


def test_a_torn_last_line_is_ignored_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append({"number": 1})
    store.append({"number": 2})
    points = tmp_path / "points.jsonl"
    points.write_text(points.read_text() + '{"number": 3, "torn')
    assert [r["number"] for r in read_records(tmp_path)] == [1, 2]
    points.write_text('{"number": 1, "torn\n' + '{"number": 2}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        read_records(tmp_path)


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    first, second = (RunStore.create(tmp_path, "x").path for _ in range(2))
    assert first != second


def test_derived_files_are_replaced_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write("a.txt", "old")
    store.write("a.txt", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "new")]


def test_ctrl_c_leaves_a_readable_run_and_status_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = runner.measure_cell, []

    def second_is_interrupted(*arguments: Any) -> list[dict[str, Any]]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(runner, "measure_cell", second_is_interrupted)
    assert cli.main([*QUICK, f"report.folder={tmp_path}"]) == 130
    path = only_run(tmp_path)
    assert read_json(path, "run.json")["status"] == "interrupted"
    assert {r["section"] for r in read_records(path)} == {"criteo"}
    assert "Interrupted after 1 of" in (path / "report.md").read_text()
    assert "On this machine TT" in capsys.readouterr().out


def test_ctrl_c_before_the_first_cell_still_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure_cell", interrupted)
    assert cli.main([*QUICK, f"report.folder={tmp_path}"]) == 130
    assert "nothing was measured" in (only_run(tmp_path) / "index.html").read_text()


def test_failures_are_rows_with_a_reason_and_status_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cell.build

    def build(name: str, task: Any) -> Contender:
        if name == "torch":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        if name == "tt":
            raise ValueError("no such luck | <here>")
        return real(name, task)

    monkeypatch.setattr(cell, "build", build)
    assert cli.main([*QUICK, f"report.folder={tmp_path}"]) == 5
    path = only_run(tmp_path)
    outcomes = {(r["contender"], r["status"]) for r in read_records(path)}
    assert ("tbe", "ok") in outcomes
    assert ("torch", "oom") in outcomes
    assert ("tt", "error") in outcomes
    page = (path / "index.html").read_text()
    assert "No answer: TT rank 16 has no result" in page
    assert "no such luck | &lt;here&gt;" in page
    assert "no such luck \\| <here>" in (path / "report.md").read_text()


def test_load_is_the_results_of_several_runs(smoke_runs: dict[str, Path]) -> None:
    paths = list(smoke_runs.values())
    table = experiments.load(*paths)
    assert set(table["run"]) == {p.name for p in paths}
    records = [r for p in paths for r in read_records(p)]
    timed = [r for r in records if r.get("kind") != "cache"]
    assert len(table) == 2 * len(timed)  # a row per phase
    traces = experiments.hit_rates(*paths)
    assert len(traces) == len(records) - len(timed) > 0
    assert set(traces["run"]) == {p.name for p in paths if p.parent.name == "cache_hit_rate"}


def test_every_raw_sample_is_kept(smoke_runs: dict[str, Path]) -> None:
    for path in smoke_runs.values():
        for line in (path / "points.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert record["schema_version"] == 1
            if record.get("kind") == "cache":
                kinds = {"lookups", "lookup_hits", "rows", "row_hits"}
                assert set(record["samples"]) - {"conflicts"} == kinds
                assert all(len(s) >= record["batches"] for s in record["samples"].values())
            elif record["status"] == "ok":
                assert set(record["samples"]) == {"forward", "step"}
                assert all(len(s) >= 3 for s in record["samples"].values())
                assert all(t > 0 for s in record["samples"].values() for _, t in s)
