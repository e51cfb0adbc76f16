"""Table-batched embeddings: T dense tables in one kernel, the optimizer fused into backward.

Most forwards of `TableBatchedEmbeddingBags` are `ShortCalls`. The others check bounds
(`_prepare_batch`), fetch missing rows if there is a cache (`PrefetchingCache.look_up`), and look up
(`_read`, or `_read_for_gradients` if backward leaves gradients).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from emblib import ops
from emblib.attribute_errors import shows_attribute_errors
from emblib.columns import FeatureColumn, Tier
from emblib.grad_mode import without_gradients
from emblib.ops import autograd, joint_step, tbe
from emblib.ops.derivatives import refuse_transforms
from emblib.optim import Gradient, Optimizer, description
from emblib.specs import (
    BoundsCheck,
    CacheConfig,
    Placement,
    Pooling,
    Precision,
    TableSpec,
    check_bool,
    format_config,
)
from emblib.tables import base, batches, hyperparameters, optimizer_hooks, parameters, state_dicts
from emblib.tables.base import FusedTables, SpecKind
from emblib.tables.bounds_report import BatchCheck
from emblib.tables.cache import BatchId, PrefetchingCache
from emblib.tables.graph_break import run_uncompiled
from emblib.tables.locks import atomic
from emblib.tables.memory import Memory
from emblib.tables.parameters import IncompleteParameter
from emblib.tables.reading import TableReading
from emblib.tables.recomputation import is_first_training_forward
from emblib.tables.reporting import Reporting, StatsReporter
from emblib.tables.row_cache import CacheStats, RowCache
from emblib.tables.short_calls import CachedCalls, ShortCalls


class TableBatchedEmbeddingBags(FusedTables):
    """Look up F features in T tables at once, and pool them into one `[B, sum D]` output.

    With a fused optimizer, backward groups the lookups by row and applies `optimizer` once to every
    distinct row of the batch, without storing a gradient of the weights. Every forward then has its
    own update in backward: two forwards in one loss are two steps, and gradients do not accumulate.
    An optimizer with `deferred=True` leaves a sparse gradient on `weights` instead, which
    `FusedOptimizer.step` applies. `optim.External()` leaves a sparse or dense gradient for any
    optimizer of `torch.optim`, and no optimizer leaves a dense one.

    Tables may be larger than the device: `TableSpec.placement` selects the memory of each table,
    and `cache` configures the cache of those in slow memory. The location of a row does not change
    a result (except with stochastic rounding, whose random numbers depend on the placement, and
    with a `CacheConfig.dtype` that differs from the dtype of the weights).

    Threads may share a module: with a cached table every call is atomic; without one, simultaneous
    updates of the same row may be lost (docs/threads.md).

    Args:
        tables: rows, dim, name and placement of each table.
        optimizer: optimizer of `emblib.optim`. None leaves dense gradients for an optimizer of
            `torch.optim`, as `optim.External(gradient=Gradient.DENSE)` does.
        pooling: SUM, MEAN, or NONE for one vector per lookup (needs one dim for all tables).
        feature_tables: the table of each feature; by default feature i reads table i.
        precision: dtypes of weights, output and states, and rounding; None is `Precision()`.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        cache: cache of the MANAGED_CACHING and DISK tables, if any; None is `CacheConfig()`.
        device: device of the tables and their lookups; None is torch's default device.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.

    Raises:
        TypeError: an argument has another class.
        ValueError: a feature reads a missing table, table names are equal, dims differ where one is
            needed, `pooling` or `bounds_check` is unknown, `device` does not have the placement of
            a table, or the optimizer excludes a table.
        OSError: files of DISK tables cannot be opened; `DiskStore` lists more errors of these.

    Weights start uniform in +-1/sqrt(rows) of their table, as DLRM's do; existing DISK tables start
    from their last `flush`.

    Example:
        >>> tables = [emblib.TableSpec(rows=1_000, dim=64), emblib.TableSpec(rows=500, dim=32)]
        >>> bags = emblib.TableBatchedEmbeddingBags(tables, emblib.optim.Adagrad(0.1))
        >>> indices = torch.tensor([3, 14, 15, 92])
        >>> offsets = torch.tensor([0, 2, 3, 3, 4])  # 2 features x 2 samples
        >>> pooled = bags(indices, offsets)
        >>> pooled.shape
        torch.Size([2, 96])
        >>> pooled.sum().backward()  # updates the 4 rows
    """

    tables: tuple[TableSpec, ...]
    spec_kind = SpecKind(
        TableSpec, "TableSpec(rows=1000, dim=64)", "for a TTSpec use TTEmbeddingBag"
    )
    has_parameter_per_table = False  # as opposed to modules of collections
    num_distinct_rows: int | None = None
    """Number of distinct rows of each following batch; None counts them, which for sparse gradients
    reads the device. A wrong number raises ValueError on the CPU; on a GPU it is not checked."""
    row_cache: RowCache | None
    state_prev_iter: Tensor  # last step that updated each row, for GlobalDecay
    _memory: Memory
    _prefetching_cache: PrefetchingCache | None
    _reporting: Reporting | None
    _num_begun_steps: int  # steps that training forwards have begun, for periodic optimizers
    _calls: ShortCalls | None = None
    _begun_steps_at_update: int  # `_num_begun_steps` at the last deferred update

    @torch.inference_mode(mode=False)  # tensors of inference mode could not be trained later
    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        cache: CacheConfig | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        super().__init__(tables, optimizer, pooling, feature_tables, precision, bounds_check)
        check_bool("include_last_offset", include_last_offset)
        self.include_last_offset = include_last_offset
        self.cache = CacheConfig() if cache is None else cache
        self._check_arguments()
        optimizer_hooks.check_tables(self.optimizer, self.tables, self.pooling)
        self._is_periodic = optimizer_hooks.is_periodic(self.optimizer)
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)

        self._memory = Memory(self.tables, self.optimizer, self.precision, self.cache, device)
        table_offsets, self.total_rows = self._memory.layout.offsets, self._memory.layout.total_rows
        self._layout = self._feature_rows(lambda t, column: table_offsets[t].feature(column))
        if any(offset.tier != Tier.DEVICE for offset in table_offsets):
            self.parameter_class = IncompleteParameter
        self._register_memory(device)
        self._make_cache(device)
        self._reporting = None
        self.reset_parameters()

    def _check_arguments(self) -> None:
        """Raise TypeError for a wrong cache, ValueError for tables that the optimizer excludes."""
        if not isinstance(self.cache, CacheConfig):
            raise TypeError(
                f"cache must be a CacheConfig, e.g. CacheConfig(sets=1024), got {self.cache!r}"
            )
        if autograd.updates_in_backward(self.optimizer):
            return
        if self.optimizer.deferred and self.has_parameter_per_table:
            return
        if any(spec.placement not in (Placement.DEVICE, Placement.HOST) for spec in self.tables):
            raise ValueError(
                f"{description(self.optimizer)} leaves its gradient on a parameter, so all tables "
                "must be on the device: pass an optimizer that backward applies for others, e.g. "
                "optim.SGD(0.01), or, with deferred=True, use an EmbeddingBagCollection, which has "
                "a parameter per table"
            )

    def _register_memory(self, device: torch.device) -> None:
        """Register the device tier as parameter and buffers: they move with the module."""
        self._register_row_buffers(*self._memory.allocate_device(device))
        self._register_common(device)

    def _make_cache(self, device: torch.device) -> None:
        """Make the cache of rows, if a table is cached."""
        memory, states = self._memory, self.optimizer.states
        self.row_cache = self._prefetching_cache = None
        if memory.layout.num_cached_rows:
            self.row_cache = RowCache.from_options(
                memory.layout, self.table_names, states, self.cache, self.precision, device
            )
            self._prefetching_cache = PrefetchingCache(
                memory, self.row_cache, self.cache, self._lock
            )

    @without_gradients
    def reset_parameters(self) -> None:
        """Redraw the weights, zero optimizer state and step; the learning rate is `optimizer.lr`.

        It also initialises a module that was constructed on `meta` and moved by `to_empty`. The
        call at construction neither redraws DISK tables that were opened with rows in them, nor
        resets the learning rate and step that are stored with them; later calls do.
        """
        stored_hyperparams = self._memory.take_stored_hyperparams()
        # Opening changes nothing on disk, so a process that ends now damages nothing.
        with self.overwriting() if stored_hyperparams is None else contextlib.nullcontext():
            self._reset_common()
            if stored_hyperparams is not None:
                self.hyperparams[: len(stored_hyperparams)] = torch.tensor(
                    stored_hyperparams, dtype=torch.float64, device="cpu"
                )
                self.load_hyperparams(self.hyperparams)
            for t, (spec, views) in enumerate(zip(self.tables, self.table_views(), strict=True)):
                if stored_hyperparams is not None and spec.placement is Placement.DISK:
                    continue
                weight, *states = views.values()
                self._draw(t, weight)
                for state in states:
                    state.zero_()

    def _count_forwards_from_step(self) -> None:
        """Continue to count forwards from the number of steps."""
        step = 0 if self.hyperparams.is_meta else self.step
        self._num_begun_steps = self._begun_steps_at_update = step

    def _draw(self, table: int, weight: Tensor) -> None:
        """Draw the initial values of a table."""
        bound = 1.0 / math.sqrt(max(self.tables[table].rows, 1))
        ops.primitives.fill_uniform_(weight, -bound, bound, ops.primitives.new_seed())

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pool embeddings to `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        Args:
            indices: int32 or int64 `[L]`, row of each lookup in the table of its feature; -1 skips.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`. `[F * B]` without
                `include_last_offset`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: `[F][ranks]` if features differ in batch size: the bags of feature f from
                rank r, in rank order. `offsets` is then `[bags + 1]`, and the output is one
                vector: rank by rank, feature by feature, bag by bag.

        Raises:
            TypeError: indices, offsets or weights are not tensors, or `batch_sizes` are not ints.
            RuntimeError: a dtype, a device or the number of offsets is wrong; an index or offset is
                invalid, see `BoundsCheck`; there are weights without pooling; or the batch is, with
                gradients, not the next prefetched one, or was written to since its prefetch.
            ValueError: `batch_sizes` do not fit.
        """
        refuse_transforms("per_sample_weights", per_sample_weights, indices, offsets, module=self)
        if not torch.compiler.is_compiling():
            self.check_layout()
            calls = self._current_calls() if batch_sizes is None else None
            if calls and calls.can_serve(self, indices, offsets, per_sample_weights):
                return calls(self, indices, offsets, per_sample_weights)
        if per_sample_weights is not None:
            batches.check_tensor("per_sample_weights", per_sample_weights)
        self._check_weights()
        batch_id = BatchId(indices, offsets)
        if torch.compiler.is_compiling() and self.breaks_graphs:
            return self._look_up_eagerly(batch_id, batch_sizes, per_sample_weights)
        if (reporting := self._reporting) is None or torch.compiler.is_compiling():
            return self._look_up(batch_id, batch_sizes, per_sample_weights)
        with reporting.timed("tbe.forward_time", indices.device):
            out = self._look_up(batch_id, batch_sizes, per_sample_weights)
        self._report_amounts(reporting, indices)
        return out

    def _prepare_calls(self) -> ShortCalls:
        """Make the shared arguments of calls from the module's current tensors and options."""
        self._check_weights()
        cache = self._prefetching_cache
        calls = CachedCalls(self, self._tiers, cache) if cache else ShortCalls(self, self._tiers)
        self._calls = calls
        return calls

    def _current_calls(self) -> ShortCalls:
        """Return the prepared calls, remade if the module has changed."""
        calls = self._calls
        return calls if calls is not None and calls.matches(self) else self._prepare_calls()

    @property
    def memory(self) -> Memory:
        """Return the memory of the tables outside the module's tensors."""
        return self._memory

    @property
    def prefetching_cache(self) -> PrefetchingCache | None:
        """Return the row cache with its batches in flight, if any table is cached."""
        return self._prefetching_cache

    @property
    def refuses_short_calls(self) -> bool:
        """Return whether calls are reported, or tables are frozen one by one."""
        return self._reporting is not None or bool(self._frozen_tables)

    def call_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the weights, None where a parametrization computes them, then all buffers."""
        weights = self._parameters.get("weights")
        buffers = self._buffers
        return buffers.get("weights") if weights is None else weights, *buffers.values()

    def _restore(self) -> None:
        self._calls = None  # they would keep the memory of the module on another device alive
        super()._restore()

    def _check_weights(self) -> None:
        """Raise RuntimeError for weights that a wrapper has replaced or replicated."""
        weights = self._parameters.get("weights")  # none in a collection
        if weights is not None:
            if autograd.updates_in_backward(self.optimizer):
                self._check_not_wrapped([weights])
        elif autograd.is_fused(self.optimizer) and "weights" not in self._buffers:  # computed
            if self.parameter_class is IncompleteParameter:
                parameters.refuse_incomplete()
            if torch.is_grad_enabled():
                parameters.refuse_replacement("weights")

    def _prepare_batch(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
        reading: TableReading | None = None,
        *,
        is_prefetch: bool = False,
    ) -> autograd.Lookup:
        """Check a batch and return it as ops take it, with repaired offsets and bag layout.

        Arguments are those of `forward`.
        """
        if not self.include_last_offset:
            offsets = batches.append_last_offset(indices, offsets)
        source = self if reading is None else reading
        checked_module: batches.BoundsCheckedModule = self if reading is None else reading.reader
        lay_out = self.lay_out_bags if reading is None else reading.lay_out_bags
        bag_layout, output_dim = lay_out(offsets, batch_sizes)
        offsets = batches.check_bounds(
            checked_module,
            indices,
            offsets,
            source.features,
            bag_layout,
            counts_violations=not is_prefetch,
        )
        return autograd.Lookup(
            source.features,
            indices,
            offsets,
            bag_layout,
            source.pooling,
            self.total_rows,
            output_dim,
            repaired=checked_module.bounds_check is not BoundsCheck.NONE,
            joint=None if reading is None else reading.joint,
        )

    @run_uncompiled
    def look_up_as(
        self,
        reading: TableReading,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Look up a batch in the only table with a reading's features and pooling."""
        return self._look_up(batch_id, batch_sizes, sample_weights, reading)

    @atomic
    def apply_joint(self, contributions: Sequence[autograd.Contribution]) -> None:
        """Apply one optimizer step with the summed gradients of several readings of the table.

        With a `GradScaler`, the overflow of the gradients is added to `grad_anchor.grad`.
        """
        feature_row, tiers = self._memory.layout.offsets[0].feature(0), self._tiers()
        apply = joint_step.apply_contributions
        overflow = apply(tiers, self.optimizer, contributions, feature_row, self._locate)
        self._begun_steps_at_update = self._num_begun_steps
        if self._prefetching_cache is not None:
            self._prefetching_cache.end_access()
        if overflow is not None:  # for a GradScaler, see FusedOptimizer
            grad_before = self.grad_anchor.grad
            self.grad_anchor.grad = overflow if grad_before is None else grad_before + overflow

    def _look_up(
        self,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
        sample_weights: Tensor | None,
        reading: TableReading | None = None,
    ) -> Tensor:
        """Look up a batch after its checks; the output is that of `forward`."""
        batch, tiers = self._prepare_batch(*batch_id, batch_sizes, reading), self._tiers()
        if self._is_periodic:
            self.begin_step(is_joint=batch.joint is not None)
        updates_in_backward = autograd.updates_in_backward(self.optimizer)
        read_rows = self._read if updates_in_backward else self._read_for_gradients
        if self._prefetching_cache is not None:
            read_slots = partial(read_rows, tiers, sample_weights=sample_weights)
            return self._prefetching_cache.look_up(
                batch, tiers, batch_id, self._no_check(), read_slots, training=self.training
            )
        return read_rows(tiers, batch, sample_weights)

    def _read_for_gradients(
        self, tiers: autograd.Tiers, batch: autograd.Lookup, sample_weights: Tensor | None
    ) -> Tensor:
        """Look up a batch whose backward leaves gradients on the parameters.

        `sample_weights` is float32 `[L]`; the output is that of `forward`.
        """
        gradient_parameters, weight_offsets = self._gradient_parameters()
        self._unstepped_gradients.check(gradient_parameters)
        if self.optimizer.leaves_gradient is Gradient.SPARSE:
            parameters.check_dense_gradients(gradient_parameters)
        return autograd.lookup(
            self.weights,
            gradient_parameters,
            batch,
            self.optimizer,
            sample_weights,
            self.output_dtype,
            self.num_distinct_rows,
            weight_offsets,
            tiers.weights[1:],
        )

    def _read(
        self, tiers: autograd.Tiers, batch: autograd.Lookup, sample_weights: Tensor | None
    ) -> Tensor:
        """Look up a batch, reading the rows at `batch.slots` or in their tables.

        The lookup goes through autograd if a backward follows; otherwise it releases the batch.
        `sample_weights` is float32 `[L]`; the output is that of `forward`.
        """
        decay, lookup_factors = optimizer_hooks.find_global_decay(self.optimizer), None
        if decay is not None:
            batch, lookup_factors = optimizer_hooks.decay_rows(
                decay, batch, self.hyperparams, self.state_prev_iter
            )
        trains = torch.is_grad_enabled() and not self._frozen
        wants_sample_grad = sample_weights is not None and sample_weights.requires_grad
        if trains or (wants_sample_grad and torch.is_grad_enabled()):
            if trains and self._frozen_tables:
                batch = batch._replace(trained_features=self._trained_features())
            grad_anchor = self.grad_anchor
            if batch.joint is not None:
                grad_anchor = batch.joint.anchor(grad_anchor.device)
            grad_anchor = grad_anchor if trains else grad_anchor.detach()
            return autograd.fused_lookup(
                grad_anchor, tiers, self.optimizer, batch, sample_weights, lookup_factors
            )
        weights = autograd.multiply_weights(sample_weights, lookup_factors)
        out = autograd.lookup_no_grad(tiers.weights, batch, weights, self.output_dtype)
        if batch.hooks is not None:
            batch.hooks.after_update()
        return out

    def _gradient_parameters(
        self,
    ) -> tuple[Sequence[Tensor], Sequence[autograd.WeightOffset] | None]:
        """Return the parameters that backward leaves gradients on, and their offsets in memory."""
        return [self.weights], None

    def _trained_features(self) -> Tensor:
        """Return `features` without the rows of frozen tables: their lookups are not grouped."""
        is_trained = [t not in self._frozen_tables for t in self.feature_tables]
        features = self.features.clone()
        features[:, FeatureColumn.ROWS] *= torch.tensor(is_trained, device=features.device)
        return features

    @property
    def breaks_graphs(self) -> bool:
        """Return whether a lookup is in no compiled graph: see `_look_up_eagerly`."""
        is_sparse = self.optimizer.leaves_gradient is Gradient.SPARSE
        return self._prefetching_cache is not None or self._is_periodic or is_sparse

    @run_uncompiled
    def _look_up_eagerly(
        self,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Look up outside compiled graphs: a cache has Python state and moves rows.

        If one graph had the lookup and the update, which both change tables, Inductor would copy
        whole tables. Periodic optimizers count forwards in Python. The length of a sparse gradient
        is the number of distinct rows, which a graph does not know.
        """
        return self._look_up(batch_id, batch_sizes, sample_weights)

    def begin_step(self, *, is_joint: bool) -> None:
        """Run the periodic part of the optimizer if the running forward is the first of a step.

        Replicas call it too: a backward makes the lookup of their step. `is_joint` tells whether
        one update follows all lookups of the table.
        """
        if not (self._is_periodic and self._begins_step(is_joint=is_joint)):
            return
        with self._lock:
            optimizer_hooks.refuse_capture(self.optimizer, self.hyperparams)
            self._num_begun_steps = step = self._num_begun_steps + 1
            self._memory.verify()  # the hooks read whole tables
            views = [v for t, v in enumerate(self.table_views()) if t not in self._frozen_tables]
            optimizer_hooks.before_forward(self.optimizer, step, self._tiers(), views)

    def _begins_step(self, *, is_joint: bool) -> bool:
        """Return whether this is a training forward, and the first one of a step."""
        if self._frozen or not is_first_training_forward(training=self.training):
            return False
        every_forward_begins = not (self.optimizer.deferred or is_joint)
        return every_forward_begins or self._num_begun_steps == self._begun_steps_at_update

    def _locate(self, groups: tbe.Groups) -> autograd.RowLocations:
        """Return where the rows of grouped lookups are: cache slots, if there is a cache."""
        if self._prefetching_cache is None:
            return super()._locate(groups)
        return self._prefetching_cache.locate(groups)

    def _apply_gradients(self) -> None:
        super()._apply_gradients()
        self._begun_steps_at_update = self._num_begun_steps
        if self._prefetching_cache is not None:
            self._prefetching_cache.end_access()

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Fetch the rows of a later batch into the cache, on the current stream.

        Any number of batches may be prefetched ahead; `forward` must then get the same tensors, not
        written to since, in the same order. Rows of batches in flight, from prefetch to the end of
        backward (or of a lookup without gradients), are not evicted. `forward` itself fetches the
        rows of a batch that was not prefetched. Without a cached table this does nothing. The host
        waits for a GPU only if a reporter times the call.

        Arguments and errors are those of `forward`, which counts and reports invalid ids.
        """
        self.prefetch_as(None, BatchId(indices, offsets), batch_sizes)

    def prefetch_as(
        self,
        reading: TableReading | None,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> None:
        """Prefetch for `look_up_as`; without a reading, for `forward`."""
        if self._prefetching_cache is not None:
            self._prefetch(self._prefetching_cache, reading, batch_id, batch_sizes)

    @run_uncompiled
    @without_gradients
    def _prefetch(
        self,
        prefetching_cache: PrefetchingCache,
        reading: TableReading | None,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> None:
        """Prefetch outside compiled graphs: batches in flight are tracked in Python."""
        calls = None if batch_sizes is not None or reading is not None else self._current_calls()
        if isinstance(calls, CachedCalls) and calls.can_serve(self, *batch_id, None):
            calls.prefetch(self, batch_id)
            return
        timer: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._reporting is not None:
            timer = self._reporting.timed("tbe.prefetch_time", batch_id.indices.device)
        with timer:
            batch = self._prepare_batch(*batch_id, batch_sizes, reading, is_prefetch=True)
            prefetching_cache.prefetch(batch, self._tiers(), batch_id, self._no_check())

    def _no_check(self) -> BatchCheck:
        """Return the check that does nothing, for a batch that `_prepare_batch` has checked."""
        return BatchCheck(None, self.bounds_violations)

    def flush(self) -> None:
        """Write cached rows and their optimizer state back to their tables; they stay in the cache.

        DISK tables are committed: after a crash they are restored to their last flush, see
        docs/placement.md. Does nothing without a cached table; raises as `DiskStore.commit` does.
        """
        if self._prefetching_cache is not None:
            self._prefetching_cache.flush(self._tiers())

    def forget_prefetched(self) -> None:
        """Forget prefetched batches, so that any batch may be the next; rows stay in the cache."""
        if self._prefetching_cache is not None:
            self._prefetching_cache.forget_prefetched()

    def reset_cache_states(self) -> None:
        """Empty the cache and forget prefetched batches; drop updates since the last `flush`."""
        if self._prefetching_cache is not None:
            self._prefetching_cache.reset(keeps_prefetched=False)

    def cache_stats(self) -> CacheStats:
        """Return requests, hits and misses since the last reset (reads the device).

        Raises:
            RuntimeError: no table of the module is cached.
        """
        if self.row_cache is None or self._prefetching_cache is None:
            raise RuntimeError(
                "no table of this module is cached; placements MANAGED_CACHING and DISK are"
            )
        with self._lock:
            self._prefetching_cache.wait_for_prefetch()
            return self.row_cache.stats()

    @atomic
    def reset_cache_stats(self) -> None:
        """Reset the counters of the cache to zero."""
        if self.row_cache is not None and self._prefetching_cache is not None:
            self._prefetching_cache.wait_for_prefetch()
            self.row_cache.reset_stats()

    @atomic
    def set_step(self, step: int) -> None:
        """Continue counting from `step`; periodic optimizers follow it."""
        super().set_step(step)
        self._num_begun_steps = self._begun_steps_at_update = step

    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams`; periodic optimizers follow its step."""
        super().load_hyperparams(values)
        self._count_forwards_from_step()

    def table_weights(self) -> list[Tensor]:
        """Return the tables as `[rows, dim]` views: writing to one writes to the module.

        The cache is flushed and emptied first; prefetched batches stay valid. After the next
        batch, views of cached tables may have old values, and writes to them may be lost. Call
        `flush` after writes to DISK tables: the end of the process before that damages them.
        """
        with self._lock:
            self.flush_and_empty()
            self._memory.verify()
            return [views["weight"] for views in self.table_views()]

    def table_optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return per table its optimizer state by name, as views `[rows, dim]` or `[rows]`.

        What `table_weights` says of its views holds for these.
        """
        with self._lock:
            self.flush_and_empty()
            self._memory.verify()
            views = self.table_views()
        return [{k: v for k, v in tensors.items() if k != "weight"} for tensors in views]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state`, and `cache` (rows, states and tags)."""
        bytes_off_device = self._memory.nbytes()
        state_bytes = sum(state.nbytes for state in self._states())
        return {
            "weights": self.weights.nbytes + bytes_off_device["weights"],
            "optimizer_state": state_bytes + bytes_off_device["optimizer_state"],
            "cache": 0 if self.row_cache is None else self.row_cache.nbytes(),
        }

    def set_stats_reporter(self, reporter: StatsReporter | None, tbe_id: str = "") -> None:
        """Report durations and amounts of this module to `reporter`, as `tbe_id`; None stops it.

        Events: `tbe.forward_time` and `tbe.prefetch_time` in milliseconds, `tbe.lookups`,
        `tbe.weights_bytes`, `tbe.optimizer_state_bytes` and `tbe.cache_bytes`, and for cached
        tables `tbe.cache.<counter>` and `tbe.cache.<table>.<counter>` of `CacheStats`. Forwards in
        compiled graphs are not reported. TypeError if a method of `StatsReporter` is missing.
        """
        self._reporting = None if reporter is None else Reporting(reporter, tbe_id)

    def _report_amounts(self, reporting: Reporting, indices: Tensor) -> None:
        if reporting.is_active:
            reporting.report_amount("tbe.lookups", indices.numel())
            for name, nbytes in self.nbytes().items():
                reporting.report_amount(f"tbe.{name}_bytes", nbytes)
            if self.row_cache is not None:
                for event, value in self.cache_stats().events():
                    reporting.report_amount(f"tbe.cache.{event}", value)
        reporting.step += 1

    def _tiers(self) -> autograd.Tiers:
        """Return weights, optimizer states and hyperparameters, in the form that ops take."""
        weights, states = self._memory.all_tiers(self._device_weights(), self._states())
        if self.row_cache is not None:
            weights.append(self.row_cache.weights)
            states.extend(self.row_cache.states)
        return autograd.Tiers(weights, states, self.hyperparams, self.output_dtype)

    def _device_weights(self) -> Tensor:
        """Return the weights of the device tier as a plain tensor."""
        if self.parameter_class is not IncompleteParameter:
            return self.weights.detach()
        with torch._C.DisableTorchFunctionSubclass():
            return self.weights.detach()

    def table_views(self) -> list[dict[str, Tensor]]:
        """Return per table `weight` and its optimizer states in their tier, without the cache."""
        return self._memory.views(self._device_weights(), self._states())

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Empty the cache without writing it back, and allow writes to tables inside this context.

        DISK tables are committed at its end.
        """
        with self._lock, self._memory.writing_everything(self.hyperparams):
            # After preparing the disk tier, so that a full disk cannot lose cached updates.
            if self._prefetching_cache is not None:
                self._prefetching_cache.reset()
            yield

    @atomic
    def flush_and_empty(self) -> None:
        """Write the cache back to the tables and empty it, before they are read or written."""
        if self._prefetching_cache is not None:
            self.flush()
            self._prefetching_cache.reset()

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.flush()
        self._memory.verify()
        for key, tensor in self._checkpoint().items():
            destination[prefix + key] = tensor

    def _expected_keys(self, state_dict: Mapping[str, Any]) -> Iterable[str]:
        return self._checkpoint()

    @without_gradients
    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        metadata, _, *key_lists, errors = arguments  # the lists are of missing and unexpected keys
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        targets = self._checkpoint()
        sources = state_dicts.select_entries(targets, state_dict, prefix, *key_lists)
        if not sources:
            return
        if len(sources) < len(targets):
            self._memory.verify()
        if self._prefetching_cache is not None and len(sources) < len(targets):
            # Entries missing from the checkpoint keep their values, those in the cache included.
            sources = state_dicts.without_shared_memory(sources, targets)
            self.flush()
        if "hyper" in sources:
            hyperparameters.set_fields_from_hyperparams(self, sources["hyper"])
        if self.hyperparams.is_meta and metadata.get(state_dicts.ASSIGN):
            self.to_empty(device=next(iter(sources.values())).device)
        elif self.hyperparams.is_meta:
            state_dicts.warn_of_meta(prefix, sources)
        with self.overwriting():
            for key, target in self._checkpoint().items():
                if key in sources:
                    target.copy_(sources[key])
        self._restore()
        self._count_forwards_from_step()

    def _checkpoint(self) -> dict[str, Tensor]:
        return {
            **dict(base.state_entries(self.table_names, self.table_views())),
            "hyper": self.hyperparams,
        }

    @atomic
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._memory.check_device((probe := fn(torch.empty(1, device="cpu"))).device)
        self.flush()
        self.reset_cache_states()
        super()._apply(fn, recurse)
        self._memory.move_host_tier(self.hyperparams.device, is_shared=probe.is_shared())
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memory.move_host_tier(self.hyperparams.device)

    @property
    @shows_attribute_errors
    def _tables_by_name(self) -> SimpleNamespace:
        """Return the tables and their states by their names in state dicts."""
        with self._lock:
            self._memory.verify()
        views = zip(self.table_names, self.table_views(), strict=True)
        return SimpleNamespace(**{name: SimpleNamespace(**tensors) for name, tensors in views})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Map the first part of a key for `torch.distributed.checkpoint.state_dict`."""
        return dict.fromkeys(self.table_names, "_tables_by_name")

    def _describe_size(self, spec: TableSpec) -> str:
        placement = "" if spec.placement is Placement.DEVICE else f" ({spec.placement.value})"
        return f"{spec.rows} x {spec.dim}{placement}"

    def extra_repr(self) -> str:
        """Describe tables, optimizer and options."""
        fields = [super().extra_repr()]
        if self.row_cache is not None:
            fields.append(format_config(self.cache))
        return ", ".join(fields)
