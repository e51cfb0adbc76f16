"""Tests that hang are ended by name, and logs are captured, as by the plugins themselves."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.light_hooks import RootLogs, Watchdog

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import logging, threading

silent = logging.getLogger("silent")
silent.propagate = False

def test_passes():
    assert [t.name for t in threading.enumerate()].count("watchdog") == 1

def test_captures(caplog):
    silent.error("is silent")
    logging.getLogger("some.part").error("is loud")
    assert caplog.messages == ["is loud"]
    assert logging.getLogger().handlers.count(caplog.handler) == 1
    assert not silent.handlers

def test_sets_a_level(caplog):
    with caplog.at_level(logging.DEBUG):
        logging.debug("fine")
    assert caplog.messages == ["fine"]
    logging.debug("coarse")
    assert caplog.messages == ["fine"]

def test_hangs():
    threading.Event().wait(60)
"""


def test_sessions(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    words = ["-p", "tests.light_hooks", "-v", "--timeout=0.5", "--timeout-method=thread", "-n", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", *words, tmp_path / "test_program.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    for name, outcome in (("passes", "PASSED"), ("captures", "PASSED"), ("sets_a_level", "PASSED")):
        assert f"::test_{name} {outcome}" in said, said
    assert "Timeout" in said
    assert "in test_hangs" in said


def test_a_deadline_that_holds_is_kept() -> None:
    """The last one holds; one that was removed calls nothing."""
    watchdog, called = Watchdog(0.01), threading.Event()
    missed: list[str] = []
    watchdog.start(0.05, lambda: missed.append("former"))
    watchdog.start(0.1, called.set)
    assert called.wait(20)
    again = threading.Event()
    watchdog.start(0.02, again.set)
    watchdog.stop()
    assert not again.wait(0.2)
    assert not missed


def test_a_deadline_to_come_calls_nothing() -> None:
    watchdog, early, late = Watchdog(0.01), threading.Event(), threading.Event()
    watchdog.start(1000.0, early.set)
    assert not early.wait(0.1)
    watchdog.start(0.0, late.set)
    assert late.wait(20)
    assert not early.is_set()


@pytest.mark.parametrize("level", [10, 40])
def test_the_level_is_restored(level: int) -> None:
    root, handler = logging.getLogger(), logging.NullHandler()
    before = root.level
    with RootLogs(handler, level) as entered:
        assert entered is handler
        assert handler in root.handlers
        assert (handler.level, root.level) == (level, min(before, level))
    assert handler not in root.handlers
    assert root.level == before
