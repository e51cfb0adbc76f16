"""Insertion of the keys of training batches into dynamic tables, with hooks and checks.

An insertion happens completely or not at all, wherever an exception interrupts it. It is a function
that `state.lock.complete(function, is_optional)` calls, in a thread that holds the lock. If an
exception ends the call, the lock calls the function once more and re-raises the exception; if that
call fails too, whoever enters the lock next calls it first. While `is_optional()` is true an
insertion that failed twice is abandoned instead.

So the function must be repeatable. Native calls that change something are made by an `Effects`:
`effects.call_once(op, ...)` calls the op the first time, and later returns the stored result;
`restart()`, at the start of each run, goes back to the first result. All other writes have values
that follow from these results. `BatchInsertion` defines the order of the changes.

With a backing store (`state.backing`) rows are in the fast tier, which is the index and its row
buffers, or in the store. Each table then has overflow rows behind its slots, in which a batch reads
and updates rows that got no slot.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from emblib.dynamic.keys import LastBatch
from emblib.dynamic.rows import RowLayout, TrainingUpdate
from emblib.dynamic.saving.checkpoint import table_entries
from emblib.dynamic.saving.entries import WEIGHT
from emblib.dynamic.state import DynamicState, of_state
from emblib.dynamic.sweeps import StepExpiry
from emblib.dynamic.tiers.placements import BatchPlacement
from emblib.dynamic.tiers.store import FoundRows
from emblib.grad_mode import without_gradients
from emblib.ops import hash
from emblib.ops.derivatives import refuse_tangents
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, Keys, Misses, tables_of
from emblib.optim import External, Optimizer, description
from emblib.specs import DynamicSpec, OnInsertFailure, Pooling, format_config
from emblib.tables import optimizer_hooks
from emblib.tables.bounds_report import is_padded
from emblib.tables.parameters import (
    caller_level,
    is_updated_in_backward,
    loses_values,
    version_of,
)
from emblib.tables.recomputation import CheckpointedForward


@without_gradients
def insert_or_repeat(
    state: DynamicState, keys: Keys, counts: Tensor | None, forward: CheckpointedForward | None
) -> TrainingUpdate:
    """Insert the keys of a training batch, or find the keys of a forward that backward repeats.

    Args:
        state: the tables, whose lock this thread holds.
        keys: the batch.
        counts: uses per position, see `insert_batch`.
        forward: the checkpointed regions around the lookup; None outside of them.

    Returns:
        The slots that the lookup reads, and the hooks for its backward.

    Raises:
        Exception: see `insert_batch`.
    """
    if forward is not None and forward.is_recomputation:
        return TrainingUpdate.from_repetition(forward.recall(state), keys)
    inserted = insert_batch(state, keys, counts)
    reads = state.row_initializer.reads_of_inserted(keys, inserted)
    slots = inserted.slots
    if reads.is_fallback is not None:
        slots = torch.where(reads.is_fallback, reads.indices, slots)
    update = state.update_of(keys, slots, reads)
    if forward is not None:
        forward.note(state, update)
    return update


def insert_batch(state: DynamicState, keys: Keys, counts: Tensor | None = None) -> InsertedBatch:
    """Insert the keys of a training batch: hits are touched, misses are inserted or refused.

    Args:
        state: the tables, whose lock this thread holds.
        keys: the batch.
        counts: int64 `[L]`, the number of uses per position; None is 1 each.

    Returns:
        Slots, int64 `[L]`: the slot or overflow row of each key, -1 for none. The misses of the
        batch and their results; None for both if every key was found, which a GPU does not check.

    Raises:
        RuntimeError: keys found no slot in a table that raises then (`OnInsertFailure.RAISE`); the
            others are inserted. Or, with no key inserted: a table has more misses than overflow
            rows, or has no score for its keys.
        ValueError: with no key inserted: the clock returned a number that is not a time, or an
            admission rule returned something other than one bool per key.
        Exception: the backing store, the budget, the clock, an admission rule or a function of
            `on_new_rows` raised it.
    """
    if state.budget is not None:
        state.budget.begin_step(state)
    if state.backing is not None:  # raises errors of the last step's moves before this one begins
        state.backing.move_rows()
    insertion = BatchInsertion(state, keys, counts)
    inserted = state.lock.complete(insertion.run, insertion.is_optional)
    if inserted.result is not None:
        report_failures(state, inserted)
    return inserted


class BatchInsertion:
    """The insertion of a training batch, which `run` makes or completes in four steps.

    1. The index: hits are touched, misses are admitted, the table grows, misses are inserted. From
       then on new keys can be found, with the rows of evicted keys in their slots.
    2. With a backing store, the rows of evicted keys are copied out of their slots, and rows from
       the store are written to theirs (`BackingTier.place`). Per table, the copies are stored here
       before a later call changes rows. On the CPU one native call copies out and writes in, and
       its results are stored at once.
    3. The tier records which rows move between the store and the slots, and new rows get their
       initial values. From then on lookups see the module as after the batch, even if the store has
       not been called yet.
    4. The store is called, and old keys expire.

    Args:
        state: the tables.
        keys: the batch.
        counts: uses per position, as in `insert_batch`.
    """

    def __init__(self, state: DynamicState, keys: Keys, counts: Tensor | None) -> None:
        self._state, self._keys, self._counts = state, keys, counts
        self._statistics_effects = Effects()
        # Raises before anything is changed.
        self._scores = None if state.scores is None else state.scores.batch_scores()
        self._effects = Effects()
        self._admission_effects: Effects | None = None
        self._expiry = None if state.expiry is None else StepExpiry(state, state.expiry)
        self._placement_effects = Effects()
        self._inserted: InsertedBatch | None = None
        self._placement: BatchPlacement | None = None
        self._found_rows: list[FoundRows] = []
        self._has_begun = self._is_written = False

    def is_optional(self) -> bool:
        """Return whether the insertion may be abandoned.

        It may be abandoned before the index has new keys, and after their rows are written. In
        between, slots of new keys have the rows of other keys.
        """
        return self._is_written or not self._effects.has_called(hash.hash_insert_)

    def run(self) -> InsertedBatch:
        """Insert the batch, or the rest of it after an interruption."""
        if self._has_begun:  # a third run may come after the caller has overwritten its tensor
            self._keys = self._keys._replace(ids=self._keys.ids.clone())
        self._has_begun = True
        state, keys = self._state, self._keys
        if self._expiry is not None:
            self._expiry.set_time()
        if self._inserted is None:
            self._inserted = self._insert()
        inserted = self._inserted
        if not self._is_written:
            if inserted.misses is not None:
                if state.statistics is not None:
                    effects = self._statistics_effects
                    effects.restart()
                    state.statistics.record(keys, inserted, state.index.clock, effects)
                self._write_rows(inserted)
            if state.last_uses is not None:
                state.last_uses.note(state.index, keys, inserted)
            state.last_batch = LastBatch(inserted, keys, version_of(keys.ids))
            self._is_written = True
        if state.backing is not None and inserted.misses is not None:
            state.backing.start_moves()
        if self._expiry is not None:
            self._expiry.run()
        return inserted

    def _insert(self) -> InsertedBatch:
        """Make step 1, the index."""
        state = self._state
        chooses_misses = state.admission is not None or state.backing is not None
        self._effects.restart()
        inserted = state.index.insert(
            self._keys,
            self._counts,
            batch_scores=self._scores,
            admit=self._admit if chooses_misses else None,
            rows=state.slot_rows() if state.index.grows else None,
            effects=self._effects,
        )
        if inserted.misses is None and state.admission is not None:
            state.admission.skip_batch(self._effects)
        if state.scores is not None:
            state.scores.advance(self._effects)
        return inserted

    def _admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Return which of the missing keys to admit, bool `[L]` by miss; None for all."""
        state = self._state
        in_store = admitted = None
        if state.backing is not None:
            self._found_rows = state.backing.find_in_store(keys, misses)
        if state.admission is not None:
            if state.backing is not None:
                in_store = state.backing.is_in_store(misses, self._found_rows)
            if self._admission_effects is None:
                self._admission_effects = Effects()
            self._admission_effects.restart()
            admitted = state.admission.admit(keys, misses, in_store, self._admission_effects)
        if state.backing is not None:
            state.backing.add_stored_uses(misses, self._found_rows)
        return admitted

    def _write_rows(self, inserted: InsertedBatch) -> None:
        """Make steps 2 and 3, the rows of evicted and of new keys, and call `on_new_rows`."""
        state, keys = self._state, self._keys
        assert inserted.result is not None
        slots: Tensor | None = inserted.result.slots
        # With a backing store evicted rows are demoted, and the tier records the dropped ones.
        if state.backing is not None:
            if self._placement is None:
                self._placement_effects.restart()
                self._placement = state.backing.place(
                    keys, inserted, self._found_rows, self._scores, self._placement_effects
                )
            slots = state.backing.record(inserted, self._placement)
        elif state.eviction_log is not None:
            state.eviction_log.record_batch(inserted, state.index.tick)
        if slots is not None:
            state.row_initializer.write_(state.row_buffers, keys, inserted, slots)
        if state.leaves_gradient or state.on_new_rows:
            rows = _rows_of_new_keys(state.layout, keys, inserted)
            if state.leaves_gradient:
                _drop_gradients(state, rows)
            for callback in state.on_new_rows:
                callback(rows)


@of_state
def erase(state: DynamicState, table: int | str, ids: Tensor) -> Tensor:
    """Remove keys with their rows, in both tiers.

    Args:
        state: the tables.
        table: number or name of the table.
        ids: int64, uint64 or int32 `[n]`; ids may repeat.

    Returns:
        Which ids had a row, bool `[n]` on the device; of a repeated id only one position.

    Raises:
        KeyError, IndexError: there is no such table.
        TypeError: the ids have another dtype.
        Exception: the backing store raised it.
    """
    table, effects = state.table_number(table), Effects()
    keys = state.keys_of(table, ids)

    def erase_keys() -> Tensor:
        effects.restart()
        is_erased: Tensor = state.index.erase(keys, effects) >= 0
        state.record_evictions(table, keys.ids[is_erased])
        if state.backing is not None:
            is_erased |= state.backing.erase(table, keys.ids).to(is_erased.device)
        return is_erased

    return state.complete(erase_keys)


@of_state
def clear(state: DynamicState) -> None:
    """Remove all keys, in both tiers; tables have their initial capacity again.

    Counts of admission, statistics, all counters of tables and tiers, and the times of use are
    forgotten. Fallback rows have their initial values again. The count of training steps restarts,
    unless evictions are tracked. Scores of `Eviction.STEP` restart at 1; those of
    `Eviction.CUSTOM` stay.
    """
    tick = 0
    if state.eviction_log is not None:
        tick = state.index.tick
        for t in range(len(state.specs)):
            state.record_evictions(t, table_entries(state, t).keys)
    # Not `state.complete`: moves to the store are cancelled, also if it cannot take them.
    state.lock.complete(lambda: _clear(state, tick), lambda: True)


def _clear(state: DynamicState, tick: int) -> None:
    """Remove all keys; the count of training steps continues from `tick`."""
    state.index.clear()
    if state.statistics is not None:
        state.statistics.clear()
    state.index.set_tick(tick)
    if state.admission is not None:
        state.admission.clear()
    if state.scores is not None:
        state.scores.restart_steps()
    if state.expiry is not None:
        state.expiry.forget_times()
    state.advise_initial_rows()
    state.row_initializer.write_fallback_(state.row_buffers)
    if state.backing is not None:
        state.backing.clear()


def report_failures(state: DynamicState, inserted: InsertedBatch) -> None:
    """Warn or raise for keys that found no slot, by `on_insert_failure`.

    Waits for a GPU.
    """
    specs = state.specs
    if not state.reports_failures:
        return
    assert inserted.misses is not None
    assert inserted.result is not None
    is_refused = inserted.result.status == hash.REFUSED
    if not bool(is_refused.any()):
        return
    offsets = inserted.misses.offsets.tolist()
    for t, spec in enumerate(specs):
        num_refused = int(is_refused[offsets[t] : offsets[t + 1]].sum())
        if not num_refused or spec.on_insert_failure is OnInsertFailure.IGNORE:
            continue
        effect = f"read {spec.default_value} and are not trained"
        if spec.fallback_rows:
            effect = "read and train fallback rows"
        is_in_budget = state.index.limits[t] < spec.max_buckets
        size_text = f"of capacity {spec.rows}"
        if is_in_budget:
            size_text = f"of {state.index.capacity(t)} rows in a memory budget"
        message = (
            f"emblib: {num_refused} keys found no slot in table {state.table_names[t]!r} "
            f"{size_text} (eviction {spec.eviction.value}): they {effect}; choose a larger "
            f"{'budget' if is_in_budget else 'capacity'}, or smaller batches"
        )
        if spec.on_insert_failure is OnInsertFailure.RAISE:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=caller_level())


def _drop_gradients(state: DynamicState, rows: Tensor) -> None:
    """Drop the gradients that a later step would apply to rows, which have new keys now.

    Waits for a GPU. They are not counted: whether a step has applied them is not known.
    """
    weights, grad = state.weights, state.weights.grad
    if grad is None:
        return
    if not grad.is_sparse:
        layout, buffers = state.layout, [grad.view(-1), *state.optimizer_states]
        for t in range(len(state.specs)):
            first_row = layout.first_row(t)
            rows_of_table = rows[(rows >= first_row) & (rows < layout.first_row(t + 1))]
            layout.views(buffers, t)[WEIGHT][rows_of_table - first_row] = 0
        return
    is_stale = torch.isin(grad._indices()[0], rows)
    weights.grad = torch.sparse_coo_tensor(
        grad._indices()[:, ~is_stale], grad._values()[~is_stale], grad.shape, check_invariants=False
    )


@of_state
def track_optimizer_state(state: DynamicState, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer's state of a row reset whenever a new key gets the row.

    Raises:
        ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
    """
    weights = state.weights
    if weights.dim() != 2:
        raise ValueError(
            "track_optimizer_state needs tables with optim.External and one dim, got "
            f"{state.optimizer_name} and dims {sorted({spec.dim for spec in state.specs})}"
        )
    param_groups = optimizer.param_groups
    if not any(parameter is weights for group in param_groups for parameter in group["params"]):
        raise ValueError("the optimizer must have the weights of this module among its own")
    state.on_new_rows.append(partial(_reset_states, optimizer, weights))


def _reset_states(optimizer: torch.optim.Optimizer, weights: Tensor, rows: Tensor) -> None:
    """Zero the states of `rows` of `weights` in an optimizer of torch.optim."""
    for state in optimizer.state.get(weights, {}).values():
        if isinstance(state, Tensor) and state.shape[:1] == weights.shape[:1]:
            state[rows] = 0


def _rows_of_new_keys(layout: RowLayout, keys: Keys, inserted: InsertedBatch) -> Tensor:
    """Return the rows with new keys, int64 `[n]`, numbered over all tables.

    Waits for a GPU.
    """
    assert inserted.misses is not None
    assert inserted.result is not None
    is_new = inserted.result.slots >= 0
    tables = tables_of(keys)[inserted.misses.first[is_new]]
    first_rows = [layout.first_row(t) for t in range(len(layout.specs))]
    return torch.tensor(first_rows, device=tables.device)[tables] + inserted.result.slots[is_new]


def check_storable(specs: Sequence[DynamicSpec]) -> None:
    """Raise ValueError if a backing store cannot hold the rows of a table."""
    for spec in specs:
        if len(spec.lifetimes) > 1:
            raise ValueError(
                f"table {spec.name!r} has {spec.ttl}, and a backing store knows one last use per "
                "row: give all features one ttl, or leave the store out"
            )


def refuse_to_empty(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError for a function of `nn.Module._apply` that does not keep values."""
    if loses_values(fn):
        raise RuntimeError("to_empty would lose the keys: use reset_parameters() instead")


def check_optimizer(
    optimizer: Optimizer, specs: Sequence[DynamicSpec], *, has_backing: bool
) -> None:
    """Raise ValueError for optimizers that dynamic tables do not support."""
    if optimizer_hooks.is_periodic(optimizer) or optimizer_hooks.find_global_decay(optimizer):
        raise ValueError(
            f"{format_config(optimizer)} reads whole tables from time to time, which dynamic "
            "tables do not support; choose an optimizer without that part"
        )
    if optimizer.leaves_gradient is None:
        return
    subject = "state" if isinstance(optimizer, External) else "gradients"
    if has_backing:
        raise ValueError(
            f"{description(optimizer)} keeps its {subject} outside, where they would not move with "
            "the rows; use an optimizer that backward applies, e.g. optim.SGD(0.01), or tables "
            "without a backing store"
        )
    if any(spec.buckets < spec.max_buckets for spec in specs):
        raise ValueError(
            f"{description(optimizer)} keeps its {subject} outside, where they would not move with "
            "the rows of a table that grows: leave initial_capacity out, or use an optimizer that "
            "backward applies, e.g. optim.SGD(0.01)"
        )


def check_batch(
    ids: Tensor, sample_weights: Tensor | None, counts: Tensor | None, pooling: Pooling
) -> None:
    """Check the shape of ids, and the shape, dtype and device of sample weights and counts.

    Counts on the CPU must be >= 0. The dtype of ids is not checked.

    Raises:
        RuntimeError: a shape, a dtype or a device is wrong.
        ValueError: a count is negative, or there are weights without pooling.
        NotImplementedError: the weights have a tangent of forward-mode derivatives.
    """
    refuse_tangents("per_sample_weights", sample_weights)
    if ids.dim() != 1:
        raise RuntimeError(
            f"indices must have 1 dimension, got {ids.dim()}; bags are given by offsets, so "
            "flatten the indices and pass where they start"
        )
    for name, tensor, dtype in (
        ("per_sample_weights", sample_weights, torch.float32),
        ("counts", counts, torch.int64),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            type_name = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"{name} must be a tensor of {dtype}, got {type_name}")
        if tensor.shape != ids.shape or tensor.device != ids.device:
            raise RuntimeError(
                f"{name} must have one entry per lookup = {ids.numel()} on {ids.device}, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if sample_weights is not None and pooling is Pooling.NONE:
        raise ValueError(
            "per_sample_weights need pooling SUM or MEAN, got none; multiply the output"
        )
    if counts is not None and not counts.is_cuda and counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"counts must be >= 0, got {int(counts.min())}")


def num_padding_ids(ids: Tensor, offsets: Tensor) -> int:
    """Return the number of ids before the first offset, if they are padding.

    The result is 0 outside `with_padding`, and on a GPU, whose kernels skip padding. On the
    CPU the caller must remove the padding from the batch.
    """
    if not is_padded() or ids.is_cuda or not offsets.numel():
        return 0
    return min(max(int(offsets[0]), 0), ids.numel())


def feature_starts(
    offsets: Tensor, num_features: int, batch_sizes: Sequence[Sequence[int]] | None
) -> Tensor:
    """Return the first id of each feature, then the number of ids, int64 `[features + 1]`.

    `batch_sizes` are the bags per feature and rank; None if all features have equally many bags.
    """
    if batch_sizes is not None:
        starts = offsets[[0, *itertools.accumulate(sum(sizes) for sizes in batch_sizes)]]
    elif offsets.numel() > 1:
        starts = offsets[:: (offsets.numel() - 1) // num_features]
    else:
        starts = offsets.expand(num_features + 1)
    return starts.long().contiguous()


def check_replicas(tags: Tensor, weights: Tensor) -> None:
    """Check that `DistributedDataParallel` does not mix the tables of its ranks.

    Ranks see different keys, so the same row belongs to different keys on two ranks: buffers must
    not be broadcast, and gradients of rows must not be added up.

    Raises:
        RuntimeError: DDP would broadcast buffers or add up gradients of rows.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return
    # Newer versions of torch have another name for `broadcast_buffers`.
    syncs_buffers = getattr(ddp, "forward_sync_buffers", None)
    if syncs_buffers is None:
        syncs_buffers = ddp.broadcast_buffers
    if syncs_buffers and any(buffer is tags for buffer in ddp.modules_buffers):
        raise RuntimeError(
            "DistributedDataParallel overwrites the keys of dynamic tables with those of rank 0, "
            "while rows stay those of each rank; pass broadcast_buffers=False"
        )
    has_gradient = weights.requires_grad and not is_updated_in_backward(weights)
    if has_gradient and any(parameter is weights for parameter in ddp._module_parameters):
        raise RuntimeError(
            "DistributedDataParallel adds up gradients by row, and a row of dynamic tables is "
            "another key on each rank; use a fused optimizer, or name the weights in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )
