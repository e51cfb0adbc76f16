"""Search for a plan: several greedy starts, then local moves; deterministic.

Tables are placed in order of decreasing cost, each where it fits and lengthens the step least. From
the better starts, tables of the slowest ranks are moved, sharded differently or swapped as long as
that shortens the step. Greedy table-wise placement is one of the starts, so no plan is worse.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from emblib.sharding.planner.enumerate import Domain, Option, Unit
from emblib.sharding.planner.estimate import INPUT, OUTPUT, PHASES, CostModel
from emblib.sharding.planner.topology import MemoryNeed
from emblib.sharding.sharding_types import ShardingType
from emblib.storage import MemoryBytes

Targets = tuple[int, ...]


@dataclass(frozen=True)
class PlacedOption:
    """An option of a table, and the rank or node of each of its units."""

    option: Option
    targets: Targets


class RankCosts:
    """The costs by rank of the choices so far; choices can be added and removed.

    Args:
        model: cost model of everything that does not depend on the batch.
        free_memory: bytes for tables and batches, by rank.
        weighted: whether any collection sends weights.

    Attributes:
        seconds: seconds of shards, by phase and rank.
        totals: seconds of shards by rank, all phases together.
        nbytes: bytes of shards, by field of `MemoryNeed` and rank.
        common_seconds: seconds of every rank, by phase.
        arrange: seconds of every rank outside the phases, see `CommonCost`.
        common: bytes of every rank, by field of `MemoryNeed`.
        num_row_cuts, num_node_sums, num_packing: tables that are cut by rows, whose nodes sum rows,
            and whose empty bags are not sent.
        uneven: sum of `CommonCost.uneven`.
        penalty: sum of the options' penalties.
        num_sharded, num_replicated: tables that are exchanged, and tables without shards.
    """

    def __init__(
        self, model: CostModel, free_memory: Sequence[MemoryBytes], *, weighted: bool
    ) -> None:
        self.model, self.topology = model, model.topology
        world = self.topology.world_size
        self.free_memory = [(device, device, host, disk) for device, host, disk in free_memory]
        self._free_columns = list(zip(*self.free_memory, strict=True))
        self.seconds = [[0.0] * world for _ in PHASES]
        self.totals = [0.0] * world
        self.nbytes = [[0.0] * world for _ in MemoryNeed._fields]
        self.common_seconds = [0.0] * len(PHASES)
        self.arrange = 0.0
        self.common = [0.0] * len(MemoryNeed._fields)
        self.num_row_cuts = self.num_node_sums = self.num_packing = 0
        self.uneven = 0.0
        # Bytes of positions of ids, and how many of these are in `common`.
        self._positions = self._counted = 0.0
        self.penalty = 0
        self.num_sharded = 0
        self.num_replicated = 0
        self._exchanges_s, self._sums_s = model.exchanges_s(weighted=weighted), model.sums_s()

    # Changes

    def first_rank(self, unit: Unit, target: int) -> int:
        """Return the rank of a unit's first member."""
        if unit.domain is Domain.RANK:
            return target
        return target * self.topology.local_world_size if unit.domain is Domain.NODE else unit.first

    def num_targets(self, unit: Unit) -> int:
        """Return the number of ranks or nodes that a unit can be placed on."""
        if unit.domain is Domain.RANK:
            return self.topology.world_size
        return self.topology.num_nodes if unit.domain is Domain.NODE else 1

    def move(self, unit: Unit, target: int, sign: int) -> None:
        """Add a unit to a rank or node (sign 1) or remove it (sign -1)."""
        rank = self.first_rank(unit, target)
        combining, updating, host, disk = self.nbytes
        input_s, lookup_s, output_s, update_s = self.seconds
        totals = self.totals
        for phase_seconds, nbytes in unit.members:  # unrolled: the search moves units often
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

    def add(self, choice: PlacedOption, sign: int = 1) -> None:
        """Add a table (sign 1) or remove it (sign -1)."""
        for unit, target in zip(choice.option.units, choice.targets, strict=True):
            self.move(unit, target, sign)
        self.add_common(choice.option, sign)

    def add_common(self, option: Option, sign: int = 1) -> None:
        """Add the costs of an option that every rank has."""
        common_cost = option.common_cost
        for phase, seconds in enumerate(common_cost.seconds):
            self.common_seconds[phase] += sign * seconds
        self.arrange += sign * common_cost.arrange
        for pool, nbytes in enumerate(common_cost.nbytes):
            self.common[pool] += sign * nbytes
        self.num_row_cuts += sign * option.cuts_rows
        self.num_node_sums += sign * option.sums_in_nodes
        self.num_packing += sign * common_cost.packs
        self.uneven += sign * common_cost.uneven
        self._positions += sign * common_cost.positions
        # If one table is cut by rows, the positions of ids are stored for all tables.
        counted = self._positions if self.num_row_cuts else 0.0
        self.common[0] += counted - self._counted
        self._counted = counted
        self.penalty += sign * option.penalty
        self.num_sharded += sign * option.is_sharded
        self.num_replicated += sign * (not option.units)

    # Questions

    def fits(self, unit: Unit, target: int) -> bool:
        """Return whether the ranks of a target have enough free memory for a unit."""
        rank = self.first_rank(unit, target)
        for _, nbytes in unit.members:
            free_memory = self.free_memory[rank]
            for pool, needed_nbytes in enumerate(nbytes):
                if (
                    needed_nbytes
                    and self.nbytes[pool][rank] + self.common[pool] + needed_nbytes
                    > free_memory[pool]
                ):
                    return False
            rank += 1
        return True

    def common_fits(self) -> bool:
        """Return whether the replicated memory fits on each rank."""
        return all(
            common + max(map(operator.sub, self.nbytes[pool], self._free_columns[pool])) <= 0
            for pool, common in enumerate(self.common)
            if common
        )

    def phase(self, number: int) -> float:
        """Return the seconds until the slowest rank has finished a phase."""
        topology, seconds = self.topology, self.seconds[number]
        local, computing = topology.local_world_size, topology.ranks_at_once
        common = self.common_seconds[number]
        slowest = max(seconds)
        if computing == local:
            return slowest + common
        if number in (INPUT, OUTPUT):
            # Bandwidth was measured while all ranks of a node send; fewer ranks send faster.
            means = (sum(seconds[n : n + local]) / local for n in range(0, len(seconds), local))
            return max((slowest + common) * computing / local, max(means) + common)
        busiest = max(sum(seconds[n : n + local]) for n in range(0, len(seconds), local))
        return max(slowest + common, (busiest + local * common) / computing)

    def step_s(self) -> float:
        """Return the predicted seconds of a step."""
        topology = self.topology
        # Ranks that share a core do the work of every rank one after the other.
        ranks_per_core = topology.local_world_size / topology.ranks_at_once
        phases = sum(self.phase(n) for n in range(len(PHASES)))
        return phases + self.arrange_s * ranks_per_core + self.overhead_s

    @property
    def arrange_s(self) -> float:
        """Return the seconds in which every rank orders ids and rows, whatever it stores."""
        return self.arrange + (self.uneven if self.num_packing else 0.0)

    @property
    def overhead_s(self) -> float:
        """Return the seconds that do not depend on the batch."""
        costs = self.topology.costs
        exchanges = self._exchanges_s if self.num_sharded else 0.0
        blocks = costs.blocks_s if self.num_row_cuts else 0.0
        copies = costs.copies_s if self.num_replicated else 0.0
        sums = self._sums_s if self.num_node_sums else 0.0
        return costs.step_s + exchanges + blocks + copies + sums

    def spread(self) -> float:
        """Return the sum of squares of the ranks' seconds; of equal sums the most even is least."""
        return sum(map(operator.mul, self.totals, self.totals))


_NEAREST = 6  # number of least loaded ranks that are tried for a table
_HEAVIEST = 12  # number of a slow rank's tables that are tried at a time
_TOLERANCE = 1e-9  # relative; smaller differences of seconds are none
_PENALTY_NBYTES = 1e15  # counted per penalty, more than any table has


@dataclass
class Problem:
    """Tables with their options, and the free memory by rank.

    Attributes:
        model: cost model.
        free_memory: memory of each rank for tables and batches.
        options: options of each table.
        weighted: whether ids have weights.
        max_trials: maximum number of placements that are tried, so that the search takes bounded
            time and finds the same plan on any machine.
        tried: number of placements so far.
    """

    model: CostModel
    free_memory: Sequence[MemoryBytes]
    options: Sequence[Sequence[Option]]
    weighted: bool = False
    max_trials: int = 60_000
    tried: int = field(default=0, init=False)

    def loads(self) -> RankCosts:
        """Return the costs of an empty plan."""
        return RankCosts(self.model, self.free_memory, weighted=self.weighted)

    def loads_of(self, choices: Iterable[PlacedOption]) -> RankCosts:
        """Return the costs of a plan."""
        loads = self.loads()
        for choice in choices:
            loads.add(choice)
        return loads

    @property
    def exhausted(self) -> bool:
        """Return whether the search has used all its trials."""
        return self.tried >= self.max_trials


Plan = list[PlacedOption]


class Score(NamedTuple):
    """Rank of a plan: scores are compared field by field, and less is better.

    Attributes:
        penalty: sum of the penalties of the chosen options.
        step_s: predicted seconds of a step.
        spread: imbalance, see `RankCosts.spread`.
    """

    penalty: int
    step_s: float
    spread: float


def score(loads: RankCosts) -> Score:
    """Return the score of a plan with these costs."""
    return Score(loads.penalty, loads.step_s(), loads.spread())


def _is_better(new: Score, old: Score) -> bool:
    """Return whether a plan is better by more than noise in seconds and imbalance."""
    if new.penalty != old.penalty:
        return new.penalty < old.penalty
    if abs(new.step_s - old.step_s) > _TOLERANCE * old.step_s:
        return new.step_s < old.step_s
    return new.spread < old.spread * (1 - _TOLERANCE)


# Where one table goes


def place(
    loads: RankCosts, option: Option, order: Sequence[int] | None = None
) -> PlacedOption | None:
    """Place every unit on the least loaded rank or node with memory; None if there is none.

    `order`: targets to try before the least loaded ones. `loads` is left unchanged.
    """
    targets: list[int] = []
    loads.add_common(option)
    placed: list[tuple[Unit, int]] = []
    for unit in option.units:
        target = _target(loads, unit, targets, order)
        if target is None:
            break
        targets.append(target)
        placed.append((unit, target))
        loads.move(unit, target, 1)
    is_placed = len(targets) == len(option.units) and loads.common_fits()
    for unit, target in reversed(placed):
        loads.move(unit, target, -1)
    loads.add_common(option, -1)
    return PlacedOption(option, tuple(targets)) if is_placed else None


def _target(
    loads: RankCosts, unit: Unit, used_targets: Sequence[int], order: Sequence[int] | None
) -> int | None:
    """Return the first rank or node of `order` with memory, then by time; None if none has."""
    if unit.domain is Domain.WORLD:
        return 0  # `common_fits` checks the memory of all ranks at once
    if unit.domain is Domain.RANK:
        rank_seconds = loads.totals
    else:
        local = loads.topology.local_world_size
        rank_seconds = [
            max(loads.totals[n : n + local]) for n in range(0, len(loads.totals), local)
        ]
    candidates = sorted(range(len(rank_seconds)), key=rank_seconds.__getitem__)
    if order is not None:
        candidates = [*order, *candidates]
    for target in candidates:
        if target not in used_targets and loads.fits(unit, target):
            return target
    return None


# Starts


def greedy(
    problem: Problem, order: Sequence[int], key: Callable[[RankCosts, Option], float]
) -> Plan:
    """Place tables in this order, each by the option with the smallest `key` after placement.

    Stops early, with fewer choices than tables, if a table fits nowhere.
    """
    loads, plan = problem.loads(), dict[int, PlacedOption]()
    for table in order:
        best: tuple[float, PlacedOption] | None = None
        for option in problem.options[table]:
            choice = place(loads, option)
            if choice is None:
                continue
            loads.add(choice)
            value = key(loads, option)
            loads.add(choice, -1)
            if best is None or value < best[0] * (1 - _TOLERANCE):
                best = value, choice
        if best is None:
            break
        plan[table] = best[1]
        loads.add(best[1])
    return [plan[table] for table in sorted(plan)] if len(plan) == len(problem.options) else []


def table_wise(problem: Problem) -> Plan:
    """Place every table whole, in order of decreasing cost, on the least loaded rank with memory.

    A table that fits on no rank takes its first option that fits; empty if there is none.
    """
    world = problem.model.topology.world_size
    ranked = [
        sorted(options, key=lambda o: (o.penalty, o.type is not ShardingType.TABLE_WISE))
        for options in problem.options
    ]
    order = sorted(range(len(ranked)), key=lambda table: (-ranked[table][0].seconds(world), table))
    loads, plan = problem.loads(), dict[int, PlacedOption]()
    for table in order:
        placements = (place(loads, option) for option in ranked[table])
        choice = next((c for c in placements if c is not None), None)
        if choice is None:
            return []
        loads.add(choice)
        plan[table] = choice
    return [plan[table] for table in sorted(plan)]


def starts(problem: Problem) -> list[Plan]:
    """Return greedy plans that fit, by different orders and rules."""
    options, world = problem.options, problem.model.topology.world_size
    tables = range(len(options))
    cost = {t: min(option.seconds(world) for option in options[t]) for t in tables}
    size = {t: min(max(option.nbytes(world)) for option in options[t]) for t in tables}
    by_cost = sorted(tables, key=lambda t: (-cost[t], t))
    by_size = sorted(tables, key=lambda t: (-size[t], t))

    def step(loads: RankCosts, option: Option) -> float:
        # The mean decides between choices that do not change the time of the slowest rank.
        mean = sum(loads.totals) / world + sum(loads.common_seconds) + loads.arrange
        return loads.step_s() + mean + option.penalty

    plans = [
        table_wise(problem),
        greedy(problem, by_cost, step),
        greedy(problem, by_size, step),
    ]
    if not any(plans):

        def size_on_all_ranks(loads: RankCosts, option: Option) -> float:
            return option.penalty * _PENALTY_NBYTES + max(option.nbytes(world))

        plans.append(greedy(problem, by_size, size_on_all_ranks))
    return [plan for plan in plans if plan]


# Local moves


def improve(problem: Problem, plan: Plan) -> Plan:
    """Apply moves that shorten the step until none does or the trials are used up."""
    plan = list(plan)
    loads = problem.loads_of(plan)
    _sweep(problem, plan, loads, range(len(plan)))
    while not problem.exhausted:
        if not (_improve_slowest_ranks(problem, plan, loads) or _swap(problem, plan, loads)):
            break
    return plan


def _sweep(problem: Problem, plan: Plan, loads: RankCosts, tables: Iterable[int]) -> bool:
    """Choose the best option per table with all others fixed; return whether any changed."""
    moved = False
    for t in tables:
        if problem.exhausted:
            break
        moved |= _choose_again(problem, plan, loads, t)
    return moved


def _choose_again(problem: Problem, plan: Plan, loads: RankCosts, table: int) -> bool:
    """Choose the best option of `table`, all others unchanged; return whether it changed."""
    old_score, old_placement = score(loads), plan[table]
    loads.add(old_placement, -1)
    best, best_score = old_placement, old_score
    for option in problem.options[table]:
        for choice in _placings(loads, option):
            loads.add(choice)
            problem.tried += 1
            new_score = score(loads)
            loads.add(choice, -1)
            if _is_better(new_score, best_score):
                best, best_score = choice, new_score
    loads.add(best)
    plan[table] = best
    return best is not old_placement


def _placings(loads: RankCosts, option: Option) -> list[PlacedOption]:
    """Return placements on the ranks that are least loaded in total and in each phase."""
    first_placement = place(loads, option)
    if first_placement is None:
        return []
    placings = {first_placement.targets: first_placement}
    if len(option.units) == 1 and option.units[0].domain is Domain.RANK:
        ranks = sorted(range(len(loads.totals)), key=loads.totals.__getitem__)[:_NEAREST]
        for seconds in loads.seconds:
            ranks.append(min(range(len(seconds)), key=seconds.__getitem__))
        for rank in ranks:
            if (rank,) not in placings and loads.fits(option.units[0], rank):
                placings[rank,] = PlacedOption(option, (rank,))
    elif option.units and option.units[0].domain is not Domain.WORLD:
        for seconds in loads.seconds:
            order = _by_load(loads, option.units[0], seconds)
            choice = place(loads, option, order)
            if choice is not None:
                placings.setdefault(choice.targets, choice)
    return list(placings.values())


def _by_load(loads: RankCosts, unit: Unit, seconds: Sequence[float]) -> list[int]:
    """Return ranks or nodes, as the unit needs, in the order of ascending seconds."""
    if unit.domain is Domain.NODE:
        local = loads.topology.local_world_size
        seconds = [max(seconds[n : n + local]) for n in range(0, len(seconds), local)]
    return sorted(range(len(seconds)), key=seconds.__getitem__)


def _slow_ranks(loads: RankCosts) -> list[int]:
    """Return the slowest rank in total and in each phase."""
    series = [loads.totals, *loads.seconds]
    return list(dict.fromkeys(max(range(len(s)), key=s.__getitem__) for s in series))


def _seconds_on(loads: RankCosts, choice: PlacedOption, rank: int) -> float:
    """Return the seconds that a table costs on a rank."""
    total = 0.0
    for unit, target in zip(choice.option.units, choice.targets, strict=True):
        member = rank - loads.first_rank(unit, target)
        if 0 <= member < len(unit.members):
            total += sum(unit.members[member].seconds)
    return total


def _tables_by_time(loads: RankCosts, plan: Plan, rank: int) -> list[int]:
    """Return the tables on a rank in order of decreasing time."""
    seconds_by_table = [(-_seconds_on(loads, choice, rank), t) for t, choice in enumerate(plan)]
    return [t for seconds, t in sorted(seconds_by_table)[:_HEAVIEST] if seconds < 0]


def _improve_slowest_ranks(problem: Problem, plan: Plan, loads: RankCosts) -> bool:
    """Choose again for tables of the slowest ranks, and for those most costly to all ranks."""
    tables: dict[int, None] = {}
    for rank in _slow_ranks(loads):
        tables.update(dict.fromkeys(_tables_by_time(loads, plan, rank)))
    common = [
        (-sum(c.option.common_cost.seconds) - c.option.common_cost.arrange, t)
        for t, c in enumerate(plan)
    ]
    tables.update(dict.fromkeys(t for _, t in sorted(common)[:_HEAVIEST]))
    return _sweep(problem, plan, loads, tables)


def _swap(problem: Problem, plan: Plan, loads: RankCosts) -> bool:
    """Swap a table of a slow rank with one of another rank."""
    single = {
        t: c.targets[0]
        for t, c in enumerate(plan)
        if len(c.targets) == 1 and c.option.units[0].domain is Domain.RANK
    }
    least_loaded = sorted(range(len(loads.totals)), key=loads.totals.__getitem__)[:_NEAREST]
    for rank in _slow_ranks(loads):
        slow_tables = [t for t in _tables_by_time(loads, plan, rank) if single.get(t) == rank]
        other_tables = [
            t for t, placed_on in single.items() if placed_on in least_loaded and placed_on != rank
        ]
        for slow_table in slow_tables:
            for other_table in other_tables:
                if problem.exhausted:
                    return False
                problem.tried += 1
                if _try_swap(plan, loads, slow_table, other_table):
                    return True
    return False


def _try_swap(plan: Plan, loads: RankCosts, first_table: int, second_table: int) -> bool:
    """Swap the ranks of two tables if that shortens the step; return whether it did."""
    old_score = score(loads)
    old_placements = plan[first_table], plan[second_table]
    new_placements = (
        PlacedOption(old_placements[0].option, old_placements[1].targets),
        PlacedOption(old_placements[1].option, old_placements[0].targets),
    )
    for choice in old_placements:
        loads.add(choice, -1)
    if loads.fits(new_placements[0].option.units[0], new_placements[0].targets[0]):
        loads.add(new_placements[0])
        if loads.fits(new_placements[1].option.units[0], new_placements[1].targets[0]):
            loads.add(new_placements[1])
            if _is_better(score(loads), old_score):
                plan[first_table], plan[second_table] = new_placements
                return True
            loads.add(new_placements[1], -1)
        loads.add(new_placements[0], -1)
    for choice in old_placements:
        loads.add(choice)
    return False


def best_of(problem: Problem, plans: Sequence[Plan]) -> Plan:
    """Improve the better starts and return the best plan."""
    ranked = sorted(plans, key=lambda plan: score(problem.loads_of(plan)))
    best_two = ranked[:2]
    improved = []
    max_trials = problem.max_trials
    for number, plan in enumerate(best_two, start=1):
        problem.max_trials = max_trials * number // len(best_two)
        improved.append(improve(problem, plan))
    problem.max_trials = max_trials
    return min([*improved, ranked[0]], key=lambda plan: score(problem.loads_of(plan)))
