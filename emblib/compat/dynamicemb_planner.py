"""DynamicEmb's planner: constraints, capacities and bytes of dynamic tables, and plans.

Tables with `use_dynamicemb` are row-wise over all ranks. TorchRec's planner, that of
`emblib.compat.torchrec`, plans all tables; dynamic tables have hash storage for it, so that their
memory is counted.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from emblib import optim
from emblib.compat import dynamicemb_arguments
from emblib.compat.checks import check_flags, check_names, check_positive
from emblib.compat.dynamicemb_sharders import DynamicEmbParameterSharding, dynamic_config
from emblib.compat.dynamicemb_tables import bytes_per_row
from emblib.compat.dynamicemb_types import (
    BUCKET_ALIGNMENT,
    MAX_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
)
from emblib.compat.fbgemm_types import EmbOptimType, as_member
from emblib.compat.torchrec_planner import (
    EmbeddingEnumerator,
    EmbeddingShardingPlanner,
    HeuristicalStorageReservation,
    ParameterConstraints,
    Topology,
    plan_with_report,
)
from emblib.compat.torchrec_sharding import ShardingPlan, ShardingType
from emblib.compat.torchrec_types import data_type_to_dtype
from emblib.sharding import RankGroup, planner
from emblib.sharding.shard import collections_of

DEFAULT_BUCKET_CAPACITY = 128  # rows per bucket


# Capacities and bytes


def align_to_table_size(n: int, alignment: int = BUCKET_ALIGNMENT) -> int:
    """Return `n` rounded up to a positive multiple of `alignment`, which must be positive too."""
    check_positive("alignment", alignment)
    return max(-(-int(n) // alignment), 1) * alignment


def _rows_per_bucket(bucket_capacity: int) -> int:
    """Return the number of rows per bucket, of which the rows of a table are a multiple.

    Raises:
        ValueError: `bucket_capacity` is not a positive multiple of BUCKET_ALIGNMENT.
    """
    if bucket_capacity == MAX_BUCKET_CAPACITY:  # one bucket per table
        return BUCKET_ALIGNMENT
    if bucket_capacity <= 0 or bucket_capacity % BUCKET_ALIGNMENT:
        raise ValueError(
            f"bucket_capacity must be a multiple of {BUCKET_ALIGNMENT}, got {bucket_capacity}"
        )
    return bucket_capacity


def get_sharded_table_capacity(
    embedding_config: Any, world_size: int, bucket_capacity: int = DEFAULT_BUCKET_CAPACITY
) -> int:
    """Return the rows per rank of a table: its share of `num_embeddings`, rounded up to buckets.

    Raises:
        ValueError: `world_size` is not positive, or `bucket_capacity` is not a positive multiple of
            BUCKET_ALIGNMENT.
    """
    if world_size <= 0:
        raise ValueError(f"world_size must be positive, got {world_size}")
    num_rows = math.ceil(int(embedding_config.num_embeddings) / world_size)
    return align_to_table_size(num_rows, _rows_per_bucket(bucket_capacity))


def _optimizer_of(optimizer_type: Any) -> optim.Optimizer:
    """Return an optimizer by its `EmbOptimType`; NotImplementedError if tables cannot have it."""
    return dynamicemb_arguments.default_optimizer(as_member(EmbOptimType, optimizer_type))


def get_table_value_bytes(
    embedding_config: Any,
    optimizer_type: Any,
    world_size: int,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Return the bytes of rows and optimizer states of a table on all ranks together.

    States are float32; in DynamicEmb they have the dtype of the rows.

    Raises:
        NotImplementedError: dynamic tables cannot have the optimizer.
        ValueError: `world_size` or `bucket_capacity` is invalid, see `get_sharded_table_capacity`.
    """
    rows_per_rank = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity)
    dtype = data_type_to_dtype(embedding_config.data_type)
    rule = _optimizer_of(optimizer_type)
    return rows_per_rank * world_size * bytes_per_row(dtype, embedding_config.embedding_dim, rule)


def get_constraint_capacity(
    memory_bytes: int,
    dtype: torch.dtype,
    dim: int,
    optimizer_type: Any,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Return the number of rows, in whole buckets, that fit into `memory_bytes`.

    If not even one bucket fits, warn, and return the rows of one bucket.

    Raises:
        NotImplementedError: dynamic tables cannot have the optimizer.
        ValueError: `bucket_capacity` is not a positive multiple of BUCKET_ALIGNMENT, or `dim` is
            below 1.
    """
    check_positive("dim", dim)
    rows_per_bucket = _rows_per_bucket(bucket_capacity)
    bucket_bytes = bytes_per_row(dtype, dim, _optimizer_of(optimizer_type)) * rows_per_bucket
    num_buckets = int(memory_bytes) // bucket_bytes
    if not num_buckets:
        warnings.warn(
            f"{memory_bytes} bytes are less than the {bucket_bytes} bytes of a bucket, and are "
            "rounded up to one bucket",
            stacklevel=2,
        )
    return max(num_buckets, 1) * rows_per_bucket


def complete_initializer_args(
    initializer_args: DynamicEmbInitializerArgs, *, embedding_config: Any = None
) -> DynamicEmbInitializerArgs:
    """Return a copy in which bounds of None are set; return other modes than UNIFORM unchanged.

    The bounds are +-sqrt(1 / num_embeddings), or 0 and 1 without an `embedding_config`.
    """
    if initializer_args.mode is not DynamicEmbInitializerMode.UNIFORM:
        return initializer_args
    low, high = 0.0, 1.0
    if embedding_config is not None:
        high = math.sqrt(1.0 / float(embedding_config.num_embeddings))
        low = -high
    lower, upper = initializer_args.lower, initializer_args.upper
    return dataclasses.replace(
        initializer_args,
        lower=low if lower is None else lower,
        upper=high if upper is None else upper,
    )


# Constraints, enumerator, planner


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    """Constraints of the planner for a table, which may be dynamic.

    For a dynamic table `enforce_hbm` and `bounds_check_mode` have no effect: its options determine
    how many rows are in device memory, and every id is valid.

    Attributes:
        use_dynamicemb: whether the table is dynamic.
        dynamicemb_options: options of a dynamic table.

    Raises:
        TypeError: `use_dynamicemb` is text.
        ValueError: a dynamic table has no options, or other sharding types than ROW_WISE; or an
            attribute is set that `ParameterConstraints` refuses.
    """

    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions | None = field(
        default_factory=DynamicEmbTableOptions
    )

    def __post_init__(self) -> None:
        check_flags(use_dynamicemb=self.use_dynamicemb)
        if not self.use_dynamicemb:
            super().__post_init__()
            return
        if self.dynamicemb_options is None:
            raise ValueError("a table with use_dynamicemb needs dynamicemb_options")
        types = [ShardingType(t) for t in self.sharding_types or [ShardingType.ROW_WISE.value]]
        if types != [ShardingType.ROW_WISE]:
            raise ValueError(
                f"dynamic tables are row-wise over all ranks, got {[t.value for t in types]}: "
                "leave sharding_types out"
            )
        self.enforce_hbm = self.bounds_check_mode = None
        super().__post_init__()
        self.sharding_types = [ShardingType.ROW_WISE.value]


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, under DynamicEmb's name."""


class DynamicEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """Planner of models with dynamic tables, with DynamicEmb's arguments.

    As in DynamicEmb, planning changes the options of dynamic tables in place: it sets `dim`,
    `max_capacity` (per rank), `local_hbm_for_values` (the rank's share of `global_hbm_for_values`)
    and uniform bounds of None, and sets or rounds `init_capacity`.

    Args:
        eb_configs: configurations of all tables of the model, each of which must have an entry in
            `constraints`; None for no such check.
        topology: the ranks, see `EmbeddingShardingPlanner`.
        batch_size: examples per rank.
        enumerator: enumerator, whose constraints must be those of the planner.
        storage_reservation: memory that tables must not use.
        proposer: argument that must be None.
        partitioner: argument that must be None.
        performance_model: argument that must be None.
        stats: argument that must be None.
        constraints: constraints by table.
        debug: ignored.
        others: further arguments of `EmbeddingShardingPlanner`.

    Raises:
        ValueError: a name occurs twice, `eb_configs` and `constraints` have different names, an
            argument that must be None is set, or `enumerator` differs.
    """

    def __init__(
        self,
        eb_configs: Sequence[Any] | None = None,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: DynamicEmbeddingEnumerator | None = None,
        storage_reservation: Any = None,
        proposer: None = None,
        partitioner: None = None,
        performance_model: None = None,
        stats: Any = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        **others: Any,
    ) -> None:
        self._table_constraints = dict(constraints or {})
        self._config_names = None
        if eb_configs is not None:
            self._config_names = [config.name for config in eb_configs]
            self._check_names(self._config_names)
        if enumerator is not None:
            enumerator.agreed("constraints", self._table_constraints)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            **others,
        )

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError unless names are distinct, and those of the constraints."""
        if len(set(names)) != len(names):
            raise ValueError(f"names of tables must be unique, got {list(names)}")
        constrained_names = set(self._table_constraints)
        if set(names) != constrained_names:
            raise ValueError(
                "every table needs a constraint, and every constraint a table: without a "
                f"constraint are {sorted(set(names) - constrained_names)}, without a table "
                f"{sorted(constrained_names - set(names))}"
            )

    def _options_of_dynamic_tables(self) -> dict[str, DynamicEmbTableOptions]:
        """Return the options of each dynamic table, by name."""
        options_by_table = {}
        for name, constraint in self._table_constraints.items():
            options = getattr(constraint, "dynamicemb_options", None)
            if getattr(constraint, "use_dynamicemb", False) and options is not None:
                options_by_table[name] = options
        return options_by_table

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] = (), pg: Any = None
    ) -> ShardingPlan:
        """Plan on rank 0, and return its plan on all ranks, which must all call this.

        Each rank completes the options of its dynamic tables. Arguments and errors are those of
        `EmbeddingShardingPlanner.plan`.
        """
        plan = super().collective_plan(module, sharders, pg)
        return self._with_options(module, plan, self._world_size(RankGroup.from_value(pg)))

    def plan(self, module: nn.Module, sharders: Sequence[Any] = ()) -> ShardingPlan:
        """Plan on this rank, for the ranks of the topology, by default all processes.

        Arguments and errors are those of `EmbeddingShardingPlanner.plan`.
        """
        plan = super().plan(module, sharders)
        return self._with_options(module, plan, self._world_size(RankGroup()))

    def _world_size(self, ranks: RankGroup) -> int:
        """Return the number of ranks of the topology, or of `ranks` if there is none."""
        topology = None if self._topology is None else self._topology.native
        return ranks.size if topology is None else topology.world_size

    def _with_options(self, module: nn.Module, plan: ShardingPlan, world_size: int) -> ShardingPlan:
        """Complete the options of dynamic tables, and put them into the plan, which is returned."""
        options_by_table = self._options_of_dynamic_tables()
        for config in _configs_in(module):
            if config.name in options_by_table:
                _complete_options(options_by_table[config.name], config, world_size)
        for tables in plan.plan.values():
            for name in tables.keys() & options_by_table.keys():
                table, options = tables[name], options_by_table[name]
                tables[name] = DynamicEmbParameterSharding(
                    ShardingType.ROW_WISE.value,
                    ranks=table.ranks,
                    sharding_spec=table.sharding_spec,
                    dist_type=options.dist_type,
                    dynamicemb_options=options,
                )
        return plan

    def _plan_natively(
        self, native_planner: planner.Planner, module: nn.Module, sharders: Sequence[Any]
    ) -> ShardingPlan:
        """Plan with hash storage for dynamic tables, so that their memory is counted."""
        names = [config.name for config in _configs_in(module)]
        if self._config_names is not None and sorted(self._config_names) != sorted(names):
            raise ValueError(
                f"eb_configs must be those of the model, {names}, got {self._config_names}"
            )
        options_by_table = self._options_of_dynamic_tables()
        world_size = native_planner.topology.world_size

        def with_hash_storage(workload: planner.TableWorkload) -> planner.TableWorkload:
            options = options_by_table.get(workload.config.name)
            if options is None:
                return workload
            options = dataclasses.replace(options)
            _complete_options(options, workload.config, world_size)
            sharding = DynamicEmbParameterSharding(
                ShardingType.ROW_WISE.value,
                ranks=list(range(world_size)),
                dynamicemb_options=options,
            )
            rule = workload.optimizer or optim.SGD(0.0)
            config = dynamic_config(
                workload.config, sharding, rule, device=native_planner.topology.device
            )
            return dataclasses.replace(workload, config=config)

        return plan_with_report(native_planner, module, sharders, with_hash_storage)


def _configs_in(module: nn.Module) -> list[Any]:
    collections: Any = collections_of(module).values()
    return [config for collection in collections for config in collection.configs]


def _complete_options(options: DynamicEmbTableOptions, config: Any, world_size: int) -> None:
    """Set the options that follow from the plan, in place, as DynamicEmb does.

    A second call with the same arguments changes nothing.
    """
    bucket = options.bucket_capacity
    options.dim = config.embedding_dim
    options.max_capacity = get_sharded_table_capacity(config, world_size, bucket)
    options.initializer_args = complete_initializer_args(
        options.initializer_args, embedding_config=config
    )
    if options.init_capacity is None:
        options.init_capacity = options.max_capacity
    else:
        init_capacity = align_to_table_size(options.init_capacity, _rows_per_bucket(bucket))
        options.init_capacity = min(init_capacity, options.max_capacity)
    options.local_hbm_for_values = math.ceil(options.global_hbm_for_values / world_size)


def get_planner(
    eb_configs: Sequence[Any],
    data_parallel_embedding_table_names: set[str],
    dynamicemb_options_dict: Mapping[str, DynamicEmbTableOptions],
    device: torch.device,
    pipeline_type: str = "none",
    ddr_cap: int | None = None,
    intra_host_bw: float | None = None,
    inter_host_bw: float | None = None,
    pg: Any = None,
) -> DynamicEmbeddingShardingPlanner:
    """Return a planner for tables that are replicated, dynamic, or else row-wise.

    Args:
        eb_configs: configurations of all tables.
        data_parallel_embedding_table_names: names of the replicated tables.
        dynamicemb_options_dict: options of the dynamic tables, by name.
        device: device whose type the ranks have.
        pipeline_type: pipeline of the model: "none", "native", or "prefetch", with which the
            row-wise tables are in host memory behind a cache.
        ddr_cap: bytes of host memory per rank; None is that of this machine.
        intra_host_bw: bytes per second between ranks of a host; None is a measured number.
        inter_host_bw: bytes per second between hosts; None is a measured number.
        pg: process group of the ranks; None is all processes.

    Raises:
        TypeError: the names of replicated tables are one text.
        ValueError: `pipeline_type` has another value.
    """
    kernels = {"none": None, "native": None, "prefetch": ["fused_uvm_caching"]}
    if pipeline_type not in kernels:
        raise ValueError(f"pipeline_type must be one of {sorted(kernels)}, got {pipeline_type!r}")
    replicated_names = check_names(
        "data_parallel_embedding_table_names", data_parallel_embedding_table_names
    )
    constraints: dict[str, ParameterConstraints] = {}
    for config in eb_configs:
        if config.name in replicated_names:
            constraint = DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value]
            )
        elif config.name in dynamicemb_options_dict:
            constraint = DynamicEmbParameterConstraints(
                use_dynamicemb=True, dynamicemb_options=dynamicemb_options_dict[config.name]
            )
        else:
            constraint = DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.ROW_WISE.value],
                compute_kernels=kernels[pipeline_type],
            )
        constraints[config.name] = constraint
    ranks = RankGroup.from_value(pg)
    topology = Topology(
        world_size=ranks.size,
        local_world_size=ranks.local_size,
        compute_device=torch.device(device).type,
        ddr_cap=ddr_cap,
        intra_host_bw=None if intra_host_bw is None else 1e-3 * intra_host_bw,  # per ms
        inter_host_bw=None if inter_host_bw is None else 1e-3 * inter_host_bw,
    )
    return DynamicEmbeddingShardingPlanner(
        eb_configs=eb_configs,
        topology=topology,
        constraints=constraints,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
