"""FusedOptimizer: the optimizers that tables apply in backward, as one torch optimizer.

Also conversions: from FBGEMM's `fused_params`, from classes of `torch.optim`, and from parameters
on which torch's `_apply_optimizer_in_backward` has set an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from emblib import optim
from emblib.collections.configs import TableConfig
from emblib.collections.fused_states import HYPER, FusedTableEntry, check_saved_states
from emblib.collections.optimizers.gradient_norms import GradientRanks
from emblib.collections.optimizers.keyed import KeyedOptimizer, State, cycled_defaults
from emblib.collections.optimizers.table_groups import TableGroup
from emblib.collections.optimizers.torch_states import (
    Template,
    from_torch_states,
    is_of_torch,
    with_names,
)
from emblib.columns import Hyper
from emblib.grad_mode import in_grad_mode, without_gradients
from emblib.ops.autograd import is_fused
from emblib.optim import NO_UPDATE, Optimizer
from emblib.specs import format_config
from emblib.storage.handles import TableHandle, handle_of, is_marked_by_torch
from emblib.tables.base import FusedTables
from emblib.tables.hyperparameters import group_entries_of
from emblib.tables.parameters import is_updated_in_backward


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
        self._first_names: dict[str, str] = {}  # other name of a shared table -> its first name
        names_by_table: dict[int, list[str]] = {}
        for path, module in modules.items():
            for table in module.fused_tables():
                names = [_join_path(path, name) for name in table.names]
                if table.identity is not None:
                    first_names = names_by_table.setdefault(id(table.identity), names)
                    if first_names is not names:
                        self._first_names.update(zip(names, first_names, strict=True))
                        continue
                entries.setdefault(table.optimizer, []).append((_join_path(path, ""), table))
        # Per group: names of its parameters on all ranks and of those on this rank, modules of its
        # tables, and its initial optimizer.
        self._names, self._local_names, self._table_modules, groups = [], [], [], []
        self._optimizers = list(entries)
        params: dict[str, nn.Parameter] = {}
        for tables in entries.values():
            parameters = {prefix + k: p for prefix, t in tables for k, p in t.parameters.items()}
            params.update(parameters)
            self._local_names.append(list(parameters))
            table_modules = {
                id(table_module): table_module
                for _, table in tables
                for table_module in table.modules
            }
            self._table_modules.append(list(table_modules.values()))
            self._names.append([prefix + name for prefix, t in tables for name in t.names])
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
        """
        modules: dict[str, HasFusedTables] = {}
        for path, submodule in module.named_modules():
            if isinstance(submodule, HasFusedTables):
                modules[path] = submodule
            elif isinstance(submodule, FusedTables) and is_fused(submodule.optimizer):
                modules[path] = _BareTables(submodule)
        return FusedOptimizer(modules)

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks over which the tables are sharded; None without sharding."""
        methods = (getattr(m, "gradient_ranks", None) for m in self._modules_by_path.values())
        all_ranks = (method() for method in methods if method is not None)
        return super().gradient_ranks() or next((r for r in all_ranks if r is not None), None)

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
        checked = []
        for path, module in self._modules_by_path.items():
            prefix = _join_path(path, "")
            states = {
                name.removeprefix(prefix): values
                for name, values in state.items()
                if name.startswith(prefix)
            }
            module.check_optimizer_state(states)
            checked.append((module, states))
        return checked

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
        for group, saved in zip(groups, state_dict["param_groups"], strict=False):
            group.check({key: value for key, value in saved.items() if key != "params"})
        state_dict = super().check_state_dict(state_dict)
        self._checked_states(state_dict["state"])
        return state_dict

    def _templates(self) -> list[Template]:
        """Return the optimizer and the current hyperparameters of each group."""
        templates = []
        for optimizer, modules in zip(self._optimizers, self._table_modules, strict=True):
            current = modules[0].optimizer if modules else optimizer
            hyper = modules[0].hyperparams.detach() if modules else current.hyperparams("cpu")
            templates.append(Template(current, hyper.clone().cpu()))
        return templates

    def _check_groups(self) -> None:
        """Reconnect replaced groups, and warn of modules of one group that differ."""
        if not self._is_bound:
            self._bind_parameters()
        for group_index, group in enumerate(self.param_groups[: len(self._table_modules)]):
            if not isinstance(group, TableGroup) or not group.is_connected:
                parameters = self._parameters_of(group_index)
                self.param_groups[group_index] = TableGroup({"params": parameters})
                self._connect(group_index).update({k: v for k, v in group.items() if k != "params"})
            else:
                group.warn_of_disagreement()

    def _connect(self, group_index: int) -> TableGroup:
        """Connect a group with its tables, and return it."""
        group: Any = self.param_groups[group_index]
        optimizer, modules = self._optimizers[group_index], self._table_modules[group_index]
        rates = [module.learning_rate for module in modules]
        current = modules[0].optimizer if modules else optimizer
        group.show_entries({"lr": rates[0] if rates else optimizer.lr, **group_entries_of(current)})
        group.connect(current, modules, rates)
        group.show()
        return group

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "params": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups: list[Any] = self.param_groups
        for group, optimizer, modules in zip(
            groups, self._optimizers, self._table_modules, strict=False
        ):
            # The rates are not read from the modules, which may not be unpickled completely yet.
            group.show_entries({"params": []})
            group.connect(optimizer, modules, [group["lr"]] * len(modules))
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


_BETAS = ("beta1", "beta2")
_DEFAULT_BETAS = (0.9, 0.999)  # FBGEMM's
_ADAM_ARGUMENTS = ("learning_rate", "eps", *_BETAS, "weight_decay")
# The class for each value of FBGEMM's EmbOptimType, and the arguments that it accepts.
_FBGEMM_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "sgd": (optim.SGD, ("learning_rate", "weight_decay")),
    "exact_sgd": (optim.SGD, ("learning_rate", "weight_decay")),
    "exact_adagrad": (optim.Adagrad, ("learning_rate", "eps", "weight_decay")),
    "adagrad": (optim.Adagrad, ("learning_rate", "eps", "weight_decay")),
    "exact_row_wise_adagrad": (
        optim.RowwiseAdagrad,
        ("learning_rate", "eps", "weight_decay", "max_norm"),
    ),
    "row_wise_adagrad": (
        optim.RowwiseAdagrad,
        ("learning_rate", "eps", "weight_decay", "max_norm"),
    ),
    "adam": (optim.Adam, _ADAM_ARGUMENTS),
    "partial_row_wise_adam": (optim.PartialRowwiseAdam, _ADAM_ARGUMENTS),
    "lamb": (optim.LAMB, _ADAM_ARGUMENTS),
    "partial_row_wise_lamb": (optim.PartialRowwiseLAMB, _ADAM_ARGUMENTS),
    "lars_sgd": (optim.LARS, ("learning_rate", "momentum", "eta", "weight_decay")),
}
_OPTIMIZER_ALIASES = {
    "exact_rowwise_adagrad": "exact_row_wise_adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "partial_rowwise_adam": "partial_row_wise_adam",
    "partial_rowwise_lamb": "partial_row_wise_lamb",
}
_HYPERPARAMETERS = ("learning_rate", "eps", *_BETAS, "momentum", "eta", "max_norm", "weight_decay")
_OPTIMIZER_ARGUMENTS = {
    *("optimizer", "weight_decay_mode", "gradient_clipping", "max_gradient"),
    *_HYPERPARAMETERS,
}
_L2_ONLY_CLASSES = (optim.LARS,)
_DECOUPLED_ONLY_CLASSES = (optim.LAMB,)


class FusedParams(NamedTuple):
    """FBGEMM's arguments, divided.

    Attributes:
        optimizer: optimizer of emblib with the arguments of the optimizer.
        table_arguments: all other arguments, unchanged: caches, dtypes and so on.
    """

    optimizer: Optimizer
    table_arguments: dict[str, Any]


def from_fused_params(params: Mapping[str, Any]) -> FusedParams:
    """Return the optimizer of a dict of FBGEMM's arguments (TorchRec's `fused_params`).

    `params["optimizer"]` is a member of FBGEMM's EmbOptimType, its name or its value; or an
    optimizer of emblib, of which only `learning_rate` may then change something. By default it is
    EXACT_SGD with a `learning_rate` of 0.01. `max_gradient` counts only with `gradient_clipping`,
    and `weight_decay_mode` only with `weight_decay`. With SGD, Adagrad and row-wise Adagrad, FBGEMM
    ignores a decay whose mode is NONE, its default; here it raises.

    Raises:
        ValueError: emblib does not have the optimizer or decay mode, or the optimizer would ignore
            a hyperparameter other than 0.
    """
    table_arguments = {
        key: value for key, value in params.items() if key not in _OPTIMIZER_ARGUMENTS
    }
    optimizer = params.get("optimizer", "exact_sgd")
    if isinstance(optimizer, Optimizer):
        _refuse_unused(params, ("learning_rate",), format_config(optimizer))
        rate = params.get("learning_rate", optimizer.lr)
        return FusedParams(dataclasses.replace(optimizer, lr=rate), table_arguments)
    optimizer_name = str(getattr(optimizer, "value", optimizer)).lower()
    optimizer_name = _OPTIMIZER_ALIASES.get(optimizer_name, optimizer_name)
    if optimizer_name not in _FBGEMM_OPTIMIZERS:
        raise ValueError(
            f"optimizer must be one of {', '.join(_FBGEMM_OPTIMIZERS)}, or one of emblib.optim, "
            f"got {optimizer!r}"
        )
    make, accepted = _FBGEMM_OPTIMIZERS[optimizer_name]
    _refuse_unused(params, (*accepted, "gradient_clipping"), optimizer_name)
    hyperparameters = {name: params[name] for name in accepted if name in params}
    arguments = _convert_arguments(make, hyperparameters, params)
    return FusedParams(make(**arguments), table_arguments)


def _refuse_unused(params: Mapping[str, Any], accepted: Sequence[str], optimizer: str) -> None:
    """Raise ValueError if optimizer arguments other than `accepted` are set."""
    names = (*_HYPERPARAMETERS, "gradient_clipping")
    unused = [name for name in names if params.get(name) and name not in accepted]
    if unused:
        raise ValueError(
            f"{', '.join(unused)} would have no effect on {optimizer}: leave it out, or choose an "
            "optimizer that has it"
        )


def _convert_arguments(
    make: Any, hyperparameters: dict[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert FBGEMM's arguments to arguments of the emblib optimizer that `make` constructs.

    `hyperparameters` are those that the optimizer accepts, by FBGEMM's names; the dict is changed.
    `params` has all arguments.
    """
    decay = hyperparameters.pop("weight_decay", 0.0)
    arguments = {"lr": hyperparameters.pop("learning_rate", 0.01)}
    betas = [hyperparameters.pop(name, None) for name in _BETAS]
    if any(beta is not None for beta in betas):
        pairs = zip(betas, _DEFAULT_BETAS, strict=True)
        arguments["betas"] = tuple(default if beta is None else beta for beta, default in pairs)
    if params.get("gradient_clipping"):
        arguments["max_gradient"] = params.get("max_gradient", 1.0)
    if decay:
        arguments["weight_decay"] = _convert_decay(make, decay, params.get("weight_decay_mode"))
    return {**arguments, **hyperparameters}


def _convert_decay(make: Any, rate: float, mode: Any) -> Any:
    """Convert FBGEMM's modes: L2 (1) adds to the gradient, DECOUPLE (2) does not.

    NONE (0 or None) is for optimizers whose decay has one mode only, and raises for others.
    """
    mode_name = str(getattr(mode, "name", mode)).lower()
    is_decoupled = mode_name in ("decouple", "2")
    if mode_name not in ("l2", "none", "0", "1", "decouple", "2"):
        raise ValueError(
            f"weight_decay_mode must be NONE, L2 or DECOUPLE here, got {mode!r}; make the "
            "optimizer with emblib.optim for others"
        )
    if issubclass(make, _L2_ONLY_CLASSES):
        if is_decoupled:
            raise ValueError(f"{make.__name__} has no decoupled weight decay, got mode {mode!r}")
        return optim.L2(rate)
    # FBGEMM has only decoupled decay for optimizers with moments.
    has_moments = issubclass(make, optim.Adam | optim.LAMB)
    if not has_moments and mode_name in ("none", "0"):
        raise ValueError(
            f"weight_decay={rate} would have no effect on {make.__name__} with weight_decay_mode "
            "NONE, FBGEMM's default: pass L2 or DECOUPLE as weight_decay_mode, or leave it out"
        )
    return optim.Decoupled(rate) if is_decoupled or has_moments else optim.L2(rate)


def from_torch(optimizer_class: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of emblib that is equivalent to a class of `torch.optim`.

    Supported are `torch.optim.SGD`, `Adagrad`, `Adam` and `AdamW`, any class called
    `RowWiseAdagrad`, and the classes of `emblib.optim`. Any other class is supported if its
    attribute `fused_class` is such a class; `fused_defaults` are then default arguments.

    Raises:
        ValueError: an argument has no equivalent.
        TypeError: the class is unknown, or is one of `emblib.optim` that does not take the
            arguments.
    """
    arguments = {**getattr(optimizer_class, "fused_defaults", {}), **arguments}
    optimizer_class = getattr(optimizer_class, "fused_class", optimizer_class)
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer):
        decay = arguments.get("weight_decay")
        if not isinstance(decay, int | float) or isinstance(decay, bool):
            return optimizer_class(**arguments)
        # A number as in torch.optim; classes of emblib.optim take an L2 or Decoupled.
        decay_class = (
            optim.Decoupled if issubclass(optimizer_class, _DECOUPLED_ONLY_CLASSES) else optim.L2
        )
        return optimizer_class(
            **{**arguments, "weight_decay": decay_class(decay) if decay else None}
        )
    options = dict(arguments)
    defaults = _default_arguments(optimizer_class)
    if defaults is None:
        raise TypeError(
            "tables run torch.optim.SGD, Adagrad, Adam or AdamW, a RowWiseAdagrad, or a class of "
            f"emblib.optim, got {optimizer_class!r}"
        )
    for name in list(options):
        if name in defaults.hyperparameters:
            defaults.hyperparameters[name] = options.pop(name)
    maximize = options.pop("maximize", False)
    unsupported = {k: v for k, v in options.items() if k not in _IGNORED_ARGUMENTS and v}
    if unsupported:
        raise ValueError(
            f"{unsupported} of {optimizer_class.__name__} are not supported by tables, which take "
            f"{sorted(defaults.hyperparameters)}"
        )
    values = {**defaults.hyperparameters, "maximize": bool(maximize)}
    decay = values.pop("weight_decay", 0.0)
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
    decay_class = optim.Decoupled if optimizer_class is torch.optim.AdamW else optim.L2
    return defaults.make(**values, weight_decay=decay_class(decay) if decay else None)


_IGNORED_ARGUMENTS = {"foreach", "fused", "capturable"}  # they do not change the result


class _TorchDefaults(NamedTuple):
    """A class of `emblib.optim`, and its hyperparameters with the names and defaults of torch."""

    make: Callable[..., Optimizer]
    hyperparameters: dict[str, Any]


def _default_arguments(optimizer_class: Any) -> _TorchDefaults | None:
    """Return the emblib optimizer of a class of torch, with torch's defaults; None for another."""
    if optimizer_class is torch.optim.SGD:
        return _TorchDefaults(optim.SGD, {"lr": 1e-3, "weight_decay": 0.0})
    if optimizer_class is torch.optim.Adagrad:
        return _TorchDefaults(optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW):
        decay = 1e-2 if optimizer_class is torch.optim.AdamW else 0.0
        adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
        return _TorchDefaults(optim.Adam, adam)
    if getattr(optimizer_class, "__name__", "") == "RowWiseAdagrad":
        return _TorchDefaults(optim.RowwiseAdagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    return None


_IN_BACKWARD_ATTRIBUTE = "_in_backward_optimizers"


def apply_optimizer_in_backward(
    optimizer: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Update parameters in backward, so that gradients exist only there.

    Tables of collections get a fused optimizer: their weights are kept, their optimizer states are
    reset. Call this before sharding. Any other parameter is updated as soon as its gradient is
    complete, and the gradient is freed.

    Args:
        optimizer: a class of `torch.optim` (for tables one that `from_torch` converts), or an
            optimizer of `emblib.optim`, or a class of those.
        params: parameters to update in backward.
        optimizer_kwargs: arguments of the class; None for an optimizer, which has its own.

    Raises:
        TypeError: a parameter cannot have this optimizer; it already has one in backward, and that
            is from torch, or the parameter is not of a table; or there are `optimizer_kwargs`, and
            `optimizer` is not a class.
        ValueError: tables do not support an argument or the optimizer.
    """
    arguments = dict(optimizer_kwargs or {})
    if isinstance(optimizer, Optimizer) and arguments:
        raise TypeError(
            f"optimizer_kwargs {arguments} are for a class, got the optimizer "
            f"{format_config(optimizer)}: set them in it"
        )
    tables: dict[int, tuple[Any, dict[str, Optimizer]]] = {}
    other_parameters = []
    for parameter in params:
        _check_not_marked_by_torch(parameter)
        handle = handle_of(parameter)
        owner = None if handle is None else handle.owner()
        if handle is None or owner is None:
            other_parameters.append(parameter)
            continue
        fused = optimizer if isinstance(optimizer, Optimizer) else from_torch(optimizer, arguments)
        _, optimizers_by_name = tables.setdefault(id(owner), (owner, {}))
        optimizers_by_name[handle.name] = fused
    if other_parameters:
        _check_of_torch(optimizer)
        _check_without_optimizer(other_parameters)
    steppers = [(p, optimizer([p], **arguments)) for p in other_parameters]
    for owner, optimizers_by_name in tables.values():
        owner.set_optimizers(optimizers_by_name)
    for parameter, stepper in steppers:
        _step_in_backward(parameter, stepper)


def _check_not_marked_by_torch(parameter: nn.Parameter) -> None:
    if is_marked_by_torch(parameter):
        raise TypeError(
            "a parameter already has an optimizer in backward, from torch's own "
            "_apply_optimizer_in_backward; give it to one call only"
        )


def trained_configs(collection: Any, optimizer: Optimizer | None = None) -> tuple[TableConfig, ...]:
    """Return the configurations of a collection, with the optimizers that torch set in backward.

    `torch.distributed.optim._apply_optimizer_in_backward` steps a parameter in a hook of its
    gradient. Sharding replaces the parameters, so a sharded table runs the same optimizer fused. A
    shared table without one has the optimizer of its `SharedTables`, or else `optimizer`, never the
    collection's. All other configurations are returned unchanged.

    Raises:
        TypeError: tables do not support an optimizer that torch set, or `optimizer` is not of
            `emblib.optim`.
        ValueError: tables do not support an argument of an optimizer, a table has several
            optimizers, or its optimizer has made steps, whose state would be lost.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be None or one of emblib.optim, e.g. optim.SGD(lr=0.01), got "
            f"{optimizer!r}"
        )
    configs, handles = [], collection.handles()
    shared = collection.shared_tables()
    for config in collection.configs:
        optimizer_of_table = _optimizer_set_by_torch(config.name, handles[config.name])
        if optimizer_of_table is None and config.name in shared:
            optimizer_of_table = shared[config.name].config.optimizer or optimizer or NO_UPDATE
        configs.append(
            config if optimizer_of_table is None else replace(config, optimizer=optimizer_of_table)
        )
    return tuple(configs)


def _optimizer_set_by_torch(table: str, handle: TableHandle) -> Optimizer | None:
    """Return the optimizer that `_apply_optimizer_in_backward` set for a table, or None."""
    parameters: list[Any] = list(handle.parameters())
    optimizers: list[list[Optimizer]] = []
    for parameter in parameters:
        steppers = (
            getattr(parameter, _IN_BACKWARD_ATTRIBUTE) if is_marked_by_torch(parameter) else []
        )
        if any(float(s.state.get(parameter, {}).get("step", 0)) > 0 for s in steppers):
            raise ValueError(
                f"the optimizer in backward of table {table!r} has made steps, and its state would "
                "be lost: shard the model before it is trained"
            )
        try:
            optimizers.append([_to_fused(s, parameter, k) for k, s in enumerate(steppers)])
        except (TypeError, ValueError) as error:
            error.add_note(f"(of table {table!r}, by torch's own _apply_optimizer_in_backward)")
            raise
    if not any(optimizers):
        return None
    if len(optimizers[0]) != 1 or any(other != optimizers[0] for other in optimizers):
        raise ValueError(
            f"table {table!r} must have one optimizer, and torch's own "
            f"_apply_optimizer_in_backward gave its parameters {optimizers}"
        )
    return optimizers[0][0]


def _to_fused(stepper: Any, parameter: Any, index: int) -> Optimizer:
    """Convert the optimizer of this index that torch set for a parameter, as it is now."""
    arguments, options = parameter._optimizer_kwargs[index], stepper.param_groups[0]
    hyperparameters = {
        "lr": options["lr"],
        **{name: options.get(name, arguments[name]) for name in arguments},
    }
    return from_torch(parameter._optimizer_classes[index], hyperparameters)


def _check_of_torch(optimizer: Any) -> None:
    if isinstance(optimizer, Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    ):
        raise TypeError(
            f"{optimizer!r} is of emblib.optim, which updates tables of collections; for other "
            "parameters give a class of torch.optim"
        )


def _check_without_optimizer(parameters: Sequence[nn.Parameter]) -> None:
    has_optimizer = any(hasattr(parameter, _IN_BACKWARD_ATTRIBUTE) for parameter in parameters)
    if has_optimizer or len({id(parameter) for parameter in parameters}) < len(parameters):
        raise TypeError(
            "a parameter already has an optimizer in backward; give it to one call only"
        )


def _step_in_backward(parameter: nn.Parameter, stepper: torch.optim.Optimizer) -> None:
    """Step the optimizer of one parameter when its gradient is complete; free the gradient."""
    marked: Any = parameter
    setattr(marked, _IN_BACKWARD_ATTRIBUTE, [stepper])

    def step(parameter_with_grad: Any) -> None:
        stepper.step()
        parameter_with_grad.grad = None

    parameter.register_post_accumulate_grad_hook(step)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters without an optimizer in backward; with `include`, those with one."""
    for name, parameter in named_parameters:
        is_marked = hasattr(parameter, _IN_BACKWARD_ATTRIBUTE) or is_updated_in_backward(parameter)
        if is_marked is include:
            yield name, parameter
