"""Traces through caches: the counts are the model's, and the report says what was counted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from emblib.reference.cache import CacheModel
from experiments import configure
from experiments.config.schema import CacheConfig, Config, TimingConfig, WorkloadConfig
from experiments.config.sweep import IDEAL_CACHES, Cell, arms_of
from experiments.kind_reports.cache import headline_rows
from experiments.kinds import cache, expand
from experiments.measure.cache import cache_cell, trace_of
from experiments.measure.timing import Session
from experiments.report import Run, pages, write_report
from experiments.report.text import percent
from experiments.workloads import cache_bounds
from experiments.workloads.workload import WAYS, cache_sets, make_pool, table_shapes

WORK = WorkloadConfig(T=2, E=400, D=4, B=16, L=3, s=0.9)
CACHE = CacheConfig(fractions=[0.05, 0.3], warm_batches=4, batches=5)


def cell(*contenders: str, **changes: object) -> Cell:
    arms = arms_of([*contenders, *IDEAL_CACHES], [], CACHE.fractions)
    plain = Cell("sweep", "a trace", WORK, arms, cache=CACHE, kind="cache")
    return dataclasses.replace(plain, **changes)


def session() -> Session:
    config = Config(name="x", timing=TimingConfig(pool=2))
    return Session(config, torch.device("cpu"), "run")


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_a_trace_counts_is_what_the_model_of_the_cache_counts(policy: str) -> None:
    records = cache_cell(cell(f"cached_{policy}"), session())
    shapes = table_shapes(WORK)
    pool = make_pool(WORK, shapes, 9, 1)
    trace = trace_of(pool, shapes, 0)
    for record, fraction in zip(records[:2], CACHE.fractions, strict=True):
        model = CacheModel(cache_sets(shapes, fraction), policy, [(0, 400), (400, 400)])
        expected = []
        for number, accesses in enumerate(trace.counted_batches(), start=1):
            rows = np.repeat(trace.rows[accesses], trace.lookup_counts[accesses]).tolist()
            before = dict(model.totals)
            model.plan(rows, number, number)
            expected.append({k: model.totals[k] - before[k] for k in before})
        got = record["samples"]
        assert record["status"] == "ok", record["reason"]
        assert got["lookups"] == [c["lookups"] for c in expected] == [96] * 9
        assert got["rows"] == [c["unique"] for c in expected]
        assert got["row_hits"] == [c["unique"] - c["unique_misses"] for c in expected]
        assert got["lookup_hits"] == [c["lookups"] - c["lookup_misses"] for c in expected]
        assert record["cache_rows"] == WAYS * len(model.sets)


def test_nothing_beats_the_offline_optimum() -> None:
    records = cache_cell(cell("cached_lru", "cached_lfu"), session())
    assert [r["status"] for r in records] == ["ok"] * 8
    by_size = itertools.groupby(sorted(records, key=size), key=size)
    for _, group in by_size:
        found = {r["contender"]: cache.counted_hit_rates(r) for r in group}
        assert max(r.rows for r in found.values()) == found["offline"].rows
        assert len(found) == 4


def size(record: dict[str, int]) -> int:
    return record["cache_rows"]


def test_fractions_that_are_the_same_number_of_sets_run_once() -> None:
    small = cell("cached_lru", rows_scale=0.05)  # 40 rows: one set or two
    sizes = Counter(r["contender"] for r in cache_cell(small, session()))
    assert sizes == {"cached_lru": 1, "offline": 1, "static_top": 1}


def test_a_contender_that_cannot_do_it_is_a_record() -> None:
    records = cache_cell(cell("tbe"), session())  # has no counters
    failed = [r for r in records if r["contender"] == "tbe"]
    assert failed
    assert all(r["status"] == "unsupported" for r in failed)
    assert cache.frame(records)["lookup_hit_rate"].isna().sum() == len(failed)


def test_rates_are_of_the_counted_batches() -> None:
    samples = {
        "lookups": [9, 10, 10],
        "lookup_hits": [9, 5, 6],
        "rows": [3, 4, 4],
        "row_hits": [3, 1, 2],
    }
    assert cache.counted_hit_rates({"samples": samples, "batches": 2}) == cache.HitRates(
        11 / 20, 3 / 8
    )


def test_cache_sets_round_up_and_are_never_none() -> None:
    shapes = table_shapes(WorkloadConfig(T=2, E=1000))
    assert cache_sets(shapes, 0.1) == 7  # 200 of 2000 rows are 6.25 sets
    assert cache_sets(shapes, 1e-9) == 1


def test_cells_of_the_experiment() -> None:
    config = configure.load(["+experiment=cache_hit_rate", "device=cpu", "sweep.s=[0.5,1.05]"])
    cells = expand(config)
    assert [c.kind for c in cells] == ["time", "cache", "cache"]
    assert [c.workload.s for c in cells] == [1.05, 1.05, 0.5]
    assert {a.key for a in cells[0].arms} >= {"tbe", "cached_lru@0.01", "disk_lru@0.3"}
    assert {a.contender for a in cells[1].arms} == {"cached_lru", "cached_lfu", *IDEAL_CACHES}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["contenders=[tbe]"], "traces"),
        (["cache.fractions=[0]"], "cache.fractions must be in"),
        (["cases.timed.cache.fractions=[2]"], "cases.timed.cache.fractions must be in"),
        (["cache.batches=0"], "must be >= 1"),
    ],
)
def test_wrong_values_are_usage_errors(words: list[str], error: str) -> None:
    with pytest.raises(configure.UsageError, match=error):
        configure.load(["+experiment=cache_hit_rate", "device=cpu", *words])


def test_the_first_sentence_is_made_of_counted_numbers(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["cache_hit_rate"])
    rows = headline_rows(run)
    assert rows is not None
    by_name = rows.set_index("contender")
    first = (run.path / "report.md").read_text().splitlines()[2]
    assert first.startswith(f"**{pages.SMOKE_NOTICE}**")  # and no claim in bold
    for name in ("cached_lru", "cached_lfu", "offline"):
        assert percent(by_name["lookup_hit_rate"][name]) in first
    page = (run.path / "index.html").read_text()
    assert re.search(r"<p>With [\d.]+ % of the rows in the cache", page)
    assert "Belady" in page
    assert {"hit_rate.svg", "throughput.svg", "hit_rates.csv"} <= {
        p.name for p in run.path.iterdir()
    }


@pytest.mark.usefixtures("figures_once")
@pytest.mark.parametrize("kept", ["time", "cache"])
def test_a_run_that_was_interrupted_has_a_report(
    kept: str, smoke_runs: Mapping[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(smoke_runs["cache_hit_rate"], path)
    records = path / "points.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(x for x in lines if json.loads(x).get("kind", "time") == kept))
    answer = write_report(path)
    start = "No answer yet" if kept == "time" else "With "
    assert answer.startswith(f"{pages.SMOKE_NOTICE} {start}")
    assert "Throughput" in (path / "report.md").read_text() or kept == "cache"


def test_timed_contenders_say_what_their_cache_served(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["cache_hit_rate"])
    timed = run.table.set_index(["arm", "phase"])
    assert 0.0 <= timed.loc[("cached_lru@0.3", "step"), "row_hit_rate"] <= 1.0
    assert np.isnan(timed.loc[("tbe", "step"), "row_hit_rate"])
    assert timed.loc[("cached_lru@0.3", "step"), "ratio"] > 0


def test_a_trace_knows_its_batches() -> None:
    trace = cache_bounds.RowTrace.of([np.array([4, 4, 2]), np.array([2])], 1)
    assert trace.rows.tolist() == [2, 4, 2]
    assert trace.lookup_counts.tolist() == [1, 2, 1]
    assert trace.access_batches.tolist() == [0, 0, 1]
    assert trace.next_accesses().tolist() == [2, cache_bounds.NEVER, cache_bounds.NEVER]
