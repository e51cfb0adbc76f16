"""Convert the arguments of FBGEMM's module to emblib's specs; unsupported arguments raise."""

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

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

_ENUMS = {
    "cache_algorithm": CacheAlgorithm,
    "cache_precision": SparseType,
    "weights_precision": SparseType,
    "output_dtype": SparseType,
    "optimizer": EmbOptimType,
    "weight_decay_mode": WeightDecayMode,
    "pooling_mode": PoolingMode,
    "bounds_check_mode": BoundsCheckMode,
}
_WITHOUT_MEANING = {
    "tbe_input_multiplexer_config": "dumping inputs is a tool of FBGEMM's own; record the batches "
    "where they are made",
    "enable_raw_embedding_streaming": "there is no streaming server; write changed rows out with "
    "split_embedding_weights()",
    "is_qr_tbe": "there is no quotient-remainder subclass",
}
_PLACEMENTS = {
    EmbeddingLocation.DEVICE: Placement.DEVICE,
    EmbeddingLocation.HOST: Placement.HOST,
    EmbeddingLocation.MANAGED: Placement.MANAGED,
    EmbeddingLocation.MANAGED_CACHING: Placement.MANAGED_CACHING,
}
_FLOATS = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}
_WHOLE_ROW_STATES = {
    EmbOptimType.EXACT_ADAGRAD: ("momentum1",),
    EmbOptimType.ADAM: ("momentum1", "momentum2"),
    EmbOptimType.LAMB: ("momentum1", "momentum2"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("momentum1",),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: ("momentum1",),
    EmbOptimType.LARS_SGD: ("momentum1",),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: ("momentum2",),
}


def normalise(given: Mapping[str, Any]) -> SimpleNamespace:
    """Raise for unsupported arguments; return the others with emblib's enum members."""
    a = SimpleNamespace(**given)
    for name, reason in _WITHOUT_MEANING.items():
        if getattr(a, name) not in (None, False):
            raise NotImplementedError(f"{name} is not supported: {reason}; leave it out")
    for name, kind in _ENUMS.items():
        if getattr(a, name) is not None:
            setattr(a, name, as_member(kind, getattr(a, name)))
    if not a.embedding_specs:
        raise ValueError("embedding_specs must have at least one table")
    a.embedding_specs = [
        (
            operator.index(rows),
            operator.index(dim),
            as_member(EmbeddingLocation, location),
            as_member(ComputeDevice, device),
        )
        for rows, dim, location, device in a.embedding_specs
    ]
    tables = len(a.embedding_specs)
    if a.feature_table_map is None:
        a.feature_table_map = list(range(tables))
    a.feature_table_map = [operator.index(t) for t in a.feature_table_map]
    if a.table_names is not None and len(a.table_names) != tables:
        raise ValueError(f"table_names must have {tables} names, got {len(a.table_names)}")
    if a.extra_optimizer_config is None:
        a.extra_optimizer_config = UserEnabledConfigDefinition()
    for name in ("embedding_table_index_type", "embedding_table_offset_type"):
        if getattr(a, name) not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be torch.int32 or torch.int64, got {getattr(a, name)}")
    a.compute_device = _compute_device(a)
    a.device = _device(a)
    return a


def _compute_device(a: SimpleNamespace) -> ComputeDevice:
    devices = {spec[3] for spec in a.embedding_specs}
    if len(devices) > 1:
        raise ValueError(f"all tables must have the same ComputeDevice, got {sorted(devices)}")
    device = devices.pop()
    locations = {spec[2] for spec in a.embedding_specs}
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


def _device(a: SimpleNamespace) -> torch.device:
    """Return the requested device, or that of the compute device."""
    kind = "cpu" if a.compute_device is ComputeDevice.CPU else "cuda"
    if a.device is None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "ComputeDevice.CUDA needs a GPU, and torch sees none; use ComputeDevice.CPU with "
                "EmbeddingLocation.HOST"
            )
        return torch.device(kind)
    device = torch.device("cuda", a.device) if isinstance(a.device, int) else torch.device(a.device)
    if device.type not in (kind, "meta"):
        raise ValueError(f"device {device} does not go with {a.compute_device!r}")
    return device


def tables(a: SimpleNamespace) -> list[TableSpec]:
    """Return rows, dim, name and placement of each table."""
    states = _WHOLE_ROW_STATES.get(a.optimizer, ())
    specs = []
    for (rows, dim, location, _), name in zip(a.embedding_specs, _names(a), strict=True):
        placement = Placement.DEVICE if a.enforce_hbm else _PLACEMENTS[location]
        leaves = a.uvm_non_rowwise_momentum and states and a.compute_device is ComputeDevice.CUDA
        if leaves and placement is Placement.DEVICE and not a.enforce_hbm:
            placement = Placement.MANAGED
        specs.append(TableSpec(rows, dim, name, placement))
    return specs


def _names(a: SimpleNamespace) -> list[str]:
    """Return the names of the tables for emblib: without dots, each distinct."""
    names: list[str] = []
    for t, name in enumerate(a.table_names or [""] * len(a.embedding_specs)):
        name = name.replace(".", "_")
        names.append(f"{name}_{t}" if name and name in names else name)
    return names


def pooling(a: SimpleNamespace) -> Pooling:
    """Return SUM, MEAN or NONE."""
    return Pooling(a.pooling_mode.name.lower())


def bounds_check(a: SimpleNamespace) -> BoundsCheck:
    """Return the mode without the version of FBGEMM's kernel."""
    return BoundsCheck(a.bounds_check_mode.name.removeprefix("V2_").lower())


def float_dtype(name: str, kind: SparseType) -> torch.dtype:
    """Return the dtype of a number format that tables, outputs and states can have."""
    if kind not in _FLOATS:
        raise NotImplementedError(
            f"{name} must be SparseType.FP32, FP16 or BF16, got {kind.name}: there are no kernels "
            "that train it"
        )
    return _FLOATS[kind]


def precision(a: SimpleNamespace) -> Precision:
    """Return the dtypes of weights, output and states, and the rounding of 16-bit values."""
    weights = float_dtype("weights_precision", a.weights_precision)
    states = _state_dtype(a)
    narrow = weights != torch.float32 or states != torch.float32
    rounding = StochasticRounding(torch.initial_seed() % 2**53)
    return Precision(
        weights=weights,
        output=float_dtype("output_dtype", a.output_dtype),
        states=states,
        stochastic_rounding=rounding if narrow and a.stochastic_rounding else None,
    )


def _state_dtype(a: SimpleNamespace) -> torch.dtype:
    """Return the dtype of states of row length; states of one number per row are float32."""
    given = a.optimizer_state_dtypes or {}
    unknown = set(given) - {"momentum1", "momentum2"}
    if unknown:
        raise ValueError(f"optimizer_state_dtypes has momentum1, momentum2, got {sorted(unknown)}")
    dtypes = {key: float_dtype(key, as_member(SparseType, kind)) for key, kind in given.items()}
    of_rows = _WHOLE_ROW_STATES.get(a.optimizer, ())
    for key in dtypes.keys() - set(of_rows):
        if dtypes[key] != torch.float32:
            warnings.warn(
                f"emblib: {key} of {a.optimizer.name} is no state as long as a row; optimizer_"
                f"state_dtypes[{key!r}] is without effect",
                stacklevel=5,
            )
    asked = {dtypes.get(key, torch.float32) for key in of_rows}
    if len(asked) > 1:
        raise NotImplementedError(
            f"momentum1 and momentum2 of {a.optimizer.name} must have one dtype, got "
            f"{a.optimizer_state_dtypes}"
        )
    return asked.pop() if asked else torch.float32


def cache(a: SimpleNamespace) -> CacheConfig | None:
    """Return the cache, or None if no table has one."""
    if not any(spec.placement.cached for spec in tables(a)):
        return None
    passes = a.multipass_prefetch_config
    dtype = a.cache_precision
    return CacheConfig(
        policy=CachePolicy(a.cache_algorithm.name.lower()),
        load_factor=a.cache_load_factor,
        sets=a.cache_sets,
        reserved_bytes=int(a.cache_reserved_memory),
        dtype=None if dtype is None else float_dtype("cache_precision", dtype),
        passes=None
        if passes is None
        else MultiPassPrefetch(passes.num_passes, passes.min_splitable_pass_size),
    )


_DEFAULTS = {
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
_ADAM = ("learning_rate", "eps", "beta1", "beta2", "weight_decay")
_ADAGRAD = ("learning_rate", "eps")
_USES = {
    EmbOptimType.EXACT_SGD: ("learning_rate",),
    EmbOptimType.EXACT_ADAGRAD: _ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (*_ADAGRAD, "weight_decay", "max_norm"),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _ADAGRAD,
    EmbOptimType.ADAM: _ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _ADAM,
    EmbOptimType.LAMB: _ADAM,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _ADAM,
    EmbOptimType.LARS_SGD: ("learning_rate", "momentum", "eta", "weight_decay"),
    EmbOptimType.NONE: (),
}
SUPPORTED = tuple(_USES)
# Asked for and not given would change what is learned; the other numbers merely have no part.
_MUST_ACT = ("weight_decay", "max_norm")
_OPTIONS_OF = {
    "counter_based_regularization": "weight_decay_mode=WeightDecayMode.COUNTER",
    "cowclip_regularization": "weight_decay_mode=WeightDecayMode.COWCLIP",
    "global_weight_decay": "weight_decay_mode=WeightDecayMode.DECOUPLE_GLOBAL",
    "ensemble_mode": "optimizer=OptimType.ENSEMBLE_ROWWISE_ADAGRAD",
    "emainplace_mode": "optimizer=OptimType.EMAINPLACE_ROWWISE_ADAGRAD",
}


def optimizer(a: SimpleNamespace) -> optim.Optimizer:
    """Return the optimizer that the arguments of the module describe.

    Raises:
        NotImplementedError: an optimizer or an option that emblib does not have.
        ValueError: an option that would have no effect although it should.
    """
    if a.optimizer not in _USES:
        raise NotImplementedError(
            f"optimizer {a.optimizer.name} is not supported; those that are: "
            f"{', '.join(kind.name for kind in _USES)}"
        )
    _check_inert_numbers(a)
    _check_options(a)
    common: dict[str, Any] = {}
    if a.gradient_clipping:
        common["max_gradient"] = a.max_gradient
    if a.optimizer is EmbOptimType.NONE:
        return optim.External(gradient=optim.Gradient.SPARSE, **common)
    return _MAKERS[a.optimizer](a, {"lr": a.learning_rate, **common})


def _check_inert_numbers(a: SimpleNamespace) -> None:
    """Raise for hyperparameters that the optimizer does not have."""
    for name in _DEFAULTS.keys() - set(_USES[a.optimizer]):
        if getattr(a, name) == _DEFAULTS[name]:
            continue
        what = f"{name}={getattr(a, name)} has no part in {a.optimizer.name}"
        if name in _MUST_ACT:
            raise ValueError(f"{what}: leave it out, or choose an optimizer that has it")
        warnings.warn(f"emblib: {what}", stacklevel=5)


def _check_options(a: SimpleNamespace) -> None:
    """Raise for option objects of another mode or optimizer, and for modes without theirs."""
    mode, kind = a.weight_decay_mode, a.optimizer
    modes = {WeightDecayMode.NONE}
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        modes = set(WeightDecayMode)
    elif "weight_decay" in _USES[kind]:
        modes.add(WeightDecayMode.DECOUPLE)
    if mode not in modes:
        raise ValueError(
            f"weight_decay_mode of {kind.name} must be one of {[m.name for m in sorted(modes)]}, "
            f"got {mode.name}"
        )
    rowwise = kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    if rowwise and mode is WeightDecayMode.NONE and a.weight_decay != 0.0:
        raise ValueError(
            f"weight_decay={a.weight_decay} has no part in {kind.name} with "
            "weight_decay_mode=WeightDecayMode.NONE: leave it out, or choose a mode that has it, "
            "e.g. WeightDecayMode.L2 or WeightDecayMode.DECOUPLE"
        )
    wanted = {
        "counter_based_regularization": mode is WeightDecayMode.COUNTER,
        "cowclip_regularization": mode is WeightDecayMode.COWCLIP,
        "global_weight_decay": mode is WeightDecayMode.DECOUPLE_GLOBAL,
        "ensemble_mode": None if kind is EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD else False,
        "emainplace_mode": None if kind is EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD else False,
    }
    for name, needed in wanted.items():
        given = getattr(a, name) is not None
        if needed is not None and given is not needed:
            raise ValueError(f"{name} goes with {_OPTIONS_OF[name]}, got one without the other")
    extra = a.extra_optimizer_config
    if extra.use_rowwise_bias_correction:
        raise NotImplementedError(
            "use_rowwise_bias_correction is not supported: bias corrections follow the step of the "
            "module"
        )
    writeback = extra.writeback_first_feature_only or extra.precompute_writeback
    if writeback and not extra.use_writeback_bwd_prehook:
        raise ValueError(
            "writeback_first_feature_only and precompute_writeback are options of "
            "use_writeback_bwd_prehook"
        )
    if extra.use_writeback_bwd_prehook and kind is not EmbOptimType.EXACT_SGD:
        raise ValueError(f"use_writeback_bwd_prehook is of EXACT_SGD, got {kind.name}")


def _decay(kind: Callable[[float], Any], a: SimpleNamespace) -> Any:
    return kind(a.weight_decay) if a.weight_decay else None


def _rowwise_adagrad(a: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    """Convert weight decay, of any mode."""
    common |= {"eps": a.eps, "max_norm": a.max_norm}
    mode = a.weight_decay_mode
    if mode is WeightDecayMode.L2:
        common["weight_decay"] = _decay(optim.L2, a)
    elif mode is WeightDecayMode.DECOUPLE:
        common["weight_decay"] = _decay(optim.Decoupled, a)
    elif mode is WeightDecayMode.DECOUPLE_GLOBAL:
        given = a.global_weight_decay
        common["global_decay"] = optim.GlobalDecay(
            a.weight_decay, given.start_iter, given.lower_bound
        )
    elif mode is WeightDecayMode.COUNTER:
        common["counter"] = _counter(a.counter_based_regularization)
        common["weight_decay"] = _counter_decay(a, a.counter_based_regularization)
    elif mode is WeightDecayMode.COWCLIP:
        clip = a.cowclip_regularization
        common["counter"] = optim.CowClip(
            clip.counter_halflife, clip.weight_norm_coefficient, clip.lower_bound
        )
        common["weight_decay"] = _counter_decay(a, clip)
    return optim.RowwiseAdagrad(**common)


def _counter(given: CounterBasedRegularizationDefinition) -> optim.Counter:
    if int(given.grad_sum_decay) != -1:
        raise NotImplementedError(
            "grad_sum_decay must be GradSumDecay.NO_DECAY: FBGEMM's kernels have no rule for "
            f"another, got {given.grad_sum_decay!r}"
        )
    tail = given.tail_id_threshold
    return optim.Counter(
        halflife=given.counter_halflife,
        start=given.adjustment_iter,
        bound=given.adjustment_ub,
        tail={
            LearningRateMode.EQUAL: optim.TailRate.EQUAL,
            LearningRateMode.TAIL_ID_LR_INCREASE: optim.TailRate.RAISED,
            LearningRateMode.TAIL_ID_LR_DECREASE: optim.TailRate.LOWERED,
            LearningRateMode.COUNTER_SGD: optim.TailRate.BY_COUNT,
        }[as_member(LearningRateMode, given.learning_rate_mode)],
        threshold=optim.RelativeThreshold(tail.val) if tail.is_ratio else tail.val,
        update_every=given.max_counter_update_freq,
    )


def _counter_decay(
    a: SimpleNamespace, given: CounterBasedRegularizationDefinition | CowClipDefinition
) -> Any:
    """Convert the weight decay of counter-based regularisation."""
    mode = as_member(CounterWeightDecayMode, given.counter_weight_decay_mode)
    if mode is CounterWeightDecayMode.NONE:
        return None
    kinds: dict[CounterWeightDecayMode, Callable[[float], Any]] = {
        CounterWeightDecayMode.L2: optim.L2,
        CounterWeightDecayMode.DECOUPLE: optim.Decoupled,
        CounterWeightDecayMode.ADAGRADW: optim.AdagradW,
    }
    return kinds[mode](a.weight_decay)


def _adam(kind: type[Any]) -> Callable[[SimpleNamespace, dict[str, Any]], optim.Optimizer]:
    def make(a: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
        decay = _decay(optim.Decoupled, a)
        return kind(**common, betas=(a.beta1, a.beta2), eps=a.eps, weight_decay=decay)

    return make


def _lars(a: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    decay = _decay(optim.L2, a)
    return optim.LARS(**common, momentum=a.momentum, eta=a.eta, weight_decay=decay)


def _ensemble(a: SimpleNamespace, common: dict[str, Any]) -> optim.Optimizer:
    given = a.ensemble_mode or EnsembleModeDefinition()
    clears = as_member(StepMode, given.step_mode) is StepMode.NONE
    return optim.EnsembleRowwiseAdagrad(
        **common,
        eps=a.eps,
        average_every=int(given.step_ema),
        swap_every=int(given.step_swap),
        start=int(given.step_start),
        keep=given.step_ema_coef,
        slow=optim.EmaReset.CLEAR if clears else optim.EmaReset.KEEP,
    )


_MAKERS: dict[EmbOptimType, Callable[[SimpleNamespace, dict[str, Any]], optim.Optimizer]] = {
    EmbOptimType.EXACT_SGD: lambda a, common: optim.SGD(**common),
    EmbOptimType.EXACT_ADAGRAD: lambda a, common: optim.Adagrad(**common, eps=a.eps),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: lambda a, common: optim.RowwiseAdagrad(
        **common, eps=a.eps
    ),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ensemble,
    EmbOptimType.ADAM: _adam(optim.Adam),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _adam(optim.PartialRowwiseAdam),
    EmbOptimType.LAMB: _adam(optim.LAMB),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _adam(optim.PartialRowwiseLAMB),
    EmbOptimType.LARS_SGD: _lars,
}

_UPDATED = {
    "lr": "learning_rate",
    "eps": "eps",
    "beta1": "beta1",
    "beta2": "beta2",
    "weight_decay": "weight_decay",
}


def _with_numbers_of(bags: TableBatchedEmbeddingBags, a: SimpleNamespace) -> SimpleNamespace:
    """Return the arguments with the numbers that act now, which a checkpoint may have set."""
    current = SimpleNamespace(**vars(a))
    current.learning_rate, now = bags.learning_rate, bags.optimizer
    current.eps = getattr(now, "eps", a.eps)
    current.beta1, current.beta2 = getattr(now, "betas", (a.beta1, a.beta2))
    decay = getattr(now, "global_decay", None) or now.weight_decay
    if decay is not None:
        current.weight_decay = decay.rate
    return current


def update(bags: TableBatchedEmbeddingBags, a: SimpleNamespace, new: Mapping[str, float]) -> None:
    """Change arguments `a` and the optimizer; arguments it lacks are only stored in `a`."""
    changed = _with_numbers_of(bags, a)
    for name, value in new.items():
        if name in _UPDATED:
            setattr(changed, _UPDATED[name], value)
        elif name == "lower_bound":
            if changed.global_weight_decay is not None:
                decay = replace(changed.global_weight_decay, lower_bound=value)
                changed.global_weight_decay = decay
        else:
            raise NotImplementedError(
                f"Setting hyper-parameter {name} is not supported; those that can be set: "
                f"{', '.join((*_UPDATED, 'lower_bound'))}"
            )
    uses = _USES[a.optimizer]
    inert = [name for name in new if name != "lower_bound" and _UPDATED[name] not in uses]
    if "lower_bound" in new and a.weight_decay_mode is not WeightDecayMode.DECOUPLE_GLOBAL:
        inert.append("lower_bound")
    if inert:
        warnings.warn(
            f"emblib: {', '.join(inert)} have no part in {a.optimizer.name}", stacklevel=3
        )
    acting = SimpleNamespace(**vars(changed))
    for name in _DEFAULTS.keys() - set(uses):
        setattr(acting, name, _DEFAULTS[name])
    made = optimizer(acting)
    bags.set_hyperparameters(**{field.name: getattr(made, field.name) for field in fields(made)})
    vars(a).update(vars(changed))


class InPlaceAverage:
    """EMAINPLACE: periodically move the second half of every row towards its first half."""

    def __init__(self, mode: EmainplaceModeDefinition) -> None:
        self.every = int(mode.step_ema)
        self.start = int(mode.step_start)
        self.share = mode.step_ema_coef
        self.iterations = 0

    def step(self, bags: TableBatchedEmbeddingBags) -> None:
        """Average before the lookup of a training step, counted by the steps of the module."""
        self.iterations = (self.iterations or bags.step) + 1
        if self.iterations % self.every or self.iterations < self.start:
            return
        with torch.no_grad():
            for weights in bags.table_weights():
                half = weights.size(1) // 2
                weights[:, half:].lerp_(weights[:, :half], self.share)


def in_place_average(a: SimpleNamespace) -> InPlaceAverage | None:
    """Return the averaging of EMAINPLACE_ROWWISE_ADAGRAD; None for other optimizers."""
    if a.optimizer is not EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD:
        return None
    odd = [spec[1] for spec in a.embedding_specs if spec[1] % 2]
    if odd:
        raise ValueError(f"EMAINPLACE_ROWWISE_ADAGRAD needs even dims, got {odd}")
    return InPlaceAverage(a.emainplace_mode or EmainplaceModeDefinition())
