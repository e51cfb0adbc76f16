"""A comparison to a folder: index.html, report.md, compare.csv, figures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.compare import answer, figures, pages
from experiments.compare.pages import Comparison
from experiments.paths import ROOT
from experiments.report import style
from experiments.report.style import Figure
from experiments.results.store import RunStore

FOLDER = ROOT / "reports" / "compare"


def write(runs: Sequence[Path], folder: Path | None, command: str) -> Path:
    """Everything; says the answer on the terminal and returns the page's path."""
    found = Comparison.of(runs, command)
    store = RunStore((folder or FOLDER / found.name).resolve())
    store.write("compare.csv", found.rows.to_csv(index=False))
    drawn = _draw(found, store)
    store.write("report.md", pages.markdown(found, [figure for figure, _ in drawn]))
    page = store.write("index.html", pages.page(found, drawn))
    for difference in found.differences:
        print(difference.sentence())
    print("\n" + " ".join(answer.sentences(found.machines, found.rows)))
    return page


def _draw(found: Comparison, store: RunStore) -> list[tuple[Figure, list[str]]]:
    every = figures.figures(found.machines, found.rows)
    with style.theme():
        return [(f, style.draw(f, found.subtitle, store.path)) for f in every]
