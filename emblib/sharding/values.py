"""Floating-point values that ranks send each other: rows and their gradients, under a codec.

The values of a rank for itself need not travel, see `local_part`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.codecs import Codec
from emblib.sharding.exchange import Content, Message, start_all_to_alls
from emblib.sharding.ranks import RankGroup


class LocalPart(NamedTuple):
    """The part `[begin, end)` of values that a rank would send to itself, and stays where it is."""

    begin: int
    end: int

    def of(self, values: Tensor) -> Tensor:
        """Return the part."""
        return values[self.begin : self.end]

    def others(self, values: Tensor) -> Tensor:
        """Return the values of the other ranks, which are neighbours, see `local_part`."""
        return values[: self.begin] if self.begin else values[self.end :]


def local_part(sizes: Sequence[int], ranks: RankGroup) -> LocalPart | None:
    """Return the part of flat values, by rank, that stays on this rank; None if it has to travel.

    Backends copy the message of a rank to itself. An all-to-all sends neighbouring messages only,
    so that the part stays if it is the first or the last one: always for two ranks.
    """
    if ranks.size == 1 or ranks.rank not in (0, ranks.size - 1):
        return None
    begin = sum(sizes[: ranks.rank])
    return LocalPart(begin, begin + sizes[ranks.rank])


def without_local(sizes: Sequence[int], ranks: RankGroup) -> list[int]:
    """Return sizes by rank, with nothing for this rank."""
    return [0 if rank == ranks.rank else size for rank, size in enumerate(sizes)]


class Received(NamedTuple):
    """Values from all ranks, flat and in rank order.

    Those of this rank are in `local`, which belongs before element `local_begin` of `values`, if it
    is set.
    """

    values: Tensor
    local: Tensor | None = None
    local_begin: int = 0


class Values(NamedTuple):
    """Floating-point values for all ranks, flat, that a codec encodes.

    `received` is where to write what comes, for values without a codec; allocated if it is None.
    `comes_whole` is whether what comes must be one tensor, with the part of this rank.
    """

    values: Tensor
    sizes: Sequence[int]
    received_sizes: Sequence[int]
    codec: Codec
    received: Tensor | None = None
    comes_whole: bool = False

    def nbytes(self) -> tuple[list[int], list[int]]:
        """Return the bytes of the messages to each rank, and of those from each rank."""
        width = self.codec.payload_dtype(self.values.dtype).itemsize
        sent, received = map(self.codec.payload_splits, (self.sizes, self.received_sizes))
        return [n * width for n in sent], [n * width for n in received]

    def encoded(self) -> Message:
        """Return the encoded values."""
        splits = self.codec.payload_splits
        payload = self.codec.encode(self.values, list(self.sizes))
        return Message(payload, splits(self.sizes), splits(self.received_sizes), self.received)


def start_values(
    batch: Sequence[Values],
    ranks: RankGroup,
    *,
    content: Content,
    is_merged: bool,
) -> list[Awaitable[Received]]:
    """Start all-to-alls of values without headers; return what is received, decoded.

    The results are float32, or 16-bit payloads where their reader converts. Rows of
    this rank for itself are not sent, where that is possible; gradients leave theirs out before.
    """
    messages, results = [], []
    for one in batch:
        message, part = one.encoded(), None
        may_stay = content is Content.ROWS and not is_merged and not one.comes_whole
        if may_stay and _is_read_directly(one.codec, message.sent):
            part = local_part(message.sizes, ranks)
        sizes, local, begin = list(one.received_sizes), None, 0
        if part is not None:
            local, begin = part.of(message.sent), sum(sizes[: ranks.rank])
            sent, received = (
                without_local(of_message, ranks)
                for of_message in (message.sizes, message.received_sizes)
            )
            message = Message(part.others(message.sent), sent, received)
        messages.append(message)
        results.append(partial(_decoded, one.codec, sizes, local, begin))
    pending = start_all_to_alls(messages, ranks, content=content, is_merged=is_merged)
    return [
        DeferredAwaitable(partial(result, awaitable))
        for result, awaitable in zip(results, pending, strict=True)
    ]


def _is_read_directly(codec: Codec, payload: Tensor) -> bool:
    return payload.is_floating_point() and getattr(codec, "loss_scale", 1.0) == 1.0


def _decoded(
    codec: Codec,
    sizes: list[int],
    local: Tensor | None,
    local_begin: int,
    pending: Awaitable[Tensor],
) -> Received:
    payload = pending.wait()
    if _is_read_directly(codec, payload):
        return Received(payload, local, local_begin)
    return Received(codec.decode(payload, sizes, torch.float32))
