"""Kills processes that train a growing dynamic table and dump it, and goes on from the last dump.

`python -m tests.dynamic.dynamic_kills calls|random DIRECTORY SEED` prints what it did. It fails if
the dump that is found is not whole, not the last one that was acknowledged or the one that was
under way, or if anything in it is not what training without a stop comes to.
"""

import itertools
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from enum import IntEnum, auto
from pathlib import Path

import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, optim
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.saving.dump_tables import read_header
from emblib.init import Uniform
from tests.dynamic.dynamic_cases import assert_same_content, batch
from tests.tables.kills import Board, SelfKill, killed_at_call, killed_in

WHOLE = 2  # every so many dumps, all is dumped over the last; else what changed since


class Phase(IntEnum):
    """What a process is doing."""

    LOADING = auto()
    TRAINING = auto()
    GROWING = auto()
    DUMPING = auto()


def make() -> DynamicEmbeddingBags:
    """Room for all keys there will be, but not from the beginning."""
    spec = DynamicSpec(1 << 16, 4, name="items", initial_capacity=32, initializer=Uniform(-1, 1))
    return DynamicEmbeddingBags([spec], optim.RowwiseAdagrad(0.1), feature_tables=[0, 0, 0], seed=0)


def step(module: DynamicEmbeddingBags) -> None:
    """The next one: each has keys that none before it had."""
    number = module.step
    out = module(*batch(number, distinct=200 * (number + 1), length=120))
    (out.square().sum() + out.sum()).backward()


def load(directory: Path, module: DynamicEmbeddingBags) -> None:
    """What was dumped last: the whole dump, and the changes since if there are any."""
    if not list((directory / "whole").glob("*.json")):
        return
    module.load(directory / "whole")
    if not list((directory / "changes").glob("*.json")):
        return
    if read_header(directory / "changes").clock > module.index.tick:
        module.load(directory / "changes")


def dump(directory: Path, module: DynamicEmbeddingBags, number: int, since: int) -> None:
    """Changes are told since the last whole dump, so the last ones are enough."""
    if number % WHOLE == 0:
        module.save(directory / "whole")
    else:
        module.save(directory / "changes", since=since)


def work(directory: Path, board: Board, dumps: int = 1 << 30) -> None:
    """What is killed."""
    board.write(board.acknowledged, Phase.LOADING)
    watch_growth(board)
    module = make()
    module.track_evictions()
    load(directory, module)
    since = module.index.tick - module.index.tick % (2 * WHOLE)
    for number in range(module.index.tick // 2, module.index.tick // 2 + dumps):
        # Dump n is after step 2 n, so that all can be told from the tick.
        board.write(board.acknowledged, Phase.DUMPING)
        if number % WHOLE == 0:
            module.track_evictions().restart(module.index.tick)
            since = module.index.tick
        elif module.eviction_log is not None and module.eviction_log.complete_from(0) > since:
            module.track_evictions().restart(since)  # nothing ever leaves this table
        dump(directory, module, number, since)
        board.write(module.index.tick, Phase.TRAINING)
        for _ in range(2):
            step(module)


def watch_growth(board: Board) -> None:
    """Tell the board while a table grows."""
    split: Callable[..., None] = HashIndex._split_buckets

    def told(index: HashIndex, *arguments: object) -> None:
        board.write(board.acknowledged, Phase.GROWING)
        split(index, *arguments)
        board.write(board.acknowledged, Phase.TRAINING)

    HashIndex._split_buckets = told  # type: ignore[method-assign]


class Reference:
    """Training without a stop."""

    def __init__(self) -> None:
        self.module = make()

    def check(self, directory: Path, acknowledged: int) -> str:
        """What is found must be the last dump that was acknowledged, or the next."""
        found = make()
        load(directory, found)
        tick = found.index.tick
        assert tick in (acknowledged, acknowledged + 2), f"found {tick}, had {acknowledged}"
        if self.module.index.tick > tick:
            self.module = make()
        while self.module.index.tick < tick:
            step(self.module)
        assert_same_content(self.module, found)
        return "old" if tick == acknowledged else "new"


def at_calls(directory: Path) -> Counter[str]:
    """Killed before and within every call that changes a file or splits buckets."""
    reference, done = Reference(), Counter[str]()
    for where in ("before", "within"):
        for call in itertools.count(1):
            shutil.rmtree(directory, ignore_errors=True)
            board, kill = Board(), SelfKill(call, where)

            def watched(board: Board = board, kill: SelfKill = kill) -> None:
                for name in ("pwrite", "fsync", "replace", "unlink"):
                    kill.watch(os, name)
                kill.watch(HashIndex, "_split_buckets")
                work(directory, board, dumps=3)

            killed = killed_at_call(watched)
            done[Phase(board.phase).name] += killed
            done[reference.check(directory, board.acknowledged)] += 1
            if not killed:
                break
    return done


def at_random(directory: Path, seed: int, rounds: int) -> Counter[str]:
    """One training that is killed again and again, and goes on from its last dump."""
    chance, reference, done, acknowledged = random.Random(seed), Reference(), Counter[str](), 0
    for number in range(rounds):
        board = Board()
        board.write(acknowledged, 0)
        target = list(Phase)[number % len(Phase)]
        after = acknowledged + 2 * (number % 3)
        assert killed_in(board, target, lambda: work(directory, board), chance, after)  # noqa: B023
        done[Phase(board.phase).name] += 1
        found = reference.check(directory, board.acknowledged)
        done[found] += 1
        acknowledged = reference.module.index.tick
    return done


def main() -> None:
    """See the module."""
    mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    print(dict(at_calls(directory) if mode == "calls" else at_random(directory, seed, 24)))


if __name__ == "__main__":
    main()
