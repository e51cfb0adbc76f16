"""Every experiment runs at smoke size, and its report says what was measured and loads nothing."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from experiments import reference
from experiments.config import configure
from experiments.config.schema import Kind
from experiments.report import Run, text, write_report
from experiments.report.tables import Table, Value

EXPERIMENTS = configure.groups()["experiment"]
TIMED = [
    name
    for name in EXPERIMENTS
    if configure.load([f"+experiment={name}", "device=cpu"]).kind is Kind.time
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_states_its_question_and_fits_the_schema(name: str) -> None:
    lines = (configure.CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# Question: ")
    assert configure.question(name).endswith("?")
    assert configure.load([f"+experiment={name}", "device=cpu"]).name == name
    assert configure.load([f"+experiment={name}", "device=cuda"]).name == name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_and_every_contender_is_right(name: str, smoke_runs: dict[str, Path]) -> None:
    run = Run.read(smoke_runs[name])
    assert run.records
    assert run.failures() == []
    written = {p.suffix for p in run.path.iterdir()}
    assert written >= {".yaml", ".json", ".jsonl", ".csv", ".md", ".html", ".png", ".svg"}


@pytest.mark.parametrize("name", TIMED)
def test_the_first_sentence_is_made_of_measured_numbers(
    name: str, smoke_runs: dict[str, Path]
) -> None:
    run = Run.read(smoke_runs[name])
    rows = run.table[run.table["cell"] == run.headline_cell()].set_index(["arm", "phase"])
    subject = rows.loc[(run.subject.key, "step")]
    baseline = rows.loc[(run.baseline.key, "step")]
    markdown = (run.path / "report.md").read_text().splitlines()
    first = markdown[2].split("**")[1]
    for number in (
        text.times(subject["ratio"]),
        text.interval(subject["ratio_lo"], subject["ratio_hi"]),
        text.seconds(subject["median_s"]),
        text.seconds(baseline["median_s"]),
        text.size(subject["weights_bytes"]),
        text.size(baseline["weights_bytes"]),
    ):
        assert number in first
    heading = re.search(r"<h1>(.*?)</h1>", (run.path / "index.html").read_text(), re.DOTALL)
    assert heading is not None
    assert heading[1].startswith("On this machine")


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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_is_self_contained(name: str, smoke_runs: dict[str, Path]) -> None:
    page = (smoke_runs[name] / "index.html").read_text()
    parser = Loads()
    parser.feed(page)
    assert [u for u in parser.urls if not u.startswith("#")] == []
    assert not re.search(r"url\((?!['\"]?#)", page)
    assert "@import" not in page
    assert not {"link", "iframe", "object", "img"} & set(parser.tags)
    assert parser.tags.count("svg") >= 2
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_names_its_provenance_and_how_to_repeat_it(
    name: str, smoke_runs: dict[str, Path]
) -> None:
    run = Run.read(smoke_runs[name])
    page = (run.path / "index.html").read_text()
    assert f"python run.py +experiment={name} timing=smoke" in page
    assert run.environment["torch"] in page
    assert "How to read this" in page
    assert "Failures" in page
    assert "Smoke run" in page  # sizes were capped, and the report says so


def test_published_numbers_are_labelled_and_never_divided(smoke_runs: dict[str, Path]) -> None:
    markdown = (smoke_runs["tt_vs_tbe"] / "report.md").read_text()
    lines = [x for x in markdown.splitlines() if "0.416 us" in x]
    assert len(lines) == 1
    assert "Published, not measured here" in lines[0]
    assert "FBTT-Embedding" in lines[0]


def test_scaled_tables_are_admitted(smoke_runs: dict[str, Path], tmp_path: Path) -> None:
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
    assert text.size(None) == text.NONE
    assert text.times(float("nan")) == text.NONE
    assert text.interval(1.0, float("nan")) == "[too few rounds]"
    assert text.fraction(187.04) == "1/187"
    assert text.fraction(0.5) == "2.00×"


def test_tables_escape_what_would_break_them() -> None:
    table = Table(["a|b", "<c>"], [[Value("x|y"), Value("<z>", 3.0)]])
    assert "x\\|y" in table.markdown()
    assert "&lt;z&gt;" in table.html()
    assert 'data-key="3"' in table.html()


def test_results_csv_is_the_table(smoke_runs: dict[str, Path]) -> None:
    run = Run.read(smoke_runs["tt_vs_tbe"])
    stored = pd.read_csv(run.path / "results.csv")
    assert list(stored["arm"]) == list(run.table["arm"])
    assert stored["median_s"].to_numpy() == pytest.approx(run.table["median_s"].to_numpy())


def test_a_smoke_run_cannot_become_a_reference(smoke_runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="full size"):
        reference.keep(smoke_runs["tt_vs_tbe"], tmp_path)


def test_a_reference_of_traces_renders_into_a_readme(
    smoke_runs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(smoke_runs["cache_hit_rate"], tmp_path / "some-cpu" / "cache_hit_rate")
    new = reference.rendered(f"{reference.START}\n{reference.END}\n", tmp_path)
    assert "| cache | LRU | LFU | offline optimum (ideal) | static top-k (ideal) | step ÷" in new
    assert "Share of the lookups of a table of 300 rows" in new


def test_reference_results_render_into_a_readme(
    smoke_runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "some-cpu" / "tt_vs_tbe"
    shutil.copytree(smoke_runs["tt_vs_tbe"], folder)
    readme = f"# x\n{reference.START}\nstale\n{reference.END}\nrest\n"
    new = reference.rendered(readme, tmp_path)
    assert "stale" not in new
    assert new.endswith(f"{reference.END}\nrest\n")
    assert reference.rendered(new, tmp_path) == new
    run = Run.read(folder)
    row = run.table[(run.table["arm"] == "tt-16") & (run.table["phase"] == "step")].iloc[0]
    assert text.times(row["compression"]) in new
    assert "| TT rank 16 |" in new
    with pytest.raises(ValueError, match="once each"):
        reference.rendered("no markers", tmp_path)


def test_the_readme_says_what_the_committed_references_say() -> None:
    if not (reference.ROOT / "README.md").exists():
        pytest.skip("an installed package has no README.md")
    assert reference.main(["check"]) == 0
