"""The report of hash tables alone: keys per second, by operation and load.

A row is an operation of a hash table, over all processes. `kinds.keys.frame` lists the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.config.schema import OPERATIONS
from experiments.config.sweep import SWEEP
from experiments.kinds.keys import BASE_OPERATION
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
    axis_columns,
    bytes_value,
    count_value,
    number_value,
    ratio_value,
    time_value,
    varied_axes,
)

NOTES = (
    "Keys per second are keys of a call ÷ its median time. Ratios are time ÷ the time of find* of "
    "the subject at the same load, paired in each round: 3× means that find* does three times as "
    "many keys in the same time. find copies the values of the keys; find* and find_or_insert* "
    "return their slots. What a call changes in a table is undone before the next call, which is "
    "not timed; where the new keys do not fit, they evict others, as in a full table. If a table "
    "evicts only in every n-th call, a sample is the mean of n calls.",
)
CEILINGS = ("lines", "lines_huge")  # contenders that read memory and store no keys
BAR_HEIGHT = 0.3  # inches


def good_operations(run: Run) -> pd.DataFrame:
    """Return the operations that have a time."""
    return select(run.operations, status="ok")


def answer(run: Run) -> list[str]:
    """State the subject's find* rate at the headline, with ratios to others and ceilings."""
    rows = select(good_operations(run), cell=run.headline_cell())
    subject_rows = select(rows, contender=run.subject.contender, phase=BASE_OPERATION)
    if not len(subject_rows):
        return [f"No answer: {run.subject.label} has no result on the headline workload."]
    subject_row = subject_rows.iloc[0]
    other_rows = rows[
        (rows["load"] == subject_row["load"]) & (rows["contender"] != subject_row["contender"])
    ]
    ratios = [
        _format_ratio(row) for _, row in other_rows.iterrows() if row["contender"] not in CEILINGS
    ]
    ceiling_shares = [
        _format_ceiling_share(row)
        for _, row in other_rows.iterrows()
        if row["contender"] in CEILINGS
    ]
    sentence = (
        f"On this machine find* of {_name(subject_row)} reaches {_format_rate(subject_row)} keys/s "
        f"on {run.title(run.headline)} ({text.seconds(subject_row['median_s'])} for "
        f"{subject_row['lookups']:,} keys, {subject_row['keys_there']:,.0f} stored)"
    )
    return [
        sentence + (f": {', '.join(ratios)}." if ratios else "."),
        *([f"That is {' and '.join(ceiling_shares)}."] if ceiling_shares else []),
        *_load_sentence(run, rows),
    ]


def _name(row: pd.Series) -> str:
    """Return the label of a row's hash table, without its load."""
    return str(row["label"]).partition(", load")[0]


def _format_ratio(row: pd.Series) -> str:
    """Return a row's ratio and the operation and table that it compares with."""
    name = _name(row)
    operation = "" if row["phase"] == BASE_OPERATION else f" ({row['operation']})"
    return f"{text.ratio(row)} that of {name}{operation}"


def _format_ceiling_share(row: pd.Series) -> str:
    """Return the subject's rate in percent of the rate of a ceiling (its time ÷ the subject's)."""
    name = _name(row)
    return f"{text.digits(100 * row['ratio'])} % of {name} ({_format_rate(row)}/s)"


def _format_rate(row: pd.Series) -> str:
    """Return the keys per second in millions."""
    return f"{text.digits(row['keys_per_s'] / 1e6)} M"


def _load_sentence(run: Run, rows: pd.DataFrame) -> list[str]:
    """State how the rates of the subject's operations change with the load."""
    subject_rows = rows[rows["contender"] == run.subject.contender]
    if subject_rows["load"].nunique() < 2:
        return []
    low, high = subject_rows["load"].min(), subject_rows["load"].max()
    changes = []
    for name, operation_rows in subject_rows.groupby("operation", sort=False):
        at_low, at_high = (operation_rows[operation_rows["load"] == load] for load in (low, high))
        if len(at_low) and len(at_high):
            rates = [_format_rate(rows_at_load.iloc[0]) for rows_at_load in (at_low, at_high)]
            changes.append(f"{name} from {rates[0]} to {rates[1]}")
    if not changes:
        return []
    return [f"From load {low:g} to {high:g}, keys/s change: {', '.join(changes)}."]


def tables(run: Run) -> Sequence[TitledTable]:
    """Return a table per case and mode, and one of the sweep: a row per arm and operation."""
    titled_tables = []
    for mode in run.modes:
        rows = run.in_mode(mode).operations
        for section in dict.fromkeys(rows["section"]) if len(rows) else ():
            title = "The sweep" if section == SWEEP else run.title(section)
            note = run.config.cases[section].note if section in run.config.cases else ""
            paragraph = f"{run.sizes(section)}. {note}".strip()
            suffix = f", {mode}" * (len(run.modes) > 1)
            section_rows = rows[rows["section"] == section]
            table = _table(run, section_rows)
            titled_tables.append(TitledTable(text.capitalise(title) + suffix, paragraph, table))
    return titled_tables


def _table(run: Run, rows: pd.DataFrame) -> Table:
    """Return a line per row; axes whose values differ between rows have columns."""
    columns_of_axes = axis_columns(rows)

    def is_base(row: pd.Series) -> bool:
        return bool(row["contender"] == run.subject.contender and row["phase"] == BASE_OPERATION)

    columns: dict[str, Column] = {
        "table": lambda row: str(row["label"]),
        **columns_of_axes,
        "operation": lambda row: str(row["operation"]),
        "time per call": lambda row: time_value(row["median_s"]),
        "M keys/s": lambda row: number_value(row["keys_per_s"] / 1e6),
        "2³⁰ keys/s": lambda row: number_value(row["keys_per_s"] / 2**30),
        f"time ÷ find* of {run.subject.label} [95\u00a0%]": lambda row: ratio_value(
            row, is_baseline=is_base(row)
        ),
        "keys stored": lambda row: count_value(row["keys_there"]),
        "hits": lambda row: Value.of(row["hits"], lambda share: f"{100 * share:.0f} %"),
        "memory": lambda row: bytes_value(row["bytes"] or None),
    }
    return Table.of(rows, columns, num_label_columns=1 + len(columns_of_axes))


def figures(run: Run) -> list[Figure]:
    """Return the figure of all tables on the headline workload, then the subject's by load.

    Without results of the headline, the first figure is of the first section that has results.
    """
    rows = good_operations(run)
    if not len(rows):
        return []
    has_headline = (rows["cell"] == run.headline_cell()).any()
    cell_rows = select(rows, cell=run.headline_cell() if has_headline else rows["cell"].iloc[0])
    section, height = str(cell_rows["section"].iloc[0]), 1.0 + BAR_HEIGHT * len(cell_rows)
    panel = Panel(run.title(section), _draw_bars(cell_rows), 1.8 * WIDTH, height)
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
            panels.append(Panel(operation, _draw_by_load(operation_rows, legend=not panels)))
    if panels:
        caption = f"{run.subject.label}, a curve per workload. Higher is better."
        result.append(Figure("load", "Keys per second against the load", caption, "", panels))
    return result


def _draw_bars(rows: pd.DataFrame) -> Drawing:
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
                is_bar=True,
                is_hollow=is_ceiling,
            )
        )
    return charts.row_chart(lines, Scale("million keys per second"))


def _draw_by_load(rows: pd.DataFrame, *, legend: bool) -> Drawing:
    """Draw the keys per second against the load, a curve per cell."""
    lines, axes = [], varied_axes(rows) or ["D"]
    for index, (_, group) in enumerate(rows.sort_values(["D", "load"]).groupby("cell", sort=False)):
        opacity = 0.35 + 0.6 * (index + 1) / rows["cell"].nunique()
        lines.append(
            contender_curve(
                str(group["contender"].iloc[0]),
                group["load"],
                group["keys_per_s"] / 1e6,
                marker=marker_of(text.point(group.iloc[0], axes)),
                opacity=opacity,
                label=text.point(group.iloc[0], axes),
            )
        )
    x_scale, y_scale = Scale("keys ÷ slots"), Scale("million keys per second", low=0)
    return charts.curves(lines, x_scale, y_scale, name_position="best" if legend else "")
