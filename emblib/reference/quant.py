"""Quantised tables in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.quant`, no native code, any device. A row of a format with 2 to 8 bits per
number is scale and offset, both float16, the numbers, and zeros up to a multiple of 4 bytes; value
d of the row is `scale * number[d] + offset`. Other formats have the values alone.
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
    """Pack `weights` `[R, D]` to rows uint8 `[R, row_bytes]`; `format` is a `RowFormatCode`.

    The weights must be finite; not checked. FP16, BF16 and FP32 rows are the converted weights. In
    other formats the range of a row is clamped to float16's. Integers have the offset `min`
    and the scale `(max - offset) / (2^bits - 1)`, each rounded to float16; 8-bit floats have the
    offset 0 and the smallest float16 scale with which the largest magnitude fits the format. A
    scale of 0 is replaced by 1. Numbers are rounded to nearest, ties to even.
    """
    rows = weights.float()
    if format >= RowFormatCode.FP16:
        return _pad_row(rows.to(_FLOAT_DTYPES[RowFormatCode(format)]).view(torch.uint8))
    largest = torch.finfo(torch.float16).max
    low, high = (  # + 0.0 turns -0 into 0
        extremum.clamp(-largest, largest) + 0.0 for extremum in rows.aminmax(dim=1, keepdim=True)
    )
    if format in _FLOAT_DTYPES:
        dtype = _FLOAT_DTYPES[RowFormatCode(format)]
        max_number = torch.finfo(dtype).max
        largest_value = torch.maximum(-low, high)
        scale = (largest_value / max_number).half()
        is_too_small = scale.float() * max_number < largest_value
        scale = (scale.view(torch.int16) + is_too_small).view(torch.float16)  # the next float16
        offset = torch.zeros_like(scale)
    else:
        max_number = 2.0**format - 1
        offset = low.half()
        scale = ((high - offset.float()) / max_number).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    steps = (rows - offset.float()) * (1 / scale.float())
    if format in _FLOAT_DTYPES:
        numbers = steps.clamp(-max_number, max_number).to(dtype).view(torch.uint8)
    else:
        numbers = steps.clamp(0, max_number).round().to(torch.uint8)
    numbers = _pack_bits(numbers, format)
    header = torch.cat([scale, offset], dim=1).view(torch.uint8)
    return _pad_row(torch.cat([header, numbers], dim=1))


def _pad_row(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, -rows.size(1) % _ALIGNMENT_BYTES))


def _pack_bits(numbers: Tensor, format: int) -> Tensor:
    """Pack numbers `[R, D]` of 2 or 4 bits into bytes, the first number in the lowest bits.

    Numbers of 8 bits are bytes already.
    """
    per_byte = max(8 // format, 1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.size(1) % per_byte))
    joined = numbers[:, ::per_byte].clone()
    for i in range(1, per_byte):
        joined |= numbers[:, i::per_byte] << (i * format)
    return joined


def dequantize_rows(
    packed: Tensor, dim: int, format: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unpack rows uint8 `[R, row_bytes]` of dim D to values `[R, D]`, computed in `dtype`."""
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

    A format of 0 or less stands for several formats; the column TIER of `features` has each.
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
    """Pool each bag of the dequantised rows, in `dtype`; other arguments as `tbe.lookup`.

    WEIGHT_OFFSET of `features` counts bytes of `packed.rows`.
    """
    tables, float_features, first_element = [], features.clone(), 0
    float_features[:, FeatureColumn.TIER] = 0
    for f, (offset, _, rows, dim, _, code, *_) in enumerate(features.tolist()):
        format = packed.format if packed.format > 0 else code
        width = quantize_rows(torch.zeros(1, dim), format).size(1)
        table = packed.rows[offset : offset + rows * width].view(rows, width)
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

    An id that the index does not have gets the row MISSING. Ids outside of `[0, NUM_IDS)`, such as
    -1, are returned unchanged, and without an index all ids are. With a negative NUM_IDS any id is
    a key, -1 too.

    Args:
        index: int64, the entries of all features. An array has one int32 row per id, two in an
            element; a hash table has pairs (id, row). A row of -1 is no entry.
        table: int64 `[6]`, the feature's row of `tables`, see `IndexColumn`.
        ids: `[L]`.
    """
    kind, begin, entries, _, num_ids, missing = table.tolist()
    assert len(IndexColumn) == table.numel()
    if kind == IndexKind.NONE:
        return ids.long()
    stored_entries = index[begin:]
    if kind == IndexKind.ARRAY:
        pairs = list(enumerate(stored_entries.view(torch.int32)[:entries].tolist()))
    else:
        pairs = stored_entries[: 2 * entries].view(entries, 2).tolist()
    row_of_id = {key: row for key, row in pairs if row >= 0}
    in_range = [num_ids < 0 or 0 <= key < num_ids for key in ids.tolist()]
    return torch.tensor(
        [
            row_of_id.get(key, missing) if is_in_range else key
            for key, is_in_range in zip(ids.tolist(), in_range, strict=True)
        ],
        dtype=torch.int64,
        device=ids.device,
    )
