"""Deferred updates and gradient scaling over ranks: as in one process with the whole batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.collections.optimizers import FusedOptimizer
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel, clip_grad_norm_, shard
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import (
    Shard,
    column_wise,
    custom,
    data_parallel,
    row_wise,
    table_wise,
)
from emblib.storage import Dense, TensorTrain
from tests.sharding import worlds

TRAIN = TensorTrain((2,), (4, 6), (2, 2))
TABLES = ("r", "t", "c", "d", "tt")
EXAMPLES, ROWS, STEPS, MICRO, BOUND = 16, 24, 3, 2, 0.25
OPTIMIZERS = {
    "sgd": optim.SGD(0.5),
    "adagrad": optim.Adagrad(0.1),
    "adam": optim.Adam(0.05, eps=1e-3),
}


class Net(nn.Module):
    """Tables with a fused optimizer, and a dense part."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [
            EmbeddingBagConfig(ROWS, 4, name, storage=TRAIN if name == "tt" else Dense())
            for name in TABLES
        ]
        self.sparse = EmbeddingBagCollection(tables, optimizer=optimizer)
        self.dense = nn.Linear(20, 2)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return a loss whose gradients are larger than the bound."""
        return (self.dense(self.sparse(ids).values()) * 10).square().mean()


def batch(number: int, rank: int, size: int) -> KeyedJaggedTensor:
    """Return the examples of a rank: consecutive ones of all."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(ROWS, (len(TABLES), EXAMPLES), generator=generator)
    ids[:, : EXAMPLES // 4] = 1  # only on rank 0, so that the norms of ranks differ
    own = ids.chunk(size, dim=1)[rank].reshape(-1)
    return KeyedJaggedTensor(list(TABLES), own, lengths=torch.ones_like(own))


def steps(
    model: nn.Module, fused: FusedOptimizer, rank: int, size: int, scaler: GradScaler
) -> None:
    """Make steps over several micro-batches with clipped gradients; the second step overflows."""
    dense = [p for n, p in model.named_parameters() if n.startswith("dense")]
    optimizers = [fused, torch.optim.SGD(dense, lr=0.1)]
    for step in range(STEPS):
        for micro in range(MICRO):
            loss = model(batch(10 * step + micro, rank, size))
            overflows = scaler.is_enabled() and step == 1 and micro == 0 and rank == size - 1
            scaler.scale(loss * torch.inf if overflows else loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if not (scaler.is_enabled() and step == 1):
            clip_grad_norm_(model, BOUND)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _over_ranks(ranks: RankGroup, optimizer: optim.Optimizer, scales: Any) -> dict[str, Tensor]:
    rules = {
        "r": row_wise(),
        "t": table_wise(0),
        "c": column_wise(),
        "d": data_parallel(),
        "tt": row_wise([0, ranks.size // 2]) if ranks.size > 1 else table_wise(0),
    }
    model = DistributedModelParallel(Net(optimizer), ranks, plan={"sparse": rules})
    scaler = (
        ShardedGradScaler("cpu", init_scale=256.0, process_group=ranks.group)
        if scales
        else GradScaler("cpu", enabled=False)
    )
    steps(model, model.fused_optimizer, ranks.rank, ranks.size, scaler)
    assert scaler.get_scale() == (128.0 if scales else 1.0)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


# Scales need a process group of several ranks (`ShardedGradScaler`).
@pytest.mark.parametrize(("scales", "size"), [(False, 1), (False, 4), (True, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulated_clipped_and_scaled_as_in_one_process(
    name: str, scales: bool, size: int
) -> None:
    optimizer = replace(OPTIMIZERS[name], deferred=True)
    found = worlds.run(size, _over_ranks, optimizer, scales)
    model = Net(optimizer)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=scales)
    steps(model, FusedOptimizer.of(model), 0, 1, scaler)
    expected = model.state_dict()
    for state in found:
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=2e-4, atol=2e-5, msg=lambda text, k=key: f"{k}: {text}"
            )
            assert torch.equal(state[key], found[0][key]), key


def test_all_shards_of_a_table_on_one_rank_are_in_its_optimizer() -> None:
    source = EmbeddingBagCollection(
        [EmbeddingBagConfig(8, 4, "t")], optimizer=optim.SGD(0.5, deferred=True)
    )
    plan = {"": {"t": custom([Shard(0, (0, 4), (0, 4)), Shard(0, (4, 8), (0, 4))])}}
    sharded = shard(copy.deepcopy(source), plan)
    batch = KeyedJaggedTensor(["t"], torch.tensor([1, 6]), lengths=torch.tensor([1, 1]))
    for model in (source, sharded):
        optimizer = FusedOptimizer.of(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).values().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    (weights,) = sharded.state_dict().values()
    assert torch.equal(weights.full_tensor(), source.embedding_bags.t.weight)
