"""Reports of durations and amounts of a table module to a receiver that the user provides.

`StatsReporter` is the interface of a receiver, `Reporting` a module's receiver with its state.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class StatsReporter(Protocol):
    """Receives measurements of a module at the steps it selects.

    The methods have the names and arguments of FBGEMM's `TBEStatsReporter`, so that one written for
    FBGEMM fits. `iteration_step` counts from 0 the forwards since `set_stats_reporter`, without
    those in compiled graphs; `tbe_id` is the name of the module there, and `embedding_id` is "".
    """

    def should_report(self, iteration_step: int) -> bool:
        """Return whether to report this step; on other steps nothing is measured.

        It may be called several times per step.
        """

    def report_duration(
        self,
        iteration_step: int,
        event_name: str,
        duration_ms: float,
        embedding_id: str = "",
        tbe_id: str = "",
    ) -> None:
        """Report the duration of an event, in milliseconds."""

    def report_data_amount(
        self,
        iteration_step: int,
        event_name: str,
        data_bytes: int,
        embedding_id: str = "",
        tbe_id: str = "",
    ) -> None:
        """Report an amount: bytes or a count, depending on the event."""


_METHODS = ("should_report", "report_duration", "report_data_amount")  # of StatsReporter


class Reporting:
    """A module's reporter, with the name and the step of the module.

    Args:
        reporter: receiver; TypeError if it lacks a method of `StatsReporter`.
        tbe_id: name of the module in reports.

    Attributes:
        step: number of completed forwards, without those in compiled graphs; the module counts it.
    """

    def __init__(self, reporter: StatsReporter, tbe_id: str = "") -> None:
        # Not `isinstance`, which does not find methods of `__getattr__` from Python 3.12 on.
        methods = (getattr(reporter, name, None) for name in _METHODS)
        if not all(callable(method) for method in methods):
            raise TypeError(
                "a statistics reporter must have should_report, report_duration and "
                f"report_data_amount, got {reporter!r}"
            )
        self.reporter = reporter
        self.tbe_id = tbe_id
        self.step = 0

    @property
    def is_active(self) -> bool:
        """Return whether this step is reported."""
        return bool(self.reporter.should_report(self.step))

    @contextmanager
    def timed(self, event: str, device: torch.device) -> Iterator[None]:
        """Time the context and report its duration, if this step is reported.

        The host then waits for a CUDA device before and after. A context that raises is not
        reported.
        """
        if not self.is_active:
            yield
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        duration_ms = 1e3 * (time.perf_counter() - start)
        self.reporter.report_duration(self.step, event, duration_ms, tbe_id=self.tbe_id)

    def report_amount(self, event: str, amount: int) -> None:
        """Report an amount of the module, whether or not this step is selected."""
        self.reporter.report_data_amount(self.step, event, amount, tbe_id=self.tbe_id)
