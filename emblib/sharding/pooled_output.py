"""The output_dist of pooled rows, and the output that a rank assembles from them.

One all-to-all returns the rows (`emblib.sharding.output_dist`). Then one pass over the received
rows assembles the output. It copies every feature's columns from the rank that pooled them, or sums
them over the ranks that store blocks of the table's rows, in float32 and in rank order. MEAN
pooling divides in this pass, by the lengths of this rank's own batch, so the result does not depend
on the plan. Backward does the same in the opposite direction.

The op of this pass, `route.combine`, takes a *target* per span of output columns, and a *piece* per
range of received rows that is summed into it.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import PieceColumn, TargetColumn
from emblib.ops import route
from emblib.sharding.codecs import (
    CommPrecision,
    ReceivedValues,
    SentValues,
    local_slice,
    without_local_size,
)
from emblib.sharding.input_dist import IncomingBatch
from emblib.sharding.layout import CollectionLayout, LookupUnit, RankLayout, sum_in_nodes
from emblib.sharding.layout_buffers import LayoutBuffers, int64_tensor
from emblib.sharding.node_sums import NodeSumDist, NodeSumStep
from emblib.sharding.output_dist import OutputStep
from emblib.sharding.ranks import RankGroup, can_sum_in_nodes


class _CopyDescriptors(NamedTuple):
    """Descriptors of the copies that assemble the output of one batch, for `route.combine`.

    Sizes are numbers of elements.

    Attributes:
        targets: int64 `[spans, 7]`, output location of each span of columns, see `TargetColumn`.
        pieces: int64 `[pieces, 3]`, location of the rows that are summed for a span, see
            `PieceColumn`.
        row_numbers: the rows that units return, see `OutgoingBatch.row_numbers`.
        received_sizes: size received from each rank, then from each node that sums rows.
        replicated_numel: size of the rows of replicated tables, which follow the received rows.
        output_numel: size of the output.
    """

    targets: Tensor
    pieces: Tensor
    row_numbers: Tensor | None
    received_sizes: list[int]
    replicated_numel: int
    output_numel: int


class _Span(NamedTuple):
    """A span of output columns of a feature, and the units whose rows are summed into it.

    Attributes:
        feature: number of the feature.
        column: first column in the output.
        width: number of columns.
        units: (source, unit, first column in the rows of the source) of each unit.
    """

    feature: int
    column: int
    width: int
    units: list[tuple[int, LookupUnit, int]]


class _Sources:
    """The sources of the received rows: all ranks, then the nodes if nodes sum rows.

    Args:
        layout: layout of the collection.
        layouts: layout of each source.

    Attributes:
        layouts: layout of each source.
        all_layouts: `layouts`, then the layout of the replicated tables.
        spans: spans of output columns, and the units whose rows make them.
        unit_widths: number of columns of each unit, per source.
        first_columns: first column of each unit in the rows of its source, by (source, unit).
    """

    def __init__(self, layout: CollectionLayout, layouts: Sequence[RankLayout]) -> None:
        self.layouts = layouts
        self.all_layouts: list[RankLayout] = [*layouts, layout.replicated]
        self.unit_widths = [[unit.columns for unit in rank_layout.units] for rank_layout in layouts]
        self.spans = [
            span
            for feature in range(len(layout.features))
            for span in _spans_of(layout, self.all_layouts, feature)
        ]
        self.first_columns = {
            (source, unit): column
            for source, source_layout in enumerate(self.all_layouts)
            for unit, column in zip(
                source_layout.units,
                accumulate((unit.columns for unit in source_layout.units), initial=0),
                strict=False,
            )
        }


class PooledOutputDist(LayoutBuffers):
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
        sums = sum_in_nodes(layout, ranks.local_size) if can_sum_in_nodes(ranks) else None
        local_layout = layout.ranks[ranks.rank]
        self._node_sums = None if sums is None else NodeSumDist(local_layout, sums, ranks)
        # `_flat_sources` is for batches whose rows nodes do not sum, `_sources` for all others.
        self._flat_sources = self._sources = _Sources(layout, layout.ranks)
        if sums is not None:
            self._sources = _Sources(layout, (*sums.direct, *sums.nodes))
        all_units = [
            (rank, unit)
            for rank, rank_layout in enumerate(layout.ranks)
            for unit in rank_layout.all_units
        ]
        # Number of each (rank, unit) in the order in which ids are sent.
        self._unit_numbers = {unit: number for number, unit in enumerate(all_units)}
        self._replicated_widths = [unit.columns for unit in layout.replicated.units]
        self._has_means = any(feature.is_mean for feature in layout.features)
        unit_features = [unit.feature for unit in layout.ranks[0].units]
        is_in_order = unit_features == list(range(len(layout.features)))
        self._is_in_order = not self._has_means and is_in_order
        constant, by_bag = self._equal_batch_descriptors()
        widths = {"targets": len(TargetColumn), "pieces": len(PieceColumn)}
        for term, lists in (("constant", constant), ("by_bag", by_bag)):
            for (list_name, width), rows in zip(widths.items(), lists, strict=True):
                self.register_layout(f"{term}_{list_name}", int64_tensor(rows, width), ranks.device)

    # For batches with B bags of every feature the descriptors are `constant + B * by_bag`.
    constant_targets: Tensor  # int64 `[spans, 7]`
    constant_pieces: Tensor  # int64 `[pieces, 3]`
    by_bag_targets: Tensor  # int64 `[spans, 7]`
    by_bag_pieces: Tensor  # int64 `[pieces, 3]`

    def step(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        received: IncomingBatch,
    ) -> OutputStep:
        """Return the lookup of a batch, whose pooled rows return to all ranks.

        Its output is `[B, columns]`, or flat for variable batch sizes.

        Args:
            local: rows of this rank's units for the bags of all ranks.
            replica_rows: rows of the replicated tables for the bags of this rank; None without such
                tables.
            gradient_sink: tensor that gets the gradients of replicated tables' rows of all ranks in
                backward; None if nothing needs them.
            received: the batch.
        """
        local_layout = self._layout.ranks[self._ranks.rank]
        replica_bags = received.bag_counts[len(local_layout.units) :]
        replica_sizes = (
            self._count_elements(self._replicated_widths, replica_bags) if replica_bags else []
        )
        descriptors, node_sums = self._describe_copies(received), None
        bag_counts = received.bag_counts
        if self._node_sums is not None and not received.skips_sums:
            node_sums = self._node_sums.step(
                bag_counts,
                descriptors.received_sizes[self._ranks.size :],
                self._comm_precision,
                is_by_unit=received.is_by_unit,
            )
            bag_counts = self._node_sums.direct_bags(bag_counts)
        widths = self._sources_of(received).unit_widths[self._ranks.rank]
        return _PooledStep(
            local,
            replica_rows,
            gradient_sink,
            replica_sizes,
            _PooledRoute(
                descriptors=descriptors,
                lengths=received.inputs.lengths if self._has_means else None,
                sent_sizes=self._count_elements(widths, bag_counts),
                shape=self._output_shape(received),
                node_sums=node_sums,
            ),
            merges_rows=received.merges_rows,
            ranks=self._ranks,
            comm_precision=self._comm_precision,
            scale=self._scale,
        )

    def local_output(self, local: Tensor, received: IncomingBatch) -> Tensor:
        """Return the output of a rank that pooled all rows, so that nothing was sent.

        `local` are the pooled rows, the columns unit after unit. The result has the columns in the
        order of the tables. It is `local` itself if units are in that order, no pooling is MEAN,
        and batch sizes do not vary.
        """
        if self._is_in_order and not received.is_by_unit:
            return local
        descriptors = self._describe_copies(received)
        lengths = received.inputs.lengths if self._has_means else None
        flat = route.combine(
            local.reshape(-1),
            descriptors.targets,
            descriptors.pieces,
            lengths,
            descriptors.output_numel,
            torch.float32,
        )
        return flat.view(self._output_shape(received))

    def _output_shape(self, received: IncomingBatch) -> tuple[int, ...]:
        """Return the shape of the output: `[B, columns]`, flat for variable batch sizes."""
        inputs = received.inputs
        if inputs.is_variable:
            return (-1,)
        return inputs.bag_counts[0] if inputs.bag_counts else 0, self._layout.columns

    def sink_shape(self, received: IncomingBatch) -> tuple[int, ...]:
        """Return the shape of a gradient sink: of replicated tables' rows for all ranks' bags."""
        bags = received.bag_counts[len(self._layout.ranks[self._ranks.rank].units) :]
        if received.inputs.is_variable:
            return (sum(self._count_elements(self._replicated_widths, bags)),)
        return sum(bags[0]), self._layout.replicated.columns

    def _count_elements(self, widths: Sequence[int], bags: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of elements per rank: the sum over units of width times bags.

        `bags[u][r]` is the number of bags of unit u for rank r; units beyond `widths` are ignored.
        """
        num_elements = [0] * self._ranks.size
        for width, counts in zip(widths, bags, strict=False):
            for rank, count in enumerate(counts):
                num_elements[rank] += count * width
        return num_elements

    # Arguments of route.combine

    def _sources_of(self, received: IncomingBatch) -> _Sources:
        return self._flat_sources if received.skips_sums else self._sources

    def _describe_copies(self, received: IncomingBatch) -> _CopyDescriptors:
        """Return the descriptors of the copies that assemble the output of a batch."""
        self.restore_layout()
        inputs = received.inputs
        if received.is_by_unit:
            return self._describe_copies_by_unit(received)
        batch_size = inputs.bag_counts[0] if inputs.bag_counts else 0
        return _CopyDescriptors(
            targets=torch.add(self.constant_targets, self.by_bag_targets, alpha=batch_size),
            pieces=torch.add(self.constant_pieces, self.by_bag_pieces, alpha=batch_size),
            row_numbers=None,
            received_sizes=[batch_size * source.columns for source in self._sources.layouts],
            replicated_numel=batch_size * self._layout.replicated.columns,
            output_numel=batch_size * self._layout.columns,
        )

    def _equal_batch_descriptors(self) -> tuple[Any, Any]:
        """Return the descriptors for B bags of every feature: a constant term and a factor of B.

        The messages `[B, columns of the source]` of all sources follow one another.
        """
        layouts = self._sources.all_layouts
        columns_before = [0, *accumulate(source.columns for source in layouts)]
        targets: list[route.TargetRow] = []
        targets_by_bag: list[route.TargetRow] = []
        pieces: list[route.PieceRow] = []
        pieces_by_bag: list[route.PieceRow] = []
        for span in self._sources.spans:
            first_piece = len(pieces)
            for source, _, column in span.units:
                pieces.append(route.PieceRow(column, layouts[source].columns))
                pieces_by_bag.append(route.PieceRow(columns_before[source], stride=0, first_row=0))
            is_mean = self._layout.features[span.feature].is_mean
            targets.append(
                route.TargetRow(
                    offset=span.column,
                    stride=self._layout.columns,
                    num_rows=0,
                    width=span.width,
                    first_piece=first_piece,
                    end_piece=len(pieces),
                    first_bag=0 if is_mean else -1,
                )
            )
            first_bag = span.feature if is_mean else 0
            targets_by_bag.append(route.TargetRow(0, 0, 1, 0, 0, 0, first_bag))
        return (targets, pieces), (targets_by_bag, pieces_by_bag)

    def _describe_copies_by_unit(self, received: IncomingBatch) -> _CopyDescriptors:
        """Return the descriptors of rows that are sent unit by unit, each with its own count."""
        unit_starts, received_sizes = self._starts_by_unit(received)
        inputs, features = received.inputs, self._layout.features
        bag_counts = inputs.bag_counts
        row_numbers = received.sent.row_numbers if received.sent else None
        first_bags = [0, *accumulate(bag_counts)]
        feature_sizes = map(mul, bag_counts, (feature.dim for feature in features))
        first_elements = [0, *accumulate(feature_sizes)]  # of each feature in a flat output
        sources = self._sources_of(received)
        targets: list[route.TargetRow] = []
        pieces: list[route.PieceRow] = []
        for span in sources.spans:
            feature, num_bags = features[span.feature], bag_counts[span.feature]
            first_piece = len(pieces)
            for source, unit, column in span.units:
                if source == len(sources.layouts) and not inputs.is_variable:
                    # Rows of replicated tables: `[B, columns]`, after the received rows.
                    offset, stride = sum(received_sizes) + column, self._layout.replicated.columns
                    pieces.append(route.PieceRow(offset, stride))
                    continue
                # Rows of one unit, which may have rows of some of the bags only.
                offset, number = unit_starts[source, unit]
                offset += column - sources.first_columns[source, unit]
                has_row_numbers = row_numbers is not None and number >= 0
                first_row = number * num_bags if has_row_numbers else -1
                pieces.append(route.PieceRow(offset, unit.columns, first_row))
            offset, stride = span.column, self._layout.columns
            if inputs.is_variable:
                offset += first_elements[span.feature] - feature.column
                stride = feature.dim
            targets.append(
                route.TargetRow(
                    offset=offset,
                    stride=stride,
                    num_rows=num_bags,
                    width=span.width,
                    first_piece=first_piece,
                    end_piece=len(pieces),
                    first_bag=first_bags[span.feature] if feature.is_mean else -1,
                )
            )
        device = self.constant_targets.device
        return _CopyDescriptors(
            targets=int64_tensor(targets, len(TargetColumn)).to(device),
            pieces=int64_tensor(pieces, len(PieceColumn)).to(device),
            row_numbers=row_numbers,
            received_sizes=received_sizes,
            replicated_numel=sum(
                bag_counts[unit.feature] * unit.columns for unit in self._layout.replicated.units
            ),
            output_numel=first_elements[-1],
        )

    def _starts_by_unit(
        self, received: IncomingBatch
    ) -> tuple[dict[tuple[int, LookupUnit], tuple[int, int]], list[int]]:
        """Return {(source, unit): (first element, number of the unit)}, and elements per source.

        The number is the one in `_unit_numbers`; -1 for sums and replicas, which have rows of all
        bags.
        """
        inputs, sent = received.inputs, received.sent
        unit_starts: dict[tuple[int, LookupUnit], tuple[int, int]] = {}
        position = 0
        received_sizes = []
        layouts = self._sources_of(received).layouts
        for source, source_layout in enumerate(layouts):
            source_begin = position
            for unit in source_layout.units:
                number = self._unit_numbers.get((source, unit), -1)
                unit_starts[source, unit] = position, number
                num_rows = inputs.bag_counts[unit.feature]
                if sent is not None and number >= 0:
                    num_rows = sent.unit_bags[number]
                position += num_rows * unit.columns
            received_sizes.append(position - source_begin)
        for unit in self._layout.replicated.units:
            unit_starts[len(layouts), unit] = position, -1
            position += inputs.bag_counts[unit.feature] * unit.columns
        return unit_starts, received_sizes


class _PooledRoute(NamedTuple):
    """Route of the rows of a batch.

    Attributes:
        descriptors: locations of the received rows in the output.
        lengths: number of ids per bag `[bags]`; None if no pooling is MEAN.
        sent_sizes: number of elements to each rank.
        shape: shape of the output.
        node_sums: rows that the node sums first; None if nodes sum no rows of this batch.
    """

    descriptors: _CopyDescriptors
    lengths: Tensor | None
    sent_sizes: list[int]
    shape: tuple[int, ...]
    node_sums: NodeSumStep | None


class _PooledStep(OutputStep):
    """The pooled rows of a batch, which return to the ranks that own the bags; see `OutputStep`."""

    def __init__(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        replica_sizes: list[int],
        pooled_route: _PooledRoute,
        *,
        merges_rows: bool,
        ranks: RankGroup,
        comm_precision: CommPrecision,
        scale: float,
    ) -> None:
        super().__init__(local, replica_rows, gradient_sink, replica_sizes, merges_rows=merges_rows)
        self._descriptors, self._lengths, self._sent_sizes, self._shape, self.node_sums = (
            pooled_route
        )
        self._received_sizes = self._descriptors.received_sizes[: len(self._sent_sizes)]
        self._ranks, self._comm_precision, self._scale = ranks, comm_precision, scale
        # Gradients of all rows of this rank, from `backward` to `local_gradient`. `backward` writes
        # the gradients of this rank's own bags; all others are received into this tensor. None if
        # this rank sends the gradients of its own bags to itself.
        self._local_grads: Tensor | None = None

    def rows_to_send(self) -> SentValues:
        """Return the rows to send to single ranks."""
        assert self.local is not None
        flat = self.local.detach().reshape(-1)
        is_summed = self.node_sums is not None
        if self.node_sums is not None:
            flat = self.node_sums.pack(flat)
        codec = self._comm_precision.forward
        return SentValues(
            flat, self._sent_sizes, self._received_sizes, codec, needs_one_tensor=is_summed
        )

    def assemble(self, received: ReceivedValues, replica_rows: Tensor | None) -> Tensor:
        """Sum received and replicated rows to the output of this rank's examples."""
        descriptors, values = self._descriptors, received.values
        if replica_rows is not None and descriptors.replicated_numel:
            values = torch.cat([values, replica_rows.detach().reshape(-1).to(values.dtype)])
        out = route.combine(
            values,
            descriptors.targets,
            descriptors.pieces,
            self._lengths,
            descriptors.output_numel,
            torch.float32,
            descriptors.row_numbers,
            local=received.local,
            local_begin=received.local_begin,
        )
        return out.view(self._shape)

    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        no_values = torch.empty(0, dtype=torch.float32, device="cpu")
        return self._gradients(no_values).nbytes()

    def _gradients(self, flat: Tensor) -> SentValues:
        return SentValues(
            flat, self._received_sizes, self._sent_sizes, self._comm_precision.backward
        )

    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[SentValues, Tensor | None]:
        """Return the gradients of rows to send, pooled, and those of replicated tables' rows."""
        descriptors, ranks = self._descriptors, self._ranks
        num_received, codec = sum(descriptors.received_sizes), self._comm_precision.backward
        keeps_local = keeps_local and codec.is_identity and self.node_sums is None
        kept_slice = local_slice(self._sent_sizes, ranks) if keeps_local else None
        arguments = (
            grad.contiguous().view(-1),
            descriptors.targets,
            descriptors.pieces,
            self._lengths,
            num_received + descriptors.replicated_numel,
        )
        if kept_slice is None:
            flat = route.combine_backward(
                *arguments, torch.float32, descriptors.row_numbers, self._scale
            )
        else:
            # Rows of this rank's own bags get their gradients here, other rows from other ranks.
            self._local_grads = grad.new_empty(sum(self._sent_sizes), dtype=torch.float32)
            flat = route.combine_backward_(
                *arguments,
                descriptors.row_numbers,
                self._scale,
                local=kept_slice.select(self._local_grads),
                local_begin=sum(descriptors.received_sizes[: ranks.rank]),
            )
        num_sent = flat.numel() - descriptors.replicated_numel
        sent_gradients, replica_grads = flat[:num_sent], flat[num_sent:]
        if self.sink_shape is None and descriptors.replicated_numel and self._scale != 1.0:
            replica_grads /= self._scale  # averaged with the dense part instead
        if self.node_sums is not None:
            num_direct = sum(self._received_sizes)
            self.node_sums.store_gradients(sent_gradients[num_direct:])
            return self._gradients(sent_gradients[:num_direct]), replica_grads
        if kept_slice is None or self._local_grads is None:
            return self._gradients(sent_gradients), replica_grads
        values = SentValues(
            sent_gradients,
            without_local_size(descriptors.received_sizes, ranks),
            without_local_size(self._sent_sizes, ranks),
            codec,
            kept_slice.select_others(self._local_grads),
        )
        return values, replica_grads

    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of the local lookup, from the received gradients, flat."""
        if self.node_sums is not None:
            return self.node_sums.unpack(received).view(self.local_shape)
        local_grads, self._local_grads = self._local_grads, None
        return (received if local_grads is None else local_grads).view(self.local_shape)


def _spans_of(layout: CollectionLayout, layouts: Sequence[RankLayout], feature: int) -> list[_Span]:
    """Return the spans of a feature's columns, cut wherever one of its units begins or ends.

    `layouts` are those of all sources. The units of a span are in the order of rows, then of
    sources, which is the order of summation.
    """
    units: list[tuple[int, LookupUnit, int]] = []
    for source, rank_layout in enumerate(layouts):
        column = 0
        for unit in rank_layout.units:
            if unit.feature == feature:
                units.append((source, unit, column))
            column += unit.columns
    column_cuts = sorted({edge for _, unit, _ in units for edge in unit.shard.columns})
    spans = []
    for begin, end in pairwise(column_cuts):
        covering_units = [
            (source, unit, column + begin - unit.shard.columns[0])
            for source, unit, column in units
            if unit.shard.columns[0] <= begin and end <= unit.shard.columns[1]
        ]
        covering_units.sort(key=lambda entry: (entry[1].shard.rows, entry[0]))
        column = layout.features[feature].column + begin
        spans.append(_Span(feature, column, end - begin, covering_units))
    return spans
