"""What a training step of tensor trains starts on the device: the same for any number of tables.

The budgets are exact: a step that needs fewer launches shows here too, and its budget is lowered.
CUB's sorts count as one operation each, whatever they launch.
"""

import pytest
import torch

from emblib import (
    CachedTTEmbeddingBags,
    Precision,
    TableBatchedTTEmbeddingBags,
    TTCache,
    TTSpec,
    optim,
)
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]

SMALL = TTSpec(120, 16, (4, 4), (4, 5, 6), (2, 2, 4))
WIDE = TTSpec(110, 32, (8, 4), (4, 5, 6), (2, 4, 4))
LOW = TTSpec(60, 8, (4, 8), (3, 4, 5), (2, 1, 4))
# Shapes that run on other kernels: no vectors, two cores, four cores.
ODD = TTSpec(60, 6, (3, 3), (3, 4, 5), (2, 3, 1))
TWO_CORES = TTSpec(60, 16, (4,), (10, 6), (4, 4))
FOUR_CORES = TTSpec(120, 16, (4, 4, 4), (2, 3, 4, 5), (2, 2, 2, 2))

BAGS, BUDGET = 4, 21
CASES: dict[str, tuple[tuple[TTSpec, ...], torch.dtype, int]] = {
    "three equal tables": ((SMALL,) * 3, torch.float32, BUDGET),
    "ten equal tables": ((SMALL,) * 10, torch.float32, BUDGET),
    "thirty equal tables": ((SMALL,) * 30, torch.float32, BUDGET),
    "three shapes": ((SMALL, WIDE, LOW), torch.float32, BUDGET),
    "three shapes, thirty tables": ((SMALL, WIDE, LOW) * 10, torch.float32, BUDGET),
    "16 bits": ((SMALL, WIDE, LOW) * 2, torch.float16, BUDGET + 1),
    # Rows, left and right gradients on two kernels each; the mirrored cores of right pairs, before
    # and after the products.
    "other kernels": ((SMALL, ODD, TWO_CORES, FOUR_CORES) * 2, torch.float32, BUDGET + 5),
}


FORWARD_AND_BACKWARD = ["emblib::tt_lookup_checked_", "emblib::tt_backward_"]


def a_batch(specs: tuple[TTSpec, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, offsets and a gradient for four bags of one lookup per table."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randint(0, spec.rows, (BAGS,), generator=generator) for spec in specs])
    gradient = torch.ones(BAGS, sum(spec.dim for spec in specs), device="cuda")
    return ids.cuda(), torch.arange(ids.numel() + 1).cuda(), gradient


def step_counts(specs: tuple[TTSpec, ...], dtype: torch.dtype) -> dict[str, int]:
    """Count what the device gets to do in the second step."""
    gpu = torch_cuda.gpu
    optimizer, precision = optim.Adagrad(0.1), Precision(weights=dtype)
    module = TableBatchedTTEmbeddingBags(specs, optimizer, device="cuda", precision=precision)
    ids, offsets, gradient = a_batch(specs)
    module(ids, offsets).backward(gradient)
    gpu.reset_counts()
    module(ids, offsets).backward(gradient)
    counts: dict[str, int] = gpu.counts()
    return counts


@pytest.mark.parametrize("name", CASES)
def test_launches_of_a_step(name: str) -> None:
    specs, dtype, budget = CASES[name]
    counts = step_counts(specs, dtype)
    assert not [what for what in counts if what.startswith("wait ")]
    assert sum(counts.values()) == budget, counts


def test_a_step_is_two_ops() -> None:
    """Nothing of torch runs on the device but allocations."""
    specs = (SMALL, WIDE, LOW)
    module = TableBatchedTTEmbeddingBags(specs, optim.Adagrad(0.1), device="cuda")
    ids, offsets, gradient = a_batch(specs)
    for _ in range(2):  # the counts of violations are copied once in 16 steps
        module(ids, offsets).backward(gradient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(ids, offsets).backward(gradient)
    names = [event.name for event in profile.events()]
    assert [name for name in names if name.startswith("emblib::")] == FORWARD_AND_BACKWARD
    # Repaired offsets, what is kept, scratch and output; the scratch of backward.
    assert [name for name in names if name.startswith("aten::")] == ["aten::empty_strided"] * 5


@pytest.mark.parametrize(
    ("tables", "stores_rows", "budget"),
    [(1, False, 34), (1, True, 39), (3, False, 41), (3, True, 46)],
)
def test_launches_of_cached_trains(tables: int, stores_rows: bool, budget: int) -> None:
    """A step waits for nothing; the hash table of counts takes 13 of its launches."""
    specs = (SMALL,) * tables
    module = CachedTTEmbeddingBags(specs, TTCache(20), optim.SGD(0.1), device="cuda")
    ids, offsets, gradient = a_batch(specs)
    for k in range(4):
        if k == 2 and stores_rows:
            module.populate()
        torch_cuda.gpu.reset_counts()
        module(ids, offsets).backward(gradient)
    counts: dict[str, int] = torch_cuda.gpu.counts()
    assert not [what for what in counts if what.startswith("wait ")]
    assert sum(counts.values()) == budget, counts
