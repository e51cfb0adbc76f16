"""What a report argues, by the kind of experiment: its answer, its figures, how to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.caches import rates
from experiments.config.schema import Kind
from experiments.hashing import numbers
from experiments.report import (
    anchors,
    answer,
    caching_figures,
    calibration,
    figures,
    growth,
    hashing,
    micro,
    sharding,
    sharding_figures,
    traces,
    traces_figures,
)
from experiments.report import caching as caches
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
        anchors.answer, anchors.figures, (*anchors.NOTES, metrics.FORMULA), anchors.tables
    ),
    Kind.cache: Story(
        caches.answer, caching_figures.figures, (rates.FORMULA, *rates.IDEALS, metrics.FORMULA)
    ),
    Kind.keys: Story(hashing.answer, hashing.figures, (numbers.FORMULA,), hashing.tables),
    Kind.growth: Story(growth.answer, growth.figures, growth.NOTES, growth.tables),
    Kind.calibration: Story(
        calibration.answer, calibration.figures, calibration.NOTES, calibration.tables
    ),
    Kind.sharding: Story(
        sharding.answer, sharding_figures.figures, sharding.NOTES, sharding.tables
    ),
    Kind.trace: Story(traces.answer, traces_figures.figures, traces.NOTES),
    Kind.micro: Story(micro.answer, micro.figures, micro.NOTES, micro.tables),
}


SMOKE = "Smoke run: its tables, batches and rounds are too small for its numbers to mean anything."


def sentences(run: Run) -> list[str]:
    """Return the answer of a run's report; of a smoke run, first that it is none."""
    found = story(run).answer(run)
    return [SMOKE, *found] if run.smoke else found


def story(run: Run) -> Story:
    """The story of a run's kind."""
    return STORIES[run.kind]
