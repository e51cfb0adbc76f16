"""`python -m experiments.report RUN_DIRECTORY...`: rebuild reports from their raw records."""

import sys
from pathlib import Path

from experiments.report import write_report

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(write_report(Path(argument)).answer)
