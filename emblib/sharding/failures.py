"""A rank that dies: the others say which one it was, and end, so that the job starts again.

A collective that fails because a process is gone names at most an address. Inside
`detect_rank_failures(ranks)` every rank gives a sign of life once a second
through the store of its process group, and leaves its last words there when it
fails itself. When a collective fails, those who are left read them, and
what they raise is a `RankFailure` that names the ranks at fault. Nothing is recovered in place: the
process group is lost with a member. `torchrun --max-restarts` starts all ranks again, and the job
goes on from its last checkpoint.
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
_LOOK_SECONDS = 0.05
_GAVE_UP, _DONE, _FAILED = "gave up", "done", "failed"
# Of gloo and NCCL: their errors come as plain RuntimeErrors.
_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|pair closure|broken pipe|socket|"
    r"process group|ProcessGroup",
    re.IGNORECASE,
)
_blocks: Counter[str] = Counter()  # guarded blocks of each group so far, the same on every rank


class RankFailure(RuntimeError):
    """Ranks died, failed or fell silent; `ranks` are their numbers."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> Any:
        return RankFailure, (str(self), self.ranks)


class detect_rank_failures:
    """Raise `RankFailure` where a collective fails: `with detect_rank_failures(ranks): train()`.

    All ranks enter it, each at its own time, and stay for as long as they use collectives: around
    the training loop, not in it. A rank that gives no sign of life for `heartbeat_timeout_s` counts
    as dead; one on this machine whose process is gone does at once. Where it is noticed while no
    collective has failed (a stopped process, a network that is down, NCCL, which waits for its
    timeout), it is logged.

    An error of this rank itself passes unchanged, and the others' `RankFailure` quotes it.
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
                "heartbeat_timeout_s must be at least two beats: got "
                f"{heartbeat_timeout_s} and beats of {heartbeat_interval_s} s"
            )
        self._ranks, self._beat, self._patience = ranks, heartbeat_interval_s, heartbeat_timeout_s
        self._roll: _Roll | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> detect_rank_failures:
        if self._ranks.size > 1:
            group = self._ranks.group
            assert group is not None
            number = _blocks[group.group_name]
            _blocks[group.group_name] += 1
            name = f"emblib/guard/{group.group_name}/{number}"
            try:
                self._roll = _Roll(self._ranks, name)
                self._roll.enter()
            except dist.DistError as error:
                self._roll = None
                raise _without_store(error) from error
            self._stop.clear()
            self._thread = threading.Thread(target=self._live, args=(name,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._roll is None:
            return
        try:
            if error is None:
                self._roll.leave(_DONE)
            elif isinstance(error, RankFailure):
                self._roll.leave(_GAVE_UP)
            elif not is_of_a_collective(error):
                self._roll.leave(f"{_FAILED} with {type(error).__name__}: {error}"[:2000])
            else:
                failure = self._roll.call(self._patience)
                self._roll.leave(_GAVE_UP)
                if failure is not None:
                    # At once: torchrun may end this process before its traceback is printed.
                    _LOG.error("%s", failure)
                self._roll.linger(self._patience)
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
            # One that comes back from the store while the interpreter ends would abort it.
            self._thread.join(self._patience)
        self._roll = self._thread = None

    def _live(self, name: str) -> None:
        """The thread: give signs of life, and watch the next rank."""
        # A store answers one question at a time, and others may wait for theirs.
        roll = _Roll(self._ranks, name)
        watched = (self._ranks.rank + 1) % self._ranks.size
        seen, since = b"", time.monotonic()
        with suppress(Exception):  # the store is gone: the collectives will tell
            while not self._stop.wait(self._beat):
                roll.beat()
                beat, now = roll.beat_of(watched), time.monotonic()
                if beat != seen:
                    seen, since = beat, now
                elif beat and now - since > self._patience and watched != self._ranks.rank:
                    if not roll.last_words(watched):
                        _LOG.error(
                            "%s has given no sign of life for %.0f s",
                            roll.name_of(watched),
                            now - since,
                        )
                    # With a node its ranks go together: who watches the first asks for the next.
                    watched, seen, since = (watched + 1) % self._ranks.size, b"", now


def is_of_a_collective(error: BaseException | None) -> bool:
    """Whether it says that ranks could not reach each other; causes count."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and _OF_A_COLLECTIVE.search(str(error)):
            return True
        error = error.__cause__
    return False


class _Roll:
    """What the ranks tell each other through the store."""

    def __init__(self, ranks: RankGroup, name: str) -> None:
        assert ranks.group is not None
        self._ranks = ranks
        store: Any = ranks.group.get_group_store()
        self._store = dist.PrefixStore(name, store.clone())
        self._beats = 0

    def enter(self) -> None:
        """Say who and where this rank is."""
        self._store.set(f"who/{self._ranks.rank}", f"{_machine()}\n{os.getpid()}")
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        self._beats += 1
        self._store.set(f"beat/{self._ranks.rank}", f"{self._beats}/{time.monotonic_ns()}")

    def leave(self, word: str) -> None:
        """Say how the block ended here, if anybody can still hear it."""
        with suppress(Exception):
            self._store.set(f"end/{self._ranks.rank}", word)

    def beat_of(self, rank: int) -> bytes:
        """The last sign of life; empty before the first."""
        return self._get(f"beat/{rank}")

    def last_words(self, rank: int) -> str:
        """How the block ended there; empty while it has not."""
        return self._get(f"end/{rank}").decode(errors="replace")

    def name_of(self, rank: int) -> str:
        """Its number, and where it ran."""
        machine, _, pid = self._get(f"who/{rank}").decode().partition("\n")
        where = f" (process {pid} on {machine.split()[0]})" if pid else ""
        return f"rank {rank} of {self._ranks.size}{where}"

    def call(self, patience: float) -> RankFailure | None:
        """Who is at fault for a collective that failed; None if all ranks were in it."""
        try:
            self._store.set(f"call/{self._ranks.rank}", "here")
            faults = self._faults(patience)
        except Exception as error:
            return _without_store(error)
        if not faults:
            return None
        told = "; ".join(f"{self.name_of(rank)} {fault}" for rank, fault in faults.items())
        return RankFailure(
            f"{told}. The collectives of all ranks end with it: start the job again from its last "
            "checkpoint (torchrun --max-restarts does)",
            tuple(faults),
        )

    def _faults(self, patience: float) -> dict[int, str]:
        """By rank: at once where one is certain, else after `patience` seconds."""
        others = [r for r in range(self._ranks.size) if r != self._ranks.rank]
        first = {rank: self.beat_of(rank) for rank in others}
        missing = others
        end = time.monotonic() + patience
        while missing and time.monotonic() < end:
            faults = {rank: fault for rank in others if (fault := self._certain_fault(rank))}
            if faults:
                return faults
            # For those whose collective has failed as well it is another's fault.
            missing = [r for r in missing if not self._get(f"call/{r}")]
            time.sleep(_LOOK_SECONDS)
        silent = {
            rank: f"gave no sign of life for {patience:.0f} s"
            if first[rank]
            else "never came to the guarded block"
            for rank in missing
            if self.beat_of(rank) == first[rank] and self.last_words(rank) != _DONE
        }
        # Who is merely late may be computing, and would have come.
        return silent or {
            rank: "had left the guarded block before the others"
            if self.last_words(rank) == _DONE
            else "is alive, but did not come to the collective that the others waited in"
            for rank in missing
        }

    def _certain_fault(self, rank: int) -> str:
        """Of a rank that failed by itself, or whose process has ended on this machine."""
        word = self.last_words(rank)
        if word:
            return word if word.startswith(_FAILED) else ""
        machine, _, pid = self._get(f"who/{rank}").decode().partition("\n")
        return "died" if machine == _machine() and is_gone(int(pid)) else ""

    def _get(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def linger(self, patience: float) -> None:
        """Where the store is in this process, let the others read it first."""
        if self._ranks.rank > 0 or _agent_has_store():
            return
        end = time.monotonic() + patience
        with suppress(Exception):
            others = list(range(1, self._ranks.size))
            while others and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
                others = [
                    r for r in others if not self.last_words(r) and not self._certain_fault(r)
                ]


def _without_store(error: Exception) -> RankFailure:
    """The store went with the process that held it."""
    agent = _agent_has_store()
    holder = "torchrun on the first node" if agent else "rank 0"
    return RankFailure(
        f"{holder}, which holds the store of the process group, cannot be reached "
        f"({type(error).__name__}). Start the job again from its last checkpoint",
        () if agent else (0,),
    )


def _agent_has_store() -> bool:
    """Whether it is torchrun's own, or that of the process with rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _machine() -> str:
    """The same for processes whose numbers mean the same."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended; its parent may not have asked yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # somebody else's now
    with suppress(OSError):
        # The state comes after the name, which is in parentheses and may hold any character.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX"
    return False


_LOOK_SECONDS_launched = 0.02


@contextmanager
def init_distributed(
    backend: str | None = None, *, timeout_seconds: float = 600.0, heartbeat_timeout_s: float = 10.0
) -> Iterator[RankGroup]:
    """`with init_distributed() as ranks:` what a training script does under torchrun.

    Makes the process group of all processes and ends it; inside, failing
    collectives raise as in `detect_rank_failures`. Without torchrun
    it is this process alone, so that the same script runs anywhere. A process group that
    is there already is used, and stays.

    Over NCCL for GPUs and gloo for the host where every rank of a node has a GPU, which becomes the
    current device; over gloo otherwise. After a restart the ranks meet anew: torchrun may hand them
    the store of the attempt before, with addresses in it that nobody listens at any more.

    Args:
        backend: another one, as `torch.distributed.init_process_group` has them.
        timeout_seconds: for a collective, and for all ranks to come.
        heartbeat_timeout_s: without a sign of life for so long, a rank counts as dead.
    """
    own = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if own:
        _join(backend, timedelta(seconds=timeout_seconds))
    ranks = RankGroup(device=None if dist.is_initialized() else _device_alone())
    beat = min(1.0, heartbeat_timeout_s / 5)
    with detect_rank_failures(
        ranks, heartbeat_interval_s=beat, heartbeat_timeout_s=heartbeat_timeout_s
    ):
        yield ranks
    # After a failure the process ends, and waiting for the others would be in vain.
    if own:
        dist.destroy_process_group()
        _let_gloo_rest()


def _let_gloo_rest(seconds: float = 2.0) -> None:
    """Return when gloo's threads have dropped what they held of the last collectives, on Linux.

    They outlive the group while anything refers to it. One that drops the last reference to a
    tensor while the interpreter ends aborts the process ("terminate called without an active
    exception"), and torchrun would start a job again that is done.
    """
    end, seen = time.monotonic() + seconds, None
    while (found := _gloo_threads()) and time.monotonic() < end:
        if found == seen and all(state == "S" for state, _ in found.values()):
            return  # slept all the while: one that waited for the interpreter's lock had it
        seen = found
        time.sleep(_LOOK_SECONDS_launched / 4)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """By number: whether it runs or sleeps, and how often it has fallen asleep."""
    found = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it has just ended
            facts = dict(re.findall(r"^(\w+):\s*(\S*)", path.read_text(), re.MULTILINE))
            if facts["Name"].startswith("pt_gloo"):
                found[path.parent.name] = facts["State"], facts["voluntary_ctxt_switches"]
    return found


def _device_alone() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _join(backend: str | None, timeout: timedelta) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = meet(store, rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A part of `store` that only the processes who call this now have used.

    Rank 0 opens a round of a number that none had before. The others answer the newest round that
    they see, each with a name that no other process has, until they find it among the members: a
    round of an attempt before has the names of processes that are gone.
    """
    end = time.monotonic() + timeout.total_seconds()
    place = dist.PrefixStore("emblib/meeting", store)
    if rank == 0:
        number = str(place.add("rounds", 1))
        place.set("newest", number)
        members: dict[str, str] = {}
        while len(members) < size - 1:
            for r in range(1, size):
                if str(r) not in members and place.check([f"{number}/{r}"]):
                    members[str(r)] = place.get(f"{number}/{r}").decode()
            missing = [r for r in range(1, size) if str(r) not in members]
            _check_time(end, f"ranks {missing} of {size} have not come", timeout)
        place.set(f"{number}/members", json.dumps(members))
        return dist.PrefixStore(f"emblib/round/{number}", store)
    name, number = uuid.uuid4().hex, ""
    while True:
        newest = place.get("newest").decode() if place.check(["newest"]) else ""
        if newest != number:
            number = newest
            place.set(f"{number}/{rank}", name)
        if number and place.check([f"{number}/members"]):
            members = json.loads(place.get(f"{number}/members"))
            if members[str(rank)] == name:
                return dist.PrefixStore(f"emblib/round/{number}", store)
        _check_time(end, "rank 0 has not come, or not all others have", timeout)


def _check_time(end: float, problem: str, timeout: timedelta) -> None:
    if time.monotonic() > end:
        raise TimeoutError(
            f"{problem} within {timeout.total_seconds():.0f} s of the start: see what they said, "
            "or give a larger timeout_seconds"
        )
    time.sleep(_LOOK_SECONDS_launched)
