"""The planner: find a sharding plan for a model on a machine, and predict its steps.

`Planner.plan` enumerates the ways to shard each table (`enumerate.py`), whose costs come from a
model of the machine (`estimate.py`), and searches for the fastest plan that fits (`search.py`). If
memory is short, it searches for any plan that fits (`feasible.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from emblib.optim import Optimizer
from emblib.sharding.codecs import CommPrecision, check_comm_precision
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.enumerate import enumerate_options
from emblib.sharding.planner.estimate import BytesPerFloat, CostModel
from emblib.sharding.planner.feasible import any_plan, check_free_memory, cut_to_fit, no_plan_error
from emblib.sharding.planner.report import Prediction, predict
from emblib.sharding.planner.search import Plan, Problem, improve_best, starting_plans
from emblib.sharding.planner.topology import Topology
from emblib.sharding.planner.workloads import (
    Reservation,
    TableConstraints,
    TableWorkload,
    any_is_weighted,
    dense_bytes,
    workloads_of,
)
from emblib.specs import check_count
from emblib.storage import MemoryBytes

if TYPE_CHECKING:
    from emblib.sharding.ranks import RankGroup


class Planner:
    """Find a plan that fits into memory and has a short predicted step.

    Args:
        topology: the machine.
        batch_size: examples per rank.
        constraints: constraints by table name, or by `path.name` if collections share names. Other
            tables have the defaults of `TableConstraints`, and so have all tables if it is None.
        reservation: memory that is not for tables; None is `Reservation()`.
        comm_precision: codecs of rows and gradients in transit; None for float32.
        max_trials: maximum number of placements that local moves try. A larger number may find a
            faster plan, and takes longer.

    Raises:
        TypeError: `topology`, `constraints`, `reservation` or `comm_precision` has another type, or
            `batch_size` or `max_trials` is not an int.
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
        comm_precision: CommPrecision | None = None,
        max_trials: int = 60_000,
    ) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology must be a Topology, got {topology!r}")
        self.topology = topology
        self.batch_size = check_count("batch_size", batch_size)
        self.constraints = _check_constraints(constraints or {})
        self.reservation = Reservation() if reservation is None else reservation
        if not isinstance(self.reservation, Reservation):
            raise TypeError(
                "reservation must be None or a Reservation, e.g. Reservation(share=0.2), got "
                f"{reservation!r}"
            )
        self.max_trials = check_count("max_trials", max_trials)
        self.comm_precision = comm_precision
        self._bytes_per_float = BytesPerFloat.from_codecs(check_comm_precision(comm_precision))

    def plan(self, module: nn.Module, *, optimizer: Optimizer | None = None) -> ShardingPlan:
        """Return the plan for all collections of a model.

        Args:
            module: model with unsharded collections.
            optimizer: optimizer of tables whose configuration has none; pass `shard` the same. None
                is the optimizer of their collection.

        Raises:
            PlanError: no plan fits into the memory. A `PlanError` is a ValueError.
            TypeError: `module` is not a module, or `optimizer` is not an emblib optimizer.
            ValueError: no sharding type satisfies the constraints of a table, or the model or the
                constraints are wrong, see `workloads_of`.
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

        Args:
            workloads: the tables, with their own batch sizes and constraints: `batch_size` and
                `constraints` of the planner are not used.
            dense_nbytes: bytes of the dense parameters, for the reservation.

        Raises:
            PlanError: no plan fits.
            ValueError: no sharding type satisfies the constraints of a table, or there is no table.
        """
        if not workloads:
            raise ValueError("there are no workloads, and so nothing to plan")
        free_memory = self.free_memory(dense_nbytes)
        check_free_memory(free_memory, dense_nbytes)
        model = self.model(workloads)
        options = [enumerate_options(workload, model) for workload in workloads]
        is_weighted = any_is_weighted(workloads)
        problem = Problem(model, free_memory, options, is_weighted, self.max_trials)
        plan = _search(problem, workloads)
        if not plan:
            raise no_plan_error(problem, workloads)
        return predict(workloads, self._sharding_plan(workloads, plan), model, free_memory)

    def predict(
        self, module: nn.Module, plan: ShardingPlan, *, optimizer: Optimizer | None = None
    ) -> Prediction:
        """Predict a step under any plan, whether or not it fits; `optimizer` is as for `plan`.

        Raises:
            TypeError: `plan` is not a `ShardingPlan`, for example a dict of rules; or as for
                `plan`.
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
        """Return the memory for tables and batches of each rank, in bytes.

        `dense_nbytes` is the size of the dense parameters. Device memory is negative if more is
        reserved than a rank has.
        """
        capacity = self.topology.capacity()
        return [self.reservation.left(pool, dense_nbytes) for pool in capacity]

    def _sharding_plan(self, workloads: Sequence[TableWorkload], plan: Plan) -> ShardingPlan:
        """Convert placements by workload to a plan by module and table."""
        modules: dict[str, dict[str, object]] = {}
        for workload, placement in zip(workloads, plan, strict=True):
            sharding = placement.option.sharding(workload, self.topology, placement.targets)
            for reader in workload.by_reader:
                modules.setdefault(reader.path, {})[reader.config.name] = sharding
        return ShardingPlan(modules, self.topology.world)  # type: ignore[arg-type]


def _search(problem: Problem, workloads: Sequence[TableWorkload]) -> Plan:
    """Return a plan that fits: with the configured storages, else with alternatives.

    Returns an empty plan if none was found. `workloads` are the tables of the problem.
    """
    configured_options = [
        [option for option in options if not option.penalty] for options in problem.options
    ]
    if all(configured_options):
        configured = replace(problem, options=configured_options)
        plans = starting_plans(configured)
        if not plans:  # memory is short
            plans = [any_plan(configured), cut_to_fit(configured, workloads)]
            plans = [plan for plan in plans if plan]
        if plans:
            return improve_best(configured, plans)
    if configured_options == problem.options:
        return []  # no table has an alternative
    plans = starting_plans(problem)
    if plans:
        return improve_best(problem, plans)
    plan = any_plan(problem)
    return improve_best(problem, [plan]) if plan else []


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
    """Plan on rank 0 and return the plan on all ranks; a collective over `ranks`.

    All ranks wait for rank 0, whose `module`, `planner` and `optimizer` are used; these are as for
    `Planner.plan`, and so are the errors, which all ranks raise.
    """
    from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result

    def plan_as_json() -> str:
        return planner.plan(module, optimizer=optimizer).to_json()

    return ShardingPlan.from_json(invoke_on_rank_and_broadcast_result(ranks, 0, plan_as_json))
