"""The report's first sentence, made from the data: what the subject costs and what it saves."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from experiments.config.schema import Mode
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.data import Run
from experiments.report.document import Tile

Rows = dict[str, dict[str, Any]]  # by phase
OPEN = "unsure"


def answer(run: Run) -> list[str]:
    """Sentences: numbers for the headline workload, then what forward and the sweep add."""
    first = run.at(run.modes[0])
    cell = first.headline_cell()
    if cell is None:
        return ["No answer yet: nothing was measured before the run ended."]
    subject, baseline = _pick(first, cell, run.subject.key), _pick(first, cell, run.baseline.key)
    for arm, rows in ((run.subject, subject), (run.baseline, baseline)):
        if rows is None or rows["step"]["status"] != "ok":
            reason = "it was not among the contenders" if rows is None else rows["step"]["reason"]
            return [f"No answer: {arm.label} has no result on the headline workload ({reason})."]
    assert subject is not None
    assert baseline is not None
    return [_headline(first, subject, baseline), *_rest(first, subject), *_other_modes(run, cell)]


def _pick(run: Run, cell: str, arm: str) -> Rows | None:
    rows = run.table[(run.table["cell"] == cell) & (run.table["arm"] == arm)]
    return {str(r["phase"]): dict(r) for _, r in rows.iterrows()} if len(rows) else None


def _headline(run: Run, subject: Rows, baseline: Rows) -> str:
    step, base = subject["step"], baseline["step"]
    section = run.headline
    scale = step["rows_scale"]
    scaled = f" scaled to {text.digits(100 * scale)} % of the rows" if scale < 1 else ""
    weights, base_weights = float(step["weights_bytes"]), float(base["weights_bytes"])
    mode = "" if step["mode"] == Mode.hot.value else f", {step['mode']},"
    return (
        f"On this machine {_cost(run, step)}{mode} on {run.title(section)}{scaled} "
        f"({text.seconds(step['median_s'])} against {text.seconds(base['median_s'])}"
        f"{_verdict(step)}) {_memory(weights, base_weights)}."
    )


def _cost(run: Run, step: dict[str, Any]) -> str:
    """State the ratio of step times; where the interval is below 1, as a speed-up."""
    ratio, interval = step["ratio"], text.interval(step["ratio_lo"], step["ratio_hi"])
    if step["ratio_hi"] < 1:
        return (
            f"{run.subject.label} is {text.times(1 / ratio)} as fast as {run.baseline.label}: it "
            f"takes {text.times(ratio)} {interval} its step time"
        )
    return (
        f"{run.subject.label} takes {text.times(ratio)} {interval} the step time of "
        f"{run.baseline.label}"
    )


def _verdict(row: dict[str, Any]) -> str:
    """State what the processes show together, or that one process shows too little."""
    word, count = text.verdict(row["verdict"]), float(row["processes"])
    if not word:
        return ""
    processes = text.count(count, "process", "processes")
    visible = float(row["visible"])
    if word == OPEN and math.isfinite(visible):
        return f"; unsure: {processes} can show differences of {100 * visible:.1f} % or more"
    return f"; {word}, {processes}"


def _memory(weights: float, base: float) -> str:
    sizes = f"({text.size(weights)} against {text.size(base)})"
    if weights == base:
        return f"with the same memory ({text.size(weights)})"
    return f"while using {text.fraction(base / weights)} of the memory {sizes}"


def _rest(run: Run, subject: Rows) -> list[str]:
    forward = subject["forward"]
    sentences = [
        f"Forward alone takes {text.times(forward['ratio'])} "
        f"{text.interval(forward['ratio_lo'], forward['ratio_hi'])}."
    ]
    extremes = _extremes(run)
    if extremes is not None:
        low, high = extremes
        sentences.append(
            f"Across the sweep the step ratio ranges from {text.times(low['ratio'])} "
            f"({where(run, low)}) to {text.times(high['ratio'])} ({where(run, high)})."
        )
    return sentences


def _other_modes(run: Run, cell: str) -> list[str]:
    """State the same ratio in the other modes."""
    found = []
    for mode in run.modes[1:]:
        rows = _pick(run.at(mode), cell, run.subject.key)
        if rows is not None and rows["step"]["status"] == "ok":
            step = rows["step"]
            interval = text.interval(step["ratio_lo"], step["ratio_hi"])
            found.append(f"In mode {mode} a step takes {text.times(step['ratio'])} {interval}.")
    return found


def tiles(run: Run) -> list[Tile]:
    """Return the numbers to remember."""
    first = run.at(run.modes[0])
    cell = first.headline_cell()
    subject = _pick(first, cell, run.subject.key) if cell else None
    if subject is None or subject["step"]["status"] != "ok":
        return []
    styles = {"slower": "bad", "faster": "good", OPEN: "open"}
    found = []
    for phase in ("step", "forward"):
        row = subject[phase]
        if not text.missing(row["ratio"]):
            word = text.verdict(row["verdict"])
            interval = text.interval(row["ratio_lo"], row["ratio_hi"])
            meaning = f"{phase} time of {run.baseline.label} {interval}{word and ': ' + word}"
            found.append(Tile(text.times(row["ratio"]), meaning, styles.get(word, "")))
    step = subject["step"]
    if step["compression"] != 1:
        found.append(Tile(f"1/{text.digits(step['compression'])}", "of the plain tables' memory"))
    rate = text.digits(step["lookups"] / step["median_s"] / 1e6)
    return [*found, Tile(f"{rate} M/s", f"lookups through {run.subject.label}")]


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
