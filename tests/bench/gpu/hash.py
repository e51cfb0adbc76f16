"""Hash tables against HierarchicalKV and dense tables: keys per second, and a step's time.

A call has as many distinct keys as `CALL`; 60 % or all of them are in the table. A table is filled
to the load, then each operation is called with new absent keys each time; what calls insert raises
the load by less than a tenth. HierarchicalKV is the library that EMBLIB_HIERARCHICALKV names
(docs/peers.md).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import emblib
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import Unsupported, build
from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import LR, Emblib
from tests.bench.gpu.watch import Call, ratio

CALL = 1 << 20  # keys
SLOTS = 64 << 20
DIM = 64
CALLS = 9  # timed, of each operation
CONTENDERS = ("scored", "hierarchicalkv")
LOADS = (0.75, 1.0)
STRIDE = -7046029254386353131  # 0x9E3779B97F4A7C15: an odd factor permutes all 64-bit keys
STEP = 1_000_003  # between the keys of a call; a prime, so that they are distinct
OPERATIONS = (  # and the percentages of keys that are there
    ("find", (100, 60)),
    ("find_slots", (100, 60)),
    ("find_or_insert", (60,)),
    ("find_or_insert_slots", (60,)),
    ("insert_or_assign", (60,)),
    ("insert_and_evict", (60,)),
)


def run(bench: Bench) -> None:
    """Measure operations on rows and slots, then dynamic steps against dense ones."""
    for load in LOADS:
        for contender in CONTENDERS:
            bench.attempt(
                f"{contender} at load {load}", functools.partial(table, bench, contender, load)
            )
    for share in (0.0, 0.2):
        bench.attempt(f"step, {share:.0%} new keys", functools.partial(steps, bench, share))


def keys_of(first: int, count: int, device: torch.device) -> Tensor:
    """Return distinct keys that look random: numbers from `first` on, multiplied."""
    return torch.arange(first, first + count, device=device) * STRIDE


def table(bench: Bench, contender: str, load: float) -> None:
    """Fill a table and time its operations."""
    slots, call = bench.size(SLOTS, 4096), bench.size(CALL, 64)
    slots = min(slots, 1 << (bench.fit_rows(slots, 4 * DIM + 32).bit_length() - 1))
    dim = bench.size(DIM, 8)
    resident = int(load * slots)
    try:
        key_table: KeyTable = build(contender, KeyTask(slots, dim, bench.device, resident))
    except Unsupported as error:
        bench.row(contender=contender, load=load, status=str(error)[:160])
        return
    for first in range(0, resident, call):
        count = min(call, resident - first)
        keys = keys_of(first, count, bench.device)
        key_table.fill(keys, torch.zeros(count, dim, device=bench.device))
    absent = resident
    for operation, percentages in OPERATIONS:
        if operation not in type(key_table).operations:
            continue
        for percent in percentages:
            times: list[float] = []
            for _ in range(1 + (2 if bench.tiny else CALLS)):
                hits = call * percent // 100
                picked = torch.arange(absent, absent + hits, device=bench.device) * STEP % resident
                new = keys_of(absent, call - hits, bench.device)
                absent += call - hits
                keys = torch.cat([picked * STRIDE, new])
                prepared = key_table.prepare(keys, torch.ones(call, dim, device=bench.device))
                work = getattr(key_table, operation)
                times.append(bench.watch.between_events(lambda _, w=work, p=prepared: w(p), 0))
            rate = call / sorted(times[1:])[len(times) // 2 - 1] / 1e6
            bench.row(
                contender=contender,
                load=load,
                operation=operation,
                hits_percent=percent,
                m_keys_s=rate,
                status="ok",
            )
            bench.figure(f"{contender} {operation} {percent} % load {load:.2f}: M keys/s", rate)


def steps(bench: Bench, share: float) -> None:
    """Time a dynamic step, of whose keys a share is new in each batch, against a dense one."""
    shape = sized(bench, [Shape(10, 1_000_000, 128, 4096, 20)])[0]
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)
    dense = Emblib(shape, "sgd", "fp32", bench.device)
    specs = [
        emblib.DynamicSpec(2 * shape.rows, shape.dim, eviction=emblib.Eviction.LRU)
    ] * shape.tables
    dynamic = emblib.DynamicEmbeddingBags(specs, emblib.optim.SGD(LR), device=bench.device)
    for ids, offsets in batches:
        dynamic(ids, offsets).backward(grad)
    dynamic_batches = _with_new_ids(batches, share, shape.rows, count=40)
    calls: dict[str, Call] = {
        "dense": lambda n: dense.step(*batches[n % len(batches)], grad),
        "dynamic": lambda n: dynamic(*next(dynamic_batches)).backward(grad),
    }
    results = bench.race(calls)
    for contender, times in results.items():
        bench.row(
            contender=f"{contender} step",
            new_percent=100 * share,
            **times.columns(),
            status=times.error or "ok",
        )
    name = f"dynamic ÷ dense step, {100 * share:.0f} % new: device"
    bench.figure(name, ratio(results["dynamic"], results["dense"]))


def _with_new_ids(
    batches: list[tuple[Tensor, Tensor]], share: float, first: int, count: int
) -> Any:
    """Yield batches whose first ids are replaced by ones that no batch had, over and over."""
    changed_batches = []
    for number in range(count):
        ids, offsets = batches[number % len(batches)]
        new = int(share * len(ids))
        ids = ids.clone()
        positions = torch.randperm(len(ids), device=ids.device)[:new]
        ids[positions] = torch.arange(first, first + new, device=ids.device)
        first += new
        changed_batches.append((ids, offsets))
    number = 0
    while True:
        yield changed_batches[number % count]
        number += 1
