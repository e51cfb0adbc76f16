"""Operators that quantise and dequantise rows, and conversions of bfloat16.

A quantised row has codes of 2, 4 or 8 bits, one per value, and a scale and a minimum: a value is
about `code * scale + minimum`. Tensors of rows need at least two dimensions, else RuntimeError is
raised; `unpack_nbit` needs one, and conversions of bfloat16 take any shape.
"""

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import DTYPES, check, check_rows
from emblib.compat.fbgemm_operators.registry import operator

_MAX_CODE_8BIT = 255.0
_RANGE_EPS = 1e-8  # FBGEMM's; prevents a division by 0 for rows of one value


def _minimum_and_maximum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each row, float32 `[..., 1]`; 0 for rows without columns."""
    values = values.float()
    if not values.size(-1):
        return values.new_zeros(*values.shape[:-1], 1), values.new_zeros(*values.shape[:-1], 1)
    return values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)


def _as_bytes(values: Tensor) -> Tensor:
    return _contiguous_copy(values).view(torch.uint8)


def _contiguous_copy(values: Tensor) -> Tensor:
    """Return a contiguous copy at an aligned address, also of an empty tensor."""
    return values.clone(memory_format=torch.contiguous_format)


def to_fused_8bit(t: Tensor) -> Tensor:
    """Quantise rows `[..., D]` to uint8 `[..., D + 8]`: codes, then float32 scale and minimum.

    Rows of any real dtype are converted to float32 first.
    """
    check_rows("t", t)
    minimum, maximum = _minimum_and_maximum(t)
    value_range = maximum - minimum
    codes = (t.float() - minimum) * (_MAX_CODE_8BIT / (value_range + _RANGE_EPS))
    codes = codes.round().clamp(0, _MAX_CODE_8BIT).to(torch.uint8)
    return torch.cat([codes, _as_bytes(value_range / _MAX_CODE_8BIT), _as_bytes(minimum)], dim=-1)


for _source in ("Float", "Half", "FloatOrHalf"):
    operator(f"{_source}ToFused8BitRowwiseQuantized(Tensor t) -> Tensor")(to_fused_8bit)


@operator("Fused8BitRowwiseQuantizedToFloatOrHalf")
def fused_8bit_to_float(
    input: Tensor,
    output_dtype: int = 0,
    scale_bias_last: bool = True,
    quant_padding_float_type: bool = True,
) -> Tensor:
    """Return the values of rows of 8-bit codes, `[..., D]`.

    Args:
        input: uint8 rows of D codes, a scale and a minimum.
        output_dtype: code of the dtype of the result: 0 for float32, 1 for float16, 5 for bfloat16.
        scale_bias_last: whether scale and minimum are at the end of a row, not at its start.
        quant_padding_float_type: whether scale and minimum are float32, not float16. float16 needs
            `scale_bias_last=False`.

    Raises:
        RuntimeError: `output_dtype` is another code, scale and minimum are float16 and at the end
            of a row, or `input` is not uint8 or has rows without room for scale and minimum.
    """
    check(
        quant_padding_float_type or not scale_bias_last,
        "float16 scale and minimum (quant_padding_float_type=False) are at the start of a row",
    )
    scale_dtype = torch.float32 if quant_padding_float_type else torch.float16
    codes, scale, minimum = _split_rows(input, scale_dtype, scale_bias_last=scale_bias_last)
    return _decode(codes, scale, minimum, output_dtype)


def _split_rows(
    rows: Tensor, scale_dtype: torch.dtype, *, scale_bias_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of the codes `[..., C]`, and scale and minimum, float32 `[..., 1]`.

    In `rows` scale and minimum are of `scale_dtype`, after the codes or before them.
    """
    check_rows("input", rows)
    num_bytes = 2 * scale_dtype.itemsize  # of scale and minimum
    check(
        rows.dtype == torch.uint8 and rows.size(-1) >= num_bytes,
        f"input must be uint8 rows of at least {num_bytes} bytes, the scale and minimum, got "
        f"{rows.dtype} {list(rows.shape)}",
    )
    if scale_bias_last:
        codes, scale_and_minimum = rows.split([rows.size(-1) - num_bytes, num_bytes], dim=-1)
    else:
        scale_and_minimum, codes = rows.split([num_bytes, rows.size(-1) - num_bytes], dim=-1)
    values = _contiguous_copy(scale_and_minimum).view(scale_dtype).float()
    return codes, values[..., :1], values[..., 1:]


def _decode(codes: Tensor, scale: Tensor, minimum: Tensor, output_dtype: int) -> Tensor:
    """Return `codes * scale + minimum` in the dtype with the code `output_dtype`."""
    check(output_dtype in DTYPES, f"output_dtype must be one of {[*DTYPES]}, got {output_dtype}")
    return (codes.float() * scale + minimum).to(DTYPES[output_dtype])


for _target, _code in (("Float", 0), ("Half", 1), ("Bfloat16", 5)):
    operator(f"Fused8BitRowwiseQuantizedTo{_target}(Tensor input) -> Tensor")(
        lambda input, code=_code: fused_8bit_to_float(input, code)
    )


def to_fused_nbit(input: Tensor, bit_rate: int) -> Tensor:
    """Quantise rows `[..., D]` to codes of `bit_rate` bits, then float16 scale and minimum.

    The result is uint8 `[..., D * bit_rate / 8 + 4]`; the first code is in the lowest bits. Rows of
    any real dtype are converted to float32 first. A row whose minimum or scale exceeds float16,
    65,504, decodes to NaN, as in FBGEMM.

    Raises:
        RuntimeError: `input` has fewer than two dimensions.
        ValueError: the bit rate is not 2, 4 or 8, or the codes of a row do not fill whole bytes.
    """
    _check_bit_rate(bit_rate)
    check_rows("input", input)
    codes_per_byte = 8 // bit_rate
    if input.size(-1) % codes_per_byte:
        raise ValueError(f"rows of {bit_rate} bits need a multiple of {codes_per_byte} columns")
    minimum, maximum = _minimum_and_maximum(input)
    minimum = minimum.half()
    max_code = 2**bit_rate - 1
    value_range = maximum - minimum.float()
    scale = torch.where(value_range == 0, 1.0, value_range / max_code).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    inverse_scale = 1.0 / scale.float()
    is_too_small = inverse_scale.isinf()
    scale = torch.where(is_too_small, torch.ones_like(scale), scale)
    inverse_scale = torch.where(is_too_small, torch.ones_like(inverse_scale), inverse_scale)
    codes = (
        ((input.float() - minimum.float()) * inverse_scale)
        .round()
        .clamp(0, max_code)
        .to(torch.uint8)
    )
    packed = codes[..., 0::codes_per_byte].clone()
    for code_position in range(1, codes_per_byte):
        packed |= codes[..., code_position::codes_per_byte] << (code_position * bit_rate)
    return torch.cat([packed, _as_bytes(scale), _as_bytes(minimum)], dim=-1)


for _source in ("Float", "Half", "FloatOrHalf"):
    operator(f"{_source}ToFusedNBitRowwiseQuantizedSBHalf(Tensor input, int bit_rate) -> Tensor")(
        to_fused_nbit
    )


def _check_bit_rate(bit_rate: int) -> None:
    if bit_rate not in (2, 4, 8):
        raise ValueError(f"bit_rate must be 2, 4 or 8, got {bit_rate}")


def unpack_nbit(rows: Tensor, bit_rate: int) -> Tensor:
    """Return the codes of packed uint8 rows, one per column; for 8 bits, return `rows` itself.

    `bit_rate` is 2, 4 or 8.
    """
    if bit_rate == 8:
        return rows
    codes_per_byte = 8 // bit_rate
    shifts = torch.arange(codes_per_byte, dtype=torch.uint8, device=rows.device) * bit_rate
    codes = (rows.unsqueeze(-1) >> shifts) & (2**bit_rate - 1)
    return codes.flatten(-2)


@operator("FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf")
def fused_nbit_to_float(
    input: Tensor, bit_rate: int, output_dtype: int = 0, scale_bias_last: bool = True
) -> Tensor:
    """Return the values of rows of `bit_rate`-bit codes with float16 scale and minimum, `[..., D]`.

    `output_dtype` and `scale_bias_last` are as for `fused_8bit_to_float`.

    Raises:
        RuntimeError: `output_dtype` is another code, or `input` is not uint8 or has rows without
            room for scale and minimum.
        ValueError: the bit rate is not 2, 4 or 8.
    """
    _check_bit_rate(bit_rate)
    packed, scale, minimum = _split_rows(input, torch.float16, scale_bias_last=scale_bias_last)
    return _decode(unpack_nbit(packed, bit_rate), scale, minimum, output_dtype)


for _target, _code in (("Float", 0), ("Half", 1)):
    operator(f"FusedNBitRowwiseQuantizedSBHalfTo{_target}(Tensor input, int bit_rate) -> Tensor")(
        lambda input, bit_rate, code=_code: fused_nbit_to_float(input, bit_rate, code)
    )


@operator("FloatToBfloat16Quantized")
def to_bfloat16(input: Tensor) -> Tensor:
    """Round to the nearest bfloat16, ties away from zero.

    As in FBGEMM, a NaN may become 0, -0 or infinite.
    """
    bits = input.float().view(torch.int32) + (1 << 15)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


@operator("Bfloat16QuantizedToFloat")
def bfloat16_to_float(input: Tensor) -> Tensor:
    """Convert bfloat16 values to float32."""
    return input.float()
