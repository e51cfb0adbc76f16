"""Cached tables: forwards and steps against FBGEMM's, what prefetch hides, and the bus.

*copies* is a prefetch alone, *compute* a step whose rows are all in the cache. A step with prefetch
on a side stream is to take at most the longer of the two plus 10 %. The bus is measured by copies
between pinned memory and the device, each way and both at once, and by `move_kernel` where every
batch fetches and evicts all of its rows.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor

import emblib
from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import LR, NotOffered, fbgemm
from tests.bench.gpu.watch import POOL, Call, kernels, ratio

SHAPE = Shape(10, 1_000_000, 64, 8192, 10, 1.05)
CACHED = 0.1  # of the rows
BUS_BYTES = 256 << 20


def run(bench: Bench) -> None:
    """Measure both policies, prefetch and the bus."""
    shape = sized(bench, [SHAPE])[0]
    if bench.device.type == "cuda":
        bench.attempt("bus", functools.partial(bus, bench))
        for dim in (16, 32, 64, 128):
            bench.attempt(f"moves D{dim}", functools.partial(moves, bench, dim))
    bench.attempt("prefetch", functools.partial(prefetch, bench, shape))
    for policy in (emblib.CachePolicy.LFU, emblib.CachePolicy.LRU):
        bench.attempt(policy.name, functools.partial(policies, bench, shape, policy))


def cached(shape: Shape, policy: emblib.CachePolicy, share: float, device: torch.device) -> Any:
    """Return emblib's tables in host memory, behind a cache of a share of their rows."""
    placement = emblib.Placement.MANAGED_CACHING
    specs = [emblib.TableSpec(shape.rows, shape.dim, placement=placement)] * shape.tables
    sets = max(1, int(share * shape.tables * shape.rows) // 32)
    cache = emblib.CacheConfig(policy=policy, sets=sets)
    optimizer = emblib.optim.RowwiseAdagrad(LR)
    return emblib.TableBatchedEmbeddingBags(specs, optimizer, cache=cache, device=device)


def policies(bench: Bench, shape: Shape, policy: emblib.CachePolicy) -> None:
    """Race forwards and steps of emblib and FBGEMM behind caches of one policy and size."""
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)
    tables = {"emblib": cached(shape, policy, CACHED, bench.device)}
    try:
        tables["fbgemm"] = _fbgemm(shape, policy, bench.device)
    except NotOffered as error:
        bench.row(policy=policy.name, contender="fbgemm", status=str(error))
    calls: dict[str, Call] = {}
    for contender, module in tables.items():
        for ids, offsets in batches * (1 if bench.tiny else 4):
            module(ids, offsets).backward(grad)
        calls[contender] = lambda n, m=module: m(*batches[n % len(batches)]).backward(grad)
        calls[f"{contender} forward"] = lambda n, m=module: _forward(m, batches[n % len(batches)])
    results = bench.race(calls)
    for contender, times in results.items():
        bench.row(
            policy=policy.name,
            contender=contender,
            host_us=times.median_us("host"),
            device_us=times.median_us("device"),
            status=times.error or "ok",
        )
    for work in ("", " forward"):
        if f"fbgemm{work}" in results:
            value = ratio(results[f"fbgemm{work}"], results[f"emblib{work}"])
            bench.figure(f"{policy.name}{work or ' step'}: FBGEMM ÷ emblib", value)


def _forward(module: Any, batch: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        module(*batch)


def _fbgemm(shape: Shape, policy: emblib.CachePolicy, device: torch.device) -> Any:
    if device.type != "cuda":
        raise NotOffered("FBGEMM has caches on a GPU only")
    configs, common, training = fbgemm()
    location, compute = common.EmbeddingLocation.MANAGED_CACHING, common.ComputeDevice.CUDA
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.rows, shape.dim, location, compute)] * shape.tables,
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        cache_algorithm=common.CacheAlgorithm[policy.name],
        cache_load_factor=CACHED,
        uvm_host_mapped=True,  # managed memory beyond the card can hang it
        device=device,
    )


def prefetch(bench: Bench, shape: Shape) -> None:
    """Time steps without prefetch and with it on a side stream, copies alone and compute alone.

    Every step has a new batch, so that its copies are those of a long run.
    """
    count = 8 if bench.tiny else 80
    batches = shape.batches(bench.device, count)
    grad = shape.gradient(bench.device)
    steps = _Steps(bench, shape, batches, grad)
    step_s = steps.time(overlapped=False)
    prefetched_s = steps.time(overlapped=True)
    copies = steps.time_copies()
    resident = cached(shape, emblib.CachePolicy.LRU, 1.5, bench.device)
    for ids, offsets in batches:
        resident(ids, offsets).backward(grad)
    compute = bench.race({"c": lambda n: resident(*batches[n % count]).backward(grad)})["c"]
    compute_us = compute.median_us("elapsed")
    bench.row(
        policy="LRU",
        contender="emblib, prefetch",
        step_us=1e6 * step_s,
        prefetched_step_us=1e6 * prefetched_s,
        copies_us=1e6 * copies,
        compute_us=compute_us,
        status="ok",
    )
    if compute_us:
        bound = max(1e6 * copies, compute_us)
        bench.figure("prefetched step ÷ max(copies, compute)", 1e6 * prefetched_s / bound)


class _Steps:
    """Runs of steps on new batches, timed as a whole."""

    def __init__(
        self, bench: Bench, shape: Shape, batches: list[tuple[Tensor, Tensor]], grad: Tensor
    ) -> None:
        self.bench, self.batches, self.grad = bench, batches, grad
        self.module = cached(shape, emblib.CachePolicy.LRU, CACHED, bench.device)
        self.share = len(batches) // 4
        self.begin = 0
        self._warm_up()

    def _warm_up(self) -> None:
        for ids, offsets in self.batches[: self.share]:
            self.module(ids, offsets).backward(self.grad)
        self.begin = self.share

    def _next(self) -> list[tuple[Tensor, Tensor]]:
        chosen = self.batches[self.begin : self.begin + self.share]
        self.begin += self.share
        return chosen

    def time(self, *, overlapped: bool) -> float:
        """Return seconds per step."""
        chosen, module = self._next(), self.module
        side = None
        if overlapped and self.bench.device.type == "cuda":
            side = torch.cuda.Stream(self.bench.device)

        def ahead(number: int) -> None:
            if not overlapped or number >= len(chosen):
                return
            if side is None:
                module.prefetch(*chosen[number])
            else:
                with torch.cuda.stream(side):
                    module.prefetch(*chosen[number])

        def work(_: int) -> None:
            ahead(0)
            for number, (ids, offsets) in enumerate(chosen):
                ahead(number + 1)  # the lookup waits for its own prefetch only
                module(ids, offsets).backward(self.grad)

        return self._elapsed(work) / len(chosen)

    def time_copies(self) -> float:
        """Return seconds per prefetch; each is used by a forward that is not timed."""
        total, chosen = 0.0, self._next()
        for ids, offsets in chosen:
            total += self._elapsed(lambda _, b=(ids, offsets): self.module.prefetch(*b))
            _forward(self.module, (ids, offsets))
        return total / len(chosen)

    def _elapsed(self, work: Call) -> float:
        self.bench.watch.sync()
        start = time.perf_counter()
        work(0)
        self.bench.watch.sync()
        return time.perf_counter() - start


def bus(bench: Bench) -> None:
    """Copy between pinned memory and the device, each way and both at once."""
    size = bench.size(BUS_BYTES, 1 << 16)
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    card = [torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    side = torch.cuda.Stream(bench.device)

    def up(_: int) -> None:
        card[0].copy_(host[0], non_blocking=True)

    def down(_: int) -> None:
        host[1].copy_(card[1], non_blocking=True)

    def both(number: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        up(number)
        with torch.cuda.stream(side):
            down(number)
        torch.cuda.current_stream().wait_stream(side)

    results = bench.race({"to device": up, "to host": down, "both": both})
    for name, times in results.items():
        device = times.median_us("device")
        moved = size * (2 if name == "both" else 1)
        if device:
            bench.figure(f"bus {name}: GB/s", moved / device / 1e3)
        bench.row(
            contender=f"bus {name}",
            device_us=device,
            gb_s=moved / device / 1e3 if device else None,
            status=times.error or "ok",
        )


def moves(bench: Bench, dim: int) -> None:
    """Measure the rate at which rows of a dim move: no batch finds its rows in the cache."""
    shape = Shape(1, bench.size(2_000_000, 4_000), dim, bench.size(200_000, 64))
    share = 2 * shape.batch / shape.rows
    module = cached(shape, emblib.CachePolicy.LRU, share, bench.device)
    drawn = torch.randperm(shape.rows, device=bench.device)[: POOL * shape.batch]
    batches, offsets = drawn.view(POOL, -1), torch.arange(shape.batch + 1, device=bench.device)
    num_calls = 0

    def look_up(number: int) -> None:
        nonlocal num_calls
        num_calls += 1
        _forward(module, (batches[number % POOL], offsets))

    for number in range(POOL):
        look_up(number)
    module.reset_cache_stats()
    num_calls = 0
    moved = {name: us for name, (_, us) in kernels(look_up).items() if "move" in name}
    stats, row_bytes = module.cache_stats(), 4 * (dim + 1)  # with its state
    device_us, calls = sum(moved.values()), max(num_calls, 1)
    numbers = {
        "fetched": stats.unique_misses - stats.conflict_unique_misses,
        "written back": stats.write_backs,
    }
    for name, rows in numbers.items():
        rate = rows / calls * row_bytes / device_us / 1e3 if device_us else None
        bench.row(contender=f"emblib D{dim} {name}", device_us=device_us, gb_s=rate, status="ok")
        if rate:
            bench.figure(f"rows of {4 * dim} bytes {name}: GB/s", rate)
