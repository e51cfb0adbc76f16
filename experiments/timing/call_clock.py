"""A clock for calls that need a preparation each, such as calls that change a hash table."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from experiments.config.schema import Mode
from experiments.timing.clock import Clock, ColdClock, Phase, Reading, SampleTask, UnsupportedMode


class TimedCall(ABC):
    """An operation with its preparation, which is not timed.

    Attributes:
        repeats: number of calls with the same arguments that are timed together and recorded as
            their mean. A table that evicts at every tenth call only would show all of that work in
            one sample or none.
    """

    repeats: int = 1

    @abstractmethod
    def before(self, number: int) -> Any:
        """Undo what the last call changed, if need be; return the arguments of call `number`."""

    @abstractmethod
    def call(self, ready: Any) -> object:
        """Make the timed call with the arguments of `before`."""

    def __call__(self, number: int) -> object:
        """Prepare and make the call."""
        return self.call(self.before(number))


class CallClock(Clock):
    """A clock of the host around the inner calls, between two synchronisations on a GPU.

    The mode is hot or wall, or cold on a CPU; others raise UnsupportedMode. `now` is a clock in
    nanoseconds. `adapt` takes `TimedCall`s only. A sample that calls none of the phases that
    `adapt` returned reads as 0 seconds.

    Attributes:
        inside_ns: time in the calls, ÷ `TimedCall.repeats`, since the present sample began.
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
        self.inside_ns = 0.0

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """Return the phase with its call timed; raise TypeError for one that is no TimedCall."""
        if not isinstance(phase, TimedCall):
            raise TypeError(f"CallClock times TimedCalls, got {type(phase).__name__}")

        def run(number: int) -> None:
            ready = phase.before(number)
            self.flush()
            self._synchronise()
            start = self.now()
            for _ in range(phase.repeats):
                phase.call(ready)
            self._synchronise()
            self.inside_ns += (self.now() - start) / phase.repeats

        return run

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take samples whose cost includes their preparation."""
        readings = []
        for task in tasks:
            start, self.inside_ns = self.now(), 0.0
            task.call()
            seconds = self.inside_ns / 1e9
            readings.append(Reading(seconds, seconds, (self.now() - start) / 1e9))
        return readings

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
