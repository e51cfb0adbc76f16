"""The store behind dynamic tables with rows of it that were fetched ahead, in memory."""

import concurrent.futures
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from emblib.dynamic.tiers.row_store import BATCH, Found, Rows, RowStore, StoredTable, matched
from emblib.tables.locks import call_in_forks

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
