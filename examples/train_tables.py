"""Train two embedding tables and a linear layer on clicks with a planted rule.

python examples/train_tables.py [cpu|cuda]
"""

import sys

import torch
from torch import nn

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

USERS, ITEMS, BATCH = 1_000, 5_000, 512


def batch(generator: torch.Generator, device: str) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return one user and three items per example, and a label that they determine."""
    user = torch.randint(USERS, (BATCH,), generator=generator)
    items = torch.randint(ITEMS, (BATCH, 3), generator=generator)
    label = ((user % 7 < 3) ^ (items[:, 0] % 5 < 2)).float()
    lengths = torch.cat([torch.full((BATCH,), 1), torch.full((BATCH,), 3)])  # bags by feature
    ids = KeyedJaggedTensor(["user", "items"], torch.cat([user, items.flatten()]), lengths=lengths)
    return ids.to(device), label.to(device)


def main(device: str) -> None:
    """Train for 300 steps and print the loss at both ends."""
    torch.manual_seed(0)
    # Features read tables by name. Backward applies the optimizer to the rows of the batch.
    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(USERS, 16, "user"), EmbeddingBagConfig(ITEMS, 16, "item", ["items"])],
        optimizer=emblib.optim.RowwiseAdagrad(lr=0.2),
        device=device,
    )
    top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    dense = torch.optim.Adam(top.parameters(), 0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(300):
        ids, label = batch(generator, device)
        logits = top(tables(ids).values()).squeeze(1)  # [B, 32]: the features side by side
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        dense.zero_grad()
        loss.backward()  # updates the tables
        dense.step()  # updates the rest
        losses.append(loss.item())
    print(f"loss {sum(losses[:20]) / 20:.3f} -> {sum(losses[-20:]) / 20:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
