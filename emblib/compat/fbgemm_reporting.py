"""Statistics of a module and the reporters that receive them, with FBGEMM's names."""

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
from emblib.compat.fbgemm_types import (
    MultiPassPrefetchConfig,
    RecordCacheMetrics,
    UVMCacheStatsIndex,
)

_logger = logging.getLogger(__name__)


class TBEStatsReporter(abc.ABC):
    """Base of reporters; a module reports at steps with `should_report`."""

    @abc.abstractmethod
    def should_report(self, iteration_step: int) -> bool:
        """Return whether to report this step."""

    def register_stats(self, stats_name: str, amplifier: int = 1) -> None:  # noqa: B027
        """Do nothing; FBGEMM registers statistics by this, modules of emblib do not call it."""

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
        """Report a duration."""

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
        """Report a number of bytes, or a count, depending on the event."""


class StdLogStatsReporter(TBEStatsReporter):
    """Reporter that logs every `report_interval` steps."""

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
    """Factory of the reporter of a module; override `create_reporter`."""

    interval: int = -1

    def create_reporter(self) -> TBEStatsReporter | None:
        """Return None: this class has no reporter.

        Raises:
            AssertionError: an `interval` above 0, which would have no effect.
        """
        if self.interval > 0:
            raise AssertionError(
                f"an interval ({self.interval}) needs a reporter: use StdLogStatsReporterConfig, "
                "or a subclass that overrides create_reporter"
            )
        return None


@dataclass(frozen=True)
class StdLogStatsReporterConfig(TBEStatsReporterConfig):
    """Factory of a StdLogStatsReporter, if `interval` > 0."""

    def create_reporter(self) -> TBEStatsReporter | None:
        """Return the reporter, or None without an interval."""
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
    """The counts of FBGEMM's module, computed from the cache's counts around each batch.

    Counts are read from the device only if an option of the module asks for them, because the host
    waits for that.

    Attributes:
        has_cache: whether a table is cached.
        gathers: whether gather_uvm_cache_stats is set.
        cache_miss_counter: int64 `[2]`, batches with a miss, and distinct rows that were missing.
        table_wise_cache_miss: int64 `[T]`, distinct rows that were missing, by table; `[0]` unless
            record_cache_metrics asks for it.
    """

    def __init__(self, bags: TableBatchedEmbeddingBags, args: SimpleNamespace) -> None:
        metrics = RecordCacheMetrics(*(args.record_cache_metrics or (False, False)))
        self._bags = bags
        self._counts_batches, self._counts_tables = metrics
        self.gathers = bool(args.gather_uvm_cache_stats)
        self.has_cache = any(spec.placement.cached for spec in bags.tables)
        num_tables = len(bags.tables) if self._counts_tables else 0
        self.cache_miss_counter = torch.zeros(2, dtype=torch.int64)
        self.table_wise_cache_miss = torch.zeros(num_tables, dtype=torch.int64)
        self._last = torch.zeros(len(_COUNT_NAMES), dtype=torch.int64)
        self._logged = torch.zeros(len(_COUNT_NAMES), dtype=torch.int64)

    @property
    def is_active(self) -> bool:
        """Return whether a table is cached and an option asks for counts."""
        return self.has_cache and (self.gathers or self._counts_batches or self._counts_tables)

    def _counts(self) -> Tensor:
        """Return int64 `[1 + T, 6]`: of all tables, then of each."""
        count_rows = torch.zeros(1 + len(self._bags.tables), len(_COUNT_NAMES), dtype=torch.int64)
        if self.has_cache:
            stats = self._bags.cache_stats()
            table_stats = [stats.tables.get(name) for name in self._bags.table_names]
            for count_row, counts in zip(count_rows, (stats, *table_stats), strict=True):
                if counts is not None:
                    count_row.copy_(torch.tensor([getattr(counts, name) for name in _COUNT_NAMES]))
        return count_rows

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens inside the context, which may load one batch into the cache."""
        if not self.is_active:
            yield
            return
        before = self._counts()
        yield
        new = self._counts() - before
        if not new[0, UVMCacheStatsIndex.num_calls]:
            return  # the batch had been prefetched
        self._last = new[0]
        if self._counts_batches:
            num_unique_misses = new[0, _UNIQUE_MISSES]
            self.cache_miss_counter += torch.stack(
                [(num_unique_misses > 0).long(), num_unique_misses]
            )
        if self._counts_tables:
            self.table_wise_cache_miss += new[1:, _UNIQUE_MISSES]

    def uvm_stats(self, *, local: bool) -> Tensor:
        """Return int64 `[6]`, in the order of `UVMCacheStatsIndex`.

        The counts are those since the last reset, or if `local` those of the last batch.

        Raises:
            RuntimeError: the module was made without gather_uvm_cache_stats.
        """
        if not self.gathers:
            raise RuntimeError("make the module with gather_uvm_cache_stats=True to read them")
        return self._last.clone() if local else self._counts()[0]

    def reset(self) -> None:
        """Reset the counts of `uvm_stats` and `per_call` to zero; raise as `uvm_stats`."""
        self.uvm_stats(local=True)
        self._bags.reset_cache_stats()
        self._last.zero_()
        self._logged.zero_()

    def per_call(self, *, local: bool) -> dict[str, float]:
        """Return the counts per call since the last request, or if `local` those of the last batch.

        `num_calls` is the number of calls itself. Raises as `uvm_stats`.
        """
        counts = self.uvm_stats(local=local)
        if not local:
            counts, self._logged = counts - self._logged, counts
        calls = max(1, int(counts[0]))
        result = {"num_calls": float(counts[0])}
        for index in list(UVMCacheStatsIndex)[1:]:
            result[index.name] = float(counts[index]) / calls
        return result


def prefetch_passes(
    multipass_prefetch_config: MultiPassPrefetchConfig | None,
    input_tensor: Tensor,
    output_tensor: Tensor,
) -> Sequence[tuple[Tensor, Tensor, int]]:
    """Return the parts of a prefetch in order: `(input, output, start)`, slices of both tensors.

    Without a config, or with no more elements than passes, there is one part.
    """
    size = input_tensor.size(0)
    config = multipass_prefetch_config
    if config is None or config.num_passes == 1 or size <= config.num_passes:
        return [(input_tensor, output_tensor, 0)]
    part = max(-(-size // config.num_passes), config.min_splitable_pass_size)
    starts = range(0, size, part)
    return [(input_tensor[s : s + part], output_tensor[s : s + part], s) for s in starts]


class Timer:
    """Report milliseconds of parts of a step; on a GPU the stream's time, once it is known."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def recording(self, step: int, device: torch.device) -> Iterator[None]:
        """Time the work of `step` inside the context, on the current stream."""
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
        self._lazy_report()

    def _lazy_report(self) -> None:
        """Report finished durations, without waiting."""
        while self._pending and self._pending[0][2].query():
            step, start, end = self._pending.popleft()
            self._report(step, start.elapsed_time(end))


class Events:
    """The statistics of one module for its reporter; `step` counts forwards.

    Args:
        reporter: reporter that receives them.
        names: names of the tables and of the module.
        counters: counts of the module's cache.
    """

    def __init__(
        self, reporter: TBEStatsReporter, names: tuple[str, str], counters: CacheCounters
    ) -> None:
        self.reporter = reporter
        self.step = 0
        self.prefetch_timer = Timer(partial(self._duration, "total_prefetch_duration"))
        self.wait_timer = Timer(partial(self._duration, "bwd_wait_for_prefetch"))
        self._names = names  # of the tables, of the module
        self._counters = counters
        self._last_counts = torch.zeros(len(UVMCacheStatsIndex), dtype=torch.int64)
        self._last_step = 0

    def _duration(self, event: str, step: int, milliseconds: float) -> None:
        if self.reporter.should_report(step):
            table, module = self._names
            self.reporter.report_duration(step, event, milliseconds, table, module)

    def _amount(self, event: str, amount: int) -> None:
        table, module = self._names
        self.reporter.report_data_amount(self.step, event, amount, table, module)

    def tensor(self, event: str, tensor: Tensor) -> None:
        """Report bytes and elements of inputs or outputs."""
        if self.reporter.should_report(self.step):
            self._amount(f"tbe.{event}_size", tensor.element_size() * tensor.numel())
            self._amount(f"tbe.{event}_count", tensor.numel())

    def memory(self, bags: TableBatchedEmbeddingBags) -> None:
        """Report the bytes of the module in device memory and in host memory."""
        if not self.reporter.should_report(self.step):
            return
        tensors = [*bags.parameters(), *bags.buffers()]
        device_bytes = sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
        registered_bytes = sum(tensor.nbytes for tensor in tensors)
        # Tables outside device memory are neither parameters nor buffers.
        tables = bags.nbytes()
        outside_bytes = tables["weights"] + tables["optimizer_state"] - bags.weights.nbytes
        outside_bytes -= sum(
            getattr(bags, f"state_{state.name}").nbytes for state in bags.optimizer.states
        )
        self._amount("tbe.total_hbm_usage", device_bytes)
        self._amount("tbe.total_uvm_usage", registered_bytes - device_bytes + outside_bytes)

    def cache(self, indices: Tensor, row_bytes: int) -> None:
        """Report a prefetched batch: its size, and the counts since the last, as bytes per step."""
        self.tensor("prefetch_input", indices)
        num_steps = self.step - self._last_step
        if not (num_steps and self._counters.gathers and self.reporter.should_report(self.step)):
            return
        counts = self._counters.uvm_stats(local=False)
        self._last_step = self.step
        for index in UVMCacheStatsIndex:
            increase = int(counts[index] - self._last_counts[index])
            name = f"tbe.prefetch.cache_stats_by_data_size.{index.name}"
            self._amount(name, increase * row_bytes // num_steps)
        self._last_counts = counts
