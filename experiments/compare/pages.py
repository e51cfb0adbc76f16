"""The page of a comparison: answer, confounders, figures, tables, provenance."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.compare import confounders, figures, published
from experiments.compare import machines as table
from experiments.compare.confounders import Difference
from experiments.compare.machines import Machine, Roof, Speedup
from experiments.config.sweep import SWEEP
from experiments.machine import ceilings
from experiments.paths import ROOT
from experiments.report import document, text
from experiments.report.document import Notice, Page, Section
from experiments.report.tables import Column, Table, Value
from experiments.results.metrics import WEIGHT_BYTES
from experiments.results.store import RunStore

WORDS = {
    "gather": "its memory gathers {} as much",
    "copy": "its memory copies {} as much",
    "theory": "its makers state {} the bandwidth",
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
    """Return the best known ratio of bandwidths."""
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
        parts.append(f"{text.ratio(row)} on {machine.label}")
    label = machines[0].run.baseline.label
    name = _pick(frame, place, arm, 0)["name"]
    return f"The time of {name} as a multiple of {label}'s is {', '.join(parts)}."


HOW_TO_READ = (
    "Runs are matched by where a cell stands in the experiment: a case by its name, a point of the "
    "sweep by how it differs from the base point. Where the work itself is equal, down to the "
    "distribution of the ids, times are compared; where an experiment chose sizes for the "
    "machine, only rates are, and it is said.",
    "A speed-up is lookups per second against the first run named. Its interval reaches from the "
    "far end of one median's 95 % interval to the far end of the other's: machines cannot take "
    "turns, so nothing is paired and the interval is a cautious one.",
    "A ratio to the baseline is from within one machine, where contenders did take turns.",
    "Shares of a bandwidth count the bytes that the task must move if every distinct row of a "
    "batch is read once and, in a step, written once, the same for every contender. Rows that "
    "stay in a cache between batches can lift it above 100 %; a contender that computes rows "
    "instead of reading them stays low, however well it runs.",
    "Measured bandwidth is of the same run on the same threads: bytes read plus bytes written by "
    "a copy, and by gathers of random rows of 64 to 512 bytes, of which the row size nearest to "
    "the work's is taken. Theoretical bandwidth is what conf/hardware has, with its source.",
    "Published numbers are other people's, elsewhere. They are shown with ours and never divided "
    "by them, unless both are of one device.",
)


@dataclass(frozen=True)
class Comparison:
    """Everything that a page is made of."""

    machines: Sequence[Machine]
    rows: pd.DataFrame  # of what all have
    left_out: Sequence[str]
    differences: Sequence[Difference]
    command: str

    @classmethod
    def of(cls, paths: Sequence[Path], command: str) -> Comparison:
        """Read and match; raises table.NotComparable."""
        machines = table.read(paths)
        every = table.rows(machines)
        return cls(
            machines,
            table.shared(machines, every),
            table.left_out(machines, every),
            confounders.find(machines),
            command,
        )

    @property
    def name(self) -> str:
        """The experiment's."""
        return str(self.machines[0].run.config.name)

    @property
    def subtitle(self) -> str:
        """For the sheets."""
        return " · ".join(m.label for m in self.machines) + f" · mode {self.machines[0].mode}"


def machines_table(found: Comparison) -> Table:
    """Return what each machine is, what its memory does, and which software ran."""
    columns: dict[str, Column] = {
        "machine": lambda m: m.label,
        "theory GB/s": lambda m: _number(m.bandwidth_gb_s, "unknown"),
        "copy GB/s": lambda m: _number(m.roofs.copy_gb_s, "not measured"),
    }
    for size in sorted({size for m in found.machines for size, _ in m.roofs.gather_gb_s}):
        columns[f"gather {size} B GB/s"] = functools.partial(_gathered, size)
    columns |= {
        "last cache": lambda m: _figure(m, "cache_mb", " MB"),
        "power": lambda m: _figure(m, "tdp_w", " W"),
        "torch": lambda m: str(m.run.environment.get("torch") or text.NONE),
        "driver": lambda m: str((m.run.environment.get("gpu") or {}).get("driver") or text.NONE),
        "CUDA": lambda m: str((m.run.environment.get("gpu") or {}).get("cuda") or text.NONE),
        "emblib": lambda m: text.commit(m.run.environment) or text.NONE,
        "measured": lambda m: str(m.run.environment.get("time_utc", ""))[:10],
    }
    return Table.of(found.machines, columns)


def _gathered(size: int, machine: Machine) -> Value:
    return _number(dict(machine.roofs.gather_gb_s).get(size, math.nan), "not measured")


def _figure(machine: Machine, name: str, unit: str) -> Value:
    figures = machine.device.figures if machine.device else {}
    return _number(figures.get(name, math.nan), "unknown", unit)


def _number(value: float, otherwise: str, unit: str = "") -> Value:
    return Value(otherwise if text.missing(value) else f"{text.digits(value)}{unit}", value)


def rows_table(found: Comparison, phase: str) -> Table:
    """Return, per role and contender, each machine's gain on the first, its rate and its share."""
    machines, rows = found.machines, found.rows[found.rows["phase"] == phase]
    known = table.roof(rows)
    columns: dict[str, Column] = {
        "work": lambda group: str(group[0]["role"]),
        "contender": lambda group: str(group[0]["name"]),
    }
    for n, machine in list(enumerate(machines))[1:]:
        columns[f"{machine.label} ÷ {machines[0].label}"] = functools.partial(_gain_of, n)
    for n, machine in enumerate(machines):
        columns[f"{machine.label}: M lookups/s"] = functools.partial(_rate, n)
    if known:
        for n, machine in enumerate(machines):
            columns[f"{machine.label}: % of {known.words}"] = functools.partial(_used, n, known)
    groups = [
        [group[group["machine"] == n].iloc[0] for n in range(len(machines))]
        for _, group in rows.groupby(["role", "arm"], sort=False)
    ]
    return Table.of(groups, columns)


def _gain_of(number: int, group: Sequence[pd.Series]) -> Value:
    gain = table.speedup(group[number], group[0])
    return Value(times(gain) + " (sizes differ)" * (not group[number]["same"]), gain.ratio)


def _rate(number: int, group: Sequence[pd.Series]) -> Value:
    return Value.of(group[number]["rate"], lambda rate: text.digits(rate / 1e6))


def _used(number: int, roof: Roof, group: Sequence[pd.Series]) -> Value:
    return Value.of(100 * group[number][roof.column], text.digits)


def size_lines(found: Comparison) -> list[str]:
    """Roles whose work is not the same everywhere, and how."""
    other = list(dict.fromkeys(found.rows[~found.rows["same"]]["role"]))
    return [f"{place}: {'; '.join(table.sizes(found.machines, place))}" for place in other]


def sources_table(found: Comparison) -> Table:
    """Return where each theoretical figure was read."""
    devices = {m.device.key: m.device for m in found.machines if m.device}.values()
    return Table.of(
        [(device, key, words) for device in devices for key, words in ceilings.FIGURES.items()],
        {
            "device": lambda row: row[0].name,
            "figure": lambda row: row[2],
            "value": lambda row: (
                f"{row[0].figures[row[1]]:g}" if row[1] in row[0].figures else text.NONE
            ),
            "source": lambda row: row[0].sources.get(row[1], ceilings.UNKNOWN),
        },
    )


def published_lines(found: Comparison) -> list[str]:
    """Figures that others published of this experiment's work."""
    return [
        f"{source.title}: {figure.name} {figure.value:g} {figure.unit}, {figure.device_words} "
        f"({source.source})"
        for source in published.of_experiment(found.name)
        for figure in source.figures
        if not figure.not_here
    ]


def page(found: Comparison) -> Page:
    """Return the page of a comparison."""
    drawn = figures.figures(found.machines, found.rows)
    tables = [
        Section(phase.capitalize(), table=rows_table(found, phase)) for phase in ("step", "forward")
    ]
    return Page(
        name=f"{found.name} on {len(found.machines)} machines",
        answer=sentences(found.machines, found.rows),
        sections=[
            Section("Results", figures=drawn[:1]),
            Section("Machines", table=machines_table(found)),
            *tables,
            Section("Figures", figures=drawn[1:]),
            Section("Work of other sizes", points=size_lines(found)),
            Section("Not compared", points=found.left_out),
            Section("Published elsewhere", points=published_lines(found)),
            Section("How to read this", points=HOW_TO_READ),
            Section(
                "Sources",
                folded="Where the theoretical figures come from",
                table=sources_table(found),
            ),
            Section("Reproduce", code="\n".join(_commands(found))),
        ],
        subtitle=found.subtitle,
        question=str(found.machines[0].run.info.get("question", "")),
        notices=[Notice(d.sentence(), d.weight.value) for d in found.differences],
    )


def _commands(found: Comparison) -> list[str]:
    runs = [f"{m.run.environment.get('command', '')}  # on {m.name}" for m in found.machines]
    return [*runs, found.command]


FOLDER = ROOT / "reports" / "compare"


def write(runs: Sequence[Path], folder: Path | None, command: str) -> Path:
    """Everything; says the answer on the terminal and returns the page's path."""
    found = Comparison.of(runs, command)
    store = RunStore((folder or FOLDER / found.name).resolve())
    store.write("compare.csv", found.rows.to_csv(index=False))
    report = page(found)
    written = document.write(store.path, report)
    for difference in found.differences:
        print(difference.sentence())
    print("\n" + " ".join(report.answer))
    return written
