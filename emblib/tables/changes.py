"""Atomic changes of a module: completed after any exception that interrupts them, or not begun.

Ctrl-C, a lack of memory or an error of a callback can end a call between any two lines. A change of
several tensors is therefore a function that can run again from its start and then completes the
change (`emblib.ops.effects` makes native calls once). `CompletingLock.complete` runs it, and runs
it again where an exception ended it, before the exception goes on. A second exception can end that
too, so what is left is noted in the lock, and whoever enters the lock next runs it first.
"""

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from emblib.tables.locks import ModuleLock

_R = TypeVar("_R")


class Change(Generic[_R]):
    """A change that running again completes.

    Args:
        make: function that makes the change and returns its result.
        is_optional: function that returns whether the change may stay as it is, because nothing was
            changed yet that needs the rest of it.
    """

    def __init__(self, make: Callable[[], _R], is_optional: Callable[[], bool]) -> None:
        self._make, self.is_optional = make, is_optional
        self.has_begun = False
        self._frame: FrameType | None = None

    def run(self) -> _R:
        """Make the change, or the rest of it after an interruption."""
        self.has_begun = True
        self._frame = sys._getframe()
        result = self._make()
        self._frame = None
        return result

    def is_running(self) -> bool:
        """Return whether this thread is within `run`; a flag could be left set by an exception."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class CompletingLock(ModuleLock):  # type: ignore[misc]  # as ModuleLock
    """The lock of a module, which completes interrupted changes."""

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: list[Change[Any]] = []  # each is a part of the one before it

    def complete(self, make: Callable[[], _R], is_optional: Callable[[], bool]) -> _R:
        """Make a change, see `Change`, while this thread holds the lock; changes may make others.

        If an exception ends the change, the rest of it is made before the exception goes on; if
        that is ended too, when the lock is entered next. An `Exception` that ends an optional
        change twice leaves it as it is; any other change is tried again by every later call.
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
        """Make the rest of the changes from a depth on, innermost first."""
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
    """A lock during a change or after an interrupted one, which entering it completes.

    Other locks are entered as `ModuleLock` is; so a change costs calls without one nothing.
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
