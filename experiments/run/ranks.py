"""Several ranks on one machine: synchronised processes measure a cell together.

Every rank builds the contenders, and draws its batches by `Session.pool_seed`; `ProcessSync`
synchronises the ranks. Rank 0 returns the records, whose samples are the slowest rank's times.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from experiments import kinds
from experiments.machine import memory
from experiments.machine.cpu import usable_cores
from experiments.machine.telemetry import Telemetry
from experiments.measure.outcome import Outcome
from experiments.measure.process import Child, ChildDied, Limits, is_out_of_memory, note
from experiments.measure.session import MeasureRequest, RankSync
from experiments.results.store import Record
from experiments.timing.clock import Clock, Phase, Reading, SampleTask

# Source of a failure on a rank: one contender, which leaves the race, or the clock, without which
# no rank can go on. They are floats because they are gathered with the times of a sample.
NO_FAILURE, ARM_FAILURE, CLOCK_FAILURE = 0.0, 1.0, 2.0
RANK_FLAGS = ("busy",)  # flags of the telemetry that other ranks cause
HOST = "127.0.0.1"
TARGET = "experiments.run.ranks:serve"
GRACE_SECONDS = 2.0  # time for other ranks to fail after the first, which may not be the cause


class FailedElsewhere(RuntimeError):
    """An arm or a clock failed on another rank, for any reason but a lack of memory."""


class ProcessSync(RankSync):
    """The synchronisation of one of several processes that measure a cell together.

    Attributes:
        peers: communication of the ranks.
        local_failure: exception of a phase on this rank in the present sample; None without one.
        remote_failures: exceptions that `share` returned for failures on other ranks, by arm.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers, self.rank = peers, peers.rank
        self.local_failure: Exception | None = None
        self.remote_failures: dict[str, Exception] = {}

    def phases(self, key: str, phases: Mapping[str, Phase]) -> Mapping[str, Phase]:
        """Return wrapped phases, which record their exception in `local_failure`.

        After a failure of the arm on another rank they raise the exception in `remote_failures`.
        """

        def run_phase(phase: Phase, batch: int) -> object:
            if key in self.remote_failures:
                raise self.remote_failures[key]
            try:
                return phase(batch)
            except Exception as error:
                self.local_failure = error
                raise

        return {name: partial(run_phase, phase) for name, phase in phases.items()}

    def clock(self, clock: Clock) -> Clock:
        return RankClock(clock, self)

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        return SharedTelemetry(telemetry, self.peers)

    def sum_over_ranks(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        if not counters:
            return counters
        by_rank = self.peers.gather([float(value) for value in counters.values()])
        return {
            name: int(sum(values))
            for name, values in zip(counters, zip(*by_rank, strict=True), strict=True)
        }

    def exchange(self, value: Any) -> list[Any]:
        return self.peers.exchange(value)

    def share_failures(self, outcomes: Mapping[str, Outcome]) -> None:
        """Set each outcome that is "ok" here, but failed on other ranks, to the first failure.

        All ranks must pass the same arms.
        """
        by_rank = self.peers.exchange(
            {key: (outcome.status, outcome.reason) for key, outcome in outcomes.items()}
        )
        for key, outcome in outcomes.items():
            failures = [
                (rank, *ends[key]) for rank, ends in enumerate(by_rank) if ends[key][0] != "ok"
            ]
            if failures and outcome.status == "ok":
                rank, outcome.status, reason = failures[0]
                outcome.reason = f"rank {rank}: {reason}"

    def share(self, error: Exception | None) -> Exception:
        """Return the error to raise here after a failure on any rank.

        That is `error`, the failure of this rank, unless it is None. Then it is made from that of
        the lowest rank with one: a MemoryError for a lack of memory, else a FailedElsewhere. All
        ranks must call it, at least one of them with an error.
        """
        description = error and (f"{type(error).__name__}: {error}", is_out_of_memory(error))
        by_rank = self.peers.exchange(description)
        if error is not None:
            return error
        rank, (message, is_memory) = next(
            (rank, entry) for rank, entry in enumerate(by_rank) if entry
        )
        error_type = MemoryError if is_memory else FailedElsewhere
        return error_type(f"rank {rank}: {message}")


class RankClock(Clock):
    """A clock that starts every sample on all ranks together and reads the slowest rank's time.

    Attributes:
        inner: clock of this rank.
        sync: synchronisation of the ranks.
    """

    def __init__(self, clock: Clock, sync: ProcessSync) -> None:
        self.inner, self.sync, self.mode = clock, sync, clock.mode
        self.min_sample_seconds = clock.min_sample_seconds

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        """Take the samples one by one, each on all ranks at once. A collective."""
        return [self._sample(task) for task in tasks]

    def _sample(self, task: SampleTask) -> Reading:
        """Take a sample on all ranks at once; return the maximum over the ranks of each time.

        Every rank makes the same collectives, whatever happened on it, because otherwise the ranks
        would wait for each other forever: a barrier, a gather of times and failures, and after a
        failure on any rank one exchange of errors. If a clock fails, all ranks raise; if an arm
        fails on a rank, it leaves the race on all ranks.
        """
        sync, clock_error = self.sync, None
        sync.local_failure = None
        sync.peers.barrier()
        try:
            (reading,) = self.inner.read([task])
        except Exception as error:
            reading, clock_error = Reading(0.0, 0.0, 0.0), error
        failure = clock_error or sync.local_failure  # the race has already caught the latter
        failure_source = NO_FAILURE
        if failure is not None:
            # A broken GPU may fail a call, which the race catches, and then the clock.
            failure_source = ARM_FAILURE if failure is sync.local_failure else CLOCK_FAILURE
        by_rank = sync.peers.gather(
            [reading.seconds, reading.wall_s, reading.cost_s, reading.is_exposed, failure_source]
        )
        seconds, wall_s, cost_s, is_exposed, failure_source = (
            max(values) for values in zip(*by_rank, strict=True)
        )
        if failure_source:
            shared_error = sync.share(failure)
            if clock_error or failure_source == CLOCK_FAILURE:
                raise shared_error
            if failure is None:
                sync.remote_failures[task.key.partition("/")[0]] = shared_error
                task.call()  # `run_phase` of `phases` raises `shared_error`; the race catches it
        return Reading(seconds, wall_s, cost_s, bool(is_exposed))

    def adapt(self, phase: Phase, num_batches: int) -> Phase:
        """Adapt the phase by the wrapped clock. A collective: it raises if any rank fails."""
        adapted, error = phase, None
        try:
            adapted = self.inner.adapt(phase, num_batches)
        except Exception as clock_error:
            error = clock_error
        self.sync.local_failure = None
        if any(has_failed for (has_failed,) in self.sync.peers.gather([float(error is not None)])):
            raise self.sync.share(error)
        return adapted


class SharedTelemetry(Telemetry):
    """Telemetry of one rank; `check` is about all ranks, which repeat a round if one was slowed."""

    def __init__(self, telemetry: Telemetry, peers: Peers) -> None:
        self.inner, self.peers = telemetry, peers

    def start(self) -> None:
        self.inner.start()

    def stop(self) -> None:
        self.inner.stop()

    def summary(self) -> dict[str, Any]:
        return self.inner.summary()

    def check(self) -> list[str]:
        reasons = self.inner.check()
        by_rank = self.peers.gather([len(reasons)])
        return reasons or [f"rank {rank}" for rank, (count,) in enumerate(by_rank) if count]

    def flags(self) -> list[str]:
        """Return the flags of this rank, except flags that the other ranks cause."""
        return [flag for flag in self.inner.flags() if flag not in RANK_FLAGS]


class Peers:
    """The communication of the ranks, by gloo on the host, so that a GPU has no work for it.

    Every method is a collective: all ranks must call it, and it returns once they have.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """Wait on the host for all ranks, not for the device."""
        self.gather([0.0])

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, by rank; all ranks must pass the same number of them."""
        local_values = torch.tensor(values, dtype=torch.float64, device="cpu")
        by_rank = [torch.empty_like(local_values) for _ in range(self.size)]
        dist.all_gather(by_rank, local_values)
        return [tensor.tolist() for tensor in by_rank]

    def exchange(self, value: Any) -> list[Any]:
        """Return the object of every rank, which must be picklable, by rank."""
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, value)
        return by_rank


# The process of one rank


def serve(pipe: Connection, request: MeasureRequest, rank: int, port: int) -> None:
    """Measure a cell as one rank, in a process of its own; send its records, or [] if not rank 0.

    Args:
        pipe: pipe to the parent.
        request: cell to measure.
        rank: number of this rank.
        port: port of the store of the ranks on this machine.
    """
    config, device = request.session.config, request.session.device
    size = config.device.ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    note("|starting")
    num_cores = _restrict_to_cores(rank, size) if device.type == "cpu" else os.cpu_count() or 1
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(config.device.threads or max(1, num_cores // size))
    memory.keep_freed_blocks()
    timeout = datetime.timedelta(seconds=config.timing.limit_seconds or 1e6)
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        sync = ProcessSync(Peers())
        session = dataclasses.replace(request.session, device=device, note=note, sync=sync)
        records = kinds.find(request.cell.kind).measure(request.cell, session, request.seconds)
    finally:
        dist.destroy_process_group()
    pipe.send(records if rank == 0 else [])


def _restrict_to_cores(rank: int, size: int) -> int:
    """Restrict this rank to its share of consecutive cores, if there is at least one per rank.

    Return the number of cores of all ranks together.
    """
    cores = usable_cores()
    if len(cores) >= size and hasattr(os, "sched_setaffinity"):
        rank_cores = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
        os.sched_setaffinity(0, rank_cores)
    return len(cores)


# The process that starts the ranks


class RankProcesses:
    """The child processes of all ranks; the constructor starts them.

    As a context manager it ends them. `receive` and `note` are used like those of a `Child`.

    Args:
        request: cell to measure; `device.ranks` of its session is the number of processes.
        limits: limits of each process, except that the bytes are for all ranks together.

    Attributes:
        children: process of each rank.
        note: last note of the rank whose failure ended the cell; "" before.
    """

    def __init__(self, request: MeasureRequest, limits: Limits) -> None:
        size = request.session.config.device.ranks
        memory_bytes = limits.memory_bytes and limits.memory_bytes // size
        limits = dataclasses.replace(limits, memory_bytes=memory_bytes)
        # The store is in this process, so that no rank's death ends it; the system chooses a port.
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.children = [
            Child(TARGET, (request, rank, self._store.port), limits=limits) for rank in range(size)
        ]
        self.note = ""

    def receive(self, watch: Callable[[str], object] | None = None) -> list[Record]:
        """Return the records of rank 0, once all ranks are done; `watch` is called with its notes.

        Raises:
            ChildDied: a rank died or failed, and all ranks were killed. `note` is then that rank's
                note, because ranks may measure different arms. `answered` is False.
        """
        failed_ranks: list[int] = []  # ranks in the order in which they failed
        with ThreadPoolExecutor(len(self.children)) as pool:
            answers = [
                pool.submit(self._receive, rank, None if rank else watch, failed_ranks)
                for rank in range(len(self.children))
            ]
            try:
                wait(answers, return_when="FIRST_EXCEPTION")
                if failed_ranks:
                    # A rank may notice a lost connection before the death that caused it.
                    wait(answers, GRACE_SECONDS)
                    failed_ranks = list(failed_ranks)  # a copy, without ranks that are killed next
                    self._kill()
            except BaseException:  # Ctrl-C: the pool's threads end only when the children do
                self._kill()
                raise
        if not failed_ranks:
            return answers[0].result()
        deaths = {rank: answers[rank].exception() for rank in failed_ranks}
        # A process that died without a message is more likely the cause than one that raised.
        dead_ranks = [
            rank
            for rank, death in deaths.items()
            if isinstance(death, ChildDied) and not death.answered
        ]
        rank = (dead_ranks or failed_ranks)[0]
        self.note = self.children[rank].note
        death = deaths[rank]
        status = death.status if isinstance(death, ChildDied) else "error"
        raise ChildDied(status, f"rank {rank}: {death}") from death

    def _kill(self) -> None:
        for child in self.children:
            child.kill()

    def _receive(
        self, rank: int, watch: Callable[[str], object] | None, failed_ranks: list[int]
    ) -> list[Record]:
        try:
            records: list[Record] = self.children[rank].receive(watch)
        except BaseException:
            failed_ranks.append(rank)
            raise
        return records

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.__exit__(*error)
