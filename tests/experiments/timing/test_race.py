"""The race: order, pairing, stopping, throttling and failures, with a clock that only pretends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from experiments.config.schema import TimingConfig
from experiments.machine.telemetry import Telemetry
from experiments.timing.clock import Clock, Phase, Reading, SampleTask
from experiments.timing.race import BACK_OFF_SECONDS, MAX_EXECUTIONS, Race


class Script(Clock):
    """A clock that advances by what the work says it costs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.cost = 0.0

    def time(self, work: Callable[[], object]) -> float:
        self.cost = 0.0
        work()
        return self.cost

    def phase(self, arm: str, phase: str, costs: Iterator[float]) -> Callable[[int], None]:
        def run(number: int) -> None:
            self.calls.append((arm, phase, number))
            self.cost += next(costs)

        return run


def forever(value: float) -> Iterator[float]:
    while True:
        yield value


def jumping() -> Iterator[float]:
    while True:
        yield from (1e-3, 5e-3)


def race(script: Script, costs: dict[str, Callable[[], Iterator[float]]], **timing: float) -> Race:
    arms = {a: {p: script.phase(a, p, c()) for p in ("forward", "step")} for a, c in costs.items()}
    usual = {"pool": 4, "min_rounds": 6, "max_rounds": 20, "cell_seconds": 100.0}
    quick = {"warmup_seconds": 0.0, "min_seconds": 0.0}
    return Race(arms, TimingConfig(**(usual | quick | timing)), script)


def test_every_round_has_every_arm_in_random_order_and_then_in_reverse() -> None:
    script = Script()
    result = race(script, {"a": jumping, "b": jumping}, max_rounds=12, warmup=0).run()
    orders = [(a, p) for a, p, _ in script.calls]
    rounds = [orders[i : i + 8] for i in range(0, len(orders), 8)]
    assert len(rounds) == 12
    assert all(len(set(turns[:4])) == 4 and turns[4:] == turns[3::-1] for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) > 4
    assert {r.stop_reason for r in result.values()} == {"max_rounds"}
    assert [n for n, _ in result["a"].samples["step"]] == sorted([*range(12), *range(12)])


def test_arms_of_a_round_see_the_same_batch_and_phases_different_ones() -> None:
    script = Script()
    race(script, {"a": jumping, "b": jumping}, max_rounds=6, warmup=0).run()
    for start in range(0, len(script.calls), 4):  # the two halves of a round
        batches = {(p, n) for _, p, n in script.calls[start : start + 4]}
        assert len(batches) == 2
        assert len({n for _, n in batches}) == 2


def test_each_contender_is_told_when_it_is_warm() -> None:
    script, told = Script(), []
    contest = race(script, {"a": jumping, "b": jumping}, warmup=1, max_rounds=1, warmup_cap=1e-4)
    contest.after_warmup = lambda name: told.append((name, len(script.calls)))
    contest.run()
    assert sorted(told, key=lambda t: t[1]) == told
    assert {name for name, _ in told} == {"a", "b"}
    assert [calls for _, calls in told] == [2, 4]  # a batch in each phase, and the cap is met


def test_steady_contenders_stop_as_soon_as_they_are_precise() -> None:
    script = Script()
    result = race(script, {"a": lambda: forever(1e-3), "b": lambda: forever(2e-3)}).run()
    assert {r.stop_reason for r in result.values()} == {"precise"}
    assert {len(r.samples["forward"]) for r in result.values()} == {2 * 6}


def test_a_cell_ends_for_all_when_its_time_is_used_up() -> None:
    script = Script()
    result = race(script, {"a": jumping, "b": jumping}, cell_seconds=0.15, warmup=0).run()
    assert {r.stop_reason for r in result.values()} == {"budget"}
    assert {len(r.samples["step"]) for r in result.values()} == {14}  # 24 ms a round


def test_a_slow_contender_runs_out_of_budget_and_the_fast_one_goes_on() -> None:
    script = Script()
    costs = {"slow": lambda: forever(10.0), "fast": jumping}
    result = race(script, costs, cell_seconds=400.0).run()
    assert result["slow"].stop_reason == "budget"
    assert len(result["slow"].samples["step"]) == 2 * 6
    assert result["fast"].stop_reason == "max_rounds"
    assert len(result["fast"].samples["step"]) == 2 * 20


def test_a_very_slow_contender_still_has_three_rounds() -> None:
    script = Script()
    costs = {"slow": lambda: forever(1000.0), "fast": jumping}
    result = race(script, costs, cell_seconds=1.0).run()
    assert len(result["slow"].samples["step"]) == 2 * 3


def test_a_contender_that_raises_leaves_and_keeps_its_samples() -> None:
    def breaks() -> Iterator[float]:
        yield from [1e-3] * 6
        raise RuntimeError("out of luck")

    script = Script()
    result = race(script, {"bad": breaks, "good": jumping}, warmup=0).run()
    assert result["bad"].stop_reason == "failed"
    assert str(result["bad"].error) == "out of luck"
    assert sum(len(s) for s in result["bad"].samples.values()) == 12
    assert len(result["good"].samples["step"]) == 2 * 20


def test_ctrl_c_is_not_a_failure_of_the_contender() -> None:
    def interrupted() -> Iterator[float]:
        yield 1e-3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(Script(), {"a": interrupted}, warmup=0).run()


def test_precise_after_a_few_samples_is_not_believed_before_enough_time() -> None:
    script = Script()
    result = race(script, {"a": lambda: forever(1e-3)}, min_seconds=0.031, max_rounds=99).run()
    assert result["a"].stop_reason == "precise"
    assert len(result["a"].samples["step"]) == 2 * 16


def test_a_noise_that_no_longer_changes_ends_the_race() -> None:
    script = Script()
    result = race(script, {"a": jumping, "b": jumping}, max_rounds=200).run()
    assert {r.stop_reason for r in result.values()} == {"stabilised"}
    rounds = len(result["a"].samples["step"]) // 2
    assert 32 <= rounds < 200
    noise = result["a"].noise["step"][-32:]
    assert max(noise) - min(noise) <= 0.05 * sorted(noise)[16]


def test_short_calls_share_a_sample_and_see_different_batches() -> None:
    script = Script()
    costs = {"fast": lambda: forever(20e-6), "slow": lambda: forever(1e-3)}
    result = race(script, costs, max_rounds=6, precision=0.0).run()
    assert result["fast"].executions == {"forward": 3, "step": 3}
    assert result["fast"].entries()["executions"] == {"forward": 3, "step": 3}
    assert "executions" not in result["slow"].entries()
    assert [s for _, s in result["fast"].samples["step"]] == pytest.approx([20e-6] * 12)
    timed = [n for a, p, n in script.calls if (a, p) == ("fast", "step")][-6:]
    assert len(set(timed[:3])) == len(set(timed[3:])) == 3


def test_the_shortest_calls_do_not_share_without_end() -> None:
    result = race(Script(), {"a": lambda: forever(1e-9)}, max_rounds=1, warmup_cap=1e-3).run()
    assert result["a"].executions["step"] == MAX_EXECUTIONS


def test_a_slow_contender_is_not_called_warm() -> None:
    costs = {"slow": lambda: forever(10.0), "fast": lambda: forever(1e-3)}
    result = race(Script(), costs).run()
    assert result["slow"].entries()["warm"] == {"passes": 0, "seconds": 20.0, "steady": False}
    assert result["slow"].entries()["flags"] == ["not_warm"]
    assert result["fast"].entries()["flags"] == []


@dataclass
class Heat(Telemetry):
    """Says after each round whether the machine was throttled during it."""

    answers: Iterator[bool]
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.log.append("start")

    def check(self) -> list[str]:
        return ["hw_thermal"] if next(self.answers) else []

    def stop(self) -> None:
        self.log.append("stop")

    def summary(self) -> dict[str, Any]:
        return {"sm_mhz": [1, 2, 3]}


def throttled(answers: Iterable[bool], rounds: int) -> tuple[Race, list[float]]:
    contest = race(Script(), {"a": jumping, "b": jumping}, warmup=0, max_rounds=rounds)
    slept: list[float] = []
    contest.telemetry, contest.sleep = Heat(iter(answers)), slept.append
    return contest, slept


def test_a_throttled_round_is_taken_again_and_what_it_gave_is_kept() -> None:
    contest, slept = throttled([False, True, True, False, False], rounds=3)
    result = contest.run()["a"]
    assert [n for n, _ in result.samples["step"]] == [0, 0, 1, 1, 2, 2]
    assert [n for n, _ in result.throttled_samples["step"]] == [1, 1, 1, 1]
    assert result.entries()["throttled_samples"] == result.throttled_samples
    assert slept == [BACK_OFF_SECONDS, 2.5 * BACK_OFF_SECONDS]
    assert result.entries()["flags"] == []
    assert result.entries()["hardware"] == {"sm_mhz": [1, 2, 3]}


def test_where_throttling_does_not_end_the_samples_count_and_say_so() -> None:
    contest, slept = throttled(forever_throttled(), rounds=4)
    result = contest.run()["b"]
    assert [n for n, _ in result.samples["step"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (
        len(result.throttled_samples["step"]) == 2 * 3
    )  # of the first round: the others are not repeated
    assert len(slept) == 3
    assert result.entries()["flags"] == ["throttled"]
    assert result.entries()["hardware"]["throttled_rounds"] == [0, 1, 2, 3]


def forever_throttled() -> Iterator[bool]:
    while True:
        yield True


def test_the_machine_is_watched_until_the_end_even_a_bad_one() -> None:
    def interrupted() -> Iterator[float]:
        yield 1e-3
        raise KeyboardInterrupt

    contest = race(Script(), {"a": interrupted}, warmup=0)
    contest.telemetry = heat = Heat(iter([False]))
    with pytest.raises(KeyboardInterrupt):
        contest.run()
    assert heat.log == ["start", "stop"]


class Late(Script):
    """A GPU that reports a failure only when it is waited for."""

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        for task in tasks:
            task.call()
        raise RuntimeError("an illegal memory access was encountered")


def test_a_failure_that_is_seen_late_is_everybodys() -> None:
    result = race(Late(), {"a": jumping, "b": jumping}, warmup=0).run()
    for measured in result.values():
        assert measured.stop_reason == "failed"
        assert "illegal memory access" in str(measured.error)


class Graphs(Script):
    """Adapts phases, and refuses to adapt one of them."""

    def adapt(self, phase: Phase, num_batches: int) -> Phase:
        phase(num_batches - 1)
        return lambda number: phase(number)


def test_a_contender_that_cannot_be_captured_leaves_before_it_is_timed() -> None:
    def stuck() -> Iterator[float]:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield 0.0

    script = Graphs()
    result = race(script, {"bad": stuck, "good": jumping}, warmup=0, max_rounds=2).run()
    assert result["bad"].stop_reason == "failed"
    assert result["bad"].samples == {"forward": [], "step": []}
    assert len(result["good"].samples["step"]) == 4


class Waiting(Script):
    """Every second sample has the launch inside."""

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        seconds = [self.time(task.call) for task in tasks]
        return [Reading(s, s / 2, s, is_exposed=i % 2 == 0) for i, s in enumerate(seconds)]


def test_what_only_a_gpu_has_reaches_the_record() -> None:
    result = race(Waiting(), {"a": jumping}, warmup=0, max_rounds=3).run()["a"].entries()
    assert result["flags"] == ["launch_exposed"]
    halves = [2 * s for _, s in result["wall_samples"]["forward"]]
    assert halves == pytest.approx([1e-3, 5e-3] * 3)


def test_a_contender_with_a_cache_may_warm_up_for_as_long_as_the_cell_has() -> None:
    """Its rate rises by a tenth a pass of 16 ms at 4 batches and two phases."""

    def totals() -> Iterator[dict[str, int]]:
        lookups = hits = 0
        for passes in range(99):
            yield {"lookups": lookups, "lookup_hits": hits}
            lookups, hits = lookups + 1000, hits + min(900, 100 * passes)

    def warm(seconds: float) -> dict[str, Any]:
        counted = totals()
        contest = race(Script(), {"a": lambda: forever(2e-3)}, cell_seconds=seconds, max_rounds=1)
        contest.timing.warmup_cap = 0.02
        contest.counters = lambda name: next(counted)
        return contest.run()["a"].entries()

    enough = warm(seconds=1.0)
    assert (enough["warm"]["hit_rate"], enough["flags"]) == (0.9, [])
    assert enough["warm"]["seconds"] > 0.1
    assert warm(seconds=0.05)["flags"] == ["not_warm"]


def test_whoever_waits_is_told_who_is_at_work() -> None:
    told: list[str] = []
    contest = race(Script(), {"a": jumping, "b": jumping}, max_rounds=1, warmup=1)
    contest.note = told.append
    contest.run()
    assert {"a|warming up", "b|warming up"} == set(told[:2])
    assert set(told[2:]) == {"a|timing, round 1", "b|timing, round 1"}
    assert len(told[2:]) == 8
