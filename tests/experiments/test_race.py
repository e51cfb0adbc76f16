"""The race: order, pairing, stopping and failures, with a clock that only pretends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from experiments.config.schema import TimingConfig
from experiments.timing.race import Race


class Script:
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
            self.cost = next(costs)

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
    return Race(arms, TimingConfig(**(usual | timing)), script)


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


def test_warm_up_passes_over_the_whole_pool() -> None:
    script = Script()
    race(script, {"a": jumping}, warmup=2, max_rounds=1, warmup_seconds=100.0).run()
    warm = [n for _, p, n in script.calls[:-4] if p == "step"]
    assert warm == [0, 1, 2, 3, 0, 1, 2, 3]


def test_each_contender_is_told_when_it_is_warm() -> None:
    script, told = Script(), []
    contest = race(script, {"a": jumping, "b": jumping}, warmup=1, max_rounds=1)
    contest.warmed = lambda name: told.append((name, len(script.calls)))
    contest.run()
    assert sorted(told, key=lambda t: t[1]) == told
    assert {name for name, _ in told} == {"a", "b"}
    assert [calls for _, calls in told] == [8, 16]  # four batches, two phases each


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
    result = race(script, costs, cell_seconds=400.0, warmup_seconds=0.0).run()
    assert result["slow"].stop_reason == "budget"
    assert len(result["slow"].samples["step"]) == 2 * 6
    assert result["fast"].stop_reason == "max_rounds"
    assert len(result["fast"].samples["step"]) == 2 * 20


def test_a_very_slow_contender_still_has_three_rounds() -> None:
    script = Script()
    costs = {"slow": lambda: forever(1000.0), "fast": jumping}
    result = race(script, costs, cell_seconds=1.0, warmup_seconds=0.0).run()
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
