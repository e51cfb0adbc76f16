"""The report of compressed tables: loss of quality against bytes and against step time.

A row is a method at one share of the bytes, on one data set, over all seeds. `kinds.quality.frame`
lists the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from experiments.config.sweep import PLAIN, QUALITY_METHODS
from experiments.kinds.base import CaseReport
from experiments.report import text
from experiments.report.charts import DASHED, Curve, Mark, Scale, curves
from experiments.report.data import Run, select
from experiments.report.style import COLOURS, INK, WIDTH, Figure, Panel
from experiments.report.tables import (
    Column,
    Table,
    TitledTable,
    Value,
    bytes_value,
    factor_value,
    markdown_table,
    ratio_value,
)

NOTES = (
    "Every method trains the same network on the same samples in the same order. The learning rate "
    "of its tables and the epoch are those of the least loss on validation samples; scores are of "
    "test samples that no choice has seen. AUC is the share of pairs of a positive and a negative "
    "sample that the model puts in the right order; log loss is in nats. A process is a seed of "
    "initial values and order; the samples are the same. Differences to plain tables are paired by "
    "seed; intervals are 95 % t-intervals over seeds, so other samples can differ by more.",
    "Only the large tables are made smaller, all to the same share of their bytes; the others stay "
    "plain. Bytes are those of the parameters; Adagrad doubles them in training. Served bytes are "
    "with dense tables quantised to 8 bits; all others are served as they are.",
    "Steps are timed after training, method by method in random order on the same batch, each with "
    "the network around it: forward, backward and all updates. Ratios are paired step by step; "
    "shown are the median over steps, then the mean over seeds with its 95 % interval.",
)
NEGLIGIBLE_LOSS = 0.001  # of AUC; a smaller loss counts as none
TENSOR_TRAINS = ("tt_permuted", "tt_as_given", "tt_from_plain")
MIN_EXCESS = 0.01  # of the bytes of a share; a smaller excess is not stated
_MARKERS = "osDv^P*XhpdH<>o"  # of methods, in the order of QUALITY_METHODS
# Methods whose colour in that order would be too near that of another.
_COLOURS = {
    PLAIN: INK,
    "tt_as_given": COLOURS["tbe"],
    "tt_from_plain": COLOURS["sky"],
    "planned": COLOURS["tt"],
}
HEIGHT = 4.2  # inches of a panel
METHOD_SHIFT = 0.022  # shift between methods of equal size, in powers of two
MIDDLE_METHOD = 10  # index in QUALITY_METHODS of the method that is drawn without a shift


def answer(run: Run) -> list[str]:
    """State the subject's change of AUC and step time at one share, then the best methods."""
    rows = good_results(run)
    subject_rows = select(rows, contender=run.subject.contender)
    if not len(subject_rows):
        return [f"No answer: {run.subject.label} has no result."]
    share = _headline_share(run, subject_rows)
    rows_at_share = rows[rows["share"] == share]
    subject_rows = subject_rows[subject_rows["share"] == share]
    changes = [
        f"{_signed(row['auc_change'])} on {row['data']}" for _, row in subject_rows.iterrows()
    ]
    ratios = subject_rows["ratio"]
    ratio_range = " to ".join(dict.fromkeys(map(text.times, (ratios.min(), ratios.max()))))
    method = QUALITY_METHODS[run.subject.contender]
    headline = (
        f"With {_format_share(share)} of the bytes of the large tables ({method}), the AUC changes "
        f"by {text.listed(changes)}, and a step takes {ratio_range} the time of one with plain "
        "tables."
    )
    return [
        headline,
        _best_sentence(rows_at_share),
        *_smallest_share_sentence(rows),
        *_order_sentence(rows_at_share),
    ]


def case_report(run: Run) -> CaseReport:
    """Report models trained as a case of a run whose question is another one."""
    return CaseReport(_case_sentence(run), tables(run), figures(run)[:1])


def _case_sentence(run: Run) -> list[str]:
    """State the AUC of the first model with tensor trains; [] without one."""
    train_rows = select(good_results(run), contender=TENSOR_TRAINS[0])
    return [
        f"Trained on {row['data']} data with tensor trains of {_format_share(row['share'])} of the "
        f"bytes of its large tables, a model has an AUC of {row['auc']:.4f}, {_change(row)} from "
        "plain."
        for _, row in train_rows.head(1).iterrows()
    ]


def good_results(run: Run) -> pd.DataFrame:
    """Return the methods that have a result."""
    return select(run.frame("quality"), status="ok")


def _headline_share(run: Run, rows: pd.DataFrame) -> float:
    """Return the measured share of bytes nearest to report.subject_cache; 1 for plain only."""
    headline_share = float(run.config.report.subject_cache)
    shares = rows.loc[rows["contender"] != PLAIN, "share"].unique()
    return float(min(shares, key=lambda share: abs(math.log(share / headline_share)), default=1.0))


def _best_sentence(rows_at_share: pd.DataFrame) -> str:
    """Name the method with the highest AUC on each data set, of those with a result."""
    best_rows = rows_at_share.loc[rows_at_share.groupby("data", sort=False)["auc"].idxmax()]
    names = [
        f"on {row['data']} {QUALITY_METHODS[str(row['contender'])]}, {_change(row)}"
        for _, row in best_rows.iterrows()
    ]
    num_methods = text.count(rows_at_share["contender"].nunique(), "method")
    return f"Best of {num_methods}: {'; '.join(names)}."


def _format_share(share: float) -> str:
    """Return a share as a fraction, e.g. '1/16'."""
    return f"1/{1 / share:g}"


def _change(row: pd.Series) -> str:
    """Return the change of AUC with its interval over seeds."""
    change = _signed(row["auc_change"])
    if text.is_missing(row["auc_change_lo"]):
        return f"{change} [one seed]"
    return f"{change} [{_signed(row['auc_change_lo'])}, {_signed(row['auc_change_hi'])}]"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _smallest_share_sentence(rows: pd.DataFrame) -> list[str]:
    """State the smallest share per data set that loses at most NEGLIGIBLE_LOSS of AUC."""
    smallest_by_data = []
    for data_name, group in rows.groupby("data", sort=False):
        rows_without_loss = group[
            (group["contender"] != PLAIN) & (group["auc_change"] >= -NEGLIGIBLE_LOSS)
        ]
        train_rows = rows_without_loss[rows_without_loss["contender"].isin(TENSOR_TRAINS)]
        smallest = []
        for name, method_rows in (
            ("any method", rows_without_loss),
            ("a tensor train", train_rows),
        ):
            if len(method_rows):
                row = method_rows.loc[method_rows["share"].idxmin()]
                method = QUALITY_METHODS[str(row["contender"])]
                smallest.append(f"{name} down to {_format_share(row['share'])} ({method})")
        smallest_by_data.append(f"{data_name}: {', '.join(smallest) or 'no method at any share'}")
    if not smallest_by_data:
        return []
    listed_shares = "; on ".join(smallest_by_data)
    return [f"Within {NEGLIGIBLE_LOSS} of the AUC of plain tables stay, on {listed_shares}."]


def _order_sentence(rows: pd.DataFrame) -> list[str]:
    """Compare tensor trains with permuted ids and with ids as given."""
    scores = rows.pivot_table(index="data", columns="contender", values="auc", sort=False)
    if not {"tt_permuted", "tt_as_given"} <= set(scores):
        return []
    gains = (scores["tt_permuted"] - scores["tt_as_given"]).dropna()
    changes = ", ".join(f"{_signed(gain)} on {data_name}" for data_name, gain in gains.items())
    return [f"Permuting the ids of a tensor train changes the AUC by {changes}."] if changes else []


def _results_table(rows: pd.DataFrame) -> Table:
    """Return a row per method and share."""
    columns: dict[str, Column] = {
        "tables": lambda row: QUALITY_METHODS.get(str(row["contender"]), str(row["contender"])),
        "share": lambda row: Value(_format_share(row["share"]), row["share"]),
        "AUC": lambda row: Value.of(row["auc"], lambda value: f"{value:.4f}"),
        "change of AUC": lambda row: _change_value(row, "auc_change"),
        "change of log loss": lambda row: _change_value(row, "log_loss_change"),
    }
    if not rows["oracle_auc"].isna().all():
        columns["above best log loss"] = lambda row: Value.of(
            row["excess_log_loss"], lambda value: f"{value:.4f}"
        )
    columns |= {
        "bytes": lambda row: bytes_value(row["bytes"]),
        "smaller": lambda row: factor_value(row["times_smaller"]),
        "served": lambda row: bytes_value(row["served_bytes"]),
        "step ÷ plain": lambda row: ratio_value(row, is_baseline=row["contender"] == PLAIN),
        "rates chosen": lambda row: str(row["rates"]),
    }
    return Table.of(rows, columns, num_label_columns=2)


def _change_value(row: pd.Series, name: str) -> Value:
    """Return the entry of a change with its interval; 0 for plain tables."""
    if row["contender"] == PLAIN:
        return Value("0", 0.0)
    low, high = row[f"{name}_lo"], row[f"{name}_hi"]
    interval = "" if text.is_missing(low) else f" [{_signed(low)}, {_signed(high)}]"
    return Value.of(row[name], lambda value: _signed(value) + interval)


def readme_lines(run: Run, command: str, link: str) -> list[str] | None:
    """Return lines of Markdown: the change of AUC of each method at the headline's share.

    None if no method has a result.
    """
    rows = good_results(run)
    if rows.empty:
        return None
    share = _headline_share(run, rows)
    rows_at_share = rows[rows["share"] == share]
    names = list(dict.fromkeys(rows["data"]))
    plain = rows[rows["contender"] == PLAIN].set_index("data")
    lines = [["plain, AUC", *(f"{plain.loc[name, 'auc']:.4f}" for name in names), "1"]]
    for method, group in rows_at_share.groupby("contender", sort=False):
        by_data = group.set_index("data")
        method_rows = [by_data.loc[name] if name in by_data.index else None for name in names]
        changes = [text.DASH if row is None else _change(row) for row in method_rows]
        steps = [text.DASH if row is None else text.times(row["ratio"]) for row in method_rows]
        lines.append([QUALITY_METHODS[str(method)], *changes, " · ".join(steps)])
    seeds = text.count(int(rows["seeds"].max()), "seed")
    return [
        f"{command}:",
        "",
        f"Change of AUC with large tables of {_format_share(share)} of their bytes, mean of "
        f"{seeds} with its 95 % interval, and the time of a step ÷ plain on each."
        + excess_sentence(rows_at_share),
        "",
        *markdown_table(["tables", *names, "step"], lines).splitlines(),
        "",
        link,
    ]


def excess_sentence(rows_at_share: pd.DataFrame) -> str:
    """Return a sentence about the methods that had more than their share of bytes; "" if none."""
    factors = 1 / (rows_at_share["times_smaller"] * rows_at_share["share"])
    factors = factors[factors > 1 + MIN_EXCESS]
    parts = []
    for method, group in factors.groupby(rows_at_share["contender"], sort=False):
        ends = dict.fromkeys(f"{100 * (end - 1):.0f} %" for end in (group.min(), group.max()))
        parts.append(f"{QUALITY_METHODS[str(method)]}, by {' to '.join(ends)}")
    return f" More than these bytes had: {'; '.join(parts)}." if parts else ""


def tables(run: Run) -> Sequence[TitledTable]:
    """Return the table of data sets, then a table of results per data set."""
    records = {record["data"]: record for record in run.records if "samples_of" in record}
    columns: dict[str, Column] = {
        "data": lambda record: str(record["data"]),
        "what": lambda record: str(record["title"]),
        "samples": lambda record: f"{sum(record['samples_of'].values()):,}",
        "of these test": lambda record: f"{record['samples_of']['test']:,}",
        "positive": lambda record: text.percent(record["positive"]),
        "fields": lambda record: str(record["features"]),
        "large tables": lambda record: str(record["large_tables"]),
        "their bytes": lambda record: bytes_value(record["large_bytes"]),
        "best AUC": lambda record: Value.of(record["oracle_auc"], lambda value: f"{value:.4f}"),
    }
    if not records:
        return []
    paragraph = "Best AUC: of the probabilities that drew the labels, where they are known."
    table = Table.of(list(records.values()), columns)
    titled_tables = [TitledTable("Data that models are trained on", paragraph, table)]
    rows = run.frame("quality")
    for name, record in records.items():
        paragraph = f"{text.capitalise(record['title'])}."
        table = _results_table(rows[rows["data"] == name])
        titled_tables.append(TitledTable(f"Models trained on {name}", paragraph, table))
    return titled_tables


def figures(run: Run) -> list[Figure]:
    """Return the figure of the change of AUC by bytes, and that by the time of a step."""
    rows = good_results(run)
    if not len(rows):
        return []
    size_scale = Scale(
        "times smaller (large tables)", log=2, format_tick=lambda value: f"{value:g}×"
    )
    time_scale = Scale("time of a step ÷ plain", format_tick=lambda value: f"{value:g}×")
    share = _headline_share(run, rows)
    rows_at_share = rows[(rows["share"] == share) | (rows["contender"] == PLAIN)]
    mark_note = "Mean over seeds with its 95 % interval, paired with plain tables (dashed)."
    return [
        Figure(
            "quality",
            "What smaller tables lose",
            f"{mark_note} Up and to the right is better.",
            "",
            _panels(rows, "times_smaller", size_scale),
            columns=2,
        ),
        Figure(
            "quality_time",
            f"What is lost at which step time, with {_format_share(share)} of the bytes",
            f"{mark_note} Up and to the left is better.",
            "",
            _panels(rows_at_share, "ratio", time_scale),
            columns=2,
        ),
    ]


def _panels(rows: pd.DataFrame, column: str, scale: Scale) -> list[Panel]:
    """Return a panel per data set: the change of AUC against a column."""
    panels = []
    for data_name, group in rows.groupby("data", sort=False):
        # The panel cuts off long intervals: with few seeds some are far wider than all effects.
        low, high = group["auc_change"].min(), group["auc_change"].max()
        margin = 0.5 * (high - low) or NEGLIGIBLE_LOSS
        change_scale = Scale(
            "change of AUC", low=low - margin, high=high + margin, format_tick=_format_change
        )
        lines = [
            _curve(str(method), method_rows, column)
            for method, method_rows in group.groupby("contender", sort=False)
        ]
        drawing = curves(
            lines, scale, change_scale, name_position="outside", marks=[Mark(0.0, INK, DASHED)]
        )
        panels.append(Panel(text.capitalise(str(data_name)), drawing, 1.7 * WIDTH, 1.1 * HEIGHT))
    return panels


def _format_change(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:+.3g}".replace("-", "−")


def _curve(method: str, rows: pd.DataFrame, column: str) -> Curve:
    """Return the curve of a method: change of AUC against a column, with intervals."""
    method_index = list(QUALITY_METHODS).index(method)
    rows = rows.sort_values(column)
    low, high = rows["auc_change_lo"], rows["auc_change_hi"]
    has_intervals = not low.isna().any()
    x = rows[column]
    if column == "times_smaller" and method != PLAIN:
        x = x * 2 ** (METHOD_SHIFT * (method_index - MIDDLE_METHOD))
    return Curve(
        x,
        rows["auc_change"],
        _COLOURS.get(method, list(COLOURS.values())[method_index]),
        QUALITY_METHODS[method],
        marker=_MARKERS[method_index % len(_MARKERS)],
        line="-" if column == "times_smaller" else "",
        width=1.2,
        size=5.0,
        low=low if has_intervals else None,
        high=high if has_intervals else None,
    )
