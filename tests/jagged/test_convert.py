"""From and to torch.nested, and objects that only behave like ours."""

import warnings
from typing import Any

import pytest
import torch

from emblib import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.jagged.cases import Features, held, made

ROWS = [[1, 2], [], [3, 4, 5]]


def nested(rows: list[list[int]]) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def test_nested_and_back() -> None:
    given = nested(ROWS)
    jagged = JaggedTensor.from_nested(given, given * 10)
    assert [bag.tolist() for bag in jagged.validate().to_dense()] == ROWS
    assert jagged.values().data_ptr() == given.values().data_ptr()
    assert torch.equal(jagged.weights(), jagged.values() * 10)
    back = jagged.to_nested()
    assert back.layout is torch.jagged
    assert [row.tolist() for row in back.unbind()] == ROWS
    assert back.values().data_ptr() == given.values().data_ptr()


def test_views_of_nested_tensors_have_holes() -> None:
    padded = torch.arange(12).view(3, 4)
    given = torch.nested.narrow(
        padded, 1, torch.tensor([1, 0, 2]), torch.tensor([2, 0, 2]), layout=torch.jagged
    )
    jagged = JaggedTensor.from_nested(given).validate()
    assert [bag.tolist() for bag in jagged.to_dense()] == [[1, 2], [], [10, 11]]


def test_nested_rows_of_numbers() -> None:
    rows = [torch.randn(2, 3), torch.randn(1, 3)]
    jagged = JaggedTensor.from_nested(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert all(map(torch.equal, jagged.to_dense(), rows))
    assert jagged.to_nested().shape[2] == 3


def test_nested_by_feature() -> None:
    batch = KeyedJaggedTensor.from_nested({"a": nested(ROWS), "b": nested([[], [6], [7]])})
    assert held(batch) == {"a": ROWS, "b": [[], [6], [7]]}
    back = batch.to_nested()
    assert [row.tolist() for row in back["b"].unbind()] == [[], [6], [7]]


def test_other_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got a tensor of layout torch\.strided"):
        JaggedTensor.from_nested(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"must be nested, .* got a list:"):
        JaggedTensor.from_nested([torch.zeros(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells to use the other layout
        strided = torch.nested.nested_tensor([torch.zeros(1)], layout=torch.strided)
    with pytest.raises(TypeError, match=r"got a nested tensor of layout torch\.strided"):
        JaggedTensor.from_nested(strided)
    with pytest.raises(ValueError, match="have the lengths of the values"):
        JaggedTensor.from_nested(nested(ROWS), nested([[1], [2, 3, 4], [5]]))
    turned = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="in dimension 1, got dimension 2"):
        JaggedTensor.from_nested(turned)


class Lookalike:
    """Has the accessors it is given, as methods."""

    def __init__(self, **accessors: Any) -> None:
        for name, value in accessors.items():
            setattr(self, name, lambda value=value: value)


def test_whatever_has_the_accessors() -> None:
    bags: Features = {"a": ROWS, "b": [[6], [], []]}
    mine = made(bags, weighted=True)
    names = ("keys", "values", "lengths", "weights_or_none")
    other = Lookalike(**{name: getattr(mine, name)() for name in names})
    assert held(KeyedJaggedTensor.adopt(other)) == bags
    assert KeyedJaggedTensor.adopt(mine) is mine
    varied = made({"a": ROWS, "b": [[6]]})
    names = ("keys", "values", "lengths", "variable_stride_per_key", "stride_per_key")
    other = Lookalike(**{name: getattr(varied, name)() for name in names})
    assert KeyedJaggedTensor.adopt(other).stride_per_key() == [3, 1]
    one = JaggedTensor.adopt(Lookalike(values=torch.arange(3), lengths=torch.tensor([1, 2])))
    assert [bag.tolist() for bag in one.to_dense()] == [[0], [1, 2]]
    tensor = KeyedTensor.adopt(Lookalike(keys=["a"], length_per_key=[2], values=torch.zeros(1, 2)))
    assert tensor["a"].shape == (1, 2)
    with pytest.raises(TypeError, match=r"Tensor has no keys\(\), lengths\(\)"):
        KeyedJaggedTensor.adopt(torch.zeros(3))
    with pytest.raises(TypeError, match=r"int has no values\(\), lengths\(\)"):
        JaggedTensor.adopt(3)


def test_other_classes_with_the_constructor() -> None:
    mine = made({"a": ROWS, "b": [[6]]}, weighted=True)
    assert held(mine.as_type(KeyedJaggedTensor)) == held(mine)
    plain = made({"a": ROWS})
    assert plain.as_type(KeyedJaggedTensor).stride() == 3
    assert plain["a"].as_type(JaggedTensor).values().data_ptr() == plain.values().data_ptr()
    tensor = KeyedTensor(["a"], [2], torch.zeros(2, 1), key_dim=0)
    assert tensor.as_type(KeyedTensor).key_dim() == 0
