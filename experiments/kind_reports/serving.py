"""The report of read-only tables under load: latency against throughput, memory, cold start.

A row of "latencies" is an arm under one load from a number of clients. A row of "cold_starts" is an
arm's starts from memory, or from disk. The functions of these names in `kinds.serving` list the
columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.config.sweep import label_of
from experiments.kinds.serving import MIN_TAIL
from experiments.report import text
from experiments.report.charts import DASHED, DOTTED, LineStyle, Scale, curves
from experiments.report.data import Run, select
from experiments.report.figures import contender_curve
from experiments.report.style import HEIGHT, WIDTH, Figure, Panel
from experiments.report.tables import (
    Column,
    Table,
    TitledTable,
    bytes_value,
    count_value,
    number_value,
    ratio_value,
    time_value,
    varied_axes,
)
from experiments.timing.latencies import CLOSED

NOTES = (
    "A request is one batch, looked up by one of the client threads of one process. Its ids are "
    "in memory; network and the rest of a model are not measured. Contenders take turns, a "
    "block of requests each.",
    "'Saturated': each client sends a request as soon as its last one was answered (closed loop). "
    "That shows how many requests can be answered. It hides queues, because a slow answer delays "
    "the requests behind it instead of letting them wait (coordinated omission).",
    "'At x %': requests arrive at random times (a Poisson process), at x % of the rate that the "
    "same contender answered when saturated in the same round, and the latency of a request begins "
    "with its arrival, whether or not a client was free.",
    f"Latencies are counted in buckets of 1 % over all processes; a p99 needs {MIN_TAIL} requests. "
    "All clients share Python's interpreter lock, as in any server in Python.",
    "'time ÷' compares seconds per request when saturated, paired within rounds: the median over "
    "the rounds of a process, then the mean over processes (of logarithms) and its 95 % interval.",
    "A cold start is the time from opening the file to the first answer, libraries loaded: "
    "emblib.open_frozen, which reads all checksums once and maps the file, and torch.load for "
    "others. 'From disk' is after the system was asked to drop the file from memory.",
)
# Colours differ by library, and lines by format, with which the name of a contender ends.
STYLE_OF_FORMAT: Mapping[str, Mapping[str, LineStyle]] = {
    "fp32": {"line": DOTTED, "marker": "o"},
    "int8": {"line": "-", "marker": "s"},
    "int4": {"line": DASHED, "marker": "^"},
}


def answer(run: Run) -> list[str]:
    """Compare the subject with the baseline: throughput, latency, memory and cold start."""
    rows = select(run.frame("latencies"), status="ok", cell=run.headline_cell())
    if len(rows):
        rows = select(rows, clients=rows["clients"].max())
    subject_rows = select(rows, arm=run.subject.key)
    if not len(subject_rows):
        return [f"No answer: {run.subject.label} has no result."]
    saturated_row = subject_rows[subject_rows["load"] == CLOSED].iloc[0]
    clients = text.count(saturated_row["clients"], "client")
    sentences = [
        f"With {clients} and {text.count(saturated_row['B'], 'sample')} per request, "
        f"{saturated_row['label']} answers "
        f"{text.digits(saturated_row['bags_per_s'])} samples per second"
        f"{_baseline_clause(run, saturated_row)}."
    ]
    loaded_rows = subject_rows[subject_rows["load"] != CLOSED]
    latencies = [
        f"{text.seconds(row['p99_s'])} at {text.percent(row['load'], 2)}"
        for _, row in loaded_rows.iterrows()
        if not text.is_missing(row["p99_s"])
    ]
    if latencies:
        sentences.append(
            f"Of that rate, its p99 from arrival to answer is {text.listed(latencies)}."
        )
    return [*sentences, *_memory_sentence(run)]


def _baseline_clause(run: Run, row: pd.Series) -> str:
    """Return a clause on the time of a request ÷ the baseline's; "" without a ratio."""
    if text.is_missing(row["ratio"]) or row["arm"] == run.baseline.key:
        return ""
    return f"; a request takes {text.ratio(row)} the time of {run.baseline.label}"


def _memory_sentence(run: Run) -> list[str]:
    """Return a sentence on memory and cold starts of the subject and the baseline; [] without."""
    starts = run.frame("cold_starts")
    parts = []
    for arm in (run.subject.key, run.baseline.key):
        rows = select(starts, arm=arm)
        if len(rows):
            first = rows.iloc[0]
            rows = select(rows, bytes=first["bytes"])  # of the base point
            times = text.listed(
                [
                    f"{text.seconds(row['median_s'])} from {row['pages']}"
                    for _, row in rows.iterrows()
                ]
            )
            parts.append(
                f"{first['label']}: {text.size(first['bytes'])}, first answer after {times}"
            )
    return [f"Memory and cold start: {'; '.join(parts)}."] if parts else []


def tables(run: Run) -> Sequence[TitledTable]:
    """Return a table of latencies per cell, then one of memory and cold starts."""
    rows, titled_tables = run.frame("latencies"), []
    for cell in dict.fromkeys(rows["cell"]) if len(rows) else ():
        cell_rows = rows[rows["cell"] == cell]
        lines = list(_lines(cell_rows))
        loads = sorted({load for line in lines for load in line["p99"]})
        title = _title("Requests of {}", rows, cell_rows)
        table = _latency_table(run, lines, loads)
        titled_tables.append(TitledTable(title, "Latencies and rates of requests.", table))
    starts = run.frame("cold_starts")
    if len(starts):
        columns: dict[str, Column] = {
            "tables": lambda row: str(row["label"]),
            "memory": lambda row: bytes_value(row["bytes"]),
            "file": lambda row: bytes_value(row["file_bytes"]),
            "first answer from": lambda row: str(row["pages"]),
            "after": lambda row: time_value(row["median_s"]),
            "starts": lambda row: count_value(row["samples"]),
        }
        table = Table.of(starts, columns)
        titled_tables.append(TitledTable("Memory and cold start", "", table))
    return titled_tables


def _title(form: str, rows: pd.DataFrame, cell_rows: pd.DataFrame) -> str:
    """Return `form` with the samples per request of a cell, and its values of other varied axes."""
    first, other_axes = cell_rows.iloc[0], [axis for axis in varied_axes(rows) if axis != "B"]
    title = form.format(text.count(first["B"], "sample"))
    return ", ".join(filter(None, [title, text.point(first, other_axes)]))


def _lines(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a line per arm and number of clients: its saturated row, and "p99" by other loads.

    A row without a result is a line of its own, whose "p99" is {}.
    """
    for _, row in rows.iterrows():
        if row["status"] != "ok":
            yield {**row, "p99": {}}
        elif row["load"] == CLOSED:
            is_same_line = (rows["arm"] == row["arm"]) & (rows["clients"] == row["clients"])
            loaded_rows = rows[is_same_line & (rows["load"] != CLOSED)]
            p99_by_load = dict(zip(loaded_rows["load"], loaded_rows["p99_s"], strict=True))
            yield {**row, "p99": p99_by_load}


def _latency_table(run: Run, lines: Sequence[Mapping[str, Any]], loads: Sequence[float]) -> Table:
    """Return the table of `_lines`, with a column of the p99 at each load."""
    columns: dict[str, Column] = {
        "tables": lambda row: str(row["label"]),
        "clients": lambda row: count_value(row["clients"]),
        "requests/s": lambda row: count_value(row["requests_per_s"]),
        "thousand samples/s": lambda row: number_value(row["bags_per_s"] / 1e3),
        f"time ÷ {run.baseline.label}": lambda row: ratio_value(
            row, is_baseline=row["arm"] == run.baseline.key
        ),
        "p50, saturated": lambda row: time_value(row["p50_s"]),
        "p99, saturated": lambda row: time_value(row["p99_s"]),
    }
    for load in loads:
        columns[f"p99 at {text.percent(load, 2)}"] = _p99_column(load)
    columns["requests"] = lambda row: count_value(row["requests"])
    return Table.of(lines, columns, num_label_columns=1)


def _p99_column(load: float) -> Column:
    return lambda line: time_value(line["p99"].get(load))


def figures(run: Run) -> list[Figure]:
    """Return the figure of p99 by throughput, a panel per request size, a curve per contender."""
    rows = select(run.frame("latencies"), status="ok")
    rows = rows[(rows["load"] != CLOSED) & rows["p99_s"].notna()] if len(rows) else rows
    if not len(rows):
        return []
    rows = rows[rows["clients"] == rows["clients"].max()]
    panels = []
    for _, cell_rows in rows.sort_values("B", kind="stable").groupby("cell", sort=False):
        lines = [
            contender_curve(
                str(name),
                group["bags_per_s"] / 1e3,
                group["p99_s"],
                label=label_of(str(name)),
                **STYLE_OF_FORMAT.get(str(name).rpartition("_")[2], {}),
            )
            for name, group in cell_rows.groupby("contender", sort=False)
        ]
        x_scale = Scale("thousand samples answered per second", log=10)
        y_scale = Scale("p99, from arrival to answer", log=10, format_tick=text.seconds)
        drawing = curves(lines, x_scale, y_scale, name_position="below", columns=3)
        title = _title("{} per request", rows, cell_rows)
        panels.append(Panel(title, drawing, 1.3 * WIDTH, 1.2 * HEIGHT))
    clients = text.count(rows["clients"].max(), "client")
    loads = text.listed([text.percent(load, 2) for load in sorted(rows["load"].unique())])
    return [
        Figure(
            "serving",
            "Latency that 99 % of requests stay below, against throughput",
            f"{clients.capitalize()}. A colour is a library, a line and its marker a format; "
            f"points are {loads} of the rate answered when saturated. Right and down is better.",
            run.sizes(run.sections()[0]),
            panels,
        )
    ]
