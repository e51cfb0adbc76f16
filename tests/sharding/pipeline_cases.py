"""A small model with sharded collections, its batches, and the plain loop, as ranks run them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emblib import CacheConfig, Placement, optim
from emblib.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from emblib.collections.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedProcessor,
)
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding.model_parallel import DistributedModelParallel
from emblib.sharding.pipelines import empty_batch
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import column_wise, data_parallel, row_wise, table_wise
from emblib.specs import Pooling
from emblib.storage import Dense

DENSE, DIM, ROWS = 3, 8, 40


@dataclass
class Batch:
    """A batch as a data class; the jagged tensors are at different depths."""

    dense: Tensor
    bags: KeyedJaggedTensor
    more: dict[str, Any]
    labels: Tensor


def draw_ids(keys: Sequence[str], size: int, generator: torch.Generator) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids."""
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(keys), ids, lengths=lengths)


def make_batch(seed: int, size: int) -> Batch:
    """`size` examples."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(size, DENSE, generator=generator),
        draw_ids(("a", "b", "c"), size, generator),
        {"clicks": draw_ids(("s",), size, generator)},
        torch.rand(size, generator=generator),
    )


def batches_of(rank: int, counts: Sequence[int]) -> list[Batch]:
    """As many as its count says, of uneven sizes."""
    return [make_batch(100 * rank + i, 1 + (i + rank) % 3) for i in range(counts[rank])]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device of a model."""
    clicks = {key: value.to(device) for key, value in batch.more.items()}
    return Batch(batch.dense.to(device), batch.bags.to(device), clicks, batch.labels.to(device))


class Net(nn.Module):
    """Pooled tables, a sequence, and dense layers around them; gives (loss, output)."""

    pooled_optimizer: optim.Optimizer | None = optim.RowwiseAdagrad(lr=0.1)
    sequence_optimizer: optim.Optimizer | None = optim.Adam(lr=0.05)

    def __init__(self, *, cached: bool = False) -> None:
        super().__init__()
        kind = Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1)) if cached else Dense()
        # Not a row-wise one: it has a number a row and block of columns. With a cache, tables of
        # one optimizer, since one kernel alone can prefetch.
        one = cached or self.pooled_optimizer is None
        by_value = None if one else optim.Adagrad(lr=0.1)
        self.bottom = nn.Linear(DENSE, DIM)
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(ROWS, DIM, "a", storage=kind),
                EmbeddingBagConfig(
                    ROWS, DIM, "b", pooling=Pooling.MEAN, storage=kind, optimizer=by_value
                ),
                EmbeddingBagConfig(ROWS, DIM, "c", storage=kind),
            ],
            optimizer=self.pooled_optimizer,
        )
        self.clicks = EmbeddingCollection(
            [EmbeddingConfig(ROWS, DIM, "s", storage=kind)], optimizer=self.sequence_optimizer
        )
        self.top = nn.Linear(6 * DIM, 1)

    def history(self, clicks: KeyedJaggedTensor) -> Tensor:
        """The sum of the clicks, and of the first ones."""
        rows = self.clicks(clicks)["s"]
        lengths = rows.lengths()
        numbers = torch.arange(lengths.numel(), device=lengths.device)
        examples = torch.repeat_interleave(numbers, lengths)
        sums = rows.values().new_zeros(lengths.numel(), DIM)
        return sums.index_add(0, examples, rows.values())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss and predictions."""
        pooled = self.bags(batch.bags)
        parts = [
            self.bottom(batch.dense),
            pooled.values(),
            self.history(batch.more["clicks"]),
            pooled["a"] * pooled["b"],
        ]
        out = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return nn.functional.mse_loss(out, batch.labels), out


class Unfused(Net):
    """All tables are trained by an optimizer of torch."""

    pooled_optimizer = sequence_optimizer = None


class Weighted(Net):
    """Weights of the ids are learned by their position."""

    def __init__(self, *, cached: bool = False) -> None:
        super().__init__(cached=cached)
        tables = EmbeddingBagCollection(
            self.bags.embedding_bag_configs(), is_weighted=True, optimizer=self.pooled_optimizer
        )
        processor = PositionWeightedProcessor({"a": 3, "c": 3})
        self.bags = FeatureProcessedEmbeddingBagCollection(tables, processor)


class Preparing(Net):
    """Makes the input of one collection itself."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With ids that are not an object of the batch."""
        clicks = batch.more["clicks"]
        made = KeyedJaggedTensor(
            clicks.keys(), (clicks.values() * 7) % ROWS, lengths=clicks.lengths()
        )
        return super().forward(Batch(batch.dense, batch.bags, {"clicks": made}, batch.labels))


class Twice(Net):
    """Calls a collection twice."""

    def history(self, clicks: KeyedJaggedTensor) -> Tensor:
        """Of the clicks and of the clicks again."""
        return super().history(clicks) + 0.5 * super().history(clicks)


NETS = {
    "net": Net,
    "weighted": Weighted,
    "unfused": Unfused,
    "preparing": Preparing,
    "twice": Twice,
}


def rules(size: int) -> dict[str, dict[str, Any]]:
    """Tables of every kind of sharding."""
    return {
        "bags": {"a": row_wise(), "b": column_wise(), "c": table_wise(size - 1)},
        "clicks": {"s": row_wise()},
    }


def replicated(size: int) -> dict[str, dict[str, Any]]:
    """A table that every rank has among others."""
    return {
        "bags": {"a": data_parallel(), "b": row_wise(), "c": table_wise(0)},
        "clicks": {"s": table_wise(size - 1)},
    }


PLANS = {"parts": rules, "copies": replicated}


@dataclass(frozen=True)
class Case:
    """What the ranks train: `counts[r]` batches on rank r."""

    counts: tuple[int, ...]
    net: str = "net"
    plan: str = "parts"
    wrap: str = "ddp"
    cached: bool = False

    def model(self, ranks: RankGroup) -> DistributedModelParallel:
        """The model, the same on all ranks."""
        torch.manual_seed(5)
        plan = PLANS[self.plan](ranks.size)
        net = NETS[self.net](cached=self.cached).to(ranks.device)
        if self.net == "weighted":
            plan["bags.embedding_bag_collection"] = plan.pop("bags")
        return DistributedModelParallel(net, ranks, plan=plan, wrap=self.wrap)


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Of what the tables do not update themselves."""
    return torch.optim.Adam(
        [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")], lr=0.01
    )


def plain_loop(model: nn.Module, batches: Sequence[Batch], steps: int) -> Iterator[Tensor]:
    """Losses of `steps` steps; empty batches where there are no more."""
    optimizer = dense_optimizer(model)
    device = next(model.parameters()).device
    first = batches[0] if batches else make_batch(0, 1)
    for i in range(steps):
        batch = to_device(batches[i] if i < len(batches) else empty_batch(first), device)
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def values_of(model: DistributedModelParallel) -> dict[Any, Tensor]:
    """All that training changes and this rank holds.

    By the name of a dense parameter, or by path, table, shard and name of a part of a table.
    """
    found: dict[Any, Tensor] = {}
    sharded = sharded_modules(model)
    for path, part in sharded.items():
        for held in part.local_shards():
            for key, view in held.groups.views(held.index).items():
                found[path, held.table, held.shard, key] = view.clone()
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(f"{path}." for path in sharded)):
            value: Any = parameter.detach()
            found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found
