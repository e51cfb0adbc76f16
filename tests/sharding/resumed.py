"""A training script as users write one, for torchrun; told to die at places.

`torchrun ... -m tests.sharding.resumed DIRECTORY [ATTEMPT:STEP:RANK:WHERE ...]` trains STEPS steps
on all ranks, saves every few of them, goes on from the newest checkpoint when it is started again,
and writes whole tables at the end. At attempt ATTEMPT the rank kills itself (-9) at that step:
`training`, in the middle of a backward pass, or `saving`, in the middle of a checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel, checkpoints
from emblib.sharding.failures import init_distributed
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import column_wise, row_wise, table_wise
from emblib.storage import Hash, TensorTrain

STEPS, SAVE_EVERY, BATCH = 12, 4, 6
TABLES = {
    "rows": (EmbeddingBagConfig(101, 8, "rows", ["a"]), row_wise()),
    "table": (EmbeddingBagConfig(50, 4, "table", ["b", "c"]), table_wise(1)),
    "columns": (EmbeddingBagConfig(40, 12, "columns", ["a"]), column_wise()),
    "cores": (
        EmbeddingBagConfig(24, 8, "cores", ["b"], storage=TensorTrain((3,), (6, 4), (4, 2))),
        row_wise(),
    ),
    "keyed": (EmbeddingBagConfig(512, 4, "keyed", ["d"], storage=Hash()), row_wise()),
}


class Model(nn.Module):
    """Tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        configs = [config for config, _ in TABLES.values()]
        self.tables = EmbeddingBagCollection(configs, optimizer=optim.Adam(0.05))
        self.dense = nn.Linear(8 + 4 + 4 + 12 + 8 + 4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """One number an example."""
        return self.dense(self.tables(features).values()).squeeze(1)


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """A function of the rank and the step, as of a data loader that can be asked for a place."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (4 * BATCH,), generator=generator)
    parts = [
        torch.randint(rows, (int(n),), generator=generator)
        for rows, n in zip((40, 24, 24, 1 << 40), lengths.view(4, BATCH).sum(1), strict=True)
    ]
    features = KeyedJaggedTensor(["a", "b", "c", "d"], torch.cat(parts), lengths=lengths)
    return features, torch.rand(BATCH, generator=generator)


class Deaths:
    """When this process kills itself."""

    def __init__(self, told: list[str], rank: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._places = set()
        for text in told:
            at, step, who, where = text.split(":")
            if at == attempt and int(who) == rank:
                self._places.add((int(step), where))

    def at(self, step: int, where: str) -> bool:
        """Whether it does here."""
        return (step, where) in self._places


def die(*_: object) -> None:
    """Without a word, as when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(ranks: RankGroup, directory: Path, deaths: Deaths) -> None:
    """From the newest checkpoint to the last step."""
    torch.manual_seed(0)
    plan = {"tables": {name: rule for name, (_, rule) in TABLES.items()}}
    model = DistributedModelParallel(Model(), ranks, plan=plan)
    dense = torch.optim.Adam(model.module.dense.parameters(), 0.05)
    state = {"model": model, "tables": model.fused_optimizer, "dense": dense, "step": 0}
    newest = checkpoints.latest(directory / "steps", ranks)
    if newest is not None:
        checkpoints.load(state, newest, ranks)
    if ranks.rank == 0:
        print(f"attempt begins at step {state['step']}", flush=True)
    for step in range(state["step"] + 1, STEPS + 1):
        features, wanted = batch(ranks.rank, step)
        dense.zero_grad()
        given = model(features)
        if deaths.at(step, "training"):
            given.register_hook(die)
        (given - wanted).square().mean().backward()
        dense.step()
        if step % SAVE_EVERY == 0:
            state["step"] = step
            if deaths.at(step, "saving"):
                # The files are not whole, and the name is not given, before the rename.
                os.replace = os.rename = Path.rename = Path.replace = die  # type: ignore[assignment]
            checkpoints.save(state, directory / "steps" / f"step_{step}", ranks)
    checkpoints.export({"model": model, "dense": dense}, directory / "final.pt", ranks)


def unharmed(ranks: RankGroup, directory: Path) -> None:
    """The same in a world that nothing happens to."""
    train(ranks, directory, Deaths([], ranks.rank))


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    with init_distributed(timeout_seconds=60) as ranks:
        train(ranks, Path(sys.argv[1]), Deaths(sys.argv[2:], ranks.rank))


if __name__ == "__main__":
    main()
