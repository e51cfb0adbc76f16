"""The report of sharded collections: steps against TorchRec's, by ranks, and predicted ones.

`rows` are steps (`kinds.sharding.step_frame`): one per cell, arm and mode, over all processes.
`predicted_steps` has the predictions of the planner's cost model (`kinds.sharding.predictions`).
These two functions list the columns.
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
    axis_columns,
    bytes_value,
    count_value,
    factor_value,
    ratio_value,
    time_value,
)

NOTES = (
    "A sample is the time of the slowest rank. Compute is the lookup and the update of the rows "
    "that a rank stores, for ids that it has received, on all ranks at once. Communication is the "
    "rest of the step: routing, sending both ways, waiting for other ranks, combining. Efficiency "
    "compares a step of W ranks with a step of one rank: with weak scaling it is the step of one "
    "rank ÷ the step of W ranks, with strong scaling that ratio ÷ W.",
    "Ratios are TorchRec's time ÷ that of emblib's counterpart, paired in each round: 2× means "
    "that emblib's step takes half the time. Both work on the same batches in the same processes; "
    "a rank's gradients are divided by the number of ranks. On CPUs both exchange over gloo.",
    "Every contender's first output and first update are checked against plain PyTorch, on all "
    "ranks together, before anything is timed.",
    "Predictions are those of the planner's cost model, from constants that the same ranks "
    "measured before anything else. Steps of more ranks than were measured were not run. Their "
    "predictions assume that every rank has a core, and that every link is like those between the "
    "measured ranks. They were not checked on the network between hosts.",
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
    """Compare with TorchRec; state the subject's scaling and the agreement of predictions.

    Without any of these, name the fastest step.
    """
    rows = measured_steps(run)
    if not len(rows):
        return ["No answer: no contender has a result."]
    sentences = [
        *_torchrec_sentences(run, rows),
        *_scaling_sentences(run, rows),
        *_prediction_sentence(run),
    ]
    return sentences or [_fastest_sentence(rows)]


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
    step_s = {(row["cell"], row["arm"]): row["median_s"] for _, row in rows.iterrows()}
    ratios = [
        f"{row['type']} {text.ratio(row)} "
        f"({text.seconds(row['median_s'])} against "
        f"{text.seconds(step_s[row['cell'], sharding.counterpart(row['arm'])])})"
        for _, row in headline_rows.iterrows()
    ]
    title = _cell_title(run, str(headline_rows["cell"].iloc[0]))
    sentences = [
        f"On this machine a step of TorchRec takes, as a multiple of emblib's on {title}: "
        f"{', '.join(ratios)}."
    ]
    if compared_rows["cell"].nunique() > 1:
        lowest = compared_rows.loc[compared_rows["ratio"].idxmin()]
        highest = compared_rows.loc[compared_rows["ratio"].idxmax()]
        sentences.append(
            f"Over all cells the multiple runs from {text.times(lowest['ratio'])} "
            f"({lowest['label']} on {_cell_title(run, lowest['cell'])}) to "
            f"{text.times(highest['ratio'])} ({highest['label']} on "
            f"{_cell_title(run, highest['cell'])})."
        )
    return sentences


def _scaling_sentences(run: Run, rows: pd.DataFrame) -> list[str]:
    """Describe the fastest sharding type and the subject, for both kinds of scaling.

    The sentences are about the largest world in which every rank has a core, because steps of ranks
    that share cores measure nothing. [] without a world of several ranks.
    """
    emblib_rows = rows[rows["contender"].str.startswith(SHARDED) & rows["base_s"].notna()]
    sentences: list[str] = []
    core_sentence, cores = _core_sentence(run, emblib_rows), _usable_cores(run)
    emblib_rows = emblib_rows[emblib_rows["world_size"] <= cores] if cores else emblib_rows
    max_world = emblib_rows["world_size"].max() if len(emblib_rows) else 1
    if not max_world > 1 or not emblib_rows["compute_s"].notna().any():
        return core_sentence
    for scaling in Scaling:
        largest_rows = select(emblib_rows, world_size=max_world, scaling=scaling.value)
        if not len(largest_rows):
            continue
        headline_rows = select(largest_rows, section=run.headline)
        largest_rows = headline_rows if len(headline_rows) else largest_rows
        largest_rows = select(largest_rows, cell=largest_rows["cell"].iloc[0])
        fastest = largest_rows.loc[largest_rows["median_s"].idxmin()]
        subject_rows = select(largest_rows, contender=run.subject.contender)
        described_rows = [fastest]
        if fastest["contender"] != run.subject.contender:
            described_rows += [row for _, row in subject_rows.iterrows()]
        steps = text.listed([_describe_step(row) for row in described_rows])
        sentences.append(f"{scaling.value.capitalize()} scaling to {max_world:.0f} ranks: {steps}.")
    return [*sentences, *core_sentence]


def _describe_step(row: pd.Series) -> str:
    """State the time of a step, its share of communication, and its efficiency if known."""
    communication = text.digits(100 * row["communication_s"] / row["median_s"], 2)
    efficiency_clause = ""
    if not text.is_missing(row["efficiency"]):
        efficiency_clause = f", an efficiency of {text.digits(100 * row['efficiency'], 2)} %"
    return (
        f"{row['type']} takes {text.seconds(row['median_s'])} per step, "
        f"{communication} % of it communication{efficiency_clause}"
    )


def _core_sentence(run: Run, rows: pd.DataFrame) -> list[str]:
    """Name the world sizes whose ranks share cores: their times mean nothing. [] if none does."""
    cores = _usable_cores(run)
    worlds = sorted({int(ranks) for ranks in rows["world_size"] if cores and ranks > cores})
    if not cores or not worlds:
        return []
    sizes = " or ".join(map(str, worlds))
    return [
        f"Where {sizes} ranks share {text.count(cores, 'core')}, a run only shows that results are "
        "correct: its times mean nothing."
    ]


def _prediction_sentence(run: Run) -> list[str]:
    """State how well the cost model predicted the measured steps; [] below three steps."""
    rows = sharding.predictions(run.records)
    agreement = sharding.prediction_agreement(rows)
    if math.isnan(agreement.rank_correlation):
        return []
    return [
        f"The cost model's predictions of the {agreement.points} measured steps have a rank "
        f"correlation of {text.digits(agreement.rank_correlation, 2)} with them; their median "
        f"error is a factor of {text.digits(agreement.median_factor)}."
    ]


def _fastest_sentence(rows: pd.DataFrame) -> str:
    row = rows.loc[rows["median_s"].idxmin()]
    return f"The fastest step is that of {row['label']}: {text.seconds(row['median_s'])}."


def _cell_title(run: Run, cell: str) -> str:
    return next(str(record["title"]) for record in run.records if record["cell"] == cell)


def tables(run: Run) -> Sequence[TitledTable]:
    """Return one table per cell, with a row per arm and mode; then that of the predictions."""
    rows, all_rows = measured_steps(run), run.frame("sharding")
    titled_tables = []
    for section in run.sections():
        section_rows = all_rows[all_rows["section"] == section]
        for cell in dict.fromkeys(section_rows["cell"]):
            title = _cell_title(run, str(cell))
            case = run.config.cases.get(section)
            note = f" {case.note}" if case is not None and case.note else ""
            paragraph = f"{_describe_sizes(run, str(cell))}.{note}"
            table = _step_table(all_rows[all_rows["cell"] == cell], rows[rows["cell"] == cell])
            titled_tables.append(TitledTable(text.capitalise(title), paragraph, table))
    predicted_steps = sharding.predictions(run.records)
    if len(predicted_steps):
        paragraph = "Of worlds that were not measured these are predictions, and nothing else."
        table = _prediction_table(predicted_steps)
        titled_tables.append(TitledTable("Predicted steps", paragraph, table))
    return titled_tables


def _describe_sizes(run: Run, cell: str) -> str:
    """Describe a cell's workload in one line, per rank; a case on one rank as other kinds do."""
    record = next(record for record in run.records if record["cell"] == cell)
    if record["section"] != SWEEP and record["world_size"] == 1:
        return run.sizes(record["section"])
    params = record["params"]
    return (
        f"{record['features']} tables, {record['rows']:,} rows, D={params['D']}, "
        f"B={params['B']:,} per rank, {record['lookups']:,} lookups per rank and batch"
    )


def _step_table(cell_rows: pd.DataFrame, steps: pd.DataFrame) -> Table:
    """Return a row per contender and mode: its step, and the parts of it that were timed.

    Args:
        cell_rows: results of the cell, a row per arm, mode and phase.
        steps: steps of the cell that have a result, a row per arm and mode.
    """
    parts = [name for name in sharding.PARTS if (cell_rows["phase"] == name).any()]
    has_modes = cell_rows["mode"].nunique() > 1
    rows = []
    for (arm, mode), group in cell_rows.groupby(["arm", "mode"], sort=False):
        arm_steps = steps[(steps["arm"] == arm) & (steps["mode"] == mode)]
        step = dict(arm_steps.iloc[0]) if len(arm_steps) else {}
        name = f"{group['label'].iloc[0]}{f', {mode}' * has_modes}"
        status = "ok" if step else str(group["status"].iloc[0])
        time_by_phase = {row["phase"]: row["median_s"] for _, row in group.iterrows()}
        rows.append({**step, "name": name, "status": status, "times": time_by_phase})
    columns: dict[str, Column] = {
        "contender": lambda row: row["name"],
        "forward": lambda row: time_value(row["times"].get("forward")),
        "step": lambda row: time_value(row["median_s"]),
    }
    if len(steps) and steps["ratio"].notna().any():
        columns["step ÷ emblib's [95\u00a0%]"] = ratio_value
    columns["efficiency"] = lambda row: Value.of(
        row["efficiency"], lambda value: f"{100 * value:.0f} %"
    )
    if parts:
        columns["compute"] = lambda row: time_value(row["compute_s"])
        columns["communication"] = lambda row: time_value(row["communication_s"])
    for part in parts:
        columns[sharding.PARTS[part]] = functools.partial(_part_value, part)
    columns["tables"] = lambda row: bytes_value(row["weights_bytes"] or None)
    columns["processes"] = lambda row: count_value(row["processes"])
    return Table.of(rows, columns, num_label_columns=1)


def _part_value(part: str, row: Mapping[str, Any]) -> Value:
    """Return an entry for the time of a part; `row` is a row of `_step_table`."""
    return time_value(row["times"].get(part))


def _prediction_table(rows: pd.DataFrame) -> Table:
    """Return a row per predicted step, with the measured one if there is one."""
    rows = rows.sort_values(["section", "contender", "scaling", "world_size"])
    return Table.of(
        rows,
        {
            "contender": lambda row: str(row["label"]),
            **axis_columns(rows),
            "batch per rank": lambda row: count_value(row["batch"]),
            "ranks": lambda row: count_value(row["world_size"]),
            "scaling": lambda row: str(row["scaling"]),
            "predicted step": lambda row: time_value(row["predicted_s"]),
            "measured step": lambda row: (
                "not measured" if row["beyond"] else time_value(row["median_s"])
            ),
            "predicted ÷ measured": lambda row: factor_value(row["predicted_s"] / row["median_s"]),
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


def colour_of_type(sharding_type: str) -> str:
    """Return the colour of a sharding type; an unknown type always has the same one."""
    names = list(COLOURS)
    fallback = names[zlib.crc32(sharding_type.encode()) % len(names)]
    return COLOURS[TYPE_STYLES.get(sharding_type, (fallback, ""))[0]]


def marker_of_type(sharding_type: str) -> str:
    """Return the marker of a sharding type; a hexagon for an unknown type."""
    return TYPE_STYLES.get(sharding_type, ("", "h"))[1]


def figures(run: Run) -> list[Figure]:
    """Return the figures that the run has the data for."""
    rows = measured_steps(run)
    if not len(rows):
        return []
    predicted_steps = sharding.predictions(run.records)
    candidates = [
        _torchrec_figure(run, rows),
        _scaling_figure(run, rows, predicted_steps),
        _parts_figure(run, rows),
        _prediction_figure(run, predicted_steps),
    ]
    return [figure for figure in candidates if figure.panels]


def _torchrec_figure(run: Run, rows: pd.DataFrame) -> Figure:
    """Draw TorchRec's step ÷ emblib's for every cell and sharding type."""
    compared_rows = sharding.torchrec_rows(rows).sort_values(
        ["section", "world_size"], kind="stable"
    )
    titles = {str(record["cell"]): str(record["title"]) for record in run.records}
    lines = [
        Row(
            f"{titles[str(row['cell'])]}: {row['type']}",
            row["ratio"],
            colour_of_type(str(row["type"])),
            row["ratio_lo"],
            row["ratio_hi"],
            annotation=text.times(row["ratio"]),
        )
        for _, row in compared_rows.iterrows()
    ]
    title = "TorchRec's step ÷ emblib's"
    scale = Scale(title, log=10, reach=(0.8, 2.5))
    equality_mark = [Mark(1.0, line=DASHED, is_vertical=True)]
    drawing = charts.row_chart(lines, scale, marks=equality_mark)
    panel = Panel(title, drawing, 1.8 * WIDTH, 1.2 + BAR_HEIGHT * len(lines))
    return Figure(
        "against_torchrec",
        "Speed-up of a step over TorchRec",
        "Points: TorchRec's step time ÷ emblib's, paired; lines: 95 % confidence intervals. Right "
        "of 1 emblib is faster.",
        "Sizes are those of each line",
        [panel] if lines else [],
    )


def _scaling_figure(run: Run, rows: pd.DataFrame, predicted_steps: pd.DataFrame) -> Figure:
    """Draw the step over ranks per kind of scaling, measured and predicted."""
    emblib_rows = rows[rows["contender"].str.startswith(SHARDED)]
    panels = []
    for scaling in Scaling:
        scaling_rows = emblib_rows[
            (emblib_rows["scaling"] == scaling.value) | (emblib_rows["world_size"] == 1)
        ]
        has_scaling = (scaling_rows["scaling"] == scaling.value).any()
        if scaling_rows["world_size"].nunique() < 2 or not has_scaling:
            continue
        section = scaling_rows["section"].iloc[0]  # a panel shows one section
        predicted_rows = select(
            predicted_steps, beyond=True, scaling=scaling.value, section=section
        )
        drawing = _draw_scaling(select(scaling_rows, section=section), predicted_rows)
        panels.append(Panel(f"{scaling.value.capitalize()} scaling", drawing, 1.4 * WIDTH))
    return Figure(
        "scaling",
        "Time of a step over ranks",
        "Solid: measured. Dashed, hollow: predicted by the cost model, not measured. Lower is "
        "better; ideal are a level line with weak scaling, the dotted line with strong scaling.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _draw_scaling(rows: pd.DataFrame, predicted_rows: pd.DataFrame) -> Drawing:
    """Draw the step over ranks, a curve per sharding type, measured and predicted.

    `rows` are steps of one scaling and section, and of one rank; `predicted_rows` are the rows of
    `kinds.sharding.predictions` beyond the measured worlds.
    """
    lines = []
    for sharding_type, group in rows.sort_values("world_size").groupby("type", sort=False):
        name = str(sharding_type)
        colour, marker = colour_of_type(name), marker_of_type(name)
        lines.append(Curve(group["world_size"], 1e3 * group["median_s"], colour, name, marker))
        if len(predicted_rows):  # a dashed line from the last measured point
            last_row = group.iloc[-1]
            predictions = predicted_rows[predicted_rows["type"] == name].sort_values("world_size")
            worlds = [last_row["world_size"], *predictions["world_size"]]
            step_ms = [1e3 * last_row["median_s"], *(1e3 * predictions["predicted_s"])]
            lines.append(Curve(worlds, step_ms, colour, line=DASHED, width=1.2))
            lines.append(
                Curve(worlds[1:], step_ms[1:], colour, marker=marker, line="", is_hollow=True)
            )
    if (rows["scaling"] == Scaling.strong.value).any():
        worlds = sorted(rows["world_size"].unique())
        first_ms = 1e3 * rows[rows["world_size"] == worlds[0]]["median_s"].min()
        ideal_ms = [first_ms / world for world in worlds]
        lines.append(Curve(worlds, ideal_ms, label="ideal", line=DOTTED, width=1.0))
    if len(predicted_rows):  # the entry of the legend
        lines.append(Curve([], [], INK, "predicted", "o", DASHED, 1.2, is_hollow=True))
    predicted_worlds = predicted_rows["world_size"] if len(predicted_rows) else ()
    ticks = sorted({*rows["world_size"], *predicted_worlds})
    x_scale = Scale("ranks", log=2, ticks=ticks)
    return curves(lines, x_scale, Scale("ms per step", log=10), name_position="outside")


def _parts_figure(run: Run, rows: pd.DataFrame) -> Figure:
    """Draw compute and communication of a step per world, in the first section that has parts."""
    split_rows = rows[rows["compute_s"].notna()]
    if len(split_rows):
        split_rows = select(split_rows, section=split_rows["section"].iloc[0])
    panels = []
    for world in sorted(split_rows["world_size"].unique()):
        world_rows = split_rows[split_rows["world_size"] == world]
        world_rows = world_rows[world_rows["scaling"] == world_rows["scaling"].iloc[0]]
        lines = [
            Row(
                str(row["type"]),
                1e3 * row["compute_s"],
                colour_of_type(str(row["type"])),
                is_bar=True,
                rest_length=1e3 * row["communication_s"],
            )
            for _, row in world_rows.iterrows()
        ]
        drawing = charts.row_chart(lines, Scale("ms per step"))
        panels.append(
            Panel(text.count(world, "rank"), drawing, height=1.4 + BAR_HEIGHT * len(world_rows))
        )
    return Figure(
        "compute_and_communication",
        "Parts of a step",
        "Filled: lookup and update of the rows that a rank stores. Hatched: the rest of the step, "
        "including communication and waiting. Shorter is better.",
        run.sizes(run.sections()[0]),
        panels,
    )


def _prediction_figure(run: Run, predicted_steps: pd.DataFrame) -> Figure:
    """Draw predicted against measured steps; no panel without measured ones."""
    agreement = sharding.prediction_agreement(predicted_steps)
    rank_note = f" Rank correlation {text.digits(agreement.rank_correlation, 2)}."
    rank_note = "" if math.isnan(agreement.rank_correlation) else rank_note
    panels = []
    if agreement.points:
        measured_rows, lines = predicted_steps[~predicted_steps["beyond"]], []
        min_world = measured_rows["world_size"].min()
        for (sharding_type, world), group in measured_rows.groupby(
            ["type", "world_size"], sort=False
        ):
            lines.append(
                Curve(
                    1e3 * group["median_s"],
                    1e3 * group["predicted_s"],
                    colour_of_type(str(sharding_type)),
                    str(sharding_type) if world == min_world else "",
                    marker_of_type(str(sharding_type)),
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
