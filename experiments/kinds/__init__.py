"""The kinds of experiments, as `Kind` objects.

Code for all kinds uses these objects; only code for one kind uses the module of that kind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from experiments.config.schema import Config, Distribution, UsageError
from experiments.config.sweep import SWEEP, Cell, title_of
from experiments.kinds.base import Kind, load

# Kinds by name; a module is imported on use.
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
    "serving": "experiments.kinds.serving:Serving",
}

__all__ = ["KINDS", "Kind", "expand", "find"]


@functools.cache
def find(name: str) -> Kind:
    """Return the kind of a name; raise KeyError for an unknown one."""
    kind: Kind = load(KINDS[name])()
    return kind


def expand(config: Config) -> list[Cell]:
    """Return the cells of a run, resolved and capped, in the order of its report.

    Cases come before the sweep, unless the kind says `sweep_first`. Cells that a cap makes equal,
    and arms of a cell with one key, are measured once: samples of the second would count as further
    processes of the first. timing.max_cells limits the cells of the sweep.

    Raises:
        UsageError: see `Kind.cells` and `resolve`.
    """
    kind = find(config.kind)
    case_cells, swept_cells = kind.cells(config)
    case_cells = [
        cell if cell.kind == kind.name else find(cell.kind).as_case(cell) for cell in case_cells
    ]
    swept_cells = swept_cells[: config.timing.max_cells or None]
    cells: dict[str, Cell] = {}
    for cell in (
        swept_cells + case_cells if kind.cell_kinds.sweep_first else case_cells + swept_cells
    ):
        if cell.kind == kind.name and not cell.options:
            cell = dataclasses.replace(cell, options=config.options)
        cell = cell.with_arms(*{arm.key: arm for arm in cell.arms}.values())
        sized = resolve(cell, sized=find(cell.kind).measurement.makes_tables)
        capped = cap(sized, config)
        cells.setdefault(dataclasses.replace(capped, has_exact_key=True).key, capped)
    counts = Counter(cell.key for cell in cells.values())
    return [
        dataclasses.replace(cell, has_exact_key=counts[cell.key] > 1) for cell in cells.values()
    ]


def resolve(cell: Cell, *, sized: bool) -> Cell:
    """Return the cell, completed by the tables of its trace file; other cells are unchanged.

    `sized` is True if tables will be built, so that their rows must be known.

    Raises:
        UsageError: the trace file is missing or unusable, or does not state the rows.
    """
    if cell.workload.distribution is not Distribution.trace:
        return cell
    from experiments.workloads import trace_files

    try:
        workload = trace_files.resolve(cell.workload, sized=sized)
    except trace_files.TraceError as error:
        raise UsageError(str(error)) from error
    title = title_of(workload) if cell.section == SWEEP else cell.title
    return dataclasses.replace(cell, workload=workload, title=title)


def cap(cell: Cell, config: Config) -> Cell:
    """Return the cell with tables and batches shrunk to the caps of the timing preset (smoke)."""
    rows, batch = config.timing.max_rows, config.timing.max_batch
    workload, scale = cell.workload, 1.0
    if batch and batch < workload.B:
        workload = dataclasses.replace(workload, B=batch)
    if rows:
        from experiments.workloads.workload import table_rows  # loads torch

        scale = min(1.0, rows / max(1, *table_rows(workload)))  # 0: unknown rows of a trace
    is_swept = cell.section == SWEEP and not cell.ranks
    title = title_of(workload) if is_swept else cell.title
    return dataclasses.replace(cell, workload=workload, rows_scale=scale, title=title)
