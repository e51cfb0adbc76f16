"""Measure the ceilings of this machine: copying, gathering random rows, multiplying matrices.

Reports compare contenders with these ceilings. A ceiling is the best of several calls, because
disturbances only lower it. Bandwidth counts bytes read plus written.

Rows are gathered in four ways, of which the fastest counts: by torch and by emblib's lookup, each
with one output row per row (`index_select`, bags of 1) and one per 32 rows (`embedding_bag`, bags
of 32). Bytes are those that the metrics count for a lookup: rows, ids, offsets and output. Lookups
whose rows or outputs stay in a cache can exceed the ceiling. On a GPU, ceilings except `launch_us`
are timed by events behind a spin, without launches.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import emblib
from experiments.machine.cpu import last_level_cache_bytes
from experiments.machine.memory import available_bytes

ROW_BYTES = (64, 128, 256, 512, 1024)
ID_BYTES = 8  # bytes of an id or an offset, int64
BAG_LENGTH = 32
SPIN_CYCLES = 200_000  # about 100 us of a GPU: longer than the host takes to launch a call
TABLE_CACHE_RATIO = 8  # bytes of a table ÷ last-level cache, so that few rows are cached
# Minimum of the table of a GPU with enough free memory, for enough rows per call (not measured).
MIN_GPU_BYTES = 2 << 30
COPY_SHARE, GATHER_SHARE, SGEMM_SHARE = 0.2, 0.2, 0.1  # times ÷ `seconds`; a gather per row size
MIN_RUNS = 3  # minimum number of calls per ceiling
RESOLUTION_SECONDS = 1e-9  # shortest time, of a GPU whose events stand still
MATRIX_SIDE = 1024  # rows and columns of the multiplied matrices
MEMORY_SHARE = 0.1  # maximum of the table ÷ free memory
SMOKE_BYTES = 32 << 20  # minimum of the table, and its size in smoke runs
LINE_BYTES = 64  # bytes of a cache line
WORDS_PER_LINE = LINE_BYTES // 8


def measure_ceilings(device: torch.device, seconds: float = 1.5) -> dict[str, Any]:
    """Measure all ceilings, on the threads of torch.

    Args:
        device: device whose memory is measured.
        seconds: scale of the time: all ceilings together take about 1.3 times as long. 0 for a
            smoke run, which measures a cache.

    Returns:
        `copy_gb_s`, `sgemm_gflop_s` (10^9 bytes, operations); `gather_gb_s` and `gather_by` (the
        fastest way), keyed by bytes per row as a string; `counted`, `table_bytes` and `threads`,
        how they were measured; on a GPU `launch_us`, from a call on an idle GPU to the end of an
        almost empty kernel.
    """
    num_bytes = table_bytes(device) if seconds else SMOKE_BYTES
    flat = torch.ones(num_bytes // 4, device=device)
    copy_rate = copy_bandwidth(flat, COPY_SHARE * seconds)
    rates = {
        str(row_bytes): gather_bandwidth(flat, row_bytes, GATHER_SHARE * seconds)
        for row_bytes in ROW_BYTES
    }
    ceilings: dict[str, Any] = {
        "copy_gb_s": round(copy_rate / 1e9, 3),
        "gather_gb_s": {row_bytes: round(rate / 1e9, 3) for row_bytes, (rate, _) in rates.items()},
        "gather_by": {row_bytes: method for row_bytes, (_, method) in rates.items()},
        "sgemm_gflop_s": round(sgemm_rate(device, SGEMM_SHARE * seconds) / 1e9, 3),
        "counted": "bytes read + bytes written; of gathers rows, ids, offsets and output",
        "table_bytes": num_bytes,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        element = torch.zeros(1, device=device)
        ceilings["launch_us"] = round(
            1e6 * shortest_wall(lambda: element.add_(1.0), device, 0.01), 3
        )
    return ceilings


def table_bytes(device: torch.device) -> int:
    """Return the bytes of the table to measure with: TABLE_CACHE_RATIO times the last-level cache.

    On a GPU they are MIN_GPU_BYTES at least. They are limited to MEMORY_SHARE of the free memory,
    rounded down to MiB, but are never below SMOKE_BYTES.
    """
    if device.type == "cuda":
        cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        num_bytes = max(MIN_GPU_BYTES, TABLE_CACHE_RATIO * cache_bytes)
    else:
        num_bytes = TABLE_CACHE_RATIO * last_level_cache_bytes()
    return max(SMOKE_BYTES, min(num_bytes, int(MEMORY_SHARE * available_bytes(device)) >> 20 << 20))


def copy_bandwidth(source: Tensor, seconds: float = 0.3) -> float:
    """Return the bytes read plus written per second by a copy of `source`, on its device.

    `seconds` is the time to measure for, as everywhere in this file; MIN_RUNS calls may need more.
    """
    target = torch.zeros_like(source)
    return 2 * source.nbytes / shortest_call(lambda: target.copy_(source), source.device, seconds)


def sgemm_rate(device: torch.device, seconds: float = 0.3) -> float:
    """Return multiplications plus additions per second of a product of square float32 matrices."""
    left, right = torch.ones(2, MATRIX_SIDE, MATRIX_SIDE, device=device)
    out = torch.empty_like(left)
    return (
        2 * MATRIX_SIDE**3 / shortest_call(lambda: torch.mm(left, right, out=out), device, seconds)
    )


def gather_bandwidth(flat: Tensor, row_bytes: int, seconds: float = 0.3) -> tuple[float, str]:
    """Return the bytes per second of the fastest way to gather rows of `row_bytes`, and its name.

    `flat` is the memory of the table, float32 [elements]; its bytes are a multiple of `row_bytes`.
    The lookups of emblib allocate a second table of that size.
    """
    rates = {
        method: nbytes / shortest_call(call, flat.device, seconds / 4)
        for method, nbytes, call in gather_ways(flat, row_bytes)
    }
    fastest = max(rates, key=lambda name: rates[name])
    return rates[fastest], fastest


def gather_ways(flat: Tensor, row_bytes: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield the name, the bytes read and written, and the call of each way to gather random rows.

    A GPU gathers half of the rows, each once. A CPU gathers as many random rows as an eighth of the
    table has, so that few repeat.
    """
    table = flat.view(-1, row_bytes // flat.element_size())
    num_rows, device = table.size(0), flat.device
    generator = torch.Generator(device=device).manual_seed(row_bytes)
    if device.type == "cuda":
        num_ids = num_rows // 2 // BAG_LENGTH * BAG_LENGTH
        ids = torch.randperm(num_rows, device=device, generator=generator)[:num_ids]
    else:
        num_ids = num_rows // 8 // BAG_LENGTH * BAG_LENGTH
        ids = torch.randint(num_rows, (num_ids,), device=device, generator=generator)
    ids_by_bag = ids.view(-1, BAG_LENGTH)
    out = torch.empty(num_ids, table.size(1), device=device)
    read_bytes, output_bytes = num_ids * (row_bytes + ID_BYTES), num_ids * row_bytes
    nbytes = read_bytes + output_bytes
    yield "index_select", nbytes, lambda: torch.index_select(table, 0, ids, out=out)
    pooled_bytes = read_bytes + output_bytes // BAG_LENGTH + ID_BYTES * (num_ids // BAG_LENGTH)
    yield "embedding_bag", pooled_bytes, lambda: F.embedding_bag(ids_by_bag, table, mode="sum")
    module = _one_table(num_rows, table.size(1), device)
    for length, nbytes in (
        (1, read_bytes + output_bytes + ID_BYTES * (num_ids + 1)),
        (BAG_LENGTH, pooled_bytes),
    ):
        offsets = torch.arange(0, num_ids + 1, length, device=device)

        def look_up(offsets: Tensor = offsets) -> object:
            with torch.no_grad():
                return module(ids, offsets)

        yield f"emblib, bags of {length}", nbytes, look_up


def _one_table(rows: int, dim: int, device: torch.device) -> emblib.TableBatchedEmbeddingBags:
    """Return a module with one table of ones, which does not check ids.

    On a CPU, drawing initial values takes seconds. So a large table is created on the meta device,
    without values. A small one is not, because the meta device loads half of torch.
    """
    tables = [emblib.TableSpec(rows, dim)]
    is_drawn = device.type == "cuda" or 4 * rows * dim <= SMOKE_BYTES
    module = emblib.TableBatchedEmbeddingBags(
        tables,
        emblib.optim.SGD(1.0),
        bounds_check=emblib.BoundsCheck.NONE,
        device=device if is_drawn else "meta",
    )
    module = module if is_drawn else module.to_empty(device=device)
    with torch.no_grad():
        module.table_weights()[0].fill_(1.0)  # pages that were never written are read too fast
    return module


def shortest_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest of MIN_RUNS calls or more, as many as fit into `seconds`.

    On a GPU events measure the time, without the launch, after one call that is not timed.
    """
    if device.type != "cuda":
        return shortest_wall(call, device, seconds)
    times_s: list[float] = []
    call()  # first calls load kernels
    deadline_s = time.perf_counter() + seconds
    while len(times_s) < MIN_RUNS or time.perf_counter() < deadline_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times_s.append(start.elapsed_time(end) / 1e3)
    return max(min(times_s), RESOLUTION_SECONDS)


def shortest_wall(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of MIN_RUNS calls or more, as many as fit into `seconds`.

    On a GPU the time ends when the device is idle. `now` is a clock in seconds.
    """

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return now()

    shortest_s, deadline_s, num_calls = float("inf"), now() + seconds, 0
    while num_calls < MIN_RUNS or now() < deadline_s:
        start = synchronised()
        call()
        shortest_s = min(shortest_s, synchronised() - start)
        num_calls += 1
    return shortest_s


class CacheLines:
    """Memory of about `nbytes` in small or huge pages; cache line n has the int64 n, then zeros.

    The system is advised to use that kind of pages, and may not follow.

    Attributes:
        num_lines: number of cache lines, at least 1.
        words: content of the memory, int64 [num_lines * WORDS_PER_LINE].
    """

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.num_lines = max(1, nbytes // LINE_BYTES)
        page_bytes = huge_page_bytes()
        mapped_bytes = (self.num_lines * LINE_BYTES // page_bytes + 2) * page_bytes
        # Private memory, because other rules give huge pages to shared memory.
        self.memory = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            self.memory.madvise(advice)
        self.words = np.frombuffer(self.memory, np.int64)[: self.num_lines * WORDS_PER_LINE]
        self.words[:] = 0
        self.words[::WORDS_PER_LINE] = np.arange(self.num_lines)

    def positions(self, keys: Tensor) -> Tensor:
        """Return, per key, the index in `words` of the line's number; int64 [N] on the CPU."""
        return keys.remainder(self.num_lines) * WORDS_PER_LINE

    def read_by_torch(self, positions: Tensor) -> Tensor:
        """Return `words` at `positions`, int64 [N], read by torch on its threads."""
        return torch.index_select(torch.from_numpy(self.words), 0, positions)

    def read_by_numpy(self, positions: Tensor) -> Tensor:
        """Return `words` at `positions`, int64 [N], read by NumPy on one thread.

        On one thread this is mostly faster than `read_by_torch`.
        """
        out = np.empty(positions.numel(), np.int64)
        return torch.from_numpy(np.take(self.words, positions.numpy(), out=out, mode="clip"))


def huge_page_bytes() -> int:
    """Return the bytes of a huge page; 2 MiB if the system does not say."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20
