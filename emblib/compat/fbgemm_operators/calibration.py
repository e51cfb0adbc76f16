"""Operators of models around the tables: calibrated predictions, unary embeddings, combined inputs.

Calibration divides predictions into bins. If a bin has enough earlier examples, its predictions
become `share * weight + prediction * (1 - weight)`, where `share` is the share of positives among
these examples. The other operators are independent of calibration, and of each other.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import check, check_ids
from emblib.compat.fbgemm_operators.jagged import complete_cumsum
from emblib.compat.fbgemm_operators.registry import SymInt, operator

_CombinedInput = tuple[Tensor, Tensor, Tensor]
"""Indices, offsets or lengths, and weights of all tables."""


# Calibration


def _predictions(logit: Tensor, positive_weight: float) -> Tensor:
    """Return float64 predictions: the sigmoid of `logit + log(positive_weight)`."""
    shifted = (logit.double() + math.log(positive_weight)).to(logit.dtype)
    return 1.0 / (1.0 + (-shifted).float().exp().double())


def _bins_of(predictions: Tensor, lower: float, upper: float, bins: int) -> Tensor:
    """Return the bin of each prediction, int64; as in FBGEMM, bin 0 begins at 0, not at `lower`.

    Predictions outside all bins, e.g. 0, are in the nearest one. FBGEMM reads other memory there.
    """
    return ((predictions / ((upper - lower) / bins)).ceil() - 1).long().clamp(0, bins - 1)


def _segment_of_examples(value: Tensor, lengths: Tensor, num_segments: int) -> Tensor:
    """Return the segment of each example, `[N]`: its value + 1, or 0.

    The segment is 0 if the example has no or several values, or one outside [0, num_segments).
    """
    value, lengths = value.flatten(), lengths.flatten()
    last_position = max(value.numel() - 1, 0)
    value_positions = complete_cumsum(lengths)[:-1].long().clamp(max=last_position)
    segment_of_example = (
        functional.pad(value, (0, int(not value.numel()))).index_select(0, value_positions).long()
        + 1
    )
    return torch.where(
        (lengths == 1) & (segment_of_example <= num_segments), segment_of_example, 0
    ).clamp(min=0)


def _calibrate(
    predictions: Tensor,
    bins: Tensor,
    examples: Tensor,
    positives: Tensor,
    min_examples: int,
    share_weight: float,
    logit: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return predictions in the shape of `logit`, and `bins`.

    Predictions are calibrated in bins that have more than `min_examples` examples.
    """
    num_examples = examples.index_select(0, bins)
    positive_share = positives.index_select(0, bins) / num_examples
    calibrated = positive_share * share_weight + predictions * (1.0 - share_weight)
    result = torch.where(num_examples > min_examples, calibrated, predictions)
    return result.to(logit.dtype).view_as(logit), bins


@operator("histogram_binning_calibration")
def histogram_binning_calibration(
    logit: Tensor,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: SymInt,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """Return calibrated predictions and their bins, int64 `[N]`, of equal width.

    Args:
        logit: logits of any shape; predictions have its shape and dtype.
        bin_num_examples: earlier examples of each bin, `[bins]`.
        bin_num_positives: positives among them, `[bins]`.
        positive_weight: weight of positives in training, by which logits are shifted.
        lower_bound: number that only determines, with `upper_bound`, the width of the bins.
        upper_bound: number whose difference to `lower_bound` is the width of all bins together. As
            in FBGEMM, bin 0 begins at 0, not at `lower_bound`.
        bin_ctr_in_use_after: number of examples that a bin must exceed to calibrate.
        bin_ctr_weight_value: weight of the share of positives in a calibrated prediction.
    """
    predictions = _predictions(logit.flatten(), positive_weight)
    bins = _bins_of(predictions, lower_bound, upper_bound, bin_num_examples.numel())
    counts = bin_num_examples, bin_num_positives
    return _calibrate(predictions, bins, *counts, bin_ctr_in_use_after, bin_ctr_weight_value, logit)


@operator("histogram_binning_calibration_by_feature")
def histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: SymInt,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    num_bins: SymInt,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: SymInt,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """Calibrate as `histogram_binning_calibration`, with `num_bins` bins per segment of examples.

    `segment_lengths` `[N]` is 1 for examples that have a segment. `segment_value` has the segments
    of these examples, from 0 on; all other examples share one more segment, whose bins are the
    first. `bin_num_examples` and `bin_num_positives` are `[(num_segments + 1) * num_bins]`.
    """
    predictions = _predictions(logit.flatten(), positive_weight)
    first_bin = _segment_of_examples(segment_value, segment_lengths, num_segments) * num_bins
    bins = _bins_of(predictions, lower_bound, upper_bound, num_bins) + first_bin
    counts = bin_num_examples, bin_num_positives
    return _calibrate(predictions, bins, *counts, bin_ctr_in_use_after, bin_ctr_weight_value, logit)


@operator("generic_histogram_binning_calibration_by_feature")
def generic_histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: SymInt,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    bin_boundaries: Tensor,
    positive_weight: float,
    bin_ctr_in_use_after: SymInt,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """Calibrate as `histogram_binning_calibration_by_feature`, with bins between `bin_boundaries`.

    The boundaries must increase. RuntimeError is raised if `bin_num_examples` does not have one
    entry per bin.
    """
    num_bins = bin_boundaries.numel() + 1
    check(
        bin_num_examples.numel() == (num_segments + 1) * num_bins,
        f"bin_num_examples must have {(num_segments + 1) * num_bins} bins, got "
        f"{bin_num_examples.numel()}",
    )
    predictions = _predictions(logit.flatten(), positive_weight)
    first_bin = _segment_of_examples(segment_value, segment_lengths, num_segments) * num_bins
    bins = torch.searchsorted(bin_boundaries, predictions) + first_bin
    counts = bin_num_examples, bin_num_positives
    return _calibrate(predictions, bins, *counts, bin_ctr_in_use_after, bin_ctr_weight_value, logit)


# Unary embeddings


@operator("batched_unary_embeddings")
def batched_unary_embeddings(
    weight: Tensor, table_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> Tensor:
    """Look up tables of dim 1 for N tasks, and sum the rows of each bag; return `[N, B, T]`.

    Args:
        weight: the rows of all tables per task, `[N, rows]`.
        table_offsets: first row of each table, and the end, `[T + 1]`.
        offsets: `[T * B + 1]`.
        indices: rows within their table, `[L]`.

    Raises:
        RuntimeError: there are no tables.
    """
    num_tables = table_offsets.numel() - 1
    check(num_tables > 0, "table_offsets must have the first row of a table, and the end")
    batch_size = (offsets.numel() - 1) // num_tables
    lengths = offsets.diff()
    bag_of_lookup = torch.arange(lengths.numel(), device=indices.device).repeat_interleave(
        lengths, output_size=indices.numel()
    )
    rows = indices.long() + table_offsets[:-1].long().index_select(
        0, bag_of_lookup // max(batch_size, 1)
    )
    values = weight.view(weight.size(0), -1).index_select(1, rows)
    sums = torch.zeros(weight.size(0), num_tables * batch_size, device=weight.device)
    sums = sums.index_add(1, bag_of_lookup, values.float()).to(weight.dtype)
    return sums.view(-1, num_tables, batch_size).transpose(1, 2).contiguous()


@operator("permute102_baddbmm_permute102")
def permute102_baddbmm_permute102(bias: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return `A[:, b] @ B[b] + bias[b]` for each b, `[M, B, N]`.

    `bias` is `[B, N]`, `A` `[M, B, K]`, `B` `[B, K, N]`.
    """
    return torch.baddbmm(bias.unsqueeze(1), A.transpose(0, 1), B).transpose(0, 1)


@operator("bottom_k_per_row")
def bottom_k_per_row(input: Tensor, k_offsets: Tensor, requires_unique: bool) -> Tensor:
    """Return the first k values of each row, or its first k distinct values in increasing order.

    Args:
        input: rows `[..., D]`.
        k_offsets: the differences of consecutive entries are the k of the rows. Two entries give
            all rows the same k; the result is then `[input.size(0), -1, k]`, else it is flat.
        requires_unique: whether the values must be distinct.

    Raises:
        RuntimeError: a row has fewer than k distinct values, with `requires_unique`; or there is
            neither one k nor one per row; or there are no rows.
    """
    check(input.numel() > 0, f"input must have rows [..., D] with values, got {list(input.shape)}")
    rows = input.reshape(-1, input.size(-1))
    counts = k_offsets.diff().tolist()
    is_fixed = len(counts) == 1
    check(is_fixed or len(counts) == len(rows), f"k_offsets must be of 1 or {len(rows)} rows")
    bottom_values = []
    for row, k in zip(rows, counts * len(rows) if is_fixed else counts, strict=True):
        if not requires_unique:
            bottom_values.append(row[:k])
            continue
        values = list(dict.fromkeys(row.tolist()))[:k]
        check(len(values) == k, f"too skewed distribution: {len(values)} of {k} values differ")
        bottom_values.append(torch.tensor(sorted(values), dtype=input.dtype, device=input.device))
    result = torch.cat(bottom_values)
    return result.view(input.size(0), -1, counts[0]) if is_fixed else result


# Inputs


def _check_lists(
    indices: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor]
) -> None:
    """Raise RuntimeError unless lists and tensors fit each other; `offsets` may be lengths."""
    check(len(indices) > 0, "there must be at least one tensor of indices")
    check(
        len(indices) == len(offsets) == len(weights),
        f"there must be offsets or lengths and weights for each of {len(indices)} indices, got "
        f"{len(offsets)} and {len(weights)}",
    )
    for index, offset, weight in zip(indices, offsets, weights, strict=True):
        check_ids("indices", index)
        check_ids("offsets or lengths", offset)
        check(
            weight.numel() in (0, index.numel()),
            f"weights must be one per index = {index.numel()} or none, got {weight.numel()}",
        )


def _check_batch_size(batch_size: int, num_bags: int) -> None:
    check(
        num_bags <= batch_size,
        f"batch_size must be at least the number of bags of each table = {num_bags}, got "
        f"{batch_size}",
    )


def _combine_weights(
    indices: Sequence[Tensor],
    weights: Sequence[Tensor],
    num_used_indices: Sequence[int],
    num_weights: int,
) -> Tensor:
    """Concatenate the float32 weights of the used indices, and pad them with 1 to `num_weights`.

    A table without weights has weights of 1. The result is empty if no table has weights.
    """
    if not any(weight.numel() for weight in weights):
        return torch.empty(0, device="cpu")
    table_weights = [
        weight[:num_used].float()
        if weight.numel()
        else index.new_ones(num_used, dtype=torch.float32)
        for index, weight, num_used in zip(indices, weights, num_used_indices, strict=True)
    ]
    all_weights = torch.cat(table_weights)
    return functional.pad(all_weights, (0, num_weights - all_weights.numel()), value=1.0)


@operator("tbe_input_combine")
def tbe_input_combine(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
) -> _CombinedInput:
    """Concatenate the inputs of T tables to int32 indices, int32 offsets and float32 weights.

    Args:
        indices_list: int32 or int64 indices of each table.
        offsets_list: first index of each bag of each table, from 0 on.
        per_sample_weights: weights of each table, one per index, or empty for weights of 1.
        include_last_offsets: bool `[T]`, whether the offsets of a table end with its number of
            indices. If all do, indices beyond the last offset are padding, and are at the end of
            the result.

    Raises:
        RuntimeError: lists or tensors do not fit each other.
    """
    return _combine(indices_list, offsets_list, per_sample_weights, include_last_offsets, None)


@operator("padding_fused_tbe_input_combine")
def padding_fused_tbe_input_combine(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
    batch_size: int,
) -> _CombinedInput:
    """Concatenate as `tbe_input_combine`, with empty bags up to `batch_size` bags per table.

    A table with more than `batch_size` bags raises RuntimeError.
    """
    lists = indices_list, offsets_list, per_sample_weights
    return _combine(*lists, include_last_offsets, batch_size)


def _num_used_indices(indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[int]:
    """Return the last offset of each table; the number of its indices if it has no offsets."""
    num_used_indices = [
        int(offset[-1]) if offset.numel() else index.numel()
        for index, offset in zip(indices, offsets, strict=True)
    ]
    pairs = zip(num_used_indices, indices, strict=True)
    check(all(num_used <= index.numel() for num_used, index in pairs), "offsets exceed the indices")
    return num_used_indices


def _combine(
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_last_offset: Tensor,
    batch_size: int | None,
) -> _CombinedInput:
    """Concatenate the inputs of tables, with empty bags up to `batch_size` unless that is None."""
    _check_lists(indices, offsets, weights)
    check(
        has_last_offset.numel() == len(indices),
        "include_last_offsets must have one entry per table",
    )
    num_indices = [index.numel() for index in indices]
    num_used_indices = num_unpadded = num_indices
    if batch_size is None and bool(has_last_offset.all()):
        num_used_indices = _num_used_indices(indices, offsets)
        # If the last offset of a table is 0, FBGEMM does not move its indices to the end.
        num_unpadded = [
            num_used or index.numel()
            for num_used, index in zip(num_used_indices, indices, strict=True)
        ]
    used_indices = [index[:end] for index, end in zip(indices, num_unpadded, strict=True)]
    padding_indices = [index[end:] for index, end in zip(indices, num_unpadded, strict=True)]
    first_index = 0
    joined_offsets = [offsets[0].new_zeros(1)]
    for offset, num_used, ends_with_last_offset in zip(
        offsets, num_used_indices, has_last_offset.tolist(), strict=True
    ):
        inner_offsets = offset[1 : offset.numel() - int(ends_with_last_offset)] + first_index
        first_index += num_used
        if batch_size is not None:
            _check_batch_size(batch_size, offset.numel() - int(ends_with_last_offset))
        num_offsets = 1 if batch_size is None else batch_size - inner_offsets.numel()
        joined_offsets += [inner_offsets, offset.new_full((num_offsets,), first_index)]
    return (
        torch.cat([index.int() for index in (*used_indices, *padding_indices)]),
        torch.cat([offset.int() for offset in joined_offsets]),
        _combine_weights(indices, weights, num_used_indices, sum(num_indices)),
    )


@operator("tbe_input_combine_with_length")
def tbe_input_combine_with_length(
    indices_list: Sequence[Tensor],
    lengths_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
) -> _CombinedInput:
    """Concatenate the inputs of tables as `tbe_input_combine`, with lengths instead of offsets."""
    _check_lists(indices_list, lengths_list, per_sample_weights)
    sizes = [index.numel() for index in indices_list]
    return (
        torch.cat([index.int() for index in indices_list]),
        torch.cat([lengths.int() for lengths in lengths_list]),
        _combine_weights(indices_list, per_sample_weights, sizes, sum(sizes)),
    )


@operator("padding_fused_tbe_input_combine_with_length")
def padding_fused_tbe_input_combine_with_length(
    indices_list: Sequence[Tensor],
    lengths_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_size: int,
) -> _CombinedInput:
    """Concatenate as `tbe_input_combine_with_length`, with lengths of 0 up to `batch_size`.

    A table with more lengths raises RuntimeError.
    """
    for lengths in lengths_list:
        _check_batch_size(batch_size, lengths.numel())
    padded_lengths = [
        functional.pad(lengths, (0, batch_size - lengths.numel())) for lengths in lengths_list
    ]
    return tbe_input_combine_with_length(indices_list, padded_lengths, per_sample_weights)


# Requests of benchmarks

_REPEAT_PROBABILITY = 0.6  # that an id is looked up soon after an earlier lookup of it
_REPEAT_RATE = 5.0  # reciprocal mean time until then, in mean times between lookups of the id


@operator("tbe_generate_indices_from_distribution")
def tbe_generate_indices_from_distribution(
    heavy_hitters: Tensor, zipf_q: float, zipf_s: float, max_index: int, num_indices: int
) -> Tensor:
    """Draw ids from [0, `max_index`), int64 `[num_indices]` on the CPU, as FBGEMM's benchmarks do.

    The first ids have the probabilities `heavy_hitters`. The others share the rest, in proportion
    to `(id + zipf_q) ** -zipf_s`. Lookups of an id come in clusters. Random numbers are those of
    torch's generator.
    """
    check(
        heavy_hitters.dim() == 1 and heavy_hitters.dtype in (torch.float32, torch.float64),
        "heavy_hitters must be float32 or float64 with 1 dimension, got "
        f"{heavy_hitters.dtype} {list(heavy_hitters.shape)}",
    )
    num_hitters = heavy_hitters.numel()
    check(
        num_hitters < max_index,
        f"max_index must be greater than the number of heavy_hitters, {num_hitters}: {max_index}",
    )
    hot = heavy_hitters.double().cpu()
    other_ids = torch.arange(num_hitters, max_index, dtype=torch.float64, device="cpu")
    shares = (other_ids + zipf_q) ** -zipf_s
    ends = torch.cat([hot, shares / shares.sum() * (1 - hot.sum()).clamp(min=0)]).cumsum(0)
    drawn = torch.rand(num_indices, dtype=torch.float64, device="cpu") * ends[-1]
    ids = torch.searchsorted(ends, drawn, right=True).clamp(max=max_index - 1).sort().values
    return ids[_clustered_times(ids).argsort()]


def _clustered_times(ids: Tensor) -> Tensor:
    """Return the time of each lookup, float64 `[N]`; `ids`, int64 `[N]`, ascend.

    A lookup is at a time in [0, 1), or follows an earlier one of the same id.
    """
    counts = torch.unique_consecutive(ids, return_counts=True)[1]
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = torch.arange(ids.numel(), device="cpu")
    earlier = first + (torch.rand(ids.shape, device="cpu") * (positions - first)).long()
    follows = (positions > first) & (torch.rand(ids.shape, device="cpu") < _REPEAT_PROBABILITY)
    times = torch.rand(ids.shape, dtype=torch.float64, device="cpu")
    delays = torch.empty_like(times).exponential_() / (_REPEAT_RATE * counts).repeat_interleave(
        counts
    )
    delays, leaders = delays * follows, torch.where(follows, earlier, positions)
    for _ in range(ids.numel().bit_length()):  # each round doubles the number of steps to a leader
        delays, leaders = delays + delays[leaders], leaders[leaders]
    return times[leaders] + delays
