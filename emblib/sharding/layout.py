"""The layout of a collection over ranks: a plan compiled to the lookups of every rank.

A *unit* is the lookup of one feature in one shard of the feature's table, on the rank that stores
the shard. Ids are sent in the order of units, rank after rank, and rows return in the same order.
Every rank knows the units of all ranks. Layouts contain no tensors.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from emblib.sharding.sharding_types import ParameterSharding, Shard, Span, TableShape
from emblib.specs import Pooling
from emblib.storage import Storage, TableSlice

Config = Any  # an EmbeddingBagConfig or EmbeddingConfig
ArrangeUnits = Callable[[Sequence[TableSlice], Sequence[int]], Sequence[int]]
"""Function that orders the units of a rank by kernel.

Its arguments are the slices of the rank and the index of the slice that each unit reads; the result
is a permutation of the units.
"""


class Feature(NamedTuple):
    """One feature of one table.

    Attributes:
        key: key of its ids in a batch.
        name: name in the output, `key@table` if several tables read the key.
        table: number of the table in the collection.
        dim: number of columns.
        column: first column in the output of pooled rows.
        is_mean: whether the sum of a bag is divided by the number of its ids.
    """

    key: str
    name: str
    table: int
    dim: int
    column: int
    is_mean: bool


class LookupUnit(NamedTuple):
    """The lookup of one feature in one shard.

    Attributes:
        feature: number of the feature in the layout.
        shard: the shard.
        shard_index: index of the shard in `RankLayout.shards`.
    """

    feature: int
    shard: Shard
    shard_index: int

    @property
    def columns(self) -> int:
        """Return the number of columns of the rows that the unit returns."""
        return self.shard.shape[1]


class TableShard(NamedTuple):
    """A shard of a table; `table` is the table's number in the collection."""

    table: int
    shard: Shard


class RankLayout(NamedTuple):
    """The shards on one rank and their units.

    Two other lists of units have this form: the replicas (`CollectionLayout.replicated`), and the
    units of a rank or node in `NodeSums`.

    Attributes:
        shards: the shards in the order of tables. They are replicas in
            `CollectionLayout.replicated`; `NodeSums` has none.
        units: the units in the order in which their rows are sent; `ArrangeUnits` orders those of
            shards.
        columns: sum of the columns of `units`.
        replicated_units: units of replicated tables whose ids are sent to every rank, see
            `CollectionLayout`; the same on all ranks. Empty if ids are not sent to replicas.
    """

    shards: tuple[TableShard, ...]
    units: tuple[LookupUnit, ...]
    columns: int
    replicated_units: tuple[LookupUnit, ...] = ()

    @property
    def all_units(self) -> tuple[LookupUnit, ...]:
        """Return all units of the rank that get ids."""
        return self.units + self.replicated_units


class CollectionLayout(NamedTuple):
    """The layout of a collection, the same on all ranks.

    Attributes:
        features: the features of all tables, in the order of the configurations.
        columns: sum of the columns of the features.
        ranks: layout of each rank.
        replicated: the tables that are replicated on every rank, with shards of rank -1. If
            their optimizer is fused, they need the gradients of all ranks, so their ids are sent
            to every rank as `RankLayout.replicated_units`.
    """

    features: tuple[Feature, ...]
    columns: int
    ranks: tuple[RankLayout, ...]
    replicated: RankLayout


class NodeSums(NamedTuple):
    """The units whose rows are summed within a node, before they are sent to other nodes.

    A sum adds up the units of one feature and span of columns. Units are summed if their rows are
    divided over all ranks of one node and no other rank, as by `table_row_wise` and `grid`.

    Attributes:
        direct: units of each rank that are not summed, in the order of the rank's layout.
        nodes: sums of each node, as units with rank and shard index -1.
        units: `units[r][s]` are the units of rank r, as indices in its layout, that are added up in
            sum s of its node, in the order of rows.
    """

    direct: tuple[RankLayout, ...]
    nodes: tuple[RankLayout, ...]
    units: tuple[tuple[tuple[int, ...], ...], ...]


def sum_in_nodes(layout: CollectionLayout, local_size: int) -> NodeSums | None:
    """Return the units of a layout whose rows can be summed within nodes; None without any.

    `local_size` is the number of ranks per node, a divisor of the number of ranks.
    """
    units_of_columns: dict[tuple[int, Span], list[tuple[int, int]]] = {}
    for rank, rank_layout in enumerate(layout.ranks):
        for i, unit in enumerate(rank_layout.units):
            units_of_columns.setdefault((unit.feature, unit.shard.columns), []).append((rank, i))
    sums_by_node: list[list[LookupUnit]] = [[] for _ in range(len(layout.ranks) // local_size)]
    unit_groups_by_rank: list[list[tuple[int, ...]]] = [[] for _ in layout.ranks]
    for (feature, columns), members in sorted(units_of_columns.items()):
        node = members[0][0] // local_size
        ranks = range(node * local_size, (node + 1) * local_size)
        if {rank for rank, _ in members} != set(ranks):
            continue
        shards = {(rank, i): layout.ranks[rank].units[i].shard for rank, i in members}
        row_spans = [shard.rows for shard in shards.values()]
        joint_rows = min(first_row for first_row, _ in row_spans), max(end for _, end in row_spans)
        sums_by_node[node].append(LookupUnit(feature, Shard(-1, joint_rows, columns), -1))
        for rank in ranks:
            sorted_rows = sorted(
                (shards[shard_rank, i].rows, i) for shard_rank, i in members if shard_rank == rank
            )
            unit_groups_by_rank[rank].append(tuple(i for _, i in sorted_rows))
    if not any(sums_by_node):
        return None
    direct_layouts = []
    for rank_layout, unit_groups in zip(layout.ranks, unit_groups_by_rank, strict=True):
        summed_units = {i for members in unit_groups for i in members}
        direct_units = [unit for i, unit in enumerate(rank_layout.units) if i not in summed_units]
        direct_layouts.append(_layout_of_units(direct_units))
    node_layouts = tuple(map(_layout_of_units, sums_by_node))
    return NodeSums(tuple(direct_layouts), node_layouts, tuple(map(tuple, unit_groups_by_rank)))


def _layout_of_units(units: Sequence[LookupUnit]) -> RankLayout:
    """Return a layout with these units and no shards."""
    return RankLayout((), tuple(units), sum(unit.columns for unit in units))


def shape_of(config: Config, storage: Storage | None = None) -> TableShape:
    """Return rows and columns of a table, and where it can be cut.

    Args:
        config: configuration of the table.
        storage: storage in place of the configured one; None for the configured one.

    Raises:
        ValueError: the storage cannot be sharded.
    """
    config = with_storage(config, storage)
    config.storage.check_sharded(config)
    units = config.storage.cut_units(config)
    return TableShape(config.num_embeddings, config.embedding_dim, units.rows, units.columns)


def with_storage(config: Config, storage: Storage | None) -> Config:
    """Return the configuration with another storage; unchanged for None."""
    return config if storage is None else dataclasses.replace(config, storage=storage)


def features_of(configs: Sequence[Config], *, pooled: bool) -> tuple[Feature, ...]:
    """Return the features of the tables, in the order of `configs`.

    A key that several tables read is named `key@table`. Only `pooled` features have a mean.
    """
    keys = [key for config in configs for key in config.feature_names]
    features, column = [], 0
    for table, config in enumerate(configs):
        for key in config.feature_names:
            name = f"{key}@{config.name}" if keys.count(key) > 1 else key
            is_mean = pooled and config.pooling is Pooling.MEAN
            features.append(Feature(key, name, table, config.embedding_dim, column, is_mean))
            column += config.embedding_dim
    return tuple(features)


def lay_out(
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    world_size: int,
    arrange: ArrangeUnits,
    *,
    pooled: bool,
) -> CollectionLayout:
    """Compile the plan of a collection to a layout, in which no ids are sent to replicas.

    Args:
        configs: configurations of the tables.
        plan: the sharding of each table, by name; `ParameterSharding.check` must have accepted it.
        world_size: number of ranks.
        arrange: function that orders the units of a rank.
        pooled: whether rows are pooled.
    """
    features = features_of(configs, pooled=pooled)
    shards_by_rank: list[list[TableShard]] = [[] for _ in range(world_size)]
    replicas: list[TableShard] = []
    for table, config in enumerate(configs):
        sharding = plan[config.name]
        whole_table = Shard(-1, (0, config.num_embeddings), (0, config.embedding_dim))
        if sharding.is_replicated:
            replicas.append(TableShard(table, whole_table))
        for shard in sharding.shards:
            shards_by_rank[shard.rank].append(TableShard(table, shard))

    def rank_layout(table_shards: Sequence[TableShard]) -> RankLayout:
        return _rank_layout(configs, plan, features, table_shards, arrange)

    replicated = rank_layout(replicas)
    ranks = tuple(rank_layout(rank_shards) for rank_shards in shards_by_rank)
    return CollectionLayout(features, sum(feature.dim for feature in features), ranks, replicated)


def send_ids_to_replicas(layout: CollectionLayout) -> CollectionLayout:
    """Return the layout with the ids of replicated tables sent to every rank."""
    replicated_units = layout.replicated.units
    return layout._replace(
        ranks=tuple(rank._replace(replicated_units=replicated_units) for rank in layout.ranks)
    )


def slices_of(
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    table_shards: Sequence[TableShard],
) -> list[TableSlice]:
    """Return the shards of a rank, or replicas, as table slices with the storage of the plan."""
    slices = []
    for table_shard in table_shards:
        config = configs[table_shard.table]
        sharding = plan[config.name]
        shards = sorted(shard.rows for shard in sharding.shards)
        shard_number = shards.index(table_shard.shard.rows) if shards else 0
        slices.append(
            TableSlice(
                with_storage(config, sharding.storage),
                table_shard.shard.rows,
                table_shard.shard.columns,
                (shard_number, max(len(shards), 1)) if config.storage.is_keyed else None,
            )
        )
    return slices


def _rank_layout(
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    features: Sequence[Feature],
    table_shards: Sequence[TableShard],
    arrange: ArrangeUnits,
) -> RankLayout:
    """Return the layout of a rank with these shards; `arrange` orders its units."""
    units = [
        LookupUnit(feature_number, table_shard.shard, shard_index)
        for shard_index, table_shard in enumerate(table_shards)
        for feature_number, feature in enumerate(features)
        if feature.table == table_shard.table
    ]
    order = arrange(slices_of(configs, plan, table_shards), [unit.shard_index for unit in units])
    ordered_units = tuple(units[i] for i in order)
    return RankLayout(tuple(table_shards), ordered_units, sum(unit.columns for unit in units))


class BlockRouting(NamedTuple):
    """The routing of ids to units by blocks of rows, as rows of the tensors of `emblib.ops.route`.

    Attributes:
        features: (first block, number of blocks, rows, 1 if by key) per feature, see
            `RouteFeatureColumn`.
        blocks: (first row, first entry of `units`, number of entries) per block, see
            `RouteBlockColumn`.
        units: units to which the ids of each block are sent, numbered rank after rank.
    """

    features: list[tuple[int, int, int, int]]
    blocks: list[tuple[int, int, int]]
    units: list[int]


def block_routing(configs: Sequence[Config], layout: CollectionLayout) -> BlockRouting:
    """Return the blocks of rows that each feature's table is cut into, and their units.

    Shards that overlap in rows must have the same rows, as `ParameterSharding.check` checks.
    """
    units_by_feature: dict[int, dict[Span, list[int]]] = {}
    unit_number = 0
    for rank in layout.ranks:
        for unit in rank.all_units:
            units_by_rows = units_by_feature.setdefault(unit.feature, {})
            units_by_rows.setdefault(unit.shard.rows, []).append(unit_number)
            unit_number += 1
    routing = BlockRouting([], [], [])
    for feature_number, feature in enumerate(layout.features):
        config = configs[feature.table]
        units_by_block = sorted(units_by_feature.get(feature_number, {}).items())
        num_rows = config.num_embeddings
        is_keyed = config.storage.is_keyed
        routing.features.append((len(routing.blocks), len(units_by_block), num_rows, int(is_keyed)))
        for (first_row, _), block_units in units_by_block:
            routing.blocks.append((first_row, len(routing.units), len(block_units)))
            routing.units.extend(block_units)
    return routing
