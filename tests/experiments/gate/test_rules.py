"""The gate's decisions, on effects of which the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from experiments.gate.rules import (
    ALPHA,
    Evidence,
    Request,
    Rules,
    Ruling,
    Stage,
    decide,
    next_request,
)
from experiments.timing import statistics
from experiments.timing.statistics import Verdict

NAMES = ["a", "b", "c"]
RULES = Rules(5, 9, dict.fromkeys(NAMES, 0.05))
Source = Callable[[str, Stage], float]


def procedure(source: Source, rules: Rules = RULES) -> tuple[dict[str, Ruling], list[Request]]:
    evidence, asked = Evidence(), []
    names = list(rules.margins)
    while request := next_request(names, evidence, rules):
        asked.append(request)
        assert len(asked) < 100
        for point in request.points:
            evidence.add(request.stage, point, source(point, request.stage))
    return decide(names, evidence, rules), asked


def test_quiet_points_need_five_pairs_and_no_second_set() -> None:
    rng = random.Random(1)
    rulings, asked = procedure(lambda *_: rng.gauss(0, 0.005))
    assert {r.verdict for r in rulings.values()} == {Verdict.SAME}
    assert [r.stage for r in asked] == [Stage.first] * 5


def test_a_slowdown_is_measured_twice_and_nothing_else_is() -> None:
    rng = random.Random(2)
    slow = {"b": math.log(1.12)}
    rulings, asked = procedure(lambda p, _: slow.get(p, 0.0) + rng.gauss(0, 0.005))
    assert rulings["b"].verdict is Verdict.SLOWER
    assert rulings["b"].effect.ratio == pytest.approx(1.12, abs=0.02)
    assert [r for r in asked if r.stage is Stage.second] == [Request(Stage.second, ("b",))] * 5
    assert rulings["a"].verdict is Verdict.SAME


def test_what_the_second_set_does_not_find_is_unsure() -> None:
    rng = random.Random(3)
    effect = {Stage.first: math.log(1.12), Stage.second: 0.0}
    rulings, _ = procedure(lambda p, s: (effect[s] if p == "c" else 0.0) + rng.gauss(0, 0.005))
    assert rulings["c"].verdict is Verdict.UNSURE
    assert rulings["c"].screened is Verdict.SLOWER
    # What is shown is what was not chosen for its size.
    assert rulings["c"].effect.ratio == pytest.approx(1.0, abs=0.02)


def test_what_turns_round_is_not_confirmed() -> None:
    rng = random.Random(4)
    sign = {Stage.first: 1, Stage.second: -1}
    rulings, _ = procedure(lambda p, s: sign[s] * math.log(1.2) + rng.gauss(0, 0.005))
    assert {r.verdict for r in rulings.values()} == {Verdict.UNSURE}


def test_unsure_points_alone_get_more_pairs() -> None:
    rng = random.Random(5)
    spread = {"a": 0.12}
    rulings, asked = procedure(lambda p, _: rng.gauss(0, spread.get(p, 0.003)))
    assert rulings["a"].verdict is Verdict.UNSURE
    assert len(rulings["a"].first) == 9
    assert len(rulings["b"].first) == 5
    assert asked[5:] == [Request(Stage.first, ("a",))] * 4


def test_one_pair_ends_at_once_and_says_nothing() -> None:
    rulings, asked = procedure(lambda *_: 1.0, Rules(1, 9, dict.fromkeys(NAMES, 0.05)))
    assert len(asked) == 1
    assert {r.verdict for r in rulings.values()} == {Verdict.UNSURE}


def test_points_that_were_lost_are_not_asked_for() -> None:
    evidence = Evidence(lost_points={"a"})
    request = next_request(NAMES, evidence, RULES)
    assert request == Request(Stage.first, ("b", "c"))
    evidence.lost_points = set(NAMES)
    assert next_request(NAMES, evidence, RULES) is None
    assert decide(NAMES, evidence, RULES) == {}


def test_the_second_set_is_corrected_for_its_size() -> None:
    logs = [0.06, 0.15, 0.04, 0.12, 0.08]
    p = statistics.p_value(logs, 1)
    many = [f"p{n}" for n in range(int(ALPHA / p) + 2)]
    for names, verdict in ((many[:1], Verdict.SLOWER), (many, Verdict.UNSURE)):
        evidence = Evidence(
            {n: [0.1, 0.11, 0.09, 0.1, 0.12] for n in names}, {n: logs for n in names}
        )
        rulings = decide(names, evidence, Rules(5, 9, dict.fromkeys(names, 0.05)))
        assert {r.verdict for r in rulings.values()} == {verdict}
        assert rulings[names[0]].p_value == pytest.approx(min(1, len(names) * p))


def test_rates_at_the_noise_of_a_shared_machine() -> None:
    """sd 2.6 % between pairs, 8 points: no alarm in 150 gates; a slow point is seen."""
    rng = random.Random(6)
    names = [f"p{n}" for n in range(8)]
    rules = Rules(5, 9, dict.fromkeys(names, 0.05))
    alarms = caught = 0
    for _ in range(150):
        rulings, _ = procedure(lambda *_: rng.gauss(0, 0.026), rules)
        alarms += any(r.verdict is Verdict.SLOWER for r in rulings.values())
        rulings, _ = procedure(
            lambda p, _: rng.gauss(math.log(1.1) if p == "p3" else 0, 0.026), rules
        )
        caught += rulings["p3"].verdict is Verdict.SLOWER
    assert alarms <= 1
    assert caught >= 145
