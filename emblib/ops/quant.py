"""Quantised tables: read-only rows of 2 to 32 bits per value, and the index before them.

Shapes and dtypes, with R rows, D dim, F features, L lookups:

- `packed` uint8: the rows of all tables, `row_bytes(D, format)` bytes each. A row of a format with
  2, 4 or 8 bits has its scale and offset, both float16, then the numbers q of its D values, then
  zeros up to a multiple of 4 bytes; columns fill a byte from its lowest bits on. Value d is
  `scale * q[d] + offset`. Rows of float16, bfloat16 and float32 have the values, then such zeros.
  Rows of FBGEMM's `IntNBitTableBatchedEmbeddingBagsCodegen` have the same format.
- `format` is the code of one format (`emblib.columns.RowFormatCode`). If the formats of features
  differ, it is minus the sum of 2^code of all codes in use (`format_argument`), and column TIER of
  `features` has the code of each feature
- `features` int64 `[F, 8]` as for dense tables (`emblib.ops.tbe`), except for TIER, and that
  `weight_offset` counts bytes of `packed`, a multiple of 4
- indices, offsets, bag layout, sample weights, pooling and output as for dense tables

`quantize_rows_(packed [R, row_bytes], weights [R, D], format)` writes the rows of float32, float16
or bfloat16 `weights`. Rows of integers have the same bits as those of FBGEMM on a CPU, except that
a minimum of -0 is 0 here. The offset of integers is the minimum of the row, the scale
`(maximum - offset) / (2^bits - 1)`, both rounded to nearest in float16; a scale of 0 is replaced
by 1. Each value is rounded to the nearest number, ties to even. So the error of a value is at most

    max(|scale| / 2, 2^-11 |maximum - offset| + 2^-25 (2^bits - 1)) + 2^-11 |minimum| + 2^-25.

The numbers of `FP8_E4M3` and `FP8_E5M2` are floats, at most 448 and 57,344. Their offset is 0, and
the scale is the smallest float16 for which the largest magnitude of the row is not beyond the
largest number. The error of a value is at most 2^-4 (E4M3) or 2^-3 (E5M2) of the value, or, if that
is more, 2^-10 or 2^-17 of the scale. Rows must be finite; in formats with a scale, values beyond
`MAX_MAGNITUDE` become about `MAX_MAGNITUDE`.

`quant_lookup` adds up `weight * scale * q + weight * offset` in float32 and in the order of the
lookups. It has no gradient. The definition is `emblib.reference.quant`. `quant_lookup_checked_`
also checks the bounds of the batch, as `tbe_lookup_checked_` of dense tables does.

`map_ids(index, tables, features, indices, offsets, bag_layout)` returns the stored row of each id,
int64 `[L]`, for tables with fewer rows than ids, or with keys. `tables` is int64 `[F, 6]`
(`emblib.columns.IndexColumn`). `index` is int64: the arrays and `hash_entries` of all features. An
id out of range, or in no bag, is returned unchanged, so that the bounds check of the lookup finds
it. An id in range without a stored row gets the row `MISSING` of its table; -1 is a row of zeros.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from emblib.columns import RowFormatCode
from emblib.ops.tbe import output_shape

HEADER_BYTES = 4
"""Bytes of the scale and the offset, with which a row begins."""

MAX_MAGNITUDE = torch.finfo(torch.float16).max
"""The largest magnitude of a value: offsets are float16."""

_ROW_ALIGNMENT = 4  # bytes: a GPU loads words
_TABLE_ALIGNMENT = 64  # bytes: a cache line

quantize_rows_ = torch.ops.emblib.quantize_rows_.default
quant_lookup = torch.ops.emblib.quant_lookup.default
quant_lookup_checked_ = torch.ops.emblib.quant_lookup_checked_.default
map_ids = torch.ops.emblib.map_ids.default


# A format is a `RowFormatCode`. Formats below FP16 have scales. A code is the number of bits of a
# value, except that 9 and 10 have 8 bits, and 17 has 16.


def has_scale(format: int) -> bool:
    """Return whether rows of a format begin with a scale and an offset."""
    return format < RowFormatCode.FP16


def bits_of(format: int) -> int:
    """Return the bits of a value in a format."""
    return min(format, 8) if has_scale(format) else format & ~1


def row_bytes(dim: int, format: int) -> int:
    """Return the bytes of a row of `dim` values, a multiple of 4."""
    num_bytes = HEADER_BYTES * has_scale(format) - (-dim * bits_of(format) // 8)
    return -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def table_bytes(rows: int, dim: int, format: int) -> int:
    """Return the bytes from a table to the next in the memory of a module."""
    return -(-rows * row_bytes(dim, format) // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


def format_argument(codes: Iterable[int]) -> int:
    """Return the argument `format` of lookups in tables whose formats have these codes.

    It is the code itself if all are equal, the code of INT8 if there are none, else minus the sum
    of 2^code of the distinct codes.
    """
    distinct = set(codes) or {RowFormatCode.INT8}
    return min(distinct) if len(distinct) == 1 else -sum(1 << code for code in distinct)


HASH_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as int64


def hash_bits(num_keys: int) -> int:
    """Return the number of hash bits of a table of which `num_keys` keys fill at most half."""
    return max(2 * num_keys - 1, 0).bit_length()


def hash_entries(keys: Tensor, rows: Tensor) -> tuple[Tensor, int]:
    """Return a hash table int64 `[entries, 2]` of distinct int64 keys, and its number of hash bits.

    An entry is a key and its row, or -1 twice if it is free. Keys are inserted in the order of
    their hashes, then of their values, each in the first free entry from its hash on. The last
    entry is free, so every search ends. The result does not depend on the order of `keys` and
    `rows`, int64 `[n]`.
    """
    bits = hash_bits(keys.numel())
    hashes = (keys ^ (keys >> 32 & 0xFFFFFFFF)) * HASH_FACTOR
    hashes = hashes >> (64 - bits) & ((1 << bits) - 1) if bits else torch.zeros_like(keys)
    order = keys.argsort()
    order = order[hashes[order].argsort(stable=True)]
    ranks = torch.arange(keys.numel(), device=keys.device)  # of the keys in `order`
    positions = ranks + (hashes[order] - ranks).cummax(0).values if keys.numel() else ranks
    last_position = int(positions[-1]) if keys.numel() else 0
    entries = torch.full((max(1 << bits, last_position + 2), 2), -1, device=keys.device)
    entries[positions, 0], entries[positions, 1] = keys[order], rows[order]
    return entries, bits


@torch.library.register_fake("emblib::quant_lookup")
def _(
    packed: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    sample_weights: Tensor | None,
    pooling: int,
    format: int,
    output_dim: int,
    output_dtype: torch.dtype,
) -> Tensor:
    is_flat = bag_layout is not None
    shape = output_shape(features, indices, offsets, pooling, output_dim, is_flat=is_flat)
    return indices.new_empty(shape, dtype=output_dtype)


@torch.library.register_fake("emblib::quant_lookup_checked_")
def _(
    packed: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: int,
    format: int,
    output_dim: int,
    output_dtype: torch.dtype,
    check: int | None,
    violations: Tensor,
) -> list[Tensor]:
    shape = output_shape(features, indices, offsets, pooling, output_dim, is_flat=False)
    return [indices.new_empty(shape, dtype=output_dtype)]


@torch.library.register_fake("emblib::map_ids")
def _(index: Tensor, tables: Tensor, features: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return indices.new_empty(indices.numel(), dtype=torch.int64)
