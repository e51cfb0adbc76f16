"""What the machine does while it is measured: clocks, heat, power, throttling, stolen time.

A `Telemetry` watches one race. `check` tells what slowed the machine since it was last asked, so
that the samples of that time can be marked and taken again; `summary` is for the record.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from experiments.machine.cpu import BUSY, Cpu, cores_of_others, own_seconds

PERIOD = 0.2  # seconds between two looks
STOLEN = 0.01  # a larger share of the time for other virtual machines is worth a flag


class Telemetry(Protocol):
    """Watches between `start` and `stop`."""

    def start(self) -> None:
        """Begin to watch."""
        ...

    def check(self) -> list[str]:
        """Why the machine was slowed since the last check; empty where it was not."""
        ...

    def stop(self) -> None:
        """Watch no longer."""
        ...

    def summary(self) -> dict[str, Any]:
        """What was seen, for the record."""
        ...

    def flags(self) -> list[str]:
        """What a reader must know of it."""
        ...


class NoTelemetry:
    """Where nothing can be seen, and in tests."""

    def start(self) -> None:
        """Nothing to begin."""

    def check(self) -> list[str]:
        """Nothing is ever seen."""
        return []

    def stop(self) -> None:
        """Nothing to end."""

    def summary(self) -> dict[str, Any]:
        """Nothing was seen."""
        return {}

    def flags(self) -> list[str]:
        """Nothing to tell."""
        return []


class CpuTelemetry:
    """Load, frequency, stolen time and throttling of the CPU, as its kernel counts them."""

    def __init__(
        self,
        cpu: Cpu | None = None,
        now: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = own_seconds,
    ) -> None:
        self.cpu, self.now, self.own = cpu or Cpu(), now, own
        self.load: list[float] = []
        self.mhz: list[float] = []
        self.seen: set[str] = set()
        self.throttles: int | None = None
        self.stolen: float | None = None  # share of the system's time
        self.others: float | None = None  # cores that other processes kept busy
        self._looked = 0.0

    def start(self) -> None:
        """Count from now."""
        self.throttles = self.cpu.throttled()
        self._first, self._own = self.cpu.ticks(), self.own()
        self._look()

    def check(self) -> list[str]:
        """Cores that were slowed for their heat; the rest is looked at now and then."""
        if self.now() - self._looked > PERIOD:
            self._look()
        count = self.cpu.throttled()
        slowed = count is not None and self.throttles is not None and count > self.throttles
        self.throttles = count
        if not slowed:
            return []
        self.seen.add("cpu_thermal")
        return ["cpu_thermal"]

    def _look(self) -> None:
        self._looked = self.now()
        if (load := self.cpu.load()) is not None:
            self.load.append(load)
        if (mhz := self.cpu.mhz()) is not None:
            self.mhz.append(mhz)

    def stop(self) -> None:
        """Look once more."""
        self._look()
        first, last = self._first, self.cpu.ticks()
        self.others = cores_of_others(first, last, self.own() - self._own)
        if first and last and last.total > first.total:
            self.stolen = (last.stolen - first.stolen) / (last.total - first.total)

    def summary(self) -> dict[str, Any]:
        """Load and MHz as [least, median, most], the share of stolen time, what others took."""
        found: dict[str, Any] = {"load": spread(self.load), "cpu_mhz": spread(self.mhz)}
        if self.stolen is not None:
            found["stolen"] = round(self.stolen, 4)
        if self.others is not None:
            found["cores_of_others"] = round(self.others, 2)
        if self.seen:
            found["throttle"] = sorted(self.seen)
        return {k: v for k, v in found.items() if v is not None}

    def flags(self) -> list[str]:
        """Whether the time was not this process's own."""
        found = {
            "stolen_time": (self.stolen or 0.0) > STOLEN,
            "busy": (self.others or 0.0) > BUSY,
        }
        return [flag for flag, is_so in found.items() if is_so]


def spread(values: Iterable[float]) -> list[float] | None:
    """[least, median, most]; None of nothing."""
    known = sorted(values)
    if not known:
        return None
    return [round(x, 2) for x in (known[0], statistics.median(known), known[-1])]


def telemetry_for(device: torch.device) -> Telemetry:
    """What can be watched here: the GPU through NVML where it answers, else the CPU."""
    if device.type == "cuda":
        from experiments.machine.nvml import Nvml, NvmlTelemetry

        nvml = Nvml.open(device)
        return NvmlTelemetry(nvml) if nvml else NoTelemetry()
    return CpuTelemetry()
