"""Tensor trains with a cache of rows in collections: as the bare module, and by their handles."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emblib
from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TTSpec,
    optim,
    plan_memory,
)
from emblib.collections.optimizers import FusedOptimizer, apply_optimizer_in_backward
from emblib.dynamic import CachedTTEmbeddingBags, RowEviction, TTCache
from emblib.sharding import RankGroup, checkpoints, shard, table_wise
from emblib.sharding.planner import Planner, Topology
from emblib.specs import Pooling, StochasticRounding
from emblib.storage import TableSlice, TensorTrain
from tests.optimizer_cases import CASES
from tests.saved import saved_and_loaded

ROOT = Path(__file__).resolve().parents[2]
ROWS, DIMS, RANKS, SEED = (300, 70), (12, 8), ((4, 4), (3,)), 5
STORED = (12, 6)
FEATURES = ("f", "g", "h")  # of the tables 0, 1 and 0
READS = (0, 0, 1)  # in the order of the configurations
BATCH = 4
PLAIN = (
    *("sgd", "lars", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"),
    *("lamb", "partial_rowwise_lamb", "ftrl", "adam_l2", "adagrad_decoupled"),
)
EVICTIONS = [("project", None), ("drop", None), ("spill", (40, 30)), ("spill", (4, 2))]


def caches(
    eviction: Any = "project", spill_rows: Any = None, rows: Any = STORED, **options: Any
) -> list[TTCache]:
    """The caches of the two tables; all ids are counted."""
    spilled = spill_rows or (None, None)
    return [TTCache(rows[t], eviction, 500, spill_rows=spilled[t], **options) for t in (0, 1)]


def configs(
    cache: list[TTCache] | None, kind: type = EmbeddingBagConfig, **changes: Any
) -> list[Any]:
    own = cache or [None, None]
    storages = [
        TensorTrain(RANKS[0], cache=own[0]),
        TensorTrain(RANKS[1], ids="permuted", seed=SEED, cache=own[1]),  # type: ignore[arg-type]
    ]
    features = (("f", "h"), ("g",))
    dims = (DIMS[0], changes.pop("dim", DIMS[1]))
    return [
        kind(ROWS[t], dims[t], "ab"[t], features[t], storage=storages[t], **changes) for t in (0, 1)
    ]


def collection(
    cache: list[TTCache] | None,
    optimizer: Any = None,
    *,
    is_weighted: bool = True,
    **changes: Any,
) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        configs(cache, **changes),
        optimizer=optim.SGD(0.1) if optimizer is None else optimizer,
        is_weighted=is_weighted,
    )


def bare(model: EmbeddingBagCollection, cache: TTCache) -> CachedTTEmbeddingBags:
    """The module of the tables, with the cores of a collection."""
    specs = [
        TTSpec(ROWS[0], DIMS[0], RANKS[0], name="a"),
        TTSpec(ROWS[1], DIMS[1], RANKS[1], ids="permuted", seed=SEED, name="b"),  # type: ignore[arg-type]
    ]
    pooling, optimizer = model.configs[0].pooling, model.optimizer
    bags = CachedTTEmbeddingBags(specs, cache, optimizer, feature_tables=READS, pooling=pooling)
    with torch.no_grad():
        for t, name in enumerate("ab"):
            cores = [p for key, p in handle(model, name).named_parameters() if "cores" in key]
            for own, core in zip(bags.trains.table_cores(t), cores, strict=True):
                own.copy_(core)
    return bags


def handle(model: Any, name: str) -> Any:
    return model.handles()[name]


def batch(seed: int, *, is_weighted: bool = True) -> KeyedJaggedTensor:
    """Ids that repeat and whose most used ones drift, a few of them -1; features out of order."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(FEATURES) * BATCH,), generator=draw)
    ids = []
    for feature, table in enumerate((0, 1, 0)):
        count = int(lengths[feature * BATCH : (feature + 1) * BATCH].sum())
        drawn = (ROWS[table] * torch.rand(count, generator=draw) ** 4 + 3 * seed).long()
        skipped = torch.rand(count, generator=draw) < 0.05
        ids.append(torch.where(skipped, -1, drawn % ROWS[table]))
    weights = 0.5 + torch.rand(int(lengths.sum()), generator=draw)
    given = weights if is_weighted else None
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), given, lengths)


def slope(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, DIMS[0] * 2 + DIMS[1], generator=draw)


def train(model: EmbeddingBagCollection, steps: range) -> None:
    for seed in steps:
        model(batch(seed, is_weighted=model.is_weighted())).values().backward(slope(seed))


def populate(model: Any) -> None:
    for own in model.handles().values():
        own.populate()


def train_with_stored_rows(model: EmbeddingBagCollection) -> None:
    """Train three batches, store rows in the caches, and train two batches with them."""
    train(model, range(3))
    populate(model)
    train(model, range(3, 5))


def dense(model: Any) -> list[Tensor]:
    return [handle(model, name).dense_rows() for name in "ab"]


def expect_equal(one: Any, two: Any) -> None:
    for name in "ab":
        assert torch.equal(handle(one, name).dense_rows(), handle(two, name).dense_rows())
        assert torch.equal(handle(one, name).cached_ids(), handle(two, name).cached_ids())
        assert handle(one, name).cache_stats() == handle(two, name).cache_stats()


# As the bare module


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *(("sgd", Pooling.SUM), ("adagrad", Pooling.MEAN)),
        *(("rowwise_adagrad", Pooling.SUM), ("adam", Pooling.MEAN)),
    ],
)
@pytest.mark.parametrize(("eviction", "spill_rows"), EVICTIONS)
def test_twenty_steps_are_those_of_the_module(
    eviction: str, spill_rows: Any, name: str, pooling: Pooling
) -> None:
    """Bit for bit, with rows chosen in time and by calls."""
    optimizer = CASES[name]
    model = collection(caches(eviction, spill_rows, every=3), optimizer, pooling=pooling)
    assert model.groups.has_one_module
    bags = bare(model, TTCache(STORED, eviction, 1000, every=3, spill_rows=spill_rows))
    for step in range(20):
        if step == 11:
            populate(model)
            bags.populate()
        features = batch(step)
        out = model(features).values()
        own = features.permute([0, 2, 1])
        expected = bags(own.values(), own.offsets(), own.weights())
        assert torch.equal(out, expected)
        out.backward(slope(step))
        expected.backward(slope(step))
        for t, table in enumerate("ab"):
            assert torch.equal(handle(model, table).dense_rows(), bags.to_dense(t))
            assert torch.equal(handle(model, table).cached_ids(), bags.cached_ids(t))
            assert torch.equal(handle(model, table).spilled_ids(), bags.spilled_ids(t))
            assert handle(model, table).cache_stats() == bags.cache_stats().tables[table]
    stats = [handle(model, table).cache_stats() for table in "ab"]
    assert min(one.hits for one in stats) > 0
    assert (sum(one.evicted for one in stats) == 0) == (spill_rows == (40, 30))
    assert model.groups.nbytes() == bags.nbytes()


@pytest.mark.parametrize("name", PLAIN)
def test_a_cache_that_never_fills_changes_no_step(name: str) -> None:
    optimizer = CASES[name]
    model, plain = collection(caches(), optimizer), collection(None, optimizer)
    for step in range(5):
        train(model, range(step, step + 1))
        train(plain, range(step, step + 1))
        for one, two in zip(dense(model), dense(plain), strict=True):
            assert torch.equal(one, two)
    assert handle(model, "a").cache_stats().lookups > 0
    assert handle(model, "a").cache_stats().hits == 0


@pytest.mark.parametrize("eviction", RowEviction)
@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer_trains_stored_rows(name: str, eviction: RowEviction) -> None:
    model = collection(caches(eviction), CASES[name])
    train(model, range(2))
    populate(model)
    before = dense(model)
    train(model, range(2, 4))
    used: list[set[int]] = [set(), set()]
    for features in (batch(2), batch(3)):
        for feature, table in zip(FEATURES, (0, 1, 0), strict=True):
            used[table] |= set(features[feature].values().tolist()) - {-1}
    for t, name_of_table in enumerate("ab"):
        after = dense(model)[t]
        assert after.isfinite().all()
        stored = handle(model, name_of_table).cached_ids().tolist()
        assert len(stored) == STORED[t]
        for i in stored:
            assert torch.equal(after[i], before[t][i]) == (i not in used[t]), (t, i)


@pytest.mark.parametrize("eviction", ["project", "spill"])
def test_tables_that_do_not_agree_have_kernels_of_their_own(eviction: str) -> None:
    """And train as they do in one module."""
    one = collection(caches(eviction))
    own = caches(eviction)
    apart = collection([own[0], replace(own[1], every=1000)])
    assert len(one.groups.groups) == 1
    assert len(apart.groups.groups) == 2
    for step in range(0, 9, 3):
        for model in (one, apart):
            train(model, range(step, step + 3))
            populate(model)
    expect_equal(one, apart)
    half = configs(caches(), data_type=torch.bfloat16)
    mixed = [configs(None)[0], half[1], configs(caches())[1]]
    tables = [replace(c, name=f"t{i}", feature_names=(f"f{i}",)) for i, c in enumerate(mixed)]
    assert len(EmbeddingBagCollection(tables).groups.groups) == 3


def test_vectors_of_a_sequence_collection() -> None:
    torch.manual_seed(0)
    tables = configs(caches("drop"), EmbeddingConfig, dim=DIMS[0])
    model = EmbeddingCollection(tables, optimizer=optim.Adagrad(0.1))
    assert model.groups.has_one_module
    for step in range(6):
        if step in (2, 4):
            populate(model)
        rows = dense(model)
        features = batch(step, is_weighted=False)
        out = model(features)
        total = torch.zeros(())
        for feature, table in zip(FEATURES, (0, 1, 0), strict=True):
            ids, vectors = features[feature].values(), out[feature].values()
            expected = torch.where(ids[:, None] < 0, 0.0, rows[table][ids.clamp(min=0)])
            torch.testing.assert_close(vectors, expected)
            total = total + vectors.square().sum()
        total.backward()
    assert all(handle(model, name).cache_stats().hits > 0 for name in "ab")


@pytest.mark.parametrize("eviction", ["project", "spill"])
def test_features_may_differ_in_their_bags(eviction: str) -> None:
    model = collection(caches(eviction), is_weighted=False)
    train_with_stored_rows(model)
    lengths, ids = torch.tensor([2, 1, 3, 0, 1]), torch.tensor([3, 299, 9, 5, 1, 0, 7])
    inverse = (["f", "g", "h"], torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]))
    features = KeyedJaggedTensor(
        ["f", "g", "h"],
        ids,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=inverse,
    )
    rows = dense(model)
    f = torch.stack([rows[0][[3, 299]].sum(0), rows[0][9]])
    g = torch.stack([rows[1][[5, 1, 0]].sum(0), torch.zeros(DIMS[1])])
    h = rows[0][[7]]
    expected = torch.cat([f[[0, 1, 1]], h[[0, 0, 0]], g[[1, 0, 0]]], 1)
    out = model(features).values()
    torch.testing.assert_close(out, expected)
    out.sum().backward()


@pytest.mark.parametrize("rounding", [None, StochasticRounding(3)])
def test_cores_and_stored_rows_in_16_bits(rounding: StochasticRounding | None) -> None:
    model = collection(caches(), data_type=torch.bfloat16, rounding=rounding)
    train(model, range(3))
    populate(model)
    train(model, range(3, 6))
    own = handle(model, "a")
    assert own.cache.weight.dtype is torch.bfloat16
    rows = own.dense_rows()[own.cached_ids()]
    assert torch.equal(rows, rows.bfloat16().float())
    assert model(batch(1)).values().dtype is torch.float32


def test_rows_that_were_replaced_before_backward_are_not_updated() -> None:
    model = collection(caches())
    train(model, range(2))
    out = model(batch(5)).values()
    handle(model, "b").populate()
    before = dense(model)
    with pytest.raises(RuntimeError, match="between a lookup and its backward"):
        out.sum().backward()
    assert all(torch.equal(one, two) for one, two in zip(dense(model), before, strict=True))


# Handles


def test_the_cache_of_a_table_is_its_own() -> None:
    model = collection(caches())
    train(model, range(3))
    a, b = handle(model, "a"), handle(model, "b")
    a.populate()
    assert (len(a.cached_ids()), len(b.cached_ids())) == (12, 0)
    b.populate()
    train(model, range(3))
    before = b.cache_stats()
    assert a.cache_stats().hits > 0
    a.reset_cache_stats()
    assert (a.cache_stats().lookups, a.cache_stats().hits) == (0, 0)
    assert b.cache_stats() == before
    a.empty_cache()
    assert a.cache_stats().evicted == 12
    a.populate()
    assert (len(a.cached_ids()), len(b.cached_ids())) == (0, 6)  # its counts are forgotten
    b.populate()
    assert len(b.cached_ids()) == 6


def test_rows_are_chosen_in_time_for_each_table() -> None:
    """A call for one table does not put off the other."""
    model = collection(caches(every=4))
    for step in range(6):
        train(model, range(step, step + 1))
        handle(model, "a").populate()
    assert len(handle(model, "b").cached_ids()) == 6


def test_to_dense_has_what_stored_rows_learned_and_so_has_a_quantized_collection() -> None:
    model = collection(caches(), optim.SGD(0.05))
    train(model, range(2))
    populate(model)
    train(model, range(2, 6))
    served = model.quantized()
    for name, feature, rows in zip("ab", "fg", dense(model), strict=True):
        made = handle(model, name).module.to_dense(handle(model, name).index)
        assert not torch.equal(rows, made)
        ids = torch.arange(len(rows))
        lengths = torch.cat([torch.full((len(ids),), int(key == feature)) for key in FEATURES])
        features = KeyedJaggedTensor(list(FEATURES), ids, torch.ones(len(ids)), lengths)
        step = (rows.amax(1) - rows.amin(1)) / 255
        found = served(features)[feature]
        assert ((found - rows).abs() <= 0.51 * step[:, None] + 1e-6).all()


@pytest.mark.parametrize("eviction", RowEviction)
def test_frozen_tables_do_not_change(eviction: RowEviction) -> None:
    model = collection(caches(eviction, every=2))
    train(model, range(5))
    handle(model, "a").requires_grad_(False)
    before = dense(model)
    stored = handle(model, "a").cached_ids()
    train(model, range(5, 12))
    after = dense(model)
    assert torch.equal(before[0], after[0])
    assert torch.equal(stored, handle(model, "a").cached_ids())
    assert not torch.equal(before[1], after[1])
    handle(model, "a").requires_grad_(True)
    train(model, range(12, 14))
    assert not torch.equal(before[0], dense(model)[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("eviction", RowEviction)
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_the_planner_knows_the_bytes(eviction: RowEviction, name: str, device: str) -> None:
    torch.manual_seed(0)
    config = configs([TTCache(12, eviction), TTCache(6, eviction)])[0]
    model = EmbeddingBagCollection([config], optimizer=CASES[name])
    sizes = model.groups.nbytes()
    counted = config.storage.nbytes(TableSlice.whole(config), CASES[name], device)
    spilled = sizes.pop("spill") if device == "cuda" else 0
    assert counted.host == spilled
    # The model is on a CPU, where hash tables have eviction queues.
    on_cpu = config.storage.nbytes(TableSlice.whole(config), CASES[name], "cpu").device
    queues = on_cpu - counted.device - counted.host
    small = 512  # of the tensors that say how large hash tables are, and of counters
    assert 0 <= sum(sizes.values()) - queues - counted.device <= small


def test_a_plan_of_memory_counts_the_cache_and_leaves_the_table() -> None:
    config = configs(caches())[0]
    plan = plan_memory([config], 1 << 30, optimizer=optim.SGD(0.1))
    assert plan.configs == (config,)
    assert plan.nbytes > plan_memory([configs(None)[0]], 1 << 30, optimizer=optim.SGD(0.1)).nbytes


# Learning rates and states of optimizers


@pytest.mark.parametrize("eviction", RowEviction)
def test_a_learning_rate_is_that_of_cores_and_stored_rows(eviction: RowEviction) -> None:
    model = collection(caches(eviction), optim.SGD(0.1))
    train(model, range(3))
    populate(model)
    fused = FusedOptimizer.of(model)
    assert len(fused.param_groups) == 1
    fused.param_groups[0]["lr"] = 0.0
    fused.zero_grad()
    before = dense(model)
    train(model, range(3))
    assert all(torch.equal(one, two) for one, two in zip(dense(model), before, strict=True))
    fused.param_groups[0]["lr"] = 0.1
    fused.step()
    train(model, range(3))
    stored = handle(model, "a").cached_ids()
    assert not torch.equal(dense(model)[0][stored], before[0][stored])


@pytest.mark.parametrize(
    ("eviction", "name"),
    [
        (RowEviction.PROJECT, "rowwise_adagrad"),
        (RowEviction.SPILL, "adam"),
        (RowEviction.DROP, "adagrad"),
    ],
)
@pytest.mark.parametrize("how", ["state", "file", "copy", "pickle"])
def test_training_goes_on_as_if_it_was_not_interrupted(
    how: str, name: str, eviction: RowEviction, tmp_path: Any
) -> None:
    model = collection(caches(eviction, every=4), CASES[name])
    train(model, range(10))  # between two choices
    FusedOptimizer.of(model)
    if how in ("state", "file"):
        other = collection(caches(eviction, every=4), CASES[name])
        train(other, range(50, 57))
        fused = FusedOptimizer.of(other)
        if how == "state":
            other.load_state_dict(copy.deepcopy(model.state_dict()))
            fused.load_state_dict(copy.deepcopy(FusedOptimizer.of(model).state_dict()))
        else:
            path = tmp_path / "step"
            checkpoints.save({"model": model, "tables": FusedOptimizer.of(model)}, path)
            checkpoints.load({"model": other, "tables": fused}, path)
    elif how == "copy":
        other = copy.deepcopy(model)
    else:
        other = pickle.loads(pickle.dumps(model))
    expect_equal(model, other)
    for one in (model, other):
        train(one, range(10, 18))
        populate(one)
        train(one, range(18, 20))
    expect_equal(model, other)


def test_optimizers_that_are_set_later_keep_cores_and_stored_rows() -> None:
    model = collection(caches(), optim.SGD(0.1))
    train_with_stored_rows(model)
    before, stored = dense(model), handle(model, "a").cached_ids()
    parameters = dict(model.named_parameters())
    other = copy.deepcopy(model)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.02})
    other.set_optimizers(dict.fromkeys("ab", optim.Adagrad(0.02, eps=1e-10)))
    assert all(torch.equal(one, two) for one, two in zip(dense(model), before, strict=True))
    assert torch.equal(handle(model, "a").cached_ids(), stored)
    for key, parameter in model.named_parameters():
        assert parameter is parameters[key]
    for one in (model, other):
        train(one, range(5, 8))
        populate(one)
        train(one, range(8, 10))
    expect_equal(model, other)
    assert not torch.equal(before[0], dense(model)[0])


def test_gradients_that_are_left_to_torch() -> None:
    """As many steps of torch.optim.SGD as of the fused one, to rounding."""
    fused = collection(caches(), optim.SGD(0.1))
    torch.manual_seed(0)
    model = EmbeddingBagCollection(configs(caches()), is_weighted=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if "cache" in name] == [
        f"embedding_bags.{table}.cache.weight" for table in "ab"
    ]
    for step in range(6):
        if step in (2, 4):
            populate(model)
            populate(fused)
        optimizer.zero_grad()
        train(model, range(step, step + 1))
        optimizer.step()
        train(fused, range(step, step + 1))
    for one, two in zip(dense(model), dense(fused), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert handle(model, "a").cache_stats().evicted > 0


# State dicts


def test_names_in_state_dicts() -> None:
    model = collection(caches(), optim.RowwiseAdagrad(0.1))
    state = {k.removeprefix("embedding_bags."): v for k, v in model.state_dict().items()}
    cores = [f"cores.{k}" for k in range(3)]
    cache = [f"cache.{name}" for name in ("weight", "keys", "sum", "counters", "changes", "since")]
    counts = [f"counts.{name}" for name in ("keys", "stamps", "scores", "tick")]
    names = {key.partition(".")[2] for key in state if key.startswith("a.")}
    assert names == {*cores, "tt_layout", *cache, *counts}
    assert state["a.cache.weight"].shape == (12, 12)
    assert state["a.cache.sum"].shape == state["a.cache.keys"].shape == (12,)
    fused = FusedOptimizer.of(model).state_dict()["state"]
    assert set(fused["embedding_bags.a.cache.weight"]) == {"hyper"}


def test_another_number_of_stored_rows(tmp_path: Path) -> None:
    model = collection(caches("spill", (40, 30)), optim.Adagrad(0.1))
    train_with_stored_rows(model)
    for cache in (caches("drop", rows=(15, 7)), caches("project"), caches("spill", (200, 60))):
        other = collection(cache, optim.Adagrad(0.1))
        other.load_state_dict(model.state_dict())
        FusedOptimizer.of(other).load_state_dict(FusedOptimizer.of(model).state_dict())
        one = copy.deepcopy(model)
        train(one, range(5, 8))
        train(other, range(5, 8))
        for first, second in zip(dense(one), dense(other), strict=True):
            assert torch.equal(first, second)
    checkpoints.save({"model": model}, tmp_path / "step")
    more = collection(caches("spill", (200, 60)), optim.Adagrad(0.1))
    checkpoints.load({"model": more}, tmp_path / "step")
    assert all(torch.equal(one, two) for one, two in zip(dense(more), dense(model), strict=True))
    less = collection(caches("drop", rows=(11, 6)), optim.Adagrad(0.1))
    train(less, range(3))
    populate(less)
    before = copy.deepcopy(less.state_dict())
    with pytest.raises(RuntimeError, match="has 12 stored rows of table 'a', here it has 11"):
        handle(less, "a").load_state_dict(handle(model, "a").state_dict())
    after = less.state_dict()
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    handle(model, "a").empty_cache()
    less.load_state_dict(model.state_dict())
    expected = dense(model)
    assert all(torch.equal(one, two) for one, two in zip(dense(less), expected, strict=True))


def test_a_train_without_stored_rows_is_loaded_into_one_with_a_cache() -> None:
    plain, model = collection(None), collection(caches())
    train(plain, range(3))
    train(model, range(3))
    populate(model)
    with pytest.raises(RuntimeError, match=r"Missing key.*a\.cache\.weight"):
        copy.deepcopy(model).load_state_dict(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=False)
    assert len(handle(model, "a").cached_ids()) == 0
    assert all(torch.equal(one, two) for one, two in zip(dense(model), dense(plain), strict=True))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*a\.cache\.weight"):
        plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tt_layout": torch.tensor([300, 12, 6, 5, 10, 3, 2, 2, 4, 4])}, "another tensor train"),
        ({"cache.keys": torch.full((12,), 3)}, "each id must occur once"),
        ({"cache.keys": torch.arange(295, 307)}, "ids of a table of 300 rows"),
        ({"cache.weight": torch.zeros(12, 9)}, r"cache.weight: .* is \(12, 12\)"),
        ({"cache.sum": torch.zeros(11, 12)}, r"cache.sum: .* is \(12, 12\)"),
        ({"cache.weight": None}, "no weight of these ids"),
    ],
)
def test_entries_of_other_tables_are_refused_before_anything_is_written(
    change: dict[str, Any], message: str
) -> None:
    model, other = (collection(caches(), optim.Adagrad(0.1)) for _ in range(2))
    for one in (model, other):
        train(one, range(3) if one is model else range(20, 23))
        populate(one)
    state = {**handle(model, "a").state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=message):
        handle(other, "a").load_state_dict(state, strict=False)
    after = other.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_collection_that_is_made_on_meta() -> None:
    torch.manual_seed(0)
    model = EmbeddingBagCollection(
        configs(caches()), device="meta", is_weighted=True, optimizer=optim.SGD(0.1)
    )
    trained = collection(caches())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in trained.named_parameters()]
    with pytest.raises(RuntimeError, match="no cache of rows on meta"):
        handle(model, "a").populate()
    model.groups.set_output_dtype(torch.bfloat16)
    train(trained, range(3))
    populate(trained)
    with pytest.raises(RuntimeError, match=r"to_empty\(device"):
        model.load_state_dict(trained.state_dict())
    model.to_empty(device="cpu")
    assert model(batch(0)).values().dtype is torch.bfloat16
    train(model, range(2))
    model.load_state_dict(trained.state_dict())
    expect_equal(model, trained)
    model.to_empty(device="cpu").reset_parameters()
    assert len(handle(model, "a").cached_ids()) == 0
    train(model, range(2))
    assert all(rows.isfinite().all() for rows in dense(model))


def test_reset_parameters_empties_the_cache() -> None:
    model = collection(caches())
    train_with_stored_rows(model)
    seeds = {"a": 1, "b": 2}
    model.reset_parameters(seeds)
    plain = collection(None)
    plain.reset_parameters(seeds)
    assert all(torch.equal(one, two) for one, two in zip(dense(model), dense(plain), strict=True))
    assert all(len(handle(model, name).cached_ids()) == 0 for name in "ab")
    assert handle(model, "a").cache_stats().lookups == 0


# What cannot be


def test_it_is_not_sharded() -> None:
    model = collection(caches())
    message = "'a' is a tensor train with a cache of rows.*without cache in a sharded collection"
    with pytest.raises(ValueError, match=message):
        shard(model, {"": dict.fromkeys("ab", table_wise(0))}, RankGroup.single())
    with pytest.raises(ValueError, match=message):
        Planner(Topology(2), batch_size=8).plan(model)
    with pytest.raises(ValueError, match=message):
        TableSlice(model.configs[0], (0, 150), (0, 12))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorTrain((4, 4), cache=10), TypeError, "must be None or a TTCache"),
        (lambda: TensorTrain((4, 4), cache=TTCache((1, 2))), ValueError, "must be one number"),
        (
            lambda: TensorTrain((4, 4), cache=TTCache(1, "spill", spill_rows=(1,))),
            ValueError,
            "spill_rows of the cache of a table must be one number",
        ),
        (
            lambda: collection(caches(), optim.SGD(0.1, deferred=True)),
            ValueError,
            "the cache of 'a', 'b' may have replaced rows .*: leave deferred out, or the cache",
        ),
        (
            lambda: EmbeddingBagCollection(configs(caches("spill"))),
            ValueError,
            "rows that 'a', 'b' spill to host memory",
        ),
        (
            lambda: collection(caches(), optim.RowwiseAdagrad(0.1, counter=optim.Counter(4.0))),
            ValueError,
            "a tensor-train table has none",
        ),
    ],
)
def test_wrong_caches(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_deferred_optimizer_that_is_set_later_changes_nothing() -> None:
    model = collection(caches())
    train(model, range(3))
    before = model.configs
    with pytest.raises(ValueError, match="leave deferred out"):
        model.set_optimizers({"a": optim.SGD(0.1, deferred=True)})
    assert model.configs == before
    train(model, range(3, 4))


def test_modules_go_through_files() -> None:
    model = collection(caches("spill"))
    train(model, range(3))
    populate(model)
    expect_equal(model, saved_and_loaded(model, weights_only=False))


def test_the_examples_of_the_documentation() -> None:
    page = (ROOT / "docs/tensor_trains.md").read_text()
    section = page.partition("## A cache of rows")[2].partition("## What a model loses")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {"emblib": emblib, "tables": [TTSpec(1000, 8, (2, 2))]}
    for example in examples:
        exec(example, names)
    assert len(names["table"].cached_ids()) == 0
