"""Kills processes that train tables on disk and compares what is found with training in memory.

`python -m tests.tables.training_kills large|small DIRECTORY SEED` prints what it did. It fails if a
bit of a weight, a state or the step is not as after the last flush that returned, or after the one
that was under way.
"""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path

import torch
from torch import Tensor

from emblib import (
    BoundsCheck,
    CacheConfig,
    CachePolicy,
    Placement,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from tests.tables.kills import Board, killed_in


class Phase(IntEnum):
    """What a training process is doing."""

    OPENING = auto()
    TRAINING = auto()
    FLUSHING = auto()


@dataclass(frozen=True)
class Setting:
    """Tables, how they are trained, and how often a process that does is killed."""

    sizes: tuple[tuple[int, int], ...]
    optimizer: optim.Optimizer
    precision: Precision
    cache: CacheConfig
    lookups: int
    flush_every: int
    rounds: int

    def tables(self, placement: Placement) -> list[TableSpec]:
        return [TableSpec(*size, f"t{t}", placement) for t, size in enumerate(self.sizes)]


SETTINGS = {
    "large": Setting(
        sizes=((10**7, 16),),
        optimizer=optim.RowwiseAdagrad(0.1),
        precision=Precision(),
        cache=CacheConfig(load_factor=0.01),
        lookups=2000,
        flush_every=5,
        rounds=10,
    ),
    "small": Setting(
        sizes=((3000, 16), (500, 6), (1500, 16)),
        optimizer=optim.Adam(0.01),
        precision=Precision(
            weights=torch.float16,
            states=torch.bfloat16,
            stochastic_rounding=StochasticRounding(7),
        ),
        cache=CacheConfig(CachePolicy.LFU, sets=3),
        lookups=300,
        flush_every=3,
        rounds=30,
    ),
}


def make(setting: Setting, directory: Path | None) -> TableBatchedEmbeddingBags:
    """On disk, opened if it is there; in memory without a directory."""
    cache = setting.cache
    if directory is not None:
        cache = CacheConfig(cache.policy, cache.load_factor, cache.sets, directory=directory)
    return TableBatchedEmbeddingBags(
        setting.tables(Placement.DEVICE if directory is None else Placement.DISK),
        setting.optimizer,
        precision=setting.precision,
        bounds_check=BoundsCheck.IGNORE,
        cache=cache,
    )


def batch(setting: Setting, step: int) -> tuple[Tensor, Tensor]:
    """Bags of ten; half of the lookups are of few rows, half of any."""
    generator = torch.Generator().manual_seed(step)
    parts = []
    for rows, _ in setting.sizes:
        part = torch.rand(setting.lookups, generator=generator)
        part[: setting.lookups // 2] **= 6
        parts.append((part * rows).long())
    indices = torch.cat(parts)
    return indices, torch.arange(0, indices.numel() + 1, 10)


def train(module: TableBatchedEmbeddingBags, setting: Setting, step: int) -> None:
    """One step, with a gradient that is a function of the step alone."""
    out = module(*batch(setting, step))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(-step))
    out.backward(grad.to(out.dtype))


def writer(setting: Setting, directory: Path, board: Board) -> Callable[[], None]:
    """What is killed: opens the tables and trains on, a batch prefetched, without an end."""

    def work() -> None:
        flushed = board.acknowledged
        board.write(flushed, Phase.OPENING)
        module = make(setting, directory)
        step = module.step
        module.prefetch(*batch(setting, step + 1))
        while True:
            board.write(flushed, Phase.TRAINING)
            for _ in range(setting.flush_every):
                step += 1
                out = module(*batch(setting, step))
                module.prefetch(*batch(setting, step + 1))
                grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(-step))
                out.backward(grad.to(out.dtype))
            board.write(flushed, Phase.FLUSHING)
            module.flush()
            flushed = step

    return work


def same_bits(a: TableBatchedEmbeddingBags, b: TableBatchedEmbeddingBags) -> bool:
    """Whether all weights and states are the same."""
    pairs = list(zip(a.table_weights(), b.table_weights(), strict=True))
    for x, y in zip(a.table_optimizer_states(), b.table_optimizer_states(), strict=True):
        pairs += [(x[name], y[name]) for name in x]
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def run(setting: Setting, directory: Path, seed: int) -> Counter[str]:
    """Kill, open, compare with the same steps in memory, and go on from there."""
    chance, board, done = random.Random(seed), Board(), Counter[str]()
    torch.manual_seed(seed)
    module, plain = make(setting, directory), make(setting, None)
    plain.load_state_dict(module.state_dict())
    for number in range(setting.rounds):
        del module
        gc.collect()
        board.write(plain.step, 0)
        # Once a flush has returned, the board says so when the next phase begins.
        target = list(Phase)[number % len(Phase)]
        flushes = 0 if target == Phase.OPENING else chance.randrange(4)
        after = plain.step + flushes * setting.flush_every
        assert killed_in(board, target, writer(setting, directory, board), chance, after)
        done[Phase(board.phase).name] += 1
        module = make(setting, directory)
        flushed = board.acknowledged
        allowed = {flushed}
        if board.phase == Phase.FLUSHING:
            allowed.add(flushed + setting.flush_every)
        assert module.step in allowed, f"found step {module.step}, flushed was {flushed}"
        while plain.step < module.step:
            train(plain, setting, plain.step + 1)
        done["steps"] = plain.step
        assert same_bits(module, plain), f"not what the flush after step {plain.step} left"
    return done


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    print(dict(run(SETTINGS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()
