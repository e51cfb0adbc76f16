"""PrefetchedRows: a store with a thread that reads rows in advance and moves rows between tiers.

A training step produces `RowMoves`. Promoted rows are removed from the store (`lift`); demoted rows
are added to it (`put`). With `BackingStore.write_behind`, the thread of `PrefetchedRows` applies
the moves (`start_moves`); otherwise the next call that depends on them does (`apply_moves`).
Likewise `start_prefetch` has the thread call `prefetch`.
"""

import atexit
import contextlib
import functools
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from emblib.tables.calling_thread import Call, CallingThread
from emblib.tables.locks import register_after_fork

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

    `PrefetchedRows.apply_moves` deletes moves from this object as soon as the store has made them.
    After an exception, any thread can therefore call it again for the remaining moves. Once the
    moves are started, a thread must hold the lock of `PrefetchedRows` to change them.

    Attributes:
        exchanged: promoted keys and demoted rows of tables whose store is a `HostRows`.
        promoted: keys that have a slot and are still in the store, int64 `[n]`.
        demoted: rows that have no slot and are not yet in the store.
        dropped: pairs of a table number and the keys, int64 `[n]`, of rows that the store dropped
            to make room for demoted rows.
        errors: exceptions of the store that were not raised to a caller yet.
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
    """A `RowStore` that wraps another store, and reads prefetched rows from memory.

    Another thread, started at first use, prefetches and moves rows. It changes only the wrapped
    store, this object and `RowMoves`. Both threads hold `_lock` around each call of the wrapped
    store, except in `iterate`, `clear` and `close`. These three wait for prefetches first. They
    must not be called while another thread uses the store, or before started moves are applied. Ops
    on batches use a `HostRows` without the lock, while the thread changes nothing
    (`BackingTier.begin_batch`). The thread has only a weak reference to this object; `stop` ends
    the thread.

    Two kinds of rows are in memory. *Prefetched* rows are copies of rows that stay in the wrapped
    store, so prefetching changes no result. Per table, the newest blocks stay, with up to
    `MAX_PREFETCHED` rows or a single larger block. *Unstored* rows are rows that the wrapped store
    could not add, e.g. because a disk is full. They stay in memory until they are promoted,
    replaced or removed; `flush` commits them like rows of the fast tier.

    Args:
        store: the store to wrap; the constructor opens it.
        tables: the tables to open it for.

    Attributes:
        wrapped_store: the store that has all rows but the unstored ones.
        note: note of the last commit.
        is_open: whether `close` was not called yet.

    Raises:
        BlockingIOError: another `PrefetchedRows` has the same store open.
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
        self.wrapped_store = store
        self.note = store.note
        self._row_bytes = [table.row_bytes for table in tables]
        self._unstored_blocks: list[list[StoredRows]] = [[] for _ in tables]  # by table
        self._prefetched_blocks: list[list[StoredRows]] = [[] for _ in tables]  # oldest first
        self._lock = threading.RLock()
        self._thread = CallingThread()
        self._prefetches: list[Call] = []  # whose errors are not raised yet
        self._started_moves: RowMoves | None = None  # maybe applied, maybe not
        _instances.add(self)
        register_after_fork(self)

    def before_fork(self) -> None:
        """Take the lock, so that no other thread uses the store, and apply started moves."""
        self._lock.acquire()
        if self._started_moves is not None:
            self.try_moves(self._started_moves)

    def release(self) -> None:
        """Release the lock after a fork, in parent and child."""
        self._lock.release()

    def after_fork(self) -> None:
        """Forget the prefetches in the child, which has only the forking thread."""
        self._prefetches = []

    def start_moves(self, moves: RowMoves) -> None:
        """Have the thread apply moves.

        The caller must call `apply_moves` before anything that depends on them.
        """
        self._started_moves = moves
        # If no thread can start (at exit, or too many run), `apply_moves` applies them.
        with contextlib.suppress(RuntimeError):
            self._submit(_try_moves_in_thread, moves)

    @_exclusive
    def try_moves(self, moves: RowMoves) -> None:
        """Apply moves; store an error in `moves.errors`, which the next `apply_moves` raises."""
        try:
            self._apply_moves(moves)
        except Exception as error:
            moves.errors.append(error)

    @_exclusive
    def apply_moves(self, moves: RowMoves) -> None:
        """Apply the remaining moves; first wait for the thread if it is applying them.

        After an error the next call removes promoted rows again. Demoted rows that the wrapped
        store cannot add become unstored rows.

        Raises:
            Exception: the wrapped store raised it, in this call or in the thread.
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
        for moves_by_table in (moves.exchanged, moves.promoted, moves.demoted):
            moves_by_table.clear()
        moves.errors = []

    def _apply_moves(self, moves: RowMoves) -> None:
        """Apply moves, and delete each from `moves` once it is made."""
        for t in list(moves.exchanged):
            swapped = moves.exchanged[t]
            dropped_keys = self.exchange(t, swapped.promoted, swapped.demoted, swapped.demoted_rows)
            moves.dropped.append((t, dropped_keys))
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
        """Put demoted rows; try once more after an error other than OSError.

        Such an error, e.g. a lack of memory, may have ended the `put` in the middle. A second call
        completes it; if that fails too, the first error is raised. Rows that the first call dropped
        are not in `moves.dropped`.
        """
        rows = moves.demoted[table]
        if not rows.keys.numel():
            return
        try:
            dropped_keys = self.put(table, rows).keys
        except OSError:
            raise
        except Exception as error:
            try:
                dropped_keys = self.put(table, rows).keys
            except Exception:
                raise error from None  # it names the cause, e.g. a full disk
        moves.dropped.append((table, dropped_keys))

    def start_prefetch(self, table: int, keys: Tensor) -> None:
        """Have the thread prefetch the rows of keys, int64 `[n]` on the CPU.

        Raises:
            RuntimeError: no thread can start.
            Exception: the store raised it in an earlier prefetch; the new one is started anyway.
        """
        ended = [prefetch for prefetch in self._prefetches if prefetch.has_ended]
        self._prefetches = [prefetch for prefetch in self._prefetches if prefetch not in ended]
        self._prefetches.append(self._submit(_prefetch_in_thread, table, keys))
        _raise_first(ended)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Call:
        """Call a function in the store's thread, with a weak reference to this object."""
        return self._thread.submit(function, weakref.ref(self), *arguments)

    def wait(self) -> None:
        """Wait until no prefetch is running.

        Raises:
            Exception: the first one that the store raised in a prefetch, unless raised before.
        """
        prefetches, self._prefetches = self._prefetches, []
        for prefetch in prefetches:
            with contextlib.suppress(Exception):  # raised below, after all have ended
                prefetch.result()
        _raise_first(prefetches)

    @_exclusive
    def add_unstored(self, table: int, rows: StoredRows) -> None:
        """Keep rows in memory that the wrapped store could not add."""
        if rows.keys.numel():
            self._drop_from_memory(table, rows.keys)
            self._unstored_blocks[table].append(rows)

    @property
    def is_idle(self) -> bool:
        """Return whether no prefetch is running or waiting.

        After `apply_moves`, the thread then does not use the wrapped store.
        """
        return all(prefetch.has_ended for prefetch in self._prefetches)

    @property
    def has_rows_in_memory(self) -> bool:
        """Return whether there are unstored or prefetched rows."""
        return any(self._unstored_blocks) or any(self._prefetched_blocks)

    @_exclusive
    def num_prefetched(self, table: int, keys: Tensor) -> int:
        """Return the number of `keys` whose rows are prefetched."""
        return int(torch.isin(keys, _keys_of(self._prefetched_blocks[table])).sum())

    @_exclusive
    def prefetch(self, table: int, keys: Tensor) -> None:
        """Read the rows of keys that are not prefetched yet; drop old blocks if they are too many.

        A key that is not in the wrapped store has no row, and is read again by the next call.
        """
        keys, blocks = keys.unique(), self._prefetched_blocks[table]
        prefetched_keys = _keys_of(blocks)
        rows = self.wrapped_store.read(table, keys[~torch.isin(keys, prefetched_keys)]).rows
        num_prefetched = prefetched_keys.numel() + rows.keys.numel()
        if rows.keys.numel():
            blocks.append(rows)
        while num_prefetched > MAX_PREFETCHED and len(blocks) > 1:
            num_prefetched -= blocks.pop(0).keys.numel()

    def _drop_from_memory(self, table: int, keys: Tensor) -> None:
        """Drop the prefetched and the unstored rows of keys."""
        self._drop_prefetched(table, keys)
        if keys.numel() and self._unstored_blocks[table]:
            self._unstored_blocks[table][:] = _drop_keys(self._unstored_blocks[table], keys)

    def _drop_prefetched(self, table: int, keys: Tensor) -> None:
        if keys.numel() and self._prefetched_blocks[table]:
            self._prefetched_blocks[table][:] = _drop_keys(self._prefetched_blocks[table], keys)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """Do nothing: the constructor has opened the wrapped store."""

    @_exclusive
    def read(self, table: int, keys: Tensor) -> FoundRows:
        """Return the rows of those keys that have one here; see `RowStore`."""
        blocks = (*self._unstored_blocks[table], *self._prefetched_blocks[table])
        if not blocks:
            return self.wrapped_store.read(table, keys)
        remaining_positions = torch.arange(
            keys.numel(), device="cpu"
        )  # positions whose keys are in no block so far
        found_blocks = []
        for rows in blocks:
            found_rows = match_keys(keys[remaining_positions], rows)
            found_blocks.append(
                FoundRows(remaining_positions[found_rows.positions], found_rows.rows)
            )
            is_remaining = torch.ones_like(remaining_positions, dtype=torch.bool)
            is_remaining[found_rows.positions] = False
            remaining_positions = remaining_positions[is_remaining]
        found_rows = self.wrapped_store.read(table, keys[remaining_positions])
        found_blocks.append(FoundRows(remaining_positions[found_rows.positions], found_rows.rows))
        rows = StoredRows.concatenate(
            (found_rows.rows for found_rows in found_blocks), self._row_bytes[table]
        )
        return FoundRows(torch.cat([found_rows.positions for found_rows in found_blocks]), rows)

    @_exclusive
    def lift(self, table: int, keys: Tensor) -> None:
        """Remove promoted rows, of keys int64 `[n]`; see `RowStore`."""
        self._drop_from_memory(table, keys)
        self.wrapped_store.lift(table, keys)

    @_exclusive
    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """Add demoted rows; return the rows that were dropped for want of room; see `RowStore`."""
        # Copies of rows that are about to be replaced must not outlive an interruption.
        self._drop_prefetched(table, rows.keys)
        dropped_rows = self.wrapped_store.put(table, rows)
        if self._unstored_blocks[table] or self._prefetched_blocks[table]:
            self._drop_from_memory(table, torch.cat([rows.keys, dropped_rows.keys]))
        return dropped_rows

    @_exclusive
    def exchange(
        self, table: int, promoted_keys: Tensor, demoted_entries: Tensor, demoted_rows: Tensor
    ) -> Tensor:
        """Call `HostRows.exchange` of the wrapped store, which must be a `HostRows`."""
        if self.has_rows_in_memory:
            demoted_keys = demoted_entries[:, HashEntryColumn.KEY]
            self._drop_from_memory(table, torch.cat([promoted_keys, demoted_keys]))
        assert isinstance(self.wrapped_store, HostRows)
        dropped = self.wrapped_store.exchange(table, promoted_keys, demoted_entries, demoted_rows)
        self._drop_from_memory(table, dropped)
        return dropped

    @_exclusive
    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Remove keys; return which had a row, bool `[n]`; see `RowStore`."""
        is_erased = torch.zeros(keys.numel(), dtype=torch.bool, device="cpu")
        is_erased[self.read(table, keys).positions] = True
        self._drop_prefetched(table, keys)
        self.wrapped_store.erase(table, keys)
        self._drop_from_memory(table, keys)  # unstored rows stay if the store raises
        return is_erased

    @_exclusive
    def expire(self, table: int, before: int) -> Tensor:
        """Remove rows with a stamp below `before`; return their keys; see `RowStore`."""
        expired_keys = self.wrapped_store.expire(table, before)
        self._drop_prefetched(table, expired_keys)
        if not self._unstored_blocks[table]:
            return expired_keys
        # The wrapped store may have an older row of an unstored key; the unstored stamp decides.
        unstored_keys = [rows.keys[rows.stamps < before] for rows in self._unstored_blocks[table]]
        expired_keys = torch.cat([*unstored_keys, expired_keys]).unique()
        self._drop_from_memory(table, torch.cat(unstored_keys))
        return expired_keys[~torch.isin(expired_keys, _keys_of(self._unstored_blocks[table]))]

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """Yield all rows of a table; see `RowStore`. Unstored rows are views, not copies."""
        self.wait()
        for rows in self._unstored_blocks[table]:
            yield from rows.split(batch)
        unstored_keys = _keys_of(self._unstored_blocks[table])
        for rows in self.wrapped_store.iterate(table, batch):
            # A `put` that raised may have added some of the unstored rows.
            yield rows.at(~torch.isin(rows.keys, unstored_keys)) if unstored_keys.numel() else rows

    @_exclusive
    def size(self, table: int) -> int:
        """Return the number of rows of a table, unstored rows included."""
        num_stored = self.wrapped_store.size(table)
        unstored_keys = _keys_of(self._unstored_blocks[table])
        if not unstored_keys.numel():
            return num_stored
        num_in_both = self.wrapped_store.read(table, unstored_keys).positions.numel()
        return num_stored + unstored_keys.numel() - num_in_both

    def clear(self, table: int) -> None:
        """Remove all rows of a table, in memory and in the wrapped store."""
        self.wait()
        self._unstored_blocks[table], self._prefetched_blocks[table] = [], []
        self.wrapped_store.clear(table)

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """Commit the rows of both tiers, unstored rows included, and a note; see `RowStore`."""
        self.wait()
        self._flush(fast_rows, note)

    @_exclusive
    def _flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        blocks_by_table = [
            itertools.chain(*pair) for pair in zip(self._unstored_blocks, fast_rows, strict=True)
        ]
        self.wrapped_store.flush(blocks_by_table, note)
        self.note = note

    def stop(self) -> None:
        """Wait until the thread has finished its work, and end it."""
        self._thread.stop()

    def close(self) -> None:
        """End the thread and close the wrapped store; see `RowStore`."""
        self.stop()
        self.wrapped_store.close()
        self.is_open = False


def _is_in_use(store: RowStore) -> bool:
    """Return whether a store is wrapped by a `PrefetchedRows` that is open."""
    return any(other.wrapped_store is store and other.is_open for other in list(_instances))


def _keys_of(blocks: Sequence[StoredRows]) -> Tensor:
    """Return the keys of the rows of blocks, int64 `[n]`."""
    return torch.cat(
        [torch.empty(0, dtype=torch.int64, device="cpu"), *(rows.keys for rows in blocks)]
    )


def _drop_keys(blocks: Sequence[StoredRows], keys: Tensor) -> list[StoredRows]:
    """Return blocks without the rows of some keys, and without blocks that become empty."""
    remaining_blocks = []
    for rows in blocks:
        is_remaining = ~torch.isin(rows.keys, keys)
        if is_remaining.any():
            remaining_blocks.append(rows if is_remaining.all() else rows.at(is_remaining))
    return remaining_blocks


def _raise_first(calls: Sequence[Call]) -> None:
    """Raise the first exception of calls that have ended, if any."""
    for call in calls:
        call.result()


def _prefetch_in_thread(reference: "weakref.ref[PrefetchedRows]", table: int, keys: Tensor) -> None:
    """Call `prefetch`, unless the referenced object was deleted meanwhile."""
    prefetched_rows = reference()
    if prefetched_rows is not None:
        prefetched_rows.prefetch(table, keys)


def _try_moves_in_thread(reference: "weakref.ref[PrefetchedRows]", moves: RowMoves) -> None:
    """Call `try_moves`, unless the referenced object was deleted meanwhile."""
    prefetched_rows = reference()
    if prefetched_rows is not None:
        prefetched_rows.try_moves(moves)


_instances: "weakref.WeakSet[PrefetchedRows]" = weakref.WeakSet()
_fork_lock = threading.RLock()  # held by the forking thread
_locked_instances: list[PrefetchedRows] = []  # those whose locks the forking thread holds
# During a fork: whether the garbage collector was enabled before it. Otherwise empty.
_was_collector_enabled: list[bool] = []


def _before_fork() -> None:
    """Take the locks of all stores, and hold them during the fork; then no store is in a call."""
    _fork_lock.acquire()
    # A collected `BackingTier` waits for its thread, which may wait for a lock taken below.
    _was_collector_enabled.append(gc.isenabled())
    gc.disable()
    for instance in list(_instances):
        _locked_instances.append(instance)
        instance.before_fork()


def _after_fork() -> None:
    """Release the locks that `_before_fork` took, in parent and child."""
    if _was_collector_enabled and _was_collector_enabled.pop():
        gc.enable()
    releases = [_fork_lock.release, *(instance.release for instance in _locked_instances)]
    _locked_instances.clear()
    for release in reversed(releases):
        with contextlib.suppress(RuntimeError):  # not locked: Ctrl-C has ended `_before_fork`
            release()


def _stop_threads() -> None:
    """End the threads, which must not be in native code while the process exits."""
    for instance in list(_instances):
        instance.stop()


atexit.register(_stop_threads)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
