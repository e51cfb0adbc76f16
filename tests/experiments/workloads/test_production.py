"""The production-like law: drawn lookups have the histograms that were published."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.config.schema import Distribution, WorkloadConfig
from experiments.workloads import production, workload

ROUNDING = 0.0005  # the shares are published with three decimals


def test_published_shares_add_up() -> None:
    assert sum(production.ROWS_SHARE) == pytest.approx(1, abs=17 * ROUNDING)
    assert sum(production.LOOKUPS_SHARE) == pytest.approx(1, abs=17 * ROUNDING)
    assert len(production.EDGES) == len(production.ROWS_SHARE) == len(production.LOOKUPS_SHARE)


def test_published_shares_agree_with_each_other() -> None:
    """A bin's lookups per row, from both shares and both totals, lie within the bin."""
    mean = production.NUM_LOOKUPS / production.NUM_DISTINCT_ROWS
    for b in range(9):  # further on a share of rows is one digit
        rows, lookups = production.ROWS_SHARE[b], production.LOOKUPS_SHARE[b]
        low = (lookups - ROUNDING) * mean / (rows + ROUNDING)
        high = (lookups + ROUNDING) * mean / (rows - ROUNDING)
        assert low <= production.EDGES[b + 1]
        assert high >= production.EDGES[b] + (b > 0)


MIN_ROWS_SHARE = 0.004  # smaller published shares of rows have one digit only
FIT_ROUNDS = 4000


def bins_by_class() -> tuple[np.ndarray, np.ndarray]:
    """Return rows and lookups per bin of one row of each class, [bins, classes]."""
    bins = np.stack([expected_bins(float(rate)) for rate in production.LOOKUP_RATES], axis=2)
    return bins[0], bins[1] / (production.NUM_LOOKUPS / production.NUM_DISTINCT_ROWS)


def expected_bins(rate: float) -> np.ndarray:
    """Return the probability that a row's count is in each bin, and its expected lookups there.

    Counts are Poisson; the result is [2, bins].
    """
    radius = 12 * rate**0.5 + 12
    counts = np.arange(max(1, int(rate - radius)), int(rate + radius) + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, counts[-1] + 1)))])
    chances = np.exp(counts * np.log(rate) - rate - log_factorials[counts])
    bin_of_count = np.searchsorted(production.EDGES, counts) - 1
    num_bins = len(production.EDGES)
    return np.stack(
        [
            np.bincount(bin_of_count, chances, num_bins),
            np.bincount(bin_of_count, chances * counts, num_bins),
        ]
    )


def test_the_classes_are_the_most_likely_ones() -> None:
    """Richardson-Lucy steps from equal classes end at the stored sizes, to their six digits."""
    rows, lookups = bins_by_class()
    has_two_digits = np.array(production.ROWS_SHARE) >= MIN_ROWS_SHARE
    expected = np.concatenate([rows[has_two_digits], lookups])
    published = np.concatenate(
        [np.array(production.ROWS_SHARE)[has_two_digits], np.array(production.LOOKUPS_SHARE)]
    )
    sizes = np.full(len(production.CLASS_ROWS), 1e-3)
    for _ in range(FIT_ROUNDS):
        sizes *= (published / (expected * sizes).sum(1)) @ expected / expected.sum(0)
    assert sizes == pytest.approx(production.CLASS_ROWS, rel=1e-5)


def test_the_classes_expect_the_published_histograms() -> None:
    """Within twice what rounding allows, in every bin of both."""
    rows, lookups = (bins @ production.CLASS_ROWS for bins in bins_by_class())
    assert rows == pytest.approx(np.array(production.ROWS_SHARE), abs=2 * ROUNDING)
    assert lookups == pytest.approx(np.array(production.LOOKUPS_SHARE), abs=2 * ROUNDING)
    assert lookups.sum() == pytest.approx(1, abs=0.002)


def test_drawn_lookups_have_the_published_histograms() -> None:
    table = 300_000
    count = production.published_lookups(table)
    drawn = production.draw_ranks(np.random.default_rng(4), count, table)
    counts = np.bincount(drawn, minlength=table + 1)[1:]
    counts = counts[counts > 0]
    rows, lookups = production.histograms(counts)
    assert rows == pytest.approx(np.array(production.ROWS_SHARE), abs=0.003)
    # Above 512 lookups a bin of this table has a few rows, which come or do not come into it.
    assert lookups[:10] == pytest.approx(np.array(production.LOOKUPS_SHARE[:10]), abs=0.004)
    assert lookups[10:].sum() == pytest.approx(sum(production.LOOKUPS_SHARE[10:]), abs=0.01)
    assert len(drawn) / len(counts) == pytest.approx(12.744, rel=0.01)


@pytest.mark.parametrize("rows", [1, 2, 7, 50, 1000, 65_536, 1_000_003])
def test_the_law_is_a_law_on_any_table(rows: int) -> None:
    law = production.probabilities(rows)
    assert len(law) == rows
    assert law.sum() == pytest.approx(1)
    assert (law > 0).all()
    assert (np.diff(law) <= 1e-15).all()


def test_ranks_follow_the_law() -> None:
    rows, count = 40, 200_000
    seen = np.bincount(
        production.draw_ranks(np.random.default_rng(3), count, rows), minlength=rows + 1
    )
    expected = count * production.probabilities(rows)
    assert seen[0] == 0
    assert ((seen[1:] - expected) ** 2 / expected).sum() < 73  # 99.9 % quantile at 39 degrees


def test_smaller_tables_keep_what_popular_rows_have() -> None:
    """The most popular hundredth of the rows has the same share, whatever the size of the table."""
    shares = [production.probabilities(n)[: n // 100].sum() for n in (10_000, 100_000, 1_000_000)]
    assert shares == pytest.approx([shares[2]] * 3, abs=0.002)


def test_a_workload_draws_it() -> None:
    work = WorkloadConfig(distribution=Distribution.production, T=2, E=20_000, D=4, B=256, L=14)
    shapes = workload.table_shapes(work)
    pool = workload.make_pool(work, shapes, 2, seed=1)
    again = workload.make_pool(work, shapes, 2, seed=1)
    assert pool.fingerprint == again.fingerprint
    for f in range(2):
        ids = pool.batches[0].feature(f)[0].numpy()
        most = np.bincount(ids).max() / len(ids)
        assert most == pytest.approx(production.probabilities(20_000)[0], abs=0.03)
    first, second = (set(pool.batches[0].feature(f)[0][:50].tolist()) for f in range(2))
    assert first != second  # popular rows have other ids in another table
