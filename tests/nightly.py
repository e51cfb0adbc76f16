"""What only `make nightly` runs: the tests of nightly.yaml, and more cases of some that it names.

`make nightly` sets EMBLIB_NIGHTLY and runs what is marked `nightly` or `more`.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
IS_NIGHTLY = "EMBLIB_NIGHTLY" in os.environ
_LISTS = yaml.safe_load((HERE / "nightly.yaml").read_text())
LEFT_OUT: dict[str, str] = _LISTS["left_out"]
MORE: dict[str, str] = _LISTS["more"]
COMMANDS: dict[str, str] = _LISTS["commands"]


def number(of_each_commit: int, of_each_night: int) -> int:
    """Return how many cases a test makes; the test is in the list `more`."""
    return of_each_night if IS_NIGHTLY else of_each_commit


@cache
def name_of(path: Path) -> str:
    """Return the path of a file as the lists have it."""
    return path.relative_to(HERE).as_posix()


def names(item: pytest.Item) -> Iterator[str]:
    """Yield the names under which the lists may have a test."""
    path = name_of(item.path)
    yield path
    if item.get_closest_marker("slow") is not None:
        yield f"{path} (slow)"
    yield f"{path}::{item.name.partition('[')[0]}"
    yield f"{path}::{item.name}"


def mark(items: list[pytest.Item]) -> None:
    """Mark what the lists name; skip what is left out, except in `make nightly`."""
    for item in items:
        for name in names(item):
            if name in LEFT_OUT:
                item.add_marker(pytest.mark.nightly)
                if not IS_NIGHTLY:
                    item.add_marker(pytest.mark.skip(reason=f"in make nightly: {LEFT_OUT[name]}"))
            if name in MORE:
                item.add_marker(pytest.mark.more)
