"""The report of predicted steps: predicted ÷ measured, and the constants of the model.

A row is a step; `kinds.predictions.frame` lists the columns. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.report import text
from experiments.report.charts import DASHED, Curve, Mark, Scale, curves
from experiments.report.data import Run
from experiments.report.style import COLOURS, INK, WIDTH, Figure, Panel
from experiments.report.tables import Column, Table, TitledTable, Value, count_value, time_value

NOTES = (
    "A step is forward, backward and the update (SGD) of one table. Each round times every kind of "
    "step once, in random order; tables show medians. With one thread, times are processor times.",
    "The model has five terms: a constant, lookups, lookups of computed rows beyond the first MiB, "
    "distinct rows, and multiply-adds, whose number follows from distinct rows and prefixes. A "
    "cache adds a constant, a time per lookup and a time per distinct id; the five terms then "
    "count only lookups that miss the cache. Constants are at least 0. Least squares of relative "
    "errors fit them to steps of uniform ids, drawn from all ids or from few. No constant is "
    "fitted to Zipf ids.",
    "'By rows and products' is a prediction from distinct rows and multiply-adds only. 'By hits' "
    "is the measured time without a cache × the share of the lookups that miss the cache.",
)


def answer(run: Run) -> list[str]:
    """State predicted ÷ measured time: per skew, with caches, and from the hit rate alone."""
    rows = run.frame("predictions")
    if not len(rows):
        return ["No answer: no step was timed."]
    uncached_rows, cached_rows = rows[rows["cached"] == 0], rows[rows["cached"] > 0]
    ranges = [
        f"{_describe_ids(skew)} {_ratio_range(group)}"
        for skew, group in uncached_rows.groupby("skew")
    ]
    sentences = [
        "With constants of uniform ids, the predicted time of a step of tensor trains is, for "
        f"{'; for '.join(ranges)} times the measured time."
    ]
    if len(cached_rows):
        by_hits = (cached_rows["by_hits_s"] / cached_rows["measured_s"]).rename("ratio")
        sentences.append(
            f"With cached rows it is {_ratio_range(cached_rows)} times the measured time; the hit "
            f"rate of lookups alone predicts {_ratio_range(by_hits.to_frame())} times."
        )
    return sentences


def _describe_ids(skew: float) -> str:
    return f"Zipf {skew:g}" if skew else "uniform ids"


def _ratio_range(rows: pd.DataFrame) -> str:
    """Return the smallest and the largest ratio, e.g. '0.92 to 1.10'; one number if equal."""
    low, high = rows["ratio"].min(), rows["ratio"].max()
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def tables(run: Run) -> Sequence[TitledTable]:
    """Return the tables of steps without and with cached rows, then that of the constants."""
    rows = run.frame("predictions")
    if not len(rows):
        return []
    columns: dict[str, Column] = {
        "rank": lambda row: count_value(row["rank"]),
        "ids": lambda row: f"{_describe_ids(row['skew'])}, {row['order']}",
        "lookups": lambda row: count_value(row["lookups"]),
        "distinct": lambda row: count_value(row["rows"]),
        "measured": lambda row: time_value(row["measured_s"]),
        "predicted": lambda row: time_value(row["predicted_s"]),
        "÷ measured": lambda row: _two_decimals(row["ratio"]),
    }
    uncached_rows, cached_rows = rows[rows["cached"] == 0], rows[rows["cached"] > 0]
    uncached_columns: dict[str, Column] = {
        "by rows and products": lambda row: _two_decimals(row["two_terms_s"] / row["measured_s"])
    }
    table = Table.of(uncached_rows, columns | uncached_columns)
    titled_tables = [TitledTable("Steps without a cache", "", table)]
    if len(cached_rows):
        cached_columns: dict[str, Column] = {
            "stored": lambda row: Value(f"{100 * row['cached']:g} %", row["cached"]),
            "lookups that hit": lambda row: _two_decimals(row["hit_rate"]),
            "distinct ids that hit": lambda row: _two_decimals(row["row_hit_rate"]),
            "by hits": lambda row: _two_decimals(row["by_hits_s"] / row["measured_s"]),
        }
        table = Table.of(cached_rows, columns | cached_columns)
        titled_tables.append(TitledTable("Steps with cached rows", "", table))
    return [*titled_tables, _constants_table(run)]


def _two_decimals(value: float) -> Value:
    return Value.of(value, lambda value: f"{value:.2f}")


def _constants_table(run: Run) -> TitledTable:
    """Return a row per TT rank and constant; names of cache constants begin with its share."""
    constant_rows = []
    for record in run.records:
        if record["status"] == "ok" and "constants" in record:
            rank = record["rank"]
            constant_rows += [
                (rank, name, seconds) for name, seconds in record["constants"].items()
            ]
            for share, constants in record["cache_constants"].items():
                prefix = f"cache of {100 * float(share):g} %"
                constant_rows += [
                    (rank, f"{prefix}: {name}", seconds) for name, seconds in constants.items()
                ]
    columns: dict[str, Column] = {
        "rank": lambda row: count_value(row[0]),
        "constant": lambda row: str(row[1]).replace("_", " "),
        "time": lambda row: time_value(row[2]),
    }
    return TitledTable("Constants of the model", "", Table.of(constant_rows, columns))


def figures(run: Run) -> list[Figure]:
    """Return the figure of predicted ÷ measured time against the measured time."""
    rows = run.frame("predictions")
    if not len(rows):
        return []
    step_curves = []
    colours = list(COLOURS.values())
    groups = rows.groupby(["cached", "skew"], sort=True)
    for group_index, ((share, skew), group) in enumerate(groups):
        name = _describe_ids(float(skew)) + (f", {100 * float(share):g} % stored" if share else "")
        step_curves.append(
            Curve(
                1e3 * group["measured_s"],
                group["predicted_s"] / group["measured_s"],
                colours[group_index % len(colours)],
                name,
                marker="s" if share else "o",
                line="",
            )
        )
    x_scale = Scale("measured ms per step", log=10)
    y_scale = Scale(
        "predicted ÷ measured", reach=(0.6, 1.4), format_tick=lambda value: f"{value:g}×"
    )
    drawing = curves(
        step_curves, x_scale, y_scale, name_position="outside", marks=[Mark(1.0, INK, DASHED)]
    )
    caption = "At the dashed line a prediction is exact. All ranks, orders of ids and batches."
    return [
        Figure(
            "predictions",
            "Predicted ÷ measured time of a step",
            caption,
            text.count(len(rows), "kind of step", "kinds of steps"),
            [Panel("Steps by their measured time", drawing, 1.8 * WIDTH)],
        )
    ]
