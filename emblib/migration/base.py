"""`Replaced`: the interface of a swapped module, for `migrate` and for the comparisons in `checks`.

One subclass per kind of module makes the new module and copies values to it and back. A weight that
an optimizer of torch trains is a `TorchWeight`, and the table that replaces it a `MigratedTable`. A
*fused* table takes over the states of the weight, which is removed from the optimizer. The
parameter of any other table replaces the weight in the optimizer.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib import optim
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.specs import format_config

Bags = tuple[Tensor, Tensor]
"""Ids and lengths of the bags of a feature, int64 `[L]` and `[B]`, on one device."""


class NotMigrated(Exception):  # not an error of the caller: `migrate` lists it in its report
    """A module cannot be swapped; the message says why and what to do."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a module in training.

    Attributes:
        rows: bytes of the rows.
        states: bytes of the optimizer states.
        gradient: bytes of the gradient of the rows; 0 if it is sparse or none is stored.
        cache: bytes of a cache in front of the rows.
    """

    rows: int = 0
    states: int = 0
    gradient: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all four."""
        return self.rows + self.states + self.gradient + self.cache

    def __add__(self, other: TrainingMemory) -> TrainingMemory:
        return TrainingMemory(
            self.rows + other.rows,
            self.states + other.states,
            self.gradient + other.gradient,
            self.cache + other.cache,
        )

    def __str__(self) -> str:
        bytes_by_use = {"states": self.states, "gradient": self.gradient, "cache": self.cache}
        other_uses = "".join(
            f" + {format_size(nbytes)} {name}" for name, nbytes in bytes_by_use.items() if nbytes
        )
        return (
            f"{format_size(self.total)} (rows {format_size(self.rows)}{other_uses})"
            if other_uses
            else format_size(self.rows)
        )


def format_size(nbytes: float) -> str:
    """Format a number of bytes with a decimal unit, e.g. "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


@dataclass(frozen=True)
class Trained:
    """Training of a weight by an optimizer of torch: its group, and the states of the weight.

    Attributes:
        optimizer: optimizer of torch that trains the weight.
        group: parameter group with the weight.
        state: states of the weight by name; empty before the first step.
        order: parameters of the group before the migration, for `restore`.
        in_backward: whether torch applies the optimizer in backward, to this weight alone.
    """

    optimizer: TorchOptimizer
    group: dict[str, Any]
    state: dict[str, Any]
    order: list[nn.Parameter]
    in_backward: bool

    @staticmethod
    def of(optimizers: Sequence[TorchOptimizer], weight: nn.Parameter) -> Trained | None:
        """Return how a weight is trained; None if no optimizer has it.

        An optimizer that torch applies in backward is taken before one of `optimizers`.

        Raises:
            NotMigrated: several optimizers or groups train the weight.
        """
        in_backward = list(getattr(weight, "_in_backward_optimizers", ()))
        trained_by = [
            (optimizer, group)
            for optimizer in (*in_backward, *optimizers)
            for group in optimizer.param_groups
            if any(parameter is weight for parameter in group["params"])
        ]
        is_first_in_backward = bool(trained_by) and trained_by[0][0] in in_backward
        if len(in_backward) > 1 or (len(trained_by) > 1 and not is_first_in_backward):
            names = [type(optimizer).__name__ for optimizer, _ in trained_by]
            raise NotMigrated(f"several optimizers train it, {', '.join(names)}: keep one")
        if not trained_by:
            return None
        optimizer, group = trained_by[0]
        state = optimizer.state.get(weight, {})
        return Trained(optimizer, group, state, list(group["params"]), bool(in_backward))

    def replace(self, before: nn.Parameter, after: Sequence[nn.Parameter]) -> None:
        """Replace a parameter of the group by others, and forget its states.

        Nothing happens for an optimizer in backward: it belongs to the parameter.
        """
        if self.in_backward:
            return
        params = self.group["params"]
        position = next(i for i, parameter in enumerate(params) if parameter is before)
        params[position : position + 1] = after
        self.optimizer.state.pop(before, None)

    def restore(self, parameter: nn.Parameter) -> None:
        """Add a removed parameter to the group again, at its position in `order`."""
        if self.in_backward:
            return
        params = [*self.group["params"], parameter]
        position_by_id = {id(member): position for position, member in enumerate(self.order)}
        self.group["params"] = sorted(
            params, key=lambda member: position_by_id.get(id(member), len(position_by_id))
        )

    def make_copy(self, weights: Sequence[nn.Parameter]) -> TorchOptimizer:
        """Return an optimizer of the same kind and settings, without states."""
        settings = {name: value for name, value in self.group.items() if name != "params"}
        optimizer_class: Any = type(self.optimizer)
        optimizer: TorchOptimizer = optimizer_class([{"params": list(weights), **settings}])
        return optimizer


def counterpart(trained: Trained) -> tuple[Optimizer | None, str]:
    """Return the optimizer that makes the same updates in backward, and a note on differences.

    The optimizer is None if there is none, or with a weight decay or `maximize`; the note is ""
    without differences.
    """
    group, optimizer_class = trained.group, type(trained.optimizer)
    if group.get("maximize") or group.get("weight_decay"):
        return None, ""
    lr = float(group["lr"])
    if optimizer_class is torch.optim.SGD and not group["momentum"]:
        return optim.SGD(lr), ""
    if optimizer_class is torch.optim.Adagrad and not group["lr_decay"]:
        return optim.Adagrad(lr, eps=group["eps"]), ""
    is_rowwise = (
        optimizer_class.__module__.startswith("torchrec.")
        and optimizer_class.__name__ == "RowWiseAdagrad"
    )
    if is_rowwise and not group["lr_decay"]:
        return optim.RowwiseAdagrad(lr, eps=group["eps"]), ""
    if optimizer_class is torch.optim.SparseAdam:
        note = "eps is added after the bias correction of the second moment, in SparseAdam before"
        return optim.Adam(lr, betas=tuple(group["betas"]), eps=group["eps"]), note
    return None, ""


def optimizer_for(
    trained: Trained | None, weight: nn.Parameter, table_optimizer: Optimizer | None
) -> tuple[Optimizer | None, str]:
    """Return the optimizer that backward applies to a table, or None, and a note on differences.

    It is `table_optimizer` if that is not None, else the `counterpart` of the optimizer that
    trained the weight. It is None if there is no counterpart, or if `table_optimizer` is None and
    the weight is not trained.

    Raises:
        NotMigrated: torch applies an optimizer in backward that has no counterpart.
    """
    if table_optimizer is not None or trained is None or not weight.requires_grad:
        return table_optimizer, ""
    fused_optimizer, note = counterpart(trained)
    if fused_optimizer is None and trained.in_backward:
        raise NotMigrated(
            f"{type(trained.optimizer).__name__} with its settings is applied in backward and has "
            "no counterpart: pass tables=, e.g. emblib.optim.Adam(lr), which updates the rows of a "
            "batch alone"
        )
    return fused_optimizer, note


@dataclass(frozen=True)
class MigratedTable:
    """A table that replaced a weight.

    Attributes:
        rows: view of the rows, `[rows, dim]`; flat, of all tables, in FBGEMM's dense module.
        states: views of the optimizer states by name, `[rows, dim]` or `[rows]`.
        module: module with the table, which has `optimizer`, `step` and `set_step`.
        parameter: parameter with the memory of the rows.
    """

    rows: Tensor
    states: dict[str, Tensor]
    module: Any
    parameter: nn.Parameter

    @property
    def is_fused(self) -> bool:
        """Return whether backward updates the rows."""
        return autograd.updates_in_backward(self.module.optimizer)

    @property
    def memory(self) -> TrainingMemory:
        """Return the bytes of rows and states of a fused table, which stores no gradient."""
        return TrainingMemory(self.rows.nbytes, sum(state.nbytes for state in self.states.values()))


# State elements per element of a weight, for optimizers that allocate states at their first step;
# those of `_OPTIONAL_STATES` are added.
_STATES_PER_WEIGHT = {
    torch.optim.Adadelta: 2,
    torch.optim.Adam: 2,
    torch.optim.Adamax: 2,
    torch.optim.AdamW: 2,
    torch.optim.ASGD: 1,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.SparseAdam: 2,
}
_OPTIONAL_STATES = ("amsgrad", "centered", "momentum")  # settings that add one state each
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_WITH_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam)


@dataclass(frozen=True)
class TorchWeight:
    """A weight of the old module.

    Attributes:
        weight: the parameter, `[rows, dim]`; flat, of all tables, in FBGEMM's dense module.
        trained: training of the weight; None if no optimizer has it.
        sparse: whether its gradient is sparse.
    """

    weight: nn.Parameter
    trained: Trained | None
    sparse: bool = False

    @property
    def memory(self) -> TrainingMemory:
        """Return the bytes that the weight takes in training, after the first step.

        States with another number of entries than one per element or row do not count. Before the
        first step, only states are known that an optimizer allocates when it is constructed, and
        those of `_STATES_PER_WEIGHT` and `_OPTIONAL_STATES`.
        """
        weight, trained = self.weight, self.trained
        gradient = 0 if self.sparse or not weight.requires_grad else weight.nbytes
        if trained is None:
            return TrainingMemory(weight.nbytes, 0, gradient)
        states = sum(_state_nbytes(value) for value in self._states(trained.state).values())
        if not trained.state and weight.requires_grad:
            num_states = _STATES_PER_WEIGHT.get(type(trained.optimizer), 0)
            num_states += sum(bool(trained.group.get(name)) for name in _OPTIONAL_STATES)
            states = num_states * weight.nbytes
        return TrainingMemory(weight.nbytes, states, gradient)

    def _states(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the states with an entry per element or per row."""
        weight = self.weight
        shapes = (weight.shape, (weight.shape[0], 1), weight.shape[:1])
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape in shapes
        }

    def carry_over(self, table: MigratedTable) -> None:
        """Copy rows, states, step and `requires_grad` into a table; torch's optimizer stays.

        States go only to a fused table, and only if both have one of that name.
        """
        weight, trained = self.weight, self.trained
        table.rows.copy_(weight)
        if not table.is_fused:
            table.parameter.requires_grad_(weight.requires_grad)
            return
        if trained is not None:
            states = self._states(trained.state)
            for name in table.states.keys() & states.keys():
                table.states[name].copy_(_in_shape(states[name], table.states[name].shape))
            table.module.set_step(int(trained.state.get("step", 0)))
        if not weight.requires_grad:
            table.parameter.requires_grad_(False)

    def replace_in_optimizer(self, table: MigratedTable) -> None:
        """Replace the weight in the optimizer's group by the table, unless that is fused."""
        trained = self.trained
        if trained is None:
            return
        trained.replace(self.weight, [] if table.is_fused else [table.parameter])
        if trained.state and not table.is_fused:
            trained.optimizer.state[table.parameter] = trained.state

    def carry_back(self, table: MigratedTable) -> None:
        """Copy rows and states back, and put the weight into the optimizer's group again.

        The group changes last, so that the call can be repeated after an interrupt.
        """
        weight, trained = self.weight, self.trained
        weight.copy_(table.rows)
        if trained is None:
            return
        if table.is_fused:
            state = self.state_of(table)
        else:
            state = trained.optimizer.state.get(table.parameter, {})
        if state:
            trained.optimizer.state[weight] = state
        if any(parameter is weight for parameter in trained.group["params"]):
            return
        if table.is_fused:
            trained.restore(weight)
        else:
            trained.replace(table.parameter, [weight])

    def _common_states(self, table: MigratedTable) -> set[str]:
        """Return the names of states that both a fused table and the optimizer of torch have."""
        assert self.trained is not None
        fused_optimizer = counterpart(self.trained)[0]
        if fused_optimizer is not None:
            names = {state.name for state in fused_optimizer.states}
        elif self.trained.state:
            names = set(self.trained.state)
        else:
            is_adam = type(self.trained.optimizer) in _WITH_MOMENTS
            names = _MOMENTS if is_adam and not self.trained.group.get("amsgrad") else set()
        return names & table.states.keys()

    def state_of(self, table: MigratedTable, rows: Tensor | None = None) -> dict[str, Any]:
        """Return copies of the states, by name, that the optimizer of torch would have now.

        The weight must be trained. `rows`: numbers of the rows whose states are returned, int64
        `[n]`; None for all. States that are not by element or row are copied whole.
        """
        assert self.trained is not None
        state = dict(self.trained.state)
        names = (
            self._common_states(table) if table.is_fused and (state or table.module.step) else set()
        )
        if names:
            is_sparse_adam = type(self.trained.optimizer) is torch.optim.SparseAdam
            step = table.module.step
            state["step"] = step if is_sparse_adam else torch.tensor(float(step), device="cpu")
        for name in names:
            shape = state[name].shape if name in state else self.weight.shape
            state[name] = _in_shape(table.states[name], shape).clone()
        row_states = self._states(state)
        return {
            name: value.index_select(0, rows)
            if rows is not None and name in row_states
            else copy.deepcopy(value)
            for name, value in state.items()
        }


def _state_nbytes(state: Tensor) -> int:
    """Return the bytes of an optimizer state, which is sparse for SGD's momentum of sparse rows."""
    if state.layout is torch.sparse_coo:
        return state._indices().nbytes + state._values().nbytes  # makes no coalesced copy
    return state.nbytes


def _in_shape(state: Tensor, shape: torch.Size) -> Tensor:
    """Return an optimizer state as numbers per row or per element, `[rows]` or `[rows, dim]`.

    The number of a row is the mean of its elements, as optimizers with one per row count it.
    """
    row_values = state.reshape(len(state), math.prod(state.shape[1:]))
    num_columns = math.prod(shape[1:])
    if num_columns < row_values.shape[1]:
        row_values = row_values.mean(1, keepdim=True)
    return row_values.expand(-1, num_columns).reshape(shape)


class Replaced(ABC):
    """A module to swap, or swapped. Constructing it changes neither model nor optimizers.

    Attributes:
        paths: names of the module in the model; several if it occurs several times.
        old: the module of the other library.
        new: the module of emblib that replaces it.
        note: how results may differ; "" if only the order of sums does.
    """

    note = ""

    def __init__(self, paths: Sequence[str], old: Any, new: Any) -> None:
        self.paths, self.old, self.new = tuple(paths), old, new
        new.train(old.training)

    @property
    @abstractmethod
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Return the bytes in training of the old module, after its first step, and of the new."""

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """Return the distinct optimizers that backward applies; empty if it applies none."""

    @property
    def is_fused(self) -> bool:
        """Return whether backward of the new module updates a table."""
        return bool(self.optimizers)

    @property
    def is_trained(self) -> bool:
        """Return whether a training step changes rows of the old module."""
        return self.is_fused

    @property
    def measured_nbytes(self) -> int:
        """Return the bytes that the new module has now, by its `nbytes()`."""
        return sum(self.new.nbytes().values())

    def sizes(self) -> str:
        """Return rows and columns as text, for the report."""
        return str(self.new.extra_repr())

    def describe_training(self) -> str:
        """Describe how the tables are trained, for the report."""
        if not self.is_fused:
            return "its gradient goes to the same optimizer" if self.is_trained else "not trained"
        optimizers = ", ".join(format_config(optimizer) for optimizer in self.optimizers)
        return f"backward applies {optimizers}"

    @abstractmethod
    def carry_over(self) -> None:
        """Copy rows and states into the new module; nothing else changes.

        The caller must disable gradients, here and for `carry_back`.
        """

    def replace_in_optimizers(self) -> None:  # noqa: B027
        """Put the new parameters into the groups of torch's optimizers in place of the old ones.

        The base class does nothing: it suits modules that update their own rows.
        """

    @abstractmethod
    def carry_back(self) -> None:
        """Copy rows and states into the old module, and put its parameters back into the groups."""

    @without_gradients
    def copy_values(self, source: Any, target: Any) -> None:
        """Copy from old to new module, or back, the values that the old one's state dict has.

        The base class copies the rows.
        """
        for rows, values in zip(self.rows(target), self.rows(source), strict=True):
            rows.copy_(values)

    @abstractmethod
    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a copy of the old module with the current rows and states, and its optimizers.

        Args:
            max_rows: approximate number of rows per table; None copies all. FBGEMM's dense module,
                whose states are of all tables, is copied whole.
            seed: seed of the selection of rows.
        """

    @abstractmethod
    def features(self) -> list[tuple[tuple[str, ...], int]]:
        """Return for each feature its possible names in a trace, and the index of its table."""

    @abstractmethod
    def call(self, module: Any, bags: Sequence[Bags]) -> Tensor:
        """Look up the bags of each feature, in order, with either module; return one tensor."""

    @abstractmethod
    def rows(self, module: Any) -> list[Tensor]:
        """Return the rows of each table of either module, `[rows, dim]`, as views."""


def chosen_rows(num_rows: int, max_rows: int | None, seed: int) -> Tensor:
    """Return at most `max_rows` distinct random row numbers below `num_rows`; None: all, ascending.

    Fewer than `max_rows` are returned if `num_rows` is smaller.
    """
    if max_rows is None:
        return torch.arange(num_rows, device="cpu")
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed), device="cpu")[
        :max_rows
    ]


@dataclass(frozen=True)
class Left:
    """A module that was not swapped: its first name in the model, and the reason."""

    path: str
    reason: str
