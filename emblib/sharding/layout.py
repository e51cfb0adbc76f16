"""What every rank looks up, and where it goes: a plan compiled for one collection. Numbers only.

A *unit* is what one rank looks up for one feature: the feature's table within one shard. Ids go out
by unit, rank after rank, and pooled rows come back the same way. Every rank knows the units of all.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from emblib.sharding.sharding_types import ParameterSharding, Shard, Span, TableShape
from emblib.specs import Pooling
from emblib.storage import Storage, TableSlice

Config = Any  # an EmbeddingBagConfig or EmbeddingConfig
Arrange = Callable[[Sequence[TableSlice], Sequence[int]], Sequence[int]]
"""Slices of a rank and the slice that each unit reads -> units in the order of its kernels."""


class Feature(NamedTuple):
    """One feature of one table: the key of its ids, and where it is in the output."""

    key: str
    name: str
    table: int
    dim: int
    column: int
    is_mean: bool


class LookupUnit(NamedTuple):
    """What one rank looks up for one feature; `part` numbers the parts of tables on that rank."""

    feature: int
    shard: Shard
    part: int

    @property
    def columns(self) -> int:
        """Width of its rows."""
        return self.shard.shape[1]


class TableShard(NamedTuple):
    """A part of a table that a rank holds."""

    table: int
    shard: Shard


class RankLayout(NamedTuple):
    """The parts of tables on one rank, and its units in the order its kernels have them.

    `copies` are units of replicated tables whose ids go to every rank, see `CollectionLayout`.
    """

    parts: tuple[TableShard, ...]
    units: tuple[LookupUnit, ...]
    columns: int
    replicated_units: tuple[LookupUnit, ...] = ()

    @property
    def all_units(self) -> tuple[LookupUnit, ...]:
        """All that ids are sent to."""
        return self.units + self.replicated_units


class CollectionLayout(NamedTuple):
    """A collection over ranks; `replicated` holds the tables that every rank has a copy of.

    Copies with a fused optimizer must all see the same gradients: their ids go to every rank.
    """

    features: tuple[Feature, ...]
    columns: int
    ranks: tuple[RankLayout, ...]
    replicated: RankLayout


def shape_of(config: Config, storage: Storage | None = None) -> TableShape:
    """Return rows and columns of a table, and where it can be cut."""
    config = with_storage(config, storage)
    units = config.storage.cut_units(config)
    return TableShape(config.num_embeddings, config.embedding_dim, units.rows, units.columns)


def with_storage(config: Config, storage: Storage | None) -> Config:
    """Return the configuration with another storage; unchanged for None."""
    return config if storage is None else dataclasses.replace(config, storage=storage)


def features_of(configs: Sequence[Config], *, pooled: bool) -> tuple[Feature, ...]:
    """All features of the tables, in their order; a key of several tables is `key@table`."""
    keys = [key for config in configs for key in config.feature_names]
    features, column = [], 0
    for t, config in enumerate(configs):
        for key in config.feature_names:
            name = f"{key}@{config.name}" if keys.count(key) > 1 else key
            is_mean = pooled and config.pooling is Pooling.MEAN
            features.append(Feature(key, name, t, config.embedding_dim, column, is_mean))
            column += config.embedding_dim
    return tuple(features)


def lay_out(
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    world_size: int,
    arrange: Arrange,
    *,
    pooled: bool,
) -> CollectionLayout:
    """The layout of tables under a plan that `ParameterSharding.check` has passed."""
    features = features_of(configs, pooled=pooled)
    parts: list[list[TableShard]] = [[] for _ in range(world_size)]
    copies: list[TableShard] = []
    for t, config in enumerate(configs):
        sharding = plan[config.name]
        whole = Shard(-1, (0, config.num_embeddings), (0, config.embedding_dim))
        if sharding.is_replicated:
            copies.append(TableShard(t, whole))
        for shard in sharding.shards:
            parts[shard.rank].append(TableShard(t, shard))

    def rank_layout(parts: Sequence[TableShard]) -> RankLayout:
        return _rank_layout(configs, plan, features, parts, arrange)

    replicated = rank_layout(copies)
    ranks = tuple(rank_layout(own) for own in parts)
    return CollectionLayout(features, sum(feature.dim for feature in features), ranks, replicated)


def send_ids_to_replicas(layout: CollectionLayout) -> CollectionLayout:
    """The layout where the ids of replicated tables go to every rank."""
    replicated_units = layout.replicated.units
    return layout._replace(
        ranks=tuple(rank._replace(replicated_units=replicated_units) for rank in layout.ranks)
    )


def slices_of(
    configs: Sequence[Config], plan: Mapping[str, ParameterSharding], parts: Sequence[TableShard]
) -> list[TableSlice]:
    """The parts of a rank as tables."""
    return [
        TableSlice(
            with_storage(configs[part.table], plan[configs[part.table].name].storage),
            part.shard.rows,
            part.shard.columns,
        )
        for part in parts
    ]


def _rank_layout(
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    features: Sequence[Feature],
    parts: Sequence[TableShard],
    arrange: Arrange,
) -> RankLayout:
    units = [
        LookupUnit(f, part.shard, p)
        for p, part in enumerate(parts)
        for f, feature in enumerate(features)
        if feature.table == part.table
    ]
    order = arrange(slices_of(configs, plan, parts), [unit.part for unit in units])
    ordered = tuple(units[u] for u in order)
    return RankLayout(tuple(parts), ordered, sum(unit.columns for unit in units))


class Blocks(NamedTuple):
    """Which units get which ids: rows of the tensors that `emblib.ops.route` takes.

    `features` (first block, blocks, rows, 1 if by key), `blocks` (first row, first copy, copies),
    `copies` unit numbers, counted rank after rank.
    """

    features: list[tuple[int, int, int, int]]
    blocks: list[tuple[int, int, int]]
    units: list[int]


def blocks_of(configs: Sequence[Config], layout: CollectionLayout) -> Blocks:
    """The blocks of rows that each feature's table is cut into.

    Raises:
        ValueError: shards of one table that overlap in rows and are not cut at the same ones.
    """
    by_feature: dict[int, dict[Span, list[int]]] = {}
    number = 0
    for rank in layout.ranks:
        for unit in rank.all_units:
            units_of = by_feature.setdefault(unit.feature, {})
            units_of.setdefault(unit.shard.rows, []).append(number)
            number += 1
    result = Blocks([], [], [])
    for f, feature in enumerate(layout.features):
        config = configs[feature.table]
        spans = sorted(by_feature.get(f, {}).items())
        _check_rows(config.name, [rows for rows, _ in spans])
        rows = config.num_embeddings
        is_keyed = config.storage.is_keyed
        result.features.append((len(result.blocks), len(spans), rows, int(is_keyed)))
        for (first_row, _), units in spans:
            result.blocks.append((first_row, len(result.units), len(units)))
            result.units.extend(units)
    return result


def _check_rows(name: str, spans: Sequence[Span]) -> None:
    for first, second in pairwise(spans):
        if first[1] > second[0]:
            raise ValueError(
                f"table {name}: shards that overlap in rows must be cut at the same ones, got rows "
                f"{first} and {second}"
            )
