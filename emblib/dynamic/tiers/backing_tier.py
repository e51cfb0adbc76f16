"""BackingTier: a store behind the tables of a module, and moves of rows between the two tiers.

Each key of a table is in one of two tiers: the fast tier (the index and its rows) or the store.
Rows in the store are read and updated like others, so results do not depend on the size of the fast
tier, as long as the store drops no row.

A row in the store that a batch needs is promoted: it gets a slot like a new key. The row that it
evicts is demoted, with optimizer state, stamp and score. A row finds no slot if it ranks below all
rows that it could replace, or if the batch itself fills its buckets. Such a row is served in place:
the batch reads and updates a copy in an overflow row (`RowLayout.overflow_rows`). The copy is
written back before another batch reads the store. New keys without a slot get overflow rows, too.

A training step calls, in this order: `find_in_store`, `add_stored_uses`, `place`, `record`,
`start_moves`. If the store is a `HostRows`, one native op makes the step, and the calls are
`begin_batch`, `one_op_placement`, `record_one_op`, `start_moves`. `place` and `one_op_placement`
compute a placement and change only rows; `record` and `record_one_op` then record the placement and
can be repeated. So an interrupted step can be completed (`emblib.dynamic.training.BatchInsertion`).
"""

import base64
import contextlib
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from emblib.columns import HashEntryColumn
from emblib.dynamic.saving.dumps import DumpProgress, Report
from emblib.dynamic.saving.entries import ConcatenatedRows, Entries, SelectedRows, best_first
from emblib.dynamic.saving.loading import Loaded
from emblib.dynamic.tiers.fast_rows import FastRows, FastTier, as_bytes
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.placements import BatchPlacement, OneOpPlacement, SwappedRows
from emblib.dynamic.tiers.prefetched_rows import PrefetchedRows, RowMoves
from emblib.dynamic.tiers.store import (
    BATCH,
    BackingStore,
    FoundRows,
    StoredRows,
    StoredTable,
    TierStats,
)
from emblib.grad_mode import without_gradients
from emblib.ops import hash, tiers
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, InsertResult, Keys, Misses, tables_of
from emblib.ops.tiers import InsertedMisses, SwappedMisses

_COUNTING_ORDERS = ("lfu", "lru_lfu")
_COUNTERS = [field.name for field in fields(TierStats)][2:]  # the index counts lookups and hits
# The columns of `InsertedMisses.counts`.
_COUNTERS_OF_BATCH = ("backing_hits", "new", "promoted", "demoted", "served_in_place", "dropped")


class BackingTier:
    """Move rows between the fast tier and a store, as a hook of training steps.

    The owner of the tables holds its lock around every call. The store is called in the caller's
    thread, or in its own (`PrefetchedRows`), and may raise. On CUDA most methods wait for the GPU.

    Args:
        fast: the tables that the store is behind; they are referenced weakly, so that the store is
            closed as soon as they are deleted.
        backing: the store and its mode.

    Attributes:
        mode: mode of `backing`.
        store: the store, which this object opens.
        generation: number of assignments of overflow rows to keys so far.
        gains_from_prefetch: whether a read ahead may save time; not from `HostRows` to the CPU.

    Raises:
        ValueError: the store has other tables, rows of another optimizer or dtype, or another
            number of fallback rows; it is closed then.
        Exception: the store cannot be opened, see `PrefetchedRows`.
    """

    def __init__(self, fast: FastTier, backing: BackingStore) -> None:
        self._fast = weakref.ref(fast)
        self.mode = backing.mode
        tables = [
            StoredTable(name, fast.layout.row_bytes(t)) for t, name in enumerate(fast.table_names)
        ]
        self.store = PrefetchedRows(backing.store, tables)
        self._is_host_rows = type(backing.store) is HostRows  # a subclass may have other methods
        self.gains_from_prefetch = not self._is_host_rows or fast.hyperparams.is_cuda
        self.generation = 0
        self._no_entries = torch.empty(0, 3, dtype=torch.int64, device="cpu")
        # By table: int64 `[r, 3]`, keys, stamps and scores of the first overflow rows.
        self._overflow = [self._no_entries] * len(tables)
        self._overflow_is_dirty = False  # whether overflow rows differ from those in the store
        self._row_bytes = [table.row_bytes for table in tables]
        self._first_overflow = [spec.rows for spec in fast.specs]
        self._moves: RowMoves | None = None  # moves of the last step that may not be applied yet
        self._writes_behind = backing.write_behind
        self.reset_stats()
        if isinstance(backing.store, HostRows):
            self._adopt_rows(backing.store)
        if self.store.note:
            self._resume(json.loads(self.store.note))
        if not self.store.note or isinstance(backing.store, HostRows):
            self._continue_clocks()

    def __del__(self) -> None:
        # The store's thread, which may be this one, may be in a call and keep the store open.
        with contextlib.suppress(AttributeError, RuntimeError):
            self.store.stop()

    @property
    def _fast_rows(self) -> FastRows:
        return FastRows(self.fast)

    @property
    def fast(self) -> FastTier:
        """Return the tables in front of the store, whose owner must keep them alive."""
        fast = self._fast()
        assert fast is not None
        return fast

    def _row_format(self) -> list[list[str]]:
        """Return the optimizer, and name and dtype of each value in the bytes of a row."""
        layout = self.fast.layout
        values = zip(layout.buffer_names, layout.dtypes, strict=True)
        value_fields = [[name, str(dtype).removeprefix("torch.")] for name, dtype in values]
        return [[self.fast.optimizer_name], *value_fields]

    def _check_row_format(self, row_format: list[list[str]]) -> None:
        """Close the store and raise ValueError if its rows have another format than this module's.

        `row_format` is a result of `_row_format`.
        """
        if row_format != self._row_format():
            self.store.close()
            raise ValueError(
                f"the store holds rows of {row_format} (optimizer, then values and dtypes), this "
                f"module has {self._row_format()}; name another store, and move the rows with "
                "state_dict from a module that fits"
            )

    def _adopt_rows(self, store: HostRows) -> None:
        """Check the format of the rows that a module has left in a `HostRows`; note the new one."""
        if store.row_format is not None and any(map(self.store.size, range(len(self._row_bytes)))):
            self._check_row_format(store.row_format)
        store.row_format = self._row_format()

    def _resume(self, note: dict[str, Any]) -> None:
        """Restore what `flush` wrote into the store's note.

        "planes" is the result of `_row_format`, "hyper" the hyperparameters, and "fallback" the
        fallback rows of each table in base64 (optional); `FastRows.clock_note` has the others.
        """
        fast = self.fast
        self._check_row_format(note["planes"])
        self._fast_rows.set_clocks(note)
        try:
            for table, text in enumerate(note.get("fallback", ())):
                self._fast_rows.set_fallback_bytes(table, base64.b64decode(text))
        except ValueError:
            self.store.close()
            raise
        fast.load_hyperparams(torch.tensor(note["hyper"], dtype=torch.float64, device="cpu"))

    def _continue_clocks(self) -> None:
        """Count steps on from the rows in the store, so that rows of later steps rank above them.

        This is for stores in memory that were open before: other stores have only rows of the last
        commit, whose note has the clocks.
        """
        fast = self.fast
        for t in range(len(self._row_bytes)):
            if not self.store.size(t):
                continue
            blocks = [(rows.stamps, rows.scores) for rows in self.store.iterate(t)]
            stamps, scores = (torch.cat(columns) for columns in zip(*blocks, strict=True))
            fast.index.set_tick(max(fast.index.tick, int(stamps.max())))
            if fast.scores is not None:
                fast.scores.continue_steps(t, stamps, scores)

    def reset_stats(self) -> None:
        """Set the counts of `stats` to zero."""
        self.move_rows()
        self._counts = [dict.fromkeys(_COUNTERS, 0) for _ in self._row_bytes]

    def stats(self) -> dict[str, TierStats]:
        """Return the counts by table (reads the device)."""
        index_stats = self.fast.index.stats()
        return {
            name: TierStats(
                lookups=index_counts["lookups"], hits=index_counts["hits"], **tier_counts
            )
            for name, index_counts, tier_counts in zip(
                self.fast.table_names, index_stats, self._counts, strict=True
            )
        }

    # Before the keys of a batch are inserted

    def find_in_store(self, keys: Keys, misses: Misses) -> list[FoundRows]:
        """Read the rows of misses from the store, per table; erase and log expired rows there.

        Writes updated overflow rows back first; earlier copies in overflow rows become invalid.
        `FoundRows.positions` number the misses of the table from 0.

        Raises:
            RuntimeError: a table has more misses than overflow rows.
        """
        self.write_back()
        self.generation += 1
        offsets = misses.offsets.tolist()
        missing_keys = keys.ids[misses.first[: offsets[-1]]].cpu()
        for t in range(len(self._row_bytes)):
            self._check_overflow(t, offsets[t + 1] - offsets[t])
        return [
            self._read_alive(t, missing_keys[offsets[t] : offsets[t + 1]], erase_expired=True)
            for t in range(len(self._row_bytes))
        ]

    def _check_overflow(self, table: int, num_misses: int) -> None:
        """Raise RuntimeError if a batch has more misses of a table than overflow rows."""
        max_misses = self.fast.layout.overflow_rows
        if num_misses > max_misses:
            raise RuntimeError(
                f"a batch may have {max_misses} ids of a table that are not in the fast tier, got "
                f"{num_misses} of {self.fast.table_names[table]!r}; choose smaller batches, or a "
                "larger BackingStore(max_misses=...)"
            )

    def _read_alive(self, table: int, keys: Tensor, *, erase_expired: bool = False) -> FoundRows:
        """Return the rows of keys in the store that have not expired."""
        found_rows, fast = self.store.read(table, keys), self.fast
        if fast.expiry is None:
            return found_rows
        is_alive = (
            found_rows.rows.stamps >= fast.expiry.first_alive_ticks(table, fast.index.tick)[0]
        )
        expired_keys = found_rows.rows.keys[~is_alive]
        if erase_expired and expired_keys.numel():
            self._expect_evictions(table)
            self.store.erase(table, expired_keys)
            self.fast.record_evictions(table, expired_keys)  # admission may refuse them
        return FoundRows(found_rows.positions[is_alive], found_rows.rows.at(is_alive))

    @staticmethod
    def is_in_store(misses: Misses, found_by_table: Sequence[FoundRows]) -> Tensor:
        """Return which misses `find_in_store` found, bool `[L]`, on the device of the misses."""
        is_stored = torch.zeros(misses.first.numel(), dtype=torch.bool, device="cpu")
        for begin, found in zip(misses.offsets.tolist(), found_by_table, strict=False):
            is_stored[begin + found.positions] = True
        return is_stored.to(misses.first.device)

    def add_stored_uses(self, misses: Misses, found_by_table: Sequence[FoundRows]) -> None:
        """Add the use counts of rows in the store to `misses.counts`, in place.

        Does nothing if eviction does not count uses.
        """
        if self.fast.index.order not in _COUNTING_ORDERS:
            return
        offsets, counts = misses.offsets.tolist(), misses.counts
        for t, found in enumerate(found_by_table):
            miss_indices = (offsets[t] + found.positions).to(counts.device)
            stored_uses = found.rows.scores.to(counts.device)
            new_uses = torch.minimum(counts[miss_indices], hash.MAX_USES - stored_uses)
            counts[miss_indices] = stored_uses + new_uses

    # Batches that one op inserts

    @property
    def is_readable_by_ops(self) -> bool:
        """Return whether the ops on batches can read the store: all rows are in a `HostRows`."""
        return self._is_host_rows and not self.store.has_rows_in_memory

    def begin_batch(self) -> tuple[Any, ...]:
        """Return the last arguments of `tier_insert_batch_`, from `store_indices` on.

        The op changes the stores, and so writes overflow rows back, unless the store's thread is to
        do that, may use them now, or has prefetched rows since `is_readable_by_ops` was read: the
        op would leave copies of their old values in memory. Then they are written back here.
        """
        store = self.store.wrapped_store
        assert isinstance(store, HostRows)
        changes = not self._writes_behind and self.store.is_idle
        changes = changes and not self.store.has_rows_in_memory  # read after `is_idle`
        if not changes:
            self.write_back()
        self.generation += 1
        is_dirty = self._overflow_is_dirty
        overflow = self._overflow if is_dirty else [self._no_entries] * len(self._overflow)
        store_arguments = store.op_arguments(is_changed=changes)
        return *store_arguments, self._first_overflow, overflow, changes

    def one_op_placement(self, results: Sequence[Tensor]) -> OneOpPlacement:
        """Return the placement of a batch with misses or overflow rows; change nothing.

        `results` are those of `tier_insert_batch_` that describe misses: the tensors of an
        `InsertedMisses`, then those of one `SwappedMisses` per table.
        """
        num_fields, begin = len(SwappedMisses._fields), len(InsertedMisses._fields)
        inserted = InsertedMisses(*results[:begin])
        moves, overflow, all_counts = RowMoves(), [], []
        for t, new_counts in enumerate(inserted.counts.tolist()):
            swapped = SwappedMisses(*results[begin : begin + num_fields])
            begin += num_fields
            if swapped.demoted.numel() or swapped.promoted.numel():
                moves.exchanged[t] = swapped
            if swapped.dropped.numel():
                moves.dropped.append((t, swapped.dropped))
            overflow.append(swapped.refused)
            counts = dict(self._counts[t])
            for name, count in zip(_COUNTERS_OF_BATCH, new_counts, strict=True):
                counts[name] += count
            all_counts.append(counts)
        return OneOpPlacement(overflow, moves, all_counts)

    def record_one_op(self, placement: OneOpPlacement) -> None:
        """Record the placement of a batch; repeated calls have no further effect."""
        self._counts, self._overflow = placement.counts, placement.overflow
        self._overflow_is_dirty = any(entries.numel() for entries in placement.overflow)
        self._moves = placement.moves if placement.moves else None

    # After the keys of a batch are inserted

    def place(
        self,
        keys: Keys,
        inserted: InsertedBatch,
        found_by_table: Sequence[FoundRows],
        batch_scores: Tensor | None,
        effects: Effects,
    ) -> BatchPlacement:
        """Copy evicted rows out of their slots, then stored rows into theirs; return the placement.

        Misses that found no slot get overflow rows.

        Args:
            keys: the batch.
            inserted: the result of its insertion.
            found_by_table: result of `find_in_store`.
            batch_scores: int64 `[T]`, scores of the batch where eviction is by assigned scores.
            effects: native calls that an interrupted call has made, restarted.
        """
        misses, result = inserted.misses, inserted.result
        assert misses is not None
        assert result is not None
        offsets, specs = misses.offsets.tolist(), self.fast.specs
        moves, swaps, overflow, all_counts = RowMoves(), [], [], []
        for t, found in enumerate(found_by_table):
            swapped = self._swap(t, result, slice(offsets[t], offsets[t + 1]), found, effects)
            swaps.append(swapped)
            moves.demoted[t] = StoredRows.from_words(swapped.demoted, swapped.demoted_rows)
            is_promoted, refused_entries = swapped.found_slots >= 0, self._no_entries
            if swapped.refused_misses.numel():
                is_promoted &= swapped.found_slots < specs[t].rows
                refused_entries = self._refused_entries(
                    t, keys, misses, swapped.refused_misses, batch_scores
                )
            overflow.append(refused_entries)
            moves.promoted[t] = found.rows.keys[is_promoted]
            counts = dict(self._counts[t])
            counts["backing_hits"] += found.positions.numel()
            counts["prefetched"] += self.store.num_prefetched(t, found.rows.keys)
            counts["new"] += offsets[t + 1] - offsets[t] - found.positions.numel()
            counts["promoted"] += moves.promoted[t].numel()
            counts["demoted"] += moves.demoted[t].keys.numel()
            counts["served_in_place"] += swapped.refused_misses.numel()
            all_counts.append(counts)
        slots_by_position = None
        if any(entries.numel() for entries in overflow):
            groups, slots = misses.groups.long(), torch.cat([swapped.slots for swapped in swaps])
            slots_of_misses = slots[groups.clamp(min=0)]
            slots_by_position = torch.where(groups < 0, inserted.slots, slots_of_misses)
        return BatchPlacement(swaps, slots_by_position, overflow, moves, all_counts)

    def _refused_entries(
        self,
        table: int,
        keys: Keys,
        misses: Misses,
        refused_misses: Tensor,
        batch_scores: Tensor | None,
    ) -> Tensor:
        """Return keys, stamps and scores of a table's misses without a slot, int64 `[r, 3]`."""
        refused_misses = misses.offsets[table] + refused_misses
        refused_keys = keys.ids[misses.first[refused_misses]].cpu()
        uses = misses.counts[refused_misses].cpu()
        scores = self._new_scores(table, uses, batch_scores)
        stamps = torch.full_like(refused_keys, self.fast.index.tick)
        return torch.stack([refused_keys, stamps, scores], dim=1)

    def _swap(
        self,
        table: int,
        result: InsertResult,
        table_misses: slice,
        found: FoundRows,
        effects: Effects,
    ) -> SwappedRows:
        """Copy rows out and in as `tier_swap_` does; `table_misses` is the range of the misses."""
        buffers, first_overflow = [*self._fast_rows.buffers_of(table)], self.fast.specs[table].rows
        slots, status, evicted = (column[table_misses] for column in result)
        positions, rows = found.positions, found.rows.values.contiguous()
        if not slots.is_cuda:
            arguments = (buffers, slots, status, evicted, positions, rows, first_overflow)
            return SwappedRows(*effects.call_once(tiers.tier_swap_, *arguments))
        keys, values, stamps, scores, num_evicted = effects.call_once(
            hash.hash_evicted_rows, buffers, slots, status, evicted
        )
        valid_rows = slice(int(num_evicted))
        demoted = torch.stack([keys, stamps, scores])[:, valid_rows].cpu()
        demoted_rows = as_bytes([column[valid_rows] for column in values])
        slots, status = slots.clone(), status.clone()
        refused_misses = (status == hash.REFUSED).nonzero().view(-1)
        slots[refused_misses] = self._overflow_slots(table, refused_misses.numel()).to(slots.device)
        status[refused_misses] = hash.NEW
        status[positions.to(status.device)] = hash.HIT
        found_slots = slots.cpu()[positions]
        has_row = found_slots >= 0
        self._fast_rows.scatter(table, found_slots[has_row], rows[has_row])
        return SwappedRows(slots, status, demoted, demoted_rows, refused_misses, found_slots)

    def record(self, inserted: InsertedBatch, placement: BatchPlacement) -> Tensor | None:
        """Record the placement of a batch; repeated calls have no further effect.

        Returns:
            The slots of the misses whose rows need initial values, int64 `[L]`, -1 for the others;
            None if all misses are in the store.
        """
        result = inserted.result
        assert result is not None
        self._counts, self._overflow = placement.counts, placement.overflow
        begin = 0
        for swapped in placement.swaps:
            end = begin + swapped.slots.numel()
            result.slots[begin:end], result.status[begin:end] = swapped.slots, swapped.status
            begin = end
        if placement.slots_by_position is not None:
            inserted.slots.copy_(placement.slots_by_position)
        self._overflow_is_dirty = any(entries.numel() for entries in placement.overflow)
        self._moves = placement.moves
        if all(swapped.found_slots.numel() == swapped.slots.numel() for swapped in placement.swaps):
            return None
        return torch.where(result.status == hash.HIT, -1, result.slots)

    def _new_scores(self, table: int, counts: Tensor, batch_scores: Tensor | None) -> Tensor:
        """Return the scores, int64 `[n]`, of keys with these use counts in the fast tier."""
        order = self.fast.index.order
        if order == "assigned":
            assert batch_scores is not None
            return batch_scores[table].cpu().expand_as(counts).clone()
        return counts if order in _COUNTING_ORDERS else torch.zeros_like(counts)

    def num_demoted(self, table: int) -> int:
        """Return the number of rows that were demoted since the last reset of the counts."""
        return self._counts[table]["demoted"]

    def demote(self, table: int, rows: StoredRows, num_demoted: int) -> None:
        """Record that rows left their slots without a batch; `move_rows` puts them into the store.

        Repeated calls change nothing. Call `move_rows` before, for earlier moves; not checked.

        Args:
            table: number of the table.
            rows: the rows.
            num_demoted: number of demoted rows so far, these included.
        """
        self._counts[table]["demoted"] = num_demoted
        if self._moves is None:
            self._moves = RowMoves()
        self._moves.demoted[table] = rows

    def start_moves(self) -> None:
        """Move rows as `move_rows` does, in the store's thread with `BackingStore.write_behind`.

        With an eviction log the caller's thread moves them, since it logs what the store drops.
        """
        if self._writes_behind and self._moves is not None and self.fast.eviction_log is None:
            self.store.start_moves(self._moves)
        else:
            self.move_rows()

    def move_rows(self) -> None:
        """Remove promoted rows from the store, and put demoted rows into it; see `RowMoves`.

        Raises:
            Exception: the store raised it, now or in its thread; the next call moves the rest.
        """
        moves = self._moves
        if moves is None:
            return
        if self.fast.eviction_log is not None:
            for t, rows in list(moves.demoted.items()):
                if rows.keys.numel():
                    self._expect_evictions(t)
        try:
            self.store.apply_moves(moves)
        finally:
            while moves.dropped:
                self._record_dropped(*moves.dropped[0], self._overflow)
                del moves.dropped[0]
        self._moves = None

    def _put_in_store(self, table: int, rows: StoredRows, *, from_overflow: bool = False) -> None:
        """Put rows into the store, and record the keys that it drops."""
        if not rows.keys.numel():
            return
        self._expect_evictions(table)
        dropped_keys = self.store.put(table, rows).keys
        self._record_dropped(table, dropped_keys, [] if from_overflow else self._overflow)

    def _record_dropped(self, table: int, dropped_keys: Tensor, overflow: Sequence[Tensor]) -> None:
        """Count and log dropped keys, but not those that overflow rows write back later."""
        if dropped_keys.numel() and overflow:
            dropped_keys = dropped_keys[
                ~torch.isin(dropped_keys, overflow[table][:, HashEntryColumn.KEY])
            ]
        if dropped_keys.numel() or self.fast.eviction_log is not None:
            self.fast.record_evictions(table, dropped_keys)
            self._counts[table]["dropped"] += dropped_keys.numel()

    # Overflow rows

    def search(self, keys: Keys) -> Tensor:
        """Return the slots of keys, int64 `[L]`; those in the store get copies in overflow rows.

        The copies are valid until `generation` changes.

        Raises:
            RuntimeError: a table has more such keys than overflow rows.
        """
        slots = self.fast.index.find(keys)
        missing = (slots < 0).nonzero().view(-1)
        if not missing.numel():
            return slots
        self.drop_overflow_rows()
        tables = tables_of(keys)[missing]
        for t in tables.unique().tolist():
            positions = missing[tables == t]
            distinct_keys, groups = keys.ids[positions].cpu().unique(return_inverse=True)
            found_rows = self._read_alive(t, distinct_keys)
            self._check_overflow(t, found_rows.positions.numel())
            overflow_slots = torch.full_like(distinct_keys, -1)
            overflow_slots[found_rows.positions] = self._overflow_slots(
                t, found_rows.positions.numel()
            )
            self._fast_rows.scatter(t, overflow_slots[found_rows.positions], found_rows.rows.values)
            slots[positions] = overflow_slots[groups].to(slots.device)
            self._overflow[t] = torch.stack(found_rows.rows[:3], dim=1)
        return slots

    def begin_search(self) -> tuple[Any, ...]:
        """Return the last arguments of `tier_find_batch_`; earlier copies become invalid."""
        self.drop_overflow_rows()
        store = self.store.wrapped_store
        assert isinstance(store, HostRows)
        return *store.op_arguments(is_changed=False), self._first_overflow

    def record_search(self, overflow: list[Tensor]) -> None:
        """Record the overflow rows that `tier_find_batch_` has written, int64 `[r, 3]` by table."""
        self._overflow = overflow

    @without_gradients
    def write_back(self) -> None:
        """Write overflow rows that were updated back to the store."""
        self.move_rows()
        if not self._overflow_is_dirty:
            return
        for t, entries in enumerate(self._overflow):
            if entries.numel():
                values = self._fast_rows.gather(t, self._overflow_slots(t, entries.shape[0]))
                rows = StoredRows.from_entries(entries, values)
                self._put_in_store(t, rows, from_overflow=True)
        self._overflow_is_dirty = False

    def will_update(self) -> None:
        """Record that backward is about to update overflow rows."""
        self._overflow_is_dirty = True

    @without_gradients
    def drop_overflow_rows(self) -> None:
        """Write overflow rows back and forget them, before rows in the store change."""
        self.write_back()
        self.generation += 1
        self._overflow = [self._no_entries] * len(self._row_bytes)

    def _overflow_slots(self, table: int, num_rows: int) -> Tensor:
        """Return the slots of the first `num_rows` overflow rows of a table, int64."""
        first_overflow = self.fast.specs[table].rows
        return torch.arange(first_overflow, first_overflow + num_rows, device="cpu")

    # Entries in and out

    def read_values(self, table: int, buffer: int, keys: Tensor) -> Tensor:
        """Read one kind of value of keys in the store, `[n, dim]` or `[n]`.

        Raises:
            RuntimeError: a key has left the store since `join_entries`.
        """
        layout, moves = self.fast.layout, self._moves
        if moves is not None:
            self.store.try_moves(moves)
        found_rows = self.store.read(table, keys)
        if found_rows.positions.numel() < keys.numel():
            raise RuntimeError(
                "entries are read before training goes on, and rows of "
                f"{self.fast.table_names[table]!r} have moved since; ask for the entries again"
            )
        values = torch.empty(keys.numel(), self._row_bytes[table], dtype=torch.uint8, device="cpu")
        values[found_rows.positions] = found_rows.rows.values
        value_bytes = [
            layout.width(table, p) * dtype.itemsize for p, dtype in enumerate(layout.dtypes)
        ]
        first_byte = sum(value_bytes[:buffer])
        bytes_of_buffer = values[:, first_byte : first_byte + value_bytes[buffer]]
        values_of_buffer = bytes_of_buffer.clone(memory_format=torch.contiguous_format).view(
            layout.dtypes[buffer]
        )
        return values_of_buffer.view(-1) if layout.has_one_per_row(buffer) else values_of_buffer

    def join_entries(self, table: int, fast: Entries, since: int | None) -> Entries:
        """Append the entries in the store to `fast`; rows in the store are read when indexed.

        `since` selects entries that were last used at this tick or later; None selects all.
        """
        columns = [[torch.empty(0, dtype=torch.int64, device="cpu")] for _ in range(3)]
        for rows in self.store.iterate(table):
            selected_rows = rows if since is None else rows.at(rows.stamps >= since)
            for column, values in zip(columns, selected_rows[:3], strict=True):
                column.append(values)
        keys, stamps, scores = (torch.cat(column) for column in columns)
        joined_rows = {
            name: ConcatenatedRows([fast.rows[name], _RowsInStore(self, table, buffer, keys)])
            for buffer, name in enumerate(self.fast.layout.buffer_names)
        }
        return Entries(
            torch.cat([fast.keys, keys]),
            torch.cat([fast.stamps, stamps]),
            None if fast.scores is None else torch.cat([fast.scores, scores]),
            joined_rows,
        )

    @without_gradients
    def load_entries(self, table: int, entries: Entries, report: Report | None) -> Loaded:
        """Put entries into the store, and report each block.

        No key may be in the fast tier; not checked. The entries to be evicted last are put last,
        since in a full store later rows displace earlier ones. The tick becomes at least the newest
        stamp.
        """
        index = self.fast.index
        index.set_tick(max(index.tick, entries.newest_stamp()))
        num_dropped = num_loaded = 0
        order = best_first(entries, index.order).cpu()
        for block in reversed(order.split(BATCH)):
            num_dropped += self._load_block(table, entries.take(block))
            num_loaded += block.numel()
            if report is not None:
                report(DumpProgress(self.fast.table_names[table], num_loaded, len(entries)))
        return Loaded(len(entries) - num_dropped, num_dropped, 0)

    def _load_block(self, table: int, entries: Entries) -> int:
        """Put entries into the store; return how many rows were dropped."""
        layout, values = self.fast.layout, []
        all_rows = torch.arange(len(entries), device="cpu")
        for p, (name, dtype) in enumerate(zip(layout.buffer_names, layout.dtypes, strict=True)):
            shape = (len(entries), layout.width(table, p))
            rows = entries.rows.get(name)
            if rows is None:
                initial_state = self.fast.specs[table].initial_state
                buffer_values = torch.full(shape, initial_state, dtype=dtype, device="cpu")
            else:
                buffer_values = rows[all_rows].to("cpu", dtype).view(shape)
            values.append(buffer_values.contiguous().view(torch.uint8))
        scores = torch.zeros_like(entries.keys) if entries.scores is None else entries.scores
        stored_rows = StoredRows(
            entries.keys.cpu(), entries.stamps.cpu(), scores.cpu(), torch.cat(values, dim=1)
        )
        dropped_keys = self.store.put(table, stored_rows).keys
        self.fast.record_evictions(table, dropped_keys)
        return dropped_keys.numel()

    def absent_keys(self, table: int, keys: Tensor) -> Tensor:
        """Write overflow rows back; return those of `keys`, on the CPU, that the store lacks."""
        self.write_back()
        is_stored = torch.zeros(keys.numel(), dtype=torch.bool, device="cpu")
        is_stored[self.store.read(table, keys).positions] = True
        return keys[~is_stored]

    # All rows

    def iter_fast_rows(self, table: int) -> Iterator[StoredRows]:
        """Yield the rows of the fast tier, in batches."""
        entries = self.fast.index.export(table)
        scores = torch.zeros_like(entries.keys) if entries.scores is None else entries.scores
        columns = (entries.keys, entries.stamps, scores, entries.slots)
        for block in zip(*(column.split(BATCH) for column in columns), strict=True):
            keys, stamps, block_scores, slots = block
            if slots.numel():
                values = self._fast_rows.gather(table, slots)
                yield StoredRows(keys.cpu(), stamps.cpu(), block_scores.cpu(), values)

    @without_gradients
    def flush(self) -> None:
        """Commit both tiers."""
        self.write_back()
        fast, tables = self.fast, range(len(self._row_bytes))
        note = {
            "planes": self._row_format(),
            "hyper": fast.hyperparams.tolist(),
            **self._fast_rows.clock_note(),
        }
        if fast.layout.has_fallback:
            note["fallback"] = [
                base64.b64encode(self._fast_rows.fallback_bytes(t)).decode() for t in tables
            ]
        self.store.flush([self.iter_fast_rows(t) for t in tables], json.dumps(note))

    def prefetch(self, keys: Keys) -> None:
        """Start reading the rows of a later batch that are in the store."""
        is_missing = self.fast.index.find(keys) < 0
        tables = tables_of(keys)
        for t in range(len(self._row_bytes)):
            self.store.start_prefetch(t, keys.ids[is_missing & (tables == t)].cpu())

    @without_gradients
    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Remove keys from the store; return which were there, bool `[n]` on the CPU.

        Of the positions of a repeated key only the first is true.
        """
        self.drop_overflow_rows()
        keys = keys.cpu()
        distinct_keys, groups = keys.unique(return_inverse=True)
        first_positions = torch.full_like(distinct_keys, keys.numel())
        first_positions.scatter_reduce_(0, groups, torch.arange(keys.numel(), device="cpu"), "amin")
        is_erased = torch.zeros(keys.numel(), dtype=torch.bool, device="cpu")
        self._expect_evictions(table)
        is_erased[first_positions] = self.store.erase(table, distinct_keys)
        self.fast.record_evictions(table, keys[is_erased])
        return is_erased

    def _expect_evictions(self, table: int) -> None:
        """Announce to the eviction log, if any, that keys of a table may leave."""
        log = self.fast.eviction_log
        if log is not None:
            log.expect(table, self.fast.index.tick)

    @without_gradients
    def assign_scores(self, table: int, keys: Tensor, scores: Tensor) -> Tensor:
        """Set the scores of distinct keys in the store; return which have a row, bool `[n]`."""
        self.drop_overflow_rows()
        found_rows = self.store.read(table, keys)
        self._put_in_store(table, found_rows.rows._replace(scores=scores[found_rows.positions]))
        is_present = torch.zeros(keys.numel(), dtype=torch.bool, device="cpu")
        is_present[found_rows.positions] = True
        return is_present

    def expire(self, table: int, before: int) -> int:
        """Remove rows in the store that were last used before a tick; return how many."""
        self.write_back()
        self._expect_evictions(table)
        expired_keys = self.store.expire(table, before)
        self.fast.record_evictions(table, expired_keys)
        if torch.isin(self._overflow[table][:, HashEntryColumn.KEY], expired_keys).any():
            self.drop_overflow_rows()
        return expired_keys.numel()

    @without_gradients
    def clear(self) -> None:
        """Remove all rows and reset the counts, also if the store cannot take pending moves."""
        self._overflow_is_dirty = False
        if self._moves is not None:
            self.store.cancel_moves(self._moves)
        self.drop_overflow_rows()
        for t in range(len(self._row_bytes)):
            self.store.clear(t)
        self.reset_stats()


class _RowsInStore(SelectedRows):
    """One kind of value of keys in the store, read when it is indexed."""

    def __init__(self, tier: BackingTier, table: int, buffer: int, keys: Tensor) -> None:
        layout = tier.fast.layout
        self._tier, self._table, self._buffer, self._keys = tier, table, buffer, keys
        self.dtype = layout.dtypes[buffer]
        shape = () if layout.has_one_per_row(buffer) else (layout.width(table, buffer),)
        self.shape = (keys.numel(), *shape)

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._tier.read_values(self._table, self._buffer, self._keys[index.to("cpu")])
