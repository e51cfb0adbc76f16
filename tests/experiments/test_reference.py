"""Runs become references by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import cli, reference
from experiments.config.schema import UsageError
from experiments.paths import REFERENCE
from experiments.report import Run
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
    assert status == 1  # one of the two did not finish well
    assert asked[0] == ("+experiment=tt_vs_tbe", "timing=quick")
    assert asked[1][0] == "compare"
    assert asked[1][1].endswith("amd-epyc-2-threads/tt_vs_tbe")
    assert asked[1][2].endswith("another-machine/tt_vs_tbe")
    assert asked[-2:] == [("reference", "write"), ("compare", "--overview", "write")]
    assert "tbe_vs_torch: did not finish well and is not kept" in capsys.readouterr().err
    assert cli.main(["reference", "add", "tt_vs_tb"]) == 2
    assert "no experiment 'tt_vs_tb'" in capsys.readouterr().err
    assert cli.main(["reference", "add", "tt_vs_tbe", "timin=quick"]) == 2
    assert "Did you mean" in capsys.readouterr().err
    for setting in ("report.folder=elsewhere", "dry_run=true"):
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
