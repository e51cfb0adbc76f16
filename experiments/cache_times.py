"""Measure what a cache moves over the bus: `python -m experiments.cache_times`; needs a GPU.

Three parts: the rates of pinned copies and of `move_kernel` for rows of 64 to 512 bytes, where
every batch evicts and fetches all of its rows; forward passes of LRU and LFU; and a training step
with `prefetch` of the next batch on a side stream, and its copies and its compute alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from emblib import CacheConfig, CachePolicy, Placement, TableBatchedEmbeddingBags, TableSpec, optim

_ROWS, _LOOKUPS, _POOL = 2_000_000, 200_000, 6


def elapsed_us(call: Callable[[int], object], repeats: int = 12) -> float:
    """Return the median time of a call on the device, in microseconds."""
    for number in range(_POOL):
        call(number)
    times = []
    for number in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call(number)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def cached(dim: int, policy: CachePolicy, share: float) -> TableBatchedEmbeddingBags:
    """Return a table in pinned memory behind a cache of a share of its rows."""
    spec = TableSpec(_ROWS, dim, placement=Placement.MANAGED_CACHING)
    options = CacheConfig(policy, load_factor=share)
    return TableBatchedEmbeddingBags([spec], optim.SGD(0.01), cache=options, device="cuda")


def copies() -> None:
    """Print the rates of the copy engines, GB/s per direction."""
    host, from_gpu = (torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    on_gpu, other = (torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()

    def both(_: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            from_gpu.copy_(other, non_blocking=True)
        on_gpu.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    to_gpu = elapsed_us(lambda _: on_gpu.copy_(host, non_blocking=True))
    to_host = elapsed_us(lambda _: host.copy_(on_gpu, non_blocking=True))
    rates = [host.numel() / 1e3 / us for us in (to_gpu, to_host, elapsed_us(both))]
    print("copy engines: to the GPU {:.1f}, to the host {:.1f}, both at once {:.1f}".format(*rates))


def moves(dim: int) -> None:
    """Print the rate at which a prefetch moves rows, GB/s per direction."""
    module = cached(dim, CachePolicy.LRU, 2 * _LOOKUPS / _ROWS)
    rows = torch.randperm(_ROWS, device="cuda")[: _POOL * _LOOKUPS].view(_POOL, _LOOKUPS)
    offsets = torch.arange(_LOOKUPS + 1, device="cuda")

    def look_up(number: int) -> None:
        with torch.no_grad():
            module(rows[number % _POOL], offsets)

    elapsed_us(look_up, 1)
    module.reset_cache_stats()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(_POOL):
            look_up(number)
        torch.cuda.synchronize()
    stats = module.cache_stats()
    fetched = 4 * dim * (stats.unique_misses - stats.conflict_unique_misses)
    written = 4 * dim * stats.write_backs
    us = sum(e.device_time_total for e in profile.events() or [] if "move_kernel" in e.name)
    print(
        f"rows of {4 * dim} bytes: fetched {fetched / 1e3 / us:.1f}, "
        f"written back {written / 1e3 / us:.1f}, {us / _POOL:.0f} us per batch"
    )


def zipf(count: int, seed: int) -> Tensor:
    """Draw ids with the frequencies of a zipf law of exponent 1.05."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    u = torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)
    return (((_ROWS**-0.05 - 1) * u + 1) ** -20).long() * 2654435761 % _ROWS


def policies() -> None:
    """Print forward times of both policies: six batches in turn, and always fresh ones."""
    offsets = torch.arange(0, 819_201, 10, device="cuda")
    for policy, batches in itertools.product(CachePolicy, (_POOL, 64)):
        module = cached(64, policy, 0.1)
        drawn = [zipf(819_200, seed) for seed in range(batches)]
        for ids in drawn[: batches // 2]:
            module(ids, offsets).sum().backward()

        def look_up(number: int) -> None:
            with torch.no_grad():
                module(drawn[number % batches], offsets)  # noqa: B023

        kind = f"{policy.value}, {batches} batches in turn"
        print(f"{kind}: forward {elapsed_us(look_up, batches // 2):.0f} us")


def overlap(products: int) -> None:
    """Print times of a step per batch: its parts alone, without and with prefetch."""
    offsets = torch.arange(0, 819_201, 10, device="cuda")
    batches = [zipf(819_200, seed) for seed in range(24)]
    dense = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def run(module: TableBatchedEmbeddingBags, count: int, *, ahead: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for number, ids in enumerate(batches):
            out = module(ids, offsets)
            if ahead and number + 1 < len(batches):
                with torch.cuda.stream(side):
                    module.prefetch(batches[number + 1], offsets)
            for _ in range(count):
                dense @ dense
            out.sum().backward()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / len(batches)

    resident = TableBatchedEmbeddingBags([TableSpec(_ROWS, 64)], optim.SGD(0.01), device="cuda")
    module = cached(64, CachePolicy.LRU, 0.1)
    parts = (
        ("compute alone", resident, products, False),
        ("table and copies alone", module, 0, False),
        ("without prefetch", module, products, False),
        ("with prefetch", module, products, True),
    )
    for name, table, count, ahead in parts:
        us = min(run(table, count, ahead=ahead) for _ in range(4))
        print(f"{products} products, {name}: {us:.0f} us")


def main() -> int:
    """Print all parts."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cache_times", description=__doc__)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    version = importlib.metadata.version("emblib")
    print(f"{torch.cuda.get_device_name()}, emblib {version}; rates in GB/s")
    copies()
    for dim in (16, 32, 64, 128):
        moves(dim)
    policies()
    for products in (5, 15, 30):
        overlap(products)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
