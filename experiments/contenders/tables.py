"""emblib.TableBatchedEmbeddingBags: all tables in one call, the optimizer fused into backward."""

from __future__ import annotations

import tempfile
from typing import ClassVar

import torch

import emblib
from experiments.config.schema import Optimizer
from experiments.contenders.base import OneModule, State, Task, Unsupported, read_rows
from experiments.workloads.workload import Batch, cache_sets

OPTIMIZERS = {
    Optimizer.sgd: emblib.optim.SGD,
    Optimizer.adagrad: emblib.optim.Adagrad,
    Optimizer.rowwise_adagrad: emblib.optim.RowwiseAdagrad,
}


def optimizer_of(task: Task) -> emblib.optim.Optimizer:
    """Return the task's optimizer in emblib, with the task's learning rate and default options."""
    return OPTIMIZERS[task.optimizer](task.lr)


class BatchedTables(OneModule):
    """emblib.TableBatchedEmbeddingBags with all tables in device memory."""

    module: emblib.TableBatchedEmbeddingBags
    placement: ClassVar[emblib.Placement] = emblib.Placement.DEVICE

    def _module(self) -> emblib.TableBatchedEmbeddingBags:
        task = self.task
        return emblib.TableBatchedEmbeddingBags(
            [
                emblib.TableSpec(shape.rows, shape.dim, placement=self.placement)
                for shape in task.shapes
            ],
            optimizer_of(task),
            cache=self._cache(),
            device=task.device,
        )

    def _cache(self) -> emblib.CacheConfig | None:
        """Return the module's cache configuration; None for tables in device memory."""
        return None

    def nbytes(self) -> dict[str, int]:
        return dict(self.module.nbytes())

    def observe(self, batch: Batch) -> State:
        weights = self.module.table_weights()
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()  # the host reads tables in host memory directly
        return read_rows(weights, batch, self.task)


class ManagedTables(BatchedTables):
    """Tables in managed memory: host memory, which the kernels of a GPU read over the bus."""

    placement = emblib.Placement.MANAGED
    policy: ClassVar[emblib.CachePolicy] = emblib.CachePolicy.LRU

    def _cache(self) -> emblib.CacheConfig:
        sets = cache_sets(self.task.shapes, self.task.cache)
        return emblib.CacheConfig(policy=self.policy, sets=sets, directory=self._make_directory())

    def _make_directory(self) -> str | None:
        """Create and return the folder of tables on disk; None for tables in memory."""
        return None


class CachedLRU(ManagedTables):
    """Tables in host memory, behind an LRU cache in device memory."""

    placement = emblib.Placement.MANAGED_CACHING

    def counters(self) -> dict[str, int]:
        stats = self.module.cache_stats()
        return {
            "lookups": int(stats.lookups),
            "lookup_hits": int(stats.lookups - stats.lookup_misses),
            "rows": int(stats.unique),
            "row_hits": int(stats.unique - stats.unique_misses),
            # Distinct rows that missed and got no place in the full set of the cache.
            "conflicts": int(stats.conflict_unique_misses),
        }

    def reset_counters(self) -> None:
        self.module.reset_cache_stats()


class CachedLFU(CachedLRU):
    """Tables in host memory, behind an LFU cache in device memory."""

    policy = emblib.CachePolicy.LFU


class DiskLRU(CachedLRU):
    """Tables in a memory-mapped file, behind an LRU cache in memory."""

    placement = emblib.Placement.DISK

    def _make_directory(self) -> str:
        """Create and return the folder, which is deleted with this contender."""
        if self.task.device.type != "cpu":
            raise Unsupported("tables on disk are for modules on the CPU")
        self.directory = tempfile.TemporaryDirectory(
            prefix="emblib-", dir=self.task.directory or None
        )
        return self.directory.name
