"""Draw statistics of dynamic tables from files that `emblib.telemetry.append_csv` wrote.

A *series* is such a file; a *snapshot* is a line of it, with the counts of one table so far. The
figure shows hit rate and load of each table over its training steps, and the ages of evicted keys.
If the tables remembered evicted keys, it also shows the share of inserted keys that were such keys.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from pathlib import Path

import pandas as pd

from experiments.config.schema import UsageError
from experiments.report.charts import Curve, Scale, curves, percent_scale
from experiments.report.style import COLOURS, Figure, Panel, draw_files, theme

MAX_TABLES = 8  # tables that are drawn
_AGE_PREFIX = "age_"  # beginning of the names of columns that count evicted keys by age
_NAME_COLUMNS = ["labels", "module", "table"]  # columns of texts; the others have numbers
_NEEDED_COLUMNS = {*_NAME_COLUMNS, "time_s", "step", "lookups", "hits", "inserted", "load"}
_COLOURS = ("tbe", "tt", "torch", "reference_tt", "cached_lru", "sky", "cached_lfu", "published")
_MARKERS = "os^Dvp*h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `statistics`."""
    parser.add_argument("series", type=Path, nargs="+", help="CSV files, e.g. one per rank")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the figures (.)")


def run(arguments: argparse.Namespace) -> int:
    """Draw the figure, print the path of its PNG file, and return 0.

    Raises:
        UsageError: `read` raised it.
    """
    snapshots, left_out = read(arguments.series)
    if left_out:
        print(f"the {MAX_TABLES} tables of most lookups are drawn, left out are {left_out}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with theme():
        draw_files(figure(snapshots), "", arguments.out)
    print(arguments.out / "table_statistics.png")
    return 0


def read(paths: list[Path]) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Read series; return the snapshots of each table by time, and the names of tables left out.

    At most MAX_TABLES tables are returned, sorted by name: those with the largest number of lookups
    in a snapshot. Names are those of `_table_names`. A column of numbers is nan where the file has
    no number.

    Raises:
        UsageError: a file cannot be read or is not a series, or no file has a snapshot.
    """
    rows = pd.concat([_read_series(path) for path in paths], ignore_index=True)
    if rows.empty:
        raise UsageError("the series have no snapshots; call emblib.telemetry.append_csv first")
    numbers = [column for column in rows.columns if column not in _NAME_COLUMNS]
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")
    rows["name"] = _table_names(rows)
    rows_by_name = {
        str(name): group.sort_values("time_s", kind="stable")
        for name, group in rows.groupby("name")
    }
    busiest = sorted(rows_by_name, key=lambda name: (-rows_by_name[name]["lookups"].max(), name))
    drawn_names, left_out = sorted(busiest[:MAX_TABLES]), sorted(busiest[MAX_TABLES:])
    return {name: rows_by_name[name] for name in drawn_names}, left_out


def _read_series(path: Path) -> pd.DataFrame:
    """Return the whole lines of a series as texts; raise UsageError if the file is not a series."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            columns, *lines = [*csv.reader(file)] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if missing_columns := sorted(_NEEDED_COLUMNS - set(columns)):
        raise UsageError(
            f"{path} is not a series of table statistics: no columns {missing_columns}"
        )
    # A line that a process left unfinished lacks fields, unless the process ended in the last one.
    whole_lines = [line for line in lines if len(line) == len(columns)]
    return pd.DataFrame(whole_lines, columns=columns)


def _table_names(rows: pd.DataFrame) -> pd.Series:
    """Return the name of the table of each snapshot.

    That is the name in the file. If tables of one name differ in labels or module, all names have
    these too: "<table> <labels> <module>".
    """
    label_columns, table = _NAME_COLUMNS[:2], "table"
    telling_columns = [c for c in label_columns if rows.groupby(table)[c].nunique().max() > 1]
    return rows[[table, *telling_columns]].agg(
        lambda row: " ".join(word for word in row if word), axis=1
    )


def figure(snapshots: dict[str, pd.DataFrame]) -> Figure:
    """Return the figure of the snapshots of tables, given by name as `read` returns them."""
    step = Scale("training step")
    panels = [
        Panel("Hit rate", curves(_rates(snapshots, "hits", "lookups"), step, percent_scale("%"))),
        Panel("Load", curves(_loads(snapshots), step, percent_scale("keys per row, %"))),
    ]
    if ages := _ages(snapshots):
        bounds = sorted({bound for line in ages for bound in line.x})
        x = Scale(
            "steps since the last use, at most", log=2, ticks=bounds[:: 1 + len(bounds) // 10]
        )
        panels.append(Panel("Age at eviction", curves(ages, x, Scale("% of evicted keys", low=0))))
    if returns := _rates(snapshots, "reinserted", "inserted"):
        title = "Inserted keys that had been evicted"
        panels.append(Panel(title, curves(returns, step, percent_scale("%"))))
    count = len(snapshots)
    return Figure(
        name="table_statistics",
        title=f"Statistics of {count} dynamic table{'s' if count > 1 else ''}",
        caption="Higher hit rates and ages are better, fewer returning keys too.",
        sizes="Rates are between one snapshot and the next; ages are of all keys evicted so far.",
        panels=panels,
    )


def _styles(snapshots: dict[str, pd.DataFrame]) -> dict[str, tuple[str, str]]:
    """Return the colour and the marker of each table, in the order of the tables."""
    styles = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    return {
        name: (COLOURS[colour], marker)
        for name, (colour, marker) in zip(snapshots, styles, strict=False)
    }


def _increments(rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Return the increase of the counts in `columns` since the previous snapshot of a table.

    The first snapshot has nan. If a count fell, counting has restarted, as by `clear` or in a new
    process: the increase is then the count itself.
    """
    counts = rows[["step", "lookups", "hits", "inserted", *columns]]
    has_restarted = (counts.diff() < 0).any(axis=1)
    increments = rows[columns].diff()
    return increments.where(~has_restarted, rows[columns])


def _rates(snapshots: dict[str, pd.DataFrame], part: str, total: str) -> list[Curve]:
    """Return a curve per table: the increase of the count `part` in percent of that of `total`.

    Tables without the column `part` have no curve, and snapshots without an increase no point.
    """
    lines = []
    for name, (colour, marker) in _styles(snapshots).items():
        rows = snapshots[name]
        if part not in rows or rows[part].isna().all():
            continue
        increments = _increments(rows, [part, total])
        valid = increments[(increments[total] > 0) & (increments[part] <= increments[total])]
        if len(valid):
            steps = rows.loc[valid.index, "step"]
            lines.append(_line(name, colour, marker, steps, 100 * valid[part] / valid[total]))
    return lines


def _loads(snapshots: dict[str, pd.DataFrame]) -> list[Curve]:
    return [
        _line(name, colour, marker, snapshots[name]["step"], 100 * snapshots[name]["load"])
        for name, (colour, marker) in _styles(snapshots).items()
    ]


def _ages(snapshots: dict[str, pd.DataFrame]) -> list[Curve]:
    """Return a curve per table with evicted keys: their share in each bin of ages, in percent.

    Bins below half of the smallest occupied bound or above twice the largest are left out.
    """
    lines = []
    for name, (colour, marker) in _styles(snapshots).items():
        rows = snapshots[name]
        columns = [str(c) for c in rows if str(c).startswith(_AGE_PREFIX)]
        age_counts = _increments(rows, columns)
        age_counts.iloc[0] = rows[columns].iloc[0]  # counted before the first snapshot
        bins = {c.removeprefix(_AGE_PREFIX): age_counts[c].sum(min_count=1) for c in columns}
        known_bins = {bound: n for bound, n in bins.items() if not math.isnan(n)}
        counts = {float(bound): n for bound, n in known_bins.items() if bound != "+Inf"}
        used_bounds = [bound for bound, n in counts.items() if n > 0]
        total = sum(known_bins.values())
        if not used_bounds:
            continue
        shown_bounds = [b for b in counts if min(used_bounds) / 2 <= b <= 2 * max(used_bounds)]
        shares = [100 * counts[b] / total for b in shown_bounds]
        lines.append(_line(name, colour, marker, shown_bounds, shares))
    return lines


def _line(name: str, colour: str, marker: str, x: object, y: object) -> Curve:
    """Return the curve of a table without points whose y is nan, interrupted where x falls."""
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if not math.isnan(b)]  # type: ignore[call-overload]
    size = 4.0 if len(points) < 60 else 0.0
    xs, ys = list[float](), list[float]()
    for a, b in points:
        if xs and a < xs[-1]:
            xs.append(math.nan)
            ys.append(math.nan)
        xs.append(a)
        ys.append(b)
    label = f" {name}" if name.startswith("_") else name  # a legend leaves out "_name"
    return Curve(xs, ys, colour, label=label, marker=marker, size=size)
