"""The command `compare`: one experiment on several machines, and published figures next to ours."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path

from experiments.config.schema import UsageError, folder_name
from experiments.paths import ROOT
from experiments.results.store import has_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `compare`."""
    parser.description = (
        "Compare one experiment on several machines. Runs are directories of reports/runs or "
        "reports/reference, bundles (.zip), or either on another machine (HOST:PATH, copied by "
        "scp); the first is what the others are compared with. "
        "Bundles of several experiments give a page per experiment that all have. Exit status: 0 "
        "done, 2 wrong usage, 6 nothing comparable; with --overview check, 1 where the page is out "
        "of date."
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path)
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the page, by default reports/compare/EXPERIMENT; of several pages the "
        "folder of theirs",
    )
    parser.add_argument(
        "--overview",
        nargs="?",
        choices=("print", "write", "check"),
        const="print",
        help="instead: every published figure and its verdict, from the committed references and "
        "each RUN; `write` puts the page into reports/published/README.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write comparisons, or the page of published figures; return the exit status.

    The exit status is 0; 1 if `--overview check` finds another page; 6 if the runs cannot be
    compared, or 2 because there are fewer than two or a path is not a run.

    Raises:
        UsageError: a path is named twice, damaged or cannot be copied, or, with --overview, no run.
    """
    from experiments.bundle.archive import BundleError
    from experiments.compare import machines, pages

    if arguments.overview:
        if other_paths := [path for path in arguments.runs if not has_records(path)]:
            raise UsageError(f"{other_paths[0]} is not a run: --overview takes directories of runs")
        text = pages.overview(arguments.runs).markdown()
        if arguments.overview == "print":
            print(text)
        elif arguments.overview == "write":
            pages.OVERVIEW.write_text(text)
        elif not pages.OVERVIEW.is_file() or pages.OVERVIEW.read_text() != text:
            name = pages.OVERVIEW.relative_to(ROOT)
            print(f"{name} is out of date: run `{pages.COMMAND} write`")
            return 1
        return 0
    resolved_paths = [path.resolve() for path in arguments.runs]
    if repeated_paths := [path for path, n in Counter(resolved_paths).items() if n > 1]:
        raise UsageError(f"{repeated_paths[0]} is named twice: a run is compared with other runs")
    run_words = shlex.join(
        str(path) if machines.is_remote(path) else os.path.relpath(path) for path in arguments.runs
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            runs = [machines.fetch(path, Path(scratch)) for path in arguments.runs]
            comparisons = machines.group_by_experiment(runs, Path(scratch))
            for experiment, paths in comparisons:
                out = arguments.out
                if out is not None and len(comparisons) > 1:
                    out = out / folder_name(experiment)
                page = pages.write(paths, out, f"python run.py compare {run_words}")
                if page.is_relative_to(ROOT):
                    page = page.relative_to(ROOT)
                print(f"\nreport: {page}")
    except BundleError as error:
        raise UsageError(str(error)) from error
    except machines.NotComparable as error:
        print(f"error: {error}", file=sys.stderr)
        is_wrong_usage = len(arguments.runs) < 2 or any(
            not path.is_dir() and path.suffix != ".zip" and not machines.is_remote(path)
            for path in arguments.runs
        )
        return 2 if is_wrong_usage else 6
    return 0
