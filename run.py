"""The harness: `python run.py +experiment=tt_vs_tbe`; `python run.py --help` lists commands."""

import sys

from experiments.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
