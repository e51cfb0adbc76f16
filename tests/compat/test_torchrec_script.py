"""Quantised collections in TorchScript: the results of eager code, for batches as they are."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib.compat.torchrec as torchrec
from emblib.jagged import KeyedJaggedTensor, KeyedTensor

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
            return again.split([1, 0, 3])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(Parts())
    features = batch(weighted=True)
    for found, expected in zip(compiled(features), features.split([1, 0, 3]), strict=True):
        assert type(found) is KeyedJaggedTensor
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.weights(), expected.weights())
        assert torch.equal(found.lengths(), expected.lengths())
    assert [part.keys() for part in compiled(features)] == [["x"], [], ["y", "z", "g0"]]


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


def test_what_is_not_scripted_says_what_to_do() -> None:
    plain = quantised((SUM, SUM), {"t0": torch.float32})
    with pytest.raises(TypeError, match="quantise all tables"):
        scripted(Model(plain))
    tables = [torchrec.EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9)]
    ec = torchrec.quantize_inference_model(
        nn.Sequential(torchrec.EmbeddingCollection(tables=tables))
    )
    with pytest.raises(TypeError, match=r"not a QuantEmbeddingCollection: .* torch\.export"):
        scripted(ec)
    both, _ = torchrec.shard_quant_model(
        nn.Sequential(quantised((SUM, SUM), {})), world_size=2, compute_device="cpu"
    )
    with pytest.raises(TypeError, match="not a ShardedQuantEmbeddingBagCollection"):
        scripted(both)
