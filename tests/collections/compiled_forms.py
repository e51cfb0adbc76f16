"""Collections of every form, trained compiled and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    CachePolicy,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Placement,
    Pooling,
    TTCache,
    optim,
)
from emblib.sharding import RankGroup, shard, table_wise
from emblib.storage import Dense, Hash, Hashed, Narrow, QuotientRemainder, TensorTrain

KEYS = ["f0", "f1", "f2"]
ROWS = 20
# What the second of three tables has, so that a module of its own looks it up.
MIDDLE: dict[str, dict[str, Any]] = {
    "one kind": {},
    "float16": {"data_type": torch.float16},
    "tensor train": {"storage": TensorTrain((2, 2))},
    "another optimizer": {"optimizer": optim.Adam(0.1)},
    "hashed": {"storage": Hashed(7)},
    "quotient and remainder": {"storage": QuotientRemainder(5)},
    "narrow": {"storage": Narrow(2)},
    "hash table": {"storage": Hash()},
    "cached": {"storage": Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1))},
    "cached, LFU": {
        "storage": Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1, policy=CachePolicy.LFU))
    },
    "cached train": {"storage": TensorTrain((2, 2), cache=TTCache(8))},
}


def bags(
    middle: str = "one kind", device: Any = None, *, mean: bool = True, **options: Any
) -> EmbeddingBagCollection:
    """Return three pooled tables, of which the second one differs, and divides if `mean`."""
    configs = [
        EmbeddingBagConfig(
            ROWS + 4 * i,
            4 * (i % 2 + 1),
            f"t{i}",
            (KEYS[i],),
            pooling=Pooling.MEAN if mean and i == 1 else Pooling.SUM,
            **(MIDDLE[middle] if i == 1 else {}),
        )
        for i in range(3)
    ]
    return EmbeddingBagCollection(configs, device, **{"optimizer": optim.SGD(0.1), **options})


def sequences(middle: str = "one kind", device: Any = None, **options: Any) -> EmbeddingCollection:
    """Return three tables with a vector per id, of which the second one differs."""
    configs = [
        EmbeddingConfig(ROWS + 4 * i, 4, f"t{i}", (KEYS[i],), **(MIDDLE[middle] if i == 1 else {}))
        for i in range(3)
    ]
    return EmbeddingCollection(configs, device, **{"optimizer": optim.SGD(0.1), **options})


def sharded(collection: nn.Module) -> nn.Module:
    """Return a collection sharded over one rank."""
    plan = {"": {f"t{i}": table_wise(0) for i in range(3)}}
    return shard(collection, plan, RankGroup.single())


Make = Callable[[Any], nn.Module]
FORMS: dict[str, Make] = {
    **{f"bags, {name}": (lambda device, name=name: bags(name, device)) for name in MIDDLE},
    "sums of two dtypes": lambda device: bags("float16", device, mean=False),
    "weighted": lambda device: bags(device=device, is_weighted=True),
    "deferred": lambda device: bags(device=device, optimizer=optim.SGD(0.1, deferred=True)),
    "gradients": lambda device: bags(device=device, optimizer=None),
    "sequences": lambda device: sequences("float16", device),
    "quantised": lambda device: bags("float16", device).quantized(),
    "sequences, cached": lambda device: sequences("cached, LFU", device),
    "sharded bags": lambda device: sharded(bags("float16", device)),
    "sharded sequences": lambda device: sharded(sequences("tensor train", device)),
}


def batch(size: int, device: Any = None) -> KeyedJaggedTensor:
    """Return bags of 0 to 3 ids with weights."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    total = int(lengths.sum())
    ids = torch.randint(0, ROWS, (total,), generator=generator)
    weights = torch.rand(total, generator=generator)
    moved = (t.to(device or "cpu") for t in (ids, weights, lengths))
    return KeyedJaggedTensor(KEYS, *moved)


def values_of(output: Any) -> list[Tensor]:
    """Return the values of the output of a collection; those of sharded ones are waited for."""
    values = output.values()
    return [values] if isinstance(values, Tensor) else [one.values() for one in values]


def check_training(make: Make, backend: str, device: Any = None) -> None:
    """Train a compiled collection and an equal one that is not, and compare them."""
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make(device))
    eager, other = models
    compiled = torch.compile(other, backend=backend)
    for size in (3, 4):
        outputs = [values_of(model(batch(size, device))) for model in (eager, compiled)]
        for want, got in zip(*outputs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for values in outputs:
            loss = torch.stack([value.square().sum() for value in values]).sum()
            if loss.requires_grad:
                loss.backward()
    named = zip(eager.named_parameters(), other.named_parameters(), strict=True)
    for (name, want), (_, got) in named:
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5), name
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None and got.grad is not None:
            torch.testing.assert_close(got.grad.to_dense(), want.grad.to_dense())
    torch._dynamo.reset()
