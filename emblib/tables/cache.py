"""Prefetching for the row cache: the batches in flight, and the locations of their rows.

`PrefetchingCache` is the cache of a module with its batches in flight; its `RowCache` has the
cached rows and the counters. `prefetch`, `look_up` or `start` plans a batch and fetches its rows.
The batch is then in flight until its update, which releases it (`BatchInFlight`, the hooks of the
batch's autograd graph).

The rows of a batch in flight are not evicted, so their slots are stored with the batch. A row for
which its set has no free way is read in its table. If a later batch assigns a way to the row, the
slot must be looked up again, because the newest values are then in the cache.

The module's lock is held in three phases. While a batch is planned and its rows move, the plan does
not yet describe the cache. While a lookup finds slots and reads them, the next plan might assign
the slots of a released batch to other rows. The third phase is an update.

On a GPU a prefetch may run on another stream than the training step. It waits for the updates of
released batches, whose rows it may evict. The lookup of the prefetched batch waits for the
prefetch. The updates of batches in flight and the prefetch do not wait for each other, unless
moving a row rounds it: the prefetch leaves rows of these batches in their slots, or in their tables
if they have no way. If such a row gets a way for the prefetched batch, its fetch is postponed until
that batch is looked up (`PostponedRows`), after the updates of earlier batches. Slots are looked up
again only then.

As long as all work is on one stream, the stream orders it: there are no events and no waits.

An interrupt may come between any two lines. So one native call (`RowCache.prefetch`,
`RowCache.fetch`) changes tags and moves rows. State that later calls need (tickets, streams) is
written before that call.
"""

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import call
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops import autograd, tbe
from emblib.ops.one_call import in_one_call
from emblib.specs import CacheConfig
from emblib.tables.bounds_report import BatchCheck
from emblib.tables.locks import ModuleLock
from emblib.tables.memory import Memory
from emblib.tables.parameters import version_of
from emblib.tables.recomputation import CheckpointedForward, checkpointed_forward
from emblib.tables.row_cache import PostponedRows, RowCache


class BatchId(NamedTuple):
    """The tensors of a batch, by whose identity `forward` recognises a prefetched one.

    `indices` is `[L]`; `offsets` is `[bags + 1]`, `[bags]` without `include_last_offset`.
    """

    indices: Tensor
    offsets: Tensor

    def versions(self) -> tuple[int, int]:
        """Return the version of each tensor, which counts its in-place writes."""
        return version_of(self.indices), version_of(self.offsets)

    def is_same(self, other: "BatchId") -> bool:
        """Return whether both are the same tensor objects."""
        return self.indices is other.indices and self.offsets is other.offsets

    def has_content_of(self, other: "BatchId") -> bool:
        """Return whether both have equal content.

        Values on a GPU are compared by a device assert, not by the result.
        """
        for tensor, other_tensor in zip(self, other, strict=True):
            if tensor is other_tensor:
                continue
            if tensor.shape != other_tensor.shape or tensor.dtype != other_tensor.dtype:
                return False
            if tensor.is_cuda:
                torch._assert_async((tensor == other_tensor).all(), _ORDER_MESSAGE)
            elif not torch.equal(tensor, other_tensor):
                return False
        return True


_ORDER_MESSAGE = "forward must get the batches in the order they were prefetched"
# A probe looks for the pages of a sample of a batch's rows in memory; see `_read_pages`. Neither
# number is measured: they keep a probe short next to a fetch of thousands of rows.
_SAMPLED_ROWS = 128
_FETCHES_PER_PROBE = 8  # while a probe finds all pages in memory


class _Ticket(weakref.ref["BatchInFlight"]):
    """The number of a batch in flight, and the stream of its last lookup.

    If the batch's graph is deleted without an update, the callback of this weak reference, which is
    C code, appends the ticket to a deque. A Python finaliser would swallow an interrupt.
    """

    number = 0  # number of the batch; batches are numbered from 1
    stream: torch.cuda.Stream | None = None


class BatchInFlight:
    """A batch between its prefetch and the end of its update: the `hooks` of its autograd graph.

    The caller of every method holds `lock`, the lock of the module.
    """

    def __init__(self, owner: "PrefetchingCache") -> None:
        self.owner = owner
        self.lock = owner.lock
        self.ticket: _Ticket | None = None
        self.prefetch_event: torch.cuda.Event | None = None  # recorded after its prefetch
        self.offsets: Tensor | None = None  # as repaired by its prefetch
        # The slots are current while the `last_fetched_batch` of the owner is at most this.
        self._newest_fetch_of_slots = -1
        self._will_be_repeated = False  # after a lookup without gradients
        self._locations: autograd.RowLocations | None = None

    def set_locations(self, locations: autograd.RowLocations) -> None:
        """Store the current slots of the rows of the batch."""
        assert self.ticket is not None
        self._locations, self._newest_fetch_of_slots = locations, self.ticket.number

    def note_for_repetition(self, forward: CheckpointedForward | None) -> None:
        """Store this batch for the repetition of its forward, if checkpointing will repeat it."""
        self._will_be_repeated = forward is not None and forward.trains_without_grad
        if forward is not None:
            forward.note(self.owner, self)

    def locate(self, *, lookups: bool = True) -> autograd.RowLocations:
        """Return the current locations of the batch's rows and, with `lookups`, of its lookups.

        The current stream waits for the prefetch of the batch.
        """
        owner, locations = self.owner, self._locations
        assert locations is not None
        if self.prefetch_event is not None:
            _wait_for(self.prefetch_event)
        else:
            owner.wait_for_prefetch()
        if self.ticket is not None:
            owner.fetch_postponed(self.ticket.number)
        if self.ticket is None or self._newest_fetch_of_slots < owner.last_fetched_batch:
            # The batch was released, so its rows may have been evicted since.
            locations = autograd.RowLocations(locations.groups, owner.find(locations.groups))
            self._newest_fetch_of_slots = owner.last_fetched_batch
        if lookups and locations.slots is None:
            assert locations.row_slots is not None
            slots = owner.cache.slots_of_lookups(locations.groups, locations.row_slots)
            locations = locations._replace(slots=slots)
        self._locations = locations
        if not owner.note_stream():
            stream = _keep_on_this_stream(locations)
            if self.ticket is not None:
                self.ticket.stream = stream
        return locations

    def before_update(self, *, lookups: bool = True) -> autograd.RowLocations:
        """Return the rows' locations; journal rows that the update writes directly to disk.

        The batch is released already here, so that an interrupted update leaves nothing to release.
        This is safe because the lock is held until the update is done.
        """
        locations = self.locate(lookups=lookups)
        self.owner.protect_conflicts(locations)
        self.owner.begin_access()
        self.release()
        return locations

    def after_update(self) -> None:
        """Allow eviction of the rows after the enqueued work, unless the batch is read again.

        Also called after a lookup without gradients, which no update follows.
        """
        if self._will_be_repeated:
            self._will_be_repeated = False
            return
        self.release()
        self.owner.end_access()

    def release(self) -> None:
        """Allow eviction of the rows; repeated calls do nothing."""
        if self.ticket is not None:
            self.owner.release(self.ticket)
            self.ticket = None


# The first results of `cache_prefetch_`: the fields of `tbe.Groups`, and two tensors of slots.
_NUM_LOCATIONS = len(tbe.Groups._fields) + 2


class _PostponedFetch(NamedTuple):
    """Rows whose fetch is postponed until their batch is looked up.

    Attributes:
        ticket_number: number of the batch's ticket.
        tiers: the memory between which the rows move.
        tensors: results of the op that lists the rows; empty until it has run.
        first_field: index in `tensors` of the first field of `PostponedRows`.
    """

    ticket_number: int
    tiers: autograd.Tiers
    tensors: list[Tensor]
    first_field: int

    @property
    def rows(self) -> PostponedRows | None:
        """Return the rows to fetch, if they are listed."""
        tensors = self.tensors[self.first_field : self.first_field + len(PostponedRows._fields)]
        return PostponedRows(*tensors) if tensors else None


class _PrefetchedBatch(NamedTuple):
    """A prefetched batch in the queue.

    Attributes:
        batch_id: the tensors that `prefetch` got.
        versions: versions of these tensors then; a write since is an error.
        flight: the batch in flight.
    """

    batch_id: BatchId
    versions: tuple[int, int]
    flight: BatchInFlight


class _LastWork:
    """Event and stream of the last work of one kind, so that other streams can wait for the work.

    `begin` stores the stream before the work, `end` the event after it. After an interrupt between
    the two, `wait` waits for everything on that stream.
    """

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, device: torch.device) -> None:
        """Store the current stream, on which the caller will enqueue work."""
        if self._stream is not None:
            self.wait()
        self._stream = torch.cuda.current_stream(device)

    def end_on(self, stream: torch.cuda.Stream) -> None:
        """Record that all work so far was enqueued on `stream`."""
        self._event, self._stream = stream.record_event(), None

    def end(self, device: torch.device) -> None:
        """Record an event after the work, which follows all earlier work of this kind."""
        if self._event is not None:
            _wait_for(self._event)
        self._event = _record_event(device)
        self._stream = None

    @property
    def event(self) -> torch.cuda.Event | None:
        """Return the event after the work that ended last, if any."""
        return self._event

    def wait(self) -> None:
        """Make the current stream wait for the last work; do nothing if there was none."""
        if self._event is not None:
            _wait_for(self._event)
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            _wait_for(self._stream.record_event())


class PrefetchingCache:
    """The cache of a module and its batches in flight, in the order they were prefetched.

    `lock` is the module's lock. `prefetch`, `look_up`, `flush`, `forget_prefetched` and `reset`
    enter it; callers of the other methods that move, find or release rows hold it. No method makes
    the host wait for a GPU. `tiers` is the memory of the tables, then that of the cache.
    """

    def __init__(
        self, memory: Memory, cache: RowCache, options: CacheConfig, lock: ModuleLock
    ) -> None:
        self.memory = memory
        self.cache = cache
        self.options = options
        self.lock = lock
        # Whether rows are rounded when they are written back. Then a prefetch reads the step count,
        # for stochastic rounding, which updates write: they must wait for each other.
        self.rounds_rows = cache.layout.weights_dtype is not memory.precision.weights
        # Number of the last batch whose rows were fetched. Its plan may have assigned ways to rows
        # of earlier batches in flight; later batches were planned with its rows in the cache.
        self.last_fetched_batch = -1
        self._queue: deque[_PrefetchedBatch] = deque()
        self._tickets: dict[int, _Ticket] = {}  # ticket per batch in flight
        self._dropped_tickets: deque[_Ticket] = deque()  # to be released by the next batch
        self._postponed_fetches: deque[_PostponedFetch] = deque()  # in the order of the tickets
        self._fetches_until_probe = 0  # see `_read_pages`
        self._last_prefetch = _LastWork()
        self._last_access = _LastWork()  # accesses: finds, updates and flushes
        self._last_postponed = _LastWork()  # postponed fetches
        self._streams: list[torch.cuda.Stream] = []  # up to two streams that have work

    def __getstate__(self) -> dict[str, object]:
        # Batches in flight belong to the original; a copy fetches rows when it gets the batches.
        work = {name: _LastWork() for name in ("_last_prefetch", "_last_access", "_last_postponed")}
        empty_queues = {
            name: deque[object]() for name in ("_queue", "_dropped_tickets", "_postponed_fetches")
        }
        return {**self.__dict__, **work, **empty_queues, "_tickets": {}, "_streams": []}

    @property
    def fetches_at_once(self) -> bool:
        """Return whether one op checks, groups and fetches a batch of any size."""
        return self.options.passes is None and self.memory.disk is None

    def note_stream(self) -> bool:
        """Note that the current stream has work; return whether it has all work of the cache.

        True on the CPU. The stream of a capture is not noted. With the second stream, events
        and tickets of all earlier work are recorded on the first one.
        """
        if not self.cache.weights.is_cuda:
            return True
        if len(self._streams) > 1:
            return False
        stream = torch.cuda.current_stream(self.cache.weights.device)
        if stream in self._streams:
            return True
        if torch.cuda.is_current_stream_capturing():  # its stream ends with the capture
            return False
        for first_stream in self._streams:
            for work in (self._last_prefetch, self._last_access, self._last_postponed):
                work.end_on(first_stream)
            for ticket in (*self._tickets.values(), *self._dropped_tickets):
                ticket.stream = first_stream
        self._streams.append(stream)
        return len(self._streams) == 1

    def prefetch(
        self, batch: autograd.Lookup, tiers: autograd.Tiers, batch_id: BatchId, check: BatchCheck
    ) -> bool:
        """Fetch the rows of a batch; `batch_id` has the tensors that forward will be called with.

        `check` is the bounds check that the op makes, if `fetches_at_once`; else the caller must
        have checked the batch.

        Returns:
            Whether the batch is valid; an invalid one, on the CPU, is not fetched.
        """
        with self.lock:
            flight = BatchInFlight(self)
            try:
                if not self._fetch_rows(flight, batch, tiers, check):
                    return False
                self._queue.append(_PrefetchedBatch(batch_id, batch_id.versions(), flight))
            except BaseException:
                self.drop(flight)
                raise
            return True

    def start(
        self,
        batch: autograd.Lookup,
        tiers: autograd.Tiers,
        batch_id: BatchId,
        check: BatchCheck,
        *,
        is_next: bool,
    ) -> BatchInFlight | None:
        """Return the batch that forward looks up, prefetched or fetched now; None if it is invalid.

        A prefetched batch stays at the head of the queue until `dequeue`. The caller must hold the
        lock; `is_next` is the result of the method of that name. If it is true, raises RuntimeError
        as `look_up` does.
        """
        if is_next:
            return self._check_next_prefetched(batch_id)
        flight = BatchInFlight(self)
        try:
            return flight if self._fetch_rows(flight, batch, tiers, check) else None
        except BaseException:
            self.drop(flight)
            raise

    def is_next(self, batch_id: BatchId, *, in_order: bool) -> bool:
        """Return whether forward of this batch takes the next prefetched batch.

        Forwards with gradients (`in_order`) must come in the order of prefetching; others may look
        up any batch in between.
        """
        return bool(self._queue) and (in_order or batch_id.is_same(self._queue[0].batch_id))

    def dequeue(self, flight: BatchInFlight) -> None:
        """Remove a batch that was looked up from the queue, if it is the next prefetched one."""
        if self._queue and self._queue[0].flight is flight:
            self._queue.popleft()

    def look_up(
        self,
        batch: autograd.Lookup,
        tiers: autograd.Tiers,
        batch_id: BatchId,
        check: BatchCheck,
        read: Callable[[autograd.Lookup], Tensor],
        *,
        training: bool,
    ) -> Tensor:
        """Call `read` with the batch and the slots of its lookups.

        The `hooks` of the batch keep it in flight. A prefetched one stays the next of the queue
        until it has been read. Without gradients, a batch that is not the next prefetched one is
        looked up out of order. The repetition of a forward reads what the first one read;
        `training` is the mode of the module.

        Raises:
            RuntimeError: batches are prefetched, and with gradients this one is not the next of
                them (values on a GPU are compared by a device assert); or the tensors of the next
                one were written to since its prefetch.
        """
        with self.lock:
            forward = checkpointed_forward(training=training)
            if forward is not None and forward.is_recomputation:
                flight: BatchInFlight | None = forward.recall(self)  # of the first forward
                if flight is not None:
                    return read(batch._replace(slots=flight.locate().slots, hooks=flight))
            is_next = self.is_next(batch_id, in_order=torch.is_grad_enabled())
            flight = self.start(batch, tiers, batch_id, check, is_next=is_next)
            assert flight is not None
            try:
                flight.note_for_repetition(forward)
                out = read(batch._replace(slots=flight.locate().slots, hooks=flight))
            except BaseException:
                self.drop(flight)
                raise
            self.dequeue(flight)
            return out

    def _check_next_prefetched(self, batch_id: BatchId) -> BatchInFlight:
        """Return the next prefetched batch; raise RuntimeError if it is not `batch_id`."""
        expected_id, versions, flight = self._queue[0]
        if expected_id.versions() != versions:
            raise RuntimeError(
                "the next of the prefetched batches was written to since; use separate tensors "
                "for every batch in flight"
            )
        if not expected_id.has_content_of(batch_id):
            raise RuntimeError(
                f"{_ORDER_MESSAGE}: the next of {len(self._queue)} has "
                f"{expected_id.indices.numel()} lookups, got one of {batch_id.indices.numel()}; "
                "pass that one, or flush() and then reset_cache_states() to forget them"
            )
        return flight

    def _fetch_rows(
        self,
        flight: BatchInFlight,
        batch: autograd.Lookup,
        tiers: autograd.Tiers,
        check: BatchCheck,
    ) -> bool:
        """Fetch the rows of a batch; return whether it is valid."""
        if self.memory.disk is not None:
            self.memory.disk.protect(_NO_ROWS)  # raises in a forked process, before rows move
        # Fetches run one after the other, also on different streams.
        is_one_stream = self.note_stream()
        if not is_one_stream:
            self._last_prefetch.wait()
        self._release_dropped()
        if not is_one_stream:
            self._last_access.wait()
            self._last_postponed.wait()
            self._last_prefetch.begin(batch.indices.device)
        pass_size = self._pass_size(batch)
        if pass_size < batch.indices.numel() or self.memory.disk is not None:
            self._fetch_in_passes(flight, batch, tiers, pass_size)
        elif not self._fetch_at_once(flight, batch, tiers, check):
            return False
        if not is_one_stream:
            self._last_prefetch.end(batch.indices.device)
            flight.prefetch_event = None if self.rounds_rows else self._last_prefetch.event
        return True

    def _fetch_at_once(
        self,
        flight: BatchInFlight,
        batch: autograd.Lookup,
        tiers: autograd.Tiers,
        check: BatchCheck,
    ) -> bool:
        """Check the batch, group it and fetch its rows in one op; return whether it is valid."""
        ticket, tiers = self._new_ticket(flight), self.tiers_for_moves(tiers)
        postpones = self.cache.weights.is_cuda and not self.rounds_rows and len(self._tickets) > 1
        results: list[Tensor] = []
        if postpones:
            self._postponed_fetches.append(
                _PostponedFetch(ticket.number, tiers, results, _NUM_LOCATIONS)
            )
        else:
            self.last_fetched_batch = ticket.number
        prefetch = self.cache.prefetch(ticket.number, tiers, batch, check, postpones=postpones)
        # One C call runs the op and stores its results: no interrupt can come between the two, and
        # lose the list of postponed rows.
        results.extend(chain.from_iterable(map(call, (prefetch,))))
        if not results:
            self.release(ticket)
            flight.ticket = None
            self.cache.cancel_ticket()
            return False
        *groups, row_slots, slots = results[:_NUM_LOCATIONS]
        flight.set_locations(autograd.RowLocations(tbe.Groups(*groups), row_slots, slots))
        if batch.indices.is_cuda and check.mode is not None:
            flight.offsets = results[-1]
        return True

    def tiers_for_moves(self, tiers: autograd.Tiers) -> autograd.Tiers:
        """Return the tiers between which rows move, without hyperparameters if none is rounded."""
        if not self.cache.weights.is_cuda or self.rounds_rows or tiers.hyperparams.numel() == 0:
            return tiers
        return tiers._replace(hyperparams=tiers.hyperparams[:0])

    def _fetch_in_passes(
        self, flight: BatchInFlight, batch: autograd.Lookup, tiers: autograd.Tiers, pass_size: int
    ) -> None:
        """Fetch the rows of a batch in passes of at most `pass_size` ids."""
        passes = self._groups_by_pass(batch, pass_size)
        groups = passes[0] if len(passes) == 1 else autograd.groups_of(batch)
        ticket = self._new_ticket(flight)
        self.cache.enter(ticket.number)
        row_slots = self._fetch_passes(passes, tiers, ticket.number)
        if len(passes) > 1:
            row_slots = self.cache.find(groups)
        flight.set_locations(autograd.RowLocations(groups, row_slots))

    def _pass_size(self, batch: autograd.Lookup) -> int:
        """Return the number of lookups whose rows are fetched at a time."""
        num_lookups, multi_pass = batch.indices.numel(), self.options.passes
        if multi_pass is not None and num_lookups >= multi_pass.min_lookups:
            return -(-num_lookups // multi_pass.passes)
        return num_lookups

    def _groups_by_pass(self, batch: autograd.Lookup, pass_size: int) -> list[tbe.Groups]:
        """Return the groups of each pass of `pass_size` lookups."""
        num_lookups = batch.indices.numel()
        if pass_size >= num_lookups:
            return [autograd.groups_of(batch)]
        starts = range(0, num_lookups, pass_size)
        pass_batches = (_sub_batch(batch, start, start + pass_size) for start in starts)
        # A pass needs only the distinct rows of its lookups; the rest of its groups is freed.
        no_ids = batch.indices.new_empty(0, dtype=torch.int32)
        return [
            autograd.groups_of(pass_batch)._replace(lookups=no_ids, bags=no_ids)
            for pass_batch in pass_batches
        ]

    def _fetch_passes(
        self, passes: list[tbe.Groups], tiers: autograd.Tiers, ticket_number: int
    ) -> Tensor:
        """Fetch the rows of a batch pass by pass; return the slots of the last pass's rows.

        Rows that an update of an earlier batch in flight may still write are listed in
        `_postponed_fetches` instead, if the cache is on a GPU.
        """
        disk = self.memory.disk
        postponed: list[PostponedRows] = []
        tiers = self.tiers_for_moves(tiers)
        if self.cache.weights.is_cuda and not self.rounds_rows and len(self._tickets) > 1:
            postponed = [self.cache.empty_postponed_rows(groups.rows.numel()) for groups in passes]
            self._postponed_fetches.extend(
                _PostponedFetch(ticket_number, tiers, list(rows), 0) for rows in postponed
            )
        else:
            self.last_fetched_batch = ticket_number
        # Passes of DISK tables are fetched one by one: each evicts rows that must be journaled.
        for groups_of_pass in [passes] if disk is None else [[groups] for groups in passes]:
            if disk is not None:
                evicted_rows = self._disk_rows(self.cache.evictions(groups_of_pass[0]))
                self._read_pages(groups_of_pass[0], evicted_rows)
                disk.verify(self._disk_rows(_valid_rows(groups_of_pass[0])))
                disk.protect(evicted_rows)
            row_slots = self.cache.fetch(tiers, groups_of_pass, postponed)[-1]
        return row_slots

    def fetch_postponed(self, ticket_number: int) -> None:
        """Fetch on the current stream the rows that prefetches up to `ticket_number` postponed.

        Updates that are already enqueued run before it; later ones look up their slots again.
        """
        is_one_stream, device = self.note_stream(), self.cache.weights.device
        if not is_one_stream:
            self._last_postponed.wait()
        while self._postponed_fetches and self._postponed_fetches[0].ticket_number <= ticket_number:
            postponed_fetch, rows = self._postponed_fetches[0], self._postponed_fetches[0].rows
            if rows is None:
                self._postponed_fetches.popleft()
                continue
            if not is_one_stream:
                self._last_access.wait()
                self._last_postponed.begin(device)
                for tensor in rows:
                    tensor.record_stream(torch.cuda.current_stream(device))
            self.last_fetched_batch = max(self.last_fetched_batch, postponed_fetch.ticket_number)
            # In one native call: fetching a row again would lose the updates in between.
            fetch = self.cache.fetch_postponed(postponed_fetch.tiers, rows)
            in_one_call(fetch, partial(self._postponed_fetches.popleft))
            if not is_one_stream:
                self._last_postponed.end(device)

    def find(self, groups: tbe.Groups) -> Tensor:
        """Return the current slots of a batch's distinct rows, int32, after all prefetches."""
        self.complete_fetches()
        self.begin_access()
        row_slots = self.cache.find(groups)
        self.end_access()
        return row_slots

    def locate(self, groups: tbe.Groups) -> autograd.RowLocations:
        """Locate rows for an update, in the cache or in their tables.

        Rows that the update writes directly to disk are journaled. After the update the caller must
        call `end_access`; not checked.
        """
        if self.memory.disk is not None:
            self.memory.disk.verify(self._disk_rows(_valid_rows(groups)))
        locations = autograd.RowLocations(groups, self.find(groups))
        self.begin_access()
        self.protect_conflicts(locations)
        return locations

    def _read_pages(self, groups: tbe.Groups, evicted_rows: Tensor) -> None:
        """Read the pages of rows on disk that a fetch copies to the cache or back, many at a time.

        A sample of the rows decides, at each fetch while pages are missing in memory, else at every
        `_FETCHES_PER_PROBE`-th.
        """
        self._fetches_until_probe -= 1
        if self._fetches_until_probe > 0:
            return
        disk, rows = self.memory.disk, _valid_rows(groups)
        assert disk is not None
        sample = rows[:: max(rows.numel() // _SAMPLED_ROWS, 1)]
        if disk.fetch(self._rows_only_on_disk(groups, sample)):
            disk.fetch(torch.cat([self._rows_only_on_disk(groups, rows), evicted_rows]))
        else:
            self._fetches_until_probe = _FETCHES_PER_PROBE

    def _rows_only_on_disk(self, groups: tbe.Groups, rows: Tensor) -> Tensor:
        """Return those of `rows` that are only on disk, counted from the first row there."""
        num_rows = torch.full_like(groups.count, rows.numel())
        slots = self.cache.find(groups._replace(rows=rows.contiguous(), count=num_rows))
        return self._disk_rows(rows[slots < 0])

    def _disk_rows(self, rows: Tensor) -> Tensor:
        """Return those of `rows` that are on disk, counted from the first row there."""
        first_disk_row = self.memory.layout.first_disk_row
        return rows[rows >= first_disk_row] - first_disk_row

    def wait_for_prefetch(self) -> None:
        """Make the current stream wait for what prefetches on other streams have written."""
        if not self.note_stream():
            self._last_prefetch.wait()

    def begin_access(self) -> None:
        """Record that an access (find, update or flush) begins on the current stream."""
        if not self.note_stream():
            self._last_access.begin(self.cache.weights.device)

    def end_access(self) -> None:
        """Record that an access was enqueued: the next prefetch waits for it and earlier ones."""
        if not self.note_stream():
            self._last_access.end(self.cache.weights.device)

    def _new_ticket(self, flight: BatchInFlight) -> _Ticket:
        """Return the ticket of a new batch, whose rows are not evicted from its plan on."""
        number = self.cache.new_ticket()
        flight.ticket = ticket = _Ticket(flight, self._dropped_tickets.append)
        ticket.number = number
        self._tickets[number] = ticket
        return ticket

    def release(self, ticket: _Ticket) -> None:
        """End a batch: its rows may be evicted; repeated calls do nothing."""
        self.cache.release(ticket.number)
        self._tickets.pop(ticket.number, None)

    def drop(self, flight: BatchInFlight) -> None:
        """Have the next prefetch release a batch whose prefetch or lookup raised.

        The traceback of the exception may still refer to the batch. A prefetched batch stays at the
        head of the queue.
        """
        is_next = bool(self._queue) and self._queue[0].flight is flight
        if flight.ticket is not None and not is_next:
            self._dropped_tickets.append(flight.ticket)

    def _release_dropped(self) -> None:
        """End batches that will not be updated, so that their rows may be evicted.

        Their graph was deleted, or their prefetch or lookup raised.
        """
        while self._dropped_tickets:
            ticket = self._dropped_tickets[0]
            self.fetch_postponed(ticket.number)
            if ticket.stream is not None and not torch.cuda.is_current_stream_capturing():
                self.begin_access()
                _wait_for(ticket.stream.record_event())  # the looked-up rows may still be read
            self.release(ticket)
            self.end_access()  # no `begin_access` came if one stream has all work: it does nothing
            self._dropped_tickets.popleft()

    def protect_conflicts(self, locations: autograd.RowLocations) -> None:
        """Journal the rows of a batch that are on disk but not in the cache."""
        if self.memory.disk is None:
            return
        assert locations.row_slots is not None
        rows = _valid_rows(locations.groups)
        self.memory.disk.protect(self._disk_rows(rows[locations.row_slots[: len(rows)] < 0]))

    def flush(self, tiers: autograd.Tiers) -> None:
        """Write all cached rows back, and commit the disk tier; prefetched batches stay valid.

        With a disk tier, tables are on the CPU, and the method returns once they are on the disk;
        errors are those of `DiskStore.protect` and `DiskStore.commit`.
        """
        with self.lock:
            self.complete_fetches()
            self.begin_access()
            if self.memory.disk is not None:
                self.memory.disk.protect(self._disk_rows(self.cache.tags))
            self.cache.flush(tiers)
            self.end_access()
            if self.memory.disk is not None:
                self.memory.disk.commit(tiers.hyperparams.tolist())

    def complete_fetches(self) -> None:
        """Make the current stream wait for all prefetches, and fetch rows that they postponed."""
        self.wait_for_prefetch()
        self.fetch_postponed(self.cache.last_ticket)

    def forget_prefetched(self) -> None:
        """Forget the prefetched batches; their rows stay in the cache, and may be evicted."""
        with self.lock:
            self._queue.clear()  # batches in flight that nothing refers to are released later

    def reset(self, *, keeps_prefetched: bool = True) -> None:
        """Empty the cache, and forget prefetched batches, if not kept; drop cached updates."""
        with self.lock:
            self._queue = self._queue if keeps_prefetched else deque()
            self._postponed_fetches.clear()
            self.complete_fetches()
            self.begin_access()
            # A new number, so that slots of earlier batches, prefetched too, are looked up again.
            self.last_fetched_batch = self.cache.new_ticket()
            self.cache.reset()
            self.end_access()


_NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")


def _valid_rows(groups: tbe.Groups) -> Tensor:
    """Return the distinct rows of grouped lookups on the CPU, without what follows them."""
    return groups.rows[: int(groups.count)]


def _keep_on_this_stream(locations: autograd.RowLocations) -> torch.cuda.Stream | None:
    """Record the current stream as a user of tensors that another stream's prefetch allocated."""
    if not locations.groups.rows.is_cuda:
        return None
    stream = torch.cuda.current_stream(locations.groups.rows.device)
    for tensor in (*locations.groups, locations.row_slots, locations.slots):
        if tensor is not None:
            tensor.record_stream(stream)
    return stream


def _sub_batch(batch: autograd.Lookup, start: int, end: int) -> autograd.Lookup:
    """Return lookups [start, end) of a batch; `end` may exceed the batch."""
    end = min(end, batch.indices.numel())
    offsets = batch.offsets.clamp(start, end) - start
    return batch._replace(indices=batch.indices[start:end], offsets=offsets)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record and return an event on the current stream of a device, for other streams to wait for.

    Returns None while a CUDA graph is captured: events of a capture have no meaning outside it, and
    code that captures several streams must join them itself.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).record_event()


def _wait_for(event: torch.cuda.Event) -> None:
    """Make the current stream wait for an event; during a capture, do nothing.

    Code that captures several streams must join them itself.
    """
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(event.device).wait_event(event)
