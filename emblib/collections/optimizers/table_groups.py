"""Parameter groups of tables: writing an entry changes the optimizer, reading shows its value."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from emblib.collections.fused_states import RemoteOptimizer
from emblib.optim import Optimizer
from emblib.tables import hyperparameters
from emblib.tables.parameters import caller_level

_SCHEDULERS = "torch.optim.lr_scheduler"


class TableGroup(dict[str, Any]):
    """A parameter group of `torch.optim` for tables with equal optimizers.

    Kernels read hyperparameters from a tensor of each module, so that captured graphs see a change.
    Writing an entry of the group writes these tensors, before the next backward or step;
    `set_learning_rate`, `set_hyperparameters` and loading of a module write the entries of its
    groups. An entry that tables cannot adopt raises ValueError or TypeError, and nothing is
    changed; `momentum` of a scheduler for tables without momentum is ignored with a warning. A copy
    or unpickled group has no tables until `connect`.
    """

    _tables: _GroupTables | None = None

    def connect(
        self,
        optimizer: Optimizer,
        modules: Sequence[Any],
        rates: Sequence[float],
        remotes: Sequence[RemoteOptimizer],
    ) -> None:
        """Connect to modules: writes to the group reach them, and their changes are shown in it.

        `rates` are their current learning rates, which are not read from the device. Writes also
        change the optimizers in `remotes`.
        """
        self._tables = _GroupTables(self, optimizer, modules, rates, remotes)

    def show(self) -> None:
        """Copy the hyperparameters on which all modules agree into the group."""
        if self._tables is not None:
            self._tables.show()

    @property
    def is_connected(self) -> bool:
        """Return whether entries are written to tables."""
        return self._tables is not None

    def warn_of_disagreement(self) -> None:
        """Warn if modules were given different hyperparameters by their own methods."""
        if self._tables is not None:
            self._tables.warn_of_disagreement()

    def __setitem__(self, name: str, value: Any) -> None:
        tables = self._tables
        is_set_by_scheduler = name == "momentum" and (
            sys._getframe(1).f_globals.get("__name__") == _SCHEDULERS
        )
        # Torch's cyclic schedulers set it by default (cycle_momentum=True): warn, do not raise.
        if tables is None or not is_set_by_scheduler or tables.has_momentum():
            self.update({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write entries: all of them, or none if one raises."""
        entries = dict(*args, **kwargs)
        if self._tables is not None:
            entries = self._tables.write(entries)
        super().update(entries)

    def check(self, entries: Mapping[str, Any]) -> None:
        """Raise what `update` would raise for these entries; write nothing."""
        if self._tables is not None:
            self._tables.convert(dict(entries))

    def __ior__(self, other: Any) -> TableGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return an entry; write `default` first if it is missing."""
        if name not in self:
            self[name] = default
        return self[name]

    def __delitem__(self, name: str) -> None:
        self._check_removable(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove an entry and return it; raise ValueError for `params` and what acts on tables."""
        self._check_removable(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and return it; raise ValueError as `pop` does."""
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        """Remove all entries, or none: raise ValueError if `pop` refuses one of them."""
        for name in list(self):
            self._check_removable(name)
        super().clear()

    def _check_removable(self, name: str) -> None:
        if self._tables is not None and (name == "params" or self._tables.acts_on_tables(name)):
            raise ValueError(
                f"the entry {name!r} acts on tables and cannot be removed: write another value"
            )

    def show_entries(self, entries: dict[str, Any]) -> None:
        """Set entries to the values that the modules have, without writing them to the modules."""
        super().update(entries)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Without parameters: copies of the tables, which the copied modules do not have.
        entries = {
            name: value for name, value in self.items() if name != "params" or not self.is_connected
        }
        return TableGroup, (entries,)


class _GroupTables:
    """The modules of a group, with the current learning rate of each."""

    def __init__(
        self,
        group: TableGroup,
        optimizer: Optimizer,
        modules: Sequence[Any],
        rates: Sequence[float],
        remotes: Sequence[RemoteOptimizer],
    ) -> None:
        self._group, self._optimizer = weakref.ref(group), optimizer
        self._modules, self._remotes = list(modules), list(remotes)
        self._initial_bound = optimizer.max_gradient
        self._rates = {id(module): rate for module, rate in zip(modules, rates, strict=True)}
        self._differing_values: dict[str, list[Any]] = {}
        self._is_writing = self._has_warned = self._has_warned_of_momentum = False
        for module in modules:
            hyperparameters.add_observer(module, self)

    def has_momentum(self) -> bool:
        """Return whether the tables' optimizer has momentum; warn once if it has none."""
        if hasattr(self._optimizer, "momentum"):
            return True
        if not self._has_warned_of_momentum:
            warnings.warn(
                f"emblib: {type(self._optimizer).__name__} of tables has no momentum, so the "
                "scheduler changes only their learning rate; cycle_momentum=False says so",
                stacklevel=4,
            )
        self._has_warned_of_momentum = True
        return False

    def acts_on_tables(self, name: str) -> bool:
        """Return whether an entry of this name acts on the tables."""
        return name == "lr" or name in hyperparameters.group_entries_of(self._optimizer)

    def write(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Write entries to the modules; return the entries that the group stores."""
        changes, changed_optimizer = self.convert(entries)
        if changes.fields:
            self._is_writing = True
            try:
                for module in self._modules:
                    self._write_module(module, changes.fields)
                for remote in self._remotes:
                    remote.optimizer = hyperparameters.with_changes(
                        remote.optimizer, changes.fields
                    )
            finally:
                self._is_writing = False
            self._optimizer = changed_optimizer
            self.show()
        return changes.stored_entries

    def convert(self, entries: dict[str, Any]) -> tuple[hyperparameters.GroupChanges, Optimizer]:
        """Return the changes that entries make, and the optimizer with them.

        Raises:
            ValueError: the tables cannot adopt an entry, such as `params`.
            TypeError: an entry that must be a bool has another type.
        """
        if "params" in entries:
            raise ValueError(
                "the parameters of a group are those of its tables: make a new FusedOptimizer"
            )
        changes = hyperparameters.changes_of_group(self._optimizer, entries)
        return changes, hyperparameters.with_changes(self._optimizer, changes.fields)

    def _write_module(self, module: Any, fields: dict[str, Any]) -> None:
        """Write changed optimizer fields, `lr` among them, to a module."""
        other_fields = {name: value for name, value in fields.items() if name != "lr"}
        if any(getattr(module.optimizer, name) != value for name, value in other_fields.items()):
            # Passing the rate saves reading it from the device.
            rate = fields.get("lr", self._rates[id(module)])
            module.set_hyperparameters(**other_fields, lr=rate)
        elif "lr" in fields:
            module.set_learning_rate(fields["lr"])

    def update(self, module: Any, lr: float | None) -> None:
        """Record the rate `lr` of a module whose hyperparameters changed, and update the group."""
        if lr is not None:
            self._rates[id(module)] = lr
        if not self._is_writing:
            self.show()

    def show(self) -> None:
        """Show in the group the values on which all modules agree; record the differing ones."""
        group = self._group()
        if group is None or not self._modules:
            return
        entries_by_module = [
            {"lr": self._rates[id(module)], **hyperparameters.group_entries_of(module.optimizer)}
            for module in self._modules
        ]
        # Older checkpoints lack this entry, so it is shown only once it was written.
        bounds = [module.optimizer.max_gradient for module in self._modules]
        if "max_gradient" in group or any(bound != self._initial_bound for bound in bounds):
            for entries, bound in zip(entries_by_module, bounds, strict=True):
                entries["max_gradient"] = bound
        values_by_name = {
            name: {entries[name] for entries in entries_by_module} for name in entries_by_module[0]
        }
        self._differing_values = {
            name: sorted(values, key=lambda value: (value is None, value))
            for name, values in values_by_name.items()
            if len(values) > 1
        }
        group.show_entries(
            {
                name: value
                for name, value in entries_by_module[0].items()
                if name not in self._differing_values
            }
        )
        if not self._differing_values.keys() - {"lr"}:
            self._optimizer = self._modules[0].optimizer

    def warn_of_disagreement(self) -> None:
        """Warn, once per disagreement, if modules differ in an entry of the group."""
        if self._differing_values and not self._has_warned:
            warnings.warn(
                f"emblib: tables of one parameter group have different hyperparameters, "
                f"{self._differing_values}, by set_learning_rate or set_hyperparameters of their "
                "modules; the group shows what it had before. Write the entry of the group, or "
                "make a FusedOptimizer per module",
                stacklevel=caller_level(),
            )
        self._has_warned = bool(self._differing_values)
