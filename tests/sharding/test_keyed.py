"""Rows by key from the shards of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

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


def rows_of_keys(keys: torch.Tensor) -> dict[str, KeyedRows]:
    """Return the rows of a table with one shard."""
    return keyed.make_keyed_rows({0: {"keys": keys}}, [0], RankGroup.single())


def test_keys_of_other_shards_are_refused() -> None:
    """torch.distributed.checkpoint cuts the saved rows where the current ones are cut."""
    keys = torch.arange(64)
    keys = keys[routing.canonical_order(keys)]
    num_owned = int((routing.owner(keys, 2) == 0).sum())
    shards = [Shard(0, (0, num_owned + 2), (0, 1)), Shard(0, (num_owned + 2, 64), (0, 1))]
    parts = {0: keys[: num_owned + 2], 1: keys[num_owned + 2 :]}
    state = {"keys": KeyedRows((64,), shards, parts, RankGroup.single(), torch.int64)}
    with pytest.raises(ValueError, match=r"2 keys in shard 0 of 2 .* emblib\.sharding\.check"):
        keyed.entries_of_shard(state, 0, 2, "t")
    assert torch.equal(keyed.entries_of_shard(state, 1, 2, "t")["keys"], parts[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_another_number_of_keys_names_the_function_that_loads_it(tmp_path: Path) -> None:
    saved = rows_of_keys(torch.arange(3))
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    same = rows_of_keys(torch.zeros(3, dtype=torch.int64))
    dcp.load(same, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(same["keys"].parts[0], torch.arange(3))
    with pytest.raises(CheckpointException, match=r"emblib\.sharding\.checkpoints\.load loads any"):
        dcp.load(rows_of_keys(torch.arange(2)), checkpoint_id=tmp_path, no_dist=True)
