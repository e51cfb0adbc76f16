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
    check_rows,
    check_table,
)
from emblib.ops import codes, tiers
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction, check_count, check_counts
from emblib.tables import memory

RECORD_HEAD_BYTES = 16  # stamp and score of a record


class HostRows:
    """A `RowStore` in memory, e.g. `HostRows(1_000_000)`; its rows do not outlive the process.

    Another module that opens the store after `close` finds the rows that were in it, though not
    those of the fast tier.

    The row of a key is in one of two buckets of 32 rows. If both are full, a new row evicts the row
    that `eviction` ranks lowest among those that the same call did not put, and the store drops it;
    if there is none, it drops the new row. Call `open` before any other method that names a table;
    `RowStore` defines the methods and which threads may call them.

    Args:
        capacity: number of rows per table, one int for all tables or one per table; rounded up to
            a multiple of 32.
        eviction: the order of rows, see `Eviction`; STEP and CUSTOM rank by score.
        seed: seed of the hash of keys, see `DynamicEmbeddingBags`; None draws one from torch's
            generator.

    Raises:
        ValueError: the eviction is unknown or `Eviction.NONE`, a capacity is below 1, the sequence
            of capacities is empty, or the seed is not in [0, 2^63).
        TypeError: a capacity or the seed is not an int.

    Attributes:
        row_format: optimizer of the rows, and name and dtype of each of their values, as the
            module that opened the store last has noted it; None in a new store.

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
        self.capacity = check_counts("capacity", capacity)
        self.eviction = Eviction(eviction)
        if self.eviction is Eviction.NONE:
            raise ValueError(
                "a full HostRows must evict rows, so it needs an eviction; for tables "
                "that only grow choose a larger capacity, or DiskRows or SqliteRows"
            )
        self.note = ""
        self.row_format: list[list[str]] | None = None
        # By table, from `open` on.
        self._tables: list[StoredTable] = []
        self._indices: list[HashIndex] = []  # of the keys
        self._records: list[Tensor] = []  # uint8 `[S, 16 + row_bytes]`: stamp, score, row by slot

    def __repr__(self) -> str:
        return f"HostRows({self.capacity}, {self.eviction.value!r})"

    def for_shard(self, shard: StoreShard) -> "HostRows":
        """Return a store with a shard's part of the capacity, rounded up.

        Raises:
            ValueError: the store has one capacity per table.
        """
        if not isinstance(self.capacity, int):
            raise ValueError(
                f"a store of one table has one capacity, got {self.capacity}; give each table of "
                "a collection a BackingStore of its own"
            )
        seed = shard.seed if self.seed is None else self.seed
        return HostRows(shard.divide(self.capacity), self.eviction, seed=seed)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """See `RowStore`; opening again with the same tables keeps their rows.

        Raises:
            ValueError: the store has other tables, or another number of capacities than tables.
            MemoryError: there is not enough address space for the rows; the store stays closed.
        """
        if self._tables:
            if list(tables) != self._tables:
                raise ValueError(
                    f"this HostRows holds {self._tables}, asked for are {list(tables)}; make one "
                    "for each module"
                )
            return
        capacity = self.capacity
        capacities = [capacity] * len(tables) if isinstance(capacity, int) else list(capacity)
        if len(capacities) != len(tables):
            raise ValueError(
                f"capacity must be one number, or one per table = {len(tables)}, got "
                f"{len(capacities)}"
            )
        assigns_scores = self.eviction in (Eviction.STEP, Eviction.CUSTOM)
        eviction = Eviction.LRU_LFU if assigns_scores else self.eviction  # by score, then stamp
        specs = [DynamicSpec(num_rows, 1, eviction=eviction) for num_rows in capacities]
        hash_keys = hash_keys_of(self.seed, [table.name for table in tables])
        indices = [
            HashIndex([spec], "cpu", [hash_key])
            for spec, hash_key in zip(specs, hash_keys, strict=True)
        ]
        records = []
        for spec, table in zip(specs, tables, strict=True):
            record_bytes = RECORD_HEAD_BYTES + table.row_bytes
            nbytes = spec.rows * record_bytes
            buffer = memory.reserve(nbytes, torch.uint8, torch.device("cpu"))
            memory.advise_growth(buffer, 0, 0, nbytes)
            records.append(buffer.view(spec.rows, record_bytes))
        self._tables, self._indices, self._records = list(tables), indices, records

    def _index(self, table: int) -> HashIndex:
        """Return the index of a table's keys; raise RuntimeError before `open`."""
        if not self._tables:
            raise RuntimeError("this HostRows has no tables yet: call open(tables) first")
        check_table(table, self._tables)
        return self._indices[table]

    def _read(self, table: int, keys: Tensor, slots: Tensor) -> FoundRows:
        """Return the rows in slots, int64 `[n]`, -1 for none, whose keys are `keys`."""
        row_bytes = self._tables[table].row_bytes
        positions, words, values = tiers.tier_read(self._records[table], slots, row_bytes)
        stamps, scores = words.unbind()
        return FoundRows(positions, StoredRows(keys[positions], stamps, scores, values))

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        keys = keys.detach().to("cpu", torch.int64).contiguous()
        return self._read(table, keys, self._index(table).find(Keys.from_ids(keys)))

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        self._index(table).erase(Keys.from_ids(keys))

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`."""
        self._index(table)  # raises before `open`
        rows = check_rows(self._tables[table], rows)
        entries = torch.stack(rows[:3], dim=1)
        return StoredRows.from_entries(*self._put(table, rows.keys[:0], entries, rows.values))

    def exchange(self, table: int, lifted_keys: Tensor, entries: Tensor, values: Tensor) -> Tensor:
        """Call `lift`, then `put`, as one op; return the keys of the dropped rows, int64 `[k]`.

        A row that is put is dropped itself if it finds no row to evict, see `HostRows`.

        Tensors must be contiguous and on the CPU. The keys of each argument must be distinct; that
        is not checked.

        Args:
            table: number of the table.
            lifted_keys: int64 `[m]`, the keys to remove; unknown ones are ignored.
            entries: int64 `[n, 3]`, keys, stamps and scores of the rows to put.
            values: uint8 `[n, row_bytes]`, these rows.
        """
        return self._put(table, lifted_keys, entries, values)[0][:, HashEntryColumn.KEY]

    def _put(
        self, table: int, lifted_keys: Tensor, entries: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Remove `lifted_keys`, then put rows; return entries and values of the dropped rows."""
        index = self._index(table)
        index.versions.advance()  # since the op changes the index without its methods
        order = codes.HASH_ORDER[index.order]
        dropped: tuple[Tensor, Tensor] = tiers.tier_put_(
            index.tensors(), self._records[table], lifted_keys, entries, values, order
        )
        return dropped

    def op_arguments(self, *, is_changed: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return `store_indices`, `records` and `store_orders` for the ops on batches.

        The tensors are views of the store, which no other thread may use while the op changes it,
        nor change while the op reads it.

        Args:
            is_changed: whether the op changes the store.
        """
        tensors, orders = [], []
        for index in self._indices:
            if is_changed:
                index.versions.advance()  # since the op changes the index without its methods
            tensors += index.tensors()
            orders.append(codes.HASH_ORDER[index.order])
        return tensors, self._records, orders

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        return self._index(table).erase(Keys.from_ids(keys)) >= 0

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        return self._index(table).expire(0, before)

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`."""
        entries = self._index(table).export(0)
        for keys, slots in zip(entries.keys.split(batch), entries.slots.split(batch), strict=True):
            if slots.numel():
                yield self._read(table, keys, slots).rows

    def size(self, table: int) -> int:
        """See `RowStore`."""
        return self._index(table).size(0)

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self._index(table).clear()

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`; only the note is stored."""
        self.note = note

    def close(self) -> None:
        """Do nothing: the rows stay, changes since the last `flush` included.

        The store can be opened again with the same tables.
        """
