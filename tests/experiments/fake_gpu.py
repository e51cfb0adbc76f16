"""A GPU that only pretends: a queue with a clock of its own, and a host that takes its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from experiments.timing.clock import SampleTask


@dataclass
class FakeEvent:
    """When the GPU comes to it."""

    at: float


@dataclass
class FakeGpu:
    """Kernels run one after the other, each begins when it is launched or later."""

    host: float = 0.0  # seconds on the host's clock
    idle_at: float = 0.0  # when the GPU will have done all it was given
    launch: float = 5e-6  # seconds of the host for one launch
    cycles_per_second: float = 2e9
    flush_seconds: float = 40e-6
    log: list[str] = field(default_factory=list)
    captured: list[Callable[[], object]] = field(default_factory=list)

    def kernel(self, seconds: float) -> None:
        """Launch work of so many seconds."""
        self.host += self.launch
        self.idle_at = max(self.idle_at, self.host) + seconds

    def now(self) -> float:
        return self.host

    def record_event(self) -> FakeEvent:
        return FakeEvent(max(self.idle_at, self.host))

    def has_reached(self, event: FakeEvent) -> bool:
        return event.at <= self.host

    def seconds_between(self, start: FakeEvent, end: FakeEvent) -> float:
        assert max(start.at, end.at) <= self.host, "read before the GPU came to it"
        return end.at - start.at

    def spin(self, cycles: int) -> None:
        self.log.append("spin")
        self.kernel(cycles / self.cycles_per_second)

    def flush(self) -> None:
        self.log.append("flush")
        self.kernel(self.flush_seconds)

    def synchronise(self) -> None:
        self.log.append("synchronise")
        self.host = max(self.host, self.idle_at)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """One launch for everything, which takes as long on the GPU as the kernels did."""
        self.captured.append(work)
        before, host = self.idle_at, self.host
        self.idle_at, self.launch, launch = host, 0.0, self.launch
        work()
        seconds = self.idle_at - self.host
        self.launch, self.idle_at, self.host = launch, before, host
        return lambda: self.kernel(seconds)


def kernels(gpu: FakeGpu, seconds: float, count: int = 1) -> SampleTask:
    """Work of `count` launches."""

    def call() -> None:
        for _ in range(count):
            gpu.kernel(seconds / count)

    return SampleTask(call, "a")
