"""The map of outcomes, whatever pandas makes of texts; reports of what is not known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import cli
from experiments.report import Run, figures, outcomes, write_report
from tests.experiments.made_up import Recipe, lines, make_run

SMALL = (
    *("+experiment=tt_vs_tbe", "sweep.D=[16]", "sweep.B=[]", "sweep.L=[]", "sweep.s=[]"),
    *("sweep.rank=[]", "report.figures=false"),
)


@pytest.fixture
def strict_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pandas refuse to add empty columns of two dtypes, as 3.0 does where pyarrow is there."""
    add = pd.Series.__add__

    def strict(self: pd.Series, other: Any) -> pd.Series:
        if isinstance(other, pd.Series) and not len(self) and self.dtype != other.dtype:
            raise TypeError(f"operation 'radd' not supported for {other.dtype} with {self.dtype}")
        return add(self, other)

    monkeypatch.setattr(pd.Series, "__add__", strict)


@pytest.mark.usefixtures("strict_texts")
def test_the_report_of_a_run_without_failures(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Recipe(words=SMALL))
    assert "None: all" in outcomes.failures_sentence(Run.read(path))
    write_report(path)
    assert (path / "index.html").exists()


def test_reasons_of_several_processes_and_a_missing_one(tmp_path: Path) -> None:
    fates = {0: ("ok", ""), 1: ("oom", "too large"), 2: ("error", None)}
    path = make_run(
        tmp_path / "run",
        Recipe(words=SMALL, fate=lambda arm, cell, process: fates[process]),  # type: ignore[arg-type, return-value]
    )
    found = outcomes.outcome_frame(Run.read(path))
    assert set(found["status"]) == {"partly"}
    assert set(found["reason"]) == {"oom: too large; error: "}
    assert set(found["num_ok"]) == {1}


def test_a_repeated_process_is_not_the_last(tmp_path: Path) -> None:
    fates = {0: ("error", "first"), 1: ("oom", "second")}
    path = make_run(
        tmp_path / "run",
        Recipe(words=SMALL, replicates=2, fate=lambda arm, cell, process: fates[process]),
    )
    records = lines(path)
    again = [record for record in records if record["replicate"] == 0]
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records + again))
    found = outcomes.outcome_frame(Run.read(path))
    assert set(found["status"]) == {"error"}
    assert set(found["process"]) == {0}
    assert set(found["reason"]) == {"first; second"}


def test_each_mode_has_a_map(tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "run",
        Recipe(words=SMALL, modes=("hot", "cold"), fate=lambda arm, cell, process: ("oom", "")),
    )
    (figure,) = outcomes.outcome_figures(Run.read(path))
    assert [panel.title for panel in figure.panels] == ["Outcomes, hot", "Outcomes, cold"]


UNKNOWN = (
    "optimizer",
    "mode",
    "status",
    "contender",
    "stop_reason",
    "flags",
    "params.distribution",
)


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_value_of_a_newer_harness_has_a_report(key: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    records = lines(path)
    for record in records:
        *outer, name = key.split(".")
        target = record[outer[0]] if outer else record
        target[name] = ["unheard_of"] if key == "flags" else "unheard_of"
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    write_report(path)
    assert "How to read this" in (path / "index.html").read_text()
    if key == "status":
        assert outcomes.failures_sentence(Run.read(path)).endswith(f": {len(records)} unheard_of.")
    if key == "optimizer":  # the bytes of its state are not known here
        (figure,) = figures.roofline_figures(Run.read(path))
        assert [panel.title for panel in figure.panels] == ["Forward"]


def test_a_kind_that_is_not_known_here_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("kind: time", "kind: unheard_of", 1))
    assert cli.main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert "this harness has no kind of experiment 'unheard_of'. There is: time, " in error
    assert len(error.strip().splitlines()) == 1
