"""The kinds `gate`, `noise` and `power`: two revisions of emblib, measured in turns.

Their runners (`experiments/gate`) start the processes and write the reports.
"""

from __future__ import annotations

from experiments.config.schema import Config, require
from experiments.kinds import base

# Keys that none of the kinds reads: points have optimizers, and a pair has a number of blocks.
BUDGETS = ("timing.cell_seconds", "timing.total_seconds")
IGNORED = ("optimizer", base.KEYS, "rerun", *BUDGETS, *base.RACE)
TRIALS = ("gate.trials", "gate.slowed_trials")
VERDICT = ("gate.base", "gate.strict", "gate.instructions")  # keys of the gate alone


class Gate(base.Kind):
    """Answer whether one revision of emblib is slower than another."""

    name = "gate"
    cell_kinds = base.CellKinds(sweep=base.TIME)
    runner = "experiments.gate.runner:run"
    measurement = base.Measurement(ignores=(*IGNORED, *TRIALS, "gate.floor_pairs"))
    reporting = base.Reporting(special_report="experiments.gate.runner:rebuild")

    def check(self, config: Config) -> None:
        """Raise UsageError for several modes, or pairs, trials or margins out of range."""
        super().check(config)
        for name in ("max_pairs", "floor_pairs", "trials", "slowed_trials"):
            minimum = 1 if name.endswith("pairs") else 0
            value = getattr(config.gate, name)
            require(f"gate.{name} must be >= {minimum}", value, holds=value >= minimum)
        modes = [mode.value for mode in config.timing.modes]
        require("timing.modes must be one mode", modes, holds=len(modes) == 1)
        for name in ("min_effect", "max_margin"):
            value = getattr(config.gate, name)
            require(f"gate.{name} must be > 0", value, holds=value > 0)
        max_pairs, pairs = config.gate.max_pairs, config.timing.replicates
        rule = f"gate.max_pairs must be >= timing.replicates={pairs}"
        require(rule, max_pairs, holds=max_pairs >= pairs or self.name == Noise.name)


class Noise(Gate):
    """Answer by how much a revision seems to differ from itself on this machine."""

    name = "noise"
    runner = "experiments.gate.noise:run"
    measurement = base.Measurement(
        ignores=(*IGNORED, *TRIALS, *VERDICT, "gate.max_pairs", "gate.max_margin", "gate.inject")
    )
    reporting = base.Reporting(special_report="experiments.gate.noise:write")


class Power(Gate):
    """Answer how often the gate errs."""

    name = "power"
    runner = "experiments.gate.power:run"
    measurement = base.Measurement(ignores=(*IGNORED, *VERDICT, "gate.floor_pairs"))
    reporting = base.Reporting(special_report="experiments.gate.power:write")
