"""FusedOptimizer: the optimizers that tables apply in backward, as one torch optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from emblib.collections.fused_states import (
    HYPER,
    FusedTableEntry,
    RemoteOptimizer,
    check_saved_states,
)
from emblib.collections.optimizers.gradient_norms import GradientRanks
from emblib.collections.optimizers.keyed import KeyedOptimizer, State, cycled_defaults
from emblib.collections.optimizers.table_groups import TableGroup
from emblib.collections.optimizers.torch_states import (
    Template,
    from_torch_states,
    is_of_torch,
    with_names,
    without_params,
)
from emblib.columns import Hyper
from emblib.grad_mode import in_grad_mode, without_gradients
from emblib.ops.autograd import is_fused
from emblib.optim import Optimizer
from emblib.specs import check_module
from emblib.tables import state_dicts
from emblib.tables.base import FusedTables
from emblib.tables.hyperparameters import group_entries_of


@runtime_checkable
class HasFusedTables(Protocol):
    """A module with tables that backward updates, such as a collection, sharded or not."""

    def fused_tables(self) -> Sequence[FusedTableEntry]:
        """Return the tables: the same, in the same order, on every rank."""

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer states and `hyper`, the hyperparameters, by parameter name."""

    def check_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise KeyError or ValueError for a state that `load_optimizer_state` would refuse.

        With equal states all ranks raise, or none. It does not communicate.
        """

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `optimizer_state`: all of it, or nothing if a check fails."""


__all__ = ["FusedOptimizer", "FusedTableEntry", "HasFusedTables"]


class FusedOptimizer(KeyedOptimizer):
    """The fused optimizers of tables as one optimizer, for updates, schedulers and checkpoints.

    Tables whose optimizer is `deferred` have gradients like other parameters: `step` applies
    gradients and `zero_grad` resets them. They can be accumulated over several backwards, unscaled
    by a `torch.amp.GradScaler` and clipped.

    Backward updates all other tables, whether `step` is called or not, and they get no gradient.
    Each module of such tables has a scalar parameter in `param_groups`, whose gradient is infinite
    after a scaled backward that overflowed: this is how `GradScaler.step` detects it.

    Writing to `param_groups` changes the tables immediately: the next backward (deferred: the next
    `step`) uses the new value. Groups also show values that modules set or load. An entry that has
    an effect in `torch.optim` but none here raises ValueError (`TableGroup`). All tables with equal
    optimizers form one group.

    State dicts have, by parameter name, the optimizer states and `hyper`, the hyperparameters
    (learning rate and step among them). The state dicts of the modules have the states of hash
    tables, of cached rows and of tables outside collections.

    Args:
        modules: the modules with tables, by path; see `of`.

    Raises:
        RuntimeError: tables are on meta.
    """

    _is_bound: bool = True  # False in a copy until its groups have the parameters of its modules

    def __init__(self, modules: Mapping[str, HasFusedTables]) -> None:
        self._modules_by_path = dict(modules)
        entries: dict[Optimizer, list[tuple[str, FusedTableEntry]]] = {}
        remotes: dict[Optimizer, list[RemoteOptimizer]] = {}
        self._first_names: dict[str, str] = {}  # other name of a shared table -> its first name
        names_by_table: dict[int, list[str]] = {}
        for path, module in modules.items():
            for table in module.fused_tables():
                names = [_join_path(path, name) for name in table.names]
                if table.remote is not None:
                    remotes.setdefault(table.optimizer, []).append(table.remote)
                if table.identity is not None:
                    first_names = names_by_table.setdefault(id(table.identity), names)
                    if first_names is not names:
                        self._first_names.update(zip(names, first_names, strict=True))
                        continue
                entries.setdefault(table.optimizer, []).append((_join_path(path, ""), table))
        # Per group: names of its parameters on all ranks and of those on this rank, modules of its
        # tables, its initial optimizer, and the optimizers of tables without a shard here.
        self._names, self._local_names, self._table_modules, groups = [], [], [], []
        self._optimizers = list(entries)
        self._remotes = [remotes.get(optimizer, []) for optimizer in entries]
        params: dict[str, nn.Parameter] = {}
        for tables in entries.values():
            parameters = {
                prefix + name: parameter
                for prefix, table in tables
                for name, parameter in table.parameters.items()
            }
            params.update(parameters)
            self._local_names.append(list(parameters))
            table_modules = {
                id(table_module): table_module
                for _, table in tables
                for table_module in table.modules
            }
            self._table_modules.append(list(table_modules.values()))
            self._names.append([prefix + name for prefix, table in tables for name in table.names])
            if any(table_module.grad_anchor.is_meta for table_module in table_modules.values()):
                raise RuntimeError(
                    "hyperparameters of tables on meta cannot be read: make the FusedOptimizer "
                    "after to_empty(device=...) and reset_parameters()"
                )
            anchors = _anchors_of(table_modules.values())
            groups.append(TableGroup({"params": [*parameters.values(), *anchors]}))
        super().__init__(params, groups)
        for group_index in range(len(groups)):
            self._connect(group_index)
        self.defaults = cycled_defaults(self.param_groups)

    @staticmethod
    def of(module: nn.Module) -> FusedOptimizer:
        """Return the optimizer of all fused tables in a module, by the names of its parameters.

        Raises:
            RuntimeError: tables are on meta.
            TypeError: `module` is not a module.
        """
        check_module("module", module)
        modules: dict[str, HasFusedTables] = {}
        for path, submodule in module.named_modules():
            if isinstance(submodule, HasFusedTables):
                modules[path] = submodule
            elif isinstance(submodule, FusedTables) and is_fused(submodule.optimizer):
                modules[path] = _BareTables(submodule)
        return FusedOptimizer(modules)

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks over which the tables are sharded; None without sharding."""
        methods = (
            getattr(module, "gradient_ranks", None) for module in self._modules_by_path.values()
        )
        all_ranks = (method() for method in methods if method is not None)
        return super().gradient_ranks() or next(
            (ranks for ranks in all_ranks if ranks is not None), None
        )

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group, on all ranks."""
        return [list(names) for names in self._names] or [[]]

    def keyed_state(self) -> State:
        """Return the states by name, as views of the tables where possible, and `hyper`."""
        return {
            _join_path(path, name): dict(states)
            for path, module in self._modules_by_path.items()
            for name, states in module.optimizer_state().items()
            if _join_path(path, name) not in self._first_names
        }

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Write states and hyperparameters into the tables, after all modules have checked them."""
        for module, states in self._checked_states(state):
            module.load_optimizer_state(states)

    def _checked_states(
        self, state: Mapping[str, Mapping[str, Any]]
    ) -> list[tuple[HasFusedTables, dict[str, Mapping[str, Any]]]]:
        """Return each module with its states, which it has checked."""
        aliases = self._first_names.items()
        state = {
            **state,
            **{name: state[first_name] for name, first_name in aliases if first_name in state},
        }
        modules_and_states = []
        for path, module in self._modules_by_path.items():
            states = state_dicts.entries_under(_join_path(path, ""), state)
            module.check_optimizer_state(states)
            modules_and_states.append((module, states))
        return modules_and_states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of the same tables, of this class or of `torch.optim`: all or nothing.

        See `from_torch_states` for which classes of `torch.optim`, and how parameters are matched.

        Raises:
            KeyError: the state dict has other tables, or states of another optimizer.
            ValueError: states have other shapes, or these tables cannot adopt the hyperparameters.
        """
        super().load_state_dict(state_dict)

    @without_gradients
    def check_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise what `load_state_dict` would raise, before it writes; return the dict by name.

        A state dict of `torch.optim` is returned as one of this class.
        """
        state_dict = with_names(state_dict, self.group_names())
        if is_of_torch(state_dict, self.keyed_state()):
            state_dict = from_torch_states(state_dict, self.keyed_state(), self._templates())
        self._check_groups()
        groups: list[Any] = self.param_groups[: len(self._table_modules)]
        for group, saved_group in zip(groups, state_dict["param_groups"], strict=False):
            group.check(without_params(saved_group))
        state_dict = super().check_state_dict(state_dict)
        self._checked_states(state_dict["state"])
        return state_dict

    def _templates(self) -> list[Template]:
        """Return the optimizer and the current hyperparameters of each group."""
        templates = []
        for group_index, modules in enumerate(self._table_modules):
            current_optimizer = self._current_optimizer(group_index)
            hyperparams = (
                modules[0].hyperparams.detach() if modules else current_optimizer.hyperparams("cpu")
            )
            templates.append(Template(current_optimizer, hyperparams.clone().cpu()))
        return templates

    def _check_groups(self) -> None:
        """Reconnect replaced groups, and warn of modules of one group that differ."""
        if not self._is_bound:
            self._bind_parameters()
        for group_index, group in enumerate(self.param_groups[: len(self._table_modules)]):
            if not isinstance(group, TableGroup) or not group.is_connected:
                parameters = self._parameters_of(group_index)
                self.param_groups[group_index] = TableGroup({"params": parameters})
                self._connect(group_index).update(without_params(group))
            else:
                group.warn_of_disagreement()

    def _connect(self, group_index: int) -> TableGroup:
        """Connect a group with its tables, and return it."""
        group: Any = self.param_groups[group_index]
        modules, optimizer = self._table_modules[group_index], self._current_optimizer(group_index)
        rates = [module.learning_rate for module in modules]
        group.show_entries(
            {"lr": rates[0] if rates else optimizer.lr, **group_entries_of(optimizer)}
        )
        group.connect(optimizer, modules, rates, self._remotes[group_index])
        group.show()
        return group

    def _current_optimizer(self, group_index: int) -> Optimizer:
        """Return the optimizer that a group has now; the rate of its modules may be another."""
        owners = [*self._table_modules[group_index], *self._remotes[group_index]]
        optimizer: Optimizer = owners[0].optimizer if owners else self._optimizers[group_index]
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "params": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups: list[Any] = self.param_groups
        for group, optimizer, modules, remotes in zip(
            groups, self._optimizers, self._table_modules, self._remotes, strict=False
        ):
            # The rates are not read from the modules, which may not be unpickled completely yet.
            group.show_entries({"params": []})
            group.connect(optimizer, modules, [group["lr"]] * len(modules), remotes)
        self._is_bound = False
        with contextlib.suppress(AttributeError, KeyError):  # of modules that are not complete yet
            self._bind_parameters()

    def _bind_parameters(self) -> None:
        """Put the parameters of the modules into the groups: copied modules make new ones."""
        parameters = {
            _join_path(path, name): parameter
            for path, module in self._modules_by_path.items()
            for table in module.fused_tables()
            for name, parameter in table.parameters.items()
        }
        self.params = {name: parameters[name] for names in self._local_names for name in names}
        for index, group in enumerate(self.param_groups[: len(self._table_modules)]):
            group["params"][:] = self._parameters_of(index)
        self._is_bound = True

    def _parameters_of(self, group_index: int) -> list[Tensor]:
        """Return the parameters of a group, then the scalars of its modules."""
        parameters = [self.params[name] for name in self._local_names[group_index]]
        return [*parameters, *_anchors_of(self._table_modules[group_index])]

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of deferred tables; return the result of `closure`, called first."""
        loss = None
        if closure is not None:
            loss = in_grad_mode(closure, enabled=True)()
        self._check_groups()
        for modules in self._table_modules:
            for module in modules:
                if module.optimizer.deferred:
                    module.apply_gradients()
        return loss

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Reset the gradients of deferred tables.

        Sparse gradients become None for any `set_to_none`: zeros would cause an update.
        """
        self._check_groups()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = None
        super().zero_grad(set_to_none)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates of all tables, which bias corrections and counters use."""
        super().set_optimizer_step(step)
        for modules in self._table_modules:
            for module in modules:
                module.set_step(step)


class _BareTables:
    """A module of tables outside collections; its own state dict has the optimizer states."""

    def __init__(self, module: FusedTables) -> None:
        self._module = module

    def fused_tables(self) -> list[FusedTableEntry]:
        """Return all tables of the module together."""
        params = dict(self._module.named_parameters())
        return [FusedTableEntry(self._module.optimizer, tuple(params), [self._module], params)]

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return `hyper` for each parameter."""
        names = dict(self._module.named_parameters())
        return {name: {HYPER: self._module.hyperparams.clone()} for name in names}

    def check_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise KeyError or ValueError for hyperparameters that the module cannot have."""
        for name, _ in self._module.named_parameters():
            check_saved_states(name, self._module, {}, state.get(name))

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the hyperparameters."""
        self.check_optimizer_state(state)
        for values in state.values():
            self._module.load_hyperparams(values[HYPER])
            self._module.set_step(int(values[HYPER][Hyper.STEP]))


def _anchors_of(modules: Iterable[Any]) -> list[Tensor]:
    """Return the scalar of each module that backward updates: `GradScaler` reads its gradient."""
    return [module.grad_anchor for module in modules if not module.optimizer.deferred]


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
