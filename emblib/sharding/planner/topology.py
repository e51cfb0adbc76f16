"""The machine that a plan is for: its ranks and nodes, their memory, and the costs of work."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from emblib.sharding.planner import calibration as defaults
from emblib.sharding.planner.calibration import Calibration
from emblib.sharding.sharding_types import World
from emblib.specs.checks import check_count, check_counts, normalise_counts
from emblib.storage import MemoryBytes


def refuse_old_names(new_names: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return a `__getattr__` that raises AttributeError, with the new name of a renamed attribute.

    `new_names` has the new name of each renamed attribute.
    """

    def refuse(instance: Any, name: str) -> Any:
        hint = f": it is called {new_names[name]!r} now" if name in new_names else ""
        raise AttributeError(f"{type(instance).__name__!r} has no attribute {name!r}{hint}")

    return refuse


class MemoryNeed(NamedTuple):
    """Bytes that a rank needs: device memory at the two peaks of a step, host memory and disk.

    The bytes are whole numbers, as floats, so that sums are exact. The search refers to fields by
    number, in this order.

    Attributes:
        combining: device memory in forward, while returned rows are combined into the output.
        updating: device memory in backward, while rows are updated.
        host: host memory behind a GPU; the memory of a CPU counts as device memory.
        disk: disk.
    """

    combining: float
    updating: float
    host: float = 0
    disk: float = 0

    @property
    def device(self) -> float:
        """Return the peak of device memory."""
        return max(self.combining, self.updating)

    def plus(self, other: "MemoryNeed", factor: float = 1) -> "MemoryNeed":
        """Return the sum of this need and `factor` times another need."""
        return MemoryNeed(*(nbytes + factor * b for nbytes, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Topology:
    """The machine that a plan is for: ranks, their memory, and the constants of the cost model.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node, a divisor of `world_size`; 0 for all of them.
        memory: bytes of memory that the kernels of a rank use: the memory of its GPU, or on the CPU
            its share of host memory. One number, by default 32 GiB, or one per rank.
        host_memory: bytes of host memory per rank with a GPU, by default 0. Leave it 0 on the
            CPU, whose host memory is `memory`.
        disk: bytes of disk per rank, by default 0.
        device: "cpu", which is the default, or "cuda".
        max_ranks_at_once: maximum number of ranks of a node that compute at the same time; by
            default all of them. Set a smaller number if several ranks share a core.
        calibration: the constants; by default `calibration.CPU` or `CUDA`, by the device.

    Raises:
        TypeError: a number of ranks or bytes is not an int, or `calibration` is not a
            `Calibration`.
        ValueError: a number of ranks or bytes is below 1 (`host_memory` and `disk`: below 0),
            `local_world_size` does not divide `world_size`, `memory` has more or fewer entries than
            there are ranks, or the device is unknown.
    """

    world_size: int
    local_world_size: int = 0
    memory: int | tuple[int, ...] = field(default=32 << 30, kw_only=True)
    host_memory: int = field(default=0, kw_only=True)
    disk: int = field(default=0, kw_only=True)
    device: str = field(default="cpu", kw_only=True)
    max_ranks_at_once: int | None = field(default=None, kw_only=True)
    calibration: Calibration | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        normalise_counts(self, "world_size")
        local_size = check_count("local_world_size", self.local_world_size or self.world_size)
        if self.world_size % local_size:
            raise ValueError(
                f"local_world_size must divide world_size = {self.world_size}, got {local_size}"
            )
        object.__setattr__(self, "local_world_size", local_size)
        memory = check_counts("memory", self.memory)
        if isinstance(memory, tuple) and len(memory) != self.world_size:
            raise ValueError(
                f"memory must be one number, or one per rank = {self.world_size}, got {len(memory)}"
            )
        object.__setattr__(self, "memory", memory)
        normalise_counts(self, "host_memory", "disk", minimum=0)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")
        if self.max_ranks_at_once is not None:
            normalise_counts(self, "max_ranks_at_once")
        if self.calibration is None:
            constants = defaults.CUDA if self.device == "cuda" else defaults.CPU
            object.__setattr__(self, "calibration", constants)
        elif not isinstance(self.calibration, Calibration):
            raise TypeError(
                "calibration must be None or a Calibration, e.g. Calibration.load(path), got "
                f"{self.calibration!r}"
            )

    @property
    def world(self) -> World:
        """Return the number of ranks and the ranks per node, for sharding rules."""
        return World(self.world_size, self.local_world_size)

    @property
    def costs(self) -> Calibration:
        """Return the constants of the cost model."""
        assert self.calibration is not None
        return self.calibration

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def ranks_at_once(self) -> int:
        """Return the number of ranks of a node that compute at the same time."""
        return min(self.max_ranks_at_once or self.local_world_size, self.local_world_size)

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names(
            {"computing": "ranks_at_once", "processors": "max_ranks_at_once"}
        )

    def capacity(self) -> list[MemoryBytes]:
        """Return the memory of each rank."""
        memory = self.memory
        memory_per_rank = memory if isinstance(memory, tuple) else (memory,) * self.world_size
        return [MemoryBytes(device, self.host_memory, self.disk) for device in memory_per_rank]

    def of_size(self, world_size: int, local_world_size: int | None = None) -> "Topology":
        """Return the topology of another number of ranks on machines like these.

        If ranks differ in memory, every new rank has the smallest memory.

        Args:
            world_size: number of ranks.
            local_world_size: ranks per node; None or 0 keeps the size of nodes, but a world that is
                smaller than a node is one node.

        Raises:
            TypeError: a number is not an int.
            ValueError: the ranks do not fill whole nodes, or a number is below 1.
        """
        local_size = local_world_size or min(self.local_world_size, world_size)
        memory = self.memory if isinstance(self.memory, int) else min(self.memory)
        return replace(self, world_size=world_size, local_world_size=local_size, memory=memory)

    @classmethod
    def detect(
        cls,
        world_size: int = 1,
        local_world_size: int = 0,
        *,
        device: str | None = None,
        calibration: Calibration | None = None,
    ) -> "Topology":
        """Describe this machine; all ranks are assumed to have machines like it.

        The memory of a rank is the memory of the current GPU. On a CPU it is the memory of the
        host, or the limit of its container, divided by the ranks per node. Ranks on a CPU compute
        at the same time if each has cores for all its threads. Disk is 0: set `disk=` with
        `dataclasses.replace` to use it.

        Args:
            world_size: number of ranks.
            local_world_size: ranks per node; 0 for all of them.
            device: "cpu" or "cuda"; by default "cuda" if there is a GPU.
            calibration: constants of the cost model, as in the class.

        Raises:
            TypeError, ValueError: see the class.
            RuntimeError: the device is "cuda", and torch finds no GPU.
            AssertionError: the device is "cuda", and torch is built without CUDA.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_count("world_size", world_size)
        local_size = check_count("local_world_size", local_world_size or world_size)
        host = host_bytes() // local_size
        if device == "cuda":
            memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
            return cls(
                world_size,
                local_size,
                memory=memory,
                host_memory=host,
                device=device,
                calibration=calibration,
            )
        num_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        ranks_at_once = max(1, (num_cores or 1) // torch.get_num_threads())
        return cls(
            world_size,
            local_size,
            memory=host,
            device=device,
            max_ranks_at_once=ranks_at_once,
            calibration=calibration,
        )


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or the limit of its container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue  # not in such a container, or it has no limit
    return total
