"""Learning rates and other hyperparameters of one table that differ between ranks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emblib
from emblib import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, optim
from emblib.sharding import DistributedModelParallel, column_wise, data_parallel, row_wise
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import table_wise
from emblib.specs import Pooling
from tests.sharding import worlds


def make_model(ranks: RankGroup) -> DistributedModelParallel:
    """Two tables of every rank, one of two ranks, and one of a single rank."""
    pooled = [
        EmbeddingBagConfig(20, 8, "rows"),
        EmbeddingBagConfig(20, 8, "replica", optimizer=optim.Adam(0.2)),
        EmbeddingBagConfig(5, 4, "single", pooling=Pooling.MEAN, optimizer=optim.SGD(0.2)),
    ]
    history = EmbeddingConfig(20, 8, "columns")
    counted = optim.RowwiseAdagrad(0.1, counter=optim.Counter())
    net = torch.nn.ModuleDict(
        {
            "bags": emblib.EmbeddingBagCollection(pooled, optimizer=counted),
            "history": emblib.EmbeddingCollection([history], optimizer=optim.SGD(0.1)),
        }
    )
    plan: Any = {
        "bags": {"rows": row_wise(), "replica": data_parallel(), "single": table_wise(0)},
        "history": {"columns": column_wise([0, 1])},
    }
    return DistributedModelParallel(net, ranks, plan=plan)


def train(model: Any, rank: int) -> None:
    """One step with ids that differ between ranks."""
    ids = (torch.arange(6) + rank) % 5
    bags = KeyedJaggedTensor(["rows", "replica", "single"], ids, lengths=torch.full((6,), 1))
    history = KeyedJaggedTensor(["columns"], ids, lengths=torch.tensor([4, 2]))
    output = model.module["bags"](bags).values().sum()
    (output + model.module["history"](history)["columns"].values().sum()).backward()


def set_rates(model: Any, lr: float) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = lr


def set_betas(model: Any, beta1: float) -> None:
    for group in model.fused_optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (beta1, 0.999)


def clip_replica(model: Any, bound: float) -> None:
    module = model.module["bags"].replicated.groups.module_of(0)[0]
    module.set_hyperparameters(max_gradient=bound)


def clip_single(model: Any, bound: float) -> None:
    optimizer = model.fused_optimizer
    for group, names in zip(optimizer.param_groups, optimizer.group_names(), strict=True):
        if "bags.embedding_bags.single.weight" in names:
            group["max_gradient"] = bound


def set_rate_of_single(model: Any, lr: float) -> None:
    for shard in model.module["bags"].local_shards():
        if shard.table == "single":
            shard.groups.module_of(shard.index)[0].set_learning_rate(lr)


def set_step_of_replica(model: Any, step: int) -> None:
    model.module["bags"].replicated.groups.module_of(0)[0].set_step(step)


def freeze(model: Any, table: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and f".{table}" not in name)


def changed_on_rank_0(ranks: RankGroup, change: Any, value: Any) -> str:
    """The error of a step after a change on rank 0; then the others make the change as well."""
    model: Any = make_model(ranks)
    for _ in range(2):
        train(model, ranks.rank)
    replica = model.module["bags"].replicated.groups.views(0)["weight"]
    before = replica.clone()
    if ranks.rank == 0:
        change(model, value)
    error = ""
    try:
        train(model, ranks.rank)
    except RuntimeError as raised:
        error = str(raised)
        assert torch.equal(replica, before)
    if ranks.rank > 0 and change is not set_rate_of_single:
        change(model, value)
    train(model, ranks.rank)
    assert torch.equal(replica, before) == (value == "replica")
    return error


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks on GPUs compare no headers")
@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        (set_rates, 0.5, "table columns: optimizer.lr is 0.5 on rank 0 and 0.1 on rank 1"),
        (set_betas, 0.5, "table replica: optimizer.betas is 0.5, 0.999 on rank 0 and 0.9, 0.999"),
        (set_step_of_replica, 7, "table replica: step is 7 on rank 0 and 2 on ranks 1-2"),
        (clip_replica, 0.5, "table replica: optimizer.max_gradient is 0.5 on rank 0 and None"),
        (clip_single, 0.5, "single: optimizer.max_gradient is 0.5 on rank 0 and None on ranks 1"),
        (freeze, "replica", "table replica: is_frozen is True on rank 0 and False on ranks 1-2"),
        (freeze, "columns", "table columns: is_frozen is True on rank 0 and False on rank 1"),
        (set_rate_of_single, 0.5, ""),
    ],
)
def test_hyperparameters_that_differ_between_ranks(change: Any, value: Any, expected: str) -> None:
    errors = worlds.run(3, changed_on_rank_0, change, value)
    assert len(set(errors)) == 1
    assert expected in errors[0] if expected else not errors[0]
