"""Tensor-train tables in parts: what the parts have in common is trained as one.

A row of a tensor train is a product of one slice of each of its cores. The first factors of rows
and columns, which are those of core 0, vary slowest: rows `[a * P, b * P)`, where P is the product
of the other row factors, and columns `[c * Q, d * Q)` are a tensor train whose core 0 is a slice,
`[a:b, c * R_1 : d * R_1]`, and whose other cores are those of the whole table. So every part has a
slice of core 0 to itself and a copy of each other core. The gradient of a copy is a sum over the
lookups of its own part; added up over the parts it is that of the whole table, and the same step
keeps the copies equal.

The ranks that hold parts send each other those gradients, and no other rank takes part: each adds
up one share of the numbers, in the order of ranks, and sends the sums to all. So every rank has the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.collections.groups import TableGroups
from emblib.ops import autograd
from emblib.sharding.layout import Config, TableShard, with_storage
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding

Use = Callable[[list[Tensor]], None]


class SharedCores:
    """Adds up the gradients of the cores that the parts of one table have in common.

    `holders` are the ranks that hold parts; `parts` are on this one. Each calls the members of its
    parts once in a backward pass, also for an empty batch; the last of them waits for the others.
    """

    def __init__(self, name: str, ranks: RankGroup, holders: Sequence[int], parts: int) -> None:
        self._name, self._ranks, self._holders, self._parts = name, ranks, tuple(holders), parts
        self._waiting: dict[int, tuple[list[Tensor], Use]] = {}

    def member(self, part: int) -> Callable[[list[Tensor], Use], None]:
        """Return the function that shard number `part` of this rank calls with its gradients."""
        return partial(self._add, part)

    def _add(self, part: int, grads: list[Tensor], use: Use) -> None:
        if part in self._waiting:
            self._waiting.clear()
            raise RuntimeError(
                f"tensor train {self._name!r} has {self._parts} parts on rank {self._ranks.rank}, "
                "and one of them went through backward twice before another did once; "
                "backward must run through the whole output"
            )
        self._waiting[part] = grads, use
        if len(self._waiting) < self._parts:
            return
        waiting, self._waiting = self._waiting, {}
        every = [waiting[part] for part in sorted(waiting)]
        common = [torch.cat([grad.reshape(-1) for grad in grads[1:]]) for grads, _ in every]
        total = common[0] if len(common) == 1 else torch.stack(common).sum(0)
        total = summed(total, self._ranks, self._holders)
        sizes = [grad.numel() for grad in every[0][0][1:]]
        for grads, use_ in every:
            shared = zip(total.split(sizes), grads[1:], strict=True)
            use_([grads[0], *(flat.view(grad.shape) for flat, grad in shared)])


def summed(values: Tensor, ranks: RankGroup, holders: Sequence[int]) -> Tensor:
    """Return the sum of `values` over `holders`, with the same bits on all of them.

    `values` is flat and of equal length on every holder; this rank is one of them.
    """
    if len(holders) == 1:
        return values
    me, share = holders.index(ranks.rank), -(-values.numel() // len(holders))
    ends = [min(share * k, values.numel()) for k in range(len(holders) + 1)]
    sizes = [end - begin for begin, end in pairwise(ends)]
    pieces = list(values.split(sizes))
    received = [
        pieces[me] if k == me else torch.empty_like(pieces[me]) for k in range(len(holders))
    ]
    _swap(ranks, holders, pieces, received)
    reduced = received[0].clone()
    for other in received[1:]:
        reduced += other
    total = torch.empty_like(values)
    sums = list(total.split(sizes))
    sums[me].copy_(reduced)
    _swap(ranks, holders, [reduced] * len(holders), sums)
    return total


def _swap(
    ranks: RankGroup, holders: Sequence[int], sent: Sequence[Tensor], received: Sequence[Tensor]
) -> None:
    """Send `sent[k]` to `holders[k]` and fill `received[k]` with what that sends.

    Messages between pairs, so that ranks which hold no part need not take part: they cannot know
    when a backward pass of the others has come this far.
    """
    messages = []
    for k, holder in enumerate(holders):
        if holder == ranks.rank:
            continue
        peer = ranks.global_rank(holder)
        for way, tensor in ((dist.isend, sent[k]), (dist.irecv, received[k])):
            if tensor.numel():
                messages.append(dist.P2POp(way, tensor, peer, ranks.group))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()


def share_cores(
    groups: TableGroups,
    parts: Sequence[TableShard],
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    ranks: RankGroup,
) -> None:
    """Make the parts of tensor trains in `groups` train the cores they have in common as one.

    `parts` are the slices of `groups`. All ranks call this with the same `configs` and `plan`.

    Raises:
        ValueError: several parts of a table on this rank without a fused optimizer, which would
            leave each of them the gradient of its own lookups.
    """
    for number, config in enumerate(configs):
        sharding = plan[config.name]
        if not with_storage(config, sharding.storage).storage.shares_parameters:
            continue
        holders = sorted({shard.rank for shard in sharding.shards})
        if len(sharding.shards) < 2 or ranks.rank not in holders:
            continue
        here = [i for i, part in enumerate(parts) if part.table == number]
        modules = [groups.module_of(i)[0] for i in here]
        if len(here) > 1 and not all(autograd.is_fused(m.optimizer) for m in modules):
            raise ValueError(
                f"rank {ranks.rank} has {len(here)} parts of tensor train {config.name!r}, whose "
                "gradients only a fused optimizer can add up: give one, or at most one part a rank"
            )
        shared = SharedCores(config.name, ranks, holders, len(here))
        for k, module in enumerate(modules):
            module.share_gradients = shared.member(k)
