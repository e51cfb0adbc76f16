"""Rank groups: the processes that share a model, and the nodes that they run on."""

from __future__ import annotations

import logging
import os
import pickle
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from emblib.sharding.headers import Content, check_call

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class RankGroup:
    """A group of `size` processes; this process has number `rank` in it.

    The ranks of a node have consecutive numbers. Copying a rank group returns the same object,
    because process groups cannot be copied. Only a rank group without a process group, of one
    process alone, can be pickled.

    Args:
        group: a process group, a one-dimensional `DeviceMesh`, or a mesh of (nodes, ranks per node)
            over all processes. By default all processes, or this process alone if
            `torch.distributed` is not initialized.
        local_size: the number of ranks per node. By default the size of the last dimension of such
            a mesh. Without one, LOCAL_WORLD_SIZE, which torchrun sets, but at most `size`; without
            that variable, `size`.
        device: the device of this rank. By default the current GPU for a group over NCCL, else the
            CPU.

    Raises:
        RuntimeError: torchrun has started several processes and `torch.distributed` is not
            initialized, so that each would train alone. Initialize it first, as
            `with init_distributed()` does, or use `RankGroup.single()`.
        TypeError: `group` is not a process group, a mesh or None, or `local_size` is not an int.
        ValueError: `local_size` does not divide the number of ranks, this process is not in the
            group, or a mesh of several dimensions does not have all processes in order.

    Example:
        >>> ranks = emblib.sharding.RankGroup.single()
        >>> ranks.rank, ranks.size, ranks.local_size
        (0, 1, 1)
    """

    rank: int  # number of this process in the group
    size: int  # number of processes
    local_size: int  # number of processes per node
    device: torch.device  # device of the tensors that this rank sends
    group: dist.ProcessGroup | None  # None for this process alone
    # Where groups have replicas of all tables, the ranks with the shards of this rank, one per
    # group; `ReplicatedModelParallel` sets it.
    replicas: RankGroup | None = None
    # Of `replicas`: whether a first backward has compared the losses of its ranks.
    has_compared_losses = False

    def __init__(
        self,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        *,
        local_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(group, dist.DeviceMesh):
            if local_size is None and group.ndim > 1:
                local_size = group.size(-1)
            group = _group_of_mesh(group)
        elif not isinstance(group, dist.ProcessGroup | None) and not _is_outside(group):
            raise TypeError(
                "ranks must be a RankGroup, a process group, a DeviceMesh, or None for all "
                f"processes, got {group!r}: `with init_distributed() as ranks:` returns them"
            )
        elif group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            _check_not_launched()
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (_rank_in(group), group.size())
        if local_size is None:
            local_size = min(int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), self.size)
        if not isinstance(local_size, int):
            raise TypeError(f"local_size must be an int, got {local_size!r}")
        if not 1 <= local_size <= self.size:
            raise ValueError(
                f"local_size is the number of ranks per node, 1 to {self.size} here, "
                f"got {local_size}"
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
        """Return a group of this process alone, even where `torch.distributed` is initialized."""
        ranks = cls.__new__(cls)
        ranks.rank, ranks.size, ranks.local_size, ranks.group = 0, 1, 1, None
        ranks.device = torch.device(device)
        return ranks

    @classmethod
    def from_value(cls, value: RankGroup | dist.ProcessGroup | dist.DeviceMesh | None) -> RankGroup:
        """Return `value` if it is a `RankGroup`, else `RankGroup(value)`, which may raise."""
        return value if isinstance(value, RankGroup) else cls(value)

    @property
    def node(self) -> int:
        """Return the number of the node that this rank runs on."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.size // self.local_size

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on its node."""
        return self.rank % self.local_size

    def global_rank(self, rank: int) -> int:
        """Return the number of `rank` among all processes."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            RuntimeError: another rank exchanges a batch instead; not detected on a GPU.
        """
        if self.device.type == "cpu":
            check_call(Content.BARRIER, self)  # returns once all ranks have made it
        elif self.size > 1:
            dist.barrier(self.group)

    def gather_objects(self, value: T) -> list[T]:
        """Pickle the values of all ranks, and return them by rank; all ranks call this.

        Every rank must be able to pickle its value. If a rank cannot, it raises, and the other
        ranks wait for it. With one rank nothing is pickled.

        Raises:
            RuntimeError: another rank exchanges a batch instead; not detected on a GPU.
        """
        if self.size == 1:
            return [value]
        check_call(Content.OBJECTS, self)
        values_by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(values_by_rank, value, self.group)
        return values_by_rank

    def __copy__(self) -> RankGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return _unpickle_single, (str(self.device),)
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
    """Make a gloo group of some ranks; return None on the other ranks.

    All of `ranks` must call this together, and no other process, whichever other groups they are
    in.

    Args:
        ranks: the ranks that call this.
        members: the numbers in `ranks` of the members, equal on all ranks; None for all of them.
        timeout: limit of each collective of the group; None for the default of torch.

    Raises:
        ValueError: `ranks` have no process group.
        RuntimeError: with the environment variables of torch that are set, members would wait for
            each other forever, see `_check_group_names`.
    """
    if ranks.group is None:
        raise ValueError("a subgroup is made of a process group, and these ranks have none")
    members = range(ranks.size) if members is None else members
    # torch names a group by a counter of each process. Processes that have made different numbers
    # of groups would look for each other under different names, and hang. So the members agree on
    # a name here, and use it in the store of all processes. They cannot use the store of `ranks`:
    # torch prefixes it with its own name of that group. Only gloo has a public constructor that
    # takes a store.
    name = ranks.gather_objects(uuid.uuid4().hex)[0]
    return _connect_subgroup(ranks, members, name, timeout) if ranks.rank in members else None


def _connect_subgroup(
    ranks: RankGroup, members: Sequence[int], name: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Return a gloo group of `members`, which include this rank and have agreed on `name`."""
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


class NodeRanks(NamedTuple):
    """The ranks of this rank's node (`local`), and the ranks with its local rank (`across`)."""

    local: RankGroup
    across: RankGroup


def can_sum_in_nodes(ranks: RankGroup) -> bool:
    """Return whether rows can be summed within each node of `ranks` before they leave it.

    False for one node, for nodes of one rank, and for GPUs of a process group that is not of all
    processes, since torch makes groups of NCCL among all processes only.
    """
    if ranks.group is None or ranks.nodes == 1 or ranks.local_size == 1:
        return False
    if ranks.device.type == "cpu" or ranks.group is dist.group.WORLD:
        return True
    _LOG.info("%r is not of all processes: its nodes exchange rows without local sums", ranks)
    return False


_node_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, NodeRanks]] = (
    weakref.WeakKeyDictionary()
)


def split_by_node(ranks: RankGroup) -> NodeRanks:
    """Return the groups of this node and across nodes; the first call for a group makes them.

    All of `ranks` must make the first call together. `can_sum_in_nodes(ranks)` must be true, which
    is not checked.
    """
    assert ranks.group is not None
    node_ranks_by_size = _node_ranks.setdefault(ranks.group, {})
    if ranks.local_size not in node_ranks_by_size:
        if ranks.device.type == "cpu":
            name = ranks.gather_objects(uuid.uuid4().hex)[0]
            first_rank, timeout = ranks.node * ranks.local_size, _timeout_of(ranks.group)
            node_members = range(first_rank, first_rank + ranks.local_size)
            across_members = range(ranks.local_rank, ranks.size, ranks.local_size)
            local_ranks = _connect_subgroup(
                ranks, node_members, f"{name}/node{ranks.node}", timeout
            )
            across_ranks = _connect_subgroup(
                ranks, across_members, f"{name}/across{ranks.local_rank}", timeout
            )
        else:
            local_ranks, across_ranks = make_node_groups(ranks)
        node_ranks_by_size[ranks.local_size] = NodeRanks(
            RankGroup(local_ranks, local_size=ranks.local_size, device=ranks.device),
            RankGroup(across_ranks, local_size=1, device=ranks.device),
        )
    return node_ranks_by_size[ranks.local_size]


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's collectives in host memory; None if it is not known."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001 (of torch)
    except (AttributeError, RuntimeError):
        return None
    return timeout


def make_node_groups(ranks: RankGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make two process groups: of this node's ranks, and of the ranks with this local rank.

    Their backends are those of all processes, who must call this together.

    Raises:
        ValueError: `ranks` are not all processes.
    """
    if ranks.group is None or ranks.group is not dist.group.WORLD:
        raise ValueError(
            "groups of nodes are made of all processes: give the ranks of the default group"
        )
    mesh = dist.init_device_mesh(
        ranks.device.type, (ranks.nodes, ranks.local_size), mesh_dim_names=("node", "local")
    )
    return mesh.get_group("local"), mesh.get_group("node")


_HOST_BACKEND = "emblib_gloo"


def sends_from_hosts(group: dist.ProcessGroup) -> bool:
    """Return whether this group sends tensors in host memory over gloo."""
    return bool({"cpu:gloo", f"cpu:{_HOST_BACKEND}"} & set(_backends_of(group)))


def _backends_of(group: dist.ProcessGroup) -> list[str]:
    return str(dist.get_backend_config(group)).split(",")


def _register_host_backend() -> None:
    if not hasattr(dist.Backend, _HOST_BACKEND.upper()):
        dist.Backend.register_backend(
            _HOST_BACKEND, _connect_hosts, extended_api=True, devices=["cpu"]
        )


def _connect_hosts(options: Any, store: dist.Store) -> dist.ProcessGroupGloo:
    """Connect the members of a subgroup under the name that they agreed on."""
    _check_group_names(options, store)
    return dist.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )


def _check_group_names(options: Any, store: dist.Store) -> None:
    """Raise RuntimeError if torch's own names of the group differ and torch would use them.

    If one of `_WAITING_SETTINGS` is set, torch lets members wait for each other under these names,
    forever if they differ. So the members compare them here.
    """
    settings = [
        f"{name}={os.environ.get(name)}"
        for name, value in _WAITING_SETTINGS.items()
        if os.environ.get(name, "").upper() == value
    ]
    if not settings:
        return
    store.set(f"name/{options.group_rank}", options.group_id)
    names = [store.get(f"name/{rank}").decode() for rank in range(options.group_size)]
    if len(set(names)) > 1:
        raise RuntimeError(
            f"with {' and '.join(settings)} torch lets the members of a group wait for each other "
            f"under its own name of the group, which differs here ({names}): unset the variable, "
            "or let all processes make the same process groups in the same order"
        )


_WAITING_SETTINGS = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_DIST_INIT_BARRIER": "1"}


def _is_outside(group: Any) -> bool:
    """Return whether `dist.new_group` returned `group` on a process that is not in the group."""
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _unpickle_single(device: str) -> RankGroup:
    return RankGroup.single(device)


def _check_not_launched() -> None:
    """Raise RuntimeError if this is one of several processes without a process group."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and size.isdecimal() and int(size) > 1:
        raise RuntimeError(
            f"this is process {rank} of {size} that torchrun started (RANK and WORLD_SIZE), and "
            "torch.distributed is not initialized, so each process would be rank 0 of 1 and train "
            "alone: put the script into `with init_distributed() as ranks:`, or call "
            "torch.distributed.init_process_group() first; RankGroup.single() is one process alone"
        )


def _rank_in(group: dist.ProcessGroup) -> int:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "this process is not in the group: only its members can make a RankGroup of it"
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
    """The result of a function, or its error.

    Attributes:
        value: result; None after an error.
        error: error, if it can be pickled.
        text: text of the error; empty without.
    """

    value: Any
    error: BaseException | None
    text: str


def invoke_on_rank_and_broadcast_result(
    ranks: RankGroup, rank: int, function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call `function(*args, **kwargs)` on `rank` and return its result on every rank.

    All ranks call this together; only `rank` uses the function and its arguments. The other ranks
    get a pickled copy of the result.

    Raises:
        ValueError: `rank` is not one of the ranks.
        Exception: the function raised it, or the result cannot be pickled; raised on every rank.
        RuntimeError: on ranks other than `rank`, in place of an error that cannot be pickled.
    """
    if not 0 <= rank < ranks.size:
        raise ValueError(f"rank must be one of 0 to {ranks.size - 1}, and is {rank}")
    if ranks.size == 1:
        return function(*args, **kwargs)
    error: BaseException | None = None
    outcome = [_Outcome(None, None, "")]
    if ranks.rank == rank:
        try:
            outcome = [_Outcome(function(*args, **kwargs), None, "")]
            pickle.dumps(outcome[0].value)
        except Exception as raised:
            error = raised
            outcome = [_Outcome(None, _picklable(raised), f"{type(raised).__name__}: {raised}")]
    dist.broadcast_object_list(outcome, src=ranks.global_rank(rank), group=ranks.group)
    if error is not None:
        raise error
    if outcome[0].error is not None:
        outcome[0].error.add_note(f"(raised on rank {rank})")
        raise outcome[0].error
    if outcome[0].text:
        raise RuntimeError(f"rank {rank} failed: {outcome[0].text}")
    result: T = outcome[0].value
    return result


def _picklable(error: BaseException) -> BaseException | None:
    """Return an error if other ranks can unpickle it, else None."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
