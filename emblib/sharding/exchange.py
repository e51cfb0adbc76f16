"""The collective of a step: an all-to-all of uneven parts, under way while others work.

Everything that sharded collections send goes through here: ids to the ranks that hold their rows,
pooled or single rows back, gradients the way of the rows. Its parts may be empty and uneven on
every backend, its sums happen where they are wanted, in float32 and in rank order, and it takes any
payload. Gradients that all ranks want alike, of copies of tables, are gathered in the same way.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.shared_memory import link_of


class Pending:
    """An all-to-all under way; `wait` returns what was received."""

    def __init__(self, received: Tensor, work: Any = None, sent: Tensor | None = None) -> None:
        self._received, self._work = received, work
        self._sent = sent  # must live as long as the collective may read it

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank; the current stream may use them."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._received


def start_all_to_all(
    sent: Tensor,
    sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: Ranks,
    *,
    received: Tensor | None = None,
) -> Pending:
    """Send part r of `sent` (flat; `sizes[r]` elements) to rank r.

    `received` is where the parts of the others go, one after another by rank; made if not given.
    """
    sent = sent.contiguous()
    if received is None:
        received = sent.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return Pending(received.copy_(sent))
    link = link_of(ranks) if sent.device.type == "cpu" else None
    if link is not None:
        return Pending(received, link.start(sent, sizes, received, received_sizes))
    work = dist.all_to_all_single(
        received, sent, list(received_sizes), list(sizes), group=ranks.group, async_op=True
    )
    return Pending(received, work, sent)


def start_all_gather(part: Tensor, sizes: Sequence[int], ranks: Ranks) -> Pending:
    """Send all of `part` (flat) to every rank; `sizes[r]` elements come from rank r."""
    part = part.contiguous()
    received = part.new_empty(sum(sizes))
    if ranks.size == 1:
        return Pending(received.copy_(part))
    link = link_of(ranks) if part.device.type == "cpu" else None
    if link is not None:
        return Pending(received, link.start_all_gather(part, received, sizes))
    parts = list(received.split(list(sizes)))
    parts[ranks.rank].copy_(part)
    # Gloo gathers equal parts only.
    works = [
        dist.broadcast(own, ranks.global_rank(rank), group=ranks.group, async_op=True)
        for rank, own in enumerate(parts)
    ]
    return Pending(received, _Together(works))


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
        pending = start_all_to_all(grad.contiguous(), ctx.received_sizes, ctx.sizes, ctx.ranks)
        return pending.wait(), None, None, None, None


class DifferentiableAllToAll:
    """An all-to-all of values that may want gradients: starts at once, ends with `wait`."""

    def __init__(
        self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int], ranks: Ranks
    ) -> None:
        self._sent = sent
        self._call = tuple(sizes), tuple(received_sizes), ranks
        self._pending = start_all_to_all(sent.detach(), *self._call)

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank."""
        if not (self._sent.requires_grad and torch.is_grad_enabled()):
            return self._pending.wait()
        result: Tensor = _AllToAll.apply(self._sent, self._pending, *self._call)
        return result
