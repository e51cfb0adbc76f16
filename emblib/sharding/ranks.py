"""The ranks that a collection is spread over: a process group and who is on which node."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankGroup:
    """`size` processes, of which this is number `rank`; those of a node have neighbouring numbers.

    `group` is a process group, a one-dimensional `DeviceMesh`, or a mesh of (nodes, ranks of a
    node) over all processes; by default all processes, or this process alone where
    `torch.distributed` has not been initialised. That is an error where torchrun has started
    several processes, as each would train alone: initialise first (`with init_distributed()`
    does), or use `RankGroup.single()`. `local_size`, the ranks of one node, is the last side of
    such a mesh, else what torchrun says (LOCAL_WORLD_SIZE), and at most `size`.
    `device` is the current GPU for a group over NCCL and the CPU otherwise.

    Copying one gives itself: a process group is not a value. It cannot be pickled for that reason.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    def __init__(
        self,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        *,
        local_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(group, dist.DeviceMesh):
            local_size = local_size or (group.size(-1) if group.ndim > 1 else None)
            group = _group_of_mesh(group)
        elif group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            _check_not_launched()
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (_rank_in(group), group.size())
        if local_size is None:
            local_size = min(int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), self.size)
        if not 1 <= local_size <= self.size:
            raise ValueError(
                f"local_size is the number of ranks of a node, 1 to {self.size} here, "
                f"and not {local_size}"
            )
        if self.size % local_size:
            raise ValueError(
                f"{self.size} ranks are not whole nodes of {local_size}: give a local_size that "
                f"divides them, or {self.size} to treat all as one node"
            )
        self.local_size = local_size
        self.device = _device_of(group) if device is None else torch.device(device)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> RankGroup:
        """This process alone, without a process group, whatever is initialised."""
        ranks = cls.__new__(cls)
        ranks.rank, ranks.size, ranks.local_size, ranks.group = 0, 1, 1, None
        ranks.device = torch.device(device)
        return ranks

    @classmethod
    def of(cls, value: RankGroup | dist.ProcessGroup | dist.DeviceMesh | None) -> RankGroup:
        """`value` itself if it is one, else `RankGroup(value)`."""
        if isinstance(value, RankGroup):
            return value
        if not isinstance(value, dist.ProcessGroup | dist.DeviceMesh | None):
            raise TypeError(
                "ranks must be a Ranks, a process group, a DeviceMesh, or None for all processes, "
                f"got {value!r}: with init_distributed() as ranks gives them"
            )
        return cls(value)

    @property
    def node(self) -> int:
        """The node this rank is on."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return self.size // self.local_size

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return self.rank % self.local_size

    def global_rank(self, rank: int) -> int:
        """The number in all processes of `rank` of these."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            dist.barrier(self.group)

    def gather_objects(self, value: T) -> list[T]:
        """What every rank gave, by rank; pickled, and so for small and rare things."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, self.group)
        return every

    def __copy__(self) -> RankGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return _single, (str(self.device),)
        raise pickle.PicklingError(
            "ranks with a process group cannot be pickled; save a state_dict, and shard again "
            "where it is loaded"
        )

    def __repr__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"RankGroup(rank {self.rank} of {self.size}{nodes}, {self.device})"


def subgroup(
    ranks: RankGroup, members: Sequence[int] | None = None, *, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Return a new gloo group of some of `ranks`, or of all of them; None on ranks outside it.

    All of `ranks` call this, whatever groups each of them is in besides; no other process does.
    """
    if ranks.group is None:
        raise ValueError("a subgroup is made of a process group, and these ranks have none")
    members = range(ranks.size) if members is None else members
    # torch names groups by counters of each process, which differ where processes have made unlike
    # numbers of groups, and members that look for each other under unlike names wait forever. So
    # they meet under a name that they agree on here, in the store of all processes: torch prefixes
    # that of a group with its name for it. It is for gloo alone: its constructor is public, and
    # takes the store.
    name = ranks.gather_objects(uuid.uuid4().hex)[0]
    if ranks.rank not in members:
        return None
    _register_host_backend()
    world = dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore(f"emblib/subgroup/{name}", world.get_group_store())
    return dist.new_group(
        [ranks.global_rank(rank) for rank in members],
        backend=_HOST_BACKEND,
        timeout=timeout,
        pg_options=store,
        use_local_synchronization=True,
        group_desc=f"emblib/subgroup/{name}",
    )


_HOST_BACKEND = "emblib_gloo"


def sends_from_hosts(group: dist.ProcessGroup) -> bool:
    """Return whether tensors in host memory travel over gloo in this group."""
    return bool({"cpu:gloo", f"cpu:{_HOST_BACKEND}"} & set(_backends_of(group)))


def _backends_of(group: dist.ProcessGroup) -> list[str]:
    return str(dist.get_backend_config(group)).split(",")


def _register_host_backend() -> None:
    if not hasattr(dist.Backend, _HOST_BACKEND.upper()):
        dist.Backend.register_backend(
            _HOST_BACKEND, _connect_hosts, extended_api=True, devices=["cpu"]
        )


def _connect_hosts(options: Any, store: dist.Store) -> dist.ProcessGroupGloo:
    """Connect the members of a subgroup, under the name that they agreed on."""
    _check_torch_names(options, store)
    return dist.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )


def _check_torch_names(options: Any, store: dist.Store) -> None:
    """Raise where torch itself would wait forever for members under another name."""
    asked = [
        f"{name}={os.environ.get(name)}"
        for name, value in _WAIT_BY_NAME.items()
        if os.environ.get(name, "").upper() == value
    ]
    if not asked:
        return
    store.set(f"name/{options.group_rank}", options.group_id)
    names = [store.get(f"name/{rank}").decode() for rank in range(options.group_size)]
    if len(set(names)) > 1:
        raise RuntimeError(
            f"with {' and '.join(asked)} torch lets the members of a group wait for each other "
            f"under the name it has for it, which differs here ({names}): unset it, or let all "
            "processes make the same process groups in the same order"
        )


_WAIT_BY_NAME = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_DIST_INIT_BARRIER": "1"}


def _single(device: str) -> RankGroup:
    return RankGroup.single(device)


def _check_not_launched() -> None:
    """Raise RuntimeError if this process is one of several that have no process group yet."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and size.isdecimal() and int(size) > 1:
        raise RuntimeError(
            f"this is process {rank} of {size} that torchrun started (RANK and WORLD_SIZE), and "
            "torch.distributed is not initialised, so each process would be rank 0 of 1 and train "
            "alone: put the script into `with init_distributed() as ranks:`, or call "
            "torch.distributed.init_process_group() first; RankGroup.single() is one process alone"
        )


def _rank_in(group: dist.ProcessGroup) -> int:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "this process is not in the group it was given: only members make Ranks of it"
        )
    return rank


def _group_of_mesh(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.mesh.flatten().tolist() == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    raise ValueError(
        f"a mesh of {mesh.ndim} dimensions must hold all {dist.get_world_size()} processes in "
        f"order, and this one is {mesh.mesh.tolist()}; give the process group of its ranks and "
        "local_size instead"
    )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if group is not None and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Outcome(NamedTuple):
    """What the function returned, or the error it raised and its text."""

    value: Any
    error: BaseException | None
    text: str


def invoke_on_rank_and_broadcast_result(
    ranks: RankGroup, rank: int, function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """What `function(*args, **kwargs)` returns on `rank`, on every rank; all of them call this.

    The result is pickled. If the function raises, every rank raises: nobody waits for a result that
    will not come.
    """
    if not 0 <= rank < ranks.size:
        raise ValueError(f"rank must be one of 0 to {ranks.size - 1}, and is {rank}")
    if ranks.size == 1:
        return function(*args, **kwargs)
    error: BaseException | None = None
    told = [_Outcome(None, None, "")]
    if ranks.rank == rank:
        try:
            told = [_Outcome(function(*args, **kwargs), None, "")]
            pickle.dumps(told[0].value)
        except Exception as raised:
            error = raised
            told = [_Outcome(None, _picklable(raised), f"{type(raised).__name__}: {raised}")]
    dist.broadcast_object_list(told, src=ranks.global_rank(rank), group=ranks.group)
    if error is not None:
        raise error
    if told[0].error is not None:
        told[0].error.add_note(f"(raised on rank {rank})")
        raise told[0].error
    if told[0].text:
        raise RuntimeError(f"rank {rank} failed: {told[0].text}")
    result: T = told[0].value
    return result


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
