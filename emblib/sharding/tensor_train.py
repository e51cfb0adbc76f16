"""Shards of tensor-train tables: gradients of the cores that all shards of a table share.

A row of a tensor train is a product of one slice of each core. The factors of core 0 vary slowest,
so a shard is a tensor train as well. Let P be the product of the row factors of the other cores,
and Q that of their column factors. The shard of rows `[a * P, b * P)` and columns `[c * Q, d * Q)`
has the slice `[a:b, c * R_1 : d * R_1]` of core 0, and a copy of every other core. The gradient of
a copy is a sum over the lookups of its shard. The sum of these gradients over all shards is the
gradient of the core, and equal updates keep the copies equal.

Only the ranks that store shards exchange these gradients. Each of them adds up one part of the
elements, in rank order, and sends the sums to the others, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.collections.groups import TableGroups
from emblib.ops import autograd
from emblib.sharding.layout import Config, TableShard, with_storage
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding

ApplyGradients = Callable[[list[Tensor]], None]
"""Function that updates a shard with the gradients of its cores."""


class SharedCores:
    """Adds up the gradients of the cores that the shards of one table share.

    In every backward pass, also for an empty batch, each shard must call the function that
    `adder_of` returned for it once. The last call on a rank exchanges gradients with the other
    owners and updates all shards of the rank.

    Args:
        name: name of the table.
        ranks: the processes.
        owners: the ranks that store shards, ascending; this rank is one of them.
        num_shards: the number of shards on this rank.
    """

    def __init__(self, name: str, ranks: RankGroup, owners: Sequence[int], num_shards: int) -> None:
        self._name, self._ranks = name, ranks
        self._owners, self._num_shards = tuple(owners), num_shards
        self._pending: dict[int, tuple[list[Tensor], ApplyGradients]] = {}

    def adder_of(self, shard: int) -> Callable[[list[Tensor], ApplyGradients], None]:
        """Return the function that shard number `shard` of this rank calls with its gradients.

        Its arguments are the gradients of the shard's cores, and a function that applies gradients
        to the shard. The call for the last shard sums the gradients of shared cores over all
        owners, and calls the second argument of each shard with the gradients to apply. It raises
        RuntimeError if a shard calls it twice before another shard of this rank calls it.
        """
        return partial(self._add, shard)

    def _add(self, shard: int, grads: list[Tensor], apply_gradients: ApplyGradients) -> None:
        """Add the gradients of a shard; for the last shard of this rank, sum over the owners.

        Raises:
            RuntimeError: the shard adds gradients twice before another shard of this rank does.
        """
        if shard in self._pending:
            self._pending.clear()
            raise RuntimeError(
                f"tensor train {self._name!r} has {self._num_shards} shards on rank "
                f"{self._ranks.rank}, and the backward of one ran twice before that of another; "
                "run backward through the whole output"
            )
        self._pending[shard] = grads, apply_gradients
        if len(self._pending) < self._num_shards:
            return
        pending, self._pending = self._pending, {}
        grads_of_shards = [pending[shard] for shard in sorted(pending)]
        # The gradients of all cores but core 0, of which each shard has its own slice.
        flat_grads = [
            torch.cat([grad.reshape(-1) for grad in grads[1:]]) for grads, _ in grads_of_shards
        ]
        grad_sums = flat_grads[0] if len(flat_grads) == 1 else torch.stack(flat_grads).sum(0)
        grad_sums = sum_over_owners(grad_sums, self._ranks, self._owners)
        sizes = [grad.numel() for grad in grads_of_shards[0][0][1:]]
        for grads, apply_to_shard in grads_of_shards:
            core_sums = zip(grad_sums.split(sizes), grads[1:], strict=True)
            apply_to_shard([grads[0], *(flat.view(grad.shape) for flat, grad in core_sums)])


def sum_over_owners(values: Tensor, ranks: RankGroup, owners: Sequence[int]) -> Tensor:
    """Return the sum of `values` over the ranks `owners`, with the same bits on all of them.

    `values` are flat, of equal length and dtype on all owners, and do not change. All owners call
    this, and no other rank; they wait for each other. With one owner the result is `values` itself.
    """
    if len(owners) == 1:
        return values
    owner_index, slice_size = owners.index(ranks.rank), -(-values.numel() // len(owners))
    bounds = [min(slice_size * i, values.numel()) for i in range(len(owners) + 1)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    # Owner k adds up slice k of the values of all owners, and sends the sums to all.
    slices = list(values.split(sizes))
    received_slices = [
        slices[owner_index] if i == owner_index else torch.empty_like(slices[owner_index])
        for i in range(len(owners))
    ]
    _exchange(ranks, owners, slices, received_slices)
    slice_sum = received_slices[0].clone()
    for received_slice in received_slices[1:]:
        slice_sum += received_slice
    total = torch.empty_like(values)
    sums_by_owner = list(total.split(sizes))
    sums_by_owner[owner_index].copy_(slice_sum)
    _exchange(ranks, owners, [slice_sum] * len(owners), sums_by_owner)
    return total


def _exchange(
    ranks: RankGroup, owners: Sequence[int], outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
) -> None:
    """Send `outgoing[i]` to `owners[i]`, and receive into `incoming[i]` from it.

    This uses point-to-point messages, because ranks that are not owners do not call it, and would
    have to take part in a collective.
    """
    operations = []
    for i, owner in enumerate(owners):
        if owner == ranks.rank:
            continue
        peer = ranks.global_rank(owner)
        for function, tensor in ((dist.isend, outgoing[i]), (dist.irecv, incoming[i])):
            if tensor.numel():
                operations.append(dist.P2POp(function, tensor, peer, ranks.group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def share_cores(
    groups: TableGroups,
    table_shards: Sequence[TableShard],
    configs: Sequence[Config],
    plan: Mapping[str, ParameterSharding],
    ranks: RankGroup,
) -> None:
    """Share the gradients of common cores among the shards of every tensor train in `groups`.

    All ranks call this with the same `configs` and `plan`.

    Args:
        groups: the tables of this rank.
        table_shards: the shards, in the order of the slices of `groups`.
        configs: configurations of all tables.
        plan: the sharding of each table, by name.
        ranks: the processes.

    Raises:
        ValueError: this rank has several shards of a table without a fused optimizer, so that each
            would get only the gradient of its own lookups.
    """
    for config_index, config in enumerate(configs):
        sharding = plan[config.name]
        if not with_storage(config, sharding.storage).storage.shares_parameters:
            continue
        owners = sorted({shard.rank for shard in sharding.shards})
        if len(sharding.shards) < 2 or ranks.rank not in owners:
            continue
        local_indices = [
            i for i, table_shard in enumerate(table_shards) if table_shard.table == config_index
        ]
        modules: list[tuple[Any, int]] = [groups.module_of(i) for i in local_indices]
        if len(local_indices) > 1 and not all(
            autograd.is_fused(module.optimizer) for module, _ in modules
        ):
            raise ValueError(
                f"rank {ranks.rank} has {len(local_indices)} shards of tensor train "
                f"{config.name!r}, whose gradients only a fused optimizer can add up: pass an "
                "optimizer, or plan at most one shard per rank"
            )
        shared_cores = SharedCores(config.name, ranks, owners, len(local_indices))
        for shard_number, (module, table) in enumerate(modules):
            module.shared_gradients[table] = shared_cores.adder_of(shard_number)
