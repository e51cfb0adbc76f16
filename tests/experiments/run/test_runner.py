"""Runs survive their contenders, their processes and their own death; what is done stays done."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import cli, configure
from experiments.contenders import registry
from experiments.kinds import expand, find
from experiments.results import identity
from experiments.results.store import Record, RunStore, read_json, read_records
from experiments.run import runner, worker
from tests.experiments.smoke_host import SmokeHost

pytestmark = pytest.mark.usefixtures("loaded_fork_server")

ONE_CELL = (
    *("+experiment=tbe_vs_torch", "timing=smoke", "device=cpu", "report=tables"),
    "timing.max_cells=1",
)
CELLS_OF_THE_SWEEP = 4  # of a smoke run


def run(folder: Path, *words: str) -> tuple[int, Path]:
    """Exit status, and the directory of the run."""
    status = cli.main([*ONE_CELL, f"report.folder={folder}", *words])
    return status, max((folder / "tbe_vs_torch").iterdir(), key=lambda p: p.stat().st_ctime_ns)


@pytest.fixture(scope="module")
def machine(loaded_fork_server: None) -> dict[str, Any]:
    """What a run finds out about the machine; once is enough for these tests."""
    return worker.survey(configure.load(list(ONE_CELL)), torch.device("cpu"), ONE_CELL)


@pytest.fixture(autouse=True)
def _known_machine(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "survey", lambda *_: dict(machine))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, Any]) -> Path:
    """A run that several tests begin with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "survey", lambda *_: dict(machine))
        status, path = run(tmp_path_factory.mktemp("finished"))
    assert status == 0
    return path


@pytest.fixture
def first(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, where the runs of the test find it."""
    return Path(shutil.copytree(finished, tmp_path / finished.parent.name / finished.name))


FATES = {
    "tbe": ("ok", ""),
    "torch": ("error", "crashed (SIGSEGV)"),
    "managed": ("oom", "SIGKILL"),
    "cached_lru": ("timeout", "no sign of life for 15 s while building"),
    "cached_lfu": ("oom", "allocate"),
    "disk_lru": ("error", "ValueError: no such luck | <here> (children.py:"),
}


def test_what_befalls_one_contender_is_its_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TARGET", "tests.experiments.children:serve_with_faults")
    names = ",".join(FATES)
    status, path = run(tmp_path, f"contenders=[{names}]", "timing.limit_seconds=15")
    assert status == 5
    found = {r["contender"]: r for r in read_records(path)}
    assert found.keys() == FATES.keys()
    for name, (fate, reason) in FATES.items():
        assert found[name]["status"] == fate, found[name]["reason"]
        assert reason in found[name]["reason"]
        assert found[name]["job_records"] == len(FATES)
    assert found["tbe"]["samples"]["step"]
    outcomes = {"ok": 1, "error": 2, "oom": 2, "timeout": 1}
    assert read_json(path, "run.json")["outcomes"] == outcomes
    report = (path / "report.md").read_text()
    assert all(fate in report for fate, _ in FATES.values())
    assert "no such luck \\| &lt;here>" in report
    assert "no such luck | &lt;here&gt;" in (path / "index.html").read_text()


def test_running_out_of_memory_is_a_result_unless_the_run_is_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TARGET", "tests.experiments.children:serve_with_faults")
    few = "contenders=[tbe,cached_lfu]"
    status, first = run(tmp_path, few)
    assert status == 0
    status, strict = run(tmp_path, few, "strict=true")
    assert status == 5
    again = read_json(strict, "run.json")
    assert (again["reused"], again["outcomes"]) == (1, {"ok": 1, "oom": 1})
    monkeypatch.undo()  # the memory has grown
    monkeypatch.setattr(runner, "survey", lambda *_: read_json(first, "environment.json"))
    _, path = run(tmp_path, few, "rerun=failed")
    assert read_json(path, "run.json")["outcomes"] == {"ok": 2}


def test_a_second_run_takes_what_the_first_measured(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "measure_job", None)  # nothing may be measured
    points = first / "points.jsonl"
    points.write_text(points.read_text().replace('"title": "', '"title": "older '))
    status, second = run(tmp_path)
    assert status == 0
    assert second != first
    assert read_json(second, "run.json")["reused"] == 1
    for old, new in zip(read_records(first), read_records(second), strict=True):
        assert new["reused_from"] == first.name
        assert new["run_id"] == second.name
        assert new["samples"] == old["samples"]
        assert old["title"] == f"older {new['title']}"  # titles are of the present run
    _, third = run(tmp_path)
    assert {r["reused_from"] for r in read_records(third)} == {first.name}


def test_what_differs_is_another_point() -> None:
    def keys(*words: str) -> set[str]:
        config = configure.load([*ONE_CELL, *words])
        return {identity.point_key(cell, config) for cell in expand(config)}

    first = keys()
    for words in ("lr=0.5", "workload.D=48", "timing.pool=3", "seed=2", "contenders=[tbe]"):
        assert keys(words).isdisjoint(first), words
    for words in ("timing.total_seconds=7", "rerun=all", "report.figures=false", "strict=true"):
        assert keys(words) == first, words


def test_a_data_set_that_was_missing_is_another_point(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure.load(["+experiment=quality", "options.data=[movielens]"])

    def keys(version: str | None) -> set[str]:
        monkeypatch.setattr(registry, "find_installed", lambda name: version and (name, version))
        packages = find(config.kind).measurement.packages
        return {identity.point_key(cell, config, packages) for cell in expand(config)}

    assert keys(None).isdisjoint(keys("1.0"))
    assert keys("1.0").isdisjoint(keys("2.0"))


def test_another_native_library_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an editable install: sources here, libraries in another folder."""
    sources, libraries = tmp_path / "sources", tmp_path / "libraries"
    for file in (sources / "tables.py", libraries / "libemblib_cpu.so"):
        file.parent.mkdir()
        file.write_text("one")
    monkeypatch.setattr(identity, "library_folders", lambda: [libraries, sources])
    code_id = identity.code_id.__wrapped__
    first = code_id()
    assert code_id() == first
    (libraries / "libemblib_cpu.so").write_text("two")
    assert code_id() != first


def test_other_code_or_another_machine_is_another_context(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identity.context_of(machine)
    assert first["context_id"] == machine["context_id"]
    cpu = {**machine["cpu"], "model": "another"}
    other = identity.context_of({**machine, "cpu": cpu})
    assert other["hardware_id"] != first["hardware_id"]
    for change in ({"torch": "2.99"}, {"threads": 64}, {"cpu": cpu}):
        assert identity.context_of({**machine, **change})["context_id"] != first["context_id"]
    monkeypatch.setattr(identity, "code_id", lambda: "other code")
    assert identity.context_of(machine)["context_id"] != first["context_id"]


def test_other_code_is_not_reused(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**read_json(first, "environment.json"), "context_id": "of other code"}
    monkeypatch.setattr(runner, "survey", lambda *_: changed)
    assert read_json(run(tmp_path)[1], "run.json")["reused"] == 0
    assert read_json(run(tmp_path, "rerun=all")[1], "run.json")["reused"] == 0


def test_half_a_job_is_not_done(first: Path, tmp_path: Path) -> None:
    points = first / "points.jsonl"
    points.write_text(points.read_text().splitlines(keepends=True)[0] + '{"torn')
    _, second = run(tmp_path)
    assert read_json(second, "run.json")["reused"] == 0
    assert len(read_records(second)) == 2


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])  # the latter by a broken pipe
def test_ctrl_c_leaves_a_readable_run_that_goes_on(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = runner.measure_job, []

    def second_is_interrupted(*arguments: object) -> list[Record]:
        calls.append(arguments)
        if len(calls) == 2:
            raise end
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(runner, "measure_job", second_is_interrupted)
        status, path = run(tmp_path, "timing.max_cells=2")
    assert status == 130
    assert read_json(path, "run.json")["status"] == "interrupted"
    assert "Interrupted after 1 of 2" in (path / "report.md").read_text()
    status, path = run(tmp_path, "timing.max_cells=2")
    assert status == 0
    assert read_json(path, "run.json")["reused"] == 1
    assert len(read_records(path)) == 4


def test_a_run_killed_in_the_middle_loses_and_repeats_nothing(
    tmp_path: Path, smoke_host: SmokeHost
) -> None:
    words = [*ONE_CELL[:-1], f"report.folder={tmp_path}"]
    process = smoke_host.start(words, tmp_path)
    done: list[Record] = []
    while len(done) < 2:
        os.kill(process, 0)  # it runs
        time.sleep(0.02)
        found = list(tmp_path.glob("*/*/points.jsonl"))
        done = read_records(found[0].parent) if found else []
    os.kill(process, signal.SIGKILL)
    assert smoke_host.wait(process) == -signal.SIGKILL, "ended before it could be killed"
    (killed,) = (tmp_path / "tbe_vs_torch").iterdir()
    done = read_records(killed)
    assert cli.main(words) == 0
    (path,) = (p for p in (tmp_path / "tbe_vs_torch").iterdir() if p != killed)
    records = read_records(path)
    assert len(records) == 2 * CELLS_OF_THE_SWEEP
    assert len({(r["cell"], r["arm"]) for r in records}) == len(records)
    kept = [r for r in records if r.get("reused_from") == killed.name]
    assert [r["samples"] for r in kept] == [r["samples"] for r in done]


def test_two_runs_at_once_do_not_meet(tmp_path: Path, smoke_host: SmokeHost) -> None:
    words = [*ONE_CELL, f"report.folder={tmp_path}"]
    both = [smoke_host.start(words, tmp_path) for _ in range(2)]
    assert [smoke_host.wait(process) for process in both] == [0, 0]
    paths = list((tmp_path / "tbe_vs_torch").iterdir())
    assert len(paths) == 2
    assert all(len(read_records(path)) == 2 for path in paths)


def test_a_dry_run_shows_the_cells_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ONE_CELL[:-1], f"report.folder={tmp_path}", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert f"{CELLS_OF_THE_SWEEP} cells" in shown
    assert "Nothing was measured" in shown
    assert not list(tmp_path.iterdir())


def test_a_run_short_of_time_has_fewer_cells_and_not_fewer_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("timing.replicates=2", "sweep.D=[8,16]", "timing.max_cells=3")
    _, path = run(tmp_path, *words, "timing.total_seconds=0.001")
    records = read_records(path)
    assert len({r["cell"] for r in records}) == 1
    assert {r["replicate"] for r in records} == {0, 1}
    left_out = read_json(path, "run.json")["cells_left_out"]
    assert left_out >= 1
    assert f"no time for {2 * left_out} of" in capsys.readouterr().out
    _, path = run(tmp_path, *words, "timing.total_seconds=0")
    by_cell: dict[str, set[int]] = {}
    for record in read_records(path):
        by_cell.setdefault(record["cell"], set()).add(record["replicate"])
    assert len(by_cell) == 1 + left_out
    assert all(replicates == {0, 1} for replicates in by_cell.values())
    assert read_json(path, "run.json")["reused"] == 2


def test_who_ran_out_of_time_is_tried_again_under_another_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker, "TARGET", "tests.experiments.children:serve_with_faults")
        words = ("contenders=[tbe,cached_lru]", "timing.modes=[hot,wall]")
        status, first = run(tmp_path, *words, "timing.limit_seconds=15")
        assert status == 5
    lost = [(r["arm"], r["mode"]) for r in read_records(first) if r["status"] == "timeout"]
    assert lost == [("cached_lru@0.2", "hot"), ("cached_lru@0.2", "wall")]  # a row of every mode
    _, path = run(tmp_path, *words, "timing.limit_seconds=15")
    assert read_json(path, "run.json")["reused"] == 1
    _, path = run(tmp_path, *words, "timing.limit_seconds=60")
    assert read_json(path, "run.json")["outcomes"] == {"ok": 4}


def test_processes_with_tables_of_another_size_are_not_put_together(tmp_path: Path) -> None:
    _, first = run(tmp_path, "timing.replicates=2", "timing.total_seconds=0")
    records = read_records(first)
    shrunk = [r | {"rows_scale": r["rows_scale"] / 2} for r in records if r["replicate"]]
    RunStore(tmp_path / "tbe_vs_torch" / "later").append(*shrunk)
    _, path = run(tmp_path, "timing.replicates=2", "timing.total_seconds=0")
    assert len({r["rows_scale"] for r in read_records(path)}) == 1
    assert read_json(path, "run.json")["reused"] == 1


def test_what_is_not_installed_does_not_keep_the_others_from_being_reused(
    first: Path, tmp_path: Path
) -> None:
    store = RunStore(tmp_path / "tbe_vs_torch" / "later")
    records = read_records(first)
    gone = {"status": "missing"}
    store.append(*(r | (gone if r["arm"] == "torch" else {}) for r in records))
    shutil.rmtree(first)
    _, path = run(tmp_path)
    assert read_json(path, "run.json")["reused"] == 1


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_report_that_cannot_be_written_is_told_and_nothing_is_lost(
    error: BaseException,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(runner, "write_report", fail)
    got, path = run(tmp_path)
    assert got == status
    assert len(read_records(path)) == 2
    assert f"python run.py report {path}" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(store: RunStore, *records: Record) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunStore, "append", full)
    status, path = run(tmp_path)
    assert status == 1
    assert read_json(path, "run.json")["status"] == "store: No space left on device"
    assert read_json(path, "run.json")["jobs"] == 0
    assert "the records cannot be written" in capsys.readouterr().out
