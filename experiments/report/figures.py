"""The figures of a run: cost against memory, the swept axes, and cases with published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.config.sweep import LABELS, SWEEP
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import COLOURS, INK, MARKERS, Figure, Panel

LOG_AXES = ("T", "E", "D", "B", "L", "rank")
Label = tuple[float, float, str, str]  # x, y, text, colour


def figures(run: Run) -> list[Figure]:
    """Every figure this run has the data for; the first is the main one."""
    found = [_cost_and_memory(run), _sweep_time(run), _sweep_ratio(run), _sweep_bandwidth(run)]
    found += [_sweep_memory(run)]
    found += [_published(run, s) for s in run.sections() if _published_rows(run, s)]
    return [f for f in found if f is not None and f.panels]


def subtitle(run: Run) -> str:
    """Machine, software and sizes: what a figure must say when it stands alone."""
    e = run.environment
    git = (e.get("git") or {}).get("sha") or "no git"
    dirty = "-dirty" if (e.get("git") or {}).get("dirty") else ""
    parts = [e.get("device"), f"torch {e.get('torch')}", f"emblib {git}{dirty}"]
    parts += [str(run.config.optimizer), f"timing {run.config.timing.preset}"]
    return " · ".join(str(p) for p in parts)


def _cost_and_memory(run: Run) -> Figure | None:
    cell = run.headline_cell()
    if cell is None:
        return None
    rows = run.table[(run.table["cell"] == cell) & (run.table["status"] == "ok")]
    if not len(rows):
        return None
    section = str(run.config.report.headline) or SWEEP
    names = {"step": "forward + backward + update", "forward": "forward"}
    return Figure(
        "cost_and_memory",
        f"Time against memory on {run.title(section)}",
        "Each mark is one contender: parameters on the horizontal axis, median time of one batch"
        " on the vertical one, with quartiles. Left and down is better.",
        run.sizes(section),
        [Panel(title, _scatter(rows[rows["phase"] == phase])) for phase, title in names.items()],
    )


def _scatter(rows: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        labels: list[Label] = []
        for name, own in rows.groupby("contender", sort=False):
            own = own.sort_values("weights_bytes")
            x, y = own["weights_bytes"] / 1e6, own["median_s"] * 1e3
            spread = [
                (own["median_s"] - own["q25_s"]) * 1e3,
                (own["q75_s"] - own["median_s"]) * 1e3,
            ]
            colour = COLOURS[str(name)]
            axes.errorbar(
                x, y, yerr=spread, color=colour, marker=MARKERS[str(name)], lw=1.2, capsize=3
            )
            labels += [(a, b, str(t), colour) for a, b, t in zip(x, y, own["label"], strict=True)]
        _scales(axes, "parameters (MB)", "time per batch (ms)")
        axes.set_xscale("log")
        axes.margins(x=0.3, y=0.25)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: number(v)))
        axes.minorticks_off()
        middle = math.prod(math.sqrt(v) for v in axes.get_xlim())
        for x, y, text, colour in labels:  # towards the middle, where there is room
            side, shift = ("left", 9) if x < middle else ("right", -9)
            axes.annotate(
                text, (x, y), (shift, 0), textcoords="offset points", color=colour, ha=side,
                va="center", fontsize=9,
            )  # fmt: skip

    return draw


def _scales(axes: Axes, x: str, y: str) -> None:
    """Logarithmic values with plain numbers on the ticks."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yscale("log")
    _plain_ticks(axes)


def _plain_ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    span = high / max(low, 1e-12)
    subs = (
        (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if span < 12 else (1.0, 2.0, 5.0) if span < 200 else (1.0,)
    )
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.minorticks_off()


def _sweep_time(run: Run) -> Figure | None:
    return _per_axis(
        run,
        "sweep_time",
        "Step time, one axis at a time",
        "Median time of forward + backward + update of one batch; the band spans the quartiles. "
        "Lower is better.",
        lambda axis: _lines(run, axis, "median_s", 1e3, "step (ms)"),
    )


def _sweep_ratio(run: Run) -> Figure | None:
    return _per_axis(
        run,
        "sweep_ratio",
        f"Time ÷ {run.baseline.label}, paired",
        f"How many times the time of {run.baseline.label}: median of the ratios within each "
        "round, and its 95 % interval. Below 1 the contender is faster.",
        lambda axis: _ratios(run, axis),
    )


def _sweep_bandwidth(run: Run) -> Figure | None:
    return _per_axis(
        run,
        "sweep_bandwidth",
        "Useful bandwidth of the step",
        "Bytes the task must move (formula below) ÷ median step time. Higher is better. The "
        "dotted line is this machine's own copy bandwidth, measured in the same run.",
        lambda axis: _lines(run, axis, "useful_gb_s", 1.0, "useful bandwidth (GB/s)"),
    )


def _per_axis(
    run: Run, name: str, title: str, caption: str, draw: Callable[[str], Callable[[Axes], None]]
) -> Figure | None:
    axes = run.swept_axes()
    panels = [Panel(AXIS_NAMES[a][:1].upper() + AXIS_NAMES[a][1:], draw(a)) for a in axes]
    return Figure(name, title, caption, run.sizes(SWEEP), panels) if panels else None


def _lines(run: Run, axis: str, column: str, factor: float, ylabel: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[rows["phase"] == "step"]
        ends: list[Label] = []
        for name, own in _by_contender(rows, axis):
            own = own.sort_values("x")
            colour, y = COLOURS[name], own[column] * factor
            axes.plot(own["x"], y, color=colour, marker=MARKERS[name])
            if column == "median_s":
                axes.fill_between(
                    own["x"], own["q25_s"] * factor, own["q75_s"] * factor, color=colour, alpha=0.2,
                    lw=0,
                )  # fmt: skip
            ends.append((float(own["x"].iloc[-1]), float(y.iloc[-1]), LABELS[name], colour))
        if axis == "rank":
            ends += _flat_lines(axes, rows, column, factor)
        if column.endswith("gb_s"):
            _copy_line(axes, run)
        _finish(axes, rows, axis, ylabel)
        _label_ends(axes, ends)

    return draw


def number(value: float) -> str:
    """1,000,000 and 1.05 rather than 1e+06."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _by_contender(rows: pd.DataFrame, axis: str) -> Iterable[tuple[str, pd.DataFrame]]:
    """Contenders that vary along the axis; on the rank axis only those that have a rank."""
    for name, own in rows.groupby("contender", sort=False):
        if axis != "rank" or (own["rank"] > 0).any():
            yield str(name), own


def _flat_lines(axes: Axes, rows: pd.DataFrame, column: str, factor: float) -> list[Label]:
    """Contenders without a rank, as level lines."""
    ends: list[Label] = []
    right = float(rows["rank"].max())
    for _, row in rows[rows["rank"] == 0].iterrows():
        y, name = float(row[column]) * factor, str(row["contender"])
        axes.axhline(y, color=COLOURS[name], lw=1.5, ls=(0, (5, 2)))
        ends.append((right, y, LABELS[name], COLOURS[name]))
    return ends


def _copy_line(axes: Axes, run: Run) -> None:
    speed = float(run.environment.get("copy_gb_s") or math.nan)
    if math.isfinite(speed):
        axes.axhline(speed, color=INK, lw=1.0, ls=":")
        axes.annotate(
            "copy", (0, speed), (3, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=8, color=INK,
        )  # fmt: skip


def _ratios(run: Run, axis: str) -> Callable[[Axes], None]:
    styles = {"step": "-", "forward": (0, (2, 1.5))}

    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[(rows["arm"] != run.baseline.key) & rows["ratio"].notna()]
        ends: list[Label] = []
        for name, own in _by_contender(rows, axis):
            for phase, style in styles.items():
                part = own[own["phase"] == phase].sort_values("x")
                if axis == "rank":
                    part = part[part["rank"] > 0]
                spread = [part["ratio"] - part["ratio_lo"], part["ratio_hi"] - part["ratio"]]
                usable = None if part["ratio_lo"].isna().any() else spread
                axes.errorbar(
                    part["x"], part["ratio"], yerr=usable, color=COLOURS[name], ls=style,
                    marker=MARKERS[name], capsize=3, lw=1.8,
                )  # fmt: skip
                label = f"{LABELS[name]} {phase}"
                last = part.iloc[-1]
                ends.append((float(last["x"]), float(last["ratio"]), label, COLOURS[name]))
        axes.axhline(1.0, color=INK, lw=1.0)
        _finish(axes, rows, axis, f"time ÷ {run.baseline.label}")
        _label_ends(axes, ends)

    return draw


def _finish(axes: Axes, rows: pd.DataFrame, axis: str, ylabel: str) -> None:
    values = sorted({float(v) for v in rows["x"] if axis != "rank" or v > 0})
    if axis in LOG_AXES:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [number(v) for v in values])
    _scales(axes, AXIS_NAMES[axis], ylabel)


def _label_ends(axes: Axes, ends: list[Label]) -> None:
    """Names at the right end of their lines, pushed apart where they would touch."""
    if not ends:
        return
    low, high = (math.log(v) for v in axes.get_ylim())
    gap = (high - low) * 0.075
    placed = low - gap
    right = max(x for x, _, _, _ in ends)
    for _, y, text, colour in sorted(ends, key=lambda e: e[1]):
        placed = max(math.log(y), placed + gap)
        axes.annotate(
            text, (right, math.exp(placed)), (12, 0), textcoords="offset points", color=colour,
            va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def _sweep_memory(run: Run) -> Figure | None:
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


def _memory(run: Run, axis: str, column: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        rows = run.along(axis)
        rows = rows[(rows["phase"] == "step") & (rows[column].fillna(0) > 0)]
        ends: list[Label] = []
        for name, own in _by_contender(rows, axis):
            own = own.sort_values("x")
            y = own[column] / 1e6
            style = (0, (4, 3)) if name == "torch" and column == "weights_bytes" else "-"
            axes.plot(own["x"], y, color=COLOURS[name], marker=MARKERS[name], ls=style)
            ends.append((float(own["x"].iloc[-1]), float(y.iloc[-1]), LABELS[name], COLOURS[name]))
        if axis == "rank":
            ends += _flat_lines(axes, rows, column, 1e-6)
        _finish(axes, rows, axis, "MB")
        _label_ends(axes, ends)

    return draw


def _published_rows(run: Run, section: str) -> list[dict[str, object]]:
    case = run.config.cases.get(section)
    return list(case.published) if case is not None else []


def _published(run: Run, section: str) -> Figure | None:
    rows = run.of(section)
    rows = rows[(rows["phase"] == "step") & (rows["status"] == "ok")]
    if not len(rows):
        return None

    def draw(axes: Axes) -> None:
        bars = [
            (str(r["label"]), r["ns_per_lookup"] / 1e3, COLOURS[str(r["contender"])], "")
            for _, r in rows.sort_values("ns_per_lookup").iterrows()
        ]
        for published in _published_rows(run, section):
            name = f"{published['label']}\npublished, other machine"
            bars.append((name, float(str(published["value"])), COLOURS["published"], "///"))
        for place, (_, value, colour, hatch) in enumerate(bars):
            filled = "none" if hatch else colour
            axes.barh(place, value, color=filled, edgecolor=colour, hatch=hatch, height=0.65)
            axes.annotate(
                f"{value:.3g}", (value, place), (4, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(bars)), [b[0] for b in bars])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.margins(x=0.18)
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
