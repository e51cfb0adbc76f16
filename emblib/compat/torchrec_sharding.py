"""TorchRec's sharding plans of collections and models, and the functions that write plans.

`to_emblib` of a class here returns emblib's form of it; `of` is the reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import CacheConfig, CachePolicy, MultiPassPrefetch, Placement, sharding
from emblib.collections import TableConfig
from emblib.compat.fbgemm_types import CacheAlgorithm, MultiPassPrefetchConfig
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.compat.torchrec_types import DataType, data_type_to_dtype, dtype_to_data_type
from emblib.sharding import RankGroup, Shard, World
from emblib.sharding.checkpoints.sharded_table import ShardedTable
from emblib.sharding.sharding_types import Rule, TableShape
from emblib.storage import Dense


class ShardingType(Enum):
    """Ways to divide a table over ranks."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """Ways to store and train a table.

    DENSE leaves gradients to an optimizer of torch.optim. FUSED, FUSED_UVM and FUSED_UVM_CACHING
    run the optimizer in backward; rows are in device memory, in host memory, or in host memory
    behind a cache on the device. QUANT is the kernel of quantised collections. The other members
    exist for code that names them: a plan with one of them raises ValueError.
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
"""Values of the kernels that plans may have."""


def checked_kernel(kernel: Any) -> str:
    """Return the value of a kernel that plans may have.

    Args:
        kernel: an `EmbeddingComputeKernel`, of TorchRec's own too, or its value.

    Raises:
        ValueError: the kernel is not in `KERNELS`.
    """
    value = str(getattr(kernel, "value", kernel))
    if value not in KERNELS:
        raise ValueError(
            f"compute_kernel must be one of {', '.join(KERNELS)}, got {value!r}: rows on disks or "
            f"behind other tiers are a storage of the table (docs/tiers.md). {RUN_TORCHREC_ITSELF}"
        )
    return value


# Storage of rows by value of a kernel; with other kernels the table's configuration decides.
STORAGES = {
    EmbeddingComputeKernel.FUSED_UVM.value: Dense(Placement.MANAGED),
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: Dense(Placement.MANAGED_CACHING),
}


class ShardPlacement(str):
    """Rank and device of a shard as text, `rank:1/cpu`, with the methods of torch's placements."""

    __slots__ = ()

    def rank(self) -> int:
        """Return the rank."""
        return int(self.removeprefix("rank:").partition("/")[0])

    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.partition("/")[2])


@dataclass(frozen=True)
class ShardMetadata:
    """A shard of a table: a block of its rows and columns, and the rank that has it.

    `placement` may be text, which becomes a `ShardPlacement`, or one of torch's.
    """

    shard_offsets: list[int]  # first row and first column
    shard_sizes: list[int]  # number of rows and of columns
    placement: Any

    def __post_init__(self) -> None:
        if isinstance(self.placement, str):
            object.__setattr__(self, "placement", ShardPlacement(self.placement))


@dataclass(frozen=True)
class ShardedTensorMetadata:
    """The shards of a table on all ranks, and the size of the whole table."""

    shards_metadata: list[ShardMetadata]
    size: torch.Size


class LocalShard(NamedTuple):
    """The values of a shard of this rank, and its position in the table."""

    tensor: Tensor
    metadata: ShardMetadata


class ShardedTensor(ShardedTable):
    """The value of a sharded table in a state dict, with the methods of torch's `ShardedTensor`.

    It is a `ShardedTable` of emblib: `torch.distributed.checkpoint` saves and loads it.
    """

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> ShardedTensor:
        """Return a tensor with the same shards and other values.

        Args:
            parts: values of the shards of this rank, by the number of the shard.
            dtype: dtype of the new tensor; None keeps the dtype.
        """
        return ShardedTensor(self.size(), self.shards, parts, self.ranks, dtype or self.dtype)

    def local_shards(self) -> list[LocalShard]:
        """Return the shards of this rank; their tensors share memory with the table."""
        shards = self.metadata().shards_metadata
        return [LocalShard(part, shards[index]) for index, part in self.parts.items()]

    def metadata(self) -> ShardedTensorMetadata:
        """Return the positions of the shards of all ranks, in the order of `shards`."""
        num_dims = self.dim()
        shards = [
            ShardMetadata(
                [shard.rows[0], shard.columns[0]][:num_dims],
                list(shard.shape)[:num_dims],
                f"rank:{shard.rank}/{self.device.type}",
            )
            for shard in self.shards
        ]
        return ShardedTensorMetadata(shards, self.shape)

    def local_tensor(self) -> Tensor:
        """Return the values of the only shard of this rank.

        Raises:
            ValueError: this rank has no shard, or several.
        """
        if len(self.parts) != 1:
            raise ValueError(f"this rank has {len(self.parts)} shards: use local_shards()")
        return next(iter(self.parts.values()))

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the whole tensor into `out` of rank `dst`; all ranks must call this.

        Args:
            dst: rank that gets the tensor.
            out: tensor of the same size, on rank `dst`; other ranks may leave it out.
            enforce_dtype: no effect: values are converted to the dtype of `out`.
            dtype: no effect, as above.

        Raises:
            ValueError: rank `dst` has no `out`, or one of another size.
        """
        whole = self.full_tensor(dst)
        if self.ranks.rank != dst:
            return
        if out is None or out.size() != self.size():
            size = None if out is None else list(out.size())
            raise ValueError(
                f"out of rank {dst} must have the size {list(self.size())}, got {size}"
            )
        out.copy_(whole)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> ShardedTensor:
        """Overwrite the shards of this rank by those of `other`, or by parts of a whole table.

        Raises:
            ValueError: `other` is a whole table of another size.
        """
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

    Attributes:
        algorithm: eviction policy; None is emblib's default.
        load_factor: share of the rows that the cache has room for; None is emblib's default.
        reserved_memory: bytes of GPU memory to leave free; None is 0.
        precision: type of the cached rows; None is that of the table.
        prefetch_pipeline: no effect: any cache may be prefetched.
        stats: argument that must be None.
        multipass_prefetch_config: FBGEMM's configuration of prefetches in several passes, with
            `num_passes` and `min_splitable_pass_size`; None is one pass.

    Raises:
        ValueError: `stats` is set.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: Any = None
    multipass_prefetch_config: Any = None

    def __post_init__(self) -> None:
        if self.stats is not None:
            raise ValueError(
                "stats of CacheParams must be None: load_factor has the size of the cache. "
                f"{RUN_TORCHREC_ITSELF}"
            )

    @classmethod
    def of(cls, cache: CacheConfig) -> CacheParams:
        """Return the parameters of a cache of emblib."""
        passes = cache.passes
        return cls(
            CacheAlgorithm[cache.policy.name],
            cache.load_factor,
            cache.reserved_bytes or None,
            None if cache.dtype is None else dtype_to_data_type(cache.dtype),
            multipass_prefetch_config=None
            if passes is None
            else MultiPassPrefetchConfig(passes.passes, passes.min_lookups),
        )

    def storage(self) -> Dense:
        """Return emblib's storage with this cache; ValueError if `algorithm` is unknown."""
        options: dict[str, Any] = {}
        if self.algorithm is not None:
            options["policy"] = CachePolicy(CacheAlgorithm(self.algorithm).name.lower())
        if self.load_factor is not None:
            options["load_factor"] = self.load_factor
        if self.precision is not None:
            options["dtype"] = data_type_to_dtype(self.precision)
        passes = self.multipass_prefetch_config
        if passes is not None:
            options["passes"] = MultiPassPrefetch(passes.num_passes, passes.min_splitable_pass_size)
        cache = CacheConfig(reserved_bytes=int(self.reserved_memory or 0), **options)
        return Dense(Placement.MANAGED_CACHING, cache)


def refuse_table_options(owner: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError if an option has another value than None or False.

    Args:
        owner: class that has the options, for the message.
        values: values of options, by names that `WAYS_OUT` has.
    """
    # Compared by `is`: a mode may have the value 0.
    passed_options = [
        name for name, value in values.items() if value is not None and value is not False
    ]
    if passed_options:
        ways_out = "; ".join(f"{name}: {WAYS_OUT[name]}" for name in passed_options)
        raise ValueError(
            f"{', '.join(passed_options)} of {owner} must be left out here. {ways_out}. "
            f"{RUN_TORCHREC_ITSELF}"
        )


# Options of FBGEMM's tables that raise here, and what to use instead.
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
    """Base of plans of one module."""


@dataclass
class ParameterSharding:
    """Sharding of one table.

    Attributes:
        sharding_type: value of a `ShardingType`; the constructor takes a member, too.
        compute_kernel: value of an `EmbeddingComputeKernel`; the constructor takes a member, too.
        ranks: rank of each shard; None for a replicated table.
        sharding_spec: `EnumerableShardingSpec` of the shards; None for a replicated table.
        cache_params: cache of a table whose kernel is FUSED_UVM_CACHING.

    Raises:
        ValueError: another attribute is set: emblib has these options of FBGEMM elsewhere.
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
        for name in ("sharding_type", "compute_kernel"):
            setattr(self, name, getattr(getattr(self, name), "value", getattr(self, name)))
        names = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
        values = {name: getattr(self, name) for name in (*names, "key_value_params")}
        refuse_table_options("ParameterSharding", values)

    def to_emblib(self) -> sharding.ParameterSharding:
        """Return emblib's form of the sharding.

        Raises:
            ValueError: the type is unknown, the kernel is not in `KERNELS`, `cache_params` are set
                with another kernel than FUSED_UVM_CACHING, or a table that is not replicated has no
                `sharding_spec`.
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
        """Return TorchRec's form of the sharding of a table.

        Args:
            table: sharding in emblib's form.
            kernel: value of the kernel, unless the storage in `table` has another one.
            device_type: type of the devices of the ranks, for the placements of shards.
        """
        if table.is_replicated:
            torchrec_form = cls(table.type.value, kernel)
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
            torchrec_form = cls(
                _torchrec_type_name(table), kernel, ranks, EnumerableShardingSpec(shards)
            )
        torchrec_form.set_storage(table.storage)
        return torchrec_form

    def set_storage(self, storage: Any) -> None:
        """Set kernel and cache params to those of a storage; keep them if it has no kernel."""
        if isinstance(storage, Dense) and storage.cache is not None:
            self.cache_params, storage = CacheParams.of(storage.cache), Dense(storage.placement)
        kernel_of_storage = {other: name for name, other in STORAGES.items()}
        self.compute_kernel = kernel_of_storage.get(storage, self.compute_kernel)

    def __str__(self) -> str:
        return f"{self.sharding_type} ({self.compute_kernel}) on ranks {self.ranks or 'all'}"


def _torchrec_type_name(table: sharding.ParameterSharding) -> str:
    """Return TorchRec's name of a sharding type; ROW_WISE for types that TorchRec does not have."""
    torchrec_names = [kind.value for kind in ShardingType]
    return table.type.value if table.type.value in torchrec_names else ShardingType.ROW_WISE.value


def _to_shard(shard: Any) -> Shard:
    """Convert a `ShardMetadata`, also one of torch."""
    first_row, first_column = shard.shard_offsets
    num_rows, num_columns = shard.shard_sizes
    rows = (first_row, first_row + num_rows)
    return Shard(shard.placement.rank(), rows, (first_column, first_column + num_columns))


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """Sharding of each table of one collection, by name."""

    def to_emblib(self) -> dict[str, sharding.ParameterSharding]:
        """Return emblib's sharding of each table; raise as `ParameterSharding.to_emblib` does."""
        return {name: parameter.to_emblib() for name, parameter in self.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {parameter}" for name, parameter in self.items())


@dataclass
class ShardingPlan:
    """Plan of each collection, by its path in the model."""

    plan: dict[str, EmbeddingModuleShardingPlan]
    report: str = ""  # the planner's report, shown by `print`

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan of the collection at a path; None if there is none."""
        return self.plan.get(module_path)

    def to_emblib(self, world: World) -> sharding.ShardingPlan:
        """Return emblib's plan for ranks; raise as `ParameterSharding.to_emblib` does."""
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
        world_size: a `RankGroup` of emblib; or an int, the number of devices of this process, which
            is ignored if `pg` is passed.
        rank: number of a device of this process; None is 0. Ignored with a `RankGroup` or `pg`.
        pg: process group; None for devices of this process. Ignored with a `RankGroup`.
        output_dtensor: flag that must be False: state dicts have tensors of `ShardedTable`.

    Attributes:
        is_local: whether the module is sharded over devices of this process.
        ranks: `RankGroup` of the ranks; this process alone if `is_local`.
        rank: number of this rank, or of the device.
        world_size: number of ranks or devices.
        process_group: process group, or None if `is_local`.

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
        """Return an environment of all ranks of a process group."""
        return cls(RankGroup.from_value(pg), output_dtensor=output_dtensor)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Return an environment of devices of this process; only quantised tables take several."""
        return cls(world_size, rank)

    def training_ranks(self) -> RankGroup:
        """Return the ranks.

        Raises:
            ValueError: the environment is several devices of one process, which cannot train.
        """
        if self.is_local and self.world_size > 1:
            raise ValueError(
                f"{self.world_size} devices of one process (from_local) are for quantised "
                "collections; to train, start several processes and use from_process_group"
            )
        return self.ranks


@dataclass(frozen=True)
class ShardingRule:
    """Sharding of a table whose sizes are not known yet; the result of `table_wise` etc."""

    rule: Rule  # function that returns the sharding for the shape of the table and the ranks
    compute_kernel: str | None = None  # value of the kernel; None is FUSED
    devices: tuple[str, ...] = ()  # that shards were asked to be on


def data_parallel() -> ShardingRule:
    """Replicate the table on every rank."""
    return ShardingRule(sharding.data_parallel())


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ShardingRule:
    """Place the whole table on one rank; `device` must be one of the plan's type, or None."""
    devices = () if device is None else (device,)
    return ShardingRule(sharding.table_wise(rank), compute_kernel, devices)


def row_wise(
    sizes_placement: tuple[list[int], Any] | None = None,
    compute_kernel: str | None = None,
    num_buckets: None = None,
) -> ShardingRule:
    """Divide rows over the ranks.

    Args:
        sizes_placement: number of rows of each of the first ranks, and a device, or one per size,
            of the plan's type; None divides the rows evenly over all ranks. If the numbers do not
            add up to the rows of the table, ValueError is raised when the plan is made.
        compute_kernel: value of the kernel; None is FUSED.
        num_buckets: argument that must be None; otherwise ValueError is raised.
    """
    if num_buckets is not None:
        raise ValueError(
            "num_buckets must be left out: rows of dense tables are divided evenly, or as "
            "sizes_placement says, and storage=Hash() has no buckets; any number of ranks loads "
            "its rows"
        )
    if sizes_placement is None:
        return ShardingRule(sharding.row_wise(), compute_kernel)
    sizes, device = list(sizes_placement[0]), sizes_placement[1]
    devices = (device,) if isinstance(device, str) else tuple(device or ())

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

    return ShardingRule(rule, compute_kernel, devices)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ShardingRule:
    """Divide columns over ranks.

    Args:
        ranks: ranks that get columns; None is 0, 1, ..., one per size.
        size_per_rank: number of columns of each of `ranks`; None divides columns evenly.
        compute_kernel: value of the kernel; None is FUSED.
        device_types: types of the devices of the shards, which must be that of the plan.

    Raises:
        ValueError: neither `ranks` nor `size_per_rank` is passed.
    """
    devices = tuple(device_types or ())
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise needs ranks or size_per_rank")
    if size_per_rank is None:
        return ShardingRule(sharding.column_wise(ranks), compute_kernel, devices)
    column_ranks = list(range(len(size_per_rank))) if ranks is None else list(ranks)
    return ShardingRule(
        sharding.column_wise(column_ranks, sizes=list(size_per_rank)), compute_kernel, devices
    )


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
    """Return the same sharding for every table of a collection, by name; `sharder` is ignored."""
    return {config.name: parameter_sharding_generator for config in configs_of(module)}


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ShardingRule],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one collection.

    Args:
        module: the collection.
        per_param_sharding: result of `table_wise` etc. for each table, by name.
        sharder: ignored.
        local_size: number of ranks per host; None is that of all processes.
        world_size: number of ranks; None is the number of processes.
        device_type: type of the devices of the ranks; None is that of the processes, or "cpu" if
            both sizes are passed.

    Raises:
        TypeError: a value of `per_param_sharding` is not such a result.
        ValueError: tables are missing or unknown, a sharding does not fit a table or the ranks, or
            has devices of another type.
    """
    ranks = RankGroup() if world_size is None or local_size is None else None
    num_ranks = world_size or (ranks.size if ranks else 1)
    world = World(num_ranks, local_size or (ranks.local_size if ranks else num_ranks))
    device = device_type or (str(ranks.device.type) if ranks else "cpu")
    for name, sharding_rule in per_param_sharding.items():
        if not hasattr(sharding_rule, "rule"):
            raise TypeError(
                f"table {name}: a sharding is the result of a call, e.g. table_wise(rank=0)"
                f", got {getattr(sharding_rule, '__name__', repr(sharding_rule))}"
            )
        if any(torch.device(each).type != device for each in sharding_rule.devices):
            raise ValueError(
                f"table {name}: all shards are on the {device} of their ranks, got devices "
                f"{list(sharding_rule.devices)}; storage=Dense(Placement.MANAGED) of the table "
                "keeps its rows in host memory"
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
    """Return TorchRec's form of a plan; `report` is the text that `print` shows for it."""
    fused = EmbeddingComputeKernel.FUSED.value
    modules = {
        path: EmbeddingModuleShardingPlan(
            {
                name: ParameterSharding.of(table, fused, device_type)
                for name, table in tables.items()
            }
        )
        for path, tables in plan.modules.items()
    }
    return ShardingPlan(modules, report)
