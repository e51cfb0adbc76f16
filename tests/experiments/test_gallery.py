"""The folder of pages: every report once, answers in the list, nothing of others removed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import cli


def main(words: Sequence[str]) -> int:
    return cli.main(["gallery", *words])


def run(folder: Path, experiment: str, name: str, status: str = "finished") -> None:
    target = folder / experiment / name
    target.mkdir(parents=True)
    info = {"experiment": experiment, "status": status}
    (target / "run.json").write_text(json.dumps(info))
    environment = {"device": "a <CPU>", "time_utc": name, "git": {"sha": "abc", "dirty": True}}
    (target / "environment.json").write_text(json.dumps(environment))
    (target / "report.md").write_text(f"# {experiment}\n\n**{experiment} is 2× [1, 3].** More.\n")
    (target / "index.html").write_text(f"<html>{experiment} {name}</html>")


def test_every_report_is_listed_with_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    run(runs, "b", "1")
    run(runs, "b", "2", "interrupted")
    run(runs, "a", "1")
    assert main([str(runs), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.index("**a**: a is 2×") < said.index("**b** (interrupted)")
    assert said.index("**b** (interrupted)") < said.index("**b**: b is 2×")  # the latest first
    page = (out / "index.html").read_text()
    assert page.count("</tr>") == 1 + 3
    assert 'href="b/2/index.html"' in page
    assert "a &lt;CPU&gt;</td>" in page
    assert "abc-dirty" in page
    assert (out / "b/2/index.html").read_text() == "<html>b 2</html>"
    assert "http" not in page  # it loads nothing


def test_runs_of_one_name_have_a_page_each(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for machine in ("cpu", "gpu"):
        run(tmp_path / "runs" / machine, "a", "1")
        (tmp_path / "runs" / machine / "a" / "1" / "index.html").write_text(machine)
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    pages = [out / "a" / name / "index.html" for name in ("1", "1-2")]
    assert sorted(page.read_text() for page in pages) == ["cpu", "gpu"]


def test_the_name_of_an_experiment_is_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    run(runs, "a", "1")
    info = {"experiment": "../../elsewhere", "status": "finished"}
    (runs / "a" / "1" / "run.json").write_text(json.dumps(info))
    assert main([str(runs), "--out", str(out)]) == 2
    assert "cannot name the folder of a run" in capsys.readouterr().err
    assert not out.exists()


def test_it_is_made_anew_and_leaves_other_folders_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    run(runs, "a", "1")
    assert main([str(runs), "--out", str(out)]) == 0
    (out / "a/old.html").touch()
    assert main([str(runs), "--out", str(out)]) == 0
    assert not (out / "a/old.html").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert main([str(runs), "--out", str(tmp_path / "mine")]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "notes.txt").exists()
    assert main([str(tmp_path / "none"), "--out", str(out)]) == 2


def test_no_samples_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    run(runs, "a", "1")
    for out in (runs, runs / "a" / "1", tmp_path):
        assert main([str(runs), "--out", str(out)]) == 2
        assert "has the runs themselves in it" in capsys.readouterr().err
    run(tmp_path / "others", "b", "1")  # a report there: not the page of a gallery
    assert main([str(runs), "--out", str(tmp_path / "others" / "b" / "1")]) == 2
    assert "no gallery" in capsys.readouterr().err
    assert (tmp_path / "others" / "b" / "1" / "run.json").exists()
    assert (runs / "a" / "1" / "run.json").exists()


def test_references_of_two_devices_have_a_page_each(tmp_path: Path) -> None:
    for device in ("cpu", "gpu"):
        run(tmp_path / "reference" / device, ".", "a")
        info = {"experiment": "a", "status": "finished"}
        (tmp_path / "reference" / device / "a" / "run.json").write_text(json.dumps(info))
    assert main([str(tmp_path / "reference"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/a/cpu/index.html").exists()
    assert (tmp_path / "out/a/gpu/index.html").exists()


def test_nothing_to_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "No run has a report." in capsys.readouterr().out
    assert "No run has a report." in (tmp_path / "out/index.html").read_text()
