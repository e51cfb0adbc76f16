"""Kills processes that move rows between tiers and compares what is found with the last flush.

`python -m tests.dynamic.store_kills disk|sqlite|calls|recovery DIRECTORY SEED` prints what it did.
It fails if a row of either tier is not that of the last flush that returned, or of the one that was
under way, or if a row is there that should not be.
"""

import itertools
import os
import random
import sys
from collections import Counter
from enum import IntEnum, auto
from pathlib import Path

import torch

from emblib.dynamic.tiers.disk import RowFile
from emblib.dynamic.tiers.store import RowStore, StoredRows
from tests.dynamic.row_store_cases import FILES, TABLES, as_dict, contents, random_rows, take
from tests.tables.kills import Board, SelfKill, killed_at_call, killed_in

Table = dict[int, tuple[int, int, bytes]]
KEYS = 1200


class Phase(IntEnum):
    """What a writer is doing."""

    OPENING = auto()
    WRITING = auto()
    FLUSHING = auto()


def changes(epoch: int) -> list[tuple[str, int, torch.Tensor, int]]:
    """What happens in an epoch: kind, table, distinct keys, seed of their bytes."""
    chance = random.Random(epoch)
    generator = torch.Generator().manual_seed(epoch)
    result = []
    for part in range(5):
        count = chance.randrange(1, 300)
        keys = torch.randperm(KEYS, generator=generator)[:count] - KEYS // 2
        kind = chance.choice(["demote", "demote", "train", "train", "erase"])
        result.append((kind, chance.randrange(len(TABLES)), keys, 10 * epoch + part))
    return result


class Model:
    """All rows as they must be, flush by flush."""

    def __init__(self) -> None:
        self.epoch = 0
        self.tables: list[Table] = [{} for _ in TABLES]

    def advance(self, epoch: int) -> None:
        while self.epoch < epoch:
            self.epoch += 1
            for kind, t, keys, seed in changes(self.epoch):
                if kind == "erase":
                    for key in keys.tolist():
                        self.tables[t].pop(key, None)
                else:
                    self.tables[t] |= as_dict(random_rows(keys, TABLES[t].row_bytes, seed))

    def compare(self, store: RowStore, acknowledged: int, *, under_way: bool) -> None:
        """`store` must be at flush `acknowledged`, or at the next one if that was under way."""
        found = int(store.note or 0)
        allowed = {acknowledged, acknowledged + 1} if under_way else {acknowledged}
        assert found in allowed, f"found flush {found}, acknowledged was {acknowledged}"
        self.advance(found)
        for t, table in enumerate(self.tables):
            assert contents(store, t) == table, f"not what flush {found} left"


class Above:
    """The tier above: rows of each table by key."""

    def __init__(self) -> None:
        self.tables: list[dict[int, tuple[int, int]]] = [{} for _ in TABLES]

    def rows(self, t: int) -> list[StoredRows]:
        """What it holds, each row from the change that wrote it last."""
        by_seed: dict[int, list[int]] = {}
        for key, (seed, _) in self.tables[t].items():
            by_seed.setdefault(seed, []).append(key)
        parts = []
        for seed, kept in by_seed.items():
            keys = next(keys for _, _, keys, s in changes(seed // 10) if s == seed)
            rows = random_rows(keys, TABLES[t].row_bytes, seed)
            parts.append(rows.at(torch.isin(keys, torch.tensor(kept))))
        return parts


def write_epoch(epoch: int, store: RowStore, above: Above) -> None:
    for kind, t, keys, seed in changes(epoch):
        mine = above.tables[t]
        if kind == "train":
            take(store, t, keys)
            mine |= {key: (seed, 0) for key in keys.tolist()}
            continue
        if kind == "erase":
            store.erase(t, keys)
        else:
            store.put(t, random_rows(keys, TABLES[t].row_bytes, seed))
        for key in keys.tolist():
            mine.pop(key, None)


def open_store(kind: str, directory: Path) -> RowStore:
    directory.mkdir(exist_ok=True)
    store = FILES[kind](directory)
    store.open(TABLES)
    return store


def write(kind: str, directory: Path, board: Board, epochs: int = 1 << 30) -> None:
    """What is killed: opens the store and goes on, epoch after epoch."""
    acknowledged = board.acknowledged
    board.write(acknowledged, Phase.OPENING)
    store, above = open_store(kind, directory), Above()
    first = int(store.note or 0)
    for epoch in range(first + 1, first + 1 + epochs):
        board.write(epoch - 1, Phase.WRITING)
        write_epoch(epoch, store, above)
        board.write(epoch - 1, Phase.FLUSHING)
        store.flush([above.rows(t) for t in range(len(TABLES))], str(epoch))
        board.write(epoch, Phase.WRITING)
    store.close()


def check(kind: str, directory: Path, model: Model, board: Board) -> None:
    """Open what a killed writer left, and compare."""
    store = open_store(kind, directory)
    model.compare(store, board.acknowledged, under_way=board.phase == Phase.FLUSHING)
    store.close()


def at_random(kind: str, directory: Path, seed: int, rounds: int) -> Counter[str]:
    """Writers killed in every phase, and some of those that open what they left."""
    chance, model, board, done = random.Random(seed), Model(), Board(), Counter[str]()
    for number in range(rounds):
        target = list(Phase)[number % len(Phase)]
        after = model.epoch + (0 if target == Phase.OPENING else chance.randrange(4))
        board.write(model.epoch, 0)
        work = lambda: write(kind, directory, board)  # noqa: E731
        assert killed_in(board, target, work, chance, after)
        done[Phase(board.phase).name] += 1
        again = Board()
        reopen = lambda again=again: write(kind, directory, again, epochs=0)  # noqa: E731
        done["opening again"] += killed_in(again, Phase.OPENING, reopen, chance)
        check(kind, directory, model, board)
    done["flushes"] = model.epoch
    return done


def watch(kill: SelfKill) -> None:
    """Every call by which a DiskRows changes a file, or orders such changes."""
    for name in ("pwrite", "fsync", "replace", "ftruncate", "posix_fallocate"):
        kill.watch(os, name)
    kill.watch(RowFile, "flush")
    kill.watch(torch.Tensor, "index_copy_")


def write_and_stop(directory: Path, board: Board) -> None:
    """An epoch that is written, journaled, and never flushed."""
    store = open_store("disk", directory)
    epoch = int(store.note or 0)
    write_epoch(epoch + 1, store, Above())
    board.write(epoch, Phase.FLUSHING)
    while True:
        pass


def at_calls(directory: Path, seed: int, *, recovery: bool) -> Counter[str]:
    """A writer, or one that recovers, killed before every single call and within those that may be.

    After a call nothing but memory changes before the next one.
    """
    model, board, done, chance = Model(), Board(), Counter[str](), random.Random(seed)

    def write_watched() -> None:
        watch(kill)
        write("disk", directory, board, epochs=0 if recovery else 1)

    for where in ("before", "within"):
        for call in itertools.count(1):
            board.write(model.epoch, Phase.WRITING)
            if recovery:
                write_some(directory, board, epochs=1)
                work = lambda: write_and_stop(directory, board)  # noqa: E731
                assert killed_in(board, Phase.FLUSHING, work, chance)
                board.write(board.acknowledged, Phase.WRITING)
            kill = SelfKill(call, where)
            killed = killed_at_call(write_watched)
            check("disk", directory, model, board)
            if not killed:
                break
            done[where] += 1
    return done


def write_some(directory: Path, board: Board, epochs: int) -> None:
    """So that there is something to lead back to."""
    assert not killed_at_call(lambda: write("disk", directory, board, epochs))


def main() -> None:
    """See the module."""
    mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if mode in FILES:
        print(dict(at_random(mode, directory, seed, rounds=18)))
    else:
        print(dict(at_calls(directory, seed, recovery=mode == "recovery")))


if __name__ == "__main__":
    main()
