"""Every kind of table trains on a GPU as on the CPU, also on a device that is not the current one.

No step of tables without rows on other tiers waits for the device.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    BoundsCheck,
    CacheConfig,
    CachePolicy,
    DynamicEmbeddingBags,
    DynamicSpec,
    Placement,
    Precision,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.dynamic import CachedTTEmbeddingBags, TTCache
from emblib.specs import TTSpec
from emblib.tables import TableBatchedTTEmbeddingBags, TTEmbeddingBag, cache

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or the pretend GPU"),
]
ROWS, BATCH, STEPS = (60, 25), 6, 3
TRAINS = (TTSpec(60, 8, (3, 4), (4, 3, 5), (2, 2, 2)), TTSpec(25, 12, (5,)))
ADAM = optim.Adam(0.05)


def tables(placement: Placement, *, precision: Precision | None = None) -> nn.Module:
    specs = [
        TableSpec(rows, dim, placement=placement) for rows, dim in zip(ROWS, (8, 12), strict=True)
    ]
    return TableBatchedEmbeddingBags(
        specs, ADAM, precision=precision, bounds_check=BoundsCheck.IGNORE
    )


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: tables(Placement.DEVICE),
    "half": lambda: tables(Placement.DEVICE, precision=Precision(torch.float16)),
    "host": lambda: tables(Placement.MANAGED),
    "cached": lambda: tables(Placement.MANAGED_CACHING),
    "sgd": lambda: TableBatchedEmbeddingBags([TableSpec(60, 8), TableSpec(25, 12)], optim.SGD(0.1)),
    "trains": lambda: TableBatchedTTEmbeddingBags(TRAINS, optim.RowwiseAdagrad(0.1)),
    "dynamic": lambda: DynamicEmbeddingBags(
        [DynamicSpec(128, 8), DynamicSpec(64, 12)], ADAM, seed=0
    ),
    "cached_trains": lambda: CachedTTEmbeddingBags(TRAINS, TTCache(16), optim.SGD(0.1)),
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Ids of two features and offsets of `2 * BATCH` bags."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (2 * BATCH,), generator=generator)
    counts = (int(lengths[:BATCH].sum()), int(lengths[BATCH:].sum()))
    ids = [
        torch.randint(0, r, (n,), generator=generator) for r, n in zip(ROWS, counts, strict=True)
    ]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def train(
    module: nn.Module, device: str, guard: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Tensor]:
    outputs = []
    for step in range(STEPS):
        ids, offsets = (tensor.to(device) for tensor in batch_of(step))
        grad = torch.linspace(-1, 1, 20, device=device).expand(BATCH, 20)
        with guard():
            out = module(ids, offsets)
            out.backward(grad.to(out.dtype))
        outputs.append(out.detach().cpu())
    return outputs


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_the_cpu(kind: str, device: str) -> None:
    torch.manual_seed(0)
    on_cpu = KINDS[kind]()
    on_device = copy.deepcopy(on_cpu).to(device)
    want, got = train(on_cpu, "cpu"), train(on_device, device)
    assert torch.cuda.current_device() == 0
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "sgd"])
def test_no_step_waits(
    kind: str, no_host_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    train(KINDS[kind]().to("cuda"), "cuda", no_host_waits)


def test_cached_rows_are_prefetched_on_another_stream() -> None:
    torch.manual_seed(0)
    on_cpu = KINDS["cached"]()
    module = copy.deepcopy(on_cpu).to("cuda")
    side = torch.cuda.Stream()
    batches = [[t.to("cuda") for t in batch_of(step)] for step in range(STEPS)]

    def prefetch(step: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module.prefetch(*batches[step])
        for tensor in batches[step]:
            tensor.record_stream(side)

    outputs = []
    prefetch(0)
    for step in range(STEPS):
        torch.cuda.current_stream().wait_stream(side)
        out = module(*batches[step])
        if step + 1 < STEPS:
            prefetch(step + 1)  # before the update, whose rows are looked up again
            torch.cuda.current_stream().wait_stream(side)
        out.backward(torch.linspace(-1, 1, 20, device="cuda").expand(BATCH, 20))
        outputs.append(out.detach().cpu())
    module.flush()
    for actual, expected in zip(outputs, train(on_cpu, "cpu"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    weights = zip(module.table_weights(), on_cpu.table_weights(), strict=True)
    for actual, expected in weights:
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


def one_set_of_many_rows(placement: Placement) -> nn.Module:
    """A table of 300 rows; in a cache of 32 most rows of a batch get no way."""
    torch.manual_seed(0)
    specs = [TableSpec(300, 8, placement=placement)]
    options = CacheConfig(CachePolicy.LRU, sets=1)
    return TableBatchedEmbeddingBags(specs, ADAM, cache=options, device="cuda")


def overlapping(step: int) -> tuple[Tensor, Tensor]:
    """Return 40 ids of which many are in the batches before and after."""
    generator = torch.Generator().manual_seed(step)
    ids = 12 * (step // 2) + torch.randint(0, 60, (40,), generator=generator)
    return ids.to("cuda"), torch.arange(0, 41, 4, device="cuda")


@pytest.mark.parametrize("ahead", [1, 2])
def test_rows_without_a_way_that_a_prefetch_brings_in(ahead: int) -> None:
    """Updates and prefetches are not ordered, and still no update is lost."""
    cached, plain = map(one_set_of_many_rows, (Placement.MANAGED_CACHING, Placement.DEVICE))
    batches = [overlapping(step) for step in range(10)]
    side, left = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())  # for the inputs
    prefetching_cache = cached._prefetching_cache
    prefetched = 0
    for step, batch in enumerate(batches):
        out = None
        for look in (0, ahead):  # one lookup comes before the prefetches, so before later rows
            while prefetched <= min(step + look, len(batches) - 1):
                with torch.cuda.stream(side):
                    cached.prefetch(*batches[prefetched])
                left += [work.rows.num_rows for work in prefetching_cache._postponed_fetches]
                prefetched += 1
            if out is None:
                out = cached(*batch)
        grad = torch.linspace(-1, 1, 8, device="cuda").expand_as(out)
        out.backward(grad)
        want = plain(*batch)
        want.backward(grad)
        assert torch.equal(out, want)
    assert sum(int(count) for count in left) > 0, "rows are fetched after updates"
    assert cached.cache_stats().conflict_unique_misses > 0
    assert torch.equal(cached.table_weights()[0].cuda(), plain.table_weights()[0])


def test_an_update_does_not_wait_for_the_next_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, side = one_set_of_many_rows(Placement.MANAGED_CACHING), torch.cuda.Stream()
    batches = [overlapping(step) for step in range(4)]
    module(*overlapping(4))  # work on another stream, without which there are no events
    side.wait_stream(torch.cuda.current_stream())
    prefetching_cache, waits, wait_for = module._prefetching_cache, [], cache._wait_for

    def note_and_wait(event: torch.cuda.Event) -> None:
        waits.append(event)
        wait_for(event)

    monkeypatch.setattr(cache, "_wait_for", note_and_wait)

    def prefetch(step: int) -> torch.cuda.Event:
        waits.clear()
        with torch.cuda.stream(side):
            module.prefetch(*batches[step])
        assert prefetching_cache._last_prefetch.event is not None
        return prefetching_cache._last_prefetch.event

    updated, ready = None, prefetch(0)
    for step in range(3):
        waits.clear()
        out = module(*batches[step])
        assert ready in waits
        ready = prefetch(step + 1)
        assert updated is None or updated in waits, "released rows may be evicted"
        waits.clear()
        out.sum().backward()
        assert ready not in waits
        updated = prefetching_cache._last_access.event
    torch.cuda.synchronize()


def test_sample_weights_have_gradients() -> None:
    torch.manual_seed(0)
    on_cpu = KINDS["dense"]()
    on_device = copy.deepcopy(on_cpu).to("cuda")
    ids, offsets = batch_of(0)
    grads = []
    for module, device in ((on_cpu, "cpu"), (on_device, "cuda")):
        weights = torch.linspace(0.5, 2, len(ids), device=device, requires_grad=True)
        module(ids.to(device), offsets.to(device), weights).sum().backward()
        grads.append(weights.grad.cpu())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_keys_are_erased() -> None:
    module = KINDS["dynamic"]().to("cuda")
    train(module, "cuda")
    ids = batch_of(0)[0][:3].to("cuda")
    before = module.size(0)
    erased = module.erase(0, ids)
    assert module.size(0) == before - len(ids.unique())
    assert erased.numel() == 3
    assert (module.find(0, ids) < 0).all()


def test_a_train_of_one_table() -> None:
    torch.manual_seed(0)
    on_cpu = TTEmbeddingBag(TRAINS[0], optim.Adagrad(0.1))
    on_device = copy.deepcopy(on_cpu).to("cuda")
    ids, offsets = torch.tensor([3, 59, 3, 0]), torch.tensor([0, 2, 4])
    want = on_cpu(ids, offsets)
    got = on_device(ids.to("cuda"), offsets.to("cuda"))
    torch.testing.assert_close(got.cpu(), want)


def test_quantized_tables_read_like_the_floats() -> None:
    torch.manual_seed(0)
    floats = KINDS["sgd"]().to("cuda")
    quantized = QuantizedEmbeddingBags.from_float(floats)
    ids, offsets = (tensor.to("cuda") for tensor in batch_of(0))
    torch.testing.assert_close(quantized(ids, offsets), floats(ids, offsets), rtol=0, atol=0.02)
