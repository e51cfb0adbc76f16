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
            their mean. If a table evicts in every tenth call only, ten calls make each sample
            contain that work once.
    """

    repeats: int = 1

    @abstractmethod
    def prepare(self, number: int) -> Any:
        """Undo the changes of the last call if need be; return the arguments of call `number`."""

    @abstractmethod
    def call(self, arguments: Any) -> object:
        """Make the timed call with the arguments that `prepare` returned."""

    def __call__(self, number: int) -> object:
        """Prepare and make the call."""
        return self.call(self.prepare(number))


class CallClock(Clock):
    """A clock of the host around the inner calls, between two synchronisations on a GPU.

    The mode is hot or wall, or cold on a CPU; others raise UnsupportedMode. `now` is a clock in
    nanoseconds. A sample is the time that phases returned by `adapt` measure within its call.

    Attributes:
        call_ns: nanoseconds of the calls of the present sample ÷ `TimedCall.repeats`.
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

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """Return the phase with its call timed; raise TypeError for one that is no TimedCall."""
        if not isinstance(phase, TimedCall):
            raise TypeError(f"CallClock times TimedCalls, got {type(phase).__name__}")

        def run(number: int) -> None:
            arguments = phase.prepare(number)
            self.flush()
            self._synchronise()
            start = self.now()
            for _ in range(phase.repeats):
                phase.call(arguments)
            self._synchronise()
            self.call_ns += (self.now() - start) / phase.repeats

        return run

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take samples whose cost includes their preparation."""
        readings = []
        for task in tasks:
            start, self.call_ns = self.now(), 0.0
            task.call()
            seconds = self.call_ns / 1e9
            readings.append(Reading(seconds, seconds, (self.now() - start) / 1e9))
        return readings

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
