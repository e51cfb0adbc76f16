"""Bytes between nodes of a step whose rows nodes sum first, and of one without sums.

    python -m tests.bench.node_sums

Four ranks of one thread each over gloo on this machine, as two nodes of two: there is no network,
so the processor time tells what the sums cost, and the bytes what they save. Tables are split by
`table_row_wise` and `grid`; without sums the same plan runs on ranks that count as one node.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, optim
from emblib.sharding import RankGroup, World, all_to_all
from emblib.sharding.headers import Content
from emblib.sharding.plan import plan_from_shapes
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharding_types import TableShape, grid, table_row_wise
from tests.bench.local_ranks import run_ranks

RANKS, LOCAL, TABLES, ROWS, DIM, BATCH = 4, 2, 26, 20_000, 64, 1024
RULES = {"table-row-wise": lambda t: table_row_wise(t % (RANKS // LOCAL)), "grid": lambda t: grid()}


def main() -> None:
    """Print a line per plan, ids per bag, and number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    run_ranks(RANKS, _rank, arguments.rounds)


def _rank(rank: int, rounds: int) -> None:
    sent = _count(rank)
    for plan in RULES:
        for ids in (1, 20):
            batch, steps = _batch(rank, ids), {}
            for local_size in (RANKS, LOCAL):
                steps[local_size] = _collection(plan, local_size)
            seconds: dict[int, list[float]] = {local_size: [] for local_size in steps}
            nbytes = {}
            for _ in range(rounds + 1):
                for local_size, module in steps.items():
                    sent[0] = 0
                    dist.barrier()
                    start = time.process_time()
                    out = module(batch).values()
                    out.backward(torch.full_like(out, 1e-3))
                    seconds[local_size].append(time.process_time() - start)
                    nbytes[local_size] = sent[0]
            for local_size in steps:
                mine = nbytes[local_size], min(seconds[local_size][1:])
                every: list[Any] = [None] * RANKS
                dist.all_gather_object(every, mine)
                if rank == 0:
                    name = "without sums" if local_size == RANKS else "with sums"
                    print(
                        f"{plan}, {ids} ids per bag, {name}: "
                        f"{sum(n for n, _ in every) / 1e6:.2f} MB of rows and gradients between "
                        f"nodes, {1e3 * max(s for _, s in every):.1f} ms of processor time",
                        flush=True,
                    )


def _count(rank: int) -> list[int]:
    """Count the bytes of rows and gradients that this rank sends to other nodes."""
    sent, start = [0], all_to_all.start_all_to_all

    def count(values: Any, sizes: Sequence[int], *rest: Any, **named: Any) -> Any:
        ranks = rest[1]
        if named.get("content") in (Content.ROWS, Content.GRADIENTS):
            others = [
                r for r in range(ranks.size) if ranks.global_rank(r) // LOCAL != rank // LOCAL
            ]
            sent[0] += sum(sizes[r] for r in others) * values.element_size()
        return start(values, sizes, *rest, **named)

    all_to_all.start_all_to_all = count
    return sent


def _batch(rank: int, ids: int) -> KeyedJaggedTensor:
    torch.manual_seed(rank)
    keys = [f"t{t}" for t in range(TABLES)]
    lengths = torch.full((TABLES * BATCH,), ids)
    return KeyedJaggedTensor(keys, torch.randint(ROWS, (int(lengths.sum()),)), lengths=lengths)


def _collection(plan: str, local_size: int) -> ShardedEmbeddingBagCollection:
    ranks, world = RankGroup(local_size=local_size), World(RANKS, LOCAL)
    configs = [EmbeddingBagConfig(ROWS, DIM, f"t{t}") for t in range(TABLES)]
    source = EmbeddingBagCollection(configs, device="meta", optimizer=optim.SGD(0.01))
    rules = {config.name: RULES[plan](t) for t, config in enumerate(configs)}
    shapes = dict.fromkeys(rules, TableShape(ROWS, DIM))
    return ShardedEmbeddingBagCollection(source, plan_from_shapes(shapes, rules, world), ranks)


if __name__ == "__main__":
    main()
