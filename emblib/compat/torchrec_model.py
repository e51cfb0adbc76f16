"""TorchRec's interface for a whole model: `DistributedModelParallel`, `shard` and pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from emblib import sharding
from emblib.compat.checks import check_flags, check_names
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.compat.torchrec_planner import EmbeddingShardingPlanner
from emblib.compat.torchrec_quant import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    local_plan,
)
from emblib.compat.torchrec_sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    check_kernels,
    ranks_of,
    replace_child,
)
from emblib.compat.torchrec_sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingRule,
    ShardingType,
    construct_module_sharding_plan,
    plan_of,
)
from emblib.compat.torchrec_types import Interface, Subscripted
from emblib.optim import Optimizer
from emblib.sharding import DDP, CommPrecision, RankGroup, World, fingerprint, pipelines
from emblib.sharding.dense import materialise, unwrapped
from emblib.sharding.shard import collections_of


def default_sharders() -> list[Any]:
    """Return a new sharder for each class of collections, without an optimizer."""
    return [
        EmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        QuantEmbeddingBagCollectionSharder(),
        QuantEmbeddingCollectionSharder(),
    ]


get_default_sharders = default_sharders


def get_module_to_default_sharders() -> dict[type[nn.Module], Any]:
    """Return the default sharders, by the class of the collections that they shard."""
    return {sharder.module_type: sharder for sharder in default_sharders()}


def _sharder_of(module: nn.Module, sharders: Sequence[Any]) -> Any:
    """Return the sharder for the most specific class of `module`; None if no sharder takes it."""
    candidates = [sharder for sharder in sharders if isinstance(module, sharder.module_type)]
    base_classes = type(module).__mro__
    return min(
        candidates, key=lambda sharder: base_classes.index(sharder.module_type), default=None
    )


def shard(
    module: nn.Module,
    plan: Mapping[str, Any] | ShardingRule,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    sharder: Any = None,
) -> nn.Module:
    """Return the sharded form of one collection. All ranks must call this.

    Args:
        module: collection to shard.
        plan: sharding of each table, by name: a `ParameterSharding`, or the result of a function
            such as `row_wise()`; or one such result for all tables.
        env: environment with the ranks; None is all processes.
        device: device of the tables; None is the device of the ranks.
        sharder: sharder of the collection; None is the default one of its class.

    Raises:
        TypeError: no default sharder takes the module.
        ValueError: `plan` does not have exactly the tables of the collection, or a sharding does
            not fit a table or the ranks.
    """
    env = ShardingEnv(RankGroup()) if env is None else env
    sharder = _sharder_of(module, default_sharders()) if sharder is None else sharder
    if sharder is None:
        raise TypeError(f"there is no sharder of {type(module).__name__}: pass one")
    collection: Any = module
    names = [config.name for config in collection.configs]
    shardings = dict.fromkeys(names, plan) if isinstance(plan, ShardingRule) else dict(plan)
    tables_with_rules = [n for n, value in shardings.items() if isinstance(value, ShardingRule)]
    if tables_with_rules:
        rules = {
            name: value if isinstance(value, ShardingRule) else _rule_of(value)
            for name, value in shardings.items()
        }
        module_plan = construct_module_sharding_plan(
            module, rules, sharder, env.ranks.local_size, env.world_size, env.ranks.device.type
        )
        shardings |= {name: module_plan[name] for name in tables_with_rules}
    sharded: nn.Module = sharder.shard(module, shardings, env, device)
    return sharded


def _rule_of(parameter: Any) -> ShardingRule:
    """Return a rule that always gives the sharding `parameter`, of TorchRec's or emblib's form."""
    if not isinstance(parameter, ParameterSharding):
        return ShardingRule(lambda shape, world: parameter)
    native = parameter.to_emblib()
    return ShardingRule(lambda shape, world: native, parameter.compute_kernel)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[Any] | None = None,
    init_params: bool = False,
    planner: Any = None,
) -> nn.Module:
    """Replace the collections of a model by sharded ones, and return the model.

    All ranks must call this. A collection that no sharder takes stays as it is.

    Args:
        module: model, which is changed; or one collection, whose sharded form is returned.
        env: environment with the ranks, or for quantised collections with the devices of this
            process; None is all processes.
        device: device of the tables; None is the device of the ranks.
        plan: plan of all collections; None is the plan of `planner`.
        sharders: sharders of the classes of collections; None is the default ones.
        init_params: whether to allocate and initialize other modules on the meta device.
        planner: planner over the ranks; None is a default one. It is not used with `plan`, or for
            the devices of one process.
    """
    check_flags(init_params=init_params)
    env = ShardingEnv(RankGroup()) if env is None else env
    sharders = default_sharders() if sharders is None else list(sharders)
    if plan is None and env.is_local:
        plan = local_plan(module, env.world_size)
        trained_collections: Any = collections_of(module)
        for path, collection in trained_collections.items():
            if path in plan.plan:
                continue
            shardings = {config.name: sharding.table_wise(0) for config in collection.configs}
            native = sharding.construct_module_plan(collection, shardings, World(1, 1))
            plan.plan[path] = EmbeddingModuleShardingPlan(
                {
                    name: ParameterSharding.of(table, "fused", "cpu")
                    for name, table in native.items()
                }
            )
    elif plan is None:
        planner = EmbeddingShardingPlanner() if planner is None else planner
        plan = planner.collective_plan(module, sharders, ranks_of(env, device))
    assert plan is not None
    for path, tables in plan.plan.items():
        collection = module.get_submodule(path)
        sharder = _sharder_of(collection, sharders)
        if sharder is None:
            continue
        sharded = sharder.shard(collection, tables, env, device, path)
        if not path:
            return sharded
        replace_child(module, collection, sharded)
    if init_params and (device is None or torch.device(device).type != "meta"):
        materialise(module, torch.device(env.ranks.device if device is None else device))
    return module


_shard_modules = shard_modules


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the model inside `DistributedModelParallel` and data-parallel wrappers."""
    return unwrapped(module)


def get_module(module: nn.Module) -> nn.Module:
    """Return the model inside `DistributedModelParallel`, with its data-parallel wrapper."""
    while isinstance(module, sharding.DistributedModelParallel):
        module = module.wrapped
    return module


class DataParallelWrapper(DDP):
    """Base of wrappers of the dense part: `wrap(module, ranks, ignored)` wraps a model."""


_ALLREDUCE_DTYPES = {None: None, "fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, init=False)
class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wrapper of the dense part: DistributedDataParallel with these options.

    Args:
        bucket_cap_mb: size of a message, in MiB.
        static_graph: whether every step uses the same parameters.
        find_unused_parameters: whether some steps do not use all parameters.
        allreduce_comm_precision: dtype in which gradients are sent and added up: "fp16" or "bf16";
            None and "fp32" are the dtype of the parameters.
        params_to_ignore: names of parameters whose gradients are not averaged.
        ddp_kwargs: further arguments of DistributedDataParallel, which replace those above.

    Raises:
        ValueError: `allreduce_comm_precision` has another value.
    """

    params_to_ignore: tuple[str, ...] = ()

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision not in _ALLREDUCE_DTYPES:
            raise ValueError(
                "allreduce_comm_precision must be 'fp16', 'bf16', or None for the dtype of the "
                f"parameters, got {allreduce_comm_precision!r}"
            )
        ignored_names = check_names("params_to_ignore", params_to_ignore or ())
        check_flags(static_graph=static_graph, find_unused_parameters=find_unused_parameters)
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
            **(ddp_kwargs or {}),
        }
        super().__init__(options, _ALLREDUCE_DTYPES[allreduce_comm_precision])
        object.__setattr__(self, "params_to_ignore", tuple(ignored_names))

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Wrap as `DDP.wrap` does, without torch 2.13's warning about `broadcast_buffers`."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            return super().wrap(module, ranks, {*ignored, *self.params_to_ignore})


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Put the quantised tables of a model on devices of this process, in place.

    The rows are copied with the tables: `assign_weights_to_tbe` is not needed.

    Args:
        model: model with quantised collections, which is changed.
        world_size: number of devices.
        compute_device: "cuda" or "cpu".
        sharding_device: ignored.
        sharders: sharders of the classes of collections; None is the default ones.
        device_memory_size: maximum bytes of tables per GPU; None for no limit. Ignored on a CPU.
        constraints: constraints by table, of which only `sharding_types` is read.
        ddr_cap: maximum bytes of tables on a CPU; None for no limit. Ignored on GPUs.
        sharding_plan: plan to use; None is the result of `local_plan`.

    Returns:
        the model and the plan.

    Raises:
        ValueError: constraints exclude TABLE_WISE, or the tables need more memory than there is.
    """
    for name, constraint in (constraints or {}).items():
        types = constraint.sharding_types
        if types and ShardingType.TABLE_WISE.value not in types:
            raise ValueError(
                f"table {name}: the devices of one process take whole tables, got {types}"
            )
    capacity = ddr_cap if compute_device == "cpu" else device_memory_size
    plan = local_plan(model, world_size, capacity) if sharding_plan is None else sharding_plan
    env = ShardingEnv.from_local(world_size, 0)
    sharded = shard_modules(model, env, torch.device(compute_device), plan, sharders)
    return sharded, plan


class DistributedModelParallel(sharding.DistributedModelParallel):
    """`emblib.sharding.DistributedModelParallel` with TorchRec's arguments.

    Args:
        module: the model, or one collection.
        env: environment with the ranks over which to shard; None is all processes.
        device: device of the model; None is the device of the ranks.
        plan: plan of all collections; None is the plan of the default planner.
        sharders: sharders, which have the optimizers in backward and the communication codecs;
            None is the default ones. Those that have a setting must have the same one.
        init_data_parallel: whether the dense part is wrapped now; otherwise call the method
            `init_data_parallel()`.
        init_parameters: whether dense modules on `meta` are allocated and initialized; tables
            always are.
        data_parallel_wrapper: wrapper of the dense part, e.g. `DefaultDataParallelWrapper(...)` or
            one of emblib's; None is `DefaultDataParallelWrapper()`.
        model_tracker_configs: argument that must be None.

    All ranks must construct it; if one rank finds one of these errors, all raise.

    Raises:
        TypeError: `plan` is not a `ShardingPlan` of this package.
        ValueError: sharders differ in their optimizer or codecs, `model_tracker_configs` is passed,
            or the plan does not fit the model, the ranks or the optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[Any] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: Any = None,
        model_tracker_configs: None = None,
    ) -> None:
        env = ShardingEnv(RankGroup()) if env is None else env
        ranks = ranks_of(env, device)
        sharders = default_sharders() if sharders is None else list(sharders)
        world = World(ranks.size, ranks.local_size)

        def check_arguments() -> tuple[
            Optimizer | None, CommPrecision | None, sharding.ShardingPlan | None
        ]:
            if model_tracker_configs is not None:
                raise ValueError(
                    "model_tracker_configs must be None: emblib.sharding.checkpoints saves what "
                    f"changed, save(..., since=) of dynamic tables the keys. {RUN_TORCHREC_ITSELF}"
                )
            check_flags(init_data_parallel=init_data_parallel)
            optimizer = _common_setting([sharder.optimizer for sharder in sharders])
            comm_precision = _common_setting([sharder.comm_precision for sharder in sharders])
            return (
                optimizer,
                comm_precision,
                None if plan is None else _to_native_plan(plan, optimizer, world),
            )

        # Planning and sharding are collective: all ranks fail together if one rank finds an error.
        optimizer, comm_precision, native_plan = fingerprint.agree(
            ranks,
            check_arguments,
            lambda _: {
                "": {
                    "plan": None if plan is None else "given",
                    "init_parameters": init_parameters,
                }
            },
        )
        if plan is not None:
            # Sharders of other libraries may replace collections before they are sharded.
            prepares = [sharder.prepare for sharder in sharders if hasattr(sharder, "prepare")]
            module = fingerprint.agree(ranks, lambda: _prepare_collections(module, plan, prepares))
        if native_plan is None:
            planner = EmbeddingShardingPlanner()
            native_plan = planner.collective_plan(module, sharders, ranks).to_emblib(world)
        wrapper = (
            DefaultDataParallelWrapper() if data_parallel_wrapper is None else data_parallel_wrapper
        )
        self._wrapper = wrapper
        super().__init__(
            module,
            ranks,
            plan=native_plan,
            optimizer=optimizer,
            wrap=wrapper if init_data_parallel else "none",
            comm_precision=comm_precision,
            init_parameters=init_parameters,
        )
        for sharder in sharders:
            if hasattr(sharder, "finish"):
                sharder.finish(self)
        if any(getattr(each, "options", {}).get("use_index_dedup") for each in sharders):
            for submodule in self.modules():
                if isinstance(submodule, sharding.ShardedEmbeddingCollection):
                    submodule.dedup = True

    @property
    def plan(self) -> Any:
        """The sharding of every table, as a `ShardingPlan` of this package."""
        return plan_of(super().plan, self.ranks.device.type)

    # Programs read TorchRec's private attributes, too.

    @property
    def _plan(self) -> Any:
        return self.plan

    @property
    def _dmp_wrapped_module(self) -> nn.Module:
        return self.wrapped

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the model inside its wrapper, under their names there."""
        return self.module.named_parameters(prefix, recurse)

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Return the names of weights of `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`.

        They are appended to `destination`, if that is passed, and begin with `prefix`.
        """
        names = [] if destination is None else destination
        name_prefix = f"{prefix}." if prefix else ""
        for path, submodule in self.module.named_modules():
            if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
                names.append(f"{name_prefix}{path}.weight" if path else f"{name_prefix}weight")
        return names

    def init_data_parallel(self) -> None:
        """Wrap the dense part; call this once, and only if `__init__` did not wrap it."""
        self.wrap_dense(self._wrapper)


def _to_native_plan(plan: Any, optimizer: Optimizer | None, world: World) -> sharding.ShardingPlan:
    """Return emblib's form of a plan.

    Raises:
        TypeError: `plan` is not a `ShardingPlan` of this package.
        ValueError: the kernel of a table is DENSE, but `optimizer` is for all tables.
    """
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            "plan must be a ShardingPlan of emblib.compat.torchrec, from a planner or as "
            f"ShardingPlan({{path: construct_module_sharding_plan(collection, ...)}}), got {plan!r}"
        )
    for tables in plan.plan.values():
        check_kernels(tables, optimizer)
    return plan.to_emblib(world)


def _prepare_collections(
    module: nn.Module, plan: Any, prepares: Sequence[Callable[..., Any]]
) -> nn.Module:
    """Apply the `prepare` of each sharder to a model, one after the other; return the model."""
    for prepare in prepares:
        module = prepare(module, plan)
    return module


def _common_setting(settings: Sequence[Any]) -> Any:
    """Return the setting that is not None; None if all are. Raise ValueError if they differ."""
    passed_settings = [value for value in settings if value is not None]
    if any(value != passed_settings[0] for value in passed_settings):
        raise ValueError(
            f"sharders of one model must agree, got {passed_settings}: give tables that differ "
            "their optimizer by apply_optimizer_in_backward"
        )
    return passed_settings[0] if passed_settings else None


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError if an option that emblib's pipelines do not have is set."""
    passed_options = sorted(name for name, value in options.items() if value)
    if passed_options:
        raise ValueError(
            f"{', '.join(passed_options)} must be left out: emblib's pipelines neither compile nor "
            f"rewrite the model, and free a batch once it was trained on. {RUN_TORCHREC_ITSELF}"
        )


class _PipelineNames(Subscripted):
    """Names of TorchRec's pipelines that programs use, also private ones.

    facebookresearch/dlrm, the example of DLRM, calls `pipeline._model.eval()`.
    """

    model: nn.Module
    optimizer: Any
    device: torch.device
    _steps_ahead: Any

    @property
    def _model(self) -> nn.Module:
        return self.model

    @property
    def _optimizer(self) -> Any:
        return self.optimizer

    @property
    def _device(self) -> torch.device:
        return self.device

    def detach(self) -> nn.Module:
        """Return the model; it can always be called, because pipelines do not rewrite it."""
        return self.model

    def reset(self) -> None:
        """Do nothing after the end of the batches, where nothing is in flight.

        Raises:
            NotImplementedError: batches are in flight.
        """
        if self._steps_ahead:
            raise NotImplementedError(
                "reset would drop batches that are in flight: call progress until StopIteration, "
                "or pass the next iterator to progress, which trains them first"
            )

    def attach(self, model: nn.Module | None = None) -> None:
        """Do nothing: the pipeline goes on where it was; ValueError for another model."""
        if model is not None and model is not self.model:
            raise ValueError("attach takes the model of the pipeline: make another pipeline for it")


class TrainPipelineBase(_PipelineNames, pipelines.TrainPipelineBase):
    """Pipeline that copies the next batch to the device during a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        _check_options({"enable_inplace_copy_batch": enable_inplace_copy_batch})
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class TrainPipeline(Subscripted, metaclass=Interface):
    """Interface of all pipelines."""

    emblib_classes = (pipelines.TrainPipelineBase,)


class TrainPipelineSparseDist(_PipelineNames, pipelines.TrainPipelineSparseDist):
    """Pipeline that copies batches to the device and sends the next batch's ids during a step.

    Results are those of a plain loop. `pipeline_postproc` has no effect: the model is not traced,
    and any code may prepare the inputs of collections.

    Raises:
        ValueError: `execute_all_batches` is False, or an option is set that emblib does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        check_flags(execute_all_batches=execute_all_batches)
        if not execute_all_batches:
            raise ValueError(
                "execute_all_batches must be True: batches that were read are trained; end the "
                f"iterator where training is to end. {RUN_TORCHREC_ITSELF}"
            )
        _check_options({"apply_jit": apply_jit, "context_type": context_type, **options})
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class PrefetchTrainPipelineSparseDist(
    TrainPipelineSparseDist, pipelines.PrefetchTrainPipelineSparseDist
):
    """`TrainPipelineSparseDist` that also loads the rows of the next batch into caches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        *more: Any,
        **options: Any,
    ) -> None:
        # None is the `context_type` of the base class.
        _check_options({"context_type": options.pop("context_type", None)})
        base_arguments = (model, optimizer, device, execute_all_batches, apply_jit, None)
        super().__init__(*base_arguments, *more, **options)


class EvalPipelineSparseDist(_PipelineNames, pipelines.EvalPipelineSparseDist):
    """Pipeline that runs a model, which must be in eval mode, and sends the next ids meanwhile.

    If the model returns a pair, (loss, output), `progress` returns the second. `optimizer` and
    `pipeline_postproc` are ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        _check_options({"apply_jit": apply_jit, **options})
        run_model = model if custom_model_fwd is None else custom_model_fwd

        def run_and_select(batch: Any) -> Any:
            result = run_model(batch)
            is_pair = isinstance(result, tuple | list) and len(result) == 2
            return result[1] if is_pair else result

        super().__init__(model, device, forward=run_and_select)
