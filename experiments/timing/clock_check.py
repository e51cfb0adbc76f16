"""`python -m experiments.timing.clock_check`: do the clocks of this machine do what they promise?

A gather of rows that fit in the cache is timed after flushes of several sizes: from some size on a
larger one must change nothing, and the clocks use twice the cache. On a GPU it is also timed behind
spins of several lengths: from some length on no launch must be inside. Numbers, not verdicts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from experiments.config.schema import Mode
from experiments.machine.cpu import last_level_cache_bytes
from experiments.timing import statistics
from experiments.timing.clock import Clock, ColdClock, CudaClock, TorchGpu, Work, clock_for

FLUSHES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the last-level cache
SPINS = (0.0, 10e-6, 50e-6, 200e-6)
TABLE_SHARE = 0.125  # of the cache: it fits with everything else
SAMPLES = 30


@dataclass(frozen=True)
class Line:
    """One way to take a sample, and what it gave."""

    work: str
    setting: str
    median_us: float
    low_us: float
    high_us: float
    exposed: float  # share of samples in which a GPU waited for the host


def measure(clock: Clock, call: Callable[[], object], work: str, setting: str) -> Line:
    """Take a few samples to warm up, and then those that count."""
    works = [Work(call, work)] * SAMPLES
    clock.read(works[:5])
    readings = clock.read(works)
    s = statistics.summarise([1e6 * r.seconds for r in readings])
    exposed = sum(r.exposed for r in readings) / len(readings)
    return Line(work, setting, s.median, s.lo, s.hi, exposed)


def flushes(device: torch.device) -> list[Line]:
    """Time the gather from hot caches, and after flushes of every size."""
    call, work = _gather(device, int(TABLE_SHARE * _cache_bytes(device)))
    clocks: dict[str, Clock] = {"hot": clock_for(device)}
    for size in FLUSHES:
        clocks[f"flush of {size:g}x the cache"] = (
            CudaClock(TorchGpu(device, size), Mode.cold)
            if device.type == "cuda"
            else ColdClock(size=size)
        )
    return [measure(clock, call, work, setting) for setting, clock in clocks.items()]


def spins(device: torch.device) -> list[Line]:
    """Time a short and a long gather on a GPU: behind every spin, in a graph, launched idle."""
    found = []
    for size in (1 << 16, 1 << 26):
        call, work = _gather(device, size)
        for seconds in SPINS:
            clock = CudaClock(TorchGpu(device), spin=seconds)
            found.append(measure(clock, call, work, f"spin of {1e6 * seconds:g} µs at first"))
        graph = CudaClock(TorchGpu(device), Mode.graph)
        replay = graph.adapt(partial(_once, call), 1)
        found.append(measure(graph, partial(replay, 0), work, "graph"))
        found.append(measure(CudaClock(TorchGpu(device), Mode.wall), call, work, "wall"))
    return found


def _once(call: Callable[[], object], number: int) -> object:
    """Return a phase with one batch."""
    del number
    return call()


def _gather(device: torch.device, size: int) -> tuple[Callable[[], object], str]:
    """Gather every row of a table of `size` bytes once, in random order."""
    table = torch.ones(size // 256, 64, device=device)
    ids = torch.randperm(table.size(0), device=device)
    out = torch.empty_like(table)
    return partial(torch.index_select, table, 0, ids, out=out), f"gather of {size / 2**20:g} MiB"


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


def main(words: Sequence[str] | None = None) -> int:
    """Print the lines; the exit status is 0."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.timing.clock_check",
        description="Times a gather after flushes of several sizes and behind several spins.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="for other programs")
    chosen = parser.parse_args(words)
    device = torch.device(chosen.device)
    found = flushes(device) + (spins(device) if device.type == "cuda" else [])
    if chosen.json:
        print(json.dumps([asdict(line) for line in found], indent=1))
        return 0
    for line in found:
        exposed = f"  {line.exposed:.0%} exposed" * (device.type == "cuda")
        interval = f"[{line.low_us:.1f}, {line.high_us:.1f}]"
        print(f"{line.work:<20} {line.setting:<26} {line.median_us:9.1f} µs {interval}{exposed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
