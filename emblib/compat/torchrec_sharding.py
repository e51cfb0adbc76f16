"""TorchRec's sharding plans of modules and models, the functions to write them, and its planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from emblib import Placement, sharding
from emblib.collections import TableConfig
from emblib.sharding import RankGroup, Shard, World, planner
from emblib.sharding.planner.work import dense_bytes, workloads_of
from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result
from emblib.sharding.sharding_types import Rule, TableShape
from emblib.storage import Dense


class ShardingType(Enum):
    """Sharding types."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """Storage and training of a table.

    DENSE leaves gradients to an optimizer of torch.optim; the others run theirs in backward, the
    rows in the memory of the device, in the host's, or there behind a cache.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"


STORAGES = {
    EmbeddingComputeKernel.FUSED_UVM.value: Dense(Placement.MANAGED),
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: Dense(Placement.MANAGED_CACHING),
}


@dataclass(frozen=True)
class ShardMetadata:
    """A shard of a table: offsets, sizes, and rank with device (`rank:1/cpu`)."""

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: str


@dataclass(frozen=True)
class EnumerableShardingSpec:
    """The shards that tile a table."""

    shards: list[ShardMetadata]


@dataclass
class ParameterSharding:
    """Sharding of one table, by `sharding_spec`; a replicated table has none."""

    sharding_type: str
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value
    ranks: list[int] | None = None
    sharding_spec: Any = None

    def to_emblib(self) -> sharding.ParameterSharding:
        """Convert to emblib's class.

        Raises:
            ValueError: a kernel that is not known here, or no spec for a type that needs one.
        """
        kernels = [kernel.value for kernel in EmbeddingComputeKernel]
        if self.compute_kernel not in kernels:
            raise ValueError(
                f"compute_kernel must be one of {', '.join(kernels)}, got {self.compute_kernel!r}"
            )
        kind = sharding.ShardingType(ShardingType(self.sharding_type).value)
        storage = STORAGES.get(self.compute_kernel)
        if kind is sharding.ShardingType.DATA_PARALLEL:
            return sharding.ParameterSharding(kind, (), storage)
        if self.sharding_spec is None:
            raise ValueError(
                f"{self.sharding_type} needs a sharding_spec: construct_module_sharding_plan makes "
                "it from table_wise(rank), row_wise() and the like"
            )
        return sharding.ParameterSharding(
            kind, tuple(map(_box, self.sharding_spec.shards)), storage
        )

    @classmethod
    def of(
        cls, table: sharding.ParameterSharding, kernel: str, device_type: str
    ) -> ParameterSharding:
        """Convert from emblib's class."""
        kernels = {storage: name for name, storage in STORAGES.items()}
        kernel = kernels.get(table.storage, kernel) if table.storage is not None else kernel
        if table.is_replicated:
            return cls(table.type.value, kernel)
        shards = [
            ShardMetadata(
                [shard.rows[0], shard.columns[0]],
                list(shard.shape),
                f"rank:{shard.rank}/{device_type}",
            )
            for shard in table.shards
        ]
        spec = EnumerableShardingSpec(shards)
        return cls(_type_name(table), kernel, [shard.rank for shard in table.shards], spec)

    def __str__(self) -> str:
        return f"{self.sharding_type} ({self.compute_kernel}) on ranks {self.ranks or 'all'}"


def _type_name(table: sharding.ParameterSharding) -> str:
    known = [kind.value for kind in ShardingType]
    # Parts of any other tiling are still parts: TorchRec has no word for it.
    return table.type.value if table.type.value in known else ShardingType.ROW_WISE.value


def _box(shard: Any) -> Shard:
    (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    placement = shard.placement
    text = placement if isinstance(placement, str) else f"rank:{placement.rank()}/"
    rank = int(text.removeprefix("rank:").partition("/")[0])
    return Shard(rank, (row, row + rows), (column, column + columns))


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Sharding of each table of one collection, by name."""

    def to_emblib(self) -> dict[str, sharding.ParameterSharding]:
        """Convert to emblib's class."""
        return {name: parameter.to_emblib() for name, parameter in self.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {parameter}" for name, parameter in self.items())


@dataclass
class ShardingPlan:
    """Plan of each collection, by its path in the model."""

    plan: dict[str, EmbeddingModuleShardingPlan]
    report: str = ""  # what a planner has to say of it

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan of one collection, if there is one."""
        return self.plan.get(module_path)

    def to_emblib(self, world: World) -> sharding.ShardingPlan:
        """Convert to emblib's class."""
        modules = {
            path: {name: parameter.to_emblib() for name, parameter in tables.items()}
            for path, tables in self.plan.items()
        }
        return sharding.ShardingPlan(modules, world)

    def __str__(self) -> str:
        parts = [f"module: {path}\n{tables}" for path, tables in self.plan.items()]
        return self.report or "\n\n".join(parts)


class ShardingEnv:
    """The ranks that a module is sharded over."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.world_size, self.rank, self.process_group = ranks.size, ranks.rank, ranks.group

    @classmethod
    def from_process_group(cls, pg: Any) -> ShardingEnv:
        """Return all ranks of a process group."""
        return cls(RankGroup.from_value(pg))

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Return an environment of this process alone.

        Raises:
            ValueError: more than one: devices of one process are TorchRec's way to infer, which is
                `emblib.QuantizedEmbeddingBags` here.
        """
        if (world_size, rank) != (1, 0):
            raise ValueError(
                f"from_local is for world_size=1 and rank=0 here, got {world_size} and {rank}; "
                "start several processes and use from_process_group"
            )
        return cls(RankGroup.single())


@dataclass(frozen=True)
class Placing:
    """Result of `table_wise` and similar functions: a rule, and the storage of the rows."""

    rule: Rule
    compute_kernel: str | None = None


def data_parallel() -> Placing:
    """Replicate the table on every rank."""
    return Placing(sharding.data_parallel())


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> Placing:
    """Place the whole table on one rank."""
    return Placing(sharding.table_wise(rank), compute_kernel)


def row_wise(
    sizes_placement: tuple[list[int], Any] | None = None, compute_kernel: str | None = None
) -> Placing:
    """Divide rows over all ranks: evenly, or by `sizes_placement[0]`, one size per rank."""
    if sizes_placement is None:
        return Placing(sharding.row_wise(), compute_kernel)
    sizes = list(sizes_placement[0])

    def rule(shape: TableShape, world: World) -> sharding.ParameterSharding:
        if len(sizes) > world.size or sum(sizes) != shape.rows:
            raise ValueError(
                f"sizes must be at most one a rank = {world.size} and add up to {shape.rows} rows, "
                f"got {sizes}"
            )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        shards = tuple(
            Shard(rank, (end - size, end), (0, shape.columns))
            for rank, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        )
        return sharding.ParameterSharding(sharding.ShardingType.ROW_WISE, shards)

    return Placing(rule, compute_kernel)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> Placing:
    """Divide columns over `ranks`: evenly, or `size_per_rank[r]` columns on rank r.

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
    """Divide rows over the ranks of one host."""
    return Placing(sharding.table_row_wise(host_index), compute_kernel)


def table_column_wise(host_index: int, compute_kernel: str | None = None) -> Placing:
    """Divide columns over the ranks of one host."""
    return Placing(sharding.table_column_wise(host_index), compute_kernel)


def grid_shard(host_indexes: Sequence[int], compute_kernel: str | None = None) -> Placing:
    """Divide columns over hosts, and the rows of each block over the ranks of its host."""
    return Placing(sharding.grid(list(host_indexes)), compute_kernel)


def configs_of(module: Any) -> Iterator[TableConfig]:
    """Return the configurations of a collection's tables."""
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    yield from configs()


def apply_to_all(
    module: Any, parameter_sharding_generator: Placing, sharder: Any = None
) -> dict[str, Placing]:
    """Return the same sharding for every table."""
    return {config.name: parameter_sharding_generator for config in configs_of(module)}


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, Placing],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one collection, from the result of `table_wise` etc. for each table.

    Sizes are those of all processes unless they are given. A table is fused unless its kernel says
    otherwise: what optimizer it has is asked when it is sharded.
    """
    ranks = RankGroup() if world_size is None or local_size is None else None
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


BATCH_SIZE = 512  # TorchRec's, where none is given
_GIB = 1 << 30


class Topology:
    """Ranks and their memory, by default that of this machine.

    `hbm_cap` and `ddr_cap` are bytes a rank may use of a GPU's memory and of the host's; on a CPU
    rows are in the latter. Left out, they are what the machine has: TorchRec assumes 32 and 128
    GiB. Bandwidths are not arguments, as `emblib.sharding.planner.Calibration` measures them.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        calibration: planner.Calibration | None = None,
    ) -> None:
        self.world_size, self.compute_device = world_size, compute_device
        self.local_world_size = local_world_size or world_size
        # A plan for GPUs can be made on a machine without them, if their memory is given.
        elsewhere = compute_device == "cuda" and hbm_cap and not torch.cuda.is_available()
        make: Any = planner.Topology if elsewhere else planner.Topology.detect
        found: planner.Topology = make(
            world_size, self.local_world_size, device=compute_device, calibration=calibration
        )
        memory = hbm_cap if compute_device == "cuda" else ddr_cap
        changes: dict[str, Any] = {} if memory is None else {"memory": memory}
        if compute_device == "cuda" and ddr_cap is not None:
            changes["host_memory"] = ddr_cap
        if ssd_cap is not None:
            changes["disk"] = ssd_cap
        self.native: planner.Topology = dataclasses.replace(found, **changes)


@dataclass
class ParameterConstraints:
    """Constraints of the planner for a table, and facts that it cannot know."""

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] = field(default_factory=lambda: [1.0])
    batch_sizes: Sequence[int] | None = None

    def to_emblib(self) -> planner.TableConstraints:
        """Convert to emblib's class.

        Raises:
            ValueError: batch sizes that differ by feature, or kernels without any that keeps a
                table as it is configured.
        """
        types = self.sharding_types
        named = None
        if types is not None:
            named = tuple(sharding.ShardingType(ShardingType(t).value) for t in types)
        if self.batch_sizes is not None and len(set(self.batch_sizes)) > 1:
            raise ValueError(f"batch_sizes of a table must be equal, got {self.batch_sizes}")
        kernels = [EmbeddingComputeKernel(k).value for k in self.compute_kernels or ()]
        factors = tuple(self.pooling_factors)
        options: dict[str, Any] = {}
        if self.min_partition is not None:
            options["min_partition"] = self.min_partition
        return planner.TableConstraints(
            sharding_types=named,
            storages=tuple(STORAGES[k] for k in kernels if k in STORAGES),
            pooling_factor=factors[0] if len(factors) == 1 else factors,
            batch_size=self.batch_sizes[0] if self.batch_sizes else None,
            **options,
        )


class EmbeddingShardingPlanner:
    """Planner of the collections of a model.

    `storage_reservation` is an `emblib.sharding.planner.Reservation`. What a planner of emblib's
    says of the plan is printed by `print(plan)`.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        storage_reservation: planner.Reservation | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
    ) -> None:
        self._topology, self._batch_size = topology, batch_size or BATCH_SIZE
        self._reservation = storage_reservation or planner.Reservation()
        self._constraints = {name: given.to_emblib() for name, given in (constraints or {}).items()}

    def _native(self, ranks: RankGroup) -> planner.Planner:
        topology = None if self._topology is None else self._topology.native
        if topology is None:
            topology = planner.Topology.detect(
                ranks.size, ranks.local_size, device=ranks.device.type
            )
        return planner.Planner(
            topology, self._batch_size, self._constraints, reservation=self._reservation
        )

    def plan(self, module: nn.Module, sharders: Sequence[Any] = ()) -> ShardingPlan:
        """Plan on this rank; the memory includes the optimizers of `sharders`."""
        native = self._native(RankGroup())
        return _plan_with_report(native, module, sharders)

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] = (), pg: Any = None
    ) -> ShardingPlan:
        """Plan on rank 0, and return its plan on all ranks."""
        ranks = RankGroup.from_value(pg)
        native = self._native(ranks)
        found: ShardingPlan = invoke_on_rank_and_broadcast_result(
            ranks, 0, lambda: _plan_with_report(native, module, sharders)
        )
        return found


def _plan_with_report(
    native: planner.Planner, module: nn.Module, sharders: Sequence[Any]
) -> ShardingPlan:
    """Plan with the optimizers of the sharders."""
    works = [
        dataclasses.replace(work, optimizer=work.optimizer or _optimizer_of(module, work, sharders))
        for work in workloads_of(module, native.batch_size, native.constraints)
    ]
    found = native.solve_workloads(works, dense_bytes(module))
    return plan_of(found.plan, native.topology.device, str(found))


def _optimizer_of(module: nn.Module, work: planner.TableWorkload, sharders: Sequence[Any]) -> Any:
    collection = module.get_submodule(work.path)
    fitting = [s.optimizer for s in sharders if isinstance(collection, s.module_type)]
    return fitting[0] if fitting else None


def plan_of(plan: sharding.ShardingPlan, device_type: str, report: str = "") -> ShardingPlan:
    """Convert a plan of emblib to TorchRec's."""
    fused = EmbeddingComputeKernel.FUSED.value
    modules = {
        path: EmbeddingModuleShardingPlan(
            {name: ParameterSharding.of(t, fused, device_type) for name, t in tables.items()}
        )
        for path, tables in plan.modules.items()
    }
    return ShardingPlan(modules, report)
