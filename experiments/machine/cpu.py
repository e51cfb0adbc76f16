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
    """Reads below `root`; tests give it a tree of their own."""

    root: Path = Path("/")

    def last_level_cache(self) -> int | None:
        """Bytes of all last-level caches that the usable cores share; None where unknown."""
        found: dict[str, int] = {}
        for core in self.usable_cores():
            level = self._highest_cache(core)
            if level:
                found[level[0]] = level[1]
        return sum(found.values()) or None

    def _highest_cache(self, core: int) -> tuple[str, int] | None:
        """Which cores share the outermost cache of a core, and its size."""
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
        """The cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return sorted(os.sched_getaffinity(0))
        return list(range(os.cpu_count() or 1))

    def model(self) -> str | None:
        """As its maker calls it."""
        text = self._text(self.root / "proc/cpuinfo") or ""
        found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
        return found[1].strip() if found else None

    def governor(self) -> str | None:
        """Frequency governor of the first usable core; None where the system hides it."""
        return self._text(self._core() / "cpufreq/scaling_governor")

    def boost(self) -> bool | None:
        """Whether the frequency may rise above the nominal one; None where unknown."""
        system = self.root / "sys/devices/system/cpu"
        if (turbo := self._text(system / "intel_pstate/no_turbo")) is not None:
            return turbo == "0"
        boost = self._text(system / "cpufreq/boost")
        return None if boost is None else boost == "1"

    def mhz(self) -> float | None:
        """Mean frequency of the usable cores now; None where unknown."""
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
        """What the system did with its time; None where it does not say."""
        first = (self._text(self.root / "proc/stat") or "").partition("\n")[0].split()
        if len(first) < 9 or first[0] != "cpu":
            return None
        rate = os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, waiting, irq, soft, stolen = (int(x) / rate for x in first[1:9])
        busy = user + nice + system + irq + soft
        return Ticks(busy + idle + waiting + stolen, busy, stolen)

    def throttled(self) -> int | None:
        """How often the usable cores were slowed for their heat; None where nobody counts."""
        counts = [
            self._number(
                self.root / f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count"
            )
            for core in self.usable_cores()
        ]
        known = [c for c in counts if c is not None]
        return sum(known) if known else None

    def joules(self) -> float | None:
        """Energy of all packages since some moment, modulo their counters; None where hidden."""
        folders = (self.root / "sys/class/powercap").glob("intel-rapl:*")
        packages = [f for f in folders if f.name.count(":") == 1]
        counts = [self._number(folder / "energy_uj") for folder in packages]
        known = [c for c in counts if c is not None]
        return sum(known) / 1e6 if known and len(known) == len(counts) else None

    def load(self) -> float | None:
        """Mean number of runnable processes in the last minute."""
        text = self._text(self.root / "proc/loadavg")
        return float(text.split()[0]) if text else None

    def hypervisor(self) -> bool:
        """Whether this is a virtual machine."""
        flags = re.search(
            r"^flags\s*:(.*)", self._text(self.root / "proc/cpuinfo") or "", re.MULTILINE
        )
        return bool(flags and "hypervisor" in flags[1].split())

    def huge_pages(self) -> str | None:
        """always, madvise or never; None where the system hides it."""
        text = self._text(self.root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
        chosen = re.search(r"\[(\w+)\]", text)
        return chosen[1] if chosen else None

    def smt(self) -> bool | None:
        """Whether cores run two threads each; None where unknown."""
        text = self._text(self.root / "sys/devices/system/cpu/smt/active")
        return None if text is None else text == "1"

    def quota(self) -> float | None:
        """How many cores' worth of time a container may use; None without a limit."""
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
    """CPU time of this process so far, all threads."""
    times = os.times()
    return times.user + times.system


def cores_of_others(before: Ticks | None, after: Ticks | None, own: float) -> float | None:
    """How many cores everybody else kept busy between two looks, in which this process used `own`.

    None where nobody tells, and for a while so short that the clock ticks are too coarse for it.
    """
    if before is None or after is None:
        return None
    seconds = (after.total - before.total) / (os.cpu_count() or 1)
    if seconds < SHORTEST:
        return None
    return max(0.0, after.busy - before.busy - own) / seconds


def last_level_cache_bytes() -> int:
    """Of the usable cores; a likely size where the system does not say."""
    return Cpu().last_level_cache() or LIKELY_CACHE
