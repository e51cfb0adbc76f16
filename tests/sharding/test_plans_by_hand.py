"""Wrong plans, ranks, wires and paths are told as what they are, before anything is sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, optim
from emblib.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    checkpoints,
    row_wise,
    table_wise,
)

GOOD = {"bags": {"a": row_wise(), "b": table_wise(0)}}


def model() -> nn.Module:
    tables = [EmbeddingBagConfig(10, 4, "a"), EmbeddingBagConfig(20, 4, "b")]
    return nn.ModuleDict({"bags": EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))})


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (
            {"bags": {"a": row_wise, "b": row_wise()}},
            r"table a: a rule is made by a call.*row_wise$",
        ),
        ({"bags": {"a": "row_wise", "b": row_wise()}}, "a call.*got 'row_wise'"),
        ("plan.json", r"ShardingPlan.load\(path\) reads one.*got 'plan.json'"),
        ([], "a plan must be a ShardingPlan"),
    ],
)
def test_plans(plan: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        DistributedModelParallel(model(), plan=plan)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"comm_precision": "fp16"}, r"None or a CommPrecision, e.g. CommPrecision\(forward=FP16"),
        ({"ranks": 3}, "ranks must be a RankGroup, a process group"),
        ({"wrap": "fsdp"}, "'fully_shard'"),
    ],
)
def test_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        DistributedModelParallel(model(), plan=GOOD, **options)


@pytest.mark.parametrize("text", ["hello", "{}", "[]", '{"version": 1, "world": [1, 1]}'])
def test_files_that_are_no_plans(text: str) -> None:
    with pytest.raises(ValueError, match="a plan must be"):
        ShardingPlan.from_json(text)


def test_paths_of_a_plan() -> None:
    plan = DistributedModelParallel(model(), plan=GOOD).plan
    assert ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(KeyError, match=r"no collection at 'bag'; it has \['bags'\]"):
        plan["bag"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda state: checkpoints.save(torch.nn.Linear(1, 1), "x"), "must be a dict.*got Linear"),
        (lambda state: checkpoints.load(state, None), "latest.* gives None"),
    ],
)
def test_checkpoints(call: Callable[[Any], None], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        call({"step": 1})
