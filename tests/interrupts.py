"""Interrupts at any line of emblib, as Ctrl-C, MemoryError or CUDA out of memory may come.

`interrupt_at_line` raises at the n-th line that emblib executes, so that a test can try them all;
`interrupting` delivers real signals at random times.
"""

import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import emblib

ROOT = str(Path(emblib.__file__).parent)
# Between a change of the mode and its `try` or `finally` no signal is handled, as there is no call;
# an exception that a trace function raises there would leave gradients off. Real signals are in
# tests/test_grad_mode.py and tests/test_context_values.py.
ATOMIC = {str(Path(ROOT, name)) for name in ("grad_mode.py", "context_values.py")}


@functools.cache
def _exits(code: CodeType) -> frozenset[int]:
    """Return the offsets at which blocks of `with` end and `__exit__` is about to be called.

    The interpreter looks for signals after calls and before jumps, so never there; an exception
    that a trace function raises there would leave the block without its `__exit__`.
    """
    steps = list(dis.get_instructions(code))
    offsets = set()
    for i in range(len(steps) - 3):  # __exit__(None, None, None)
        nones = all(s.opname == "LOAD_CONST" and s.argval is None for s in steps[i : i + 3])
        if nones and steps[i + 3].opname in ("PRECALL", "CALL"):
            offsets.add(steps[i].offset)
            if i and steps[i - 1].opname in ("SWAP", "NOP"):  # below a value to return
                offsets.add(steps[i - 1].offset)
    return frozenset(offsets)


class interrupt_at_line:
    """Raise, and catch, an exception at the n-th line (from 1) that emblib executes in a block.

    `where` is the file and line at which it was raised, or None. A class, because with Python
    3.13 the frame of a generator keeps the exception, and with it what the interrupted frames hold.
    """

    def __init__(self, line: int, exception: type[BaseException] = KeyboardInterrupt) -> None:
        self.where: str | None = None
        self._left, self._exception = line, exception

    def __enter__(self) -> "interrupt_at_line":
        self._before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        sys.settrace(self._before)
        return kind is not None and issubclass(kind, self._exception)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Be the trace function of a thread."""
        if event == "call":
            name = frame.f_code.co_filename
            return self.trace if name.startswith(ROOT) and name not in ATOMIC else None
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_lineno}"
                raise self._exception
        return self.trace


def each_line(
    exception: type[BaseException] = KeyboardInterrupt, *, first: int = 1, step: int = 1
) -> Iterator[interrupt_at_line]:
    """Yield attempts to interrupt a block, each at a later line, until one is not reached.

    Example:
        for attempt in each_line():
            module = make()
            with attempt:
                module.flush()
            check(module)
    """
    line = first
    while True:
        attempt = interrupt_at_line(line, exception)
        yield attempt
        if attempt.where is None:
            return
        line += step


def interrupting(seconds: float, work: Callable[[], None]) -> bool:
    """Do some work, interrupted by a real SIGINT after `seconds`; return whether it was.

    Only in the main thread. A signal that comes after the work is lost.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def entries_of_conditions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the thread of every entry into a `threading.Condition`.

    `Condition.__enter__` is Python: Ctrl-C within it leaves its lock taken for ever.
    """
    threads, condition_enter = list[int](), threading.Condition.__enter__

    def enter(condition: threading.Condition) -> bool:
        threads.append(threading.get_ident())
        return condition_enter(condition)

    monkeypatch.setattr(threading.Condition, "__enter__", enter)
    return threads
