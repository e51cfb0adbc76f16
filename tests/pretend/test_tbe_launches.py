"""What a training step of table-batched embeddings starts on the device.

The budgets are exact: a step that needs fewer launches shows here too, and its budget is lowered.
CUB's sorts count as one operation each, whatever they launch.
"""

from typing import Any

import pytest
import torch

from emblib import BoundsCheck, Pooling, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.ops import codes, tbe
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]

# One launch checks the batch, one looks it up, one groups it, three update.
STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 6),
    "mean": ({"pooling": Pooling.MEAN}, 6),
    "without a bounds check": ({"bounds_check": BoundsCheck.NONE}, 5),
}
FORWARD_AND_BACKWARD = ["emblib::tbe_lookup_checked_", "emblib::tbe_backward_"]
# Lookups, whether a bounds check has repaired the offsets, and the operations of `tbe_group` on
# GPUs with clusters of blocks: above 16,384 lookups the keys, the sort and two passes over the
# sorted keys, and to look at the offsets the fill of two counts.
GROUPINGS: dict[str, tuple[int, bool, int]] = {
    "none": (0, True, 1),
    "one block": (400, False, 1),
    "a cluster": (16_384, True, 1),
    "a cluster that looks at the offsets": (16_384, False, 1),
    "sorted by CUB": (16_385, True, 4),
    "sorted by CUB, with a look at the offsets": (16_385, False, 5),
}


@pytest.mark.skipif(
    torch_cuda.gpu is not None and torch_cuda.gpu.settings.capability < 9, reason="needs clusters"
)
@pytest.mark.parametrize("name", GROUPINGS)
def test_launches_of_grouping(name: str) -> None:
    lookups, is_repaired, budget = GROUPINGS[name]
    gpu, features = torch_cuda.gpu, torch.tensor([[0, 0, 1000, 64, 0, 0, 0, 0]]).cuda()
    ids, offsets = (torch.arange(lookups) % 1000).cuda(), torch.arange(lookups + 1).cuda()
    gpu.reset_counts()
    rows, _, _, _, count = tbe.tbe_group(features, ids, offsets, None, 1000, is_repaired)
    assert sum(gpu.counts().values()) == budget, gpu.counts()
    assert torch.equal(rows[: count.item()].cpu(), torch.arange(min(lookups, 1000)))


@pytest.mark.parametrize(("bags", "budget"), [(2047, 1), (2048, 2)])
def test_launches_of_a_bounds_check(bags: int, budget: int) -> None:
    """One block needs no counts that are 0 before it starts."""
    gpu, features = torch_cuda.gpu, torch.tensor([[0, 0, 1000, 64, 0, 0, 0, 0]]).cuda()
    ids, offsets = (torch.arange(bags) % 1001).cuda(), torch.arange(bags + 1).cuda()
    gpu.reset_counts()
    mode = codes.BOUNDS_CHECK["warning"]
    repaired, violations = tbe.check_bounds(ids, offsets, features, None, mode)
    assert sum(gpu.counts().values()) == budget, gpu.counts()
    assert violations.tolist() == [bags // 1001, 0]
    assert torch.equal(repaired.cpu(), torch.arange(bags + 1, dtype=torch.int32))


def _counts(module: TableBatchedEmbeddingBags, lookups: int) -> dict[str, int]:
    """Return what a step of two features of one lookup per bag starts, after the first one."""
    gpu = torch_cuda.gpu
    ids, offsets = torch.arange(lookups).cuda() % 500, torch.arange(lookups + 1).cuda()
    gradient = torch.ones(lookups // 2, 128, device="cuda")
    module(ids, offsets).backward(gradient)
    gpu.reset_counts()
    module(ids, offsets).backward(gradient)
    counts: dict[str, int] = gpu.counts()
    assert not [what for what in counts if what.startswith("wait ")]
    return counts


def _module(**options: Any) -> TableBatchedEmbeddingBags:
    tables = [TableSpec(1000, 64), TableSpec(500, 64)]
    return TableBatchedEmbeddingBags(tables, optim.RowwiseAdagrad(0.1), device="cuda", **options)


@pytest.mark.parametrize("name", STEPS)
def test_launches_of_a_step(name: str) -> None:
    options, budget = STEPS[name]
    counts = _counts(_module(**options), 400)
    assert sum(counts.values()) == budget, counts


def test_launches_of_a_large_step() -> None:
    """A fill and a launch check the batch; four group it."""
    counts = _counts(_module(), 40_000)
    assert sum(counts.values()) == 10, counts


def test_a_step_is_two_ops() -> None:
    """Nothing of torch runs on the device but allocations."""
    module = _module()
    ids, offsets = torch.arange(400).cuda(), torch.arange(401).cuda()
    gradient = torch.ones(200, 128, device="cuda")
    for _ in range(2):  # the counts of violations are copied once in 16 steps
        module(ids, offsets).backward(gradient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(ids, offsets).backward(gradient)
    names = [event.name for event in profile.events()]
    assert [name for name in names if name.startswith("emblib::")] == FORWARD_AND_BACKWARD
    allocates = {"aten::empty_strided", "aten::empty"}
    views = {"aten::detach"}  # of the gradient and of what autograd returns
    others = {name for name in names if name.startswith("aten::")} - allocates - views
    assert not others, names
