"""The CPU as the kernel shows it: caches, governor, frequency, stolen time, throttling, load."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

SHORTEST = 0.1  # seconds: ten ticks
BUSY = 0.25  # of a core: more for other processes is worth a flag
LIKELY_CACHE = 32 << 20  # where the system does not say how large the last-level cache is


@dataclass(frozen=True)
class Ticks:
    """Seconds of all cores together since the system started."""

    total: float
    busy: float  # of which somebody computed
    stolen: float  # or wanted to, while a hypervisor let others


@dataclass(frozen=True)
class Cpu:
    """Read the CPU's files below `root`, which tests replace."""

    root: Path = Path("/")

    def last_level_cache(self) -> int | None:
        """Return the bytes of all last-level caches of the usable cores; None where unknown."""
        found: dict[str, int] = {}
        for core in self.usable_cores():
            level = self._highest_cache(core)
            if level:
                found[level[0]] = level[1]
        return sum(found.values()) or None

    def _highest_cache(self, core: int) -> tuple[str, int] | None:
        """Return the cores that share the outermost cache of a core, and its size."""
        best = None
        folder = self.root / f"sys/devices/system/cpu/cpu{core}/cache"
        for index in sorted(folder.glob("index*")):
            size = re.fullmatch(r"(\d+)([KM]?)", self._text(index / "size") or "")
            level = self._number(index / "level")
            if size and level and (best is None or level > best[0]):
                scale = {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
                shared = self._text(index / "shared_cpu_list") or str(core)
                best = (level, f"{level}:{shared}", int(size[1]) * scale)
        return best[1:] if best else None

    def usable_cores(self) -> list[int]:
        """Return the cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return sorted(os.sched_getaffinity(0))
        return list(range(os.cpu_count() or 1))

    def model(self) -> str | None:
        """Return the model name."""
        text = self._text(self.root / "proc/cpuinfo") or ""
        found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
        return found[1].strip() if found else None

    def governor(self) -> str | None:
        """Return the frequency governor of the first usable core; None where unknown."""
        return self._text(self._core() / "cpufreq/scaling_governor")

    def boost(self) -> bool | None:
        """Return whether the frequency may exceed the nominal one; None where unknown."""
        system = self.root / "sys/devices/system/cpu"
        if (turbo := self._text(system / "intel_pstate/no_turbo")) is not None:
            return turbo == "0"
        boost = self._text(system / "cpufreq/boost")
        return None if boost is None else boost == "1"

    def mhz(self) -> float | None:
        """Return the present mean frequency of the usable cores; None where unknown."""
        usable = set(self.usable_cores())
        found, core = [], -1
        for line in (self._text(self.root / "proc/cpuinfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "processor":
                core = int(value)
            elif key.strip() == "cpu MHz" and core in usable:
                found.append(float(value))
        return sum(found) / len(found) if found else None

    def ticks(self) -> Ticks | None:
        """Return how the system spent its time; None where unknown."""
        first = (self._text(self.root / "proc/stat") or "").partition("\n")[0].split()
        if len(first) < 9 or first[0] != "cpu":
            return None
        rate = os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, waiting, irq, soft, stolen = (int(x) / rate for x in first[1:9])
        busy = user + nice + system + irq + soft
        return Ticks(busy + idle + waiting + stolen, busy, stolen)

    def throttled(self) -> int | None:
        """Return how often the usable cores were throttled for heat; None where not counted."""
        counts = [
            self._number(
                self.root / f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count"
            )
            for core in self.usable_cores()
        ]
        known = [c for c in counts if c is not None]
        return sum(known) if known else None

    def joules(self) -> float | None:
        """Return the energy counter of all packages; None where unavailable."""
        folders = (self.root / "sys/class/powercap").glob("intel-rapl:*")
        packages = [f for f in folders if f.name.count(":") == 1]
        counts = [self._number(folder / "energy_uj") for folder in packages]
        known = [c for c in counts if c is not None]
        return sum(known) / 1e6 if known and len(known) == len(counts) else None

    def load(self) -> float | None:
        """Return the mean number of runnable processes in the last minute."""
        text = self._text(self.root / "proc/loadavg")
        return float(text.split()[0]) if text else None

    def hypervisor(self) -> bool:
        """Return whether this is a virtual machine."""
        flags = re.search(
            r"^flags\s*:(.*)", self._text(self.root / "proc/cpuinfo") or "", re.MULTILINE
        )
        return bool(flags and "hypervisor" in flags[1].split())

    def huge_pages(self) -> str | None:
        """Return always, madvise or never; None where unknown."""
        text = self._text(self.root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
        chosen = re.search(r"\[(\w+)\]", text)
        return chosen[1] if chosen else None

    def smt(self) -> bool | None:
        """Return whether cores run two threads each; None where unknown."""
        text = self._text(self.root / "sys/devices/system/cpu/smt/active")
        return None if text is None else text == "1"

    def quota(self) -> float | None:
        """Return a container's limit in cores; None without one."""
        group = self.root / "sys/fs/cgroup"
        words = (self._text(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        limit = self._number(group / "cpu/cpu.cfs_quota_us")
        period = self._number(group / "cpu/cpu.cfs_period_us")
        return limit / period if limit and period and limit > 0 else None

    def _core(self) -> Path:
        return self.root / f"sys/devices/system/cpu/cpu{self.usable_cores()[0]}"

    def _number(self, path: Path) -> int | None:
        text = self._text(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    @staticmethod
    def _text(path: Path) -> str | None:
        try:
            return path.read_text().strip()
        except OSError:
            return None


def own_seconds() -> float:
    """Return the CPU time of this process, all threads."""
    times = os.times()
    return times.user + times.system


def cores_of_others(before: Ticks | None, after: Ticks | None, own: float) -> float | None:
    """Return how many cores other processes kept busy between two readings.

    None where unknown, and for intervals too short for the resolution of clock ticks.
    """
    if before is None or after is None:
        return None
    seconds = (after.total - before.total) / (os.cpu_count() or 1)
    if seconds < SHORTEST:
        return None
    return max(0.0, after.busy - before.busy - own) / seconds


def last_level_cache_bytes() -> int:
    """Return the last-level cache of the usable cores; a likely size where unknown."""
    return Cpu().last_level_cache() or LIKELY_CACHE
