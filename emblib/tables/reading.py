"""Readings: lookups of a module's only table by other features or another pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import FeatureColumn
from emblib.ops.joint_step import GradientSum
from emblib.specs import Pooling
from emblib.tables.base import ChecksBounds, variable_batch
from emblib.tables.memory import TableOffset


class TableReading(NamedTuple):
    """Reading of the only table of a module by some features, with their pooling.

    Attributes:
        features: `[F, columns]`, see `emblib.columns.FeatureColumn`.
        dim: columns of the table.
        pooling: pooling of the features.
        joint: sum of the gradients of all readings; None if backward does not update the table.
        reader: module whose `bounds_check` applies, and which counts and names invalid ids.
    """

    features: Tensor
    dim: int
    pooling: Pooling
    joint: GradientSum | None
    reader: ChecksBounds

    @staticmethod
    def features_of(
        table: TableOffset, count: int, pooling: Pooling, device: torch.device
    ) -> Tensor:
        """Return `features` int64 `[count, 8]` of features whose outputs are neighbours."""
        width = 0 if pooling is Pooling.NONE else table.dim
        rows = [table.feature(number * width) for number in range(count)]
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, len(FeatureColumn))

    def layout_of_bags(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None, device: torch.device
    ) -> tuple[Tensor | None, int]:
        """Return `bag_layout` and output size, see `VariableBatch`; None if sizes are equal.

        `offsets` is `[bags + 1]`, `batch_sizes` `[F][ranks]` as in forward.
        """
        unpooled = self.pooling is Pooling.NONE
        output_dim = self.dim if unpooled else self.dim * len(self.features)
        if batch_sizes is None:
            return None, output_dim
        dims = [self.dim] * len(self.features)
        layout, elements = variable_batch(batch_sizes, dims, max(len(offsets) - 1, 0), device)
        return layout, output_dim if unpooled else elements
