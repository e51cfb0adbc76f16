"""Quantised tables in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.quant`, no native code, any device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.reference import tbe
from emblib.specs import Pooling

_HEADER, _ALIGNMENT = 4, 4  # bytes


def quantize_rows(weights: Tensor, bits: int) -> Tensor:
    """Pack `weights` `[R, D]` to rows uint8 `[R, row_bytes]`."""
    largest = torch.finfo(torch.float16).max
    rows, levels = weights.float(), 2**bits - 1
    low, high = (x.clamp(-largest, largest) for x in rows.aminmax(dim=1, keepdim=True))
    offset = _half_at_most(low)
    scale = -_half_at_most(-((high - offset.float()) / levels))
    steps = torch.where(scale > 0, (rows - offset.float()) / scale.float(), 0.0)
    numbers = steps.clamp(0, levels).round().to(torch.uint8)
    if bits == 4:
        numbers = torch.nn.functional.pad(numbers, (0, numbers.size(1) % 2))
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    header = torch.cat([scale, offset], dim=1).view(torch.uint8)
    filling = -(_HEADER + numbers.size(1)) % _ALIGNMENT
    return torch.nn.functional.pad(torch.cat([header, numbers], dim=1), (0, filling))


def _half_at_most(values: Tensor) -> Tensor:
    """Round float32 values down to float16."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    below = torch.where(bits < 0, bits + 1, bits - 1)  # the sign is the highest bit
    return torch.where(nearest.float() > values, below, bits).view(torch.float16)


def dequantize_rows(
    packed: Tensor, dim: int, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unpack rows uint8 `[R, row_bytes]` to values `[R, D]` of `dtype`."""
    header, numbers = packed[:, :_HEADER], packed[:, _HEADER:]
    scale, offset = header.contiguous().view(torch.float16).to(dtype).split(1, dim=1)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).flatten(1)
    return numbers[:, :dim].to(dtype) * scale + offset


class Packed(NamedTuple):
    """The tables of a module: rows, one after the other, and bits per number."""

    rows: Tensor
    bits: int


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
    """Pool each bag of the dequantised rows, in `dtype`."""
    tables, plain, begin = [], features.clone(), 0
    for f, (offset, _, rows, dim, *_) in enumerate(features.tolist()):
        width = -(-(_HEADER + -(-dim * packed.bits // 8)) // _ALIGNMENT) * _ALIGNMENT
        table = packed.rows[offset : offset + rows * width].view(rows, width)
        values = dequantize_rows(table, dim, packed.bits, dtype)
        tables.append(values.flatten())
        plain[f, 0] = begin
        begin += values.numel()
    weights = torch.cat([*tables, torch.zeros(0, dtype=dtype, device=features.device)])
    return tbe.lookup(weights, plain, indices, offsets, sample_weights, pooling, output_dim, extras)
