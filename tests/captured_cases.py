"""A small model, its step and its batches, for the tests of captured steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CapturedStep,
    JaggedTensor,
    Placement,
    Pooling,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)

BATCH = 4  # samples
BOUNDS = (8, 24)
# The largest batch is above both bounds.
SIZES = (5, 24, 0, 8, 21, 3, 40, 8, 9, 7, 1, 30, 22, 6)

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_bags(bags: int, size: int, seed: int) -> Tensor:
    """Return the offsets of `size` ids in bags of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(size + 1, (bags - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([size])])


SGD = optim.SGD(0.1)


@dataclass(frozen=True)
class Problem:
    """A model of one table module and a linear layer, and its batches."""

    optimizer: optim.Optimizer = SGD
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    dtype: torch.dtype = torch.int64
    placement: Placement = Placement.DEVICE
    rows: tuple[int, ...] = (50, 7)

    def tables(self, device: torch.device) -> nn.Module:
        """Return the module of tables."""
        specs = [TableSpec(rows, 8, placement=self.placement) for rows in self.rows]
        return TableBatchedEmbeddingBags(specs, self.optimizer, pooling=self.pooling, device=device)

    def model(self, device: torch.device) -> nn.ModuleDict:
        """Return tables and a linear layer."""
        torch.manual_seed(0)
        top = nn.Linear(8 * len(self.rows), 1).to(device)
        return nn.ModuleDict({"tables": self.tables(device), "top": top})

    def batch(self, size: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return a batch of `size` ids."""
        generator = torch.Generator().manual_seed(size)
        offsets = random_bags(len(self.rows) * BATCH, size, size)
        starts = offsets[::BATCH].tolist()
        ids = [
            torch.randint(rows, (last - first,), generator=generator)
            for rows, first, last in zip(self.rows, starts, starts[1:], strict=False)
        ]
        weights = torch.rand(size, generator=generator) if self.weighted else None
        labels = torch.rand(BATCH, 1, generator=generator)
        bags = JaggedTensor(
            torch.cat(ids).to(device, self.dtype),
            None if weights is None else weights.to(device),
            offsets=offsets.to(device, self.dtype),
        )
        return {"bags": bags, "labels": labels.to(device)}


class Training:
    """A model, the optimizer of its dense part, and a whole step."""

    def __init__(self, model: nn.ModuleDict, **options: Any) -> None:
        self.model = model
        is_cuda = next(model["top"].parameters()).is_cuda
        self.optimizer = torch.optim.Adam(
            model["top"].parameters(), capturable=is_cuda, **{"lr": 0.05, **options}
        )

    def step(self, batch: dict[str, Any]) -> Tensor:
        """Train on a batch and return the loss."""
        self.optimizer.zero_grad()
        bags = batch["bags"]
        rows = self.model["tables"](bags.values(), bags.offsets(), bags.weights_or_none())
        loss = nn.functional.mse_loss(self.model["top"](rows), batch["labels"])
        loss.backward()
        self.optimizer.step()
        return loss

    def values(self) -> dict[str, Tensor]:
        """Return copies of all that a step changes."""
        return {key: t.detach().cpu().clone() for key, t in self.model.state_dict().items()}


def check_same(one: Training, other: Training) -> None:
    """Check that two models have the same bits."""
    values = other.values()
    for key, value in one.values().items():
        assert torch.equal(value, values[key]), key


def check_loop(
    eager: Training,
    captured: Training,
    batches: Sequence[tuple[Any, Any]],
    bounds: Sequence[int] = BOUNDS,
) -> CapturedStep:
    """Train twins, one uncaptured with `batches[i][0]` and one captured with `batches[i][1]`."""
    step = CapturedStep(captured.step, bounds, device=captured.model["top"].weight.device)
    for batch, padded in batches:
        want, loss = eager.step(batch), step(padded)
        assert torch.equal(want, loss)
        assert not loss.requires_grad
    check_same(eager, captured)
    return step


def twins(problem: Problem, device: torch.device) -> tuple[Training, Training]:
    """Return two models with the same values."""
    return Training(problem.model(device)), Training(problem.model(device))
