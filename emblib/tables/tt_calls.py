"""Short calls of tensor-train tables: a lookup and its backward as one op each.

`ShortTTCalls` stores the arguments that all calls of a module share. The op of forward checks the
batch and looks it up. It returns what backward needs, which autograd saves: on the CPU the tensors
of the grouping, the plan and the values of left halves, on a GPU one tensor. The op of backward
counts the step and updates the cores. On the CPU, a batch with invalid indices or offsets needs
more ops. `emblib.ops.tt` serves the calls that `can_serve` refuses, with the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from emblib.ops import autograd, codes, tt
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import c_function
from emblib.ops.scaled_gradients import scale_of_backward, unscale
from emblib.specs import BoundsCheck
from emblib.tables import batches
from emblib.tables.bounds_report import BOUNDS_MESSAGE, report_of
from emblib.tables.parameters import is_replicated_by
from emblib.tables.recomputation import is_recomputation

if TYPE_CHECKING:
    from emblib.tables.tt import TableBatchedTTEmbeddingBags


_lookup_checked = c_function(tt.tt_lookup_checked_)
_backward_ = c_function(tt.tt_backward_)
_versions_of = operator.attrgetter("_version")
_IGNORE = codes.BOUNDS_CHECK["ignore"]
_SAVE_NOTHING = -1  # value of `num_saved` with which a lookup saves nothing for backward


class TTBatch(NamedTuple):
    """A batch of `ShortTTCalls`.

    Attributes:
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[F * B + 1]`, or `[bags + 1]` with a `bag_layout`.
        sample_weights: float32 `[L]`; None is 1.
        bag_layout: int64 `[bags, 2]`, if batch sizes differ.
        output_dim: columns of the output; its elements with a `bag_layout`.
    """

    indices: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    bag_layout: Tensor | None
    output_dim: int


class ShortTTCalls:
    """The short calls of a module, with the arguments that they share.

    The arguments hold until tensors or options of the module change: where `matches` is false, the
    module makes a new object. Threads may share one. A copy or pickle of it is None, because the
    copy of a module makes its own.

    Args:
        module: module of the tables.
        cores: cores of all tables, as lookups read them.

    Attributes:
        can_serve_tables: whether backward updates the cores, on a CPU or a GPU; if not, only
            `matches` and `can_serve` may be called.
    """

    def __init__(self, module: TableBatchedTTEmbeddingBags, cores: list[Any]) -> None:
        self._optimizer, self._bounds_check = module.optimizer, module.bounds_check
        self._pooling = module.pooling
        self._buffers = tuple(module._buffers.values())
        self._cores = cores
        # With gradients, `_prepare_calls` has checked that no wrapper has replaced the cores.
        self._are_cores_checked = torch.is_grad_enabled()
        features = module.features
        self.can_serve_tables = (
            type(features) is Tensor
            and (features.is_cpu or features.is_cuda)
            and autograd.updates_in_backward(module.optimizer)
        )
        if not self.can_serve_tables:
            return
        layout = module.core_layout
        self._device, self._is_cuda = features.device, features.is_cuda
        self._anchor = module.grad_anchor
        self._states = [state for states in module.core_states() for state in states]
        self._hyperparams, self._features = module.hyperparams, features
        self._id_tensors = (module.table_ids, module.feature_table_ids, features)
        self._factors = layout.op_arguments()
        self._max_saved_halves = tt.max_saved_left_halves(layout, cores)
        self._max_lookups = tt.max_lookups_at_once(layout, features.device)
        self._bounds_mode_code = codes.BOUNDS_CHECK.get(module.bounds_check.value)  # None for NONE
        self._matmul_code = codes.MATMUL_PRECISION[module.precision.matmul.value]
        self._violations, self._report = module.bounds_violations, report_of(module)
        self._rule = autograd.UpdateRule.from_optimizer(module.optimizer)
        self._optimizer_code = codes.OPTIMIZER[module.optimizer.name]
        self._pooling_code = codes.POOLING[module.pooling.value]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def matches(self, module: TableBatchedTTEmbeddingBags, cores: list[Any]) -> bool:
        """Return whether calls of a module, which reads `cores`, may use this object.

        False if its optimizer, bounds check, pooling, a buffer or a core is another object, or if
        gradients are enabled now and were not when this object was made. Other options of a module
        do not change.
        """
        buffers = module._buffers
        return (
            self._optimizer is module.optimizer
            and self._bounds_check is module.bounds_check
            and self._pooling is module.pooling
            and len(buffers) == len(self._buffers)
            and all(map(operator.is_, buffers.values(), self._buffers))
            and len(cores) == len(self._cores)
            and all(map(operator.is_, cores, self._cores))
            and (self._are_cores_checked or not torch.is_grad_enabled())
        )

    def can_serve(
        self,
        module: TableBatchedTTEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> bool:
        """Return whether a call with these arguments may be short.

        False if `can_serve_tables` is false, a mode, transform or compiler of torch must see every
        op, a tensor is of a subclass, indices or offsets are on another device, sample weights
        require a gradient, a core is frozen or shared, `DistributedDataParallel` replicates the
        module, or the batch is so long that it is looked up in chunks.

        `indices` is `[L]`, `offsets` `[F * B + 1]` or `[bags + 1]`, `sample_weights` `[L]` or None.
        """
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        return (
            self.can_serve_tables
            and batches.is_eager(indices)
            and type(offsets) is Tensor
            and indices.device == self._device
            and offsets.device == self._device
            and (
                sample_weights is None
                or (type(sample_weights) is Tensor and not sample_weights.requires_grad)
            )
            and not module.frozen_cores
            and not module.shared_gradients
            and indices.numel() <= self._max_lookups
            and (ddp is None or not is_replicated_by(ddp, self._features))
        )

    def __call__(
        self,
        module: TableBatchedTTEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Pool each bag, as `TableBatchedTTEmbeddingBags.forward` does; `can_serve` must be true.

        With gradients enabled, backward applies the optimizer and counts a step.
        """
        bag_layout, output_dim = None, module.output_dim
        if batch_sizes is not None:
            bag_layout, output_dim = module.lay_out_bags(offsets, batch_sizes)
        batch = TTBatch(indices, offsets, sample_weights, bag_layout, output_dim)
        if torch.is_grad_enabled():
            return _apply_lookup(self._anchor, self, module, batch)
        return self.look_up(module, batch, _SAVE_NOTHING)[0]

    def look_up(
        self, module: TableBatchedTTEmbeddingBags, batch: TTBatch, num_saved: int
    ) -> list[Tensor]:
        """Look up a batch, and report invalid indices and offsets.

        On the CPU, an invalid batch is repaired and looked up again, or raises as
        `batches.check_bounds` does.

        Args:
            module: module of the tables.
            batch: the batch.
            num_saved: number of left halves whose values are saved, or `_SAVE_NOTHING`.

        Returns:
            The output, the tensors to save for backward, and the offsets that were read, which
            differ from those of the batch where they were repaired.
        """
        mode_code = self._bounds_mode_code
        warns = self._is_cuda and self._bounds_check is BoundsCheck.WARNING
        if warns and is_recomputation():
            warns, mode_code = False, _IGNORE
        results = self._run_lookup(module, batch, num_saved, mode_code)
        if warns:
            self._report.add_check(module, BOUNDS_MESSAGE)
        if not results:  # an invalid batch on the CPU
            indices, offsets, _, bag_layout, _ = batch
            features = module.id_features()
            offsets = batches.check_bounds(module, indices, offsets, features, bag_layout)
            batch = batch._replace(offsets=offsets)
            results = self._run_lookup(module, batch, num_saved, None)
        if mode_code is None or not self._is_cuda:
            results.append(batch.offsets)
        return results

    def _run_lookup(
        self,
        module: TableBatchedTTEmbeddingBags,
        batch: TTBatch,
        num_saved: int,
        mode_code: int | None,
    ) -> list[Tensor]:
        """Run the op of a lookup; return its results, or [] for an invalid batch on the CPU."""
        indices, offsets, sample_weights, bag_layout, output_dim = batch
        results: list[Tensor] = _lookup_checked(
            self._cores,
            *self._id_tensors,
            indices,
            offsets,
            bag_layout,
            sample_weights,
            self._pooling_code,
            output_dim,
            module.output_dtype,
            *self._factors,
            num_saved,
            mode_code,
            self._violations,
            self._matmul_code,
        )
        return results

    def num_saved_of(self, indices: Tensor) -> int:
        """Return the number of left halves whose values a lookup saves for backward."""
        return min(indices.numel(), self._max_saved_halves)

    def versions(self) -> tuple[int, ...]:
        """Return the versions of the cores, which differ after a write that torch counts."""
        return tuple(map(_versions_of, self._cores))

    def update(
        self,
        grad: Tensor,
        batch: TTBatch,
        saved_tensors: list[Tensor],
        is_finite: Tensor | None,
        *,
        is_stale: bool,
    ) -> None:
        """Apply one optimizer step with the gradient of an output; skip it if `is_finite` is false.

        Args:
            grad: gradient in the shape of the output.
            batch: the batch, with repaired offsets.
            saved_tensors: tensors that `look_up` returned between the output and the offsets.
            is_finite: bool scalar on the device; None if no `GradScaler` has scaled the gradient.
            is_stale: whether the cores have changed since the lookup; then the saved values of left
                halves are computed again.
        """
        torch.autograd.graph.increment_version(self._cores)  # first: an interrupt must not omit it
        _backward_(
            self._cores,
            self._states,
            self._hyperparams,
            self._optimizer_code,
            self._rule.descent(autograd.clip_gradient(grad, self._rule)),
            self._features,
            batch.indices,
            batch.offsets,
            batch.bag_layout,
            batch.sample_weights,
            self._pooling_code,
            saved_tensors,
            *self._factors,
            is_stale,
            self._matmul_code,
            is_finite,
        )


class ShortTTLookup(torch.autograd.Function):
    """Autograd function of a short call: results are those of `tt.FusedTTLookup`."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        calls: ShortTTCalls,
        module: TableBatchedTTEmbeddingBags,
        batch: TTBatch,
    ) -> Tensor:
        """Return `[B, output_dim]`, `[output_dim]` with a `bag_layout`, or `[L, dim]` for NONE."""
        out, *saved_tensors, offsets = calls.look_up(
            module, batch, calls.num_saved_of(batch.indices)
        )
        ctx.calls, ctx.versions, ctx.output_dim = calls, calls.versions(), batch.output_dim
        ctx.save_for_backward(
            batch.indices, offsets, batch.sample_weights, batch.bag_layout, *saved_tensors
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every core row that contributed."""
        calls: ShortTTCalls = ctx.calls
        indices, offsets, sample_weights, bag_layout, *lookup_tensors = ctx.saved_tensors
        batch = TTBatch(indices, offsets, sample_weights, bag_layout, ctx.output_dim)
        scale, overflow, is_finite = scale_of_backward(), None, None
        if scale is not None:
            unscaled = unscale(grad, scale)
            grad, is_finite, overflow = unscaled.gradient, unscaled.is_finite, unscaled.overflow()
        is_stale = ctx.versions != calls.versions()
        calls.update(grad, batch, lookup_tensors, is_finite, is_stale=is_stale)
        return overflow, None, None, None


# Without the unwrapping that `Function.apply` does for functorch, whose transforms never come here.
_apply_lookup: Callable[..., Tensor] = super(torch.autograd.Function, ShortTTLookup).apply
