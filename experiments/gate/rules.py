"""The decision rules of the gate: what to measure next, and the verdict on each point.

There are two independent sets of pairs. The first covers every point, with more pairs for points
that remain unsure. A second set of the same size measures the points that look slower or faster
again, and only a verdict that it confirms counts. The second set is evaluated once, when it is
complete or the run was interrupted. So neither a longer first set nor many points make false alarms
more likely.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from experiments.results.store import RunStore, read_json
from experiments.timing import statistics
from experiments.timing.statistics import Effect, Verdict

ALPHA = 0.05  # probability of a false alarm in the second set, over all points together
CHANGES = (Verdict.SLOWER, Verdict.FASTER)
# Exit statuses; `pages.EXIT_MEANINGS` says what they mean.
EXIT_FINE, EXIT_REGRESSION, EXIT_UNSURE = 0, 3, 4
EXIT_FAILED, EXIT_NOTHING, EXIT_INTERRUPTED = 5, 6, 130


class Stage(Enum):
    """The set that a pair belongs to."""

    first = "first"
    second = "second"


@dataclass(frozen=True)
class Rules:
    """The numbers of pairs and the margin of each point.

    A run stores them at its start, and decides by them even if the noise floor changes later.
    """

    pairs: int  # pairs of the first set for every point
    max_pairs: int  # pairs of the first set for points that remain unsure
    margins: Mapping[str, float]  # largest relative effect that does not count, by gated point

    def save(self, store: RunStore) -> None:
        """Write rules.json."""
        store.write_json("rules.json", dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Rules | None:
        """Return the rules of a run's directory; None if it has none yet."""
        stored_rules = read_json(path, "rules.json")
        if not stored_rules:
            return None
        # Older runs call it most_pairs.
        max_pairs = int(stored_rules.get("max_pairs") or stored_rules["most_pairs"])
        return cls(stored_rules["pairs"], max_pairs, stored_rules["margins"])


@dataclass(frozen=True)
class Request:
    """The points that the next pair of processes measures."""

    stage: Stage
    points: tuple[str, ...]


@dataclass
class Evidence:
    """The effects that were measured so far.

    Attributes:
        first: log(head ÷ base) of each pair of the first set, by point.
        second: the same of the second set.
        lost_points: points that one side could not run.
    """

    first: dict[str, list[float]] = field(default_factory=dict)
    second: dict[str, list[float]] = field(default_factory=dict)
    lost_points: set[str] = field(default_factory=set)

    def add(self, stage: Stage, point: str, effect: float) -> None:
        """Add the effect of one pair, log(head ÷ base)."""
        effects = self.first if stage is Stage.first else self.second
        effects.setdefault(point, []).append(effect)


@dataclass(frozen=True)
class Ruling:
    """The verdict on a point, with its grounds.

    Attributes:
        verdict: final verdict.
        effect: effect of the second set if there is one, because the point was selected by its
            effect in the first set; else effect of the first set.
        margin: largest relative effect that does not count.
        visible: smallest effect that would have been called slower or faster.
        screened: verdict of the first set alone.
        first: log(head ÷ base) of the pairs of the first set.
        second: the same of the second set; () without one.
        p_value: p-value of the second set, adjusted for the number of points in it; nan without
            one.
    """

    verdict: Verdict
    effect: Effect
    margin: float
    visible: float
    screened: Verdict
    first: tuple[float, ...]
    second: tuple[float, ...]
    p_value: float = math.nan


def next_request(points: Sequence[str], evidence: Evidence, rules: Rules) -> Request | None:
    """Return what to measure next; None when the procedure is complete.

    `points` are names of `rules.margins`; lost ones are skipped. With one pair per point
    (`rules.pairs` is 1, as in a smoke run) no verdict is possible, and no more pairs are requested.
    """
    points = [point for point in points if point not in evidence.lost_points]
    first = {point: evidence.first.get(point, []) for point in points}
    # 1. The first set, of every point.
    if incomplete_points := [point for point in points if len(first[point]) < rules.pairs]:
        return Request(Stage.first, tuple(incomplete_points))
    # 2. More pairs of the first set, of points that are unsure.
    verdicts = {point: _verdict(first[point], rules.margins[point]) for point in points}
    max_first_pairs = rules.max_pairs if rules.pairs >= statistics.MIN_PROCESSES else 0
    unsure_points = [point for point in points if verdicts[point] is Verdict.UNSURE]
    if extensible_points := [
        point for point in unsure_points if len(first[point]) < max_first_pairs
    ]:
        return Request(Stage.first, tuple(extensible_points))
    # 3. The second set, of points that look slower or faster.
    changed_points = [point for point in points if verdicts[point] in CHANGES]
    unconfirmed_points = [
        point for point in changed_points if len(evidence.second.get(point, [])) < len(first[point])
    ]
    return Request(Stage.second, tuple(unconfirmed_points)) if unconfirmed_points else None


def decide(points: Sequence[str], evidence: Evidence, rules: Rules) -> dict[str, Ruling]:
    """Return the rulings by point, final if `next_request` returns None.

    `points` are names of `rules.margins`. A point that a side could not run, or that no pair has
    measured, has no ruling. SLOWER and FASTER need a second set with the same verdict, whose
    adjusted p-value is at most ALPHA; otherwise the point is UNSURE.
    """
    measured_points = [
        point for point in points if point not in evidence.lost_points and evidence.first.get(point)
    ]
    screened = {
        point: _verdict(evidence.first[point], rules.margins[point]) for point in measured_points
    }
    confirmable_points = [
        point
        for point in measured_points
        if screened[point] in CHANGES and evidence.second.get(point)
    ]
    sign = {Verdict.SLOWER: 1, Verdict.FASTER: -1}
    p_values = [
        statistics.p_value(evidence.second[point], sign[screened[point]])
        for point in confirmable_points
    ]
    adjusted_p = dict(zip(confirmable_points, statistics.adjust_by_holm(p_values), strict=True))
    rulings = {}
    for point in measured_points:
        margin, verdict, first = rules.margins[point], screened[point], evidence.first[point]
        second = evidence.second[point] if point in adjusted_p else []
        is_confirmed = adjusted_p.get(point, 1.0) <= ALPHA and _verdict(second, margin) is verdict
        if verdict in CHANGES and not is_confirmed:
            verdict = Verdict.UNSURE
        effect = statistics.combine_processes(second or first)
        rulings[point] = Ruling(
            verdict,
            effect,
            margin,
            statistics.smallest_detectable(effect, margin),
            screened[point],
            tuple(first),
            tuple(second),
            adjusted_p.get(point, math.nan),
        )
    return rulings


def _verdict(logs: Sequence[float], margin: float) -> Verdict:
    return statistics.verdict(statistics.combine_processes(logs), margin)
