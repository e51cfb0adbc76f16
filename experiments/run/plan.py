"""A dry run: the cells with what they need in memory and time, before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Column, Table

from experiments.config.schema import Config
from experiments.config.sweep import Cell
from experiments.report import text
from experiments.run.cell import dense_arms, fit_memory
from experiments.run.jobs import replicates, seconds_of
from experiments.run.progress import where
from experiments.run.session import Session
from experiments.timing import memory
from experiments.work.workload import dense_bytes, table_shapes

WIDTH = 120  # of the table where it is not a terminal's
BUILD_BYTES_PER_SECOND = 0.5e9  # tables written and checked


def show(cells: Sequence[Cell], config: Config, device: torch.device) -> int:
    """Print the table of points; returns exit status 0."""
    session = Session(config, device, "dry-run")
    heads = ("contenders", "tables as fp32", "processes", "at most")
    table = Table(Column("cell", no_wrap=True), *heads, box=None)
    total = 0.0
    for cell in cells:
        fitted = fit_memory(cell, session.over_ranks_of(cell))
        shapes = table_shapes(fitted.workload, scale=fitted.rows_scale)
        seconds = estimate(fitted, config) * replicates(cell, config)
        total += seconds
        scaled = f" ({100 * fitted.rows_scale:.3g} % of the rows)" * (fitted.rows_scale < 1)
        table.add_row(
            where(fitted),
            ", ".join(arm.key for arm in cell.arms),
            text.size(dense_bytes(shapes)) + scaled,
            str(replicates(cell, config)),
            text.seconds(seconds),
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    limit = config.timing.total_seconds
    bound = f", cut to about {limit:g} s by timing.total_seconds" if 0 < limit < total else ""
    console.print(
        f"\n{text.count(len(cells), 'cell')}; about {text.seconds(total)} at most{bound}; "
        f"{text.size(memory.available_bytes(device))} of memory free. Nothing was measured."
    )
    return 0


def estimate(cell: Cell, config: Config) -> float:
    """Seconds of one process with its tables, from above."""
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    built = dense_arms(cell) * dense_bytes(shapes)
    return seconds_of(cell, config) + built / BUILD_BYTES_PER_SECOND
