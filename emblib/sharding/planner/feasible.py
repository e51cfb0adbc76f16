"""Plans for tables that hardly fit: a search for any plan at all, and cuts that follow the room."""

from collections.abc import Iterator, Sequence

from emblib.sharding.layout import shape_of
from emblib.sharding.planner.enumerate import Domain, Option, Parts, Unit, allowed_types, option_of
from emblib.sharding.planner.search import Choice, Loads, Plan, Problem, place
from emblib.sharding.planner.topology import Need
from emblib.sharding.planner.work import Work
from emblib.sharding.sharding_types import Shard, ShardingType
from emblib.storage import Dense, MemoryBytes

_STEPS = 200_000  # placements that the search for any plan tries
_DEEPEST = 400  # pieces; above it there is no such search, which is for few large tables


def any_plan(problem: Problem) -> Plan:
    """A plan that fits, by trying all placements; empty if there is none, or none was found.

    Complete as long as it ends within its bound, which problems of a few tables do. Ranks that have
    the same room are tried once.
    """
    world = problem.model.topology.world_size
    pieces = sum(max(len(o.units) for o in options) for options in problem.options)
    if pieces > _DEEPEST:
        return []
    loads = problem.loads()
    options = [
        sorted(given, key=lambda o: (o.penalty, max(o.nbytes(world)))) for given in problem.options
    ]
    # The tables with the largest smallest piece first: they have the fewest places.
    order = sorted(range(len(options)), key=lambda t: (-min(map(_largest, options[t])), t))
    least = [
        [min(column) for column in zip(*(o.nbytes(world) for o in options[t]), strict=True)]
        for t in order
    ]
    remaining = [
        [sum(row[pool] for row in least[i:]) for pool in range(len(Need._fields))]
        for i in range(len(least) + 1)
    ]
    search = _Search(loads, [options[t] for t in order], remaining)
    if not search.table(0):
        return []
    chosen = dict(zip(order, search.found, strict=True))
    return [chosen[t] for t in sorted(chosen)]


def _largest(option: Option) -> float:
    loads = [max(load.nbytes) for unit in option.units for load in unit.members]
    return max(loads, default=0.0) + max(option.everywhere.nbytes)


class _Search:
    """Depth first over tables, options, and targets of units."""

    def __init__(
        self,
        loads: Loads,
        options: Sequence[Sequence[Option]],
        remaining: Sequence[Sequence[float]],
    ) -> None:
        self.loads, self.options, self.remaining = loads, options, remaining
        self.found: list[Choice] = []
        self.steps = 0

    def table(self, number: int) -> bool:
        """Place the tables from this one on; whether all are."""
        if number == len(self.options):
            return True
        if any(
            need > free + 1.0
            for need, free in zip(self.remaining[number], self._free(), strict=True)
        ):
            return False
        for option in self.options[number]:
            self.loads.add_common(option)
            if self._units(number, option, []):
                return True
            self.loads.add_common(option, -1)
        return False

    def _units(self, number: int, option: Option, targets: list[int]) -> bool:
        if len(targets) == len(option.units):
            if not self.loads.common_fits():
                return False
            self.found.append(Choice(option, tuple(targets)))
            if self.table(number + 1):
                return True
            self.found.pop()
            return False
        unit = option.units[len(targets)]
        for target in self._targets(unit, targets):
            self.steps += 1
            if self.steps > _STEPS:
                return False
            self.loads.move(unit, target, 1)
            targets.append(target)
            if self._units(number, option, targets):
                return True
            targets.pop()
            self.loads.move(unit, target, -1)
        return False

    def _targets(self, unit: Unit, taken: Sequence[int]) -> Iterator[int]:
        seen = set()
        for target in range(self.loads.num_targets(unit)):
            if target in taken:
                continue
            if unit.domain is not Domain.WORLD:
                alike = self._room_of(unit, target)
                if alike in seen or not self.loads.fits(unit, target):
                    continue
                seen.add(alike)
            yield target

    def _room_of(self, unit: Unit, target: int) -> tuple[object, ...]:
        """What makes two targets the same: the room of each rank of a node; of a rank its own, and
        that of the others of its node, whichever has it.
        """
        local, rank = self.loads.topology.local_world_size, self.loads.first_rank(unit, target)
        node = rank // local * local
        ranks = [self._free_of(r) for r in range(node, node + local)]
        if unit.domain is Domain.NODE:
            return tuple(ranks)
        return self._free_of(rank), tuple(sorted(ranks))

    def _free_of(self, rank: int) -> tuple[float, ...]:
        room = self.loads.room[rank]
        return tuple(
            round(r - taken[rank]) for r, taken in zip(room, self.loads.nbytes, strict=True)
        )

    def _free(self) -> list[float]:
        """Bytes that are left on all ranks together."""
        world = len(self.loads.totals)
        free = zip(*(self._free_of(rank) for rank in range(world)), strict=True)
        return [
            sum(own) - world * common for own, common in zip(free, self.loads.common, strict=True)
        ]


# Cuts that follow the room


def cut_to_fit(problem: Problem, works: Sequence[Work]) -> Plan:
    """A plan in which tables that fit nowhere are cut into unequal blocks of rows; empty if none.

    Tables that may not be cut go first, then the others, the largest first.
    """
    world = problem.model.topology.world_size
    size = {t: min(max(o.nbytes(world)) for o in opts) for t, opts in enumerate(problem.options)}
    order = sorted(size, key=lambda t: (_can_cut(problem, works[t]), -size[t], t))
    loads, plan = problem.loads(), dict[int, Choice]()
    for t in order:
        by_bytes = sorted(problem.options[t], key=lambda o: (o.penalty, max(o.nbytes(world))))
        placed = (place(loads, option) for option in by_bytes)
        choice = next((c for c in placed if c is not None), None)
        if choice is None and _can_cut(problem, works[t]):
            choice = _cut(loads, works[t], problem)
        if choice is None:
            return []
        loads.add(choice)
        plan[t] = choice
    return [plan[t] for t in sorted(plan)]


def _can_cut(problem: Problem, work: Work) -> bool:
    return not work.config.storage.is_keyed and ShardingType.CUSTOM in allowed_types(
        work, problem.model.topology, None
    )


def _cut(loads: Loads, work: Work, problem: Problem) -> Choice | None:
    """Blocks of rows as long as each rank has room for, the roomiest ranks first."""
    parts, shape = Parts(work, problem.model, None), shape_of(work.config)
    world, unit = problem.model.topology.world_size, shape.row_unit

    def box(rank: int, begin: int, rows: int) -> Shard:
        return Shard(rank, (begin, begin + rows), (0, shape.columns))

    def nbytes(rows: int) -> float:
        return parts.load(box(0, 0, rows), rows / shape.rows).nbytes.device

    def free(rank: int) -> float:
        taken = (loads.nbytes[pool][rank] + loads.common[pool] for pool in (0, 1))
        return loads.room[rank][0] - max(taken)

    # What every rank holds for a table in so many pieces, before any row: a row of each piece for
    # every bag at most.
    equal = problem.model.everywhere(work, [(shape.columns, 1.0 / world)] * world)
    pieces = world * work.batch * max(work.num_features, work.ids) * (shape.columns + 4) * 4
    common = equal.nbytes.device + equal.positions + pieces
    first, all_rows = nbytes(min(unit, shape.rows)), nbytes(shape.rows)
    slope = max((all_rows - first) / max(shape.rows - unit, 1), 1e-9)
    boxes: list[Shard] = []
    begin = 0
    for rank in sorted(range(world), key=lambda r: (-free(r), r)):
        room = free(rank) - common
        rows = unit + int((room - first) / slope) // unit * unit if room >= first else 0
        rows = min(rows, shape.rows - begin)
        while rows > 0 and nbytes(rows) > room:
            rows -= unit if rows % unit == 0 else rows % unit
        if rows > 0:
            boxes.append(box(rank, begin, rows))
            begin += rows
        if begin == shape.rows:
            break
    if begin < shape.rows:
        return None
    option = option_of(parts, ShardingType.CUSTOM, boxes, Domain.WORLD, 0)
    return place(loads, option)


_MOST_NAMES = 5


class PlanError(ValueError):
    """No plan fits.

    Attributes:
        tables: those that fit nowhere even alone, else all, the largest first.
        short: bytes that are missing at least, on all ranks together.
        ways: what would make it fit, one sentence each.
    """

    def __init__(
        self, message: str, tables: Sequence[str] = (), short: int = 0, ways: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.tables, self.short, self.ways = tuple(tables), short, tuple(ways)

    def __reduce__(self) -> tuple[object, ...]:
        return PlanError, (str(self), self.tables, self.short, self.ways)


def size(nbytes: float) -> str:
    """`1.50 GiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def no_plan(problem: Problem, works: Sequence[Work]) -> PlanError:
    """The error for a problem that no plan was found for."""
    world = problem.model.topology.world_size
    needs = [min(max(o.nbytes(world)) for o in options) for options in problem.options]
    order = sorted(range(len(works)), key=lambda t: (-needs[t], t))
    room = [max(0.0, pool.device) for pool in problem.room]
    alone = [t for t in order if not _fits_alone(problem, t)]
    have, need = sum(room), sum(needs)
    if alone:
        short = max(_short_alone(problem, t) for t in alone)
        what = (
            f"{_names(works, needs, alone)} {'fits' if len(alone) == 1 else 'fit'} nowhere, even "
            f"with all memory free; at least {size(short)} short"
        )
    elif need > have:
        short = need - have
        what = f"all tables need {size(need)} at least, {size(short)} more than there is"
    else:
        short = 0.0
        what = (
            f"all tables need {size(need)} at least, which is there in all, but no way was found "
            "to divide them so that each piece has room"
        )
    chosen = alone or order
    ways = _ways(problem, works, chosen, short, max(room))
    ranks = f"{world} ranks" if world > 1 else "1 rank"
    message = (
        f"no plan fits: {what}. There are {ranks} with {size(min(room))}"
        f"{f' to {size(max(room))}' if max(room) > min(room) else ''} each for tables and batches "
        f"(after the reservation). Largest: {_names(works, needs, order)}. Ways out: "
        + "; ".join(ways)
    )
    return PlanError(message, [works[t].name for t in chosen], int(short), ways)


def _fits_alone(problem: Problem, t: int) -> bool:
    loads = problem.loads()
    return any(place(loads, option) is not None for option in problem.options[t])


def _short_alone(problem: Problem, t: int) -> float:
    """Bytes that the best option of a table exceeds the roomiest ranks by."""
    best: list[float] = []
    roomiest = sorted((pool.device for pool in problem.room), reverse=True)
    for option in problem.options[t]:
        common = option.everywhere.nbytes.device
        pieces = [m.nbytes.device for unit in option.units for m in unit.members] or [0.0]
        pieces += [0.0] * (len(roomiest) - len(pieces))
        over = zip(sorted(pieces, reverse=True), roomiest, strict=False)
        best.append(sum(max(0.0, need + common - room) for need, room in over))
    return min(best)


def _names(works: Sequence[Work], needs: Sequence[float], tables: Sequence[int]) -> str:
    told = ", ".join(f"{works[t].name} ({size(needs[t])})" for t in tables[:_MOST_NAMES])
    more = len(tables) - _MOST_NAMES
    return told + (f" and {more} more" if more > 0 else "")


def _ways(
    problem: Problem, works: Sequence[Work], tables: Sequence[int], short: float, room: float
) -> list[str]:
    topology = problem.model.topology
    largest = works[tables[0]]
    ways = []
    rows = ShardingType.ROW_WISE
    types = largest.constraints.sharding_types
    if types is not None and rows not in types and topology.world_size > 1:
        ways.append(f"allow {rows.value} for {largest.name}, which cuts it into equal parts")
    if short > 0 and room > 0:
        more = -(-int(short) // int(room))
        ways.append(f"use {more} more rank{'s' if more > 1 else ''} or more, or ranks with more "
                    "memory")  # fmt: skip
    if not largest.constraints.storages and not largest.config.storage.is_keyed:
        storages = _storages(topology.device)
        ways.append(
            f"allow another storage, as TableConstraints(storages=({storages},)) for {largest.name}"
        )
    if largest.config.data_type.itemsize == 4 and largest.config.storage == Dense():
        ways.append("keep tables in 16 bits (data_type=torch.bfloat16)")
    if largest.optimizer is not None and any(not s.per_row for s in largest.optimizer.states):
        ways.append("take an optimizer with one number a row, as RowwiseAdagrad")
    ways.append("make the batch, or the Reservation, smaller")
    return ways


def _storages(device: str) -> str:
    if device == "cuda":
        return "Dense(Placement.MANAGED_CACHING), TensorTrain(ranks=(16, 16))"
    return "TensorTrain(ranks=(16, 16))"


def check_room(room: Sequence[MemoryBytes], dense_nbytes: int) -> None:
    """Raise PlanError if the reservation leaves a rank nothing."""
    for rank, pool in enumerate(room):
        if pool.device <= 0:
            ways = ("reserve less: Reservation(share=..., nbytes=..., dense_copies=...)",
                    "give ranks more memory")  # fmt: skip
            raise PlanError(
                f"nothing is left for tables on rank {rank}: the reservation, with "
                f"{size(dense_nbytes)} of dense parameters, takes {size(-pool.device)} more than "
                f"there is. Ways out: {'; '.join(ways)}",
                (),
                int(-pool.device),
                ways,
            )
