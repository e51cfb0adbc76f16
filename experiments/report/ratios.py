"""Every ratio with its interval and the processes behind it, sorted: what is sure, what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.config.schema import AXES, PHASES
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import where
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import (
    FASTER,
    GRID,
    INK,
    SLOWER,
    WIDTH,
    Drawing,
    Figure,
    Panel,
    colour_of,
    number,
)
from experiments.results.metrics import MARGIN, best_of_rounds, replicate_of
from experiments.results.store import Record
from experiments.timing.statistics import process_effect


def per_process(run: Run) -> pd.DataFrame:
    """One row per cell, contender, phase and process of a run of one mode: its ratio."""
    good = {
        (r["cell"], r["arm"], replicate_of(r)): r
        for r in run.records
        if r["status"] == "ok" and r.get("samples", {}).get("step")
    }
    rows = []
    for (cell, arm, replicate), record in good.items():
        base = good.get((cell, run.baseline.key, replicate))
        if base is None or arm == run.baseline.key:
            continue
        for phase in PHASES:
            ratio = _ratio(record, base, phase)
            if math.isfinite(ratio):
                rows.append((cell, arm, phase, replicate, ratio))
    return pd.DataFrame(rows, columns=["cell", "arm", "phase", "replicate", "ratio"])


def _ratio(record: Record, base: Record, phase: str) -> float:
    own, other = best_of_rounds(record, phase), best_of_rounds(base, phase)
    return math.exp(process_effect(own, other)) if own.keys() & other.keys() else math.nan


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


STRONGEST = 4.0  # a speed-up of 4, or of a quarter, has the full colour
OPACITY = 0.75
LEAST_CELLS = 2
MODEL_PHASES = ("step", "forward")  # what a model pays for first


@dataclass(frozen=True)
class Square:
    """One number of the map."""

    column: str
    row: str
    speedup: float  # nan: no result
    sure: bool  # 1 is outside of the interval
    note: str = ""  # instead of a number


def heatmap_figures(run: Run) -> list[Figure]:
    """Two axes against each other where they were varied together; else points by contender."""
    rows = run.of(SWEEP)
    if not len(rows):
        return []
    rows = rows[rows["arm"] != run.baseline.key]
    if rows["cell"].nunique() < LEAST_CELLS or not rows["ratio"].notna().any():
        return []
    pair = _grid(rows)
    panels = _by_axes(rows, pair) if pair else _by_points(run, rows)
    return [
        Figure(
            "speedup",
            f"Speed-up over {run.baseline.label}",
            f"Time of {run.baseline.label} ÷ time of the contender, on the same batches. Blue, "
            "above 1: the contender is faster. Orange, below 1: slower. Hatched: the 95 % interval "
            "contains 1 or is unknown, so that the difference may be none. Words: no result, and "
            "why.",
            run.sizes(SWEEP),
            panels,
            columns=2 if len(panels) in (2, 4) else 0,
        )
    ]


def _grid(rows: pd.DataFrame) -> tuple[str, str] | None:
    """Two axes whose values meet all with all: dimension and batch size if they are among them."""
    many = [a for a in AXES if rows[a].nunique() > 1]
    order = [a for a in ("D", "B") if a in many] + [a for a in many if a not in ("D", "B")]
    for first in order:
        for second in order[order.index(first) + 1 :]:
            met = len(rows[[first, second]].drop_duplicates())
            if met == rows[first].nunique() * rows[second].nunique():
                return first, second
    return None


def _by_axes(rows: pd.DataFrame, pair: tuple[str, str]) -> list[Panel]:
    down, across = pair
    others = [a for a in AXES if a not in pair]
    rows = rows[(rows[others] == rows[others].iloc[0]).all(axis=1)]
    panels = []
    cases = [(label, phase) for label in dict.fromkeys(rows["label"]) for phase in MODEL_PHASES]
    for label, phase in cases:
        own = rows[(rows["label"] == label) & (rows["phase"] == phase)]
        own = own.sort_values([down, across])
        squares = [_square(r, number(r[across]), number(r[down])) for _, r in own.iterrows()]
        words = (AXIS_NAMES[across], AXIS_NAMES[down])
        panels.append(_panel(f"{label}, {phase}", squares, words))
    return panels


def _by_points(run: Run, rows: pd.DataFrame) -> list[Panel]:
    panels = []
    for phase in MODEL_PHASES:
        own = rows[rows["phase"] == phase]
        squares = [_square(r, str(r["label"]), where(run, r)) for _, r in own.iterrows()]
        panels.append(_panel(phase.capitalize(), squares, ("", "")))
    return panels


def _square(row: pd.Series, column: str, line: str) -> Square:
    if row["status"] != "ok" or not row["ratio"] > 0:
        return Square(column, line, math.nan, sure=True, note=str(row["status"]))
    low, high = row["ratio_lo"], row["ratio_hi"]
    sure = not (text.missing(low) or text.missing(high) or low <= 1 <= high)
    return Square(column, line, 1 / row["ratio"], sure=sure)


def _panel(title: str, squares: list[Square], words: tuple[str, str]) -> Panel:
    columns = list(dict.fromkeys(s.column for s in squares))
    lines = list(dict.fromkeys(s.row for s in squares))

    def draw(axes: Axes) -> None:
        for square in squares:
            _fill(axes, square, columns.index(square.column), lines.index(square.row))
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        tilted: dict[str, Any] = (
            {"rotation": 25, "ha": "right"} if len("".join(columns)) > 34 else {}
        )
        axes.set_xticks(range(len(columns)), columns, fontsize=9, **tilted)
        axes.set_yticks(range(len(lines)), lines, fontsize=9)
        axes.set_xlabel(words[0])
        axes.set_ylabel(words[1])
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    return Panel(title, draw, WIDTH, max(2.2, 0.29 * len(lines) + 1.3))


def _fill(axes: Axes, square: Square, x: int, y: int) -> None:
    shown = square.note
    if math.isfinite(square.speedup):
        strength = min(1.0, abs(math.log(square.speedup)) / math.log(STRONGEST))
        shade = FASTER if square.speedup > 1 else SLOWER
        box = (x - 0.48, y - 0.46)
        axes.add_patch(Rectangle(box, 0.96, 0.92, color=shade, alpha=OPACITY * strength, lw=0))
        if not square.sure:
            axes.add_patch(Rectangle(box, 0.96, 0.92, fill=False, hatch="///", lw=0, alpha=0.45))
        near = 0.1 <= square.speedup < 10
        shown = f"{square.speedup:.2f}×" if near else text.times(square.speedup)
    small = 8 if shown == square.note else 9
    axes.text(x, y, shown, ha="center", va="center", fontsize=small, in_layout=False)
