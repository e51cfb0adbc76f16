"""Ids go to the ranks that hold their rows: the first half of a sharded lookup.

Two all-to-alls, each started without being waited for: a header that says how many bags and ids
every rank will get (the one point where the host must know numbers), then the ids with the lengths
of their bags before them, in one message; where there are weights a third beside it.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.jagged.jagged_tensor import running_sums
from emblib.jagged.keyed_layout import bounds_of
from emblib.ops import route
from emblib.sharding.exchange import (
    Awaitable,
    Content,
    Deferred,
    DifferentiableAllToAll,
    Pending,
    start_all_to_all,
)
from emblib.sharding.layout import Blocks, Layout
from emblib.sharding.ranks import RankGroup

# Of a header: ids for this rank, those of replicated tables among them, kind of batch, whether
# units differ in their bags; then the bags of each unit.
_HEADER = 4
_MOST_BAGS = 0.75  # of all, that are sent without those that are empty
_LEAST_SAVED = 1 << 16  # elements of rows; the work on indices is not free for small batches


class Inputs(NamedTuple):
    """The batch of this rank: bags of the layout's features, feature-major.

    `bags` says how many each feature has; with `is_variable` they may differ, and `inverse` may say
    for each feature which bag each example of the batch has.
    """

    ids: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None
    bags: list[int]
    is_variable: bool = False
    inverse: list[Tensor] | None = None

    def starts(self) -> Tensor:
        """Where the ids of each feature begin, and where those of the last one end."""
        if not self.is_variable and self.bags and self.bags[0]:
            return self.offsets[:: self.bags[0]]
        return self.offsets[self.first_bags(range(len(self.bags)))]

    def first_bags(self, features: Sequence[int]) -> Tensor:
        """Where the bags of each begin if they lie in this order, and those of the last one end."""
        device = self.offsets.device
        if self.is_variable or not features:
            return torch.tensor(bounds_of([self.bags[f] for f in features]), device=device)
        return torch.arange(len(features) + 1, device=device) * self.bags[0]

    def num_ids(self) -> list[int]:
        """Ids of each feature; reads the device."""
        return [end - start for start, end in pairwise(self.starts().tolist())]


class Sent(NamedTuple):
    """A batch in the order of sending, and the host's numbers of it by destination.

    `lengths`, `ids` and `weights` are None once they are on their way. `positions` says where in
    the batch each id was; None where whole features were sent.
    `unit_starts` is where each unit's ids begin. Of the ids for each rank, the last `copied` are
    for copies of replicated tables. Unit u has `unit_bags[u]` bags: with `rows`, int32 `[U * B]`,
    not those without ids there, and the row of unit u for bag b is `rows[u * B + b]`, -1 for none.
    """

    lengths: Tensor | None
    ids: Tensor | None
    weights: Tensor | None
    positions: Tensor | None
    unit_starts: Tensor | list[int]
    unit_bags: list[int]
    rows: Tensor | None
    num_bags: list[int]
    num_ids: list[int]
    copied: int


class Received(NamedTuple):
    """What this rank looks up: its units' bags, unit-major, in a unit rank after rank.

    `bags[u][r]` of unit u come from rank r; `segments[r, u]` and `num_ids[r]` are ids. The units of
    replicated tables come last, if their ids travel at all, which are the last `copied`. With
    `by_unit` units differ in their bags, and rows travel unit after unit.
    """

    inputs: Inputs
    sent: Sent | None
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    bags: list[list[int]]
    by_unit: bool
    segments: Tensor
    num_ids: list[int]
    copied: int


class _Flight(NamedTuple):
    """Ids on their way here: bags by unit and rank, bags and elements of each rank's message."""

    inputs: Inputs
    batch: Sent
    bags: list[list[int]]
    by_unit: bool
    num_bags: list[int]
    sizes: list[int]
    num_ids: list[int]
    copied: int
    ids: Pending
    weights: DifferentiableAllToAll | None


class ScaledGradient(torch.autograd.Function):
    """The same values, with `scale` times their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        """`values`."""
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """`scale * grad`."""
        return grad * ctx.scale, None


class Distribution(nn.Module):
    """Sends the ids of a batch where a layout wants them."""

    def __init__(
        self, layout: Layout, blocks: Blocks, ranks: RankGroup, scale: float, *, packs: bool
    ) -> None:
        super().__init__()
        self._packs = packs
        # The gradient of a weight is of this rank's own loss: not a mean over ranks.
        self._weight_scale = 1.0 / scale
        self._ranks = ranks
        self._features = [[unit.feature for unit in rank.all_units] for rank in layout.ranks]
        self._copied = [unit.feature for unit in layout.ranks[ranks.rank].copies]
        self._all = [f for features in self._features for f in features]
        self._in_order = self._all == list(range(len(layout.features)))
        columns = [unit.columns for rank in layout.ranks for unit in rank.all_units]
        self._mean_columns = sum(columns) / max(len(columns), 1)
        self._ends = [0, *accumulate(len(features) for features in self._features)]
        self.is_whole = all(blocks_ <= 1 for _, blocks_, _, _ in blocks.features)
        tables = {
            "order": torch.tensor(self._all, dtype=torch.int64),
            "features": torch.tensor(blocks.features, dtype=torch.int64).view(-1, 4),
            "blocks": torch.tensor(blocks.blocks, dtype=torch.int64).view(-1, 3),
            "copies": torch.tensor(blocks.copies, dtype=torch.int64),
            "own_order": torch.tensor(self._segment_order(1), dtype=torch.int64),
            "own_weight_order": torch.tensor(self._segment_order(0), dtype=torch.int64),
        }
        for name, tensor in tables.items():
            self.register_buffer(name, tensor.to(ranks.device), persistent=False)

    order: Tensor
    features: Tensor
    blocks: Tensor
    copies: Tensor
    own_order: Tensor
    own_weight_order: Tensor

    def _segment_order(self, before: int) -> list[int]:
        """Unit-major order of segments that come rank-major, `before` others first in each rank."""
        world, units = self._ranks.size, len(self._features[self._ranks.rank])
        step = units + before
        return [r * step + before + unit for unit in range(units) for r in range(world)]

    def start(self, inputs: Inputs) -> Awaitable[Awaitable[Received]]:
        """Waiting once starts the ids on their way, waiting for what that gives ends it."""
        weights = inputs.weights
        if weights is not None and weights.requires_grad and self._weight_scale != 1.0:
            weights = ScaledGradient.apply(weights, self._weight_scale)
        # Copies of tables have the weights as they are: their gradients are not scaled.
        travel = inputs._replace(weights=weights)
        with torch.no_grad():
            batch = self._gather(travel) if self.is_whole else self._bucketize(travel)
        kind = _kind(inputs)
        by_unit = int(inputs.is_variable or batch.rows is not None)
        header: list[int] = []
        for (first, end), ids in zip(self._spans(), batch.num_ids, strict=True):
            header += (ids, batch.copied, kind, by_unit, *batch.unit_bags[first:end])
        sizes = [_HEADER + len(features) for features in self._features]
        came = [sizes[self._ranks.rank]] * self._ranks.size
        sent = torch.tensor(header, device=inputs.ids.device)
        pending = start_all_to_all(sent, sizes, came, self._ranks, content=Content.SIZES)
        return Deferred(partial(self._send, inputs, batch, pending))

    # The batch in the order of sending

    def _gather(self, inputs: Inputs) -> Sent:
        """Whole features: segments of the batch, copied."""
        bags, order = inputs.bags, self._all
        starts = inputs.starts()
        ends = starts.tolist()
        num_ids = [ends[f + 1] - ends[f] for f in order]
        by_rank = [sum(num_ids[a:b]) for a, b in self._spans()]
        lengths, ids, weights = inputs.lengths, inputs.ids, inputs.weights
        if not (self._in_order and ends[0] == 0 and ends[-1] == ids.numel()):
            lengths = self._lengths_in_order(inputs)
            ids = route.gather_segments(ids, starts, self.order, sum(by_rank))
            if weights is not None:
                with torch.enable_grad():
                    weights = route.gather_segments(weights, starts, self.order, sum(by_rank))
        num_bags = [sum(bags[f] for f in order[a:b]) for a, b in self._spans()]
        copied = sum(ends[f + 1] - ends[f] for f in self._copied)
        unit_starts = [0, *accumulate(num_ids)]
        lengths = lengths.to(ids.dtype)
        unit_bags = [bags[f] for f in order]
        return Sent(
            *(lengths, ids, weights, None, unit_starts, unit_bags, None),
            *(num_bags, by_rank, copied),
        )

    def _lengths_in_order(self, inputs: Inputs) -> Tensor:
        bags = inputs.bags
        if inputs.is_variable:
            first_bags = inputs.first_bags(range(len(bags)))
            total = sum(bags[f] for f in self._all)
            return route.gather_segments(inputs.lengths, first_bags, self.order, total)
        batch = bags[0] if bags else 0
        return inputs.lengths.view(len(bags), batch).index_select(0, self.order).view(-1)

    def _bucketize(self, inputs: Inputs) -> Sent:
        """Tables in blocks of rows: every id to the block that has its row."""
        unit_bags, rows = [inputs.bags[f] for f in self._all], None
        first_bags = inputs.first_bags(range(len(inputs.bags)))
        where = first_bags, self.features, self.blocks, self.copies
        units = inputs.first_bags(self._all)
        lengths = route.route_lengths(
            inputs.ids, inputs.offsets, *where, units, num_bags=sum(unit_bags)
        )
        starts = running_sums(lengths)
        unit_starts = starts[units]
        ends = unit_starts.tolist()
        with torch.enable_grad():
            ids, positions, weights = route.route_ids(
                *(inputs.ids, inputs.offsets, *where, units),
                starts=starts,
                total=ends[-1],
                weights=inputs.weights,
            )
        num_ids = [ends[b] - ends[a] for a, b in self._spans()]
        copied = ends[self._ends[1]] - ends[self._ends[1] - len(self._copied)]
        if self._packs and not inputs.is_variable:
            lengths, rows, unit_bags = self._packed(lengths, unit_bags)
        num_bags = [sum(unit_bags[a:b]) for a, b in self._spans()]
        return Sent(
            *(lengths, ids, weights, positions, unit_starts, unit_bags, rows),
            *(num_bags, num_ids, copied),
        )

    def _packed(
        self, lengths: Tensor, unit_bags: list[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Without bags of which no id is in a block, if they are many: no rows travel for them.

        Of a feature with one id a bag, each of W blocks of rows has one bag in W.
        """
        if lengths.numel() * self._mean_columns < _LEAST_SAVED:
            return lengths, None, unit_bags
        count = int(lengths.count_nonzero())
        saved = (lengths.numel() - count) * self._mean_columns
        if count > _MOST_BAGS * lengths.numel() or saved < _LEAST_SAVED:
            return lengths, None, unit_bags
        there = (lengths > 0).view(len(unit_bags), -1)
        if self._copied:
            # Gradients of copies come for all bags.
            for _, end in self._spans():
                there[end - len(self._copied) : end] = True
        rows = there.cumsum(1, dtype=torch.int32).sub_(1).masked_fill_(~there, -1)
        return lengths[there.view(-1)], rows.view(-1), there.sum(1).tolist()

    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise(self._ends))

    def positions(self, received: Received) -> Tensor:
        """Where in the batch of this rank each id was that it sent, but for those of copies."""
        sent, inputs = received.sent, received.inputs
        assert sent is not None
        positions = sent.positions
        if positions is None:
            every = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
            starts, total = inputs.starts(), sum(sent.num_ids)
            positions = route.gather_segments(every, starts, self.order, total)
        if not self._copied:
            return positions
        parts = positions.split(sent.num_ids)
        return torch.cat([part[: part.numel() - sent.copied] for part in parts])

    # On the way

    def _send(self, inputs: Inputs, batch: Sent, pending: Pending) -> Awaitable[Received]:
        """The header has come: now the size of every message is known."""
        headers = pending.wait().view(self._ranks.size, -1).tolist()
        _check([header[2] for header in headers])
        by_unit = any(header[3] for header in headers)
        bags = [list(of_unit) for of_unit in zip(*(h[_HEADER:] for h in headers), strict=True)]
        num_ids = [header[0] for header in headers]
        num_bags = [sum(header[_HEADER:]) for header in headers]
        sizes = [a + b for a, b in zip(batch.num_bags, batch.num_ids, strict=True)]
        came = [a + b for a, b in zip(num_bags, num_ids, strict=True)]
        payload = torch.cat(_interleaved(batch))
        ids = start_all_to_all(payload, sizes, came, self._ranks, content=Content.IDS)
        weights = None
        if batch.weights is not None:
            weights = DifferentiableAllToAll(batch.weights, batch.num_ids, num_ids, self._ranks)
        copied = sum(header[1] for header in headers)
        batch = batch._replace(lengths=None, ids=None, weights=None)
        flight = _Flight(
            *(inputs, batch, bags, by_unit, num_bags, came),
            *([header[0] - header[1] for header in headers], copied, ids, weights),
        )
        return Deferred(partial(self._receive, flight))

    def _receive(self, flight: _Flight) -> Received:
        """From rank-major to unit-major."""
        payload = flight.ids.wait()
        lengths, segments = _lengths(payload, flight)
        starts = running_sums(segments.view(-1))
        total = payload.numel() - lengths.numel()
        ids = route.gather_segments(payload, starts, self.own_order, total)
        weights = None
        if flight.weights is not None:
            starts = running_sums(segments[:, 1:].reshape(-1))
            weights = route.gather_segments(
                flight.weights.wait(), starts, self.own_weight_order, total
            )
        return Received(
            *(flight.inputs, flight.batch, ids, running_sums(lengths), weights, flight.bags),
            *(flight.by_unit, segments[:, 1:], flight.num_ids, flight.copied),
        )


def _lengths(payload: Tensor, flight: _Flight) -> tuple[Tensor, Tensor]:
    """Lengths of all bags, unit-major; and `[ranks, 1 + units]`: bags, then ids of each unit."""
    world, units = len(flight.num_bags), len(flight.bags)
    blocks = [
        part[:count]
        for part, count in zip(payload.split(flight.sizes), flight.num_bags, strict=True)
    ]
    segments = payload.new_empty((world, units + 1))
    segments[:, 0] = torch.tensor(flight.num_bags)
    if not units:
        return payload.new_empty(0), segments
    if not flight.by_unit:
        shaped = [block.view(units, -1) for block in blocks]
        for rank, block in enumerate(shaped):
            torch.sum(block, 1, dtype=payload.dtype, out=segments[rank, 1:])
        return torch.cat(shaped, dim=1).view(-1), segments
    every = torch.cat(blocks)
    bags = torch.tensor(flight.bags, device=payload.device)
    ends = running_sums(bags.t().reshape(-1))
    segments[:, 1:] = running_sums(every)[ends].diff().view(world, units)
    order = torch.arange(world * units, device=payload.device).view(world, units).t().reshape(-1)
    return route.gather_segments(every, ends, order, every.numel()), segments


def _kind(inputs: Inputs) -> int:
    is_long = inputs.ids.dtype is torch.int64
    return is_long + 2 * (inputs.weights is not None) + 4 * inputs.is_variable


def _check(kinds: list[int]) -> None:
    """Raise RuntimeError, on every rank, where their batches are not of one kind."""
    if len(set(kinds)) == 1:
        return
    told = [
        f"rank {rank}: {'int64' if kind & 1 else 'int32'}{', weights' if kind & 2 else ''}"
        f"{', features of unlike batch sizes' if kind & 4 else ''}"
        for rank, kind in enumerate(kinds)
    ]
    raise RuntimeError(
        "ids must have one dtype on all ranks; weights, and features of unlike batch sizes, must "
        f"be on all or none; got {'; '.join(told)}"
    )


def _interleaved(batch: Sent) -> list[Tensor]:
    """Lengths, then ids, for one rank after another."""
    assert batch.lengths is not None
    assert batch.ids is not None
    lengths, ids = batch.lengths.split(batch.num_bags), batch.ids.split(batch.num_ids)
    return [part for pair in zip(lengths, ids, strict=True) for part in pair]
