"""The kinds of experiments. `run`, `report` and `config` know a kind only as a `Kind` object."""

from __future__ import annotations

import dataclasses
import functools

from experiments.config.schema import Config
from experiments.config.sweep import Cell, cap, resolve
from experiments.kinds.base import Kind, load

# A kind is imported when an experiment asks for it.
KINDS = {
    "time": "experiments.kinds.timing:Timing",
    "anchor": "experiments.kinds.timing:Anchor",
    "cache": "experiments.kinds.cache:Cache",
    "trace": "experiments.kinds.trace:Trace",
    "keys": "experiments.kinds.keys:Keys",
    "growth": "experiments.kinds.keys:Growth",
    "sharding": "experiments.kinds.sharding:Sharding",
    "calibration": "experiments.kinds.sharding:Calibration",
    "gate": "experiments.kinds.gate:Gate",
    "noise": "experiments.kinds.gate:Noise",
    "power": "experiments.kinds.gate:Power",
    "micro": "experiments.kinds.micro:Micro",
    "quality": "experiments.kinds.quality:Quality",
    "predictions": "experiments.kinds.predictions:Predictions",
}

__all__ = ["KINDS", "Kind", "expand", "find"]


@functools.cache
def find(name: str) -> Kind:
    """Return the kind of that name; raises KeyError where there is none."""
    kind: Kind = load(KINDS[name])()
    return kind


def expand(config: Config) -> list[Cell]:
    """Return the cells of a run.

    Cases come first, so that an interrupted run has its headline. A cell of which a cap makes
    another one is dropped: its samples would count as more processes.
    """
    kind = find(config.kind)
    cases, swept = kind.cells(config)
    cases = [cell if cell.kind == kind.name else find(cell.kind).as_case(cell) for cell in cases]
    swept = swept[: config.timing.max_cells or None]
    found: dict[str, Cell] = {}
    for cell in swept + cases if kind.swept_first else cases + swept:
        if cell.kind == kind.name and not cell.options:
            cell = dataclasses.replace(cell, options=config.options)
        sized = resolve(cell, sized=find(cell.kind).makes_tables)
        capped = cap(sized, config)
        found.setdefault(capped.key, capped)
    return list(found.values())
