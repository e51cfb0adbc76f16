"""Conversions of tables: what is overwritten gets no initial values, and rows go in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    optim,
)
from emblib.storage import Dense, Storage, TensorTrain
from tests.conftest import CUDA

ROWS, DIM = 200_000, 4  # three blocks and a part of one
BLOCK = (1 << 16) * DIM * 4
RESULT = ROWS * (DIM + 4)


class LargestTensor(TorchDispatchMode):
    """Record the bytes of the largest tensor that is made inside, views apart."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in inputs:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def collection(storage: Storage, calls: list[int] | None = None) -> EmbeddingBagCollection:
    def zero(weight: Tensor) -> None:
        calls.append(len(weight))  # type: ignore[union-attr]
        weight.zero_()

    init = {} if calls is None else {"init_fn": zero}
    configs = [
        EmbeddingBagConfig(ROWS, DIM, "t", ("f",), storage=storage, **init),
        EmbeddingBagConfig(50, DIM, "u", ("g",), **init),
    ]
    return EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))


@pytest.mark.parametrize("storage", [Dense(), TensorTrain((2, 2))], ids=["dense", "train"])
def test_quantising_a_collection_needs_its_result_and_a_block(storage: Storage) -> None:
    source = collection(storage)
    with LargestTensor() as largest:
        made = source.quantized()
    assert largest.nbytes <= RESULT + 10_000  # both tables are in one module
    want = QuantizedEmbeddingBags.from_float(source.handles()["t"].dense_rows().detach())
    assert torch.equal(made.handles()["t"].views()["packed"], want.table_views()[0]["packed"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: TableBatchedEmbeddingBags([TableSpec(ROWS, DIM)], optim.SGD(0.1)),
        lambda: torch.nn.EmbeddingBag(ROWS, DIM, mode="sum"),
        lambda: TTEmbeddingBag.from_dense(torch.randn(ROWS, DIM), ranks=(2, 2)),
    ],
    ids=["tables", "torch", "train"],
)
def test_quantising_a_module_needs_its_result_and_a_block(make: Callable[[], Any]) -> None:
    source = make()
    with LargestTensor() as largest:
        QuantizedEmbeddingBags.from_float(source)
    assert largest.nbytes <= max(RESULT, BLOCK)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "all tables": lambda c: c.quantized(),
    "one table": lambda c: c.quantized({"t": 4}),
    "other optimizers": lambda c: c.set_optimizers({"t": optim.Adam(0.1)}),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_draw_no_initial_values(name: str) -> None:
    calls: list[int] = []
    source = collection(Dense(), calls)
    with torch.no_grad():
        source.handles()["u"].get_parameter("weight").fill_(3.0)
    made, state = len(calls), torch.get_rng_state()
    converted = CONVERSIONS[name](source) or source
    assert len(calls) == made
    assert torch.equal(torch.get_rng_state(), state)
    rows = converted.handles()["u"].views()
    if "weight" in rows:
        assert (rows["weight"] == 3.0).all()


def test_other_conversions_leave_the_generator_as_it_is() -> None:
    sequences = EmbeddingCollection([EmbeddingConfig(50, 4, "t", ("f",))])
    weight = torch.randn(20, 4)
    state = torch.get_rng_state()
    sequences.quantized()
    TTEmbeddingBag.from_dense(weight, ranks=(2, 2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU")
@pytest.mark.parametrize("weight_device", ["cpu", CUDA])
def test_a_train_of_a_dense_table_leaves_the_generator_of_its_gpu(weight_device: str) -> None:
    weight = torch.randn(20, 4, device=weight_device)
    state = torch.cuda.get_rng_state(CUDA)
    TTEmbeddingBag.from_dense(weight, ranks=(2, 2), device=CUDA)
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
