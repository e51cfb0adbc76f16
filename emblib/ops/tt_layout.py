"""The tables and the batch of the tensor-train ops, and the chunks of a large batch.

A chunk is a batch of one table and one feature. On the CPU a batch of many lookups is processed
chunk by chunk, which bounds scratch memory.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import BagColumn, FeatureColumn, FeatureRow, TTTableColumn
from emblib.ops import codes, tbe
from emblib.specs import MatmulPrecision, Pooling, TTSpec

# Maximum scratch memory of a chunk, without cores and their gradients.
CHUNK_BYTES = 128 << 20
# Scratch memory per lookup, see `_max_chunk_lookups`: about a dozen integers of the grouping and
# the plan; per column a float32 row and the quarter of a bag, and with sample weights a gradient.
_INTEGER_BYTES = 100
_LOOKUPS_PER_BAG = 4  # a chunk of at most n lookups has at most n / 4 bags
_COLUMN_BYTES, _WEIGHTED_COLUMN_BYTES = 5, 9


class TTLayout(NamedTuple):
    """Layout of the tables of a module, in the form that ops take, see `emblib.ops.tt`.

    Attributes:
        row_factors, dim_factors: factors of all tables, table after table, one per core.
        num_cores: number of cores of each table.
        tables: rows of the tensor `tables`, see `emblib.columns.TTTableColumn`.
        num_keys, left_ids, right_ids: numbers of keys and of ids of halves over all tables.
        dim: largest dim.
        has_one_dim: whether all tables have the same dim.
    """

    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    num_cores: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    num_keys: int
    left_ids: int
    right_ids: int
    dim: int
    has_one_dim: bool

    # These are methods, not properties: torch 2.10 cannot compile properties of a NamedTuple.
    def op_arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return `row_factors`, `dim_factors` and `num_cores`, which ops take in this order."""
        return self.row_factors, self.dim_factors, self.num_cores

    def cores_of(self, table: int) -> slice:
        """Return the slice of a table's cores in a list of all cores."""
        first_core = sum(self.num_cores[:table])
        return slice(first_core, first_core + self.num_cores[table])

    def first_core_rows(self) -> list[int]:
        """Return the index of each core's first row among the rows of all cores."""
        return list(accumulate(self.row_factors[:-1], initial=0))


_MAX_KEYS = 4 * 10**18  # below 2^62: keys are int64
_MAX_HALVES = 2**31 - 1  # ids of halves are int32


def layout_of(specs: Sequence[TTSpec]) -> TTLayout:
    """Return the layout of tables in the order of `specs`.

    Raises:
        ValueError: there are more halves or keys than the ops can number.
    """
    tables = []
    num_keys = left_ids = right_ids = 0
    for spec in specs:
        p = spec.row_factors
        num_left_cores = 1 if len(p) == 2 else 2
        num_lefts, num_rights = math.prod(p[:num_left_cores]), math.prod(p[num_left_cores:])
        left_inner_rows = p[1] if num_left_cores == 2 else 1
        halves = p[0], left_inner_rows, num_rights, int(num_left_cores == 2)
        # In the order of `TTTableColumn`.
        tables.append((spec.rows, *spec.permutation, *halves, num_keys, left_ids, right_ids))
        num_keys, left_ids, right_ids = (
            num_keys + num_lefts * num_rights,
            left_ids + num_lefts,
            right_ids + num_rights,
        )
    if num_keys > _MAX_KEYS or max(left_ids, right_ids) > _MAX_HALVES:
        raise ValueError(
            "the row factors of all tables must make fewer than 2^31 halves and at most "
            f"{_MAX_KEYS} keys, got {left_ids} and {right_ids} halves and {num_keys} keys; use "
            "several modules, more cores or more even factors"
        )
    dims = [spec.dim for spec in specs]
    return TTLayout(
        tuple(p for spec in specs for p in spec.row_factors),
        tuple(q for spec in specs for q in spec.dim_factors),
        tuple(len(spec.row_factors) for spec in specs),
        tuple(tables),
        num_keys,
        left_ids,
        right_ids,
        max(dims, default=0),
        len(set(dims)) <= 1,
    )


def id_table_row(rows: int) -> tuple[int, ...]:
    """Return the row of `tables` for which `tt_keys` returns ids below `rows` (>= 1) unchanged."""
    num_lefts = min(rows, _MAX_HALVES)
    columns = {TTTableColumn.ROWS: rows, TTTableColumn.LEFT_OUTER_ROWS: num_lefts}
    columns[TTTableColumn.MULTIPLIER] = columns[TTTableColumn.LEFT_INNER_ROWS] = 1
    columns[TTTableColumn.RIGHT_IDS] = -(-rows // num_lefts)
    return tuple(columns.get(column, 0) for column in TTTableColumn)


class TTLookup(NamedTuple):
    """One batch of a module of tensor trains.

    Attributes:
        layout: layout of the tables.
        tables, feature_tables: int64 `[T, 10]` and `[F, 10]`, see `emblib.columns.TTTableColumn`.
        features: int64 `[3 F, 8]`, which describe the tables as dense tables in three ways: F rows
            for tables indexed by keys, F for tables indexed by ids, and F for the computed rows
            that a GPU pools, see `row_feature`.
        indices: int32 or int64 `[L]`.
        offsets: `[F * B + 1]`, or `[bags + 1]` with a `bag_layout`.
        bag_layout: int64 `[bags, 2]`, see `emblib.ops.tbe`; None if all features have B bags.
        pooling: pooling of the bags.
        output_dim, output_dtype: columns and dtype of the output.
        repaired: whether `check_bounds` returned `offsets`.
        matmul: minimum precision of products on a GPU.
    """

    layout: TTLayout
    tables: Tensor
    feature_tables: Tensor
    features: Tensor
    indices: Tensor
    offsets: Tensor
    bag_layout: Tensor | None
    pooling: Pooling
    output_dim: int
    output_dtype: torch.dtype
    repaired: bool = False
    matmul: MatmulPrecision = MatmulPrecision.FLOAT32

    def num_features(self) -> int:
        """Return F."""
        return self.features.size(0) // 3

    def key_features(self) -> Tensor:
        """Return the first F rows of `features`, for tables indexed by keys."""
        return self.features[: self.num_features()]

    def matmul_code(self) -> int:
        """Return the precision of products as the ops take it."""
        return codes.MATMUL_PRECISION[self.matmul.value]


def row_feature(layout: TTLayout, dim: int, column: int) -> FeatureRow:
    """Return the row of `features` for the computed rows of a feature with `dim` columns.

    Lookups are indices of computed rows, so the bound of a table may be any larger number. If dims
    differ, all rows have the stride of the widest table, which only cache rows can have.
    """
    stride = 0 if layout.has_one_dim else layout.dim
    return FeatureRow(rows=_MAX_HALVES, dim=dim, column=column, cache_stride=stride)


class Chunk(NamedTuple):
    """A part of a large batch: a batch of one feature, and its position in the large one.

    Attributes:
        batch: lookups of the chunk, as a batch of one table.
        cores: position of the table's cores among all cores.
        lookups, bags: position of the chunk's lookups and bags in the large batch.
        feature: feature of the bags.
        bag_fraction: 1 if the chunk has whole bags, else its part of the lookups of its only bag.
    """

    batch: TTLookup
    cores: slice
    lookups: slice
    bags: slice
    feature: int
    bag_fraction: float

    def elements(self, tensor: Tensor, batch: TTLookup) -> tuple[Any, ...]:
        """Return the index of the chunk's vectors in `tensor`.

        `tensor` is the output of the large `batch`, or its gradient.
        """
        if batch.pooling is Pooling.NONE:
            return (self.lookups,)
        column = int(batch.features[self.feature, FeatureColumn.COLUMN])
        columns = torch.arange(self.batch.output_dim, device=tensor.device)
        if batch.bag_layout is not None:
            return (batch.bag_layout[self.bags, BagColumn.ELEMENT, None] + columns,)
        first_bag = self.feature * tensor.size(0)
        bags = slice(self.bags.start - first_bag, self.bags.stop - first_bag)
        return bags, slice(column, column + self.batch.output_dim)


def _max_chunk_lookups(layout: TTLayout, column_bytes: int) -> int:
    """Return the maximum number of lookups whose scratch memory fits CHUNK_BYTES, at least 1."""
    return max(1, CHUNK_BYTES // (column_bytes * layout.dim + _INTEGER_BYTES))


def _column_bytes(sample_weights: Tensor | None) -> int:
    return _COLUMN_BYTES if sample_weights is None else _WEIGHTED_COLUMN_BYTES


def max_lookups_at_once(layout: TTLayout, device: torch.device) -> int:
    """Return the largest number of lookups that is never processed in chunks."""
    if device.type != "cpu":
        return sys.maxsize
    return _max_chunk_lookups(layout, _WEIGHTED_COLUMN_BYTES)


def is_chunked(batch: TTLookup, sample_weights: Tensor | None) -> bool:
    """Return whether a batch is processed in chunks, so that its scratch memory is bounded.

    Only on the CPU, where offsets can be read, and not in compiled graphs.
    """
    # First, because the size of a batch in a compiled graph may not be a number yet.
    if torch.compiler.is_compiling() or batch.indices.device.type != "cpu":
        return False
    return batch.indices.numel() > _max_chunk_lookups(batch.layout, _column_bytes(sample_weights))


def chunks_of(batch: TTLookup, sample_weights: Tensor | None) -> Iterator[Chunk]:
    """Yield the chunks of a batch: each has whole bags of one feature, or a part of one large bag.

    Offsets are repaired first, see `BoundsCheck.IGNORE`.
    """
    ignore_code = codes.BOUNDS_CHECK["ignore"]
    repaired, _ = tbe.check_bounds(
        batch.indices, batch.offsets, batch.key_features(), batch.bag_layout, ignore_code
    )
    batch = batch._replace(offsets=repaired)
    max_lookups = _max_chunk_lookups(batch.layout, _column_bytes(sample_weights))
    max_bags = max(1, max_lookups // _LOOKUPS_PER_BAG)
    num_features, num_bags = batch.num_features(), batch.offsets.numel() - 1
    bag_ends = torch.arange(1, num_features + 1, device="cpu") * (num_bags // max(1, num_features))
    if batch.bag_layout is not None:
        features = batch.bag_layout[:, BagColumn.FEATURE].contiguous()
        bag_ends = torch.searchsorted(
            features, torch.arange(num_features, device="cpu"), right=True
        )
    bag = 0
    for f, bag_end in enumerate(bag_ends.tolist()):
        while bag < bag_end:
            stop = min(bag_end, bag + max_bags)
            next_bag_ends = batch.offsets[bag + 1 : stop + 1]
            begin = int(batch.offsets[bag])
            num_whole_bags = int(torch.searchsorted(next_bag_ends, begin + max_lookups, right=True))
            stop = bag + max(num_whole_bags, 1)
            end = int(batch.offsets[stop])
            for chunk_begin in range(begin, max(end, begin + 1), max_lookups):
                lookups = slice(chunk_begin, min(chunk_begin + max_lookups, end))
                bag_fraction = (
                    (lookups.stop - chunk_begin) / (end - begin)
                    if end - begin > max_lookups
                    else 1.0
                )
                yield _make_chunk(batch, f, slice(bag, stop), lookups, bag_fraction)
            bag = stop


def _make_chunk(batch: TTLookup, f: int, bags: slice, lookups: slice, bag_fraction: float) -> Chunk:
    """Return the chunk of some bags of feature `f`, or of a fraction of one bag."""
    layout = batch.layout
    first_key = int(batch.feature_tables[f, TTTableColumn.FIRST_KEY])
    t = next(t for t, row in enumerate(layout.tables) if row[TTTableColumn.FIRST_KEY] == first_key)
    cores = layout.cores_of(t)
    row = list(layout.tables[t])
    for column in (TTTableColumn.FIRST_KEY, TTTableColumn.FIRST_LEFT, TTTableColumn.FIRST_RIGHT):
        row[column] = 0  # the table is the only one of its chunk
    p = layout.row_factors[cores]
    right_ids = row[TTTableColumn.RIGHT_IDS]
    dim = math.prod(layout.dim_factors[cores])
    num_keys = math.prod(p)
    chunk_layout = TTLayout(
        p,
        layout.dim_factors[cores],
        (len(p),),
        (tuple(row),),
        num_keys,
        num_keys // right_ids,
        right_ids,
        dim,
        True,
    )
    features = batch.features[f :: batch.num_features()].clone()
    features[:, FeatureColumn.ROW_BASE] = features[:, FeatureColumn.COLUMN] = 0
    offsets = batch.offsets[bags.start : bags.stop + 1].clamp(lookups.start, lookups.stop)
    tables = torch.tensor([row], device="cpu")
    chunk_batch = batch._replace(
        layout=chunk_layout,
        tables=tables,
        feature_tables=tables,
        features=features,
        indices=batch.indices[lookups],
        offsets=offsets - lookups.start,
        bag_layout=None,
        output_dim=dim,
        output_dtype=torch.float32,
    )
    return Chunk(chunk_batch, cores, lookups, bags, f, bag_fraction)
