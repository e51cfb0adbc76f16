"""What a training step of dynamic tables starts on the device, and that the host never waits in it.

The budgets are exact: a step that needs fewer launches shows here too, and its budget is lowered.
CUB's sorts count as one operation each, whatever they launch.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, HashTable, optim
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
ENTRIES = {"hash_touch_": 3, "hash_insert_": 6, "hash_initial_rows_": 1}
BUDGETS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "all hits": (17, ENTRIES),
    "many misses": (17, ENTRIES),
    "growth": (21, {**ENTRIES, "hash_grow_": 3}),
    "new keys in a small table": (24, {**ENTRIES, "hash_insert_": 12}),
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


# A table of eight buckets, of which 400 keys need four rounds.
INSERT = {"hash_touch_": 3, "hash_insert_": 10}
WRITE = {"hash_write_rows_": 2, "hash_write_rows_kernel": 1}
ADD = {"hash_add_rows_kernel": 1}
START = {"hash_initial_rows_": 1}
Call = Callable[[HashTable, torch.Tensor, torch.Tensor], object]
# The kernels of each call of a hash table, and the number of operations of torch: one makes the
# segments of the batch, another compares where a call returns which keys are there.
CALLS: Mapping[str, tuple[Call, int, Mapping[str, int]]] = {
    "find": (lambda t, k, v: t.find(k), 1, {"hash_find_rows_kernel": 1}),
    "slots": (lambda t, k, v: t.slots(k), 1, {"hash_find": 1}),
    "contains": (lambda t, k, v: t.contains(k), 2, {"hash_find": 1}),
    "assign": (lambda t, k, v: t.assign(k, v), 2, {"hash_find": 1, **WRITE}),
    # Besides the two of torch, a grouping.
    "accumulate": (lambda t, k, v: t.accumulate(k, v), 3, {"hash_find": 1, **ADD}),
    "insert slots": (lambda t, k, v: t.find_or_insert_slots(k), 1, {**INSERT, **START}),
    "insert": (
        lambda t, k, v: t.find_or_insert(k),
        1,
        {**INSERT, **START, "hash_read_rows_kernel": 1},
    ),
    "insert values": (
        lambda t, k, v: t.find_or_insert(k, v),
        1,
        {**INSERT, "hash_read_rows_kernel": 1},
    ),
    "insert or assign": (lambda t, k, v: t.insert_or_assign(k, v), 1, {**INSERT, **WRITE}),
    "insert and evict": (
        lambda t, k, v: t.insert_and_evict(k, v, padded=True),
        1,
        {**INSERT, **WRITE, "hash_evicted_rows": 1, "hash_evicted_rows_kernel": 1},
    ),
}


def entry_or_kernel(what: str) -> str:
    """Return the entry of a kernel that is local to it, or the name of a template."""
    if what.startswith(OF_ENTRY):
        return what.removeprefix(OF_ENTRY)
    return what.partition("emb::cuda::")[2].partition("<")[0]


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_hash_table(
    name: str, no_host_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    """They wait for nothing, and no operation of torch moves a row."""
    call, operations_of_torch, budget = CALLS[name]
    table = HashTable(DynamicSpec(256, 8), seed=1, device="cuda")
    values = torch.randn(400, 8, device="cuda")
    table.find_or_insert(torch.arange(200).cuda())
    keys = torch.arange(100, 500).cuda()
    torch_cuda.gpu.reset_counts()
    with no_host_waits():
        call(table, keys, values)
    counts = torch_cuda.gpu.counts()
    kernels = {entry_or_kernel(what): n for what, n in counts.items() if "hash_" in what}
    assert kernels == dict(budget)
    assert sum(counts.values()) == sum(budget.values()) + operations_of_torch, counts


@pytest.mark.parametrize("eviction", ["lru", "lfu", "step", "custom"])
def test_a_hash_table_is_that_of_the_cpu(
    eviction: str, no_host_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    """Random calls on both devices: values, statuses and evicted rows."""
    spec = DynamicSpec(320, 6, eviction=eviction, initial_capacity=64, default_value=3.0)
    on_cpu, on_device = HashTable(spec, seed=1), HashTable(spec, seed=1, device="cuda")
    some = torch.Generator().manual_seed(4)
    for step in range(6):
        keys = torch.randint(-200, 300, (150,), generator=some)
        values = torch.randn(150, 6, generator=some)
        scores = torch.randint(1, 9, (150,), generator=some)
        given = (scores,) if eviction == "custom" else (None,)
        there = (keys.cuda(), values.cuda(), *(x if x is None else x.cuda() for x in given))
        want = on_cpu.insert_and_evict(keys, values, *given)
        with no_host_waits():
            got = on_device.insert_and_evict(*there, padded=True)
        got = got.trimmed()
        assert torch.equal(got.slots.cpu(), want.slots)
        assert torch.equal(got.status.cpu(), want.status)
        for a, b in zip(got.evicted, want.evicted, strict=True):
            assert torch.equal(a.cpu(), b), step
        keys = torch.randint(-200, 300, (150,), generator=some)
        there = (keys.cuda(), *there[1:])
        with no_host_waits():
            read, _ = on_device.find_or_insert(*there)
        assert torch.equal(read.cpu(), on_cpu.find_or_insert(keys, values, *given)[0])
        keys = torch.randint(-200, 300, (150,), generator=some)
        there = (keys.cuda(), there[1])
        with no_host_waits():
            found = on_device.accumulate(*there)
        assert torch.equal(found.cpu(), on_cpu.accumulate(keys, values))
        assert torch.equal(on_device.find(keys.cuda())[0].cpu(), on_cpu.find(keys)[0])
    assert torch.equal(on_device.scores(keys.cuda())[0].cpu(), on_cpu.scores(keys)[0])
