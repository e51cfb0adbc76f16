"""LogFollower: a served model that applies the change logs of a trainer while it serves.

Each rank of the trainer has a log. A boundary is a step for which all logs have a record; `apply`
goes from boundary to boundary. It checks and converts the records up to the next boundary, and then
writes them while no reader is inside. So readers see all of a boundary or nothing. Only if writing
raises, readers see a mix of two boundaries until the next record with all rows is applied.
"""

import itertools
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import nn

from emblib.grad_mode import in_grad_mode
from emblib.online.records import LogError, Record, RecordKind, TableChange, decode
from emblib.online.served import ServedTable, concatenate, join_columns, served_tables
from emblib.online.sinks import Sink, check_sink
from emblib.specs import check_count
from emblib.tables import QuantizedEmbeddingBags
from emblib.tables.locks import ModuleLock, register_after_fork
from emblib.tables.parameters import caller_level

# The maximum number of records that one poll reads. A log that is not behind another log reads no
# more records while as many are pending.
_MAX_PENDING = 64

BoundaryKey = tuple[int, int]  # generation and step of a record


class Lag(NamedTuple):
    """Distance of a follower behind its trainer.

    Attributes:
        steps: steps from the one that is served to the newest in the logs, at least 0; None if no
            step is served yet.
        seconds: age of the oldest record that is not applied, by the clocks of both machines, at
            least 0.0; 0.0 if all are applied.

    Example:
        >>> emblib.online.Lag(steps=0, seconds=0.0)
        Lag(steps=0, seconds=0.0)
    """

    steps: int | None
    seconds: float


class LogFollower:
    """Serve the tables of a model at the steps of a trainer's change logs.

    Threads look up through `follower(...)` or inside `follower.reading()`. They see the tables at
    one boundary, a step that the logs of all ranks have; before the first boundary they see the
    model as it was. Other lookups, e.g. calls of the model itself, may see a part of a boundary.
    One call of `apply` runs at a time; others wait. Quantised tables quantise the rows of the log
    as `for_inference` does.

    Args:
        model: `for_inference(...)`, `open_frozen(...)`, `DynamicEmbeddingBags`,
            `TableBatchedEmbeddingBags`, or an unsharded model that has such tables and collections.
            Dynamic tables need the capacity of the trainer's tables. The tables are changed in
            place; read-only tables of keys get other memory when they grow.
        sources: sink of the log, or a list or tuple of the sinks of all ranks' logs, in any order.
        step: step that the tables are at, e.g. of a frozen file; None waits for a record with all
            rows, and begins with it. So do tables of a run that the log does not have, with a
            warning: the trainer may have given it up.
        run: `ChangeLog.run` of the log, of any rank, when the tables were at `step`; None takes it
            from the tables: those that were frozen or converted from a model with a log name it.
            Tables that name none are trusted to be of the first run of a log, until it has another.
        tables: names of the tables to follow; None for all in the log, which the model must have.

    Raises:
        KeyError: the model lacks one of `tables`.
        TypeError: the model is sharded or has no tables with rows, a source is not a sink, the step
            is not an int, `tables` is one string, or `run` is not a text or is without `step`.
        ValueError: a table to follow was pruned, is on disk or in a `HostEmbeddingBags`, or has an
            index in shared memory; two of them have one name, and are not read-only copies that
            name a common run of a log; `tables` is empty; there is no sink; or the step is below 0.

    Example:
        >>> import tempfile
        >>> spec = emblib.TableSpec(100, 8, "item")
        >>> trained = emblib.TableBatchedEmbeddingBags([spec], emblib.optim.SGD(0.1))
        >>> sink = emblib.online.DirectorySink(tempfile.mkdtemp())
        >>> log = emblib.online.ChangeLog(trained, sink)
        >>> served = emblib.inference.for_inference(trained, "int4")
        >>> follower = emblib.online.LogFollower(served, sink)
        >>> ids, offsets = torch.tensor([3, 14]), torch.tensor([0, 2])
        >>> trained(ids, offsets).sum().backward()
        >>> log.record(1), log.close()
        (True, None)
        >>> follower.lag.steps, follower.apply(), follower.lag.steps
        (None, 1, 0)
        >>> now = emblib.inference.for_inference(trained, "int4")
        >>> torch.equal(follower(ids, offsets), now(ids, offsets))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Sink | list[Sink] | tuple[Sink, ...],
        *,
        step: int | None = None,
        run: str | None = None,
        tables: Sequence[str] | None = None,
    ) -> None:
        if isinstance(tables, str):
            raise TypeError(
                f"tables must be a sequence of names, got {tables!r}: pass [{tables!r}]"
            )
        self.model = model
        self._followed_names = None if tables is None else set(tables)
        if self._followed_names is not None and not self._followed_names:
            raise ValueError("tables must name the tables to follow, or be None for all, got none")
        self._tables = served_tables(model, self._followed_names)
        self._names = set(self._tables)
        logs: list[Any] = list(sources) if isinstance(sources, list | tuple) else [sources]
        if not logs:
            raise ValueError("a follower needs the sink of each rank's log, got none")
        self._logs = [_Log(check_sink(source), len(logs)) for source in logs]
        self._step = None if step is None else check_count("step", step, minimum=0)
        if run is not None and (step is None or not isinstance(run, str)):
            raise TypeError(f"run must be ChangeLog.run, a text, and needs step=, got {run!r}")
        self._run = run
        self._boundary: BoundaryKey | None = None  # the last one; None if the tables are at none
        self._has_base = step is not None  # whether the tables began at a step that the caller gave
        self._has_warned = False  # of logs without records
        self._lock = ReaderLock()
        self._apply_lock = ModuleLock()  # held while the logs are read or applied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a follower is neither copied nor sent to another process: make one there, of tables "
            "from open_frozen or copy.deepcopy(follower.model)"
        )

    @property
    def step(self) -> int | None:
        """Return the step that is served; None before the first boundary, unless `step` was given.

        After an error while tables were written it is the step before.
        """
        return self._step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model without gradients, with all tables at one step; return its result."""
        with self._lock.reading():
            return in_grad_mode(self.model, enabled=False)(*args, **kwargs)

    def reading(self) -> Any:
        """Return a context in which the tables stay at one step, for any number of lookups.

        Contexts may be nested in one thread. `apply` waits for them, and raises RuntimeError in a
        thread that is inside one.
        """
        return self._lock.reading()

    @property
    def lag(self) -> Lag:
        """Return how far the tables are behind the logs, whose new records are read for it.

        Any thread may read the property, also inside `reading()`.

        Raises:
            LogError: a record is damaged.
            OSError: a source cannot be read; sinks may raise errors of other types.
        """
        ranges = [*filter(None, (log.unapplied_range(self._is_new) for log in self._logs))]
        seconds = max((time.time() - oldest.time for oldest, _ in ranges), default=0.0)
        if self._step is None:
            return Lag(None, max(seconds, 0.0))
        num_steps = max((newest.step - self._step for _, newest in ranges), default=0)
        return Lag(max(num_steps, 0), max(seconds, 0.0))

    def _is_new(self, record: Record) -> bool:
        """Return whether a record is newer than the state of the tables."""
        if self._boundary is not None:
            return record.key > self._boundary
        return self._step is None or record.step > self._step

    def apply(self) -> int | None:
        """Apply all complete boundaries; return `self.step`, the step that is served.

        Warns once of logs without records: a follower may start before its trainer, and waits also
        where nothing will ever be written.

        Raises:
            LogError: a log is damaged, lacks records, or is of other tables; the tables stay at
                the last boundary.
            OSError: a source cannot be read; sinks may raise errors of other types.
            RuntimeError: this thread is inside `reading()`, and there is a boundary to write.
            ValueError: a table does not accept a row, e.g. its format does not hold it; the tables
                stay at the last boundary.
            Exception: writing a table raised it, e.g. LogError if a dynamic table has too few
                slots; the tables are at no boundary until the next record with all rows is applied.
        """
        with self._apply_lock:
            has_more = True
            while has_more:
                has_more = self._poll()
                while (key := self._next_boundary()) is not None:
                    self._apply(key)
            self._check_ranks(is_at_end=True)
            self._warn_of_empty_logs()
            has_skipped = any(log.has_skipped for log in self._logs)
            has_pending = any(log.pending for log in self._logs)  # another rank may be late
            if has_skipped and not has_pending:
                raise LogError(
                    "the log has no snapshot to begin with: freeze the tables and pass the step= "
                    "of the file, or have the trainer call snapshot(step)"
                )
            return self._step

    def _warn_of_empty_logs(self) -> None:
        """Warn once, the first time that the logs are read, of those without a record."""
        empty_logs = [str(log.source) for log in self._logs if log.newest is None]
        if empty_logs and not self._has_warned:
            warnings.warn(
                f"no log has begun in {', '.join(empty_logs)}: the follower waits for its first "
                "record; if the trainer has begun one, it is elsewhere",
                stacklevel=caller_level(),
            )
        self._has_warned = True

    def _poll(self) -> bool:
        """Read more records of the logs; return whether there were any."""
        newest = max((log.newest for log in self._logs if log.newest is not None), default=None)
        has_base = self._boundary is not None or self._has_base
        # Each log is read, although one of them has more.
        return any([log.poll(newest, needs_whole=not has_base) for log in self._logs])

    def run(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Apply new boundaries every `interval_s` seconds until `stop` is set.

        An error of `apply` ends the loop and is raised.
        """
        while not stop.is_set():
            self.apply()
            stop.wait(interval_s)

    # Boundaries

    def _next_boundary(self) -> BoundaryKey | None:
        """Return the key of the next boundary; None while there is none.

        After a gap the last boundary is forgotten. Without a last boundary, it is the newest step
        of which all logs have a record with all rows. Else it is the first step after the last
        boundary of which all logs have a record; records up to the last boundary are dropped.

        Raises:
            LogError: see `_check_ranks`.
        """
        self._check_ranks()
        if any(log.has_gap for log in self._logs):
            self._boundary, self._has_base = None, False
        if self._boundary is None and self._has_base:
            self._begin_at_base()
        if self._boundary is None:
            whole_keys = [
                {record.key for record in log.pending if record.is_whole} for log in self._logs
            ]
            return max(set.intersection(*whole_keys), default=None)
        for log in self._logs:
            log.drop(self._boundary)
        keys = [{record.key for record in log.pending} for log in self._logs]
        return min(set.intersection(*keys), default=None)

    def _begin_at_base(self) -> None:
        """Make `step`, which the caller named, the last boundary, once all logs have records.

        If changes after it are missing, the logs are read again, for records with all rows.
        """
        first_records = [log.pending[0] for log in self._logs if log.pending]
        if len(first_records) < len(self._logs) or self._step is None:
            return
        generation = self._base_generation(first_records)
        if generation is None:
            warnings.warn(
                f"the log does not have the run that the tables at step {self._step} are of, or "
                "they do not name it: the trainer may have given it up, so all rows are loaded "
                "from the log first. Freeze tables while their ChangeLog is open, or pass its run=",
                stacklevel=caller_level(),
            )
        log_starts = [record for record in first_records if record.is_whole or record.sequence == 1]
        if generation is None or any(
            record.key > (generation, self._step) for record in log_starts
        ):
            self._has_base = False  # records after the base were dropped, or never made
            for log in self._logs:
                log.restart()
        else:
            self._boundary = generation, self._step

    def _base_generation(self, first_records: Sequence[Record]) -> int | None:
        """Return the generation of the run that the tables are of at `step`; None if unknown.

        Tables that name no run are of the log's first one, while it has no other. A log that begins
        without a snapshot also begins at tables of its first step that name the run of another log.
        Reads the logs to their ends.
        """
        generations: dict[str, int] = {}
        for log in self._logs:
            generations |= log.generations()
        newest = max(generations.values(), default=0)
        begins_here = all(
            record.sequence == 1 and not record.is_whole and record.step == self._step
            for record in first_records
        )
        base_generations = set[int | None]()
        for runs in self._runs_of_tables():
            known_generations = [generations[run] for run in runs if run in generations]
            if known_generations:
                base_generations.add(max(known_generations))
            else:
                is_first = newest <= 1 and (not runs or begins_here)
                base_generations.add(newest if is_first else None)
        return base_generations.pop() if len(base_generations) == 1 else None

    def _runs_of_tables(self) -> set[tuple[str, ...]]:
        """Return the runs that the followed tables name; an empty tuple if some name none."""
        if self._run is not None:
            return {(self._run,)}
        modules = self._read_only_modules()
        names = {name for module in modules for name in module.table_names}
        runs = {module.log_runs for module in modules}
        return runs if self._names <= names else {*runs, ()}

    def _read_only_modules(self) -> list[QuantizedEmbeddingBags]:
        """Return the modules that store the rows of the followed read-only tables."""
        modules = [m for m in self.model.modules() if isinstance(m, QuantizedEmbeddingBags)]
        return [module for module in modules if not self._names.isdisjoint(module.table_names)]

    def _check_ranks(self, *, is_at_end: bool = False) -> None:
        """Raise LogError if logs are of one rank, or, at their ends, of another number of ranks."""
        newest_records = [log.last_ranks for log in self._logs if log.last_ranks is not None]
        ranks = sorted(rank for rank, _ in newest_records)
        for _, num_ranks in newest_records:
            is_other = num_ranks != len(self._logs)
            if len(set(ranks)) < len(ranks) or (is_other and is_at_end):
                raise LogError(
                    f"the trainer has {num_ranks} ranks, and the {len(self._logs)} sources are "
                    f"logs of ranks {ranks}: pass one source per rank"
                )

    def _apply(self, key: BoundaryKey) -> None:
        """Write all records up to one boundary while no reader is inside.

        An exception while tables are written leaves them at no boundary: the logs are read again
        from their oldest records, and the next boundary replaces the tables.
        """
        records_by_log = [log.records_up_to(key) for log in self._logs]  # none is empty
        is_whole = self._boundary is None or any(
            records[-1].kind is RecordKind.SNAPSHOT for records in records_by_log
        )
        if is_whole:  # the last record with all rows of each log replaces all before it
            records_by_log = [
                [record for record in records if record.is_whole and record.key == key][-1:]
                for records in records_by_log
            ]
            is_mixed = not all(records_by_log)
        else:
            is_mixed = any(
                record.kind is RecordKind.SNAPSHOT
                for records in records_by_log
                for record in records
            )
        if is_mixed:
            raise LogError(
                f"step {key[1]} is a snapshot in some logs only: have all ranks call "
                "snapshot(step) with the same step"
            )
        all_records = [record for records in records_by_log for record in records]
        write_functions = self._prepare(all_records, is_whole=is_whole)
        runs = tuple(sorted({record.run for record in all_records if record.run}))
        self._lock.write(lambda: self._write(write_functions, key, runs))
        for log in self._logs:
            log.drop(key)
            log.has_gap = False

    def _write(
        self, functions: Sequence[Callable[[], None]], key: BoundaryKey, runs: tuple[str, ...]
    ) -> None:
        """Call the functions that lead to a boundary of `runs`, and make it the last one."""
        try:
            for function in functions:
                function()
            for module in self._read_only_modules():
                module.log_runs = runs
            self._boundary, self._step = key, key[1]
        except BaseException:
            self._boundary, self._has_base = None, False  # the tables are at no boundary
            for log in self._logs:
                log.restart()
            raise

    def _prepare(self, records: Sequence[Record], *, is_whole: bool) -> list[Callable[[], None]]:
        """Check and convert the records of a boundary; return the functions that write them.

        With `is_whole` the records with all rows are used, else those with changes: a compaction
        has the rows that the changes before it lead to.

        Raises:
            LogError, ValueError: a table does not accept its changes, see `ServedTable`.
        """
        changes: dict[str, list[TableChange]] = {}
        for record in records:
            if record.is_whole is is_whole:
                for name, table_changes in record.tables.items():
                    changes.setdefault(name, []).extend(table_changes)
        write_functions: list[Callable[[], None]] = []
        for name, table_changes in changes.items():
            table = self._table(name)
            if table is None:
                continue
            joined_changes = join_columns(table_changes)
            if is_whole:
                write_functions.append(table.prepare_whole(concatenate(joined_changes)))
            else:
                write_functions.extend(table.prepare(change) for change in joined_changes)
        return write_functions

    def _table(self, name: str) -> ServedTable | None:
        """Return the table that a log names; None if it is not followed.

        Raises:
            LogError: the model has no such table.
        """
        if self._followed_names is not None and name not in self._followed_names:
            return None
        if name not in self._tables:
            raise LogError(
                f"the log has a table {name!r}, the model only {sorted(self._tables)}: tables= "
                "names those to follow"
            )
        return self._tables[name]


class _Log:
    """The log of one rank: the records that were read and not applied.

    Attributes:
        source: the sink.
        pending: these records, in order.
        newest: boundary of the last record that was read; None before the first.
        has_gap: whether the writer removed records before they were read, so that tables must be
            replaced by the rows of `pending[0]`, which has all of them.
        has_skipped: whether the last record was skipped, as it precedes the first with all rows.
        last_ranks: rank, and number of the trainer's ranks, of the last record; None before the
            first. Records of another number of ranks than there are logs are skipped: the trainer
            had that many ranks before.
    """

    def __init__(self, source: Sink, num_ranks: int) -> None:
        self.source, self._num_ranks = source, num_ranks
        self.restart()

    def restart(self) -> None:
        """Forget all records; begin again at the oldest one."""
        self._position: str | None = None
        self._last_read: tuple[int, float] | None = None  # sequence and time of a record
        self._last_run = ""  # of that record
        self.pending: deque[Record] = deque()
        self.newest: BoundaryKey | None = None
        self.has_gap = False
        self.has_skipped = False
        self.last_ranks: tuple[int, int] | None = None

    def poll(self, newest: BoundaryKey | None, *, needs_whole: bool) -> bool:
        """Read records, not much further than other logs; return whether there were any.

        Args:
            newest: the newest boundary that any log has read.
            needs_whole: whether changes before the first record with all rows are skipped.

        Raises:
            LogError: a record is damaged, or records are missing and none after them has all rows.
        """
        num_read = 0
        is_ahead = newest is None or self.newest is None or self.newest >= newest
        if is_ahead and len(self.pending) >= _MAX_PENDING:
            return False
        error: LogError | None = (
            None  # of records that are missing, while no later one has all rows
        )
        for stored in self.source.read(self._position):
            record = decode(stored.data, stored.location)
            if self._last_read == (record.sequence, record.time):
                self._position = stored.position  # written again by a trainer that saw an error
                continue
            if self._last_read is not None and not self._is_next(record):
                if not record.is_whole:
                    error = error or self._missing_error(record, stored.location)
                    continue
                error = None
                self.has_gap = True
                self.pending.clear()
            self.has_skipped = needs_whole and not record.is_whole and not self.pending
            # The position last: after an interrupt, the record is read again.
            self.last_ranks = record.rank, record.num_ranks
            is_of_ranks = record.num_ranks == self._num_ranks
            if is_of_ranks and not self.has_skipped and not self._is_pending(record):
                self.pending.append(record)
            self.newest, num_read = record.key, num_read + 1
            self._last_run = record.run
            self._position, self._last_read = stored.position, (record.sequence, record.time)
            if num_read >= _MAX_PENDING:
                break
        if error is not None:
            raise error
        return num_read > 0

    def _missing_error(self, record: Record, location: str) -> LogError:
        """Return the error of a record that does not follow the last one."""
        assert self._last_read is not None
        if record.run == self._last_run:
            return LogError(
                f"{location} is record {record.sequence}, after {self._last_read[0]}: those "
                "between are missing, and no later one has all rows: have the trainer call "
                "snapshot(step)"
            )
        return LogError(
            f"{location} is of another run than the record before it: the snapshot between is "
            "missing"
        )

    def _is_next(self, record: Record) -> bool:
        """Return whether a record follows the last one that was read."""
        if self._last_read is None or self.newest is None:
            return True
        begins_run = record.kind is RecordKind.SNAPSHOT and record.generation > self.newest[0]
        is_same_run = record.run == self._last_run
        return record.sequence == self._last_read[0] + 1 and (begins_run or is_same_run)

    def _is_pending(self, record: Record) -> bool:
        """Return whether the newest pending record is `record`."""
        if not self.pending:
            return False
        newest = self.pending[-1]
        return (newest.sequence, newest.time) == (record.sequence, record.time)

    def generations(self) -> dict[str, int]:
        """Return the generation of each run in the log, "" for all that have no id."""
        records = (decode(stored.data, stored.location) for stored in self.source.read())
        return {record.run: record.generation for record in records}

    def records_up_to(self, key: BoundaryKey) -> list[Record]:
        """Return the pending records up to a boundary, which they include."""
        return [record for record in self.pending if record.key <= key]

    def drop(self, key: BoundaryKey) -> None:
        """Remove the pending records up to a boundary, which they include."""
        while self.pending and self.pending[0].key <= key:
            self.pending.popleft()

    def unapplied_range(self, is_new: Callable[[Record], bool]) -> tuple[Record, Record] | None:
        """Return the oldest and the newest record to apply; None if there are none.

        It reads the log to its end, and does not keep the records that it reads. Another thread may
        poll meanwhile: as the position is read first, no record is left out.
        """
        position, pending = self._position, [*self.pending]
        oldest = next((record for record in pending if is_new(record)), None)
        newest = pending[-1] if oldest is not None else None
        for stored in self.source.read(position):
            newest = decode(stored.data, stored.location)
            if oldest is None and is_new(newest):
                oldest = newest
        return None if oldest is None or newest is None else (oldest, newest)


class ReaderLock:
    """A lock for any number of readers or one writer; a writer that waits comes first.

    Each thread that reads has a lock of its own, and a writer takes all of them. Locks are taken
    and released in C, as in `ModuleLock`, so that no interrupt leaves a reader or a writer behind.
    A thread may nest `reading`.
    """

    def __init__(self) -> None:
        self._gate = ModuleLock()  # held by the writer, and by a reader that is about to enter
        self._reader_locks: weakref.WeakSet[ModuleLock] = weakref.WeakSet()
        self._thread_state = threading.local()
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the readers of other threads, which a forked process does not have."""
        lock = self._lock_of_thread()
        self._reader_locks = weakref.WeakSet([lock])

    def _lock_of_thread(self) -> ModuleLock:
        """Return the lock of this thread; make it the first time."""
        lock: ModuleLock | None = getattr(self._thread_state, "lock", None)
        if lock is None:
            lock = ModuleLock()
            self._reader_locks.add(lock)  # before it can be used, whatever interrupts this
            self._thread_state.lock = lock
        return lock

    def reading(self) -> ModuleLock:
        """Return a context for a reader; wait for a writer, unless this thread reads already."""
        lock: ModuleLock | None = getattr(self._thread_state, "lock", None)
        if lock is None or not lock.is_owned():
            with self._gate:
                lock = self._lock_of_thread()
        return lock

    def write(self, function: Callable[[], object]) -> None:
        """Call a function when there is no reader; new readers wait until it has returned.

        Raises:
            RuntimeError: this thread is a reader.
        """
        lock: ModuleLock | None = getattr(self._thread_state, "lock", None)
        if lock is not None and lock.is_owned():
            raise RuntimeError("apply() would wait for this thread: leave reading() first")
        with self._gate:
            locks, acquired_locks = [*self._reader_locks], list[ModuleLock]()
            releasing_calls = map(ModuleLock.release, acquired_locks)
            try:
                # Each lock is added as it is acquired, with no interrupt between the two.
                acquired_locks.extend(itertools.compress(locks, map(ModuleLock.acquire, locks)))
                function()
            finally:
                list(releasing_calls)
