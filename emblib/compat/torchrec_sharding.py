"""TorchRec's sharding plans of modules and models, and the functions to write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import CacheConfig, CachePolicy, Placement, sharding
from emblib.collections import TableConfig
from emblib.compat.fbgemm_types import CacheAlgorithm
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.sharding import RankGroup, Shard, World
from emblib.sharding.checkpoints.sharded_table import ShardedTable
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

    DENSE leaves gradients to an optimizer of torch.optim. FUSED, FUSED_UVM and FUSED_UVM_CACHING
    run the optimizer in backward; rows are in the memory of the device, in host memory, or in host
    memory behind a cache of the device. QUANT is the kernel of quantised collections. The other
    members are for code that names them: a plan with one raises ValueError.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    KEY_VALUE = "key_value"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"


KERNELS = tuple(
    kernel.value
    for kernel in (
        EmbeddingComputeKernel.DENSE,
        EmbeddingComputeKernel.FUSED,
        EmbeddingComputeKernel.FUSED_UVM,
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
        EmbeddingComputeKernel.QUANT,
    )
)
"""Values of the kernels that emblib has."""


def checked_kernel(kernel: Any) -> str:
    """Return the value of a kernel of emblib's.

    Raises:
        ValueError: the kernel is unknown.
    """
    value = str(getattr(kernel, "value", kernel))
    if value not in KERNELS:
        raise ValueError(
            f"compute_kernel must be one of {', '.join(KERNELS)}, got {value!r}: rows on disks or "
            f"behind other tiers are a storage of the table (docs/tiers.md). {RUN_TORCHREC_ITSELF}"
        )
    return value


# Storage of the rows by kernel; other kernels leave the storage in the table's configuration.
STORAGES = {
    EmbeddingComputeKernel.FUSED_UVM.value: Dense(Placement.MANAGED),
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: Dense(Placement.MANAGED_CACHING),
}


@dataclass(frozen=True)
class ShardMetadata:
    """A shard of a table, a block of its rows and columns."""

    shard_offsets: list[int]  # first row and first column
    shard_sizes: list[int]  # rows and columns
    placement: str  # rank and device, such as rank:1/cpu


class LocalShard(NamedTuple):
    """The values of a shard of this rank, and where it is in the table."""

    tensor: Tensor
    metadata: ShardMetadata


class ShardedTensor(ShardedTable):
    """The value of a sharded table in a state dict, with the methods of torch's `ShardedTensor`.

    It is a `ShardedTable` of emblib: `torch.distributed.checkpoint` saves and loads it.
    """

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> ShardedTensor:
        """Return a tensor with the same shards; `parts` are the values of this rank, by shard."""
        return ShardedTensor(self.size(), self.shards, parts, self.ranks, dtype or self.dtype)

    def local_shards(self) -> list[LocalShard]:
        """Return the shards of this rank; their tensors are the memory of the table."""
        local_shards = []
        for shard_index, part in self.parts.items():
            shard, num_dims = self.shards[shard_index], self.dim()
            offsets = [shard.rows[0], shard.columns[0]][:num_dims]
            metadata = ShardMetadata(
                offsets, list(shard.shape)[:num_dims], f"rank:{shard.rank}/{part.device.type}"
            )
            local_shards.append(LocalShard(part, metadata))
        return local_shards

    def local_tensor(self) -> Tensor:
        """Return the values of the only shard of this rank.

        Raises:
            ValueError: it has none, or several.
        """
        if len(self.parts) != 1:
            raise ValueError(f"this rank has {len(self.parts)} shards: use local_shards()")
        return next(iter(self.parts.values()))

    def copy_(self, other: Tensor, non_blocking: bool = False) -> ShardedTensor:
        """Overwrite the shards of this rank, from a tensor sharded alike or from a whole one."""
        if isinstance(other, ShardedTable):
            super().copy_(other, non_blocking)
            return self
        if other.size() != self.size():
            raise ValueError(
                f"copy_ needs the whole table of size {list(self.size())}, got {list(other.size())}"
            )
        for shard_index, part in self.parts.items():
            shard = self.shards[shard_index]
            rows = other[slice(*shard.rows)]
            part.copy_(rows[:, slice(*shard.columns)] if other.dim() > 1 else rows, non_blocking)
        return self


@dataclass(frozen=True)
class EnumerableShardingSpec:
    """The shards that tile a table."""

    shards: list[ShardMetadata]


@dataclass
class CacheParams:
    """The cache of a table whose kernel is FUSED_UVM_CACHING.

    None is emblib's default. `prefetch_pipeline` has no effect: any cache may be prefetched.

    Raises:
        ValueError: `reserved_memory`, `precision`, `stats` or `multipass_prefetch_config`.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: Any = None
    prefetch_pipeline: bool | None = None
    stats: Any = None
    multipass_prefetch_config: Any = None

    def __post_init__(self) -> None:
        names = ("reserved_memory", "precision", "stats", "multipass_prefetch_config")
        set_options = [name for name in names if getattr(self, name) is not None]
        if set_options:
            raise ValueError(
                f"{', '.join(set_options)} of CacheParams must be None: give the table "
                "storage=Dense(Placement.MANAGED_CACHING, CacheConfig(...)), which has emblib's "
                f"options (any cache may be prefetched). {RUN_TORCHREC_ITSELF}"
            )

    @classmethod
    def of(cls, cache: CacheConfig) -> CacheParams:
        """Convert from emblib's class."""
        return cls(CacheAlgorithm[cache.policy.name], cache.load_factor)

    def storage(self) -> Dense:
        """Return emblib's storage."""
        options: dict[str, Any] = {}
        if self.algorithm is not None:
            options["policy"] = CachePolicy(CacheAlgorithm(self.algorithm).name.lower())
        if self.load_factor is not None:
            options["load_factor"] = self.load_factor
        return Dense(Placement.MANAGED_CACHING, CacheConfig(**options))


def refuse_table_options(owner: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError if an option is set, to anything but None or False.

    Args:
        owner: class that has the options, for the message.
        values: values of options, by their names in `WAYS_OUT`.
    """
    # A mode may have the value 0.
    set_options = [
        name for name, value in values.items() if value is not None and value is not False
    ]
    if set_options:
        ways_out = "; ".join(f"{name}: {WAYS_OUT[name]}" for name in set_options)
        raise ValueError(
            f"{', '.join(set_options)} of {owner} must be left out here. {ways_out}. "
            f"{RUN_TORCHREC_ITSELF}"
        )


# Options of FBGEMM's tables that have no effect here, and what to use instead.
WAYS_OUT = {
    "stochastic_rounding": "rounding=StochasticRounding() of the table's configuration",
    "bounds_check_mode": "invalid ids are skipped with a warning",
    "output_dtype": "lookups return float32; cast them",
    "key_value_params": "a storage with a disk or backing tier (docs/tiers.md)",
    "device_group": "one device type per plan",
    "use_virtual_table": "storage=Hash() of the table's configuration",
    "num_poolings": "pooling_factors has the ids per example",
    "cache_params": "compute_kernels=[FUSED_UVM_CACHING]",
    "enforce_hbm": "optimizer states are where the rows are",
}


class ModuleShardingPlan:
    """Base of the plan of one module."""


@dataclass
class ParameterSharding:
    """Sharding of one table.

    Attributes:
        sharding_type: value of a `ShardingType`.
        compute_kernel: value of an `EmbeddingComputeKernel`.
        ranks: ranks of the shards, in their order; None for a replicated table.
        sharding_spec: an `EnumerableShardingSpec` of the shards; None for a replicated table.
        cache_params: cache of a table whose kernel is FUSED_UVM_CACHING.

    Raises:
        ValueError: options of FBGEMM's tables that emblib has elsewhere.
    """

    sharding_type: str
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value
    ranks: list[int] | None = None
    sharding_spec: Any = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    output_dtype: Any = None
    key_value_params: Any = None

    def __post_init__(self) -> None:
        names = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
        refuse_table_options(
            "ParameterSharding", {n: getattr(self, n) for n in (*names, "key_value_params")}
        )

    def to_emblib(self) -> sharding.ParameterSharding:
        """Convert to emblib's class.

        Raises:
            ValueError: a kernel that is not known here, `cache_params` with a kernel other than
                FUSED_UVM_CACHING, or no spec for a type that needs one.
        """
        storage = STORAGES.get(checked_kernel(self.compute_kernel))
        native_type = sharding.ShardingType(ShardingType(self.sharding_type).value)
        if self.cache_params is not None:
            if self.compute_kernel != EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
                raise ValueError(
                    "cache_params are for compute_kernel fused_uvm_caching, got "
                    f"{self.compute_kernel!r}"
                )
            storage = self.cache_params.storage()
        if native_type is sharding.ShardingType.DATA_PARALLEL:
            return sharding.ParameterSharding(native_type, (), storage)
        if self.sharding_spec is None:
            raise ValueError(
                f"{self.sharding_type} needs a sharding_spec: construct_module_sharding_plan makes "
                "it from table_wise(rank), row_wise() and the like"
            )
        return sharding.ParameterSharding(
            native_type, tuple(map(_to_shard, self.sharding_spec.shards)), storage
        )

    @classmethod
    def of(
        cls, table: sharding.ParameterSharding, kernel: str, device_type: str
    ) -> ParameterSharding:
        """Convert from emblib's class; the storage of the table, if it has one, sets the kernel."""
        if table.is_replicated:
            converted = cls(table.type.value, kernel)
        else:
            shards = [
                ShardMetadata(
                    [shard.rows[0], shard.columns[0]],
                    list(shard.shape),
                    f"rank:{shard.rank}/{device_type}",
                )
                for shard in table.shards
            ]
            ranks = [shard.rank for shard in table.shards]
            converted = cls(
                _torchrec_type_name(table), kernel, ranks, EnumerableShardingSpec(shards)
            )
        converted.set_storage(table.storage)
        return converted

    def set_storage(self, storage: Any) -> None:
        """Set kernel and cache to those of a storage; one without a kernel changes nothing."""
        if isinstance(storage, Dense) and storage.cache is not None:
            self.cache_params, storage = CacheParams.of(storage.cache), Dense(storage.placement)
        kernel_of_storage = {other: name for name, other in STORAGES.items()}
        self.compute_kernel = kernel_of_storage.get(storage, self.compute_kernel)

    def __str__(self) -> str:
        return f"{self.sharding_type} ({self.compute_kernel}) on ranks {self.ranks or 'all'}"


def _torchrec_type_name(table: sharding.ParameterSharding) -> str:
    """Return TorchRec's name of a table's sharding type; of types that it lacks, ROW_WISE."""
    torchrec_names = [kind.value for kind in ShardingType]
    return table.type.value if table.type.value in torchrec_names else ShardingType.ROW_WISE.value


def _to_shard(shard: Any) -> Shard:
    """Convert a `ShardMetadata` of this module or of torch, whose placement is an object."""
    (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    placement = shard.placement
    placement_text = placement if isinstance(placement, str) else f"rank:{placement.rank()}/"
    rank = int(placement_text.removeprefix("rank:").partition("/")[0])
    return Shard(rank, (row, row + rows), (column, column + columns))


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
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
    report: str = ""  # the planner's report, shown by `print`

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
    """The ranks that a module is sharded over, or the devices of one process (`is_local`).

    Args:
        world_size: a `RankGroup` of emblib, or the number of devices of this process, which is
            ignored if `pg` is passed.
        rank: the number of this device; None is 0. Ignored unless `world_size` is the number of
            devices.
        pg: the process group; ignored if `world_size` is a `RankGroup`.
        output_dtensor: False; state dicts have tensors that `torch.distributed.checkpoint` saves.

    Raises:
        ValueError: `output_dtensor` is True, or `rank` is outside `[0, world_size)`.
    """

    def __init__(
        self,
        world_size: int | RankGroup,
        rank: int | None = None,
        pg: Any = None,
        output_dtensor: bool = False,
    ) -> None:
        if output_dtensor:
            raise ValueError(
                "output_dtensor must be False: DTensor has no table on one rank; state dicts have "
                "ShardedTable, which torch.distributed.checkpoint saves and loads (checkpoints.md)"
            )
        self.is_local = not isinstance(world_size, RankGroup) and pg is None
        if isinstance(world_size, RankGroup):
            self.ranks = world_size
        else:
            self.ranks = RankGroup.single() if pg is None else RankGroup.from_value(pg)
        self.rank, self.process_group = self.ranks.rank, self.ranks.group
        self.world_size = self.ranks.size
        if self.is_local:
            assert isinstance(world_size, int)
            self.world_size, self.rank = world_size, rank or 0
            if not 0 <= self.rank < self.world_size:
                raise ValueError(f"rank must be one of 0 to {world_size - 1}, got {rank}")

    @classmethod
    def from_process_group(cls, pg: Any, output_dtensor: bool = False) -> ShardingEnv:
        """Return all ranks of a process group."""
        return cls(RankGroup.from_value(pg), output_dtensor=output_dtensor)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Return `world_size` devices of this process; above 1 only for quantised collections."""
        return cls(world_size, rank)

    def training_ranks(self) -> RankGroup:
        """Return the ranks that train.

        Raises:
            ValueError: a process has several devices.
        """
        if self.is_local and self.world_size > 1:
            raise ValueError(
                f"{self.world_size} devices of one process (from_local) are for quantised "
                "collections; to train, start several processes and use from_process_group"
            )
        return self.ranks


@dataclass(frozen=True)
class ShardingRule:
    """Rule for the sharding of a table whose sizes are not known yet, e.g. by `table_wise`."""

    rule: Rule  # returns the sharding, given the shape of the table and the ranks
    compute_kernel: str | None = None  # None is FUSED


def data_parallel() -> ShardingRule:
    """Replicate the table on every rank."""
    return ShardingRule(sharding.data_parallel())


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ShardingRule:
    """Place the whole table on one rank; `device` is ignored."""
    return ShardingRule(sharding.table_wise(rank), compute_kernel)


def row_wise(
    sizes_placement: tuple[list[int], Any] | None = None, compute_kernel: str | None = None
) -> ShardingRule:
    """Divide rows over all ranks: evenly, or by `sizes_placement[0]`, sizes of the first ranks.

    `sizes_placement[1]`, a device, is ignored. Sizes that do not add up to the rows of a table
    raise ValueError where the plan is made.
    """
    if sizes_placement is None:
        return ShardingRule(sharding.row_wise(), compute_kernel)
    sizes = list(sizes_placement[0])

    def rule(shape: TableShape, world: World) -> sharding.ParameterSharding:
        if len(sizes) > world.size or sum(sizes) != shape.rows:
            raise ValueError(
                f"sizes must be at most one per rank = {world.size} and add up to {shape.rows} "
                f"rows, got {sizes}"
            )
        end_rows = itertools.accumulate(sizes)
        shards = tuple(
            Shard(rank, (end - size, end), (0, shape.columns))
            for rank, (size, end) in enumerate(zip(sizes, end_rows, strict=True))
            if size
        )
        return sharding.ParameterSharding(sharding.ShardingType.ROW_WISE, shards)

    return ShardingRule(rule, compute_kernel)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ShardingRule:
    """Divide columns over `ranks`: evenly, or `size_per_rank[i]` columns on `ranks[i]`.

    Without `ranks` they are 0, 1, ..., one per size.

    Raises:
        ValueError: neither of them is set.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise needs ranks or size_per_rank")
    if size_per_rank is None:
        return ShardingRule(sharding.column_wise(ranks), compute_kernel)
    owners = list(range(len(size_per_rank))) if ranks is None else list(ranks)
    return ShardingRule(sharding.column_wise(owners, sizes=list(size_per_rank)), compute_kernel)


def table_row_wise(host_index: int, compute_kernel: str | None = None) -> ShardingRule:
    """Divide rows over the ranks of one host."""
    return ShardingRule(sharding.table_row_wise(host_index), compute_kernel)


def table_column_wise(host_index: int, compute_kernel: str | None = None) -> ShardingRule:
    """Divide columns over the ranks of one host."""
    return ShardingRule(sharding.table_column_wise(host_index), compute_kernel)


def grid_shard(host_indexes: Sequence[int], compute_kernel: str | None = None) -> ShardingRule:
    """Divide columns over hosts, and the rows of each block over the ranks of its host."""
    return ShardingRule(sharding.grid(list(host_indexes)), compute_kernel)


def configs_of(module: Any) -> Iterator[TableConfig]:
    """Yield the configurations of a collection's tables."""
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    yield from configs()


def apply_to_all(
    module: Any, parameter_sharding_generator: ShardingRule, sharder: Any = None
) -> dict[str, ShardingRule]:
    """Return the same sharding for every table, by name; `sharder` is ignored."""
    return {config.name: parameter_sharding_generator for config in configs_of(module)}


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ShardingRule],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one collection, given the result of `table_wise` etc. for each table.

    Args:
        module: the collection.
        per_param_sharding: sharding of each table, by name.
        sharder: ignored.
        local_size: number of ranks per host; None takes it from the processes.
        world_size: number of ranks; None is the number of processes.
        device_type: device type of the ranks; None is the processes', or "cpu" if both sizes
            are passed.

    Raises:
        TypeError: a sharding is not such a result.
        ValueError: a rule does not fit a table or the ranks.
    """
    ranks = RankGroup() if world_size is None or local_size is None else None
    size = world_size or (ranks.size if ranks else 1)
    world = World(size, local_size or (ranks.local_size if ranks else size))
    device = device_type or (str(ranks.device.type) if ranks else "cpu")
    for name, sharding_rule in per_param_sharding.items():
        if not hasattr(sharding_rule, "rule"):
            raise TypeError(
                f"table {name}: sharding is said by a call, e.g. row_wise() or table_wise(rank=0), "
                f"got {getattr(sharding_rule, '__name__', repr(sharding_rule))}"
            )
    rules = {name: sharding_rule.rule for name, sharding_rule in per_param_sharding.items()}
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
