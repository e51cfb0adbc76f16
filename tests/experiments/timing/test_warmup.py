"""Warm-up: whole passes, until times and hit rates stay, and never without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from experiments.config.schema import TimingConfig
from experiments.timing.clock import Clock
from experiments.timing.warmup import WarmUpResult, warm_up


class Script(Clock):
    """Each call takes what the script says next; the last entry for ever."""

    def __init__(self, costs: Callable[[int], float]) -> None:
        self.costs, self.calls, self.cost = costs, [], 0.0

    def time(self, work: Callable[[], object]) -> float:
        work()
        return self.cost

    def phase(self, number: int) -> None:
        self.cost = self.costs(len(self.calls))
        self.calls.append(number)


def warm(script: Script, **timing: float) -> WarmUpResult:
    usual = {"pool": 4, "warmup": 3, "warmup_seconds": 0.0, "warmup_cap": 100.0}
    return warm_up({"step": script.phase}, script, TimingConfig(**(usual | timing)))


def test_all_batches_three_times_where_times_are_steady() -> None:
    script = Script(lambda call: 1e-3)
    found = warm(script)
    assert script.calls == [0, 1, 2, 3] * 3
    assert (found.passes, found.is_steady) == (3, True)
    assert found.median_s == {"step": 1e-3}


def test_until_two_passes_are_alike() -> None:
    script = Script(lambda call: 1e-3 * max(1.0, 2 - 0.1 * (call // 4)))  # 10 passes to settle
    found = warm(script)
    assert found.is_steady
    assert found.passes == 12


def test_no_less_than_the_time_asked_for() -> None:
    found = warm(Script(lambda call: 1e-3), warmup_seconds=0.021)
    assert found.passes == 6
    assert found.seconds == pytest.approx(0.024)


def test_times_that_never_settle_end_at_the_cap() -> None:
    script = Script(lambda call: 1e-3 * (1 + call))
    found = warm(script, warmup_cap=1.0)
    assert not found.is_steady
    assert sum(1e-3 * (1 + c) for c in range(len(script.calls) - 1)) < 1.0 <= found.seconds


def test_a_slow_contender_gets_at_least_a_batch() -> None:
    script = Script(lambda call: 60.0)
    found = warm(script, warmup_cap=1.0)
    assert script.calls == [0]
    assert (found.passes, found.is_steady) == (0, False)


def test_no_warm_up_where_none_is_asked_for() -> None:
    script = Script(lambda call: 1.0)
    assert warm(script, warmup=0) == WarmUpResult()
    assert script.calls == []


def filling(rates: Iterator[float]) -> Callable[[], dict[str, int]]:
    """Counters of a cache that is asked after each pass of 1000 lookups."""
    lookups = hits = 0

    def counters() -> dict[str, int]:
        nonlocal lookups, hits
        found = {"lookups": lookups, "lookup_hits": hits}
        lookups, hits = lookups + 1000, hits + int(1000 * next(rates))
        return found

    return counters


def test_a_cache_is_warm_when_its_hit_rate_stays() -> None:
    rates = iter([0.1, 0.3, 0.5, 0.6, 0.63, 0.633, 0.9])
    script = Script(lambda call: 1e-3)
    timing = TimingConfig(pool=4, warmup_seconds=0.0, warmup_cap=100.0)
    found = warm_up({"step": script.phase}, script, timing, counters=filling(rates))
    assert found.passes == 6
    assert found.is_steady
    assert found.entries()["hit_rate"] == 0.633


def test_a_cache_that_is_still_filling_at_the_cap_says_so() -> None:
    rates = iter([0.1 * i for i in range(9)])
    script = Script(lambda call: 1.0)
    timing = TimingConfig(pool=4, warmup_seconds=0.0, warmup_cap=16.0)
    found = warm_up({"step": script.phase}, script, timing, counters=filling(rates))
    assert (found.passes, found.is_steady, found.is_filling) == (4, False, True)
