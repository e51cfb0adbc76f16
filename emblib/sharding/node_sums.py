"""Sums within nodes: add up rows on the ranks of one node before they are sent to other nodes.

If the rows of a table are divided over the ranks of one node (`table_row_wise`, `grid`), each of
these ranks has a partial sum per bag. `NodeSumDist` computes which rows a rank sends to which other
rank of its node to be added up; `start_sums` and `start_gradients_of_sums` send rows and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import PieceColumn, TargetColumn
from emblib.ops import route
from emblib.sharding.all_to_all import start_all_gather
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.codecs import FP32, CommPrecision, ReceivedValues, SentValues, start_sending
from emblib.sharding.headers import Content
from emblib.sharding.layout import NodeSums, RankLayout
from emblib.sharding.layout_buffers import int64_tensor
from emblib.sharding.ranks import NodeRanks, RankGroup, split_by_node


class _SendOrder(NamedTuple):
    """Order in which the rows of this rank are sent, for one set of batch sizes.

    The rows for single ranks come first, then the rows that the node sums: for each local rank k,
    the bags of the ranks with local number k, node after node.

    All sizes are numbers of elements.

    Attributes:
        targets: int64 `[targets, 7]`, argument of `route.combine`, which orders the rows.
        pieces: int64 `[pieces, 3]`, argument of `route.combine`.
        num_local_elements: size of the rows of this rank.
        num_elements: size of all rows that are sent.
        num_direct_elements: size of the rows for single ranks.
        local_sizes: size of this rank's rows for each rank of this node, which sums them.
        sent_sizes: size of the sums of this rank for each node.
        row_size: a common divisor of the sizes of all messages of sums, which are added up as rows
            of this length; 0 if the node sums no rows.
    """

    targets: Tensor
    pieces: Tensor
    num_local_elements: int
    num_elements: int
    num_direct_elements: int
    local_sizes: list[int]
    sent_sizes: list[int]
    row_size: int


class NodeSumDist:
    """Computes how the rows of lookups are summed within the node of this rank.

    Rank k of the node receives the partial sums for the bags of all ranks with local number k, in
    an all-to-all within the node. It adds them up in float32, in the order of ranks. Ranks with
    equal local numbers then exchange the sums between nodes: one row per bag and node crosses the
    network, not one per bag and rank. In backward, gradients are sent between ranks with equal
    local numbers, then to all ranks of the node.

    The codecs of a `CommPrecision` apply between nodes. Within a node rows are float32, and
    gradients are passed on as they arrived, in 16 bits or float32 (`start_sending`). A batch of
    which a rank has dropped bags of summed units is not summed in nodes
    (`IncomingBatch.skips_sums`).

    All `ranks` must construct this together, and `can_sum_in_nodes(ranks)` must be true, which is
    not checked.

    Args:
        layout: the units of this rank.
        sums: the units of all ranks that are summed.
        ranks: the processes.

    Attributes:
        groups: the ranks of this node, and the ranks with this local rank.
        has_direct: whether any rank has units that are not summed.
    """

    def __init__(self, layout: RankLayout, sums: NodeSums, ranks: RankGroup) -> None:
        self.groups = split_by_node(ranks)
        self._ranks, self._layout = ranks, layout
        self._node_layout = sums.nodes[ranks.node]
        self.has_direct = any(rank_layout.units for rank_layout in sums.direct)
        self._summed_units = sums.units[ranks.rank]
        all_summed_units = {i for units in self._summed_units for i in units}
        self._direct_units = [i for i in range(len(layout.units)) if i not in all_summed_units]
        # The bags and `is_by_unit` of the last batch, and their send order, which the next batch
        # often needs again.
        self._last_send_order: tuple[tuple[list[list[int]], bool], _SendOrder] | None = None

    def direct_bags(self, bags: list[list[int]]) -> list[list[int]]:
        """Return the bags of the units whose rows go to single ranks."""
        return [bags[unit] for unit in self._direct_units]

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
            received_sizes: number of elements of the sums that this rank gets from each node.
            comm_precision: the codecs between nodes.
            is_by_unit: whether rows lie unit after unit, see `IncomingBatch`.
        """
        key = [list(unit_bags) for unit_bags in bags[: len(self._layout.units)]], is_by_unit
        if self._last_send_order is None or self._last_send_order[0] != key:
            self._last_send_order = key, self._compute_send_order(key[0], is_by_unit=is_by_unit)
        return NodeSumStep(
            self._last_send_order[1],
            self.groups,
            received_sizes,
            comm_precision,
            has_direct=self.has_direct,
        )

    def _compute_send_order(self, bags: list[list[int]], *, is_by_unit: bool) -> _SendOrder:
        """Compute the send order of the rows of this rank, for one set of batch sizes.

        `bags[u][r]` is the number of bags of unit u for rank r.
        """
        num_ranks, local_size = self._ranks.size, self._ranks.local_size
        units = self._layout.units
        widths = [unit.columns for unit in units]
        row_positions = _row_positions(widths, bags, num_ranks, is_by_unit=is_by_unit)
        targets: list[route.TargetRow] = []
        pieces: list[route.PieceRow] = []
        end = 0

        def pack(rank: int, unit_groups: Sequence[Sequence[int]]) -> int:
            """Append the rows for a rank; return their number of elements.

            A group lists units by index, whose rows are added up.
            """
            nonlocal end
            group_widths = [widths[group[0]] for group in unit_groups]
            group_bags = [[bags[group[0]][rank]] for group in unit_groups]
            starts = _row_positions(group_widths, group_bags, 1, is_by_unit=is_by_unit)[0]
            for group, (start, stride), width, (count,) in zip(
                unit_groups, starts, group_widths, group_bags, strict=True
            ):
                first_piece = len(pieces)
                pieces.extend(route.PieceRow(*row_positions[rank][unit]) for unit in group)
                targets.append(
                    route.TargetRow(end + start, stride, count, width, first_piece, len(pieces))
                )
            size = sum(map(mul, group_widths, chain.from_iterable(group_bags)))
            end += size
            return size

        for rank in range(num_ranks):
            pack(rank, [(unit,) for unit in self._direct_units])
        num_direct = end
        # By the local rank that sums them, then by node.
        sizes_by_local_rank = [
            [pack(rank, self._summed_units) for rank in range(local_rank, num_ranks, local_size)]
            for local_rank in range(local_size)
        ]
        device = self._ranks.device
        sum_widths = [unit.columns for unit in self._node_layout.units]
        return _SendOrder(
            targets=int64_tensor(targets, len(TargetColumn)).to(device),
            pieces=int64_tensor(pieces, len(PieceColumn)).to(device),
            num_local_elements=sum(map(mul, widths, map(sum, bags))),
            num_elements=end,
            num_direct_elements=num_direct,
            local_sizes=[sum(sizes_by_node) for sizes_by_node in sizes_by_local_rank],
            sent_sizes=sizes_by_local_rank[self._ranks.local_rank],
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
    positions: list[list[tuple[int, int]]] = []
    end, columns = 0, list(accumulate(widths, initial=0))
    for rank in range(num_ranks):
        counts = [unit_bags[rank] for unit_bags in bags]
        sizes = [width * count for width, count in zip(widths, counts, strict=True)]
        if is_by_unit:
            first_elements = list(accumulate(sizes, initial=end))[:-1]
            positions.append(list(zip(first_elements, widths, strict=True)))
        else:
            positions.append([(end + column, columns[-1]) for column in columns[:-1]])
        end += sum(sizes)
    return positions


class NodeSumStep:
    """The sums within the node of one lookup's rows, and their gradients.

    Forward calls `pack`, then `rows_to_sum` if `has_sums`, then `add_up`. Backward calls
    `store_gradients`, `gradients_to_send`, `unpack`. Each must be called once and in this order,
    because tensors are freed in between.

    Attributes:
        groups: the ranks of this node, and the ranks with this local rank.
        has_sums: whether the node sums any rows of this lookup.
        has_direct: whether any rank sends rows to single ranks.
        local_sizes: number of elements of this rank's rows for each rank of this node, which sums
            them.
    """

    def __init__(
        self,
        send_order: _SendOrder,
        groups: NodeRanks,
        received_sizes: list[int],
        comm_precision: CommPrecision,
        *,
        has_direct: bool,
    ) -> None:
        self.groups, self.has_sums, self.has_direct = groups, send_order.row_size > 0, has_direct
        self.local_sizes = send_order.local_sizes
        self._send_order, self._received_sizes = send_order, received_sizes
        self._comm_precision = comm_precision
        self._rows: Tensor | None = None
        self._gradients: Tensor | None = None

    def pack(self, local: Tensor) -> Tensor:
        """Store the rows to sum, and return all other rows of this rank, flat.

        `local` are the rows of this rank, flat. If `has_sums`, the result is float32; else it is
        `local`.
        """
        order = self._send_order
        if not self.has_sums:
            self._rows = local[:0]
            return local
        rows = route.combine(
            local, order.targets, order.pieces, None, order.num_elements, torch.float32
        )
        self._rows = rows[order.num_direct_elements :]
        return rows[: order.num_direct_elements]

    def rows_to_sum(self) -> SentValues:
        """Return the rows to send to the ranks of this node that sum them."""
        rows, self._rows = self._rows, None
        assert rows is not None
        size = self.local_sizes[self.groups.local.rank]
        received_sizes = [size] * self.groups.local.size
        return SentValues(rows, self.local_sizes, received_sizes, FP32(), needs_one_tensor=True)

    def add_up(self, received: Tensor) -> SentValues:
        """Add up the rows of the ranks of this node, in their order; return the sums to send.

        `received` is flat, the rows of one rank after the other, and empty if not `has_sums`. The
        sums are float32 before they are encoded.
        """
        num_ranks = self.groups.local.size
        num_elements, width = self.local_sizes[self.groups.local.rank], self._send_order.row_size
        sums = received
        if num_elements:
            target = route.TargetRow(
                offset=0,
                stride=width,
                num_rows=num_elements // width,
                width=width,
                first_piece=0,
                end_piece=num_ranks,
            )
            targets = int64_tensor([target]).to(received.device)
            pieces = int64_tensor(
                [route.PieceRow(rank * num_elements, width) for rank in range(num_ranks)]
            )
            sums = route.combine(
                received, targets, pieces.to(received.device), None, num_elements, torch.float32
            )
        codec = self._comm_precision.forward
        return SentValues(
            sums, self._send_order.sent_sizes, self._received_sizes, codec, needs_one_tensor=True
        )

    def store_gradients(self, gradients: Tensor) -> None:
        """Store the gradients of the sums that this rank received, flat."""
        self._gradients = gradients

    def gradients_to_send(self) -> SentValues:
        """Return the gradients of sums, to send between nodes."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        codec = self._comm_precision.backward
        return SentValues(gradients, self._received_sizes, self._send_order.sent_sizes, codec)

    def unpack(self, gradients: Tensor) -> Tensor:
        """Return the gradient of the argument of `pack`, flat; float32 if `has_sums`.

        `gradients`, flat, are those of the rows that `pack` returned, then of the rows to sum.
        """
        order = self._send_order
        if not self.has_sums:
            return gradients
        return route.combine_backward(
            gradients, order.targets, order.pieces, None, order.num_local_elements, torch.float32
        )


def start_sums(
    steps: Sequence[NodeSumStep | None],
    direct: Sequence[Awaitable[ReceivedValues]],
    *,
    is_merged: bool,
) -> list[Awaitable[ReceivedValues]]:
    """Sum rows within the node, and start to send the sums to the other nodes.

    All ranks call this, and wait for the ranks of their node if any of `steps` has sums.

    Args:
        steps: the sums of each lookup; None for a lookup without sums.
        direct: the received rows of single ranks, per lookup.
        is_merged: whether the messages of all lookups travel in one collective.

    Returns:
        Per lookup, the rows of `direct`, then the received sums.
    """
    direct_awaitables, steps_with_sums = list(direct), [step for step in steps if step is not None]
    if not steps_with_sums:
        return direct_awaitables
    groups = steps_with_sums[0].groups
    local_steps = [step for step in steps_with_sums if step.has_sums]
    rows_in_node = start_sending(
        [step.rows_to_sum() for step in local_steps],
        groups.local,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    rows_by_step = {
        id(step): rows.wait().values for step, rows in zip(local_steps, rows_in_node, strict=True)
    }
    no_rows = torch.empty(0, dtype=torch.float32, device=groups.local.device)
    sums = start_sending(
        [step.add_up(rows_by_step.pop(id(step), no_rows)) for step in steps_with_sums],
        groups.across,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    return _append_sums(steps, direct_awaitables, sums)


def start_gradients_of_sums(
    steps: Sequence[NodeSumStep | None],
    direct: Sequence[Awaitable[ReceivedValues]],
    *,
    is_merged: bool,
) -> list[Awaitable[ReceivedValues]]:
    """Start to send the gradients of sums to the ranks of the nodes that added them up.

    All ranks call this. Unless all `steps` are None, each waits for the ranks with the same local
    number. The arguments are those of `start_sums`; `direct` are the gradients from single ranks.

    Returns:
        Per lookup, the gradients of `direct`, then those of the rows that were summed.
    """
    direct_awaitables, steps_with_sums = list(direct), [step for step in steps if step is not None]
    if not steps_with_sums:
        return direct_awaitables
    groups = steps_with_sums[0].groups
    gradient_awaitables = start_sending(
        [step.gradients_to_send() for step in steps_with_sums],
        groups.across,
        content=Content.GRADIENTS,
        is_merged=is_merged,
    )
    gradients_of_steps = [gradients.wait().values for gradients in gradient_awaitables]
    gathered_awaitables: list[Awaitable[ReceivedValues]] = [
        ReadyAwaitable(ReceivedValues(gradients))
        if not step.has_sums
        else DeferredAwaitable(
            partial(
                _wait_for_values,
                start_all_gather(
                    gradients,
                    step.local_sizes,
                    groups.local,
                    content=Content.GRADIENTS,
                    has_header=False,
                ),
            )
        )
        for step, gradients in zip(steps_with_sums, gradients_of_steps, strict=True)
    ]
    return _append_sums(steps, direct_awaitables, gathered_awaitables)


def _wait_for_values(pending: Awaitable[Tensor]) -> ReceivedValues:
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
