"""Tables that backward updates, under a `torch.amp.GradScaler`."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from emblib import (
    DynamicEmbeddingBags,
    DynamicSpec,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.collections.optimizers import FusedOptimizer
from tests.conftest import needs_python_headers

BATCH = (torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]))
MAKERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "plain": lambda optimizer: TableBatchedEmbeddingBags([TableSpec(10, 8)], optimizer),
    "tt": lambda optimizer: TTEmbeddingBag(TTSpec(100, 8, (2,)), optimizer),
    "dynamic": lambda optimizer: DynamicEmbeddingBags([DynamicSpec(32, 8)], optimizer, seed=1),
}
MODULES = {kind: partial(make, optim.Adam(0.1)) for kind, make in MAKERS.items()}


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


class HidingScaler(GradScaler):
    """Has its scale where no other code finds it."""

    def scale(self, outputs: Any) -> Any:
        return outputs * 8.0


def weights_of(module: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def trained(kind: str, scaler: GradScaler | None, overflows: Collection[int] = ()) -> Any:
    """Return a module after four steps; with a scaler, those in `overflows` are not finite."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    optimizer = FusedOptimizer.of(module)
    for step in range(4):
        loss = module(*BATCH).square().sum()
        if scaler is None:
            if step not in overflows:
                loss.backward()
            continue
        scaler.scale(loss * torch.inf if step in overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return module


def assert_close(module: Any, other: Any) -> None:
    assert module.step == other.step
    torch.testing.assert_close(weights_of(module), weights_of(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("overflows", [(), (0,), (1, 2)])
@pytest.mark.parametrize("kind", list(MODULES))
def test_updates_divide_by_the_scale_and_skip_overflows(
    kind: str, overflows: tuple[int, ...]
) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    assert_close(trained(kind, scaler, overflows), trained(kind, None, overflows))
    assert scaler.get_scale() == 1024.0 / 2 ** len(overflows)


@pytest.mark.parametrize("kind", list(MODULES))
def test_an_overflow_changes_nothing(kind: str) -> None:
    module, scaler = MODULES[kind](), GradScaler("cpu")
    module(*BATCH).sum().backward()  # the keys of a dynamic table are there
    state = copy.deepcopy(module.state_dict())
    loss = module(*BATCH).sum() * torch.nan
    scaler.scale(loss).backward()
    changed = module.state_dict()
    for name in ("clock", "table_0.stamps"):  # of the forward
        state.pop(name, None)
        changed.pop(name, None)
    torch.testing.assert_close(changed, state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["plain", "dynamic"])
def test_gradients_of_sample_weights_stay_scaled(kind: str) -> None:
    """The scaler divides them by its scale itself."""
    grads = []
    for scaler in (None, GradScaler("cpu", init_scale=64.0)):
        torch.manual_seed(0)
        module, weights = MODULES[kind](), torch.ones(5, requires_grad=True)
        loss = module(*BATCH, weights).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[0] * 64.0, grads[1])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", list(MODULES))
def test_max_gradient_bounds_the_unscaled_gradient(kind: str, deferred: bool) -> None:
    optimizer = optim.SGD(0.1, max_gradient=0.01, deferred=deferred)
    modules = []
    for scaler in (GradScaler("cpu", enabled=False), GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(0)
        module = MAKERS[kind](optimizer)
        scaler.scale(module(*BATCH).sum()).backward()
        scaler.step(FusedOptimizer.of(module))
        scaler.update()
        modules.append(module)
    assert_close(*modules)


@pytest.mark.parametrize("training", ["backward", "deferred", "frozen"])
@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("kind", list(MODULES))
def test_max_gradient_bounds_gradients_of_sample_weights(
    kind: str, scale: float | None, training: str
) -> None:
    optimizer = optim.SGD(0.1, max_gradient=0.25, deferred=training == "deferred")
    module, weights = MAKERS[kind](optimizer), torch.ones(5, requires_grad=True)
    module(*BATCH)  # the keys of a dynamic table are there
    rows = module(BATCH[0], torch.arange(6)).detach().clone()
    if training == "frozen":
        module.requires_grad_(False)
    loss = module(*BATCH, weights).sum()
    (loss if scale is None else GradScaler("cpu", init_scale=scale).scale(loss)).backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, 0.25 * (scale or 1.0) * rows.sum(1))


def test_scalers_of_several_losses() -> None:
    """Each backward is divided by the scale of its own loss."""
    modules, plain = [], []
    scalers = [GradScaler("cpu", init_scale=2.0**i) for i in (3, 6)]
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(MODULES["plain"]())
        plain.append(copy.deepcopy(modules[-1]))
    losses = [
        scaler.scale(module(*BATCH).square().sum())
        for scaler, module in zip(scalers, modules, strict=True)
    ]
    for loss in reversed(losses):
        loss.backward()
    for scaler in scalers:
        scaler.update(new_scale=1.0)
    for module, other in zip(modules, plain, strict=True):
        other(*BATCH).square().sum().backward()
        assert_close(module, other)


def test_an_unscaled_loss_after_update() -> None:
    module, scaler = MODULES["plain"](), GradScaler("cpu")
    other = copy.deepcopy(module)
    scaler.scale(torch.ones((), requires_grad=True))
    with pytest.raises(RuntimeError, match="did not begin at a loss"):
        module(*BATCH).sum().backward()
    assert module.step == 0
    scaler.update(new_scale=2.0)
    for one in (module, other):
        one(*BATCH).sum().backward()
    assert_close(module, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    module, scaler = MODULES["plain"](), GradScaler("cpu", init_scale=8.0)
    other = copy.deepcopy(module)
    layer = torch.nn.Linear(8, 1)

    def run(one: Any, anchor: Tensor) -> Tensor:
        return layer(one(*BATCH) + 0 * anchor)

    anchor = torch.zeros((), requires_grad=True)
    loss = scaler.scale(checkpoint(run, module, anchor, use_reentrant=use_reentrant).sum())
    if use_reentrant:  # a backward within a backward
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss.backward()
        return
    loss.backward()
    scaler.update(new_scale=1.0)
    run(other, anchor).sum().backward()
    assert_close(module, other)


@pytest.mark.parametrize("frozen_scaler", ["collected", "kept"])
def test_a_scaler_that_is_no_longer_used_does_not_matter(frozen_scaler: str) -> None:
    module = MODULES["plain"]()
    scaler: GradScaler | None = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    if frozen_scaler == "collected":
        scaler = None
        gc.collect()
    else:
        scaler.update(new_scale=1.0)
    module(*BATCH).sum().backward()
    assert module.step == 1


def test_a_scaler_of_a_subclass_scales() -> None:
    class PlainScaler(GradScaler):
        pass

    scaler = PlainScaler("cpu", init_scale=16.0)
    assert_close(trained("plain", scaler), trained("plain", None))


@pytest.mark.parametrize("kind", list(MODULES))
def test_a_scaler_that_scales_in_its_own_way(kind: str) -> None:
    module, scaler = MODULES[kind](), OwnScaler("cpu")
    other = copy.deepcopy(module)
    scaler.scale(module(*BATCH).sum()).backward()
    del scaler
    gc.collect()
    other(*BATCH).sum().backward()
    assert_close(module, other)


def test_a_scaler_whose_scale_is_unknown_is_refused() -> None:
    module, scaler = MODULES["plain"](), HidingScaler("cpu")
    before = weights_of(module)
    with pytest.raises(RuntimeError, match="keeps its scale elsewhere"):
        scaler.scale(module(*BATCH).sum()).backward()
    assert all(map(torch.equal, before, weights_of(module)))
    assert module.step == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_scalers_are_scalers_of_their_own(duplicate: Callable[[Any], Any]) -> None:
    scaler = GradScaler("cpu", init_scale=32.0)
    scaler.scale(torch.ones(()))
    other = duplicate(scaler)
    del scaler
    assert_close(trained("plain", other), trained("plain", None))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("plain", "eager"),
        pytest.param("plain", "inductor", marks=needs_python_headers),
        ("tt", "aot_eager"),
    ],
)
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
    scaler, leaf = GradScaler("cpu"), torch.ones((), requires_grad=True)
    leaf.register_hook(lambda grad: (op(hyper, grad), grad)[1])
    leaf.sum().backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale(leaf.sum()).backward()


def test_scalers_older_than_emblib_and_reloads() -> None:
    """A scaler made before emblib was imported is known; nothing is wrapped twice."""
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

def step_by(scaler):
    # how far a row moves at gradient 1
    module = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(10, 8)], emblib.optim.SGD(0.5))
    before = module.weights[8].item()
    loss = scaler.scale(module(torch.tensor([1, 2]), torch.tensor([0, 2])).sum())
    loss.backward()
    scaler.update(new_scale=4.0)
    return before - module.weights[8].item()

def right(scaler):
    return abs(step_by(scaler) - 0.5) < 1e-6

assert right(older.pop())
assert right(older.pop())
wrapped = GradScaler.__init__, GradScaler.scale
again = GradScaler("cpu")
again.scale(torch.ones(()))
importlib.reload(scaled_gradients)
assert (GradScaler.__init__, GradScaler.scale) == wrapped
assert right(again)
del again, scaler
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
