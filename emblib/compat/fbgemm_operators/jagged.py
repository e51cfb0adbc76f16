"""Operators on jagged data: offsets, permutations, padding, selection, deduplication.

Names and arguments are FBGEMM's. Values are divided into segments: segment i has `lengths[i]`
values, `offsets[i]` to `offsets[i + 1]`. Lengths and offsets are int32 or int64; results have the
device of the arguments. An operator waits for a GPU if it must read the size of its result there,
unless the caller passes the size, e.g. as `permuted_lengths_sum` or `total_L`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import check, check_ids, check_offsets, check_one_per
from emblib.compat.fbgemm_operators.registry import SymInt, operator
from emblib.ops import route

_PermutedBatch = tuple[Tensor, Tensor, Tensor | None]
"""Lengths, values, and weights or None, of permuted segments."""


# Offsets


@operator("asynchronous_complete_cumsum")
def complete_cumsum(t_in: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ..., n entries of the last dimension, `[..., n + 1]`."""
    if t_in.is_floating_point():
        return functional.pad(t_in.cumsum(-1), (1, 0))
    # Not by padding: that copies all sums once more, which took half of the time for lengths.
    sums = t_in.new_empty((*t_in.shape[:-1], t_in.shape[-1] + 1))
    sums[..., 0] = 0
    torch.cumsum(t_in, -1, dtype=t_in.dtype, out=sums[..., 1:])
    return sums


operator("asynchronous_batched_complete_cumsum(Tensor values) -> Tensor")(complete_cumsum)


@operator("asynchronous_inclusive_cumsum")
def inclusive_cumsum(t_in: Tensor) -> Tensor:
    """Return the sums of the first 1, ..., n entries of the flat input, in the input's shape."""
    return t_in.flatten().cumsum(0, dtype=t_in.dtype).view_as(t_in)


@operator("asynchronous_exclusive_cumsum")
def exclusive_cumsum(t_in: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ..., n - 1 entries of the flat input, in its shape."""
    return inclusive_cumsum(t_in) - t_in


def segment_positions(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return the positions of all values of the segments, segment after segment.

    Segment i has the positions `starts[i], starts[i] + 1, ...`, `lengths[i]` of them.

    Args:
        starts: position of the first value of each segment, int32 or int64 `[n]`.
        lengths: number of values of each segment, int32 or int64 `[n]`.
        total: sum of `lengths`; None computes it, which waits for a GPU.

    Returns:
        int64 `[total]`, or int32 if both arguments are int32.

    Raises:
        RuntimeError: `total` is not the sum of `lengths` (checked on a CPU only).
    """
    shift = starts - exclusive_cumsum(lengths)
    shift = torch.repeat_interleave(shift, lengths, output_size=total)
    return shift + torch.arange(shift.numel(), dtype=shift.dtype, device=shift.device)


@operator("offsets_range")
def offsets_range(offsets: Tensor, range_size: SymInt) -> Tensor:
    """Return the position of each value within its segment, `[range_size]`.

    Args:
        offsets: first value of each segment, `[n]`, from 0 on; the last one ends at `range_size`.
        range_size: number of values.
    """
    end = torch.full_like(offsets[:1], range_size)
    lengths = torch.cat([offsets, end]).diff()
    return segment_positions(torch.zeros_like(offsets), lengths, range_size)


@operator("lengths_range")
def lengths_range(t_in: Tensor, shape: Sequence[SymInt] | None = None) -> Tensor:
    """Return 0, 1, ..., length - 1 for each length, concatenated.

    The result has the shape `shape`, of as many entries; with None it is flat, and a GPU is waited
    for.
    """
    lengths = t_in.flatten()
    total = None
    if shape is not None:
        total = 1
        for size in shape:
            total *= size
    result = segment_positions(torch.zeros_like(lengths), lengths, total)
    return result if shape is None else result.view(list(shape))


@operator("segment_sum_csr")
def segment_sum_csr(batch_size: SymInt, csr_seg: Tensor, values: Tensor) -> Tensor:
    """Return the sum of each segment of `values`, whose offsets are `batch_size * csr_seg`.

    Args:
        batch_size: factor of the offsets.
        csr_seg: int32 or int64 `[n + 1]`.
        values: `[L]` or, for floating-point values, `[L, ...]`.

    Raises:
        RuntimeError: offsets on a CPU decrease or are outside [0, L].
    """
    check_offsets("csr_seg", csr_seg)
    offsets, is_float = csr_seg.long() * batch_size, values.is_floating_point()
    if offsets.device.type == "cpu" and type(offsets) is Tensor:  # no fake tensor of a traced graph
        check(
            int(offsets[0]) >= 0
            and int(offsets[-1]) <= values.size(0)
            and bool((offsets.diff() >= 0).all()),
            "batch_size * csr_seg must increase within the number of values = "
            f"{values.size(0)}, got {offsets.tolist()}",
        )
        values = values[: int(offsets[-1])]
    if is_float:
        return torch.segment_reduce(values, "sum", lengths=offsets.diff(), initial=0.0, unsafe=True)
    sums = functional.pad(values.cumsum(0, dtype=torch.int64), (1, 0))
    return sums.index_select(0, offsets).diff().to(values.dtype)


# Permutations


@operator("invert_permute")
def invert_permute(permute: Tensor) -> Tensor:
    """Return the inverse of a permutation `[n]`, in the same dtype; it is not checked."""
    order = torch.arange(permute.numel(), dtype=permute.dtype, device=permute.device)
    return torch.zeros_like(permute).scatter(0, permute.long(), order)


def _select(
    values: Tensor, weights: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    selected_weights = None if weights is None else weights.index_select(0, positions)
    return values.index_select(0, positions), selected_weights


@operator("permute_1D_sparse_data")
def permute_1d_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: SymInt | None = None,
) -> _PermutedBatch:
    """Return lengths, values and weights of the segments that `permute` selects, in its order.

    Args:
        permute: segments, int32 or int64 `[n]`; some may be missing or repeated.
        lengths: `[S]`.
        values: `[L, ...]`.
        weights: `[L, ...]` or None.
        permuted_lengths_sum: number of values of the result; None computes it.

    Raises:
        IndexError: a segment of `permute` does not exist.
        RuntimeError: the values do not have all selected segments, or `permuted_lengths_sum` is
            wrong.
    """
    permuted_lengths = lengths.index_select(0, permute)
    total = int(permuted_lengths.sum()) if permuted_lengths_sum is None else permuted_lengths_sum
    starts, order = complete_cumsum(lengths.long()), permute.long()
    permuted_weights = (
        None if weights is None else route.gather_segments(weights, starts, order, total)
    )
    return permuted_lengths, route.gather_segments(values, starts, order, total), permuted_weights


@operator("permute_2D_sparse_data")
def permute_2d_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: SymInt | None = None,
) -> _PermutedBatch:
    """Return lengths, values and weights of the features that `permute` selects.

    As `permute_1d_sparse_data`, for lengths `[T, B]` of T features, to lengths `[n, B]`.
    """
    _, permuted_values, permuted_weights = permute_1d_sparse_data(
        permute, lengths.sum(1), values, weights, permuted_lengths_sum
    )
    return lengths.index_select(0, permute), permuted_values, permuted_weights


operator(
    "permute_sparse_features(Tensor permute, Tensor lengths, Tensor indices, "
    "Tensor? weights=None) -> (Tensor, Tensor, Tensor?)"
)(permute_2d_sparse_data)


@operator("permute_sequence_embeddings")
def permute_sequence_embeddings(
    permute: Tensor, lengths: Tensor, embeddings: Tensor
) -> tuple[Tensor, Tensor]:
    """Permute lengths and values `[L, D]` as `permute_2D_sparse_data`, without weights."""
    return permute_2d_sparse_data(permute, lengths, embeddings)[:2]


@operator("permute_2D_sparse_data_input1D")
def permute_2d_sparse_data_input1d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    stride: SymInt,
    weights: Tensor | None = None,
    permuted_lengths_sum: SymInt | None = None,
) -> _PermutedBatch:
    """Permute as `permute_2D_sparse_data`; lengths are flat, `[T * stride]`."""
    permuted_lengths, permuted_values, permuted_weights = permute_2d_sparse_data(
        permute, lengths.view(-1, stride), values, weights, permuted_lengths_sum
    )
    return permuted_lengths.view(-1), permuted_values, permuted_weights


@operator(
    "permute_2D_sparse_preallocated_out(Tensor permute, Tensor lengths, Tensor values, "
    "Tensor? weights=None, SymInt? permuted_lengths_sum=None, "
    "Tensor(a!)? permuted_lengths_out=None, Tensor(b!)? permuted_indices_out=None, "
    "Tensor(c!)? permuted_weights_out=None) -> (Tensor(a!), Tensor(b!), Tensor(c!)?)"
)
def permute_2d_sparse_preallocated_out(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
    permuted_lengths_out: Tensor | None = None,
    permuted_indices_out: Tensor | None = None,
    permuted_weights_out: Tensor | None = None,
) -> _PermutedBatch:
    """Permute as `permute_2D_sparse_data`, and write the results to the `*_out` tensors.

    An output that is None is allocated. The outputs are returned.

    Raises:
        RuntimeError: an output has another shape than its result; nothing is written.
    """
    results = permute_2d_sparse_data(permute, lengths, values, weights, permuted_lengths_sum)
    outputs = permuted_lengths_out, permuted_indices_out, permuted_weights_out
    for result, output in zip(results, outputs, strict=True):
        check(
            output is None or result is None or output.shape == result.shape,
            "an output does not fit: it must have the shape of its result",
        )
    returned_tensors = [
        result if output is None or result is None else output.copy_(result)
        for result, output in zip(results, outputs, strict=True)
    ]
    return returned_tensors[0], returned_tensors[1], returned_tensors[2]  # type: ignore[return-value]


@operator("expand_into_jagged_permute")
def expand_into_jagged_permute(
    permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: SymInt
) -> Tensor:
    """Expand a permutation of segments to the permutation of their values.

    Args:
        permute: segments in their new order, `[S]`.
        input_offset: offsets of the segments in the old order, `[S + 1]`.
        output_offset: offsets in the new order, `[S + 1]`.
        output_size: number of values.

    Returns:
        the old position of each value of the new order, in the dtype of `permute`.

    Raises:
        RuntimeError: the numbers of entries do not fit each other.
    """
    check_one_per("input_offset", input_offset, "segment, and one more", permute.numel() + 1)
    check_one_per("output_offset", output_offset, "segment, and one more", permute.numel() + 1)
    starts = input_offset.index_select(0, permute).to(permute.dtype)
    return segment_positions(starts, output_offset.diff().to(permute.dtype), output_size)


# Padding


def _pad_level(values: Tensor, offsets: Tensor, max_length: int, padding: float) -> Tensor:
    """Pad the segments of `[L, ...]` to `[B, max_length, ...]`; cut longer ones."""
    check_offsets("offsets", offsets)
    column = torch.arange(max_length, dtype=offsets.dtype, device=offsets.device)
    row_indices = offsets[:-1].unsqueeze(1) + column
    # Row 0 is the padding. Offsets beyond the values select a row that does not exist, and raise.
    row_indices = torch.where(row_indices < offsets[1:].unsqueeze(1), row_indices + 1, 0)
    padding_row = values.new_full((1, *values.shape[1:]), padding)
    rows = torch.cat([padding_row, values]).index_select(0, row_indices.flatten())
    return rows.view(*row_indices.shape, *values.shape[1:])


def jagged_to_padded_dense(
    values: Tensor,
    offsets: Sequence[Tensor],
    max_lengths: Sequence[int],
    padding_value: float = 0.0,
) -> Tensor:
    """Pad jagged values to dense ones; cut longer segments.

    Args:
        values: `[L]` or `[L, D]`.
        offsets: offsets of each level; the last ones divide the values, each other ones the
            segments of the next level.
        max_lengths: number of entries per segment in the result, for each level.
        padding_value: value of the entries beyond a segment.

    Returns:
        `[B, *max_lengths]` or `[B, *max_lengths, D]`.

    Raises:
        IndexError: an entry of the result is a value that does not exist.
        RuntimeError: a level has no offsets or no maximum length, or offsets are empty or neither
            int32 nor int64.
    """
    check(
        len(offsets) == len(max_lengths),
        f"max_lengths must have one length per level of offsets = {len(offsets)}, got "
        f"{len(max_lengths)}",
    )
    for level_offsets, max_length in zip(reversed(offsets), reversed(max_lengths), strict=True):
        values = _pad_level(values, level_offsets, max_length, padding_value)
    return values


for _name in ("jagged_to_padded_dense", "jagged_to_padded_dense_forward"):
    operator(
        f"{_name}(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0.) "
        "-> Tensor"
    )(jagged_to_padded_dense)


@operator("jagged_2d_to_dense")
def jagged_2d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: SymInt) -> Tensor:
    """Pad the segments of `[L, D]` with zeros to `[B, max_sequence_length, D]`; cut longer ones."""
    return _pad_level(values, offsets, max_sequence_length, 0.0)


@operator("jagged_1d_to_dense")
def jagged_1d_to_dense(
    values: Tensor, offsets: Tensor, max_sequence_length: SymInt, padding_value: int
) -> Tensor:
    """Pad the segments of `[L]` to `[B, max_sequence_length]`; cut longer ones."""
    return _pad_level(values, offsets, max_sequence_length, padding_value)


@operator("dense_to_jagged")
def dense_to_jagged(
    dense: Tensor, x_offsets: Sequence[Tensor], total_L: SymInt | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Convert dense values to jagged ones, `[L, D]`, and return these and `x_offsets`.

    Args:
        dense: `[B, N, D]`, with one more dimension of entries per further level.
        x_offsets: offsets of each level, as in `jagged_to_padded_dense`. Entries of a segment
            beyond N are zeros.
        total_L: L, the last of the last offsets; None reads it.

    Raises:
        RuntimeError: offsets are missing, or do not fit `dense` or `total_L`.
        ValueError: `total_L` is negative.
    """
    num_levels = len(x_offsets)
    check(num_levels > 0, "x_offsets must have the offsets of at least one level, got none")
    for level_offsets in x_offsets:
        check_offsets("x_offsets", level_offsets)
    last_offsets = x_offsets[-1]
    if total_L is None and last_offsets.device.type == "cpu" and type(last_offsets) is Tensor:
        total_L = int(last_offsets[-1])
    if total_L is not None and total_L < 0:
        raise ValueError(f"total_L, the last offset, must be >= 0, got {total_L}")
    num_bags = x_offsets[0].numel() - 1
    check(
        dense.size(0) == num_bags,
        f"dense must have a row per bag of x_offsets[0] = {num_bags}, got {list(dense.shape)}",
    )
    for level, offsets in enumerate(x_offsets):
        if level + 1 < num_levels:
            num_rows: int | None = x_offsets[level + 1].numel() - 1
        else:
            num_rows = total_L
        lengths = offsets.diff()
        max_length = dense.size(1)
        if max_length == 0:  # the column is not used, but `index_select` needs a row to read
            column = dense.new_zeros(dense.size(0), 1, *dense.shape[2:])
            dense = torch.cat([dense, column], dim=1)
        segment_of_row = torch.arange(lengths.numel(), device=dense.device)
        segment_of_row = segment_of_row.repeat_interleave(lengths, output_size=num_rows)
        row_in_segment = segment_positions(torch.zeros_like(lengths), lengths, num_rows)
        has_value = row_in_segment < max_length
        rows = dense.flatten(0, 1).index_select(
            0, segment_of_row * dense.size(1) + row_in_segment.clamp(max=dense.size(1) - 1)
        )
        dense = torch.where(has_value.view(-1, *[1] * (rows.dim() - 1)), rows, 0)
    return dense, list(x_offsets)


@operator("jagged_dense_elementwise_add_jagged_output")
def jagged_dense_add(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Add dense `[B, N, ..., D]` to jagged values `[L, D]`, whose values beyond N do not change."""
    return x_values + dense_to_jagged(y, x_offsets, x_values.size(0))[0], list(x_offsets)


@operator("jagged_dense_elementwise_mul")
def jagged_dense_mul(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Multiply jagged values `[L, D]` by dense `[B, N, ..., D]`, which counts as 0 beyond N."""
    return x_values * dense_to_jagged(y, x_offsets, x_values.size(0))[0], list(x_offsets)


# Batches of requests


def _source_segments(
    batch_offsets: Tensor, num_ads: int, num_tables: int, *, has_shared_segments: bool
) -> Tensor:
    """Return the number of the segment of each table and ad, `[T * A]`.

    Segments are numbered request by request and, within a request, table by table. A request has
    one segment per table and ad, or with `has_shared_segments` one per table for all its ads.
    """
    ad_numbers = torch.arange(num_ads, device=batch_offsets.device)
    table_numbers = torch.arange(num_tables, device=batch_offsets.device).unsqueeze(1)
    first_ads = batch_offsets.long()
    request_of_ad = torch.searchsorted(first_ads[1:].contiguous(), ad_numbers, right=True)
    if has_shared_segments:
        return (request_of_ad * num_tables + table_numbers).flatten()
    first_ad, ads_of_request = first_ads[request_of_ad], first_ads.diff()[request_of_ad]
    return (
        num_tables * first_ad + table_numbers * ads_of_request + ad_numbers - first_ad
    ).flatten()


@operator("reorder_batched_ad_lengths")
def reorder_batched_ad_lengths(
    cat_ad_lengths: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: SymInt,
    broadcast_lengths: bool = False,
    max_batch_size: SymInt = 0,
) -> Tensor:
    """Return the lengths of the segments of all requests table by table, `[T * A]`.

    Args:
        cat_ad_lengths: lengths request by request and, within a request, table by table.
        batch_offsets: first ad of each request, and the number of ads, `[requests + 1]`.
        num_ads_in_batch: number of ads A.
        broadcast_lengths: whether a request has one length per table for all its ads.
        max_batch_size: number of ads per table in the result, with lengths of 0 for those that are
            missing; 0 for A.

    Raises:
        RuntimeError: `cat_ad_lengths` has another number of lengths, `max_batch_size` is below A,
            or it is combined with `broadcast_lengths`.
    """
    lengths_per_table = batch_offsets.numel() - 1 if broadcast_lengths else num_ads_in_batch
    check(
        lengths_per_table > 0 and cat_ad_lengths.numel() % lengths_per_table == 0,
        f"cat_ad_lengths must have {lengths_per_table} entries per table, got "
        f"{cat_ad_lengths.numel()}",
    )
    num_tables = cat_ad_lengths.numel() // lengths_per_table
    segments = _source_segments(
        batch_offsets, num_ads_in_batch, num_tables, has_shared_segments=broadcast_lengths
    )
    lengths = cat_ad_lengths.index_select(0, segments)
    if not max_batch_size:
        return lengths
    num_padding_ads = max_batch_size - num_ads_in_batch
    check(
        num_padding_ads >= 0 and not broadcast_lengths,
        f"max_batch_size must be at least num_ads_in_batch = {num_ads_in_batch}, without "
        f"broadcast_lengths, got {max_batch_size}",
    )
    return functional.pad(lengths.view(num_tables, -1), (0, num_padding_ads)).flatten()


@operator("reorder_batched_ad_indices")
def reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Tensor,
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: SymInt,
    broadcast_indices: bool = False,
    num_indices_after_broadcast: SymInt = -1,
) -> Tensor:
    """Return the ids of all requests table by table, as `reorder_batched_ad_lengths` orders them.

    Args:
        cat_ad_offsets: offsets of the segments of all requests.
        cat_ad_indices: ids of all requests.
        reordered_cat_ad_offsets: `[T * A + 1]`, `complete_cumsum` of the reordered lengths.
        batch_offsets: first ad of each request, and the number of ads, `[requests + 1]`.
        num_ads_in_batch: number of ads A.
        broadcast_indices: whether a request has one segment per table for all its ads.
        num_indices_after_broadcast: number of ids of the result with `broadcast_indices`; -1
            computes it.
    """
    num_tables = (reordered_cat_ad_offsets.numel() - 1) // max(num_ads_in_batch, 1)
    segments = _source_segments(
        batch_offsets, num_ads_in_batch, num_tables, has_shared_segments=broadcast_indices
    )
    starts = cat_ad_offsets.index_select(0, segments).long()
    num_indices = num_indices_after_broadcast if broadcast_indices else cat_ad_indices.size(0)
    lengths = reordered_cat_ad_offsets.diff().long()
    positions = segment_positions(starts, lengths, num_indices if num_indices >= 0 else None)
    return cat_ad_indices.index_select(0, positions)


@operator("cat_reorder_batched_ad_indices")
def cat_reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Sequence[Tensor],
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: SymInt,
    broadcast_indices: bool,
    total_num_indices: SymInt,
    pinned_memory: bool = False,
    max_batch_size: SymInt = 0,
) -> Tensor:
    """Return the result of `reorder_batched_ad_indices`, for ids in one tensor per request.

    Args:
        cat_ad_offsets: offsets of the segments of all requests.
        cat_ad_indices: ids of each request.
        reordered_cat_ad_offsets: `complete_cumsum` of the reordered lengths.
        batch_offsets: first ad of each request, and the number of ads.
        num_ads_in_batch: number of ads A.
        broadcast_indices: whether a request has one segment per table for all its ads.
        total_num_indices: number of ids of the result with `broadcast_indices`; -1 computes it.
        pinned_memory: whether the result is in pinned memory.
        max_batch_size: the `max_batch_size` of `reorder_batched_ad_lengths`.
    """
    if max_batch_size:  # leave out the ads that fill the tables up: they have no ids
        num_tables = (reordered_cat_ad_offsets.numel() - 1) // max_batch_size
        lengths = reordered_cat_ad_offsets.diff().view(num_tables, max_batch_size)
        reordered_cat_ad_offsets = complete_cumsum(lengths[:, :num_ads_in_batch].flatten())
    result = reorder_batched_ad_indices(
        cat_ad_offsets,
        torch.cat(list(cat_ad_indices)),
        reordered_cat_ad_offsets,
        batch_offsets,
        num_ads_in_batch,
        broadcast_indices,
        total_num_indices,
    )
    return result.pin_memory() if pinned_memory else result


operator(
    "reorder_batched_sequence_embeddings(Tensor cat_sequence_embeddings_offsets, "
    "Tensor cat_sequence_embeddings, Tensor reordered_cat_sequence_embeddings_offsets, "
    "Tensor batch_offsets, SymInt num_items_in_batch) -> Tensor"
)(reorder_batched_ad_indices)


# Selection


@operator("jagged_index_select")
def jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, num_dense_output_rows: int | None = None
) -> list[Tensor]:
    """Return the values of the segments that `indices` selects, and their lengths, `[n]`.

    Args:
        values: `[L, D]`.
        lengths: `[S]`.
        indices: segments, `[n]`.
        num_dense_output_rows: number of values of the result; None computes it.

    Raises:
        IndexError, RuntimeError: as `permute_1d_sparse_data`.
    """
    selected_lengths, rows, _ = permute_1d_sparse_data(
        indices, lengths, values, None, num_dense_output_rows
    )
    return [rows, selected_lengths]


@operator("jagged_index_select_2d_forward_v2")
def jagged_index_select_2d(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_output_rows: int | None = None,
) -> Tensor:
    """Return the values of the segments that `indices` selects.

    Args:
        values: `[L, D]`.
        indices: segments, `[n]`.
        input_offsets: inclusive sums of the lengths of all segments, `[S]`.
        output_offsets: inclusive sums of the lengths of the selected segments, `[n]`.
        num_dense_output_rows: number of values of the result, the last of `output_offsets`; None
            reads it.
    """
    starts = functional.pad(input_offsets, (1, 0)).index_select(0, indices)
    lengths = output_offsets.diff(prepend=torch.zeros_like(output_offsets[:1]))
    return values.index_select(0, segment_positions(starts, lengths, num_dense_output_rows))


@operator("keyed_jagged_index_select_dim1")
def keyed_jagged_index_select_dim1(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: SymInt,
    weights: Tensor | None = None,
    selected_lengths_sum: SymInt | None = None,
) -> list[Tensor]:
    """Return values, lengths and weights of the samples of each key that `indices` selects.

    Without weights the list has values and lengths only.

    Args:
        values: `[L]`.
        lengths: `[keys * batch_size]`.
        offsets: `[keys * batch_size + 1]`.
        indices: samples in [0, batch_size), `[n]`.
        batch_size: number of samples per key.
        weights: `[L]` or None.
        selected_lengths_sum: number of selected values; None computes it.

    Raises:
        RuntimeError: a sample of `indices` does not exist, or offsets or weights have another
            number of entries.
    """
    check_one_per("offsets", offsets, "bag, and one more", lengths.numel() + 1)
    check_one_per("weights", weights, "value", values.size(0))
    selected_lengths = lengths.view(-1, batch_size).index_select(1, indices).flatten()
    starts = offsets[:-1].view(-1, batch_size).index_select(1, indices).flatten()
    positions = segment_positions(starts, selected_lengths, selected_lengths_sum)
    selected_values, selected_weights = _select(values, weights, positions)
    return (
        [selected_values, selected_lengths]
        if selected_weights is None
        else [selected_values, selected_lengths, selected_weights]
    )


@operator("jagged_unique_indices")
def jagged_unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Deduplicate the indices of each table.

    The distinct indices of a table are divided evenly over the bags of its features; if a remainder
    is left, the first bags get one more.

    Args:
        hash_size_cumsum: `[F + 1]`, for each feature the number of rows of all tables before its
            own, and the total.
        hash_size_offsets: `[T + 1]`, the first feature of each table, and the number of features.
        offsets: `[F * B + 1]`.
        indices: int32 or int64 `[L]`, each below the number of rows of its table.

    Returns:
        lengths `[F * B]`, their offsets `[F * B + 1]`, the distinct indices table by table, and the
        position among them of each of `indices`, `[L]`.

    Raises:
        RuntimeError: `offsets` do not fit F features, tensors have other dtypes, or an index is
            outside its table.
    """
    num_features = hash_size_cumsum.numel() - 1
    check_ids("indices", indices)
    check_offsets("offsets", offsets)
    check(
        num_features > 0 and (offsets.numel() - 1) % num_features == 0,
        f"offsets must have F * B + 1 entries for F = {num_features} features, got "
        f"{offsets.numel()}",
    )
    batch_size = (offsets.numel() - 1) // num_features
    lengths_of_features = (
        offsets[::batch_size].diff() if batch_size else offsets.new_zeros(num_features)
    )
    first_row_of_lookup = hash_size_cumsum[:-1].repeat_interleave(
        lengths_of_features, output_size=indices.numel()
    )
    first_rows = hash_size_cumsum.index_select(0, hash_size_offsets)
    rows_of_feature = first_rows.diff().repeat_interleave(hash_size_offsets.diff())
    rows_of_lookup = rows_of_feature.repeat_interleave(
        lengths_of_features, output_size=indices.numel()
    )
    is_outside = (indices < 0) | (indices >= rows_of_lookup)
    if is_outside.any():
        raise RuntimeError(f"indices must be rows of their table, got {indices[is_outside]}")
    distinct_rows, inverse = torch.unique(indices + first_row_of_lookup, return_inverse=True)
    bags_per_table = hash_size_offsets.diff() * batch_size
    table_of_row = torch.searchsorted(first_rows[1:].contiguous(), distinct_rows, right=True)
    distinct_per_table = torch.zeros_like(bags_per_table).scatter_add(
        0, table_of_row, torch.ones_like(table_of_row)
    )
    bag_in_table = segment_positions(
        torch.zeros_like(bags_per_table), bags_per_table, offsets.numel() - 1
    )
    table_of_bag = torch.arange(
        bags_per_table.numel(), device=bags_per_table.device
    ).repeat_interleave(bags_per_table, output_size=offsets.numel() - 1)
    distinct_per_bag, remainder = (
        distinct_per_table // bags_per_table.clamp(min=1),
        distinct_per_table % bags_per_table.clamp(min=1),
    )
    lengths = distinct_per_bag[table_of_bag] + (bag_in_table < remainder[table_of_bag])
    unique_indices = (distinct_rows - first_rows.index_select(0, table_of_row)).to(indices.dtype)
    return lengths, complete_cumsum(lengths), unique_indices, inverse


@operator("jagged_hash_size_cumsum")
def jagged_hash_size_cumsum(
    offsets: Tensor, indices: Tensor, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return the first two arguments of `jagged_unique_indices`, for one table per feature.

    The largest index of a feature is assumed to be the last row of its table.

    Args:
        offsets: `[F * batch_size + 1]`.
        indices: `[L]`.
        batch_size: bags per feature; 0 for no features.
    """
    lengths = offsets[::batch_size].diff() if batch_size else offsets[:0]
    feature_of_lookup = torch.arange(lengths.numel(), device=indices.device)
    feature_of_lookup = feature_of_lookup.repeat_interleave(lengths, output_size=indices.numel())
    rows_per_table = torch.zeros_like(lengths, dtype=indices.dtype)
    rows_per_table = rows_per_table.scatter_reduce(0, feature_of_lookup, indices + 1, "amax").to(
        offsets.dtype
    )
    return complete_cumsum(rows_per_table), complete_cumsum(torch.ones_like(rows_per_table))


def _distinct_values(linear: Tensor, *, with_counts: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the distinct values, their number, int32 `[1]`, and how often each occurs.

    Values and occurrences are padded with zeros to the length of `linear`; occurrences, int32, are
    None unless `with_counts`. Another number of dimensions than 1 raises RuntimeError.
    """
    check(linear.dim() == 1, f"linear_indices must be 1D, got {list(linear.shape)}")
    values, counts = torch.unique(linear, return_counts=True)
    padding = (0, linear.numel() - values.numel())
    num_distinct = torch.tensor([values.numel()], dtype=torch.int32, device=linear.device)
    return (
        functional.pad(values, padding),
        num_distinct,
        functional.pad(counts.int(), padding) if with_counts else None,
    )


@operator("get_unique_indices")
def get_unique_indices(
    linear_indices: Tensor, max_indices: int, compute_count: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the distinct indices in increasing order, their number, and how often each occurs.

    Args:
        linear_indices: `[L]`; other shapes raise RuntimeError.
        max_indices: ignored.
        compute_count: whether occurrences are counted; else the third result is None.

    Returns:
        indices `[L]` and occurrences, int32 `[L]`, both padded with zeros, and between them the
        number of distinct indices, int32 `[1]`.
    """
    return _distinct_values(linear_indices, with_counts=compute_count)


@operator("get_unique_indices_with_inverse")
def get_unique_indices_with_inverse(
    linear_indices: Tensor,
    max_indices: int,
    compute_count: bool,
    compute_inverse_indices: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the results of `get_unique_indices`, and the order that sorts the indices.

    The order is int32 `[L]`, the positions of the sorted indices; None unless
    `compute_inverse_indices`.
    """
    order = linear_indices.argsort(stable=True).int() if compute_inverse_indices else None
    return *_distinct_values(linear_indices, with_counts=compute_count), order
