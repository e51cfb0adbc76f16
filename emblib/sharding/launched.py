"""Ranks that torchrun has started, the first time and after a failure."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from emblib.sharding.groups_of_ranks import Ranks

_LOOK_SECONDS = 0.02


@contextmanager
def launched(
    backend: str | None = None, *, timeout_seconds: float = 600.0, patience_seconds: float = 10.0
) -> Iterator[Ranks]:
    """`with launched() as ranks:` what a training script does under torchrun.

    Makes the process group of all processes and ends it; inside, collectives are `guarded`. Without
    torchrun it is this process alone, so that the same script runs anywhere. A process group that
    is there already is used, and stays.

    Over NCCL for GPUs and gloo for the host where every rank of a node has a GPU, which becomes the
    current device; over gloo otherwise. After a restart the ranks meet anew: torchrun may hand them
    the store of the attempt before, with addresses in it that nobody listens at any more.

    Args:
        backend: another one, as `torch.distributed.init_process_group` has them.
        timeout_seconds: for a collective, and for all ranks to come.
        patience_seconds: without a sign of life for so long, a rank counts as dead.
    """
    from emblib.sharding.failures import guarded

    own = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if own:
        _join(backend, timedelta(seconds=timeout_seconds))
    ranks = Ranks(device=None if dist.is_initialized() else _device_alone())
    beat = min(1.0, patience_seconds / 5)
    with guarded(ranks, beat_seconds=beat, patience_seconds=patience_seconds):
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
        time.sleep(_LOOK_SECONDS / 4)


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
    time.sleep(_LOOK_SECONDS)
