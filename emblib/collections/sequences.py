"""Tables of any kind that give one vector an id, behind keyed features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from emblib.collections.base import TableCollection
from emblib.collections.configs import EmbeddingConfig
from emblib.collections.groups import TableGroups
from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.optim import Optimizer


class EmbeddingCollection(TableCollection):
    """Looks up every id of the features of a batch: one vector an id, as jagged as the ids are.

    Kinds, optimizers and parameters are as in `EmbeddingBagCollection`; state dicts have
    `embeddings.<table>.weight` and its like. Tables may differ in their dims.

    Args:
        tables: their configurations.
        device: where the tables are.
        need_indices: return the ids as the weights of the result.
        optimizer: one of `emblib.optim`, of tables whose configuration has none.
    """

    handles_name = "embeddings"
    config_type = EmbeddingConfig
    configs: tuple[EmbeddingConfig, ...]

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        *,
        need_indices: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._need_indices = need_indices
        super().__init__(tables, device, optimizer)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By feature (`feature@table` where several tables have it) the vectors `[L, D]`, float32.

        The order is that of the configurations; features that no table has are ignored.

        Raises:
            KeyError: a feature of a table is not there.
            RuntimeError: a parameter was replaced, as by `torch.func.functional_call`.
        """
        batch = features if self._fits(features) else self._ordered(features)
        vectors = self._vectors(batch)
        lengths = batch.lengths().split(batch.stride_per_key())
        ids: Sequence[Tensor | None] = [None] * len(vectors)
        if self._need_indices:
            ids = batch.values().split(batch.length_per_key())
        found = {}
        for place in self._places:
            name = self._names_in_order[place]
            found[name] = JaggedTensor._of(vectors[place], ids[place], lengths[place], None)
        return found

    def _vectors(self, batch: KeyedJaggedTensor) -> Sequence[Tensor]:
        """Of each unit, in the order of the kernels."""
        groups, sizes = self.groups, batch.length_per_key()
        values, offsets = batch.values(), batch.offsets()
        strides = None
        if batch.variable_stride_per_key():
            strides = [[stride] for stride in batch.stride_per_key()]
        if groups.is_one:
            return groups.forward(values, offsets, batch_sizes=strides).split(sizes)
        counts = self._id_counts(batch)
        outs = groups.outputs(values, offsets, batch_sizes=strides, id_counts=counts)
        vectors: list[Tensor] = []
        for info, out in zip(groups.active, outs, strict=True):
            vectors += out.split(sizes[len(vectors) : len(vectors) + len(info.units)])
        return vectors

    def _take(self, groups: TableGroups) -> None:
        super()._take(groups)
        self._names_in_order = [self._units[u].name for u in groups.order]
        self._places = sorted(range(len(groups.order)), key=groups.order.__getitem__)

    def _of(self, configs: Sequence[EmbeddingConfig]) -> Self:
        indices, optimizer = self._need_indices, self.optimizer
        return type(self)(configs, self.device, need_indices=indices, optimizer=optimizer)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return list(self.configs)

    def need_indices(self) -> bool:
        """Whether the ids are returned."""
        return self._need_indices
