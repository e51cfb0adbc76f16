"""What collections of tables have in common: features, tables by name, first values, optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from emblib.collections import states
from emblib.collections.configs import Dynamic, Quantized, TableConfig
from emblib.collections.groups import TableGroups
from emblib.collections.handles import TableHandle
from emblib.collections.slices import TableSlice
from emblib.collections.states import FusedTable
from emblib.jagged import KeyedJaggedTensor
from emblib.optim import Optimizer
from emblib.specs import Pooling
from emblib.tables import TTEmbeddingBag


class Unit:
    """A feature as one table sees it: in the order of the configurations."""

    __slots__ = ("feature", "name", "table")

    def __init__(self, feature: str, table: int, name: str) -> None:
        self.feature, self.table, self.name = feature, table, name


def units_of(configs: Sequence[TableConfig]) -> list[Unit]:
    """The features of all tables; one that several tables have is named `feature@table`."""
    tables_of: dict[str, int] = {}
    for config in configs:
        for feature in config.feature_names:
            tables_of[feature] = tables_of.get(feature, 0) + 1
    return [
        Unit(feature, t, feature if tables_of[feature] == 1 else f"{feature}@{config.name}")
        for t, config in enumerate(configs)
        for feature in config.feature_names
    ]


def _sequence_of(tables: Any, kind: type[TableConfig]) -> tuple[Any, ...]:
    if isinstance(tables, TableConfig | str) or not isinstance(tables, Iterable):
        raise TypeError(
            f"tables must be a list of {kind.__name__}, also where it is one, got {tables!r}"
        )
    return tuple(tables)


def _check_device(device: Any) -> None:
    if isinstance(device, bool):  # TorchRec has is_weighted in this place
        raise TypeError(
            f"device must be None, a torch.device or its name, got {device}; is_weighted is given "
            f"by name, is_weighted={device}"
        )


class TableCollection(nn.Module):
    """Base of collections: tables by name, looked up by the features that read them.

    `groups` does the lookups. The tables are listed, saved and loaded under `handles_name`, each
    with the names of its kind, see `emblib.collections.handles`. What threads may do with a
    collection is what they may do with its tables (docs/threads.md).
    """

    handles_name: ClassVar[str]
    config_type: ClassVar[type[TableConfig]]
    configs: tuple[Any, ...]
    groups: TableGroups

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | str | None,
        optimizer: Optimizer | None,
    ) -> None:
        super().__init__()
        self.configs = _sequence_of(tables, self.config_type)
        self._check_tables()
        _check_device(device)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be None or one of emblib.optim, e.g. optim.SGD(lr=0.01), got "
                f"{optimizer!r}; for one of torch.optim leave it out and give it the parameters"
            )
        self.optimizer = optimizer
        self._units = units_of(self.configs)
        self._take(self._make_groups(device, None))

    def _check_tables(self) -> None:
        kind, names = self.config_type, set()
        for config in self.configs:
            if not isinstance(config, kind):
                raise TypeError(
                    f"the tables of {type(self).__name__} must be of {kind.__name__}, got "
                    f"{config!r}"
                )
            if config.name in names:
                raise ValueError(
                    f"tables of a collection must differ in name, got {config.name!r} twice"
                )
            names.add(config.name)

    def _make_groups(
        self, device: torch.device | str | None, seeds: Mapping[str, int] | None
    ) -> TableGroups:
        return TableGroups(
            [TableSlice.whole(config) for config in self.configs],
            [unit.table for unit in self._units],
            pooled=self.config_type.pooled,
            optimizer=self.optimizer,
            device=device,
            seeds=seeds,
            bags=self._bags(),
        )

    def _bags(self) -> Pooling:
        """What a bag becomes in the kernels."""
        return Pooling.SUM

    def _take(self, groups: TableGroups) -> None:
        """Have these groups: handles first, so that parameters are listed by their names."""
        handles = {c.name: h for c, h in zip(self.configs, groups.handles, strict=True)}
        for name in (self.handles_name, "groups"):
            self._modules.pop(name, None)
        self.add_module(self.handles_name, nn.ModuleDict(handles))
        self._own_handles()
        self.groups = groups
        self._wanted = [self._units[u].feature for u in groups.order]
        self._permutation: tuple[list[str], list[int]] = ([], [])

    def _own_handles(self) -> None:
        for name, handle in self.handles().items():
            handle.belong(self, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_handles()

    # Batches

    def _fits(self, features: Any) -> bool:
        """Whether the kernels can take a batch as it comes."""
        return isinstance(features, KeyedJaggedTensor) and features.keys() == self._wanted

    def _ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features that are read, in the order in which the kernels take them."""
        batch = KeyedJaggedTensor.adopt(features)
        keys, places = self._permutation
        if keys != batch.keys():
            index = batch.index_per_key()
            missing = sorted(set(self._wanted) - index.keys())
            if missing:
                raise KeyError(
                    f"the batch must have the features of all tables: missing are {missing}, there "
                    f"are {batch.keys()}"
                )
            places = [index[feature] for feature in self._wanted]
            self._permutation = (list(batch.keys()), places)
        return batch.permute(places)

    def _sample_weights(self, batch: KeyedJaggedTensor) -> Tensor:
        weights = batch.weights_or_none()
        if weights is None:
            raise ValueError(
                "this collection is weighted, so batches must have weights: make the "
                "KeyedJaggedTensor with weights=..., or the collection with is_weighted=False"
            )
        return weights if weights.dtype is torch.float32 else weights.float()

    def _id_counts(self, batch: KeyedJaggedTensor) -> list[int] | None:
        """Ids of each group, where the host knows them."""
        lengths = batch.length_per_key_or_none()
        active = self.groups.active
        if lengths is None or len(active) == 1:
            return None
        counts, unit = [], 0
        for info in active:
            counts.append(sum(lengths[unit : unit + len(info.units)]))
            unit += len(info.units)
        return counts

    # Tables

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.groups.device

    def handles(self) -> Mapping[str, TableHandle]:
        """The handle of each table, by its name."""
        found: Any = self._modules[self.handles_name]
        return dict(found.items())

    def reset_parameters(self, seeds: Mapping[str, int] | None = None) -> None:
        """First values anew, from a seed a table; left out, from torch's generator.

        Also what makes a collection usable that was made on `meta` and moved by `to_empty`.
        """
        self.groups.reset_parameters(seeds)

    def set_optimizers(self, optimizers: Mapping[str, Optimizer | None]) -> None:
        """Train these tables otherwise from now on; weights stay, optimizer states begin anew.

        Kernels are made anew, which takes the memory of all tables once more until they are. The
        parameters stay the same objects.

        Args:
            optimizers: by table; None for that of the collection.

        Raises:
            KeyError: there is no such table.
        """
        names = {config.name for config in self.configs}
        unknown = sorted(optimizers.keys() - names)
        if unknown:
            raise KeyError(f"there are no tables {unknown}; there are {sorted(names)}")
        before = self.groups
        self.configs = tuple(
            replace(config, optimizer=optimizers[config.name])
            if config.name in optimizers
            else config
            for config in self.configs
        )
        groups = self._make_groups(before.device, before.seeds)
        groups.set_output_dtype(before.output_dtype)
        groups.take_over(before)
        groups.train(self.training)
        self._take(groups)

    def quantized(self, bits: int = 8) -> Self:
        """A collection for inference with the same rows: plain tables and tensor trains quantised.

        Dynamic tables are copied as they are. The new collection is in evaluation mode.

        Args:
            bits: of a value, 8 or 4.
        """
        kept = (Dynamic, Quantized)
        configs = [
            config
            if isinstance(config.kind, kept)
            else replace(config, kind=Quantized(bits), optimizer=None)
            for config in self.configs
        ]
        made = self._of(configs)
        made.groups.set_output_dtype(self.groups.output_dtype)
        handles, views = self.handles(), self.groups.all_views()
        for s, (name, handle) in enumerate(made.handles().items()):
            given = handles[name]
            if isinstance(self.configs[s].kind, kept):
                handle.load_state_dict(given.state_dict())
            elif isinstance(given.kernel, TTEmbeddingBag):
                handle.kernel.write_rows(handle.index, given.kernel.to_dense())
            else:
                handle.kernel.write_rows(handle.index, views[s]["weight"])
        return made.eval()

    def _of(self, configs: Sequence[Any]) -> Self:
        """A collection of other tables that is like this one otherwise."""
        raise NotImplementedError

    # Fused optimizers, see emblib.collections.optimizers.HasFusedTables

    def fused_tables(self) -> list[FusedTable]:
        """The tables that backward updates."""
        return states.fused_tables(self.handles_name, self.handles())

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """By the name of a parameter its states as views, and `hyper`, the optimizer's numbers."""
        return states.optimizer_state(self.groups, self.handles_name, self.handles())

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take what `optimizer_state` gave.

        Raises:
            KeyError: a parameter or one of its states is missing.
            ValueError: a state of another shape. In either case nothing is written.
        """
        states.load_optimizer_state(self.groups, self.handles_name, self.handles(), state)

    def extra_repr(self) -> str:
        """The tables."""
        return ", ".join(
            f"{c.name}: {c.num_embeddings} x {c.embedding_dim}" for c in self.configs[:4]
        ) + (f", ... {len(self.configs)} tables" if len(self.configs) > 4 else "")
