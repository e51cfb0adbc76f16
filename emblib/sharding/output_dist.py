"""The output_dist: return rows to the ranks that own the bags or ids, and send gradients back.

This is the last stage of a sharded lookup. `start_output_dists` starts the `OutputStep`s of one or
several collections together. Few rows travel in one message per rank, many rows in one message per
rank and lookup. Each step assembles its output from the received rows. In backward, gradients are
sent in the opposite direction (`_RowsInFlight`). Rows that several ranks of one node sum for a bag
are added up within the node, before they are sent to other nodes (`NodeSumDist`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import PieceColumn, TargetColumn
from emblib.ops import route
from emblib.ops.derivatives import once_differentiable
from emblib.ops.scaled_gradients import known_scale, note_finite
from emblib.sharding.all_to_all import start_all_gather, start_minimum
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.codecs import FP32, CommPrecision, ReceivedValues, SentValues, start_sending
from emblib.sharding.headers import Content, Headers, gradient_headers
from emblib.sharding.layout import NodeSums, RankLayout
from emblib.sharding.ranks import NodeRanks, RankGroup, split_by_node
from emblib.sharding.table_hyperparams import TableHyperparams, check_digests, local_digests


def start_output_dists(
    steps: Sequence[OutputStep], ranks: RankGroup, *, is_merged: bool
) -> list[Awaitable[Tensor]]:
    """Start to return the rows of several lookups; return their outputs.

    Args:
        steps: the lookups, in the same order on all ranks.
        ranks: the processes.
        is_merged: whether the messages of all lookups travel in one collective; the same on all
            ranks.

    Lookups with `node_sums` wait here for the ranks of this node. Each output must be awaited once,
    on all ranks in the same order.
    """
    in_flight = _RowsInFlight(steps, ranks, is_merged=is_merged)
    return [DeferredAwaitable(partial(in_flight.connect, index)) for index in range(len(steps))]


class OutputStep(ABC):
    """One lookup of a batch, whose rows return to the ranks that own the bags.

    Attributes:
        local: rows that this rank looked up for all ranks, flat or `[bags, columns]`.
        replica_rows: rows of replicated tables for the batch of this rank; None without such.
        gradient_sink: tensor that gets the gradients of replicated tables' rows of all ranks in
            backward, see `ReplicatedTables.gradient_sink`; None without such.
        replica_sizes: elements of the gradients of replicated tables' rows, by rank; empty without
            a `gradient_sink`.
        is_small: whether the rows may travel with rows of other lookups, see
            `IncomingBatch.merges_rows`; the same on all ranks.
        hyperparams: hyperparameters of tables, which ranks compare in backward; None without.
        node_sums: sums of the lookup in nodes; None without. Then `rows_to_send` does not return
            the rows to sum (`NodeSumStep.pack`), and `assemble` gets the sums after the rows of
            single ranks.
        local_shape, replica_shape, sink_shape: shapes of `local`, `replica_rows` and
            `gradient_sink`, which are set to None once in use; None without such.
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
    def rows_to_send(self) -> SentValues:
        """Return the rows to send.

        They are flat, ordered by the receiving rank; `SentValues` has the number of elements for
        each rank.
        """

    @abstractmethod
    def assemble(self, received: ReceivedValues, replica_rows: Tensor | None) -> Tensor:
        """Return the output, float32.

        `received` has the rows from all ranks, flat, in the order of ranks, this rank's own rows
        possibly in `received.local`; then the sums of nodes, if there are any. Their dtype is that
        of a result of `start_sending`.
        """

    @abstractmethod
    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[SentValues, Tensor | None]:
        """Return the gradients of rows to send, and those of replicated tables' rows, flat.

        The latter are None or empty without such tables. `grad` has the shape of the output. With
        `keeps_local`, gradients of this rank's own rows are not sent if possible; the next
        `local_gradient` uses them.
        """

    @abstractmethod
    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        """Return the bytes of the gradients to each rank, and of those from each rank."""

    @abstractmethod
    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of `local` from the received gradients.

        `received` is flat, in the order of ranks, without gradients that `backward` did not send;
        then those of sums of nodes. The result has the shape of `local`.
        """

    def sink_gradient(self, gathered: Tensor) -> Tensor:
        """Return the gradient of `gradient_sink`."""
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
        sums = [step.node_sums for step in steps]
        rows = self._start_sending([step.rows_to_send() for step in steps], sums, Content.ROWS)
        self._rows: list[Awaitable[ReceivedValues] | None] = [
            *start_sums(sums, rows, is_merged=is_merged)
        ]
        self._headers: Headers | None = None
        self._announced: set[int] = set()  # outputs with a gradient, not yet in a header
        # By lookup: the gradients of its rows, and the gradients of replicated tables' rows.
        self._ready_gradients: dict[int, tuple[SentValues, Tensor | None]] = {}
        self._gradients_in_flight: dict[
            int, tuple[Awaitable[ReceivedValues], Awaitable[Tensor] | None]
        ] = {}
        self._scaling: _Scaling | None = None
        # A rank without tables takes part in backward too: the anchor requires a gradient.
        anchor = torch.empty((), device=ranks.device, requires_grad=True)
        self._tokens: list[Tensor | None] = [
            _RowsNode.apply(anchor, step.local, step.gradient_sink, self, index)
            for index, step in enumerate(self._steps)
        ]
        for step in self._steps:
            step.local = step.gradient_sink = None

    def _start_sending(
        self, values: Sequence[SentValues], sums: Sequence[NodeSumStep | None], content: Content
    ) -> list[Awaitable[ReceivedValues]]:
        """Start to send values to single ranks; return their awaitables, by step.

        A step for which no rank has values sends nothing, and gets its own, empty values.
        """
        is_sent = [step is None or step.has_direct for step in sums]
        received = iter(
            start_sending(
                [
                    step_values
                    for step_values, is_used in zip(values, is_sent, strict=True)
                    if is_used
                ],
                self._ranks,
                content=content,
                is_merged=self._is_merged,
            )
        )
        return [
            next(received) if is_used else ReadyAwaitable(ReceivedValues(step_values.values))
            for step_values, is_used in zip(values, is_sent, strict=True)
        ]

    def connect(self, index: int) -> Tensor:
        """Wait for the rows of a lookup, and return its output, connected to autograd."""
        step, token = self._steps[index], self._tokens[index]
        replica_rows, step.replica_rows, self._tokens[index] = step.replica_rows, None, None
        result: Tensor = _OutputNode.apply(token, replica_rows, self, index)
        return result

    def assemble(self, index: int, replica_rows: Tensor | None) -> Tensor:
        """Wait for the rows of a lookup and assemble its output.

        The output is as of `OutputStep.assemble`. Called once per lookup, which frees the received
        rows.
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
        self._announced.add(index)
        is_last = len(self._announced) == len(self._steps)
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
        local, gathered = self._gradients_in_flight.pop(index)
        step = self._steps[index]
        return (
            step.local_gradient(local.wait().values),
            None if gathered is None else step.sink_gradient(gathered.wait()),
        )

    def _start_headers(self) -> Headers | None:
        """Send the header of the announced gradients; return None where ranks compare none."""
        indices = sorted(self._announced)
        self._announced = set()
        sizes = [self._steps[index].gradient_nbytes() for index in indices]
        return gradient_headers(
            indices,
            sizes,
            self._ranks,
            is_scaled=self._scaling is not None,
            numbers=local_digests([self._steps[i].hyperparams for i in indices], self._ranks),
        )

    def _add_to_scaling(self, grad: Tensor) -> None:
        """Add a gradient to the check for overflow, if a `GradScaler` scales the loss."""
        scale = known_scale()
        if scale is None:
            return
        if self._scaling is None:
            self._scaling = _Scaling(scale.to(grad.device), self._ranks)
        self._scaling.add(grad)

    def _send_gradients(self) -> None:
        """Compare the headers, and start to send the gradients that are ready."""
        gradients, self._ready_gradients = self._ready_gradients, {}
        headers, self._headers = self._headers, None
        indices = sorted(gradients)
        if headers is not None:
            check_digests(
                [self._steps[i].hyperparams for i in indices], headers.check(), self._ranks
            )
        if self._scaling is not None:
            self._scaling.start()
        sums = [self._steps[index].node_sums for index in indices]
        pending = start_gradients_of_sums(
            sums,
            self._start_sending(
                [gradients[index][0] for index in indices], sums, Content.GRADIENTS
            ),
            is_merged=self._is_merged,
        )
        for index, local in zip(indices, pending, strict=True):
            gathered, replica_grads = None, gradients[index][1]
            if self._steps[index].sink_shape is not None:
                assert replica_grads is not None
                gathered = start_all_gather(
                    replica_grads,
                    self._steps[index].replica_sizes,
                    self._ranks,
                    content=Content.GRADIENTS,
                    has_header=False,
                )
            self._gradients_in_flight[index] = local, gathered


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
        """Tell the updates of this backward whether the gradients of all ranks are finite.

        Scales that differ between ranks raise if the host knows them without a wait; otherwise the
        step is skipped, as after an overflow.

        Raises:
            RuntimeError: the scales differ, and are in host memory; on every rank.
        """
        assert self._pending is not None
        is_finite, min_scale, negated_max_scale = self._pending.wait().unbind()
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


# Sums within nodes


class _Packing(NamedTuple):
    """Order in which the rows of this rank are sent, for one set of batch sizes.

    The rows for single ranks come first, then the rows that the node sums: for each local rank k,
    the bags of the ranks with local number k, node after node.

    Attributes:
        targets: `[targets, 7]`, argument of `route.combine`, which orders the rows.
        pieces: `[pieces, 3]`, argument of `route.combine`.
        local_numel: elements of the rows of this rank.
        numel: elements of all rows that are sent.
        num_direct: elements for single ranks.
        local_sizes: elements of the rows of this rank that each rank of this node sums.
        sent_sizes: elements of the sums of this rank that go to each node.
        row_size: number of elements of which the sizes of all messages of sums are multiples, so
            that sums can be computed as rows of this length; 0 if the node sums no rows.
    """

    targets: Tensor
    pieces: Tensor
    local_numel: int
    numel: int
    num_direct: int
    local_sizes: list[int]
    sent_sizes: list[int]
    row_size: int


class NodeSumDist:
    """Computes how the rows of lookups are summed within the node of this rank.

    If the rows of a table are divided over the ranks of one node (`table_row_wise`, `grid`), each
    of these ranks has a partial sum per bag. Rank k of the node receives the partial sums for the
    bags of all ranks with local number k, in an all-to-all within the node. It adds them up in
    float32, in the order of ranks. Ranks with equal local numbers then exchange the sums between
    nodes: one row per bag and node crosses the network, not one per bag and rank. In backward,
    gradients are sent between ranks with equal local numbers, then to all ranks of the node.

    The codecs of a `CommPrecision` apply between nodes. Within a node rows are float32, and
    gradients are passed on as they arrived, in 16 bits or float32 (`start_sending`). A batch of
    which a rank has dropped bags of summed units is not summed in nodes
    (`IncomingBatch.skips_sums`).

    `start_sums` and `start_gradients_of_sums` send the rows and gradients. All `ranks` must
    construct this together, and `can_sum_in_nodes(ranks)` must be true; not checked.

    Args:
        layout: the units of this rank.
        sums: the units of all ranks that are summed.
        ranks: the processes.

    Attributes:
        groups: the ranks of this node, and those with this local rank.
        has_direct: whether any rank has units that are not summed.
    """

    def __init__(self, layout: RankLayout, sums: NodeSums, ranks: RankGroup) -> None:
        self.groups = split_by_node(ranks)
        self._ranks, self._layout = ranks, layout
        self._sums_of_node = sums.nodes[ranks.node]
        self.has_direct = any(rank_layout.units for rank_layout in sums.direct)
        self._units_of_sums = sums.units[ranks.rank]
        summed = {i for members in self._units_of_sums for i in members}
        self._direct_units = [i for i in range(len(layout.units)) if i not in summed]
        # The bags and `is_by_unit` of the last batch, and their packing, which the next batch often
        # needs again.
        self._last_packing: tuple[tuple[list[list[int]], bool], _Packing] | None = None

    def direct_bags(self, bags: list[list[int]]) -> list[list[int]]:
        """Return the bags of the units whose rows go to single ranks."""
        return [bags[i] for i in self._direct_units]

    def step(
        self,
        bags: Sequence[Sequence[int]],
        received_sizes: list[int],
        comm_precision: CommPrecision,
        *,
        is_by_unit: bool,
    ) -> NodeSumStep:
        """Return the sums of one lookup.

        Args:
            bags: `bags[u][r]` is the number of bags of unit u of this rank from rank r; units of
                replicated tables may follow, and are ignored.
            received_sizes: elements of the sums that this rank gets from each node.
            comm_precision: the codecs between nodes.
            is_by_unit: whether rows lie unit after unit, see `IncomingBatch`.
        """
        key = [list(unit_bags) for unit_bags in bags[: len(self._layout.units)]], is_by_unit
        if self._last_packing is None or self._last_packing[0] != key:
            self._last_packing = key, self._packing(key[0], is_by_unit=is_by_unit)
        return NodeSumStep(
            self._last_packing[1],
            self.groups,
            received_sizes,
            comm_precision,
            has_direct=self.has_direct,
        )

    def _packing(self, bags: list[list[int]], *, is_by_unit: bool) -> _Packing:
        """Compute the order in which the rows of this rank are sent, for one set of batch sizes.

        `bags[u][r]` is the number of bags of unit u for rank r. First come the rows for single
        ranks, then those that the ranks of this node add up, by the local number of the rank that
        adds them.
        """
        world, local_size = self._ranks.size, self._ranks.local_size
        units = self._layout.units
        widths = [unit.columns for unit in units]
        positions = _row_positions(widths, bags, world, is_by_unit=is_by_unit)
        targets: list[route.TargetRow] = []
        pieces: list[route.PieceRow] = []
        end = 0

        def pack(rank: int, groups: Sequence[Sequence[int]]) -> int:
            """Append the rows for a rank; return their number of elements.

            A group lists units by index, whose rows are added up.
            """
            nonlocal end
            group_widths = [widths[members[0]] for members in groups]
            group_bags = [[bags[members[0]][rank]] for members in groups]
            starts = _row_positions(group_widths, group_bags, 1, is_by_unit=is_by_unit)[0]
            for members, (start, stride), width, (count,) in zip(
                groups, starts, group_widths, group_bags, strict=True
            ):
                first_piece = len(pieces)
                pieces.extend(route.PieceRow(*positions[rank][i]) for i in members)
                targets.append(
                    route.TargetRow(end + start, stride, count, width, first_piece, len(pieces))
                )
            size = sum(w * n for w, (n,) in zip(group_widths, group_bags, strict=True))
            end += size
            return size

        for rank in range(world):
            pack(rank, [(i,) for i in self._direct_units])
        num_direct = end
        # By the local rank that sums them, then by node.
        sum_sizes = [
            [pack(rank, self._units_of_sums) for rank in range(k, world, local_size)]
            for k in range(local_size)
        ]
        device = self._ranks.device
        sum_widths = [unit.columns for unit in self._sums_of_node.units]
        return _Packing(
            targets=torch.tensor(targets, dtype=torch.int64, device="cpu")
            .view(-1, len(TargetColumn))
            .to(device),
            pieces=torch.tensor(pieces, dtype=torch.int64, device="cpu")
            .view(-1, len(PieceColumn))
            .to(device),
            local_numel=sum(w * sum(counts) for w, counts in zip(widths, bags, strict=True)),
            numel=end,
            num_direct=num_direct,
            local_sizes=[sum(sizes_of_nodes) for sizes_of_nodes in sum_sizes],
            sent_sizes=sum_sizes[self._ranks.local_rank],
            row_size=math.gcd(*sum_widths) if is_by_unit else sum(sum_widths),
        )


def _row_positions(
    widths: Sequence[int], bags: Sequence[Sequence[int]], num_ranks: int, *, is_by_unit: bool
) -> list[list[tuple[int, int]]]:
    """Return (first element, stride) of the rows of each unit, by rank and unit.

    Args:
        widths: columns of each unit.
        bags: `bags[u][r]` is the number of bags of unit u for rank r.
        num_ranks: number of ranks, whose rows follow one another.
        is_by_unit: whether rows of a rank lie unit after unit, else side by side.
    """
    result: list[list[tuple[int, int]]] = []
    end, columns = 0, list(accumulate(widths, initial=0))
    for rank in range(num_ranks):
        counts = [unit_bags[rank] for unit_bags in bags]
        sizes = [width * count for width, count in zip(widths, counts, strict=True)]
        if is_by_unit:
            firsts = list(accumulate(sizes, initial=end))[:-1]
            result.append(list(zip(firsts, widths, strict=True)))
        else:
            result.append([(end + column, columns[-1]) for column in columns[:-1]])
        end += sum(sizes)
    return result


class NodeSumStep:
    """The sums within the node of one lookup's rows, and their gradients.

    Forward calls `pack`, then `rows_to_sum` if it `has_sums`, then `add_up`. Backward calls
    `store_gradients`, `gradients_to_send`, `unpack`. Each must be called once and in this order,
    because tensors are freed in between.

    Attributes:
        groups: the ranks of this node, and those with this local rank.
        has_sums: whether the node sums any rows of this lookup.
        has_direct: whether any rank sends rows to single ranks.
        local_sizes: elements of the rows of this rank that each rank of this node sums.
    """

    def __init__(
        self,
        packing: _Packing,
        groups: NodeRanks,
        received_sizes: list[int],
        comm_precision: CommPrecision,
        *,
        has_direct: bool,
    ) -> None:
        self.groups, self.has_sums, self.has_direct = groups, packing.row_size > 0, has_direct
        self.local_sizes = packing.local_sizes
        self._packing, self._received_sizes = packing, received_sizes
        self._comm_precision = comm_precision
        self._rows: Tensor | None = None
        self._gradients: Tensor | None = None

    def pack(self, local: Tensor) -> Tensor:
        """Store the rows to sum, and return all other rows of this rank, flat.

        `local` are the rows of this rank, flat. If it `has_sums`, the results are float32.
        """
        packing = self._packing
        if not self.has_sums:
            self._rows = local[:0]
            return local
        rows = route.combine(
            local, packing.targets, packing.pieces, None, packing.numel, torch.float32
        )
        self._rows = rows[packing.num_direct :]
        return rows[: packing.num_direct]

    def rows_to_sum(self) -> SentValues:
        """Return the rows to send to the ranks of this node that sum them."""
        rows, self._rows = self._rows, None
        assert rows is not None
        size = self.local_sizes[self.groups.local.rank]
        received = [size] * self.groups.local.size
        return SentValues(rows, self.local_sizes, received, FP32(), needs_one_tensor=True)

    def add_up(self, received: Tensor) -> SentValues:
        """Add up the rows of the ranks of this node, in their order; return the sums to send.

        `received` is flat, the rows of one rank after the other, and empty without `has_sums`. The
        sums are float32 before encoding.
        """
        num_ranks = self.groups.local.size
        size, width = self.local_sizes[self.groups.local.rank], self._packing.row_size
        sums = received
        if size:
            targets = torch.tensor(
                [route.TargetRow(0, width, size // width, width, 0, num_ranks)], device="cpu"
            )
            pieces = torch.tensor(
                [route.PieceRow(r * size, width) for r in range(num_ranks)], device="cpu"
            )
            device = received.device
            sums = route.combine(
                received, targets.to(device), pieces.to(device), None, size, torch.float32
            )
        codec = self._comm_precision.forward
        return SentValues(
            sums, self._packing.sent_sizes, self._received_sizes, codec, needs_one_tensor=True
        )

    def store_gradients(self, gradients: Tensor) -> None:
        """Store the gradients of the sums that this rank received, flat."""
        self._gradients = gradients

    def gradients_to_send(self) -> SentValues:
        """Return the gradients of sums, to send between nodes."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        codec = self._comm_precision.backward
        return SentValues(gradients, self._received_sizes, self._packing.sent_sizes, codec)

    def unpack(self, gradients: Tensor) -> Tensor:
        """Return the gradient of the rows that `pack` took, flat; float32 if it `has_sums`.

        `gradients` are those of the rows that `pack` returned, then of the rows to sum, flat.
        """
        packing = self._packing
        if not self.has_sums:
            return gradients
        return route.combine_backward(
            gradients, packing.targets, packing.pieces, None, packing.local_numel, torch.float32
        )


def start_sums(
    steps: Sequence[NodeSumStep | None],
    direct: Sequence[Awaitable[ReceivedValues]],
    *,
    is_merged: bool,
) -> list[Awaitable[ReceivedValues]]:
    """Sum rows within the node, and start to send the sums.

    In the result the sums follow the rows of `direct`. Waits for the ranks of this node if any of
    `steps` has sums.
    """
    pending, summed = list(direct), [step for step in steps if step is not None]
    if not summed:
        return pending
    groups, with_sums = summed[0].groups, [step for step in summed if step.has_sums]
    local = start_sending(
        [step.rows_to_sum() for step in with_sums],
        groups.local,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    received = {id(step): rows.wait().values for step, rows in zip(with_sums, local, strict=True)}
    no_rows = torch.empty(0, dtype=torch.float32, device=groups.local.device)
    sums = start_sending(
        [step.add_up(received.pop(id(step), no_rows)) for step in summed],
        groups.across,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    return _append_sums(steps, pending, sums)


def start_gradients_of_sums(
    steps: Sequence[NodeSumStep | None],
    direct: Sequence[Awaitable[ReceivedValues]],
    *,
    is_merged: bool,
) -> list[Awaitable[ReceivedValues]]:
    """Start to send the gradients of sums to the ranks of the nodes that added them up.

    In the result these gradients follow those of `direct`. Waits for the ranks with the same local
    number as this rank, unless all `steps` are None.
    """
    pending, summed = list(direct), [step for step in steps if step is not None]
    if not summed:
        return pending
    groups = summed[0].groups
    gradient_awaitables = start_sending(
        [step.gradients_to_send() for step in summed],
        groups.across,
        content=Content.GRADIENTS,
        is_merged=is_merged,
    )
    received = [gradients.wait().values for gradients in gradient_awaitables]
    gathered: list[Awaitable[ReceivedValues]] = [
        ReadyAwaitable(ReceivedValues(gradients))
        if not step.has_sums
        else DeferredAwaitable(
            partial(
                _as_received,
                start_all_gather(
                    gradients,
                    step.local_sizes,
                    groups.local,
                    content=Content.GRADIENTS,
                    has_header=False,
                ),
            )
        )
        for step, gradients in zip(summed, received, strict=True)
    ]
    return _append_sums(steps, pending, gathered)


def _as_received(pending: Awaitable[Tensor]) -> ReceivedValues:
    return ReceivedValues(pending.wait())


def _append_sums(
    steps: Sequence[NodeSumStep | None],
    direct: Sequence[Awaitable[ReceivedValues]],
    sums: Sequence[Awaitable[ReceivedValues]],
) -> list[Awaitable[ReceivedValues]]:
    """Append the sums to the direct results of each step that has sums.

    `direct` has a result per step, `sums` one per step that is not None.
    """
    next_sums = iter(sums)
    return [
        awaitable
        if step is None
        else DeferredAwaitable(partial(_join_received, awaitable, next(next_sums)))
        for step, awaitable in zip(steps, direct, strict=True)
    ]


def _join_received(
    direct: Awaitable[ReceivedValues], sums: Awaitable[ReceivedValues]
) -> ReceivedValues:
    """Wait for two messages, and concatenate their values."""
    values_of_both = [received.wait().values for received in (direct, sums)]
    parts = [values for values in values_of_both if values.numel()]
    return ReceivedValues(torch.cat(parts) if len(parts) > 1 else (parts or values_of_both)[0])
