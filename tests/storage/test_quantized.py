"""Quantised tables in collections: quantised from others, mixed with others, saved and loaded."""

import copy

import pytest
import torch

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    Pooling,
    QuantizedEmbeddingBags,
    optim,
)
from emblib.collections import TableGroups
from emblib.storage import Quantized, TableSlice
from tests.collections.cases import (
    IDS,
    bag_configs,
    batch,
    dense,
    expected,
    features_of,
    sequence_configs,
)


def _rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return QuantizedEmbeddingBags.from_float(rows, bits).to_dense(0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("pooling", list(Pooling)[:2])
def test_made_of_a_collection(bits: int, pooling: Pooling) -> None:
    """The rows of plain tables and of tensor trains, each rounded; dynamic ones as they were."""
    configs = bag_configs(("plain", "tt", "dynamic", "plain"), pooling)
    collection = EmbeddingBagCollection(configs, is_weighted=True, optimizer=optim.Adam(0.1))
    features = batch(features_of(configs), 4, weighted=True)
    collection(features).values().sum().backward()
    rows = {c.name: dense(collection, c.name) for c in configs}
    rows |= {name: _rounded(rows[name], bits) for name in ("t0", "t1", "t3")}
    small = collection.quantized(bits)
    out = small(features)
    wanted = expected(configs, rows, features, weighted=True)
    assert out.keys() == list(wanted)
    torch.testing.assert_close(out.values(), torch.cat(list(wanted.values()), 1))
    assert [c.storage for c in small.configs if c.name != "t2"] == [Quantized(bits)] * 3
    assert not small.training


def test_bits_by_table() -> None:
    """Tables that are not named keep rows and storage."""
    configs = bag_configs(("plain", "tt", "dynamic", "plain"))
    collection = EmbeddingBagCollection(configs)
    features = batch(features_of(configs), 4)
    collection(features)  # the dynamic table has keys
    rows = {c.name: dense(collection, c.name) for c in configs}
    rows |= {"t0": _rounded(rows["t0"], 4), "t1": _rounded(rows["t1"], 8)}
    small = collection.quantized({"t0": 4, "t1": 8})
    kinds = {c.name: c.storage for c in small.configs}
    assert kinds == {c.name: c.storage for c in configs} | {"t0": Quantized(4), "t1": Quantized(8)}
    out = small(features)
    wanted = expected(configs, rows, features)
    torch.testing.assert_close(out.values(), torch.cat(list(wanted.values()), 1))
    with pytest.raises(KeyError, match="there are no tables"):
        collection.quantized({"t9": 8})


def test_tables_are_buffers() -> None:
    small = EmbeddingBagCollection(bag_configs(("plain", "plain"))).quantized()
    names = {name for name, _ in small.named_buffers() if name.startswith("embedding_bags.")}
    assert names == {f"embedding_bags.t{t}.packed" for t in (0, 1)}
    twin = copy.deepcopy(small)
    for name, buffer in small.named_buffers():
        other = dict(twin.named_buffers())[name]
        assert torch.equal(other, buffer)
        assert not buffer.numel() or other.data_ptr() != buffer.data_ptr()
    # They are views of the memory that lookups read, also after a move.
    moved = copy.deepcopy(small).to(torch.device("cpu"))
    for name, buffer in moved.named_buffers():
        if name.endswith("packed"):
            buffer.zero_()
    ids = batch(features_of(small.configs), 4)
    assert not moved(ids).values().any()
    assert small(ids).values().any()


def test_made_of_sequences() -> None:
    configs = sequence_configs(("plain", "tt"), (4, 8))
    collection = EmbeddingCollection(configs, need_indices=True)
    features = batch(features_of(configs), 4)
    out = collection.quantized()(features)
    for config in configs:
        rows = _rounded(dense(collection, config.name), 8)
        for key in config.feature_names:
            ids = features[key].values()
            torch.testing.assert_close(out[key].values(), rows[ids])
            assert torch.equal(out[key].weights(), ids)


@pytest.mark.parametrize("bits", [8, 4])
def test_saved_and_loaded(bits: int) -> None:
    configs = [
        EmbeddingBagConfig(60, 6, "a", storage=Quantized(bits)),
        EmbeddingBagConfig(60, 4, "b", optimizer=optim.SGD(0.1)),
        EmbeddingBagConfig(70, 8, "c", ["c", "d"], storage=Quantized(bits)),
    ]
    one, two = EmbeddingBagCollection(configs), EmbeddingBagCollection(configs)
    assert len(one.groups.groups) == 2
    features = batch(features_of(configs), 4)
    out = one(features).values()
    out.sum().backward()
    assert not torch.equal(two(features).values(), out)
    state = one.state_dict()
    assert [key for key in state if ".b." not in key] == [
        f"embedding_bags.{table}.packed" for table in ("a", "c")
    ]
    two.load_state_dict(state)
    assert torch.equal(two(features).values(), one(features).values())
    assert [name for name, _ in one.named_parameters()] == ["embedding_bags.b.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        two.load_state_dict({**state, "embedding_bags.a.packed": torch.zeros(1)})
    del state["embedding_bags.a.packed"]
    with pytest.raises(RuntimeError, match=r"Missing key.*a\.packed"):
        two.load_state_dict(state)


@pytest.mark.parametrize("bits", [8, 4])
def test_state_dicts_from_before_0_1_0_are_converted(bits: int) -> None:
    levels, width = 2**bits - 1, 6 * bits // 8
    numbers = torch.randint(256, (60, width), dtype=torch.uint8)
    scales = torch.tensor([0.5, -levels / 4]).expand(60, 2).contiguous()
    state = {"embedding_bags.a.values": numbers, "embedding_bags.a.scales": scales}
    config = EmbeddingBagConfig(60, 6, "a", storage=Quantized(bits))
    made = EmbeddingBagCollection([config])
    made.load_state_dict(state)
    codes = numbers if bits == 8 else torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
    rows = codes * 0.5 - levels / 4
    assert (made.handles()["a"].module.to_dense(0) - rows).abs().max() <= 0.26
    for wrong in (numbers[:, 1:], numbers[1:]):
        with pytest.raises(RuntimeError, match=r"embedding_bags\.a: size mismatch"):
            made.load_state_dict({**state, "embedding_bags.a.values": wrong})
    for rows in (1, 59):  # one row was copied to all rows of the table
        with pytest.raises(RuntimeError, match=r"a\.packed: size mismatch"):
            made.load_state_dict({key: value[:rows] for key, value in state.items()})


def test_weights_of_a_plain_table_are_quantised_as_they_are_loaded() -> None:
    plain = EmbeddingBagCollection([EmbeddingBagConfig(60, 6, "a")])
    small = EmbeddingBagCollection([EmbeddingBagConfig(60, 6, "a", storage=Quantized())])
    small.load_state_dict(plain.state_dict())
    weight = plain.state_dict()["embedding_bags.a.weight"]
    assert torch.equal(small.handles()["a"].module.to_dense(0), _rounded(weight, 8))
    with pytest.raises(RuntimeError, match="must be finite"):
        small.load_state_dict({"embedding_bags.a.weight": torch.full((60, 6), torch.nan)})


def test_first_values_are_those_of_plain_tables() -> None:
    config = EmbeddingBagConfig(100, 6, "a", storage=Quantized())
    plain = EmbeddingBagConfig(100, 6, "a")
    modules = [
        TableGroups([TableSlice.whole(c)], [], pooling=Pooling.SUM, seeds={"a": 5}).module_of(0)[0]
        for c in (config, plain)
    ]
    assert torch.equal(modules[0].to_dense(0), _rounded(modules[1].table_weights()[0], 8))
    part = TableSlice(config, (30, 80), (0, 6))
    cut = TableGroups([part], [], pooling=Pooling.SUM, seeds={"a": 5}).module_of(0)[0]
    assert torch.equal(cut.to_dense(0), modules[0].to_dense(0)[30:80])
    with pytest.raises(ValueError, match="not divided by columns"):
        TableSlice(config, (0, IDS), (0, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_first_values_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    config = EmbeddingBagConfig(60, 6, "a", storage=Quantized())
    torch.manual_seed(0)
    expected_rows = EmbeddingBagCollection([config]).state_dict()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        rows = EmbeddingBagCollection([config]).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0)


def test_dense_weights_of_all_tables_are_loaded_or_of_none() -> None:
    configs = [EmbeddingBagConfig(9, 4, name, storage=Quantized()) for name in "ab"]
    bags = EmbeddingBagCollection(configs)
    before = {key: value.clone() for key, value in bags.state_dict().items()}
    weights = {f"embedding_bags.{name}.weight": torch.randn(9, 4).double() for name in "ab"}
    wrong = {**weights, "embedding_bags.b.weight": torch.full((9, 4), torch.nan)}
    with pytest.raises(RuntimeError, match="rows must be finite"):
        bags.load_state_dict(wrong)
    assert all(torch.equal(value, before[key]) for key, value in bags.state_dict().items())
    bags.load_state_dict(weights)  # of any real dtype, as dense tables take them
    for name in "ab":
        rows = bags.handles()[name].module.to_dense(bags.handles()[name].index)
        assert torch.allclose(rows.double(), weights[f"embedding_bags.{name}.weight"], atol=0.02)
