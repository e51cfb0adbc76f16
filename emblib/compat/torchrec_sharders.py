"""TorchRec's collections, their sharded forms, which take a context per batch, and sharders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib import BoundsCheck, sharding
from emblib import collections as emblib_collections
from emblib.collections.optimizers import (
    FusedOptimizer,
    apply_optimizer_in_backward,
    from_torch,
)
from emblib.compat import torchrec_script
from emblib.compat.checks import check_flags
from emblib.compat.torchrec_comms import QuantizedCommCodecs, comm_precision_of
from emblib.compat.torchrec_sharding import (
    KERNELS,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardedTensor,
    ShardingEnv,
    ShardingType,
    checked_kernel,
)
from emblib.compat.torchrec_types import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    Interface,
    Subscripted,
    optimizer_of,
)
from emblib.optim import Optimizer
from emblib.sharding import RankGroup, fingerprint
from emblib.sharding.checkpoints.saved_tables import StateOfTables
from emblib.sharding.checkpoints.sharded_table import ShardedTable
from emblib.sharding.shard import SHARDED, sharded_form


class EmbeddingBagCollectionInterface(nn.Module, metaclass=Interface):
    """Interface of embedding bag collections, trained or quantised."""

    emblib_classes = (emblib_collections.EmbeddingBagCollection,)


class EmbeddingCollectionInterface(nn.Module, metaclass=Interface):
    """Interface of embedding collections, trained or quantised."""

    emblib_classes = (emblib_collections.EmbeddingCollection,)


class ShardedModule(Subscripted, nn.Module, metaclass=Interface):
    """Interface of sharded collections; `ShardedEmbeddingModule` is another name of it."""

    emblib_classes = (StateOfTables,)


class EmbeddingBagCollection(emblib_collections.EmbeddingBagCollection):
    """`emblib.collections.EmbeddingBagCollection` with TorchRec's order of arguments."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
        *,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
    ) -> None:
        super().__init__(
            tables,
            device,
            is_weighted=is_weighted,
            optimizer=optimizer,
            bounds_check=bounds_check,
        )

    __prepare_scriptable__ = torchrec_script.scriptable


class EmbeddingCollection(emblib_collections.EmbeddingCollection):
    """`emblib.collections.EmbeddingCollection`, whose arguments are those of TorchRec."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        optimizer: Optimizer | None = None,
        *,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
    ) -> None:
        super().__init__(
            tables,
            device,
            need_indices=need_indices,
            optimizer=optimizer,
            bounds_check=bounds_check,
        )

    __prepare_scriptable__ = torchrec_script.scriptable

    def embedding_dim(self) -> int:
        """Return the dim of all tables; raise ValueError if they differ."""
        dims = {config.embedding_dim for config in self.configs}
        if len(dims) != 1:
            raise ValueError(f"tables have the dims {sorted(dims)}: read embedding_configs()")
        return dims.pop()

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the results of each table, see `get_embedding_names_by_table`."""
        return get_embedding_names_by_table(self.configs)


def get_embedding_names_by_table(tables: Sequence[Any]) -> list[list[str]]:
    """Return a name per table and feature of the table, as results of a collection are named.

    It is the feature, or `feature@table` if several tables read the feature.
    """
    keys = [key for table in tables for key in table.feature_names]
    return [
        [key if keys.count(key) == 1 else f"{key}@{table.name}" for key in table.feature_names]
        for table in tables
    ]


class FusedEmbeddingBagCollection(EmbeddingBagCollection):
    """An embedding bag collection whose backward updates the tables, with TorchRec's arguments.

    Args:
        tables: configurations of the tables.
        optimizer_type: class that `apply_optimizer_in_backward` takes for tables.
        optimizer_kwargs: arguments of the optimizer.
        is_weighted: whether batches have weights.
        device: device of the tables; None is torch's default device.
        location: argument that must be None; `storage` of each configuration selects the memory.

    Raises:
        TypeError: tables cannot have the optimizer.
        ValueError: `location` is passed, or tables cannot have an argument of the optimizer.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer_type: Any,
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        location: None = None,
    ) -> None:
        _refuse_location(location)
        super().__init__(tables, is_weighted, device, from_torch(optimizer_type, optimizer_kwargs))

    def fused_optimizer(self) -> Any:
        """Return the optimizer that backward runs, with a state dict by parameter name."""
        return FusedOptimizer.of(self)


class FusedEmbeddingCollection(EmbeddingCollection):
    """An embedding collection whose backward updates the tables, with TorchRec's arguments.

    Arguments and errors are as in `FusedEmbeddingBagCollection`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: Any,
        optimizer_kwargs: Mapping[str, Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: None = None,
    ) -> None:
        _refuse_location(location)
        fused = from_torch(optimizer_type, optimizer_kwargs)
        super().__init__(tables, device, need_indices, fused)

    def fused_optimizer(self) -> Any:
        """Return the optimizer that backward runs, with a state dict by parameter name."""
        return FusedOptimizer.of(self)


def _refuse_location(location: Any) -> None:
    if location is not None:
        raise ValueError(
            "location must be left out: storage=Dense(Placement.MANAGED) and the like of each "
            "configuration select the memory of its rows"
        )


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: Any,
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device,
    location: None = None,
) -> nn.Module:
    """Make backward update all collections of a model, in place; return the model on `device`.

    Args:
        model: model, which is changed.
        optimizer_type: class that `apply_optimizer_in_backward` takes for tables.
        optimizer_kwargs: arguments of the optimizer.
        device: device that the model is moved to.
        location: argument that must be None; otherwise ValueError is raised.

    Other errors are those of `apply_optimizer_in_backward`.
    """
    _refuse_location(location)
    collection_classes = (
        emblib_collections.EmbeddingBagCollection | emblib_collections.EmbeddingCollection
    )
    collections = [module for module in model.modules() if isinstance(module, collection_classes)]
    params = [parameter for collection in collections for parameter in collection.parameters()]
    apply_optimizer_in_backward(optimizer_type, params, optimizer_kwargs)
    fused_class_of = {
        EmbeddingBagCollection: FusedEmbeddingBagCollection,
        EmbeddingCollection: FusedEmbeddingCollection,
    }
    for collection in collections:  # the classes differ in `fused_optimizer()` only
        collection.__class__ = fused_class_of.get(type(collection), type(collection))
    return model.to(device)


# Sharded collections

# Setting of this process; a dict, so that functions can change it.
_index_dedup = {"is_on": False}


def set_ec_index_dedup(val: bool) -> None:
    """Set whether each `ShardedEmbeddingCollection` constructed from now on sends an id once."""
    check_flags(val=val)
    _index_dedup["is_on"] = bool(val)


def get_ec_index_dedup() -> bool:
    """Return the value of `set_ec_index_dedup`; False by default."""
    return _index_dedup["is_on"]


class EmbeddingBagCollectionContext:
    """State of a batch between `input_dist` and `output_dist` of a sharded collection."""

    def __init__(self) -> None:
        self.received: Any = None  # ids received from all ranks, which `compute` looked up

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of the received batch until the work queued on `stream` is done."""
        for tensor in _tensors_in(self.received):
            tensor.record_stream(stream)


class EmbeddingCollectionContext(EmbeddingBagCollectionContext):
    """The context of an embedding collection."""


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors_in(list(value.values()))
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


_Context = EmbeddingBagCollectionContext


class _WithContexts(Subscripted):
    """Base of sharded collections with TorchRec's arguments.

    The stages of a lookup take a context as their first argument. Without a context their arguments
    are those of emblib's class.

    Args:
        module: the collection to shard.
        table_name_to_parameter_sharding: sharding of each table, in TorchRec's or emblib's form.
        env: a `ShardingEnv`, or the ranks as a `RankGroup`; None is all processes.
        fused_params: arguments of the optimizer in backward, see `ModuleSharder`.
        device: device of the tables, see `ranks_of`; None is the device of the ranks. Used with a
            `ShardingEnv` only: a `RankGroup` has its own.
        qcomm_codecs_registry: registry that `get_qcomm_codecs_registry` returns.
        module_fqn: ignored.
        options: further arguments of emblib's class: `comm_precision`, `gradients`, `optimizer`,
            `shared`. They replace those that follow from the arguments above, unless they are None.
    """

    _make_context: ClassVar[Any] = EmbeddingBagCollectionContext
    _is_pooled: ClassVar[bool] = True

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, Any],
        env: Any = None,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        *,
        module_fqn: str | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "comm_precision": comm_precision_of(qcomm_codecs_registry, pooled=self._is_pooled),
            "optimizer": optimizer_of(fused_params),
        }
        options = {name: value for name, value in options.items() if value is not None}
        ranks = ranks_of(env, device) if isinstance(env, ShardingEnv) else env
        plan = _native_plan(table_name_to_parameter_sharding)
        super().__init__(module, plan, ranks, **{**arguments, **options})  # type: ignore[call-arg]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        parent: Any = super()
        parent._save_to_state_dict(destination, prefix, keep_vars)  # noqa: SLF001 of nn.Module
        for key, value in destination.items():
            if key.startswith(prefix) and type(value) is ShardedTable:
                destination[key] = ShardedTensor(
                    value.size(), value.shards, value.parts, value.ranks, value.dtype
                )

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        ranks: RankGroup = self.ranks  # type: ignore[attr-defined]
        return ranks.device

    def create_context(self) -> Any:
        """Return a context for one batch."""
        return self._make_context()

    def input_dist(self, ctx: Any, features: Any = None) -> Any:
        """Start to send ids; the result of two waits is the argument of `compute`."""
        parent: Any = super()
        return parent.input_dist(features if isinstance(ctx, _Context) else ctx)

    def compute(self, ctx: Any, dist_input: Any = None) -> Any:
        """Look up the received ids; `ctx` keeps them for `output_dist`."""
        parent: Any = super()
        if not isinstance(ctx, _Context):
            return parent.compute(ctx)
        ctx.received = dist_input
        return parent.compute(dist_input)

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Start to send the rows `output` back, which `compute` returned.

        Raises:
            ValueError: `compute` was not called with the context.
        """
        parent: Any = super()
        if not isinstance(ctx, _Context):
            return parent.output_dist(ctx, output)
        if ctx.received is None:
            raise ValueError("output_dist needs the context that compute was called with")
        return parent.output_dist(output, ctx.received)

    def compute_and_output_dist(self, ctx: Any, input: Any = None) -> Any:
        """Look up the received ids and start to send the rows back."""
        parent: Any = super()
        if not isinstance(ctx, _Context):
            return parent.compute_and_output_dist(ctx)
        ctx.received = input
        return parent.compute_and_output_dist(input)

    def prefetch(self, ctx: Any, dist_input: Any = None, forward_stream: Any = None) -> Any:
        """Load the rows of received ids into caches; `forward_stream` is ignored."""
        parent: Any = super()
        return parent.prefetch(dist_input if isinstance(ctx, _Context) else ctx)


def _native_plan(plan: Mapping[str, Any]) -> dict[str, sharding.ParameterSharding]:
    """Return emblib's form of the sharding of each table, which `plan` has in either form."""
    return {
        name: parameter.to_emblib() if isinstance(parameter, ParameterSharding) else parameter
        for name, parameter in plan.items()
    }


class ShardedEmbeddingBagCollection(  # type: ignore[misc]
    _WithContexts, sharding.ShardedEmbeddingBagCollection
):
    """`emblib.sharding.ShardedEmbeddingBagCollection` with TorchRec's arguments and contexts."""

    @property
    def _input_dists(self) -> list[Any]:
        return [self._input_dist]

    @property
    def _lookups(self) -> list[Any]:
        return [self.groups, *([] if self.replicated is None else [self.replicated])]

    @property
    def _output_dists(self) -> list[Any]:
        return [self._output_dist]


class ShardedEmbeddingCollection(  # type: ignore[misc]
    _WithContexts, sharding.ShardedEmbeddingCollection
):
    """`emblib.sharding.ShardedEmbeddingCollection` with TorchRec's arguments and contexts.

    With `use_index_dedup`, or after `set_ec_index_dedup(True)`, each id of a batch is sent once.
    """

    _make_context = EmbeddingCollectionContext
    _is_pooled = False

    def __init__(self, *arguments: Any, use_index_dedup: bool = False, **options: Any) -> None:
        check_flags(use_index_dedup=use_index_dedup)
        dedup = bool(use_index_dedup) or get_ec_index_dedup()
        super().__init__(*arguments, dedup=dedup, **options)

    @property
    def _input_dists(self) -> list[Any]:
        return list(self.tables_by_shape)

    _lookups = _output_dists = _input_dists


# Models with these classes are sharded like models with emblib's own classes.
SHARDED[EmbeddingBagCollection] = ShardedEmbeddingBagCollection
SHARDED[FusedEmbeddingBagCollection] = ShardedEmbeddingBagCollection
SHARDED[EmbeddingCollection] = ShardedEmbeddingCollection
SHARDED[FusedEmbeddingCollection] = ShardedEmbeddingCollection


# Sharders


class ModuleSharder(Subscripted):
    """Base of sharders: the optimizer and the communication codecs of collections of one class.

    Args:
        fused_params: arguments of the optimizer in backward: `optimizer`, `learning_rate`, `eps`,
            ...; None for no optimizer. Tables that already have an optimizer keep it.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`; None for no codecs.

    Raises:
        ValueError: a parameter would have no effect, or the registry has no codec for the outputs
            of the collections.
    """

    module_type: ClassVar[type[nn.Module]]
    sharded_module_type: ClassVar[Any]
    _is_pooled: ClassVar[bool] = True

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self.fused_params = None if fused_params is None else dict(fused_params)
        self.qcomm_codecs_registry = qcomm_codecs_registry
        self.optimizer = optimizer_of(fused_params)
        self.comm_precision = comm_precision_of(qcomm_codecs_registry, pooled=self._is_pooled)
        self.options: dict[str, Any] = {}  # further arguments of `sharded_module_type`

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the sharded collection, with the weights of `module`. All ranks must call this.

        Args:
            module: collection to shard.
            params: sharding of each table, in TorchRec's or emblib's form.
            env: ranks over which to shard.
            device: device of the tables; None is the device of the ranks.
            module_fqn: path of the collection, for messages.

        Raises:
            TypeError, ValueError: on all ranks, if one of them finds that the collection or its
                plan cannot be sharded.
        """
        ranks = ranks_of(env, device)

        def check_arguments() -> dict[str, sharding.ParameterSharding]:
            sharded_form(module, module_fqn or "")
            check_kernels(params, self.optimizer)
            return _native_plan(params)

        plan = fingerprint.agree(ranks, check_arguments)
        sharded: nn.Module = self.sharded_module_type(
            module,
            plan,
            ranks,
            comm_precision=self.comm_precision,
            optimizer=self.optimizer,
            **self.options,
        )
        return sharded.train(module.training)

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the parameter of each table, by the table's name; for a tensor train, core 0."""
        named = {name: list(handle.parameters()) for name, handle in module.handles().items()}
        return {name: parameters[0] for name, parameters in named.items() if parameters}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the values of all sharding types, for any device."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the values of all kernels that train, for any sharding type and device."""
        return [kernel for kernel in KERNELS if kernel != EmbeddingComputeKernel.QUANT.value]

    def storage_usage(
        self, tensor: Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return the bytes of `tensor`, by the memory that has its rows: `hbm` or `ddr`.

        Caches are not counted. A kernel that is not in `KERNELS` raises ValueError.
        """
        is_uvm = checked_kernel(compute_kernel).startswith("fused_uvm")
        is_on_gpu = compute_device_type == "cuda" and not is_uvm
        return {"hbm" if is_on_gpu else "ddr": tensor.numel() * tensor.element_size()}


class EmbeddingBagCollectionSharder(ModuleSharder):
    """Sharder of EmbeddingBagCollections."""

    module_type: ClassVar[type[nn.Module]] = emblib_collections.EmbeddingBagCollection
    sharded_module_type = ShardedEmbeddingBagCollection
    _is_pooled = True


class EmbeddingCollectionSharder(ModuleSharder):
    """Sharder of EmbeddingCollections.

    Args:
        fused_params: arguments of the optimizer, see `ModuleSharder`.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`; None for no codecs.
        use_index_dedup: whether each id of a batch is sent once.
    """

    module_type = emblib_collections.EmbeddingCollection
    sharded_module_type = ShardedEmbeddingCollection
    _is_pooled = False

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        check_flags(use_index_dedup=use_index_dedup)
        self.options = {"use_index_dedup": bool(use_index_dedup)}


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Sharder of FusedEmbeddingBagCollections, whose tables have an optimizer already."""

    module_type = FusedEmbeddingBagCollection


def check_kernels(params: Mapping[str, ParameterSharding], optimizer: Optimizer | None) -> None:
    """Raise ValueError if all tables get an optimizer, but the kernel of some is DENSE.

    Args:
        params: sharding of each table; emblib's form of it has no kernel.
        optimizer: optimizer of all tables in backward; None for none.
    """
    dense_tables = [
        name
        for name, parameter in params.items()
        if getattr(parameter, "compute_kernel", None) == EmbeddingComputeKernel.DENSE.value
    ]
    if dense_tables and optimizer is not None:
        raise ValueError(
            f"fused_params fuse the optimizer of all tables, and the plan says DENSE for "
            f"{dense_tables}: leave compute_kernel out, or give the others their optimizer by "
            "apply_optimizer_in_backward"
        )


def ranks_of(env: ShardingEnv, device: torch.device | str | None) -> RankGroup:
    """Return the ranks of `env`, with tables on a device of the type of `device`.

    None, or the type that the ranks have, keeps the device of the ranks; an index is ignored then.

    Raises:
        ValueError: `env` is several devices of one process.
    """
    ranks = env.training_ranks()
    if device is None or torch.device(device).type == ranks.device.type:
        return ranks
    if ranks.group is None:
        return RankGroup.single(device)
    return RankGroup(ranks.group, local_size=ranks.local_size, device=device)


def replace_child(module: nn.Module, child: nn.Module, replacement: nn.Module) -> None:
    """Replace `child` by `replacement` at each of its paths in a model, in place."""
    for parent in list(module.modules()):
        for name, current_child in list(parent.named_children()):
            if current_child is child:
                setattr(parent, name, replacement)
