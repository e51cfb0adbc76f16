"""Routing in plain PyTorch: ids to the ranks of their rows, and the pooled rows back.

The docstring of `emblib.ops.route` explains arguments, shapes and terms. Its ops take additional
arguments that follow from those here. A *block* is a range of a feature's rows, or a share of its
keys. A *unit* is the part of a feature that one rank looks up. `copies` are the units that get the
ids of a block. `routing` is the five tensors first_bags, features, blocks, copies and units. No
loop runs over ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import RouteBlockColumn, RouteRule
from emblib.reference.random import mix


def gather_segments(values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
    """Concatenate segments `order` of `values` `[N, ...]`.

    Segment s is `values[starts[s] : starts[s + 1]]`; `starts` is `[S + 1]`.

    Raises:
        ValueError: `total` is not the number of rows of these segments.
    """
    segments = [values[int(starts[s]) : int(starts[s + 1])] for s in order.tolist()]
    out = torch.cat([values[:0], *segments])
    if out.size(0) != total:
        raise ValueError(f"total must be the rows of all segments, {out.size(0)}, got {total}")
    return out


def blocks_of_keys(keys: Tensor, num_blocks: int) -> Tensor:
    """Apply `RouteRule.BY_KEY`: return the block in `[0, num_blocks)` of each key, int64 `[L]`."""
    return (mix(mix(keys.long())) >> 32 & (1 << 32) - 1) * num_blocks >> 32


def blocks_and_local_ids(ids: Tensor, feature: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block of each id of one feature, int64 `[L]`, and the id within that block.

    `feature` is a row of `features` (`RouteFeatureColumn`), `blocks` as in `RouteBlockColumn`. The
    ids within blocks have the dtype of `ids`. By range, -1 and every id of a table without rows go
    to the first block as -1. Other ids outside the table go unchanged to the block of row 0. With
    BY_RANGE_ELSE_SPREAD ids from `rows` on are spread over the blocks, see `emblib.ops.route`.
    """
    first_block, num_blocks, rows, rule = feature.tolist()
    if rule == RouteRule.BY_KEY:
        return first_block + blocks_of_keys(ids, num_blocks), ids
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
        bag_of_id: int64 `[n]`, bag of each id, counted from the first bag of the unit's feature.
        num_bags: number of bags of the feature.
        local_ids: `[n]` in the dtype of the batch, the ids within the unit's block.
    """

    positions: Tensor
    bag_of_id: Tensor
    num_bags: int
    local_ids: Tensor


def _unit_routes(ids: Tensor, offsets: Tensor, routing: tuple[Tensor, ...]) -> list[_UnitRoute]:
    """Return the route of every unit."""
    first_bags, features, blocks, copies, units = routing
    no_ids = ids.new_empty(0, dtype=torch.int64)
    routes = [_UnitRoute(no_ids, no_ids, 0, ids[:0])] * (units.numel() - 1)
    for f, feature in enumerate(features):
        first_block, num_blocks, _, _ = feature.tolist()
        if num_blocks == 0:
            continue
        bags = torch.arange(int(first_bags[f]), int(first_bags[f + 1]), device=ids.device)
        begin, end = (int(offsets[int(bag)]) for bag in first_bags[f : f + 2])
        bag_of_id = torch.repeat_interleave(offsets[bags + 1] - offsets[bags])
        block, local_ids = blocks_and_local_ids(ids[begin:end], feature, blocks)
        for b in range(first_block, first_block + num_blocks):
            positions = (block == b).nonzero().flatten()
            _, first_copy, num_copies = blocks[b].tolist()
            for unit in copies[first_copy : first_copy + num_copies].tolist():
                routes[unit] = _UnitRoute(
                    begin + positions, bag_of_id[positions], bags.numel(), local_ids[positions]
                )
    return routes


def route_lengths(ids: Tensor, offsets: Tensor, *routing: Tensor) -> Tensor:
    """Return the number of ids per bag, unit after unit, in the dtype of `ids`."""
    routes = _unit_routes(ids, offsets, routing)
    counts = [torch.bincount(route.bag_of_id, minlength=route.num_bags) for route in routes]
    return torch.cat([ids[:0], *counts]).to(ids.dtype)


def route_ids(
    ids: Tensor, offsets: Tensor, *routing: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids of all units, unit after unit, their positions in `ids` and their weights.

    Each is `[total]`; the weights are None if `weights` `[L]` is None.
    """
    routes = _unit_routes(ids, offsets, routing)
    positions = torch.cat(
        [ids.new_empty(0, dtype=torch.int64), *(route.positions for route in routes)]
    )
    local_ids = torch.cat([ids[:0], *(route.local_ids for route in routes)])
    return local_ids, positions, None if weights is None else weights[positions]


def _matrix_in(flat: Tensor, offset: int, stride: int, num_rows: int, width: int) -> Tensor:
    """View elements of a flat tensor as a matrix `[num_rows, width]`.

    Row i begins at element `offset + i * stride`.
    """
    return flat.as_strided((num_rows, width), (stride, 1), flat.storage_offset() + offset)


def _divisors(lengths: Tensor | None, first_bag: int, num_rows: int) -> Tensor | float:
    """Return the divisors of the rows of a target: 1.0 for sums.

    For means they are the lengths of the bags from `first_bag` on, at least 1, `[num_rows, 1]`.
    """
    if first_bag < 0 or lengths is None:
        return 1.0
    return lengths[first_bag : first_bag + num_rows].clamp(min=1).float().unsqueeze(1)


def _match_rows(row_map: Tensor | None, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a target to which a piece adds, and the row of the piece for each.

    The target has `num_rows` rows. Its row i gets row `row_map[first_row + i]` of the piece, none
    if that is -1. Without `row_map`, or if `first_row` is -1, it gets row i.
    """
    if first_row < 0 or row_map is None:
        all_rows = torch.arange(num_rows, device="cpu")
        return all_rows, all_rows
    piece_rows = row_map[first_row : first_row + num_rows].long()
    return (piece_rows >= 0).nonzero().view(-1), piece_rows[piece_rows >= 0]


def _min_num_rows(rows: Tensor) -> int:
    """Return the smallest number of rows of a matrix that has all of `rows`."""
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
    """Sum the pieces of every target in float32; divide means by the lengths of their bags.

    Elements of the output without a target are 0.

    Args:
        source: flat, the elements of all pieces except those in `local`.
        targets: int64 `[T, 7]`, see `TargetColumn`.
        pieces: int64 `[P, 3]`, see `PieceColumn`.
        lengths: lengths of bags, by which means are divided; None divides nothing.
        out_numel: number of elements of the output.
        dtype: dtype of the output.
        rows: int32: row i of a target adds row `rows[first_row + i]` of a piece, none if that is
            -1. None adds row i to row i, as a `first_row` of -1 does.
        scale: factor of all sums.
        local: flat, the elements of the whole source from `local_begin` on, which `source` does not
            have; None if `source` has all elements.
        local_begin: position of `local` in the whole source.

    Returns:
        Flat `[out_numel]`.
    """
    if local is not None:
        source = torch.cat([source[:local_begin], local, source[local_begin:]])
    out = source.new_zeros(out_numel, dtype=dtype)
    for offset, stride, num_rows, width, first_piece, end_piece, first_bag in targets.tolist():
        total = source.new_zeros((num_rows, width), dtype=torch.float32)
        for piece_offset, piece_stride, first_row in pieces[first_piece:end_piece].tolist():
            target_rows, piece_rows = _match_rows(rows, first_row, num_rows)
            num_piece_rows = _min_num_rows(piece_rows)
            piece = _matrix_in(source, piece_offset, piece_stride, num_piece_rows, width)
            total[target_rows] += piece[piece_rows].float()
        total /= _divisors(lengths, first_bag, num_rows)
        _matrix_in(out, offset, stride, num_rows, width).copy_(total * scale)
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

    `grad` is the gradient of the output of `combine`, `source_numel` the number of elements of the
    whole source; other arguments are those of `combine`. Returns the gradient of the source, flat
    in `dtype`, 0 where no piece is. With `local`, the gradient of these elements is written to
    `local`, and the result has only the other elements. Pieces must not overlap, and `rows` must
    not name a row of a piece twice, whose gradients would not be added up; neither is checked.
    """
    out = grad.new_zeros(source_numel, dtype=dtype)
    for offset, stride, num_rows, width, first_piece, end_piece, first_bag in targets.tolist():
        target_grad = _matrix_in(grad, offset, stride, num_rows, width).float()
        row_grads = target_grad / _divisors(lengths, first_bag, num_rows) * scale
        for piece_offset, piece_stride, first_row in pieces[first_piece:end_piece].tolist():
            target_rows, piece_rows = _match_rows(rows, first_row, num_rows)
            num_piece_rows = _min_num_rows(piece_rows)
            piece = _matrix_in(out, piece_offset, piece_stride, num_piece_rows, width)
            piece[piece_rows] = row_grads[target_rows].to(dtype)
    if local is None:
        return out
    local_end = local_begin + local.numel()
    local.copy_(out[local_begin:local_end])
    return torch.cat([out[:local_begin], out[local_end:]])
