"""SlotVersions: the version of a hash index, and which keys have left it since an earlier one.

A backward pass finds the rows of its batch again by their slots. Since its forward, other batches
may have evicted keys, and even inserted the same keys again, with new rows. So the index counts its
changes, and can tell for each key of a batch whether the key has left since.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from emblib.columns import HashTableColumn
from emblib.ops.hash import EVICTING, HIT, NEW, STORED, InsertedBatch, Keys, tables_of
from emblib.specs import SLOTS_PER_BUCKET
from emblib.tables import memory

_MAX_REMOVALS_PER_TABLE = 64  # then they are merged, in case a watcher stays alive


class VersionedIndex(Protocol):
    """The index whose slots have versions."""

    tags: Tensor  # uint8 `[S]`, by slot
    tables: Tensor  # int64 `[T, 6]`, see `HashTableColumn`

    def find(self, keys: Keys) -> Tensor:
        """Return the slots of a batch, int64 `[L]`, -1 for none."""

    def capacity(self, table: int) -> int:
        """Return the number of slots in use of a table."""


class LastInsertion(NamedTuple):
    """The last insertion, while its versions are not stored by slot yet.

    Attributes:
        version: version of the index after the insertion.
        keys: the batch.
        inserted: result of the insertion, by miss; by position if its misses are None.
    """

    version: int
    keys: Keys
    inserted: InsertedBatch

    def changed_positions(self) -> tuple[Tensor, Tensor]:
        """Return which positions have a new key, and which a key that was missing; bool `[L]`."""
        misses, result, status = self.inserted[1:]
        if misses is None or result is None:
            assert status is not None
            is_new = (status == NEW) | (status == EVICTING)
            return is_new, is_new | (status == STORED)
        status = result.status[misses.groups.clamp(min=0).long()]
        is_new = (status == NEW) | (status == EVICTING)
        # Here rows promoted from a backing store have status HIT: their keys never left.
        return is_new, (misses.groups >= 0) & (is_new | (status == HIT))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are read to store the versions."""
        slots, misses, result, status = self.inserted
        read_tensors = (status, None if misses is None else misses.groups, result and result.status)
        return [*self.keys, slots, *(tensor for tensor in read_tensors if tensor is not None)]


class Removal(NamedTuple):
    """Keys that left a table with a backing store.

    Attributes:
        version: the version of the last removal of a key.
        table: number of the table.
        keys: int64 `[n]`.
        versions: int64 `[n]`, the version of the removal of each key.
    """

    version: int
    table: int
    keys: Tensor
    versions: Tensor


class SlotVersions:
    """The version of an index, which each change of slots advances, and the versions of its slots.

    `has_left` tells an object that was registered by `watch` which keys have left since. For this
    the version at which each slot got its key is stored, in 8 bytes per slot, but lazily. The last
    insertion is remembered until the next one, and its versions are stored only if an earlier
    watcher is still alive. So training steps that do not overlap cost nothing.

    Slots do not tell whether a key has left from behind a backing store, in which it has no slot.
    So the owner of such tables notes removals, which are remembered while watchers are alive.

    Methods take the index, because a reference to it would be a cycle. They have no lock of their
    own: the owner of the index holds its lock.

    Args:
        first_slots: the first slot of each table, then the number of all slots S.

    Attributes:
        current: number of changes after which slots may have other keys: insertions, removals,
            restores.
        by_slot: int64 `[S + 1]`, the version at which the key of each slot was inserted, then a
            spare entry, which is 0 between calls. None until a watcher needs it.
        layout: layout of `by_slot` as a buffer of `RowBuffers`; None if `by_slot` is None.
    """

    def __init__(self, first_slots: Sequence[int]) -> None:
        self._first_slots = first_slots
        self.current = 0
        self.by_slot: Tensor | None = None
        self.layout: Tensor | None = None
        self._watchers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last_insertion: LastInsertion | None = None  # not yet in `by_slot`
        self._removals: list[Removal] = []  # in order of their versions
        self._emptied_at = [0] * (len(first_slots) - 1)  # the last version that emptied each table

    def advance(self) -> None:
        """Count a change."""
        self.current += 1

    def note_all_emptied(self) -> None:
        """Count a change that empties all tables, and drop the versions by slot."""
        self.current += 1
        self._emptied_at = [self.current] * len(self._emptied_at)
        self._last_insertion = self.by_slot = self.layout = None
        self._removals = []

    def note_emptied(self, table: int) -> None:
        """Count a change that empties a table."""
        self.current += 1
        self._emptied_at[table] = self.current

    def watch(self, watcher: object) -> None:
        """Enable `has_left` from this version on, as long as `watcher`, held weakly, lives."""
        self._watchers[watcher] = self.current

    def has_left(
        self,
        index: VersionedIndex,
        keys: Keys,
        slots: Tensor,
        version: int,
        is_fallback: Tensor | None = None,
    ) -> Tensor:
        """Return which keys have left since `version`, even if they returned; bool `[L]`.

        Args:
            index: the index.
            keys: a batch.
            slots: the present slots of its keys. For -1, overflow rows and fallback rows the
                answer is whether the table was emptied or, except for fallback rows, the removal of
                the key noted.
            version: version at which a living watcher was registered.
            is_fallback: bool `[L]`, positions of fallback rows; None for none.
        """
        self.store_last_insertion(index)
        was_emptied = [emptied_at > version for emptied_at in self._emptied_at]
        has_left = torch.full_like(slots, all(was_emptied), dtype=torch.bool)
        if any(was_emptied) and not all(was_emptied):
            has_left |= torch.tensor(was_emptied, device=slots.device)[tables_of(keys)]
        if self.by_slot is not None:
            has_left |= self.by_slot[self._elements_of_slots(index, keys, slots)] > version
        later_removals = [removal for removal in self._removals if removal.version > version]
        tables = tables_of(keys) if later_removals else None
        for _, table, removed_keys, versions in later_removals:
            removed_keys = removed_keys[versions > version].to(slots.device)
            was_removed = (tables == table) & torch.isin(keys.ids, removed_keys)
            has_left |= was_removed if is_fallback is None else was_removed & ~is_fallback
        return has_left

    def note_batch(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Remember the insertion of a batch with misses, if a watcher is alive."""
        if self._watchers:
            self._last_insertion = LastInsertion(self.current, keys, inserted)

    def note_inserted(self, index: VersionedIndex, table: int, slots: Tensor) -> None:
        """Note that keys of a table were put into these slots, int64; -1 for none."""
        self.store_last_insertion(index)
        if self._watchers:
            elements = slots[slots >= 0].to(index.tags.device) + self._first_slots[table]
            self._allocate_versions(index)[elements] = self.current

    def note_removed(self, table: int, keys: Tensor) -> None:
        """Count a change in which keys, int64 `[n]`, left a table with a backing store."""
        self.current += 1
        oldest_watched = self._oldest_watched
        if not self._removals or self._removals[-1].version <= oldest_watched:
            self._removals = []
        if oldest_watched < self.current:
            keys = keys.cpu()
            versions = torch.full_like(keys, self.current)
            self._removals.append(Removal(self.current, table, keys, versions))
        if len(self._removals) > _MAX_REMOVALS_PER_TABLE * len(self._emptied_at):
            self._merge_removals()

    def _merge_removals(self) -> None:
        """Merge the removals of each table, of which only the last of each key counts."""
        merged = []
        for table in range(len(self._emptied_at)):
            removals = [removal for removal in self._removals if removal.table == table]
            if removals:
                keys, groups = torch.cat([removal.keys for removal in removals]).unique(
                    return_inverse=True
                )
                versions = torch.cat([removal.versions for removal in removals])
                versions = torch.zeros_like(keys).scatter_reduce_(0, groups, versions, "amax")
                is_watched = versions > self._oldest_watched
                merged.append(
                    Removal(removals[-1].version, table, keys[is_watched], versions[is_watched])
                )
        self._removals = sorted(merged)

    @property
    def _oldest_watched(self) -> int:
        """Return the version at which the oldest living watcher was registered, or `current`."""
        return next(iter(self._watchers.values()), self.current)  # in order of `watch`

    def store_last_insertion(self, index: VersionedIndex) -> None:
        """Store the last insertion's version by slot if a watcher needs it, then forget it.

        Call it before entries move to other slots.
        """
        insertion = self._last_insertion
        if insertion is None:
            return
        if self._oldest_watched < insertion.version and insertion.keys.ids.numel():
            self._store_versions(index, insertion)
            if index.tags.is_cuda:  # the insertion may have been on another stream
                stream = torch.cuda.current_stream(index.tags.device)
                for tensor in insertion.tensors():
                    tensor.record_stream(stream)
        self._last_insertion = None  # last, so that the next call repeats an interrupted one

    def _store_versions(self, index: VersionedIndex, insertion: LastInsertion) -> None:
        """Write the version of an insertion to the slots of its new keys."""
        keys, (is_new, was_missing) = insertion.keys, insertion.changed_positions()
        # Not the slots that `index.find` returns: the ids may be overwritten since.
        slots = torch.where(was_missing, insertion.inserted.slots, -1)
        elements = self._elements_of_slots(index, keys, slots)
        versions = self._allocate_versions(index)
        # A promoted key was missing but never left its table: 0 replaces its slot's old version.
        versions.scatter_(0, elements, torch.where(is_new, insertion.version, 0))
        versions[-1:].zero_()  # keys that were not missing wrote to this spare entry

    def _elements_of_slots(self, index: VersionedIndex, keys: Keys, slots: Tensor) -> Tensor:
        """Return the element of `by_slot` of each slot; -1 maps to the spare last entry."""
        tables = tables_of(keys)
        max_slots = index.tables[:, HashTableColumn.MAX_BUCKETS][tables] * SLOTS_PER_BUCKET
        elements = index.tables[:, HashTableColumn.FIRST_BUCKET][tables] * SLOTS_PER_BUCKET + slots
        return torch.where((slots >= 0) & (slots < max_slots), elements, self._first_slots[-1])

    def _allocate_versions(self, index: VersionedIndex) -> Tensor:
        """Return `by_slot`, allocated with zeros at first use."""
        if self.by_slot is None:
            device = index.tags.device
            versions = memory.reserve(self._first_slots[-1] + 1, torch.int64, device)
            itemsize = versions.itemsize
            layout = [[[first_slot * itemsize, itemsize]] for first_slot in self._first_slots[:-1]]
            for t, first_slot in enumerate(self._first_slots[:-1]):
                memory.advise_growth(versions, first_slot, 0, index.capacity(t))
            self.layout = torch.tensor(layout, device=device)
            self.by_slot = versions
        return self.by_slot
