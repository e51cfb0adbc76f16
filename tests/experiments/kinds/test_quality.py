"""The kind quality: a run trains, reports and can be read again; wrong options are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import cli
from experiments.config.schema import Config, WorkloadConfig
from experiments.config.sweep import Arm, Cell
from experiments.kind_reports.quality import excess_sentence
from experiments.kinds.quality import QualityOptions, frame, t_interval
from experiments.measure.quality import quality_cell
from experiments.measure.session import Session
from experiments.report.data import Run
from experiments.results.store import read_records
from tests.experiments.smoke_host import SmokeHost

SMALL = (
    "+experiment=quality",
    "device=cpu",
    "device.threads=1",
    "timing=quick",
    "timing.replicates=2",
    "workload.B=256",
    "contenders=[plain,hashed,narrow,tt_permuted,tt_as_given,tt_from_plain]",
    "options.samples=1500",
    "options.scale=0.0004",
    "options.data=[planted]",
    "options.shares=[0.25,0.03]",
    "options.rates=[0.05,0.1]",
    "options.timed_steps=3",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smoke_host: SmokeHost) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    status, output, errors = smoke_host.run([*SMALL, f"report.folder={folder}"], folder)
    assert status == 0, output + errors
    (path,) = (folder / "quality").iterdir()
    return path


def test_a_run_trains_every_method_on_every_seed(run: Path) -> None:
    records = read_records(run)
    assert {r["replicate"] for r in records} == {0, 1}
    status = {(r["arm"], r["status"]) for r in records}
    assert ("narrow@0.03", "unsupported") in status
    assert {s for arm, s in status if arm != "narrow@0.03"} == {"ok"}
    good = [r for r in records if r["status"] == "ok"]
    assert {r["rate"] for r in good} <= {0.05, 0.1}
    assert all(0.4 < r["auc"] < r["oracle_auc"] for r in good)
    assert all(r["log_loss"] > r["oracle_loss"] for r in good)
    assert all(len(r["samples"]["step"]) == 3 for r in good)


def test_numbers_and_words_of_a_run(run: Path) -> None:
    table = pd.read_csv(run / "quality.csv")
    good = table[table["status"] == "ok"].set_index("arm")
    assert good.loc["plain", "auc_change"] == 0
    assert good.loc["plain", "ratio"] == 1
    assert (good["auc_change_lo"] <= good["auc_change"]).all()
    small = good.drop("plain")
    assert (small["times_smaller"] >= 0.99 / small["share"]).all()
    for name in ("report.md", "index.html"):
        text = (run / name).read_text()
        assert "of the bytes of the large tables" in text
        assert "Permuting the ids of a tensor train changes the AUC" in text
        assert "planted clicks on" in text
        assert "Best of 4 methods: on planted" in text  # "narrow" has no result at this share
    assert (run / "quality.png").is_file()
    assert (run / "quality_time.png").is_file()


def test_lines_of_the_readme(run: Path) -> None:
    found = Run.read(run)
    lines = found.kind.readme_lines(found, "- `quality`", "[Full report](x)")
    assert lines[0] == "- `quality`:"
    assert "Change of AUC with large tables of 1/33" in lines[2] or "1/4" in lines[2]
    (hashed,) = [line for line in lines if line.startswith("| hashed |")]
    assert hashed.count("|") == 4
    assert "[" in hashed


def test_the_readme_names_methods_with_more_than_their_share() -> None:
    rows = pd.DataFrame(
        {
            "contender": ["plain", "hashed", "evicting", "evicting"],
            "share": [1.0, 0.25, 0.25, 0.25],
            "times_smaller": [1.0, 3.99, 4 / 1.4, 4 / 1.5],
        }
    )
    expected = " More than these bytes had: dynamic, evicting, by 40 % to 50 %."
    assert excess_sentence(rows) == expected
    assert excess_sentence(rows[:2]) == ""


def test_a_case_of_another_experiment(smoke_runs: Mapping[str, Path]) -> None:
    path = smoke_runs["tt_vs_tbe"]
    record = next(r for r in read_records(path) if r["kind"] == "quality")
    assert record["section"] == "quality"
    assert record["samples_of"]["train"] == 420
    assert "Trained on planted data with tensor trains of 1/16" in (path / "report.md").read_text()
    assert (path / "quality.png").is_file()
    assert (path / "results.csv").is_file()


def test_differences_are_paired_by_seed() -> None:
    def record(arm: str, seed: int, auc: float) -> dict[str, object]:
        return {
            "kind": "quality", "section": "planted", "title": "", "arm": arm, "contender": arm,
            "label": arm, "reason": "", "cache": 0.0, "status": "ok", "replicate": seed,
            "auc": auc, "log_loss": 1 - auc, "rate": 0.1, "samples": {"step": [(1, 1.0)]},
        }  # fmt: skip

    seeds = [("plain", 0, 0.7), ("plain", 1, 0.8), ("hashed", 0, 0.69), ("hashed", 1, 0.77)]
    row = frame([record(*one) for one in seeds]).set_index("arm").loc["hashed"]
    assert row["auc_change"] == pytest.approx(-0.02)
    # The t quantile of one degree of freedom is 12.706, the deviation sqrt(2) / 100.
    assert row["auc_change_hi"] == pytest.approx(-0.02 + 12.7062 * 0.01, rel=1e-4)
    assert row["log_loss_change"] == pytest.approx(0.02)
    wrong = record("hashed", 1, 0.77) | {"status": "wrong", "reason": "differs"}
    row = frame([record(*one) for one in seeds[:3]] + [wrong]).set_index("arm").loc["hashed"]
    assert (row["status"], row["reason"], row["seeds"]) == ("wrong", "differs", 0)


def test_one_seed_has_no_interval() -> None:
    assert t_interval([0.5])[0] == 0.5
    assert all(math.isnan(end) for end in t_interval([0.5])[1:])


def test_a_file_of_too_few_samples_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "views.csv").write_text("user,item,time\n1,2,3\n4,5,6\n")
    workload = WorkloadConfig(B=4, D=4, file=str(tmp_path / "views.csv"))
    options = dataclasses.asdict(QualityOptions(data=["interactions"], samples=0))
    cell = Cell("views", "", workload, (Arm("plain"),), kind="quality", options=options)
    (record,) = quality_cell(cell, Session(Config(), torch.device("cpu"), "test"), 1.0)
    assert record["status"] == "error"
    assert "interactions: 4 samples, fewer than 10" in record["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["contenders=[plain,tbe]"], "kind=quality trains plain, bf16, narrow"),
        (["options.shares=[2]"], "options.shares must be in (0, 1]"),
        (["options.rates=[]"], "options.rates must not be empty"),
        (["options.data=[criteo]"], "say options.path=FILE"),
        (["options.data=[nothing]"], "options.data must be among planted, movielens"),
        (["options.epochs=0"], "options.epochs must be >= 1, got 0"),
        (["options.timed_steps=0"], "options.timed_steps must be >= 1, got 0"),
        (["options.samples=-1"], "options.samples must be 0 or >= 10, got -1"),
        (["options.scale=0"], "options.scale must be > 0, got 0.0"),
        (["options.large=2"], "options.large must be in [0, 1], got 2.0"),
        (["optimizer=sgd"], "trains tables with adagrad"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["+experiment=quality", "device=cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cases.quality.options.shares=[]"], "cases.quality.options.shares must not be empty"),
        (["cases.quality.options.share=[1]"], "cases.quality.options.share"),
        (["cases.quality.kind=qualty"], "Did you mean 'cases.quality.kind=quality'?"),
        (["cases.quality.kind=''"], "needs a kind that has them"),
        (["cases.quality.contenders=[plain,hased]"], "Did you mean 'hashed'?"),
    ],
)
def test_wrong_options_of_a_case(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["+experiment=tt_vs_tbe", "device=cpu", *words]) == 2
    assert message in capsys.readouterr().err
