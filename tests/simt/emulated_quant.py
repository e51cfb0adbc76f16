"""The emulated kernels of quantised tables behind the names and arguments of the ops."""

from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import POOLING
from tests.simt.emulated import DTYPES
from tests.simt.library import library


def quantize_rows_(packed: Tensor, weights: Tensor, format: int) -> None:
    """Emulated `quantize_rows_`."""
    library().call("quantize_rows", weights, DTYPES[weights.dtype], packed, *weights.shape, format)


def quant_lookup(
    packed: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, *rest: Any
) -> Tensor:
    """Emulated `quant_lookup`: then bag_layout, sample_weights, pooling, ... as the op."""
    bag_layout, sample_weights, pooling, format, columns, dtype = rest
    bags = offsets.numel() - 1
    batch = bags // max(features.size(0), 1)
    shape: tuple[int, ...] = (batch, columns)
    if pooling == POOLING["none"]:
        shape = (indices.numel(), columns)
    elif bag_layout is not None:
        shape = (columns,)
    out = torch.full(shape, torch.nan, dtype=dtype)
    if bags == 0:
        return out.zero_()
    library().call(
        "quant_lookup",
        packed,
        features,
        features.size(0),
        indices,
        indices.dtype == torch.int64,
        offsets,
        offsets.dtype == torch.int64,
        indices.numel(),
        bags,
        bag_layout,
        max(batch, 1),
        columns,
        pooling,
        sample_weights,
        out,
        DTYPES[dtype],
        format < 0,
        -format if format < 0 else 1 << format,
    )
    return out


def map_ids(
    index: Tensor, tables: Tensor, features: Tensor, indices: Tensor, offsets: Tensor
) -> Tensor:
    """Emulated `map_ids`, of a fixed batch."""
    rows = torch.full_like(indices, -9, dtype=torch.int64)
    bags = offsets.numel() - 1
    library().call(
        "map_ids",
        index,
        tables,
        features.size(0),
        indices,
        indices.dtype == torch.int64,
        offsets,
        offsets.dtype == torch.int64,
        indices.numel(),
        bags,
        max(bags // max(features.size(0), 1), 1),
        rows,
    )
    return rows
