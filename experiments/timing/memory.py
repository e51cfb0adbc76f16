"""Memory: the free memory, and the high-water mark of one call, in a pass that is not timed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.machine.telemetry import Nvml

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
REUSED_BLOCK = 32 << 20  # glibc's upper limit for blocks that it keeps


def keep_freed_blocks() -> bool:
    """Let malloc reuse freed blocks up to 32 MiB, as it does in a process that has run for a while.

    Otherwise a large output may come in fresh pages at one call and not at the next, which costs
    more than the lookup and depends on the order of calls. True where the C library agreed.
    """
    try:
        libc = ctypes.CDLL(None)
        kept = libc.mallopt(_M_MMAP_THRESHOLD, REUSED_BLOCK)
        return bool(kept and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def available_bytes(device: torch.device) -> int:
    """Free memory on the device; on the CPU, the lower of the system's and the container's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup("memory.current", "memory/memory.usage_in_bytes")
    candidates = [free] if free else []
    if limit is not None and used is not None:
        candidates.append(max(0, limit - used))
    return min(candidates, default=4 << 30)


def measure(work: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Measure the bytes that one call needs, by every available counter.

    `peak` is the maximum in use during the call above what was before. On a GPU also torch's
    `allocated` and `reserved` peaks, `driver`, how much less the driver has free than before, which
    includes what torch did not allocate, `process`, all that the driver counts for this process,
    `pinned` host memory, and `alloc_retries`, times that torch had to free its cache. `rss` is the
    maximum of host memory in the life of the process.
    """
    found: dict[str, int | None] = (
        _measure_cuda(work, device) if device.type == "cuda" else {"peak": _measure_cpu(work)}
    )
    found["rss"] = _kilobytes(_STATUS, "VmHWM")
    return {key: value for key, value in found.items() if value is not None}


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during `work` above what was before; None where it cannot be known."""
    return measure(work, device).get("peak")


def _measure_cuda(work: Callable[[], object], device: torch.device) -> dict[str, int | None]:
    torch.cuda.synchronize(device)
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device)
    after = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return {
        "peak": int(allocated - before),
        "allocated": int(allocated),
        "reserved": int(torch.cuda.max_memory_reserved(device)),
        "driver": max(0, int(free - torch.cuda.mem_get_info(device)[0])),
        "process": _process_bytes(device),
        "pinned": _pinned_bytes(),
        "alloc_retries": int(after - retries),
    }


def _process_bytes(device: torch.device) -> int | None:
    nvml = Nvml.open(device)
    return ((nvml and nvml.processes()) or {}).get(os.getpid())


def _pinned_bytes() -> int | None:
    try:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    except (AttributeError, RuntimeError):
        return None  # this torch does not count it


def resettable_peak() -> bool:
    """Return whether this system lets a process reset its high-water mark."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    except OSError:
        return False
    return True


def _measure_cpu(work: Callable[[], object]) -> int | None:
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such thing
        ctypes.CDLL(None).malloc_trim(0)  # else the call would reuse pages that already count
    if not resettable_peak():
        return None
    before = _kilobytes(_STATUS, "VmRSS")
    work()
    peak = _kilobytes(_STATUS, "VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _kilobytes(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup(*names: str) -> int | None:
    for name in names:
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
            return None if text == "max" else int(text)
        except (OSError, ValueError):
            continue
    return None
