"""Locks of modules whose lookups change them: caches, hash tables, stores of rows.

In a lookup, a module holds its lock from the assignment of slots to rows until the rows are read.
It also holds the lock during each update in backward, which autograd may run in another thread. It
does not hold it between a forward and its backward.
"""

import _thread
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ModuleLock(_thread.RLock):  # type: ignore[misc]  # final in typeshed alone
    """A re-entrant lock as a context manager; a copy or pickle of it is a new lock.

    `with` acquires it in C. In a Python `__enter__`, an interrupt could come between acquiring the
    lock and entering the block, and leave the lock held.

    A forked process has its own lock. If another thread of the parent held the lock at the fork,
    the protected state may be half changed, so `with` raises RuntimeError in the child.
    """

    def __init__(self) -> None:
        register_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock raise from now on if another thread held it when the process forked."""
        if self.acquire(blocking=False):
            self.release()
        else:
            self.__class__ = _LostLock

    def is_owned(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # as for threading.Condition

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleLock, ()


class _LostLock(ModuleLock):  # type: ignore[misc]
    """The lock of a module that another thread was using when the process forked."""

    def __enter__(self) -> bool:  # type: ignore[override]
        raise RuntimeError(
            "another thread was using this module when the process forked, so the copy of the "
            "forked process is incomplete; fork while no other thread uses the module, or load "
            "it again in the forked process"
        )


class _Locked(Protocol):
    @property
    def _lock(self) -> ModuleLock: ...


_Self = TypeVar("_Self", bound=_Locked)


def atomic(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Decorate a method so that it holds the `_lock` of its object while it runs."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # On one line: Python goes back to the line of a longer `with` when its block ends, and an
        # interrupt there would leave the lock held.
        with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701

    return call


class Forked(Protocol):
    """Object that is updated in a forked process before `os.fork` returns there."""

    def after_fork(self) -> None:
        """Update this object in the forked process."""


_fork_listeners: "weakref.WeakSet[Forked]" = weakref.WeakSet()


def register_after_fork(owner: Forked) -> None:
    """Have `owner.after_fork` called in forked processes, as long as it lives."""
    _fork_listeners.add(owner)


def _notify_listeners() -> None:
    for owner in list(_fork_listeners):
        owner.after_fork()


os.register_at_fork(after_in_child=_notify_listeners)
