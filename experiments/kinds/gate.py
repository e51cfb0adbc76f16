"""The kinds `gate`, `noise` and `power`: two revisions of emblib, measured in turns.

They lead their processes and write their reports themselves (`experiments/gate`).
"""

from __future__ import annotations

from experiments.kinds.base import TIME, CellKinds, Kind, Reporting


class Gate(Kind):
    """Answer whether one revision of emblib is slower than another."""

    name = "gate"
    cell_kinds = CellKinds(sweep=TIME)
    leads = "experiments.gate.runner:run"
    reporting = Reporting(rebuild="experiments.gate.runner:rebuild")


class Noise(Gate):
    """Answer by how much a revision seems to differ from itself on this machine."""

    name = "noise"
    leads = "experiments.gate.noise:run"
    reporting = Reporting(rebuild="experiments.gate.noise:write")


class Power(Gate):
    """Answer how often the gate errs."""

    name = "power"
    leads = "experiments.gate.power:run"
    reporting = Reporting(rebuild="experiments.gate.power:write")
