"""Tables: rows of formatted values, built from columns that are functions of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from experiments.config.schema import AXES
from experiments.report import text


@dataclass(frozen=True)
class Value:
    """An entry of a table."""

    text: str
    sort_key: float = math.nan  # number to sort by; nan for words
    link: str = ""  # address that the web page links it to; "" for none

    @classmethod
    def of(cls, value: float | None, format_value: Callable[[float], str]) -> Value:
        """Return an entry for a number, formatted by `format_value`; a dash for None and NaN.

        It sorts by `value`; a dash has no number to sort by.
        """
        if value is None or text.is_missing(float(value)):
            return cls(text.DASH)
        return cls(format_value(value), float(value))


# Formatted numbers by what they are; None and NaN give a dash.
time_value = partial(Value.of, format_value=text.seconds)
bytes_value = partial(Value.of, format_value=text.size)
number_value = partial(Value.of, format_value=text.digits)  # three significant digits
count_value = partial(Value.of, format_value=lambda v: f"{v:,.0f}")
factor_value = partial(Value.of, format_value=text.times)


def percent_value(share: float | None) -> Value:
    """Return an entry for a share of 1 in percent; it sorts by the percentage."""
    return Value.of(None if share is None else 100 * share, lambda value: f"{text.digits(value)} %")


def varied_axes(rows: pd.DataFrame) -> list[str]:
    """Return the axes, of those that are columns, whose values differ between the rows."""
    return [axis for axis in AXES if axis in rows and rows[axis].nunique() > 1]


def axis_columns(rows: pd.DataFrame) -> dict[str, Column]:
    """Return a column per axis whose values differ between the rows."""

    def axis_value(axis: str, row: Mapping[Any, Any]) -> Value:
        return Value.of(row[axis], text.number)

    return {axis: partial(axis_value, axis) for axis in varied_axes(rows)}


def ratio_value(row: Mapping[str, Any], *, is_baseline: bool = False) -> Value:
    """Return an entry for `ratio` of a row with its interval, `ratio_lo` to `ratio_hi`.

    A baseline that was measured has the entry 1.
    """
    if is_baseline and not text.is_missing(row["ratio"]):
        return Value("1", 1.0)
    return Value.of(row["ratio"], lambda _: text.ratio(row))


WIDE_LETTERS = 140  # letters of a row that fit 1,280 px at the usual size
CELL_PADDING = 2  # letters

Column = Callable[[Any], Value | str] | str
"""The entries of a column: a function of a row, or the key by which a row has the entry's text."""


@dataclass(frozen=True)
class Table:
    """Column headings and rows."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Value]]  # one value per heading
    # True for a list of names and values: the web page shows no headings, sorting or filter.
    is_plain: bool = False

    @classmethod
    def of(
        cls,
        rows: pd.DataFrame | Iterable[Any],
        columns: Mapping[str, Column],
        num_label_columns: int = 0,
    ) -> Table:
        """Return a table with one line per row.

        Args:
            rows: rows of the table, each an argument of the columns' functions; the rows of a frame
                are Series.
            columns: columns by heading, in the order of the table.
            num_label_columns: number of columns that a row whose `status` is not "ok" shows before
                its status, at most the number of columns minus one; 0 if rows have no status.
        """
        lines = []
        for row in (
            (series for _, series in rows.iterrows()) if isinstance(rows, pd.DataFrame) else rows
        ):
            is_failed = bool(num_label_columns) and row["status"] != "ok"
            shown_columns = list(columns.values())[: num_label_columns if is_failed else None]
            line = [
                str(row[column]) if isinstance(column, str) else column(row)
                for column in shown_columns
            ]
            if is_failed:
                line += [str(row["status"]), *[text.DASH] * (len(columns) - num_label_columns - 1)]
            lines.append([entry if isinstance(entry, Value) else Value(entry) for entry in line])
        return cls(list(columns), lines)

    def markdown(self) -> str:
        """Return a Markdown table as GitHub reads it; all columns but the first align right."""
        lines = [list(self.headings), ["---", *["---:"] * (len(self.headings) - 1)]]
        lines += [
            [" ".join(entry.text.replace("|", "\\|").split("\n")) for entry in row]
            for row in self.rows
        ]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    @property
    def is_wide(self) -> bool:
        """Return whether the page shows the table in small letters, intervals below numbers."""
        longest = [
            max((len(row[i].text) for row in self.rows), default=0)
            for i in range(len(self.headings))
        ]
        return sum(longest) + CELL_PADDING * len(longest) > WIDE_LETTERS

    def is_text(self, column: int) -> bool:
        """Return whether no entry of a column, given by its index, has a number to sort by."""
        return all(math.isnan(row[column].sort_key) for row in self.rows)


class TitledTable(NamedTuple):
    """A table of a report below its heading."""

    title: str
    paragraph: str  # what the rows are, written above them; "" for none
    table: Table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column has names and whose others have numbers."""
    return Table(headings, [[Value(words) for words in row] for row in rows]).markdown()
