"""What all cells of a run share, and the part of the run that a process measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from experiments.config.schema import Config
from experiments.config.sweep import Cell
from experiments.machine.telemetry import Telemetry
from experiments.timing.clock import Clock, Phase

if TYPE_CHECKING:
    from experiments.measure.outcome import Outcome


class RankSync:
    """The synchronisation of a process that measures alone; see ranks.py for several."""

    rank = 0

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """Return an arm's phases, wrapped so that a failure is every rank's."""
        return phases

    def clock(self, clock: Clock) -> Clock:
        """Return the clock, wrapped so that every rank reads the same."""
        return clock

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """Return the telemetry, wrapped so that every rank repeats the same rounds."""
        return telemetry

    def total(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """Return the counters summed over ranks."""
        return counters

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank."""
        return [value]

    def settle(self, outcomes: Mapping[str, Outcome]) -> None:
        """Mark an arm as failed on all ranks if it failed on one."""


ALONE = RankSync()

SEED_STEP = 7919  # between replicates; a prime, so that neighbouring seeds of two runs differ too
RANK_STEP = 104_729  # between ranks; far from all that replicates add up to


def ignore_message(text: str) -> None:
    """Discard a progress message."""


@dataclass(frozen=True)
class Session:
    """A run from the view of one process."""

    config: Config
    device: torch.device
    run_id: str
    replicate: int = 0
    order: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)  # point_key, context_id, ...
    note: Callable[[str], object] = ignore_message  # told what is being done, arm by arm
    sync: RankSync = ALONE  # the ranks that measure the same cell

    def over_ranks_of(self, cell: Cell) -> Session:
        """Return the session with as many ranks as the cell asks for."""
        if not cell.ranks:
            return self
        device = dataclasses.replace(self.config.device, ranks=cell.ranks)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device))

    @property
    def seed(self) -> int:
        """Return the seed of this process's batches, the same in every run with the same seed."""
        return self.config.seed + SEED_STEP * self.replicate

    @property
    def pool_seed(self) -> int:
        """Return the seed of this rank's batches; everything else is drawn alike on all ranks."""
        return self.seed + RANK_STEP * self.sync.rank


@dataclass(frozen=True)
class Orders:
    """What a child needs to measure a cell."""

    cell: Cell
    session: Session
    seconds: float  # for timing
