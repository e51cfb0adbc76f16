"""Spreading flat tables over memory tiers and a cache, at random, for tests of the ops."""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.reference import tbe


class Spread(NamedTuple):
    """The same rows in other places: `weights` by tier, and the `slots` of one batch."""

    weights: list[Tensor]
    features: Tensor
    slots: Tensor


def _rows_looked_up(
    features: Tensor, indices: Tensor, offsets: Tensor, bag_layout: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The feature of each lookup and its row in the table, -1 for none."""
    offsets = tbe.repair_offsets(offsets, indices.numel())
    bag = tbe.bag_of_lookup(offsets, indices.numel())
    if features.size(0) == 0 or offsets.numel() < 2:
        return torch.zeros_like(bag), torch.full_like(bag, -1)
    feature = tbe.feature_of_bag(features, offsets, bag_layout)[bag.clamp(min=0)]
    index, rows = indices.long(), features[feature, 2]
    row = torch.where((index >= 0) & (index < rows) | (index == -1), index, 0)
    return feature, torch.where((bag >= 0) & (rows > 0), row, -1)


def spread(
    weights: Tensor,
    features: Tensor,
    batch: tuple[Tensor, Tensor, Tensor | None],
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Spread:
    """Put each table in a tier, some behind a cache, and some rows of `batch` into that cache.

    `batch` is indices, offsets and bag layout. A row that the cache holds is NaN in its table, so
    that whoever reads it there is found out; a lookup of any other row may name a slot that is
    none, and one of a table without a cache any slot at all.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (1,), generator=generator)

    tables = sorted({tuple(line[:4]) for line in features.tolist()})
    parts: list[list[Tensor]] = [[weights[:0]] for _ in range(3)]
    moved: dict[int, list[int]] = {}
    stride = -(-max((t[3] for t in tables), default=1) // 4) * 4 + 4 * int(draw(0, 2))
    for offset, row_base, rows, dim in tables:
        tier, cached = int(draw(0, 3)), int(draw(0, 4)) > 0
        before, rows_before = sum(p.numel() for p in parts[tier]), int(draw(0, 9))
        parts[tier].append(weights[offset : offset + rows * dim])
        moved[row_base] = [before, tier, rows_before, stride if cached else 0]
    tiers = [torch.cat(part) for part in parts]
    new = torch.tensor(
        [
            (moved[base][0], base, rows, dim, column, *moved[base][1:])
            for _, base, rows, dim, column, *_ in features.tolist()
        ],
        dtype=torch.int64,
    ).view(-1, 8)

    feature, row = _rows_looked_up(new, *batch)
    num_slots = int(draw(1, 40))
    cache = torch.full((num_slots * stride + int(draw(0, stride)),), torch.nan)
    cache = cache.to(weights.dtype if cache_dtype is None else cache_dtype)
    slots = draw(-9, 0, row.numel())
    slots[draw(0, 2, row.numel()) == 0] = num_slots + 3
    slots[row < 0] = 0
    if new.size(0):
        slots = torch.where(new[feature, 7] == 0, draw(-1, num_slots, row.numel()), slots)
        can = ((new[feature, 7] > 0) & (row >= 0)).nonzero().squeeze(1)
        keys = torch.stack([new[feature, 1] + row, new[feature, 3]], 1)[can]
        held, inverse = keys[:, 0].unique(return_inverse=True)
        of_row = torch.full(held.shape, -1)
        chosen = torch.randperm(held.numel(), generator=generator)[:num_slots]
        of_row[chosen] = torch.randperm(num_slots, generator=generator)[: chosen.numel()]
        slots[can] = torch.where(of_row[inverse] >= 0, of_row[inverse], slots[can])
        for lookup in can[of_row[inverse] >= 0].tolist():
            offset, _, _, dim, _, tier, _, _ = new[feature[lookup]].tolist()
            at, slot = offset + int(row[lookup]) * dim, int(slots[lookup])
            here = tiers[tier][at : at + dim]
            if not bool(here.isnan().all()):
                cache[slot * stride : slot * stride + dim] = here
                here.fill_(torch.nan)
    return Spread([*tiers, cache], new.to(features.device), slots.int())
