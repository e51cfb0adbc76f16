"""The headline's cell: time, memory and error against each other; its modes; published numbers."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments.report.data import Run
from experiments.report.palette import colour_of, marker_of
from experiments.report.plots import Label, label_ends, plain_ticks, scales
from experiments.report.style import Drawing, Figure, Panel

UNIT = "us per lookup"  # of published numbers that can stand on one axis with ours
PHASES = {"step": "forward + backward + update", "forward": "forward"}


def figures(run: Run) -> list[Figure]:
    """Time against memory, and both against the error of what is computed where that is known."""
    cell = run.headline_cell()
    if cell is None or not len(run.table):
        return []
    rows = run.table[(run.table["cell"] == cell) & (run.table["status"] == "ok")]
    if not len(rows):
        return []
    section = run.headline
    panels = [
        Panel(f"Time of {title}", _scatter(rows[rows["phase"] == phase], "median_s"))
        for phase, title in PHASES.items()
    ]
    known = rows[(rows["phase"] == "step") & (rows["error"].fillna(0) > 0)]
    words = ""
    if len(known):
        panels.append(Panel("Error", _scatter(known, "error")))
        words = " Error: relative distance of the rows that are looked up from the plain tables'."
    return [
        Figure(
            "cost_and_memory",
            f"Time{', error' * bool(len(known))} against memory on {run.title(section)}",
            "Each mark is one contender: parameters on the horizontal axis, median time of one "
            f"batch on the vertical one, with quartiles. Left and down is better.{words}",
            run.sizes(section),
            panels,
        )
    ]


def _scatter(rows: pd.DataFrame, column: str) -> Drawing:
    time = column == "median_s"

    def draw(axes: Axes) -> None:
        labels: list[Label] = []
        for name, own in rows.groupby("contender", sort=False):
            own = own.sort_values("weights_bytes")
            x, y = own["weights_bytes"] / 1e6, own[column] * (1e3 if time else 1.0)
            spread = [
                (own["median_s"] - own["q25_s"]) * 1e3,
                (own["q75_s"] - own["median_s"]) * 1e3,
            ]
            shade, mark = colour_of(str(name)), marker_of(str(name))
            axes.errorbar(
                x, y, yerr=spread if time else None, color=shade, marker=mark, lw=1.2, capsize=3
            )
            labels += [(a, b, str(t), shade) for a, b, t in zip(x, y, own["label"], strict=True)]
        scales(axes, "parameters (MB)", "time per batch (ms)" if time else "relative error")
        axes.set_xscale("log")
        axes.margins(x=0.3, y=0.25)
        plain_ticks(axes.xaxis)
        _beside(axes, labels)

    return draw


def _beside(axes: Axes, labels: list[Label]) -> None:
    """Names beside their marks, towards the middle, pushed apart where they would touch."""
    middle = math.prod(math.sqrt(v) for v in axes.get_xlim())
    low, high = (math.log(v) for v in axes.get_ylim())
    gap = (high - low) * 0.06
    placed = {True: -math.inf, False: -math.inf}
    for x, y, words, shade in sorted(labels, key=lambda e: e[1]):
        left = x < middle
        placed[left] = max(math.log(y), placed[left] + gap)
        axes.annotate(
            words, (x, math.exp(placed[left])), (9 if left else -9, 0),
            textcoords="offset points", color=shade, ha="left" if left else "right",
            va="center", fontsize=9,
        )  # fmt: skip


def modes(run: Run) -> list[Figure]:
    """The headline in every mode that was measured; each mode keeps to its own place."""
    cell = run.headline_cell()
    if cell is None or len(run.modes) < 2 or not len(run.table):
        return []
    rows = run.table[(run.table["cell"] == cell) & (run.table["status"] == "ok")]
    section = run.headline
    return [
        Figure(
            "modes",
            f"What the mode changes on {run.title(section)}",
            "The same work, measured in different ways (see 'How to read this'). A number of one "
            "mode is never divided by one of another. Bars are quartiles; lower is better.",
            run.sizes(section),
            [Panel(p.capitalize(), _by_mode(run, rows[rows["phase"] == p])) for p in PHASES],
        )
    ] if len(rows) else []  # fmt: skip


def _by_mode(run: Run, rows: pd.DataFrame) -> Drawing:
    arms = list(dict.fromkeys(rows["arm"]))

    def draw(axes: Axes) -> None:
        ends: list[Label] = []
        for place, arm in enumerate(arms):
            own = rows[rows["arm"] == arm]
            shift = 0.6 * ((place + 0.5) / len(arms) - 0.5)
            x = [run.modes.index(m) + shift for m in own["mode"]]
            spread = [
                1e3 * (own["median_s"] - own["q25_s"]),
                1e3 * (own["q75_s"] - own["median_s"]),
            ]
            name = str(own["contender"].iloc[0])
            axes.errorbar(
                x, 1e3 * own["median_s"], yerr=spread, ls="", capsize=3, color=colour_of(name),
                marker=marker_of(name),
            )  # fmt: skip
            last, words = 1e3 * float(own["median_s"].iloc[-1]), str(own["label"].iloc[0])
            ends.append((len(run.modes) - 0.6, last, words, colour_of(name)))
        axes.set_xticks(range(len(run.modes)), run.modes)
        axes.set_xlim(-0.5, len(run.modes) - 0.5)
        axes.grid(visible=False, axis="x")
        scales(axes, "", "time per batch (ms)")
        label_ends(axes, ends)

    return draw


def published(run: Run) -> list[Figure]:
    """Cases with a time per lookup that somebody else measured elsewhere."""
    found = []
    for section in run.sections():
        case = run.config.cases.get(section)
        numbers = [dict(p) for p in case.published] if case is not None else []
        numbers = [p for p in numbers if str(p["unit"]).startswith(UNIT)]
        rows = run.of(section)
        rows = rows[(rows["phase"] == "step") & (rows["status"] == "ok")] if len(rows) else rows
        if len(rows) and numbers:
            found.append(_published(run, section, rows, numbers))
    return found


def _published(run: Run, section: str, rows: pd.DataFrame, numbers: list[dict[str, Any]]) -> Figure:
    def draw(axes: Axes) -> None:
        bars = [
            (str(r["label"]), r["ns_per_lookup"] / 1e3, colour_of(str(r["contender"])), "")
            for _, r in rows.sort_values("ns_per_lookup").iterrows()
        ]
        for other in numbers:
            name = f"{other['label']}\npublished, other machine"
            bars.append((name, float(other["value"]), colour_of("published"), "///"))
        for place, (_, value, shade, hatch) in enumerate(bars):
            filled = "none" if hatch else shade
            axes.barh(place, value, color=filled, edgecolor=shade, hatch=hatch, height=0.65)
            axes.annotate(
                f"{value:.3g}", (value, place), (4, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(bars)), [b[0] for b in bars])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.margins(x=0.18)
        plain_ticks(axes.xaxis)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("µs per lookup of a step (log scale)")

    return Figure(
        f"published_{section}",
        f"{run.title(section)[:1].upper()}{run.title(section)[1:]}",
        "Measured here (solid) and published elsewhere (hatched): another machine, so the two "
        "kinds of bar are not divided by each other. Shorter is better.",
        run.sizes(section),
        [Panel("Time per lookup", draw)],
    )
