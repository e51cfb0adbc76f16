"""The page of a comparison of machines, and the overview of published figures."""

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
    """Write the page of a comparison, print its notices and answer; return the page's path.

    Args:
        runs: directories of runs.
        folder: folder of the page; None for reports/compare/<experiment>.
        command: command that repeats the comparison.

    Raises:
        NotComparable, UsageError: `Comparison.read` refuses the runs.
        OSError: the page cannot be written.
    """
    comparison = Comparison.read(runs)
    target = folder or FOLDER / folder_name(comparison.machines[0].run.config.name)
    store = RunStore(target.resolve())
    store.write("compare.csv", comparison.points.to_csv(index=False))
    report = page_of(comparison, command)
    files = document.write(store.path, report)
    for notice in report.notices:
        print(notice.text)
    print("\n" + " ".join(report.answer))
    return files


def page_of(comparison: Comparison, command: str) -> Page:
    """Return the page of a comparison; `command` repeats it."""
    machines, points = comparison.machines, comparison.points
    page_figures = figures.figures(comparison)
    name, labels = str(machines[0].run.config.name), [machine.label for machine in machines]
    resized_roles = points[~points["same"]]["role"].unique()
    commands = [
        f"{machine.run.environment.get('command', '')}  # on {machine.name}" for machine in machines
    ]
    published_figures = [
        f"{source.title}: {figure.name} {figure.value:g} {figure.unit}, {figure.device_words} "
        f"({source.source})"
        for source in published.publications_of(name)
        for figure in source.figures
        if not figure.not_here
    ]
    return Page(
        name=f"{name} on {len(machines)} machines",
        answer=answer_sentences(comparison),
        sections=[
            Section("Results", figures=page_figures[:1]),
            Section("Machines", table=machines_table(machines)),
            Section("Step", table=points_table(comparison, "step")),
            Section("Forward", table=points_table(comparison, "forward")),
            Section("Figures", figures=page_figures[1:]),
            Section(
                "Work of other sizes",
                points=[f"{role}: {comparison.sizes(role)}" for role in resized_roles],
            ),
            Section("Not compared", points=comparison.exclusions),
            Section("Published elsewhere", points=published_figures),
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
            Notice(difference.sentence(), difference.importance.value)
            for difference in confounders.find_differences(machines)
        ],
    )


def answer_sentences(comparison: Comparison) -> list[str]:
    """Return the sentences of the answer: each machine against the first, then the baseline.

    They are about the step of the subject at the headline, or of the first contender there if not
    all machines have the subject. The last sentence, that contender against the baseline per
    machine, is absent if it is the baseline, or if not all machines have the baseline there.
    """
    points, first_machine = comparison.points, comparison.machines[0]
    points = points[(points["role"] == comparison.headline) & (points["phase"] == "step")]
    subject, baseline = first_machine.run.subject.key, first_machine.run.baseline
    arms = points["arm"].unique()
    arm = subject if subject in arms else arms[0]
    by_machine = points[points["arm"] == arm].to_dict("records")
    answer = [_gain_sentence(comparison, i, by_machine) for i in range(1, len(comparison.machines))]
    if baseline.key in arms and baseline.key != arm:
        ratios = ", ".join(f"{text.ratio(point)} on {point['label']}" for point in by_machine)
        name = by_machine[0]["name"]
        answer.append(f"The time of {name} as a multiple of {baseline.label}'s is {ratios}.")
    return answer


def _gain_sentence(
    comparison: Comparison, machine_index: int, by_machine: Sequence[Mapping[str, Any]]
) -> str:
    """Return a sentence about the speed-up of a machine, with the bandwidth that may explain it.

    `by_machine` has the point of the headline of each machine, in the order of the comparison.
    """
    point, first, role = by_machine[machine_index], by_machine[0], comparison.headline
    is_swept = role.startswith(SWEEP)
    title = "the sweep's base point" if is_swept else comparison.machines[0].run.title(role)
    size_note = "" if point["same"] else ", each with sizes of its own"
    ratios = comparison.bandwidth_ratios(machine_index)
    explanation = "no bandwidth is known of both"
    for kind, template in (
        ("theory", "its makers state {} the bandwidth"),
        ("copy", "its memory copies {} as much"),
        ("gather", "its memory gathers {} as much"),  # the last known one counts
    ):
        if math.isfinite(ratios[kind]):
            explanation = template.format(text.times(ratios[kind]))
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
        f"On {title}{size_note}, a step of {point['name']} does {_format_gain(point)} the lookups "
        f"per second on {point['label']} that it does on {first['label']}; {explanation}."
    )


def _format_gain(point: Mapping[str, Any]) -> str:
    """Return a speed-up with its interval if it has one, such as "5.2× [5.0, 5.4]"."""
    low, high = point["gain_lo"], point["gain_hi"]
    has_interval = math.isfinite(low) and math.isfinite(high)
    return text.times(point["gain"]) + f" {text.interval(low, high)}" * has_interval


def points_table(comparison: Comparison, phase: str) -> Table:
    """Return the table of a phase: speed-ups, rates and bandwidth shares per role and contender."""
    points = comparison.points[comparison.points["phase"] == phase]
    ceiling, first_label = common_ceiling(points), comparison.machines[0].label

    # A row of the table is the list of a point's records, one per machine.
    def gain_value(point: Mapping[str, Any]) -> Value:
        size_note = "" if point["same"] else " (sizes differ)"
        return Value(_format_gain(point) + size_note, point["gain"])

    def gain_column(i: int) -> Column:
        return lambda by_machine: gain_value(by_machine[i])

    def rate_column(i: int) -> Column:
        return lambda by_machine: Value.of(1e-6 * by_machine[i]["rate"], text.digits)

    def share_column(i: int) -> Column:
        return lambda by_machine: Value.of(100 * by_machine[i][ceiling], text.digits)

    labels = list(enumerate(machine.label for machine in comparison.machines))
    columns: dict[str, Column] = {
        "work": lambda by_machine: by_machine[0]["role"],
        "contender": lambda by_machine: by_machine[0]["name"],
    }
    columns |= {f"{label} ÷ {first_label}": gain_column(i) for i, label in labels[1:]}
    columns |= {f"{label}: M lookups/s": rate_column(i) for i, label in labels}
    if ceiling:
        columns |= {f"{label}: % of {CEILINGS[ceiling]}": share_column(i) for i, label in labels}
    groups = points.groupby(["role", "arm"], sort=False)
    return Table.of([group.to_dict("records") for _, group in groups], columns)


def machines_table(machines: Sequence[Machine]) -> Table:
    """Return the table of machines: bandwidths, last cache, power, software."""

    def number_or(default: str, value: float | None, unit: str = "") -> Value:
        """Format a number with its unit; return `default` for None and nan."""
        if value is None or text.is_missing(value):
            return Value(default)
        return Value(f"{text.digits(value)}{unit}", value)

    def theory_column(name: str, unit: str = "") -> Column:
        return lambda machine: number_or(
            "unknown", machine.device and machine.device.figures.get(name), unit
        )

    def gather_column(row_bytes: int) -> Column:
        return lambda machine: number_or(
            "not measured", dict(machine.measured_ceilings.gather_gb_s).get(row_bytes)
        )

    def environment_column(*keys: str) -> Column:
        def read(machine: Machine) -> str:
            value: Any = machine.run.environment
            for key in keys:
                value = (value or {}).get(key)
            return str(value or text.DASH)

        return read

    columns: dict[str, Column] = {
        "machine": lambda machine: machine.label,
        "theory GB/s": theory_column("bandwidth_gb_s"),
        "copy GB/s": lambda machine: number_or("not measured", machine.measured_ceilings.copy_gb_s),
    }
    sizes = {
        row_bytes for machine in machines for row_bytes, _ in machine.measured_ceilings.gather_gb_s
    }
    for row_bytes in sorted(sizes):
        columns[f"gather {row_bytes} B GB/s"] = gather_column(row_bytes)
    columns |= {
        "last cache": theory_column("cache_mb", " MB"),
        "power": theory_column("tdp_w", " W"),
        "torch": environment_column("torch"),
        "driver": environment_column("gpu", "driver"),
        "CUDA": environment_column("gpu", "cuda"),
        "emblib": lambda machine: text.commit(machine.run.environment) or text.DASH,
        "measured": lambda machine: str(machine.run.environment.get("time_utc", ""))[:10],
    }
    return Table.of(machines, columns)


def sources_table(machines: Sequence[Machine]) -> Table:
    """Return the table of theoretical figures with their sources."""
    devices = {
        machine.device.key: machine.device for machine in machines if machine.device
    }.values()
    rows = [
        {
            "device": device.name,
            "figure": description,
            "value": f"{device.figures[key]:g}" if key in device.figures else text.DASH,
            "source": device.sources.get(key, ceilings.UNKNOWN),
        }
        for device in devices
        for key, description in ceilings.FIGURES.items()
    ]
    return Table.of(rows, {name: name for name in ("device", "figure", "value", "source")})


OPENING = f"""\
What others say of their embedding tables, where it was read, and what became of it here. This page
is written by `{COMMAND} write` from the files next to it and from the runs
in `reports/reference/`. How to add a figure or a run:
[docs/generations.md](../../docs/generations.md)."""


def overview(extra: Sequence[Path] = ()) -> Page:
    """Return the page of all published figures, judged by the references and the runs `extra`.

    `extra` are directories of runs.
    """
    judgements = published.judge_references(extra)
    counts = ", ".join(
        f"{count} {verdict.value}"
        for verdict, count in published.count_verdicts(judgements).items()
    )
    return Page(
        name="Published figures",
        answer=[f"{text.count(len(judgements), 'figure')}: {counts}."],
        sections=[
            Section(paragraphs=[OPENING, published.RULE]),
            *[
                _publication_section(
                    source, [judgement for judgement in judgements if judgement.source is source]
                )
                for source in published.publications()
            ],
        ],
    )


def _publication_section(source: Publication, judgements: Sequence[JudgedFigure]) -> Section:
    """Return the section of a publication: judged figures, then the figures not run, by reason."""
    command = f"`python run.py +experiment={source.experiment}`. " * bool(source.experiment)
    table_judgements = [
        judgement
        for judgement in judgements
        if judgement.verdict is not Reproduction.NOT_RUN or math.isfinite(judgement.ours)
    ]
    reasons: dict[str, list[PublishedFigure]] = {}
    for finding in judgements:
        if finding not in table_judgements:
            reasons.setdefault(finding.reason, []).append(finding.figure)
    return Section(
        source.title,
        [f"[{source.source}]({source.url}). {command}{source.note}"],
        table=anchor_report.table(table_judgements),
        parts=[
            Section(
                paragraphs=[
                    f"Not run here: {reason}. Theirs is of "
                    f"{published.their_device(figures_not_run[0])}."
                ],
                points=_list_figures(figures_not_run),
            )
            for reason, figures_not_run in reasons.items()
        ],
    )


def _list_figures(published_figures: Sequence[PublishedFigure]) -> list[str]:
    """Return a line per figure; figures of one unit and prefix before a colon share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for figure in published_figures:
        prefix, colon, suffix = figure.name.rpartition(": ")
        value = published.format_number(figure.value)
        name, entry = (prefix, f"{suffix} {value}") if colon else (figure.name, value)
        groups.setdefault((name, figure.unit), []).append(entry)
    return [f"{name}: {' · '.join(entries)} {unit}" for (name, unit), entries in groups.items()]
