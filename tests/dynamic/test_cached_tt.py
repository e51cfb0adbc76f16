"""Tensor trains with stored rows: against dense tables, through evictions and checkpoints."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor

import emblib
from emblib import optim
from emblib.dynamic import CachedTTEmbeddingBags, RowEviction, TTCache
from emblib.specs import Pooling, TTSpec

TABLES = (TTSpec(300, 12, (4, 4)), TTSpec(70, 8, (3,), ids="permuted", seed=5))


def bags_of(
    rows: int | tuple[int, ...] = 20,
    eviction: str = "project",
    optimizer: optim.Optimizer | None = None,
    pooling: Pooling = Pooling.SUM,
    **options: object,
) -> CachedTTEmbeddingBags:
    torch.manual_seed(0)
    cache = TTCache(rows, eviction, **options)
    return CachedTTEmbeddingBags(TABLES, cache, optimizer or optim.SGD(0.1), pooling=pooling)


def batch(seed: int, batch_size: int = 6, most: int = 5) -> tuple[Tensor, Tensor]:
    """Ids of both tables, small ids more often, some -1; and offsets."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (2 * batch_size,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = []
    for table, spec in enumerate(TABLES):
        count = int(lengths[table * batch_size : (table + 1) * batch_size].sum())
        drawn = (spec.rows * torch.rand(count, generator=draw) ** 4).long()
        ids.append(torch.where(torch.rand(count, generator=draw) < 0.05, -1, drawn))
    return torch.cat(ids), offsets


def pooled(tables: list[Tensor], ids: Tensor, offsets: Tensor, *, mean: bool = False) -> Tensor:
    """The sums of the rows of each bag, from dense tables."""
    size = (len(offsets) - 1) // 2
    columns = []
    for table, rows in enumerate(tables):
        bags = []
        for b in range(size):
            first, last = offsets[table * size + b : table * size + b + 2].tolist()
            own = ids[first:last]
            total = rows[own[own >= 0]].sum(0)
            bags.append(total / max(last - first, 1) if mean else total)
        columns.append(torch.stack(bags))
    return torch.cat(columns, 1)


def train(bags: CachedTTEmbeddingBags, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        ids, offsets = batch(step)
        bags(ids, offsets).square().sum().backward()


@pytest.mark.parametrize("mean", [False, True])
def test_lookups_read_stored_rows_and_cores(mean: bool) -> None:
    bags = bags_of(pooling=Pooling.MEAN if mean else Pooling.SUM)
    train(bags, 3)
    bags.populate()
    train(bags, 3, 3)
    stored = [bags.cached_ids(t) for t in (0, 1)]
    assert all(len(ids) > 5 for ids in stored)
    bags.eval()
    for seed in range(40, 44):
        ids, offsets = batch(seed)
        tables = [bags.to_dense(t) for t in (0, 1)]
        expected = pooled(tables, ids, offsets, mean=mean)
        torch.testing.assert_close(bags(ids, offsets), expected)
    assert not torch.equal(bags.to_dense(0), bags.trains.to_dense(0))


def test_populate_changes_no_lookup() -> None:
    bags = bags_of()
    train(bags, 5)
    before = [bags.to_dense(t) for t in (0, 1)]
    bags.populate()
    for t in (0, 1):
        torch.testing.assert_close(bags.to_dense(t), before[t])


def test_rows_that_were_replaced_before_backward_are_not_updated() -> None:
    bags = bags_of()
    train(bags, 2)
    out = bags(*batch(5))
    bags.populate()
    before = [bags.to_dense(t) for t in (0, 1)]
    with pytest.raises(RuntimeError, match="between a lookup and its backward"):
        out.sum().backward()
    assert all(torch.equal(bags.to_dense(t), before[t]) for t in (0, 1))
    train(bags, 1)


def test_features_may_share_a_table_and_ids_be_int32() -> None:
    torch.manual_seed(0)
    bags = CachedTTEmbeddingBags(
        TABLES, TTCache((9, 4)), optim.SGD(0.1), feature_tables=[1, 0, 0], pooling=Pooling.SUM
    )
    draw = torch.Generator().manual_seed(3)
    for step in range(4):
        lengths = torch.randint(0, 4, (9,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        ends = [int(offsets[3 * f]) for f in range(4)]
        most = [70, 300, 300]
        ids = [
            torch.randint(m, (b - a,), generator=draw)
            for m, a, b in zip(most, ends, ends[1:], strict=False)
        ]
        tables = [bags.to_dense(t) for t in (1, 0, 0)]
        expected = [
            torch.stack(
                [table[own[a - ends[f] : b - ends[f]]].sum(0) for a, b in itertools.pairwise(at)]
            )
            for f, (table, own) in enumerate(zip(tables, ids, strict=True))
            for at in [offsets[3 * f : 3 * f + 4].tolist()]
        ]
        out = bags(torch.cat(ids).int(), offsets)
        torch.testing.assert_close(out, torch.cat(expected, 1))
        out.square().sum().backward()
        if step % 2:
            bags.populate()
    assert bags.cache_stats().hits > 0


def test_the_most_used_ids_are_stored() -> None:
    bags = bags_of(rows=(3, 2))
    ids = torch.tensor([7] * 5 + [8] * 4 + [9] * 3 + [1, 2] + [4] * 3 + [0] * 2 + [69])
    offsets = torch.tensor([0, 14, 20])
    bags(ids, offsets).sum().backward()
    bags.populate()
    assert sorted(bags.cached_ids(0).tolist()) == [7, 8, 9]
    assert sorted(bags.cached_ids(1).tolist()) == [0, 4]
    bags(ids, offsets).sum().backward()
    stats = bags.cache_stats()
    assert (stats.lookups, stats.hits) == (40, 17)


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(0.1), optim.Adagrad(0.1), optim.RowwiseAdagrad(0.1), optim.Adam(0.01)]
)
def test_stored_rows_learn_as_rows_of_a_dense_table(optimizer: optim.Optimizer) -> None:
    bags = bags_of(rows=(300, 70), optimizer=optimizer)
    joined = torch.cat([torch.arange(spec.rows) for spec in TABLES])
    # One lookup of every id of either table, so that all are stored.
    size = TABLES[0].rows
    lengths = torch.cat([torch.ones(size), torch.ones(70), torch.zeros(size - 70)]).long()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bags(joined, ends).sum().mul(0).backward()
    bags.populate()
    dense = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(spec.rows, spec.dim) for spec in TABLES], optimizer
    )
    dense.set_step(int(bags.rows.hyperparams[1]))
    with torch.no_grad():
        for weight, table in zip(dense.table_weights(), (0, 1), strict=True):
            weight.copy_(bags.to_dense(table))
    cores = [core.detach().clone() for core in bags.trains.cores]
    for step in range(4):
        indices, offsets = batch(step)
        bags(indices, offsets).square().sum().backward()
        dense(indices, offsets).square().sum().backward()
    for table, weight in enumerate(dense.table_weights()):
        torch.testing.assert_close(bags.to_dense(table), weight.detach(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(cores, bags.trains.cores, strict=True))


@pytest.mark.parametrize("eviction", list(RowEviction))
def test_twenty_steps_against_a_model_in_plain_python(eviction: RowEviction) -> None:
    bags = bags_of(rows=(12, 6), eviction=eviction, every=4)
    plain = bags_of(rows=(12, 6), eviction=eviction)
    uses: list[dict[int, int]] = [{}, {}]
    stored: list[set[int]] = [set(), set()]
    for step in range(20):
        ids, offsets = batch(step)
        if step and step % 4 == 0:
            for table in (0, 1):
                ranked = sorted(uses[table], key=lambda i, t=table: (-uses[t][i], i))
                stored[table] = set(ranked[: (12, 6)[table]])
            plain.populate()
        bags(ids, offsets).square().sum().backward()
        plain(ids, offsets).square().sum().backward()
        half = int(offsets[6])
        for table, own in enumerate((ids[:half], ids[half:])):
            for i in own[own >= 0].tolist():
                uses[table][i] = uses[table].get(i, 0) + 1
        for table in (0, 1):
            assert set(bags.cached_ids(table).tolist()) == stored[table], step
            assert torch.equal(bags.to_dense(table), plain.to_dense(table))
    assert bags.cache_stats().evicted > 0


def test_projecting_keeps_more_of_what_a_row_learned_than_dropping() -> None:
    lost = {}
    for eviction in RowEviction:
        bags = bags_of(rows=(10, 5), eviction=eviction)
        train(bags, 3)
        bags.populate()
        train(bags, 3, 3)
        before = [bags.to_dense(t) for t in (0, 1)]
        ids = [bags.cached_ids(t) for t in (0, 1)]
        bags.empty_cache()
        stats = bags.cache_stats()
        assert stats.evicted == 15
        assert stats.changed > 0
        left = sum(
            float((before[t] - bags.to_dense(t))[ids[t]].double().square().sum()) for t in (0, 1)
        )
        assert left == pytest.approx(stats.lost, rel=1e-3)
        lost[eviction] = stats.lost / stats.changed
        assert all(len(bags.cached_ids(t)) == 0 for t in (0, 1))
    assert lost[RowEviction.DROP] == pytest.approx(1)
    assert lost[RowEviction.PROJECT] < 0.5


@pytest.mark.parametrize("how", ["state", "copy", "pickle"])
def test_stored_rows_are_in_checkpoints_and_copies(how: str) -> None:
    bags = bags_of(optimizer=optim.Adagrad(0.1))
    train(bags, 3)
    bags.populate()
    train(bags, 2, 3)
    if how == "state":
        other = bags_of(optimizer=optim.Adagrad(0.1))
        train(other, 2, 60)
        other.populate()
        other.load_state_dict(bags.state_dict())
    elif how == "copy":
        other = copy.deepcopy(bags)
    else:
        file = io.BytesIO()
        torch.save(bags, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for one in (bags, other):
        train(one, 2, 10)
        one.populate()
        train(one, 2, 12)
    for t in (0, 1):
        assert torch.equal(bags.to_dense(t), other.to_dense(t))
        assert torch.equal(bags.cached_ids(t).sort()[0], other.cached_ids(t).sort()[0])


def test_a_reset_module_has_an_empty_cache() -> None:
    bags = bags_of(optimizer=optim.Adagrad(0.1))
    train(bags, 3)
    bags.populate()
    train(bags, 2)
    bags.reset_parameters()
    assert all(len(bags.cached_ids(t)) == 0 for t in (0, 1))
    assert bags.cache_stats() == (0, 0, 0, 0.0, 0.0)
    for t in (0, 1):
        assert torch.equal(bags.to_dense(t), bags.trains.to_dense(t))
        assert all((s == 0).all() for c in bags.trains.core_optimizer_states(t) for s in c.values())
    bags.populate()
    assert len(bags.cached_ids(0)) == 0


def test_lookups_without_gradient_count_nothing() -> None:
    bags = bags_of(every=1)
    ids, offsets = batch(0)
    with torch.no_grad():
        bags(ids, offsets)
    bags.eval()
    bags(ids, offsets)
    assert bags.cache_stats().lookups == 0
    bags.populate()
    assert len(bags.cached_ids(0)) == 0


def test_weights_of_lookups_have_gradients() -> None:
    bags = bags_of()
    train(bags, 2)
    bags.populate()
    ids, offsets = batch(7)
    weights = torch.rand(len(ids), requires_grad=True)
    tables = [bags.to_dense(t) for t in (0, 1)]
    bags(ids, offsets, weights).sum().backward()
    half = int(offsets[6])
    sums = torch.cat(
        [
            torch.where(own >= 0, table[own.clamp(min=0)].sum(1), 0)
            for table, own in zip(tables, (ids[:half], ids[half:]), strict=True)
        ]
    )
    torch.testing.assert_close(weights.grad, sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TTCache(10, "spill"), "'project', 'drop'"),
        (lambda: TTCache(10, every=0), "every"),
        (lambda: CachedTTEmbeddingBags(TABLES, TTCache((1, 2, 3))), "one per table"),
        (lambda: CachedTTEmbeddingBags(TABLES, TTCache(0)), "rows"),
        (lambda: bags_of(optimizer=optim.SGD(0.1, deferred=True)), "leave deferred out"),
        (
            lambda: CachedTTEmbeddingBags(TABLES, TTCache(2), device="meta"),
            "cannot be on meta",
        ),
    ],
)
def test_wrong_caches(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="must be a TTCache"):
        CachedTTEmbeddingBags(TABLES, 10)
