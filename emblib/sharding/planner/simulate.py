"""Larger and smaller clusters than there are: the cost model's predictions for them.

Everything here is predicted. The constants come from `Topology.calibration`; beyond the world that
was calibrated, the cost of a message is taken to grow with the number of ranks, and bandwidth to
stay what it was.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from emblib.sharding.boxes import ShardingType
from emblib.sharding.planner.planner import Planner
from emblib.sharding.planner.predict import Prediction
from emblib.sharding.planner.work import TableConstraints, works_of
from emblib.specs import Choice


class Scaling(Choice):
    """What stays the same when there are more ranks: the batch of all together, or of each."""

    STRONG = "strong"
    WEAK = "weak"


class Simulated(NamedTuple):
    """A world that was not run: its ranks, the examples of each, and what is predicted."""

    world_size: int
    batch_size: int
    prediction: Prediction

    @property
    def examples_per_s(self) -> float:
        """Of all ranks, the dense part apart."""
        return self.world_size * self.batch_size / self.prediction.step_s


def simulate(
    planner: Planner,
    module: nn.Module,
    world_sizes: Sequence[int],
    *,
    scaling: Scaling = Scaling.WEAK,
    sharding: ShardingType | None = None,
) -> list[Simulated]:
    """What steps of a model would take in other worlds of the same machines.

    Plans are found anew for each, with all tables spread as `sharding` where it is given.

    Raises:
        ValueError: ranks that are not whole nodes; or, with STRONG, that do not divide the batch.
        PlanError: tables that do not fit.
    """
    return [
        _world(planner, module, world_size, Scaling(scaling), sharding)
        for world_size in world_sizes
    ]


def _world(
    planner: Planner,
    module: nn.Module,
    world_size: int,
    scaling: Scaling,
    sharding: ShardingType | None,
) -> Simulated:
    batch = planner.batch_size
    if scaling is Scaling.STRONG:
        whole = batch * planner.topology.world_size
        if whole % world_size:
            raise ValueError(
                f"{world_size} ranks must divide the batch of all together = {whole}; choose "
                "others, or Scaling.WEAK"
            )
        batch = whole // world_size
    constraints = dict(planner.constraints)
    if sharding is not None:
        for work in works_of(module, batch, constraints):
            given = constraints.get(work.name, constraints.get(work.config.name))
            constraints[work.name] = replace(
                given or TableConstraints(), sharding_types=(sharding,)
            )
    there = Planner(
        planner.topology.of_size(world_size),
        batch,
        constraints,
        reservation=planner.reservation,
        wire=planner.wire,
        effort=planner.effort,
    )
    return Simulated(world_size, batch, there.solve(module))


def table(simulated: Sequence[Simulated]) -> str:
    """Worlds as lines: ranks, examples a rank, predicted step, what of it is on the way, rate."""
    rows = [("ranks", "examples/rank", "step ms", "exchange ms", "examples/s")]
    for world_size, batch, prediction in simulated:
        rate = world_size * batch / prediction.step_s
        rows.append(
            (
                *(str(world_size), str(batch), f"{prediction.step_s * 1e3:.3f}"),
                *(f"{prediction.exchange_s * 1e3:.3f}", f"{rate:,.0f}"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "Predicted, not measured."])
