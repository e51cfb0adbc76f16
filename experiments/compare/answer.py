"""The sentences of a comparison: what a machine gains, and how much of that is bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from experiments.compare import machines as table
from experiments.compare.machines import Machine, Speedup
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.results.metrics import WEIGHT_BYTES

WORDS = {
    "gather": "its memory gathers {} as much",
    "copy": "its memory copies {} as much",
    "theory": "its makers promise {} the bandwidth",
}


def sentences(machines: Sequence[Machine], frame: pd.DataFrame) -> list[str]:
    """Of the subject, on the headline's work: each machine against the first; then the baseline."""
    place = table.headline(machines, frame)
    arms = list(dict.fromkeys(frame[frame["role"] == place]["arm"]))
    subject = machines[0].run.subject.key
    chosen = subject if subject in arms else arms[0]
    found = [_gain(machines, frame, place, chosen, number) for number in range(1, len(machines))]
    baseline = machines[0].run.baseline.key
    if baseline in arms and baseline != chosen:
        found.append(_standing(machines, frame, place, chosen))
    return found


def _pick(frame: pd.DataFrame, place: str, arm: str, machine: int) -> pd.Series:
    rows = frame[(frame["role"] == place) & (frame["arm"] == arm) & (frame["phase"] == "step")]
    return rows[rows["machine"] == machine].iloc[0]


def _gain(
    machines: Sequence[Machine], frame: pd.DataFrame, place: str, arm: str, number: int
) -> str:
    row, first = _pick(frame, place, arm, number), _pick(frame, place, arm, 0)
    found = table.speedup(row, first)
    machine, base = machines[number], machines[0]
    title = "the sweep's base point" if place.startswith(SWEEP) else base.run.title(place)
    sized = "" if row["same"] else ", each with sizes of its own"
    why = _because(machine, base) + _share(row, first)
    if found.lo <= 1 <= found.hi:
        why += "; the interval contains 1, so no difference is shown"
    elif not math.isfinite(found.lo):
        why += "; from one process of a machine, which gives no interval"
    return (
        f"On {title}{sized}, a step of {row['name']} does {times(found)} the lookups per second "
        f"on {machine.label} that it does on {base.label}{why}."
    )


def times(found: Speedup) -> str:
    """'5.2× [5.0, 5.4]'."""
    shown = text.times(found.ratio)
    if math.isfinite(found.lo) and math.isfinite(found.hi):
        shown += f" {text.interval(found.lo, found.hi)}"
    return shown


def _because(machine: Machine, base: Machine) -> str:
    """The best known ratio of bandwidths."""
    width = WEIGHT_BYTES * float(base.run.config.workload.D)
    ratios = table.bandwidth_ratios(machine, base, width)
    for kind in ("gather", "copy", "theory"):
        if math.isfinite(ratios[kind]):
            return "; " + WORDS[kind].format(text.times(ratios[kind]))
    return "; no bandwidth is known of both"


def _share(row: pd.Series, first: pd.Series) -> str:
    for roof in table.ROOFS:
        here, there = float(row[roof.column]), float(first[roof.column])
        if math.isfinite(here) and math.isfinite(there):
            return (
                f", and the step uses {text.digits(100 * here)} % of the {roof.words} "
                f"against {text.digits(100 * there)} %"
            )
    return ""


def _standing(machines: Sequence[Machine], frame: pd.DataFrame, place: str, arm: str) -> str:
    """Whether contender against baseline is the same question on every machine."""
    parts = []
    for number, machine in enumerate(machines):
        row = _pick(frame, place, arm, number)
        shown = f"{text.times(row['ratio'])} {text.interval(row['ratio_lo'], row['ratio_hi'])}"
        parts.append(f"{shown} on {machine.label}")
    label = machines[0].run.baseline.label
    name = _pick(frame, place, arm, 0)["name"]
    return f"The time of {name} as a multiple of {label}'s is {', '.join(parts)}."
