"""Runs of an experiment on several machines, joined into a table of measured points.

Points of several runs are compared if they have the same contender and the same *role*: the name of
a case, or the position of a point in the sweep. Ratios between machines are not paired, see
`Comparison`.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.bundle import archive
from experiments.config.schema import AXES, UsageError
from experiments.config.sweep import SWEEP, exact
from experiments.kinds.base import TIME
from experiments.machine import ceilings
from experiments.machine.ceilings import Device, MeasuredCeilings
from experiments.report.data import Run
from experiments.results.metrics import WEIGHT_BYTES
from experiments.results.store import POINTS, Record, has_records, read_config, runs_in

# Fields of a record; cells with equal values are the same work.
WORK_FIELDS = ("params", "features", "rows", "rows_scale", "optimizer", "lookups")
CONFIG = "config.yaml"
BASE_POINT = "sweep, base point"
POINT_KEYS = ["role", "arm", "phase"]  # columns that identify a point on a machine
# Names of bandwidths, by column of bytes per second ÷ that bandwidth; the most informative first.
CEILINGS = {
    "of_gather": "measured gather bandwidth",
    "of_copy": "measured copy bandwidth",
    "of_theory": "theoretical bandwidth",
}


class NotComparable(ValueError):
    """Runs cannot be compared; the message has the reason."""


@dataclass(frozen=True)
class Machine:
    """A run and its machine.

    Attributes:
        label: short name, unique among the compared machines.
        run: the run, in `mode`.
        device: entry of conf/hardware; None if unknown.
        measured_ceilings: bandwidths and rates that the run measured of its machine.
        mode: mode of the compared samples.
        cells: role, work and sizes per cell.
    """

    label: str
    run: Run
    device: Device | None
    measured_ceilings: MeasuredCeilings
    mode: str
    cells: pd.DataFrame

    @property
    def name(self) -> str:
        """Return the name of the device in the run's environment."""
        return str(self.run.environment.get("device", "unknown device"))

    def bandwidths(self, row_bytes: float) -> dict[str, float]:
        """Return the bandwidths in GB/s; an unknown one is nan.

        Keys: "theory", as the maker states it; "copy"; and "gather", of rows of `row_bytes` bytes.
        """
        theory = self.device.bandwidth_gb_s if self.device else None
        return {
            "theory": math.nan if theory is None else theory,
            "copy": self.measured_ceilings.copy_gb_s,
            "gather": self.measured_ceilings.gather(row_bytes),
        }


@dataclass(frozen=True)
class Comparison:
    """The machines, and the points that all of them measured.

    Attributes:
        machines: machines; the others are compared with the first.
        points: one row per machine, role, contender and phase. `machine` is an index into
            `machines`. A role is the position of a cell in its experiment, whatever its sizes.
            `rate` is lookups per second; `of_*` are shares of CEILINGS, with 1 for the whole
            bandwidth. `same` is True if the work is equal to the first machine's. `gain` is `rate`
            ÷ the rate of the first machine. `gain_lo` and `gain_hi` are its extremes if both rates
            may be anywhere in their intervals, or nan without intervals. Nothing is paired, because
            machines cannot take turns.
        exclusions: sentences about points that are not compared, and why.
    """

    machines: Sequence[Machine]
    points: pd.DataFrame
    exclusions: Sequence[str]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Comparison:
        """Read runs and match their points; the first run is the base.

        Raises:
            NotComparable: the runs have no point in common, or `read_machines` refuses them.
            UsageError: a file of a run is damaged.
        """
        machines = read_machines(paths)
        points = measured_points(machines)
        is_common = points.groupby(POINT_KEYS)["machine"].transform("nunique") == len(machines)
        if not is_common.any():
            raise NotComparable("these runs share no case, no axis value and no contender")
        common_points = points[is_common].reset_index(drop=True)
        return cls(machines, common_points, exclusion_sentences(machines, points))

    @property
    def headline(self) -> str:
        """Return the role of the report's headline if all machines have it, else the first role."""
        headline_role = str(self.machines[0].run.config.report.headline) or BASE_POINT
        roles = self.points["role"]
        return headline_role if (roles == headline_role).any() else str(roles.iloc[0])

    def bandwidth_ratios(self, machine_index: int) -> dict[str, float]:
        """Return the bandwidths of a machine ÷ the first machine's; nan if unknown.

        Keys are those of `Machine.bandwidths`; gathers are of rows of the first run's base size.
        """
        row_bytes = WEIGHT_BYTES * float(self.machines[0].run.config.workload.D)
        first, other = (self.machines[i].bandwidths(row_bytes) for i in (0, machine_index))
        return {kind: other[kind] / first[kind] for kind in first}

    def sizes(self, role: str) -> str:
        """Return a role's sizes that differ, such as "B = 2,048 on A; 65,536 on B".

        "" if all are equal.
        """
        sizes = [
            machine.cells[machine.cells["role"] == role].iloc[0]["sizes"]
            for machine in self.machines
        ]
        values_by_name = {
            name: [machine_sizes.get(name) for machine_sizes in sizes] for name in sizes[0]
        }
        return "; ".join(
            f"{name} = {group_by_value(self.machines, map(_format_value, values))}"
            for name, values in values_by_name.items()
            if len(set(map(repr, values))) > 1
        )


def group_by_value(machines: Sequence[Machine], values: Iterable[str | None]) -> str:
    """Return values with their machines, such as "2.13 on A and B; 2.11 on C"; None is left out."""
    labels: dict[str, list[str]] = {}
    for machine, value in zip(machines, values, strict=True):
        if value is not None:
            labels.setdefault(value, []).append(machine.label)
    return "; ".join(f"{value} on {' and '.join(names)}" for value, names in labels.items())


def _format_value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def is_remote(path: Path) -> bool:
    """Return whether a path has the form HOST:PATH, and nothing of this machine has that name."""
    return re.match(r"[\w.@-]{2,}:.", str(path)) is not None and not path.exists()


def fetch(path: Path, scratch: Path) -> Path:
    """Copy a run or a bundle of another machine into `scratch` by scp; return its path there.

    A path on this machine is returned as it is.

    Raises:
        UsageError: scp is not installed, or could not copy it.
    """
    if not is_remote(path):
        return path
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        command = ["scp", "-rq", "-o", "BatchMode=yes", "--", str(path), str(folder)]
        completed = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(f"{path} is on another machine, and there is no scp to copy it") from None
    if completed.returncode:
        raise UsageError(f"{path} could not be copied: {completed.stderr.strip() or 'scp failed'}")
    return folder / Path(str(path).partition(":")[2]).name


def group_by_experiment(paths: Sequence[Path], scratch: Path) -> list[tuple[str, list[Path]]]:
    """Return (experiment, its runs) of each comparison, in the order of the first path.

    If all paths are directories, they form one comparison, with "" for the experiment. If a path is
    a bundle, there is one comparison per experiment that every path has; of several runs of an
    experiment in a bundle, the last one counts. Bundles are checked and unpacked into `scratch`.

    Raises:
        BundleError: a bundle is missing, damaged, or differs from what was packed.
        UsageError: the config.yaml of a run is damaged.
        NotComparable: the paths have no experiment in common.
    """
    if not any(path.suffix == ".zip" for path in paths):
        return [("", list(paths))]
    runs_by_path = [
        _runs_by_experiment(path, scratch / str(index)) for index, path in enumerate(paths)
    ]
    common_names = [name for name in runs_by_path[0] if all(name in runs for runs in runs_by_path)]
    if not common_names:
        contents = "; ".join(
            f"{path.name}: {', '.join(runs) or 'no run'}"
            for path, runs in zip(paths, runs_by_path, strict=True)
        )
        raise NotComparable(f"these share no experiment ({contents})")
    return [(name, [runs[name] for runs in runs_by_path]) for name in common_names]


def _runs_by_experiment(path: Path, folder: Path) -> dict[str, Path]:
    """Return the runs of a bundle or of one run's directory, by experiment."""
    if path.suffix == ".zip":
        archive.unpack(archive.read(path), folder)
        runs = runs_in(folder, "runs/*/*")
    else:
        runs = [path] if has_records(path) else []
    try:
        return {str(read_config(run / CONFIG).name): run for run in runs}
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def common_ceiling(points: pd.DataFrame) -> str | None:
    """Return the first column of CEILINGS without missing values, or None."""
    return next((column for column in CEILINGS if points[column].notna().all()), None)


def read_machines(paths: Sequence[Path]) -> list[Machine]:
    """Read the runs in the given order, in one mode of timing if they have one in common.

    Raises:
        NotComparable: there are fewer than two, a path is not a run, or they are of several
            experiments, or of a kind whose numbers are not compared.
        UsageError: a file of a run is damaged.
    """
    if len(paths) < 2:
        raise NotComparable("a comparison needs two runs or more, e.g. two of reports/reference/")
    for path in paths:
        if not has_records(path):
            raise NotComparable(f"{path} is not a run: it has no {POINTS}")
    runs = [Run.read(path) for path in paths]
    names = list(dict.fromkeys(str(run.config.name) for run in runs))
    if len(names) > 1:
        raise NotComparable(
            f"these runs ask different questions ({', '.join(names)}): take runs of one experiment"
        )
    if not all(run.kind.reporting.comparability for run in runs):
        raise NotComparable(
            f"{names[0]} is of kind {runs[0].kind.name}: its numbers are not compared over machines"
        )
    # A mode that all runs have, else the first mode of each run; a notice then states the modes.
    common_modes = [mode for mode in runs[0].modes if all(mode in run.modes for run in runs)]
    machines = []
    for label, run in zip(_labels(runs), runs, strict=True):
        mode = (common_modes or run.modes)[0]
        device = ceilings.of_environment(run.environment)
        measured_ceilings = MeasuredCeilings.from_environment(run.environment)
        run = run.in_mode(mode)
        machines.append(Machine(label, run, device, measured_ceilings, mode, _cells(run.records)))
    return machines


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return a short, unique name per run: its device, with commit, date or number if shared."""
    environments = [run.environment for run in runs]
    names = [
        str(
            (environment.get("gpu") or {}).get("name")
            or environment.get("device", "unknown device")
        )
        .removeprefix("NVIDIA ")
        .removeprefix("GeForce ")
        for environment in environments
    ]
    details: tuple[Callable[[dict[str, Any]], str], ...] = (
        lambda environment: str((environment.get("git") or {}).get("sha") or "no git")[:7],
        lambda environment: str(environment.get("time_utc", ""))[:16].replace("T", " "),
    )
    for detail_of in details:
        detailed_names = [
            f"{name} ({detail_of(environment)})" if names.count(name) > 1 else name
            for name, environment in zip(names, environments, strict=True)
        ]
        if len(set(detailed_names)) > len(set(names)):
            names = detailed_names
    if len(set(names)) < len(names):
        names = [f"{name} #{number + 1}" for number, name in enumerate(names)]
    return names


def _cells(records: Sequence[Record]) -> pd.DataFrame:
    """Return the role, work and sizes of each timed cell, indexed by the cell's key.

    `work` is a text that is equal for equal work. `sizes` is a dictionary, shown if works differ.
    """
    timed_records = [record for record in records if record.get("kind", TIME) == TIME]
    base_point = next((record for record in timed_records if record["section"] == SWEEP), None)
    rows = [
        {
            "cell": record["cell"],
            "role": _role(record, base_point or record),
            "work": repr([_without_defaults(record[name]) for name in WORK_FIELDS]),
            "sizes": {**record["params"], **{name: record[name] for name in ("rows", "optimizer")}},
        }
        for record in timed_records
    ]
    frame = pd.DataFrame(rows, columns=["cell", "role", "work", "sizes"])
    return frame.drop_duplicates("cell").set_index("cell")


def _role(record: Record, base_point: Record) -> str:
    """Return the position of a cell in its experiment; `base_point` is that of the sweep."""
    if record["section"] != SWEEP:
        return str(record["section"])
    params, base_params = record["params"], base_point["params"]
    changes = [
        f"{axis}={exact(params[axis])}" for axis in AXES if params[axis] != base_params[axis]
    ]
    return "sweep, " + ", ".join(changes) if changes else BASE_POINT


def _without_defaults(value: object) -> object:
    """Return the sorted entries of params except "", [], None, "auto" and "exact".

    These are the defaults of fields that stored runs may lack. Any value but a dictionary is
    returned as it is.
    """
    if not isinstance(value, dict):
        return value
    return sorted(
        (key, entry) for key, entry in value.items() if entry not in ("", [], None, "auto", "exact")
    )


def measured_points(machines: Sequence[Machine]) -> pd.DataFrame:
    """Return the points of every machine, compared with the first machine's (see Comparison).

    Raises:
        NotComparable: a machine has no point.
    """
    frames = [_points(i, machine) for i, machine in enumerate(machines)]
    for machine, rows in zip(machines, frames, strict=True):
        if not len(rows):
            raise NotComparable(f"{machine.label}: its run has no time of a step or forward pass")
    frame = pd.concat(frames, ignore_index=True)
    first = frame[frame["machine"] == 0]
    frame["same"] = frame["role"].map(first.groupby("role")["work"].first()) == frame["work"]
    rates = ["rate", "rate_lo", "rate_hi"]
    first_rates = frame[POINT_KEYS].merge(first[[*POINT_KEYS, *rates]], how="left", on=POINT_KEYS)
    frame["gain"] = frame["rate"] / first_rates["rate"]
    frame["gain_lo"] = frame["rate_lo"] / first_rates["rate_hi"]
    frame["gain_hi"] = frame["rate_hi"] / first_rates["rate_lo"]
    return frame.drop(columns="work")


def _points(machine_index: int, machine: Machine) -> pd.DataFrame:
    """Return the measured points of a machine, with the column `work` of their cells."""
    table = machine.run.table
    if not len(table):
        return pd.DataFrame()
    rows = table[table["status"] == "ok"].join(machine.cells[["role", "work"]], on="cell")
    rows = rows.drop_duplicates(POINT_KEYS)
    row_bytes = WEIGHT_BYTES * rows["D"].astype(float)
    kinds = ["theory", "copy", "gather"]
    bandwidths = pd.DataFrame(map(machine.bandwidths, row_bytes), rows.index, kinds)
    copied_columns = ["section", "role", "work", "contender", "arm", "phase", "lookups", "median_s"]
    copied_columns += ["lo_s", "hi_s", "ratio", "ratio_lo", "ratio_hi", "distinct_gb_s"]
    return pd.DataFrame(
        {
            "machine": machine_index,
            "label": machine.label,
            "name": rows["label"],
            **{column: rows[column] for column in copied_columns},
            "rate": rows["lookups"] / rows["median_s"],
            "rate_lo": rows["lookups"] / rows["hi_s"],
            "rate_hi": rows["lookups"] / rows["lo_s"],
            **{f"of_{kind}": rows["distinct_gb_s"] / bandwidths[kind] for kind in kinds},
            "dense_bytes": rows["dense_bytes"],
        }
    )


def exclusion_sentences(machines: Sequence[Machine], points: pd.DataFrame) -> list[str]:
    """Return a sentence per role or contender of `points` that some machine lacks.

    Runs with hit rates of traces have one more sentence, because `points` has no hit rates.
    """
    labels = [machine.label for machine in machines]
    counts = points.pivot_table("rate", ["role", "name"], "label", aggfunc="size", sort=False)
    counts = counts.reindex(columns=labels).fillna(0)
    sentences = []
    for role, group in counts.groupby(level="role", sort=False):
        labels_without = [label for label in labels if not group[label].any()]
        if labels_without:
            sentences.append(f"{role}: not measured on {', '.join(labels_without)}")
            continue
        for (_, name), row in group.iterrows():
            machines_without = [machine for machine in machines if not row[machine.label]]
            if machines_without:
                reasons = "; ".join(
                    _missing_reason(machine, str(role), str(name)) for machine in machines_without
                )
                sentences.append(f"{role}, {name}: {reasons}")
    if any(len(machine.run.traces) for machine in machines):
        sentences.append("hit rates of traces through caches: the same on every machine")
    return sentences


def _missing_reason(machine: Machine, role: str, name: str) -> str:
    """State that a machine has no result of a contender, with the contender's first failure."""
    reasons = [
        f" ({record['status']}: {record['reason']})"
        for record in machine.run.failures()
        if record["label"] == name and machine.cells["role"].get(record["cell"]) == role
    ]
    return f"no result on {machine.label}" + (reasons[0] if reasons else "")
