"""emblib.DynamicEmbeddingBags as contenders: hash tables of all rows, in one tier or two."""

from __future__ import annotations

import math
import tempfile
from typing import ClassVar

import torch
from torch import Tensor

import emblib
from experiments.contenders.base import OneModule, State, Task, touched_ids
from experiments.contenders.tables import optimizer_of
from experiments.workloads.workload import Batch

FILLED_LOAD = 0.75  # rows ÷ slots, low enough that every key gets a slot
IDS_PER_FILL = 1 << 18  # ids per forward while the tables are filled
MAX_MISSES = 1 << 20  # rows that one batch may miss in the fast tier: the default on a CPU
Prepared = tuple[Tensor, Tensor, Tensor]  # ids, offsets, gradient of the output


class Dynamic(OneModule):
    """One module for all tables; every row is inserted before anything is timed."""

    module: emblib.DynamicEmbeddingBags

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._fill()

    def _module(self) -> emblib.DynamicEmbeddingBags:
        return emblib.DynamicEmbeddingBags(
            [
                emblib.DynamicSpec(math.ceil(shape.rows / FILLED_LOAD), shape.dim)
                for shape in self.task.shapes
            ],
            optimizer_of(self.task),
            device=self.task.device,
        )

    def _fill(self) -> None:
        """Insert every id with training forwards, table by table."""
        for table, shape in enumerate(self.task.shapes):
            for first in range(0, shape.rows, IDS_PER_FILL):
                ids = torch.arange(first, min(first + IDS_PER_FILL, shape.rows))
                self.module(ids.to(self.task.device), self._offsets(table, 1, len(ids)))

    def _offsets(self, table: int, num_bags: int, num_ids: int) -> Tensor:
        """Return the offsets of a batch that looks up `num_ids` ids of one table in equal bags.

        int64 [F * num_bags + 1] on the device; `num_bags` must divide `num_ids`.
        """
        bag_sizes = torch.zeros(len(self.task.shapes), num_bags, dtype=torch.int64)
        bag_sizes[table] = num_ids // max(1, num_bags)
        ends = bag_sizes.view(-1).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(self.task.device)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that the module reports; keys and metadata count as weights."""
        nbytes = dict(self.module.nbytes())
        return {
            "weights": sum(nbytes.values()) - nbytes.get("optimizer_state", 0),
            "optimizer_state": nbytes.get("optimizer_state", 0),
        }

    def observe(self, batch: Batch) -> State:
        rows_by_table = []
        dims = [shape.dim for shape in self.task.shapes]
        for table, ids in enumerate(touched_ids(batch, self.task)):
            offsets = self._offsets(table, len(ids), len(ids))
            with torch.no_grad():
                rows = self.module(ids.to(self.task.device), offsets)
            rows_by_table.append(rows.split(dims, dim=1)[table].cpu().clone())
        return rows_by_table


class Tiered(Dynamic):
    """Two tiers: rows in use are promoted; the least recently used ones move to host memory."""

    module: emblib.DynamicEmbeddingBags
    eviction: ClassVar[emblib.Eviction] = emblib.Eviction.LRU
    mode: ClassVar[emblib.TierMode] = emblib.TierMode.CACHING

    def __init__(self, task: Task) -> None:
        # Numbers of distinct rows: of each prepared batch, by the address of its ids, and summed
        # over the batches of all training calls.
        self.num_rows_of_batch: dict[int, int] = {}
        self.num_trained_rows = 0
        super().__init__(task)
        self.reset_counters()

    def _module(self) -> emblib.DynamicEmbeddingBags:
        shapes = self.task.shapes
        return emblib.DynamicEmbeddingBags(
            [
                emblib.DynamicSpec(
                    math.ceil(self.task.cache * shape.rows), shape.dim, eviction=self.eviction
                )
                for shape in shapes
            ],
            optimizer_of(self.task),
            backing=emblib.BackingStore(  # a batch cannot miss more rows than the table has
                self._store(), self.mode, min(MAX_MISSES, max(shape.rows for shape in shapes))
            ),
            device=self.task.device,
        )

    def _store(self) -> emblib.RowStore:
        return emblib.HostRows(2 * max(shape.rows for shape in self.task.shapes))

    def nbytes(self) -> dict[str, int]:
        """Add the values of the rows in the slow tier to the bytes of the fast tier."""
        nbytes, handles = super().nbytes(), self.module.table_handles().values()
        for table, shape in zip(handles, self.task.shapes, strict=True):
            stored_rows = max(0, table.size() - table.capacity())
            state_columns = {"sgd": 0, "rowwise_adagrad": 1}.get(
                self.task.optimizer.value, shape.dim
            )
            nbytes["weights"] += 4 * shape.dim * stored_rows
            nbytes["optimizer_state"] += 4 * state_columns * stored_rows
        return nbytes

    def prepare(self, batch: Batch) -> Prepared:
        """Lay out the batch and count its distinct rows, which `counters` needs."""
        prepared = super().prepare(batch)
        self.num_rows_of_batch[prepared[0].data_ptr()] = sum(
            map(len, touched_ids(batch, self.task))
        )
        return prepared

    def visit(self, prepared: Prepared) -> None:
        """Run a training forward, because only training moves rows between tiers."""
        ids, offsets, _ = prepared
        self.num_trained_rows += self.num_rows_of_batch[ids.data_ptr()]
        self.module(ids, offsets)

    def step(self, prepared: Prepared) -> None:
        self.num_trained_rows += self.num_rows_of_batch.get(prepared[0].data_ptr(), 0)
        super().step(prepared)

    def counters(self) -> dict[str, int]:
        stats_by_table = self.module.tier_stats().values()
        num_missed_rows = sum(stats.backing_hits + stats.new for stats in stats_by_table)
        return {
            "lookups": sum(stats.lookups for stats in stats_by_table),
            "lookup_hits": sum(stats.hits for stats in stats_by_table),
            "rows": self.num_trained_rows,
            "row_hits": self.num_trained_rows - num_missed_rows,
        }

    def reset_counters(self) -> None:
        self.num_trained_rows = 0
        self.module.reset_stats()


class TieredHybrid(Tiered):
    """Two tiers: a row is promoted only if it is used more often than the row it replaces."""

    eviction = emblib.Eviction.LFU
    mode = emblib.TierMode.HYBRID


class TieredDisk(Tiered):
    """Two tiers, the slow one in files."""

    def _store(self) -> emblib.RowStore:
        self.directory = tempfile.TemporaryDirectory(
            prefix="emblib-", dir=self.task.directory or None
        )
        return emblib.DiskRows(self.directory.name)


class DynamicNew(Dynamic):
    """A full table in which about `task.new_keys` of a step's lookups are keys never used before.

    Every such key evicts another one. The first step with a batch uses the batch as it is, because
    that step may be checked against the reference.
    """

    def __init__(self, task: Task) -> None:
        self.next_key = max(shape.rows for shape in task.shapes)
        self.used_batches: set[int] = set()  # addresses of the ids of batches that were used
        super().__init__(task)

    def _fill(self) -> None:
        """Insert every id, then other keys into the free slots, then the ids that these evicted.

        The ids are used last, so that new keys evict the other keys first.
        """
        super()._fill()
        for table, shape in enumerate(self.task.shapes):
            free_slots = math.ceil(shape.rows / FILLED_LOAD) - shape.rows
            for first in range(0, free_slots, IDS_PER_FILL):
                ids = self._new_keys(min(IDS_PER_FILL, free_slots - first))
                self.module(ids, self._offsets(table, 1, len(ids)))
        super()._fill()

    def _new_keys(self, num_keys: int) -> Tensor:
        """Return keys that were never used, int64 [num_keys] on the device."""
        first, self.next_key = self.next_key, self.next_key + num_keys
        return torch.arange(first, self.next_key, device=self.task.device)

    def step(self, prepared: Prepared) -> None:
        ids = prepared[0]
        if ids.data_ptr() in self.used_batches:
            new_positions = slice(None, None, round(1 / self.task.new_keys))
            ids = ids.clone()
            ids[new_positions] = self._new_keys(ids[new_positions].numel())
        self.used_batches.add(prepared[0].data_ptr())
        super().step((ids, *prepared[1:]))
