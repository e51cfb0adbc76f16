"""Speed-ups as a map: how much faster or slower, where that is more than noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from experiments.config.schema import AXES
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import where
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.palette import FASTER, SLOWER
from experiments.report.plots import number
from experiments.report.style import WIDTH, Figure, Panel

STRONGEST = 4.0  # a speed-up of 4, or of a quarter, has the full colour
OPACITY = 0.75
LEAST_CELLS = 2
PHASES = ("step", "forward")  # what a model pays for first


@dataclass(frozen=True)
class Square:
    """One number of the map."""

    column: str
    row: str
    speedup: float  # nan: no result
    sure: bool  # 1 is outside of the interval
    note: str = ""  # instead of a number


def figures(run: Run) -> list[Figure]:
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
    cases = [(label, phase) for label in dict.fromkeys(rows["label"]) for phase in PHASES]
    for label, phase in cases:
        own = rows[(rows["label"] == label) & (rows["phase"] == phase)]
        own = own.sort_values([down, across])
        squares = [_square(r, number(r[across]), number(r[down])) for _, r in own.iterrows()]
        words = (AXIS_NAMES[across], AXIS_NAMES[down])
        panels.append(_panel(f"{label}, {phase}", squares, words))
    return panels


def _by_points(run: Run, rows: pd.DataFrame) -> list[Panel]:
    panels = []
    for phase in PHASES:
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
