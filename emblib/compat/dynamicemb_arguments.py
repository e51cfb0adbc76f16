"""Convert DynamicEmb's options to emblib's specs; unsupported options raise.

`spec` converts the options of a table. `precision`, `device` and `optimizer` convert the arguments
that all tables of a module share.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from emblib import (
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    OnInsertFailure,
    Pooling,
    Precision,
    RowStore,
    StochasticRounding,
    optim,
)
from emblib.compat import dynamicemb_types
from emblib.compat.dynamicemb_types import (
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from emblib.compat.fbgemm_types import EmbOptimType, WeightDecayMode
from emblib.init import Constant, KeyModulo, Normal, TruncatedNormal, Uniform

# emblib's and DynamicEmb's eviction order for each score strategy.
_EVICTIONS = {
    DynamicEmbScoreStrategy.TIMESTAMP: (Eviction.LRU, DynamicEmbEvictStrategy.LRU),
    DynamicEmbScoreStrategy.STEP: (Eviction.STEP, DynamicEmbEvictStrategy.CUSTOMIZED),
    DynamicEmbScoreStrategy.CUSTOMIZED: (Eviction.CUSTOM, DynamicEmbEvictStrategy.CUSTOMIZED),
    DynamicEmbScoreStrategy.LFU: (Eviction.LFU, DynamicEmbEvictStrategy.LFU),
    DynamicEmbScoreStrategy.NO_EVICTION: (Eviction.NONE, DynamicEmbEvictStrategy.CUSTOMIZED),
}
POOLINGS = {
    DynamicEmbPoolingMode.SUM: Pooling.SUM,
    DynamicEmbPoolingMode.MEAN: Pooling.MEAN,
    DynamicEmbPoolingMode.NONE: Pooling.NONE,
}
_INSERT_FAILURES = {
    DynamicEmbCheckMode.ERROR: OnInsertFailure.RAISE,
    DynamicEmbCheckMode.WARNING: OnInsertFailure.WARN,
    DynamicEmbCheckMode.IGNORE: OnInsertFailure.IGNORE,
}


def eviction(strategy: dynamicemb_types.ScoreStrategy) -> Eviction:
    """Return emblib's eviction order for a score strategy."""
    return Eviction.LRU_LFU if isinstance(strategy, tuple) else _EVICTIONS[strategy][0]


def evict_strategy(strategy: dynamicemb_types.ScoreStrategy) -> DynamicEmbEvictStrategy:
    """Return DynamicEmb's eviction order for a score strategy."""
    return DynamicEmbEvictStrategy.LFU if isinstance(strategy, tuple) else _EVICTIONS[strategy][1]


def spec(options: DynamicEmbTableOptions, name: str, initial_state: float) -> DynamicSpec:
    """Return the specification of one table.

    Args:
        options: options of the table, with `dim` and `max_capacity`.
        name: name of the table.
        initial_state: initial value of its optimizer states.

    Raises:
        NotImplementedError: an option is not supported.
        TypeError: `admit_strategy` is not an AdmissionStrategy.
        ValueError: options are missing, invalid or contradict each other.
    """
    _check_options(options, name)
    assert options.max_capacity is not None
    assert options.dim is not None
    capacity = options.max_capacity
    initial_capacity = capacity
    if options.init_capacity is not None:
        initial_capacity = min(options.init_capacity, capacity)
    row_initializer = initializer(options.initializer_args, capacity)
    return DynamicSpec(
        capacity,
        options.dim,
        name=name,
        initial_capacity=initial_capacity,
        max_load=options.max_load_factor,
        eviction=eviction(options.score_strategy),
        initializer=row_initializer,
        initial_state=initial_state,
        default_value=options.eval_initializer_args.value,
        admission=_admission(options, row_initializer, name),
        on_insert_failure=_insert_failure(options),
    )


def _check_options(options: DynamicEmbTableOptions, name: str) -> None:
    """Raise for options that are missing, invalid, not supported, or contradict each other.

    The errors are those of `spec`, which calls this first.
    """
    for field in ("dim", "max_capacity"):
        if getattr(options, field) is None:
            raise ValueError(f"table {name!r} needs {field}: without a planner, set it")
        if not isinstance(value := getattr(options, field), int) or value < 1:
            raise ValueError(f"{field} of table {name!r} must be an int >= 1, got {value!r}")
    for field in ("local_hbm_for_values", "global_hbm_for_values"):
        if not hasattr(value := getattr(options, field), "__index__") or value < 0:
            raise ValueError(f"{field} of table {name!r} must be an int >= 0, got {value!r}")
    if options.index_type not in (None, torch.int64, torch.uint64):
        raise ValueError(
            f"index_type must be torch.int64 or torch.uint64, got {options.index_type}"
        )
    store = options.external_storage
    if store is not None and (isinstance(store, type) or not isinstance(store, RowStore)):
        raise NotImplementedError(
            f"external_storage of table {name!r} must be an object of emblib's protocol RowStore, "
            f"such as emblib.DiskRows(directory), got {store!r}: classes of DynamicEmb's protocol "
            "Storage are not called"
        )
    strategy, implied_strategy = options.evict_strategy, evict_strategy(options.score_strategy)
    if strategy not in (DynamicEmbEvictStrategy.LRU, implied_strategy):
        raise ValueError(
            f"evict_strategy follows from score_strategy, which evicts by {implied_strategy.name}; "
            f"got {strategy.name}; leave it out"
        )
    bucket_capacity = options.bucket_capacity
    if bucket_capacity == dynamicemb_types.MAX_BUCKET_CAPACITY:
        raise NotImplementedError(
            "bucket_capacity MAX_BUCKET_CAPACITY evicts the key with the lowest score of the whole "
            "table; emblib evicts the lowest one in the 64 slots that a new key may have"
        )
    if bucket_capacity <= 0 or bucket_capacity % dynamicemb_types.BUCKET_ALIGNMENT:
        raise ValueError(
            f"bucket_capacity must be a multiple of {dynamicemb_types.BUCKET_ALIGNMENT}, "
            f"got {bucket_capacity}"
        )


def initializer(args: DynamicEmbInitializerArgs, capacity: int) -> Any:
    """Return emblib's initializer of new rows; bounds of None are +-1/sqrt(capacity)."""
    bound = 1.0 / math.sqrt(capacity)
    low = -bound if args.lower is None else args.lower
    high = bound if args.upper is None else args.upper
    match args.mode:
        case DynamicEmbInitializerMode.NORMAL:
            return Normal(args.mean, args.std_dev)
        case DynamicEmbInitializerMode.TRUNCATED_NORMAL:
            return TruncatedNormal(args.mean, args.std_dev, low, high)
        case DynamicEmbInitializerMode.UNIFORM:
            return Uniform(low, high)
        case DynamicEmbInitializerMode.CONSTANT:
            return Constant(args.value)
        case DynamicEmbInitializerMode.DEBUG:
            return KeyModulo()


def _admission(
    options: DynamicEmbTableOptions, row_initializer: Any, name: str
) -> FrequencyAdmission | None:
    """Return the admission of a table; None admits all keys, as a threshold of 0 does.

    Keys that are not admitted read the values of the strategy's `initializer_args`, or those of
    `row_initializer` if the strategy has none.
    """
    strategy, counter = options.admit_strategy, options.admission_counter
    if strategy is None and counter is None:
        return None
    if strategy is None or counter is None:
        raise ValueError(
            "admit_strategy and admission_counter need each other, table "
            f"{name!r} has only the {'strategy' if counter is None else 'counter'}"
        )
    if not isinstance(strategy, dynamicemb_types.AdmissionStrategy):
        raise TypeError(f"admit_strategy must be an AdmissionStrategy, got {strategy!r}")
    if not isinstance(counter, dynamicemb_types.KVCounter):
        raise NotImplementedError(
            f"admission_counter must be a KVCounter(capacity), got {type(counter).__name__}"
        )
    if counter.key_type not in (torch.int64, torch.uint64):
        raise ValueError(f"key_type must be torch.int64 or torch.uint64, got {counter.key_type}")
    unadmitted_values, args = row_initializer, getattr(strategy, "initializer_args", None)
    if args is not None:
        assert options.max_capacity is not None
        unadmitted_values = initializer(args, options.max_capacity)
    counts = ExactCounter(counter.capacity)
    by_frequency = dynamicemb_types.FrequencyAdmissionStrategy
    if not isinstance(strategy, by_frequency) or type(strategy).admit is not by_frequency.admit:
        return FrequencyAdmission(1, counts, unadmitted_values, rule=strategy.admit)
    if strategy.threshold == 0:
        return None
    return FrequencyAdmission(strategy.threshold, counts, unadmitted_values)


def _insert_failure(options: DynamicEmbTableOptions) -> OnInsertFailure:
    """Return the reaction to keys for which there is no slot, by `safe_check_mode`.

    A table without eviction warns at least, because in DynamicEmb it grows beyond max_capacity.
    """
    reaction = _INSERT_FAILURES[DynamicEmbCheckMode(options.safe_check_mode)]
    has_no_eviction = options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION
    return (
        OnInsertFailure.WARN if has_no_eviction and reaction is OnInsertFailure.IGNORE else reaction
    )


def precision(args: SimpleNamespace) -> Precision:
    """Return the dtypes of a module, and how 16-bit rows are rounded.

    `args` are the arguments of the module. Optimizer states are float32. The seed of stochastic
    rounding is that of torch's generator at this time.

    Raises:
        ValueError: tables have different `embedding_dtype`s.
    """
    dtypes = {options.embedding_dtype or torch.float32 for options in args.table_options}
    if len(dtypes) > 1:
        dtype_names = sorted(map(str, dtypes))
        raise ValueError(f"tables of a module need one embedding_dtype, got {dtype_names}")
    (weights,) = dtypes
    rounding = None
    if args.stochastic_rounding and weights is not torch.float32:
        rounding = StochasticRounding(torch.initial_seed() % 2**53)
    return Precision(weights=weights, output=args.output_dtype, stochastic_rounding=rounding)


def device(requested_device: Any, options: Sequence[DynamicEmbTableOptions]) -> torch.device:
    """Return the device of the tables: `requested_device`, if it is not None.

    Otherwise it is the GPU `device_id` of the first table, if there is a `device_id` and torch sees
    a GPU, and else torch's default device.
    """
    gpu_index = options[0].device_id
    if requested_device is None and gpu_index is not None and torch.cuda.is_available():
        requested_device = torch.device("cuda", gpu_index)
    return torch.empty(0, device=requested_device).device


_ADAGRAD_HYPERPARAMETERS = ("eps", "initial_accumulator_value")
_ADAM_HYPERPARAMETERS = ("eps", "beta1", "beta2", "weight_decay", "initial_accumulator_value")
# Hyperparameters of each supported optimizer, other than the learning rate.
_HYPERPARAMETERS_OF_OPTIMIZER: dict[EmbOptimType, tuple[str, ...]] = {
    EmbOptimType.SGD: (),
    EmbOptimType.EXACT_SGD: (),
    EmbOptimType.ADAM: _ADAM_HYPERPARAMETERS,
    EmbOptimType.EXACT_ADAGRAD: _ADAGRAD_HYPERPARAMETERS,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _ADAGRAD_HYPERPARAMETERS,
}
OPTIMIZERS = tuple(_HYPERPARAMETERS_OF_OPTIMIZER)
_DEFAULT_HYPERPARAMETERS = {
    "eps": 1.0e-8,
    "initial_accumulator_value": 0.0,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "max_norm": 0.0,
}


def optimizer(args: SimpleNamespace) -> optim.Optimizer:
    """Return the optimizer that the arguments `args` of a module describe.

    Raises:
        NotImplementedError: the optimizer or an option is not supported, as in DynamicEmb.
        ValueError: a hyperparameter, or the mode of weight decay, would have no effect.
    """
    kind = EmbOptimType(getattr(args.optimizer, "value", args.optimizer))
    if kind not in _HYPERPARAMETERS_OF_OPTIMIZER:
        raise NotImplementedError(
            f"optimizer {kind.name} is not supported; those that are: "
            f"{', '.join(member.name for member in _HYPERPARAMETERS_OF_OPTIMIZER)}"
        )
    for name in _DEFAULT_HYPERPARAMETERS.keys() - set(_HYPERPARAMETERS_OF_OPTIMIZER[kind]):
        if getattr(args, name) != _DEFAULT_HYPERPARAMETERS[name]:
            raise ValueError(
                f"{name}={getattr(args, name)} has no part in {kind.name} (DynamicEmb ignores it): "
                "leave it out"
            )
    _check_decay(args, kind)
    arguments: dict[str, Any] = {"lr": args.learning_rate}
    if args.gradient_clipping:
        arguments["max_gradient"] = args.max_gradient
    match kind:
        case EmbOptimType.ADAM:
            if args.weight_decay:
                arguments["weight_decay"] = optim.Decoupled(args.weight_decay)
            return optim.Adam(betas=(args.beta1, args.beta2), eps=args.eps, **arguments)
        case EmbOptimType.EXACT_ADAGRAD:
            return optim.Adagrad(eps=args.eps, **arguments)
        case EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            return optim.RowwiseAdagrad(eps=args.eps, **arguments)
    return optim.SGD(**arguments)


def default_optimizer(kind: EmbOptimType) -> optim.Optimizer:
    """Return an optimizer with default hyperparameters, e.g. to count the bytes of its states.

    Raises:
        NotImplementedError: `kind` is not in `OPTIMIZERS`.
    """
    return optimizer(
        SimpleNamespace(
            **_DEFAULT_HYPERPARAMETERS,
            optimizer=kind,
            learning_rate=0.01,
            gradient_clipping=False,
            max_gradient=1.0,
            weight_decay_mode=WeightDecayMode.NONE,
            counter_based_regularization=None,
            cowclip_regularization=None,
        )
    )


def _check_decay(args: SimpleNamespace, kind: EmbOptimType) -> None:
    """Raise unless the optimizer has the mode of weight decay, and no regularisation is set."""
    mode = WeightDecayMode(args.weight_decay_mode)
    allowed_modes = {WeightDecayMode.NONE}
    if kind is EmbOptimType.ADAM:
        allowed_modes.add(WeightDecayMode.DECOUPLE)  # Adam's decay is decoupled in both modes
    if mode not in allowed_modes:
        raise ValueError(
            f"weight_decay_mode of {kind.name} must be one of "
            f"{sorted(m.name for m in allowed_modes)}, got {mode.name} (DynamicEmb ignores it)"
        )
    for name in ("counter_based_regularization", "cowclip_regularization"):
        if getattr(args, name) is not None:
            raise NotImplementedError(
                f"{name} has no effect in DynamicEmb and is not supported; for plain tables see "
                "emblib.optim.RowwiseAdagrad(counter=...)"
            )
