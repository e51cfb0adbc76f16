"""FBGEMM's codecs of messages between ranks, and its modules that permute pooled embeddings.

`NAMES`, at the end, has the names of FBGEMM's modules for which `fbgemm_modules` reads this file.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emblib.compat.checks import check_flags
from emblib.compat.fbgemm_operators import messages, pooled, rowwise
from emblib.compat.fbgemm_operators.messages import RoundingMode
from emblib.compat.fbgemm_types import SparseType, as_member

# Bytes of a row after its values: scale and minimum of INT8, scale and 0 of FP8.
_ROW_SCALE_BYTES = 8
_HALF_DTYPES = {SparseType.FP16: torch.float16, SparseType.BF16: torch.bfloat16}


@dataclass
class QuantizationContext:
    """Sizes and options of one message, which `QuantizedCommCodec.create_context` makes.

    Attributes:
        row_dim: number of values per row of INT8 and FP8.
        row_dim_quant: number of bytes per encoded row; `encode` sets it for INT8 and FP8 rows.
        mx_group_size: number of values per group of MX4.
        rounding_mode: how MX4 exponents are rounded; None is `even`.
        padded_dim_sum_per_rank: columns of each rank with padding; `padded_size` sets it.
    """

    row_dim: int = 32
    row_dim_quant: int = -1
    mx_group_size: int = 32
    rounding_mode: RoundingMode | None = RoundingMode.even
    padded_dim_sum_per_rank: list[int] | None = None


def fp32_to_mx4(
    tensor: Tensor,
    group_size: int = 32,
    ebits: int = 2,
    mbits: int = 1,
    rounding_mode: RoundingMode | int | None = RoundingMode.even,
    stochastic_casting: bool = False,
    use_triton: bool = True,
) -> Tensor:
    """Quantise `[..., D]` to MX4, see `messages.to_mx4`.

    Args:
        tensor: rows `[..., D]`.
        group_size: number of values per group, even.
        ebits: number of exponent bits, which must be 2.
        mbits: number of mantissa bits, which must be 1.
        rounding_mode: how exponents are rounded; None is `even`.
        stochastic_casting: flag that must be False.
        use_triton: ignored.

    Raises:
        NotImplementedError: `ebits`, `mbits` or `stochastic_casting` has another value.
        RuntimeError: `group_size` is odd, or not positive, or `tensor` has no dimension.
        ValueError: `rounding_mode` is not a `RoundingMode`.
    """
    if (ebits, mbits) != (2, 1) or stochastic_casting:
        raise NotImplementedError(
            "MX4 values have 2 exponent bits and 1 mantissa bit, rounded to nearest, got "
            f"ebits={ebits}, mbits={mbits}, stochastic_casting={stochastic_casting}"
        )
    rounding = RoundingMode.even if rounding_mode is None else rounding_mode
    return messages.to_mx4(tensor, group_size, int(rounding))


def mx4_to_float(
    tensor: Tensor,
    group_size: int = 32,
    use_triton: bool = True,
    ebits: int = 2,
    mbits: int = 1,
    output_dtype: SparseType | None = None,
) -> Tensor:
    """Return the values of MX4 groups, see `messages.mx4_to_float`.

    Args:
        tensor: result of `fp32_to_mx4`.
        group_size: number of values per group.
        use_triton: ignored.
        ebits: number of exponent bits, which must be 2.
        mbits: number of mantissa bits, which must be 1.
        output_dtype: FP32, which None means, or BF16.

    Raises:
        NotImplementedError: `ebits` or `mbits` has another value.
        RuntimeError: `group_size` is odd or not positive, or rows are not whole groups.
        ValueError: `output_dtype` is another format.
    """
    kind = SparseType.FP32 if output_dtype is None else as_member(SparseType, output_dtype)
    if kind not in (SparseType.FP32, SparseType.BF16):
        raise ValueError(f"MX4 is decoded to FP32 or BF16, whose exponents suffice, not to {kind}")
    if (ebits, mbits) != (2, 1):
        raise NotImplementedError("MX4 values have 2 exponent bits and 1 mantissa bit")
    return messages.mx4_to_float(tensor, group_size).to(kind.as_dtype())


def fp32_to_fp16_with_clamp(tensor: Tensor) -> Tensor:
    """Convert to float16, clamped to its largest finite values."""
    return _clamp(tensor, torch.float16)


def fp32_to_bf16_with_clamp(tensor: Tensor) -> Tensor:
    """Convert to bfloat16, clamped to its largest finite values."""
    return _clamp(tensor, torch.bfloat16)


def _clamp(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    max_value = torch.finfo(dtype).max
    return tensor.clamp(-max_value, max_value).to(dtype)


def fp32_to_hfp8_with_clamp(
    tensor: Tensor, ebits: int = 4, mbits: int = 3, bias: int = 15
) -> Tensor:
    """Convert to HFP8 bytes of `ebits` exponent and 7 - `ebits` mantissa bits.

    Values are clamped to the largest one of `mbits` mantissa bits. `messages.to_hfp8` converts.
    """
    max_value = 2.0 ** (2**ebits - 2 - bias) * (2 - 2.0**-mbits)
    return messages.to_hfp8(tensor, ebits, bias, max_value)


def hfp8_to_fp32(tensor: Tensor, ebits: int = 4, bias: int = 15) -> Tensor:
    """Return the float32 values of HFP8 bytes; `messages.hfp8_to_float` converts."""
    return messages.hfp8_to_float(tensor.view(torch.uint8), ebits, bias)


class QuantizedCommCodec:
    """Encode and decode messages between ranks, with the interface of FBGEMM's class.

    INT8 messages have rows of 32 values, with a scale and a minimum per row. FP8 messages have rows
    of `row_dim` values with a scale, or without `row_dim` no rows and no scales. All formats work
    on CPUs as well.

    Args:
        comm_precision: format of the messages: FP32, FP16, BF16, INT8, FP8 or MX4.
        loss_scale: factor of the values of FP16 and BF16 messages; `decode` divides by it. None for
            none. Other formats ignore it.
        row_dim: number of values per FP8 row, or per MX4 group; None for FP8 without rows, and for
            MX4 groups of 32. Other formats ignore it.
        is_fwd: whether FP8 rows have 4 exponent bits, not 5; FP8 without rows always has 4.
        rounding_mode: how MX4 exponents are rounded; None is `even`.
        output_dtype: format of decoded FP8 rows and MX4 messages; None is FP32.

    Raises:
        NotImplementedError: `comm_precision` is another format.
    """

    def __init__(
        self,
        comm_precision: SparseType,
        loss_scale: float | None = None,
        row_dim: int | None = None,
        is_fwd: bool = True,
        rounding_mode: RoundingMode | None = None,
        output_dtype: SparseType | None = None,
    ) -> None:
        self._precision = as_member(SparseType, comm_precision)
        supported = (
            *_HALF_DTYPES,
            SparseType.FP32,
            SparseType.INT8,
            SparseType.FP8,
            SparseType.MX4,
        )
        if self._precision not in supported:
            raise NotImplementedError(
                f"messages of {self._precision.name} are not supported; use one of "
                f"{', '.join(kind.name for kind in supported)}"
            )
        self._loss_scale = loss_scale if self._precision in _HALF_DTYPES else None
        self._row_dim = -1 if row_dim is None else row_dim
        if row_dim is None and self._precision is SparseType.MX4:
            self._row_dim = QuantizationContext().mx_group_size
        check_flags(is_fwd=is_fwd)
        self._is_fwd = is_fwd
        self._rounding = RoundingMode.even if rounding_mode is None else rounding_mode
        output_format = SparseType.FP32 if output_dtype is None else output_dtype
        self._output_format = as_member(SparseType, output_format)

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the message of some values.

        FP16 and BF16 clamp to the largest finite values. FP32 returns the input itself.

        Args:
            input_tensor: values of any shape; for rows and groups a multiple of their length.
            ctx: result of `create_context`. None raises ValueError for INT8, omits the scales of
                FP8, and means groups of 32 for MX4.

        Returns:
            flat bytes for INT8, MX4 and FP8 rows; otherwise the shape of the input, in
            `quantized_dtype`.
        """
        if self._loss_scale is not None:
            input_tensor = input_tensor * self._loss_scale
        if self._precision in _HALF_DTYPES:
            return _clamp(input_tensor, _HALF_DTYPES[self._precision])
        if self._precision is SparseType.FP32:
            return input_tensor
        if self._precision is SparseType.MX4:
            ctx = ctx or QuantizationContext()
            return fp32_to_mx4(
                input_tensor, ctx.mx_group_size, rounding_mode=ctx.rounding_mode
            ).view(-1)
        if self._has_row_scales(ctx):
            ctx = self._require_context(ctx)
            rows = input_tensor.reshape(-1, ctx.row_dim)
            if self._precision is SparseType.FP8:
                rows = messages.to_fp8_rows(rows, self._is_fwd)
            else:
                rows = rowwise.to_fused_8bit(rows)
            ctx.row_dim_quant = rows.size(1)
            return rows.view(-1)
        return fp32_to_hfp8_with_clamp(input_tensor)

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the values of a message: `output_dtype` for FP8 rows and MX4, else float32.

        `ctx` is the context with which the message was encoded. Values of INT8 and of FP8 rows are
        flat; other values have the shape of the message.
        """
        if self._precision is SparseType.MX4:
            group_size = (ctx or QuantizationContext()).mx_group_size
            return mx4_to_float(input_tensor, group_size, output_dtype=self._output_format)
        if self._precision is SparseType.FP8 and not self._has_row_scales(ctx):
            return hfp8_to_fp32(input_tensor)
        if self._has_row_scales(ctx):
            row_dim = self._require_context(ctx).row_dim
            rows = input_tensor.view(-1, _row_nbytes(row_dim, self._precision))
            if self._precision is SparseType.INT8:
                return rowwise.fused_8bit_to_float(rows).view(-1)
            values = messages.fp8_rows_to_float(rows, self._is_fwd, self._output_format.as_int())
            return values[:, :row_dim].flatten()
        values = input_tensor.float()
        return values if self._loss_scale is None else values / self._loss_scale

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Return the number of elements of the message of `input_len` values.

        Raises:
            AssertionError: `input_len` is not a multiple of the values per row or group.
            ValueError: `ctx` is None for INT8 or MX4.
        """
        if self._precision is SparseType.MX4:
            row_dim = self._require_context(ctx).mx_group_size
            row_nbytes = row_dim // 2 + 1
        elif self._has_row_scales(ctx) and self._precision in (SparseType.INT8, SparseType.FP8):
            row_dim = self._require_context(ctx).row_dim
            row_nbytes = _row_nbytes(row_dim, self._precision)
        else:
            return input_len
        if input_len % row_dim:
            raise AssertionError(
                f"{self._precision.name} messages have rows of {row_dim} values, got {input_len}"
            )
        return input_len // row_dim * row_nbytes

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Return the dtype of messages."""
        return self._precision.as_dtype()

    def create_context(self) -> QuantizationContext | None:
        """Return a new context for one message, for all methods that have a context."""
        if self._precision is SparseType.FP8:
            return QuantizationContext(self._row_dim)
        if self._precision is SparseType.MX4:
            return QuantizationContext(
                self._row_dim, mx_group_size=self._row_dim, rounding_mode=self._rounding
            )
        return QuantizationContext()

    def padded_size(
        self,
        input_tensor: Tensor,
        dim_per_rank: list[int],
        my_rank: int,
        qcomm_ctx: QuantizationContext,
    ) -> tuple[int, int]:
        """Return the number of columns of a message with padding, and that of the padding alone.

        MX4 pads the columns of each rank to whole groups. FP8 with a `row_dim` pads them to whole
        rows if the environment variable TORCHREC_ENABLE_FP8_ROWWISE_PADDING is set, and not to 0.
        Both set `qcomm_ctx.padded_dim_sum_per_rank`. Other formats, and `[N]`, are not padded.

        Args:
            input_tensor: values `[B, columns]` or `[N]`.
            dim_per_rank: number of columns of each rank.
            my_rank: this rank.
            qcomm_ctx: context of the message.

        Raises:
            ValueError: padded values have another number of columns than `dim_per_rank[my_rank]`,
                or there is no rank `my_rank`.
        """
        if input_tensor.ndim == 1:
            return input_tensor.size(0), 0
        num_columns = input_tensor.size(1)
        if self._precision is SparseType.MX4:
            block_size = qcomm_ctx.mx_group_size
        elif self._precision is SparseType.FP8 and self._row_dim > 0 and _pads_fp8_rows():
            block_size = qcomm_ctx.row_dim
        else:
            return num_columns, 0
        if not 0 <= my_rank < len(dim_per_rank):
            raise ValueError(f"my_rank must be in [0, {len(dim_per_rank)}), got {my_rank}")
        if num_columns != dim_per_rank[my_rank]:
            raise ValueError(
                f"rank {my_rank} has {dim_per_rank[my_rank]} columns, got {num_columns}"
            )
        qcomm_ctx.padded_dim_sum_per_rank = [dim + -dim % block_size for dim in dim_per_rank]
        padding = -num_columns % block_size
        return num_columns + padding, padding

    def _has_row_scales(self, ctx: QuantizationContext | None) -> bool:
        """Return whether a message consists of rows that each have a scale."""
        if self._precision is SparseType.FP8:
            return ctx is not None and ctx.row_dim > 0
        return self._precision is SparseType.INT8

    def _require_context(self, ctx: QuantizationContext | None) -> QuantizationContext:
        if ctx is None:
            raise ValueError(
                f"{self._precision.name} messages need the context of create_context()"
            )
        return ctx


def none_throws(optional: Any, message: str = "Unexpected `None`") -> Any:
    """Return `optional`, or raise AssertionError with `message` if it is None."""
    if optional is None:
        raise AssertionError(message)
    return optional


def _row_nbytes(row_dim: int, precision: SparseType) -> int:
    """Return the bytes of an INT8 or FP8 row; FP8 values are padded to a multiple of 4."""
    padding = -row_dim % 4 if precision is SparseType.FP8 else 0
    return row_dim + padding + _ROW_SCALE_BYTES


def _pads_fp8_rows() -> bool:
    return os.environ.get("TORCHREC_ENABLE_FP8_ROWWISE_PADDING", "0") != "0"


class PermutePooledEmbeddings:
    """Callable that permutes the columns of features: position i gets feature `permute[i]`.

    Args:
        embs_dims: number of columns of each feature.
        permute: features in their new order; some may be missing or repeated.
        device: device of the permutation; None is torch's default device.

    Raises:
        IndexError: `permute` has a feature that does not exist.
    """

    def __init__(
        self,
        embs_dims: Sequence[int],
        permute: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        dims = [int(dim) for dim in embs_dims]
        if absent := [feature for feature in permute if not 0 <= feature < len(dims)]:
            raise IndexError(f"permute has features outside [0, {len(dims)}): {absent}")
        self._offsets = torch.tensor([0, *itertools.accumulate(dims)], device=device)
        self._permute = torch.tensor(list(permute), dtype=torch.int64, device=device)
        self._is_identity = list(permute) == list(range(len(dims)))

    def __call__(self, pooled_embs: Tensor) -> Tensor:
        """Return `pooled_embs`, `[B, sum D]`, with permuted columns, or itself if none moves."""
        if self._is_identity:
            return pooled_embs
        return pooled.permute_duplicate_pooled_embs(
            pooled_embs, self._offsets, self._permute, self._offsets, self._permute
        )


class PermutePooledEmbeddingsSplit(nn.Module):
    """Module form of `PermutePooledEmbeddings`."""

    def __init__(
        self,
        embs_dims: Sequence[int],
        permute: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._permutation = PermutePooledEmbeddings(embs_dims, permute, device)

    def forward(self, pooled_embs: Tensor) -> Tensor:
        """Return `pooled_embs` `[B, sum D]` with permuted columns."""
        return self._permutation(pooled_embs)


def rounded_row_size_in_bytes(
    dim: int, weight_ty: SparseType, row_alignment: int, scale_bias_size_in_bytes: int = 4
) -> int:
    """Return the bytes of a row of inference tables, rounded up to a multiple of `row_alignment`.

    A row of INT8, INT4 or INT2 has `dim` codes and `scale_bias_size_in_bytes` bytes of scale and
    bias.
    """
    precision = as_member(SparseType, weight_ty)
    row_bytes = dim * precision.bit_rate() // 8
    if precision in (SparseType.INT8, SparseType.INT4, SparseType.INT2):
        row_bytes += scale_bias_size_in_bytes
    return -(-row_bytes // row_alignment) * row_alignment


NAMES: dict[str, dict[str, Any | Callable[..., Any]]] = {
    "quantize_comm": {
        "QuantizationContext": QuantizationContext,
        "QuantizedCommCodec": QuantizedCommCodec,
        "none_throws": none_throws,
    },
    "quantize_utils": {
        "RoundingMode": RoundingMode,
        "fp32_to_bf16_with_clamp": fp32_to_bf16_with_clamp,
        "fp32_to_fp16_with_clamp": fp32_to_fp16_with_clamp,
        "fp32_to_hfp8_with_clamp": fp32_to_hfp8_with_clamp,
        "fp32_to_mx4": fp32_to_mx4,
        "hfp8_to_fp32": hfp8_to_fp32,
        "mx4_to_float": mx4_to_float,
    },
    "permute_pooled_embedding_modules": {"PermutePooledEmbeddings": PermutePooledEmbeddings},
    "permute_pooled_embedding_modules_split": {
        "PermutePooledEmbeddingsSplit": PermutePooledEmbeddingsSplit
    },
}
"""Names and values of modules of FBGEMM, by the module's path below `fbgemm_gpu`."""
