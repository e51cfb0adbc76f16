"""Readings: lookups of a module's only table by the features and pooling of another module.

Several collections can share a table. The module of the table looks up for each of them with its
`TableReading` (`TableBatchedEmbeddingBags.look_up_as`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import FeatureColumn
from emblib.ops.joint_step import GradientSum
from emblib.specs import Pooling
from emblib.tables.batches import BoundsCheckedModule, lay_out_bags
from emblib.tables.memory import TableOffset


class TableReading(NamedTuple):
    """One way to look up the only table of a module: features, and their pooling.

    Attributes:
        features: int64 `[F, 8]`, see `features_of`.
        dim: columns of the table.
        pooling: pooling of all features.
        joint: sum of the gradients of all readings of the table, for one update of it; None if
            backward does not update the table.
        reader: module that looks up: its `bounds_check` applies, and it counts and names invalid
            ids.
    """

    features: Tensor
    dim: int
    pooling: Pooling
    joint: GradientSum | None
    reader: BoundsCheckedModule

    @staticmethod
    def features_of(
        table: TableOffset, num_features: int, pooling: Pooling, device: torch.device
    ) -> Tensor:
        """Return `features`, int64 `[num_features, 8]`, of features that all read `table`.

        The columns are those of `FeatureColumn`. Outputs of features are side by side; with pooling
        NONE all begin at column 0.
        """
        width = 0 if pooling is Pooling.NONE else table.dim
        rows = [table.feature(feature * width) for feature in range(num_features)]
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, len(FeatureColumn))

    def lay_out_bags(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor | None, int]:
        """Return `bag_layout` and `output_dim` of a batch, see `batches.lay_out_bags`."""
        dims = [self.dim] * len(self.features)
        return lay_out_bags(self.pooling, dims, offsets, batch_sizes, self.features.device)
