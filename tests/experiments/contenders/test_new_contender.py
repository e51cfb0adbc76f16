"""Someone new follows docs/peers.md to the letter: one contender, one experiment, one command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.paths import ROOT
from experiments.results.store import read_records
from tests.experiments import in_one_process

TABLE = "experiments/contenders/contenders.yaml"
NEEDS = """
absent: {class: "one_matrix:OneMatrix", label: absent, requires: ["emblib-no-such-package==1.0"]}
"""


def files_of_the_page() -> dict[str, str]:
    """Path -> contents of every file that the page tells its reader to write."""
    page = (ROOT / "docs" / "peers.md").read_text()
    return dict(re.findall(r"^`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```$", page, re.M | re.S))


def line_of_the_page() -> str:
    """Return what the page tells its reader to add to the table of contenders."""
    page = (ROOT / "docs" / "peers.md").read_text()
    (line,) = re.findall(rf"^At the end of `{TABLE}`:\n\n```yaml\n(.*?)^```$", page, re.M | re.S)
    return str(line)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the harness with the page's files and line in it."""
    folder = tmp_path_factory.mktemp("harness")
    being_written = shutil.ignore_patterns("*.pyc.*")
    for name in ("experiments", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=being_written)
    # `list` composes every experiment: one besides that of the page is enough.
    for path in (folder / "conf/experiment").iterdir():
        if path.name != "tbe_vs_torch.yaml":
            path.unlink()
    shutil.copy(ROOT / "run.py", folder)
    (folder / "emblib").symlink_to(ROOT / "emblib")
    for path, text in files_of_the_page().items():
        assert not (folder / path).exists(), f"{path} is taken"
        (folder / path).write_text(text)
    with (folder / TABLE).open("a") as table:
        table.write(line_of_the_page())
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "run.py", *words]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_page_has_a_contender_and_an_experiment() -> None:
    assert sorted(Path(path).suffix for path in files_of_the_page()) == [".py", ".yaml"]


def test_a_stranger_finds_the_new_contender_in_the_results(harness: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    done = run(
        harness,
        "+experiment=stacking",
        "timing=smoke",
        "device=cpu",
        f"report.folder={folder}",
        "report.figures=false",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = folder.glob("stacking/*/index.html")
    assert done.stdout.splitlines()[-1] == f"report: {page}"
    records = [r for r in read_records(page.parent) if r["contender"] == "one_matrix"]
    assert len(records) == 3  # the base point and two other numbers of tables
    assert {r["status"] for r in records} == {"ok"}, [r["reason"] for r in records]
    assert all(len(r["samples"]["step"]) >= 6 for r in records)
    assert "one EmbeddingBag" in page.read_text()
    assert "one_matrix" in (page.parent / "results.csv").read_text()


def test_the_new_experiment_is_listed_and_its_names_are_checked(harness: Path) -> None:
    words = (["--help"], ["list"], ["+experiment=stacking", "contenders=[one_matrx]"])
    shown, listed, wrong = in_one_process(harness, *words)
    assert re.search(r"experiment=.*\bstacking\b", shown[1], re.DOTALL)
    assert re.search(r"stacking .*\nis one EmbeddingBag over all tables as good", listed[1])
    assert wrong[0] == 2
    assert "Did you mean 'one_matrix'?" in wrong[1]


@pytest.mark.slow
def test_what_is_not_installed_is_a_row_and_the_others_are_measured(
    harness: Path, tmp_path: Path
) -> None:
    shutil.copy(harness / "experiments/contenders/one_matrix.py", tmp_path)
    second = line_of_the_page().replace("one_matrix:", "second_matrix:", 1)
    (tmp_path / "contenders.yaml").write_text(second + NEEDS)
    words = [
        "contenders=[tbe,second_matrix,absent]",
        "sweep.T=[]",
        "report.subject=absent",
        "report.figures=false",
    ]
    environment = os.environ | {"EMBLIB_CONTENDERS": str(tmp_path)}
    done = subprocess.run(
        [
            sys.executable,
            "run.py",
            "+experiment=stacking",
            "timing=smoke",
            "device=cpu",
            *words,
            f"report.folder={tmp_path / 'runs'}",
        ],
        cwd=harness,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (tmp_path / "runs").glob("stacking/*/index.html")
    rows = {r["contender"]: r for r in read_records(page.parent)}
    assert {name: r["status"] for name, r in rows.items()} == {
        "tbe": "ok",
        "second_matrix": "ok",
        "absent": "missing",
    }
    assert rows["absent"]["reason"] == "not installed: pip install emblib-no-such-package==1.0"
    assert "pip install emblib-no-such-package==1.0" in page.read_text()
