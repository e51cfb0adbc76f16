"""Looked-at lookups: the numbers against definitions by brute force, and the report's words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from experiments.config.schema import CacheConfig, Config, Distribution, WorkloadConfig
from experiments.config.sweep import Cell, arms_of
from experiments.kind_reports import trace as trace_report
from experiments.kinds import trace as frames
from experiments.measure.session import Session
from experiments.measure.trace import trace_cell
from experiments.report import Run, notes, pages, text, write_report
from experiments.workloads import cache_bounds, distributions, trace_analysis
from experiments.workloads.trace_analysis import Lookups
from experiments.workloads.trace_files import TraceError


def draw(count: int, rows: int, s: float, q: float = 0.0, seed: int = 0) -> distributions.Ids:
    return distributions.zipf_ranks(np.random.default_rng(seed), count, rows, s, q) - 1


# Reuse distances


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 64, 100, 257])
def test_stack_distances_are_those_of_a_list(count: int) -> None:
    rows = draw(count, max(1, count // 3), 0.7)
    last: dict[int, int] = {}
    expected = []
    for i, row in enumerate(rows.tolist()):
        between = set(rows[last[row] + 1 : i].tolist()) if row in last else None
        expected.append(trace_analysis.NEVER if between is None else len(between))
        last[row] = i
    assert trace_analysis.stack_distances(rows).tolist() == expected


def recent_rows(trace: cache_bounds.RowTrace) -> list[int]:
    """For each access, how many rows were used after its own, before its batch."""
    order: list[int] = []  # least recent first
    found = []
    for a, b in itertools.pairwise(trace.batch_starts.tolist()):
        rows = trace.rows[a:b].tolist()
        for row in rows:
            found.append(
                len(order) - 1 - order.index(row) if row in order else trace_analysis.NEVER
            )
        weights = trace.lookup_counts[a:b].tolist()
        used = [row for _, row in sorted(zip(weights, rows, strict=True))]
        order = [row for row in order if row not in used] + used
    return found


def test_batch_distances_are_those_of_a_list() -> None:
    trace = cache_bounds.RowTrace.of(
        [draw(n, 30, 0.8, seed=n) for n in (9, 1, 14, 25, 3, 3, 40)], 2
    )
    assert trace_analysis.batch_distances(trace).tolist() == recent_rows(trace)


def test_no_recently_used_rows_beat_the_offline_optimum() -> None:
    lookups = Lookups([draw(60, 90, 0.9, seed=n) for n in range(8)])
    trace = lookups.trace(3)
    found = trace_analysis.hit_rates(trace, [0.02, 0.1, 0.4, 1.0])
    lru = {p["cache_rows"]: p for p in found["lru"]}
    for best, static in zip(found["offline"], found["static_top"], strict=True):
        assert lru[best["cache_rows"]]["rows"] <= best["rows"]
        assert static["rows"] <= best["rows"]
    whole = found["offline"][-1]  # everything fits: what misses are first lookups
    assert lru[whole["cache_rows"]] == whole
    assert whole["cache_rows"] == found["distinct"]


# Skew


@pytest.mark.parametrize(
    ("rows", "s", "q", "close"),
    [
        (10_000, 1.05, 0.0, 0.02),
        (30_000, 0.0, 0.0, 0.01),
        (30_000, 0.7, 0.0, 0.04),
        (1_000, 2.0, 0.0, 0.02),
        (20_000, 1.3, 10.0, 0.05),
    ],
)
def test_the_fit_finds_the_law_it_was_drawn_from(
    rows: int, s: float, q: float, close: float
) -> None:
    names = np.random.default_rng(1).permutation(rows)
    halves = [np.bincount(draw(200_000, rows, s, q, seed), minlength=rows) for seed in (1, 2)]
    found = trace_analysis.fit_zipf(halves[0][names], halves[1][names], rows)
    assert found is not None
    assert found.s == pytest.approx(s, abs=close)
    assert found.q == pytest.approx(q, abs=0.2 * q + 0.2)
    assert found.misfit < 0.04


def test_ranking_rows_by_the_counts_one_fits_would_find_skew_in_chance() -> None:
    """Why the fit takes two halves: on uniform ids one half alone is far off."""
    uniform = [np.bincount(draw(60_000, 20_000, 0.0, seed=n), minlength=20_000) for n in (1, 2)]
    honest, naive = (
        trace_analysis.fit_zipf(uniform[0], other, 20_000) for other in (uniform[1], uniform[0])
    )
    assert honest is not None
    assert naive is not None
    assert honest.s < 0.01
    assert naive.s > 0.1


def test_a_fit_stays_within_its_bounds() -> None:
    steep = np.array([10**6, 1000, 20, 2, 1])
    found = trace_analysis.fit_zipf(steep, steep, len(steep))
    assert found is not None
    assert found.s == trace_analysis.MAX_S


def test_too_little_to_fit() -> None:
    assert trace_analysis.fit_zipf(np.array([3, 1]), np.array([2, 2]), 2) is None


def test_blocks_of_a_table_far_larger_than_memory() -> None:
    for unused, last in (([], [2, 3, 10**14]), ([0, 0], [2, 3, 10**14])):
        counts = np.array([7, 2, 7, *unused])
        blocks = trace_analysis.Blocks.of(counts, counts, 10**14)
        assert blocks.last_ranks.tolist() == last
        assert blocks.lookups.tolist() == [14, 2, 0]


def test_masses_of_blocks_are_the_law() -> None:
    last = np.array([1, 5, 200, 300, 4000, 100_000])
    blocks = trace_analysis.Blocks(last, np.ones(6, np.int64))
    for s, q in ((0.0, 0.0), (0.9, 3.0), (1.0, 0.0), (2.5, 40.0)):
        law = np.cumsum(distributions.zipf_probabilities(100_000, s, q))
        got = np.cumsum(trace_analysis.block_masses(blocks, np.array([s]), q)[0])
        assert got == pytest.approx(law[last - 1], rel=1e-5)


# Numbers of a table


BATCHES = [np.array([5, 5, 9, 5]), np.array([9, 9, 70]), np.array([], np.int64), np.array([5])]


def test_numbers_of_a_small_trace() -> None:
    lookups = Lookups(BATCHES)
    assert trace_analysis.batch_counts(lookups) == {
        "lookups": [4, 3, 0, 1],
        "rows": [2, 2, 0, 1],
        "new": [2, 1, 0, 0],
    }
    lengths = np.array([4, 0, 3, 1])
    found = trace_analysis.analyse_table(
        lookups, lengths, name="t0", num_rows=100, num_warm_batches=1
    )
    assert (found["lookups"], found["distinct"], found["rows"]) == (8, 3, 100)
    assert found["batch_distinct_share"] == 5 / 8
    assert found["once"] == 1 / 3  # of the counts 4, 3, 1
    assert found["rows_of"]["0.5"] == 1
    assert found["rows_of"]["0.75"] == 2
    assert found["rows_of"]["0.99"] == 3
    assert found["bag_mean"] == 2.0
    assert found["fit"] is None


def test_spectrum_and_distances_of_a_small_trace() -> None:
    lookups = Lookups(BATCHES)
    spectrum = trace_analysis.spectrum(lookups)
    assert spectrum["rows"][:3] == pytest.approx([1 / 3, 0, 2 / 3])
    assert spectrum["lookups"][:3] == pytest.approx([1 / 8, 0, 7 / 8])
    # 5 5 9 5 9 9 70 5: distances - 0 - 1 1 0 - 2
    distances = trace_analysis.distance_histogram(lookups)
    assert distances["edges"] == [0, 1, 2, 4]
    assert distances["reuse"] == pytest.approx([2 / 8, 2 / 8, 1 / 8])


def test_ranked_shares_add_up() -> None:
    lookups = Lookups([draw(5000, 300, 1.0)])
    points = trace_analysis.shares_by_rank(lookups)
    assert points[0] == [1.0, lookups.counts.max() / 5000]
    assert all(a[1] >= b[1] for a, b in itertools.pairwise(points))


# A cell and its report


CACHE = CacheConfig(fractions=[0.02, 0.1, 0.5], warm_batches=6, batches=6)
WORK = WorkloadConfig(distribution=Distribution.production, T=2, E=3000, D=1, B=64, L=14)


def cell(**changes: Any) -> Cell:
    plain = Cell("production", "ids", WORK, arms_of(["lookups"], [], []), cache=CACHE)
    return dataclasses.replace(plain, kind="trace", **changes)


def session() -> Session:
    return Session(Config(name="x"), torch.device("cpu"), "run")


def test_a_record_has_every_table_and_all_together() -> None:
    (record,) = trace_cell(cell(), session(), 1.0)
    assert record["status"] == "ok"
    assert record["kind"] == "trace"
    assert [t["name"] for t in record["tables"]] == ["table 0", "table 1"]
    total = sum(record["samples"]["lookups"])
    assert total == 12 * 2 * 64 * 14 == sum(t["lookups"] for t in record["tables"])
    assert record["analysis"]["distinct"] == sum(t["distinct"] for t in record["tables"])
    assert record["analysis"]["warm_batches"] == 6
    assert json.loads(json.dumps(record)) == record


def test_tables_of_a_record_are_what_each_alone_would_be() -> None:
    (both,) = trace_cell(cell(), session(), 1.0)
    alone = cell(workload=dataclasses.replace(WORK, T=1))
    (one,) = trace_cell(alone, session(), 1.0)
    # The same seeds draw the first table's batches first.
    assert both["tables"][0] == one["tables"][0]


def test_two_batches_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("a\n" + "1\n" * 4)
    work = WorkloadConfig(
        distribution=Distribution.trace, file=str(tmp_path / "short.csv"), B=2, E=5
    )
    with pytest.raises(TraceError, match="has 2 batches of 2 samples; at least 4"):
        trace_cell(cell(workload=work), session(), 1.0)


def test_frames_have_a_row_per_table_and_per_size() -> None:
    (record,) = trace_cell(cell(), session(), 1.0)
    rows = frames.tables([record, {"kind": "time"}])
    assert list(rows["table"]) == ["table 0", "table 1"]
    assert rows["lookups"].sum() == sum(record["samples"]["lookups"])
    curves = frames.ideal_hit_rates([record])
    assert set(curves["policy"]) == {"lru", "offline", "static_top"}
    assert curves["fraction"].max() == 1
    assert len(curves[curves["policy"] == "offline"]) == 3


@pytest.fixture
def run(smoke_runs: Mapping[str, Path], tmp_path: Path) -> Path:
    """A copy of the smoke run, to be changed and reported without figures."""
    copy = Path(shutil.copytree(smoke_runs["trace_analysis"], tmp_path / "run"))
    config = OmegaConf.load(copy / "config.yaml")
    config.report.figures = False
    OmegaConf.save(config, copy / "config.yaml")
    return copy


def test_the_report_is_made_of_the_records(run: Path) -> None:
    read = Run.read(run)
    record = trace_report.answer_record(read)
    assert record is not None
    assert record["section"] == "production"
    sentences = trace_report.answer(read)
    total = sum(record["samples"]["lookups"])
    assert (
        f"{total:,} lookups into {record['analysis']['distinct']:,} distinct rows" in sentences[0]
    )
    offline = {p["cache_rows"]: p["lookups"] for p in record["analysis"]["hit_rates"]["offline"]}
    tenth = min(offline, key=lambda n: abs(n - 0.1 * record["analysis"]["distinct"]))
    assert f"could at best serve {text.percent(offline[tenth])} of them" in sentences[0]
    page = (run / "index.html").read_text()
    for name in ("ideal_hit_rate", "popularity", "repetition", "reuse_distance", "working_set"):
        assert (run / f"{name}.png").stat().st_size > 10_000
        assert f"{name}" in (run / "report.md").read_text()
    assert "Every contender of a cell sees the same batches" not in page  # nothing was timed
    assert len(pd.read_csv(run / "tables.csv")) == sum(r["features"] for r in read.records)


def test_a_trace_of_ones_own_is_what_the_answer_is_about(run: Path) -> None:
    lines = (run / "points.jsonl").read_text().splitlines()
    own = json.loads(lines[-1])
    own |= {"section": "sweep", "cell": "sweep own"}
    own["params"] |= {"distribution": "trace", "file": "clicks.pt", "sha256": "ab" * 32}
    with (run / "points.jsonl").open("a") as file:
        file.write(json.dumps(own) + "\n")
    answer = write_report(run)
    assert answer.startswith(pages.SMOKE_NOTICE)
    assert " Of the lookups of the trace clicks.pt (1 table, " in answer
    assert "For comparison, at best it would serve" in answer


def test_nothing_looked_at_yet(run: Path) -> None:
    (run / "points.jsonl").write_text("")
    assert "No answer: no lookups were analysed" in write_report(run)


def test_a_trace_that_failed_is_not_answered_for_by_other_lookups(run: Path) -> None:
    """The built-in laws were looked at, the user's file had too few batches."""
    config = OmegaConf.load(run / "config.yaml")
    config.workload.distribution, config.workload.file = "trace", "clicks.pt"
    OmegaConf.save(config, run / "config.yaml")
    lost = json.loads((run / "points.jsonl").read_text().splitlines()[-1])
    reason = "clicks.pt has 2 batches of 2 samples; at least 4 are needed"
    lost |= {"section": "sweep", "cell": "sweep own", "status": "unsupported", "reason": reason}
    with (run / "points.jsonl").open("a") as file:
        file.write(json.dumps(lost) + "\n")
    answer = write_report(run)
    assert f"No answer: the trace clicks.pt was not analysed ({reason})." in answer
    assert "lookups into" not in answer


def test_the_report_says_when_lookups_were_folded(run: Path) -> None:
    record = json.loads((run / "points.jsonl").read_text().splitlines()[0])
    record |= {"pool_folded": 30, "pool_batches": 2, "lookups": 100}
    (run / "points.jsonl").write_text(json.dumps(record) + "\n")
    (said,) = [n for n in notes.notices(Run.read(run)) if n.startswith("Trace:")]
    assert "15 % of the lookups of production-like ids" in said


def test_how_to_read_names_the_law(smoke_runs: Mapping[str, Path]) -> None:
    assert notes.PRODUCTION_NOTE in notes.how_to_read(Run.read(smoke_runs["production"]))
