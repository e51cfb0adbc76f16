"""The machine a plan is for: ranks, nodes, memory, and what things cost there."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from emblib.sharding.planner import calibration as defaults
from emblib.sharding.planner.calibration import Calibration
from emblib.sharding.sharding_types import World
from emblib.specs import check_count
from emblib.storage import MemoryBytes


class Need(NamedTuple):
    """Bytes that tables and batches take, of the device's memory at the two moments of a peak.

    `combining` is when pooled rows have come back and are put together, `updating` when gradients
    have gone out and rows are updated; either must fit.
    """

    combining: float
    updating: float
    host: float = 0
    disk: float = 0

    @property
    def device(self) -> float:
        """Most bytes of the device's memory."""
        return max(self.combining, self.updating)

    def plus(self, other: "Need", factor: float = 1) -> "Need":
        """This and `factor` times the other."""
        return Need(*(a + factor * b for a, b in zip(self, other, strict=True)))


_GIB = 1 << 30


@dataclass(frozen=True)
class Topology:
    """Ranks, their memory, and the constants of the cost model.

    Args:
        world_size: ranks in all.
        local_world_size: ranks of one node, which divides `world_size`; left out, all of them.
        memory: bytes of the memory that the kernels of a rank work in: of its GPU, or its share of
            the host's on the CPU. One number, or one a rank.
        host_memory: bytes of host memory a rank may use beside that; 0 on the CPU, where it is the
            same memory.
        disk: bytes of disk a rank may use.
        device: "cpu" or "cuda".
        processors: how many ranks of a node compute at a time; left out, all of them. Fewer than
            there are ranks where several share a core.
        calibration: the constants; left out, `defaults` of the device.
    """

    world_size: int
    local_world_size: int = 0
    memory: int | tuple[int, ...] = field(default=32 * _GIB, kw_only=True)
    host_memory: int = field(default=0, kw_only=True)
    disk: int = field(default=0, kw_only=True)
    device: str = field(default="cpu", kw_only=True)
    processors: int | None = field(default=None, kw_only=True)
    calibration: Calibration | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_count("world_size", self.world_size)
        local = self.local_world_size or self.world_size
        check_count("local_world_size", local)
        if self.world_size % local:
            raise ValueError(
                f"local_world_size must divide world_size = {self.world_size}, got {local}"
            )
        object.__setattr__(self, "local_world_size", local)
        memory = self.memory
        if isinstance(memory, Sequence) and not isinstance(memory, str):
            memory = tuple(memory)
            if len(memory) != self.world_size:
                raise ValueError(
                    f"memory must be one number, or one a rank = {self.world_size}, got "
                    f"{len(memory)}"
                )
        for value in memory if isinstance(memory, tuple) else (memory,):
            check_count("memory", value)
        object.__setattr__(self, "memory", memory)
        for name in ("host_memory", "disk"):
            check_count(name, getattr(self, name), minimum=0)
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")
        if self.processors is not None:
            check_count("processors", self.processors)
        if self.calibration is None:
            chosen = defaults.CUDA if self.device == "cuda" else defaults.CPU
            object.__setattr__(self, "calibration", chosen)

    @property
    def world(self) -> World:
        """Ranks and nodes as rules take them."""
        return World(self.world_size, self.local_world_size)

    @property
    def costs(self) -> Calibration:
        """The constants."""
        assert self.calibration is not None
        return self.calibration

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return self.world_size // self.local_world_size

    @property
    def computing(self) -> int:
        """How many ranks of a node compute at a time."""
        return min(self.processors or self.local_world_size, self.local_world_size)

    def capacity(self) -> list[MemoryBytes]:
        """What each rank has."""
        memory = self.memory
        each = memory if isinstance(memory, tuple) else (memory,) * self.world_size
        return [MemoryBytes(device, self.host_memory, self.disk) for device in each]

    def of_size(self, world_size: int, local_world_size: int | None = None) -> "Topology":
        """The same machines in another number, nodes as large as these unless said otherwise."""
        local = local_world_size or min(self.local_world_size, world_size)
        memory = self.memory if isinstance(self.memory, int) else min(self.memory)
        return replace(self, world_size=world_size, local_world_size=local, memory=memory)

    @classmethod
    def detect(
        cls,
        world_size: int = 1,
        local_world_size: int = 0,
        *,
        device: str | None = None,
        calibration: Calibration | None = None,
    ) -> "Topology":
        """This machine, taken to be like those of the other ranks.

        Memory is that of the current GPU, or the host's (a container's limit, where there is one)
        divided by the ranks of a node. Nothing is assumed of the disk: say `disk=` to use it.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        local = local_world_size or world_size
        host = host_bytes() // local
        if device == "cuda":
            memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
            return cls(
                *(world_size, local),
                memory=memory,
                host_memory=host,
                device=device,
                calibration=calibration,
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        at_a_time = max(1, (cores or 1) // torch.get_num_threads())
        return cls(*(world_size, local), memory=host, processors=at_a_time, calibration=calibration)


def host_bytes() -> int:
    """Memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue  # no such container, or no limit
    return total
