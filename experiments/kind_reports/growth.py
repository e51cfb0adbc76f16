"""The report of tables that grow: their longest pause and their memory.

A row is a hash table, over all processes. `kinds.keys.growth_frame` lists the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.config.schema import GROWTH_PHASE
from experiments.report import text
from experiments.report.charts import Scale, curves
from experiments.report.data import Run, select
from experiments.report.figures import contender_curve
from experiments.report.style import WIDTH, Figure, Panel
from experiments.report.tables import (
    Column,
    Table,
    TitledTable,
    axis_columns,
    bytes_value,
    count_value,
    factor_value,
    number_value,
    time_value,
)
from experiments.results import metrics

NOTES = (
    "Every table gets the same new keys; the tables take turns, call by call. Nothing is warmed "
    "up, because a table grows only once. The longest call of a process is the pause that a caller "
    "notices; the median over processes is shown.",
    "Memory is measured in a separate pass, one table at a time: the peak while the table grows, "
    "and the memory in use at the end.",
    "After a table has grown, every key is looked up: each must be present, in a slot of its own, "
    "with its value. Otherwise the table is listed as wrong.",
)


def answer(run: Run) -> list[str]:
    """State the median and longest call of the subject, then of the other tables of its cell."""
    rows = select(run.frame("growth"), status="ok")
    subject_rows = select(rows, contender=run.subject.contender)
    if not len(subject_rows):
        return [f"No answer: {run.subject.label} has no result."]
    subject = subject_rows.iloc[0]
    sentences = [
        f"While growing to {subject['keys_there']:,} keys, {subject['label']} took "
        f"{text.seconds(subject['median_s'])} (median) per call of {subject['lookups']:,} new "
        f"keys and {_format_pause(subject)} for the longest call{_format_memory(subject)}."
    ]
    other_rows = rows[(rows["cell"] == subject["cell"]) & (rows["arm"] != subject["arm"])]
    for _, row in other_rows.iterrows():
        sentences.append(
            f"{row['label']}: {text.seconds(row['median_s'])}, longest {_format_pause(row)}"
            f"{_format_memory(row)}."
        )
    return sentences


def _format_pause(row: pd.Series) -> str:
    """Return the time of the longest call, and that time ÷ the median of calls."""
    return f"{text.seconds(row['longest_s'])} ({text.times(row['longest_s'] / row['median_s'])})"


def _format_memory(row: pd.Series) -> str:
    """Return a clause on the peak of memory ÷ the memory at the end; "" if unknown."""
    ratio = row["peak_over_kept"]
    if text.is_missing(ratio):
        return ""
    return f", with a peak of {text.times(ratio)} the memory it ends with"


def tables(run: Run) -> Sequence[TitledTable]:
    """Return one table with a row per hash table; [] without any."""
    rows = run.frame("growth")
    columns_of_axes = axis_columns(rows)
    columns: dict[str, Column] = {
        "table": lambda row: str(row["label"]),
        **columns_of_axes,
        "keys": lambda row: count_value(row["keys_there"]),
        "per call": lambda row: time_value(row["median_s"]),
        "99 %": lambda row: time_value(row["p99_s"]),
        "longest": lambda row: time_value(row["longest_s"]),
        "longest ÷ median": lambda row: factor_value(row["longest_s"] / row["median_s"]),
        "total": lambda row: time_value(row["total_s"]),
        "million keys/s": lambda row: number_value(row["keys_there"] / row["total_s"] / 1e6),
        "peak memory": lambda row: bytes_value(row["peak_bytes"]),
        "final memory": lambda row: bytes_value(row["kept_bytes"]),
        "peak ÷ final": lambda row: factor_value(row["peak_over_kept"]),
        "processes": lambda row: count_value(row["processes"]),
    }
    table = Table.of(rows, columns, num_label_columns=1 + len(columns_of_axes))
    sections = run.sections()
    paragraph = f"{run.sizes(sections[0])}." if sections else ""
    return [TitledTable("Tables that grow", paragraph, table)] if table.rows else []


def figures(run: Run) -> list[Figure]:
    """Return the figure of the calls of the headline's tables, from the first process of each."""
    records = [
        record
        for record in run.records
        if record["cell"] == run.headline_cell()
        and record["status"] == "ok"
        and not metrics.replicate_of(record)
    ]
    if not records:
        return []
    lines = []
    for record in records:
        call_s = metrics.seconds(record, GROWTH_PHASE)
        million_keys = [record["lookups"] * (n + 1) / 1e6 for n in range(len(call_s))]
        name, label = str(record["contender"]), str(record["label"])
        lines.append(contender_curve(name, million_keys, call_s, marker="", width=1.0, label=label))
    y_scale = Scale("time per call", log=10, format_tick=text.seconds)
    return [
        Figure(
            "growth",
            "Time of each call while a table fills",
            "One process. A table that moves all its rows at once shows spikes. Lower is better.",
            run.sizes(str(records[0]["section"])),
            [
                Panel(
                    "Time per call",
                    curves(lines, Scale("million keys in the table"), y_scale),
                    1.8 * WIDTH,
                )
            ],
        )
    ]
