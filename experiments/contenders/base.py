"""The one face of everything that is measured, and the small task description it is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    "State",
    "Task",
    "Unsupported",
    "build",
    "expect_tables",
    "fill_",
    "first_update",
    "pool_rows",
    "split_gradient",
    "touched",
]

State = list[Tensor]


@dataclass(frozen=True)
class Task:
    """What a contender is built for."""

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
    """Built with a Task; `prepare` lays a batch out as the contender likes it, never timed.

    Its name, label and other facts are in contenders.yaml.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The batch on the device in this contender's own layout; given to forward and step."""

    @abstractmethod
    def forward(self, prepared: Any) -> Tensor:
        """[B, sum D], without recording gradients."""

    @abstractmethod
    def step(self, prepared: Any) -> None:
        """Forward, backward from the batch's gradient, update."""

    def parts(self, prepared: Any) -> dict[str, Callable[[], object]]:
        """Parts of a step on this batch that can be done again by themselves.

        Every rank makes this call and those that it returns; what a part needs is computed here.
        """
        return {}

    def visit(self, prepared: Any) -> None:
        """A batch of a trace, of which only what a cache does with it matters; never timed."""
        self.forward(prepared)

    def counters(self) -> dict[str, int]:
        """What a cache counted since `reset_counters`; empty without a cache."""
        return {}

    def reset_counters(self) -> None:  # noqa: B027 most contenders have none
        """Count from zero."""

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """{"weights": ..., "optimizer_state": ...} in bytes, and "cache" where there may be one."""

    @abstractmethod
    def observe(self, batch: Batch) -> State:
        """Copies of the parameters that `batch` touches."""

    @abstractmethod
    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """By plain PyTorch: the output, and `observe` after one step from fresh optimizer state."""


def build(name: str, task: Task) -> Contender:
    """Make the contender; raises Unsupported with the reason where it cannot do the task."""
    contender: Contender = find(name).load()(task)
    return contender


def touched(batch: Batch, task: Task) -> list[Tensor]:
    """Distinct ids of each feature, ascending."""
    return [batch.feature(f)[0].unique() for f in range(len(task.shapes))]


def split_gradient(batch: Batch, shapes: Sequence[TableShape]) -> list[Tensor]:
    """The gradient's columns, one [B, D] per feature."""
    return list(batch.gradient.split([s.dim for s in shapes], dim=1))


def pool_rows(rows: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Sum rows[positions] bag by bag: [bags, D]."""
    bags = offsets.numel() - 1
    bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())
    return torch.zeros(bags, rows.size(1)).index_add(0, bag, rows[positions])


def first_update(kind: Optimizer, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """`weights` after one update from zero optimizer state; eps as in torch.optim's defaults."""
    eps = 1e-8
    if kind is Optimizer.sgd:
        return weights - lr * gradient
    square = gradient * gradient
    if kind is Optimizer.rowwise_adagrad:
        square = square.mean(dim=1, keepdim=True)
    return weights - lr * gradient / (square.sqrt() + eps)


def expect_tables(batch: Batch, before: State, task: Task) -> tuple[Tensor, State]:
    """`Contender.expect` for plain tables whose state is the touched rows of each feature."""
    outputs, after = [], []
    gradients = split_gradient(batch, task.shapes)
    for f, (ids, rows) in enumerate(zip(touched(batch, task), before, strict=True)):
        indices, offsets = batch.feature(f)
        leaf = rows.clone().requires_grad_()
        pooled = pool_rows(leaf, torch.searchsorted(ids, indices), offsets)
        (gradient,) = torch.autograd.grad(pooled, leaf, gradients[f])
        outputs.append(pooled.detach())
        after.append(first_update(task.optimizer, rows, gradient, task.lr))
    return torch.cat(outputs, dim=1), after


def fill_(weights: Tensor, seed: int) -> Tensor:
    """Write every element with repeated noise, at memory speed; untouched pages read too fast."""
    flat = weights.view(-1)
    size = min(1 << 20, flat.numel())
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.rand(size, generator=generator) * 0.02 - 0.01).to(flat)
    whole = flat.numel() // size * size
    with torch.no_grad():
        flat[:whole].view(-1, size).copy_(noise.expand(whole // size, size))
        flat[whole:] = noise[: flat.numel() - whole]
    return weights
