"""The exchange of outputs: the rows of several lookups return to their ranks, and gradients back.

All lookups of one `OutputExchange` start together. Their rows return in one message per rank where
they are few, otherwise in one per lookup. In backward, one header announces the gradients of all
outputs that the loss uses, and they travel in the same way.

In autograd every lookup has two nodes. `_OutputNode`, made when the output is used, passes on the
gradient of the output; `_RowsNode`, made when the rows are sent, waits for the gradients of the
rows from all ranks. Autograd runs nodes that were made later first, so that every `_OutputNode`
that takes part in a backward pass has run before the first `_RowsNode`: by then it is known which
outputs the loss uses, on all ranks alike, and outputs that no loss uses are left alone. If all are
used, gradients are sent as soon as the last one is known.

A loss that a `GradScaler` has scaled may overflow on one rank alone. The ranks agree about that
while the gradients are under way, so that all of them skip the step (`_Scaling`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emblib.ops.derivatives import once_differentiable
from emblib.ops.scaled_gradients import known_scale, note_finite
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.exchange import (
    Content,
    Headers,
    gradient_headers,
    start_all_gather,
    start_minimum,
)
from emblib.sharding.node_sums import NodeSumStep, start_gradients_of_sums, start_sums
from emblib.sharding.ranks import RankGroup
from emblib.sharding.values import Received, Values, start_values


class OutputStep(ABC):
    """One lookup of a batch, whose rows return to the ranks that own the bags.

    Attributes:
        local: the rows that this rank looked up for all ranks.
        replica_rows: the rows of replicated tables for the batch of this rank.
        gradient_sink: tensor that gets the gradients of replicated tables' rows of all ranks in
            backward, see `ReplicatedTables.gradient_sink`.
        replica_sizes: elements of the gradients of replicated tables' rows, by rank; empty without
            a `gradient_sink`.
        is_small: whether the rows may travel with those of other lookups, see `IncomingBatch`.
        node_sums: the rows that the node sums before they are sent; None for none. `rows` passes
            them on, and `assemble` gets the sums after the rows of single ranks.
    """

    node_sums: NodeSumStep | None = None

    def __init__(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        replica_sizes: Sequence[int],
        *,
        is_small: bool,
    ) -> None:
        self.is_small = is_small
        self.local: Tensor | None = local
        self.local_shape = local.shape
        self.replica_rows, self.gradient_sink = replica_rows, gradient_sink
        self.replica_shape = None if replica_rows is None else replica_rows.shape
        self.sink_shape = None if gradient_sink is None else gradient_sink.shape
        self.replica_sizes = list(replica_sizes)

    @abstractmethod
    def rows(self) -> Values:
        """Return the rows to send."""

    @abstractmethod
    def assemble(self, received: Received, replica_rows: Tensor | None) -> Tensor:
        """Return the output."""

    @abstractmethod
    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[Values, Tensor | None]:
        """Return the gradients of rows to send, and those of replicated tables' rows, flat.

        With `keeps_local`, the gradients of rows of this rank are not sent, where that is possible.
        """

    @abstractmethod
    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        """Return the bytes of the gradients to each rank, and of those from each rank."""

    @abstractmethod
    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of `local`, of what other ranks or all of them sent."""

    def sink_gradient(self, gathered: Tensor) -> Tensor:
        """Return the gradient of `gradient_sink`."""
        assert self.sink_shape is not None
        return gathered.view(self.sink_shape)


class OutputExchange:
    """The rows of several lookups in flight, and their gradients.

    Args:
        steps: the lookups, in the same order on all ranks.
        ranks: the processes.
        is_merged: whether the messages of all lookups travel in one collective.
    """

    def __init__(self, steps: Sequence[OutputStep], ranks: RankGroup, *, is_merged: bool) -> None:
        self._steps, self._ranks, self._is_merged = list(steps), ranks, is_merged
        sums = [step.node_sums for step in steps]
        rows = self._start([step.rows() for step in steps], sums, Content.ROWS)
        self._rows: list[Awaitable[Received] | None] = [
            *start_sums(sums, rows, is_merged=is_merged)
        ]
        self._headers: Headers | None = None
        self._announced: set[int] = set()
        self._ready: dict[int, tuple[Values, Tensor | None]] = {}
        self._coming: dict[int, tuple[Awaitable[Received], Awaitable[Tensor] | None]] = {}
        self._scaling: _Scaling | None = None
        # A rank without tables takes part in backward too: the anchor requires a gradient.
        anchor = torch.empty((), device=ranks.device, requires_grad=True)
        self._tokens: list[Tensor | None] = [
            _RowsNode.apply(anchor, step.local, step.gradient_sink, self, index)
            for index, step in enumerate(self._steps)
        ]
        for step in self._steps:
            step.local = step.gradient_sink = None

    def _start(
        self, values: Sequence[Values], sums: Sequence[NodeSumStep | None], content: Content
    ) -> list[Awaitable[Received]]:
        """Start to send values to single ranks, where any rank has some."""
        is_sent = [step is None or step.has_direct for step in sums]
        received = iter(
            start_values(
                [one for one, here in zip(values, is_sent, strict=True) if here],
                self._ranks,
                content=content,
                is_merged=self._is_merged,
            )
        )
        return [
            next(received) if here else ReadyAwaitable(Received(one.values))
            for one, here in zip(values, is_sent, strict=True)
        ]

    def outputs(self) -> list[Awaitable[Tensor]]:
        """Return the output of each lookup."""
        return [
            DeferredAwaitable(partial(self._connect, index)) for index in range(len(self._steps))
        ]

    def _connect(self, index: int) -> Tensor:
        step, token = self._steps[index], self._tokens[index]
        replica_rows, step.replica_rows, self._tokens[index] = step.replica_rows, None, None
        result: Tensor = _OutputNode.apply(token, replica_rows, self, index)
        return result

    def assemble(self, index: int, replica_rows: Tensor | None) -> Tensor:
        """Wait for the rows of a lookup and assemble its output."""
        rows = self._rows[index]
        assert rows is not None
        self._rows[index] = None
        return self._steps[index].assemble(rows.wait(), replica_rows)

    def send_gradient(self, index: int, grad: Tensor) -> Tensor | None:
        """Take the gradient of an output; return that of this rank's replicated tables' rows.

        The gradients are sent when the outputs of all lookups have theirs.
        """
        step = self._steps[index]
        self._add_to_scaling(grad)
        self._announced.add(index)
        is_last = len(self._announced) == len(self._steps)
        if is_last:
            self._headers = self._start_headers()
        self._ready[index] = step.backward(grad, keeps_local=not self._is_merged)
        replica_grads = self._ready[index][1]
        if is_last:
            self._send()
        if step.sink_shape is not None or step.replica_shape is None:
            return None
        assert replica_grads is not None
        return replica_grads.view(step.replica_shape)

    def receive_gradient(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of a lookup's rows, and of its `gradient_sink`."""
        if self._ready:
            self._headers = self._start_headers()
            self._send()
        if self._scaling is not None:
            self._scaling.agree()
            self._scaling = None
        local, gathered = self._coming.pop(index)
        step = self._steps[index]
        return (
            step.local_gradient(local.wait().values),
            None if gathered is None else step.sink_gradient(gathered.wait()),
        )

    def _start_headers(self) -> Headers | None:
        """Announce the gradients to the other ranks."""
        indices = sorted(self._announced)
        self._announced = set()
        sizes = [self._steps[index].gradient_nbytes() for index in indices]
        is_scaled = self._scaling is not None
        return gradient_headers(indices, sizes, self._ranks, is_scaled=is_scaled)

    def _add_to_scaling(self, grad: Tensor) -> None:
        scale = known_scale()
        if scale is None:
            return
        if self._scaling is None:
            self._scaling = _Scaling(scale.to(grad.device), self._ranks)
        self._scaling.add(grad)

    def _send(self) -> None:
        """Start to send the gradients that are ready."""
        ready, self._ready = self._ready, {}
        headers, self._headers = self._headers, None
        if headers is not None:
            headers.check()
        if self._scaling is not None:
            self._scaling.start()
        indices = sorted(ready)
        sums = [self._steps[index].node_sums for index in indices]
        pending = start_gradients_of_sums(
            sums,
            self._start([ready[index][0] for index in indices], sums, Content.GRADIENTS),
            is_merged=self._is_merged,
        )
        for index, local in zip(indices, pending, strict=True):
            gathered, replica_grads = None, ready[index][1]
            if self._steps[index].sink_shape is not None:
                assert replica_grads is not None
                gathered = start_all_gather(
                    replica_grads,
                    self._steps[index].replica_sizes,
                    self._ranks,
                    content=Content.GRADIENTS,
                    has_header=False,
                )
            self._coming[index] = local, gathered


class _Scaling:
    """Agreement of the ranks about the scale of a `GradScaler` in one backward.

    Args:
        scale: scale of this rank.
        ranks: the processes.
    """

    def __init__(self, scale: Tensor, ranks: RankGroup) -> None:
        self._scale, self._ranks = scale.float(), ranks
        self._finite: list[Tensor] = []
        self._pending: Awaitable[Tensor] | None = None

    def add(self, grad: Tensor) -> None:
        """Add the gradient of an output of this rank."""
        self._finite.append(grad.isfinite().all())

    def start(self) -> None:
        """Start to tell the other ranks."""
        is_finite = torch.stack(self._finite).all().float()
        numbers = torch.stack([is_finite, self._scale, -self._scale])
        self._pending = start_minimum(numbers, self._ranks)

    def agree(self) -> None:
        """Note for updates of this backward whether the gradients of all ranks are finite.

        Where the host need not wait for the device to know it, scales that differ between ranks
        raise; elsewhere the step is skipped, as after an overflow.

        Raises:
            RuntimeError: the scales differ, on every rank.
        """
        assert self._pending is not None
        is_finite, least, most = self._pending.wait().unbind()
        if is_finite.device.type == "cpu" and least != -most:
            raise RuntimeError(
                f"the torch.amp.GradScalers of the ranks have different scales, {float(least)} to "
                f"{float(-most)}, and a gradient has one: make them with equal arguments, give "
                "scaler.step the FusedOptimizer on every rank, or use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
            )
        note_finite((is_finite > 0.0) & (least == -most))


class _RowsNode(torch.autograd.Function):
    """Connects rows to their token; backward waits for their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        local: Tensor,
        gradient_sink: Tensor | None,
        exchange: OutputExchange,
        index: int,
    ) -> Tensor:
        ctx.exchange, ctx.index = exchange, index
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, sink = ctx.exchange.receive_gradient(ctx.index)
        return None, local, sink, None, None


class _OutputNode(torch.autograd.Function):
    """Connects the output of a lookup to its token and to replicated tables' rows."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        replica_rows: Tensor | None,
        exchange: OutputExchange,
        index: int,
    ) -> Tensor:
        ctx.exchange, ctx.index = exchange, index
        ctx.save_for_backward(token)
        return exchange.assemble(index, replica_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A checkpointed region is repeated, with its exchanges, at the first tensor that it saved:
        # here on every rank, also on one whose lookups save none.
        assert len(ctx.saved_tensors) == 1
        replica_grads = ctx.exchange.send_gradient(ctx.index, grad)
        return grad.new_empty(0), replica_grads, None, None
