"""Operators that distribute lookups over ranks by their rows, and that check lookups."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check, check_ids, check_offsets, check_one_per
from emblib.compat.fbgemm_operators.jagged import (
    complete_cumsum,
    invert_permute,
    segment_positions,
)
from emblib.compat.fbgemm_operators.registry import operator
from emblib.ops import route

_OPTIONS = (
    "Tensor? batch_size_per_feature=None, SymInt max_B=-1, Tensor[]? block_bucketize_pos=None, "
)
_LAST = (
    "bool keep_orig_idx=False, Tensor? total_num_blocks=None, "
    "Tensor? keep_orig_idx_per_feature=None) -> "
)
_FIRST = (
    "(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence, Tensor block_sizes, "
    "SymInt my_size, "
)


def _segments(lengths: Tensor, total: int) -> Tensor:
    """Return the bag of each lookup."""
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return bags.repeat_interleave(lengths, output_size=total)


def _bags_and_features(
    lengths: Tensor, indices: Tensor, block_sizes: Tensor, batch_sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bag and feature of each lookup."""
    bag = _segments(lengths, indices.numel())
    if batch_sizes is None:
        return bag, bag // max(lengths.numel() // max(block_sizes.numel(), 1), 1)
    return bag, _segments(batch_sizes, lengths.numel())[bag]


def _group(lengths: Tensor, bag: Tensor, bucket: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the stable order by bucket and bag, and the lengths `[buckets * bags]`."""
    slot = bucket * lengths.numel() + bag
    order = torch.sort(slot, stable=True).indices
    counts = torch.zeros(buckets * lengths.numel(), dtype=lengths.dtype, device=lengths.device)
    return order, counts.scatter_add(0, slot, torch.ones_like(slot, dtype=lengths.dtype))


def _bag_positions(lengths: Tensor, like: Tensor) -> Tensor:
    lengths = lengths.to(like.dtype)
    return segment_positions(torch.zeros_like(lengths), lengths, like.numel())


class _Bucketed(NamedTuple):
    """Lookups by bucket: lengths, rows, the position of each in the input, and the buckets."""

    lengths: Tensor
    rows: Tensor
    positions: Tensor
    bucket: Tensor | None


def _routing(
    bags: int, block_sizes: Tensor, batch_sizes: Tensor | None, buckets: int
) -> route.Routing:
    """Return the units of `buckets` ranks, bucket by bucket, each with a block of every table."""
    sizes = block_sizes.long()
    features = sizes.numel()
    feature = torch.arange(features, device=sizes.device)
    bucket = torch.arange(buckets, device=sizes.device)
    block = torch.arange(features * buckets, device=sizes.device)
    if batch_sizes is None:
        batch = bags // features
        first_bags = torch.arange(features + 1, device=sizes.device) * batch
    else:
        first_bags = complete_cumsum(batch_sizes.long())
    first_rows = (sizes.unsqueeze(1) * bucket).flatten()
    first_bags_of_units = (bucket.unsqueeze(1) * bags + first_bags[:-1]).flatten()
    return route.Routing(
        first_bags=first_bags,
        features=torch.stack(
            [
                feature * buckets,
                torch.full_like(feature, buckets),
                sizes * buckets,
                torch.full_like(feature, route.RouteRule.BY_RANGE_ELSE_SPREAD.value),
            ],
            dim=1,
        ),
        blocks=torch.stack([first_rows, block, torch.ones_like(block)], dim=1),
        copies=(bucket * features + feature.unsqueeze(1)).flatten(),
        units=torch.cat([first_bags_of_units, sizes.new_full((1,), buckets * bags)]),
    )


def _bucketize_natively(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor,
    batch_sizes: Tensor | None,
    buckets: int,
) -> _Bucketed:
    """Distribute lookups with the kernels of `emblib.ops.route`, for buckets of one block."""
    routing = _routing(lengths.numel(), block_sizes, batch_sizes, buckets)
    offsets = complete_cumsum(lengths)
    num_bags = buckets * lengths.numel()
    counts = route.route_lengths(indices, offsets, *routing, num_bags=num_bags)
    rows, positions, _ = route.route_ids(
        indices, offsets, *routing, starts=complete_cumsum(counts), total=indices.numel()
    )
    return _Bucketed(counts.to(lengths.dtype), rows, positions, None)


def _split_evenly(
    indices: Tensor,
    feature: Tensor,
    block_sizes: Tensor,
    total_num_blocks: Tensor | None,
    buckets: int,
) -> tuple[Tensor, Tensor]:
    """Return bucket and local row, for buckets of equally many blocks; rows beyond are spread."""
    block = block_sizes.to(indices.dtype)[feature]
    if total_num_blocks is None:
        total = torch.full_like(block, buckets)
    else:
        total = total_num_blocks.to(indices.dtype)[feature]
    blocks = total // buckets
    size = block * blocks
    inside = indices < block * total
    bucket = torch.where(inside, indices // size, indices % total // blocks)
    return bucket, torch.where(inside, indices % size, indices // total)


def _split_at(
    indices: Tensor, feature: Tensor, bounds: Sequence[Tensor], buckets: int
) -> tuple[Tensor, Tensor]:
    """Return bucket and local row, for buckets that begin at `bounds` of each feature."""
    bucket, row = indices % buckets, indices // buckets
    for number, starts in enumerate(bounds):
        starts = starts.to(indices.dtype)
        found = torch.searchsorted(starts, indices, right=True) - 1
        here = (feature == number) & (found >= 0) & (found < buckets)
        found = found.clamp(0, buckets - 1)
        bucket = torch.where(here, found, bucket)
        row = torch.where(here, indices - starts[found], row)
    return bucket, row


def _shape(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else list(tensor.shape)


class _Blocks(NamedTuple):
    """The arguments that say which rows of each feature a bucket has."""

    sizes: Tensor
    batch_sizes: Tensor | None
    bounds: Sequence[Tensor] | None
    total: Tensor | None
    keep: Tensor | None

    def check(self, bags: int, buckets: int) -> None:
        """Raise RuntimeError unless there is an entry per feature, and there are buckets."""
        features = self.sizes.numel()
        check(buckets > 0, f"my_size must be > 0, got {buckets}")
        check(self.sizes.dim() == 1, f"block_sizes must be [F], got {list(self.sizes.shape)}")
        check_one_per("batch_size_per_feature", self.batch_sizes, "feature", features)
        check_one_per("total_num_blocks", self.total, "feature", features)
        check_one_per("keep_orig_idx_per_feature", self.keep, "feature", features)
        if self.batch_sizes is None and bags:
            check(
                features > 0 and bags % features == 0,
                f"lengths must have the same number of bags per feature, got {bags} for "
                f"{features} block_sizes: give batch_size_per_feature",
            )
        if self.total is not None and self.total.device.type == "cpu":
            check(
                torch.compiler.is_compiling() or not (self.total % buckets).any(),
                f"total_num_blocks must be multiples of my_size = {buckets}, got {self.total}",
            )
        if self.bounds is not None:
            sizes = [bounds.numel() for bounds in self.bounds]
            check(
                sizes == [buckets + 1] * features,
                f"block_bucketize_pos must have my_size + 1 = {buckets + 1} entries for each of "
                f"{features} features, got {sizes}",
            )


@operator(
    f"block_bucketize_sparse_features_inference{_FIRST}Tensor? weights=None, {_OPTIONS}"
    f"bool return_bucket_mapping=False, {_LAST}"
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)"
)
def block_bucketize_sparse_features_inference(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Distribute lookups over `my_size` buckets by blocks of rows.

    Returns:
        lengths `[my_size * F * B]`, rows within the bucket, weights, positions in the bag, where
        in the result each of `indices` is, and the bucket of each of `indices`.
    """
    lengths = lengths.flatten()
    blocks = _Blocks(
        block_sizes,
        batch_size_per_feature,
        block_bucketize_pos,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )
    blocks.check(lengths.numel(), my_size)
    check_ids("indices", indices)
    check(
        weights is None or weights.size(0) == indices.numel(),
        f"weights must have one entry per index = {indices.numel()}, got {_shape(weights)}",
    )
    is_simple = block_bucketize_pos is None and total_num_blocks is None
    if is_simple and block_sizes.numel() and not return_bucket_mapping:
        found = _bucketize_natively(lengths, indices, block_sizes, batch_size_per_feature, my_size)
    else:
        bag, feature = _bags_and_features(lengths, indices, block_sizes, batch_size_per_feature)
        if block_bucketize_pos is None:
            bucket, row = _split_evenly(indices, feature, block_sizes, total_num_blocks, my_size)
        else:
            bucket, row = _split_at(indices, feature, block_bucketize_pos, my_size)
        order, counts = _group(lengths, bag, bucket, my_size)
        found = _Bucketed(counts, row[order], order, bucket.to(indices.dtype))
    rows = found.rows
    if keep_orig_idx_per_feature is not None:
        _, feature = _bags_and_features(lengths, indices, block_sizes, batch_size_per_feature)
        keep = keep_orig_idx_per_feature.bool()[feature]
        rows = torch.where(keep[found.positions], indices[found.positions], rows)
    elif keep_orig_idx:
        rows = indices[found.positions]
    return (
        found.lengths,
        rows,
        None if weights is None else weights[found.positions],
        _bag_positions(lengths, indices)[found.positions] if bucketize_pos else None,
        invert_permute(found.positions).to(indices.dtype) if sequence else None,
        found.bucket if return_bucket_mapping else None,
    )


@operator(
    f"block_bucketize_sparse_features{_FIRST}Tensor? weights=None, {_OPTIONS}{_LAST}"
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?)"
)
def block_bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Distribute lookups as `block_bucketize_sparse_features_inference`, without the buckets."""
    made = block_bucketize_sparse_features_inference(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights,
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        keep_orig_idx=keep_orig_idx,
        total_num_blocks=total_num_blocks,
        keep_orig_idx_per_feature=keep_orig_idx_per_feature,
    )
    return made[:5]


@operator(
    f"block_bucketize_sparse_features_2d_weights{_FIRST}Tensor weights, SymInt weights_dim=1, "
    f"{_OPTIONS}{_LAST}(Tensor, Tensor, Tensor, Tensor?, Tensor?)"
)
def block_bucketize_sparse_features_2d_weights(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor,
    weights_dim: int = 1,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Distribute lookups as `block_bucketize_sparse_features`, with weights `[L, weights_dim]`."""
    made = block_bucketize_sparse_features_inference(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights.view(-1, weights_dim),
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        keep_orig_idx=keep_orig_idx,
        total_num_blocks=total_num_blocks,
        keep_orig_idx_per_feature=keep_orig_idx_per_feature,
    )
    assert made[2] is not None
    return made[0], made[1], made[2], made[3], made[4]


@operator(
    "bucketize_sparse_features(Tensor lengths, Tensor indices, bool bucketize_pos, SymInt my_size, "
    "Tensor? weights=None) -> (Tensor, Tensor, Tensor?, Tensor?)"
)
def bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    my_size: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Distribute lookups over `my_size` buckets round robin: row `i` is row `i // n` of `i % n`."""
    lengths = lengths.flatten()
    check_ids("indices", indices)
    check(my_size > 0, f"my_size must be > 0, got {my_size}")
    check_one_per("weights", weights, "index", indices.numel())
    bag = _segments(lengths, indices.numel())
    order, counts = _group(lengths, bag, indices % my_size, my_size)
    position = _bag_positions(lengths, indices)[order] if bucketize_pos else None
    chosen = None if weights is None else weights[order]
    return counts, (indices // my_size)[order], chosen, position


@operator(
    "bounds_check_indices(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, "
    "int bounds_check_mode, Tensor(c!) warning, Tensor(d!)? weights=None, Tensor? B_offsets=None, "
    "SymInt max_B=-1, Tensor? b_t_map=None, int info_B_num_bits=-1, int info_B_mask=-1, "
    "int bounds_check_version=1, bool prefetch_pipeline=False) -> ()"
)
def bounds_check_indices(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    max_B: int = -1,
    b_t_map: Tensor | None = None,
    info_B_num_bits: int = -1,
    info_B_mask: int = -1,
    bounds_check_version: int = 1,
    prefetch_pipeline: bool = False,
) -> None:
    """Check rows and offsets: mode 0 raises, 1 warns and repairs, 2 repairs, in place.

    Offsets are clamped to be increasing and to end at the number of lookups; rows outside their
    table become 0; row -1 stays. Tensors of other sizes or dtypes raise in every mode.
    """
    _check_sizes(rows_per_table, indices, offsets, weights, B_offsets)
    if bounds_check_mode not in (0, 1, 2):
        return
    total = indices.numel()
    repaired = offsets.clamp(0, total).cummax(0).values
    repaired[-1:] = total
    bags = offsets.numel() - 1
    lengths = repaired.diff()
    bag = _segments(lengths, int(lengths.sum()))
    if B_offsets is None:
        feature = bag // max(bags // max(rows_per_table.numel(), 1), 1)
    else:
        feature = torch.searchsorted(B_offsets.to(bag.dtype), bag, right=True) - 1
    start = int(repaired[0]) if bags >= 0 and offsets.numel() else 0
    checked = indices[start:]
    rows = rows_per_table.to(indices.dtype)[feature]
    invalid = (checked < -1) | (checked >= rows)
    count = int(invalid.sum()) + int((repaired != offsets).sum())
    if not count:
        return
    if bounds_check_mode == 0:
        raise RuntimeError(
            f"{count} indices or offsets are out of range: each index must be in [0, rows) of its "
            f"table (rows {rows_per_table.tolist()}), offsets must increase from 0 to {total}"
        )
    if bounds_check_mode == 1:
        warning += count
        warnings.warn(f"emblib: repaired {count} indices or offsets out of range", stacklevel=2)
    checked.masked_fill_(invalid, 0)
    offsets.copy_(repaired)


def _check_sizes(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    batch_offsets: Tensor | None,
) -> None:
    """Raise RuntimeError unless the tensors of a lookup fit each other."""
    check_ids("rows_per_table", rows_per_table)
    check_ids("indices", indices)
    check_offsets("offsets", offsets)
    if weights is not None and weights.numel():  # empty ones are none, as in FBGEMM
        check_one_per("weights", weights, "index", indices.numel())
    tables, bags = rows_per_table.numel(), offsets.numel() - 1
    if batch_offsets is None:
        check(
            bags == 0 or (tables > 0 and bags % tables == 0),
            f"offsets must have B * T + 1 entries for T = {tables} tables, got {bags + 1}",
        )
        return
    starts = batch_offsets.tolist()
    check(
        len(starts) == tables + 1 and starts == sorted(starts) and starts[::tables] == [0, bags],
        f"B_offsets must have T + 1 = {tables + 1} entries that increase from 0 to the number of "
        f"bags = {bags}, got {starts}",
    )
