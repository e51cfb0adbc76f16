"""The figures of ratios to the baseline: with their intervals, and as a map of speed-ups."""

from __future__ import annotations

import itertools
import math

import pandas as pd

from experiments.config.schema import AXES
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import sweep_point
from experiments.report.charts import Row, Square, forest, squares
from experiments.report.data import AXIS_NAMES, Run, select
from experiments.report.style import FASTER, SLOWER, WIDTH, Figure, Panel, colour_of
from experiments.results.metrics import MARGIN, process_logs
from experiments.results.store import Record

PANEL_PHASES = ("step", "forward")  # in the order of the panels
FULL_COLOUR_SPEEDUP = 4.0  # speed-up that has the full colour, and so has its inverse
MAX_OPACITY = 0.75  # opacity of a square with the full colour
MAX_ROWS = 44  # maximum number of rows of a panel; further ratios, in the middle, are left out


def forest_figures(run: Run) -> list[Figure]:
    """Return the figure of the ratios, a panel per phase with at most MAX_ROWS."""
    if not len(run.table):
        return []
    label = f"time ÷ {run.baseline.label}"
    rows_by_phase = {phase: forest_rows(run, phase) for phase in PANEL_PHASES}
    panels = [
        forest(phase.capitalize(), ratio_rows, label)
        for phase, ratio_rows in rows_by_phase.items()
        if ratio_rows
    ]
    if not panels:
        return []
    interval_note = "One process per cell, which gives no confidence interval. "
    if run.table["processes"].max() > 1:
        interval_note = (
            "Bars: 95 % confidence interval. Small dots: the ratio within each process. "
        )
    is_cut = any(len(_ratios_of_phase(run, phase)) > MAX_ROWS for phase in PANEL_PHASES)
    cut_note = f" Of more than {MAX_ROWS} ratios the smallest and the largest." if is_cut else ""
    has_verdicts = any(text.verdict(verdict) for verdict in run.table["verdict"])
    band_note = f"Grey: within {100 * MARGIN:g} %, too small to count. " if has_verdicts else ""
    return [
        Figure(
            "forest",
            f"Every ratio to {run.baseline.label}, with its confidence interval",
            f"{interval_note}{band_note}Filled: the interval excludes 1. Left of 1 the contender "
            f"is faster.{cut_note}",
            text.count(run.table["cell"].nunique(), "cell"),
            panels,
        )
    ]


def forest_rows(run: Run, phase: str) -> list[Row]:
    """Return one row per ratio of a phase, smallest first; of more than MAX_ROWS only both ends.

    The run must be of one mode, as everywhere in this file.
    """
    rows = _ratios_of_phase(run, phase)
    if len(rows) > MAX_ROWS:
        rows = pd.concat([rows[: MAX_ROWS // 2], rows[-(MAX_ROWS // 2) :]])
    margin = MARGIN if any(text.verdict(verdict) for verdict in rows["verdict"]) else math.nan
    ratios_of_processes = process_ratios(run, phase)

    def cell_name(row: pd.Series) -> str:
        return sweep_point(run, row) if row["section"] == SWEEP else str(row["section"])

    return [
        Row(
            f"{row['label']} · {cell_name(row)}",
            row["ratio"],
            colour_of(row["contender"]),
            row["ratio_lo"],
            row["ratio_hi"],
            dots=ratios_of_processes.get((row["cell"], row["arm"]), []),
            margin=margin,
            is_hollow=not math.isfinite(row["ratio_lo"]) or row["ratio_lo"] <= 1 <= row["ratio_hi"],
            annotation=text.times(row["ratio"]),
        )
        for _, row in rows.iterrows()
    ]


def _ratios_of_phase(run: Run, phase: str) -> pd.DataFrame:
    """Return the rows of a phase that have a ratio, smallest ratio first, without the baseline."""
    rows = select(run.table, phase=phase, status="ok")
    return rows[(rows["arm"] != run.baseline.key) & rows["ratio"].notna()].sort_values("ratio")


def process_ratios(run: Run, phase: str) -> dict[tuple[str, str], list[float]]:
    """Return a phase's ratio within each process, by (cell, arm); only for records with steps."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        if record["status"] == "ok" and record.get("samples", {}).get("step"):
            groups.setdefault((record["cell"], record["arm"]), []).append(record)
    return {
        (cell, arm): [
            math.exp(log)
            for log in process_logs(group, groups.get((cell, run.baseline.key), []), phase)
        ]
        for (cell, arm), group in groups.items()
    }


def speedup_figures(run: Run) -> list[Figure]:
    """Return the map of speed-ups: over two axes that were varied together, else by contender.

    [] without two cells in the sweep, or without a ratio.
    """
    rows = run.results_of(SWEEP)
    if not len(rows):
        return []
    rows = rows[rows["arm"] != run.baseline.key]
    if rows["cell"].nunique() < 2 or not rows["ratio"].notna().any():
        return []
    panels, grid_axes = [], _grid_axes(rows)
    y_axis, x_axis = grid_axes or ("", "")
    if grid_axes:
        fixed_axes = [axis for axis in AXES if axis not in grid_axes]
        rows = rows[(rows[fixed_axes] == rows[fixed_axes].iloc[0]).all(axis=1)].sort_values(
            [*grid_axes]
        )
        x, y, title = rows[x_axis].map(text.number), rows[y_axis].map(text.number), rows["label"]
    else:
        x, y, title = rows["label"], [sweep_point(run, row) for _, row in rows.iterrows()], ""
    for name, group in rows.assign(x=x, y=y, panel=title).groupby("panel", sort=False):
        for phase in PANEL_PHASES:
            phase_rows = group[group["phase"] == phase]
            entries = [speedup_square(row, row["x"], row["y"]) for _, row in phase_rows.iterrows()]
            drawing = squares(entries, AXIS_NAMES.get(x_axis, ""), AXIS_NAMES.get(y_axis, ""))
            height = max(2.2, 0.29 * phase_rows["y"].nunique() + 1.3)
            panel_title = f"{name}, {phase}" if grid_axes else phase.capitalize()
            panels.append(Panel(panel_title, drawing, WIDTH, height))
    return [
        Figure(
            "speedup",
            f"Speed-up over {run.baseline.label}",
            f"Time of {run.baseline.label} ÷ time of the contender, on the same batches. Blue, "
            "above 1: the contender is faster. Orange, below 1: slower. Hatched: the 95 % "
            "confidence interval includes 1 or is unknown, so there may be no difference. Words: "
            "no result, and why.",
            run.sizes(SWEEP),
            panels,
            columns=2 if len(panels) in (2, 4) else 0,
        )
    ]


def _grid_axes(rows: pd.DataFrame) -> tuple[str, str] | None:
    """Return two axes of which every pair of values was measured, or None; D and B come first."""
    varied = [axis for axis in ("D", "B", *AXES) if rows[axis].nunique() > 1]
    for pair in itertools.combinations(dict.fromkeys(varied), 2):
        if len(rows[[*pair]].drop_duplicates()) == rows[[*pair]].nunique().prod():
            return pair
    return None


def speedup_square(row: pd.Series, column_name: str, row_name: str) -> Square:
    """Return the entry of the map for a row of results: its speed-up, or why it has none."""
    if row["status"] != "ok" or not row["ratio"] > 0:
        return Square(column_name, row_name, str(row["status"]))
    speedup, low, high = 1 / row["ratio"], row["ratio_lo"], row["ratio_hi"]
    return Square(
        column_name,
        row_name,
        f"{speedup:.2f}×" if 0.1 <= speedup < 10 else text.times(speedup),
        FASTER if speedup > 1 else SLOWER,
        MAX_OPACITY * min(1.0, abs(math.log(speedup)) / math.log(FULL_COLOUR_SPEEDUP)),
        is_hatched=text.is_missing(low) or text.is_missing(high) or low <= 1 <= high,
    )
