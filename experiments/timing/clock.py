"""Clocks: how long one call takes, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Clock(Protocol):
    """Anything that can time a call; tests use one that only pretends."""

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that `work` took."""
        ...


class WallClock:
    """time.perf_counter: right for CPU work, which is finished when the call returns."""

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of wall time."""
        start = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - start) / 1e9


class CudaClock:
    """Events on the current stream around an eager call that starts on an idle GPU.

    Launch latency is therefore inside the time, as it is in an eager training loop.
    """

    def time(self, work: Callable[[], object]) -> float:
        """Seconds between the two events."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock that tells the truth on `device`."""
    return CudaClock() if device.type == "cuda" else WallClock()
