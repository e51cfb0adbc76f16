"""The figures of sharded collections: beside TorchRec, over ranks, what a step consists of."""

from __future__ import annotations

import math
import zlib

import pandas as pd
from matplotlib.axes import Axes

from experiments.config.schema import Scaling
from experiments.report import text
from experiments.report.data import Run
from experiments.report.palette import COLOURS, INK
from experiments.report.plots import plain_ticks
from experiments.report.sharding import rows_of
from experiments.report.style import WIDTH, Drawing, Figure, Panel
from experiments.sharding import numbers

BAR = 0.3  # inches of a bar
TYPES = {  # each with a colour of the palette, whoever's contender it is
    "data-parallel": "other_3",
    "table-wise": "tbe",
    "row-wise": "tt",
    "column-wise": "torch",
    "table-row-wise": "cached_lru",
    "table-column-wise": "reference_tbe",
    "grid": "reference_tt",
}
MARKERS = dict(zip(TYPES, "Xos^vDP", strict=True))


def colour(kind: str) -> str:
    """Of a sharding type; others by their name."""
    names = list(COLOURS)
    return COLOURS[TYPES.get(kind, names[zlib.crc32(kind.encode()) % len(names)])]


def figures(run: Run) -> list[Figure]:
    """Those that the run has the data for."""
    rows = rows_of(run)
    if not len(rows):
        return []
    told = numbers.predictions(run.records)
    found = [_against(run, rows), _over_ranks(run, rows, told), _split(run, rows)]
    return [f for f in (*found, _predicted(run, told)) if f.panels]


def _against(run: Run, rows: pd.DataFrame) -> Figure:
    judged = numbers.beside_torchrec(rows).sort_values(["section", "world_size"], kind="stable")
    height = 1.2 + BAR * len(judged)
    panels = [Panel("TorchRec's step ÷ emblib's", _ratios(run, judged), 1.8 * WIDTH, height)]
    return Figure(
        "against_torchrec",
        "TorchRec's step time as a multiple of emblib's",
        "Points: paired ratios; lines: their 95 % intervals. Right of 1 emblib is faster.",
        "Right of 1 emblib is faster; sizes are those of each line",
        panels if len(judged) else [],
        columns=1,
    )


def _ratios(run: Run, rows: pd.DataFrame) -> Drawing:
    titles = {str(r["cell"]): str(r["title"]) for r in run.records}

    def draw(axes: Axes) -> None:
        names = []
        for place, (_, row) in enumerate(rows.iterrows()):
            shade = colour(str(row["type"]))
            if not text.missing(row["ratio_lo"]):
                axes.plot([row["ratio_lo"], row["ratio_hi"]], [place, place], color=shade, lw=2)
            axes.plot([row["ratio"]], [place], "o", color=shade)
            names.append(f"{titles[str(row['cell'])]}: {row['type']}")
        axes.axvline(1.0, color=INK, lw=1.0, ls=(0, (4, 3)))
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.set_xlabel("TorchRec's step ÷ emblib's")
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0.8), max(high, 2.5))
        plain_ticks(axes.xaxis)
        axes.grid(visible=False, axis="y")

    return draw


def _over_ranks(run: Run, rows: pd.DataFrame, told: pd.DataFrame) -> Figure:
    ours = rows[rows["contender"].str.startswith(numbers.OURS)]
    panels = []
    for scaling in Scaling:
        own = ours[(ours["scaling"] == scaling.value) | (ours["world_size"] == 1)]
        if own["world_size"].nunique() < 2 or not (own["scaling"] == scaling.value).any():
            continue
        first = own["section"].iloc[0]
        beyond = told[told["beyond"] & (told["scaling"] == scaling.value)] if len(told) else told
        beyond = beyond[beyond["section"] == first] if len(beyond) else beyond
        title = f"{scaling.value.capitalize()} scaling"
        panels.append(Panel(title, _lines(own[own["section"] == first], beyond), 1.1 * WIDTH))
    return Figure(
        "scaling",
        "Time of a step over ranks",
        "Solid: measured. Dashed, hollow: predicted by the cost model, not measured. Down is "
        "better; with weak scaling level is ideal, with strong scaling the dotted line.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _lines(rows: pd.DataFrame, beyond: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        for kind, own in rows.groupby("type", sort=False):
            line = own.sort_values("world_size")
            shade, marker = colour(str(kind)), MARKERS.get(str(kind), "h")
            times = 1e3 * line["median_s"]
            axes.plot(line["world_size"], times, color=shade, marker=marker, label=str(kind))
            if len(beyond):
                _dashed(axes, line.iloc[-1], beyond[beyond["type"] == kind], marker)
        if (rows["scaling"] == Scaling.strong.value).any():
            worlds = sorted(rows["world_size"].unique())
            start = 1e3 * rows[rows["world_size"] == worlds[0]]["median_s"].min()
            ideal = [start / w for w in worlds]
            axes.plot(worlds, ideal, color=INK, lw=1.0, ls=(0, (1, 2)), label="ideal")
        if len(beyond):
            axes.plot([], [], "o", color=INK, mfc="none", ls=(0, (4, 3)), lw=1.2, label="predicted")
        axes.set_xscale("log", base=2)
        values = sorted({*rows["world_size"], *(beyond["world_size"] if len(beyond) else ())})
        axes.set_xticks(values, [str(v) for v in values])
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms a step")
        axes.legend(fontsize=8, loc="best")

    return draw


def _dashed(axes: Axes, last: pd.Series, beyond: pd.DataFrame, marker: str) -> None:
    """From the last measured point on, what is only predicted."""
    more, shade = beyond.sort_values("world_size"), colour(str(last["type"]))
    worlds = [last["world_size"], *more["world_size"]]
    predicted = [1e3 * last["median_s"], *(1e3 * more["predicted_s"])]
    axes.plot(worlds, predicted, color=shade, ls=(0, (4, 3)), lw=1.2)
    axes.plot(worlds[1:], predicted[1:], marker, color=shade, mfc="none", ls="none")


def _split(run: Run, rows: pd.DataFrame) -> Figure:
    known = rows[rows["compute_s"].notna()]
    if len(known):
        known = known[known["section"] == known["section"].iloc[0]]
    worlds = sorted(w for w in known["world_size"].unique()) if len(known) else []
    panels = []
    for world in worlds:
        own = known[(known["world_size"] == world)]
        own = own[own["scaling"] == own["scaling"].iloc[0]]
        name = "1 rank" if world == 1 else f"{world} ranks"
        panels.append(Panel(name, _bars(own), height=1.4 + BAR * len(own)))
    return Figure(
        "compute_and_communication",
        "What a step consists of",
        "Filled: lookup and update of the rows that a rank holds. Hatched: the rest of the step, "
        "communication and waiting among it. Shorter is better.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _bars(rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        names = []
        for place, (_, row) in enumerate(rows.iterrows()):
            compute, rest = 1e3 * row["compute_s"], 1e3 * row["communication_s"]
            shade = colour(str(row["type"]))
            axes.barh(place, compute, color=shade, height=0.7)
            axes.barh(
                place, rest, left=compute, facecolor="none", edgecolor=shade, hatch="///",
                height=0.7,
            )  # fmt: skip
            names.append(str(row["type"]))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel("ms a step (hatched: all but lookup and update)")
        axes.grid(visible=False, axis="y")

    return draw


def _predicted(run: Run, told: pd.DataFrame) -> Figure:
    measured = told[~told["beyond"]] if len(told) else told
    correlation, _, points = numbers.agreement(told)
    words = "" if math.isnan(correlation) else f" Rank correlation {text.digits(correlation, 2)}."
    return Figure(
        "predicted",
        "Predicted and measured steps",
        f"{points} points; on the line a prediction is right.{words}",
        run.sizes(run.sections()[0]),
        [Panel("Predicted against measured", _points(measured), 1.3 * WIDTH)] if points else [],
    )


def _points(rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        for (kind, world), own in rows.groupby(["type", "world_size"], sort=False):
            axes.plot(
                1e3 * own["median_s"], 1e3 * own["predicted_s"], MARKERS.get(str(kind), "h"),
                color=colour(str(kind)), alpha=0.35 + 0.65 / float(str(world)),
                label=str(kind) if world == rows["world_size"].min() else None,
            )  # fmt: skip
        both = 1e3 * pd.concat([rows["median_s"], rows["predicted_s"]])
        ends = [both.min(), both.max()]
        axes.plot(ends, ends, color=INK, lw=1.0, ls=(0, (4, 3)))
        for axis, scale, name in (
            (axes.xaxis, axes.set_xscale, "measured"),
            (axes.yaxis, axes.set_yscale, "predicted"),
        ):
            scale("log")
            plain_ticks(axis)
            axis.set_label_text(f"{name} ms a step")
        axes.legend(fontsize=8, loc="best")

    return draw
