"""The planner: from a model and a machine to a sharding plan."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from emblib.optim import Optimizer
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.enumerate import Option, options_of
from emblib.sharding.planner.estimate import FLOAT32_IN_TRANSIT, BytesPerFloat, CostModel
from emblib.sharding.planner.feasible import any_plan, check_free_memory, cut_to_fit, no_plan_error
from emblib.sharding.planner.report import Prediction, predict
from emblib.sharding.planner.search import Plan, Problem, improve_best, starting_plans
from emblib.sharding.planner.topology import Topology
from emblib.sharding.planner.workloads import (
    Reservation,
    TableConstraints,
    TableWorkload,
    dense_bytes,
    workloads_of,
)
from emblib.specs import check_count
from emblib.storage import MemoryBytes

if TYPE_CHECKING:
    from emblib.sharding.codecs import CommPrecision
    from emblib.sharding.ranks import RankGroup


class Planner:
    """Find a plan that fits into memory and has a short predicted step.

    Args:
        topology: the machine.
        batch_size: examples per rank.
        constraints: constraints by table name, or by `path.name` if collections share names; None
            for the defaults of `TableConstraints`.
        reservation: memory that is not for tables; by default `Reservation()`.
        comm_precision: codecs of rows and gradients in transit; None for float32.
        max_trials: maximum number of placements that local moves try; more takes longer.

    Raises:
        TypeError: `topology` or `constraints` are of another type, or `batch_size` or `max_trials`
            is not an int.
        ValueError: `batch_size` or `max_trials` is below 1.

    The search is deterministic: with the same arguments it finds the same plan on any machine.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, TableConstraints] | None = None,
        *,
        reservation: Reservation | None = None,
        comm_precision: "CommPrecision | None" = None,
        max_trials: int = 60_000,
    ) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology must be a Topology, got {topology!r}")
        self.topology = topology
        self.batch_size = check_count("batch_size", batch_size)
        self.constraints = _check_constraints(constraints or {})
        self.reservation = Reservation() if reservation is None else reservation
        self.max_trials = check_count("max_trials", max_trials)
        self.comm_precision = comm_precision
        self._bytes_per_float = (
            FLOAT32_IN_TRANSIT
            if comm_precision is None
            else BytesPerFloat.of_codecs(comm_precision)
        )

    def plan(self, module: nn.Module, *, optimizer: Optimizer | None = None) -> ShardingPlan:
        """Return the plan for all collections of a model.

        Args:
            module: model with unsharded collections.
            optimizer: optimizer of tables whose configuration has none; pass `shard` the same. None
                for that of their collection.

        Raises:
            PlanError: no plan fits.
            ValueError: no sharding type satisfies the constraints, or the model or the constraints
                are wrong, see `workloads_of`.
        """
        return self.solve(module, optimizer=optimizer).plan

    def solve(self, module: nn.Module, *, optimizer: Optimizer | None = None) -> Prediction:
        """Return the plan and its prediction, which `str()` formats as a report.

        Arguments and errors are as for `plan`.
        """
        workloads = workloads_of(module, self.batch_size, self.constraints, optimizer)
        return self.solve_workloads(workloads, dense_bytes(module))

    def solve_workloads(
        self, workloads: Sequence[TableWorkload], dense_nbytes: int = 0
    ) -> Prediction:
        """Return the plan and its prediction for tables that belong to no model.

        `dense_nbytes` is the size of the dense parameters.

        Raises:
            PlanError: no plan fits.
            ValueError: no sharding type satisfies the constraints of a table, or there is no table.
        """
        if not workloads:
            raise ValueError("there are no workloads, and so nothing to plan")
        free_memory = self.free_memory(dense_nbytes)
        check_free_memory(free_memory, dense_nbytes)
        model = self.model(workloads)
        options = [options_of(workload, model) for workload in workloads]
        problem = self._make_problem(model, workloads, options, free_memory)
        plan = self._search(problem, workloads)
        if not plan:
            raise no_plan_error(problem, workloads)
        return predict(workloads, self._sharding_plan(workloads, plan), model, free_memory)

    def predict(
        self, module: nn.Module, plan: ShardingPlan, *, optimizer: Optimizer | None = None
    ) -> Prediction:
        """Predict a step under any plan, whether or not it fits; `optimizer` is as for `plan`.

        Raises:
            TypeError: the plan is not a `ShardingPlan`, e.g. one of rules, which fit any world.
            ValueError: the plan is for another world, or lacks a table; or the model or the
                constraints are wrong, see `workloads_of`.
        """
        if not isinstance(plan, ShardingPlan):
            raise TypeError(
                f"plan must be a ShardingPlan, e.g. that of construct_module_plan for rules, got "
                f"{type(plan).__name__}"
            )
        workloads = workloads_of(module, self.batch_size, self.constraints, optimizer)
        return predict(
            workloads, plan, self.model(workloads), self.free_memory(dense_bytes(module))
        )

    def model(self, workloads: Sequence[TableWorkload]) -> CostModel:
        """Return the cost model for these tables."""
        return CostModel(self.topology, self._bytes_per_float, self.reservation.batches, workloads)

    def free_memory(self, dense_nbytes: int = 0) -> list[MemoryBytes]:
        """Return the memory for tables and batches, by rank; negative if more is reserved."""
        capacity = self.topology.capacity()
        return [self.reservation.left(pool, dense_nbytes) for pool in capacity]

    def _make_problem(
        self,
        model: CostModel,
        workloads: Sequence[TableWorkload],
        options: Sequence[Sequence[Option]],
        free_memory: Sequence[MemoryBytes],
    ) -> Problem:
        """Return the problem that the search solves."""
        is_weighted = any(
            reader.is_weighted for workload in workloads for reader in workload.by_reader
        )
        return Problem(model, free_memory, options, is_weighted, self.max_trials)

    def _search(self, problem: Problem, workloads: Sequence[TableWorkload]) -> Plan:
        """Search with the configured storages; allow alternatives only if no such plan fits.

        Returns an empty plan if no plan with alternatives fits either.
        """
        configured = [[o for o in options if not o.penalty] for options in problem.options]
        has_alternatives = any(
            len(a) < len(b) for a, b in zip(configured, problem.options, strict=True)
        )
        configured_problem = self._make_problem(
            problem.model, workloads, configured, problem.free_memory
        )
        plans: list[Plan] = []
        if all(configured):
            plans = starting_plans(configured_problem) or [
                p
                for p in (any_plan(configured_problem), cut_to_fit(configured_problem, workloads))
                if p
            ]
        if plans:
            return improve_best(configured_problem, plans)
        if not has_alternatives:
            return []
        plans = starting_plans(problem) or [p for p in (any_plan(problem),) if p]
        return improve_best(problem, plans) if plans else []

    def _sharding_plan(self, workloads: Sequence[TableWorkload], plan: Plan) -> ShardingPlan:
        """Convert choices by workload to a plan by module and table."""
        modules: dict[str, dict[str, object]] = {}
        for workload, choice in zip(workloads, plan, strict=True):
            sharding = choice.option.sharding(workload, self.topology, choice.targets)
            for reader in workload.by_reader:
                modules.setdefault(reader.path, {})[reader.config.name] = sharding
        return ShardingPlan(modules, self.topology.world)  # type: ignore[arg-type]


def _check_constraints(constraints: Mapping[str, TableConstraints]) -> dict[str, TableConstraints]:
    """Return the constraints as a dict; raise TypeError unless they are a mapping of them."""
    if not isinstance(constraints, Mapping):
        raise TypeError(
            "constraints must be a dict {table: TableConstraints(...)}, got "
            f"{type(constraints).__name__}"
        )
    for table, table_constraints in constraints.items():
        if not isinstance(table_constraints, TableConstraints):
            raise TypeError(
                f"constraints of table {table!r} must be TableConstraints, got "
                f"{type(table_constraints).__name__}"
            )
    return dict(constraints)


def collective_plan(
    module: nn.Module,
    planner: Planner,
    ranks: "RankGroup",
    *,
    optimizer: Optimizer | None = None,
) -> ShardingPlan:
    """Plan on rank 0 and return the plan on all ranks; an error is raised on all ranks.

    A collective: all ranks wait for rank 0. `optimizer` is as for `Planner.plan`.
    """
    from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result

    def plan_as_json() -> str:
        return planner.plan(module, optimizer=optimizer).to_json()

    return ShardingPlan.from_json(invoke_on_rank_and_broadcast_result(ranks, 0, plan_as_json))
