"""How each process by itself compares a contender with the baseline: what intervals are made of."""

from __future__ import annotations

import math

import pandas as pd

from experiments.config.schema import PHASES
from experiments.report.data import Run
from experiments.results.metrics import best_of_rounds, replicate_of
from experiments.results.store import Record
from experiments.timing.comparison import process_effect


def per_process(run: Run) -> pd.DataFrame:
    """One row per cell, contender, phase and process of a run of one mode: its ratio."""
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
