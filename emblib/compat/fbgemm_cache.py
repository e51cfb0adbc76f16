"""The counts of cache misses under FBGEMM's names, and its way of splitting a prefetch."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from emblib import TableBatchedEmbeddingBags
from emblib.compat.fbgemm_types import (
    MultiPassPrefetchConfig,
    RecordCacheMetrics,
    UVMCacheStatsIndex,
)

_NAMES = (
    "calls",
    "lookups",
    "unique",
    "unique_misses",
    "conflict_unique_misses",
    "conflict_misses",
)
_UNIQUE_MISSES = UVMCacheStatsIndex.num_unique_misses


class CacheCounters:
    """What FBGEMM's module counts, taken from the cache's own counts around each batch.

    Nothing is asked of the device unless the module was made with an option that counts. `cached`:
    whether there is a cache; `gathers`: whether gather_uvm_cache_stats was asked for.
    """

    def __init__(self, bags: TableBatchedEmbeddingBags, a: SimpleNamespace) -> None:
        metrics = RecordCacheMetrics(*(a.record_cache_metrics or (False, False)))
        self._bags = bags
        self._batches, self._by_table = metrics
        self.gathers = bool(a.gather_uvm_cache_stats)
        self.cached = any(spec.placement.cached for spec in bags.tables)
        counted = len(bags.tables) if self._by_table else 0
        self.cache_miss_counter = torch.zeros(2, dtype=torch.int64)
        self.table_wise_cache_miss = torch.zeros(counted, dtype=torch.int64)
        self._last = torch.zeros(len(_NAMES), dtype=torch.int64)
        self._logged = torch.zeros(len(_NAMES), dtype=torch.int64)

    @property
    def active(self) -> bool:
        """Whether there is anything to count."""
        return self.cached and (self.gathers or self._batches or self._by_table)

    def _counts(self) -> Tensor:
        """int64 `[1 + T, 6]`: of all tables, then of each."""
        lines = torch.zeros(1 + len(self._bags.tables), len(_NAMES), dtype=torch.int64)
        if self.cached:
            stats = self._bags.cache_stats()
            of_tables = [stats.tables.get(name) for name in self._bags.table_names]
            for line, counts in zip(lines, (stats, *of_tables), strict=True):
                if counts is not None:
                    line.copy_(torch.tensor([getattr(counts, name) for name in _NAMES]))
        return lines

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around what may bring one batch into the cache."""
        if not self.active:
            yield
            return
        before = self._counts()
        yield
        new = self._counts() - before
        if not new[0, UVMCacheStatsIndex.num_calls]:
            return  # the batch had been prefetched
        self._last = new[0]
        if self._batches:
            missed = new[0, _UNIQUE_MISSES]
            self.cache_miss_counter += torch.stack([(missed > 0).long(), missed])
        if self._by_table:
            self.table_wise_cache_miss += new[1:, _UNIQUE_MISSES]

    def uvm_stats(self, *, local: bool) -> Tensor:
        """int64 `[6]`, in the order of `UVMCacheStatsIndex`."""
        if not self.gathers:
            raise RuntimeError("make the module with gather_uvm_cache_stats=True to read them")
        return self._last.clone() if local else self._counts()[0]

    def reset(self) -> None:
        """Count from zero."""
        self.uvm_stats(local=True)
        self._bags.reset_cache_stats()
        self._last.zero_()
        self._logged.zero_()

    def per_call(self, *, local: bool) -> dict[str, float]:
        """The counts since they were asked for like this, a call; or those of the last batch."""
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
    """The parts of a prefetch: `(input, output, where it begins)`, which cover both in order."""
    size = input_tensor.size(0)
    config = multipass_prefetch_config
    if config is None or config.num_passes == 1 or size <= config.num_passes:
        return [(input_tensor, output_tensor, 0)]
    part = max(-(-size // config.num_passes), config.min_splitable_pass_size)
    starts = range(0, size, part)
    return [(input_tensor[s : s + part], output_tensor[s : s + part], s) for s in starts]
