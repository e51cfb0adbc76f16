"""Wrong batches have one outcome, whatever the order of keys, the tables and the ranks."""

import warnings
from typing import Any

import pytest
import torch

from emblib import (
    BoundsCheck,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    optim,
    sharding,
    storage,
)
from emblib.collections.checked_batch import checked_batch
from emblib.inference import for_inference
from emblib.tables.bounds_report import with_padding
from tests.sharding import worlds

IDS = torch.tensor([1, 2, 3, 4, 5])
DENSE, HASH = storage.Dense(), storage.Hash(seed=1)
# Storages of the tables a and b: one module, two modules, two with keys.
STORAGES = [(DENSE, DENSE), (DENSE, HASH), (HASH, DENSE), (HASH, HASH)]
SEVERAL_KEYS = [["a", "b"], ["b", "a"], ["other", "b", "a"]]


def make(kinds: Any = (DENSE, DENSE), *, pooled: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    collection: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
    tables = [config(16, 4, name, storage=kind) for name, kind in zip("ab", kinds, strict=True)]
    return collection(tables, optimizer=optim.SGD(0.1), **options)


def batch(keys: Any, lengths: Any, ids: torch.Tensor = IDS) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, ids, lengths=torch.tensor(lengths))


def outcome(collection: Any, features: KeyedJaggedTensor) -> tuple[Any, str]:
    """Return the output and its warning; the text of a RuntimeError instead of an output."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            output = collection(features)
        except RuntimeError as error:
            return None, str(error)
        output = output.wait() if hasattr(output, "wait") else output
    return output, " ".join(str(w.message) for w in seen)


@pytest.mark.parametrize("keys", SEVERAL_KEYS)
@pytest.mark.parametrize("kinds", STORAGES)
@pytest.mark.parametrize("pooled", [True, False])
def test_lengths_that_do_not_add_up(keys: Any, kinds: Any, *, pooled: bool) -> None:
    """The last bag of the batch gets the ids that are left, with a warning; FATAL raises."""
    others = [0] * (len(keys) - 2)
    for last_lengths, repaired in (((1, 1), (1, 4)), ((0, 0), (0, 5)), ((4, 3), (4, 1))):
        wrong, valid = batch(keys, [*others, *last_lengths]), batch(keys, [*others, *repaired])
        output, text = outcome(make(kinds, pooled=pooled), wrong)
        assert "offsets out of bounds" in text
        expected, silence = outcome(make(kinds, pooled=pooled), valid)
        assert silence == ""
        for key in ("a", "b"):
            got, want = output[key], expected[key]
            torch.testing.assert_close(*((got, want) if pooled else (got.values(), want.values())))
        ignoring = make(kinds, pooled=pooled, bounds_check=BoundsCheck.IGNORE)
        assert outcome(ignoring, wrong)[1] == ""
        fatal = make(kinds, pooled=pooled, bounds_check=BoundsCheck.FATAL)
        assert outcome(fatal, wrong)[0] is None
        assert outcome(fatal, valid)[1] == ""


@pytest.mark.parametrize("kind", [DENSE, HASH])
def test_ids_behind_the_bags_of_an_only_feature_raise(kind: Any) -> None:
    torch.manual_seed(0)
    for make_config, make_collection in (
        (EmbeddingBagConfig, EmbeddingBagCollection),
        (EmbeddingConfig, EmbeddingCollection),
    ):
        collection: Any = make_collection([make_config(16, 4, "a", storage=kind)])
        assert outcome(collection, batch(["a"], [1, 1]))[0] is None


@pytest.mark.parametrize("check", [BoundsCheck.FATAL, BoundsCheck.WARNING])
@pytest.mark.parametrize("keys", SEVERAL_KEYS)
@pytest.mark.parametrize("kinds", STORAGES)
def test_a_negative_length_raises(check: BoundsCheck, keys: Any, kinds: Any) -> None:
    others = [0] * 2 * (len(keys) - 2)
    for lengths in ([2, -1, 2, 1], [2, 1, -1, 2], [7, -5, 2, 1], [2, 1, 4, -2]):
        output, text = outcome(make(kinds, bounds_check=check), batch(keys, [*others, *lengths]))
        assert output is None
        assert f"lengths must be >= 0, got {min(lengths)}" in text
        assert f"feature {keys[-2:][lengths.index(min(lengths)) // 2]!r}" in text


@pytest.mark.parametrize("check", [BoundsCheck.IGNORE, BoundsCheck.NONE])
@pytest.mark.parametrize("keys", SEVERAL_KEYS)
def test_silent_modes_stay_silent(check: BoundsCheck, keys: Any) -> None:
    others = [0] * 2 * (len(keys) - 2)
    wrong = batch(keys, [*others, 7, -1, 2, -3])
    output, text = outcome(make(bounds_check=check), wrong)
    assert text == ""
    assert output.values().isfinite().all()


def test_ids_before_the_first_bag() -> None:
    keys, offsets = ["b", "a"], torch.tensor([2, 3, 5])
    lost = KeyedJaggedTensor(keys, IDS, offsets=offsets)
    output, text = outcome(make(), lost)
    assert output is None
    assert "must begin with 0, got 2" in text
    padding = KeyedJaggedTensor(keys, torch.tensor([-1, -1, 3, 4, 5]), offsets=offsets)
    output, text = outcome(make(), padding)
    assert text == ""
    assert torch.equal(output.values(), make()(batch(keys, [1, 2], IDS[2:])).values())
    assert with_padding(checked_batch)(lost, BoundsCheck.WARNING).values() is IDS


def test_a_valid_batch_is_returned_as_it_is() -> None:
    for valid in (
        batch(["a", "b"], [2, 3]),
        batch(["a"], [], IDS[:0]),
        KeyedJaggedTensor.empty(),
        batch(["a", "b"], [2, 3]).to("meta"),
    ):
        assert checked_batch(valid, BoundsCheck.FATAL) is valid


def test_a_compiled_collection_checks_lengths() -> None:
    torch._dynamo.reset()
    for kinds in ((DENSE, DENSE), (DENSE, HASH)):
        collection = make(kinds, bounds_check=BoundsCheck.FATAL)
        compiled = torch.compile(collection, backend="aot_eager")
        valid = batch(["b", "a"], [2, 3])
        assert torch.equal(compiled(valid).values(), collection(valid).values())
        with pytest.raises(RuntimeError, match="add up to 2, but there are 5 ids"):
            compiled(batch(["b", "a"], [1, 1]))
    torch._dynamo.reset()


def test_whole_graphs_take_a_permuted_batch() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        collection = make()
        compiled = torch.compile(collection, backend="aot_eager", fullgraph=True)
        for lengths in ([2, 3], [1, 4]):
            valid = batch(["b", "a"], lengths)
            assert torch.equal(compiled(valid).values(), collection(valid).values())
    torch._dynamo.reset()


WRONG_IDS = [
    (IDS.float(), TypeError, "ids must be int32 or int64, got values of torch.float32"),
    (IDS.double(), TypeError, "got values of torch.float64"),
    (IDS.short(), TypeError, "got values of torch.int16"),
    (IDS.bool(), TypeError, "got values of torch.bool"),
    (IDS.view(-1, 1), ValueError, r"ids must have 1 dimension, got values of \[5, 1\]"),
]


@pytest.mark.parametrize("keys", SEVERAL_KEYS)
@pytest.mark.parametrize(("ids", "error", "text"), WRONG_IDS)
def test_values_that_are_no_ids(keys: Any, ids: torch.Tensor, error: Any, text: str) -> None:
    lengths = [0] * (len(keys) - 2) + [2, 3]
    ranks = sharding.RankGroup.single()
    plan = {"a": sharding.table_wise(0), "b": sharding.row_wise()}
    for collection in (
        make(),
        make((DENSE, HASH)),
        make(pooled=False),
        for_inference(make()),
        sharding.ShardedEmbeddingBagCollection(make(), plan, ranks),
        sharding.ShardedEmbeddingCollection(make(pooled=False), plan, ranks),
        sharding.ShardedEmbeddingCollection(make(pooled=False), plan, ranks, dedup=True),
    ):
        with pytest.raises(error, match=text):
            collection(batch(keys, lengths, ids))


def test_keys_of_hash_tables_may_be_uint64() -> None:
    ids = IDS.view(torch.uint64)
    collection = make((HASH, HASH))
    expected = collection(batch(["a", "b"], [2, 3]))
    assert torch.equal(collection(batch(["a", "b"], [2, 3], ids)).values(), expected.values())
    with pytest.raises(TypeError, match="got values of"):
        make()(batch(["a", "b"], [2, 3], ids))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_uint64_is_refused_before_a_hash_table_inserts_its_keys(*, is_sharded: bool) -> None:
    collection: Any = make((HASH, DENSE))
    if is_sharded:
        plan = dict.fromkeys("ab", sharding.table_wise(0))
        collection = sharding.ShardedEmbeddingBagCollection(
            collection, plan, sharding.RankGroup.single()
        )
    with pytest.raises(TypeError, match=r"got values of torch\.uint64"):
        collection(batch(["a", "b"], [2, 3], IDS.view(torch.uint64)))
    assert collection.tables["a"].size() == 0


def too_few(ranks: sharding.RankGroup, keys: list[str], by_kernel: str) -> str:
    """Return what is said of lengths that add up to 2; kernels check what one rank takes whole."""
    is_whole = ranks.size == 1 and keys == ["a", "b"]
    return by_kernel if is_whole else "add up to 2, but there are 5 ids"


def wrong_batch_of_one_rank(ranks: sharding.RankGroup, rule: str) -> None:
    """Rank 0 raises what is wrong, the other ranks that it did; all go on with the next batch."""
    table_sharding = {"rw": sharding.row_wise(), "tw": sharding.table_wise(ranks.size - 1)}[rule]
    source = make(bounds_check=BoundsCheck.FATAL)
    plan = dict.fromkeys("ab", table_sharding)
    sharded = sharding.ShardedEmbeddingBagCollection(source, plan, ranks)
    for keys in SEVERAL_KEYS:
        others = [0] * (len(keys) - 2)
        valid = batch(keys, [*others, 2, 3])
        surplus = too_few(ranks, keys, "number of indices = 5; got 2")
        for wrong, error, text in (
            (batch(keys, [*others, 2, 3], IDS.float()), TypeError, "ids must be int32 or int64"),
            (batch(keys, [*others, 3, -1]), RuntimeError, "lengths must be >= 0, got -1"),
            (batch(keys, [*others, 1, 1]), RuntimeError, surplus),
        ):
            if ranks.rank == 0:
                with pytest.raises(error, match=text):
                    sharded(wrong)
            else:
                with pytest.raises(RuntimeError, match="rank 0 could not send its batch"):
                    sharded(valid)
        torch.testing.assert_close(sharded(valid).wait().values(), make()(valid).values())


def warned_batch(ranks: sharding.RankGroup, rule: str) -> None:
    table_sharding = {"rw": sharding.row_wise(), "tw": sharding.table_wise(ranks.size - 1)}[rule]
    for keys in SEVERAL_KEYS:
        plan = dict.fromkeys("ab", table_sharding)
        sharded = sharding.ShardedEmbeddingBagCollection(make(), plan, ranks)
        wrong = batch(keys, [0] * (len(keys) - 2) + [1, 1])
        output, text = outcome(sharded, wrong)
        assert too_few(ranks, keys, "0 indices and 1 offsets out of bounds") in text
        torch.testing.assert_close(output.values(), outcome(make(), wrong)[0].values())


@pytest.mark.parametrize("rule", ["rw", "tw"])
def test_ranks_check_their_own_batch(rule: str) -> None:
    for size in (1, 2):
        worlds.run(size, wrong_batch_of_one_rank, rule)
        worlds.run(size, warned_batch, rule)
