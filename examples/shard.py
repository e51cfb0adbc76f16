"""Train tables that are sharded over the processes of torchrun, save them, and go on from there.

python examples/shard.py [folder]
torchrun --nproc-per-node 2 examples/shard.py [folder]  # over gloo, or NCCL on GPUs
"""

import sys
import tempfile
from pathlib import Path

import torch

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel, checkpoints, init_distributed


def tables() -> EmbeddingBagCollection:
    """Return two tables without memory: each rank allocates what it stores."""
    configs = [EmbeddingBagConfig(100_000, 32, "item"), EmbeddingBagConfig(5_000, 32, "shop")]
    return EmbeddingBagCollection(configs, device="meta", optimizer=emblib.optim.Adam(0.01))


def main(folder: str) -> None:
    """Train, save, and load into a second model."""
    with init_distributed() as ranks:
        model = DistributedModelParallel(tables(), ranks)  # a planner decides what goes where
        if ranks.rank == 0:
            print(model.plan)
        generator = torch.Generator().manual_seed(ranks.rank)  # each rank has its own examples
        for _ in range(3):
            ids = torch.randint(5_000, (2 * 64,), generator=generator)
            lengths = torch.ones(2 * 64, dtype=torch.int64)
            batch = KeyedJaggedTensor(["item", "shop"], ids, lengths=lengths).to(ranks.device)
            model(batch).values().square().mean().backward()
        state = {"model": model, "optimizer": model.fused_optimizer}
        checkpoints.save(state, Path(folder) / "step_3", ranks)
        other = DistributedModelParallel(tables(), ranks)
        checkpoints.load(
            {"model": other, "optimizer": other.fused_optimizer}, Path(folder) / "step_3", ranks
        )
        with torch.no_grad():
            same = torch.equal(model(batch).values(), other(batch).values())
        if ranks.rank == 0:
            print(f"{ranks.size} ranks; the loaded model looks up the same rows: {same}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.gettempdir()}/emblib_shard")
