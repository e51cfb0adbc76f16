"""What the ranks do in the tests of checkpoints: tables of numbers that tell where they are."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import ShardedTable
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard


def numbers(rows: int, columns: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor no two values of which are the same."""
    shape = (rows, columns) if columns else (rows,)
    return (torch.arange(rows * max(columns, 1)) + 1).view(shape).to(dtype)


def spread(whole: Tensor, shards: Sequence[Shard], ranks: RankGroup) -> ShardedTable:
    """The parts that a rank has of a whole."""
    parts = {
        i: whole[slice(*shard.rows), slice(*shard.columns)].clone()
        if whole.dim() == 2
        else whole[slice(*shard.rows)].clone()
        for i, shard in enumerate(shards)
        if shard.rank == ranks.rank
    }
    return ShardedTable(whole.size(), shards, parts, ranks, whole.dtype)


def assert_is(table: ShardedTable, whole: Tensor) -> None:
    """Every part has the values of its shard."""
    for i, part in spread(whole, table.shards, table.ranks).parts.items():
        assert torch.equal(table.parts[i], part), table.shards[i]


def save(ranks: RankGroup, path: Path, shards: Sequence[Shard], rows: int, columns: int) -> None:
    """A table, a row state, a replicated tensor and a number."""
    state = {
        "model": {"table": spread(numbers(rows, columns), shards, ranks), "dense": numbers(3, 4)},
        "lists": [numbers(2), {"deep": numbers(5)}],
        "step": 7,
    }
    checkpoints.save(state, path, ranks)


def load(ranks: RankGroup, path: Path, shards: Sequence[Shard], rows: int, columns: int) -> None:
    """The same with other shards."""
    state = {
        "model": {
            "table": spread(torch.zeros(rows, columns), shards, ranks),
            "dense": torch.zeros(3, 4),
        },
        "lists": [torch.zeros(2), {"deep": torch.zeros(5)}],
        "step": 0,
    }
    memory = list(state["model"]["table"].parts.values())
    checkpoints.load(state, path, ranks)
    assert_is(state["model"]["table"], numbers(rows, columns))
    assert all(a is b for a, b in zip(memory, state["model"]["table"].parts.values(), strict=True))
    assert torch.equal(state["model"]["dense"], numbers(3, 4))
    assert torch.equal(state["lists"][0], numbers(2))
    assert torch.equal(state["lists"][1]["deep"], numbers(5))
    assert state["step"] == 7
