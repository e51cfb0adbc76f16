"""Sums of rows within a node, before they are sent to other nodes.

A table whose rows are divided over the ranks of one node (`table_row_wise`, `grid`) has a partial
sum per bag on each of them. Without this module, every rank of the node would send its partial sums
to all ranks. Instead, rank k of a node adds up the partial sums for the bags of every rank that has
number k on its node: an all-to-all within the node, and a sum in float32 and in the order of ranks.
Ranks with equal local numbers then exchange the sums between nodes. One row per bag and node
crosses the network, where one per bag and rank did. The result has the same bits as without sums.

In backward, gradients take the same way in the opposite direction: between ranks with equal local
numbers, then to all ranks of the node, as they are. The codecs of a `CommPrecision` apply between
nodes; within a node values are float32.

`NodeSums` of `emblib.sharding.layout` finds the units that are summed; the batches of these units
have all bags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops import route
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.codecs import FP32
from emblib.sharding.exchange import (
    CommPrecision,
    Content,
    start_all_gather,
)
from emblib.sharding.layout import NodeSums, RankLayout
from emblib.sharding.ranks import NodeRanks, RankGroup, split_by_node
from emblib.sharding.values import Received, Values, start_values


class _Packing(NamedTuple):
    """Order in which the rows of this rank are sent, for one set of batch sizes.

    The rows for single ranks come first, then those that the node sums: for each local rank k, the
    bags of the ranks with local number k, node after node.

    Attributes:
        targets: `[targets, 7]` and
        pieces: `[pieces, 3]` of `route.combine`, which orders the rows.
        local_numel: elements of the rows of this rank.
        numel: elements of all rows that are sent.
        num_direct: elements for single ranks.
        local_sizes: elements that each rank of this node sums.
        sent: elements of the sums of this rank that go to each node.
        row: elements of the rows in which sums are computed; 0 where the node sums none.
    """

    targets: Tensor
    pieces: Tensor
    local_numel: int
    numel: int
    num_direct: int
    local_sizes: list[int]
    sent: list[int]
    row: int


class NodeSumDist:
    """Sums rows within the node of this rank and exchanges the sums between nodes.

    All `ranks` make this together.

    Args:
        own: the units of this rank.
        sums: the units of all ranks that are summed.
        ranks: the processes.
    """

    def __init__(self, own: RankLayout, sums: NodeSums, ranks: RankGroup) -> None:
        self.groups = split_by_node(ranks)
        self._ranks, self._own = ranks, own
        self.direct, self.summed = sums.direct[ranks.rank], sums.nodes[ranks.node]
        self.exchanges_rows = any(rank_layout.units for rank_layout in sums.direct)
        self._members = sums.units[ranks.rank]
        in_sums = {i for members in self._members for i in members}
        self._single = [i for i in range(len(own.units)) if i not in in_sums]
        self._known: tuple[tuple[list[list[int]], bool], _Packing] | None = None

    def direct_bags(self, bags: list[list[int]]) -> list[list[int]]:
        """Return the bags of the units whose rows go to single ranks."""
        return [bags[i] for i in self._single]

    def step(
        self,
        bags: Sequence[Sequence[int]],
        received: list[int],
        comm_precision: CommPrecision,
        *,
        by_unit: bool,
    ) -> NodeSumStep:
        """Return the sums of one lookup.

        Args:
            bags: `bags[u][r]` is the number of bags of unit u of this rank from rank r.
            received: elements of the sums that this rank gets from each node.
            comm_precision: the codecs between nodes.
            by_unit: whether rows lie unit after unit, see `IncomingBatch`.
        """
        known = [list(of_unit) for of_unit in bags[: len(self._own.units)]], by_unit
        if self._known is None or self._known[0] != known:
            self._known = known, self._packing(known[0], by_unit=by_unit)
        return NodeSumStep(
            self._known[1],
            self.groups,
            received,
            comm_precision,
            has_direct=self.exchanges_rows,
        )

    def _packing(self, bags: list[list[int]], *, by_unit: bool) -> _Packing:
        world, local_size = self._ranks.size, self._ranks.local_size
        units = self._own.units
        widths = [unit.columns for unit in units]
        positions = _positions(widths, bags, world, by_unit=by_unit)
        targets: list[tuple[int, ...]] = []
        pieces: list[tuple[int, int, int]] = []
        end = 0

        def pack(rank: int, groups: Sequence[Sequence[int]]) -> int:
            """Append the rows for a rank, of units that are added up; return their elements."""
            nonlocal end
            group_widths = [widths[members[0]] for members in groups]
            group_bags = [[bags[members[0]][rank]] for members in groups]
            starts = _positions(group_widths, group_bags, 1, by_unit=by_unit)[0]
            for members, (start, stride), width, (count,) in zip(
                groups, starts, group_widths, group_bags, strict=True
            ):
                first = len(pieces)
                pieces.extend((*positions[rank][i], -1) for i in members)
                at = end + start
                targets.append((at, stride, count, width, first, len(pieces), -1))
            size = sum(w * n for w, (n,) in zip(group_widths, group_bags, strict=True))
            end += size
            return size

        for rank in range(world):
            pack(rank, [(i,) for i in self._single])
        num_direct = end
        blocks = [
            [pack(rank, self._members) for rank in range(k, world, local_size)]
            for k in range(local_size)
        ]
        device = self._ranks.device
        sum_widths = [unit.columns for unit in self.summed.units]
        return _Packing(
            targets=torch.tensor(targets, dtype=torch.int64).view(-1, 7).to(device),
            pieces=torch.tensor(pieces, dtype=torch.int64).view(-1, 3).to(device),
            local_numel=sum(w * sum(counts) for w, counts in zip(widths, bags, strict=True)),
            numel=end,
            num_direct=num_direct,
            local_sizes=[sum(of_rank) for of_rank in blocks],
            sent=blocks[self._ranks.local_rank],
            row=math.gcd(*sum_widths) if by_unit else sum(sum_widths),
        )


def _positions(
    widths: Sequence[int], bags: Sequence[Sequence[int]], num_ranks: int, *, by_unit: bool
) -> list[list[tuple[int, int]]]:
    """Return where the rows of each unit begin for each rank, and how far they are apart."""
    result: list[list[tuple[int, int]]] = []
    end, columns = 0, list(accumulate(widths, initial=0))
    for rank in range(num_ranks):
        counts = [of_unit[rank] for of_unit in bags]
        sizes = [width * count for width, count in zip(widths, counts, strict=True)]
        if by_unit:
            firsts = list(accumulate(sizes, initial=end))[:-1]
            result.append(list(zip(firsts, widths, strict=True)))
        else:
            result.append([(end + column, columns[-1]) for column in columns[:-1]])
        end += sum(sizes)
    return result


class NodeSumStep:
    """The rows of one lookup on their way through the node, and their gradients."""

    def __init__(
        self,
        packing: _Packing,
        groups: NodeRanks,
        received: list[int],
        comm_precision: CommPrecision,
        *,
        has_direct: bool,
    ) -> None:
        self.groups, self.has_sums, self.has_direct = groups, packing.row > 0, has_direct
        self.local_sizes = packing.local_sizes
        self._packing, self._received, self._comm_precision = packing, received, comm_precision
        self._rows: Tensor | None = None
        self._gradients: Tensor | None = None

    def pack(self, local: Tensor) -> Tensor:
        """Take the rows of this rank, flat; return those for single ranks."""
        packing = self._packing
        if not self.has_sums:
            self._rows = local[:0]
            return local
        rows = route.combine(
            local, packing.targets, packing.pieces, None, packing.numel, torch.float32
        )
        self._rows = rows[packing.num_direct :]
        return rows[: packing.num_direct]

    def local_rows(self) -> Values:
        """Return the rows for the ranks of this node to sum."""
        rows, self._rows = self._rows, None
        assert rows is not None
        own = self.local_sizes[self.groups.local.rank]
        received = [own] * self.groups.local.size
        return Values(rows, self.local_sizes, received, FP32(), comes_whole=True)

    def sums(self, received: Tensor) -> Values:
        """Add up the rows of the ranks of this node, in their order; return the sums to send."""
        world = self.groups.local.size
        size, row = self.local_sizes[self.groups.local.rank], self._packing.row
        total = received
        if size:
            targets = torch.tensor([[0, row, size // row, row, 0, world, -1]])
            pieces = torch.tensor([[rank * size, row, -1] for rank in range(world)])
            device = received.device
            total = route.combine(
                received, targets.to(device), pieces.to(device), None, size, torch.float32
            )
        codec = self._comm_precision.forward
        return Values(total, self._packing.sent, self._received, codec, comes_whole=True)

    def take_gradients(self, gradients: Tensor) -> None:
        """Take the gradients of the sums that this rank received, flat."""
        self._gradients = gradients

    def gradients(self) -> Values:
        """Return the gradients of sums to send between nodes."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        codec = self._comm_precision.backward
        return Values(gradients, self._received, self._packing.sent, codec)

    def unpack(self, gradients: Tensor) -> Tensor:
        """Return the gradient of the rows that `pack` took, flat."""
        packing = self._packing
        if not self.has_sums:
            return gradients
        return route.combine_backward(
            gradients, packing.targets, packing.pieces, None, packing.local_numel, torch.float32
        )


def start_sums(
    steps: Sequence[NodeSumStep | None], direct: Sequence[Awaitable[Received]], *, is_merged: bool
) -> list[Awaitable[Received]]:
    """Sum rows within the node and start to send the sums; they follow what `direct` receives.

    Waits for the ranks of this node.
    """
    pending, own = list(direct), [step for step in steps if step is not None]
    if not own:
        return pending
    groups, is_sent = own[0].groups, [step for step in own if step.has_sums]
    local = start_values(
        [step.local_rows() for step in is_sent],
        groups.local,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    received = {id(step): rows.wait().values for step, rows in zip(is_sent, local, strict=True)}
    nothing = torch.empty(0, device=groups.local.device)
    sums = start_values(
        [step.sums(received.pop(id(step), nothing)) for step in own],
        groups.across,
        content=Content.ROWS,
        is_merged=is_merged,
    )
    return _appended(steps, pending, sums)


def start_gradients_of_sums(
    steps: Sequence[NodeSumStep | None], direct: Sequence[Awaitable[Received]], *, is_merged: bool
) -> list[Awaitable[Received]]:
    """Start to send the gradients of sums to the ranks of the nodes that made them.

    They follow what `direct` receives. Waits for the ranks with the local number of this one.
    """
    pending, own = list(direct), [step for step in steps if step is not None]
    if not own:
        return pending
    groups = own[0].groups
    across = start_values(
        [step.gradients() for step in own],
        groups.across,
        content=Content.GRADIENTS,
        is_merged=is_merged,
    )
    received = [gradients.wait().values for gradients in across]
    gathered: list[Awaitable[Received]] = [
        ReadyAwaitable(Received(gradients))
        if not step.has_sums
        else DeferredAwaitable(
            partial(
                _received,
                start_all_gather(
                    gradients,
                    step.local_sizes,
                    groups.local,
                    content=Content.GRADIENTS,
                    has_header=False,
                ),
            )
        )
        for step, gradients in zip(own, received, strict=True)
    ]
    return _appended(steps, pending, gathered)


def _received(pending: Awaitable[Tensor]) -> Received:
    return Received(pending.wait())


def _appended(
    steps: Sequence[NodeSumStep | None],
    first: Sequence[Awaitable[Received]],
    then: Sequence[Awaitable[Received]],
) -> list[Awaitable[Received]]:
    """Join two results of each step that has sums; those of the others stay as they are."""
    following = iter(then)
    return [
        awaitable
        if step is None
        else DeferredAwaitable(partial(_joined, awaitable, next(following)))
        for step, awaitable in zip(steps, first, strict=True)
    ]


def _joined(first: Awaitable[Received], second: Awaitable[Received]) -> Received:
    both = [received.wait().values for received in (first, second)]
    parts = [values for values in both if values.numel()]
    return Received(torch.cat(parts) if len(parts) > 1 else (parts or both)[0])
