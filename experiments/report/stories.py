"""What a report argues, by the kind of experiment: its answer, its figures, how to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.config.schema import Kind
from experiments.kinds import (
    anchor_report,
    cache,
    cache_report,
    calibration_report,
    growth_report,
    keys,
    keys_report,
    micro_report,
    sharding_report,
    trace_report,
)
from experiments.report import answer, figures
from experiments.report.data import Run
from experiments.report.style import Figure
from experiments.report.tables import Table
from experiments.results import metrics


@dataclass(frozen=True)
class Story:
    """The parts of a report that differ between kinds; everything else is shared."""

    answer: Callable[[Run], list[str]]  # sentences, the first of which answers the question
    figures: Callable[[Run], list[Figure]]  # the first is the main one
    notes: Sequence[str]  # under "How to read this"
    tables: Callable[[Run], Sequence[tuple[str, str, Table]]] = lambda run: ()  # before the results


STORIES = {
    Kind.time: Story(answer.answer, figures.figures, (metrics.FORMULA,)),
    Kind.anchor: Story(
        anchor_report.answer,
        anchor_report.figures,
        (*anchor_report.NOTES, metrics.FORMULA),
        anchor_report.tables,
    ),
    Kind.cache: Story(
        cache_report.answer, cache_report.figures, (cache.FORMULA, *cache.IDEALS, metrics.FORMULA)
    ),
    Kind.keys: Story(keys_report.answer, keys_report.figures, (keys.FORMULA,), keys_report.tables),
    Kind.growth: Story(
        growth_report.answer, growth_report.figures, growth_report.NOTES, growth_report.tables
    ),
    Kind.calibration: Story(
        calibration_report.answer,
        calibration_report.figures,
        calibration_report.NOTES,
        calibration_report.tables,
    ),
    Kind.sharding: Story(
        sharding_report.answer,
        sharding_report.figures,
        sharding_report.NOTES,
        sharding_report.tables,
    ),
    Kind.trace: Story(trace_report.answer, trace_report.figures, trace_report.NOTES),
    Kind.micro: Story(
        micro_report.answer, micro_report.figures, micro_report.NOTES, micro_report.tables
    ),
}


SMOKE = "Smoke run: its tables, batches and rounds are too small for its numbers to mean anything."


def sentences(run: Run) -> list[str]:
    """Return the answer of a run's report; of a smoke run, first that it is none."""
    found = story(run).answer(run)
    return [SMOKE, *found] if run.smoke else found


def story(run: Run) -> Story:
    """The story of a run's kind."""
    return STORIES[run.kind]
