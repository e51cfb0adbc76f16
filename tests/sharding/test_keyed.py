"""Rows by key from the shards of ranks."""

import pytest
import torch

from emblib.dynamic import keys as routing
from emblib.sharding.checkpoints import keyed
from emblib.sharding.checkpoints.sharded_table import KeyedRows
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard
from tests.sharding import worlds


def error_of_foreign_key(ranks: RankGroup) -> str:
    """Return the error of joining shards, one per rank, of which shard 1 has a key of shard 0."""
    candidates = torch.arange(64)
    owned = candidates[routing.owner(candidates, ranks.size) == 0]
    keys = owned[:3] if ranks.rank == 0 else owned[3:4]
    with pytest.raises(ValueError, match="shard 1") as error:
        keyed.join_shards(
            {ranks.rank: {"keys": keys, "weight": torch.zeros(keys.numel(), 4)}},
            range(ranks.size),
            ranks,
        )
    return str(error.value)


def test_all_ranks_raise_if_a_shard_has_a_key_of_another() -> None:
    errors = worlds.run(2, error_of_foreign_key)
    assert errors[0] == errors[1]
    assert errors[0].startswith("shard 1 of 2 has 1 keys of other shards")


def test_a_shard_of_another_rank_is_refused() -> None:
    ranks = RankGroup.single()
    shards = [Shard(0, (0, 1), (0, 1)), Shard(1, (1, 2), (0, 1))]
    keys = KeyedRows((2,), shards, {0: torch.zeros(1, dtype=torch.int64)}, ranks, torch.int64)
    with pytest.raises(ValueError, match=r"t\.keys .* this rank has number 1: load it with"):
        keyed.entries_of_shard({"keys": keys}, 1, 2, "t")
