"""The kind predictions: its constants, its terms, its numbers, and wrong options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import cli
from experiments.kinds.predictions import frame
from experiments.measure import predictions
from experiments.measure.predictions import CACHE_TERMS, TERMS
from experiments.results.store import read_records


def test_a_smoke_run_times_and_predicts_every_kind_of_step(smoke_runs: Mapping[str, Path]) -> None:
    run = smoke_runs["tt_predictions"]
    (record,) = read_records(run)
    assert record["status"] == "ok"
    assert list(record["constants"]) == list(TERMS)
    assert all(value >= 0 for value in record["constants"].values())
    (of_cache,) = record["cache_constants"].values()
    assert list(of_cache) == list(CACHE_TERMS)
    table = pd.read_csv(run / "predictions.csv")
    # Three skews: without a cache in two orders of ids, with one in one.
    assert len(table) == 9
    assert set(table["skew"]) == {0.0, 1.05, 1.2}
    assert np.allclose(table["ratio"], table["predicted_s"] / table["measured_s"])
    plain, cached = table[table["cached"] == 0], table[table["cached"] > 0]
    assert (plain["row_hit_rate"] == 0).all()
    assert cached.sort_values("skew")["hit_rate"].is_monotonic_increasing
    skewed = cached[cached["skew"] > 0]
    assert (skewed["row_hit_rate"] < skewed["hit_rate"]).all()
    # Of as many lookups, more skewed ones are of fewer rows.
    assert plain[plain["order"] == "permuted"].sort_values("skew")["rows"].is_monotonic_decreasing
    for name in ("report.md", "index.html"):
        text = (run / name).read_text()
        assert "With constants of uniform ids, the predicted time" in text
        assert "the hit rate of lookups alone predicts" in text
        assert "Constants of the model" in text
    assert (run / "predictions.png").is_file()


def test_constants_are_found_again_and_never_below_zero() -> None:
    draw = np.random.default_rng(0)
    terms = draw.random((20, 3)) * (1.0, 1e4, 1e9)
    constants = np.array([1e-4, 2e-8, 3e-12])
    assert predictions._fit_constants(terms, terms @ constants) == pytest.approx(
        constants, rel=1e-6
    )
    falling = predictions._fit_constants(terms, 1.0 - 1e-10 * terms[:, 2])
    assert (falling >= 0).all()


def test_steps_of_a_small_table_look_up_its_rows() -> None:
    options = {"ranks": [4], "cached": [], "lookups": [640], "skews": [1.05]}
    workload, arms = SimpleNamespace(E=60, D=16, L=20), [SimpleNamespace(key="trains")]
    cell: Any = SimpleNamespace(workload=workload, arms=arms, options=options)
    session: Any = SimpleNamespace(seed=0, note=print)
    steps = predictions._Experiment(cell, session).steps
    assert len(steps) == 14  # of each order six fitted ones and a predicted one
    assert all(int(ids.max()) < 60 for step in steps for ids, _ in step.batches)


def point(**changes: Any) -> dict[str, Any]:
    same = {"rank": 16, "skew": 1.2, "order": "permuted", "lookups": 640, "cached": 0.0}
    numbers = {"rows": 10.0, "hit_rate": 0.0, "row_hit_rate": 0.0, "by_hits_s": 2.0}
    return {**same, **numbers, "predicted_s": 1.0, "two_terms_s": None, **changes}


def test_processes_of_one_kind_of_step_are_one_row() -> None:
    samples = [[[1, 2.0], [2, 4.0], [3, 2.0]], [[1, 0.5]], [[1, 1.0]]]
    records = [
        {"kind": "predictions", "status": "ok", "points": [point(samples=own)]} for own in samples
    ]
    failed = {"kind": "predictions", "status": "error"}
    (row,) = frame([*records, failed]).to_dict("records")
    assert (row["processes"], row["measured_s"]) == (3, 1.0)
    assert (row["ratio_lo"], row["ratio"], row["ratio_hi"]) == (0.5, 1.0, 2.0)
    assert np.isnan(row["two_terms_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer=adagrad"], "kind=predictions times steps of sgd"),
        (["options.ranks=[]"], "options.ranks must not be empty"),
        (["options.lookups=[0]"], "options.lookups must be >= 1"),
        (["options.skews=[-1]"], "options.skews must be >= 0"),
        (["options.cached=[2]"], "options.cached must be in (0, 1]"),
        (["options.rounds=0"], "options.rounds must be >= 1"),
    ],
)
def test_wrong_options(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["+experiment=tt_predictions", "timing=smoke", f"report.folder={tmp_path}", *words]
    assert cli.main(given) != 0
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
