"""Storage whose rows are composed of rows of smaller dense tables.

A composed table stores one or two *components*: dense tables that together are smaller than it. An
id maps to `count` rows of the components; its own row is their sum, concatenation or product. A
subclass defines the mapping (`rows_read`): `Hashed` and `QuotientRemainder` let ids share rows,
`Narrow` stores fewer columns and appends zeros. The components of all tables of one kind and
optimizer are in one `DenseModule`: a lookup maps the ids `[L]` to rows `[count * L]`, looks them up
in one call, and combines the `count` blocks of the output.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from emblib.columns import FeatureColumn
from emblib.ops import autograd
from emblib.ops.route import is_captured, take_or_fill
from emblib.optim import Gradient, Optimizer
from emblib.specs import BoundsCheck, Choice, Pooling, brief
from emblib.storage.base import (
    CutUnits,
    KeyBlock,
    MemoryBytes,
    Rates,
    Span,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    dense_gradient_ns,
    kinds,
    row_bytes,
    state_bytes,
    stored_as,
)
from emblib.storage.dense import Dense, DenseHandle, DenseModule, view_name
from emblib.storage.handles import TableHandle
from emblib.tables import optimizer_hooks, state_dicts
from emblib.tables.base import check_bounds, variable_batch
from emblib.tables.bounds_report import is_padded

_SEED_FACTOR = 0x632BE59BD9B4E019  # an arbitrary odd number, to separate seeds of components


class Combine(Choice):
    """Operation that combines the rows which an id reads into its row.

    Example:
        >>> emblib.storage.QuotientRemainder(4_000, "add").combine
        <Combine.ADD: 'add'>
    """

    ADD = "add"
    """Their sum."""
    CONCATENATE = "concatenate"
    """The first has the first half of the columns, the second the other."""
    MULTIPLY = "multiply"
    """1 plus the first, times the second. Without the 1, both start near zero, and so do their
    gradients."""


class Component(NamedTuple):
    """A dense table that ids share.

    Attributes:
        name: name of its parameter.
        rows: number of rows.
        scale: bounds of its uniform initial values, divided by the bounds for the table.
    """

    name: str
    rows: int
    scale: float = 1.0


class ComposedStorage(Storage):
    """Base of composed kinds of storage; they are sharded by columns, unless concatenated."""

    has_dense_rows: ClassVar[bool] = False  # rows are composed, so they would take more memory

    # The mapping, which subclasses define

    @property
    def joining(self) -> Combine:
        """Return the operation that combines the rows which an id reads."""
        return Combine.ADD

    @property
    def row_components(self) -> tuple[int, ...]:
        """Return, for each row that an id reads, the index of its component."""
        return (0,)

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the components of a table with `num_embeddings` ids."""
        raise NotImplementedError

    number_names: ClassVar[tuple[str, ...]] = ()
    """Names of `mapping_numbers` in error messages; () for numbers without names."""

    def mapping_numbers(self) -> tuple[int, ...]:
        """Return the integers that parametrise `rows_read`.

        All tables of one kind of storage must have the same number of integers; not checked.
        """
        raise NotImplementedError

    @staticmethod
    def rows_read(ids: Tensor, numbers: Tensor, count: int) -> list[Tensor]:
        """Return the rows that valid ids read, `count` tensors int64 `[L]`.

        Args:
            ids: int64 `[L]`.
            numbers: int64 `[n, L]` or `[n, 1]`, `mapping_numbers()` of the table of each id.
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
        if self.joining is Combine.CONCATENATE and table.embedding_dim % 2:
            raise ValueError(
                f"embedding_dim of {table.name!r} must be even, so that its rows are concatenated "
                f"from two halves, got {table.embedding_dim}"
            )

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Allow cuts between any columns, not between rows; none if rows are concatenated."""
        is_cut = self.joining is not Combine.CONCATENATE
        return CutUnits(table.num_embeddings, 1 if is_cut else table.embedding_dim)

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice of rows, or of columns if rows are concatenated."""
        units = self.cut_units(table_slice.config)
        if table_slice.num_rows != units.rows or table_slice.dim % units.columns:
            raise ValueError(
                f"{table_slice.config.name!r} is stored as {self}, which is not cut by rows"
                f"{' or columns' if units.columns > 1 else ''}"
            )

    def stored_width(self, dim: int) -> int:
        """Return the number of columns of the components of a table with `dim` columns."""
        return dim // 2 if self.joining is Combine.CONCATENATE else dim

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module."""
        is_sparse = optimizer.leaves_gradient is Gradient.SPARSE
        unpooled = pooling is Pooling.NONE or self.joining is Combine.MULTIPLY
        dims = (
            (table_slice.dim, self.stored_width(table_slice.dim)) if is_sparse or unpooled else ()
        )
        return (
            type(self),
            self.joining,
            self.row_components,
            stored_as(table_slice),
            optimizer,
            dims,
        )

    def make_module(
        self,
        slices: Sequence[TableSlice],
        reads: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys.

        Raises:
            ValueError: `GlobalDecay`, which scales rows as they are pooled, of multiplied rows.
        """
        if self.joining is Combine.MULTIPLY and optimizer_hooks.global_decay(optimizer):
            raise ValueError(
                f"{brief(optimizer)} scales rows as they are pooled, but those of "
                f"{slices[0].config.name!r} are multiplied first: use combine='add', or an "
                "optimizer without global_decay"
            )
        return ComposedModule(slices, reads, optimizer, pooling, seeds, device)

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
        """Copy the columns of the slice of every component."""
        views = source.views()
        for name, view in target.views().items():
            source_view = views[name]
            cut = source_view.dim() > 1 and not table_slice.has_all_columns
            view.copy_(source_view[:, slice(*table_slice.columns)] if cut else source_view)

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return the layouts of the components; every shard has all their rows."""
        width = self.stored_width(table.embedding_dim)
        is_cut = self.cut_units(table).columns == 1
        return {
            component.name: TensorLayout(
                (component.rows, width),
                table.data_type,
                _all_rows(component.rows) if is_cut else None,
            )
            for component in self.components(table.num_embeddings)
        }

    def state_views(self, parameter: str, optimizer: Optimizer) -> dict[str, str]:
        """Return for each optimizer state of a component its name in `views`."""
        return {state.name: view_name(parameter, state.name) for state in optimizer.states}

    def layout_entry(self, num_embeddings: int) -> Tensor:
        """Return a fingerprint of the mapping, int64: equal if ids read the same rows."""
        kind = _fingerprint(self.plan_name, self.joining)
        numbers = [kind, num_embeddings, len(self.row_components), *self.mapping_numbers()]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def metadata_entries(self, table: TableDescription) -> dict[str, Tensor]:
        """Return the fingerprint of the mapping from ids to rows, which state dicts have."""
        return {LAYOUT: self.layout_entry(table.num_embeddings)}

    def check_entries(self, table: TableDescription, entries: Mapping[str, Tensor]) -> None:
        """Raise ValueError for components that were saved with another mapping of ids."""
        if not entries.keys().isdisjoint(self.parameter_layouts(table)):
            problem = _describe_difference(
                entries.get(LAYOUT), self.layout_entry(table.num_embeddings)
            )
            if problem:
                raise ValueError(f"{table.name}: {problem}")

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of the components and their optimizer states."""
        itemsize, width = table_slice.config.data_type.itemsize, self.stored_width(table_slice.dim)
        rows = sum(c.rows for c in self.components(table_slice.config.num_embeddings))
        return MemoryBytes(rows * width * itemsize + state_bytes(optimizer, rows, width, itemsize))

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, rates: Rates
    ) -> float:
        """Return the nanoseconds to look up the rows that `ids` read."""
        row = self.stored_width(table_slice.dim) * table_slice.config.data_type.itemsize
        components = _component_slices(table_slice)
        return sum(ids * rates.lookup_row_ns(components[c], row, ids) for c in self.row_components)

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, rates: Rates
    ) -> float:
        """Return the nanoseconds to update the rows that `ids` read."""
        row = row_bytes(
            optimizer, self.stored_width(table_slice.dim), table_slice.config.data_type.itemsize
        )
        components = _component_slices(table_slice)
        updates = sum(
            ids * rates.update_row_ns(components[c], row, ids) for c in self.row_components
        )
        return updates + sum(
            dense_gradient_ns(component, optimizer, rates) for component in components
        )


LAYOUT = "id_layout"  # in state dicts


def _describe_difference(actual: Tensor | None, expected: Tensor) -> str:
    """Describe how the saved mapping of ids differs from the expected one; "" if it does not."""
    if actual is None:
        return f"the state dict lacks {LAYOUT}, so it is of another kind of table"
    if not torch.equal(actual.cpu(), expected):
        saved, here = _describe_layout(actual), _describe_layout(expected)
        return (
            f"the ids of the saved table read other rows: its storage is {saved}, here {here}; use "
            "the storage of the saved table"
        )
    return ""


def _fingerprint(plan_name: str, joining: Combine) -> int:
    """Return the number that stands for a kind of storage in a layout."""
    return zlib.crc32(f"{plan_name} {joining.value}".encode())


def _describe_layout(layout: Tensor) -> str:
    """Describe a layout by its storage, e.g. "Hashed(num_embeddings=9, reads=1, ...)"."""
    fingerprint, *numbers = layout.flatten().tolist() or [0]
    for name, kind in kinds().items():
        if not issubclass(kind, ComposedStorage):
            continue
        for joining in Combine:
            if _fingerprint(name, joining) == fingerprint:
                names = ("num_embeddings", "reads", *kind.number_names)
                fields = {**dict(zip(names, numbers, strict=False)), "combine": joining.value}
                return f"{name}({', '.join(f'{key}={value}' for key, value in fields.items())})"
    return f"unknown ({LAYOUT} {layout.tolist()})"


def _all_rows(rows: int) -> Callable[[Span, Span], tuple[Span, Span]]:
    """Return a region function: any rows of the table need all rows of a component."""

    def region(_: Span, columns: Span) -> tuple[Span, Span]:
        return (0, rows), columns

    return region


class ComposedModule(nn.Module):
    """Module of composed tables of one kind; its child `dense` has all their components.

    Bounds are checked once, before ids are mapped; `bounds_check` selects whether violations are
    counted and repaired, or raise. In every mode invalid ids read the rows of id 0.
    """

    bounds_check = BoundsCheck.WARNING

    def __init__(
        self,
        slices: Sequence[TableSlice],
        reads: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._slices, self._reads = tuple(slices), tuple(reads)
        first_storage: Any = slices[0].storage
        self._storage: ComposedStorage = first_storage
        self._rows_per_id = len(first_storage.row_components)
        self.pooling, self.output_dtype = pooling, torch.float32
        self._dims = [slices[t].dim for t in reads]
        self._widths = [self._storage_of(slices[t]).stored_width(slices[t].dim) for t in reads]
        self._components = [
            self._storage_of(table_slice).components(table_slice.config.num_embeddings)
            for table_slice in slices
        ]
        self._first_component = [0, *accumulate(len(components) for components in self._components)]
        features = [
            self._first_component[t] + self._storage_of(slices[t]).row_components[k]
            for k in range(self._rows_per_id)
            for t in reads
        ]
        is_multiplied = first_storage.joining is Combine.MULTIPLY
        self.dense = DenseModule(
            [component for table_slice in slices for component in _component_slices(table_slice)],
            features,
            optimizer,
            Pooling.NONE if is_multiplied else pooling,
            self._component_seeds(seeds),
            None,
            device,
        )
        self.dense.bounds_check = BoundsCheck.NONE  # this module checks
        self._mapping_numbers = self.features = self.bounds_violations = torch.empty(0)
        self._make_mapping_tensors(device)

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

    def _make_mapping_tensors(self, device: torch.device) -> None:
        """Make the tensors that parametrise the mapping of ids, one column per feature."""
        numbers = [self._storage_of(self._slices[t]).mapping_numbers() for t in self._reads]
        num_ids = [self._slices[t].config.num_embeddings for t in self._reads]
        features = torch.zeros(len(num_ids), len(FeatureColumn), dtype=torch.int64)
        features[:, FeatureColumn.ROWS] = torch.tensor(num_ids, dtype=torch.int64)
        features[:, FeatureColumn.DIM] = torch.tensor(self._dims, dtype=torch.int64)
        shape = (len(self._reads), -1) if self._reads else (0, 1)
        self._mapping_numbers = torch.tensor(numbers, dtype=torch.int64).view(shape).t().to(device)
        self.features = features.to(device)
        self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=device)
        self._has_one_mapping = len(set(zip(numbers, num_ids, strict=True))) == 1

    # Lookup

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Look up a batch; arguments and output are those of `TableBatchedEmbeddingBags`.

        `ids` is `[L]`, `offsets` `[F * B + 1]`, `weights` float32 `[L]` or None.
        """
        layout = None
        if batch_sizes is not None:
            num_bags = max(offsets.numel() - 1, 0)
            layout = variable_batch(batch_sizes, self._dims, num_bags, ids.device).bag_layout
        offsets = check_bounds(self, ids, offsets, self.features, layout)
        rows = self._rows_of(ids, offsets, batch_sizes)
        count = self._rows_per_id
        all_rows = rows[0] if count == 1 else torch.cat(rows)
        all_offsets = offsets if count == 1 else _repeat_bags(offsets, count, 0, ids.numel())
        sizes = None if batch_sizes is None else [*batch_sizes] * count
        if self._storage.joining is Combine.MULTIPLY:
            out = self._multiply_and_pool(all_rows, all_offsets, offsets, weights, batch_sizes)
            return out.to(self.output_dtype)
        scales = None if weights is None else torch.cat([weights] * count)
        if self.pooling is Pooling.MEAN and count > 1 and _may_have_padding(ids):
            # Padding between two blocks would count in the length of the bag before it.
            sources, all_offsets = _padding_first(offsets, count, ids.numel())
            all_rows = take_or_fill(all_rows, sources, -1)
            scales = None if scales is None else take_or_fill(scales, sources, 0)
        looked_up: Tensor = self.dense(all_rows, all_offsets, scales, batch_sizes=sizes)
        return self._combine(looked_up, batch_sizes).to(self.output_dtype)

    def _rows_of(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> list[Tensor]:
        """Map ids to `_rows_per_id` tensors of rows `[L]`.

        Id -1 stays -1, and other invalid ids read the rows of id 0.
        """
        if not self._reads:
            return [ids] * self._rows_per_id
        if self._has_one_mapping:
            numbers, num_ids = self._mapping_numbers[:, :1], self.features[:1, FeatureColumn.ROWS]
        else:
            feature = self._features_of(ids, offsets, batch_sizes)
            numbers, num_ids = (
                self._mapping_numbers[:, feature],
                self.features[feature, FeatureColumn.ROWS],
            )
        int64_ids = ids.long()
        valid = (int64_ids >= 0) & (int64_ids < num_ids)
        row_ids = self._storage.rows_read(
            torch.where(valid, int64_ids, 0), numbers, self._rows_per_id
        )
        return [torch.where(int64_ids == -1, int64_ids, rows).to(ids.dtype) for rows in row_ids]

    def _features_of(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Return the index of the feature of each id, int64 `[L]`."""
        num_features = len(self._reads)
        bag_counts = [(offsets.numel() - 1) // num_features] * num_features
        if batch_sizes is not None:
            bag_counts = [sum(sizes) for sizes in batch_sizes]
        borders = offsets[list(accumulate(bag_counts))[:-1]].long()
        position = torch.arange(ids.numel(), device=ids.device)
        return torch.bucketize(position, borders, right=True)

    def _combine(self, looked_up: Tensor, batch_sizes: Sequence[Sequence[int]] | None) -> Tensor:
        """Combine the looked-up blocks, one per row of an id, into one block of rows or bags.

        `looked_up` is `[B, rows per id * columns]`, `[rows per id * L, dim]` without pooling, or
        flat with `batch_sizes`; the result has the same form for one row per id.
        """
        count = self._rows_per_id
        is_concatenated = self._storage.joining is Combine.CONCATENATE
        if count == 1:
            return looked_up if self._widths == self._dims else self._widen(looked_up, batch_sizes)
        if self.pooling is Pooling.NONE:
            blocks = looked_up.view(count, -1, looked_up.shape[1])
            return blocks.transpose(0, 1).flatten(1) if is_concatenated else blocks.sum(0)
        if batch_sizes is None:
            width = looked_up.shape[1] // count
            blocks = looked_up.view(-1, count, width)
            return self._concatenate_columns(blocks.unbind(1)) if is_concatenated else blocks.sum(1)
        by_rank = list(zip(*batch_sizes, strict=True))
        lengths = [
            [n * width for n, width in zip(bag_counts, self._widths, strict=True)]
            for bag_counts in by_rank
        ]
        rank_blocks = looked_up.split([count * sum(rank_lengths) for rank_lengths in lengths])
        joined = []
        for rank_block, rank_lengths in zip(rank_blocks, lengths, strict=True):
            blocks = rank_block.view(count, -1)
            if not is_concatenated:
                joined.append(blocks.sum(0))
                continue
            for block, width in zip(blocks.split(rank_lengths, 1), self._widths, strict=True):
                joined.append(block.view(count, -1, width).transpose(0, 1).reshape(-1))
        return torch.cat(joined)

    def _concatenate_columns(self, blocks: Sequence[Tensor]) -> Tensor:
        """Concatenate the columns of all blocks, feature by feature."""
        columns_by_feature = zip(*(block.split(self._widths, 1) for block in blocks), strict=True)
        return torch.cat(
            [columns for feature_columns in columns_by_feature for columns in feature_columns], 1
        )

    def _widen(self, looked_up: Tensor, batch_sizes: Sequence[Sequence[int]] | None) -> Tensor:
        """Append zero columns to each feature, up to the dim of its table."""
        pad_widths = [dim - width for dim, width in zip(self._dims, self._widths, strict=True)]
        pad = nn.functional.pad
        if self.pooling is Pooling.NONE:
            return pad(looked_up, (0, pad_widths[0]))
        if batch_sizes is None:
            blocks = looked_up.split(self._widths, 1)
            padded = [pad(block, (0, n)) for block, n in zip(blocks, pad_widths, strict=True)]
            return torch.cat(padded, 1)
        counts = [n for rank_sizes in zip(*batch_sizes, strict=True) for n in rank_sizes]
        block_widths, block_pads = (
            list(widths) * len(batch_sizes[0]) for widths in (self._widths, pad_widths)
        )
        blocks = looked_up.split([n * width for n, width in zip(counts, block_widths, strict=True)])
        sizes = zip(blocks, block_widths, block_pads, strict=True)
        return torch.cat([pad(b.view(-1, width), (0, zeros)).view(-1) for b, width, zeros in sizes])

    def _multiply_and_pool(
        self,
        rows: Tensor,
        all_offsets: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Look up two rows a and b per id, and pool the products (1 + a) * b.

        For pooling NONE the products are the result; weights then raise ValueError.
        """
        sizes = None if batch_sizes is None else [*batch_sizes] * self._rows_per_id
        updates_only = not torch.compiler.is_compiling() and autograd.is_for_update()
        with autograd.with_values() if updates_only else contextlib.nullcontext():
            looked_up = self.dense(rows, all_offsets, batch_sizes=sizes).float()
        quotient_rows, remainder_rows = looked_up.view(self._rows_per_id, -1, looked_up.shape[1])
        products = (1.0 + quotient_rows) * remainder_rows
        if self.pooling is Pooling.NONE:
            if weights is not None:
                raise ValueError(
                    "per_sample_weights scale rows that are pooled; unpooled tables have none"
                )
            return products
        if weights is not None:
            products = products * weights[:, None]
        dim = products.shape[1]
        bags = torch.segment_reduce(
            products, "sum", offsets=offsets.long(), axis=0, initial=0.0, unsafe=True
        )
        if self.pooling is Pooling.MEAN:
            bags = bags / offsets.diff().clamp(min=1)[:, None]
        if batch_sizes is None:
            return bags.view(len(self._reads), -1, dim).transpose(0, 1).flatten(1)
        blocks = iter(bags.split([n for rank_sizes in batch_sizes for n in rank_sizes]))
        by_feature = [[next(blocks) for _ in rank_sizes] for rank_sizes in batch_sizes]
        in_order = [block for rank_blocks in zip(*by_feature, strict=True) for block in rank_blocks]
        return torch.cat(in_order).view(-1)

    # Tables

    def tables_of(self, index: int) -> dict[str, int]:
        """Return {parameter: index of its table in `dense`} of a table."""
        first_table = self._first_component[index]
        return {c.name: first_table + k for k, c in enumerate(self._components[index])}

    def layout_entry(self, index: int) -> Tensor:
        """Return the entry of a table in state dicts, see `ComposedStorage.layout_entry`."""
        table_slice = self._slices[index]
        return self._storage_of(table_slice).layout_entry(table_slice.config.num_embeddings)

    def views(self) -> list[dict[str, Tensor]]:
        """Return per table the views of its components and their optimizer states.

        A row cache is flushed and emptied first.
        """
        self.dense.settle()
        table_views = self.dense.table_views()
        return [
            {
                parameter if name == "weight" else view_name(parameter, name): view
                for parameter, number in self.tables_of(t).items()
                for name, view in table_views[number].items()
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
        """Take over saved `hyperparams`."""
        self.dense.load_hyperparams(values)

    def set_step(self, step: int) -> None:
        """Continue counting updates from `step`."""
        self.dense.set_step(step)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state` and `cache`."""
        return self.dense.nbytes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._make_mapping_tensors(self.dense.hyperparams.device)
        return self

    def extra_repr(self) -> str:
        """Return names and sizes of the tables, and their storage."""
        sizes = (f"{s.config.name}: {s.config.num_embeddings} x {s.dim}" for s in self._slices)
        return f"[{', '.join(sizes)}] {self._storage}"


def _repeat_bags(offsets: Tensor, count: int, begin: Tensor | int, num_ids: Tensor | int) -> Tensor:
    """Return the offsets of the bags of `count` blocks, `[count * bags + 1]`.

    Block k has the bags of `offsets` `[bags + 1]`, `begin + k * num_ids` positions later; its last
    bag ends where the first bag of the next block begins.
    """
    blocks = [
        offsets[: None if k + 1 == count else -1] + (begin + k * num_ids) for k in range(count)
    ]
    return torch.cat(blocks)


def _may_have_padding(ids: Tensor) -> bool:
    """Return whether ids of -1 may precede the first bag, see `CapturedStep` and `GroupInput`."""
    return not torch.compiler.is_compiling() and (is_padded() or is_captured(ids))


def _padding_first(offsets: Tensor, count: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """Move the padding of `count` blocks of `num_ids` lookups in front of the first block.

    The first `offsets[0]` lookups of a block are padding. No number is read from the device.

    Returns:
        int64 `[count * num_ids]`, the source of each lookup, -1 for padding; and the offsets of the
        bags of all blocks.
    """
    padding = offsets[:1]
    positions = torch.arange(count * num_ids, device=offsets.device) - count * padding
    block = positions // (num_ids - padding).clamp(min=1)
    sources = torch.where(positions >= 0, positions + padding * (block + 1), -1)
    moved_offsets = _repeat_bags(offsets, count, (count - 1) * padding, num_ids - padding)
    return sources, moved_offsets


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
        unexpected = arguments[-2]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if prefix + LAYOUT in unexpected:
            unexpected.remove(prefix + LAYOUT)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the table in a state dict."""
        if any(prefix + name in state_dict for name in self._tables):
            saved = state_dict.get(prefix + LAYOUT)
            problem = "" if saved is None else state_dicts.tensor_problem(saved, self._layout)
            problem = problem or _describe_difference(saved, self._layout)
            if problem:
                yield f"{prefix}: {problem}"
                return
        yield from super().state_problems(state_dict, prefix)

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**{LAYOUT: self._layout})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return {LAYOUT: "_names_in_checkpoints"}


def _component_slices(table_slice: TableSlice) -> list[TableSlice]:
    """Return the components of a slice as slices of dense tables."""
    config: Any = table_slice.config
    storage: Any = config.storage
    low, high = config.bounds
    dim = storage.stored_width(config.embedding_dim)
    columns = table_slice.columns if dim == config.embedding_dim else (0, dim)
    return [
        TableSlice(
            replace(
                config,
                num_embeddings=rows,
                embedding_dim=dim,
                storage=Dense(),
                weight_init_min=scale * low,
                weight_init_max=scale * high,
            ),
            (0, rows),
            columns,
        )
        for _, rows, scale in storage.components(config.num_embeddings)
    ]
