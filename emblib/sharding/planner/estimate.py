"""The cost model: predict the seconds and bytes of shards and replicas.

`docs/planner.md` derives the formulas. A step has four phases, and in each all ranks wait for the
slowest one. Ids are sent (INPUT), rows are looked up (LOOKUP), rows are sent back and later their
gradients (OUTPUT), rows are updated (UPDATE). `arrange_s` belongs to no phase: it is the time in
which every rank orders ids and rows, whatever shards it has.

Counts of ids, bags and rows are means per step, so they are floats. Counts of a shard cover the
batches of all ranks. Counts of what a rank sends, or looks up in a replica, cover its own batch.
Output rows are float32 of `columns` elements: one per bag of a pooled table, else one per id.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch

from emblib.sharding.input_dist import MAX_SHARE_OF_BAGS
from emblib.sharding.planner.calibration import Calibration, Curve, interpolate
from emblib.sharding.planner.topology import MemoryNeed, Topology, refuse_old_names
from emblib.sharding.planner.workloads import TableWorkload
from emblib.storage import MemoryBytes, TableSlice
from emblib.storage.base import is_fused

if TYPE_CHECKING:
    from emblib.sharding.codecs import CommPrecision

PHASES = ("input", "lookup", "output", "update")
INPUT, LOOKUP, OUTPUT, UPDATE = range(4)
Seconds = tuple[float, float, float, float]  # by phase

_ID_BYTES = 8  # of an id or a length in int64; int32 ids are overestimated
_FLOAT_BYTES = 4
_COPY_BYTES = 2 * _FLOAT_BYTES  # bytes read and written per copied float, as `arrange_ns` counts
_PASSES = 2  # forward and backward
_GROUPING_BYTES = 20  # per id, while the lookups of a batch are grouped by row
_ROW_INDEX_BYTES = 4  # of a bag's position among the bags that are sent
_S_PER_NS = 1e-9
_SAMPLE_FLOATS = 4096  # floats that are encoded to measure the size of a codec's messages
_GRID_S = 2.0**-44  # 0.06 ps: costs are multiples of it, see `_round_to_grid`


class Load(NamedTuple):
    """The cost of one or more shards for the rank that stores them: seconds by phase, and bytes."""

    seconds: Seconds
    nbytes: MemoryNeed

    def plus(self, other: "Load", factor: int) -> "Load":
        """Return the sum of this load and `factor` times another load."""
        # Unrolled, because the search adds loads often.
        input_s, lookup_s, output_s, update_s = self.seconds
        more_input_s, more_lookup_s, more_output_s, more_update_s = other.seconds
        seconds = (
            input_s + factor * more_input_s,
            lookup_s + factor * more_lookup_s,
            output_s + factor * more_output_s,
            update_s + factor * more_update_s,
        )
        return Load(seconds, self.nbytes.plus(other.nbytes, factor))


class ShardShape(NamedTuple):
    """The properties of a shard on which the cost of sending its rows depends.

    Attributes:
        columns: number of columns.
        id_share: share of the table's ids that the shard gets.
        is_summed: whether the node of the shard adds its rows to rows of other shards.
    """

    columns: int
    id_share: float
    is_summed: bool


class CommonCost(NamedTuple):
    """The cost of a table for every rank, in addition to the `Load`s of its shards.

    Attributes:
        seconds: seconds by phase. 0 for a sharded table, except for the part of the shards' loads
            that is equal on all ranks (`enumerate.build_option` moves it here).
        arrange_s: seconds of the work that every rank does, whatever shards it has.
        nbytes: bytes of batches and replicas, and of that part of the loads.
        position_nbytes: bytes of the original positions of ids, which ranks store if any table is
            cut by rows.
        drops_empty_bags: whether bags without ids are not sent to a shard.
        uneven_s: additional seconds of this table if another table drops empty bags. Features then
            differ in their number of bags.
    """

    seconds: Seconds
    arrange_s: float
    nbytes: MemoryNeed
    position_nbytes: float = 0.0
    drops_empty_bags: bool = False
    uneven_s: float = 0.0

    def plus(self, other: "CommonCost") -> "CommonCost":
        """Return the sum of this cost and the cost of another reader of the same table."""
        input_s, lookup_s, output_s, update_s = map(operator.add, self.seconds, other.seconds)
        return CommonCost(
            (input_s, lookup_s, output_s, update_s),
            self.arrange_s + other.arrange_s,
            self.nbytes.plus(other.nbytes),
            self.position_nbytes + other.position_nbytes,
            drops_empty_bags=self.drops_empty_bags or other.drops_empty_bags,
            uneven_s=self.uneven_s + other.uneven_s,
        )


class _LookupCost(NamedTuple):
    """The cost of one reader's lookups in a shard or replica, without the table's memory.

    Attributes:
        seconds: seconds by phase.
        combining_nbytes, updating_nbytes: bytes at the two peaks of `MemoryNeed`.
        arrange_s: additional seconds, as in `CommonCost`.
    """

    seconds: Seconds
    combining_nbytes: float
    updating_nbytes: float
    arrange_s: float = 0.0


NO_LOAD = Load((0.0, 0.0, 0.0, 0.0), MemoryNeed(0, 0))


class BytesPerFloat(NamedTuple):
    """Mean bytes of a float in a message: of rows (`forward`) and of gradients (`backward`)."""

    forward: float = 4.0
    backward: float = 4.0

    @classmethod
    def from_codecs(cls, comm_precision: "CommPrecision") -> "BytesPerFloat":
        """Measure the mean encoded size of floats with the codecs of a `CommPrecision`."""
        zeros = torch.zeros(_SAMPLE_FLOATS, device="cpu")
        codecs = comm_precision.forward, comm_precision.backward
        return cls(
            *(codec.encode(zeros, [_SAMPLE_FLOATS]).nbytes / _SAMPLE_FLOATS for codec in codecs)
        )


FLOAT32_IN_TRANSIT = BytesPerFloat()


class CostModel:
    """Compute the costs of shards and replicas on a topology.

    Equal arguments give equal costs; nothing is measured here. Several collections may share a
    table. Each of them is a *reader* of the table, with a `TableWorkload` of its lookups. The
    methods of storages get this object as their `RowTimes` (`emblib.storage`), for the costs of
    single rows.

    Args:
        topology: machine whose constants are used.
        bytes_per_float: bytes of a float in transit.
        batches_in_flight: number of distributed batches in memory at the same time.
        workloads: the tables that are planned together, which share the cache of a rank. If there
            are none, each shard has the whole cache.

    Attributes:
        floats_per_rank: floats that a rank looks up per step. A shard's share of them is its share
            of the cache.
    """

    def __init__(
        self,
        topology: Topology,
        bytes_per_float: BytesPerFloat = FLOAT32_IN_TRANSIT,
        batches_in_flight: int = 1,
        workloads: Iterable[TableWorkload] = (),
    ) -> None:
        self.topology = topology
        self.floats_per_rank = sum(
            reader.batch_size * reader.ids_per_example * reader.config.embedding_dim
            for workload in workloads
            for reader in workload.by_reader
        )
        self._bytes_per_float, self._batches_in_flight = bytes_per_float, batches_in_flight
        world_size, local_size = topology.world_size, topology.local_world_size
        costs = topology.costs
        # Seconds per byte of a message that is divided equally over all ranks. The part for the
        # node uses links, the part for other nodes the network; the part for this rank is free.
        link_s = (local_size - 1) / costs.link_bytes_per_s
        network_s = (world_size - local_size) / costs.network_bytes_per_s
        self._s_per_byte = (link_s + network_s) / world_size
        # The same for rows that a node sums: before the sum within the node, then between nodes.
        self._s_per_unsummed_byte = link_s / local_size
        self._s_per_summed_byte = network_s / world_size / local_size

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names(
            {"part": "shard_load", "everywhere": "common_cost", "replicated": "replicated_cost"}
        )

    # Shards

    def shard_load(
        self,
        workload: TableWorkload,
        table_slice: TableSlice,
        id_share: float,
        *,
        is_summed: bool = False,
    ) -> Load:
        """Return the cost of a shard for the rank that stores it, by all readers of the table.

        Args:
            workload: the table and its lookups.
            table_slice: rows and columns of the shard.
            id_share: share of the table's ids, of all ranks, that the shard gets.
            is_summed: whether the node of the shard adds its rows to rows of other shards.
        """
        lookup_costs = [
            self._shard_cost(reader, table_slice, id_share, is_summed=is_summed)
            for reader in workload.by_reader
        ]
        return self._sum_load(workload, table_slice, lookup_costs)

    def _sum_load(
        self,
        workload: TableWorkload,
        table_slice: TableSlice,
        lookup_costs: Sequence[_LookupCost],
    ) -> Load:
        """Return the sum of the costs of lookups in a slice, with the memory of the slice."""
        seconds = [
            sum(phase_seconds)
            for phase_seconds in zip(*(cost.seconds for cost in lookup_costs), strict=True)
        ]
        nbytes = _memory_need(
            table_slice.storage.nbytes(table_slice, workload.optimizer, self.device),
            sum(cost.combining_nbytes for cost in lookup_costs),
            sum(cost.updating_nbytes for cost in lookup_costs),
        )
        input_s, lookup_s, output_s, update_s = map(_round_to_grid, seconds)
        return Load((input_s, lookup_s, output_s, update_s), nbytes)

    def _shard_cost(
        self, reader: TableWorkload, table_slice: TableSlice, id_share: float, *, is_summed: bool
    ) -> _LookupCost:
        """Return the cost of one reader's lookups in a shard, for the batches of all ranks."""
        world_size, local_size = self.topology.world_size, self.topology.local_world_size
        costs, bytes_per_float = self.costs, self._bytes_per_float
        num_ids = reader.batch_size * world_size * reader.ids_per_example * id_share
        bag_share = 1.0 if is_summed else share_of_bags_with_ids(reader, id_share)
        num_bags = reader.batch_size * world_size * reader.num_features * bag_share
        num_output_rows = num_bags if reader.config.pooled else num_ids
        num_floats = num_output_rows * table_slice.dim
        batch_nbytes = _batch_nbytes(reader, num_ids, num_bags)
        output_s = (
            num_floats * (bytes_per_float.forward + bytes_per_float.backward) * self._s_per_byte
        )
        if is_summed:
            # Within the node rows are float32, and copied twice: to be sent, and to be summed.
            copy_s_per_float = _PASSES * 2 * _COPY_BYTES * costs.arrange_ns * _S_PER_NS
            output_s = num_floats * (
                _PASSES * _FLOAT_BYTES * self._s_per_unsummed_byte
                + (bytes_per_float.forward + bytes_per_float.backward) * self._s_per_summed_byte
                + copy_s_per_float
            )
        # `uneven_ns` covers both passes.
        uneven_s = num_bags * costs.uneven_ns * _S_PER_NS / _PASSES if bag_share < 1.0 else 0.0
        seconds = (
            batch_nbytes * self._s_per_byte,
            self._lookup_s(reader, table_slice, num_ids, num_output_rows) + uneven_s,
            output_s,
            self._update_s(reader, table_slice, num_ids, num_output_rows)
            + uneven_s * table_slice.storage.is_trained,
        )
        # Ids, weights and lengths of each batch in flight, and the outgoing rows or the incoming
        # gradients of one batch. Unpooled rows are put in order before they are sent, and their
        # gradients after they have arrived. Rows for the rank itself count as if they were sent,
        # although large messages do not contain them.
        rows_nbytes = self._num_row_copies(reader) * _FLOAT_BYTES * num_floats
        received_nbytes = self._num_received_batches * batch_nbytes
        combining_nbytes = received_nbytes + rows_nbytes
        grouping_nbytes = _GROUPING_BYTES * num_ids * table_slice.storage.is_trained
        updating_nbytes = combining_nbytes + (
            grouping_nbytes if reader.config.pooled else max(grouping_nbytes, rows_nbytes)
        )
        if is_summed:
            # In addition: rows in the order of sending, the rows to sum, the gradients of the sums.
            combining_nbytes += 2 * rows_nbytes + rows_nbytes / local_size
            updating_nbytes = max(
                updating_nbytes, received_nbytes + 2 * rows_nbytes + rows_nbytes / local_size
            )
        return _LookupCost(seconds, combining_nbytes, updating_nbytes)

    def common_cost(self, workload: TableWorkload, shards: Iterable[ShardShape]) -> CommonCost:
        """Return what a sharded table costs every rank: it sends ids and combines returned rows.

        `shards` must be all shards of the table.
        """
        all_shards = list(shards)
        costs_by_reader = (
            self._common_cost_of(reader, all_shards) for reader in workload.by_reader
        )
        return reduce(CommonCost.plus, costs_by_reader)

    def _common_cost_of(self, reader: TableWorkload, shards: Sequence[ShardShape]) -> CommonCost:
        """Return what one reader's lookups in a sharded table cost every rank, for its batch."""
        costs, is_pooled = self.costs, reader.config.pooled
        num_bags = reader.batch_size * reader.num_features
        num_ids = reader.batch_size * reader.ids_per_example
        sent_nbytes = num_sent_ids = num_output_rows = 0.0
        num_floats_in = 0.0  # of the rows that this rank receives and combines
        index_nbytes = 0.0  # of positions of bags, where empty ones are not sent
        for columns, id_share, is_summed in shards:
            num_sent_ids += num_ids * id_share
            num_rows = num_bags * (1.0 if is_summed else share_of_bags_with_ids(reader, id_share))
            index_nbytes += _ROW_INDEX_BYTES * num_bags * (num_rows < num_bags)
            num_output_rows += num_rows
            sent_nbytes += _batch_nbytes(reader, num_ids * id_share, num_rows)
            num_received_rows = num_rows / self.topology.local_world_size if is_summed else num_rows
            num_floats_in += (num_received_rows if is_pooled else num_ids * id_share) * columns
        num_floats_out = (num_bags if is_pooled else num_ids) * reader.config.embedding_dim
        arrange_ns = (
            sent_nbytes / _ID_BYTES * costs.route_ns
            + index_nbytes / _ROW_INDEX_BYTES * costs.pack_ns
            + _PASSES * (num_floats_in + num_floats_out) * _FLOAT_BYTES * costs.arrange_ns
        )
        # The caller's batches with their weights, the output and its gradient.
        caller_nbytes = (
            self._batches_in_flight * _batch_nbytes(reader, num_ids, num_bags)
            + 2 * _FLOAT_BYTES * num_floats_out
        )
        # The gradients of unpooled rows are first concatenated, then put in order.
        received_nbytes = self._num_row_copies(reader) * _FLOAT_BYTES * num_floats_in
        ordering_nbytes = 0.0 if is_pooled else received_nbytes
        combining_nbytes = (  # sent ids and received rows in addition
            caller_nbytes
            + (self._batches_in_flight - 1) * sent_nbytes
            + received_nbytes
            + ordering_nbytes
            + index_nbytes
        )
        position_nbytes = (
            0.0 if is_pooled else self._num_received_batches * num_sent_ids * _ID_BYTES
        )
        uneven_ns = 0.0 if index_nbytes or not is_pooled else num_output_rows * costs.uneven_ns
        return CommonCost(
            NO_LOAD.seconds,
            _round_to_grid(arrange_ns * _S_PER_NS),
            _memory_need(MemoryBytes(0), combining_nbytes, caller_nbytes + ordering_nbytes),
            float(math.ceil(position_nbytes)),
            drops_empty_bags=index_nbytes > 0,
            uneven_s=_round_to_grid(uneven_ns * _S_PER_NS),
        )

    @property
    def _num_received_batches(self) -> int:
        """Return the number of batches whose ids are in memory in addition to the caller's copy.

        One rank alone looks up the caller's copy of the batch that it computes.
        """
        is_distributed = self.topology.world_size > 1
        return self._batches_in_flight if is_distributed else self._batches_in_flight - 1

    def _num_row_copies(self, reader: TableWorkload) -> int:
        """Return the number of copies of rows: 0 if one rank alone pools rows into the output."""
        return 1 if self.topology.world_size > 1 or not reader.config.pooled else 0

    def replicated_cost(self, workload: TableWorkload, table_slice: TableSlice) -> CommonCost:
        """Return what a replicated table costs every rank; `table_slice` must be the whole table.

        A rank looks up its own batch. With a fused optimizer it receives the gradients of all ranks
        and applies them. With another optimizer it computes the gradient of its own batch, and the
        ranks sum the gradient of the whole table. A frozen table is only looked up.
        """
        lookup_costs = [self._replica_cost(reader, table_slice) for reader in workload.by_reader]
        if table_slice.storage.is_trained and not is_fused(workload.optimizer):
            # The gradient of the whole table is summed over the ranks, there and back.
            sent_s = 2 * table_slice.num_rows * table_slice.dim * _FLOAT_BYTES * self._s_per_byte
            lookup_costs.append(_LookupCost((0.0, 0.0, sent_s, 0.0), 0.0, 0.0))
        load = self._sum_load(workload, table_slice, lookup_costs)
        arrange_s = sum(cost.arrange_s for cost in lookup_costs)
        return CommonCost(load.seconds, _round_to_grid(arrange_s), load.nbytes)

    def _replica_cost(self, reader: TableWorkload, table_slice: TableSlice) -> _LookupCost:
        """Return what one reader's lookups in a replicated table, and their updates, cost."""
        costs, world_size = self.costs, self.topology.world_size
        is_pooled = reader.config.pooled
        num_bags = reader.batch_size * reader.num_features
        num_ids = reader.batch_size * reader.ids_per_example
        num_output_rows = num_bags if is_pooled else num_ids
        num_floats = num_output_rows * reader.config.embedding_dim
        lookup_s = self._lookup_s(reader, table_slice, num_ids, num_output_rows)
        caller_nbytes = (
            self._batches_in_flight * _batch_nbytes(reader, num_ids, num_bags)
            + 2 * _FLOAT_BYTES * num_floats
        )
        combining_nbytes = caller_nbytes + (_FLOAT_BYTES * num_floats if is_pooled else 0.0)
        updating_nbytes = caller_nbytes + _GROUPING_BYTES * num_ids
        arrange_s = 0.0
        if world_size > 1:
            # Three copies: rows are appended to the received rows, then copied to the output;
            # gradients are copied back.
            arrange_s = 3 * _COPY_BYTES * num_floats * costs.arrange_ns * _S_PER_NS
        if not table_slice.storage.is_trained or not is_fused(reader.optimizer):
            # Nothing is received: this rank computes the gradient of its own batch, if any.
            update_s = self._update_s(reader, table_slice, num_ids, num_output_rows)
            seconds = (0.0, lookup_s, 0.0, update_s)
            return _LookupCost(seconds, combining_nbytes, updating_nbytes, arrange_s)
        # A fused optimizer: this rank receives the ids and gradients of all ranks.
        all_batches_nbytes = _batch_nbytes(reader, num_ids, num_bags) * world_size
        num_all_ids, num_all_output_rows = num_ids * world_size, num_output_rows * world_size
        update_s = self._update_s(reader, table_slice, num_all_ids, num_all_output_rows)
        rows_nbytes = 0.0
        if table_slice.storage.updates_need_rows:
            update_s += self._lookup_s(reader, table_slice, num_all_ids, num_all_output_rows)
            rows_nbytes = _FLOAT_BYTES * num_floats * world_size
        gradient_nbytes = num_floats * world_size * self._bytes_per_float.backward
        seconds = (
            all_batches_nbytes * self._s_per_byte,
            lookup_s,
            gradient_nbytes * self._s_per_byte,
            update_s,
        )
        # Batches and gradients of all ranks. Gradients of unpooled rows are first concatenated over
        # features, and put in order when they have arrived.
        gathered_nbytes = 0.0
        if world_size > 1:
            arrange_s += all_batches_nbytes / _ID_BYTES * costs.route_ns * _S_PER_NS
            gathered_nbytes = (
                self._batches_in_flight * all_batches_nbytes
                + _FLOAT_BYTES * num_floats * world_size
            )
        combining_nbytes += gathered_nbytes * self._num_row_copies(reader)
        combining_nbytes += 0.0 if is_pooled else 2 * _FLOAT_BYTES * num_floats
        updating_nbytes = (
            caller_nbytes + gathered_nbytes + rows_nbytes + _GROUPING_BYTES * num_all_ids
        )
        return _LookupCost(seconds, combining_nbytes, updating_nbytes, arrange_s)

    # Lookups and updates

    @property
    def device(self) -> str:
        """Return the kind of device that has the tables, "cpu" or "cuda"."""
        return self.topology.device

    @property
    def costs(self) -> Calibration:
        """Return the constants of the machine."""
        return self.topology.costs

    def lookup_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the mean ns to add one row of `row_bytes` to its bag.

        `ids` is the number of rows of `table_slice` that a step looks up. It determines the share
        of the slice that is in cache.
        """
        costs = self.costs
        return self._mean_row_ns(costs.lookup_near, costs.lookup_far, table_slice, row_bytes, ids)

    def update_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the mean ns to update one row, whose `row_bytes` include its optimizer state.

        `ids` is as for `lookup_row_ns`.
        """
        costs = self.costs
        return self._mean_row_ns(costs.update_near, costs.update_far, table_slice, row_bytes, ids)

    def cached_lookup_ns(self, row_bytes: float) -> float:
        """Return the ns to add one row of `row_bytes` of a table in cache to its bag."""
        return interpolate(self.costs.lookup_near, row_bytes)

    def cached_update_ns(self, row_bytes: float) -> float:
        """Return the ns to update one row of `row_bytes`, with its state, of a table in cache."""
        return interpolate(self.costs.update_near, row_bytes)

    def _mean_row_ns(
        self, near_ns: Curve, far_ns: Curve, table_slice: TableSlice, row_bytes: float, ids: float
    ) -> float:
        """Return the mean ns per row of a shard that is partly in cache.

        The shards of a rank share its cache in proportion to the floats that they look up. Each
        rank is assumed to look up `floats_per_rank` floats.
        """
        num_floats, num_all_floats = ids * table_slice.dim, self.floats_per_rank
        cache_share = min(1.0, num_floats / num_all_floats) if num_all_floats else 1.0
        near_bytes = self.costs.near_bytes * cache_share
        near_share = min(1.0, near_bytes / max(table_slice.num_rows * row_bytes, 1.0))
        return near_share * interpolate(near_ns, row_bytes) + (1.0 - near_share) * interpolate(
            far_ns, row_bytes
        )

    def _lookup_s(
        self, reader: TableWorkload, table_slice: TableSlice, num_ids: float, num_output_rows: float
    ) -> float:
        """Return the seconds of forward: look up `num_ids` rows, write `num_output_rows` rows."""
        costs = self.costs
        rows_ns = table_slice.storage.lookup_ns(table_slice, reader.optimizer, num_ids, self)
        bags_ns = num_output_rows * interpolate(costs.bag, table_slice.dim * _FLOAT_BYTES)
        # `unit_s` covers both passes.
        return (rows_ns + bags_ns) * _S_PER_NS + reader.num_features * costs.unit_s / _PASSES

    def _update_s(
        self, reader: TableWorkload, table_slice: TableSlice, num_ids: float, num_output_rows: float
    ) -> float:
        """Return the seconds of backward: update the looked-up rows; 0 for frozen tables."""
        if not table_slice.storage.is_trained:
            return 0.0
        costs = self.costs
        rows_ns = table_slice.storage.update_ns(table_slice, reader.optimizer, num_ids, self)
        bags_ns = num_output_rows * interpolate(costs.bag_gradient, table_slice.dim * _FLOAT_BYTES)
        return (rows_ns + bags_ns) * _S_PER_NS + reader.num_features * costs.unit_s / _PASSES

    # Steps

    def exchanges_s(self, *, is_weighted: bool) -> float:
        """Return the seconds of a step's all-to-alls if they were empty; 0 for one rank.

        `is_weighted` says whether any collection sends weights.
        """
        if self.topology.world_size == 1:
            return 0.0
        # Sizes, ids, rows and gradients; weights and their gradients are separate messages.
        num_exchanges = 6 if is_weighted else 4
        return num_exchanges * self._exchange_s(self.topology.world_size)

    def sums_s(self) -> float:
        """Return the seconds of the all-to-alls of sums within nodes, if they were empty.

        The result means nothing for one node, or for nodes of one rank, which sum nothing.
        """
        sizes = self.topology.local_world_size, self.topology.num_nodes
        return sum(_PASSES * self._exchange_s(size) for size in sizes)

    def _exchange_s(self, num_ranks: int) -> float:
        """Return the seconds of an empty all-to-all."""
        return self.costs.exchange_s + (num_ranks - 2) * self.costs.message_s


def _round_to_grid(seconds: float) -> float:
    """Round to a multiple of `_GRID_S`, so that sums are exact in any order.

    Subtracting what was added then restores the old sum, and equal loads stay equal. Bytes are
    whole numbers for the same reason.
    """
    return round(seconds / _GRID_S) * _GRID_S


def _memory_need(table: MemoryBytes, combining_nbytes: float, updating_nbytes: float) -> MemoryNeed:
    """Return the memory of a table, with the bytes of batches at the two peaks of a step."""
    device, host, disk = table
    nbytes_by_field = (device + combining_nbytes, device + updating_nbytes, host, disk)
    return MemoryNeed(*(float(math.ceil(nbytes)) for nbytes in nbytes_by_field))


def _batch_nbytes(reader: TableWorkload, num_ids: float, num_bags: float) -> float:
    """Return the bytes of a message of ids, with their weights if any, and lengths."""
    weight_bytes = _FLOAT_BYTES if reader.is_weighted else 0
    return num_ids * (_ID_BYTES + weight_bytes) + num_bags * _ID_BYTES


def share_of_bags_with_ids(workload: TableWorkload, id_share: float) -> float:
    """Return the share of a table's bags that are sent to a shard with this share of the ids.

    Bags without ids in the shard are left out if at most `MAX_SHARE_OF_BAGS` of the bags remain;
    otherwise, and for tables that are not pooled, all bags are sent.
    """
    if id_share >= 1.0 or not workload.config.pooled:
        return 1.0
    num_ids = workload.ids_per_example / workload.num_features  # per bag
    bag_share = 1.0 - (1.0 - id_share) ** num_ids if num_ids >= 1.0 else num_ids * id_share
    return 1.0 if bag_share > MAX_SHARE_OF_BAGS else bag_share
