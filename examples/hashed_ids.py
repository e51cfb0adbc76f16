"""Train a table keyed by arbitrary 64-bit ids, more of them than it has room for.

python examples/hashed_ids.py [cpu|cuda]
"""

import sys

import torch

import emblib
from emblib import (
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    FrequencyAdmission,
)


def main(device: str) -> None:
    """Stream ids whose popularity drifts, and print what the table kept."""
    torch.manual_seed(0)
    bags = DynamicEmbeddingBags(
        [
            DynamicSpec(
                4_096,
                dim=16,
                name="item",
                eviction=Eviction.LRU,
                # An id gets a row when it is seen a second time; a sketch counts the others.
                admission=FrequencyAdmission(2, CountMinSketch(1 << 14)),
            )
        ],
        emblib.optim.RowwiseAdagrad(lr=0.1),
        device=device,
    )
    offsets = torch.arange(0, 1025, 4, device=device)  # 256 bags of 4 ids
    for day in range(20):
        popular = torch.randint(2_000, (768,)) + 500 * day  # new items every day
        rare = torch.randint(-(2**62), 2**62, (256,))  # seen once
        ids = torch.cat([popular, rare])[torch.randperm(1024)].to(device)
        bags(ids, offsets).square().mean().backward()  # inserts, evicts and trains
    stats = bags.stats()["item"]
    print(f"{bags.size(0):,} rows, {stats['inserted']:,} inserted, {stats['evicted']:,} evicted")
    bags.eval()  # lookups change nothing now; unknown ids read the default value, zeros
    known = bags(torch.tensor([500 * 19], device=device), torch.tensor([0, 1], device=device))
    unknown = bags(torch.tensor([-1], device=device), torch.tensor([0, 1], device=device))
    print(f"norm of a known id {known.norm().item():.3f}, of an unknown one {unknown.norm():.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
