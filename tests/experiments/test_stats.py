"""Statistics with answers known beforehand."""

from __future__ import annotations

import math
import random

import pytest

from experiments.timing import stats


def test_summary_of_known_samples() -> None:
    s = stats.summarise([4.0, 1.0, 3.0, 2.0, 5.0, 6.0])
    assert (s.n, s.median, s.q25, s.q75) == (6, 3.5, 2.25, 4.75)
    assert (s.lo, s.hi) == (1.0, 6.0)  # 1 - 2 / 2**6 = 96.9 %
    assert s.precision == pytest.approx(2.5 / 3.5)


def test_five_samples_have_no_95_percent_interval() -> None:
    s = stats.summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert math.isnan(s.lo)
    assert s.precision == math.inf


@pytest.mark.parametrize(("n", "rank"), [(5, None), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_interval_ranks_are_those_of_the_sign_test(n: int, rank: int | None) -> None:
    assert stats.interval_rank(n) == rank


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(2000):
        s = stats.summarise([rng.expovariate(1.0) for _ in range(25)])
        hits += s.lo <= math.log(2) <= s.hi
    assert 0.94 <= hits / 2000 <= 0.98  # 95.7 % by construction at n = 25


def test_paired_ratio_cancels_what_both_sides_share() -> None:
    noise = [1.0, 30.0, 1.1, 9.0, 1.0, 2.0, 50.0]
    baseline = {r: x for r, x in enumerate(noise)}
    arm = {r: 2.0 * x for r, x in enumerate(noise)}
    ratio = stats.paired_ratio(arm, baseline)
    assert ratio.median == pytest.approx(2.0)
    assert ratio.lo == pytest.approx(2.0)
    assert ratio.hi == pytest.approx(2.0)


def test_paired_ratio_uses_only_rounds_that_both_have() -> None:
    ratio = stats.paired_ratio({0: 3.0, 2: 3.0, 9: 99.0}, {0: 1.0, 1: 5.0, 2: 1.0})
    assert ratio.n == 2
    assert ratio.median == pytest.approx(3.0)


def test_spread_is_the_distance_of_the_quartiles_to_the_median() -> None:
    assert stats.summarise([4.0, 1.0, 3.0, 2.0, 5.0, 6.0]).spread == pytest.approx(2.5 / 3.5)
    assert stats.summarise([0.0, 0.0]).spread == math.inf


def test_a_noise_is_settled_after_32_estimates_that_agree() -> None:
    assert not stats.settled([0.1] * 31)
    assert stats.settled([0.1] * 32)
    assert stats.settled([9.0] + [0.1, 0.1049] * 16)
    assert not stats.settled([0.1, 0.106] * 16)


def test_the_tail_of_known_samples() -> None:
    found = stats.tail([*range(1, 10), 100])
    assert found.least == 1
    assert found.p90 == pytest.approx(9 + 0.1 * 91)
    assert found.p99 == pytest.approx(9 + 0.91 * 91)
    assert stats.tail([3.0]) == stats.Tail(3.0, 3.0, 3.0)
    assert math.isnan(stats.tail([]).least)
