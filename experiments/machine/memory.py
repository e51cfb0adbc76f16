"""Memory: the free memory, and the peak of a call, which is measured without timing it."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from experiments.machine.cpu import Cpu

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
REUSED_BLOCK_BYTES = 32 << 20  # freed blocks of up to this size are kept, see keep_freed_blocks
# A container's limit ("max": none) and use, for both versions of cgroups.
CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def keep_freed_blocks() -> bool:
    """Let malloc of this process keep freed blocks of up to REUSED_BLOCK_BYTES for reuse.

    By itself malloc does this only after some large blocks were freed. Until then it takes fresh
    pages for the large outputs of some calls, depending on the order of calls, and their page
    faults cost more than the lookup. Return whether the C library accepted the setting.
    """
    try:
        libc = ctypes.CDLL(None)
        is_accepted = libc.mallopt(_M_MMAP_THRESHOLD, REUSED_BLOCK_BYTES)
        return bool(is_accepted and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of the device; on a CPU the minimum of the system and the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free_bytes, cpu = int(psutil.virtual_memory().available), Cpu()
    for limit_file, used_file in CGROUP_FILES:
        limit_bytes, used_bytes = cpu.read_number(limit_file), cpu.read_number(used_file)
        if limit_bytes is not None and used_bytes is not None:
            free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return free_bytes


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Make a call; return the maximum of the bytes in use during it, minus those in use before.

    On a GPU these are the bytes that torch has allocated; on a CPU the resident memory of the
    process. None if the system does not state the peak, or does not let a process reset its peak;
    in the latter case the call is not made.
    """
    if device.type != "cuda":
        return _peak_bytes_on_host(call)
    torch.cuda.synchronize(device)
    bytes_before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - bytes_before)


def reset_peak() -> bool:
    """Reset the process's memory peak to its present use; return whether the system permits it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    except OSError:
        return False
    return True


def release_freed_blocks() -> None:
    """Return malloc's freed blocks to the system, so that they do not count as in use.

    C libraries without malloc_trim keep them.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _peak_bytes_on_host(call: Callable[[], object]) -> int | None:
    release_freed_blocks()
    if not reset_peak():
        return None
    resident_before = resident_bytes("VmRSS")
    call()
    peak = resident_bytes("VmHWM")
    return None if resident_before is None or peak is None else max(0, peak - resident_before)


def resident_bytes(key: str) -> int | None:
    """Return the bytes of an entry of /proc/self/status, "VmRSS" (now) or "VmHWM" (peak).

    None if the system does not state it. psutil does not have the peak.
    """
    match = re.search(
        rf"^{key}:\s+(\d+) kB", Cpu().read_text("proc/self/status") or "", re.MULTILINE
    )
    return int(match[1]) << 10 if match else None
