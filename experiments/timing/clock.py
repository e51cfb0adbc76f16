"""Clocks for calls on the host or on a GPU, with caches in the state that the mode asks for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiments.config.schema import Mode
from experiments.machine.cpu import last_level_cache_bytes

CACHES_FLUSHED = 2  # times the last-level cache are written to empty it
SAMPLES_PER_CHUNK = 64  # samples between two synchronisations
SPIN_SECONDS = 50e-6  # at first
MAX_SPIN_SECONDS = 20e-3
MAX_VAIN_SPINS = 4  # longer spins in a row that did not help: the work itself waits for the GPU
CALIBRATION_CYCLES = 2_000_000
Phase = Callable[[int], object]  # runs batch number n of the pool
Launched = tuple[Any, Any, float, bool]  # start and end events, seconds on the host, exposed


def clock_for(device: torch.device, mode: Mode = Mode.hot) -> Clock:
    """Return the clock that is right for `device` in this mode.

    hot: as the last sample left the caches; on a GPU launched behind a spin, so that the GPU never
    waits for the host. cold: the same from empty caches. graph: a CUDA graph of every batch. wall:
    from the call on an idle device until it is finished, launches included; on a CPU this is hot.
    """
    if device.type == "cuda":
        return CudaClock(TorchGpu(device), mode)
    if mode is Mode.graph:
        raise UnsupportedMode(
            "mode graph replays CUDA graphs, and the device is cpu; use hot, cold or wall there"
        )
    return ColdClock() if mode is Mode.cold else Clock(mode)


class UnsupportedMode(ValueError):
    """This device, or this contender, has no such mode; the message says why."""


@dataclass(frozen=True)
class Work:
    """One sample to take; works of one `key` behave alike, so a clock may learn from one."""

    call: Callable[[], object]
    key: str = ""


@dataclass(frozen=True)
class Reading:
    """One sample taken."""

    seconds: float  # what counts
    wall: float  # that the host spent inside the call; a GPU may still have been at work
    cost: float  # that taking the sample took altogether, with whatever prepared it
    exposed: bool = False  # a GPU waited for the host, so launches are inside `seconds`


class Clock:
    """A clock by time.perf_counter, for CPU work, which is finished when the call returns.

    The caches stay as the previous sample left them: hot for tables that fit. Other clocks override
    `time` or `read`.
    """

    mode: Mode = Mode.hot
    min_sample_seconds: float = 50e-6  # calls that take less share a sample

    def __init__(self, mode: Mode = Mode.hot) -> None:
        self.mode = mode

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` took."""
        start = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - start) / 1e9

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Take all samples in this order, each requested as late as possible."""
        seconds = (self.time(work.call) for work in works)
        return [Reading(s, s, s) for s in seconds]

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """Return the phase in the form that this clock times, for the batches 0 .. pool - 1."""
        return phase

    def describe(self) -> dict[str, object]:
        """Describe what the mode means on this device, for the record."""
        return {"mode": self.mode.value}


class ColdClock(Clock):
    """A wall clock that empties the CPU's caches before every sample, outside the time.

    By adding to a buffer of twice the last-level cache: reading as well as writing, because plain
    stores may bypass the caches and leave what is there.
    """

    mode = Mode.cold

    def __init__(
        self,
        flush: Callable[[], object] | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
        size: float = CACHES_FLUSHED,
    ) -> None:
        self.flush_bytes = int(size * last_level_cache_bytes())
        self.now = now
        self.flush = flush or partial(torch.zeros(self.flush_bytes // 4).add_, 1.0)

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Take samples whose cost includes emptying the caches."""
        readings = []
        for work in works:
            call, begun = work.call, self.now()
            self.flush()
            start = self.now()
            call()
            end = self.now()
            seconds = (end - start) / 1e9
            readings.append(Reading(seconds, seconds, (end - begun) / 1e9))
        return readings

    def describe(self) -> dict[str, object]:
        return {"mode": self.mode.value, "flush_bytes": self.flush_bytes}


class CudaClock(Clock):
    """A GPU clock: modes hot, cold and graph launch behind a spin; wall starts on an idle GPU."""

    def __init__(self, gpu: TorchGpu, mode: Mode = Mode.hot, spin: float = SPIN_SECONDS) -> None:
        self.gpu, self.mode, self.spin = gpu, mode, spin
        if mode is Mode.wall:
            self.min_sample_seconds = 0.0  # the second of two calls would not wait for its launch
        self.ahead: dict[str, float] = {}  # key -> seconds to spin
        self.in_vain: Counter[str] = Counter()  # key -> longer spins in a row without effect
        self._rate = 0.0

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Take samples in chunks: wait for the GPU once per 64 samples, in wall mode after each."""
        if self.mode is Mode.wall:
            return [self._read_alone(work) for work in works]
        readings: list[Reading] = []
        launched: list[Launched] = []
        begun = self.gpu.now()
        for work in works:
            launched.append(self._launch(work))
            if len(launched) == SAMPLES_PER_CHUNK:
                readings += self._collect(launched, begun)
                launched, begun = [], self.gpu.now()
        return readings + self._collect(launched, begun)

    def _read_alone(self, work: Work) -> Reading:
        """Time from an idle GPU to an idle GPU by the host's clock."""
        begun = self.gpu.now()
        self.gpu.synchronise()
        start = self.gpu.now()
        work.call()
        returned = self.gpu.now()
        self.gpu.synchronise()
        end = self.gpu.now()
        return Reading(end - start, returned - start, end - begun)

    def _launch(self, work: Work) -> Launched:
        """Launch a sample behind a spin, and adapt the next spin to whether it was long enough."""
        gpu, ahead = self.gpu, self.ahead.get(work.key, self.spin)
        if self.mode is Mode.cold:
            gpu.flush()
        if ahead:
            gpu.spin(int(ahead * self.cycles_per_second()))
        start = gpu.event()
        called = gpu.now()
        work.call()
        wall = gpu.now() - called
        end = gpu.event()
        exposed = gpu.reached(start)
        if ahead and not exposed:
            self.in_vain[work.key] = 0
        elif ahead:  # a longer spin, or none for work that waits anyway
            self.in_vain[work.key] += 1
            longer = min(MAX_SPIN_SECONDS, max(2 * ahead, 1.5 * wall))
            self.ahead[work.key] = 0.0 if self.in_vain[work.key] >= MAX_VAIN_SPINS else longer
        return start, end, wall, exposed

    def _collect(self, launched: list[Launched], begun: float) -> list[Reading]:
        if not launched:
            return []
        self.gpu.synchronise()
        seconds = [self.gpu.between(start, end) for start, end, _, _ in launched]
        extra = max(0.0, self.gpu.now() - begun - sum(seconds)) / len(launched)
        return [
            Reading(s, wall, s + extra, exposed)
            for s, (_, _, wall, exposed) in zip(seconds, launched, strict=True)
        ]

    def cycles_per_second(self) -> float:
        """Return how fast the spinning kernel counts, measured once."""
        if not self._rate:
            self.gpu.spin(CALIBRATION_CYCLES)  # raises the clocks
            start = self.gpu.event()
            self.gpu.spin(CALIBRATION_CYCLES)
            end = self.gpu.event()
            self.gpu.synchronise()
            self._rate = CALIBRATION_CYCLES / max(1e-9, self.gpu.between(start, end))
        return self._rate

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """Return one captured graph per batch in graph mode; the phase itself otherwise."""
        if self.mode is not Mode.graph:
            return phase
        try:
            graphs = [self.gpu.capture(partial(phase, number)) for number in range(pool)]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise UnsupportedMode(f"cannot be captured as a CUDA graph: {first}") from error
        return lambda number: graphs[number]()

    def describe(self) -> dict[str, object]:
        """Describe the flush and the spins that were long enough, in microseconds."""
        facts: dict[str, object] = {"mode": self.mode.value}
        if self.mode is Mode.cold:
            facts["flush_bytes"] = self.gpu.flush_bytes
        if self.mode is not Mode.wall:
            facts["spin_us"] = {k: round(1e6 * s, 1) for k, s in sorted(self.ahead.items())}
        return facts


class TorchGpu:
    """The current stream of a `device`, and the host's clock; tests replace it by a fake."""

    def __init__(self, device: torch.device, flush: float = CACHES_FLUSHED) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.flush_bytes = int(flush * properties.L2_cache_size)
        self._buffer: torch.Tensor | None = None

    def now(self) -> float:
        """Return time.perf_counter."""
        return time.perf_counter()

    def event(self) -> torch.cuda.Event:
        """Record a timing event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, event: torch.cuda.Event) -> bool:
        """Query the event without waiting."""
        return event.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Convert elapsed_time, which is in milliseconds."""
        return start.elapsed_time(end) / 1e3

    def spin(self, cycles: int) -> None:
        """Launch torch's spinning kernel."""
        torch.cuda._sleep(cycles)

    def flush(self) -> None:
        """Write a buffer of twice the L2 cache, which is made when it is first wanted."""
        if self._buffer is None:
            self._buffer = torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.device)
        self._buffer.zero_()

    def synchronise(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Make three eager calls on a side stream, as torch requires, and capture a fourth."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay
