"""The command `report`: write tables, figures and pages of a run from its raw records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.config.schema import UsageError
from experiments.paths import ROOT
from experiments.report.data import Run
from experiments.results.store import POINTS, RunStore, has_records

__all__ = ["Run", "add_arguments", "run", "write_report"]


def write_report(path: Path, *, draws_figures: bool = True) -> str:
    """Write every derived file of a run from its raw records; return the answer to its question.

    Args:
        path: directory of the run.
        draws_figures: False for pages with titles and captions of figures only. Kinds with reports
            of their own ignore it.

    Raises:
        UsageError: the run is damaged, or of a kind that this harness does not have.
    """
    from experiments.report import document, pages

    run_data = Run.read(path)
    if (answer := run_data.kind.write_special_report(path)) is not None:
        return answer
    store = RunStore(path)
    always = {"results", *run_data.kind.frames([], run_data.config.report)}
    for name, table in run_data.frames.items():
        if len(table) or name in always:
            store.write_table(name, table)
    for name, content in run_data.kind.write_files(run_data).items():
        store.write(name, content)
    page = pages.page_of(run_data)
    document.write(path, page, draws_figures=draws_figures)
    return " ".join(page.answer)


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
    """Rebuild the report of every undamaged run; return 2 if an argument is not one.

    Raises:
        UsageError: a JSON file is not that of pytest-benchmark; later arguments are not rebuilt.
    """
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
            answer = write_report(path)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        else:
            print(f"{answer}\nreport: {path / 'index.html'}\n")
    return status
