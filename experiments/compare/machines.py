"""Runs of one experiment on several machines, brought into one table of comparable rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config.schema import AXES
from experiments.config.sweep import SWEEP
from experiments.machine import ceilings
from experiments.machine.ceilings import Device, Roofs
from experiments.report.data import Run
from experiments.results.metrics import WEIGHT_BYTES
from experiments.results.store import POINTS, Record, has_records

# Of a record: what makes two cells the same work wherever they are done.
WORK = ("params", "features", "rows", "rows_scale", "optimizer", "lookups")
BASE_POINT = "sweep, base point"
NAN = math.nan


class NotComparable(ValueError):
    """These runs cannot be put side by side at all; the message says why and what would do."""


@dataclass(frozen=True)
class Machine:
    """One run, the device it was measured on, and what that device's memory can do."""

    label: str  # short, unique among the machines compared
    run: Run
    device: Device | None
    roofs: Roofs
    mode: str  # of the samples that are compared

    @property
    def bandwidth_gb_s(self) -> float:
        """In theory."""
        promised = self.device.bandwidth_gb_s if self.device else None
        return NAN if promised is None else promised

    @property
    def name(self) -> str:
        """The device as its run names it."""
        return str(self.run.environment.get("device", "unknown device"))


def read(paths: Sequence[Path]) -> list[Machine]:
    """Read the machines in the given order; raise NotComparable."""
    if len(paths) < 2:
        raise NotComparable("a comparison needs two runs or more, e.g. two of reports/reference/")
    for path in paths:
        if not has_records(path):
            raise NotComparable(f"{path} is no run: it has no {POINTS}")
    runs = [Run.read(path) for path in paths]
    names = list(dict.fromkeys(str(run.config.name) for run in runs))
    if len(names) > 1:
        raise NotComparable(
            f"these runs ask different questions ({', '.join(names)}): take runs of one experiment"
        )
    if not all(run.kind.comparable for run in runs):
        raise NotComparable(f"{names[0]} looks at ids only: a machine makes no difference to it")
    modes = _modes(runs)
    labels = _labels(runs)
    return [
        Machine(
            label,
            run.at(mode),
            ceilings.of_environment(run.environment),
            Roofs.of(run.environment),
            mode,
        )
        for label, run, mode in zip(labels, runs, modes, strict=True)
    ]


def _modes(runs: Sequence[Run]) -> list[str]:
    """One that all have, or else each run's own first one (and a banner says so)."""
    shared = [mode for mode in runs[0].modes if all(mode in run.modes for run in runs)]
    return [shared[0] if shared else run.modes[0] for run in runs]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Devices by their short names; runs of one device are told apart by commit, then by date."""
    names = [_short(run) for run in runs]
    for tell in (_commit, _time):
        alike = {name for name in names if names.count(name) > 1}
        told = [
            f"{name} ({tell(run)})" if name in alike else name
            for name, run in zip(names, runs, strict=True)
        ]
        if len(set(told)) > len(set(names)):
            names = told
    if len(set(names)) < len(names):
        names = [f"{name} #{number + 1}" for number, name in enumerate(names)]
    return names


def _short(run: Run) -> str:
    e = run.environment
    name = str((e.get("gpu") or {}).get("name") or e.get("device", "unknown device"))
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _commit(run: Run) -> str:
    return str((run.environment.get("git") or {}).get("sha") or "no git")[:7]


def _time(run: Run) -> str:
    return str(run.environment.get("time_utc", ""))[:16].replace("T", " ")


def role(record: Record, base: Record) -> str:
    """Where a cell stands in its experiment, whatever its sizes: a case, or a step of an axis."""
    if record["section"] != SWEEP:
        return str(record["section"])
    ours, first = record["params"], base["params"]
    changed = [f"{a}={ours[a]:g}" for a in AXES if ours[a] != first[a]]
    return "sweep, " + ", ".join(changed) if changed else BASE_POINT


def rows(machines: Sequence[Machine]) -> pd.DataFrame:
    """Return a row per machine, role, contender and phase; `same` marks equal work."""
    found = [row for number, machine in enumerate(machines) for row in _rows(number, machine)]
    frame = pd.DataFrame(found)
    if not len(frame):
        raise NotComparable("none of these runs has a time: nothing was measured")
    firsts = frame[frame["machine"] == 0].groupby("role")["work"].first()
    frame["same"] = frame["role"].map(firsts) == frame["work"]
    return frame.drop(columns="work")


def _rows(number: int, machine: Machine) -> list[dict[str, Any]]:
    records = [r for r in machine.run.records if r.get("kind", "time") == "time"]
    first = {r["cell"]: r for r in reversed(records)}
    sweep = [r for r in first.values() if r["section"] == SWEEP]
    base = next((r for r in records if r["section"] == SWEEP), sweep[0] if sweep else None)
    table = machine.run.table
    found = []
    for _, row in (table[table["status"] == "ok"] if len(table) else table).iterrows():
        record = first[row["cell"]]
        found.append(
            {
                "machine": number,
                "label": machine.label,
                "section": row["section"],
                "role": role(record, base or record),
                "work": repr([_work(record[k]) for k in WORK]),
                "contender": row["contender"],
                "arm": row["arm"],
                "name": row["label"],
                "phase": row["phase"],
                **{k: float(row[k]) for k in ("median_s", "lo_s", "hi_s", "lookups")},
                **{k: float(row[k]) for k in ("ratio", "ratio_lo", "ratio_hi")},
                **_rates(row, machine),
                "weights_bytes": row["weights_bytes"],
                "dense_bytes": row["dense_bytes"],
            }
        )
    return found


def _work(value: Any) -> Any:
    """Fields that a workload got later, at their defaults, are no difference."""
    if not isinstance(value, dict):
        return value
    return sorted((k, v) for k, v in value.items() if v not in ("", [], None, "auto", "exact"))


def _rates(row: pd.Series, machine: Machine) -> dict[str, float]:
    """Lookups per second with its interval, and distinct bytes per second against each roof."""
    gathered = machine.roofs.gather(WEIGHT_BYTES * float(row["D"]))
    moved = float(row["distinct_gb_s"])
    return {
        "rate": row["lookups"] / row["median_s"],
        "rate_lo": row["lookups"] / row["hi_s"],
        "rate_hi": row["lookups"] / row["lo_s"],
        "distinct_gb_s": moved,
        "of_theory": moved / machine.bandwidth_gb_s,
        "of_copy": moved / machine.roofs.copy_gb_s,
        "of_gather": moved / gathered,
        "gather_gb_s": gathered,
    }


@dataclass(frozen=True)
class Speedup:
    """One machine against the first, per lookup; the interval reaches from end to end of both."""

    ratio: float
    lo: float
    hi: float


def speedup(row: pd.Series, first: pd.Series) -> Speedup:
    """How many times as many lookups per second."""
    return Speedup(
        row["rate"] / first["rate"],
        row["rate_lo"] / first["rate_hi"],
        row["rate_hi"] / first["rate_lo"],
    )


def bandwidth_ratios(machine: Machine, first: Machine, row_bytes: float) -> dict[str, float]:
    """How many times the bandwidth of the first machine this one has, by each way to know it."""
    return {
        "theory": machine.bandwidth_gb_s / first.bandwidth_gb_s,
        "copy": machine.roofs.copy_gb_s / first.roofs.copy_gb_s,
        "gather": machine.roofs.gather(row_bytes) / first.roofs.gather(row_bytes),
    }


def left_out(machines: Sequence[Machine], frame: pd.DataFrame) -> list[str]:
    """Return what some machine lacks and is therefore not compared."""
    lines = []
    for name, group in frame.groupby("role", sort=False):
        there = set(group["machine"])
        missing = [m.label for i, m in enumerate(machines) if i not in there]
        if missing:
            lines.append(f"{name}: not measured on {', '.join(missing)}")
            continue
        arms = {i: set(group[group["machine"] == i]["name"]) for i in there}
        for arm in dict.fromkeys(group["name"]):
            without = [machines[i].label for i in sorted(there) if arm not in arms[i]]
            if without:
                lines.append(f"{name}, {arm}: {_why(machines, name, arm, without)}")
    if any(len(m.run.traces) for m in machines):
        lines.append("hit rates of traces through caches: the same on every machine")
    return lines


def _why(machines: Sequence[Machine], place: object, arm: str, without: Sequence[str]) -> str:
    words = []
    for machine in machines:
        if machine.label not in without:
            continue
        bad = [
            f"{r['status']}: {r['reason']}"
            for r in machine.run.failures()
            if r["label"] == arm and str(place).startswith(r["section"])
        ]
        words.append(f"no result on {machine.label}" + (f" ({bad[0]})" if bad else ""))
    return "; ".join(words)


def shared(machines: Sequence[Machine], frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of what every machine has measured."""
    counts = frame.groupby(["role", "arm", "phase"])["machine"].transform("nunique")
    kept = frame[counts == len(machines)]
    if not len(kept):
        raise NotComparable("these runs share no case, no axis value and no contender")
    return kept.reset_index(drop=True)


def sizes(machines: Sequence[Machine], place: str) -> list[str]:
    """How the work of a role differs between machines: 'B 2,048 on one, 65,536 on another'."""
    found = []
    for machine in machines:
        records = machine.run.records
        base = next((r for r in records if r["section"] == SWEEP), None)
        chosen = next(r for r in records if role(r, base or r) == place)
        found.append({**chosen["params"], **{k: chosen[k] for k in ("rows", "optimizer")}})
    names = [k for k in found[0] if len({repr(f.get(k)) for f in found}) > 1]
    lines = []
    for name in names:
        there: dict[str, list[str]] = {}
        for machine, values in zip(machines, found, strict=True):
            there.setdefault(_shown(values.get(name)), []).append(machine.label)
        shown = (f"{value} on {' and '.join(labels)}" for value, labels in there.items())
        lines.append(f"{name} = {'; '.join(shown)}")
    return lines


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Roof:
    """A bandwidth that numbers are divided by."""

    column: str  # of rows()
    words: str


ROOFS = (
    Roof("of_gather", "measured gather bandwidth"),
    Roof("of_copy", "measured copy bandwidth"),
    Roof("of_theory", "theoretical bandwidth"),
)


def roof(frame: pd.DataFrame) -> Roof | None:
    """Gathers where every machine measured them, else copies, else what the makers say."""
    return next((r for r in ROOFS if frame[r.column].notna().all()), None)


def headline(machines: Sequence[Machine], frame: pd.DataFrame) -> str:
    """Return the role that the question is about, if all have it; else the first common one."""
    wanted = str(machines[0].run.config.report.headline) or BASE_POINT
    return wanted if (frame["role"] == wanted).any() else str(frame["role"].iloc[0])
