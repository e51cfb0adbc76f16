"""PrefetchedRows: a store with a thread that reads rows in advance and moves rows between tiers."""

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.store import (
    BATCH,
    FoundRows,
    RowStore,
    StoredRows,
    StoredTable,
    matched,
)
from emblib.ops.tiers import SwappedMisses
from emblib.tables.locks import call_in_forks

MAX_PREFETCHED = 1 << 20  # rows per table
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _exclusive(
    method: Callable[Concatenate["PrefetchedRows", _P], _R],
) -> Callable[Concatenate["PrefetchedRows", _P], _R]:
    """Make a method hold the lock of the store while it runs, like `emblib.tables.locks.atomic`."""

    @functools.wraps(method)
    def call(self: "PrefetchedRows", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701

    return call


class RowMoves:
    """Rows that are moving between the tiers, by table.

    `PrefetchedRows.make` removes each from here once the store has removed or taken it, so it can
    be called again, by any thread, and makes the rest.

    Attributes:
        exchanged: promoted keys and demoted rows of tables in front of a `HostRows`.
        promoted: keys that have a slot and are still in the store.
        demoted: rows that have no slot and are not yet in the store.
        dropped: tables, and keys that the store has dropped for demoted rows of the table.
        errors: exceptions of the store that no caller has seen yet.
    """

    def __init__(self) -> None:
        self.exchanged: dict[int, SwappedMisses] = {}
        self.promoted: dict[int, Tensor] = {}
        self.demoted: dict[int, StoredRows] = {}
        self.dropped: list[tuple[int, Tensor]] = []
        self.errors: list[Exception] = []


class PrefetchedRows:
    """A `RowStore` in front of another that reads prefetched rows from memory.

    Another thread prefetches and moves rows; calls to the store are made one at a time. It changes
    nothing but the store, this object and `RowMoves`. Prefetched rows, the last
    `MAX_PREFETCHED` per table, are copies of rows that stay in the store, so prefetching changes no
    result. Rows that the store could not take are kept in memory, and committed by `flush` like
    rows of the fast tier.
    """

    def __init__(self, store: RowStore, tables: Sequence[StoredTable]) -> None:
        store.open(tables)
        self.behind = store
        self.note = store.note
        self._widths = [table.row_bytes for table in tables]
        self._kept_rows: list[list[StoredRows]] = [[] for _ in tables]
        self._prefetched: list[list[StoredRows]] = [[] for _ in tables]
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []
        self._started: RowMoves | None = None
        _stores.add(self)
        call_in_forks(self)

    def before_fork(self) -> None:
        """Make the moves that were started; no other thread is in the store until `release`."""
        self._lock.acquire()
        if self._started is not None:
            self.attempt(self._started)

    def release(self) -> None:
        """Let other threads use the store again, after a fork, in either process."""
        self._lock.release()

    def after_fork(self) -> None:
        """Drop the thread of the parent, and its work."""
        self._thread, self._futures = None, []

    def start(self, moves: RowMoves) -> None:
        """Have the thread make moves; call `make` before anything that depends on them."""
        self._started = moves
        # If there is no thread (at exit, or since there are too many), the next call makes them.
        with contextlib.suppress(RuntimeError):
            self._submit(_make_moves, moves)

    @_exclusive
    def attempt(self, moves: RowMoves) -> None:
        """Make moves, and note the error of the store, if there is one, for the next `make`."""
        try:
            self._make_moves(moves)
        except Exception as error:
            moves.errors.append(error)

    @_exclusive
    def make(self, moves: RowMoves) -> None:
        """Make moves, or the rest of them.

        After an error the next call removes promoted rows again. Demoted rows that the store cannot
        take stay in memory until `flush`.

        Raises:
            Exception: the store raised it, in this call or in the thread.
        """
        try:
            self._make_moves(moves)
        except Exception:
            moves.errors = []
            raise
        self._started = None
        if moves.errors:
            errors, moves.errors = moves.errors, []
            raise errors[0]

    @_exclusive
    def cancel(self, moves: RowMoves) -> None:
        """Forget moves that are not made yet."""
        for rows in (moves.exchanged, moves.promoted, moves.demoted):
            rows.clear()
        moves.errors = []

    def _make_moves(self, moves: RowMoves) -> None:
        """Make all moves of a step; those that are done are removed from `moves`."""
        for t in list(moves.exchanged):
            rows = moves.exchanged[t]
            dropped = self.exchange(t, rows.promoted, rows.demoted, rows.demoted_rows)
            moves.dropped.append((t, dropped))
            del moves.exchanged[t]
        try:
            for t in list(moves.promoted):
                self.lift(t, moves.promoted[t])
                del moves.promoted[t]
        finally:
            failed: Exception | None = None
            for t in list(moves.demoted):
                try:
                    self._put_with_retry(t, moves)
                except Exception as error:
                    self.keep(t, moves.demoted[t])
                    failed = error
                del moves.demoted[t]
            if failed is not None:
                raise failed

    def _put_with_retry(self, table: int, moves: RowMoves) -> None:
        """Put demoted rows; try once more after an error other than of the disk.

        Such an error, e.g. a lack of memory, may have ended the `put` in the middle; a second call
        completes it. The rows that the first call dropped are then not counted.
        """
        rows = moves.demoted[table]
        if not rows.keys.numel():
            return
        try:
            dropped = self.put(table, rows).keys
        except OSError:
            raise
        except Exception:
            dropped = self.put(table, rows).keys
        moves.dropped.append((table, dropped))

    def prefetch(self, table: int, keys: Tensor) -> None:
        """Start reading the rows of keys into memory.

        Raises:
            Exception: the store raised it in an earlier prefetch.
        """
        finished = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in finished]
        self._futures.append(self._submit(_prefetch, table, keys))
        _raise_first(finished)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Call a function in the store's thread, with a weak reference to this object."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "emblib rows")
        return self._thread.submit(function, weakref.ref(self), *arguments)

    def wait(self) -> None:
        """Wait until no prefetch is running.

        Raises:
            Exception: the first one that the store raised meanwhile.
        """
        futures, self._futures = self._futures, []
        concurrent.futures.wait(futures)
        _raise_first(futures)

    @_exclusive
    def keep(self, table: int, rows: StoredRows) -> None:
        """Keep rows in memory that the store behind could not take."""
        if rows.keys.numel():
            self._drop_pending(table, rows.keys)
            self._kept_rows[table].append(rows)

    @property
    def has_rows_in_memory(self) -> bool:
        """Return whether rows are kept in memory in front of the store."""
        return any(self._kept_rows) or any(self._prefetched)

    @_exclusive
    def count_prefetched(self, table: int, keys: Tensor) -> int:
        """Return the number of `keys` with a prefetched row."""
        blocks = (*self._kept_rows[table], *self._prefetched[table])
        return int(torch.isin(keys, torch.cat([p.keys for p in blocks])).sum()) if blocks else 0

    @_exclusive
    def read_ahead(self, table: int, keys: Tensor) -> None:
        """Read rows that are not in memory yet from the store."""
        keys, prefetched = keys.unique(), self._prefetched[table]
        present_keys = torch.cat([keys[:0], *(rows.keys for rows in prefetched)])
        rows = self.behind.read(table, keys[~torch.isin(keys, present_keys)]).rows
        count = present_keys.numel() + rows.keys.numel()
        if rows.keys.numel():
            prefetched.append(rows)
        while count > MAX_PREFETCHED and len(prefetched) > 1:
            count -= prefetched.pop(0).keys.numel()

    def _drop_pending(self, table: int, keys: Tensor) -> None:
        """Drop the rows of keys that were prefetched or are kept in memory."""
        self._drop_prefetched(table, keys)
        if keys.numel() and self._kept_rows[table]:
            self._kept_rows[table][:] = _drop_keys(self._kept_rows[table], keys)

    def _drop_prefetched(self, table: int, keys: Tensor) -> None:
        if keys.numel() and self._prefetched[table]:
            self._prefetched[table][:] = _drop_keys(self._prefetched[table], keys)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """Do nothing, since the store behind is open already."""

    @_exclusive
    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        blocks = (*self._kept_rows[table], *self._prefetched[table])
        if not blocks:
            return self.behind.read(table, keys)
        positions = torch.arange(keys.numel())
        founds = []
        for rows in blocks:
            records = matched(keys[positions], rows)
            founds.append(FoundRows(positions[records.positions], records.rows))
            is_left = torch.ones_like(positions, dtype=torch.bool)
            is_left[records.positions] = False
            positions = positions[is_left]
        records = self.behind.read(table, keys[positions])
        founds.append(FoundRows(positions[records.positions], records.rows))
        rows = StoredRows.concatenate((records.rows for records in founds), self._widths[table])
        return FoundRows(torch.cat([records.positions for records in founds]), rows)

    @_exclusive
    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        self._drop_pending(table, keys)
        self.behind.lift(table, keys)

    @_exclusive
    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`."""
        # Copies of rows that are about to be replaced must not outlive an interruption.
        self._drop_prefetched(table, rows.keys)
        left_over = self.behind.put(table, rows)
        if self._kept_rows[table] or self._prefetched[table]:
            self._drop_pending(table, torch.cat([rows.keys, left_over.keys]))
        return left_over

    @_exclusive
    def exchange(self, table: int, lifted: Tensor, entries: Tensor, values: Tensor) -> Tensor:
        """Lift rows from a `HostRows` and put others into it; return the keys of dropped rows."""
        if self.has_rows_in_memory:
            self._drop_pending(table, torch.cat([lifted, entries[:, 0]]))
        assert isinstance(self.behind, HostRows)
        return self.behind.exchange(table, lifted, entries, values)

    @_exclusive
    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        is_erased = torch.zeros(keys.numel(), dtype=torch.bool)
        is_erased[self.read(table, keys).positions] = True
        self._drop_pending(table, keys)
        self.behind.erase(table, keys)
        return is_erased

    @_exclusive
    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        expired_keys = [rows.keys[rows.stamps < before] for rows in self._kept_rows[table]]
        expired = torch.cat([*expired_keys, self.behind.expire(table, before)])
        self._drop_pending(table, expired)
        return expired

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`."""
        self.wait()
        for rows in self._kept_rows[table]:
            yield from rows.split(batch)
        pending = self._kept_keys(table)
        for rows in self.behind.iterate(table, batch):
            # A `put` that raised may have stored some of the rows that are also kept in memory.
            yield rows.at(~torch.isin(rows.keys, pending)) if pending.numel() else rows

    def _kept_keys(self, table: int) -> Tensor:
        """Return the keys of the rows that are kept in memory, int64 `[n]`."""
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *(rows.keys for rows in self._kept_rows[table])])

    @_exclusive
    def size(self, table: int) -> int:
        """See `RowStore`."""
        size, pending = self.behind.size(table), self._kept_keys(table)
        if not pending.numel():
            return size
        return size + pending.numel() - self.behind.read(table, pending).positions.numel()

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self.wait()
        self._kept_rows[table], self._prefetched[table] = [], []
        self.behind.clear(table)

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`."""
        self.wait()
        self._flush(fast_rows, note)

    @_exclusive
    def _flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """Commit the store with the rows kept in memory and those of the fast tier."""
        blocks_by_table = [
            itertools.chain(*pair) for pair in zip(self._kept_rows, fast_rows, strict=True)
        ]
        self.behind.flush(blocks_by_table, note)
        self.note = note

    def stop(self) -> None:
        """Have the thread end its work, and then itself."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def close(self) -> None:
        """See `RowStore`."""
        self.stop()
        self.behind.close()


def _drop_keys(blocks: Sequence[StoredRows], keys: Tensor) -> list[StoredRows]:
    """Return rows without those of some keys."""
    remaining = []
    for rows in blocks:
        stays = ~torch.isin(rows.keys, keys)
        if stays.any():
            remaining.append(rows if stays.all() else rows.at(stays))
    return remaining


def _raise_first(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def _prefetch(store: "weakref.ref[PrefetchedRows]", table: int, keys: Tensor) -> None:
    """Read rows in the thread; a store that was deleted meanwhile is not kept open."""
    rows = store()
    if rows is not None:
        rows.read_ahead(table, keys)


def _make_moves(store: "weakref.ref[PrefetchedRows]", moves: RowMoves) -> None:
    """Make moves in the thread."""
    rows = store()
    if rows is not None:
        rows.attempt(moves)


_stores: "weakref.WeakSet[PrefetchedRows]" = weakref.WeakSet()
_forking = threading.RLock()
_stores_at_fork: list[PrefetchedRows] = []  # whose locks the forking thread holds


_collects_garbage: list[bool] = []  # whether the collector is to be enabled after the fork


def _before_fork() -> None:
    """Wait until no store is in a call, and keep their locks over the fork."""
    _forking.acquire()
    # A collected `BackingTier` waits for its thread, which may wait for a lock taken below.
    _collects_garbage.append(gc.isenabled())
    gc.disable()
    for store in list(_stores):
        _stores_at_fork.append(store)
        store.before_fork()


def _after_fork() -> None:
    """Release the locks that `_before_fork` took, in parent and child."""
    if _collects_garbage and _collects_garbage.pop():
        gc.enable()
    releases = [_forking.release, *(store.release for store in _stores_at_fork)]
    _stores_at_fork.clear()
    for release in reversed(releases):
        with contextlib.suppress(RuntimeError):  # Ctrl-C has ended `_before_fork`
            release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
