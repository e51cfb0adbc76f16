"""Quantised tables: rows of 8 or 4 bits per value with a scale and an offset, read-only.

Shapes and dtypes, with R rows, D dim, F features, L lookups:

- `values` uint8: the numbers q of all rows, each row filled up to whole bytes
  (`row_bytes(D, bits)`); of 4 bits the even columns are the low halves of their bytes
- `scales` float32 `[R, 2]` of (scale, offset): value d of row r is `scale * q[r, d] + offset`
- `features` int64 `[F, 8]` as for dense tables (`emblib.ops.tbe`), except that `weight_offset`
  counts bytes of `values`; `row_base` is the first of its rows in `scales`
- indices, offsets, bag layout, sample weights, pooling and output as for dense tables

`quantize_rows_(values [R, bytes], scales [R, 2], weights [R, D], bits)` writes the rows of float32,
float16 or bfloat16 `weights`: offset is the smallest value of a row, scale the (2^bits - 1)-th part
of what lies between it and the largest, and every value goes to the nearest number (ties to even),
so that it is off by half a scale at most, rounding of float32 apart. Rows must be finite.

`quant_lookup` adds up `weight * scale * q + weight * offset` in float32 and in the order of the
lookups. It has no gradient. The definition is `emblib.reference.quant`.
"""

import torch
from torch import Tensor

from emblib.ops.tbe import output_shape

quantize_rows_ = torch.ops.emblib.quantize_rows_.default
quant_lookup = torch.ops.emblib.quant_lookup.default


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of the packed numbers of a row."""
    return -(-dim * bits // 8)


@torch.library.register_fake("emblib::quantize_rows_")
def _(values: Tensor, scales: Tensor, weights: Tensor, bits: int) -> None:
    return None


@torch.library.register_fake("emblib::quant_lookup")
def _(
    values: Tensor,
    scales: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    sample_weights: Tensor | None,
    pooling: int,
    bits: int,
    output_dim: int,
    output_dtype: torch.dtype,
) -> Tensor:
    variable = bag_layout is not None
    shape = output_shape(features, indices, offsets, pooling, output_dim, variable=variable)
    return indices.new_empty(shape, dtype=output_dtype)
