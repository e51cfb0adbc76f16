"""Bytes that a part of a table takes: weights, optimizer state, what a cache or an index needs."""

import math

import torch

from emblib.collections.configs import Kind, Plain, Quantized
from emblib.collections.slices import TableSlice
from emblib.dynamic_specs import SLOTS, DynamicSpec, ExactCounter, Sketch
from emblib.ops import lookups
from emblib.ops.hash import SCORED
from emblib.optim import External, Gradient, Optimizer
from emblib.sharding.planner.topology import Pool
from emblib.specs import Cache, CachePolicy, Placement, Precision, TableSpec, TTSpec

_WAYS = 32  # rows of a cache's set
_SLOT = 16  # tag and stamp of a row in a cache
_STATE = Precision().states.itemsize


def table_bytes(part: TableSlice, optimizer: Optimizer | None, device: str) -> Pool:
    """What the part takes where it is held, batches apart.

    Without an optimizer, or with one whose gradients are dense, the gradient counts as well.
    """
    config, spec = part.config, part.spec
    if isinstance(config.kind, Quantized):
        return Pool(_quantized_bytes(spec.rows, spec.dim, config.kind.bits))
    if isinstance(spec, TTSpec):
        return Pool(_core_bytes(spec, optimizer))
    if isinstance(spec, DynamicSpec):
        itemsize = config.data_type.itemsize
        return Pool(_dynamic_bytes(spec, optimizer, itemsize))
    return _plain_bytes(spec, config.kind, optimizer, config.data_type, device)


def state_bytes(optimizer: Optimizer | None, rows: int, dim: int, itemsize: int) -> int:
    """Of the optimizer's state for this many rows, and of a dense gradient where there is one."""
    if optimizer is None or _has_dense_gradient(optimizer):
        return rows * dim * itemsize
    return sum(
        rows * (torch.float32.itemsize if s.per_row else dim * _STATE) for s in optimizer.states
    )


def row_bytes(optimizer: Optimizer | None, dim: int, itemsize: int) -> int:
    """Of a row and its optimizer state: what an update of the row reads and writes."""
    return dim * itemsize + (state_bytes(optimizer, 1, dim, itemsize) if is_fused(optimizer) else 0)


def is_fused(optimizer: Optimizer | None) -> bool:
    """Whether backward applies it."""
    return optimizer is not None and lookups.is_fused(optimizer)


def _has_dense_gradient(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, External) and optimizer.gradient is Gradient.DENSE


def _plain_bytes(
    spec: TableSpec, kind: Kind, optimizer: Optimizer | None, dtype: torch.dtype, device: str
) -> Pool:
    weights = spec.rows * spec.dim * dtype.itemsize
    table = weights + state_bytes(optimizer, spec.rows, spec.dim, dtype.itemsize)
    if not spec.placement.cached:
        far = spec.placement is Placement.MANAGED and device == "cuda"
        return Pool(0, table) if far else Pool(table)
    assert isinstance(kind, Plain)
    cache = _cache_bytes(spec, kind.cache or Cache(), optimizer, dtype)
    if spec.placement is Placement.DISK:
        return Pool(cache, 0, table)
    # On the CPU the table is in the same memory as the cache before it.
    return Pool(cache, table) if device == "cuda" else Pool(cache + table)


def _cache_bytes(
    spec: TableSpec, cache: Cache, optimizer: Optimizer | None, dtype: torch.dtype
) -> int:
    """A cache for this table alone; several that share one have rows as long as the longest."""
    dtype = cache.dtype or dtype
    stride = -(-spec.dim // 4) * 4
    sets = max(cache.sets or math.ceil(cache.load_factor * spec.rows / _WAYS), 1)
    slot = _SLOT + stride * dtype.itemsize + state_bytes(optimizer, 1, stride, dtype.itemsize)
    counts = spec.rows * torch.int32.itemsize if cache.policy is CachePolicy.LFU else 0
    return sets * _WAYS * slot + counts


def _core_bytes(spec: TTSpec, optimizer: Optimizer | None) -> int:
    ranks = spec.full_ranks
    total = 0
    for k, (p, q) in enumerate(zip(spec.row_factors, spec.dim_factors, strict=True)):
        width = ranks[k] * q * ranks[k + 1]
        total += p * width * torch.float32.itemsize
        total += state_bytes(optimizer, p, width, torch.float32.itemsize)
    return total


def _dynamic_bytes(spec: DynamicSpec, optimizer: Optimizer | None, itemsize: int) -> int:
    """Of a table that is full: all of its capacity, whatever it begins with."""
    words = 3 if spec.eviction.order in SCORED else 2
    rows = spec.rows
    index = rows * (1 + words * 8)
    values = rows * spec.dim * itemsize + state_bytes(optimizer, rows, spec.dim, itemsize)
    return index + values + (_counter_bytes(spec) if spec.admission else 0)


def _counter_bytes(spec: DynamicSpec) -> int:
    assert spec.admission is not None
    counter = spec.admission.counter
    if isinstance(counter, ExactCounter):
        return -(-counter.capacity // SLOTS) * SLOTS * (1 + 3 * 8)
    assert isinstance(counter, Sketch)
    threshold = spec.admission.threshold
    size = 1 if threshold < 2**8 else 4 if threshold < 2**31 else 8
    return counter.width * counter.depth * size


def _quantized_bytes(rows: int, dim: int, bits: int) -> int:
    """Packed values, and a float32 scale and offset a row."""
    return rows * (-(-dim * bits // 8) + 2 * torch.float32.itemsize)
