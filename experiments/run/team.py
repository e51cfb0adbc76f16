"""What a process asks of those that measure the same cell beside it; alone it asks nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.machine.telemetry import Telemetry
from experiments.timing.clock import Clock, Phase

if TYPE_CHECKING:
    from experiments.run.outcome import Outcome


class Team:
    """A process that works alone; `experiments.run.lockstep` has the one that does not."""

    rank = 0

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """An arm's phases, watched so that a failure is every rank's."""
        return phases

    def clock(self, clock: Clock) -> Clock:
        """The clock, such that every rank reads the same."""
        return clock

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """The telemetry, such that every rank repeats the same rounds."""
        return telemetry

    def total(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """What the caches of all ranks counted."""
        return counters

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object, by rank."""
        return [value]

    def settle(self, outcomes: Mapping[str, Outcome]) -> None:
        """An arm that failed on one rank has failed."""


ALONE = Team()
