"""The figures of contenders timed together, in the order in which they argue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments.config.sweep import SWEEP, label_of
from experiments.machine import ceilings
from experiments.machine.ceilings import Roofs
from experiments.report import ratios
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import (
    INK,
    Drawing,
    Figure,
    Label,
    Panel,
    by_contender,
    colour_of,
    finish,
    flat_lines,
    label_ends,
    marker_of,
    plain_ticks,
    scales,
)
from experiments.results.metrics import WEIGHT_BYTES, seconds
from experiments.timing.statistics import summarise

UNIT = "us per lookup"  # of published numbers that can stand on one axis with ours
PHASES = {"step": "forward + backward + update", "forward": "forward"}


def cost_figures(run: Run) -> list[Figure]:
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


ASIDE = 0.055  # contenders stand beside each other, on a logarithmic axis


def roofline_figures(run: Run) -> list[Figure]:
    """A dot per contender and cell, twice: each lookup counted, and each distinct row once."""
    rows, roofs = run.table, Roofs.of(run.environment)
    if not len(rows) or not (math.isfinite(roofs.copy_gb_s) or roofs.gather_gb_s):
        return []
    rows = rows[(rows["status"] == "ok") & rows["useful_gb_s"].notna()]
    if not len(rows):
        return []
    known = "copy and random gather" if roofs.gather_gb_s else "copy"
    device = ceilings.of_environment(run.environment)
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


FEW = 60  # samples of a contender, up to which the dots are large
GAP = 0.06  # between processes, in widths of one


def spread_figures(run: Run) -> list[Figure]:
    """Samples of the headline's cell by phase."""
    cell = run.headline_cell()
    records = [
        r
        for r in run.records
        if r["cell"] == cell and r["status"] == "ok" and "step" in r["samples"]
    ]
    if not records:
        return []
    section = run.headline
    return [
        Figure(
            "samples",
            f"Every sample on {run.title(section)}",
            "One dot is one timed execution (or the mean of a few, where one is too short to "
            "time), in the order they were taken; each column is a fresh process. The line is the "
            "process's median. Steps and drifts mean that the machine changed under the "
            "measurement; nothing is left out.",
            run.sizes(section),
            [Panel(p.capitalize(), _draw_spread(records, p)) for p in ("step", "forward")],
        )
    ]


def _draw_spread(records: list[dict[str, Any]], phase: str) -> Drawing:
    arms = list(dict.fromkeys(r["arm"] for r in records))

    def draw(axes: Axes) -> None:
        for place, arm in enumerate(arms):
            own = sorted((r for r in records if r["arm"] == arm), key=_process)
            width = 0.86 / len(own)
            for number, record in enumerate(own):
                taken = [1e3 * s for s in seconds(record, phase)]
                left, span = place - 0.43 + number * width, width * (1 - GAP)
                x = [left + span * (i + 0.5) / len(taken) for i in range(len(taken))]
                shade = colour_of(record["contender"])
                size = 3.2 if len(taken) * len(own) > FEW else 6
                axes.plot(x, taken, ".", color=shade, ms=size, alpha=0.65, mew=0)
                middle = summarise(taken).median
                axes.hlines(middle, left, left + span, color=INK, lw=1.2)
        names = {r["arm"]: r["label"] for r in records}
        axes.set_xticks(range(len(arms)), [_two_lines(names[a]) for a in arms], fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        scales(axes, "", "time (ms)")

    return draw


def _process(record: dict[str, Any]) -> int:
    return int(record.get("replicate", 0))


def _two_lines(label: str) -> str:
    """Long names are broken at the middle-most space."""
    gaps = [i for i, c in enumerate(label) if c == " "]
    if len(label) < 11 or not gaps:
        return label
    at = min(gaps, key=lambda i: abs(i - len(label) / 2))
    return f"{label[:at]}\n{label[at + 1 :]}"


def sweep_figures(run: Run) -> list[Figure]:
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


def figures(run: Run) -> list[Figure]:
    """Every figure this run of one mode has the data for; the first is the main one."""
    found = [*cost_figures(run), *ratios.figures(run), *ratios.heatmap_figures(run)]
    found += [*sweep_figures(run), *roofline_figures(run), *published(run)]
    return [f for f in (*found, *spread_figures(run)) if f.panels]


def subtitle(run: Run) -> str:
    """Machine, software and sizes: what a figure must say when it stands alone."""
    e = run.environment
    git = (e.get("git") or {}).get("sha") or "no git"
    dirty = "-dirty" if (e.get("git") or {}).get("dirty") else ""
    driver = (e.get("gpu") or {}).get("driver")
    parts = [e.get("device"), f"torch {e.get('torch')}", *([f"driver {driver}"] if driver else [])]
    parts += [f"emblib {git}{dirty}", str(run.config.optimizer), "+".join(run.modes)]
    processes = sorted(set(run.passes().values()))
    if processes:
        most = f"{processes[0]}–{processes[-1]}" if len(processes) > 1 else f"{processes[0]}"
        parts.append(f"{most} process{'es' * (processes[-1] > 1)} per cell")
    return " · ".join(str(p) for p in (*parts, f"timing {run.config.timing.preset}"))
