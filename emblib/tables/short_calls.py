"""Calls of tables as one op per pass, with arguments that are prepared once.

For small batches the time of a call is that of the Python between ops, on a GPU also that of their
launches. `ShortCalls` holds all that the calls of a module have in common, so that forward is one
op, which checks the batch and looks it up, and backward one, which groups the lookups, counts the
step and updates the rows. The kernels are those of `emblib.ops.autograd`, which serves every call
that needs more: the bits are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from emblib.columns import Hyper, Tier
from emblib.ops import autograd, codes, tbe
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import native
from emblib.ops.scaled_gradients import scale_of_backward, unscaled
from emblib.specs import BoundsCheck
from emblib.tables import base, optimizer_hooks
from emblib.tables.bounds_report import BOUNDS_MESSAGE, report_of
from emblib.tables.recomputation import is_repeated

if TYPE_CHECKING:
    from emblib.tables.tbe import TableBatchedEmbeddingBags


_lookup_checked = native(tbe.tbe_lookup_checked_)
_backward_ = native(tbe.tbe_backward_)
_IGNORE = codes.BOUNDS_CHECK["ignore"]


class ShortCalls:
    """The arguments that the calls of a module share, as long as its tensors and options stay.

    `suit` says whether calls need nothing but tables in the memory of their device. A copy or
    pickle of this object is None: the copy of a module makes its own.
    """

    def __init__(self, module: TableBatchedEmbeddingBags) -> None:
        self._optimizer = module.optimizer
        self._has_all_offsets = module.include_last_offset
        self._bounds_check = module.bounds_check
        self._buffers = tuple(module._buffers.values())
        self._weights = _weights_of(module)
        self.suit = self._weights is not None and _is_plain(module)
        if not self.suit:
            return
        self._address = self._weights.data_ptr()
        self._anchor = module.grad_anchor
        self._device = module.features.device
        self._is_cuda = self._device.type == "cuda"
        self._mode = codes.BOUNDS_CHECK.get(module.bounds_check.value)  # None for NONE
        self._violations = module.bounds_violations
        self._report = report_of(module)
        self.tiers = module._tiers()
        self.rule = autograd.UpdateRule.of(module.optimizer)
        features = module.features
        self.batch = autograd.Lookup(  # with placeholders for indices and offsets
            features, features, features, None, module.pooling, module.total_rows, module.output_dim
        )
        self._pooling = codes.POOLING[module.pooling.value]
        self._code = codes.OPTIMIZER[module.optimizer.name]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def are_of(self, module: TableBatchedEmbeddingBags) -> bool:
        """Return whether the tensors and options of a module are those of its last call."""
        buffers = module._buffers
        return (
            self._optimizer is module.optimizer
            and self._has_all_offsets is module.include_last_offset
            and self._bounds_check is module.bounds_check
            and len(buffers) == len(self._buffers)
            and all(map(operator.is_, buffers.values(), self._buffers))
            and _weights_of(module) is self._weights
            and (not self.suit or self._weights.data_ptr() == self._address)
        )

    def take(
        self,
        module: TableBatchedEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> bool:
        """Return whether a call with these arguments alone can take this path.

        It cannot where a mode or transform of torch is to see every op, where a gradient of the
        sample weights is wanted, where tables are frozen one by one or replicated, and for lookups
        that are made for their backward alone.
        """
        return (
            self.suit
            and type(indices) is Tensor
            and type(offsets) is Tensor
            and indices.device == self._device
            and offsets.device == self._device
            and (
                sample_weights is None
                or (type(sample_weights) is Tensor and not sample_weights.requires_grad)
            )
            and module._reporting is None
            and not module._untrained
            and getattr(DistributedDataParallel, "_active_ddp_module", None) is None
            and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._is_tracing()
            and torch._C._functorch.peek_interpreter_stack() is None
            and not autograd.is_for_update()
        )

    def __call__(
        self,
        module: TableBatchedEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Pool each bag; if the module trains, backward applies the optimizer."""
        if torch.is_grad_enabled() and not module._frozen:
            return _apply(self._anchor, self, module, indices, offsets, sample_weights)
        return self.look_up(module, indices, offsets, sample_weights)[0]

    def look_up(
        self,
        module: TableBatchedEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the valid offsets of a batch; an invalid one is reported."""
        batch, mode = self.batch, self._mode
        warns = self._is_cuda and self._bounds_check is BoundsCheck.WARNING
        if warns and is_repeated():
            warns, mode = False, _IGNORE
        results = _lookup_checked(
            self.tiers.weights,
            batch.features,
            indices,
            offsets,
            sample_weights,
            self._pooling,
            batch.output_dim,
            module.output_dtype,
            mode,
            self._violations,
        )
        if warns:
            self._report.add_check(module, BOUNDS_MESSAGE)
        if results:
            return results[0], results[1] if len(results) == 2 else offsets
        offsets = base.check_bounds(module, indices, offsets, batch.features)
        batch = batch._replace(indices=indices, offsets=offsets)
        weights = self.tiers.weights
        out = autograd.lookup_no_grad(weights, batch, sample_weights, module.output_dtype)
        return out, offsets

    def update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        is_finite: Tensor | None = None,
    ) -> None:
        """Make one step with the gradient of an output; none if `is_finite` is false."""
        tiers, batch = self.tiers, self.batch
        if self._is_cuda:  # first, lest an interrupt omit it
            torch.autograd.graph.increment_version(tiers.weights)
        _backward_(
            tiers.weights,
            tiers.states,
            tiers.hyperparams,
            self._code,
            self.rule.descent(autograd.clip_gradient(grad, self.rule)),
            batch.features,
            indices,
            offsets,
            sample_weights,
            self._pooling,
            batch.total_rows,
            self._is_cuda and self._mode is not None,
            is_finite,
        )
        if not self._is_cuda and tiers.hyperparams.tolist()[Hyper.LEARNING_RATE] != 0:
            torch.autograd.graph.increment_version(tiers.weights)  # otherwise nothing moved


class ShortLookup(torch.autograd.Function):
    """Look up and update as `autograd.FusedLookup` does, in one op each."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        calls: ShortCalls,
        module: TableBatchedEmbeddingBags,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
    ) -> Tensor:
        """Return `[B, output_dim]`, or `[L, dim]` for NONE."""
        out, offsets = calls.look_up(module, indices, offsets, sample_weights)
        ctx.calls = calls
        ctx.save_for_backward(indices, offsets, sample_weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every row of the batch."""
        calls: ShortCalls = ctx.calls
        indices, offsets, sample_weights = ctx.saved_tensors
        scale = scale_of_backward()
        if scale is None:
            calls.update(grad, indices, offsets, sample_weights)
            return None, None, None, None, None, None
        found = unscaled(grad, scale)
        calls.update(found.gradient, indices, offsets, sample_weights, found.is_finite)
        return found.overflow(), None, None, None, None, None


# Without the unwrapping that `Function.apply` does for functorch, whose transforms never come here.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, ShortLookup).apply


def _weights_of(module: TableBatchedEmbeddingBags) -> Any:
    """Return the weights; None where a parametrization computes them."""
    weights = module._parameters.get("weights")
    return module._buffers.get("weights") if weights is None else weights


def _is_plain(module: TableBatchedEmbeddingBags) -> bool:
    """Return whether tables are on the device and nothing happens between the ops of a step."""
    return (
        type(module.features) is Tensor
        and (module.features.is_cpu or module.features.is_cuda)
        and autograd.updates_in_backward(module.optimizer)
        and module.include_last_offset
        and optimizer_hooks.global_decay(module.optimizer) is None
        and not optimizer_hooks.is_periodic(module.optimizer)
        and all(place.tier == Tier.DEVICE for place in module._memory.layout.offsets)
    )
