"""Hyperparameters of tables: change them, restore saved ones, and notify observers.

A module of tables has its hyperparameters twice. `module.optimizer` is a dataclass with fields.
`module.hyperparams` is the tensor that kernels read, with the entries of `Hyper`. `set_fields`
changes both. `set_fields_from_hyperparams` sets the dataclass to saved values of the tensor; the
caller copies the tensor. Parameter groups of `torch.optim` are a third form: `group_entries_of` and
`changes_of_group` convert between fields and entries of a group.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from emblib.columns import Hyper
from emblib.optim import (
    FUSED,
    L2,
    SGD,
    Counter,
    Decoupled,
    External,
    Optimizer,
    check_learning_rate,
)
from emblib.optim.base import scheduled_rate
from emblib.specs.checks import check_bool


class HasHyperparams(Protocol):
    """A module of tables with a fused optimizer, such as a `FusedTables`."""

    optimizer: Optimizer

    @property
    def hyperparams(self) -> Tensor:
        """Return the tensor that kernels read, float64 `[n]` on the device."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate (reads the device)."""

    def initial_hyperparams(self) -> Tensor:
        """Return the `hyperparams` that `optimizer` has before its first step, on the CPU."""


class Observer(Protocol):
    """Observer of the hyperparameters of modules, such as a parameter group; must be hashable."""

    def update(self, module: HasHyperparams, lr: float | None) -> None:
        """React to a change; `notify_observers` calls this.

        Fields of `module.optimizer` have changed. `lr` is the new rate, None if the rate stayed.
        """


_observers: WeakKeyDictionary[HasHyperparams, WeakSet[Any]] = WeakKeyDictionary()


def add_observer(module: HasHyperparams, observer: Observer) -> None:
    """Have `notify_observers(module)` call `observer.update`; both are referenced weakly."""
    _observers.setdefault(module, WeakSet()).add(observer)


def notify_observers(module: HasHyperparams, lr: float | None = None) -> None:
    """Tell the observers of a module that its optimizer or, unless None, its rate `lr` changed."""
    for observer in list(_observers.get(module, ())):
        observer.update(module, lr)


def with_changes(optimizer: Optimizer, changes: Mapping[str, Any]) -> Optimizer:
    """Return a copy of an optimizer with some fields changed, by their names in `emblib.optim`.

    Raises:
        TypeError: the optimizer has no such field, or a field has a value of another type.
        ValueError: a field cannot have its value, or the changes would make another kind of
            optimizer: with other states or kernels, or with another `deferred`.
    """
    changed_optimizer = replace(optimizer, **changes)
    if (changed_optimizer.name, changed_optimizer.states) != (optimizer.name, optimizer.states):
        raise ValueError(
            f"{dict(changes)} make another kind of optimizer, {changed_optimizer.name} with the "
            f"states {[state.name for state in changed_optimizer.states]}; make a new module and "
            "load the weights into it"
        )
    if changed_optimizer.deferred != optimizer.deferred:
        raise ValueError(
            "deferred is fixed when a module is made, since it decides which parameters have "
            "gradients: make a new module and load the weights into it"
        )
    return changed_optimizer


def set_fields(module: HasHyperparams, changes: Mapping[str, Any]) -> None:
    """Change fields of a module's optimizer and its `hyperparams`, and notify its observers.

    Step and seed stay. Without `lr` among the changes the learning rate stays, too; the host then
    waits for the device to read it. Raises the errors of `with_changes` too, before any change.

    Raises:
        RuntimeError: the module is on the meta device, and `lr` is not among the changes.
    """
    if "lr" not in changes:
        changes = {**changes, "lr": module.learning_rate}
    module.optimizer = with_changes(module.optimizer, changes)
    values = module.initial_hyperparams()
    if isinstance(getattr(module.optimizer, "counter", None), Counter):
        values = values[:-1]  # the last entry, the largest row count, is measured, not set
    # Not copied: the step, which another thread may be counting, and the seed, which may come from
    # a checkpoint.
    optimizer_args = slice(Hyper.OPTIMIZER_ARGS, len(values))
    for entries in (slice(Hyper.STEP), slice(Hyper.L2, Hyper.SEED), optimizer_args):
        module.hyperparams[entries].copy_(values[entries])
    notify_observers(module, module.optimizer.lr)


def set_fields_from_hyperparams(module: HasHyperparams, saved_hyperparams: Tensor) -> None:
    """Set the fields of `module.optimizer` to saved `hyperparams`, and notify its observers.

    `module.hyperparams` does not change: the caller copies `saved_hyperparams`, `[n]`, there. It is
    of any dtype and device; if it is on a GPU, the host waits. Nothing changes where
    `with_saved_hyperparams` returns None.

    Raises:
        ValueError: the optimizer cannot have the values; nothing changes.
    """
    optimizer_and_rate = with_saved_hyperparams(module.optimizer, saved_hyperparams)
    if optimizer_and_rate is not None:
        module.optimizer, lr = optimizer_and_rate
        notify_observers(module, lr)


def with_saved_hyperparams(
    optimizer: Optimizer, saved_hyperparams: Tensor
) -> tuple[Optimizer, float] | None:
    """Return an optimizer with the fields of saved `hyperparams`, and the saved learning rate.

    The field `lr` does not change. Return None if `saved_hyperparams` has no values (on meta, or
    fake), or if the optimizer is `External`.

    Raises:
        ValueError: the optimizer cannot have the values, or has another number of them.
    """
    if saved_hyperparams.is_meta or isinstance(saved_hyperparams, FakeTensor):
        return None
    num_values = optimizer.hyperparams().numel()
    if saved_hyperparams.shape != (num_values,):
        raise ValueError(
            f"{type(optimizer).__name__} has {num_values} hyperparameters, got shape "
            f"{tuple(saved_hyperparams.shape)}"
        )
    if isinstance(optimizer, External):
        return None
    values = saved_hyperparams.double().tolist()
    check_learning_rate(values[Hyper.LEARNING_RATE])
    step = values[Hyper.STEP]
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"step must be an integer >= 0, got {step}")
    if not values[Hyper.SEED].is_integer():
        raise ValueError(f"seed must be an integer, got {values[Hyper.SEED]}")
    try:
        return optimizer.with_hyperparams(values), values[Hyper.LEARNING_RATE]
    except IndexError as error:  # no kind of decay has the saved code
        raise ValueError(
            f"{type(optimizer).__name__} cannot have the hyperparameters {values}"
        ) from error


# Entries of torch.optim that tables do not support, and the value without effect; None is without
# effect too. Entries that only select an implementation, such as `foreach`, are ignored.
_UNSUPPORTED_ENTRIES: dict[str, Any] = {
    "amsgrad": False,
    "centered": False,
    "dampening": 0.0,
    "differentiable": False,
    "lr_decay": 0.0,
    "nesterov": False,
    **dict.fromkeys(("alpha", "etas", "lambd", "momentum_decay", "rho", "step_sizes", "t0")),
}
_DECAY_ENTRIES = frozenset({"decoupled_weight_decay", "weight_decay"})
_FIELDS = frozenset(field.name for cls in FUSED.values() for field in fields(cls))


class GroupChanges(NamedTuple):
    """Changes that entries of a parameter group request.

    Attributes:
        fields: new values of fields of the optimizer, by name.
        stored_entries: the entries given, with the values that the group must store. Values of
            known entries (`_is_known_entry`) are Python numbers or tuples of them; other values are
            unchanged.
    """

    fields: dict[str, Any]
    stored_entries: dict[str, Any]


def group_entries_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries of a parameter group of an optimizer, without `lr` and `max_gradient`.

    Entries are its fields that are numbers, `betas`, and `maximize` and `weight_decay` as in torch.
    SGD also has `momentum`, 0.
    """
    entries: dict[str, Any] = {}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if field.name not in ("lr", "max_gradient") and (is_number or field.name == "betas"):
            entries[field.name] = value
    if type(optimizer) is SGD:
        entries["momentum"] = 0.0  # torch's schedulers read it
    entries["maximize"] = optimizer.maximize
    if optimizer.decays:
        decay = optimizer.weight_decay
        entries["weight_decay"] = 0.0 if decay is None else float(decay.rate)
    return entries


def changes_of_group(optimizer: Optimizer, entries: Mapping[str, Any]) -> GroupChanges:
    """Convert some entries of a parameter group to changes of the optimizer of its tables.

    Values of fields other than `lr` are not checked here; `with_changes` checks them.

    Raises:
        TypeError: `decoupled_weight_decay` is not a bool.
        ValueError: `lr` is not a finite number >= 0; or an entry would have an effect in
            `torch.optim`, but has none on these tables.
    """
    changes = GroupChanges({}, {})
    field_names = {field.name for field in fields(optimizer)}
    values = {
        name: _as_python_numbers(value) for name, value in entries.items() if _is_known_entry(name)
    }
    for name, value in values.items():
        if name in field_names and name not in _DECAY_ENTRIES:
            if name == "lr":
                check_learning_rate(scheduled_rate(value))
                value = scheduled_rate(float(value))
            changes.fields[name] = value
        elif name not in _DECAY_ENTRIES and not _is_without_effect(name, value):
            accepted_names = sorted(("lr", *group_entries_of(optimizer)))
            raise ValueError(
                f"{name}={value!r} has no effect on tables with {type(optimizer).__name__}: "
                f"leave it out (a group takes {accepted_names}), or use "
                "optimizer=None for these tables and an optimizer of torch.optim"
            )
    if values.keys() & _DECAY_ENTRIES:
        changes.fields["weight_decay"] = _convert_decay(optimizer, values)
    for name, value in entries.items():
        changes.stored_entries[name] = changes.fields.get(name, values.get(name, value))
    if "weight_decay" in entries:
        decay = changes.fields["weight_decay"]
        changes.stored_entries["weight_decay"] = (
            0.0 if decay is None else getattr(decay, "rate", decay)
        )
    return changes


def _is_known_entry(name: str) -> bool:
    """Return whether an entry of this name has an effect in some optimizer of torch or emblib."""
    return name in _FIELDS or name in _UNSUPPORTED_ENTRIES or name in _DECAY_ENTRIES


def _is_without_effect(name: str, value: Any) -> bool:
    """Return whether the value of an entry has no effect: None, or that of _UNSUPPORTED_ENTRIES."""
    return value is None or value == _UNSUPPORTED_ENTRIES.get(name, 0.0)


def _convert_decay(optimizer: Optimizer, values: Mapping[str, Any]) -> Any:
    """Return the field `weight_decay` for the entries of a group: L2, Decoupled or another kind.

    The result has the kind of the current decay. Without one, it has the first kind in `decays` of
    the optimizer, which is that of its namesake in `torch.optim`. The entry
    `decoupled_weight_decay` selects between L2 and Decoupled. None is no decay. A decay that is no
    number is returned unchanged; `with_changes` checks it.

    Raises:
        TypeError: `decoupled_weight_decay` is not a bool.
        ValueError: the optimizer supports no decay, and the rate is not 0.
    """
    current_decay = optimizer.weight_decay
    decay = values.get("weight_decay", 0.0 if current_decay is None else current_decay.rate)
    if decay is not None and not isinstance(decay, float | int):
        return decay
    rate = decay or 0.0
    kind = type(current_decay) if current_decay is not None else next(iter(optimizer.decays), None)
    if values.get("decoupled_weight_decay") is not None and kind in (L2, Decoupled):
        check_bool("decoupled_weight_decay", values["decoupled_weight_decay"])
        kind = Decoupled if values["decoupled_weight_decay"] else L2
    if not rate and (current_decay is None or kind not in optimizer.decays):
        return None
    if kind is None:
        raise ValueError(
            f"weight_decay={rate!r} has no effect on tables with {type(optimizer).__name__}: "
            "leave it out, or choose an optimizer that has a weight decay"
        )
    return kind(rate)


def _as_python_numbers(value: Any) -> Any:
    """Convert numbers of torch and numpy to Python numbers; return tensors and lists as tuples."""
    if hasattr(value, "tolist"):
        numbers = value.reshape(-1).tolist()
        value = numbers[0] if len(numbers) == 1 else numbers
    return tuple(map(_as_python_numbers, value)) if isinstance(value, list | tuple) else value
