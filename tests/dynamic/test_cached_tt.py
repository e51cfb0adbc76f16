"""Tensor trains with stored rows: against dense tables, through evictions and checkpoints."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import emblib
from emblib import optim
from emblib.columns import Hyper
from emblib.dynamic import CachedTTEmbeddingBags, RowEviction, TTCache
from emblib.specs import Pooling, TTSpec
from tests.saved import saved_and_loaded

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
    assert lost[RowEviction.SPILL] == lost[RowEviction.PROJECT]  # an emptied cache has no spill


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
        other = saved_and_loaded(bags, weights_only=False)
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
    stats = bags.cache_stats()
    assert (stats.lookups, stats.hits, stats.evicted, stats.changed, stats.lost) == (0,) * 5
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
        (lambda: TTCache(10, every=0), "every"),
        (
            lambda: CachedTTEmbeddingBags(TABLES, TTCache((1, 2, 3)), optim.SGD(0.01)),
            "one per table",
        ),
        (lambda: CachedTTEmbeddingBags(TABLES, TTCache(0), optim.SGD(0.01)), "rows"),
        (lambda: bags_of(optimizer=optim.SGD(0.1, deferred=True)), "leave deferred out"),
        (
            lambda: CachedTTEmbeddingBags(TABLES, TTCache(2), optim.SGD(0.01), device="meta"),
            "cannot be on meta",
        ),
    ],
)
def test_wrong_caches(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="must be a TTCache"):
        CachedTTEmbeddingBags(TABLES, 10, optim.SGD(0.01))
    with pytest.raises(TypeError, match="optimizer must be an instance of"):
        CachedTTEmbeddingBags(TABLES, TTCache(2), torch.optim.SGD)  # type: ignore[arg-type]


def test_invalid_ids_read_row_0_where_it_is_and_are_not_counted() -> None:
    bags = bags_of()
    ids = torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        bags(ids, torch.tensor([0, 2, 4])).sum().backward()
    bags.populate()
    assert [bags.cached_ids(t).tolist() for t in (0, 1)] == [[0], [0]]
    bags.reset_cache_stats()
    bad = torch.tensor([300, -7, 70, -1])
    with pytest.warns(UserWarning, match="3 indices"):
        out = bags(bad, torch.tensor([0, 2, 4]))
    expected = torch.cat([2 * bags.to_dense(0)[0], bags.to_dense(1)[0]])
    torch.testing.assert_close(out[0].detach(), expected)
    assert bags.cache_stats().lookups == 0


def test_batches_that_are_no_tensors_are_refused() -> None:
    bags = bags_of()
    with pytest.raises(TypeError, match="indices must be a tensor, got list"):
        bags([1, 2], torch.tensor([0, 1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offsets must be a tensor, got list"):
        bags(torch.tensor([1, 2]), [0, 1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("table", [-1, 1])
def test_tables_that_do_not_exist_are_named(table: int) -> None:
    bags = CachedTTEmbeddingBags([TTSpec(60, 8, (2, 2))], TTCache(4))
    for name in ("cached_ids", "spilled_ids", "populate", "to_dense", "empty_cache"):
        with pytest.raises(IndexError, match="table must be in"):
            getattr(bags, name)(table)
    with pytest.raises(IndexError, match="table must be in"):
        bags.reset_cache_stats(table)


@pytest.mark.parametrize("name", ["cached_ids", "spilled_ids", "to_dense"])
@pytest.mark.parametrize("num_tables", [1, 2])
def test_methods_of_one_table_take_no_none(name: str, num_tables: int) -> None:
    bags = CachedTTEmbeddingBags([TTSpec(60, 8, (2, 2))] * num_tables, TTCache(4))
    with pytest.raises(TypeError, match="by number or name"):
        getattr(bags, name)(None)


def test_a_batch_that_is_refused_counts_nothing() -> None:
    torch.manual_seed(0)
    bags = CachedTTEmbeddingBags(TABLES, TTCache(9, every=1), optim.SGD(0.01), bounds_check="fatal")
    good = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    bags(*good).sum().backward()
    before = copy.deepcopy(bags.state_dict())
    refused = (
        (torch.tensor([1, 70]), torch.tensor([0, 1, 2]), {}),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 1, 2]), {}),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 2]), {"batch_sizes": [[1], [2]]}),
        (torch.tensor([1, 2]), None, {}),
        (torch.tensor([[1], [2]]), torch.tensor([0, 1, 2]), {}),
    )
    for ids, offsets, options in refused:
        with pytest.raises((RuntimeError, ValueError)):
            bags(ids, offsets, **options)
    after = bags.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len(bags.cached_ids(0)) == 0


@pytest.mark.parametrize("eviction", list(RowEviction))
def test_features_may_differ_in_batch_size(eviction: str) -> None:
    bags, same = bags_of(eviction=eviction), bags_of(eviction=eviction)
    train(bags, 3)
    train(same, 3)
    for one in (bags, same):
        one.populate()
        one.reset_cache_stats()
    sizes = [[2, 3], [1, 0]]  # by feature and rank
    ids = torch.tensor([0, 1, 2, 7, 0, 0, 5, -1, 9, 1, 0, 3])
    offsets = torch.tensor([0, 2, 2, 5, 7, 8, 12])
    out = bags(ids, offsets, batch_sizes=sizes)
    padded = torch.cat([offsets, torch.tensor([12] * 4)])
    by_table = same(ids, padded)
    ours = [out[:24].view(2, 12), out[24:32].view(1, 8), out[32:].view(3, 12)]
    torch.testing.assert_close(torch.cat([ours[0], ours[2]]), by_table[:, :12])
    torch.testing.assert_close(ours[1][0], by_table[0, 12:])
    out.sum().backward()
    by_table.sum().backward()
    for t in (0, 1):
        torch.testing.assert_close(bags.to_dense(t), same.to_dense(t))
    assert bags.cache_stats() == same.cache_stats()


def test_inputs_as_an_embedding_bag_takes_them() -> None:
    torch.manual_seed(0)
    one = CachedTTEmbeddingBags(TABLES, TTCache(9), optim.SGD(0.01), include_last_offset=False)
    two = copy.deepcopy(one)
    two.include_last_offset = True
    three = copy.deepcopy(one)
    ids, weights = torch.randint(70, (4, 3)), torch.rand(4, 3)
    for step in range(3):
        outs = [
            one(ids.reshape(-1), torch.tensor([0, 3, 6, 9]), weights.reshape(-1)),
            two(ids.reshape(-1), torch.tensor([0, 3, 6, 9, 12]), weights.reshape(-1)),
            three(ids, per_sample_weights=weights),
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)
        for out in outs:
            out.square().sum().backward()
        if step == 1:
            for bags in (one, two, three):
                bags.populate()
    assert torch.equal(one.to_dense(0), three.to_dense(0))
    assert len(one.cached_ids(0)) > 0


@pytest.mark.parametrize("eviction", list(RowEviction))
@pytest.mark.parametrize("bags_per_feature", [0, 2])
def test_batches_without_ids(eviction: str, bags_per_feature: int) -> None:
    bags = bags_of(eviction=eviction)
    train(bags, 2)
    bags.populate()
    before = [bags.to_dense(t) for t in (0, 1)]
    none = torch.empty(0, dtype=torch.int64)
    out = bags(none, torch.zeros(2 * bags_per_feature + 1, dtype=torch.int64))
    assert out.shape == (bags_per_feature, 20)
    assert (out == 0).all()
    out.sum().backward()
    for t in (0, 1):
        torch.testing.assert_close(bags.to_dense(t), before[t])


def test_what_was_loaded_before_backward_is_not_updated() -> None:
    bags = bags_of()
    train(bags, 2)
    bags.populate()
    out = bags(*batch(5))
    bags.load_state_dict(copy.deepcopy(bags.state_dict()))
    with pytest.raises(RuntimeError, match="between a lookup and its backward"):
        out.sum().backward()


def test_strict_loading_names_what_is_missing() -> None:
    bags = bags_of(optimizer=optim.Adagrad(0.1))
    state = bags.state_dict()
    for key in ("key_of_row", "rows.table_0.weight", "rows.table_0.sum", "counters", "since"):
        part = {name: value for name, value in state.items() if name != key}
        with pytest.raises(RuntimeError, match=key):
            bags_of(optimizer=optim.Adagrad(0.1)).load_state_dict(part)


PRECISION = emblib.Precision(
    torch.bfloat16, torch.float16, stochastic_rounding=emblib.StochasticRounding(seed=3)
)


@pytest.mark.parametrize("eviction", RowEviction)
def test_cores_and_stored_rows_in_16_bits(eviction: RowEviction) -> None:
    """Lookups, evictions and checkpoints; what is stored has the dtype, what is made float32."""
    bags, other = (
        CachedTTEmbeddingBags(TABLES, TTCache(20, eviction), optim.SGD(0.01), precision=PRECISION)
        for _ in range(2)
    )
    parameters = [*bags.trains.cores, *bags.rows.table_weights()]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    for first in (0, 5, 10):
        train(bags, 5, first)
        bags.populate()
    ids, offsets = batch(40)
    dense = [bags.to_dense(table) for table in range(2)]
    assert {rows.dtype for rows in dense} == {torch.float32}
    out = bags(ids, offsets)
    assert out.dtype == torch.float16
    want = pooled(dense, ids, offsets).half()
    torch.testing.assert_close(out, want, rtol=2e-3, atol=1e-4)
    stored = bags.cached_ids(0)
    assert torch.equal(dense[0][stored], dense[0][stored].bfloat16().float())
    bags.eval()
    other.load_state_dict(bags.state_dict())
    assert torch.equal(other.eval()(ids, offsets), bags(ids, offsets))
    stats = bags.cache_stats()
    assert stats.hits > 0
    bags.empty_cache()
    assert bool(bags.to_dense(0).isfinite().all())
    assert bags.nbytes()["weights"] == sum(spec.nbytes for spec in TABLES) // 2


def test_new_rows_start_as_the_cores_make_them_rounded() -> None:
    bags = CachedTTEmbeddingBags(
        TABLES, TTCache(20), optim.SGD(0.01), precision=emblib.Precision(torch.bfloat16)
    )
    ids, offsets = batch(1)
    bags(ids, offsets)
    before = bags.to_dense(0)
    bags.populate()
    stored = bags.cached_ids(0)
    assert len(stored) > 0
    # The reference adds in another order than the kernels: a tie may round to the other side.
    torch.testing.assert_close(
        bags.to_dense(0)[stored], before[stored].bfloat16().float(), rtol=2.0**-7, atol=0.0
    )
    with pytest.raises(TypeError, match="precision must be a Precision"):
        CachedTTEmbeddingBags(TABLES, TTCache(20), optim.SGD(0.01), precision=torch.bfloat16)  # type: ignore[arg-type]


def test_compiled_models_train_as_others() -> None:
    """The graph breaks at the tables, whose eviction the compiler does not see."""
    eager, other = (bags_of(eviction=RowEviction.SPILL, every=2) for _ in range(2))
    compiled = torch.compile(lambda ids, offsets: 2 * other(ids, offsets), backend="aot_eager")
    for step in range(5):
        ids, offsets = batch(step)
        found, expected = compiled(ids, offsets), 2 * eager(ids, offsets)
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    assert other.cache_stats() == eager.cache_stats()


def test_a_module_without_values_takes_those_of_a_state_dict() -> None:
    """What `to_empty` leaves in memory decides nothing."""
    torch.manual_seed(1)
    tables = [
        emblib.TTSpec(48, 4, (2,), (6, 8), (2, 2)),
        emblib.TTSpec(30, 4, (2,), (5, 6), (2, 2)),
    ]
    made = [
        emblib.CachedTTEmbeddingBags(tables, emblib.TTCache(8), optim.SGD(0.01)) for _ in range(2)
    ]
    ids, offsets = torch.arange(60) % 30, torch.arange(61)
    made[0](ids, offsets)
    made[0].populate()
    made[1](ids, offsets)
    made[1].populate()
    made[1]._apply(lambda tensor: torch.full_like(tensor, 7))
    assert made[1].cached_ids(0).numel() == 0
    assert torch.equal(made[1](ids, offsets), made[1].trains(ids, offsets))
    made[1].populate()
    made[1].load_state_dict(made[0].state_dict())
    assert torch.equal(made[1](ids, offsets), made[0](ids, offsets))
    assert torch.equal(made[1].rows_of_features, made[0].rows_of_features)


def reads_rows_always(bags: CachedTTEmbeddingBags, patch: pytest.MonkeyPatch) -> None:
    """Have lookups read the stored rows also where there are none."""
    patch.setattr(bags, "_skips_rows", lambda: False)


def assert_equal_modules(one: CachedTTEmbeddingBags, other: CachedTTEmbeddingBags) -> None:
    states = [bags.state_dict() for bags in (one, other)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("eviction", list(RowEviction))
@pytest.mark.parametrize(
    "optimizer", [optim.Adam(0.1), optim.SGD(0.1), optim.RowwiseAdagrad(0.1)], ids=str
)
def test_lookups_skip_stored_rows_where_there_are_none(
    optimizer: optim.Optimizer, eviction: RowEviction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits; the steps of stored rows go on, which Adam's first updates depend on."""
    skipping, reading = (bags_of(eviction=eviction, optimizer=optimizer) for _ in range(2))
    reads_rows_always(reading, monkeypatch)
    calls: list[int] = []
    skipping.rows.register_forward_hook(lambda *_: calls.append(1))
    for bags in (skipping, reading):
        train(bags, 3)
    assert bool(calls) == (eviction is RowEviction.SPILL)
    assert_equal_modules(skipping, reading)
    for bags in (skipping, reading):
        train(bags, 2, 3)
        bags.populate()
        train(bags, 2, 5)
    assert calls
    assert_equal_modules(skipping, reading)
    for bags in (skipping, reading):
        bags.empty_cache()
    calls.clear()
    ids, offsets = batch(50)
    with torch.no_grad():
        assert torch.equal(skipping(ids, offsets), reading(ids, offsets))
    assert bool(calls) == (eviction is RowEviction.SPILL)
    for bags in (skipping, reading):
        train(bags, 2, 7)
    assert_equal_modules(skipping, reading)


def test_steps_of_stored_rows_go_on_where_only_some_tables_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipping, reading = (bags_of(optimizer=optim.Adam(0.1)) for _ in range(2))
    reads_rows_always(reading, monkeypatch)
    for bags in (skipping, reading):
        train(bags, 2)
        bags.trains.requires_grad_(False)
        train(bags, 1, 2)
        bags.trains.requires_grad_(True)
        train(bags, 3, 3)
        bags.rows.requires_grad_(False)
        train(bags, 1, 6)
        bags.rows.requires_grad_(True)
        bags.load_state_dict(copy.deepcopy(bags.state_dict()))
        train(bags, 1, 7)
        bags.populate()
        train(bags, 1, 8)
    assert_equal_modules(skipping, reading)


def test_gradients_are_left_on_stored_rows_where_there_are_none() -> None:
    """`External` leaves gradients of zeros, which an optimizer finds there."""
    bags = bags_of(optimizer=optim.External(gradient=optim.Gradient.DENSE))
    train(bags, 1)
    assert not bags.rows.weights.grad.any()


def test_weights_of_lookups_have_gradients_without_stored_rows() -> None:
    bags = bags_of()
    ids, offsets = batch(3)
    weights = torch.rand(len(ids), requires_grad=True)
    bags(ids, offsets, weights).sum().backward()
    rows = [bags_of().to_dense(t) for t in (0, 1)]
    first = int(offsets[(len(offsets) - 1) // 2])
    expected = [
        rows[int(n >= first)][i].sum() if i >= 0 else torch.zeros(()) for n, i in enumerate(ids)
    ]
    torch.testing.assert_close(weights.grad, torch.stack(expected))


def test_a_number_that_the_rows_cannot_have_changes_no_core() -> None:
    """Cores and stored rows are modules with numbers of their own."""
    bags = bags_of(optimizer=optim.LARS(0.1))
    before = copy.deepcopy(bags.state_dict())
    saved = {name: value + 1 for name, value in before.items() if "cores" in name}
    hyper = before["rows.hyper"].clone()
    hyper[Hyper.OPTIMIZER_ARGS] = 2.0
    with pytest.raises(RuntimeError, match=r"rows\.hyper: momentum must be in"):
        bags.load_state_dict({**before, **saved, "rows.hyper": hyper})
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
