"""TorchRec's words for planning: topology, constraints, and a planner that gives TorchRec's plans.

The planner is `emblib.sharding.planner.Planner`. What only its own knows has no argument here:
enumerators, proposers, partitioners and performance models are TorchRec's classes, not words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from emblib import sharding
from emblib.compat.torchrec_sharding import (
    KINDS,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from emblib.sharding import Ranks, planner
from emblib.sharding.groups_of_ranks import invoke_on_rank_and_broadcast_result
from emblib.sharding.planner.work import dense_bytes, works_of

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
        # A plan for GPUs may be made where there are none, if it is said what they have.
        elsewhere = compute_device == "cuda" and hbm_cap and not torch.cuda.is_available()
        make: Any = planner.Topology if elsewhere else planner.Topology.detect
        found: planner.Topology = make(
            *(world_size, self.local_world_size), device=compute_device, calibration=calibration
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
    """What the planner may do with a table, and what it cannot know of it."""

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] = field(default_factory=lambda: [1.0])
    batch_sizes: Sequence[int] | None = None

    def to_emblib(self) -> planner.TableConstraints:
        """As emblib says it.

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
            kinds=tuple(KINDS[k] for k in kernels if k in KINDS),
            pooling_factor=factors[0] if len(factors) == 1 else factors,
            batch_size=self.batch_sizes[0] if self.batch_sizes else None,
            **options,
        )


class EmbeddingShardingPlanner:
    """Finds a plan for the collections of a model.

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

    def _native(self, ranks: Ranks) -> planner.Planner:
        topology = None if self._topology is None else self._topology.native
        if topology is None:
            topology = planner.Topology.detect(
                ranks.size, ranks.local_size, device=ranks.device.type
            )
        return planner.Planner(
            topology, self._batch_size, self._constraints, reservation=self._reservation
        )

    def plan(self, module: nn.Module, sharders: Sequence[Any] = ()) -> ShardingPlan:
        """The plan, made here; the optimizers of `sharders` count in its memory."""
        native = self._native(Ranks())
        return _told(native, module, sharders)

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] = (), pg: Any = None
    ) -> ShardingPlan:
        """The plan that rank 0 makes, on all ranks."""
        ranks = Ranks.of(pg)
        native = self._native(ranks)
        found: ShardingPlan = invoke_on_rank_and_broadcast_result(
            ranks, 0, lambda: _told(native, module, sharders)
        )
        return found


def _told(native: planner.Planner, module: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
    """Solve it with the optimizers that the sharders will give."""
    works = [
        dataclasses.replace(work, optimizer=work.optimizer or _optimizer_of(module, work, sharders))
        for work in works_of(module, native.batch_size, native.constraints)
    ]
    found = native.solve_works(works, dense_bytes(module))
    return plan_of(found.plan, native.topology.device, str(found))


def _optimizer_of(module: nn.Module, work: planner.Work, sharders: Sequence[Any]) -> Any:
    collection = module.get_submodule(work.path)
    fitting = [s.optimizer for s in sharders if isinstance(collection, s.module_type)]
    return fitting[0] if fitting else None


def plan_of(plan: sharding.ShardingPlan, device_type: str, told: str = "") -> ShardingPlan:
    """A plan of emblib's in TorchRec's words."""
    fused = EmbeddingComputeKernel.FUSED.value
    modules = {
        path: EmbeddingModuleShardingPlan(
            {name: ParameterSharding.of(t, fused, device_type) for name, t in tables.items()}
        )
        for path, tables in plan.modules.items()
    }
    return ShardingPlan(modules, told)
