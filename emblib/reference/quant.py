"""Quantised tables in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.quant`, no native code, any device. `format` is a `RowFormatCode`: the
number of bits of an integer, or a code of a float. A row of a format with 2 to 8 bits per number
has a scale and an offset, both float16, then the numbers, then zeros up to a multiple of 4 bytes.
Value d of the row is `scale * number[d] + offset`. Other rows have the values, then such zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import FeatureColumn, IndexColumn, IndexKind, RowFormatCode
from emblib.reference import tbe
from emblib.specs import Pooling

_HEADER_BYTES = 4  # scale and offset
_ALIGNMENT_BYTES = 4
_FLOAT_DTYPES = {
    RowFormatCode.FP8_E4M3: torch.float8_e4m3fn,
    RowFormatCode.FP8_E5M2: torch.float8_e5m2,
    RowFormatCode.FP16: torch.float16,
    RowFormatCode.BF16: torch.bfloat16,
    RowFormatCode.FP32: torch.float32,
}
"""The dtype of the numbers of formats that are not integers."""


def quantize_rows(weights: Tensor, format: int) -> Tensor:
    """Pack float `weights` `[R, D]`, D >= 1, to rows uint8 `[R, row_bytes]` in `format`.

    The weights must be finite; not checked. FP16, BF16 and FP32 rows are the converted weights. In
    other formats the minimum and maximum of a row are clamped to the range of float16. Integers
    have the offset `min` and the scale `(max - offset) / (2^bits - 1)`, each rounded to float16.
    8-bit floats have the offset 0, and the smallest float16 scale for which the largest magnitude
    of the row fits the format. A scale of 0 is replaced by 1. Numbers are rounded to nearest, ties
    to even.
    """
    rows = weights.float()
    if format >= RowFormatCode.FP16:
        return _pad_row(rows.to(_FLOAT_DTYPES[RowFormatCode(format)]).view(torch.uint8))
    max_float16 = torch.finfo(torch.float16).max
    row_min, row_max = (  # + 0.0 turns -0 into 0
        extremum.clamp(-max_float16, max_float16) + 0.0
        for extremum in rows.aminmax(dim=1, keepdim=True)
    )
    if format in _FLOAT_DTYPES:
        dtype = _FLOAT_DTYPES[RowFormatCode(format)]
        max_number = torch.finfo(dtype).max
        row_magnitude = torch.maximum(-row_min, row_max)
        scale = (row_magnitude / max_number).half()
        is_too_small = scale.float() * max_number < row_magnitude
        scale = (scale.view(torch.int16) + is_too_small).view(torch.float16)  # the next float16
        offset = torch.zeros_like(scale)
    else:
        max_number = 2.0**format - 1
        offset = row_min.half()
        scale = ((row_max - offset.float()) / max_number).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    unrounded = (rows - offset.float()) * (1 / scale.float())
    if format in _FLOAT_DTYPES:
        numbers = unrounded.clamp(-max_number, max_number).to(dtype).view(torch.uint8)
    else:
        numbers = unrounded.clamp(0, max_number).round().to(torch.uint8)
    numbers = _pack_bits(numbers, format)
    header = torch.cat([scale, offset], dim=1).view(torch.uint8)
    return _pad_row(torch.cat([header, numbers], dim=1))


def _pad_row(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, -rows.size(1) % _ALIGNMENT_BYTES))


def _pack_bits(numbers: Tensor, format: int) -> Tensor:
    """Pack numbers uint8 `[R, D]` of 2 or 4 bits into bytes, the first number in the lowest bits.

    Numbers of other formats, which have 8 bits, are returned as they are.
    """
    numbers_per_byte = max(8 // format, 1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.size(1) % numbers_per_byte))
    packed_bytes = numbers[:, ::numbers_per_byte].clone()
    for i in range(1, numbers_per_byte):
        packed_bytes |= numbers[:, i::numbers_per_byte] << (i * format)
    return packed_bytes


def dequantize_rows(
    packed: Tensor, dim: int, format: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unpack rows uint8 `[R, row_bytes]` in `format` to values `[R, dim]`, computed in `dtype`."""
    if format >= RowFormatCode.FP16:
        numbers = packed.contiguous().view(_FLOAT_DTYPES[RowFormatCode(format)])
        return numbers[:, :dim].to(dtype)
    header, numbers = packed[:, :_HEADER_BYTES], packed[:, _HEADER_BYTES:]
    scale, offset = header.contiguous().view(torch.float16).to(dtype).split(1, dim=1)
    if format in _FLOAT_DTYPES:
        numbers = numbers.contiguous().view(_FLOAT_DTYPES[RowFormatCode(format)])
    elif format < 8:
        shifts = torch.arange(0, 8, format, dtype=torch.uint8, device=packed.device)
        numbers = (numbers.unsqueeze(2) >> shifts & (2**format - 1)).flatten(1)
    return numbers[:, :dim].to(dtype) * scale + offset


class Packed(NamedTuple):
    """The packed rows of all tables, uint8 `[bytes]`, and their `RowFormatCode`.

    A format of 0 or less: tables have different formats, which column TIER of `features` contains.
    """

    rows: Tensor
    format: int


def lookup(
    packed: Packed,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    output_dim: int = 0,
    extras: tbe.Extras = tbe.NO_EXTRAS,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantise the tables and pool each bag, in `dtype`; returns the output of `tbe.lookup`.

    WEIGHT_OFFSET of `features` counts bytes of `packed.rows`. The other arguments are those of
    `tbe.lookup`.
    """
    tables, float_features, first_element = [], features.clone(), 0
    float_features[:, FeatureColumn.TIER] = 0
    for f, (offset, _, rows, dim, _, code, *_) in enumerate(features.tolist()):
        format = packed.format if packed.format > 0 else code
        row_bytes = quantize_rows(torch.zeros(1, dim, device="cpu"), format).size(1)
        table = packed.rows[offset : offset + rows * row_bytes].view(rows, row_bytes)
        values = dequantize_rows(table, dim, format, dtype)
        tables.append(values.flatten())
        float_features[f, FeatureColumn.WEIGHT_OFFSET] = first_element
        first_element += values.numel()
    weights = torch.cat([*tables, torch.zeros(0, dtype=dtype, device=features.device)])
    return tbe.lookup(
        weights, float_features, indices, offsets, sample_weights, pooling, output_dim, extras
    )


def map_ids(index: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows, int64 `[L]`, of the ids of one feature.

    An id without an entry in the index gets the row MISSING. Ids outside of `[0, NUM_IDS)`, such as
    -1, are returned unchanged. A feature without an index returns all ids unchanged. If NUM_IDS is
    negative, every id is a key, also -1.

    Args:
        index: int64, the entries of all features. An array has one int32 row per id, two rows per
            element; a hash table has pairs (id, row). A row of -1 marks an empty entry.
        table: int64 `[6]`, the feature's row of `tables`, see `IndexColumn`.
        ids: int32 or int64 `[L]`.
    """
    kind, begin, num_entries, _, num_ids, missing_row = table.tolist()
    assert len(IndexColumn) == table.numel()
    if kind == IndexKind.NONE:
        return ids.long()
    stored_entries = index[begin:]
    if kind == IndexKind.ARRAY:
        pairs = list(enumerate(stored_entries.view(torch.int32)[:num_entries].tolist()))
    else:
        pairs = stored_entries[: 2 * num_entries].view(num_entries, 2).tolist()
    row_of_id = {key: row for key, row in pairs if row >= 0}
    are_in_range = [num_ids < 0 or 0 <= key < num_ids for key in ids.tolist()]
    return torch.tensor(
        [
            row_of_id.get(key, missing_row) if is_in_range else key
            for key, is_in_range in zip(ids.tolist(), are_in_range, strict=True)
        ],
        dtype=torch.int64,
        device=ids.device,
    )
