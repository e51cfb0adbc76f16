"""What the report of tables of keys says and draws: keys per second, by operation and load.

A row is an operation of a hash table, over all processes. `kinds.keys.frame` lists the columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pandas as pd

from experiments.config.schema import OPERATIONS
from experiments.config.sweep import SWEEP
from experiments.kinds.keys import YARDSTICK
from experiments.report import charts, text
from experiments.report.charts import Row, Scale
from experiments.report.data import Run, select
from experiments.report.figures import contender_curve
from experiments.report.style import WIDTH, Drawing, Figure, Panel, colour_of, marker_of
from experiments.report.tables import (
    Column,
    Table,
    TitledTable,
    Value,
    bytes_value,
    count_value,
    number_value,
    ratio_value,
    time_value,
)

NOTES = (
    "Keys per second are keys of a call ÷ its median time. Ratios are time ÷ the time of find* of "
    "the subject at the same load, paired in each round: 3× means that find* does three times as "
    "many keys in the same time. find copies the values of the keys, find* and find_or_insert* "
    "give their slots. Calls that change a table are undone before the next one, outside of its "
    "time; where the new keys do not fit, they take the places of others, as in a full table. Of a "
    "table that evicts from time to time, a sample is the mean of as many calls as that is.",
)
CEILINGS = ("lines", "lines_huge")  # contenders that read memory and store no keys
BAR_HEIGHT = 0.3  # inches


def good_operations(run: Run) -> pd.DataFrame:
    """Return the operations that have a time."""
    return select(run.operations, status="ok")


def answer(run: Run) -> list[str]:
    """State the subject's find* rate at the headline, relative to the others and to its ceiling."""
    rows = select(good_operations(run), section=run.headline)
    subject_rows = select(rows, contender=run.subject.contender, phase=YARDSTICK)
    if not len(subject_rows):
        return [f"No answer: {run.subject.label} has no result on the headline workload."]
    first = subject_rows.iloc[0]
    other_rows = rows[(rows["load"] == first["load"]) & (rows["contender"] != first["contender"])]
    ratios = [
        _ratio_words(row) for _, row in other_rows.iterrows() if row["contender"] not in CEILINGS
    ]
    shares_of_ceilings = [
        _share_of_ceiling(row) for _, row in other_rows.iterrows() if row["contender"] in CEILINGS
    ]
    sentence = (
        f"On this machine find* of {_name(first)} reaches {_rate(first)} keys/s on "
        f"{run.title(run.headline)} ({text.seconds(first['median_s'])} for "
        f"{first['lookups']:,} keys, {first['keys_there']:,.0f} stored)"
    )
    return [
        sentence + (f": {', '.join(ratios)}." if ratios else "."),
        *([f"That is {' and '.join(shares_of_ceilings)}."] if shares_of_ceilings else []),
        *_load_sentence(run, rows),
    ]


def _name(row: pd.Series) -> str:
    return str(row["label"]).partition(", load")[0]


def _ratio_words(row: pd.Series) -> str:
    name = _name(row)
    operation = "" if row["phase"] == YARDSTICK else f" ({row['operation']})"
    return f"{text.ratio(row)} that of {name}{operation}"


def _share_of_ceiling(row: pd.Series) -> str:
    name = _name(row)
    return f"{text.digits(100 * row['ratio'])} % of {name} ({_rate(row)}/s)"


def _rate(row: pd.Series) -> str:
    return f"{text.digits(row['keys_per_s'] / 1e6)} M"


def _load_sentence(run: Run, rows: pd.DataFrame) -> list[str]:
    """State how the rates of the subject's operations change with the load."""
    subject_rows = rows[rows["contender"] == run.subject.contender]
    if subject_rows["load"].nunique() < 2:
        return []
    low, high = subject_rows["load"].min(), subject_rows["load"].max()
    parts = []
    for name, operation_rows in subject_rows.groupby("operation", sort=False):
        ends = [operation_rows[operation_rows["load"] == load] for load in (low, high)]
        if all(len(e) for e in ends):
            parts.append(f"{name} from {_rate(ends[0].iloc[0])} to {_rate(ends[1].iloc[0])}")
    return [f"From load {low:g} to {high:g}, keys/s change: {', '.join(parts)}."] if parts else []


def tables(run: Run) -> Sequence[TitledTable]:
    """Return a table per case and mode, and one of the sweep: a row per arm and operation."""
    parts = []
    for mode in run.modes:
        rows = run.in_mode(mode).operations
        for section in dict.fromkeys(rows["section"]) if len(rows) else ():
            title = "The sweep" if section == SWEEP else run.title(section)
            note = run.config.cases[section].note if section in run.config.cases else ""
            words = f"{run.sizes(section)}. {note}".strip()
            suffix = f", {mode}" * (len(run.modes) > 1)
            section_rows = rows[rows["section"] == section]
            table = _table(run, section_rows)
            parts.append(TitledTable(text.capitalise(title) + suffix, words, table))
    return parts


def _table(run: Run, rows: pd.DataFrame) -> Table:
    varied = [a for a in ("D", "E", "B", "s") if rows[a].nunique() > 1]

    def is_yardstick(row: pd.Series) -> bool:
        return bool(row["contender"] == run.subject.contender and row["phase"] == YARDSTICK)

    columns: dict[str, Column] = {
        "table": lambda r: str(r["label"]),
        **{a: functools.partial(_axis, a) for a in varied},
        "operation": lambda r: str(r["operation"]),
        "time per call": lambda r: time_value(r["median_s"]),
        "M keys/s": lambda r: number_value(r["keys_per_s"] / 1e6),
        "2³⁰ keys/s": lambda r: number_value(r["keys_per_s"] / 2**30),
        f"time ÷ find* of {run.subject.label} [95\u00a0%]": lambda r: ratio_value(
            r, is_baseline=is_yardstick(r)
        ),
        "keys stored": lambda r: count_value(r["keys_there"]),
        "hits": lambda r: Value.of(r["hits"], lambda share: f"{100 * share:.0f} %"),
        "memory": lambda r: bytes_value(r["bytes"] or None),
    }
    return Table.of(rows, columns, num_label_columns=1 + len(varied))


def _axis(axis: str, row: pd.Series) -> Value:
    return Value.of(row[axis], lambda value: f"{value:g}")


def figures(run: Run) -> list[Figure]:
    """Return the figure of every table on the headline, then that of the subject by load."""
    rows = good_operations(run)
    if not len(rows):
        return []
    has_headline = (rows["section"] == run.headline).any()
    section = run.headline if has_headline else str(rows["section"].iloc[0])
    section_rows = select(rows, section=section)
    height = 1.0 + BAR_HEIGHT * len(section_rows)
    panel = Panel(run.title(section), _bars(section_rows), 1.8 * WIDTH, height)
    result = [
        Figure(
            "keys_per_second",
            "Keys per second",
            "Bars: keys of a call ÷ its median time; lines: quartiles. The ceilings read one "
            "random line of memory per key and store no keys. Longer is better.",
            run.sizes(section),
            [panel],
        )
    ]
    subject_rows = rows[rows["contender"] == run.subject.contender]
    subject_rows = subject_rows[subject_rows.groupby("cell")["load"].transform("nunique") > 1]
    panels: list[Panel] = []
    for operation in OPERATIONS.values():
        operation_rows = subject_rows[subject_rows["operation"] == operation]
        if len(operation_rows):
            panels.append(Panel(operation, _loads(operation_rows, legend=not panels)))
    if panels:
        caption = f"{run.subject.label}, by the dimension of its values. Higher is better."
        result.append(Figure("load", "Keys per second against the load", caption, "", panels))
    return result


def _bars(rows: pd.DataFrame) -> Drawing:
    """Draw the keys per second of each row as a bar, the fastest first; ceilings are hollow."""
    lines = []
    for _, row in rows.sort_values("keys_per_s", ascending=False).iterrows():
        is_ceiling = row["contender"] in CEILINGS
        lines.append(
            Row(
                str(row["label"]) if is_ceiling else f"{row['label']}: {row['operation']}",
                row["keys_per_s"] / 1e6,
                colour_of(str(row["contender"])),
                row["lookups"] / row["q75_s"] / 1e6,
                row["lookups"] / row["q25_s"] / 1e6,
                bar=True,
                hollow=is_ceiling,
            )
        )
    return charts.row_chart(lines, Scale("million keys per second"))


def _loads(rows: pd.DataFrame, *, legend: bool) -> Drawing:
    """Draw the keys per second against the load, a curve per dimension."""
    lines = []
    for number, (dim, line) in enumerate(rows.sort_values("load").groupby("D")):
        opacity = 0.35 + 0.6 * (number + 1) / rows["D"].nunique()
        lines.append(
            contender_curve(
                str(line["contender"].iloc[0]),
                line["load"],
                line["keys_per_s"] / 1e6,
                marker=marker_of(f"{dim}"),
                opacity=opacity,
                label=f"D={dim}",
            )
        )
    x_scale, y_scale = Scale("keys ÷ slots"), Scale("million keys per second", low=0)
    return charts.curves(lines, x_scale, y_scale, name_position="best" if legend else "")
