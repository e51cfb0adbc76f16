"""Seconds and bytes on every rank while options are tried: a plan under construction."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from emblib.sharding.planner.enumerate import Domain, Option, Unit
from emblib.sharding.planner.estimate import INPUT, OUTPUT, PHASES, CostModel
from emblib.sharding.planner.topology import Need, Pool

Targets = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """An option of a table, and the rank or node of each of its units."""

    option: Option
    targets: Targets


class Loads:
    """What the choices so far cost each rank; choices are added and taken away.

    Args:
        model: prices what is there for any batch.
        room: bytes that tables and batches may take, by rank.
        weighted: whether any collection sends weights.
    """

    def __init__(self, model: CostModel, room: Sequence[Pool], *, weighted: bool) -> None:
        self.model, self.topology = model, model.topology
        world = self.topology.world_size
        self.room = [(device, device, host, disk) for device, host, disk in room]
        self._rooms = list(zip(*self.room, strict=True))
        self.seconds = [[0.0] * world for _ in PHASES]
        self.totals = [0.0] * world
        self.nbytes = [[0.0] * world for _ in Need._fields]
        self.everywhere = [0.0] * len(PHASES)
        self.arrange = 0.0
        self.common = [0.0] * len(Need._fields)
        self.cut = 0
        self._positions = self._counted = 0.0
        self.penalty = 0
        self.sharded = 0
        self.replicated = 0
        self._exchanges_s = model.exchanges_s(weighted=weighted)

    # Changes

    def first_rank(self, unit: Unit, target: int) -> int:
        """The rank of a unit's first member."""
        if unit.domain is Domain.RANK:
            return target
        return target * self.topology.local_world_size if unit.domain is Domain.NODE else unit.first

    def num_targets(self, unit: Unit) -> int:
        """Ranks or nodes that a unit can be placed on."""
        if unit.domain is Domain.RANK:
            return self.topology.world_size
        return self.topology.num_nodes if unit.domain is Domain.NODE else 1

    def move(self, unit: Unit, target: int, sign: int) -> None:
        """Add a unit (sign 1), or take it away (-1)."""
        rank = self.first_rank(unit, target)
        combining, updating, host, disk = self.nbytes
        first, second, third, fourth = self.seconds
        totals = self.totals
        for (a, b, c, d), nbytes in unit.members:
            first[rank] += sign * a
            second[rank] += sign * b
            third[rank] += sign * c
            fourth[rank] += sign * d
            totals[rank] += sign * (a + b + c + d)
            combining[rank] += sign * nbytes[0]
            updating[rank] += sign * nbytes[1]
            if nbytes[2] or nbytes[3]:
                host[rank] += sign * nbytes[2]
                disk[rank] += sign * nbytes[3]
            rank += 1

    def add(self, choice: Choice, sign: int = 1) -> None:
        """Add a table, or take it away (-1)."""
        for unit, target in zip(choice.option.units, choice.targets, strict=True):
            self.move(unit, target, sign)
        self.add_common(choice.option, sign)

    def add_common(self, option: Option, sign: int = 1) -> None:
        """Add what an option costs all ranks alike."""
        everywhere = option.everywhere
        for phase, seconds in enumerate(everywhere.seconds):
            self.everywhere[phase] += sign * seconds
        self.arrange += sign * everywhere.arrange
        for pool, nbytes in enumerate(everywhere.nbytes):
            self.common[pool] += sign * nbytes
        self.cut += sign * option.cuts_rows
        self._positions += sign * everywhere.positions
        # Where ids came from is kept of all tables as soon as one is cut by rows.
        counted = self._positions if self.cut else 0.0
        self.common[0] += counted - self._counted
        self._counted = counted
        self.penalty += sign * option.penalty
        self.sharded += sign * option.is_sharded
        self.replicated += sign * (not option.units)

    # Questions

    def fits(self, unit: Unit, target: int) -> bool:
        """Whether the ranks of a target have room for a unit, besides what they have."""
        rank = self.first_rank(unit, target)
        for _, nbytes in unit.members:
            room = self.room[rank]
            for pool, need in enumerate(nbytes):
                if need and self.nbytes[pool][rank] + self.common[pool] + need > room[pool]:
                    return False
            rank += 1
        return True

    def common_fits(self) -> bool:
        """Whether what is on all ranks alike fits on each, beside what it has."""
        return all(
            common + max(map(operator.sub, self.nbytes[pool], self._rooms[pool])) <= 0
            for pool, common in enumerate(self.common)
            if common
        )

    def phase(self, number: int) -> float:
        """Seconds until the slowest rank is done with a phase, what all do alike included."""
        topology, seconds = self.topology, self.seconds[number]
        local, computing = topology.local_world_size, topology.computing
        common = self.everywhere[number]
        slowest = max(seconds)
        if computing == local:
            return slowest + common
        if number in (INPUT, OUTPUT):
            # Bandwidth was measured with all ranks of a node sending; fewer of them send faster.
            means = (sum(seconds[n : n + local]) / local for n in range(0, len(seconds), local))
            return max((slowest + common) * computing / local, max(means) + common)
        busiest = max(sum(seconds[n : n + local]) for n in range(0, len(seconds), local))
        return max(slowest + common, (busiest + local * common) / computing)

    def step_s(self) -> float:
        """Predicted seconds of a step."""
        topology = self.topology
        crowd = topology.local_world_size / topology.computing
        phases = sum(self.phase(n) for n in range(len(PHASES)))
        return phases + self.arrange * crowd + self.overhead_s

    @property
    def overhead_s(self) -> float:
        """Seconds that are there for any batch."""
        costs = self.topology.costs
        exchanges = self._exchanges_s if self.sharded else 0.0
        blocks = costs.blocks_s if self.cut else 0.0
        copies = costs.copies_s if self.replicated else 0.0
        return costs.step_s + exchanges + blocks + copies

    def spread(self) -> float:
        """Sum of squares of what ranks spend: among equal steps the even one is better."""
        return sum(map(operator.mul, self.totals, self.totals))
