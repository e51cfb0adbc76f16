"""Operators that quantise rows: codes of 2, 4 or 8 bits, with scale and minimum in the row."""

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check_rows
from emblib.compat.fbgemm_operators.registry import operator


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    values = values.float()
    return values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def to_fused_8bit(t: Tensor) -> Tensor:
    """Quantise rows to 8 bits, followed by float32 scale and minimum."""
    check_rows("t", t)
    low, high = _range(t)
    width = high - low
    codes = ((t.float() - low) * (255.0 / (width + 1e-8))).round().clamp(0, 255)
    return torch.cat([codes.to(torch.uint8), _as_bytes(width / 255.0), _as_bytes(low)], dim=-1)


for _name in (
    "FloatToFused8BitRowwiseQuantized",
    "HalfToFused8BitRowwiseQuantized",
    "FloatOrHalfToFused8BitRowwiseQuantized",
):
    operator(f"{_name}(Tensor t) -> Tensor")(to_fused_8bit)


def _from_fused_8bit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    check_rows("input", rows)
    scale, low = rows[..., -8:].contiguous().view(torch.float32).unbind(-1)
    codes = rows[..., :-8].float()
    return (codes * scale.unsqueeze(-1) + low.unsqueeze(-1)).to(dtype)


@operator("Fused8BitRowwiseQuantizedToFloat(Tensor input) -> Tensor")
def fused_8bit_to_float(input: Tensor) -> Tensor:
    """Return the float32 values of rows of 8-bit codes."""
    return _from_fused_8bit(input, torch.float32)


@operator("Fused8BitRowwiseQuantizedToHalf(Tensor input) -> Tensor")
def fused_8bit_to_half(input: Tensor) -> Tensor:
    """Return the float16 values of rows of 8-bit codes."""
    return _from_fused_8bit(input, torch.float16)


@operator("FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(Tensor input, int bit_rate) -> Tensor")
def to_fused_nbit(input: Tensor, bit_rate: int) -> Tensor:
    """Quantise rows to `bit_rate` bits, lowest bits first, then float16 scale and minimum."""
    _check_bits(bit_rate)
    check_rows("input", input)
    per_byte = 8 // bit_rate
    if input.size(-1) % per_byte:
        raise ValueError(f"rows of {bit_rate} bits need a multiple of {per_byte} columns")
    low, high = _range(input)
    low = low.half()
    largest = 2**bit_rate - 1
    width = high - low.float()
    scale = torch.where(width == 0, 1.0, width / largest).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    inverse = 1.0 / scale.float()
    degenerate = inverse.isinf()
    scale = torch.where(degenerate, torch.ones_like(scale), scale)
    inverse = torch.where(degenerate, torch.ones_like(inverse), inverse)
    codes = ((input.float() - low.float()) * inverse).round().clamp(0, largest).to(torch.uint8)
    packed = codes[..., 0::per_byte].clone()
    for position in range(1, per_byte):
        packed |= codes[..., position::per_byte] << (position * bit_rate)
    return torch.cat([packed, _as_bytes(scale), _as_bytes(low)], dim=-1)


def _check_bits(bit_rate: int) -> None:
    if bit_rate not in (2, 4, 8):
        raise ValueError(f"bit_rate must be 2, 4 or 8, got {bit_rate}")


def unpack_nbit(rows: Tensor, bit_rate: int) -> Tensor:
    """Return the codes of packed rows, one per column."""
    if bit_rate == 8:
        return rows
    per_byte = 8 // bit_rate
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=rows.device) * bit_rate
    codes = (rows.unsqueeze(-1) >> shifts) & (2**bit_rate - 1)
    return codes.flatten(-2)


@operator("FusedNBitRowwiseQuantizedSBHalfToFloat(Tensor input, int bit_rate) -> Tensor")
def fused_nbit_to_float(input: Tensor, bit_rate: int) -> Tensor:
    """Return the float32 values of rows of `bit_rate`-bit codes."""
    _check_bits(bit_rate)
    check_rows("input", input)
    scale, low = input[..., -4:].contiguous().view(torch.float16).float().unbind(-1)
    codes = unpack_nbit(input[..., :-4], bit_rate).float()
    return codes * scale.unsqueeze(-1) + low.unsqueeze(-1)
