"""Plans for tables that barely fit into memory, and the error if no plan fits.

`any_plan` searches all placements for one that fits. `cut_to_fit` cuts tables into blocks of rows
that fill the free memory of each rank. Both ignore how long a step takes.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from emblib.sharding.layout import shape_of
from emblib.sharding.planner.enumerate import (
    Domain,
    Option,
    ShardCosts,
    ShardGroup,
    allowed_types,
    build_option,
    min_nbytes,
)
from emblib.sharding.planner.estimate import ShardShape
from emblib.sharding.planner.search import PlacedOption, Plan, Problem, RankCosts, place
from emblib.sharding.planner.topology import MemoryNeed, refuse_old_names
from emblib.sharding.planner.workloads import TableWorkload
from emblib.sharding.sharding_types import Shard, ShardingType
from emblib.specs import Placement
from emblib.storage import Dense, MemoryBytes

_MAX_STEPS = 200_000  # placements that `any_plan` tries, to bound its time; not measured
_MAX_GROUPS = 400  # `any_plan` tries nothing with more: it is meant for a few large tables
_FLOAT_BYTES = 4
_ROW_OVERHEAD_FLOATS = 4  # per received row, for ids, lengths and indices; a guess, rather high


def any_plan(problem: Problem) -> Plan:
    """Search all placements for a plan that fits; return an empty plan if none was found.

    Each table must have an option. The search ends after `_MAX_STEPS` placements, of groups or of
    options without groups; problems of a few tables need fewer. Of interchangeable ranks and nodes
    only one is tried. With more than `_MAX_GROUPS` groups nothing is tried.
    """
    world_size = problem.model.topology.world_size
    num_groups = sum(max(len(option.groups) for option in options) for options in problem.options)
    if num_groups > _MAX_GROUPS:
        return []
    rank_costs = problem.empty_costs()
    options = [_sort_by_bytes(table_options, world_size) for table_options in problem.options]
    # A table counts by its largest shard, in the option where that is smallest. The table with the
    # largest comes first, because the fewest ranks have memory for it.
    order = sorted(
        range(len(options)),
        key=lambda table: (-min(map(_largest_nbytes, options[table])), table),
    )
    # Lower bounds of the bytes of each table, then of each table with all after it, by field.
    table_nbytes = [_min_need(options[table], world_size) for table in order]
    min_remaining_nbytes = [MemoryNeed(0, 0)]
    for need in reversed(table_nbytes):
        min_remaining_nbytes.insert(0, min_remaining_nbytes[0].plus(need))
    search = _Search(rank_costs, [options[table] for table in order], min_remaining_nbytes)
    if not search.place_from(0):
        return []
    placements = dict(zip(order, search.placements, strict=True))
    return [placements[table] for table in sorted(placements)]


def _sort_by_bytes(options: Sequence[Option], world_size: int) -> list[Option]:
    """Return options in the order of penalties, then of bytes on all ranks together."""
    return sorted(options, key=lambda option: (option.penalty, max(option.nbytes(world_size))))


def _min_need(options: Sequence[Option], world_size: int) -> MemoryNeed:
    """Return the fewest bytes on all ranks together that any option needs, in each field."""
    nbytes_by_field = zip(*(option.nbytes(world_size) for option in options), strict=True)
    return MemoryNeed(*map(min, nbytes_by_field))


def _largest_nbytes(option: Option) -> float:
    """Return the bytes of the largest shard, plus the bytes that every rank needs for the table."""
    member_nbytes = [max(load.nbytes) for group in option.groups for load in group.loads]
    return max(member_nbytes, default=0.0) + max(option.common_cost.nbytes)


class _Search:
    """A depth-first search over tables, options, and targets of groups.

    Args:
        rank_costs: costs of an empty plan. A search that finds a plan adds its costs in place.
        options: options of each table.
        min_remaining_nbytes: `min_remaining_nbytes[i]` are lower bounds of the bytes that tables i,
            i + 1, ... need on all ranks together, by field of `MemoryNeed`; zeros at the end.

    Attributes:
        placements: the placements of the tables so far.
        num_steps: placements of groups, and of options without groups, that were tried.
    """

    def __init__(
        self,
        rank_costs: RankCosts,
        options: Sequence[Sequence[Option]],
        min_remaining_nbytes: Sequence[Sequence[float]],
    ) -> None:
        self.rank_costs, self.options = rank_costs, options
        self.min_remaining_nbytes = min_remaining_nbytes
        self.placements: list[PlacedOption] = []
        self.num_steps = 0

    def place_from(self, table: int) -> bool:
        """Place `table` and the following tables; return whether all were placed."""
        if table == len(self.options):
            return True
        if any(
            needed_nbytes > free_nbytes + 1.0  # free bytes are rounded
            for needed_nbytes, free_nbytes in zip(
                self.min_remaining_nbytes[table], self._free_nbytes(), strict=True
            )
        ):
            return False
        for option in self.options[table]:
            if not option.groups and not self._count_step():
                return False
            self.rank_costs.add_common(option)
            if self._place_groups(table, option, []):
                return True
            self.rank_costs.add_common(option, -1)
        return False

    def _place_groups(self, table: int, option: Option, targets: list[int]) -> bool:
        """Place the groups that have no target yet, then the following tables; undo what fails.

        Returns whether all were placed.
        """
        if len(targets) == len(option.groups):
            if not self.rank_costs.all_ranks_fit():
                return False
            self.placements.append(PlacedOption(option, tuple(targets)))
            if self.place_from(table + 1):
                return True
            self.placements.pop()
            return False
        group = option.groups[len(targets)]
        for target in self._targets(group, targets):
            if not self._count_step():
                return False
            self.rank_costs.move(group, target, 1)
            targets.append(target)
            if self._place_groups(table, option, targets):
                return True
            targets.pop()
            self.rank_costs.move(group, target, -1)
        return False

    def _count_step(self) -> bool:
        """Count a placement that is tried; return whether the search may go on."""
        self.num_steps += 1
        return self.num_steps <= _MAX_STEPS

    def _targets(self, group: ShardGroup, used_targets: Sequence[int]) -> Iterator[int]:
        """Yield the unused targets with memory for a group; of interchangeable targets, the first.

        In the domain WORLD memory is not checked here, but by `all_ranks_fit`.
        """
        tried_keys = set()
        for target in range(self.rank_costs.num_targets(group)):
            if target in used_targets:
                continue
            if group.domain is not Domain.WORLD:
                key = self._free_memory_key(group, target)
                if key in tried_keys or not self.rank_costs.fits(group, target):
                    continue
                tried_keys.add(key)
            yield target

    def _free_memory_key(self, group: ShardGroup, target: int) -> tuple[object, ...]:
        """Return a key that is equal for interchangeable targets.

        The key of a node is the free memory of its ranks. The key of a rank is its free memory, and
        the sorted free memory of all ranks of its node.
        """
        rank = self.rank_costs.first_rank(group, target)
        local_size = self.rank_costs.topology.local_world_size
        first_rank = rank // local_size * local_size  # of the node
        node_nbytes = [self._free_nbytes_of(r) for r in range(first_rank, first_rank + local_size)]
        if group.domain is Domain.NODE:
            return tuple(node_nbytes)
        return self._free_nbytes_of(rank), tuple(sorted(node_nbytes))

    def _free_nbytes_of(self, rank: int) -> tuple[float, ...]:
        """Return a rank's free bytes by field of `MemoryNeed`; common costs count as free."""
        free_memory = self.rank_costs.free_memory[rank]
        return tuple(
            round(free_nbytes - used_nbytes[rank])
            for free_nbytes, used_nbytes in zip(free_memory, self.rank_costs.nbytes, strict=True)
        )

    def _free_nbytes(self) -> list[float]:
        """Return the free bytes of all ranks together, by field of `MemoryNeed`."""
        world_size = len(self.rank_costs.totals)
        free_by_pool = zip(*(self._free_nbytes_of(rank) for rank in range(world_size)), strict=True)
        return [
            sum(free_by_rank) - world_size * common_nbytes
            for free_by_rank, common_nbytes in zip(
                free_by_pool, self.rank_costs.common_nbytes, strict=True
            )
        ]


# Row cuts sized by free memory


def cut_to_fit(problem: Problem, workloads: Sequence[TableWorkload]) -> Plan:
    """Cut tables that fit nowhere into unequal blocks of rows; return an empty plan if that fails.

    Each table must have an option. Tables that must not be cut are placed first, then the others;
    the largest comes first among both.
    """
    world_size = problem.model.topology.world_size
    nbytes = [min_nbytes(options, world_size) for options in problem.options]
    order = sorted(
        range(len(nbytes)),
        key=lambda table: (_can_cut(problem, workloads[table]), -nbytes[table], table),
    )
    rank_costs, plan = problem.empty_costs(), dict[int, PlacedOption]()
    for table in order:
        options = _sort_by_bytes(problem.options[table], world_size)
        placements = (place(rank_costs, option) for option in options)
        placement = next((candidate for candidate in placements if candidate is not None), None)
        if placement is None and _can_cut(problem, workloads[table]):
            placement = _cut_into_blocks(rank_costs, workloads[table], problem)
        if placement is None:
            return []
        rank_costs.add(placement)
        plan[table] = placement
    return [plan[table] for table in sorted(plan)]


def _can_cut(problem: Problem, workload: TableWorkload) -> bool:
    """Return whether a table may be cut into blocks of rows of unequal sizes."""
    return not workload.config.storage.is_keyed and ShardingType.CUSTOM in allowed_types(
        workload, problem.model.topology, None
    )


def _cut_into_blocks(
    rank_costs: RankCosts, workload: TableWorkload, problem: Problem
) -> PlacedOption | None:
    """Cut a table into blocks of rows sized by the free memory of each rank.

    The ranks with most free memory are filled first. Returns None if the table does not fit.
    `rank_costs` are the costs of the other tables; they are changed and restored.
    """
    shard_costs, shape = ShardCosts(workload, problem.model, None), shape_of(workload.config)
    free_nbytes = [_free_device_nbytes(rank_costs, rank) for rank in range(len(rank_costs.totals))]
    common_nbytes = _max_common_nbytes(workload, problem)
    shards: list[Shard] = []
    first_row = 0
    for rank in sorted(range(len(free_nbytes)), key=lambda rank: (-free_nbytes[rank], rank)):
        available_nbytes = free_nbytes[rank] - common_nbytes
        num_rows = _rows_that_fit(shard_costs, available_nbytes, shape.rows - first_row)
        if num_rows > 0:
            shards.append(Shard(rank, (first_row, first_row + num_rows), (0, shape.columns)))
            first_row += num_rows
        if first_row == shape.rows:
            option = build_option(shard_costs, ShardingType.CUSTOM, shards, Domain.WORLD, 0)
            return place(rank_costs, option)
    return None


def _free_device_nbytes(rank_costs: RankCosts, rank: int) -> float:
    """Return the free bytes of device memory of a rank, at the larger of its two peaks."""
    # Fields 0 and 1 of `MemoryNeed` are the two peaks.
    used = (rank_costs.nbytes[peak][rank] + rank_costs.common_nbytes[peak] for peak in (0, 1))
    return rank_costs.free_memory[rank][0] - max(used)


def _max_common_nbytes(workload: TableWorkload, problem: Problem) -> float:
    """Return an upper bound of what any cut into at most one block per rank costs every rank.

    These are bytes of device memory for batches and rows in transit, without the blocks themselves.
    """
    world_size = problem.model.topology.world_size
    columns = shape_of(workload.config).columns
    equal_cost = problem.model.common_cost(
        workload, [ShardShape(columns, 1.0 / world_size, False)] * world_size
    )
    # A rank receives at most one row per bag and block, or per id if rows are not pooled.
    num_sent_rows = sum(
        reader.batch_size * max(reader.num_features, reader.ids_per_example)
        for reader in workload.by_reader
    )
    received_nbytes = world_size * num_sent_rows * (columns + _ROW_OVERHEAD_FLOATS) * _FLOAT_BYTES
    return equal_cost.nbytes.device + equal_cost.position_nbytes + received_nbytes


def _rows_that_fit(shard_costs: ShardCosts, available_nbytes: float, max_rows: int) -> int:
    """Return the rows of a block that needs at most `available_nbytes`; 0 if none fits.

    It is a multiple of the table's row unit, or `max_rows`, and about as large as possible.
    """
    shape = shape_of(shard_costs.workload.config)
    row_unit = shape.row_unit

    def nbytes_of(num_rows: int) -> float:
        block = Shard(0, (0, num_rows), (0, shape.columns))
        return shard_costs.load(block, num_rows / shape.rows).nbytes.device

    unit_nbytes, table_nbytes = nbytes_of(min(row_unit, shape.rows)), nbytes_of(shape.rows)
    if available_nbytes < unit_nbytes:
        return 0
    # The bytes are nearly linear in the rows: estimate the rows, then correct them.
    nbytes_per_row = max((table_nbytes - unit_nbytes) / max(shape.rows - row_unit, 1), 1e-9)
    num_more_rows = int((available_nbytes - unit_nbytes) / nbytes_per_row)
    num_rows = min(row_unit + num_more_rows // row_unit * row_unit, max_rows)
    while num_rows > 0 and nbytes_of(num_rows) > available_nbytes:
        num_rows -= num_rows % row_unit or row_unit
    return num_rows


_MAX_NAMES = 5  # tables that a message names


class PlanError(ValueError):
    """No plan fits into the memory.

    Attributes:
        tables: names of the tables that do not fit even alone, the largest first; all tables if
            each fits alone; empty if the reservation takes all memory of a rank.
        missing_nbytes: lower bound of the missing bytes on all ranks together, 0 if unknown. If the
            reservation takes all memory of a rank: the missing bytes of the first such rank.
        remedies: changes that may make the tables fit, one sentence each.
    """

    def __init__(
        self,
        message: str,
        tables: Sequence[str] = (),
        missing_nbytes: int = 0,
        remedies: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.tables, self.remedies = tuple(tables), tuple(remedies)
        self.missing_nbytes = missing_nbytes

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names({"short": "missing_nbytes", "ways": "remedies"})

    def __reduce__(self) -> tuple[object, ...]:
        return PlanError, (str(self), self.tables, self.missing_nbytes, self.remedies)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes in the largest unit that fits, e.g. "1.50 GiB"."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def no_plan_error(problem: Problem, workloads: Sequence[TableWorkload]) -> PlanError:
    """Return the error for a problem without a plan; `workloads` are its tables."""
    world_size = problem.model.topology.world_size
    # Bytes per table on all ranks together, by its smallest option.
    needs = [min_nbytes(options, world_size) for options in problem.options]
    order = sorted(range(len(workloads)), key=lambda table: (-needs[table], table))
    free_memory = [max(0.0, memory.device) for memory in problem.free_memory]
    too_large = [table for table in order if not _fits_alone(problem, table)]
    if too_large:
        missing_memory = max((_missing_alone(problem, table) for table in too_large), key=sum)
        verb = "fits" if len(too_large) == 1 else "fit"
        shortage = (
            f"{_describe_tables(workloads, needs, too_large)} {verb} "
            f"nowhere, even with all memory free; at least {_format_need(missing_memory)} short"
        )
    else:
        shortage, missing_memory = _describe_total_shortage(problem)
    tables_shown = too_large or order
    remedies = _remedies(problem, workloads, tables_shown, missing_memory)
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    low, high = format_bytes(min(free_memory)), format_bytes(max(free_memory))
    free_range = f"{low} to {high}" if max(free_memory) > min(free_memory) else low
    message = (
        f"no plan fits: {shortage}. There are {ranks} with {free_range} each for tables and "
        "batches (after the reservation). "
        f"Largest: {_describe_tables(workloads, needs, order)}. Ways out: {'; '.join(remedies)}"
    )
    names = [workloads[table].name for table in tables_shown]
    return PlanError(message, names, int(sum(missing_memory)), remedies)


def _describe_total_shortage(problem: Problem) -> tuple[str, MemoryBytes]:
    """Return a text and the missing bytes for tables that fit alone, but not together.

    The missing bytes are 0 if all tables together need no more than there is.
    """
    needed_memory = _min_total_nbytes(problem)
    free_memory = MemoryBytes(*(sum(free) for free in zip(*problem.free_memory, strict=True)))
    missing_memory = MemoryBytes(
        *(max(0.0, needed - free) for needed, free in zip(needed_memory, free_memory, strict=True))
    )
    text = f"all tables need {_format_need(needed_memory)} at least"
    if any(missing_memory):
        return f"{text}, {_format_need(missing_memory)} more than there is", missing_memory
    return (
        f"{text}, which is there in all, but no way was found to divide them so that each shard "
        "fits",
        missing_memory,
    )


def _fits_alone(problem: Problem, table: int) -> bool:
    """Return whether a table fits if no other is placed."""
    rank_costs = problem.empty_costs()
    return any(place(rank_costs, option) is not None for option in problem.options[table])


def _min_total_nbytes(problem: Problem) -> MemoryBytes:
    """Return lower bounds of the bytes of all tables on all ranks together."""
    world_size = problem.model.topology.world_size
    total = MemoryNeed(0, 0)
    for options in problem.options:
        total = total.plus(_min_need(options, world_size))
    return MemoryBytes(total.device, total.host, total.disk)


def _missing_alone(problem: Problem, table: int) -> MemoryBytes:
    """Return a lower bound of the bytes that a table lacks on ranks without other tables.

    It is that of the option that lacks least: its largest shards on the ranks with most memory.
    """
    missing_by_option: list[MemoryBytes] = []
    free_by_pool = list(zip(*problem.empty_costs().free_memory, strict=True))
    for option in problem.options[table]:
        needs = [load.nbytes for group in option.groups for load in group.loads]
        missing_by_pool = [0.0] * len(MemoryNeed._fields)
        for pool, (common_nbytes, free_by_rank) in enumerate(
            zip(option.common_cost.nbytes, free_by_pool, strict=True)
        ):
            shards_nbytes = [need[pool] for need in needs]
            shards_nbytes += [0.0] * (len(free_by_rank) - len(shards_nbytes))
            missing_by_pool[pool] = sum(
                max(0.0, shard_nbytes + common_nbytes - free_nbytes)
                for shard_nbytes, free_nbytes in zip(
                    sorted(shards_nbytes, reverse=True),
                    sorted(free_by_rank, reverse=True),
                    strict=False,
                )
            )
        missing_need = MemoryNeed(*missing_by_pool)
        missing_by_option.append(
            MemoryBytes(missing_need.device, missing_need.host, missing_need.disk)
        )
    return min(missing_by_option, key=sum)


def _format_need(nbytes: MemoryBytes) -> str:
    """Format bytes per kind of memory, e.g. "1.50 GiB and 3.00 GiB of disk"."""
    names = ("", " of host memory", " of disk")
    parts = [format_bytes(count) + name for count, name in zip(nbytes, names, strict=True) if count]
    return " and ".join(parts) or format_bytes(0)


def _describe_tables(
    workloads: Sequence[TableWorkload], needs: Sequence[float], tables: Sequence[int]
) -> str:
    """Name the first `_MAX_NAMES` tables and their bytes, for a message.

    `needs` are the bytes of all tables, `tables` the indices of those to name.
    """
    descriptions = ", ".join(
        f"{workloads[table].name} ({format_bytes(needs[table])})" for table in tables[:_MAX_NAMES]
    )
    num_omitted = len(tables) - _MAX_NAMES
    return descriptions + (f" and {num_omitted} more" if num_omitted > 0 else "")


def _remedies(
    problem: Problem,
    workloads: Sequence[TableWorkload],
    tables: Sequence[int],
    missing_memory: MemoryBytes,
) -> list[str]:
    """Return changes that may make the tables fit, one sentence each.

    Args:
        problem: the problem without a plan.
        workloads: tables of the problem.
        tables: indices of the tables that the message is about, the largest first.
        missing_memory: bytes that are missing; 0 if unknown.
    """
    topology = problem.model.topology
    largest = workloads[tables[0]]
    remedies = []
    row_wise = ShardingType.ROW_WISE
    types = largest.constraints.sharding_types
    if types is not None and row_wise not in types and topology.world_size > 1:
        remedies.append(
            f"allow {row_wise.value} for {largest.name}, which cuts it into equal parts"
        )
    max_free = map(max, zip(*problem.free_memory, strict=True))  # by kind of memory
    shortages = [
        (missing, free) for missing, free in zip(missing_memory, max_free, strict=True) if missing
    ]
    if shortages and all(free >= 1 for _, free in shortages):
        num_more = max(-(-int(missing) // int(free)) for missing, free in shortages)
        remedies.append(
            f"use {num_more} more rank{'s' if num_more > 1 else ''} or more, or ranks with more "
            "memory"
        )
    storages = _smaller_storages(largest, topology.device)
    if storages and not largest.constraints.storages:
        remedies.append(
            f"allow another storage, as TableConstraints(storages=({', '.join(storages)},)) for "
            f"{largest.name}"
        )
    if largest.config.data_type.itemsize == 4 and largest.config.storage == Dense():
        remedies.append("keep tables in 16 bits (data_type=torch.bfloat16)")
    if largest.optimizer is not None and any(
        not state.per_row for state in largest.optimizer.states
    ):
        remedies.append("take an optimizer with one number per row, as RowwiseAdagrad")
    remedies.append("make the batch, or the Reservation, smaller")
    return remedies


def _smaller_storages(workload: TableWorkload, device: str) -> list[str]:
    """Return the code of storages that need less device memory than a dense table there."""
    storage, code_lines = workload.config.storage, []
    if not isinstance(storage, Dense):
        return []
    if device == "cuda" and storage.placement is Placement.DEVICE:
        code_lines.append("Dense(Placement.MANAGED_CACHING)")
    if not workload.readers:  # shared tables must be dense
        code_lines.append("TensorTrain(ranks=(16, 16))")
    return code_lines


def check_free_memory(free_memory: Sequence[MemoryBytes], dense_nbytes: int) -> None:
    """Raise PlanError if the reservation leaves no byte of the device memory of a rank.

    `free_memory` is what the reservation leaves, by rank; `dense_nbytes` is for the message.
    """
    for rank, memory in enumerate(free_memory):
        if memory.device < 1:  # a share of the reservation may leave a part of a byte
            missing_nbytes = max(0.0, -memory.device)
            amount = (
                f"{format_bytes(missing_nbytes)} more than there is"
                if missing_nbytes
                else "all there is"
            )
            remedies = (
                "reserve less: Reservation(share=..., nbytes=..., dense_copies=...)",
                "give ranks more memory",
            )
            raise PlanError(
                f"nothing is left for tables on rank {rank}: the reservation, with "
                f"{format_bytes(dense_nbytes)} of dense parameters, takes {amount}. Ways out: "
                f"{'; '.join(remedies)}",
                (),
                int(missing_nbytes),
                remedies,
            )
