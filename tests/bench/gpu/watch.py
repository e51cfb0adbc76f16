"""Times of calls: on the host, on the device, and of the replay of a CUDA graph."""

from __future__ import annotations

import gc
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from experiments.timing.clock import TorchGpu

Call = Callable[[int], object]  # on batch number n
POOL = 4  # distinct batches
WARM_CALLS = 5  # calls of each contender before the first sample
MIN_SECONDS = 1e-9  # shortest time of a call: the pretend GPU takes no time
SPIN_SECONDS = 300e-6  # at first; grows to twice what the host needs for a call


@dataclass
class Times:
    """Seconds of one contender, a sample per round."""

    host: list[float] = field(default_factory=list)  # until the call returns, on an idle device
    elapsed: list[float] = field(default_factory=list)  # until the device is idle again
    device: list[float] = field(default_factory=list)  # between events, launches hidden by a spin
    error: str = ""

    def columns(self) -> dict[str, float | None]:
        """Return the medians in microseconds as columns of a table."""
        return {f"{kind}_us": self.median_us(kind) for kind in ("host", "elapsed", "device")}

    def median_us(self, kind: str) -> float | None:
        """Return the median of host, elapsed or device in microseconds; None without samples."""
        samples: Sequence[float] = getattr(self, kind)
        return 1e6 * statistics.median(samples) if samples else None


class Watch:
    """Times calls on a CPU or a GPU; on a CPU host, elapsed and device are one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = TorchGpu(device) if device.type == "cuda" else None
        self._rate = 0.0  # cycles of the spinning kernel per second

    def sync(self) -> None:
        """Wait for the device."""
        if self.gpu:
            self.gpu.synchronise()

    def sample(self, call: Call, number: int, times: Times) -> None:
        """Add a sample of each kind."""
        self.sync()
        start = time.perf_counter()
        call(number)
        returned = time.perf_counter()
        self.sync()
        end = time.perf_counter()
        times.host.append((returned if self.gpu else end) - start)
        times.elapsed.append(end - start)
        times.device.append(self.between_events(call, number, 2 * (returned - start)))

    def between_events(self, call: Call, number: int, spin: float = SPIN_SECONDS) -> float:
        """Return the seconds that the device takes for a call that it need not wait for."""
        gpu = self.gpu
        if gpu is None:
            start = time.perf_counter()
            call(number)
            return time.perf_counter() - start
        gpu.spin(int(max(SPIN_SECONDS, spin) * self._cycles_per_second()))
        begin = gpu.record_event()
        call(number)
        end = gpu.record_event()
        gpu.synchronise()
        return max(MIN_SECONDS, gpu.seconds_between(begin, end))

    def _cycles_per_second(self) -> float:
        if not self._rate and self.gpu:
            cycles = 1_000_000
            self.gpu.spin(cycles)
            begin = self.gpu.record_event()
            self.gpu.spin(cycles)
            end = self.gpu.record_event()
            self.gpu.synchronise()
            self._rate = cycles / max(1e-6, self.gpu.seconds_between(begin, end))
        return self._rate

    def captured(self, call: Call) -> Call:
        """Return the replay of a CUDA graph of the call on batch 0; raises where it has none."""
        if self.gpu is None:
            raise RuntimeError("no CUDA graphs on a CPU")
        replay = self.gpu.capture(lambda: call(0))
        return lambda number: replay()


def race(watch: Watch, calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, Times]:
    """Time calls in random order within a round; one that raises keeps its error and no samples.

    At least three rounds, then as many as fit into `seconds`, at most `rounds`.
    """
    results = {name: Times() for name in calls}
    for name, call in calls.items():
        _guard(results[name], lambda call=call: [call(number) for number in range(WARM_CALLS)])
    watch.sync()
    generator, deadline = random.Random(0), time.monotonic() + seconds
    gc.collect()
    for round_number in range(rounds):
        if round_number >= 3 and time.monotonic() > deadline:
            break
        for name in generator.sample(sorted(calls), len(calls)):
            if not results[name].error:
                _guard(
                    results[name],
                    lambda name=name, round_number=round_number: watch.sample(
                        calls[name], round_number, results[name]
                    ),
                )
    return results


def _guard(times: Times, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:  # a contender that fails is a row of its own
        times.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
        times.host, times.elapsed, times.device = [], [], []


def ratio(peer: Times, base: Times, kind: str = "device") -> float | None:
    """Return the median of peer ÷ base, round by round; None where one has no samples."""
    pairs = list(zip(getattr(peer, kind), getattr(base, kind), strict=False))
    return statistics.median(p / b for p, b in pairs) if pairs else None


def kernels(call: Call, steps: int = POOL) -> dict[str, tuple[float, float]]:
    """Return launches and microseconds per call by kernel; empty without a profiler of GPUs."""
    activities = torch.profiler.ProfilerActivity
    if activities.CUDA not in torch.profiler.supported_activities():
        return {}
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    with suppress(RuntimeError):
        with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
            for number in range(steps):
                call(number)
            torch.cuda.synchronize()
        for event in profile.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                name = short_name(event.name)
                launches[name] += 1
                microseconds[name] += event.device_time_total
    return {name: (launches[name] / steps, microseconds[name] / steps) for name in launches}


def short_name(kernel: str) -> str:
    """Return the name of a kernel without namespaces, arguments and return type."""
    name = re.sub(r"\(anonymous namespace\)::|\w+::", "", kernel.split("(emb::")[0])
    return name.removeprefix("void ").split("(")[0]
