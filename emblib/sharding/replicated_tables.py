"""Replicated tables: tables of which every rank has a replica.

Each rank looks up its own batch, and equal updates keep the replicas equal. With a fused optimizer
every rank makes the update of all batches, for which it gets the ids and gradients of all ranks
(`GradientSink`). Without one the gradients are averaged like those of the dense part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emblib.collections.groups import TableGroups
from emblib.grad_mode import in_grad_mode
from emblib.jagged.jagged_tensor import running_sums
from emblib.ops import autograd, route
from emblib.ops.derivatives import once_differentiable
from emblib.ops.joint_step import with_steps_of
from emblib.ops.scaled_gradients import mark_nested
from emblib.sharding.input_dist import IncomingBatch, LocalBatch, ScaledGradient
from emblib.sharding.layout import CollectionLayout
from emblib.sharding.layout_buffers import LayoutBuffers, int64_tensor
from emblib.sharding.ranks import RankGroup


class ReplicatedTables(LayoutBuffers):
    """The replicated tables of a collection.

    With a fused optimizer (`is_synchronised`), every rank gets the ids of all ranks in forward.
    Backward gathers the gradients of all ranks, and every rank makes the same update with the
    batches of all ranks. Without a fused optimizer, each rank has the gradient of its own batch in
    ordinary parameters, which is averaged like that of the dense part.

    Args:
        layout: layout of the collection; if `is_synchronised` one of `send_ids_to_replicas`.
        groups: the replicas on this rank, in the order of `layout.replicated`.
        ranks: the processes.
        is_synchronised: whether backward makes the same update on all ranks.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        groups: TableGroups,
        ranks: RankGroup,
        *,
        is_synchronised: bool,
    ) -> None:
        super().__init__()
        self.groups, self.is_synchronised, self._world_size = groups, is_synchronised, ranks.size
        self._units = layout.replicated.units
        self._features = [unit.feature for unit in self._units]
        self.register_layout("order", int64_tensor(self._features), ranks.device)
        self.register_layout("grad_anchor", torch.zeros((), device="cpu"), ranks.device)

    order: Tensor  # int64 `[units]`, feature of each unit
    grad_anchor: Tensor  # scalar that ties outputs to autograd

    def forward(self, inputs: LocalBatch) -> Tensor:
        """Look up this rank's batch in the replicated tables.

        If `is_synchronised`, the rows have no gradient; `gradient_sink` gets it instead.

        Returns:
            The rows: pooled `[B, columns]`, flat if features may differ in their number of bags;
            else `[L, dim]`, unit after unit.
        """
        self.restore_layout()
        ids, offsets, weights = select_features(inputs, self._features, self.order)
        batch_sizes = None
        if inputs.is_variable:
            batch_sizes = [[inputs.bag_counts[feature]] for feature in self._features]
        if self.is_synchronised:
            for slice_group in self.groups.active:
                # Backward makes the lookup of the step. Tensor trains with a cache of rows lack the
                # method.
                begin_step = getattr(slice_group.module, "begin_step", None)
                if begin_step is not None:
                    begin_step(is_joint=False)
        with_grad = torch.is_grad_enabled() and not self.is_synchronised
        return in_grad_mode(self.groups, enabled=with_grad)(
            ids, offsets, weights, batch_sizes=batch_sizes
        )

    def select_entries(self, inputs: LocalBatch, values: Tensor) -> Tensor:
        """Return the entries of `values` for the ids of replicated tables, unit after unit.

        `values` is `[L]`, one entry per id of the batch.
        """
        return select_features(
            inputs._replace(ids=values, weights=None), self._features, self.order
        )[0]

    def gradient_sink(self, received: IncomingBatch, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` whose backward updates the tables with its gradient.

        Its gradient must be that of the rows of all ranks, in the order in which
        `ShardedTables.look_up_rows` returns rows. Its values are zeros without memory, on the
        device of the ranks. Only for `is_synchronised`.
        """
        bag_counts = received.bag_counts[len(received.bag_counts) - len(self._units) :]
        first_bag = received.offsets.numel() - 1 - sum(map(sum, bag_counts))
        first_id = received.ids.numel() - received.num_replicated_ids
        offsets = received.offsets[first_bag:] - first_id
        batch_sizes = bag_counts if received.inputs.is_variable else None
        ids, weights = received.ids[first_id:], received.weights
        # Every rank computes the gradient of these weights; the rank that sent them adds them up.
        if weights is not None:
            weights = ScaledGradient.apply(weights[first_id:], 1.0 / self._world_size)

        def look_up(weights: Tensor | None) -> Tensor:
            return self.groups(ids, offsets, weights, batch_sizes=batch_sizes)

        grad_anchor = self.grad_anchor.detach().requires_grad_()
        anchors = [
            shared.joint.anchor(grad_anchor.device)
            for shared in self.groups.shared_slices()
            if shared.is_joint
        ]
        result: Tensor = GradientSink.apply(grad_anchor, weights, look_up, shape, *anchors)
        return result


class GradientSink(torch.autograd.Function):
    """Zeros without memory; backward makes a lookup and applies the gradient to its rows.

    Shared tables are not updated here: their gradients are added to those of the running backward,
    whose joint steps depend on `anchors`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        weights: Tensor | None,
        look_up: Callable[..., Tensor],
        shape: Any,
        *anchors: Tensor,
    ) -> Tensor:
        """Return zeros of `shape`."""
        ctx.look_up, ctx.num_anchors = look_up, len(anchors)
        ctx.save_for_backward(weights)
        return grad_anchor.detach().expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Make the lookup and pass it the gradient, which the fused optimizer applies."""
        (weights,) = ctx.saved_tensors
        if weights is not None:
            weights = weights.detach().requires_grad_(ctx.needs_input_grad[1])

        def look_up_and_update() -> None:
            task_id = torch._C._current_graph_task_id()
            rows = autograd.for_update(with_steps_of(task_id, ctx.look_up))(weights)
            if rows.requires_grad:  # rows of frozen tables need no update
                mark_nested(rows)
                rows.backward(grad.reshape(rows.shape).to(rows.dtype))

        in_grad_mode(look_up_and_update, enabled=True)()
        anchor_grads = [grad.new_zeros((), dtype=torch.float32) for _ in range(ctx.num_anchors)]
        return None, None if weights is None else weights.grad, None, None, *anchor_grads


def select_features(
    inputs: LocalBatch, features: list[int], order: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, offsets and weights of some features, in the order of `features`.

    Args:
        inputs: the batch.
        features: numbers of features; a number may repeat.
        order: the same numbers, int64 `[n]` on the device of the batch.

    Returns:
        Ids `[L]` in their dtype, offsets `[bags + 1]` in the dtype of the lengths, and weights
        `[L]`, which keep their gradient; None without weights.
    """
    first_bags = inputs.first_bags(range(len(inputs.bag_counts)))
    feature_starts, id_counts = inputs.starts(), inputs.count_ids()
    num_ids = sum(id_counts[feature] for feature in features)
    num_bags = sum(inputs.bag_counts[feature] for feature in features)
    lengths = route.gather_segments(inputs.lengths, first_bags, order, num_bags)
    ids = route.gather_segments(inputs.ids, feature_starts, order, num_ids)
    weights = inputs.weights
    if weights is not None:
        weights = route.gather_segments(weights, feature_starts, order, num_ids)
    return ids, running_sums(lengths), weights
