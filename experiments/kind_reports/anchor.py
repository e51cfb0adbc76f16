"""The report of an anchor, a run of a published configuration: its figures, ours, and verdicts.

A *published figure* is a number; the figures of the report are drawings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from experiments.config.sweep import Arm
from experiments.kind_reports import keys as keys_report
from experiments.report import answer as timed
from experiments.report import published, text
from experiments.report.charts import set_plain_ticks
from experiments.report.data import Run
from experiments.report.figures import timed_figures
from experiments.report.published import JudgedFigure, Reproduction, format_number
from experiments.report.style import INK, Drawing, Figure, Panel
from experiments.report.tables import Column, Table, TitledTable, Value
from experiments.results import metrics

NOTES = (
    published.RULE,
    "reports/published/ has the published figures, with their sources and devices. Intervals of "
    "our figures are those of the median; a figure that follows from sizes has none.",
    metrics.FORMULA,
)
LINE_HEIGHT = 0.62  # inches of a published figure in the drawing
MIN_HEIGHT = 2.0  # inches of all lines together
MAX_NAMED = 3  # without a verdict, in a sentence; the table has the others


def answer(run: Run) -> list[str]:
    """Count the verdicts and name the figures behind them; append the answer of the kind `time`."""
    judgements = published.judge_run(run)
    if not judgements:
        return [f"No figure in reports/published names {run.config.name} as its experiment."]
    counts = published.count_verdicts(judgements)
    counts_text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    sentences = [f"Of {len(judgements)} published figures: {counts_text}."]
    for verdict in (Reproduction.REPRODUCED, Reproduction.DIFFERS):
        figure_names = [
            f"{judgement.figure.name} ({_format_pair(judgement)})"
            for judgement in judgements
            if judgement.verdict is verdict
        ]
        if figure_names:
            sentences.append(f"{verdict.value.capitalize()}: {'; '.join(figure_names)}.")
    not_run = [
        judgement
        for judgement in judgements
        if judgement.verdict is Reproduction.NOT_RUN and math.isfinite(judgement.ours)
    ]
    if not_run:
        figure_names = [
            f"{judgement.figure.name} ({_format_pair(judgement)})"
            for judgement in not_run[:MAX_NAMED]
        ]
        num_more = len(not_run) - MAX_NAMED
        more_note = f"; {num_more} more in the table" if num_more > 0 else ""
        sentences.append(
            f"Ours for comparison, without a verdict: {'; '.join(figure_names)}{more_note}."
        )
    timed_answer = timed.answer(run)
    return sentences + ([] if timed_answer[0].startswith("No answer") else timed_answer)


def _format_pair(judgement: JudgedFigure) -> str:
    """Return our number and the published one, e.g. '1.230 for 1.2 ms'."""
    figure = judgement.figure
    return f"{text.digits(judgement.ours, 4)} for {format_number(figure.value)} {figure.unit}"


def tables(run: Run) -> list[TitledTable]:
    """Return a table per publication that the run is compared with, then the tables of `keys`."""
    judgements = published.judge_run(run)
    sources = {judgement.source.key: judgement.source for judgement in judgements}
    published_tables = [
        TitledTable(
            f"Published: {source.title}",
            f"Source: {source.source}. {source.note}".strip(),
            table([judgement for judgement in judgements if judgement.source.key == key]),
        )
        for key, source in sources.items()
    ]
    return [*published_tables, *keys_report.tables(run)]


def table(judgements: Sequence[JudgedFigure]) -> Table:
    """Return one row per published figure, conclusive verdicts first."""
    order = list(Reproduction)
    rows = sorted(
        judgements,
        key=lambda judgement: (order.index(judgement.verdict), math.isnan(judgement.ours)),
    )
    columns: dict[str, Column] = {
        "figure": lambda judgement: judgement.figure.name,
        "theirs": lambda judgement: Value(
            format_number(judgement.figure.value), judgement.figure.value
        ),
        "ours": _our_value,
        "unit": lambda judgement: judgement.figure.unit,
        "verdict": lambda judgement: judgement.verdict.value,
        "why": lambda judgement: judgement.reason,
        "theirs is of": lambda judgement: published.their_device(judgement.figure),
        "ours is of": _our_origin,
    }
    return Table.of(rows, columns)


def _our_value(judgement: JudgedFigure) -> Value:
    """Return our number with its interval."""
    number = text.digits(judgement.ours, 4)
    if math.isfinite(judgement.lo) and math.isfinite(judgement.hi):
        number += f" [{text.digits(judgement.lo)}, {text.digits(judgement.hi)}]"
    return Value(number, judgement.ours)


def _our_origin(judgement: JudgedFigure) -> str:
    """Return the arm and the device of our number; a dash without a number."""
    point = judgement.figure.ours
    return (
        f"{_arm_label(point.arm)}, {judgement.device}" if point and judgement.device else text.DASH
    )


def _arm_label(arm: str) -> str:
    """Return the label of an arm's key, 'name', 'name@load' or 'name-rank'."""
    name, _, load = arm.partition("@")
    if load:
        return Arm(name, load=float(load)).label
    name, _, rank = arm.partition("-")
    return Arm(name, int(rank) if rank else 0).label


def figures(run: Run) -> list[Figure]:
    """Return drawings of published numbers and ours, then those of the run's kind."""
    pairs = [
        judgement
        for judgement in published.judge_run(run)
        if judgement.verdict is not Reproduction.NOT_RUN
    ]
    result = []
    if pairs:
        height = 1.2 + max(MIN_HEIGHT, LINE_HEIGHT * len(pairs))
        panel = Panel("Ours on the scale of theirs", _pair_chart(pairs), 9.0, height)
        result.append(
            Figure(
                "published",
                "Published figures and ours",
                "Open diamonds: published. Dots: ours. Each line has a unit and scale of its own. "
                "Only figures that could be judged are drawn; others would be divided across "
                "devices or different work.",
                "",
                [panel],
            )
        )
    return [*result, *timed_figures(run), *keys_report.figures(run)]


VERDICT_COLOURS = {Reproduction.REPRODUCED: "#2e8540", Reproduction.DIFFERS: "#be123c"}


def _pair_chart(judgements: Sequence[JudgedFigure]) -> Drawing:
    """Draw one line per pair, with both numbers, on the scale of their ratio."""

    def draw(axes: Axes) -> None:
        for line, judgement in enumerate(judgements):
            colour = VERDICT_COLOURS[judgement.verdict]
            ratio = judgement.ours / judgement.figure.value
            axes.plot([1.0, ratio], [line, line], color=colour, lw=1.2)
            axes.plot(1.0, line, "D", mfc="none", color=INK, ms=7)
            axes.plot(ratio, line, "o", color=colour, ms=8)
            label = f"{_format_pair(judgement)}: {judgement.verdict.value}"
            axes.annotate(
                label,
                (1.0, line),
                (0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=colour,
            )
        axes.set_xscale("log")
        # At least a factor of 1.5 on both sides: a deviation of 1 % must look small.
        max_ratio = 1.2 * max(
            [
                1.25,
                *(
                    max(judgement.ours, judgement.figure.value)
                    / min(judgement.ours, judgement.figure.value)
                    for judgement in judgements
                ),
            ]
        )
        axes.set_xlim(1 / max_ratio, max_ratio)
        set_plain_ticks(axes.xaxis)
        axes.set_yticks(
            range(len(judgements)), [_break_name(judgement.figure.name) for judgement in judgements]
        )
        axes.set_ylim(len(judgements) - 0.4, -0.8)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("ours ÷ published")

    return draw


def _break_name(name: str) -> str:
    """Break a name of more than 34 letters after its colon and its first comma."""
    return name.replace(": ", ":\n").replace(", ", ",\n", 1) if len(name) > 34 else name
