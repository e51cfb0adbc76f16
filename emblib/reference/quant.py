"""Quantised tables in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.quant`, no native code, any device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.reference import tbe
from emblib.specs import Pooling


def quantize_rows(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack `weights` `[R, D]` to numbers uint8 `[R, bytes]` and scales float32 `[R, 2]`."""
    rows, levels = weights.float(), 2**bits - 1
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = high / levels - low / levels
    steps = torch.where(scale > 0, (rows - low) / scale, 0.0)
    numbers = steps.clamp(0, levels).round().to(torch.uint8)
    if bits == 4:
        numbers = torch.nn.functional.pad(numbers, (0, numbers.size(1) % 2))
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return numbers, torch.cat([scale, low], dim=1)


def dequantize_rows(values: Tensor, scales: Tensor, dim: int, bits: int) -> Tensor:
    """Unpack numbers `[R, bytes]` to rows `[R, D]`, in the dtype of `scales`."""
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=2).flatten(1)
    return values[:, :dim].to(scales.dtype) * scales[:, :1] + scales[:, 1:]


class Packed(NamedTuple):
    """The tables of a module: numbers and scales, one after the other, and bits per number."""

    values: Tensor
    scales: Tensor
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
) -> Tensor:
    """Pool each bag of the dequantised rows, in the dtype of the scales."""
    values, scales, bits = packed
    tables, plain, begin = [], features.clone(), 0
    for f, (offset, row_base, rows, dim, *_) in enumerate(features.tolist()):
        nbytes = -(-dim * bits // 8)
        numbers = values[offset : offset + rows * nbytes].view(rows, nbytes)
        table = dequantize_rows(numbers, scales[row_base : row_base + rows], dim, bits)
        tables.append(table.flatten())
        plain[f, 0] = begin
        begin += table.numel()
    weights = torch.cat([*tables, scales.new_zeros(0)])
    return tbe.lookup(weights, plain, indices, offsets, sample_weights, pooling, output_dim, extras)
