"""Columns of a pooled lookup in the order of the configurations, and means that it divides.

Where tables with pooling SUM and MEAN are looked up together, the kernels return sums, and
`ColumnOrder` divides those of MEAN. `clip_blocks` then bounds the gradients of the means, because
the kernels see the gradients of the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.collections.configs import TableConfig
from emblib.collections.groups import TableGroups
from emblib.columns import PieceColumn, TargetColumn
from emblib.jagged import KeyedJaggedTensor
from emblib.jagged.jagged_tensor import as_normal_tensor
from emblib.ops import route
from emblib.ops.autograd import UpdateRule, clip_gradient
from emblib.ops.derivatives import once_differentiable
from emblib.ops.scaled_gradients import scale_of_backward
from emblib.optim import Optimizer
from emblib.storage.composed_lookup import Combine


class ColumnOrder:
    """Reorder the columns of a lookup by configuration, and divide means.

    One pass of `emblib.ops.route.combine` over `[B, columns]` does both. Its descriptors depend on
    the batch size and the device, and are cached for the last ones.

    Args:
        groups: groups with pooling SUM or MEAN; its `order` is that of the columns and features.
        divides: whether the columns of each unit are sums to divide by the lengths of their bags.
    """

    def __init__(self, groups: TableGroups, divides: Sequence[bool]) -> None:
        num_columns, column = groups.output_dim, 0
        position_by_unit = {unit: position for position, unit in enumerate(groups.order)}
        targets, targets_per_sample, pieces = [], [], []
        for unit, dim in enumerate(groups.dims):
            target = route.TargetRow(
                offset=column,
                stride=num_columns,
                num_rows=0,
                width=dim,
                first_piece=unit,
                end_piece=unit + 1,
                first_bag=0 if divides[unit] else -1,
            )
            first_bag = position_by_unit[unit] if divides[unit] else 0
            targets.append(target)
            targets_per_sample.append(route.TargetRow(0, 0, 1, 0, 0, 0, first_bag))
            pieces.append(route.PieceRow(groups.column_of[unit], num_columns))
            column += dim
        self._num_columns, self._divides_means = num_columns, any(divides)
        # Targets for batch size 0, what a sample adds to them, and pieces, on the last device.
        self._constants = tuple(
            torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, len(columns))
            for rows, columns in (
                (targets, TargetColumn),
                (targets_per_sample, TargetColumn),
                (pieces, PieceColumn),
            )
        )
        # Batch size, targets and pieces of the last call outside of graphs.
        self._last_descriptors: tuple[int, Tensor, Tensor] | None = None

    def _descriptors(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `targets` `[T, 7]` and `pieces` `[P, 3]` of `combine` for a batch size."""
        is_compiling = torch.compiler.is_compiling()  # a graph would depend on the last batch size
        descriptors = None if is_compiling else self._last_descriptors
        if descriptors is None or descriptors[0] != batch_size or descriptors[1].device != device:
            # Training after an evaluation in inference mode needs them for backward.
            constants = self._constants
            if constants[0].device != device:
                constants = tuple(as_normal_tensor(lambda c: c.to(device), c) for c in constants)
                if type(constants[0]) is Tensor:  # tensors of a trace have no values
                    self._constants = constants
            targets, targets_per_sample, pieces = constants
            targets = as_normal_tensor(lambda t: t + targets_per_sample * batch_size, targets)
            descriptors = batch_size, targets, pieces
            if type(targets) is Tensor and not is_compiling:
                self._last_descriptors = descriptors
        return descriptors[1], descriptors[2]

    def __call__(self, rows: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """Return the columns of `rows` in the order of the configurations, in the same dtype.

        `rows`, `[B, groups.output_dim]`, must be contiguous. The columns, and the features of
        `batch`, must be in the order `groups.order`.
        """
        targets, pieces = self._descriptors(rows.shape[0], rows.device)
        lengths = batch.lengths() if self._divides_means else None
        flat = route.combine(rows.view(-1), targets, pieces, lengths, rows.numel(), rows.dtype)
        return flat.view(-1, self._num_columns)


def bounds_output(config: TableConfig) -> bool:
    """Return whether `max_gradient` bounds the gradients of a table's output.

    With `Combine.MULTIPLY` it bounds the gradients of the two rows of an id instead.
    """
    return getattr(config.storage, "combine", None) is not Combine.MULTIPLY


def bounds_of_means(
    optimizers: Mapping[int, Optimizer], num_blocks: int, scale: float = 1.0
) -> list[UpdateRule | None]:
    """Return the rules for `clip_blocks`, one per block; [] without gradients to bound.

    Args:
        optimizers: the optimizers of the blocks that are means divided after their lookup.
        num_blocks: number of all blocks.
        scale: factor of the gradients between the output and the tables, greater than 0.
    """
    rules: list[UpdateRule | None] = [None] * num_blocks
    for block, optimizer in optimizers.items():
        if optimizer.max_gradient is not None:
            rule = UpdateRule.from_optimizer(optimizer)
            rules[block] = rule._replace(max_gradient=optimizer.max_gradient / scale)
    return rules if any(rules) else []


def clip_blocks(output: Tensor, widths: list[int], rules: list[UpdateRule | None]) -> Tensor:
    """Return `output` `[B, columns]`; backward clamps the gradient of each block of columns.

    Block i has `widths[i]` columns and the bound of `rules[i]`; None clamps nothing. `rules` may be
    []: without any rule this is `output` itself. A GradScaler multiplies the bounds by its scale.
    """
    if not any(rules):
        return output
    clipped: Tensor = _ClippedBlocks.apply(output, widths, rules)
    return clipped


class _ClippedBlocks(torch.autograd.Function):
    """Identity whose backward clamps the gradient, see `clip_blocks`."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, widths: list[int], rules: list[UpdateRule | None]
    ) -> Tensor:
        ctx.widths, ctx.rules = widths, rules
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = scale_of_backward()
        blocks = [
            block if rule is None else clip_gradient(block, rule, scale)
            for block, rule in zip(grad.split(ctx.widths, 1), ctx.rules, strict=True)
        ]
        return torch.cat(blocks, 1), None, None
