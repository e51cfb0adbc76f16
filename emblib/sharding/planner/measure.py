"""Measure the constants of the cost model on this machine: `calibrate`.

Times are the minimum over several rounds, to exclude other load on the machine. What a rank with
one CPU thread computes is measured in processor time, on which other programs have little effect.
Messages, and steps that all ranks make together, are measured in elapsed time.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.collections import EmbeddingBagCollection
from emblib.collections.configs import EmbeddingBagConfig
from emblib.dynamic import DynamicEmbeddingBags
from emblib.grad_mode import in_grad_mode
from emblib.jagged import KeyedJaggedTensor
from emblib.jagged.jagged_tensor import running_sums
from emblib.ops import route
from emblib.optim import SGD, Adam, Optimizer
from emblib.sharding.all_to_all import start_all_to_all
from emblib.sharding.fingerprint import agree
from emblib.sharding.input_dist import number_bags
from emblib.sharding.plan import plan_from_shapes
from emblib.sharding.planner import calibration
from emblib.sharding.planner.calibration import Calibration, Curve
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharding_types import (
    Rule,
    TableShape,
    World,
    data_parallel,
    row_wise,
    table_wise,
)
from emblib.specs import BoundsCheck, DynamicSpec, TableSpec, TTSpec
from emblib.storage.base import row_bytes
from emblib.storage.tensor_train import multiply_adds
from emblib.tables import TableBatchedEmbeddingBags, TTEmbeddingBag

_NUM_ROUNDS = 20
_DIMS = (8, 32, 64, 128)
_ADAM_DIMS = (64, 128)  # measured with Adam as well, whose states are twice as long as the row
_NUM_BAGS = 4096
_FEW_IDS, _MANY_IDS = 1, 13  # ids per bag; the slope between the two is the cost of an id
_CACHED_BYTES = 1 << 19  # bytes of a table that is in cache
_NUM_BATCHES = 6  # batches used in turn, so that the rows of a batch are not in cache
_NUM_COLD_BUFFERS = 3  # large buffers used in turn, so that no buffer stays in cache
_COPY_ACCESSES = 2  # bytes read or written per byte copied
_NUM_EXTRA_TABLES = 64  # tables added to a step of one table, to measure the cost of a table
_TINY = TableShape(64, 8)  # rows and columns of tables whose rows cost nothing
_ROUND_S = 5e-3  # duration of a round
_NS_PER_S = 1e9
_MIN_NEAR_FRACTION = 0.02  # least share of the middle table in cache, as noise may hide it
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. Smaller sizes take less time and are less exact.

    Attributes:
        large_bytes: bytes of the largest table, which must be larger than the cache. The middle
            table has a quarter of them, and must not be much smaller than the cache.
        rounds: number of rounds, of which the fastest counts; some figures take a multiple of it.
    """

    large_bytes: int = 1 << 27
    rounds: int = _NUM_ROUNDS


def time_call(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the seconds per call of a function: the minimum over rounds of `_ROUND_S` each.

    Calls the function twice before, to warm up and to choose the number of calls per round. Waits
    for the device before and after each round. On a CPU with one thread, the seconds are processor
    time of this thread.
    """
    is_serial = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_serial else time.perf_counter

    def time_round(num_calls: int) -> float:
        synchronize(device)
        start = clock()
        for _ in range(num_calls):
            function()
        synchronize(device)
        return (clock() - start) / num_calls

    time_round(1)
    num_calls = max(1, round(_ROUND_S / max(time_round(1), 1e-7)))  # the clock may not have moved
    return min(time_round(num_calls) for _ in range(rounds))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; do nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What a rank computes


def measure_rank(device: torch.device, sizes: Sizes) -> Calibration:
    """Measure the constants of what a rank computes; other constants keep their defaults.

    Not a collective. Allocates tables of `sizes.large_bytes` on `device`.
    """
    base = calibration.CUDA if device.type == "cuda" else calibration.CPU
    table_overhead = _measure_tiny_table(device, sizes.rounds)
    step_s, unit_s = _measure_step_and_unit(device, sizes.rounds)
    near, middle, far = (
        _TableTimer(device, nbytes, sizes.rounds, table_overhead)
        for nbytes in (_CACHED_BYTES, sizes.large_bytes // 4, sizes.large_bytes)
    )
    far_update_ns, middle_update_ns, near_update_ns = (
        timer.costs(64, SGD(0.1)).update_ns for timer in (far, middle, near)
    )
    # In the middle table, as many rows as the cache holds cost as much as rows of the near table.
    # The other rows cost as much as rows of the far table.
    near_fraction = min(
        1.0,
        max(
            _MIN_NEAR_FRACTION,
            (far_update_ns - middle_update_ns) / max(far_update_ns - near_update_ns, 1e-3),
        ),
    )
    route_ns, arrange_ns = _measure_routing(device, sizes.rounds)
    return replace(
        base,
        source=f"measured on {_name_of_device(device)}",
        lookup_near=near.lookup_curve(),
        lookup_far=far.lookup_curve(),
        update_near=near.update_curve(),
        update_far=far.update_curve(),
        bag=near.bag_curve(),
        bag_gradient=near.gradient_curve(),
        near_bytes=near_fraction * sizes.large_bytes / 4,
        unit_s=unit_s,
        step_s=step_s,
        route_ns=route_ns,
        arrange_ns=arrange_ns,
        pack_ns=measure_packing(device, sizes.rounds),
        uneven_ns=_measure_uneven(device, sizes.rounds),
        hash_ns=_measure_hashing(device, sizes.rounds, near.costs(64, SGD(0.1)).id_ns),
        tt_ns=_measure_multiply_add(device, sizes.rounds),
    )


def _name_of_device(device: torch.device) -> str:
    """Return the name of a device for reports; for a CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"a CPU, {threads} thread{'s' * (threads > 1)} a rank"


@dataclass(frozen=True)
class _RowCosts:
    """Nanoseconds of the parts of a step in a table.

    Attributes:
        id_ns: nanoseconds to look up one id.
        bag_ns: nanoseconds to write the pooled row of one bag.
        update_ns: nanoseconds to update the row of one id.
        gradient_ns: nanoseconds to read the gradient of one bag.
    """

    id_ns: float
    bag_ns: float
    update_ns: float
    gradient_ns: float


class _TableTimer:
    """Measures lookups and updates in tables of one size in bytes.

    Args:
        device: device of the table.
        nbytes: bytes of rows and optimizer state; a table of more columns has fewer rows.
        rounds: number of rounds, see `Sizes`.
        overhead_s: seconds of forward and of backward that do not depend on the batch.
    """

    def __init__(
        self, device: torch.device, nbytes: int, rounds: int, overhead_s: tuple[float, float]
    ) -> None:
        self.device, self.nbytes, self.rounds, self.overhead_s = device, nbytes, rounds, overhead_s
        self._costs: dict[tuple[int, str], _RowCosts] = {}

    def costs(self, dim: int, optimizer: Optimizer) -> _RowCosts:
        """Measure rows of `dim` float32 columns, once per dim and type of optimizer.

        The difference between steps of `_MANY_IDS` and `_FEW_IDS` ids per bag is the cost of ids;
        the remaining time is the cost of bags.
        """
        key = dim, type(optimizer).__name__
        if key not in self._costs:
            num_rows = max(self.nbytes // row_bytes(optimizer, dim, _FLOAT_BYTES), 32)
            table = TableBatchedEmbeddingBags(
                [TableSpec(num_rows, dim)],
                optimizer,
                bounds_check=BoundsCheck.NONE,
                device=self.device,
            )
            few_s = self._step(table, num_rows, _FEW_IDS)
            many_s = self._step(table, num_rows, _MANY_IDS)
            # Each of forward and of backward.
            id_s = [
                (many - few) / _NUM_BAGS / (_MANY_IDS - _FEW_IDS)
                for few, many in zip(few_s, many_s, strict=True)
            ]
            bag_s = [
                (few - overhead) / _NUM_BAGS - _FEW_IDS * per_id
                for few, overhead, per_id in zip(few_s, self.overhead_s, id_s, strict=True)
            ]
            costs_ns = [
                max(_NS_PER_S * seconds, 0.0) for seconds in (id_s[0], bag_s[0], id_s[1], bag_s[1])
            ]
            self._costs[key] = _RowCosts(*costs_ns)
        return self._costs[key]

    def _step(
        self, table: TableBatchedEmbeddingBags, num_rows: int, ids_per_bag: int
    ) -> tuple[float, float]:
        """Measure the seconds of forward, and of backward with the update."""
        offsets = torch.arange(_NUM_BAGS + 1, device=self.device) * ids_per_bag
        batches = cycle(
            [
                torch.randint(num_rows, (_NUM_BAGS * ids_per_bag,), device=self.device)
                for _ in range(_NUM_BATCHES)
            ]
        )
        grad = torch.randn(_NUM_BAGS, table.tables[0].dim, device=self.device) * 1e-3
        return _measure_step(lambda: table(next(batches), offsets), grad, self.device, self.rounds)

    def lookup_curve(self) -> Curve:
        """Return the curve of ns per id by bytes per row."""
        return _fit_line({4.0 * dim: self.costs(dim, SGD(0.1)).id_ns for dim in _DIMS})

    def update_curve(self) -> Curve:
        """Return the curve of ns per updated id by bytes of the row and its state."""
        points = {4.0 * dim: self.costs(dim, SGD(0.1)).update_ns for dim in _DIMS}
        for dim in _ADAM_DIMS:
            optimizer = Adam(0.1)
            points[float(row_bytes(optimizer, dim, _FLOAT_BYTES))] = self.costs(
                dim, optimizer
            ).update_ns
        return _fit_line(points)

    def bag_curve(self) -> Curve:
        """Return the curve of ns per bag by bytes of its row."""
        return _fit_line({4.0 * dim: self.costs(dim, SGD(0.1)).bag_ns for dim in _DIMS})

    def gradient_curve(self) -> Curve:
        """Return the curve of ns per bag gradient by bytes of its row."""
        return _fit_line({4.0 * dim: self.costs(dim, SGD(0.1)).gradient_ns for dim in _DIMS})


def _fit_line(points: dict[float, float]) -> Curve:
    """Fit a straight line that neither falls nor is negative at 0 bytes; return its two ends.

    `points` are ns by bytes. The fit minimises relative distances, below 1 ns absolute ones, so
    that small rows, which cost little, count as much as large ones.
    """
    weights = {x: 1.0 / max(y, 1.0) ** 2 for x, y in points.items()}
    total = sum(weights.values())
    x_mean = sum(w * x for x, w in weights.items()) / total
    y_mean = sum(w * points[x] for x, w in weights.items()) / total
    variance = sum(w * (x - x_mean) ** 2 for x, w in weights.items())
    slope = sum(w * (x - x_mean) * (points[x] - y_mean) for x, w in weights.items()) / variance
    slope = max(slope, 0.0)
    if y_mean - slope * x_mean < 0:
        slope = y_mean / x_mean
    return tuple((x, y_mean + slope * (x - x_mean)) for x in (min(points), max(points)))


def _measure_step(
    forward: Callable[[], Tensor], grad: Tensor, device: torch.device, rounds: int
) -> tuple[float, float]:
    """Measure the seconds of forward without gradients, and the seconds that backward adds."""
    step_s = time_call(lambda: forward().backward(grad), device, rounds)
    forward_s = in_grad_mode(time_call, enabled=False)(forward, device, rounds)
    return forward_s, max(step_s - forward_s, 0.0)


def _measure_tiny_table(device: torch.device, rounds: int) -> tuple[float, float]:
    """Measure the seconds of forward and backward of one table on a minimal batch."""
    module = TableBatchedEmbeddingBags(
        [TableSpec(_TINY.rows, _TINY.columns)],
        SGD(0.1),
        bounds_check=BoundsCheck.NONE,
        device=device,
    )
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    offsets = torch.arange(2, device=device)
    return _measure_step(
        lambda: module(ids, offsets), torch.ones(1, _TINY.columns, device=device), device, rounds
    )


def _measure_step_and_unit(device: torch.device, rounds: int) -> tuple[float, float]:
    """Measure a step of one table on a minimal batch, and the seconds that another table adds."""

    def step_of(num_tables: int) -> float:
        step = tiny_step(RankGroup.single(device), num_tables, table_wise(0))
        return time_call(lambda: step.forward().backward(step.gradient), device, rounds)

    one_s, many_s = step_of(1), step_of(_NUM_EXTRA_TABLES + 1)
    return one_s, max(many_s - one_s, 0.0) / _NUM_EXTRA_TABLES


class TinyStep(NamedTuple):
    """A step of minimal lookups: `forward` of a collection, and the gradient of its output."""

    forward: Callable[[], Tensor]
    gradient: Tensor


def tiny_step(ranks: RankGroup, num_tables: int, *rules: Rule) -> TinyStep:
    """Build a step with one id for each of `num_tables` small tables; a collective over `ranks`.

    Table t is sharded by `rules[t % len(rules)]`.
    """
    names = [f"t{t}" for t in range(num_tables)]
    source = EmbeddingBagCollection(
        [EmbeddingBagConfig(_TINY.rows, _TINY.columns, name) for name in names],
        device="meta",
        optimizer=SGD(0.1),
    )
    world = World(ranks.size, ranks.local_size)
    shapes = dict.fromkeys(names, _TINY)
    plan_rules = {name: rules[t % len(rules)] for t, name in enumerate(names)}
    plan = plan_from_shapes(shapes, plan_rules, world)
    collection = ShardedEmbeddingBagCollection(source, plan, ranks)
    lengths = torch.ones(num_tables, dtype=torch.int64, device=ranks.device)
    batch = KeyedJaggedTensor(names, lengths, lengths=lengths)
    gradient = torch.ones(1, _TINY.columns * num_tables, device=ranks.device)
    return TinyStep(lambda: collection(batch).values(), gradient)


def _measure_routing(device: torch.device, rounds: int) -> tuple[float, float]:
    """Measure the ns per id to sort ids into four blocks of rows, and per byte that is copied."""
    num_table_rows, num_bags, width = 1 << 20, 1 << 15, 64
    ids = torch.randint(num_table_rows, (num_bags,), device=device)
    offsets = torch.arange(num_bags + 1, device=device)
    num_blocks = 4  # of one feature, each with one unit
    routing = route.Routing(
        first_bags=torch.tensor([0, num_bags], device=device),
        features=torch.tensor([[0, num_blocks, num_table_rows, 0]], device=device),
        blocks=torch.tensor(
            [(k * num_table_rows // num_blocks, k, 1) for k in range(num_blocks)], device=device
        ),
        copies=torch.arange(num_blocks, device=device),
        units=torch.arange(num_blocks + 1, device=device) * num_bags,
    )

    def send() -> None:
        lengths = route.route_lengths(ids, offsets, *routing, num_bags=num_blocks * num_bags)
        starts = running_sums(lengths)
        route.route_ids(ids, offsets, *routing, starts=starts, total=num_bags)

    # The number of rows of a large batch, copied from memory that is in no cache to new memory.
    num_rows = 2 * num_bags
    sources = [torch.randn(num_rows * width, device=device) for _ in range(_NUM_COLD_BUFFERS)]
    source = cycle(sources)
    targets = torch.tensor([route.TargetRow(0, width, num_rows, width, 0, 1)], device=device)
    pieces = torch.tensor([route.PieceRow(0, width)], device=device)

    def arrange() -> None:
        route.combine(next(source), targets, pieces, None, num_rows * width, torch.float32)

    # `arrange_ns` is per byte that is read or written, `route_ns` per received id.
    return (
        time_call(send, device, rounds) / num_bags * _NS_PER_S,
        time_call(arrange, device, rounds) / (_COPY_ACCESSES * sources[0].nbytes) * _NS_PER_S,
    )


def measure_packing(device: torch.device, rounds: int) -> float:
    """Measure the ns per bag to drop bags without ids, as a sharded lookup does."""
    num_units = 16
    lengths = torch.randint(0, 2, (num_units * _NUM_BAGS,), device=device)

    def pack() -> None:
        has_ids = (lengths > 0).view(num_units, -1)
        number_bags(has_ids)
        lengths[has_ids.view(-1)]

    return time_call(pack, device, rounds) / lengths.numel() * _NS_PER_S


def _measure_uneven(device: torch.device, rounds: int) -> float:
    """Measure the additional ns per bag of a step whose features differ in their bags."""
    num_tables, dim = 8, 64
    module = TableBatchedEmbeddingBags(
        [TableSpec(1 << 11, dim)] * num_tables,
        SGD(0.1),
        bounds_check=BoundsCheck.NONE,
        device=device,
    )
    ids = torch.randint(1 << 11, (num_tables * _NUM_BAGS,), device=device)
    offsets = torch.arange(num_tables * _NUM_BAGS + 1, device=device)
    grad = torch.randn(num_tables * _NUM_BAGS * dim, device=device) * 1e-3
    uneven = [[_NUM_BAGS // 2 + table, _NUM_BAGS // 2 - table] for table in range(num_tables)]

    def time_step(sizes: list[list[int]] | None) -> float:
        def run() -> None:
            out = module(ids, offsets, batch_sizes=sizes)
            out.backward(grad.view(out.shape))

        return time_call(run, device, rounds)

    return max(time_step(uneven) - time_step(None), 0.0) / (num_tables * _NUM_BAGS) * _NS_PER_S


def _measure_hashing(device: torch.device, rounds: int, plain_ns: float) -> float:
    """Measure the ns to find an existing key, in addition to the cost of a dense row."""
    num_keys, dim = 1 << 14, 64
    module = DynamicEmbeddingBags([DynamicSpec(2 * num_keys, dim)], SGD(0.1), device=device)
    ids = torch.randperm(num_keys, device=device)
    offsets = torch.arange(num_keys + 1, device=device)
    module(ids, offsets)  # in training: every key gets a row
    module.eval()
    seconds = in_grad_mode(time_call, enabled=False)(lambda: module(ids, offsets), device, rounds)
    return max(seconds / num_keys * _NS_PER_S - plain_ns, 0.0)


def _measure_multiply_add(device: torch.device, rounds: int) -> float:
    """Measure the ns per multiply-add of computing tensor-train rows."""
    spec = TTSpec(1 << 18, 64, (16, 16))
    module = TTEmbeddingBag(spec, SGD(0.1), bounds_check=BoundsCheck.NONE, device=device)
    ids = torch.randperm(spec.rows, device=device)[:_NUM_BAGS]
    offsets = torch.arange(_NUM_BAGS + 1, device=device)
    seconds = in_grad_mode(time_call, enabled=False)(lambda: module(ids, offsets), device, rounds)
    return seconds * _NS_PER_S / _NUM_BAGS / multiply_adds(spec)


# What ranks exchange

_NUM_EXCHANGES = 4  # all-to-alls of a step: header, ids, rows, gradients
# Floats for each rank. Messages are then larger than caches, as those of large batches are.
_MESSAGE_FLOATS = 1 << 21


def calibrate(ranks: RankGroup | None = None, sizes: Sizes | None = None) -> Calibration:
    """Measure the constants of this machine and of the links between `ranks`; a collective.

    The constants of host memory behind a GPU and of disks keep their defaults; with one rank, so do
    the constants of links. Replace them with `dataclasses.replace` if you know better figures. All
    ranks get the same result.

    Args:
        ranks: the processes, whose devices are measured; None is the CPU of this process alone.
        sizes: sizes of what is measured; None is `Sizes()`.

    Raises:
        RuntimeError: what a rank computes could not be measured on another rank; that rank raises
            its own error.
    """
    ranks = RankGroup.single() if ranks is None else ranks
    sizes = Sizes() if sizes is None else sizes
    # Measure on all ranks at the same time if each has a core: they share memory bandwidth then, as
    # in a step.
    is_measuring = _has_a_core_each(ranks) or ranks.rank == 0
    local_calibration = agree(
        ranks, lambda: measure_rank(ranks.device, sizes) if is_measuring else None
    )
    measured = ranks.gather_objects(local_calibration)[0]
    assert measured is not None
    if ranks.size == 1:
        return measured
    costs_by_rank = ranks.gather_objects(_measure_links(ranks, measured.step_s, sizes))
    costs = _LinkCosts(*(max(rank_costs) for rank_costs in zip(*costs_by_rank, strict=True)))
    nodes = f"{ranks.nodes} nodes" if ranks.nodes > 1 else "one node"
    return replace(
        measured,
        source=f"{measured.source}, {ranks.size} ranks on {nodes}",
        exchange_s=costs.message_s,
        message_s=costs.message_s,
        copies_s=costs.replication_s,
        blocks_s=costs.row_cut_s,
        link_bytes_per_s=(
            1.0 / costs.link_byte_s if costs.link_byte_s else measured.link_bytes_per_s
        ),
        network_bytes_per_s=(
            1.0 / costs.network_byte_s if costs.network_byte_s else measured.network_bytes_per_s
        ),
    )


class _LinkCosts(NamedTuple):
    """Seconds that messages cost a rank."""

    message_s: float  # per all-to-all and other rank
    replication_s: float  # per step with replicated tables
    row_cut_s: float  # per step with tables cut by rows
    link_byte_s: float  # per byte sent within a node; 0 without other ranks there
    network_byte_s: float  # per byte sent to another node; 0 without other nodes


def _has_a_core_each(ranks: RankGroup) -> bool:
    """Return whether all ranks of this node can compute at the same time; a collective."""
    # Systems that cannot tell count as one core.
    local_cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    cores_by_rank = ranks.gather_objects(local_cores)
    if ranks.device.type == "cuda":
        return True
    first_rank = ranks.node * ranks.local_size
    cores_of_node = set().union(*cores_by_rank[first_rank : first_rank + ranks.local_size])
    return len(cores_of_node) >= ranks.local_size * torch.get_num_threads()


def _measure_overheads(ranks: RankGroup, step_s: float, rounds: int) -> tuple[float, float, float]:
    """Measure the seconds per all-to-all and other rank, of replication, and of row cuts."""
    one_each = [table_wise(rank) for rank in range(ranks.size)]
    synchronised_s = _synchronised_step_s(ranks, tiny_step(ranks, ranks.size, *one_each), rounds)
    replicated_s = _synchronised_step_s(
        ranks, tiny_step(ranks, ranks.size, *one_each[1:], data_parallel()), rounds
    )
    message_s = max(synchronised_s - step_s, 1e-6) / _NUM_EXCHANGES / (ranks.size - 1)
    row_cut_s = _synchronised_step_s(
        ranks, tiny_step(ranks, ranks.size, *one_each[1:], row_wise()), rounds
    )
    return message_s, max(replicated_s - synchronised_s, 0.0), max(row_cut_s - synchronised_s, 0.0)


def _synchronised_step_s(ranks: RankGroup, step: TinyStep, rounds: int) -> float:
    """Measure the seconds of a step that all ranks make together."""

    def run_step() -> None:
        step.forward().backward(step.gradient)

    return _fastest_call_s(ranks, run_step, 2, 5 * rounds)


def _fastest_call_s(
    ranks: RankGroup, function: Callable[[], object], num_calls: int, rounds: int
) -> float:
    """Return the seconds per call of a function that all ranks call together.

    The result is the minimum over rounds of `num_calls` calls each, on this rank's clock, after one
    more round to warm up.
    """

    def time_round() -> float:
        ranks.barrier()
        synchronize(ranks.device)
        start = time.perf_counter()
        for _ in range(num_calls):
            function()
        synchronize(ranks.device)
        return (time.perf_counter() - start) / num_calls

    time_round()
    return min(time_round() for _ in range(rounds))


def _measure_links(ranks: RankGroup, step_s: float, sizes: Sizes) -> _LinkCosts:
    """Measure what messages cost this rank; all ranks call this together."""
    node_ranks = range(ranks.node * ranks.local_size, (ranks.node + 1) * ranks.local_size)
    neighbours = [rank for rank in node_ranks if rank != ranks.rank]
    remote_ranks = [rank for rank in range(ranks.size) if rank not in node_ranks]
    empty_s = _measure_exchange(ranks, [*neighbours, *remote_ranks], 1, sizes.rounds)
    overheads = _measure_overheads(ranks, step_s, sizes.rounds)
    costs_per_byte_s = []
    for peers in (neighbours, remote_ranks):
        if not ranks.gather_objects(len(peers))[0]:
            costs_per_byte_s.append(0.0)
            continue
        seconds = _measure_exchange(ranks, peers, _MESSAGE_FLOATS, sizes.rounds)
        sent_nbytes = len(peers) * _MESSAGE_FLOATS * _FLOAT_BYTES
        costs_per_byte_s.append(max(seconds - empty_s, 1e-9) / sent_nbytes)
    return _LinkCosts(*overheads, *costs_per_byte_s)


def _measure_exchange(
    ranks: RankGroup, peers: Sequence[int], num_floats: int, rounds: int
) -> float:
    """Measure the seconds of an all-to-all that sends `num_floats` floats to each of `peers`.

    All ranks call this together. A rank must be a peer of its peers; not checked.
    """
    sizes = [num_floats if rank in peers else 0 for rank in range(ranks.size)]
    is_large = num_floats > 1
    outgoing = cycle(
        torch.ones(sum(sizes), dtype=torch.float32, device=ranks.device)
        for _ in range(_NUM_COLD_BUFFERS if is_large else 1)
    )

    def exchange() -> None:
        # The messages are received into new memory, as in a step.
        start_all_to_all(next(outgoing), sizes, sizes, ranks).wait()

    num_calls, rounds_factor = (1, 2) if is_large else (4, 5)  # small messages vary more
    return _fastest_call_s(ranks, exchange, num_calls, rounds_factor * rounds)
