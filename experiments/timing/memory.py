"""Memory: what is free, and the high-water mark of one call, in a pass that is never timed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

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


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during `work` above what was before; None where it cannot be known."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated(device) - before)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the call would reuse pages that already count
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM to VmRSS
    except (OSError, AttributeError):
        return None
    before_kib = _kilobytes(_STATUS, "VmRSS")
    work()
    peak_kib = _kilobytes(_STATUS, "VmHWM")
    return None if before_kib is None or peak_kib is None else max(0, peak_kib - before_kib)


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
