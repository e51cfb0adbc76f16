"""Ratios to the baseline: every one with its interval, and speed-ups as a map."""

from __future__ import annotations

import math

import pandas as pd

from experiments.config.schema import AXES, PHASES
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import where
from experiments.report.charts import MOST_ROWS, Row, Square, forest, squares
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import FASTER, SLOWER, WIDTH, Figure, Panel, colour_of
from experiments.results.metrics import MARGIN, best_of_rounds, replicate_of
from experiments.results.store import Record
from experiments.timing.statistics import process_effect

MODEL_PHASES = ("step", "forward")  # what a model pays for first


def per_process(run: Run) -> pd.DataFrame:
    """Return the ratio of every cell, contender, phase and process; the run is of one mode."""
    good = {
        (r["cell"], r["arm"], replicate_of(r)): r
        for r in run.records
        if r["status"] == "ok" and r.get("samples", {}).get("step")
    }
    rows = []
    for (cell, arm, replicate), record in good.items():
        base = good.get((cell, run.baseline.key, replicate))
        if base is None or arm == run.baseline.key:
            continue
        for phase in PHASES:
            ratio = _ratio(record, base, phase)
            if math.isfinite(ratio):
                rows.append((cell, arm, phase, replicate, ratio))
    return pd.DataFrame(rows, columns=["cell", "arm", "phase", "replicate", "ratio"])


def _ratio(record: Record, base: Record, phase: str) -> float:
    own, other = best_of_rounds(record, phase), best_of_rounds(base, phase)
    return math.exp(process_effect(own, other)) if own.keys() & other.keys() else math.nan


def forest_figures(run: Run) -> list[Figure]:
    """Return the figure of all ratios, a panel per phase."""
    if not len(run.table):
        return []
    panels = []
    for phase in MODEL_PHASES:
        lines = forest_rows(run, phase)
        if lines:
            panels.append(forest(phase.capitalize(), lines, f"time ÷ {run.baseline.label}"))
    several = run.table["processes"].max() > 1
    dots = (
        "Small dots: the ratio within each process. "
        if several
        else "One process per cell: the interval covers the noise within that process only. "
    )
    judged = any(text.verdict(v) for v in run.table["verdict"])
    band = f"Grey: within {100 * MARGIN:g} %, too small to count. " if judged else ""
    return (
        [
            Figure(
                "forest",
                f"Every ratio to {run.baseline.label}, with its confidence interval",
                f"Bars: 95 % confidence interval. {dots}{band}Filled: the interval excludes 1. "
                "Left of 1 the contender is faster.",
                f"{run.table['cell'].nunique()} cells",
                panels,
            )
        ]
        if panels
        else []
    )


def forest_rows(run: Run, phase: str) -> list[Row]:
    """Return the ratios of a phase, smallest first; of many, the smallest and the largest."""
    rows = run.table[
        (run.table["phase"] == phase)
        & (run.table["arm"] != run.baseline.key)
        & (run.table["status"] == "ok")
        & run.table["ratio"].notna()
    ].sort_values("ratio")
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = rows.iloc[[*range(half), *range(len(rows) - half, len(rows))]]
    margin = MARGIN if any(text.verdict(v) for v in rows["verdict"]) else math.nan
    every = per_process(run)
    own = {
        key: list(part["ratio"])
        for key, part in every[every["phase"] == phase].groupby(["cell", "arm"])
    }
    found = []
    for _, row in rows.iterrows():
        lo, hi = float(row["ratio_lo"]), float(row["ratio_hi"])
        place = where(run, row) if row["section"] == SWEEP else str(row["section"])
        found.append(
            Row(
                f"{row['label']} · {place}",
                float(row["ratio"]),
                colour_of(str(row["contender"])),
                lo,
                hi,
                dots=own.get((row["cell"], row["arm"]), []),
                margin=margin,
                hollow=not math.isfinite(lo) or lo <= 1 <= hi,
                words=text.times(row["ratio"]),
            )
        )
    return found


STRONGEST = 4.0  # a speed-up of 4, or of a quarter, has the full colour
OPACITY = 0.75
LEAST_CELLS = 2


def speedup_figures(run: Run) -> list[Figure]:
    """Return the map of speed-ups: two axes that were varied together, else points by contender."""
    rows = run.of(SWEEP)
    if not len(rows):
        return []
    rows = rows[rows["arm"] != run.baseline.key]
    if rows["cell"].nunique() < LEAST_CELLS or not rows["ratio"].notna().any():
        return []
    pair = _grid(rows)
    panels = _by_axes(rows, pair) if pair else _by_points(run, rows)
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


def _grid(rows: pd.DataFrame) -> tuple[str, str] | None:
    """Return two axes of which every combination was measured; D and B first."""
    many = [a for a in AXES if rows[a].nunique() > 1]
    order = [a for a in ("D", "B") if a in many] + [a for a in many if a not in ("D", "B")]
    for first in order:
        for second in order[order.index(first) + 1 :]:
            met = len(rows[[first, second]].drop_duplicates())
            if met == rows[first].nunique() * rows[second].nunique():
                return first, second
    return None


def _by_axes(rows: pd.DataFrame, pair: tuple[str, str]) -> list[Panel]:
    down, across = pair
    others = [a for a in AXES if a not in pair]
    rows = rows[(rows[others] == rows[others].iloc[0]).all(axis=1)]
    panels = []
    cases = [(label, phase) for label in dict.fromkeys(rows["label"]) for phase in MODEL_PHASES]
    for label, phase in cases:
        own = rows[(rows["label"] == label) & (rows["phase"] == phase)]
        own = own.sort_values([down, across])
        entries = [
            speedup_square(r, text.number(r[across]), text.number(r[down]))
            for _, r in own.iterrows()
        ]
        panels.append(_map(f"{label}, {phase}", entries, AXIS_NAMES[across], AXIS_NAMES[down]))
    return panels


def _by_points(run: Run, rows: pd.DataFrame) -> list[Panel]:
    panels = []
    for phase in MODEL_PHASES:
        own = rows[rows["phase"] == phase]
        entries = [speedup_square(r, str(r["label"]), where(run, r)) for _, r in own.iterrows()]
        panels.append(_map(phase.capitalize(), entries, "", ""))
    return panels


def _map(title: str, entries: list[Square], xlabel: str, ylabel: str) -> Panel:
    height = max(2.2, 0.29 * len({entry.row for entry in entries}) + 1.3)
    return Panel(title, squares(entries, xlabel, ylabel), WIDTH, height)


def speedup_square(row: pd.Series, column: str, line: str) -> Square:
    """Return a contender's speed-up as an entry of the map; without a result, its status."""
    if row["status"] != "ok" or not row["ratio"] > 0:
        return Square(column, line, str(row["status"]))
    speedup, low, high = 1 / row["ratio"], row["ratio_lo"], row["ratio_hi"]
    return Square(
        column,
        line,
        f"{speedup:.2f}×" if 0.1 <= speedup < 10 else text.times(speedup),
        FASTER if speedup > 1 else SLOWER,
        OPACITY * min(1.0, abs(math.log(speedup)) / math.log(STRONGEST)),
        hatched=text.missing(low) or text.missing(high) or low <= 1 <= high,
    )
