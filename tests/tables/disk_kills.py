"""Kills processes that write to a DiskStore and compares what is found with the last commit.

`python -m tests.tables.disk_kills random|calls|recovery DIRECTORY SEED` prints what it did. It
fails if a bit of a table, a state or a number is not that of the last commit that was
acknowledged, or of the one that was under way.
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
from torch import Tensor

from emblib import TableSpec
from emblib.optim import State
from emblib.tables.disk import DiskStore
from tests.tables.kills import Board, SelfKill, killed_at_call, killed_in

TABLES = [TableSpec(900, 8, "a"), TableSpec(1500, 8, "b"), TableSpec(600, 20, "c")]
STATES = [State("sum", per_row=True), State("m")]
ROWS = sum(spec.rows for spec in TABLES)
BULK = 4  # every so many epochs, everything is written


class Phase(IntEnum):
    """What a writer is doing."""

    OPENING = auto()
    PROTECTING = auto()
    WRITING = auto()
    COMMITTING = auto()
    OVERWRITING = auto()


def open_store(directory: Path) -> DiskStore:
    return DiskStore(directory, TABLES, torch.bfloat16, STATES, torch.float16)


def as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [t.view(torch.uint8) for t in tensors]


def rows_of(tensors: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
    """For each table its first row and `[rows, ...]` views of its weights and states, as bytes."""
    weights, sums, moments = tensors
    result, row, element = [], 0, 0
    for spec in TABLES:
        elements = slice(element, element + spec.rows * spec.dim)
        views = [weights[elements], sums[row : row + spec.rows], moments[elements]]
        result.append((row, [v.view(torch.uint8).view(spec.rows, -1) for v in views]))
        row, element = row + spec.rows, element + spec.rows * spec.dim
    return result


def write_rows(tensors: list[Tensor], rows: Tensor, seed: int) -> None:
    """New bytes in all that belongs to `rows`: any bytes, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    for (first, views), spec in zip(rows_of(tensors), TABLES, strict=True):
        mine = rows[(rows >= first) & (rows < first + spec.rows)] - first
        for view in views:
            fresh = torch.randint(0, 256, (mine.numel(), view.shape[1]), generator=generator)
            view[mine] = fresh.to(torch.uint8)


def write_all(tensors: list[Tensor], epoch: int) -> None:
    write_rows(tensors, torch.arange(ROWS), epoch)


def numbers_of(epoch: int) -> list[float]:
    return [float(epoch), 0.1 * epoch, float("inf"), -0.0]


def write_epoch(epoch: int, tensors: list[Tensor], protect: Callable[[Tensor], None]) -> None:
    """What happens to the rows in an epoch without a bulk write: some change more than once."""
    generator = torch.Generator().manual_seed(epoch)
    for part in range(4):
        count = int(torch.randint(1, 900, (), generator=generator))
        rows = torch.randint(0, ROWS, (count,), generator=generator)
        protect(rows)
        write_rows(tensors, rows.unique(), 10 * epoch + part)


def is_bulk(epoch: int) -> bool:
    return epoch % BULK == BULK - 1


class Model:
    """The tables as they must be, epoch by epoch, in ordinary memory."""

    def __init__(self) -> None:
        elements = sum(spec.rows * spec.dim for spec in TABLES)
        self.epoch = 0
        self.tensors = [
            torch.zeros(elements, dtype=torch.bfloat16),
            torch.zeros(ROWS),
            torch.zeros(elements, dtype=torch.float16),
        ]
        self.advance(1)

    def advance(self, epoch: int) -> None:
        while self.epoch < epoch:
            self.epoch += 1
            if self.epoch == 1 or is_bulk(self.epoch):
                write_all(self.tensors, self.epoch)
            else:
                write_epoch(self.epoch, self.tensors, lambda rows: None)

    def compare(self, store: DiskStore, acknowledged: int, *, under_way: bool) -> None:
        """`store` must be at commit `acknowledged`, or at the next one if that was under way."""
        found = int(store.committed_numbers[0])
        allowed = {acknowledged, acknowledged + 1} if under_way else {acknowledged}
        assert found in allowed, f"found commit {found}, acknowledged was {acknowledged}"
        self.advance(found)
        assert str(store.committed_numbers) == str(numbers_of(found))
        for mine, theirs in zip(self.tensors, [store.weights, *store.states], strict=True):
            assert torch.equal(*as_bytes([mine, theirs])), f"not what commit {found} left"


def make(directory: Path, model: Model) -> None:
    """A store with the tables of the model, committed."""
    store = open_store(directory)
    assert store.is_new
    with store.writing_everything():
        for target, source in zip([store.weights, *store.states], model.tensors, strict=True):
            target.copy_(source)
    store.commit(numbers_of(model.epoch))
    store.close()


def write(directory: Path, board: Board, epochs: int = 1 << 30) -> None:
    """What is killed: opens the store and writes epoch after epoch."""
    board.write(board.acknowledged, Phase.OPENING)
    store = open_store(directory)
    first = int(store.committed_numbers[0])
    tensors = [store.weights, *store.states]

    def protect(rows: Tensor) -> None:
        board.write(epoch - 1, Phase.PROTECTING)
        store.protect(rows)
        board.write(epoch - 1, Phase.WRITING)

    for epoch in range(first + 1, first + 1 + epochs):
        board.write(epoch - 1, Phase.WRITING)
        if is_bulk(epoch):
            board.write(epoch - 1, Phase.OVERWRITING)
            with store.writing_everything():
                write_all(tensors, epoch)
        else:
            write_epoch(epoch, tensors, protect)
        board.write(epoch - 1, Phase.COMMITTING)
        store.commit(numbers_of(epoch))
        board.write(epoch, Phase.WRITING)


def check(directory: Path, model: Model, board: Board) -> str:
    """Open what a killed writer left and compare; recreate it if a bulk write was interrupted."""
    phase = Phase(board.phase)
    under_way = phase == Phase.COMMITTING
    bulk = is_bulk(board.acknowledged + 1) and phase in (Phase.COMMITTING, Phase.OVERWRITING)
    try:
        store = open_store(directory)
    except RuntimeError as error:
        if not bulk or "mix old and new rows" not in str(error):
            raise
        shutil.rmtree(directory)
        make(directory, model)
        return "refused"
    assert not store.is_new
    model.compare(store, board.acknowledged, under_way=under_way)
    store.close()
    return "opened"


def at_random(directory: Path, seed: int, rounds: int) -> Counter[str]:
    """Writers killed in every phase, and some of those killed that open what they left."""
    chance = random.Random(seed)
    model, board, done = Model(), Board(), Counter[str]()
    make(directory, model)
    for number in range(rounds):
        target = list(Phase)[number % len(Phase)]
        board.write(model.epoch, 0)
        assert killed_in(board, target, lambda: write(directory, board), chance)
        at = Phase(board.phase)
        done[at.name] += 1
        for _ in range(chance.randrange(3)):
            again = Board()
            work = lambda again=again: write(directory, again, epochs=0)  # noqa: E731
            if at != Phase.OVERWRITING and not is_bulk(board.acknowledged + 1):
                done["opening again"] += killed_in(again, Phase.OPENING, work, chance)
        done[check(directory, model, board)] += 1
    return done


def watch(kill: SelfKill) -> None:
    """Every call by which a store changes a file, or orders such changes."""
    for name in ("pwrite", "fsync", "replace", "ftruncate", "unlink"):
        kill.watch(os, name)
    kill.watch(DiskStore, "_sync_files")
    kill.watch(torch.Tensor, "index_copy_")


def at_calls(directory: Path, seed: int, *, recovery: bool) -> Counter[str]:
    """A writer, or one that recovers, killed before every single call and within those that may be.

    After a call nothing but memory changes before the next one.
    """
    model, board, done, chance = Model(), Board(), Counter[str](), random.Random(seed)
    make(directory, model)

    def write_watched() -> None:
        watch(kill)
        write(directory, board, epochs=0 if recovery else BULK)

    for where in ("before", "within"):
        for call in itertools.count(1):
            board.write(model.epoch, Phase.WRITING)
            if recovery:
                work = lambda: write_and_stop(directory, board)  # noqa: E731
                assert killed_in(board, Phase.COMMITTING, work, chance)
                board.write(board.acknowledged, Phase.WRITING)
            kill = SelfKill(call, where)
            killed = killed_at_call(write_watched)
            done[check(directory, model, board)] += 1
            if not killed:
                break
            done[where] += 1
    return done


def write_and_stop(directory: Path, board: Board) -> None:
    """An epoch that is written, journaled, and never committed."""
    store = open_store(directory)
    epoch = int(store.committed_numbers[0])
    write_epoch(epoch + 1, [store.weights, *store.states], store.protect)
    board.write(epoch, Phase.COMMITTING)
    while True:
        pass


def main() -> None:
    """See the module."""
    mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if mode == "random":
        print(dict(at_random(directory, seed, rounds=40)))
    else:
        print(dict(at_calls(directory, seed, recovery=mode == "recovery")))


if __name__ == "__main__":
    main()
