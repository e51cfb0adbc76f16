"""Change hyperparameters of tables by the names of `torch.optim`, and notify observers."""

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


class HasHyperparams(Protocol):
    """A module of tables with a fused optimizer and its numbers, as in `FusedTables`."""

    optimizer: Optimizer

    @property
    def hyperparams(self) -> Tensor:
        """Return the numbers of the optimizer, float64 on the device."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate (reads the device)."""

    def initial_hyperparams(self) -> Tensor:
        """Return the hyperparameters of `optimizer` before the first step, float64 on the CPU."""


class Follower(Protocol):
    """Observer that mirrors the hyperparameters of modules, such as a parameter group; hashable."""

    def follow(self, module: HasHyperparams, lr: float | None) -> None:
        """Copy the numbers of `module.optimizer`; `lr` is the learning rate, None if unchanged."""


_followers: WeakKeyDictionary[HasHyperparams, WeakSet[Any]] = WeakKeyDictionary()


def add_follower(module: HasHyperparams, follower: Follower) -> None:
    """Notify `follower`, as long as it lives, of a module's new optimizers and learning rates."""
    _followers.setdefault(module, WeakSet()).add(follower)


def notify_followers(module: HasHyperparams, lr: float | None = None) -> None:
    """Notify the followers of a module that its optimizer or its learning rate has changed."""
    for follower in list(_followers.get(module, ())):
        follower.follow(module, lr)


def with_changes(optimizer: Optimizer, changes: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer with some fields changed.

    Raises:
        TypeError: no such field.
        ValueError: a value that the field cannot have, or that makes it another kind of optimizer.
    """
    changed = replace(optimizer, **changes)
    if (changed.name, changed.states) != (optimizer.name, optimizer.states):
        raise ValueError(
            f"{dict(changes)} make another kind of optimizer, {changed.name} with the states "
            f"{[state.name for state in changed.states]}; make a new module and load the "
            "weights into it"
        )
    if changed.leaves_gradient != optimizer.leaves_gradient:
        raise ValueError(
            "deferred is decided when a module is made, since it decides which parameters have "
            "gradients: make a new module and load the weights into it"
        )
    return changed


def set_fields(module: HasHyperparams, changes: Mapping[str, Any]) -> None:
    """Change fields of the optimizer of a module, and notify its followers.

    Step and seed stay, and so does a learning rate that is not among the changes: without `lr` the
    host waits for a GPU.

    Raises:
        TypeError: no such field.
        ValueError: a value that the field cannot have, or that makes it another kind of optimizer.
    """
    if "lr" not in changes:
        changes = {**changes, "lr": module.learning_rate}
    changed = with_changes(module.optimizer, changes)
    module.optimizer = changed
    values = module.initial_hyperparams()
    if isinstance(getattr(changed, "counter", None), Counter):
        values = values[:-1]  # the last one, the largest row count, is measured, not set
    # Neither the step, which another thread may be counting, nor the seed, which may be a
    # checkpoint's.
    fields_of_optimizer = slice(Hyper.OPTIMIZER_ARGS, len(values))
    for entries in (slice(Hyper.STEP), slice(Hyper.L2, Hyper.SEED), fields_of_optimizer):
        module.hyperparams[entries].copy_(values[entries])
    notify_followers(module, changed.lr)


def adopt(module: HasHyperparams, values: Tensor) -> None:
    """Set the optimizer of a module and its followers to saved `hyperparams`.

    `values` is `[n]`, with the entries of `Hyper`; the tensor of the module does not change. The
    host waits for a GPU that has `values`. Nothing changes if `values` is on meta or fake, or if
    the optimizer is `External`.

    Raises:
        ValueError: numbers that the optimizer cannot have; nothing is changed.
    """
    if (changed := with_numbers(module.optimizer, values)) is not None:
        module.optimizer, lr = changed
        notify_followers(module, lr)


def with_numbers(optimizer: Optimizer, values: Tensor) -> tuple[Optimizer, float] | None:
    """Return the optimizer with saved `hyperparams`, and their learning rate.

    None if `values` is on meta or fake, or if the optimizer is `External`.

    Raises:
        ValueError: numbers that the optimizer cannot have.
    """
    if values.is_meta or isinstance(values, FakeTensor) or isinstance(optimizer, External):
        return None
    count = optimizer.hyperparams().numel()
    if values.shape != (count,):
        raise ValueError(
            f"{type(optimizer).__name__} has {count} numbers, got shape {tuple(values.shape)}"
        )
    numbers = values.tolist()
    check_learning_rate(numbers[Hyper.LEARNING_RATE])
    step = numbers[Hyper.STEP]
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"step must be an integer >= 0, got {step}")
    try:
        return optimizer.with_hyperparams(numbers), numbers[Hyper.LEARNING_RATE]
    except IndexError as error:  # the code of a kind of decay
        raise ValueError(f"{numbers} are not of {type(optimizer).__name__}") from error


# Entries that tables do not support, with the value that has no effect; None never has an effect.
# Entries that only select an implementation in torch.optim, such as `foreach`, are not among them.
_NEUTRAL: dict[str, Any] = {
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
    """Changes of a parameter group.

    Attributes:
        fields: new values of fields of the optimizer's dataclass, by name.
        entries: the entries that were converted, for the group to store: those that tables know as
            numbers of Python, others unchanged.
    """

    fields: dict[str, Any]
    entries: dict[str, Any]


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's numbers by `torch.optim`'s names, without `lr` and `max_gradient`."""
    numbers = {}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if field.name not in ("lr", "max_gradient") and (is_number or field.name == "betas"):
            numbers[field.name] = value
    if type(optimizer) is SGD:
        numbers["momentum"] = 0.0  # torch's schedulers read it
    numbers["maximize"] = optimizer.maximize
    if optimizer.decays:
        decay = optimizer.weight_decay
        numbers["weight_decay"] = 0.0 if decay is None else float(decay.rate)
    return numbers


def changes_of_group(optimizer: Optimizer, options: Mapping[str, Any]) -> GroupChanges:
    """Convert some entries of a parameter group to changes of the optimizer of its tables.

    The values of `fields` are not checked, see `with_changes`.

    Raises:
        TypeError, ValueError: `lr` is no number.
        ValueError: an entry that would have an effect in `torch.optim`, but none on these tables.
    """
    changes = GroupChanges({}, {})
    field_names = {field.name for field in fields(optimizer)}
    values = {
        name: _as_python_numbers(value) for name, value in options.items() if _has_meaning(name)
    }
    for name, value in values.items():
        if name in field_names and name not in _DECAY_ENTRIES:
            changes.fields[name] = float(value) if name == "lr" else value
        elif name not in _DECAY_ENTRIES and not _is_neutral(name, value):
            raise ValueError(
                f"{name}={value!r} has no effect on tables with {type(optimizer).__name__}: "
                f"leave it out (a group takes {sorted(('lr', *numbers_of(optimizer)))}), or use "
                "optimizer=None for these tables and an optimizer of torch.optim"
            )
    if values.keys() & _DECAY_ENTRIES:
        changes.fields["weight_decay"] = _convert_decay(optimizer, values)
    for name, value in options.items():
        changes.entries[name] = changes.fields.get(name, values.get(name, value))
    if "weight_decay" in options:
        decay = changes.fields["weight_decay"]
        changes.entries["weight_decay"] = 0.0 if decay is None else float(decay.rate)
    return changes


def _has_meaning(name: str) -> bool:
    """Return whether optimizers of torch or of emblib read an entry of this name."""
    return name in _FIELDS or name in _NEUTRAL or name in _DECAY_ENTRIES


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an entry has the value that requests no effect, e.g. False or 0."""
    return value is None or value == _NEUTRAL.get(name, 0.0)


def _convert_decay(optimizer: Optimizer, values: Mapping[str, Any]) -> Any:
    """Convert the weight decay of a group to the kind of decay that the optimizer has.

    An optimizer without weight decay gets the kind that its namesake in `torch.optim` has.
    """
    current_decay = optimizer.weight_decay
    decay = values.get("weight_decay", 0.0 if current_decay is None else current_decay.rate)
    if decay is not None and not isinstance(decay, float | int):
        return decay  # an object, which the optimizer checks
    rate = decay or 0.0
    kind = type(current_decay) if current_decay is not None else next(iter(optimizer.decays), None)
    if values.get("decoupled_weight_decay") is not None and kind in (L2, Decoupled):
        kind = Decoupled if values["decoupled_weight_decay"] else L2
    if not rate and (current_decay is None or kind not in optimizer.decays):
        return None
    if kind is None:
        raise ValueError(
            f"weight_decay={rate!r} has no effect on tables with {type(optimizer).__name__}: "
            "leave it out, or choose an optimizer that has one"
        )
    return kind(rate)


def _as_python_numbers(value: Any) -> Any:
    """Convert numbers of torch and numpy to Python's, and sequences of them to tuples."""
    if hasattr(value, "item"):
        return value.item()
    return tuple(map(_as_python_numbers, value)) if isinstance(value, list | tuple) else value
