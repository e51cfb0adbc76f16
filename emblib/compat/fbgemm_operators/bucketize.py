"""Operators that distribute lookups over buckets (ranks) by their rows, and that check lookups.

A lookup is one index (a row) of one bag. Bags are numbered feature by feature: F * B bags for F
features and a batch of B. Bucket k has some blocks of rows of each feature.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import check, check_ids, check_offsets, check_one_per
from emblib.compat.fbgemm_operators.jagged import (
    complete_cumsum,
    invert_permute,
    segment_positions,
)
from emblib.compat.fbgemm_operators.registry import SymInt, operator
from emblib.ops import route

_Buckets = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Lengths, rows, weights, positions in the bag, and the position of each index in the result."""

# Parts of the schemas of block_bucketize_sparse_features and its variants, in this order:
# _LEADING, weights, _OPTIONAL, _TRAILING, results.
_LEADING = (
    "(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence, Tensor block_sizes, "
    "SymInt my_size, "
)
_OPTIONAL = (
    "Tensor? batch_size_per_feature=None, SymInt max_B=-1, Tensor[]? block_bucketize_pos=None, "
)
_TRAILING = (
    "bool keep_orig_idx=False, Tensor? total_num_blocks=None, "
    "Tensor? keep_orig_idx_per_feature=None) -> "
)


def _bag_of_lookups(lengths: Tensor, num_lookups: int) -> Tensor:
    """Return the bag of each lookup, int64 `[num_lookups]`; `lengths` are those of the bags."""
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return bags.repeat_interleave(lengths, output_size=num_lookups)


def _bags_and_features(
    lengths: Tensor, indices: Tensor, block_sizes: Tensor, batch_sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bag and feature of each lookup, int64 `[L]`."""
    bag_of_lookup = _bag_of_lookups(lengths, indices.numel())
    if batch_sizes is None:
        return bag_of_lookup, bag_of_lookup // max(
            lengths.numel() // max(block_sizes.numel(), 1), 1
        )
    return bag_of_lookup, _bag_of_lookups(batch_sizes, lengths.numel())[bag_of_lookup]


def _group_by_bucket(
    lengths: Tensor, bag_of_lookup: Tensor, bucket_of_lookup: Tensor, num_buckets: int
) -> tuple[Tensor, Tensor]:
    """Sort lookups by bucket, then by bag.

    Returns:
        the positions of the sorted lookups in the input, int64 `[L]`, and the number of lookups
        per bucket and bag, `[num_buckets * bags]`, in the dtype of `lengths`.
    """
    group_of_lookup = bucket_of_lookup * lengths.numel() + bag_of_lookup
    order = torch.sort(group_of_lookup, stable=True).indices
    group_lengths = torch.zeros(
        num_buckets * lengths.numel(), dtype=lengths.dtype, device=lengths.device
    )
    return order, group_lengths.scatter_add(
        0, group_of_lookup, torch.ones_like(group_of_lookup, dtype=lengths.dtype)
    )


def _bag_positions(lengths: Tensor, indices: Tensor) -> Tensor:
    """Return the position of each lookup in its bag, `[L]`, in the dtype of `indices`."""
    lengths = lengths.to(indices.dtype)
    return segment_positions(torch.zeros_like(lengths), lengths, indices.numel())


class _BucketedLookups(NamedTuple):
    """Lookups sorted by bucket, then by bag."""

    lengths: Tensor  # number of lookups per bucket and bag, [buckets * bags]
    rows: Tensor  # [L], rows within their bucket
    positions: Tensor  # int64 [L], positions of the sorted lookups in the input
    bucket_of_lookup: Tensor | None  # [L], in the order of the input; None if not computed


def _routing(
    num_bags: int, block_sizes: Tensor, batch_sizes: Tensor | None, num_buckets: int
) -> route.Routing:
    """Return emblib's routing to `num_buckets` ranks, with one block of every table per rank."""
    rows_per_block = block_sizes.long()
    num_features = rows_per_block.numel()
    feature_numbers = torch.arange(num_features, device=rows_per_block.device)
    bucket_numbers = torch.arange(num_buckets, device=rows_per_block.device)
    block_numbers = torch.arange(num_features * num_buckets, device=rows_per_block.device)
    if batch_sizes is None:
        batch_size = num_bags // num_features
        first_bags = torch.arange(num_features + 1, device=rows_per_block.device) * batch_size
    else:
        first_bags = complete_cumsum(batch_sizes.long())
    first_rows = (rows_per_block.unsqueeze(1) * bucket_numbers).flatten()
    first_bags_of_units = (bucket_numbers.unsqueeze(1) * num_bags + first_bags[:-1]).flatten()
    return route.Routing(
        first_bags=first_bags,
        features=torch.stack(
            [
                feature_numbers * num_buckets,
                torch.full_like(feature_numbers, num_buckets),
                rows_per_block * num_buckets,
                torch.full_like(feature_numbers, route.RouteRule.BY_RANGE_ELSE_SPREAD.value),
            ],
            dim=1,
        ),
        blocks=torch.stack([first_rows, block_numbers, torch.ones_like(block_numbers)], dim=1),
        copies=(bucket_numbers * num_features + feature_numbers.unsqueeze(1)).flatten(),
        units=torch.cat(
            [first_bags_of_units, rows_per_block.new_full((1,), num_buckets * num_bags)]
        ),
    )


def _bucketize_natively(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor,
    batch_sizes: Tensor | None,
    num_buckets: int,
) -> _BucketedLookups:
    """Distribute lookups with the kernels of `emblib.ops.route`, for buckets of one block."""
    routing = _routing(lengths.numel(), block_sizes, batch_sizes, num_buckets)
    offsets = complete_cumsum(lengths)
    num_bucketed_bags = num_buckets * lengths.numel()
    bucketed_lengths = route.route_lengths(indices, offsets, *routing, num_bags=num_bucketed_bags)
    rows, positions, _ = route.route_ids(
        indices, offsets, *routing, starts=complete_cumsum(bucketed_lengths), total=indices.numel()
    )
    return _BucketedLookups(bucketed_lengths.to(lengths.dtype), rows, positions, None)


def _split_evenly(
    indices: Tensor,
    feature_of_lookup: Tensor,
    block_sizes: Tensor,
    total_num_blocks: Tensor | None,
    num_buckets: int,
) -> tuple[Tensor, Tensor]:
    """Return bucket and local row of each lookup, for buckets with the same number of blocks.

    A row beyond the blocks of its table is *spread*: it goes to block `row % num_blocks`, where it
    is row `row // num_blocks`.
    """
    rows_per_block = block_sizes.to(indices.dtype)[feature_of_lookup]
    if total_num_blocks is None:
        num_blocks = torch.full_like(rows_per_block, num_buckets)
    else:
        num_blocks = total_num_blocks.to(indices.dtype)[feature_of_lookup]
    blocks_per_bucket = num_blocks // num_buckets
    # Blocks of 0 rows: all rows are spread.
    rows_per_bucket = (rows_per_block * blocks_per_bucket).clamp(min=1)
    is_in_block = indices < rows_per_block * num_blocks
    bucket = torch.where(
        is_in_block, indices // rows_per_bucket, indices % num_blocks // blocks_per_bucket
    )
    return bucket, torch.where(is_in_block, indices % rows_per_bucket, indices // num_blocks)


def _split_at(
    indices: Tensor, feature_of_lookup: Tensor, arguments: "_BlockArguments", num_buckets: int
) -> tuple[Tensor, Tensor]:
    """Return bucket and local row of each lookup, for buckets that begin at `bucket_bounds`.

    If the blocks of a feature have 0 rows, its indices are raw ids: an id is spread to a block, and
    a bucket has the blocks within its bounds.
    """
    # Rows outside all buckets are spread over the buckets.
    bucket, row = indices % num_buckets, indices // num_buckets
    for feature_index, bounds in enumerate(arguments.bucket_bounds or ()):
        bounds = bounds.to(indices.dtype)
        has_raw_ids = arguments.block_sizes[feature_index] == 0
        num_blocks = (
            torch.full_like(bounds[0], num_buckets)
            if arguments.num_blocks is None
            else arguments.num_blocks[feature_index]
        )
        spread_ids = indices % num_blocks * bounds[-1] // num_blocks
        global_rows = torch.where(has_raw_ids, spread_ids, indices)
        bounds_bucket = torch.searchsorted(bounds, global_rows, right=True) - 1
        is_in_bucket = (
            (feature_of_lookup == feature_index)
            & (bounds_bucket >= 0)
            & (bounds_bucket < num_buckets)
        )
        bounds_bucket = bounds_bucket.clamp(0, num_buckets - 1)
        bucket = torch.where(is_in_bucket, bounds_bucket, bucket)
        local_row = torch.where(has_raw_ids, indices // num_blocks, indices - bounds[bounds_bucket])
        row = torch.where(is_in_bucket, local_row.to(row.dtype), row)
    return bucket, row


def _shape(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else list(tensor.shape)


class _BlockArguments(NamedTuple):
    """Arguments that say which rows of each of F features a bucket has.

    Attributes:
        block_sizes: rows per block, `[F]`; 0 spreads all rows.
        batch_sizes: number of bags, `[F]`; None if all features have the same number.
        bucket_bounds: first row of each bucket, and the end, `[num_buckets + 1]` per feature; None
            if all buckets have the same number of blocks.
        num_blocks: number of blocks, `[F]`, a multiple of `num_buckets`; None for one per bucket.
        keeps_global_rows: whether the rows of a feature stay global, `[F]`; None for no feature.
    """

    block_sizes: Tensor
    batch_sizes: Tensor | None
    bucket_bounds: Sequence[Tensor] | None
    num_blocks: Tensor | None
    keeps_global_rows: Tensor | None

    def check(self, num_bags: int, num_buckets: int) -> None:
        """Raise RuntimeError if there are no buckets, or sizes do not fit the features or bags."""
        num_features = self.block_sizes.numel()
        check(num_buckets > 0, f"my_size must be > 0, got {num_buckets}")
        check(
            self.block_sizes.dim() == 1,
            f"block_sizes must be [F], got {list(self.block_sizes.shape)}",
        )
        check_one_per("batch_size_per_feature", self.batch_sizes, "feature", num_features)
        check_one_per("total_num_blocks", self.num_blocks, "feature", num_features)
        check_one_per("keep_orig_idx_per_feature", self.keeps_global_rows, "feature", num_features)
        if self.batch_sizes is None and num_bags:
            check(
                num_features > 0 and num_bags % num_features == 0,
                f"lengths must have the same number of bags per feature, got {num_bags} for "
                f"{num_features} block_sizes: give batch_size_per_feature",
            )
        if self.num_blocks is not None and self.num_blocks.device.type == "cpu":
            check(
                torch.compiler.is_compiling() or not (self.num_blocks % num_buckets).any(),
                f"each of total_num_blocks must be a multiple of my_size = {num_buckets}, got "
                f"{self.num_blocks.tolist()}",
            )
        if self.bucket_bounds is not None:
            num_bounds = [bounds.numel() for bounds in self.bucket_bounds]
            check(
                num_bounds == [num_buckets + 1] * num_features,
                f"block_bucketize_pos must have my_size + 1 = {num_buckets + 1} entries for each "
                f"of {num_features} features, got {num_bounds}",
            )


@operator("block_bucketize_sparse_features_inference")
def block_bucketize_sparse_features_inference(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: SymInt,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: SymInt = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Distribute lookups over `my_size` buckets by blocks of rows.

    Args:
        lengths: lookups of each bag, `[F * B]`.
        indices: int32 or int64 `[L]`, not negative.
        bucketize_pos: whether to return positions in the bag.
        sequence: whether to return the position of each index in the result.
        block_sizes: rows per block, `[F]`; 0 spreads all rows of the feature.
        my_size: number of buckets.
        weights: `[L]` or `[L, ...]`, or None.
        batch_size_per_feature: number of bags of each feature, `[F]`; None if all have B.
        max_B: ignored.
        block_bucketize_pos: first row of each bucket, and the end, `[my_size + 1]` per feature;
            None if all buckets have the same number of blocks.
        return_bucket_mapping: whether to return the bucket of each index.
        keep_orig_idx: whether the rows of the result are those of `indices`, not of the bucket.
        total_num_blocks: number of blocks, `[F]`, multiples of `my_size`; None for one per bucket.
        keep_orig_idx_per_feature: `keep_orig_idx` of each feature, bool `[F]`, which replaces it.

    Returns:
        six tensors, or None for those that were not asked for: the number of lookups per bucket
        and bag, `[my_size * F * B]`; then, sorted by bucket and bag, the rows `[L]` within the
        bucket, the weights, and the positions in the bag `[L]`; then, in the order of `indices`,
        the position of each index among the sorted ones `[L]`, and its bucket `[L]`.

    Raises:
        RuntimeError: sizes or dtypes of the tensors do not fit each other, or `my_size` < 1.
    """
    lengths = lengths.flatten()
    block_arguments = _BlockArguments(
        block_sizes,
        batch_size_per_feature,
        block_bucketize_pos,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )
    block_arguments.check(lengths.numel(), my_size)
    check_ids("indices", indices)
    check(
        weights is None or weights.size(0) == indices.numel(),
        f"weights must have one entry per index = {indices.numel()}, got {_shape(weights)}",
    )
    is_simple = block_bucketize_pos is None and total_num_blocks is None
    if is_simple and block_sizes.numel() and not return_bucket_mapping:
        bucketed = _bucketize_natively(
            lengths, indices, block_sizes, batch_size_per_feature, my_size
        )
    else:
        bag_of_lookup, feature_of_lookup = _bags_and_features(
            lengths, indices, block_sizes, batch_size_per_feature
        )
        if block_bucketize_pos is None:
            bucket_of_lookup, row = _split_evenly(
                indices, feature_of_lookup, block_sizes, total_num_blocks, my_size
            )
        else:
            bucket_of_lookup, row = _split_at(indices, feature_of_lookup, block_arguments, my_size)
        positions, bucketed_lengths = _group_by_bucket(
            lengths, bag_of_lookup, bucket_of_lookup, my_size
        )
        bucketed = _BucketedLookups(
            bucketed_lengths, row[positions], positions, bucket_of_lookup.to(indices.dtype)
        )
    rows = bucketed.rows
    if keep_orig_idx_per_feature is not None:
        _, feature_of_lookup = _bags_and_features(
            lengths, indices, block_sizes, batch_size_per_feature
        )
        keeps_row = keep_orig_idx_per_feature.bool()[feature_of_lookup]
        rows = torch.where(keeps_row[bucketed.positions], indices[bucketed.positions], rows)
    elif keep_orig_idx:
        rows = indices[bucketed.positions]
    return (
        bucketed.lengths,
        rows,
        None if weights is None else weights[bucketed.positions],
        _bag_positions(lengths, indices)[bucketed.positions] if bucketize_pos else None,
        invert_permute(bucketed.positions).to(indices.dtype) if sequence else None,
        bucketed.bucket_of_lookup if return_bucket_mapping else None,
    )


# Number of arguments before `return_bucket_mapping`, which the other operators do not have.
_NUM_POSITIONAL = 10
_TRAILING_NAMES = ("keep_orig_idx", "total_num_blocks", "keep_orig_idx_per_feature")
"""The arguments after `return_bucket_mapping`."""


def _bucketize(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call the inference operator without `return_bucket_mapping`; drop its last result."""
    trailing_arguments = dict(zip(_TRAILING_NAMES, arguments[_NUM_POSITIONAL:], strict=False))
    bucketize: Any = block_bucketize_sparse_features_inference
    return bucketize(*arguments[:_NUM_POSITIONAL], **trailing_arguments, **options)[:-1]


@operator(
    f"block_bucketize_sparse_features{_LEADING}Tensor? weights=None, {_OPTIONAL}{_TRAILING}"
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?)"
)
def block_bucketize_sparse_features(*arguments: Any, **options: Any) -> _Buckets:
    """Distribute lookups as `block_bucketize_sparse_features_inference`; return no buckets."""
    result: _Buckets = _bucketize(arguments, options)
    return result


@operator(
    f"block_bucketize_sparse_features_2d_weights{_LEADING}Tensor weights, SymInt weights_dim=1, "
    f"{_OPTIONAL}{_TRAILING}(Tensor, Tensor, Tensor, Tensor?, Tensor?)"
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
    *arguments: Any,
    **options: Any,
) -> _Buckets:
    """Distribute lookups as `block_bucketize_sparse_features`, with weights `[L, weights_dim]`."""
    leading_arguments = lengths, indices, bucketize_pos, sequence, block_sizes, my_size
    weight_rows = weights.view(-1, weights_dim)
    result: _Buckets = _bucketize((*leading_arguments, weight_rows, *arguments), options)
    return result


@operator("populate_bucketized_permute")
def populate_bucketized_permute(
    lengths: Tensor, bucketized_lengths: Tensor, bucket_mapping: Tensor
) -> Tensor:
    """Return the position of each lookup among the lookups sorted by bucket and bag, `[L]`.

    Args:
        lengths: number of lookups per bag, `[bags]`.
        bucketized_lengths: number of lookups per bucket and bag, `[buckets * bags]`.
        bucket_mapping: bucket of each lookup, `[L]`; the result has its dtype.

    Raises:
        RuntimeError: the sum of `lengths` or of `bucketized_lengths` is not L.
    """
    lengths = lengths.flatten()
    check(
        int(bucketized_lengths.sum()) == bucket_mapping.numel(),
        f"bucketized_lengths must sum up to the number of lookups = {bucket_mapping.numel()}",
    )
    bag_of_lookup = _bag_of_lookups(lengths, bucket_mapping.numel())
    group_of_lookup = bucket_mapping.long() * lengths.numel() + bag_of_lookup
    return invert_permute(torch.sort(group_of_lookup, stable=True).indices).to(bucket_mapping.dtype)


@operator("bucketize_sparse_features")
def bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    my_size: SymInt,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Distribute lookups over buckets: row i goes to bucket `i % my_size`, as row `i // my_size`.

    Args:
        lengths: number of lookups per bag, `[bags]`.
        indices: int32 or int64 `[L]`.
        bucketize_pos: whether to return positions in the bag.
        my_size: number of buckets.
        weights: `[L]` or None.

    Returns:
        the number of lookups per bucket and bag, `[my_size * bags]`; then, sorted by bucket and
        bag, the rows within the bucket, the weights or None, and the positions in the bag or None.

    Raises:
        RuntimeError: sizes or dtypes of the tensors do not fit each other, or `my_size` < 1.
    """
    lengths = lengths.flatten()
    check_ids("indices", indices)
    check(my_size > 0, f"my_size must be > 0, got {my_size}")
    check_one_per("weights", weights, "index", indices.numel())
    bag_of_lookup = _bag_of_lookups(lengths, indices.numel())
    positions, bucketed_lengths = _group_by_bucket(
        lengths, bag_of_lookup, indices % my_size, my_size
    )
    bag_positions = _bag_positions(lengths, indices)[positions] if bucketize_pos else None
    bucketized_weights = None if weights is None else weights[positions]
    return bucketed_lengths, (indices // my_size)[positions], bucketized_weights, bag_positions


@operator("bounds_check_indices", writes="indices offsets warning weights")
def bounds_check_indices(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    max_B: SymInt = -1,
    b_t_map: Tensor | None = None,
    info_B_num_bits: int = -1,
    info_B_mask: int = -1,
    bounds_check_version: int = 1,
    prefetch_pipeline: bool = False,
) -> None:
    """Check rows and offsets; raise if they are invalid, or repair them in place.

    A repair clamps offsets, so that they increase and end at the number of lookups, and replaces
    rows outside their table by 0. Row -1 is valid: it is looked up as zeros. The host waits for a
    GPU.

    Args:
        rows_per_table: rows of the table of each feature, `[F]`.
        indices: `[L]`, written.
        offsets: `[bags + 1]`, written.
        bounds_check_mode: 0 (FATAL) raises, 1 (WARNING) warns and repairs, 2 (IGNORE) repairs.
            Other modes check only the sizes and dtypes of the tensors.
        warning: int64 `[1]`; mode 1 adds the number of repairs.
        weights: `[L]`, or empty for none; not written, though FBGEMM's schema says so.
        B_offsets: first bag of each feature, and the number of bags, if features differ in them.
        max_B: ignored.
        b_t_map: ignored.
        info_B_num_bits: ignored.
        info_B_mask: ignored.
        bounds_check_version: ignored.
        prefetch_pipeline: ignored.

    Raises:
        RuntimeError: sizes or dtypes of the tensors do not fit each other, or in mode 0 a row or
            an offset is invalid.
    """
    _check_sizes(rows_per_table, indices, offsets, weights, B_offsets)
    if bounds_check_mode not in (0, 1, 2):
        return
    num_lookups = indices.numel()
    repaired_offsets = offsets.clamp(0, num_lookups).cummax(0).values
    repaired_offsets[-1:] = num_lookups
    num_bags = offsets.numel() - 1
    lengths = repaired_offsets.diff()
    bag_of_lookup = _bag_of_lookups(lengths, int(lengths.sum()))
    if B_offsets is None:
        feature_of_lookup = bag_of_lookup // max(num_bags // max(rows_per_table.numel(), 1), 1)
    else:
        feature_of_lookup = (
            torch.searchsorted(B_offsets.to(bag_of_lookup.dtype), bag_of_lookup, right=True) - 1
        )
    checked_ids = indices[int(repaired_offsets[0]) :]  # ids before the first bag are not looked up
    num_rows = rows_per_table.long()[feature_of_lookup]
    is_invalid = (checked_ids < -1) | (checked_ids >= num_rows)
    num_repairs = int(is_invalid.sum()) + int((repaired_offsets != offsets).sum())
    if not num_repairs:
        return
    if bounds_check_mode == 0:
        raise RuntimeError(
            f"{num_repairs} indices or offsets are out of range: each index must be in [0, rows) "
            f"of its table (rows {rows_per_table.tolist()}), offsets must increase from 0 to "
            f"{num_lookups}"
        )
    if bounds_check_mode == 1:
        warning += num_repairs
        warnings.warn(
            f"emblib: repaired {num_repairs} indices or offsets out of range", stacklevel=2
        )
    checked_ids.masked_fill_(is_invalid, 0)
    offsets.copy_(repaired_offsets)


@operator("get_infos_metadata")
def get_infos_metadata(unused: Tensor, B: int, T: int) -> tuple[int, int]:
    """Divide 32 bits: the low bits are for the number of a bag, the others for its feature.

    Args:
        unused: ignored.
        B: number of bags per feature.
        T: number of features.

    Returns:
        the number of low bits, and their mask.

    Raises:
        RuntimeError: B or T is not positive, or both do not fit into 32 bits.
    """
    check(T > 0 and B > 0, f"B and T must be positive, got {B} and {T}")
    num_bits = 32 - T.bit_length()
    check(num_bits > 0 and 2**num_bits > B, f"{B} bags and {T} features do not fit into 32 bits")
    return num_bits, 2**num_bits - 1


@operator("generate_vbe_metadata")
def generate_vbe_metadata(
    B_offsets: Tensor,
    B_offsets_rank_per_feature: Tensor,
    output_offsets_feature_rank: Tensor,
    D_offsets: Tensor,
    D: int,
    nobag: bool,
    max_B_feature_rank: SymInt,
    info_B_num_bits: int,
    total_B: SymInt,
    vbe_output_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the first output element of each bag of a variable batch, and its number and feature.

    Both results are `[total_B]`. The second one has number and feature of a bag in one int32: the
    number, within the feature, is in the low `info_B_num_bits` bits.

    Args:
        B_offsets: first bag of each feature, and the end, `[T + 1]`.
        B_offsets_rank_per_feature: first bag of each rank within the feature, and the end,
            `[T, ranks + 1]`.
        output_offsets_feature_rank: first output element by rank and feature, `[ranks * T + 1]`.
        D_offsets: first column of each feature, and the end, `[T + 1]`; not read with `nobag`.
        D: number of columns of every feature with `nobag`; else ignored.
        nobag: whether there is no pooling.
        max_B_feature_rank: ignored.
        info_B_num_bits: number of low bits, as `get_infos_metadata` returns it.
        total_B: number of bags.
        vbe_output_offsets: first output element of each bag, which is returned; None computes it.

    Raises:
        RuntimeError: `vbe_output_offsets` does not have one entry per bag.
    """
    check_one_per("vbe_output_offsets", vbe_output_offsets, "bag", total_B)
    num_features = B_offsets.numel() - 1
    bag = torch.arange(total_B, device=B_offsets.device)
    feature_of_bag = torch.searchsorted(B_offsets.long(), bag, right=True) - 1
    bag_in_feature = bag - B_offsets[feature_of_bag]
    rank_starts = B_offsets_rank_per_feature.long()[feature_of_bag]
    rank_of_bag = (rank_starts[:, 1:] <= bag_in_feature.unsqueeze(1)).sum(1)
    num_columns = torch.full_like(bag, D) if nobag else D_offsets.diff()[feature_of_bag]
    bag_in_rank = bag_in_feature - rank_starts.gather(1, rank_of_bag.unsqueeze(1)).squeeze(1)
    first_elements = (
        output_offsets_feature_rank[rank_of_bag * num_features + feature_of_bag]
        + bag_in_rank * num_columns
    )
    if vbe_output_offsets is not None:
        first_elements = vbe_output_offsets
    return first_elements, ((feature_of_bag << info_B_num_bits) | bag_in_feature).int()


@operator(
    "transpose_embedding_input(Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, "
    "Tensor offsets, bool nobag=False, Tensor? vbe_b_t_map=None, int info_B_num_bits=26, "
    "int info_B_mask=0x2FFFFFF, int total_unique_indices=-1, bool is_index_select=False, "
    "Tensor? total_L_offsets=None, int fixed_L_per_warp=0, int num_warps_per_feature=0) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def transpose_embedding_input(
    hash_size_cumsum: Tensor,
    total_hash_size_bits: int,
    indices: Tensor,
    offsets: Tensor,
    nobag: bool = False,
    vbe_b_t_map: Tensor | None = None,
    info_B_num_bits: int = 26,
    info_B_mask: int = 0x2FFFFFF,
    total_unique_indices: int = -1,
    is_index_select: bool = False,
    total_L_offsets: Tensor | None = None,
    fixed_L_per_warp: int = 0,
    num_warps_per_feature: int = 0,
) -> tuple[Tensor, ...]:
    """Sort the lookups of a batch by row, for a backward pass.

    Args:
        hash_size_cumsum: number of rows of all tables before the table of a feature, and of all
            tables, `[F + 1]`.
        indices: int32 or int64 `[L]`.
        offsets: `[F * B + 1]`.
        nobag: whether there is no pooling.
        vbe_b_t_map: number and feature of each bag of a variable batch, as `generate_vbe_metadata`
            returns them; None if all features have B bags.
        info_B_num_bits: number of low bits of the number of a bag.
        is_index_select: flag that must be False.
        total_hash_size_bits: ignored.
        info_B_mask: ignored.
        total_unique_indices: ignored.
        total_L_offsets: ignored.
        fixed_L_per_warp: ignored.
        num_warps_per_feature: ignored.

    Returns:
        the linear row of each lookup, `hash_size_cumsum[feature] + index`, `[L]`; these, sorted;
        the number and feature of the bag of each sorted lookup in one int32 or, with `nobag`,
        `position * F + feature`, int64; the distinct rows, padded with zeros to `[L]`; the number
        of lookups of each row, padded to `[L]`; the number of distinct rows, `[1]`; the sums of the
        first 0, 1, ... numbers of lookups, padded to `[L + 1]`.

    Raises:
        RuntimeError: `is_index_select` is set, or there are no features.
    """
    check(not is_index_select, "is_index_select is not supported: use batch_index_select_dim0")
    num_features = hash_size_cumsum.numel() - 1
    check(num_features > 0, "hash_size_cumsum must have at least 2 entries, those of one feature")
    batch_size = max((offsets.numel() - 1) // num_features, 1)
    bag_of_lookup = _bag_of_lookups(offsets.diff(), indices.numel())
    feature_of_lookup = bag_of_lookup // batch_size
    bag_info = (feature_of_lookup << info_B_num_bits) | bag_of_lookup % batch_size
    if vbe_b_t_map is not None:
        bag_info = vbe_b_t_map[bag_of_lookup].long() & 0xFFFFFFFF
        feature_of_lookup = bag_info >> info_B_num_bits
    if nobag:
        bag_info = (
            torch.arange(indices.numel(), device=indices.device) * num_features + feature_of_lookup
        )
    linear_rows = indices + hash_size_cumsum[feature_of_lookup].to(indices.dtype)
    sorted_rows, positions = torch.sort(linear_rows, stable=True)
    distinct_rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    padding = (0, indices.numel() - distinct_rows.numel())
    count_sums = functional.pad(counts.cumsum(0), (1, 0))
    return (
        linear_rows,
        sorted_rows,
        bag_info[positions].to(torch.int64 if nobag else torch.int32),
        functional.pad(distinct_rows, padding),
        functional.pad(counts, padding).int(),
        torch.tensor([distinct_rows.numel()], dtype=torch.int32, device=indices.device),
        functional.pad(count_sums, padding).int(),
    )


def _check_sizes(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    batch_offsets: Tensor | None,
) -> None:
    """Raise RuntimeError unless sizes and dtypes of the tensors of a lookup fit each other."""
    check_ids("rows_per_table", rows_per_table)
    check_ids("indices", indices)
    check_offsets("offsets", offsets)
    if weights is not None and weights.numel():  # empty ones are none, as in FBGEMM
        check_one_per("weights", weights, "index", indices.numel())
    num_tables, num_bags = rows_per_table.numel(), offsets.numel() - 1
    if batch_offsets is None:
        check(
            num_bags == 0 or (num_tables > 0 and num_bags % num_tables == 0),
            f"offsets must have B * T + 1 entries for T = {num_tables} tables, got {num_bags + 1}",
        )
        return
    first_bags = batch_offsets.tolist()
    check(
        len(first_bags) == num_tables + 1
        and first_bags == sorted(first_bags)
        and first_bags[::num_tables] == [0, num_bags],
        f"B_offsets must have T + 1 = {num_tables + 1} entries that increase from 0 to the number "
        f"of bags = {num_bags}, got {first_bags}",
    )
