"""Warnings of invalid ids name the id, its feature and its table; collections select the check."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import emblib
from emblib import (
    BoundsCheck,
    CachedTTEmbeddingBags,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Pooling,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
    storage,
)
from emblib.inference import for_inference
from emblib.sharding import (
    DistributedModelParallel,
    RankGroup,
    ShardedEmbeddingBagCollection,
    construct_module_plan,
    table_wise,
)

SPECS = [TableSpec(50, 4, "users"), TableSpec(20, 4, "goods")]
TRAINS = [TTSpec(50, 4, (2,), (5, 10), (2, 2), name="users"), TTSpec(20, 4, (2,), name="goods")]
FEATURES = (0, 1, 1)  # features 1 and 2 read goods
BARE: dict[str, Callable[..., Any]] = {
    "dense": lambda **o: TableBatchedEmbeddingBags(SPECS, feature_tables=FEATURES, **o),
    "train": lambda **o: TableBatchedTTEmbeddingBags(TRAINS, feature_tables=FEATURES, **o),
    "cached train": lambda **o: CachedTTEmbeddingBags(
        TRAINS, TTCache(8), feature_tables=FEATURES, **o
    ),
    "quantised": lambda **o: QuantizedEmbeddingBags.from_float(BARE["dense"](), **o),
}
KINDS = {
    "dense": storage.Dense(),
    "train": storage.TensorTrain(ranks=(2, 2)),
    "cached train": storage.TensorTrain(ranks=(2, 2), cache=TTCache(8)),
    "composed": storage.QuotientRemainder(4),
}


def messages(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if "out of bounds" in str(w.message)]


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_module_names_the_first_invalid_id(kind: str, dtype: torch.dtype) -> None:
    module = BARE[kind]()
    ids = torch.tensor([49, -1, 19, 20, -7], dtype=dtype)  # -1 is skipped, not invalid
    offsets = torch.tensor([0, 1, 2, 3, 3, 4, 5], dtype=dtype)
    (text,) = messages(lambda: module(ids, offsets))
    assert "2 indices and 0 offsets out of bounds" in text
    assert "(the first: index 20 at position 3, feature 2, table 'goods' of 20 rows)" in text


def test_batches_of_unequal_sizes_and_short_offsets() -> None:
    module = BARE["dense"](include_last_offset=False)
    ids = torch.tensor([1, 1, 1, 1, 33])
    sizes = [[1], [3], [1]]
    (text,) = messages(lambda: module(ids, torch.arange(5), batch_sizes=sizes))
    assert "index 33 at position 4, feature 2, table 'goods'" in text


def test_offsets_alone_name_no_index() -> None:
    module = BARE["dense"]()
    offsets = torch.tensor([0, 2, 1, 3])
    (text,) = messages(lambda: module(torch.tensor([1, 2, 3]), offsets))
    assert "0 indices and 1 offsets out of bounds;" in text


def collection(kind: str, **options: Any) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(50, 4, "users", ["user"], storage=KINDS[kind]),
        EmbeddingBagConfig(20, 4, "goods", ["bought", "seen"], storage=KINDS[kind]),
    ]
    return EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1), **options)


def batch(seen: int = 21) -> KeyedJaggedTensor:
    ids = torch.tensor([1, 2, 3, seen])
    return KeyedJaggedTensor(["user", "bought", "seen"], ids, lengths=torch.tensor([1, 1, 2]))


WHERE = "index 21 at position 3, feature 'seen', table 'goods' of 20 rows"


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_names_the_feature(kind: str) -> None:
    module = collection(kind)
    assert WHERE in messages(lambda: module(batch()))[0]


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.to("cpu")]
)
def test_a_copy_keeps_check_and_names(change: Callable[[Any], Any]) -> None:
    assert WHERE in messages(lambda: change(collection("dense"))(batch()))[0]
    quiet = change(collection("dense", bounds_check=BoundsCheck.IGNORE))
    assert messages(lambda: quiet(batch())) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_takes_the_advice_of_the_warning(kind: str) -> None:
    fatal = collection(kind, bounds_check=BoundsCheck.FATAL)
    with pytest.raises(RuntimeError, match="indices of feature 'seen', table 'goods' must be"):
        fatal(batch())
    assert fatal(batch(19)).values().shape == (1, 12)
    ignoring = collection(kind, bounds_check=BoundsCheck.IGNORE)
    assert messages(lambda: ignoring(batch())) == []


def test_tables_of_several_kernels_and_sequences() -> None:
    configs = [
        EmbeddingConfig(50, 4, "users", ["user"], optimizer=optim.Adam(0.1)),
        EmbeddingConfig(20, 4, "goods", ["bought", "seen"], optimizer=optim.SGD(0.1)),
    ]
    assert (
        WHERE.replace("position 3", "position 2")
        in messages(lambda: EmbeddingCollection(configs)(batch()))[0]
    )  # positions count in the ids of a kernel
    fatal = EmbeddingCollection(configs, bounds_check=BoundsCheck.FATAL)
    with pytest.raises(RuntimeError, match="indices of feature 'seen', table 'goods' must be"):
        fatal(batch())


@pytest.mark.parametrize("kind", BARE)
def test_a_fatal_check_of_a_module_names_the_table(kind: str) -> None:
    module = BARE[kind](bounds_check=BoundsCheck.FATAL)
    ids, offsets = torch.tensor([1, 2, 20]), torch.tensor([0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="indices of feature 2, table 'goods' must be in"):
        module(ids, offsets)


def test_frozen_collections_name_the_feature(tmp_path: Path) -> None:
    path = str(tmp_path / "tables.frozen")
    emblib.freeze(collection("dense"), path)
    for served in (for_inference(collection("dense")), emblib.open_frozen(path)):
        (text,) = messages(lambda served=served: served(batch()))
        assert WHERE in text
    emblib.freeze(collection("dense", bounds_check=BoundsCheck.FATAL), path)
    with pytest.raises(RuntimeError, match="indices of feature 'seen', table 'goods' must be"):
        emblib.open_frozen(path)(batch())


def test_mixed_pooling() -> None:
    configs = [
        EmbeddingBagConfig(50, 4, "users", ["user"]),
        EmbeddingBagConfig(20, 4, "goods", ["bought", "seen"], pooling=Pooling.MEAN),
    ]
    assert WHERE in messages(lambda: EmbeddingBagCollection(configs)(batch()))[0]


@pytest.mark.parametrize("check", [BoundsCheck.WARNING, BoundsCheck.FATAL, BoundsCheck.IGNORE])
def test_a_sharded_collection_has_check_and_names_of_its_source(check: BoundsCheck) -> None:
    source, ranks = collection("dense", bounds_check=check), RankGroup.single()
    plan = construct_module_plan(source, {t: table_wise(0) for t in ("users", "goods")}, ranks)
    sharded = ShardedEmbeddingBagCollection(source, plan, ranks)
    if check is BoundsCheck.FATAL:
        with pytest.raises(RuntimeError, match="indices of feature"):
            sharded(batch()).wait()
        return
    texts = messages(lambda: sharded(batch()).wait())
    assert [WHERE in text for text in texts] == [True] * (check is BoundsCheck.WARNING)
    wrapped = DistributedModelParallel(source, ranks)
    assert len(messages(lambda: wrapped(batch()).values())) == (check is BoundsCheck.WARNING)


def test_conversions_keep_the_check() -> None:
    quiet = collection("dense", bounds_check=BoundsCheck.IGNORE)
    assert messages(lambda: quiet.quantized()(batch())) == []
    quiet.set_optimizers({"users": optim.Adam(0.1)})
    assert messages(lambda: quiet(batch())) == []


def test_a_wrong_check_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        collection("dense", bounds_check="loud")
    assert emblib.BoundsCheck("fatal") is collection("dense", bounds_check="fatal").bounds_check
