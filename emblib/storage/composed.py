"""Storage whose rows are composed of rows of smaller dense tables.

A composed table stores one or two *components*, which are dense tables. An id maps to `count` rows
of the components, and these are combined to the row of the id (`Combine`). A subclass defines the
mapping (`map_ids`): `Hashed` and `QuotientRemainder` let ids share rows, `Narrow` stores fewer
columns and appends zeros. The components of all tables with one `group_key` are in one
`DenseModule`. A lookup maps the ids `[L]` to rows `[count * L]`, looks these up in one call, and
combines the `count` blocks of the result (`ComposedLookup`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emblib.optim import Gradient, Optimizer
from emblib.specs import BoundsCheck, Pooling, format_config
from emblib.storage.base import (
    CutUnits,
    KeyBlock,
    MemoryBytes,
    RowTimes,
    Span,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    dense_gradient_ns,
    kinds,
    precision_of,
    row_bytes,
    state_bytes,
)
from emblib.storage.composed_lookup import (
    LAYOUT,
    SHARED_ROWS,
    Combine,
    Component,
    ComposedLookup,
    ComposedTable,
    component_features,
    component_pooling,
    first_components,
)
from emblib.storage.dense import Dense, DenseHandle, DenseModule, view_name
from emblib.storage.handles import TableHandle
from emblib.tables import optimizer_hooks, state_dicts

_SEED_FACTOR = 0x632BE59BD9B4E019  # an arbitrary odd number, to separate seeds of components


class ComposedStorage(Storage):
    """Base of composed kinds of storage. Their tables are not sharded by rows."""

    has_dense_rows: ClassVar[bool] = False  # rows are composed, so they would take more memory

    # The mapping, which subclasses define

    @property
    def combine_mode(self) -> Combine:
        """Return how the rows that an id reads are combined."""
        return Combine.ADD

    @property
    def row_components(self) -> tuple[int, ...]:
        """Return, for each row that an id reads, the index of its component."""
        return (0,)

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the components of a table with `num_embeddings` ids."""
        raise NotImplementedError

    constant_names: ClassVar[tuple[str, ...]] = ()
    """Names of `mapping_constants` in error messages, in order; () leaves the constants out."""

    def mapping_constants(self) -> tuple[int, ...]:
        """Return the integers that parametrise `map_ids`.

        All tables of one kind of storage must have equally many, at least one; not checked.
        """
        raise NotImplementedError

    @staticmethod
    def map_ids(ids: Tensor, constants: Tensor, count: int) -> list[Tensor]:
        """Return the rows that ids read, `count` tensors int64 `[L]`.

        Args:
            ids: int64 `[L]`, each in `[0, num_embeddings)` of its table.
            constants: int64 `[n, L]` or `[n, 1]`, `mapping_constants()` of the table of each id.
            count: number of rows that an id reads.
        """
        raise NotImplementedError

    # Configuration

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for an `init_fn`, or for concatenation with an odd dim."""
        if table.init_fn is not None:
            raise ValueError(
                f"init_fn of {table.name!r} fills {table.num_embeddings} rows, which "
                f"{type(self).__name__} does not have: use weight_init_min and weight_init_max"
            )
        if self.combine_mode is Combine.CONCATENATE and table.embedding_dim % 2:
            raise ValueError(
                f"embedding_dim of {table.name!r} must be even, so that its rows are concatenated "
                f"from two halves, got {table.embedding_dim}"
            )

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Allow cuts between columns, unless rows are concatenated; allow none between rows."""
        is_cut = self.combine_mode is not Combine.CONCATENATE
        return CutUnits(table.num_embeddings, 1 if is_cut else table.embedding_dim)

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice that `cut_units` does not allow."""
        units = self.cut_units(table_slice.config)
        if table_slice.num_rows != units.rows or table_slice.dim % units.columns:
            raise ValueError(
                f"{table_slice.config.name!r} is stored as {self}, which is not cut by rows"
                f"{' or columns' if units.columns > 1 else ''}: place it whole"
                f"{'' if units.columns > 1 else ', or cut columns'}"
            )

    def num_stored_columns(self, dim: int) -> int:
        """Return the number of columns of the components of a table with `dim` columns."""
        return dim // 2 if self.combine_mode is Combine.CONCATENATE else dim

    def lookup_table(self, num_embeddings: int, dim: int) -> ComposedTable:
        """Return the description of a table, or of some of its columns, for `ComposedLookup`."""
        return ComposedTable(
            num_embeddings,
            dim,
            self.num_stored_columns(dim),
            self.components(num_embeddings),
            self.combine_mode,
            self.row_components,
            self.mapping_constants(),
            self.map_ids,
        )

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module."""
        is_sparse = optimizer.leaves_gradient is Gradient.SPARSE
        needs_equal_dims = pooling is Pooling.NONE or self.combine_mode is Combine.MULTIPLY
        dims = (
            (table_slice.dim, self.num_stored_columns(table_slice.dim))
            if is_sparse or needs_equal_dims
            else ()
        )
        return (
            type(self),
            self.combine_mode,
            self.row_components,
            precision_of(table_slice),
            optimizer,
            dims,
        )

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
            ValueError: `GlobalDecay`, which scales rows as they are pooled, of multiplied rows.
        """
        if self.combine_mode is Combine.MULTIPLY and optimizer_hooks.find_global_decay(optimizer):
            raise ValueError(
                f"{format_config(optimizer)} scales rows as they are pooled, but those of "
                f"{slices[0].config.name!r} are multiplied first: use combine='add', or an "
                "optimizer without global_decay"
            )
        return ComposedModule(slices, feature_tables, optimizer, pooling, seeds, device)

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of a table, which has a parameter per component."""
        return ComposedHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return the components of each table and their optimizer states."""
        table_views: list[dict[str, Tensor]] = module.views()
        return table_views

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Draw the initial values of all tables of a module again."""
        module.redraw(seeds)

    # Sharding and checkpoints

    def copy_slice(
        self,
        table_slice: TableSlice,
        source: TableHandle,
        target: TableHandle,
        key_block: KeyBlock | None,
    ) -> None:
        """Copy the columns of the slice of every component, and their optimizer states."""
        views = source.views()
        for name, view in target.views().items():
            source_view = views[name]
            is_cut = source_view.dim() > 1 and not table_slice.has_all_columns
            view.copy_(source_view[:, slice(*table_slice.columns)] if is_cut else source_view)

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return the layouts of the components; every shard has all their rows."""
        width = self.num_stored_columns(table.embedding_dim)
        is_cut = self.cut_units(table).columns == 1
        return {
            component.name: TensorLayout(
                (component.rows, width),
                table.data_type,
                _all_rows_region(component.rows) if is_cut else None,
            )
            for component in self.components(table.num_embeddings)
        }

    def state_views(self, parameter: str, optimizer: Optimizer) -> dict[str, str]:
        """Return for each optimizer state of a component its name in `views`."""
        return {state.name: view_name(parameter, state.name) for state in optimizer.states}

    def layout_entry(self, num_embeddings: int) -> Tensor:
        """Return a fingerprint of the mapping, int64 `[3 + n]`: equal if ids read the same rows."""
        kind_code = _kind_code(self.plan_name, self.combine_mode)
        count = len(self.row_components)
        fingerprint = [kind_code, num_embeddings, count, *self.mapping_constants()]
        return torch.tensor(fingerprint, dtype=torch.int64, device="cpu")

    def metadata_entries(self, table: TableDescription) -> dict[str, Tensor]:
        """Return the fingerprint of the mapping from ids to rows, which state dicts have."""
        return {LAYOUT: self.layout_entry(table.num_embeddings)}

    def check_entries(self, table: TableDescription, entries: Mapping[str, Tensor]) -> None:
        """Raise ValueError for components that were saved with another mapping of ids."""
        if not entries.keys().isdisjoint(self.parameter_layouts(table)):
            problem = describe_difference(
                entries.get(LAYOUT), self.layout_entry(table.num_embeddings)
            )
            if problem:
                raise ValueError(f"{table.name}: {problem}")

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of the components and their optimizer states."""
        itemsize, width = (
            table_slice.config.data_type.itemsize,
            self.num_stored_columns(table_slice.dim),
        )
        num_rows = sum(c.rows for c in self.components(table_slice.config.num_embeddings))
        return MemoryBytes(
            num_rows * width * itemsize + state_bytes(optimizer, num_rows, width, itemsize)
        )

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to look up the rows that `ids` read."""
        bytes_per_row = (
            self.num_stored_columns(table_slice.dim) * table_slice.config.data_type.itemsize
        )
        components = _component_slices(table_slice)
        return sum(
            ids * times.lookup_row_ns(components[index], bytes_per_row, ids)
            for index in self.row_components
        )

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to update the rows that `ids` read."""
        bytes_per_row = row_bytes(
            optimizer,
            self.num_stored_columns(table_slice.dim),
            table_slice.config.data_type.itemsize,
        )
        components = _component_slices(table_slice)
        updates = sum(
            ids * times.update_row_ns(components[index], bytes_per_row, ids)
            for index in self.row_components
        )
        return updates + sum(
            dense_gradient_ns(component, optimizer, times) for component in components
        )


def describe_difference(actual: Tensor | None, expected: Tensor | None) -> str:
    """Describe how the saved mapping of ids differs from the expected one; "" if it does not.

    None is a table without a mapping, each of whose ids reads its own row.
    """
    if expected is None:
        return "" if actual is None else SHARED_ROWS
    if actual is None:
        return f"the state dict lacks {LAYOUT}, so it is of another kind of table"
    if not torch.equal(actual.cpu(), expected):
        saved_storage, expected_storage = _describe_layout(actual), _describe_layout(expected)
        return (
            f"the ids of the saved table read other rows: its storage is {saved_storage}, here "
            f"{expected_storage}; use the storage of the saved table"
        )
    return ""


def _kind_code(plan_name: str, combine_mode: Combine) -> int:
    """Return the first number of a `layout_entry`, which identifies the kind of storage."""
    return zlib.crc32(f"{plan_name} {combine_mode.value}".encode())


def _describe_layout(layout: Tensor) -> str:
    """Describe a `layout_entry` by its storage: "Hashed(num_embeddings=9, reads=1, ...)"."""
    kind_code, *numbers = layout.flatten().tolist() or [0]
    for name, kind in kinds().items():
        if not issubclass(kind, ComposedStorage):
            continue
        for combine_mode in Combine:
            if _kind_code(name, combine_mode) == kind_code:
                names = ("num_embeddings", "reads", *kind.constant_names)
                fields = {**dict(zip(names, numbers, strict=False)), "combine": combine_mode.value}
                return f"{name}({', '.join(f'{key}={value}' for key, value in fields.items())})"
    return f"unknown ({LAYOUT} {layout.tolist()})"


def _all_rows_region(num_rows: int) -> Callable[[Span, Span], tuple[Span, Span]]:
    """Return a `TensorLayout.region`: any rows of the table need all rows of a component."""

    def region(_: Span, columns: Span) -> tuple[Span, Span]:
        return (0, num_rows), columns

    return region


class ComposedModule(ComposedLookup):
    """Module of composed tables of one kind; its child `dense` has all their components."""

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        tables = [
            self._storage_of(table_slice).lookup_table(
                table_slice.config.num_embeddings, table_slice.dim
            )
            for table_slice in slices
        ]
        super().__init__(tables, feature_tables, pooling)
        self._slices = tuple(slices)
        self._components = [table.components for table in tables]
        self._first_component = first_components(tables)
        self.dense = DenseModule(
            [component for table_slice in slices for component in _component_slices(table_slice)],
            component_features(tables, feature_tables),
            optimizer,
            component_pooling(tables[0].combine_mode, pooling),
            self._component_seeds(seeds),
            None,
            device,
        )
        self.dense.bounds_check = BoundsCheck.NONE  # the base class checks
        self.make_mapping_tensors(device)

    @staticmethod
    def _storage_of(table_slice: TableSlice) -> ComposedStorage:
        storage: Any = table_slice.storage
        assert isinstance(storage, ComposedStorage)
        return storage

    def _component_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return one seed per component, derived from one seed per table."""
        return [
            (seed + k * _SEED_FACTOR) % (2**63 - 1)
            for seed, components in zip(seeds, self._components, strict=True)
            for k in range(len(components))
        ]

    def begin_step(self, *, is_joint: bool) -> None:
        """Run the periodic part of the optimizer if this forward is the first of a step."""
        self.dense.begin_step(is_joint=is_joint)

    @property
    def components(self) -> DenseModule:
        """Return the module of all components."""
        return self.dense

    # Tables

    def table_by_parameter(self, index: int) -> dict[str, int]:
        """Return {parameter: index of its component in `dense`} of table `index`."""
        first_table = self._first_component[index]
        return {
            component.name: first_table + k for k, component in enumerate(self._components[index])
        }

    def layout_entry(self, index: int) -> Tensor:
        """Return the fingerprint of table `index`, see `ComposedStorage.layout_entry`."""
        table_slice = self._slices[index]
        return self._storage_of(table_slice).layout_entry(table_slice.config.num_embeddings)

    def views(self) -> list[dict[str, Tensor]]:
        """Return per table the views of its components and their optimizer states.

        A row cache is flushed and emptied first.
        """
        self.dense.flush_and_empty()
        table_views = self.dense.table_views()
        return [
            {
                parameter if name == "weight" else view_name(parameter, name): view
                for parameter, table in self.table_by_parameter(t).items()
                for name, view in table_views[table].items()
            }
            for t in range(len(self._slices))
        ]

    def redraw(self, seeds: Sequence[int]) -> None:
        """Draw the initial values again, one seed per table."""
        self.dense.redraw(self._component_seeds(seeds))

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of all components."""
        return self.dense.optimizer

    @property
    def hyper(self) -> Tensor:
        """Return `hyperparams`, by its name in state dicts."""
        return self.dense.hyperparams

    @property
    def hyperparams(self) -> Tensor:
        """Return the hyperparameters, float64, see `emblib.columns.Hyper`."""
        return self.dense.hyperparams

    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams` with saved values."""
        self.dense.load_hyperparams(values)

    def set_step(self, step: int) -> None:
        """Continue counting updates from `step`."""
        self.dense.set_step(step)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state` and `cache`."""
        return self.dense.nbytes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.make_mapping_tensors(self.dense.hyperparams.device)
        return self

    def extra_repr(self) -> str:
        """Return names and sizes of the tables, and their storage."""
        sizes = (
            f"{table_slice.config.name}: {table_slice.config.num_embeddings} x {table_slice.dim}"
            for table_slice in self._slices
        )
        return f"[{', '.join(sizes)}] {self._slices[0].storage}"


class ComposedHandle(DenseHandle):
    """Handle with one parameter per component; its state dict has the mapping's fingerprint."""

    def attach(self, module: Any, index: int) -> None:
        """Attach to table `index` of a `ComposedModule`."""
        self._layout = module.layout_entry(index)
        super().attach(module, index)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + LAYOUT] = self._layout.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        unexpected_keys = arguments[-2]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if prefix + LAYOUT in unexpected_keys:
            unexpected_keys.remove(prefix + LAYOUT)

    def _mapping_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        """Return why ids read other rows than in the saved table, as a message; "" if not."""
        if not any(prefix + name in state_dict for name in self._table_by_parameter):
            return ""
        saved_layout = state_dict.get(prefix + LAYOUT)
        problem = (
            "" if saved_layout is None else state_dicts.tensor_problem(saved_layout, self._layout)
        )
        problem = problem or describe_difference(saved_layout, self._layout)
        return f"{prefix}: {problem}" if problem else ""

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**{LAYOUT: self._layout})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return {LAYOUT: "_names_in_checkpoints"}


def _component_slices(table_slice: TableSlice) -> list[TableSlice]:
    """Return the components of a slice of a composed table, as slices of dense tables."""
    config: Any = table_slice.config
    storage: Any = config.storage
    low, high = config.bounds
    dim = storage.num_stored_columns(config.embedding_dim)
    columns = table_slice.columns if dim == config.embedding_dim else (0, dim)
    return [
        TableSlice(
            replace(
                config,
                num_embeddings=num_rows,
                embedding_dim=dim,
                storage=Dense(),
                weight_init_min=scale * low,
                weight_init_max=scale * high,
            ),
            (0, num_rows),
            columns,
        )
        for _, num_rows, scale in storage.components(config.num_embeddings)
    ]
