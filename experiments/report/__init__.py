"""A run directory to results.csv, figures, report.md and index.html; repeatable at any time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.report.data import Run
from experiments.results.store import RunStore

__all__ = ["Run", "Summary", "write_report"]


@dataclass(frozen=True)
class Summary:
    """What the terminal is told."""

    answer: str
    failures: int  # wrong or broken; running out of memory and unsupported tasks are results


def write_report(path: Path) -> Summary:
    """Write every derived file of the run in `path` from its raw records."""
    from experiments.report import pages
    from experiments.report.stories import story

    run = Run.read(path)
    store = RunStore(path)
    store.write("results.csv", run.table.to_csv(index=False))
    if len(run.traces):
        store.write("hit_rates.csv", run.traces.to_csv(index=False))
    figures, drawings = _draw(run) if run.config.report.figures else ([], [])
    store.write("report.md", pages.markdown(run, figures))
    store.write("index.html", pages.page(run, figures, drawings))
    bad = sum(r["status"] in ("wrong", "error") for r in run.records)
    return Summary(" ".join(story(run).answer(run)), bad)


def _draw(run: Run) -> tuple[list, list[list[str]]]:
    import matplotlib.pyplot as plt

    from experiments.report import figures as plots
    from experiments.report import style
    from experiments.report.stories import story

    found = story(run).figures(run)
    drawings = []
    with style.theme():
        for figure in found:
            canvas = style.sheet(figure, plots.subtitle(run))
            canvas.savefig(run.path / f"{figure.name}.png", dpi=150)
            canvas.set_layout_engine("none")  # the layout that the PNG found serves the SVG too
            canvas.savefig(run.path / f"{figure.name}.svg", metadata={"Date": None})
            plt.close(canvas)
            drawings.append([style.inline_svg(panel) for panel in figure.panels])
    return found, drawings
