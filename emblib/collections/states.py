"""The states of fused optimizers, by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from emblib.collections.groups import TableGroups
from emblib.collections.handles import TableHandle
from emblib.collections.kernels import PartTables
from emblib.dynamic import DynamicEmbeddingBags
from emblib.ops import lookups
from emblib.optim import Optimizer

HYPER = "hyper"
Handles = Mapping[str, TableHandle]


@dataclass(frozen=True)
class FusedTable:
    """A table that backward updates.

    Args:
        optimizer: what it was made with.
        names: of its parameters, within the module that has it.
        kernels: the modules that hold it here; none where others have all of it.
        parameters: those that are here, by name.
    """

    optimizer: Optimizer
    names: tuple[str, ...]
    kernels: Sequence[Any]
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)


def fused_tables(prefix: str, handles: Handles) -> list[FusedTable]:
    """The tables that backward updates."""
    found = []
    for table, handle in handles.items():
        parameters = handle.fused_parameters()
        if parameters:
            named = {f"{prefix}.{table}.{name}": p for name, p in parameters.items()}
            optimizer = handle.kernel.optimizer
            found.append(FusedTable(optimizer, tuple(named), [handle.kernel], named))
    return found


def optimizer_state(
    groups: TableGroups, prefix: str, handles: Handles
) -> dict[str, dict[str, Tensor]]:
    """By the name of a parameter its states, as views, and a copy of the optimizer's numbers."""
    return {
        name: {**states, HYPER: kernel.hyper.clone()}
        for name, kernel, states in _states(groups, prefix, handles)
    }


def _states(
    groups: TableGroups, prefix: str, handles: Handles
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Name, kernel and states of each parameter that backward updates."""
    every = groups.all_views() if handles else []
    for views, (table, handle) in zip(every, handles.items(), strict=True):
        kernel: Any = handle.kernel
        if not lookups.is_fused(kernel.optimizer):
            continue
        for parameter in handle.fused_parameters():
            # `cores.1` of a tensor train has the states `<state>.1`; those of a dynamic table are
            # saved with its keys.
            _, dot, number = parameter.rpartition(".")
            states = {
                state.name: views[f"{state.name}{dot}{number if dot else ''}"]
                for state in kernel.optimizer.states
                if not isinstance(kernel, DynamicEmbeddingBags)
            }
            yield f"{prefix}.{table}.{parameter}", kernel, states


@torch.no_grad()
def load_optimizer_state(
    groups: TableGroups,
    prefix: str,
    handles: Handles,
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write states and numbers; tables that share a kernel take the numbers of the most steps."""
    every = list(_states(groups, prefix, handles))
    for name, kernel, states in every:
        _check(name, {**states, HYPER: kernel.hyper}, state.get(name))
    newest: dict[int, tuple[Any, Tensor]] = {}
    for name, kernel, states in every:
        given = state[name]
        for key, view in states.items():
            view.copy_(given[key])
        before = newest.get(id(kernel))
        if before is None or float(given[HYPER][1]) > float(before[1][1]):
            newest[id(kernel)] = kernel, given[HYPER]
    for kernel, numbers in newest.values():
        kernel.hyper.copy_(numbers)
        kernel.set_step(int(numbers[1]))
        if isinstance(kernel, PartTables):
            with kernel._writing():
                pass  # a store on disk commits what was written


def _check(name: str, states: Mapping[str, Tensor], given: Mapping[str, Tensor] | None) -> None:
    if given is None:
        raise KeyError(f"the state of the optimizer lacks {name}")
    missing = sorted(states.keys() - given.keys())
    if missing:
        raise KeyError(
            f"the state of {name} lacks {missing}; it has {sorted(given)}: it is of another "
            "optimizer"
        )
    for key, view in states.items():
        if given[key].shape != view.shape:
            raise ValueError(
                f"{key} of {name} must have the shape {tuple(view.shape)}, got "
                f"{tuple(given[key].shape)}: it is of another table or optimizer"
            )
