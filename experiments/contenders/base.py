"""The interface of contenders that look up bags, and the task that they are built for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.config.schema import Optimizer
from experiments.contenders.registry import Unsupported as Unsupported
from experiments.workloads.workload import Batch, TableShape

State = list[Tensor]  # the parameters that a batch touches, in an order of the contender's own
EPS = 1e-8  # Adagrad's epsilon, for every contender
GRADIENT_ROUNDING = 1e-6  # error of a gradient of at most order one, summed in another order


@dataclass(frozen=True)
class Task:
    """The tables, optimizer and device that a contender is built for.

    Attributes:
        shapes: rows and columns of each table; a table has one feature.
        optimizer: update rule of the step.
        lr: learning rate.
        device: device of the module and of prepared batches.
        rank: rank of tensor trains; 0 for other contenders.
        tt_tables: number of tables, the largest ones, that tensor trains compress.
        row_factors: factors of the rows of a tensor train; () lets emblib choose.
        dim_factors: factors of the columns of a tensor train; () lets emblib choose.
        shrunk: True if the tables have fewer rows than the experiment asks for.
        cache: size of a cache as a fraction of all rows, for contenders with a cache.
        new_keys: share of the lookups of a step that are new keys; 0 for most contenders.
        directory: folder of tables on disk; "" for a temporary one.
    """

    shapes: tuple[TableShape, ...]
    optimizer: Optimizer
    lr: float
    device: torch.device
    rank: int = 0
    tt_tables: int = 0
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()
    shrunk: bool = False
    cache: float = 0.2
    new_keys: float = 0.0
    directory: str = ""


class Contender(ABC):
    """An implementation that is measured, built for a Task. `forward` and `step` are timed.

    Its name, label and other facts are in contenders.yaml. `prepare` and `expect` suit modules that
    take feature-major ids and hold plain tables; other contenders override them. An override has a
    docstring only where its contract differs from that of the method here. Over ranks, `prepare`,
    `forward` and `step` take this rank's batch, and methods may be collectives.

    Attributes:
        id_type: dtype of the ids and offsets that `prepare` of this class returns.
    """

    id_type = torch.int64

    def __init__(self, task: Task) -> None:
        self.task = task

    def prepare(self, batch: Batch) -> Any:
        """Return a batch on the device, in the form that `forward` and `step` take.

        Here that is (ids, offsets, gradient of the output).
        """
        device = self.task.device
        ids, offsets = (
            tensor.to(device, self.id_type) for tensor in (batch.indices, batch.offsets)
        )
        return ids, offsets, batch.gradient.to(device)

    @abstractmethod
    def forward(self, prepared: Any) -> Tensor:
        """Return the pooled rows, float32 [B, sum D] on the device, without recording gradients.

        Columns are in the order of the task's tables, or in another one that `expect` uses too.
        """

    @abstractmethod
    def step(self, prepared: Any) -> None:
        """Run forward, backward from the batch's gradient, and the update of the parameters.

        On a GPU the work may be left on the current stream.
        """

    def parts(self, prepared: Any) -> dict[str, Callable[[], object]]:
        """Return the parts of a step that can be timed separately, {name: call}; {} without any.

        Every rank calls this method, and each part in the same order. Inputs of the parts are
        computed here, outside the timing. A part may change the parameters.
        """
        return {}

    def visit(self, prepared: Any) -> None:
        """Run a batch of a trace through the cache, for `counters`; not timed."""
        self.forward(prepared)

    def counters(self) -> dict[str, int]:
        """Return the cache's counts since `reset_counters`; {} without a cache.

        Keys are lookups, lookup_hits, rows (distinct per batch), row_hits, and a contender's own.
        """
        return {}

    def reset_counters(self) -> None:  # noqa: B027 most contenders have none
        """Set the counters to zero; the content of the cache stays."""

    def flops(self, batch: Batch) -> dict[str, float]:
        """Return the floating-point operations of each of PHASES; {} if they are not counted."""
        return {}

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of "weights" and "optimizer_state", and of "cache" if there is one.

        Gradients do not count.
        """

    @abstractmethod
    def observe(self, batch: Batch) -> State:
        """Return copies on the host of the parameters that `batch` touches, as `expect` takes them.

        Over ranks every rank passes the same batch.
        """

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain PyTorch the output [B, sum D] and `observe` after one step.

        Args:
            batch: batch of the step.
            before: result of `observe` before the step; here the touched rows of each table. The
                optimizer state must be zero.
        """
        outputs, expected_state = [], []
        gradients = split_gradient(batch, self.task.shapes)
        for table, (ids, rows) in enumerate(
            zip(touched_ids(batch, self.task), before, strict=True)
        ):
            indices, offsets = batch.feature(table)
            leaf = rows.clone().requires_grad_()
            output = pool_rows(leaf, torch.searchsorted(ids, indices), offsets)
            (gradient,) = torch.autograd.grad(output, leaf, gradients[table])
            outputs.append(output.detach())
            expected_state.append(first_update(self.task.optimizer, rows, gradient, self.task.lr))
        return torch.cat(outputs, dim=1), expected_state


class OneModule(Contender):
    """A contender with one module for all features, whose backward updates the rows.

    Attributes:
        module: the module; called with ids [L] and offsets [F*B + 1] it returns [B, sum D].
    """

    module: Any

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.module = self._module()

    @abstractmethod
    def _module(self) -> Any:
        """Build the module on the task's device."""

    def forward(self, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, offsets, _ = prepared
        with torch.no_grad():
            return self.module(ids, offsets)

    def step(self, prepared: tuple[Tensor, Tensor, Tensor]) -> None:
        ids, offsets, gradient = prepared
        self.module(ids, offsets).backward(gradient)


def touched_ids(batch: Batch, task: Task) -> list[Tensor]:
    """Return the distinct ids of each feature, ascending, int64 [ids of the feature]."""
    return [batch.feature(table)[0].unique() for table in range(len(task.shapes))]


def read_rows(weights: Iterable[Tensor], batch: Batch, task: Task) -> State:
    """Copy the rows that `batch` touches to the host, [rows, D] per table.

    `weights` are the tables, [E, D] each, on any device.
    """
    ids = touched_ids(batch, task)
    return [
        table_weights.detach()[table_ids.to(table_weights.device)].cpu()
        for table_weights, table_ids in zip(weights, ids, strict=True)
    ]


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of the tensors in the states of torch.optim, one state per parameter.

    0-dimensional tensors, the counters of steps, do not count.
    """
    values = (value for state in states for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim() > 0)


def split_gradient(batch: Batch, shapes: Sequence[TableShape]) -> list[Tensor]:
    """Split the gradient's columns into one [B, D] per feature; these are views."""
    return list(batch.gradient.split([shape.dim for shape in shapes], dim=1))


def join_columns(outputs: Sequence[Tensor]) -> Tensor:
    """Return the outputs [B, D] of all features as [B, sum D]; a single one is not copied."""
    return outputs[0] if len(outputs) == 1 else torch.cat(tuple(outputs), dim=1)


def pool_rows(rows: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Sum rows[positions] bag by bag: float32 [bags, D].

    All tensors are on the host: rows float32 [rows, D], positions int64 [L], offsets int64
    [bags + 1].
    """
    num_bags = offsets.numel() - 1
    bag_of_lookup = torch.repeat_interleave(torch.arange(num_bags), offsets.diff())
    return torch.zeros(num_bags, rows.size(1)).index_add(0, bag_of_lookup, rows[positions])


def first_update(optimizer: Optimizer, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Return `weights` [rows, D] after one update by `gradient`, from zero optimizer state."""
    if optimizer is Optimizer.sgd:
        return weights - lr * gradient
    square = gradient * gradient
    if optimizer is Optimizer.rowwise_adagrad:
        square = square.mean(dim=1, keepdim=True)
    return weights - lr * gradient / (square.sqrt() + EPS)


def update_rounding(optimizer: Optimizer, update: Tensor, lr: float) -> Tensor:
    """Return the error that rounding a gradient can cause in each element of a first update.

    Element-wise Adagrad divides a gradient g by |g| + EPS. If |g| is as small as the error of its
    rounding, any result from -lr to lr is possible. For other optimizers, and for elements without
    a gradient, the result is zero: the relative tolerance of the comparison covers rounding.

    `update` is float32 of any shape, and so is the result.
    """
    if optimizer is not Optimizer.adagrad:
        return torch.zeros_like(update)
    # |update| = lr g / (g + EPS), so g + EPS = lr EPS / (lr - |update|).
    divisor = lr * EPS / (lr - update.abs()).clamp(min=1e-9 * lr)
    smallest_gradient = divisor - EPS - GRADIENT_ROUNDING
    change = lr * EPS * GRADIENT_ROUNDING / (smallest_gradient.clamp(min=0.0) + EPS).square()
    return torch.where(smallest_gradient > 0, change, 2 * lr).masked_fill(update == 0, 0.0)


def fill_(weights: Tensor, seed: int) -> Tensor:
    """Fill `weights`, contiguous and not empty, with repeated noise in [-0.01, 0.01]; return it.

    Filling runs at memory speed. Reading pages that were never written would be faster than reading
    a real table.
    """
    flat = weights.view(-1)
    noise_size = min(1 << 20, flat.numel())
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.rand(noise_size, generator=generator) * 0.02 - 0.01).to(flat)
    end = flat.numel() // noise_size * noise_size
    with torch.no_grad():
        flat[:end].view(-1, noise_size).copy_(noise.expand(end // noise_size, noise_size))
        flat[end:] = noise[: flat.numel() - end]
    return weights
