"""The gated points, and the first message to a worker, as plain data that processes exchange.

The first message is a `Setup`; the worker answers with the `BuildResult` of each point by name.
Each further message is a tuple, (name of a method of `Bench`, *its arguments), which the worker
answers with the result of the method. None ends the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.config.schema import PHASES, Config, Optimizer, UsageError
from experiments.config.sweep import SWEEP, Arm, Cell
from experiments.kinds import expand
from experiments.kinds.base import TIME


@dataclass(frozen=True)
class Point:
    """One phase of one contender on one workload, with one optimizer."""

    name: str  # unique in a run; noise floors and trends find the point by it
    cell: Cell
    arm: Arm  # one of the arms of `cell`
    phase: str  # one of PHASES
    optimizer: Optimizer  # update rule of a step; without effect on a forward

    @property
    def description(self) -> str:
        """Return contender, phase, optimizer and sizes in words."""
        workload = self.cell.workload
        sizes = f"T={workload.T} E={workload.E:,} D={workload.D} B={workload.B:,} L={workload.L}"
        return f"{self.arm.label} {self.phase}, {self.optimizer.value}, {sizes}"


def points_of(config: Config) -> list[Point]:
    """Return the points of gate.points: for each entry, a point per contender of its case.

    Raises:
        UsageError: gate.points is empty, has an unknown case or phase, a case that is not of the
            kind `time`, or two entries that measure the same; entries of a forward do not differ by
            their optimizer.
    """
    cells = {cell.section: cell for cell in expand(config) if cell.section != SWEEP}
    gate_points = config.gate.points
    if not gate_points:
        raise UsageError("gate.points is empty: name at least one, e.g. {case: ..., phase: step}")
    points = []
    for gate_point in gate_points:
        if gate_point.case not in cells:
            case_names = ", ".join(cells) or "none"
            raise UsageError(f"gate.points: no case '{gate_point.case}'. There is: {case_names}")
        if gate_point.phase not in PHASES:
            raise UsageError(
                f"gate.points: no phase '{gate_point.phase}'. There is: {list(PHASES)}"
            )
        cell = cells[gate_point.case]
        if cell.kind != TIME:  # its contenders have other operations, or none
            raise UsageError(
                f"gate.points: the case '{gate_point.case}' is of kind={cell.kind}; the gate times "
                f"forward and step, which only cases of kind={TIME} have"
            )
        update_note = f" {gate_point.optimizer.value}" * (gate_point.phase == "step")
        for arm in cell.arms:
            arm_note = f" {arm.key}" * (len(cell.arms) > 1)
            name = f"{gate_point.case}{arm_note} {gate_point.phase}{update_note}"
            points.append(Point(name, cell, arm, gate_point.phase, gate_point.optimizer))
    names = [point.name for point in points]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"gate.points: '{name}' is there twice")
    return points


@dataclass(frozen=True)
class Setup:
    """The first message to a worker: what to build, and how to time it.

    Attributes:
        points: points to build.
        config: configuration of the run.
        device: device as torch names it, such as "cpu" or "cuda".
        seed: seed of the batches, the same on both sides.
        slow: factor by which the worker prolongs its timed calls, by a wait within the timed
            region; 1 for no wait. Runs with it show that the gate detects a slowdown.
        idle: factor by which the worker prolongs its samples, by a wait after the timed region; 1
            for no wait. It is the `slow` of the other side, so that both sides load the core alike.
        check: True to compare each point with the reference before it is timed.
        core: core on which the process stays; None for any.
    """

    points: Sequence[Point]
    config: Config
    device: str
    seed: int
    slow: float = 1.0
    idle: float = 1.0
    check: bool = False
    core: int | None = None


@dataclass(frozen=True)
class BuildResult:
    """The result of building a point in one worker.

    `status` is "ok" or that of a failed record; `reason` is "" if the point was built.
    """

    status: str = "ok"
    reason: str = ""
