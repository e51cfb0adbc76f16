"""A run directory to results.csv, figures, report.md and index.html; repeatable at any time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.report.data import Run
from experiments.results.store import RunStore

if TYPE_CHECKING:
    from experiments.report.style import Figure

__all__ = ["Run", "Summary", "write_report"]


@dataclass(frozen=True)
class Summary:
    """What the terminal is told."""

    answer: str
    failures: int  # wrong or broken; running out of memory and unsupported tasks are results


BROKEN = ("wrong", "error", "timeout")


def write_report(path: Path) -> Summary:
    """Write every derived file of the run in `path` from its raw records."""
    from experiments.report import pages

    run = Run.read(path)
    bad = sum(r["status"] in BROKEN for r in run.records)
    if (answer := run.kind.rebuild(path)) is not None:
        return Summary(answer, bad)
    store = RunStore(path)
    own = {"results", *run.kind.frames([], run.config.report)}
    for name, table in run.frames.items():
        if len(table) or name in own:
            store.write_table(name, table)
    for name, content in run.kind.write_files(run).items():
        store.write(name, content)
    drawn = [_draw(figures) for figures in _figures(run)]
    store.write("report.md", pages.markdown(run, [[f for f, _ in part] for part in drawn]))
    store.write("index.html", pages.page(run, drawn))
    return Summary(" ".join(pages.sentences(run)), bad)


def _figures(run: Run) -> list[list[tuple[Figure, Run]]]:
    """Of each mode, with what they show of the run; the first also has what is about all of it."""
    from experiments.report import figures as costs
    from experiments.report import outcomes

    if not run.config.report.figures:
        return [[] for _ in run.modes]
    found = []
    for mode in run.modes:
        part = run.at(mode)
        figures = run.kind.figures(part)
        if mode == run.modes[0]:
            whole = [(f, run) for f in (*costs.modes(run), *outcomes.figures(run))]
            found.append([*((f, part) for f in figures), *whole])
        else:
            found.append([(_named(f, mode), part) for f in figures])
    return found


def _named(figure: Figure, mode: str) -> Figure:
    title = f"{figure.title} · {mode}"
    return dataclasses.replace(figure, name=f"{figure.name}_{mode}", title=title)


def _draw(figures: list[tuple[Figure, Run]]) -> list[tuple[Figure, list[str]]]:
    """The figures as files, and their panels for the page."""
    from experiments.report import figures as plots
    from experiments.report import style

    with style.theme():
        return [(f, style.draw(f, plots.subtitle(run), run.path)) for f, run in figures]
