"""The report's first sentence, made from the data: what the subject costs and what it saves."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.data import Run


def answer(run: Run) -> list[str]:
    """Sentences: numbers for the headline workload, then what forward and the sweep add."""
    cell = run.headline_cell()
    if cell is None:
        return ["No answer yet: nothing was measured before the run ended."]
    subject, baseline = _pick(run, cell, run.subject.key), _pick(run, cell, run.baseline.key)
    for arm, rows in ((run.subject, subject), (run.baseline, baseline)):
        if rows is None or rows["step"]["status"] != "ok":
            reason = "it was not among the contenders" if rows is None else rows["step"]["reason"]
            return [f"No answer: {arm.label} has no result on the headline workload ({reason})."]
    assert subject is not None
    assert baseline is not None
    return [_headline(run, subject, baseline), *_rest(run, subject)]


def _pick(run: Run, cell: str, arm: str) -> dict[str, Any] | None:
    rows = run.table[(run.table["cell"] == cell) & (run.table["arm"] == arm)]
    return {str(r["phase"]): r for _, r in rows.iterrows()} if len(rows) else None


def _headline(run: Run, subject: dict[str, Any], baseline: dict[str, Any]) -> str:
    step, base = subject["step"], baseline["step"]
    section = str(run.config.report.headline) or SWEEP
    scale = step["rows_scale"]
    scaled = f" scaled to {text.digits(100 * scale)} % of their rows" if scale < 1 else ""
    weights, base_weights = float(step["weights_bytes"]), float(base["weights_bytes"])
    return (
        f"On this machine {run.subject.label} takes {text.times(step['ratio'])} "
        f"{text.interval(step['ratio_lo'], step['ratio_hi'])} the step time of "
        f"{run.baseline.label} on {run.title(section)}{scaled} "
        f"({text.seconds(step['median_s'])} against {text.seconds(base['median_s'])}) "
        f"{_memory(weights, base_weights)}."
    )


def _memory(weights: float, base: float) -> str:
    sizes = f"({text.size(weights)} against {text.size(base)})"
    if weights == base:
        return f"with the same memory ({text.size(weights)})"
    return f"while using {text.fraction(base / weights)} of the memory {sizes}"


def _rest(run: Run, subject: dict[str, Any]) -> list[str]:
    forward = subject["forward"]
    sentences = [
        f"Forward alone takes {text.times(forward['ratio'])} "
        f"{text.interval(forward['ratio_lo'], forward['ratio_hi'])}."
    ]
    extremes = _extremes(run)
    if extremes is not None:
        low, high = extremes
        sentences.append(
            f"Across the sweep the step ratio runs from {text.times(low['ratio'])} "
            f"({where(run, low)}) to {text.times(high['ratio'])} ({where(run, high)})."
        )
    return sentences


def _extremes(run: Run) -> tuple[pd.Series, pd.Series] | None:
    rows = run.of(SWEEP)
    if not len(rows):
        return None
    usual = [int(r) for r in run.config.tt.ranks]
    chosen = rows[
        (rows["contender"] == run.subject.contender)
        & (rows["phase"] == "step")
        & (rows["status"] == "ok")
        & rows["ratio"].notna()
    ]
    if run.subject.rank:
        chosen = chosen[chosen["rank"].isin(usual)]
    if len(chosen) < 2:
        return None
    return chosen.loc[chosen["ratio"].idxmin()], chosen.loc[chosen["ratio"].idxmax()]


def where(run: Run, row: pd.Series) -> str:
    """How a sweep row differs from the base point: 'L=1'."""
    first = run.of(SWEEP).iloc[0]
    axes = [a for a in ("T", "E", "D", "B", "L", "s", "q") if row[a] != first[a]]
    shown = {a: f"{row[a]:,.0f}" if float(row[a]).is_integer() else f"{row[a]:g}" for a in axes}
    return ", ".join(f"{a}={v}" for a, v in shown.items()) or "base point"
