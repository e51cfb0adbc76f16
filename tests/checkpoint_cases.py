"""A module of tables to save and load: three placements of the same tables, and how they train."""

from typing import Any

import torch
from torch import Tensor, nn

from emblib import BoundsCheck, CacheConfig, Placement, TableBatchedEmbeddingBags, TableSpec, optim

ROWS, DIMS = (40, 300, 200), (8, 5, 12)
NAMES = ("user", "", "row_cache")
PLAIN = (Placement.DEVICE,) * 3
TIERED = (Placement.DEVICE, Placement.MANAGED, Placement.MANAGED_CACHING)
CACHED = (Placement.MANAGED_CACHING, Placement.DEVICE, Placement.MANAGED_CACHING)
PLACEMENTS = {"plain": PLAIN, "tiered": TIERED, "cached": CACHED}
BATCH = 12


def make(
    placements: tuple[Placement, ...] = PLAIN,
    optimizer: optim.Optimizer | None = None,
    **options: Any,
) -> TableBatchedEmbeddingBags:
    specs = [
        TableSpec(rows, options.get("dim", dim), name, placement)
        for rows, dim, name, placement in zip(ROWS, DIMS, NAMES, placements, strict=True)
    ]
    options.pop("dim", None)
    options = {"cache": CacheConfig(sets=2), "bounds_check": BoundsCheck.IGNORE, **options}
    return TableBatchedEmbeddingBags(specs, optimizer or optim.Adam(0.1), **options)


def batch(seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(ROWS) * BATCH,), generator=generator)
    counts = lengths.view(len(ROWS), BATCH).sum(1).tolist()
    indices = [
        torch.randint(0, rows, (count,), generator=generator)
        for rows, count in zip(ROWS, counts, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.cat(indices).to(device), offsets.to(device)


def train(module: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        out = module(*batch(seed, next(module.parameters()).device))
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        out.backward(grad.to(out))


def trained(*arguments: Any, **options: Any) -> TableBatchedEmbeddingBags:
    module = make(*arguments, **options)
    train(module, 0, 1, 2)
    return module


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in module.state_dict().items()}


def assert_same(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor.cpu(), second[key].cpu()), key


def assert_goes_on(a: nn.Module, b: nn.Module) -> None:
    """Both are the same, and stay so."""
    assert_same(a, b)
    train(a, 3, 4, 5)
    train(b, 3, 4, 5)
    assert_same(a, b)


class Model(nn.Module):
    """Tables below a linear layer."""

    def __init__(self, placements: tuple[Placement, ...]) -> None:
        super().__init__()
        self.tables = make(placements)
        self.top = nn.Linear(self.tables.output_dim, 3)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.tables(indices, offsets))
