"""Admission of missing keys: exact or sketched counts of keys that have no row yet.

`Admission.admit` counts the misses of a batch (`emblib.ops.hash.Misses`), and returns which of them
have reached their threshold. On a GPU all shapes are static, so the host does not wait for the
device, unless a table has a `FrequencyAdmission.rule`. Sums and maxima of integers do not depend on
their order, so all devices and numbers of threads decide alike.

**Exact**: a hash table of keys whose scores are their counts. An admitted key is removed from this
table. When it is full, it evicts the key that was missing least recently, whatever its count:
otherwise keys that never return would fill the table in the long run, since any of them has as high
a count as a new key. An evicted key is counted from zero when it is missing again; so is a key that
found no slot, because keys of the same batch filled its buckets.

**Sketch** (count-min with conservative update: Cormode and Muthukrishnan, 2005; Estan and Varghese,
2002): `depth` rows of `width` counters. A key has one counter per row, and its count is the
smallest of them. A batch computes the new counts of its keys, then raises each counter to the
largest new count of the keys that share it. So a count can be too large if each of its counters is
shared with another key. Counters stop at the largest threshold of the table. With `halve_every=n`
old counts fade: a training batch halves about 1/n of the counters, so that n batches halve each
counter once. Without it a count below the threshold is not too small.

The hash key of a table, which follows from a seed, selects the counters of its keys, so that keys
that share counters are hard to find without the seed. State dicts have the counters and their hash
keys, because counters are meaningless under other hash keys. Older state dicts of sketches have no
hash keys: these are 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.columns import HashEntryColumn, HashTableColumn, SketchColumn
from emblib.dynamic import keys as routing
from emblib.dynamic.hash_index import HASH_KEYS, HashIndex
from emblib.dynamic.last_uses import values_by_feature
from emblib.dynamic.saving import dumps, loading
from emblib.dynamic.saving.entries import Entries
from emblib.ops import hash
from emblib.ops.effects import Effects
from emblib.reference.random import mix
from emblib.specs import (
    CountMinSketch,
    DynamicSpec,
    ExactCounter,
    FrequencyAdmission,
    PerFeature,
)
from emblib.tables import state_dicts

_LOW_31_BITS = 0x7FFFFFFF
_MAX_LOADED_STAMP = 1 << 32  # leaves room for ticks after it
_COUNTER_ENTRIES = ("keys", "counts")  # state dict entries of an exact counter, per table


class MissingKeys(NamedTuple):
    """Missing keys of a batch, each once per table, as `missing_keys_of` makes them.

    Attributes:
        keys: int64 `[L]`.
        counts: int64 `[L]`, uses of each key in the batch.
        tables: int64 `[L]`, table of each key; the number of tables marks padding, and keys that
            are not to be counted.
    """

    keys: Tensor
    counts: Tensor
    tables: Tensor


def missing_keys_of(ids: Tensor, misses: hash.Misses) -> MissingKeys:
    """Return the missing keys of a batch with the keys `ids`, int64 `[L]`, ordered by table.

    On a GPU they are padded to L, because the host does not wait for their number; padding has the
    number of tables as its table.
    """
    first_positions, counts = misses.first, misses.counts
    if not ids.is_cuda:
        num_missing = int(misses.offsets[-1])
        first_positions, counts = first_positions[:num_missing], counts[:num_missing]
    miss_indices = torch.arange(first_positions.numel(), device=ids.device)
    tables = torch.searchsorted(misses.offsets[1:], miss_indices, right=True)
    return MissingKeys(ids[first_positions], counts, tables)


class _SelectedMisses(NamedTuple):
    """Selected misses as a batch of L keys, with padding in the segment of the last counter.

    Attributes:
        batch: the selected misses, with one segment per counter.
        counts: int64 `[L]`, uses of the key at each position of the batch.
        positions: int64 `[L]`, position in the batch of each miss; L if it is not selected.
    """

    batch: hash.Keys
    counts: Tensor
    positions: Tensor


class _ExactCounters(nn.Module):
    """Exact counts for some of the tables of a module.

    A *counter* is a table of `index`: one per table that counts exactly, and a last one with a
    single bucket, for padding. A batch of selected misses is padded to the number of all misses.
    The score of an entry is the count of its key, 0 for padding; the order of eviction is
    `Eviction.LRU`.

    Args:
        table_indices: the tables that count exactly; their specs must have an `ExactCounter`.
        specs: specs of all T tables.
        device: device of the counters.
        hash_keys: hash key of each of the T tables.
    """

    counter_of_table: Tensor  # int64 `[T + 1]`; -1 for tables without a counter, and padding
    counter_numbers: Tensor  # int64 `[counters]`, the tables of `index`: 0, 1, 2, ...

    def __init__(
        self,
        table_indices: Sequence[int],
        specs: Sequence[DynamicSpec],
        device: torch.device,
        hash_keys: Sequence[int],
    ) -> None:
        super().__init__()
        counters = []
        for t in table_indices:
            spec = _admission_of(specs[t]).counter
            assert isinstance(spec, ExactCounter)
            counters.append(DynamicSpec(spec.capacity, 1))
        index_hash_keys = [*(hash_keys[t] for t in table_indices), 0]
        self.index = HashIndex(
            [*counters, DynamicSpec(1, 1)], device, index_hash_keys, has_scores=True
        )
        counter_of_table = torch.full((len(specs) + 1,), -1, device="cpu")
        counter_of_table[list(table_indices)] = torch.arange(len(table_indices), device="cpu")
        self.register_buffer("counter_of_table", counter_of_table.to(device), persistent=False)
        counter_numbers = torch.arange(len(table_indices) + 1, device=device)
        self.register_buffer("counter_numbers", counter_numbers, persistent=False)

    def select(self, missing_keys: MissingKeys, mask: Tensor | None = None) -> _SelectedMisses:
        """Select the misses of tables with a counter, and of these, with `mask`, the marked ones.

        `missing_keys` must be ordered by table, except for padding. `mask` is bool `[L]`.
        """
        length, padding_counter = missing_keys.keys.numel(), self.counter_numbers.numel() - 1
        counters = self.counter_of_table[missing_keys.tables]
        is_counted = counters >= 0
        if mask is not None:
            is_counted = is_counted & mask
        positions = torch.where(is_counted, torch.cumsum(is_counted, 0) - 1, length)
        keys, counts = (
            values.new_zeros(length + 1).scatter_(0, positions, values)[:length]
            for values in (missing_keys.keys, missing_keys.counts)
        )
        counters = torch.where(is_counted, counters, padding_counter)
        sizes = torch.zeros_like(self.counter_numbers).scatter_add_(
            0, counters, torch.ones_like(counters)
        )
        ends = torch.cumsum(sizes, 0)
        starts = torch.cat([ends.new_zeros(1), ends])
        return _SelectedMisses(hash.Keys(keys, starts, self.counter_numbers), counts, positions)

    def count(self, missing_keys: MissingKeys, effects: Effects) -> Tensor:
        """Count the misses, and return their counts so far, int64 `[L]`; 0 for other tables."""
        if not missing_keys.keys.is_cuda:
            self.index.begin_insertion(effects)
            counters = self.counter_of_table[missing_keys.tables]
            keys, counts, _ = missing_keys
            results = effects.call_once(
                hash.hash_count_, self.index.tensors(), keys, counts, counters
            )
            if results:  # no counter has to grow
                counts_so_far: Tensor = results[0]
                return counts_so_far
        selected_misses = self.select(missing_keys)
        counts = self._count_selected(selected_misses, effects)
        return torch.cat([counts, counts.new_zeros(1)])[selected_misses.positions]

    def _count_selected(self, selected_misses: _SelectedMisses, effects: Effects) -> Tensor:
        """Count selected misses; return their counts so far, int64 `[L]`, 0 for padding."""
        inserted = self.index.insert(selected_misses.batch, effects=effects)
        entry_counts = self.index.entries[:, HashEntryColumn.SCORE]
        first_buckets = self.index.tables[:, HashTableColumn.FIRST_BUCKET]
        first_slots = first_buckets[hash.segments_of(selected_misses.batch)] * hash.SLOTS_PER_BUCKET
        # A key without a slot writes 0 to the last slot, which is one of the padding counter.
        has_slot = inserted.slots >= 0
        last_slot = entry_counts.numel() - 1
        rows = torch.where(has_slot, first_slots + inserted.slots, last_slot)
        is_hit = has_slot if inserted.status is None else inserted.status == hash.HIT
        earlier_counts = torch.where(is_hit, entry_counts[rows], 0)
        uses = torch.minimum(selected_misses.counts, hash.MAX_USES - earlier_counts)
        counts: Tensor = effects.call_once(torch.ops.aten.add.Tensor, earlier_counts, uses)
        stored_counts = torch.where(has_slot, counts, 0)
        # Once, because another run would undo what an admission has changed since.
        effects.call_once(torch.ops.aten.index_put_.default, entry_counts, [rows], stored_counts)
        return counts

    def forget(self, missing_keys: MissingKeys, mask: Tensor) -> None:
        """Remove from the counters the missing keys that `mask`, bool `[L]`, marks."""
        if missing_keys.keys.is_cuda:
            self.index.erase(self.select(missing_keys, mask).batch)
            return
        counters = self.counter_of_table[missing_keys.tables]
        (positions,) = (mask & (counters >= 0)).nonzero(as_tuple=True)
        boundaries = torch.arange(self.counter_numbers.numel() + 1, device="cpu")
        starts = torch.searchsorted(counters[positions], boundaries)
        self.index.erase(hash.Keys(missing_keys.keys[positions], starts, self.counter_numbers))

    def counts(self, counter: int) -> tuple[Tensor, Tensor]:
        """Return the keys of a counter and their counts, int64 `[n]`, sorted as in checkpoints."""
        entries = self.index.export(counter)
        assert entries.scores is not None
        order = routing.canonical_order(entries.keys)
        return entries.keys[order], entries.scores[order]

    def set_counts(
        self, counter: int, keys: Tensor, counts: Tensor, hash_key: int | None = None
    ) -> None:
        """Replace the counts of a counter; lower counts are left out first if not all find a slot.

        The counter evicts these keys before any that it counts from now on, lower counts first.

        Args:
            counter: number of the counter.
            keys: int64 `[n]`, distinct (not checked).
            counts: int64 `[n]`.
            hash_key: new hash key of the counter; None keeps the current one.
        """
        # Times of use are not saved. The tick becomes at least the largest stamp.
        stamps = counts.cpu().clamp(max=_MAX_LOADED_STAMP)
        target = loading.TableTarget(self.index, counter, "the counter", {}, hash_key=hash_key)
        loading.replace_unchecked(target, Entries(keys.cpu(), stamps, counts.cpu(), {}))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for counter in range(self.counter_numbers.numel() - 1):
            keys, counts = self.counts(counter)
            destination[f"{prefix}{counter}.keys"] = keys
            destination[f"{prefix}{counter}.counts"] = counts

    @property
    @shows_attribute_errors
    def _entries_by_counter(self) -> SimpleNamespace:
        """Return an object with an attribute per counter, by which torch resolves state dict keys.

        Its values are placeholders.
        """
        indices = map(str, range(self.counter_numbers.numel() - 1))
        return SimpleNamespace(**dict.fromkeys(indices, SimpleNamespace(keys=0, counts=0)))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute of each counter for `torch.distributed.checkpoint.state_dict`."""
        return dict.fromkeys(vars(self._entries_by_counter), "_entries_by_counter")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        if state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        missing_keys, unexpected_keys = arguments[2], arguments[3]
        hash_keys = state_dict.get(f"{prefix}index.{HASH_KEYS}", self.index.hash_keys)
        for counter in range(self.counter_numbers.numel() - 1):
            keys_of_counter = [f"{prefix}{counter}.{entry}" for entry in _COUNTER_ENTRIES]
            absent_keys = [
                state_key for state_key in keys_of_counter if state_key not in state_dict
            ]
            missing_keys.extend(absent_keys)
            unexpected_keys[:] = [
                state_key for state_key in unexpected_keys if state_key not in keys_of_counter
            ]
            if not absent_keys:
                keys, counts = (state_dict[state_key] for state_key in keys_of_counter)
                self.set_counts(counter, keys, counts, int(hash_keys[counter]))

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the counters in a state dict."""
        vector = torch.empty(0, dtype=torch.int64, device="cpu")
        for counter in range(self.counter_numbers.numel() - 1):
            key, num_keys = f"{prefix}{counter}.keys", 0
            if key in state_dict:
                keys = state_dict[key]
                problem = state_dicts.tensor_problem(keys, vector, (None,))
                if not problem and keys.unique().numel() < keys.numel():
                    problem = f"each key must occur once, got {keys}"
                if problem:
                    yield f"{key}: {problem}"
                    continue
                num_keys = len(keys)
            counts = {f"{prefix}{counter}.counts": vector.new_empty(num_keys)}
            yield from state_dicts.count_problems(state_dict, counts)
        hash_keys = f"{prefix}index.{HASH_KEYS}"
        yield from state_dicts.entry_problems(state_dict, {hash_keys: self.index.hash_keys})


class _FadingCounters(NamedTuple):
    """Counters of a sketch: within `halve_every` batches, each of them is halved once."""

    first_counter: int
    num_counters: int
    halve_every: int  # in training batches


class _Sketches(nn.Module):
    """Count-min sketches for some of the tables of a module, one after the other in one tensor.

    Args:
        table_indices: the tables with a sketch; their specs must have a `CountMinSketch`.
        specs: specs of all T tables.
        device: device of the counters.
        hash_keys: hash key of each of the T tables.
    """

    counters: Tensor  # uint8, int32 or int64 `[n]`, all sketches, then a spare counter
    batches: Tensor  # int64 `[1]`, training batches since `clear`, or as a state dict had them
    layout: Tensor  # int64 `[T + 1, 5]`, see `SketchColumn`; zeros for tables without a sketch

    def __init__(
        self,
        table_indices: Sequence[int],
        specs: Sequence[DynamicSpec],
        device: torch.device,
        hash_keys: Sequence[int],
    ) -> None:
        super().__init__()
        self._fading: list[_FadingCounters] = []
        layout = torch.zeros(len(specs) + 1, len(SketchColumn), dtype=torch.int64, device="cpu")
        first_counter = max_threshold = 0
        for t in table_indices:
            frequency = _admission_of(specs[t])
            sketch = frequency.counter
            assert isinstance(sketch, CountMinSketch)
            num_counters = sketch.width * sketch.depth
            fields = (
                first_counter,
                sketch.width,
                sketch.depth,
                frequency.max_threshold,
                hash_keys[t],
            )
            layout[t] = torch.tensor(fields, device="cpu")  # see `SketchColumn`
            if sketch.halve_every is not None:
                self._fading.append(
                    _FadingCounters(first_counter, num_counters, sketch.halve_every)
                )
            first_counter += num_counters
            max_threshold = max(max_threshold, frequency.max_threshold)
        self.depth = int(layout[:, SketchColumn.DEPTH].max())
        if max_threshold < 2**8:
            dtype = torch.uint8
        else:
            dtype = torch.int32 if max_threshold < 2**31 else torch.int64
        # Keys of tables without a sketch, and padding, use the spare counter.
        counters = torch.zeros(first_counter + 1, dtype=dtype, device=device)
        self.register_buffer("counters", counters)
        self.register_buffer("batches", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_buffer("layout", layout.to(device), persistent=False)

    def count(self, missing_keys: MissingKeys, effects: Effects) -> Tensor:
        """Fade counters, then count the misses, and return their counts so far, int64 `[L]`.

        They stop at the largest threshold of the table, and are 0 for tables without a sketch.
        """
        self.fade(effects)
        if not missing_keys.keys.is_cuda:
            return effects.call_once(hash.sketch_count_, self.counters, self.layout, *missing_keys)
        begin, width, depth, threshold, hash_key = self.layout[missing_keys.tables].unbind(1)
        hashes = mix(missing_keys.keys ^ hash_key)
        hash_1, hash_2 = hashes & _LOW_31_BITS, hashes >> 33 & _LOW_31_BITS | 1
        rows = torch.arange(self.depth, device=hashes.device)[:, None]
        column = ((hash_1 + rows * hash_2 & _LOW_31_BITS) * width) >> 31
        spare_counter = self.counters.numel() - 1
        cells = torch.where(rows < depth, begin + rows * width + column, spare_counter)
        num_seen = torch.where(rows < depth, self.counters[cells].long(), threshold).amin(0)
        # The minimum is taken before the sum, which could exceed int64 without it.
        num_new = torch.minimum(missing_keys.counts, threshold - num_seen)
        counts: Tensor = effects.call_once(torch.ops.aten.add.Tensor, num_seen, num_new)
        raised_counts = counts.to(self.counters.dtype).expand(self.depth, -1)
        self.counters.scatter_reduce_(0, cells.flatten(), raised_counts.flatten(), "amax")
        self.counters[spare_counter:].zero_()
        return counts

    def fade(self, effects: Effects) -> None:
        """Halve the counters whose turn it is in this batch, and count the batch."""
        if self._fading:
            num_batches = effects.call_once(torch.ops.aten.clone.default, self.batches)
        for first_counter, num_counters, halve_every in self._fading:
            turn = num_batches % halve_every
            first_cell = turn * num_counters // halve_every
            end_cell = (turn + 1) * num_counters // halve_every
            cells = first_cell + torch.arange(-(-num_counters // halve_every), device=turn.device)
            cells = torch.where(cells < end_cell, first_counter + cells, self.counters.numel() - 1)
            halved = effects.call_once(torch.ops.aten.clone.default, self.counters[cells] // 2)
            # Once, because another run would undo what `sketch_count_` has counted since.
            effects.call_once(torch.ops.aten.index_put_.default, self.counters, [cells], halved)
        effects.call_once(torch.ops.aten.add_.Scalar, self.batches, 1)

    @property
    def hash_keys(self) -> Tensor:
        """Return the hash keys, int64 `[T]` on the CPU; 0 for tables without a sketch."""
        return self.layout[:-1, SketchColumn.HASH_KEY].cpu().clone()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + HASH_KEYS] = self.hash_keys

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        name, unexpected_keys, errors = prefix + HASH_KEYS, arguments[3], arguments[4]
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        hash_keys = self.layout[:-1, SketchColumn.HASH_KEY]
        saved_hash_keys = state_dict.get(name, torch.zeros_like(hash_keys))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        unexpected_keys[:] = [key for key in unexpected_keys if key != name]
        if f"{prefix}counters" in state_dict:
            hash_keys.copy_(saved_hash_keys)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the sketches in a state dict."""
        tensors = state_dicts.loadable_tensors(self, prefix)
        yield from state_dicts.count_problems(state_dict, tensors)
        hash_keys = {prefix + HASH_KEYS: self.layout[:-1, SketchColumn.HASH_KEY]}
        yield from state_dicts.entry_problems(state_dict, hash_keys)


class Admission(nn.Module):
    """Count missing keys, and decide which of them get a row.

    The caller of a method must hold the lock of the tables.

    Args:
        specs: specs of the tables; tables without `admission` admit every key.
        device: device of the counts.
        hash_keys: hash key of each table, see `HashIndex`; None is 0 for all.
        feature_tables: table of each feature of a batch; None is one feature per table. A
            `PerFeature` threshold must have one value for each feature of its table (not checked).

    Attributes:
        is_per_feature: whether a threshold differs between features of a table.
    """

    thresholds: Tensor  # int64 `[T + 1]`, largest threshold of each table, then 0
    feature_thresholds: Tensor  # int64 `[F]`

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        device: torch.device,
        hash_keys: Sequence[int] | None = None,
        feature_tables: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.specs = tuple(specs)
        feature_tables = range(len(specs)) if feature_tables is None else feature_tables
        hash_keys = [0] * len(self.specs) if hash_keys is None else hash_keys
        exact_tables, sketched_tables = (
            [t for t, spec in enumerate(specs) if _counts_with(spec, kind)]
            for kind in (ExactCounter, CountMinSketch)
        )
        self._exact_tables = exact_tables
        self.counter = (
            _ExactCounters(exact_tables, specs, device, hash_keys) if exact_tables else None
        )
        self.sketches = (
            _Sketches(sketched_tables, specs, device, hash_keys) if sketched_tables else None
        )
        table_thresholds = [spec.admission.threshold if spec.admission else 0 for spec in specs]
        self.is_per_feature = any(isinstance(value, PerFeature) for value in table_thresholds)
        max_thresholds = [spec.admission.max_threshold if spec.admission else 0 for spec in specs]
        for name, thresholds in (
            # The last threshold is for padding, whose result is ignored.
            ("thresholds", [*max_thresholds, 0]),
            ("feature_thresholds", values_by_feature(table_thresholds, feature_tables)),
        ):
            tensor = torch.tensor(thresholds, dtype=torch.int64, device=device)
            self.register_buffer(name, tensor, persistent=False)

    def admit(
        self,
        keys: hash.Keys,
        misses: hash.Misses,
        in_store: Tensor | None = None,
        effects: Effects | None = None,
    ) -> Tensor | None:
        """Count the misses of a batch, and return which of them to admit.

        Call it, or `skip_batch` if there are no misses, once per training batch.

        Args:
            keys: the batch, of L keys.
            misses: the keys of the batch that are not in the index.
            in_store: bool `[L]` by miss, the keys with a row in a backing store: these are admitted
                without being counted. None for none.
            effects: native calls of this batch; to complete an interrupted call, pass its effects
                again after `restart`. None for calls that are not repeated.

        Returns:
            Bool `[L]` by miss, unspecified past the number of misses; None admits all misses.

        Raises:
            ValueError: an admission rule returned something other than one bool per key; the keys
                are counted then.
            Exception: a rule raised it; the keys are counted then.
        """
        if self.counter is None and self.sketches is None:
            return None
        missing_keys = missing_keys_of(keys.ids, misses)
        length = missing_keys.keys.numel()
        if in_store is not None:
            tables = torch.where(in_store[:length], len(self.specs), missing_keys.tables)
            missing_keys = missing_keys._replace(tables=tables)
        thresholds = None
        if self.is_per_feature:
            thresholds = self._smallest_thresholds(keys, misses, length)
        is_admitted = self.decide(missing_keys, effects, thresholds)
        is_admitted = nn.functional.pad(is_admitted, (0, keys.ids.numel() - length))
        return is_admitted if in_store is None else is_admitted | in_store

    def skip_batch(self, effects: Effects) -> None:
        """Count a batch without misses: only sketches change, whose counters fade."""
        if self.sketches is not None:
            self.sketches.fade(effects)

    def _smallest_thresholds(self, keys: hash.Keys, misses: hash.Misses, length: int) -> Tensor:
        """Return per miss the smallest threshold of the features that use it, int64 `[length]`.

        `length` is at least the number of misses; padding gets `hash.MAX_USES`.
        """
        groups = misses.groups.long()
        thresholds = self.feature_thresholds[hash.segments_of(keys)]
        smallest_thresholds = torch.full((length + 1,), hash.MAX_USES, device=groups.device)
        smallest_thresholds.scatter_reduce_(
            0, torch.where(groups < 0, length, groups), thresholds, "amin"
        )
        return smallest_thresholds[:length]

    def decide(
        self,
        missing_keys: MissingKeys,
        effects: Effects | None = None,
        thresholds: Tensor | None = None,
    ) -> Tensor:
        """Count missing keys, and return which to admit, bool `[L]`, unspecified for padding.

        Exact counters forget the keys that are admitted.

        Args:
            missing_keys: the keys.
            effects: native calls, as in `admit`.
            thresholds: int64 `[L]`, threshold of each key; None uses the largest threshold of its
                table. A table with a rule uses the rule instead.

        Raises:
            ValueError, Exception: as `admit`.
        """
        counts = torch.zeros_like(missing_keys.counts)
        effects = Effects() if effects is None else effects
        if self.sketches is not None:
            counts = counts + self.sketches.count(missing_keys, effects)
        if self.counter is not None:
            counts = counts + self.counter.count(missing_keys, effects)
        if thresholds is None:
            thresholds = self.thresholds[missing_keys.tables]
        is_admitted = counts >= thresholds
        for table, spec in enumerate(self.specs):
            if spec.admission is not None and spec.admission.rule is not None:
                (positions,) = (missing_keys.tables == table).nonzero(as_tuple=True)
                decisions = spec.admission.rule(missing_keys.keys[positions], counts[positions])
                name = spec.name or table
                is_admitted[positions] = _checked_decisions(name, decisions, positions)
        if self.counter is not None:
            self.counter.forget(missing_keys, is_admitted)
        return is_admitted

    def counts(self, table: int) -> tuple[Tensor, Tensor]:
        """Return the keys in the exact counter of a table, and their counts.

        Both are int64 `[n]`, on the device of the counter, sorted as in checkpoints.

        Raises:
            ValueError: the table does not count exactly.
        """
        return self._counter_of(table).counts(self._exact_tables.index(table))

    def set_counts(self, table: int, keys: Tensor, counts: Tensor) -> None:
        """Replace the counts of a table, int64 `[n]`; `keys` must be distinct (not checked).

        If not all keys find a slot in the counter, lower counts are left out first.

        Raises:
            ValueError: the table does not count exactly.
        """
        self._counter_of(table).set_counts(self._exact_tables.index(table), keys, counts)

    def copy_counts(
        self,
        table: int,
        source: "Admission",
        source_table: int,
        is_owned: Callable[[Tensor], Tensor],
    ) -> None:
        """Copy the counts of a table of another module that has the same admission.

        Exact counts of owned keys are copied. A sketch is copied whole, with the counts of all
        keys, and only if this module has one table and both have equal hash keys; else nothing is
        copied, without an error. Hash keys may differ because all shards have those of rank 0, and
        other ranks may shard a collection that has its own.

        Args:
            table: number of the table.
            source: admission of the other module.
            source_table: number of the table there.
            is_owned: function that returns which keys, int64 `[n]`, to copy from an exact counter.
        """
        if self.counts_exactly(table) and source.counts_exactly(source_table):
            keys, counts = source.counts(source_table)
            is_copied = is_owned(keys)
            self.set_counts(table, keys[is_copied], counts[is_copied])
        elif (
            self.sketches is not None
            and source.sketches is not None
            and len(self.specs) == 1
            and torch.equal(self.sketches.hash_keys, source.sketches.hash_keys)
        ):
            self.sketches.load_state_dict(source.sketches.state_dict())

    def counts_exactly(self, table: int) -> bool:
        """Return whether a table counts exactly; else `counts` and `set_counts` raise."""
        return table in self._exact_tables

    def _counter_of(self, table: int) -> _ExactCounters:
        """Return the exact counter; raise ValueError if a table has none."""
        if self.counter is None or table not in self._exact_tables:
            raise ValueError(
                f"table {table} has no exact counter of keys, its admission is "
                f"{self.specs[table].admission!r}; give it "
                "FrequencyAdmission(threshold, ExactCounter(...))"
            )
        return self.counter

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all counts, slot by slot, for `restore` in a module of equal tables.

        Its entries are "counter" (`HashIndex.snapshot`) and "sketches" (a state dict); None without
        counts of that kind.
        """
        counter = None if self.counter is None else self.counter.index.snapshot()
        sketches = None
        if self.sketches is not None:
            state = self.sketches.state_dict()
            sketches = {name: tensor.clone() for name, tensor in state.items()}
        return {"counter": counter, "sketches": sketches}

    def check_snapshot(self, snapshot: Any) -> None:
        """Raise ValueError unless `restore` can restore a snapshot."""
        entries = dumps.check_entries("admission", snapshot, ("counter", "sketches"))
        for name, child in (("counter", self.counter), ("sketches", self.sketches)):
            dumps.check_presence(f"admission.{name}", entries[name], child)
        if self.counter is not None:
            self.counter.index.check_snapshot(entries["counter"])
        if self.sketches is not None:
            _check_state("admission.sketches", entries["sketches"], self.sketches.state_dict())

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load a state, with all of its entries."""
        _check_state("admission", state, self.state_dict())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the counts of a snapshot that `check_snapshot` accepts."""
        if self.counter is not None:
            self.counter.index.restore(snapshot["counter"])
        if self.sketches is not None:
            self.sketches.load_state_dict(snapshot["sketches"])

    def clear(self) -> None:
        """Forget all counts; the halving of sketches starts with the first counters again."""
        if self.counter is not None:
            self.counter.index.clear()
        if self.sketches is not None:
            self.sketches.counters.zero_()
            self.sketches.batches.zero_()


def _check_state(name: str, state: Any, expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state has the entries, dtypes and shapes of `expected`.

    Exact counters may have another number of keys. Hash keys may be absent, as in states of earlier
    versions.
    """
    expected_entries = dict(expected)
    entries = dumps.check_entries(name, state, ())
    for key in expected:
        stem, _, entry = key.rpartition(".")
        if entry == HASH_KEYS and key not in entries:
            del expected_entries[key]
        elif entry in _COUNTER_ENTRIES:
            keys = dumps.check_entries(name, entries, [f"{stem}.keys"])[f"{stem}.keys"]
            expected_entries[key] = dumps.check_tensor(
                f"{name}.{stem}.keys", keys, torch.int64, (None,)
            )
    dumps.check_state(name, entries, expected_entries)


def _checked_decisions(name: str | int, decisions: Any, keys: Tensor) -> Tensor:
    """Return the decisions of an admission rule on the device of `keys`.

    Raises:
        ValueError: they are not bool in the shape of `keys`.
    """
    is_tensor = isinstance(decisions, Tensor)
    if not is_tensor or decisions.dtype != torch.bool or decisions.shape != keys.shape:
        description = f"{decisions.dtype} {list(decisions.shape)}" if is_tensor else decisions
        raise ValueError(
            f"the admission rule of table {name!r} must return bool {list(keys.shape)}, got "
            f"{description}"
        )
    result: Tensor = decisions.to(keys.device)
    return result


def _admission_of(spec: DynamicSpec) -> FrequencyAdmission:
    """Return the admission of a spec that must have one."""
    assert spec.admission is not None
    return spec.admission


def _counts_with(spec: DynamicSpec, kind: type) -> bool:
    """Return whether admission to a table uses a counter of class `kind`."""
    return spec.admission is not None and isinstance(spec.admission.counter, kind)
