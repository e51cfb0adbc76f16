"""Short calls: a lookup and its backward as one op each, with arguments that are prepared once.

A small batch spends most of its time in Python between ops, and on a GPU in launches. So
`ShortCalls` stores the arguments that all calls of a module share. The op of forward checks the
batch and looks it up. The op of backward groups the lookups, counts the step and updates the rows.
Modules with a row cache (`CachedCalls`) run a third op before these, which checks and groups the
batch and fetches its rows; backward reuses the groups. On the CPU, a batch with invalid indices or
offsets needs more ops.

A call is served if its tables (`can_serve_tables`), its inputs (`can_serve_inputs`) and the state
of the module allow it (`ShortCalls.can_serve`). `emblib.ops.autograd` serves the other calls with
the same kernels, so results have the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from emblib.columns import Tier
from emblib.ops import autograd, codes, tbe
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import c_function
from emblib.ops.scaled_gradients import scale_of_backward, unscale
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling
from emblib.tables import batches, optimizer_hooks
from emblib.tables.bounds_report import BOUNDS_MESSAGE, BatchCheck, report_of
from emblib.tables.cache import BatchId, BatchInFlight, PrefetchingCache
from emblib.tables.memory import Memory
from emblib.tables.parameters import is_replicated_by
from emblib.tables.recomputation import checkpointed_forward, is_recomputation

_lookup_checked = c_function(tbe.tbe_lookup_checked_)
_backward_ = c_function(tbe.tbe_backward_)
_IGNORE = codes.BOUNDS_CHECK["ignore"]


class ShortCallTables(Protocol):
    """A module of dense tables, as short calls use it."""

    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`
    grad_anchor: Tensor  # scalar that ties outputs to autograd
    bounds_violations: Tensor  # int64 `[2]`, invalid indices and offsets so far
    bounds_check: BoundsCheck
    include_last_offset: bool
    optimizer: Optimizer
    pooling: Pooling
    output_dtype: torch.dtype
    output_dim: int
    total_rows: int
    training: bool

    @property
    def memory(self) -> Memory:
        """Return the memory of the tables."""

    @property
    def prefetching_cache(self) -> PrefetchingCache | None:
        """Return the cache of the tables with its batches in flight; None without a cache."""

    @property
    def is_frozen(self) -> bool:
        """Return whether no table is trained."""

    @property
    def refuses_short_calls(self) -> bool:
        """Return whether calls are reported, or tables are frozen one by one."""

    def call_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the weights, None where a parametrization computes them, then all buffers."""


def can_serve_inputs(
    device: torch.device, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> bool:
    """Return whether one op can serve these inputs: they are plain tensors, the ids on `device`.

    False if a mode or transform of torch must see every op, or if the sample weights require a
    gradient. The caller must check the device of the sample weights, and that nothing is compiled.
    """
    return (
        type(indices) is Tensor
        and type(offsets) is Tensor
        and indices.device == device
        and offsets.device == device
        and (
            sample_weights is None
            or (type(sample_weights) is Tensor and not sample_weights.requires_grad)
        )
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class LookupBoundsCheck:
    """The bounds check that the lookup ops of a module make, and the report of violations.

    Attributes:
        check: arguments of the op that say what it checks and where it counts violations.
        counts_violations: whether the op counts violations, which it does on a GPU in mode WARNING.
            If so, pass the result of `begin` to the op, and call `end` after it; else pass `check`.
        repairs_offsets: whether the op repairs offsets, which it does on a GPU except in mode NONE.
            On the CPU the op returns [] for an invalid batch instead.
    """

    def __init__(self, module: batches.BoundsCheckedModule) -> None:
        self._bounds_check, is_cuda = module.bounds_check, module.features.is_cuda
        mode_code = codes.BOUNDS_CHECK.get(module.bounds_check.value)  # None for NONE
        self.check = BatchCheck(mode_code, module.bounds_violations)
        self.counts_violations = is_cuda and module.bounds_check is BoundsCheck.WARNING
        self.repairs_offsets = is_cuda and mode_code is not None
        self._report = report_of(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the copy of a module makes its own

    def matches(self, module: batches.BoundsCheckedModule) -> bool:
        """Return whether a module still has the options of this check."""
        has_same_counters = self.check.violations is module.bounds_violations
        return has_same_counters and self._bounds_check is module.bounds_check

    def begin(self) -> BatchCheck:
        """Return the check of the next op; it counts nothing if checkpointing repeats a forward."""
        return self.check_without_counting() if is_recomputation() else self.check

    def check_without_counting(self) -> BatchCheck:
        """Return the check without counting."""
        return self.check._replace(mode=_IGNORE) if self.counts_violations else self.check

    def end(self, module: batches.BoundsCheckedModule, check: BatchCheck) -> None:
        """Have a later check report what `check` counted, so that the host does not wait now."""
        if check.mode != _IGNORE:
            self._report.add_check(module, BOUNDS_MESSAGE)


# Output, offsets as they were read (repaired if need be), batch in flight (None without a cache).
LookupResult = tuple[Tensor, Tensor, BatchInFlight | None]


def update_in_one_op(tiers: autograd.Tiers, optimizer_code: int | None, *arguments: Any) -> None:
    """Call `tbe_backward_` with `arguments`, which are those after the code of the optimizer.

    `optimizer_code` must not be None. The versions of the weights increase unless the step can
    change no row, see `autograd.may_write_weights`.
    """
    assert optimizer_code is not None
    if autograd.may_write_weights(
        tiers.hyperparams, optimizer_code
    ):  # first, as interrupts may follow
        torch.autograd.graph.increment_version(tiers.weights)
    _backward_(tiers.weights, tiers.states, tiers.hyperparams, optimizer_code, *arguments)


class ShortCalls:
    """The short calls of a module, with the arguments that they share.

    The arguments hold until tensors or options of the module change: where `matches` is false, the
    module makes a new object. Threads may share one. A copy or pickle of it is None, because the
    copy of a module makes its own.

    In all methods `indices` is int32 or int64 `[L]`, `offsets` `[F * B + 1]`, `sample_weights`
    float32 `[L]` or None, and outputs and their gradients are `[B, output_dim]`, or `[L, dim]` for
    NONE.

    Args:
        module: module of the tables.
        get_tiers: function that returns the memory of the module.

    Attributes:
        can_serve_tables: whether the tables and the optimizer allow short calls; if not, only
            `matches` and `can_serve` may be called.
    """

    def __init__(self, module: ShortCallTables, get_tiers: Callable[[], autograd.Tiers]) -> None:
        self._optimizer = module.optimizer
        self._has_all_offsets = module.include_last_offset
        self._bounds_check, self._pooling = module.bounds_check, module.pooling
        self._tensors = module.call_tensors()
        weights = self._tensors[0]
        self.can_serve_tables = weights is not None and _can_serve_tables(module)
        if weights is None or not self.can_serve_tables:
            return
        self._weights, self._address = weights, weights.data_ptr()
        self._anchor = module.grad_anchor
        self._device = module.features.device
        self._is_cuda = self._device.type == "cuda"
        self._check = LookupBoundsCheck(module)
        self.tiers = get_tiers()
        self.rule = autograd.UpdateRule.from_optimizer(module.optimizer)
        features = module.features
        self.batch = autograd.Lookup(  # with placeholders for indices and offsets
            features, features, features, None, module.pooling, module.total_rows, module.output_dim
        )
        self._pooling_code = codes.POOLING[module.pooling.value]
        self._optimizer_code = codes.OPTIMIZER[module.optimizer.name]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def matches(self, module: ShortCallTables) -> bool:
        """Return whether a module still has the tensors and options of these calls."""
        tensors = module.call_tensors()
        return (
            self._optimizer is module.optimizer
            and self._has_all_offsets is module.include_last_offset
            and self._bounds_check is module.bounds_check
            and self._pooling is module.pooling
            and len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and (not self.can_serve_tables or self._weights.data_ptr() == self._address)
        )

    def can_serve(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> bool:
        """Return whether a call with these arguments may be short.

        False if `can_serve_tables` or `can_serve_inputs` is false, the module refuses short calls,
        `DistributedDataParallel` replicates it, or the lookup is only for its backward. Other
        modules may be served in DDP too: backward repeats a checkpointed forward outside of it, and
        must save the same tensors.
        """
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        return (
            self.can_serve_tables
            and not module.refuses_short_calls
            and can_serve_inputs(self._device, indices, offsets, sample_weights)
            and (ddp is None or not is_replicated_by(ddp, self.batch.features))
            and not autograd.is_for_update()
        )

    def __call__(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Pool each bag; with gradients enabled, backward updates tables that are not frozen."""
        if torch.is_grad_enabled() and not module.is_frozen:
            return _apply_lookup(self._anchor, self, module, indices, offsets, sample_weights)
        in_order = torch.is_grad_enabled()
        output, _, flight = self.look_up(
            module, indices, offsets, sample_weights, in_order=in_order
        )
        if flight is not None:
            with flight.lock:
                flight.after_update()
        return output

    def look_up(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        *,
        in_order: bool,
    ) -> LookupResult:
        """Look up a batch, and report invalid indices and offsets.

        On the CPU, an invalid batch is repaired and looked up again, or raises as
        `batches.check_bounds` does. `in_order` has an effect with a cache, see
        `CachedCalls.look_up`.
        """
        check = self._check.begin() if self._check.counts_violations else self._check.check
        results = self._read(module, indices, offsets, sample_weights, check)
        if self._check.counts_violations:
            self._check.end(module, check)
        if results:
            return results[0], results[1] if len(results) == 2 else offsets, None
        offsets = batches.check_bounds(module, indices, offsets, self.batch.features)
        return self._read_repaired(module, indices, offsets, sample_weights), offsets, None

    def _read(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        check: BatchCheck,
        slots: Tensor | None = None,
    ) -> list[Tensor]:
        """Run the op of a lookup, which reads rows at `slots` if there are any.

        Returns:
            `[output]`; `[output, repaired offsets]` on a GPU, except without a check; [] for an
            invalid batch on the CPU.
        """
        results: list[Tensor] = _lookup_checked(
            self.tiers.weights,
            self.batch.features,
            indices,
            offsets,
            sample_weights,
            self._pooling_code,
            self.batch.output_dim,
            module.output_dtype,
            check.mode,
            check.violations,
            slots,
        )
        return results

    def _read_repaired(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Look up a batch whose offsets are valid; return the output."""
        batch = self.batch._replace(indices=indices, offsets=offsets, slots=slots)
        weights = self.tiers.weights
        return autograd.lookup_no_grad(weights, batch, sample_weights, module.output_dtype)

    def update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        flight: BatchInFlight | None,
        is_finite: Tensor | None = None,
    ) -> None:
        """Apply one optimizer step with the gradient of an output; skip it if `is_finite` is false.

        `is_finite` is a bool scalar on the device; None if no `GradScaler` has scaled the gradient.
        `flight` is what `look_up` returned: None here.
        """
        self._update(grad, indices, offsets, sample_weights, None, is_finite)

    def _update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        row_tensors: Sequence[Tensor] | None,
        is_finite: Tensor | None,
    ) -> None:
        """Run the op of a backward, after clipping and maximisation.

        `row_tensors` are the groups of the batch and the slots of its distinct rows; None if the op
        is to group the lookups.
        """
        batch = self.batch
        update_in_one_op(
            self.tiers,
            self._optimizer_code,
            self.rule.descent(autograd.clip_gradient(grad, self.rule)),
            batch.features,
            indices,
            offsets,
            sample_weights,
            self._pooling_code,
            batch.total_rows,
            self._check.repairs_offsets,
            is_finite,
            row_tensors,
        )


class CachedCalls(ShortCalls):
    """The short calls of a module with a row cache, without DISK tables and fetches in passes."""

    def __init__(
        self,
        module: ShortCallTables,
        get_tiers: Callable[[], autograd.Tiers],
        prefetching_cache: PrefetchingCache,
    ) -> None:
        super().__init__(module, get_tiers)
        self._prefetching_cache = prefetching_cache
        self.can_serve_tables = self.can_serve_tables and prefetching_cache.fetches_at_once
        if self.can_serve_tables:
            self._tiers_for_moves = prefetching_cache.tiers_for_moves(self.tiers)
            self._no_check = self._check.check._replace(mode=None)

    def can_serve(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> bool:
        """Return whether a call may be short, see `ShortCalls`; False in checkpointed regions."""
        return (
            super().can_serve(module, indices, offsets, sample_weights)
            and checkpointed_forward(training=module.training) is None
        )

    def prefetch(self, module: ShortCallTables, batch_id: BatchId) -> None:
        """Fetch the rows of a batch before its forward, which counts and reports invalid ids.

        On the CPU this method already raises RuntimeError for invalid input in mode FATAL, and for
        offsets that would skip ids or a bag in mode WARNING.
        """
        check = self._check.check_without_counting()
        batch = self.batch._replace(indices=batch_id.indices, offsets=batch_id.offsets)
        if self._prefetching_cache.prefetch(batch, self._tiers_for_moves, batch_id, check):
            return
        offsets = batches.check_bounds(module, *batch_id, batch.features, counts_violations=False)
        batch = batch._replace(offsets=offsets)
        self._prefetching_cache.prefetch(batch, self._tiers_for_moves, batch_id, self._no_check)

    def look_up(
        self,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        *,
        in_order: bool,
    ) -> LookupResult:
        """Look up a batch, which is in flight from now on, and report invalid input.

        With `in_order`, if batches are prefetched, this must be the next of them; RuntimeError for
        another one.
        """
        batch_id = BatchId(indices, offsets)
        with self._prefetching_cache.lock:
            is_next = self._prefetching_cache.is_next(batch_id, in_order=in_order)
            return self._look_up(module, batch_id, sample_weights, is_prefetched=is_next)

    def _look_up(
        self,
        module: ShortCallTables,
        batch_id: BatchId,
        sample_weights: Tensor | None,
        *,
        is_prefetched: bool,
    ) -> LookupResult:
        """Fetch the rows of a batch unless they are prefetched, then read them at their slots.

        On the CPU, an invalid batch is repaired and fetched again. If the lookup fails, a
        prefetched batch stays the next of the queue; a batch that was not prefetched is dropped.
        """
        indices, offsets = batch_id
        prefetching_cache = self._prefetching_cache
        check = counting_check = (
            self._check.begin() if self._check.counts_violations else self._check.check
        )
        batch = self.batch._replace(indices=indices, offsets=offsets)
        tiers = self._tiers_for_moves
        flight = prefetching_cache.start(batch, tiers, batch_id, check, is_next=is_prefetched)
        if flight is None:  # an invalid batch on the CPU
            offsets = batches.check_bounds(module, indices, offsets, batch.features)
            batch = batch._replace(offsets=offsets)
            flight = prefetching_cache.start(batch, tiers, batch_id, self._no_check, is_next=False)
            assert flight is not None
        if not is_prefetched:  # the fetch above has checked it
            offsets = offsets if flight.offsets is None else flight.offsets
            check = self._no_check
        try:
            slots = flight.locate().slots
            results = self._read(module, indices, offsets, sample_weights, check, slots)
            if self._check.counts_violations:
                self._check.end(module, counting_check)
            if len(results) == 2:
                offsets = results[1]
            elif not results:
                if is_prefetched:
                    offsets = batches.check_bounds(module, indices, offsets, batch.features)
                results = [self._read_repaired(module, indices, offsets, sample_weights, slots)]
        except BaseException:
            prefetching_cache.drop(flight)
            raise
        prefetching_cache.dequeue(flight)
        return results[0], offsets, flight

    def update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        flight: BatchInFlight | None,
        is_finite: Tensor | None = None,
    ) -> None:
        """Apply one optimizer step to the rows at their current slots.

        `flight` is the batch in flight that `look_up` returned; its rows may be evicted afterwards.
        """
        assert flight is not None
        with flight.lock:
            locations = flight.before_update(lookups=False)
            assert locations.row_slots is not None
            row_tensors = [*locations.groups, locations.row_slots]
            self._update(grad, indices, offsets, sample_weights, row_tensors, is_finite)
            flight.after_update()


class ShortLookup(torch.autograd.Function):
    """Autograd function of a short call: results are those of `autograd.FusedLookup`."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        calls: ShortCalls,
        module: ShortCallTables,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Return `[B, output_dim]`, or `[L, dim]` for NONE."""
        ctx.calls = calls
        # Calls with gradients are in order. `is_grad_enabled` is False within this function.
        output, offsets, ctx.flight = calls.look_up(
            module, indices, offsets, sample_weights, in_order=True
        )
        ctx.save_for_backward(indices, offsets, sample_weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every row of the batch."""
        calls: ShortCalls = ctx.calls
        indices, offsets, sample_weights = ctx.saved_tensors
        scale = scale_of_backward()
        if scale is None:
            calls.update(grad, indices, offsets, sample_weights, ctx.flight)
            return None, None, None, None, None, None
        unscaled_gradient = unscale(grad, scale)
        calls.update(
            unscaled_gradient.gradient,
            indices,
            offsets,
            sample_weights,
            ctx.flight,
            unscaled_gradient.is_finite,
        )
        return unscaled_gradient.overflow(), None, None, None, None, None


# Without the unwrapping that `Function.apply` does for functorch, whose transforms never come here.
_apply_lookup: Callable[..., Tensor] = super(torch.autograd.Function, ShortLookup).apply


def _can_serve_tables(module: ShortCallTables) -> bool:
    """Return whether the ops of short calls can serve these tables and their optimizer."""
    has_cache = module.prefetching_cache is not None
    tiers = (Tier.DEVICE, Tier.HOST) if has_cache else (Tier.DEVICE,)
    return (
        type(module.features) is Tensor
        and (module.features.is_cpu or module.features.is_cuda)
        and autograd.updates_in_backward(module.optimizer)
        and module.include_last_offset
        and optimizer_hooks.find_global_decay(module.optimizer) is None
        and not optimizer_hooks.is_periodic(module.optimizer)
        and all(offset.tier in tiers for offset in module.memory.layout.offsets)
    )
