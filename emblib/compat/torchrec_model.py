"""TorchRec's interface for sharding a model: collections, sharders, DistributedModelParallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from emblib import collections as emblib_collections
from emblib import sharding
from emblib.compat.torchrec_comms import QuantizedCommCodecs, comm_precision_of
from emblib.compat.torchrec_sharding import (
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from emblib.compat.torchrec_types import EmbeddingBagConfig, EmbeddingConfig, optimizer_of
from emblib.optim import Optimizer
from emblib.sharding import DDP, CommPrecision, RankGroup, World, fingerprint, pipelines
from emblib.sharding.shard import SHARDED, sharded_form


class EmbeddingBagCollection(emblib_collections.EmbeddingBagCollection):
    """`emblib.collections.EmbeddingBagCollection` with TorchRec's order of arguments."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(tables, device, is_weighted=is_weighted, optimizer=optimizer)


class EmbeddingCollection(emblib_collections.EmbeddingCollection):
    """`emblib.collections.EmbeddingCollection`; its arguments are TorchRec's already."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(tables, device, need_indices=need_indices, optimizer=optimizer)


# A model that has these is sharded as one that has emblib's own.
SHARDED[EmbeddingBagCollection] = sharding.ShardedEmbeddingBagCollection
SHARDED[EmbeddingCollection] = sharding.ShardedEmbeddingCollection


class _Sharder:
    """Base of sharders: the optimizer and the communication codecs of collections of one class.

    Args:
        fused_params: of the optimizer in backward: `optimizer`, `learning_rate`, `eps`, ...; tables
            that have one already keep theirs.
        qcomm_codecs_registry: what `get_qcomm_codecs_registry` gives.
    """

    module_type: ClassVar[type[nn.Module]]
    _sharded: ClassVar[Any]
    _pooled: ClassVar[bool]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self.fused_params = None if fused_params is None else dict(fused_params)
        self.optimizer = optimizer_of(fused_params)
        self.comm_precision = comm_precision_of(qcomm_codecs_registry, pooled=self._pooled)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the sharded collection, with the weights of `module`."""
        ranks = ranks_of(env, device)

        def checked() -> dict[str, sharding.ParameterSharding]:
            sharded_form(module, module_fqn or "")
            check_kernels(params, self.optimizer)
            return {name: parameter.to_emblib() for name, parameter in params.items()}

        plan = fingerprint.agree(ranks, checked)
        sharded: nn.Module = self._sharded(
            module, plan, ranks, comm_precision=self.comm_precision, optimizer=self.optimizer
        )
        return sharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on any device."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """All of them, on any device."""
        return [kernel.value for kernel in EmbeddingComputeKernel]


class EmbeddingBagCollectionSharder(_Sharder):
    """Sharder of EmbeddingBagCollections."""

    module_type = emblib_collections.EmbeddingBagCollection
    _sharded = sharding.ShardedEmbeddingBagCollection
    _pooled = True


class EmbeddingCollectionSharder(_Sharder):
    """Sharder of EmbeddingCollections."""

    module_type = emblib_collections.EmbeddingCollection
    _sharded = sharding.ShardedEmbeddingCollection
    _pooled = False


def default_sharders() -> list[_Sharder]:
    """Return one sharder of each class, without an optimizer."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


get_default_sharders = default_sharders


def check_kernels(params: Mapping[str, ParameterSharding], optimizer: Optimizer | None) -> None:
    """Raise for a DENSE table where all tables get an optimizer in backward."""
    dense = [n for n, p in params.items() if p.compute_kernel == EmbeddingComputeKernel.DENSE.value]
    if dense and optimizer is not None:
        raise ValueError(
            f"fused_params fuse the optimizer of all tables, and the plan says DENSE for {dense}: "
            "leave compute_kernel out, or give the others their optimizer by "
            "apply_optimizer_in_backward"
        )


def ranks_of(env: ShardingEnv, device: torch.device | str | None) -> RankGroup:
    """Return the ranks of `env`, with tables on `device`."""
    if device is None or torch.device(device).type == env.ranks.device.type:
        return env.ranks
    if env.ranks.group is None:
        return RankGroup.single(device)
    return RankGroup(env.ranks.group, local_size=env.ranks.local_size, device=device)


class DefaultDataParallelWrapper(DDP):
    """Wrapper of the dense part: DistributedDataParallel with these options."""

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(
            {
                "bucket_cap_mb": bucket_cap_mb,
                "static_graph": static_graph,
                "find_unused_parameters": find_unused_parameters,
                "gradient_as_bucket_view": True,
                "broadcast_buffers": False,
            }
        )

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Wrap as `DDP.wrap`, ignoring torch 2.13's warning about an option without replacement."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            return super().wrap(module, ranks, ignored)


class DistributedModelParallel(sharding.DistributedModelParallel):
    """`emblib.sharding.DistributedModelParallel` with TorchRec's arguments.

    Args:
        module: the model, or one collection.
        env: its ranks; left out, all processes.
        device: where it is; left out, the device of the ranks.
        plan: what a planner made; left out, one is made here.
        sharders: with the optimizers in backward, and the wires.
        init_data_parallel: whether the dense part is wrapped now; else by `init_data_parallel()`.
        init_parameters: True; what is on `meta` always gets first values.
        data_parallel_wrapper: `DefaultDataParallelWrapper(...)`, or a wrapping of emblib's.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[_Sharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: Any = None,
    ) -> None:
        from emblib.compat.torchrec_sharding import EmbeddingShardingPlanner

        env = ShardingEnv(RankGroup()) if env is None else env
        ranks = ranks_of(env, device)
        sharders = default_sharders() if sharders is None else list(sharders)
        world = World(ranks.size, ranks.local_size)

        def checked() -> tuple[
            Optimizer | None, CommPrecision | None, sharding.ShardingPlan | None
        ]:
            if not init_parameters:
                raise ValueError("init_parameters must be True: nothing is left on meta here")
            optimizer = _one([s.optimizer for s in sharders])
            comm_precision = _one([s.comm_precision for s in sharders])
            return (
                optimizer,
                comm_precision,
                None if plan is None else _native(plan, optimizer, world),
            )

        # Planning is collective, and so is what follows: a rank must not fail alone before it.
        optimizer, comm_precision, native = fingerprint.agree(
            ranks, checked, lambda _: {"": {"plan": None if plan is None else "given"}}
        )
        if native is None:
            planner = EmbeddingShardingPlanner()
            native = planner.collective_plan(module, sharders, ranks).to_emblib(world)
        wrapper = (
            DefaultDataParallelWrapper()
            if data_parallel_wrapper is None
            else (data_parallel_wrapper)
        )
        self._wrapper = wrapper
        super().__init__(
            module,
            ranks,
            plan=native,
            optimizer=optimizer,
            wrap=wrapper if init_data_parallel else "none",
            comm_precision=comm_precision,
        )

    def init_data_parallel(self) -> None:
        """Wrap the dense part, if that was deferred."""
        self.wrap_dense(self._wrapper)


def _native(plan: Any, optimizer: Optimizer | None, world: World) -> sharding.ShardingPlan:
    """Return the plan as emblib's, checked against the optimizer of all tables."""
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            "plan must be a ShardingPlan of emblib.compat.torchrec, from a planner or as "
            f"ShardingPlan({{path: construct_module_sharding_plan(collection, ...)}}), got {plan!r}"
        )
    for tables in plan.plan.values():
        check_kernels(tables, optimizer)
    return plan.to_emblib(world)


def _one(found: Sequence[Any]) -> Any:
    """Return the settings of the sharders that have any."""
    said = [value for value in found if value is not None]
    if any(value != said[0] for value in said):
        raise ValueError(
            f"sharders of one model must agree, got {said}: give tables that differ their "
            "optimizer by apply_optimizer_in_backward"
        )
    return said[0] if said else None


class TrainPipelineBase(pipelines.TrainPipelineBase):
    """Copy the next batch to the device during a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class TrainPipelineSparseDist(pipelines.TrainPipelineSparseDist):
    """Also send the ids of the next batch during a step; results are those of a plain loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_all(execute_all_batches)
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class PrefetchTrainPipelineSparseDist(pipelines.PrefetchTrainPipelineSparseDist):
    """Also load the rows of the next batch into caches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_all(execute_all_batches)
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


def _check_all(every: object) -> None:
    if not every:
        raise ValueError(
            "execute_all_batches must be True: batches that were read are trained; end the "
            "iterator where training is to end"
        )
