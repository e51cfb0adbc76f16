"""The jagged types against TorchRec's own: the same methods, the same results."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emblib import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.compat.peer import peer_module
from tests.jagged.cases import Features, features, made

peer_module("fbgemm_gpu")
theirs: Any = peer_module("torchrec.sparse.jagged_tensor")

# TorchRec's own cannot be permuted or moved to a dictionary without bags.
BATCHES = st.one_of(features(), features(varied=True)).filter(lambda f: all(f.values()))


def equal(mine: Any, other: Any) -> None:
    """Two answers: tensors, jagged tensors, dictionaries and lists of them, or numbers."""
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    elif isinstance(mine, JaggedTensor | KeyedJaggedTensor):
        for name in ("values", "lengths", "offsets", "weights_or_none"):
            equal(getattr(mine, name)(), getattr(other, name)())
        if isinstance(mine, KeyedJaggedTensor):
            for name in NUMBERS:
                assert getattr(mine, name)() == getattr(other, name)(), name
    elif isinstance(mine, KeyedTensor):
        equal(mine.to_dict(), other.to_dict())
    elif isinstance(mine, dict):
        assert list(mine) == list(other)
        for key, value in mine.items():
            equal(value, other[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            equal(one, two)
    else:
        assert mine == other


NUMBERS = (
    *("keys", "stride", "stride_per_key", "stride_per_key_per_rank", "variable_stride_per_key"),
    *("length_per_key", "offset_per_key", "lengths_offset_per_key"),
)


@given(BATCHES, st.booleans(), st.sampled_from([torch.int32, torch.int64]), st.data())
@settings(max_examples=50, deadline=None)
def test_keyed_jagged_tensors(
    bags: Features, weighted: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    mine = made(bags, dtype, weighted=weighted)
    other = mine.as_type(theirs.KeyedJaggedTensor)
    equal(mine, other)
    equal(KeyedJaggedTensor.adopt(other), other)
    equal(mine.to_dict(), other.to_dict())
    key = data.draw(st.sampled_from(list(bags)))
    equal(mine[key], other[key])
    cut = data.draw(st.integers(0, len(bags)))
    if mine.variable_stride_per_key():
        cut = max(1, min(cut, len(bags) - 1))  # its stride of no features is another matter
    first, second = mine.split([cut, len(bags) - cut]), other.split([cut, len(bags) - cut])
    for part, their_part in zip(first, second, strict=True):
        if part.keys():
            equal(part.to_dict(), their_part.to_dict())
    order = data.draw(st.permutations(range(len(bags))))
    taken, their_taken = mine.permute(order), other.permute(order)
    equal(taken.to_dict(), their_taken.to_dict())
    equal(taken.keys(), their_taken.keys())
    equal(taken.length_per_key(), their_taken.length_per_key())
    equal(
        KeyedJaggedTensor.from_jt_dict(mine.to_dict()),
        theirs.KeyedJaggedTensor.from_jt_dict(other.to_dict()),
    )
    if not mine.variable_stride_per_key():  # TorchRec keeps strides in a tensor, which counts
        assert mine.sync().size_in_bytes() == other.sync().size_in_bytes()


def test_concat_and_merged_examples() -> None:
    one, two = made({"a": [[1], [2, 3]]}, weighted=True), made({"b": [[], [4]]}, weighted=True)
    kind = theirs.KeyedJaggedTensor
    equal(
        KeyedJaggedTensor.concat([one, two]),
        kind.concat([one.as_type(kind), two.as_type(kind)]),
    )
    inverse = (["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]]))
    arguments = {
        "keys": ["a", "b"],
        "values": torch.arange(3),
        "lengths": torch.ones(3, dtype=torch.int64),
        "inverse_indices": inverse,
    }
    mine = KeyedJaggedTensor(**arguments, stride_per_key_per_rank=[[1, 1], [0, 1]])
    other = kind(**arguments, stride_per_key_per_rank=torch.tensor([[1, 1], [0, 1]]))
    equal(mine, other)
    equal(mine.as_type(kind).inverse_indices(), other.inverse_indices())
    equal(KeyedJaggedTensor.adopt(other), mine)
    equal(KeyedJaggedTensor.adopt(other).inverse_indices(), other.inverse_indices())


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_jagged_tensors(bags: list[list[int]], width: int) -> None:
    rows = [torch.tensor(bag, dtype=torch.float32) for bag in bags]
    weights = [row + 1 for row in rows]
    mine = JaggedTensor.from_dense(rows, weights)
    other = theirs.JaggedTensor.from_dense(rows, weights)
    equal(mine, other)
    equal(JaggedTensor.adopt(other), other)
    equal(mine.to_dense(), other.to_dense())
    equal(mine.to_dense_weights(), other.to_dense_weights())
    for size in (None, width):
        equal(mine.to_padded_dense(size, -1.0), other.to_padded_dense(size, -1.0))
        equal(mine.to_padded_dense_weights(size), other.to_padded_dense_weights(size))
    padded, lengths = mine.to_padded_dense(), mine.lengths()
    equal(
        JaggedTensor.from_dense_lengths(padded, lengths),
        theirs.JaggedTensor.from_dense_lengths(padded, lengths),
    )
    assert mine.size_in_bytes() == other.size_in_bytes()


@pytest.mark.parametrize("groups", [[["a", "d"], ["c", "b"]], [["d"], ["a", "d"]]])
def test_keyed_tensors(groups: list[list[str]]) -> None:
    mine = [
        KeyedTensor(["a", "b", "c"], [2, 1, 3], torch.randn(4, 6)),
        KeyedTensor.from_tensor_list(["d"], [torch.randn(4, 2)]),
    ]
    others = [tensor.as_type(theirs.KeyedTensor) for tensor in mine]
    equal(mine, others)
    equal([KeyedTensor.adopt(other) for other in others], others)
    assert mine[0].offset_per_key() == others[0].offset_per_key()
    equal(mine[0]["b"], others[0]["b"])
    equal(KeyedTensor.regroup(mine, groups), theirs.KeyedTensor.regroup(others, groups))
    equal(
        KeyedTensor.regroup_as_dict(mine, groups, ["x", "y"]),
        theirs.KeyedTensor.regroup_as_dict(others, groups, ["x", "y"]),
    )


def test_a_dictionary_does_not_outlive_a_move() -> None:
    """TorchRec hands out the old device's tensors after `to`; here they follow."""
    mine = made({"a": [[1], [2]]})
    mine.to_dict()
    assert mine.to("meta").to_dict()["a"].values().device.type == "meta"
