"""The report of sharded collections: steps against TorchRec's, by ranks, and predicted ones.

`rows` are steps (`kinds.sharding.step_frame`): one per cell, arm and mode, over all processes.
`predicted` has what the planner's cost model says of them (`kinds.sharding.predictions`). These
functions list the columns.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import Scaling
from experiments.config.sweep import SWEEP
from experiments.contenders.registry import SHARDED
from experiments.kinds import sharding
from experiments.report import charts, text
from experiments.report.charts import DASHED, DOTTED, Curve, Mark, Row, Scale, curves
from experiments.report.data import Run, select
from experiments.report.style import COLOURS, INK, WIDTH, Drawing, Figure, Panel
from experiments.report.tables import (
    Column,
    Table,
    TitledTable,
    Value,
    bytes_value,
    count_value,
    factor_value,
    ratio_value,
    time_value,
)

NOTES = (
    "A sample is what the slowest rank took. Compute is the lookup and the update of the rows that "
    "a rank holds, for ids that it has already, done by all ranks at once; communication is the "
    "rest of the step: routing, sending both ways, waiting for other ranks, combining. Efficiency "
    "compares with one rank: of weak scaling, the step of one rank ÷ the step of W; of strong "
    "scaling, the step of one rank ÷ W ÷ the step of W.",
    "Ratios are TorchRec's time ÷ that of emblib's counterpart in the same processes, paired in "
    "each round: 2× means that emblib's step takes half the time. Both work on the same batches in "
    "the same processes; a rank's gradients are divided by the number of ranks. On CPUs "
    "both exchange over gloo.",
    "Every contender's first output and first update are checked against plain PyTorch, on all "
    "ranks together, before anything is timed.",
    "Predictions are those of the planner's cost model, from constants that the same ranks "
    "measured before anything else. Where there are more ranks than were measured they are "
    "predictions: those steps were not run. They take every rank to have a core of its "
    "own and every link to be as those between the ranks that were measured; machines that are not "
    "one host have a network that this was not checked on.",
)


def measured_steps(run: Run) -> pd.DataFrame:
    """Return `sharding.step_frame`, without the efficiency of ranks that share cores."""
    rows = sharding.step_frame(run.frame("sharding"))
    cores = _usable_cores(run)
    if cores and len(rows):
        rows.loc[rows["world_size"] > cores, "efficiency"] = math.nan
    return rows


def _usable_cores(run: Run) -> int | None:
    """Return the cores that the run could use; None if its environment does not say."""
    return (run.environment.get("cpu") or {}).get("usable_cores")


def answer(run: Run) -> list[str]:
    """Compare with TorchRec, say how the subject scales and how good predictions are."""
    rows = measured_steps(run)
    if not len(rows):
        return ["No answer: no contender has a result."]
    sentences = [
        *_torchrec_sentences(run, rows),
        *_scaling_sentences(run, rows),
        *_prediction_sentence(run),
    ]
    return sentences or [_fastest(rows)]


def _torchrec_sentences(run: Run, rows: pd.DataFrame) -> list[str]:
    """State the ratios of the headline with their times, then the range over all cells."""
    compared_rows = sharding.torchrec_rows(rows)
    if not len(compared_rows):
        return []
    headline_rows = select(compared_rows, section=run.headline)
    if not len(headline_rows):
        headline_rows = select(compared_rows, section=compared_rows["section"].iloc[0])
    headline_rows = select(headline_rows, world_size=headline_rows["world_size"].max())
    headline_rows = select(headline_rows, cell=headline_rows["cell"].iloc[0])
    step_s = {(r["cell"], r["arm"]): r["median_s"] for _, r in rows.iterrows()}
    parts = [
        f"{row['type']} {text.ratio(row)} "
        f"({text.seconds(row['median_s'])} against "
        f"{text.seconds(step_s[row['cell'], sharding.counterpart(row['arm'])])})"
        for _, row in headline_rows.iterrows()
    ]
    title = _cell_title(run, str(headline_rows["cell"].iloc[0]))
    sentences = [
        f"On this machine a step of TorchRec takes, as a multiple of emblib's on {title}: "
        f"{', '.join(parts)}."
    ]
    if compared_rows["cell"].nunique() > 1:
        low = compared_rows.loc[compared_rows["ratio"].idxmin()]
        high = compared_rows.loc[compared_rows["ratio"].idxmax()]
        sentences.append(
            f"Over all cells the multiple runs from {text.times(low['ratio'])} ({low['label']} on "
            f"{_cell_title(run, low['cell'])}) to {text.times(high['ratio'])} ({high['label']} on "
            f"{_cell_title(run, high['cell'])})."
        )
    return sentences


def _scaling_sentences(run: Run, rows: pd.DataFrame) -> list[str]:
    """Describe the subject and the best type, for both kinds of scaling.

    The sentences are about the largest world in which every rank has a core; steps of larger worlds
    measure nothing.
    """
    emblib_rows = rows[rows["contender"].str.startswith(SHARDED) & rows["base_s"].notna()]
    sentences: list[str] = []
    shared, cores = _core_sentence(run, emblib_rows), _usable_cores(run)
    emblib_rows = emblib_rows[emblib_rows["world_size"] <= cores] if cores else emblib_rows
    largest = emblib_rows["world_size"].max() if len(emblib_rows) else 1
    if not largest > 1 or not emblib_rows["compute_s"].notna().any():
        return shared
    for scaling in Scaling:
        largest_rows = select(emblib_rows, world_size=largest, scaling=scaling.value)
        if not len(largest_rows):
            continue
        headline_rows = select(largest_rows, section=run.headline)
        largest_rows = headline_rows if len(headline_rows) else largest_rows
        largest_rows = select(largest_rows, cell=largest_rows["cell"].iloc[0])
        best = largest_rows.loc[largest_rows["median_s"].idxmin()]
        subject_rows = select(largest_rows, contender=run.subject.contender)
        compared = [best]
        if best["contender"] != run.subject.contender:
            compared += [row for _, row in subject_rows.iterrows()]
        words = text.listed([_efficiency(row) for row in compared])
        sentences.append(f"{scaling.value.capitalize()} scaling to {largest:.0f} ranks: {words}.")
    return [*sentences, *shared]


def _efficiency(row: pd.Series) -> str:
    """Say how long a step takes, how much of it is communication, and how efficient it is."""
    share = text.digits(100 * row["communication_s"] / row["median_s"], 2)
    efficiency = ""
    if not text.is_missing(row["efficiency"]):
        efficiency = f", an efficiency of {text.digits(100 * row['efficiency'], 2)} %"
    return (
        f"{row['type']} takes {text.seconds(row['median_s'])} per step, "
        f"{share} % of it communication{efficiency}"
    )


def _core_sentence(run: Run, rows: pd.DataFrame) -> list[str]:
    """Say that the steps of ranks that share cores measure nothing but correctness."""
    cores = _usable_cores(run)
    worlds = sorted({int(ranks) for ranks in rows["world_size"] if cores and ranks > cores})
    if not cores or not worlds:
        return []
    sizes = " or ".join(map(str, worlds))
    return [
        f"Where {sizes} ranks share {text.count(cores, 'core')}, a run measures nothing but that "
        "results are correct."
    ]


def _prediction_sentence(run: Run) -> list[str]:
    """State how well the cost model predicted the measured steps."""
    rows = sharding.predictions(run.records)
    agreement = sharding.prediction_agreement(rows)
    if math.isnan(agreement.rank_correlation):
        return []
    return [
        f"The cost model's predictions of the {agreement.points} measured steps have a rank "
        f"correlation of {text.digits(agreement.rank_correlation, 2)} with them; their median "
        f"error is a factor of {text.digits(agreement.median_factor)}."
    ]


def _fastest(rows: pd.DataFrame) -> str:
    row = rows.loc[rows["median_s"].idxmin()]
    return f"The fastest step is that of {row['label']}: {text.seconds(row['median_s'])}."


def _cell_title(run: Run, cell: str) -> str:
    return next(str(r["title"]) for r in run.records if r["cell"] == cell)


def tables(run: Run) -> Sequence[TitledTable]:
    """Return one table per section, a row per arm and world; then the predictions."""
    rows, all_rows = measured_steps(run), run.frame("sharding")
    parts = []
    for section in run.sections():
        section_rows = all_rows[all_rows["section"] == section]
        for cell in dict.fromkeys(section_rows["cell"]):
            title = _cell_title(run, str(cell))
            case = run.config.cases.get(section)
            note = f" {case.note}" if case is not None and case.note else ""
            line = f"{_sizes(run, str(cell))}.{note}"
            table = _table(all_rows[all_rows["cell"] == cell], rows[rows["cell"] == cell])
            parts.append(TitledTable(text.capitalise(title), line, table))
    predicted = sharding.predictions(run.records)
    if len(predicted):
        words = "Of worlds that were not measured these are predictions, and nothing else."
        parts.append(TitledTable("Predicted steps", words, _predictions(predicted)))
    return parts


def _sizes(run: Run, cell: str) -> str:
    record = next(r for r in run.records if r["cell"] == cell)
    base = run.sizes(record["section"]) if record["section"] != SWEEP else ""
    p = record["params"]
    sizes_of_rank = (
        f"{record['features']} tables, {record['rows']:,} rows, D={p['D']}, B={p['B']:,} a rank, "
        f"{record['lookups']:,} lookups a rank and batch"
    )
    return base if base and record["world_size"] == 1 else sizes_of_rank


def _table(every: pd.DataFrame, steps: pd.DataFrame) -> Table:
    """Return a row per contender and mode: its step, and the parts of it that were timed."""
    parts = [name for name in sharding.PARTS if (every["phase"] == name).any()]
    modes = every["mode"].nunique() > 1
    rows = []
    for (arm, mode), group in every.groupby(["arm", "mode"], sort=False):
        step = steps[(steps["arm"] == arm) & (steps["mode"] == mode)]
        row = dict(step.iloc[0]) if len(step) else {}
        name = f"{group['label'].iloc[0]}{f', {mode}' * modes}"
        status = "ok" if len(step) else str(group["status"].iloc[0])
        times_of = {r["phase"]: r["median_s"] for _, r in group.iterrows()}
        rows.append({**row, "name": name, "status": status, "times": times_of})
    columns: dict[str, Column] = {
        "contender": lambda r: r["name"],
        "forward": lambda r: time_value(r["times"].get("forward")),
        "step": lambda r: time_value(r["median_s"]),
    }
    if len(steps) and steps["ratio"].notna().any():
        columns["step ÷ emblib's [95\u00a0%]"] = ratio_value
    columns["efficiency"] = lambda r: Value.of(r["efficiency"], lambda v: f"{100 * v:.0f} %")
    if parts:
        columns["compute"] = lambda r: time_value(r["compute_s"])
        columns["communication"] = lambda r: time_value(r["communication_s"])
    for part in parts:
        columns[sharding.PARTS[part]] = functools.partial(_part, part)
    columns["tables"] = lambda r: bytes_value(r["weights_bytes"] or None)
    columns["processes"] = lambda r: count_value(r["processes"])
    return Table.of(rows, columns, num_label_columns=1)


def _part(part: str, row: Mapping[str, Any]) -> Value:
    """Return an entry for the time of a part; `row` is one of `_table`."""
    return time_value(row["times"].get(part))


def _predictions(rows: pd.DataFrame) -> Table:
    rows = rows.sort_values(["section", "contender", "scaling", "world_size"])
    return Table.of(
        rows,
        {
            "contender": lambda r: str(r["label"]),
            "batch per rank": lambda r: count_value(r["batch"]),
            "ranks": lambda r: count_value(r["world_size"]),
            "scaling": lambda r: str(r["scaling"]),
            "predicted step": lambda r: time_value(r["predicted_s"]),
            "measured step": lambda r: "not measured" if r["beyond"] else time_value(r["median_s"]),
            "predicted ÷ measured": lambda r: factor_value(r["predicted_s"] / r["median_s"]),
        },
    )


BAR_HEIGHT = 0.3  # inches
# Colour of the palette and marker by sharding type, the same for emblib's and TorchRec's.
TYPE_STYLES = {
    "data-parallel": ("other_3", "X"),
    "table-wise": ("tbe", "o"),
    "row-wise": ("tt", "s"),
    "column-wise": ("torch", "^"),
    "table-row-wise": ("cached_lru", "v"),
    "table-column-wise": ("sky", "D"),
    "grid": ("reference_tt", "P"),
}


def colour(sharding_type: str) -> str:
    """Return the colour of a sharding type; for any other text, one that depends on it."""
    names = list(COLOURS)
    fallback = names[zlib.crc32(sharding_type.encode()) % len(names)]
    return COLOURS[TYPE_STYLES.get(sharding_type, (fallback, ""))[0]]


def marker(sharding_type: str) -> str:
    """Return the marker of a sharding type."""
    return TYPE_STYLES.get(sharding_type, ("", "h"))[1]


def figures(run: Run) -> list[Figure]:
    """Return the figures that the run has the data for."""
    rows = measured_steps(run)
    if not len(rows):
        return []
    predicted = sharding.predictions(run.records)
    result = [
        _torchrec_figure(run, rows),
        _scaling_figure(run, rows, predicted),
        _parts_figure(run, rows),
    ]
    return [f for f in (*result, _prediction_figure(run, predicted)) if f.panels]


def _torchrec_figure(run: Run, rows: pd.DataFrame) -> Figure:
    """Draw TorchRec's step ÷ emblib's for every cell and sharding type."""
    compared_rows = sharding.torchrec_rows(rows).sort_values(
        ["section", "world_size"], kind="stable"
    )
    titles = {str(r["cell"]): str(r["title"]) for r in run.records}
    lines = [
        Row(
            f"{titles[str(row['cell'])]}: {row['type']}",
            row["ratio"],
            colour(str(row["type"])),
            row["ratio_lo"],
            row["ratio_hi"],
            words=text.times(row["ratio"]),
        )
        for _, row in compared_rows.iterrows()
    ]
    title = "TorchRec's step ÷ emblib's"
    scale = Scale(title, log=10, reach=(0.8, 2.5))
    equality_mark = [Mark(1.0, line=DASHED, upright=True)]
    drawing = charts.row_chart(lines, scale, marks=equality_mark)
    panel = Panel(title, drawing, 1.8 * WIDTH, 1.2 + BAR_HEIGHT * len(lines))
    return Figure(
        "against_torchrec",
        "Speed-up of a step over TorchRec",
        "Points: TorchRec's step time ÷ emblib's, paired; lines: 95 % confidence intervals. Right "
        "of 1 emblib is faster.",
        "Right of 1 emblib is faster; sizes are those of each line",
        [panel] if lines else [],
    )


def _scaling_figure(run: Run, rows: pd.DataFrame, predicted: pd.DataFrame) -> Figure:
    """Draw the step over ranks per kind of scaling, measured and predicted."""
    emblib_rows = rows[rows["contender"].str.startswith(SHARDED)]
    panels = []
    for scaling in Scaling:
        scaled = emblib_rows[
            (emblib_rows["scaling"] == scaling.value) | (emblib_rows["world_size"] == 1)
        ]
        if scaled["world_size"].nunique() < 2 or not (scaled["scaling"] == scaling.value).any():
            continue
        first = scaled["section"].iloc[0]
        predicted_rows = select(predicted, beyond=True, scaling=scaling.value, section=first)
        title = f"{scaling.value.capitalize()} scaling"
        panels.append(
            Panel(
                title, _step_curves(scaled[scaled["section"] == first], predicted_rows), 1.1 * WIDTH
            )
        )
    return Figure(
        "scaling",
        "Time of a step over ranks",
        "Solid: measured. Dashed, hollow: predicted by the cost model, not measured. Lower is "
        "better; ideal are a level line with weak scaling, the dotted line with strong scaling.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _step_curves(rows: pd.DataFrame, predicted_rows: pd.DataFrame) -> Drawing:
    """Return a curve per sharding type of the step over ranks, measured and predicted."""
    lines = []
    for kind, group in rows.sort_values("world_size").groupby("type", sort=False):
        shade, mark = colour(str(kind)), marker(str(kind))
        lines.append(Curve(group["world_size"], 1e3 * group["median_s"], shade, str(kind), mark))
        if len(predicted_rows):  # from the last measured point on, what is only predicted
            last = group.iloc[-1]
            predictions = predicted_rows[predicted_rows["type"] == kind].sort_values("world_size")
            worlds = [last["world_size"], *predictions["world_size"]]
            step_ms = [1e3 * last["median_s"], *(1e3 * predictions["predicted_s"])]
            lines.append(Curve(worlds, step_ms, shade, line=DASHED, width=1.2))
            lines.append(Curve(worlds[1:], step_ms[1:], shade, marker=mark, line="", hollow=True))
    if (rows["scaling"] == Scaling.strong.value).any():
        worlds = sorted(rows["world_size"].unique())
        start = 1e3 * rows[rows["world_size"] == worlds[0]]["median_s"].min()
        ideal = [start / world for world in worlds]
        lines.append(Curve(worlds, ideal, label="ideal", line=DOTTED, width=1.0))
    if len(predicted_rows):
        lines.append(Curve([], [], INK, "predicted", "o", DASHED, 1.2, hollow=True))
    values = sorted(
        {*rows["world_size"], *(predicted_rows["world_size"] if len(predicted_rows) else ())}
    )
    return curves(lines, Scale("ranks", log=2, ticks=values), Scale("ms per step", log=10))


def _parts_figure(run: Run, rows: pd.DataFrame) -> Figure:
    """Draw compute and communication of a step per world, in the first section that has parts."""
    with_parts = rows[rows["compute_s"].notna()]
    if len(with_parts):
        with_parts = select(with_parts, section=with_parts["section"].iloc[0])
    panels = []
    for world in sorted(with_parts["world_size"].unique()):
        in_world = with_parts[with_parts["world_size"] == world]
        in_world = in_world[in_world["scaling"] == in_world["scaling"].iloc[0]]
        lines = [
            Row(
                str(row["type"]),
                1e3 * row["compute_s"],
                colour(str(row["type"])),
                bar=True,
                rest=1e3 * row["communication_s"],
            )
            for _, row in in_world.iterrows()
        ]
        drawing = charts.row_chart(lines, Scale("ms per step (hatched: all but lookup and update)"))
        panels.append(
            Panel(text.count(world, "rank"), drawing, height=1.4 + BAR_HEIGHT * len(in_world))
        )
    return Figure(
        "compute_and_communication",
        "Parts of a step",
        "Filled: lookup and update of the rows that a rank stores. Hatched: the rest of the step, "
        "including communication and waiting. Shorter is better.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _prediction_figure(run: Run, predicted: pd.DataFrame) -> Figure:
    """Draw predicted against measured steps; no panel without measured ones."""
    agreement = sharding.prediction_agreement(predicted)
    rank_note = f" Rank correlation {text.digits(agreement.rank_correlation, 2)}."
    rank_note = "" if math.isnan(agreement.rank_correlation) else rank_note
    panels = []
    if agreement.points:
        measured_rows, lines = predicted[~predicted["beyond"]], []
        smallest = measured_rows["world_size"].min()
        for (kind, world), group in measured_rows.groupby(["type", "world_size"], sort=False):
            lines.append(
                Curve(
                    1e3 * group["median_s"],
                    1e3 * group["predicted_s"],
                    colour(str(kind)),
                    str(kind) if world == smallest else "",
                    marker(str(kind)),
                    line="",
                    opacity=0.35 + 0.65 / float(str(world)),
                )
            )
        all_ms = 1e3 * pd.concat([measured_rows["median_s"], measured_rows["predicted_s"]])
        ends = [all_ms.min(), all_ms.max()]
        lines.append(Curve(ends, ends, line=DASHED, width=1.0))
        x_scale, y_scale = (Scale(f"{w} ms per step", log=10) for w in ("measured", "predicted"))
        panels.append(
            Panel("Predicted against measured", curves(lines, x_scale, y_scale), 1.3 * WIDTH)
        )
    return Figure(
        "predicted",
        "Predicted and measured steps",
        f"{agreement.points} points; the prediction of a point on the line is exact.{rank_note}",
        run.sizes(run.sections()[0]),
        panels,
    )
