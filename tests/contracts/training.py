"""What users do in training loops: rows of docs/contracts.md on updates, autograd and wrappers."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from emblib import KeyedJaggedTensor, optim
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import clip_grad_norm_
from tests.contracts.operations import NotApplicable, flush, operation, parameters, same, trained
from tests.contracts.subjects import IDS, Subject

# Training


def deferring(
    s: Subject, optimizer: optim.Optimizer | None = None
) -> tuple[Subject, FusedOptimizer]:
    """Return an equal subject with deferred updates, and their optimizer."""
    trained(s)
    later = s.other(optimizer or optim.SGD(0.5, deferred=True))
    return later, FusedOptimizer.of(later.module)


@operation("Training", "`backward()` updates the rows of the batch only")
def _backward(s: Subject) -> None:
    trained(s)
    before = s.rows()
    s.step(IDS[:3])
    moved = s.rows() - before
    if s.name != "tensor train":  # whose rows share cores
        same(moved[:3], torch.full_like(moved[:3], -0.5), "a wrong update")
        same(moved[3:], torch.zeros_like(moved[3:]), "other rows changed")


@operation("Training", "`optimizer.step()` and `zero_grad()` (deferred)")
def _step(s: Subject) -> None:
    later, optimizer = deferring(s)
    before = later.rows()
    later.step()
    same(later.rows(), before, "rows changed before the step")
    optimizer.step()
    optimizer.zero_grad()
    s.step()
    same(later.rows(), s.rows(), "another update than in backward", 1e-5)
    after = later.rows()
    optimizer.step()
    same(later.rows(), after, "a step without gradients changed rows")


@operation("Training", "gradient accumulation (deferred)")
def _accumulate(s: Subject) -> None:
    later, optimizer = deferring(s)
    twin = later.other()
    for ids in IDS.chunk(4):
        later.call(ids).square().sum().backward()
    optimizer.step()
    twin.call().square().sum().backward()
    FusedOptimizer.of(twin.module).step()
    same(later.rows(), twin.rows(), "not the update of the whole batch", 1e-4)


@operation("Training", "two lookups in one loss, `retain_graph` (deferred)")
def _two(s: Subject) -> None:
    later, optimizer = deferring(s)
    twin = later.other()
    (later.call().sum() + later.call().sum()).backward()
    optimizer.step()
    loss = twin.call().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    FusedOptimizer.of(twin.module).step()
    same(later.rows(), twin.rows(), "gradients do not add up", 1e-5)


@operation("Training", "closures (deferred)")
def _closure(s: Subject) -> None:
    later, optimizer = deferring(s)
    before = later.rows()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = later.call().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None, "the loss is not returned"
    assert not torch.equal(later.rows(), before), "no update"


@operation("Training", "`clip_grad_norm_` (deferred)")
def _clip(s: Subject) -> None:
    later, optimizer = deferring(s)
    before = later.rows()
    later.step()
    clip_grad_norm_(later.module, 1e-6)
    optimizer.step()
    same(later.rows(), before, "not clipped", 1e-4)


@operation("Training", "`torch.nn.utils.clip_grad_norm_` (deferred)")
def _clip_torch(s: Subject) -> None:
    later, optimizer = deferring(s)
    before = later.rows()
    later.step()
    nn.utils.clip_grad_norm_(later.module.parameters(), 1e-6)
    optimizer.step()
    same(later.rows(), before, "not clipped", 1e-4)


def scaled(s: Subject, overflow: float = 1.0) -> tuple[Subject, Tensor]:
    twin = s.other()
    scaler, optimizer = GradScaler("cpu", init_scale=1024.0), FusedOptimizer.of(s.module)
    before = s.rows()
    scaler.scale(s.call().sum() * overflow).backward()
    scaler.step(optimizer)
    scaler.update()
    return twin, before


@operation("Training", "`GradScaler`")
def _scaler(s: Subject) -> None:
    trained(s)
    twin, _ = scaled(s)
    twin.step()
    same(s.rows(), twin.rows(), "the update is not unscaled", 1e-5)


@operation("Training", "`GradScaler` skips an overflow")
def _overflow(s: Subject) -> None:
    trained(s)
    _, before = scaled(s, float("inf"))
    same(s.rows(), before, "an overflow was applied")


@operation("Training", "`GradScaler` (deferred)")
def _scaler_deferred(s: Subject) -> None:
    later, _ = deferring(s)
    twin, _ = scaled(later)
    twin.step()
    FusedOptimizer.of(twin.module).step()
    same(later.rows(), twin.rows(), "the update is not unscaled", 1e-5)


@operation("Training", "learning-rate schedulers")
def _scheduler(s: Subject) -> None:
    trained(s)
    optimizer = FusedOptimizer.of(s.module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
    s.step()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    before = s.rows()
    s.step()
    same(s.rows(), before, "the rate of the scheduler has no effect")


@operation("Training", "a torch optimizer over `parameters()` changes nothing a second time")
def _double(s: Subject) -> None:
    trained(s)
    twin = s.other()
    outer = torch.optim.SGD(list(parameters(s).values()), lr=0.5)
    s.step()
    outer.step()
    twin.step()
    same(s.rows(), twin.rows(), "the update was made twice", 1e-6)


@operation("Training", "EMA and SWA: `AveragedModel`")
def _averaged(s: Subject) -> None:
    trained(s)
    average = AveragedModel(s.module, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    s.step()
    flush(s)
    average.update_parameters(s.module)
    s.step()
    flush(s)
    average.update_parameters(s.module)
    same(s.of(average.module).rows(), s.rows(), "the average misses the updates")


@operation("Training", "optimizer state dict round trip")
def _optimizer_state(s: Subject) -> None:
    trained(s)
    s, other = (s.other(optim.Adam(0.1)) for _ in range(2))
    s.step()
    flush(s)
    other.module.load_state_dict(copy.deepcopy(s.module.state_dict()))
    state = copy.deepcopy(FusedOptimizer.of(s.module).state_dict())
    FusedOptimizer.of(other.module).load_state_dict(state)
    s.step()
    other.step()
    same(s.rows(), other.rows(), "training goes on differently", 1e-6)


# Autograd


@operation("Autograd", "`torch.autograd.grad` of the parameters")
def _grad(s: Subject) -> None:
    trained(s)
    before = s.rows()
    values = [p for p in parameters(s).values() if p.requires_grad]
    if not values:
        raise NotImplementedError("parameters do not require gradients")
    found = torch.autograd.grad(s.call().sum(), values, allow_unused=False)
    same(s.rows(), before, "`grad` updated the table")
    assert all(g is not None for g in found), "no gradient"


@operation("Autograd", "second derivatives")
def _second(s: Subject) -> None:
    trained(s)
    anchor = torch.ones((), requires_grad=True)
    (first,) = torch.autograd.grad((s.call() * anchor).square().sum(), anchor, create_graph=True)
    first.backward()
    assert anchor.grad is not None, "no second derivative"


@operation("Autograd", "anomaly mode")
def _anomaly(s: Subject) -> None:
    trained(s)
    before = s.rows()
    with torch.autograd.detect_anomaly(check_nan=True):
        s.step()
    assert not torch.equal(s.rows(), before), "no update"


@operation("Autograd", "activation checkpointing, `use_reentrant=False`")
def _checkpointing(s: Subject) -> None:
    trained(s)
    twin = s.other()
    layer = nn.Linear(4, 1)
    checkpoint(lambda ids: layer(s.call(ids)), IDS, use_reentrant=False).sum().backward()
    layer(twin.call()).sum().backward()
    same(s.rows(), twin.rows(), "another update", 1e-6)


@operation("Autograd", "activation checkpointing, `use_reentrant=True`")
def _reentrant(s: Subject) -> None:
    trained(s)
    twin = s.other()
    layer, anchor = nn.Linear(4, 1), torch.zeros((), requires_grad=True)
    checkpoint(lambda a: layer(s.call() + a), anchor, use_reentrant=True).sum().backward()
    layer(twin.call()).sum().backward()
    same(s.rows(), twin.rows(), "another update", 1e-6)


@operation("Autograd", "`torch.func.functional_call`")
def _functional(s: Subject) -> None:
    zeros = {name: torch.zeros_like(p) for name, p in parameters(s).items()}
    before = s.rows()
    args: Any = (IDS, torch.arange(IDS.numel() + 1))
    if s.kind.is_collection:
        args = (KeyedJaggedTensor(["f"], IDS, lengths=torch.ones_like(IDS)),)
    with torch.no_grad():
        out = torch.func.functional_call(s.module, zeros, args)
    out = out.values() if s.kind.is_collection else out
    same(out, torch.zeros_like(out), "the given values are ignored")
    same(s.rows(), before, "the module changed")


@operation("Autograd", "`FakeTensorMode` forward")
def _fake(s: Subject) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = s.module
        out = s.call(mode.from_tensor(IDS), module)
    assert tuple(out.shape) == (IDS.numel(), 4), f"wrong shape {tuple(out.shape)}"


@operation("Autograd", "`torch.autocast`: outputs keep their dtype")
def _autocast(s: Subject) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = s.call()
    assert out.dtype == torch.float32, f"dtype {out.dtype}"


# Wrappers


@operation("Wrappers", "`torch.compile`")
def _compile(s: Subject) -> None:
    torch._dynamo.reset()
    twin = s.other()
    compiled = torch.compile(s.module, backend="aot_eager")
    for _ in range(2):
        out, expected = s.call(module=compiled), twin.call()
        same(out.detach(), expected.detach(), "other values", 1e-6)
        if s.kind.is_trained:
            out.sum().backward()
            expected.sum().backward()
    same(s.rows(), twin.rows(), "another update", 1e-6)


@operation("Wrappers", "`torch.jit.trace`")
def _trace(s: Subject) -> None:
    if s.kind.is_collection:
        raise NotApplicable("its inputs are no tensors")
    example = (IDS, torch.arange(IDS.numel() + 1))
    with torch.no_grad():
        traced = torch.jit.trace(s.module.eval(), example, check_trace=False)
    ids = IDS.flip(0)
    same(traced(ids, example[1]), s.rows().flip(0), "other values", 1e-6)


@operation("Wrappers", "threads that share the module, as `DataParallel`")
def _threads(s: Subject) -> None:
    outs: list[Tensor] = []
    expected = s.rows()

    def run() -> None:
        with torch.no_grad():
            outs.append(s.call())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 4, "a thread failed"
    for out in outs:
        same(out, expected, "other values", 1e-6)
