"""The optimizers that tables run in backward, as one optimizer of torch: rates and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from emblib.collections.optimizers.keyed import KeyedOptimizer, State
from emblib.collections.states import FusedTable
from emblib.optim import Optimizer


@runtime_checkable
class HasFusedTables(Protocol):
    """A module with tables that backward updates; collections are, whole and over ranks."""

    def fused_tables(self) -> Sequence[FusedTable]:
        """The tables: the same, in the same order, on every rank."""

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """By the name of a parameter its states, and `hyper`, the numbers of the optimizer."""

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take what `optimizer_state` gave."""


__all__ = ["FusedOptimizer", "FusedTable", "HasFusedTables"]


class FusedOptimizer(KeyedOptimizer):
    """What tables with a fused optimizer do in backward, for schedulers and checkpoints.

    The update itself happens in backward, whether `step` is called or not. `step` and `zero_grad`
    hand learning rates, and other numbers that were changed in `param_groups`, to the tables; they
    hold from the next backward on. There is one group for all tables of equal optimizers.

    State dicts have, by the name of a parameter, the states of its optimizer and `hyper`, its
    numbers (learning rate and step among them). States of dynamic tables are in the state dict of
    their module, with the keys.

    Args:
        modules: by the path of each, what has tables; see `of`.
    """

    def __init__(self, modules: Mapping[str, HasFusedTables]) -> None:
        self._modules_by_path = dict(modules)
        found: dict[Optimizer, list[tuple[str, FusedTable]]] = {}
        for path, module in modules.items():
            for table in module.fused_tables():
                found.setdefault(table.optimizer, []).append((_joined(path, ""), table))
        self._names, self._kernels, groups = [], [], []
        params: dict[str, nn.Parameter] = {}
        for optimizer, tables in found.items():
            here = {prefix + k: p for prefix, t in tables for k, p in t.parameters.items()}
            params.update(here)
            kernels = {id(kernel): kernel for _, table in tables for kernel in table.kernels}
            self._kernels.append(list(kernels.values()))
            self._names.append([prefix + name for prefix, t in tables for name in t.names])
            numbers = _numbers(optimizer)
            if any(kernel.anchor.is_meta for kernel in kernels.values()):
                raise RuntimeError(
                    "the numbers of tables on meta cannot be read: make the FusedOptimizer after "
                    "to_empty(device=...) and reset_parameters()"
                )
            if kernels:
                numbers["lr"] = next(iter(kernels.values())).learning_rate
            groups.append({"params": list(here.values()), **numbers})
        super().__init__(params, groups)
        self._pushed = [_pushable(group) for group in self.param_groups]

    @staticmethod
    def of(module: nn.Module) -> FusedOptimizer:
        """That of all tables in a module, by the names of its parameters."""
        found: dict[str, HasFusedTables] = {}
        for path, part in module.named_modules():
            if isinstance(part, HasFusedTables):
                found[path] = part
        return FusedOptimizer(found)

    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group, on any rank."""
        return [list(names) for names in self._names] or [[]]

    def keyed_state(self) -> State:
        """States by name, as views of the tables where they are one tensor; and `hyper`."""
        return {
            _joined(path, name): dict(states)
            for path, module in self._modules_by_path.items()
            for name, states in module.optimizer_state().items()
        }

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Write states and numbers into the tables."""
        for path, module in self._modules_by_path.items():
            prefix = _joined(path, "")
            own = {
                name.removeprefix(prefix): values
                for name, values in state.items()
                if name.startswith(prefix)
            }
            module.load_optimizer_state(own)
        for group, pushed, kernels in self._groups():
            if kernels:
                group["lr"] = pushed["lr"] = kernels[0].learning_rate

    def _groups(self) -> list[tuple[dict[str, Any], dict[str, Any], list[Any]]]:
        return list(zip(self.param_groups, self._pushed, self._kernels, strict=False))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of.

        Raises:
            KeyError: it is of other tables.
            ValueError: states of other shapes.
        """
        super().load_state_dict(state_dict)
        self.push()

    def push(self) -> None:
        """Hand what was changed in `param_groups` to the tables."""
        for group, pushed, kernels in self._groups():
            now = _pushable(group)
            if now == pushed:
                continue
            changes = {key: value for key, value in now.items() if pushed.get(key) != value}
            rate = changes.pop("lr", None)
            for kernel in kernels:
                if rate is not None:
                    kernel.set_learning_rate(rate)
                if changes:
                    kernel.set_hyper(**changes)
            pushed.update(now)

    def step(self, closure: Any = None) -> Any:
        """Hand learning rates to the tables; the update itself happened in backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.push()
        return loss

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Hand learning rates to the tables; there are no gradients to forget."""
        self.push()


_NOT_NUMBERS = {"lr", "max_gradient", "weight_decay"}


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers of an optimizer, by the names that `torch.optim` has for them."""
    numbers: dict[str, Any] = {"lr": optimizer.lr}
    for f in fields(optimizer):
        value = getattr(optimizer, f.name)
        plain = isinstance(value, float | int) or f.name == "betas"
        if plain and not isinstance(value, bool) and f.name not in _NOT_NUMBERS:
            numbers[f.name] = value
    return numbers


def _pushable(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group the tables know."""
    known = {name for f in _KNOWN for name in (f,) if f in group}
    return {name: _plain(group[name]) for name in known}


_KNOWN = ("lr", "eps", "betas", "momentum", "eta", "max_norm")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
