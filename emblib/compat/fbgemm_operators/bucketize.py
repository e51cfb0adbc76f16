"""Operators that distribute lookups over ranks by their rows, and that check lookups."""

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
"""Lengths, rows, weights, positions in the bag, and where each index is in the result."""

# Parts of the schemas of block_bucketize_sparse_features and its variants, in this order:
# _LEADING, weights, _OPTIONAL, _TRAILING, results.
_OPTIONAL = (
    "Tensor? batch_size_per_feature=None, SymInt max_B=-1, Tensor[]? block_bucketize_pos=None, "
)
_TRAILING = (
    "bool keep_orig_idx=False, Tensor? total_num_blocks=None, "
    "Tensor? keep_orig_idx_per_feature=None) -> "
)
_LEADING = (
    "(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence, Tensor block_sizes, "
    "SymInt my_size, "
)


def _bag_of_lookups(lengths: Tensor, total: int) -> Tensor:
    """Return the bag of each of `total` lookups, int64 `[total]`."""
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return bags.repeat_interleave(lengths, output_size=total)


def _bags_and_features(
    lengths: Tensor, indices: Tensor, block_sizes: Tensor, batch_sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bag and feature of each lookup, int64 `[L]`."""
    bag = _bag_of_lookups(lengths, indices.numel())
    if batch_sizes is None:
        return bag, bag // max(lengths.numel() // max(block_sizes.numel(), 1), 1)
    return bag, _bag_of_lookups(batch_sizes, lengths.numel())[bag]


def _group(lengths: Tensor, bag: Tensor, bucket: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the stable order of lookups by bucket and bag, and the lengths `[buckets * bags]`."""
    slot = bucket * lengths.numel() + bag
    order = torch.sort(slot, stable=True).indices
    counts = torch.zeros(buckets * lengths.numel(), dtype=lengths.dtype, device=lengths.device)
    return order, counts.scatter_add(0, slot, torch.ones_like(slot, dtype=lengths.dtype))


def _bag_positions(lengths: Tensor, indices: Tensor) -> Tensor:
    """Return the position of each lookup in its bag, `[L]`, in the dtype of `indices`."""
    lengths = lengths.to(indices.dtype)
    return segment_positions(torch.zeros_like(lengths), lengths, indices.numel())


class _Bucketed(NamedTuple):
    """Lookups in the order of the result: by bucket, then by bag."""

    lengths: Tensor  # lookups per bucket and bag, [buckets * bags]
    rows: Tensor  # [L], within the bucket
    positions: Tensor  # int64 [L], of each in the input
    bucket: Tensor | None  # [L], of each lookup of the input; None if not computed


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
    """Return bucket and local row, for buckets that have the same number of blocks.

    A row beyond the blocks of its table is spread: block `row % blocks`, local row `row // blocks`.
    """
    block = block_sizes.to(indices.dtype)[feature]
    if total_num_blocks is None:
        total = torch.full_like(block, buckets)
    else:
        total = total_num_blocks.to(indices.dtype)[feature]
    blocks = total // buckets
    size = (block * blocks).clamp(min=1)  # blocks of 0 rows: all rows are spread
    is_in_block = indices < block * total
    bucket = torch.where(is_in_block, indices // size, indices % total // blocks)
    return bucket, torch.where(is_in_block, indices % size, indices // total)


def _split_at(
    indices: Tensor, feature: Tensor, blocks: "_Blocks", buckets: int
) -> tuple[Tensor, Tensor]:
    """Return bucket and local row, for buckets that begin at `bounds` of each feature.

    A feature with blocks of 0 rows has raw ids, which are spread over its blocks and bounds.
    """
    bucket, row = indices % buckets, indices // buckets
    for feature_index, starts in enumerate(blocks.bounds or ()):
        starts = starts.to(indices.dtype)
        is_raw = blocks.sizes[feature_index] == 0
        count = (
            torch.full_like(starts[0], buckets)
            if blocks.total is None
            else blocks.total[feature_index]
        )
        spread = indices % count * starts[-1] // count
        position = torch.where(is_raw, spread, indices)
        block = torch.searchsorted(starts, position, right=True) - 1
        is_in_block = (feature == feature_index) & (block >= 0) & (block < buckets)
        block = block.clamp(0, buckets - 1)
        bucket = torch.where(is_in_block, block, bucket)
        local = torch.where(is_raw, indices // count, indices - starts[block])
        row = torch.where(is_in_block, local.to(row.dtype), row)
    return bucket, row


def _shape(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else list(tensor.shape)


class _Blocks(NamedTuple):
    """The arguments that say which rows of each feature a bucket has, with F features.

    Attributes:
        sizes: rows per block, `[F]`; 0 spreads all rows.
        batch_sizes: number of bags, `[F]`; None if all features have as many.
        bounds: first row of each bucket, and the end, `[buckets + 1]` per feature; None for buckets
            of equally many blocks.
        total: number of blocks, `[F]`, a multiple of the buckets; None for one per bucket.
        keep: whether the rows of a feature stay global, `[F]`; None for no feature.
    """

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
                f"each of total_num_blocks must be a multiple of my_size = {buckets}, got "
                f"{self.total.tolist()}",
            )
        if self.bounds is not None:
            sizes = [bounds.numel() for bounds in self.bounds]
            check(
                sizes == [buckets + 1] * features,
                f"block_bucketize_pos must have my_size + 1 = {buckets + 1} entries for each of "
                f"{features} features, got {sizes}",
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
        bucketize_pos: whether positions in the bag are returned.
        sequence: whether the position of each index in the result is returned.
        block_sizes: rows per block, `[F]`; 0 spreads all rows of the feature.
        my_size: number of buckets.
        weights: `[L]` or `[L, ...]`.
        batch_size_per_feature: number of bags, `[F]`, if features differ in them.
        max_B: ignored.
        block_bucketize_pos: first row of each bucket, and the end, per feature.
        return_bucket_mapping: whether the bucket of each index is returned.
        keep_orig_idx: whether rows stay as they are in `indices`.
        total_num_blocks: number of blocks, `[F]`; by default one per bucket.
        keep_orig_idx_per_feature: the same by feature, `[F]`; `keep_orig_idx` is ignored then.

    Returns:
        lengths `[my_size * F * B]`, rows within the bucket, weights, positions in the bag, where
        in the result each of `indices` is, and the bucket of each of `indices`.

    Raises:
        RuntimeError: tensors that do not fit each other.
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
        buckets = _bucketize_natively(
            lengths, indices, block_sizes, batch_size_per_feature, my_size
        )
    else:
        bag, feature = _bags_and_features(lengths, indices, block_sizes, batch_size_per_feature)
        if block_bucketize_pos is None:
            bucket, row = _split_evenly(indices, feature, block_sizes, total_num_blocks, my_size)
        else:
            bucket, row = _split_at(indices, feature, blocks, my_size)
        order, counts = _group(lengths, bag, bucket, my_size)
        buckets = _Bucketed(counts, row[order], order, bucket.to(indices.dtype))
    rows = buckets.rows
    if keep_orig_idx_per_feature is not None:
        _, feature = _bags_and_features(lengths, indices, block_sizes, batch_size_per_feature)
        keeps_row = keep_orig_idx_per_feature.bool()[feature]
        rows = torch.where(keeps_row[buckets.positions], indices[buckets.positions], rows)
    elif keep_orig_idx:
        rows = indices[buckets.positions]
    return (
        buckets.lengths,
        rows,
        None if weights is None else weights[buckets.positions],
        _bag_positions(lengths, indices)[buckets.positions] if bucketize_pos else None,
        invert_permute(buckets.positions).to(indices.dtype) if sequence else None,
        buckets.bucket if return_bucket_mapping else None,
    )


_NUM_POSITIONAL = 10  # positional arguments before `return_bucket_mapping`, which variants lack
_TRAILING_NAMES = ("keep_orig_idx", "total_num_blocks", "keep_orig_idx_per_feature")
"""The arguments that follow `return_bucket_mapping`."""


def _bucketize(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call the inference operator without `return_bucket_mapping`; drop its last result."""
    trailing = dict(zip(_TRAILING_NAMES, arguments[_NUM_POSITIONAL:], strict=False))
    bucketize: Any = block_bucketize_sparse_features_inference
    return bucketize(*arguments[:_NUM_POSITIONAL], **trailing, **options)[:-1]


@operator(
    f"block_bucketize_sparse_features{_LEADING}Tensor? weights=None, {_OPTIONAL}{_TRAILING}"
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?)"
)
def block_bucketize_sparse_features(*arguments: Any, **options: Any) -> _Buckets:
    """Distribute lookups as `block_bucketize_sparse_features_inference`, without the buckets."""
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
    leading = lengths, indices, bucketize_pos, sequence, block_sizes, my_size
    rows = weights.view(-1, weights_dim)
    result: _Buckets = _bucketize((*leading, rows, *arguments), options)
    return result


@operator("populate_bucketized_permute")
def populate_bucketized_permute(
    lengths: Tensor, bucketized_lengths: Tensor, bucket_mapping: Tensor
) -> Tensor:
    """Return where each lookup is among the lookups by bucket and bag.

    Args:
        lengths: lookups of each bag, `[bags]`.
        bucketized_lengths: lookups of each bag of each bucket, `[buckets * bags]`.
        bucket_mapping: bucket of each lookup.
    """
    lengths = lengths.flatten()
    check(
        int(bucketized_lengths.sum()) == bucket_mapping.numel(),
        f"bucketized_lengths must sum up to the number of lookups = {bucket_mapping.numel()}",
    )
    bag = _bag_of_lookups(lengths, bucket_mapping.numel())
    slot = bucket_mapping.long() * lengths.numel() + bag
    return invert_permute(torch.sort(slot, stable=True).indices).to(bucket_mapping.dtype)


@operator("bucketize_sparse_features")
def bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    my_size: SymInt,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Distribute lookups over `my_size` buckets round robin.

    Row i becomes row `i // my_size` of bucket `i % my_size`. The results are lengths
    `[my_size * bags]`, rows, weights, and with `bucketize_pos` positions in the bag.
    """
    lengths = lengths.flatten()
    check_ids("indices", indices)
    check(my_size > 0, f"my_size must be > 0, got {my_size}")
    check_one_per("weights", weights, "index", indices.numel())
    bag = _bag_of_lookups(lengths, indices.numel())
    order, counts = _group(lengths, bag, indices % my_size, my_size)
    position = _bag_positions(lengths, indices)[order] if bucketize_pos else None
    bucketized_weights = None if weights is None else weights[order]
    return counts, (indices // my_size)[order], bucketized_weights, position


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
    """Check rows and offsets: mode 0 raises, 1 warns and repairs, 2 repairs, in place.

    Offsets are clamped to be increasing and to end at the number of lookups; rows outside their
    table become 0; row -1 stays. Tensors of other sizes or dtypes raise in every mode; modes other
    than 0, 1 and 2 check nothing else. Waits for a GPU.

    Args:
        rows_per_table: rows of the table of each feature, `[F]`.
        indices: `[L]`, written.
        offsets: `[bags + 1]`, written.
        bounds_check_mode: mode, 0, 1 or 2.
        warning: int64 `[1]`; mode 1 adds the number of repairs.
        weights: `[L]`, or empty for none; not written.
        B_offsets: first bag of each feature, and the number of bags, if features differ in them.
        max_B: ignored.
        b_t_map: ignored.
        info_B_num_bits: ignored.
        info_B_mask: ignored.
        bounds_check_version: ignored.
        prefetch_pipeline: ignored.
    """
    _check_sizes(rows_per_table, indices, offsets, weights, B_offsets)
    if bounds_check_mode not in (0, 1, 2):
        return
    total = indices.numel()
    repaired = offsets.clamp(0, total).cummax(0).values
    repaired[-1:] = total
    bags = offsets.numel() - 1
    lengths = repaired.diff()
    bag = _bag_of_lookups(lengths, int(lengths.sum()))
    if B_offsets is None:
        feature = bag // max(bags // max(rows_per_table.numel(), 1), 1)
    else:
        feature = torch.searchsorted(B_offsets.to(bag.dtype), bag, right=True) - 1
    checked_ids = indices[int(repaired[0]) :]  # ids before the first bag are not looked up
    rows = rows_per_table.long()[feature]
    is_invalid = (checked_ids < -1) | (checked_ids >= rows)
    count = int(is_invalid.sum()) + int((repaired != offsets).sum())
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
    checked_ids.masked_fill_(is_invalid, 0)
    offsets.copy_(repaired)


@operator("get_infos_metadata")
def get_infos_metadata(unused: Tensor, B: int, T: int) -> tuple[int, int]:
    """Return the bits of a bag's number in 32 bits that also have its feature, and their mask."""
    check(T > 0 and B > 0, f"B and T must be positive, got {B} and {T}")
    bits = 32 - T.bit_length()
    check(bits > 0 and 2**bits > B, f"{B} bags and {T} features do not fit into 32 bits")
    return bits, 2**bits - 1


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
    """Return the first output element of each bag of a variable batch, and its feature and number.

    Args:
        B_offsets: first bag of each feature, and the end, `[T + 1]`.
        B_offsets_rank_per_feature: the same of each rank within its feature, `[T, ranks + 1]`.
        output_offsets_feature_rank: first output element by rank and feature, `[ranks * T + 1]`.
        D_offsets: first column of each feature, and the end.
        D: columns without pooling.
        nobag: whether there is no pooling.
        max_B_feature_rank: ignored.
        info_B_num_bits: bits of the number of a bag, below the bits of its feature.
        total_B: number of bags.
        vbe_output_offsets: first output element of each bag, instead of the computed.
    """
    features = B_offsets.numel() - 1
    bag = torch.arange(total_B, device=B_offsets.device)
    feature = torch.searchsorted(B_offsets.long(), bag, right=True) - 1
    number = bag - B_offsets[feature]
    starts = B_offsets_rank_per_feature.long()[feature]
    rank = (starts[:, 1:] <= number.unsqueeze(1)).sum(1)
    width = torch.full_like(bag, D) if nobag else D_offsets.diff()[feature]
    within = number - starts.gather(1, rank.unsqueeze(1)).squeeze(1)
    first = output_offsets_feature_rank[rank * features + feature] + within * width
    if vbe_output_offsets is not None:
        first = vbe_output_offsets
    return first, ((feature << info_B_num_bits) | number).int()


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
    """Sort lookups by row, for backward passes.

    Only `hash_size_cumsum` `[F + 1]`, `indices` `[L]`, `offsets` `[F * B + 1]`, `nobag`,
    `vbe_b_t_map` and `info_B_num_bits`, both of variable batches, have an effect.

    Returns:
        the linear row of each lookup, `hash_size_cumsum[feature] + index`, `[L]`; these, sorted;
        the bag of each sorted lookup or, with `nobag`, its position and feature; the distinct rows,
        padded to `[L]`; the number of lookups of each, padded to `[L]`; the number of distinct
        rows, `[1]`; the running sums of the numbers of lookups, padded to `[L + 1]`.
    """
    check(not is_index_select, "is_index_select is not supported: use batch_index_select_dim0")
    features = hash_size_cumsum.numel() - 1
    batch_size = (offsets.numel() - 1) // features
    bag = _bag_of_lookups(offsets.diff(), indices.numel())
    info = (bag // max(batch_size, 1) << info_B_num_bits) | bag % max(batch_size, 1)
    feature = bag // max(batch_size, 1)
    if vbe_b_t_map is not None:
        info = vbe_b_t_map[bag].long() & 0xFFFFFFFF
        feature = info >> info_B_num_bits
    if nobag:
        info = torch.arange(indices.numel(), device=indices.device) * features + feature
    linear = indices + hash_size_cumsum[feature].to(indices.dtype)
    sorted_linear, order = torch.sort(linear, stable=True)
    rows, counts = torch.unique_consecutive(sorted_linear, return_counts=True)
    fill = (0, indices.numel() - rows.numel())
    sums = functional.pad(counts.cumsum(0), (1, 0))
    return (
        linear,
        sorted_linear,
        info[order].to(torch.int64 if nobag else torch.int32),
        functional.pad(rows, fill),
        functional.pad(counts, fill).int(),
        torch.tensor([rows.numel()], dtype=torch.int32, device=indices.device),
        functional.pad(sums, fill).int(),
    )


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
