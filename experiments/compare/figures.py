"""What a comparison of machines draws: slopes from one to the next, speed-up beside bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from experiments.compare import machines as table
from experiments.compare.machines import Machine, Roof
from experiments.config.sweep import SWEEP, variants_of
from experiments.report.style import INK, Drawing, Figure, Panel, colour_of, marker_of, scales
from experiments.results.metrics import WEIGHT_BYTES

PHASES = ("step", "forward")
LINES = {"theory": (0, (1, 2)), "copy": (0, (5, 2)), "gather": "-"}
WORDS = {"theory": "in theory", "copy": "copied", "gather": "gathered"}


def figures(machines: Sequence[Machine], frame: pd.DataFrame) -> list[Figure]:
    """The headline first; a figure without anything to show is left out."""
    place = table.headline(machines, frame)
    first, second = (_slopes(machines, frame, place, phase) for phase in PHASES)
    found = [
        first,
        _beside_bandwidth(machines, frame),
        second,
        _against_baseline(machines, frame, place),
        _working_set(machines, frame),
    ]
    return [f for f in found if f is not None and f.panels]


def _slopes(machines: Sequence[Machine], frame: pd.DataFrame, place: str, phase: str) -> Figure:
    """Raw beside relative."""
    known = table.roof(frame)
    rows = frame[(frame["role"] == place) & (frame["phase"] == phase)]
    panels = [Panel("Lookups per second", _raw(machines, rows), 5.2, 4.2)]
    if known is not None:
        panels.append(Panel(f"Share of {known.words}", _relative(machines, rows, known), 5.2, 4.2))
    against = (
        f" Right: distinct bytes per second of the task as plain tables would do it, as a share of "
        f"the {known.words} of the same machine: level lines are kernels that age well."
        if known
        else " No bandwidth is known of every machine."
    )
    return Figure(
        f"generations_{phase}",
        f"{phase.capitalize()} from machine to machine: {_title(machines, place)}",
        "Left: lookups per second; the bars span the 95 % interval of the median. Higher is "
        "better." + against,
        "",
        panels,
        columns=2,
    )


def _title(machines: Sequence[Machine], place: str) -> str:
    return place if place.startswith(SWEEP) else machines[0].run.title(place)


def _raw(machines: Sequence[Machine], rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        shown = rows.assign(y=rows["rate"] / 1e6)
        shown = shown.assign(
            low=shown["y"] - shown["rate_lo"] / 1e6, high=shown["rate_hi"] / 1e6 - shown["y"]
        )
        _lines(axes, machines, shown)
        scales(axes, "", "million lookups per second")
        _finish(axes, machines, shown)

    return draw


def _relative(machines: Sequence[Machine], rows: pd.DataFrame, known: Roof) -> Drawing:
    def draw(axes: Axes) -> None:
        shown = rows.assign(y=100 * rows[known.column])
        _lines(axes, machines, shown)
        scales(axes, "", f"% of {known.words}")
        _finish(axes, machines, shown)

    return draw


def _lines(axes: Axes, machines: Sequence[Machine], rows: pd.DataFrame) -> None:
    for _, own in rows.groupby("arm", sort=False):
        own = own.sort_values("machine")
        name = str(own["contender"].iloc[0])
        spread = [own["low"], own["high"]] if "low" in own else None
        if spread is not None and any(part.isna().any() for part in spread):
            spread = None
        axes.errorbar(
            own["machine"], own["y"], yerr=spread, color=colour_of(name), marker=marker_of(name),
            capsize=3, lw=2.0,
        )  # fmt: skip


def _finish(axes: Axes, machines: Sequence[Machine], rows: pd.DataFrame) -> None:
    """Machines by name below; contenders at the right end of their lines, pushed apart."""
    last = len(machines) - 1
    axes.set_xlim(-0.25, last + 0.25 + 0.34 * last)
    axes.set_xticks(range(len(machines)), [_wrapped(m.label) for m in machines])
    axes.grid(visible=False, axis="x")
    ends = rows[rows["machine"] == last].sort_values("y")
    low, high = (math.log(v) for v in axes.get_ylim())
    gap, placed = (high - low) * 0.06, low - 1e9
    for _, row in ends.iterrows():
        placed = max(math.log(row["y"]), placed + gap)
        axes.annotate(
            str(row["name"]), (last, math.exp(placed)), (9, 0), textcoords="offset points",
            color=colour_of(str(row["contender"])), va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def _wrapped(label: str) -> str:
    """Two lines of a name that is long."""
    words, lines = label.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 15 and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _beside_bandwidth(machines: Sequence[Machine], frame: pd.DataFrame) -> Figure:
    """A panel per further machine: every role's speed-up, and how much more bandwidth there is."""
    panels = [
        Panel(
            f"{machine.label} ÷ {machines[0].label}",
            _speedups(machines, number, frame[frame["phase"] == "step"]),
            7.4,
            1.4 + 0.34 * frame["role"].nunique(),
        )
        for number, machine in enumerate(machines)
        if number
    ]
    return Figure(
        "speedups",
        "Speed-up of a step beside the ratio of bandwidths",
        f"How many times the lookups per second of {machines[0].label}. Upright lines: how many "
        "times its bandwidth, as it was measured (copies, gathers of rows of the base size) and as "
        "the makers state it, where known. A dot at a line is what bandwidth alone would give; "
        "hollow dots are work of different sizes on the two machines.",
        "",
        panels,
        columns=1,
    )


def _speedups(machines: Sequence[Machine], number: int, rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        places = list(dict.fromkeys(rows["role"]))
        here, first = (rows[rows["machine"] == n] for n in (number, 0))
        width = WEIGHT_BYTES * float(machines[0].run.config.workload.D)
        ratios = table.bandwidth_ratios(machines[number], machines[0], width)
        seen: set[str] = set()
        for _, row in here.iterrows():
            other = first[(first["role"] == row["role"]) & (first["arm"] == row["arm"])].iloc[0]
            found = table.speedup(row, other)
            shade = colour_of(str(row["contender"]))
            name = str(row["contender"]) if variants_of(str(row["contender"])) else str(row["name"])
            axes.errorbar(
                found.ratio, places.index(row["role"]), color=shade, ls="",
                marker=marker_of(str(row["contender"])), capsize=2, elinewidth=1.2,
                xerr=_reach(found), mfc=shade if row["same"] else "none",
                label=None if name in seen else _family(row),
            )  # fmt: skip
            seen.add(name)
        for kind, ratio in ratios.items():
            if math.isfinite(ratio):
                axes.axvline(ratio, color=INK, lw=1.2, ls=LINES[kind],
                             label=f"bandwidth {WORDS[kind]}")  # fmt: skip
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        few = high / low > 100
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1.0,) if few else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(places)), places)
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)

    return draw


def _family(row: pd.Series) -> str:
    return str(row["name"]).partition(" rank ")[0]


def _reach(found: table.Speedup) -> list[list[float]] | None:
    if not (math.isfinite(found.lo) and math.isfinite(found.hi)):
        return None
    return [[max(0.0, found.ratio - found.lo)], [max(0.0, found.hi - found.ratio)]]


def _against_baseline(
    machines: Sequence[Machine], frame: pd.DataFrame, place: str
) -> Figure | None:
    """Does the comparison of contenders itself depend on the machine?"""
    baseline = machines[0].run.baseline
    rows = frame[(frame["role"] == place) & (frame["arm"] != baseline.key)]
    rows = rows[rows["ratio"].notna()]
    if not len(rows):
        return None
    panels = []
    for phase in PHASES:
        part = rows[rows["phase"] == phase]
        counts = part.groupby("arm")["machine"].transform("nunique")
        panels.append(Panel(phase.capitalize(), _ratios(machines, part[counts > 1]), 5.2, 4.0))
    return Figure(
        "against_baseline",
        f"Time ÷ {baseline.label}, machine by machine",
        f"How many times the time of {baseline.label} on the same machine, paired, with its 95 % "
        "interval. Lines that are not level: the choice between contenders depends on the machine.",
        "",
        panels,
        columns=2,
    )


def _ratios(machines: Sequence[Machine], rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        shown = rows.assign(
            y=rows["ratio"],
            low=rows["ratio"] - rows["ratio_lo"],
            high=rows["ratio_hi"] - rows["ratio"],
        )
        _lines(axes, machines, shown)
        axes.axhline(1.0, color=INK, lw=1.0)
        scales(axes, "", f"time ÷ {machines[0].run.baseline.label}")
        _finish(axes, machines, shown)

    return draw


def _working_set(machines: Sequence[Machine], frame: pd.DataFrame) -> Figure | None:
    """Along the table size, with each machine's last cache: what fits in it is another question."""
    rows = frame[frame["phase"] == "step"]
    rows = rows[rows["role"].str.match(r"sweep, (base point|E=[^,]+)$")]
    if rows["role"].nunique() < 2:
        return None
    known = table.roof(rows)
    if known is None:
        return None
    arms = list(dict.fromkeys(rows["arm"]))
    panels = [
        Panel(
            str(rows[rows["arm"] == arm]["name"].iloc[0]),
            _along_size(machines, rows[rows["arm"] == arm], known),
        )
        for arm in arms
    ]
    return Figure(
        "working_set",
        "Share of the roof by size of the tables",
        f"Distinct bytes per second as % of {known.words}, against the bytes of the uncompressed "
        "tables. Upright lines: the last cache of each machine, where known; what fits in it is "
        "served from there.",
        "",
        panels,
    )


SHADES = ("#0072b2", "#d55e00", "#009e73", "#7b3fa0", "#8c6d31", "#777777")


def _along_size(machines: Sequence[Machine], rows: pd.DataFrame, known: Roof) -> Drawing:
    def draw(axes: Axes) -> None:
        for number, machine in enumerate(machines):
            own = rows[rows["machine"] == number].sort_values("dense_bytes")
            shade = SHADES[number % len(SHADES)]
            axes.plot(own["dense_bytes"] / 1e6, 100 * own[known.column], color=shade, marker="o",
                      label=machine.label)  # fmt: skip
            size = machine.device.cache_bytes if machine.device else None
            if size:
                axes.axvline(size / 1e6, color=shade, lw=1.0, ls=(0, (2, 2)))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        scales(axes, "MB of plain tables", f"% of {known.words}")
        axes.legend(fontsize=9)

    return draw
