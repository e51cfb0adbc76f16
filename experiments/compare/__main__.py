"""`python -m experiments.compare RUN RUN ... [--out DIR]`: one experiment on several machines.

Runs are directories of reports/runs or reports/reference. The first is what the others are compared
with. Exit status: 0 done, 2 wrong usage, 6 nothing comparable.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.paths import ROOT


def main(arguments: Sequence[str]) -> int:
    """Write the comparison and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the page; reports/compare/EXPERIMENT")
    parsed = parser.parse_args(arguments)
    from experiments.compare import machines, pages

    words = " ".join(os.path.relpath(path) for path in parsed.runs)
    command = f"python -m experiments.compare {words}"
    try:
        page = pages.write(parsed.runs, parsed.out, command)
    except machines.NotComparable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if any(not path.is_dir() for path in parsed.runs) else 6
    print(f"\nreport: {page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
