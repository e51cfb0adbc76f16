"""The answer of a report on timed contenders: the subject's time and memory ÷ the baseline's."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from experiments.config.schema import AXES, Mode
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.data import Run, select
from experiments.report.document import Tile

RowByPhase = dict[str, dict[str, Any]]
"""The rows of an arm in a cell and mode, by phase; `results.metrics.frame` names their columns."""
TORCH_BAGS, DENSE_TABLES = "torch", "tbe"  # contenders: nn.EmbeddingBag, emblib's dense tables
TILE_STYLES = {"slower": "bad", "faster": "good", "unsure": "open"}  # by verdict


def answer(run: Run) -> list[str]:
    """Return sentences about a run of any modes: on the headline workload, forward, sweep, modes.

    The first sentence has the answer. Without a result of the subject or the baseline on the
    headline workload, return one sentence that says why.
    """
    main_run = run.in_mode(run.modes[0])
    cell = main_run.headline_cell()
    if cell is None:
        return ["No answer yet: nothing was measured before the run ended."]
    subject = _rows_by_phase(main_run, cell, run.subject.key)
    baseline = _rows_by_phase(main_run, cell, run.baseline.key)
    for arm, rows in ((run.subject, subject), (run.baseline, baseline)):
        if not rows or rows["step"]["status"] != "ok":
            reason = rows["step"]["reason"] if rows else _absence(main_run, arm.contender)
            return [f"No answer: {arm.label} has no result on the headline workload ({reason})."]
    sentences = [_headline_sentence(main_run, subject["step"], baseline["step"])]
    if torch_sentence := _torch_sentence(main_run, cell):
        sentences[0] += f" {torch_sentence}"
    sentences.append(f"Forward alone takes {text.ratio(subject['forward'])}.")
    steps = _swept_steps(main_run)
    if len(steps) > 1:
        lowest, highest = (
            steps.loc[index] for index in (steps["ratio"].idxmin(), steps["ratio"].idxmax())
        )
        sentences.append(
            f"Across the sweep the step ratio ranges from {text.times(lowest['ratio'])} "
            f"({sweep_point(main_run, lowest)}) to {text.times(highest['ratio'])} "
            f"({sweep_point(main_run, highest)})."
        )
    for mode in run.modes[1:]:
        rows = _rows_by_phase(run.in_mode(mode), cell, run.subject.key)
        if rows and rows["step"]["status"] == "ok":
            sentences.append(f"In mode {mode} a step takes {text.ratio(rows['step'])}.")
    return sentences


def _absence(run: Run, contender: str) -> str:
    """Return why the headline workload has no record of a contender."""
    case = run.config.get("cases", {}).get(run.headline)
    contenders = (run.config if case is None else case).contenders
    return "it was not measured" if contender in contenders else "it was not among the contenders"


def _rows_by_phase(run: Run, cell: str, arm: str) -> RowByPhase:
    """Return the rows of an arm in a cell; the run must be of one mode."""
    rows = select(run.table, cell=cell, arm=arm)
    return {str(row["phase"]): row for row in rows.to_dict("records")}


def _headline_sentence(run: Run, step: dict[str, Any], baseline_step: dict[str, Any]) -> str:
    """State what a step of the subject saves and costs on the headline workload.

    `step` and `baseline_step` are the rows of their steps in `run.table`.
    """
    subject, baseline, ratio = run.subject.label, run.baseline.label, text.ratio(step)
    weights_bytes, baseline_bytes = step["weights_bytes"], baseline_step["weights_bytes"]
    if weights_bytes == baseline_bytes:
        name, saving = subject, ""
        memory_note = f" with the same memory ({text.size(weights_bytes)})"
    else:
        compression = baseline_bytes / weights_bytes
        sizes = f"{text.size(weights_bytes)} against {text.size(baseline_bytes)}"
        memory = f"{text.fraction(compression)} {'of ' * (compression >= 1)}the memory"
        name, saving = "it", f"{subject} needs {memory} of {baseline} ({sizes}); "
        memory_note = ""
    cost = f"{name} takes {ratio} the step time of {baseline}"
    if step["ratio_hi"] < 1:
        faster = f"{name} is {text.times(1 / step['ratio'])} as fast as {baseline}"
        cost = f"{faster}: it takes {ratio} its step time"
    scale = step["rows_scale"]
    scale_note = f" scaled to {text.digits(100 * scale)} % of the rows" if scale < 1 else ""
    times = f"{text.seconds(step['median_s'])} against {text.seconds(baseline_step['median_s'])}"
    mode_note = "" if step["mode"] == Mode.hot.value else f", mode {step['mode']}"
    notes = f"({times}{mode_note}{_verdict_note(step)}){memory_note}"
    return f"On {run.title(run.headline)}{scale_note}, {saving}{cost} {notes}."


def _verdict_note(step: dict[str, Any]) -> str:
    """Return "; <verdict>, <n> processes" for a row of a step; "" for too few processes."""
    verdict = text.verdict(step["verdict"])
    processes = text.count(step["processes"], "process", "processes")
    if verdict == "unsure" and math.isfinite(step["visible"]):
        percent = f"{100 * step['visible']:.1f} %"
        return f"; unsure: {processes} can show differences of {percent} or more"
    return f"; {verdict}, {processes}" if verdict else ""


def _torch_sentence(run: Run, cell: str) -> str:
    """Compare PyTorch's tables, a further contender, with the baseline; "" without a ratio."""
    rows = _rows_by_phase(run, cell, TORCH_BAGS)
    if (
        TORCH_BAGS in (run.subject.key, run.baseline.key)
        or not rows
        or rows["step"]["status"] != "ok"
    ):
        return ""
    step, baseline, torch = rows["step"], run.baseline.label, rows["step"]["label"]
    if text.is_missing(step["ratio"]):
        return ""
    comparison = f"{torch} takes {text.ratio(step)} the step time of {baseline}"
    if step["ratio"] > 1 and run.baseline.contender == DENSE_TABLES:
        comparison = f"{baseline} is {text.ratio(step)} as fast as {torch}"
    return f"{comparison} ({text.seconds(step['median_s'])})."


def _swept_steps(run: Run) -> pd.DataFrame:
    """Return the sweep's steps of the subject's contender, at the ranks of the configuration."""
    rows = select(run.results_of(SWEEP), contender=run.subject.contender, phase="step", status="ok")
    rows = rows[rows["ratio"].notna()] if len(rows) else rows
    if len(rows) and run.subject.rank:
        rows = rows[rows["rank"].isin([int(rank) for rank in run.config.tt.ranks])]
    return rows


def sweep_point(run: Run, row: pd.Series) -> str:
    """Return how a row of the sweep differs from the base point, e.g. "L=1" or "base point".

    The run's `table` must have rows of the sweep.
    """
    base_point = run.results_of(SWEEP).iloc[0]
    changed_axes = [axis for axis in AXES if row[axis] != base_point[axis]]
    return text.point(row, changed_axes) or "base point"


def tiles(run: Run) -> list[Tile]:
    """Return the page's tiles: memory, time ÷ baseline of step and forward, lookups per second.

    [] if the subject has no result on the headline workload.
    """
    main_run = run.in_mode(run.modes[0])
    cell = main_run.headline_cell()
    subject = _rows_by_phase(main_run, cell, run.subject.key) if cell else {}
    if not subject or subject["step"]["status"] != "ok":
        return []
    step, answer_tiles = subject["step"], []
    if step["compression"] != 1:
        answer_tiles.append(Tile(text.fraction(step["compression"]), "of the plain tables' memory"))
    for phase in ("step", "forward"):
        row = subject[phase]
        if not text.is_missing(row["ratio"]):
            verdict = text.verdict(row["verdict"])
            interval = text.interval(row["ratio_lo"], row["ratio_hi"])
            meaning = f"{phase} time of {run.baseline.label} {interval}{verdict and ': ' + verdict}"
            answer_tiles.append(
                Tile(text.times(row["ratio"]), meaning, TILE_STYLES.get(verdict, ""))
            )
    rate = text.digits(step["lookups"] / step["median_s"] / 1e6)
    return [*answer_tiles, Tile(f"{rate} M/s", f"lookups through {run.subject.label}")]
