"""Measures the constants of the cost model on the machine at hand, in some seconds.

What ranks compute is measured by one of them while the others wait, what they send by all at once.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from emblib.sharding.boxes import data_parallel, row_wise, table_wise
from emblib.sharding.exchange import start_all_to_all
from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.planner.calibration import Calibration
from emblib.sharding.planner.measure import Sizes, Tiny, computing, tiny_step, wait

_EXCHANGES = 4  # all-to-alls of a step: header, ids, rows, gradients
_MESSAGE = 1 << 20  # elements to each rank


def calibrate(ranks: Ranks | None = None, sizes: Sizes | None = None) -> Calibration:
    """The constants of this machine, and of the links between `ranks`, which all call this.

    Without other ranks the links keep the figures of `defaults`, as do host memory behind a GPU,
    and disks; `dataclasses.replace` puts in others that you know.
    """
    ranks = Ranks.single() if ranks is None else ranks
    sizes = Sizes() if sizes is None else sizes
    found = None
    if ranks.rank == 0:
        found = computing(ranks.device, sizes)
    ranks.barrier()
    first = ranks.gather_objects(found)[0]
    assert first is not None
    if ranks.size == 1:
        return first
    links = ranks.gather_objects(_links(ranks, first.step_s, sizes))
    latency, copies, blocks, link, network = (max(column) for column in zip(*links, strict=True))
    nodes = f"{ranks.nodes} nodes" if ranks.nodes > 1 else "one node"
    return replace(
        first,
        source=f"{first.source}, {ranks.size} ranks on {nodes}",
        exchange_s=latency,
        message_s=latency,
        copies_s=copies,
        blocks_s=blocks,
        link_bytes_per_s=1.0 / link if link else first.link_bytes_per_s,
        network_bytes_per_s=1.0 / network if network else first.network_bytes_per_s,
    )


def _overheads(ranks: Ranks, step_s: float, rounds: int) -> tuple[float, float, float]:
    """Of steps on next to nothing: of each all-to-all for each other rank, of copies, of blocks."""
    one_each = [table_wise(rank) for rank in range(ranks.size)]
    spread = _synchronised(ranks, tiny_step(ranks, ranks.size, *one_each), rounds)
    copied = _synchronised(
        ranks, tiny_step(ranks, ranks.size, *one_each[1:], data_parallel()), rounds
    )
    each = max(spread - step_s, 1e-6) / _EXCHANGES / (ranks.size - 1)
    cut = _synchronised(ranks, tiny_step(ranks, ranks.size, *one_each[1:], row_wise()), rounds)
    return each, max(copied - spread, 0.0), max(cut - spread, 0.0)


def _synchronised(ranks: Ranks, step: Tiny, rounds: int) -> float:
    """Seconds of a step that all ranks make together."""
    times = 10

    def once() -> float:
        ranks.barrier()
        wait(ranks.device)
        start = time.perf_counter()
        for _ in range(times):
            step.forward().backward(step.gradient)
        wait(ranks.device)
        return (time.perf_counter() - start) / times

    once()
    return min(once() for _ in range(rounds))


def _links(ranks: Ranks, step_s: float, sizes: Sizes) -> tuple[float, ...]:
    """Seconds of a message in a step on nothing, of copies, blocks, a byte on a link, a network.

    0 where there is no such link.
    """
    node = range(ranks.node * ranks.local_size, (ranks.node + 1) * ranks.local_size)
    own = [r for r in node if r != ranks.rank]
    others = [r for r in range(ranks.size) if r not in node]
    latency = _exchange(ranks, [*own, *others], 1, sizes.rounds)
    told = [*_overheads(ranks, step_s, sizes.rounds)]
    for peers in (own, others):
        if not ranks.gather_objects(len(peers))[0]:
            told.append(0.0)
            continue
        seconds = _exchange(ranks, peers, _MESSAGE, sizes.rounds)
        told.append(max(seconds - latency, 1e-9) / (len(peers) * _MESSAGE * 4))
    return tuple(told)


def _exchange(ranks: Ranks, peers: Sequence[int], count: int, rounds: int) -> float:
    """Seconds of an all-to-all of `count` floats with each of `peers`, all ranks at once."""
    sizes = [count if r in peers else 0 for r in range(ranks.size)]
    sent = torch.ones(sum(sizes), device=ranks.device)
    received = torch.empty_like(sent)
    times = 3 if count > 1 else 30

    def once() -> float:
        ranks.barrier()
        wait(ranks.device)
        start = time.perf_counter()
        for _ in range(times):
            start_all_to_all(sent, sizes, sizes, ranks, received=received).wait()
        wait(ranks.device)
        return (time.perf_counter() - start) / times

    once()
    return min(once() for _ in range(rounds))
