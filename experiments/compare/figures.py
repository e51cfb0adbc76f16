"""The figures of a comparison: rates from machine to machine, speed-ups against bandwidths.

Data frames of points are selections of rows of `Comparison.points`.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence

import pandas as pd

from experiments.compare.machines import CEILINGS, Comparison, common_ceiling
from experiments.config.sweep import SWEEP, variants_of
from experiments.report.charts import (
    DASHED,
    DOTTED,
    SHORT,
    Curve,
    LineStyle,
    Mark,
    Row,
    Scale,
    curves,
    row_chart,
)
from experiments.report.figures import contender_curve
from experiments.report.style import Drawing, Figure, Panel, colour_of, marker_of

PHASES = ("step", "forward")
# Words and line of each bandwidth of `Machine.bandwidths`.
BANDWIDTHS: dict[str, tuple[str, LineStyle]] = {
    "theory": ("bandwidth in theory", DOTTED),
    "copy": ("bandwidth of copies", DASHED),
    "gather": ("bandwidth of gathers", "-"),
}
SHADES = ("#0072b2", "#d55e00", "#009e73", "#7b3fa0", "#8c6d31", "#777777")  # colours of machines


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures of a comparison that are not empty, the headline first."""
    step, forward = (rates(comparison, phase) for phase in PHASES)
    result = (
        step,
        speedups(comparison),
        forward,
        *against_baseline(comparison),
        *working_set(comparison),
    )
    return [figure for figure in result if figure.panels]


def rates(comparison: Comparison, phase: str) -> Figure:
    """Return the figure of lookups per second over the machines.

    A second panel shows shares of a bandwidth if one is known of every machine.
    """
    points, role = comparison.points, comparison.headline
    ceiling_column = common_ceiling(points)
    points = points[(points["role"] == role) & (points["phase"] == phase)]
    per_second = points.assign(
        y=1e-6 * points["rate"], lo=1e-6 * points["rate_lo"], hi=1e-6 * points["rate_hi"]
    )
    drawing = _draw_over_machines(comparison, per_second, "million lookups per second")
    panels = [Panel("Lookups per second", drawing, 5.2, 4.2)]
    note = "No bandwidth is known of every machine."
    if ceiling_column:
        ceiling = CEILINGS[ceiling_column]
        shares = points.assign(y=100 * points[ceiling_column], lo=math.nan, hi=math.nan)
        drawing = _draw_over_machines(comparison, shares, f"% of {ceiling}")
        panels.append(Panel(f"Share of {ceiling}", drawing, 5.2, 4.2))
        note = (
            "Right: distinct bytes per second of the task as plain tables would do it, as a share "
            f"of the {ceiling} of the same machine. A level line: the kernel uses the same "
            "share of a faster memory."
        )
    title = role if role.startswith(SWEEP) else comparison.machines[0].run.title(role)
    return Figure(
        f"generations_{phase}",
        f"{phase.capitalize()} from machine to machine: {title}",
        "Left: lookups per second; the bars span the 95 % confidence interval of the median. "
        f"Higher is better. {note}",
        "",
        panels,
        columns=2,
    )


def _draw_over_machines(
    comparison: Comparison, points: pd.DataFrame, label: str, marks: Sequence[Mark] = ()
) -> Drawing:
    """Draw a curve per contender over the machines: column `y`, with the interval `lo` to `hi`."""
    lines = []
    for _, group in points.groupby("arm", sort=False):
        curve = contender_curve(
            group["contender"].iloc[0],
            group["machine"],
            group["y"],
            low=group["lo"],
            high=group["hi"],
        )
        lines.append(dataclasses.replace(curve, edge_name=group["name"].iloc[0]))
    last = len(comparison.machines) - 1
    names = ["\n".join(textwrap.wrap(m.label, 15)) for m in comparison.machines]
    x_scale = Scale("", ticks=range(last + 1), names=names, low=-0.25, high=last + 0.25)
    return curves(lines, x_scale, Scale(label, log=10), name_position="", marks=marks)


def speedups(comparison: Comparison) -> Figure:
    """Return the figure of speed-ups by role, a panel per machine after the first."""
    base = comparison.machines[0].label
    steps = comparison.points[comparison.points["phase"] == "step"]
    height = 1.4 + 0.14 * steps.groupby(["role", "arm"]).ngroups + 0.1 * steps["role"].nunique()
    panels = [
        Panel(f"{machine.label} ÷ {base}", _draw_speedups(comparison, number), 7.4, height)
        for number, machine in enumerate(comparison.machines)
        if number
    ]
    return Figure(
        "speedups",
        "Speed-up of a step against the ratio of bandwidths",
        f"How many times the lookups per second of {base}. Vertical lines: how many "
        "times its bandwidth, as measured (copies, gathers of rows of the base size) and as "
        "the makers state it, where known. A dot on a line is what bandwidth alone would give; "
        "hollow dots are work of different sizes on the two machines.",
        "",
        panels,
        columns=1,
    )


def _draw_speedups(comparison: Comparison, number: int) -> Drawing:
    """Draw the gains of machine `number` by role, with its ratios of bandwidths as lines."""
    points = comparison.points
    points = points[(points["machine"] == number) & (points["phase"] == "step")]
    lines: list[Row] = []
    labelled: set[str] = set()
    for point in points.to_dict("records"):
        contender = point["contender"]
        family = contender if variants_of(contender) else point["name"]
        lines.append(
            Row(
                point["role"],
                point["gain"],
                colour_of(contender),
                point["gain_lo"] if math.isfinite(point["gain_hi"]) else math.nan,
                point["gain_hi"],
                hollow=not point["same"],
                marker=marker_of(contender),
                label="" if family in labelled else point["name"].partition(" rank ")[0],
            )
        )
        labelled.add(family)
    marks = [
        Mark(ratio, label=BANDWIDTHS[kind][0], line=BANDWIDTHS[kind][1], upright=True)
        for kind, ratio in comparison.bandwidth_ratios(number).items()
        if math.isfinite(ratio)
    ]
    scale = Scale("speed-up", log=10, format_tick=lambda v: f"{v:g}×")
    return row_chart(lines, scale, marks=marks, shared=True)


def against_baseline(comparison: Comparison) -> list[Figure]:
    """Return the figure of ratios to the baseline over the machines; [] without ratios."""
    points, baseline = comparison.points, comparison.machines[0].run.baseline
    points = points[(points["role"] == comparison.headline) & (points["arm"] != baseline.key)]
    points = points[points["ratio"].notna()]
    if not len(points):
        return []
    panels = []
    for phase in PHASES:
        rows = points[points["phase"] == phase]
        rows = rows[rows.groupby("arm")["machine"].transform("nunique") > 1]
        rows = rows.assign(y=rows["ratio"], lo=rows["ratio_lo"], hi=rows["ratio_hi"])
        drawing = _draw_over_machines(comparison, rows, f"time ÷ {baseline.label}", [Mark(1.0)])
        panels.append(Panel(phase.capitalize(), drawing, 5.2, 4.0))
    return [
        Figure(
            "against_baseline",
            f"Time ÷ {baseline.label}, machine by machine",
            f"How many times the time of {baseline.label} on the same machine, paired, with the "
            "95 % confidence interval. A line that is not level: the choice between contenders "
            "depends on the machine.",
            "",
            panels,
            columns=2,
        )
    ]


def working_set(comparison: Comparison) -> list[Figure]:
    """Return the figure of bandwidth shares by size of the tables.

    [] if the runs share no sweep of E, or no bandwidth is known of every machine.
    """
    points = comparison.points[comparison.points["phase"] == "step"]
    points = points[points["role"].str.match(r"sweep, (base point|E=[^,]+)$")]
    ceiling_column = common_ceiling(points) if points["role"].nunique() > 1 else None
    if ceiling_column is None:
        return []
    panels = []
    for _, group in points.groupby("arm", sort=False):
        lines, marks = [], []
        for number, machine in enumerate(comparison.machines):
            line = group[group["machine"] == number].sort_values("dense_bytes")
            shade = SHADES[number % len(SHADES)]
            x, y = line["dense_bytes"] / 1e6, 100 * line[ceiling_column]
            lines.append(Curve(x, y, shade, machine.label, "o"))
            size = machine.device.cache_bytes if machine.device else None
            if size:
                marks.append(Mark(size / 1e6, shade, SHORT, upright=True))
        x_scale = Scale("MB of plain tables", log=10)
        y_scale = Scale(f"% of {CEILINGS[ceiling_column]}", log=10)
        panels.append(Panel(group["name"].iloc[0], curves(lines, x_scale, y_scale, marks=marks)))
    return [
        Figure(
            "working_set",
            "Share of the bandwidth by size of the tables",
            f"Distinct bytes per second as % of {CEILINGS[ceiling_column]}, against the bytes of "
            "the uncompressed tables. Vertical lines: the last cache of each machine, where known; "
            "what fits in it is served from there.",
            "",
            panels,
        )
    ]
