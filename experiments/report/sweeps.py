"""One axis at a time: throughput, time beside the baseline, memory."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes

from experiments.config.sweep import SWEEP, label_of
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.palette import INK, colour_of, marker_of
from experiments.report.plots import Label, by_contender, finish, flat_lines, label_ends
from experiments.report.style import Drawing, Figure, Panel


def figures(run: Run) -> list[Figure]:
    """Nothing where nothing was swept, or where the axes were varied together."""
    return [f for f in (throughput(run), ratio(run), memory(run)) if f.panels]


def throughput(run: Run) -> Figure:
    """Lookups per second of a step."""
    return _per_axis(
        run,
        "sweep_throughput",
        "Throughput of a step, one axis at a time",
        "Lookups per second through forward, backward and update: lookups of a batch ÷ median "
        "time. The band spans the quartiles. Higher is better.",
        lambda axis: _throughput(run, axis),
    )


def ratio(run: Run) -> Figure:
    """Time divided by the baseline's."""
    return _per_axis(
        run,
        "sweep_ratio",
        f"Time ÷ {run.baseline.label}, paired",
        f"How many times the time of {run.baseline.label}, from the ratios within each round, and "
        "its 95 % interval. Solid: step. Dashed: forward. Below 1 the contender is faster.",
        lambda axis: _ratios(run, axis),
    )


def memory(run: Run) -> Figure:
    """Parameters, and the scratch space of a step."""
    panels = []
    swept = run.swept_axes()
    if "D" in swept:
        panels.append(Panel("Parameters by dimension", _memory(run, "D", "weights_bytes")))
    if "rank" in swept:
        panels.append(Panel("Parameters by TT rank", _memory(run, "rank", "weights_bytes")))
    if "B" in swept and run.table["peak_bytes"].notna().any():
        panels.append(Panel("Scratch of a step by batch size", _memory(run, "B", "peak_bytes")))
    return Figure(
        "sweep_memory",
        "Memory",
        "Parameters, and the most that one step needs on top of them. Lower is better.",
        run.sizes(SWEEP) if panels else "",
        panels,
    )


def _per_axis(
    run: Run, name: str, title: str, caption: str, draw: Callable[[str], Drawing]
) -> Figure:
    axes = run.swept_axes()
    panels = [Panel(AXIS_NAMES[a][:1].upper() + AXIS_NAMES[a][1:], draw(a)) for a in axes]
    return Figure(name, title, caption, run.sizes(SWEEP) if panels else "", panels)


def _throughput(run: Run, axis: str) -> Drawing:
    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[rows["phase"] == "step"]
        rows = rows.assign(
            rate=rows["lookups_per_s"] / 1e6,
            low=rows["lookups"] / rows["q75_s"] / 1e6,
            high=rows["lookups"] / rows["q25_s"] / 1e6,
        )
        ends: list[Label] = []
        for name, own in by_contender(rows, axis):
            own, shade = own.sort_values("x"), colour_of(name)
            axes.plot(own["x"], own["rate"], color=shade, marker=marker_of(name))
            axes.fill_between(own["x"], own["low"], own["high"], color=shade, alpha=0.2, lw=0)
            ends.append((float(own["x"].iloc[-1]), float(own["rate"].iloc[-1]), label_of(name),
                         shade))  # fmt: skip
        if axis == "rank":
            ends += flat_lines(axes, rows, "rate", 1.0)
        finish(axes, rows, axis, "million lookups per second")
        label_ends(axes, ends)

    return draw


def _ratios(run: Run, axis: str) -> Drawing:
    styles = {"step": "-", "forward": (0, (2, 1.5))}

    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[(rows["arm"] != run.baseline.key) & rows["ratio"].notna()]
        ends: list[Label] = []
        for name, own in by_contender(rows, axis):
            for phase, style in styles.items():
                part = own[own["phase"] == phase].sort_values("x")
                if axis == "rank":
                    part = part[part["rank"] > 0]
                if not len(part):
                    continue
                axes.errorbar(
                    part["x"], part["ratio"], yerr=_spread(part), color=colour_of(name), ls=style,
                    marker=marker_of(name), capsize=3, lw=1.8,
                )  # fmt: skip
                last = part.iloc[-1]
                ends.append((float(last["x"]), float(last["ratio"]), f"{label_of(name)} {phase}",
                             colour_of(name)))  # fmt: skip
        axes.axhline(1.0, color=INK, lw=1.0)
        finish(axes, rows, axis, f"time ÷ {run.baseline.label}")
        label_ends(axes, ends)

    return draw


def _spread(part: pd.DataFrame) -> list[pd.Series] | None:
    if part["ratio_lo"].isna().any():
        return None
    return [part["ratio"] - part["ratio_lo"], part["ratio_hi"] - part["ratio"]]


def _memory(run: Run, axis: str, column: str) -> Drawing:
    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[(rows["phase"] == "step") & (rows[column].fillna(0) > 0)]
        ends: list[Label] = []
        for name, own in by_contender(rows, axis):
            own = own.sort_values("x")
            y = own[column] / 1e6
            style = (0, (4, 3)) if name == "torch" and column == "weights_bytes" else "-"
            axes.plot(own["x"], y, color=colour_of(name), marker=marker_of(name), ls=style)
            end = (float(own["x"].iloc[-1]), float(y.iloc[-1]), label_of(name), colour_of(name))
            ends.append(end)
        if axis == "rank":
            ends += flat_lines(axes, rows, column, 1e-6)
        finish(axes, rows, axis, "MB")
        label_ends(axes, ends)

    return draw
