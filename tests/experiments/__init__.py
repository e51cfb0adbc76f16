"""Tests of the harness: configuration, workloads, timing, statistics, store and reports."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

# OmegaConf reads with the parser in Python: 7 % of the processor time of these tests.
if yaml.__with_libyaml__:
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc, assignment]

# A whole run of the first schema (one process a cell), kept so that such runs stay readable.
FIRST_SCHEMA = Path(__file__).parent / "first_schema" / "tt_vs_tbe"


def command_line(program: Any) -> Callable[[Sequence[str]], int]:
    """Return a main function of a module that has `add_arguments` and `run`."""

    def main(words: Sequence[str]) -> int:
        parser = argparse.ArgumentParser()
        program.add_arguments(parser)
        return int(program.run(parser.parse_args(words)))

    return main


# Runs the command lines that its argument lists; prints the status and the text of each.
_COMMANDS = """
import contextlib, io, json, sys
from experiments import cli
for words in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = cli.main(words)
    print(json.dumps([status, text.getvalue()]))
"""


def in_one_process(harness: Path, *commands: Sequence[str]) -> list[tuple[int, str]]:
    """Return the status and the text of `run.py WORDS` of a copy of the harness for each command.

    One interpreter runs all of them: loading torch and Hydra takes most of the time of a short one.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [sys.executable, "-c", _COMMANDS, json.dumps(commands)]
    done = subprocess.run(words, cwd=harness, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
