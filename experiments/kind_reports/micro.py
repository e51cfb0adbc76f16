"""The report of micro-benchmarks: the time of a call, by operation.

A row is a benchmark; `kinds.micro.frame` lists the columns. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.report import charts, text
from experiments.report.charts import Row, Scale
from experiments.report.data import Run, select
from experiments.report.style import COLOURS, WIDTH, Figure, Panel
from experiments.report.tables import Column, Table, TitledTable, Value, count_value, time_value

# Names of two benchmarks of tests/bench, without "test_".
ONE_ROW_LOOKUP = "lookup[{device}-one lookup]"
OP_ONLY = "lookup_op[{device}]"

NOTES = (
    "A sample of emblib's benchmarks is eight calls, each on another batch, and then one "
    "synchronisation with the device; its time is divided by eight. So tables and code are warm "
    "(hot), and on CUDA a call takes the time of its launches or of its kernels, whichever is "
    "more. Imported benchmarks without `executions` are shown as pytest-benchmark timed them.",
    "Shown are medians over all samples of all processes, with quartiles; the interval is that of "
    "the median, over processes where there are several. Times of different runs are not paired: "
    "they say what is expensive, not whether a change is a regression. For that there is the gate.",
    "Before it is timed, each operation's result is checked against plain PyTorch.",
)


def answer(run: Run) -> list[str]:
    """State the time of the smallest call, its share of the operation, and the range of times."""
    rows = _timed_rows(run)
    if not len(rows):
        return ["No benchmark has a time."]
    times_s = {str(row["benchmark"]): float(row["median_s"]) for _, row in rows.iterrows()}
    sentences = []
    for device in dict.fromkeys(rows["device"].dropna()):
        call_s = times_s.get(ONE_ROW_LOOKUP.format(device=device))
        op_s = times_s.get(OP_ONLY.format(device=device))
        if call_s and op_s:
            sentences.append(
                f"A call that looks up one row takes {text.seconds(call_s)} ({device}), of which "
                f"the operation itself takes {text.seconds(op_s)}; the rest is the module around "
                "it: Python, checks of the batch, autograd."
            )
    slowest = rows.loc[rows["median_s"].idxmax()]
    sentences.append(
        f"{len(rows)} benchmarks were timed, from {text.seconds(float(rows['median_s'].min()))} to "
        f"{text.seconds(float(slowest['median_s']))} per call ({slowest['benchmark']})."
    )
    return sentences


def _timed_rows(run: Run) -> pd.DataFrame:
    """Return the benchmarks that have a time."""
    return select(run.frame("latency"), status="ok")


def figures(run: Run) -> list[Figure]:
    """Return the figure of every benchmark's median and quartiles, a panel per device."""
    rows = _timed_rows(run)
    if not len(rows):
        return []
    panels, colours = [], list(COLOURS.values())
    for device, device_rows in rows.fillna({"device": "unknown device"}).groupby(
        "device", sort=False
    ):
        operations = list(dict.fromkeys(device_rows["operation"]))
        lines = [
            Row(
                row["benchmark"],
                row["median_s"],
                colours[operations.index(row["operation"]) % len(colours)],
                row["q25_s"],
                row["q75_s"],
            )
            for _, row in device_rows.iterrows()
        ]
        drawing = charts.row_chart(lines, Scale("time per call", log=10, format_tick=text.seconds))
        panels.append(Panel(f"On {device}", drawing, 1.8 * WIDTH, 1.0 + 0.22 * len(device_rows)))
    return [
        Figure(
            "latency",
            "Time per call",
            "Median and quartiles of each benchmark, by operation. Left is better.",
            "Sizes: see the table",
            panels,
            columns=1,
        )
    ]


def tables(run: Run) -> Sequence[TitledTable]:
    """Return one table with a row per benchmark; [] without any."""
    rows = _timed_rows(run)
    columns: dict[str, Column] = {
        "benchmark": lambda row: str(row["benchmark"]),
        "median": lambda row: time_value(row["median_s"]),
        "95 %": lambda row: Value.of(
            row["lo_s"], lambda lo: f"{text.seconds(lo)} – {text.seconds(row['hi_s'])}"
        ),
        "quartiles": lambda row: Value.of(
            row["q25_s"], lambda lo: f"{text.seconds(lo)} – {text.seconds(row['q75_s'])}"
        ),
        "per lookup": lambda row: time_value(
            row["median_s"] / row["lookups"] if row["lookups"] else None
        ),
        "lookups": lambda row: count_value(row["lookups"] or None),
        "samples": lambda row: Value(f"{row['samples']} in {row['processes']}", row["samples"]),
    }
    table = Table.of(rows, columns)
    return [TitledTable("Benchmarks", "Time per call.", table)] if table.rows else []
