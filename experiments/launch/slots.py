"""Processors to be alone on: one job per GPU, or on the CPU at a time, whoever started them.

A launcher starts jobs side by side and knows nothing of GPUs; two jobs that share a processor would
measure each other. Each job therefore holds a file lock per processor while it runs. The kernel
gives the lock back when a job ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WAIT_SECONDS = 0.5
GPUS = "EMBLIB_GPUS"  # devices that jobs may use, where the launcher changes CUDA_VISIBLE_DEVICES


class NotEnough(ValueError):
    """A job asks for more processors than there are."""


@dataclass(frozen=True)
class Slot:
    """One processor."""

    name: str  # of its lock: the same for everybody on this machine
    visible: str = ""  # its entry in CUDA_VISIBLE_DEVICES


CPU = Slot("cpu")


def gpus() -> list[Slot]:
    """The GPUs that this process may use; its environment restricts what nvidia-smi lists."""
    listed = listed_by(_nvidia_smi())
    allowed = os.environ.get(GPUS, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if allowed is None:
        return [Slot(uuid, uuid) for uuid in listed]
    entries = [e.strip() for e in allowed.split(",") if e.strip()]
    return [Slot(_name(entry, listed), entry) for entry in entries]


def listed_by(text: str) -> list[str]:
    """UUIDs in the output of `nvidia-smi -L`; of a GPU that is split (MIG) those of its parts."""
    found: list[str] = []
    for uuid in re.findall(r"UUID: ((?:GPU|MIG)-[\w/.-]+)", text):
        if uuid.startswith("MIG") and found and found[-1].startswith("GPU"):
            found.pop()
        found.append(uuid)
    return found


def _name(entry: str, listed: Sequence[str]) -> str:
    """An entry's UUID: indices are renumbered in containers and jobs, UUIDs are not."""
    if entry.isdigit():
        return listed[int(entry)] if int(entry) < len(listed) else f"gpu-{entry}"
    return next((uuid for uuid in listed if uuid.startswith(entry)), entry)


def _nvidia_smi() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def lock_folder() -> Path:
    """One per user and machine."""
    return Path(tempfile.gettempdir()) / f"emblib-slots-{os.getuid()}"


@contextmanager
def hold(
    slots: Sequence[Slot],
    count: int,
    folder: Path,
    pause: Callable[[], object] = lambda: time.sleep(WAIT_SECONDS),
) -> Iterator[list[Slot]]:
    """Any `count` of the slots, as soon as so many are free at once; `pause` passes the time.

    All or none: a job that kept one of two GPUs while it waits could wait for ever.
    """
    if count > len(slots):
        raise NotEnough(f"the job needs {count} GPUs side by side and there are {len(slots)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while len(held := _take(slots, count, folder)) < count:
        _give_back(held)
        pause()
    try:
        yield list(held)
    finally:
        _give_back(held)


def _take(slots: Sequence[Slot], count: int, folder: Path) -> dict[Slot, int]:
    held: dict[Slot, int] = {}
    for left, slot in zip(range(len(slots), 0, -1), slots, strict=True):
        if len(held) == count or len(held) + left < count:
            break
        file = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', slot.name)}.lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held[slot] = descriptor
        except BlockingIOError:
            os.close(descriptor)
    return held


def _give_back(held: dict[Slot, int]) -> None:
    for descriptor in held.values():
        os.close(descriptor)
