"""What every cell of a run shares, and which part of the run a process is."""

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

SEED_STEP = 7919  # between replicates; a prime, so that neighbouring seeds of two runs differ too
RANK_STEP = 104_729  # between ranks; far from all that replicates add up to


def quiet(text: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Session:
    """A run as one process sees it."""

    config: Config
    device: torch.device
    run_id: str
    replicate: int = 0
    order: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)  # point_key, context_id, ...
    note: Callable[[str], object] = quiet  # told what is being done, arm by arm
    team: Team = ALONE  # those that measure the same cell beside it

    def over_ranks_of(self, cell: Cell) -> Session:
        """With as many ranks as the cell asks for, if it does."""
        if not cell.ranks:
            return self
        device = dataclasses.replace(self.config.device, ranks=cell.ranks)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device))

    @property
    def seed(self) -> int:
        """Each process has batches of its own, the same in every run with the same seed."""
        return self.config.seed + SEED_STEP * self.replicate

    @property
    def pool_seed(self) -> int:
        """Each rank has batches of its own; whatever else is drawn, all ranks draw alike."""
        return self.seed + RANK_STEP * self.team.rank


@dataclass(frozen=True)
class Orders:
    """What a child is sent off with."""

    cell: Cell
    session: Session
    seconds: float  # for timing
