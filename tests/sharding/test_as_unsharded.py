"""What the unsharded collection makes of unusual batches and modes, a sharded one does as well."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    optim,
    sharding,
)
from emblib.sharding import sharding_types
from emblib.sharding.ranks import RankGroup
from emblib.specs import Pooling
from emblib.storage import Dense, Hash, Quantized, TensorTrain
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    Case,
    batch,
    compare_tables,
    flat,
    make_sharded,
    make_source,
    sequences,
    step_of_all,
    tables,
    train,
)

SUM, MEAN = Pooling.SUM, Pooling.MEAN
ON_FIRST = tuple(((0, (0, rows), (0, dim)),) for rows, dim in ((13, 8), (7, 4), (20, 8), (3, 12)))
MIXED = ("dp", "rw", "tw", "cw")


def both(case: Case, ranks: RankGroup, gradients: str = "sum") -> tuple[Any, Any]:
    """The unsharded collection and its sharded form."""
    source = make_source(case)
    return source, make_sharded(case, ranks, copy.deepcopy(source), gradients)


def invalid_ids(ranks: RankGroup, plan: Any, kind: Any, *, pooled: bool) -> None:
    """They give the same as in one process, and a warning says so."""
    dims = (8, 4, 8, 12) if kind is None else (8,) * 4
    configs = tables(SUM, MEAN, storage=kind, dims=dims)
    case = Case(configs if pooled else sequences(configs), plan)
    oracle, sharded = both(case, ranks)
    batches = []
    for rank in range(ranks.size):
        own = batch(case, rank, 5)
        ids = own.values().clone()
        ids[::3], ids[1::5], ids[2::7] = -1, 10**6, -2
        batches.append(KeyedJaggedTensor(own.keys(), ids, None, own.lengths()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = [flat(oracle(one)) for one in batches]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = flat(sharded(batches[ranks.rank]))
    every = ranks.gather_objects([str(one.message) for one in told])
    assert any("out of bounds" in message for messages in every for message in messages)
    torch.testing.assert_close(got, outputs[ranks.rank], rtol=1e-6, atol=1e-6)
    grads = [torch.ones_like(output) for output in outputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got.backward(grads[ranks.rank])
        step_of_all(case, oracle, batches, grads)
    compare_tables(sharded, oracle, 1e-6)


@pytest.mark.parametrize("plan", ["tw", "rw", "cw", "dp", "grid"])
@pytest.mark.parametrize("pooled", [True, False])
def test_invalid_ids_are_repaired_and_told(plan: str, *, pooled: bool) -> None:
    for size in (1, 2):
        worlds.run(size, _call, invalid_ids, (plan,) * 4, None, {"pooled": pooled})
    if plan in ("tw", "rw"):
        kind = TensorTrain((2, 2))
        worlds.run(2, _call, invalid_ids, (plan,) * 4, kind, {"pooled": pooled})


def _call(ranks: RankGroup, function: Any, *args: Any) -> Any:
    """`function(ranks, *args)` with the last of them as keywords."""
    *positional, named = args
    return function(ranks, *positional, **named)


def weights_where_they_are_not_wanted(ranks: RankGroup, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN)
    case = Case(configs if pooled else sequences(configs), MIXED)
    oracle, sharded = both(case, ranks)
    own = batch(replace(case, weighted=True), ranks.rank, 4)
    torch.testing.assert_close(flat(sharded(own)), flat(oracle(own)))


def weights_that_are_wanted(ranks: RankGroup) -> None:
    case = Case(tables(SUM, MEAN), MIXED, weighted=True)
    oracle, sharded = both(case, ranks)
    own = batch(case, ranks.rank, 4)
    wide = KeyedJaggedTensor(own.keys(), own.values(), own.weights().double(), own.lengths())
    torch.testing.assert_close(flat(sharded(wide)), flat(oracle(wide)))
    with pytest.raises(ValueError, match="batches must have weights"):
        sharded(batch(replace(case, weighted=False), ranks.rank, 4))


def test_weights_count_where_the_collection_is_weighted() -> None:
    for size in (1, 2):
        for pooled in (True, False):
            worlds.run(size, _call, weights_where_they_are_not_wanted, {"pooled": pooled})
        worlds.run(size, weights_that_are_wanted)


def gradient_of_weights(ranks: RankGroup, plan: Any, optimizer: Any, gradients: str) -> None:
    case = Case(tables(SUM, MEAN), plan, weighted=True, optimizer=optimizer)
    grads = []
    for collection in both(case, ranks, gradients):
        own = batch(case, ranks.rank, 4)
        weights = own.weights().requires_grad_()
        output = flat(collection(own))
        output.backward(torch.ones_like(output).cumsum(1))
        grads.append(weights.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
@pytest.mark.parametrize("plan", [ON_FIRST, ("dp",) * 4, MIXED])
def test_weights_get_gradients_on_every_rank(plan: Any, gradients: str) -> None:
    for optimizer in (optim.SGD(0.0), None):
        worlds.run(2, gradient_of_weights, plan, optimizer, gradients)


def gradient_of_weights_on_one_rank(ranks: RankGroup) -> None:
    case = Case(tables(SUM, MEAN), MIXED, weighted=True)
    model = make_sharded(case, ranks, make_source(case))
    batch_of_rank = batch(case, ranks.rank, 4)
    batch_of_rank.weights().requires_grad_(ranks.rank == 1)
    with torch.no_grad():
        model(batch_of_rank).wait()
    with pytest.raises(RuntimeError, match="rank 1: int64, weights with gradients"):
        model(batch_of_rank)


def test_weights_that_need_gradients_on_one_rank_alone_are_refused() -> None:
    worlds.run(2, gradient_of_weights_on_one_rank)


def used_in_another_mode(ranks: RankGroup, *, pooled: bool) -> None:
    """Gradients are recorded as when the lookup was made, whenever its result is used first."""
    configs = tables(SUM)
    case = Case(configs if pooled else sequences(configs), MIXED)
    _, sharded = both(case, ranks)
    own = batch(case, ranks.rank, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not flat(sharded(own)).requires_grad
            later = sharded(own)
        assert not flat(later).requires_grad
    later = sharded(own)
    with torch.no_grad():
        later.wait()
    flat(later).sum().backward()


@pytest.mark.parametrize("pooled", [True, False])
def test_a_result_that_is_used_later_is_of_the_mode_of_its_lookup(*, pooled: bool) -> None:
    worlds.run(2, _call, used_in_another_mode, {"pooled": pooled})


def copied(ranks: RankGroup, optimizer: Any, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN)
    case = Case(configs if pooled else sequences(configs), MIXED, optimizer=optimizer)
    oracle, sharded = both(case, ranks)
    clone = copy.deepcopy(sharded)
    own = batch(case, ranks.rank, 4)
    flat(clone(own)).sum().backward()
    compare_tables(sharded, oracle, 0.0)
    listed = {id(parameter) for parameter in clone.parameters()}
    for part in clone.local_shards():
        for parameter in part.groups.parameters_of(part.index).values():
            assert id(parameter) in listed
            assert (parameter.grad is None) == (optimizer is not None)
    assert all(parameter.grad is None for parameter in sharded.parameters())


@pytest.mark.parametrize("pooled", [True, False])
def test_a_copy_has_parameters_of_its_own(*, pooled: bool) -> None:
    for optimizer in (optim.Adam(0.1), None):
        worlds.run(2, _call, copied, optimizer, {"pooled": pooled})


def emptied(ranks: RankGroup, *, pooled: bool) -> None:
    """What describes the layout survives `to_empty` and writes of torch, unlike the weights."""
    configs = tables(SUM, MEAN)
    case = Case(configs if pooled else sequences(configs), MIXED)
    oracle, sharded = both(case, ranks)
    own, weights = batch(case, ranks.rank, 4), oracle.state_dict()
    expected = flat(oracle(own)).detach()
    sharded.to("meta")
    with pytest.raises(RuntimeError, match=r"on meta, where|send its batch"):
        sharded(own)
    sharded.to_empty(device=ranks.device).load_state_dict(weights)
    torch.testing.assert_close(flat(sharded(own)), expected)
    for buffer in sharded.buffers():  # as AveragedModel(use_buffers=True) does, which rounds
        buffer.sub_(1)
    torch.testing.assert_close(flat(copy.deepcopy(sharded)(own)), expected)
    output = flat(sharded(own))
    torch.testing.assert_close(output, expected)
    output.sum().backward()


@pytest.mark.parametrize("pooled", [True, False])
def test_the_layout_survives_to_empty_and_writes(*, pooled: bool) -> None:
    worlds.run(2, _call, emptied, {"pooled": pooled})


def quantised(ranks: RankGroup, plan: Any, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN, dims=(8,) * 4)
    case = Case(configs if pooled else sequences(configs), plan, optimizer=None)
    source = make_source(case).quantized()
    sharded = make_sharded(case, ranks, copy.deepcopy(source))
    own = batch(case, ranks.rank, 4)
    output = flat(sharded(own))
    torch.testing.assert_close(output, flat(source(own)))
    if output.requires_grad:
        output.sum().backward()  # as of a dense part behind it, which leaves the tables alone


@pytest.mark.parametrize("pooled", [True, False])
def test_quantised_tables(*, pooled: bool) -> None:
    for plan in (("tw",) * 4, ("dp",) * 4, ("dp", "rw", "tw", "rw")):
        for size in (1, 2):
            worlds.run(size, _call, quantised, plan, {"pooled": pooled})


def unequal_bags(ranks: RankGroup, plan: Any) -> None:
    case = Case(tables(SUM, MEAN), plan, variable=True)
    _, sharded = both(case, ranks)
    own = batch(case, ranks.rank, 4)
    strides = [[count] for count in own.stride_per_key()]
    bare = KeyedJaggedTensor(
        own.keys(), own.values(), None, own.lengths(), stride_per_key_per_rank=strides
    )
    with pytest.raises(ValueError, match="need inverse indices"):
        sharded(bare).values()


def test_features_of_unlike_bags_need_inverse_indices() -> None:
    for size in (1, 2):
        worlds.run(size, unequal_bags, MIXED)


def padded_batches(ranks: RankGroup, plan: str, *, pooled: bool) -> None:
    """Padding in front of a batch, ids of -1 before its first offset, changes nothing."""
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    collection: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
    shardings = {"tw": sharding_types.table_wise(0), "rw": sharding_types.row_wise()}
    sharded = sharding.DistributedModelParallel(
        collection([config(10, 4, "a"), config(10, 4, "b")]),
        ranks,
        plan={"": dict.fromkeys("ab", shardings[plan])},
    )
    ids, offsets = torch.tensor([-1, -1, 7, 8, 9, 4]), torch.tensor([2, 4, 5, 5, 6])
    padded = KeyedJaggedTensor(["a", "b"], ids, offsets=offsets)
    plain = KeyedJaggedTensor(["a", "b"], ids[2:], offsets=offsets - 2)
    with torch.no_grad():
        assert torch.equal(flat(sharded(padded)), flat(sharded(plain)))


@pytest.mark.parametrize("plan", ["tw", "rw"])
@pytest.mark.parametrize("pooled", [True, False])
def test_padded_batches(plan: str, *, pooled: bool) -> None:
    for size in (1, 2):
        worlds.run(size, _call, padded_batches, plan, {"pooled": pooled})


def test_one_rank_may_replicate_dynamic_tables() -> None:
    configs = tables(SUM, MEAN, storage=Hash(), dims=(8,) * 4)
    configs = tuple(replace(config, num_embeddings=4096) for config in configs)
    worlds.run(1, train, Case(configs, ("dp",) * 4))
    worlds.run(1, train, Case(sequences(configs), ("dp",) * 4))


def refused(ranks: RankGroup) -> None:
    source = make_source(Case(tables(SUM, storage=Hash(), dims=(8,) * 4), MIXED))
    rules: Any = {f"t{i}": sharding_types.table_wise(0) for i in range(4)}
    with pytest.raises(ValueError, match=r"t1: replicas of a hash table.*table_wise"):
        sharding.shard(source, {"": {**rules, "t1": sharding_types.data_parallel()}}, ranks)
    plain = replace(
        sharding_types.table_wise(0)(sharding_types.TableShape(7, 8), sharding_types.World(2, 2)),
        storage=Dense(),
    )
    with pytest.raises(ValueError, match=r"t1: a plan cannot make .* change the storage"):
        sharding.shard(source, {"": {**rules, "t1": plain}}, ranks)
    one = make_source(Case(tables(SUM), MIXED, optimizer=None)).quantized()
    assert isinstance(one.configs[0].storage, Quantized)
    dim = one.configs[0].embedding_dim
    columns = sharding_types.column_wise(sizes=[dim - 1, 1])
    with pytest.raises(ValueError, match=rf"its columns can be cut at multiples of {dim} only"):
        sharding.shard(one, {"": {**rules, "t0": columns}}, ranks)


def test_what_a_kind_of_table_cannot_be_is_told() -> None:
    worlds.run(2, refused)
