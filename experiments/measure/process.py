"""Fresh child processes with a pipe: a crash of a child cannot end the run.

A fork server that has torch loaded starts a child in about 0.1 s. Children share no allocator
state, threads or CUDA context. If a child crashes, is killed or raises an error, `Child.receive`
raises `ChildDied` in the parent, which may start another child for the rest of the work.
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

POLL_SECONDS = 0.5  # period of checks whether a child is alive
END_SECONDS = 5.0  # time to end before a child is killed
START_SECONDS = 60.0  # minimum of the first time limit, for loading libraries
NOTE_BYTES = 128  # shared memory of a note: its text and a final zero


@dataclass(frozen=True)
class Limits:
    """Limits of a child.

    Attributes:
        seconds: maximum time without a message or another note.
        memory_bytes: maximum of private memory beyond that at the child's start; None for no limit.
            Only Linux enforces it.
    """

    seconds: float = math.inf
    memory_bytes: int | None = None


class ChildDied(Exception):
    """A child raised an exception, died or was ended.

    Attributes:
        status: "oom", "timeout" or "error".
        reason: message.
        answered: True for an exception that the child itself reported; False for a dead child.
    """

    def __init__(self, status: str, reason: str, *, answered: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.answered = status, reason, answered


@dataclass(frozen=True)
class _ChildError:
    """The message by which a child reports an exception."""

    text: str
    out_of_memory: bool


class Child:
    """A child process that calls a function; the constructor starts it.

    As a context manager it ends the child: with `close`, after an exception at once. One thread may
    wait in `receive` while another calls `kill`. Other methods are for one thread.

    Args:
        target: "module:function"; the function is called with its end of the pipe (a `Connection`)
            and the arguments. It answers by `pipe.send`.
        arguments: picklable arguments.
        limits: limits of time and memory.

    Attributes:
        limits: the argument.
        process: the process.
    """

    def __init__(
        self, target: str, arguments: tuple[Any, ...] = (), *, limits: Limits = Limits()
    ) -> None:
        self.limits = limits
        self._has_received = False  # True once the child has sent a message
        # Shared memory, so that the note can be read after the child's death, and writing it needs
        # no system call, which would disturb a measurement.
        self._note = _forkserver_context().RawArray("c", NOTE_BYTES)
        self._pipe, child_end = multiprocessing.Pipe()
        self.process = _forkserver_context().Process(
            target=_child_main, args=(child_end, self._note, target, arguments, limits), daemon=True
        )
        self.process.start()
        child_end.close()

    def send(self, message: Any) -> None:
        """Send a picklable message to the child; raise ChildDied if the child has ended."""
        try:
            self._pipe.send(message)
        except OSError:
            raise self._describe_death() from None

    @property
    def note(self) -> str:
        """Return the last note of the child; "" before its first one."""
        return bytes(self._note.value).decode(errors="replace")

    def receive(self, watch: Callable[[str], object] | None = None) -> Any:
        """Wait for the child's next message, and return it.

        The time limit restarts whenever the note changes. A child that exceeds the limit is killed.
        The first note or message may take START_SECONDS, because the child may load libraries.

        Args:
            watch: function that is called with the child's note about every POLL_SECONDS.

        Raises:
            ChildDied: the child ended without a message, exceeded the time limit, or raised an
                error.
        """
        last_note = self.note
        is_loading = not (last_note or self._has_received)
        limit_s = max(self.limits.seconds, START_SECONDS if is_loading else 0.0)
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self.note != last_note:
                last_note, limit_s = self.note, self.limits.seconds
                deadline = time.monotonic() + limit_s
            if watch:
                watch(last_note)
            if time.monotonic() >= deadline:
                self.kill()
                activity = f" while {last_note.rpartition('|')[2]}" if last_note else ""
                raise ChildDied("timeout", f"no sign of life for {limit_s:g} s{activity}")
            if not self.process.is_alive() and not self._pipe.poll(0):
                raise self._describe_death()
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            raise self._describe_death() from None
        self._has_received = True
        if isinstance(message, _ChildError):
            status = "oom" if message.out_of_memory else "error"
            raise ChildDied(status, message.text, answered=True)
        return message

    def _describe_death(self) -> ChildDied:
        self.process.join(END_SECONDS)
        exit_code = self.process.exitcode
        if exit_code is None:
            self.kill()
            return ChildDied("error", "the process closed its pipe and went on")
        if exit_code >= 0:
            return ChildDied("error", f"the process ended with status {exit_code} and no answer")
        name = (
            signal.Signals(-exit_code).name
            if -exit_code in set(signal.Signals)
            else f"signal {-exit_code}"
        )
        if -exit_code == signal.SIGKILL:  # sent by the kernel when memory runs out
            return ChildDied(
                "oom", "the process was killed from outside (SIGKILL), as by a lack of memory"
            )
        return ChildDied("error", f"the process crashed ({name})")

    def kill(self) -> None:
        """Kill the child, and wait for its end; do nothing if it has ended."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def close(self) -> None:
        """Close the pipe, and wait for the child to end; kill it after END_SECONDS."""
        self._pipe.close()
        self.process.join(END_SECONDS)
        self.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


_child_note: list[Any] = []  # the shared memory of a child's note; empty in the parent


def note(text: str) -> None:
    """Set the note of this child: its present activity, which the parent shows.

    At most NOTE_BYTES - 1 bytes of the text are kept. Outside of a child this does nothing.
    """
    if _child_note:
        _child_note[0].value = text.encode()[: NOTE_BYTES - 1]


def _forkserver_context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The slowest dependencies of emblib. Not emblib: a child may import another copy of it.
    context.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "hydra", "pandas"])
    return context


def _child_main(
    pipe: Connection, note_memory: Any, target: str, arguments: tuple[Any, ...], limits: Limits
) -> None:
    """Call the target in this child process; send an exception that it raises to the parent."""
    _child_note.append(note_memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its children
    die_with_parent()
    try:
        _limit_memory(limits.memory_bytes)
        module_name, _, function_name = target.partition(":")
        function: Callable[..., None] = getattr(importlib.import_module(module_name), function_name)
        gc.freeze()  # collections would visit torch's objects, and copy their pages
        function(pipe, *arguments)
    except (BrokenPipeError, EOFError):
        pass  # the parent has ended or closed the pipe
    except BaseException as error:
        pipe.send(_ChildError(describe_error(error), is_out_of_memory(error)))
        if not isinstance(error, Exception):
            raise
    finally:
        pipe.close()


def die_with_parent() -> None:
    """End this process when its parent ends, so that no child survives a killed run.

    A thread waits for the parent. The signal of the system (`request_signal_at_parent_end`) cannot
    do that: its parent is the fork server, which does not end before its children.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def describe_error(error: BaseException) -> str:
    """Return "Type: message (file.py:line)"; the line is the one that raised the error."""
    tail = traceback.extract_tb(error.__traceback__)[-1:]
    location = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in tail)
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}{location}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that Python, torch or the C++ allocator ran out of memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    phrases = ("can't allocate", "bad_alloc", "Cannot allocate memory", "out of memory")
    return any(phrase in text for phrase in phrases)


def _limit_memory(limit: int | None) -> None:
    """Limit the private memory of this process to its present use plus `limit` bytes; Linux only.

    None limits nothing.
    """
    if limit is None or sys.platform != "linux":
        return
    import resource

    status = Path(f"/proc/{os.getpid()}/status").read_text()
    used_bytes = next(
        (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData")), 0
    )
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    new_limit = used_bytes + limit
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (
            new_limit if hard_limit == resource.RLIM_INFINITY else min(new_limit, hard_limit),
            hard_limit,
        ),
    )


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def request_signal_at_parent_end(number: signal.Signals) -> None:
    """Let Linux send this process the signal `number` when its parent ends.

    On other systems do nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
