"""Statistics reporters with FBGEMM's names: what a module tells about its steps, and to whom."""

import abc
import logging
from dataclasses import dataclass

_logger = logging.getLogger(__name__)


class TBEStatsReporter(abc.ABC):
    """Base of reporters; the module asks `should_report` and calls the others at those steps."""

    @abc.abstractmethod
    def should_report(self, iteration_step: int) -> bool:
        """Whether this step is of interest."""

    def register_stats(self, stats_name: str, amplifier: int = 1) -> None:  # noqa: B027
        """Told the name of a statistic before it is first reported; may be left as it is."""

    @abc.abstractmethod
    def report_duration(
        self,
        iteration_step: int,
        event_name: str,
        duration_ms: float,
        embedding_id: str = "",
        tbe_id: str = "",
        time_unit: str = "ms",
        enable_tb_metrics: bool = False,
    ) -> None:
        """A duration."""

    @abc.abstractmethod
    def report_data_amount(
        self,
        iteration_step: int,
        event_name: str,
        data_bytes: int,
        embedding_id: str = "",
        tbe_id: str = "",
        enable_tb_metrics: bool = False,
    ) -> None:
        """A number of bytes, or a count where the event's name says so."""


class StdLogStatsReporter(TBEStatsReporter):
    """Writes to the `logging` module every `report_interval` steps."""

    def __init__(self, report_interval: int) -> None:
        if report_interval < 1:
            raise ValueError(f"report_interval must be >= 1, got {report_interval}")
        self.report_interval = report_interval

    def should_report(self, iteration_step: int) -> bool:
        """At every multiple of the interval."""
        return iteration_step % self.report_interval == 0

    def report_duration(
        self,
        iteration_step: int,
        event_name: str,
        duration_ms: float,
        embedding_id: str = "",
        tbe_id: str = "",
        time_unit: str = "ms",
        enable_tb_metrics: bool = False,
    ) -> None:
        """One line."""
        self._log(iteration_step, tbe_id, embedding_id, f"{event_name}: {duration_ms} {time_unit}")

    def report_data_amount(
        self,
        iteration_step: int,
        event_name: str,
        data_bytes: int,
        embedding_id: str = "",
        tbe_id: str = "",
        enable_tb_metrics: bool = False,
    ) -> None:
        """One line."""
        self._log(iteration_step, tbe_id, embedding_id, f"{event_name}: {data_bytes}")

    def _log(self, step: int, tbe_id: str, embedding_id: str, text: str) -> None:
        _logger.info("step %d, TBE %s, table %s: %s", step, tbe_id, embedding_id, text)


@dataclass(frozen=True)
class TBEStatsReporterConfig:
    """Makes the reporter of a module; derive from it and override `create_reporter`."""

    interval: int = -1

    def create_reporter(self) -> TBEStatsReporter | None:
        """None: this class has no reporter of its own."""
        if self.interval > 0:
            raise ValueError(
                f"an interval ({self.interval}) needs a reporter: use StdLogStatsReporterConfig, "
                "or a subclass that overrides create_reporter"
            )
        return None


@dataclass(frozen=True)
class StdLogStatsReporterConfig(TBEStatsReporterConfig):
    """Makes a StdLogStatsReporter where `interval` > 0."""

    def create_reporter(self) -> TBEStatsReporter | None:
        """The reporter, or None without an interval."""
        return StdLogStatsReporter(self.interval) if self.interval > 0 else None
