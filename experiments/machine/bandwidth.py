"""Measure what this machine can do: copy, gather rows from random positions, multiply matrices.

These are the ceilings that contenders are compared with, measured in the same run on the same
threads. Each is the best of several calls, since disturbances only lower a ceiling. Bandwidth
counts bytes read plus bytes written. Rows are gathered in two ways, of which the better counts:
copied to an output of their size, and summed by 32 into a small output.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.machine.cpu import last_level_cache_bytes
from experiments.timing.memory import available_bytes

ROW_BYTES = (64, 128, 256, 512)
BAG = 32
BEYOND_CACHE = 8  # times the last-level cache: hits are then rare enough to be ignored
MIN_RUNS = 3  # of each
SQUARE = 1024  # rows and columns of the matrices that are multiplied
SHARE = 0.1  # of the free memory may be used for the table
SMALL_TABLE = 32 << 20  # of smoke runs
LINE = 64  # bytes
WORDS = LINE // 8


def measure(device: torch.device, seconds: float = 1.5) -> dict[str, Any]:
    """Return {"copy_gb_s": .., "gather_gb_s": {"64": ..}, ..}, keyed by bytes per row.

    On a CPU also "random_lines", keyed by bytes per page, see `measure_random_lines`. Without
    `seconds` the table is small and the numbers are those of a cache.
    """
    size = table_bytes(device) if seconds else SMALL_TABLE
    flat = torch.ones(size // 4, device=device)
    found: dict[str, Any] = {
        "copy_gb_s": round(copy_bandwidth(flat, 0.2 * seconds) / 1e9, 3),
        "gather_gb_s": {
            str(row): round(gather_bandwidth(flat, row, 0.2 * seconds) / 1e9, 3)
            for row in ROW_BYTES
        },
        "sgemm_gflop_s": round(sgemm_rate(device, 0.1 * seconds) / 1e9, 3),
        "counted": "bytes read + bytes written",
        "table_bytes": size,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":  # from a call on an idle GPU until its almost empty kernel has ended
        one = torch.zeros(1, device=device)
        found["launch_us"] = round(1e6 * best(lambda: one.add_(1.0), device, 0.01), 3)
    else:
        found["random_lines"] = measure_random_lines(size, 0.1 * seconds)
    return found


def table_bytes(device: torch.device) -> int:
    """Return a size far above the caches, as memory permits."""
    if device.type == "cuda":
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        wanted = max(1 << 30, BEYOND_CACHE * cache)
    else:
        wanted = BEYOND_CACHE * last_level_cache_bytes()
    return max(SMALL_TABLE, min(wanted, int(SHARE * available_bytes(device)) >> 20 << 20))


def copy_bandwidth(source: torch.Tensor, seconds: float = 0.3) -> float:
    """Return bytes read plus bytes written per second by a copy of `source`."""
    target = torch.zeros_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), source.device, seconds)


def sgemm_rate(device: torch.device, seconds: float = 0.3) -> float:
    """Return multiplications plus additions per second of a product of float32 matrices."""
    left, right = torch.ones(2, SQUARE, SQUARE, device=device)
    out = torch.empty_like(left)
    return 2 * SQUARE**3 / best(lambda: torch.mm(left, right, out=out), device, seconds)


def gather_bandwidth(flat: torch.Tensor, row_bytes: int, seconds: float = 0.3) -> float:
    """Return bytes read plus bytes written per second by the better gather of rows of `flat`.

    It gathers an eighth as many random rows as there are, so that few are read twice. Ids are not
    counted.
    """
    table = flat.view(-1, row_bytes // flat.element_size())
    rows = table.size(0)
    count = rows // 8 // BAG * BAG
    generator = torch.Generator(device=flat.device).manual_seed(row_bytes)
    ids = torch.randint(rows, (count,), device=flat.device, generator=generator)
    bags = ids.view(-1, BAG)
    out = torch.empty(count, table.size(1), device=flat.device)
    moved = best(lambda: torch.index_select(table, 0, ids, out=out), flat.device, seconds / 2)
    summed = best(lambda: F.embedding_bag(bags, table, mode="sum"), flat.device, seconds / 2)
    return max(2 * count * row_bytes / moved, (1 + 1 / BAG) * count * row_bytes / summed)


def best(
    work: Callable[[], object],
    device: torch.device,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the shortest time of at least three calls, of as many as fit into `seconds`."""

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return now()

    shortest, deadline, runs = float("inf"), now() + seconds, 0
    while runs < MIN_RUNS or now() < deadline:
        start = synchronised()
        work()
        shortest = min(shortest, synchronised() - start)
        runs += 1
    return shortest


def measure_random_lines(nbytes: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return million lines per second and the share of huge pages, by page size.

    The better of two ways to read, the best of several calls.
    """
    found = {}
    for huge in (False, True):
        lines = Lines(nbytes, huge=huge)
        count = max(1, min(1 << 20, lines.count // 8))
        generator = torch.Generator().manual_seed(count)
        shortest, deadline, calls = float("inf"), time.perf_counter() + seconds, 0
        while calls < 4 or time.perf_counter() < deadline:
            positions = lines.positions(torch.randint(2**62, (count,), generator=generator))
            read = lines.take if calls % 2 and torch.get_num_threads() == 1 else lines.read
            start = time.perf_counter()
            read(positions)
            shortest, calls = min(shortest, time.perf_counter() - start), calls + 1
        found[str(page_bytes(huge=huge))] = {
            "million_lines_s": round(count / shortest / 1e6, 3),
            "huge_share": round(lines.huge_share, 3),
        }
    return found


class Lines:
    """Memory of `nbytes` in pages of the requested size; line n begins with the number n."""

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.count = max(1, nbytes // LINE)
        before, page = huge_bytes(), page_bytes(huge=True)
        size = (self.count * LINE // page + 2) * page
        # Private: shared memory gets huge pages by other rules.
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            self.memory.madvise(advice)
        self.words = np.frombuffer(self.memory, np.int64)[: self.count * WORDS]
        self.words[:] = 0
        self.words[::WORDS] = np.arange(self.count)
        self.huge_share = max(0.0, min(1.0, (huge_bytes() - before) / size))

    def positions(self, keys: Tensor) -> Tensor:
        """Return the index of the word to read for each key."""
        return keys.remainder(self.count) * WORDS

    def read(self, positions: Tensor) -> Tensor:
        """Read a word of each line, on torch's threads."""
        return torch.index_select(torch.from_numpy(self.words), 0, positions)

    def take(self, positions: Tensor) -> Tensor:
        """Read the same with NumPy, on one thread, where it is mostly faster."""
        out = np.empty(positions.numel(), np.int64)
        return torch.from_numpy(np.take(self.words, positions.numpy(), out=out, mode="clip"))


def page_bytes(*, huge: bool) -> int:
    """Return the size of a small page, or of a huge page where the system has them."""
    if not huge:
        return mmap.PAGESIZE
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


def huge_bytes() -> int:
    """Return how much of this process's memory is in huge pages; 0 where unknown."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0
