"""Memory budgets of sharded models: each rank keeps one of its own, without communication."""

import pytest
import torch

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    MemoryBudget,
    optim,
)
from emblib.sharding import DistributedModelParallel, row_wise
from emblib.sharding.ranks import RankGroup
from emblib.storage import Hash
from tests.sharding import worlds


def train_in_a_budget(ranks: RankGroup) -> list[int]:
    """Each rank keeps a budget of its own shards; return the rows of both tables."""
    configs = [
        EmbeddingBagConfig(1024, 4, name, [name], storage=Hash(initial_capacity=64))
        for name in ("a", "b")
    ]
    model = DistributedModelParallel(
        EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1)),
        ranks,
        plan={"": {"a": row_wise(), "b": row_wise()}},
    )
    budget = MemoryBudget(256 * 60, interval=4, share=1 / 4)
    budget.attach(model)
    capacities = []
    for step in range(32):
        generator = torch.Generator().manual_seed(2 * step + ranks.rank)
        ids = torch.cat([torch.randint(n, (80,), generator=generator) for n in (2000, 40)])
        keyed = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([80, 80]))
        model(keyed.to(ranks.device)).values().sum().backward()
        assert budget.used() <= budget.nbytes
        capacities.append([model.tables[name].local.capacity() for name in "ab"])
    assert [table.name for table in budget.tables()] == [f"{n}.{ranks.rank}" for n in "ab"]
    return capacities[-1]


def test_every_rank_has_a_budget() -> None:
    for rows in worlds.run(2, train_in_a_budget):
        assert rows[0] > 2 * rows[1] >= 64


def shard_tables_of_a_budget(ranks: RankGroup) -> str:
    """Shard a model after `attach`; return the error."""
    config = EmbeddingBagConfig(1024, 4, "a", ["a"], storage=Hash(initial_capacity=64))
    model = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))
    MemoryBudget(1 << 20).attach(model)
    with pytest.raises(ValueError, match="memory budget") as raised:
        DistributedModelParallel(model, ranks, plan={"": {"a": row_wise()}})
    return str(raised.value)


def test_whole_tables_of_a_budget_are_not_sharded() -> None:
    """Their shards would be in no budget, although `attach` was called."""
    for text in worlds.run(2, shard_tables_of_a_budget):
        assert "table 'a' is in a memory budget" in text
        assert "shard the model first" in text
