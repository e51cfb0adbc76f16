"""DynamicEmbeddingBags: T hash tables of rows with the optimizer fused into backward.

The module owns a `DynamicState` (index, rows, admission, scores, eviction log, backing store). A
training forward makes keys of the ids, inserts them, and looks up their slots like rows of a dense
table. It stores a `TrainingUpdate`, with which backward finds the rows again. Queries, eviction,
saving and loading are functions of the state, and methods of the module too.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from emblib.attribute_errors import shows_attribute_errors
from emblib.dynamic import one_op, shrinking, sweeps, training
from emblib.dynamic import state as dynamic_state
from emblib.dynamic.dynamic_tables import DynamicTables, TableSpecs, handles_of
from emblib.dynamic.eviction import EvictionLog
from emblib.dynamic.hash_index import check_device
from emblib.dynamic.keys import as_keys, hash_keys_of
from emblib.dynamic.one_op import OneOpArguments
from emblib.dynamic.rows import BatchReads, TrainingUpdate, WeightGradient, check_capacity
from emblib.dynamic.saving import checkpoint, table_dumps
from emblib.dynamic.sent_copies import SentAsCopy, check_not_shared
from emblib.dynamic.short_calls import KeyedCalls, look_up
from emblib.dynamic.state import DynamicState
from emblib.dynamic.tiers.backing_tier import BackingTier
from emblib.dynamic.tiers.store import BackingStore, check_backing
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.ops.derivatives import refuse_transforms
from emblib.ops.hash import Keys
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, DynamicSpec, Pooling, Precision, check_bool, check_count
from emblib.tables import recomputation, state_dicts
from emblib.tables.base import FusedTables, SpecKind
from emblib.tables.batches import append_last_offset, check_bounds
from emblib.tables.bounds_report import is_padded
from emblib.tables.changes import CompletingLock
from emblib.tables.graph_break import is_in_export, run_uncompiled
from emblib.tables.locks import atomic
from emblib.tables.parameters import check_not_replicated

_OFFSETS_MESSAGE = (
    "emblib: {offsets} offsets out of bounds, which are clamped: they must begin with "
    "0, not decrease and end with the number of indices (are they offsets, not lengths?)"
)


class DynamicEmbeddingBags(SentAsCopy, FusedTables):
    """Look up F features in T dynamic tables and pool their rows into one `[B, sum D]` output.

    A training forward inserts the new keys of the batch that are admitted, evicting old keys when a
    table is full, and touches the keys that are there; backward applies `optimizer` to the rows of
    the batch, as in `TableBatchedEmbeddingBags`. A forward trains if the module is in training
    mode, gradients are enabled and the tables are not frozen. Any other forward changes no key and
    no row: keys that are not in their table read `DynamicSpec.default_value` or a fallback row, and
    its backward changes no row.

    With `backing`, each key is in one of two tiers: `DynamicSpec.capacity` is the capacity of the
    fast tier, and evicted rows move to a store, from which they return when they are used. Outputs
    and updates are the same as with one large table, bit for bit (stochastic rounding excepted),
    until a row leaves the store (docs/tiers.md).

    Threads may share a module: every call is atomic, and so is every update in backward; a forked
    process may not use a store in files (docs/threads.md). The insertion of a batch is defined by a
    sequential program (see `emblib.ops.hash`), so the same batches give their keys the same slots
    on any device and any number of threads.

    Args:
        tables: capacity, dim and rules of each table; all must agree in `eviction` (STEP and CUSTOM
            may be mixed) and `insert_policy`; with `backing` its mode sets `insert_policy`.
        optimizer: optimizer of `emblib.optim`. None leaves dense gradients for an optimizer of
            `torch.optim`.
        backing: store behind the tables, which must not be used by another module, or None.
        pooling: SUM, MEAN, or NONE for one vector per lookup (needs one dim for all tables).
        feature_tables: the table of each feature; by default feature i reads table i.
        precision: dtypes of weights, output and optimizer state, and how updates are rounded.
        seed: seed of the initial values of rows and of the hash of keys, in [0, 2^63). If untrusted
            parties choose keys, a secret seed keeps them from filling a few buckets. None uses seed
            0 for initial values, and draws the seed of the hash from torch's generator.
        device: device of the tables and their lookups; None is torch's default device.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.
        hash_seeds: seeds of the hash of keys alone, one per table, in [0, 2^63); None uses `seed`.

    Raises:
        BlockingIOError: the store is open in another module or process; it may raise other
            exceptions of its own.
        MemoryError: the system has no address space for the capacities, on the CPU.
        TypeError: an argument has a wrong type.
        ValueError: arguments are inconsistent, a number is out of range, the device is meta, or the
            store has other tables.

    Example:
        >>> table = emblib.DynamicSpec(capacity=1_000, dim=16, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.Adam(0.01))
        >>> ids, offsets = torch.tensor([2**62, -7, 12]), torch.tensor([0, 2, 3])
        >>> pooled = bags(ids, offsets)  # inserts 3 keys
        >>> pooled.shape, bags.size(0)
        (torch.Size([2, 16]), 3)
        >>> pooled.sum().backward()  # updates their rows
    """

    state: DynamicState  # the tables; its tensors are parameter and buffers of the module
    tables: TableSpecs
    _lock: CompletingLock  # the lock of `state`
    _calls: KeyedCalls | None = None
    feature_table: Tensor
    dropped_updates: Tensor
    """Number of lookups, so far, whose keys left their table between forward and backward."""
    byte_layout: Tensor  # see `DynamicState`
    breaks_graphs = True
    """Lookups are in no compiled graph: an index is state, and its rows move."""
    spec_kind = SpecKind(
        DynamicSpec,
        "DynamicSpec(capacity=1000, dim=64)",
        "for a TableSpec use TableBatchedEmbeddingBags",
    )

    def __init__(
        self,
        tables: Sequence[DynamicSpec],
        optimizer: Optimizer | None = None,
        *,
        backing: BackingStore | None = None,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
        hash_seeds: Sequence[int] | None = None,
    ) -> None:
        if backing is not None:
            check_backing(backing)
            tables = backing.with_insert_policy(tables)
            training.check_storable(tables)
        super().__init__(tables, optimizer, pooling, feature_tables, precision, BoundsCheck.WARNING)
        self.tables = TableSpecs(self.tables)
        check_bool("include_last_offset", include_last_offset)
        self.include_last_offset = include_last_offset
        self.seed = 0 if seed is None else check_count("seed", seed, minimum=0)
        self._updates_in_backward = autograd.updates_in_backward(self.optimizer)
        training.check_optimizer(self.optimizer, self.tables, has_backing=backing is not None)
        check_capacity(self.tables)
        device = torch.empty(0, device=device).device

        self.state = DynamicState(
            self.tables,
            self.table_names,
            self.optimizer,
            self.precision,
            seed=self.seed,
            hash_keys=hash_keys_of(seed, self.table_names, hash_seeds),
            device=device,
            overflow_rows=0 if backing is None else backing.overflow_rows(device),
            feature_tables=self.feature_tables,
        )
        self._lock = self.state.lock
        self.total_rows = self.state.layout.total_rows
        self._layout = self._feature_rows(self.state.layout.feature_row)
        self.index, self.row_initializer = self.state.index, self.state.row_initializer
        self.admission, self.scores = self.state.admission, self.state.scores
        self.expiry = self.state.child_modules().get("expiry")
        self._register_rows(self.state.row_buffers, self.state.byte_layout)
        self.register_buffer("dropped_updates", self.state.dropped_updates, persistent=False)
        features = torch.tensor(self.feature_tables, dtype=torch.int64, device=device)
        self.register_buffer("feature_table", features, persistent=False)
        self._zeros = torch.zeros(0, dtype=torch.int32, device=device)
        self._register_common(device)
        self._bind_state()
        self._reset_common()
        if backing is not None:
            self.state.backing = BackingTier(self.state, backing)

    def _register_rows(self, buffers: Sequence[Tensor], byte_layout: Tensor) -> None:
        weights, *states = buffers
        self._register_row_buffers(weights, states, persistent=False)
        self.register_buffer("byte_layout", byte_layout, persistent=False)

    def _bind_state(self) -> None:
        """Point the state at the module's current tensors."""
        self._calls = None  # it references the previous tensors
        state = self.state
        state.weights, state.optimizer_states = self.weights, self._states()
        state.byte_layout, state.hyperparams = self.byte_layout, self.hyperparams
        state.dropped_updates = self.dropped_updates
        state.owner = weakref.ref(self)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; `weights` is passed on to the state, which uses it too."""
        super().register_parameter(name, param)
        if name == "weights" and param is not None:
            self.state.weights = param

    @property
    def backing(self) -> BackingTier | None:
        """Return the backing tier; None without one."""
        return self.state.backing

    @property
    def eviction_log(self) -> EvictionLog | None:
        """Return the log of removed keys; None before `track_evictions`."""
        return self.state.eviction_log

    @property
    def num_training_steps(self) -> int:
        """Return the number of training forwards, those before a checkpoint too; reads the device.

        `clear` sets it to 0, unless evictions are tracked.
        """
        return self.state.index.tick

    def table_handles(self) -> DynamicTables:
        """Return the handle of each table, by name."""
        return handles_of(self)

    # Functions of the state

    table_rows = dynamic_state.of_state(DynamicState.table_rows)
    size = dynamic_state.size
    capacity = dynamic_state.capacity
    find = dynamic_state.find
    reserve = dynamic_state.reserve
    shrink = shrinking.shrink
    erase = training.erase
    clear = training.clear
    key_status = dynamic_state.key_status
    status_of = dynamic_state.status_of
    stats = dynamic_state.stats
    tier_stats = dynamic_state.tier_stats
    track_statistics = dynamic_state.track_statistics
    statistics = dynamic_state.statistics
    bucket_fill = dynamic_state.bucket_fill
    reset_stats = dynamic_state.reset_stats
    nbytes = dynamic_state.nbytes
    track_evictions = dynamic_state.track_evictions
    set_eviction_score = dynamic_state.set_eviction_score
    set_eviction_step = dynamic_state.set_eviction_step
    eviction_score = dynamic_state.eviction_score
    expire_keys = sweeps.expire_keys
    set_clock = dynamic_state.set_clock
    skip_pause = dynamic_state.skip_pause
    flush = dynamic_state.flush
    close = dynamic_state.close
    save = table_dumps.save
    load = table_dumps.load

    @without_gradients
    @atomic
    def reset_parameters(self) -> None:
        """Remove all keys as `clear` does, and reset the optimizer as at construction."""

        def reset() -> None:
            self._reset_common()
            self.clear()

        self.state.lock.complete(reset, lambda: True)  # moves to the store are cancelled

    @atomic
    def track_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the states of `optimizer` for `weights` reset in the rows of new keys.

        Call it with `optim.External`. An optimizer of torch.optim knows rows, not keys, so without
        this call a new key continues with the states of the evicted key that had its row.

        Raises:
            ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
        """
        training.track_optimizer_state(self.state, optimizer)

    # Lookups

    @run_uncompiled
    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Return pooled rows `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        With `batch_sizes` pooled rows are flat, as in `TableBatchedEmbeddingBags`.

        Args:
            indices: int64, uint64 or int32 `[L]`, the key of each lookup: any value, none is
                reserved. Do not overwrite them before backward, which may look them up again.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`. Without the last entry if
                `include_last_offset` is False.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: `[F][ranks]` bags per feature and rank, for features of unequal batch
                sizes; None if all have B bags.
            counts: int64 `[L]`, number of uses per lookup, if ids were deduplicated; None is 1
                each. Eviction by counts and admission use it.

        Raises:
            RuntimeError: a shape, a dtype, a device or the number of offsets is wrong; on the CPU,
                the first offset is above 0, or with one feature the last one is below L; a key
                found no slot in a table with `OnInsertFailure.RAISE`; the batch has more ids
                outside the fast tier than `BackingStore.max_misses`; or, in training, a table with
                `Eviction.CUSTOM` has no score, or only some tables are frozen.
            TypeError: indices have another dtype, indices or offsets are not tensors, or
                `batch_sizes` are not ints.
            ValueError: `batch_sizes` do not fit; on the CPU, counts are below 0; there are weights
                without pooling; or, in training, the clock returned a number that is not a time, or
                `FrequencyAdmission.rule` something other than one bool per key.
            Exception: the backing store, the clock or the rule raised it.

        Other invalid offsets are clamped, with a warning.
        """
        if is_padded() and (num_padding := training.num_padding_ids(indices, offsets)):
            return self._forward_behind_padding(
                num_padding, indices, offsets, per_sample_weights, batch_sizes, counts
            )
        if not is_compiling():
            self.check_layout()
        ids = as_keys(indices)
        if per_sample_weights is not None or counts is not None or ids.dim() != 1:
            training.check_batch(ids, per_sample_weights, counts, self.pooling)
        if counts is None and batch_sizes is None and self._may_use_short_call(offsets):
            trains = self.training and torch.is_grad_enabled() and not self._frozen
            look_up_at_once = self._train_at_once if trains else self._serve_at_once
            pooled = look_up_at_once(ids, offsets, per_sample_weights)
            if pooled is not None:
                return pooled
        refuse_transforms("per_sample_weights", per_sample_weights, ids, offsets, module=self)
        keys, batch = self._make_batch(ids, offsets, batch_sizes)
        return self._look_up(keys, batch, per_sample_weights, counts)

    def _forward_behind_padding(
        self,
        num_padding: int,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        batch_sizes: Sequence[Sequence[int]] | None,
        counts: Tensor | None,
    ) -> Tensor:
        """Look up a batch whose first `num_padding` ids are padding, which reads zeros."""
        weights, use_counts = (
            None if values is None else values[num_padding:] for values in (sample_weights, counts)
        )
        ids, offsets = indices[num_padding:], offsets - num_padding
        out = self.forward(ids, offsets, weights, batch_sizes=batch_sizes, counts=use_counts)
        is_pooled = self.pooling is not Pooling.NONE
        return out if is_pooled else torch.cat([out.new_zeros(num_padding, out.shape[1]), out])

    def _may_use_short_call(self, offsets: Tensor) -> bool:
        """Return whether `_train_at_once` or `_serve_at_once` may get a batch of equal batch sizes.

        Offsets that are not a tensor are left to `_make_batch`, which raises.
        """
        return self.include_last_offset and not is_compiling() and isinstance(offsets, Tensor)

    @atomic
    def _train_at_once(
        self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> Tensor | None:
        """Insert a training batch with one op, and look it up.

        Returns None, with nothing changed, if the tables or the batch need more ops.
        """
        calls, state = self._calls, self.state
        if calls is None or not calls.matches(self):
            calls = self._prepare_calls()
        if self._frozen_tables or not calls.can_insert(state, ids, offsets, sample_weights):
            return None
        ids = ids.contiguous()
        inserted = one_op.insert_in_one_op(state, calls.shared, ids, offsets)
        if inserted is None:
            return None
        update = state.update_of(inserted.keys, inserted.slots, inserted.reads)
        update.groups = inserted.groups
        return look_up(
            calls.grad_anchor,
            calls,
            update,
            inserted.offsets,
            sample_weights,
            self.output_dtype,
            True,
        )

    @atomic
    def _serve_at_once(
        self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> Tensor | None:
        """Find the keys of a batch with one op, and look it up without insertion or update.

        Returns None if the tables or the batch need more ops.
        """
        calls, state = self._calls, self.state
        if calls is None or not calls.matches(self):
            calls = self._prepare_calls()
        if not calls.can_find(state, ids, offsets, sample_weights):
            return None
        found = one_op.find_in_one_op(state, calls.shared, ids.contiguous(), offsets)
        if found is None:
            return None
        return calls.look_up(found.reads, found.offsets, sample_weights, self.output_dtype)

    def _make_batch(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
        *,
        is_prefetch: bool = False,
    ) -> tuple[Keys, autograd.Lookup]:
        """Check the offsets of a batch; return it as keys, and as a `Lookup` without rows.

        A prefetch counts no invalid offsets, because the lookup of the batch will count them.
        """
        if not self.include_last_offset:
            offsets = append_last_offset(ids, offsets)
        bag_layout, output_dim = None, self.output_dim
        if batch_sizes is not None:
            bag_layout, output_dim = self.lay_out_bags(offsets, batch_sizes)
        # Every id is valid, so only the offsets are checked, with zeros in place of the ids. In
        # padded batches -1 is used, which the check also accepts before the first bag.
        valid_ids = torch.full_like(ids, -1) if is_padded() else self._zeros_like(ids)
        message, features = _OFFSETS_MESSAGE, self.features
        offsets = check_bounds(
            self,
            valid_ids,
            offsets,
            features,
            bag_layout,
            message,
            counts_violations=not is_prefetch,
        )
        starts = training.feature_starts(offsets, len(self.feature_tables), batch_sizes)
        keys = Keys(ids.contiguous(), starts, self.feature_table)
        return keys, autograd.Lookup(
            features=self.features,
            indices=ids,
            offsets=offsets,
            bag_layout=bag_layout,
            pooling=self.pooling,
            total_rows=self.total_rows,
            output_dim=output_dim,
            repaired=self.bounds_check is not BoundsCheck.NONE,
        )

    def _zeros_like(self, ids: Tensor) -> Tensor:
        """Return int32 zeros, one per id, usually in memory that batches share."""
        if is_in_export():  # zeros of the last batch would fix the number of ids
            return torch.zeros_like(ids, dtype=torch.int32)
        zeros, num_ids = self._zeros, ids.numel()
        if zeros.numel() != num_ids or zeros.device != ids.device:
            if zeros.device != ids.device or zeros.untyped_storage().nbytes() < 4 * num_ids:
                zeros = torch.zeros(2 * num_ids, dtype=torch.int32, device=ids.device)
            zeros = self._zeros = zeros.as_strided((num_ids,), (1,))
        return zeros

    @atomic
    def _look_up(
        self,
        keys: Keys,
        batch: autograd.Lookup,
        sample_weights: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        """Look up a checked batch: train, repeat a checkpointed forward, or change nothing."""
        if is_in_export():
            return self._look_up_exported(keys, batch, sample_weights)
        calls = self._calls
        if calls is None or not calls.matches(self):
            calls = self._prepare_calls()
        is_replicated = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
        if is_replicated and self._updates_in_backward:
            check_not_replicated(self.features)
        forward = recomputation.checkpointed_forward(training=self.training)
        if self._frozen or not self._trains(forward):
            return self._look_up_untrained(keys, batch, sample_weights, calls)
        if self._frozen_tables:
            raise RuntimeError(
                f"of the dynamic tables {self.table_names}, which are one kernel, "
                f"{[self.table_names[t] for t in sorted(self._frozen_tables)]} are frozen: a "
                "training forward inserts the keys of all; freeze all of them, or look up in "
                "evaluation mode"
            )
        if is_replicated:
            training.check_replicas(self.state.index.tags, self.weights)
        update = training.insert_or_repeat(self.state, keys, counts, forward)
        return self._look_up_inserted(update, batch, sample_weights, calls)

    def _look_up_inserted(
        self,
        update: TrainingUpdate,
        batch: autograd.Lookup,
        sample_weights: Tensor | None,
        calls: KeyedCalls,
    ) -> Tensor:
        """Look up a batch whose keys are inserted, so that its backward runs `update`."""
        tiers, dtype = calls.tiers, self.output_dtype
        # The first forward of a checkpointed region; its repetition has gradients enabled.
        if not torch.is_grad_enabled():
            batch = update.reads.applied_to(batch)
            return autograd.lookup_no_grad(tiers.weights, batch, sample_weights, dtype)
        # One op is the backward.
        if calls.can_serve(batch, sample_weights):
            return look_up(
                self.grad_anchor,
                calls,
                update,
                batch.offsets,
                sample_weights,
                dtype,
                batch.repaired,
            )
        batch = update.reads.applied_to(batch)
        update.has_weight_gradient = sample_weights is not None and sample_weights.requires_grad
        update.batch = batch  # without the update, which would be a cycle
        batch = batch._replace(hooks=update)
        # Backward leaves gradients on the weights, for an optimizer of torch.optim.
        if not self._updates_in_backward:
            self._unstepped_gradients.check([self.weights])
            return autograd.lookup(
                self.weights, [self.weights], batch, self.optimizer, sample_weights, dtype
            )
        # Several ops are the backward.
        tiers = tiers._replace(output_dtype=dtype)
        return autograd.fused_lookup(self.grad_anchor, tiers, self.optimizer, batch, sample_weights)

    def _prepare_calls(self) -> KeyedCalls:
        """Make the shared arguments of calls from the module's current tensors and options."""
        if self._updates_in_backward:
            self._check_not_wrapped([self.weights])
        shared = OneOpArguments.from_state(self.state, self.features, self.feature_table)
        self._calls = KeyedCalls(self, self._tiers(), shared)
        return self._calls

    def _trains(self, forward: recomputation.CheckpointedForward | None) -> bool:
        """Return whether a lookup inserts keys: in training mode with gradients enabled.

        A checkpointed region that trains counts as enabled. If backward leaves gradients, the
        weights must also require them.
        """
        with_grad = torch.is_grad_enabled() or (forward is not None and forward.trains_without_grad)
        needs_update = self._updates_in_backward or self.weights.requires_grad
        return self.training and with_grad and needs_update

    @without_gradients
    def _reads_of_keys(self, keys: Keys) -> BatchReads:
        """Return the rows that a lookup without insertion reads."""
        state = self.state
        slots = state.index.find(keys) if state.backing is None else state.backing.search(keys)
        return state.row_initializer.reads_of_slots(keys, slots)

    def _look_up_exported(
        self, keys: Keys, batch: autograd.Lookup, sample_weights: Tensor | None
    ) -> Tensor:
        """Look up for `torch.export`: without gradients, in the memory of one device."""
        if self.training and not self._frozen:
            raise RuntimeError(
                f"dynamic tables {self.table_names} insert keys in training: call eval() before "
                "torch.export, keys without a row then read their default value"
            )
        if self.state.backing is not None:
            raise RuntimeError(
                f"rows of {self.table_names} are in a backing store, which an exported program "
                "lacks: load them into tables without one, see docs/tiers.md"
            )
        batch = self._reads_of_keys(keys).applied_to(batch)
        return autograd.lookup_no_grad([self.weights], batch, sample_weights, self.output_dtype)

    def _look_up_untrained(
        self,
        keys: Keys,
        batch: autograd.Lookup,
        sample_weights: Tensor | None,
        calls: KeyedCalls,
    ) -> Tensor:
        """Look up without insertion or update; sample weights get their gradient."""
        reads = self._reads_of_keys(keys)
        batch = reads.applied_to(batch)
        tiers = calls.tiers._replace(output_dtype=self.output_dtype)
        if sample_weights is None or not torch.is_grad_enabled():
            return autograd.lookup_no_grad(tiers.weights, batch, sample_weights, self.output_dtype)
        update = self.state.update_of(keys, reads.indices, reads)
        batch = batch._replace(hooks=WeightGradient(batch, update))
        return autograd.fused_lookup(
            self.grad_anchor.detach(), tiers, self.optimizer, batch, sample_weights
        )

    def _tiers(self) -> autograd.Tiers:
        weights, *states = self.state.row_buffers
        return autograd.Tiers([weights], states, self.hyperparams, self.output_dtype)

    @run_uncompiled
    @without_gradients
    @atomic
    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Read the rows of a later batch that are in the backing store, in another thread.

        This changes no result and moves no row between the tiers. Arguments and errors are those of
        `forward`. Without a store, or in front of `HostRows` on the CPU, whose rows a step reads in
        less time than a prefetch takes, it does nothing and checks no argument.
        """
        if self.state.backing is not None and self.state.backing.gains_from_prefetch:
            keys, _ = self._make_batch(as_keys(indices), offsets, batch_sizes, is_prefetch=True)
            self.state.backing.prefetch(keys)

    # Saving and loading

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        checkpoint.write_state(self.state, destination, prefix)

    def _expected_keys(self, state_dict: Mapping[str, Any]) -> Iterable[str]:
        return checkpoint.expected_names(self.state, state_dict)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the module in a state dict."""
        return checkpoint.state_problems(self.state, state_dict, prefix)

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        _, _, missing_keys, unexpected_keys, errors = arguments
        if not state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            checkpoint.read_state(self.state, state_dict, prefix, missing_keys, unexpected_keys)

    @property
    @shows_attribute_errors
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """Return the state dict entries that are not parameters or buffers, as attributes."""
        return checkpoint.names_as_attributes(self.state)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return dict.fromkeys([*self.table_names, checkpoint.CLOCK], "_names_in_checkpoints")

    # Copies, and moves to another device

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self.state.backing is not None:
            self.state.backing.drop_overflow_rows()
        training.refuse_to_empty(fn)
        check_not_shared(fn)
        device = self.hyperparams.device
        new_device = fn(torch.empty(0, device=device)).device
        if device == new_device:
            super()._apply(fn, recurse)
        else:
            check_device(new_device)
            self._move(fn, new_device)
        self._bind_state()
        return self

    def _move(self, fn: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Move the module to another device with `fn`, a function of `nn.Module._apply`."""
        state = self.state
        if state.budget is not None:
            raise RuntimeError(
                f"the tables {self.table_names} belong to a memory budget, which is for the CPU: "
                "move a copy (copy.deepcopy), which belongs to none"
            )
        rows = self.state.layout.snapshot(state.row_buffers, state.capacities())
        if state.last_uses is not None:
            state.last_uses = state.last_uses.copy_to(device, state.capacities())
        self.index = state.index = state.index.copy_to(device)
        # A copy would allocate the reserved memory too, so only the rows in use are copied.
        self._set_row_buffers([buffer.new_empty(0) for buffer in state.row_buffers])
        state.last_batch = None
        super()._apply(fn)
        buffers = self.state.layout.allocate(device)
        self._set_row_buffers(buffers)
        self.state.layout.restore(buffers, rows)

    def _set_row_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Replace the memory of weights and optimizer states by flat buffers."""
        weights, *states = buffers
        if self.weights.dim() == 2:
            dim = self.weights.shape[1]
            weights = weights.view(weights.numel() // dim, dim)
        self.weights.data = weights
        for state, tensor in zip(self.optimizer.states, states, strict=True):
            setattr(self, f"state_{state.name}", tensor)
        self._bind_state()

    @atomic
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, with the rows in use only."""
        if self.state.backing is not None:
            raise TypeError(
                "a module with a backing store cannot be copied or pickled, as its store has one "
                "owner; make a module with another store and load the state_dict of this one"
            )
        state = dict(self.__dict__)
        state_names = [f"state_{optimizer_state.name}" for optimizer_state in self.optimizer.states]
        state["_parameters"] = {**self._parameters, "weights": None}
        state["_buffers"] = {**self._buffers, **dict.fromkeys(state_names)}
        state["_zeros"] = self._zeros[:0].clone()
        capacities = self.state.capacities()
        state["_rows_in_use"] = self.state.layout.snapshot(self.state.row_buffers, capacities)
        state["_requires_grad"] = self.weights.requires_grad
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, requires_grad = state.pop("_rows_in_use"), state.pop("_requires_grad", True)
        super().__setstate__(state)
        buffers = self.state.layout.allocate(self.hyperparams.device)
        self._register_rows(buffers, self.byte_layout)
        self.weights.requires_grad_(requires_grad)
        self._bind_state()
        self.state.layout.restore(buffers, rows)

    def _describe_size(self, spec: DynamicSpec) -> str:
        return f"{spec.capacity} x {spec.dim}"
