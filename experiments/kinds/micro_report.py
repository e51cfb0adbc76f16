"""What the report of micro-benchmarks says and draws: the time of a call, by operation."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from experiments.kinds.micro import frame
from experiments.report import text
from experiments.report.data import Run
from experiments.report.style import COLOURS, WIDTH, Drawing, Figure, Panel
from experiments.report.tables import Table, Value

ONE_CALL = "lookup[{device}-one lookup]"
OP_ALONE = "lookup_op[{device}]"

NOTES = (
    "A sample is eight calls, each on a batch of its own, and then one synchronisation with the "
    "device; its time is divided by eight. So tables and code are warm (hot), and on CUDA a call "
    "takes the time of its launches or of its kernels, whichever is more.",
    "Shown are medians over all samples of all processes, with quartiles; the interval is that of "
    "the median, over processes where there are several. Times of different runs are not paired: "
    "they say what is expensive, not whether a change is a regression. For that there is the gate.",
    "Before it is timed, each operation's result is checked against plain PyTorch.",
)


def answer(run: Run) -> list[str]:
    """What a call costs at least, and how much of it is not the operation."""
    rows = _timed(run)
    if not len(rows):
        return ["No benchmark has a time."]
    times = {str(r["benchmark"]): float(r["median_s"]) for _, r in rows.iterrows()}
    found = []
    for device in dict.fromkeys(rows["device"].dropna()):
        call = times.get(ONE_CALL.format(device=device))
        alone = times.get(OP_ALONE.format(device=device))
        if call and alone:
            found.append(
                f"A call that looks up one row takes {text.seconds(call)} ({device}), of which the "
                f"operation itself takes {text.seconds(alone)}; the rest is the module around it: "
                "Python, checks of the batch, autograd."
            )
    slowest = rows.loc[rows["median_s"].idxmax()]
    found.append(
        f"{len(rows)} benchmarks were timed, from {text.seconds(float(rows['median_s'].min()))} to "
        f"{text.seconds(float(slowest['median_s']))} a call ({slowest['benchmark']})."
    )
    return found


def _timed(run: Run) -> pd.DataFrame:
    rows = frame(run.records)
    return rows[rows["status"] == "ok"] if len(rows) else rows


def figures(run: Run) -> list[Figure]:
    """One: every benchmark's quartiles on one logarithmic axis."""
    rows = _timed(run)
    if not len(rows):
        return []
    panels = []
    for device in rows["device"].fillna("unknown device").unique():
        part = rows[rows["device"].fillna("unknown device") == device]
        height = 1.0 + 0.22 * len(part)
        panels.append(Panel(f"On {device}", _dots(part), 1.8 * WIDTH, height))
    return [
        Figure(
            "latency",
            "Time of one call",
            "Median and quartiles of each benchmark, by operation. Left is better.",
            "Sizes: see the table",
            panels,
            columns=1,
        )
    ]


def _dots(rows: pd.DataFrame) -> Drawing:
    def draw(axes: Axes) -> None:
        names = list(rows["benchmark"])
        colours = list(COLOURS.values())
        operations = {name: i for i, name in enumerate(dict.fromkeys(rows["operation"]))}
        for place, (_, row) in enumerate(rows.iterrows()):
            colour = colours[operations[row["operation"]] % len(colours)]
            axes.plot([row["q25_s"], row["q75_s"]], [place, place], color=colour)
            axes.plot([row["median_s"]], [place], "o", color=colour)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.seconds(value)))
        axes.set_xlabel("time of one call")

    return draw


def tables(run: Run) -> Sequence[tuple[str, str, Table]]:
    """One table, a row a benchmark."""
    heads = ["benchmark", "median", "95 %", "quartiles", "per lookup", "lookups", "samples"]
    lines = [_line(row) for _, row in _timed(run).iterrows()]
    return [("Benchmarks", "Time of one call.", Table(heads, lines))] if lines else []


def _line(row: pd.Series) -> list[Value]:
    median, lookups = float(row["median_s"]), row["lookups"]
    each = median / lookups if lookups else float("nan")
    unknown = text.missing(row["lo_s"])
    interval = (
        text.NONE if unknown else f"{text.seconds(row['lo_s'])} – {text.seconds(row['hi_s'])}"
    )
    return [
        Value(str(row["benchmark"])),
        Value(text.seconds(median), median),
        Value(interval, row["lo_s"]),
        Value(f"{text.seconds(row['q25_s'])} – {text.seconds(row['q75_s'])}", row["q25_s"]),
        Value(text.seconds(each), each),
        Value(f"{lookups:,.0f}" if lookups else text.NONE, lookups or float("nan")),
        Value(f"{row['samples']} in {row['processes']}", row["samples"]),
    ]
