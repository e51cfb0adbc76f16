"""Operators and functions that quantise messages to three formats: HFP8, FP8 and MX4.

HFP8: a value is a byte of sign, `ebits` exponent bits and 7 - `ebits` mantissa bits. Values are
rounded to nearest, ties to even. There are no infinities.

FP8: a row is multiplied by a scale and converted to HFP8 bytes, which are filled up to a multiple
of 4 bytes. The float32 scale and 4 bytes of 0 follow.

MX4: a row is divided into groups of values that share an exponent. A group has half a byte per
value (sign, 2 exponent bits and 1 mantissa bit; ties are rounded away from zero), then a byte with
the exponent.
"""

import enum

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import DTYPES, check, check_rows
from emblib.compat.fbgemm_operators.registry import operator

# of float32
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_MIN_NORMAL = 2.0**-126
_SCALE_BYTES = 8  # bytes of an FP8 row after its values: the scale, and zeros
_FP8_FORMATS = {True: (4, 15, 0.9375), False: (5, 31, 0.875)}
"""Exponent bits, exponent bias, and largest value of a scaled row, by the argument `forward`."""
_MX4_MAX_EXPONENT = 2  # exponent of the largest power of two in _MX4_VALUES, 4
_MX4_MANTISSA_BITS = 1
_MX4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_MX4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)


RoundingMode = enum.IntEnum("RoundingMode", "nearest floor even stochastic ceil", start=0)
"""How the exponent of a group of an MX4 message is rounded."""


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return `2 ** exponent`, exactly, for int32 exponents from -127 to 127."""
    bits = (exponent + _EXPONENT_BIAS) << _MANTISSA_BITS
    bits = bits.masked_fill(exponent == -_EXPONENT_BIAS, 1 << (_MANTISSA_BITS - 1))
    return bits.view(torch.float32)


@operator("FloatToHFP8Quantized")
def to_hfp8(input: Tensor, ebits: int, exponent_bias: int, max_pos: float) -> Tensor:
    """Convert `[..., D]` to HFP8 bytes, uint8 of the same shape.

    Args:
        input: floating-point values.
        ebits: number of exponent bits.
        exponent_bias: number that is added to exponents, to store them.
        max_pos: largest magnitude; values are clamped to it, and a NaN becomes +-`max_pos`.

    Raises:
        RuntimeError: `input` has no dimension.
    """
    check_rows("input", input, min_dim=1)
    mantissa_bits = 7 - ebits
    values = input.float()
    magnitudes = values.abs().fmin(torch.full_like(values[..., :1], max_pos))
    # Adding a power of two that is larger by 2 ** (23 - mantissa_bits) rounds the low bits off.
    powers_of_two = magnitudes.view(torch.int32) & (0xFF << _MANTISSA_BITS)
    rounding_terms = (powers_of_two + ((_MANTISSA_BITS - mantissa_bits) << _MANTISSA_BITS)).view(
        torch.float32
    )
    rounded_bits = ((rounding_terms + magnitudes) - rounding_terms).view(torch.int32)
    normal_codes = (rounded_bits - ((_EXPONENT_BIAS - exponent_bias) << _MANTISSA_BITS)) >> (
        _MANTISSA_BITS - mantissa_bits
    )
    subnormal_codes = (
        magnitudes + 2.0 ** (_MANTISSA_BITS + 1 - exponent_bias - mantissa_bits)
    ).view(torch.int32)
    codes = torch.where(
        magnitudes >= 2.0 ** (1 - exponent_bias), normal_codes, subnormal_codes & 0x7F
    )
    return ((codes & 0x7F) | (values.signbit().int() << 7)).to(torch.uint8)


@operator("HFP8QuantizedToFloat")
def hfp8_to_float(input: Tensor, ebits: int, exponent_bias: int) -> Tensor:
    """Convert HFP8 bytes to float32 values of the same shape; `to_hfp8` has the arguments."""
    codes = input.int()
    unscaled = ((codes & 0x7F) << (_MANTISSA_BITS - 7 + ebits)).view(torch.float32)
    # As a float32 the bits are the value over a power of two, for subnormal bytes too.
    factor = 2.0 ** (_EXPONENT_BIAS - exponent_bias)
    return torch.where(codes > 0x7F, -1.0, 1.0) * (unscaled * factor)


@operator("FloatToFP8RowwiseQuantized")
def to_fp8_rows(t: Tensor, forward: bool) -> Tensor:
    """Quantise rows `[..., D]` to FP8 rows, uint8 `[..., padded D + 8]`.

    D is padded with zeros to a multiple of 4. Values have 4 exponent bits if `forward`, else 5. A
    tensor without rows (of fewer than 2 dimensions) raises RuntimeError.
    """
    check_rows("t", t)
    ebits, bias, max_pos = _FP8_FORMATS[forward]
    values = functional.pad(t.float(), (0, -t.size(-1) % 4))
    has_values = values.size(-1) > 0
    magnitude = values.abs().amax(-1, keepdim=True) if has_values else values.sum(-1, True)
    scale = max_pos / (magnitude + 1e-20)
    scale_and_zero = torch.cat([scale, torch.zeros_like(scale)], dim=-1)
    codes = to_hfp8(values * scale, ebits, bias, max_pos)
    return torch.cat([codes, scale_and_zero.view(torch.uint8)], dim=-1)


@operator("FP8RowwiseQuantizedToFloat")
def fp8_rows_to_float(input: Tensor, forward: bool, output_dtype: int = 0) -> Tensor:
    """Return the values of FP8 rows, `[..., padded D]`.

    Args:
        input: result of `to_fp8_rows`.
        forward: the `forward` of `to_fp8_rows`.
        output_dtype: code of the dtype of the result, a key of `checks.DTYPES`.

    Raises:
        RuntimeError: `output_dtype` is another code, or `input` cannot be FP8 rows.
    """
    check_rows("input", input)
    check(
        input.dtype == torch.uint8 and input.size(-1) >= _SCALE_BYTES,
        f"input must be uint8 rows of at least {_SCALE_BYTES} bytes, got {input.dtype} "
        f"{list(input.shape)}",
    )
    check(output_dtype in DTYPES, f"output_dtype must be one of {[*DTYPES]}, got {output_dtype}")
    ebits, bias, _ = _FP8_FORMATS[forward]
    codes = input[..., :-_SCALE_BYTES]
    scale = input[..., -_SCALE_BYTES:].contiguous().view(torch.float32)[..., :1]
    return (hfp8_to_float(codes, ebits, bias) / scale).to(DTYPES[output_dtype])


def _shared_exponent(group_maxima: Tensor, rounding: int) -> Tensor:
    """Return the rounded exponents of magnitudes, as float32; `rounding` is a `RoundingMode`.

    The exponent is NaN or infinite if rounding a magnitude overflows float32.
    """
    magnitudes = group_maxima.masked_fill(group_maxima == 0, _MIN_NORMAL)
    if rounding in (RoundingMode.even, RoundingMode.stochastic):
        num_dropped_bits = _MANTISSA_BITS - _MX4_MANTISSA_BITS
        rounding_term: Tensor | int = (1 << (num_dropped_bits - 1)) - 1
        if rounding == RoundingMode.stochastic:
            noise = torch.randint_like(magnitudes, high=2**31 - 1, dtype=torch.int32)
            rounding_term = noise & ((1 << num_dropped_bits) - 1)
        magnitudes = (magnitudes.view(torch.int32) + rounding_term).view(torch.float32)
    exponent = magnitudes.log2()
    if rounding == RoundingMode.ceil:
        return exponent.ceil()
    return (exponent + 0.5).floor() if rounding == RoundingMode.nearest else exponent.floor()


def to_mx4(values: Tensor, group_size: int = 32, rounding: int = RoundingMode.even) -> Tensor:
    """Quantise `[..., D]` to MX4 groups of `group_size` values along the last dimension.

    Args:
        values: rows; D is padded with zeros to a multiple of `group_size`.
        group_size: even number of values per group.
        rounding: how the exponent of a group is rounded, a `RoundingMode`.

    Returns:
        uint8 `[..., num_groups * (group_size / 2 + 1)]`; empty values keep their shape.

    Raises:
        RuntimeError: `group_size` is odd, or not positive, or `values` have no dimension.
        ValueError: `rounding` is not a member of `RoundingMode`.
    """
    _check_group_size(group_size)
    check_rows("values", values, min_dim=1)
    rounding = RoundingMode(rounding)
    if values.numel() == 0:
        return torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    num_padding_columns = -values.size(-1) % group_size
    groups = functional.pad(values.float(), (0, num_padding_columns)).reshape(-1, group_size)
    exponent = _shared_exponent(groups.abs().amax(1, keepdim=True), rounding)
    # The exponent is NaN or infinite if the group has such values, or if rounding overflowed.
    exponent = exponent.nan_to_num(128.0, posinf=128.0) - _MX4_MAX_EXPONENT
    exponent = exponent.clamp(-127, 125).int()
    scaled_groups = groups / _power_of_two(exponent)
    midpoints = scaled_groups.new_tensor(_MX4_MIDPOINTS)
    signs = scaled_groups.signbit().long() << 3
    codes = torch.bucketize(scaled_groups.abs(), midpoints, right=True) | signs
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return (
        torch.cat([packed, exponent + _EXPONENT_BIAS], dim=1)
        .to(torch.uint8)
        .view(*values.shape[:-1], -1)
    )


def mx4_to_float(packed: Tensor, group_size: int = 32) -> Tensor:
    """Return the float32 values of MX4 groups, `[..., num_groups * group_size]`.

    The zeros with which `to_mx4` padded the rows are included. Empty `packed` keeps its shape.

    Args:
        packed: the result of `to_mx4`.
        group_size: the `group_size` of `to_mx4`.

    Raises:
        RuntimeError: `group_size` is odd or not positive, or rows are not whole groups.
    """
    _check_group_size(group_size)
    check_rows("packed", packed, min_dim=1)
    group_bytes = group_size // 2 + 1
    if packed.numel() == 0:
        return torch.empty(packed.shape, device=packed.device)
    check(
        packed.size(-1) % group_bytes == 0,
        f"packed must be rows of whole groups of {group_bytes} bytes (group_size = {group_size}), "
        f"got {list(packed.shape)}",
    )
    groups = packed.reshape(-1, group_bytes).int()
    codes = torch.stack([groups[:, :-1] & 15, groups[:, :-1] >> 4], dim=-1).flatten(1)
    values = torch.tensor(_MX4_VALUES, device=packed.device)
    values = torch.cat([values, 0 - values])[codes]  # code 8 is +0, as FBGEMM has it
    return (values * _power_of_two(groups[:, -1:] - _EXPONENT_BIAS)).view(*packed.shape[:-1], -1)


def _check_group_size(group_size: int) -> None:
    check(
        group_size > 0 and group_size % 2 == 0,
        f"group_size must be even and positive, as two values share a byte, got {group_size}",
    )
