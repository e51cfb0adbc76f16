"""TorchRec's words for where tables lie: plans of a module and of a model, how to write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from emblib import Placement, sharding
from emblib.collections import Plain, TableConfig
from emblib.sharding import Box, Ranks, TableSharding, World
from emblib.sharding.boxes import Rule, TableShape


class ShardingType(Enum):
    """Ways to spread a table."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """How a table is kept and trained.

    DENSE leaves gradients to an optimizer of torch.optim; the others run theirs in backward, the
    rows in the memory of the device, in the host's, or there behind a cache.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"


KINDS = {
    EmbeddingComputeKernel.FUSED_UVM.value: Plain(Placement.MANAGED),
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: Plain(Placement.MANAGED_CACHING),
}


@dataclass(frozen=True)
class ShardMetadata:
    """A part of a table: where it begins, its size, and where it lies (`rank:1/cpu`)."""

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: str


@dataclass(frozen=True)
class EnumerableShardingSpec:
    """The parts that tile a table."""

    shards: list[ShardMetadata]


@dataclass
class ParameterSharding:
    """How one table is spread. What counts is `sharding_spec`; a copy on every rank has none."""

    sharding_type: str
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value
    ranks: list[int] | None = None
    sharding_spec: Any = None

    def to_emblib(self) -> TableSharding:
        """As emblib says it.

        Raises:
            ValueError: a kernel that is not known here, or no spec for a type that needs one.
        """
        kernels = [kernel.value for kernel in EmbeddingComputeKernel]
        if self.compute_kernel not in kernels:
            raise ValueError(
                f"compute_kernel must be one of {', '.join(kernels)}, got {self.compute_kernel!r}"
            )
        kind = sharding.ShardingType(ShardingType(self.sharding_type).value)
        keep = KINDS.get(self.compute_kernel)
        if kind is sharding.ShardingType.DATA_PARALLEL:
            return TableSharding(kind, (), keep)
        if self.sharding_spec is None:
            raise ValueError(
                f"{self.sharding_type} needs a sharding_spec: construct_module_sharding_plan makes "
                "it from table_wise(rank), row_wise() and the like"
            )
        return TableSharding(kind, tuple(map(_box, self.sharding_spec.shards)), keep)

    @classmethod
    def of(cls, table: TableSharding, kernel: str, device_type: str) -> ParameterSharding:
        """From what emblib says."""
        keeps = {kind: name for name, kind in KINDS.items()}
        kernel = keeps.get(table.kind, kernel) if table.kind is not None else kernel
        if table.is_replicated:
            return cls(table.type.value, kernel)
        shards = [
            ShardMetadata(
                [box.rows[0], box.columns[0]],
                list(box.shape),
                f"rank:{box.rank}/{device_type}",
            )
            for box in table.boxes
        ]
        spec = EnumerableShardingSpec(shards)
        return cls(_type_name(table), kernel, [box.rank for box in table.boxes], spec)

    def __str__(self) -> str:
        return f"{self.sharding_type} ({self.compute_kernel}) on ranks {self.ranks or 'all'}"


def _type_name(table: TableSharding) -> str:
    known = [kind.value for kind in ShardingType]
    # Parts of any other tiling are still parts: TorchRec has no word for it.
    return table.type.value if table.type.value in known else ShardingType.ROW_WISE.value


def _box(shard: Any) -> Box:
    (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    placement = shard.placement
    text = placement if isinstance(placement, str) else f"rank:{placement.rank()}/"
    rank = int(text.removeprefix("rank:").partition("/")[0])
    return Box(rank, (row, row + rows), (column, column + columns))


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The sharding of each table of one collection, by name."""

    def to_emblib(self) -> dict[str, TableSharding]:
        """As emblib says it."""
        return {name: parameter.to_emblib() for name, parameter in self.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {parameter}" for name, parameter in self.items())


@dataclass
class ShardingPlan:
    """The plan of each collection by its path in the model."""

    plan: dict[str, EmbeddingModuleShardingPlan]
    told: str = ""  # what a planner has to say of it

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Of one collection, where it has one."""
        return self.plan.get(module_path)

    def to_emblib(self, world: World) -> sharding.ShardingPlan:
        """As emblib says it."""
        modules = {
            path: {name: parameter.to_emblib() for name, parameter in tables.items()}
            for path, tables in self.plan.items()
        }
        return sharding.ShardingPlan(modules, world)

    def __str__(self) -> str:
        parts = [f"module: {path}\n{tables}" for path, tables in self.plan.items()]
        return self.told or "\n\n".join(parts)


class ShardingEnv:
    """The ranks that a module is spread over."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.world_size, self.rank, self.process_group = ranks.size, ranks.rank, ranks.group

    @classmethod
    def from_process_group(cls, pg: Any) -> ShardingEnv:
        """All ranks of a process group."""
        return cls(Ranks.of(pg))

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """This process alone.

        Raises:
            ValueError: more than one: devices of one process are TorchRec's way to infer, which is
                `emblib.QuantizedEmbeddingBags` here.
        """
        if (world_size, rank) != (1, 0):
            raise ValueError(
                f"from_local is for world_size=1 and rank=0 here, got {world_size} and {rank}; "
                "start several processes and use from_process_group"
            )
        return cls(Ranks.single())


@dataclass(frozen=True)
class Placing:
    """What `table_wise` and the like return: a rule, and how the rows are kept."""

    rule: Rule
    compute_kernel: str | None = None


def data_parallel() -> Placing:
    """A copy on every rank."""
    return Placing(sharding.data_parallel())


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> Placing:
    """The whole table on one rank."""
    return Placing(sharding.table_wise(rank), compute_kernel)


def row_wise(
    sizes_placement: tuple[list[int], Any] | None = None, compute_kernel: str | None = None
) -> Placing:
    """Rows on all ranks: as even as can be, or `sizes_placement[0]` of them on rank 0, 1, ..."""
    if sizes_placement is None:
        return Placing(sharding.row_wise(), compute_kernel)
    sizes = list(sizes_placement[0])

    def rule(shape: TableShape, world: World) -> TableSharding:
        if len(sizes) > world.size or sum(sizes) != shape.rows:
            raise ValueError(
                f"sizes must be at most one a rank = {world.size} and add up to {shape.rows} rows, "
                f"got {sizes}"
            )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        boxes = tuple(
            Box(rank, (end - size, end), (0, shape.columns))
            for rank, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        )
        return TableSharding(sharding.ShardingType.ROW_WISE, boxes)

    return Placing(rule, compute_kernel)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> Placing:
    """Columns on `ranks`, evenly; or `size_per_rank[r]` of them on rank r.

    Raises:
        ValueError: neither of them.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise needs ranks or size_per_rank")
    if size_per_rank is None:
        return Placing(sharding.column_wise(ranks), compute_kernel)
    owners = list(range(len(size_per_rank))) if ranks is None else list(ranks)
    return Placing(sharding.column_wise(owners, sizes=list(size_per_rank)), compute_kernel)


def table_row_wise(host_index: int, compute_kernel: str | None = None) -> Placing:
    """Rows on the ranks of one host."""
    return Placing(sharding.table_row_wise(host_index), compute_kernel)


def table_column_wise(host_index: int, compute_kernel: str | None = None) -> Placing:
    """Columns on the ranks of one host."""
    return Placing(sharding.table_column_wise(host_index), compute_kernel)


def grid_shard(host_indexes: Sequence[int], compute_kernel: str | None = None) -> Placing:
    """Columns on several hosts, each block's rows on the ranks of its host."""
    return Placing(sharding.grid(list(host_indexes)), compute_kernel)


def configs_of(module: Any) -> Iterator[TableConfig]:
    """The configurations of a collection's tables."""
    told = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    yield from told()


def apply_to_all(
    module: Any, parameter_sharding_generator: Placing, sharder: Any = None
) -> dict[str, Placing]:
    """The same for every table."""
    return {config.name: parameter_sharding_generator for config in configs_of(module)}


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, Placing],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection by what `table_wise` and the like say of each table.

    Sizes are those of all processes unless they are given. A table is fused unless its kernel says
    otherwise: what optimizer it has is asked when it is sharded.
    """
    ranks = Ranks() if world_size is None or local_size is None else None
    size = world_size or (ranks.size if ranks else 1)
    world = World(size, local_size or (ranks.local_size if ranks else size))
    device = device_type or (str(ranks.device.type) if ranks else "cpu")
    for name, placing in per_param_sharding.items():
        if not hasattr(placing, "rule"):
            raise TypeError(
                f"table {name}: sharding is said by a call, e.g. row_wise() or table_wise(rank=0), "
                f"got {getattr(placing, '__name__', repr(placing))}"
            )
    rules = {name: placing.rule for name, placing in per_param_sharding.items()}
    tables = sharding.construct_module_plan(module, rules, world)
    fused = EmbeddingComputeKernel.FUSED.value
    return EmbeddingModuleShardingPlan(
        {
            name: ParameterSharding.of(
                table, per_param_sharding[name].compute_kernel or fused, device
            )
            for name, table in tables.items()
        }
    )
