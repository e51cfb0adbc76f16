"""Tables with fused optimizers refuse gradients that a `torch.amp.GradScaler` has scaled."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

from emblib import (
    DynamicEmbeddingBags,
    DynamicSpec,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
)

BATCH = (torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]))
SGD = optim.SGD(0.1)
MODULES: dict[str, Callable[[], Any]] = {
    "plain": lambda: TableBatchedEmbeddingBags([TableSpec(10, 8)], SGD),
    "tt": lambda: TTEmbeddingBag(TTSpec(100, 8, (2,)), SGD),
    "dynamic": lambda: DynamicEmbeddingBags([DynamicSpec(32, 8)], SGD),
}


@pytest.fixture(autouse=True)
def _no_scaler_of_other_tests() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


def weights_of(module: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", list(MODULES))
def test_scaled_gradients_are_refused_before_anything_is_written(kind: str) -> None:
    module, scaler = MODULES[kind](), GradScaler("cpu")
    loss = module(*BATCH).sum()
    before = weights_of(module)
    with pytest.raises(RuntimeError, match=r"GradScaler.*bfloat16.*External"):
        scaler.scale(loss).backward()
    assert all(map(torch.equal, before, weights_of(module)))
    assert module.step == 0


def test_a_scaler_after_one_that_is_gone_is_seen() -> None:
    module = MODULES["plain"]()
    for _ in range(3):
        module(*BATCH).sum().backward()
        scaler = GradScaler("cpu")
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.scale(module(*BATCH).sum()).backward()
        del scaler
        gc.collect()
    assert module.step == 3


def test_a_scaler_of_a_class_of_its_own_is_seen() -> None:
    class OwnScaler(GradScaler):
        pass

    module = MODULES["plain"]()
    module(*BATCH).sum().backward()
    scaler = OwnScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(module(*BATCH).sum()).backward()


def test_scalers_that_scale_nothing_do_not_matter() -> None:
    module = MODULES["plain"]()
    disabled, unused = GradScaler("cpu", enabled=False), GradScaler("cpu")
    disabled.scale(module(*BATCH).sum()).backward()
    assert module.step == 1
    assert unused.is_enabled()


def test_an_optimizer_of_torch_that_the_scaler_steps_trains_external_tables() -> None:
    table = TableBatchedEmbeddingBags(
        [TableSpec(10, 8)], optim.External(gradient=optim.Gradient.DENSE)
    )
    peer = torch.nn.EmbeddingBag.from_pretrained(
        table.weights.detach().clone(), mode="sum", freeze=False
    )
    for module in (table, peer):
        scaler = GradScaler("cpu")
        sgd = torch.optim.SGD(module.parameters(), 0.1)
        offsets = BATCH[1] if module is table else BATCH[1][:-1]
        scaler.scale(module(BATCH[0], offsets).square().sum()).backward()
        scaler.step(sgd)
        scaler.update()
    torch.testing.assert_close(table.weights, peer.weight)
