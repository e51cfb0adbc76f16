"""Tables of every kind, batches for them, and what plain torch makes of both."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from emblib import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, Pooling, optim
from emblib.storage import Dense, Hash, TensorTrain

KINDS = {"plain": Dense(), "tt": TensorTrain((3, 2)), "dynamic": Hash()}
IDS = 24  # of every batch, below the rows of every table


def bag_configs(
    kinds: Sequence[str], pooling: Pooling = Pooling.SUM, **options: Any
) -> list[EmbeddingBagConfig]:
    """A table of each kind, of different sizes; `f0` is read by the first and by the last."""
    configs = []
    for i, kind in enumerate(kinds):
        features = [f"f{i}", f"g{i}"] if i % 2 == 0 else [f"f{i}"]
        if i and i == len(kinds) - 1:
            features.append("f0")
        configs.append(
            EmbeddingBagConfig(
                IDS + 32 * (i + 1),
                4 * (i % 3 + 1),
                f"t{i}",
                tuple(features),
                pooling=pooling,
                storage=KINDS[kind],
                **options,
            )
        )
    return configs


def sequence_configs(kinds: Sequence[str], dims: Sequence[int]) -> list[EmbeddingConfig]:
    """A table of each kind and dim."""
    return [
        EmbeddingConfig(IDS + 32 * (i + 1), dim, f"t{i}", (f"f{i}", f"g{i}"), storage=KINDS[kind])
        for i, (kind, dim) in enumerate(zip(kinds, dims, strict=True))
    ]


def features_of(configs: Sequence[Any]) -> list[str]:
    """The features of the tables, each once, in their order."""
    return list(dict.fromkeys(f for config in configs for f in config.feature_names))


def batch(
    keys: Sequence[str], size: int, *, weighted: bool = False, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids, some of them twice in a bag."""
    lengths = torch.randint(0, 5, (len(keys) * size,))
    total = int(lengths.sum())
    weights = torch.rand(total) + 0.5 if weighted else None
    return KeyedJaggedTensor(list(keys), torch.randint(IDS, (total,)).to(dtype), weights, lengths)


def dense(collection: Any, table: str) -> Tensor:
    """The rows of the first `IDS` ids of a table, as they are looked up one by one, no gradient."""
    handle = collection.handles()[table]
    module, index = handle.module, handle.index
    if hasattr(module, "to_dense"):
        return module.to_dense(index)[:IDS].clone()
    if not hasattr(module, "find"):
        return handle.weight.detach()[:IDS].float().clone()
    slots = module.find(index, torch.arange(IDS))
    rows = module.table_rows(index)["weight"].float()
    return torch.where((slots >= 0).unsqueeze(1), rows[slots.clamp(min=0)], 0.0)


def pooled(
    rows: Tensor, features: KeyedJaggedTensor, key: str, pooling: Pooling, *, weighted: bool
) -> Tensor:
    """Bags of one feature, with `sum(w * e) / L` for a weighted mean."""
    jagged = features[key]
    weights = jagged.weights() if weighted else None
    out = functional.embedding_bag(
        jagged.values().long(),
        rows,
        jagged.offsets()[:-1].long(),
        mode="sum",
        per_sample_weights=weights,
    )
    if pooling is Pooling.MEAN:
        out = out / jagged.lengths().clamp(min=1).unsqueeze(1)
    return out


def expected(
    configs: Sequence[EmbeddingBagConfig],
    rows: dict[str, Tensor],
    features: KeyedJaggedTensor,
    *,
    weighted: bool = False,
) -> dict[str, Tensor]:
    """The pieces of the output, in their order, with their names."""
    tables = [f for config in configs for f in config.feature_names]
    return {
        key if tables.count(key) == 1 else f"{key}@{config.name}": pooled(
            rows[config.name], features, key, config.pooling, weighted=weighted
        )
        for config in configs
        for key in config.feature_names
    }


OPTIMIZERS = {
    "none": None,
    "sgd": optim.SGD(0.1),
    "adam": optim.Adam(0.05),
    "rowwise": optim.RowwiseAdagrad(0.1),
}
