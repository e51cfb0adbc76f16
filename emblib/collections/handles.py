"""Handles of tables: the modules under which a collection lists, saves and loads each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.collections.kernels import MetaPlaceholder, PartTables
from emblib.dynamic import DynamicEmbeddingBags, keys
from emblib.dynamic.hash_index import HASH_KEYS
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.tables import QuantizedEmbeddingBags, TTEmbeddingBag, parameters
from emblib.tt import layout_entry

# Set by torch's own _apply_optimizer_in_backward, whose hook stays on a parameter that is moved.
_MARKS_OF_TORCH = frozenset({"_optimizer_classes", "_optimizer_kwargs"})
_handles = WeakTensorKeyDictionary()  # of parameters, to weak references of their handles


def handle_of(parameter: nn.Parameter) -> TableHandle | None:
    """The handle of the table that a parameter is of, if it is of any."""
    found = _handles.get(parameter)
    return None if found is None else found()


class TableHandle(nn.Module):
    """One table of a collection, by the names its parameters have.

    The memory belongs to the kernel that the table is in, which moves it; parameters are views of
    it. With a fused optimizer they require a gradient and never get one: it is applied at once, and
    `_in_backward_optimizers` says so to those who collect parameters for an optimizer.
    """

    name = ""

    def __init__(self, kernel: nn.Module, index: int) -> None:
        super().__init__()
        self._owner: Any = None
        self.attach(kernel, index)

    def set_owner(self, owner: nn.Module, name: str) -> None:
        """Be the handle of the table called `name` in a collection."""
        self._owner, self.name = weakref.ref(owner), name

    def owner(self) -> Any:
        """The collection it belongs to, if there is one."""
        return None if self._owner is None else self._owner()

    def attach(self, kernel: nn.Module, index: int) -> None:
        """Become the handle of table `index` of `kernel`."""
        self._of = (kernel, index)  # in a tuple, so that it is no module of this one

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train the table from the next forward on, or leave it as it is."""
        if autograd.is_fused(self.kernel.optimizer) or isinstance(self.kernel, PartTables):
            self.kernel.set_table_trained(self.index, trained=trained)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", {}):
            parameters.refuse_replacement(name, value)
        super().__setattr__(name, value)

    @property
    def kernel(self) -> Any:
        """The module that looks the table up."""
        return self._of[0]

    @property
    def index(self) -> int:
        """The number of the table in it."""
        return self._of[1]

    def bind(self) -> None:
        """Let the parameters be where the kernel has its memory now."""

    def fused_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, if backward updates them."""
        return dict(self.named_parameters()) if autograd.is_fused(self.kernel.optimizer) else {}

    def take_over(self, given: Any) -> None:
        """Have the weights and the parameters of another handle of such a table."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # the kernel moves what it has

    def _is_on_meta(self, state_dict: Any, prefix: str, errors: list[str]) -> bool:
        """Whether there is no memory to load into, which is told."""
        given = any(key.startswith(prefix) for key in state_dict)
        on_meta = given and any(parameter.is_meta for parameter in self.parameters())
        if on_meta:
            errors.append(
                f"{prefix}: the table is on meta; call to_empty(device=...) of the model first"
            )
        return on_meta

    def __getstate__(self) -> dict[str, Any]:
        none = dict.fromkeys(self._parameters)
        return {**self.__dict__, "_parameters": none, "_owner": None}


class PlainHandle(TableHandle):
    """A plain table: `weight` `[rows, dim]`."""

    weight: nn.Parameter

    def bind(self) -> None:
        """Let `weight` be the view of the table."""
        kernel: PartTables = self.kernel
        bind(self, "weight", kernel.view_of(self.index)["weight"], kernel.optimizer)

    def take_over(self, given: PlainHandle) -> None:
        """Copy the rows, and have the parameter."""
        given.kernel._settle()
        with self.kernel._writing():
            own = self.kernel.view_of(self.index)["weight"]
            own.copy_(given.kernel.view_of(given.index)["weight"])
        given.weight.grad = None
        self._parameters["weight"] = given.weight

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.kernel.flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        metadata, *rest = arguments
        kernel: PartTables = self.kernel
        if self._is_on_meta(state_dict, prefix, rest[-1]):
            return
        # The parameter stays the view that it is, whatever load_state_dict(assign=...) says.
        metadata = {k: v for k, v in metadata.items() if k != "assign_to_params_buffers"}
        kernel._settle()
        with kernel._writing():
            super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class TTHandle(TableHandle):
    """A tensor-train table: `cores.0`, `cores.1`, ...; its state dict has its layout as well."""

    def attach(self, kernel: nn.Module, index: int) -> None:
        """Become the handle of `kernel`, which has one table."""
        super().attach(kernel, index)
        assert isinstance(kernel, TTEmbeddingBag)
        self.cores = kernel.cores

    def take_over(self, given: TTHandle) -> None:
        """Have the cores."""
        self.cores = self.kernel.cores = given.cores
        for core in self.cores:
            core.grad = None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{layout_entry.NAME}"] = layout_entry.entry(self.kernel.spec)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        unexpected, errors = arguments[-2:]
        self._is_on_meta(state_dict, prefix, errors)
        layout_entry.may_load(state_dict, prefix, self.kernel.spec, self.cores, errors)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}{layout_entry.NAME}" in unexpected:
            unexpected.remove(f"{prefix}{layout_entry.NAME}")

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**{layout_entry.NAME: layout_entry.entry(self.kernel.spec)})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return {layout_entry.NAME: "_names_in_checkpoints"}

    def bind(self) -> None:
        """Mark the cores."""
        kernel: TTEmbeddingBag = self.kernel
        for k, core in enumerate(self.cores):
            marked: Any = core
            marked.flag_tells = True
            core.requires_grad_(k not in kernel._frozen_cores)
            mark(core, self, kernel.optimizer)
        kernel._own_parameters()


class DynamicHandle(TableHandle):
    """A dynamic table: `weight` by slot; its state dict has keys, and with them all they have.

    Entries are `keys`, `stamps`, `weight`, `<optimizer state>` and whatever else eviction and
    admission keep, as in a state dict of `DynamicEmbeddingBags`. So optimizer states of dynamic
    tables are saved here and not with the optimizer: they mean nothing without the keys.
    """

    weight: nn.Parameter

    def bind(self) -> None:
        """Let `weight` be the view of the rows, by slot."""
        kernel: Any = self.kernel
        if isinstance(kernel, MetaPlaceholder):
            view = torch.empty(kernel.shapes[self.index], device="meta")
            bind(self, "weight", view, kernel.optimizer)
            return
        if not autograd.is_fused(kernel.optimizer):
            self._parameters["weight"] = kernel.weights
            mark(kernel.weights, self, kernel.optimizer)
            return
        view = kernel.rows.views(kernel.planes(), self.index)["weight"]
        bind(self, "weight", view, kernel.optimizer)

    def take_over(self, given: DynamicHandle) -> None:
        """Copy keys and rows."""
        if isinstance(self.kernel, MetaPlaceholder):
            self._parameters["weight"] = given.weight
            return
        entries = given.kernel.table_entries(given.index)
        rows = {"weight": entries.rows["weight"]}
        kernel, weight = self.kernel, given.weight
        hash_key = given.kernel.index.hash_key(given.index)
        kernel.set_table_entries(self.index, replace(entries, rows=rows), hash_key=hash_key)
        weight.grad = None
        if autograd.is_fused(kernel.optimizer):
            self._parameters["weight"] = weight
        else:
            parameters.disown(weight)
            weight.data = kernel.weights.data
            kernel.weights = weight

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        kernel: Any = self.kernel
        if isinstance(kernel, MetaPlaceholder):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        entries = kernel.table_entries(self.index)
        columns = {"keys": entries.keys, "stamps": entries.stamps, **entries.rows}
        if entries.scores is not None:
            columns["scores"] = entries.scores
        order = keys.canonical_order(entries.keys)
        for key, rows in columns.items():
            destination[prefix + key] = rows[order].cpu()
        destination[f"{prefix}clock"] = kernel.index.clock.cpu().clone()
        for key, value in kernel._others().items():
            destination[prefix + key] = value
        hash_keys = f"{prefix}index.{HASH_KEYS}"
        destination[hash_keys] = destination[hash_keys][self.index : self.index + 1]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Keys, and what is saved with them, replace those that are there."""
        _, _, missing, unexpected, errors = arguments
        if self._is_on_meta(state_dict, prefix, errors) or isinstance(self.kernel, MetaPlaceholder):
            missing.append(f"{prefix}keys")
            return
        kernel: DynamicEmbeddingBags = self.kernel
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        names, own = self._names(), f"{kernel.table_names[self.index]}."
        missing.extend(prefix + key for key in sorted(names - given.keys()))
        others = {key for key in given if key.partition(".")[0] in kernel._modules and "." in key}
        unexpected.extend(prefix + key for key in sorted(given.keys() - names - others))
        parts: dict[str, Tensor] = {}
        for key in (given.keys() & names) | others:
            shared = key == "clock" or key in others
            parts[key if shared else own + key] = given[key]
        try:
            kernel.load_state_dict(parts, strict=False)
        except RuntimeError as error:
            errors.append(f"{prefix}: {error}")

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """What a state dict has that is no parameter, as attributes."""
        kernel: DynamicEmbeddingBags = self.kernel
        others = {key.split(".")[0]: getattr(kernel, key.split(".")[0]) for key in kernel._others()}
        return SimpleNamespace(**{**dict.fromkeys(self._names(), 0), **others})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        names = [name for name in vars(self._names_in_checkpoints) if name != "weight"]
        return dict.fromkeys(names, "_names_in_checkpoints")

    def _names(self) -> set[str]:
        kernel: DynamicEmbeddingBags = self.kernel
        own = f"{kernel.table_names[self.index]}."
        names = {key for key in kernel._state_names() if key.startswith(own)}
        return {"clock", *(key.removeprefix(own) for key in names)}


class QuantizedHandle(TableHandle):
    """A quantised table: no parameters; its state dict has `values` and `scales`.

    It also loads the `weight` `[rows, dim]` of a plain table, and quantises it.
    """

    def take_over(self, given: QuantizedHandle) -> None:
        """Copy the rows."""
        for name, view in self.views().items():
            view.copy_(given.views()[name])

    def views(self) -> dict[str, Tensor]:
        """What the table has, as views."""
        found: dict[str, Tensor] = self.kernel.table_views()[self.index]
        return found

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**self.views())

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys(self.views(), "_names_in_checkpoints")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination.update({prefix + name: view for name, view in self.views().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing, unexpected, errors = arguments
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        views = self.views()
        if set(given) == {"weight"}:
            try:
                self.kernel.write_rows(self.index, given["weight"])
            except ValueError as error:
                errors.append(f"{prefix}weight: {error}")
            return
        missing.extend(prefix + name for name in sorted(views.keys() - given.keys()))
        unexpected.extend(prefix + name for name in sorted(given.keys() - views.keys()))
        found = {name: value for name, value in given.items() if name in views}
        wrong = [name for name, value in found.items() if value.shape != views[name].shape]
        errors.extend(
            f"{prefix}{name}: size mismatch: {tuple(found[name].shape)} is not that of the table, "
            f"{tuple(views[name].shape)}"
            for name in wrong
        )
        if not wrong:
            for name, value in found.items():
                views[name].copy_(value)


def make_handle(kernel: nn.Module, index: int) -> TableHandle:
    """The handle of a table of a kernel."""
    if isinstance(kernel, TTEmbeddingBag):
        return TTHandle(kernel, index)
    if isinstance(kernel, PartTables):
        return PlainHandle(kernel, index)
    if isinstance(kernel, QuantizedEmbeddingBags):
        return QuantizedHandle(kernel, index)
    return DynamicHandle(kernel, index)


def bind(handle: TableHandle, name: str, view: Tensor, optimizer: Optimizer) -> None:
    """Let a parameter be `view`: the same parameter where torch can let it follow."""
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
        trained = handle.index not in getattr(handle.kernel, "_untrained", ())
        parameter = nn.Parameter(view, requires_grad=trained)
        handle.register_parameter(name, parameter)
    parameters.own(parameter, handle, parameters.ViewParameter)
    if not isinstance(handle.kernel, MetaPlaceholder):
        handle.set_trained(parameter, trained=parameter.requires_grad)
    mark(parameter, handle, optimizer)


def mark(parameter: nn.Parameter, handle: TableHandle, optimizer: Optimizer) -> None:
    """Say of a parameter what it is of, and whether backward updates it."""
    _handles[parameter] = weakref.ref(handle)
    marked: Any = parameter
    if autograd.is_fused(optimizer):
        marked._in_backward_optimizers = [optimizer]
        for name in _MARKS_OF_TORCH & marked.__dict__.keys():
            delattr(marked, name)
    elif hasattr(marked, "_in_backward_optimizers") and not is_marked_by_torch(parameter):
        del marked._in_backward_optimizers


def is_marked_by_torch(parameter: nn.Parameter) -> bool:
    """Return whether torch's own `_apply_optimizer_in_backward` gave it an optimizer."""
    return "_optimizer_classes" in parameter.__dict__
