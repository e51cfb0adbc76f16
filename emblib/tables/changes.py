"""Atomic changes of a module: completed after any exception that interrupts them, or not begun.

Ctrl-C, a lack of memory or an error of a callback can end a call between any two lines. So a change
of several tensors is a function that can be run again from its start to complete the change
(`emblib.ops.effects` makes sure that each native call happens once). `CompletingLock.complete` runs
the function; if an exception ends it, runs it again and then re-raises the exception. If the second
run is ended too, the lock stores the change, and the next thread to enter the lock runs it first.
"""

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from emblib.tables.locks import ModuleLock

_R = TypeVar("_R")


class Change(Generic[_R]):
    """A change of state that can be run again to complete it.

    Args:
        make: function that makes the change and returns its result.
        is_optional: function that returns whether an interrupted change may be abandoned: nothing
            that requires completion has changed so far.

    Attributes:
        has_begun: whether `run` was called; an interrupt may come before it.
    """

    def __init__(self, make: Callable[[], _R], is_optional: Callable[[], bool]) -> None:
        self._make, self.is_optional = make, is_optional
        self.has_begun = False
        self._frame: FrameType | None = None

    def run(self) -> _R:
        """Make the change, or complete it after an interruption."""
        self.has_begun = True
        self._frame = sys._getframe()
        result = self._make()
        self._frame = None
        return result

    def is_running(self) -> bool:
        """Return whether this thread is within `run`, read from its stack instead of a flag."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class CompletingLock(ModuleLock):  # type: ignore[misc]  # as ModuleLock
    """The lock of a module, which completes interrupted changes."""

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: list[Change[Any]] = []  # each is nested in the change before it

    def complete(self, make: Callable[[], _R], is_optional: Callable[[], bool]) -> _R:
        """Run a change, see `Change`, and return its result; changes may be nested.

        The calling thread must hold the lock; not checked. If an exception ends the change, it is
        run again before the exception is re-raised. If the second run fails, every later entry of
        the lock runs it again until it completes, and raises its exception if it does not. A run
        other than the first that ends with an `Exception` while the change is optional abandons it.
        """
        change = Change(make, is_optional)
        depth = len(self._unfinished)
        self._set_class(_ChangingLock)
        self._unfinished.append(change)
        try:
            result = change.run()
        except BaseException:
            with contextlib.suppress(BaseException):
                self._finish(depth)
            raise
        self._unfinished.pop()
        if not depth:
            self._set_class(CompletingLock)
        return result

    def _set_class(self, cls: "type[CompletingLock]") -> None:
        self.__class__ = cls

    def _finish(self, depth: int) -> None:
        """Complete the interrupted changes nested at `depth` or deeper, innermost first."""
        while len(self._unfinished) > depth:
            change = self._unfinished[-1]
            try:
                if change.has_begun:
                    change.run()
            except Exception:
                if not change.is_optional():
                    raise
            self._unfinished.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return CompletingLock, ()


class _ChangingLock(CompletingLock):  # type: ignore[misc]
    """The class of a lock with a running or interrupted change.

    Entering it completes an interrupted change; within a running one it does nothing more. Locks
    without a change have the class `CompletingLock`, whose entry costs nothing extra.
    """

    def __enter__(self) -> Any:  # type: ignore[override]
        entered = super().__enter__()
        try:
            if not any(change.is_running() for change in self._unfinished):
                self._finish(0)
                self._set_class(CompletingLock)
        except BaseException:
            super().__exit__(None, None, None)
            raise
        return entered
