"""Do for each test what plugins of pytest do, in less time.

There are 17,000 tests, most of a few milliseconds, so that a fifth of a millisecond per test is as
much as the longest file. pytest's logging adds two handlers to each of torch's forty loggers, three
times per test; pytest-timeout starts a thread per test and joins it.
"""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import _pytest.logging
import pytest
import pytest_timeout

INTERVAL_SECONDS = 1.0  # of looking at the time; tests have minutes


class RootLogs:
    """Add a handler to the root logger, as `catching_logs` did before pytest 9.1.

    Newer ones also add it to loggers that do not propagate, which no test captures.

    Args:
        handler: handler of the records.
        level: level of the handler, and at most that of the root logger; None leaves both.
    """

    def __init__(self, handler: logging.Handler, level: int | None = None) -> None:
        self.handler = handler
        self.level = level

    def __enter__(self) -> logging.Handler:
        root = logging.getLogger()
        root.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self._former_level = root.level
            root.setLevel(min(root.level, self.level))
        return self.handler

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        root = logging.getLogger()
        if self.level is not None:
            root.setLevel(self._former_level)
        root.removeHandler(self.handler)


class Watchdog:
    """Calls a function where a deadline passes; one thread for all deadlines, of which one holds.

    Args:
        interval_seconds: time between two looks at the deadline.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._due: tuple[float, Callable[[], object]] | None = None
        self._thread: threading.Thread | None = None

    def start(self, seconds: float, function: Callable[[], object]) -> None:
        """Set the deadline, in place of the last one."""
        self._due = time.monotonic() + seconds, function
        # In a forked child the thread of its parent does not run.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Remove the deadline."""
        self._due = None

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_seconds)
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                self._due = None
                due[1]()


_watchdog = Watchdog()


def pytest_configure(config: pytest.Config) -> None:
    """Use `RootLogs` in this session."""
    _pytest.logging.catching_logs = RootLogs  # type: ignore[misc, assignment]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Watch a test by the one thread, where the method of pytest-timeout is a thread."""
    if settings.method != "thread" or settings.timeout is None:
        return None
    _watchdog.start(settings.timeout, lambda: pytest_timeout.timeout_timer(item, settings))
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """End watching; pytest-timeout ends what it has started itself."""
    _watchdog.stop()
