"""The report of read-only tables under load: latency against throughput, memory, cold start.

A row of "latencies" is an arm under one load from a number of clients. A row of "cold_starts" has
the starts of an arm from memory or from disk. The functions of these names in `kinds.serving` list
the columns.
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
)
from experiments.timing.latencies import CLOSED

NOTES = (
    "A request is one batch, looked up by one of the client threads of one process. The ids are "
    "there already; network and the rest of a model are not measured. Contenders take turns, a "
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
# Colours tell libraries apart, lines the formats, with which names of contenders end.
LINE_OF_FORMAT: Mapping[str, LineStyle] = {"fp32": DOTTED, "int8": "-", "int4": DASHED}


def answer(run: Run) -> list[str]:
    """Compare the subject with the baseline: throughput, latency, memory and cold start."""
    rows = select(run.frame("latencies"), status="ok", cell=run.headline_cell())
    if len(rows):
        rows = select(rows, clients=rows["clients"].max())
    subject = select(rows, arm=run.subject.key)
    if not len(subject):
        return [f"No answer: {run.subject.label} has no result."]
    closed = subject[subject["load"] == CLOSED].iloc[0]
    clients = text.count(closed["clients"], "client")
    sentences = [
        f"With {clients} and {text.count(closed['B'], 'sample')} per request, {closed['label']} "
        f"answers {text.digits(closed['bags_per_s'])} samples per second{_against(run, closed)}."
    ]
    loaded = subject[subject["load"] != CLOSED]
    waits = [
        f"{text.seconds(row['p99_s'])} at {text.percent(row['load'], 2)}"
        for _, row in loaded.iterrows()
        if not text.is_missing(row["p99_s"])
    ]
    if waits:
        sentences.append(f"Of that rate, its p99 from arrival to answer is {text.listed(waits)}.")
    return [*sentences, *_memory(run)]


def _against(run: Run, row: pd.Series) -> str:
    if text.is_missing(row["ratio"]) or row["arm"] == run.baseline.key:
        return ""
    return f"; a request takes {text.ratio(row)} the time of {run.baseline.label}"


def _memory(run: Run) -> Iterator[str]:
    starts = run.frame("cold_starts")
    parts = []
    for arm in (run.subject.key, run.baseline.key):
        rows = select(starts, arm=arm)
        if len(rows):
            first = rows.iloc[0]
            times = text.listed(
                [f"{text.seconds(r['median_s'])} from {r['pages']}" for _, r in rows.iterrows()]
            )
            parts.append(
                f"{first['label']}: {text.size(first['bytes'])}, first answer after {times}"
            )
    if parts:
        yield f"Memory and cold start: {'; '.join(parts)}."


def tables(run: Run) -> Sequence[TitledTable]:
    """Return a table of latencies per cell, then one of memory and cold starts."""
    rows, parts = run.frame("latencies"), []
    for cell in dict.fromkeys(rows["cell"]) if len(rows) else ():
        of_cell = rows[rows["cell"] == cell]
        lines = list(_lines(of_cell))
        loads = sorted({load for line in lines for load in line["p99"]})
        batch = text.count(of_cell["B"].iloc[0], "sample")
        title = f"Requests of {batch}"
        table = _table(run, lines, loads)
        parts.append(TitledTable(title, "Latencies and rates of requests.", table))
    starts = run.frame("cold_starts")
    if len(starts):
        columns: dict[str, Column] = {
            "tables": lambda r: str(r["label"]),
            "memory": lambda r: bytes_value(r["bytes"]),
            "file": lambda r: bytes_value(r["file_bytes"]),
            "first answer from": lambda r: str(r["pages"]),
            "after": lambda r: time_value(r["median_s"]),
            "starts": lambda r: count_value(r["samples"]),
        }
        parts.append(TitledTable("Memory and cold start", "", Table.of(starts, columns)))
    return parts


def _lines(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a line per arm and number of clients: its row of load CLOSED and "p99" by other loads.

    An arm without a result has a line of its row and no "p99".
    """
    for _, row in rows.iterrows():
        if row["status"] != "ok":
            yield {**row, "p99": {}}
        elif row["load"] == CLOSED:
            is_same_line = (rows["arm"] == row["arm"]) & (rows["clients"] == row["clients"])
            loaded = rows[is_same_line & (rows["load"] != CLOSED)]
            yield {**row, "p99": dict(zip(loaded["load"], loaded["p99_s"], strict=True))}


def _table(run: Run, lines: Sequence[Mapping[str, Any]], loads: Sequence[float]) -> Table:
    columns: dict[str, Column] = {
        "tables": lambda r: str(r["label"]),
        "clients": lambda r: count_value(r["clients"]),
        "requests/s": lambda r: count_value(r["requests_per_s"]),
        "thousand samples/s": lambda r: number_value(r["bags_per_s"] / 1e3),
        f"time ÷ {run.baseline.label}": lambda r: ratio_value(
            r, is_baseline=r["arm"] == run.baseline.key
        ),
        "p50, saturated": lambda r: time_value(r["p50_s"]),
        "p99, saturated": lambda r: time_value(r["p99_s"]),
    }
    for load in loads:
        columns[f"p99 at {text.percent(load, 2)}"] = _p99_at(load)
    columns["requests"] = lambda r: count_value(r["requests"])
    return Table.of(lines, columns, num_label_columns=1)


def _p99_at(load: float) -> Column:
    return lambda line: time_value(line["p99"].get(load))


def figures(run: Run) -> list[Figure]:
    """Return the figure of p99 by throughput, a panel per request size, a curve per contender."""
    rows = select(run.frame("latencies"), status="ok")
    rows = rows[(rows["load"] != CLOSED) & rows["p99_s"].notna()] if len(rows) else rows
    if not len(rows):
        return []
    rows = rows[rows["clients"] == rows["clients"].max()]
    panels = []
    for batch, of_batch in rows.groupby("B", sort=True):
        lines = [
            contender_curve(
                str(name),
                group["bags_per_s"] / 1e3,
                group["p99_s"],
                label=label_of(str(name)),
                line=LINE_OF_FORMAT.get(str(name).rpartition("_")[2], "-"),
            )
            for name, group in of_batch.groupby("contender", sort=False)
        ]
        x_scale = Scale("thousand samples answered per second", log=10)
        y_scale = Scale("p99, from arrival to answer", log=10, format_tick=text.seconds)
        drawing = curves(lines, x_scale, y_scale, name_position="below", columns=3)
        title = f"{text.count(float(batch), 'sample')} per request"
        panels.append(Panel(title, drawing, 1.3 * WIDTH, 1.2 * HEIGHT))
    clients = text.count(rows["clients"].max(), "client")
    loads = text.listed([text.percent(load, 2) for load in sorted(rows["load"].unique())])
    return [
        Figure(
            "serving",
            "Latency that 99 % of requests stay below, against throughput",
            f"{clients.capitalize()}. Each line is one library and format; its points are {loads} "
            "of the rate that it answers when saturated. Right and down is better.",
            run.sizes(run.sections()[0]),
            panels,
        )
    ]
