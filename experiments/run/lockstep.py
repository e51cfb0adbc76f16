"""Keeping step: ranks that measure the same cell see the same numbers and decide alike.

They meet before each sample, and what a sample took is what the slowest rank took. Whatever else a
race decides by (hit rates, throttling, failures) is shared as well: a rank that decided otherwise
would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from experiments.machine.telemetry import Telemetry
from experiments.run.outcome import Outcome
from experiments.run.process import is_out_of_memory
from experiments.run.team import Team
from experiments.timing.clock import Clock, Phase, Reading, Work

ARM, CLOCK = 1.0, 2.0  # whose a failure is: the contender's, or of all that was timed together
SIBLINGS = ("busy",)  # telemetry's flags that other ranks raise by being there


class Peers(Protocol):
    """The other ranks; tests pretend them with threads."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Each rank's values."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Each rank's object."""
        ...


class Elsewhere(RuntimeError):
    """An arm failed on another rank, and so on this one."""


class RankGroup(Team):
    """One of several processes that measure the same cell and must not part ways."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.rank = peers, peers.rank
        self.clocks: dict[str, RankClock] = {}  # mode -> its clock
        self.failed: Exception | None = None  # the last call's, until it has been told
        self.elsewhere: dict[str, Exception] = {}  # arm -> what another rank has told

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """Each remembers its failure for the clock to tell, and fails where another rank has."""

        def watched(phase: Phase, number: int) -> object:
            if key in self.elsewhere:
                raise self.elsewhere[key]
            try:
                return phase(number)
            except Exception as error:
                self.failed = error
                raise

        return {name: partial(watched, phase) for name, phase in phases.items()}

    def clock(self, clock: Clock) -> Clock:
        """The slowest rank's time."""
        shared = RankClock(clock, self)
        self.clocks[clock.mode.value] = shared
        return shared

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """What slowed one rank slowed all."""
        return SharedTelemetry(telemetry, self.peers)

    def total(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """The sum over ranks, of contenders that count."""
        if not counters:
            return counters
        every = self.peers.gather([float(value) for value in counters.values()])
        return {k: int(sum(v)) for k, v in zip(counters, zip(*every, strict=True), strict=True)}

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object, by rank."""
        return self.peers.exchange(value)

    def settle(self, outcomes: Mapping[str, Outcome]) -> None:
        """The first rank's failure of each arm is every rank's."""
        every = self.peers.exchange({key: (o.status, o.reason) for key, o in outcomes.items()})
        for key, outcome in outcomes.items():
            told = [(rank, *said[key]) for rank, said in enumerate(every) if said[key][0] != "ok"]
            if told and outcome.status == "ok":
                rank, outcome.status, reason = told[0]
                outcome.reason = f"rank {rank}: {reason}"

    def share(self, error: Exception | None) -> Exception:
        """What a rank has to raise after some of them failed: its own error, else another's."""
        every = self.peers.exchange(None if error is None else told(error))
        if error is not None:
            return error
        rank, text, out_of_memory = next((r, *said) for r, said in enumerate(every) if said)
        kind = MemoryError if out_of_memory else Elsewhere
        return kind(f"rank {rank}: {text}")


def told(error: Exception) -> tuple[str, bool]:
    """An error for others: its text, and whether memory ran out."""
    return f"{type(error).__name__}: {error}", is_out_of_memory(error)


class RankClock(Clock):
    """A clock that starts every sample on all ranks together and reads the slowest of them."""

    def __init__(self, clock: Clock, ranks: RankGroup) -> None:
        self.inner, self.ranks, self.mode = clock, ranks, clock.mode
        self.fewest_seconds = clock.fewest_seconds
        self.log: dict[str, list[tuple[float, ...]]] = {}  # key of the work -> seconds by rank

    def time(self, work: Any) -> float:
        """Seconds of the slowest rank."""
        return self._sample(Work(work)).seconds

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """One sample at a time, whatever the clock beneath could do at once."""
        return [self._sample(work) for work in works]

    def _sample(self, work: Work) -> Reading:
        ranks, raised = self.ranks, None
        ranks.failed = None
        ranks.peers.barrier()
        try:
            (mine,) = self.inner.read([work])
        except Exception as error:
            mine, raised = Reading(0.0, 0.0, 0.0), error
        failed = raised or ranks.failed  # the latter is one that the race has caught already
        blame = 0.0 if failed is None else ARM if ranks.failed else CLOCK
        every = ranks.peers.gather([mine.seconds, mine.wall, mine.cost, mine.exposed, blame])
        seconds, wall, cost, exposed, blame = (max(values) for values in zip(*every, strict=True))
        if blame:
            shared = ranks.share(failed)
            if raised or blame == CLOCK:
                raise shared
            if failed is None:
                ranks.elsewhere[work.key.partition("/")[0]] = shared
                work.call()  # raises where the arm's own calls do, and so where the race catches it
        else:
            self.log.setdefault(work.key, []).append(tuple(rank[0] for rank in every))
        return Reading(seconds, wall, cost, bool(exposed))

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """As the clock beneath; where one rank cannot, none can."""
        adapted, error = phase, None
        try:
            adapted = self.inner.adapt(phase, pool)
        except Exception as raised:
            error = raised
        self.ranks.failed = None
        if any(failed for (failed,) in self.ranks.peers.gather([float(error is not None)])):
            raise self.ranks.share(error)
        return adapted

    def describe(self) -> dict[str, object]:
        """As the clock beneath."""
        return self.inner.describe()

    def seconds_of(self, key: str, samples: Sequence[tuple[int, float]], calls: int) -> Any:
        """Every rank's seconds of those samples, which the warm-up's precede in the log."""
        taken = iter(self.log.get(key, []))
        share = 1 / calls
        found = []
        for _, seconds in samples:
            ranks = next((t for t in taken if max(t) * share == seconds), None)
            found.append(None if ranks is None else [second * share for second in ranks])
        return found


class SharedTelemetry:
    """Each rank watches for itself; a round is repeated by all or by none."""

    def __init__(self, telemetry: Telemetry, peers: Peers) -> None:
        self.inner, self.peers = telemetry, peers
        self.start, self.stop, self.summary = telemetry.start, telemetry.stop, telemetry.summary

    def check(self) -> list[str]:
        """What slowed any of the ranks."""
        mine = self.inner.check()
        slowed = [rank for rank, (seen,) in enumerate(self.peers.gather([len(mine)])) if seen]
        return mine or [f"rank {rank}" for rank in slowed]

    def flags(self) -> list[str]:
        """Without what the other ranks' work looks like."""
        return [flag for flag in self.inner.flags() if flag not in SIBLINGS]
