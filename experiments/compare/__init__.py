"""One experiment on several machines side by side, and published figures next to ours."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from experiments.paths import ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `compare`."""
    parser.description = (
        "Compare one experiment on several machines. Runs are directories of reports/runs or "
        "reports/reference; the first is what the others are compared with. Exit status: 0 done, "
        "2 wrong usage, 6 nothing comparable; with --overview check, 1 where the page is out of "
        "date."
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the page; reports/compare/EXPERIMENT")
    parser.add_argument(
        "--overview",
        nargs="?",
        choices=("print", "write", "check"),
        const="print",
        help="instead: every published figure and its verdict, from the committed references and "
        "each RUN; `write` puts the page into reports/published/README.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write a comparison, or the page of published figures; return the exit status."""
    from experiments.compare import machines, pages

    if arguments.overview:
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
    words = " ".join(os.path.relpath(path) for path in arguments.runs)
    try:
        page = pages.write(arguments.runs, arguments.out, f"python run.py compare {words}")
    except machines.NotComparable as error:
        print(f"error: {error}", file=sys.stderr)
        usage = len(arguments.runs) < 2 or any(not path.is_dir() for path in arguments.runs)
        return 2 if usage else 6
    print(f"\nreport: {page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}")
    return 0
