"""Dense storage: one stored row `[dim]` per id, in device memory, host memory or a file.

Tables with equal dtype, rounding, cache and optimizer share a `DenseModule`, a
`TableBatchedEmbeddingBags`; tables that are not pooled, or leave sparse gradients, must also agree
in dim. A `DenseHandle` shows one table as the parameter `weight` `[rows, dim]`, a view of the
module's memory. With a fused optimizer that is not deferred, backward updates the memory in place;
otherwise the parameters get gradients.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib.ops import autograd, keeping_parameters
from emblib.ops.cache import WAYS
from emblib.optim import Gradient, Optimizer
from emblib.specs import (
    CacheConfig,
    CachePolicy,
    MultiPassPrefetch,
    Placement,
    Pooling,
    TableSpec,
    format_config,
)
from emblib.storage.base import (
    MemoryBytes,
    RowTimes,
    Storage,
    TableModule,
    TableSlice,
    dense_gradient_ns,
    distinct_names,
    precision_of,
    row_bytes,
    state_bytes,
)
from emblib.storage.composed_lookup import LAYOUT, SHARED_ROWS
from emblib.storage.handles import TableHandle, bind_view
from emblib.storage.initial_values import draw
from emblib.tables import TableBatchedEmbeddingBags, parameters, state_dicts
from emblib.tables.locks import atomic
from emblib.tables.memory import TableOffset, cache_stride
from emblib.tables.row_cache import TAG_AND_STAMP_BYTES

_CONFLICT_BYTES = 8  # per set of a cache, see `RowCache.conflicts`
_S_PER_NS = 1e-9


@dataclass(frozen=True)
class Dense(Storage):
    """One stored row per id.

    Args:
        placement: the memory of the rows.
        cache: row cache of a table with placement MANAGED_CACHING or DISK; None is the default
            `CacheConfig()`, which lacks the directory that DISK needs. Tables of one collection
            that agree in cache, dtype, rounding and optimizer share one.

    Raises:
        TypeError: `cache` is not a `CacheConfig`.
        ValueError: `placement` is unknown, or has no cache though `cache` is not None.

    Example:
        >>> placement = emblib.Placement.MANAGED_CACHING
        >>> storage = emblib.storage.Dense(placement, emblib.CacheConfig(load_factor=0.2))
        >>> table = emblib.EmbeddingBagConfig(1_000, 16, "item", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table], optimizer=emblib.optim.SGD(0.1))
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> bags(batch).values().shape
        torch.Size([1, 16])
    """

    placement: Placement = Placement.DEVICE
    cache: CacheConfig | None = None

    plan_name: ClassVar[str] = "Plain"  # a former name of the class, which saved plans have
    is_alternative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", Placement(self.placement))
        if self.cache is not None and not isinstance(self.cache, CacheConfig):
            raise TypeError(f"cache must be None or a CacheConfig, got {self.cache!r}")
        if self.cache is not None and not self.placement.cached:
            raise ValueError(
                f"cache is for the placements MANAGED_CACHING and DISK, got {self.placement}"
            )

    @classmethod
    def from_plan(cls, values: Mapping[str, Any]) -> Dense:
        """Return the storage from its fields in a plan's JSON; `cache` is a mapping or None."""
        cache = values.get("cache")
        if cache is None:
            return cls(**values)
        dtype, passes = cache["dtype"], cache["passes"]
        objects = {
            "dtype": None if dtype is None else getattr(torch, dtype),
            "passes": None if passes is None else MultiPassPrefetch(**passes),
        }
        return cls(**{**values, "cache": CacheConfig(**{**cache, **objects})})

    def spec(self, rows: int, dim: int, name: str) -> TableSpec:
        """Return a table of this storage as the table modules take it."""
        return TableSpec(rows, dim, name, self.placement)

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module."""
        # A sparse gradient is a matrix, so its tables must be equally wide.
        is_sparse = optimizer.leaves_gradient is Gradient.SPARSE
        dim = table_slice.dim if is_sparse or pooling is Pooling.NONE else 0
        cache_rule = (self.placement.cached, self.cache)
        return ("dense", precision_of(table_slice), optimizer, cache_rule, dim)

    def make_module(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys.

        Raises:
            ValueError: the optimizer is `External`, and a table has a placement other than DEVICE
                and HOST.
        """
        _check_optimizer(slices, optimizer)
        return DenseModule(slices, feature_tables, optimizer, pooling, seeds, self.cache, device)

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of a table, which has the parameter `weight`."""
        return DenseHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return `weight` and the optimizer states of each table; flushes and empties caches."""
        module.flush_and_empty()
        views: list[dict[str, Tensor]] = module.table_views()
        return views

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Draw the initial values of all tables of a module again."""
        module.redraw(seeds)

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of rows and optimizer states in their memory, and of the cache."""
        weight_bytes = (
            table_slice.num_rows * table_slice.dim * table_slice.config.data_type.itemsize
        )
        itemsize = table_slice.config.data_type.itemsize
        table_bytes = weight_bytes + state_bytes(
            optimizer, table_slice.num_rows, table_slice.dim, itemsize
        )
        if not self.placement.cached:
            is_in_host_memory = self.placement is Placement.MANAGED and device == "cuda"
            return MemoryBytes(0, table_bytes) if is_in_host_memory else MemoryBytes(table_bytes)
        cache_bytes = self._cache_bytes(table_slice, optimizer)
        if self.placement is Placement.DISK:
            return MemoryBytes(cache_bytes, 0, table_bytes)
        # On the CPU the table is in the same memory as its cache.
        return (
            MemoryBytes(cache_bytes, table_bytes)
            if device == "cuda"
            else MemoryBytes(cache_bytes + table_bytes)
        )

    def _cache_bytes(self, table_slice: TableSlice, optimizer: Optimizer | None) -> int:
        """Return the device bytes of a cache that only this table uses.

        A shared cache takes more: each of its rows is as long as the longest row.
        """
        cache = self.cache or CacheConfig()
        dtype = cache.dtype or table_slice.config.data_type
        stride = cache_stride(table_slice.dim)
        bytes_of_states = state_bytes(optimizer, 1, stride, dtype.itemsize)
        bytes_per_slot = TAG_AND_STAMP_BYTES + stride * dtype.itemsize + bytes_of_states
        has_counts = cache.policy is CachePolicy.LFU
        bytes_of_counts = table_slice.num_rows * torch.int32.itemsize if has_counts else 0
        num_slots = num_cached_rows(self, table_slice.num_rows)
        return num_slots * bytes_per_slot + num_slots // WAYS * _CONFLICT_BYTES + bytes_of_counts

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to look up `ids` rows, with transfers from slower memory."""
        bytes_per_row = table_slice.dim * table_slice.config.data_type.itemsize
        ns_per_row = times.lookup_row_ns(table_slice, bytes_per_row, ids)
        return ids * ns_per_row + ids * self._transfer_ns(
            table_slice, optimizer, times, bytes_per_row, 0
        )

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to update `ids` rows, with transfers to slower memory."""
        bytes_per_row = row_bytes(optimizer, table_slice.dim, table_slice.config.data_type.itemsize)
        ns_per_row = times.update_row_ns(table_slice, bytes_per_row, ids)
        transfer_ns = ids * self._transfer_ns(
            table_slice, optimizer, times, bytes_per_row, bytes_per_row
        )
        return ids * ns_per_row + (transfer_ns + dense_gradient_ns(table_slice, optimizer, times))

    def _transfer_ns(
        self,
        table_slice: TableSlice,
        optimizer: Optimizer | None,
        times: RowTimes,
        bytes_read: float,
        bytes_written: float,
    ) -> float:
        """Return the nanoseconds per id to read and write memory other than the device's."""
        if self.placement in (Placement.DEVICE, Placement.HOST):
            return 0.0
        is_on_disk = self.placement is Placement.DISK
        if not is_on_disk and times.device != "cuda":
            return 0.0
        costs = times.costs
        bytes_per_s = float(costs.disk_bytes_per_s if is_on_disk else costs.host_bytes_per_s)
        if self.placement is Placement.MANAGED:
            return (bytes_read + bytes_written) / bytes_per_s / _S_PER_NS
        # Behind a cache the lookup makes all transfers; an update, which writes rows, makes none.
        if bytes_written:
            return 0.0
        cache = self.cache or CacheConfig()
        cached_share = cache.sets * WAYS / table_slice.num_rows if cache.sets else cache.load_factor
        bytes_per_row = row_bytes(optimizer, table_slice.dim, table_slice.config.data_type.itemsize)
        # A miss reads one row and writes an evicted one back.
        return max(0.0, 1.0 - cached_share) * 2 * bytes_per_row / bytes_per_s / _S_PER_NS


def num_cached_rows(storage: Dense, num_rows: int) -> int:
    """Return the number of rows in a cache that only one table uses, a multiple of 32.

    The number of sets is that of `row_cache.number_of_sets`, if the memory is not the limit.
    """
    cache = storage.cache or CacheConfig()
    num_sets = cache.sets or math.ceil(cache.load_factor * num_rows / WAYS)
    return max(min(num_sets, num_rows), 1) * WAYS


def view_name(parameter: str, state: str) -> str:
    """Return the key of a parameter's optimizer state in `views`."""
    return state if parameter == "weight" else f"{state}.{parameter}"


def _check_optimizer(slices: Sequence[TableSlice], optimizer: Optimizer) -> None:
    placement_by_table = {
        table_slice.config.name: str(spec.placement)
        for table_slice in slices
        if (spec := table_slice.spec).placement not in (Placement.DEVICE, Placement.HOST)
    }
    if placement_by_table and not autograd.is_fused(optimizer):
        raise ValueError(
            "tables outside the device are updated by emblib, which knows their cache, but "
            f"{format_config(optimizer)} leaves gradients to others; such tables are "
            f"{placement_by_table}: give the collection or these tables one of emblib.optim, e.g. "
            "optimizer=optim.SGD(lr=0.1)"
        )


class DenseModule(TableBatchedEmbeddingBags):
    """Dense tables in one module.

    `weights` is a buffer here: the parameters that users see are views of it, see `DenseHandle`.
    Arguments are those of `Storage.make_module`; `cache` is that of the tables' storage.
    """

    has_parameter_per_table = True

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        cache: CacheConfig | None,
        device: torch.device,
    ) -> None:
        self._slices, self._seeds = list(slices), list(seeds)
        self.table_parameters: list[Any] = [None] * len(slices)
        names = distinct_names([table_slice.config.name for table_slice in slices])
        super().__init__(
            [table_slice.spec_named(name) for table_slice, name in zip(slices, names, strict=True)],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=precision_of(slices[0]),
            cache=cache,
            device=device,
        )
        weights = self._parameters.pop("weights")
        assert weights is not None
        self.parameter_class = parameters.TableParameter  # of the views, one per table
        with torch._C.DisableTorchFunctionSubclass():
            self.register_buffer("weights", weights.detach(), persistent=False)
        self._weight_offsets = [
            autograd.WeightOffset(
                table_offset.weight_offset,
                table_offset.row_base,
                table_offset.rows,
                table_offset.dim,
            )
            for table_offset in self._memory.layout.offsets
        ]

    def _draw(self, table: int, weight: Tensor) -> None:
        draw(self._slices[table], weight, self._seeds[table])

    @atomic
    def view_of(self, table: int) -> dict[str, Tensor]:
        """Return views of a table: `weight` and optimizer states; rows in a cache may be newer.

        All pages of DISK tables are verified first.
        """
        self._memory.verify()  # the caller may read the views at any time
        return self._memory.view(table, self.weights.detach(), self._states())

    @property
    def dense(self) -> DenseModule:
        """Return the module of the dense tables: this one, in a `ComposedModule` its child."""
        return self

    def table_by_parameter(self, index: int) -> dict[str, int]:
        """Return {parameter: index of its table in this module} of a table of a collection."""
        return {"weight": index}

    @property
    def first_table(self) -> TableOffset:
        """Return the location of the first table in the memory."""
        return self._memory.layout.offsets[0]

    def redraw(self, seeds: Sequence[int]) -> None:
        """Draw the initial values again, one seed per table."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def commit(self) -> None:
        """Commit writes to the views, if the tables are on disk.

        The caller must have called `flush_and_empty`; rows that are in the cache would be lost.
        """
        with self.overwriting():
            pass

    def _parameters_by_feature(self) -> list[tuple[tuple[int, ...], nn.Parameter]]:
        features = (table_offset.feature(0) for table_offset in self._memory.layout.offsets)
        return list(zip(features, self.table_parameters, strict=True))

    def _gradient_parameters(self) -> tuple[list[Any], list[autograd.WeightOffset]]:
        return self.table_parameters, self._weight_offsets

    def __getstate__(self) -> dict[str, Any]:
        # A copy's handles set its parameters, in `bind`.
        return {**self.__dict__, "table_parameters": [None] * len(self._slices)}


class DenseHandle(TableHandle):
    """Handle of a dense table, the parameter `weight` `[rows, dim]`, or of a composed one."""

    module: DenseModule

    def attach(self, module: Any, index: int) -> None:
        """Attach to table `index` of `module`, which has one or more parameters."""
        self._table_by_parameter: dict[str, int] = module.table_by_parameter(index)
        super().attach(module.dense, next(iter(self._table_by_parameter.values())))

    def bind(self) -> None:
        """Make the parameters views of the module's memory."""
        module = self.module
        for name, table in self._table_by_parameter.items():
            bind_view(self, name, module.view_of(table)["weight"], module.optimizer)
            module.table_parameters[table] = getattr(self, name)

    def is_trained(self, name: str) -> bool:
        """Return whether the table of a parameter is trained; False if it is frozen."""
        return self._table_by_parameter[name] not in self.module.frozen_tables

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train or freeze the table of a parameter, with any optimizer."""
        for name, table in self._table_by_parameter.items():
            if self._parameters.get(name) is parameter:
                self.module.set_table_trained(table, trained=trained)

    def before_read(self) -> None:
        """Write the rows in the cache back; prefetched batches stay valid."""
        self.module.flush()

    def before_write(self) -> None:
        """Write the rows in the cache back, and empty it.

        Raises:
            RuntimeError: the table is on disk, where a write must be committed as a whole.
        """
        tables = self.module.tables
        if any(tables[t].placement is Placement.DISK for t in self._table_by_parameter.values()):
            raise RuntimeError(
                f"table {self.name!r} is on disk, where writes are committed: load a state dict "
                "instead of writing its parameter"
            )
        self.module.flush_and_empty()

    def views(self) -> dict[str, Tensor]:
        """Return views of parameters and optimizer states; flushes and empties the cache first."""
        module: DenseModule = self.module
        module.flush_and_empty()
        return {
            parameter if name == "weight" else view_name(parameter, name): view
            for parameter, table in self._table_by_parameter.items()
            for name, view in module.view_of(table).items()
        }

    def commit(self) -> None:
        """Commit writes to the views, if the table is on disk; `views` emptied the cache before."""
        self.module.commit()

    def adopt(self, other: DenseHandle) -> None:
        """Copy the rows of another handle, and take over its parameter objects.

        Optimizer states are not copied, and gradients of the parameters are dropped.
        """
        views = other.views()
        with self.module.overwriting():
            for name, table in self._table_by_parameter.items():
                self.module.view_of(table)["weight"].copy_(views[name])
        for name in self._table_by_parameter:
            parameter = other.get_parameter(name)
            parameter.grad = None
            self._parameters[name] = parameter

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.module.flush()
        with torch._C.DisableTorchFunctionSubclass():  # else each read flushes the cache again
            super()._save_to_state_dict(destination, prefix, keep_vars)

    @keeping_parameters()
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        metadata, *other_arguments = arguments
        module: DenseModule = self.module
        if state_dicts.refuse_invalid(self, state_dict, prefix, other_arguments[-1]):
            return
        if self._refuses_load_on_meta(state_dict, prefix, other_arguments[-1]):
            return
        # The parameter stays the view that it is, whatever load_state_dict(assign=...) asks for.
        metadata = {k: v for k, v in metadata.items() if k != state_dicts.ASSIGN}
        module.flush_and_empty()
        with module.overwriting(), torch._C.DisableTorchFunctionSubclass():
            super()._load_from_state_dict(state_dict, prefix, metadata, *other_arguments)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the table in a state dict."""
        if problem := self._mapping_problem(state_dict, prefix):
            yield problem
            return
        with torch._C.DisableTorchFunctionSubclass():
            tensors = state_dicts.loadable_tensors(self, prefix)
        yield from state_dicts.entry_problems(state_dict, tensors)

    def _mapping_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        """Return why ids read other rows than in the saved table, as a message; "" if not."""
        return f"{prefix}{LAYOUT}: {SHARED_ROWS}" if prefix + LAYOUT in state_dict else ""
