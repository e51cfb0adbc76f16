"""Move a model from nn.EmbeddingBag to emblib in one line, check it, time it, and go back.

python examples/migrate_model.py [cpu|cuda]
"""

import sys

import torch
from torch import nn

import emblib


class Clicks(nn.Module):
    """Eight tables and a linear layer, as one writes them with torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 16, mode="sum") for _ in range(8))
        self.top = nn.Linear(8 * 16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one logit per example; ids `[8, B, 4]`."""
        pooled = [bag(feature) for bag, feature in zip(self.bags, ids, strict=True)]
        return self.top(torch.cat(pooled, 1))


def main(device: str) -> None:
    """Train a little with torch, migrate, check, measure, and train on."""
    torch.manual_seed(0)
    model = Clicks().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    batches = [torch.randint(20_000, (8, 256, 4), device=device) for _ in range(8)]

    def train() -> None:
        for ids in batches:
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()

    with emblib.TraceRecorder(model) as recorder:
        train()
    migration = emblib.migrate(model, optimizer)  # rows and accumulators move into the tables
    print(migration)
    worst = max(max(d.output, d.rows or 0.0) for d in migration.check())
    print(f"largest difference of outputs and of rows after a step: {worst:.1e}")
    speeds = migration.measure(recorder.trace, batch_size=256)
    print(f"a step of {speeds[0].path} takes torch {speeds[0].step:.1f} times as long")
    train()
    migration.undo()
    train()  # nn.EmbeddingBag again, with the rows and sums that the tables had
    print(f"back to {type(model.bags[0]).__name__}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
