"""The collective of a step: an all-to-all of uneven parts, under way while others work.

Everything that sharded collections send goes through here: ids to the ranks that hold their rows,
pooled or single rows back, gradients the way of the rows. Its parts may be empty and uneven on
every backend, its sums happen where they are wanted, in float32 and in rank order, and it takes any
payload. Gradients that all ranks want alike, of copies of tables, are gathered in the same way.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.shared_memory import Content, link_of


class Pending:
    """An all-to-all under way; `wait` returns what was received."""

    def __init__(
        self,
        received: Tensor,
        work: Any = None,
        sent: Tensor | None = None,
        *,
        turn: Any = None,
    ) -> None:
        self._received, self._work = received, work
        self._turn = turn  # ends with the last reference to it
        self._sent = sent  # must live as long as the collective may read it

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank; the current stream may use them."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = self._turn = None
        return self._received


def start_all_to_all(
    sent: Tensor,
    sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: Ranks,
    *,
    received: Tensor | None = None,
    content: Content = Content.VALUES,
) -> Pending:
    """Send part r of `sent` (flat; `sizes[r]` elements) to rank r.

    `received` is where the parts of the others go, one after another by rank; made if not given.
    `content` says what is sent; ranks that share memory compare it.

    Raises:
        RuntimeError: another thread has an exchange over this process group in flight.
    """
    sent = sent.contiguous()
    if received is None:
        received = sent.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return Pending(received.copy_(sent))
    turn = _take_turn(ranks) if sent.device.type == "cpu" else None
    link = link_of(ranks) if sent.device.type == "cpu" else None
    if link is not None:
        under_way = link.start(sent, sizes, received, received_sizes, content)
        return Pending(received, under_way, turn=turn)
    work = dist.all_to_all_single(
        received, sent, list(received_sizes), list(sizes), group=ranks.group, async_op=True
    )
    return Pending(received, work, sent, turn=turn)


def start_all_gather(
    part: Tensor, sizes: Sequence[int], ranks: Ranks, *, content: Content = Content.VALUES
) -> Pending:
    """Send all of `part` (flat) to every rank; `sizes[r]` elements come from rank r."""
    part = part.contiguous()
    received = part.new_empty(sum(sizes))
    if ranks.size == 1:
        return Pending(received.copy_(part))
    turn = _take_turn(ranks) if part.device.type == "cpu" else None
    link = link_of(ranks) if part.device.type == "cpu" else None
    if link is not None:
        return Pending(received, link.start_all_gather(part, received, sizes, content), turn=turn)
    parts = list(received.split(list(sizes)))
    parts[ranks.rank].copy_(part)
    # Gloo gathers equal parts only.
    works = [
        dist.broadcast(own, ranks.global_rank(rank), group=ranks.group, async_op=True)
        for rank, own in enumerate(parts)
    ]
    return Pending(received, _Together(works), turn=turn)


class _Turn:
    """An exchange in flight, and the thread that started it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class _Turns:
    """The exchanges in flight over one process group in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: weakref.WeakSet[_Turn] = weakref.WeakSet()
        self.error = ""


_all_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, _Turns] = weakref.WeakKeyDictionary()
_all_turns_lock = threading.Lock()


def _take_turn(ranks: Ranks) -> _Turn:
    """Return what stands for an exchange in flight; raise where another thread has one.

    Exchanges pair up by their order in the group, which two threads would make another one on every
    rank: messages would reach the wrong table, and gloo ends a process that gets more bytes than it
    expects. So the group is of no use from then on. Tensors on a GPU are not asked: torch runs
    their backward in threads of its own.
    """
    group = ranks.group
    assert group is not None
    with _all_turns_lock:
        turns = _all_turns.setdefault(group, _Turns())
    turn = _Turn()
    with turns.lock:
        for other in turns.open:
            if not turns.error and other.thread is not turn.thread and other.thread.is_alive():
                turns.error = (
                    f"threads {other.thread.name!r} and {turn.thread.name!r} exchange over one "
                    "process group at the same time, which mixes up their messages: give every "
                    "thread a process group of its own (torch.distributed.new_group, made in the "
                    "same order on all ranks, and Ranks(group)), or let one thread use it"
                )
        if turns.error:
            raise RuntimeError(turns.error)
        turns.open.add(turn)
    return turn


class _Together:
    """Collectives that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all have ended."""
        for work in self._works:
            work.wait()


class _AllToAll(torch.autograd.Function):
    """Gradients go back the way the values came."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, pending: Pending, sizes: Any, received_sizes: Any, ranks: Ranks
    ) -> Tensor:
        """What was received; `sent` only ties it to autograd."""
        ctx.sizes, ctx.received_sizes, ctx.ranks = sizes, received_sizes, ranks
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of what this rank sent."""
        pending = start_all_to_all(
            grad.contiguous(),
            ctx.received_sizes,
            ctx.sizes,
            ctx.ranks,
            content=Content.GRADIENTS,
        )
        return pending.wait(), None, None, None, None


class DifferentiableAllToAll:
    """An all-to-all of values that may want gradients: starts at once, ends with `wait`."""

    def __init__(
        self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int], ranks: Ranks
    ) -> None:
        self._sent = sent
        self._call = tuple(sizes), tuple(received_sizes), ranks
        self._pending = start_all_to_all(sent.detach(), *self._call, content=Content.WEIGHTS)

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank."""
        if not (self._sent.requires_grad and torch.is_grad_enabled()):
            return self._pending.wait()
        result: Tensor = _AllToAll.apply(self._sent, self._pending, *self._call)
        return result
