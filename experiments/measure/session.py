"""The session of a process that measures a cell: configuration, device, seeds and ranks."""

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
    """The synchronisation of the ranks of a cell; this base class is that of a single process.

    In a cell of several ranks all ranks must call each method, with the same arms.

    Attributes:
        rank: number of this process among the ranks.
    """

    rank = 0

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """Return the phases of arm `key` in a form that fails on all ranks if it fails on one."""
        return phases

    def clock(self, clock: Clock) -> Clock:
        """Return `clock` in a form that reads, on every rank, the time of the slowest rank."""
        return clock

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """Return `telemetry` in a form whose `check` reports a slowed rank on every rank."""
        return telemetry

    def sum_over_ranks(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """Return the counters, summed over the ranks."""
        return counters

    def exchange(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        return [value]

    def share_failures(self, outcomes: Mapping[str, Outcome]) -> None:
        """Mark each outcome that is "ok" here as failed if its arm failed on another rank."""


# Difference of the seeds of two replicates: large, so that runs with seeds n and n + 1 share none.
REPLICATE_SEED_STEP = 7919
RANK_SEED_STEP = 104_729  # difference of two ranks; larger than those of 13 replicates


def ignore_message(text: str) -> None:
    """Discard a progress message."""


@dataclass(frozen=True)
class Session:
    """A run from the view of a process that measures a cell.

    Attributes:
        config: configuration of the run.
        device: device of the tables.
        run_id: name of the run's directory.
        replicate: number of the process among the cell's processes.
        order: position of the job in the run.
        identity: entries of every record; in a run these are point_key, context_id, cell_number.
        note: function that is called with "arm|activity" when an activity begins.
        sync: synchronisation with the other ranks of the cell.
    """

    config: Config
    device: torch.device
    run_id: str
    replicate: int = 0
    order: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    note: Callable[[str], object] = ignore_message
    sync: RankSync = field(default_factory=RankSync)

    def over_ranks_of(self, cell: Cell) -> Session:
        """Return the session with device.ranks set to `cell.ranks`; itself if that is 0."""
        if not cell.ranks:
            return self
        device = dataclasses.replace(self.config.device, ranks=cell.ranks)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device))

    @property
    def seed(self) -> int:
        """Return the seed of this replicate, the same on all ranks."""
        return self.config.seed + REPLICATE_SEED_STEP * self.replicate

    @property
    def pool_seed(self) -> int:
        """Return the seed of this rank's batches; other draws are the same on all ranks."""
        return self.seed + RANK_SEED_STEP * self.sync.rank


@dataclass(frozen=True)
class MeasureRequest:
    """A request to a child process, which must be picklable."""

    cell: Cell
    session: Session
    seconds: float  # budget for timing all arms of the cell
