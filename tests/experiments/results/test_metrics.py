"""Literal records to literal numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experiments.results import metrics


def record(**changes: Any) -> dict[str, Any]:
    """Two features of D = 4, B = 3, 2 lookups a bag: 12 lookups, 10 distinct rows."""
    base: dict[str, Any] = {
        "section": "sweep",
        "cell": "c",
        "contender": "tbe",
        "rank": 0,
        "arm": "tbe",
        "label": "TBE",
        "status": "ok",
        "reason": "",
        "stop_reason": "max_rounds",
        "optimizer": "sgd",
        "params": {"D": 4, "B": 3},
        "features": 2,
        "columns": 8,
        "lookups": 12,
        "unique_rows": 10.0,
        "dense_bytes": 1000,
        "weights_bytes": 1000,
        "optimizer_state_bytes": 0,
        "peak_bytes": 64,
        "rows_scale": 1.0,
        "samples": {"forward": [[0, 1e-6], [1, 3e-6]], "step": [[0, 4e-6], [1, 8e-6]]},
    }
    return base | changes


def test_useful_bytes_of_a_forward() -> None:
    rows, ids, offsets, output = 12 * 16, 12 * 8, 7 * 8, 3 * 8 * 4
    assert metrics.useful_bytes(record(), "forward") == rows + ids + offsets + output == 440
    distinct = metrics.useful_bytes(record(), "forward", distinct=True)
    assert distinct == 440 - 2 * 16


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("rowwise_adagrad", 4), ("adagrad", 16)]
)
def test_useful_bytes_of_a_step(optimizer: str, state: int) -> None:
    gradient, update = 96, 10 * 2 * (16 + state)
    got = metrics.useful_bytes(record(optimizer=optimizer), "step")
    assert got == 440 + gradient + update


def test_frame_pairs_with_the_baseline_of_the_same_cell() -> None:
    slow = {"forward": [[0, 2e-6], [1, 6e-6]], "step": [[0, 40e-6], [1, 80e-6]]}
    records = [
        record(),
        record(arm="tt-8", contender="tt", rank=8, samples=slow, weights_bytes=10),
        record(cell="elsewhere", samples=slow),
    ]
    table = metrics.frame(records, "tbe").set_index(["cell", "arm", "phase"])
    tt = table.loc[("c", "tt-8", "step")]
    assert tt["ratio"] == pytest.approx(10.0)
    assert tt["median_s"] == pytest.approx(60e-6)
    assert tt["ns_per_lookup"] == pytest.approx(5000.0)
    assert tt["useful_gb_s"] == pytest.approx((440 + 96 + 320) / 60e-6 / 1e9)
    assert tt["compression"] == 100
    assert table.loc[("elsewhere", "tbe", "step")]["ratio"] == pytest.approx(1.0)


def test_a_failed_contender_is_a_row_without_numbers() -> None:
    failed = record(arm="tt-8", status="oom", reason="no room", samples={}, weights_bytes=None)
    table = metrics.frame([record(), failed], "tbe")
    rows = table[table["arm"] == "tt-8"]
    assert list(rows["status"]) == ["oom", "oom"]
    assert list(rows["reason"]) == ["no room", "no room"]
    assert rows[["median_s", "ratio", "useful_gb_s", "compression"]].isna().all().all()


def test_a_ratio_compares_the_faster_samples_of_a_round() -> None:
    disturbed = {"forward": [], "step": [[0, 2e-6], [1, 90e-6], [1, 2e-6], [0, 70e-6]]}
    calm = {"forward": [], "step": [[0, 1e-6], [1, 1e-6], [1, 1e-6], [0, 1e-6]]}
    records = [record(samples=calm), record(arm="tt-8", samples=disturbed)]
    table = metrics.frame(records, "tbe").set_index(["arm", "phase"])
    row = table.loc[("tt-8", "step")]
    assert row["ratio"] == pytest.approx(2.0)
    assert row["samples"] == 4
    assert row["median_s"] == pytest.approx(36e-6)  # of all four: nothing is dropped


def test_no_baseline_no_ratio() -> None:
    table = metrics.frame([record(status="wrong")], "tbe")
    assert math.isnan(table["ratio"].iloc[0])


def test_the_reason_is_of_the_process_that_decides_the_status() -> None:
    wrong = record(replicate=1, status="wrong", reason="rows differ", samples={})
    outcome = metrics.outcome_of([record(replicate=0), wrong])
    assert outcome == {"status": "wrong", "reason": "rows differ"}
    oom = record(replicate=0, status="oom", reason="no room", samples={})
    assert metrics.outcome_of([oom, record(replicate=1)]) == {"status": "ok", "reason": ""}
    rows = metrics.frame([record(replicate=0), wrong], "tbe")
    assert list(rows["reason"]) == ["rows differ"] * len(rows)


def test_a_baseline_that_was_wrong_in_one_process_is_no_baseline() -> None:
    base = [record(replicate=0), record(replicate=1, status="wrong", samples={})]
    arm = [record(arm="tt-8", replicate=r) for r in (0, 1)]
    table = metrics.frame([*base, *arm], "tbe")
    assert table["ratio"].isna().all()
    failed = record(replicate=1, status="timeout", samples={})
    table = metrics.frame([base[0], failed, *arm], "tbe").set_index(["arm", "phase"])
    assert table.loc[("tt-8", "step")]["ratio"] == pytest.approx(1.0)


def test_an_interval_holds_the_median_it_is_printed_with() -> None:
    few, many = [[1.0] * 10] * 9, [2.0] * 1000
    found = metrics.summarise_processes([*few, many])
    assert found.lo < 1.1
    assert found.hi == found.median == 2.0


def test_a_step_that_the_host_launches_slower_than_the_gpu_works_is_host_bound() -> None:
    walls = {"forward": [[0, 1e-6], [1, 2e-6]], "step": [[0, 9e-6], [1, 7e-6]]}
    table = metrics.frame([record(mode="cold", wall_samples=walls)], "tbe").set_index("phase")
    assert table.loc["step", "host_s"] == pytest.approx(8e-6)  # and 6e-6 on the GPU: 75 %
    assert table["host_bound"].to_dict() == {"forward": False, "step": True}


@pytest.mark.parametrize(
    ("mode", "seconds", "host", "bound"),
    [
        ("hot", 1.0, 1.2, False),
        ("hot", 1.0, 1.3, True),
        ("wall", 1.0, 0.75, False),  # the GPU worked on after the call had returned
        ("wall", 1.0, 0.85, True),
        ("hot", 1.0, math.nan, False),
        ("wall", 1.0, math.nan, False),
    ],
)
def test_which_times_are_the_hosts(mode: str, seconds: float, host: float, bound: bool) -> None:
    assert metrics.is_host_bound(mode, seconds, host) is bound
