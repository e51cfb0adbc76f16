"""Collections and batches in TorchScript and graphs: the results of eager code."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib.compat.torchrec as torchrec
from emblib import CacheConfig, Placement
from emblib.jagged import KeyedJaggedTensor, KeyedTensor
from emblib.optim import SGD
from emblib.storage import Dense

HALF: Any = {"rtol": 1e-2, "atol": 1e-3}  # PyTorch's sums of float16 rows are float16
SUM, MEAN = torchrec.PoolingType.SUM, torchrec.PoolingType.MEAN


def quantised(
    poolings: tuple[Any, ...], dtypes: dict[str, torch.dtype], *, weighted: bool = False
) -> nn.Module:
    torch.manual_seed(2)
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t{t}",
            embedding_dim=4 + 3 * t,
            num_embeddings=9,
            feature_names=["f", f"g{t}"],
            pooling=pooling,
        )
        for t, pooling in enumerate(poolings)
    ]
    source = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    made: nn.Module = torchrec.quantize_embeddings(
        source, torch.qint8, inplace=False, per_table_weight_dtype=dtypes
    )
    return made


def batch(*, weighted: bool = False, bags: str = "lengths") -> KeyedJaggedTensor:
    """Features in another order than the tables', and one that no table has."""
    lengths = torch.tensor([2, 0, 1, 1, 3, 1, 0, 2, 1, 1, 1, 1])
    count = int(lengths.sum())
    weights = torch.linspace(0.5, 2, count) if weighted else None
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedJaggedTensor(
        ["g1", "other", "f", "g0"],
        torch.arange(count) % 9,
        weights,
        lengths if bags == "lengths" else None,
        ends if bags == "offsets" else None,
    )


class Model(nn.Module):
    """A quantised collection, and code around it."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found: KeyedTensor = self.ebc(features)
        return found


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(torchrec.symbolic_trace(model))


@pytest.mark.parametrize("poolings", [(SUM, SUM), (MEAN, MEAN), (SUM, MEAN), (MEAN, SUM)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtypes", [{}, {"t1": torch.quint4x2}, {"t0": torch.quint4x2}])
def test_scripted_collections_are_the_collections(
    poolings: tuple[Any, ...], weighted: bool, dtypes: dict[str, torch.dtype]
) -> None:
    ebc = quantised(poolings, dtypes, weighted=weighted)
    for bags in ("lengths", "offsets"):
        features = batch(weighted=weighted, bags=bags)
        expected = ebc(features)
        found = scripted(Model(ebc))(features)
        assert type(found) is KeyedTensor
        assert found.keys() == expected.keys() == ["f@t0", "g0", "f@t1", "g1"]
        assert torch.equal(found["g1"], expected["g1"])
        torch.testing.assert_close(found.values(), expected.values())


def test_a_scripted_model_is_saved_and_loaded() -> None:
    model = Model(quantised((SUM, MEAN), {}))
    expected = model.ebc(batch()).values()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(scripted(model), file)
        file.seek(0)
        loaded = torch.jit.load(file)
    torch.testing.assert_close(loaded(batch())._values, expected)


def test_code_after_the_lookup_is_compiled_too() -> None:
    class Sum(nn.Module):
        def __init__(self, ebc: nn.Module) -> None:
            super().__init__()
            self.ebc = ebc

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            found = self.ebc(features)
            result: Tensor = found["g0"].sum(1) + found.values().sum(1)
            return result

    model = Sum(quantised((SUM, SUM), {}))
    expected = model(batch())
    torch.testing.assert_close(scripted(model)(batch()), expected)


def test_scripted_code_takes_makes_and_splits_batches() -> None:
    class Parts(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
            ends = features.offset_per_key()
            again = KeyedJaggedTensor(
                keys=["x", "y", "z", "g0"],
                values=features.values()[: ends[4]],
                lengths=features.lengths(),
                weights=features.weights_or_none(),
            )
            bag = torchrec.JaggedTensor(again["z"].values(), lengths=again["z"].lengths())
            if bool((bag.offsets() != again.to_dict()["z"].offsets()).any()):
                raise ValueError("bags differ")
            return again.permute([3, 0]).split([1]) + again.split([1, 0, 3])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(Parts())
    features = batch(weighted=True)
    expected_parts = [features.permute([3]), *features.split([1, 0, 3])]
    for found, expected in zip(compiled(features), expected_parts, strict=True):
        assert type(found) is KeyedJaggedTensor
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.weights(), expected.weights())
        assert torch.equal(found.lengths(), expected.lengths())
    assert [part.keys() for part in compiled(features)] == [
        ["g0"],
        ["x"],
        [],
        ["y", "z", "g0"],
    ]


def test_bags_are_padded_in_scripted_code() -> None:
    class Pads(nn.Module):
        def forward(self, bags: torchrec.JaggedTensor) -> list[Tensor | None]:
            return [
                bags.to_padded_dense(),
                bags.to_padded_dense(2, padding_value=-1.0),
                bags.to_padded_dense_weights(4),
                bags.lengths_or_none(),
            ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(Pads())
    lengths = torch.tensor([3, 0, 1])
    for values, weights in (
        (torch.rand(4, 2), None),
        (torch.arange(4), torch.rand(4)),
        (torch.zeros(0, 2), None),
    ):
        bags = torchrec.JaggedTensor(values, weights, lengths if values.numel() else lengths * 0)
        for found, expected in zip(compiled(bags), Pads()(bags), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [None, torchrec.DataType.FP16])
def test_groups_of_results_are_scripted(dtype: Any) -> None:
    class Towers(nn.Module):
        def __init__(self, ebc: nn.Module) -> None:
            super().__init__()
            groups = [["g1", "g0"], ["f@t1"]]
            self.ebc = ebc
            self.regroup = torchrec.KTRegroupAsDict(groups, ["x", "y"], emb_dtype=dtype)

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            found = self.regroup([self.ebc(features)])
            result: Tensor = found["x"].sum(1) + found["y"].sum(1)
            return result

    model = Towers(quantised((SUM, SUM), {}))
    found, expected = scripted(model)(batch()), model(batch())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_a_batch_of_several_strides_is_an_error() -> None:
    made = scripted(Model(quantised((SUM,), {})))
    features = KeyedJaggedTensor(
        ["f", "g0"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(torch.jit.Error, match="one batch size for all features"):
        made(features)


def test_a_weighted_collection_needs_weights() -> None:
    made = scripted(Model(quantised((SUM, SUM), {}, weighted=True)))
    with pytest.raises(torch.jit.Error, match="batches must have weights"):
        made(batch())


def plain(*, pooled: bool, **options: Any) -> Any:
    torch.manual_seed(3)
    kind = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    poolings: list[dict[str, Any]] = [{"pooling": SUM}, {"pooling": MEAN}] if pooled else [{}, {}]
    tables = [
        kind(
            name=f"t{t}",
            embedding_dim=4,
            num_embeddings=9,
            feature_names=["f", f"g{t}"],
            data_type=(torchrec.DataType.FP32, torchrec.DataType.FP16)[t],
            **poolings[t],
        )
        for t in range(2)
    ]
    whole = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    return whole(tables=tables, **options)


@pytest.mark.parametrize("weighted", [False, True])
def test_plain_tables_are_scripted_and_trained(weighted: bool) -> None:
    ebc, features = plain(pooled=True, is_weighted=weighted), batch(weighted=weighted)
    expected, found = ebc(features), scripted(ebc)(features)
    assert (found.keys(), found.offset_per_key()) == (expected.keys(), expected.offset_per_key())
    torch.testing.assert_close(found.values(), expected.values(), **HALF)
    grads = []
    for pooled in (expected, found):
        pooled.values().square().sum().backward()
        grads.append([p.grad.clone() for p in ebc.parameters()])
        ebc.zero_grad()
    torch.testing.assert_close(*grads, **HALF)


@pytest.mark.parametrize("quantise", [False, True])
def test_sequences_are_scripted(quantise: bool) -> None:
    ec = plain(pooled=False, need_indices=True)
    if quantise:
        ec = torchrec.quantize_inference_model(nn.Sequential(ec))[0]
    features = batch()
    expected, found = ec(features), scripted(ec)(features)
    assert list(found) == list(expected) == ["f@t0", "g0", "f@t1", "g1"]
    for name, bags in found.items():
        torch.testing.assert_close(bags.values(), expected[name].values())
        assert torch.equal(bags.lengths(), expected[name].lengths())
        assert torch.equal(bags.weights(), expected[name].weights())


def test_tables_that_backward_updates_are_scripted_for_inference() -> None:
    ebc = plain(pooled=True, optimizer=SGD(0.1))
    made = scripted(ebc)
    with torch.no_grad():
        torch.testing.assert_close(made(batch()).values(), ebc(batch()).values(), **HALF)
    with pytest.raises(torch.jit.Error, match=r"TorchScript needs torch\.no_grad"):
        made(batch())


def test_static_methods_of_batches_are_scripted() -> None:
    class Makes(nn.Module):
        def forward(self, values: Tensor, ends: Tensor) -> list[KeyedJaggedTensor]:
            of_offsets = KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, ends)
            of_lengths = KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, ends.diff())
            empty = KeyedJaggedTensor.empty(is_weighted=True)
            return [of_offsets, of_lengths, empty, KeyedJaggedTensor.empty_like(of_offsets)]

    values, ends = torch.arange(4), torch.tensor([0, 1, 1, 3, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.jit.script(Makes())(values, ends)
    for made, expected in zip(found, Makes()(values, ends), strict=True):
        assert str(made) == str(expected)
        assert made.to(torch.device("cpu")).length_per_key() == expected.length_per_key()


def test_batches_in_graphs() -> None:
    """`torch.fx.symbolic_trace` records constructors and concatenations of batches as calls."""

    def joined(first: KeyedJaggedTensor, values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
        bags = torchrec.JaggedTensor(values, lengths=lengths)
        made = KeyedJaggedTensor(["x"], bags.values(), lengths=bags.lengths()).sync()
        return KeyedJaggedTensor.concat([first, made])

    def unpadded(padded: Tensor, lengths: Tensor) -> torchrec.JaggedTensor:
        return torchrec.JaggedTensor.from_dense_lengths(padded, lengths)

    arguments = batch(), torch.arange(5), torch.tensor([2, 3, 0])
    traced = torch.fx.symbolic_trace(joined)
    assert str(traced(*arguments)) == str(joined(*arguments))
    padded = torch.arange(6).view(2, 3), torch.tensor([1, 3])
    assert str(torch.fx.symbolic_trace(unpadded)(*padded)) == str(unpadded(*padded))

    class Empty(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.empty_like(kjt)

    traced = torchrec.symbolic_trace(Empty())
    for graph in (traced, torch.jit.script(traced)):
        found = graph(batch())
        assert (found.keys(), found.stride()) == ([], batch().stride())


def test_batches_without_data_are_looked_up() -> None:
    ebc = plain(pooled=True, device="meta")
    features = batch().to(torch.device("meta"))
    assert sum(features.length_per_key()) == features.values().numel()
    assert ebc(features).values().shape == (3, 16)


def test_what_is_not_scripted_says_what_to_do() -> None:
    cached = Dense(Placement.MANAGED_CACHING, CacheConfig())
    tables = [torchrec.EmbeddingBagConfig(9, 4, name="t", storage=cached, optimizer=SGD(0.1))]
    with pytest.raises(TypeError, match="quantise all tables"):
        scripted(torchrec.EmbeddingBagCollection(tables=tables))
    both, _ = torchrec.shard_quant_model(
        nn.Sequential(quantised((SUM, SUM), {})), world_size=2, compute_device="cpu"
    )
    with pytest.raises(TypeError, match="not a ShardedQuantEmbeddingBagCollection on 2"):
        scripted(both)
