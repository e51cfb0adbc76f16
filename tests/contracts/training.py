"""What users do in training loops: rows of docs/contracts.md on updates, autograd and wrappers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from emblib import KeyedJaggedTensor, optim
from emblib.collections.optimizers import FusedOptimizer
from emblib.columns import Hyper
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
    if not s.kind.shares_parameters:
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


@operation("Training", "`p.register_hook`")
def _hook(s: Subject) -> None:
    check_hook(s, lambda p, run: p.register_hook(run))


@operation("Training", "`p.register_hook` (deferred)")
def _hook_deferred(s: Subject) -> None:
    check_hook(deferring(s)[0], lambda p, run: p.register_hook(run))


@operation("Training", "`p.register_post_accumulate_grad_hook`")
def _post_hook(s: Subject) -> None:
    check_hook(s, lambda p, run: p.register_post_accumulate_grad_hook(run))


@operation("Training", "`p.register_post_accumulate_grad_hook` (deferred)")
def _post_hook_deferred(s: Subject) -> None:
    check_hook(deferring(s)[0], lambda p, run: p.register_post_accumulate_grad_hook(run))


def check_hook(s: Subject, register: Callable[[nn.Parameter, Any], Any]) -> None:
    """Register a hook on a parameter; backward must call it."""
    trained(s)
    calls = []
    register(next(iter(parameters(s).values())), lambda x: calls.append(1))
    s.step()
    assert calls, "the hook was not called"


@operation("Training", "`param_groups[i]['lr'] = x`")
def _rate(s: Subject) -> None:
    trained(s)
    optimizer = FusedOptimizer.of(s.module)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    before = s.rows()
    s.step()
    same(s.rows(), before, "the rate has no effect")


@operation("Training", "any order of `backward`, `step`, `zero_grad` and `scheduler.step`")
def _orders(s: Subject) -> None:
    trained(s)
    optimizer = FusedOptimizer.of(s.module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    before = s.rows()
    s.step()  # without a step or zero_grad after the scheduler
    same(s.rows(), before, "the rate of the scheduler comes later")


@operation("Training", "`OneCycleLR`, `CyclicLR` with `cycle_momentum`")
def _cycles(s: Subject) -> None:
    trained(s)
    s = s.other(optim.Adam(0.5))
    optimizer = FusedOptimizer.of(s.module)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 10, max_momentum=0.75)
    shown = {group["betas"][0] for group in optimizer.param_groups}
    twin = s.other(optim.Adam(optimizer.param_groups[0]["lr"], (0.75, 0.999)))
    for _ in range(2):
        s.step()
        twin.step()
    assert shown == {0.75}, "the group has another beta"
    same(s.rows(), twin.rows(), "updates use another beta or rate")


def check_entry(s: Subject, entry: dict[str, Any], optimizer: optim.Optimizer) -> None:
    """Write an entry to the groups of SGD; updates must be those of `optimizer`."""
    trained(s)
    twin = s.other(optimizer)
    for group in FusedOptimizer.of(s.module).param_groups:
        group.update(entry)
    s.step()
    twin.step()
    same(s.rows(), twin.rows(), "the entry has no effect", 1e-5)


@operation("Training", "`param_groups[i]['weight_decay'] = x`")
def _decay(s: Subject) -> None:
    check_entry(s, {"weight_decay": 0.25}, optim.SGD(0.5, weight_decay=optim.L2(0.25)))


@operation("Training", "`param_groups[i]['maximize'] = True`")
def _maximize(s: Subject) -> None:
    check_entry(s, {"maximize": True}, optim.SGD(0.5, maximize=True))
    before = s.rows()
    s.step()
    if not s.kind.shares_parameters:
        same(s.rows() - before, torch.full_like(before, 0.5), "the loss does not rise")


@operation("Training", "`param_groups[i]` with `nesterov`, `amsgrad`, `lr_decay`, `momentum`, ...")
def _no_effect(s: Subject) -> None:
    check_entry(s, {"momentum": 0.5}, optim.SGD(0.5, weight_decay=optim.L2(0.5)))


@operation("Training", "`param_groups` show what the module sets or loads")
def _shown(s: Subject) -> None:
    trained(s)
    optimizer = FusedOptimizer.of(s.module)
    other = FusedOptimizer.of(s.module)
    for group in other.param_groups:
        group["lr"] = 0.125
    rates = [group["lr"] for group in optimizer.param_groups]
    assert set(rates) == {0.125}, f"{rates} are shown"


@operation("Training", "`copy.deepcopy`, `pickle` of module and optimizer together")
def _copied_optimizer(s: Subject) -> None:
    trained(s)
    module, optimizer = copy.deepcopy((s.module, FusedOptimizer.of(s.module)))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    twin = s.of(module)
    before = twin.rows()
    twin.step()
    same(twin.rows(), before, "the copy of the optimizer does not act on the copy of the tables")
    s.step()
    assert not torch.equal(s.rows(), before), "the copy acts on the original"


@operation("Training", "state dict of `torch.optim.Adam`: moments go on")
def _torch_states(s: Subject) -> None:
    trained(s)
    s = s.other(optim.Adam(0.5))
    weights = [nn.Parameter(p.detach().clone()) for p in parameters(s).values()]
    theirs = torch.optim.Adam(weights, lr=0.25)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    theirs.step()
    optimizer = FusedOptimizer.of(s.module)
    optimizer.load_state_dict(theirs.state_dict())
    states = [v for v in optimizer.state_dict()["state"].values() if "exp_avg" in v]
    assert len(states) == len(weights), "the moments are not loaded"
    numbers = [v["hyper"] for v in states]
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in numbers]
    assert all(float(n[Hyper.STEP]) == 1.0 for n in whole), "the step is not loaded"
    assert optimizer.param_groups[0]["lr"] == 0.25, "the rate is not loaded"


@operation("Training", "a penalty on the weights in the loss")
def _penalty(s: Subject) -> None:
    trained(s)
    check_penalty(s, FusedOptimizer.of(s.module))


@operation("Training", "a penalty on the weights in the loss (deferred)")
def _penalty_deferred(s: Subject) -> None:
    check_penalty(*deferring(s))


def check_penalty(s: Subject, optimizer: FusedOptimizer) -> None:
    """Add the squares of all weights to a loss; a step with SGD must halve them."""
    before = {name: p.detach().clone() for name, p in parameters(s).items()}
    loss = s.call().sum() * 0
    for parameter in s.parameters().values():
        loss = loss + 0.5 * parameter.square().sum()
    loss.backward()
    optimizer.step()
    for name, parameter in s.parameters().items():
        same(parameter.detach(), before[name] / 2, "the penalty has no effect", 1e-5)


@operation("Training", "`optimizer.add_param_group`")
def _add_group(s: Subject) -> None:
    trained(s)
    layer = nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    optimizer = FusedOptimizer.of(s.module)
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.5})
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before), "the new group is not stepped"


@operation("Training", "hooks before and after `optimizer.step()`")
def _step_hooks(s: Subject) -> None:
    trained(s)
    calls: list[str] = []
    optimizer = FusedOptimizer.of(s.module)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"], f"{calls} were called"


@operation("Training", "`ReduceLROnPlateau`, `SequentialLR`")
def _schedulers(s: Subject) -> None:
    trained(s)
    optimizer = FusedOptimizer.of(s.module)
    schedulers = torch.optim.lr_scheduler
    plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    rates = [schedulers.ConstantLR(optimizer, 0.5, 1), schedulers.ExponentialLR(optimizer, 0.5)]
    schedulers.SequentialLR(optimizer, rates, [1])
    for _ in range(2):
        s.step()
        optimizer.step()
        plateau.step(1.0)
    optimizer.step()
    before = s.rows()
    s.step()
    rate = float(optimizer.param_groups[0]["lr"])
    assert rate < 0.5, "no scheduler acted"
    if not s.kind.shares_parameters:
        same(before - s.rows(), torch.full_like(before, rate), "another rate than in the group")


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


@operation("Wrappers", "`torch.compile` (deferred)")
def _compile_deferred(s: Subject) -> None:
    later, optimizer = deferring(s)
    torch._dynamo.reset()
    twin = later.other()
    twin_optimizer = FusedOptimizer.of(twin.module)
    compiled = torch.compile(later.module, backend="aot_eager")
    for _ in range(2):
        for ids in IDS.chunk(2):
            later.call(ids, compiled).square().sum().backward()
            twin.call(ids).square().sum().backward()
        for one in (optimizer, twin_optimizer):
            one.step()
            one.zero_grad()
    assert torch.equal(later.rows(), twin.rows()), "another update"


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialise a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Over(nn.Module):
    """A dense layer over a subject."""

    def __init__(self, s: Subject) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.s, self.tables, self.layer = s, s.module, nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.s.call(ids, self.tables))


def same_training(s: Subject, wrap: Callable[[Over], Any]) -> None:
    """Train wrapped and plain; both must have the same rows."""
    trained(s)
    twin = Over(s.other())
    with one_rank():
        wrapped = wrap(Over(s))
        for _ in range(2):
            wrapped(IDS).square().sum().backward()
            twin(IDS).square().sum().backward()
        same(s.of(wrapped_tables(wrapped)).rows(), twin.s.rows(), "another update", 1e-5)


def wrapped_tables(wrapped: Any) -> nn.Module:
    tables: nn.Module = getattr(wrapped, "module", wrapped).tables
    return tables


@operation("Wrappers", "`DistributedDataParallel` around the model, on one rank")
def _ddp(s: Subject) -> None:
    same_training(s, DistributedDataParallel)


@operation("Wrappers", "`fully_shard(model)`, on one rank")
def _fully_shard(s: Subject) -> None:
    same_training(s, fully_shard)


@operation("Wrappers", "`fully_shard(model, ignored_params=...)` of tables, on one rank")
def _fully_shard_ignored(s: Subject) -> None:
    same_training(
        s, lambda model: fully_shard(model, ignored_params=set(model.tables.parameters()))
    )


@operation("Wrappers", "`torch.jit.trace`")
def _trace(s: Subject) -> None:
    if s.kind.is_collection:
        raise NotApplicable("its inputs are not tensors")
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
