"""The CPU: caches, governor, throttling and limits, and the processor time of other processes.

psutil reads some of these facts, `Cpu` the others from files of the kernel. py-cpuinfo would not
do: it starts processes, takes more than a second, and reports the cache of one core only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

BUSY_CORES = 0.25  # cores of other processes that raise the flag `busy`
MAX_STOLEN_SHARE = 0.01  # share of stolen time that raises the flag `stolen_time`
MIN_SECONDS = 0.1  # shortest time that clock ticks of 10 ms can measure
LIKELY_CACHE_BYTES = 32 << 20  # assumed last-level cache of a system that does not state it
CORES = "sys/devices/system/cpu"


def usable_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def last_level_cache_bytes() -> int:
    """Return the bytes of the last-level caches of the usable cores, or LIKELY_CACHE_BYTES."""
    return Cpu().last_level_cache() or LIKELY_CACHE_BYTES


def mean_mhz() -> float | None:
    """Return the present mean frequency of the usable cores in MHz, or None."""
    try:
        frequencies = [frequency.current for frequency in psutil.cpu_freq(percpu=True)]
    except (AttributeError, OSError, NotImplementedError):
        return None
    usable = [frequencies[core] for core in usable_cores() if core < len(frequencies)]
    return sum(usable) / len(usable) if usable else None


class CpuTime:
    """The processor time of other processes and of a hypervisor since the object was created."""

    def __init__(self) -> None:
        self._system, self._process = psutil.cpu_times(), os.times()

    def usage_by_others(self) -> tuple[float | None, float | None]:
        """Return (share of the time stolen by a hypervisor, number of cores others used).

        Both are None if the system has counted no processor time since the object was created. The
        number of cores, which is a mean, is None also if less than MIN_SECONDS passed.
        """
        times_before, times = self._system._asdict(), psutil.cpu_times()._asdict()
        increase_s = {state: times[state] - times_before[state] for state in times}
        busy_s = sum(increase_s.get(s, 0.0) for s in ("user", "nice", "system", "irq", "softirq"))
        stolen_s = increase_s.get("steal", 0.0)
        total_s = busy_s + stolen_s + increase_s.get("idle", 0.0) + increase_s.get("iowait", 0.0)
        if total_s <= 0:
            return None, None
        process = os.times()
        process_s = process.user + process.system - self._process.user - self._process.system
        elapsed_s = total_s / (os.cpu_count() or 1)
        cores_of_others = (
            None if elapsed_s < MIN_SECONDS else max(0.0, busy_s - process_s) / elapsed_s
        )
        return stolen_s / total_s, cores_of_others


@dataclass(frozen=True)
class Cpu:
    """Facts about the CPU from the kernel's files below `root`.

    A fact that the files lack is None, except that `cpuinfo` is "", `instructions` is empty and
    `is_virtual` is False. Paths are relative to `root`.
    """

    root: Path = Path("/")

    def read_text(self, path: str) -> str | None:
        """Return the text of a file without white space at its ends, or None."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def read_number(self, path: str) -> int | None:
        """Return the whole number in a file, or None."""
        try:
            return int(self.read_text(path) or "")
        except ValueError:
            return None

    def cpuinfo(self, key: str) -> str:
        """Return the entry `key` of /proc/cpuinfo about the first core, or ""."""
        match = re.search(rf"^{key}\s*:(.*)", self.read_text("proc/cpuinfo") or "", re.MULTILINE)
        return match[1].strip() if match else ""

    def instructions(self) -> frozenset[str]:
        """Return the CPU's flags as Linux names them, e.g. "avx2"."""
        return frozenset(self.cpuinfo("flags").split())

    def is_virtual(self) -> bool:
        """Return whether the CPU states that this is a virtual machine."""
        return "hypervisor" in self.instructions()

    def last_level_cache(self) -> int | None:
        """Return the bytes of the usable cores' last-level caches; a shared one counts once."""
        sizes: dict[str, int] = {}
        for core in usable_cores():
            outermost_cache = (0, "", 0)
            for index in (self.root / f"{CORES}/cpu{core}/cache").glob("index*"):
                level = self.read_number(f"{index}/level")
                size_text = re.fullmatch(r"(\d+)([KM]?)", self.read_text(f"{index}/size") or "")
                if size_text and level and level > outermost_cache[0]:
                    unit_bytes = {"": 1, "K": 1 << 10, "M": 1 << 20}[size_text[2]]
                    core_list = self.read_text(f"{index}/shared_cpu_list") or str(core)
                    num_bytes = int(size_text[1]) * unit_bytes
                    outermost_cache = (level, f"{level}:{core_list}", num_bytes)
            sizes[outermost_cache[1]] = outermost_cache[2]
        return sum(sizes.values()) or None

    def governor(self) -> str | None:
        """Return the frequency governor of the first usable core."""
        return self.read_text(f"{CORES}/cpu{usable_cores()[0]}/cpufreq/scaling_governor")

    def has_boost(self) -> bool | None:
        """Return whether the frequency may exceed the nominal one; None if unknown."""
        if (no_turbo := self.read_number(f"{CORES}/intel_pstate/no_turbo")) is not None:
            return no_turbo == 0
        boost = self.read_number(f"{CORES}/cpufreq/boost")
        return None if boost is None else boost == 1

    def num_throttled(self) -> int | None:
        """Return how often the usable cores were throttled for heat since the system started."""
        counts = [
            self.read_number(f"{CORES}/cpu{core}/thermal_throttle/core_throttle_count")
            for core in usable_cores()
        ]
        core_counts = [count for count in counts if count is not None]
        return sum(core_counts) if core_counts else None

    def quota_cores(self) -> float | None:
        """Return the limit of a container in cores; None without a limit."""
        limits = (self.read_text("sys/fs/cgroup/cpu.max") or "").split()
        if len(limits) == 2 and limits[0] != "max":
            return int(limits[0]) / int(limits[1])
        limit = self.read_number("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = self.read_number("sys/fs/cgroup/cpu/cpu.cfs_period_us")
        return limit / period if limit and period and limit > 0 else None
