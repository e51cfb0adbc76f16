"""The interface of contenders that look up bags, and the task that they are built for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.config.schema import Optimizer
from experiments.contenders.registry import Missing, Unsupported, find
from experiments.workloads.workload import Batch, TableShape

__all__ = [
    "Contender",
    "Missing",
    "OneModule",
    "State",
    "Task",
    "Unsupported",
    "build",
    "fill_",
    "first_update",
    "optimizer_bytes",
    "pool_rows",
    "read_rows",
    "split_gradient",
    "touched",
    "update_rounding",
]

State = list[Tensor]
EPS = 1e-8  # of Adagrad, for every contender
GRADIENT_ROUNDING = 1e-6  # of sums in another order; the gradients of a batch are of order one


@dataclass(frozen=True)
class Task:
    """The tables, optimizer and device that a contender is built for."""

    shapes: tuple[TableShape, ...]
    optimizer: Optimizer
    lr: float
    device: torch.device
    rank: int = 0  # TT only
    tt_tables: int = 0  # how many of the largest tables TT compresses
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()
    shrunk: bool = False  # tables have fewer rows than the experiment asks for
    cache: float = 0.2  # with a cache only: its size as a fraction of all rows
    directory: str = ""  # on disk only: where the tables live; empty: a temporary directory


class Contender(ABC):
    """An implementation that is measured, built for a Task; `prepare` is never timed.

    Its name, label and other facts are in contenders.yaml. `prepare` and `expect` are for modules
    that take feature-major ids and hold plain tables; other contenders override them.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def prepare(self, batch: Batch) -> Any:
        """Lay out a batch on the device for forward and step: ids, offsets, gradient; not timed."""
        device = self.task.device
        return batch.indices.to(device), batch.offsets.to(device), batch.gradient.to(device)

    @abstractmethod
    def forward(self, prepared: Any) -> Tensor:
        """Look up [B, sum D] without recording gradients."""

    @abstractmethod
    def step(self, prepared: Any) -> None:
        """Run forward, backward from the batch's gradient, and update."""

    def parts(self, prepared: Any) -> dict[str, Callable[[], object]]:
        """Return parts of a step on this batch that can be repeated separately.

        Every rank makes this call and those that it returns; what a part needs is computed here.
        """
        return {}

    def visit(self, prepared: Any) -> None:
        """Run a batch of a trace through the cache; never timed."""
        self.forward(prepared)

    def counters(self) -> dict[str, int]:
        """Return what a cache counted since `reset_counters`; empty without a cache."""
        return {}

    def reset_counters(self) -> None:  # noqa: B027 most contenders have none
        """Count from zero."""

    def flops(self, batch: Batch) -> dict[str, float]:
        """Return operations of the products in each phase; empty where rows are only read."""
        return {}

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Return {"weights": ..., "optimizer_state": ...} in bytes, and "cache" if any."""

    @abstractmethod
    def observe(self, batch: Batch) -> State:
        """Return copies of the parameters that `batch` touches."""

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain PyTorch the output, and `observe` after one step from fresh state.

        `before` is what `observe` returned before the step: the touched rows of each table.
        """
        outputs, after = [], []
        gradients = split_gradient(batch, self.task.shapes)
        for f, (ids, rows) in enumerate(zip(touched(batch, self.task), before, strict=True)):
            indices, offsets = batch.feature(f)
            leaf = rows.clone().requires_grad_()
            pooled = pool_rows(leaf, torch.searchsorted(ids, indices), offsets)
            (gradient,) = torch.autograd.grad(pooled, leaf, gradients[f])
            outputs.append(pooled.detach())
            after.append(first_update(self.task.optimizer, rows, gradient, self.task.lr))
        return torch.cat(outputs, dim=1), after


class OneModule(Contender):
    """A module that takes every feature in one call and updates its rows in backward."""

    module: Any

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.module = self._module()

    @abstractmethod
    def _module(self) -> Any:
        """Build the module on the task's device."""

    def forward(self, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Look up with one call."""
        with torch.no_grad():
            output: Tensor = self.module(prepared[0], prepared[1])
        return output

    def step(self, prepared: tuple[Tensor, Tensor, Tensor]) -> None:
        """Run forward and backward(), which updates the rows."""
        self.module(prepared[0], prepared[1]).backward(prepared[2])


def build(name: str, task: Task) -> Contender:
    """Make the contender; raises Unsupported with the reason where it cannot do the task."""
    contender: Contender = find(name).load()(task)
    return contender


def touched(batch: Batch, task: Task) -> list[Tensor]:
    """Return the distinct ids of each feature, ascending."""
    return [batch.feature(f)[0].unique() for f in range(len(task.shapes))]


def read_rows(weights: Iterable[Tensor], batch: Batch, task: Task) -> State:
    """Return copies of the rows that `batch` touches; `weights` are [E, D] per table."""
    ids = touched(batch, task)
    return [w.detach()[i.to(w.device)].cpu() for w, i in zip(weights, ids, strict=True)]


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of tensors in an optimizer's state, without the counters of steps."""
    values = (value for state in states for value in state.values())
    return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim() > 0)


def split_gradient(batch: Batch, shapes: Sequence[TableShape]) -> list[Tensor]:
    """Split the gradient's columns into one [B, D] per feature."""
    return list(batch.gradient.split([s.dim for s in shapes], dim=1))


def pool_rows(rows: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Sum rows[positions] bag by bag: [bags, D]."""
    bags = offsets.numel() - 1
    bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())
    return torch.zeros(bags, rows.size(1)).index_add(0, bag, rows[positions])


def first_update(kind: Optimizer, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Return `weights` after one update from zero optimizer state."""
    if kind is Optimizer.sgd:
        return weights - lr * gradient
    square = gradient * gradient
    if kind is Optimizer.rowwise_adagrad:
        square = square.mean(dim=1, keepdim=True)
    return weights - lr * gradient / (square.sqrt() + EPS)


def update_rounding(kind: Optimizer, update: Tensor, lr: float) -> Tensor:
    """Return how much each element of a first update may change by the rounding of its gradient.

    Adagrad divides an element by its own size, so that one next to zero may become anything from
    -lr to lr. Elsewhere the relative tolerance covers rounding, and this is zero, as it is for
    elements without a gradient.
    """
    if kind is not Optimizer.adagrad:
        return torch.zeros_like(update)
    # |update| = lr g / (g + EPS), so g + EPS = lr EPS / (lr - |update|).
    divisor = lr * EPS / (lr - update.abs()).clamp(min=1e-9 * lr)
    nearest = divisor - EPS - GRADIENT_ROUNDING
    change = lr * EPS * GRADIENT_ROUNDING / (nearest.clamp(min=0.0) + EPS).square()
    return torch.where(nearest > 0, change, 2 * lr).masked_fill(update == 0, 0.0)


def fill_(weights: Tensor, seed: int) -> Tensor:
    """Write every element with repeated noise, at memory speed; untouched pages read too fast."""
    flat = weights.view(-1)
    size = min(1 << 20, flat.numel())
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.rand(size, generator=generator) * 0.02 - 0.01).to(flat)
    end = flat.numel() // size * size
    with torch.no_grad():
        flat[:end].view(-1, size).copy_(noise.expand(end // size, size))
        flat[end:] = noise[: flat.numel() - end]
    return weights
