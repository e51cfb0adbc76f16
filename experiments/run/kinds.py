"""What an experiment can be made of: how a cell of a kind is measured, or a whole run is led."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from experiments.config.schema import Kind

# (cell, session, seconds) -> records, in a process of its own.
MEASURES = {
    Kind.time: "experiments.run.cell:measure_cell",
    Kind.cache: "experiments.caches.cell:cache_cell",
    Kind.trace: "experiments.traces.cell:trace_cell",
    Kind.keys: "experiments.hashing.cell:keys_cell",
    Kind.growth: "experiments.hashing.growth:growth_cell",
    Kind.sharding: "experiments.sharding.cell:sharding_cell",
    Kind.calibration: "experiments.sharding.calibration:calibration_cell",
}
# (config, *, question, words) -> exit status: kinds that lead their processes themselves.
RUNNERS: dict[Kind, str] = {
    Kind.gate: "experiments.gate.runner:run",
    Kind.noise: "experiments.gate.noise:run",
    Kind.power: "experiments.gate.power:run",
    Kind.micro: "experiments.micro.runner:run",
}


def function(place: str) -> Callable[..., Any]:
    """'module:name' imported."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
