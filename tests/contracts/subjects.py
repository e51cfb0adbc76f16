"""The kinds of tables whose contract with torch is tabulated: the columns of docs/contracts.md."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Placement,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.sharding import RankGroup, shard, table_wise
from emblib.storage import Dense, Storage, TensorTrain

ROWS, DIM = 48, 4  # more rows than the cache has slots, 32
IDS = torch.arange(ROWS)
_CACHE = CacheConfig(sets=1)
_TRAIN = TTSpec(ROWS, DIM, (2,), (6, 8), (2, 2))


@dataclass(frozen=True)
class Kind:
    """A kind of table: how it is made, and what can be expected of it."""

    make: Callable[[optim.Optimizer], nn.Module]
    is_collection: bool = False
    is_trained: bool = True
    shares_parameters: bool = False  # by its rows: an update of one moves others


def _plain(optimizer: optim.Optimizer, placement: Placement = Placement.DEVICE) -> nn.Module:
    cache = _CACHE if placement.cached else None
    if placement is Placement.DISK:
        cache = CacheConfig(sets=1, directory=Path(tempfile.mkdtemp()) / "tables")
    return TableBatchedEmbeddingBags([TableSpec(ROWS, DIM, "t", placement)], optimizer, cache=cache)


def _cached_train(optimizer: optim.Optimizer) -> nn.Module:
    """Return a train of which half of the rows are stored."""
    module = CachedTTEmbeddingBags([replace(_TRAIN, name="t")], TTCache(ROWS // 2), optimizer)
    module(IDS, torch.arange(ROWS + 1))  # the ids are counted
    module.populate()
    return module


def _dynamic(optimizer: optim.Optimizer) -> nn.Module:
    module = DynamicEmbeddingBags([DynamicSpec(64, DIM, name="t")], optimizer, seed=1)
    module(IDS, torch.arange(ROWS + 1))  # the keys are inserted
    return module


def _collection(
    optimizer: optim.Optimizer, storage: Storage | None = None
) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(ROWS, DIM, "t", ("f",), storage=storage or Dense())
    return EmbeddingBagCollection([config], optimizer=optimizer)


def _cached_trains(optimizer: optim.Optimizer) -> nn.Module:
    """Return a collection with a train of which half of the rows are stored."""
    storage = TensorTrain((2,), (6, 8), (2, 2), cache=TTCache(ROWS // 2))
    module = _collection(optimizer, storage)
    module(KeyedJaggedTensor(["f"], IDS, lengths=torch.ones_like(IDS)))  # the ids are counted
    train: Any = module.handles()["t"]
    train.populate()
    return module


def _sharded(optimizer: optim.Optimizer) -> nn.Module:
    return shard(_collection(optimizer), {"": {"t": table_wise(0)}}, RankGroup.single())


KINDS: dict[str, Kind] = {
    "plain": Kind(_plain),
    "cached": Kind(lambda o: _plain(o, Placement.MANAGED_CACHING)),
    "disk": Kind(lambda o: _plain(o, Placement.DISK)),
    "tensor train": Kind(lambda o: TTEmbeddingBag(_TRAIN, o), shares_parameters=True),
    "cached train": Kind(_cached_train, shares_parameters=True),
    "dynamic": Kind(_dynamic),
    "quantized": Kind(lambda o: QuantizedEmbeddingBags.from_float(_plain(o)), is_trained=False),
    "collection": Kind(_collection, is_collection=True),
    "cached collection": Kind(
        lambda o: _collection(o, Dense(Placement.MANAGED_CACHING, _CACHE)), is_collection=True
    ),
    "collection of cached trains": Kind(_cached_trains, is_collection=True, shares_parameters=True),
    "sharded": Kind(_sharded, is_collection=True),
}


class Subject:
    """A module of one table of a kind, with the calls that all kinds share."""

    def __init__(
        self, name: str, optimizer: optim.Optimizer | None = None, kind: Kind | None = None
    ) -> None:
        """Make a module of a kind, by default that of `KINDS`."""
        torch.manual_seed(3)
        self.name, self.kind = name, KINDS[name] if kind is None else kind
        self.optimizer = optim.SGD(0.5) if optimizer is None else optimizer
        self.module = self.kind.make(self.optimizer)

    def other(self, optimizer: optim.Optimizer | None = None) -> Subject:
        """Return a subject of the same kind with equal values."""
        return Subject(self.name, optimizer or self.optimizer, self.kind)

    def of(self, module: nn.Module) -> Subject:
        """Return a subject that is the same but for its module."""
        subject = object.__new__(Subject)
        subject.__dict__.update(self.__dict__, module=module)
        return subject

    def call(self, ids: Tensor = IDS, module: Any = None) -> Tensor:
        """Look up bags of one id each: `[N, dim]`."""
        module = self.module if module is None else module
        if self.kind.is_collection:
            lengths = torch.ones_like(ids)
            return module(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()
        out: Tensor = module(ids, torch.arange(ids.numel() + 1, device=ids.device))
        return out

    def rows(self) -> Tensor:
        """Return all rows, as lookups without gradients read them."""
        with torch.no_grad():
            return self.call().detach().clone()

    def step(self, ids: Tensor = IDS) -> None:
        """Make a training step that adds -0.5 to every looked-up value (SGD at rate 0.5)."""
        self.call(ids).sum().backward()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name."""
        return dict(self.module.named_parameters())
