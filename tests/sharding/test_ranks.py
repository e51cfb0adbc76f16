"""Who is on which node, from a process group, a mesh, or what torchrun says."""

import copy
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from emblib.sharding.all_to_all import start_all_to_all
from emblib.sharding.ranks import RankGroup, sends_from_hosts, subgroup
from tests.sharding import worlds


def test_single() -> None:
    ranks = RankGroup.single()
    assert (ranks.rank, ranks.size, ranks.local_size, ranks.group) == (0, 1, 1, None)
    assert (ranks.node, ranks.nodes, ranks.local_rank) == (0, 1, 0)
    assert ranks.device == torch.device("cpu")
    assert ranks.gather_objects("a") == ["a"]
    assert ranks.global_rank(0) == 0
    ranks.barrier()
    back = pickle.loads(pickle.dumps(ranks))
    assert (back.size, back.device) == (1, ranks.device)
    assert copy.deepcopy(ranks) is ranks
    assert RankGroup.from_value(ranks) is ranks
    assert RankGroup().size == 1  # nothing is initialised here
    assert str(ranks) == "RankGroup(rank 0 of 1, cpu)"


@pytest.mark.parametrize("make", [RankGroup, partial(RankGroup.from_value, None)])
def test_processes_of_torchrun_do_not_train_alone(
    make: Callable[[], RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    says = (
        r"process 1 of 4 that torchrun started.*with init_distributed\(\) as ranks"
        r".*init_process_group"
    )
    with pytest.raises(RuntimeError, match=says):
        make()
    assert RankGroup.single().size == 1
    assert pickle.loads(pickle.dumps(RankGroup.single())).size == 1
    with worlds_of_one() as group:
        assert make().size == group.size() == 1  # initialised, whatever the environment says
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make().size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK")  # of some other launcher
    assert make().size == 1


@contextmanager
def worlds_of_one() -> Iterator[dist.ProcessGroup]:
    """A process group of this process, for as long as the block lasts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def _who(ranks: RankGroup) -> tuple[int, ...]:
    return ranks.rank, ranks.size, ranks.local_size, ranks.node, ranks.nodes, ranks.local_rank


def _of_the_group(ranks: RankGroup, monkeypatch_local: str | None) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if monkeypatch_local is not None:
            patch.setenv("LOCAL_WORLD_SIZE", monkeypatch_local)
        found = RankGroup(ranks.group)
    assert copy.deepcopy(found) is found
    assert copy.copy(found) is found
    with pytest.raises(pickle.PicklingError, match="save a state_dict"):
        pickle.dumps(found)
    assert found.gather_objects(found.rank * 2) == [2 * r for r in range(found.size)]
    found.barrier()
    return _who(found)


@pytest.mark.parametrize(("local", "sides"), [(None, (4, 1)), ("2", (2, 2)), ("8", (4, 1))])
def test_nodes(local: str | None, sides: tuple[int, int]) -> None:
    size, nodes = sides
    for rank, found in enumerate(worlds.run(4, _of_the_group, local)):
        assert found == (rank, 4, size, rank // size, nodes, rank % size)


def _wrong(ranks: RankGroup) -> None:
    with pytest.raises(ValueError, match=r"4 ranks are not whole nodes of 3: .*or 4 to treat"):
        RankGroup(ranks.group, local_size=3)
    with pytest.raises(ValueError, match="1 to 4 here, got 5"):
        RankGroup(ranks.group, local_size=5)
    with pytest.raises(TypeError, match=r"local_size must be an int, got 2\.0"):
        RankGroup(ranks.group, local_size=2.0)  # type: ignore[arg-type]
    last = dist.new_group([2])
    if ranks.rank != 2:
        with pytest.raises(ValueError, match="this process is not in the group"):
            RankGroup(last)
    else:
        assert _who(RankGroup(last)) == (0, 1, 1, 0, 1, 0)
        assert RankGroup(last).global_rank(0) == 2


def test_wrong_use() -> None:
    worlds.run(4, _wrong)


def _meshes(ranks: RankGroup) -> list[tuple[int, ...]]:
    whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    flat = dist.init_device_mesh("cpu", (4,))
    found = [
        _who(RankGroup(whole)),
        _who(RankGroup(flat, local_size=4)),
        _who(RankGroup(whole["local"])),
    ]
    swapped = dist.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("node", "local"))
    with pytest.raises(ValueError, match=r"must hold all 4 processes in order"):
        RankGroup(swapped)
    with pytest.raises(ValueError, match=r"1 to 4 here, got 0"):
        RankGroup(whole, local_size=0)
    return found


def test_device_meshes() -> None:
    for rank, (whole, flat, local) in enumerate(worlds.run(4, _meshes)):
        assert whole == (rank, 4, 2, rank // 2, 2, rank % 2)
        assert flat == (rank, 4, 4, 0, 1, rank)
        assert local == (rank % 2, 2, 2, 0, 1, rank % 2)


def _subgroups(ranks: RankGroup) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        # Whatever torch counts: here the processes count unlike numbers of groups.
        patch.setattr(distributed_c10d, "_hash_ranks_to_str", lambda _: f"{uuid.uuid4()}")
        some = subgroup(ranks, [0, 2])
        every = RankGroup(subgroup(ranks))
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        with pytest.raises(RuntimeError, match="TORCH_DIST_INIT_BARRIER=1 torch lets the members"):
            subgroup(ranks)
    assert (some is None) == (ranks.rank == 1)
    total = torch.ones(1)
    if some is not None:
        dist.all_reduce(total, group=some)
    assert every.gather_objects(ranks.rank) == [0, 1, 2]
    pending = start_all_to_all(torch.arange(3) + 10 * every.rank, [1] * 3, [1] * 3, every)
    assert pending.wait().tolist() == [every.rank, 10 + every.rank, 20 + every.rank]
    assert sends_from_hosts(every.group)
    return int(total), every.rank


def test_subgroups_meet_whatever_torch_calls_them() -> None:
    assert worlds.run(3, _subgroups) == [(2, 0), (1, 1), (2, 2)]


def _nested_subgroups(ranks: RankGroup) -> list[int]:
    """Of subgroups of subgroups, where rank 0 has made more groups than the others."""
    if ranks.rank == 0:
        for _ in range(3):
            dist.new_group([0], use_local_synchronization=True)
    short = timedelta(seconds=10)
    outer = RankGroup(subgroup(ranks, timeout=short))
    inner = RankGroup(subgroup(outer, timeout=short))
    innermost = subgroup(inner, [2, 0], timeout=short)
    if innermost is not None:
        assert sorted(RankGroup(innermost).gather_objects(ranks.rank)) == [0, 2]
    return inner.gather_objects(ranks.rank)


def test_subgroups_of_subgroups_meet_too() -> None:
    assert worlds.run(3, _nested_subgroups) == [[0, 1, 2]] * 3


def test_no_subgroup_without_a_group() -> None:
    with pytest.raises(ValueError, match="these ranks have none"):
        subgroup(RankGroup.single())
