"""Workloads: the law is the law, equal seeds give equal bits, table sizes are the public ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from experiments.config.schema import Distribution, Order, Tables, WorkloadConfig
from experiments.workloads import distributions, workload

SMALL = WorkloadConfig(T=3, E=500, D=8, B=6, L=4)


@pytest.mark.parametrize(
    ("s", "q"),
    [(0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (1.05, 0.0), (1.2, 5.0), (0.8, 2.7), (3.0, 0.0)],
)
def test_zipf_ranks_follow_the_law(s: float, q: float) -> None:
    rows, count = 60, 200_000
    ranks = distributions.zipf_ranks(np.random.default_rng(7), count, rows, s, q)
    seen = np.bincount(ranks, minlength=rows + 1)
    expected = count * distributions.zipf_probabilities(rows, s, q)
    chi_squared = ((seen[1:] - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    assert seen[0] == 0
    assert len(seen) == rows + 1
    assert chi_squared < 98  # 99.9 % quantile at 59 degrees of freedom; the seed is fixed


def test_zipf_probabilities_literally() -> None:
    assert distributions.zipf_probabilities(3, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert distributions.zipf_probabilities(2, 1.0, 1.0) == pytest.approx([3 / 5, 2 / 5])


def test_zipf_reaches_the_ends_of_a_large_table() -> None:
    ranks = distributions.zipf_ranks(np.random.default_rng(1), 100_000, 10_131_227, 0.5)
    assert ranks.min() >= 1
    assert 10_100_000 < ranks.max() <= 10_131_227


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 255, 256, 257, 5000])
def test_permute_is_a_bijection(rows: int) -> None:
    ids = distributions.permute(np.arange(1, rows + 1), rows, seed=3)
    assert sorted(ids.tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [1, 17, 300, 4096])
def test_few_rows_are_permuted_as_many_are(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = np.arange(rows, 0, -1)
    of_table = distributions.permute(ranks, rows, seed=3)
    monkeypatch.setattr(distributions, "_MAX_TABLE_ROWS", 0)
    assert (distributions.permute(ranks, rows, seed=3) == of_table).all()


def test_permute_depends_on_the_seed_and_scatters_popular_rows() -> None:
    ranks = np.arange(1, 101)
    first, second = (distributions.permute(ranks, 1_000_000, seed) for seed in (1, 2))
    assert (first != second).any()
    assert np.median(np.abs(np.diff(first))) > 10_000


def test_criteo_kaggle_has_the_public_sizes() -> None:
    assert sum(workload.CRITEO_KAGGLE) == 33_762_577
    assert len(workload.CRITEO_KAGGLE) == 26
    largest = sorted(workload.CRITEO_KAGGLE, reverse=True)[:7]
    assert largest == [10_131_227, 8_351_593, 7_046_547, 5_461_306, 2_202_608, 286_181, 142_572]
    shapes = workload.table_shapes(WorkloadConfig(tables=Tables.criteo_kaggle, D=16))
    assert workload.dense_bytes(shapes) == 33_762_577 * 16 * 4


def test_scaled_tables_keep_at_least_one_row() -> None:
    shapes = workload.table_shapes(WorkloadConfig(tables=Tables.criteo_kaggle), scale=1e-4)
    assert min(s.rows for s in shapes) == 1
    assert max(s.rows for s in shapes) == 1013


def test_batches_are_feature_major_and_in_range() -> None:
    shapes = workload.table_shapes(SMALL)
    pool = workload.make_pool(SMALL, shapes, 2, seed=1)
    batch = pool.batches[0]
    assert pool.lookups_per_batch == 3 * 6 * 4 == batch.indices.numel()
    assert batch.offsets.tolist() == list(range(0, 73, 4))
    assert batch.gradient.shape == (6, 24)
    assert int(batch.indices.min()) >= 0
    assert int(batch.indices.max()) < 500
    ids, offsets = batch.feature(2)
    assert ids.tolist() == batch.indices[48:].tolist()
    assert offsets.tolist() == [0, 4, 8, 12, 16, 20, 24]


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    shapes = workload.table_shapes(SMALL)
    first, again, other = (workload.make_pool(SMALL, shapes, 3, seed=s) for s in (5, 5, 6))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.batches[2].gradient, again.batches[2].gradient)
    assert not torch.equal(first.batches[0].indices, first.batches[1].indices)


def test_unique_rows_counts_distinct_rows_per_table() -> None:
    one = dataclasses.replace(SMALL, E=1)
    pool = workload.make_pool(one, workload.table_shapes(one), 2, seed=1)
    assert pool.unique_rows_per_batch == 3  # one row in each of three tables


def test_ranked_ids_are_popular_in_order() -> None:
    ranked = WorkloadConfig(T=1, E=1000, B=500, L=20, s=1.2, order=Order.ranked)
    ids = workload.make_pool(ranked, workload.table_shapes(ranked), 1, 1).batches[0].indices
    counts = torch.bincount(ids, minlength=1000)
    assert int(counts.argmax()) == 0
    uniform = dataclasses.replace(ranked, distribution=Distribution.uniform)
    ids = workload.make_pool(uniform, workload.table_shapes(uniform), 1, 1).batches[0].indices
    assert int(torch.bincount(ids).max()) < int(counts.max()) / 10
