"""Codecs: the form in which values travel between ranks, smaller and less exact than float32.

A codec turns a flat tensor that is the concatenation of one split for each rank into a payload with
splits of its own, and back. `bound` is the most that each value may change; it is a promise:

| codec     | bytes a value   | the most that x changes                                     |
| --------- | --------------- | ----------------------------------------------------------- |
| FP32      | as they are     | 0                                                           |
| FP16      | 2               | 2^-11 abs(x), or 2^-25 / loss_scale where that is more      |
| BF16      | 2               | 2^-8 abs(x)                                                 |
| INT8      | 1 + 4 / row_dim | m / 254, where m is the largest magnitude of the row        |
| FP8, E4M3 | 1 + 4 / row_dim | 2^-4 abs(x), or m 2^-10 / 448 where that is more            |
| FP8, E5M2 | 1 + 4 / row_dim | 2^-3 abs(x), or m 2^-17 / 57344 where that is more          |

FP16 ends at 65504 / loss_scale: what is larger comes out infinite. A row is `row_dim` neighbouring
values of one split, with one float32 scale; the last row of a split is filled up with zeros. A row
with a value that is not finite comes out not finite there: a diverging training stays visible.
Values are rounded to nearest, so that the same values give the same bytes on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emblib.specs import Choice

_SCALE_BYTES = 4
# The smallest normal float32: a scale below it would lose its own bits.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Codec(ABC):
    """How the values of one direction travel. Codecs are values: frozen, compared by content."""

    @property
    def is_identity(self) -> bool:
        """Whether values travel as they are."""
        return False

    @abstractmethod
    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the payload of values of `dtype`."""

    @abstractmethod
    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """Elements of the payload that splits of so many values have."""

    @abstractmethod
    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """`values` [sum splits], floating, as a payload [sum payload_splits]."""

    @abstractmethod
    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The values [sum splits] of a payload, in `dtype`."""

    @abstractmethod
    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """The most that each of these values changes on its way, float64; see the module."""

    def nbytes(self, splits: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of so many values."""
        return sum(self.payload_splits(splits)) * self.payload_dtype(dtype).itemsize


@dataclass(frozen=True)
class FP32(Codec):
    """Values travel as they are: float32, or the dtype that the tables give."""

    @property
    def is_identity(self) -> bool:
        """See `Codec`."""
        return True

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Codec`."""
        return dtype

    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """See `Codec`."""
        return list(splits)

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """See `Codec`."""
        return values

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return payload.to(dtype)

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """See `Codec`."""
        return torch.zeros_like(values, dtype=torch.float64)


class _Half(Codec):
    """Two bytes a value."""

    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """See `Codec`."""
        return list(splits)


@dataclass(frozen=True)
class BF16(_Half):
    """The range of float32 with 8 bits of precision."""

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Codec`."""
        return torch.bfloat16

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """See `Codec`."""
        return values.to(torch.bfloat16)

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return payload.to(dtype)

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """See `Codec`."""
        half_of_least = 2.0**-134
        return (values.double().abs() * 2.0**-8).clamp_(min=half_of_least)


@dataclass(frozen=True)
class FP16(_Half):
    """Half precision. `loss_scale`, best a power of two, multiplies values for the way: small
    gradients survive with a large one."""

    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.loss_scale < float("inf")):
            raise ValueError(f"loss_scale must be finite and above 0, and is {self.loss_scale}")

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Codec`."""
        return torch.float16

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """See `Codec`."""
        if self.loss_scale != 1:
            values = values.float() * self.loss_scale
        return values.to(torch.float16)

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        if self.loss_scale == 1:
            return payload.to(dtype)
        return payload.float().mul_(1 / self.loss_scale).to(dtype)

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """See `Codec`."""
        exact = values.double().abs()
        most = (exact * 2.0**-11).clamp_(min=2.0**-25 / self.loss_scale)
        if not float(self.loss_scale).hex().startswith("0x1.0000000000000p"):
            most *= 1 + 2.0**-10  # both products are rounded too
        return most.masked_fill_(exact * self.loss_scale >= 65519.9, float("inf"))


@dataclass(frozen=True)
class _Rows(Codec):
    """One byte a value, and a float32 scale before each `row_dim` of them."""

    row_dim: int = 128

    def __post_init__(self) -> None:
        if self.row_dim < 4 or self.row_dim % 4:
            raise ValueError(f"row_dim must be a multiple of 4 above 0, and is {self.row_dim}")

    @property
    @abstractmethod
    def _largest(self) -> float:
        """What the largest value of a row becomes."""

    @property
    @abstractmethod
    def _byte_dtype(self) -> torch.dtype: ...

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Codec`."""
        return torch.uint8

    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """See `Codec`."""
        return [-(-n // self.row_dim) * (self.row_dim + _SCALE_BYTES) for n in splits]

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """See `Codec`."""
        rows = self._rows(values, splits)
        scales = self._scales(rows)
        payload = rows.new_empty(rows.size(0), self.row_dim + _SCALE_BYTES, dtype=torch.uint8)
        payload[:, :_SCALE_BYTES].view(torch.float32).copy_(scales)
        scaled = rows.div(scales)
        if not self._byte_dtype.is_floating_point:
            scaled.round_()
        payload[:, _SCALE_BYTES:].view(self._byte_dtype).copy_(scaled)
        return payload.view(-1)

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        rows = payload.view(-1, self.row_dim + _SCALE_BYTES)
        scales = rows[:, :_SCALE_BYTES].view(torch.float32)
        values = rows[:, _SCALE_BYTES:].view(self._byte_dtype).float().mul_(scales)
        return self._without_filling(values.view(-1), splits).to(dtype)

    def _scales(self, rows: Tensor) -> Tensor:
        return rows.abs().amax(1, keepdim=True).div_(self._largest).clamp_(min=_SMALLEST_SCALE)

    def _row_bound(self, values: Tensor, splits: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Magnitude of each value, and the scale of its row, in float64."""
        splits = [values.numel()] if splits is None else splits
        rows = self._rows(values.reshape(-1), splits)
        scales = self._scales(rows).expand(rows.shape).reshape(-1)
        scales = self._without_filling(scales, splits).view(values.shape)
        return values.double().abs(), scales.double()

    def _rows(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """[rows, row_dim] float32, where every split begins a row."""
        if any(n % self.row_dim for n in splits):
            filled = [-(-n // self.row_dim) * self.row_dim for n in splits]
            source, values = values, values.new_zeros(sum(filled), dtype=torch.float32)
            for to, piece in zip(values.split(filled), source.split(list(splits)), strict=True):
                to[: piece.numel()] = piece
        return values.float().view(-1, self.row_dim)

    def _without_filling(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        if not any(n % self.row_dim for n in splits):
            return values
        filled = [-(-n // self.row_dim) * self.row_dim for n in splits]
        pieces = zip(values.split(filled), splits, strict=True)
        return torch.cat([piece[:n] for piece, n in pieces])


@dataclass(frozen=True)
class INT8(_Rows):
    """Whole numbers from -127 to 127 times the scale of the row."""

    @property
    def _largest(self) -> float:
        return 127.0

    @property
    def _byte_dtype(self) -> torch.dtype:
        return torch.int8

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """See `Codec`."""
        _, scales = self._row_bound(values, splits)
        return scales * (0.5 + 127 * 2.0**-22)  # the quotient and the product are rounded too


class FP8Format(Choice):
    """Bits of exponent and mantissa of an 8-bit float."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"


@dataclass(frozen=True)
class FP8(_Rows):
    """8-bit floats times the scale of the row: small values of a row stay apart."""

    format: FP8Format | str = FP8Format.E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "format", FP8Format(self.format))

    @property
    def _largest(self) -> float:
        return float(torch.finfo(self._byte_dtype).max)

    @property
    def _byte_dtype(self) -> torch.dtype:
        wide = self.format == FP8Format.E5M2
        return torch.float8_e5m2 if wide else torch.float8_e4m3fn

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """See `Codec`."""
        exact, scales = self._row_bound(values, splits)
        wide = self.format == FP8Format.E5M2
        relative, absolute = (2.0**-3, 2.0**-17) if wide else (2.0**-4, 2.0**-10)
        most = torch.maximum(exact * relative, scales * absolute)
        return most + exact * 2.0**-22  # the quotient and the product are rounded too
