"""What the machine is and what it permits: processor, memory, GPU, clocks, rights, other load."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.machine.cpu import BUSY, LIKELY_CACHE, Cpu, cores_of_others, own_seconds
from experiments.machine.findings import Finding, State
from experiments.machine.flags import explain, remedy
from experiments.machine.software import DRIVER
from experiments.paths import ROOT

if TYPE_CHECKING:
    from experiments.machine.nvml import Nvml

LOOK_SECONDS = 0.3  # at what other processes do
LITTLE_SPACE = 2 << 30
# What NVML tells of a GPU's settings: how to call it, and its unit; none for on or off.
SETTINGS = {
    "sm_mhz": ("SM clock", "MHz"),
    "sm_mhz_most": ("SM clock, most", "MHz"),
    "memory_mhz": ("memory clock", "MHz"),
    "memory_mhz_most": ("memory clock, most", "MHz"),
    "temperature_c": ("temperature", "°C"),
    "power_limit_w": ("power limit", "W"),
    "power_limit_default_w": ("power limit, default", "W"),
    "persistence": ("persistence", ""),
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
}


def processor(
    cpu: Cpu | None = None, sleep: Callable[[float], object] = time.sleep
) -> list[Finding]:
    """The CPU, its clocks, who else uses it."""
    cpu = cpu or Cpu()
    before, own = cpu.ticks(), own_seconds()
    sleep(LOOK_SECONDS)
    others = cores_of_others(before, cpu.ticks(), own_seconds() - own)
    cache, mhz, load = cpu.last_level_cache(), cpu.mhz(), cpu.load()
    found = [
        _row("model", cpu.model()),
        _row("usable cores", str(len(cpu.usable_cores()))),
        _row("hyper-threads", {True: "on", False: "off", None: None}[cpu.smt()]),
        _row("last-level cache", _mib(cache))
        if cache
        else _row("last-level cache", None, f"{_mib(LIKELY_CACHE)} is assumed to empty it"),
        _row("frequency", f"{mhz:.0f} MHz" if mhz else None),
        _governor(cpu.governor()),
        _row("boost", {True: "on", False: "off", None: None}[cpu.boost()]),
        _row("load", f"{load:.2f} in the last minute" if load is not None else None),
        _others(others),
        _quota(cpu),
        _flagged("virtual", "virtual machine", "yes")
        if cpu.hypervisor()
        else _row("virtual machine", "no"),
        _counter("throttle counter", cpu.throttled()),
    ]
    return found


def _row(what: str, found: str | None, advice: str = "") -> Finding:
    """What the system hides is worth a note only where something follows from it."""
    if found is not None:
        return Finding("Processor", what, found)
    return Finding("Processor", what, "not shown", State.note if advice else State.ok, advice)


def _flagged(flag: str, what: str, found: str, section: str = "Processor") -> Finding:
    return Finding(section, what, found, State.note, f"{explain(flag)}: {remedy(flag)}")


def _governor(name: str | None) -> Finding:
    if name in (None, "performance"):
        return _row("governor", name)
    return _flagged("governor", "governor", str(name))


def _others(cores: float | None) -> Finding:
    what = "other processes"
    if cores is None:
        return _row(what, None)
    found = f"{cores:.2f} cores"
    return _flagged("busy", what, found) if cores > BUSY else _row(what, found)


def _quota(cpu: Cpu) -> Finding:
    quota = cpu.quota()
    if quota is None:
        return _row("quota", "none")
    found = f"{quota:g} cores' worth of time"
    small = quota < len(cpu.usable_cores())
    return _flagged("quota", "quota", found) if small else _row("quota", found)


def _counter(what: str, count: int | None) -> Finding:
    return _row(what, None if count is None else f"{count} since the system started")


def memory(cpu: Cpu | None = None) -> list[Finding]:
    """How much there is, and in which pages."""
    import torch

    from experiments.timing.memory import available_bytes, resettable_peak

    section, cpu = "Memory", cpu or Cpu()
    pages = cpu.huge_pages()
    found = [
        Finding(section, "free for tables", f"{available_bytes(torch.device('cpu')) / 1e9:.1f} GB"),
        Finding(section, "huge pages", pages or "not shown")
        if pages != "never"
        else Finding(
            section,
            "huge pages",
            "never",
            State.note,
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled as administrator: large "
            "tables miss the TLB less",
        ),
    ]
    if resettable_peak():
        return [*found, Finding(section, "peak of one call", "can be measured")]
    advice = "/proc/self/clear_refs cannot be written here, so peak memory is left out of reports"
    return [*found, Finding(section, "peak of one call", "hidden", State.note, advice)]


def gpus() -> list[Finding]:
    """What torch sees, and what NVML says of each."""
    import torch

    if not torch.cuda.is_available():
        return [no_gpu(torch.__version__, torch.version.cuda, driver=DRIVER.exists())]
    from experiments.machine.nvml import Nvml

    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found += gpu(torch.cuda.get_device_properties(device), Nvml.open(device))
    return found


def no_gpu(version: str, cuda: str | None, *, driver: bool) -> Finding:
    """Why torch sees none: there is none, or this torch is not for it."""
    why = f"built for CUDA {cuda}, finds no device" if cuda else "a build for the CPU"
    found = f"{version}: {why}"
    if not driver:
        return Finding("GPU", "torch", found)
    advice = "an NVIDIA driver is loaded: " + (
        "see CUDA_VISIBLE_DEVICES, and nvidia-smi" if cuda else "install a torch built for CUDA"
    )
    return Finding("GPU", "torch", found, State.note, advice)


def gpu(properties: Any, nvml: Nvml | None) -> list[Finding]:
    """One device: what it is, how it is set, what would make it steadier."""
    from experiments.machine.preflight import gpu_flags

    section = f"GPU: {properties.name}"
    found = [
        Finding(section, "capability", f"{properties.major}.{properties.minor}"),
        Finding(section, "memory", f"{properties.total_memory / 1e9:.0f} GB"),
        Finding(section, "L2 cache", _mib(int(properties.L2_cache_size))),
    ]
    flags, settings = gpu_flags(nvml)
    for key, (label, unit) in SETTINGS.items():
        if key in settings:
            value = settings[key]
            words = {True: "on", False: "off"}[value] if unit == "" else f"{value:g} {unit}"
            found.append(Finding(section, label, words))
    return found + [_flagged(flag, flag.replace("_", " "), "yes", section) for flag in flags]


def permissions(folder: Path = ROOT) -> list[Finding]:
    """Rights and room."""
    section = "Permissions"
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    free = shutil.disk_usage(folder).free
    room = f"{free / 1e9:.0f} GB free"
    found = [
        Finding(section, "administrator", "yes" if root else "no")
        if root
        else Finding(
            section, "administrator", "no", State.note, "clocks can be locked by one who is"
        ),
        Finding(section, "reports", room)
        if free > LITTLE_SPACE
        else Finding(section, "reports", room, State.note, "make room, or set report.folder"),
    ]
    if not os.access(folder, os.W_OK):
        advice = "set report.folder to a folder of yours"
        found.append(Finding(section, "repository", "cannot be written", State.note, advice))
    paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
    if paranoid.exists():
        level = paranoid.read_text().strip()
        found.append(Finding(section, "hardware counters (perf)", f"perf_event_paranoid={level}"))
    return found


def _mib(size: int | None) -> str:
    return f"{(size or 0) / (1 << 20):g} MiB"
