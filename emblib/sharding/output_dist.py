"""The output dist of a sharded lookup: return pooled rows to the ranks that own the bags.

One all-to-all returns the rows, then one pass over the received rows assembles the output: every
feature's columns are copied from the rank that pooled them, or summed over the ranks that store
blocks of the table's rows, in float32 and in rank order. MEAN pooling divides in this pass, by the
lengths that this rank knows itself, so that the result does not depend on the plan. Backward does
the same in the opposite direction.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from emblib.ops import route
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.exchange import CommPrecision, Content, DecodedAwaitable, start_all_gather
from emblib.sharding.input_dist import IncomingBatch
from emblib.sharding.layout import CollectionLayout, LookupUnit, RankLayout
from emblib.sharding.ranks import RankGroup


class _CopyTables(NamedTuple):
    """The arguments of `route.combine` for one batch.

    Attributes:
        targets: `[spans, 7]`, where each span of columns goes in the output.
        sources: `[sources, 3]`, where the rows that are added up for a span begin.
        rows: see `OutgoingBatch.rows`.
        received_sizes: elements received from each rank.
        num_replicated: elements of the rows of replicated tables, which follow the received ones.
        num_outputs: elements of the output.
    """

    targets: Tensor
    sources: Tensor
    rows: Tensor | None
    received_sizes: list[int]
    num_replicated: int
    num_outputs: int


class _OutputInFlight(NamedTuple):
    """A batch between its forward and its backward all-to-all.

    `sent` are the elements sent to each rank, `replica_sizes` the elements of replicated tables'
    rows on each rank.
    """

    tables: _CopyTables
    lengths: Tensor | None
    sent: list[int]
    replica_sizes: list[int]
    shape: tuple[int, ...]
    pending: DecodedAwaitable | None


class _Span(NamedTuple):
    """Columns of a feature in the output, and the units whose rows add up to them."""

    feature: int
    column: int
    width: int
    units: list[tuple[int, LookupUnit, int]]  # rank, unit, column in the message of the rank


class OutputDist(nn.Module):
    """Returns pooled rows to the ranks that own the bags.

    Args:
        layout: the units of all ranks.
        ranks: the processes.
        comm_precision: the codecs of rows and gradients.
        scale: factor of the gradients of tables, 1 / ranks for the mean.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        ranks: RankGroup,
        comm_precision: CommPrecision,
        scale: float,
    ) -> None:
        super().__init__()
        self._layout, self._ranks = layout, ranks
        self._comm_precision, self._scale = comm_precision, scale
        self._layouts: list[RankLayout] = [*layout.ranks, layout.replicated]
        self._spans = [
            span
            for f in range(len(layout.features))
            for span in _spans_of(layout, self._layouts, f)
        ]
        self._own_widths = [unit.columns for unit in layout.ranks[ranks.rank].units]
        self._replicated_widths = [unit.columns for unit in layout.replicated.units]
        self._divides = any(feature.is_mean for feature in layout.features)
        order = [unit.feature for unit in layout.ranks[0].units]
        self._in_order = not self._divides and order == list(range(len(layout.features)))
        self.register_buffer("grad_anchor", torch.zeros((), device=ranks.device), persistent=False)
        self._columns = {
            (rank, unit): column
            for rank, rank_layout in enumerate(self._layouts)
            for unit, column in zip(
                rank_layout.units,
                accumulate((u.columns for u in rank_layout.units), initial=0),
                strict=False,
            )
        }
        constant, by_bag = self._equal_batch_tables()
        for name, rows in (("constant", constant), ("by_bag", by_bag)):
            for kind, width, table in zip(("targets", "sources"), (7, 3), rows, strict=True):
                tensor = torch.tensor(table, dtype=torch.int64).view(-1, width)
                self.register_buffer(f"{name}_{kind}", tensor.to(ranks.device), persistent=False)

    grad_anchor: Tensor
    constant_targets: Tensor
    constant_sources: Tensor
    by_bag_targets: Tensor
    by_bag_sources: Tensor

    def dispatch(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        received: IncomingBatch,
    ) -> Awaitable[Tensor]:
        """Start to return pooled rows to all ranks.

        Args:
            local: rows of this rank's units for the bags of all ranks.
            replica_rows: rows of the replicated tables for the bags of this rank.
            gradient_sink: gets the gradients of replicated tables' rows of all ranks in backward,
                see `ReplicatedTables.gradient_sink`.
            received: the batch.

        Returns:
            An awaitable of the output: `[B, columns]`, or flat where features differ in batch size.
        """
        inputs = received.inputs
        tables = self._tables(received)
        units = self._layout.ranks[self._ranks.rank]
        sent = self._elements(self._own_widths, received.bags)
        replica_bags = received.bags[len(units.units) :]
        replica_sizes = (
            self._elements(self._replicated_widths, replica_bags) if replica_bags else []
        )
        rows = local.detach().reshape(-1)
        codec = self._comm_precision.forward
        pending = DecodedAwaitable(
            rows, sent, tables.received_sizes, self._ranks, codec, Content.ROWS
        )
        lengths = inputs.lengths if self._divides else None
        shape = self._shape(received)
        step = _OutputInFlight(tables, lengths, sent, replica_sizes, shape, pending)
        return DeferredAwaitable(partial(self._connect, local, replica_rows, gradient_sink, step))

    def local_output(self, local: Tensor, received: IncomingBatch) -> Tensor:
        """Return the output where this rank pooled all rows and nothing was sent."""
        if self._in_order and not received.by_unit:
            return local
        tables = self._tables(received)
        lengths = received.inputs.lengths if self._divides else None
        flat = route.combine(
            local.reshape(-1),
            tables.targets,
            tables.sources,
            lengths,
            tables.num_outputs,
            torch.float32,
        )
        return flat.view(self._shape(received))

    def _shape(self, received: IncomingBatch) -> tuple[int, ...]:
        inputs = received.inputs
        if inputs.is_variable:
            return (-1,)
        return inputs.bags[0] if inputs.bags else 0, self._layout.columns

    def _connect(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        step: _OutputInFlight,
    ) -> Tensor:
        # A rank without tables takes part in backward too: the anchor requires a gradient.
        grad_anchor = self.grad_anchor.detach().requires_grad_()
        result: Tensor = _OutputFunction.apply(
            grad_anchor, local, replica_rows, gradient_sink, step, self
        )
        return result

    def sink_shape(self, received: IncomingBatch) -> tuple[int, ...]:
        """Return the shape of the replicated tables' rows for the bags of all ranks."""
        bags = received.bags[len(self._layout.ranks[self._ranks.rank].units) :]
        if received.inputs.is_variable:
            return (sum(self._elements(self._replicated_widths, bags)),)
        return sum(bags[0]), self._layout.replicated.columns

    def _elements(self, widths: Sequence[int], bags: Sequence[Sequence[int]]) -> list[int]:
        """Return elements by rank: for each of its bags a row of every unit, of such a width."""
        sums = [0] * self._ranks.size
        for width, counts in zip(widths, bags, strict=False):
            for rank, count in enumerate(counts):
                sums[rank] += count * width
        return sums

    # Arguments of route.combine

    def _tables(self, received: IncomingBatch) -> _CopyTables:
        inputs = received.inputs
        if received.by_unit:
            return self._tables_by_unit(received)
        batch = inputs.bags[0] if inputs.bags else 0
        return _CopyTables(
            torch.add(self.constant_targets, self.by_bag_targets, alpha=batch),
            torch.add(self.constant_sources, self.by_bag_sources, alpha=batch),
            None,
            [batch * rank_layout.columns for rank_layout in self._layout.ranks],
            batch * self._layout.replicated.columns,
            batch * self._layout.columns,
        )

    def _equal_batch_tables(self) -> tuple[Any, Any]:
        """Return the tables for B bags of every feature: a constant term and a factor of B.

        The messages `[B, columns of the rank]` of all ranks follow one another in rank order.
        """
        before = [0, *accumulate(rank_layout.columns for rank_layout in self._layouts)]
        targets: list[tuple[int, ...]] = []
        targets_by_bag: list[tuple[int, ...]] = []
        sources: list[tuple[int, int, int]] = []
        sources_by_bag: list[tuple[int, int, int]] = []
        for span in self._spans:
            first = len(sources)
            for rank, _, column in span.units:
                sources.append((column, self._layouts[rank].columns, -1))
                sources_by_bag.append((before[rank], 0, 0))
            is_mean = self._layout.features[span.feature].is_mean
            ends = first, len(sources)
            targets.append(
                (span.column, self._layout.columns, 0, span.width, *ends, 0 if is_mean else -1)
            )
            targets_by_bag.append((0, 0, 1, 0, 0, 0, span.feature if is_mean else 0))
        return (targets, sources), (targets_by_bag, sources_by_bag)

    def _tables_by_unit(self, received: IncomingBatch) -> _CopyTables:
        """Return the tables for rows that are sent unit after unit, each with its own count."""
        starts, received_sizes = self._starts_by_unit(received)
        inputs, sent = received.inputs, received.sent
        bags, features, rows = inputs.bags, self._layout.features, sent.rows if sent else None
        first_bag = [0, *accumulate(bags)]
        first_element = [0, *accumulate(n * f.dim for n, f in zip(bags, features, strict=True))]
        # The rows of replicated tables lie side by side, unless features differ in batch size.
        replicated_index = -1 if inputs.is_variable else len(self._layout.ranks)
        targets: list[tuple[int, ...]] = []
        sources: list[tuple[int, int, int]] = []
        for span in self._spans:
            feature, count = features[span.feature], bags[span.feature]
            first = len(sources)
            for rank, unit, column in span.units:
                offset, number = starts[rank, unit]
                within = column - self._columns[rank, unit]
                if rank == replicated_index:
                    width = self._layout.replicated.columns
                    sources.append((sum(received_sizes) + column, width, -1))
                else:
                    row = number * count if rows is not None and number >= 0 else -1
                    sources.append((offset + within, unit.columns, row))
            mean = first_bag[span.feature] if feature.is_mean else -1
            ends = first, len(sources)
            if inputs.is_variable:
                offset = first_element[span.feature] + span.column - feature.column
                targets.append((offset, feature.dim, count, span.width, *ends, mean))
            else:
                width = self._layout.columns
                targets.append((span.column, width, count, span.width, *ends, mean))
        device = self.constant_targets.device
        replicated = self._layout.replicated.units
        return _CopyTables(
            torch.tensor(targets, dtype=torch.int64).view(-1, 7).to(device),
            torch.tensor(sources, dtype=torch.int64).view(-1, 3).to(device),
            rows,
            received_sizes,
            sum(bags[unit.feature] * unit.columns for unit in replicated),
            first_element[-1],
        )

    def _starts_by_unit(
        self, received: IncomingBatch
    ) -> tuple[dict[tuple[int, LookupUnit], tuple[int, int]], list[int]]:
        """Return where the rows of each unit begin, with its number; and elements by rank."""
        inputs, sent = received.inputs, received.sent
        starts: dict[tuple[int, LookupUnit], tuple[int, int]] = {}
        position = number = 0
        received_sizes = []
        for rank, rank_layout in enumerate(self._layout.ranks):
            before = position
            for i, unit in enumerate(rank_layout.units):
                starts[rank, unit] = position, number + i
                count = sent.unit_bags[number + i] if sent else inputs.bags[unit.feature]
                position += count * unit.columns
            number += len(rank_layout.all_units)
            received_sizes.append(position - before)
        for unit in self._layout.replicated.units:
            starts[len(self._layout.ranks), unit] = position, -1
            position += inputs.bags[unit.feature] * unit.columns
        return starts, received_sizes

    # Forward and backward

    def assemble(self, step: _OutputInFlight, replica_rows: Tensor | None) -> Tensor:
        """Wait for the rows of the other ranks and assemble the output."""
        assert step.pending is not None
        tables, source = step.tables, step.pending.wait()
        if replica_rows is not None and tables.num_replicated:
            source = torch.cat([source, replica_rows.detach().reshape(-1).to(source.dtype)])
        out = route.combine(
            source,
            tables.targets,
            tables.sources,
            step.lengths,
            tables.num_outputs,
            torch.float32,
            tables.rows,
        )
        return out.view(step.shape)

    def backward(
        self, step: _OutputInFlight, grad: Tensor, *, from_all_ranks: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows that this rank pooled, and of replicated tables' rows.

        With `from_all_ranks` the latter are gathered from all ranks.
        """
        tables, codec = step.tables, self._comm_precision.backward
        total = sum(tables.received_sizes)
        flat = route.combine_backward(
            grad.contiguous().view(-1),
            tables.targets,
            tables.sources,
            step.lengths,
            total + tables.num_replicated,
            torch.float32,
            tables.rows,
            self._scale,
        )
        if not from_all_ranks and tables.num_replicated and self._scale != 1.0:
            flat[total:] /= self._scale  # DistributedDataParallel averages these
        pending = DecodedAwaitable(
            flat[:total], tables.received_sizes, step.sent, self._ranks, codec, Content.GRADIENTS
        )
        replica_grads = flat[total:]
        if from_all_ranks:
            replica_grads = start_all_gather(
                replica_grads, step.replica_sizes, self._ranks, content=Content.GRADIENTS
            ).wait()
        return pending.wait(), replica_grads


class _OutputFunction(torch.autograd.Function):
    """Connects the output to the rows pooled on this rank and to those of replicated tables."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        step: _OutputInFlight,
        output_dist: OutputDist,
    ) -> Tensor:
        out = output_dist.assemble(step, replica_rows)
        ctx.step, ctx.output_dist = step._replace(pending=None), output_dist
        ctx.shapes = [None if t is None else t.shape for t in (local, replica_rows, gradient_sink)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local_shape, replica_shape, sink_shape = ctx.shapes
        from_all_ranks = sink_shape is not None
        local, replica_grads = ctx.output_dist.backward(
            ctx.step, grad, from_all_ranks=from_all_ranks
        )
        local = local.view(local_shape)
        if from_all_ranks:
            return None, local, None, replica_grads.view(sink_shape), None, None
        replica_grads = None if replica_shape is None else replica_grads.view(replica_shape)
        return None, local, replica_grads, None, None, None


def _spans_of(layout: CollectionLayout, layouts: Sequence[RankLayout], feature: int) -> list[_Span]:
    """Return the columns of a feature, cut wherever one of its units begins or ends."""
    sources: list[tuple[int, LookupUnit, int]] = []
    for rank, rank_layout in enumerate(layouts):
        column = 0
        for unit in rank_layout.units:
            if unit.feature == feature:
                sources.append((rank, unit, column))
            column += unit.columns
    cuts = sorted({edge for _, unit, _ in sources for edge in unit.shard.columns})
    spans = []
    for begin, end in pairwise(cuts):
        covering = [
            (rank, unit, column + begin - unit.shard.columns[0])
            for rank, unit, column in sources
            if unit.shard.columns[0] <= begin and end <= unit.shard.columns[1]
        ]
        covering.sort(key=lambda source: (source[1].shard.rows, source[0]))
        at = layout.features[feature].column + begin
        spans.append(_Span(feature, at, end - begin, covering))
    return spans
