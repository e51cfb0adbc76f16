"""The emulated routing kernels behind the names and arguments of `torch.ops.emblib`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.simt.emulated import DTYPES
from tests.simt.library import Word, library

SCAN_TILE = 256


def _indices(tensor: Tensor) -> tuple[Word, ...]:
    return tensor, tensor.dtype == torch.int64


def _route(
    ids: Tensor, offsets: Tensor, routing: Sequence[Tensor], out: Tensor, num_bags: int
) -> tuple[Word, ...]:
    _, features, blocks, copies, units = routing
    return (
        *(*_indices(ids), *_indices(offsets), ids.numel(), offsets.numel() - 1, *routing),
        *(len(features), len(blocks), copies.numel(), units.numel() - 1, out, num_bags),
    )


def route_lengths(ids: Tensor, offsets: Tensor, *routing: Tensor, num_bags: int) -> Tensor:
    """Emulated `route_lengths`."""
    out = torch.zeros(num_bags, dtype=ids.dtype)
    library().call("route_lengths", *_route(ids, offsets, routing, out, num_bags))
    return out


def route_ids(
    ids: Tensor,
    offsets: Tensor,
    *routing: Tensor,
    starts: Tensor,
    total: int,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emulated `route_ids`."""
    out = torch.full((total,), -77, dtype=ids.dtype)
    positions = torch.full((total,), -77)
    carried = torch.full((0 if weights is None else total,), torch.nan)
    used = torch.zeros(starts.numel() - 1, dtype=torch.int32)
    words = _route(ids, offsets, routing, out, used.numel())
    outputs = (positions, weights, carried, used)
    library().call("route_ids", *words, *_indices(starts), total, *outputs)
    return out, positions, carried


def gather_segments(values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
    """Emulated `gather_segments`."""
    out = torch.full((total, *values.shape[1:]), 77, dtype=values.dtype)
    row_nbytes = values.element_size()
    for size in values.shape[1:]:
        row_nbytes *= size
    count = order.numel()
    sums = torch.full((count,), -77)
    tiles = torch.full((-(-count // SCAN_TILE) + 1,), -77)
    sizes = (starts.numel() - 1, count, values.size(0))
    words: tuple[Word, ...] = (*_indices(starts), order, *sizes, sums, tiles)
    library().call("gather_segments", *words, values, out, total, row_nbytes)
    return out


def _combine(
    flat: Tensor,
    layout: tuple[Any, ...],
    out: Tensor,
    local: tuple[Tensor | None, int],
    *,
    forward: bool,
) -> Tensor:
    targets, pieces, lengths, rows, scale = layout
    source, output = (flat, out) if forward else (out, flat)
    words: tuple[Word, ...] = (forward, targets, pieces, len(targets), len(pieces))
    counts: tuple[Word, ...] = (None, 0, 0)
    if lengths is not None:
        counts = (*_indices(lengths), lengths.numel())
    found = (rows, 0 if rows is None else rows.numel(), round(scale * 1024))
    ends = (flat, DTYPES[flat.dtype], out, DTYPES[out.dtype])
    tensor, begin = local
    size = 0 if tensor is None else tensor.numel()
    part = (tensor, begin, begin + size, source.numel() + size, output.numel())
    library().call("combine", *words, *counts, *found, *ends, *part)
    return out


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
    """Emulated `combine`, for scales that are whole 1024ths."""
    out = torch.full((out_numel,), torch.nan, dtype=dtype)
    layout = targets, pieces, lengths, rows, scale
    return _combine(source, layout, out, (local, local_begin), forward=True)


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
    """Emulated `combine_backward`, for scales that are whole 1024ths."""
    size = 0
    if local is not None:
        local.zero_()
        size = local.numel()
    out = torch.zeros(source_numel - size, dtype=dtype)
    layout = targets, pieces, lengths, rows, scale
    return _combine(grad, layout, out, (local, local_begin), forward=False)
