"""The software cache in front of tables in slow memory.

`Prefetcher` is the cache of a module with its batches in flight; `RowCache` holds the cached rows
and the counters. A batch is planned and fetched by `prefetch` or `take`, is in flight until its
update (`InFlight`, the hooks of its autograd graph), and is then released. `emblib.ops.cache`
defines the ops on these tensors.

The rows of a batch in flight are not evicted. Their slots are remembered, and looked up again if
the cache has changed since: a row without a way may have got one for another batch, and must then
be read and updated there.

The lock of the module is held from the plan of a batch until its lookup has read the rows, and
around its update: a plan is true of the cache only once the rows have moved, and a lookup reads
slots that the next plan may assign to other rows.

On a GPU a prefetch may run on another stream than the training step. It waits for the last released
update, and users of its result wait for it.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import FeatureColumn
from emblib.ops import autograd, codes, tbe
from emblib.ops import cache as cache_ops
from emblib.ops.autograd import Tiers
from emblib.ops.tbe import Groups
from emblib.optim import State
from emblib.specs import CacheConfig, CachePolicy, Precision
from emblib.tables.locks import ModuleLock
from emblib.tables.memory import Memory, TableLayout
from emblib.tables.parameters import loses_values

_MAX_SETS = (2**31 - 1) // cache_ops.WAYS  # slots are int32


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since construction or the last reset.

    A batch counts when its rows are fetched: once, by `prefetch` or else by `forward`; a batch that
    is prefetched in several passes counts once per pass. Skipped lookups (index -1) and those of
    tables without a cache do not count. The names in brackets are those of FBGEMM's
    `uvm_cache_stats`.

    Attributes:
        calls: batches [num_calls]; of a table: batches in which it was looked up.
        lookups: lookups of cached tables [num_requested_indices].
        unique: distinct rows of a batch, summed over batches [num_unique_indices].
        unique_misses: distinct rows that were not in the cache when their batch was planned
            [num_unique_misses]. All but the conflicting ones were then fetched.
        conflict_unique_misses: distinct rows that were not in the cache and got no way, because
            their set was full of rows in flight or, with LFU, of more frequently used rows
            [num_conflict_unique_misses]. They are read and updated in place.
        conflict_misses: lookups of such rows [num_conflict_misses].
        lookup_misses: lookups of all rows that were not in the cache when their batch was planned.
        write_backs: evicted rows; of a table: its own evicted rows.
        tables: the same counters per cached table, by name; empty in those.
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
        """Return the fraction of lookups that hit the cache; NaN without lookups."""
        return _share(self.lookups - self.lookup_misses, self.lookups)

    @property
    def unique_hit_rate(self) -> float:
        """Return the fraction of distinct rows that hit the cache; NaN without lookups."""
        return _share(self.unique - self.unique_misses, self.unique)

    def events(self) -> Iterator[tuple[str, int]]:
        """Yield the counters as `(counter, value)`, then as `(table.counter, value)`."""
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
    """Sizes of a cache: rows of `tables` in `sets` sets of 32, with their optimizer states.

    `tables` are all tables of the module, by ascending linear row, in the format of `features`, and
    `names` their names; those with a cache_stride are cached.
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
        """Return the number of elements between rows of the cache."""
        return max(table[FeatureColumn.CACHE_STRIDE] for table in self.tables)

    @property
    def cached_rows(self) -> int:
        """Return the number of rows of all cached tables."""
        return sum(
            table[FeatureColumn.ROWS] for table in self.tables if table[FeatureColumn.CACHE_STRIDE]
        )

    def state_dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each state; states of one number per row are float32."""
        return [torch.float32 if state.per_row else self.state_dtype for state in self.states]

    @property
    def bytes_per_set(self) -> int:
        """Return the bytes of rows, states, tags and stamps per set."""
        slot = self.stride * self.weights.itemsize + 16
        for state, dtype in zip(self.states, self.state_dtypes(), strict=True):
            slot += dtype.itemsize * (1 if state.per_row else self.stride)
        return slot * cache_ops.WAYS


class RowCache(nn.Module):
    """Rows of the cached tables of a module, with their optimizer state, in fast memory.

    The cache has no parameters and is not saved: its rows belong to their tables, and `flush`
    writes them back.

    A batch is in flight from `enter` to `leave`. Rows that it or a later batch uses are not evicted
    in between, so a batch that never leaves eventually stops the cache from admitting rows. Batches
    are numbered on the device, so that nothing here waits for the device and a captured graph may
    replay `enter`, `plan` and `leave`. The caller holds the lock of the module.
    """

    weights: Tensor
    tags: Tensor
    stamps: Tensor
    counts: Tensor
    counters: Tensor
    clock: Tensor
    table_features: Tensor

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
            "counts": torch.empty(
                layout.cached_rows if lfu else 0, dtype=torch.int32, device=device
            ),
            "counters": torch.empty(
                (len(layout.tables) + 1, len(cache_ops.COUNTERS)), dtype=torch.int64, device=device
            ),
            "clock": torch.empty(2, dtype=torch.int64, device=device),
            "table_features": torch.empty(
                (len(layout.tables), len(FeatureColumn)), dtype=torch.int64, device=device
            ),
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
        options: CacheConfig,
        precision: Precision,
        device: torch.device | str | None = None,
    ) -> "RowCache":
        """Make a cache by `options`; `names` are those of the tables, in the given order."""
        device = torch.empty(0, device=device).device
        order = sorted(
            range(len(tables.offsets)),
            key=lambda t: (tables.offsets[t].row_base, tables.offsets[t].rows),
        )
        layout = CacheLayout(
            sets=1,
            policy=options.policy,
            tables=tuple(tables.offsets[t].feature(0) for t in order),
            names=tuple(names[t] for t in order),
            weights=precision.weights if options.dtype is None else options.dtype,
            states=tuple(states),
            state_dtype=precision.states,
        )
        sets = number_of_sets(options, layout, device)
        return cls(CacheLayout(**{**vars(layout), "sets": sets}), device)

    def _start(self) -> None:
        """Initialise the tensors of a new cache, or of one moved off `meta`."""
        self._now, self._in_flight, self._oldest = 0, set[int](), 1
        features = torch.tensor(self.layout.tables, dtype=torch.int64).view(-1, len(FeatureColumn))
        self.table_features.copy_(features)
        self.clock.copy_(torch.tensor([0, 1]))
        self.reset()
        self.reset_stats()

    @property
    def states(self) -> list[Tensor]:
        """Return the optimizer states of the cached rows, in the order of the optimizer."""
        return [getattr(self, f"state_{state.name}") for state in self.layout.states]

    def enter(self) -> int:
        """Start a batch and return its ticket for `leave`; the next plan is for this batch."""
        self._now += 1
        self._in_flight.add(self._now)
        self.clock[0].add_(1)
        return self._now

    def leave(self, ticket: int) -> None:
        """End a batch: it no longer protects its rows from eviction."""
        self._in_flight.discard(ticket)
        oldest = min(self._in_flight, default=self._now + 1)
        # A difference instead of a value: it stays valid when a captured graph replays it.
        self.clock[1].add_(oldest - self._oldest)
        self._oldest = oldest

    def plan(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Assign slots to the rows of the batch that entered last: `row_slots`, `evicted`.

        `move` must follow before any other access to the cache.
        """
        return cache_ops.plan_(
            self.tags,
            self.stamps,
            self.counts,
            self.counters,
            self.clock,
            self.table_features,
            groups.rows,
            groups.segments,
            groups.count,
            codes.CACHE_POLICY[self.layout.policy.value],
        )

    def undo(self, row_slots: Tensor, evicted: Tensor) -> None:
        """Undo a `plan` before any row has moved: the slots keep their old rows."""
        taken = evicted != cache_ops.NOTHING_MOVES
        self.tags.view(-1)[row_slots[taken].long()] = evicted[taken]

    def move(self, tiers: Tiers, groups: Groups, row_slots: Tensor, evicted: Tensor) -> None:
        """Execute a plan: write evicted rows back and fetch the missing ones."""
        cache_ops.move_(
            tiers.weights,
            tiers.states,
            tiers.hyperparams,
            self.table_features,
            groups.rows,
            groups.count,
            row_slots,
            evicted,
        )

    def find(self, groups: Groups) -> Tensor:
        """Return the current slot of each distinct row, int32 `[L]`, as `row_slots` of `plan`."""
        return cache_ops.locate(self.tags, self.table_features, groups.rows, groups.count)

    def slots_of_lookups(self, groups: Groups, row_slots: Tensor) -> Tensor:
        """Return the slot of every lookup, int32 `[L]`, -1 for none."""
        return cache_ops.lookup_slots(row_slots, groups.segments, groups.lookups, groups.count)

    def flush(self, tiers: Tiers) -> None:
        """Write all rows and states back to their tables; they stay in the cache."""
        cache_ops.flush_(
            tiers.weights, tiers.states, tiers.hyperparams, self.table_features, self.tags
        )

    def reset(self) -> None:
        """Empty the cache, and forget batches in flight and usage counts."""
        self.tags.fill_(cache_ops.EMPTY)
        self.stamps.fill_(cache_ops.EMPTY)
        self.counts.zero_()
        self._in_flight.clear()
        self.leave(0)

    def stats(self) -> CacheStats:
        """Return the counters (reads the device)."""
        *tables, whole = (
            dict(zip(cache_ops.COUNTERS, line, strict=True)) for line in self.counters.tolist()
        )
        lines = zip(self.layout.names, self.layout.tables, tables, strict=True)
        cached = {
            name: CacheStats(**line)
            for name, table, line in lines
            if table[FeatureColumn.CACHE_STRIDE]
        }
        return CacheStats(**whole, tables=cached)

    def reset_stats(self) -> None:
        """Reset all counters to zero."""
        self.counters.zero_()

    def nbytes(self) -> int:
        """Return the bytes of rows, states, tags and counters."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def extra_repr(self) -> str:
        """Describe size and policy."""
        slots = self.layout.sets * cache_ops.WAYS
        return f"{slots} slots in {self.layout.sets} sets, {self.layout.policy.value}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load nothing: keys with this prefix belong to a table of the same name."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        is_lost = self.tags.is_meta or loses_values(fn)
        super()._apply(ops.keep_dtype(fn), recurse)
        if is_lost and not self.tags.is_meta:
            self._start()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Batches in flight belong to the original; nothing would release them here.
        self._in_flight = set()
        self.leave(0)


def number_of_sets(options: CacheConfig, layout: CacheLayout, device: torch.device) -> int:
    """Return the requested number of sets, on a GPU at most what its free memory takes."""
    sets = options.sets or math.ceil(options.load_factor * layout.cached_rows / cache_ops.WAYS)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - options.reserved_bytes
        sets = min(sets, free // layout.bytes_per_set)
    return min(max(sets, 1), _MAX_SETS)


class BatchId(NamedTuple):
    """The tensors by which `forward` recognises a prefetched batch."""

    indices: Tensor
    offsets: Tensor

    def versions(self) -> tuple[int, int]:
        """Return how often each tensor was written to."""
        return self.indices._version, self.offsets._version

    def is_(self, other: "BatchId") -> bool:
        """Return whether both are the same tensor objects."""
        return self.indices is other.indices and self.offsets is other.offsets

    def fits(self, other: "BatchId") -> bool:
        """Return whether both may be one batch: equal, or, on a GPU, asserted there to be equal."""
        for tensor, other_tensor in zip(self, other, strict=True):
            if tensor is other_tensor:
                continue
            if tensor.shape != other_tensor.shape or tensor.dtype != other_tensor.dtype:
                return False
            if tensor.is_cuda:
                torch._assert_async((tensor == other_tensor).all(), _ORDER)
            elif not torch.equal(tensor, other_tensor):
                return False
        return True


_ORDER = "forward must get the batches in the order they were prefetched"


class InFlight:
    """A batch from prefetch to the end of its update; the `hooks` of its autograd graph."""

    def __init__(self, owner: "Prefetcher") -> None:
        self.owner = owner
        self.lock = owner.lock
        self.stream: torch.cuda.Stream | None = None  # of the last lookup
        self.ticket: int | None = None  # `__del__` also runs if `enter` raises
        self.ticket = owner.cache.enter()
        self.version = -1
        self._locations: autograd.RowLocations | None = None

    def fill(self, groups: tbe.Groups, row_slots: Tensor) -> None:
        """Store the current slots of the rows of the batch."""
        self._locations = autograd.RowLocations(groups, row_slots)
        self.version = self.owner.version

    def locate(self) -> autograd.RowLocations:
        """Locate the rows of the batch in the cache as it is now, and the slots of all lookups."""
        owner, locations = self.owner, self._locations
        assert locations is not None
        owner.wait_for_prefetch()
        if self.version != owner.version:
            locations = autograd.RowLocations(locations.groups, owner.cache.find(locations.groups))
            owner.used()
            self.version = owner.version
        if locations.slots is None:
            assert locations.row_slots is not None
            slots = owner.cache.slots_of_lookups(locations.groups, locations.row_slots)
            locations = locations._replace(slots=slots)
        self._locations = locations
        self.stream = _keep_on_this_stream(locations)
        return locations

    def before_update(self) -> autograd.RowLocations:
        """Return the rows; journal those that the update writes to the disk tier itself."""
        locations = self.locate()
        self.owner.protect_conflicts(locations)
        return locations

    def after_update(self) -> None:
        """Release the rows for eviction."""
        self.leave()
        self.owner.used()

    def leave(self) -> None:
        """Release the rows for eviction; repeated calls do nothing."""
        if self.ticket is not None:
            self.owner.cache.leave(self.ticket)
            self.ticket = None

    def __del__(self) -> None:
        """Release the rows where a graph is dropped without a backward."""
        if self.ticket is not None:
            self.owner.drop(self.ticket, self.stream)


class Prefetcher:
    """The cache of a module and its batches in flight, in the order they were prefetched.

    `lock` is that of the module. A caller of `take` holds it until the lookup has read the rows;
    the other methods enter it themselves.
    """

    def __init__(
        self, memory: Memory, cache: RowCache, options: CacheConfig, lock: ModuleLock
    ) -> None:
        self.memory = memory
        self.cache = cache
        self.options = options
        self.lock = lock
        self.version = 0  # of the contents of the cache
        self._queue: deque[tuple[BatchId, tuple[int, int], InFlight]] = deque()
        self._dropped: deque[tuple[int, torch.cuda.Stream | None]] = (
            deque()
        )  # graphs, to be released
        self._filled: torch.cuda.Event | None = None  # after the last prefetch
        self._used: torch.cuda.Event | None = None  # after the last find or update

    def __getstate__(self) -> dict[str, object]:
        # Batches in flight belong to the original; a copy fetches rows when it gets the batches.
        none: dict[str, object] = dict.fromkeys(("_filled", "_used"))
        return {**self.__dict__, **none, "_queue": deque(), "_dropped": deque()}

    def prefetch(self, batch: autograd.Lookup, tiers: autograd.Tiers, batch_id: BatchId) -> None:
        """Fetch the rows of a batch; `batch_id` has the tensors that forward will get."""
        with self.lock:
            self._queue.append((batch_id, batch_id.versions(), self._fill(batch, tiers)))

    def take(
        self, batch: autograd.Lookup, tiers: autograd.Tiers, batch_id: BatchId
    ) -> autograd.Lookup:
        """Return the batch with the slots of its lookups; its `hooks` keep it in flight.

        Without gradients, a batch that is not the next prefetched one is looked up out of order.
        """
        is_extra = (
            not torch.is_grad_enabled() and self._queue and not batch_id.is_(self._queue[0][0])
        )
        if not self._queue or is_extra:
            flight = self._fill(batch, tiers)
        else:
            expected, versions, flight = self._queue[0]
            if expected.versions() != versions:
                raise RuntimeError(
                    "the next of the prefetched batches was written to since; use separate tensors "
                    "for every batch in flight"
                )
            if not expected.fits(batch_id):
                raise RuntimeError(
                    f"{_ORDER}: the next of {len(self._queue)} has {expected.indices.numel()} "
                    f"lookups, got another one of {batch_id.indices.numel()}; pass that one, or "
                    "flush() and then reset_cache_states() to forget them"
                )
            self._queue.popleft()
        return batch._replace(slots=flight.locate().slots, hooks=flight)

    def _fill(self, batch: autograd.Lookup, tiers: autograd.Tiers) -> InFlight:
        if self.memory.disk is not None:
            self.memory.disk.protect(_NO_ROWS)  # raises in a forked process, before rows move
        self._release_dropped()
        # Fetches run one after the other, also those of batches on different streams.
        self.wait_for_prefetch()
        if self._used is not None:
            _wait_for(self._used)
        flight = InFlight(self)
        length, passes = batch.indices.numel(), self.options.passes
        if passes is None or length < passes.min_lookups:
            groups = autograd.groups_of(batch)
            flight.fill(groups, self._fetch(groups, tiers))
        else:
            size = -(-length // passes.passes)
            for start in range(0, length, size):
                self._fetch(autograd.groups_of(_part(batch, start, start + size)), tiers)
            groups = autograd.groups_of(batch)
            flight.fill(groups, self.cache.find(groups))
        if batch.indices.is_cuda:
            self._filled = _event(batch.indices.device)
        return flight

    def _fetch(self, groups: tbe.Groups, tiers: autograd.Tiers) -> Tensor:
        if self.memory.disk is not None:
            self.memory.disk.touch(self._disk_rows(groups))
        row_slots, evicted = self.cache.plan(groups)
        if self.memory.disk is not None:
            first = self.memory.layout.first_disk_row
            try:
                self.memory.disk.protect(evicted[evicted >= first] - first)
            except BaseException:
                self.cache.undo(row_slots, evicted)
                raise
        self.cache.move(tiers, groups, row_slots, evicted)
        self.version += 1
        return row_slots

    def locate(self, groups: tbe.Groups) -> autograd.RowLocations:
        """Locate rows for an update: in the cache where they are in it, else in their tables."""
        self.wait_for_prefetch()
        if self.memory.disk is not None:
            self.memory.disk.touch(self._disk_rows(groups))
        locations = autograd.RowLocations(groups, self.cache.find(groups))
        self.protect_conflicts(locations)
        return locations

    def _disk_rows(self, groups: tbe.Groups) -> Tensor:
        """Return the rows of a batch on disk, counted from the first row there."""
        rows = groups.rows[: int(groups.count)]
        first = self.memory.layout.first_disk_row
        return rows[rows >= first] - first

    def wait_for_prefetch(self) -> None:
        """Make the current stream wait for what prefetches on other streams have written."""
        if self._filled is not None:
            _wait_for(self._filled)

    def used(self) -> None:
        """Record that a find, an update or a flush was enqueued, for the next prefetch to wait.

        Earlier ones, which may be on other streams, are waited for as well.
        """
        if self.cache.weights.is_cuda:
            if self._used is not None:
                _wait_for(self._used)
            self._used = _event(self.cache.weights.device)

    def drop(self, ticket: int, stream: torch.cuda.Stream | None) -> None:
        """Release a batch whose graph was dropped; its last lookup was on `stream`.

        Finalisers call this in any thread and between any two steps: if the lock is not free, the
        next batch releases it.
        """
        self._dropped.append((ticket, stream))
        if self.lock.enter_if_free():
            try:
                self._release_dropped()
            finally:
                self.lock.__exit__()

    def _release_dropped(self) -> None:
        while self._dropped:
            ticket, stream = self._dropped.popleft()
            if stream is not None and not torch.cuda.is_current_stream_capturing():
                _wait_for(stream.record_event())  # the looked-up rows may still be read
            self.used()
            self.cache.leave(ticket)

    def protect_conflicts(self, locations: autograd.RowLocations) -> None:
        """Journal the rows of a batch that are on disk but not in the cache."""
        if self.memory.disk is None:
            return
        assert locations.row_slots is not None
        unique, first = int(locations.groups.count), self.memory.layout.first_disk_row
        rows, slots = locations.groups.rows[:unique], locations.row_slots[:unique]
        in_place = (rows >= first) & (slots < 0)
        self.memory.disk.protect(rows[in_place] - first)

    def flush(self, tiers: autograd.Tiers) -> None:
        """Write all cached rows back, and commit the disk tier; prefetched batches stay valid."""
        with self.lock:
            self.wait_for_prefetch()
            disk, first = self.memory.disk, self.memory.layout.first_disk_row
            if disk is not None:
                rows = self.cache.tags[self.cache.tags >= first]
                disk.protect(rows - first)
            self.cache.flush(tiers)
            self.used()
            if disk is not None:
                disk.commit(tiers.hyperparams.tolist())

    def reset(self) -> None:
        """Empty the cache and forget prefetched batches; nothing is written back."""
        with self.lock:
            self._queue.clear()
            self.wait_for_prefetch()
            self.cache.reset()
            self.used()
            self.version += 1


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _keep_on_this_stream(locations: autograd.RowLocations) -> torch.cuda.Stream | None:
    """Keep the tensors of a prefetch on another stream from being reused while this one reads."""
    if not locations.groups.rows.is_cuda:
        return None
    stream = torch.cuda.current_stream(locations.groups.rows.device)
    for tensor in (*locations.groups, locations.row_slots, locations.slots):
        if tensor is not None:
            tensor.record_stream(stream)
    return stream


def _part(batch: autograd.Lookup, start: int, end: int) -> autograd.Lookup:
    """Return lookups [start, end) of a batch."""
    end = min(end, batch.indices.numel())
    offsets = batch.offsets.clamp(start, end) - start
    return batch._replace(indices=batch.indices[start:end], offsets=offsets)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Record the current stream of a device, for other streams to wait for.

    Returns None while a CUDA graph is captured: its events mean nothing outside, and the code that
    captures several streams has to join them.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).record_event()


def _wait_for(event: torch.cuda.Event) -> None:
    """Make the current stream wait; a capture begins after all earlier work anyway."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(event.device).wait_event(event)
