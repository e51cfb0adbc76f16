"""Tables that every rank has a copy of: looked up at home, and kept equal by equal updates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from emblib.collections.groups import TableGroups
from emblib.jagged.offsets import running_sums
from emblib.ops import lookups, route
from emblib.sharding.distribute import Inputs, Received, ScaledGradient
from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.layout import Layout


class SynchronisedCopies(nn.Module):
    """The replicated tables of a collection.

    With a fused optimizer the ids of all ranks are there before backward, which brings the
    gradients: every rank then makes the same step on the whole batch, for any optimizer. Without
    one, each rank has the gradient of its own batch on ordinary parameters, for
    `DistributedDataParallel` to add up.
    """

    def __init__(
        self, layout: Layout, groups: TableGroups, ranks: Ranks, *, synchronised: bool
    ) -> None:
        super().__init__()
        self.groups, self.synchronised, self._world_size = groups, synchronised, ranks.size
        self._units = layout.replicated.units
        self._features = [unit.feature for unit in self._units]
        order = torch.tensor(self._features, dtype=torch.int64)
        self.register_buffer("order", order.to(ranks.device), persistent=False)
        self.register_buffer("anchor", torch.zeros((), device=ranks.device), persistent=False)

    order: Tensor
    anchor: Tensor

    def forward(self, inputs: Inputs) -> Tensor:
        """Rows of this rank's own batch, `[B, columns]` or flat, or `[L, dim]` if not pooled."""
        ids, offsets, weights = reordered(inputs, self._features, self.order)
        sizes = [[inputs.bags[f]] for f in self._features] if inputs.is_variable else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.synchronised):
            return self.groups(ids, offsets, weights, batch_sizes=sizes)

    def of_features(self, inputs: Inputs, values: Tensor) -> Tensor:
        """Of `values`, one an id of the batch, those of the features that read these tables."""
        return reordered(inputs._replace(ids=values, weights=None), self._features, self.order)[0]

    def stand_in(self, received: Received, shape: tuple[int, ...]) -> Tensor:
        """What takes the gradients of all ranks' rows, of `shape`, and makes the step with them."""
        bags = received.bags[len(received.bags) - len(self._units) :]
        first = received.ids.numel() - received.copied
        offsets = received.offsets[received.offsets.numel() - 1 - sum(map(sum, bags)) :] - first
        sizes = bags if received.inputs.is_variable else None
        ids, weights = received.ids[first:], received.weights
        # All ranks make the gradient of the same weights, and where they came from it adds up.
        if weights is not None:
            weights = ScaledGradient.apply(weights[first:], 1.0 / self._world_size)

        def look_up(weights: Tensor | None) -> Tensor:
            return self.groups(ids, offsets, weights, batch_sizes=sizes)

        anchor = self.anchor.detach().requires_grad_()
        result: Tensor = _StandIn.apply(anchor, weights, look_up, shape)
        return result


class _StandIn(torch.autograd.Function):
    """A tensor without memory whose gradient is that of a lookup made in backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, look_up: Callable[..., Tensor], shape: Any
    ) -> Tensor:
        """Zeros of `shape`."""
        ctx.look_up = look_up
        ctx.save_for_backward(weights)
        return anchor.detach().expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Make the lookup, and let the optimizer have the gradient."""
        (weights,) = ctx.saved_tensors
        with torch.enable_grad():
            if weights is not None:
                weights = weights.detach().requires_grad_(ctx.needs_input_grad[1])
            with lookups.for_update():
                rows = ctx.look_up(weights)
            if rows.requires_grad:  # frozen tables have nothing to do
                rows.backward(grad.reshape(rows.shape).to(rows.dtype))
        return None, None if weights is None else weights.grad, None, None


def reordered(
    inputs: Inputs, features: list[int], order: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets and weights of some features of a batch; `order` holds the same numbers."""
    bags = inputs.first_bags(range(len(inputs.bags)))
    starts, num_ids = inputs.starts(), inputs.num_ids()
    total = sum(num_ids[f] for f in features)
    num_bags = sum(inputs.bags[f] for f in features)
    lengths = route.gather_segments(inputs.lengths, bags, order, num_bags)
    ids = route.gather_segments(inputs.ids, starts, order, total)
    weights = inputs.weights
    if weights is not None:
        weights = route.gather_segments(weights, starts, order, total)
    return ids, running_sums(lengths), weights
