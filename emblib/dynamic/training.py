"""Insertion of the keys of training batches into the tables of a module, with hooks and checks.

An insertion is made completely or not at all, wherever an exception interrupts it: `BatchInsertion`
states in which order the index, the rows and the backing store change.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib.dynamic.hash_index import InsertedBatch
from emblib.dynamic.keys import LastBatch
from emblib.dynamic.rows import BatchReads, RowLayout, TrainingUpdate
from emblib.dynamic.tiers.store import FoundRows
from emblib.ops import hash
from emblib.ops.autograd import updates_in_backward
from emblib.ops.derivatives import refuse_tangents
from emblib.ops.effects import Effects
from emblib.ops.hash import Keys, Misses, tables_of
from emblib.optim import External, Optimizer, description
from emblib.specs import SLOTS, DynamicSpec, OnInsertFailure, Pooling, brief
from emblib.tables import optimizer_hooks
from emblib.tables.base import check_bounds
from emblib.tables.bounds_report import is_padded
from emblib.tables.parameters import caller_level, is_updated_in_backward, loses_values
from emblib.tables.recomputation import RunningForward

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags
    from emblib.dynamic.tiers.backing_tier import BatchPlacement


def trains(module: "DynamicEmbeddingBags", running: RunningForward | None) -> bool:
    """Return whether a lookup inserts keys: in training mode, unless the gradient is not wanted."""
    has_gradient = not updates_in_backward(module.optimizer)
    is_wanted = not has_gradient or module.weights.requires_grad
    with_grad = torch.is_grad_enabled() or (running is not None and running.trains_without_grad)
    return module.training and with_grad and is_wanted


def insert_or_repeat(
    module: "DynamicEmbeddingBags",
    keys: Keys,
    counts: Tensor | None,
    running: RunningForward | None,
    make_update: Callable[[Keys, Tensor, BatchReads], TrainingUpdate],
) -> TrainingUpdate:
    """Insert the keys of a training batch, or find those of a forward that backward repeats.

    Args:
        module: module of the tables.
        keys: the batch.
        counts: uses per position, see `insert_batch`.
        running: the checkpointed regions around the lookup.
        make_update: function that returns the update of keys in these slots, which reads these
            rows.
    """
    if running is not None and running.is_repeated:
        return TrainingUpdate.of_repetition(running.noted(module), keys)
    inserted = insert_batch(module, keys, counts)
    reads = module.row_initializer.reads_of_inserted(keys, inserted)
    update = make_update(keys, inserted.slots, reads)
    if running is not None:
        running.note(module, update)
    return update


def insert_batch(
    module: "DynamicEmbeddingBags", keys: Keys, counts: Tensor | None
) -> InsertedBatch:
    """Insert the keys of a training batch: hits are touched, misses are inserted or refused.

    Args:
        module: module of the tables.
        keys: the batch.
        counts: int64 `[L]`, the number of uses that each position stands for; None is 1 each.
    """
    insertion = BatchInsertion(module, keys, counts)
    inserted = module.complete(insertion.run, insertion.is_optional)
    _report_failures(module, inserted)
    return inserted


class BatchInsertion:
    """The insertion of a training batch, which `run` completes after an interruption.

    Native calls that change the index or counters are made once (`Effects`). Everything else writes
    values that follow from their results, so it may be written again:

    1. The index: hits are touched, misses are admitted, the table grows, misses are inserted. From
       then on new keys can be found, with the rows of evicted keys in their slots.
    2. With a backing store, the rows of evicted keys are copied out of their slots
       (`BackingTier.place`). No row of a slot changes before all copies are kept here.
    3. New rows get their first values, or their values from the store. The tier notes which rows
       move between the store and the slots; the module then is as after the batch, whenever the
       store is called.
    4. The store is called, and old keys expire.

    Args:
        module: module of the tables.
        keys: the batch.
        counts: uses per position, as in `insert_batch`.
    """

    def __init__(self, module: "DynamicEmbeddingBags", keys: Keys, counts: Tensor | None) -> None:
        self._module, self._keys, self._counts = module, keys, counts
        # Raises before anything is changed.
        self._scores = None if module.scores is None else module.scores.of_next_batch()
        self._effects, self._admission_effects = Effects(), Effects()
        self._expiry_effects = Effects()
        self._inserted: InsertedBatch | None = None
        self._placement: BatchPlacement | None = None
        self._found: list[FoundRows] = []
        self._has_begun = self._is_written = False

    def is_optional(self) -> bool:
        """Return whether no key has a slot with the row of another one."""
        return self._is_written or not self._effects.has_made(hash.hash_insert_)

    def run(self) -> InsertedBatch:
        """Insert the batch, or the rest of it after an interruption."""
        if self._has_begun:  # from now on the caller may write to its tensor
            self._keys = self._keys._replace(ids=self._keys.ids.clone())
        self._has_begun = True
        module, keys = self._module, self._keys
        if self._inserted is None:
            self._inserted = self._insert()
        inserted = self._inserted
        if not self._is_written:
            if inserted.misses is not None:
                self._write_rows(inserted)
            module.last_batch = LastBatch.of(inserted, keys)
            self._is_written = True
        if module.backing is not None and inserted.misses is not None:
            module.backing.move_rows()
        if module.expiry:
            self._expire()
        return inserted

    def _insert(self) -> InsertedBatch:
        module = self._module
        self._effects.restart()
        inserted = module.index.insert(
            self._keys,
            self._counts,
            batch_scores=self._scores,
            admit=self._admit if self._takes_part() else None,
            rows=module.slot_rows() if module.index.grows else None,
            effects=self._effects,
        )
        if module.scores is not None:
            module.scores.advance(self._effects)
        return inserted

    def _takes_part(self) -> bool:
        module = self._module
        return module.admission is not None or module.backing is not None or bool(module.hooks)

    def _admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Return which of the missing keys to admit, bool `[L]` by miss; None for all."""
        module = self._module
        in_store = admitted = None
        if module.backing is not None:
            self._found, in_store = module.backing.find_in_store(keys, misses)
        if module.admission is not None:
            self._admission_effects.restart()
            admitted = module.admission.admit(keys, misses, in_store, self._admission_effects)
        if module.backing is not None:
            module.backing.add_stored_uses(misses, self._found)
        for hook in module.hooks:
            also = hook.admit(keys, misses)
            if also is not None:
                admitted = also if admitted is None else admitted & also
        return admitted

    def _write_rows(self, inserted: InsertedBatch) -> None:
        module, keys = self._module, self._keys
        # With a backing store evicted rows are demoted, and the tier records what leaves the store.
        if module.backing is not None:
            if self._placement is None:
                self._placement = module.backing.place(keys, inserted, self._found, self._scores)
            module.backing.take(inserted, self._placement)
        elif module.eviction_log is not None:
            module.eviction_log.record_batch(inserted, module.index.tick)
        for hook in module.hooks:
            hook.on_evict(keys, inserted)
        module.row_initializer.write_(module.row_buffers(), keys, inserted)
        for hook in module.hooks:
            hook.on_insert(keys, inserted)
        if module.backing is not None and self._placement is not None:
            module.backing.write_found(self._placement)

    def _expire(self) -> None:
        module = self._module
        self._expiry_effects.restart()
        for sweep in module.expiry.sweeps(module.index.tick):
            keys = module.index.expire(
                sweep.table,
                sweep.before,
                sweep.first_bucket,
                sweep.num_buckets,
                self._expiry_effects,
            )
            module.record_evictions(sweep.table, keys)
        if module.backing is None:
            return
        for sweep in module.expiry.sweeps(module.index.tick):
            if sweep.first_bucket == 0:
                module.backing.expire(sweep.table, sweep.before)


def erase_keys(module: "DynamicEmbeddingBags", table: int, keys: Keys) -> Tensor:
    """Remove keys from both tiers; return by position whether one was there (once per key)."""
    effects = Effects()

    def make() -> Tensor:
        effects.restart()
        erased: Tensor = module.index.erase(keys, effects) >= 0
        module.record_evictions(table, keys.ids[erased])
        if module.backing is not None:
            erased |= module.backing.erase(table, keys.ids).to(erased.device)
        return erased

    return module.complete(make)


def clear_tables(module: "DynamicEmbeddingBags", tick: int) -> None:
    """Remove all keys from both tiers; training steps are counted from `tick` on."""
    module.index.clear()
    module.index.set_tick(tick)
    if module.admission is not None:
        module.admission.clear()
    if module.scores is not None:
        module.scores.clear()
    rows = module.slot_rows()
    assert rows.on_grow is not None
    for t, spec in enumerate(module.tables):
        rows.on_grow(t, 0, spec.buckets * SLOTS)
    if module.backing is not None:
        module.backing.clear()


def _report_failures(module: "DynamicEmbeddingBags", inserted: InsertedBatch) -> None:
    """Warn or raise for keys that found no slot, as their tables ask (waits for CUDA)."""
    specs = module.tables
    if inserted.misses is None or all(
        spec.on_insert_failure is OnInsertFailure.IGNORE for spec in specs
    ):
        return
    assert inserted.result is not None
    refused = inserted.result.status == hash.REFUSED
    if not bool(refused.any()):
        return
    offsets = inserted.misses.offsets.tolist()
    for t, spec in enumerate(specs):
        count = int(refused[offsets[t] : offsets[t + 1]].sum())
        if not count or spec.on_insert_failure is OnInsertFailure.IGNORE:
            continue
        message = (
            f"emblib: {count} keys found no slot in table {module.table_names[t]!r} of capacity "
            f"{spec.rows} (eviction {spec.eviction.value}): they read {spec.default_value} and are "
            "not trained; choose a larger capacity, or smaller batches"
        )
        if spec.on_insert_failure is OnInsertFailure.RAISE:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=caller_level())


class TrainingHook(Protocol):
    """Take part in the training steps of a module, in addition to its index and its rows.

    A step calls `admit` before keys are inserted, `on_evict` once they are, with the rows of
    evicted keys unchanged, and `on_insert` once all new rows have their first values. A step that
    is completed after an interruption may call a method again.
    """

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Return which of the missing keys to admit, bool `[L]` by miss, or None for all."""

    def on_evict(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Handle evicted keys (`inserted.result.evicted`), whose rows are still in their slots."""

    def on_insert(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Handle new keys, whose rows have first values that may be overwritten."""


class ExternalStates:
    """A training hook that resets the states of a torch.optim optimizer in rows of new keys.

    Copies and pickles of it do nothing: the copied module has other weights, and its own optimizer
    must be registered with it.

    Args:
        optimizer: optimizer of the weights; None does nothing.
        weights: `[rows, dim]`, of all tables.
        layout: layout of the rows of each table.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        weights: nn.Parameter | None,
        layout: RowLayout | None = None,
    ) -> None:
        self._optimizer, self._weights, self._layout = optimizer, weights, layout

    @classmethod
    def of_module(
        cls, module: "DynamicEmbeddingBags", optimizer: torch.optim.Optimizer
    ) -> "ExternalStates":
        """Make the hook of a module for the optimizer of its weights.

        Raises:
            ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
        """
        if module.weights.dim() != 2:
            raise ValueError(
                "track_optimizer_state needs tables with optim.External and one dim, got "
                f"{brief(module.optimizer)} and dims {sorted({s.dim for s in module.tables})}"
            )
        groups = optimizer.param_groups
        if not any(p is module.weights for group in groups for p in group["params"]):
            raise ValueError("the optimizer must have the weights of this module among its own")
        return cls(optimizer, module.weights, module.rows)

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Admit all keys."""
        return None

    def on_evict(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Do nothing: states of evicted keys are dropped."""

    def on_insert(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Set the states of new keys to zero (waits for the device)."""
        if self._optimizer is None or self._weights is None or self._layout is None:
            return
        rows = _rows_of_new_keys(self._layout, keys, inserted)
        for state in self._optimizer.state.get(self._weights, {}).values():
            if isinstance(state, Tensor) and state.shape[:1] == self._weights.shape[:1]:
                state[rows] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ExternalStates, (None, None)

    def __deepcopy__(self, memo: dict[int, object]) -> "ExternalStates":
        return ExternalStates(None, None)


class PendingGradients:
    """A training hook that drops the gradients of evicted keys, which a later step would apply.

    For deferred optimizers: gradients are by row, and a new key takes the row of an evicted one.

    Args:
        module: the tables; dropped gradients are counted in its `dropped_updates`.
    """

    def __init__(self, module: "DynamicEmbeddingBags") -> None:
        self._module = module

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Admit all keys."""
        return None

    def on_evict(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Do nothing: rows of evicted keys that get no new key are never read."""

    def on_insert(self, keys: Keys, inserted: InsertedBatch) -> None:
        """Drop the gradients of rows that have a new key (waits for the device)."""
        module = self._module
        grad = module.weights.grad
        if grad is None:
            return
        rows = _rows_of_new_keys(module.rows, keys, inserted)
        if not grad.is_sparse:
            grad[rows] = 0
            return
        stale = torch.isin(grad._indices()[0], rows)
        module.weights.grad = torch.sparse_coo_tensor(
            grad._indices()[:, ~stale], grad._values()[~stale], grad.shape, check_invariants=False
        )
        module.dropped_updates += stale.sum()


def _rows_of_new_keys(rows: RowLayout, keys: Keys, inserted: InsertedBatch) -> Tensor:
    """Return the numbers, among the rows of all tables, of the rows that have a new key."""
    assert inserted.misses is not None
    assert inserted.result is not None
    new = inserted.result.slots >= 0
    tables = tables_of(keys)[inserted.misses.first[new]]
    first = [rows.first_row(t) for t in range(len(rows.specs))]
    return torch.tensor(first, device=tables.device)[tables] + inserted.result.slots[new]


def check_device(device: torch.device) -> None:
    """Raise ValueError on a device on which dynamic tables cannot be."""
    if device.type == "meta":
        raise ValueError("dynamic tables have keys to begin with, so they cannot be on meta")


def check_keeps_keys(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError for a function of `nn.Module._apply` that does not keep values."""
    if loses_values(fn):
        raise RuntimeError("to_empty would lose the keys: use reset_parameters() instead")


def check_optimizer(
    optimizer: Optimizer, specs: Sequence[DynamicSpec], *, has_backing: bool
) -> None:
    """Raise ValueError for optimizers that dynamic tables do not support."""
    if optimizer_hooks.is_periodic(optimizer) or optimizer_hooks.global_decay(optimizer):
        raise ValueError(
            f"{brief(optimizer)} reads whole tables from time to time, which dynamic tables do not "
            "support; choose an optimizer without that part"
        )
    if optimizer.leaves_gradient is None:
        return
    what = "state" if isinstance(optimizer, External) else "gradients"
    if has_backing:
        raise ValueError(
            f"{description(optimizer)} keeps its {what} outside, where they would not move with "
            "the rows; use an optimizer that backward applies, e.g. optim.SGD(0.01), or tables "
            "without a backing store"
        )
    if any(s.buckets < s.max_buckets for s in specs):
        raise ValueError(
            f"{description(optimizer)} keeps its {what} outside, where they would not move with "
            "the rows of a table that grows: leave initial_capacity out, or use an optimizer that "
            "backward applies, e.g. optim.SGD(0.01)"
        )


def check_batch(
    ids: Tensor, sample_weights: Tensor | None, counts: Tensor | None, pooling: Pooling
) -> None:
    """Check the arguments of a lookup as the kernels would, and that counts are >= 0.

    Counts on CUDA are not read.

    Raises:
        RuntimeError: wrong shape, dtype or device.
        ValueError: negative counts; weights without pooling.
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
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"{name} must be a tensor of {dtype}, got {found}")
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


def check_offsets(
    module: "DynamicEmbeddingBags",
    zeros: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    *,
    is_prefetch: bool,
) -> Tensor:
    """Return the offsets of a batch repaired, see `check_bounds`.

    Every id is valid: `zeros`, as many as there are ids, pass the check in their place. Padding
    has ids of -1, which pass it before the first bag too.
    """
    if is_padded():
        zeros = torch.full_like(zeros, -1)
    message = (
        "emblib: {offsets} offsets out of bounds, which are clamped: they must begin with "
        "0, not decrease and end with the number of indices (are they offsets, not lengths?)"
    )
    return check_bounds(
        module, zeros, offsets, module.features, bag_layout, message, is_prefetch=is_prefetch
    )


def num_padding_ids(ids: Tensor, offsets: Tensor) -> int:
    """Return how many ids of a batch on the CPU are padding before the first offset.

    Kernels on a GPU skip them. On the CPU a batch has no fixed shape, so they are left out.
    """
    if not is_padded() or ids.is_cuda or not offsets.numel():
        return 0
    return min(max(int(offsets[0]), 0), ids.numel())


def feature_starts(
    offsets: Tensor, features: int, batch_sizes: Sequence[Sequence[int]] | None
) -> Tensor:
    """Return where the ids of each feature begin, and their number, int64 `[features + 1]`."""
    if batch_sizes is not None:
        starts = offsets[[0, *itertools.accumulate(sum(sizes) for sizes in batch_sizes)]]
    elif offsets.numel() > 1:
        starts = offsets[:: (offsets.numel() - 1) // features]
    else:
        starts = offsets.expand(features + 1)
    return starts.long().contiguous()


def check_replicas(tags: Tensor, weights: Tensor) -> None:
    """Check that `DistributedDataParallel` does not mix the tables of its ranks.

    Ranks see different keys, so the same row belongs to different keys on two ranks: buffers must
    not be broadcast, and gradients of rows must not be added up.

    Raises:
        RuntimeError: it would.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return
    # Newer versions of torch have another name for it.
    synced = getattr(ddp, "forward_sync_buffers", None)
    if synced is None:
        synced = ddp.broadcast_buffers
    if synced and any(buffer is tags for buffer in ddp.modules_buffers):
        raise RuntimeError(
            "DistributedDataParallel overwrites the keys of dynamic tables with those of rank 0, "
            "while rows stay those of each rank; pass broadcast_buffers=False"
        )
    has_gradient = weights.requires_grad and not is_updated_in_backward(weights)
    if has_gradient and any(p is weights for p in ddp._module_parameters):
        raise RuntimeError(
            "DistributedDataParallel adds up gradients by row, and a row of dynamic tables is "
            "another key on each rank; use a fused optimizer, or name the weights in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )
