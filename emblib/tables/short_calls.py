"""Calls of tables on the CPU as one op per pass, with arguments that are prepared once.

For small batches the time of a call is that of the Python between ops. `ShortCalls` holds all that
the calls of a module have in common, so that forward is one op, which checks the batch and looks it
up, and backward one, which groups the lookups and updates the rows. The kernels are those of
`emblib.ops.autograd`, which serves every call that needs more: the bits are the same.
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
from emblib.ops.scaled_gradients import scale_of_backward
from emblib.tables import base, optimizer_hooks

if TYPE_CHECKING:
    from emblib.tables.tbe import TableBatchedEmbeddingBags


class ShortCalls:
    """The arguments that the calls of a module share, as long as its tensors and optimizer stay.

    `suit` says whether calls need nothing but tables in memory on the CPU. A copy or pickle of this
    object is None: the copy of a module makes its own.
    """

    def __init__(self, module: TableBatchedEmbeddingBags) -> None:
        self._optimizer = module.optimizer
        self._has_all_offsets = module.include_last_offset
        self._buffers = tuple(module._buffers.values())
        self._weights = _weights_of(module)
        self.suit = self._weights is not None and _is_plain(module)
        if not self.suit:
            return
        self._address = self._weights.data_ptr()
        self._anchor = module.grad_anchor
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
            and indices.is_cpu
            and offsets.is_cpu
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
        batch = self.batch
        out, is_valid = tbe.tbe_lookup_checked(
            self.tiers.weights,
            batch.features,
            indices,
            offsets,
            sample_weights,
            self._pooling,
            batch.output_dim,
            module.output_dtype,
        )
        if is_valid:
            return out, offsets
        offsets = base.check_bounds(module, indices, offsets, batch.features)
        batch = batch._replace(indices=indices, offsets=offsets)
        weights = self.tiers.weights
        out = autograd.lookup_no_grad(weights, batch, sample_weights, module.output_dtype)
        return out, offsets

    def update(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> None:
        """Make one step with the gradient of an output."""
        tiers, batch = self.tiers, self.batch
        tbe.tbe_backward_(
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
        )
        if tiers.hyperparams.tolist()[Hyper.LEARNING_RATE] != 0:  # otherwise nothing moved
            torch.autograd.graph.increment_version(tiers.weights)


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
        batch = calls.batch._replace(indices=indices, offsets=offsets)
        overflow, _ = autograd.update_in_backward(
            calls.tiers, calls.rule, batch, sample_weights, grad, scale, autograd.Wanted()
        )
        return overflow, None, None, None, None, None


# Without the unwrapping that `Function.apply` does for functorch, whose transforms never come here.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, ShortLookup).apply


def _weights_of(module: TableBatchedEmbeddingBags) -> Any:
    """Return the weights; None where a parametrization computes them."""
    weights = module._parameters.get("weights")
    return module._buffers.get("weights") if weights is None else weights


def _is_plain(module: TableBatchedEmbeddingBags) -> bool:
    """Return whether tables are in memory and nothing happens between the ops of a step."""
    return (
        type(module.features) is Tensor
        and module.features.is_cpu
        and autograd.updates_in_backward(module.optimizer)
        and module.include_last_offset
        and optimizer_hooks.global_decay(module.optimizer) is None
        and not optimizer_hooks.is_periodic(module.optimizer)
        and all(place.tier == Tier.DEVICE for place in module._memory.layout.offsets)
    )
