"""What a training step of dynamic tables starts on the device, and that the host never waits in it.

The budgets are exact: a step that needs fewer launches shows here too, and its budget is lowered.
CUB's sorts count as one operation each, whatever they launch.
"""

from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, optim
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]


OF_ENTRY = "kernel a kernel of "  # a kernel that is local to the file of an entry


class Step(NamedTuple):
    """A step after others: the tables, the keys before it and its own, by table."""

    specs: tuple[DynamicSpec, ...]
    before: range
    keys: range


STEPS = {
    "all hits": Step((DynamicSpec(4096, 8), DynamicSpec(4096, 8)), range(600), range(600)),
    "many misses": Step((DynamicSpec(4096, 8), DynamicSpec(4096, 8)), range(600), range(300, 900)),
    "growth": Step(
        (DynamicSpec(4096, 8, initial_capacity=32), DynamicSpec(4096, 8)),
        range(20),
        range(10, 600),
    ),
    "new keys in a small table": Step((DynamicSpec(64, 8),), range(60), range(100, 1060)),
}
# Operations of the device in all, and the kernels of each entry of csrc/hash among them.
ENTRIES = {
    "hash_touch_": 2,
    "hash_misses": 5,
    "hash_insert_": 7,
    "hash_fill_slots": 1,
    "hash_initial_rows_": 1,
}
BUDGETS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "all hits": (29, ENTRIES),
    "many misses": (29, ENTRIES),
    "growth": (33, {**ENTRIES, "hash_grow_": 3}),
    "new keys in a small table": (36, {**ENTRIES, "hash_insert_": 13}),
}


def counts_of(step: Step) -> dict[str, int]:
    """Count what the device gets to do in a step: forward, backward and update."""
    gpu = torch_cuda.gpu
    module = DynamicEmbeddingBags(step.specs, optim.RowwiseAdagrad(0.1), device="cuda")
    batches = []
    for keys in (step.before, step.keys):
        ids = torch.tensor(keys).repeat(len(step.specs)).cuda()
        batches.append((ids, torch.arange(0, ids.numel() + 1, 10, device="cuda")))
    gradient = torch.ones(len(step.keys) // 10, 8 * len(step.specs), device="cuda")
    module(*batches[0]).sum().backward()
    gpu.reset_counts()
    module(*batches[1]).backward(gradient)
    return gpu.counts()


@pytest.mark.parametrize("name", STEPS)
def test_launches_of_a_step(name: str) -> None:
    counts = counts_of(STEPS[name])
    waits = [what for what in counts if what.startswith("wait ")]
    assert not waits, "a training step does not wait for the device"
    kernels = {
        what.removeprefix(OF_ENTRY): count for what, count in counts.items() if "hash_" in what
    }
    total, budget = BUDGETS[name]
    assert kernels == dict(budget)
    assert sum(counts.values()) == total, counts
