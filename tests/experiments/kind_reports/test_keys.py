"""Tables of keys in reports: numbers of records, sentences, what a configuration may ask for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import configure
from experiments.kind_reports import growth as growth_report
from experiments.kind_reports import keys as keys_report
from experiments.kinds import expand, keys
from experiments.report import Run, text
from experiments.report.notes import how_to_read


def record(arm: str, samples: Mapping[str, list[list[float]]], **more: Any) -> dict[str, Any]:
    contender, _, load = arm.partition("@")
    return {
        "kind": "keys",
        "cell": "c",
        "section": "s",
        "arm": arm,
        "contender": contender,
        "label": arm,
        "load": float(load),
        "mode": "hot",
        "status": "ok",
        "reason": "",
        "replicate": 0,
        "samples": samples,
        "lookups": 1000,
        "params": {"D": 4},
        "rows_scale": 1.0,
        "slots": 64,
        "keys_there": 48,
        "hits": 0.6,
        "weights_bytes": 512,
        **more,
    }


def test_ratios_are_to_the_subjects_find_at_the_same_load() -> None:
    def taken(seconds: float) -> list[list[float]]:
        return [[n, seconds * (1 + 0.01 * n)] for n in range(8)]

    records = [
        record("ours@0.5", {"find_slots": taken(1e-3), "find": taken(2e-3)}),
        record("ours@1", {"find_slots": taken(4e-3)}),
        record("other@0.5", {"find_or_insert_slots": taken(5e-3)}),
        record("other@1", {"find_slots": taken(6e-3)}, status="ok"),
        record("lost@1", {}, status="oom", reason="large"),
        record("bad@1", {"find_slots": taken(1e-3)}, status="wrong"),
    ]
    rows = keys.frame(records, "ours").set_index(["arm", "phase"])
    assert rows.loc[("ours@0.5", "find"), "ratio"] == pytest.approx(2.0)
    assert rows.loc[("ours@1", "find_slots"), "ratio"] == pytest.approx(1.0)
    assert rows.loc[("other@0.5", "find_or_insert_slots"), "ratio"] == pytest.approx(5.0)
    assert rows.loc[("other@0.5", "find_or_insert_slots"), "operation"] == "find_or_insert*"
    assert rows.loc[("other@1", "find_slots"), "ratio"] == pytest.approx(1.5)
    assert rows.loc[("ours@0.5", "find_slots"), "keys_per_s"] == pytest.approx(1e6, rel=0.05)
    assert rows.loc[("lost@1", ""), "status"] == "oom"
    assert math.isnan(rows.loc[("bad@1", "find_slots"), "median_s"])


def test_growth_tells_the_longest_call_and_the_memory() -> None:
    own = {"kind": "growth", "peak_bytes": 300, "kept_bytes": 200}
    calls = [[0, 1e-3], [1, 9e-3], [2, 1e-3]]
    slower = [[0, 1e-3], [1, 7e-3], [2, 1e-3]]
    records = [
        record("t@0", {"insert": calls}, **own),
        record("t@0", {"insert": slower}, **own, replicate=1),
    ]
    (row,) = [r for _, r in keys.growth_frame(records).iterrows()]
    assert row["median_s"] == 1e-3
    assert row["longest_s"] == pytest.approx(8e-3)
    assert row["total_s"] == pytest.approx(10e-3)
    assert row["peak_over_kept"] == pytest.approx(1.5)
    assert (row["calls"], row["processes"]) == (3, 2)


def test_the_answer_is_made_of_measured_numbers(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["hash_load_factor"])
    rows = run.operations[run.operations["section"] == "resident"].set_index(["contender", "phase"])
    ours = rows.loc[("scored", "find_slots")]
    sentences = keys_report.answer(run)
    assert f"{text.digits(ours['keys_per_s'] / 1e6)} M keys/s" in sentences[0]
    assert text.seconds(ours["median_s"]) in sentences[0]
    for other in (("sorted_keys", "find_slots"), ("lines_huge", "find_slots")):
        row = rows.loc[other]
        shown = text.times(row["ratio"]), f"{text.digits(100 * row['ratio'])} %"
        assert shown[other[0] == "lines_huge"] in " ".join(sentences)
    page = (run.path / "report.md").read_text()
    assert "random lines, huge pages" in page
    assert "## The sweep" in page
    assert (run.path / "operations.csv").exists()


def test_the_report_of_growth_names_the_pause(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["growth_latency"])
    rows = keys.growth_frame(run.records).set_index("contender")
    first = growth_report.answer(run)[0]
    assert text.seconds(rows.loc["scored_growing", "longest_s"]) in first
    assert (run.path / "growth.csv").exists()
    assert not any("warming up" in note for note in how_to_read(run))  # nothing is warmed up


def test_tables_of_a_sweep_have_their_axes(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["growth_latency"])
    others = [{**r, "cell": "D=3", "params": {**r["params"], "D": 3}} for r in run.records]
    frame = keys.growth_frame([*run.records, *others])
    swept = dataclasses.replace(run, records=[*run.records, *others], frames={"growth": frame})
    (titled_table,) = growth_report.tables(swept)
    assert titled_table.table.headings[:3] == ["table", "D", "keys"]
    assert "3" in {line[1].text for line in titled_table.table.rows}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+experiment=tbe_vs_torch", "contenders=[tbe,scored]"], "scored is a table of keys"),
        (["+experiment=growth_latency", "contenders=[tbe]"], "tbe is not a table of keys"),
        (["+experiment=hash_load_factor", "keys.loads=[1.5]"], r"keys.loads must be in \(0, 1\]"),
        (["+experiment=hash_load_factor", "keys.operations=[fnd]"], "no operation 'fnd'"),
        (["+experiment=hash_load_factor", "keys.hits=2"], "keys.hits must be in"),
        (["+experiment=tbe_vs_torch", "contenders=[exact_lru]"], "no contender 'exact_lru'"),
    ],
)
def test_what_cannot_be_measured_so_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(configure.UsageError, match=message):
        configure.load([*words, "device=cpu"])


def test_a_case_with_loads_is_of_kind_keys_with_an_arm_for_each() -> None:
    cells = expand(configure.load(["+experiment=anchor_dynamic_tables", "device=cpu"]))
    kinds = {cell.section: cell.kind for cell in cells}
    assert kinds == {"plain": "time", "dim_8": "keys", "dim_32": "keys", "dim_64": "keys"}
    arms = next(cell.arms for cell in cells if cell.section == "dim_8")
    assert [arm.key for arm in arms] == ["scored@0.5", "scored@0.75", "scored@1"]
    assert arms[0].label == "HashTable, load 0.5"
