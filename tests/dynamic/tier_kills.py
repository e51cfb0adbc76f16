"""Kills processes that train tables in two tiers and compares what is found with one large table.

`python -m tests.dynamic.tier_kills disk|sqlite[_behind] DIRECTORY SEED` prints what it did; with
`_behind`, rows are moved with `BackingStore(write_behind=True)`. It fails if a
key, a stamp or a bit of a row, a state or a number is not as after the last flush that returned, or
after the one that was under way.
"""

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from enum import IntEnum, auto
from pathlib import Path

import torch
from torch import Tensor

from emblib import optim
from emblib.dynamic.module import DynamicEmbeddingBags
from emblib.dynamic.tiers.store import BackingStore, StoredRows
from emblib.init import Normal
from emblib.specs import DynamicSpec
from tests.dynamic.row_store_cases import FILES
from tests.tables.kills import Board, killed_at_call, killed_in

FLUSH_EVERY = 2


class Phase(IntEnum):
    """What a training process is doing."""

    OPENING = auto()
    TRAINING = auto()
    FLUSHING = auto()
    DEMOTING = auto()


def tables(*capacities: int) -> list[DynamicSpec]:
    return [
        DynamicSpec(capacity, dim, name=f"t{dim}", initializer=Normal())
        for capacity, dim in zip(capacities, (16, 6), strict=True)
    ]


def make(kind: str, directory: Path, *, write_behind: bool = False) -> DynamicEmbeddingBags:
    """Opened if it is there."""
    directory.mkdir(exist_ok=True)
    store = BackingStore(FILES[kind](directory), write_behind=write_behind)
    return DynamicEmbeddingBags(tables(96, 64), optim.Adam(0.01), backing=store, seed=0)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Bags of ten; some keys come often."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(200, generator=generator) ** 3 * 3000).long() - 100
    return ids, torch.arange(0, 201, 10)


def train(module: DynamicEmbeddingBags, step: int) -> None:
    """One step, with a gradient that is a function of the step alone."""
    out = module(*batch(step))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(-step)))


def writer(
    kind: str, directory: Path, board: Board, last_put: int = 0, *, write_behind: bool = False
) -> Callable[[], None]:
    """What is killed: opens the tables and trains on, a batch prefetched, without an end.

    With `last_put` it kills itself in the middle of that call to the store.
    """

    def work() -> None:
        torch.set_num_threads(1)
        flushed = board.acknowledged
        board.write(flushed, Phase.OPENING)
        module = make(kind, directory, write_behind=write_behind)
        store = module.backing.store.wrapped_store
        put, step = store.put, module.step

        def watched(table: int, rows: StoredRows) -> StoredRows:
            nonlocal last_put
            last_put -= 1
            if last_put == 0:
                put(table, rows.at(torch.arange(rows.keys.numel() // 2)))
                board.write(flushed, Phase.DEMOTING)
                os.kill(os.getpid(), signal.SIGKILL)
            return put(table, rows)

        store.put = watched  # type: ignore[method-assign]
        while True:
            board.write(flushed, Phase.TRAINING)
            for _ in range(FLUSH_EVERY):
                step += 1
                module.prefetch(*batch(step + 1))
                train(module, step)
            board.write(flushed, Phase.FLUSHING)
            module.flush()
            flushed = step

    return work


def run(
    kind: str, directory: Path, seed: int, rounds: int, *, write_behind: bool = False
) -> Counter[str]:
    """Kill, open, compare with the same steps in one large table, and go on from there."""
    chance, board, done = random.Random(seed), Board(), Counter[str]()
    plain = DynamicEmbeddingBags(tables(8192, 8192), optim.Adam(0.01), seed=0)
    for number in range(rounds):
        board.write(plain.step, 0)
        target = list(Phase)[number % len(Phase)]
        if target == Phase.DEMOTING:
            puts = chance.randrange(1, 40)
            work = writer(kind, directory, board, puts, write_behind=write_behind)
            assert killed_at_call(work)
        else:
            flushes = 0 if target == Phase.OPENING else chance.randrange(3)
            after = plain.step + flushes * FLUSH_EVERY
            work = writer(kind, directory, board, write_behind=write_behind)
            assert killed_in(board, target, work, chance, after)
        done[Phase(board.phase).name] += 1
        module = make(kind, directory)
        flushed = board.acknowledged
        allowed = {flushed}
        if board.phase == Phase.FLUSHING:
            allowed.add(flushed + FLUSH_EVERY)
        assert module.step in allowed, f"found step {module.step}, flushed was {flushed}"
        while plain.step < module.step:
            train(plain, plain.step + 1)
        done["steps"] = plain.step
        mine, theirs = module.state_dict(), plain.state_dict()
        assert mine.keys() == theirs.keys()
        for key in theirs:
            assert torch.equal(mine[key], theirs[key]), f"{key}: not what step {plain.step} left"
        module.close()
    return done


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    kind, directory, seed = sys.argv[1].removesuffix("_behind"), Path(sys.argv[2]), int(sys.argv[3])
    behind = kind != sys.argv[1]
    print(dict(run(kind, directory, seed, rounds=len(Phase), write_behind=behind)))


if __name__ == "__main__":
    main()
