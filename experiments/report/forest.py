"""Every ratio with its interval and the processes behind it, sorted: what is sure, what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import where
from experiments.report.data import Run
from experiments.report.effects import per_process
from experiments.report.palette import GRID, INK, colour_of
from experiments.report.style import WIDTH, Drawing, Figure, Panel
from experiments.results.metrics import MARGIN

MOST = 44  # lines of a panel; beyond it the strongest and the weakest are shown


@dataclass(frozen=True)
class Line:
    """One ratio: its interval, what each process found, what counts as a difference."""

    label: str
    ratio: float
    lo: float
    hi: float
    processes: Sequence[float]
    colour: str
    margin: float = math.nan
    sure: bool = True  # drawn filled; hollow where the verdict is open


def figures(run: Run) -> list[Figure]:
    """The forest of a run: a panel per phase."""
    if not len(run.table):
        return []
    panels = []
    for phase in ("step", "forward"):
        lines = _lines(run, phase)
        if lines:
            panels.append(panel(phase.capitalize(), lines, f"time ÷ {run.baseline.label}"))
    several = run.table["processes"].max() > 1
    dots = (
        "Small dots: what each fresh process found by itself. " if several else
        "One process per cell: the interval knows the noise within it, not that between processes. "
    )  # fmt: skip
    judged = any(text.verdict(v) for v in run.table["verdict"])
    band = f"Grey: within {100 * MARGIN:g} %, which does not count. " if judged else ""
    return [
        Figure(
            "forest",
            f"Every ratio to {run.baseline.label}, with its interval",
            f"Bars: 95 % interval. {dots}{band}Filled: the interval leaves out 1. "
            "Left of 1 the contender is faster.",
            f"{run.table['cell'].nunique()} cells",
            panels,
        )
    ] if panels else []  # fmt: skip


def _lines(run: Run, phase: str) -> list[Line]:
    rows = run.table[
        (run.table["phase"] == phase)
        & (run.table["arm"] != run.baseline.key)
        & (run.table["status"] == "ok")
        & run.table["ratio"].notna()
    ].sort_values("ratio")
    if len(rows) > MOST:
        half = MOST // 2
        rows = rows.iloc[[*range(half), *range(len(rows) - half, len(rows))]]
    margin = MARGIN if any(text.verdict(v) for v in rows["verdict"]) else math.nan
    every = per_process(run)
    own = {
        key: list(part["ratio"])
        for key, part in every[every["phase"] == phase].groupby(["cell", "arm"])
    }
    found = []
    for _, row in rows.iterrows():
        lo, hi = float(row["ratio_lo"]), float(row["ratio_hi"])
        place = where(run, row) if row["section"] == SWEEP else str(row["section"])
        found.append(
            Line(
                f"{row['label']} · {place}", float(row["ratio"]), lo, hi,
                own.get((row["cell"], row["arm"]), []), colour_of(str(row["contender"])),
                margin, sure=math.isfinite(lo) and not lo <= 1 <= hi,
            )
        )  # fmt: skip
    return found


def panel(title: str, lines: Sequence[Line], xlabel: str) -> Panel:
    """Lines from the top in the order given; the numbers stand at the right."""
    return Panel(title, _draw(lines, xlabel), WIDTH + 0.8, max(2.0, 0.235 * len(lines) + 1.0))


def _ticks(span: float) -> Sequence[float]:
    """Digits that have a number on an axis that reaches so far, so that they never touch."""
    if span > 300:
        return (1.0,)
    return (1.0, 2.0, 5.0) if span > 4 else (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0, 9.0)


def _draw(lines: Sequence[Line], xlabel: str) -> Drawing:
    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines):
            if math.isfinite(line.margin):
                band = (place - 0.5, place + 0.5)
                axes.fill_betweenx(
                    band, 1 / (1 + line.margin), 1 + line.margin, color=GRID, alpha=0.6, lw=0
                )
            if math.isfinite(line.lo):
                axes.plot([line.lo, line.hi], [place, place], color=line.colour, lw=2.2,
                          solid_capstyle="butt")  # fmt: skip
            inside = line.colour if line.sure else "none"
            axes.plot(line.ratio, place, "o", color=line.colour, mfc=inside, ms=5, mew=1.2)
            if len(line.processes) > 1:
                axes.plot(line.processes, [place + 0.27] * len(line.processes), ".",
                          color=line.colour, ms=3.5, alpha=0.7)  # fmt: skip
        axes.axvline(1.0, color=INK, lw=1.0)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=_ticks(high / low)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.minorticks_off()
        axes.set_yticks(range(len(lines)), [x.label for x in lines], fontsize=8)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(xlabel)
        for place, line in enumerate(lines):
            axes.annotate(
                text.times(line.ratio), (1.0, place), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
            )  # fmt: skip

    return draw
