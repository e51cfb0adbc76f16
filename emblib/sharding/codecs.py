"""Codecs: encodings of the rows and gradients that ranks send, smaller and less exact than float32.

An output_dist sends encoded rows and gradients: `start_sending` encodes them and starts their
all-to-alls; the awaitables that it returns decode them. The first and the last rank need not send
their rows for themselves, see `local_slice`.

A codec encodes a flat tensor, the concatenation of one split per rank, into a flat payload, the
concatenation of as many encoded splits, and decodes it. The table has the largest errors of float32
values. `bound` also includes the rounding errors of the codec's own float32 operations, and those
of INT8 and FP8 rows whose values are all below 2^-110:

| codec     | bytes per value | largest error of a value x                                  |
| --------- | --------------- | ----------------------------------------------------------- |
| FP32      | unchanged       | 0                                                           |
| FP16      | 2               | 2^-11 abs(x), or 2^-25 / loss_scale if that is larger       |
| BF16      | 2               | 2^-8 abs(x), or 2^-134 if that is larger                    |
| INT8      | 1 + 4 / row_dim | m / 254, where m is the largest magnitude of the row        |
| FP8, E4M3 | 1 + 4 / row_dim | 2^-4 abs(x), or m 2^-10 / 448 if that is larger             |
| FP8, E5M2 | 1 + 4 / row_dim | 2^-3 abs(x), or m 2^-17 / 57344 if that is larger           |

The largest value of FP16 is 65504 / loss_scale, of BF16 3.39e38: values that round to more decode
to infinity. A row is `row_dim` neighbouring values of one split, with one float32 scale; the last
row of a split is padded with zeros. A value that is not finite decodes to one that is not finite,
so that a diverging training stays visible; INT8 and FP8 then decode its whole row to NaN. Values
are rounded to nearest, so that equal splits give equal bytes on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.sharding.all_to_all import Message, start_all_to_alls
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.headers import Content
from emblib.sharding.ranks import RankGroup
from emblib.specs import OptionEnum, check_count

_SCALE_BYTES = 4  # of the float32 scale of a row
_FP16_OVERFLOW = 65519.9  # 65520 rounds to infinity; the product may be rounded up
_BF16_OVERFLOW = (2 - 2.0**-8) * 2.0**127  # rounds to infinity, as all above it do
# The smallest normal float32: a scale below it would lose precision.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Codec(ABC):
    """An encoding of the values sent in one direction; immutable and compared by content."""

    @property
    def is_identity(self) -> bool:
        """Return whether values are sent unchanged."""
        return False

    @abstractmethod
    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the payload of values of `dtype`."""

    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """Return the number of payload elements per split; `splits` are numbers of values.

        Both are equal unless a codec overrides this.
        """
        return list(splits)

    @abstractmethod
    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Encode floating-point `values` `[sum splits]` as a payload `[sum payload_splits]`.

        `splits[r]` is the number of values for rank r. The payload is on the device of `values`,
        and may be `values` itself.
        """

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode the values `[sum splits]` of a payload, in `dtype`.

        The result may be `payload` itself. Unless a codec overrides this, it is the payload in
        `dtype`.
        """
        return payload.to(dtype)

    @abstractmethod
    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Return an upper bound of the error of each value, float64, in the shape of `values`.

        It does not include the rounding of `decode` to a `dtype` narrower than float32, and is
        infinite for finite values that may decode to infinity. `splits` None stands for one split.
        """

    def nbytes(self, splits: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of the payload of all splits, for values of `dtype`."""
        return sum(self.payload_splits(splits)) * self.payload_dtype(dtype).itemsize


@dataclass(frozen=True)
class FP32(Codec):
    """Send values unchanged, in their dtype.

    Example:
        >>> emblib.sharding.CommPrecision(forward=emblib.sharding.FP32()).forward
        FP32()
    """

    @property
    def is_identity(self) -> bool:
        """Implement `Codec`."""
        return True

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Implement `Codec`."""
        return dtype

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Implement `Codec`."""
        return values

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Implement `Codec`."""
        return torch.zeros_like(values, dtype=torch.float64)


@dataclass(frozen=True)
class BF16(Codec):
    """Send bfloat16: the range of float32 with 8 bits of precision.

    Example:
        >>> codec = emblib.sharding.BF16()
        >>> sent = codec.encode(torch.tensor([1.0, 0.5, 0.25, 1e-3]), [4])
        >>> sent.dtype, codec.decode(sent, [4], torch.float32)
        (torch.bfloat16, tensor([1.0000e+00, 5.0000e-01, 2.5000e-01, 9.9945e-04]))
    """

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Implement `Codec`."""
        return torch.bfloat16

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Implement `Codec`."""
        return values.to(torch.bfloat16)

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Implement `Codec`."""
        magnitudes = values.double().abs()
        half_of_smallest = 2.0**-134  # half of the smallest subnormal number of bfloat16
        bound = (magnitudes * 2.0**-8).clamp_(min=half_of_smallest)  # 8 significant bits
        return bound.masked_fill_(magnitudes >= _BF16_OVERFLOW, float("inf"))


@dataclass(frozen=True)
class FP16(Codec):
    """Send float16.

    Args:
        loss_scale: factor of the sent values, preferably a power of two; the receiver divides by
            it. A large factor keeps small gradients from becoming 0.

    Raises:
        ValueError: `loss_scale` is not finite or not above 0.

    Example:
        >>> codec = emblib.sharding.FP16()
        >>> sent = codec.encode(torch.tensor([1.0, 0.5, 0.25, 1e-3]), [4])
        >>> sent.dtype, codec.decode(sent, [4], torch.float32)
        (torch.float16, tensor([1.0000, 0.5000, 0.2500, 0.0010]))
    """

    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.loss_scale < float("inf")):
            raise ValueError(f"loss_scale must be finite and above 0, got {self.loss_scale}")

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Implement `Codec`."""
        return torch.float16

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Implement `Codec`."""
        if self.loss_scale != 1:
            values = values.float() * self.loss_scale
        return values.to(torch.float16)

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Implement `Codec`."""
        if self.loss_scale == 1:
            return payload.to(dtype)
        return payload.float().mul_(1 / self.loss_scale).to(dtype)

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Implement `Codec`."""
        magnitudes = values.double().abs()
        # float16 has 11 significant bits; its smallest subnormal number is 2^-24.
        bound = (magnitudes * 2.0**-11).clamp_(min=2.0**-25 / self.loss_scale)
        if not float(self.loss_scale).hex().startswith("0x1.0000000000000p"):
            bound *= 1 + 2.0**-10  # both products are rounded too
        overflows = magnitudes * self.loss_scale >= _FP16_OVERFLOW
        return bound.masked_fill_(overflows, float("inf"))


@dataclass(frozen=True)
class _ScaledRows(Codec):
    """A codec of one byte per value, with a float32 scale before each `row_dim` values."""

    row_dim: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_dim", check_count("row_dim", self.row_dim))
        if self.row_dim % 4:
            raise ValueError(f"row_dim must be a multiple of 4 above 0, got {self.row_dim}")

    @property
    @abstractmethod
    def _max_code(self) -> float:
        """Return the largest encoded magnitude: the code of the largest value of a row."""

    @property
    @abstractmethod
    def _byte_dtype(self) -> torch.dtype:
        """Return the dtype of encoded values, of one byte."""

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Implement `Codec`."""
        return torch.uint8

    def payload_splits(self, splits: Sequence[int]) -> list[int]:
        """Implement `Codec`."""
        return [-(-size // self.row_dim) * (self.row_dim + _SCALE_BYTES) for size in splits]

    def encode(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Implement `Codec`."""
        rows = self._padded_rows(values, splits)
        scales = self._scales(rows)
        payload = rows.new_empty(rows.size(0), self.row_dim + _SCALE_BYTES, dtype=torch.uint8)
        payload[:, :_SCALE_BYTES].view(torch.float32).copy_(scales)
        scaled = rows.div(scales)
        if not self._byte_dtype.is_floating_point:
            scaled.round_()
        payload[:, _SCALE_BYTES:].view(self._byte_dtype).copy_(scaled)
        return payload.view(-1)

    def decode(self, payload: Tensor, splits: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Implement `Codec`."""
        rows = payload.view(-1, self.row_dim + _SCALE_BYTES)
        scales = rows[:, :_SCALE_BYTES].view(torch.float32)
        values = rows[:, _SCALE_BYTES:].view(self._byte_dtype).float().mul_(scales)
        return self._without_padding(values.view(-1), splits).to(dtype)

    def _scales(self, rows: Tensor) -> Tensor:
        """Return the scale of each row, float32 `[rows, 1]`."""
        return rows.abs().amax(1, keepdim=True).div_(self._max_code).clamp_(min=_SMALLEST_SCALE)

    def _magnitudes_and_scales(
        self, values: Tensor, splits: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the magnitude of each value and the scale of its row, in float64."""
        splits = [values.numel()] if splits is None else splits
        rows = self._padded_rows(values.reshape(-1), splits)
        scales = self._scales(rows).expand(rows.shape).reshape(-1)
        scales = self._without_padding(scales, splits).view(values.shape)
        return values.double().abs(), scales.double()

    def _padded_rows(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Return `[rows, row_dim]` float32, in which every split begins a row."""
        if any(size % self.row_dim for size in splits):
            padded_sizes = [-(-size // self.row_dim) * self.row_dim for size in splits]
            source, values = values, values.new_zeros(sum(padded_sizes), dtype=torch.float32)
            for target, block in zip(
                values.split(padded_sizes), source.split(list(splits)), strict=True
            ):
                target[: block.numel()] = block
        return values.float().view(-1, self.row_dim)

    def _without_padding(self, values: Tensor, splits: Sequence[int]) -> Tensor:
        """Return values without the zeros that pad each split to whole rows."""
        if not any(size % self.row_dim for size in splits):
            return values
        padded_sizes = [-(-size // self.row_dim) * self.row_dim for size in splits]
        blocks = zip(values.split(padded_sizes), splits, strict=True)
        return torch.cat([block[:size] for block, size in blocks])


@dataclass(frozen=True)
class INT8(_ScaledRows):
    """Send integers from -127 to 127, which the receiver multiplies by the scale of their row.

    `row_dim` neighbouring values share a scale; it is a multiple of 4, preferably the tables' dim.

    Raises:
        TypeError: `row_dim` is not an int.
        ValueError: `row_dim` is not a multiple of 4 above 0.

    Example:
        >>> codec = emblib.sharding.INT8(row_dim=4)
        >>> sent = codec.encode(torch.tensor([1.0, 0.5, 0.25, 1e-3]), [4])
        >>> sent.dtype, codec.decode(sent, [4], torch.float32)
        (torch.uint8, tensor([1.0000, 0.5039, 0.2520, 0.0000]))
    """

    @property
    def _max_code(self) -> float:
        return 127.0

    @property
    def _byte_dtype(self) -> torch.dtype:
        return torch.int8

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Implement `Codec`."""
        _, scales = self._magnitudes_and_scales(values, splits)
        return scales * (0.5 + 127 * 2.0**-22)  # the quotient and the product are rounded too


class FP8Format(OptionEnum):
    """The bits of exponent and mantissa of an 8-bit float."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"


@dataclass(frozen=True)
class FP8(_ScaledRows):
    """Send 8-bit floats, which the receiver multiplies by the scale of their row.

    Small values of a row are more exact than with `INT8`, large ones less. `row_dim` is as for
    `INT8`; `format` is a `FP8Format`, also as a string.

    Raises:
        TypeError: `row_dim` is not an int.
        ValueError: `row_dim` is not a multiple of 4 above 0, or `format` is not a format.

    Example:
        >>> codec = emblib.sharding.FP8(row_dim=4)
        >>> sent = codec.encode(torch.tensor([1.0, 0.5, 0.25, 1e-3]), [4])
        >>> sent.dtype, codec.decode(sent, [4], torch.float32)
        (torch.uint8, tensor([1.0000e+00, 5.0000e-01, 2.5000e-01, 9.7656e-04]))
    """

    format: FP8Format | str = FP8Format.E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "format", FP8Format(self.format))

    @property
    def _max_code(self) -> float:
        return float(torch.finfo(self._byte_dtype).max)

    @property
    def _byte_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.format == FP8Format.E5M2 else torch.float8_e4m3fn

    def bound(self, values: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Implement `Codec`."""
        magnitudes, scales = self._magnitudes_and_scales(values, splits)
        is_e5m2 = self.format == FP8Format.E5M2
        # 3 or 4 significant bits, and half of the smallest subnormal number of the format.
        relative, absolute = (2.0**-3, 2.0**-17) if is_e5m2 else (2.0**-4, 2.0**-10)
        bound = torch.maximum(magnitudes * relative, scales * absolute)
        return bound + magnitudes * 2.0**-22  # the quotient and the product are rounded too


@dataclass(frozen=True)
class CommPrecision:
    """The codecs of the messages between ranks: of rows (`forward`) and of gradients (`backward`).

    Ranks add up decoded values in float32, whatever the codec. Ids and their weights are sent
    unchanged.

    Raises:
        TypeError: a value is not a codec.

    Example:
        >>> emblib.sharding.CommPrecision(emblib.sharding.FP16(), emblib.sharding.BF16())
        CommPrecision(forward=FP16(loss_scale=1.0), backward=BF16())
    """

    forward: Codec = field(default=FP32())
    backward: Codec = field(default=FP32())

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Codec):
                raise TypeError(
                    f"{name} of a CommPrecision must be a codec, e.g. FP16(), "
                    f"got {getattr(self, name)!r}"
                )


def check_comm_precision(comm_precision: CommPrecision | None) -> CommPrecision:
    """Return `comm_precision`, or for None a `CommPrecision` of `FP32` in both directions.

    Raises:
        TypeError: `comm_precision` is neither None nor a `CommPrecision`.
    """
    if comm_precision is not None and not isinstance(comm_precision, CommPrecision):
        raise TypeError(
            "comm_precision must be None or a CommPrecision, e.g. "
            f"CommPrecision(forward=FP16(), backward=BF16()), got {comm_precision!r}"
        )
    return CommPrecision() if comm_precision is None else comm_precision


# Values in transit


class LocalSlice(NamedTuple):
    """The slice `[begin, end)` of flat values that is for this rank itself and is not sent."""

    begin: int
    end: int

    def select(self, values: Tensor) -> Tensor:
        """Return the slice of this rank, a view."""
        return values[self.begin : self.end]

    def select_others(self, values: Tensor) -> Tensor:
        """Return the values for the other ranks, a view; they are contiguous, see `local_slice`."""
        return values[: self.begin] if self.begin else values[self.end :]


def local_slice(sizes: Sequence[int], ranks: RankGroup) -> LocalSlice | None:
    """Return the slice of flat values that this rank need not send to itself.

    `sizes[r]` is the number of values for rank r. Not sending the slice saves a copy, because
    backends copy the message of a rank to itself. The messages to the other ranks must be
    contiguous, so only the first and the last rank have such a slice. None on other ranks, and for
    one rank.
    """
    if ranks.size == 1 or ranks.rank not in (0, ranks.size - 1):
        return None
    begin = sum(sizes[: ranks.rank])
    return LocalSlice(begin, begin + sizes[ranks.rank])


def without_local_size(sizes: Sequence[int], ranks: RankGroup) -> list[int]:
    """Return sizes by rank, with 0 for this rank."""
    return [0 if rank == ranks.rank else size for rank, size in enumerate(sizes)]


class ReceivedValues(NamedTuple):
    """Values from all ranks, flat and in rank order.

    Attributes:
        values: values of all ranks, or of the others if `local` is set.
        local: values of this rank that were not sent; None if they are in `values`.
        local_begin: index in `values` before which `local` must be inserted.
    """

    values: Tensor
    local: Tensor | None = None
    local_begin: int = 0


class SentValues(NamedTuple):
    """Floating-point values for all ranks, flat, that a codec encodes.

    Attributes:
        values: values to send, in rank order.
        sent_sizes: number of values to each rank.
        received_sizes: number of values from each rank.
        codec: codec of the values.
        receive_buffer: buffer for the incoming payload, only with `FP32`; allocated if None.
            Not used if `ReceivedValues.local` is set or messages are merged.
        needs_one_tensor: whether the result must be one tensor that includes the values of this
            rank, so that `ReceivedValues.local` is None.
    """

    values: Tensor
    sent_sizes: Sequence[int]
    received_sizes: Sequence[int]
    codec: Codec
    receive_buffer: Tensor | None = None
    needs_one_tensor: bool = False

    def nbytes(self) -> tuple[list[int], list[int]]:
        """Return the number of bytes of the messages to each rank, and from each rank."""
        itemsize = self.codec.payload_dtype(self.values.dtype).itemsize
        sent_nbytes, received_nbytes = (
            [size * itemsize for size in self.codec.payload_splits(sizes)]
            for sizes in (self.sent_sizes, self.received_sizes)
        )
        return sent_nbytes, received_nbytes

    def encode(self) -> Message:
        """Return the message with the encoded values."""
        splits = self.codec.payload_splits
        payload = self.codec.encode(self.values, list(self.sent_sizes))
        return Message(
            payload, splits(self.sent_sizes), splits(self.received_sizes), self.receive_buffer
        )


def start_sending(
    messages_to_send: Sequence[SentValues], ranks: RankGroup, *, content: Content, is_merged: bool
) -> list[Awaitable[ReceivedValues]]:
    """Start all-to-alls of values without headers; return awaitables of the decoded values.

    The results of FP32, BF16 and FP16 with `loss_scale` 1 are in the dtype of the payload, those of
    other codecs float32. Rows for this rank itself are not sent if there is a `local_slice`, unless
    messages are merged, the result must be one tensor, or the codec must decode it. Gradients for
    this rank itself are always sent.

    Args:
        messages_to_send: the values of each message, as many on all ranks.
        ranks: the ranks, which all make this call.
        content: ROWS or GRADIENTS.
        is_merged: whether all messages travel in one collective, see `start_all_to_alls`.

    Raises:
        RuntimeError: see `start_all_to_alls`.
    """
    messages, decoders = [], []
    for values in messages_to_send:
        message, kept_slice = values.encode(), None
        can_keep_local = content is Content.ROWS and not is_merged and not values.needs_one_tensor
        if can_keep_local and _is_read_directly(values.codec, message.values):
            kept_slice = local_slice(message.sent_sizes, ranks)
        received_sizes, local, local_begin = list(values.received_sizes), None, 0
        if kept_slice is not None:
            local_begin = sum(received_sizes[: ranks.rank])
            local = kept_slice.select(message.values)
            message = Message(
                kept_slice.select_others(message.values),
                without_local_size(message.sent_sizes, ranks),
                without_local_size(message.received_sizes, ranks),
            )
        messages.append(message)
        decoders.append(partial(_wait_and_decode, values.codec, received_sizes, local, local_begin))
    pending = start_all_to_alls(messages, ranks, content=content, is_merged=is_merged)
    return [
        DeferredAwaitable(partial(decode, awaitable))
        for decode, awaitable in zip(decoders, pending, strict=True)
    ]


def _is_read_directly(codec: Codec, payload: Tensor) -> bool:
    """Return whether kernels can read the values from the payload, which needs no decoding."""
    return payload.is_floating_point() and getattr(codec, "loss_scale", 1.0) == 1.0


def _wait_and_decode(
    codec: Codec,
    received_sizes: list[int],
    local: Tensor | None,
    local_begin: int,
    pending: Awaitable[Tensor],
) -> ReceivedValues:
    """Wait for a payload and decode it, unless kernels can read it as it is.

    `received_sizes` are the numbers of values from each rank; `local` and `local_begin` are those
    of `ReceivedValues`.
    """
    payload = pending.wait()
    if _is_read_directly(codec, payload):
        return ReceivedValues(payload, local, local_begin)
    return ReceivedValues(codec.decode(payload, received_sizes, torch.float32))
