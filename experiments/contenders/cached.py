"""emblib.TableBatchedEmbeddingBags with its tables in a slower tier, behind a cache or without."""

from __future__ import annotations

import tempfile
from typing import ClassVar

import emblib
from experiments.contenders.base import Task, Unsupported
from experiments.contenders.tables import OPTIMIZERS, BatchedTables
from experiments.work.workload import cache_sets


class Managed(BatchedTables):
    """In host memory: on a GPU its kernels read the rows where they are."""

    name = "managed"
    label = "managed, no cache"
    placement: ClassVar[emblib.Placement] = emblib.Placement.MANAGED
    policy: ClassVar[emblib.CachePolicy] = emblib.CachePolicy.LRU

    def __init__(self, task: Task) -> None:
        self.directory: tempfile.TemporaryDirectory[str] | None = None
        super().__init__(task)

    def _module(self) -> emblib.TableBatchedEmbeddingBags:
        task, folder = self.task, None
        if self.placement is emblib.Placement.DISK:
            if task.device.type != "cpu":
                raise Unsupported("tables on disk are for modules on the CPU")
            self.directory = tempfile.TemporaryDirectory(
                prefix="emblib-", dir=task.directory or None
            )
            folder = self.directory.name
        return emblib.TableBatchedEmbeddingBags(
            [emblib.TableSpec(s.rows, s.dim, placement=self.placement) for s in task.shapes],
            OPTIMIZERS[task.optimizer](task.lr),
            cache=emblib.CacheConfig(
                policy=self.policy, sets=cache_sets(task.shapes, task.cache), directory=folder
            ),
            device=task.device,
        )


class CachedLRU(Managed):
    """In host memory, behind a cache in the memory of the device."""

    name = "cached_lru"
    label = "LRU cache"
    variants = "cache"
    placement = emblib.Placement.MANAGED_CACHING

    def counters(self) -> dict[str, int]:
        """Distinct rows and lookups, and how many of each the cache served."""
        stats = self.module.cache_stats()
        return {
            "lookups": int(stats.lookups),
            "lookup_hits": int(stats.lookups - stats.lookup_misses),
            "rows": int(stats.unique),
            "row_hits": int(stats.unique - stats.unique_misses),
            "conflicts": int(stats.conflict_unique_misses),
        }

    def reset_counters(self) -> None:
        """Set the module's counters to zero; what the cache holds stays."""
        self.module.reset_cache_stats()


class CachedLFU(CachedLRU):
    """The same with the other policy."""

    name = "cached_lfu"
    label = "LFU cache"
    policy = emblib.CachePolicy.LFU


class DiskLRU(CachedLRU):
    """In a memory-mapped file, behind a cache in memory."""

    name = "disk_lru"
    label = "disk, LRU cache"
    placement = emblib.Placement.DISK


class DiskLFU(DiskLRU):
    """The same with the other policy."""

    name = "disk_lfu"
    label = "disk, LFU cache"
    policy = emblib.CachePolicy.LFU
