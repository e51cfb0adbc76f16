"""A small module under FBGEMM's interface, and one batch for it."""

from typing import Any

import torch
from torch import Tensor

from emblib.compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

HOST = EmbeddingLocation.HOST
CACHED = EmbeddingLocation.MANAGED_CACHING
INDICES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3, 1, 4, 2, 0, 0])
OFFSETS = torch.tensor([0, 2, 5, 7, 9, 12, 13])


def make(
    location: EmbeddingLocation = HOST, *, rows: int = 6, dim: int = 8, **options: Any
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Two tables of one dim on the CPU, uniform weights."""
    specs = [(rows, dim, location, ComputeDevice.CPU)] * 2
    module = SplitTableBatchedEmbeddingBagsCodegen(specs, **options)
    torch.manual_seed(0)
    module.init_embedding_weights_uniform(-1.0, 1.0)
    return module


def step(module: SplitTableBatchedEmbeddingBagsCodegen) -> Tensor:
    """One training step on a fixed batch."""
    output = module(INDICES, OFFSETS)
    output.sum().backward()
    return output.detach()
