"""Quantised tables: rows of 8 or 4 bits per value, which begin with their scale, read-only.

Shapes and dtypes, with R rows, D dim, F features, L lookups:

- `packed` uint8: the rows of all tables, `row_bytes(D, bits)` bytes each. A row is its scale and
  its offset, both float16, then the numbers q of its D values, then zeros up to a multiple of 4
  bytes; of 4 bits the even columns are the low halves of their bytes. Value d is
  `scale * q[d] + offset`. Rows of FBGEMM's `IntNBitTableBatchedEmbeddingBagsCodegen` have the same
  format, up to what fills them.
- `features` int64 `[F, 8]` as for dense tables (`emblib.ops.tbe`), except that `weight_offset`
  counts bytes of `packed`, a multiple of 4
- indices, offsets, bag layout, sample weights, pooling and output as for dense tables

`quantize_rows_(packed [R, row_bytes], weights [R, D], bits)` writes the rows of float32, float16 or
bfloat16 `weights`. The offset is the largest float16 up to the minimum of a row, the scale the
smallest float16 from (maximum - offset) / (2^bits - 1) on, and every value goes to the nearest
number (ties to even) of these. So every value is within half a scale, rounding of float32 apart,
and the scale is at most

    (1 + 2^-10) (maximum - minimum + max(2^-10 |minimum|, 2^-24)) / (2^bits - 1) + 2^-24.

Rows must be finite; values beyond `LARGEST` count as `LARGEST`.

`quant_lookup` adds up `weight * scale * q + weight * offset` in float32 and in the order of the
lookups. It has no gradient. The definition is `emblib.reference.quant`. `quant_lookup_checked_`
checks the batch on the way, as `emblib.ops.tbe.tbe_lookup_checked_` does.
"""

import torch
from torch import Tensor

from emblib.ops.tbe import output_shape

HEADER_BYTES = 4
"""Bytes of the scale and the offset, with which a row begins."""

LARGEST = torch.finfo(torch.float16).max
"""The largest magnitude of a value, that of an offset in float16."""

_ROW_ALIGNMENT = 4  # in bytes, that of the loads of a GPU
_TABLE_ALIGNMENT = 64  # a cache line

quantize_rows_ = torch.ops.emblib.quantize_rows_.default
quant_lookup = torch.ops.emblib.quant_lookup.default
quant_lookup_checked_ = torch.ops.emblib.quant_lookup_checked_.default


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a row."""
    numbers = -(-dim * bits // 8)
    return -(-(HEADER_BYTES + numbers) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def table_bytes(rows: int, dim: int, bits: int) -> int:
    """Return the bytes from a table to the next in the memory of a module."""
    return -(-rows * row_bytes(dim, bits) // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


@torch.library.register_fake("emblib::quantize_rows_")
def _(packed: Tensor, weights: Tensor, bits: int) -> None:
    return None


@torch.library.register_fake("emblib::quant_lookup")
def _(
    packed: Tensor,
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


@torch.library.register_fake("emblib::quant_lookup_checked_")
def _(
    packed: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: int,
    bits: int,
    output_dim: int,
    output_dtype: torch.dtype,
    check: int | None,
    violations: Tensor,
) -> list[Tensor]:
    shape = output_shape(features, indices, offsets, pooling, output_dim, variable=False)
    return [indices.new_empty(shape, dtype=output_dtype)]
