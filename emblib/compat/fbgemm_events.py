"""What the module tells its statistics reporter, with FBGEMM's names of events."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from emblib import TableBatchedEmbeddingBags
from emblib.compat.fbgemm_cache import CacheCounters
from emblib.compat.fbgemm_reporting import TBEStatsReporter
from emblib.compat.fbgemm_types import UVMCacheStatsIndex


class Timer:
    """Durations of pieces of work; on a GPU of what the stream did, reported once it is done."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def recording(self, step: int, device: torch.device) -> Iterator[None]:
        """Around the work of `step`, on the current stream."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._report(step, 1e3 * (time.perf_counter() - start))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((step, first, last))
        self._lazy_report()

    def _lazy_report(self) -> None:
        """Report what is done, without waiting."""
        while self._pending and self._pending[0][2].query():
            step, first, last = self._pending.popleft()
            self._report(step, first.elapsed_time(last))


class Events:
    """The reporter of one module: `step` is the number of forwards so far."""

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

    def tensor(self, event: str, data: Tensor) -> None:
        """Bytes and elements of what goes in or comes out."""
        if self.reporter.should_report(self.step):
            self._amount(f"tbe.{event}_size", data.element_size() * data.numel())
            self._amount(f"tbe.{event}_count", data.numel())

    def memory(self, bags: TableBatchedEmbeddingBags) -> None:
        """Bytes of the module in the memory of the device, and of the host."""
        if not self.reporter.should_report(self.step):
            return
        tensors = [*bags.parameters(), *bags.buffers()]
        near = sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
        tables = bags.nbytes()
        everything = sum(tensor.nbytes for tensor in tensors)
        far = tables["weights"] + tables["optimizer_state"] - bags.weights.nbytes
        far -= sum(getattr(bags, f"state_{state.name}").nbytes for state in bags.optimizer.states)
        self._amount("tbe.total_hbm_usage", near)
        self._amount("tbe.total_uvm_usage", everything - near + far)

    def cache(self, indices: Tensor, row_bytes: int) -> None:
        """A batch was brought in: its size, and the counts since the last, as bytes a step."""
        self.tensor("prefetch_input", indices)
        steps = self.step - self._last_step
        if not (steps and self._counters.gathers and self.reporter.should_report(self.step)):
            return
        counts = self._counters.uvm_stats(local=False)
        self._last_step = self.step
        for index in UVMCacheStatsIndex:
            since = int(counts[index] - self._last_counts[index])
            name = f"tbe.prefetch.cache_stats_by_data_size.{index.name}"
            self._amount(name, since * row_bytes // steps)
        self._last_counts = counts
