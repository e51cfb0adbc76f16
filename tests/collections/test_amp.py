"""A small DLRM under autocast and `GradScaler`: as with `nn.EmbeddingBag` and torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, optim
from emblib.collections.optimizers import FusedOptimizer

ROWS, DIM, EXAMPLES, STEPS, OVERFLOW = (30, 50, 20), 8, 16, 6, 3
NAMES = [f"t{i}" for i in range(len(ROWS))]
OPTIMIZERS: dict[str, tuple[optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(0.1), lambda params: torch.optim.SGD(params, lr=0.1)),
    "adagrad": (
        optim.Adagrad(0.05, eps=1e-6),
        lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-6),
    ),
}


class Dlrm(nn.Module):
    """Dense features and tables, dot products of all pairs, and a layer on top."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.bottom = nn.Linear(4, DIM)
        self.top = nn.Linear(DIM + 6, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Return the logits `[B, 1]`."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), self.sparse(ids).to(bottom.dtype)], 1)
        first, second = torch.triu_indices(4, 4, 1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([bottom, pairs], 1))


class TorchTables(nn.Module):
    """The tables as `nn.EmbeddingBag`s."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for rows in ROWS)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return pooled rows `[B, T, D]`."""
        features = [ids[name] for name in NAMES]
        bags = zip(self.bags, features, strict=True)
        return torch.stack([bag(f.values(), f.offsets()[:-1]) for bag, f in bags], 1)


class FusedTables(nn.Module):
    """The same tables in a collection."""

    def __init__(self, optimizer: optim.Optimizer, weights: TorchTables) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(rows, DIM, name, (name,))
            for rows, name in zip(ROWS, NAMES, strict=True)
        ]
        self.tables = EmbeddingBagCollection(configs, optimizer=optimizer)
        with torch.no_grad():
            for name, bag in zip(NAMES, weights.bags, strict=True):
                self.tables.embedding_bags[name].weight.copy_(bag.weight)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return pooled rows `[B, T, D]`."""
        return self.tables(ids).values().view(-1, len(ROWS), DIM)


def train(model: Dlrm, table_optimizer: Any, dtype: torch.dtype, scaler: GradScaler) -> None:
    """Make steps with autocast; the gradients of one of them overflow if there is a scaler."""
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = [table_optimizer, torch.optim.SGD(dense, lr=0.1)]
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        x = torch.rand(EXAMPLES, 4, generator=generator)
        lengths = torch.randint(0, 4, (len(ROWS), EXAMPLES), generator=generator)
        ids = [
            torch.randint(rows, (int(n.sum()),), generator=generator)
            for rows, n in zip(ROWS, lengths, strict=True)
        ]
        batch = KeyedJaggedTensor(NAMES, torch.cat(ids), lengths=lengths.view(-1))
        labels = torch.randint(2, (EXAMPLES, 1), generator=generator).float()
        with torch.autocast("cpu", dtype=dtype):
            logits = model(x, batch)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        if scaler.is_enabled() and step == OVERFLOW:
            loss = loss * 1e30
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dlrm_trains_as_with_embedding_bags(
    name: str, dtype: torch.dtype, deferred: bool
) -> None:
    ours, torchs = OPTIMIZERS[name]
    torch.manual_seed(0)
    expected = Dlrm(TorchTables())
    fused = FusedTables(type(ours)(**{**vars(ours), "deferred": deferred}), expected.sparse)
    model = Dlrm(fused)
    model.bottom.load_state_dict(expected.bottom.state_dict())
    model.top.load_state_dict(expected.top.state_dict())
    is_scaled = dtype == torch.float16
    scalers = [GradScaler("cpu", init_scale=2.0**12, enabled=is_scaled) for _ in range(2)]
    train(model, FusedOptimizer.of(model), dtype, scalers[0])
    train(expected, torchs(expected.sparse.parameters()), dtype, scalers[1])
    assert scalers[0].get_scale() == scalers[1].get_scale() == (2.0**11 if is_scaled else 1.0)
    for table, bag in zip(NAMES, expected.sparse.bags, strict=True):
        torch.testing.assert_close(
            fused.tables.embedding_bags[table].weight, bag.weight, rtol=2e-3, atol=2e-4
        )
    torch.testing.assert_close(model.top.weight, expected.top.weight, rtol=2e-3, atol=2e-4)


def test_an_optimizer_made_before_a_move_notices_overflows() -> None:
    """As one of torch does; its groups had the scalars from before the move."""
    config = EmbeddingBagConfig(6, 2, "t", ["f"])
    model = EmbeddingBagCollection([config], optimizer=optim.SGD(0.5))
    optimizer, scaler = FusedOptimizer.of(model), GradScaler("cpu", init_scale=1024.0)
    model.to_empty(device="cpu").reset_parameters()
    features = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1]))
    for factor, scale in ((1.0, 1024.0), (torch.inf, 512.0)):
        scaler.scale(model(features).values().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
