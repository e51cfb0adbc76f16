"""Lookup of composed tables: map ids to rows of components, look these up, and combine them.

`ComposedLookup` has two subclasses, one that trains the components and one that serves them
read-only. The base class maps ids and combines rows; the subclass has the module of the components.
Lookups are made in *blocks*: block k has row k of every id. See `emblib.storage.composed` for the
kinds of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.columns import FeatureColumn
from emblib.ops import autograd
from emblib.ops.route import take_or_fill
from emblib.specs import BoundsCheck, OptionEnum, Pooling
from emblib.tables.batches import check_bounds, is_eager, lay_out_bags

LAYOUT = "id_layout"  # entry of a composed table in state dicts: which rows its ids read
SHARED_ROWS = "ids share the rows of the saved table: make this one with its storage"


class Combine(OptionEnum):
    """Operation that combines the rows that an id reads into the row of the id.

    Example:
        >>> emblib.storage.QuotientRemainder(4_000, "add").combine
        <Combine.ADD: 'add'>
    """

    ADD = "add"
    """Their sum."""
    CONCATENATE = "concatenate"
    """The first has the first half of the columns, the second the other."""
    MULTIPLY = "multiply"
    """The second times (1 + the first). Without the 1, both would start near zero, and so would
    their gradients. `max_gradient` bounds the gradients of the two rows, not of the output."""


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


class ComposedTable(NamedTuple):
    """A composed table, as a lookup sees it, see `ComposedStorage`.

    Attributes:
        num_ids: number of ids.
        dim: columns of a row.
        num_stored_columns: columns of the components.
        components: the components.
        combine_mode: operation that combines the rows that an id reads.
        row_components: index of the component of each row that an id reads.
        mapping_constants: integers that parametrise `map_ids`.
        map_ids: function that returns the rows that valid ids read.
    """

    num_ids: int
    dim: int
    num_stored_columns: int
    components: tuple[Component, ...]
    combine_mode: Combine
    row_components: tuple[int, ...]
    mapping_constants: tuple[int, ...]
    map_ids: Callable[[Tensor, Tensor, int], list[Tensor]]


def first_components(tables: Sequence[ComposedTable]) -> list[int]:
    """Return the index of the first component of each table among those of all tables."""
    return [0, *accumulate(len(table.components) for table in tables)][:-1]


def component_features(tables: Sequence[ComposedTable], feature_tables: Sequence[int]) -> list[int]:
    """Return the index of the component that each feature of the components' lookup reads.

    `feature_tables` has the table of each feature. The lookup of components has all features once
    for each row that an id reads.
    """
    first_component = first_components(tables)
    return [
        first_component[t] + tables[t].row_components[k]
        for k in range(len(tables[0].row_components))
        for t in feature_tables
    ]


def component_pooling(combine_mode: Combine, pooling: Pooling) -> Pooling:
    """Return the pooling of the lookup of components; rows to multiply are not pooled."""
    return Pooling.NONE if combine_mode is Combine.MULTIPLY else pooling


class ComposedLookup(nn.Module):
    """Base of modules that look up composed tables of one kind.

    Bounds are checked once, before ids are mapped, as `bounds_check` selects. Id -1 is skipped.
    Any other invalid id raises an error or reads the rows of id 0.

    Args:
        tables: the tables; they agree in `combine_mode`, `row_components` and `map_ids`.
        feature_tables: table of each feature.
        pooling: SUM or MEAN; NONE for one vector per id.
    """

    bounds_check = BoundsCheck.WARNING

    def __init__(
        self, tables: Sequence[ComposedTable], feature_tables: Sequence[int], pooling: Pooling
    ) -> None:
        super().__init__()
        self._tables, self._feature_tables = tuple(tables), tuple(feature_tables)
        self._combine_mode, self._map_ids = tables[0].combine_mode, tables[0].map_ids
        self._rows_per_id = len(tables[0].row_components)
        self.pooling, self.output_dtype = pooling, torch.float32
        self._dims = [tables[t].dim for t in feature_tables]
        # Columns of the components of each feature.
        self._component_dims = [tables[t].num_stored_columns for t in feature_tables]
        self._mapping_constants = self.features = self.bounds_violations = torch.empty(
            0, device="cpu"
        )

    @property
    def components(self) -> Any:
        """Return the module that looks up the components.

        Its features are `component_features`, pooled as `component_pooling`.
        """
        raise NotImplementedError

    def make_mapping_tensors(self, device: torch.device) -> None:
        """Make the tensors that describe the ids of each feature, and reset `bounds_violations`."""
        constants = [self._tables[t].mapping_constants for t in self._feature_tables]
        num_ids = [self._tables[t].num_ids for t in self._feature_tables]
        features = torch.zeros(len(num_ids), len(FeatureColumn), dtype=torch.int64, device="cpu")
        features[:, FeatureColumn.ROWS] = torch.tensor(num_ids, dtype=torch.int64, device="cpu")
        features[:, FeatureColumn.DIM] = torch.tensor(self._dims, dtype=torch.int64, device="cpu")
        shape = (len(self._feature_tables), -1) if self._feature_tables else (0, 1)
        self._mapping_constants = (
            torch.tensor(constants, dtype=torch.int64, device=device).view(shape).t()
        )
        self.features = features.to(device)
        self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=device)
        self._has_one_mapping = len(set(zip(constants, num_ids, strict=True))) == 1

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

        `ids` is `[L]`, `offsets` `[F * B + 1]`, `weights` float32 `[L]` or None for ones.
        """
        bag_layout, _ = lay_out_bags(self.pooling, self._dims, offsets, batch_sizes, ids.device)
        offsets = check_bounds(self, ids, offsets, self.features, bag_layout)
        rows = self._rows_of(ids, offsets, batch_sizes)
        rows_per_id = self._rows_per_id
        all_rows = rows[0] if rows_per_id == 1 else torch.cat(rows)
        all_offsets = (
            offsets if rows_per_id == 1 else _repeat_bags(offsets, rows_per_id, 0, ids.numel())
        )
        all_batch_sizes = None if batch_sizes is None else [*batch_sizes] * rows_per_id
        if self._combine_mode is Combine.MULTIPLY:
            out = self._multiply_and_pool(all_rows, all_offsets, offsets, weights, batch_sizes)
            return out.to(self.output_dtype)
        scales = None if weights is None else torch.cat([weights] * rows_per_id)
        if self.pooling is Pooling.MEAN and rows_per_id > 1 and _may_have_padding(offsets):
            # Padding between two blocks would count in the length of the bag before it.
            sources, all_offsets = _move_padding_first(offsets, rows_per_id, ids.numel())
            all_rows = take_or_fill(all_rows, sources, -1)
            scales = None if scales is None else take_or_fill(scales, sources, 0)
        component_outputs = self.components(
            all_rows, all_offsets, scales, batch_sizes=all_batch_sizes
        )
        return self._combine(component_outputs, batch_sizes).to(self.output_dtype)

    def _rows_of(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> list[Tensor]:
        """Map ids to `_rows_per_id` tensors of rows `[L]`.

        Id -1 stays -1, and other invalid ids read the rows of id 0.
        """
        if not self._feature_tables:
            return [ids] * self._rows_per_id
        if self._has_one_mapping:
            constants, num_ids = (
                self._mapping_constants[:, :1],
                self.features[:1, FeatureColumn.ROWS],
            )
        else:
            feature_of_id = self._features_of(ids, offsets, batch_sizes)
            constants, num_ids = (
                self._mapping_constants[:, feature_of_id],
                self.features[feature_of_id, FeatureColumn.ROWS],
            )
        int64_ids = ids.long()
        is_valid = (int64_ids >= 0) & (int64_ids < num_ids)
        row_ids = self._map_ids(torch.where(is_valid, int64_ids, 0), constants, self._rows_per_id)
        return [torch.where(int64_ids == -1, int64_ids, rows).to(ids.dtype) for rows in row_ids]

    def _features_of(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Return the index of the feature of each id, int64 `[L]`."""
        if batch_sizes is None:
            # Any number in exported graphs.
            num_bags = (offsets.numel() - 1) // len(self._feature_tables)
            first_offsets = offsets[num_bags : offsets.numel() - 1 : max(num_bags, 1)]
        else:
            bag_counts = [sum(sizes) for sizes in batch_sizes]
            first_offsets = offsets[list(accumulate(bag_counts))[:-1]]
        positions = torch.arange(ids.numel(), device=ids.device)
        return torch.bucketize(positions, first_offsets.long(), right=True)

    def _combine(
        self, component_outputs: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Combine the outputs of the components' lookup into one block of rows or bags.

        `component_outputs` is `[B, rows_per_id * columns]`, `[rows_per_id * L, dim]` without
        pooling, or flat with `batch_sizes`. The result has the same form with `rows_per_id` of 1.
        """
        rows_per_id = self._rows_per_id
        concatenates = self._combine_mode is Combine.CONCATENATE
        if rows_per_id == 1:
            return (
                component_outputs
                if self._component_dims == self._dims
                else self._widen(component_outputs, batch_sizes)
            )
        if self.pooling is Pooling.NONE:
            blocks = component_outputs.view(rows_per_id, -1, component_outputs.shape[1])
            return blocks.transpose(0, 1).flatten(1) if concatenates else blocks.sum(0)
        if batch_sizes is None:
            columns = component_outputs.shape[1] // rows_per_id
            blocks = component_outputs.view(-1, rows_per_id, columns)
            return self._concatenate_columns(blocks.unbind(1)) if concatenates else blocks.sum(1)
        return self._combine_ranks(component_outputs, batch_sizes)

    def _combine_ranks(
        self, component_outputs: Tensor, batch_sizes: Sequence[Sequence[int]]
    ) -> Tensor:
        """Combine the flat outputs of batches that differ in size, rank by rank; see `_combine`."""
        rows_per_id, concatenates = self._rows_per_id, self._combine_mode is Combine.CONCATENATE
        bag_counts_by_rank = list(zip(*batch_sizes, strict=True))
        sizes_by_rank = [
            [
                num_bags * width
                for num_bags, width in zip(bag_counts, self._component_dims, strict=True)
            ]
            for bag_counts in bag_counts_by_rank
        ]
        rank_outputs = component_outputs.split(
            [rows_per_id * sum(sizes) for sizes in sizes_by_rank]
        )
        combined_outputs = []
        for rank_output, sizes in zip(rank_outputs, sizes_by_rank, strict=True):
            blocks = rank_output.view(rows_per_id, -1)
            if not concatenates:
                combined_outputs.append(blocks.sum(0))
                continue
            for feature_blocks, width in zip(
                blocks.split(sizes, 1), self._component_dims, strict=True
            ):
                rows_by_bag = feature_blocks.view(rows_per_id, -1, width).transpose(0, 1)
                combined_outputs.append(rows_by_bag.reshape(-1))
        return torch.cat(combined_outputs)

    def _concatenate_columns(self, blocks: Sequence[Tensor]) -> Tensor:
        """Concatenate the columns of all blocks, feature by feature."""
        columns_by_feature = zip(
            *(block.split(self._component_dims, 1) for block in blocks), strict=True
        )
        return torch.cat(
            [columns for feature_columns in columns_by_feature for columns in feature_columns], 1
        )

    def _widen(
        self, component_outputs: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Append zero columns to each feature, up to the dim of its table."""
        zeros_of_features = [
            dim - stored_dim
            for dim, stored_dim in zip(self._dims, self._component_dims, strict=True)
        ]
        pad = nn.functional.pad
        if self.pooling is Pooling.NONE:
            return pad(component_outputs, (0, zeros_of_features[0]))
        if batch_sizes is None:
            blocks = zip(
                component_outputs.split(self._component_dims, 1), zeros_of_features, strict=True
            )
            return torch.cat([pad(block, (0, num_zeros)) for block, num_zeros in blocks], 1)
        bag_counts = [count for counts in zip(*batch_sizes, strict=True) for count in counts]
        block_dims, block_zeros = (
            list(values) * len(batch_sizes[0])
            for values in (self._component_dims, zeros_of_features)
        )
        block_sizes = [count * dim for count, dim in zip(bag_counts, block_dims, strict=True)]
        rank_blocks = zip(
            component_outputs.split(block_sizes), block_dims, block_zeros, strict=True
        )
        return torch.cat(
            [pad(block.view(-1, dim), (0, zeros)).view(-1) for block, dim, zeros in rank_blocks]
        )

    def _multiply_and_pool(
        self,
        rows: Tensor,
        all_offsets: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Look up two rows a and b per id, and pool the products (1 + a) * b.

        Pooling NONE returns the products, and raises ValueError for weights.
        """
        all_batch_sizes = None if batch_sizes is None else [*batch_sizes] * self._rows_per_id
        updates_only = not torch.compiler.is_compiling() and autograd.is_for_update()
        look_up = autograd.with_values(self.components) if updates_only else self.components
        component_outputs = look_up(rows, all_offsets, None, batch_sizes=all_batch_sizes).float()
        first_rows, second_rows = component_outputs.view(
            self._rows_per_id, -1, component_outputs.shape[1]
        )
        products = (1.0 + first_rows) * second_rows
        if self.pooling is Pooling.NONE:
            if weights is not None:
                raise ValueError(
                    "per_sample_weights scale rows that are pooled; unpooled tables have none"
                )
            return products
        if weights is not None:
            # A skipped id adds nothing, whatever its weight is: 0 * NaN would be NaN.
            is_skipped = rows[: weights.numel()] == -1
            products = products * weights.masked_fill(is_skipped, 0.0)[:, None]
        dim = products.shape[1]
        bags = torch.segment_reduce(
            products, "sum", offsets=offsets.long(), axis=0, initial=0.0, unsafe=True
        )
        if self.pooling is Pooling.MEAN:
            bags = bags / offsets.diff().clamp(min=1)[:, None]
        if batch_sizes is None:
            return bags.view(len(self._feature_tables), -1, dim).transpose(0, 1).flatten(1)
        blocks = iter(
            bags.split([num_bags for rank_sizes in batch_sizes for num_bags in rank_sizes])
        )
        blocks_by_feature = [[next(blocks) for _ in rank_sizes] for rank_sizes in batch_sizes]
        rank_major_blocks = [
            block for rank_blocks in zip(*blocks_by_feature, strict=True) for block in rank_blocks
        ]
        return torch.cat(rank_major_blocks).view(-1)


def _repeat_bags(offsets: Tensor, count: int, begin: Tensor | int, num_ids: Tensor | int) -> Tensor:
    """Return the offsets of the bags of `count` blocks, `[count * bags + 1]`.

    Block k has the bags of `offsets` `[bags + 1]`, `begin + k * num_ids` positions later; its last
    bag ends where the first bag of the next block begins.
    """
    offsets_of_blocks = [
        offsets[: None if k + 1 == count else -1] + (begin + k * num_ids) for k in range(count)
    ]
    return torch.cat(offsets_of_blocks)


def _may_have_padding(offsets: Tensor) -> bool:
    """Return whether ids of -1 may precede the first bag; True if the host would have to wait."""
    return not (offsets.is_cpu and is_eager(offsets)) or int(offsets[0]) > 0


def _move_padding_first(offsets: Tensor, count: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """Move the padding of `count` blocks of `num_ids` lookups in front of the first block.

    The first `offsets[0]` lookups of a block are padding. The host does not wait for the device.

    Returns:
        int64 `[count * num_ids]`, the source of each lookup, -1 for padding; and the offsets of the
        bags of all blocks.
    """
    num_padding = offsets[:1]
    positions = torch.arange(count * num_ids, device=offsets.device) - count * num_padding
    block_number = positions // (num_ids - num_padding).clamp(min=1)
    sources = torch.where(positions >= 0, positions + num_padding * (block_number + 1), -1)
    moved_offsets = _repeat_bags(offsets, count, (count - 1) * num_padding, num_ids - num_padding)
    return sources, moved_offsets
