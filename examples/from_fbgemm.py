"""Run code that was written for FBGEMM: change one import.

python examples/from_fbgemm.py [cpu|cuda]
"""

import sys

import torch

# Before: from fbgemm_gpu.split_table_batched_embeddings_ops_training import ...
from emblib.compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def main(device: str) -> None:
    """Train two tables with FBGEMM's names and arguments."""
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(10_000, 32, place, compute), (500, 32, place, compute)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        device=torch.device(device),
    )
    tables.init_embedding_weights_uniform(-0.1, 0.1)
    offsets = torch.arange(0, 2 * 64 + 1, device=device)  # 2 tables, 64 bags of one id
    norms = []
    for _ in range(20):
        indices = torch.randint(500, (128,), device=device)
        output = tables(indices, offsets)  # [64, 64]
        output.square().sum().backward()
        norms.append(output.norm().item())
    states = tables.split_optimizer_states()
    print(f"norm of the output {norms[0]:.2f} -> {norms[-1]:.2f}; {len(states)} tables with sums")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
