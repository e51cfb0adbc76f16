"""Search for a plan: make several starting plans, then improve the best two by local moves.

A starting plan places one table after the other, in most of them where the table lengthens the step
least. A local move moves a table, shards it differently, or swaps it with another, if that shortens
the step. One starting plan places every table whole, if that fits, so the result is predicted to be
no slower than that plan. The search is deterministic.

`RankCosts` has the seconds and bytes of each rank while tables are added and removed, `Problem`
what is searched.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from emblib.sharding.planner.enumerate import Domain, Option, ShardGroup, min_nbytes
from emblib.sharding.planner.estimate import INPUT, OUTPUT, PHASES, CostModel
from emblib.sharding.planner.topology import MemoryNeed
from emblib.sharding.sharding_types import ShardingType
from emblib.storage import MemoryBytes

Targets = tuple[int, ...]


@dataclass(frozen=True)
class PlacedOption:
    """An option of a table, and the rank or node of each of its groups."""

    option: Option
    targets: Targets


class RankCosts:
    """The costs by rank of the tables that are placed so far; tables can be added and removed.

    Seconds are multiples of a grid and bytes are whole numbers (see `estimate`), so that removing a
    table restores the costs exactly.

    Args:
        model: cost model, for the topology and the seconds that do not depend on the batch.
        free_memory: bytes for tables and batches, by rank.
        is_weighted: whether any collection sends weights.

    Attributes:
        seconds: seconds of shards, by phase and rank.
        totals: seconds of shards by rank, all phases together.
        nbytes: bytes of shards, by field of `MemoryNeed` and rank.
        common_seconds: seconds of every rank, by phase.
        common_arrange_s: sum of `CommonCost.arrange_s`.
        common_nbytes: bytes of every rank, by field of `MemoryNeed`.
        uneven_s: sum of `CommonCost.uneven_s`, which counts if any table drops empty bags.
        num_cut_by_rows: tables that are cut by rows.
        num_summed_in_nodes: tables whose rows nodes sum.
        num_without_empty_bags: tables whose empty bags are not sent.
        num_sharded: tables whose ids ranks exchange, see `Option.exchanges_ids`.
        num_replicated: tables without shards.
        penalty: sum of the penalties of the options.
    """

    def __init__(
        self, model: CostModel, free_memory: Sequence[MemoryBytes], *, is_weighted: bool
    ) -> None:
        self.model, self.topology = model, model.topology
        world_size = self.topology.world_size
        # Per rank, one entry per field of `MemoryNeed`: both its peaks are of device memory.
        self.free_memory = [(device, device, host, disk) for device, host, disk in free_memory]
        self._free_by_pool = list(zip(*self.free_memory, strict=True))
        self.seconds = [[0.0] * world_size for _ in PHASES]
        self.totals = [0.0] * world_size
        self.nbytes = [[0.0] * world_size for _ in MemoryNeed._fields]
        self.common_seconds = [0.0] * len(PHASES)
        self.common_arrange_s = self.uneven_s = 0.0
        self.common_nbytes = [0.0] * len(MemoryNeed._fields)
        self.num_cut_by_rows = self.num_summed_in_nodes = self.num_without_empty_bags = 0
        self.num_sharded = self.num_replicated = 0
        self.penalty = 0
        # The sum of `CommonCost.position_nbytes`, and the part of it that is in `common_nbytes`.
        self._position_nbytes = self._counted_nbytes = 0.0
        self._exchanges_s = model.exchanges_s(is_weighted=is_weighted)
        self._sums_s = model.sums_s()

    # Changes

    def first_rank(self, group: ShardGroup, target: int) -> int:
        """Return the rank of a group's first load, if the group is on `target`.

        The target is a rank or a node, by the domain of the group; it is ignored for WORLD.
        """
        if group.domain is Domain.RANK:
            return target
        if group.domain is Domain.NODE:
            return target * self.topology.local_world_size
        return group.first_rank

    def num_targets(self, group: ShardGroup) -> int:
        """Return the number of ranks or nodes that a group can be placed on."""
        if group.domain is Domain.RANK:
            return self.topology.world_size
        return self.topology.num_nodes if group.domain is Domain.NODE else 1

    def move(self, group: ShardGroup, target: int, sign: int) -> None:
        """Add a group to a rank or node (sign 1) or remove it (sign -1)."""
        rank = self.first_rank(group, target)
        combining, updating, host, disk = self.nbytes
        input_s, lookup_s, output_s, update_s = self.seconds
        totals = self.totals
        for phase_seconds, nbytes in group.loads:  # unrolled: the search moves groups often
            in_s, look_s, out_s, up_s = phase_seconds
            input_s[rank] += sign * in_s
            lookup_s[rank] += sign * look_s
            output_s[rank] += sign * out_s
            update_s[rank] += sign * up_s
            totals[rank] += sign * (in_s + look_s + out_s + up_s)
            combining[rank] += sign * nbytes.combining
            updating[rank] += sign * nbytes.updating
            if nbytes.host or nbytes.disk:
                host[rank] += sign * nbytes.host
                disk[rank] += sign * nbytes.disk
            rank += 1

    def add(self, placement: PlacedOption, sign: int = 1) -> None:
        """Add a table (sign 1) or remove it (sign -1)."""
        for group, target in zip(placement.option.groups, placement.targets, strict=True):
            self.move(group, target, sign)
        self.add_common(placement.option, sign)

    def add_common(self, option: Option, sign: int = 1) -> None:
        """Add the costs of an option that every rank has (sign 1) or remove them (sign -1)."""
        common_cost = option.common_cost
        for phase, seconds in enumerate(common_cost.seconds):
            self.common_seconds[phase] += sign * seconds
        self.common_arrange_s += sign * common_cost.arrange_s
        for pool, nbytes in enumerate(common_cost.nbytes):
            self.common_nbytes[pool] += sign * nbytes
        self.num_cut_by_rows += sign * option.cuts_rows
        self.num_summed_in_nodes += sign * option.sums_in_nodes
        self.num_without_empty_bags += sign * common_cost.drops_empty_bags
        self.uneven_s += sign * common_cost.uneven_s
        self._position_nbytes += sign * common_cost.position_nbytes
        # If one table is cut by rows, the positions of ids are stored for all tables, while rows
        # are combined: field 0 of `MemoryNeed`.
        counted_nbytes = self._position_nbytes if self.num_cut_by_rows else 0.0
        self.common_nbytes[0] += counted_nbytes - self._counted_nbytes
        self._counted_nbytes = counted_nbytes
        self.penalty += sign * option.penalty
        self.num_sharded += sign * option.exchanges_ids
        self.num_replicated += sign * (not option.groups)

    # Fit and time

    def fits(self, group: ShardGroup, target: int) -> bool:
        """Return whether the ranks of a target have enough free memory for a group.

        The caller must have added the common costs of the group's option; not checked.
        """
        rank = self.first_rank(group, target)
        for _, nbytes in group.loads:
            free_memory = self.free_memory[rank]
            for pool, needed_nbytes in enumerate(nbytes):
                if (
                    needed_nbytes
                    and self.nbytes[pool][rank] + self.common_nbytes[pool] + needed_nbytes
                    > free_memory[pool]
                ):
                    return False
            rank += 1
        return True

    def all_ranks_fit(self) -> bool:
        """Return whether every rank has memory for its shards and the common costs."""
        return all(
            common + max(map(operator.sub, self.nbytes[pool], self._free_by_pool[pool])) <= 0
            for pool, common in enumerate(self.common_nbytes)
        )

    def phase_s(self, phase: int) -> float:
        """Return the seconds until the slowest rank has finished a phase, e.g. `INPUT`.

        If fewer ranks of a node can compute at a time than the node has, its ranks take turns.
        """
        topology, seconds = self.topology, self.seconds[phase]
        local_size, num_at_once = topology.local_world_size, topology.ranks_at_once
        common_s = self.common_seconds[phase]
        slowest_s = max(seconds)
        if num_at_once == local_size:
            return slowest_s + common_s
        if phase in (INPUT, OUTPUT):
            # Bandwidth was measured while all ranks of a node send; fewer ranks send faster.
            node_means_s = (
                sum(seconds[i : i + local_size]) / local_size
                for i in range(0, len(seconds), local_size)
            )
            return max(
                (slowest_s + common_s) * num_at_once / local_size, max(node_means_s) + common_s
            )
        busiest_node_s = max(
            sum(seconds[i : i + local_size]) for i in range(0, len(seconds), local_size)
        )
        return max(slowest_s + common_s, (busiest_node_s + local_size * common_s) / num_at_once)

    def step_s(self) -> float:
        """Return the predicted seconds of a step."""
        topology = self.topology
        # Ranks that share a core do the work of every rank one after the other.
        ranks_per_core = topology.local_world_size / topology.ranks_at_once
        phases_s = sum(self.phase_s(phase) for phase in range(len(PHASES)))
        return phases_s + self.arrange_s * ranks_per_core + self.overhead_s

    @property
    def arrange_s(self) -> float:
        """Return the seconds in which every rank orders ids and rows, whatever it stores."""
        return self.common_arrange_s + (self.uneven_s if self.num_without_empty_bags else 0.0)

    @property
    def overhead_s(self) -> float:
        """Return the seconds of a step that do not depend on the batch."""
        costs = self.topology.costs
        exchanges_s = self._exchanges_s if self.num_sharded else 0.0
        blocks_s = costs.blocks_s if self.num_cut_by_rows else 0.0
        copies_s = costs.copies_s if self.num_replicated else 0.0
        sums_s = self._sums_s if self.num_summed_in_nodes else 0.0
        return costs.step_s + exchanges_s + blocks_s + copies_s + sums_s

    def imbalance(self) -> float:
        """Return the sum of squares of the ranks' seconds: smaller for a more even distribution.

        The sum is in square seconds: compare it only between plans of the same tables.
        """
        return sum(map(operator.mul, self.totals, self.totals))


# The first two bound the time of the search; their values are guesses, not measured.
_MAX_RANKS_TRIED = 6  # least loaded ranks that are tried for a table
_MAX_TABLES_TRIED = 12  # a slow rank's most costly tables that are tried at a time
_TOLERANCE = 1e-9  # relative difference of seconds or imbalances that counts as none
_PENALTY_NBYTES = 1e15  # bytes counted per penalty, more than any table has


@dataclass
class Problem:
    """The problem that the search solves: tables with their options, and the memory of ranks.

    Attributes:
        model: cost model.
        free_memory: memory of each rank for tables and batches.
        options: options of each table; most functions need at least one per table.
        is_weighted: whether any collection sends weights.
        max_trials: maximum number of placements that local moves try. It bounds the time of the
            search without a clock, so that the same plan is found on any machine.
        num_tried: number of placements that local moves have tried so far.
    """

    model: CostModel
    free_memory: Sequence[MemoryBytes]
    options: Sequence[Sequence[Option]]
    is_weighted: bool = False
    max_trials: int = 60_000
    num_tried: int = field(default=0, init=False)

    def empty_costs(self) -> RankCosts:
        """Return the costs of an empty plan."""
        return RankCosts(self.model, self.free_memory, is_weighted=self.is_weighted)

    def costs_of(self, placements: Iterable[PlacedOption]) -> RankCosts:
        """Return the costs of a plan."""
        rank_costs = self.empty_costs()
        for placement in placements:
            rank_costs.add(placement)
        return rank_costs

    @property
    def is_exhausted(self) -> bool:
        """Return whether local moves have used all trials."""
        return self.num_tried >= self.max_trials


Plan = list[PlacedOption]  # one per table, in the order of `Problem.options`; empty for no plan


class Score(NamedTuple):
    """The order of plans: scores are compared field by field, and less is better.

    Attributes:
        penalty: sum of the penalties of the chosen options.
        step_s: predicted seconds of a step.
        imbalance: sum of squares, see `RankCosts.imbalance`.
    """

    penalty: int
    step_s: float
    imbalance: float


def score(rank_costs: RankCosts) -> Score:
    """Return the score of a plan with these costs."""
    return Score(rank_costs.penalty, rank_costs.step_s(), rank_costs.imbalance())


def _is_better(new: Score, old: Score) -> bool:
    """Return whether a plan is better, apart from relative differences below `_TOLERANCE`."""
    if new.penalty != old.penalty:
        return new.penalty < old.penalty
    if abs(new.step_s - old.step_s) > _TOLERANCE * old.step_s:
        return new.step_s < old.step_s
    return new.imbalance < old.imbalance * (1 - _TOLERANCE)


# Place one table


def place(
    rank_costs: RankCosts, option: Option, order: Sequence[int] | None = None
) -> PlacedOption | None:
    """Find a target for every group of a table: the least loaded ranks or nodes with free memory.

    The groups of a table go to different ranks or nodes. Returns None if a group fits nowhere.

    Args:
        rank_costs: costs of the other tables; changed while the function runs, and restored.
        option: sharding of the table.
        order: targets to try first; None for the least loaded first.
    """
    targets: list[int] = []
    rank_costs.add_common(option)
    moves: list[tuple[ShardGroup, int]] = []
    for group in option.groups:
        target = _find_target(rank_costs, group, targets, order)
        if target is None:
            break
        targets.append(target)
        moves.append((group, target))
        rank_costs.move(group, target, 1)
    is_placed = len(targets) == len(option.groups) and rank_costs.all_ranks_fit()
    for group, target in reversed(moves):
        rank_costs.move(group, target, -1)
    rank_costs.add_common(option, -1)
    return PlacedOption(option, tuple(targets)) if is_placed else None


def _find_target(
    rank_costs: RankCosts,
    group: ShardGroup,
    used_targets: Sequence[int],
    order: Sequence[int] | None,
) -> int | None:
    """Return the first target with memory: in `order`, then by seconds; None if none has.

    Targets in `used_targets` are left out. A group of the domain WORLD gets target 0; its memory is
    not checked.
    """
    if group.domain is Domain.WORLD:
        return 0  # `all_ranks_fit` checks the memory of all ranks at once
    if group.domain is Domain.RANK:
        target_seconds = rank_costs.totals
    else:
        local_size = rank_costs.topology.local_world_size
        target_seconds = [
            max(rank_costs.totals[i : i + local_size])
            for i in range(0, len(rank_costs.totals), local_size)
        ]
    candidates = sorted(range(len(target_seconds)), key=target_seconds.__getitem__)
    if order is not None:
        candidates = [*order, *candidates]
    for target in candidates:
        if target not in used_targets and rank_costs.fits(group, target):
            return target
    return None


# Starting plans


def place_greedily(
    problem: Problem, order: Sequence[int], cost_of: Callable[[RankCosts, Option], float]
) -> Plan:
    """Place tables in the given order, each with the option for which `cost_of` is smallest.

    `cost_of` gets the costs with the placed option, and the option. Returns an empty plan if a
    table fits nowhere.
    """
    rank_costs, plan = problem.empty_costs(), dict[int, PlacedOption]()
    for table in order:
        best: tuple[float, PlacedOption] | None = None
        for option in problem.options[table]:
            placement = place(rank_costs, option)
            if placement is None:
                continue
            rank_costs.add(placement)
            cost = cost_of(rank_costs, option)
            rank_costs.add(placement, -1)
            if best is None or cost < best[0] * (1 - _TOLERANCE):
                best = cost, placement
        if best is None:
            return []
        plan[table] = best[1]
        rank_costs.add(best[1])
    return [plan[table] for table in sorted(plan)]


def place_tables_whole(problem: Problem) -> Plan:
    """Place every table whole, in order of decreasing cost, on the least loaded rank with memory.

    A table gets another option if the whole table fits on no rank, or if the other option has a
    smaller penalty. Returns an empty plan if no option of a table fits.
    """
    world_size = problem.model.topology.world_size
    options_by_table = [
        sorted(
            options,
            key=lambda option: (option.penalty, option.type is not ShardingType.TABLE_WISE),
        )
        for options in problem.options
    ]
    order = sorted(
        range(len(options_by_table)),
        key=lambda table: (-options_by_table[table][0].seconds(world_size), table),
    )
    rank_costs, plan = problem.empty_costs(), dict[int, PlacedOption]()
    for table in order:
        placements = (place(rank_costs, option) for option in options_by_table[table])
        placement = next((candidate for candidate in placements if candidate is not None), None)
        if placement is None:
            return []
        rank_costs.add(placement)
        plan[table] = placement
    return [plan[table] for table in sorted(plan)]


def starting_plans(problem: Problem) -> list[Plan]:
    """Return plans that fit, made greedily in different ways; an empty list if none fits.

    A plan by size alone, which ignores time, is made only if the other ways find no plan.
    """
    options, world_size = problem.options, problem.model.topology.world_size
    tables = range(len(options))
    table_seconds = [
        min(option.seconds(world_size) for option in options[table]) for table in tables
    ]
    table_nbytes = [min_nbytes(options[table], world_size) for table in tables]
    by_cost = sorted(tables, key=lambda table: (-table_seconds[table], table))
    by_nbytes = sorted(tables, key=lambda table: (-table_nbytes[table], table))

    def step_s(rank_costs: RankCosts, option: Option) -> float:
        # The mean decides between placements that do not change the time of the slowest rank. One
        # penalty counts as one second, which is more than most steps take.
        mean_s = (
            sum(rank_costs.totals) / world_size
            + sum(rank_costs.common_seconds)
            + rank_costs.common_arrange_s
        )
        return rank_costs.step_s() + mean_s + option.penalty

    plans = [
        place_tables_whole(problem),
        place_greedily(problem, by_cost, step_s),
        place_greedily(problem, by_nbytes, step_s),
    ]
    if not any(plans):

        def size_on_all_ranks(rank_costs: RankCosts, option: Option) -> float:
            return option.penalty * _PENALTY_NBYTES + max(option.nbytes(world_size))

        plans.append(place_greedily(problem, by_nbytes, size_on_all_ranks))
    return [plan for plan in plans if plan]


# Local moves


def improve(problem: Problem, plan: Plan) -> Plan:
    """Return a plan after moves that improve its score, until none does or no trial is left.

    Counts its trials in `problem.num_tried`; the argument `plan` is not changed.
    """
    plan = list(plan)
    rank_costs = problem.costs_of(plan)
    _choose_each_again(problem, plan, rank_costs, range(len(plan)))
    while not problem.is_exhausted:
        if not (
            _improve_slowest_ranks(problem, plan, rank_costs)
            or _swap_tables(problem, plan, rank_costs)
        ):
            break
    return plan


def _choose_each_again(
    problem: Problem, plan: Plan, rank_costs: RankCosts, tables: Iterable[int]
) -> bool:
    """Choose the best option of each of `tables`, one after the other; return whether any changed.

    Like all local moves, it changes `plan` and `rank_costs` in place and counts its trials.
    """
    is_changed = False
    for table in tables:
        if problem.is_exhausted:
            break
        is_changed |= _choose_again(problem, plan, rank_costs, table)
    return is_changed


def _choose_again(problem: Problem, plan: Plan, rank_costs: RankCosts, table: int) -> bool:
    """Choose the best option of `table`, until no trial is left; return whether it changed.

    All other tables stay as they are.
    """
    old_score, old_placement = score(rank_costs), plan[table]
    rank_costs.add(old_placement, -1)
    best_placement, best_score = old_placement, old_score
    placements = (
        placement
        for option in problem.options[table]
        for placement in _find_placements(rank_costs, option)
    )
    for placement in placements:
        if problem.is_exhausted:
            break
        rank_costs.add(placement)
        problem.num_tried += 1
        new_score = score(rank_costs)
        rank_costs.add(placement, -1)
        if _is_better(new_score, best_score):
            best_placement, best_score = placement, new_score
    rank_costs.add(best_placement)
    plan[table] = best_placement
    return best_placement is not old_placement


def _find_placements(rank_costs: RankCosts, option: Option) -> list[PlacedOption]:
    """Return placements on the ranks that are least loaded in total and in each phase.

    `rank_costs` are the costs of the other tables, restored on return. The list may be empty.
    """
    first_placement = place(rank_costs, option)
    if first_placement is None:
        return []
    placements = {first_placement.targets: first_placement}
    if len(option.groups) == 1 and option.groups[0].domain is Domain.RANK:
        ranks = sorted(range(len(rank_costs.totals)), key=rank_costs.totals.__getitem__)[
            :_MAX_RANKS_TRIED
        ]
        for seconds in rank_costs.seconds:
            ranks.append(min(range(len(seconds)), key=seconds.__getitem__))
        rank_costs.add_common(option)
        for rank in ranks:
            if (rank,) not in placements and rank_costs.fits(option.groups[0], rank):
                placements[rank,] = PlacedOption(option, (rank,))
        rank_costs.add_common(option, -1)
    elif option.groups and option.groups[0].domain is not Domain.WORLD:
        for seconds in rank_costs.seconds:
            order = _targets_by_load(rank_costs, option.groups[0], seconds)
            placement = place(rank_costs, option, order)
            if placement is not None:
                placements.setdefault(placement.targets, placement)
    return list(placements.values())


def _targets_by_load(
    rank_costs: RankCosts, group: ShardGroup, seconds: Sequence[float]
) -> list[int]:
    """Return ranks, or nodes for a group of the domain NODE, in the order of ascending seconds.

    `seconds` are by rank; a node has the seconds of its slowest rank.
    """
    if group.domain is Domain.NODE:
        local_size = rank_costs.topology.local_world_size
        seconds = [max(seconds[i : i + local_size]) for i in range(0, len(seconds), local_size)]
    return sorted(range(len(seconds)), key=seconds.__getitem__)


def _slow_ranks(rank_costs: RankCosts) -> list[int]:
    """Return the slowest rank in total and in each phase."""
    time_kinds = [rank_costs.totals, *rank_costs.seconds]
    return list(
        dict.fromkeys(max(range(len(seconds)), key=seconds.__getitem__) for seconds in time_kinds)
    )


def _seconds_on(rank_costs: RankCosts, placement: PlacedOption, rank: int) -> float:
    """Return the seconds of a table's groups on a rank, without its common cost."""
    seconds = 0.0
    for group, target in zip(placement.option.groups, placement.targets, strict=True):
        load_number = rank - rank_costs.first_rank(group, target)
        if 0 <= load_number < len(group.loads):
            seconds += sum(group.loads[load_number].seconds)
    return seconds


def _tables_by_time(rank_costs: RankCosts, plan: Plan, rank: int) -> list[int]:
    """Return the `_MAX_TABLES_TRIED` tables that cost a rank most time, the slowest first."""
    seconds_by_table = [
        (-_seconds_on(rank_costs, placement, rank), table) for table, placement in enumerate(plan)
    ]
    return [table for seconds, table in sorted(seconds_by_table)[:_MAX_TABLES_TRIED] if seconds < 0]


def _improve_slowest_ranks(problem: Problem, plan: Plan, rank_costs: RankCosts) -> bool:
    """Choose options again for the tables that cost the slowest ranks, or all ranks, most.

    Returns whether any option changed.
    """
    tables: dict[int, None] = {}
    for rank in _slow_ranks(rank_costs):
        tables.update(dict.fromkeys(_tables_by_time(rank_costs, plan, rank)))
    common_costs = [
        (-sum(cost.seconds) - cost.arrange_s, table)
        for table, cost in enumerate(placement.option.common_cost for placement in plan)
    ]
    tables.update(dict.fromkeys(table for _, table in sorted(common_costs)[:_MAX_TABLES_TRIED]))
    return _choose_each_again(problem, plan, rank_costs, tables)


def _swap_tables(problem: Problem, plan: Plan, rank_costs: RankCosts) -> bool:
    """Swap a table of a slow rank with a table of one of the least loaded ranks.

    Only tables that lie on one rank as a whole are swapped. The first swap that improves the score
    is kept; returns whether there was one.
    """
    rank_of_table = {
        t: placement.targets[0]
        for t, placement in enumerate(plan)
        if len(placement.targets) == 1 and placement.option.groups[0].domain is Domain.RANK
    }
    least_loaded_ranks = sorted(range(len(rank_costs.totals)), key=rank_costs.totals.__getitem__)[
        :_MAX_RANKS_TRIED
    ]
    for rank in _slow_ranks(rank_costs):
        slow_tables = [
            t for t in _tables_by_time(rank_costs, plan, rank) if rank_of_table.get(t) == rank
        ]
        other_tables = [
            t
            for t, other_rank in rank_of_table.items()
            if other_rank in least_loaded_ranks and other_rank != rank
        ]
        for slow_table in slow_tables:
            for other_table in other_tables:
                if problem.is_exhausted:
                    return False
                problem.num_tried += 1
                if _try_swap(plan, rank_costs, slow_table, other_table):
                    return True
    return False


def _try_swap(plan: Plan, rank_costs: RankCosts, first_table: int, second_table: int) -> bool:
    """Swap the ranks of two tables if that fits and improves the score; return whether it did."""
    old_score = score(rank_costs)
    first, second = plan[first_table], plan[second_table]
    moves = [
        (placement.option.groups[0], old.targets[0], new.targets[0])
        for placement, old, new in ((first, first, second), (second, second, first))
    ]
    # The common costs of both tables stay added: `RankCosts.fits` needs them.
    for group, old_rank, _ in moves:
        rank_costs.move(group, old_rank, -1)
    fits = True
    for group, _, new_rank in moves:
        fits = fits and rank_costs.fits(group, new_rank)
        rank_costs.move(group, new_rank, 1)
    if fits and _is_better(score(rank_costs), old_score):
        plan[first_table] = PlacedOption(first.option, second.targets)
        plan[second_table] = PlacedOption(second.option, first.targets)
        return True
    for group, old_rank, new_rank in moves:
        rank_costs.move(group, new_rank, -1)
        rank_costs.move(group, old_rank, 1)
    return False


def improve_best(problem: Problem, plans: Sequence[Plan]) -> Plan:
    """Improve the two best of `plans`, and return the best plan.

    Of two plans, the better gets half of `problem.max_trials`, and the other all that are left; a
    single plan gets all. `plans` must not be empty, and each must fit. Counts the trials in
    `problem.num_tried`.
    """
    ranked_plans = sorted(plans, key=lambda plan: score(problem.costs_of(plan)))
    best_two = ranked_plans[:2]
    improved_plans = []
    max_trials = problem.max_trials
    for number, plan in enumerate(best_two, start=1):
        problem.max_trials = max_trials * number // len(best_two)
        improved_plans.append(improve(problem, plan))
    problem.max_trials = max_trials
    return min([*improved_plans, ranked_plans[0]], key=lambda plan: score(problem.costs_of(plan)))
