"""A comparison as index.html and report.md: answer, confounders, figures, tables, provenance."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.compare import confounders, figures, published
from experiments.compare import machines as table
from experiments.compare.confounders import Difference, Weight
from experiments.compare.machines import Machine, Speedup
from experiments.config.sweep import SWEEP
from experiments.machine import ceilings
from experiments.paths import ROOT
from experiments.report import shell, style, text
from experiments.report.style import Figure
from experiments.report.tables import Table, Value
from experiments.results.metrics import WEIGHT_BYTES
from experiments.results.store import RunStore

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


STYLE = Path(__file__).parent / "compare.css"
HOW_TO_READ = (
    "Runs are matched by where a cell stands in the experiment: a case by its name, a point of the "
    "sweep by how it differs from the base point. Where the work itself is equal, down to the law "
    "of the ids, times are compared; where an experiment chose sizes for the machine, only rates "
    "are, and it is said.",
    "A speed-up is lookups per second against the first run named. Its interval reaches from the "
    "far end of one median's 95 % interval to the far end of the other's: machines cannot take "
    "turns, so nothing is paired and the interval is a cautious one.",
    "A ratio to the baseline is from within one machine, where contenders did take turns.",
    "Shares of a roof count the bytes that the task must move if every distinct row of a batch is "
    "read once and, in a step, written once, the same for every contender. Rows that stay in a "
    "cache between batches can lift it above 100 %; a contender that computes rows instead of "
    "reading them stays low, however well it runs.",
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
            machines, table.shared(machines, every), table.left_out(machines, every),
            confounders.find(machines), command,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The experiment's."""
        return str(self.machines[0].run.config.name)

    @property
    def subtitle(self) -> str:
        """For the sheets."""
        return " · ".join(m.label for m in self.machines) + f" · mode {self.machines[0].mode}"


def machines_table(found: Comparison) -> Table:
    """A row per machine: what it is, what its memory does, what software ran."""
    sizes = sorted({size for m in found.machines for size, _ in m.roofs.gather_gb_s})
    heads = ["machine", "theory GB/s", "copy GB/s", *[f"gather {s} B GB/s" for s in sizes]]
    heads += ["last cache", "power", "torch", "driver", "CUDA", "emblib", "measured"]
    return Table(heads, [_machine(m, sizes) for m in found.machines])


def _machine(machine: Machine, sizes: Sequence[int]) -> list[Value]:
    e, device = machine.run.environment, machine.device
    gpu, git = e.get("gpu") or {}, e.get("git") or {}
    gathered = dict(machine.roofs.gather_gb_s)
    figures = device.figures if device else {}
    code = f"{git.get('sha', '')}{'-dirty' * bool(git.get('dirty'))}"
    return [
        Value(machine.label),
        _number(machine.bandwidth_gb_s, "unknown"),
        _number(machine.roofs.copy_gb_s, "not measured"),
        *[_number(gathered.get(size, math.nan), "not measured") for size in sizes],
        _number(figures.get("cache_mb", math.nan), "unknown", " MB"),
        _number(figures.get("tdp_w", math.nan), "unknown", " W"),
        *[Value(str(v or text.NONE)) for v in (e.get("torch"), gpu.get("driver"), gpu.get("cuda"))],
        Value(code or text.NONE),
        Value(str(e.get("time_utc", ""))[:10]),
    ]


def _number(value: float, otherwise: str, unit: str = "") -> Value:
    return Value(otherwise if text.missing(value) else f"{text.digits(value)}{unit}", value)


def rows_table(found: Comparison, phase: str) -> Table:
    """A row per role and contender: what the machines gain on the first, then rates and shares."""
    machines, rows = found.machines, found.rows[found.rows["phase"] == phase]
    known = table.roof(rows)
    heads = ["work", "contender", *[f"{m.label} ÷ {machines[0].label}" for m in machines[1:]]]
    heads += [f"{m.label}: M lookups/s" for m in machines]
    heads += [f"{m.label}: % of {known.words}" for m in machines] if known else []
    lines = []
    for (place, _), group in rows.groupby(["role", "arm"], sort=False):
        by_machine = [group[group["machine"] == n].iloc[0] for n in range(len(machines))]
        line = [Value(str(place)), Value(str(by_machine[0]["name"]))]
        for row in by_machine[1:]:
            gain = table.speedup(row, by_machine[0])
            line.append(Value(times(gain) + " (sizes differ)" * (not row["same"]), gain.ratio))
        line += [Value(text.digits(row["rate"] / 1e6), row["rate"]) for row in by_machine]
        if known:
            line += [_number(100 * row[known.column], text.NONE) for row in by_machine]
        lines.append(line)
    return Table(heads, lines)


def size_lines(found: Comparison) -> list[str]:
    """Roles whose work is not the same everywhere, and how."""
    other = list(dict.fromkeys(found.rows[~found.rows["same"]]["role"]))
    return [f"{place}: {'; '.join(table.sizes(found.machines, place))}" for place in other]


def sources_table(found: Comparison) -> Table:
    """Where each theoretical figure was read."""
    lines = []
    for device in {m.device.key: m.device for m in found.machines if m.device}.values():
        for key, words in ceilings.FIGURES.items():
            shown = text.NONE
            if key in device.figures:
                shown = f"{device.figures[key]:g}"
            source = device.sources.get(key, ceilings.UNKNOWN)
            lines.append([Value(device.name), Value(words), Value(shown), Value(source)])
    return Table(["device", "figure", "value", "source"], lines)


def published_lines(found: Comparison) -> list[str]:
    """Figures that others published of this experiment's work."""
    return [
        f"{source.title}: {figure.name} {figure.value:g} {figure.unit}, {figure.device_words} "
        f"({source.source})"
        for source in published.of_experiment(found.name)
        for figure in source.figures
        if not figure.not_here
    ]


def markdown(found: Comparison, figures: Sequence[Figure]) -> str:
    """report.md."""
    said = sentences(found.machines, found.rows)
    lines = [f"# {found.name} on {len(found.machines)} machines", "", f"**{said[0]}** "
             f"{' '.join(said[1:])}", ""]  # fmt: skip
    for difference in found.differences:
        strong = difference.weight is Weight.confounder
        lines += [f"> **{difference.sentence()}**" if strong else f"> {difference.sentence()}", ""]
    for figure in figures:
        lines += [f"![{figure.title}]({figure.name}.png)", ""]
        lines += [f"**{figure.title}.** {figure.caption}", ""]
    lines += ["## Machines", "", machines_table(found).markdown(), ""]
    for phase in ("step", "forward"):
        lines += [f"## {phase.capitalize()}", "", rows_table(found, phase).markdown(), ""]
    for title, words in _lists(found):
        lines += [f"## {title}", "", *[f"- {w}" for w in words], ""]
    lines += ["## Where the theoretical figures come from", "", sources_table(found).markdown(), ""]
    lines += ["## Reproduce", "", text.Code("\n".join(_commands(found))), ""]
    return text.markdown_document(lines)


def _lists(found: Comparison) -> list[tuple[str, Sequence[str]]]:
    every = [
        ("Work of other sizes", size_lines(found)),
        ("Not compared", list(found.left_out)),
        ("Published elsewhere", published_lines(found)),
        ("How to read this", HOW_TO_READ),
    ]
    return [(title, words) for title, words in every if words]


def _commands(found: Comparison) -> list[str]:
    runs = [f"{m.run.environment.get('command', '')}  # on {m.name}" for m in found.machines]
    return [*runs, found.command]


def page(found: Comparison, drawn: Sequence[tuple[Figure, Sequence[str]]]) -> str:
    """index.html; `drawn` are the figures with their panels as inline SVG."""
    said = sentences(found.machines, found.rows)
    parts = [f"<style>{STYLE.read_text()}</style>"]
    parts += [shell.paragraph(f"{found.name} on {len(found.machines)} machines", "eyebrow")]
    parts += [f"<h1>{html.escape(said[0])}</h1>"]
    parts += [shell.paragraph(" ".join(said[1:]))] if said[1:] else []
    question = found.machines[0].run.info.get("question", "")
    parts += [shell.paragraph(f"Question: {question}", "question")]
    for difference in found.differences:
        kind = "confounder" if difference.weight is Weight.confounder else "remark"
        parts.append(shell.paragraph(difference.sentence(), kind))
    parts += [shell.CONTENTS]
    blocks = [shell.figure(figure, panels) for figure, panels in drawn]
    parts += [shell.heading("Results", "results"), *blocks[:1]]
    parts += [shell.heading("Machines", "machines"), machines_table(found).html()]
    for phase in ("step", "forward"):
        parts += [shell.heading(phase.capitalize(), phase), rows_table(found, phase).html()]
    parts += [shell.heading("Figures", "figures"), *blocks[1:]] if blocks[1:] else []
    for title, words in _lists(found):
        items = "".join(f"<li>{html.escape(w)}</li>" for w in words)
        parts += [shell.heading(title, title.lower().replace(" ", "-")), f"<ul>{items}</ul>"]
    parts += ["<details><summary>Where the theoretical figures come from</summary>"]
    parts += [sources_table(found).html(), "</details>"]
    commands = html.escape("\n".join(_commands(found)))
    parts += [shell.heading("Reproduce", "reproduce"), f"<pre>{commands}</pre>"]
    return shell.document(f"{found.name} compared · emblib", parts)


FOLDER = ROOT / "reports" / "compare"


def write(runs: Sequence[Path], folder: Path | None, command: str) -> Path:
    """Everything; says the answer on the terminal and returns the page's path."""
    found = Comparison.of(runs, command)
    store = RunStore((folder or FOLDER / found.name).resolve())
    store.write("compare.csv", found.rows.to_csv(index=False))
    drawn = _draw(found, store)
    store.write("report.md", markdown(found, [figure for figure, _ in drawn]))
    written = store.write("index.html", page(found, drawn))
    for difference in found.differences:
        print(difference.sentence())
    print("\n" + " ".join(sentences(found.machines, found.rows)))
    return written


def _draw(found: Comparison, store: RunStore) -> list[tuple[Figure, list[str]]]:
    every = figures.figures(found.machines, found.rows)
    with style.theme():
        return [(f, style.draw(f, found.subtitle, store.path)) for f in every]
