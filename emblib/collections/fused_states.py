"""Optimizer states of a collection's tables with fused optimizers: list, return, check and load.

`FusedOptimizer` calls these functions through the collection. States have two keys: the name of a
parameter, and the name of the state. Each parameter also has `hyper`, the hyperparameters of its
module, which all tables of one module have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from emblib.collections.groups import TableGroups
from emblib.columns import Hyper
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.storage import TableHandle
from emblib.tables import hyperparameters, state_dicts

HYPER = "hyper"  # key of the hyperparameters among the states of a parameter
Handles = Mapping[str, TableHandle]
"""The handles of a `TableGroups` by name of the table, in the order of its slices."""


@dataclass
class RemoteOptimizer:
    """The optimizer of a table that no module on this rank updates, as its shards are elsewhere.

    Parameter groups change it as they change the optimizers of modules.
    """

    optimizer: Optimizer


@dataclass(frozen=True)
class FusedTableEntry:
    """A table with a fused optimizer: backward updates it, or `FusedOptimizer.step` if deferred.

    Attributes:
        optimizer: optimizer of the table.
        names: names of its parameters within the module that contains it.
        modules: the modules with shards of the table on this rank; may be empty.
        parameters: parameters of these shards, by name.
        identity: object that the entries of one shared table have in common, and no entries of
            different tables; may be None for a table that is not shared.
        remote: the optimizer of the table if `modules` is empty; None if nothing here needs it.
    """

    optimizer: Optimizer
    names: tuple[str, ...]
    modules: Sequence[Any]
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    identity: Any = None
    remote: RemoteOptimizer | None = None


def fused_tables(prefix: str, handles: Handles) -> list[FusedTableEntry]:
    """Return the tables with a fused optimizer, deferred ones included."""
    entries = []
    for table, handle in handles.items():
        parameters = handle.fused_parameters()
        if parameters:
            parameters_by_name = {
                f"{prefix}.{table}.{name}": parameter for name, parameter in parameters.items()
            }
            entries.append(
                FusedTableEntry(
                    optimizer=handle.module.optimizer,
                    names=tuple(parameters_by_name),
                    modules=handle.fused_modules(),
                    parameters=parameters_by_name,
                    identity=handle,
                )
            )
    return entries


def optimizer_state(
    groups: TableGroups, prefix: str, handles: Handles
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer states of each parameter, as views, and a copy of `hyper`."""
    return {
        name: {**states, HYPER: module.hyperparams.clone()}
        for name, module, states in _table_states(groups, prefix, handles)
    }


def _table_states(
    groups: TableGroups, prefix: str, handles: Handles
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Yield name, module and states of each parameter with a fused optimizer."""
    all_views = groups.all_views() if handles else []
    for views, (table, handle) in zip(all_views, handles.items(), strict=True):
        module: Any = handle.module
        if not autograd.is_fused(module.optimizer):
            continue
        for parameter in handle.fused_parameters():
            states = handle.optimizer_states(parameter, views)
            yield f"{prefix}.{table}.{parameter}", module, states


def check_optimizer_state(
    groups: TableGroups,
    prefix: str,
    handles: Handles,
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Raise the KeyError or ValueError of `load_optimizer_state`; write nothing."""
    for name, module, states in _table_states(groups, prefix, handles):
        check_saved_states(name, module, states, state.get(name))


@without_gradients
def load_optimizer_state(
    groups: TableGroups,
    prefix: str,
    handles: Handles,
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write states; set each module's hyperparameters to those of its table with the most steps.

    Raises:
        KeyError: a parameter or one of its states is missing.
        ValueError: a state has another shape or no values, or the optimizer cannot have the
            hyperparameters. Nothing is written in either case.
    """
    check_optimizer_state(groups, prefix, handles, state)
    newest_hyper_by_module: dict[int, Tensor] = {}  # by the id of a module
    for name, module, states in _table_states(groups, prefix, handles):
        for key, view in states.items():
            view.copy_(state[name][key])
        hyper = state[name][HYPER]
        previous = newest_hyper_by_module.setdefault(id(module), hyper)
        if float(hyper[Hyper.STEP]) > float(previous[Hyper.STEP]):
            newest_hyper_by_module[id(module)] = hyper
    handle_by_module = {id(handle.module): handle for handle in handles.values()}
    for module_id, hyper in newest_hyper_by_module.items():
        for module in handle_by_module[module_id].fused_modules():
            module.load_hyperparams(hyper)
            module.set_step(int(hyper[Hyper.STEP]))
        handle_by_module[module_id].commit()


def check_saved_states(
    name: str, module: Any, states: Mapping[str, Tensor], saved_states: Mapping[str, Tensor] | None
) -> None:
    """Compare the saved states of one parameter, and `hyper`, with those of its module.

    Raises:
        KeyError: there are no saved states, or one is missing.
        ValueError: a state has another shape or no values, or the optimizer cannot have `hyper`.
    """
    states = {**states, HYPER: module.hyperparams}
    if saved_states is None:
        raise KeyError(f"the state of the optimizer lacks {name}")
    missing_names = sorted(states.keys() - saved_states.keys())
    if missing_names:
        raise KeyError(
            f"the state of {name} lacks {missing_names}; it has {sorted(saved_states)}: it is of "
            "another optimizer"
        )
    for key, view in states.items():
        if problem := state_dicts.tensor_problem(saved_states[key], view):
            raise ValueError(f"{key} of {name} {problem}")
        if saved_states[key].shape != view.shape:
            raise ValueError(
                f"{key} of {name} must have the shape {tuple(view.shape)}, got "
                f"{tuple(saved_states[key].shape)}: it is of another table or optimizer"
            )
    # Raises ValueError for values that the optimizer cannot have.
    hyperparameters.with_saved_hyperparams(module.optimizer, saved_states[HYPER])
