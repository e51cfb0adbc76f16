"""Pooled rows come back and become one output: the second half of a sharded lookup.

One all-to-all, then one pass over what came: every feature's columns are copied from the rank that
pooled them, or summed over the ranks that hold blocks of its rows, in float32 and in rank order. A
MEAN is divided here, by the lengths this rank knows itself, so that it does not depend on the plan.
Backward is the same the other way round.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from emblib.ops import route
from emblib.sharding.exchange import (
    Awaitable,
    CodedPending,
    CommPrecision,
    Content,
    Deferred,
    start_all_gather,
)
from emblib.sharding.input_dist import Received
from emblib.sharding.layout import Layout, RankLayout, Unit
from emblib.sharding.ranks import RankGroup


class _Pieces(NamedTuple):
    """The tables of `route.combine` for one batch, and how much comes from each rank."""

    targets: Tensor
    pieces: Tensor
    rows: Tensor | None
    came: list[int]
    copied: int
    out: int


class _Step(NamedTuple):
    """One batch between its two all-to-alls. `copies_of` elements of copies each rank has."""

    pieces: _Pieces
    lengths: Tensor | None
    sent: list[int]
    copies_of: list[int]
    shape: tuple[int, ...]
    pending: CodedPending | None


class _Span(NamedTuple):
    """Some columns of a feature in the output, and the units whose sum they are."""

    feature: int
    column: int
    width: int
    sources: list[tuple[int, Unit, int]]  # rank, unit, first column of the unit there + offset


class Combination(nn.Module):
    """Brings pooled rows back to the ranks whose bags they are of."""

    def __init__(self, layout: Layout, ranks: RankGroup, wire: CommPrecision, scale: float) -> None:
        super().__init__()
        self._layout, self._ranks, self._wire, self._scale = layout, ranks, wire, scale
        self._places: list[RankLayout] = [*layout.ranks, layout.replicated]
        self._spans = [
            span for f in range(len(layout.features)) for span in _spans_of(layout, self._places, f)
        ]
        self._own_widths = [unit.columns for unit in layout.ranks[ranks.rank].units]
        self._copied_widths = [unit.columns for unit in layout.replicated.units]
        self._divides = any(feature.is_mean for feature in layout.features)
        here = [unit.feature for unit in layout.ranks[0].units]
        self._in_order = not self._divides and here == list(range(len(layout.features)))
        self.register_buffer("grad_anchor", torch.zeros((), device=ranks.device), persistent=False)
        self._columns = {
            (rank, unit): column
            for rank, place in enumerate(self._places)
            for unit, column in zip(
                place.units, accumulate((u.columns for u in place.units), initial=0), strict=False
            )
        }
        constant, by_bag = self._equal_tables()
        for name, rows in (("constant", constant), ("by_bag", by_bag)):
            for kind, width, table in zip(("targets", "pieces"), (7, 3), rows, strict=True):
                tensor = torch.tensor(table, dtype=torch.int64).view(-1, width)
                self.register_buffer(f"{name}_{kind}", tensor.to(ranks.device), persistent=False)

    grad_anchor: Tensor
    constant_targets: Tensor
    constant_pieces: Tensor
    by_bag_targets: Tensor
    by_bag_pieces: Tensor

    def start(
        self, local: Tensor, copies: Tensor | None, stand_in: Tensor | None, received: Received
    ) -> Awaitable[Tensor]:
        """Send the rows that this rank has pooled; the result is `[B, columns]`, or flat.

        `local` are those of its units, all ranks' bags; `copies` those of the replicated tables for
        its own bags, and `stand_in` takes the gradients of those of all ranks.
        """
        inputs = received.inputs
        pieces = self._pieces(received)
        units = self._layout.ranks[self._ranks.rank]
        sent = self._elements(self._own_widths, received.bags)
        of_copies = received.bags[len(units.units) :]
        copied = self._elements(self._copied_widths, of_copies) if of_copies else []
        rows = local.detach().reshape(-1)
        codec = self._wire.forward
        pending = CodedPending(rows, sent, pieces.came, self._ranks, codec, Content.ROWS)
        lengths = inputs.lengths if self._divides else None
        shape = self._shape(received)
        step = _Step(pieces, lengths, sent, copied, shape, pending)
        return Deferred(partial(self._finish, local, copies, stand_in, step))

    def here(self, local: Tensor, received: Received) -> Tensor:
        """The output of rows that went nowhere."""
        if self._in_order and not received.by_unit:
            return local
        pieces = self._pieces(received)
        lengths = received.inputs.lengths if self._divides else None
        flat = route.combine(
            local.reshape(-1), pieces.targets, pieces.pieces, lengths, pieces.out, torch.float32
        )
        return flat.view(self._shape(received))

    def _shape(self, received: Received) -> tuple[int, ...]:
        inputs = received.inputs
        return (
            (-1,)
            if inputs.is_variable
            else (inputs.bags[0] if inputs.bags else 0, self._layout.columns)
        )

    def _finish(
        self, local: Tensor, copies: Tensor | None, stand_in: Tensor | None, step: _Step
    ) -> Tensor:
        # A rank without tables takes part in backward, too.
        grad_anchor = self.grad_anchor.detach().requires_grad_()
        result: Tensor = _Combined.apply(grad_anchor, local, copies, stand_in, step, self)
        return result

    def shape_of_copies(self, received: Received) -> tuple[int, ...]:
        """Of the rows of copies for the bags of all ranks."""
        bags = received.bags[len(self._layout.ranks[self._ranks.rank].units) :]
        if received.inputs.is_variable:
            return (sum(self._elements(self._copied_widths, bags)),)
        return sum(bags[0]), self._layout.replicated.columns

    def _elements(self, widths: Sequence[int], bags: Sequence[Sequence[int]]) -> list[int]:
        """Elements by rank: a row of every unit, of so many columns, for each bag of the rank."""
        sums = [0] * self._ranks.size
        for width, counts in zip(widths, bags, strict=False):
            for rank, count in enumerate(counts):
                sums[rank] += count * width
        return sums

    # Tables of pieces

    def _pieces(self, received: Received) -> _Pieces:
        inputs = received.inputs
        if received.by_unit:
            return self._pieces_by_unit(received)
        batch = inputs.bags[0] if inputs.bags else 0
        return _Pieces(
            torch.add(self.constant_targets, self.by_bag_targets, alpha=batch),
            torch.add(self.constant_pieces, self.by_bag_pieces, alpha=batch),
            None,
            [batch * place.columns for place in self._layout.ranks],
            batch * self._layout.replicated.columns,
            batch * self._layout.columns,
        )

    def _equal_tables(self) -> tuple[Any, Any]:
        """Tables for batches of B bags of every feature: a constant part, and one to multiply by B.

        A rank sends `[B, its columns]`, after what the ranks before it send.
        """
        before = [0, *accumulate(place.columns for place in self._places)]
        targets: list[tuple[int, ...]] = []
        targets_by_bag: list[tuple[int, ...]] = []
        pieces: list[tuple[int, int, int]] = []
        pieces_by_bag: list[tuple[int, int, int]] = []
        for span in self._spans:
            first = len(pieces)
            for rank, _, column in span.sources:
                pieces.append((column, self._places[rank].columns, -1))
                pieces_by_bag.append((before[rank], 0, 0))
            is_mean = self._layout.features[span.feature].is_mean
            ends = first, len(pieces)
            targets.append(
                (span.column, self._layout.columns, 0, span.width, *ends, 0 if is_mean else -1)
            )
            targets_by_bag.append((0, 0, 1, 0, 0, 0, span.feature if is_mean else 0))
        return (targets, pieces), (targets_by_bag, pieces_by_bag)

    def _pieces_by_unit(self, received: Received) -> _Pieces:
        """Tables for rows that come unit after unit, each with as many as it has."""
        starts, came = self._starts_by_unit(received)
        inputs, sent = received.inputs, received.sent
        bags, features, rows = inputs.bags, self._layout.features, sent.rows if sent else None
        first_bag = [0, *accumulate(bags)]
        first_element = [0, *accumulate(n * f.dim for n, f in zip(bags, features, strict=True))]
        copied = -1 if inputs.is_variable else len(self._layout.ranks)
        targets: list[tuple[int, ...]] = []
        pieces: list[tuple[int, int, int]] = []
        for span in self._spans:
            feature, count = features[span.feature], bags[span.feature]
            first = len(pieces)
            for rank, unit, column in span.sources:
                offset, number = starts[rank, unit]
                within = column - self._columns[rank, unit]
                if rank == copied:  # side by side
                    width = self._layout.replicated.columns
                    pieces.append((sum(came) + column, width, -1))
                else:
                    row = number * count if rows is not None and number >= 0 else -1
                    pieces.append((offset + within, unit.columns, row))
            mean = first_bag[span.feature] if feature.is_mean else -1
            ends = first, len(pieces)
            if inputs.is_variable:
                offset = first_element[span.feature] + span.column - feature.column
                targets.append((offset, feature.dim, count, span.width, *ends, mean))
            else:
                width = self._layout.columns
                targets.append((span.column, width, count, span.width, *ends, mean))
        device = self.constant_targets.device
        replicated = self._layout.replicated.units
        return _Pieces(
            torch.tensor(targets, dtype=torch.int64).view(-1, 7).to(device),
            torch.tensor(pieces, dtype=torch.int64).view(-1, 3).to(device),
            rows,
            came,
            sum(bags[unit.feature] * unit.columns for unit in replicated),
            first_element[-1],
        )

    def _starts_by_unit(
        self, received: Received
    ) -> tuple[dict[tuple[int, Unit], tuple[int, int]], list[int]]:
        """Where the rows of each unit begin, with its number; and elements by rank."""
        inputs, sent = received.inputs, received.sent
        starts: dict[tuple[int, Unit], tuple[int, int]] = {}
        position = number = 0
        came = []
        for rank, place in enumerate(self._layout.ranks):
            before = position
            for i, unit in enumerate(place.units):
                starts[rank, unit] = position, number + i
                count = sent.unit_bags[number + i] if sent else inputs.bags[unit.feature]
                position += count * unit.columns
            number += len(place.all_units)
            came.append(position - before)
        for unit in self._layout.replicated.units:
            starts[len(self._layout.ranks), unit] = position, -1
            position += inputs.bags[unit.feature] * unit.columns
        return starts, came

    # The two directions

    def combine(self, step: _Step, copies: Tensor | None) -> Tensor:
        """Wait for the rows of the others, and put the output together."""
        assert step.pending is not None
        pieces, source = step.pieces, step.pending.wait()
        if copies is not None and pieces.copied:
            source = torch.cat([source, copies.detach().reshape(-1).to(source.dtype)])
        out = route.combine(
            *(source, pieces.targets, pieces.pieces, step.lengths, pieces.out, torch.float32),
            pieces.rows,
        )
        return out.view(step.shape)

    def spread(self, step: _Step, grad: Tensor, *, everywhere: bool) -> tuple[Tensor, Tensor]:
        """Gradients of the rows this rank pooled for all ranks, and of those of its copies.

        `everywhere` brings the latter from all ranks, too.
        """
        pieces, codec = step.pieces, self._wire.backward
        total = sum(pieces.came)
        flat = route.spread(
            *(grad.contiguous().view(-1), pieces.targets, pieces.pieces, step.lengths),
            *(total + pieces.copied, torch.float32, pieces.rows, self._scale),
        )
        if not everywhere and pieces.copied and self._scale != 1.0:
            flat[total:] /= self._scale  # DistributedDataParallel makes the mean of these
        pending = CodedPending(
            flat[:total], pieces.came, step.sent, self._ranks, codec, Content.GRADIENTS
        )
        copies = flat[total:]
        if everywhere:
            copies = start_all_gather(
                copies, step.copies_of, self._ranks, content=Content.GRADIENTS
            ).wait()
        return pending.wait(), copies


class _Combined(torch.autograd.Function):
    """The output as autograd sees it: made of the rows pooled here and of those of the copies."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        local: Tensor,
        copies: Tensor | None,
        stand_in: Tensor | None,
        step: _Step,
        combination: Combination,
    ) -> Tensor:
        """`[B, columns]`, or flat where features differ in batch size."""
        out = combination.combine(step, copies)
        ctx.step, ctx.combination = step._replace(pending=None), combination
        ctx.shapes = [None if t is None else t.shape for t in (local, copies, stand_in)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends the gradients where the rows were pooled."""
        own, of_copies, of_stand_in = ctx.shapes
        everywhere = of_stand_in is not None
        local, copies = ctx.combination.spread(ctx.step, grad, everywhere=everywhere)
        local = local.view(own)
        if everywhere:
            return None, local, None, copies.view(of_stand_in), None, None
        copies = None if of_copies is None else copies.view(of_copies)
        return None, local, copies, None, None, None


def _spans_of(layout: Layout, places: Sequence[RankLayout], feature: int) -> list[_Span]:
    """The columns of a feature, cut wherever one of its units begins or ends."""
    sources: list[tuple[int, Unit, int]] = []
    for rank, place in enumerate(places):
        column = 0
        for unit in place.units:
            if unit.feature == feature:
                sources.append((rank, unit, column))
            column += unit.columns
    cuts = sorted({edge for _, unit, _ in sources for edge in unit.box.columns})
    spans = []
    for begin, end in pairwise(cuts):
        covering = [
            (rank, unit, column + begin - unit.box.columns[0])
            for rank, unit, column in sources
            if unit.box.columns[0] <= begin and end <= unit.box.columns[1]
        ]
        covering.sort(key=lambda source: (source[1].box.rows, source[0]))
        at = layout.features[feature].column + begin
        spans.append(_Span(feature, at, end - begin, covering))
    return spans
