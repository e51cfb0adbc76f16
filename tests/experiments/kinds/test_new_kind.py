"""A new kind of experiment: one file and one line, and it runs, reports and is in the README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments.paths import ROOT
from experiments.results.store import read_records
from tests.experiments import in_one_process

KIND = '''"""The kind `locality`: how many rows a batch shares with the one before."""

import dataclasses

import pandas as pd

from experiments.config.schema import Mode
from experiments.kinds.base import ArmRules, Comparability, Repetition, Kind, Measurement, Reporting


@dataclasses.dataclass
class Options:
    """How many batches are drawn."""

    batches: int = 4


class Locality(Kind):
    """How many lookups go to rows of the batch before?"""

    name = "locality"
    options = Options
    arms = ArmRules(only_arm="lookups")
    measurement = Measurement(repetition=Repetition.ONCE, modes=(Mode.hot,), makes_tables=False)
    reporting = Reporting(
        comparability=Comparability.MACHINES, success="None: {count} workloads were drawn."
    )

    def measure(self, cell, session, seconds):
        from experiments.measure.outcome import Outcome, make_record, pool_entries
        from experiments.workloads.workload import make_pool, table_shapes

        shapes = table_shapes(cell.workload, scale=cell.rows_scale)
        pool = make_pool(cell.workload, shapes, session.config.options["batches"], session.seed)
        rows = [set(batch.indices.tolist()) for batch in pool.batches]
        share = sum(len(a & b) / len(b) for a, b in zip(rows, rows[1:])) / (len(rows) - 1)
        record = make_record(cell, Outcome(cell.arms[0]), session) | pool_entries(pool)
        return [record | {"repeated": share}]

    def progress(self, records):
        return f"{100 * records[0]['repeated']:.0f} % repeated"

    def frames(self, records, settings):
        keys = ("cell", "repeated")
        own = [r for r in records if r["kind"] == self.name and r["status"] == "ok"]
        return {"locality": pd.DataFrame([{key: r[key] for key in keys} for r in own])}

    def answer(self, run):
        share = run.frame("locality")["repeated"].mean()
        return [f"{100 * share:.1f} % of the rows of a batch were in the batch before."]

    def figures(self, run):
        from experiments.report.style import Figure, Panel

        def draw(axes):
            axes.barh(run.frame("locality")["cell"], 100 * run.frame("locality")["repeated"])

        return [Figure("locality", "Rows repeated", "In %.", "", [Panel("Repeated", draw)])]

    def readme_lines(self, run, command, link):
        lines = [f"| {c} | {s:.2f} |" for c, s in run.frame("locality").itertuples(index=False)]
        return [f"{command}:", "", "| cell | share |", "| --- | ---: |", *lines, link]
'''
LINE = '    "locality": "experiments.kinds.locality:Locality",\n'
EXPERIMENT = """# @package _global_
# Question: how many rows does a batch share with the one before?
name: locality
kind: locality
workload: {T: 1, E: 1000, D: 8, B: 64, L: 2}
options: {batches: 3}
sweep: {s: [0.5, 1.5]}
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the harness with the kind's file and its line."""
    folder = tmp_path_factory.mktemp("harness")
    for name in ("experiments", "conf"):
        being_written = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / name, folder / name, ignore=being_written)
    shutil.copy(ROOT / "run.py", folder)
    (folder / "emblib").symlink_to(ROOT / "emblib")
    (folder / "experiments/kinds/locality.py").write_text(KIND)
    (folder / "conf/experiment/locality.yaml").write_text(EXPERIMENT)
    table = folder / "experiments/kinds/__init__.py"
    text = table.read_text()
    table.write_text(text.replace("KINDS = {\n", f"KINDS = {{\n{LINE}", 1))
    # The ceilings of the machine, which no test here looks at, as smoke runs measure them.
    worker = folder / "experiments/run/worker.py"
    text = worker.read_text()
    assert text.count("\nCEILING_SECONDS = 1.5") == 1
    worker.write_text(text.replace("\nCEILING_SECONDS = 1.5", "\nCEILING_SECONDS = 0.0"))
    return folder


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_new_kind_runs_reports_and_is_in_the_readme(harness: Path, tmp_path: Path) -> None:
    words = ("+experiment=locality", "device=cpu", "timing=quick")
    done = python(harness, "run.py", *words, f"report.folder={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"sweep +D=8 B=64 L=2 .*% repeated", done.stdout)
    (path,) = (tmp_path / "locality").iterdir()
    records = read_records(path)
    assert [r["kind"] for r in records] == ["locality"] * 3
    assert {r["pool_batches"] for r in records} == {3}

    table = pd.read_csv(path / "locality.csv")
    assert list(table["cell"]) == [r["cell"] for r in records]
    answer = "of the rows of a batch were in the batch before."
    for name in ("report.md", "index.html"):
        text = (path / name).read_text()
        assert answer in text
        assert "None: 3 workloads were drawn." in text
    assert (path / "locality.png").is_file()
    assert answer in done.stdout

    kept = tmp_path / "reference" / "a-machine" / "locality"
    shutil.copytree(path, kept)
    program = (
        "from pathlib import Path; from experiments import reference; "
        f"print(reference.results_block(Path({str(tmp_path / 'reference')!r})))"
    )
    readme = python(harness, "-c", program)
    assert readme.returncode == 0, readme.stderr
    assert "| cell | share |" in readme.stdout
    assert readme.stdout.count("| sweep T=1") == 3


def test_options_of_a_kind_are_checked(harness: Path) -> None:
    words = ["+experiment=locality", "device=cpu"]
    unknown, fewer, wrong = in_one_process(
        harness,
        [*words, "options.batches=two"],
        [*words, "options.batches=2", "dry_run=true"],
        [*words, "kind=localty"],
    )
    assert unknown[0] == 2
    assert "options.batches: Value 'two' of type 'str' could not be converted" in unknown[1]
    assert fewer[0] == 0, fewer[1]
    assert wrong[0] == 2
    assert "Did you mean 'kind=locality'?" in wrong[1]
