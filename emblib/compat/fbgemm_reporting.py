"""Statistics of FBGEMM's training module, and the reporters that receive them.

A user configures a `TBEStatsReporter`. The module reports sizes, durations and cache counts to it,
through a `ModuleReport`. `CacheCounters` has the cache counts of FBGEMM's module.
"""

import abc
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from emblib import TableBatchedEmbeddingBags
from emblib.compat.checks import check_flags
from emblib.compat.fbgemm_types import (
    MultiPassPrefetchConfig,
    RecordCacheMetrics,
    UVMCacheStatsIndex,
)

_logger = logging.getLogger(__name__)


class TBEStatsReporter(abc.ABC):
    """Base of reporters; they receive the statistics of steps that `should_report` selects."""

    @abc.abstractmethod
    def should_report(self, iteration_step: int) -> bool:
        """Return whether to report the step."""

    def register_stats(self, stats_name: str, amplifier: int = 1) -> None:  # noqa: B027
        """Do nothing; only FBGEMM's own modules call this method."""

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
        """Receive the duration of an event of a step, in `time_unit`, of table and module."""

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
        """Receive an amount of an event of a step: of bytes or, for some events, a count."""


class StdLogStatsReporter(TBEStatsReporter):
    """Reporter that logs every `report_interval` steps; raises ValueError if that is below 1."""

    def __init__(self, report_interval: int) -> None:
        if report_interval < 1:
            raise ValueError(f"report_interval must be >= 1, got {report_interval}")
        self.report_interval = report_interval

    def should_report(self, iteration_step: int) -> bool:
        """Return whether the step is a multiple of the interval."""
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
        """Log one line; `enable_tb_metrics` is ignored."""
        text = f"{event_name}: {duration_ms} {time_unit}"
        self._log(iteration_step, text, embedding_id, tbe_id)

    def report_data_amount(
        self,
        iteration_step: int,
        event_name: str,
        data_bytes: int,
        embedding_id: str = "",
        tbe_id: str = "",
        enable_tb_metrics: bool = False,
    ) -> None:
        """Log one line; `enable_tb_metrics` is ignored."""
        self._log(iteration_step, f"{event_name}: {data_bytes}", embedding_id, tbe_id)

    def _log(self, step: int, text: str, embedding_id: str, tbe_id: str) -> None:
        _logger.info("step %d, TBE %s, table %s: %s", step, tbe_id, embedding_id, text)


@dataclass(frozen=True)
class TBEStatsReporterConfig:
    """Factory of the reporter of a module; this base class creates none."""

    interval: int = -1

    def create_reporter(self) -> TBEStatsReporter | None:
        """Return None; a subclass overrides the method to return a reporter.

        Raises:
            AssertionError: `interval` is above 0, but there is no reporter.
        """
        if self.interval > 0:
            raise AssertionError(
                f"an interval ({self.interval}) needs a reporter: use StdLogStatsReporterConfig, "
                "or a subclass that overrides create_reporter"
            )
        return None


@dataclass(frozen=True)
class StdLogStatsReporterConfig(TBEStatsReporterConfig):
    """Factory of a `StdLogStatsReporter`, or of no reporter if `interval` < 1."""

    def create_reporter(self) -> TBEStatsReporter | None:
        """Return a reporter with the interval, or None if it is below 1."""
        return StdLogStatsReporter(self.interval) if self.interval > 0 else None


# Counts of emblib's caches, in the order of `UVMCacheStatsIndex`.
_COUNT_NAMES = (
    "calls",
    "lookups",
    "unique",
    "unique_misses",
    "conflict_unique_misses",
    "conflict_misses",
)
_UNIQUE_MISSES = UVMCacheStatsIndex.num_unique_misses


class CacheCounters:
    """Cache counts of FBGEMM's module: differences of the counts of emblib's cache around a batch.

    To read them the host waits for a GPU. It does so only if an option of the module asks for
    counts.

    Attributes:
        has_cache: whether a table is cached.
        gathers_stats: whether gather_uvm_cache_stats is set.
        cache_miss_counter: number of batches with a miss, and of distinct rows missed, int64 `[2]`.
        table_wise_cache_miss: number of distinct rows missed per table, int64 `[T]`; empty unless
            record_cache_metrics asks for it.
    """

    def __init__(self, bags: TableBatchedEmbeddingBags, args: SimpleNamespace) -> None:
        metrics = RecordCacheMetrics(*(args.record_cache_metrics or (False, False)))
        self._bags = bags
        self._counts_batches, self._counts_tables = metrics
        self.gathers_stats = bool(args.gather_uvm_cache_stats)
        self.has_cache = any(spec.placement.cached for spec in bags.tables)
        num_tables = len(bags.tables) if self._counts_tables else 0
        self.cache_miss_counter = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.table_wise_cache_miss = torch.zeros(num_tables, dtype=torch.int64, device="cpu")
        self._batch_counts = torch.zeros(len(_COUNT_NAMES), dtype=torch.int64, device="cpu")
        self._counts_at_log = torch.zeros(len(_COUNT_NAMES), dtype=torch.int64, device="cpu")

    @property
    def is_active(self) -> bool:
        """Return whether a table is cached and an option asks for counts."""
        return self.has_cache and (
            self.gathers_stats or self._counts_batches or self._counts_tables
        )

    def _read_counts(self) -> Tensor:
        """Return the counts of all tables together, then of each table, int64 `[1 + T, 6]`."""
        count_rows = torch.zeros(
            1 + len(self._bags.tables), len(_COUNT_NAMES), dtype=torch.int64, device="cpu"
        )
        if self.has_cache:
            stats = self._bags.cache_stats()
            table_stats = [stats.tables.get(name) for name in self._bags.table_names]
            for count_row, counts in zip(count_rows, (stats, *table_stats), strict=True):
                if counts is not None:
                    count_row.copy_(
                        torch.tensor([getattr(counts, name) for name in _COUNT_NAMES], device="cpu")
                    )
        return count_rows

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the cache accesses inside the context: a lookup or prefetch of one batch."""
        if not self.is_active:
            yield
            return
        counts_before = self._read_counts()
        yield
        increase = self._read_counts() - counts_before
        if not increase[0, UVMCacheStatsIndex.num_calls]:
            return  # the batch had been prefetched
        self._batch_counts = increase[0]
        if self._counts_batches:
            num_unique_misses = increase[0, _UNIQUE_MISSES]
            self.cache_miss_counter += torch.stack(
                [(num_unique_misses > 0).long(), num_unique_misses]
            )
        if self._counts_tables:
            self.table_wise_cache_miss += increase[1:, _UNIQUE_MISSES]

    def uvm_stats(self, *, local: bool) -> Tensor:
        """Return the counts since the last reset, or with `local` those of the last batch.

        The result is int64 `[6]`, in the order of `UVMCacheStatsIndex`.

        Raises:
            RuntimeError: the module was made without gather_uvm_cache_stats.
        """
        check_flags(use_local_cache=local)
        if not self.gathers_stats:
            raise RuntimeError("make the module with gather_uvm_cache_stats=True to read them")
        return self._batch_counts.clone() if local else self._read_counts()[0]

    def reset(self) -> None:
        """Set the counts of `uvm_stats` and `counts_per_call` to 0; raise as `uvm_stats` does."""
        self.uvm_stats(local=True)
        self._bags.reset_cache_stats()
        self._batch_counts.zero_()
        self._counts_at_log.zero_()

    def counts_per_call(self, *, local: bool) -> dict[str, float]:
        """Return the number of calls, and the other counts per call, by `UVMCacheStatsIndex` names.

        They are counts since the previous request without `local`, or with `local` of the last
        batch. Raise as `uvm_stats` does.
        """
        counts = self.uvm_stats(local=local)
        if not local:
            counts, self._counts_at_log = counts - self._counts_at_log, counts
        num_calls = max(1, int(counts[0]))
        result = {"num_calls": float(counts[0])}
        for index in list(UVMCacheStatsIndex)[1:]:
            result[index.name] = float(counts[index]) / num_calls
        return result


def prefetch_passes(
    multipass_prefetch_config: MultiPassPrefetchConfig | None,
    input_tensor: Tensor,
    output_tensor: Tensor,
) -> Sequence[tuple[Tensor, Tensor, int]]:
    """Return the passes of a prefetch, in order: a slice of each tensor, and its first element.

    Args:
        multipass_prefetch_config: how a batch is split; None for one pass.
        input_tensor: ids of the batch, `[L]`. There is one pass if L is at most the number of
            passes.
        output_tensor: `[L, ...]`.
    """
    num_ids = input_tensor.size(0)
    config = multipass_prefetch_config
    if config is None or config.num_passes <= 1 or num_ids <= config.num_passes:
        return [(input_tensor, output_tensor, 0)]
    pass_size = max(-(-num_ids // config.num_passes), config.min_splitable_pass_size)
    begins = range(0, num_ids, pass_size)
    passes = (slice(begin, begin + pass_size) for begin in begins)
    return [(input_tensor[ids], output_tensor[ids], ids.start) for ids in passes]


class Timer:
    """Measure parts of steps, and report their durations.

    On a CPU a duration is reported at the end of its `recording`. On a GPU it is the time of the
    stream, and is reported at the end of the first `recording` at which the GPU has finished it.

    Args:
        report: function that gets the step and the milliseconds.
    """

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def recording(self, step: int, device: torch.device) -> Iterator[None]:
        """Measure the work inside the context, on the current stream, as part of `step`."""
        if device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._report(step, 1e3 * (time.perf_counter() - start_s))
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._pending.append((step, start, end))
        self._report_finished()

    def _report_finished(self) -> None:
        """Report the durations that the GPU has finished; do not wait for others."""
        while self._pending and self._pending[0][2].query():
            step, start, end = self._pending.popleft()
            self._report(step, start.elapsed_time(end))


class ModuleReport:
    """Statistics of a module for its reporter; the module sets `step` in each forward.

    Args:
        reporter: reporter that receives the statistics.
        names: label of the tables, and id of the module.
        counters: cache counts of the module.
    """

    def __init__(
        self, reporter: TBEStatsReporter, names: tuple[str, str], counters: CacheCounters
    ) -> None:
        self.reporter = reporter
        self.step = 0
        self.prefetch_timer = Timer(partial(self._report_duration, "total_prefetch_duration"))
        self.wait_timer = Timer(partial(self._report_duration, "bwd_wait_for_prefetch"))
        self._names = names
        self._counters = counters
        self._reported_counts = torch.zeros(
            len(UVMCacheStatsIndex), dtype=torch.int64, device="cpu"
        )
        self._reported_step = 0

    def _report_duration(self, event: str, step: int, milliseconds: float) -> None:
        if self.reporter.should_report(step):
            table, module = self._names
            self.reporter.report_duration(step, event, milliseconds, table, module)

    def _report_amount(self, event: str, amount: int) -> None:
        table, module = self._names
        self.reporter.report_data_amount(self.step, event, amount, table, module)

    def report_tensor(self, event: str, tensor: Tensor) -> None:
        """Report bytes and elements of a tensor, `tbe.<event>_size` and `tbe.<event>_count`."""
        if self.reporter.should_report(self.step):
            self._report_amount(f"tbe.{event}_size", tensor.element_size() * tensor.numel())
            self._report_amount(f"tbe.{event}_count", tensor.numel())

    def report_memory(self, bags: TableBatchedEmbeddingBags) -> None:
        """Report the bytes of the module in device memory and in host memory."""
        if not self.reporter.should_report(self.step):
            return
        tensors = [*bags.parameters(), *bags.buffers()]
        device_bytes = sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
        registered_bytes = sum(tensor.nbytes for tensor in tensors)
        # Tables outside device memory are neither parameters nor buffers.
        table_bytes = bags.nbytes()
        unregistered_bytes = (
            table_bytes["weights"] + table_bytes["optimizer_state"] - bags.weights.nbytes
        )
        unregistered_bytes -= sum(
            getattr(bags, f"state_{state.name}").nbytes for state in bags.optimizer.states
        )
        self._report_amount("tbe.total_hbm_usage", device_bytes)
        self._report_amount(
            "tbe.total_uvm_usage", registered_bytes - device_bytes + unregistered_bytes
        )

    def report_prefetch(self, indices: Tensor, row_bytes: int) -> None:
        """Report the size of a prefetched batch, and cache counts per step, since the last report.

        Counts are multiplied by `row_bytes`, the bytes of a row.
        """
        self.report_tensor("prefetch_input", indices)
        num_steps = self.step - self._reported_step
        if not (
            num_steps and self._counters.gathers_stats and self.reporter.should_report(self.step)
        ):
            return
        counts = self._counters.uvm_stats(local=False)
        self._reported_step = self.step
        for index in UVMCacheStatsIndex:
            increase = int(counts[index] - self._reported_counts[index])
            name = f"tbe.prefetch.cache_stats_by_data_size.{index.name}"
            self._report_amount(name, increase * row_bytes // num_steps)
        self._reported_counts = counts
