"""Collections over ranks: cells of each world, numbers of records, contenders, reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.sharding import RankGroup, World
from emblib.sharding.planner import Calibration
from experiments import configure, launch
from experiments.config.schema import Distribution, Optimizer, Scaling, WorkloadConfig
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.contenders.base import Task
from experiments.contenders.registry import Unsupported, WrongResult, build
from experiments.contenders.sharded import TableWise
from experiments.kind_reports import sharding as sharding_report
from experiments.kind_reports.calibration import interpolate
from experiments.kinds import expand, sharding
from experiments.measure.outcome import verify
from experiments.report import Run, text
from experiments.results.store import read_json
from experiments.workloads.workload import make_pool, table_shapes
from tests.compat.peer import peer_module
from tests.sharding import worlds

# Cells


def cells(*words: str) -> list[Cell]:
    return expand(configure.load([*words, "device=cpu"]))


def test_as_many_ranks_as_tables_have_one_each() -> None:
    """Computed in floats, table 5 of 14 was on the rank of table 4."""
    configs = [EmbeddingBagConfig(4, 4, f"t{table}", (f"f{table}",)) for table in range(14)]
    tables = EmbeddingBagCollection(configs, device="meta")
    plan = TableWise.plan(tables, World(14, 14))
    ranks = [sharding.shards[0].rank for sharding in plan.values()]
    assert ranks == list(range(14))


def test_a_cell_for_each_world_and_way_of_scaling() -> None:
    found = cells("+experiment=sharding_scaling")
    assert [(c.ranks, c.scaling, c.workload.B) for c in found] == [
        (1, Scaling.weak, 2048),
        (2, Scaling.weak, 2048),
        (2, Scaling.strong, 1024),
        (4, Scaling.weak, 2048),
        (4, Scaling.strong, 512),
    ]
    assert len({c.key for c in found}) == len(found)
    assert found[2].title.endswith("2 ranks, strong")
    assert found[0].title.endswith(", 1 rank")


def test_contenders_that_know_no_ranks_are_in_worlds_of_one() -> None:
    words = ("+experiment=sharding_scaling", "contenders=[collection,sharded_row_wise]")
    found = {c.ranks: [arm.key for arm in c.arms] for c in cells(*words)}
    assert found[1] == ["collection", "sharded_row_wise"]
    assert found[2] == found[4] == ["sharded_row_wise"]


def test_a_case_has_worlds_of_its_own_and_a_smoke_run_few_ranks() -> None:
    found = cells("+experiment=sharded_vs_torchrec")
    arms = {(c.workload.T, c.ranks): len(c.arms) for c in found if c.section == "sweep"}
    assert arms == {(26, 1): 7, (26, 2): 4, (10, 1): 7, (10, 2): 4}
    words = ("cases.small.sharding.worlds=[2]",)
    own = cells("+experiment=sharded_vs_torchrec", *words)
    assert {c.ranks for c in own if c.section == "small"} == {2}
    small = cells("+experiment=sharding_scaling", "timing=smoke")
    assert {c.ranks for c in small} == {1, 2}
    # Equal batches are one cell, however they came about.
    lone = cells("+experiment=sharding_scaling", "workload.B=1")
    assert [(c.ranks, c.workload.B) for c in lone] == [(1, 1), (2, 1), (4, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sharding.worlds=[0]"], r"sharding.worlds must be in \[1, 1024\], got \[0\]"),
        (["sharding.beyond=[-1]"], "sharding.beyond must be in "),
        (["sharding.worlds=[]"], "must name at least one each"),
        (["device.ranks=2"], "say sharding.worlds"),
    ],
)
def test_impossible_worlds_are_a_usage_error(words: list[str], message: str) -> None:
    with pytest.raises(configure.UsageError, match=message):
        configure.load(["+experiment=sharding_scaling", "device=cpu", *words])


def test_a_job_waits_for_as_many_processors_as_its_largest_world() -> None:
    def most(*words: str) -> int:
        return launch._ranks(configure.load([*words, "device=cpu"]))

    assert most("+experiment=sharding_scaling") == 4
    assert most("+experiment=sharding_scaling", "sharding.worlds=[1]") == 1
    assert most("+experiment=sharded_vs_torchrec", "cases.small.sharding.worlds=[8]") == 8
    assert most("+experiment=tbe_vs_torch", "device.ranks=3") == 3


# Numbers


def record(contender: str, world: int, step: float, **more: Any) -> dict[str, Any]:
    """`step` seconds, of which half are the lookup's."""
    params = {"T": 2, "E": 100, "D": 4, "L": 1, "s": 0.0, "q": 0.0, "B": 8}
    scaling = more.pop("scaling", "weak")
    params |= {"B": more.pop("batch", 8)}
    taken = {
        "step": [[n, step * (1 + 0.01 * n)] for n in range(8)],
        **({"local": [[n, step / 2] for n in range(8)]} if contender in registry.names() else {}),
    }
    return {
        "kind": "sharding",
        "cell": f"c W={world} {scaling}",
        "section": "sweep",
        "arm": contender,
        "contender": contender,
        "label": contender,
        "mode": "hot",
        "status": "ok",
        "reason": "",
        "replicate": 0,
        "samples": taken,
        "lookups": 16,
        "params": params,
        "rows_scale": 1.0,
        "world_size": world,
        "scaling": scaling,
        "weights_bytes": 512,
        **more,
    }


def test_ratios_are_to_emblibs_counterpart_in_the_same_cell() -> None:
    records = [
        record("sharded_row_wise", 2, 1e-3),
        record("sharded_table_wise", 2, 4e-3),
        record("torchrec_row_wise", 2, 3e-3),
        record("torchrec_table_wise", 2, 6e-3),
        record("torchrec_table_wise", 1, 6e-3),
        record("torchrec_fused", 1, 5e-3),
        record("collection", 1, 2e-3),
    ]
    rows = sharding.frame(records).set_index(["arm", "world_size", "phase"])
    assert rows.loc[("torchrec_row_wise", 2, "step"), "ratio"] == pytest.approx(3.0)
    assert rows.loc[("torchrec_table_wise", 2, "step"), "ratio"] == pytest.approx(1.5)
    assert rows.loc[("torchrec_fused", 1, "step"), "ratio"] == pytest.approx(2.5)
    assert math.isnan(rows.loc[("torchrec_table_wise", 1, "step"), "ratio"])
    assert math.isnan(rows.loc[("sharded_row_wise", 2, "step"), "ratio"])
    wrong = [records[0], records[2], record("sharded_row_wise", 2, 1e-3, status="wrong")]
    rows = sharding.frame(wrong).set_index("arm")
    assert math.isnan(rows.loc["torchrec_row_wise", "ratio"].iloc[0])
    assert (rows.loc["sharded_row_wise", "status"] == "wrong").all()


def test_a_step_is_compute_and_communication_and_scales_from_one_rank() -> None:
    records = [
        record("sharded_row_wise", 1, 8e-3),
        record("sharded_row_wise", 4, 10e-3),
        record("sharded_row_wise", 4, 4e-3, scaling="strong", batch=2),
        record("torchrec_row_wise", 4, 10e-3),
    ]
    rows = sharding.step_frame(sharding.frame(records)).set_index(["arm", "world_size", "scaling"])
    weak = rows.loc[("sharded_row_wise", 4, "weak")]
    assert weak["efficiency"] == pytest.approx(0.8)
    assert weak["compute_s"] == pytest.approx(5e-3)
    assert weak["communication_s"] == pytest.approx(weak["median_s"] - 5e-3)
    strong = rows.loc[("sharded_row_wise", 4, "strong")]
    assert strong["base_s"] == pytest.approx(weak["base_s"])
    assert strong["efficiency"] == pytest.approx(0.5)
    assert rows.loc[("sharded_row_wise", 1, "weak"), "efficiency"] == 1.0
    assert math.isnan(rows.loc[("torchrec_row_wise", 4, "weak"), "efficiency"])


def test_ranks_that_share_cores_measure_nothing_but_correctness() -> None:
    records = [record("sharded_row_wise", world, 1e-3 * world) for world in (1, 2, 4)]
    rows = sharding.step_frame(sharding.frame(records))
    run: Any = SimpleNamespace(
        environment={"cpu": {"usable_cores": 2}},
        records=records,
        headline="sweep",
        subject=SimpleNamespace(contender="sharded_row_wise"),
    )
    measured, shared = sharding_report._scaling_sentences(run, rows)
    assert measured.startswith("Weak scaling to 2 ranks: row-wise takes 2.0")
    assert shared.startswith("Where 4 ranks share 2 cores, a run only shows that results")
    run.environment = {}
    assert "4 ranks" in sharding_report._scaling_sentences(run, rows)[0]


def test_predictions_are_set_beside_what_was_measured_and_marked_beyond() -> None:
    def told(world: int, seconds: float) -> dict[str, Any]:
        return {"ranks": world, "scaling": "weak", "batch": 8, "step_s": seconds, "compute_s": 0.0}

    records = [
        record("sharded_row_wise", 1, 1e-3, predicted=[told(1, 2e-3)]),
        record("sharded_row_wise", 2, 2e-3, predicted=[told(2, 4e-3), told(8, 9e-3)]),
        record("sharded_grid", 2, 3e-3, predicted=[told(2, 3e-3)]),
    ]
    rows = sharding.predictions(records)
    assert rows["beyond"].tolist() == [False, False, True, False]
    assert math.isnan(rows[rows["beyond"]]["median_s"].iloc[0])
    correlation, factor, points = sharding.prediction_agreement(rows)
    assert points == 3
    assert correlation == pytest.approx(0.5)  # ranks 1, 3, 2 of 1, 2, 3
    assert factor == pytest.approx(1.9, rel=0.05)
    assert math.isnan(sharding.prediction_agreement(rows[:2])[0])


# Contenders


OURS = [name for name in registry.names() if name.startswith("sharded_")]


def _contender(name: str, optimizer: Optimizer = Optimizer.adagrad) -> tuple[Any, Any]:
    workload = WorkloadConfig(T=5, E=60, D=8, B=4, L=3, distribution=Distribution.uniform)
    shapes = table_shapes(workload)
    batches = make_pool(workload, shapes, 2, 1).batches
    task = Task(shapes, optimizer, 0.1, torch.device("cpu"))
    return build(name, task), batches


def _measured(ranks: RankGroup, name: str) -> dict[str, int]:
    contender, batches = _contender(name)
    verify(contender, batches[0])
    for work in contender.parts(contender.prepare(batches[1])).values():
        work()
        work()
    found: dict[str, int] = contender.nbytes()
    return found


@pytest.mark.parametrize("name", OURS)
def test_sharded_contenders_are_right_on_four_ranks(name: str) -> None:
    """Output and update as plain PyTorch has them; what they weigh is that of all ranks."""
    found = worlds.run(4, _measured, name)
    copies = 4 if name == "sharded_data_parallel" else 1
    assert {f["weights"] for f in found} == {copies * 5 * 60 * 8 * 4}


def _refused(ranks: RankGroup) -> str:
    try:
        _contender("sharded_grid", Optimizer.rowwise_adagrad)
    except Unsupported as error:
        return str(error)
    return ""


def test_parts_by_columns_do_not_pretend_to_be_whole_rows() -> None:
    assert all("differently from whole rows" in told for told in worlds.run(4, _refused))


def _wrong(ranks: RankGroup) -> str:
    contender, batches = _contender("sharded_row_wise")
    before = contender.observe(batches[0])
    if ranks.rank == 3:
        contender.module.groups.views(0)["weight"].data.add_(1.0)
    contender.observe = lambda batch: before
    try:
        verify(contender, batches[0])
    except WrongResult as error:
        return str(error)
    return ""


def test_a_part_that_is_wrong_on_one_rank_is_found_out() -> None:
    assert all("forward: differs" in told for told in worlds.run(4, _wrong))


# Reports


@pytest.mark.slow
def test_the_report_of_scaling_tells_what_communication_takes(
    smoke_runs: Mapping[str, Path],
) -> None:
    run = Run.read(smoke_runs["sharding_scaling"])
    rows = sharding.step_frame(sharding.frame(run.records))
    assert set(rows["world_size"]) == {1, 2}
    assert set(rows["contender"]) == set(OURS)
    said = " ".join(sharding_report.answer(run))
    weak = rows[(rows["world_size"] == 2) & (rows["scaling"] == "weak")].set_index("contender")
    own = weak.loc["sharded_table_wise"]
    assert "Weak scaling to 2 ranks" in said
    assert text.seconds(own["median_s"]) in said
    page = (run.path / "report.md").read_text()
    assert "not measured" in page
    told = sharding.predictions(run.records)
    assert set(told[told["beyond"]]["world_size"]) == {8, 16, 32, 64}
    assert (told["predicted_s"] > 0).all()
    for name in ("sharding.csv", "predictions.csv", "scaling.png", "predicted.png"):
        assert (run.path / name).exists()


@pytest.mark.slow
def test_the_report_beside_torchrec_gives_the_multiple(smoke_runs: Mapping[str, Path]) -> None:
    peer_module("torchrec")
    run = Run.read(smoke_runs["sharded_vs_torchrec"])
    rows = sharding.step_frame(sharding.frame(run.records))
    assert not [r for r in run.records if r["status"] != "ok"]
    row = rows[(rows["arm"] == "torchrec_row_wise") & (rows["section"] == "sweep")]
    row = row[row["world_size"] == 2].iloc[0]
    assert f"row-wise {text.times(row['ratio'])}" in sharding_report.answer(run)[0]
    assert set(rows[rows["ratio"].notna()]["contender"]) == {
        "torchrec_table_wise",
        "torchrec_row_wise",
        "torchrec_fused",
        "torchrec_unsharded",
    }


def test_a_calibration_is_kept_as_a_planner_reads_it(smoke_runs: Mapping[str, Path]) -> None:
    path = smoke_runs["calibration"]
    found = Calibration.load(path / "calibration.json")
    assert (
        found.to_json() == Calibration.from_json((path / "calibration.json").read_text()).to_json()
    )
    assert "2 ranks" in found.source
    assert read_json(path, "run.json")["outcomes"] == {"ok": 2}
    page = (path / "report.md").read_text()
    assert "not measured" in page  # links of a rank that is alone
    assert text.seconds(found.exchange_s) in page


def test_a_curve_is_linear_between_its_points() -> None:
    curve = [(32.0, 1.0), (64.0, 3.0), (128.0, 5.0)]
    assert [interpolate(curve, x) for x in (1, 32, 48, 96, 500)] == [1.0, 1.0, 2.0, 4.0, 5.0]
