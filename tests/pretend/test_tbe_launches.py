"""What a training step of table-batched embeddings starts on the device.

The budgets are exact: a step that needs fewer launches shows here too, and its budget is lowered.
CUB's sorts count as one operation each, whatever they launch.
"""

from typing import Any

import pytest
import torch

from emblib import BoundsCheck, Pooling, TableBatchedEmbeddingBags, TableSpec, optim
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]

STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 14),
    "mean": ({"pooling": Pooling.MEAN}, 14),
    "without a bounds check": ({"bounds_check": BoundsCheck.NONE}, 11),
}


@pytest.mark.parametrize("name", STEPS)
def test_launches_of_a_step(name: str) -> None:
    options, budget = STEPS[name]
    gpu, tables = torch_cuda.gpu, [TableSpec(1000, 64), TableSpec(500, 64)]
    module = TableBatchedEmbeddingBags(tables, optim.RowwiseAdagrad(0.1), device="cuda", **options)
    ids, offsets = torch.arange(400).cuda(), torch.arange(401).cuda()
    gradient = torch.ones(200, 128, device="cuda")
    module(ids, offsets).backward(gradient)
    gpu.reset_counts()
    module(ids, offsets).backward(gradient)
    counts = gpu.counts()
    assert not [what for what in counts if what.startswith("wait ")]
    assert sum(counts.values()) == budget, counts
