"""FBGEMM's modules around the tables: codecs of messages and permutations of pooled embeddings."""

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emblib.compat.fbgemm_operators import pooled, rowwise
from emblib.compat.fbgemm_types import SparseType, as_member

_INT8_OVERHEAD = 8  # float32 scale and minimum of a row
_HALVES = {SparseType.FP16: torch.float16, SparseType.BF16: torch.bfloat16}


class RoundingMode(enum.IntEnum):
    """Rounding of MX4 messages, which emblib does not have."""

    nearest = 0
    floor = 1
    even = 2
    stochastic = 3
    ceil = 4


@dataclass
class QuantizationContext:
    """Row length of a message before and after its quantisation."""

    row_dim: int = 32
    row_dim_quant: int = -1
    mx_group_size: int = 32
    rounding_mode: RoundingMode | None = RoundingMode.even
    padded_dim_sum_per_rank: list[int] | None = None


class QuantizedCommCodec:
    """Encode messages as FP32, FP16, BF16 or INT8, with the interface of FBGEMM's class."""

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
        supported = (SparseType.FP32, SparseType.INT8, *_HALVES)
        if self._precision not in supported:
            raise NotImplementedError(
                f"messages of {self._precision.name} are not supported; use one of "
                f"{', '.join(kind.name for kind in supported)}"
            )
        if output_dtype not in (None, SparseType.FP32):
            raise NotImplementedError("messages are decoded to FP32; leave output_dtype out")
        self._loss_scale = loss_scale if self._precision in _HALVES else None
        self._row_dim = row_dim

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the message; 16-bit values are clamped to the largest finite ones."""
        if self._loss_scale is not None:
            input_tensor = input_tensor * self._loss_scale
        if self._precision in _HALVES:
            dtype = _HALVES[self._precision]
            largest = torch.finfo(dtype).max
            return input_tensor.clamp(-largest, largest).to(dtype)
        if self._precision is SparseType.INT8:
            ctx = self._required(ctx)
            rows = rowwise.to_fused_8bit(input_tensor.reshape(-1, ctx.row_dim))
            ctx.row_dim_quant = rows.size(1)
            return rows.view(-1)
        return input_tensor

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the values of a message as float32."""
        if self._precision is SparseType.INT8:
            rows = input_tensor.view(-1, self._required(ctx).row_dim + _INT8_OVERHEAD)
            return rowwise.fused_8bit_to_float(rows).view(-1)
        values = input_tensor.float()
        return values if self._loss_scale is None else values / self._loss_scale

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Return the length of the message of `input_len` values."""
        if self._precision is not SparseType.INT8:
            return input_len
        row_dim = self._required(ctx).row_dim
        if input_len % row_dim:
            raise ValueError(f"INT8 messages have rows of {row_dim} values, got {input_len}")
        return input_len // row_dim * (row_dim + _INT8_OVERHEAD)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Return the dtype of messages."""
        return self._precision.as_dtype()

    def create_context(self) -> QuantizationContext | None:
        """Return a context for one message."""
        if self._row_dim is None:
            return QuantizationContext()
        return QuantizationContext(self._row_dim)

    def padded_size(
        self,
        input_tensor: Tensor,
        dim_per_rank: list[int],
        my_rank: int,
        qcomm_ctx: QuantizationContext,
    ) -> tuple[int, int]:
        """Return the columns of a message and of its padding, of which there is none."""
        return input_tensor.size(0 if input_tensor.ndim == 1 else 1), 0

    @staticmethod
    def _required(ctx: QuantizationContext | None) -> QuantizationContext:
        if ctx is None:
            raise ValueError("INT8 messages need the context of create_context()")
        return ctx


class PermutePooledEmbeddings:
    """Permute the columns of features: feature `permute[i]` becomes the i-th."""

    def __init__(
        self,
        embs_dims: Sequence[int],
        permute: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        dims = [int(dim) for dim in embs_dims]
        self._offsets = torch.tensor([0, *itertools.accumulate(dims)], device=device)
        self._permute = torch.tensor(list(permute), dtype=torch.int64, device=device)
        self._is_identity = list(permute) == list(range(len(dims)))

    def __call__(self, pooled_embs: Tensor) -> Tensor:
        """Return `pooled_embs` `[B, sum D]` with permuted columns."""
        if self._is_identity:
            return pooled_embs
        return pooled.permute_duplicate_pooled_embs(
            pooled_embs, self._offsets, self._permute, self._offsets, self._permute
        )


class PermutePooledEmbeddingsSplit(nn.Module):
    """Permute the columns of features, as a module."""

    def __init__(
        self,
        embs_dims: Sequence[int],
        permute: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._permuted = PermutePooledEmbeddings(embs_dims, permute, device)

    def forward(self, pooled_embs: Tensor) -> Tensor:
        """Return `pooled_embs` `[B, sum D]` with permuted columns."""
        return self._permuted(pooled_embs)


def rounded_row_size_in_bytes(
    dim: int, weight_ty: SparseType, row_alignment: int, scale_bias_size_in_bytes: int = 4
) -> int:
    """Return the bytes of a quantised row, a multiple of `row_alignment`."""
    kind = as_member(SparseType, weight_ty)
    size = dim * kind.bit_rate() // 8
    if kind in (SparseType.INT8, SparseType.INT4, SparseType.INT2):
        size += scale_bias_size_in_bytes
    return -(-size // row_alignment) * row_alignment


NAMES: dict[str, dict[str, Any | Callable[..., Any]]] = {
    "quantize_comm": {
        "QuantizationContext": QuantizationContext,
        "QuantizedCommCodec": QuantizedCommCodec,
    },
    "quantize_utils": {"RoundingMode": RoundingMode},
    "permute_pooled_embedding_modules": {"PermutePooledEmbeddings": PermutePooledEmbeddings},
    "permute_pooled_embedding_modules_split": {
        "PermutePooledEmbeddingsSplit": PermutePooledEmbeddingsSplit
    },
}
"""Names per module of FBGEMM."""
