"""Routing: send ids to the ranks that store their rows, and combine the pooled rows they return.

A *unit* is the part of a feature that one rank looks up: the ids of all its bags that fall into the
rank's block of the table. Five int64 tensors on the device of the ids describe the routing, with F
features, K blocks, U units, L ids, and bags delimited by `offsets`:

- `first_bags` `[F + 1]`: feature f has the bags `[first_bags[f], first_bags[f + 1])`
- `features` `[F, 4]`, see `RouteFeatureColumn`. The ids of a feature without blocks are dropped
- `blocks` `[K, 3]`, see `RouteBlockColumn`. By range, an id goes to the last block of its feature
  that begins at or before it; the first block begins at row 0. The rank receives `id - first_row`.
  An id outside `[0, rows)` goes unchanged to the rank with row 0, whose lookup repairs and reports
  it like any invalid id. -1, and every id of a table without rows, goes to the first block as -1.
  BY_RANGE_ELSE_SPREAD is the same, except that an id from `rows` on goes to block `id % num_blocks`
  of its feature, as `id // num_blocks`. With BY_KEY a key goes unchanged to the block that
  `emblib.dynamic.keys.owner` returns
- `copies` `[C]`: the units that receive the ids of each block; each unit occurs once
- `units` `[U + 1]`: the first bag of each unit in the output; a unit has as many bags as its
  feature, in the same order

`route_lengths` returns the number of ids per bag of each unit, `[units[U]]` in the dtype of `ids`.
`route_ids` takes the running sums of these numbers, `starts` `[units[U] + 1]`, and the last sum,
`total`. It returns `(out_ids [total], positions int64 [total], out_weights)`: output i is
`ids[positions[i]]`, numbered within its block. The ids of a bag keep their order.

`combine` computes a flat output that consists of *targets*, int64 `[T, 7]`, see `TargetColumn`. A
target is the sum, in float32 and in order, of its *pieces*, int64 `[P, 3]`, see `PieceColumn`,
which are matrices in the flat `source`. If `first_row` of a piece is not negative, row i of the
target adds row `rows[first_row + i]` (int32) of the piece, none if that is -1; otherwise row i. The
sum is multiplied by `scale`. If `first_bag` of the target is not negative, row i is divided by
`max(lengths[first_bag + i], 1)`. Targets must cover the output without overlap; pieces must not
overlap, nor, for `combine_backward`, may `rows` name a row of a piece twice (not checked).
`combine_backward` is the adjoint: pieces receive the gradient of their target, and
elements of the source in no piece receive 0. `source` and `dtype` are float32, float16 or bfloat16.

Part of the source may be in a tensor of its own: with `local`, flat, elements `[local_begin,
local_begin + local.numel())` of the source are in `local`, and `source` has the others. A piece
lies completely in one of the two. `combine_backward_` writes `local` and returns the others.

`gather_segments(values [N, ...], starts [S + 1], order [M], total)` concatenates the segments
`values[starts[s]:starts[s + 1]]` for s in `order`, `total` rows in all; `values` has any dtype and
at most 4 dimensions.

On the CPU, wrong contents of routing, targets and pieces raise RuntimeError before anything is
written. A GPU does not check them, since the host would wait, but touches nothing outside the
tensors. Results depend on neither the number of threads nor the device, but for the sign of a zero
and the bits of a NaN, which the CPU copies where a target has one piece. The definition is
`emblib.reference.route`. The columns are defined in `emblib.columns`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import RouteRule as RouteRule
from emblib.ops.derivatives import once_differentiable, refuse_tangents, refuse_transforms

_ops = torch.ops.emblib


class Routing(NamedTuple):
    """Routing of ids to ranks, for one layout of units and one set of batch sizes.

    Attributes:
        first_bags: int64 `[F + 1]`, first bag of each feature, then the number of bags.
        features, blocks: int64 tensors of rows, see the module docstring.
        copies, units: int64 `[C]` and `[U + 1]`, see the module docstring.
    """

    first_bags: Tensor
    features: Tensor
    blocks: Tensor
    copies: Tensor
    units: Tensor


class TargetRow(NamedTuple):
    """A row of the `targets` of `combine`; the fields are those of `TargetColumn`."""

    offset: int
    stride: int
    num_rows: int
    width: int
    first_piece: int
    end_piece: int
    first_bag: int = -1


class PieceRow(NamedTuple):
    """A row of the `pieces` of `combine`; the fields are those of `PieceColumn`."""

    offset: int
    stride: int
    first_row: int = -1


def gather_segments(values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
    """Concatenate segments `order` of `values`, see the module docstring, to `[total, ...]`.

    Differentiable in `values`: gradients of a segment that `order` repeats are added up.
    """
    refuse_tangents("values", values)
    if values.requires_grad and torch.is_grad_enabled():
        refuse_transforms("values", values)
        return _GatherSegments.apply(values, starts, order, total)
    return _ops.gather_segments(values, starts, order, total)


def segments_at_end(starts: Tensor, order: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sources of a concatenation of segments `order` that ends at position `total`.

    Unlike `gather_segments` it needs no exact number of rows on the host, so a CUDA graph can
    capture it for segments of any lengths whose sum is at most `total`.

    Args:
        starts: `[S + 1]`, segment s is `[starts[s], starts[s + 1])`.
        order: int64 `[N]`, segments in their new order; at least one unless `total` is 0.
        total: positions to fill.

    Returns:
        int64 `[total]`, the source of each position, -1 for padding; and `[N]`, the position at
        which each segment begins.
    """
    lengths = starts.diff().index_select(0, order)
    begins = total - lengths.flip(0).cumsum(0).flip(0)
    positions = torch.arange(total, device=starts.device)
    segment = torch.searchsorted(begins, positions, right=True) - 1
    segment_or_first = segment.clamp(min=0)
    sources = positions - begins[segment_or_first] + starts.index_select(0, order)[segment_or_first]
    return torch.where(segment >= 0, sources, -1), begins


def take_or_fill(values: Tensor, sources: Tensor, fill: int) -> Tensor:
    """Return `values` at `sources`, and `fill` where a source is -1.

    `values` is `[N, ...]`, `sources` int64 `[M]`; N is 0 only if M is. The result is `[M, ...]` of
    the dtype of `values`.
    """
    selected = values.index_select(0, sources.clamp(min=0))
    has_source = (sources >= 0).view(-1, *[1] * (values.dim() - 1))
    return torch.where(has_source, selected, fill)


def is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph captures the current stream, and `tensor` is on a GPU.

    The host cannot read the tensor then.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def route_lengths(
    ids: Tensor, offsets: Tensor, *routing: Tensor, num_bags: int | None = None
) -> Tensor:
    """Return the number of ids per bag, unit after unit, `[units[U]]` in the dtype of `ids`.

    Args:
        ids: int32 or int64 `[L]`.
        offsets: `[bags + 1]`, the bags of all features.
        routing: fields of `Routing`.
        num_bags: `units[U]`; None reads it from the device.
    """
    if num_bags is None:
        num_bags = int(Routing(*routing).units[-1])
    return _ops.route_lengths(ids, offsets, *routing, num_bags)


def route_ids(
    ids: Tensor,
    offsets: Tensor,
    *routing: Tensor,
    starts: Tensor,
    total: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Route ids to units; return the ids, their positions in `ids`, and their `weights`, if any.

    Args:
        ids: int32 or int64 `[L]`.
        offsets: `[bags + 1]`, the bags of all features.
        routing: fields of `Routing`.
        starts: `[units[U] + 1]`, running sums of `route_lengths`, from 0 on.
        total: the last element of `starts`.
        weights: float32 `[L]`; the weights of the routed ids are differentiable in them.
    """
    if weights is None:
        routed, positions, _ = _ops.route_ids(ids, offsets, *routing, starts, total, None)
        return routed, positions, None
    refuse_tangents("weights", weights)
    if weights.requires_grad and torch.is_grad_enabled():
        return _RouteWeighted.apply(weights, ids, offsets, routing, starts, total)
    return _ops.route_ids(ids, offsets, *routing, starts, total, weights)


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
    """Sum or average pieces of `source` to `[out_numel]`.

    Differentiable any number of times without `local`. The module docstring explains the arguments.

    Raises:
        RuntimeError: on the CPU, the description is wrong; or autograd records the call, and
            `local` is not None.
    """
    refuse_tangents("pooled rows", source, local)
    needs_grad = source.requires_grad or (local is not None and local.requires_grad)
    if needs_grad and torch.is_grad_enabled():
        if local is not None:
            raise RuntimeError(_LOCAL_WITHOUT_GRAD.format("combine"))
        return _Combine.apply(source, targets, pieces, lengths, out_numel, dtype, rows, scale)
    return _ops.combine(
        source, targets, pieces, rows, lengths, out_numel, dtype, scale, local, local_begin
    )


def combine_backward(
    grad: Tensor,
    targets: Tensor,
    pieces: Tensor,
    lengths: Tensor | None,
    source_numel: int,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Apply the adjoint of `combine`, to `[source_numel]`; differentiable."""
    refuse_tangents("gradients", grad)
    if grad.requires_grad and torch.is_grad_enabled():
        return _CombineBackward.apply(
            grad, targets, pieces, lengths, source_numel, dtype, rows, scale
        )
    return _ops.combine_backward(grad, targets, pieces, rows, lengths, source_numel, dtype, scale)


def combine_backward_(
    grad: Tensor,
    targets: Tensor,
    pieces: Tensor,
    lengths: Tensor | None,
    source_numel: int,
    rows: Tensor | None = None,
    scale: float = 1.0,
    *,
    local: Tensor,
    local_begin: int,
) -> Tensor:
    """Apply the adjoint of `combine`: write the part in `local`, return the other elements.

    `source_numel` counts the elements of both; the result has the dtype of `local`.

    Raises:
        RuntimeError: on the CPU, the description is wrong; or autograd records the call.
    """
    if torch.is_grad_enabled() and (grad.requires_grad or local.requires_grad):
        raise RuntimeError(_LOCAL_WITHOUT_GRAD.format("combine_backward_"))
    return _ops.combine_backward_(
        grad, targets, pieces, rows, lengths, source_numel, scale, local, local_begin
    )


_LOCAL_WITHOUT_GRAD = (
    "{}: local has no derivative: detach the tensors, or concatenate local and the others"
)


class _GatherSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(starts, order)
        ctx.shape, ctx.total = values.shape, total
        return _ops.gather_segments(values, starts, order, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        starts, order = ctx.saved_tensors
        rows = torch.arange(ctx.shape[0], device=grad.device)
        positions = _ops.gather_segments(rows, starts, order, ctx.total)
        # Accumulates in order, on a GPU too, where index_add would use atomics.
        zeros = grad.new_zeros(ctx.shape)
        return zeros.index_put((positions,), grad, accumulate=True), None, None, None


class _RouteWeighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        ids: Tensor,
        offsets: Tensor,
        routing: Sequence[Tensor],
        starts: Tensor,
        total: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        routed, positions, routed_weights = _ops.route_ids(
            ids, offsets, *routing, starts, total, weights
        )
        ctx.save_for_backward(positions)
        ctx.num_ids = ids.numel()
        ctx.mark_non_differentiable(routed, positions)
        return routed, positions, routed_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        grad = grads[2].new_zeros(ctx.num_ids)
        grad.index_put_((positions,), grads[2], accumulate=True)
        return grad, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        targets: Tensor,
        pieces: Tensor,
        lengths: Tensor | None,
        out_numel: int,
        dtype: torch.dtype,
        rows: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(targets, pieces, lengths, rows)
        ctx.source_numel, ctx.source_dtype, ctx.scale = source.numel(), source.dtype, scale
        return _ops.combine(source, targets, pieces, rows, lengths, out_numel, dtype, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        targets, pieces, lengths, rows = ctx.saved_tensors
        source_grad = combine_backward(
            grad, targets, pieces, lengths, ctx.source_numel, ctx.source_dtype, rows, ctx.scale
        )
        return source_grad, None, None, None, None, None, None, None


class _CombineBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        targets: Tensor,
        pieces: Tensor,
        lengths: Tensor | None,
        source_numel: int,
        dtype: torch.dtype,
        rows: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(targets, pieces, lengths, rows)
        ctx.grad_numel, ctx.grad_dtype, ctx.scale = grad.numel(), grad.dtype, scale
        return _ops.combine_backward(
            grad, targets, pieces, rows, lengths, source_numel, dtype, scale
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        targets, pieces, lengths, rows = ctx.saved_tensors
        result = combine(
            grad, targets, pieces, lengths, ctx.grad_numel, ctx.grad_dtype, rows, ctx.scale
        )
        return result, None, None, None, None, None, None, None


@torch.library.register_fake("emblib::gather_segments")
def _(values: Tensor, starts: Tensor, order: Tensor, total: int) -> Tensor:
    return values.new_empty(total, *values.shape[1:])


@torch.library.register_fake("emblib::route_lengths")
def _(ids: Tensor, offsets: Tensor, *routing_and_num_bags: Any) -> Tensor:
    return ids.new_empty(routing_and_num_bags[-1])


@torch.library.register_fake("emblib::route_ids")
def _(ids: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, total, weights = rest
    routed_weights = ids.new_empty(0, dtype=torch.float32)
    if weights is not None:
        routed_weights = weights.new_empty(total)
    return ids.new_empty(total), ids.new_empty(total, dtype=torch.int64), routed_weights


@torch.library.register_fake("emblib::combine")
def _(
    source: Tensor,
    targets: Tensor,
    pieces: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    out_numel: int,
    dtype: torch.dtype,
    scale: float,
    local: Tensor | None = None,
    local_begin: int = 0,
) -> Tensor:
    return source.new_empty(out_numel, dtype=dtype)


@torch.library.register_fake("emblib::combine_backward")
def _(
    grad: Tensor,
    targets: Tensor,
    pieces: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    source_numel: int,
    dtype: torch.dtype,
    scale: float,
) -> Tensor:
    return grad.new_empty(source_numel, dtype=dtype)


@torch.library.register_fake("emblib::combine_backward_")
def _(
    grad: Tensor,
    targets: Tensor,
    pieces: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    source_numel: int,
    scale: float,
    local: Tensor,
    local_begin: int,
) -> Tensor:
    return grad.new_empty(source_numel - local.numel(), dtype=local.dtype)
