"""Comparisons of runs in bundles, and of a bundle with a directory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import cli, compare
from experiments.bundle import archive
from experiments.bundle.archive import BundleError
from experiments.compare import machines, pages
from experiments.compare.machines import NotComparable, group_by_experiment
from experiments.paths import ROOT
from tests.experiments import FIRST_SCHEMA, command_line

main = command_line(compare)


def packed(path: Path, *experiments: str) -> Path:
    """Make a bundle with a run of each experiment: the committed run under other names."""
    contents = {}
    for name in experiments:
        for file in FIRST_SCHEMA.iterdir():
            data = file.read_bytes() if file.is_file() else b""
            if file.name == "config.yaml":
                data = data.replace(b"name: tt_vs_tbe", f"name: {name}".encode())
            contents[f"runs/{name}/20260101-1/{file.name}"] = data
    archive.write(path, contents)
    return path


def test_directories_are_one_comparison(tmp_path: Path) -> None:
    assert group_by_experiment([FIRST_SCHEMA, tmp_path], tmp_path) == [
        ("", [FIRST_SCHEMA, tmp_path])
    ]


def test_every_experiment_that_all_have_is_compared(tmp_path: Path) -> None:
    first = packed(tmp_path / "a.zip", "tt_vs_tbe", "peers", "micro")
    second = packed(tmp_path / "b.zip", "peers", "tt_vs_tbe")
    found = group_by_experiment([first, second], tmp_path / "out")
    assert sorted(name for name, _ in found) == ["peers", "tt_vs_tbe"]
    for name, paths in found:
        assert [path.parent.name for path in paths] == [name, name]
    ((name, (_, directory)),) = group_by_experiment([first, FIRST_SCHEMA], tmp_path / "mixed")
    assert (name, directory) == ("tt_vs_tbe", FIRST_SCHEMA)


def test_bundles_without_a_common_experiment_are_named(tmp_path: Path) -> None:
    paths = [packed(tmp_path / "a.zip", "peers"), packed(tmp_path / "b.zip", "micro")]
    with pytest.raises(NotComparable, match=r"a\.zip: peers; b\.zip: micro"):
        group_by_experiment(paths, tmp_path / "out")
    assert main([*map(str, paths)]) == 6


@pytest.mark.parametrize(
    ("name", "failing"), [("runs/b.zip", False), ("b.zip", False), ("runs/b.zip", True)]
)
def test_a_run_of_another_machine_is_copied(
    name: str,
    failing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def scp(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        source, target = command[-2:]
        assert source == f"someone@gpu-host:{name}"
        if not failing:
            packed(Path(target) / "b.zip", "tt_vs_tbe")
        return subprocess.CompletedProcess(command, int(failing), "", "no route to host")

    monkeypatch.setattr(machines.subprocess, "run", scp)
    remote = Path(f"someone@gpu-host:{name}")
    if failing:
        assert cli.main(["compare", str(FIRST_SCHEMA), str(remote)]) == 2
        assert "could not be copied: no route to host" in capsys.readouterr().err
        return
    compared = group_by_experiment(
        [FIRST_SCHEMA, machines.fetch(remote, tmp_path)], tmp_path / "out"
    )
    assert [experiment for experiment, _ in compared] == ["tt_vs_tbe"]


def test_a_path_of_this_machine_is_not_copied(tmp_path: Path) -> None:
    here = tmp_path / "some:run"
    here.mkdir()
    for path in (here, FIRST_SCHEMA, Path("none.zip")):
        assert machines.fetch(path, tmp_path) == path


@pytest.mark.parametrize("experiment", ["peers", "tt_vs_tbe"])
def test_the_committed_generations_are_those_of_the_references(experiment: str) -> None:
    folders = [
        f"reports/reference/{name}/{experiment}"
        for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200")
    ]
    command = f"python run.py compare {' '.join(folders)}"
    comparison = machines.Comparison.read([ROOT / folder for folder in folders])
    stored = (ROOT / "reports/generations" / experiment / "report.md").read_text()
    assert pages.page_of(comparison, command).markdown() == stored, (
        f"{command} --out reports/generations/{experiment}"
    )


def test_a_damaged_or_missing_bundle_is_wrong_usage(tmp_path: Path) -> None:
    bad = tmp_path / "bad.zip"
    bad.write_bytes(b"no archive")
    with pytest.raises(BundleError, match="damaged"):
        group_by_experiment([bad, FIRST_SCHEMA], tmp_path / "out")
    for path in (bad, tmp_path / "none.zip"):
        assert cli.main(["compare", str(path), str(FIRST_SCHEMA)]) == 2


def test_a_page_per_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(paths: list[Path], out: Path, command: str) -> Path:
        written.append((out, all(path.is_dir() for path in paths)))
        return out

    monkeypatch.setattr("experiments.compare.pages.write", write)
    two = packed(tmp_path / "a.zip", "tt_vs_tbe", "peers")
    other = tmp_path / "b.zip"
    shutil.copy(two, other)
    assert main([str(two), str(other), "--out", str(tmp_path / "pages")]) == 0
    assert sorted(written) == [
        (tmp_path / "pages/peers", True),
        (tmp_path / "pages/tt_vs_tbe", True),
    ]
