"""What several figures share: scales with plain numbers, names at the ends of their lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.config.sweep import label_of
from experiments.report.data import AXIS_NAMES
from experiments.report.palette import colour_of

LOG_AXES = ("T", "E", "D", "B", "L", "rank")
Label = tuple[float, float, str, str]  # x, y, text, colour


def number(value: float) -> str:
    """1,000,000 and 1.05 rather than 1e+06."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def scales(axes: Axes, x: str, y: str) -> None:
    """Logarithmic values with plain numbers on the ticks."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)


def plain_ticks(axis: Axis) -> None:
    """Numbers as people write them, about as many as there is room for."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=_ticks(high / max(low, 1e-12))))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}"))
    axis.axes.minorticks_off()


def _ticks(span: float) -> Sequence[float]:
    if span < 12:
        return (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    return (1.0, 2.0, 5.0) if span < 200 else (1.0,)


def finish(axes: Axes, rows: pd.DataFrame, axis: str, ylabel: str) -> None:
    """The swept axis: its values as ticks, powers of two evenly spaced."""
    values = sorted({float(v) for v in rows["x"] if axis != "rank" or v > 0})
    if axis in LOG_AXES:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [number(v) for v in values])
    scales(axes, AXIS_NAMES[axis], ylabel)


def label_ends(axes: Axes, ends: list[Label]) -> None:
    """Names at the right end of their lines, pushed apart where they would touch."""
    if not ends:
        return
    low, high = (math.log(v) for v in axes.get_ylim())
    gap = (high - low) * 0.075
    placed = low - gap
    right = max(x for x, _, _, _ in ends)
    for _, y, text, shade in sorted(ends, key=lambda e: e[1]):
        placed = max(math.log(y), placed + gap)
        axes.annotate(
            text, (right, math.exp(placed)), (12, 0), textcoords="offset points", color=shade,
            va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def by_contender(rows: pd.DataFrame, axis: str) -> Iterable[tuple[str, pd.DataFrame]]:
    """Contenders that vary along the axis; on the rank axis only those that have a rank."""
    for name, own in rows.groupby("contender", sort=False):
        if axis != "rank" or (own["rank"] > 0).any():
            yield str(name), own


def flat_lines(axes: Axes, rows: pd.DataFrame, column: str, factor: float) -> list[Label]:
    """Contenders without a rank, as level lines."""
    ends: list[Label] = []
    right = float(rows["rank"].max())
    for _, row in rows[rows["rank"] == 0].iterrows():
        y, name = float(row[column]) * factor, str(row["contender"])
        axes.axhline(y, color=colour_of(name), lw=1.5, ls=(0, (5, 2)))
        ends.append((right, y, label_of(name), colour_of(name)))
    return ends
