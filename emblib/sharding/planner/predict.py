"""What the model predicts of a plan: seconds by phase, seconds and bytes by rank and by table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from emblib.sharding.boxes import ShardingType, TableSharding
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.enumerate import Domain, Option, Parts, option_of
from emblib.sharding.planner.estimate import PHASES, CostModel
from emblib.sharding.planner.loads import Choice, Loads
from emblib.sharding.planner.topology import Need, Pool
from emblib.sharding.planner.work import Work


class RankPrediction(NamedTuple):
    """One rank: seconds by phase, what all do alike included; bytes taken, and what there is."""

    seconds: tuple[float, ...]
    nbytes: Need
    room: Pool
    tables: int


class TablePrediction(NamedTuple):
    """One table: how it is spread, bytes on all ranks together, and seconds of the slowest one."""

    work: Work
    sharding: TableSharding
    nbytes: Need
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """What a step under a plan will take.

    `phases` has the seconds of `PHASES` until the slowest rank is done, `arrange` for what every
    rank does with rows and ids whatever the plan, and `overhead`; they add up to `step_s`.
    """

    plan: ShardingPlan
    phases: dict[str, float]
    ranks: tuple[RankPrediction, ...]
    tables: tuple[TablePrediction, ...]
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of a step: lookups, exchanges and updates; the dense part is not in it."""
        return sum(self.phases.values())

    @property
    def compute_s(self) -> float:
        """Of that, what ranks do by themselves."""
        return self.step_s - self.exchange_s - self.phases["overhead"]

    @property
    def exchange_s(self) -> float:
        """Of that, what is on the way."""
        return self.phases["input"] + self.phases["output"]

    @property
    def fits(self) -> bool:
        """Whether every rank has room for what it holds."""
        return all(
            need <= have or not need
            for rank in self.ranks
            for need, have in zip((rank.nbytes.device, *rank.nbytes[2:]), rank.room, strict=True)
        )

    def __str__(self) -> str:
        from emblib.sharding.planner.report import report

        return report(self)


def option_for(work: Work, sharding: TableSharding, model: CostModel) -> Option:
    """The option that a table's sharding is, whatever boxes it has."""
    parts = Parts(work, model, sharding.kind)
    if sharding.is_replicated:
        return Option(ShardingType.DATA_PARALLEL, sharding.kind, (), parts.replicated())
    return option_of(parts, sharding.type, sharding.boxes, Domain.WORLD, 0)


def predict(
    works: Sequence[Work],
    plan: ShardingPlan,
    model: CostModel,
    room: Sequence[Pool],
) -> Prediction:
    """What the model says of a plan.

    Raises:
        ValueError: the plan is for another world, or lacks a table.
    """
    if plan.world != model.topology.world:
        raise ValueError(
            f"the plan is for {plan.world}, the topology has {model.topology.world}: plan anew"
        )
    loads = Loads(model, room, weighted=any(work.is_weighted for work in works))
    tables = []
    for work in works:
        sharding = plan.modules.get(work.path, {}).get(work.config.name)
        if sharding is None:
            raise ValueError(f"the plan says nothing of table {work.name}")
        option = option_for(work, sharding, model)
        loads.add(Choice(option, (0,) * len(option.units)))
        tables.append(_table(work, sharding, option, model.topology.world_size))
    return _prediction(plan, loads, tuple(tables), model)


def _table(work: Work, sharding: TableSharding, option: Option, world_size: int) -> TablePrediction:
    members = [load for unit in option.units for load in unit.members]
    own = max((sum(load.seconds) for load in members), default=0.0)
    everywhere = sum(option.everywhere.seconds) + option.everywhere.arrange
    slowest = max(own, 0.0) + everywhere
    return TablePrediction(work, sharding, option.nbytes(world_size), slowest)


def _prediction(
    plan: ShardingPlan, loads: Loads, tables: tuple[TablePrediction, ...], model: CostModel
) -> Prediction:
    topology = model.topology
    crowd = topology.local_world_size / topology.computing
    phases = {name: loads.phase(number) for number, name in enumerate(PHASES)}
    phases["arrange"] = loads.arrange * crowd
    phases["overhead"] = loads.overhead_s
    held = [0] * topology.world_size
    for table in tables:
        for rank in table.sharding.ranks or range(topology.world_size):
            held[rank] += 1
    ranks = tuple(
        RankPrediction(
            tuple(
                seconds[r] + common
                for seconds, common in zip(loads.seconds, loads.everywhere, strict=True)
            ),
            Need(*(taken[r] + c for taken, c in zip(loads.nbytes, loads.common, strict=True))),
            Pool(*loads.room[r][1:]),
            held[r],
        )
        for r in range(topology.world_size)
    )
    return Prediction(plan, phases, ranks, tables, topology.costs.source)
