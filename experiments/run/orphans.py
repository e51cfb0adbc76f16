"""No program outlives the one that started it: a killed run leaves nothing computing."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def killed_with_parent() -> None:
    """SIGKILL when the parent ends, on Linux; for `preexec_fn`, and for a process to ask for."""
    _signal_of_death(signal.SIGKILL)


def asked_to_end_with_parent() -> None:
    """SIGTERM when the parent ends, on Linux: a run then reports what it has measured."""
    _signal_of_death(signal.SIGTERM)


def _signal_of_death(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
