"""A run directory to results.csv, figures, report.md and index.html; repeatable at any time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.report.data import Run
from experiments.results.store import RunStore

__all__ = ["Run", "Summary", "write_report"]

BROKEN = ("wrong", "error", "timeout")


@dataclass(frozen=True)
class Summary:
    """What the terminal shows of a report."""

    answer: str
    failures: int  # wrong or broken; running out of memory and unsupported tasks are results


def write_report(path: Path) -> Summary:
    """Write every derived file of the run in `path` from its raw records."""
    from experiments.report import document, pages

    run = Run.read(path)
    bad = sum(r["status"] in BROKEN for r in run.records)
    if (answer := run.kind.rebuild(path)) is not None:
        return Summary(answer, bad)
    store = RunStore(path)
    own = {"results", *run.kind.frames([], run.config.report)}
    for name, table in run.frames.items():
        if len(table) or name in own:
            store.write_table(name, table)
    for name, content in run.kind.write_files(run).items():
        store.write(name, content)
    page = pages.page(run)
    document.write(path, page)
    return Summary(" ".join(page.answer), bad)
