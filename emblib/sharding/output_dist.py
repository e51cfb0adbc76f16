"""The output_dist: return rows to the ranks that own the bags or ids, and send gradients back.

This is the last stage of a sharded lookup. `start_output_dists` starts the `OutputStep`s of one or
several collections together. Few rows travel in one message per rank, many rows in one message per
rank and lookup. Each step assembles its output from the received rows. In backward, gradients are
sent in the opposite direction (`_RowsInFlight`). Rows that several ranks of one node sum for a bag
are added up within the node, before they are sent to other nodes (`emblib.sharding.node_sums`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emblib.ops.derivatives import once_differentiable
from emblib.ops.scaled_gradients import note_finite, recorded_scale
from emblib.sharding import fingerprint
from emblib.sharding.all_to_all import start_all_gather, start_minimum
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.codecs import ReceivedValues, SentValues, start_sending
from emblib.sharding.headers import Content, Headers, gradient_headers
from emblib.sharding.node_sums import NodeSumStep, start_gradients_of_sums, start_sums
from emblib.sharding.ranks import RankGroup
from emblib.sharding.table_hyperparams import TableHyperparams, check_digests, local_digests


def start_output_dists(
    steps: Sequence[OutputStep], ranks: RankGroup, *, is_merged: bool
) -> list[Awaitable[Tensor]]:
    """Start to return the rows of several lookups; return an awaitable of each output.

    All ranks call this. If a lookup has `node_sums`, the call waits for the ranks of this node.
    Each output must be awaited once, on all ranks in the same order. It has
    gradients if they are enabled both during this call and when it is awaited.

    Args:
        steps: the lookups, in the same order on all ranks.
        ranks: the processes.
        is_merged: whether the messages of all lookups travel in one collective; the same on all
            ranks.

    Raises:
        RuntimeError: see `start_all_to_alls`.
    """
    in_flight = _RowsInFlight(steps, ranks, is_merged=is_merged)
    return [DeferredAwaitable(partial(in_flight.connect, index)) for index in range(len(steps))]


class OutputStep(ABC):
    """One lookup of a batch, whose rows return to the ranks that own the bags.

    Attributes:
        local: rows that this rank looked up for all ranks, flat or `[bags, columns]`.
        replica_rows: rows of replicated tables for the batch of this rank; None without such
            tables.
        gradient_sink: tensor that gets the gradients of replicated tables' rows of all ranks in
            backward, see `ReplicatedTables.gradient_sink`; None if nothing needs them.
        replica_sizes: number of elements of the gradients of replicated tables' rows, by rank; not
            used without a `gradient_sink`.
        merges_rows: whether the rows may travel with rows of other lookups, see
            `IncomingBatch.merges_rows`; the same on all ranks.
        hyperparams: hyperparameters of the tables, which ranks compare in backward; None to compare
            none.
        node_sums: the sums of the lookup within nodes; None if nodes sum no rows. With sums,
            `rows_to_send` leaves out the rows to sum (`NodeSumStep.pack`), and `assemble` gets the
            sums after the rows of single ranks.
        local_shape: shape of `local`. `_RowsInFlight` sets `local`, `replica_rows` and
            `gradient_sink` to None once autograd has them; their shapes remain.
        replica_shape: shape of `replica_rows`, or None.
        sink_shape: shape of `gradient_sink`, or None.
    """

    hyperparams: TableHyperparams | None = None
    node_sums: NodeSumStep | None = None

    def __init__(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        replica_sizes: Sequence[int],
        *,
        merges_rows: bool,
    ) -> None:
        self.merges_rows = merges_rows
        self.local: Tensor | None = local
        self.local_shape = local.shape
        self.replica_rows, self.gradient_sink = replica_rows, gradient_sink
        self.replica_shape = None if replica_rows is None else replica_rows.shape
        self.sink_shape = None if gradient_sink is None else gradient_sink.shape
        self.replica_sizes = list(replica_sizes)

    @abstractmethod
    def rows_to_send(self) -> SentValues:
        """Return the rows to send.

        They are flat and in the order of the receiving ranks; `SentValues` has the number of
        elements for each rank.
        """

    @abstractmethod
    def assemble(self, received: ReceivedValues, replica_rows: Tensor | None) -> Tensor:
        """Return the output of the lookup, float32.

        `received` has the rows from all ranks, flat, in the order of ranks, and then the sums of
        nodes, if there are any; their dtype is that of a result of `start_sending`. This rank's own
        rows may be in `received.local` instead. `replica_rows` is None without replicated tables.
        """

    @abstractmethod
    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[SentValues, Tensor | None]:
        """Return the gradients of rows to send, and those of replicated tables' rows, flat.

        The latter are None or empty without such tables. `grad` has the shape of the output. With
        `keeps_local`, gradients of this rank's own rows may be stored in place of being sent; the
        next `local_gradient` uses them.
        """

    @abstractmethod
    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        """Return the number of bytes of the gradients to each rank, and from each rank."""

    @abstractmethod
    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of `local`, in its shape, from the received gradients.

        `received` is flat: the gradients from all ranks in the order of ranks, then those of sums
        of nodes. Gradients that `backward` has stored are not in it.
        """

    def sink_gradient(self, gathered: Tensor) -> Tensor:
        """Return the gradient of `gradient_sink`.

        `gathered` are the gradients of replicated tables' rows of all ranks, flat, rank by rank.
        """
        assert self.sink_shape is not None
        return gathered.view(self.sink_shape)


class _RowsInFlight:
    """The rows of the lookups of one `start_output_dists` in flight, and their gradients.

    The constructor starts to send the rows. `connect` must be called once per lookup. In backward,
    autograd calls `send_gradient` for each output that the loss uses, and then `receive_gradient`
    for each of their lookups.

    This order follows from the two autograd nodes of a lookup. `_RowsNode` is made when the rows
    are sent, and `_OutputNode` when the output is used. Autograd runs nodes that were made later
    first, so every `_OutputNode` of a backward pass runs before the first `_RowsNode`. By then this
    rank knows which outputs its loss uses, and it sends nothing for the others. If all outputs are
    used, gradients are sent as soon as the last one is known. One header in host memory, for all
    outputs that the loss uses, precedes them.

    A loss that a `GradScaler` has scaled may overflow on only one rank. The ranks agree about an
    overflow while the gradients are in flight, so that all of them skip the step (`_Scaling`).
    """

    def __init__(self, steps: Sequence[OutputStep], ranks: RankGroup, *, is_merged: bool) -> None:
        self._steps, self._ranks, self._is_merged = list(steps), ranks, is_merged
        node_sums = [step.node_sums for step in steps]
        rows = self._start_sending([step.rows_to_send() for step in steps], node_sums, Content.ROWS)
        self._rows: list[Awaitable[ReceivedValues] | None] = [
            *start_sums(node_sums, rows, is_merged=is_merged)
        ]
        self._headers: Headers | None = None
        self._announced_outputs: set[int] = set()  # outputs with a gradient, not yet in a header
        # By lookup: the gradients of its rows, and the gradients of replicated tables' rows.
        self._ready_gradients: dict[int, tuple[SentValues, Tensor | None]] = {}
        self._gradients_in_flight: dict[
            int, tuple[Awaitable[ReceivedValues], Awaitable[Tensor] | None]
        ] = {}
        self._scaling: _Scaling | None = None
        # The anchor requires a gradient, so that a rank without tables takes part in backward too.
        anchor = torch.empty((), device=ranks.device, requires_grad=True)
        self._tokens: list[Tensor | None] = [
            _RowsNode.apply(anchor, step.local, step.gradient_sink, self, index)
            for index, step in enumerate(self._steps)
        ]
        for step in self._steps:
            step.local = step.gradient_sink = None

    def _start_sending(
        self,
        values: Sequence[SentValues],
        node_sums: Sequence[NodeSumStep | None],
        content: Content,
    ) -> list[Awaitable[ReceivedValues]]:
        """Start to send values to single ranks; return an awaitable per step.

        A step for which no rank has such values sends nothing: its result is its own values, which
        are empty.
        """
        are_sent = [step is None or step.has_direct for step in node_sums]
        values_to_send = [
            step_values for step_values, is_sent in zip(values, are_sent, strict=True) if is_sent
        ]
        received = iter(
            start_sending(values_to_send, self._ranks, content=content, is_merged=self._is_merged)
        )
        return [
            next(received) if is_sent else ReadyAwaitable(ReceivedValues(step_values.values))
            for step_values, is_sent in zip(values, are_sent, strict=True)
        ]

    def connect(self, index: int) -> Tensor:
        """Wait for the rows of a lookup, and return its output, connected to autograd."""
        step, token = self._steps[index], self._tokens[index]
        replica_rows, step.replica_rows, self._tokens[index] = step.replica_rows, None, None
        result: Tensor = _OutputNode.apply(token, replica_rows, self, index)
        return result

    def assemble(self, index: int, replica_rows: Tensor | None) -> Tensor:
        """Wait for the rows of a lookup and assemble its output.

        The output is that of `OutputStep.assemble`. This may be called once per lookup, because it
        frees the received rows.
        """
        rows = self._rows[index]
        assert rows is not None
        self._rows[index] = None
        return self._steps[index].assemble(rows.wait(), replica_rows)

    def send_gradient(self, index: int, grad: Tensor) -> Tensor | None:
        """Store the gradient of an output; return the gradient of the replicated tables' rows.

        The result is None if there are no such rows, or if a `gradient_sink` gets their gradients.
        The call for the last output sends the gradients of all outputs. If the loss does not use
        all outputs, `receive_gradient` sends them. `grad` has the shape of the output `index`.
        """
        step = self._steps[index]
        self._add_to_scaling(grad)
        self._announced_outputs.add(index)
        is_last = len(self._announced_outputs) == len(self._steps)
        if is_last:
            self._headers = self._start_headers()
        self._ready_gradients[index] = step.backward(grad, keeps_local=not self._is_merged)
        replica_grads = self._ready_gradients[index][1]
        if is_last:
            self._send_gradients()
        if step.sink_shape is not None or step.replica_shape is None:
            return None
        assert replica_grads is not None
        return replica_grads.view(step.replica_shape)

    def receive_gradient(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of a lookup's rows, and of its `gradient_sink`; wait for them.

        The first call of a backward sends the gradients that `send_gradient` has not sent, and lets
        the ranks agree about the scale of a `GradScaler`.

        Raises:
            RuntimeError: in host memory, the losses of ranks use different outputs or scales, or
                their tables have different hyperparameters, see `Headers.check`, `_Scaling.agree`
                and `check_digests`.
        """
        if self._ready_gradients:
            self._headers = self._start_headers()
            self._send_gradients()
        if self._scaling is not None:
            self._scaling.agree()
            self._scaling = None
        local_awaitable, gathered_awaitable = self._gradients_in_flight.pop(index)
        step = self._steps[index]
        return (
            step.local_gradient(local_awaitable.wait().values),
            None if gathered_awaitable is None else step.sink_gradient(gathered_awaitable.wait()),
        )

    def _start_headers(self) -> Headers | None:
        """Send the header of the announced gradients; return None if ranks compare no headers."""
        indices = sorted(self._announced_outputs)
        self._announced_outputs = set()
        nbytes = [self._steps[index].gradient_nbytes() for index in indices]
        return gradient_headers(
            indices,
            nbytes,
            self._ranks,
            is_scaled=self._scaling is not None,
            numbers=local_digests(
                [self._steps[index].hyperparams for index in indices], self._ranks
            ),
        )

    def _add_to_scaling(self, grad: Tensor) -> None:
        """Add a gradient to the check for overflow, if a `GradScaler` scales the loss."""
        scale = recorded_scale()
        if scale is None:
            return
        if self._scaling is None:
            self._scaling = _Scaling(scale.to(grad.device), self._ranks)
        self._scaling.add(grad)

    def _send_gradients(self) -> None:
        """Compare the headers, and start to send the gradients that are ready."""
        gradients, self._ready_gradients = self._ready_gradients, {}
        indices = sorted(gradients)
        replicas = self._ranks.replicas
        if replicas is None or replicas.has_compared_losses or replicas.device.type != "cpu":
            self._check_headers(indices)
        else:  # so that no group waits for another that has raised or has no scale to agree about
            scaler = "unused" if self._scaling is None else "used"
            fingerprint.agree(
                replicas,
                lambda: self._check_headers(indices),
                lambda _: {"the losses of replicas, as ranks": {"torch.amp.GradScaler": scaler}},
            )
            replicas.has_compared_losses = True
        if self._scaling is not None:
            self._scaling.start()
        node_sums = [self._steps[index].node_sums for index in indices]
        pending = start_gradients_of_sums(
            node_sums,
            self._start_sending(
                [gradients[index][0] for index in indices], node_sums, Content.GRADIENTS
            ),
            is_merged=self._is_merged,
        )
        for index, local_awaitable in zip(indices, pending, strict=True):
            gathered_awaitable, replica_grads = None, gradients[index][1]
            if self._steps[index].sink_shape is not None:
                assert replica_grads is not None
                gathered_awaitable = start_all_gather(
                    replica_grads,
                    self._steps[index].replica_sizes,
                    self._ranks,
                    content=Content.GRADIENTS,
                    has_header=False,
                )
            self._gradients_in_flight[index] = local_awaitable, gathered_awaitable

    def _check_headers(self, indices: Sequence[int]) -> None:
        """Compare the headers of the gradients of these outputs, if ranks compare headers."""
        headers, self._headers = self._headers, None
        if headers is not None:
            check_digests(
                [self._steps[index].hyperparams for index in indices], headers.check(), self._ranks
            )


class _Scaling:
    """Agreement of the ranks about the scale of a `GradScaler` in one backward.

    Args:
        scale: scale of this rank.
        ranks: the processes.
    """

    def __init__(self, scale: Tensor, ranks: RankGroup) -> None:
        self._scale, self._ranks = scale.float(), ranks
        self._finite_flags: list[Tensor] = []  # one bool scalar per gradient
        self._pending: Awaitable[Tensor] | None = None

    def add(self, grad: Tensor) -> None:
        """Add the gradient of an output of this rank, before `start`."""
        self._finite_flags.append(grad.isfinite().all())

    def start(self) -> None:
        """Start to send the scale, and whether gradients are finite, to the other ranks."""
        is_finite = torch.stack(self._finite_flags).all().float()
        # The minimum of the negated scale is the negated maximum.
        values = torch.stack([is_finite, self._scale, -self._scale])
        self._pending = start_minimum(values, self._ranks)

    def agree(self) -> None:
        """Note for the updates of this backward whether the gradients of all ranks are finite.

        Groups of ranks that have replicas of the tables agree too: they have the dense part in
        common, whose gradients must have one scale. If scales on a GPU differ between ranks, the
        step is skipped, as after an overflow, because the host would have to wait to raise.

        Raises:
            RuntimeError: the scales differ, and are in host memory; on every rank.
        """
        assert self._pending is not None
        values = self._pending.wait()
        if self._ranks.replicas is not None:
            values = start_minimum(values, self._ranks.replicas).wait()
        is_finite, min_scale, negated_max_scale = values.unbind()
        if is_finite.device.type == "cpu" and min_scale != -negated_max_scale:
            raise RuntimeError(
                f"the torch.amp.GradScalers of the ranks have different scales, {float(min_scale)} "
                f"to {float(-negated_max_scale)}, and a gradient has one: make them with equal "
                "arguments, give scaler.step the FusedOptimizer on every rank, or use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
            )
        note_finite((is_finite > 0.0) & (min_scale == -negated_max_scale))


class _RowsNode(torch.autograd.Function):
    """Connects rows to their token; backward waits for their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        local: Tensor,
        gradient_sink: Tensor | None,
        in_flight: _RowsInFlight,
        index: int,
    ) -> Tensor:
        ctx.in_flight, ctx.index = in_flight, index
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, sink = ctx.in_flight.receive_gradient(ctx.index)
        return None, local, sink, None, None


class _OutputNode(torch.autograd.Function):
    """Connects the output of a lookup to its token and to replicated tables' rows."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        replica_rows: Tensor | None,
        in_flight: _RowsInFlight,
        index: int,
    ) -> Tensor:
        ctx.in_flight, ctx.index = in_flight, index
        ctx.save_for_backward(token)
        return in_flight.assemble(index, replica_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A checkpointed region is repeated, with its collectives, at the first tensor that it
        # saved: here on every rank, also on one whose lookups save none.
        assert len(ctx.saved_tensors) == 1
        replica_grads = ctx.in_flight.send_gradient(ctx.index, grad)
        return grad.new_empty(0), replica_grads, None, None
