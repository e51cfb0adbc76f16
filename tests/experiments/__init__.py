"""Tests of the harness: configuration, workloads, timing, statistics, store and reports."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# A whole run of the first schema (one process a cell), kept so that such runs stay readable.
FIRST_SCHEMA = Path(__file__).parent / "first_schema" / "tt_vs_tbe"


def command_line(program: Any) -> Callable[[Sequence[str]], int]:
    """Return a main function of a module that has `add_arguments` and `run`."""

    def main(words: Sequence[str]) -> int:
        parser = argparse.ArgumentParser()
        program.add_arguments(parser)
        return int(program.run(parser.parse_args(words)))

    return main
