"""Verdicts: intervals against tables, rates against simulations with known truth."""

from __future__ import annotations

import math
import random
import statistics as python_statistics
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.timing import statistics
from experiments.timing.statistics import Effect, Verdict

# Two-sided 95 % and 99 % points of Student's t, as printed in any table.
TABLE = [
    (1, 12.706, 63.657),
    (2, 4.303, 9.925),
    (3, 3.182, 5.841),
    (4, 2.776, 4.604),
    (5, 2.571, 4.032),
    (8, 2.306, 3.355),
    (15, 2.131, 2.947),
    (30, 2.042, 2.750),
    (120, 1.980, 2.617),
]


@pytest.mark.parametrize(("freedom", "at95", "at99"), TABLE)
def test_student_quantiles_are_those_of_the_table(freedom: int, at95: float, at99: float) -> None:
    assert statistics.t_quantile(freedom) == pytest.approx(at95, abs=5e-4)
    assert statistics.t_quantile(freedom, 0.99) == pytest.approx(at99, abs=5e-4)


def test_one_process_pairs_its_rounds() -> None:
    base = {0: 1.0, 1: 1.0, 2: 9.0, 5: 1.0}
    arm = {0: 1.1, 1: 1.1, 2: 9.9, 7: 3.0}  # round 2 was disturbed, for both alike
    assert math.exp(statistics.process_effect(arm, base)) == pytest.approx(1.1)
    with pytest.raises(ValueError, match="no round in common"):
        statistics.process_effect({1: 1.0}, {2: 1.0})


def test_two_processes_with_the_spread_of_the_run_cover_as_often_as_they_say() -> None:
    """12 cells of 3 processes and one of 2, equal in truth; noise of 2 % between processes."""
    rng, runs = random.Random(11), 1500
    covered, widths, own_widths = 0, [], []
    for _ in range(runs):
        others = [[rng.gauss(0, 0.02) for _ in range(3)] for _ in range(12)]
        logs = [rng.gauss(0, 0.02) for _ in range(2)]
        effect = statistics.combine_processes(logs, statistics.pool_spreads([*others, logs]))
        covered += effect.lo <= 1 <= effect.hi
        widths.append(effect.hi / effect.lo)
        alone = statistics.combine_processes(logs)
        own_widths.append(alone.hi / alone.lo)
    assert 0.94 <= covered / runs <= 0.99
    assert python_statistics.median(widths) - 1 < (python_statistics.median(own_widths) - 1) / 2
    assert min(widths) > 1.02 > min(own_widths)  # a lucky pair looks no more precise


def test_three_processes_keep_their_own_spread() -> None:
    logs, wild = [0.0, 0.01, 0.02], statistics.pool_spreads([[0.0, 1.0]] * 9)
    assert statistics.combine_processes(logs, wild) == statistics.combine_processes(logs)
    assert statistics.pool_spreads([[0.1], []]) is None


def test_processes_make_the_interval() -> None:
    logs = [math.log(r) for r in (1.08, 1.10, 1.12, 1.09, 1.11)]
    effect = statistics.combine_processes(logs)
    half = 2.776 * python_statistics.stdev(logs) / math.sqrt(5)
    assert effect.processes == 5
    assert math.log(effect.ratio) == pytest.approx(python_statistics.fmean(logs))
    assert math.log(effect.hi / effect.ratio) == pytest.approx(half, rel=1e-3)
    assert math.log(effect.ratio / effect.lo) == pytest.approx(half, rel=1e-3)


def test_one_process_has_no_interval_and_no_verdict() -> None:
    effect = statistics.combine_processes([0.2])
    assert effect.ratio == pytest.approx(math.exp(0.2))
    assert math.isnan(effect.lo)
    assert statistics.verdict(effect, 0.03) is Verdict.UNSURE
    assert statistics.smallest_detectable(effect, 0.03) == math.inf
    assert statistics.verdict(statistics.combine_processes([]), 0.03) is Verdict.UNSURE


@pytest.mark.parametrize(
    ("lo", "ratio", "hi", "expected"),
    [
        (1.06, 1.08, 1.10, Verdict.SLOWER),
        (1.01, 1.08, 1.15, Verdict.SLOWER),
        (0.99, 1.08, 1.18, Verdict.UNSURE),  # may be nothing
        (1.01, 1.02, 1.03, Verdict.SAME),  # surely slower, by less than matters
        (0.97, 1.00, 1.03, Verdict.SAME),
        (0.97, 1.00, 1.06, Verdict.UNSURE),  # may be too much
        (0.90, 0.92, 0.94, Verdict.FASTER),
        (0.90, 0.92, 1.01, Verdict.UNSURE),
    ],
)
def test_verdicts(lo: float, ratio: float, hi: float, expected: Verdict) -> None:
    assert statistics.verdict(Effect(ratio, lo, hi, 5, 0.02), 0.05) is expected


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=9), st.floats(0.01, 0.2))
def test_swapping_the_arms_swaps_the_verdict(logs: list[float], margin: float) -> None:
    turned = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    verdict = statistics.verdict(statistics.combine_processes(logs), margin)
    other = statistics.verdict(statistics.combine_processes([-x for x in logs]), margin)
    assert other is turned.get(verdict, verdict)


def test_what_could_have_been_seen_shrinks_with_the_noise() -> None:
    quiet = statistics.combine_processes([0.001, -0.001, 0.0, 0.001, -0.001])
    loud = statistics.combine_processes([0.05, -0.05, 0.0, 0.05, -0.05])
    assert statistics.smallest_detectable(quiet, 0.03) == pytest.approx(0.03, abs=0.002)
    assert statistics.smallest_detectable(loud, 0.03) > 0.08


def test_margins_come_from_the_noise_or_the_least_of_interest() -> None:
    assert statistics.gate_margin(0.03, 0.001, 5) == 0.03
    assert statistics.gate_margin(0.03, 0.04, 4) == pytest.approx(0.06)
    assert statistics.median_deviation([0.1, -0.2, 0.3]) == 0.2


def test_p_values_are_one_sided() -> None:
    logs = [0.05, 0.06, 0.04, 0.05, 0.07]
    up, down = statistics.p_value(logs, 1), statistics.p_value(logs, -1)
    assert up < 0.001
    assert up + down == pytest.approx(1)
    # t = 2.776 with 4 degrees of freedom leaves 2.5 % above it.
    spread = python_statistics.stdev([-1.0, 0.0, 1.0, 0.5, -0.5])
    shift = 2.776 * spread / math.sqrt(5)
    at = statistics.p_value([x + shift for x in (-1.0, 0.0, 1.0, 0.5, -0.5)], 1)
    assert at == pytest.approx(0.025, abs=1e-4)
    assert statistics.p_value([0.5], 1) == 1.0
    assert statistics.p_value([0.1, 0.1, 0.1], 1) == 0.0


def test_holm_steps_down() -> None:
    assert statistics.adjust_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )
    assert statistics.adjust_by_holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.adjust_by_holm([]) == []


@pytest.mark.parametrize(
    ("hits", "trials", "lo", "hi"),
    [(0, 200, 0.0, 0.0189), (200, 200, 0.9811, 1.0), (95, 100, 0.8882, 0.9785), (0, 0, 0.0, 1.0)],
)
def test_wilson_intervals(hits: int, trials: int, lo: float, hi: float) -> None:
    assert statistics.wilson_interval(hits, trials) == pytest.approx((lo, hi), abs=1e-4)


def bootstrap(processes: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """An interval that assumes no distribution: processes drawn, then the log ratios of each."""
    rng = random.Random(seed)
    means = []
    for _ in range(2000):
        drawn = rng.choices(processes, k=len(processes))
        medians = [python_statistics.median(rng.choices(blocks, k=len(blocks))) for blocks in drawn]
        means.append(python_statistics.fmean(medians))
    means.sort()
    tail = round((1 - statistics.CONFIDENCE) / 2 * (len(means) - 1))
    return math.exp(means[tail]), math.exp(means[-1 - tail])


def test_a_bootstrap_agrees_where_both_are_right() -> None:
    rng = random.Random(1)
    processes = []
    for _ in range(40):
        bias = rng.gauss(math.log(1.1), 0.03)
        processes.append([rng.gauss(bias, 0.01) for _ in range(12)])
    lo, hi = bootstrap(processes, seed=2)
    effect = statistics.combine_processes([python_statistics.median(p) for p in processes])
    assert lo == pytest.approx(effect.lo, abs=0.01)
    assert hi == pytest.approx(effect.hi, abs=0.01)


def test_intervals_hold_what_they_promise() -> None:
    """5 processes of a known ratio: the 95 % interval holds it in about 95 % of 2000 runs."""
    rng = random.Random(7)
    truth = math.log(1.07)
    held = 0
    for _ in range(2000):
        effect = statistics.combine_processes([rng.gauss(truth, 0.03) for _ in range(5)])
        held += effect.lo <= 1.07 <= effect.hi
    lo, hi = statistics.wilson_interval(held, 2000)
    assert lo < 0.95 < hi


def test_verdicts_at_the_noise_of_a_shared_machine() -> None:
    """sd 2.6 % between processes: 10 % more is called slower nearly always, 0 % nearly never."""
    rng = random.Random(3)
    for shift, verdict, least, most in (
        (0.0, Verdict.SLOWER, 0, 6),
        (math.log(1.10), Verdict.SLOWER, 960, 1000),
        (math.log(1 / 1.10), Verdict.FASTER, 960, 1000),
    ):
        found = Counter(
            statistics.verdict(
                statistics.combine_processes([rng.gauss(shift, 0.026) for _ in range(5)]), 0.05
            )
            for _ in range(1000)
        )
        assert least <= found[verdict] <= most


def test_summary_of_known_samples() -> None:
    s = statistics.summarise([4.0, 1.0, 3.0, 2.0, 5.0, 6.0])
    assert (s.n, s.median, s.q25, s.q75) == (6, 3.5, 2.25, 4.75)
    assert (s.lo, s.hi) == (1.0, 6.0)  # 1 - 2 / 2**6 = 96.9 %
    assert s.precision == pytest.approx(2.5 / 3.5)


def test_five_samples_have_no_95_percent_interval() -> None:
    s = statistics.summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert math.isnan(s.lo)
    assert s.precision == math.inf


@pytest.mark.parametrize(("n", "rank"), [(5, None), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_interval_ranks_are_those_of_the_sign_test(n: int, rank: int | None) -> None:
    assert statistics.interval_rank(n) == rank


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(2000):
        s = statistics.summarise([rng.expovariate(1.0) for _ in range(25)])
        hits += s.lo <= math.log(2) <= s.hi
    assert 0.94 <= hits / 2000 <= 0.98  # 95.7 % by construction at n = 25


def test_spread_is_the_distance_of_the_quartiles_to_the_median() -> None:
    assert statistics.summarise([4.0, 1.0, 3.0, 2.0, 5.0, 6.0]).spread == pytest.approx(2.5 / 3.5)
    assert statistics.summarise([0.0, 0.0]).spread == math.inf


def test_a_noise_is_settled_after_32_estimates_that_agree() -> None:
    assert not statistics.has_settled([0.1] * 31)
    assert statistics.has_settled([0.1] * 32)
    assert statistics.has_settled([9.0] + [0.1, 0.1049] * 16)
    assert not statistics.has_settled([0.1, 0.106] * 16)


def test_the_tail_of_known_samples() -> None:
    found = statistics.tail_of([*range(1, 10), 100])
    assert found.minimum == 1
    assert found.p90 == pytest.approx(9 + 0.1 * 91)
    assert found.p99 == pytest.approx(9 + 0.91 * 91)
    assert statistics.tail_of([3.0]) == statistics.Tail(3.0, 3.0, 3.0)
    assert math.isnan(statistics.tail_of([]).minimum)
