"""A run directory to results.csv, figures, report.md and index.html; repeatable at any time."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.config.schema import Kind
from experiments.kinds import keys, sharding, trace
from experiments.kinds.micro import frame
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
    from experiments.kinds.calibration_report import calibrations
    from experiments.report import pages
    from experiments.report.stories import sentences

    run = Run.read(path)
    if run.kind in (Kind.gate, Kind.noise, Kind.power):
        from experiments.gate import rebuild

        return Summary(rebuild.write(path), sum(r["status"] in BROKEN for r in run.records))
    store = RunStore(path)
    store.write_table("results", run.table)
    if len(run.traces):
        store.write_table("hit_rates", run.traces)
    if len(run.operations):
        store.write_table("operations", run.operations)
    if run.kind is Kind.growth:
        store.write_table("growth", keys.growth(run.records))
    if run.kind is Kind.calibration and (found := calibrations(run)):
        store.write("calibration.json", json.dumps(found[max(found)], indent=1) + "\n")
    if run.kind is Kind.sharding:
        store.write_table("sharding", sharding.frame(run.records))
        store.write_table("predictions", sharding.predictions(run.records))
    if run.kind is Kind.trace:
        store.write_table("tables", trace.tables(run.records))
        store.write_table("ideal_hit_rates", trace.curves(run.records))
    if run.kind is Kind.micro:
        store.write_table("latency", frame(run.records))
    drawn = [_draw(figures) for figures in _figures(run)]
    store.write("report.md", pages.markdown(run, [[f for f, _ in part] for part in drawn]))
    store.write("index.html", pages.page(run, drawn))
    bad = sum(r["status"] in BROKEN for r in run.records)
    return Summary(" ".join(sentences(run)), bad)


def _figures(run: Run) -> list[list[tuple[Figure, Run]]]:
    """Of each mode, with what they show of the run; the first also has what is about all of it."""
    from experiments.report import figures as costs
    from experiments.report import outcomes
    from experiments.report.stories import story

    if not run.config.report.figures:
        return [[] for _ in run.modes]
    found = []
    for mode in run.modes:
        part = run.at(mode)
        figures = story(run).figures(part)
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
