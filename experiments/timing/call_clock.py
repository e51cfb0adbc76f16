"""A clock that does not time the preparation of a call, e.g. undoing changes of a hash table."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from experiments.config.schema import Mode
from experiments.timing.clock import Clock, ColdClock, Phase, Reading, SampleTask, UnsupportedMode


class TimedCall(ABC):
    """An operation and its preparation, as a `Phase`; `CallClock` does not time the preparation.

    Attributes:
        repeats: number of calls with the same arguments that are timed together; the sample is
            their mean. Example: if a table evicts in every tenth call only, ten calls make each
            sample contain that work once.
    """

    repeats: int = 1

    @abstractmethod
    def prepare(self, batch_number: int) -> Any:
        """Return the arguments of the call on batch `batch_number`.

        Undo what the previous call has changed, if the next call needs the former state.
        """

    @abstractmethod
    def call(self, arguments: Any) -> object:
        """Make the timed call with the arguments that `prepare` returned; the result is ignored."""

    def __call__(self, batch_number: int) -> object:
        """Prepare and make one call, as the other clocks time it."""
        return self.call(self.prepare(batch_number))


class CallClock(Clock):
    """A clock of the host, which times `TimedCall.call` and not `TimedCall.prepare`.

    On a GPU the host waits for the device before and after the timed calls. `read` must get phases
    that `adapt` returned: they add up the time of their calls in `call_ns`.

    Args:
        device: device of the calls.
        mode: hot or wall; on a CPU also cold.
        now: function that returns the time in nanoseconds.

    Attributes:
        call_ns: nanoseconds of the present sample's calls so far, each ÷ `TimedCall.repeats`.

    Raises:
        UnsupportedMode: the device does not support the mode.
    """

    def __init__(
        self, device: torch.device, mode: Mode, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        if mode not in (Mode.hot, Mode.wall) and (mode, device.type) != (Mode.cold, "cpu"):
            raise UnsupportedMode(
                f"operations on tables of keys have no mode {mode.value} on {device.type}: use hot"
            )
        self.mode, self.device, self.now = mode, device, now
        self.flush = ColdClock().flush if mode is Mode.cold else lambda: None
        self.call_ns = 0.0

    def adapt(self, phase: Phase, num_batches: int) -> Phase:
        """Return the phase with its calls timed; raise TypeError if `phase` is not a TimedCall."""
        if not isinstance(phase, TimedCall):
            raise TypeError(f"CallClock times TimedCalls, got {type(phase).__name__}")

        def run(batch_number: int) -> None:
            arguments = phase.prepare(batch_number)
            self.flush()
            self._synchronise()
            start_ns = self.now()
            for _ in range(phase.repeats):
                phase.call(arguments)
            self._synchronise()
            self.call_ns += (self.now() - start_ns) / phase.repeats

        return run

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take the samples in order; the cost of each includes its preparation."""
        readings = []
        for task in tasks:
            start_ns, self.call_ns = self.now(), 0.0
            task.call()
            seconds = self.call_ns / 1e9
            readings.append(Reading(seconds, seconds, (self.now() - start_ns) / 1e9))
        return readings

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
