"""Shapes and dtypes of the results of tensor-train ops, for tracing and compiled graphs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.ops import tbe

_ops = torch.ops.emblib


def left_value_size(
    cores: Sequence[Tensor], dim_factors: Sequence[int], num_cores: Sequence[int]
) -> int:
    """Return the number of elements of the largest left half, `max(Q_l * rank)` over the tables."""
    sizes, begin = [], 0
    for count in num_cores:
        size = cores[begin].size(1)
        if count > 2:
            rank = size // dim_factors[begin]
            size = dim_factors[begin] * (cores[begin + 1].size(1) // rank)
        sizes.append(size)
        begin += count
    return max(sizes)


@torch.library.register_fake("emblib::tt_keys")
def _(
    indices: Tensor, offsets: Tensor, bag_layout: Tensor | None, feature_tables: Tensor
) -> Tensor:
    return indices.new_empty(indices.numel(), dtype=torch.int64)


@torch.library.register_fake("emblib::tt_plan")
def _(keys: Tensor, count: Tensor, tables: Tensor, left_ids: int, right_ids: int) -> list[Tensor]:
    n, starts = keys.numel(), 3 * (tables.size(0) + 1)
    return [
        keys.new_empty(size, dtype=torch.int32) for size in (n, n + 1, n, n, n + 1, n, n, starts)
    ]


def _max_dim(dim_factors: Sequence[int], num_cores: Sequence[int]) -> int:
    factors = iter(dim_factors)
    return max(math.prod(next(factors) for _ in range(count)) for count in num_cores)


@torch.library.register_fake("emblib::tt_rows")
def _(
    cores: Sequence[Tensor],
    plan: Sequence[Tensor],
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
    num_cores: Sequence[int],
    num_saved: int,
    matmul_precision: int = 0,
) -> tuple[Tensor, Tensor]:
    size, dim = left_value_size(cores, dim_factors, num_cores), _max_dim(dim_factors, num_cores)
    rows = cores[0].new_empty((plan[2].numel(), dim), dtype=torch.float32)
    return rows, rows.new_empty(num_saved, size)


@torch.library.register_fake("emblib::tt_core_grads")
def _(cores: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(core, dtype=torch.float32) for core in cores]


# Results of a valid batch on the CPU. On a GPU the op returns other tensors, see csrc/schema.cpp;
# compiled graphs do not call it there.
@torch.library.register_fake("emblib::tt_lookup_checked_")
def _(
    cores: Sequence[Tensor],
    tables: Tensor,
    feature_tables: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    sample_weights: Tensor | None,
    pooling: int,
    output_dim: int,
    output_dtype: torch.dtype,
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
    num_cores: Sequence[int],
    num_saved: int,
    check: int | None,
    violations: Tensor,
    matmul_precision: int = 0,
) -> list[Tensor]:
    features = features[: feature_tables.size(0)]
    is_flat = bag_layout is not None
    shape = tbe.output_shape(features, indices, offsets, pooling, output_dim, is_flat=is_flat)
    out = indices.new_empty(shape, dtype=output_dtype)
    if num_saved < 0:  # nothing is saved for backward
        return [out]
    keys = _ops.tt_keys(indices, offsets, bag_layout, feature_tables)
    groups = tbe.tbe_group(features, keys, offsets, bag_layout, 0)
    plan = _ops.tt_plan(keys, groups[4], tables, 0, 0)
    size = left_value_size(cores, dim_factors, num_cores)
    left_values = cores[0].new_empty((num_saved, size), dtype=torch.float32)
    return [out, *groups, *plan, left_values]


@torch.library.register_fake("emblib::tt_stored")
def _(
    indices: Tensor, ids: Tensor, keys: Tensor, slots: Tensor | None, row_of_slot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_stored = 0 if slots is None else ids.numel()
    return ids.new_empty(num_stored), ids.new_empty(num_stored), ids.new_empty(ids.numel())
