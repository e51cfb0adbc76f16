"""`python -m experiments.report RUN...`: rebuild reports from their raw records."""

import argparse
import sys

from experiments import report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.report")
    report.add_arguments(parser)
    sys.exit(report.run(parser.parse_args()))
