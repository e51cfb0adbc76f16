"""Handles: one module per table of a collection, with the table's parameters and state dict.

Several tables share one module, which stores them and makes their lookups. A handle shows one table
to the user: its parameters are the module's memory or views of it, so optimizers, state dicts and
`named_parameters` see one entry per table, whichever tables share a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.storage.base import Storage, TableModule, TrainedModule, has_hyperparams
from emblib.tables import optimizer_hooks, parameters

# Set by torch's own _apply_optimizer_in_backward on a parameter; `bind_view` may keep the object.
_TORCH_OPTIMIZER_ATTRIBUTES = frozenset({"_optimizer_classes", "_optimizer_kwargs"})
_BLOCK_ROWS = 1 << 16  # rows per block of `dense_blocks`
_handles = WeakTensorKeyDictionary()  # from a parameter to a weak reference of its handle


def handle_of(parameter: nn.Parameter) -> TableHandle | None:
    """Return the handle that has this parameter, or None."""
    handle = _handles.get(parameter)
    return None if handle is None else handle()


class TableHandle(nn.Module):
    """One table of a collection, with its parameters and their names.

    The module owns the memory and moves it between devices; the parameters are usually views of it.
    If backward updates the table, its parameters have no `grad`, although they require gradients
    unless the table is frozen. With a deferred optimizer they have one, which its step applies. In
    both cases the attribute `_in_backward_optimizers` tells code that collects parameters to leave
    them to that optimizer.

    Methods that this class leaves empty are for storages that need them.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(1_000, 16, "item")])
        >>> handle = bags.handles()["item"]
        >>> {name: tuple(view.shape) for name, view in handle.views().items()}
        {'weight': (1000, 16)}
    """

    name = ""
    checks_parameters = True
    """Whether lookups raise for a parameter that was replaced, since they would ignore it."""

    def __init__(self, storage: Storage, module: TableModule, index: int) -> None:
        super().__init__()
        self._storage = storage
        self._owner: Any = None
        self.attach(module, index)

    def set_owner(self, owner: nn.Module, name: str) -> None:
        """Set the collection and the name of this table."""
        self._owner, self.name = weakref.ref(owner), name

    def owner(self) -> Any:
        """Return the collection that has this table, or None."""
        return None if self._owner is None else self._owner()

    def attach(self, module: TableModule, index: int) -> None:
        """Attach to table `index` of `module`."""
        # A tuple, so that the module does not become a child of this module.
        self._module_and_index = (module, index)

    def is_trained(self, name: str) -> bool:
        """Return whether the table is trained; False if it is frozen.

        `name` is the name of a parameter; a handle with several tables selects by it.
        """
        return self.index not in getattr(self.module, "_frozen_tables", ())

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train or freeze the table, from the next forward on.

        Here this does nothing if backward leaves gradients: autograd then uses `requires_grad`
        itself. `parameter` is one of this handle; a handle with several tables selects by it.
        """
        if autograd.updates_in_backward(self.module.optimizer):
            module: Any = self.module
            module.set_table_trained(self.index, trained=trained)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", {}) and isinstance(value, nn.Parameter):
            parameters.refuse_replacement(name)
        super().__setattr__(name, value)

    def check_replaceable(self) -> None:
        """Do nothing; a subclass raises ValueError if another module cannot replace the table's."""

    def before_read(self) -> None:
        """Do nothing; a subclass writes cached rows back, for parameters with the newest values."""

    def before_write(self) -> None:
        """Do nothing; a subclass writes cached rows back and empties the cache.

        Writes to the parameters then take effect.
        """

    @property
    def module(self) -> TableModule:
        """Return the module that looks the table up."""
        return self._module_and_index[0]

    @property
    def index(self) -> int:
        """Return the index of the table in its module."""
        return self._module_and_index[1]

    def bind(self) -> None:
        """Do nothing; a subclass makes its parameters views of the memory the module has now."""

    def views(self) -> dict[str, Tensor]:
        """Return parameters and optimizer states by name, as views.

        A dense table writes its cached rows back and empties its cache first.
        """
        return self._storage.views(self.module)[self.index]

    def dense_rows(self) -> Tensor:
        """Return the rows as lookups read them, floats `[rows, dim]`, possibly a view.

        Raises:
            RuntimeError: `Storage.has_dense_rows` is false, e.g. because ids share stored rows.
        """
        if not self._storage.has_dense_rows:
            raise RuntimeError(
                f"table {self.name!r} does not store one row of floats per id, its storage is "
                f"{type(self._storage).__name__}: look up the ids whose rows you need, or read "
                "what is stored with views()"
            )
        return optimizer_hooks.rows_as_read(self.module, self.views())

    def dense_blocks(self) -> Iterator[Tensor]:
        """Yield `dense_rows` in blocks of rows, in order.

        A storage that computes rows computes one block at a time, to limit memory.
        """
        yield from self.dense_rows().split(_BLOCK_ROWS)

    def commit(self) -> None:
        """Do nothing; a subclass commits writes to the views of a table on disk."""

    def fused_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name if a fused optimizer updates them, else an empty dict."""
        return dict(self.named_parameters()) if autograd.is_fused(self.module.optimizer) else {}

    def fused_modules(self) -> list[TrainedModule]:
        """Return the modules that update the parameters, each with its own `hyperparams`."""
        return [self.module] if has_hyperparams(self.module) else []

    def checked_modules(self) -> list[nn.Module]:
        """Return the modules whose parameters must not be replaced: lookups read the memory."""
        return [self] if self.checks_parameters else []

    def optimizer_states(self, parameter: str, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer states of a parameter, selected from `views`."""
        names = self._storage.state_views(parameter, self.module.optimizer)
        return {state: views[name] for state, name in names.items()}

    def adopt(self, other: Any) -> None:
        """Do nothing; a subclass takes over weights and parameter objects of another handle."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # the module moves its memory

    def _refuses_load_on_meta(self, state_dict: Any, prefix: str, errors: list[str]) -> bool:
        """Append an error and return True if the table is on meta and has entries to load."""
        has_entries = any(key.startswith(prefix) for key in state_dict)
        tensors = (*self.parameters(), *self.buffers())
        is_refused = has_entries and any(tensor.is_meta for tensor in tensors)
        if is_refused:
            errors.append(
                f"{prefix}: the table is on meta; call to_empty(device=...) of the model first"
            )
        return is_refused

    def __getstate__(self) -> dict[str, Any]:
        # Parameters are views of the module's memory: the copy of the collection binds them again.
        no_parameters = dict.fromkeys(self._parameters)
        return {**self.__dict__, "_parameters": no_parameters, "_owner": None}


def bind_view(handle: TableHandle, name: str, view: Tensor, optimizer: Optimizer) -> None:
    """Make the parameter `name` of a handle a view, and mark it for the optimizer.

    The parameter object stays, unless the device or the kind of tensor changes.

    Raises:
        RuntimeError: torch's `_apply_optimizer_in_backward` was applied to an object that cannot
            stay.
    """
    parameter = handle._parameters.get(name)
    if parameter is not None and torch._has_compatible_shallow_copy_type(parameter, view):
        parameters.set_data(parameter, view)
    else:
        if parameter is not None and is_marked_by_torch(parameter):
            raise RuntimeError(
                f"torch's own _apply_optimizer_in_backward was applied to table {handle.name!r} "
                "while it was on another device, and its hook cannot follow to the new parameter: "
                "apply it after to_empty(), or use emblib.collections.optimizers."
                "apply_optimizer_in_backward"
            )
        parameter = nn.Parameter(view, requires_grad=handle.is_trained(name))
        handle.register_parameter(name, parameter)
    if optimizer.deferred:
        parameters.ask_for_float32_gradient(parameter)
    is_cached = getattr(handle.module, "row_cache", None) is not None
    kind = parameters.CachedParameter if is_cached else parameters.ViewParameter
    parameters.set_owner(parameter, handle, kind)
    handle.set_trained(parameter, trained=parameter.requires_grad)
    register_with_optimizer(parameter, handle, optimizer)


def register_with_optimizer(
    parameter: nn.Parameter, handle: TableHandle, optimizer: Optimizer
) -> None:
    """Register a parameter with its handle, and mark it as stepped by a fused `optimizer`.

    If `optimizer` is not fused, such a mark of an earlier optimizer is removed, but not one that
    torch set.
    """
    _handles[parameter] = weakref.ref(handle)
    any_parameter: Any = parameter
    if autograd.is_fused(optimizer):  # deferred ones too: no other optimizer may step them
        any_parameter._in_backward_optimizers = [optimizer]
        for name in _TORCH_OPTIMIZER_ATTRIBUTES & any_parameter.__dict__.keys():
            delattr(any_parameter, name)
    elif hasattr(any_parameter, "_in_backward_optimizers") and not is_marked_by_torch(parameter):
        del any_parameter._in_backward_optimizers


def is_marked_by_torch(parameter: nn.Parameter) -> bool:
    """Return whether torch's own `_apply_optimizer_in_backward` gave it an optimizer."""
    return "_optimizer_classes" in parameter.__dict__


class TableHandles(nn.ModuleDict):
    """The handles of the tables of a collection by name, which cannot be replaced or removed.

    Lookups do not call the handles, so another module in the place of one would have no effect on
    them, but state dicts would have its rows.
    """

    def __init__(self, handles: Mapping[str, TableHandle]) -> None:
        super().__init__(handles)
        self._is_complete = True

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a handle at construction; raise RuntimeError later."""
        if "_is_complete" in self.__dict__:
            _refuse_other_tables(name)
        super().add_module(name, module)

    def clear(self) -> None:
        """Raise RuntimeError."""
        _refuse_other_tables(*self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", {}) or isinstance(value, nn.Module):
            _refuse_other_tables(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            _refuse_other_tables(name)
        super().__delattr__(name)

    def __delitem__(self, name: str) -> None:
        _refuse_other_tables(name)


def _refuse_other_tables(*names: str) -> NoReturn:
    raise RuntimeError(
        f"the tables of a collection cannot be replaced, removed or added, here {list(names)}: "
        "lookups do not go through these modules. Make a collection of other configurations, and "
        "load the rows of the tables that stay from a state dict"
    )
