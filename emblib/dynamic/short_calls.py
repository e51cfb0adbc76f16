"""Lookups of dynamic tables by few ops, with arguments prepared once.

For small batches Python between ops dominates the time. `KeyedCalls` stores the arguments that all
calls of a module share. `KeyedLookup` looks up, and its backward groups the slots of the batch,
counts the step and updates the rows in one op. On the CPU one op can also insert the keys of a
batch (`can_insert`); it groups the lookups too, and backward only updates. Likewise one op finds
the keys of a lookup that inserts none (`can_find`), and another looks up. Other lookups, e.g. with
a gradient of the sample weights, use `emblib.ops.autograd`, with the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from emblib.dynamic.one_op import OneOpArguments, can_find_in_one_op, can_insert_in_one_op
from emblib.dynamic.rows import BatchReads, TrainingUpdate
from emblib.dynamic.state import DynamicState
from emblib.ops import autograd, codes, tbe
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import c_function
from emblib.ops.scaled_gradients import scale_of_backward, unscale
from emblib.tables import recomputation
from emblib.tables.base import FusedTables
from emblib.tables.short_calls import can_serve_inputs, update_in_one_op

_lookup = c_function(tbe.tbe_lookup)


class KeyedCalls:
    """Arguments that all calls of a module share, until its tensors or optimizer change.

    A copy or pickle of this object is None: the copy of a module makes its own.

    Args:
        module: the tables, all in the memory of their device.
        tiers: weights, optimizer states and hyperparameters of the tables.
        shared: the arguments of the ops on batches.

    Attributes:
        tiers: argument `tiers`.
        rule: how the optimizer changes rows.
        shared: argument `shared`.
        grad_anchor: scalar of the module that makes autograd call backward.
    """

    def __init__(self, module: FusedTables, tiers: autograd.Tiers, shared: OneOpArguments) -> None:
        self._optimizer, self._buffers = module.optimizer, tuple(module._buffers.values())
        self._weights = module.weights
        self._weights_address = module.weights.data_ptr()
        self.tiers, self.rule = tiers, autograd.UpdateRule.from_optimizer(module.optimizer)
        # None if no op has the optimizer.
        self._optimizer_code = codes.OPTIMIZER.get(self.rule.name)
        self._updates_in_backward = self.rule.gradient is None
        self._features, self._num_features = module.features, module.features.shape[0]
        self._pooling, self._pooling_code = module.pooling, codes.POOLING[module.pooling.value]
        self._total_rows, self._output_dim = module.total_rows, module.output_dim
        self.shared, self.grad_anchor = shared, module.grad_anchor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def matches(self, module: FusedTables) -> bool:
        """Return whether a module still has the tensors and the optimizer of these calls."""
        return (
            self._optimizer is module.optimizer
            and self._pooling is module.pooling
            and module._parameters.get("weights") is self._weights
            and self._weights.data_ptr() == self._weights_address
            and len(module._buffers) == len(self._buffers)
            and all(map(operator.is_, module._buffers.values(), self._buffers))
        )

    def can_insert(
        self, state: DynamicState, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> bool:
        """Return whether one op can insert the keys of a lookup, and another be its backward.

        False if gradients stay on the weights, and where `_can_use_ops` is.
        """
        return (
            self._updates_in_backward
            and self._can_use_ops(ids, offsets, sample_weights)
            and can_insert_in_one_op(state)
        )

    def can_find(
        self, state: DynamicState, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> bool:
        """Return whether one op can find the keys of a lookup that inserts none.

        False where `_can_use_ops` is.
        """
        return self._can_use_ops(ids, offsets, sample_weights) and can_find_in_one_op(state)

    def _can_use_ops(self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None) -> bool:
        """Return whether an op can check the offsets of a batch and find or insert its keys.

        False on a GPU, where the host does not know the results of the op; in transforms,
        checkpointed regions and `DistributedDataParallel`; and for whatever `can_serve` refuses,
        except gradients that stay on the weights, which only `can_insert` excludes, and different
        batch sizes, which the caller must exclude.
        """
        return (
            self._weights.is_cpu
            and offsets.dim() == 1
            and 0 < self._num_features < offsets.numel()
            and (offsets.numel() - 1) % self._num_features == 0
            and can_serve_inputs(self._weights.device, ids, offsets, sample_weights)
            and getattr(DistributedDataParallel, "_active_ddp_module", None) is None
            and recomputation.checkpointed_forward() is None
            and not autograd.is_for_update()
        )

    def can_serve(self, batch: autograd.Lookup, sample_weights: Tensor | None) -> bool:
        """Return whether one op can be the backward of a lookup.

        False in transforms, or if gradients stay on the weights, sample weights need a gradient,
        batch sizes differ, or the lookup is made only for its backward.
        """
        return (
            self._updates_in_backward
            and batch.bag_layout is None
            and (sample_weights is None or not sample_weights.requires_grad)
            and torch._C._functorch.peek_interpreter_stack() is None
            and not autograd.is_for_update()
        )

    def look_up(
        self,
        reads: BatchReads,
        offsets: Tensor,
        sample_weights: Tensor | None,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Pool the rows of a batch: `[B, output_dim]` of `output_dtype`, or `[L, dim]` for NONE.

        `offsets`, `[F * B + 1]`, must be valid.
        """
        output: Tensor = _lookup(
            autograd.with_default_rows(self.tiers.weights, reads.default_rows),
            self._features,
            reads.indices,
            offsets,
            reads.slots,
            None,  # bag layout
            sample_weights,
            self._pooling_code,
            self._output_dim,
            output_dtype,
        )
        return output

    def update(
        self,
        grad: Tensor,
        slots: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        is_finite: Tensor | None,
        groups: list[Tensor] | None,
        *,
        are_repaired: bool,
    ) -> None:
        """Apply one optimizer step to the rows at `slots`; none if `is_finite` is false.

        Args:
            grad: the gradient of the output.
            slots: int64 `[L]`, current slots of the rows; -1 for none.
            offsets: the offsets of the bags.
            sample_weights: float32 `[L]`, the factor of the gradient of each row; None is 1 each.
            is_finite: bool, whether a scaled gradient is finite; None if it is not scaled.
            groups: the lookups by row, the fields of `tbe.Groups`; None has the op group them.
            are_repaired: whether `offsets` have passed a bounds check, so that the op makes none.
        """
        update_in_one_op(
            self.tiers,
            self._optimizer_code,
            self.rule.descent(autograd.clip_gradient(grad, self.rule)),
            self._features,
            slots,
            offsets,
            sample_weights,
            self._pooling_code,
            self._total_rows,
            are_repaired,
            is_finite,
            groups,
        )


class KeyedLookup(torch.autograd.Function):
    """Look up and update as `autograd.FusedLookup` does, with one op in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        calls: KeyedCalls,
        update: TrainingUpdate,
        offsets: Tensor,
        sample_weights: Tensor | None,
        output_dtype: torch.dtype,
        are_repaired: bool,
    ) -> Tensor:
        """Return `[B, output_dim]`, or `[L, dim]` for NONE, in `output_dtype`.

        `grad_anchor` makes autograd call backward; `offsets` and `update` belong to one lookup.
        """
        ctx.calls, ctx.update, ctx.are_repaired = calls, update, are_repaired
        ctx.save_for_backward(offsets, sample_weights)
        return calls.look_up(update.reads, offsets, sample_weights, output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every row of the batch that is still in its table."""
        with ctx.update.lock: return KeyedLookup._update(ctx, grad)  # fmt: skip  # noqa: E701

    @staticmethod
    def _update(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        offsets, sample_weights = ctx.saved_tensors
        scale, is_finite, anchor_grad = scale_of_backward(), None, None
        if scale is not None:
            grad, is_finite = unscaled_grad = unscale(grad, scale)
            anchor_grad = unscaled_grad.overflow()
        slots, groups = ctx.update.slots_to_update()
        calls: KeyedCalls = ctx.calls
        calls.update(
            grad,
            slots,
            offsets,
            sample_weights,
            is_finite,
            groups,
            are_repaired=ctx.are_repaired,
        )
        return anchor_grad, None, None, None, None, None, None


# Skips the unwrapping of `Function.apply` for functorch, whose transforms never use this lookup.
look_up: Callable[..., Tensor] = super(torch.autograd.Function, KeyedLookup).apply
