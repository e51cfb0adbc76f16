"""Batches without padding ids: what padding_idx of nn.EmbeddingBag means, MEAN included."""

from typing import Any

import pytest
import torch

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, Pooling, optim
from emblib.jagged import drop_padding, drop_padding_from_bags

IDS = torch.tensor([4, 0, 2, 0, 0, 0, 3, 1])
OFFSETS = torch.tensor([0, 3, 3, 5, 8])


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bags_and_gradients_are_those_of_torch(
    pooling: Pooling, weighted: bool, dtype: torch.dtype
) -> None:
    if weighted and pooling is Pooling.MEAN:
        pytest.skip("nn.EmbeddingBag takes weights for sums only")
    theirs = torch.nn.EmbeddingBag(
        6, 3, mode=pooling.value, padding_idx=0, include_last_offset=True
    )
    ours = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(6, 3)], optim.SGD(0.5), pooling=pooling
    )
    ours.table_weights()[0].copy_(theirs.weight.detach())
    weights = torch.rand(8) if weighted else None
    want = theirs(IDS, OFFSETS, weights)
    ids, offsets, kept = drop_padding_from_bags(IDS.to(dtype), OFFSETS.to(dtype), 0, weights)
    assert (ids.dtype, offsets.dtype) == (dtype, dtype)
    got = ours(ids, offsets, kept)
    torch.testing.assert_close(got, want)
    step = torch.optim.SGD(theirs.parameters(), 0.5)
    for out in (got, want):
        (out * torch.arange(12.0).view(4, 3)).sum().backward()
    step.step()
    torch.testing.assert_close(ours.table_weights()[0], theirs.weight.detach())


def test_a_skipped_id_counts_in_mean_and_a_dropped_one_does_not() -> None:
    table = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(6, 3)], pooling=Pooling.MEAN)
    ids, offsets = torch.tensor([2, -1]), torch.tensor([0, 2])
    row = table.table_weights()[0][2]
    with torch.no_grad():
        torch.testing.assert_close(table(ids, offsets)[0], row / 2)
        torch.testing.assert_close(table(*drop_padding_from_bags(ids, offsets)[:2])[0], row)


def keyed(**options: Any) -> KeyedJaggedTensor:
    values = torch.tensor([0, 5, 0, 0, 2, 7])
    return KeyedJaggedTensor(["a", "b"], values, torch.arange(6.0), **options)


def test_a_keyed_batch_drops_by_key() -> None:
    batch = keyed(lengths=torch.tensor([2, 1, 0, 3]))
    dropped = drop_padding(batch, {"b": 0})
    assert dropped.lengths().tolist() == [2, 1, 0, 2]
    assert dropped.values().tolist() == [0, 5, 0, 2, 7]
    assert dropped.weights().tolist() == [0, 1, 2, 4, 5]
    everywhere = drop_padding(batch, 0)
    assert everywhere.lengths().tolist() == [1, 0, 0, 2]
    assert drop_padding(batch).values() is not batch.values()
    assert drop_padding(batch).lengths().tolist() == batch.lengths().tolist()
    with pytest.raises(KeyError, match="c"):
        drop_padding(batch, {"c": 0})


def test_a_batch_of_unequal_strides_keeps_them() -> None:
    batch = keyed(
        lengths=torch.tensor([2, 0, 1, 3]),
        stride_per_key_per_rank=[[3], [1]],
        inverse_indices=(["a", "b"], torch.zeros(2, 3, dtype=torch.int64)),
    )
    dropped = drop_padding(batch, 0)
    assert dropped.stride_per_key() == [3, 1]
    assert dropped.lengths().tolist() == [1, 0, 0, 2]
    assert dropped.inverse_indices()[0] == ["a", "b"]
    strides: Any = {"stride": 7, "stride_per_key_per_rank": [[3], [1]]}
    assert drop_padding(keyed(lengths=torch.tensor([2, 0, 1, 3]), **strides), 0).stride() == 7


def test_a_collection_over_dropped_batches_means_over_what_is_left() -> None:
    config = EmbeddingBagConfig(9, 4, "t", ["a", "b"], pooling=Pooling.MEAN)
    collection = EmbeddingBagCollection([config])
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 5, 0, 2]), lengths=torch.tensor([2, 2]))
    rows = collection.embedding_bags["t"].weight.detach()
    out = collection(drop_padding(batch, 0)).values().detach()
    torch.testing.assert_close(out[0], torch.cat([rows[5], rows[2]]))


def test_an_empty_batch() -> None:
    none = torch.empty(0, dtype=torch.int64)
    ids, offsets, _ = drop_padding_from_bags(none, torch.tensor([0, 0]))
    assert ids.numel() == 0
    assert offsets.tolist() == [0, 0]
