"""A DLRM: bottom network, embeddings, products of all pairs, top network; any kind of table.

The kinds differ in `tables` only: a module that takes ids `[B, F]` and returns `[B, F * D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, storage

LEARNING_RATE = 0.05
SMALL = 200  # rows up to which a table stays dense


class Collection(nn.Module):
    """Tables of emblib, with the optimizer in backward."""

    def __init__(self, rows: Sequence[int], dim: int, large: storage.Storage, device: str) -> None:
        super().__init__()
        self.names = [f"field{number}" for number in range(len(rows))]
        configs = []
        for name, count in zip(self.names, rows, strict=True):
            kind = storage.Dense() if count <= SMALL else large
            room = (
                2 * count if isinstance(kind, storage.Hash) else count
            )  # so that no key is evicted
            configs.append(EmbeddingBagConfig(room, dim, name, storage=kind))
        optimizer = emblib.optim.Adagrad(LEARNING_RATE)
        self.bags = EmbeddingBagCollection(configs, optimizer=optimizer, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up one id per field."""
        lengths = torch.ones(ids.numel(), dtype=torch.int64, device=ids.device)
        batch = KeyedJaggedTensor(self.names, ids.T.flatten(), lengths=lengths)
        return self.bags(batch).values()


class TorchBags(nn.Module):
    """One `nn.EmbeddingBag` per field, for an optimizer of torch."""

    def __init__(self, rows: Sequence[int], dim: int, device: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(count, dim, mode="sum", device=device) for count in rows
        )
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -(len(bag.weight) ** -0.5), len(bag.weight) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up one id per field."""
        pairs = zip(self.bags, ids.T, strict=True)
        return torch.cat([bag(field.unsqueeze(1)) for bag, field in pairs], 1)


class Fbgemm(nn.Module):
    """The tables of the real FBGEMM, or of emblib after `emblib.compat.fbgemm.install()`."""

    def __init__(self, rows: Sequence[int], dim: int, device: str) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        is_cuda = device == "cuda"
        place = EmbeddingLocation.DEVICE if is_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if is_cuda else ComputeDevice.CPU
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, dim, place, compute) for count in rows],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
        )
        for weight in self.bags.split_embedding_weights():
            nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up one id per field."""
        return self.bags(ids.T.flatten(), torch.arange(ids.numel() + 1, device=ids.device))


class TorchRec(nn.Module):
    """A collection of the real TorchRec, for an optimizer of torch."""

    def __init__(self, rows: Sequence[int], dim: int, device: str) -> None:
        super().__init__()
        import torchrec

        self.names = [f"field{number}" for number in range(len(rows))]
        bound = [count**-0.5 for count in rows]
        configs = [
            torchrec.EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=count,
                feature_names=[name],
                weight_init_min=-bound[number],
                weight_init_max=bound[number],
            )
            for number, (name, count) in enumerate(zip(self.names, rows, strict=True))
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.make = torchrec.KeyedJaggedTensor.from_lengths_sync

    def forward(self, ids: Tensor) -> Tensor:
        """Look up one id per field."""
        lengths = torch.ones(ids.numel(), dtype=torch.int64, device=ids.device)
        return self.bags(self.make(self.names, ids.T.flatten(), lengths)).values()


Make = Callable[[Sequence[int], int, str], nn.Module]
KINDS: dict[str, Make] = {
    "plain": lambda rows, dim, on: Collection(rows, dim, storage.Dense(), on),
    "tensor_train": lambda rows, dim, on: Collection(rows, dim, storage.TensorTrain((8, 8)), on),
    "hash": lambda rows, dim, on: Collection(rows, dim, storage.Hash(), on),
    "torch": TorchBags,
    "fbgemm": Fbgemm,
    "torchrec": TorchRec,
}


class Dlrm(nn.Module):
    """Predict the logit of a click."""

    def __init__(
        self, kind: str, rows: Sequence[int], numbers: int, device: str, dim: int = 16
    ) -> None:
        super().__init__()
        self.dim, fields = dim, len(rows) + 1
        self.tables = KINDS[kind](rows, dim, device)
        self.bottom = nn.Sequential(nn.Linear(numbers, 32), nn.ReLU(), nn.Linear(32, dim))
        pairs = fields * (fields - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        first, second = torch.tril_indices(fields, fields, -1)
        self.pairs = first * fields + second
        self.bottom.to(device)
        self.top.to(device)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return `[B]` logits of ids `[B, F]` and numbers `[B, K]`."""
        dense = self.bottom(numbers)
        rows = self.tables(ids).view(len(ids), -1, self.dim)
        vectors = torch.cat([dense.unsqueeze(1), rows], 1)
        products = (vectors @ vectors.mT).flatten(1)[:, self.pairs.to(ids.device)]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that backward does not update."""
        is_fused = not isinstance(self.tables, TorchBags | TorchRec)
        tables = () if is_fused else self.tables.parameters()
        return [*self.bottom.parameters(), *self.top.parameters(), *tables]
