"""Train with whole steps as CUDA graphs, although batches differ in their number of ids.

python examples/captured_step.py [cpu|cuda]
"""

import sys
from typing import Any

import torch
from torch import nn

import emblib
from emblib import JaggedTensor


def main(device: str) -> None:
    """Train 60 batches of different sizes; on a GPU most of them are replays of a graph."""
    torch.manual_seed(0)
    specs = [emblib.TableSpec(rows=10_000, dim=32), emblib.TableSpec(rows=500, dim=32)]
    bags = emblib.TableBatchedEmbeddingBags(specs, emblib.optim.Adagrad(0.1), device=device)
    top = nn.Linear(64, 1).to(device)
    dense = torch.optim.Adam(top.parameters(), 0.01, capturable=device == "cuda")

    def train(batch: dict[str, Any]) -> torch.Tensor:
        """Make a whole step. It waits for nothing, so that it can be captured."""
        dense.zero_grad()
        ids = batch["ids"]
        logits = top(bags(ids.values(), ids.offsets())).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        loss.backward()
        dense.step()
        return loss

    step = emblib.CapturedStep(train, bounds=[256, 512], device=device)  # ids per batch
    total = torch.zeros((), device=device)
    for _ in range(60):
        lengths = torch.randint(1, 5, (2 * 64,))  # two features, 64 examples
        ids = torch.randint(500, (int(lengths.sum()),))
        label = (ids[: lengths[:64].sum()][lengths[:64].cumsum(0) - 1] % 2).float()
        total += step({"ids": JaggedTensor(ids, lengths=lengths), "label": label})
    print(f"mean loss {total.item() / 60:.3f}; graphs for {step.captured_bounds} ids")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
