"""The figures of contenders timed together, in the order in which they argue."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP, label_of
from experiments.machine import ceilings
from experiments.machine.ceilings import Roofs
from experiments.report import ratios, text
from experiments.report.charts import (
    DASHED,
    SHORT,
    Curve,
    Mark,
    Row,
    Scale,
    curves,
    rows,
)
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import WIDTH, Drawing, Figure, Panel, colour_of, marker_of
from experiments.results.metrics import WEIGHT_BYTES, seconds
from experiments.timing.statistics import summarise

UNIT = "us per lookup"  # of published numbers that can stand on one axis with ours
PHASES = {"step": "forward + backward + update", "forward": "forward"}
LOG_AXES = ("T", "E", "D", "B", "L", "rank")


def figures(run: Run) -> list[Figure]:
    """Return every figure that this run of one mode has the data for, the main one first."""
    found = [*cost_figures(run), *ratios.forest_figures(run), *ratios.speedup_figures(run)]
    found += [*sweep_figures(run), *roofline_figures(run), *published(run)]
    return [f for f in (*found, *sample_figures(run)) if f.panels]


def subtitle(run: Run) -> str:
    """Return machine, software and sizes: what a figure must say when it stands alone."""
    e = run.environment
    driver = (e.get("gpu") or {}).get("driver")
    parts = [e.get("device"), f"torch {e.get('torch')}", *([f"driver {driver}"] if driver else [])]
    parts += [f"emblib {text.commit(e) or 'no git'}", run.config.optimizer, "+".join(run.modes)]
    processes = sorted(set(run.passes().values()))
    if processes:
        most = f"{processes[0]}–{processes[-1]}" if len(processes) > 1 else f"{processes[0]}"
        parts.append(f"{most} process{'es' * (processes[-1] > 1)} per cell")
    return " · ".join(str(p) for p in (*parts, f"timing {run.config.timing.preset}"))


def contender_curve(name: str, x: Any, y: Any, **options: Any) -> Curve:
    """Return a curve with the colour and marker of a contender."""
    options = {"marker": marker_of(name), "label": label_of(name), **options}
    return Curve(x, y, colour_of(name), **options)


def cost_figures(run: Run) -> list[Figure]:
    """Return time against memory, and error against memory where an error is known."""
    cell = run.headline_cell()
    if cell is None or not len(run.table):
        return []
    found = run.table[(run.table["cell"] == cell) & (run.table["status"] == "ok")]
    if not len(found):
        return []
    panels = [
        Panel(f"Time of {title}", _scatter(found[found["phase"] == phase], "median_s"))
        for phase, title in PHASES.items()
    ]
    known = found[(found["phase"] == "step") & (found["error"].fillna(0) > 0)]
    words = ""
    if len(known):
        panels.append(Panel("Error", _scatter(known, "error")))
        words = " Error: relative distance of the rows that are looked up from the plain tables'."
    return [
        Figure(
            "cost_and_memory",
            f"Time{', error' * bool(len(known))} against memory on {run.title(run.headline)}",
            "Each mark is one contender: parameters on the horizontal axis, median time of one "
            f"batch on the vertical one, with quartiles. Left and down is better.{words}",
            run.sizes(run.headline),
            panels,
        )
    ]


def _scatter(found: pd.DataFrame, column: str) -> Drawing:
    time = column == "median_s"
    lines = []
    for name, own in found.groupby("contender", sort=False):
        own = own.sort_values("weights_bytes")
        lines.append(
            contender_curve(
                str(name),
                own["weights_bytes"] / 1e6,
                own[column] * (1e3 if time else 1.0),
                width=1.2,
                low=1e3 * own["q25_s"] if time else None,
                high=1e3 * own["q75_s"] if time else None,
                names=[str(label) for label in own["label"]],
                offset=(0, 0),
            )
        )
    height = Scale("time per batch (ms)" if time else "relative error", log=10)
    return curves(lines, Scale("parameters (MB)", log=10), height, names="points")


def modes(run: Run) -> list[Figure]:
    """Return the headline in every mode that was measured; empty where there is one mode."""
    cell = run.headline_cell()
    if cell is None or len(run.modes) < 2 or not len(run.table):
        return []
    found = run.table[(run.table["cell"] == cell) & (run.table["status"] == "ok")]
    if not len(found):
        return []
    return [
        Figure(
            "modes",
            f"What the mode changes on {run.title(run.headline)}",
            "The same work, measured in different ways (see 'How to read this'). A number of one "
            "mode is never divided by one of another. Bars are quartiles; lower is better.",
            run.sizes(run.headline),
            [Panel(p.capitalize(), _by_mode(run, found[found["phase"] == p])) for p in PHASES],
        )
    ]


def _by_mode(run: Run, found: pd.DataFrame) -> Drawing:
    arms, lines = list(dict.fromkeys(found["arm"])), []
    for place, arm in enumerate(arms):
        own = found[found["arm"] == arm]
        shift = 0.6 * ((place + 0.5) / len(arms) - 0.5)
        lines.append(
            contender_curve(
                str(own["contender"].iloc[0]),
                [run.modes.index(m) + shift for m in own["mode"]],
                1e3 * own["median_s"],
                line="",
                low=1e3 * own["q25_s"],
                high=1e3 * own["q75_s"],
                label=str(own["label"].iloc[0]),
            )
        )
    count = len(run.modes)
    across = Scale("", ticks=range(count), names=run.modes, low=-0.5, high=count - 0.5)
    return curves(lines, across, Scale("time per batch (ms)", log=10), names="ends")


def published(run: Run) -> list[Figure]:
    """Return a figure of each case that has a published time per lookup."""
    found = []
    for section in run.sections():
        case = run.config.cases.get(section)
        numbers = [dict(p) for p in case.published] if case is not None else []
        numbers = [p for p in numbers if str(p["unit"]).startswith(UNIT)]
        own = run.of(section)
        own = own[(own["phase"] == "step") & (own["status"] == "ok")] if len(own) else own
        if len(own) and numbers:
            found.append(_published(run, section, own, numbers))
    return found


def _published(run: Run, section: str, own: pd.DataFrame, numbers: list[dict[str, Any]]) -> Figure:
    bars = [
        (str(r["label"]), r["ns_per_lookup"] / 1e3, colour_of(str(r["contender"])), False)
        for _, r in own.sort_values("ns_per_lookup").iterrows()
    ]
    for other in numbers:
        name = f"{other['label']}\npublished, other machine"
        bars.append((name, float(other["value"]), colour_of("published"), True))
    lines = [
        Row(name, value, colour, bar=True, hollow=theirs, words=f"{value:.3g}")
        for name, value, colour, theirs in bars
    ]
    longest = max(value for _, value, _, _ in bars)
    scale = Scale("µs per lookup of a step (log scale)", log=10, reach=(longest, 1.6 * longest))
    return Figure(
        f"published_{section}",
        text.capitalised(run.title(section)),
        "Measured here (solid) and published elsewhere (hatched): another machine, so the two "
        "kinds of bar are not divided by each other. Shorter is better.",
        run.sizes(section),
        [Panel("Time per lookup", rows(lines, scale), 1.2 * WIDTH)],
    )


ASIDE = 0.055  # shift between contenders of one size, on a logarithmic axis


def roofline_figures(run: Run) -> list[Figure]:
    """Return achieved bandwidth against the memory's: a dot per contender and cell, twice."""
    found, roofs = run.table, Roofs.of(run.environment)
    if not len(found) or not (math.isfinite(roofs.copy_gb_s) or roofs.gather_gb_s):
        return []
    found = found[(found["status"] == "ok") & found["useful_gb_s"].notna()]
    if not len(found):
        return []
    known = "copy and random gather" if roofs.gather_gb_s else "copy"
    device = ceilings.of_environment(run.environment)
    theory = device.bandwidth_gb_s if device else None
    named = f" Dotted: theoretical bandwidth of {device.name}." if device and theory else ""
    return [
        Figure(
            "roofline",
            "Achieved bandwidth and the memory's limits",
            f"Limits: {known} bandwidth of memory, measured in the same run.{named} "
            "Hollow: every lookup counted, as most papers do; caches can lift it above the limit. "
            "Filled: each distinct row of a batch counted once, which is nearer to what memory "
            "must deliver. The bytes are those of plain rows for every contender (formula below), "
            "so a compressed table, which computes its rows, is low here by nature. Higher is "
            "better.",
            run.sizes(run.sections()[0]),
            [
                Panel(p.capitalize(), _roofline(found[found["phase"] == p], roofs, theory))
                for p in ("forward", "step")
            ],
        )
    ]


def _roofline(own: pd.DataFrame, roofs: Roofs, theory: float | None) -> Drawing:
    names = list(dict.fromkeys(str(n) for n in own["contender"]))
    sizes = sorted({WEIGHT_BYTES * int(d) for d in own["D"]})
    ends = (min(sizes) / 1.6, max(sizes) * 1.6)
    lines = []
    for place, name in enumerate(names):
        shift = 2 ** (ASIDE * 2 * (place - (len(names) - 1) / 2))
        part = own[own["contender"] == name]
        x = WEIGHT_BYTES * part["D"] * shift
        useful = contender_curve(name, x, part["useful_gb_s"], line="", size=5, hollow=True)
        lines.append(dataclasses.replace(useful, label=""))
        lines.append(contender_curve(name, x, part["distinct_gb_s"], line="", size=5))
    gather = {s: v for s, v in dict(roofs.gather_gb_s).items() if ends[0] <= s <= ends[1]}
    if gather:
        lines.append(Curve(list(gather), list(gather.values()), label="gather", line=DASHED))
    marks = []
    if math.isfinite(roofs.copy_gb_s):
        marks.append(Mark(roofs.copy_gb_s, width=1.4, words=f"copy {roofs.copy_gb_s:.3g} GB/s"))
    if theory:
        marks.append(Mark(theory, line=":", words=f"theoretical {theory:,.4g} GB/s"))
    top = max((v for v in (roofs.copy_gb_s, theory, *gather.values()) if v and v > 0), default=1.0)
    bottom = float(own[["distinct_gb_s", "useful_gb_s"]].min().min()) / 6  # room for the legend
    across = Scale("bytes per row (4·D)", log=2, ticks=sizes, low=ends[0], high=ends[1])
    up = Scale("GB/s", log=10, reach=(bottom, 1.6 * top))
    return curves(lines, across, up, names="lower right", columns=2, marks=marks)


FEW = 60  # samples of a contender, up to which the dots are large
GAP = 0.06  # between processes, in widths of one


def sample_figures(run: Run) -> list[Figure]:
    """Return every sample of the headline's cell, by phase."""
    cell = run.headline_cell()
    records = [
        r
        for r in run.records
        if r["cell"] == cell and r["status"] == "ok" and "step" in r["samples"]
    ]
    if not records:
        return []
    return [
        Figure(
            "samples",
            f"Every sample on {run.title(run.headline)}",
            "One dot is one timed execution (or the mean of a few, where one is too short to "
            "time), in the order they were taken; each column is a fresh process. The line is the "
            "process's median. Steps and drifts mean that the machine changed under the "
            "measurement; nothing is left out.",
            run.sizes(run.headline),
            [Panel(p.capitalize(), _samples(records, p)) for p in ("step", "forward")],
        )
    ]


def _samples(records: list[dict[str, Any]], phase: str) -> Drawing:
    names = {r["arm"]: r["label"] for r in records}
    lines = []
    for place, arm in enumerate(names):
        own = sorted((r for r in records if r["arm"] == arm), key=lambda r: r.get("replicate", 0))
        width = 0.86 / len(own)
        for number, record in enumerate(own):
            taken = [1e3 * s for s in seconds(record, phase)]
            left, span = place - 0.43 + number * width, width * (1 - GAP)
            x = [left + span * (i + 0.5) / len(taken) for i in range(len(taken))]
            size = 3.2 if len(taken) * len(own) > FEW else 6
            colour = colour_of(record["contender"])
            lines.append(Curve(x, taken, colour, marker=".", line="", size=size, opacity=0.65))
            lines.append(Curve([left, left + span], [summarise(taken).median] * 2, width=1.2))
    labels = [_two_lines(label) for label in names.values()]
    across = Scale("", ticks=range(len(names)), names=labels)
    return curves(lines, across, Scale("time (ms)", log=10))


def _two_lines(label: str) -> str:
    """Return a long name broken at the space nearest to its middle."""
    gaps = [i for i, c in enumerate(label) if c == " "]
    if len(label) < 9 or not gaps:
        return label
    at = min(gaps, key=lambda i: abs(i - len(label) / 2))
    return f"{label[:at]}\n{label[at + 1 :]}"


def sweep_figures(run: Run) -> list[Figure]:
    """Return throughput, ratio and memory along each swept axis."""
    return [f for f in (_throughput(run), _ratio(run), _memory(run)) if f.panels]


def _throughput(run: Run) -> Figure:
    def draw(axis: str) -> Drawing:
        found = run.along(axis)
        found = found[found["phase"] == "step"]
        lines = [
            contender_curve(
                name,
                own["x"],
                own["lookups_per_s"] / 1e6,
                low=own["lookups"] / own["q75_s"] / 1e6,
                high=own["lookups"] / own["q25_s"] / 1e6,
                band=True,
            )
            for name, own in _by_contender(found, axis)
        ]
        lines += _flat(found, axis, "lookups_per_s", 1e-6)
        return _along(lines, found, axis, "million lookups per second")

    return _per_axis(
        run,
        "sweep_throughput",
        "Throughput of a step, one axis at a time",
        "Lookups per second through forward, backward and update: lookups of a batch ÷ median "
        "time. The band spans the quartiles. Higher is better.",
        draw,
    )


def _ratio(run: Run) -> Figure:
    def draw(axis: str) -> Drawing:
        found = run.along(axis)
        found = found[(found["arm"] != run.baseline.key) & found["ratio"].notna()]
        lines = []
        for name, own in _by_contender(found, axis):
            for phase, style in (("step", "-"), ("forward", SHORT)):
                part = own[own["phase"] == phase]
                part = part[part["rank"] > 0] if axis == "rank" else part
                if len(part):
                    bounds = {"low": part["ratio_lo"], "high": part["ratio_hi"]}
                    label = f"{label_of(name)} {phase}"
                    curve = {"label": label, "line": style, "width": 1.8, **bounds}
                    lines.append(contender_curve(name, part["x"], part["ratio"], **curve))
        label = f"time ÷ {run.baseline.label}"
        return _along(lines, found, axis, label, marks=[Mark(1.0)])

    return _per_axis(
        run,
        "sweep_ratio",
        f"Time ÷ {run.baseline.label}, paired",
        f"How many times the time of {run.baseline.label}, from the ratios within each round, with "
        "the 95 % confidence interval. Solid: step. Dashed: forward. Below 1 the contender is "
        "faster.",
        draw,
    )


def _memory(run: Run) -> Figure:
    def draw(axis: str, column: str) -> Drawing:
        found = run.along(axis)
        found = found[(found["phase"] == "step") & (found[column].fillna(0) > 0)]
        lines = []
        for name, own in _by_contender(found, axis):
            style = DASHED if name == "torch" and column == "weights_bytes" else "-"
            lines.append(contender_curve(name, own["x"], own[column] / 1e6, line=style))
        lines += _flat(found, axis, column, 1e-6)
        return _along(lines, found, axis, "MB")

    panels, swept = [], run.swept_axes()
    if "D" in swept:
        panels.append(Panel("Parameters by dimension", draw("D", "weights_bytes")))
    if "rank" in swept:
        panels.append(Panel("Parameters by TT rank", draw("rank", "weights_bytes")))
    if "B" in swept and run.table["peak_bytes"].notna().any():
        panels.append(Panel("Scratch memory of a step by batch size", draw("B", "peak_bytes")))
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
    panels = [Panel(text.capitalised(AXIS_NAMES[a]), draw(a)) for a in axes]
    return Figure(name, title, caption, run.sizes(SWEEP) if panels else "", panels)


def _along(
    lines: Sequence[Curve], found: pd.DataFrame, axis: str, label: str, marks: Sequence[Mark] = ()
) -> Drawing:
    """Return curves along a swept axis, named at their ends."""
    values = sorted({float(v) for v in found["x"] if axis != "rank" or v > 0})
    across = Scale(AXIS_NAMES[axis], log=2 * (axis in LOG_AXES), ticks=values)
    return curves(lines, across, Scale(label, log=10), names="ends", marks=marks)


def _by_contender(found: pd.DataFrame, axis: str) -> Iterable[tuple[str, pd.DataFrame]]:
    """Yield contenders sorted along the axis; along the rank, only those that have one."""
    for name, own in found.groupby("contender", sort=False):
        if axis != "rank" or (own["rank"] > 0).any():
            yield str(name), own.sort_values("x")


def _flat(found: pd.DataFrame, axis: str, column: str, factor: float) -> list[Curve]:
    """Return contenders without a rank as level lines along the axis of ranks."""
    if axis != "rank":
        return []
    ends = [float(found.loc[found["rank"] > 0, "rank"].min()), float(found["rank"].max())]
    return [
        contender_curve(
            str(r["contender"]), ends, [r[column] * factor] * 2, marker="", line=DASHED, width=1.5
        )
        for _, r in found[found["rank"] == 0].iterrows()
    ]
