"""A training step written for FBGEMM runs with only its import lines changed."""

import re
from typing import Any

import pytest
import torch

from tests.compat.peer import fbgemm

EXAMPLE = """
import torch

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

# Two tables, of 3 rows of length 8 and of 5 rows of length 4.
if torch.cuda.is_available():
    device, compute = "cuda", ComputeDevice.CUDA
    places = [EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED]
else:
    device, compute = "cpu", ComputeDevice.CPU
    places = [EmbeddingLocation.HOST, EmbeddingLocation.HOST]
tbe = SplitTableBatchedEmbeddingBagsCodegen(
    [(3, 8, places[0], compute), (5, 4, places[1], compute)],
    optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=0.1,
    eps=1e-3,
)
torch.manual_seed(0)
tbe.init_embedding_weights_uniform(-1, 1)

# Three samples; bag (table t, sample b) is indices[offsets[3 * t + b] : offsets[3 * t + b + 1]].
indices = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3, 1, 4, 2, 0, 0], device=device)
offsets = torch.tensor([0, 2, 5, 7, 9, 12, 13], device=device)
first = tbe(indices, offsets)
first.sum().backward()
second = tbe(indices, offsets)
weights = tbe.split_embedding_weights()
states = tbe.split_optimizer_states()
"""


def _run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def _ours() -> dict[str, Any]:
    text, count = re.subn(r"from fbgemm_gpu\S+ import", "from emblib.compat.fbgemm import", EXAMPLE)
    assert count == 3
    return _run(text)


def test_the_example_runs() -> None:
    result = _ours()
    assert result["first"].shape == (3, 12)
    assert [tuple(w.shape) for w in result["weights"]] == [(3, 8), (5, 4)]
    assert [tuple(s.shape) for (s,) in result["states"]] == [(3,), (5,)]
    assert result["second"].sum() < result["first"].sum()  # what a step down the gradient does


@pytest.mark.skipif(torch.cuda.is_available(), reason="the peer is the CPU build")
def test_both_libraries_do_the_same() -> None:
    fbgemm()
    mine, theirs = _ours(), _run(EXAMPLE)
    torch.testing.assert_close(mine["first"], theirs["first"])
    torch.testing.assert_close(mine["second"], theirs["second"])
    for a, b in zip(mine["weights"], theirs["weights"], strict=True):
        torch.testing.assert_close(a, b)
    for (a,), (b,) in zip(mine["states"], theirs["states"], strict=True):
        torch.testing.assert_close(a, b)
