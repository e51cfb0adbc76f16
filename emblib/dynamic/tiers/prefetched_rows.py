"""PrefetchedRows: a store with a thread that reads rows in advance and moves rows between tiers.

A training step produces `RowMoves`: keys to remove from the store, and rows to put into it. With
`BackingStore.write_behind` the store's thread applies the moves (`start_moves`), otherwise the next
call that depends on them (`apply_moves`). Likewise `start_prefetch` has the thread call `prefetch`.
"""

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

from emblib.columns import HashEntryColumn
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.store import (
    BATCH,
    FoundRows,
    RowStore,
    StoredRows,
    StoredTable,
    match_keys,
)
from emblib.ops.tiers import SwappedMisses
from emblib.tables.locks import call_in_forks

MAX_PREFETCHED = 1 << 20  # prefetched rows in memory per table; not measured
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
    """Rows that are moving between the tiers, by number of the table.

    `PrefetchedRows.apply_moves` removes each from here once the store has removed or taken it. So
    it can be called again, by any thread, and applies the rest. Once the moves are started, only
    the holder of the store's lock changes them.

    Attributes:
        exchanged: promoted keys and demoted rows of tables in front of a `HostRows`.
        promoted: keys that have a slot and are still in the store, int64 `[n]`.
        demoted: rows that have no slot and are not yet in the store.
        dropped: number of a table, and int64 `[n]`, keys that the store dropped for demoted rows.
        errors: exceptions of the store that no caller has seen yet.
    """

    def __init__(self) -> None:
        self.exchanged: dict[int, SwappedMisses] = {}
        self.promoted: dict[int, Tensor] = {}
        self.demoted: dict[int, StoredRows] = {}
        self.dropped: list[tuple[int, Tensor]] = []
        self.errors: list[Exception] = []

    def __bool__(self) -> bool:
        """Return whether there is anything to move or to report."""
        return bool(self.exchanged or self.promoted or self.demoted or self.dropped or self.errors)


class PrefetchedRows:
    """A `RowStore` in front of another that reads prefetched rows from memory.

    Another thread, started at first use, prefetches and moves rows. It changes nothing but the
    store, this object and `RowMoves`. Both threads hold `_lock` around each call to the store,
    except for `iterate`, `clear` and `close`. These three wait for prefetches first, and must not
    be called while another thread uses the store, or before started moves are applied. The thread
    has only a weak reference to this object; `stop` ends the thread.

    Two kinds of rows are in memory in front of the store. *Prefetched* rows are copies of rows that
    stay in the store, so prefetching changes no result. The newest blocks stay, of about
    `MAX_PREFETCHED` rows per table, or one block. *Unstored* rows are those that the store could
    not take, e.g. for want of disk space. They stay in memory until they are promoted, replaced or
    removed; `flush` commits them like rows of the fast tier.

    Args:
        store: the store behind, which is opened.
        tables: the tables to open it for.

    Attributes:
        behind: the store behind.
        note: note of the last commit.
        is_open: whether `close` was not called yet.

    Raises:
        BlockingIOError: another object has the same store open.
        Exception: the store raised it, see `RowStore.open`.
    """

    def __init__(self, store: RowStore, tables: Sequence[StoredTable]) -> None:
        if _is_in_use(store):
            gc.collect()  # a deleted module may still be in memory
            if _is_in_use(store):
                raise BlockingIOError(
                    f"this {type(store).__name__} is open in another module, whose rows would get "
                    "mixed with those of this one: make a store for each module, or close() that "
                    "module first"
                )
        store.open(tables)
        self.is_open = True
        self.behind = store
        self.note = store.note
        self._row_bytes = [table.row_bytes for table in tables]
        self._unstored: list[list[StoredRows]] = [[] for _ in tables]  # blocks by table
        self._prefetched: list[list[StoredRows]] = [[] for _ in tables]  # blocks, oldest first
        self._lock = threading.RLock()
        self._executor: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []  # prefetches whose errors were not raised yet
        self._started_moves: RowMoves | None = None  # for the thread; may not be applied yet
        _stores.add(self)
        call_in_forks(self)

    def before_fork(self) -> None:
        """Apply the moves that were started; no other thread is in the store until `release`."""
        self._lock.acquire()
        if self._started_moves is not None:
            self.try_moves(self._started_moves)

    def release(self) -> None:
        """Let other threads use the store again, after a fork, in either process."""
        self._lock.release()

    def after_fork(self) -> None:
        """Drop the thread of the parent, and its work."""
        self._executor, self._futures = None, []

    def start_moves(self, moves: RowMoves) -> None:
        """Have the thread apply moves.

        The caller must call `apply_moves` before anything that depends on them.
        """
        self._started_moves = moves
        # Without a thread (at exit, or since there are too many) the next call applies them.
        with contextlib.suppress(RuntimeError):
            self._submit(_try_moves_in_thread, moves)

    @_exclusive
    def try_moves(self, moves: RowMoves) -> None:
        """Apply moves; leave an error of the store in `moves`, for the next `apply_moves`."""
        try:
            self._apply_moves(moves)
        except Exception as error:
            moves.errors.append(error)

    @_exclusive
    def apply_moves(self, moves: RowMoves) -> None:
        """Apply moves, or the rest of them; wait for the thread if it is doing that.

        After an error the next call removes promoted rows again. Demoted rows that the store cannot
        take become unstored rows.

        Raises:
            Exception: the store raised it, in this call or in the thread.
        """
        try:
            self._apply_moves(moves)
        except Exception:
            moves.errors = []
            raise
        self._started_moves = None
        if moves.errors:
            errors, moves.errors = moves.errors, []
            raise errors[0]

    @_exclusive
    def cancel_moves(self, moves: RowMoves) -> None:
        """Forget moves that are not applied yet."""
        for rows in (moves.exchanged, moves.promoted, moves.demoted):
            rows.clear()
        moves.errors = []

    def _apply_moves(self, moves: RowMoves) -> None:
        """Apply all moves of a step; those that are done are removed from `moves`."""
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
            last_error: Exception | None = None
            for t in list(moves.demoted):
                try:
                    self._put_with_retry(t, moves)
                except Exception as error:
                    self.add_unstored(t, moves.demoted[t])
                    last_error = error
                del moves.demoted[t]
            if last_error is not None:
                raise last_error

    def _put_with_retry(self, table: int, moves: RowMoves) -> None:
        """Put demoted rows; try once more after an error that is no OSError.

        Such an error, e.g. a lack of memory, may have ended the `put` in the middle; a second call
        completes it, or the first error is raised. The rows that the first call dropped are then
        not in `moves.dropped`.
        """
        rows = moves.demoted[table]
        if not rows.keys.numel():
            return
        try:
            dropped = self.put(table, rows).keys
        except OSError:
            raise
        except Exception as error:
            try:
                dropped = self.put(table, rows).keys
            except Exception:
                raise error from None  # it names the cause, e.g. a full disk
        moves.dropped.append((table, dropped))

    def start_prefetch(self, table: int, keys: Tensor) -> None:
        """Have the thread prefetch the rows of keys, int64 `[n]` on the CPU.

        Raises:
            Exception: the store raised it in an earlier prefetch; this one is started.
        """
        finished = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in finished]
        self._futures.append(self._submit(_prefetch_in_thread, table, keys))
        _raise_first(finished)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Call a function in the store's thread, with a weak reference to this object."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "emblib rows")
        return self._executor.submit(function, weakref.ref(self), *arguments)

    def wait(self) -> None:
        """Wait until no prefetch is running.

        Raises:
            Exception: the first one that the store raised in a prefetch, and no caller has seen.
        """
        futures, self._futures = self._futures, []
        concurrent.futures.wait(futures)
        _raise_first(futures)

    @_exclusive
    def add_unstored(self, table: int, rows: StoredRows) -> None:
        """Keep rows in memory that the store behind could not take."""
        if rows.keys.numel():
            self._drop_from_memory(table, rows.keys)
            self._unstored[table].append(rows)

    @property
    def is_idle(self) -> bool:
        """Return whether the thread prefetches nothing; it then does not use the store behind.

        Call it after `apply_moves`.
        """
        return all(future.done() for future in self._futures)

    @property
    def has_rows_in_memory(self) -> bool:
        """Return whether there are unstored or prefetched rows."""
        return any(self._unstored) or any(self._prefetched)

    @_exclusive
    def num_prefetched(self, table: int, keys: Tensor) -> int:
        """Return the number of `keys` whose rows are prefetched."""
        return int(torch.isin(keys, _keys_of(self._prefetched[table])).sum())

    @_exclusive
    def prefetch(self, table: int, keys: Tensor) -> None:
        """Read the rows of keys that are not prefetched yet; drop the oldest if too many."""
        keys, prefetched = keys.unique(), self._prefetched[table]
        prefetched_keys = _keys_of(prefetched)
        rows = self.behind.read(table, keys[~torch.isin(keys, prefetched_keys)]).rows
        num_prefetched = prefetched_keys.numel() + rows.keys.numel()
        if rows.keys.numel():
            prefetched.append(rows)
        while num_prefetched > MAX_PREFETCHED and len(prefetched) > 1:
            num_prefetched -= prefetched.pop(0).keys.numel()

    def _drop_from_memory(self, table: int, keys: Tensor) -> None:
        """Drop the prefetched and the unstored rows of keys."""
        self._drop_prefetched(table, keys)
        if keys.numel() and self._unstored[table]:
            self._unstored[table][:] = _drop_keys(self._unstored[table], keys)

    def _drop_prefetched(self, table: int, keys: Tensor) -> None:
        if keys.numel() and self._prefetched[table]:
            self._prefetched[table][:] = _drop_keys(self._prefetched[table], keys)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """Do nothing, since the store behind is open already."""

    @_exclusive
    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        blocks = (*self._unstored[table], *self._prefetched[table])
        if not blocks:
            return self.behind.read(table, keys)
        remaining = torch.arange(keys.numel())  # positions whose keys are in no block so far
        all_found = []
        for rows in blocks:
            found = match_keys(keys[remaining], rows)
            all_found.append(FoundRows(remaining[found.positions], found.rows))
            is_remaining = torch.ones_like(remaining, dtype=torch.bool)
            is_remaining[found.positions] = False
            remaining = remaining[is_remaining]
        found = self.behind.read(table, keys[remaining])
        all_found.append(FoundRows(remaining[found.positions], found.rows))
        rows = StoredRows.concatenate((found.rows for found in all_found), self._row_bytes[table])
        return FoundRows(torch.cat([found.positions for found in all_found]), rows)

    @_exclusive
    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        self._drop_from_memory(table, keys)
        self.behind.lift(table, keys)

    @_exclusive
    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`."""
        # Copies of rows that are about to be replaced must not outlive an interruption.
        self._drop_prefetched(table, rows.keys)
        dropped = self.behind.put(table, rows)
        if self._unstored[table] or self._prefetched[table]:
            self._drop_from_memory(table, torch.cat([rows.keys, dropped.keys]))
        return dropped

    @_exclusive
    def exchange(self, table: int, lifted: Tensor, entries: Tensor, values: Tensor) -> Tensor:
        """Call `exchange` of the store behind, which must be a `HostRows`."""
        if self.has_rows_in_memory:
            put_keys = entries[:, HashEntryColumn.KEY]
            self._drop_from_memory(table, torch.cat([lifted, put_keys]))
        assert isinstance(self.behind, HostRows)
        dropped = self.behind.exchange(table, lifted, entries, values)
        self._drop_from_memory(table, dropped)
        return dropped

    @_exclusive
    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        is_erased = torch.zeros(keys.numel(), dtype=torch.bool)
        is_erased[self.read(table, keys).positions] = True
        self._drop_prefetched(table, keys)
        self.behind.erase(table, keys)
        self._drop_from_memory(table, keys)  # unstored rows stay if the store raises
        return is_erased

    @_exclusive
    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        expired_keys = self.behind.expire(table, before)
        self._drop_prefetched(table, expired_keys)
        if not self._unstored[table]:
            return expired_keys
        # Of an unstored row the store may have a copy, or an older row: its own stamp decides.
        unstored_keys = [rows.keys[rows.stamps < before] for rows in self._unstored[table]]
        expired_keys = torch.cat([*unstored_keys, expired_keys]).unique()
        self._drop_from_memory(table, torch.cat(unstored_keys))
        return expired_keys[~torch.isin(expired_keys, _keys_of(self._unstored[table]))]

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`; unstored rows are views, no copies."""
        self.wait()
        for rows in self._unstored[table]:
            yield from rows.split(batch)
        unstored = _keys_of(self._unstored[table])
        for rows in self.behind.iterate(table, batch):
            # A `put` that raised may have stored some of the rows that are unstored here.
            yield rows.at(~torch.isin(rows.keys, unstored)) if unstored.numel() else rows

    @_exclusive
    def size(self, table: int) -> int:
        """See `RowStore`."""
        size, unstored = self.behind.size(table), _keys_of(self._unstored[table])
        if not unstored.numel():
            return size
        return size + unstored.numel() - self.behind.read(table, unstored).positions.numel()

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self.wait()
        self._unstored[table], self._prefetched[table] = [], []
        self.behind.clear(table)

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`."""
        self.wait()
        self._flush(fast_rows, note)

    @_exclusive
    def _flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """Commit the store with the unstored rows and the rows of the fast tier."""
        blocks_by_table = [
            itertools.chain(*pair) for pair in zip(self._unstored, fast_rows, strict=True)
        ]
        self.behind.flush(blocks_by_table, note)
        self.note = note

    def stop(self) -> None:
        """Let the thread finish its work, end it, and wait for that."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def close(self) -> None:
        """See `RowStore`."""
        self.stop()
        self.behind.close()
        self.is_open = False


def _is_in_use(store: RowStore) -> bool:
    """Return whether a `PrefetchedRows` has a store open."""
    return any(other.behind is store and other.is_open for other in list(_stores))


def _keys_of(blocks: Sequence[StoredRows]) -> Tensor:
    """Return the keys of the rows of blocks, int64 `[n]`."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(rows.keys for rows in blocks)])


def _drop_keys(blocks: Sequence[StoredRows], keys: Tensor) -> list[StoredRows]:
    """Return blocks without the rows of some keys, and without blocks that become empty."""
    kept_blocks = []
    for rows in blocks:
        is_kept = ~torch.isin(rows.keys, keys)
        if is_kept.any():
            kept_blocks.append(rows if is_kept.all() else rows.at(is_kept))
    return kept_blocks


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Raise the first exception of some calls that have ended."""
    for future in futures:
        future.result()


def _prefetch_in_thread(store: "weakref.ref[PrefetchedRows]", table: int, keys: Tensor) -> None:
    """Prefetch rows, unless the store was deleted meanwhile."""
    prefetched_rows = store()
    if prefetched_rows is not None:
        prefetched_rows.prefetch(table, keys)


def _try_moves_in_thread(store: "weakref.ref[PrefetchedRows]", moves: RowMoves) -> None:
    """Apply moves, unless the store was deleted meanwhile."""
    prefetched_rows = store()
    if prefetched_rows is not None:
        prefetched_rows.try_moves(moves)


_stores: "weakref.WeakSet[PrefetchedRows]" = weakref.WeakSet()
_fork_lock = threading.RLock()  # held by the forking thread
_stores_at_fork: list[PrefetchedRows] = []  # stores whose locks the forking thread holds
_collects_garbage: list[bool] = []  # empty, or whether the collector was enabled before the fork


def _before_fork() -> None:
    """Wait until no store is in a call, and keep their locks over the fork."""
    _fork_lock.acquire()
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
    releases = [_fork_lock.release, *(store.release for store in _stores_at_fork)]
    _stores_at_fork.clear()
    for release in reversed(releases):
        with contextlib.suppress(RuntimeError):  # Ctrl-C has ended `_before_fork`
            release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
