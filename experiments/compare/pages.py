"""The page of a comparison: answer, confounders, figures, tables, provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare import confounders, figures
from experiments.compare.machines import CEILINGS, Comparison, Machine, common_ceiling
from experiments.config.schema import folder_name
from experiments.config.sweep import SWEEP
from experiments.kind_reports import anchor as anchor_report
from experiments.machine import ceilings
from experiments.paths import ROOT
from experiments.report import document, published, text
from experiments.report.document import Notice, Page, Section
from experiments.report.published import JudgedFigure, Publication, PublishedFigure, Reproduction
from experiments.report.tables import Column, Table, Value
from experiments.results.store import RunStore

FOLDER = ROOT / "reports" / "compare"
OVERVIEW = published.FOLDER / "README.md"
COMMAND = "python run.py compare --overview"
HOW_TO_READ = (
    "Runs are matched by the position of a cell in the experiment: a case by its name, a point of "
    "the sweep by how it differs from the base point. Where the work itself is equal, down to the "
    "distribution of the ids, times are compared; where an experiment chose sizes for the "
    "machine, only rates are, and the page says so.",
    "A speed-up is lookups per second against the first run named. Its interval reaches from the "
    "far end of one median's 95 % interval to the far end of the other's: machines cannot take "
    "turns, so nothing is paired and the interval is a cautious one.",
    "A ratio to the baseline is from within one machine, where contenders did take turns.",
    "Shares of a bandwidth count the bytes that the task must move if every distinct row of a "
    "batch is read once and, in a step, written once, the same for every contender. Rows that "
    "stay in a cache between batches can lift it above 100 %; a contender that computes rows "
    "instead of reading them stays low, however well it runs.",
    "Measured bandwidth is of the same run on the same threads: bytes read plus bytes written by "
    "a copy, and by gathers of random rows of 64 to 1,024 bytes, of which the next size at or "
    "above the work's is taken, else the largest. Theoretical bandwidth is what conf/hardware has, "
    "with its source.",
    "Published numbers were measured by others. Here they are only shown; reports/published "
    "compares them with ours.",
)


def write(runs: Sequence[Path], folder: Path | None, command: str) -> Path:
    """Write the page of a comparison, print its notices and answer; return its path.

    Args:
        runs: directories of runs.
        folder: folder of the page; None for reports/compare/<experiment>.
        command: command that repeats the comparison.

    Raises:
        NotComparable: `Comparison.read` refuses the runs.
    """
    comparison = Comparison.read(runs)
    target = folder or FOLDER / folder_name(comparison.machines[0].run.config.name)
    store = RunStore(target.resolve())
    store.write("compare.csv", comparison.points.to_csv(index=False))
    report = page(comparison, command)
    written = document.write(store.path, report)
    for notice in report.notices:
        print(notice.text)
    print("\n" + " ".join(report.answer))
    return written


def page(comparison: Comparison, command: str) -> Page:
    """Return the page of a comparison; `command` repeats it."""
    machines, points = comparison.machines, comparison.points
    figure_list = figures.figures(comparison)
    name, labels = str(machines[0].run.config.name), [m.label for m in machines]
    resized = points[~points["same"]]["role"].unique()
    commands = [f"{m.run.environment.get('command', '')}  # on {m.name}" for m in machines]
    published_lines = [
        f"{source.title}: {figure.name} {figure.value:g} {figure.unit}, {figure.device_words} "
        f"({source.source})"
        for source in published.publications_of(name)
        for figure in source.figures
        if not figure.not_here
    ]
    return Page(
        name=f"{name} on {len(machines)} machines",
        answer=sentences(comparison),
        sections=[
            Section("Results", figures=figure_list[:1]),
            Section("Machines", table=machines_table(machines)),
            Section("Step", table=points_table(comparison, "step")),
            Section("Forward", table=points_table(comparison, "forward")),
            Section("Figures", figures=figure_list[1:]),
            Section(
                "Work of other sizes",
                points=[f"{role}: {comparison.sizes(role)}" for role in resized],
            ),
            Section("Not compared", points=comparison.left_out),
            Section("Published elsewhere", points=published_lines),
            Section("How to read this", points=HOW_TO_READ),
            Section(
                "Sources",
                fold_label="Where the theoretical figures come from",
                table=sources_table(machines),
            ),
            Section("Reproduce", code="\n".join([*commands, command])),
        ],
        subtitle=" · ".join([*labels, f"mode {machines[0].mode}"]),
        question=str(machines[0].run.info.get("question", "")),
        notices=[
            Notice(d.sentence(), d.weight.value) for d in confounders.find_differences(machines)
        ],
    )


def sentences(comparison: Comparison) -> list[str]:
    """Return the answer: each machine against the first, then subject against baseline.

    The last sentence is absent if the headline has no baseline.
    """
    points, base = comparison.points, comparison.machines[0]
    points = points[(points["role"] == comparison.headline) & (points["phase"] == "step")]
    arms, subject, baseline = points["arm"].unique(), base.run.subject.key, base.run.baseline
    arm = subject if subject in arms else arms[0]
    by_machine = points[points["arm"] == arm].to_dict("records")
    gains = [_gain(comparison, number, by_machine) for number in range(1, len(comparison.machines))]
    if baseline.key in arms and baseline.key != arm:
        ratios = ", ".join(f"{text.ratio(point)} on {point['label']}" for point in by_machine)
        name = by_machine[0]["name"]
        gains.append(f"The time of {name} as a multiple of {baseline.label}'s is {ratios}.")
    return gains


def _gain(comparison: Comparison, number: int, by_machine: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about a machine's speed-up, with the bandwidth that may explain it."""
    point, first, role = by_machine[number], by_machine[0], comparison.headline
    is_swept = role.startswith(SWEEP)
    title = "the sweep's base point" if is_swept else comparison.machines[0].run.title(role)
    sizes = "" if point["same"] else ", each with sizes of its own"
    ratios, explanation = comparison.bandwidth_ratios(number), "no bandwidth is known of both"
    for kind, words in (
        ("theory", "its makers state {} the bandwidth"),
        ("copy", "its memory copies {} as much"),
        ("gather", "its memory gathers {} as much"),  # the last known one counts
    ):
        if math.isfinite(ratios[kind]):
            explanation = words.format(text.times(ratios[kind]))
    shares = [
        f", and the step uses {text.digits(100 * point[column])} % of the {ceiling} "
        f"against {text.digits(100 * first[column])} %"
        for column, ceiling in CEILINGS.items()
        if math.isfinite(point[column]) and math.isfinite(first[column])
    ]
    explanation += "".join(shares[:1])
    if point["gain_lo"] <= 1 <= point["gain_hi"]:
        explanation += "; the interval contains 1, so no difference is shown"
    elif not math.isfinite(point["gain_lo"]):
        explanation += "; from one process of a machine, which gives no interval"
    return (
        f"On {title}{sizes}, a step of {point['name']} does {_times(point)} the lookups per second "
        f"on {point['label']} that it does on {first['label']}; {explanation}."
    )


def _times(point: Mapping[str, Any]) -> str:
    """Return a speed-up such as "5.2× [5.0, 5.4]", or without an interval."""
    low, high = point["gain_lo"], point["gain_hi"]
    has_interval = math.isfinite(low) and math.isfinite(high)
    return text.times(point["gain"]) + f" {text.interval(low, high)}" * has_interval


def points_table(comparison: Comparison, phase: str) -> Table:
    """Return the table of gains, rates and bandwidth shares per role and contender."""
    points = comparison.points[comparison.points["phase"] == phase]
    ceiling, base = common_ceiling(points), comparison.machines[0].label

    def gain(n: int) -> Column:
        return lambda p: Value(_times(p[n]) + " (sizes differ)" * (not p[n]["same"]), p[n]["gain"])

    def rate(n: int) -> Column:
        return lambda p: Value.of(1e-6 * p[n]["rate"], text.digits)

    def share(n: int) -> Column:
        return lambda p: Value.of(100 * p[n][ceiling], text.digits)

    machines = [(n, machine.label) for n, machine in enumerate(comparison.machines)]
    columns: dict[str, Column] = {
        "work": lambda p: p[0]["role"],
        "contender": lambda p: p[0]["name"],
    }
    columns |= {f"{label} ÷ {base}": gain(n) for n, label in machines[1:]}
    columns |= {f"{label}: M lookups/s": rate(n) for n, label in machines}
    if ceiling:
        columns |= {f"{label}: % of {CEILINGS[ceiling]}": share(n) for n, label in machines}
    groups = points.groupby(["role", "arm"], sort=False)
    return Table.of([group.to_dict("records") for _, group in groups], columns)


def machines_table(machines: Sequence[Machine]) -> Table:
    """Return the table of machines: memory, power, software."""

    def known(value: float | None, otherwise: str, unit: str = "") -> Value:
        if value is None or text.is_missing(value):
            return Value(otherwise)
        return Value(f"{text.digits(value)}{unit}", value)

    def figure(name: str, unit: str = "") -> Column:
        return lambda m: known(m.device and m.device.figures.get(name), "unknown", unit)

    def gather(size: int) -> Column:
        return lambda m: known(dict(m.measured.gather_gb_s).get(size), "not measured")

    def fact(*keys: str) -> Column:
        def read(machine: Machine) -> str:
            value_of: Any = machine.run.environment
            for key in keys:
                value_of = (value_of or {}).get(key)
            return str(value_of or text.DASH)

        return read

    columns: dict[str, Column] = {
        "machine": lambda m: m.label,
        "theory GB/s": figure("bandwidth_gb_s"),
        "copy GB/s": lambda m: known(m.measured.copy_gb_s, "not measured"),
    }
    for size in sorted({size for m in machines for size, _ in m.measured.gather_gb_s}):
        columns[f"gather {size} B GB/s"] = gather(size)
    columns |= {
        "last cache": figure("cache_mb", " MB"),
        "power": figure("tdp_w", " W"),
        "torch": fact("torch"),
        "driver": fact("gpu", "driver"),
        "CUDA": fact("gpu", "cuda"),
        "emblib": lambda m: text.commit(m.run.environment) or text.DASH,
        "measured": lambda m: str(m.run.environment.get("time_utc", ""))[:10],
    }
    return Table.of(machines, columns)


def sources_table(machines: Sequence[Machine]) -> Table:
    """Return the table of theoretical figures with their sources."""
    devices = {m.device.key: m.device for m in machines if m.device}.values()
    rows = [
        {
            "device": device.name,
            "figure": words,
            "value": f"{device.figures[key]:g}" if key in device.figures else text.DASH,
            "source": device.sources.get(key, ceilings.UNKNOWN),
        }
        for device in devices
        for key, words in ceilings.FIGURES.items()
    ]
    return Table.of(rows, {name: name for name in ("device", "figure", "value", "source")})


OPENING = f"""\
What others say of their embedding tables, where it was read, and what became of it here. This page
is written by `{COMMAND} write` from the files next to it and from the runs
in `reports/reference/`. How to add a figure or a run:
[docs/generations.md](../../docs/generations.md)."""


def overview(extra: Sequence[Path] = ()) -> Page:
    """Return the page of all published figures with verdicts by the references and `extra` runs."""
    judgements = published.judge_references(extra)
    counts = ", ".join(f"{n} {v.value}" for v, n in published.count_verdicts(judgements).items())
    return Page(
        name="Published figures",
        answer=[f"{len(judgements)} figures: {counts}."],
        sections=[
            Section(paragraphs=[OPENING, published.RULE]),
            *[
                _source(source, [f for f in judgements if f.source is source])
                for source in published.publications()
            ],
        ],
    )


def _source(source: Publication, judgements: Sequence[JudgedFigure]) -> Section:
    """Return the section of a publication: verdicts, and figures that are not run, by reason."""
    command = f"`python run.py +experiment={source.experiment}`. " * bool(source.experiment)
    shown_judgements = [
        f for f in judgements if f.verdict is not Reproduction.NOT_RUN or math.isfinite(f.ours)
    ]
    reasons: dict[str, list[PublishedFigure]] = {}
    for finding in judgements:
        if finding not in shown_judgements:
            reasons.setdefault(finding.reason, []).append(finding.figure)
    return Section(
        source.title,
        [f"[{source.source}]({source.url}). {command}{source.note}"],
        table=anchor_report.table(shown_judgements),
        parts=[
            Section(
                paragraphs=[
                    f"Not run here: {reason}. Theirs is of "
                    f"{published.their_device(figures_not_run[0])}."
                ],
                points=_listed(figures_not_run),
            )
            for reason, figures_not_run in reasons.items()
        ],
    )


def _listed(published_figures: Sequence[PublishedFigure]) -> list[str]:
    """Return a line per figure; figures with the same prefix before a colon share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for figure in published_figures:
        begin, colon, end = figure.name.rpartition(": ")
        value = published.format_number(figure.value)
        prefix, words = (begin, f"{end} {value}") if colon else (figure.name, value)
        groups.setdefault((prefix, figure.unit), []).append(words)
    return [f"{begin}: {' · '.join(ends)} {unit}" for (begin, unit), ends in groups.items()]
