"""Train tables, store their rows in 8 and 4 bits, and look up what that costs in accuracy.

python examples/quantise_and_serve.py [cpu|cuda]
"""

import sys
import tempfile
from pathlib import Path

import torch

import emblib
from emblib import QuantizedEmbeddingBags, TableBatchedEmbeddingBags, TableSpec


def main(device: str) -> None:
    """Train, quantise, save, and serve from a new module."""
    torch.manual_seed(0)
    specs = [TableSpec(20_000, 64, "item"), TableSpec(1_000, 64, "shop")]
    trained = TableBatchedEmbeddingBags(specs, emblib.optim.Adagrad(0.1), device=device)
    offsets = torch.arange(0, 2 * 512 + 1, 4, device=device)  # 2 features, 128 bags of 4 ids
    for _ in range(20):
        ids = torch.randint(1_000, (1024,), device=device)
        trained(ids, offsets).square().mean().backward()
    floats = sum(weight.nbytes for weight in trained.table_weights())
    ids = torch.randint(1_000, (1024,), device=device)
    with torch.no_grad():
        exact = trained(ids, offsets)
        for bits in (8, 4):
            served = QuantizedEmbeddingBags.from_float(trained, bits=bits)
            with tempfile.TemporaryDirectory() as folder:
                torch.save(served.state_dict(), Path(folder) / "tables.pt")
                loaded = QuantizedEmbeddingBags(specs, bits=bits, device=device)
                loaded.load_state_dict(torch.load(Path(folder) / "tables.pt", weights_only=True))
            error = (loaded(ids, offsets) - exact).abs().max() / exact.abs().max()
            size = sum(loaded.nbytes().values()) / floats
            print(f"{bits} bits: {size:.2f} of the memory, largest error {error:.1%} of the range")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
