"""From the arguments of FBGEMM's module to emblib's specs: what has no meaning here raises."""

import operator
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from emblib import (
    BoundsCheck,
    Cache,
    CachePolicy,
    MultiPass,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableSpec,
)
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SparseType,
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
    "res_params": "there is no streaming server",
    "preallocated_host_buffers": "tables allocate their own memory; copy into "
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
    """The arguments with emblib's members for enums, after everything unsupported has raised."""
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
    """The device asked for, or the one that goes with the compute device."""
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
    """Rows, dim, name and placement of each table."""
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
    """The names of the tables as emblib takes them: without dots, each one once."""
    names: list[str] = []
    for t, name in enumerate(a.table_names or [""] * len(a.embedding_specs)):
        name = name.replace(".", "_")
        names.append(f"{name}_{t}" if name and name in names else name)
    return names


def pooling(a: SimpleNamespace) -> Pooling:
    """SUM, MEAN or NONE."""
    return Pooling(a.pooling_mode.name.lower())


def bounds_check(a: SimpleNamespace) -> BoundsCheck:
    """The mode without the version of FBGEMM's kernel."""
    return BoundsCheck(a.bounds_check_mode.name.removeprefix("V2_").lower())


def float_dtype(name: str, kind: SparseType) -> torch.dtype:
    """The dtype of a number format that tables, outputs and state can have."""
    if kind not in _FLOATS:
        raise NotImplementedError(
            f"{name} must be SparseType.FP32, FP16 or BF16, got {kind.name}: there are no kernels "
            "that train it"
        )
    return _FLOATS[kind]


def precision(a: SimpleNamespace) -> Precision:
    """The dtypes of weights, output and state, and how 16 bits are rounded."""
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
    """Of state as long as a row; what FBGEMM keeps a number a row is float32 here."""
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


def cache(a: SimpleNamespace) -> Cache | None:
    """The cache, or None where no table stands behind one."""
    if not any(spec.placement.cached for spec in tables(a)):
        return None
    passes = a.multipass_prefetch_config
    dtype = a.cache_precision
    return Cache(
        policy=CachePolicy(a.cache_algorithm.name.lower()),
        load_factor=a.cache_load_factor,
        sets=a.cache_sets,
        reserved_bytes=int(a.cache_reserved_memory),
        dtype=None if dtype is None else float_dtype("cache_precision", dtype),
        passes=None
        if passes is None
        else MultiPass(passes.num_passes, passes.min_splitable_pass_size),
    )
