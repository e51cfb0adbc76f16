"""CallingThread: a thread that makes calls of other threads, one after the other.

The thread of a store moves rows between tiers; that of asynchronous saves writes checkpoints.
"""

import _thread
import contextlib
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from emblib.tables.locks import register_after_fork


class Call:
    """A call that a `CallingThread` makes.

    Attributes:
        has_ended: whether the function has returned or raised.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        self._function, self._arguments = function, arguments
        self._error: BaseException | None = None
        self._ends: SimpleQueue[None] = SimpleQueue()  # an item once the call has ended
        self.has_ended = False

    def make(self) -> None:
        """Call the function; keep what it raises for `result`."""
        try:
            self._function(*self._arguments)
        except BaseException as error:
            self._error = error
        self._arguments = ()
        self.has_ended = True
        self._ends.put(None)

    def result(self) -> None:
        """Wait until the call has ended; raise what it raised.

        In a forked process a call of the parent does not end, see `CallingThread.after_fork`.
        """
        while not self.has_ended:
            with contextlib.suppress(Empty):  # another thread that waits may have taken the item
                self._ends.get(timeout=1.0)
        if self._error is not None:
            raise self._error


class CallingThread:
    """A thread, started at first use, that makes the calls of other threads in their order.

    It ends with `stop`, or once this object is deleted. Unlike those of `concurrent.futures`, its
    methods take no lock in Python: one interrupted by Ctrl-C would leave the lock taken, and the
    next call would wait for ever. So callers must not call `submit` and `stop` in several threads
    at once, which is not checked: each could start a thread.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()  # None ends the thread
        self._identifier: int | None = None  # of the thread; None without one
        register_after_fork(self)

    def __del__(self) -> None:
        self.stop()

    def submit(self, function: Callable[..., None], *arguments: Any) -> Call:
        """Have the thread call a function; raise RuntimeError if no thread can start."""
        if self._identifier is None:
            self._identifier = _thread.start_new_thread(_make_calls, (self._calls,))
        call = Call(function, arguments)
        self._calls.put(call)
        return call

    def after_fork(self) -> None:
        """Forget the thread and its calls in a forked process, which does not have it."""
        self._calls, self._identifier = SimpleQueue(), None

    def stop(self) -> None:
        """Wait until the thread has made its calls, and end it; a later call starts another.

        The thread itself, which may delete this object, does not wait.
        """
        if self._identifier is None:
            return
        last_call, is_own = self.submit(_do_nothing), self._identifier == _thread.get_ident()
        self._identifier = None
        self._calls.put(None)
        if not is_own:
            last_call.result()


def _do_nothing() -> None:
    pass


def _make_calls(calls: "SimpleQueue[Call | None]") -> None:
    """Make calls until there is None in their place."""
    while (call := calls.get()) is not None:
        call.make()
        del call  # else its arguments would live until the next one
