"""Sharding types: the shards of a table, and the rules that make them.

A sharded table is a list of shards that tile `[rows, dim]`. Every sharding type is a rule that
makes such a list. Other code depends only on the shards, so any tiling is allowed (`custom`) whose
shards have the same rows, or none in common.

To cut n rows or columns into p blocks, a rule gives each block ceil(n / p) of them, as
`torch.chunk` does. It rounds this size up to a multiple of the unit at which the table can be cut
(`TableShape`): the rows of a tensor train are cut only between slices of its first core.
`column_wise` describes a further rounding. The last blocks may be shorter or missing.

The functions below return rules. A rule checks its ranks, nodes and sizes only when it is called
with a table: it raises ValueError if they do not fit, and TypeError if they are not ints.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from emblib.specs import OptionEnum, check_count

Span = tuple[int, int]


class Shard(NamedTuple):
    """The slice `[rows[0]:rows[1], columns[0]:columns[1]]` of a table, stored on `rank`.

    Example:
        >>> emblib.sharding.Shard(rank=1, rows=(500, 1_000), columns=(0, 16)).shape
        (500, 16)
    """

    rank: int
    rows: Span
    columns: Span

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


class World(NamedTuple):
    """The number of ranks, and the number of ranks per node: rank r is on node r // local_size.

    Example:
        >>> emblib.sharding.World(size=16, local_size=8).ranks_of(node=1)
        (8, 9, 10, 11, 12, 13, 14, 15)
    """

    size: int
    local_size: int

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes; the last node may have fewer ranks.

        Raises:
            ValueError: `size` or `local_size` is below 1.
        """
        if self.size < 1 or self.local_size < 1:
            raise ValueError(f"a world needs at least one rank, and one per node, got {self}")
        return -(-self.size // self.local_size)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node, ascending.

        Raises:
            TypeError: `node` is not an int.
            ValueError: there is no such node, or `size` or `local_size` is below 1.
        """
        try:
            node = operator.index(node)
        except TypeError:
            raise TypeError(f"node must be an int, got {node!r}") from None
        nodes = self.num_nodes
        if not 0 <= node < nodes:
            raise ValueError(
                f"node must be in [0, {nodes}), as {self.size} ranks are {nodes} nodes of "
                f"{self.local_size}, got {node}"
            )
        first = node * self.local_size
        return tuple(range(first, min(first + self.local_size, self.size)))


class TableShape(NamedTuple):
    """The numbers of rows and columns of a table, and where it can be cut.

    Rows can be cut at multiples of `row_unit`, columns at multiples of `column_unit`.
    """

    rows: int
    columns: int
    row_unit: int = 1
    column_unit: int = 1


class ShardingType(OptionEnum):
    """The named ways to shard a table.

    Example:
        >>> emblib.sharding.ShardingType("row_wise")
        <ShardingType.ROW_WISE: 'row_wise'>
    """

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    COLUMN_WISE = "column_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID = "grid_shard"
    CUSTOM = "custom"


@dataclass(frozen=True)
class ParameterSharding:
    """Sharding of one table: its shards, or none if every rank has a replica (DATA_PARALLEL).

    Args:
        type: name of the rule, also as a string. DATA_PARALLEL replicates the table. For the other
            types lookups depend on the shards alone, not on the name.
        shards: rectangles that tile the table; a rank may have several. Whether they fit a table
            is checked by `check`.
        storage: storage that replaces the configured one, e.g. `Dense(Placement.MANAGED_CACHING)`;
            None keeps the configured one.

    Raises:
        ValueError: `type` is not a sharding type.
        TypeError: a rank or a bound of a shard is not an int.

    Example:
        >>> left = emblib.sharding.Shard(rank=0, rows=(0, 8), columns=(0, 2))
        >>> right = emblib.sharding.Shard(rank=3, rows=(0, 8), columns=(2, 4))
        >>> kind = emblib.sharding.ShardingType.COLUMN_WISE
        >>> emblib.sharding.ParameterSharding(kind, (left, right)).ranks
        (0, 3)
    """

    type: ShardingType
    shards: tuple[Shard, ...] = ()
    storage: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", ShardingType(self.type))
        shards = []
        for shard in self.shards:  # plans compare shards and are saved, so numbers become ints
            try:
                (first_row, end_row), (first_column, end_column) = shard.rows, shard.columns
                numbers = (shard.rank, first_row, end_row, first_column, end_column)
                rank, *bounds = map(operator.index, numbers)
            except (TypeError, ValueError):
                raise TypeError(
                    "a shard is Shard(rank, rows=(first, end), columns=(first, end)), all ints, "
                    f"got {shard}"
                ) from None
            shards.append(Shard(rank, (bounds[0], bounds[1]), (bounds[2], bounds[3])))
        object.__setattr__(self, "shards", tuple(shards))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that store a shard, ascending; empty if every rank has a replica."""
        return tuple(sorted({shard.rank for shard in self.shards}))

    @property
    def is_replicated(self) -> bool:
        """Return whether every rank has a replica."""
        return self.type is ShardingType.DATA_PARALLEL

    def check(self, name: str, shape: TableShape, world_size: int) -> None:
        """Check that the shards tile a table of this shape and that their ranks exist.

        Shards that overlap in rows must have the same rows: an id is sent to one block of rows.

        Args:
            name: name of the table, for the message.
            shape: shape of the table.
            world_size: number of ranks.

        Raises:
            ValueError: a shard has a rank outside `[0, world_size)`, lies outside the table, or is
                cut where the table cannot be cut; the shards overlap, do not cover the table, or
                overlap in rows without having the same rows; or a DATA_PARALLEL table has shards.
        """
        if self.is_replicated:
            if self.shards:
                raise ValueError(f"table {name}: data_parallel has no shards, got {self.shards}")
            return
        for shard in self.shards:
            _check_shard(name, shard, shape, world_size)
        area = sum(math.prod(shard.shape) for shard in self.shards)
        if area != shape.rows * shape.columns or _has_overlap(self.shards):
            raise ValueError(
                f"table {name}: its shards must cover [{shape.rows}, {shape.columns}] and not "
                f"overlap; these cover {area} of {shape.rows * shape.columns} values"
                f"{' and overlap' if _has_overlap(self.shards) else ''}: {list(self.shards)}"
            )
        for previous, current in pairwise(sorted({shard.rows for shard in self.shards})):
            if previous[1] > current[0]:
                raise ValueError(
                    f"table {name}: shards that overlap in rows must be cut at the same ones, got "
                    f"rows {previous} and {current}"
                )


Rule = Callable[[TableShape, World], ParameterSharding]
"""Function that makes the sharding of a table from its shape and the world.

It raises ValueError if its ranks, nodes or sizes do not fit, and TypeError if they are not ints.
The caller of a rule must call `ParameterSharding.check` on the result, which checks the shards.
"""


def data_parallel() -> Rule:
    """Replicate the table on every rank.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "country")])
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> rules = {"country": emblib.sharding.data_parallel()}
        >>> emblib.sharding.construct_module_plan(bags, rules, world)["country"].is_replicated
        True
    """
    return lambda shape, world: ParameterSharding(ShardingType.DATA_PARALLEL)


def table_wise(rank: int) -> Rule:
    """Store the whole table on `rank`.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.table_wise(1)}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        1 (0, 8) (0, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        return ParameterSharding(ShardingType.TABLE_WISE, (Shard(rank, *_full_spans(shape)),))

    return rule


def row_wise(ranks: Sequence[int] | None = None) -> Rule:
    """Split the table into blocks of rows on `ranks`, by default on all.

    A block has `ceil(rows / ranks)` rows, rounded up to whole slices of the first core in a tensor
    train. The last ranks may have fewer rows, or no shard.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.row_wise()}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        0 (0, 2) (0, 8)
        1 (2, 4) (0, 8)
        2 (4, 6) (0, 8)
        3 (6, 8) (0, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        return ParameterSharding(
            ShardingType.ROW_WISE, _row_shards(shape, _check_ranks(ranks, world))
        )

    return rule


def column_wise(ranks: Sequence[int] | None = None, *, sizes: Sequence[int] | None = None) -> Rule:
    """Split the table into blocks of columns on `ranks`, by default on all.

    `sizes` are the numbers of columns per rank; they are above 0 and add up to the columns of the
    table. By default a block has `ceil(columns / ranks)` columns, rounded up to a multiple of
    `TableShape.column_unit`, or of the least common multiple of that and 4 if it divides the
    table's number of columns. The last ranks may have fewer columns, or no shard.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.column_wise(ranks=[0, 1])}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        0 (0, 8) (0, 4)
        1 (0, 8) (4, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        chosen_ranks = _check_ranks(ranks, world)
        return ParameterSharding(
            ShardingType.COLUMN_WISE, _column_shards(shape, chosen_ranks, sizes)
        )

    return rule


def table_row_wise(node: int) -> Rule:
    """Split the table into blocks of rows on the ranks of one node.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.table_row_wise(node=1)}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        2 (0, 4) (0, 8)
        3 (4, 8) (0, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        return ParameterSharding(
            ShardingType.TABLE_ROW_WISE, _row_shards(shape, world.ranks_of(node))
        )

    return rule


def table_column_wise(node: int) -> Rule:
    """Split the table into blocks of columns on the ranks of one node.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.table_column_wise(node=1)}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        2 (0, 8) (0, 4)
        3 (0, 8) (4, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        shards = _column_shards(shape, world.ranks_of(node))
        return ParameterSharding(ShardingType.TABLE_COLUMN_WISE, shards)

    return rule


def grid(nodes: Sequence[int] | None = None) -> Rule:
    """Split the table into blocks of columns, one per node, and each by rows on the node's ranks.

    `nodes` are all nodes by default.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.grid()}
        >>> world = emblib.sharding.World(size=4, local_size=2)
        >>> plan = emblib.sharding.construct_module_plan(bags, rules, world)
        >>> for shard in plan["item"].shards:
        ...     print(shard.rank, shard.rows, shard.columns)
        0 (0, 4) (0, 4)
        1 (4, 8) (0, 4)
        2 (0, 4) (4, 8)
        3 (4, 8) (4, 8)
    """

    def rule(shape: TableShape, world: World) -> ParameterSharding:
        node_numbers = _as_ints("nodes", range(world.num_nodes) if nodes is None else nodes)
        if not node_numbers:
            raise ValueError("grid needs at least one node, got none")
        ranks_of_node = {node: world.ranks_of(node) for node in node_numbers}
        column_shards = _column_shards(shape, node_numbers)
        shards = tuple(
            Shard(row_shard.rank, row_shard.rows, block.columns)
            for block in column_shards  # with the number of a node as their rank
            for row_shard in _row_shards(shape, ranks_of_node[block.rank])
        )
        return ParameterSharding(ShardingType.GRID, shards)

    return rule


def custom(shards: Sequence[Shard]) -> Rule:
    """Use any shards that tile the table.

    Shards that overlap in rows must have the same rows.

    Raises:
        TypeError: an entry of `shards` is not a `Shard` or a tuple of its three fields.

    Example:
        >>> left = emblib.sharding.Shard(rank=0, rows=(0, 8), columns=(0, 3))
        >>> right = emblib.sharding.Shard(rank=1, rows=(0, 8), columns=(3, 4))
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> world = emblib.sharding.World(size=2, local_size=2)
        >>> rules = {"item": emblib.sharding.custom([left, right])}
        >>> emblib.sharding.construct_module_plan(bags, rules, world)["item"].ranks
        (0, 1)
    """
    try:
        all_shards = tuple(Shard(*shard) for shard in shards)
    except TypeError:
        raise TypeError(
            "custom takes a list of Shard(rank, rows=(first, end), columns=(first, end)), got "
            f"{shards!r}"
        ) from None
    return lambda shape, world: ParameterSharding(ShardingType.CUSTOM, all_shards)


def equal_spans(size: int, num_spans: int, unit: int = 1) -> list[Span]:
    """Cut `[0, size)` into at most `num_spans` spans of equal length; the last may be shorter.

    The length is a multiple of `unit`, and the spans are in order. `size` and `unit` are above 0.

    Raises:
        ValueError: `num_spans` is below 1.
    """
    num_units = math.ceil(size / unit)
    length = math.ceil(num_units / check_count("num_spans", num_spans)) * unit
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def _full_spans(shape: TableShape) -> tuple[Span, Span]:
    return (0, shape.rows), (0, shape.columns)


def _as_ints(argument: str, values: Any) -> tuple[int, ...]:
    """Return values as ints; raise TypeError, which names the argument, for other values."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{argument} must be ints, in a list or tuple, got {values!r}") from None


def _check_ranks(ranks: Sequence[int] | None, world: World) -> tuple[int, ...]:
    """Return `ranks`, for None all; raise ValueError for none or for ranks outside the world."""
    chosen_ranks = _as_ints("ranks", range(world.size) if ranks is None else ranks)
    outside_ranks = [rank for rank in chosen_ranks if not 0 <= rank < world.size]
    if outside_ranks or not chosen_ranks:
        raise ValueError(
            f"ranks must be in [0, {world.size}), at least one, got {list(chosen_ranks)}"
        )
    return chosen_ranks


def _row_shards(shape: TableShape, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Return blocks of rows over ranks, of about equal sizes."""
    spans = equal_spans(shape.rows, len(ranks), shape.row_unit)
    return tuple(
        Shard(rank, span, (0, shape.columns)) for rank, span in zip(ranks, spans, strict=False)
    )


def column_spans(shape: TableShape, num_spans: int) -> list[Span]:
    """Cut the columns of a table into `num_spans` spans as `column_wise` does, or into fewer.

    Raises:
        ValueError: `num_spans` is below 1.
    """
    # Blocks of whole 16 bytes where the width allows it: kernels read those fastest.
    unit = math.lcm(shape.column_unit, 4)
    unit = unit if shape.columns % unit == 0 else shape.column_unit
    return equal_spans(shape.columns, num_spans, unit)


def _column_shards(
    shape: TableShape, ranks: Sequence[int], sizes: Sequence[int] | None = None
) -> tuple[Shard, ...]:
    """Return shards that cut a table by columns: one per rank, or fewer if the table is narrow."""
    spans = column_spans(shape, len(ranks))
    if sizes is not None:
        sizes = _as_ints("sizes", sizes)
        if len(sizes) != len(ranks) or sum(sizes) != shape.columns:
            raise ValueError(
                f"sizes must have one entry per rank = {len(ranks)} and add up to {shape.columns} "
                f"columns, got {list(sizes)}"
            )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
    return tuple(
        Shard(rank, (0, shape.rows), span) for rank, span in zip(ranks, spans, strict=False)
    )


def _check_shard(name: str, shard: Shard, shape: TableShape, world_size: int) -> None:
    """Raise ValueError for a shard outside its table or the world."""
    if not 0 <= shard.rank < world_size:
        raise ValueError(f"table {name}: a rank must be in [0, {world_size}), got {shard}")
    axes = (
        ("rows", shard.rows, shape.rows, shape.row_unit),
        ("columns", shard.columns, shape.columns, shape.column_unit),
    )
    for axis, (start, end), size, unit in axes:
        if not 0 <= start < end <= size:
            raise ValueError(
                f"table {name}: the {axis} of a shard must be a span in [0, {size}], got {shard}"
            )
        if start % unit or (end % unit and end != size):
            raise ValueError(
                f"table {name}: its {axis} can be cut at multiples of {unit} only, got {shard}"
            )


def _has_overlap(shards: Sequence[Shard]) -> bool:
    """Return whether any two shards overlap."""
    # A sweep over the rows: a comparison of all pairs would be slow for thousands of shards.
    row_cuts = sorted({row for shard in shards for row in shard.rows})
    shards_by_first_row: dict[int, list[Shard]] = {}
    for shard in shards:
        shards_by_first_row.setdefault(shard.rows[0], []).append(shard)
    overlapping_shards: list[Shard] = []
    for row in row_cuts:
        overlapping_shards = [shard for shard in overlapping_shards if shard.rows[1] > row]
        overlapping_shards += shards_by_first_row.get(row, [])
        spans = sorted(shard.columns for shard in overlapping_shards)
        if any(span[1] > next_span[0] for span, next_span in pairwise(spans)):
            return True
    return False
