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
    """A display that counts jobs, estimates the remaining time and prints a line per job."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.total, self.done = total, 0
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
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def begin(self, activity: str) -> None:
        """Show the present activity on the live line."""
        self.bar.update(self.task, description=activity)

    def finish(self, line: str) -> None:
        """Count a job as done; print its line unless that is empty."""
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        if line:
            self.console.print(f"[{self.done}/{self.total}] {line}", markup=False)

    def skip(self) -> None:
        """Remove a job that will not be measured from the total."""
        self.total -= 1
        self.bar.update(self.task, total=self.total)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=False)


def cell_words(cell: Cell) -> str:
    """Return section, sizes and distribution of a cell in a short line."""
    w = cell.workload
    ids = f" s={w.s:g}" if w.distribution.value == "zipf" else f" {w.distribution.value}"
    tables = f" T={w.T}" if w.T > 1 else ""
    world = f" W={cell.ranks}" * bool(cell.ranks)
    return f"{cell.section:<12}{tables} D={w.D} B={w.B} L={w.L}{ids}{world}"
