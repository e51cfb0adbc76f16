"""Draw statistics of dynamic tables from a series that `emblib.telemetry.append_csv` wrote.

One figure: hit rate and load of each table over its training steps, the ages of evicted keys, and
the share of inserted keys that had been evicted before, if keys were remembered.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import pandas as pd

from experiments.config.schema import UsageError
from experiments.report.charts import Curve, Scale, curves, percent_scale
from experiments.report.style import COLOURS, Figure, Panel, draw, theme

MAX_TABLES = 8
_AGE = "age_"
_NEEDED = {"step", "module", "table", "labels", "lookups", "hits", "inserted", "load"}
_COLOURS = ("tbe", "tt", "torch", "reference_tt", "cached_lru", "sky", "cached_lfu", "published")
_MARKERS = "os^Dvp*h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("series", type=Path, nargs="+", help="CSV files, e.g. one per rank")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the PNG and SVG files")


def run(arguments: argparse.Namespace) -> int:
    """Draw the figure; return 0."""
    series = read(arguments.series)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with theme():
        draw(figure(series), "", arguments.out)
    print(arguments.out / "table_statistics.png")
    return 0


def read(paths: list[Path]) -> dict[str, pd.DataFrame]:
    """Return the snapshots of each table, by ascending step; at most `MAX_TABLES` of most lookups.

    Raises:
        UsageError: a file is not a series, or none has a snapshot.
    """
    frames = []
    for path in paths:
        try:
            frame = pd.read_csv(path, keep_default_na=False, na_values={"labels": []})
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        if missing := sorted(_NEEDED - set(frame.columns)):
            raise UsageError(f"{path} is not a series of table statistics: no columns {missing}")
        frames.append(frame)
    rows = pd.concat(frames)
    if rows.empty:
        raise UsageError("the series have no snapshots; call emblib.telemetry.append_csv first")
    names = ["labels", "module", "table"]
    numbers = [c for c in rows.columns if c not in names]
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")
    rows[names] = rows[names].astype(str)
    # A name is as short as tells the tables apart.
    parts = ["table", *(n for n in names[:2] if rows.groupby("table")[n].nunique().max() > 1)]
    rows["name"] = rows[parts].agg(lambda row: " ".join(word for word in row if word), axis=1)
    grouped = {str(name): part.sort_values("step") for name, part in rows.groupby("name")}
    busiest = sorted(grouped, key=lambda name: (-grouped[name]["lookups"].max(), name))
    return {name: grouped[name] for name in sorted(busiest[:MAX_TABLES])}


def figure(series: dict[str, pd.DataFrame]) -> Figure:
    """Return the figure of the snapshots of some tables."""
    step = Scale("training step")
    panels = [
        Panel("Hit rate", curves(_rates(series, "hits", "lookups"), step, percent_scale("%"))),
        Panel("Load", curves(_loads(series), step, percent_scale("keys per row, %"))),
    ]
    if ages := _ages(series):
        bounds = sorted({bound for line in ages for bound in line.x})
        x = Scale(
            "steps since the last use, at most", log=2, ticks=bounds[:: 1 + len(bounds) // 10]
        )
        panels.append(Panel("Age at eviction", curves(ages, x, Scale("% of evicted keys", low=0))))
    if returns := _rates(series, "reinserted", "inserted"):
        title = "Inserted keys that had been evicted"
        panels.append(Panel(title, curves(returns, step, percent_scale("%"))))
    count = len(series)
    return Figure(
        name="table_statistics",
        title=f"Statistics of {count} dynamic table{'s' if count > 1 else ''}",
        caption="Higher hit rates and ages are better, fewer returning keys too.",
        sizes="Rates are between one snapshot and the next; ages are of all keys evicted so far.",
        panels=panels,
    )


def _styles(series: dict[str, pd.DataFrame]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each table."""
    styles = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    return {name: (COLOURS[c], m) for name, (c, m) in zip(series, styles, strict=False)}


def _rates(series: dict[str, pd.DataFrame], part: str, total: str) -> list[Curve]:
    """Return the share of one count in another, from snapshot to snapshot, in percent."""
    lines = []
    for name, (colour, marker) in _styles(series).items():
        rows = series[name].drop_duplicates("step")
        if part not in rows or rows[part].isna().all():
            continue
        steps = rows[["step", part, total]].dropna().diff()
        steps["at"] = rows["step"]
        # Counts that were reset between two snapshots are less than before.
        valid = steps[(steps[total] > 0) & (steps[part] >= 0)]
        share = 100 * valid[part] / valid[total]
        if len(valid):
            lines.append(_line(name, colour, marker, valid["at"], share))
    return lines


def _loads(series: dict[str, pd.DataFrame]) -> list[Curve]:
    return [
        _line(name, colour, marker, series[name]["step"], 100 * series[name]["load"])
        for name, (colour, marker) in _styles(series).items()
    ]


def _ages(series: dict[str, pd.DataFrame]) -> list[Curve]:
    """Return the distribution of ages over the whole series, between the bins in use."""
    lines = []
    for name, (colour, marker) in _styles(series).items():
        rows = series[name]
        bins = {c.removeprefix(_AGE): rows[c].max() for c in rows if str(c).startswith(_AGE)}
        counts = {float(bound): n for bound, n in bins.items() if n == n and bound != "+Inf"}
        used = [bound for bound, n in counts.items() if n > 0]
        total = sum(n for n in bins.values() if n == n)
        if not used:
            continue
        shown = [b for b in counts if min(used) / 2 <= b <= 2 * max(used)]
        shares = [100 * counts[b] / total for b in shown]
        lines.append(_line(name, colour, marker, shown, shares))
    return lines


def _line(name: str, colour: str, marker: str, x: object, y: object) -> Curve:
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if not math.isnan(b)]  # type: ignore[call-overload]
    size = 4.0 if len(points) < 60 else 0.0
    xs, ys = [a for a, _ in points], [b for _, b in points]
    return Curve(xs, ys, colour, label=name, marker=marker, size=size)
