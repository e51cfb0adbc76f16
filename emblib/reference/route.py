"""Routing in plain PyTorch: ids to the ranks of their rows, and the pooled rows back.

The arguments have the names of `emblib.ops.route`, whose docstring gives shapes and terms; ops take
some more, which follow from these. A *block* is a range of a feature's rows, or a share of its
keys; a *unit* is the part of a feature that one rank looks up; `copies` are the units that get the
ids of a block. `routing` is the five tensors first_bags, features, blocks, copies and units. No
loop runs over ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import RouteBlockColumn, RouteRule
from emblib.reference.random import mix


def gather_segments(values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
    """Concatenate segments `order` of `values` `[N, ...]`; segment s is from row `starts[s]` on.

    `starts` is `[S + 1]`.

    Raises:
        ValueError: `total` is not the number of rows of these segments.
    """
    segments = [values[int(starts[s]) : int(starts[s + 1])] for s in order.tolist()]
    out = torch.cat([values[:0], *segments])
    if out.size(0) != total:
        raise ValueError(f"total must be the rows of all segments, {out.size(0)}, got {total}")
    return out


def owners(keys: Tensor, num_blocks: int) -> Tensor:
    """Apply `RouteRule.BY_KEY`: return the block in `[0, num_blocks)` of each key, int64 `[L]`."""
    return (mix(mix(keys.long())) >> 32 & (1 << 32) - 1) * num_blocks >> 32


def blocks_and_local_ids(ids: Tensor, feature: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block of each id of one feature, int64 `[L]`, and the id within that block.

    `feature` is a row of `features` (`RouteFeatureColumn`), `blocks` as in `RouteBlockColumn`. The
    ids within blocks have the dtype of `ids`. By range, -1 goes to the first block as -1, as does
    every id of a table without rows; other ids outside the table go unchanged to the block of row
    0, but BY_RANGE_ELSE_SPREAD spreads those from `rows` on, see `emblib.ops.route`.
    """
    first_block, num_blocks, rows, rule = feature.tolist()
    if rule == RouteRule.BY_KEY:
        return first_block + owners(ids, num_blocks), ids
    dtype, ids = ids.dtype, ids.long()  # torch wraps `rows` when it compares it with int32 ids
    is_skipped = ids == -1 if rows else torch.ones_like(ids, dtype=torch.bool)
    row = torch.where((ids >= 0) & (ids < rows), ids, 0)
    first_rows = blocks[
        first_block : first_block + num_blocks, RouteBlockColumn.FIRST_ROW
    ].contiguous()
    block = torch.searchsorted(first_rows, row, right=True) - 1
    local = torch.where(ids == row, row - first_rows[block], ids)
    block, local = torch.where(is_skipped, 0, block), torch.where(is_skipped, -1, local)
    if rule == RouteRule.BY_RANGE_ELSE_SPREAD:
        is_beyond = ids >= rows
        block = torch.where(is_beyond, ids % num_blocks, block)
        local = torch.where(is_beyond, ids // num_blocks, local)
    return first_block + block, local.to(dtype)


class _UnitRoute(NamedTuple):
    """The ids that one unit looks up, in the order of its bags.

    Attributes:
        positions: int64 `[n]`, positions of the ids in the batch.
        bag: int64 `[n]`, number of each id's bag among `bags`.
        bags: int64, numbers in the batch of the bags of the unit's feature.
        local_ids: `[n]` in the dtype of the batch, the ids within the unit's block.
    """

    positions: Tensor
    bag: Tensor
    bags: Tensor
    local_ids: Tensor


def _routes(ids: Tensor, offsets: Tensor, routing: tuple[Tensor, ...]) -> list[_UnitRoute]:
    """Return the route of every unit."""
    first_bags, features, blocks, copies, units = routing
    none = ids.new_empty(0, dtype=torch.int64)
    routes = [_UnitRoute(none, none, none, ids[:0])] * (units.numel() - 1)
    for f, feature in enumerate(features):
        first_block, num_blocks, _, _ = feature.tolist()
        if num_blocks == 0:
            continue
        bags = torch.arange(int(first_bags[f]), int(first_bags[f + 1]), device=ids.device)
        begin, end = (int(offsets[int(bag)]) for bag in first_bags[f : f + 2])
        bag = torch.repeat_interleave(offsets[bags + 1] - offsets[bags])
        block, local = blocks_and_local_ids(ids[begin:end], feature, blocks)
        for b in range(first_block, first_block + num_blocks):
            selected = (block == b).nonzero().flatten()
            _, first_copy, num_copies = blocks[b].tolist()
            for unit in copies[first_copy : first_copy + num_copies].tolist():
                routes[unit] = _UnitRoute(begin + selected, bag[selected], bags, local[selected])
    return routes


def route_lengths(ids: Tensor, offsets: Tensor, *routing: Tensor) -> Tensor:
    """Return the number of ids per bag, unit after unit, in the dtype of `ids`."""
    routes = _routes(ids, offsets, routing)
    counts = [torch.bincount(route.bag, minlength=route.bags.numel()) for route in routes]
    return torch.cat([ids[:0], *counts]).to(ids.dtype)


def route_ids(
    ids: Tensor, offsets: Tensor, *routing: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids of all units, unit after unit, their positions in `ids` and their weights.

    Each is `[total]`; the weights are None if `weights` `[L]` is None.
    """
    routes = _routes(ids, offsets, routing)
    positions = torch.cat(
        [ids.new_empty(0, dtype=torch.int64), *(route.positions for route in routes)]
    )
    routed = torch.cat([ids[:0], *(route.local_ids for route in routes)])
    return routed, positions, None if weights is None else weights[positions]


def _rows(flat: Tensor, offset: int, stride: int, rows: int, width: int) -> Tensor:
    """View `[rows, width]` in a flat tensor, from element `offset` on, rows `stride` apart."""
    return flat.as_strided((rows, width), (stride, 1), flat.storage_offset() + offset)


def _divisors(lengths: Tensor | None, first_bag: int, rows: int) -> Tensor | float:
    """Return what rows of a target are divided by: lengths of bags, at least 1, or 1.0 for sums.

    The lengths are `[rows, 1]`.
    """
    if first_bag < 0 or lengths is None:
        return 1.0
    return lengths[first_bag : first_bag + rows].clamp(min=1).float().unsqueeze(1)


def _rows_of_piece(rows: Tensor | None, first_row: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which of `count` rows of a target a piece has, and the piece's row for each.

    Without `rows`, or with `first_row` -1, row i of the piece is for row i of the target.
    """
    all_positions = torch.arange(count)
    if first_row < 0 or rows is None:
        return all_positions, all_positions
    named_rows = rows[first_row : first_row + count].long()
    return (named_rows >= 0).nonzero().view(-1), named_rows[named_rows >= 0]


def _num_rows(rows: Tensor) -> int:
    """Return the number of rows that a piece needs to have all of `rows`."""
    return int(rows.max()) + 1 if rows.numel() else 0


def combine(
    source: Tensor,
    targets: Tensor,
    pieces: Tensor,
    lengths: Tensor | None,
    out_numel: int,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    scale: float = 1.0,
    *,
    local: Tensor | None = None,
    local_begin: int = 0,
) -> Tensor:
    """Sum the pieces of every target in float32; means are divided by the lengths of bags.

    Elements of the output without a target are 0.

    Args:
        source: flat, all pieces, except for pieces in `local` if there is one.
        targets: int64 `[T, 7]`, see `TargetColumn`.
        pieces: int64 `[P, 3]`, see `PieceColumn`.
        lengths: lengths of bags, by which means are divided; None divides nothing.
        out_numel: number of elements of the output.
        dtype: dtype of the output.
        rows: int32, from `first_row` of a piece on: the row of the piece that each row of the
            target adds, -1 for none. None adds row i to row i.
        scale: factor of all sums.
        local: flat, the elements of the source from `local_begin` on.
        local_begin: position of `local` in the whole source.

    Returns:
        Flat `[out_numel]`.
    """
    if local is not None:
        source = torch.cat([source[:local_begin], local, source[local_begin:]])
    out = source.new_zeros(out_numel, dtype=dtype)
    for offset, stride, count, width, first_piece, end_piece, first_bag in targets.tolist():
        total = source.new_zeros((count, width), dtype=torch.float32)
        for piece, piece_stride, first_row in pieces[first_piece:end_piece].tolist():
            target_rows, piece_rows = _rows_of_piece(rows, first_row, count)
            values = _rows(source, piece, piece_stride, _num_rows(piece_rows), width)
            total[target_rows] += values[piece_rows].float()
        total /= _divisors(lengths, first_bag, count)
        _rows(out, offset, stride, count, width).copy_(total * scale)
    return out


def combine_backward(
    grad: Tensor,
    targets: Tensor,
    pieces: Tensor,
    lengths: Tensor | None,
    source_numel: int,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    scale: float = 1.0,
    *,
    local: Tensor | None = None,
    local_begin: int = 0,
) -> Tensor:
    """Apply the adjoint of `combine`: copy each target's gradient, divided and scaled, to pieces.

    `grad` is the gradient of the output of `combine`, `source_numel` the size of the whole source;
    other arguments are those of `combine`. Returns the gradient of the source, flat in `dtype`, 0
    where no piece is. With `local`, its part is written there and missing in the result. Pieces
    must not overlap; not checked.
    """
    out = grad.new_zeros(source_numel, dtype=dtype)
    for offset, stride, count, width, first_piece, end_piece, first_bag in targets.tolist():
        target_grad = _rows(grad, offset, stride, count, width).float()
        piece_grad = target_grad / _divisors(lengths, first_bag, count) * scale
        for piece, piece_stride, first_row in pieces[first_piece:end_piece].tolist():
            target_rows, piece_rows = _rows_of_piece(rows, first_row, count)
            values = _rows(out, piece, piece_stride, _num_rows(piece_rows), width)
            values[piece_rows] = piece_grad[target_rows].to(dtype)
    if local is None:
        return out
    local_end = local_begin + local.numel()
    local.copy_(out[local_begin:local_end])
    return torch.cat([out[:local_begin], out[local_end:]])
