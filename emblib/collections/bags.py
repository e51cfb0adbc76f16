"""Pooled tables of any kind behind keyed features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from emblib.collections.base import TableCollection, Unit
from emblib.collections.configs import EmbeddingBagConfig
from emblib.collections.groups import TableGroups
from emblib.jagged import KeyedJaggedTensor, KeyedTensor
from emblib.ops import route
from emblib.optim import Optimizer
from emblib.specs import Pooling


class EmbeddingBagCollection(TableCollection):
    """Looks up the features of a batch in its tables and pools the bags of each.

    Tables may be of any kinds, dtypes and optimizers; those that agree share a kernel. Without an
    `optimizer` tables leave dense gradients on their parameters, for `torch.optim`; with one, be it
    that of the collection or that of a table, backward updates the rows of the batch at once and no
    gradient is ever stored (see `TableBatchedEmbeddingBags`, and `emblib.collections.optimizers`
    for learning rates and states).

    State dicts have `embedding_bags.<table>.weight` for a plain table, `.cores.<k>` for a tensor
    train, and `.keys`, `.weight` and what else there is by key for a dynamic one. The states of
    fused optimizers are saved with `FusedOptimizer`, but for dynamic tables, where they go with
    the keys.

    Args:
        tables: their configurations; the columns of the output follow their order.
        device: where the tables are.
        is_weighted: batches have weights, by which rows are scaled.
        optimizer: one of `emblib.optim`, of tables whose configuration has none.
    """

    handles_name = "embedding_bags"
    config_type = EmbeddingBagConfig
    configs: tuple[EmbeddingBagConfig, ...]

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        device: torch.device | str | None = None,
        *,
        is_weighted: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._weighted = is_weighted
        super().__init__(tables, device, optimizer)

    def _bags(self) -> Pooling:
        """Means where all are, since that costs nothing; of a mixture sums, divided afterwards."""
        means = [config.pooling is Pooling.MEAN for config in self.configs]
        return Pooling.MEAN if means and all(means) else Pooling.SUM

    def _take(self, groups: TableGroups) -> None:
        super()._take(groups)
        self._names = [unit.name for unit in self._units]
        self._columns = list(groups.dims)
        means = [self._divides(unit) for unit in self._units]
        in_order = groups.order == list(range(len(self._units)))
        self._arrangement = None if in_order and not any(means) else _Arrangement(groups, means)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """`[B, sum of dims]`, float32: one piece a feature, in the order of the configurations.

        A feature that several tables have gives one piece a table, `feature@table`. Features that
        no table has are ignored. Where features differ in their bags (VBE), the pieces are those of
        the whole batch, as the inverse indices of the batch say.

        Raises:
            KeyError: a feature of a table is not there.
            RuntimeError: a parameter was replaced, as by `torch.func.functional_call`.
            ValueError: the collection is weighted and the batch is not, or features differ in their
                bags and the batch has no inverse indices.
        """
        batch = features if self._fits(features) else self._ordered(features)
        if batch.variable_stride_per_key():
            return KeyedTensor(self._names, self._columns, self._expanded(batch))
        groups = self.groups
        weights = self._sample_weights(batch) if self._weighted else None
        if groups.is_one:
            out = groups.forward(batch.values(), batch.offsets(), weights)
        else:
            counts = self._id_counts(batch)
            out = groups.forward(batch.values(), batch.offsets(), weights, id_counts=counts)
        if self._arrangement is not None:
            out = self._arrangement(out, batch)
        return KeyedTensor(self._names, self._columns, out)

    def _divides(self, unit: Unit) -> bool:
        """Whether the sums of a unit are still to be divided."""
        is_mean = self.configs[unit.table].pooling is Pooling.MEAN
        return is_mean and self.groups.pooling is Pooling.SUM

    def _expanded(self, batch: KeyedJaggedTensor) -> Tensor:
        """The output of a batch whose features differ in their bags."""
        strides, groups = batch.stride_per_key(), self.groups
        weights = self._sample_weights(batch) if self._weighted else None
        out = groups(
            *(batch.values(), batch.offsets(), weights),
            batch_sizes=[[stride] for stride in strides],
            id_counts=self._id_counts(batch),
        )
        keys, inverse = _inverse_of(batch)
        dims = [groups.dims[u] for u in groups.order]
        blocks = out.split([n * dim for n, dim in zip(strides, dims, strict=True)])
        lengths = batch.lengths().split(strides)
        pieces: list[Tensor] = [out] * len(dims)
        for place, u in enumerate(groups.order):
            unit, block = self._units[u], blocks[place].view(-1, dims[place])
            if self._divides(unit):
                block = block / lengths[place].clamp(min=1).unsqueeze(1)
            if inverse is not None:
                block = block.index_select(0, inverse[keys[unit.feature]])
            pieces[u] = block
        return torch.cat(pieces, 1)

    def _of(self, configs: Sequence[EmbeddingBagConfig]) -> Self:
        weighted, optimizer = self._weighted, self.optimizer
        return type(self)(configs, self.device, is_weighted=weighted, optimizer=optimizer)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return list(self.configs)

    def is_weighted(self) -> bool:
        """Whether batches have weights."""
        return self._weighted


def _inverse_of(batch: KeyedJaggedTensor) -> tuple[dict[str, int], Tensor | None]:
    """Rows of the inverse indices by feature; none where all features have equally many bags."""
    given = batch.inverse_indices_or_none()
    if given is not None:
        return {key: row for row, key in enumerate(given[0])}, given[1]
    if len(set(batch.stride_per_key())) > 1:
        raise ValueError(
            "features that differ in their bags need inverse indices to become one batch, got "
            f"{batch.stride_per_key()} bags: make the KeyedJaggedTensor with inverse_indices="
        )
    return {}, None


class _Arrangement:
    """Brings the columns of a lookup into the order of the configurations, and divides means.

    One pass of `emblib.ops.route.combine` over `[B, columns]`; its tables are kept for the last
    batch size.
    """

    def __init__(self, groups: TableGroups, means: Sequence[bool]) -> None:
        columns, column = groups.columns, 0
        place_of = {u: place for place, u in enumerate(groups.order)}
        targets, pieces = [], []
        for u, dim in enumerate(groups.dims):
            bags = place_of[u] if means[u] else -1
            targets.append((column, columns, 0, dim, u, u + 1, bags))
            pieces.append((groups.column_of[u], columns, -1))
            column += dim
        self._columns, self._divides = columns, any(means)
        self._targets = torch.tensor(targets, dtype=torch.int64).view(-1, 7)
        self._pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 3)
        self._made: tuple[int, Tensor, Tensor] | None = None

    def _tables(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        made = self._made
        if made is None or made[0] != batch or made[1].device != device:
            targets = self._targets.clone()
            targets[:, 2] = batch
            divided = targets[:, 6] >= 0
            targets[:, 6] = torch.where(divided, targets[:, 6] * batch, -1)
            made = self._made = batch, targets.to(device), self._pieces.to(device)
        return made[1], made[2]

    def __call__(self, out: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """`out` `[B, columns]` as the collection returns it."""
        targets, pieces = self._tables(out.shape[0], out.device)
        lengths = batch.lengths() if self._divides else None
        flat = route.combine(out.view(-1), targets, pieces, lengths, out.numel(), out.dtype)
        return flat.view(-1, self._columns)
