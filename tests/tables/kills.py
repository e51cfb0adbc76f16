"""Forks that are killed, for the tests of tables on disk: by another process or at a chosen call.

Runs in a process of its own with one thread, see `main` of the modules that use it: a fork of one
that has threads may hang.
"""

import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.sharding import worlds

_LAYOUT = struct.Struct("<qq")


class Board:
    """Two numbers that a fork writes and its parent reads, whatever becomes of the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, acknowledged: int, phase: int) -> None:
        _LAYOUT.pack_into(self._memory, 0, acknowledged, phase)

    @property
    def acknowledged(self) -> int:
        return _LAYOUT.unpack_from(self._memory)[0]

    @property
    def phase(self) -> int:
        return _LAYOUT.unpack_from(self._memory)[1]


def run_alone(module: ModuleType, mode: str, directory: Path) -> str:
    """The output of `python -m module mode DIRECTORY 1`, in memory if there are files in memory.

    A killed process leaves the same there, and waiting for disks is most of the time otherwise.
    """
    if os.path.ismount("/dev/shm"):
        directory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=directory) as name:
        words = [mode, f"{name}/tables", "1"]
        succeeded, output, errors = worlds.run_module(module.__name__, words, patience=500)
    assert succeeded, errors[-3000:]
    return output


def fork(work: Callable[[], None]) -> int:
    """The process that does `work`; it exits with 0, or with 1 and a trace."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def killed_in(
    board: Board, phase: int, work: Callable[[], None], chance: random.Random, after: int = 0
) -> bool:
    """Do `work` in a fork and kill it soon after it enters `phase`; False if it ended before.

    With `after`, not before that much is acknowledged. Phases count from 1; the first comes once
    and may be over when it is seen, the others come again.
    """

    def reached() -> bool:
        now = board.phase
        return board.acknowledged >= after and (now == phase or (phase == 1 and now > 0))

    child = fork(work)
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline:
        if _ended(child) is not None:
            return False
    time.sleep(chance.choice((0, 1e-5, 1e-4, 1e-3, 1e-2)) * chance.random())
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _was_killed(status)


def killed_at_call(work: Callable[[], None]) -> bool:
    """Do `work` in a fork, which kills itself; False if it came to the end."""
    child = fork(work)
    _, status = os.waitpid(child, 0)
    return _was_killed(status)


def _ended(child: int) -> bool | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return None if pid == 0 else _was_killed(status)


def _was_killed(status: int) -> bool:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, f"the fork failed with status {status}"
    return False


class SelfKill:
    """Replaces functions by ones that end the process at call number `call` of all of them.

    `where` is "before" or "after" the call, or "within": a write is then cut short at half.
    """

    def __init__(self, call: int, where: str) -> None:
        self.left, self.where = call, where

    def watch(self, owner: object, name: str) -> None:
        if self.where == "within" and name != "pwrite":
            return  # it would be killed before the call
        original = getattr(owner, name)

        def watched(*arguments: object, **options: object) -> object:
            self.left -= 1
            if self.left:
                return original(*arguments, **options)
            if self.where == "after":
                original(*arguments, **options)
            if self.where == "within":
                handle, data, at = arguments
                original(handle, data[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        setattr(owner, name, watched)
