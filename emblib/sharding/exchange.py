"""Collectives of uneven sizes that stay in flight while the caller continues.

Sharded collections send everything through this module: ids to the ranks that store their rows,
pooled or single rows back, and gradients to the ranks that store the rows. Every backend takes
empty and uneven messages and any payload; the receiver sums, in float32 and in rank order. The
gradients of replicated tables, which every rank needs, are gathered.

The ranks of a process group pair up collectives by the order of their calls. Over gloo, a rank that
calls another collective than its peers makes gloo abort the process. Therefore ranks first exchange
a header that describes the collective when the tensor is in host memory, and raise on all ranks
where headers disagree (`_check_headers`). Collectives that follow another one within the same
forward have no header of their own. A call with a header returns only once every rank has made it;
the payload is still in flight. Only the collectives of this module carry headers: a rank that calls
another one instead, such as a barrier, is not detected.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.sharding.awaitables import Awaitable
from emblib.sharding.codecs import FP32, Codec
from emblib.sharding.ranks import RankGroup

# torch 2.13 deprecates the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Content(enum.IntEnum):
    """The kind of data that a collective sends; headers carry it."""

    VALUES = 0
    SIZES = 1
    IDS = 2
    WEIGHTS = 3
    ROWS = 4
    GRADIENTS = 5
    NUMBERS = 6

    @property
    def description(self) -> str:
        """Describe the content in an error message."""
        return {
            Content.SIZES: "the sizes of a batch",
            Content.IDS: "the ids of a batch",
            Content.WEIGHTS: "the weights of ids",
            Content.ROWS: "rows",
            Content.GRADIENTS: "gradients of rows",
            Content.NUMBERS: "numbers of a pipeline",
        }.get(self, "values")


class AllToAllAwaitable(Awaitable[Tensor]):
    """A collective in flight; `wait` returns the received messages, in rank order, flat.

    After `wait`, the current stream may use the result.
    """

    def __init__(
        self,
        received: Tensor,
        work: Any = None,
        sent: Tensor | None = None,
        *,
        in_flight: Any = None,
    ) -> None:
        super().__init__()
        self._received, self._work = received, work
        self._in_flight = in_flight  # ends with the last reference to it
        self._sent = sent  # must live as long as the collective may read it

    def _wait_impl(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = self._in_flight = None
        return self._received


def start_all_to_all(
    sent: Tensor,
    sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    received: Tensor | None = None,
    content: Content = Content.VALUES,
    has_header: bool = True,
) -> AllToAllAwaitable:
    """Start an all-to-all of one message per rank.

    In host memory the call returns when all ranks have made it, after comparing headers.

    Args:
        sent: the messages to all ranks, flat, in rank order.
        sizes: elements of the message to each rank.
        received_sizes: elements of the message from each rank.
        ranks: the ranks, which all make this call.
        received: where to write the messages, in rank order; allocated if left out.
        content: what is sent, which all ranks must agree about.
        has_header: False where no other collective uses the process group, so that no rank waits
            for the others here.

    Raises:
        RuntimeError: another thread has a collective over this process group in flight, or the
            ranks disagree about the collective.
    """
    sent = sent.contiguous()
    if received is None:
        received = sent.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return AllToAllAwaitable(received.copy_(sent))
    in_flight = _enter_collective(ranks) if sent.device.type == "cpu" else None
    if in_flight is not None and has_header and content not in _WITHIN_FORWARD:
        itemsize = sent.element_size()
        _check_headers(
            [content, _ALL_TO_ALL],
            [n * itemsize for n in sizes],
            [n * itemsize for n in received_sizes],
            ranks,
        )
    work = dist.all_to_all_single(
        received, sent, list(received_sizes), list(sizes), group=ranks.group, async_op=True
    )
    return AllToAllAwaitable(received, work, sent, in_flight=in_flight)


def start_all_gather(
    sent: Tensor, sizes: Sequence[int], ranks: RankGroup, *, content: Content = Content.VALUES
) -> AllToAllAwaitable:
    """Send all of `sent` (flat) to every rank; `sizes[r]` elements come from rank r.

    Raises:
        RuntimeError: see `start_all_to_all`.
    """
    sent = sent.contiguous()
    received = sent.new_empty(sum(sizes))
    if ranks.size == 1:
        return AllToAllAwaitable(received.copy_(sent))
    in_flight = _enter_collective(ranks) if sent.device.type == "cpu" else None
    if in_flight is not None:
        itemsize = sent.element_size()
        _check_headers(
            [content, _ALL_GATHER],
            [sent.nbytes] * ranks.size,
            [n * itemsize for n in sizes],
            ranks,
        )
    messages = list(received.split(list(sizes)))
    messages[ranks.rank].copy_(sent)
    # Gloo gathers messages of equal sizes only.
    works = [
        dist.broadcast(message, ranks.global_rank(rank), group=ranks.group, async_op=True)
        for rank, message in enumerate(messages)
    ]
    return AllToAllAwaitable(received, _Works(works), in_flight=in_flight)


class _Works:
    """Several `dist.Work`s that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# Headers

_ALL_TO_ALL, _ALL_GATHER = range(2)
# They follow the sizes of the same batch, which had a header: a second one would find nothing new.
_WITHIN_FORWARD = frozenset({Content.IDS, Content.WEIGHTS, Content.ROWS})


def _check_headers(
    kind: Sequence[int], nbytes: Sequence[int], received_nbytes: Sequence[int], ranks: RankGroup
) -> None:
    """Raise RuntimeError on every rank unless all ranks agree about the next collective.

    This rank sends `nbytes[r]` bytes to rank r and expects `received_nbytes[r]`. `kind` is the
    content and the collective. Every rank gathers the headers of all and evaluates all pairs, so
    that all ranks decide alike and none waits in the collective for a rank that raised.
    """
    header = torch.tensor([*kind, *nbytes, *received_nbytes], dtype=torch.int64)
    gathered = header.new_empty(ranks.size * len(header))
    _all_gather(gathered, header, group=ranks.group)
    headers = gathered.view(ranks.size, -1)
    kinds, sent, expected = headers.split([len(kind), ranks.size, ranks.size], dim=1)
    # [receiver, sender]
    differs = (kinds[:, None] != kinds[None]).any(dim=2) | (expected != sent.T)
    if not differs.any():
        return
    # A pair that involves this rank if there is one, else any.
    rank = ranks.rank if differs[ranks.rank].any() else int(differs.any(dim=1).nonzero()[0])
    peer = int(differs[rank].nonzero()[0])
    contents = kinds[:, 0].tolist()
    if contents[rank] != contents[peer]:
        raise _content_error(peer, Content(contents[peer]), rank, Content(contents[rank]))
    if not torch.equal(kinds[rank], kinds[peer]):
        names = ("an all-to-all", "an all-gather")
        raise RuntimeError(
            f"rank {peer} called {names[int(kinds[peer, 1])]} where rank {rank} called "
            f"{names[int(kinds[rank, 1])]}: {_SAME_ORDER}"
        )
    raise RuntimeError(
        f"rank {peer} sent {int(sent[peer, rank])} bytes where rank {rank} expected "
        f"{int(expected[rank, peer])}: {_SAME_ORDER}, with sizes that agree"
    )


_SAME_ORDER = "the ranks of a process group must call the same collectives in the same order"


def _content_error(peer: int, sent: Content, rank: int, expected: Content) -> RuntimeError:
    message = (
        f"rank {peer} sent {sent.description} where rank {rank} expected {expected.description}: "
        f"{_SAME_ORDER}"
    )
    if Content.GRADIENTS in (sent, expected):
        absent = peer if expected is Content.GRADIENTS else rank
        message += (
            f". The last loss of rank {absent} left out the output of a sharded collection, which "
            "that of the other rank used: every rank's loss must use it, if only times 0"
        )
    return RuntimeError(message)


# Threads


class _Collective:
    """A collective in flight, and the thread that started it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class _GroupState:
    """The collectives in flight over one process group in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_flight: weakref.WeakSet[_Collective] = weakref.WeakSet()
        self.error = ""


_group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = (
    weakref.WeakKeyDictionary()
)
_group_states_lock = threading.Lock()


def _enter_collective(ranks: RankGroup) -> _Collective:
    """Register a collective of this thread, which lasts as long as the returned object.

    Raise RuntimeError if another thread has one in flight. Ranks pair up collectives by their order
    in the group, and two threads would call them in another order on each rank: messages would
    reach the wrong table, and gloo aborts a process that gets more bytes than it expects. The group
    is unusable from then on. Collectives of tensors on a GPU are not registered: torch runs their
    backward in threads of its own.
    """
    group = ranks.group
    assert group is not None
    with _group_states_lock:
        state = _group_states.setdefault(group, _GroupState())
    entered = _Collective()
    with state.lock:
        for other in state.in_flight:
            if not state.error and other.thread is not entered.thread and other.thread.is_alive():
                state.error = (
                    f"threads {other.thread.name!r} and {entered.thread.name!r} exchange over one "
                    "process group at the same time, which mixes up their messages: give every "
                    "thread a process group of its own (torch.distributed.new_group, made in the "
                    "same order on all ranks, and RankGroup(group)), or let one thread use it"
                )
        if state.error:
            raise RuntimeError(state.error)
        state.in_flight.add(entered)
    return entered


# Gradients and precision


class DifferentiableAllToAllAwaitable(Awaitable[Tensor]):
    """An all-to-all of values that may need gradients, which `wait` connects to autograd."""

    def __init__(
        self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int], ranks: RankGroup
    ) -> None:
        super().__init__()
        self._sent = sent
        self._call = tuple(sizes), tuple(received_sizes), ranks
        self._pending = start_all_to_all(sent.detach(), *self._call, content=Content.WEIGHTS)

    def _wait_impl(self) -> Tensor:
        if not (self._sent.requires_grad and torch.is_grad_enabled()):
            return self._pending.wait()
        result: Tensor = _AllToAll.apply(self._sent, self._pending, *self._call)
        return result


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose backward sends the gradients in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,  # connects the result to autograd
        pending: AllToAllAwaitable,
        sizes: Any,
        received_sizes: Any,
        ranks: RankGroup,
    ) -> Tensor:
        ctx.sizes, ctx.received_sizes, ctx.ranks = sizes, received_sizes, ranks
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pending = start_all_to_all(
            grad.contiguous(),
            ctx.received_sizes,
            ctx.sizes,
            ctx.ranks,
            content=Content.GRADIENTS,
        )
        return pending.wait(), None, None, None, None


@dataclass(frozen=True)
class CommPrecision:
    """The codecs of the messages between ranks: of rows (`forward`) and of gradients (`backward`).

    Sums are float32 whatever the codec. Ids are always sent as they are.
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
    """Return `comm_precision`, or float32 in both directions for None.

    Raises:
        TypeError: `comm_precision` is something else.
    """
    if comm_precision is not None and not isinstance(comm_precision, CommPrecision):
        raise TypeError(
            "comm_precision must be None or a CommPrecision, e.g. "
            f"CommPrecision(forward=FP16(), backward=BF16()), got {comm_precision!r}"
        )
    return CommPrecision() if comm_precision is None else comm_precision


class DecodedAwaitable(Awaitable[Tensor]):
    """An all-to-all of floating-point values that a codec encodes; `wait` returns them decoded.

    The result is float32, or the 16-bit payload itself where its reader converts.
    """

    def __init__(
        self,
        values: Tensor,
        sizes: Sequence[int],
        received_sizes: Sequence[int],
        ranks: RankGroup,
        codec: Codec,
        content: Content,
    ) -> None:
        super().__init__()
        self._codec, self._sizes = codec, list(received_sizes)
        payload = codec.encode(values, list(sizes))
        self._pending = start_all_to_all(
            payload,
            codec.payload_splits(sizes),
            codec.payload_splits(received_sizes),
            ranks,
            content=content,
        )

    def _wait_impl(self) -> Tensor:
        payload = self._pending.wait()
        if payload.is_floating_point() and getattr(self._codec, "loss_scale", 1.0) == 1.0:
            return payload
        return self._codec.decode(payload, self._sizes, torch.float32)
