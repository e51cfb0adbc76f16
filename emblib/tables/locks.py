"""Locks of modules whose lookups change them: caches, hash tables, stores of rows.

One lock per module makes each of its calls atomic: from the moment that rows get their places until
the lookup has read them, and around each update in backward, which autograd may run in a thread of
its own. Nothing is held between a forward and its backward.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ModuleLock:
    """A re-entrant lock as a context manager; copies and unpickled ones are new locks.

    A forked process has its own, which is free unless another thread of the parent held it at the
    fork: what it protects was being changed, by a thread that the child does not have, so entering
    it there raises RuntimeError.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._depth = 0
        self._is_lost = False
        call_in_forks(self)

    def __enter__(self) -> None:
        self._mutex.acquire()
        if self._is_lost:
            self._mutex.release()
            raise RuntimeError(
                "another thread was using this module when the process forked, so the copy of the "
                "forked process is incomplete; fork while no other thread uses the module, or load "
                "it again in the forked process"
            )
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._mutex.release()

    def enter_if_free(self) -> bool:
        """Enter the lock unless any thread holds it, this one included; for finalisers.

        The garbage collector runs finalisers in any thread and between any two steps of it, so
        there they must neither wait nor see what is half done.
        """
        if not self._mutex.acquire(blocking=False):
            return False
        if self._depth or self._is_lost:
            self._mutex.release()
            return False
        self._depth = 1
        return True

    def after_fork(self) -> None:
        """Find out whether the thread that forked may go on with what is protected."""
        if self._mutex.acquire(blocking=False):
            self._mutex.release()
        else:
            self._mutex, self._depth, self._is_lost = threading.RLock(), 0, True

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleLock, ()


class _Locked(Protocol):
    @property
    def _lock(self) -> ModuleLock: ...


_Self = TypeVar("_Self", bound=_Locked)


def atomic(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Have a method hold the `_lock` of its module while it runs."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # On one line: an exception at the `with` of two lines, where it ends, would keep the lock.
        with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701

    return call


class Forked(Protocol):
    """What has something to do in a forked process before anything else happens there."""

    def after_fork(self) -> None:
        """Update this object in the forked process."""


_called_in_forks: "weakref.WeakSet[Forked]" = weakref.WeakSet()


def call_in_forks(owner: Forked) -> None:
    """Have `owner.after_fork` called in forked processes, as long as it lives."""
    _called_in_forks.add(owner)


def _call_all() -> None:
    for owner in list(_called_in_forks):
        owner.after_fork()


os.register_at_fork(after_in_child=_call_all)
