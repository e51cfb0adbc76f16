"""Clocks for calls on a CPU or GPU, in the modes hot, cold, graph and wall.

A *phase* is a function of a batch number, e.g. a training step. `Clock.read` takes samples of it in
one of the modes that `clock_for` explains. On a GPU, except in mode wall, each call is launched
behind a kernel that spins, so that all its kernels are launched before the GPU reaches the first. A
spin that turns out too short makes the next one longer. After MAX_VAIN_SPINS too short spins in a
row, calls of this kind get no spin: such a call itself waits for the GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from experiments.config.schema import Mode
from experiments.machine.cpu import last_level_cache_bytes

CACHES_FLUSHED = 2  # bytes written to empty the last-level cache ÷ its size
SAMPLES_PER_CHUNK = 64  # samples between two synchronisations
SPIN_SECONDS = 50e-6  # initial spin, which covers the launch of most calls
MAX_SPIN_SECONDS = 20e-3  # longest spin
SPIN_PER_LAUNCH = 1.5  # next spin ÷ duration of a launch that a spin did not cover
MAX_VAIN_SPINS = 4  # spins in a row that are too short, after which a call gets none
CALIBRATION_CYCLES = 2_000_000  # length of the spin by which cycles per second are measured
Phase = Callable[[int], object]  # a call on batch number n of the pool


class Launch(NamedTuple):
    """A sample that was launched on a GPU, which may not have finished it.

    Attributes:
        start: CUDA event before the call.
        end: CUDA event after the call.
        wall_s: seconds that the call took on the host.
        is_exposed: whether the GPU reached `start` before the call had launched all its work.
    """

    start: Any
    end: Any
    wall_s: float
    is_exposed: bool


def clock_for(device: torch.device, mode: Mode = Mode.hot) -> Clock:
    """Return the clock of a device, "cpu" or "cuda", in a mode.

    hot: caches are as the last sample left them. On a GPU the call is launched behind a spin, so
    that the GPU does not wait for the host; `Reading.is_exposed` tells whether it waited.
    cold: as hot, but the last-level cache is emptied before each sample. In a sample of several
    short calls only the first call is cold.
    graph: one CUDA graph per batch is replayed; not on a CPU.
    wall: from the call on an idle device until the device is idle again, launches included; on a
    CPU equal to hot.

    Raises:
        UnsupportedMode: the mode is graph and the device is a CPU.
    """
    if device.type == "cuda":
        return CudaClock(TorchGpu(device), mode)
    if mode is Mode.graph:
        raise UnsupportedMode(
            "mode graph replays CUDA graphs, and the device is cpu; use hot, cold or wall there"
        )
    return ColdClock() if mode is Mode.cold else Clock(mode)


class UnsupportedMode(ValueError):
    """The device or the contender does not support the mode; the message says why."""


@dataclass(frozen=True)
class SampleTask:
    """A sample to take.

    Attributes:
        call: function to time.
        key: name of the kind of call; a clock learns the length of a spin from earlier tasks with
            the same key.
    """

    call: Callable[[], object]
    key: str = ""


@dataclass(frozen=True)
class Reading:
    """The times of a sample.

    Attributes:
        seconds: seconds of the call: the sample.
        wall_s: seconds that the call took on the host; a GPU may have worked longer.
        cost_s: seconds of taking the sample, with its preparation.
        is_exposed: whether the GPU waited for the host, so that `seconds` includes launches. False
            in mode wall, in which `seconds` always includes them.
    """

    seconds: float
    wall_s: float
    cost_s: float
    is_exposed: bool = False


class Clock:
    """A clock by time.perf_counter_ns for work on a CPU, which ends when the call returns.

    Caches stay as the previous sample left them. Subclasses override `time` or `read`.

    Attributes:
        mode: mode of the samples.
        min_sample_seconds: minimum length of a sample; the caller makes several calls per sample
            if one call is shorter.
    """

    mode: Mode = Mode.hot
    min_sample_seconds: float = 50e-6

    def __init__(self, mode: Mode = Mode.hot) -> None:
        self.mode = mode

    def time(self, call: Callable[[], object]) -> float:
        """Make a call and return its seconds."""
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e9

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take the samples in order; the next task is requested after the previous sample.

        An exception of a task's call is passed on; then no sample is returned.
        """
        seconds = (self.time(task.call) for task in tasks)
        return [Reading(call_s, call_s, call_s) for call_s in seconds]

    def adapt(self, phase: Phase, num_batches: int) -> Phase:
        """Return the phase in the form that `read` times, for the batches 0 to num_batches - 1."""
        return phase


class ColdClock(Clock):
    """A clock that empties the CPU's caches before every sample, outside its time.

    Args:
        flush: function that empties the caches. By default it adds 1 to a buffer whose bytes are
            CACHES_FLUSHED times those of the last-level cache. It adds, because plain stores may
            bypass the caches and leave their content.
        now: function that returns the time in nanoseconds.
    """

    mode = Mode.cold

    def __init__(
        self,
        flush: Callable[[], object] | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.now = now
        num_floats = CACHES_FLUSHED * last_level_cache_bytes() // 4
        self.flush = flush or partial(torch.zeros(num_floats).add_, 1.0)

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take the samples in order; the cost of each includes emptying the caches."""
        readings = []
        for task in tasks:
            call, request_ns = task.call, self.now()
            self.flush()
            start_ns = self.now()
            call()
            end_ns = self.now()
            seconds = (end_ns - start_ns) / 1e9
            readings.append(Reading(seconds, seconds, (end_ns - request_ns) / 1e9))
        return readings


class CudaClock(Clock):
    """A clock for a GPU: hot, cold and graph launch behind a spin; wall starts on an idle GPU.

    Attributes:
        next_spin_s: seconds of the next spin by the key of a task, if they differ from
            SPIN_SECONDS; 0 for no spin.
        vain_spins: number of spins in a row that were too short, by key.
    """

    def __init__(self, gpu: TorchGpu, mode: Mode = Mode.hot) -> None:
        self.gpu, self.mode = gpu, mode
        if mode is Mode.wall:
            self.min_sample_seconds = 0.0  # the launch of a second call would be hidden
        self.next_spin_s: dict[str, float] = {}
        self.vain_spins: Counter[str] = Counter()
        self._spin_rate = 0.0  # cycles of a spin per second; 0 before it is measured

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take the samples; wait for the GPU after each SAMPLES_PER_CHUNK, in mode wall after each.

        The time of a chunk that is in no sample is divided evenly among the costs of its samples.
        """
        if self.mode is Mode.wall:
            return [self._read_alone(task) for task in tasks]
        readings: list[Reading] = []
        launches: list[Launch] = []
        chunk_start = self.gpu.now()
        for task in tasks:
            launches.append(self._launch(task))
            if len(launches) == SAMPLES_PER_CHUNK:
                readings += self._collect(launches, chunk_start)
                launches, chunk_start = [], self.gpu.now()
        return readings + self._collect(launches, chunk_start)

    def _read_alone(self, task: SampleTask) -> Reading:
        """Time a call by the host's clock, from an idle GPU until the GPU is idle again."""
        request_s = self.gpu.now()
        self.gpu.synchronise()
        start_s = self.gpu.now()
        task.call()
        return_s = self.gpu.now()
        self.gpu.synchronise()
        end_s = self.gpu.now()
        return Reading(end_s - start_s, return_s - start_s, end_s - request_s)

    def _launch(self, task: SampleTask) -> Launch:
        """Launch a sample behind a spin; lengthen the next spin if this one was too short."""
        gpu, spin_s = self.gpu, self.next_spin_s.get(task.key, SPIN_SECONDS)
        if self.mode is Mode.cold:
            gpu.flush()
        if spin_s:
            gpu.spin(int(spin_s * self.cycles_per_second()))
        start = gpu.record_event()
        call_start_s = gpu.now()
        task.call()
        wall_s = gpu.now() - call_start_s
        end = gpu.record_event()
        gpu_was_idle = gpu.has_reached(start)
        if spin_s and not gpu_was_idle:
            self.vain_spins[task.key] = 0
        elif spin_s:  # spin longer, or never again before a call that itself waits for the GPU
            self.vain_spins[task.key] += 1
            longer_spin_s = min(MAX_SPIN_SECONDS, max(2 * spin_s, SPIN_PER_LAUNCH * wall_s))
            self.next_spin_s[task.key] = (
                0.0 if self.vain_spins[task.key] >= MAX_VAIN_SPINS else longer_spin_s
            )
        return Launch(start, end, wall_s, gpu_was_idle)

    def _collect(self, launches: list[Launch], chunk_start: float) -> list[Reading]:
        if not launches:
            return []
        self.gpu.synchronise()
        seconds = [self.gpu.seconds_between(launch.start, launch.end) for launch in launches]
        extra_cost_s = max(0.0, self.gpu.now() - chunk_start - sum(seconds)) / len(launches)
        return [
            Reading(sample_s, launch.wall_s, sample_s + extra_cost_s, launch.is_exposed)
            for sample_s, launch in zip(seconds, launches, strict=True)
        ]

    def cycles_per_second(self) -> float:
        """Return the cycles per second of the spinning kernel, which the first call measures."""
        if not self._spin_rate:
            self.gpu.spin(CALIBRATION_CYCLES)  # raises the clocks
            start = self.gpu.record_event()
            self.gpu.spin(CALIBRATION_CYCLES)
            end = self.gpu.record_event()
            self.gpu.synchronise()
            self._spin_rate = CALIBRATION_CYCLES / max(1e-9, self.gpu.seconds_between(start, end))
        return self._spin_rate

    def adapt(self, phase: Phase, num_batches: int) -> Phase:
        """Return the phase; in mode graph, capture one graph per batch and return their replay.

        Raises:
            UnsupportedMode: capturing raised a RuntimeError.
            torch.OutOfMemoryError: there is no memory for the graphs.
        """
        if self.mode is not Mode.graph:
            return phase
        try:
            graphs = [self.gpu.capture(partial(phase, number)) for number in range(num_batches)]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            message = str(error).partition("\n")[0]
            raise UnsupportedMode(f"cannot be captured as a CUDA graph: {message}") from error
        return lambda number: graphs[number]()


class TorchGpu:
    """The GPU and the host's clock as `CudaClock` uses them; tests replace it by a fake.

    Work is launched on the current stream of `device`, which must be the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.flush_bytes = CACHES_FLUSHED * properties.L2_cache_size
        self._buffer: torch.Tensor | None = None

    def now(self) -> float:
        """Return the time of the host in seconds."""
        return time.perf_counter()

    def record_event(self) -> torch.cuda.Event:
        """Record a timing event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_reached(self, event: torch.cuda.Event) -> bool:
        """Return whether the GPU has reached an event, without waiting."""
        return event.query()

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events, both of which the GPU must have reached."""
        return start.elapsed_time(end) / 1e3

    def spin(self, cycles: int) -> None:
        """Launch a kernel that spins for `cycles` cycles of the GPU."""
        torch.cuda._sleep(cycles)

    def flush(self) -> None:
        """Empty the L2 cache by writing a buffer of `flush_bytes`."""
        if self._buffer is None:
            self._buffer = torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.device)
        self._buffer.zero_()

    def synchronise(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Make three eager calls, capture another as a CUDA graph; return the graph's replay."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay
