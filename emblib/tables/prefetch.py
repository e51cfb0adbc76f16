"""The way of a batch through the cache: prefetched, looked up, updated, and then let go.

A batch in flight keeps its rows from being evicted. What it found in the cache is remembered, and
looked up again if the cache has changed since: a row that found no place may have got one for
another batch, and must then be read and updated there.

The lock of the module is held from the plan of a batch until its lookup has read the rows, and
around its update: what a plan decides is true of the cache only once the rows have moved, and a
lookup reads slots that the next plan may give to other rows.

On a GPU a prefetch may run on another stream than the training step. It waits for the last update
that was let go, and whoever uses its result waits for it.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops import lookups, tbe
from emblib.specs import Cache
from emblib.tables.locks import ModuleLock
from emblib.tables.memory import Memory
from emblib.tables.row_cache import RowCache


class Given(NamedTuple):
    """A batch as the caller knows it."""

    indices: Tensor
    offsets: Tensor

    def versions(self) -> tuple[int, int]:
        """How often each tensor was written to."""
        return self.indices._version, self.offsets._version

    def is_(self, other: "Given") -> bool:
        """Whether both are the same tensors."""
        return self.indices is other.indices and self.offsets is other.offsets

    def fits(self, other: "Given") -> bool:
        """Whether both may be one batch: equal, or, on a GPU, asserted there to be equal."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is theirs:
                continue
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return False
            if mine.is_cuda:
                torch._assert_async((mine == theirs).all(), _ORDER)
            elif not torch.equal(mine, theirs):
                return False
        return True


_ORDER = "forward must get the batches in the order they were prefetched"


class InFlight:
    """A batch from prefetch to the end of its update; the `session` of its autograd graph."""

    def __init__(self, owner: "Prefetcher") -> None:
        self.owner = owner
        self.lock = owner.lock
        self.stream: torch.cuda.Stream | None = None  # of its last lookup
        self.ticket: int | None = None  # `__del__` runs also where `enter` raises
        self.ticket = owner.cache.enter()
        self.version = -1
        self._places: lookups.RowPlaces | None = None

    def fill(self, groups: tbe.Groups, row_slots: Tensor) -> None:
        """Remember where the rows of the batch are in the cache as it is now."""
        self._places = lookups.RowPlaces(groups, row_slots)
        self.version = self.owner.version

    def places(self) -> lookups.RowPlaces:
        """Where the rows are in the cache as it is now, and the slots of all lookups."""
        owner, places = self.owner, self._places
        assert places is not None
        owner.wait_for_prefetch()
        if self.version != owner.version:
            places = lookups.RowPlaces(places.groups, owner.cache.find(places.groups))
            owner.used()
            self.version = owner.version
        if places.slots is None:
            assert places.row_slots is not None
            slots = owner.cache.slots_of_lookups(places.groups, places.row_slots)
            places = places._replace(slots=slots)
        self._places = places
        self.stream = _keep_on_this_stream(places)
        return places

    def before_update(self) -> lookups.RowPlaces:
        """The rows; those that the update writes to the disk itself are protected there first."""
        places = self.places()
        self.owner.protect_conflicts(places)
        return places

    def after_update(self) -> None:
        """The rows may be evicted from now on."""
        self.leave()
        self.owner.used()

    def leave(self) -> None:
        """Let the rows go."""
        if self.ticket is not None:
            self.owner.cache.leave(self.ticket)
            self.ticket = None

    def __del__(self) -> None:
        """A graph was dropped without a backward."""
        if self.ticket is not None:
            self.owner.drop(self.ticket, self.stream)


class Prefetcher:
    """The cache of a module and the batches on their way, in the order they were prefetched.

    `lock` is that of the module. Who calls `take` holds it until the lookup has read the rows; the
    other calls enter it themselves.
    """

    def __init__(self, memory: Memory, cache: RowCache, options: Cache, lock: ModuleLock) -> None:
        self.memory = memory
        self.cache = cache
        self.options = options
        self.lock = lock
        self.version = 0  # of what the cache holds
        self._queue: deque[tuple[Given, tuple[int, int], InFlight]] = deque()
        self._dropped: deque[tuple[int, torch.cuda.Stream | None]] = deque()  # graphs, to let go
        self._filled: torch.cuda.Event | None = None  # after the last prefetch
        self._used: torch.cuda.Event | None = None  # after the last find or update

    def __getstate__(self) -> dict[str, object]:
        # Batches on their way belong to the original; a copy brings theirs in when it gets them.
        none: dict[str, object] = dict.fromkeys(("_filled", "_used"))
        return {**self.__dict__, **none, "_queue": deque(), "_dropped": deque()}

    def prefetch(self, batch: lookups.Lookup, tiers: lookups.Tiers, given: Given) -> None:
        """Bring in the rows of a batch; `given` is what the caller will pass to forward."""
        with self.lock:
            self._queue.append((given, given.versions(), self._fill(batch, tiers)))

    def take(self, batch: lookups.Lookup, tiers: lookups.Tiers, given: Given) -> lookups.Lookup:
        """The batch with the slots of its lookups; its `session` keeps it in flight.

        Without gradients, a batch that is not the next of those prefetched is one beside them.
        """
        beside = not torch.is_grad_enabled() and self._queue and not given.is_(self._queue[0][0])
        if not self._queue or beside:
            flight = self._fill(batch, tiers)
        else:
            expected, versions, flight = self._queue[0]
            if expected.versions() != versions:
                raise RuntimeError(
                    "the next of the prefetched batches was written to since; give every batch "
                    "that is on its way tensors of its own"
                )
            if not expected.fits(given):
                raise RuntimeError(
                    f"{_ORDER}: the next of {len(self._queue)} has {expected.indices.numel()} "
                    f"lookups, got another one of {given.indices.numel()}; pass that one, or "
                    "flush() and then reset_cache_states() to forget them"
                )
            self._queue.popleft()
        return batch._replace(slots=flight.places().slots, session=flight)

    def _fill(self, batch: lookups.Lookup, tiers: lookups.Tiers) -> InFlight:
        if self.memory.disk is not None:
            self.memory.disk.protect(_NO_ROWS)  # refused in a forked process, before rows move
        self._let_go_of_dropped()
        # One after the other, also where one batch is brought in beside those of another stream.
        self.wait_for_prefetch()
        if self._used is not None:
            _wait_for(self._used)
        flight = InFlight(self)
        length, passes = batch.indices.numel(), self.options.passes
        if passes is None or length < passes.min_lookups:
            groups = lookups.groups_of(batch)
            flight.fill(groups, self._bring_in(groups, tiers))
        else:
            size = -(-length // passes.passes)
            for start in range(0, length, size):
                self._bring_in(lookups.groups_of(_part(batch, start, start + size)), tiers)
            groups = lookups.groups_of(batch)
            flight.fill(groups, self.cache.find(groups))
        if batch.indices.is_cuda:
            self._filled = _event(batch.indices.device)
        return flight

    def _bring_in(self, groups: tbe.Groups, tiers: lookups.Tiers) -> Tensor:
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

    def _disk_rows(self, groups: tbe.Groups) -> Tensor:
        """The rows of a batch that are on disk, counted from the first one there."""
        rows = groups.rows[: int(groups.count)]
        first = self.memory.layout.first_disk_row
        return rows[rows >= first] - first

    def wait_for_prefetch(self) -> None:
        """Make the current stream wait for what prefetches on other streams have written."""
        if self._filled is not None:
            _wait_for(self._filled)

    def used(self) -> None:
        """Called after a find, an update or a flush was enqueued: the next prefetch waits for it.

        And for all before it, which may have been on another stream.
        """
        if self.cache.weights.is_cuda:
            if self._used is not None:
                _wait_for(self._used)
            self._used = _event(self.cache.weights.device)

    def drop(self, ticket: int, stream: torch.cuda.Stream | None) -> None:
        """Let a batch go whose graph was dropped; its last lookup was on `stream`.

        Called by finalisers, in any thread and in the middle of anything: where the lock is not
        free the next batch does it.
        """
        self._dropped.append((ticket, stream))
        if self.lock.enter_if_free():
            try:
                self._let_go_of_dropped()
            finally:
                self.lock.__exit__()

    def _let_go_of_dropped(self) -> None:
        while self._dropped:
            ticket, stream = self._dropped.popleft()
            if stream is not None and not torch.cuda.is_current_stream_capturing():
                _wait_for(stream.record_event())  # what was looked up may still be read
            self.used()
            self.cache.leave(ticket)

    def protect_conflicts(self, places: lookups.RowPlaces) -> None:
        """Journal the rows of a batch that are on disk and not in the cache."""
        if self.memory.disk is None:
            return
        assert places.row_slots is not None
        unique, first = int(places.groups.count), self.memory.layout.first_disk_row
        rows, slots = places.groups.rows[:unique], places.row_slots[:unique]
        in_place = (rows >= first) & (slots < 0)
        self.memory.disk.protect(rows[in_place] - first)

    def flush(self, tiers: lookups.Tiers) -> None:
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
                disk.commit(tiers.hyper.tolist())

    def reset(self) -> None:
        """Empty the cache and forget prefetched batches; nothing is written back."""
        with self.lock:
            self._queue.clear()
            self.wait_for_prefetch()
            self.cache.reset()
            self.used()
            self.version += 1


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _keep_on_this_stream(places: lookups.RowPlaces) -> torch.cuda.Stream | None:
    """Tensors of a prefetch on another stream must not be reused while this one reads them."""
    if not places.groups.rows.is_cuda:
        return None
    stream = torch.cuda.current_stream(places.groups.rows.device)
    for tensor in (*places.groups, places.row_slots, places.slots):
        if tensor is not None:
            tensor.record_stream(stream)
    return stream


def _part(batch: lookups.Lookup, start: int, end: int) -> lookups.Lookup:
    """Lookups [start, end) of a batch."""
    end = min(end, batch.indices.numel())
    offsets = batch.offsets.clamp(start, end) - start
    return batch._replace(indices=batch.indices[start:end], offsets=offsets)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """The current stream of a device as it is now, for others to wait for.

    None while a CUDA graph is captured: its events mean nothing outside, and it is whoever captures
    several streams who joins them.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).record_event()


def _wait_for(event: torch.cuda.Event) -> None:
    """Make the current stream wait; a capture begins after all that was there before it."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(event.device).wait_event(event)
