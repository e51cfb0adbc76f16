"""What is raised where no plan fits: what is short, and what can be done."""

from collections.abc import Sequence

from emblib.collections.configs import Dynamic, Plain
from emblib.sharding.boxes import ShardingType
from emblib.sharding.planner.search import Problem, place
from emblib.sharding.planner.topology import Pool
from emblib.sharding.planner.work import Work

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
    if not largest.constraints.kinds and not isinstance(largest.config.kind, Dynamic):
        ways.append(f"allow another kind, as TableConstraints(kinds=({_kinds(topology.device)},)) "
                    f"for {largest.name}")  # fmt: skip
    if largest.config.data_type.itemsize == 4 and largest.config.kind == Plain():
        ways.append("keep tables in 16 bits (data_type=torch.bfloat16)")
    if largest.optimizer is not None and any(not s.per_row for s in largest.optimizer.states):
        ways.append("take an optimizer with one number a row, as RowwiseAdagrad")
    ways.append("make the batch, or the Reservation, smaller")
    return ways


def _kinds(device: str) -> str:
    if device == "cuda":
        return "Plain(Placement.MANAGED_CACHING), TensorTrain(ranks=(16, 16))"
    return "TensorTrain(ranks=(16, 16))"


def check_room(room: Sequence[Pool], dense_nbytes: int) -> None:
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
