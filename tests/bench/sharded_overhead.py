"""What a sharded step costs in addition to its kernels and its messages.

    python -m tests.bench.sharded_overhead

A step of almost nothing (26 tables, two bags of one id) on ranks of one thread each. In turn are
timed: the sharded step; a step of the same tables in one kernel; and the four all-to-alls of the
sharded step alone, of the same sizes. What is left of the first without the others is overhead:
in seconds, with what ranks wait for each other, and in those of the thread's own processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import emblib
from emblib import optim
from emblib.sharding import RankGroup, row_wise, shard, table_wise
from emblib.sharding.all_to_all import start_all_to_all
from tests.bench.local_ranks import run_ranks

TABLES, BAGS, DIM, ROWS = 26, 2, 64, 1000
RULES = {"table_wise": table_wise, "row_wise": lambda rank: row_wise()}


def main() -> None:
    """Print medians by number of ranks and plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    for size in arguments.ranks:
        run_ranks(size, _rank, size, arguments.rounds)


def _rank(rank: int, size: int, rounds: int) -> None:
    for plan in RULES:
        steps = _steps(RankGroup(), plan)
        walls, processor = _timed(steps, rounds)
        if rank == 0:
            print(f"{size} ranks, {plan}")
            _tell("elapsed", walls)
            _tell("processor", processor)


def _steps(ranks: RankGroup, plan: str) -> dict[str, Callable[[], None]]:
    configs = [emblib.EmbeddingBagConfig(ROWS, DIM, f"t{i}", (f"f{i}",)) for i in range(TABLES)]
    collection = emblib.EmbeddingBagCollection(configs, optimizer=optim.SGD(0.01))
    rules = {c.name: RULES[plan](i * ranks.size // TABLES) for i, c in enumerate(configs)}
    sharded = shard(collection, {"": rules}, ranks)
    specs = [emblib.TableSpec(ROWS, DIM) for _ in configs]
    kernel = emblib.TableBatchedEmbeddingBags(specs, optim.SGD(0.01))
    keys = [f"f{i}" for i in range(TABLES)]
    ids = torch.randint(0, ROWS, (TABLES * BAGS,))
    lengths = torch.ones(TABLES * BAGS, dtype=torch.int64)
    offsets = torch.arange(TABLES * BAGS + 1)
    grad = torch.randn(BAGS, TABLES * DIM)

    def one_kernel() -> None:
        kernel(ids, offsets).backward(grad)

    def step() -> None:
        batch = emblib.KeyedJaggedTensor(keys, ids, lengths=lengths)
        sharded(batch).values().backward(grad)

    each = TABLES * BAGS // ranks.size
    messages = [
        torch.zeros(n * ranks.size, dtype=d)
        for n, d in (
            (4 + TABLES // ranks.size, torch.int64),
            (2 * each, torch.int64),
            (each * DIM, torch.float32),
            (each * DIM, torch.float32),
        )
    ]

    def all_to_alls() -> None:
        if ranks.size > 1:
            for message in messages:
                sizes = [message.numel() // ranks.size] * ranks.size
                start_all_to_all(message, sizes, sizes, ranks).wait()

    return {"sharded": step, "one kernel": one_kernel, "all-to-alls": all_to_alls}


Samples = dict[str, list[float]]


def _timed(steps: dict[str, Callable[[], None]], rounds: int) -> tuple[Samples, Samples]:
    """Seconds that passed, and seconds of this thread, by step."""
    walls: Samples = {name: [] for name in steps}
    own: Samples = {name: [] for name in steps}
    for i in range(rounds + 20):
        for name, step in steps.items():
            dist.barrier()
            start, began = time.perf_counter(), time.thread_time()
            step()
            if i >= 20:
                own[name].append(time.thread_time() - began)
                walls[name].append(time.perf_counter() - start)
    return walls, own


def _tell(clock: str, seconds: Samples) -> None:
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    rest = [
        1e3 * (whole - sum(parts))
        for whole, *parts in zip(*(seconds[name] for name in seconds), strict=True)
    ]
    low, middle, high = statistics.quantiles(rest, n=4)
    parts = ", ".join(f"{name} {value:.3f}" for name, value in medians.items())
    print(f"  {clock}: {parts} ms; overhead {middle:.3f} ms (quartiles {low:.3f}, {high:.3f})")


if __name__ == "__main__":
    main()
