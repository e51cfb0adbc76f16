"""A run directory to results.csv, figures, report.md and index.html; repeatable at any time."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.config.schema import UsageError
from experiments.paths import ROOT
from experiments.report.data import Run
from experiments.results.store import POINTS, RunStore, has_records

__all__ = ["ReportSummary", "Run", "add_arguments", "run", "write_report"]

FAILED_STATUSES = ("wrong", "error", "timeout")


@dataclass(frozen=True)
class ReportSummary:
    """What the terminal shows of a report."""

    answer: str
    failures: int  # records of FAILED_STATUSES; out of memory and unsupported are results


def write_report(path: Path, *, draws_figures: bool = True) -> ReportSummary:
    """Write every derived file of the run in `path` from its raw records; measure nothing.

    Args:
        path: directory of the run.
        draws_figures: whether the figures are drawn; without, the pages have their titles and
            captions only. Kinds with reports of their own ignore it.

    Raises:
        UsageError: the run is of a kind that this harness does not have.
    """
    from experiments.report import document, pages

    run_data = Run.read(path)
    num_failed = sum(r["status"] in FAILED_STATUSES for r in run_data.records)
    if (answer := run_data.kind.rebuild(path)) is not None:
        return ReportSummary(answer, num_failed)
    store = RunStore(path)
    always = {"results", *run_data.kind.frames([], run_data.config.report)}
    for name, table in run_data.frames.items():
        if len(table) or name in always:
            store.write_table(name, table)
    for name, content in run_data.kind.write_files(run_data).items():
        store.write(name, content)
    page = pages.page(run_data)
    document.write(path, page, draws_figures=draws_figures)
    return ReportSummary(" ".join(page.answer), num_failed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `report`."""
    parser.description = (
        "Rebuild results.csv, the figures, report.md and index.html of runs from their raw "
        "records; nothing is measured. A JSON file of pytest-benchmark becomes a run first."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run, or a JSON file")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "reports" / "runs",
        help="where the results of a JSON file are stored",
    )


def run(arguments: argparse.Namespace) -> int:
    """Rebuild every report that can be built; return 2 where an argument is no run."""
    status = 0
    for path in arguments.runs:
        if path.suffix == ".json":
            from experiments.kinds.micro import import_benchmarks

            path = import_benchmarks(path, arguments.folder)
        if not (path / "config.yaml").is_file() or not has_records(path):
            print(
                f"error: {path} is not a run: it has no config.yaml next to a {POINTS}. "
                "Runs are in reports/runs/<experiment>/<time>-<pid>, references in "
                "reports/reference/<device>/<experiment>",
                file=sys.stderr,
            )
            status = 2
            continue
        try:
            answer = write_report(path).answer
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        else:
            print(f"{answer}\nreport: {path / 'index.html'}\n")
    return status
