"""The cost model: seconds and bytes of a shard for the rank that holds it.

`docs/planner.md` derives the formulas. A step has four phases, in each of which ranks wait for the
slowest: ids are sent (INPUT), rows are looked up (LOOKUP), rows are sent back and later their
gradients (OUTPUT), rows are updated (UPDATE). Work that every rank does whatever the plan is
ARRANGE.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from emblib.sharding.planner.calibration import Calibration, Curve, interpolate
from emblib.sharding.planner.topology import MemoryNeed, Topology, refuse_old_names
from emblib.sharding.planner.workloads import TableWorkload
from emblib.storage import MemoryBytes, TableSlice
from emblib.storage.base import is_fused

if TYPE_CHECKING:
    from emblib.sharding.codecs import CommPrecision

PHASES = ("input", "lookup", "output", "update")
INPUT, LOOKUP, OUTPUT, UPDATE = range(4)
Seconds = tuple[float, float, float, float]

_ID_BYTES = 8  # of int64 ids, and of lengths; int32 ones take half
_FLOAT_BYTES = 4
_GROUPING_BYTES = 20  # per id, while the lookups of a batch are grouped by row
_S_PER_NS = 1e-9
_SAMPLE_FLOATS = 4096  # floats that are encoded to measure the size of a codec's messages
_MAX_SHARE_OF_BAGS = 0.75  # as in `emblib.sharding.input_dist`
_ROW_INDEX_BYTES = 4  # of a bag's position among the bags that are sent
_GRID_S = 2.0**-44  # 0.06 ps


class Load(NamedTuple):
    """The cost of a shard for the rank that holds it."""

    seconds: Seconds
    nbytes: MemoryNeed

    def plus(self, other: "Load", factor: int) -> "Load":
        """Add `factor` times another load; -1 subtracts it."""
        # Unrolled, because the search adds loads often.
        (a, b, c, d), (e, f, g, h) = self.seconds, other.seconds
        seconds = a + factor * e, b + factor * f, c + factor * g, d + factor * h
        return Load(seconds, self.nbytes.plus(other.nbytes, factor))


class CommonCost(NamedTuple):
    """The cost of a table for every rank.

    Attributes:
        seconds: seconds by phase.
        arrange: seconds of the work that every rank does, whatever shards it has.
        nbytes: bytes of batches and replicas.
        positions: bytes of the original positions of ids, which ranks store if any table is cut by
            rows.
        packs: whether bags without ids are not sent.
        uneven: additional seconds of this table if another table packs, because features then
            differ in their number of bags.
    """

    seconds: Seconds
    arrange: float
    nbytes: MemoryNeed
    positions: float = 0.0
    packs: bool = False
    uneven: float = 0.0


class _LookupCost(NamedTuple):
    """The cost of one collection's lookups in a table.

    Attributes:
        seconds: seconds by phase.
        io: bytes while rows are sent, which count at the peak `combining` of `MemoryNeed`.
        updating: bytes while rows are updated.
        arrange: additional seconds, as in `CommonCost`.
    """

    seconds: Seconds
    io: float
    updating: float
    arrange: float = 0.0


NOTHING = Load((0.0, 0.0, 0.0, 0.0), MemoryNeed(0, 0))


class BytesPerFloat(NamedTuple):
    """Bytes that a float takes in transit: `forward` in rows, `backward` in their gradients."""

    forward: float = 4.0
    backward: float = 4.0

    @classmethod
    def by(cls, wire: "CommPrecision") -> "BytesPerFloat":
        """Measure the mean encoded size of floats with the codecs of a `CommPrecision`."""
        rows = torch.zeros(_SAMPLE_FLOATS)
        codecs = wire.forward, wire.backward
        return cls(
            *(codec.encode(rows, [_SAMPLE_FLOATS]).nbytes / _SAMPLE_FLOATS for codec in codecs)
        )


FLOATS = BytesPerFloat()


class CostModel:
    """Compute costs of shards on a topology.

    Args:
        topology: machine whose constants are used.
        sent: bytes per float in transit.
        batches: number of distributed batches in memory at the same time.
        workloads: the tables that are planned together; they share the cache of a rank.
    """

    def __init__(
        self,
        topology: Topology,
        sent: BytesPerFloat = FLOATS,
        batches: int = 1,
        workloads: Iterable[TableWorkload] = (),
    ) -> None:
        self.topology, self.wire, self.batches = topology, sent, batches
        # Floats that a rank looks up per step, by which shards share its cache.
        self.floats_per_rank = sum(
            lookup.batch_size * lookup.ids_per_example * lookup.config.embedding_dim
            for workload in workloads
            for lookup in workload.by_reader
        )
        self._costs = topology.costs
        world, local = topology.world_size, topology.local_world_size
        costs = self._costs
        # Seconds per byte that is sent equally to all ranks: over links in the node, the network
        # to other nodes, and for nothing to this rank itself.
        link = (local - 1) / costs.link_bytes_per_s
        network = (world - local) / costs.network_bytes_per_s
        self._s_per_byte = (link + network) / world
        # The same for rows that the ranks of a node sum first: within it, and between nodes.
        self._s_per_summed = link / local, network / world / local

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names({"part": "shard_load", "everywhere": "common_cost"})

    # Shards

    def shard_load(
        self,
        workload: TableWorkload,
        table_slice: TableSlice,
        share: float,
        *,
        is_summed: bool = False,
    ) -> Load:
        """Return the cost of a shard that gets the given share of the table's ids.

        `is_summed`: whether its node sums its rows with those of other shards.
        """
        table = table_slice.storage.nbytes(table_slice, workload.optimizer, self.device)
        batches = [
            self._batch(lookup, table_slice, share, is_summed=is_summed)
            for lookup in workload.by_reader
        ]
        seconds = [
            sum(phase) for phase in zip(*(lookup.seconds for lookup in batches), strict=True)
        ]
        return Load(
            _exact(seconds),
            _need(
                table,
                sum(lookup.io for lookup in batches),
                sum(lookup.updating for lookup in batches),
            ),
        )

    def _batch(
        self, workload: TableWorkload, table_slice: TableSlice, share: float, *, is_summed: bool
    ) -> "_LookupCost":
        """Return the cost of one collection's lookups in a shard."""
        world, local = self.topology.world_size, self.topology.local_world_size
        ids = workload.batch_size * world * workload.ids_per_example * share
        of_bags = 1.0 if is_summed else share_of_bags_with_ids(workload, share)
        bags = workload.batch_size * world * workload.num_features * of_bags
        rows_out = bags if workload.config.pooled else ids
        floats = rows_out * table_slice.dim
        sent_bytes = (
            ids * (_ID_BYTES + (_FLOAT_BYTES if workload.is_weighted else 0)) + bags * _ID_BYTES
        )
        output = floats * (self.wire.forward + self.wire.backward) * self._s_per_byte
        if is_summed:
            # Within the node rows are float32, and copied twice: to be sent, and to be summed.
            s_within, s_between = self._s_per_summed
            copied = 4 * 2 * _FLOAT_BYTES * self._costs.arrange_ns * _S_PER_NS
            output = floats * (
                2 * _FLOAT_BYTES * s_within
                + (self.wire.forward + self.wire.backward) * s_between
                + copied
            )
        uneven = bags * self._costs.uneven_ns * _S_PER_NS / 2 if of_bags < 1.0 else 0.0
        seconds = (
            sent_bytes * self._s_per_byte,
            self._lookup(workload, table_slice, ids, rows_out) + uneven,
            output,
            self._update(workload, table_slice, ids, rows_out)
            + uneven * table_slice.storage.is_trained,
        )
        # Ids and lengths of each batch in flight, and its outgoing rows or incoming gradients.
        # Unpooled rows are put in order before they are sent, and their gradients afterwards.
        rows = self._copies_of(workload) * _FLOAT_BYTES * floats
        # A rank's own rows count as sent, though those of large messages stay in place.
        io = self._moved * sent_bytes + rows
        grouping = _GROUPING_BYTES * ids * table_slice.storage.is_trained
        updating = io + (grouping if workload.config.pooled else max(grouping, rows))
        if is_summed:
            # Also rows in the order of sending, the rows to sum, and the gradients of sums.
            io += 2 * rows + rows / local
            updating = max(updating, self._moved * sent_bytes + 2 * rows + rows / local)
        return _LookupCost(seconds, io, updating)

    def common_cost(
        self, workload: TableWorkload, shards: Iterable[tuple[int, float, bool]]
    ) -> CommonCost:
        """Return the cost of a sharded table for every rank, of sending and combining.

        `shards` are the columns and id share of each shard, and whether its node sums its rows.
        """
        shard_list = list(shards)
        first_load, *other_loads = (
            self._common_cost_of(lookup, shard_list) for lookup in workload.by_reader
        )
        for load in other_loads:
            first_load = CommonCost(
                first_load.seconds,
                first_load.arrange + load.arrange,
                first_load.nbytes.plus(load.nbytes),
                first_load.positions + load.positions,
                packs=first_load.packs or load.packs,
                uneven=first_load.uneven + load.uneven,
            )
        return first_load

    def _common_cost_of(
        self, workload: TableWorkload, shards: Sequence[tuple[int, float, bool]]
    ) -> CommonCost:
        """Return the cost of one collection's lookups in a sharded table for every rank."""
        bags, ids = (
            workload.batch_size * workload.num_features,
            workload.batch_size * workload.ids_per_example,
        )
        sent = sent_ids = pieces = numbers = looked_up = 0.0
        for columns, share, is_summed in shards:
            sent_ids += ids * share
            rows = bags * (1.0 if is_summed else share_of_bags_with_ids(workload, share))
            numbers += _ROW_INDEX_BYTES * bags * (rows < bags)
            looked_up += rows
            sent += (
                ids * share * (_ID_BYTES + (_FLOAT_BYTES if workload.is_weighted else 0))
                + rows * _ID_BYTES
            )
            received_rows = rows / self.topology.local_world_size if is_summed else rows
            pieces += (received_rows if workload.config.pooled else ids * share) * columns
        out = (bags if workload.config.pooled else ids) * workload.config.embedding_dim
        arrange = (
            sent / _ID_BYTES * self._costs.route_ns
            + numbers / _ROW_INDEX_BYTES * self._costs.pack_ns
            + 2 * (pieces + out) * _FLOAT_BYTES * self._costs.arrange_ns
        )
        # The caller's batch, the output and its gradient. `combining` adds the sent ids and the
        # pieces of rows that are put together.
        in_and_out = self.batches * (ids * _ID_BYTES + bags * _ID_BYTES) + 2 * _FLOAT_BYTES * out
        # The gradients of unpooled rows are first concatenated, then put in order.
        pieces_nbytes = self._copies_of(workload) * _FLOAT_BYTES * pieces
        ordered_nbytes = 0.0 if workload.config.pooled else pieces_nbytes
        combining = (
            in_and_out + (self.batches - 1) * sent + pieces_nbytes + ordered_nbytes + numbers
        )
        positions = 0.0 if workload.config.pooled else self._moved * sent_ids * _ID_BYTES
        arrange, positions = _round_to_grid(arrange * _S_PER_NS), float(math.ceil(positions))
        uneven = 0.0 if numbers or not workload.config.pooled else looked_up * self._costs.uneven_ns
        return CommonCost(
            NOTHING.seconds,
            arrange,
            _need(MemoryBytes(0), combining, in_and_out + ordered_nbytes),
            positions,
            packs=numbers > 0,
            uneven=_round_to_grid(uneven * _S_PER_NS),
        )

    @property
    def _moved(self) -> int:
        """Return the batches whose ids are in memory in addition to the caller's copy."""
        return self.batches if self.topology.world_size > 1 else self.batches - 1

    def _copies_of(self, workload: TableWorkload) -> int:
        """Return how often output rows are copied; with one rank, pooled rows are the output."""
        return 1 if self.topology.world_size > 1 or not workload.config.pooled else 0

    def replicated(self, workload: TableWorkload, table_slice: TableSlice) -> CommonCost:
        """Return the cost of a replicated table: lookups of its own batch, updates of all."""
        table = table_slice.storage.nbytes(table_slice, workload.optimizer, self.device)
        batches = [self._replicated(lookup, table_slice) for lookup in workload.by_reader]
        if table_slice.storage.is_trained and not is_fused(workload.optimizer):
            # The gradient of the whole table is summed over the ranks, there and back.
            sent_s = 2 * table_slice.num_rows * table_slice.dim * _FLOAT_BYTES * self._s_per_byte
            batches.append(_LookupCost((0.0, 0.0, sent_s, 0.0), 0.0, 0.0))
        seconds = [
            sum(phase) for phase in zip(*(lookup.seconds for lookup in batches), strict=True)
        ]
        need = _need(
            table, sum(lookup.io for lookup in batches), sum(lookup.updating for lookup in batches)
        )
        arrange = sum(lookup.arrange for lookup in batches)
        return CommonCost(_exact(seconds), _round_to_grid(arrange), need)

    def _replicated(self, workload: TableWorkload, table_slice: TableSlice) -> "_LookupCost":
        """Return the cost of one collection's lookups in a replicated table."""
        world = self.topology.world_size
        bags, ids = (
            workload.batch_size * workload.num_features,
            workload.batch_size * workload.ids_per_example,
        )
        rows_out = bags if workload.config.pooled else ids
        floats = rows_out * workload.config.embedding_dim
        lookup = self._lookup(workload, table_slice, ids, rows_out)
        in_and_out = self.batches * (ids * _ID_BYTES + bags * _ID_BYTES) + 2 * _FLOAT_BYTES * floats
        combining = in_and_out + (_FLOAT_BYTES * floats if workload.config.pooled else 0.0)
        updating = in_and_out + _GROUPING_BYTES * ids
        arrange = 0.0
        if world > 1:
            # Rows are appended to the received ones and copied to the output; gradients back.
            arrange = 6 * _FLOAT_BYTES * floats * self._costs.arrange_ns * _S_PER_NS
        if not table_slice.storage.is_trained:
            seconds = 0.0, lookup, 0.0, 0.0
        elif not is_fused(workload.optimizer):
            seconds = 0.0, lookup, 0.0, self._update(workload, table_slice, ids, rows_out)
        else:
            # This rank receives the ids and gradients of all ranks.
            sent_bytes = (
                ids * (_ID_BYTES + (_FLOAT_BYTES if workload.is_weighted else 0)) + bags * _ID_BYTES
            ) * world
            update = self._update(workload, table_slice, ids * world, rows_out * world)
            values = 0.0
            if table_slice.storage.updates_need_rows:
                update += self._lookup(workload, table_slice, ids * world, rows_out * world)
                values = _FLOAT_BYTES * floats * world
            returned_bytes = floats * world * self.wire.backward
            seconds = (
                sent_bytes * self._s_per_byte,
                lookup,
                returned_bytes * self._s_per_byte,
                update,
            )
            arrange += (
                sent_bytes / _ID_BYTES * self._costs.route_ns * _S_PER_NS if world > 1 else 0.0
            )
            # Gradients of this rank and of all ranks. Those of unpooled rows are first concatenated
            # over features, and put in order when they have arrived.
            gathered_nbytes = self.batches * sent_bytes + _FLOAT_BYTES * floats * world
            combining += gathered_nbytes * self._copies_of(workload)
            combining += 0.0 if workload.config.pooled else 2 * _FLOAT_BYTES * floats
            updating = in_and_out + gathered_nbytes + values + _GROUPING_BYTES * ids * world
        return _LookupCost(seconds, combining, updating, arrange)

    # Lookups and updates

    @property
    def device(self) -> str:
        """Return "cpu" or "cuda"."""
        return self.topology.device

    @property
    def costs(self) -> Calibration:
        """Return the constants of the machine."""
        return self._costs

    def lookup_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the time to add one row to its bag, given the share of rows in cache."""
        costs = self._costs
        return self._cached_row_ns(costs.lookup_near, costs.lookup_far, table_slice, row_bytes, ids)

    def update_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the time to update one row, given the share of rows in cache."""
        costs = self._costs
        return self._cached_row_ns(costs.update_near, costs.update_far, table_slice, row_bytes, ids)

    def cached_lookup_ns(self, row_bytes: float) -> float:
        """Return the time to add one row to its bag where the table is in cache."""
        return interpolate(self._costs.lookup_near, row_bytes)

    def cached_update_ns(self, row_bytes: float) -> float:
        """Return the time to update one row where the table is in cache."""
        return interpolate(self._costs.update_near, row_bytes)

    def _cached_row_ns(
        self, near_ns: Curve, far_ns: Curve, table_slice: TableSlice, row_nbytes: float, ids: float
    ) -> float:
        """Return the ns per row of a shard that is partly in cache.

        The shards of a rank share its cache in proportion to their lookups; all ranks look up
        equally much.
        """
        floats, all_floats = ids * table_slice.dim, self.floats_per_rank
        part = min(1.0, floats / all_floats) if all_floats else 1.0
        near_bytes = self._costs.near_bytes * part
        share = min(1.0, near_bytes / max(table_slice.num_rows * row_nbytes, 1.0))
        return share * interpolate(near_ns, row_nbytes) + (1.0 - share) * interpolate(
            far_ns, row_nbytes
        )

    def _lookup(
        self, workload: TableWorkload, table_slice: TableSlice, ids: float, rows_out: float
    ) -> float:
        """Return the seconds of the lookups of a shard: `ids` rows into `rows_out` output rows."""
        costs = self._costs
        rows = table_slice.storage.lookup_ns(table_slice, workload.optimizer, ids, self)
        bags = rows_out * interpolate(costs.bag, table_slice.dim * _FLOAT_BYTES)
        return (rows + bags) * _S_PER_NS + workload.num_features * costs.unit_s / 2

    def _update(
        self, workload: TableWorkload, table_slice: TableSlice, ids: float, rows_out: float
    ) -> float:
        """Return the seconds that backward takes for these lookups; 0 for frozen tables."""
        if not table_slice.storage.is_trained:
            return 0.0
        costs = self._costs
        rows = table_slice.storage.update_ns(table_slice, workload.optimizer, ids, self)
        bags = rows_out * interpolate(costs.bag_gradient, table_slice.dim * _FLOAT_BYTES)
        return (rows + bags) * _S_PER_NS + workload.num_features * costs.unit_s / 2

    # Steps

    def exchanges_s(self, *, weighted: bool) -> float:
        """Return the seconds of a step's all-to-alls that do not depend on the batch."""
        costs, world = self._costs, self.topology.world_size
        if world == 1:
            return 0.0
        seconds_each = costs.exchange_s + (world - 2) * costs.message_s
        # Sizes, ids, rows and gradients; weights and their gradients are separate messages.
        return (6 if weighted else 4) * seconds_each

    def sums_s(self) -> float:
        """Return the batch-independent seconds of the all-to-alls of sums within nodes."""
        costs, topology = self._costs, self.topology
        sizes = topology.local_world_size, topology.num_nodes
        return sum(2 * (costs.exchange_s + (size - 2) * costs.message_s) for size in sizes)


# Seconds are multiples of `_GRID_S` and bytes are whole numbers, so sums are exact in any order:
# subtracting what was added restores the old sum, and equal loads stay equal.


def _round_to_grid(seconds: float) -> float:
    return round(seconds / _GRID_S) * _GRID_S


def _exact(seconds: Sequence[float]) -> Seconds:
    """Round the seconds of the four phases to the grid."""
    input_s, lookup_s, output_s, update_s = map(_round_to_grid, seconds)
    return input_s, lookup_s, output_s, update_s


def _need(table: MemoryBytes, combining: float, updating: float) -> MemoryNeed:
    """Add the memory of a table to that of batches in the two phases of a step."""
    device, host, disk = table
    return MemoryNeed(
        float(math.ceil(device + combining)), float(math.ceil(device + updating)), host, disk
    )


def share_of_bags_with_ids(workload: TableWorkload, share: float) -> float:
    """Return the share of a table's bags that a shard receives.

    Bags without ids in the shard are not sent, unless they are few: then it is 1.
    """
    if share >= 1.0 or not workload.config.pooled:
        return 1.0
    ids = workload.ids_per_example / workload.num_features
    of_bags = 1.0 - (1.0 - share) ** ids if ids >= 1.0 else ids * share
    return 1.0 if of_bags > _MAX_SHARE_OF_BAGS else of_bags
