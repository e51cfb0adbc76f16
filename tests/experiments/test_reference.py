"""Runs become references by one command."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments import cli, reference
from experiments.config.schema import UsageError
from experiments.paths import REFERENCE
from experiments.report import Run
from experiments.results.store import has_records
from tests.experiments.made_up import Recipe, make_run


def test_a_machine_is_added_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []
    kept = REFERENCE / "another-machine" / "tt_vs_tbe"
    monkeypatch.setattr(reference, "latest_run", lambda name: tmp_path)
    monkeypatch.setattr(reference, "keep", lambda run: kept)

    def call(*words: str) -> int:
        asked.append(words)
        return int("+experiment=tbe_vs_torch" in words)

    monkeypatch.setattr(reference, "_run_py", call)
    status = cli.main(["reference", "add", "tt_vs_tbe", "tbe_vs_torch", "timing=quick"])
    assert status == 1  # one of the two failed
    assert asked[0] == ("+experiment=tt_vs_tbe", "timing=quick")
    assert asked[1][0] == "compare"
    assert asked[1][1].endswith("amd-epyc-2-threads/tt_vs_tbe")
    assert asked[1][2].endswith("another-machine/tt_vs_tbe")
    assert asked[-2:] == [("reference", "write"), ("compare", "--overview", "write")]
    assert "tbe_vs_torch: the run failed and is not stored" in capsys.readouterr().err
    assert cli.main(["reference", "add", "tt_vs_tb"]) == 2
    assert "no experiment 'tt_vs_tb'" in capsys.readouterr().err
    assert cli.main(["reference", "add", "tt_vs_tbe", "timin=quick"]) == 2
    assert "Did you mean" in capsys.readouterr().err
    for setting in ("report.folder=elsewhere", "dry_run=true", "name=mine", "++name=mine"):
        assert cli.main(["reference", "add", "tt_vs_tbe", setting]) == 2
        assert f"{setting}: `reference add` stores new runs" in capsys.readouterr().err
    assert set(reference.experiments_to_run([])) >= {"tt_vs_tbe", "cache_hit_rate"}


@pytest.mark.parametrize("name", ["../kept", "..", "/tmp/kept"])
def test_a_run_whose_name_is_a_path_is_not_kept(name: str, tmp_path: Path) -> None:
    """What is at the place of a reference is removed first."""
    small = ("+experiment=tbe_vs_torch", "sweep.T=[]", "sweep.E=[]")
    run = make_run(tmp_path / "run", Recipe(words=small, replicates=1))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: tbe_vs_torch", f"name: {name}"))
    assert str(Run.read(run).config.name) == name
    kept = tmp_path / "references" / "kept"
    kept.mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot name the folder of a run"):
        reference.keep(run, tmp_path / "references")
    assert kept.exists()


SMALL = ("+experiment=tbe_vs_torch", "sweep.T=[]", "sweep.E=[]")


def test_a_stored_reference_is_not_replaced_by_itself(tmp_path: Path) -> None:
    """What is at the place of a reference is removed first: here that is the run itself."""
    run = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    stored = reference.keep(run, tmp_path / "references")
    with pytest.raises(UsageError, match="is the stored reference itself"):
        reference.keep(stored, tmp_path / "references")
    assert has_records(stored)


def test_a_copy_that_fails_leaves_the_earlier_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    stored = reference.keep(run, tmp_path / "references")
    contents = {path.name: path.read_bytes() for path in stored.iterdir()}
    monkeypatch.delattr(reference, "pack_records")
    with pytest.raises(NameError):
        reference.keep(run, tmp_path / "references")
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == contents
    assert list(stored.parent.iterdir()) == [stored]
    monkeypatch.undo()
    assert reference.keep(run, tmp_path / "references") == stored
    assert list(stored.parent.iterdir()) == [stored]


def test_an_unfinished_run_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"status": "interrupted"}))
    assert cli.main(["reference", "keep", str(run)]) == 2
    assert "only a finished run at full size can be a reference" in capsys.readouterr().err
    (run / "run.json").write_text(json.dumps(info))
    (run / "points.jsonl").write_text("")
    assert cli.main(["reference", "keep", str(run)]) == 2
    assert "nothing that it measured succeeded" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["time", "cache", "quality"])
def test_a_run_without_the_results_of_its_headline_has_its_answer_in_the_readme(kind: str) -> None:
    others = pd.DataFrame({"cell": ["another"], "status": ["ok"]})
    run = SimpleNamespace(
        table=others,
        traces=pd.DataFrame(),
        headline_cell=lambda: "headline",
        frame=lambda name: pd.DataFrame(),
    )
    report = importlib.import_module(f"experiments.kind_reports.{kind}")
    assert report.readme_lines(run, "command", "link") is None
