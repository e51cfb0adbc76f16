"""HashTable: one table of vectors by key, with scores and eviction, for direct use.

`emblib.DynamicEmbeddingBags` finds, inserts and updates rows in one training step; here each of
these operations is a method. The methods are named after HierarchicalKV's (Apache-2.0);
`emblib.ops.hash` defines their results, which are equal on CPU and CUDA.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import HashEntryColumn
from emblib.dynamic.hash_index import HASH_KEYS, MAX_TICK, HashIndex, RowBuffers
from emblib.dynamic.keys import as_keys, as_scores, hash_keys_of
from emblib.dynamic.saving import loading
from emblib.dynamic.saving.entries import WEIGHT, Entries
from emblib.dynamic.sent_copies import SentAsCopy, check_not_shared
from emblib.grad_mode import without_gradients
from emblib.ops import hash
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, Keys, Misses, initial_rows_, rule_of
from emblib.ops.primitives import group
from emblib.specs import SLOTS_PER_BUCKET, DynamicSpec, Eviction, check_count, check_float_dtype
from emblib.tables import memory, state_dicts
from emblib.tables.changes import CompletingLock
from emblib.tables.locks import atomic
from emblib.tables.parameters import caller_level


class TableRows(NamedTuple):
    """Rows of a `HashTable`: values `[n, dim]`; int64 `[n]` keys, stamps (last use), scores.

    Scores are 0 if the eviction order uses none.
    """

    keys: Tensor
    values: Tensor
    stamps: Tensor
    scores: Tensor


class Insertion(NamedTuple):
    """The result of inserting a batch of keys.

    Attributes:
        slots: int64 `[n]`, row of `HashTable.values` of each key; -1 for refused keys.
        status: uint8 `[n]`: `emblib.ops.hash.HIT`, `NEW`, `EVICTING` (another key was evicted) or
            `REFUSED`.
        evicted: the evicted rows; None except from `insert_and_evict`.
        num_evicted: int64 `[1]`, number of evicted rows; later rows of `evicted` are padding. None
            except from `insert_and_evict`.
    """

    slots: Tensor
    status: Tensor
    evicted: TableRows | None = None
    num_evicted: Tensor | None = None

    def trimmed(self) -> "Insertion":
        """Return the insertion with `evicted` cut to `num_evicted` rows (waits for the device)."""
        if self.evicted is None or self.num_evicted is None:
            return self
        num_valid = int(self.num_evicted)
        return self._replace(evicted=TableRows(*(column[:num_valid] for column in self.evicted)))


class HashTable(SentAsCopy, nn.Module):
    """Store vectors by 64-bit key; a new key whose buckets are full evicts a key or is refused.

    Batches may repeat keys: the last value of a repeated key is stored. The meaning of `scores`
    depends on `spec.eviction`. For LFU and LRU_LFU scores are numbers of uses, which are added up;
    None is one use per position. For CUSTOM they are stored, the last score of a repeated key. For
    LRU, NONE and STEP they must be None; STEP stores the number of the batch as the score. Scores
    below 0 are for CUSTOM only, which a device assert checks on a GPU. Threads may share a table:
    methods are atomic, except `export` (docs/threads.md).

    Keys are int64, uint64 or int32 `[n]` on the table's device; values `[n, dim]` are converted to
    its device and dtype, scores `[n]` to its device and int64, and neither gets a gradient. Methods
    raise these errors before they change anything: ValueError for other shapes and for scores that
    the eviction does not accept; TypeError for keys of another dtype, scores that are not integers
    and values that are not a tensor of real numbers; RuntimeError for keys on another device.

    Args:
        spec: capacity, dim, growth, eviction, `insert_policy`, `default_value`, and the initializer
            of rows for which no values are given. Its other fields are not used.
        dtype: dtype of the values.
        seed: seed of new rows and of the hash of keys; None as in `DynamicEmbeddingBags`.
        device: device of the table, not meta; None is torch's default device.

    Raises:
        TypeError: `spec` is not a `DynamicSpec`, or the seed is not an int.
        ValueError: the dtype is not float32, float16 or bfloat16, the seed is out of range, or the
            device is meta.

    Attributes:
        values: `[spec.rows, dim]`, rows by slot; the rows of empty slots are unspecified.

    Example:
        >>> table = emblib.HashTable(emblib.DynamicSpec(capacity=1_000, dim=2))
        >>> keys = torch.tensor([2**62, -7])
        >>> inserted = table.insert_or_assign(keys, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> values, is_present = table.find(torch.tensor([-7, 5]))
        >>> values[0], is_present
        (tensor([3., 4.]), tensor([ True, False]))
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
        # STEP and CUSTOM rank by score, then stamp, like LRU_LFU, whose scores are uses of keys.
        self._assigns_scores = spec.eviction in (Eviction.STEP, Eviction.CUSTOM)
        spec_fields = {
            **vars(spec),
            "eviction": Eviction.LRU_LFU if self._assigns_scores else spec.eviction,
        }
        self.index = HashIndex([DynamicSpec(**spec_fields)], device, hash_keys_of(seed, [""]))
        device = self.index.tags.device
        values = memory.reserve(spec.rows * spec.dim, dtype, device)
        self.register_buffer("values", values.view(spec.rows, spec.dim), persistent=False)
        self._advise_growth(0, 0, self.index.capacity(0))
        self._row_initializer: tuple[Tensor, Tensor] | None = None  # `_make_row_initializer()`

    @property
    def _has_scores(self) -> bool:
        return self.index.has_scores

    def _advise_growth(self, table: int, rows_before: int, rows: int) -> None:
        memory.advise_growth(
            self.values.view(-1), 0, rows_before * self.spec.dim, rows * self.spec.dim
        )

    def _row_buffers(self) -> RowBuffers | None:
        """Return the buffers whose rows move when the table grows; None if it cannot grow."""
        if not self.index.grows:
            return None
        layout = torch.zeros(1, 1, 2, dtype=torch.int64, device=self.values.device)
        layout[..., 1] = self.spec.dim * self.values.itemsize  # a kernel fills it; no host wait
        return RowBuffers([self.values], layout, self._advise_growth)

    def _checked_keys(self, keys: Tensor) -> Keys:
        """Return checked keys as a batch; see the class for the errors."""
        keys = as_keys(keys)
        device = self.values.device
        if keys.dim() != 1:
            raise ValueError(f"keys must be of shape [n], got {tuple(keys.shape)}")
        if keys.device != device:
            raise RuntimeError(
                f"keys must be on the device of the table, {device}, got "
                f"{keys.device}; move them with .to(device)"
            )
        return Keys.from_ids(keys)

    def _checked_values(self, keys: Keys, values: Tensor) -> Tensor:
        """Return values in the dtype and on the device of the table; see the class for errors."""
        if not isinstance(values, Tensor) or values.is_complex():
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"values must be a tensor of real numbers, got {kind}")
        shape = (keys.ids.numel(), self.spec.dim)
        if tuple(values.shape) != shape:
            raise ValueError(
                f"values must be of shape [n, dim] = {list(shape)}, got {list(values.shape)}"
            )
        return values.detach().to(self.values).contiguous()

    def _uses_or_scores(self, keys: Keys, scores: Tensor | int | None) -> Tensor | None:
        """Return int64 `[n]`: uses for LFU and LRU_LFU, scores for CUSTOM and STEP; else None.

        None also for LFU and LRU_LFU without scores. See the class for the errors.
        """
        eviction = self.spec.eviction
        if eviction is Eviction.CUSTOM:
            if scores is None:
                raise ValueError("a table with Eviction.CUSTOM needs scores, an int or one per key")
        elif scores is not None and eviction not in (Eviction.LFU, Eviction.LRU_LFU):
            raise ValueError(
                f"scores are for Eviction.CUSTOM, LFU and LRU_LFU, this table has {eviction}"
            )
        if eviction is Eviction.STEP:
            return (self.index.clock + 1).expand_as(keys.ids).contiguous()
        return None if scores is None else self._expand_per_position("scores", keys, scores)

    def _expand_per_position(self, name: str, keys: Keys, values: Tensor | int) -> Tensor:
        """Return scores or stamps per position, int64 `[n]`; see the class for the errors."""
        values = as_scores(values)
        if values.dim() and values.shape != keys.ids.shape:
            raise ValueError(
                f"{name} must be an int or of the shape of keys, "
                f"{list(keys.ids.shape)}, got {list(values.shape)}"
            )
        if name == "scores" and self._has_scores and self.spec.eviction is not Eviction.CUSTOM:
            _check_uses(values, self.spec.eviction)
        if not values.dim() and not values.is_cuda:
            return torch.full_like(keys.ids, int(values))  # no copy to a GPU
        return values.to(keys.ids.device).expand_as(keys.ids).contiguous()

    @atomic
    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return values `[n, dim]` and which keys are in the table, bool `[n]`; change nothing.

        Values of missing keys are `spec.default_value`.
        """
        batch, index = self._checked_keys(keys), self.index.tensors()
        default_value = self.spec.default_value
        return hash.hash_find_rows(index, *batch, self.values, default_value)

    def _read_rows(self, slots: Tensor) -> Tensor:
        rows: Tensor = hash.hash_read_rows(self.values, slots, self.spec.default_value)
        return rows

    @atomic
    def slots(self, keys: Tensor) -> Tensor:
        """Return the row of each key in `values`, int64 `[n]`, -1 for missing keys.

        Writing to these rows of `values` changes the table. The result is valid until keys are
        inserted or removed.
        """
        return self.index.find(self._checked_keys(keys))

    @atomic
    def contains(self, keys: Tensor) -> Tensor:
        """Return which keys are in the table, bool `[n]`."""
        return self.slots(keys) >= 0

    @without_gradients
    @atomic
    def insert_or_assign(
        self, keys: Tensor, values: Tensor, scores: Tensor | int | None = None
    ) -> Insertion:
        """Write the values of keys, inserting new ones; values of refused keys are dropped."""
        return self._insert_values(keys, values, scores)

    @without_gradients
    @atomic
    def insert_and_evict(
        self,
        keys: Tensor,
        values: Tensor,
        scores: Tensor | int | None = None,
        *,
        padded: bool = False,
    ) -> Insertion:
        """Insert as `insert_or_assign`; return the evicted rows too, in the order of the new keys.

        Args:
            keys: keys `[n]`.
            values: values `[n, dim]`.
            scores: scores of the keys, as the class describes.
            padded: whether `evicted` has n rows, of which only the first `num_evicted` are defined,
                so that the host does not wait for their number; `Insertion.trimmed` drops the
                others.
        """
        insertion = self._insert_values(keys, values, scores, returns_evicted=True)
        return insertion if padded else insertion.trimmed()

    def _insert_values(
        self,
        keys: Tensor,
        values: Tensor,
        scores: Tensor | int | None,
        *,
        returns_evicted: bool = False,
    ) -> Insertion:
        """Insert keys and write their values; evicted rows, if returned, are padded to n."""
        batch, effects = self._checked_keys(keys), Effects()
        values = self._checked_values(batch, values)
        uses_or_scores = self._uses_or_scores(batch, scores)

        def insert() -> Insertion:
            inserted = self._insert(batch, uses_or_scores, effects)
            insertion = Insertion(inserted.slots, self._status(inserted))
            if returns_evicted:
                insertion = self._add_evicted(insertion, inserted)
            self._write_rows(inserted.slots, values)
            return insertion

        return self._lock.complete(insert, lambda: not effects.has_called(hash.hash_insert_))

    @without_gradients
    @atomic
    def find_or_insert(
        self, keys: Tensor, values: Tensor | None = None, scores: Tensor | int | None = None
    ) -> tuple[Tensor, Insertion]:
        """Return the values `[n, dim]` of keys, inserting new ones.

        A new key starts with its first row of `values`, or with a draw of `spec.initializer` if
        `values` is None. Values of refused keys are `spec.default_value`.
        """
        return self._find_or_insert(keys, values, scores, reads=True)

    @without_gradients
    @atomic
    def find_or_insert_slots(
        self, keys: Tensor, values: Tensor | None = None, scores: Tensor | int | None = None
    ) -> Insertion:
        """Find or insert keys as `find_or_insert` does, without copying values."""
        return self._find_or_insert(keys, values, scores, reads=False)[1]

    def _find_or_insert(
        self, keys: Tensor, values: Tensor | None, scores: Tensor | int | None, *, reads: bool
    ) -> tuple[Tensor, Insertion]:
        """Find or insert keys; return no values unless `reads`."""
        batch, effects = self._checked_keys(keys), Effects()
        uses_or_scores = self._uses_or_scores(batch, scores)
        values = None if values is None else self._checked_values(batch, values)

        def insert() -> tuple[Tensor, Insertion]:
            inserted = self._insert(batch, uses_or_scores, effects)
            slots, misses, result = inserted.slots, inserted.misses, inserted.result
            insertion = Insertion(slots, self._status(inserted))
            if values is not None and misses is not None:
                default_value = self.spec.default_value
                start_arguments = (misses.groups, misses.first, values, default_value, reads)
                return hash.hash_start_rows_(self.values, slots, *start_arguments), insertion
            if misses is not None and result is not None:
                self._write_initial_rows(batch, misses, result.slots)
            return self._read_rows(slots if reads else slots[:0]), insertion

        return self._lock.complete(insert, lambda: not effects.has_called(hash.hash_insert_))

    @atomic
    def slots_of_batch(self, batch: Keys) -> Tensor:
        """Return `slots` of a batch, int64 `[L]`, without the checks of keys.

        All segments must be of table 0. On a GPU, ids outside of all segments are missing keys; on
        the CPU segments must cover all ids.
        """
        return self.index.find(batch)

    @without_gradients
    @atomic
    def count_uses(self, batch: Keys) -> None:
        """Insert or touch the keys of a batch without writing rows, with one use per position.

        The batch is one as for `slots_of_batch`. The eviction must be LFU or LRU_LFU for uses to be
        counted.
        """
        effects = Effects()
        self._lock.complete(
            lambda: self._insert(batch, None, effects),
            lambda: not effects.has_called(hash.hash_insert_),
        )

    def _status(self, inserted: InsertedBatch) -> Tensor:
        if inserted.status is None:
            return torch.full_like(inserted.slots, hash.HIT, dtype=torch.uint8)
        return inserted.status

    def _write_initial_rows(self, batch: Keys, misses: Misses, slots: Tensor) -> None:
        if self._row_initializer is None or self._row_initializer[0].device != self.values.device:
            self._row_initializer = self._make_row_initializer()
        layout, rule = self._row_initializer
        buffers = [self.values.view(-1)]
        ids, first, offsets = batch.ids, misses.first, misses.offsets
        initial_rows_(buffers, layout, rule, ids, first, offsets, slots, self.seed)

    def _make_row_initializer(self) -> tuple[Tensor, Tensor]:
        """Return the layout of `values` and the rule of new rows; the host waits for a GPU.

        They are the arguments `layout` and `rules` of `emblib.ops.hash.initial_rows_`.
        """
        spec, device = self.spec, self.values.device
        layout = torch.tensor([[[0, spec.dim, spec.rows, spec.dim, 0]]], device=device)
        rule = torch.tensor([[rule_of(spec.initializer, spec)]], dtype=torch.float64, device=device)
        return layout, rule

    def _insert(
        self, batch: Keys, uses_or_scores: Tensor | None, effects: Effects
    ) -> InsertedBatch:
        """Touch or insert keys, with the result of `_uses_or_scores`."""
        effects.restart()
        if not self._assigns_scores or uses_or_scores is None:
            uses, rows = uses_or_scores, self._row_buffers()
            return self.index.insert(batch, uses, rows=rows, effects=effects)
        assigned_scores, no_uses = uses_or_scores, torch.zeros_like(uses_or_scores)

        # An `admit` that admits all keys, and replaces the summed counts of each by its last score.
        def use_last_scores(keys: Keys, misses: Misses) -> None:
            self._write_last(misses.counts, misses.groups.long(), assigned_scores)

        inserted = self.index.insert(
            batch, no_uses, admit=use_last_scores, rows=self._row_buffers(), effects=effects
        )
        self._write_column(HashEntryColumn.SCORE, inserted.slots, assigned_scores)
        return inserted

    def _entry_column(self, column: HashEntryColumn) -> Tensor:
        """Return a column of all entries as a view."""
        return self.index.entries[:, column]

    def _write_column(self, column: HashEntryColumn, slots: Tensor, values: Tensor) -> None:
        """Write stamps or scores of entries, as `_write_last` does."""
        self.index.forget_queues(0, slots)
        self._write_last(self._entry_column(column), slots, values)

    def _write_last(self, target: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write `values[i]` to `target[indices[i]]`, the last of equal indices; skip index -1."""
        hash.hash_write_rows_(target.unsqueeze(1), indices, values.unsqueeze(1))

    def _write_rows(self, slots: Tensor, values: Tensor) -> None:
        hash.hash_write_rows_(self.values, slots, values)

    def _add_evicted(self, insertion: Insertion, inserted: InsertedBatch) -> Insertion:
        """Return an insertion with the evicted rows; call before their slots are overwritten."""
        result = inserted.result
        if result is None:
            zero = torch.zeros(1, dtype=torch.int64, device=self.values.device)
            return insertion._replace(evicted=self._no_rows(), num_evicted=zero)
        keys, rows, stamps, scores, num_evicted = hash.hash_evicted_rows([self.values], *result)
        return insertion._replace(
            evicted=TableRows(keys, rows[0], stamps, scores), num_evicted=num_evicted
        )

    @without_gradients
    @atomic
    def assign(self, keys: Tensor, values: Tensor) -> Tensor:
        """Write the values of keys that are in the table; return which are, bool `[n]`."""
        batch = self._checked_keys(keys)
        values = self._checked_values(batch, values)
        slots = self.index.find(batch)
        self._write_rows(slots, values)
        return slots >= 0

    @without_gradients
    @atomic
    def accumulate(self, keys: Tensor, deltas: Tensor) -> Tensor:
        """Add to the values of keys that are in the table; return which are, bool `[n]`.

        The deltas of a key that repeats are added to it one after the other.
        """
        batch = self._checked_keys(keys)
        deltas = self._checked_values(batch, deltas)
        slots = self.index.find(batch)
        groups = group(slots, self.values.shape[0])
        hash.hash_add_rows_(self.values, *groups, deltas)
        return slots >= 0

    @atomic
    def scores(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, int64 `[n]`, and which keys are in the table, bool `[n]`.

        Scores of missing keys, and in tables without scores, are 0.
        """
        slots = self.slots(keys)
        is_present = slots >= 0
        if not self._has_scores:
            return torch.zeros_like(slots), is_present
        scores = self._entry_column(HashEntryColumn.SCORE)[slots.clamp(min=0)]
        return torch.where(is_present, scores, 0), is_present

    @atomic
    def set_scores(self, keys: Tensor, scores: Tensor | int) -> Tensor:
        """Set the scores of keys that are in the table; return which are, bool `[n]`.

        A key that repeats gets its last score.

        Raises:
            ValueError: the eviction is LRU or NONE; or see the class.
        """
        if self.spec.eviction in (Eviction.LRU, Eviction.NONE):
            raise ValueError(f"a table with {self.spec.eviction} has no scores")
        batch = self._checked_keys(keys)
        scores_by_position = self._expand_per_position("scores", batch, scores)
        slots = self.index.find(batch)
        self._write_column(HashEntryColumn.SCORE, slots, scores_by_position)
        return slots >= 0

    @atomic
    def erase(self, keys: Tensor) -> Tensor:
        """Remove keys; return which were present, bool `[n]`, True only once per repeated key."""
        return self.index.erase(self._checked_keys(keys)) >= 0

    @atomic
    def expire(self, before: int) -> Tensor:
        """Remove and return the keys last used before tick `before`, int64 `[n]` on the device.

        Raises TypeError or ValueError unless `before` is an int in [-2^62, 2^63).
        """
        return self.index.expire(0, check_count("before", before, minimum=-MAX_TICK))

    def export(self, batch: int = 1 << 16, since: int | None = None) -> Iterator[TableRows]:
        """Yield all rows, or those used at tick `since` or later, by ascending slot.

        `batch` is the maximum number of rows per result, at least 1; the first step of the iterator
        checks it, and reads the device. The caller must not change the table until the iterator
        ends; that is not checked.
        """
        batch = check_count("batch", batch)
        exported = self.index.export(0, since)
        scores = torch.zeros_like(exported.keys) if exported.scores is None else exported.scores
        for slots in exported.slots.split(batch):
            if slots.numel():
                i = torch.searchsorted(exported.slots, slots)  # indices of exported rows
                yield TableRows(exported.keys[i], self.values[slots], exported.stamps[i], scores[i])

    @without_gradients
    @atomic
    def load(self, rows: TableRows) -> Insertion:
        """Insert exported rows with their stamps and scores; keys must be distinct (not checked).

        They are inserted like the keys of one batch: some may be refused or evict other keys, and
        rows of keys that are in the table are overwritten. The tick of the table becomes at least
        the newest stamp.

        Raises:
            ValueError: stamps are not in `[0, 2^62)`; or see the class.
        """
        batch = self._checked_keys(rows.keys)
        values = self._checked_values(batch, rows.values)
        stamps = self._expand_per_position("stamps", batch, rows.stamps)
        scores = self._expand_per_position("scores", batch, rows.scores)
        if stamps.numel():
            oldest, newest = (int(stamp) for stamp in stamps.aminmax())
            if not 0 <= oldest <= newest < MAX_TICK:
                raise ValueError(f"stamps must be ticks in [0, 2^62), got {oldest} to {newest}")
            self.index.set_tick(max(self.index.tick, newest))

        def use_last_scores(keys: Keys, misses: Misses) -> None:
            self._write_last(misses.counts, misses.groups.long(), scores)

        no_uses, effects = torch.zeros_like(scores), Effects()

        def insert() -> Insertion:
            effects.restart()
            inserted = self.index.insert(
                batch, no_uses, admit=use_last_scores, rows=self._row_buffers(), effects=effects
            )
            slots = inserted.slots
            self._write_rows(slots, values)
            self._write_column(HashEntryColumn.STAMP, slots, stamps)
            if self._has_scores:
                self._write_column(HashEntryColumn.SCORE, slots, scores)
            return Insertion(slots, self._status(inserted))

        return self._lock.complete(insert, lambda: not effects.has_called(hash.hash_insert_))

    @atomic
    def size(self) -> int:
        """Return the number of keys (reads the device)."""
        return self.index.size(0)

    @atomic
    def capacity(self) -> int:
        """Return the number of slots; it grows to `spec.capacity` rounded up (reads the device)."""
        return self.index.capacity(0)

    @atomic
    def clear(self) -> None:
        """Remove all keys, set tick and counters to 0, and shrink to the initial capacity."""
        self._lock.complete(self.index.clear, lambda: True)

    @atomic
    def reserve(self, keys: int) -> None:
        """Grow to the size that a number of keys needs, at most to `spec.capacity` rounded up.

        Raises TypeError or ValueError unless `keys` is an int >= 0.
        """
        self.index.reserve(0, check_count("keys", keys, minimum=0), self._row_buffers())

    @atomic
    def stats(self) -> dict[str, int]:
        """Return `emblib.ops.hash.COUNTERS` by name (reads the device)."""
        return self.index.stats()[0]

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        columns = zip(self._no_rows(), *self.export(), strict=True)
        rows = TableRows(*(torch.cat(column) for column in columns))
        for name, column in rows._asdict().items():
            destination[prefix + name] = column
        destination[prefix + "tick"] = self.index.clock.clone()

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Replace the content by a saved table, which may have another capacity.

        If there are too few slots, the keys that would be evicted last are loaded, and a warning
        counts the others.
        """
        if state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            return
        missing_keys, unexpected_keys = arguments[2:4]
        state_keys = [prefix + name for name in (*TableRows._fields, "tick")]
        missing_keys += (absent_keys := [name for name in state_keys if name not in state_dict])
        unexpected_keys.extend(
            key
            for key in state_dict
            if key.startswith(prefix)
            and key not in state_keys
            and not key.startswith(f"{prefix}index.")  # those the index reports
        )
        if not absent_keys:
            saved_rows = TableRows(*(state_dict[prefix + name] for name in TableRows._fields))
            hash_keys = state_dict.get(f"{prefix}index.{HASH_KEYS}")
            hash_key = None if hash_keys is None else int(hash_keys)
            num_left_out = self._replace_content(
                saved_rows, int(state_dict[prefix + "tick"]), hash_key
            )
            if num_left_out:
                name = f"hash table {prefix.rstrip('.')!r}" if prefix else "hash table"
                warnings.warn(
                    f"emblib: the {name} had no slot for {num_left_out} of the "
                    f"{len(saved_rows.keys)} keys that it was loaded with; these "
                    "would have been evicted first",
                    stacklevel=caller_level(),
                )

    def _replace_content(self, saved_rows: TableRows, tick: int, hash_key: int | None) -> int:
        """Replace all rows; return how many found no slot. None keeps the hash key."""
        target = loading.TableTarget(
            self.index,
            0,
            "the table",
            {WEIGHT: self.values},
            self._row_buffers(),
            hash_key=hash_key,
        )
        entries = Entries(
            saved_rows.keys.cpu(),
            saved_rows.stamps.cpu(),
            saved_rows.scores.cpu() if self._has_scores else None,
            {WEIGHT: saved_rows.values},
        )

        def replace() -> int:
            self.clear()
            loaded = loading.replace_unchecked(target, entries)
            self.index.set_tick(tick)
            return loaded.left_out

        return self._lock.complete(replace, lambda: True)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the table in a state dict."""
        int64_vector = torch.empty(0, dtype=torch.int64, device="cpu")
        keys = state_dict.get(f"{prefix}keys")
        num_keys = len(keys) if isinstance(keys, Tensor) and keys.dim() == 1 else None
        targets = {
            "keys": int64_vector,
            "values": self.values,
            "stamps": int64_vector,
            "scores": int64_vector,
        }
        for name, target in targets.items():
            shape = (num_keys, *self.values.shape[1:]) if name == "values" else (num_keys,)
            if prefix + name in state_dict:
                value = state_dict[prefix + name]
                problem = state_dicts.tensor_problem(value, target, shape)
                may_be_negative = name == "scores" and self.spec.eviction is Eviction.CUSTOM
                is_number = name in ("stamps", "scores") and not may_be_negative
                if not problem and is_number and bool((value < 0).any()):
                    problem = f"must be >= 0, got {value}"
                if not problem and name == "stamps" and bool((value >= MAX_TICK).any()):
                    problem = f"must be ticks below 2^62, got {value}"
                if not problem and name == "keys" and value.unique().numel() < value.numel():
                    problem = f"each key must occur once, got {value}"
                if problem:
                    yield f"{prefix}{name}: {problem}"
        yield from state_dicts.number_problems(state_dict, f"{prefix}tick", below=MAX_TICK)
        hash_keys = f"{prefix}index.{HASH_KEYS}"
        yield from state_dicts.entry_problems(state_dict, {hash_keys: self.index.hash_keys})

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """Return an attribute per state dict entry that is not a parameter or buffer."""
        return SimpleNamespace(**dict.fromkeys((*TableRows._fields, "tick")))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute of each key, for `torch.distributed.checkpoint.state_dict`."""
        return dict.fromkeys(vars(self._names_in_checkpoints), "_names_in_checkpoints")

    def _no_rows(self) -> TableRows:
        no_indices = torch.empty(0, dtype=torch.int64, device=self.values.device)
        return TableRows(no_indices, self.values[no_indices], no_indices, no_indices)

    @atomic
    def __reduce__(self) -> tuple[Any, ...]:
        used_rows = self.values[: self.capacity()].clone()
        arguments = (self.spec, self.dtype, self.seed, str(self.values.device))
        return _rebuild, (*arguments, self.index.snapshot(), used_rows)

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        check_not_shared(fn)
        return super()._apply(ops.keep_dtype(fn), recurse)

    def extra_repr(self) -> str:
        """Return capacity, dim and eviction for `repr`."""
        spec = self.spec
        return (
            f"capacity={spec.max_buckets * SLOTS_PER_BUCKET}, dim={spec.dim}, {spec.eviction.value}"
        )


def _check_uses(scores: Tensor, eviction: Eviction) -> None:
    """Raise ValueError for scores below 0; on a GPU a device assert checks it instead."""
    message = f"scores must be >= 0 for {eviction}; Eviction.CUSTOM takes any int64"
    if scores.is_cuda:
        torch._assert_async((scores >= 0).all(), message)
    elif scores.numel() and bool((scores < 0).any()):
        raise ValueError(f"{message}, got {int(scores.min())}")


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
    table._advise_growth(0, 0, table.capacity())  # noqa: SLF001 - this unpickles a table
    table.values[: values.shape[0]] = values
    return table
