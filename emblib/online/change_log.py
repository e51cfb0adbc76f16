"""ChangeLog: the log of the changes of a model's tables, written while it trains.

`record` copies the changed rows; a thread encodes them and appends the bytes to the sink. If that
fails, the entry stays in memory; the next call raises, and lets the thread try again. Snapshots and
compactions are *whole* entries: they have all rows. When a whole entry has been written, the log
drops all entries before its previous whole entry.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

from torch import nn

from emblib.dynamic.dynamic_tables import tables_of
from emblib.grad_mode import without_gradients
from emblib.inference.conversion import begin_log_run, end_log_run
from emblib.online.changes import KeyedChanges, Lookups, PlainChanges
from emblib.online.records import Record, RecordKind, decode, encode
from emblib.online.sinks import Sink, check_sink
from emblib.online.tables import ModelTables, PlainTable, find_tables
from emblib.sharding import ReplicatedModelParallel
from emblib.sharding.fingerprint import agree
from emblib.specs import OptionEnum, check_bool, check_count


class WhenFull(OptionEnum):
    """Reaction of `ChangeLog.record` while too many entries wait to be written.

    BLOCK waits. MERGE returns at once, and the changes are part of the next entry; where all rows
    are due (`compact_every`), it waits as well.

    Example:
        >>> emblib.online.WhenFull("merge")
        <WhenFull.MERGE: 'merge'>
    """

    BLOCK = "block"
    MERGE = "merge"


class ChangeLogError(RuntimeError):
    """The log could not write an entry, which it keeps and writes later.

    Example:
        >>> issubclass(emblib.online.ChangeLogError, RuntimeError)
        True
    """


class ChangeLog:
    """Log the rows of a model that training changes, for followers that serve them.

    Make it when the model has its optimizers and is sharded, on all ranks together; each has its
    own log, with the same `step` and `compact_every`. It begins with a snapshot of all rows. Then
    call `record(step)` between training steps. Rows must change by training alone: after anything
    else, e.g. `load_state_dict`, call `snapshot(step)`. Call the methods from the thread that
    trains; another thread, of the log, writes.

    Args:
        model: module with plain and dynamic tables, whose updates are fused.
        sink: sink of this rank, which may have an older log.
        step: number of the training step that the tables are at.
        states: whether entries have optimizer states.
        compact_every: all rows are written again at its multiples, or the first step after one that
            is recorded, and entries before the last but one with all rows are dropped. None: only
            `snapshot` writes all rows, the log does not begin with a snapshot, and the sink must be
            empty.
        max_pending: number of entries that may wait to be written. The compaction that follows a
            delta of the same step may be one more.
        when_full: reaction of `record` while `max_pending` entries wait.

    Attributes:
        step: step of the last entry, or the argument `step` before the first one.

    Raises:
        TypeError: the model has tensor trains, quantised tables or a `ReplicatedModelParallel`, or
            no tables; `sink` is not a sink; or a count is not an int.
        ValueError: an optimizer changes rows without a lookup; two tables have the same name; the
            evictions of a table are tracked already; `states` is set and a table is sharded by
            columns; collections are over different ranks; a count is too small, or differs between
            ranks; or `compact_every` is None and the sink has records.
        RuntimeError: the sink of another rank cannot be read.
        LogError: a record in the sink is damaged.
        OSError: the sink cannot be read; sinks may raise errors of other types.

    Example:
        >>> import tempfile
        >>> bags = emblib.DynamicEmbeddingBags(
        ...     [emblib.DynamicSpec(1_000, 8, name="item")], emblib.optim.SGD(0.1)
        ... )
        >>> served = emblib.inference.for_inference(bags, "int8")
        >>> sink = emblib.online.DirectorySink(tempfile.mkdtemp())
        >>> follower = emblib.online.LogFollower(served, sink)
        >>> ids, offsets = torch.tensor([2**62, -7]), torch.tensor([0, 1, 2])
        >>> with emblib.online.ChangeLog(bags, sink) as log:
        ...     bags(ids, offsets).sum().backward()
        ...     log.record(1)
        True
        >>> follower.apply()
        1
        >>> bool(torch.allclose(follower(ids, offsets), bags.eval()(ids, offsets), atol=1e-3))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        *,
        step: int = 0,
        states: bool = False,
        compact_every: int | None = 1000,
        max_pending: int = 8,
        when_full: WhenFull = WhenFull.BLOCK,
    ) -> None:
        check_bool("states", states)
        model_tables = _loggable_tables(model)
        self._ranks = ranks = model_tables.ranks
        self.step = check_count("step", step, minimum=0)
        if compact_every is not None:
            compact_every = check_count("compact_every", compact_every)
        self._compact_every, self._when_full = compact_every, WhenFull(when_full)
        max_pending = check_count("max_pending", max_pending)
        generation, sequence = agree(
            ranks,
            lambda: _read_last_numbers(check_sink(sink), compact_every),
            lambda _: {"the change log": {"step": step, "compact_every": compact_every}},
        )
        # Ranks that were killed may have written different numbers of snapshots.
        generation = max(ranks.gather_objects(generation))
        self._plain_changes = PlainChanges(model_tables, states=states)
        self._keyed_changes = KeyedChanges(model, states=states)
        self._writer = _Writer(sink, max_pending, generation, sequence)
        self._lookups = Lookups(model_tables)
        self._model, self._run = model, ""
        self._last_whole_step = self.step
        try:
            if compact_every is not None:
                self.snapshot(self.step)
            else:
                self._write_changes(RecordKind.DELTA, self.step)  # marks the first step of the log
        except BaseException:
            self.close()
            raise

    @property
    def run(self) -> str:
        """Return the id of the run: it names the records from the last snapshot to the next one.

        Tables that are frozen meanwhile keep it, see `LogFollower`. Each rank's log has its own.
        """
        return self._run

    @without_gradients
    def record(self, step: int) -> bool:
        """Log the rows that changed since the last entry, between training steps.

        Args:
            step: number of the training step that is complete, more than the step of the last
                entry. Ranks must log the same steps.

        Returns:
            True if there is an entry; False if the changes wait for the next one, see
            `WhenFull.MERGE`.

        Raises:
            ChangeLogError: an earlier entry could not be written, e.g. because the disk is full;
                this step's changes then wait for the next call.
            RuntimeError: tables made steps that the log has not seen, or were replaced; or the log
                is closed, or belongs to another process. Rows that a program writes are not
                noticed.
            TypeError: the step is not an int.
            ValueError: the step is not after the last one, or more keys left a dynamic table since
                the last entry than its record of evictions holds.
        """
        step = check_count("step", step, minimum=self.step + 1)
        self._writer.raise_error()
        every = self._compact_every
        is_due = every is not None and step // every > self._last_whole_step // every
        if self._when_full is WhenFull.MERGE and not is_due and self._writer.is_full():
            return False
        self._writer.wait_for_space()
        self._keyed_changes.check()
        self._lookups.check()
        self._write_changes(RecordKind.DELTA, step)
        if is_due:
            self._write_changes(RecordKind.COMPACTION, step)
        return True

    @without_gradients
    def snapshot(self, step: int) -> None:
        """Log all rows, which every follower then loads; the step may be before the last one.

        A follower of several ranks needs snapshots of the same step from all of them. The call
        waits while too many entries are pending, also with `WhenFull.MERGE`.

        Raises:
            ChangeLogError: an earlier entry could not be written.
            RuntimeError: the log is closed, or belongs to another process.
            TypeError, ValueError: the step is not an int >= 0.
        """
        step = check_count("step", step, minimum=0)
        self._writer.wait_for_space()
        self._write_changes(RecordKind.SNAPSHOT, step)

    def _write_changes(self, kind: RecordKind, step: int) -> None:
        """Append a record of the changes, or of all rows, as of a step.

        An interrupt after the record is queued leaves its changes to be recorded once more.
        """
        lookups = self._lookups if kind is RecordKind.DELTA else None
        changes = {**self._plain_changes.collect(lookups), **self._keyed_changes.collect(lookups)}
        begins_run = kind is RecordKind.SNAPSHOT or not self._run
        record = Record(
            kind=kind,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            generation=0,  # the writer numbers its records
            sequence=0,
            step=step,
            time=time.time(),
            tables=changes,
            run=secrets.token_hex(8) if begins_run else "",  # the writer repeats it in others
        )
        self._writer.put(record)
        if begins_run:  # an interrupt leaves tables with the run before, which followers can tell
            end_log_run(self._model, self._run)
            begin_log_run(self._model, record.run)
            self._run = record.run
        self.step = step
        if lookups is None:
            self._last_whole_step = step
        self._lookups.commit()
        self._keyed_changes.commit()

    def flush(self) -> None:
        """Wait until all entries are written.

        Raises:
            ChangeLogError: an entry could not be written.
            RuntimeError: the log is closed, or belongs to another process.
        """
        self._writer.flush()

    def close(self) -> None:
        """Write the pending entries, end the log and close the sink; the model may go on training.

        In a forked process the log of its parent goes on.

        Raises:
            ChangeLogError: an entry could not be written; `close` may be called again.
            Exception: the sink could not be closed; `close` may be called again.
        """
        self._writer.close()
        end_log_run(self._model, self._run)
        self._lookups.close()
        self._keyed_changes.close()

    def __enter__(self) -> "ChangeLog":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _read_last_numbers(sink: Sink, compact_every: int | None) -> tuple[int, int]:
    """Return generation and sequence of the last record in a sink; (0, 0) if it is empty.

    Reads the whole sink.

    Raises:
        ValueError: it has records, and the log has no `compact_every`.
    """
    newest_records = deque(sink.read(), maxlen=1)
    if not newest_records:
        return 0, 0
    if compact_every is None:
        raise ValueError(
            "the sink has the records of another log, which a snapshot must follow: choose "
            "compact_every, or an empty sink"
        )
    record = decode(newest_records[0].data, newest_records[0].location)
    return record.generation, record.sequence


def _loggable_tables(model: nn.Module) -> ModelTables:
    """Return the tables of a model on this rank, which rows can describe.

    Raises:
        TypeError, ValueError: see `ChangeLog`.
    """
    if any(isinstance(module, ReplicatedModelParallel) for module in model.modules()):
        raise TypeError(
            "ReplicatedModelParallel changes all rows when it averages its replicas: log "
            "DistributedModelParallel, or freeze() the tables from time to time"
        )
    model_tables = find_tables(model)
    if model_tables.other_kinds:
        raise TypeError(
            f"a change log has rows, and these tables change as a whole with every step: "
            f"{model_tables.other_kinds}; freeze() them from time to time, or train Dense or Hash "
            "tables"
        )
    if not model_tables.calls and model_tables.ranks.size == 1:
        raise TypeError(f"{type(model).__name__} has no tables of emblib that are trained")
    _check_names(model_tables.tables, tables_of(model))
    return model_tables


def _check_names(tables: Sequence[PlainTable], keyed_names: Collection[str]) -> None:
    """Raise ValueError for a name of two tables.

    Shards of one table have one name, but differ in their first row or column. A table by row
    number and a dynamic one must not have the same name.
    """
    blocks = [(table.name, table.first_row, table.first_column) for table in tables]
    repeated_names = sorted(
        {block[0] for block in blocks if blocks.count(block) > 1}
        | ({table.name for table in tables} & set(keyed_names))
    )
    if repeated_names:
        raise ValueError(
            f"tables in a change log must differ in name, and there are several {repeated_names}: "
            "rename them, or make a log of each collection"
        )


class _Writer:
    """The thread that writes records, and the queue of records to write.

    `_lock` guards the queue and the error. It is entered itself, because `Condition.__enter__` is
    Python: Ctrl-C within it would leave the lock taken. Only the thread calls the sink until it has
    ended. It numbers the records, too, after those that the sink has: no interrupt of the caller
    comes between a record and its number.
    """

    def __init__(self, sink: Sink, max_pending: int, generation: int, sequence: int) -> None:
        self._sink, self._max_pending = sink, max_pending
        self._generation, self._sequence = generation, sequence  # of the last record written
        self._run_id = ""
        self._queue: deque[Record] = deque()
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._error: Exception | None = None  # the thread waits until `raise_error` clears it
        self._is_closing = self._is_closed = False
        self._process = os.getpid()
        self._last_whole_position: str | None = None
        self._thread = threading.Thread(target=self._run, name="emblib change log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Write the queued records, in the writer's thread."""
        while True:
            with self._lock:
                self._condition.wait_for(
                    lambda: self._is_closing or (self._queue and self._error is None)
                )
                if not self._queue:
                    return
                record = self._queue[0]
            try:
                self._write(record)
            except Exception as error:
                with self._lock:
                    self._error = error
                    self._condition.notify_all()
                continue
            with self._lock:
                self._queue.popleft()
                self._condition.notify_all()

    def _write(self, record: Record) -> None:
        """Append a record; after a whole one, drop the records before the previous whole one.

        A record that is written again after an error has the same numbers. The first run of a sink
        is generation 1, also if it begins without a snapshot.
        """
        generation, run = self._generation + bool(record.run), record.run or self._run_id
        sequence = self._sequence + 1
        numbered_record = record._replace(generation=generation, sequence=sequence, run=run)
        position = self._sink.append(encode(numbered_record), starts_segment=record.is_whole)
        if record.is_whole:
            if self._last_whole_position is not None:
                self._sink.trim(self._last_whole_position)
            self._last_whole_position = position
        self._generation, self._sequence, self._run_id = generation, sequence, run

    @property
    def is_forked(self) -> bool:
        """Return whether this is the copy of a forked process."""
        return os.getpid() != self._process

    def raise_error(self) -> None:
        """Raise ChangeLogError if the thread has failed, and let it try again.

        Raises:
            ChangeLogError: the thread could not write a record.
            RuntimeError: the log is closed, or of another process.
        """
        if self.is_forked:
            raise RuntimeError(
                "the change log belongs to the process that made it, whose thread writes it: a "
                "forked process has no such thread; make a log there, for another sink"
            )
        if self._is_closing:
            raise RuntimeError("the change log is closed: make another one for the same sink")
        with self._lock:
            error, self._error = self._error, None
            num_waiting = len(self._queue)
            self._condition.notify_all()
        if error is not None:
            raise ChangeLogError(
                f"the change log could not write an entry: {type(error).__name__}: {error}. It "
                f"keeps {num_waiting} entries in memory and tries again from now on: mend the "
                "cause, e.g. a full disk, then repeat this call"
            ) from error

    def is_full(self) -> bool:
        """Return whether another record must wait."""
        with self._lock:
            return len(self._queue) >= self._max_pending

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()` or an error of the thread; raise as `raise_error`."""
        if not self.is_forked:
            with self._lock:
                self._condition.wait_for(lambda: is_done() or self._error is not None)
        self.raise_error()

    def wait_for_space(self) -> None:
        """Wait until the queue has fewer than the maximum of records."""
        self._wait_until(lambda: len(self._queue) < self._max_pending)

    def put(self, record: Record) -> None:
        """Add a record to the queue, also if it is full."""
        with self._lock:
            self._queue.append(record)
            self._condition.notify_all()

    def flush(self) -> None:
        """Wait until the queue is empty."""
        self._wait_until(lambda: not self._queue)

    def close(self) -> None:
        """Write all records, end the thread, and close the sink; do nothing if it is closed.

        After an error it may be called again. A forked process only closes its handles of the sink.
        """
        if self.is_forked:
            self._sink.close()
            return
        if self._is_closed:
            return
        if not self._is_closing:
            self.flush()
        with self._lock:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        self._sink.close()
        self._is_closed = True
