"""Check the clocks on this machine (`doctor --clocks`): print times, no verdicts.

A gather of rows that fit in the cache is timed after flushes of several sizes. From some size on, a
larger flush must change nothing; the clocks flush twice the cache. On a GPU it is also timed behind
spins of several lengths; from some length on, times must contain no launch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from experiments.config.schema import Mode
from experiments.machine.cpu import last_level_cache_bytes
from experiments.timing import statistics
from experiments.timing.clock import Clock, ColdClock, CudaClock, SampleTask, TorchGpu, clock_for

FLUSHES = (0.25, 0.5, 1.0, 2.0, 4.0)  # bytes of a flush ÷ last-level cache
SPINS = (0.0, 10e-6, 50e-6, 200e-6)  # seconds of a spin
TABLE_SHARE = 0.125  # table ÷ cache: small enough to stay in it
SAMPLES = 30  # samples per setting


@dataclass(frozen=True)
class ClockTimes:
    """Times of a gather (`work`) in a `setting`: median and its interval, in microseconds."""

    work: str
    setting: str
    median_us: float
    low_us: float
    high_us: float
    exposed: float  # share of the samples in which the GPU waited for the host


def show(kind: str = "auto", *, as_json: bool = False) -> None:
    """Print the times of the gather on "cpu" or "cuda"; "auto" chooses a GPU if there is one."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    times = flushes(device) + (spins(device) if device.type == "cuda" else [])
    if as_json:
        print(json.dumps([asdict(line) for line in times], indent=1))
        return
    for line in times:
        exposed = f"  {line.exposed:.0%} exposed" * (device.type == "cuda")
        interval = f"[{line.low_us:.1f}, {line.high_us:.1f}]"
        print(f"{line.work:<20} {line.setting:<26} {line.median_us:9.1f} µs {interval}{exposed}")


def flushes(device: torch.device) -> list[ClockTimes]:
    """Time the gather with hot caches, and after flushes of every size."""
    cuda = device.type == "cuda"
    cache = TorchGpu(device, 1.0).flush_bytes if cuda else last_level_cache_bytes()
    call, name = _gather(device, int(TABLE_SHARE * cache))
    clocks: dict[str, Clock] = {"hot": clock_for(device)}
    for size in FLUSHES:
        cold = CudaClock(TorchGpu(device, size), Mode.cold) if cuda else ColdClock(size=size)
        clocks[f"flush of {size:g}x the cache"] = cold
    return [_measure(clock, call, name, setting) for setting, clock in clocks.items()]


def spins(device: torch.device) -> list[ClockTimes]:
    """Time a short and a long gather on a GPU: behind every spin, as a graph, from idle."""
    times = []
    for size in (1 << 16, 1 << 26):
        call, name = _gather(device, size)
        for seconds in SPINS:
            clock = CudaClock(TorchGpu(device), spin=seconds)
            times.append(_measure(clock, call, name, f"spin of {1e6 * seconds:g} µs at first"))

        def phase(number: int, call: Callable[[], object] = call) -> object:
            return call()

        graph = CudaClock(TorchGpu(device), Mode.graph)
        times.append(_measure(graph, partial(graph.adapt(phase, 1), 0), name, "graph"))
        times.append(_measure(CudaClock(TorchGpu(device), Mode.wall), call, name, "wall"))
    return times


def _gather(device: torch.device, size: int) -> tuple[Callable[[], object], str]:
    """Return a call that gathers every row of a table of `size` bytes once, and its name."""
    table = torch.ones(size // 256, 64, device=device)
    ids = torch.randperm(table.size(0), device=device)
    out = torch.empty_like(table)
    return partial(torch.index_select, table, 0, ids, out=out), f"gather of {size / 2**20:g} MiB"


def _measure(clock: Clock, call: Callable[[], object], name: str, setting: str) -> ClockTimes:
    """Take a few samples to warm up, then samples that count."""
    tasks = [SampleTask(call, name)] * SAMPLES
    clock.read(tasks[:5])
    readings = clock.read(tasks)
    s = statistics.summarise([1e6 * r.seconds for r in readings])
    exposed = sum(r.exposed for r in readings) / len(readings)
    return ClockTimes(name, setting, s.median, s.lo, s.hi, exposed)
