"""The ops of table-batched embeddings: lookup of T tables in one kernel, fused backward.

Shapes and dtypes, with F features, B batch, L lookups, D dim:

- `weights`: a list of 1 to 4 flat tensors, float32 | float16 | bfloat16, one per memory tier:
  device, host, disk, cache. Unused tiers are empty, trailing ones may be omitted. Each has its
  tables one after the other; only the cache tier may have another dtype
- `states`: the states of the optimizer, all of tier 0, then all of tier 1, ... A state is as long
  as the weights of its tier, or has one entry per row
- `features` int64 `[F, 8]`, see `emblib.columns.FeatureColumn`
- `indices` int32 | int64 `[L]`
- `offsets` int32 | int64 `[F * B + 1]`, feature-major: bag `f * B + b`
- `slots` int32 `[L]` or None: the cache slot of the row of each lookup, -1 if it is not cached
- `bag_layout` int64 `[bags, 2]` or None: if features differ in batch size, the feature of each bag
  and the first element of its output; `offsets` then has one entry per bag plus one
- `sample_weights` float32 `[L]`
- `mode`, `pooling` and `optimizer`: their numbers in `emblib.ops.codes`
- output `[B, output_dim]`; `[output_dim]` with `bag_layout`; `[L, output_dim]` for pooling NONE

Invalid indices and offsets are repaired as they are read, see `emblib.BoundsCheck`. MEAN divides by
the length of the bag, weighted or not. Sums are float32. The same input has the same results, bit
for bit, on any number of threads and for any location of the rows: rows are grouped by a stable
sort, and long groups are summed in fixed chunks.

`tbe_row_grads` returns the gradient of each distinct row, float32 `[L, dim]`; rows from `count` on
are unspecified.

csrc/schema.cpp describes `bounds_check`, `tbe_lookup_checked_` and `tbe_backward_`.

Semantics follow FBGEMM's table-batched embeddings; the definition is `emblib.reference.tbe`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.ops import codes

check_bounds = torch.ops.emblib.bounds_check.default
bounds_check_ = torch.ops.emblib.bounds_check_.default
tbe_lookup = torch.ops.emblib.tbe_lookup.default
tbe_group = torch.ops.emblib.tbe_group.default
tbe_row_grads = torch.ops.emblib.tbe_row_grads.default
tbe_update_ = torch.ops.emblib.tbe_update_.default
tbe_sample_weight_grad = torch.ops.emblib.tbe_sample_weight_grad.default
tbe_lookup_checked_ = torch.ops.emblib.tbe_lookup_checked_.default
tbe_backward_ = torch.ops.emblib.tbe_backward_.default


def output_shape(
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    pooling: int,
    output_dim: int,
    *,
    is_flat: bool,
) -> tuple[int, ...]:
    """Return the shape of a lookup's output; flat if there is a `bag_layout`.

    `pooling` is a number of `emblib.ops.codes`. No tensor is read, only shapes.
    """
    if pooling == codes.POOLING["none"]:
        return indices.numel(), output_dim
    if is_flat:
        return (output_dim,)
    return ((offsets.numel() - 1) // features.size(0) if features.size(0) else 0), output_dim


class Groups(NamedTuple):
    """The lookups of a batch sorted by row, as `tbe_group` returns them.

    `rows`, int64 `[L]`, are the distinct linear rows. `lookups` and `bags`, int32 `[L]`, are the
    position and bag of each sorted lookup; row u has those in `[segments[u], segments[u + 1])`.
    `segments` is int32 `[L + 1]`; `count`, int32 `[1]`, is the number of distinct rows. All are
    padded as in `emblib.ops.primitives`.
    """

    rows: Tensor
    segments: Tensor
    lookups: Tensor
    bags: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


def group(
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    total_rows: int,
    bag_layout: Tensor | None = None,
    *,
    repaired: bool = False,
) -> Groups:
    """Group lookups by linear row id `row_base + index`, in ascending order of ids.

    The module docstring explains the other arguments. `total_rows` must exceed every linear row id.
    Skipped lookups, e.g. of index -1, are in no group. `repaired` states that `check_bounds` has
    returned the offsets, so that a GPU does not check them again.
    """
    return Groups(*tbe_group(features, indices, offsets, bag_layout, total_rows, repaired))


@torch.library.register_fake("emblib::bounds_check")
def _(indices: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return offsets.new_empty(offsets.numel(), dtype=torch.int32), offsets.new_empty(
        2, dtype=torch.int64
    )


@torch.library.register_fake("emblib::bounds_check_")
def _(indices: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    return offsets.new_empty(offsets.numel(), dtype=torch.int32)


@torch.library.register_fake("emblib::tbe_lookup")
def _(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    slots: Tensor | None,
    bag_layout: Tensor | None,
    sample_weights: Tensor | None,
    pooling: int,
    output_dim: int,
    output_dtype: torch.dtype,
) -> Tensor:
    is_flat = bag_layout is not None
    shape = output_shape(features, indices, offsets, pooling, output_dim, is_flat=is_flat)
    return indices.new_empty(shape, dtype=output_dtype)


@torch.library.register_fake("emblib::tbe_group")
def _(
    features: Tensor, indices: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_lookups = indices.numel()
    return (
        indices.new_empty(num_lookups, dtype=torch.int64),
        indices.new_empty(num_lookups + 1, dtype=torch.int32),
        indices.new_empty(num_lookups, dtype=torch.int32),
        indices.new_empty(num_lookups, dtype=torch.int32),
        indices.new_empty(1, dtype=torch.int32),
    )


@torch.library.register_fake("emblib::tbe_row_grads")
def _(grad: Tensor, features: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty((rows.numel(), rest[-1]), dtype=torch.float32)


@torch.library.register_fake("emblib::tbe_lookup_checked_")
def _(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: int,
    output_dim: int,
    output_dtype: torch.dtype,
    check: int | None,
    violations: Tensor,
    slots: Tensor | None = None,
) -> list[Tensor]:
    shape = output_shape(features, indices, offsets, pooling, output_dim, is_flat=False)
    results = [indices.new_empty(shape, dtype=output_dtype)]
    if indices.is_cuda and check is not None:
        results.append(offsets.new_empty(offsets.numel(), dtype=torch.int32))
    return results


@torch.library.register_fake("emblib::tbe_sample_weight_grad")
def _(
    grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, *rest: Any
) -> Tensor:
    return grad.new_empty(indices.numel(), dtype=torch.float32)
