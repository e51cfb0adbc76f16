"""The figures of a comparison: rates from machine to machine, speed-ups against bandwidths."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence

import pandas as pd

from experiments.compare import machines as table
from experiments.compare.machines import Machine
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
    rows,
)
from experiments.report.figures import contender_curve
from experiments.report.style import Drawing, Figure, Panel, colour_of, marker_of
from experiments.results.metrics import WEIGHT_BYTES

PHASES = ("step", "forward")
LINES: dict[str, LineStyle] = {"theory": DOTTED, "copy": DASHED, "gather": "-"}
WORDS = {"theory": "in theory", "copy": "of copies", "gather": "of gathers"}
SHADES = ("#0072b2", "#d55e00", "#009e73", "#7b3fa0", "#8c6d31", "#777777")  # of machines


def figures(machines: Sequence[Machine], frame: pd.DataFrame) -> list[Figure]:
    """Return the figures that have something to show, the headline first."""
    place = table.headline(machines, frame)
    first, second = (_rates(machines, frame, place, phase) for phase in PHASES)
    found = [
        first,
        _against_bandwidth(machines, frame),
        second,
        _against_baseline(machines, frame, place),
        _working_set(machines, frame),
    ]
    return [f for f in found if f is not None and f.panels]


def _rates(machines: Sequence[Machine], frame: pd.DataFrame, place: str, phase: str) -> Figure:
    known = table.roof(frame)
    found = frame[(frame["role"] == place) & (frame["phase"] == phase)]
    rates = {
        "y": 1e-6 * found["rate"],
        "lo": 1e-6 * found["rate_lo"],
        "hi": 1e-6 * found["rate_hi"],
    }
    drawing = _over_machines(machines, found.assign(**rates), "million lookups per second")
    panels = [Panel("Lookups per second", drawing, 5.2, 4.2)]
    words = " No bandwidth is known of every machine."
    if known is not None:
        shares = found.assign(y=100 * found[known.column], lo=math.nan, hi=math.nan)
        drawing = _over_machines(machines, shares, f"% of {known.words}")
        panels.append(Panel(f"Share of {known.words}", drawing, 5.2, 4.2))
        words = (
            " Right: distinct bytes per second of the task as plain tables would do it, as a share "
            f"of the {known.words} of the same machine. A level line: the kernel uses the same "
            "share of a faster memory."
        )
    title = place if place.startswith(SWEEP) else machines[0].run.title(place)
    return Figure(
        f"generations_{phase}",
        f"{phase.capitalize()} from machine to machine: {title}",
        "Left: lookups per second; the bars span the 95 % confidence interval of the median. "
        f"Higher is better.{words}",
        "",
        panels,
        columns=2,
    )


def _over_machines(
    machines: Sequence[Machine], found: pd.DataFrame, label: str, marks: Sequence[Mark] = ()
) -> Drawing:
    """Return a curve per contender over the machines; columns y, lo and hi are drawn."""
    lines = []
    for _, own in found.groupby("arm", sort=False):
        own = own.sort_values("machine")
        curve = contender_curve(
            str(own["contender"].iloc[0]), own["machine"], own["y"], low=own["lo"], high=own["hi"]
        )
        lines.append(dataclasses.replace(curve, label=str(own["name"].iloc[0])))
    last = len(machines) - 1
    names = ["\n".join(textwrap.wrap(m.label, 15)) for m in machines]
    across = Scale("", ticks=range(last + 1), names=names, low=-0.25, high=last * 1.34 + 0.25)
    return curves(lines, across, Scale(label, log=10), names="ends", marks=marks)


def _against_bandwidth(machines: Sequence[Machine], frame: pd.DataFrame) -> Figure:
    """Return, per further machine, the speed-up of every role and the ratio of bandwidths."""
    panels = [
        Panel(
            f"{machine.label} ÷ {machines[0].label}",
            _speedups(machines, number, frame[frame["phase"] == "step"]),
            7.4,
            1.4 + 0.34 * frame["role"].nunique(),
        )
        for number, machine in list(enumerate(machines))[1:]
    ]
    return Figure(
        "speedups",
        "Speed-up of a step against the ratio of bandwidths",
        f"How many times the lookups per second of {machines[0].label}. Vertical lines: how many "
        "times its bandwidth, as measured (copies, gathers of rows of the base size) and as "
        "the makers state it, where known. A dot on a line is what bandwidth alone would give; "
        "hollow dots are work of different sizes on the two machines.",
        "",
        panels,
        columns=1,
    )


def _speedups(machines: Sequence[Machine], number: int, found: pd.DataFrame) -> Drawing:
    here, first = (found[found["machine"] == n] for n in (number, 0))
    lines: list[Row] = []
    seen: set[str] = set()
    for _, row in here.iterrows():
        other = first[(first["role"] == row["role"]) & (first["arm"] == row["arm"])].iloc[0]
        gain, contender = table.speedup(row, other), str(row["contender"])
        family = contender if variants_of(contender) else str(row["name"])
        lines.append(
            Row(
                row["role"],
                gain.ratio,
                colour_of(contender),
                gain.lo if math.isfinite(gain.hi) else math.nan,
                gain.hi,
                hollow=not row["same"],
                marker=marker_of(contender),
                label="" if family in seen else str(row["name"]).partition(" rank ")[0],
            )
        )
        seen.add(family)
    width = WEIGHT_BYTES * float(machines[0].run.config.workload.D)
    ratios = table.bandwidth_ratios(machines[number], machines[0], width)
    marks = [
        Mark(ratio, line=LINES[kind], label=f"bandwidth {WORDS[kind]}", upright=True)
        for kind, ratio in ratios.items()
        if math.isfinite(ratio)
    ]
    scale = Scale("speed-up", log=10, shown=lambda v: f"{v:g}×")
    return rows(lines, scale, marks=marks, shared=True)


def _against_baseline(
    machines: Sequence[Machine], frame: pd.DataFrame, place: str
) -> Figure | None:
    baseline = machines[0].run.baseline
    found = frame[(frame["role"] == place) & (frame["arm"] != baseline.key)]
    found = found[found["ratio"].notna()]
    if not len(found):
        return None
    panels = []
    for phase in PHASES:
        part = found[found["phase"] == phase]
        part = part[part.groupby("arm")["machine"].transform("nunique") > 1]
        part = part.assign(y=part["ratio"], lo=part["ratio_lo"], hi=part["ratio_hi"])
        drawing = _over_machines(machines, part, f"time ÷ {baseline.label}", [Mark(1.0)])
        panels.append(Panel(phase.capitalize(), drawing, 5.2, 4.0))
    return Figure(
        "against_baseline",
        f"Time ÷ {baseline.label}, machine by machine",
        f"How many times the time of {baseline.label} on the same machine, paired, with the 95 % "
        "confidence interval. A line that is not level: the choice between contenders depends on "
        "the machine.",
        "",
        panels,
        columns=2,
    )


def _working_set(machines: Sequence[Machine], frame: pd.DataFrame) -> Figure | None:
    """Return the share of the bandwidth along the size of the tables, with each last cache."""
    found = frame[frame["phase"] == "step"]
    found = found[found["role"].str.match(r"sweep, (base point|E=[^,]+)$")]
    known = table.roof(found) if found["role"].nunique() > 1 else None
    if known is None:
        return None
    panels = []
    for _, rows_of_arm in found.groupby("arm", sort=False):
        lines, marks = [], []
        for number, machine in enumerate(machines):
            own = rows_of_arm[rows_of_arm["machine"] == number].sort_values("dense_bytes")
            shade = SHADES[number % len(SHADES)]
            x, y = own["dense_bytes"] / 1e6, 100 * own[known.column]
            lines.append(Curve(x, y, shade, machine.label, "o"))
            size = machine.device.cache_bytes if machine.device else None
            if size:
                marks.append(Mark(size / 1e6, shade, SHORT, upright=True))
        across, up = Scale("MB of plain tables", log=10), Scale(f"% of {known.words}", log=10)
        drawing = curves(lines, across, up, marks=marks)
        panels.append(Panel(str(rows_of_arm["name"].iloc[0]), drawing))
    return Figure(
        "working_set",
        "Share of the bandwidth by size of the tables",
        f"Distinct bytes per second as % of {known.words}, against the bytes of the uncompressed "
        "tables. Vertical lines: the last cache of each machine, where known; what fits in it is "
        "served from there.",
        "",
        panels,
    )
