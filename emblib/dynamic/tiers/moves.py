"""Moves of rows between a fast tier and its store: what a batch moves, and the job that moves it.

A batch first changes the fast tier; evicted rows are then in memory, promoted ones still in the
store. A `MoveJob` brings the store up to date, in the thread that waits for it or in the store's.
"""

import contextlib
import os
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.tiers.store import PrefetchedRows, StoredRows
from emblib.ops.hash import InsertResult, Misses
from emblib.ops.tiers import SwappedMisses


class Moves(NamedTuple):
    """Rows that are moving between the tiers, by table; an entry is deleted when it is done.

    Attributes:
        promoted: keys that have a slot and are still in the store.
        demoted: rows that have no slot and are not yet in the store.
        exchanged: both, of tables in front of a `HostRows`.
    """

    promoted: dict[int, Tensor]
    demoted: dict[int, StoredRows]
    exchanged: dict[int, SwappedMisses]


class SwappedRows(NamedTuple):
    """Result of `emblib.ops.tiers.tier_swap_` for one table."""

    slots: Tensor
    status: Tensor
    demoted: Tensor
    demoted_rows: Tensor
    refused: Tensor
    found_slots: Tensor


class BatchPlacement(NamedTuple):
    """Slots that the rows of a batch get; slots >= `DynamicSpec.rows` are overflow rows.

    Attributes:
        misses: slots and status by miss, per table, and what else the swap of rows returned.
        positions: int64 `[L]`, the slot of each position of the batch; None if no row is in an
            overflow row.
        overflow: keys that are served in overflow rows, per table, without values.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    misses: list[SwappedRows]
    positions: Tensor | None
    overflow: list[StoredRows]
    moves: Moves
    counts: list[dict[str, int]]


class BatchPlacementAtOnce(NamedTuple):
    """Placement of a batch with misses that one op inserted.

    Attributes:
        misses: the misses of the batch.
        result: slots and status by miss.
        overflow: keys that are served in overflow rows, per table, without values.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    misses: Misses
    result: InsertResult
    overflow: list[StoredRows]
    moves: Moves
    counts: list[dict[str, int]]


class MoveJob:
    """Moves in the store, each made once by whichever thread comes first.

    An interrupted `run` is completed by the next one, in any thread. Rows that the store cannot
    take stay in its memory (`PrefetchedRows.keep`) until `flush`.

    Attributes:
        dropped: keys that the store dropped meanwhile, by table.
        error: the last error of the store that left rows in memory.
    """

    def __init__(self, store: PrefetchedRows, moves: Moves) -> None:
        self._store, self.moves = store, moves
        self.dropped: dict[int, Tensor] = {}
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Have the store's thread run the job, unless another thread calls `run` before."""
        _running.add(self)
        self._store.submit(self._run_in_thread)

    def _run_in_thread(self) -> None:
        with contextlib.suppress(Exception):  # raised again where the job is waited for
            self.run()
        _running.discard(self)

    def run(self) -> None:
        """Make the moves that are left, and wait for those that another thread makes.

        Raises:
            Exception: a promoted row cannot be removed.
        """
        with self._lock:
            self._run()

    def _run(self) -> None:
        promoted, demoted, exchanged = self.moves
        for t in list(exchanged):
            rows = exchanged[t]
            keys = self._store.exchange(t, rows.promoted, rows.demoted, rows.demoted_rows)
            self._note_dropped(t, keys)
            del exchanged[t]
        try:
            for t in list(promoted):
                self._store.lift(t, promoted[t])
                del promoted[t]
        finally:
            for t in list(demoted):
                try:
                    self._put_again(t, demoted[t])
                except Exception as error:
                    self._store.keep(t, demoted[t])
                    self.error = error
                del demoted[t]

    def _put_again(self, table: int, rows: StoredRows) -> None:
        """Put rows into the store; try once more after an error other than of the disk.

        Such an error (e.g. Ctrl-C) may have interrupted the `put`, which a second call completes.
        """
        if not rows.keys.numel():
            return
        try:
            dropped = self._store.put(table, rows)
        except OSError:
            raise
        except Exception:
            dropped = self._store.put(table, rows)
        self._note_dropped(table, dropped.keys)

    def _note_dropped(self, table: int, keys: Tensor) -> None:
        if keys.numel():
            earlier = self.dropped.get(table)
            self.dropped[table] = keys if earlier is None else torch.cat([earlier, keys])

    def cancel(self) -> None:
        """Forget the moves that are left."""
        with self._lock:
            for rows in self.moves:
                rows.clear()

    def before_fork(self) -> None:
        """Finish, so that a forked process has a whole store."""
        with contextlib.suppress(Exception):  # raised again where the job is waited for
            self.run()


# The jobs that a thread runs or is about to run.
_running: "weakref.WeakSet[MoveJob]" = weakref.WeakSet()


def _finish_all() -> None:
    for job in list(_running):
        job.before_fork()


os.register_at_fork(before=_finish_all)
