"""Rank failures: name the ranks at fault when a collective fails, and start under torchrun.

If a process dies, the error of the failed collective names at most an address. Inside
`detect_rank_failures(ranks)` every rank writes heartbeats to the store of its process group, by
default once a second, and its error if it fails itself. When a collective fails, the remaining
ranks read the store and raise a `RankFailure` that names the ranks at fault. Nothing is recovered
in place: a process group is lost with any of its members. `torchrun --max-restarts` starts all
ranks again, and the job continues from its last checkpoint.

`init_distributed()` makes the process group of a training script that torchrun has started, for the
first time or after a failure.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from emblib.sharding.ranks import RankGroup

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_MAX_STATE_CHARACTERS = 2000  # of an error that other ranks quote
# Exit states of a rank in the store. A rank ends with _GAVE_UP after another rank's failure, with
# _DONE without an error, and with _FAILED after an error of its own, whose text follows.
_GAVE_UP, _DONE, _FAILED = "gave up", "done", "failed"
# Errors of gloo and NCCL are plain RuntimeErrors.
_COLLECTIVE_ERROR = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|pair closure|broken pipe|socket|"
    r"process group|ProcessGroup",
    re.IGNORECASE,
)
# Number of blocks that were entered per group, by name; the same on every rank.
_num_blocks: Counter[str] = Counter()


class RankFailure(RuntimeError):
    """A collective failed, and `ranks` are the numbers of the ranks at fault.

    `ranks` is empty if another process is at fault, such as torchrun, which serves the store.

    Example:
        >>> error = emblib.sharding.RankFailure("rank 3 sent no heartbeat for 10 s", ranks=(3,))
        >>> error.ranks
        (3,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> Any:
        return RankFailure, (str(self), self.ranks)


class detect_rank_failures:
    """Name the ranks at fault if a collective fails: `with detect_rank_failures(ranks): train()`.

    The error of the collective is then the cause of a `RankFailure`. If no rank is at fault, the
    error propagates with a note that says so.

    All ranks enter the block, equally often but not necessarily at the same time, and stay in it
    for as long as they use collectives: it contains the training loop. If a rank sends no
    heartbeats while no collective has failed, this is only logged: a process may be stopped, a
    network may be down, or NCCL waits for its own timeout. An error of this rank itself propagates
    unchanged. The `RankFailure` of the other ranks quotes it, unless the store ends with this
    process: without torchrun the process with rank 0 has the store. For one rank alone the block
    does nothing.

    Args:
        ranks: the processes.
        heartbeat_interval_s: seconds between two heartbeats.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as dead, and for
            which a rank whose collective has failed waits to find the ranks at fault. A rank on
            this machine whose process has ended counts as dead immediately.

    Raises:
        ValueError: the timeout is shorter than two intervals, or the interval is not above 0.
        RankFailure: a collective failed, and other ranks are at fault; or, when the block begins,
            the store cannot be reached.

    Example:
        >>> with emblib.sharding.detect_rank_failures(emblib.sharding.RankGroup.single()):
        ...     pass  # train here
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        if not 0 < 2 * heartbeat_interval_s <= heartbeat_timeout_s:
            raise ValueError(
                "heartbeat_timeout_s must be at least two heartbeat intervals, got "
                f"{heartbeat_timeout_s} s and intervals of {heartbeat_interval_s} s"
            )
        self._ranks, self._interval_s, self._timeout_s = (
            ranks,
            heartbeat_interval_s,
            heartbeat_timeout_s,
        )
        self._board: _StatusBoard | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> detect_rank_failures:
        if self._ranks.size > 1:
            group = self._ranks.group
            assert group is not None
            number = _num_blocks[group.group_name]
            _num_blocks[group.group_name] += 1
            name = f"emblib/guard/{group.group_name}/{number}"
            try:
                self._board = _StatusBoard(self._ranks, name)
                self._board.register()
            except dist.DistError as error:
                self._board = None
                raise _without_store(error, self._ranks) from error
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, args=(name,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._board is None:
            return
        try:
            if error is None:
                self._board.write_exit_state(_DONE)
            elif isinstance(error, RankFailure):
                self._board.write_exit_state(_GAVE_UP)
            elif not is_collective_error(error):
                state = f"{_FAILED} with {type(error).__name__}: {error}"
                self._board.write_exit_state(state[:_MAX_STATE_CHARACTERS])
            else:
                failure = self._board.find_failure(self._timeout_s)
                self._board.write_exit_state(_GAVE_UP)
                if failure is not None:
                    # Log it now: torchrun may end this process before its traceback is printed.
                    _LOG.error("%s", failure)
                self._board.wait_for_readers(self._timeout_s)
                if failure is not None:
                    raise failure from error
                error.add_note(
                    "no rank is at fault by itself: the network failed, or the ranks do not call "
                    "the same collectives in the same order"
                )
        finally:
            self._end()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            # A thread that returns from the store while the interpreter ends would abort it.
            self._thread.join(self._timeout_s)
        self._board = self._thread = None

    def _watch(self, name: str) -> None:
        """Write heartbeats and watch those of the next rank, in a thread."""
        # The thread has its own connection: a shared one would make it wait for other threads.
        board = _StatusBoard(self._ranks, name)
        watched = (self._ranks.rank + 1) % self._ranks.size
        last_beat, last_change_s = b"", time.monotonic()
        with suppress(Exception):  # without the store the collectives fail too
            while not self._stop.wait(self._interval_s):
                board.beat()
                beat, now_s = board.beat_of(watched), time.monotonic()
                if beat != last_beat:
                    last_beat, last_change_s = beat, now_s
                elif (
                    beat and now_s - last_change_s > self._timeout_s and watched != self._ranks.rank
                ):
                    if not board.exit_state(watched):
                        _LOG.error(
                            "%s has written no heartbeat for %.0f s",
                            board.name_of(watched),
                            now_s - last_change_s,
                        )
                    # The ranks of a node fail together: report them all, one after another.
                    watched, last_beat, last_change_s = (watched + 1) % self._ranks.size, b"", now_s


def is_collective_error(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is that of a failed collective.

    It is a `DistError`, or a RuntimeError whose message `_COLLECTIVE_ERROR` matches.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and _COLLECTIVE_ERROR.search(str(error)):
            return True
        error = error.__cause__
    return False


class _StatusBoard:
    """The heartbeats and exit states that ranks share through the store of a process group.

    Each object has its own connection to the store, and is used by one thread. Methods raise
    `DistError` if the store cannot be reached, unless they say otherwise.

    Args:
        ranks: the processes.
        name: prefix of the keys, the same on all ranks and different for every block.
    """

    def __init__(self, ranks: RankGroup, name: str) -> None:
        assert ranks.group is not None
        self._ranks = ranks
        store: Any = ranks.group.get_group_store()
        self._store = dist.PrefixStore(name, store.clone())
        self._num_beats = 0

    def register(self) -> None:
        """Write the machine and the process of this rank."""
        self._store.set(f"who/{self._ranks.rank}", f"{_machine()}\n{os.getpid()}")
        self.beat()

    def beat(self) -> None:
        """Write a heartbeat."""
        self._num_beats += 1
        self._store.set(f"beat/{self._ranks.rank}", f"{self._num_beats}/{time.monotonic_ns()}")

    def write_exit_state(self, state: str) -> None:
        """Write how the block ended on this rank, if the store can still be reached."""
        with suppress(Exception):
            self._store.set(f"end/{self._ranks.rank}", state)

    def beat_of(self, rank: int) -> bytes:
        """Return the last heartbeat of a rank; empty before the first."""
        return self._get(f"beat/{rank}")

    def exit_state(self, rank: int) -> str:
        """Return how the block ended on a rank; empty before that."""
        return self._get(f"end/{rank}").decode(errors="replace")

    def name_of(self, rank: int) -> str:
        """Return the number of a rank and where it runs."""
        machine, _, pid = self._get(f"who/{rank}").decode().partition("\n")
        process = f" (process {pid} on {machine.split()[0]})" if pid else ""
        return f"rank {rank} of {self._ranks.size}{process}"

    def find_failure(self, timeout_s: float) -> RankFailure | None:
        """Return the error that names the ranks at fault; None if all ranks called the collective.

        Writes that this rank called the collective, which failed, and waits up to `timeout_s`
        seconds for the other ranks. Raises nothing: if the store cannot be reached, the process
        that serves it is at fault.
        """
        try:
            self._store.set(f"call/{self._ranks.rank}", "here")
            faults = self._faults(timeout_s)
            texts = [f"{self.name_of(rank)} {fault}" for rank, fault in faults.items()]
        except Exception as error:
            return _without_store(error, self._ranks)
        if not faults:
            return None
        return RankFailure(
            f"{'; '.join(texts)}. The collectives of all ranks end with it: start the job again "
            "from its last checkpoint (torchrun --max-restarts does)",
            tuple(faults),
        )

    def _faults(self, timeout_s: float) -> dict[int, str]:
        """Return faults by rank: immediately if one is certain, else after `timeout_s` seconds."""
        other_ranks = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        first_beats = {rank: self.beat_of(rank) for rank in other_ranks}
        silent_ranks = other_ranks
        deadline_s = time.monotonic() + timeout_s
        while silent_ranks and time.monotonic() < deadline_s:
            faults = {rank: fault for rank in other_ranks if (fault := self._certain_fault(rank))}
            if faults:
                return faults
            # A rank whose collective has failed too is not at fault.
            silent_ranks = [rank for rank in silent_ranks if not self._get(f"call/{rank}")]
            time.sleep(_POLL_SECONDS)
        faults_of_silent_ranks = {
            rank: f"wrote no heartbeat for {timeout_s:.0f} s"
            if first_beats[rank]
            else "never entered detect_rank_failures"
            for rank in silent_ranks
            if self.beat_of(rank) == first_beats[rank] and self.exit_state(rank) != _DONE
        }
        # A rank that is merely late may be computing, and would have called the collective.
        return faults_of_silent_ranks or {
            rank: "had left detect_rank_failures before the others"
            if self.exit_state(rank) == _DONE
            else "is alive, but did not call the collective that the others waited in"
            for rank in silent_ranks
        }

    def _certain_fault(self, rank: int) -> str:
        """Return the fault of a rank that failed, or whose process on this machine has ended."""
        state = self.exit_state(rank)
        if state:
            return state if state.startswith(_FAILED) else ""
        machine, _, pid = self._get(f"who/{rank}").decode().partition("\n")
        return "died" if machine == _machine() and has_ended(int(pid)) else ""

    def _get(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def wait_for_readers(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until the other ranks have ended, if this process has the store.

        Until then they read the store.
        """
        if _agent_has_store() or self._ranks.global_rank(self._ranks.rank) > 0:
            return
        deadline_s = time.monotonic() + timeout_s
        with suppress(Exception):
            other_ranks = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
            while other_ranks and time.monotonic() < deadline_s:
                time.sleep(_POLL_SECONDS)
                other_ranks = [
                    rank
                    for rank in other_ranks
                    if not self.exit_state(rank) and not self._certain_fault(rank)
                ]


def _without_store(error: Exception, ranks: RankGroup) -> RankFailure:
    """Return the failure of the process that served the store of `ranks`."""
    agent_has_store = _agent_has_store()
    server_name = "torchrun on the first node" if agent_has_store else "rank 0 of all processes"
    return RankFailure(
        f"{server_name}, which serves the store of the process group, cannot be reached "
        f"({type(error).__name__}). Start the job again from its last checkpoint",
        ()
        if agent_has_store
        else tuple(rank for rank in range(ranks.size) if ranks.global_rank(rank) == 0),
    )


def _agent_has_store() -> bool:
    """Return whether torchrun serves the store, rather than the process with rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _machine() -> str:
    """Return a name that two processes share only if they share a process-id namespace."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended, even if it is still a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # the process id belongs to another user now
    with suppress(OSError):
        # The state comes after the name, which is in parentheses and may hold any character.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX"
    return False


_MEET_POLL_SECONDS = 0.02


@contextmanager
def init_distributed(
    backend: str | None = None, *, timeout_seconds: float = 600.0, heartbeat_timeout_s: float = 10.0
) -> Iterator[RankGroup]:
    """Initialize `torch.distributed` for a training script, in a `with` block.

        with init_distributed() as ranks: ...

    Makes the process group of all processes that torchrun started, and destroys it at the end of
    the block, unless the block raised. Inside the block, failed collectives raise as in
    `detect_rank_failures`. Without torchrun the group is this process alone, so that the same
    script runs anywhere. An existing process group is used, and not destroyed.

    If a node has a GPU for each of its ranks, the GPU of this rank becomes the current device, and
    the backend is NCCL for GPUs and gloo for the host. Otherwise the backend is gloo. The ranks
    agree about an unused part of the store (`rendezvous`), because after a restart torchrun may
    pass them the store of the previous attempt, with addresses of processes that have ended.

    Args:
        backend: a backend of `torch.distributed.init_process_group` to use instead; None for these.
        timeout_seconds: limit for each collective, and for the start of all ranks.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as dead.

    Yields:
        The group of all ranks.

    Raises:
        RankFailure: see `detect_rank_failures`.
        TimeoutError: some ranks did not start within `timeout_seconds`.
        ValueError: `heartbeat_timeout_s` is not above 0.

    Example:
        >>> with emblib.sharding.init_distributed() as ranks:  # one process, without torchrun
        ...     print(ranks.rank, ranks.size)
        0 1
    """
    if not heartbeat_timeout_s > 0:
        raise ValueError(f"heartbeat_timeout_s must be above 0, got {heartbeat_timeout_s}")
    makes_group = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if makes_group:
        _init_process_group(backend, timedelta(seconds=timeout_seconds))
    ranks = RankGroup(device=None if dist.is_initialized() else _device_alone())
    interval_s = min(1.0, heartbeat_timeout_s / 5)
    with detect_rank_failures(
        ranks, heartbeat_interval_s=interval_s, heartbeat_timeout_s=heartbeat_timeout_s
    ):
        yield ranks
    # Skipped after a failure: the process ends, and the other ranks may not answer.
    if makes_group:
        dist.destroy_process_group()
        _wait_for_gloo_threads()


def _wait_for_gloo_threads(timeout_s: float = 2.0) -> None:
    """Wait up to `timeout_s` until gloo's threads have released the tensors of collectives.

    Does nothing outside of Linux.

    The threads outlive the process group while anything refers to it. A thread that releases the
    last reference to a tensor while the interpreter ends aborts the process ("terminate called
    without an active exception"), and torchrun would restart a job that has finished.
    """
    deadline_s, last_states = time.monotonic() + timeout_s, None
    while (threads := _gloo_threads()) and time.monotonic() < deadline_s:
        if threads == last_states and all(state == "S" for state, _ in threads.values()):
            return  # no thread has run since the last look, so none waits for the interpreter
        last_states = threads
        time.sleep(_MEET_POLL_SECONDS / 4)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return state and number of voluntary context switches of gloo's threads, by thread id."""
    threads = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has just ended
            fields = dict(re.findall(r"^(\w+):\s*(\S*)", path.read_text(), re.MULTILINE))
            if fields["Name"].startswith("pt_gloo"):
                threads[path.parent.name] = (fields["State"], fields["voluntary_ctxt_switches"])
    return threads


def _device_alone() -> torch.device:
    """Return the device of a process without a process group."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _init_process_group(backend: str | None, timeout: timedelta) -> None:
    """Initialize torch.distributed from the environment that torchrun sets."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    uses_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if uses_gpus else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        if "timed out" not in str(error).lower():
            raise
        raise _timeout_error("rank 0, or another rank, has not started", timeout) from error
    store.set_timeout(timeout)
    store = rendezvous(store, rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def rendezvous(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return an unused part of `store` for the `size` processes that call this together.

    Rank 0 opens a round with a new number. Each other rank joins the newest round that it sees,
    under a unique name, until it finds the name among the members of the round, because a round
    of a previous attempt has the names of processes that have ended.

    Args:
        store: the store of all processes.
        rank: number of this process.
        size: number of processes.
        timeout: limit for the wait.

    Raises:
        TimeoutError: some ranks did not call this within `timeout`.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    meeting = dist.PrefixStore("emblib/meeting", store)
    if rank == 0:
        round_number = str(meeting.add("rounds", 1))
        meeting.set("newest", round_number)
        name_by_rank: dict[str, str] = {}
        while len(name_by_rank) < size - 1:
            for member in map(str, range(1, size)):
                if member not in name_by_rank and meeting.check([f"{round_number}/{member}"]):
                    name_by_rank[member] = meeting.get(f"{round_number}/{member}").decode()
            missing_ranks = [
                rank_number
                for rank_number in range(1, size)
                if str(rank_number) not in name_by_rank
            ]
            _check_time(deadline_s, f"ranks {missing_ranks} of {size} have not started", timeout)
        meeting.set(f"{round_number}/members", json.dumps(name_by_rank))
        return dist.PrefixStore(f"emblib/round/{round_number}", store)
    name, round_number = uuid.uuid4().hex, ""
    while True:
        newest = meeting.get("newest").decode() if meeting.check(["newest"]) else ""
        if newest != round_number:
            round_number = newest
            meeting.set(f"{round_number}/{rank}", name)
        if round_number and meeting.check([f"{round_number}/members"]):
            name_by_rank = json.loads(meeting.get(f"{round_number}/members"))
            if name_by_rank.get(str(rank)) == name:  # a round of a smaller attempt lacks the rank
                return dist.PrefixStore(f"emblib/round/{round_number}", store)
        _check_time(deadline_s, "rank 0, or another rank, has not started", timeout)


def _check_time(deadline_s: float, problem: str, timeout: timedelta) -> None:
    if time.monotonic() > deadline_s:
        raise _timeout_error(problem, timeout)
    time.sleep(_MEET_POLL_SECONDS)


def _timeout_error(problem: str, timeout: timedelta) -> TimeoutError:
    return TimeoutError(
        f"{problem} within {timeout.total_seconds():.0f} s: look at the output of these "
        "processes, or give a larger timeout_seconds"
    )
