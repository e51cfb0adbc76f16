"""Convert the arguments of FBGEMM's module to emblib's specs; unsupported arguments raise."""

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from emblib import (
    BoundsCheck,
    CacheConfig,
    CachePolicy,
    MultiPassPrefetch,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EmbeddingLocation,
    EmbOptimType,
    EnsembleModeDefinition,
    LearningRateMode,
    PoolingMode,
    SparseType,
    StepMode,
    UserEnabledConfigDefinition,
    WeightDecayMode,
    as_member,
)

_ENUM_OF_ARGUMENT = {
    "cache_algorithm": CacheAlgorithm,
    "cache_precision": SparseType,
    "weights_precision": SparseType,
    "output_dtype": SparseType,
    "optimizer": EmbOptimType,
    "weight_decay_mode": WeightDecayMode,
    "pooling_mode": PoolingMode,
    "bounds_check_mode": BoundsCheckMode,
}
# Arguments that must be left out, and why.
_UNSUPPORTED = {
    "tbe_input_multiplexer_config": "dumping inputs is a tool of FBGEMM's own; record the batches "
    "where they are made",
    "enable_raw_embedding_streaming": "there is no streaming server; write changed rows out with "
    "split_embedding_weights()",
    "is_qr_tbe": "there is no quotient-remainder subclass",
}
_PLACEMENT_OF_LOCATION = {
    EmbeddingLocation.DEVICE: Placement.DEVICE,
    EmbeddingLocation.HOST: Placement.HOST,
    EmbeddingLocation.MANAGED: Placement.MANAGED,
    EmbeddingLocation.MANAGED_CACHING: Placement.MANAGED_CACHING,
}
_DTYPE_OF_FORMAT = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}
# States that have one number per weight, by FBGEMM's names; all others have one per row.
_WHOLE_ROW_STATES = {
    EmbOptimType.EXACT_ADAGRAD: ("momentum1",),
    EmbOptimType.ADAM: ("momentum1", "momentum2"),
    EmbOptimType.LAMB: ("momentum1", "momentum2"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("momentum1",),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: ("momentum1",),
    EmbOptimType.LARS_SGD: ("momentum1",),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: ("momentum2",),
}


class EmbeddingSpec(NamedTuple):
    """An entry of `embedding_specs`, with emblib's enum members."""

    rows: int
    dim: int
    location: EmbeddingLocation
    compute_device: ComputeDevice


def normalise(arguments: Mapping[str, Any]) -> SimpleNamespace:
    """Check the arguments of the module, and return them for the functions of this file.

    The namespace has every argument by its name, with emblib's enum members and defaults filled in;
    `embedding_specs` are `EmbeddingSpec`. `compute_device` is that of all tables, and `device` a
    torch.device.

    Raises:
        NotImplementedError: emblib does not have an argument or the device.
        RuntimeError: torch sees no GPU, and the tables are for one.
        TypeError: rows, a dim or the table of a feature is not an integer.
        ValueError: there is no table, an enum member is unknown, or arguments contradict each
            other.
    """
    args = SimpleNamespace(**arguments)
    for name, reason in _UNSUPPORTED.items():
        if getattr(args, name) not in (None, False):
            raise NotImplementedError(f"{name} is not supported: {reason}; leave it out")
    for name, kind in _ENUM_OF_ARGUMENT.items():
        if getattr(args, name) is not None:
            setattr(args, name, as_member(kind, getattr(args, name)))
    if not args.embedding_specs:
        raise ValueError("embedding_specs must have at least one table")
    args.embedding_specs = [
        EmbeddingSpec(
            operator.index(rows),
            operator.index(dim),
            as_member(EmbeddingLocation, location),
            as_member(ComputeDevice, device),
        )
        for rows, dim, location, device in args.embedding_specs
    ]
    tables = len(args.embedding_specs)
    if args.feature_table_map is None:
        args.feature_table_map = list(range(tables))
    args.feature_table_map = [operator.index(t) for t in args.feature_table_map]
    if args.table_names is not None and len(args.table_names) != tables:
        raise ValueError(f"table_names must have {tables} names, got {len(args.table_names)}")
    if args.extra_optimizer_config is None:
        args.extra_optimizer_config = UserEnabledConfigDefinition()
    for name in ("embedding_table_index_type", "embedding_table_offset_type"):
        if getattr(args, name) not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be torch.int32 or torch.int64, got {getattr(args, name)}"
            )
    args.compute_device = _compute_device(args)
    args.device = _device(args)
    return args


def _compute_device(args: SimpleNamespace) -> ComputeDevice:
    """Return the device of all tables; raise for MTIA, different ones, and HOST tables on a GPU."""
    devices = {spec.compute_device for spec in args.embedding_specs}
    if len(devices) > 1:
        raise ValueError(f"all tables must have the same ComputeDevice, got {sorted(devices)}")
    device = devices.pop()
    locations = {spec.location for spec in args.embedding_specs}
    if device is ComputeDevice.MTIA or EmbeddingLocation.MTIA in locations:
        raise NotImplementedError(
            "MTIA is an accelerator emblib has no kernels for; use ComputeDevice.CPU or CUDA"
        )
    if device is ComputeDevice.CUDA and EmbeddingLocation.HOST in locations:
        raise ValueError(
            "EmbeddingLocation.HOST is for ComputeDevice.CPU; a GPU reads host memory with "
            "MANAGED or MANAGED_CACHING"
        )
    return device


def _device(args: SimpleNamespace) -> torch.device:
    """Return the requested device, or else the device of the compute device."""
    kind = "cpu" if args.compute_device is ComputeDevice.CPU else "cuda"
    if args.device is None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "ComputeDevice.CUDA needs a GPU, and torch sees none; use ComputeDevice.CPU with "
                "EmbeddingLocation.HOST"
            )
        return torch.device(kind)
    device = (
        torch.device("cuda", args.device)
        if isinstance(args.device, int)
        else torch.device(args.device)
    )
    if device.type not in (kind, "meta"):
        raise ValueError(f"device {device} does not go with {args.compute_device!r}")
    return device


def tables(args: SimpleNamespace) -> list[TableSpec]:
    """Return the specification of each table: rows, dim, name and placement."""
    tables_and_names = zip(args.embedding_specs, locations(args), _names(args), strict=True)
    return [
        TableSpec(
            rows,
            dim,
            name,
            Placement.DEVICE if args.enforce_hbm else _PLACEMENT_OF_LOCATION[location],
        )
        for (rows, dim, _, _), location, name in tables_and_names
    ]


def locations(args: SimpleNamespace) -> list[EmbeddingLocation]:
    """Return where the rows of each table are: on a GPU, two options override the location."""
    requested = [spec.location for spec in args.embedding_specs]
    if args.compute_device is not ComputeDevice.CUDA:
        return requested
    if args.enforce_hbm:
        return [EmbeddingLocation.DEVICE] * len(requested)
    if args.uvm_non_rowwise_momentum and args.optimizer in _WHOLE_ROW_STATES:
        # FBGEMM then has states in host memory; here a table's states are where its rows are.
        managed = EmbeddingLocation.MANAGED
        return [managed if x is EmbeddingLocation.DEVICE else x for x in requested]
    return requested


def _names(args: SimpleNamespace) -> list[str]:
    """Return the names of the tables for emblib: without dots, each distinct, or empty."""
    wanted_names = [
        name.replace(".", "_") for name in args.table_names or [""] * len(args.embedding_specs)
    ]
    names: list[str] = []
    for t, name in enumerate(wanted_names):
        suffix = t
        while name and (name in names or (suffix > t and name in wanted_names)):
            name, suffix = f"{wanted_names[t]}_{suffix}", suffix + 1
        names.append(name)
    return names


def pooling(args: SimpleNamespace) -> Pooling:
    """Return SUM, MEAN or NONE."""
    return Pooling(args.pooling_mode.name.lower())


def bounds_check(args: SimpleNamespace) -> BoundsCheck:
    """Return the mode without the version of FBGEMM's kernel."""
    return BoundsCheck(args.bounds_check_mode.name.removeprefix("V2_").lower())


def float_dtype(name: str, kind: SparseType) -> torch.dtype:
    """Return the dtype of a number format that tables, outputs and states can have.

    Raises:
        NotImplementedError: any other format; `name` is the argument's name, for the message.
    """
    if kind not in _DTYPE_OF_FORMAT:
        raise NotImplementedError(
            f"{name} must be SparseType.FP32, FP16 or BF16, got {kind.name}: there are no kernels "
            "that train it"
        )
    return _DTYPE_OF_FORMAT[kind]


def precision(args: SimpleNamespace) -> Precision:
    """Return the dtypes of weights, output and states, and the rounding of 16-bit values."""
    weights = float_dtype("weights_precision", args.weights_precision)
    states = _state_dtype(args)
    is_narrow = weights != torch.float32 or states != torch.float32
    rounding = StochasticRounding(torch.initial_seed() % 2**53)
    return Precision(
        weights=weights,
        output=float_dtype("output_dtype", args.output_dtype),
        states=states,
        stochastic_rounding=rounding if is_narrow and args.stochastic_rounding else None,
    )


def _state_dtype(args: SimpleNamespace) -> torch.dtype:
    """Return the dtype of states of row length; states of one number per row are float32."""
    requested = args.optimizer_state_dtypes or {}
    unknown = set(requested) - {"momentum1", "momentum2"}
    if unknown:
        raise ValueError(f"optimizer_state_dtypes has momentum1, momentum2, got {sorted(unknown)}")
    dtypes = {key: float_dtype(key, as_member(SparseType, kind)) for key, kind in requested.items()}
    row_states = _WHOLE_ROW_STATES.get(args.optimizer, ())
    for key in dtypes.keys() - set(row_states):
        if dtypes[key] != torch.float32:
            warnings.warn(
                f"emblib: {key} of {args.optimizer.name} is no state as long as a row; optimizer_"
                f"state_dtypes[{key!r}] is without effect",
                stacklevel=5,
            )
    state_dtypes = {dtypes.get(key, torch.float32) for key in row_states}
    if len(state_dtypes) > 1:
        raise NotImplementedError(
            f"momentum1 and momentum2 of {args.optimizer.name} must have one dtype, got "
            f"{args.optimizer_state_dtypes}"
        )
    return state_dtypes.pop() if state_dtypes else torch.float32


def cache(args: SimpleNamespace) -> CacheConfig | None:
    """Return the cache, or None if no table has one."""
    if not any(spec.placement.cached for spec in tables(args)):
        return None
    passes = args.multipass_prefetch_config
    dtype = args.cache_precision
    return CacheConfig(
        policy=CachePolicy(args.cache_algorithm.name.lower()),
        load_factor=args.cache_load_factor,
        sets=args.cache_sets,
        reserved_bytes=int(args.cache_reserved_memory),
        dtype=None if dtype is None else float_dtype("cache_precision", dtype),
        passes=None
        if passes is None
        else MultiPassPrefetch(passes.num_passes, passes.min_splitable_pass_size),
    )


_DEFAULT_HYPERPARAMETERS = {
    "eps": 1.0e-8,
    "momentum": 0.9,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "max_norm": 0.0,
    "learning_rate": 0.01,
    "ar_alpha": 0.0,
    "ema_beta": 0.99,
    "min_shrinkage": 0.1,
}
_ADAM_HYPERPARAMETERS = ("learning_rate", "eps", "beta1", "beta2", "weight_decay")
_ADAGRAD_HYPERPARAMETERS = ("learning_rate", "eps")
# The hyperparameters that each supported optimizer has.
_HYPERPARAMETERS_OF_OPTIMIZER = {
    EmbOptimType.EXACT_SGD: ("learning_rate",),
    EmbOptimType.EXACT_ADAGRAD: _ADAGRAD_HYPERPARAMETERS,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (*_ADAGRAD_HYPERPARAMETERS, "weight_decay", "max_norm"),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ADAGRAD_HYPERPARAMETERS,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _ADAGRAD_HYPERPARAMETERS,
    EmbOptimType.ADAM: _ADAM_HYPERPARAMETERS,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _ADAM_HYPERPARAMETERS,
    EmbOptimType.LAMB: _ADAM_HYPERPARAMETERS,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _ADAM_HYPERPARAMETERS,
    EmbOptimType.LARS_SGD: ("learning_rate", "momentum", "eta", "weight_decay"),
    EmbOptimType.NONE: (),
}
SUPPORTED = tuple(_HYPERPARAMETERS_OF_OPTIMIZER)
# Hyperparameters that raise if the optimizer lacks them, because ignoring them would change the
# result of training. Others only warn.
_RESULT_CHANGING_HYPERPARAMETERS = ("weight_decay", "max_norm")
_OPTIONS_OF = {
    "counter_based_regularization": "weight_decay_mode=WeightDecayMode.COUNTER",
    "cowclip_regularization": "weight_decay_mode=WeightDecayMode.COWCLIP",
    "global_weight_decay": "weight_decay_mode=WeightDecayMode.DECOUPLE_GLOBAL",
    "ensemble_mode": "optimizer=OptimType.ENSEMBLE_ROWWISE_ADAGRAD",
    "emainplace_mode": "optimizer=OptimType.EMAINPLACE_ROWWISE_ADAGRAD",
}


def optimizer(args: SimpleNamespace) -> optim.Optimizer:
    """Return the optimizer that the arguments of the module describe.

    Raises:
        NotImplementedError: emblib does not have the optimizer or an option.
        ValueError: the optimizer would not use the mode or rate of weight decay, or an option.
    """
    if args.optimizer not in _HYPERPARAMETERS_OF_OPTIMIZER:
        raise NotImplementedError(
            f"optimizer {args.optimizer.name} is not supported; those that are: "
            f"{', '.join(kind.name for kind in _HYPERPARAMETERS_OF_OPTIMIZER)}"
        )
    _check_unused_hyperparameters(args)
    _check_options(args)
    common: dict[str, Any] = {}
    if args.gradient_clipping:
        common["max_gradient"] = args.max_gradient
    if args.optimizer is EmbOptimType.NONE:
        return optim.External(gradient=optim.Gradient.SPARSE, **common)
    return _MAKERS[args.optimizer](args, {"lr": args.learning_rate, **common})


def _check_unused_hyperparameters(args: SimpleNamespace) -> None:
    """Raise or warn for hyperparameters that are not the default and that the optimizer lacks."""
    for name in _DEFAULT_HYPERPARAMETERS.keys() - set(
        _HYPERPARAMETERS_OF_OPTIMIZER[args.optimizer]
    ):
        if getattr(args, name) == _DEFAULT_HYPERPARAMETERS[name]:
            continue
        problem = f"{name}={getattr(args, name)} has no part in {args.optimizer.name}"
        if name in _RESULT_CHANGING_HYPERPARAMETERS:
            raise ValueError(f"{problem}: leave it out, or choose an optimizer that has it")
        warnings.warn(f"emblib: {problem}", stacklevel=5)


def _check_options(args: SimpleNamespace) -> None:
    """Raise for option objects of another mode or optimizer, and for modes without theirs."""
    mode, kind = args.weight_decay_mode, args.optimizer
    modes = {WeightDecayMode.NONE}
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        modes = set(WeightDecayMode)
    elif "weight_decay" in _HYPERPARAMETERS_OF_OPTIMIZER[kind]:
        modes.add(WeightDecayMode.DECOUPLE)
    if mode not in modes:
        raise ValueError(
            f"weight_decay_mode of {kind.name} must be one of {[m.name for m in sorted(modes)]}, "
            f"got {mode.name}"
        )
    is_rowwise = kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    if is_rowwise and mode is WeightDecayMode.NONE and args.weight_decay != 0.0:
        raise ValueError(
            f"weight_decay={args.weight_decay} has no part in {kind.name} with "
            "weight_decay_mode=WeightDecayMode.NONE: leave it out, or choose a mode that has it, "
            "e.g. WeightDecayMode.L2 or WeightDecayMode.DECOUPLE"
        )
    is_needed = {
        "counter_based_regularization": mode is WeightDecayMode.COUNTER,
        "cowclip_regularization": mode is WeightDecayMode.COWCLIP,
        "global_weight_decay": mode is WeightDecayMode.DECOUPLE_GLOBAL,
        "ensemble_mode": None if kind is EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD else False,
        "emainplace_mode": None if kind is EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD else False,
    }
    for name, needed in is_needed.items():
        is_passed = getattr(args, name) is not None
        if needed is not None and is_passed is not needed:
            raise ValueError(f"{name} goes with {_OPTIONS_OF[name]}, got one without the other")
    extra = args.extra_optimizer_config
    if extra.use_rowwise_bias_correction:
        raise NotImplementedError(
            "use_rowwise_bias_correction is not supported: bias corrections follow the step of the "
            "module"
        )
    has_writeback = extra.writeback_first_feature_only or extra.precompute_writeback
    if has_writeback and not extra.use_writeback_bwd_prehook:
        raise ValueError(
            "writeback_first_feature_only and precompute_writeback are options of "
            "use_writeback_bwd_prehook"
        )
    if extra.use_writeback_bwd_prehook and kind is not EmbOptimType.EXACT_SGD:
        raise ValueError(f"use_writeback_bwd_prehook is of EXACT_SGD, got {kind.name}")


def _decay(kind: Callable[[float], Any], args: SimpleNamespace) -> Any:
    return kind(args.weight_decay) if args.weight_decay else None


def _rowwise_adagrad(args: SimpleNamespace, options: dict[str, Any]) -> optim.Optimizer:
    """Return row-wise Adagrad with the weight decay of any mode."""
    options |= {"eps": args.eps, "max_norm": args.max_norm}
    mode = args.weight_decay_mode
    if mode is WeightDecayMode.L2:
        options["weight_decay"] = _decay(optim.L2, args)
    elif mode is WeightDecayMode.DECOUPLE:
        options["weight_decay"] = _decay(optim.Decoupled, args)
    elif mode is WeightDecayMode.DECOUPLE_GLOBAL:
        global_decay = args.global_weight_decay
        options["global_decay"] = optim.GlobalDecay(
            args.weight_decay, global_decay.start_iter, global_decay.lower_bound
        )
    elif mode is WeightDecayMode.COUNTER:
        options["counter"] = _counter(args.counter_based_regularization)
        options["weight_decay"] = _counter_decay(args, args.counter_based_regularization)
    elif mode is WeightDecayMode.COWCLIP:
        clip = args.cowclip_regularization
        options["counter"] = optim.CowClip(
            clip.counter_halflife, clip.weight_norm_coefficient, clip.lower_bound
        )
        options["weight_decay"] = _counter_decay(args, clip)
    return optim.RowwiseAdagrad(**options)


def _counter(definition: CounterBasedRegularizationDefinition) -> optim.Counter:
    if int(definition.grad_sum_decay) != -1:
        raise NotImplementedError(
            "grad_sum_decay must be GradSumDecay.NO_DECAY: FBGEMM's kernels have no rule for "
            f"another, got {definition.grad_sum_decay!r}"
        )
    tail_threshold = definition.tail_id_threshold
    return optim.Counter(
        halflife=definition.counter_halflife,
        start=definition.adjustment_iter,
        bound=definition.adjustment_ub,
        tail={
            LearningRateMode.EQUAL: optim.TailRate.EQUAL,
            LearningRateMode.TAIL_ID_LR_INCREASE: optim.TailRate.RAISED,
            LearningRateMode.TAIL_ID_LR_DECREASE: optim.TailRate.LOWERED,
            LearningRateMode.COUNTER_SGD: optim.TailRate.BY_COUNT,
        }[as_member(LearningRateMode, definition.learning_rate_mode)],
        threshold=optim.RelativeThreshold(tail_threshold.val)
        if tail_threshold.is_ratio
        else tail_threshold.val,
        update_every=definition.max_counter_update_freq,
    )


def _counter_decay(
    args: SimpleNamespace, definition: CounterBasedRegularizationDefinition | CowClipDefinition
) -> Any:
    """Convert the weight decay of counter-based regularisation; warn where none applies."""
    mode = as_member(CounterWeightDecayMode, definition.counter_weight_decay_mode)
    if mode is CounterWeightDecayMode.NONE:
        if args.weight_decay:
            warnings.warn(
                f"emblib: weight_decay={args.weight_decay} has no part in "
                "counter_weight_decay_mode=CounterWeightDecayMode.NONE",
                stacklevel=6,
            )
        return None
    kinds: dict[CounterWeightDecayMode, Callable[[float], Any]] = {
        CounterWeightDecayMode.L2: optim.L2,
        CounterWeightDecayMode.DECOUPLE: optim.Decoupled,
        CounterWeightDecayMode.ADAGRADW: optim.AdagradW,
    }
    return kinds[mode](args.weight_decay)


def _adam(kind: type[Any]) -> Callable[[SimpleNamespace, dict[str, Any]], optim.Optimizer]:
    def make(args: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
        decay = _decay(optim.Decoupled, args)
        return kind(**common, betas=(args.beta1, args.beta2), eps=args.eps, weight_decay=decay)

    return make


def _lars(args: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    decay = _decay(optim.L2, args)
    return optim.LARS(**common, momentum=args.momentum, eta=args.eta, weight_decay=decay)


def _ensemble(args: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    mode = args.ensemble_mode or EnsembleModeDefinition()
    clears = as_member(StepMode, mode.step_mode) is StepMode.NONE
    return optim.EnsembleRowwiseAdagrad(
        **common,
        eps=args.eps,
        average_every=int(mode.step_ema),
        swap_every=int(mode.step_swap),
        start=int(mode.step_start),
        keep=mode.step_ema_coef,
        slow=optim.EmaReset.CLEAR if clears else optim.EmaReset.KEEP,
    )


_MAKERS: dict[EmbOptimType, Callable[[SimpleNamespace, dict[str, Any]], optim.Optimizer]] = {
    EmbOptimType.EXACT_SGD: lambda args, common: optim.SGD(**common),
    EmbOptimType.EXACT_ADAGRAD: lambda args, common: optim.Adagrad(**common, eps=args.eps),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: lambda args, common: optim.RowwiseAdagrad(
        **common, eps=args.eps
    ),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ensemble,
    EmbOptimType.ADAM: _adam(optim.Adam),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _adam(optim.PartialRowwiseAdam),
    EmbOptimType.LAMB: _adam(optim.LAMB),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _adam(optim.PartialRowwiseLAMB),
    EmbOptimType.LARS_SGD: _lars,
}

# Names of `update_hyper_parameters`, and of the arguments that they change.
_ARGUMENT_OF_UPDATE = {
    "lr": "learning_rate",
    "eps": "eps",
    "beta1": "beta1",
    "beta2": "beta2",
    "weight_decay": "weight_decay",
}


def with_current_hyperparameters(
    bags: TableBatchedEmbeddingBags, args: SimpleNamespace
) -> SimpleNamespace:
    """Return a copy of `args` with the hyperparameters of `bags`, which a checkpoint may have set.

    On the meta device `bags` has no values of them: those of `args` stay.
    """
    current = SimpleNamespace(**vars(args))
    if bags.hyperparams.is_meta:
        return current
    current.learning_rate, optimizer_of_bags = bags.learning_rate, bags.optimizer
    current.eps = getattr(optimizer_of_bags, "eps", args.eps)
    current.beta1, current.beta2 = getattr(optimizer_of_bags, "betas", (args.beta1, args.beta2))
    decay = getattr(optimizer_of_bags, "global_decay", None) or optimizer_of_bags.weight_decay
    if decay is not None:
        current.weight_decay = decay.rate
    return current


def update(
    bags: TableBatchedEmbeddingBags, args: SimpleNamespace, new: Mapping[str, float]
) -> None:
    """Change hyperparameters of the optimizer of `bags`, and store them in `args`.

    Args:
        bags: tables whose optimizer is changed.
        args: arguments of the module, changed; a hyperparameter that the optimizer lacks is stored
            here only, with a warning.
        new: new values by the names that FBGEMM's `update_hyper_parameters` has.

    Raises:
        NotImplementedError: another name; nothing is changed.
        ValueError: the optimizer refuses a value; nothing is changed.
    """
    new_args = with_current_hyperparameters(bags, args)
    for name, value in new.items():
        if name in _ARGUMENT_OF_UPDATE:
            setattr(new_args, _ARGUMENT_OF_UPDATE[name], value)
        elif name == "lower_bound":
            if new_args.global_weight_decay is not None:
                decay = replace(new_args.global_weight_decay, lower_bound=value)
                new_args.global_weight_decay = decay
        else:
            raise NotImplementedError(
                f"Setting hyper-parameter {name} is not supported; those that can be set: "
                f"{', '.join((*_ARGUMENT_OF_UPDATE, 'lower_bound'))}"
            )
    used_names = _HYPERPARAMETERS_OF_OPTIMIZER[args.optimizer]
    unused_names = [
        name
        for name in new
        if name != "lower_bound" and _ARGUMENT_OF_UPDATE[name] not in used_names
    ]
    if "lower_bound" in new and args.weight_decay_mode is not WeightDecayMode.DECOUPLE_GLOBAL:
        unused_names.append("lower_bound")
    if unused_names:
        warnings.warn(
            f"emblib: {', '.join(unused_names)} have no part in {args.optimizer.name}", stacklevel=3
        )
    used_args = SimpleNamespace(**vars(new_args))
    for name in _DEFAULT_HYPERPARAMETERS.keys() - set(used_names):
        setattr(used_args, name, _DEFAULT_HYPERPARAMETERS[name])
    new_optimizer = optimizer(used_args)
    bags.set_hyperparameters(
        **{field.name: getattr(new_optimizer, field.name) for field in fields(new_optimizer)}
    )
    vars(args).update(vars(new_args))


class InPlaceAverage:
    """Periodic move of the second half of every row towards its first half (EMAINPLACE).

    Raises:
        ValueError: `step_ema` is below 1.
    """

    def __init__(self, mode: EmainplaceModeDefinition) -> None:
        self.every = int(mode.step_ema)
        if self.every < 1:
            raise ValueError(f"emainplace_mode.step_ema must be >= 1, got {mode.step_ema}")
        self.start = int(mode.step_start)
        self.first_half_share = mode.step_ema_coef
        self.iterations = 0  # 0 before the first step, which continues from the module's count

    def step(self, bags: TableBatchedEmbeddingBags) -> None:
        """Count a training step and, in every `every`-th from `start` on, average the rows.

        Call it before the lookup. The count begins at `bags.step`, or at `iterations` if not 0.
        """
        self.iterations = (self.iterations or bags.step) + 1
        if self.iterations % self.every or self.iterations < self.start:
            return
        with torch.no_grad():
            for weights in bags.table_weights():
                half = weights.size(1) // 2
                weights[:, half:].lerp_(weights[:, :half], self.first_half_share)


def in_place_average(args: SimpleNamespace) -> InPlaceAverage | None:
    """Return the averaging of EMAINPLACE_ROWWISE_ADAGRAD; None for other optimizers.

    Raises:
        ValueError: a dim is odd, or `step_ema` is below 1.
    """
    if args.optimizer is not EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD:
        return None
    odd_dims = [spec.dim for spec in args.embedding_specs if spec.dim % 2]
    if odd_dims:
        raise ValueError(f"EMAINPLACE_ROWWISE_ADAGRAD needs even dims, got {odd_dims}")
    return InPlaceAverage(args.emainplace_mode or EmainplaceModeDefinition())
