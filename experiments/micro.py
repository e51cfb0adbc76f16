"""`python -m experiments.micro RUN.json`: store results of pytest-benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.schema import UsageError
from experiments.kinds.micro import take
from experiments.paths import ROOT
from experiments.report import write_report


def main(arguments: Sequence[str]) -> int:
    """Store the results; return 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m experiments.micro", description=__doc__)
    parser.add_argument("json", type=Path, nargs="+", help="of pytest --benchmark-json=FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / "reports" / "runs")
    parsed = parser.parse_args(arguments)
    for path in parsed.json:
        try:
            directory = take(path, parsed.folder)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(write_report(directory).answer)
        print(f"report: {directory / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
