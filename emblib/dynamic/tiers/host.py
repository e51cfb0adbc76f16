"""HostRows: a backing store of bounded size in host memory, with eviction."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from emblib.columns import HashEntryColumn
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import hash_keys_of
from emblib.dynamic.tiers.store import (
    BATCH,
    FoundRows,
    StoredRows,
    StoredTable,
    StoreShard,
    check_row,
)
from emblib.ops import hash, tiers
from emblib.ops.hash import Keys, Misses
from emblib.specs import DynamicSpec, Eviction, check_count
from emblib.tables import memory

_HEAD_BYTES = 16  # stamp and score of a record


class HostRows:
    """A `RowStore` in memory, of at most `capacity` rows per table, e.g. `HostRows(1_000_000)`.

    A row put into a full table evicts the lowest row by `eviction` (see `Eviction`; STEP and CUSTOM
    rank by score), which is dropped. The rows do not outlive the process. `seed` is the seed of the
    hash of keys, see `DynamicEmbeddingBags`; None draws one from torch's generator.

    Example:
        >>> backing = emblib.BackingStore(emblib.HostRows(capacity=1_000))
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.SGD(0.1), backing=backing)
        >>> pooled = bags(torch.arange(100), torch.tensor([0, 100]))
        >>> bags.size(0)
        100
    """

    def __init__(
        self,
        capacity: int | Sequence[int],
        eviction: Eviction | str = Eviction.LRU,
        *,
        seed: int | None = None,
    ) -> None:
        self.seed = None if seed is None else check_count("seed", seed, minimum=0)
        self.capacity = (
            check_count("capacity", capacity)
            if isinstance(capacity, int)
            else tuple(check_count("capacity", count) for count in capacity)
        )
        self.eviction = Eviction(eviction)
        if self.eviction is Eviction.NONE:
            raise ValueError(
                "a full HostRows must evict rows, so it needs an eviction; for tables "
                "that only grow choose a larger capacity, or DiskRows or SqliteRows"
            )
        self.note = ""
        self._tables: list[StoredTable] = []

    def __repr__(self) -> str:
        return f"HostRows({self.capacity}, {self.eviction.value!r})"

    def for_shard(self, shard: StoreShard) -> "HostRows":
        """Return a store with a shard's part of the capacity."""
        if not isinstance(self.capacity, int):
            raise ValueError(
                f"a store of one table has one capacity, got {self.capacity}; give each table of "
                "a collection a BackingStore of its own"
            )
        seed = shard.seed if self.seed is None else self.seed
        return HostRows(shard.divide(self.capacity), self.eviction, seed=seed)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """See `RowStore`; opening again with the same tables keeps their rows."""
        if self._tables:
            if list(tables) != self._tables:
                raise ValueError(
                    f"this HostRows holds {self._tables}, asked for are {list(tables)}; make one "
                    "for each module"
                )
            return
        capacity = self.capacity
        sizes = [capacity] * len(tables) if isinstance(capacity, int) else list(capacity)
        if len(sizes) != len(tables):
            raise ValueError(
                f"capacity must be one number, or one per table = {len(tables)}, got {len(sizes)}"
            )
        scored = self.eviction in (Eviction.STEP, Eviction.CUSTOM)
        order = Eviction.LRU_LFU if scored else self.eviction  # by score, then stamp
        specs = [DynamicSpec(size, 1, eviction=order) for size in sizes]
        self._tables = list(tables)
        hash_keys = hash_keys_of(self.seed, [table.name for table in tables])
        self._indices = [
            HashIndex([spec], "cpu", [hash_key])
            for spec, hash_key in zip(specs, hash_keys, strict=True)
        ]
        self._records = []  # per table, see `emblib.ops.tiers.tier_read`
        for spec, table in zip(specs, tables, strict=True):
            stride = _HEAD_BYTES + table.row_bytes
            nbytes = spec.rows * stride
            buffer = memory.reserve(nbytes, torch.uint8, torch.device("cpu"))
            memory.advise_growth(buffer, 0, 0, nbytes)
            self._records.append(buffer.view(spec.rows, stride))

    def _read(self, table: int, keys: Tensor, slots: Tensor) -> FoundRows:
        """Return the rows in slots, -1 for none; `keys` are those of the slots."""
        row_bytes = self._tables[table].row_bytes
        positions, words, values = tiers.tier_read(self._records[table], slots, row_bytes)
        stamps, scores = words.unbind()
        return FoundRows(positions, StoredRows(keys[positions], stamps, scores, values))

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        keys = keys.detach().to("cpu", torch.int64).contiguous()
        return self._read(table, keys, self._indices[table].find(Keys.of(keys)))

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        self._indices[table].erase(Keys.of(keys))

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`."""
        rows = check_row(self._tables[table], rows)
        index, dropped = self._indices[table], StoredRows.none(self._tables[table].row_bytes)
        if not rows.keys.numel():
            return rows
        newest = int(rows.stamps.max())
        if newest > index.tick:  # makes every stored row older than the new ones
            index.set_tick(newest)
        is_scored = index.order in hash.SCORED

        def count_uses_by_score(keys: Keys, misses: Misses) -> None:
            """Write the scores of new keys into `misses.counts`: the index evicts by them first."""
            count = int(misses.offsets[-1])
            misses.counts[:count] = rows.scores[misses.first[:count]]

        inserted = index.insert(
            Keys.of(rows.keys),
            torch.zeros_like(rows.keys) if is_scored else None,
            admit=count_uses_by_score if is_scored else None,
        )
        slots, result = inserted.slots, inserted.result
        if result is not None and int(result.status.max()) > hash.NEW:
            evicting = result.status == hash.EVICTING
            evicted_keys = result.evicted[:, HashEntryColumn.KEY][evicting]
            evicted = self._read(table, evicted_keys, result.slots[evicting]).rows
            row_bytes = self._tables[table].row_bytes
            dropped = StoredRows.concatenate([evicted, rows.at(slots < 0)], row_bytes)
        words = torch.stack([rows.stamps, rows.scores])
        tiers.tier_write_(self._records[table], slots, words, rows.values)
        stamps, scores = rows.stamps, rows.scores
        if dropped.keys.numel():
            has_slot = slots >= 0
            slots, stamps, scores = slots[has_slot], stamps[has_slot], scores[has_slot]
        index.set_entries(0, slots, stamps, scores if is_scored else None)
        return dropped

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        return self._indices[table].erase(Keys.of(keys)) >= 0

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        return self._indices[table].expire(0, before)

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`."""
        entries = self._indices[table].export(0)
        for keys, slots in zip(entries.keys.split(batch), entries.slots.split(batch), strict=True):
            if slots.numel():
                yield self._read(table, keys, slots).rows

    def size(self, table: int) -> int:
        """See `RowStore`."""
        return self._indices[table].size(0)

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self._indices[table].clear()

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`; only the note is stored."""
        self.note = note

    def close(self) -> None:
        """See `RowStore`; the rows stay."""
