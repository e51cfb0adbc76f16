"""The tables, batches and plain lookups of the tests of TorchRec's tutorial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import emblib.compat.torchrec as torchrec
from emblib.compat.torchrec import JaggedTensor, KeyedJaggedTensor

PRODUCTS, USERS, DIM = 48, 40, 8


def collection(device: str = "cpu", **changes: Any) -> torchrec.EmbeddingBagCollection:
    """Two tables, a feature each."""
    return torchrec.EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            torchrec.EmbeddingBagConfig(
                name="product_table",
                embedding_dim=DIM,
                num_embeddings=PRODUCTS,
                feature_names=["product"],
                pooling=torchrec.PoolingType.SUM,
                **changes,
            ),
            torchrec.EmbeddingBagConfig(
                name="user_table",
                embedding_dim=DIM,
                num_embeddings=USERS,
                feature_names=["user"],
                pooling=torchrec.PoolingType.MEAN,
                **changes,
            ),
        ],
    )


def batch(rank: int = 0) -> KeyedJaggedTensor:
    """Two examples: 2 and 1 products, 1 and 3 users."""
    products = JaggedTensor(torch.tensor([5, 7, 3]) + rank, lengths=torch.tensor([2, 1]))
    users = JaggedTensor(torch.tensor([0, 9, 1, 9]) + rank, lengths=torch.tensor([1, 3]))
    return KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.cat([products.values(), users.values()]),
        lengths=torch.cat([products.lengths(), users.lengths()]),
    )


def pooled(weights: dict[str, Tensor], features: KeyedJaggedTensor) -> Tensor:
    """What a lookup must give, bag by bag."""
    found = features.to_dict()
    rows = []
    for key, mean in (("product", False), ("user", True)):
        table = weights[f"{key}_table"]
        bags = [table[ids] for ids in found[key].to_dense()]
        rows.append(torch.stack([b.mean(0) if mean else b.sum(0) for b in bags]))
    return torch.cat(rows, 1)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies by table, whole: collective where the tables are in parts."""
    found = {}
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.split(".")[-2]] = whole.detach().clone()
    return found
