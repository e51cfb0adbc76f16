"""Group the tables of one rank into as few modules as possible, and look up a batch in them.

Slices of tables with equal `Storage.group_key` form a group, which one module stores
(`group_slices` lists the exceptions). A *unit* is a feature that reads a slice. In this file u, s
and g number units, slices and groups, and k the tables of a group's module.
`TableGroups.forward` takes a batch whose units must be sorted by group, splits ids and offsets by
group, calls each module once, and joins the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.ops.joint_step import JointStep
from emblib.ops.route import is_captured, take_or_fill
from emblib.optim import NO_UPDATE, Optimizer
from emblib.specs import BoundsCheck, Pooling, check_float_dtype, format_config
from emblib.storage import Storage, TableHandle, TableModule, TableSlice
from emblib.storage.initial_values import new_seeds
from emblib.tables import parameters
from emblib.tables.cache import BatchId
from emblib.tables.locks import ModuleLock

__all__ = ["SliceGroup", "SliceKey", "TableGroups"]


@dataclass(frozen=True)
class SliceGroup:
    """One group of slices, which one module stores.

    Attributes:
        units: indices of the units that the module looks up, in its order; () if none does.
        slices: indices of the slices, in the order of the module's tables.
        module: module of the slices.
        storage: storage of the slices, which agree in it.
    """

    units: tuple[int, ...]
    slices: tuple[int, ...]
    module: TableModule
    storage: Storage


class GroupInput(NamedTuple):
    """The part of a batch that one group looks up.

    During the capture of a CUDA graph the host does not know the positions of a part. Then every
    part has as many ids as the batch, with padding, ids of -1, in front.

    Attributes:
        slice_group: the group.
        begin, end: positions `[begin, end)` of the ids in the batch.
        ids: `[end - begin]`, dtype as in `TableGroups.forward`.
        offsets: `[bags + 1]`, positions in `ids`; ids before the first offset are padding.
        batch_sizes: `[units][ranks]`, if units differ in batch size; else None.
        sources: position in the batch of each of `ids`, int64 `[L]`, -1 for padding; None except in
            a capture.
    """

    slice_group: SliceGroup
    begin: int
    end: int
    ids: Tensor
    offsets: Tensor
    batch_sizes: Sequence[Sequence[int]] | None
    sources: Tensor | None = None

    def part_of(self, batch_tensor: Tensor) -> Tensor:
        """Return the group's part of a tensor `[L]` with one entry per id of the batch."""
        if self.sources is None:
            return batch_tensor[self.begin : self.end]
        return take_or_fill(batch_tensor, self.sources, 0)


@dataclass(frozen=True)
class GroupSpec:
    """Slices that share a module, before the module is made.

    Attributes:
        slices: indices of the slices, in the order of the module's tables.
        units: indices of the units that read them, in the module's order.
        optimizer: optimizer of the slices.
    """

    slices: tuple[int, ...]
    units: tuple[int, ...]
    optimizer: Optimizer


class SliceKey(NamedTuple):
    """A slice of a table: the table's name, and the rows and columns."""

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    @staticmethod
    def of(table_slice: TableSlice) -> SliceKey:
        """Return the key of a slice."""
        return SliceKey(table_slice.config.name, table_slice.rows, table_slice.columns)


class SharedSlice(Protocol):
    """A slice of a table that several `TableGroups` read; `groups` owns its memory."""

    groups: TableGroups
    joint: JointStep

    @property
    def is_joint(self) -> bool:
        """Return whether backward makes one update for all lookups of the slice."""

    @property
    def module(self) -> TableModule:
        """Return the module that has the memory."""

    @property
    def handle(self) -> TableHandle:
        """Return the handle of the table."""

    def reader(self, num_features: int, pooling: Pooling) -> TableModule:
        """Return the module with which units read the table."""


class TableGroups(nn.Module):
    """Look up units, each of which reads one slice of a table, and pool their bags.

    Slices that differ in storage, dtype or optimizer are in different modules. `forward` takes the
    units sorted by module, in the order `order`; with one active module it just calls that module.

    `handles[i]` has the parameters of slice i, views of its module's memory; `views(i)` has its
    optimizer states as well. The modules are not submodules, and there is no state dict: the
    collection registers the handles under the names of its tables.

    Args:
        slices: the slices of tables on this rank.
        slice_of_unit: index into `slices` for each unit.
        pooling: SUM or MEAN returns pooled bags `[B, output_dim]`, NONE one vector per id. MEAN is
            not for slices of rows or columns of a table: the caller adds the slices up and divides.
        optimizer: optimizer of tables whose configuration has none; None leaves dense gradients on
            the parameters, for an optimizer of torch.optim.
        device: device of the tables; None is torch's default device.
        seeds: seeds of the initial values, by table; None draws them from torch's generator. With
            equal seeds initial values do not depend on how a table is sharded. A hash table without
            a seed in its storage hashes its keys by this seed.
        shared: slices that other groups read too; their memory and optimizer are in
            `SharedSlice.module`.

    Attributes:
        order: the units in the order of `forward`.
        output_dim: columns of the output.
        column_of: first output column of each unit.
        dims: number of columns of each unit.
        groups: the modules, with the units of each; `active` has the groups that have units.
        has_one_module: whether exactly one group has units.
        breaks_graphs: whether the lookup of a group that has units is in no compiled graph.
        handles: one module per slice, with its parameters.
        seeds: seeds of the initial values, by table.

    Raises:
        KeyError: `seeds` lacks a table.
        ValueError: an index in `slice_of_unit` is not that of a slice, or a table does not support
            its optimizer.
    """

    _only_module: Any
    returns_sums_of_means = False
    """Whether the caller divides sums, and converts them to `output_dtype`: they are float32, since
    sums may be out of the range of a 16-bit mean."""

    def __init__(
        self,
        slices: Sequence[TableSlice],
        slice_of_unit: Sequence[int],
        *,
        pooling: Pooling,
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        seeds: Mapping[str, int] | None = None,
        shared: Mapping[SliceKey, SharedSlice] | None = None,
    ) -> None:
        super().__init__()
        self._shared = dict(shared or {})
        self.slices, self.slice_of_unit = tuple(slices), tuple(slice_of_unit)
        for u, s in enumerate(self.slice_of_unit):
            if not 0 <= s < len(self.slices):
                raise ValueError(f"slice_of_unit[{u}] must be in [0, {len(self.slices)}), got {s}")
        self.pooling = Pooling(pooling)
        self.optimizer, self.output_dtype = optimizer, torch.float32
        self._bounds_check, self._features = BoundsCheck.WARNING, [""] * len(self.slice_of_unit)
        self.device = torch.empty(0, device=device).device
        self.seeds = dict(new_seeds(self.slices) if seeds is None else seeds)
        shared_names = {key.table for key in self._shared}
        self._group_specs = group_slices(
            self.slices, self.slice_of_unit, optimizer, self.pooling, shared_names
        )
        self._prefetched: list[tuple[BatchId, list[GroupInput]]] = []
        # Prefetched batches must have the same order here and in the modules.
        self._lock = ModuleLock()
        self._table_modules = [
            self._make_table_module(g, self.device) for g in range(len(self._group_specs))
        ]
        self._assign_columns()
        self._make_handles()
        self._bind()

    def _make_table_module(self, group_index: int, device: torch.device) -> TableModule:
        """Make the module of a group, or a reader if its slice is shared."""
        group_spec = self._group_specs[group_index]
        slices = [self.slices[s] for s in group_spec.slices]
        shared = self._shared.get(SliceKey.of(slices[0]))
        if shared is not None:
            return shared.reader(len(group_spec.units), self.pooling)
        table_of_unit = [group_spec.slices.index(self.slice_of_unit[u]) for u in group_spec.units]
        seeds = [self.seeds[table_slice.config.name] for table_slice in slices]
        make_module = slices[0].storage.make_module
        return make_module(slices, table_of_unit, group_spec.optimizer, self.pooling, seeds, device)

    def _assign_columns(self) -> None:
        """Set the first output column of each group, in the order of units."""
        self.order = [u for group_spec in self._group_specs for u in group_spec.units]
        self.dims = [self.slices[s].dim for s in self.slice_of_unit]
        self.column_of = [0] * len(self.slice_of_unit)
        column = 0
        for u in self.order:
            self.column_of[u] = column
            column += 0 if self.pooling is Pooling.NONE else self.dims[u]
        self.output_dim = max(self.dims, default=0) if self.pooling is Pooling.NONE else column
        self._locations = {
            s: (g, k)
            for g, group_spec in enumerate(self._group_specs)
            for k, s in enumerate(group_spec.slices)
        }

    def _make_handles(self) -> None:
        """Make the handle of each slice; a shared slice has one already."""
        self.handles: list[TableHandle] = []
        for s in range(len(self.slices)):
            g, k = self._locations[s]
            shared = self._shared.get(SliceKey.of(self.slices[s]))
            if shared is not None:
                self.handles.append(shared.handle)
            else:
                self.handles.append(self._storage_of(g).make_handle(self._table_modules[g], k))

    def _bind(self) -> None:
        """Bind handles and parameters to the modules' current memory."""
        for s, handle in self.unshared_handles():
            g, k = self._locations[s]
            handle.attach(self._table_modules[g], k)
            handle.bind()
        self.groups = [
            SliceGroup(group_spec.units, group_spec.slices, table_module, self._storage_of(g))
            for g, (group_spec, table_module) in enumerate(
                zip(self._group_specs, self._table_modules, strict=True)
            )
        ]
        self.active = [slice_group for slice_group in self.groups if slice_group.units]
        self.has_one_module = len(self.active) == 1
        active_modules = nn.ModuleList(
            cast("nn.Module", slice_group.module) for slice_group in self.active
        )
        self.breaks_graphs = any(
            getattr(part, "breaks_graphs", False) for part in active_modules.modules()
        )
        self._views = parameters.registered_parameters(
            module for _, handle in self.unshared_handles() for module in handle.checked_modules()
        )
        # `self._only_module = ...` would make it a child of this module.
        only_module = self.active[0].module if self.has_one_module else None
        object.__setattr__(self, "_only_module", only_module)

    def unshared_handles(self) -> list[tuple[int, TableHandle]]:
        """Return (index of the slice, handle) of each slice that is not shared."""
        return [
            (s, handle)
            for s, handle in enumerate(self.handles)
            if SliceKey.of(self.slices[s]) not in self._shared
        ]

    def replace_handle(self, slice_index: int, handle: TableHandle) -> None:
        """Replace the handle of a slice, and bind it to the memory."""
        self.handles[slice_index] = handle
        self._bind()

    def check_parameters(self) -> None:
        """Raise RuntimeError where a parameter of a table was replaced."""
        parameters.check_registered(self._views)

    # Lookup

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        id_counts: Sequence[int] | None = None,
        use_counts: Tensor | None = None,
    ) -> Tensor:
        """Look up a batch: pooled rows, or one vector per id.

        Args:
            ids: int32 or int64 `[L]`, unit after unit in the order `order`; also uint64 if all
                tables are hash tables.
            offsets: int32 or int64 `[units * B + 1]`, of the bags in this order.
            weights: float32 `[L]`, scales each row.
            batch_sizes: `[units][ranks]` in this order, if units differ in batch size, as in
                `TableBatchedEmbeddingBags`. Pooled output is then one vector with one block per
                rank; a block has the rows of each unit's bags, unit after unit.
            id_counts: number of ids of each group that has units, used if several groups have
                units. None reads the numbers from `offsets`, for which the host waits for a GPU.
            use_counts: int64 `[L]`, number of uses of each id before the ids were deduplicated;
                only tables that count uses read it.

        Returns:
            `[B, output_dim]` if pooled, else `[L, D]`, in `output_dtype`. Unpooled units of
            different dims are one vector, id after id. Without units it is `[0, 0]`.

        Raises:
            RuntimeError: a parameter of a table was replaced.
        """
        if self._only_module is not None:
            parameters.check_registered(self._views)
            count_argument = (
                {} if use_counts is None else _count_argument(self.active[0], use_counts)
            )
            output: Tensor = self._only_module(
                ids, offsets, weights, batch_sizes=batch_sizes, **count_argument
            )
            return output
        outputs = self.outputs(
            ids,
            offsets,
            weights,
            batch_sizes=batch_sizes,
            id_counts=id_counts,
            use_counts=use_counts,
        )
        if not outputs:
            return torch.empty(0, 0, dtype=self.output_dtype, device=ids.device)
        if len(outputs) == 1:
            return outputs[0]
        if self.pooling is Pooling.NONE:
            has_one_width = all(output.shape[1] == outputs[0].shape[1] for output in outputs)
            return torch.cat(outputs if has_one_width else [output.view(-1) for output in outputs])
        return (
            torch.cat(outputs, 1)
            if batch_sizes is None
            else join_by_rank(self.active, self.dims, outputs, batch_sizes)
        )

    def outputs(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        id_counts: Sequence[int] | None = None,
        use_counts: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the output of each group that has units.

        The arguments are those of `forward`.
        """
        parameters.check_registered(self._views)
        inputs = self._take_prefetched(BatchId(ids, offsets))
        if inputs is None:
            inputs = split_batch(self.active, ids, offsets, batch_sizes, id_counts)
        outputs = []
        for group_input in inputs:
            slice_group, sizes = group_input.slice_group, group_input.batch_sizes
            scales = None if weights is None else group_input.part_of(weights)
            argument = {}
            if use_counts is not None:
                argument = _count_argument(slice_group, group_input.part_of(use_counts))
            outputs.append(
                slice_group.module(
                    group_input.ids, group_input.offsets, scales, batch_sizes=sizes, **argument
                )
            )
        return outputs

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of outputs: float32, float16 or bfloat16; else raise ValueError."""
        check_float_dtype("output_dtype", dtype)
        self.output_dtype = dtype
        module_dtype = torch.float32 if self.returns_sums_of_means else dtype
        modules: list[Any] = list(self._table_modules)
        for module in modules:
            module.output_dtype = module_dtype
            if hasattr(module, "precision"):
                module.precision = replace(module.precision, output=module_dtype)

    def set_bounds_check(self, bounds_check: BoundsCheck, features: Sequence[str]) -> None:
        """Set the reaction to invalid indices, and the feature names of the units for reports."""
        self._bounds_check, self._features = BoundsCheck(bounds_check), list(features)
        modules: list[Any] = list(self._table_modules)
        for group_spec, module in zip(self._group_specs, modules, strict=True):
            module.bounds_check = self._bounds_check
            tables = [self.slices[self.slice_of_unit[u]].config.name for u in group_spec.units]
            module.feature_labels = [
                f"feature {self._features[u]!r}, table {table!r}"
                for u, table in zip(group_spec.units, tables, strict=True)
            ]

    # Tables

    def table_modules(self) -> list[TableModule]:
        """Return the modules that look up and update, which are not among the submodules."""
        return list(self._table_modules)

    def module_of(self, slice_index: int) -> tuple[TableModule, int]:
        """Return the module of a slice, and the index of its table in the module."""
        shared = self._shared.get(SliceKey.of(self.slices[slice_index]))
        if shared is not None:
            return shared.module, 0
        g, k = self._locations[slice_index]
        return self._table_modules[g], k

    def views(self, slice_index: int) -> dict[str, Tensor]:
        """Return weight and optimizer states of a slice, as views: writes reach the table.

        A dense table has `weight` `[rows, dim]` and its states by name. A tensor train has
        `cores.0`, `cores.1`, ... and `<state>.0`, ..., and with a cache of rows `cache.weight` and
        `cache.<state>`. A hash table has rows by slot, a quantised table `packed`. A cache is
        flushed and emptied first. The views are invalid after the module moved.
        """
        return self.handles[slice_index].views()

    def all_views(self) -> list[dict[str, Tensor]]:
        """Return the `views` of every slice."""
        unshared_groups = {self._locations[s][0] for s, _ in self.unshared_handles()}
        views_by_group = {
            g: self._storage_of(g).views(self._table_modules[g]) for g in unshared_groups
        }
        locations = (self._locations[s] for s in range(len(self.slices)))
        return [
            views_by_group[g][k] if g in unshared_groups else self.handles[s].views()
            for s, (g, k) in enumerate(locations)
        ]

    def _storage_of(self, group_index: int) -> Storage:
        """Return the storage of a group, which all of its slices have."""
        return self.slices[self._group_specs[group_index].slices[0]].storage

    def shared_slices(self) -> list[SharedSlice]:
        """Return the shared slices, in the order of the groups."""
        return [
            self._shared[key]
            for group_spec in self._group_specs
            if (key := SliceKey.of(self.slices[group_spec.slices[0]])) in self._shared
        ]

    def parameters_of(self, slice_index: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a slice by name, e.g. `weight`, or `cores.0` and so on."""
        return dict(self.handles[slice_index].named_parameters())

    def reset_parameters(self, seeds: Mapping[str, int] | None = None) -> None:
        """Draw initial values, from a seed per table; reset optimizer states, steps and rates.

        None draws the seeds from torch's generator.

        Raises:
            KeyError: `seeds` lacks a table; nothing is changed then.
        """
        seeds = new_seeds(self.slices) if seeds is None else seeds
        absent_names = sorted({s.config.name for s in self.slices} - seeds.keys())
        if absent_names:
            raise KeyError(f"seeds must have one per table, and lack {absent_names}")
        self.seeds = dict(seeds)
        for g, (group_spec, module) in enumerate(
            zip(self._group_specs, self._table_modules, strict=True)
        ):
            names = [self.slices[s].config.name for s in group_spec.slices]
            shared = self._shared.get(SliceKey.of(self.slices[group_spec.slices[0]]))
            if shared is not None:
                shared.groups.reset_parameters({names[0]: self.seeds[names[0]]})
            else:
                self._storage_of(g).reset(module, [self.seeds[name] for name in names])

    @without_gradients
    def adopt(self, other: TableGroups) -> None:
        """Take over the weights and the parameter objects of `other`, which has the same slices.

        Optimizer states do not change. `other` must not be used afterwards.
        """
        frozen = frozen_parameters(
            (handle, other.handles[s]) for s, handle in self.unshared_handles()
        )
        for s, handle in self.unshared_handles():
            handle.adopt(other.handles[s])
        self._bind()
        freeze(frozen)

    def prefetch(
        self,
        ids: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        id_counts: Sequence[int] | None = None,
    ) -> None:
        """Load the rows of a later batch into the caches of the tables that have one.

        For hash tables with a backing store, rows in the store are read into memory. Without cached
        tables this does nothing.

        The arguments are those of `forward`, which must get the same tensor objects later, in the
        order of the prefetches, see `TableBatchedEmbeddingBags.prefetch`.
        """
        cached_modules = [
            slice_group.module for slice_group in self.active if is_cached(slice_group.module)
        ]
        if not cached_modules:
            return
        if self._only_module is not None:
            self._only_module.prefetch(ids, offsets, batch_sizes=batch_sizes)
            return
        inputs = split_batch(self.active, ids, offsets, batch_sizes, id_counts)
        with self._lock:
            for group_input in inputs:
                if is_cached(group_input.slice_group.module):
                    group_input.slice_group.module.prefetch(
                        group_input.ids, group_input.offsets, batch_sizes=group_input.batch_sizes
                    )
            self._prefetched.append((BatchId(ids, offsets), inputs))

    def _take_prefetched(self, batch_id: BatchId) -> list[GroupInput] | None:
        """Return the inputs of a batch that was prefetched as `batch_id`; drop earlier batches."""
        if not self._prefetched:
            return None
        with self._lock:
            batches = self._prefetched
            for i, (prefetched_id, inputs) in enumerate(batches):
                if batch_id.is_same(prefetched_id):
                    del batches[: i + 1]
                    return inputs
            if torch.is_grad_enabled():
                del batches[:1]  # the modules take it if the tensors are equal, and else raise
        return None

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state` and other memory, by name."""
        nbytes_by_name: dict[str, int] = {}
        for module in self._table_modules:
            for name, nbytes in module.nbytes().items():
                nbytes_by_name[name] = nbytes_by_name.get(name, 0) + nbytes
        return nbytes_by_name

    # As a module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.device)).device
        frozen = frozen_parameters((handle, handle) for _, handle in self.unshared_handles())
        for g, module in enumerate(self._table_modules):
            if self._storage_of(g).is_placeholder(module) and device.type != "meta":
                self._table_modules[g] = self._make_table_module(g, device)
                self._table_modules[g].train(self.training)
            else:
                module._apply(fn, recurse)
        self.set_output_dtype(self.output_dtype)  # modules may be new
        self.set_bounds_check(self._bounds_check, self._features)
        self.device = device
        self._bind()
        freeze(frozen)
        return self

    def train(self, mode: Any = True) -> TableGroups:
        """Set the training mode: hash tables insert keys only in training."""
        super().train(mode)
        for module in self._table_modules:
            module.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetched": [], "_views": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def extra_repr(self) -> str:
        """Return the modules."""
        return "\n".join(repr(module) for module in self._table_modules)


def frozen_parameters(
    handles: Iterable[tuple[TableHandle, TableHandle]],
) -> list[tuple[TableHandle, str]]:
    """Return (new handle, name) of each frozen parameter, for a later `freeze`.

    New modules train all parameters, so the frozen ones must be frozen again. `handles` has pairs
    (handle that will have the parameters, handle that has them now).
    """
    return [
        (handle, name)
        for handle, old_handle in handles
        for name, parameter in old_handle.named_parameters()
        if not parameter.requires_grad
    ]


def freeze(frozen: Iterable[tuple[TableHandle, str]]) -> None:
    """Freeze parameters, given as (handle, name), in the modules that have them now."""
    for handle, name in frozen:
        handle.get_parameter(name).requires_grad_(False)


def _count_argument(slice_group: SliceGroup, use_counts: Tensor) -> dict[str, Tensor]:
    """Return the keyword argument `counts` of a call, which only modules that count uses have."""
    return {"counts": use_counts} if slice_group.storage.counts_uses else {}


def group_slices(
    slices: Sequence[TableSlice],
    slice_of_unit: Sequence[int],
    optimizer: Optimizer | None,
    pooling: Pooling,
    shared_names: Collection[str] = (),
) -> list[GroupSpec]:
    """Group slices by `group_key`, ordered by their first unit; groups without units come last.

    Each slice of a table in `shared_names` is a group of its own, and slices of one hash table are
    in different groups. `optimizer` is for tables whose configuration has none.

    Raises:
        ValueError: a table has `rounding`, and its optimizer leaves gradients.
    """
    optimizers = [table_slice.config.optimizer or optimizer or NO_UPDATE for table_slice in slices]
    for table_slice, slice_optimizer in zip(slices, optimizers, strict=True):
        if table_slice.config.name in shared_names:
            continue
        if table_slice.config.rounding is not None and not autograd.is_fused(slice_optimizer):
            raise ValueError(
                f"rounding of {table_slice.config.name!r} is of updates that emblib makes, but "
                f"{format_config(slice_optimizer)} leaves gradients to others: give the table or "
                "its collection one of emblib.optim, e.g. optim.SGD(lr=0.1), or leave rounding out"
            )
    group_keys: list[Hashable] = [
        ("shared", i)
        if table_slice.config.name in shared_names
        else table_slice.storage.group_key(table_slice, i, optimizers[i], pooling)
        for i, table_slice in enumerate(slices)
    ]
    names_by_key: dict[Hashable, set[str]] = {}
    for i, table_slice in enumerate(slices):
        names_of_group = names_by_key.setdefault(group_keys[i], set())
        if table_slice.storage.is_keyed and table_slice.config.name in names_of_group:
            # A module renames its second slice of a table; initial values depend on the name.
            group_keys[i] = (group_keys[i], i)
        names_of_group.add(table_slice.config.name)
    order = dict.fromkeys([group_keys[s] for s in slice_of_unit] + group_keys)
    group_specs = []
    for key in order:
        slice_indices = tuple(i for i in range(len(slices)) if group_keys[i] == key)
        units = tuple(u for u, s in enumerate(slice_of_unit) if group_keys[s] == key)
        group_specs.append(GroupSpec(slice_indices, units, optimizers[slice_indices[0]]))
    return group_specs


def split_batch(
    groups: Sequence[SliceGroup],
    ids: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
    id_counts: Sequence[int] | None,
) -> list[GroupInput]:
    """Split a batch into the input of each group that has units.

    `ids` is `[L]`, `offsets` `[units * B + 1]`; inputs may be views of these. `id_counts` has the
    number of ids per group. If it is None and there are several groups, the host reads the numbers
    from `offsets`, and waits for a GPU. During the capture of a CUDA graph it reads nothing, and
    `batch_sizes` must be None.
    """
    if len(groups) == 1:
        return [GroupInput(groups[0], 0, ids.numel(), ids, offsets, batch_sizes)]
    bag_bounds = _bag_bounds(groups, offsets, batch_sizes)
    if id_counts is None and batch_sizes is None and is_captured(ids):
        return _split_captured(groups, ids, offsets, bag_bounds)
    if id_counts is None:
        # Not int(offsets[bag]): torch.export would need its value.
        id_bounds: list[Any] = (
            [offsets[bag].item() for bag in bag_bounds]
            if ids.is_cpu or torch.compiler.is_compiling()
            else offsets[bag_bounds].tolist()
        )
    else:
        id_bounds = [0, *accumulate(id_counts)]
    inputs, first_unit = [], 0
    for g, slice_group in enumerate(groups):
        first_id, end_id = id_bounds[g], id_bounds[g + 1]
        group_offsets = offsets[bag_bounds[g] : bag_bounds[g + 1] + 1]
        group_sizes = None
        if batch_sizes is not None:
            group_sizes = batch_sizes[first_unit : first_unit + len(slice_group.units)]
            first_unit += len(slice_group.units)
        if torch.compiler.is_compiling() or first_id:  # a graph may not know the number yet
            group_offsets = group_offsets - first_id
        inputs.append(
            GroupInput(
                slice_group, first_id, end_id, ids[first_id:end_id], group_offsets, group_sizes
            )
        )
    return inputs


def _split_captured(
    groups: Sequence[SliceGroup], ids: Tensor, offsets: Tensor, bag_bounds: Sequence[int]
) -> list[GroupInput]:
    """Split a batch without reading its offsets: each group gets padding before its ids."""
    num_ids, inputs = ids.numel(), []
    positions = torch.arange(num_ids, device=ids.device)
    for slice_group, (begin, end) in zip(groups, pairwise(bag_bounds), strict=True):
        group_offsets = offsets[begin : end + 1]
        shift = num_ids - group_offsets[-1:]
        sources = positions - shift
        sources = torch.where(sources >= group_offsets[:1], sources, -1)
        group_ids = take_or_fill(ids, sources, -1)
        inputs.append(
            GroupInput(slice_group, 0, num_ids, group_ids, group_offsets + shift, None, sources)
        )
    return inputs


def _bag_bounds(
    groups: Sequence[SliceGroup], offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
) -> list[int]:
    """Return the first bag of each group, and the number of all bags at the end."""
    unit_bounds = [0, *accumulate(len(slice_group.units) for slice_group in groups)]
    if batch_sizes is None:
        batch_size = (offsets.numel() - 1) // max(unit_bounds[-1], 1)
        return [batch_size * unit for unit in unit_bounds]
    bag_bounds = [0, *accumulate(sum(sizes) for sizes in batch_sizes)]
    return [bag_bounds[unit] for unit in unit_bounds]


def join_by_rank(
    groups: Sequence[SliceGroup],
    dims: Sequence[int],
    outputs: Sequence[Tensor],
    batch_sizes: Sequence[Sequence[int]],
) -> Tensor:
    """Join the outputs of groups for variable batch sizes: rank after rank, group after group.

    Args:
        groups: the groups, in the order of `outputs`.
        dims: columns of the output of each unit.
        outputs: output of each group, flat, rank after rank.
        batch_sizes: `[units][ranks]`, bags of each unit.
    """
    blocks, first_unit = [], 0
    for slice_group, output in zip(groups, outputs, strict=True):
        group_sizes = batch_sizes[first_unit : first_unit + len(slice_group.units)]
        first_unit += len(slice_group.units)
        unit_dims = [dims[u] for u in slice_group.units]
        lengths = [
            sum(num_bags * dim for num_bags, dim in zip(rank_sizes, unit_dims, strict=True))
            for rank_sizes in zip(*group_sizes, strict=True)
        ]
        blocks.append(output.split(lengths))
    return torch.cat([block for rank_blocks in zip(*blocks, strict=True) for block in rank_blocks])


class CachedModule(TableModule, Protocol):
    """A table module that can load rows ahead of their lookup."""

    def prefetch(
        self,
        ids: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Load the rows of a batch; the later `forward` must get the same tensors."""


def is_cached(module: TableModule) -> TypeGuard[CachedModule]:
    """Return whether tables of a module have a row cache or a backing store."""
    return any(getattr(module, name, None) is not None for name in ("row_cache", "backing"))
