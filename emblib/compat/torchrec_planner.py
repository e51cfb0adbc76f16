"""TorchRec's planner and its arguments, implemented by emblib's planner."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from emblib import sharding
from emblib.compat.checks import check_flags, check_names
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.compat.torchrec_sharding import (
    STORAGES,
    WAYS_OUT,
    CacheParams,
    EmbeddingComputeKernel,
    ShardingPlan,
    ShardingType,
    checked_kernel,
    plan_of,
    refuse_table_options,
)
from emblib.sharding import RankGroup, planner
from emblib.sharding.planner.topology import host_bytes
from emblib.sharding.planner.workloads import dense_bytes, workloads_of
from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result
from emblib.storage import Dense

DEFAULT_BATCH_SIZE = 512  # examples per rank, as in TorchRec


# Field of a Calibration, in bytes per second, for each bandwidth of TorchRec, in bytes per ms.
_CALIBRATION_FIELD_OF_RATE = {
    "intra_host_bw": "link_bytes_per_s",
    "inter_host_bw": "network_bytes_per_s",
    "hbm_to_ddr_mem_bw": "host_bytes_per_s",
    "ssd_mem_bw": "disk_bytes_per_s",
}


class Topology:
    """The ranks, their memory and their bandwidths, for the planner.

    Args:
        world_size: number of ranks.
        compute_device: type of the devices: "cpu" or "cuda".
        hbm_cap: bytes of GPU memory per rank; None is the memory of this machine's GPU, or if torch
            finds none, with a warning, TorchRec's 32 GiB. Ignored on a CPU.
        ddr_cap: bytes of host memory per rank; None is that of this machine (TorchRec assumes 128
            GiB).
        ssd_cap: bytes of disk per rank; None is 0.
        local_world_size: number of ranks per host; None is `world_size`.
        calibration: measured times of lookups and bandwidths; None is emblib's for the device.
        rates: bandwidths in bytes per millisecond, as in TorchRec, which replace those of
            `calibration` unless they are None: `intra_host_bw` between the ranks of a host,
            `inter_host_bw` between hosts, `hbm_to_ddr_mem_bw` from a GPU to host memory and
            `ssd_mem_bw` of disks.

    Attributes:
        native: emblib's form of the topology.

    Raises:
        TypeError: `calibration` is not a `Calibration`.
        ValueError: `rates` has another name: other costs of TorchRec's model are measured here.
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
        **rates: float | None,
    ) -> None:
        unknown_names = sorted(rates.keys() - _CALIBRATION_FIELD_OF_RATE)
        if unknown_names:
            raise ValueError(
                f"{', '.join(unknown_names)} must be left out: times of memory are measured, "
                f"calibration=Calibration(...) has them. {RUN_TORCHREC_ITSELF}"
            )
        self.world_size, self.compute_device = world_size, compute_device
        self.local_world_size = local_world_size or world_size
        # A plan for GPUs can be made on a machine without them.
        lacks_gpus = compute_device == "cuda" and not torch.cuda.is_available()
        make_topology: Any = planner.Topology if lacks_gpus else planner.Topology.detect
        detected: planner.Topology = make_topology(
            world_size, self.local_world_size, device=compute_device, calibration=calibration
        )
        if lacks_gpus:
            host_memory = host_bytes() // detected.local_world_size
            detected = dataclasses.replace(detected, host_memory=host_memory)
            if hbm_cap is None:
                warnings.warn(
                    "torch finds no GPU: the topology has 32 GiB of GPU memory per rank, as "
                    "TorchRec assumes; pass hbm_cap",
                    stacklevel=2,
                )
        memory_bytes = hbm_cap if compute_device == "cuda" else ddr_cap
        changes: dict[str, Any] = {} if memory_bytes is None else {"memory": memory_bytes}
        if compute_device == "cuda" and ddr_cap is not None:
            changes["host_memory"] = ddr_cap
        if ssd_cap is not None:
            changes["disk"] = ssd_cap
        bandwidths: dict[str, Any] = {
            _CALIBRATION_FIELD_OF_RATE[name]: 1e3 * rate
            for name, rate in rates.items()
            if rate is not None
        }
        if bandwidths:
            assert detected.calibration is not None
            changes["calibration"] = dataclasses.replace(detected.calibration, **bandwidths)
        self.native: planner.Topology = dataclasses.replace(detected, **changes)


@dataclass
class ParameterConstraints:
    """Constraints of the planner for a table, and facts about the features of the table.

    Attributes:
        sharding_types: values of `ShardingType` that the plan may use; None for all.
        compute_kernels: values of `EmbeddingComputeKernel` that the plan may use; None for all.
        min_partition: minimum number of columns of a shard; None is emblib's default.
        pooling_factors: ids per example of each feature, or one number for all features.
        num_poolings: numbers that must be 1, or None.
        batch_sizes: examples per rank of each feature, which must be equal; None is the batch size
            of the planner.
        is_weighted: ignored.
        cache_params: cache of the table, if `compute_kernels` has FUSED_UVM_CACHING.
        feature_names: ignored.

    Raises:
        TypeError: `sharding_types` or `compute_kernels` are one text.
        ValueError: a kernel is unknown, `num_poolings` has other numbers, `cache_params` are set
            without FUSED_UVM_CACHING, or another attribute is set.
    """

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] = field(default_factory=lambda: [1.0])
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: Sequence[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False

    def __post_init__(self) -> None:
        for name in ("sharding_types", "compute_kernels"):
            check_names(name, getattr(self, name) or ())
        poolings = self.num_poolings
        values = {name: getattr(self, name) for name in WAYS_OUT if hasattr(self, name)}
        values["num_poolings"] = poolings is not None and set(poolings) != {1.0}
        if EmbeddingComputeKernel.FUSED_UVM_CACHING.value in self._kernels():
            values["cache_params"] = None
        refuse_table_options("ParameterConstraints", values)

    def _kernels(self) -> list[str]:
        """Return the values of `compute_kernels`; ValueError if one is unknown."""
        return [checked_kernel(kernel) for kernel in self.compute_kernels or ()]

    def forced_storage(self) -> Dense | None:
        """Return the storage of the first kernel if every kernel has one, else None.

        None means the storage in the configuration of the table.
        """
        kernels = self._kernels()
        return self._storages()[kernels[0]] if kernels and set(kernels) <= STORAGES.keys() else None

    def _storages(self) -> dict[str, Dense]:
        """Return the storage of each kernel that has one, with the cache of `cache_params`."""
        if self.cache_params is None:
            return STORAGES
        caching = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        return {**STORAGES, caching: self.cache_params.storage()}

    def to_emblib(self) -> planner.TableConstraints:
        """Return emblib's form of the constraints.

        Raises:
            ValueError: `batch_sizes` differ, or a sharding type is unknown.
        """
        types = None
        if self.sharding_types is not None:
            values = (ShardingType(value).value for value in self.sharding_types)
            types = tuple(map(sharding.ShardingType, values))
        if self.batch_sizes is not None and len(set(self.batch_sizes)) > 1:
            raise ValueError(f"batch_sizes of a table must be equal, got {self.batch_sizes}")
        kernels = self._kernels()
        storages = self._storages()
        factors = tuple(self.pooling_factors)
        options: dict[str, Any] = {}
        if self.min_partition is not None:
            options["min_partition"] = self.min_partition
        return planner.TableConstraints(
            sharding_types=types,
            storages=tuple(storages[kernel] for kernel in kernels if kernel in storages),
            pooling_factor=factors[0] if len(factors) == 1 else factors,
            batch_size=self.batch_sizes[0] if self.batch_sizes else None,
            **options,
        )


class StorageReservation:
    """Base of reservations: memory of a rank that tables must not use.

    Args:
        reservation: emblib's form of it; None is emblib's default.

    Raises:
        ValueError: subclasses: a share is outside [0, 1), or a number is negative.
    """

    def __init__(self, reservation: planner.Reservation | None = None) -> None:
        self.reservation = reservation or planner.Reservation()


class FixedPercentageStorageReservation(StorageReservation):
    """Reserve the share `percentage`, in [0, 1), of the memory of every rank."""

    def __init__(self, percentage: float) -> None:
        super().__init__(planner.Reservation(share=percentage, dense_copies=0.0))


class FixedAbsoluteStorageReservation(StorageReservation):
    """Reserve `hbm_reserved_bytes` of the memory of every rank."""

    def __init__(self, hbm_reserved_bytes: int) -> None:
        super().__init__(
            planner.Reservation(share=0.0, nbytes=hbm_reserved_bytes, dense_copies=0.0)
        )

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Reserve `hbm_reserved_gb` GiB of the memory of every rank."""
        return cls(int(hbm_reserved_gb * (1 << 30)))


class HeuristicalStorageReservation(StorageReservation):
    """Reserve a share of the memory of every rank, and memory for the dense part.

    Args:
        percentage: share of the memory, in [0, 1).
        parameter_multiplier: number of times that the bytes of the dense parameters are reserved.
        dense_tensor_estimate: bytes that are reserved for the dense part instead; None for none.
    """

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(
            planner.Reservation(
                share=percentage,
                nbytes=dense_tensor_estimate or 0,
                dense_copies=parameter_multiplier if dense_tensor_estimate is None else 0.0,
            )
        )


class InferenceStorageReservation(HeuristicalStorageReservation):
    """`HeuristicalStorageReservation` that reserves the bytes of the dense parameters once."""

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, 1.0, dense_tensor_estimate)


class EmbeddingPerfEstimator:
    """Name of the only estimator of costs: emblib's measured costs.

    With `is_inference` ValueError is raised.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, Any] | None = None,
        is_inference: bool = False,
    ) -> None:
        check_flags(is_inference=is_inference)
        if is_inference:
            raise ValueError(
                "is_inference must be left out: the planner plans training; shard_quant_model "
                "places quantised tables by their bytes"
            )
        self.topology, self.constraints = topology, dict(constraints or {})


class EmbeddingStorageEstimator(EmbeddingPerfEstimator):
    """Name of the only estimator of memory: emblib's counts of bytes."""


class EmbeddingEnumerator:
    """Topology, batch size and constraints for a planner; emblib's planner enumerates plans itself.

    Args:
        topology: topology for the planner.
        batch_size: examples per rank; None is that of the planner.
        constraints: constraints by table; None for those of the estimators or the planner.
        estimator: default estimator or a list of them; None for both defaults.
        others: arguments that must be None.

    Raises:
        ValueError: another argument is set, `estimator` is none of the default ones, or it has
            another topology or other constraints.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: Mapping[str, Any] | None = None,
        estimator: Any = None,
        **others: Any,
    ) -> None:
        estimators = estimator if isinstance(estimator, Sequence) else [estimator]
        if any(not isinstance(each, EmbeddingPerfEstimator | None) for each in estimators):
            others["estimator"] = estimator
        if unsupported := sorted(name for name, value in others.items() if value is not None):
            raise ValueError(
                f"{', '.join(unsupported)} must be left out: emblib's planner has one enumeration "
                f"and one measured cost model. {RUN_TORCHREC_ITSELF}"
            )
        self.topology, self.batch_size = topology, batch_size
        self.constraints = dict(constraints or {})
        for default_estimator in estimators:
            if default_estimator is not None:
                self.agreed("topology", default_estimator.topology)
                self.constraints = self.agreed("constraints", default_estimator.constraints)

    def enumerate(self, module: nn.Module, sharders: Sequence[Any]) -> list[Any]:
        """Raise NotImplementedError: emblib's planner has no list of the options of a plan."""
        raise NotImplementedError(
            "emblib's planner enumerates and searches in one: call collective_plan of the planner, "
            f"and print(plan) shows what it chose and what each table costs. {RUN_TORCHREC_ITSELF}"
        )

    def agreed(self, name: str, other: Any) -> Any:
        """Return the attribute `name` of this enumerator, or if it is empty, `other`.

        Args:
            name: name of an attribute: `topology`, `batch_size` or `constraints`.
            other: the value that a planner or an estimator has.

        Raises:
            ValueError: both are set, and differ.
        """
        value = getattr(self, name)
        if value and other and getattr(value, "native", value) != getattr(other, "native", other):
            raise ValueError(f"enumerator, estimators and planner must have the same {name}")
        return value or other


class EmbeddingShardingPlanner:
    """Planner of the collections of a model.

    Args:
        topology: the ranks; None is that of `enumerator`, or of this machine.
        batch_size: examples per rank; None is that of `enumerator`, or 512.
        enumerator: enumerator with a topology, a batch size and constraints.
        storage_reservation: memory that tables must not use, one of the classes above or an
            `emblib.sharding.planner.Reservation`; None is emblib's default.
        proposer: argument that must be None.
        partitioner: argument that must be None.
        performance_model: argument that must be None.
        stats: argument that must be None.
        constraints: constraints by table; None for those of `enumerator`.
        debug: ignored: `print(plan)` shows the report of emblib's planner.
        callbacks: functions that get the plan and return the plan to use, on the rank that plans.
        timeout_seconds: argument that must be None.
        plan_loader: argument that must be None: `ShardingPlan.load` reads a plan for `plan=`.

    Raises:
        ValueError: an argument that must be None is set, or an argument and `enumerator` differ.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: EmbeddingEnumerator | None = None,
        storage_reservation: StorageReservation | planner.Reservation | None = None,
        proposer: None = None,
        partitioner: None = None,
        performance_model: None = None,
        stats: Any = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Sequence[Callable[[ShardingPlan], ShardingPlan]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: None = None,
    ) -> None:
        torchrec_parts = {
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "stats": stats,
            "timeout_seconds": timeout_seconds,
            "plan_loader": plan_loader,
        }
        unsupported = [name for name, value in torchrec_parts.items() if value is not None]
        if unsupported:
            raise ValueError(
                f"{', '.join(unsupported)} must be left out: emblib's planner has one search, "
                "whose length is max_trials of emblib.sharding.planner.Planner, a measured cost "
                "model, and a report that print(plan) shows; constraints and callbacks change its "
                "plans, and DistributedModelParallel(plan=) takes a stored one. "
                + RUN_TORCHREC_ITSELF
            )
        if enumerator is not None:
            topology = enumerator.agreed("topology", topology)
            batch_size = enumerator.agreed("batch_size", batch_size)
            constraints = enumerator.agreed("constraints", constraints)
        self._topology, self._batch_size = topology, batch_size or DEFAULT_BATCH_SIZE
        if isinstance(storage_reservation, StorageReservation):
            storage_reservation = storage_reservation.reservation
        self._reservation = storage_reservation or planner.Reservation()
        constraints = constraints or {}
        self._constraints = {
            name: constraint.to_emblib() for name, constraint in constraints.items()
        }
        self._forced_storages = {
            name: storage
            for name, constraint in constraints.items()
            if (storage := constraint.forced_storage()) is not None
        }
        self._callbacks = list(callbacks or ())

    def _native_planner(self, ranks: RankGroup) -> planner.Planner:
        """Return emblib's planner; the default topology is that of `ranks` on this machine."""
        topology = None if self._topology is None else self._topology.native
        if topology is None:
            topology = planner.Topology.detect(
                ranks.size, ranks.local_size, device=ranks.device.type
            )
        return planner.Planner(
            topology, self._batch_size, self._constraints, reservation=self._reservation
        )

    def plan(self, module: nn.Module, sharders: Sequence[Any] = ()) -> ShardingPlan:
        """Plan on this rank alone.

        Args:
            module: model with the collections.
            sharders: sharders whose optimizers need memory for their states.

        Raises:
            PlanError: no plan fits the memory or the constraints.
            TypeError: a callback does not return a `ShardingPlan`.
        """
        return self._plan_with_callbacks(self._native_planner(RankGroup()), module, sharders)

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] = (), pg: Any = None
    ) -> ShardingPlan:
        """Plan on rank 0, and return its plan on all ranks, which must all call this.

        `pg` is the process group, None for all processes. Arguments and errors are those of `plan`.
        """
        ranks = RankGroup.from_value(pg)
        native_planner = self._native_planner(ranks)
        plan: ShardingPlan = invoke_on_rank_and_broadcast_result(
            ranks, 0, lambda: self._plan_with_callbacks(native_planner, module, sharders)
        )
        return plan

    def _plan_with_callbacks(
        self, native_planner: planner.Planner, module: nn.Module, sharders: Sequence[Any]
    ) -> ShardingPlan:
        plan = self._plan_natively(native_planner, module, sharders)
        for callback in self._callbacks:
            plan = callback(plan)
            if not isinstance(plan, ShardingPlan):
                raise TypeError(
                    f"a callback of the planner must return the ShardingPlan to use, got {plan!r}"
                )
        return plan

    def _plan_natively(
        self, native_planner: planner.Planner, module: nn.Module, sharders: Sequence[Any]
    ) -> ShardingPlan:
        def with_forced_storage(workload: planner.TableWorkload) -> planner.TableWorkload:
            config = workload.config
            storage = self._forced_storages.get(config.name, config.storage)
            return dataclasses.replace(
                workload, config=dataclasses.replace(config, storage=storage)
            )

        plan = plan_with_report(native_planner, module, sharders, with_forced_storage)
        for tables in plan.plan.values():
            for name in tables.keys() & self._forced_storages.keys():
                tables[name].set_storage(self._forced_storages[name])
        return plan


def plan_with_report(
    native_planner: planner.Planner,
    module: nn.Module,
    sharders: Sequence[Any],
    change_workload: Callable[[planner.TableWorkload], planner.TableWorkload] | None = None,
) -> ShardingPlan:
    """Return a plan of all collections of a model, with its report.

    Args:
        native_planner: emblib's planner.
        module: the model.
        sharders: sharders whose optimizers need memory for their states.
        change_workload: function that returns the workload of a table that is planned, given the
            computed one; None plans the latter.

    Raises:
        PlanError: no plan fits the memory or the constraints.
    """
    device = native_planner.topology.device
    workloads = [
        _with_sharder(work, module.get_submodule(work.path), sharders, device)
        for work in workloads_of(module, native_planner.batch_size, native_planner.constraints)
    ]
    if change_workload is not None:
        workloads = [change_workload(work) for work in workloads]
    result = native_planner.solve_workloads(workloads, dense_bytes(module))
    return plan_of(result.plan, device, str(result))


def _with_sharder(
    work: planner.TableWorkload, collection: nn.Module, sharders: Sequence[Any], device: str
) -> planner.TableWorkload:
    """Return a workload with the optimizer and the sharding types of its collection's sharder.

    It is the first sharder of the class of the collection; without one, `work` is returned.

    Raises:
        ValueError: neither the sharder nor the constraints of the table allow a type that the other
            allows, or the sharder only has kernels of other memory than the table is in.
    """
    sharder = next((each for each in sharders if isinstance(collection, each.module_type)), None)
    if sharder is None:
        return work
    work = dataclasses.replace(work, optimizer=work.optimizer or sharder.optimizer)
    # Programs override the methods of sharders that allow everything.
    types = sharder.sharding_types(device)
    kernels = {kernel for each in types for kernel in sharder.compute_kernels(each, device)}
    constraints = work.constraints
    if set(types) < {each.value for each in ShardingType}:
        allowed = constraints.sharding_types or types
        types = [each for each in types if each in allowed]
        if not types:
            raise ValueError(
                f"table {work.name}: its constraints and sharding_types() of "
                f"{type(sharder).__name__} have no type in common: change one of them"
            )
        constraints = dataclasses.replace(
            constraints, sharding_types=tuple(map(sharding.ShardingType, types))
        )
    if kernels <= STORAGES.keys() and not constraints.storages:
        raise ValueError(
            f"table {work.name}: compute_kernels() of {type(sharder).__name__} has only "
            f"{sorted(kernels)}: pass them to the planner, constraints={{{work.config.name!r}: "
            f"ParameterConstraints(compute_kernels={sorted(kernels)})}}"
        )
    return dataclasses.replace(work, constraints=constraints)
