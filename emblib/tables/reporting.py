"""What a module tells a statistics reporter: how long its parts take, how much they touch.

A reporter is any object with the methods of `StatsReporter`; they have the names and arguments of
FBGEMM's `TBEStatsReporter`, so one written for it fits.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class StatsReporter(Protocol):
    """Receives numbers about a table at the steps it wants them."""

    def should_report(self, iteration_step: int) -> bool:
        """Whether this step is of interest; on the others nothing is measured."""

    def report_duration(
        self,
        iteration_step: int,
        event_name: str,
        duration_ms: float,
        embedding_id: str = "",
        tbe_id: str = "",
    ) -> None:
        """`duration_ms` milliseconds that `event_name` took."""

    def report_data_amount(
        self,
        iteration_step: int,
        event_name: str,
        data_bytes: int,
        embedding_id: str = "",
        tbe_id: str = "",
    ) -> None:
        """An amount: bytes, or a count where the event's name says so."""


class Reporting:
    """The reporter of one module, with the step it is at and the module's name in reports."""

    def __init__(self, reporter: StatsReporter, tbe_id: str = "") -> None:
        if not isinstance(reporter, StatsReporter):
            raise TypeError(
                "a statistics reporter must have should_report, report_duration and "
                f"report_data_amount, got {reporter!r}"
            )
        self.reporter = reporter
        self.tbe_id = tbe_id
        self.step = 0

    @property
    def active(self) -> bool:
        """Whether this step is reported."""
        return bool(self.reporter.should_report(self.step))

    @contextmanager
    def timed(self, event: str, device: torch.device) -> Iterator[None]:
        """Report the time of what runs inside; on CUDA the step is awaited, as it is measured."""
        if not self.active:
            yield
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = 1e3 * (time.perf_counter() - start)
        self.reporter.report_duration(self.step, event, elapsed, tbe_id=self.tbe_id)

    def amount(self, event: str, amount: int, table: str = "") -> None:
        """Report an amount, of the module or of one table."""
        self.reporter.report_data_amount(
            self.step, event, amount, embedding_id=table, tbe_id=self.tbe_id
        )
