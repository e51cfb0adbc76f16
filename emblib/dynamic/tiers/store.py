"""Backing stores of dynamic tables: the `RowStore` protocol and its configuration.

A `RowStore` holds rows for which the fast tier has no slot. Each key of a table is in one of the
two tiers: a promoted row is read and lifted, a demoted row is put. Values are bytes to the store,
the weights of a row and then its optimizer states, so a store does not depend on dtypes.

A store that outlives the process has commits. `open` restores the state of the last `flush` that
returned, however the process ended; later changes are undone. `flush` gets the rows of the fast
tier too: it commits all rows of both tiers, and the fast tier of the process that opens the store
next begins empty.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from emblib.specs import DynamicSpec, InsertPolicy, OptionEnum, check_bool, check_count
from emblib.tables.parameters import caller_level

BATCH = 1 << 16  # rows per batch when all rows of a table are moved


class StoredTable(NamedTuple):
    """Name and row size of a table in a store."""

    name: str
    row_bytes: int


class StoredRows(NamedTuple):
    """Rows of one table, on the CPU; keys are distinct, except in `FoundRows` of repeated keys.

    Attributes:
        keys: int64 `[n]`.
        stamps: int64 `[n]`, tick of the last use.
        scores: int64 `[n]`, 0 where the order of eviction has no scores.
        values: uint8 `[n, row_bytes]`, weights and then optimizer states.
    """

    keys: Tensor
    stamps: Tensor
    scores: Tensor
    values: Tensor

    @classmethod
    def none(cls, row_bytes: int) -> "StoredRows":
        """Return 0 rows of a table with `row_bytes` bytes per row."""
        words = torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(words, words, words, torch.empty(0, row_bytes, dtype=torch.uint8, device="cpu"))

    @classmethod
    def from_words(cls, words: Tensor, values: Tensor) -> "StoredRows":
        """Make rows from keys, stamps and scores as int64 `[3, n]`, without a copy."""
        keys, stamps, scores = words.unbind()
        return cls(keys, stamps, scores, values)

    @classmethod
    def from_entries(cls, entries: Tensor, values: Tensor) -> "StoredRows":
        """Make rows from keys, stamps and scores as int64 `[n, 3]`, as views with a stride."""
        keys, stamps, scores = entries.unbind(1)
        return cls(keys, stamps, scores, values)

    def at(self, select: Tensor) -> "StoredRows":
        """Return copies of the rows that a mask, bool `[n]`, or positions, int64, select."""
        return StoredRows(*(column[select] for column in self))

    def split(self, block_rows: int = BATCH) -> Iterator["StoredRows"]:
        """Yield the rows as views, at most `block_rows` at a time."""
        for columns in zip(*(column.split(block_rows) for column in self), strict=True):
            if columns[0].numel():
                yield StoredRows(*columns)

    @classmethod
    def concatenate(cls, blocks: Iterable["StoredRows"], row_bytes: int) -> "StoredRows":
        """Return copies of the rows of all blocks; there may be none."""
        blocks = [cls.none(row_bytes), *blocks]
        return cls(*(torch.cat(columns) for columns in zip(*blocks, strict=True)))


class FoundRows(NamedTuple):
    """Rows of those queried keys that a store has.

    Attributes:
        positions: int64 `[m]`, in any order: row i belongs to key `positions[i]` of the query.
        rows: the m rows. A key that the query repeats has one row per position.
    """

    positions: Tensor
    rows: StoredRows


@runtime_checkable
class RowStore(Protocol):
    """Store rows of several tables by key; tensors are on the CPU, all int64 keys are legal.

    Arguments `table` are numbers of the tables passed to `open`, `keys` are int64 `[n]`, distinct
    except in `read`. Returned tensors are copies.

    Calls come from one thread at a time, but not always from the same one: `prefetch` and
    `BackingStore(write_behind=True)` call the store in a thread of their own. A call that raises
    its own error has changed nothing. An exception from outside (Ctrl-C, a lack of memory) may end
    a call anywhere; the caller then repeats `lift`, `put`, `erase`, `expire` and `clear` with the
    same arguments.

    Attributes:
        note: the text passed to the last `flush`; empty in a new store.

    Example:
        >>> isinstance(emblib.HostRows(capacity=1_000), emblib.RowStore)
        True
    """

    note: str

    def open(self, tables: Sequence[StoredTable]) -> None:
        """Open the store for tables, new or stored; it is the first call.

        Raises:
            ValueError: the store has other tables.
        """

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """Return the rows of those keys that are in the store; keys may repeat."""

    def lift(self, table: int, keys: Tensor) -> None:
        """Remove rows that were promoted; keys that are not in the store are ignored."""

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """Add rows, replacing those with the same keys.

        Return the rows that were dropped for want of room, which may be some of `rows`.
        """

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Remove keys; return which were in the store, bool `[n]`."""

    def expire(self, table: int, before: int) -> Tensor:
        """Remove rows with a stamp below `before`; return their keys, int64 `[n]`."""

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """Yield all rows of a table, at most `batch` at a time.

        The caller does not change the table until the iterator ends.
        """

    def size(self, table: int) -> int:
        """Return the number of rows of a table in the store."""

    def clear(self, table: int) -> None:
        """Remove all rows of a table."""

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """Commit the store, the rows of the fast tier by table, and a note.

        It returns once they are durable. `fast_rows` has one iterable per table, which is consumed
        once. A store that does not outlive the process only keeps the note.
        """

    def close(self) -> None:
        """Close the store, so that others can open it; undo changes since the last flush."""


def check_table(table: int, tables: Sequence[StoredTable]) -> None:
    """Raise IndexError unless `table` is the number of one of `tables`, those of `open`."""
    if table not in range(len(tables)):
        raise IndexError(f"table must be in [0, {len(tables)}), as passed to open(), got {table!r}")


def not_open_error(path: Path) -> RuntimeError:
    """Return the error of a store in files that is closed, or opened by another process."""
    return RuntimeError(
        f"the store in {path} is not open in this process: call open(tables) first (a forked "
        "process cannot use the store of its parent)"
    )


def check_rows(table: StoredTable, rows: StoredRows) -> StoredRows:
    """Return rows as contiguous CPU tensors; raise ValueError unless their shapes fit the table.

    Dtypes are not checked.
    """
    num_rows = rows.keys.numel()
    shapes = [tuple(buffer.shape) for buffer in rows]
    if shapes != [(num_rows,), (num_rows,), (num_rows,), (num_rows, table.row_bytes)]:
        raise ValueError(
            f"rows of {table.name} need keys, stamps and scores of shape [n] and values of shape "
            f"[n, {table.row_bytes}], got {shapes}"
        )
    return StoredRows(*(buffer.detach().to("cpu").contiguous() for buffer in rows))


def match_keys(keys: Tensor, rows: StoredRows) -> FoundRows:
    """Return the row of each key, int64 `[n]`, that has one among `rows`, in the order of keys.

    `keys` may repeat; the keys of `rows` must be distinct. Both may be in any order.
    """
    if not rows.keys.numel():
        return FoundRows(rows.keys, rows)
    sorted_keys, order = rows.keys, None
    if not bool((sorted_keys[1:] > sorted_keys[:-1]).all()):  # prefetched rows often ascend
        sorted_keys, order = sorted_keys.sort()
    indices = torch.searchsorted(sorted_keys, keys).clamp_(max=sorted_keys.numel() - 1)
    positions = (sorted_keys[indices] == keys).nonzero().squeeze(1)
    indices = indices[positions]
    return FoundRows(positions, rows.at(indices if order is None else order[indices]))


class StoreShard(NamedTuple):
    """One shard of a table of a collection, which gets a store of its own.

    Attributes:
        name: name of the table.
        shard: number of the shard and number of shards; None for a table that is not sharded.
        seed: seed of hashes that the store needs, the same for all shards.
    """

    name: str
    shard: tuple[int, int] | None = None
    seed: int = 0

    @property
    def label(self) -> str:
        """Return a name for files that no other shard has: `user`, or `user.0_of_4`."""
        if self.shard is None:
            return self.name
        shard_index, num_shards = self.shard
        return f"{self.name}.{shard_index}_of_{num_shards}"

    def divide(self, capacity: int) -> int:
        """Return the shard's part of a number of rows, rounded up."""
        return capacity if self.shard is None else -(-capacity // self.shard[1])

    def warn_of_others(self, directory: Path) -> None:
        """Warn once per table if a directory has stores for another number of shards."""
        if self.shard is None or self.shard[0] or not directory.is_dir():
            return
        pattern = re.compile(rf"{re.escape(self.name)}\.\d+_of_(\d+)(\.|$)")
        shard_counts = {
            int(match[1]) for path in directory.iterdir() if (match := pattern.match(path.name))
        }
        other_counts = sorted(shard_counts - {self.shard[1]})
        if other_counts:
            warnings.warn(
                f"emblib: {directory} has stores of table {self.name!r} for {other_counts} shards, "
                f"this model has {self.shard[1]}: their rows are not read. Load a checkpoint, "
                "which has the rows for any number of shards, and then delete them",
                stacklevel=caller_level(),
            )


@runtime_checkable
class ShardableStore(Protocol):
    """A `RowStore` that can construct similar stores, one per shard of a collection's tables."""

    def for_shard(self, shard: StoreShard) -> RowStore:
        """Return a new store with the options of this one, for one shard of a table."""


class TierMode(OptionEnum):
    """Rule that selects which rows of the store are promoted when a batch uses them.

    CACHING promotes all rows. HYBRID promotes rows that rank above the row that they would replace;
    new keys that rank lower start in the store. With LRU both modes are the same, since the last
    used row ranks highest.

    Example:
        >>> emblib.BackingStore(emblib.HostRows(1_000), mode=emblib.TierMode.HYBRID).mode
        <TierMode.HYBRID: 'hybrid'>
    """

    CACHING = "caching"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class BackingStore:
    """A store behind all tables of a module; their `capacity` is then the size of the fast tier.

    Args:
        store: store of the rows that have no slot in the fast tier: `HostRows`, `DiskRows`,
            `SqliteRows`, or any `RowStore`. One module at a time may have it open.
        mode: rule that selects the rows to promote.
        max_misses: maximum number of ids of a table per batch that are not in the fast tier. Each
            reserves an overflow row, so None is 2^20 on the CPU, where they take only address
            space, and 2^16 on CUDA, where they take memory.
        write_behind: whether another thread removes promoted rows from the store and adds demoted
            ones, while the caller continues the step. Results are the same. The store's methods
            are then called by either thread, though only by one at a time.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there is no mode of this name, or `max_misses` is below 1.

    Example:
        >>> backing = emblib.BackingStore(emblib.HostRows(capacity=1_000))
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.SGD(0.1), backing=backing)
        >>> for first in (0, 32, 64):  # 96 keys, of which 32 fit in the fast tier
        ...     pooled = bags(torch.arange(first, first + 32), torch.tensor([0, 32]))
        >>> bags.size(0), bags.capacity(0)
        (96, 32)
    """

    store: RowStore
    mode: TierMode = TierMode.CACHING
    max_misses: int | None = None
    write_behind: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.store, RowStore):
            raise TypeError(
                "store must be a RowStore, e.g. HostRows(1_000_000) or DiskRows(directory), got "
                f"{self.store!r}"
            )
        object.__setattr__(self, "mode", TierMode(self.mode))
        check_bool("write_behind", self.write_behind)
        if self.max_misses is not None:
            object.__setattr__(self, "max_misses", check_count("max_misses", self.max_misses))

    def check_shardable(self) -> None:
        """Raise TypeError unless each shard of a table can get a store of its own."""
        if not isinstance(self.store, ShardableStore):
            raise TypeError(
                "every shard of a table of a collection has a store of its own: give "
                f"{type(self.store).__name__} a method for_shard(shard) that returns the store of "
                "a shard, known by shard.label, see docs/tiers.md"
            )

    def for_shard(self, shard: StoreShard) -> "BackingStore":
        """Return a copy with a separate store for one shard of a table."""
        self.check_shardable()
        store: Any = self.store
        return replace(self, store=store.for_shard(shard))

    def overflow_rows(self, device: torch.device) -> int:
        """Return the number of overflow rows per table on a device: `max_misses` or its default."""
        if self.max_misses is not None:
            return self.max_misses
        return 1 << (20 if device.type == "cpu" else 16)

    def with_insert_policy(
        self, tables: DynamicSpec | Sequence[DynamicSpec]
    ) -> Sequence[DynamicSpec]:
        """Return tables with the insert policy that the mode needs."""
        promotes_all = self.mode is TierMode.CACHING
        policy = InsertPolicy.ALWAYS_EVICT if promotes_all else InsertPolicy.EVICT_IF_LOWER
        specs = (tables,) if isinstance(tables, DynamicSpec) else tables
        return [replace(spec, insert_policy=policy) for spec in specs]


def check_backing(backing: object) -> None:
    """Raise TypeError unless an argument is a `BackingStore`."""
    if not isinstance(backing, BackingStore):
        raise TypeError(
            f"backing must be a BackingStore, e.g. BackingStore(HostRows(1_000_000)), got "
            f"{backing!r}"
        )


@dataclass(frozen=True)
class TierStats:
    """Counts of the tiers of a table in training, since construction or the last reset.

    Attributes:
        lookups: positions of batches.
        hits: lookups whose key was in the fast tier.
        backing_hits: distinct keys per batch that were in the store, summed over batches.
        prefetched: backing hits whose rows `prefetch` had read into memory.
        new: distinct keys per batch that were in neither tier, summed over batches.
        promoted: rows that moved from the store to the fast tier.
        demoted: rows that moved from the fast tier to the store.
        served_in_place: rows that found no slot, new ones included. A batch reads and updates them
            in overflow rows, and they are then written to the store.
        dropped: rows that the store dropped because it was full.
    """

    lookups: int
    hits: int
    backing_hits: int
    prefetched: int
    new: int
    promoted: int
    demoted: int
    served_in_place: int
    dropped: int

    @property
    def hit_rate(self) -> float:
        """Return the fraction of lookups that hit the fast tier; NaN without lookups."""
        return self.hits / self.lookups if self.lookups else float("nan")
