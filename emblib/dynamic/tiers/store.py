"""The tier behind dynamic tables: rows by key, in memory, in files or in a database of your own.

A `RowStore` holds rows that the tier above has no room for. Each key of a table is in one of the
two tiers: a row that moves up is read and lifted, one that moves down is put. Values are bytes to
the store, the weights of a row and then its optimizer states, so a store knows nothing of dtypes.

A store that outlives the process has commits. What `flush` returned from is what `open` leads back
to, whole and unchanged, however the process ends afterwards; what came later is undone. Hence
`flush` is told what is above: committed are all rows of both tiers, and the tier above of the
process that opens the store next begins empty.
"""

import concurrent.futures
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from emblib.specs import Choice, check_count
from emblib.tables.locks import call_in_forks

BATCH = 1 << 16  # rows that are on their way at a time, where all of a table are


class StoredTable(NamedTuple):
    """A table as its store knows it."""

    name: str
    row_bytes: int


class Rows(NamedTuple):
    """Rows of one table, on the CPU.

    `keys`, `stamps` (tick of last use) and `scores` are int64 `[n]`, `values` uint8
    `[n, row_bytes]`. Keys are distinct.
    """

    keys: Tensor
    stamps: Tensor
    scores: Tensor
    values: Tensor

    @classmethod
    def none(cls, row_bytes: int) -> "Rows":
        """No rows."""
        no = torch.empty(0, dtype=torch.int64)
        return cls(no, no, no, torch.empty(0, row_bytes, dtype=torch.uint8))

    @classmethod
    def of(cls, words: Tensor, values: Tensor) -> "Rows":
        """From keys, stamps and scores as int64 `[3, n]`."""
        keys, stamps, scores = words.unbind()
        return cls(keys, stamps, scores, values)

    def at(self, select: Tensor) -> "Rows":
        """Those that a mask or positions select."""
        return Rows(*(part[select] for part in self))

    def split(self, size: int = BATCH) -> Iterator["Rows"]:
        """The same rows in batches."""
        for parts in zip(*(part.split(size) for part in self), strict=True):
            if parts[0].numel():
                yield Rows(*parts)

    @classmethod
    def joined(cls, parts: Iterable["Rows"], row_bytes: int) -> "Rows":
        """The rows of all parts."""
        parts = [cls.none(row_bytes), *parts]
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))


class Found(NamedTuple):
    """What a store has of the keys it was asked for: `rows[i]` is of key number `positions[i]`."""

    positions: Tensor
    rows: Rows


@runtime_checkable
class RowStore(Protocol):
    """Rows of several tables by key; all tensors are on the CPU, all keys of int64 are legal.

    Calls come from one thread at a time. A call that raises has changed nothing.

    Attributes:
        note: the text that the last `flush` was given; empty in a new store.
    """

    note: str

    def open(self, tables: Sequence[StoredTable]) -> None:
        """Get ready for tables, or for those that are there already; comes before all else."""

    def read(self, table: int, keys: Tensor) -> Found:
        """The rows of the keys that are here, which stay; keys may repeat."""

    def lift(self, table: int, keys: Tensor) -> None:
        """These rows are in the tier above from now on; keys that are not here do nothing."""

    def put(self, table: int, rows: Rows) -> Rows:
        """Take rows in, in the place of those with the same keys; returns what left for it."""

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Forget keys; bool by key, whether it was here. Keys are distinct."""

    def expire(self, table: int, before: int) -> Tensor:
        """Forget rows with a stamp less than `before`; returns their keys."""

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[Rows]:
        """All rows that are here, in batches; the table is not changed meanwhile."""

    def size(self, table: int) -> int:
        """How many rows of a table are here."""

    def clear(self, table: int) -> None:
        """Forget all rows of a table."""

    def flush(self, above: Sequence[Iterable[Rows]], note: str) -> None:
        """Commit what is here, the rows of each table that are above, and a note.

        Where nothing outlives the process, it only keeps the note.
        """

    def close(self) -> None:
        """Let others open the store; what was not committed is undone."""


def check_row(table: StoredTable, rows: Rows) -> Rows:
    """The rows as contiguous CPU tensors; they must be as wide as those of the table."""
    count = rows.keys.numel()
    shapes = [tuple(part.shape) for part in rows]
    if shapes != [(count,), (count,), (count,), (count, table.row_bytes)]:
        raise ValueError(
            f"rows of {table.name} need keys, stamps and scores of shape [n] and values of shape "
            f"[n, {table.row_bytes}], got {shapes}"
        )
    return Rows(*(part.detach().to("cpu").contiguous() for part in rows))


def matched(keys: Tensor, rows: Rows) -> Found:
    """The rows, which come in any order, by the position of the key that asked for them."""
    if not rows.keys.numel():
        return Found(rows.keys, rows)
    ordered, order = rows.keys.sort()
    at = torch.searchsorted(ordered, keys).clamp_(max=ordered.numel() - 1)
    positions = (ordered[at] == keys).nonzero().squeeze(1)
    return Found(positions, rows.at(order[at[positions]]))


class TierMode(Choice):
    """Which rows of the lower tier move up when a batch uses them.

    CACHING: all. HYBRID: those that rank above what they would replace; so do new keys, the others
    begin below. By LRU what was used last ranks highest, so there both are the same.
    """

    CACHING = "caching"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class Tiers:
    """A lower tier behind all tables of a module, whose `capacity` is then that of the fast tier.

    Args:
        store: where rows are that the fast tier has no room for: `HostRows`, `DiskRows`,
            `SqliteRows`, or any `RowStore`. It belongs to the module.
        mode: which rows move up.
        beside: most rows of a table that a batch may miss in the fast tier; left out, 2^20 on the
            CPU, where they take address space alone, and 2^16 on CUDA, where they take memory.
    """

    store: RowStore
    mode: TierMode = TierMode.CACHING
    beside: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.store, RowStore):
            raise TypeError(
                "store must be a RowStore, e.g. HostRows(1_000_000) or DiskRows(directory), got "
                f"{self.store!r}"
            )
        object.__setattr__(self, "mode", TierMode(self.mode))
        if self.beside is not None:
            object.__setattr__(self, "beside", check_count("beside", self.beside))

    def rows_beside(self, device: torch.device) -> int:
        """`beside`, as given or left out."""
        if self.beside is not None:
            return self.beside
        return 1 << (20 if device.type == "cpu" else 16)


@dataclass(frozen=True)
class TierStats:
    """What the tiers of a table had, since construction or the last reset; training only.

    Attributes:
        lookups: positions of batches.
        hits: those whose key was in the fast tier.
        found_below: distinct keys of batches, summed over batches, that were in the lower tier.
        staged: those of them that `prefetch` had brought into memory.
        new: distinct keys that were in neither.
        promoted: rows that moved up.
        demoted: rows that moved down.
        served_below: rows that a batch read and trained in the lower tier, new ones among them.
        left: rows that left the lower tier to make room there, and are gone.
    """

    lookups: int
    hits: int
    backing_hits: int
    staged: int
    new: int
    promoted: int
    demoted: int
    served_in_place: int
    left: int

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that the fast tier had; NaN without any."""
        return self.hits / self.lookups if self.lookups else float("nan")


MOST_STAGED = 1 << 20  # rows of a table


class StagedRows:
    """A `RowStore` in front of another: what was fetched ahead is read from memory.

    Fetching is done by a thread of its own, one call to the store at a time. Staged rows are
    copies, the last `MOST_STAGED` a table: the store behind has them too, and lets them go as if
    they were not staged, so whether a row is staged changes no answer. Rows that it could not take
    are held here, and committed by `flush` as rows above.
    """

    def __init__(self, store: RowStore, tables: Sequence[StoredTable]) -> None:
        store.open(tables)
        self.behind = store
        self.note = store.note
        self._widths = [table.row_bytes for table in tables]
        self._held: list[list[Rows]] = [[] for _ in tables]
        self._staged: list[list[Rows]] = [[] for _ in tables]
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._fetching: list[Future[None]] = []
        self.staged_reads = 0
        call_in_forks(self)

    def after_fork(self) -> None:
        """Wait neither for the thread of the parent nor for the lock that it may have held.

        That thread only adds to what is staged, one list entry at a time.
        """
        self._thread, self._fetching = None, []
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def fetch(self, table: int, keys: Tensor) -> None:
        """Have the rows of distinct keys in memory soon.

        Raises:
            Exception: what the store raised while it fetched for an earlier call.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "emblib rows")
        done = [future for future in self._fetching if future.done()]
        self._fetching = [future for future in self._fetching if future not in done]
        self._fetching.append(self._thread.submit(_fetch, weakref.ref(self), table, keys))
        _raise_first(done)

    def wait(self) -> None:
        """Until nothing is being fetched any more.

        Raises:
            Exception: the first one that the store raised meanwhile.
        """
        fetching, self._fetching = self._fetching, []
        concurrent.futures.wait(fetching)
        _raise_first(fetching)

    def keep(self, table: int, rows: Rows) -> None:
        """Hold rows that the store behind has not, or could not take."""
        with self._lock:
            if rows.keys.numel():
                self._let_go(table, rows.keys)
                self._held[table].append(rows)

    def _stage(self, table: int, keys: Tensor) -> None:
        with self._lock:
            staged = self._staged[table]
            known = torch.cat([keys[:0], *(rows.keys for rows in staged)])
            rows = self.behind.read(table, keys[~torch.isin(keys, known)]).rows
            count = known.numel() + rows.keys.numel()
            if rows.keys.numel():
                staged.append(rows)
            while count > MOST_STAGED and len(staged) > 1:
                count -= staged.pop(0).keys.numel()

    def _let_go(self, table: int, keys: Tensor) -> None:
        for parts in (self._held[table], self._staged[table]) if keys.numel() else ():
            kept = []
            for rows in parts:
                stays = ~torch.isin(rows.keys, keys)
                if stays.any():
                    kept.append(rows if stays.all() else rows.at(stays))
            parts[:] = kept

    def open(self, tables: Sequence[StoredTable]) -> None:
        """It is open already."""

    def read(self, table: int, keys: Tensor) -> Found:
        """See `RowStore`."""
        with self._lock:
            asked = torch.arange(keys.numel())
            founds = []
            for rows in (*self._held[table], *self._staged[table]):
                found = matched(keys[asked], rows)
                founds.append(Found(asked[found.positions], found.rows))
                left = torch.ones_like(asked, dtype=torch.bool)
                left[found.positions] = False
                asked = asked[left]
            self.staged_reads += keys.numel() - asked.numel()
            found = self.behind.read(table, keys[asked])
            founds.append(Found(asked[found.positions], found.rows))
            rows = Rows.joined((found.rows for found in founds), self._widths[table])
            return Found(torch.cat([found.positions for found in founds]), rows)

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            self._let_go(table, keys)
            self.behind.lift(table, keys)

    def put(self, table: int, rows: Rows) -> Rows:
        """See `RowStore`."""
        with self._lock:
            left = self.behind.put(table, rows)
            self._let_go(table, torch.cat([rows.keys, left.keys]))
            return left

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        with self._lock:
            here = torch.zeros(keys.numel(), dtype=torch.bool)
            here[self.read(table, keys).positions] = True
            self._let_go(table, keys)
            self.behind.erase(table, keys)
            return here

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        with self._lock:
            old = [rows.keys[rows.stamps < before] for rows in self._held[table]]
            gone = torch.cat([*old, self.behind.expire(table, before)])
            self._let_go(table, gone)
            return gone

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[Rows]:
        """See `RowStore`."""
        self.wait()
        for rows in self._held[table]:
            yield from rows.split(batch)
        yield from self.behind.iterate(table, batch)

    def size(self, table: int) -> int:
        """See `RowStore`."""
        with self._lock:
            held = sum(rows.keys.numel() for rows in self._held[table])
            return held + self.behind.size(table)

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self.wait()
        self._held[table], self._staged[table] = [], []
        self.behind.clear(table)

    def flush(self, above: Sequence[Iterable[Rows]], note: str) -> None:
        """See `RowStore`."""
        self.wait()
        with self._lock:
            both = [itertools.chain(*pair) for pair in zip(self._held, above, strict=True)]
            self.behind.flush(both, note)
            self.note = note

    def close(self) -> None:
        """See `RowStore`."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.behind.close()


def _raise_first(fetched: Sequence[Future[None]]) -> None:
    for future in fetched:
        future.result()


def _fetch(staged: "weakref.ref[StagedRows]", table: int, keys: Tensor) -> None:
    """What the thread does; it keeps no store open that nobody uses any more."""
    rows = staged()
    if rows is not None:
        rows._stage(table, keys)
