"""The input_dist: send the ids of a batch to the ranks that store their rows.

This is the first stage of a sharded lookup. `InputDist` sorts the ids of a batch by destination
(rank, then unit), and the received ids by unit, then rank. `start_input_dists` in input_messages.py
sends the batches of several collections.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import RouteBlockColumn, RouteFeatureColumn
from emblib.grad_mode import in_grad_mode
from emblib.jagged.jagged_tensor import running_sums
from emblib.jagged.keyed_layout import block_offsets
from emblib.ops import route
from emblib.sharding.awaitables import Awaitable
from emblib.sharding.layout import BlockRouting, CollectionLayout, sum_in_nodes
from emblib.sharding.layout_buffers import LayoutBuffers, int64_tensor
from emblib.sharding.ranks import RankGroup, can_sum_in_nodes

MAX_SHARE_OF_BAGS = 0.75  # empty bags are dropped only if at most this share of bags remains
_FLOAT_BYTES = 4
# Empty bags are dropped only if this saves so many elements of rows; for fewer, the work on indices
# takes longer than sending them.
_MIN_SAVED_ELEMENTS = 1 << 16


class _Header(IntEnum):
    """Entries of a header before the number of bags of each unit."""

    NUM_IDS = 0  # number of ids for the receiving rank
    NUM_REPLICATED_IDS = 1  # how many of these are for replicated tables
    KIND = 2  # a `_Kind`
    ROW_ORDER = 3  # a `_RowOrder`


class _RowOrder(IntEnum):
    """Order in which rows return, and whether nodes can sum them.

    Ranks may send different values; for all of them the maximum applies.
    """

    BY_BAG = 0  # all units have the same number of bags
    BY_UNIT = 1  # units may differ in their number of bags
    BY_UNIT_UNSUMMED = 2  # as BY_UNIT, and bags of units that nodes sum were dropped


class _Kind(IntFlag):
    """Properties that the batches of all ranks must share."""

    LONG_IDS = 1
    WEIGHTS = 2
    VARIABLE = 4  # features may differ in their number of bags
    COUNTS = 8
    WEIGHT_GRADIENTS = 16  # whose backward is a collective


class LocalBatch(NamedTuple):
    """The batch of this rank: the bags of the layout's features, feature after feature.

    Attributes:
        ids: int32 or int64 `[L]`, the ids of all bags; uint64 is possible for hash tables.
        lengths: int32 or int64 `[bags]`, number of ids per bag.
        offsets: int32 or int64 `[bags + 1]`, first id of each bag, then the number of ids.
        weights: float32 `[L]`; None for unweighted lookups.
        bag_counts: number of bags per feature.
        count_ids: function that returns the number of ids per feature; it may wait for a GPU.
        is_variable: whether features may differ in their number of bags.
        inverse: int64 `[B]` per feature, the bag of each example; None if bag i is example i.
        use_counts: int64 `[L]`, the uses that each id stands for; None if each stands for one use.
    """

    ids: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None
    bag_counts: list[int]
    count_ids: Callable[[], list[int]]
    is_variable: bool = False
    inverse: list[Tensor] | None = None
    use_counts: Tensor | None = None

    def starts(self) -> Tensor:
        """Return the first id of each feature, then the number of ids: `[F + 1]` as `offsets`."""
        if not self.is_variable and self.bag_counts and self.bag_counts[0]:
            return self.offsets[:: self.bag_counts[0]]
        return self.offsets[self.first_bags(range(len(self.bag_counts)))]

    def first_bags(self, features: Sequence[int]) -> Tensor:
        """Return where the bags of each of `features` begin if only these are listed, in order.

        Int64 `[n + 1]`, on the device of the batch; the last entry is the number of bags.
        """
        device = self.offsets.device
        if self.is_variable or not features:
            return torch.tensor(
                block_offsets([self.bag_counts[feature] for feature in features]), device=device
            )
        return torch.arange(len(features) + 1, device=device) * self.bag_counts[0]


class OutgoingBatch(NamedTuple):
    """A batch in the order of sending: by rank, then by unit (see `emblib.sharding.layout`).

    Attributes:
        lengths: number of ids per bag, in the dtype of `ids`; None once sent.
        ids: int32 or int64; None once sent.
        weights: float32, one per id; None once sent, or for unweighted lookups.
        positions: int64, position of each id in the batch of this rank; None if whole features are
            sent, and once sent if rows are pooled.
        unit_starts: first id of each unit, then the number of ids.
        unit_bags: number of bags per unit. With `row_numbers`, bags without ids for the unit are
            not sent, except for replicated tables and, without `skips_sums`, for units that nodes
            sum.
        row_numbers: int32 `[U * B]`: unit u returns row `row_numbers[u * B + b]` of its rows for
            bag b, no row if it is -1; None if every bag is sent.
        num_bags: number of bags sent to each rank.
        num_ids: number of ids sent to each rank.
        num_replicated_ids: number of ids at the end of each rank's message that are for replicated
            tables.
        skips_sums: whether bags of units that nodes sum were dropped, so that no node can sum.
        use_counts: int64, the uses that each id stands for; None once sent, or if each stands for
            one use.
    """

    lengths: Tensor | None
    ids: Tensor | None
    weights: Tensor | None
    positions: Tensor | None
    unit_starts: Tensor | list[int]
    unit_bags: list[int]
    row_numbers: Tensor | None
    num_bags: list[int]
    num_ids: list[int]
    num_replicated_ids: int
    skips_sums: bool = False
    use_counts: Tensor | None = None


class IncomingBatch(NamedTuple):
    """The bags that this rank looks up for all ranks: by unit, then by the rank that sent them.

    Attributes:
        inputs: the batch of this rank.
        sent: the batch that this rank sent; None if nothing was sent, on one rank.
        ids: int32 or int64 `[L]`, the ids of all bags; as in `inputs` if `sent` is None.
        offsets: int32 or int64, first id of each bag, then the number of ids.
        weights: float32, one per id; None for unweighted lookups.
        bag_counts: `bag_counts[u][r]` is the number of bags of unit u from rank r. Units of
            replicated tables come last, if their ids are sent.
        is_by_unit: whether units may differ in their number of bags; rows then return by unit.
        ids_per_segment: `[ranks, units]`, number of ids for each unit from each rank; not used if
            `sent` is None.
        num_ids: number of ids from each rank, without ids for replicated tables.
        num_replicated_ids: number of ids at the end of `ids` that are for replicated tables.
        merges_rows: whether the estimated rows of all collections that were sent together are few
            enough on every rank to return in one message.
        skips_sums: whether nodes cannot sum rows, because a rank has dropped bags of them.
        use_counts: int64, the uses that each id stands for; None if each stands for one use.
    """

    inputs: LocalBatch
    sent: OutgoingBatch | None
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    bag_counts: list[list[int]]
    is_by_unit: bool
    ids_per_segment: Tensor
    num_ids: list[int]
    num_replicated_ids: int
    merges_rows: bool = False
    skips_sums: bool = False
    use_counts: Tensor | None = None


class _BatchInFlight(NamedTuple):
    """A batch whose sizes have arrived and whose ids are in flight.

    Attributes:
        inputs: the batch of this rank.
        sent_batch: the batch that was sent, without the tensors that are in flight.
        bag_counts: `bag_counts[u][r]`, as in `IncomingBatch`; so are `is_by_unit`, `num_ids`,
            `num_replicated_ids` and `skips_sums`.
        num_bags: number of bags in the message from each rank.
        message_sizes: number of elements of the message from each rank: lengths of bags, then ids.
    """

    inputs: LocalBatch
    sent_batch: OutgoingBatch
    bag_counts: list[list[int]]
    is_by_unit: bool
    num_bags: list[int]
    message_sizes: list[int]
    num_ids: list[int]
    num_replicated_ids: int
    skips_sums: bool

    def received_ids(self) -> list[int]:
        """Return the number of ids from each rank, including those for replicated tables."""
        return [size - bags for size, bags in zip(self.message_sizes, self.num_bags, strict=True)]


class ScaledGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient by `scale`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        """Return `values`, with the same memory."""
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Scale the gradient."""
        return grad * ctx.scale, None


class InputDist(LayoutBuffers):
    """Sorts the ids of batches for the ranks whose shards have their rows, and the received ids.

    `start_input_dists` sends them. It calls `sort_by_destination` and `headers` before the sizes
    are sent, `parse_headers` once the headers of all ranks have arrived, and `sort_received` to
    receive the ids. None of these methods starts a collective. `sort_by_destination`,
    `sort_received` and `positions` may wait for the device.

    Args:
        layout: the units of all ranks.
        routing: the blocks of rows of each feature's table, and the units that store them.
        ranks: the processes.
        scale: factor of the gradients of tables, 1 / ranks for the mean.
        pooled: whether rows are pooled; then bags without ids for a block of rows may be dropped.

    Attributes:
        has_whole_tables: whether no table is divided by rows.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        routing: BlockRouting,
        ranks: RankGroup,
        scale: float,
        *,
        pooled: bool,
    ) -> None:
        super().__init__()
        self._is_pooled = pooled
        # The gradient of a weight is the gradient of this rank's own loss, not a mean over ranks.
        self._weight_scale = 1.0 / scale
        self._ranks = ranks
        # Units are numbered rank after rank.
        self._features_of_ranks = [
            [unit.feature for unit in rank_layout.all_units] for rank_layout in layout.ranks
        ]
        self._replicated_features = [
            unit.feature for unit in layout.ranks[ranks.rank].replicated_units
        ]
        self._unit_features = list(chain.from_iterable(self._features_of_ranks))
        self._is_in_order = self._unit_features == list(range(len(layout.features)))
        unit_columns = [unit.columns for rank in layout.ranks for unit in rank.all_units]
        self._mean_columns = sum(unit_columns) / max(len(unit_columns), 1)
        self._unit_bounds = [0, *accumulate(len(features) for features in self._features_of_ranks)]
        self._unit_ranges = list(pairwise(self._unit_bounds))  # numbers of the units of each rank
        # The gradients of replicated tables have a row for every bag.
        self._replicated_units = [
            unit
            for _, end in self._unit_ranges
            for unit in range(end - len(self._replicated_features), end)
        ]
        self._summed_units, self._num_sums = self._find_summed_units(layout)
        self._dims = [feature.dim for feature in layout.features]
        self.has_whole_tables = all(num_blocks <= 1 for _, num_blocks, _, _ in routing.features)
        buffers = {
            "unit_features": int64_tensor(self._unit_features),
            "features": int64_tensor(routing.features, len(RouteFeatureColumn)),
            "blocks": int64_tensor(routing.blocks, len(RouteBlockColumn)),
            "block_units": int64_tensor(routing.units),
            "unit_major_order": int64_tensor(self._segment_order(1)),
            "unit_major_order_without_lengths": int64_tensor(self._segment_order(0)),
        }
        for name, tensor in buffers.items():
            self.register_layout(name, tensor, ranks.device)

    unit_features: Tensor  # int64 `[U]`, feature of each unit of all ranks
    features: Tensor  # int64 `[F, 4]`, see `RouteFeatureColumn`
    blocks: Tensor  # int64 `[K, 3]`, see `RouteBlockColumn`
    block_units: Tensor  # int64 `[C]`, units that get the ids of each block, see `BlockRouting`
    # Int64 `[W * units]`: numbers of the segments that this rank receives, one per rank and unit,
    # in the order of units. A segment of lengths precedes the segments of ids of each rank.
    unit_major_order: Tensor
    unit_major_order_without_lengths: Tensor

    def _find_summed_units(self, layout: CollectionLayout) -> tuple[list[int], int]:
        """Return the numbers of the units whose rows nodes sum, and the number of sums per bag."""
        if not self._is_pooled or not can_sum_in_nodes(self._ranks):
            return [], 0
        sums = sum_in_nodes(layout, self._ranks.local_size)
        if sums is None:
            return [], 0
        summed_units = [
            begin + unit
            for (begin, _), rank_sums in zip(self._unit_ranges, sums.units, strict=True)
            for sum_units in rank_sums
            for unit in sum_units
        ]
        return summed_units, sum(len(node.units) for node in sums.nodes)

    def _segment_order(self, num_before: int) -> list[int]:
        """Return the numbers of the received segments, sorted by unit, then by sending rank.

        The segments arrive rank by rank: first `num_before` other segments of the rank, then one
        per unit.
        """
        num_ranks, num_units = self._ranks.size, len(self._features_of_ranks[self._ranks.rank])
        segments_per_rank = num_units + num_before
        return [
            rank * segments_per_rank + num_before + unit
            for unit in range(num_units)
            for rank in range(num_ranks)
        ]

    @property
    def header_size(self) -> int:
        """Return the number of entries of a header for this rank."""
        return len(_Header) + len(self._features_of_ranks[self._ranks.rank])

    def sort_by_destination(self, inputs: LocalBatch) -> OutgoingBatch:
        """Sort the ids, lengths, weights and use counts of a batch by rank, then by unit.

        Weights keep their gradient. Ids of uint64, which are keys of hash tables, are sent as int64
        with the same bits.
        """
        self.restore_layout()
        weights = inputs.weights
        if weights is not None and weights.requires_grad and self._weight_scale != 1.0:
            weights = ScaledGradient.apply(weights, self._weight_scale)
        # Replicas look up with the weights as they are: their gradients are not scaled.
        sent_inputs = inputs._replace(weights=weights, ids=as_int64(inputs.ids))
        sort_ids = self._copy_features if self.has_whole_tables else self._bucketize
        batch = in_grad_mode(sort_ids, enabled=False)(sent_inputs)
        return batch._replace(use_counts=self._counts_to_send(sent_inputs, batch))

    def _counts_to_send(self, inputs: LocalBatch, batch: OutgoingBatch) -> Tensor | None:
        """Return the use counts in the order of sending; None without any."""
        if inputs.use_counts is None:
            return None
        if batch.positions is not None:
            return inputs.use_counts[batch.positions]
        if batch.ids is inputs.ids:
            return inputs.use_counts
        return route.gather_segments(
            inputs.use_counts, inputs.starts(), self.unit_features, sum(batch.num_ids)
        )

    def headers(self, inputs: LocalBatch, batch: OutgoingBatch) -> list[list[int]]:
        """Return the header for each rank: the entries of `_Header`, then its bags per unit."""
        kind, row_order = _batch_kind(inputs), _RowOrder.BY_BAG
        if batch.skips_sums:
            row_order = _RowOrder.BY_UNIT_UNSUMMED
        elif inputs.is_variable or batch.row_numbers is not None:
            row_order = _RowOrder.BY_UNIT
        return [
            [num_ids, batch.num_replicated_ids, kind, row_order, *batch.unit_bags[begin:end]]
            for (begin, end), num_ids in zip(self._unit_ranges, batch.num_ids, strict=True)
        ]

    def empty_headers(self) -> list[list[int]]:
        """Return headers of zeros in the sizes of `headers(...)`, for a rank without a batch."""
        return [[0] * (len(_Header) + end - begin) for begin, end in self._unit_ranges]

    def row_nbytes(self, inputs: LocalBatch) -> int:
        """Return an estimate of the bytes of the rows that the ranks return for a batch.

        It counts float32 rows. For pooled rows it counts one per feature and bag, although a table
        that is divided by rows may return one per block; otherwise one of the largest dim per id.
        """
        if not self._is_pooled:
            return _FLOAT_BYTES * inputs.ids.numel() * max(self._dims, default=0)
        return _FLOAT_BYTES * sum(map(mul, inputs.bag_counts, self._dims))

    def _copy_features(self, inputs: LocalBatch) -> OutgoingBatch:
        """Copy the segments of whole features into the order of sending."""
        feature_starts, id_counts = inputs.starts(), inputs.count_ids()
        ids_per_unit = [id_counts[feature] for feature in self._unit_features]
        num_ids = [sum(ids_per_unit[begin:end]) for begin, end in self._unit_ranges]
        lengths, ids, weights = inputs.lengths, inputs.ids, inputs.weights
        if not (self._is_in_order and sum(id_counts) == ids.numel()):
            lengths = self._lengths_in_order(inputs)
            ids = route.gather_segments(ids, feature_starts, self.unit_features, sum(num_ids))
            if weights is not None:
                weights = in_grad_mode(route.gather_segments, enabled=True)(
                    weights, feature_starts, self.unit_features, sum(num_ids)
                )
        unit_bags = [inputs.bag_counts[feature] for feature in self._unit_features]
        num_bags = [sum(unit_bags[begin:end]) for begin, end in self._unit_ranges]
        num_replicated_ids = sum(id_counts[feature] for feature in self._replicated_features)
        unit_starts = [0, *accumulate(ids_per_unit)]
        lengths = lengths.to(ids.dtype)
        return OutgoingBatch(
            lengths=lengths,
            ids=ids,
            weights=weights,
            positions=None,
            unit_starts=unit_starts,
            unit_bags=unit_bags,
            row_numbers=None,
            num_bags=num_bags,
            num_ids=num_ids,
            num_replicated_ids=num_replicated_ids,
        )

    def _lengths_in_order(self, inputs: LocalBatch) -> Tensor:
        """Return the lengths of all bags, flat, unit after unit in the order of ranks."""
        bag_counts = inputs.bag_counts
        if inputs.is_variable:
            first_bags = inputs.first_bags(range(len(bag_counts)))
            num_bags = sum(bag_counts[feature] for feature in self._unit_features)
            return route.gather_segments(inputs.lengths, first_bags, self.unit_features, num_bags)
        batch_size = bag_counts[0] if bag_counts else 0
        lengths_by_feature = inputs.lengths.view(len(bag_counts), batch_size)
        return lengths_by_feature.index_select(0, self.unit_features).view(-1)

    def _bucketize(self, inputs: LocalBatch) -> OutgoingBatch:
        """Sort ids by the units that store the block of rows with their row."""
        unit_bags = [inputs.bag_counts[feature] for feature in self._unit_features]
        row_numbers, skips_sums = None, False
        first_bags = inputs.first_bags(range(len(inputs.bag_counts)))
        routing = first_bags, self.features, self.blocks, self.block_units
        first_unit_bags = inputs.first_bags(self._unit_features)
        lengths = route.route_lengths(
            inputs.ids, inputs.offsets, *routing, first_unit_bags, num_bags=sum(unit_bags)
        )
        bag_starts = running_sums(lengths)
        unit_starts = bag_starts[first_unit_bags]
        first_ids = unit_starts.tolist()
        ids, positions, weights = in_grad_mode(route.route_ids, enabled=True)(
            inputs.ids,
            inputs.offsets,
            *routing,
            first_unit_bags,
            starts=bag_starts,
            total=first_ids[-1],
            weights=inputs.weights,
        )
        num_ids = [first_ids[end] - first_ids[begin] for begin, end in self._unit_ranges]
        # The units of replicated tables are the last of each rank, here of rank 0.
        end = self._unit_bounds[1]
        num_replicated_ids = first_ids[end] - first_ids[end - len(self._replicated_features)]
        if self._is_pooled and not inputs.is_variable:
            skips_sums = self._skips_sums(lengths, unit_bags)
            units_to_keep = self._replicated_units + ([] if skips_sums else self._summed_units)
            lengths, row_numbers, unit_bags = self._drop_empty_bags(
                lengths, unit_bags, units_to_keep
            )
            skips_sums &= row_numbers is not None
        num_bags = [sum(unit_bags[begin:end]) for begin, end in self._unit_ranges]
        return OutgoingBatch(
            lengths=lengths,
            ids=ids,
            weights=weights,
            positions=positions,
            unit_starts=unit_starts,
            unit_bags=unit_bags,
            row_numbers=row_numbers,
            num_bags=num_bags,
            num_ids=num_ids,
            num_replicated_ids=num_replicated_ids,
            skips_sums=skips_sums,
        )

    def _skips_sums(self, lengths: Tensor, unit_bags: list[int]) -> bool:
        """Return whether summing in nodes would not reduce the number of rows sent between nodes.

        That is so for features with one id per bag, since each bag has an id in only one block of
        rows. Waits for the device if nodes sum any units.
        """
        if not self._summed_units:
            return False
        summed_lengths = lengths.view(len(unit_bags), -1)[self._summed_units]
        return int(summed_lengths.count_nonzero()) <= self._num_sums * summed_lengths.size(1)

    def _drop_empty_bags(
        self, lengths: Tensor, unit_bags: list[int], units_to_keep: Sequence[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Drop the bags that have no ids for a unit, if these are many, since they need no row.

        With one id per bag, each of W blocks of rows has ids of 1/W of the bags. Bags of
        `units_to_keep` are not dropped. Returns `lengths`, `row_numbers` and `unit_bags` of the
        `OutgoingBatch`. Waits for the device if enough could be saved.
        """
        droppable_lengths = lengths
        if units_to_keep:
            droppable_units = sorted(set(range(len(unit_bags))).difference(units_to_keep))
            droppable_lengths = lengths.view(len(unit_bags), -1)[droppable_units]
        if droppable_lengths.numel() * self._mean_columns < _MIN_SAVED_ELEMENTS:
            return lengths, None, unit_bags
        num_left = int(droppable_lengths.count_nonzero())
        saved_elements = (droppable_lengths.numel() - num_left) * self._mean_columns
        keeps_most = num_left > MAX_SHARE_OF_BAGS * droppable_lengths.numel()
        if keeps_most or saved_elements < _MIN_SAVED_ELEMENTS:
            return lengths, None, unit_bags
        has_ids = (lengths > 0).view(len(unit_bags), -1)
        if units_to_keep:
            has_ids[units_to_keep] = True
        return lengths[has_ids.view(-1)], number_bags(has_ids).view(-1), has_ids.sum(1).tolist()

    def positions(self, received: IncomingBatch) -> Tensor:
        """Return the position in the batch of each id sent, int64, in the order of sending.

        Ids of replicated tables are left out. Only for lookups that are not pooled.
        """
        sent, inputs = received.sent, received.inputs
        assert sent is not None
        assert not self._is_pooled
        positions = sent.positions
        if positions is None:
            all_positions = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
            starts, num_ids = inputs.starts(), sum(sent.num_ids)
            positions = route.gather_segments(all_positions, starts, self.unit_features, num_ids)
        if not self._replicated_features:
            return positions
        positions_by_rank = positions.split(sent.num_ids)
        return torch.cat(
            [part[: part.numel() - sent.num_replicated_ids] for part in positions_by_rank]
        )

    def parse_headers(
        self, inputs: LocalBatch, batch: OutgoingBatch, headers: list[list[int]]
    ) -> _BatchInFlight:
        """Return the sizes of the messages of a batch.

        Args:
            inputs: the batch of this rank.
            batch: the same batch, sorted; the result does not refer to the tensors to send.
            headers: the header of each rank for this rank.

        Raises:
            RuntimeError: the batches of ranks are of different kinds, on every rank.
        """
        _check_kinds([header[_Header.KIND] for header in headers])
        positions = None if self._is_pooled else batch.positions
        num_ids = [header[_Header.NUM_IDS] for header in headers]
        num_bags = [sum(header[len(_Header) :]) for header in headers]
        return _BatchInFlight(
            inputs=inputs,
            sent_batch=batch._replace(
                lengths=None, ids=None, weights=None, positions=positions, use_counts=None
            ),
            bag_counts=[
                list(unit_bags)
                for unit_bags in zip(*(header[len(_Header) :] for header in headers), strict=True)
            ],
            is_by_unit=any(header[_Header.ROW_ORDER] != _RowOrder.BY_BAG for header in headers),
            num_bags=num_bags,
            message_sizes=[bags + ids for bags, ids in zip(num_bags, num_ids, strict=True)],
            num_ids=[
                header[_Header.NUM_IDS] - header[_Header.NUM_REPLICATED_IDS] for header in headers
            ],
            num_replicated_ids=sum(header[_Header.NUM_REPLICATED_IDS] for header in headers),
            skips_sums=any(
                header[_Header.ROW_ORDER] == _RowOrder.BY_UNIT_UNSUMMED for header in headers
            ),
        )

    def sort_received(
        self,
        in_flight: _BatchInFlight,
        ids: Awaitable[Tensor],
        weights: Awaitable[Tensor] | None,
        use_counts: Awaitable[Tensor] | None,
        *,
        merges_rows: bool,
    ) -> IncomingBatch:
        """Wait for the ids, sort them by unit, then by sending rank, and return the batch.

        Args:
            in_flight: sizes of the messages.
            ids: the received lengths and ids of all ranks, flat, in the order of ranks.
            weights: one weight per id, in the order of ranks; None without weights.
            use_counts: one count per id, in the order of ranks; None without use counts.
            merges_rows: whether rows may return in one message, see `IncomingBatch`.
        """
        payload = ids.wait()
        lengths, segment_sizes = _split_lengths(payload, in_flight)
        segment_starts = running_sums(segment_sizes.view(-1))
        num_ids = payload.numel() - lengths.numel()

        def in_unit_order(values: Awaitable[Tensor] | None) -> Tensor | None:
            if values is None:
                return None
            id_segment_starts = running_sums(segment_sizes[:, 1:].reshape(-1))
            return route.gather_segments(
                values.wait(), id_segment_starts, self.unit_major_order_without_lengths, num_ids
            )

        return IncomingBatch(
            inputs=in_flight.inputs,
            sent=in_flight.sent_batch,
            ids=route.gather_segments(payload, segment_starts, self.unit_major_order, num_ids),
            offsets=running_sums(lengths),
            weights=in_unit_order(weights),
            bag_counts=in_flight.bag_counts,
            is_by_unit=in_flight.is_by_unit,
            ids_per_segment=segment_sizes[:, 1:],
            num_ids=in_flight.num_ids,
            num_replicated_ids=in_flight.num_replicated_ids,
            merges_rows=merges_rows,
            skips_sums=in_flight.skips_sums,
            use_counts=in_unit_order(use_counts),
        )


def as_int64(ids: Tensor) -> Tensor:
    """Return a view of uint64 ids as int64 with the same bits; ids of other dtypes unchanged."""
    return ids.view(torch.int64) if ids.dtype is torch.uint64 else ids


def number_bags(has_ids: Tensor) -> Tensor:
    """Return the number of each bag among the bags with ids of its unit; -1 for bags without ids.

    `has_ids` is bool `[units, bags]`, the result int32 of that shape. Does not wait for the device.
    """
    # `masked_fill_(~has_ids, -1)` would take 50 % longer.
    return has_ids.cumsum(1, dtype=torch.int32).mul_(has_ids).sub_(1)


def _split_lengths(payload: Tensor, in_flight: _BatchInFlight) -> tuple[Tensor, Tensor]:
    """Return the lengths of all bags, unit by unit, and the sizes of the segments of a payload.

    The sizes are `[ranks, 1 + units]` in the dtype of the payload: the number of bags from a rank,
    which have one length each, then its number of ids per unit.
    """
    num_ranks, num_units = len(in_flight.num_bags), len(in_flight.bag_counts)
    blocks = [
        message[:bags]
        for message, bags in zip(
            payload.split(in_flight.message_sizes), in_flight.num_bags, strict=True
        )
    ]
    segment_sizes = payload.new_empty((num_ranks, num_units + 1))
    segment_sizes[:, 0] = torch.tensor(in_flight.num_bags, device="cpu")
    if not num_units:
        return payload.new_empty(0), segment_sizes
    if not in_flight.is_by_unit:
        unit_blocks = [block.view(num_units, -1) for block in blocks]
        for rank, block in enumerate(unit_blocks):
            torch.sum(block, 1, dtype=payload.dtype, out=segment_sizes[rank, 1:])
        return torch.cat(unit_blocks, dim=1).view(-1), segment_sizes
    all_lengths = torch.cat(blocks)
    bag_counts = torch.tensor(in_flight.bag_counts, device=payload.device)
    first_bags = running_sums(bag_counts.t().reshape(-1))
    segment_sizes[:, 1:] = running_sums(all_lengths)[first_bags].diff().view(num_ranks, num_units)
    segment_numbers = torch.arange(num_ranks * num_units, device=payload.device)
    order = segment_numbers.view(num_ranks, num_units).t().reshape(-1)
    lengths = route.gather_segments(all_lengths, first_bags, order, all_lengths.numel())
    return lengths, segment_sizes


def _batch_kind(inputs: LocalBatch) -> int:
    """Return the `_Kind` of a batch, which must be equal on all ranks."""
    return (
        _Kind.LONG_IDS * (inputs.ids.dtype is not torch.int32)
        + _Kind.WEIGHTS * (inputs.weights is not None)
        + _Kind.VARIABLE * inputs.is_variable
        + _Kind.COUNTS * (inputs.use_counts is not None)
        + _Kind.WEIGHT_GRADIENTS * _needs_gradients(inputs.weights)
    )


def _needs_gradients(weights: Tensor | None) -> bool:
    return weights is not None and weights.requires_grad and torch.is_grad_enabled()


def _check_kinds(kinds: list[int]) -> None:
    """Raise RuntimeError, on every rank, unless the batches of all ranks are of one kind."""
    if len(set(kinds)) == 1:
        return
    descriptions = [
        f"rank {rank}: {'int64' if kind & _Kind.LONG_IDS else 'int32'}"
        f"{', weights' if kind & _Kind.WEIGHTS else ''}"
        f"{' with gradients' if kind & _Kind.WEIGHT_GRADIENTS else ''}"
        f"{', features of different batch sizes' if kind & _Kind.VARIABLE else ''}"
        f"{', dedup' if kind & _Kind.COUNTS else ''}"
        for rank, kind in enumerate(kinds)
    ]
    raise RuntimeError(
        "ids must have one dtype on all ranks; weights, their gradients, features of different "
        f"batch sizes, and dedup, must be on all or none; got {'; '.join(descriptions)}"
    )
