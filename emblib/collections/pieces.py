"""The part of a batch that each kernel looks up, and its output as a place has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.collections.configs import Kind
from emblib.specs import Pooling
from emblib.tables import TTEmbeddingBag


@dataclass(frozen=True)
class GroupInfo:
    """One kernel: the units that it looks up, in its order, and its module."""

    units: tuple[int, ...]
    slices: tuple[int, ...]
    module: Any
    kind: Kind


class Piece(NamedTuple):
    """What one group looks up of a batch: ids `[first, last)` of it, and their offsets."""

    info: GroupInfo
    first: int
    last: int
    ids: Tensor
    offsets: Tensor
    batch_sizes: Sequence[Sequence[int]] | None


def split(
    groups: Sequence[GroupInfo],
    ids: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
    id_counts: Sequence[int] | None,
) -> list[Piece]:
    """The part of a batch that each group with units looks up."""
    if len(groups) == 1:
        whole = Piece(groups[0], 0, ids.numel(), ids, offsets, batch_sizes)
        return [whole]
    ends = _bag_ends(groups, offsets, batch_sizes)
    if id_counts is None:
        splits = [int(offsets[end]) for end in ends] if ids.is_cpu else offsets[ends].tolist()
    else:
        splits = [0, *accumulate(id_counts)]
    pieces, unit = [], 0
    for g, info in enumerate(groups):
        first, last = splits[g], splits[g + 1]
        own = offsets[ends[g] : ends[g + 1] + 1]
        sizes = None
        if batch_sizes is not None:
            sizes = batch_sizes[unit : unit + len(info.units)]
            unit += len(info.units)
        own = own - first if first else own
        pieces.append(Piece(info, first, last, ids[first:last], own, sizes))
    return pieces


def _bag_ends(
    groups: Sequence[GroupInfo], offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
) -> list[int]:
    """The first bag of each group, and the number of bags."""
    units = [0, *accumulate(len(info.units) for info in groups)]
    if batch_sizes is None:
        batch = (offsets.numel() - 1) // max(units[-1], 1)
        return [batch * unit for unit in units]
    bags = [0, *accumulate(sum(sizes) for sizes in batch_sizes)]
    return [bags[unit] for unit in units]


def look_up(piece: Piece, weights: Tensor | None, pooling: Pooling) -> Tensor:
    """The output of one group for its piece."""
    info, ids, offsets, sizes = piece.info, piece.ids, piece.offsets, piece.batch_sizes
    if not isinstance(info.module, TTEmbeddingBag):
        out: Tensor = info.module(ids, offsets, weights, batch_sizes=sizes)
        return out
    out = info.module(ids, offsets, weights)
    if pooling is Pooling.NONE:
        return out
    units, dim = len(info.units), out.shape[1]
    if sizes is None:
        return out.view(units, -1, dim).transpose(0, 1).reshape(-1, units * dim)
    if units == 1:
        return out.view(-1)
    blocks, ranks = out.split([size for of_unit in sizes for size in of_unit]), len(sizes[0])
    by_rank = [blocks[u * ranks + r] for r in range(ranks) for u in range(units)]
    return torch.cat(by_rank).view(-1)


def by_rank(
    groups: Sequence[GroupInfo],
    dims: Sequence[int],
    outs: Sequence[Tensor],
    batch_sizes: Sequence[Sequence[int]],
) -> Tensor:
    """Outputs of variable batches, each rank after rank, as one that is rank after rank."""
    pieces, unit = [], 0
    for info, out in zip(groups, outs, strict=True):
        sizes = batch_sizes[unit : unit + len(info.units)]
        unit += len(info.units)
        widths = [dims[u] for u in info.units]
        by_rank = zip(*sizes, strict=True)
        lengths = [sum(n * d for n, d in zip(of_rank, widths, strict=True)) for of_rank in by_rank]
        pieces.append(out.split(lengths))
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def is_cached(module: Any) -> bool:
    """Whether tables of a module stand behind a cache."""
    return getattr(module, "row_cache", None) is not None


def needs_work(info: GroupInfo) -> bool:
    """Whether a lookup is more than a call of the module: a tensor train knows one feature."""
    return isinstance(info.module, TTEmbeddingBag)
