"""HashIndex: the keys of T dynamic tables and their slots, as a module over `emblib.ops.hash`.

`find` looks keys up. `insert` is a training step: touch the keys that hit, grow tables for the
missing ones, insert those that are admitted. Native calls are made once per `Effects`, so that the
same call completes an interrupted insertion. `emblib.ops.hash` defines tensors and ops.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import HashEntryColumn, HashTableColumn
from emblib.dynamic.saving import dumps
from emblib.dynamic.slot_versions import SlotVersions
from emblib.ops import codes, hash
from emblib.ops.effects import Effects
from emblib.ops.hash import (
    COUNTERS,
    QUEUE_WORDS,
    SCORED_ORDERS,
    TABLE_FIELDS,
    InsertedBatch,
    InsertResult,
    Keys,
    Misses,
)
from emblib.specs import SLOTS_PER_BUCKET, DynamicSpec
from emblib.tables import memory
from emblib.tables.parameters import refuse_averages

HASH_KEYS = "hash_keys"  # the name in state dicts
MAX_TICK = 1 << 62  # ticks are less than this
_SNAPSHOT_ENTRIES = ("tables", "clock", "counters", "tags", "entries")


def check_device(device: torch.device) -> None:
    """Raise ValueError for a device that hash tables do not support: meta."""
    if device.type == "meta":
        raise ValueError("dynamic tables have keys to begin with, so they cannot be on meta")


class RowBuffers(NamedTuple):
    """Rows by slot, which move with their entries when a table grows.

    Attributes:
        buffers: contiguous tensors of any dtype.
        layout: int64 `[T, P, 2]` on the device: for each table and buffer the byte at which row 0
            begins, and the bytes per row.
        on_grow: function `on_grow(table, rows_before, rows_after)`, called before a table uses more
            rows, on the CPU only; None for none.
    """

    buffers: list[Tensor]
    layout: Tensor
    on_grow: Callable[[int, int, int], None] | None = None


class ExportedEntries(NamedTuple):
    """Copies of entries of one table by ascending slot, int64 `[N]` each, on the index's device.

    `scores` is None if entries have none.
    """

    keys: Tensor
    slots: Tensor
    stamps: Tensor
    scores: Tensor | None


class HashIndex(nn.Module):
    """Map the keys of T tables to slots.

    A key keeps its slot while it is in its table, unless the table grows, shrinks or is loaded.

    The index has no lock: the module that owns the index holds a lock around every call. Calls that
    read the device wait for it.

    Code that changes `tensors()` without methods of the index must call `versions.advance()`; not
    checked.

    Args:
        specs: capacity, growth and eviction of each table; dims and other fields of values are
            not used. All must agree in the order of eviction and in `insert_policy`.
        device: device of the index; None is torch's default device.
        hash_keys: signed 64-bit number per table, on which its hash depends; see
            `emblib.dynamic.keys.hash_key_of`. None is 0 for all: then anyone can construct keys
            that all share their buckets.
        has_scores: whether entries have a score even if the order of eviction has none; the owner
            of the index writes these scores.

    Attributes:
        order: order of eviction of all tables, one of `emblib.ops.hash.ORDERS`.
        limits: buckets up to which each table may grow now, see `set_limit`.
        grant: function of a memory budget: `grant(table, buckets)` returns to how many of these
            buckets the table may grow; None if there is no budget.
        grows: whether a table may grow.

    Raises:
        ValueError: the tables disagree in the order of eviction or insert_policy, or the device is
            meta.
    """

    # The tensors of `emblib.ops.hash`, with the S slots of all tables one after the other.
    tags: Tensor  # uint8 `[S]`
    entries: Tensor  # int64 `[S, 2 or 3]`, see `HashEntryColumn`
    tables: Tensor  # int64 `[T, 6]`, see `HashTableColumn`
    clock: Tensor  # int64 `[1]`, the tick: number of inserted batches, see `set_tick`
    counters: Tensor  # int64 `[T, 8]`, see `HashCounter`
    queues: Tensor  # int64 `[S / 32, 8]`, on the CPU only

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        device: torch.device | str | None = None,
        hash_keys: Sequence[int] | None = None,
        *,
        has_scores: bool = False,
    ) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self._hash_keys = [0] * len(self.specs) if hash_keys is None else list(hash_keys)
        policies = {(spec.eviction.order, spec.insert_policy.value) for spec in self.specs}
        if len(policies) > 1:
            policy_names = {
                f"{spec.eviction.value} ({spec.insert_policy.name})" for spec in self.specs
            }
            raise ValueError(
                "the tables of a module must agree in eviction and insert_policy, got "
                f"{', '.join(sorted(policy_names))}; make one module for each"
            )
        self.order, self.insert_policy = policies.pop() if policies else ("none", "wins")
        self.limits = [spec.max_buckets for spec in self.specs]
        self.grant: Callable[[int, int], int] | None = None
        self.grows = any(spec.buckets < spec.max_buckets for spec in self.specs)
        device = torch.empty(0, device=device).device
        check_device(device)
        ops.require_kernels(device)
        self._allocate(device, 3 if has_scores or self.order in SCORED_ORDERS else 2)
        self.clear()

    def _allocate(self, device: torch.device, num_columns: int) -> None:
        """Register the tensors of the index; `clear` must initialise them."""
        num_slots = sum(spec.rows for spec in self.specs)
        self._first_slots = [0]
        for spec in self.specs:
            self._first_slots.append(self._first_slots[-1] + spec.rows)
        self.versions = SlotVersions(self._first_slots)
        used_share = sum(spec.buckets for spec in self.specs) * SLOTS_PER_BUCKET / max(num_slots, 1)
        entries = memory.reserve(num_slots * num_columns, torch.int64, device, used_share).view(
            num_slots, num_columns
        )
        num_tables = len(self.specs)
        self._register_tensor("tags", memory.reserve(num_slots, torch.uint8, device, used_share))
        self._register_tensor("entries", entries)
        for name, shape in (
            ("tables", (num_tables, len(TABLE_FIELDS))),
            ("clock", (1,)),
            ("counters", (num_tables, len(COUNTERS))),
        ):
            self._register_tensor(name, torch.zeros(shape, dtype=torch.int64, device=device))
        self._allocate_queues(used_share)

    def _allocate_queues(self, used_share: float = 0.0) -> None:
        """Make empty eviction queues on the CPU; other devices have none.

        `used_share` is the share of them that is in use at once, see `memory.reserve`.
        """
        if self.tags.device.type == "cpu":
            num_words = self.tags.numel() // SLOTS_PER_BUCKET * QUEUE_WORDS
            queues = memory.reserve(num_words, torch.int64, self.tags.device, used_share)
            self._register_tensor("queues", queues.view(-1, QUEUE_WORDS))

    def _register_tensor(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def tensors(self) -> list[Tensor]:
        """Return the list `index` of tensors that ops take, in the order of `emblib.ops.hash`."""
        return list(self._buffers.values())  # type: ignore[arg-type]  # none is None

    def clear(self) -> None:
        """Remove all keys, set counters and tick to 0, and tables to their initial capacity."""
        self.versions.note_all_emptied()
        for t, spec in enumerate(self.specs):
            first_slot = self._first_slots[t]
            num_slots = max(self.buckets(t), spec.buckets) * SLOTS_PER_BUCKET
            if self._has_queues:
                self.queues[
                    first_slot // SLOTS_PER_BUCKET : (first_slot + num_slots) // SLOTS_PER_BUCKET
                ].zero_()
            self.tags[first_slot : first_slot + num_slots].zero_()
            self._advise_growth(t, 0, spec.buckets * SLOTS_PER_BUCKET)
        table_rows = [
            (
                first_slot // SLOTS_PER_BUCKET,
                spec.buckets,
                limit,
                0,
                spec.max_load_1024ths,
                hash_key,
            )
            for first_slot, spec, limit, hash_key in zip(
                self._first_slots, self.specs, self.limits, self._hash_keys, strict=False
            )
        ]
        self.tables.copy_(
            torch.tensor(table_rows, dtype=torch.int64, device="cpu").view(-1, len(TABLE_FIELDS))
        )
        self.clock.zero_()
        self.counters.zero_()

    @property
    def has_scores(self) -> bool:
        """Return whether entries have a score."""
        return self.entries.shape[1] > HashEntryColumn.SCORE

    @property
    def hash_keys(self) -> Tensor:
        """Return the hash key of each table, int64 `[T]`, on the CPU."""
        return torch.tensor(self._hash_keys, dtype=torch.int64, device="cpu")

    def hash_key(self, table: int) -> int:
        """Return the hash key of a table."""
        return self._hash_keys[table]

    def clear_table(self, table: int, hash_key: int | None = None) -> None:
        """Remove all keys of a table; its capacity stays, and so do its counters.

        Args:
            table: number of the table.
            hash_key: the new hash key; None keeps the current one.
        """
        self.versions.note_emptied(table)
        self.forget_queues(table)
        self.table_tags(table).zero_()
        self.tables[table, HashTableColumn.SIZE] = 0
        if hash_key is not None:
            self._hash_keys[table] = hash_key
            self.tables[table, HashTableColumn.HASH_KEY] = hash_key

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # The module that owns the index saves and loads the keys.
        destination[prefix + HASH_KEYS] = self.hash_keys

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # Only a table without keys can get another hash key, see `clear_table`.
        unexpected_keys: list[str] = arguments[3]
        unexpected_keys.extend(
            key for key in state_dict if key.startswith(prefix) and key != prefix + HASH_KEYS
        )

    def _advise_growth(self, table: int, rows_before: int, rows: int) -> None:
        for tensor, *range_bounds in self.memory_ranges(table, rows_before, rows):
            memory.advise_growth(tensor, *range_bounds)

    def memory_ranges(
        self, table: int, slots_before: int, slots_now: int
    ) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield the arguments of `memory.advise_growth` for each tensor by slot, flat.

        These are the tensor, the first element of the table, and how many of its elements were in
        use with `slots_before` slots and are with `slots_now` slots.
        """
        first_slot = self._first_slots[table]
        # Each tensor has `elements` elements per `slots` slots.
        tensors = [(self.tags, 1, 1), (self.entries.view(-1), self.entries.shape[1], 1)]
        if self._has_queues:
            tensors.append((self.queues.view(-1), QUEUE_WORDS, SLOTS_PER_BUCKET))
        if self.versions.by_slot is not None:
            tensors.append((self.versions.by_slot, 1, 1))
        for tensor, elements, slots in tensors:
            first_element, num_before, num_now = (
                num_slots * elements // slots for num_slots in (first_slot, slots_before, slots_now)
            )
            yield tensor, first_element, num_before, num_now

    def find(self, keys: Keys) -> Tensor:
        """Return the slots of all positions, int64 `[L]`, -1 for none; changes nothing."""
        return hash.hash_find(self.tensors(), *keys)

    def insert(
        self,
        keys: Keys,
        counts: Tensor | None = None,
        *,
        batch_scores: Tensor | None = None,
        admit: Callable[[Keys, Misses], Tensor | None] | None = None,
        rows: RowBuffers | None = None,
        effects: Effects | None = None,
    ) -> InsertedBatch:
        """Touch the keys of a batch that are in their table, and insert the missing ones.

        The rows of evicted keys are not changed; a new key has the row that was in its slot. After
        an interruption, the same call with the same `effects`, restarted, completes the insertion.

        Args:
            keys: the batch.
            counts: int64 `[L]`, the number of uses per position; None is 1 each.
            batch_scores: int64 `[T]`, the scores of this batch, needed where eviction is by
                assigned scores.
            admit: function of the batch and its misses that returns which of these to admit: bool
                `[L]` by miss, or None for all. It may overwrite `Misses.counts`, by which
                orders with counts rank new keys. None admits all.
            rows: values that move with their entries when a table grows; None if there are none.
            effects: native calls that were made before an interruption; None for a first call.

        Returns:
            The slot of each position, int64 `[L]`, -1 for none, with the misses and their results.
            On the CPU these are None if all keys hit.
        """
        effects = Effects() if effects is None else effects
        self.begin_insertion(effects)
        index, order = self.tensors(), codes.HASH_ORDER[self.order]
        slots, *miss_tensors = effects.call_once(
            hash.hash_touch_, index, *keys, counts, batch_scores, order
        )
        misses = Misses(*miss_tensors)
        if not slots.is_cuda and misses.offsets.tolist()[-1] == 0:
            return InsertedBatch(slots)
        admitted = None
        if admit is not None:  # which may change the counts, also when it runs again
            misses = misses._replace(counts=misses.counts.clone())
            admitted = admit(keys, misses)
        if self.grows:
            self._grow(keys, slots, misses, admitted, rows, effects)
        *result_tensors, slots, status = effects.call_once(
            hash.hash_insert_,
            index,
            keys.ids,
            misses.first,
            misses.counts,
            misses.offsets,
            admitted,
            batch_scores,
            order,
            codes.INSERT_POLICY[self.insert_policy],
            slots,
            misses.groups,
        )
        result = InsertResult(*result_tensors)
        return self.end_insertion(keys, InsertedBatch(slots, misses, result, status))

    def begin_insertion(self, effects: Effects) -> None:
        """Begin an insertion, unless `effects` are of an interrupted one that is completed."""
        if not effects.has_next_result:
            self.versions.store_last_insertion(self)
            self.versions.advance()

    def end_insertion(self, keys: Keys, inserted: InsertedBatch) -> InsertedBatch:
        """Record an insertion with misses for watchers of `versions`, and return it."""
        self.versions.note_batch(keys, inserted)
        return inserted

    def _grow(
        self,
        keys: Keys,
        slots: Tensor,
        misses: Misses,
        admitted: Tensor | None,
        rows: RowBuffers | None,
        effects: Effects,
    ) -> None:
        """Grow tables as far as their admitted misses need, and correct `slots` in place."""
        if not slots.is_cuda and not effects.has_next_result:
            offsets = misses.offsets.tolist()
            for t in range(len(self.specs)):
                num_new = offsets[t + 1] - offsets[t]
                if num_new and admitted is not None:
                    num_new = int(admitted[offsets[t] : offsets[t + 1]].sum())
                self._prepare_growth(t, self.size(t) + num_new, rows)
        self._split_buckets(keys, slots, misses.offsets, admitted, rows, effects)

    def _split_buckets(
        self,
        keys: Keys,
        slots: Tensor,
        offsets: Tensor,
        admitted: Tensor | None,
        rows: RowBuffers | None,
        effects: Effects,
    ) -> None:
        """Split buckets for misses, see `hash_grow_`; move `rows` and the versions by slot."""
        buffers: list[Tensor] = [] if rows is None else rows.buffers
        if rows is None:
            layout = torch.zeros((len(self.specs), 0, 2), dtype=torch.int64, device=slots.device)
        else:
            layout = rows.layout
        versions = self.versions
        if versions.by_slot is not None and versions.layout is not None:
            buffers = [*buffers, versions.by_slot]
            layout = torch.cat([layout, versions.layout], 1)
        index = self.tensors()
        effects.call_once(hash.hash_grow_, index, buffers, layout, *keys, slots, offsets, admitted)

    def _prepare_growth(self, table: int, num_keys: int, rows: RowBuffers | None) -> None:
        """Prepare memory for the rows that a table needs to grow to a number of keys.

        A memory budget may grant fewer rows.
        """
        spec, num_buckets = self.specs[table], self.buckets(table)
        wanted_buckets = hash.wanted_buckets(
            num_keys, num_buckets, spec.max_buckets, spec.max_load_1024ths
        )
        if wanted_buckets > num_buckets and self.grant is not None:
            wanted_buckets = self.grant(table, wanted_buckets)
        if wanted_buckets > num_buckets:
            self._advise_growth(
                table, num_buckets * SLOTS_PER_BUCKET, wanted_buckets * SLOTS_PER_BUCKET
            )
            if rows is not None and rows.on_grow is not None:
                rows.on_grow(
                    table, num_buckets * SLOTS_PER_BUCKET, wanted_buckets * SLOTS_PER_BUCKET
                )

    def set_limit(self, table: int, buckets: int) -> None:
        """Set the buckets up to which a table may grow; at least those in use, not checked."""
        self.tables[table, HashTableColumn.MAX_BUCKETS] = buckets
        self.limits[table] = buckets

    def reserve(self, table: int, keys: int, rows: RowBuffers | None = None) -> None:
        """Grow a table to the size that a number of keys needs, at most to its capacity.

        A memory budget may grant less. `rows` move with their entries; None if there are none.
        """
        self.versions.store_last_insertion(self)
        self.versions.advance()
        device = self.tags.device
        num_new = max(0, min(keys, self.specs[table].rows) - self.size(table))
        if not self.tags.is_cuda:
            self._prepare_growth(table, self.size(table) + num_new, rows)
        offsets = torch.zeros(len(self.specs) + 1, dtype=torch.int64, device=device)
        offsets[table + 1 :] = num_new
        # A batch of `num_new` misses; the values of its keys do not matter.
        ids = torch.zeros(num_new, dtype=torch.int64, device=device)
        slots = torch.full_like(ids, -1)
        self._split_buckets(Keys.from_ids(ids, table), slots, offsets, None, rows, Effects())

    def erase(self, keys: Keys, effects: Effects | None = None) -> Tensor:
        """Remove keys; return the freed slots by position, int64 `[L]`, -1 for none.

        Only the first position of a key that repeats has its slot.
        """
        self.versions.advance()
        effects = Effects() if effects is None else effects
        erased_slots: Tensor = effects.call_once(hash.hash_erase_, self.tensors(), *keys)
        return erased_slots

    def expire(
        self,
        table: int,
        before: int,
        first_bucket: int = 0,
        num_buckets: int | None = None,
        effects: Effects | None = None,
    ) -> Tensor:
        """Remove the keys that were last used before a tick, and wait for the device.

        `num_buckets` buckets from `first_bucket` on are searched; None is all that follow.

        Returns:
            The removed keys, int64 `[N]`, on the index's device.
        """
        if num_buckets is None:
            num_buckets = max(0, self.limits[table] - first_bucket)
        effects = Effects() if effects is None else effects
        is_expired = self.free_expired(table, before, first_bucket, num_buckets, effects)
        # A freed slot keeps its entry until a key is inserted there; only its tag is 0.
        begin = self._first_slots[table] + first_bucket * SLOTS_PER_BUCKET
        return self.entries[begin : begin + is_expired.numel(), HashEntryColumn.KEY][is_expired]

    def free_expired(
        self, table: int, before: int, first_bucket: int, num_buckets: int, effects: Effects
    ) -> Tensor:
        """Remove keys as `expire` does, without waiting; return which slots it freed, bool `[n]`.

        These are the n slots of the searched buckets that the table may use.
        """
        self.versions.advance()
        first_bucket = min(first_bucket, self.limits[table])
        num_buckets = min(num_buckets, self.limits[table] - first_bucket)
        is_expired: Tensor = effects.call_once(
            hash.hash_expire_, self.tensors(), table, first_bucket, num_buckets, before
        )
        return is_expired

    def export(self, table: int, since: int | None = None) -> ExportedEntries:
        """Return the entries of a table, all or those used at tick `since` or later."""
        entries = self.table_entries(table)
        is_used = self.table_tags(table) != 0
        if since is not None:
            is_used &= entries[:, HashEntryColumn.STAMP] >= since
        slots = is_used.nonzero().view(-1)
        used_entries = entries[slots]
        scores = used_entries[:, HashEntryColumn.SCORE].clone() if self.has_scores else None
        return ExportedEntries(
            used_entries[:, HashEntryColumn.KEY].clone(),
            slots,
            used_entries[:, HashEntryColumn.STAMP].clone(),
            scores,
        )

    def set_entries(
        self, table: int, slots: Tensor, stamps: Tensor, scores: Tensor | None = None
    ) -> None:
        """Overwrite the stamps and scores of entries, int64 `[N]` each; None leaves the scores.

        `slots` of the table must be distinct and >= 0, and `scores` be None if entries have none;
        not checked.
        """
        self.forget_queues(table, slots)
        entries = self.table_entries(table)
        entries[slots, HashEntryColumn.STAMP] = stamps
        if scores is not None:
            entries[slots, HashEntryColumn.SCORE] = scores

    def table_tags(self, table: int) -> Tensor:
        """Return the tags of the buckets in use, uint8 `[capacity]`, as a view."""
        first_slot = self._first_slots[table]
        return self.tags[first_slot : first_slot + self.capacity(table)]

    def table_entries(self, table: int) -> Tensor:
        """Return the entries of the buckets in use, int64 `[capacity, 2 or 3]`, as a view."""
        first_slot = self._first_slots[table]
        return self.entries[first_slot : first_slot + self.capacity(table)]

    def views_by_slot(self, table: int) -> list[Tensor]:
        """Return views of the entries in use and, if there are any, of the versions by slot."""
        self.versions.store_last_insertion(self)
        first_slot = self._first_slots[table]
        views = [self.table_entries(table)]
        versions = self.versions.by_slot
        if versions is not None:
            views.append(versions[first_slot : first_slot + self.capacity(table)])
        return views

    def buckets(self, table: int) -> int:
        """Return the number of buckets in use (reads the device)."""
        return int(self.tables[table, HashTableColumn.BUCKETS])

    def capacity(self, table: int) -> int:
        """Return the number of slots in use (reads the device)."""
        return self.buckets(table) * SLOTS_PER_BUCKET

    def size(self, table: int) -> int:
        """Return the number of keys of a table (reads the device)."""
        return int(self.tables[table, HashTableColumn.SIZE])

    @property
    def tick(self) -> int:
        """Return the number of batches that were inserted (reads the device)."""
        return int(self.clock)

    def set_tick(self, tick: int) -> None:
        """Continue counting from `tick`; the caller must ensure that no stamp exceeds it."""
        if self._has_queues and tick < self.tick:
            for table in range(len(self.specs)):
                self.forget_queues(table)
        self.clock.fill_(tick)

    def forget_queues(self, table: int, slots: Tensor | None = None) -> None:
        """Empty eviction queues, before tags, stamps or scores of their buckets are written.

        Args:
            table: number of the table.
            slots: int64 `[N]`, the slots that are written, -1 for none; None is all.
        """
        if not self._has_queues:
            return
        first_bucket = self._first_slots[table] // SLOTS_PER_BUCKET
        queues = self.queues[first_bucket : first_bucket + self.buckets(table)]
        if slots is None:
            queues.zero_()
        else:
            queues.index_fill_(0, slots[slots >= 0] // SLOTS_PER_BUCKET, 0)

    @property
    def _has_queues(self) -> bool:
        return "queues" in self._buffers

    def stats(self) -> list[dict[str, int]]:
        """Return the counters of each table by name (reads the device)."""
        return [dict(zip(COUNTERS, row, strict=True)) for row in self.counters.tolist()]

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self.counters.zero_()

    def nbytes(self) -> int:
        """Return the bytes of the slots in use (reads the device)."""
        num_slots = sum(self.capacity(t) for t in range(len(self.specs)))
        num_words = self.entries.shape[1] + (self.versions.by_slot is not None)
        num_queue_words = num_slots // SLOTS_PER_BUCKET * QUEUE_WORDS * self._has_queues
        return num_slots + (num_slots * num_words + num_queue_words) * self.entries.itemsize

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the index on the CPU, slot by slot; only the buckets in use.

        `tables`, `clock` and `counters` are copies of the buffers; `tags` and `entries` are lists
        of copies, by table, of what `table_tags` and `table_entries` return.
        """
        tables = self.tables.cpu().clone()  # without the limits of a budget, which a copy has not
        tables[:, HashTableColumn.MAX_BUCKETS] = torch.tensor(
            [spec.max_buckets for spec in self.specs], device="cpu"
        )
        return {
            "tables": tables,
            "clock": self.clock.cpu().clone(),
            "counters": self.counters.cpu().clone(),
            "tags": [self.table_tags(t).cpu().clone() for t in range(len(self.specs))],
            "entries": [self.table_entries(t).cpu().clone() for t in range(len(self.specs))],
        }

    def check_snapshot(self, snapshot: Any) -> list[int]:
        """Check that `restore` takes a snapshot; return the number of slots of each table in it.

        Raises:
            ValueError: the snapshot is of tables of other capacities or loads, has scores where
                this index has none or the reverse, or is malformed. Values of tags and entries are
                not checked.
        """
        entries = dumps.check_entries("index", snapshot, _SNAPSHOT_ENTRIES)
        tables = dumps.check_tensor("index.tables", entries["tables"], torch.int64, (None, None))
        saved_tables = _with_hash_keys(tables)
        fixed_columns = [
            i
            for i in range(len(TABLE_FIELDS))
            if i not in (HashTableColumn.BUCKETS, HashTableColumn.SIZE, HashTableColumn.HASH_KEY)
        ]
        is_same = (
            saved_tables.shape == self.tables.shape
            and saved_tables[:, fixed_columns].tolist() == self.tables[:, fixed_columns].tolist()
        )
        if not is_same:
            raise ValueError(
                "a snapshot restores only tables of the same capacities, loads and eviction; its "
                f"{TABLE_FIELDS} are {saved_tables.tolist()}, this index has "
                f"{self.tables.tolist()}; "
                "load a state_dict instead, which fits any capacity"
            )
        buckets = saved_tables[:, HashTableColumn.BUCKETS].tolist()
        for num_buckets, spec in zip(buckets, self.specs, strict=True):
            if not 0 < num_buckets <= spec.max_buckets:
                raise ValueError(
                    f"index.tables has {num_buckets} buckets of a table, of which there are 1 to "
                    f"{spec.max_buckets}"
                )
        for name in ("clock", "counters"):
            buffer: Tensor = getattr(self, name)
            dumps.check_tensor(f"index.{name}", entries[name], buffer.dtype, buffer.shape)
        for name, shape in (("tags", ()), ("entries", self.entries.shape[1:])):
            buffer = getattr(self, name)
            tensors = dumps.check_list(f"index.{name}", entries[name], len(buckets), "table")
            for tensor, num_buckets in zip(tensors, buckets, strict=True):
                expected_shape = (num_buckets * SLOTS_PER_BUCKET, *shape)
                dumps.check_tensor(f"index.{name}", tensor, buffer.dtype, expected_shape)
        return [num_buckets * SLOTS_PER_BUCKET for num_buckets in buckets]

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot, with its hash keys; slots that were found before become stale.

        Raises:
            ValueError: see `check_snapshot`; nothing was changed.
        """
        self.check_snapshot(snapshot)
        saved_tables = _with_hash_keys(snapshot["tables"])
        self.clear()
        for t in range(len(self.specs)):
            num_rows = int(saved_tables[t, HashTableColumn.BUCKETS]) * SLOTS_PER_BUCKET
            self._advise_growth(t, self.capacity(t), num_rows)
            first_slot = self._first_slots[t]
            self.tags[first_slot : first_slot + num_rows] = snapshot["tags"][t].to(self.tags.device)
            self.entries[first_slot : first_slot + num_rows] = snapshot["entries"][t].to(
                self.tags.device
            )
        for name in ("clock", "counters"):
            getattr(self, name).copy_(snapshot[name])
        self.tables.copy_(saved_tables)
        self._hash_keys = saved_tables[:, HashTableColumn.HASH_KEY].tolist()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.tags.device.type != "cpu":
            self._buffers.pop("queues", None)  # kernels of other devices would not update them
        elif not self._has_queues:
            self._allocate_queues()
        return self

    def copy_to(self, device: torch.device) -> "HashIndex":
        """Return a copy on another device; slots that were found in this index are stale there."""
        copied = HashIndex(self.specs, device, has_scores=self.has_scores)
        copied.restore(self.snapshot())
        copied.versions.current = self.versions.current + 1
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> "HashIndex":
        refuse_averages()
        specs = copy.deepcopy(self.specs, memo)
        copied = HashIndex(specs, self.tags.device, has_scores=self.has_scores)
        copied.restore(self.snapshot())
        copied.versions.current = self.versions.current
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.specs, str(self.tags.device), self.snapshot(), self.versions.current)

    def extra_repr(self) -> str:
        """Return capacities and eviction."""
        capacities = ", ".join(f"{spec.capacity}" for spec in self.specs)
        return f"capacity=({capacities}), order={self.order}, insert_policy={self.insert_policy}"


def _with_hash_keys(tables: Tensor) -> Tensor:
    """Return the `tables` of a snapshot; earlier versions had no hash key, which is 0."""
    if tables.dim() == 2 and tables.shape[1] == HashTableColumn.HASH_KEY:
        return nn.functional.pad(tables, (0, 1))
    return tables


def _rebuild(
    specs: tuple[DynamicSpec, ...], device: str, snapshot: Mapping[str, Any], version: int
) -> HashIndex:
    has_scores = any(entries.shape[1] > HashEntryColumn.SCORE for entries in snapshot["entries"])
    index = HashIndex(specs, device, has_scores=has_scores)
    index.restore(snapshot)
    index.versions.current = version
    return index
