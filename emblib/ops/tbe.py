"""Table-batched embeddings: lookup of T tables in one kernel, backward fused with the optimizer.

Shapes and dtypes, with F features, B batch, L lookups, D dim:

- `weights` float32 | float16 | bfloat16, flat, all tables one after the other
- `features` int64 `[F, 5]`: weight_offset (elements), row_base, rows, dim, column (of the output)
- `indices` int32 | int64 `[L]`
- `offsets` int32 | int64 `[F * B + 1]`, feature-major: bag `f * B + b`
- `sample_weights` float32 `[L]`
- output `[B, columns]`, or `[L, D]` for pooling NONE

Invalid indices and offsets are repaired as they are read, see `emblib.BoundsCheck`. MEAN divides by
the length of the bag, weighted or not. Sums are float32. The same input gives the same bits on any
number of threads: rows are grouped by a stable sort, and long groups are summed in fixed chunks.

`tbe_row_grads` returns the gradient of each distinct row, float32 `[L, dim]`; rows from `count` on
are unspecified.

Semantics follow FBGEMM's table-batched embeddings; the definition is `emblib.reference.tbe`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.optim import External, Optimizer
from emblib.specs import Pooling

check_bounds = torch.ops.emblib.bounds_check.default
_tbe_lookup = torch.ops.emblib.tbe_lookup.default
_tbe_group = torch.ops.emblib.tbe_group.default
_tbe_row_grads = torch.ops.emblib.tbe_row_grads.default
_tbe_update_ = torch.ops.emblib.tbe_update_.default
_tbe_sample_weight_grad = torch.ops.emblib.tbe_sample_weight_grad.default


class Groups(NamedTuple):
    """The lookups of a batch by row, as `tbe_group` returns them (padded; see `emblib.ops.group`).

    `rows` int64 `[L]` linear row ids, `segments` int32 `[L + 1]`, `lookups` and `bags` int32 `[L]`
    (position and bag of each sorted lookup), `count` int32 `[1]`.
    """

    rows: Tensor
    segments: Tensor
    lookups: Tensor
    bags: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


def group(features: Tensor, indices: Tensor, offsets: Tensor, total_rows: int) -> Groups:
    """Group lookups by linear row id `row_base + index`; `total_rows` bounds those ids."""
    return Groups(*_tbe_group(features, indices, offsets, total_rows))


class Lookup(NamedTuple):
    """One batch on its way through a module: what backward needs to know again."""

    features: Tensor
    indices: Tensor
    offsets: Tensor
    pooling: Pooling
    total_rows: int
    columns: int


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward updates `weights` and `states` in place, with no weight gradient.

    `anchor` is a scalar that requires grad: it ties the output to autograd while the weights, which
    backward mutates, stay out of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor,
        states: list[Tensor],
        hyper: Tensor,
        optimizer: Optimizer,
        batch: Lookup,
        sample_weights: Tensor | None,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """`[B, columns]`, or `[L, D]` for NONE."""
        _save(ctx, batch, sample_weights)
        ctx.weights, ctx.states, ctx.hyper, ctx.optimizer = weights, states, hyper, optimizer
        if sample_weights is not None and sample_weights.requires_grad:
            ctx.version = weights._version
        return _lookup(weights, batch, sample_weights, output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every row of the batch; gradient of `sample_weights` if asked."""
        batch, sample_weights = _saved(ctx)
        weights = ctx.weights
        sample_grad = None
        if ctx.needs_input_grad[6]:
            if weights._version != ctx.version:
                raise RuntimeError(
                    "the gradient of per_sample_weights needs the weights that forward read, but "
                    "another backward has updated them since; run backward before the next one"
                )
            sample_grad = _sample_weight_grad(grad, weights, batch)
        groups = group(batch.features, batch.indices, batch.offsets, batch.total_rows)
        ctx.hyper[1].add_(1)
        _tbe_update_(
            weights,
            ctx.states,
            ctx.hyper,
            ctx.optimizer.name,
            grad,
            batch.features,
            *groups,
            batch.offsets,
            sample_weights,
            batch.pooling.value,
        )
        torch.autograd.graph.increment_version(weights)
        return None, None, None, None, None, None, sample_grad, None


class SparseLookup(torch.autograd.Function):
    """Lookup with a sparse COO gradient for `weights` `[R, D]`: one entry a distinct row."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        batch: Lookup,
        sample_weights: Tensor | None,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """`[B, columns]`, or `[L, D]` for NONE."""
        # The weights matter for the gradient of sample weights only; kept without need, they would
        # forbid an optimizer step between two backwards.
        weighted = sample_weights is not None and sample_weights.requires_grad
        _save(ctx, batch, sample_weights, weights if weighted else None)
        ctx.shape, ctx.dtype = weights.shape, weights.dtype
        return _lookup(weights, batch, sample_weights, output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The coalesced sparse gradient; reads the number of rows back from the device."""
        batch, sample_weights, weights = _saved(ctx)
        weight_grad = sample_grad = None
        if ctx.needs_input_grad[0]:
            groups = group(batch.features, batch.indices, batch.offsets, batch.total_rows)
            values = _tbe_row_grads(
                grad,
                batch.features,
                *groups,
                batch.offsets,
                sample_weights,
                batch.pooling.value,
                ctx.shape[1],
            )
            unique = int(groups.count)
            weight_grad = torch.sparse_coo_tensor(
                groups.rows[:unique].unsqueeze(0),
                values[:unique].to(ctx.dtype),
                ctx.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        if ctx.needs_input_grad[2]:
            sample_grad = _sample_weight_grad(grad, weights, batch)
        return weight_grad, None, sample_grad, None


def lookup(
    weights: Tensor,
    batch: Lookup,
    sample_weights: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Pool each bag; `weights` `[R, D]` gets a sparse gradient where it requires one."""
    if not torch.is_grad_enabled():
        return _lookup(weights, batch, sample_weights, output_dtype)
    return SparseLookup.apply(weights, batch, sample_weights, output_dtype)


def _save(ctx: Any, batch: Lookup, *tensors: Tensor | None) -> None:
    """Keeps a batch for backward; autograd complains if its tensors are overwritten before that."""
    ctx.save_for_backward(batch.indices, batch.offsets, *tensors)
    ctx.batch = batch._replace(indices=batch.features, offsets=batch.features)  # placeholders


def _saved(ctx: Any) -> tuple[Any, ...]:
    indices, offsets, *tensors = ctx.saved_tensors
    return ctx.batch._replace(indices=indices, offsets=offsets), *tensors


def _lookup(
    weights: Tensor, batch: Lookup, sample_weights: Tensor | None, output_dtype: torch.dtype
) -> Tensor:
    return _tbe_lookup(
        weights,
        batch.features,
        batch.indices,
        batch.offsets,
        sample_weights,
        batch.pooling.value,
        batch.columns,
        output_dtype,
    )


def _sample_weight_grad(grad: Tensor, weights: Tensor, batch: Lookup) -> Tensor:
    return _tbe_sample_weight_grad(
        grad, weights, batch.features, batch.indices, batch.offsets, batch.pooling.value
    )


def is_fused(optimizer: Optimizer) -> bool:
    """Whether backward applies `optimizer` itself."""
    return not isinstance(optimizer, External)


@torch.library.register_fake("emblib::bounds_check")
def _(indices: Tensor, offsets: Tensor, features: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    return offsets.new_empty(offsets.numel(), dtype=torch.int32), offsets.new_empty(
        2, dtype=torch.int64
    )


@torch.library.register_fake("emblib::tbe_lookup")
def _(
    weights: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: str,
    columns: int,
    output_dtype: torch.dtype,
) -> Tensor:
    batch = (offsets.numel() - 1) // features.size(0) if features.size(0) else 0
    lines = indices.numel() if pooling == Pooling.NONE.value else batch
    return weights.new_empty((lines, columns), dtype=output_dtype)


@torch.library.register_fake("emblib::tbe_group")
def _(
    features: Tensor, indices: Tensor, offsets: Tensor, total_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lookups = indices.numel()
    return (
        indices.new_empty(lookups, dtype=torch.int64),
        indices.new_empty(lookups + 1, dtype=torch.int32),
        indices.new_empty(lookups, dtype=torch.int32),
        indices.new_empty(lookups, dtype=torch.int32),
        indices.new_empty(1, dtype=torch.int32),
    )


@torch.library.register_fake("emblib::tbe_row_grads")
def _(grad: Tensor, features: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty((rows.numel(), rest[-1]), dtype=torch.float32)


@torch.library.register_fake("emblib::tbe_update_")
def _(*arguments: Any) -> None:
    return None


@torch.library.register_fake("emblib::tbe_sample_weight_grad")
def _(
    grad: Tensor, weights: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, pooling: str
) -> Tensor:
    return grad.new_empty(indices.numel(), dtype=torch.float32)


@torch.library.register_fake("emblib::advise_huge_pages_")
def _(tensor: Tensor) -> None:
    return None
