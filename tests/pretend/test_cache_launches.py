"""What calls of cached and of quantised tables start on the device.

The budgets are exact: a call that needs fewer launches shows here too, and its budget is lowered.
"""

from collections.abc import Callable

import pytest
import torch

from emblib import (
    CacheConfig,
    CachePolicy,
    MultiPassPrefetch,
    Placement,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]

CACHE_OPS = ["cache_prefetch_", "tbe_lookup_checked_", "tbe_backward_"]


def _cached(policy: CachePolicy, **options: object) -> TableBatchedEmbeddingBags:
    tables = [TableSpec(rows, 64, "", Placement.MANAGED_CACHING) for rows in (1000, 500)]
    cache = CacheConfig(policy, sets=8, **options)
    return TableBatchedEmbeddingBags(tables, optim.RowwiseAdagrad(0.1), cache=cache, device="cuda")


def _batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return ((torch.arange(400) + number) % 500).cuda(), torch.arange(401).cuda()


def _counts(call: Callable[[], object]) -> dict[str, int]:
    """Return what a call starts, after some of them; no call waits."""
    gpu = torch_cuda.gpu
    for _ in range(3):
        call()
    gpu.reset_counts()
    call()
    counts: dict[str, int] = gpu.counts()
    assert not [name for name in counts if name.startswith("wait ")], counts
    return counts


def _ops(call: Callable[[], object]) -> list[str]:
    """Return the ops of emblib in a call; of torch there are allocations and views alone.

    A report of bounds that has arrived in host memory may be read, by `tolist`.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = [event.name for event in profile.events()]
    allowed = {"aten::empty_strided", "aten::empty", "aten::detach", "aten::view"}
    allowed |= {"aten::resolve_conj", "aten::resolve_neg"}
    others = {name for name in names if name.startswith("aten::")} - allowed
    assert not others, names
    return [name.removeprefix("emblib::") for name in names if name.startswith("emblib::")]


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_launches_of_cached_tables(policy: CachePolicy) -> None:
    """Seven prefetch: a check, two groupings, three plan and one moves. One reads, three update."""
    module, batch = _cached(policy), _batch()
    gradient = torch.ones(200, 128, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            module(*batch)

    def step() -> None:
        module(*batch).backward(gradient)

    assert sum((counts := _counts(forward)).values()) == 8, counts
    assert _ops(forward) == CACHE_OPS[:2]
    assert sum((counts := _counts(step)).values()) == 11, counts
    assert _ops(step) == CACHE_OPS


def test_launches_of_a_step_with_prefetch() -> None:
    """The lookup checks the batch again, after it has fetched what may have been updated."""
    module, batches = _cached(CachePolicy.LRU), [_batch(0), _batch(30)]
    gradient, number = torch.ones(200, 128, device="cuda"), [0]
    module.prefetch(*batches[0])

    def step() -> None:
        batch, coming = batches[number[0] % 2], batches[(number[0] + 1) % 2]
        number[0] += 1
        module.prefetch(*coming)
        module(*batch).backward(gradient)

    assert sum((counts := _counts(step)).values()) == 13, counts
    assert _ops(step) == [CACHE_OPS[0], "cache_move_", *CACHE_OPS[1:]]


def test_prefetches_in_passes() -> None:
    """Each pass is planned and moved by itself; the rows are located afterwards."""
    module = _cached(CachePolicy.LRU, passes=MultiPassPrefetch(2, min_lookups=10))
    once, batch = _cached(CachePolicy.LRU), _batch()
    for twin in (module, once):
        twin.load_state_dict(_cached(CachePolicy.LRU).state_dict())
        with torch.no_grad():
            for views in twin.table_weights():
                views.fill_(0.5)
    assert torch.equal(module(*batch), once(*batch))


@pytest.mark.parametrize("bits", [8, 4])
def test_launches_of_quantised_tables(bits: int) -> None:
    """One checks, one looks up."""
    tables = [TableSpec(1000, 64), TableSpec(500, 64)]
    module, batch = QuantizedEmbeddingBags(tables, bits, device="cuda"), _batch()
    counts = _counts(lambda: module(*batch))
    assert sum(counts.values()) == 2, counts
    assert _ops(lambda: module(*batch)) == ["quant_lookup_checked_"]
    assert not module.to_dense(0).any()  # by the op that checks nothing
