"""Fit the tables of a model into a budget of memory, and train them as planned.

python examples/compress.py [cpu|cuda]
"""

import sys

import torch

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, optim

ROWS = {"user": 200_000, "item": 50_000, "country": 200}


def main(device: str) -> None:
    """Plan for a twentieth of the memory, print the plan, and train."""
    torch.manual_seed(0)
    optimizer = optim.RowwiseAdagrad(lr=0.05)
    tables = [EmbeddingBagConfig(rows, 32, name) for name, rows in ROWS.items()]
    whole = sum(4 * config.num_embeddings * (config.embedding_dim + 1) for config in tables)
    # Without a trace of your own lookups the plan assumes Zipf-distributed ids.
    plan = emblib.plan_memory(tables, whole // 20, optimizer=optimizer)
    print(plan)
    bags = EmbeddingBagCollection(list(plan.configs), optimizer=optimizer, device=device)
    lengths = torch.ones(3 * 256, dtype=torch.int64)
    for _ in range(5):
        ids = torch.cat([torch.randint(rows, (256,)) for rows in ROWS.values()])
        batch = KeyedJaggedTensor(list(ROWS), ids, lengths=lengths).to(device)
        bags(batch).values().square().mean().backward()
    used = sum(bags.nbytes().values())
    print(f"{whole / 1e6:.0f} MB of tables and states in {used / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
