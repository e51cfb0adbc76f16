"""Weights and optimizer state of a collection go into the parts that ranks hold of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.collections.configs import Dynamic, TensorTrain
from emblib.collections.groups import TableGroups
from emblib.collections.kernels import fresh_seeds
from emblib.collections.slices import TableSlice
from emblib.dynamic.saving.routing import owner
from emblib.sharding.groups_of_ranks import Ranks, invoke_on_rank_and_broadcast_result


def common_seeds(
    slices: Iterable[TableSlice], source: TableGroups, ranks: Ranks
) -> Mapping[str, int]:
    """Return a seed for each table, the same on all ranks: of first values, and of hashes.

    Those of dynamic tables are the ones of `source` on rank 0, so that their keys go on being
    hashed as they were.
    """
    parts = list(slices)

    def seeds() -> dict[str, int]:
        dynamic = [p.config.name for p in parts if isinstance(p.config.kind, Dynamic)]
        return fresh_seeds(parts) | {name: source.seeds[name] for name in dynamic}

    return invoke_on_rank_and_broadcast_result(ranks, 0, seeds)


@torch.no_grad()
def fill(groups: TableGroups, source: TableGroups, blocks: Mapping[str, tuple[int, int]]) -> None:
    """Write what `source`, which has whole tables, has into the parts that `groups` has of them.

    A table that is kept as another kind than in the source starts anew. Of a dynamic table a part
    takes the keys of its block: `blocks` says for each table which of how many it is.
    """
    if source.device.type == "meta":
        return
    whole = {part.config.name: i for i, part in enumerate(source.slices)}
    views = source.all_views()
    own = groups.all_views()
    for i, part in enumerate(groups.slices):
        name = part.config.name
        from_module, from_table = source.module_of(whole[name])
        to_module, to_table = groups.module_of(i)
        kind = source.slices[whole[name]].config.kind
        if isinstance(kind, Dynamic):
            _fill_dynamic(from_module, from_table, to_module, to_table, blocks[name])
        elif isinstance(kind, TensorTrain) == isinstance(part.config.kind, TensorTrain):
            _fill_views(part, views[whole[name]], own[i])
        trained = hasattr(to_module, "hyper") and hasattr(from_module, "hyper")
        if trained and to_module.optimizer == from_module.optimizer:
            to_module.hyper.copy_(from_module.hyper)


def _fill_views(part: TableSlice, source: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if isinstance(part.config.kind, TensorTrain):
        for stem in {name.rsplit(".", 1)[0] for name in own.keys() & source.keys()}:
            names = sorted(name for name in own if name.rsplit(".", 1)[0] == stem)
            values = part.cores_of([source[name] for name in names])
            for name, value in zip(names, values, strict=True):
                own[name].copy_(value)
        return
    for name in own.keys() & source.keys():
        own[name].copy_(part.part_of(source[name]))


def _fill_dynamic(
    source: Any, source_table: int, module: Any, table: int, block: tuple[int, int]
) -> None:
    number, count = block
    entries = source.table_entries(source_table)
    mine = (owner(entries.keys, count) == number).nonzero().view(-1)
    module.set_table_entries(table, entries.take(mine))
    module.index.set_tick(source.index.tick)


@torch.no_grad()
def equalise(groups: TableGroups, ranks: Ranks) -> None:
    """Copies of tables become what rank 0 has."""
    if ranks.size == 1:
        return
    tensors = [view for views in groups.all_views() for view in views.values()]
    hypers = [info.module.hyper for info in groups.groups if hasattr(info.module, "hyper")]
    for tensor in (*tensors, *hypers):
        sent = tensor.contiguous()
        dist.broadcast(sent, ranks.global_rank(0), group=ranks.group)
        if sent is not tensor:
            tensor.copy_(sent)
