"""Published figures next to ours: the rule of the verdicts, the files, the reports."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments import compare, configure
from experiments.compare import pages
from experiments.config.schema import UsageError
from experiments.kind_reports import anchor as anchor_report
from experiments.machine import ceilings
from experiments.report import Run, published
from experiments.report.published import (
    Nature,
    Publication,
    PublishedFigure,
    Quantity,
    Reproduction,
    RunPoint,
)
from experiments.results.metrics import frame
from experiments.workloads.workload import CRITEO_KAGGLE, table_shapes
from tests.experiments import FIRST_SCHEMA, command_line

CPU = FIRST_SCHEMA
ANCHORS = [n for n in configure.groups()["experiment"] if n.startswith("anchor_")]
OTHER_ANCHORS = [name for name in ANCHORS if name != "anchor_tt_rec"]
SOURCE = Publication("x", "X", "read somewhere", "https://x", (), "tt_vs_tbe")


@pytest.fixture(scope="module")
def run() -> Run:
    """The committed run of the CPU."""
    return Run.read(CPU)


def judge(run: Run, **changes: Any) -> published.JudgedFigure:
    """A figure of TT's step on the FBTT README's work, that is as good as ours, changed."""
    figure = PublishedFigure(
        "step",
        1.0,
        "µs per lookup",
        quantity=Quantity.us_per_lookup,
        ours=RunPoint("fbtt_readme", "tt-32"),
        device="epyc_unnamed",
        work={"E": 11000000, "D": 64},
    )
    (same,) = published.judge_figures(run, dataclasses.replace(SOURCE, figures=(figure,)))
    changed = dataclasses.replace(figure, **{"value": same.ours, **changes})
    (found,) = published.judge_figures(run, dataclasses.replace(SOURCE, figures=(changed,)))
    return found


def test_a_time_is_reproduced_on_the_same_device_only(run: Run) -> None:
    found = judge(run)
    assert found.verdict is Reproduction.REPRODUCED
    row = run.table[(run.table["arm"] == "tt-32") & (run.table["section"] == "fbtt_readme")]
    step = row[row["phase"] == "step"].iloc[0]
    assert found.ours == pytest.approx(1e6 * step["median_s"] / 10240)
    assert math.isnan(found.lo)  # one process gives no interval
    elsewhere = judge(run, device="h100_sxm5")
    assert elsewhere.verdict is Reproduction.NOT_RUN
    assert elsewhere.reason == "another device: theirs is of NVIDIA H100 SXM5 80 GB"
    assert elsewhere.ours == found.ours  # still shown
    nameless = judge(run, device="", device_words="a GPU without a name")
    assert nameless.reason == "another device: theirs is of a GPU without a name"


def test_a_time_further_off_than_the_rule_allows_differs(run: Run) -> None:
    ours = judge(run).ours
    assert judge(run, value=ours * 1.14).verdict is Reproduction.REPRODUCED
    found = judge(run, value=ours / 1.2)
    assert found.verdict is Reproduction.DIFFERS
    assert found.reason == "20.0 % above it"
    assert judge(run, value=ours * 1.25).reason == "20.0 % below it"


def test_other_work_or_another_program_is_not_a_reproduction(run: Run) -> None:
    found = judge(run, work={"E": 11000000, "D": 128, "optimizer": "adagrad"})
    assert found.verdict is Reproduction.NOT_RUN
    assert found.reason == "ours is other work: D 64 for 128, optimizer sgd for adagrad"
    assert judge(run, peer="FBTT").reason == "another program: theirs is FBTT"


def test_what_was_measured_in_another_mode_or_way_is_not_judged(run: Run) -> None:
    found = judge(run, work={"E": 11000000, "mode": "cold"})
    assert (found.verdict, found.reason) == (
        Reproduction.NOT_RUN,
        "ours is other work: mode hot for cold",
    )
    assert judge(run, work={"mode": "hot"}).verdict is Reproduction.REPRODUCED
    found = judge(run, otherwise="with the making of the batch")
    assert found.verdict is Reproduction.NOT_RUN
    assert found.reason == "done in another way there: with the making of the batch"


def test_of_several_modes_the_published_one_is_beside_it(run: Run) -> None:
    slower = [
        {
            **r,
            "mode": "cold",
            "samples": {p: [[n, 9 * s] for n, s in v] for p, v in r["samples"].items()},
        }
        for r in run.records
    ]
    both = [*slower, *run.records]  # what the GPU's presets measure comes first
    modes = dataclasses.replace(run, records=both, frames={"results": frame(both, "tbe")})
    hot = judge(run, work={"mode": "hot"})
    assert judge(modes, value=hot.ours, work={"mode": "hot"}).ours == pytest.approx(hot.ours)


def test_what_is_of_another_device_is_in_the_table_and_in_no_figure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, same = judge(run, device="h100_sxm5"), judge(run)
    for found, names in (([elsewhere], []), ([elsewhere, same], ["published"])):
        monkeypatch.setattr(anchor_report.published, "judge_run", lambda run, found=found: found)
        drawn = [f.name for f in anchor_report.figures(run) if f.name == "published"]
        assert drawn == names
        assert len(anchor_report.table(found).rows) == len(found)


def test_every_measured_figure_says_its_mode() -> None:
    for source in published.publications():
        measured = [f for f in source.figures if f.ours and f.nature is Nature.measured]
        assert [f.name for f in measured if f.work["mode"] != "hot"] == []
        if measured:
            config = configure.load([f"+experiment={source.experiment}", "device=cuda"])
            assert [mode.value for mode in config.timing.modes] == ["hot"]


def test_what_follows_from_sizes_must_come_out_anywhere(run: Run) -> None:
    sizes: dict[str, Any] = {
        "quantity": Quantity.compression,
        "nature": Nature.exact,
        "device": "h100_sxm5",
        "ours": RunPoint("criteo", "tt-8"),
        "work": {},
    }
    ours = judge(run, value=1.0, **sizes).ours
    assert ours == pytest.approx(222.2, abs=0.1)
    assert judge(run, value=221.0, **sizes).verdict is Reproduction.REPRODUCED
    assert judge(run, value=200.0, **sizes).verdict is Reproduction.DIFFERS
    # '2e2' has one digit: anything from 150 to 250 is printed so.
    assert judge(run, value=200.0, last_digit=100.0, **sizes).verdict is Reproduction.REPRODUCED
    assert math.isnan(judge(run, value=221.0, **sizes).lo)


def test_no_run_a_smoke_run_and_a_failure_say_so(run: Run) -> None:
    figure = PublishedFigure(
        "step", 1.0, "ms", quantity=Quantity.milliseconds, ours=RunPoint("criteo", "fbgemm")
    )
    source = dataclasses.replace(SOURCE, figures=(figure,))
    assert published.judge_figures(None, source)[0].reason == "no run of tt_vs_tbe at hand"
    assert published.judge_figures(run, source)[0].reason == "our run has no fbgemm in criteo"
    failed = dataclasses.replace(run, frames={"results": run.table.copy()})
    failed.table.loc[failed.table["arm"] == "torch", ["status", "reason"]] = ["oom", "too large"]
    torch = dataclasses.replace(figure, ours=RunPoint("criteo", "torch"))
    (found,) = published.judge_figures(failed, dataclasses.replace(SOURCE, figures=(torch,)))
    assert (found.verdict, found.reason) == (Reproduction.NOT_RUN, "oom: too large")


def test_units_of_others_are_computed_as_they_do(run: Run) -> None:
    row = run.table[(run.table["section"] == "fbtt_readme") & (run.table["arm"] == "tbe")]
    step = row[row["phase"] == "step"].iloc[0]
    ours = {q: formula(step, 2e-3) for q, formula in published.FORMULAS.items()}
    assert ours[Quantity.milliseconds] == 2.0
    assert ours[Quantity.seconds_of_ten] == pytest.approx(0.02)
    assert ours[Quantity.us_per_lookup] == pytest.approx(2000 / 10240)
    assert ours[Quantity.fbgemm_gb_s] == pytest.approx(3 * 4 * 10240 * 64 / 2e-3 / 1e9)


def test_fbgemms_bandwidth_is_its_own_arithmetic() -> None:
    """Its 978 GB/s and its 0.515 ms are one measurement, by the model that OURS has."""
    (source,) = published.publications_of("anchor_fbgemm_tbe")
    by_unit = {
        f.unit: f
        for f in source.figures
        if f.name.endswith("forward and backward") and not f.not_here
    }
    work = by_unit["ms"].work
    lookups = work["T"] * work["B"] * work["L"]
    row: Any = {"phase": "step", "lookups": lookups, "D": work["D"]}
    model = published.FORMULAS[Quantity.fbgemm_gb_s](row, by_unit["ms"].value / 1e3)
    assert model == pytest.approx(by_unit["GB/s"].value, rel=2e-3)


def test_published_sizes_are_those_of_the_experiments() -> None:
    config = configure.load(["+experiment=anchor_tt_rec", "device=cpu"])
    kaggle = config.cases["kaggle_7"].workload
    assert [s.rows for s in table_shapes(kaggle)] == list(CRITEO_KAGGLE)
    terabyte = table_shapes(config.cases["terabyte_7"].workload)
    assert sum(s.rows for s in terabyte) == 49_126_297
    torchrec = configure.load(["+experiment=anchor_torchrec_ebc", "device=cpu"])
    (source,) = published.publications_of("anchor_torchrec_ebc")
    rows = sum(s.rows for s in table_shapes(torchrec.cases["dlrm_128"].workload))
    assert rows == source.figures[0].work["rows"]


@pytest.mark.parametrize("key", sorted(path.stem for path in published.FOLDER.glob("*.yaml")))
def test_every_published_figure_is_of_a_case_that_exists(key: str) -> None:
    (source,) = (s for s in published.publications() if s.key == key)
    assert source.url.startswith("https://")
    config = None
    if source.experiment:
        config = configure.load([f"+experiment={source.experiment}", "device=cuda"])
        assert config.kind == "anchor"
    known = {device.key for device in ceilings.known_devices()}
    for figure in source.figures:
        assert figure.value > 0
        assert figure.device in {"", *known}
        if figure.ours is None:
            assert figure.not_here
            continue
        assert config is not None
        case = config.cases[figure.ours.section]
        table, _, load = figure.ours.arm.partition("@")
        contender, _, rank = table.partition("-")
        assert contender in case.contenders
        assert not load or float(load) in case.keys.loads
        assert not load or figure.ours.phase in case.keys.operations
        assert not rank or int(rank) in case.tt.ranks
        for key, value in figure.work.items():
            if hasattr(case.workload, key):
                ours = getattr(case.workload, key)
                assert getattr(ours, "value", ours) == value, (figure.name, key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "title: x\nurl: y\nrows: [{name: a, value: 1, unit: s, not_here: z}]",
            "missing mandatory value: source",
        ),
        ("title: x\nsource: s\nurl: y\nrow: []", "Key 'row' not in 'Publication'"),
        ("title: x\nsource: s\nurl: y\nrows: [{name: a, value: 1, unit: s}]", "say `ours:` or"),
        ("title: x\nsource: s\nurl: y", "'rows' is missing"),
        ("title: x\nsource: s\nurl: y\nrows:", "'rows' is missing"),
        ("title: x\nsource: s\nurl: y\nrows: [1]", "'rows' must be a list of entries"),
        (
            "title: x\nsource: s\nurl: y\nrows: [{name: a, valu: 1}]",
            "Key 'valu' not in 'PublishedFigure'",
        ),
        (
            "title: x\nsource: s\nurl: y\nrows: [{name: a, value: 1, unit: s, quantity: speed}]",
            "Invalid value 'speed', expected one of",
        ),
    ],
)
def test_a_figure_without_its_source_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        published.read_publication(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "name", ["anchor_tt_rec", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHER_ANCHORS)]
)
def test_an_anchors_report_shows_theirs_beside_ours(
    name: str, smoke_runs: Mapping[str, Path]
) -> None:
    run = Run.read(smoke_runs[name])
    found = published.judge_run(run)
    assert found
    assert {f.verdict for f in found} == {
        Reproduction.NOT_RUN
    }  # at smoke size nothing may be judged
    said = anchor_report.answer(run)[0]
    assert said == (
        f"Of {len(found)} published figures: 0 reproduced, 0 differs, {len(found)} not run here."
    )
    text = (smoke_runs[name] / "report.md").read_text()
    page = (smoke_runs[name] / "index.html").read_text()
    for source in {f.source.key: f.source for f in found}.values():
        assert f"## Published: {source.title}" in text
        assert source.title.replace("'", "&#39;") in page
    assert "this is a smoke run" in text


def test_a_full_size_run_is_judged_in_its_report(tmp_path: Path, run: Run) -> None:
    """TT-Rec's ratio, from the committed run told as the anchor's."""
    config = run.config.copy()
    config.name, config.kind = "anchor_tt_rec", "anchor"
    told = dataclasses.replace(run, config=config)
    told.table["section"] = told.table["section"].replace("criteo", "kaggle_7")
    for record in told.records:
        record["section"] = record["section"].replace("criteo", "kaggle_7")
    found = published.judge_run(told)
    reproduced = [f.figure.value for f in found if f.verdict is Reproduction.REPRODUCED]
    assert reproduced == [117, 221]
    said = anchor_report.answer(told)
    assert said[0] == "Of 6 published figures: 2 reproduced, 0 differs, 4 not run here."
    assert "Kaggle, 7 largest tables, rank 8 (222.2 for 221 × smaller)" in said[1]
    (titled,) = anchor_report.tables(told)
    rows = {row[0].text: row for row in titled[2].rows}
    assert rows["Kaggle, 7 largest tables, rank 8"][4].text == "reproduced"
    drawn = anchor_report.figures(told)[0]
    assert drawn.name == "published"


@pytest.fixture(scope="module")
def _references_are_read_once() -> Iterator[None]:
    """Reading the committed runs takes seconds, and each page needs all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "read", staticmethod(cache(Run.read)))
        yield


@pytest.mark.usefixtures("_references_are_read_once")
def test_the_page_of_published_figures_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(compare)(["--overview", "check"]) == 0, capsys.readouterr().out
    with pytest.raises(UsageError, match="nowhere is not a run"):
        command_line(compare)(["nowhere", "--overview", "check"])


@pytest.mark.usefixtures("_references_are_read_once")
def test_the_page_has_every_figure_and_takes_runs_along(run: Run, tmp_path: Path) -> None:
    page = pages.OVERVIEW.read_text()  # what `overview()` returns: the test above
    for source in published.publications():
        assert f"## {source.title}" in page
        assert source.url in page
    assert "load 0.50: insert_or_assign 1.093 · find 2.47" in page
    assert "values in host memory beyond those on the GPU are measured by tier_hit_rate" in page
    anchor = tmp_path / "anchor"
    anchor.mkdir()
    for name in ("environment.json", "run.json"):
        (anchor / name).write_text((CPU / name).read_text())
    config = (
        (CPU / "config.yaml").read_text().replace("name: tt_vs_tbe", "name: anchor_fbtt_readme")
    )
    (anchor / "config.yaml").write_text(config)
    records = [json.loads(line) for line in (CPU / "points.jsonl").read_text().splitlines()]
    for record in records:
        record["section"] = record["section"].replace("fbtt_readme", "readme")
    (anchor / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    more = pages.overview([anchor]).markdown()
    assert "another device: theirs is of a GPU that the README does not name" in more
