"""`python -m experiments.doctor`: what is here, what works, what would make measurements better.

The exit status is 0 unless something that the harness needs is broken; a machine that could be
better is no error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.machine import hardware, software
from experiments.machine.findings import Check, Finding, State, detect_rank_failures

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {State.ok: "[green]✓[/]", State.note: "[yellow]•[/]", State.broken: "[red]✗[/]"}
CHECKS: dict[str, Check] = {
    "Packages": software.packages,
    "emblib": software.emblib_libraries,
    "Contenders": software.contenders,
    "Processor": hardware.processor,
    "Memory": hardware.memory,
    "GPU": hardware.gpus,
    "Permissions": hardware.permissions,
    "Tools": software.tools,
}


def examine(checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """All findings, section by section."""
    return [
        finding
        for section, check in checks.items()
        for finding in detect_rank_failures(section, check)
    ]


def as_json(findings: Sequence[Finding]) -> str:
    """For other programs."""
    broken = [f.what for f in findings if f.state is State.broken]
    found = {"broken": broken, "findings": [f.describe() for f in findings]}
    return json.dumps(found, indent=1, ensure_ascii=False)


def show(findings: Sequence[Finding], width: int | None = None) -> None:
    """A table a section, and at the end what to do."""
    from rich.console import Console

    console = Console(highlight=False, width=width)
    for section in dict.fromkeys(f.section for f in findings):
        own = [f for f in findings if f.section == section]
        _print(console, section, [(_mark(f), f.what, f.found) for f in own])
    for state, title in (
        (State.broken, "Broken, and needed"),
        (State.note, "What would make measurements better"),
    ):
        advised = [f for f in findings if f.state is state and f.advice]
        if advised:
            _print(console, title, [(MARKS[state], f.what, f.advice) for f in advised])
    console.print(_verdict(findings))


def _print(console: Console, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """A title, and below it (mark, what, words) line by line."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=1)
    table.add_column(min_width=26)
    table.add_column(overflow="fold")
    for mark, what, words in rows:
        table.add_row(mark, Text(what), Text(words))
    console.print(Text(title, style="bold"))
    console.print(Padding(table, (0, 0, 1, 2)))


def _mark(finding: Finding) -> str:
    absent = finding.state is State.ok and finding.found.startswith("not ")
    return "[dim]–[/]" if absent else MARKS[finding.state]


def _verdict(findings: Sequence[Finding]) -> str:
    broken = sum(f.state is State.broken for f in findings)
    if broken:
        return f"[red]{broken} of {len(findings)} findings must be repaired before measuring.[/]"
    notes = sum(f.state is State.note for f in findings)
    return f"[green]Ready to measure.[/] {notes} of {len(findings)} findings could be better."


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 where something needed is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.doctor",
        description="What is installed and works here, and what would make measurements better.",
    )
    parser.add_argument("--json", action="store_true", help="for other programs")
    chosen = parser.parse_args(words)
    findings = examine()
    if chosen.json:
        print(as_json(findings))
    else:
        show(findings)
    return int(any(f.state is State.broken for f in findings))


if __name__ == "__main__":
    sys.exit(main())
