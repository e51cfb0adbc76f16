"""The planner: from a model and a machine to a plan."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.enumerate import Option, options_of
from emblib.sharding.planner.estimate import FLOATS, CostModel, Sent
from emblib.sharding.planner.feasible import any_plan, check_room, cut_to_fit, no_plan
from emblib.sharding.planner.report import Prediction, predict
from emblib.sharding.planner.search import Plan, Problem, best_of, starts
from emblib.sharding.planner.topology import Topology
from emblib.sharding.planner.work import (
    Reservation,
    TableConstraints,
    Work,
    dense_bytes,
    works_of,
)
from emblib.specs import check_count
from emblib.storage import MemoryBytes

if TYPE_CHECKING:
    from emblib.sharding.exchange import CommPrecision
    from emblib.sharding.ranks import RankGroup


class Planner:
    """Finds a plan that fits and whose step is predicted to be short.

    Args:
        topology: the machine.
        batch_size: examples a rank.
        constraints: of tables, by name, or `path.name` where collections share names.
        reservation: memory that is not for tables; left out, `Reservation()`.
        wire: how rows and gradients are encoded on their way.
        effort: how many placements the search tries; more takes longer.

    The same arguments give the same plan: no clock and no chance has a part in it.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, TableConstraints] | None = None,
        *,
        reservation: Reservation | None = None,
        wire: "CommPrecision | None" = None,
        effort: int = 60_000,
    ) -> None:
        self.topology = topology
        self.batch_size = check_count("batch_size", batch_size)
        self.constraints = dict(constraints or {})
        self.reservation = Reservation() if reservation is None else reservation
        self.effort = check_count("effort", effort)
        self.wire = wire
        self._sent = FLOATS if wire is None else Sent.by(wire)

    def plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for all collections in a model.

        Raises:
            PlanError: none fits.
            ValueError: constraints that no sharding type satisfies, or no collections.
        """
        return self.solve(module).plan

    def solve(self, module: nn.Module) -> Prediction:
        """The plan, with what is predicted of it; `str()` of that is a report."""
        works = works_of(module, self.batch_size, self.constraints)
        return self.solve_works(works, dense_bytes(module))

    def solve_works(self, works: Sequence[Work], dense_nbytes: int = 0) -> Prediction:
        """The same for tables that are in no model."""
        room = self.room(dense_nbytes)
        check_room(room, dense_nbytes)
        model = self.model(works)
        options = [options_of(work, model) for work in works]
        problem = self._problem(model, works, options, room)
        plan = self._search(problem, works)
        if not plan:
            raise no_plan(problem, works)
        return predict(works, self._boxes(works, plan), model, room)

    def predict(self, module: nn.Module, plan: ShardingPlan) -> Prediction:
        """What the model says of a plan, wherever it comes from."""
        works = works_of(module, self.batch_size, self.constraints)
        return predict(works, plan, self.model(works), self.room(dense_bytes(module)))

    def model(self, works: Sequence[Work]) -> CostModel:
        """What prices these tables."""
        return CostModel(self.topology, self._sent, self.reservation.batches, works)

    def room(self, dense_nbytes: int = 0) -> list[MemoryBytes]:
        """What tables and batches may take, by rank."""
        capacity = self.topology.capacity()
        return [self.reservation.left(pool, dense_nbytes) for pool in capacity]

    def _problem(
        self,
        model: CostModel,
        works: Sequence[Work],
        options: Sequence[Sequence[Option]],
        room: Sequence[MemoryBytes],
    ) -> Problem:
        weighted = any(work.is_weighted for work in works)
        return Problem(model, room, options, weighted, self.effort)

    def _search(self, problem: Problem, works: Sequence[Work]) -> Plan:
        """Kinds as configured if that fits in any way; alternatives only where it does not."""
        own = [[o for o in options if not o.penalty] for options in problem.options]
        alternatives = any(len(a) < len(b) for a, b in zip(own, problem.options, strict=True))
        first = self._problem(problem.model, works, own, problem.room)
        found = starts(first) if all(own) else []
        if not found:
            found = [p for p in (any_plan(first), cut_to_fit(first, works)) if p]
        if found:
            return best_of(first, found)
        if not alternatives:
            return []
        found = starts(problem) or [p for p in (any_plan(problem),) if p]
        return best_of(problem, found) if found else []

    def _boxes(self, works: Sequence[Work], plan: Plan) -> ShardingPlan:
        modules: dict[str, dict[str, object]] = {}
        for work, choice in zip(works, plan, strict=True):
            sharding = choice.option.sharding(work, self.topology, choice.targets)
            modules.setdefault(work.path, {})[work.config.name] = sharding
        return ShardingPlan(modules, self.topology.world)  # type: ignore[arg-type]


def collective_plan(module: nn.Module, planner: Planner, ranks: "RankGroup") -> ShardingPlan:
    """The plan that rank 0 finds, on all ranks; an error there is raised on all."""
    from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result

    def planned() -> str:
        return planner.plan(module).to_json()

    return ShardingPlan.from_json(invoke_on_rank_and_broadcast_result(ranks, 0, planned))
