"""The planner: find a sharding plan for a model and predict the time of its steps.

planner = Planner(Topology.detect(world_size=8), batch_size=4096)
prediction = planner.solve(model)
print(prediction)               # table by table, rank by rank, and what limits the step
prediction.plan.save("plan.json")
"""

from emblib.sharding.planner.calibration import Calibration
from emblib.sharding.planner.estimate import CostModel
from emblib.sharding.planner.feasible import PlanError
from emblib.sharding.planner.planner import Planner, collective_plan
from emblib.sharding.planner.report import Prediction
from emblib.sharding.planner.simulate import Scaling, SimulatedWorld, simulate
from emblib.sharding.planner.topology import Topology
from emblib.sharding.planner.workloads import Reservation, TableConstraints, TableWorkload
from emblib.storage import MemoryBytes

__all__ = [
    "Calibration",
    "CostModel",
    "MemoryBytes",
    "PlanError",
    "Planner",
    "Prediction",
    "Reservation",
    "Scaling",
    "SimulatedWorld",
    "TableConstraints",
    "TableWorkload",
    "Topology",
    "collective_plan",
    "simulate",
]
