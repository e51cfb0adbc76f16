"""Tables with fused optimizers refuse gradients that a `torch.amp.GradScaler` has scaled."""

import copy
import gc
import pickle
import subprocess
import sys
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


class OwnScaler(GradScaler):
    """Scales without anything of its base class."""

    def scale(self, outputs: Any) -> Any:
        self._scale = torch.tensor(8.0)
        return outputs * self._scale


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
    class PlainScaler(GradScaler):
        pass

    module = MODULES["plain"]()
    module(*BATCH).sum().backward()
    scaler = PlainScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(module(*BATCH).sum()).backward()


def test_a_scaler_that_scales_in_its_own_way_is_seen() -> None:
    module, scaler = MODULES["plain"](), OwnScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(module(*BATCH).sum()).backward()


def test_a_scaler_that_the_collector_leaves_out_is_seen() -> None:
    module, scaler = MODULES["plain"](), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    gc.freeze()
    try:
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.scale(module(*BATCH).sum()).backward()
    finally:
        gc.unfreeze()


def test_a_scaler_after_a_warm_up_that_imported_it_is_seen() -> None:
    module = MODULES["plain"]()

    def warm_up() -> None:
        from torch.amp import GradScaler  # noqa: F401

        module(*BATCH).sum().backward()

    warm_up()
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(module(*BATCH).sum()).backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("kind", [GradScaler, OwnScaler])
def test_copies_of_scalers_are_scalers_of_their_own(
    kind: type[GradScaler], duplicate: Callable[[Any], Any]
) -> None:
    module, scaler = MODULES["plain"](), kind("cpu")
    GradScaler.scale(scaler, torch.ones(()))
    other = duplicate(scaler)
    del scaler
    module(*BATCH).sum().backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        other.scale(module(*BATCH).sum()).backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["plain", "tt"])
def test_a_compiled_graph_refuses_as_well(kind: str, backend: str) -> None:
    torch._dynamo.reset()
    module = MODULES[kind]()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(*BATCH).sum().backward()
    before = weights_of(module)
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(compiled(*BATCH).sum()).backward()
    assert all(map(torch.equal, before, weights_of(module)))
    assert module.step == 1
    del scaler
    gc.collect()
    compiled(*BATCH).sum().backward()
    assert module.step == 2
    assert not all(map(torch.equal, before, weights_of(module)))


def test_the_op_of_compiled_graphs() -> None:
    op = torch.ops.emblib_python.one_unless_scaled
    hyper, grad = torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3)
    torch.library.opcheck(op, (hyper, grad))
    assert op(hyper, grad).tolist() == 1.0
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="GradScaler"):
        op(hyper, grad)


def test_scalers_older_than_emblib_and_reloads() -> None:
    """A scaler that has scaled before is seen when it scales again; nothing is wrapped twice."""
    program = """
import importlib
import torch
from torch.amp import GradScaler

class OwnScaler(GradScaler):
    def scale(self, outputs):
        return super().scale(outputs)

older = [GradScaler("cpu"), OwnScaler("cpu")]
for scaler in older:
    scaler.scale(torch.ones(()))
import emblib
from emblib.ops import scaled_gradients

def refused(scaler):
    module = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(10, 8)], emblib.optim.SGD(0.1))
    loss = scaler.scale(module(torch.tensor([1, 2]), torch.tensor([0, 2])).sum())
    try:
        loss.backward()
    except RuntimeError as error:
        return "GradScaler" in str(error)
    return False

assert refused(older.pop())
assert refused(older.pop())
wrapped = GradScaler.__init__, GradScaler.scale
again = GradScaler("cpu")
again.scale(torch.ones(()))
importlib.reload(scaled_gradients)
assert (GradScaler.__init__, GradScaler.scale) == wrapped
assert refused(again)
del again, scaler
assert not refused(GradScaler("cpu", enabled=False))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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
