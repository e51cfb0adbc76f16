"""The output on the terminal during a run: a live line on a TTY, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.config.sweep import Cell


class Display:
    """A display that counts jobs, estimates the remaining time and prints lines about them.

    The live line is shown within a `with` statement, and only on a terminal.

    Attributes:
        num_jobs: number of jobs; `skip` lowers it.
        num_done: number of jobs that are finished.
    """

    def __init__(self, num_jobs: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.num_jobs, self.num_done = num_jobs, 0
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left  {task.description}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=num_jobs)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def begin(self, activity: str) -> None:
        """Show `activity` on the live line."""
        self.bar.update(self.task, description=activity)

    def finish(self, line: str) -> None:
        """Count a job as done, and print `line` unless it is empty."""
        self.num_done += 1
        self.bar.update(self.task, completed=self.num_done)
        if line:
            self.console.print(f"[{self.num_done}/{self.num_jobs}] {line}", markup=False)

    def skip(self) -> None:
        """Remove a job that will not be measured from the number of jobs."""
        self.num_jobs -= 1
        self.bar.update(self.task, total=self.num_jobs)

    def say(self, line: str) -> None:
        """Print a line above the live line."""
        self.console.print(line, markup=False)


def describe_cell(cell: Cell) -> str:
    """Return section, sizes and distribution of a cell in a short line."""
    workload, distribution = cell.workload, cell.workload.distribution.value
    ids = f" s={workload.s:g}" if distribution == "zipf" else f" {distribution}"
    tables = f" T={workload.T}" if workload.T > 1 else ""
    sizes = f"{tables} D={workload.D} B={workload.B} L={workload.L}"
    world = f" W={cell.ranks}" if cell.ranks else ""
    return f"{cell.section:<12}{sizes}{ids}{world}"
