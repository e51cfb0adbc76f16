"""Batches of dynamic tables whose keys one op finds or inserts, on the CPU.

`insert_in_one_op` makes a training step of `emblib.dynamic.training`; if keys are admitted, another
op finds the missing ones before. `find_in_one_op` makes the search of a lookup that inserts
nothing. Both return None for batches with invalid offsets and others that the op declines; the
callers then use several ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from emblib.dynamic.admission import Admission, MissingKeys
from emblib.dynamic.rows import BatchReads
from emblib.dynamic.state import DynamicState, LastBatch
from emblib.dynamic.sweeps import StepExpiry
from emblib.dynamic.tiers.placements import OneOpPlacement
from emblib.dynamic.training import report_failures
from emblib.grad_mode import without_gradients
from emblib.ops import codes, hash, tiers
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, InsertResult, Keys, Misses
from emblib.ops.tbe import Groups
from emblib.tables.parameters import version_of

_NUM_RESULTS_OF_SEARCH = 3  # offsets, starts and slots
# Results of `hash_insert_batch_` without misses: these, then the groups.
_NUM_RESULTS_OF_HITS = _NUM_RESULTS_OF_SEARCH + len(Groups._fields)
_NUM_MISS_FIELDS = len(Misses._fields) + len(InsertResult._fields)  # its last results, on demand


class OneOpBatch(NamedTuple):
    """A batch whose keys one op found or inserted.

    Attributes:
        keys: the batch.
        offsets: int32 `[F * B + 1]`, the offsets of its bags.
        slots: int64 `[L]`, the row of each key, -1 for none: a slot, an overflow or fallback row.
        reads: rows that the lookups read.
        groups: the lookups by row, the fields of `emblib.ops.tbe.Groups` without their order and
            padding; None if the op only found the keys, and if some lookups read fallback rows.
    """

    keys: Keys
    offsets: Tensor
    slots: Tensor
    reads: BatchReads
    groups: list[Tensor] | None


def can_insert_in_one_op(state: DynamicState) -> bool:
    """Return whether one op can insert batches, after the admission of their missing keys."""
    return (
        (state.admission is None or _can_admit(state))
        and can_find_in_one_op(state)
        and (state.backing is None or not _records_misses(state))
        and state.last_uses is None
        and state.budget is None
        and not state.on_new_rows
    )


def _can_admit(state: DynamicState) -> bool:
    """Return whether an admission needs nothing but the missing keys of a batch."""
    return state.backing is None and not state.row_initializer.draws_unadmitted


def _records_misses(state: DynamicState) -> bool:
    """Return whether something must know which keys a batch inserted, evicted or refused."""
    return state.eviction_log is not None or state.statistics is not None or state.reports_failures


def can_find_in_one_op(state: DynamicState) -> bool:
    """Return whether one op can find the keys of a batch, also those in a backing store."""
    return state.backing is None or (state.backing.is_readable_by_ops and state.expiry is None)


class OneOpArguments(NamedTuple):
    """Arguments of the ops on batches that all batches share, until tensors are replaced.

    Attributes:
        row_buffers: weights and optimizer states of a state, flat.
        features: int64 `[F, 8]`, see `emblib.columns.FeatureColumn`.
        tables: int64 `[F]`, the table of each feature.
        policy_codes: numbers of the eviction order and insert policy, see `emblib.ops.codes`.
        initial_values: layout, rules and seed of new rows, see `RowInitializer.arguments`.
        fallback: int64 `[T, 2]`, the first fallback row of each table and the number of them; None
            if no table has any.
    """

    row_buffers: list[Tensor]
    features: Tensor
    tables: Tensor
    policy_codes: tuple[int, int]
    initial_values: tuple[Tensor, Tensor, int]
    fallback: Tensor | None

    @classmethod
    def from_state(cls, state: DynamicState, features: Tensor, tables: Tensor) -> OneOpArguments:
        """Return the arguments of a state for batches of these features."""
        index = state.index
        return cls(
            state.row_buffers,
            features,
            tables,
            (codes.HASH_ORDER[index.order], codes.INSERT_POLICY[index.insert_policy]),
            state.row_initializer.arguments(),
            state.row_initializer.fallback if state.layout.has_fallback else None,
        )


def insert_in_one_op(
    state: DynamicState, arguments: OneOpArguments, ids: Tensor, offsets: Tensor
) -> OneOpBatch | None:
    """Insert a training batch in one op, or two with admission; return None if they cannot.

    Then no key has changed.

    Gradients may be enabled: the row buffers are detached, and no other tensor requires a gradient.

    Args:
        state: the tables, whose lock this thread holds; `can_insert_in_one_op` must hold.
        arguments: arguments of the state.
        ids: int64 `[L]`, contiguous.
        offsets: int32 or int64 `[F * B + 1]`; None is returned if they are invalid.

    Raises:
        RuntimeError: a table has no score for its keys; nothing is changed.
        ValueError: the clock returned a number that is not a time; nothing is changed. Or an
            admission rule returned something other than one bool per key; see `Admission.admit`.
        Exception: the backing store, the clock or an admission rule raised it.
    """
    # Raises before anything is changed.
    scores = None if state.scores is None else state.scores.batch_scores()
    expiry = None if state.expiry is None else StepExpiry(state, state.expiry)
    index, backing, effects = state.index, state.backing, Effects()
    recording = _Recording() if _records_misses(state) else None
    if backing is not None:  # raises errors of the last step's moves before this one begins
        backing.move_rows()
    op = hash.hash_insert_batch_ if backing is None else tiers.tier_insert_batch_
    placement: OneOpPlacement | None = None

    def insert() -> OneOpBatch | None:
        nonlocal placement
        if expiry is not None:
            expiry.set_time()
        effects.restart()
        index.begin_insertion(effects)
        batch = (arguments.features, ids, offsets, arguments.tables, scores)
        last_arguments = _last_arguments(state, arguments, batch, effects)
        if last_arguments is None:
            return None
        results = effects.call_once(
            op,
            index.tensors(),
            arguments.row_buffers,
            *batch,
            *arguments.policy_codes,
            *arguments.initial_values,
            *last_arguments,
        )
        if not results:
            return None
        offsets32, starts, slots, *groups = results[:_NUM_RESULTS_OF_HITS]
        miss_results = results[_NUM_RESULTS_OF_HITS:]
        keys = Keys(ids, starts, arguments.tables)
        inserted = InsertedBatch(slots)
        if miss_results:
            inserted = InsertedBatch(slots, status=miss_results[0])
            if backing is not None:
                if placement is None:
                    placement = backing.one_op_placement(miss_results)
                backing.record_one_op(placement)
            elif recording is not None:
                recording.record(state, keys, inserted, miss_results)
            index.end_insertion(keys, inserted)
        if state.scores is not None:
            state.scores.advance(effects)
        state.last_batch = LastBatch(inserted, keys, version_of(ids))
        if miss_results and backing is not None:
            backing.start_moves()
        if expiry is not None:
            expiry.run()
        if not miss_results:  # every key has a slot
            return OneOpBatch(keys, offsets32, slots, BatchReads(slots), groups)
        rows, is_fallback = slots, None
        if backing is None and arguments.fallback is not None:
            rows = miss_results[1]
            is_fallback = rows != slots
            if bool(is_fallback.any()):
                groups = None  # by key, but several keys share a fallback row
        reads = BatchReads(rows, is_fallback=is_fallback)
        reads = state.row_initializer.with_default_rows(keys, reads)
        return OneOpBatch(keys, offsets32, rows, reads, groups)

    # An insertion that ends before `op` leaves uses of hits and counts of missing keys, no new key.
    batch = state.lock.complete(insert, lambda: not effects.has_called(op))
    if recording is not None and recording.inserted is not None:
        report_failures(state, recording.inserted)
    return batch


class _Recording:
    """Record of one insertion for the eviction log, statistics and reports of refused keys.

    Attributes:
        inserted: the inserted batch with its misses; None until `record`, so if all keys hit.
    """

    inserted: InsertedBatch | None

    def __init__(self) -> None:
        self.inserted = None
        self._effects = Effects()

    def record(
        self,
        state: DynamicState,
        keys: Keys,
        inserted: InsertedBatch,
        miss_results: Sequence[Tensor],
    ) -> None:
        """Record an insertion; call it again if the caller runs again after an interruption.

        Statistics count it once. The log may have its keys twice then, which changes no answer.
        `miss_results` are the results of `hash_insert_batch_` for misses.
        """
        misses = Misses(*miss_results[-_NUM_MISS_FIELDS : -len(InsertResult._fields)])
        result = InsertResult(*miss_results[-len(InsertResult._fields) :])
        self.inserted = inserted = inserted._replace(misses=misses, result=result)
        if state.statistics is not None:
            self._effects.restart()
            state.statistics.record(keys, inserted, state.index.clock, self._effects)
        if state.eviction_log is not None:
            state.eviction_log.record_batch(inserted, state.index.tick)


def _last_arguments(
    state: DynamicState, arguments: OneOpArguments, batch: Sequence[Any], effects: Effects
) -> Sequence[Any] | None:
    """Return the arguments of the op behind those of initial rows; None if it cannot insert.

    With admission another op touches the keys of the batch, and those without a slot are admitted.
    """
    if state.backing is not None:
        # When run again, `call_once` ignores its arguments, so the store need not make them again.
        return () if len(effects) else state.backing.begin_batch()
    returns_misses = _records_misses(state)
    if state.admission is None:
        return (arguments.fallback, None, None, returns_misses)
    index, order = state.index.tensors(), arguments.policy_codes[0]
    thresholds = state.admission.feature_thresholds if state.admission.is_per_feature else None
    touched = effects.call_once(hash.hash_touch_batch_, index, *batch, order, thresholds)
    if not touched:
        return None
    slots, *missing = touched
    is_admitted = _admit(state.admission, missing, effects)
    return (arguments.fallback, slots, is_admitted, returns_misses)


@without_gradients
def _admit(admission: Admission, missing: Sequence[Tensor], effects: Effects) -> Tensor | None:
    """Return which of the missing keys of a batch to insert, bool `[m]`; None for all.

    `missing` has the fields of `MissingKeys`, then their thresholds if these differ by feature.
    """
    missing_keys, thresholds = MissingKeys(*missing[:3]), missing[3:]
    if missing_keys.keys.numel():
        return admission.decide(missing_keys, effects, *thresholds)
    admission.skip_batch(effects)
    return None


def find_in_one_op(
    state: DynamicState, arguments: OneOpArguments, ids: Tensor, offsets: Tensor
) -> OneOpBatch | None:
    """Find the keys of a batch in one op; return None if the op cannot.

    Keys in the backing store get copies of their rows in overflow rows. The arguments are those of
    `insert_in_one_op`; `can_find_in_one_op` must hold.

    Raises:
        Exception: the backing store raised it.
    """
    index, backing = state.index.tensors(), state.backing
    if backing is None:
        results = hash.hash_find_batch(
            index, arguments.features, ids, offsets, arguments.tables, arguments.fallback
        )
    else:
        store_arguments = backing.begin_search()
        results = tiers.tier_find_batch_(
            index,
            arguments.row_buffers,
            arguments.features,
            ids,
            offsets,
            arguments.tables,
            arguments.fallback,
            *arguments.initial_values[:2],
            *store_arguments,
        )
        if overflow := results[_NUM_RESULTS_OF_SEARCH:]:
            backing.record_search(overflow)
    if not results:
        return None
    offsets32, starts, rows = results[:_NUM_RESULTS_OF_SEARCH]
    keys = Keys(ids, starts, arguments.tables)
    reads = state.row_initializer.with_default_rows(keys, BatchReads(rows))
    return OneOpBatch(keys, offsets32, rows, reads, None)
