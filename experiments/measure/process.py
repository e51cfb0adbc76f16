"""A fresh child process and a pipe to it: a crash of the child cannot end the run.

Children come from a fork server that has torch loaded, so that one starts in about 0.1 s and shares
nothing with the last: no allocator state, no threads, no CUDA context. Once a process has had a
CUDA error or has lost its memory, nothing measured in it can be trusted; a dead child is replaced.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SLICE_SECONDS = 0.5  # how often a wait looks whether the child is still there
GOODBYE_SECONDS = 5.0  # between being asked to end and being killed
START_SECONDS = 60.0
NOTE_BYTES = 128


@dataclass(frozen=True)
class Limits:
    """Limits of a child: seconds without a message, and bytes of memory beyond its start."""

    seconds: float = math.inf
    memory_bytes: int | None = None


class Died(Exception):
    """A child failed, died or was ended; `status` is 'oom', 'timeout' or 'error'.

    `answered` tells an exception that the child itself reported from its death.
    """

    def __init__(self, status: str, reason: str, *, answered: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.answered = status, reason, answered


@dataclass(frozen=True)
class _Raised:
    """An exception of the child on its way through the pipe."""

    text: str
    out_of_memory: bool


class Child:
    """A child process that runs `target` ("module:function") as target(pipe, *arguments)."""

    def __init__(
        self, target: str, arguments: tuple[Any, ...] = (), *, limits: Limits = Limits()
    ) -> None:
        self.limits = limits
        self._heard = False  # any message of the child's
        # Shared memory: what a child is at can be read after its death, and writing it down costs
        # no system call that would disturb a measurement.
        self._note = _context().RawArray("c", NOTE_BYTES)
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = _context().Process(
            target=_enter, args=(theirs, self._note, target, arguments, limits), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Send to the child; raises Died where the child has ended."""
        try:
            self._pipe.send(message)
        except OSError:
            raise self._death() from None

    @property
    def note(self) -> str:
        """Return what the child last reported to be doing; empty before its first report."""
        return bytes(self._note.value).decode(errors="replace")

    def receive(self, watch: Callable[[str], object] | None = None) -> Any:
        """Return the child's next message; raises Died. `watch` gets its notes while it works.

        The limit is on silence: it restarts whenever the note changes. A child that has not said
        anything yet may be loading its libraries, and has at least START_SECONDS.
        """
        noted = self.note
        loading = not (noted or self._heard)
        first = max(self.limits.seconds, START_SECONDS if loading else 0.0)
        deadline = time.monotonic() + first
        while not self._pipe.poll(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self.note != noted:
                noted, deadline = self.note, time.monotonic() + self.limits.seconds
            if watch:
                watch(noted)
            if time.monotonic() >= deadline:
                self.kill()
                doing = f" while {noted.rpartition('|')[2]}" if noted else ""
                raise Died("timeout", f"no sign of life for {self.limits.seconds:g} s{doing}")
            if not self.process.is_alive() and not self._pipe.poll(0):
                raise self._death()
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        self._heard = True
        if isinstance(message, _Raised):
            status = "oom" if message.out_of_memory else "error"
            raise Died(status, message.text, answered=True)
        return message

    def _death(self) -> Died:
        self.process.join(GOODBYE_SECONDS)
        code = self.process.exitcode
        if code is None:
            self.kill()
            return Died("error", "the process closed its pipe and went on")
        if code >= 0:
            return Died("error", f"the process ended with status {code} and no answer")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:  # the kernel's answer to a machine without memory
            return Died(
                "oom", "the process was killed from outside (SIGKILL), as by a lack of memory"
            )
        return Died("error", f"the process crashed ({name})")

    def kill(self) -> None:
        """End it now."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def close(self) -> None:
        """Wait for the child to end, or end it."""
        self._pipe.close()
        self.process.join(GOODBYE_SECONDS)
        self.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


_pages: list[Any] = []  # in a child: the one page that its parent reads


def note(text: str) -> None:
    """Report from a child what it is doing: the parent shows it and knows what failed."""
    if _pages:
        _pages[0].value = text.encode()[: NOTE_BYTES - 1]


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Not emblib, of which each child may import another, but the slowest part of what it imports.
    context.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "hydra", "pandas"])
    return context


def _enter(
    pipe: Connection, page: Any, target: str, arguments: tuple[Any, ...], limits: Limits
) -> None:
    """Enter a child process."""
    _pages.append(page)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its children
    die_with_parent()
    try:
        _limit_memory(limits.memory_bytes)
        module, _, name = target.partition(":")
        function: Callable[..., None] = getattr(importlib.import_module(module), name)
        gc.freeze()  # every collection would look through all that torch has loaded, and copy it
        function(pipe, *arguments)
    except (BrokenPipeError, EOFError):
        pass  # the parent is gone, or has heard enough
    except BaseException as error:
        pipe.send(_Raised(_describe(error), is_out_of_memory(error)))
        if not isinstance(error, Exception):
            raise
    finally:
        pipe.close()


def die_with_parent() -> None:
    """End this process when its parent ends, so that a killed run leaves nothing computing.

    A thread waits for the parent. The system's own signal would report the death of the fork
    server, which lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _describe(error: BaseException) -> str:
    tail = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in tail)
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}{where}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, torch or the C++ allocator ran out of memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    ways = ("can't allocate", "bad_alloc", "Cannot allocate memory", "out of memory")
    return any(way in text for way in ways)


def _limit_memory(limit: int | None) -> None:
    """Limit private memory beyond what the process already has; shared libraries do not count."""
    if limit is None or sys.platform != "linux":
        return
    import resource

    status = Path(f"/proc/{os.getpid()}/status").read_text()
    used = next((int(x.split()[1]) << 10 for x in status.splitlines() if x.startswith("VmData")), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + limit
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
    )


_PR_SET_PDEATHSIG = 1


def killed_with_parent() -> None:
    """Request SIGKILL for this process when its parent ends (Linux); usable as `preexec_fn`."""
    _signal_of_death(signal.SIGKILL)


def asked_to_end_with_parent() -> None:
    """Request SIGTERM when the parent ends (Linux): a run then reports what it has measured."""
    _signal_of_death(signal.SIGTERM)


def _signal_of_death(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
