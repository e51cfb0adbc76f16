"""What configurations refuse, and what they make of what is left out."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from emblib import (
    CacheConfig,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Placement,
    Pooling,
    TableSpec,
    TTSpec,
    optim,
)
from emblib.init import ByRows, Uniform
from emblib.storage import Dense, Hash, Quantized, TableSlice, TensorTrain


def test_defaults() -> None:
    config = EmbeddingBagConfig(100, 8, "t")
    assert config.feature_names == ("t",)
    assert config.pooling is Pooling.SUM
    assert config.bounds == (-0.1, 0.1)
    assert config.data_type is torch.float32
    assert config.spec() == TableSpec(100, 8, "t")
    assert EmbeddingConfig(100, 8, "t", ["f"]).feature_names == ("f",)


def test_specs_of_kinds() -> None:
    train = EmbeddingConfig(100, 8, "t", storage=TensorTrain([3, 2], init="uniform"))
    assert train.spec() == TTSpec(100, 8, (3, 2), name="t")
    keys = EmbeddingConfig(100, 8, "t", storage=Hash(eviction="lfu", ttl=3))
    assert keys.spec() == DynamicSpec(100, 8, name="t", eviction="lfu", ttl=3)
    far = EmbeddingConfig(100, 8, "t", storage=Dense("managed"))
    assert far.spec() == TableSpec(100, 8, "t", Placement.MANAGED)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, "name of a table must be"),
        ({"name": "a.b"}, "name of a table must be"),
        *(
            ({"name": name}, f"e.g. '{name}_table', and give feature_names=['{name}']")
            for name in ("train", "keys", "training", "type")
        ),
        ({"num_embeddings": 0}, "num_embeddings must be >= 1"),
        ({"feature_names": "f"}, "write ['f']"),
        ({"feature_names": 3}, "feature_names must be a sequence of names, got 3"),
        ({"feature_names": ("f", "f")}, "must differ"),
        ({"pooling": "none"}, "must be SUM or MEAN"),
        ({"data_type": torch.int8}, "data_type of 't' must be float32"),
        ({"rounding": 3}, "rounding of 't' must be None or a StochasticRounding"),
        ({"storage": "plain"}, "storage of 't' must be"),
        ({"optimizer": "sgd"}, "optimizer of 't' must be None or one of"),
        ({"weight_init_min": 1.0}, "must be finite and in this order"),
        ({"weight_init_min": "0"}, "weight_init_min of 't' must be None or a number"),
        ({"weight_init_max": True}, "weight_init_max of 't' must be None or a number"),
        ({"init_fn": 3}, "init_fn of 't' must be None or a function"),
        ({"weight_init_min": 0.0, "init_fn": torch.nn.init.zeros_}, "set one"),
        ({"storage": TensorTrain((3, 2)), "weight_init_max": 1.0}, "TensorTrain(init=...)"),
        ({"storage": Hash(), "init_fn": torch.nn.init.zeros_}, "Hash(initializer=...)"),
        ({"storage": Quantized(), "optimizer": optim.SGD(0.1)}, "is not trained"),
    ],
)
def test_refused(options: dict, error: str) -> None:
    given = {"num_embeddings": 100, "embedding_dim": 8, "name": "t", **options}
    with pytest.raises((ValueError, TypeError), match=re.escape(error)):
        EmbeddingBagConfig(**given)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda table: EmbeddingBagCollection(table),
            "tables must be a list of EmbeddingBagConfig",
        ),
        (lambda table: EmbeddingBagCollection([table], True), "by name, is_weighted=True"),
        (
            lambda table: EmbeddingBagCollection([replace(table, storage=Dense("managed"))]),
            "such tables are {'t': 'Placement.MANAGED'}",
        ),
        (lambda table: EmbeddingBagCollection([table])(torch.ones(1)), "Tensor has no keys()"),
        (lambda table: EmbeddingBagCollection([table], shared=[table]), "shared must be None or"),
        (
            lambda table: EmbeddingCollection(
                [
                    EmbeddingConfig(9, 4, name, features)
                    for name, features in (("a", ["x"]), ("b", ["x"]), ("c", ["x@a"]))
                ]
            ),
            "'x@a' would be the name of 2 outputs",
        ),
    ],
)
def test_collections_refuse(make: Callable[[EmbeddingBagConfig], Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(error)):
        make(EmbeddingBagConfig(100, 8, "t"))


def test_features_may_have_names_that_tables_may_not() -> None:
    collection = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", ["train", "keys"])])
    batch = KeyedJaggedTensor(["keys", "train"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    weight = collection.state_dict()["embedding_bags.t.weight"]
    assert torch.equal(collection(batch)["train"], weight[2:3])


def test_kinds_refuse() -> None:
    with pytest.raises(ValueError, match="MANAGED_CACHING and DISK"):
        Dense(cache=CacheConfig())
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2"):
        Quantized(3)
    with pytest.raises(ValueError, match="init must be one of"):
        TensorTrain((3, 2), init="zeros")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_load": 0.0}, "max_load must be in"),
        ({"initial_capacity": 0}, "initial_capacity must be >= 1"),
        ({"initializer": 3}, "initializer must be"),
        ({"ttl": -1}, "ttl must be >= 1"),
        ({"admission": 3}, "admission must be"),
        ({"fallback_rows": -1}, "fallback_rows must be >= 0"),
        ({"default_value": float("nan")}, "default_value of DynamicSpec must be"),
        ({"initial_state": "a"}, "initial_state of DynamicSpec must be"),
    ],
)
def test_hash_refuses_options_at_construction(options: dict, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Hash(**options)


def test_bits_are_an_int() -> None:
    with pytest.raises(TypeError, match="bits must be an int"):
        Quantized(8.0)  # type: ignore[arg-type]
    bags = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t")])
    with pytest.raises(TypeError, match="bits must be an int"):
        bags.quantized("8")  # type: ignore[arg-type]


def test_slices_are_tables_of_their_own() -> None:
    config = EmbeddingBagConfig(100, 8, "t")
    part = TableSlice(config, (10, 40), (4, 8))
    assert part.spec == TableSpec(30, 4, "t")
    assert (part.num_rows, part.dim, part.is_whole) == (30, 4, False)
    assert TableSlice.whole(config).is_whole
    with pytest.raises(ValueError, match="rows of a slice of 't' must be a range"):
        TableSlice(config, (10, 101), (0, 8))
    keys = EmbeddingBagConfig(100, 8, "d", storage=Hash())
    assert TableSlice(keys, (0, 50), (0, 8)).spec == DynamicSpec(
        50, 8, name="d", initializer=Uniform(-0.1, 0.1)
    )
    with pytest.raises(ValueError, match="not divided by columns"):
        TableSlice(keys, (0, 100), (0, 4))


def test_slices_of_a_tensor_train_are_slices_of_its_first_core() -> None:
    kind = TensorTrain((3, 2), row_factors=(5, 4, 5), dim_factors=(2, 2, 2))
    config = EmbeddingBagConfig(95, 8, "t", storage=kind)
    part = TableSlice(config, (40, 95), (4, 8))
    assert kind.core_range(part) == ((2, 5), (1, 2))
    assert part.spec == TTSpec(55, 4, (3, 2), (3, 4, 5), (1, 2, 2), "t")
    cores = [torch.randn(5, 6), torch.randn(4, 12), torch.randn(5, 4)]
    first, *others = kind.cores_of(part, cores)
    assert torch.equal(first, cores[0][2:5, 3:6])
    assert all(a is b for a, b in zip(others, cores[1:], strict=True))
    with pytest.raises(ValueError, match="must be multiples of 20"):
        TableSlice(config, (10, 95), (0, 8))
    with pytest.raises(ValueError, match="must be multiples of 4"):
        TableSlice(config, (0, 95), (0, 2))


@pytest.mark.parametrize("function", [torch.zeros_like, ByRows(lambda rows, _: rows + 1)])
def test_an_init_fn_that_does_not_fill_its_tensor_is_told(function: Any) -> None:
    """The rows would be whatever was in memory."""
    with pytest.warns(UserWarning, match="init_fn of 't' returned another tensor, which is not"):
        EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", init_fn=function)])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", [torch.nn.init.zeros_, lambda rows: rows.zero_()[:2]])
def test_an_init_fn_may_return_what_it_filled(function: Any) -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", init_fn=function)])
    assert not model.embedding_bags["t"].weight.any()
