"""State dicts over ranks: every key with exactly one of them, whoever saved and whoever loads."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from emblib.dynamic import keys as routing
from emblib.dynamic.saving import entries
from tests.dynamic import dynamic_ranks
from tests.dynamic.dynamic_cases import (
    admitting,
    assert_same_content,
    assert_same_states,
    make,
    trained,
)
from tests.tables.kills import run_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def metadata_of(state: dict[str, Tensor]) -> dict[str, object]:
    """What a checkpoint's reader says of tensors."""
    return {
        key: SimpleNamespace(size=value.shape, properties=SimpleNamespace(dtype=value.dtype))
        for key, value in state.items()
    }


def shards(state: dict[str, Tensor], world_size: int) -> list[dict[str, Tensor]]:
    return [entries.combine([state], rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("writers", [1, 2, 3, 4, 7])
def test_parts_are_shared_out_anew(writers: int, readers: int) -> None:
    whole = trained(admitting(4096), 6).state_dict()
    saved: dict[str, Tensor] = {}
    for rank, shard in enumerate(shards(dict(whole), writers)):
        saved.update(entries.as_part(shard, rank, writers))
    found = []
    for rank in range(readers):
        room = entries.empty_parts(metadata_of(saved), rank, readers)
        found.append(entries.join_parts({key: saved[key] for key in room}, rank, readers))
        keys = found[-1]["items.keys"]
        assert bool((routing.owner(keys, readers) == rank).all())
    assert_same_states(dict(whole), entries.combine(found, 0, 1))


def test_a_rank_reads_only_parts_that_may_have_its_keys() -> None:
    whole = dict(trained(make()).state_dict())
    saved: dict[str, Tensor] = {}
    for rank, shard in enumerate(shards(whole, 4)):
        saved.update(entries.as_part(shard, rank, 4))
    room = entries.empty_parts(metadata_of(saved), 1, 2)
    assert {key.split(".")[0] for key in room} == {"part_2_of_4", "part_3_of_4"}
    assert {key: value.shape for key, value in room.items()} == {
        key: saved[key].shape for key in room
    }


def test_keys_of_others_are_refused_when_they_are_saved() -> None:
    state = dict(trained(make()).state_dict())
    with pytest.raises(ValueError, match="belong to others than rank 1 of 2"):
        entries.as_part(state, 1, 2)


def test_parts_of_two_checkpoints_are_refused() -> None:
    state = entries.combine([dict(trained(make()).state_dict())], 0, 2)
    mixed = {
        **entries.as_part(state, 0, 2),
        **{
            key.replace("_of_2", "_of_3"): value
            for key, value in entries.as_part(state, 0, 2).items()
        },
    }
    for parts in (mixed, state):
        with pytest.raises(ValueError, match="must be of one checkpoint"):
            entries.join_parts(parts, 0, 1)


def test_what_is_not_by_key_is_the_largest_or_the_first() -> None:
    parts = [
        {"clock": torch.tensor([3]), "hyper": torch.tensor([0.5]), "seen": torch.tensor([1, 5])},
        {"clock": torch.tensor([4]), "hyper": torch.tensor([0.7]), "seen": torch.tensor([2, 0])},
    ]
    joined = entries.combine(parts, 0, 2)
    assert {key: value.tolist() for key, value in joined.items()} == {
        "clock": [4],
        "hyper": [0.5],
        "seen": [2, 5],
    }


def test_counts_by_unlike_hashes_are_not_merged() -> None:
    """They have nothing in common; hash keys and counts of the first part stay together."""
    parts = [
        {"a.hash_keys": torch.tensor([1]), "a.counts": torch.tensor([1, 5]), "b.n": torch.ones(1)},
        {"a.hash_keys": torch.tensor([2]), "a.counts": torch.tensor([2, 0]), "b.n": torch.ones(1)},
    ]
    joined = entries.combine(parts, 0, 2)
    assert joined["a.hash_keys"].tolist() == [1]
    assert joined["a.counts"].tolist() == [1, 5]
    parts[1]["a.hash_keys"][0] = 1
    assert entries.combine(parts, 0, 2)["a.counts"].tolist() == [2, 5]


def test_distributed_checkpoint_of_one_process(tmp_path: Path) -> None:
    module, other = trained(make()), trained(make(), 3)
    dcp.save(dict(module.state_dict()), checkpoint_id=tmp_path, no_dist=True)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    state = entries.resized(other.state_dict(), saved)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    assert_same_content(module, other)


@pytest.mark.parametrize("kind", ["plain", "admitting"])
def test_state_dicts_of_distributed_checkpoint(kind: str, tmp_path: Path) -> None:
    def model() -> nn.ModuleDict:
        tables = make() if kind == "plain" else admitting(4096)
        return nn.ModuleDict({"tables": tables, "top": nn.Linear(16, 1)})

    one, other = model(), model()
    trained(one["tables"])
    state = get_model_state_dict(one)
    assert state.keys() == one.state_dict().keys()
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    room = entries.resized(get_model_state_dict(other), saved)
    dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(other, room)
    assert_same_states(dict(one.state_dict()), dict(other.state_dict()))


def test_distributed_checkpoint_of_one_to_four_ranks(tmp_path: Path) -> None:
    """Processes of a group save, each its part, and groups of every other size load."""
    done = run_alone(dynamic_ranks, "all", tmp_path)
    assert done.count("same") == 16, done
