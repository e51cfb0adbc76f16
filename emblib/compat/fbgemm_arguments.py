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
from emblib.compat.checks import check_flags, check_names
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
_FLAGS = (
    "enforce_hbm",
    "gather_uvm_cache_stats",
    "stochastic_rounding",
    "gradient_clipping",
    "uvm_non_rowwise_momentum",
    "uvm_host_mapped",
    "use_experimental_tbe",
    "prefetch_pipeline",
)
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
# Optimizer states of one number per weight, by FBGEMM's names; others have one number per row.
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
    """Check the arguments of FBGEMM's module, and return them as the `args` of this file.

    Args:
        arguments: all arguments of the constructor of the module, by name.

    Returns:
        a namespace with these arguments and `compute_device`, the `ComputeDevice` of all tables.
        Enum members are those of `fbgemm_types`, also where FBGEMM's own were passed;
        `embedding_specs` is a list of `EmbeddingSpec`, and `device` a torch.device. None is
        replaced by the default in `feature_table_map`, `extra_optimizer_config` and `device`.

    Raises:
        NotImplementedError: an argument or the device is not supported.
        RuntimeError: tables are for a GPU, `device` is None, and torch sees no GPU.
        TypeError: rows, a dim or the table of a feature is not an integer, a flag is text, or
            `table_names` are not a sequence.
        ValueError: there is no table, an enum member does not exist, or arguments contradict each
            other.
    """
    args = SimpleNamespace(**arguments)
    for name, reason in _UNSUPPORTED.items():
        if getattr(args, name) not in (None, False):
            raise NotImplementedError(f"{name} is not supported: {reason}; leave it out")
    check_flags(**{name: getattr(args, name) for name in _FLAGS})
    if args.record_cache_metrics is not None:
        check_flags(
            record_cache_miss_counter=args.record_cache_metrics.record_cache_miss_counter,
            record_tablewise_cache_miss=args.record_cache_metrics.record_tablewise_cache_miss,
        )
    for name, enum_class in _ENUM_OF_ARGUMENT.items():
        if getattr(args, name) is not None:
            setattr(args, name, as_member(enum_class, getattr(args, name)))
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
    num_tables = len(args.embedding_specs)
    if args.feature_table_map is None:
        args.feature_table_map = list(range(num_tables))
    args.feature_table_map = [operator.index(t) for t in args.feature_table_map]
    if args.table_names is not None:
        args.table_names = check_names("table_names", args.table_names)
        if len(args.table_names) != num_tables:
            raise ValueError(
                f"table_names must have {num_tables} names, got {len(args.table_names)}"
            )
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
    """Return the compute device of all tables.

    Raises:
        NotImplementedError: a table is for MTIA.
        ValueError: tables are for different devices, or a table for a GPU is in HOST memory.
    """
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
    """Return `args.device` as a torch.device; by default the CPU or the current GPU."""
    device_type = "cpu" if args.compute_device is ComputeDevice.CPU else "cuda"
    if args.device is None:
        if device_type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "ComputeDevice.CUDA needs a GPU, and torch sees none; use ComputeDevice.CPU with "
                "EmbeddingLocation.HOST"
            )
        return torch.device(device_type)
    device = (
        torch.device("cuda", args.device)
        if isinstance(args.device, int)
        else torch.device(args.device)
    )
    if device.type not in (device_type, "meta"):
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
    """Return the location of the rows of each table, which options may override on a GPU."""
    spec_locations = [spec.location for spec in args.embedding_specs]
    if args.compute_device is not ComputeDevice.CUDA:
        return spec_locations
    if args.enforce_hbm:
        return [EmbeddingLocation.DEVICE] * len(spec_locations)
    if args.uvm_non_rowwise_momentum and args.optimizer in _WHOLE_ROW_STATES:
        # FBGEMM then has states in host memory. emblib's states are where the rows are: move both.
        managed = EmbeddingLocation.MANAGED
        return [managed if each is EmbeddingLocation.DEVICE else each for each in spec_locations]
    return spec_locations


def _names(args: SimpleNamespace) -> list[str]:
    """Return a name per table: `table_names` without dots, made distinct, or "" without names."""
    requested_names = [
        name.replace(".", "_") for name in args.table_names or [""] * len(args.embedding_specs)
    ]
    names: list[str] = []
    for t, name in enumerate(requested_names):
        suffix = t
        while name and (name in names or (suffix > t and name in requested_names)):
            name, suffix = f"{requested_names[t]}_{suffix}", suffix + 1
        names.append(name)
    return names


def pooling(args: SimpleNamespace) -> Pooling:
    """Return emblib's pooling."""
    return Pooling(args.pooling_mode.name.lower())


def bounds_check(args: SimpleNamespace) -> BoundsCheck:
    """Return emblib's mode of bounds checks; V2_FATAL is FATAL, and so on."""
    return BoundsCheck(args.bounds_check_mode.name.removeprefix("V2_").lower())


def float_dtype(name: str, number_format: SparseType) -> torch.dtype:
    """Return the dtype of FP32, FP16 or BF16.

    Raises:
        NotImplementedError: it is another format; the message names the argument `name`.
    """
    if number_format not in _DTYPE_OF_FORMAT:
        raise NotImplementedError(
            f"{name} must be SparseType.FP32, FP16 or BF16, got {number_format.name}: there are no "
            "kernels that train it"
        )
    return _DTYPE_OF_FORMAT[number_format]


def precision(args: SimpleNamespace) -> Precision:
    """Return the dtypes of weights, output and states, and how 16-bit values are rounded.

    The seed of stochastic rounding is that of torch's generator at this time.
    """
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
    """Return the dtype of states of one number per weight; other states are float32.

    Raises:
        NotImplementedError: a dtype is not FP32, FP16 or BF16, or the two dtypes differ.
        ValueError: `optimizer_state_dtypes` has another key than momentum1 and momentum2.
    """
    formats = args.optimizer_state_dtypes or {}
    unknown = set(formats) - {"momentum1", "momentum2"}
    if unknown:
        raise ValueError(f"optimizer_state_dtypes has momentum1, momentum2, got {sorted(unknown)}")
    dtypes = {key: float_dtype(key, as_member(SparseType, code)) for key, code in formats.items()}
    row_states = _WHOLE_ROW_STATES.get(args.optimizer, ())
    for key in dtypes.keys() - set(row_states):
        if dtypes[key] != torch.float32:
            warnings.warn(
                f"emblib: {args.optimizer.name} has no state {key} of one number per weight; "
                f"optimizer_state_dtypes[{key!r}] is without effect",
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
    """Return the configuration of the cache, or None if no table is cached."""
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
SUPPORTED_OPTIMIZERS = tuple(_HYPERPARAMETERS_OF_OPTIMIZER)
# Hyperparameters that raise if the optimizer lacks them, because ignoring them would change the
# result of training. Others only warn.
_RESULT_CHANGING_HYPERPARAMETERS = ("weight_decay", "max_norm")
_OWNER_OF_OPTIONS = {
    "counter_based_regularization": "weight_decay_mode=WeightDecayMode.COUNTER",
    "cowclip_regularization": "weight_decay_mode=WeightDecayMode.COWCLIP",
    "global_weight_decay": "weight_decay_mode=WeightDecayMode.DECOUPLE_GLOBAL",
    "ensemble_mode": "optimizer=OptimType.ENSEMBLE_ROWWISE_ADAGRAD",
    "emainplace_mode": "optimizer=OptimType.EMAINPLACE_ROWWISE_ADAGRAD",
}


_OptimizerMaker = Callable[[SimpleNamespace, dict[str, Any]], optim.Optimizer]
"""Function of the module's arguments and of the options that all optimizers have."""


def optimizer(args: SimpleNamespace) -> optim.Optimizer:
    """Return the optimizer that the arguments of the module describe.

    A hyperparameter that differs from its default and that the optimizer does not have warns, or
    raises if it would change the result of training.

    Raises:
        NotImplementedError: the optimizer or an option is not supported.
        ValueError: the optimizer would ignore `weight_decay`, its mode, `max_norm`, or an option.
    """
    if args.optimizer not in _HYPERPARAMETERS_OF_OPTIMIZER:
        raise NotImplementedError(
            f"optimizer {args.optimizer.name} is not supported; those that are: "
            f"{', '.join(kind.name for kind in _HYPERPARAMETERS_OF_OPTIMIZER)}"
        )
    _check_unused_hyperparameters(args)
    _check_weight_decay(args)
    _check_option_objects(args)
    _check_extra_config(args)
    common: dict[str, Any] = {}
    if args.gradient_clipping:
        common["max_gradient"] = args.max_gradient
    if args.optimizer is EmbOptimType.NONE:
        return optim.External(gradient=optim.Gradient.SPARSE, **common)
    return _OPTIMIZER_MAKERS[args.optimizer](args, {"lr": args.learning_rate, **common})


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


def _check_weight_decay(args: SimpleNamespace) -> None:
    """Raise ValueError if the optimizer would ignore the mode or the rate of weight decay."""
    mode, kind = args.weight_decay_mode, args.optimizer
    modes = {WeightDecayMode.NONE}
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        modes = set(WeightDecayMode)
    elif "weight_decay" in _HYPERPARAMETERS_OF_OPTIMIZER[kind]:
        modes.add(WeightDecayMode.DECOUPLE)
    if mode not in modes:
        raise ValueError(
            f"weight_decay_mode of {kind.name} must be one of "
            f"{[each.name for each in sorted(modes)]}, got {mode.name}"
        )
    is_rowwise = kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    if is_rowwise and mode is WeightDecayMode.NONE and args.weight_decay != 0.0:
        raise ValueError(
            f"weight_decay={args.weight_decay} has no part in {kind.name} with "
            "weight_decay_mode=WeightDecayMode.NONE: leave it out, or choose a mode that has it, "
            "e.g. WeightDecayMode.L2 or WeightDecayMode.DECOUPLE"
        )


def _check_option_objects(args: SimpleNamespace) -> None:
    """Raise ValueError for options of another mode or optimizer, and modes without their options.

    The options of an optimizer may be left out: they have defaults.
    """
    mode, kind = args.weight_decay_mode, args.optimizer
    # True: the options must be passed. False: they must not. None: both are allowed.
    requirements = {
        "counter_based_regularization": mode is WeightDecayMode.COUNTER,
        "cowclip_regularization": mode is WeightDecayMode.COWCLIP,
        "global_weight_decay": mode is WeightDecayMode.DECOUPLE_GLOBAL,
        "ensemble_mode": None if kind is EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD else False,
        "emainplace_mode": None if kind is EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD else False,
    }
    for name, must_be_passed in requirements.items():
        is_passed = getattr(args, name) is not None
        if must_be_passed is not None and is_passed is not must_be_passed:
            raise ValueError(
                f"{name} goes with {_OWNER_OF_OPTIONS[name]}, got one without the other"
            )


def _check_extra_config(args: SimpleNamespace) -> None:
    """Raise unless the optimizer has the options of `extra_optimizer_config`."""
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
    if extra.use_writeback_bwd_prehook and args.optimizer is not EmbOptimType.EXACT_SGD:
        raise ValueError(
            f"use_writeback_bwd_prehook is an option of EXACT_SGD, got {args.optimizer.name}"
        )


def _weight_decay(decay_type: Callable[[float], Any], args: SimpleNamespace) -> Any:
    """Return `decay_type(rate)`, or None if the rate is 0."""
    return decay_type(args.weight_decay) if args.weight_decay else None


def _rowwise_adagrad(args: SimpleNamespace, options: dict[str, Any]) -> optim.Optimizer:
    """Return row-wise Adagrad with the weight decay of any mode."""
    options |= {"eps": args.eps, "max_norm": args.max_norm}
    mode = args.weight_decay_mode
    if mode is WeightDecayMode.L2:
        options["weight_decay"] = _weight_decay(optim.L2, args)
    elif mode is WeightDecayMode.DECOUPLE:
        options["weight_decay"] = _weight_decay(optim.Decoupled, args)
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
    """Return the weight decay of counter-based regularisation; mode NONE has none, and warns."""
    mode = as_member(CounterWeightDecayMode, definition.counter_weight_decay_mode)
    if mode is CounterWeightDecayMode.ADAGRADW and isinstance(definition, CowClipDefinition):
        raise ValueError(
            "counter_weight_decay_mode ADAGRADW goes with weight_decay_mode=WeightDecayMode.COUNTER"
            ", not with COWCLIP, whose counts it cannot use: choose L2 or DECOUPLE"
        )
    if mode is CounterWeightDecayMode.NONE:
        if args.weight_decay:
            warnings.warn(
                f"emblib: weight_decay={args.weight_decay} has no part in "
                "counter_weight_decay_mode=CounterWeightDecayMode.NONE",
                stacklevel=6,
            )
        return None
    decay_types: dict[CounterWeightDecayMode, Callable[[float], Any]] = {
        CounterWeightDecayMode.L2: optim.L2,
        CounterWeightDecayMode.DECOUPLE: optim.Decoupled,
        CounterWeightDecayMode.ADAGRADW: optim.AdagradW,
    }
    return decay_types[mode](args.weight_decay)


def _adam_maker(optimizer_type: type[Any]) -> _OptimizerMaker:
    """Return a function that makes Adam or one of its variants."""

    def make(args: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
        decay = _weight_decay(optim.Decoupled, args)
        betas = args.beta1, args.beta2
        return optimizer_type(**common, betas=betas, eps=args.eps, weight_decay=decay)

    return make


def _lars(args: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    decay = _weight_decay(optim.L2, args)
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


_OPTIMIZER_MAKERS: dict[EmbOptimType, _OptimizerMaker] = {
    EmbOptimType.EXACT_SGD: lambda args, common: optim.SGD(**common),
    EmbOptimType.EXACT_ADAGRAD: lambda args, common: optim.Adagrad(**common, eps=args.eps),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: lambda args, common: optim.RowwiseAdagrad(
        **common, eps=args.eps
    ),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ensemble,
    EmbOptimType.ADAM: _adam_maker(optim.Adam),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _adam_maker(optim.PartialRowwiseAdam),
    EmbOptimType.LAMB: _adam_maker(optim.LAMB),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _adam_maker(optim.PartialRowwiseLAMB),
    EmbOptimType.LARS_SGD: _lars,
}

# Argument that each name of `update_hyper_parameters` changes.
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
    """Return a copy of `args` with the hyperparameters of `bags`.

    Loading a checkpoint changes the hyperparameters of `bags` only. On the meta device `bags` has
    no values of them, and the copy has those of `args`.
    """
    current_args = SimpleNamespace(**vars(args))
    if bags.hyperparams.is_meta:
        return current_args
    rule: Any = bags.optimizer
    current_args.learning_rate = bags.learning_rate
    current_args.eps = getattr(rule, "eps", args.eps)
    current_args.beta1, current_args.beta2 = getattr(rule, "betas", (args.beta1, args.beta2))
    decay = getattr(rule, "global_decay", None) or rule.weight_decay
    if decay is not None:
        current_args.weight_decay = decay.rate
    return current_args


def update_hyperparameters(
    bags: TableBatchedEmbeddingBags, args: SimpleNamespace, new: Mapping[str, float]
) -> None:
    """Change hyperparameters of the optimizer of `bags`, and store them in `args`.

    Args:
        bags: tables whose optimizer is changed.
        args: arguments of the module, changed. A hyperparameter that the optimizer does not have
            is only stored here, and warns.
        new: new values by the names of FBGEMM's `update_hyper_parameters`: `lr`, `eps`, `beta1`,
            `beta2`, `weight_decay`, `lower_bound`.

    Raises:
        NotImplementedError: `new` has another name; nothing is changed.
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
    """The average of EMAINPLACE_ROWWISE_ADAGRAD, the second half of every row.

    In some steps the second half moves towards the first half, which is trained.

    Args:
        mode: `step_ema`: steps between averages, `step_start`: first step with one,
            `step_ema_coef`: weight of the first half in the new second half.

    Attributes:
        iterations: number of steps; 0 until the first one, which continues from `bags.step`.

    Raises:
        ValueError: `step_ema` is below 1.
    """

    def __init__(self, mode: EmainplaceModeDefinition) -> None:
        self.interval = int(mode.step_ema)
        if self.interval < 1:
            raise ValueError(f"emainplace_mode.step_ema must be >= 1, got {mode.step_ema}")
        self.first_step = int(mode.step_start)
        self.first_half_weight = mode.step_ema_coef
        self.iterations = 0

    def step(self, bags: TableBatchedEmbeddingBags) -> None:
        """Count a training step, and average the rows if it is time; call it before the lookup.

        Rows are averaged in steps that are multiples of `step_ema`, from `step_start` on.
        """
        self.iterations = (self.iterations or bags.step) + 1
        if self.iterations % self.interval or self.iterations < self.first_step:
            return
        with torch.no_grad():
            for weights in bags.table_weights():
                half = weights.size(1) // 2
                weights[:, half:].lerp_(weights[:, :half], self.first_half_weight)


def in_place_average(args: SimpleNamespace) -> InPlaceAverage | None:
    """Return the average of EMAINPLACE_ROWWISE_ADAGRAD; None for other optimizers.

    Raises:
        ValueError: a dim is odd, or `step_ema` is below 1.
    """
    if args.optimizer is not EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD:
        return None
    odd_dims = [spec.dim for spec in args.embedding_specs if spec.dim % 2]
    if odd_dims:
        raise ValueError(f"EMAINPLACE_ROWWISE_ADAGRAD needs even dims, got {odd_dims}")
    return InPlaceAverage(args.emainplace_mode or EmainplaceModeDefinition())
