"""What every op does before it looks at its arguments: storages, and memory that there is not."""

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import emblib
from emblib import optim
from emblib.columns import Hyper
from emblib.ops.codes import OPTIMIZER, POOLING
from experiments.measure.process import is_out_of_memory
from tests.fuzz.calls import CALLS

ops = torch.ops.emblib


def _resized(tensor: Tensor, nbytes: int) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _places(arguments: tuple[Any, ...]) -> list[tuple[int, int | None]]:
    """Every tensor with elements: the argument, and where in a list of tensors it is."""
    found: list[tuple[int, int | None]] = []
    for at, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and argument.numel():
            found.append((at, None))
        if isinstance(argument, list):
            lists = [k for k, a in enumerate(argument) if isinstance(a, Tensor) and a.numel()]
            found += [(at, k) for k in lists]
    return found


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_storage_that_was_given_back_is_refused(op: str) -> None:
    arguments = CALLS[op](random.Random(3)).arguments
    for at, k in _places(arguments):
        tensor = arguments[at] if k is None else arguments[at][k]
        for kept in range(min(2, tensor.nbytes)):
            changed = list(arguments)
            if k is None:
                changed[at] = _resized(changed[at], kept)
            else:
                changed[at] = list(changed[at])
                changed[at][k] = _resized(changed[at][k], kept)
            message = rf"{op}: argument {at} of the schema needs \d+ bytes, but its storage has"
            with pytest.raises(RuntimeError, match=message):
                getattr(ops, op)(*changed)


@pytest.mark.parametrize("position", range(6))
def test_storages_of_an_optional_list_are_checked(position: int) -> None:
    """The list `located` is a grouping and the cache slots of its rows."""
    features = torch.tensor([[0, 0, 10, 4, 0, 0, 0, 0]])
    batch = (torch.tensor([1, 2, 2]), torch.tensor([0, 3]))
    groups = ops.tbe_group(features, *batch, None, 10)
    located = [*groups, torch.full((3,), -1, dtype=torch.int32)]
    located[position] = _resized(located[position], 0)
    weights, hyper = torch.zeros(40), torch.zeros(5, dtype=torch.float64)
    arguments = ([weights], [], hyper, OPTIMIZER["sgd"], torch.ones(1, 4), features, *batch, None)
    with pytest.raises(RuntimeError, match=r"tbe_backward_: argument 13 .* resized or freed"):
        ops.tbe_backward_(*arguments, POOLING["sum"], 10, False, None, located)
    assert hyper[Hyper.STEP] == 0


# A time, which may be negative, and a number that -1 turns off.
MAY_BE_NEGATIVE = {("hash_expire_", "before"), ("tt_lookup_checked_", "num_saved")}


@pytest.mark.parametrize("op", sorted(CALLS))
def test_negative_sizes_are_refused_before_memory_is_allocated(op: str) -> None:
    schema = getattr(ops, op).default._schema
    sizes = set(re.findall(r"SymInt (\w+)", str(schema)))
    places = [
        at
        for at, argument in enumerate(schema.arguments)
        if argument.name in sizes and (op, argument.name) not in MAY_BE_NEGATIVE
    ]
    for number in range(12 if places else 0):
        arguments = CALLS[op](random.Random(number)).arguments
        for at in (at for at in places if at < len(arguments)):
            changed = [*arguments[:at], -1, *arguments[at + 1 :]]
            with pytest.raises(RuntimeError) as error:
                getattr(ops, op)(*changed)
            assert "allocate" not in str(error.value)


def test_views_are_refused_by_what_they_reach() -> None:
    base = torch.arange(10, dtype=torch.int64)
    view, reversed_view = base[8:], base.view(5, 2)[:, 1]
    base.untyped_storage().resize_(9 * 8)
    for keys in (view, reversed_view):
        with pytest.raises(RuntimeError, match="its storage has 72"):
            ops.group(keys, 10)
    assert ops.group(base[:9], 10)[3].item() == 9


def test_a_module_whose_weights_were_given_back() -> None:
    module = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(1000, 8)], optim.SGD(0.1))
    batch = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    out = module(*batch)
    nbytes = module.weights.untyped_storage().nbytes()
    module.weights.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"tbe_lookup\w*: argument 0 .* resized or freed"):
        module(*batch)
    with pytest.raises(
        RuntimeError, match=r"tbe_(update|backward)_: argument 0 .* resized or freed"
    ):
        out.sum().backward()
    module.weights.untyped_storage().resize_(nbytes)
    with torch.no_grad():
        module.weights.zero_()
    assert not module(*batch).any()


def test_memory_that_there_is_not() -> None:
    features = torch.tensor([[0, 0, 0, 2**45, 0, 0, 0, 0]])  # no rows
    lookups = (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]))
    rest = (None, None, None, POOLING["sum"], 2**45, torch.float32)
    with pytest.raises(RuntimeError, match=r"tbe_lookup: can't allocate .*1, 35184372088832") as e:
        ops.tbe_lookup([torch.zeros(4)], features, *lookups, *rest)
    assert is_out_of_memory(e.value)
    assert "API call failed" not in str(e.value)
    one_row = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 0, 0]])
    with pytest.raises(RuntimeError, match="can't allocate") as e:
        ops.tt_rows(
            [torch.ones(1, 2), torch.ones(1, 2)],
            ops.tt_plan(torch.zeros(1, dtype=torch.int64), torch.ones(1).int(), one_row, 1, 1),
            [1, 1],
            [1, 1],
            [2],
            2**50,
        )
    assert is_out_of_memory(e.value)


def test_harness_knows_the_words_of_a_gpu() -> None:
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("tbe_lookup: indices must be int32 or int64"))
