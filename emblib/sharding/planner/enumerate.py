"""Enumerate the ways to shard a table.

An `Option` is one way: a sharding type, a storage, and groups of shards. The search places each
group on a rank or a node; some groups take all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emblib.optim import FTRL, SGD, Adagrad, Adam, External
from emblib.sharding import sharding_types
from emblib.sharding.layout import shape_of, with_storage
from emblib.sharding.planner.estimate import (
    INPUT,
    NO_LOAD,
    CommonCost,
    CostModel,
    Load,
    ShardShape,
    share_of_bags_with_ids,
)
from emblib.sharding.planner.topology import MemoryNeed, Topology
from emblib.sharding.planner.workloads import TableWorkload
from emblib.sharding.sharding_types import (
    ParameterSharding,
    Rule,
    Shard,
    ShardingType,
    TableShape,
    column_spans,
)
from emblib.specs import OptionEnum
from emblib.storage import Storage, TableSlice

_COLUMN_TYPES = frozenset(
    {ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID}
)
_KEYED_TYPES = frozenset(
    {ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE}
)
_TYPES_ON_REQUEST = frozenset({ShardingType.GRID})  # only if the constraints name them


class Domain(OptionEnum):
    """The kind of target that a group is placed on: one RANK, one NODE, or the whole WORLD."""

    RANK = "rank"
    NODE = "node"
    WORLD = "world"


@dataclass(frozen=True)
class ShardGroup:
    """Shards of a table that are placed together.

    Attributes:
        domain: kind of target that the group is placed on.
        loads: one load per rank. The domain RANK has one load, NODE one per rank of the node, in
            order. In the domain WORLD the loads belong to the ranks from `first_rank` on: each is
            the difference of the rank's load from `Option.common_cost`, and may be negative.
        first_rank: rank of the first load in the domain WORLD; unused in the others.
    """

    domain: Domain
    loads: tuple[Load, ...]
    first_rank: int = 0

    @property
    def seconds(self) -> float:
        """Return the sum of the seconds of all loads."""
        return sum(sum(load.seconds) for load in self.loads)


@dataclass(frozen=True)
class Option:
    """One way to shard a table, before its groups are placed.

    Attributes:
        type: sharding type.
        storage: storage of the table; None for the configured one.
        groups: groups of shards to place; empty for a replicated table.
        common_cost: cost that all ranks have.
        penalty: 0 for the configured storage, n for the n-th alternative.
        custom_shards: shards of the type CUSTOM, which fix their ranks; empty for other types.
        cuts_rows: whether any shard has only a part of the rows.
        sums_in_nodes: whether nodes sum rows before they are sent.
    """

    type: ShardingType
    storage: Storage | None
    groups: tuple[ShardGroup, ...]
    common_cost: CommonCost
    penalty: int = 0
    custom_shards: tuple[Shard, ...] = ()
    cuts_rows: bool = False
    sums_in_nodes: bool = False

    @property
    def exchanges_ids(self) -> bool:
        """Return whether ids of the table pass through the exchange of a step.

        True of every table with shards, also on one rank. Ids of a replicated table are exchanged
        only if its optimizer is fused; summing its dense gradients is not such an exchange.
        """
        return self.type is not ShardingType.DATA_PARALLEL or self.common_cost.seconds[INPUT] > 0

    def seconds(self, world_size: int) -> float:
        """Return the seconds of all ranks together."""
        groups_s = sum(group.seconds for group in self.groups)
        return groups_s + world_size * (sum(self.common_cost.seconds) + self.common_cost.arrange_s)

    def nbytes(self, world_size: int) -> MemoryNeed:
        """Return the bytes on all ranks together."""
        total_need = MemoryNeed(0, 0).plus(self.common_cost.nbytes, world_size)
        for group in self.groups:
            for load in group.loads:
                total_need = total_need.plus(load.nbytes)
        return total_need

    def sharding(
        self, workload: TableWorkload, topology: Topology, targets: Sequence[int]
    ) -> ParameterSharding:
        """Return the sharding of the table with its groups on these targets.

        `targets` are the rank or node of each group, 0 for the domain WORLD.
        """
        shape = shape_of(workload.config, self.storage)
        sharding = self._rule(tuple(targets))(shape, topology.world)
        return ParameterSharding(sharding.type, sharding.shards, self.storage)

    def _rule(self, targets: tuple[int, ...]) -> Rule:
        """Return the sharding rule of the type, for these ranks or nodes."""
        if self.type is ShardingType.CUSTOM:
            return sharding_types.custom(self.custom_shards)
        rules: dict[ShardingType, Rule] = {
            ShardingType.DATA_PARALLEL: sharding_types.data_parallel(),
            ShardingType.ROW_WISE: sharding_types.row_wise(),
            ShardingType.COLUMN_WISE: sharding_types.column_wise(targets),
            ShardingType.GRID: sharding_types.grid(targets),
        }
        if self.type in rules:
            return rules[self.type]
        rules_of_one_target = {
            ShardingType.TABLE_WISE: sharding_types.table_wise,
            ShardingType.TABLE_ROW_WISE: sharding_types.table_row_wise,
            ShardingType.TABLE_COLUMN_WISE: sharding_types.table_column_wise,
        }
        return rules_of_one_target[self.type](targets[0])


def enumerate_options(workload: TableWorkload, model: CostModel) -> list[Option]:
    """Return the options of all allowed types, those of the configured storage first.

    The list is not complete: of the numbers of column shards only some are tried, and no option is
    CUSTOM. It is never empty.

    Raises:
        ValueError: the constraints allow no option, or allow a hash table another storage.
    """
    if workload.config.storage.is_keyed and workload.constraints.storages:
        raise ValueError(
            f"table {workload.name} is a hash table, which cannot have another storage: leave "
            "`storages` out of its constraints"
        )
    options = []
    storages: list[Storage | None] = [None, *workload.constraints.storages]
    for penalty, storage in enumerate(storages):
        for sharding_type in allowed_types(workload, model.topology, storage):
            options += list(_enumerate_type(workload, model, sharding_type, storage, penalty))
    if not options:
        types = workload.constraints.sharding_types or allowed_types(workload, model.topology, None)
        raise ValueError(
            f"no sharding type that is allowed for table {workload.name} can hold it: "
            f"{[sharding_type.value for sharding_type in types]} on "
            f"{model.topology.num_nodes} nodes of {model.topology.local_world_size} ranks"
        )
    return options


def cuts_columns_exactly(workload: TableWorkload) -> bool:
    """Return whether the optimizer updates column shards exactly as it updates full rows.

    That holds for optimizers whose update of an element depends on that element alone, and for
    tables without an optimizer.
    """
    optimizer = workload.optimizer
    return optimizer is None or type(optimizer) in (SGD, Adagrad, Adam, FTRL, External)


def allowed_types(
    workload: TableWorkload, topology: Topology, storage: Storage | None
) -> list[ShardingType]:
    """Return the types that the constraints allow, in the order of `ShardingType`.

    If the constraints name no types, these are the types that change no result.

    Hash tables have only the types in `_KEYED_TYPES`. Left out by default are the types in
    `_TYPES_ON_REQUEST`, types that cut columns if the optimizer needs whole rows
    (`cuts_columns_exactly`), and types that equal another type in this topology. `storage` is the
    storage of the table, None for the configured one.
    """
    requested_types = workload.constraints.sharding_types
    types = set(ShardingType if requested_types is None else requested_types)
    if with_storage(workload.config, storage).storage.is_keyed:
        types &= _KEYED_TYPES
    if requested_types is None:
        types -= _TYPES_ON_REQUEST
        if not cuts_columns_exactly(workload):
            types -= _COLUMN_TYPES
        if topology.num_nodes == 1 or topology.local_world_size == 1:
            # With one node, or one rank per node, these are the same as ROW_WISE and COLUMN_WISE
            # or TABLE_WISE.
            types -= {ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE}
        if topology.world_size == 1:
            types &= {ShardingType.TABLE_WISE, ShardingType.CUSTOM}
    return [sharding_type for sharding_type in ShardingType if sharding_type in types]


def min_nbytes(options: Sequence[Option], world_size: int) -> float:
    """Return the fewest bytes on all ranks together that any option needs, in its largest field."""
    return min(max(option.nbytes(world_size)) for option in options)


class ShardCosts:
    """Compute the cost of shards of one table with one storage; equal shapes are computed once.

    `storage` is None for the configured one.
    """

    def __init__(self, workload: TableWorkload, model: CostModel, storage: Storage | None) -> None:
        self.workload, self.model, self.storage = workload, model, storage
        self.config = with_storage(workload.config, storage)
        self._loads: dict[tuple[int, int, float, bool], Load] = {}

    def id_shares(self, shards: Sequence[Shard]) -> list[float]:
        """Return each shard's share of the table's ids, which is its share of the rows.

        Blocks of keys, in a hash table, have equal shares. `shards` must be all shards of the
        table.
        """
        if self.config.storage.is_keyed:
            return [1.0 / len({shard.rows for shard in shards})] * len(shards)
        return [shard.shape[0] / self.config.num_embeddings for shard in shards]

    def slice_of(self, shard: Shard) -> TableSlice:
        """Return a shard as a slice of the table."""
        return TableSlice(self.config, shard.rows, shard.columns)

    def are_summed(self, shards: Sequence[Shard]) -> list[bool]:
        """Return, per shard, whether its node sums its rows with rows of its other shards.

        The condition is that of `layout.sum_in_nodes`, and that sums save messages.
        """
        local_size = self.model.topology.local_world_size
        if not self.config.pooled or local_size == 1 or self.model.topology.num_nodes == 1:
            return [False] * len(shards)
        # The ranks of each range of columns, and the rows that they send per bag.
        ranks_by_columns: dict[tuple[int, int], set[int]] = {}
        rows_per_bag: dict[tuple[int, int], float] = {}
        for shard, id_share in zip(shards, self.id_shares(shards), strict=True):
            ranks_by_columns.setdefault(shard.columns, set()).add(shard.rank)
            bag_share = share_of_bags_with_ids(self.workload, id_share)
            rows_per_bag[shard.columns] = rows_per_bag.get(shard.columns, 0.0) + bag_share
        # Sums save nothing if each bag has ids in only one block: the other blocks send no row.
        return [
            len(ranks_by_columns[shard.columns]) == local_size
            and len({rank // local_size for rank in ranks_by_columns[shard.columns]}) == 1
            and rows_per_bag[shard.columns] > 1.0 + 1e-9  # shares are rounded
            for shard in shards
        ]

    def load(self, shard: Shard, id_share: float, *, is_summed: bool = False) -> Load:
        """Return the cost of a shard for the rank that stores it, see `CostModel.shard_load`."""
        key = (*shard.shape, id_share, is_summed)
        if key not in self._loads:
            self._loads[key] = self.model.shard_load(
                self.workload, self.slice_of(shard), id_share, is_summed=is_summed
            )
        return self._loads[key]

    def common_cost(self, shards: Sequence[Shard]) -> CommonCost:
        """Return the cost of the shards for every rank."""
        columns = (shard.shape[1] for shard in shards)
        shapes = map(ShardShape, columns, self.id_shares(shards), self.are_summed(shards))
        return self.model.common_cost(self.workload, shapes)

    def replicated_cost(self) -> CommonCost:
        """Return the cost of a replicated table for every rank."""
        return self.model.replicated_cost(self.workload, TableSlice.whole(self.config))


def _enumerate_type(
    workload: TableWorkload,
    model: CostModel,
    sharding_type: ShardingType,
    storage: Storage | None,
    penalty: int,
) -> Iterator[Option]:
    """Yield the options of one sharding type; `storage` is None for the configured storage."""
    shard_costs, topology = ShardCosts(workload, model, storage), model.topology
    if sharding_type is ShardingType.DATA_PARALLEL:
        yield Option(sharding_type, storage, (), shard_costs.replicated_cost(), penalty)
        return
    shape = shape_of(workload.config, storage)
    for rule, domain in _placeholder_rules(
        shape, topology, sharding_type, workload.constraints.min_partition
    ):
        shards = rule(shape, topology.world).shards
        if len(shards) < 2 and sharding_type in (ShardingType.COLUMN_WISE, ShardingType.GRID):
            continue
        if not shard_costs.config.storage.can_divide(len({shard.rows for shard in shards})):
            continue
        yield build_option(shard_costs, sharding_type, shards, domain, penalty)


def build_option(
    shard_costs: ShardCosts,
    sharding_type: ShardingType,
    shards: Sequence[Shard],
    domain: Domain,
    penalty: int,
) -> Option:
    """Build an option from the shards of a table: compute their costs, place nothing.

    Args:
        shard_costs: costs of shards of the table.
        sharding_type: type of the option.
        shards: all shards of the table. With the domain RANK or NODE their ranks only group them;
            with WORLD the shards stay on their ranks.
        domain: kind of target that each group of the option is placed on.
        penalty: penalty of the storage, see `Option`.
    """
    topology = shard_costs.model.topology
    is_summed_by_shard = shard_costs.are_summed(shards)
    loads = [
        shard_costs.load(shard, id_share, is_summed=is_summed)
        for shard, id_share, is_summed in zip(
            shards, shard_costs.id_shares(shards), is_summed_by_shard, strict=True
        )
    ]
    common_cost = shard_costs.common_cost(shards)
    if domain is Domain.WORLD:
        loads_by_rank = _loads_by_rank(shards, loads, topology.world_size)
        common_load, group = _split_off_common_load(loads_by_rank)
        seconds, nbytes = common_load
        # The seconds are replaced: those of `ShardCosts.common_cost` are 0.
        common_cost = common_cost._replace(seconds=seconds, nbytes=common_cost.nbytes.plus(nbytes))
        groups: tuple[ShardGroup, ...] = (group,)
    else:
        groups = tuple(_make_groups(shards, loads, domain, topology))
    custom_shards = tuple(shards) if sharding_type is ShardingType.CUSTOM else ()
    cuts_rows = any(shard.shape[0] < shard_costs.config.num_embeddings for shard in shards)
    return Option(
        sharding_type,
        shard_costs.storage,
        groups,
        common_cost,
        penalty,
        custom_shards,
        cuts_rows,
        any(is_summed_by_shard),
    )


def _loads_by_rank(shards: Sequence[Shard], loads: Sequence[Load], num_ranks: int) -> list[Load]:
    """Return the sum of the loads of each rank modulo `num_ranks`; `NO_LOAD` for a rank without."""
    load_sums = [NO_LOAD] * num_ranks
    for shard, load in zip(shards, loads, strict=True):
        load_sum = load_sums[shard.rank % num_ranks]
        load_sums[shard.rank % num_ranks] = load if load_sum is NO_LOAD else load_sum.plus(load, 1)
    return load_sums


def _split_off_common_load(loads: Sequence[Load]) -> tuple[Load, ShardGroup]:
    """Split loads by rank into a load that all ranks have, and a group of the differences from it.

    Equal blocks of rows have equal loads; only the last blocks may be smaller or missing. The
    common load is then the load of rank 0, and the group has the last ranks. For any other pattern
    the group has all loads, and the common load is `NO_LOAD`.
    """
    common_load, num_common = loads[0], len(loads)
    while num_common > 0 and loads[num_common - 1] != common_load:
        num_common -= 1
    if any(load != common_load for load in loads[:num_common]):
        return NO_LOAD, ShardGroup(Domain.WORLD, tuple(loads))
    differences = tuple(load.plus(common_load, -1) for load in loads[num_common:])
    return common_load, ShardGroup(Domain.WORLD, differences, num_common)


def _placeholder_rules(
    shape: TableShape, topology: Topology, sharding_type: ShardingType, min_partition: int
) -> Iterator[tuple[Rule, Domain]]:
    """Yield rules with placeholder targets 0, 1, ..., which the search replaces, and their domains.

    No rule cuts a table into column shards of fewer than `min_partition` columns.
    """
    if sharding_type is ShardingType.TABLE_WISE:
        yield sharding_types.table_wise(0), Domain.RANK
    elif sharding_type is ShardingType.ROW_WISE:
        yield sharding_types.row_wise(), Domain.WORLD
    elif sharding_type is ShardingType.COLUMN_WISE:
        for num_shards in _column_counts(shape, topology.world_size, min_partition):
            yield sharding_types.column_wise(range(num_shards)), Domain.RANK
    elif sharding_type is ShardingType.TABLE_ROW_WISE:
        yield sharding_types.table_row_wise(0), Domain.NODE
    elif sharding_type is ShardingType.TABLE_COLUMN_WISE:
        if _are_wide_enough(shape, topology.local_world_size, min_partition):
            yield sharding_types.table_column_wise(0), Domain.NODE
    elif sharding_type is ShardingType.GRID:
        for num_shards in _column_counts(shape, topology.num_nodes, min_partition):
            yield sharding_types.grid(range(num_shards)), Domain.NODE


def _column_counts(shape: TableShape, max_count: int, min_partition: int) -> list[int]:
    """Return the numbers of column shards to try: powers of two, and the largest one.

    Numbers that `_are_wide_enough` refuses are left out.
    """
    max_count = min(max_count, shape.columns // min_partition)
    while max_count > 1 and not _are_wide_enough(shape, max_count, min_partition):
        max_count -= 1
    counts = {2**k for k in range(1, max_count.bit_length())} | {max_count}
    return sorted(
        count for count in counts if count > 1 and _are_wide_enough(shape, count, min_partition)
    )


def _are_wide_enough(shape: TableShape, num_shards: int, min_partition: int) -> bool:
    """Return whether a cut by columns makes only shards of `min_partition` columns or more."""
    # The last shard may be narrower than the others, whose widths are rounded up.
    return all(end - start >= min_partition for start, end in column_spans(shape, num_shards))


def _make_groups(
    shards: Sequence[Shard], loads: Sequence[Load], domain: Domain, topology: Topology
) -> Iterator[ShardGroup]:
    """Yield one group per shard (RANK) or per node (NODE); ranks without a shard get `NO_LOAD`."""
    if domain is Domain.RANK:
        for load in loads:
            yield ShardGroup(domain, (load,))
        return
    local_size = topology.local_world_size
    for node in dict.fromkeys(shard.rank // local_size for shard in shards):
        indices = [i for i, shard in enumerate(shards) if shard.rank // local_size == node]
        loads_of_node = _loads_by_rank(
            [shards[i] for i in indices], [loads[i] for i in indices], local_size
        )
        yield ShardGroup(domain, tuple(loads_of_node))
