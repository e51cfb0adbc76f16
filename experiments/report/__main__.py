"""`python -m experiments.report RUN...`: rebuild reports from their raw records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.results.store import POINTS, has_records


def main(arguments: Sequence[str]) -> int:
    """Every report that can be built is; 2 where one of the arguments is no run."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report",
        description="Rebuild results.csv, the figures, report.md and index.html of runs from their "
        "raw records; nothing is measured.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's directory")
    status = 0
    for path in parser.parse_args(arguments).runs:
        if not (path / "config.yaml").is_file() or not has_records(path):
            print(
                f"error: {path} is not a run: it has no config.yaml with a {POINTS} beside it. "
                "Runs are in reports/runs/<experiment>/<time>-<pid>, references in "
                "reports/reference/<device>/<experiment>",
                file=sys.stderr,
            )
            status = 2
            continue
        from experiments.report import write_report

        print(f"{write_report(path).answer}\nreport: {path / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
