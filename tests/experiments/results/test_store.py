"""The store: whole lines whatever happens."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import experiments
from experiments import cli
from experiments.config.schema import UsageError
from experiments.measure.process import Child
from experiments.report.data import Run
from experiments.results.store import (
    POINTS,
    SCHEMA_VERSION,
    RunStore,
    has_records,
    pack_records,
    read_config,
    read_records,
    runs_in,
    unpack_records,
)
from tests.experiments.made_up import Recipe, make_run


def test_a_torn_last_line_is_ignored_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append({"number": 1})
    store.append({"number": 2})
    points = tmp_path / "points.jsonl"
    for torn in ('{"number": 3, "torn', '{"number": 3}'):  # `append` would remove both
        points.write_text("".join(points.read_text().splitlines(keepends=True)[:2]) + torn)
        assert [r["number"] for r in read_records(tmp_path)] == [1, 2]
    store.append({"number": 4}, {"number": 5})
    assert [r["number"] for r in read_records(tmp_path)] == [1, 2, 4, 5]
    for damaged in ('{"number": 1, "torn', "1", '"number"'):
        points.write_text(damaged + '\n{"number": 2}\n')
        with pytest.raises(ValueError, match="line 1 is damaged"):
            read_records(tmp_path)


def test_names_of_runs_ascend_in_any_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for zone in ("EAST-14", "WEST+8"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        names.append(RunStore.create(tmp_path, "gate").path.name)
    monkeypatch.undo()
    time.tzset()
    assert names == sorted(names)


def test_records_of_a_later_schema_are_refused(tmp_path: Path) -> None:
    for version in (99, "2"):
        (tmp_path / "points.jsonl").write_text(json.dumps({"schema_version": version}) + "\n")
        with pytest.raises(ValueError, match="report it with the harness that measured it"):
            read_records(tmp_path)


def test_damaged_packed_records_are_a_value_error(tmp_path: Path) -> None:
    RunStore(tmp_path).append({"number": 1})
    pack_records(tmp_path)
    packed = tmp_path / "points.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"points.jsonl.xz is damaged"):
        read_records(tmp_path)


def test_unpacking_that_is_interrupted_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise KeyboardInterrupt

    RunStore(tmp_path).append({"number": 1}, {"number": 2})
    pack_records(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(KeyboardInterrupt):
        unpack_records(tmp_path)
    assert [r["number"] for r in read_records(tmp_path)] == [1, 2]


def test_a_damaged_run_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", Recipe(replicates=1))
    points = run / "points.jsonl"
    points.write_text("{\n" + points.read_text())
    assert cli.main(["report", str(run)]) == 2
    assert "points.jsonl line 1 is damaged" in capsys.readouterr().err
    points.write_text(points.read_text().removeprefix("{\n"))
    (run / "environment.json").write_text("{")
    assert cli.main(["report", str(run)]) == 2
    assert "environment.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("removed", "missing"),
    [(None, "'cell'"), ("samples", "'samples'")],
)
def test_a_record_without_an_entry_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], removed: str | None, missing: str
) -> None:
    run = make_run(tmp_path / "run", Recipe(replicates=1))
    points = run / "points.jsonl"
    first, *others = map(json.loads, points.read_text().splitlines())
    first = {key: value for key, value in first.items() if removed and key != removed}
    points.write_text("".join(json.dumps(record) + "\n" for record in (first, *others)))
    assert cli.main(["report", str(run)]) == 2
    assert f"points.jsonl has a record without {missing}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sample", "copies", "message"),
    [
        (math.nan, 1, "step: nan is not a time in seconds"),
        (0.0, 1, "step: 0.0 is not a time in seconds"),
        ("5 ms", 1, "step: '5 ms' is not a time in seconds"),
        (1e-3, 2, "a process is recorded twice, and would count as two"),
    ],
)
def test_a_record_that_would_give_wrong_numbers_is_reported_in_one_line(
    tmp_path: Path, sample: object, copies: int, message: str
) -> None:
    run = make_run(tmp_path / "run", Recipe(replicates=1))
    first, *others = map(json.loads, (run / "points.jsonl").read_text().splitlines())
    first["samples"]["step"][0][1] = sample
    lines = [json.dumps(record) + "\n" for record in (*[first] * copies, *others)]
    (run / "points.jsonl").write_text("".join(lines))
    with pytest.raises(UsageError, match=re.escape(message)):
        Run.read(run)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "name: [", "config.yaml is damaged"),
        ("config.yaml", "[1, 2]", "is not the configuration of a run"),
        ("config.yaml", "{}", "is not the configuration of a run"),
        ("config.yaml", "5", "is not the configuration of a run"),
        ("run.json", "[]", "run.json is damaged"),
        ("environment.json", "{", "environment.json is damaged"),
    ],
)
def test_commands_that_read_runs_name_the_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    whole, run = (make_run(tmp_path / n / "run", Recipe(replicates=1)) for n in ("whole", "bad"))
    (run / name).write_text(content)
    (run / "index.html").touch()
    bundle, other = str(tmp_path / "x.zip"), str(tmp_path / "other")
    commands = [
        ["report", str(run)],
        ["compare", str(whole), str(run), "--out", other],
        ["bundle", "pack", str(run), "-o", bundle],
        *([["gallery", str(run.parent), "--out", other]] if name != "config.yaml" else []),
    ]
    for command in commands:
        assert cli.main(command) == 2, command
        assert said in capsys.readouterr().err, command


def test_keys_that_are_gone_are_not_read(tmp_path: Path) -> None:
    """The report of a gate would refuse them."""
    (tmp_path / "config.yaml").write_text("name: a\ntiming: {pool: 8, energy_seconds: 1.0}\n")
    assert read_config(tmp_path / "config.yaml") == {"name": "a", "timing": {"pool": 8}}


@pytest.mark.parametrize("setting", ["timing: null", "gate: null", "workload: ${gone}"])
def test_a_configuration_without_a_group_is_a_value_error(setting: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"name: a\n{setting}\n")
    with pytest.raises(ValueError, match=r"config\.yaml is not the configuration of a run"):
        read_config(tmp_path / "config.yaml")


def test_a_torn_line_longer_than_any_buffer_is_cut_off(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append({"number": 1})
    points = tmp_path / "points.jsonl"
    points.write_bytes(points.read_bytes() + b"x" * 10_000)
    store.append({"number": 2})
    assert [r["number"] for r in read_records(tmp_path)] == [1, 2]
    points.write_bytes(b"y" * 10_000)
    store.append({"number": 3})
    assert [r["number"] for r in read_records(tmp_path)] == [3]


def test_compressed_records_read_the_same_and_unpack_to_the_same_bytes(tmp_path: Path) -> None:
    run = tmp_path / "a-device" / "an-experiment"
    RunStore(run).append(*({"number": n, "samples": [0.1 * n] * 50} for n in range(20)))
    plain, records = (run / POINTS).read_bytes(), read_records(run)
    pack_records(run)
    assert not (run / POINTS).exists()
    assert has_records(run)
    assert not has_records(run.parent)
    assert runs_in(tmp_path, "*/*") == [run]
    assert read_records(run) == records
    unpack_records(run)
    unpack_records(run)  # nothing left to do
    assert [path.name for path in run.iterdir()] == [POINTS]
    assert (run / POINTS).read_bytes() == plain


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    target = "tests.experiments.children:append_lines"
    children = [Child(target, (str(tmp_path), writer)) for writer in range(4)]
    for writer, child in enumerate(children):
        with child:
            assert child.receive() == writer
    records = read_records(tmp_path)
    assert len(records) == 4 * 200
    for writer in range(4):
        assert [r["number"] for r in records if r["writer"] == writer] == list(range(200))


def test_a_full_disk_leaves_whole_lines_and_an_error(tmp_path: Path) -> None:
    with Child("tests.experiments.children:append_to_a_full_disk", (str(tmp_path),)) as child:
        written, error = child.receive()
    assert written > 2
    assert "File too large" in error
    text = (tmp_path / "points.jsonl").read_text()
    assert text.endswith("}\n")
    assert [r["number"] for r in read_records(tmp_path)] == list(range(written))


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    first, second = (RunStore.create(tmp_path, "x").path for _ in range(2))
    assert first != second


def test_a_directory_has_one_writer_until_it_is_gone(tmp_path: Path) -> None:
    first, second = RunStore(tmp_path), RunStore(tmp_path)
    assert first.claim()
    assert not second.claim()
    del first
    assert second.claim()


def test_derived_files_are_replaced_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write("a.txt", "old")
    store.write("a.txt", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "new")]


def test_load_is_the_results_of_several_runs(smoke_runs: Mapping[str, Path]) -> None:
    paths = [smoke_runs[name] for name in ("cache_hit_rate", "tt_vs_tbe")]
    table = experiments.load(*paths)
    assert set(table["run"]) == {p.name for p in paths}
    records = [r for p in paths for r in read_records(p)]
    kinds = Counter(r.get("kind") for r in records)
    assert len(table) == 2 * (kinds["time"] + kinds["anchor"])  # a row per phase


def test_every_raw_sample_is_kept(smoke_runs: Mapping[str, Path]) -> None:
    for name in ("tt_vs_tbe", "tbe_vs_torch", "cache_hit_rate"):
        for line in (smoke_runs[name] / "points.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert record["schema_version"] == SCHEMA_VERSION
            if record.get("kind") == "cache":
                kinds = {"lookups", "lookup_hits", "rows", "row_hits"}
                assert set(record["samples"]) - {"conflicts"} == kinds
                assert all(len(s) >= record["batches"] for s in record["samples"].values())
            elif record["status"] == "ok":
                timed = record.get("kind") != "quality"  # trained models: fewer steps are timed
                assert set(record["samples"]) == ({"forward", "step"} if timed else {"step"})
                assert all(len(s) >= (3 if timed else 1) for s in record["samples"].values())
                assert all(t > 0 for s in record["samples"].values() for _, t in s)


def test_a_report_can_be_made_of_a_copy_elsewhere(
    smoke_runs: Mapping[str, Path], tmp_path: Path
) -> None:
    run = smoke_runs["tbe_vs_torch"]
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    both = experiments.load(copy, run)
    assert dict(both["run"].value_counts()) == dict.fromkeys((str(copy), str(run)), len(both) // 2)


def test_tables_are_parquet_as_well(smoke_runs: Mapping[str, Path]) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = smoke_runs["tbe_vs_torch"]
    whole = pd.read_parquet(path / "results.parquet")
    pd.testing.assert_frame_equal(whole, experiments.load(path).drop(columns="run"))
