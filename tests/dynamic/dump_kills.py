"""Kills processes that write a dump and looks at what is in the directory: the old one or the new.

`python -m tests.dynamic.dump_kills calls|random DIRECTORY SEED` prints what it did.
"""

import itertools
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emblib.dynamic.saving import dump_tables
from emblib.dynamic.saving.dump_tables import Header
from emblib.dynamic.saving.dumps import DumpError, Report
from emblib.dynamic.saving.entries import Entries
from tests.dynamic.entry_cases import assert_same, make, only, table
from tests.tables.kills import Board, SelfKill, killed_at_call, killed_in

CALLS = ("pwrite", "fsync", "replace", "unlink", "open")


def entries(number: int, size: int) -> Entries:
    """Those of dump number `number`: few arrays, as every call that writes one costs a kill."""
    found = make(size + number, seed=number)
    return replace(found, rows={"weight": found.rows["weight"]})


def write(directory: Path, number: int, size: int = 60, report: Report | None = None) -> None:
    """Dump number `number`; no two are alike."""
    dump_tables.write(
        directory, [table(entries(number, size))], Header(str(number), 50 + number), report=report
    )


def check(directory: Path, old: int, new: int, size: int = 60) -> str:
    """What is in the directory: dump `old` (-1: none) or `new`, whole."""
    if old < 0 and not list(directory.glob("*.json")):
        with pytest.raises(DumpError, match="holds no whole dump"):
            dump_tables.read(directory)
        return "absent"
    dump = dump_tables.read(directory)
    number = dump.clock - 50
    assert number in (old, new), f"found {number}, was {old}, under way {new}"
    assert_same(only(dump), entries(number, size))
    return "new" if number == new else "old"


def at_calls(directory: Path) -> Counter[str]:
    """Killed before, within and after every single call by which a writer changes a file."""
    done = Counter[str]()
    for where, old in (("before", -1), ("before", 1), ("within", -1), ("within", 1), ("after", 1)):
        for call in itertools.count(1):
            shutil.rmtree(directory, ignore_errors=True)
            if old >= 0:
                write(directory, old)
            kill = SelfKill(call, where)

            def write_watched(kill: SelfKill = kill) -> None:
                for name in CALLS:
                    kill.watch(os, name)
                write(directory, 2)

            killed = killed_at_call(write_watched)
            done[check(directory, old, 2)] += 1
            if not killed:
                break
            done[where] += 1
            left = len(os.listdir(directory))
            write(directory, 3)
            assert check(directory, -1, 3) == "new"
            assert len(os.listdir(directory)) <= max(left, 6), "files of killed writers stay"
    return done


def at_random(directory: Path, seed: int, rounds: int) -> Counter[str]:
    """Writers of large dumps killed at any time, one after the other in one directory."""
    chance, done, old = random.Random(seed), Counter[str](), -1
    size = 20_000
    for new in range(1, rounds + 1):
        board = Board()

        def work(new: int = new, board: Board = board) -> None:
            board.write(0, 1)
            write(directory, new, size, lambda progress: board.write(0, 2))

        if not killed_in(board, new % 2 + 1, work, chance):
            done["ended"] += 1
        found = check(directory, old, new, size)
        done[found] += 1
        old = new if found == "new" else old
    write(directory, rounds + 1, size)
    assert check(directory, old, rounds + 1, size) == "new"
    return done


def main() -> None:
    """See the module."""
    mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    print(dict(at_calls(directory) if mode == "calls" else at_random(directory, seed, 30)))


if __name__ == "__main__":
    main()
