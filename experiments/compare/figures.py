"""The figures of a comparison: rates over the machines, speed-ups against bandwidths.

Data frames named `points` or `rows` are rows of `Comparison.points`, which states the columns.
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
    SHORT_DASHED,
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
# Label and line of each bandwidth of `Machine.bandwidths`.
BANDWIDTHS: dict[str, tuple[str, LineStyle]] = {
    "theory": ("bandwidth in theory", DOTTED),
    "copy": ("bandwidth of copies", DASHED),
    "gather": ("bandwidth of gathers", "-"),
}
MACHINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7b3fa0", "#8c6d31", "#777777")


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures of a comparison that are not empty, the headline first."""
    step_rates, forward_rates = (rate_figure(comparison, phase) for phase in PHASES)
    candidates = (
        step_rates,
        speedup_figure(comparison),
        forward_rates,
        *baseline_figures(comparison),
        *working_set_figures(comparison),
    )
    return [figure for figure in candidates if figure.panels]


def rate_figure(comparison: Comparison, phase: str) -> Figure:
    """Return the figure of lookups per second over the machines.

    If a bandwidth is known of every machine, a second panel shows shares of that bandwidth.
    """
    points, role = comparison.points, comparison.headline
    ceiling_column = common_ceiling(points)
    points = points[(points["role"] == role) & (points["phase"] == phase)]
    rates = points.assign(
        y=1e-6 * points["rate"], lo=1e-6 * points["rate_lo"], hi=1e-6 * points["rate_hi"]
    )
    drawing = _draw_over_machines(comparison, rates, "million lookups per second")
    panels = [Panel("Lookups per second", drawing, 5.2, 4.2)]
    note = "No bandwidth is known of every machine."
    if ceiling_column:
        ceiling = CEILINGS[ceiling_column]
        shares = points.assign(y=100 * points[ceiling_column], lo=math.nan, hi=math.nan)
        drawing = _draw_over_machines(comparison, shares, f"% of {ceiling}")
        panels.append(Panel(f"Share of {ceiling}", drawing, 5.2, 4.2))
        note = (
            "Right: distinct bytes per second that plain tables would move for the task, as a "
            f"share of the {ceiling} of the same machine. A level line means that the kernel uses "
            "the same share of a faster memory."
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
    contender_curves = []
    for _, group in points.groupby("arm", sort=False):
        curve = contender_curve(
            group["contender"].iloc[0],
            group["machine"],
            group["y"],
            low=group["lo"],
            high=group["hi"],
        )
        contender_curves.append(dataclasses.replace(curve, edge_name=group["name"].iloc[0]))
    num_machines = len(comparison.machines)
    names = ["\n".join(textwrap.wrap(machine.label, 15)) for machine in comparison.machines]
    x_scale = Scale("", ticks=range(num_machines), names=names, low=-0.25, high=num_machines - 0.75)
    return curves(contender_curves, x_scale, Scale(label, log=10), name_position="", marks=marks)


def speedup_figure(comparison: Comparison) -> Figure:
    """Return the figure of speed-ups by role, a panel per machine after the first."""
    first_label = comparison.machines[0].label
    steps = comparison.points[comparison.points["phase"] == "step"]
    height = 1.4 + 0.14 * steps.groupby(["role", "arm"]).ngroups + 0.1 * steps["role"].nunique()
    panels = [
        Panel(f"{machine.label} ÷ {first_label}", _draw_speedups(comparison, index), 7.4, height)
        for index, machine in enumerate(comparison.machines)
        if index
    ]
    return Figure(
        "speedups",
        "Speed-up of a step against the ratio of bandwidths",
        f"Lookups per second ÷ those of {first_label}. Vertical lines: bandwidth ÷ that of "
        f"{first_label}, as measured (copies, gathers of rows of the base size) and as the makers "
        "state it, where known. A dot on a line: the speed-up is that of the bandwidth. Hollow "
        "dots: the work has different sizes on the two machines.",
        "",
        panels,
        columns=1,
    )


def _draw_speedups(comparison: Comparison, machine_index: int) -> Drawing:
    """Draw the speed-ups of a machine by role, with its ratios of bandwidths as lines."""
    points = comparison.points
    points = points[(points["machine"] == machine_index) & (points["phase"] == "step")]
    dots: list[Row] = []
    legend_families: set[str] = set()
    for point in points.to_dict("records"):
        contender = point["contender"]
        family = contender if variants_of(contender) else point["name"]
        dots.append(
            Row(
                point["role"],
                point["gain"],
                colour_of(contender),
                point["gain_lo"] if math.isfinite(point["gain_hi"]) else math.nan,
                point["gain_hi"],
                is_hollow=not point["same"],
                marker=marker_of(contender),
                label="" if family in legend_families else point["name"].partition(" rank ")[0],
            )
        )
        legend_families.add(family)
    marks = [
        Mark(ratio, label=BANDWIDTHS[kind][0], line=BANDWIDTHS[kind][1], is_vertical=True)
        for kind, ratio in comparison.bandwidth_ratios(machine_index).items()
        if math.isfinite(ratio)
    ]
    scale = Scale("speed-up", log=10, format_tick=lambda value: f"{value:g}×")
    return row_chart(dots, scale, marks=marks, shares_labels=True)


def baseline_figures(comparison: Comparison) -> list[Figure]:
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
            f"Time ÷ that of {baseline.label} on the same machine, paired, with the 95 % "
            "confidence interval. If a line is not level, the choice between contenders depends on "
            "the machine.",
            "",
            panels,
            columns=2,
        )
    ]


def working_set_figures(comparison: Comparison) -> list[Figure]:
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
        machine_curves, marks = [], []
        for index, machine in enumerate(comparison.machines):
            rows = group[group["machine"] == index].sort_values("dense_bytes")
            colour = MACHINE_COLOURS[index % len(MACHINE_COLOURS)]
            x, y = rows["dense_bytes"] / 1e6, 100 * rows[ceiling_column]
            machine_curves.append(Curve(x, y, colour, machine.label, "o"))
            cache_bytes = machine.device.cache_bytes if machine.device else None
            if cache_bytes:
                marks.append(Mark(cache_bytes / 1e6, colour, SHORT_DASHED, is_vertical=True))
        x_scale = Scale("MB of plain tables", log=10)
        y_scale = Scale(f"% of {CEILINGS[ceiling_column]}", log=10)
        panels.append(
            Panel(group["name"].iloc[0], curves(machine_curves, x_scale, y_scale, marks=marks))
        )
    return [
        Figure(
            "working_set",
            "Share of the bandwidth by size of the tables",
            f"Distinct bytes per second as % of {CEILINGS[ceiling_column]}, against the bytes of "
            "the uncompressed tables. Vertical lines: the size of each machine's last cache, where "
            "known; tables that fit in this cache are read from it.",
            "",
            panels,
        )
    ]
