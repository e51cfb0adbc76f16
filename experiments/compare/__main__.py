"""`python -m experiments.compare RUN RUN ... [--out DIR]`, or `--overview [write | check]`."""

import argparse
import sys

from experiments import compare

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.compare")
    compare.add_arguments(parser)
    sys.exit(compare.run(parser.parse_args()))
