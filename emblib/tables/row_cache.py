"""The software cache of a module: its tensors, what is in flight, and what was counted.

`emblib.ops.cache` says what the ops do with these tensors; `emblib.tables.prefetch` says when.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.ops import cache as cache_ops
from emblib.ops import codes
from emblib.ops.lookups import Tiers
from emblib.ops.tbe import Groups
from emblib.optim import State
from emblib.specs import Cache, CachePolicy, Precision
from emblib.tables.layout import TableLayout

_MOST_SETS = (2**31 - 1) // cache_ops.WAYS  # slots are int32


@dataclass(frozen=True)
class CacheStats:
    """What a cache was asked for and what it had, since it was made or the last reset.

    A batch counts when its rows are brought in: once, by `prefetch` or else by `forward`; a batch
    that is prefetched in several passes counts pass by pass. Lookups that are skipped (index -1)
    and those of tables without a cache do not count. In brackets the name of the same number in
    FBGEMM's `uvm_cache_stats`.

    Attributes:
        calls: batches [num_calls]; of a table: batches in which it was looked up.
        lookups: lookups of cached tables [num_requested_indices].
        unique: distinct rows of a batch, summed over batches [num_unique_indices].
        unique_misses: distinct rows that were not in the cache when their batch came
            [num_unique_misses]. All but the conflicting ones were then fetched.
        conflict_unique_misses: distinct rows that were not in the cache and found no way in, as
            their set was full of rows in flight or, LFU, of rows used more often
            [num_conflict_unique_misses]. They are read and updated in place.
        conflict_misses: lookups of such rows [num_conflict_misses].
        lookup_misses: lookups of all rows that were not in the cache when their batch came.
        write_backs: rows that gave way to another; of a table: rows of it that did.
        tables: the same for each cached table, by name; empty in those.
    """

    calls: int
    lookups: int
    unique: int
    unique_misses: int
    conflict_unique_misses: int
    conflict_misses: int
    lookup_misses: int
    write_backs: int
    tables: Mapping[str, "CacheStats"] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the lookups whose row was in the cache when its batch came; NaN without any."""
        return _share(self.lookups - self.lookup_misses, self.lookups)

    @property
    def unique_hit_rate(self) -> float:
        """Share of the distinct rows that were in the cache when their batch came."""
        return _share(self.unique - self.unique_misses, self.unique)

    def events(self) -> Iterator[tuple[str, int]]:
        """The counters as `(counter, value)`, then as `(table.counter, value)`."""
        for name in cache_ops.COUNTERS:
            yield name, getattr(self, name)
        for table, stats in self.tables.items():
            for name in cache_ops.COUNTERS:
                yield f"{table}.{name}", getattr(stats, name)


assert tuple(f.name for f in fields(CacheStats))[:-1] == cache_ops.COUNTERS


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


@dataclass(frozen=True)
class CacheLayout:
    """What a cache holds: rows of `tables` in `sets` sets of 32, with their optimizer states.

    `tables` are all tables of the module, by ascending linear row, in the format of `features`;
    those with a cache_stride are cached. `names` are theirs.
    """

    sets: int
    policy: CachePolicy
    tables: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    weights: torch.dtype
    states: tuple[State, ...]
    state_dtype: torch.dtype

    @property
    def stride(self) -> int:
        """Elements between rows of the cache."""
        return max(table[7] for table in self.tables)

    @property
    def cached_rows(self) -> int:
        """Rows of all tables that are cached."""
        return sum(table[2] for table in self.tables if table[7])

    def state_dtypes(self) -> list[torch.dtype]:
        """Of each state; those with one number a row are float32."""
        return [torch.float32 if state.per_row else self.state_dtype for state in self.states]

    @property
    def bytes_per_set(self) -> int:
        """Of rows, states, tags and stamps."""
        slot = self.stride * self.weights.itemsize + 16
        for state, dtype in zip(self.states, self.state_dtypes(), strict=True):
            slot += dtype.itemsize * (1 if state.per_row else self.stride)
        return slot * cache_ops.WAYS


class RowCache(nn.Module):
    """Rows of the cached tables of a module, with their optimizer state, in fast memory.

    Holds no parameters, and nothing of it is saved: what it holds of a table belongs to the table,
    and is written back by `flush`.

    A batch is in flight from `enter` to `leave`. What it or a later batch uses is not evicted
    meanwhile, so a batch that never leaves ends up with a cache that takes nothing in. Batches are
    numbered on the device, so that nothing here waits for it and a captured graph may replay
    `enter`, `plan` and `leave`. Nothing here is locked: the module that has it holds its lock.
    """

    weights: Tensor
    tags: Tensor
    stamps: Tensor
    counts: Tensor | None
    counters: Tensor
    clock: Tensor
    table_places: Tensor

    def __init__(self, layout: CacheLayout, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.layout = layout
        device = torch.empty(0, device=device).device
        shape = (layout.sets, cache_ops.WAYS)
        slots = layout.sets * cache_ops.WAYS
        lfu = layout.policy is CachePolicy.LFU
        tensors = {
            "weights": ops.empty_table((slots * layout.stride,), layout.weights, device),
            "tags": ops.empty_table(shape, torch.int64, device),
            "stamps": ops.empty_table(shape, torch.int64, device),
            "counts": (
                torch.empty(layout.cached_rows, dtype=torch.int32, device=device) if lfu else None
            ),
            "counters": torch.empty(
                (len(layout.tables) + 1, len(cache_ops.COUNTERS)), dtype=torch.int64, device=device
            ),
            "clock": torch.empty(2, dtype=torch.int64, device=device),
            "table_places": torch.empty((len(layout.tables), 8), dtype=torch.int64, device=device),
        }
        for state, dtype in zip(layout.states, layout.state_dtypes(), strict=True):
            size = slots if state.per_row else slots * layout.stride
            tensors[f"state_{state.name}"] = ops.empty_table((size,), dtype, device)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._start()

    @classmethod
    def of(
        cls,
        tables: TableLayout,
        names: Sequence[str],
        states: Sequence[State],
        options: Cache,
        precision: Precision,
        device: torch.device | str | None = None,
    ) -> "RowCache":
        """The cache that `options` asks for; `names` of the tables in the order they were given."""
        device = torch.empty(0, device=device).device
        order = sorted(
            range(len(tables.places)),
            key=lambda t: (tables.places[t].row_base, tables.places[t].rows),
        )
        layout = CacheLayout(
            sets=1,
            policy=options.policy,
            tables=tuple(tables.places[t].feature(0) for t in order),
            names=tuple(names[t] for t in order),
            weights=precision.weights if options.dtype is None else options.dtype,
            states=tuple(states),
            state_dtype=precision.states,
        )
        sets = number_of_sets(options, layout, device)
        return cls(CacheLayout(**{**vars(layout), "sets": sets}), device)

    def _start(self) -> None:
        """Fill the tensors of a cache that was made, or moved off `meta`."""
        self._now, self._in_flight, self._oldest = 0, set[int](), 1
        places = torch.tensor(self.layout.tables, dtype=torch.int64).view(-1, 8)
        self.table_places.copy_(places)
        self.clock.copy_(torch.tensor([0, 1]))
        self.reset()
        self.reset_stats()

    @property
    def states(self) -> list[Tensor]:
        """The optimizer states of the cached rows, in the order of the optimizer."""
        return [getattr(self, f"state_{state.name}") for state in self.layout.states]

    def enter(self) -> int:
        """A new batch is in flight; its ticket is for `leave`. What is planned next is for it."""
        self._now += 1
        self._in_flight.add(self._now)
        self.clock[0].add_(1)
        return self._now

    def leave(self, ticket: int) -> None:
        """The batch is done with its rows: they may be evicted as far as it is concerned."""
        self._in_flight.discard(ticket)
        oldest = min(self._in_flight, default=self._now + 1)
        # By how much, and not to what: replayed from a captured graph it is as true.
        self.clock[1].add_(oldest - self._oldest)
        self._oldest = oldest

    def plan(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Place the rows of the batch that entered last: `row_slots`, `evicted`, see the op.

        `move` must follow before anything else looks at the cache.
        """
        return cache_ops.plan_(
            self.tags,
            self.stamps,
            self.counts,
            self.counters,
            self.clock,
            self.table_places,
            groups.rows,
            groups.segments,
            groups.count,
            codes.CACHE_POLICY[self.layout.policy.value],
        )

    def undo(self, row_slots: Tensor, evicted: Tensor) -> None:
        """Take back what `plan` decided, where nothing was moved yet: slots hold what they held."""
        taken = evicted != cache_ops.NOTHING_MOVES
        self.tags.view(-1)[row_slots[taken].long()] = evicted[taken]

    def move(self, tiers: Tiers, groups: Groups, row_slots: Tensor, evicted: Tensor) -> None:
        """Do what `plan` said: write rows back that gave way, and fetch those that came."""
        cache_ops.move_(
            tiers.weights,
            tiers.states,
            tiers.hyper,
            self.table_places,
            groups.rows,
            groups.count,
            row_slots,
            evicted,
        )

    def find(self, groups: Groups) -> Tensor:
        """Int32 `[L]`: where the rows of a batch are now, as `row_slots` of `plan`."""
        return cache_ops.locate(self.tags, self.table_places, groups.rows, groups.count)

    def slots_of_lookups(self, groups: Groups, row_slots: Tensor) -> Tensor:
        """Int32 `[L]`: the slot of every lookup, -1 for none."""
        return cache_ops.lookup_slots(row_slots, groups.segments, groups.lookups, groups.count)

    def flush(self, tiers: Tiers) -> None:
        """Write all rows and states back to their tables; they stay in the cache."""
        cache_ops.flush_(tiers.weights, tiers.states, tiers.hyper, self.table_places, self.tags)

    def reset(self) -> None:
        """Empty the cache, and forget which batches are in flight and how often rows were used."""
        self.tags.fill_(cache_ops.EMPTY)
        self.stamps.fill_(cache_ops.EMPTY)
        if self.counts is not None:
            self.counts.zero_()
        self._in_flight.clear()
        self.leave(0)

    def stats(self) -> CacheStats:
        """What was counted (reads the device)."""
        *tables, whole = (
            dict(zip(cache_ops.COUNTERS, line, strict=True)) for line in self.counters.tolist()
        )
        places = zip(self.layout.names, self.layout.tables, tables, strict=True)
        cached = {name: CacheStats(**line) for name, place, line in places if place[7]}
        return CacheStats(**whole, tables=cached)

    def reset_stats(self) -> None:
        """Count from zero."""
        self.counters.zero_()

    def nbytes(self) -> int:
        """Bytes of rows, states, tags and counters."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def extra_repr(self) -> str:
        """Size and policy."""
        slots = self.layout.sets * cache_ops.WAYS
        return f"{slots} slots in {self.layout.sets} sets, {self.layout.policy.value}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing of it is saved; keys that begin like its name are of a table of that name."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unborn = self.tags.is_meta
        super()._apply(ops.keep_dtype(fn), recurse)
        if unborn and not self.tags.is_meta:
            self._start()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Batches in flight belong to the original; nothing would let them go here.
        self._in_flight = set()
        self.leave(0)


def number_of_sets(options: Cache, layout: CacheLayout, device: torch.device) -> int:
    """As many as asked for; on a GPU no more than fit into its free memory less reserved_bytes."""
    sets = options.sets or math.ceil(options.load_factor * layout.cached_rows / cache_ops.WAYS)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - options.reserved_bytes
        sets = min(sets, free // layout.bytes_per_set)
    return min(max(sets, 1), _MOST_SETS)
