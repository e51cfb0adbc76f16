"""Threads and forks for the tests of what modules promise them."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(*works: Callable[[], None]) -> None:
    """Run each of `works` in a thread of its own, begin all at once, and raise the first error."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    with frequent_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"


class Meeting:
    """A place in the work of several threads: each waits there until another comes, or a while.

    Without a lock two threads meet there whenever both work. With a lock they never do.
    """

    def __init__(self, seconds: float = 0.004) -> None:
        self._seconds, self._here = seconds, 0
        self._changed = threading.Condition()

    def wait(self) -> None:
        with self._changed:
            self._here += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._here > 1, self._seconds)
        time.sleep(0)
        with self._changed:
            self._here -= 1

    def before(self, owner: Any, name: str) -> None:
        """Meet before each call of this method of an object."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return method(*args, **kwargs)

        object.__setattr__(owner, name, call)

    def after(self, owner: Any, name: str) -> None:
        """Meet after each call of this method of an object."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.wait()
            return result

        object.__setattr__(owner, name, call)


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Around what is done while another thread holds a lock."""
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def in_fork(work: Callable[[], None], seconds: int = 60) -> str:
    """Do `work` in a forked process: "" if it returned, else the traceback, or how it ended."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            work()
        except BaseException:
            os.write(tell, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said if os.WIFEXITED(status) else f"{said}ended by signal {os.WTERMSIG(status)}"
