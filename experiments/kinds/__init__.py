"""What an experiment can be made of: how a cell of a kind is measured, or a whole run is led."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from experiments.config.schema import Kind

# (cell, session, seconds) -> records, in a process of its own.
MEASURES = {
    Kind.time: "experiments.measure.timing:measure_cell",
    Kind.cache: "experiments.measure.cache:cache_cell",
    Kind.trace: "experiments.measure.trace:trace_cell",
    Kind.keys: "experiments.measure.keys:keys_cell",
    Kind.growth: "experiments.measure.growth:growth_cell",
    Kind.sharding: "experiments.measure.sharding:sharding_cell",
    Kind.calibration: "experiments.measure.sharding:calibration_cell",
}
# (config, *, question, words) -> exit status: kinds that lead their processes themselves.
RUNNERS: dict[Kind, str] = {
    Kind.gate: "experiments.gate.runner:run",
    Kind.noise: "experiments.gate.noise:run",
    Kind.power: "experiments.gate.power:run",
    Kind.micro: "experiments.kinds.micro:run",
}


def function(place: str) -> Callable[..., Any]:
    """'module:name' imported."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
