"""Several ranks on one machine: N synchronised processes measure a cell, under torchrun.

Every rank builds the contenders and has batches of its own; `experiments.run.ranks` keeps them
together. Rank 0 returns the records, with every rank's seconds in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from experiments import kinds
from experiments.machine.telemetry import Telemetry
from experiments.measure.outcome import Outcome
from experiments.results.store import Record
from experiments.run.process import is_out_of_memory, killed_with_parent, note
from experiments.run.session import Orders, RankSync
from experiments.timing import memory
from experiments.timing.clock import Clock, Phase, Reading, Work

ARM, CLOCK = 1.0, 2.0  # whose a failure is: the contender's, or of all that was timed together
SIBLINGS = ("busy",)  # telemetry's flags that other ranks raise by being there


class Peers(Protocol):
    """Communication with the other ranks; tests use threads."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return each rank's values."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return each rank's object."""
        ...


class Elsewhere(RuntimeError):
    """An arm failed on another rank, and so on this one."""


class TorchrunSync(RankSync):
    """The synchronisation of one of several processes that measure the same cell."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.rank = peers, peers.rank
        self.clocks: dict[str, RankClock] = {}  # mode -> its clock
        self.failed: Exception | None = None  # the last call's, until it has been told
        self.elsewhere: dict[str, Exception] = {}  # arm -> what another rank has told

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """Wrap the phases: each remembers its failure, and fails where another rank has failed."""

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
        """Return a clock that reads the slowest rank's time."""
        shared = RankClock(clock, self)
        self.clocks[clock.mode.value] = shared
        return shared

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """Return telemetry in which what slowed one rank slowed all."""
        return SharedTelemetry(telemetry, self.peers)

    def total(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """Sum the counters over ranks."""
        if not counters:
            return counters
        every = self.peers.gather([float(value) for value in counters.values()])
        return {k: int(sum(v)) for k, v in zip(counters, zip(*every, strict=True), strict=True)}

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank."""
        return self.peers.exchange(value)

    def settle(self, outcomes: Mapping[str, Outcome]) -> None:
        """Give every rank the first rank's failure of each arm."""
        every = self.peers.exchange({key: (o.status, o.reason) for key, o in outcomes.items()})
        for key, outcome in outcomes.items():
            told = [(rank, *said[key]) for rank, said in enumerate(every) if said[key][0] != "ok"]
            if told and outcome.status == "ok":
                rank, outcome.status, reason = told[0]
                outcome.reason = f"rank {rank}: {reason}"

    def share(self, error: Exception | None) -> Exception:
        """Return the error to raise after some ranks failed: this rank's, else another's."""
        every = self.peers.exchange(None if error is None else told(error))
        if error is not None:
            return error
        rank, text, out_of_memory = next((r, *said) for r, said in enumerate(every) if said)
        kind = MemoryError if out_of_memory else Elsewhere
        return kind(f"rank {rank}: {text}")


def told(error: Exception) -> tuple[str, bool]:
    """Return an error's text and whether memory ran out, for other ranks."""
    return f"{type(error).__name__}: {error}", is_out_of_memory(error)


class RankClock(Clock):
    """A clock that starts every sample on all ranks together and reads the slowest of them."""

    def __init__(self, clock: Clock, ranks: TorchrunSync) -> None:
        self.inner, self.ranks, self.mode = clock, ranks, clock.mode
        self.min_sample_seconds = clock.min_sample_seconds
        self.log: dict[str, list[tuple[float, ...]]] = {}  # key of the work -> seconds by rank

    def time(self, work: Any) -> float:
        """Return the seconds of the slowest rank."""
        return self._sample(Work(work)).seconds

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Take one sample at a time, even if the wrapped clock can take several."""
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
        """Adapt as the wrapped clock does; where one rank cannot, none can."""
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
        """Describe the wrapped clock."""
        return self.inner.describe()

    def seconds_of(self, key: str, samples: Sequence[tuple[int, float]], calls: int) -> Any:
        """Return every rank's seconds of the last samples in the log; the warm-up's come first."""
        taken = iter(self.log.get(key, []))
        share = 1 / calls
        found = []
        for _, seconds in samples:
            ranks = next((t for t in taken if max(t) * share == seconds), None)
            found.append(None if ranks is None else [second * share for second in ranks])
        return found


class SharedTelemetry:
    """Telemetry of every rank; a round is repeated by all ranks or by none."""

    def __init__(self, telemetry: Telemetry, peers: Peers) -> None:
        self.inner, self.peers = telemetry, peers
        self.start, self.stop, self.summary = telemetry.start, telemetry.stop, telemetry.summary

    def check(self) -> list[str]:
        """Return what slowed any of the ranks."""
        mine = self.inner.check()
        slowed = [rank for rank, (seen,) in enumerate(self.peers.gather([len(mine)])) if seen]
        return mine or [f"rank {rank}" for rank in slowed]

    def flags(self) -> list[str]:
        """Return the flags without those that the other ranks' work causes."""
        return [flag for flag in self.inner.flags() if flag not in SIBLINGS]


LOOK_SECONDS = 0.5
GOODBYE_SECONDS = 10.0  # for torchrun to say how its processes ended
MODULE = "experiments.run.ranks"


class TorchPeers:
    """Communication over gloo, on the host, so that it puts no work on a GPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """Wait on the host for all ranks; the clock waits for the device."""
        self.gather([0.0])

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Exchange one small tensor per rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [tensor.tolist() for tensor in every]

    def exchange(self, value: Any) -> list[Any]:
        """Exchange pickled objects."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return every


# A rank


def main() -> None:
    """Measure as one process of torchrun and send the records to the process that started it."""
    killed_with_parent()
    with connection.Client(sys.argv[1], "AF_UNIX") as pipe:
        pipe.send(int(os.environ["RANK"]))
        orders: Orders = pipe.recv()
        try:
            records = _measure(orders, pipe)
        except Exception as error:
            pipe.send(_Failed(*told(error)))
            raise
        pipe.send(records)
        # Torchrun ends all when one ends badly, as torch can make it, and others may still send.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A rank's error."""

    text: str
    out_of_memory: bool


def _measure(orders: Orders, pipe: Connection) -> list[Record]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config, device = orders.session.config, orders.session.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        _keep_to_own_cores(rank, size)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    memory.keep_freed_blocks()
    patience = datetime.timedelta(seconds=config.timing.limit_seconds or 1e6)
    dist.init_process_group("gloo", timeout=patience)
    try:
        ranks = TorchrunSync(TorchPeers())
        session = dataclasses.replace(orders.session, device=device, note=pipe.send, sync=ranks)
        records = kinds.find(orders.cell.kind).measure(orders.cell, session, orders.seconds)
    finally:
        dist.destroy_process_group()
    return [record | _by_rank(record, ranks) for record in records]


def _keep_to_own_cores(rank: int, size: int) -> None:
    """Restrict this rank to an equal share of neighbouring cores, if there is one per rank."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= size:
            own = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
            os.sched_setaffinity(0, own)


def _by_rank(record: Record, ranks: TorchrunSync) -> Record:
    """Return the seconds of every rank per sample; a sample's own value is the slowest rank's."""
    clock = ranks.clocks.get(record["mode"])
    calls = record.get("executions", {})
    found = {
        phase: clock.seconds_of(f"{record['arm']}/{phase}", taken, calls.get(phase, 1))
        for phase, taken in record["samples"].items()
        if clock
    }
    return {"rank_samples": found, "rank_threads": torch.get_num_threads()}


# The process that starts them


def lead(pipe: Connection, orders: Orders) -> None:
    """Measure the cell on `device.ranks` ranks and send its records; a failure is raised."""
    ranks = orders.session.config.device.ranks
    note(f"|starting {ranks} ranks")
    with tempfile.TemporaryDirectory() as folder, _listening(f"{folder}/ranks") as server:
        output = Path(folder) / "output"
        with output.open("wb") as stream:
            agent = subprocess.Popen(
                [*_torchrun(ranks), f"{folder}/ranks"],
                env=_environment(orders),
                stdout=stream,
                stderr=stream,
                preexec_fn=killed_with_parent,
            )
        try:
            pipes = dict(_arrivals(server, agent, ranks, output))
            for other in pipes.values():
                other.send(orders)
            pipe.send(_converse(pipes, agent, output))
        finally:
            agent.kill()
            agent.wait()


def _torchrun(ranks: int) -> list[str]:
    single = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return [sys.executable, "-m", "torch.distributed.run", *single, "-m", MODULE]


def _environment(orders: Orders) -> dict[str, str]:
    """Return the environment of torchrun: this process's modules, and each rank's threads."""
    device = orders.session.config.device
    path = os.pathsep.join(p for p in sys.path if p)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = device.threads or max(1, (cores or 1) // device.ranks)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _listening(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    server.settimeout(LOOK_SECONDS)
    return server


def _arrivals(
    server: socket.socket, agent: subprocess.Popen[bytes], ranks: int, output: Path
) -> Iterator[tuple[int, Connection]]:
    for _ in range(ranks):
        while True:
            try:
                arrived = Connection(server.accept()[0].detach())
                break
            except TimeoutError:
                if agent.poll() is not None:
                    raise _death(None, agent, output) from None
        yield int(arrived.recv()), arrived


def _converse(
    pipes: Mapping[int, Connection], agent: subprocess.Popen[bytes], output: Path
) -> list[Record]:
    """Pass notes on until every rank has sent its records; those of rank 0.

    TorchrunSync need not be at the same arm: of one that fails it is its own last note that stands.
    """
    open_pipes = {other: rank for rank, other in pipes.items()}
    doing = dict.fromkeys(pipes, "")
    found: list[Record] = []
    while open_pipes:
        for other in connection.wait(list(open_pipes)):
            assert isinstance(other, Connection)
            rank = open_pipes[other]
            try:
                message = other.recv()
            except (EOFError, OSError):
                note(doing[rank])
                raise _death(rank, agent, output) from None
            if isinstance(message, _Failed):
                note(doing[rank])
                text = f"rank {rank}: {message.text}"
                raise MemoryError(text) if message.out_of_memory else Elsewhere(text)
            if isinstance(message, str):
                doing[rank] = message
                if rank == 0:
                    note(message)
                continue
            found = message if rank == 0 else found
            del open_pipes[other]
    return found


def _death(rank: int | None, agent: subprocess.Popen[bytes], output: Path) -> Exception:
    """Return why a rank has ended, from what torchrun prints after cleaning up."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(GOODBYE_SECONDS)
    said = output.read_text(errors="replace")
    who = "torchrun" if rank is None else f"rank {rank}"
    if re.search(r"Signal 9 \(SIGKILL\)|exitcode\s*: -9", said):
        return MemoryError(f"{who} was killed from outside (SIGKILL), as by a lack of memory")
    signals = re.findall(r"Signal \d+ \((\w+)\)", said)
    if signals:
        return Elsewhere(f"{who} crashed ({signals[0]})")
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
    return Elsewhere(f"{who} ended without an answer: {last.strip()}")


if __name__ == "__main__":
    # What this process sends is unpickled by one whose own `__main__` is another module.
    from experiments.run.ranks import main as main_of_the_module

    main_of_the_module()
