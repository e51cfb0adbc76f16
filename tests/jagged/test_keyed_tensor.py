"""Pooled embeddings by key, and their pieces in other orders."""

import pytest
import torch

from emblib import KeyedTensor, KTRegroupAsDict


def example() -> tuple[KeyedTensor, KeyedTensor]:
    one = KeyedTensor(["a", "b", "c"], [2, 1, 3], torch.arange(12.0).view(2, 6))
    two = KeyedTensor(("d",), (2,), -torch.arange(4.0).view(2, 2))
    return one.validate(), two.validate()


def test_pieces_by_key() -> None:
    one, _ = example()
    assert one.keys() == ["a", "b", "c"]
    assert (one.length_per_key(), one.offset_per_key(), one.key_dim()) == (
        [2, 1, 3],
        [0, 2, 3, 6],
        1,
    )
    assert one.index_per_key() == {"a": 0, "b": 1, "c": 2}
    assert one["b"].tolist() == [[2], [8]]
    every = one.to_dict()
    assert list(every) == ["a", "b", "c"]
    assert all(torch.equal(one[key], piece) for key, piece in every.items())
    assert one["c"].untyped_storage().data_ptr() == one.values().untyped_storage().data_ptr()
    assert one.size_in_bytes() == 48
    assert KeyedTensor([], [], torch.zeros(2, 0)).to_dict() == {}
    with pytest.raises(KeyError, match=r"no key 'z'; there are \['a', 'b', 'c'\]"):
        one["z"]


def test_lists_of_tensors_and_other_dimensions() -> None:
    pieces = [torch.randn(2, 3), torch.randn(4, 3)]
    down = KeyedTensor.from_tensor_list(["x", "y"], pieces, key_dim=0, cat_dim=0)
    assert down.length_per_key() == [2, 4]
    assert torch.equal(down["y"], pieces[1])
    (both,) = KeyedTensor.regroup([down], [["y", "x"]])
    assert torch.equal(both, torch.cat(pieces[::-1]))


@pytest.mark.parametrize(
    "groups", [[["a", "b", "c", "d"]], [["c", "a"], ["d"]], [["a", "d"], ["a"], []], []]
)
def test_regroup(groups: list[list[str]]) -> None:
    tensors = example()
    every = tensors[0].to_dict() | tensors[1].to_dict()
    found = KeyedTensor.regroup(tensors, groups)
    names = [str(i) for i in range(len(groups))]
    assert list(KeyedTensor.regroup_as_dict(tensors, groups, names)) == names
    for group, tensor in zip(groups, found, strict=True):
        want = [every[key] for key in group]
        assert torch.equal(tensor, torch.cat(want, 1) if want else torch.zeros(2, 0))
    module = KTRegroupAsDict(groups, names)(tensors)
    assert list(module) == names
    assert all(map(torch.equal, module.values(), found))


def test_regroup_is_differentiable() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    tensor = KeyedTensor(["a", "b"], [1, 2], values)
    first, second = KeyedTensor.regroup([tensor], [["b", "a"], ["b"]])
    (first.sum() + 2 * second.sum()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 3, 3]] * 2


def test_moves() -> None:
    one, _ = example()
    meta = one.to("meta")
    assert meta.device().type == "meta"
    assert meta.keys() == one.keys()


def test_wrong_ones_are_refused() -> None:
    one, two = example()
    with pytest.raises(ValueError, match="one entry a key = 1, got 2"):
        KeyedTensor(["a"], [1, 2], torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"size of dimension 1 = 3, got \[2\]"):
        KeyedTensor(["a"], [2], torch.zeros(1, 3)).validate()
    with pytest.raises(ValueError, match="keys must differ"):
        KeyedTensor(["a", "a"], [1, 1], torch.zeros(1, 2)).validate()
    with pytest.raises(KeyError, match="no key 'z'; there are"):
        KeyedTensor.regroup([one, two], [["z"]])
    with pytest.raises(ValueError, match=r"several have \['a'\]"):
        KeyedTensor.regroup([one, one], [["a"]])
    with pytest.raises(ValueError, match="same key_dim, got 0"):
        KeyedTensor.regroup([], [["a"]])
    with pytest.raises(ValueError, match="name every group = 1, got 2"):
        KTRegroupAsDict([["a"]], ["x", "y"])


def test_says_what_it_holds() -> None:
    _, two = example()
    assert repr(two) == "KeyedTensor({'d': 2}, [2, 2] torch.float32, cpu)"
    assert '"d": tensor(' in str(two)
