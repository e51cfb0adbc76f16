"""Shrinking a dynamic table: linear hashing backwards, with its lowest-ranked keys evicted.

A table of n buckets shrinks to m: buckets m to n - 1 are dissolved. Entries in other buckets keep
their slots, because a key whose bucket is below m has the same bucket in the smaller table. Entries
of dissolved buckets are inserted again like missing keys of a batch: into an empty slot of their
two buckets, or in place of the lowest-ranked entry of both. If x of the k entries of the table are
too many for the smaller table, the lowest-ranked share x / k of the dissolved entries is evicted at
once. The others are inserted, and evict as many entries as they lack slots. Since a hash selects
the buckets, the dissolved entries are a sample of the table. Thus nearly the lowest-ranked entries
of the whole table leave, and the work depends on the dissolved buckets, not on the size of the
table. Rows and versions move with their entries. Evicted rows go to the backing store, if there is
one. At the end the memory of the dissolved buckets is returned to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import HashCounter, HashEntryColumn, HashTableColumn
from emblib.dynamic.saving.entries import Entries, best_first
from emblib.dynamic.state import DynamicState, of_state
from emblib.dynamic.tiers.store import StoredRows
from emblib.grad_mode import without_gradients
from emblib.ops import codes, hash
from emblib.ops.effects import Effects
from emblib.specs import SLOTS_PER_BUCKET, check_count


@of_state
def shrink(state: DynamicState, table: int | str, rows: int) -> int:
    """Shrink a table to `rows` rows, rounded up to a multiple of 32, and free their memory.

    Nothing changes if the table has no more rows than that. If its keys do not fit, the
    lowest-ranked ones are evicted, to the backing store if there is one. The table may grow again.

    Args:
        state: the tables.
        table: number or name of the table.
        rows: number of rows, at least `initial_capacity`.

    Returns:
        The number of evicted keys.

    Raises:
        ValueError: `rows` is below 1, or below `initial_capacity` when both are rounded up; the
            table is on CUDA, where its memory is allocated for its whole capacity; or it evicts no
            keys. All of these also if it has no more rows than `rows`.
        KeyError, IndexError: there is no such table.
        TypeError: `rows` is not an int.
        Exception: the backing store raised it.
    """
    table_number = state.table_number(table)
    check_shrinkable(state, table_number)
    spec = state.specs[table_number]
    buckets = -(-check_count("rows", rows) // SLOTS_PER_BUCKET)
    if buckets < spec.buckets:
        raise ValueError(
            f"table {state.table_names[table_number]!r} shrinks to its initial_capacity, "
            f"{spec.buckets * SLOTS_PER_BUCKET} rows, and not to {rows}; choose a smaller "
            "initial_capacity"
        )
    return shrink_to(state, table_number, buckets)


def check_shrinkable(state: DynamicState, table: int) -> None:
    """Raise ValueError if a table cannot shrink."""
    name = state.table_names[table]
    if state.index.tags.device.type != "cpu":
        raise ValueError(
            f"table {name!r} is on {state.index.tags.device}, where memory is allocated for the "
            "whole capacity: shrinking would return none. Choose capacities that fit together, "
            "e.g. with plan_memory, or have the tables on the CPU"
        )
    if state.specs[table].eviction.order == "none":
        raise ValueError(
            f"table {name!r} evicts no keys (Eviction.NONE), so it cannot shrink; erase keys, or "
            "choose another eviction"
        )


def shrink_to(state: DynamicState, table: int, buckets: int) -> int:
    """Shrink a table to a number of buckets, unless it has no more; return the number of evictions.

    The caller must hold the lock of the tables, and ensure that the table can shrink.
    """
    if buckets >= state.index.buckets(table):
        return 0
    table_shrink = _TableShrink(state, table, buckets)
    return state.complete(table_shrink.run, table_shrink.is_optional)


class _TableShrink:
    """A shrink, which `run` completes after an interruption.

    All values are read before the first write. The insertion is made once (`Effects`). Every other
    write has values that follow from values read before, so it can be repeated.
    """

    def __init__(self, state: DynamicState, table: int, buckets: int) -> None:
        self._state, self._table, self._buckets = state, table, buckets
        index = state.index
        if state.backing is not None:
            state.backing.write_back()
            self._num_demoted = state.backing.num_demoted(table)
        self._rows_before, num_keys = index.capacity(table), index.size(table)
        self._counters = index.counters[table].clone()
        # By slot: entries, versions if there are any, and the row buffers.
        self._slot_views = index.views_by_slot(table)
        self._row_views = [*_slot_bytes(state, table)]
        self._tags = index.table_tags(table)[buckets * SLOTS_PER_BUCKET :]
        occupied_slots = self._tags.nonzero().view(-1) + buckets * SLOTS_PER_BUCKET
        self._num_remaining = num_keys - occupied_slots.numel()
        # The dissolved entries, the highest rank first. Entries from `_num_inserted` on are evicted
        # without an attempt to insert them.
        slots = occupied_slots[self._best_first(occupied_slots)]
        self._slot_values = [view[slots] for view in self._slot_views]
        self._row_values = [view[slots] for view in self._row_views]
        num_lacking = max(0, num_keys - buckets * SLOTS_PER_BUCKET)
        self._num_inserted = slots.numel() - num_lacking * slots.numel() // max(1, num_keys)
        self._effects = Effects()
        self._evicted_rows: _EvictedRows | None = None
        self._has_written = self._is_demoted = False

    def _best_first(self, slots: Tensor) -> Tensor:
        """Return the permutation, int64 `[n]`, from the last entry to be evicted to the first."""
        columns = self._slot_views[0][slots].unbind(1)
        keys, stamps, *scores = columns
        entries = Entries(keys, stamps, scores[0] if scores else None, {})
        return best_first(entries, self._state.index.order)

    def is_optional(self) -> bool:
        """Return whether the shrink may be abandoned: nothing was written yet."""
        return not self._has_written

    @without_gradients
    def run(self) -> int:
        """Shrink the table, or complete an interrupted run; return the number of evicted keys."""
        self._has_written = True
        state, index, table = self._state, self._state.index, self._table
        self._dissolve()
        self._effects.restart()
        inserted = self._insert()
        if self._evicted_rows is None:
            self._evicted_rows = self._copy_evicted(inserted)
        evicted_rows, is_placed = self._evicted_rows, inserted.slots >= 0
        slots = inserted.slots[is_placed]
        index.forget_queues(table, slots)  # other entries rank lower than inserted ones
        for views, values in (
            (self._slot_views, self._slot_values),
            (self._row_views, self._row_values),
        ):
            for view, saved_rows in zip(views, values, strict=True):
                view[slots] = saved_rows[: self._num_inserted][is_placed]
        counters = self._counters.clone()
        counters[HashCounter.EVICTED] += len(evicted_rows.keys)
        index.counters[table] = counters
        index.versions.advance()
        self._pass_on(evicted_rows)
        release_rows(state, table, self._rows_before, self._buckets * SLOTS_PER_BUCKET)
        return len(evicted_rows.keys)

    def _dissolve(self) -> None:
        """Remove the dissolved buckets and their entries from the index."""
        index, table = self._state.index, self._table
        if index.buckets(table) == self._buckets:
            return
        index.forget_queues(
            table,
            torch.arange(
                self._buckets * SLOTS_PER_BUCKET, self._rows_before, SLOTS_PER_BUCKET, device="cpu"
            ),
        )
        self._tags.zero_()
        index.tables[table, HashTableColumn.SIZE] = self._num_remaining
        index.tables[table, HashTableColumn.BUCKETS] = self._buckets

    def _insert(self) -> hash.InsertResult:
        """Insert the entries again; their uses are their scores, if the order counts uses."""
        index, num_inserted = self._state.index, self._num_inserted
        entries = self._slot_values[0][:num_inserted]
        offsets = torch.zeros(len(index.specs) + 1, dtype=torch.int64, device="cpu")
        offsets[self._table + 1 :] = num_inserted
        result = self._effects.call_once(
            hash.hash_insert_,
            index.tensors(),
            entries[:, HashEntryColumn.KEY].contiguous(),
            torch.arange(num_inserted, device="cpu"),
            entries[:, -1].contiguous(),
            offsets,
            None,
            torch.zeros(len(index.specs), dtype=torch.int64, device="cpu"),
            codes.HASH_ORDER[index.order],
            codes.INSERT_POLICY["wins"],
        )
        return hash.InsertResult(*result[:3])

    def _copy_evicted(self, inserted: hash.InsertResult) -> _EvictedRows:
        """Copy the entries that were evicted, and those that found no slot, with their rows."""
        is_evicting = inserted.status == hash.EVICTING
        evicted, slots = inserted.evicted[is_evicting], inserted.slots[is_evicting]
        entries = self._slot_values[0]
        is_uninserted = torch.ones(entries.shape[0], dtype=torch.bool, device="cpu")
        is_uninserted[: self._num_inserted] = inserted.slots < 0
        num_columns = entries.shape[1]
        return _EvictedRows(
            torch.cat([evicted[:, :num_columns], entries[is_uninserted]]),
            [
                torch.cat([view[slots], values[is_uninserted]])
                for view, values in zip(self._row_views, self._row_values, strict=True)
            ],
        )

    def _pass_on(self, evicted_rows: _EvictedRows) -> None:
        """Pass the evicted rows on to the store, or to the eviction log; count their ages."""
        state, table = self._state, self._table
        if state.statistics is not None:
            state.statistics.record_evicted(
                table, evicted_rows.keys, evicted_rows.stamps, state.index.clock, self._effects
            )
        if state.backing is None:
            state.record_evictions(table, evicted_rows.keys)
            return
        if not self._is_demoted:
            num_demoted = self._num_demoted + len(evicted_rows.keys)
            num_buffers = len(state.row_buffers)
            state.backing.demote(table, evicted_rows.stored_rows(num_buffers), num_demoted)
            self._is_demoted = True
        state.backing.move_rows()


class _EvictedRows(NamedTuple):
    """Evicted entries, int64 `[n, 2 or 3]`, see `HashEntryColumn`; uint8 rows per buffer."""

    entries: Tensor
    rows: list[Tensor]

    @property
    def keys(self) -> Tensor:
        return self.entries[:, HashEntryColumn.KEY]

    @property
    def stamps(self) -> Tensor:
        return self.entries[:, HashEntryColumn.STAMP]

    def stored_rows(self, num_buffers: int) -> StoredRows:
        """Return the rows of the first buffers: weights and optimizer states."""
        has_scores = self.entries.shape[1] > HashEntryColumn.SCORE
        scores = self.entries[:, -1] if has_scores else torch.zeros_like(self.keys)
        keys, stamps, scores = (column.contiguous() for column in (self.keys, self.stamps, scores))
        return StoredRows(keys, stamps, scores, torch.cat(self.rows[:num_buffers], 1))


def _slot_bytes(state: DynamicState, table: int) -> Iterator[Tensor]:
    """Yield the rows that move with the slots of a table, per buffer, as bytes `[rows, n]`."""
    num_rows = state.specs[table].rows
    buffers, layout, _ = state.slot_rows()
    for buffer, (first_byte, row_bytes) in zip(buffers, layout[table].tolist(), strict=True):
        table_bytes = buffer.view(torch.uint8)[first_byte : first_byte + num_rows * row_bytes]
        yield table_bytes.view(num_rows, row_bytes)


def release_rows(state: DynamicState, table: int, rows_before: int, rows_now: int) -> None:
    """Return the memory of the slots and rows in [rows_now, rows_before), which are not in use.

    Their content is unspecified afterwards.
    """
    for tensor, *range_bounds in state.index.memory_ranges(table, rows_before, rows_now):
        release_memory(tensor, *range_bounds)
    for view in _slot_bytes(state, table):
        row_bytes = view.shape[1]
        release_memory(view.view(-1), 0, rows_before * row_bytes, rows_now * row_bytes)


def release_memory(tensor: Tensor, first_element: int, used_before: int, used_now: int) -> None:
    """Return the memory of elements that are no longer used to the system, page by page.

    Elements `[first_element, first_element + used_before)` were in use, the first `used_now` of
    them still are. The others are unspecified afterwards. Systems other than Linux keep the memory.
    """
    madvise = _madvise()
    if tensor.device.type != "cpu" or used_now >= used_before or madvise is None:
        return
    begin = tensor.data_ptr() + (first_element + used_now) * tensor.element_size()
    end = tensor.data_ptr() + (first_element + used_before) * tensor.element_size()
    first_page, page_end = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
    if first_page < page_end:
        num_bytes = (page_end - first_page) * mmap.PAGESIZE
        madvise(first_page * mmap.PAGESIZE, num_bytes, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the function of the C library; None on systems where it does not drop pages."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    result: Callable[[int, int, int], int] = function
    return result
