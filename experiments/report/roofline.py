"""Bandwidth that a lookup gets beside what the machine's memory gives to rows of that size."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments.config.sweep import label_of
from experiments.machine import devices
from experiments.machine.roofs import Roofs
from experiments.report.data import Run
from experiments.report.palette import INK, colour_of, marker_of
from experiments.report.plots import scales
from experiments.report.style import Drawing, Figure, Panel
from experiments.results.metrics import WEIGHT_BYTES

ASIDE = 0.055  # contenders stand beside each other, on a logarithmic axis


def figures(run: Run) -> list[Figure]:
    """A dot per contender and cell, twice: each lookup counted, and each distinct row once."""
    rows, roofs = run.table, Roofs.of(run.environment)
    if not len(rows) or not (math.isfinite(roofs.copy_gb_s) or roofs.gather_gb_s):
        return []
    rows = rows[(rows["status"] == "ok") & rows["useful_gb_s"].notna()]
    if not len(rows):
        return []
    known = "copy and random gather" if roofs.gather_gb_s else "copy"
    device = devices.of_environment(run.environment)
    theory = device.bandwidth_gb_s if device else None
    named = f" Dotted: {device.name} in theory." if device and theory else ""
    return [
        Figure(
            "roofline",
            "Bandwidth beside the roofs of this machine",
            f"Roofs: {known} of memory, measured in the same run.{named} "
            "Hollow: every lookup counted, as most papers do; caches can lift it above the roof. "
            "Filled: each distinct row of a batch counted once, which is nearer to what memory "
            "must deliver. The bytes are those of plain rows for every contender (formula below), "
            "so a compressed table, which computes its rows, is low here by nature. Higher is "
            "better.",
            run.sizes(run.sections()[0]),
            [
                Panel(p.capitalize(), _draw(rows[rows["phase"] == p], roofs, theory))
                for p in ("forward", "step")
            ],
        )
    ]


def _draw(own: pd.DataFrame, roofs: Roofs, theory: float | None) -> Drawing:
    names = list(dict.fromkeys(str(n) for n in own["contender"]))

    def draw(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for place, name in enumerate(names):
            shift = 2 ** (ASIDE * 2 * (place - (len(names) - 1) / 2))
            part = own[own["contender"] == name]
            x, shade = WEIGHT_BYTES * part["D"] * shift, colour_of(name)
            low, high = part["distinct_gb_s"], part["useful_gb_s"]
            axes.vlines(x, low, high, color=shade, lw=0.8, alpha=0.5)
            kind: dict[str, Any] = {"color": shade, "marker": marker_of(name), "ls": "", "ms": 5}
            axes.plot(x, high, mfc="none", mew=1.0, **kind)
            axes.plot(x, low, label=label_of(name), **kind)
        sizes = sorted({WEIGHT_BYTES * int(d) for d in own["D"]})
        ceiling = _roofs(axes, roofs, sizes, theory)
        low, high = axes.get_ylim()
        axes.set_ylim(low / 4, max(high, 1.6 * ceiling))  # the names stand below
        axes.set_xticks(sizes, [f"{s:,}" for s in sizes])
        axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
        scales(axes, "bytes of a row (4·D)", "GB/s")
        axes.legend(fontsize=8, loc="lower right", ncols=2, handletextpad=0.2, columnspacing=0.8)

    return draw


def _roofs(axes: Axes, roofs: Roofs, sizes: list[int], theory: float | None) -> float:
    copy, gather = roofs.copy_gb_s, dict(roofs.gather_gb_s)
    if math.isfinite(copy):
        axes.axhline(copy, color=INK, lw=1.4)
        _name(axes, f"copy {copy:.3g} GB/s", copy)
    if theory:
        axes.axhline(theory, color=INK, lw=1.0, ls=":")
        _name(axes, f"in theory {theory:,.4g} GB/s", theory)
    inside = {s: v for s, v in gather.items() if min(sizes) / 1.6 <= s <= max(sizes) * 1.6}
    axes.plot(list(inside), list(inside.values()), color=INK, lw=1.4, ls=(0, (5, 2)))
    if inside:
        first = min(inside)
        axes.annotate(
            "gather", (first, inside[first]), (-6, 5), textcoords="offset points", fontsize=8,
            color=INK, ha="right",
        )  # fmt: skip
    return max((v for v in (copy, theory, *gather.values()) if v and v > 0), default=0.0)


def _name(axes: Axes, words: str, y: float) -> None:
    axes.annotate(
        words, (0.01, y), (2, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8, color=INK,
    )  # fmt: skip
