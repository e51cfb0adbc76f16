"""HashTable: one table of vectors by key, with scores and eviction, for direct use.

What `emblib.DynamicEmbeddingBags` does in a training step, here each operation is a call. Surface
after HierarchicalKV's (Apache-2.0); meanings are those of `emblib.ops.hash`, on CPU and CUDA alike.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import HashEntryColumn
from emblib.dynamic.hash_index import HASH_KEYS, HashIndex, InsertedBatch, RowBuffers
from emblib.dynamic.keys import as_keys, hash_keys_of, of_insertion
from emblib.ops import hash
from emblib.ops.effects import Effects
from emblib.ops.hash import Keys, Misses, initial_rows_, rule_of
from emblib.specs import SLOTS, DynamicSpec, Eviction, check_count, check_float_dtype
from emblib.tables import memory
from emblib.tables.changes import CompletingLock
from emblib.tables.locks import atomic


class TableRows(NamedTuple):
    """Rows of a `HashTable`: keys, stamps (tick of last use), scores int64 `[n]`; `[n, dim]`.

    Scores are 0 if the eviction order uses none.
    """

    keys: Tensor
    values: Tensor
    stamps: Tensor
    scores: Tensor


class Insertion(NamedTuple):
    """The result of inserting a batch of keys.

    Attributes:
        slots: int64 `[n]`, row of `HashTable.values`; -1 for keys that found no slot.
        status: uint8 `[n]`: `emblib.ops.hash.HIT`, `NEW`, `EVICTING` (another was evicted) or
            `REFUSED`.
        evicted: the evicted entries, where requested.
    """

    slots: Tensor
    status: Tensor
    evicted: TableRows | None = None


def latest_of(groups: Tensor, count: int) -> Tensor:
    """Return the last position of each group, -1 for empty groups; group -1 is ignored."""
    positions = torch.arange(groups.numel(), device=groups.device)
    latest = torch.full((count + 1,), -1, dtype=torch.int64, device=groups.device)
    places = torch.where(groups < 0, count, groups.long())
    return latest.scatter_reduce_(0, places, positions, "amax")[:count]


def is_last(slots: Tensor) -> Tensor:
    """Return which positions have a slot that no later position has, as bools."""
    _, groups = slots.unique(return_inverse=True)
    latest = latest_of(groups, groups.numel())
    here = latest[groups] == torch.arange(slots.numel(), device=slots.device)
    return here & (slots >= 0)


class HashTable(nn.Module):
    """Vectors for keys of any 64 bits, at most `spec.capacity`; the lowest scores are evicted.

    Batches may repeat keys. Values that are written go in order: the last of a key stays. `scores`
    of a call mean what `spec.eviction` makes of them: uses for LFU and LRU_LFU (added up; left
    out, one each), the score itself for CUSTOM (the last of a key counts). LRU and NONE have none,
    and for STEP it is the number of the batch. Threads may share a table: every method but `export`
    is atomic (docs/threads.md).

    Args:
        spec: capacity, dim, growth, eviction, insert_policy, and the initializer of rows for which
            no values are given. `admission` and `ttl` are not used.
        dtype: of the values.
        seed: of new rows and of the hash of keys, see `DynamicEmbeddingBags`.
        device: where it lives.

    Attributes:
        values: `[capacity, dim]`, rows by slot; those of empty slots are unspecified.
    """

    values: Tensor

    def __init__(
        self,
        spec: DynamicSpec,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, DynamicSpec):
            raise TypeError(
                f"spec must be a DynamicSpec, e.g. DynamicSpec(1_000_000, 64), got {spec!r}"
            )
        check_float_dtype("dtype", dtype)
        self._lock = CompletingLock()
        self.spec, self.dtype = spec, dtype
        self.seed = 0 if seed is None else check_count("seed", seed, minimum=0)
        # Given scores rank like counts followed by stamps; that order takes a score by key.
        self._assigns_scores = spec.eviction in (Eviction.STEP, Eviction.CUSTOM)
        kept = {
            **vars(spec),
            "eviction": Eviction.LRU_LFU if self._assigns_scores else spec.eviction,
        }
        self.index = HashIndex([DynamicSpec(**kept)], device, hash_keys_of(seed, [""]))
        device = self.index.tags.device
        values = memory.reserve(spec.rows * spec.dim, dtype, device)
        self.register_buffer("values", values.view(spec.rows, spec.dim), persistent=False)
        self._use(0, 0, self.index.capacity(0))

    @property
    def _scored(self) -> bool:
        return self.index.order in hash.SCORED

    def _use(self, table: int, before: int, rows: int) -> None:
        memory.use(self.values.view(-1), 0, before * self.spec.dim, rows * self.spec.dim)

    def _rows(self) -> RowBuffers:
        layout = [[[0, self.spec.dim * self.values.itemsize]]]
        device = self.values.device
        return RowBuffers([self.values], torch.tensor(layout, device=device), self._use)

    def _batch(self, keys: Tensor) -> Keys:
        keys = as_keys(keys)
        device = self.values.device
        if keys.dim() != 1:
            raise ValueError(f"keys must be of shape [n], got {tuple(keys.shape)}")
        if keys.device != device:
            raise RuntimeError(
                f"keys must be on the device of the table, {device}, got "
                f"{keys.device}; move them with .to(device)"
            )
        return Keys.of(keys)

    def _checked(self, keys: Keys, values: Tensor) -> Tensor:
        shape = (keys.ids.numel(), self.spec.dim)
        if tuple(values.shape) != shape:
            raise ValueError(
                f"values must be of shape [n, dim] = {list(shape)}, got {list(values.shape)}"
            )
        return values.detach().to(self.values)

    def _counts(self, keys: Keys, scores: Tensor | int | None) -> Tensor | None:
        """Return the counts to pass to the index, per position: uses, or the scores."""
        eviction = self.spec.eviction
        if eviction is Eviction.CUSTOM:
            if scores is None:
                raise ValueError("a table with Eviction.CUSTOM needs scores, an int or one a key")
        elif scores is not None and eviction not in (Eviction.LFU, Eviction.LRU_LFU):
            raise ValueError(
                f"scores are for Eviction.CUSTOM, LFU and LRU_LFU, this table has {eviction}"
            )
        if eviction is Eviction.STEP:
            scores = self.index.tick + 1
        if scores is None:
            return None
        scores = torch.as_tensor(scores, dtype=torch.int64, device=keys.ids.device)
        if scores.dim() and scores.shape != keys.ids.shape:
            raise ValueError(
                "scores must be an int or of the shape of keys, "
                f"{list(keys.ids.shape)}, got {list(scores.shape)}"
            )
        return scores.expand_as(keys.ids).contiguous()

    @atomic
    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return values `[n, dim]` and which keys are in the table, bool `[n]`; change nothing.

        Keys that are not there read `spec.default_value`.
        """
        slots = self.slots(keys)
        return self._read(slots), slots >= 0

    def _read(self, slots: Tensor) -> Tensor:
        missing = torch.full((), self.spec.default_value, dtype=self.dtype, device=slots.device)
        return torch.where(slots[:, None] >= 0, self.values[slots.clamp(min=0)], missing)

    @atomic
    def slots(self, keys: Tensor) -> Tensor:
        """Return rows in `values`, int64 `[n]`, -1 for missing keys; valid until an insertion.

        What is written to those rows is the new value: no copies are made.
        """
        return self.index.find(self._batch(keys))

    @atomic
    def contains(self, keys: Tensor) -> Tensor:
        """Return which keys are in the table, bool `[n]`."""
        return self.slots(keys) >= 0

    @torch.no_grad()
    @atomic
    def insert_or_assign(
        self, keys: Tensor, values: Tensor, scores: Tensor | int | None = None
    ) -> Insertion:
        """Write the values of keys, inserting new ones."""
        return self._insert_values(keys, values, scores)

    @torch.no_grad()
    @atomic
    def insert_and_evict(
        self, keys: Tensor, values: Tensor, scores: Tensor | int | None = None
    ) -> Insertion:
        """Call `insert_or_assign` and return the evicted rows in the order of the keys."""
        return self._insert_values(keys, values, scores, with_evicted=True)

    def _insert_values(
        self,
        keys: Tensor,
        values: Tensor,
        scores: Tensor | int | None,
        *,
        with_evicted: bool = False,
    ) -> Insertion:
        batch, effects = self._batch(keys), Effects()
        values, counts = self._checked(batch, values), self._counts(batch, scores)

        def make() -> Insertion:
            inserted = self._insert(batch, counts, effects)
            evicted = self._evicted(inserted) if with_evicted else None
            self._write(inserted.slots, values)
            return Insertion(inserted.slots, of_insertion(inserted), evicted)

        return self._lock.complete(make, lambda: not effects.has_made(hash.hash_insert_))

    @torch.no_grad()
    @atomic
    def find_or_insert(
        self, keys: Tensor, values: Tensor | None = None, scores: Tensor | int | None = None
    ) -> tuple[Tensor, Insertion]:
        """Return the values `[n, dim]` of keys, inserting new ones.

        A new key starts with the first of its `values`; left out, with what `spec.initializer`
        gives. Keys that are refused read `spec.default_value`.
        """
        insertion = self.find_or_insert_slots(keys, values, scores)
        return self._read(insertion.slots), insertion

    @atomic
    def find_or_insert_slots(
        self, keys: Tensor, values: Tensor | None = None, scores: Tensor | int | None = None
    ) -> Insertion:
        """Find or insert keys as `find_or_insert` does, without copying values."""
        batch, effects = self._batch(keys), Effects()
        counts = self._counts(batch, scores)
        values = None if values is None else self._checked(batch, values)

        def make() -> Insertion:
            inserted = self._insert(batch, counts, effects)
            misses, placed = inserted.misses, inserted.result
            if misses is not None and placed is not None:
                if values is None:
                    self._start_rows(batch, misses, placed.slots)
                else:
                    new = placed.slots >= 0
                    self.values[placed.slots[new]] = values[misses.first[new]]
            return Insertion(inserted.slots, of_insertion(inserted))

        return self._lock.complete(make, lambda: not effects.has_made(hash.hash_insert_))

    def _start_rows(self, batch: Keys, misses: Misses, slots: Tensor) -> None:
        spec, device = self.spec, self.values.device
        layout = torch.tensor([[[0, spec.dim, spec.rows, spec.dim, 0]]], device=device)
        rule = torch.tensor([[rule_of(spec.initializer, spec)]], dtype=torch.float64, device=device)
        flat = [self.values.view(-1)]
        initial_rows_(flat, layout, rule, batch.ids, misses.first, misses.offsets, slots, self.seed)

    def _insert(self, batch: Keys, counts: Tensor | None, effects: Effects) -> InsertedBatch:
        """Touch or insert keys; counts or scores, if given, decide which keys stay."""
        effects.restart()
        if not self._assigns_scores or counts is None:
            return self.index.insert(batch, counts, rows=self._rows(), effects=effects)
        given = counts

        def rank(keys: Keys, misses: Misses) -> None:
            latest = latest_of(misses.groups, misses.groups.numel())
            known = latest >= 0
            misses.counts[known] = given[latest[known]]

        inserted = self.index.insert(
            batch, torch.zeros_like(given), admit=rank, rows=self._rows(), effects=effects
        )
        self._give(inserted.slots, given)
        return inserted

    def _give(self, slots: Tensor, scores: Tensor) -> None:
        """Set the score of each slot to the score of its last position."""
        last = is_last(slots)
        slots = slots[last]
        stamps = self.index.table_entries(0)[slots, 1]
        self.index.set_entries(0, slots, stamps, scores[last])

    def _write(self, slots: Tensor, values: Tensor) -> None:
        last = is_last(slots)
        self.values[slots[last]] = values[last]

    def _evicted(self, inserted: InsertedBatch) -> TableRows:
        placed = inserted.result
        if placed is None:
            return self._no_rows()
        gone = placed.status == hash.EVICTING
        keys, stamps, scores = placed.evicted[gone].unbind(1)
        return TableRows(keys, self.values[placed.slots[gone]], stamps, scores)

    @torch.no_grad()
    @atomic
    def assign(self, keys: Tensor, values: Tensor) -> Tensor:
        """Write the values of keys that are in the table; return which are, bool `[n]`."""
        batch = self._batch(keys)
        slots = self.index.find(batch)
        self._write(slots, self._checked(batch, values))
        return slots >= 0

    @torch.no_grad()
    @atomic
    def accumulate(self, keys: Tensor, deltas: Tensor) -> Tensor:
        """Add to the values of keys that are in the table; return which are, bool `[n]`.

        The deltas of a key that repeats are added to it one after the other on the CPU; on CUDA
        their order is not fixed.
        """
        batch = self._batch(keys)
        slots = self.index.find(batch)
        there = slots >= 0
        self.values.index_add_(0, slots[there], self._checked(batch, deltas)[there])
        return there

    @atomic
    def scores(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, int64 `[n]` (0 for none), and which keys are in the table, bool `[n]`."""
        slots = self.slots(keys)
        entries = self.index.table_entries(0)[slots.clamp(min=0)]
        there = slots >= 0
        if not self._scored:
            return torch.zeros_like(slots), there
        return torch.where(there, entries[:, HashEntryColumn.SCORE], 0), there

    @atomic
    def set_scores(self, keys: Tensor, scores: Tensor | int) -> Tensor:
        """Set the scores of keys that are in the table; return which are, bool `[n]`."""
        if self.spec.eviction in (Eviction.LRU, Eviction.NONE):
            raise ValueError(f"a table with {self.spec.eviction} has no scores")
        batch = self._batch(keys)
        scores = torch.as_tensor(scores, dtype=torch.int64, device=batch.ids.device)
        slots = self.index.find(batch)
        self._give(slots, scores.expand_as(slots))
        return slots >= 0

    @atomic
    def erase(self, keys: Tensor) -> Tensor:
        """Remove keys; return by position whether one was there (once per key), bool `[n]`."""
        return self.index.erase(self._batch(keys)) >= 0

    @atomic
    def expire(self, before: int) -> Tensor:
        """Remove keys that were last used before tick `before`; return them (waits)."""
        return self.index.expire(0, before)

    def export(self, batch: int = 1 << 16, since: int | None = None) -> Iterator[TableRows]:
        """Yield all rows, or those used at tick `since` or later, by ascending slot (waits).

        The table is not changed meanwhile.
        """
        found = self.index.export(0, since)
        scores = torch.zeros_like(found.keys) if found.scores is None else found.scores
        for slots in found.slots.split(batch):
            if slots.numel():
                at = torch.searchsorted(found.slots, slots)
                yield TableRows(found.keys[at], self.values[slots], found.stamps[at], scores[at])

    @torch.no_grad()
    @atomic
    def load(self, rows: TableRows) -> Insertion:
        """Insert exported rows with their stamps and scores; keys are distinct.

        They are inserted like new keys of one batch: entries that do not fit are evicted or
        rejected in the same way. The ticks of the table go on from the newest stamp.
        """
        batch = self._batch(rows.keys)
        values = self._checked(batch, rows.values)
        stamps, scores = rows.stamps.to(values.device), rows.scores.to(values.device)
        if rows.keys.numel():
            self.index.set_tick(max(self.index.tick, int(stamps.max())))

        def rank(keys: Keys, misses: Misses) -> None:
            count = int(misses.offsets[-1])
            misses.counts[:count] = scores[misses.first[:count]]

        counts, effects = torch.zeros_like(scores), Effects()

        def make() -> Insertion:
            effects.restart()
            inserted = self.index.insert(
                batch, counts, admit=rank, rows=self._rows(), effects=effects
            )
            self._write(inserted.slots, values)
            last = is_last(inserted.slots)
            scored = scores[last] if self._scored else None
            self.index.set_entries(0, inserted.slots[last], stamps[last], scored)
            return Insertion(inserted.slots, of_insertion(inserted))

        return self._lock.complete(make, lambda: not effects.has_made(hash.hash_insert_))

    @atomic
    def size(self) -> int:
        """Return the number of keys (reads the device)."""
        return self.index.size(0)

    @atomic
    def capacity(self) -> int:
        """Return the rows in use, which grow to `spec.capacity` rounded up (reads the device)."""
        return self.index.capacity(0)

    @atomic
    def clear(self) -> None:
        """Remove all keys, and reset the table to its initial capacity."""
        self._lock.complete(self.index.clear, lambda: True)

    @atomic
    def reserve(self, keys: int) -> None:
        """Grow to the size that a number of keys needs, at most to the capacity."""
        self.index.reserve(0, keys, self._rows())

    @atomic
    def stats(self) -> dict[str, int]:
        """Return `emblib.ops.hash.COUNTERS` by name (reads the device)."""
        return self.index.stats()[0]

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        parts = zip(self._no_rows(), *self.export(), strict=True)
        rows = TableRows(*(torch.cat(part) for part in parts))
        for name, part in rows._asdict().items():
            destination[prefix + name] = part
        destination[prefix + "tick"] = self.index.clock.clone()

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Replace the content by a saved table, which may be of another capacity."""
        missing: list[str] = arguments[2]
        names = [prefix + name for name in (*TableRows._fields, "tick")]
        missing += (absent := [name for name in names if name not in state_dict])
        if not absent:
            *parts, tick = (state_dict[name].to(self.values.device) for name in names)
            hash_keys = state_dict.get(f"{prefix}index.{HASH_KEYS}")

            def make() -> None:
                self.clear()
                self.index.empty(0, None if hash_keys is None else int(hash_keys))
                self.reserve(parts[0].numel())
                self.load(TableRows(*parts))
                self.index.set_tick(int(tick))

            self._lock.complete(make, lambda: True)

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """Return the names in a state dict that are no parameter or buffer, as attributes."""
        return SimpleNamespace(**dict.fromkeys((*TableRows._fields, "tick")))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys(vars(self._names_in_checkpoints), "_names_in_checkpoints")

    def _no_rows(self) -> TableRows:
        none = torch.empty(0, dtype=torch.int64, device=self.values.device)
        return TableRows(none, self.values[none], none, none)

    @atomic
    def __reduce__(self) -> tuple[Any, ...]:
        used = self.values[: self.capacity()].clone()
        made = (self.spec, self.dtype, self.seed, str(self.values.device))
        return _rebuild, (*made, self.index.snapshot(), used)

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(ops.keep_dtype(fn), recurse)

    def extra_repr(self) -> str:
        """Return capacity, dim and eviction for `repr`."""
        spec = self.spec
        return f"capacity={spec.max_buckets * SLOTS}, dim={spec.dim}, {spec.eviction.value}"


def _rebuild(
    spec: DynamicSpec,
    dtype: torch.dtype,
    seed: int,
    device: str,
    index: dict[str, Any],
    values: Tensor,
) -> HashTable:
    table = HashTable(spec, dtype=dtype, seed=seed, device=device)
    table.index.restore(index)
    table._use(0, 0, table.capacity())
    table.values[: values.shape[0]] = values
    return table
