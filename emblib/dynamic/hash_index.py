"""Where the keys of T dynamic tables are; what `emblib.ops.hash` calls an index, as a module."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.dynamic.saving import dumps
from emblib.ops import codes, hash
from emblib.ops.hash import (
    COUNTERS,
    EVICTING,
    HIT,
    NEW,
    SCORED,
    TABLE_FIELDS,
    Keys,
    Misses,
    Placed,
    tables_of,
)
from emblib.specs import SLOTS, DynamicSpec
from emblib.tables import memory

_BUCKETS, _SIZE = TABLE_FIELDS.index("buckets"), TABLE_FIELDS.index("size")
_FIRST_BUCKET, _MOST_BUCKETS = (
    TABLE_FIELDS.index("first_bucket"),
    TABLE_FIELDS.index("max_buckets"),
)
_HASH_KEY = TABLE_FIELDS.index("hash_key")
HASH_KEYS = "hash_keys"  # the name in state dicts
_PARTS = ("tables", "clock", "counters", "tags", "entries")  # of a snapshot
_KEY, _STAMP, _SCORE = range(3)  # words of an entry


class ValueRows(NamedTuple):
    """Values that lie by slot and move with their entries when a table grows.

    Attributes:
        planes: tensors of any dtype.
        layout: int64 `[T, P, 2]` on the device: of each table and plane the byte at which its row 0
            begins, and the bytes of a row.
        grows: called as `grows(table, rows, rows_then)` before a table takes more rows into use; on
            the CPU only.
    """

    planes: list[Tensor]
    layout: Tensor
    grows: Callable[[int, int, int], None] | None = None


class Inserted(NamedTuple):
    """What became of a batch.

    Attributes:
        slots: int64 `[L]`, -1 for keys that found no place.
        misses: the keys that were not there before; None if it is known that there were none.
        placed: what became of those; None as `misses`.
    """

    slots: Tensor
    misses: Misses | None = None
    placed: Placed | None = None


class Arrivals(NamedTuple):
    """Misses of the insertion after which `version` was that of the index, and their fate."""

    version: int
    keys: Keys
    misses: Misses
    placed: Placed


class Exported(NamedTuple):
    """Entries of one table by ascending slot, int64 `[N]` each; scores may be None."""

    keys: Tensor
    slots: Tensor
    stamps: Tensor
    scores: Tensor | None


class HashIndex(nn.Module):
    """The keys of T tables: each has a slot of its table as long as it stays there.

    Args:
        specs: capacity, growth and eviction of each table; dims and what else concerns values have
            no part. All must agree in eviction and newcomer.
        device: where it lives.
        hash_keys: by table, the number that its hash depends on, any 64 bits (signed); see
            `emblib.dynamic.keys.hash_key_of`. Left out, 0 for all: then anyone can make keys that
            all belong into one bucket.

    Nothing here is locked: the module that has an index holds its lock around every call.

    `version` counts the calls after which slots may be others: insertions, removals, restores.

    `has_left` tells what `watch` names, as long as it lives, which keys left since it began. That
    needs the version at which each slot was given to its key. It is written behind the times and
    only where somebody watches from before: an insertion is kept until the next one, which drops
    it where nobody does. So training steps that end before the next one begins cost nothing, and
    no watcher makes the index keep more than one insertion and 8 bytes per slot.
    """

    tags: Tensor
    entries: Tensor
    tables: Tensor
    clock: Tensor
    counters: Tensor

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        device: torch.device | str | None = None,
        hash_keys: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self._hash_keys = [0] * len(self.specs) if hash_keys is None else list(hash_keys)
        kinds = {(spec.eviction.order, spec.newcomer.value) for spec in self.specs}
        if len(kinds) > 1:
            words = sorted({spec.eviction.value for spec in self.specs})
            raise ValueError(
                "the tables of a module must agree in eviction and newcomer, got "
                f"{', '.join(words)}; make one module for each"
            )
        self.order, self.newcomer = kinds.pop() if kinds else ("none", "wins")
        self.version = 0
        self._watchers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last: Arrivals | None = None  # not yet in `_arrived`
        self._arrived: Tensor | None = None  # by slot the version at which its key came; a spare
        self._arrived_layout: Tensor | None = None  # of it as a plane, see `ValueRows`
        self._emptied = [0] * len(self.specs)  # the last version in which a table was emptied
        self._grows = any(spec.buckets < spec.max_buckets for spec in self.specs)
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)
        self._allocate(device)
        self.clear()

    def _allocate(self, device: torch.device) -> None:
        slots = sum(spec.rows for spec in self.specs)
        self._first_slots = [0]
        for spec in self.specs:
            self._first_slots.append(self._first_slots[-1] + spec.rows)
        words = 3 if self.order in SCORED else 2
        used = sum(spec.buckets for spec in self.specs) * SLOTS / max(slots, 1)
        entries = memory.reserve(slots * words, torch.int64, device, used).view(slots, words)
        num_tables = len(self.specs)
        self._register("tags", memory.reserve(slots, torch.uint8, device, used))
        self._register("entries", entries)
        for name, shape in (
            ("tables", (num_tables, len(TABLE_FIELDS))),
            ("clock", (1,)),
            ("counters", (num_tables, len(COUNTERS))),
        ):
            self._register(name, torch.zeros(shape, dtype=torch.int64, device=device))

    def _register(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def tensors(self) -> list[Tensor]:
        """The index as the ops take it."""
        return [self.tags, self.entries, self.tables, self.clock, self.counters]

    def clear(self) -> None:
        """Forget all keys, counters and ticks; tables have their initial capacity again."""
        self.version += 1
        self._emptied = [self.version] * len(self.specs)
        self._last = self._arrived = self._arrived_layout = None
        for t, spec in enumerate(self.specs):
            first = self._first_slots[t]
            in_use = max(self.buckets(t), spec.buckets) * SLOTS
            self.tags[first : first + in_use].zero_()
            self._use(t, 0, spec.buckets * SLOTS)
        rows = [
            (first // SLOTS, spec.buckets, spec.max_buckets, 0, spec.max_load_1024ths, hash_key)
            for first, spec, hash_key in zip(
                self._first_slots, self.specs, self._hash_keys, strict=False
            )
        ]
        self.tables.copy_(torch.tensor(rows, dtype=torch.int64).view(-1, len(TABLE_FIELDS)))
        self.clock.zero_()
        self.counters.zero_()

    @property
    def hash_keys(self) -> Tensor:
        """By table, the number that its hash depends on, int64 `[T]`, on the CPU."""
        return torch.tensor(self._hash_keys, dtype=torch.int64)

    def hash_key(self, table: int) -> int:
        """The number that the hash of a table depends on."""
        return self._hash_keys[table]

    def empty(self, table: int, hash_key: int | None = None) -> None:
        """Remove all keys of a table, which stays as large as it is.

        Args:
            table: its number.
            hash_key: what its hash depends on from now on; None leaves that as it is.
        """
        self.version += 1
        self._emptied[table] = self.version
        self.table_tags(table).zero_()
        self.tables[table, _SIZE] = 0
        if hash_key is not None:
            self._hash_keys[table] = hash_key
            self.tables[table, _HASH_KEY] = hash_key

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """What the hashes depend on; the module that has the index saves and loads the keys."""
        destination[prefix + HASH_KEYS] = self.hash_keys

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing: only tables without keys can take another hash key, see `empty`."""

    def _use(self, table: int, before: int, rows: int) -> None:
        """Rows of a table come into use."""
        first = self._first_slots[table]
        memory.use(self.tags, first, before, rows)
        words = self.entries.shape[1]
        memory.use(self.entries.view(-1), first * words, before * words, rows * words)
        if self._arrived is not None:
            memory.use(self._arrived, first, before, rows)

    def find(self, keys: Keys) -> Tensor:
        """The slots of all positions, int64 `[L]`, -1 for none; changes nothing."""
        return hash.hash_find(self.tensors(), *keys)

    def insert(
        self,
        keys: Keys,
        counts: Tensor | None = None,
        *,
        given: Tensor | None = None,
        admit: Callable[[Keys, Misses], Tensor | None] | None = None,
        rows: ValueRows | None = None,
    ) -> Inserted:
        """Use the keys of a batch, and find places for those that are not there.

        Args:
            keys: the batch.
            counts: int64 `[L]`, for how many uses each position stands; None is 1 each.
            given: int64 `[T]`, the score of this batch, where eviction is by scores that are given.
            admit: given the batch and its misses, which of these may have a place: bool `[L]` by
                miss, or None for all.
            rows: values that move with their entries when a table grows.

        The rows of keys that gave way are still what they were; those of new keys are whatever was
        in their slots.
        """
        self._settle_last()
        self.version += 1
        index = self.tensors()
        slots = hash.hash_use_(index, *keys, counts, given, codes.HASH_ORDER[self.order])
        if not slots.is_cuda and (not slots.numel() or int(slots.min()) >= 0):
            return Inserted(slots)
        misses = Misses(*hash.hash_misses(*keys, slots, counts, len(self.specs)))
        admitted = None if admit is None else admit(keys, misses)
        if self._grows:
            self._grow(keys, slots, misses, admitted, rows)
        placed = Placed(
            *hash.hash_place_(
                *(index, keys.ids, misses.first, misses.totals, misses.ends),
                *(admitted, given, codes.HASH_ORDER[self.order], codes.NEWCOMER[self.newcomer]),
            )
        )
        if self._watchers:
            self._last = Arrivals(self.version, keys, misses, placed)
        return Inserted(hash.spread(slots, placed.slots, misses.groups), misses, placed)

    def watch(self, watcher: object) -> None:
        """Let `has_left` know what leaves from now on, as long as `watcher` lives."""
        self._watchers[watcher] = self.version

    def has_left(self, keys: Keys, slots: Tensor, version: int) -> Tensor:
        """Return which keys were not there all the time since `version`; bool `[L]`.

        Args:
            keys: a batch.
            slots: where its keys are now; of those that are nowhere, or in rows behind those of
                their table, nothing is said but whether their table was emptied.
            version: at which a watcher that lives began.
        """
        self._settle_last()
        emptied = [at > version for at in self._emptied]
        left = torch.full_like(slots, all(emptied), dtype=torch.bool)
        if any(emptied) and not all(emptied):
            left |= torch.tensor(emptied, device=slots.device)[tables_of(keys)]
        if self._arrived is not None:
            left |= self._arrived[self._positions(keys, slots)] > version
        return left

    def has_come(self, table: int, slots: Tensor) -> None:
        """Note that a call other than `insert` placed keys in these slots; -1 for none."""
        self._settle_last()
        if self._watchers:
            at = slots[slots >= 0].to(self.tags.device) + self._first_slots[table]
            self._versions_by_slot()[at] = self.version

    def _settle_last(self) -> None:
        """Forget the last insertion; write its version by slot if somebody watches from before."""
        last, self._last = self._last, None
        oldest = next(iter(self._watchers.values()), self.version)  # the first to begin
        if last is None or oldest >= last.version or not last.keys.ids.numel():
            return
        keys, groups = last.keys, last.misses.groups
        status = last.placed.status[groups.clamp(min=0).long()]
        came = (status == NEW) | (status == EVICTING)
        # Rows that came up from a lower tier are hits by now: they have never left.
        known = (groups >= 0) & (came | (status == HIT))
        at = self._positions(keys, torch.where(known, self.find(keys), -1))
        self._versions_by_slot().scatter_(0, at, torch.where(came, last.version, 0))
        assert self._arrived is not None
        self._arrived[-1:].zero_()

    def _positions(self, keys: Keys, slots: Tensor) -> Tensor:
        """Return where in `_arrived` the slot of each key is, the spare one for those without."""
        tables = tables_of(keys)
        rows = self.tables[:, _MOST_BUCKETS][tables] * SLOTS
        at = self.tables[:, _FIRST_BUCKET][tables] * SLOTS + slots
        return torch.where((slots >= 0) & (slots < rows), at, self._first_slots[-1])

    def _versions_by_slot(self) -> Tensor:
        if self._arrived is None:
            device = self.tags.device
            self._arrived = memory.reserve(self._first_slots[-1] + 1, torch.int64, device)
            size = self._arrived.itemsize
            layout = [[[first * size, size]] for first in self._first_slots[:-1]]
            self._arrived_layout = torch.tensor(layout, device=device)
            for t, first in enumerate(self._first_slots[:-1]):
                memory.use(self._arrived, first, 0, self.capacity(t))
        return self._arrived

    def _grow(
        self,
        keys: Keys,
        slots: Tensor,
        misses: Misses,
        admitted: Tensor | None,
        rows: ValueRows | None,
    ) -> None:
        if not slots.is_cuda:
            ends = misses.ends.tolist()
            for t in range(len(self.specs)):
                more = ends[t + 1] - ends[t]
                if more and admitted is not None:
                    more = int(admitted[ends[t] : ends[t + 1]].sum())
                self._announce(t, self.size(t) + more, rows)
        self._split(keys, slots, misses.ends, admitted, rows)

    def _split(
        self,
        keys: Keys,
        slots: Tensor,
        ends: Tensor,
        admitted: Tensor | None,
        rows: ValueRows | None,
    ) -> None:
        planes: list[Tensor] = [] if rows is None else rows.planes
        if rows is None:
            layout = torch.zeros((len(self.specs), 0, 2), dtype=torch.int64, device=slots.device)
        else:
            layout = rows.layout
        if self._arrived is not None and self._arrived_layout is not None:
            planes = [*planes, self._arrived]
            layout = torch.cat([layout, self._arrived_layout], 1)
        hash.hash_grow_(self.tensors(), planes, layout, *keys, slots, ends, admitted)

    def _announce(self, table: int, keys: int, rows: ValueRows | None) -> None:
        """Tell the arenas which rows come into use when a table grows for `keys` keys."""
        spec, before = self.specs[table], self.buckets(table)
        wanted = hash.wanted_buckets(keys, before, spec.max_buckets, spec.max_load_1024ths)
        if wanted > before:
            self._use(table, before * SLOTS, wanted * SLOTS)
            if rows is not None and rows.grows is not None:
                rows.grows(table, before * SLOTS, wanted * SLOTS)

    def reserve(self, table: int, keys: int, rows: ValueRows | None = None) -> None:
        """Grow a table at once to what it needs for `keys` keys, as far as it may."""
        self.version += 1
        device = self.tags.device
        more = max(0, keys - self.size(table))
        if not self.tags.is_cuda:
            self._announce(table, self.size(table) + more, rows)
        ends = torch.zeros(len(self.specs) + 1, dtype=torch.int64, device=device)
        ends[table + 1 :] = more
        # A batch of as many misses; what its keys are has no part.
        ids = torch.zeros(more, dtype=torch.int64, device=device)
        self._split(Keys.of(ids, table), torch.full_like(ids, -1), ends, None, rows)

    def erase(self, keys: Keys) -> Tensor:
        """Remove keys; the slots that this freed by position, int64 `[L]`, else -1."""
        self.version += 1
        return hash.hash_erase_(self.tensors(), *keys)

    def expire(
        self, table: int, before: int, first_bucket: int = 0, num_buckets: int | None = None
    ) -> Tensor:
        """Remove the keys of some buckets (None: all from the first) last used before a tick.

        Returns what they were, int64 `[N]` (waits for the device).
        """
        self.version += 1
        if num_buckets is None:
            num_buckets = self.specs[table].max_buckets - first_bucket
        removed = hash.hash_expire_(self.tensors(), table, first_bucket, num_buckets, before)
        first = self._first_slots[table] + first_bucket * SLOTS
        return self.entries[first : first + removed.numel(), _KEY][removed]

    def export(self, table: int, since: int | None = None) -> Exported:
        """The entries of a table, or those used at tick `since` or later (waits for the device)."""
        entries = self.table_entries(table)
        there = self.table_tags(table) != 0
        if since is not None:
            there &= entries[:, _STAMP] >= since
        slots = there.nonzero().view(-1)
        chosen = entries[slots]
        scores = chosen[:, _SCORE].clone() if entries.shape[1] > _SCORE else None
        return Exported(chosen[:, _KEY].clone(), slots, chosen[:, _STAMP].clone(), scores)

    def set_entries(
        self, table: int, slots: Tensor, stamps: Tensor, scores: Tensor | None = None
    ) -> None:
        """Overwrite when keys were last used, and their scores; `slots` are distinct, >= 0."""
        entries = self.table_entries(table)
        entries[slots, _STAMP] = stamps
        if scores is not None:
            entries[slots, _SCORE] = scores

    def table_tags(self, table: int) -> Tensor:
        """Tags of the buckets in use, uint8 `[capacity]`, as a view."""
        first = self._first_slots[table]
        return self.tags[first : first + self.capacity(table)]

    def table_entries(self, table: int) -> Tensor:
        """Entries of the buckets in use, int64 `[capacity, 2 or 3]`, as a view."""
        first = self._first_slots[table]
        return self.entries[first : first + self.capacity(table)]

    def views_by_slot(self, table: int) -> list[Tensor]:
        """Return what the index has by slot of a table, but its tags, as views."""
        first = self._first_slots[table]
        views = [self.table_entries(table)]
        if self._arrived is not None:
            views.append(self._arrived[first : first + self.capacity(table)])
        return views

    def buckets(self, table: int) -> int:
        """Buckets in use (reads the device)."""
        return int(self.tables[table, _BUCKETS])

    def capacity(self, table: int) -> int:
        """Slots in use (reads the device)."""
        return self.buckets(table) * SLOTS

    def size(self, table: int) -> int:
        """Keys of a table (reads the device)."""
        return int(self.tables[table, _SIZE])

    @property
    def tick(self) -> int:
        """How many batches were used (reads the device)."""
        return int(self.clock)

    def set_tick(self, tick: int) -> None:
        """Continue counting from `tick`, which no stamp may be above."""
        self.clock.fill_(tick)

    def stats(self) -> list[dict[str, int]]:
        """The counters of each table by name (reads the device)."""
        return [dict(zip(COUNTERS, row, strict=True)) for row in self.counters.tolist()]

    def reset_stats(self) -> None:
        """Count from zero."""
        self.counters.zero_()

    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        slots = sum(self.capacity(t) for t in range(len(self.specs)))
        words = self.entries.shape[1] + (self._arrived is not None)
        return slots * (1 + words * self.entries.itemsize)

    def snapshot(self) -> dict[str, Any]:
        """All there is, slot by slot, on the CPU; only the buckets in use."""
        return {
            "tables": self.tables.cpu().clone(),
            "clock": self.clock.cpu().clone(),
            "counters": self.counters.cpu().clone(),
            "tags": [self.table_tags(t).cpu().clone() for t in range(len(self.specs))],
            "entries": [self.table_entries(t).cpu().clone() for t in range(len(self.specs))],
        }

    def check_snapshot(self, snapshot: Any) -> list[int]:
        """Check that `restore` takes a snapshot, and return how many slots each table has there.

        Raises:
            ValueError: it is of tables of other capacities, loads or eviction, or malformed.
        """
        parts = dumps.check_entries("index", snapshot, _PARTS)
        tables = dumps.check_tensor("index.tables", parts["tables"], torch.int64, (None, None))
        theirs = _with_hash_keys(tables)
        fixed = [i for i in range(len(TABLE_FIELDS)) if i not in (_BUCKETS, _SIZE, _HASH_KEY)]
        same = theirs.shape == self.tables.shape
        if not same or theirs[:, fixed].tolist() != self.tables[:, fixed].tolist():
            raise ValueError(
                "a snapshot restores tables of the same capacities, loads and eviction only; its "
                f"{TABLE_FIELDS} are {theirs.tolist()}, this index has {self.tables.tolist()}; "
                "load a state_dict instead, which fits any capacity"
            )
        buckets = theirs[:, _BUCKETS].tolist()
        for count, spec in zip(buckets, self.specs, strict=True):
            if not 0 < count <= spec.max_buckets:
                raise ValueError(
                    f"index.tables has {count} buckets of a table, of which there are 1 to "
                    f"{spec.max_buckets}"
                )
        for name in ("clock", "counters"):
            own: Tensor = getattr(self, name)
            dumps.check_tensor(f"index.{name}", parts[name], own.dtype, own.shape)
        for name, shape in (("tags", ()), ("entries", self.entries.shape[1:])):
            own = getattr(self, name)
            found = dumps.check_list(f"index.{name}", parts[name], len(buckets), "table")
            for tensor, count in zip(found, buckets, strict=True):
                wanted = (count * SLOTS, *shape)
                dumps.check_tensor(f"index.{name}", tensor, own.dtype, wanted)
        return [count * SLOTS for count in buckets]

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what `snapshot` was taken of; it must be of tables of the same capacities.

        Raises:
            ValueError: it is not, or is malformed, before anything is changed.
        """
        self.check_snapshot(snapshot)
        theirs = _with_hash_keys(snapshot["tables"])
        self.clear()
        for t in range(len(self.specs)):
            rows = int(theirs[t, _BUCKETS]) * SLOTS
            self._use(t, self.capacity(t), rows)
            first = self._first_slots[t]
            self.tags[first : first + rows] = snapshot["tags"][t].to(self.tags.device)
            self.entries[first : first + rows] = snapshot["entries"][t].to(self.tags.device)
        for name in ("clock", "counters"):
            getattr(self, name).copy_(snapshot[name])
        self.tables.copy_(theirs)
        self._hash_keys = theirs[:, _HASH_KEY].tolist()

    def __deepcopy__(self, memo: dict[int, object]) -> "HashIndex":
        other = HashIndex(copy.deepcopy(self.specs, memo), self.tags.device)
        other.restore(self.snapshot())
        other.version = self.version
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.specs, str(self.tags.device), self.snapshot(), self.version)

    def extra_repr(self) -> str:
        """Capacities and eviction."""
        capacities = ", ".join(f"{spec.capacity}" for spec in self.specs)
        return f"capacity=({capacities}), order={self.order}, newcomer={self.newcomer}"


def _with_hash_keys(tables: Tensor) -> Tensor:
    """The `tables` of a snapshot; those of earlier versions had no hash key, which is 0."""
    if tables.dim() == 2 and tables.shape[1] == _HASH_KEY:
        return nn.functional.pad(tables, (0, 1))
    return tables


def _rebuild(
    specs: tuple[DynamicSpec, ...], device: str, snapshot: Mapping[str, Any], version: int
) -> HashIndex:
    index = HashIndex(specs, device)
    index.restore(snapshot)
    index.version = version
    return index
