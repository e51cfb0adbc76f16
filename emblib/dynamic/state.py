"""DynamicState: keys, rows, admission, eviction and backing store of dynamic tables.

A `DynamicEmbeddingBags` owns one state and looks rows up in it. Everything else is a function of
the state: queries and settings are here, `training` inserts the keys of batches, and `saving` has
checkpoints. `@of_state` makes such a function accept the module too, so it can be a method of it.
For an unknown name or number of a table such a function raises KeyError or IndexError, and
TypeError for a table that is neither a name nor an int.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from emblib.columns import HashEntryColumn
from emblib.dynamic.admission import Admission
from emblib.dynamic.eviction import EvictionLog, EvictionScores, Expiry
from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.dynamic.keys import LastBatch, as_keys, status_by_position
from emblib.dynamic.last_uses import LastUses, check_features
from emblib.dynamic.rows import BatchReads, RowInitializer, RowLayout, TrainingUpdate
from emblib.dynamic.statistics import StatisticsCollector, TableStatistics
from emblib.dynamic.tiers.backing_tier import BackingTier
from emblib.dynamic.tiers.store import TierStats
from emblib.grad_mode import in_grad_mode
from emblib.ops.autograd import updates_in_backward
from emblib.ops.hash import Keys
from emblib.optim import Optimizer
from emblib.specs import SLOTS_PER_BUCKET, DynamicSpec, OnInsertFailure, Precision, check_count
from emblib.tables import hyperparameters
from emblib.tables.changes import CompletingLock

_P = ParamSpec("_P")
_R = TypeVar("_R")
_INT64_MIN = -(2**63)


def no_owner() -> None:
    """Return None: a state without a module, e.g. of a copy."""


class StepBudget(Protocol):
    """The part of an `emblib.MemoryBudget` that a state uses."""

    def begin_step(self, state: DynamicState) -> None:
        """Shrink tables whose memory others need, before the keys of a batch are inserted."""


class DynamicState:
    """T tables of rows by key.

    A new state has no keys, and every table has the rows of its initial capacity in use.

    Args:
        specs: capacity, dim and rules of each table.
        names: the name of each table.
        optimizer: the optimizer, whose states each row has.
        precision: dtypes of weights and states.
        seed: the seed of the first values of rows.
        hash_keys: hash key of each table, see `emblib.dynamic.keys`; None is 0 for all.
        device: the device of the tables.
        overflow_rows: extra rows per table, in which rows of a backing store are served.
        feature_tables: the table of each feature of a batch; None is one feature per table.

    Attributes:
        specs: argument `specs`, as a tuple.
        table_names: name of each table, by number.
        optimizer_name: name of the optimizer, which stores in files are checked against.
        index: the keys and their slots.
        layout: the location of the rows of each table in the row buffers.
        weights: the first row buffer, flat or `[rows, dim]`; a parameter if a module owns the
            state.
        optimizer_states: the other row buffers, flat.
        byte_layout: int64 `[T, P, 2]`, first byte and bytes per row, see `RowBuffers.layout`.
        hyperparams: hyperparameters of the optimizer, float64 `[n]`.
        row_initializer: initializer of new rows.
        admission: rule for inserting missing keys; None admits all.
        scores: the eviction scores of the next batch; None if eviction assigns none.
        expiry: choice of the keys that expire; None without `ttl`.
        last_uses: last uses by features with a longer ttl; None if no table has several ttls.
        eviction_log: the keys that left; None until `track_evictions`.
        reports_failures: whether a table warns or raises when keys find no slot.
        leaves_gradient: whether backward leaves gradients for a later step. Those of a row are
            dropped when a new key gets the row.
        on_new_rows: functions that are called with the indices, over all tables, of rows that got
            new keys, after their initial values are written; a copy has none.
        backing: the backing tier; None without a store.
        statistics: counts of insertions; None until `track_statistics`.
        budget: the memory budget that limits the tables; None without one; a copy has none.
        last_batch: slots and status of the keys of the last training batch.
        dropped_updates: int64 `[1]`, lookups whose keys left before their backward.
        owner: weak reference to the module, whose optimizer follows loaded hyperparameters.
        lock: the lock around all changes.
    """

    weights: Tensor
    optimizer_states: list[Tensor]
    hyperparams: Tensor
    byte_layout: Tensor
    dropped_updates: Tensor

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        names: Sequence[str],
        optimizer: Optimizer,
        precision: Precision | None = None,
        *,
        seed: int = 0,
        hash_keys: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        overflow_rows: int = 0,
        feature_tables: Sequence[int] | None = None,
    ) -> None:
        feature_tables = range(len(specs)) if feature_tables is None else feature_tables
        check_features(specs, feature_tables)
        device = torch.empty(0, device=device).device
        precision = Precision() if precision is None else precision
        self.specs, self.optimizer_name = tuple(specs), optimizer.name
        self.layout = RowLayout(self.specs, names, optimizer.states, precision, overflow_rows)
        self.table_names = self.layout.table_names
        self.index = HashIndex(self.specs, device, hash_keys)
        self.weights, *self.optimizer_states = self.layout.allocate(device)
        self.byte_layout = self.layout.byte_layout(device)
        self.hyperparams = optimizer.hyperparams(device)
        self.dropped_updates = torch.zeros(1, dtype=torch.int64, device=device)
        self.row_initializer = RowInitializer(self.layout, seed, device)
        has_admission = any(spec.admission is not None for spec in self.specs)
        self.admission = (
            Admission(self.specs, device, hash_keys, feature_tables) if has_admission else None
        )
        has_scores = self.index.order == "assigned"
        self.scores = EvictionScores(self.specs, device) if has_scores else None
        has_ttl = any(spec.lifetimes[0] is not None for spec in self.specs)
        self.expiry = Expiry(self.specs) if has_ttl else None
        has_levels = any(len(spec.lifetimes) > 1 for spec in self.specs)
        self.last_uses = LastUses(self.specs, feature_tables, device) if has_levels else None
        self.eviction_log: EvictionLog | None = None
        reactions = {spec.on_insert_failure for spec in self.specs}
        self.reports_failures = not reactions <= {OnInsertFailure.IGNORE}
        self.leaves_gradient = not updates_in_backward(optimizer)
        self.on_new_rows: list[Callable[[Tensor], None]] = []
        self.backing: BackingTier | None = None
        self.statistics: StatisticsCollector | None = None
        self.budget: StepBudget | None = None
        self.last_batch: LastBatch | None = None
        self.owner: Callable[[], hyperparameters.HasHyperparams | None] = no_owner
        self.lock = CompletingLock()
        self.advise_initial_rows()
        self.row_initializer.write_fallback_(self.row_buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles without its memory, which the owner copies."""
        memory = ("weights", "optimizer_states", "byte_layout", "hyperparams", "dropped_updates")
        state = {name: value for name, value in self.__dict__.items() if name not in memory}
        if self.last_uses is not None:
            state["last_uses"] = self.last_uses.only_in_use(self.capacities())
        return {**state, "last_batch": None, "owner": no_owner, "on_new_rows": []}

    @property
    def row_buffers(self) -> list[Tensor]:
        """Return weights and optimizer states as flat tensors, by slot; see `RowLayout`."""
        return [self.weights.detach().view(-1), *self.optimizer_states]

    def slot_rows(self) -> RowBuffers:
        """Return the rows that the index moves when a table grows."""
        if self.last_uses is None:
            return RowBuffers(self.row_buffers, self.byte_layout, self._advise_growth)
        layout = torch.cat([self.byte_layout, self.last_uses.layout], dim=1)
        return RowBuffers([*self.row_buffers, self.last_uses.buffer], layout, self._advise_growth)

    def moved_bytes(self, table: int) -> int:
        """Return the bytes per row that move with its slot, such as weights and states."""
        return int(self.slot_rows().layout[table, :, 1].sum())

    def _advise_growth(self, table: int, rows_before: int, rows_now: int) -> None:
        """Request huge pages for rows that a table starts to use."""
        self.layout.advise_growth(self.row_buffers, table, rows_before, rows_now)

    def advise_initial_rows(self) -> None:
        """Request huge pages for the rows of the initial capacities."""
        for t, spec in enumerate(self.specs):
            self._advise_growth(t, 0, spec.buckets * SLOTS_PER_BUCKET)

    def child_modules(self) -> dict[str, nn.Module]:
        """Return the modules of the state by their names in state dicts."""
        children = {
            "index": self.index,
            "row_initializer": self.row_initializer,
            "admission": self.admission,
            "scores": self.scores,
            "expiry": self.expiry
            if self.expiry is not None and self.expiry.has_timed_ttls
            else None,
        }
        return {name: child for name, child in children.items() if child is not None}

    def table_number(self, table: int | str) -> int:
        """Return the number of a table that is given by number or name, see `RowLayout`."""
        return self.layout.table_number(table)

    def table_rows(self, table: int | str) -> dict[str, Tensor]:
        """Return views of a table's rows by slot: `weight` `[rows, dim]` and optimizer states.

        Rows of empty slots are unspecified; views are invalid once the module moves.
        """
        return self.layout.views(self.row_buffers, self.table_number(table))

    def capacities(self) -> list[int]:
        """Return the number of rows in use of each table (reads the device)."""
        return [self.index.capacity(t) for t in range(len(self.specs))]

    def keys_of(self, table: int | str, ids: Tensor) -> Keys:
        """Return ids of one table, int64, uint64 or int32 `[n]`, as a batch on the device.

        Raises:
            TypeError: the ids have another dtype.
        """
        return Keys.from_ids(as_keys(ids).to(self.index.tags.device), self.table_number(table))

    def update_of(self, keys: Keys, slots: Tensor, reads: BatchReads) -> TrainingUpdate:
        """Return the hooks for the backward of a lookup that found `keys` at `slots`."""
        lock, dropped_updates, backing = self.lock, self.dropped_updates, self.backing
        return TrainingUpdate(lock, self.index, keys, slots, reads, dropped_updates, backing)

    def check_hyperparams(self, values: Tensor) -> None:
        """Raise ValueError for numbers that the optimizer cannot have."""
        if (module := self.owner()) is not None:
            hyperparameters.with_saved_hyperparams(module.optimizer, values)

    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams` with saved values.

        Raises:
            ValueError: the optimizer cannot have the numbers; nothing is changed.
        """
        if (module := self.owner()) is not None:
            hyperparameters.set_fields_from_hyperparams(module, values)
        in_grad_mode(self.hyperparams.copy_, enabled=False)(values)

    def copy_policy_state(
        self,
        table: int,
        source: DynamicState,
        source_table: int,
        is_owned: Callable[[Tensor], Tensor],
    ) -> None:
        """Copy the state of a table's policies from the table that its entries were copied from.

        That is the clock and the times of use, the score of the next batch, and the counts of
        admission.

        Args:
            table: number of this table.
            source: the other state.
            source_table: number of the table there.
            is_owned: function that returns which keys, int64 `[n]`, this table has, bool `[n]`;
                only their counts are copied.
        """
        if self.expiry is not None and source.expiry is not None:
            self.expiry.copy_times(table, source.expiry, source_table)
        if self.scores is not None and source.scores is not None:
            self.scores.copy_scores(table, source.scores, source_table)
        if self.admission is not None and source.admission is not None:
            self.admission.copy_counts(table, source.admission, source_table, is_owned)

    def record_evictions(self, table: int, keys: Tensor) -> None:
        """Record keys that left a table in this step, if evictions or a backing store need it."""
        if self.backing is not None and keys.numel():
            self.index.versions.note_removed(table, keys)
        if self.eviction_log is not None:
            self.eviction_log.record(table, keys, self.index.tick)

    def restart_eviction_log(self) -> None:
        """Clear the eviction log, if there is one, after the tables were replaced."""
        if self.eviction_log is not None:
            self.eviction_log.restart(self.index.tick)

    def complete(
        self, change: Callable[[], _R], is_optional: Callable[[], bool] = lambda: True
    ) -> _R:
        """Make a change of the tables, see `CompletingLock.complete`.

        The moves of the last step are made first, so that their errors are raised before the change
        begins.
        """
        if self.backing is not None:
            self.backing.move_rows()
        return self.lock.complete(change, is_optional)


class StateOwner(Protocol):
    """A module that owns the state of its tables."""

    state: DynamicState


def of_state(
    function: Callable[Concatenate[DynamicState, _P], _R],
) -> Callable[Concatenate[DynamicState | StateOwner, _P], _R]:
    """Make a function of a state hold its lock, and accept the state's owner instead."""

    @functools.wraps(function)
    def call(owner: DynamicState | StateOwner, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        state = owner if isinstance(owner, DynamicState) else owner.state
        # On one line, as in `emblib.tables.locks.atomic`.
        with state.lock: return function(state, *args, **kwargs)  # fmt: skip  # noqa: E701

    return call


# Tables and keys


@of_state
def size(state: DynamicState, table: int | str) -> int:
    """Return the number of keys of a table, in both tiers (reads the device).

    With a backing store, pending moves and updated overflow rows are written to it first.
    """
    table = state.table_number(table)
    if state.backing is None:
        return state.index.size(table)
    state.backing.write_back()
    return state.index.size(table) + state.backing.store.size(table)


@of_state
def capacity(state: DynamicState, table: int | str) -> int:
    """Return the number of rows that a table uses now; it grows with its keys (reads the device).

    Rows in a backing store do not count.
    """
    return state.index.capacity(state.table_number(table))


@of_state
def find(state: DynamicState, table: int | str, ids: Tensor) -> Tensor:
    """Return the row of each id in `table_rows(table)`, int64 `[n]` on the device, -1 for none.

    Rows are valid until the next training forward or other change of the tables. Ids in the backing
    store have no row. Ids are int64, uint64 or int32 `[n]` on any device; other dtypes raise
    TypeError.
    """
    return state.index.find(state.keys_of(table, ids))


@of_state
def contains(state: DynamicState, table: int, ids: Tensor) -> Tensor:
    """Return which ids, int64 `[n]` on the CPU, are in a table, in any tier; bool `[n]` there."""
    is_present = state.index.find(state.keys_of(table, ids)).cpu() >= 0
    if state.backing is not None:
        is_present |= ~torch.isin(ids, state.backing.absent_keys(table, ids))
    return is_present


@of_state
def reserve(state: DynamicState, table: int | str, rows: int) -> None:
    """Grow a table to the size that `rows` keys need, at most to its capacity.

    In a memory budget, it grows as far as the budget has room.

    Raises:
        TypeError: `rows` is not an int.
        ValueError: `rows` is negative.
    """
    rows = check_count("rows", rows, minimum=0)
    state.index.reserve(state.table_number(table), rows, state.slot_rows())


@of_state
def key_status(state: DynamicState) -> Tensor:
    """Return the `KeyStatus` of each id of the last training forward, uint8 `[L]` on the device.

    Raises RuntimeError if there was none.
    """
    return status_by_position(_last_batch(state).inserted)


@of_state
def status_of(state: DynamicState, table: int | str, ids: Tensor) -> Tensor:
    """Return the `KeyStatus` of ids in the last training forward, uint8 `[n]` on the CPU.

    Ids that were not in that batch are `KeyStatus.ABSENT`.

    Raises:
        RuntimeError: there was no training forward, or its ids were overwritten since.
    """
    return _last_batch(state).status_of(state.table_number(table), as_keys(ids).cpu())


def _last_batch(state: DynamicState) -> LastBatch:
    """Return the last training batch; raise RuntimeError if there was none."""
    if state.last_batch is None:
        raise RuntimeError(
            "key_status is that of the last training forward, and there was none; call the "
            "module in training mode, with gradients enabled, first"
        )
    return state.last_batch


# Counts


@of_state
def stats(state: DynamicState) -> dict[str, dict[str, int]]:
    """Return counts by table since `reset_stats`, see `emblib.ops.hash.COUNTERS`.

    Reads the device.
    """
    return dict(zip(state.table_names, state.index.stats(), strict=True))


@of_state
def tier_stats(state: DynamicState) -> dict[str, TierStats]:
    """Return counts of both tiers by table since `reset_stats`; {} without a backing store.

    Pending moves and updated overflow rows are written to the store first.
    """
    if state.backing is None:
        return {}
    state.backing.write_back()
    return state.backing.stats()


@of_state
def track_statistics(state: DynamicState, *, remember: int = 0) -> None:
    """Count from now on ages of evicted keys, keys that return, and lookups without a row.

    A `CapturedStep` whose graph was captured before does not count them until its `reset`.

    Args:
        state: the tables.
        remember: number of evicted keys per table to remember, 8 bytes each, in order to count how
            many return; rounded up to a power of two, at least 64. Another number than before
            restarts the counts; 0 remembers none.

    Raises:
        ValueError: `remember` is negative or more than 2^40.
        TypeError: `remember` is not an int.
    """
    collector = state.statistics
    if collector is None or collector.remember != remember:
        state.statistics = StatisticsCollector(len(state.specs), remember)


@of_state
def statistics(state: DynamicState, table: int | str) -> TableStatistics:
    """Return the numbers of a table since `reset_stats` (reads the device)."""
    table = state.table_number(table)
    index, rows = state.index, state.index.capacity(table)
    counts: dict[str, Any] = {**index.stats()[table]}
    if state.statistics is not None:
        counts |= state.statistics.read()[table]._asdict()
    row_bytes = state.moved_bytes(table) + index.nbytes() // sum(state.capacities())
    return TableStatistics(
        step=index.tick,
        keys=index.size(table),
        rows=rows,
        capacity=state.specs[table].rows,
        nbytes=rows * row_bytes + state.specs[table].fallback_rows * state.layout.row_bytes(table),
        tiers=tier_stats(state).get(state.table_names[table]),
        **counts,
    )


@of_state
def bucket_fill(state: DynamicState, table: int | str) -> list[int]:
    """Return how many buckets of a table have 0, 1, ... 32 keys (reads the device)."""
    tags = state.index.table_tags(state.table_number(table))
    num_keys = (tags != 0).view(-1, SLOTS_PER_BUCKET).sum(1)
    num_buckets: list[int] = num_keys.bincount(minlength=SLOTS_PER_BUCKET + 1).tolist()
    return num_buckets


@of_state
def reset_stats(state: DynamicState) -> None:
    """Set the counts of `stats`, `tier_stats` and `statistics` to zero.

    Remembered evicted keys stay.
    """
    state.index.reset_stats()
    if state.backing is not None:
        state.backing.reset_stats()
    if state.statistics is not None:
        state.statistics.reset()


@of_state
def nbytes(state: DynamicState) -> dict[str, int]:
    """Return the bytes in use of `weights`, `optimizer_state` and `index`, over all tables.

    Fallback rows are included, and last uses in `index`; overflow rows are not. Reads the device.
    """
    weights, *states = state.layout.nbytes(state.capacities())
    index = state.index.nbytes()
    if state.last_uses is not None:
        index += state.last_uses.nbytes(state.capacities())
    return {"weights": weights, "optimizer_state": sum(states), "index": index}


# Eviction


@of_state
def track_evictions(state: DynamicState, max_keys: int = 1 << 24) -> EvictionLog:
    """Record from now on which keys leave and when; return the log.

    Beyond `max_keys` per table the oldest are dropped. If evictions are tracked already, the
    existing log is returned, and `max_keys` has no effect.

    Raises:
        TypeError: `max_keys` is not an int.
        ValueError: `max_keys` is below 1.
        Exception: the backing store raised it.
    """
    if state.eviction_log is None:
        if state.backing is not None:  # no thread may move rows while there is a log
            state.backing.move_rows()
        state.eviction_log = EvictionLog(len(state.specs), state.index.tick, max_keys)
    state.eviction_log.is_returned = True
    return state.eviction_log


@of_state
def set_eviction_score(
    state: DynamicState, score: int | Mapping[int, int] | Mapping[str, int]
) -> None:
    """Set the score that `Eviction.CUSTOM` tables assign from the next training forward on.

    Keys used by a batch get its score; keys with the lowest scores are evicted first.

    Args:
        state: the tables.
        score: an int64 for all those tables, or by number or name of the table.

    Raises:
        KeyError, IndexError: there is no such table.
        ValueError: its eviction is another, or the score is not an int64.
        TypeError: the score is not an int.
    """
    if state.scores is None:
        raise ValueError("scores are set for tables with Eviction.CUSTOM, and no table has it")
    if isinstance(score, Mapping):
        score = {state.table_number(table): value for table, value in score.items()}
    state.scores.set_custom(score)


@of_state
def set_eviction_step(state: DynamicState, table: int | str, step: int) -> None:
    """Set the step that a table with `Eviction.STEP` assigns to its next batch.

    Raises:
        KeyError, IndexError: there is no such table.
        ValueError: its eviction is another, or the step is not in [-2^63, 2^62).
        TypeError: the step is not an int.
    """
    if state.scores is None:
        raise ValueError("steps are counted by tables with Eviction.STEP, and no table has it")
    state.scores.set_steps({state.table_number(table): step})


@of_state
def eviction_score(state: DynamicState, table: int | str) -> int | None:
    """Return the score that a table assigns to its next batch; None without one.

    Reads the device.
    """
    table_number = state.table_number(table)
    return None if state.scores is None else state.scores.by_table()[table_number]


@of_state
def assign_key_scores(state: DynamicState, table: int, keys: Tensor, scores: Tensor) -> Tensor:
    """Set the scores of keys, in either tier; return which are present, bool `[n]` on the CPU.

    Keys and scores are int64 `[n]`. A key that occurs more than once gets its largest score.

    Raises:
        ValueError: eviction from the table is not by assigned scores.
    """
    eviction = state.specs[table].eviction
    if eviction.order != "assigned":
        raise ValueError(
            f"table {state.table_names[table]!r} evicts by {eviction.value}, and keys are given "
            "scores where eviction is CUSTOM or STEP"
        )
    distinct_keys, key_of_position = keys.cpu().unique(return_inverse=True)
    max_scores = torch.full_like(distinct_keys, _INT64_MIN)
    max_scores.scatter_reduce_(0, key_of_position, scores.cpu(), "amax")
    slots = state.index.find(state.keys_of(table, distinct_keys))
    is_fast = slots >= 0
    state.index.forget_queues(table, slots[is_fast])
    entries = state.index.table_entries(table)
    entries[slots[is_fast], HashEntryColumn.SCORE] = max_scores.to(slots.device)[is_fast]
    is_present = is_fast.cpu()
    if state.backing is not None:
        is_absent = ~is_present
        is_present[is_absent] = state.backing.assign_scores(
            table, distinct_keys[is_absent], max_scores[is_absent]
        )
    return is_present[key_of_position]


# Expiry


def _timed_expiry(state: DynamicState) -> Expiry:
    """Return the expiry by time; raise ValueError if no ttl is a time."""
    if state.expiry is None or not state.expiry.has_timed_ttls:
        raise ValueError(
            f"the tables {state.table_names} have no ttl that is a time: a clock and pauses have "
            "no effect; give one DynamicSpec(ttl=datetime.timedelta(...))"
        )
    return state.expiry


def check_clock(clock: object) -> None:
    """Raise TypeError unless a clock is a function."""
    if not callable(clock):
        raise TypeError(f"a clock is a function that returns seconds, got {clock!r}")


@of_state
def set_clock(state: DynamicState, clock: Callable[[], float]) -> None:
    """Set the clock by which keys expire where `ttl` is a time; `time.time` by default.

    Args:
        state: the tables.
        clock: function that returns the time in seconds. If it is set back, keys look younger, but
            never older. Copies of the module and pickles have it too, so pickles need a function
            that can be imported, no lambda.

    Raises:
        ValueError: no table has a ttl that is a time.
        TypeError: the clock is not a function.
    """
    check_clock(clock)
    _timed_expiry(state).clock = clock


@of_state
def skip_pause(state: DynamicState, duration: timedelta | None = None) -> None:
    """Leave a pause out of the ages of keys where `ttl` is a time, e.g. after a restart.

    Args:
        state: the tables.
        duration: the length of the pause; None is the time since the last training forward.

    Raises:
        ValueError: no table has a ttl that is a time, the pause is negative, or the clock returned
            a number that is not a time.
        TypeError: the pause is not a `datetime.timedelta`.
        Exception: the clock raised it.
    """
    if duration is not None and not isinstance(duration, timedelta):
        raise TypeError(f"a pause is a datetime.timedelta, or None, got {duration!r}")
    if duration is not None and duration < timedelta(0):
        raise ValueError(f"a pause must not be negative, got {duration}")
    _timed_expiry(state).skip_pause(duration)


# The backing store


@of_state
def flush(state: DynamicState) -> None:
    """Commit both tiers to the backing store, if there is one, and wait until that is done."""
    if state.backing is not None:
        state.backing.flush()


@of_state
def close(state: DynamicState) -> None:
    """Close the backing store, if there is one; changes since the last flush are lost.

    Do not use the module then: calls that need the store raise an exception of the store, except
    with a `HostRows`. Another module with the same tables may open the store. A `HostRows` keeps
    its rows, but not those of the fast tier, and the other module counts training steps on from the
    newest of them.
    """
    if state.backing is not None:
        state.backing.store.close()
