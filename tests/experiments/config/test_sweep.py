"""Cells: which points an experiment has, and which contenders meet there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments import configure, kinds
from experiments.config.schema import (
    CacheConfig,
    CaseConfig,
    Config,
    Design,
    SweepConfig,
    Tables,
    TimingConfig,
    TTConfig,
    UsageError,
    WorkloadConfig,
)
from experiments.config.sweep import SWEEP, arms_of, compile_rule, title_of
from experiments.kinds import expand
from experiments.results.identity import point_key
from experiments.run.jobs import BLOCK_CELLS, job_passes


def config(**changes: object) -> Config:
    sweep = SweepConfig(D=[32, 64], L=[1, 20], rank=[8, 32])
    usual = {"sweep": sweep, "contenders": ["tbe", "tt"], "tt": TTConfig(ranks=[16])}
    return Config(**(usual | changes))  # type: ignore[arg-type]


def test_one_at_a_time_varies_each_axis_alone_and_ranks_at_the_base() -> None:
    cells = expand(config())
    points = [(c.workload.D, c.workload.L, tuple(a.key for a in c.arms)) for c in cells]
    assert points == [
        (64, 20, ("tbe", "tt-8", "tt-16", "tt-32")),
        (32, 20, ("tbe", "tt-16")),
        (64, 1, ("tbe", "tt-16")),
    ]


def test_a_grid_has_every_combination() -> None:
    cells = expand(config(design=Design.grid))
    assert [(c.workload.D, c.workload.L) for c in cells] == [(32, 1), (32, 20), (64, 1), (64, 20)]
    assert {tuple(a.key for a in c.arms) for c in cells} == {("tbe", "tt-8", "tt-16", "tt-32")}


def test_where_excludes_arms_and_then_cells() -> None:
    cells = expand(config(design=Design.grid, where=["rank <= D / 2 and L > 1"]))
    assert [(c.workload.D, tuple(a.key for a in c.arms)) for c in cells] == [
        (32, ("tbe", "tt-8", "tt-16")),
        (64, ("tbe", "tt-8", "tt-16", "tt-32")),
    ]


def test_cases_come_first_and_an_empty_sweep_adds_nothing() -> None:
    cells = expand(config(sweep=SweepConfig(), cases={"mine": CaseConfig(title="mine")}))
    assert [c.section for c in cells] == ["mine"]


def test_values_of_the_same_six_digits_are_told_apart() -> None:
    fractions = [0.1, 0.1000001]
    swept = {"contenders": ["cached_lru"], "cache": CacheConfig(fractions=fractions)}
    first, second = expand(config(sweep=SweepConfig(E=[1_000_000, 1_000_001]), **swept))
    assert (first.workload.E, second.workload.E) == (1_000_000, 1_000_001)
    assert first.key == "sweep T=1 E=1e+06 D=64 B=1024 L=20 s=1.05 q=0"
    assert second.key == "sweep T=1 E=1000001 D=64 B=1024 L=20 s=1.05 q=0"
    assert [arm.key for arm in first.arms] == ["cached_lru@0.1", "cached_lru@0.1000001"]
    _, alone = expand(config(sweep=SweepConfig(E=[1_000_001]), workload=WorkloadConfig(E=5)))
    assert alone.key == first.key  # as in stored records
    shown = dataclasses.replace(second, has_exact_key=False)
    assert point_key(shown, config()) == point_key(second, config())


def test_the_sweep_of_a_kind_of_whole_runs_is_timed() -> None:
    found = {}
    for kind in kinds.KINDS:
        completed = config(kind=kind, cases={})
        configure.complete_options(completed)
        found[kind] = {cell.kind for cell in expand(completed)}
    own = (
        "cache",
        "trace",
        "keys",
        "growth",
        "sharding",
        "calibration",
        "quality",
        "predictions",
        "serving",
    )
    counted = {kind: {kind} for kind in own}
    assert found == {kind: {"time"} for kind in kinds.KINDS} | counted
    assert all(kinds.find(kind).measurement.cell for cells in found.values() for kind in cells)


def test_rules_of_options_name_options() -> None:
    for kind in map(kinds.find, kinds.KINDS):
        names = (
            {field.name for field in dataclasses.fields(kind.options)} if kind.options else set()
        )
        assert kind.option_rules.keys() <= names, kind.name


def test_smoke_caps_shrink_batches_tables_and_the_sweep() -> None:
    timing = TimingConfig(max_rows=1000, max_batch=4, max_cells=2)
    cells = expand(config(timing=timing))
    assert len(cells) == 2
    assert {c.workload.B for c in cells} == {4}
    assert cells[0].rows_scale == pytest.approx(0.001)


def test_arms_have_ranks_for_tensor_trains_and_sizes_for_caches_only() -> None:
    arms = arms_of(["tbe", "reference_tt", "cached_lru"], [4, 8], [0.003, 0.2])
    assert [a.key for a in arms] == [
        *("tbe", "reference_tt-4", "reference_tt-8", "cached_lru@0.003", "cached_lru@0.2"),
    ]
    assert [a.label for a in arms] == [
        *("TBE", "reference TT rank 4", "reference TT rank 8", "LRU cache 0.3 %", "LRU cache 20 %"),
    ]


def test_conditions_compute_and_nothing_else() -> None:
    assert compile_rule("D * 2 >= 64 or not B == 1")({"D": 32, "B": 1})
    assert not compile_rule("1 < L < 10")({"L": 20})
    assert compile_rule("rank / (L - 1) > 1")({"rank": 8, "L": 5})
    for text in ("D.__class__", "open('x')", "D if B else L", "lambda: 1", "unknown > 1", "D >"):
        with pytest.raises(UsageError, match="where, exclude: cannot read"):
            compile_rule(text)


def test_cells_get_all_their_processes_block_by_block_and_the_answer_first() -> None:
    config = Config(
        cases={"a": CaseConfig(), "b": CaseConfig()},
        sweep=SweepConfig(D=[16, 32, 48], B=[8, 64]),
        timing=TimingConfig(replicates=3),
    )
    config.report.headline = "b"
    cells = expand(config)
    found = list(job_passes(cells, config))
    answer, others = found[:3], found[3:]
    assert [[(j.cell.section, j.replicate) for j in jobs] for jobs in answer] == [
        [("b", 0)],
        [("b", 1)],
        [("b", 2)],
    ]
    for block in range(0, len(others), 3):
        keys = [{job.cell.key for job in jobs} for jobs in others[block : block + 3]]
        assert keys[0] == keys[1] == keys[2]
        assert len(keys[0]) <= BLOCK_CELLS
    begun = [job.cell for jobs in others for job in jobs if job.replicate == 0]
    assert [c.section for c in begun[:2]] == [SWEEP, "a"]
    # After the base point the axes take turns, both ends of each before what lies between.
    base = begun[0].workload
    swept = [(c.workload.D, c.workload.B) for c in begun[2:]]
    assert swept == [(16, base.B), (base.D, 8), (48, base.B), (base.D, 64), (32, base.B)]
    every = [job.order for jobs in found for job in jobs]
    assert every == list(range(3 * len(cells)))
    assert all(cells[job.cell_number] == job.cell for jobs in found for job in jobs)


def test_a_named_trace_is_what_the_answer_is_about(tmp_path: Path) -> None:
    words = ["+experiment=tt_vs_tbe", "device=cpu"]
    assert configure.load(words).report.headline == "criteo"
    (tmp_path / "ids.csv").write_text("a\n" + "1\n" * 4)
    file = ("workload=trace", f"workload.file={tmp_path / 'ids.csv'}", "sweep.L=[]", "sweep.s=[]")
    traced = configure.load([*words, *file])
    assert traced.report.headline == ""  # the sweep, whose workload is the file


def test_zip_takes_values_together() -> None:
    config = Config(sweep=SweepConfig(D=[16, 32], B=[8, 64]), design=Design.zip)
    assert [(c.workload.D, c.workload.B) for c in expand(config)] == [(16, 8), (32, 64)]
    config.sweep.B = [8]
    with pytest.raises(UsageError, match=r"equally many .* there are 2 of D, 1 of B"):
        expand(config)


def test_zip_of_ranks_alone_measures_the_base_point() -> None:
    (cell,) = expand(config(sweep=SweepConfig(rank=[8, 32]), design=Design.zip))
    assert {arm.rank for arm in cell.arms} >= {8, 32}


def test_a_title_says_the_tables_that_are_measured() -> None:
    workload = WorkloadConfig(T=26, D=16, B=512, L=1)
    for changes, words in (
        ({}, "26 tables of 1,000,000 rows"),
        ({"tables": Tables.criteo_kaggle}, "the tables of Criteo-Kaggle"),
        ({"sizes": [10, 2000]}, "tables of 10, 2,000 rows"),
    ):
        title = title_of(dataclasses.replace(workload, **changes))
        assert title == f"{words} (D=16, B=512, L=1)"


@pytest.mark.parametrize("name", ["quik", ""])
def test_a_preset_that_is_not_there_is_wrong_usage(name: str) -> None:
    with pytest.raises(UsageError, match=r"timing\.preset: no preset"):
        configure.load(["+experiment=tbe_vs_torch", f"timing.preset={name}", "device=cpu"])


def test_exclude_leaves_out_what_meets_any_rule() -> None:
    config = Config(sweep=SweepConfig(D=[16, 32], B=[8, 64]), design=Design.grid)
    config.exclude = ["D == 16 and B == 8", "B > D"]
    assert [(c.workload.D, c.workload.B) for c in expand(config)] == [(32, 8)]


def test_where_guards_exclude_from_dividing_by_zero() -> None:
    guarded = config(where=["rank > 0"], exclude=["D / rank > 2"])
    assert {a.key for c in expand(guarded) for a in c.arms} == {"tt-16", "tt-32"}
    with pytest.raises(UsageError, match=r"'D / rank > 2' of .*'rank': 0.*: division by zero"):
        expand(config(exclude=["D / rank > 2"]))


def test_points_that_a_cap_makes_equal_are_one() -> None:
    timing = TimingConfig(max_batch=4)
    cells = expand(config(sweep=SweepConfig(B=[8, 64], D=[32]), timing=timing))
    assert [(c.workload.B, c.workload.D) for c in cells] == [(4, 64), (4, 32)]


def test_arms_that_are_named_twice_are_measured_once() -> None:
    (cell,) = expand(config(sweep=SweepConfig(), contenders=["tbe", "tt", "tbe"]))
    assert [arm.key for arm in cell.arms] == ["tbe", "tt-16"]
    words = ["+experiment=quality", "contenders=[plain,hashed]", "options.shares=[0.25,0.25]"]
    (cell,) = expand(configure.load([*words, "options.data=[planted]"]))
    assert [arm.key for arm in cell.arms] == ["plain", "hashed@0.25"]


def test_a_smoke_run_says_the_batch_that_it_measured() -> None:
    config = configure.load(["+experiment=tbe_vs_torch", "timing=smoke", "device=cpu"])
    swept = [cell for cell in expand(config) if cell.section == SWEEP]
    assert swept
    assert all(f"B={cell.workload.B:,}," in cell.title for cell in swept)
