"""Clocks: how long one call takes, on the host or on a GPU, with caches as the mode wants them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from experiments.config.schema import Mode
from experiments.machine.cpu import last_level_cache_bytes

FLUSH = 2  # times the last-level cache are written to empty it
Phase = Callable[[int], object]  # runs batch number n of the pool


class UnsupportedMode(ValueError):
    """This device, or this contender, has no such mode; the message says why."""


@dataclass(frozen=True)
class Work:
    """One sample to take; works of one `key` behave alike, so a clock may learn from one."""

    call: Callable[[], object]
    key: str = ""


@dataclass(frozen=True)
class Reading:
    """One sample taken."""

    seconds: float  # what counts
    wall: float  # that the host spent inside the call; a GPU may still have been at work
    cost: float  # that taking the sample took altogether, with whatever prepared it
    exposed: bool = False  # a GPU waited for the host, so launches are inside `seconds`


class Clock(ABC):
    """Times calls; tests use clocks that only pretend."""

    mode: Mode = Mode.hot
    fewest_seconds: float = 50e-6  # calls that take less share a sample

    @abstractmethod
    def time(self, work: Callable[[], object]) -> float:
        """Seconds that `work` took."""

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """All of them in this order, each asked for as late as possible."""
        seconds = (self.time(work.call) for work in works)
        return [Reading(s, s, s) for s in seconds]

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """The phase in the form that this clock times, for the batches 0 .. pool - 1."""
        return phase

    def describe(self) -> dict[str, object]:
        """What the mode means here, for the record."""
        return {"mode": self.mode.value}


class WallClock(Clock):
    """time.perf_counter: right for CPU work, which is finished when the call returns.

    The caches are left as the previous sample left them, which is hot for tables that fit.
    """

    def __init__(self, mode: Mode = Mode.hot) -> None:
        self.mode = mode

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of wall time."""
        start = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - start) / 1e9


class ColdClock(Clock):
    """A wall clock that empties the CPU's caches before every sample, outside the time.

    By adding to a buffer of twice the last-level cache: reading as well as writing, because plain
    stores may bypass the caches and leave what is there.
    """

    mode = Mode.cold

    def __init__(
        self,
        flush: Callable[[], object] | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
        size: float = FLUSH,
    ) -> None:
        self.flush_bytes = int(size * last_level_cache_bytes())
        self.now = now
        self.flush = flush or self._make_flush()

    def _make_flush(self) -> Callable[[], object]:
        buffer = torch.zeros(self.flush_bytes // 4)
        return lambda: buffer.add_(1.0)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of wall time from empty caches."""
        return self._sample(work).seconds

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Samples whose cost includes emptying the caches."""
        return [self._sample(work.call) for work in works]

    def _sample(self, work: Callable[[], object]) -> Reading:
        begun = self.now()
        self.flush()
        start = self.now()
        work()
        end = self.now()
        return Reading((end - start) / 1e9, (end - start) / 1e9, (end - begun) / 1e9)

    def describe(self) -> dict[str, object]:
        """How much is written to empty the caches."""
        return {"mode": self.mode.value, "flush_bytes": self.flush_bytes}


def clock_for(device: torch.device, mode: Mode = Mode.hot) -> Clock:
    """The clock that tells the truth on `device` in this mode.

    hot: as the last sample left the caches; on a GPU launched behind a spin, so that the GPU never
    waits for the host. cold: the same from empty caches. graph: a CUDA graph of every batch. wall:
    from the call on an idle device until it is finished, launches included; on a CPU this is hot.
    """
    if device.type == "cuda":
        from experiments.timing.cuda_clock import CudaClock, TorchGpu

        return CudaClock(TorchGpu(device), mode)
    if mode is Mode.graph:
        raise UnsupportedMode(
            "mode graph replays CUDA graphs, and the device is cpu; use hot, cold or wall there"
        )
    return ColdClock() if mode is Mode.cold else WallClock(mode)
