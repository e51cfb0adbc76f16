"""Collectives of uneven sizes that stay in flight while the caller continues.

The messages of a batch travel in them: the sizes and ids of an input_dist, the rows of an
output_dist, and their gradients. Messages may be empty and uneven, over any backend. No rows or
gradients are summed in transit: their receivers add them up in rank order. The gradients of
replicated tables, which every rank needs, are gathered.

In host memory ranks first compare headers, see `emblib.sharding.headers`. Some collectives have no
header: `start_minimum`, those that an earlier header of the same forward or backward covers, and
those whose caller leaves it out (`has_header`). A call that compares headers returns only once
every rank has made it; the payload is still in flight.

Numbers that ranks need to allocate memory for ids travel in the header if they fit (`start_sizes`).
Several messages for the same ranks may travel in one collective (`start_all_to_alls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.ops.derivatives import once_differentiable
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.headers import (
    ALL_GATHER,
    ALL_TO_ALL,
    MODE_BIT,
    Content,
    Headers,
    enter_collective,
)
from emblib.sharding.ranks import RankGroup

# Messages of these contents follow the sizes of their batch, which had a header: another header
# would find no further difference.
_CONTENTS_WITHOUT_HEADER = frozenset({Content.IDS, Content.WEIGHTS, Content.ROWS})


class CollectiveAwaitable(Awaitable[Tensor]):
    """A collective in flight; `wait` returns its buffer `received`.

    On a GPU the stream that is current in the first `wait` may use the result; other streams must
    wait for that stream.

    Args:
        received: the buffer.
        work: the `dist.Work` of the collective; None if `received` is complete.
        sent_values: the tensor that the collective reads, which must live until it ends.
        in_flight: the `_Collective` of `enter_collective`, which ends with the last reference to
            it; None on a GPU.
    """

    def __init__(
        self,
        received: Tensor,
        work: Any = None,
        sent_values: Tensor | None = None,
        *,
        in_flight: Any = None,
    ) -> None:
        super().__init__()
        self._received, self._work = received, work
        self._in_flight, self._sent_values = in_flight, sent_values

    def _wait_impl(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent_values = self._in_flight = None
        return self._received


def start_all_to_all(
    values: Tensor,
    sent_sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    receive_buffer: Tensor | None = None,
    content: Content = Content.VALUES,
    encoding: int = 0,
    has_header: bool = True,
) -> CollectiveAwaitable:
    """Start an all-to-all of one message per rank; return an awaitable of the received messages.

    In host memory a call with a header first compares headers, so it returns once all ranks have
    made it. IDS, WEIGHTS and ROWS never have a header: they follow the sizes of their batch. Nor do
    calls on a GPU. With one rank, `values` are copied.

    Args:
        values: the messages to all ranks, flat, in rank order; must not change before the result
            is awaited.
        sent_sizes: number of elements of the message to each rank.
        received_sizes: number of elements of the message from each rank.
        ranks: the ranks, which all make this call.
        receive_buffer: buffer for the messages, flat, in rank order, of the dtype and device of
            `values`; allocated if None.
        content: kind of the message, the same on all ranks.
        encoding: number of the encoding of VALUES, which headers compare.
        has_header: whether ranks compare headers, if the content allows it. Pass False if ranks
            cannot disagree: an earlier header of this step covers the message, or no other
            collective uses the process group. Without a header no rank waits for the others here.

    Raises:
        RuntimeError: the compared headers differ; with one rank, the sizes differ; or two threads
            have had collectives over this process group in flight in host memory at the same time,
            now or earlier.
    """
    values = values.contiguous()
    if receive_buffer is None:
        receive_buffer = values.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return _copy_to_self(values, receive_buffer)
    in_flight = enter_collective(ranks) if values.device.type == "cpu" else None
    if in_flight is not None and has_header and content not in _CONTENTS_WITHOUT_HEADER:
        itemsize = values.element_size()
        Headers(
            [content, ALL_TO_ALL, encoding],
            [size * itemsize for size in sent_sizes],
            [size * itemsize for size in received_sizes],
            ranks,
        ).check()
    work = dist.all_to_all_single(
        receive_buffer,
        values,
        list(received_sizes),
        list(sent_sizes),
        group=ranks.group,
        async_op=True,
    )
    return CollectiveAwaitable(receive_buffer, work, values, in_flight=in_flight)


def start_all_gather(
    values: Tensor,
    received_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    content: Content = Content.VALUES,
    encoding: int = 0,
    has_header: bool = True,
) -> CollectiveAwaitable:
    """Start to send all of `values` to every rank; return an awaitable of the values of all ranks.

    Args:
        values: the values of this rank, flat.
        received_sizes: number of elements from each rank; that of this rank is the size of
            `values`.
        ranks: the ranks, which all make this call.
        content: kind of the values, the same on all ranks.
        encoding: number of the encoding of VALUES, which headers compare.
        has_header: whether ranks compare headers in host memory, see `start_all_to_all`. Here any
            content may have a header.

    Returns:
        An awaitable of the values, flat, in rank order.

    Raises:
        RuntimeError: see `start_all_to_all`.
    """
    values = values.contiguous()
    receive_buffer = values.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return _copy_to_self(values, receive_buffer)
    in_flight = enter_collective(ranks) if values.device.type == "cpu" else None
    if in_flight is not None and has_header:
        itemsize = values.element_size()
        Headers(
            [content, ALL_GATHER, encoding],
            [values.nbytes] * ranks.size,
            [size * itemsize for size in received_sizes],
            ranks,
        ).check()
    messages = list(receive_buffer.split(list(received_sizes)))
    messages[ranks.rank].copy_(values)
    # Broadcasts, because gloo gathers only messages of equal sizes.
    works = [
        dist.broadcast(message, ranks.global_rank(rank), group=ranks.group, async_op=True)
        for rank, message in enumerate(messages)
    ]
    return CollectiveAwaitable(receive_buffer, _JointWork(works), in_flight=in_flight)


def start_minimum(values: Tensor, ranks: RankGroup) -> Awaitable[Tensor]:
    """Start to take the minimum of `values` over all ranks, element by element, in place.

    `values` may have any shape, which must be equal on all ranks: no header compares it. The result
    is `values` itself, which the caller must not use before it has awaited the result.

    Raises:
        RuntimeError: two threads used this process group, see `start_all_to_all`.
    """
    if ranks.size == 1:
        return ReadyAwaitable(values)
    in_flight = enter_collective(ranks) if values.device.type == "cpu" else None
    work = dist.all_reduce(values, dist.ReduceOp.MIN, group=ranks.group, async_op=True)
    return CollectiveAwaitable(values, work, in_flight=in_flight)


def _copy_to_self(values: Tensor, receive_buffer: Tensor) -> CollectiveAwaitable:
    """Copy the message of one rank to itself; raise RuntimeError if the sizes differ."""
    if values.numel() != receive_buffer.numel():  # copy_ would repeat a message of one element
        raise RuntimeError(
            f"rank 0 sent {values.numel()} elements where it expected "
            f"{receive_buffer.numel()} from itself"
        )
    return CollectiveAwaitable(receive_buffer.copy_(values))


class _JointWork:
    """Several `dist.Work`s with one `wait`."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# Several messages at once


class Message(NamedTuple):
    """The arguments of one all-to-all, see `start_all_to_all`.

    Merged messages ignore `receive_buffer`.
    """

    values: Tensor
    sent_sizes: Sequence[int]
    received_sizes: Sequence[int]
    receive_buffer: Tensor | None = None


def start_all_to_alls(
    messages: Sequence[Message], ranks: RankGroup, *, content: Content, is_merged: bool
) -> list[Awaitable[Tensor]]:
    """Start all-to-alls without headers; return an awaitable of the received elements per message.

    Args:
        messages: the messages, the same number on all ranks.
        ranks: the ranks, which all make this call.
        content: kind of the messages.
        is_merged: whether several messages are copied into one collective, which is faster for
            small messages. All ranks must pass the same value.

    Raises:
        RuntimeError: two threads used this process group, see `start_all_to_all`.
    """
    if not is_merged or len(messages) <= 1 or ranks.size == 1:
        return [
            start_all_to_all(
                message.values,
                message.sent_sizes,
                message.received_sizes,
                ranks,
                receive_buffer=message.receive_buffer,
                content=content,
                has_header=False,
            )
            for message in messages
        ]
    flat_values = [message.values.contiguous() for message in messages]
    widths = [1] * len(messages)
    if any(values.dtype is not flat_values[0].dtype for values in flat_values):
        widths = [values.element_size() for values in flat_values]
        flat_values = [values.view(torch.uint8) for values in flat_values]
    slices_by_message = [
        values.split([size * width for size in message.sent_sizes])
        for values, message, width in zip(flat_values, messages, widths, strict=True)
    ]
    # The sizes of all messages for rank 0, then for rank 1, and so on.
    sent_sizes, received_sizes = (
        [
            size * width
            for sizes_for_rank in zip(*sizes_by_message, strict=True)
            for size, width in zip(sizes_for_rank, widths, strict=True)
        ]
        for sizes_by_message in (
            [message.sent_sizes for message in messages],
            [message.received_sizes for message in messages],
        )
    )
    num_messages = len(messages)  # to each rank
    first_messages = range(0, len(sent_sizes), num_messages)  # to each rank
    pending = start_all_to_all(
        torch.cat(list(chain.from_iterable(zip(*slices_by_message, strict=True)))),
        [sum(sent_sizes[i : i + num_messages]) for i in first_messages],
        [sum(received_sizes[i : i + num_messages]) for i in first_messages],
        ranks,
        content=content,
        has_header=False,
    ).then(lambda received: received.split(received_sizes))

    def received_message(index: int) -> Tensor:
        return torch.cat(pending.wait()[index::num_messages]).view(messages[index].values.dtype)

    return [DeferredAwaitable(partial(received_message, index)) for index in range(num_messages)]


def start_sizes(
    common: Sequence[int],
    lists: Sequence[Sequence[Sequence[int]]],
    received_sizes: Sequence[int],
    ranks: RankGroup,
    mode: int,
) -> Awaitable[list[tuple[list[int], list[list[int]]]]]:
    """Send the sizes of batches: `common` to all ranks, and lists of numbers to each rank.

    In host memory the ranks compare headers, so the call returns once all have made it. The numbers
    travel in these headers if the numbers of every rank fit, otherwise in an all-to-all of their
    own. On a GPU they always travel in an all-to-all, without a header.

    Args:
        common: numbers for all ranks; every rank passes the same count.
        lists: `lists[r][i]` are the numbers of list i for rank r.
        received_sizes: `received_sizes[i]` is the length of list i for this rank, from every rank.
        ranks: the ranks, which all make this call.
        mode: the `Mode` of the collections, which headers compare.

    Returns:
        An awaitable of the common numbers and the lists, by the rank that sent them.

    Raises:
        RuntimeError: see `start_all_to_all`.
    """
    if ranks.size == 1:
        return ReadyAwaitable([(list(common), [list(numbers) for numbers in lists[0]])])
    kind = [Content.SIZES, ALL_TO_ALL, len(received_sizes) | mode << MODE_BIT]
    if ranks.device.type == "cpu":
        compact_lists = [
            [number for one_list in rank_lists for number in _trim_repeats(one_list)]
            for rank_lists in lists
        ]
        numbers = [*common, *map(len, compact_lists), *chain.from_iterable(compact_lists)]
        headers = Headers(kind, [0] * ranks.size, [0] * ranks.size, ranks, numbers)
        numbers_by_rank = headers.check()
        if numbers_by_rank is not None:
            return ReadyAwaitable(
                [
                    _parse_numbers(numbers, len(common), received_sizes, ranks)
                    for numbers in numbers_by_rank
                ]
            )
    payloads = [[*common, *chain.from_iterable(rank_lists)] for rank_lists in lists]
    num_received = len(common) + sum(received_sizes)
    pending = start_all_to_all(
        torch.tensor(list(chain.from_iterable(payloads)), device=ranks.device),
        [len(numbers) for numbers in payloads],
        [num_received] * ranks.size,
        ranks,
        content=Content.SIZES,
        has_header=False,
    )

    def split() -> list[tuple[list[int], list[list[int]]]]:
        numbers_by_rank = pending.wait().view(ranks.size, num_received).tolist()
        bounds = list(accumulate(received_sizes, initial=len(common)))
        return [
            (sizes[: len(common)], [sizes[begin:end] for begin, end in pairwise(bounds)])
            for sizes in numbers_by_rank
        ]

    return DeferredAwaitable(split)


def _trim_repeats(numbers: Sequence[int]) -> list[int]:
    """Drop repeats of the last number; return [count of the remaining numbers, these numbers ...].

    Features often have the same number of bags; their sizes then fit into a header.
    """
    count = len(numbers)
    while count > 1 and numbers[count - 2] == numbers[count - 1]:
        count -= 1
    return [count, *numbers[:count]]


def _parse_numbers(
    numbers: list[int], num_common: int, list_sizes: Sequence[int], ranks: RankGroup
) -> tuple[list[int], list[list[int]]]:
    """Split the numbers of one rank into the common numbers and the lists for this rank.

    `numbers` are the common numbers, the count of numbers for each rank, then the numbers for rank
    0, 1 and so on, as lists of `_trim_repeats`. `list_sizes` are the lengths of the lists of this
    rank.
    """
    first_position = num_common + ranks.size
    position = first_position + sum(numbers[num_common : num_common + ranks.rank])
    lists = []
    for list_size in list_sizes:
        count = numbers[position]
        numbers_of_list = numbers[position + 1 : position + 1 + count]
        lists.append(numbers_of_list + numbers_of_list[-1:] * (list_size - count))
        position += 1 + count
    return numbers[:num_common], lists


# Gradients


class DifferentiableAllToAllAwaitable(Awaitable[Tensor]):
    """An all-to-all in flight, whose result has a gradient if `values` need one.

    Its backward is an all-to-all of the gradient with a header, so all ranks must make it. If
    gradients are disabled during the first `wait`, the result has no gradient.

    Args:
        values: the sent values with their autograd history.
        sent_sizes: number of elements to each rank.
        received_sizes: number of elements from each rank.
        ranks: the ranks of the all-to-all.
        pending: the all-to-all of the detached values, started already.
    """

    def __init__(
        self,
        values: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        ranks: RankGroup,
        pending: Awaitable[Tensor],
    ) -> None:
        super().__init__()
        self._values, self._pending = values, pending
        self._sizes_and_ranks = tuple(sent_sizes), tuple(received_sizes), ranks

    def _wait_impl(self) -> Tensor:
        if not (self._values.requires_grad and torch.is_grad_enabled()):
            return self._pending.wait()
        result: Tensor = _AllToAll.apply(self._values, self._pending, *self._sizes_and_ranks)
        return result


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose backward sends the gradients in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,  # connects the result to autograd
        pending: Awaitable[Tensor],
        sent_sizes: Any,
        received_sizes: Any,
        ranks: RankGroup,
    ) -> Tensor:
        ctx.sent_sizes, ctx.received_sizes, ctx.ranks = sent_sizes, received_sizes, ranks
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pending = start_all_to_all(
            grad.contiguous(),
            ctx.received_sizes,
            ctx.sent_sizes,
            ctx.ranks,
            content=Content.GRADIENTS,
        )
        return pending.wait(), None, None, None, None
