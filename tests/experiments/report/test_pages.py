"""Every experiment runs at smoke size, and its report says what was measured and loads nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import cli, configure, kinds, reference, report
from experiments.config.schema import UsageError
from experiments.machine.flags import explain, remedy
from experiments.paths import ROOT
from experiments.report import Run, answer, notes, text, write_report
from experiments.report.document import Page, Section
from experiments.report.results import flags_table, section_table
from experiments.report.tables import Table, Value
from experiments.results.store import runs_in
from tests.experiments import command_line
from tests.experiments.made_up import Recipe, lines, make_run

main = command_line(report)
EXPERIMENTS = configure.groups()["experiment"]
# Read as text: to compose all of them takes every process that collects tests some seconds.
_FILES = {
    name: (configure.CONF / "experiment" / f"{name}.yaml").read_text() for name in EXPERIMENTS
}
_NAMED = {name: re.search(r"^kind: (\w+)", text, re.MULTILINE) for name, text in _FILES.items()}
KINDS = {name: named[1] if named else "time" for name, named in _NAMED.items()}
# Those that lead their processes themselves have pages of their own, and tests of their own.
REPORTED = [name for name, kind in KINDS.items() if not kinds.find(kind).reporting.special_report]
NOT_HERE = ("missing", "unsupported")  # an optional package that is not installed is not a failure
TIMED = [name for name, kind in KINDS.items() if kind == "time"]
# Of every kind one page is in `make test`, the others in `make nightly`: the smoke run of the one
# that is named here, because other tests look at it as well, else of the first.
CHOSEN = {
    "time": "tt_vs_tbe",
    "anchor": "anchor_tt_rec",
    "cache": "cache_hit_rate",
    "sharding": "sharding_scaling",
}
ONE_PER_KIND = {kind: name for name, kind in reversed(KINDS.items())} | CHOSEN
REFERENCES = runs_in(reference.REFERENCE, "*/*")


def one_per_kind(names: Sequence[str]) -> list[Any]:
    """Mark all experiments but one of each kind as slow."""
    chosen = ONE_PER_KIND.values()
    marks = {name: () if name in chosen else (pytest.mark.slow,) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def test_every_kind_has_a_page_in_the_suite() -> None:
    assert ONE_PER_KIND.keys() == kinds.KINDS.keys()
    assert all(KINDS[name] == kind for kind, name in ONE_PER_KIND.items())


@pytest.mark.parametrize("name", one_per_kind(EXPERIMENTS))
def test_an_experiment_states_its_question_and_fits_the_schema(name: str) -> None:
    lines = (configure.CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# Question: ")
    assert configure.question(name).endswith("?")
    config = configure.load([f"+experiment={name}", "device=cuda"])  # runs here are on the CPU
    assert config.name == name
    assert config.kind == KINDS[name]


@pytest.mark.parametrize("name", one_per_kind(REPORTED))
def test_it_runs_and_every_contender_is_right(name: str, smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs[name])
    assert run.records
    assert [r for r in run.failures() if r["status"] not in NOT_HERE] == []
    written = {p.suffix for p in run.path.iterdir()}
    assert written >= {".yaml", ".json", ".jsonl", ".csv", ".md", ".html", ".png", ".svg"}


@pytest.mark.parametrize("name", one_per_kind(TIMED))
def test_the_first_sentence_is_made_of_measured_numbers(
    name: str, smoke_runs: Mapping[str, Path]
) -> None:
    run = Run.read(smoke_runs[name])
    rows = run.table[run.table["cell"] == run.headline_cell()].set_index(["arm", "phase"])
    subject = rows.loc[(run.subject.key, "step")]
    baseline = rows.loc[(run.baseline.key, "step")]
    markdown = (run.path / "report.md").read_text().splitlines()
    assert markdown[2].startswith("**Smoke run: ")  # and no claim in bold
    first = markdown[2]
    for number in (
        text.times(subject["ratio"]),
        text.interval(subject["ratio_lo"], subject["ratio_hi"]),
        text.seconds(subject["median_s"]),
        text.seconds(baseline["median_s"]),
        text.size(subject["weights_bytes"]),
        text.size(baseline["weights_bytes"]),
    ):
        assert number in first
    page = (run.path / "index.html").read_text()
    assert "<h1>Smoke run: " in page
    assert "<p>On " in page
    assert "<div class=tiles>" not in page  # no large number that means nothing
    assert page.index("<figure>") < page.index("<table")  # the answer's figure is the first


class Loads(HTMLParser):
    """Collects everything a browser would fetch, and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data") and value:
                self.urls.append(value)


@pytest.mark.parametrize("name", one_per_kind(EXPERIMENTS))
def test_the_page_is_self_contained(name: str, smoke_runs: Mapping[str, Path]) -> None:
    page = (smoke_runs[name] / "index.html").read_text()
    parser = Loads()
    parser.feed(page)
    assert [u for u in parser.urls if not u.startswith("#")] == []
    assert not re.search(r"url\((?!['\"]?#)", page)
    assert "@import" not in page
    assert not {"link", "iframe", "object", "img"} & set(parser.tags)
    assert parser.tags.count("svg") >= 1
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


@pytest.mark.parametrize("name", one_per_kind(REPORTED))
def test_the_page_names_its_provenance_and_how_to_repeat_it(
    name: str, smoke_runs: Mapping[str, Path]
) -> None:
    run = Run.read(smoke_runs[name])
    page = (run.path / "index.html").read_text()
    assert f"python run.py +experiment={name} timing=smoke" in page
    assert run.environment["torch"] in page
    assert "How to read this" in page
    assert "Failures" in page
    assert "Smoke run" in page  # sizes were capped, and the report says so


def test_published_numbers_are_labelled_and_never_divided(smoke_runs: Mapping[str, Path]) -> None:
    markdown = (smoke_runs["tt_vs_tbe"] / "report.md").read_text()
    lines = [x for x in markdown.splitlines() if "0.416 us" in x]
    assert len(lines) == 1
    assert "Published, not measured here" in lines[0]
    assert "FBTT-Embedding" in lines[0]


def test_scaled_tables_are_admitted(smoke_runs: Mapping[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(smoke_runs["tt_vs_tbe"], path)
    config = path / "config.yaml"
    uncapped = re.sub(r"max_(rows|batch|cells): \d+", r"max_\1: 0", config.read_text())
    config.write_text(uncapped.replace("figures: true", "figures: false"))
    write_report(path)
    report = (path / "report.md").read_text()
    assert "Smoke run" not in report
    assert "the tables of the Criteo-Kaggle tables were scaled" in report


def test_numbers_as_people_read_them() -> None:
    assert text.digits(1234.6) == "1,235"
    assert text.digits(0.012345) == "0.0123"
    assert text.seconds(0.00123) == "1.23 ms"
    assert text.seconds(4e-10) == "0.400 ns"
    assert text.size(2_160_804_928) == "2.16 GB"
    assert text.size(None) == text.DASH
    assert text.times(float("nan")) == text.DASH
    assert text.interval(1.0, float("nan")) == "[one process]"
    assert text.fraction(187.04) == "1/187"
    assert text.fraction(0.5) == "2.00×"


def test_tables_escape_what_would_break_them() -> None:
    table = Table(["a|b", "<c>"], [[Value("x|y"), Value("<z>", 3.0)]])
    assert "x\\|y" in table.markdown()
    page = Page("n", ["a"], [Section("t", table=table)]).html({})
    assert "&lt;z&gt;" in page
    assert 'data-key="3"' in page


def test_markdown_keeps_no_html_from_labels(tmp_path: Path) -> None:
    recipe = Recipe(words=SMALL, environment={"command": "run.py a<script>b"})
    path = make_run(tmp_path / "run", recipe)
    samples = (path / "points.jsonl").read_text()
    bad = "TBE <script>alert(1)</script> [x](javascript:alert(1))\\n\\n<img src=x onerror=y>"
    (path / "points.jsonl").write_text(samples.replace('"label": "TBE"', f'"label": "{bad}"'))
    write_report(path)
    page = (path / "report.md").read_text()
    assert "TBE &lt;script>" in page
    assert not re.search(r"^(?!    ).*<", page, re.MULTILINE)  # only the command's code block
    assert "](javascript:" not in page
    assert re.search(r"^    run\.py a<script>b$", page, re.MULTILINE)


def test_labels_cannot_make_lists_whose_indented_lines_are_html(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Recipe(words=(*SMALL, "report.figures=false")))
    bad = "x\n\n- y\n\n    <script>alert(1)</script>\n[z]: javascript:alert(1)\n"
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"question": bad}))
    points = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    lines = [json.dumps(point | {"title": bad, "label": bad}) for point in points]
    (path / "points.jsonl").write_text("\n".join(lines) + "\n")
    write_report(path)
    page = (path / "report.md").read_text()
    assert r"*Question: x  - y  &lt;script>alert(1)&lt;/script> [z]\: javascript:alert(1)*" in page
    assert "<" not in page
    assert "]:" not in page
    assert "\n- y" not in page


def test_markdown_shows_as_code_only_what_the_page_marks() -> None:
    words = ["- a", "    <b>", "[x](y.png) [z](data:q)"]
    page = Page("n", ["a"], [Section(paragraphs=words), Section("R", code="c <d>\n<e>")]).markdown()
    want = ["- a", "", "    &lt;b>", "", r"[x](y.png) [z]\(data:q)", "", "## R", ""]
    assert page.split("\n")[4:] == [*want, "    c <d>", "    <e>", ""]


@pytest.mark.parametrize("link", ["[x]: data:q", "> - [x]:\ndata:q", "[x](\ndata:q)"])
def test_markdown_defines_no_links(link: str) -> None:
    assert not re.search(r"\][(:]", text.markdown_document([link]))


def test_results_csv_is_the_table(smoke_runs: Mapping[str, Path]) -> None:
    run = Run.read(smoke_runs["tt_vs_tbe"])
    stored = pd.read_csv(run.path / "results.csv")
    assert list(stored["arm"]) == list(run.table["arm"])
    assert stored["median_s"].to_numpy() == pytest.approx(run.table["median_s"].to_numpy())


def test_a_report_needs_no_torch() -> None:
    """It needs only numbers: reading results does not import torch."""
    modules = ("report.pages", "compare.pages", "gallery", "bundle.verify", "reference")
    imports = "".join(f"import experiments.{module}; " for module in modules)
    program = f"{imports}import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_smoke_run_cannot_become_a_reference(
    smoke_runs: Mapping[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="full size"):
        reference.keep(smoke_runs["tt_vs_tbe"], tmp_path)


def test_a_reference_of_traces_renders_into_a_readme(
    smoke_runs: Mapping[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(smoke_runs["cache_hit_rate"], tmp_path / "some-cpu" / "cache_hit_rate")
    new = reference.with_results(f"{reference.RESULTS[0]}\n{reference.RESULTS[1]}\n", tmp_path)
    assert "| cache | LRU | LFU | offline optimum (ideal) | static top-k (ideal) | step ÷" in new
    assert "Share of the lookups of a table of 300 rows" in new


def test_reference_results_render_into_a_readme(
    smoke_runs: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "some-cpu" / "tt_vs_tbe"
    shutil.copytree(smoke_runs["tt_vs_tbe"], folder)
    readme = f"# x\n{reference.RESULTS[0]}\nstale\n{reference.RESULTS[1]}\nrest\n"
    new = reference.with_results(readme, tmp_path)
    assert "stale" not in new
    assert new.endswith(f"{reference.RESULTS[1]}\nrest\n")
    assert reference.with_results(new, tmp_path) == new
    run = Run.read(folder)
    row = run.table[(run.table["arm"] == "tt-16") & (run.table["phase"] == "step")].iloc[0]
    assert text.times(row["compression"]) in new
    assert "| TT rank 16 |" in new
    with pytest.raises(ValueError, match="once each"):
        reference.with_results("no markers", tmp_path)


def test_the_readme_says_what_the_committed_references_say() -> None:
    if not (reference.ROOT / "README.md").exists():
        pytest.skip("an installed package has no README.md")
    assert cli.main(["reference", "check"]) == 0


SMALL = (
    *("+experiment=tt_vs_tbe", "sweep.D=[16]", "sweep.B=[]", "sweep.L=[]", "sweep.s=[]"),
    *("sweep.rank=[]", "report.figures=false"),
)


def _rows(run: Run, arm: str) -> pd.Series:
    """The step of an arm on the headline."""
    rows = run.table[(run.table["cell"] == run.headline_cell()) & (run.table["arm"] == arm)]
    return rows[rows["phase"] == "step"].iloc[0]


def test_three_processes_give_a_verdict_and_the_sentence_says_it(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=SMALL)))
    first = answer.answer(run)[0]
    row = _rows(run, "tt-16")
    assert row["verdict"] == "SLOWER"
    assert "; slower, 3 processes)" in first
    assert text.interval(row["ratio_lo"], row["ratio_hi"]) in first
    memory, step, *_ = answer.tiles(run)
    assert (memory.style, step.style) == ("", "bad")
    table = section_table(run, "criteo")
    verdicts = [r[table.headings.index("verdict")].text for r in table.rows]
    assert verdicts[0] == "baseline"
    assert set(verdicts[1:]) == {"slower"}


def test_one_process_gives_none(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=SMALL, replicates=1)))
    assert "[one process]" in answer.answer(run)[0]
    assert "verdict" not in section_table(run, "criteo").headings
    assert any("neither an interval nor a verdict" in t for t in notes.how_to_read(run))


def test_an_absent_contender_says_why(tmp_path: Path) -> None:
    path = make_run(tmp_path, Recipe(("+experiment=tbe_vs_torch",)))
    records = [r for r in lines(path) if r["contender"] != "torch"]
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "(it was not measured)" in answer.answer(Run.read(path))[0]
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("baseline: torch", "baseline: fbgemm"))
    assert "(it was not among the contenders)" in answer.answer(Run.read(path))[0]


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_run_without_any_result_has_a_report(tmp_path: Path) -> None:
    recipe = Recipe(("+experiment=tbe_vs_torch",), fate=lambda arm, cell, n: ("error", "no luck"))
    answer_text = write_report(make_run(tmp_path, recipe), draws_figures=False)
    assert "No answer: TBE has no result on the headline workload (no luck)" in answer_text


def test_one_process_has_no_interval_and_two_take_that_of_the_run(tmp_path: Path) -> None:
    """Cells with fewer processes must not look more precise than those with all of them."""
    path = make_run(tmp_path, Recipe(words=SMALL))
    records = lines(path)
    cells = list(dict.fromkeys(r["cell"] for r in records))
    few = {cells[0]: 1, cells[1]: 2}
    kept = [r for r in records if r["replicate"] < few.get(r["cell"], 3)]
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    run = Run.read(path)
    table = run.table[run.table["arm"] != run.baseline.key]
    width = table["ratio_hi"] / table["ratio_lo"]
    assert table[table["cell"] == cells[0]][["ratio_lo", "ratio_hi"]].isna().all().all()
    assert run.table[run.table["cell"] == cells[0]][["lo_s", "hi_s"]].isna().all().all()
    two, three = (width[table["cell"] == cell] for cell in cells[1:3])
    # An interval from the spread of two processes alone is 12.7 of its deviations to either side.
    assert 1 < two.median() < 1.5
    assert three.notna().all()
    said = " ".join(notes.notices(run))
    assert "their intervals say so" not in said
    assert "One process gives no interval" in said
    assert "[one process]" in answer.answer(run)[0]


def test_an_open_question_says_what_could_have_been_seen(tmp_path: Path) -> None:
    """A baseline against itself under another name: no difference, and too few rounds to say so."""
    path = make_run(tmp_path, Recipe(words=(*SMALL, "report.subject=torch"), rounds=2))
    records = lines(path)
    for number, record in enumerate(records):
        if record["arm"] == "torch":
            base = next(
                r
                for r in records
                if r["arm"] == "tbe"
                and (r["cell"], r["replicate"]) == (record["cell"], record["replicate"])
            )
            factor = 1 + 0.2 * (record["replicate"] - 1)
            record["samples"] = {
                phase: [[n, s * factor] for n, s in taken]
                for phase, taken in base["samples"].items()
            }
            records[number] = record
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = Run.read(path)
    seen = f"{100 * _rows(run, 'torch')['visible']:.1f} %"
    assert f"; unsure: 3 processes can show differences of {seen} or more)" in answer.answer(run)[0]


def test_cells_that_there_was_no_time_for_are_admitted(tmp_path: Path) -> None:
    path = make_run(tmp_path, Recipe(words=SMALL))
    info = json.loads((path / "run.json").read_text()) | {"cells_left_out": 3, "cells": 7}
    (path / "run.json").write_text(json.dumps(info))
    assert "3 of 7 cells were not measured" in " ".join(notes.notices(Run.read(path)))


def test_a_pass_that_the_budget_cut_off_is_admitted(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=SMALL, short=(2, 3), status="interrupted")))
    assert sorted(run.processes_per_cell().values()) == [2, 2, 3, 3]
    said = " ".join(notes.notices(run))
    assert "2 of 4 cells were measured in fewer than the planned 3 processes (fewest: 2)" in said
    assert "Interrupted after 4 of 4 cells" in said
    (run.path / "run.json").unlink()
    assert "Ended early (killed) after 4 cells" in " ".join(notes.notices(Run.read(run.path)))


def test_every_mode_has_its_own_tables_and_the_answer_names_it(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=SMALL, modes=("cold", "hot"))))
    sentences = answer.answer(run)
    assert sentences[0].startswith("On the Criteo-Kaggle tables, TT rank 16 needs 1/")
    assert ", mode cold;" in sentences[0]
    gain = _rows(run.in_mode("cold"), "torch")
    assert f" TBE is {text.ratio(gain)} as fast as EmbeddingBag" in sentences[0]
    hot = _rows(run.in_mode("hot"), "tt-16")
    assert f"In mode hot a step takes {text.times(hot['ratio'])}" in sentences[-1]
    write_report(run.path)
    report = (run.path / "report.md").read_text()
    assert report.count("## The Criteo-Kaggle tables") == 2
    assert "# Mode: hot" in report
    assert notes.MODE_NOTES["cold"] in report
    page = (run.path / "index.html").read_text()
    assert '<h2 id="mode-hot">Mode: hot</h2>' in page
    assert page.count("<details>") == 3


@pytest.mark.parametrize(
    "reference_run",
    [*REFERENCES[:1], *(pytest.param(r, marks=pytest.mark.slow) for r in REFERENCES[1:])],
)
def test_committed_references_of_any_schema_go_on_rendering(
    reference_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(reference_run, path)
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("figures: true", "figures: false"))
    assert main([str(path)]) == 0
    page = (path / "index.html").read_text()
    assert "No answer" not in page
    assert str(json.loads((path / "environment.json").read_text())["torch"]) in page


def test_rebuilding_what_is_no_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path / "good", Recipe(words=SMALL, replicates=1))
    assert main([str(tmp_path), str(good)]) == 2
    told = capsys.readouterr()
    assert f"{tmp_path} is not a run" in told.err
    assert (good / "index.html").exists()
    assert f"report: {good / 'index.html'}" in told.out


def test_a_configuration_that_broke_off_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run", Recipe(words=SMALL, replicates=1))
    config = path / "config.yaml"
    config.write_text(config.read_text().partition("report:\n")[0])
    assert cli.main(["report", str(path)]) == 2
    assert "config.yaml is incomplete: it has no report.subject" in capsys.readouterr().err


def test_flags_of_the_machine_are_said_once_with_what_would_help(tmp_path: Path) -> None:
    path = make_run(tmp_path, Recipe(words=SMALL))
    records = [r | {"flags": ["throttled", "virtual"]} for r in lines(path)]
    (path / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = Run.read(path)
    total = len(run.table) // 2
    (said,) = [n for n in notes.notices(run) if n.startswith("While this was measured")]
    assert said.endswith(f"{explain('throttled')} ({total} of {total} rows).")
    assert explain("virtual") not in said  # true of most machines there are; the table has it
    shown = [[v.text for v in row] for row in flags_table(run).rows]
    assert [row[0] for row in shown] == ["throttled", "virtual"]
    assert shown[0][3] == remedy("throttled")
