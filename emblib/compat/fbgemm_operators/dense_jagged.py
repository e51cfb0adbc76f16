"""Operators on jagged values and dense tensors: sums, products, softmax, slices.

Jagged values are `[L, D]`; sequence b has the values `offsets[b]` to `offsets[b + 1]`, and
`offsets` are `[B + 1]`. A product or a softmax uses the first `max_L` values of each sequence. If
its result has one entry per value, the entries of the other values are 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import check, check_one_per, check_same_length
from emblib.compat.fbgemm_operators.jagged import (
    complete_cumsum,
    dense_to_jagged,
    jagged_2d_to_dense,
    jagged_to_padded_dense,
    segment_positions,
)
from emblib.compat.fbgemm_operators.registry import SymInt, operator

_Jagged = tuple[Tensor, Tensor]
"""Values, and their offsets or lengths."""


# Sums


@operator("jagged_dense_elementwise_add")
def jagged_dense_add_to_dense(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> Tensor:
    """Add jagged values `[L, D]` to dense `[B, N, ..., D]`; values beyond N are dropped."""
    return jagged_to_padded_dense(x_values, x_offsets, y.shape[1 : 1 + len(x_offsets)]) + y


@operator("jagged_dense_dense_elementwise_add_jagged_output")
def jagged_dense_dense_add(
    x_values: Tensor, x_offsets: Sequence[Tensor], y_0: Tensor, y_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Add two dense tensors `[B, N, ..., D]` to jagged values, which do not change beyond N."""
    total = x_values.size(0)
    jagged_0, jagged_1 = (dense_to_jagged(y, x_offsets, total)[0] for y in (y_0, y_1))
    return x_values + jagged_0 + jagged_1, list(x_offsets)


@operator("jagged_acc_weights_and_counts")
def jagged_acc_weights_and_counts(
    weights: Tensor, reverse_indices: Tensor, num_unique_indices: int
) -> Tensor:
    """Return the sum of the weights, and the number of uses, of each distinct index.

    Args:
        weights: one per index, `[L]`; another number raises RuntimeError.
        reverse_indices: position of each index among the distinct ones, `[L]`.
        num_unique_indices: number U of distinct indices.

    Returns:
        float32 `[U, 2]`.
    """
    check_one_per("weights", weights, "index", reverse_indices.numel())
    rows = torch.stack([weights.float(), torch.ones_like(weights, dtype=torch.float32)], dim=1)
    return rows.new_zeros(num_unique_indices, 2).index_add(0, reverse_indices, rows)


# Products


@operator("batched_dense_vec_jagged_2d_mul")
def batched_vector_product(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """Multiply vectors by the matrices of the sequences, to `[B * H, D]`.

    Args:
        v: vectors of H heads, `[B * H, N]`; the first N values of each sequence are used.
        a_values: `[L, H * D]`.
        a_offsets: `[B + 1]`.

    Raises:
        RuntimeError: B does not divide the number of vectors.
    """
    num_sequences = a_offsets.numel() - 1
    check(
        num_sequences == 0 or v.size(0) % num_sequences == 0,
        f"{num_sequences} sequences must divide v's {v.size(0)}",
    )
    num_heads = v.size(0) // num_sequences if num_sequences else 1
    num_columns = a_values.size(-1) // num_heads
    if not num_sequences or not num_columns or not v.size(1):
        return v.new_zeros(num_sequences * num_heads, num_columns)
    dense = jagged_2d_to_dense(a_values, a_offsets, v.size(1))
    dense = (
        dense.view(num_sequences, v.size(1), num_heads, num_columns).transpose(1, 2).flatten(0, 1)
    )
    return torch.bmm(v.unsqueeze(1), dense).squeeze(1)


@operator("jagged_jagged_bmm")
def jagged_jagged_bmm(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """Return `x.T @ y` of each sequence, `[B, M, N]`, for values x `[L, M]` and y `[L, N]`."""
    x, y = (jagged_2d_to_dense(values, x_offsets, max_L) for values in (x_values, y_values))
    return torch.bmm(x.transpose(1, 2), y)


@operator("jagged_dense_bmm")
def jagged_dense_bmm(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> _Jagged:
    """Multiply the values `[L, K]` of a sequence by its matrix of `y` `[B, K, N]`, to `[L, N]`."""
    dense = torch.bmm(jagged_2d_to_dense(x_values, x_offsets, max_L), y)
    return dense_to_jagged(dense, [x_offsets], x_values.size(0))[0], x_offsets


@operator("jagged_softmax")
def jagged_softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> _Jagged:
    """Return the softmax of each sequence and column, `[L, D]`, and the offsets."""
    # The padding is finite, not -inf: the softmax of a sequence without values is then not NaN.
    padding = torch.finfo(values.dtype).min
    dense = jagged_to_padded_dense(values, [x_offsets], [max_L], padding).softmax(1)
    return dense_to_jagged(dense, [x_offsets], values.size(0))[0], x_offsets


# Selection


@operator("jagged_index_add_2d_forward_v2")
def jagged_index_add_2d(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_output_rows: SymInt,
    num_dense_input_rows: SymInt,
) -> Tensor:
    """Add input sequence i to output sequence `indices[i]`, for each i; return the output.

    Args:
        values: values of the input sequences, `[num_dense_input_rows, D]`.
        indices: output sequence of each input sequence.
        input_offsets: inclusive sums of the lengths of the input sequences, without a leading 0.
        output_offsets: the same for the output sequences.
        num_output_rows: number of values of the output.
        num_dense_input_rows: number of input values.

    Raises:
        ValueError: `num_output_rows` is negative.
    """
    if num_output_rows < 0:
        raise ValueError(f"num_output_rows must be non-negative, got {num_output_rows}")
    starts = functional.pad(output_offsets, (1, 0)).index_select(0, indices)
    lengths = input_offsets.diff(prepend=torch.zeros_like(input_offsets[:1]))
    output_rows = segment_positions(starts, lengths, num_dense_input_rows)
    return values.new_zeros(num_output_rows, values.size(1)).index_add(0, output_rows, values)


@operator("jagged_index_add_2d_forward")
def jagged_index_add_2d_v1(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_input_rows: int,
    num_output_rows: int,
) -> Tensor:
    """Add as `jagged_index_add_2d_forward_v2`, whose last two arguments are in the other order."""
    return jagged_index_add_2d(
        values, indices, input_offsets, output_offsets, num_output_rows, num_dense_input_rows
    )


@operator("jagged_slice")
def jagged_slice(x_values: Tensor, x_lengths: Tensor, start: Tensor, slice_length: int) -> _Jagged:
    """Return up to `slice_length` values of each sequence, and their numbers. Waits for a GPU.

    Args:
        x_values: `[L]` or `[L, D]`.
        x_lengths: `[B]`.
        start: first value of each slice within its sequence, `[B]`.
        slice_length: maximum number of values per sequence.

    Raises:
        RuntimeError: a start is not within its sequence.
    """
    num_available = x_lengths - start
    check(
        not bool(((start < 0) | (num_available < 0)).any()),
        "start must be within the sequences, whose lengths are x_lengths",
    )
    lengths = num_available.clamp(max=slice_length)
    positions = segment_positions(complete_cumsum(x_lengths)[:-1] + start, lengths)
    return x_values.index_select(0, positions), lengths


@operator("jagged_1d_to_truncated_values")
def jagged_1d_to_truncated_values(
    values: Tensor, lengths: Tensor, max_truncated_length: int
) -> Tensor:
    """Return the first `max_truncated_length` values of each sequence, concatenated."""
    return jagged_slice(values, lengths, torch.zeros_like(lengths), max_truncated_length)[0]


@operator("masked_select_jagged_1d")
def masked_select_jagged_1d(
    values: Tensor, lengths: Tensor, mask: Tensor, check_length: bool | None = False
) -> _Jagged:
    """Return the values where `mask` is True, and their number per sequence. Waits for a GPU.

    Args:
        values: `[L]`.
        lengths: `[B]`.
        mask: bool `[L]`.
        check_length: whether to raise RuntimeError if `mask` has another size than `values`.
    """
    check(
        not check_length or mask.numel() == values.numel(),
        f"mask and values should have the same numel, but got mask numel: {mask.numel()} values "
        f"numel: {values.numel()}",
    )
    counts = complete_cumsum(mask.to(lengths.dtype))
    return values[mask], counts.index_select(0, complete_cumsum(lengths)).diff()


# Keys and ranges


@operator("repeat_arange")
def repeat_arange(lengths: Tensor) -> Tensor:
    """Return 0, 1, ..., length - 1 for each length, concatenated. Waits for a GPU.

    On the meta device the result is empty. A negative length raises ValueError or RuntimeError.
    """
    if lengths.is_meta or not lengths.numel():
        return lengths.new_empty(0)
    total = int(lengths.sum())
    if total < 0:
        raise ValueError(f"output_size = sum of lengths must be non-negative, got {total}")
    return segment_positions(torch.zeros_like(lengths), lengths, total)


@operator("get_source_mask")
def get_source_mask(num_sources: Tensor, num_targets: Tensor, output_size: SymInt) -> Tensor:
    """Return for each sample as many True as it has sources, then as many False as targets.

    Args:
        num_sources: `[B]`.
        num_targets: `[B]`; another size than `num_sources` raises RuntimeError.
        output_size: sum of both.
    """
    check(
        num_sources.numel() == num_targets.numel(),
        "num_sources and num_targets must have the same batch size",
    )
    counts = torch.stack([num_sources, num_targets], dim=1).flatten()
    if not counts.numel():
        return counts.new_empty(0, dtype=torch.bool)
    is_source = torch.arange(counts.numel(), device=counts.device) % 2 == 0
    return is_source.repeat_interleave(counts, output_size=output_size)


def get_source_mask_with_optional_size(
    num_sources: Tensor, num_targets: Tensor, output_size: int | None = None
) -> Tensor:
    """Return `get_source_mask`; without an `output_size` compute it, which waits for a GPU."""
    if output_size is None:
        output_size = int((num_sources + num_targets).sum())
    return get_source_mask(num_sources, num_targets, output_size)


def _pad_keys(
    values: Tensor,
    lengths: Tensor,
    offset_per_key: Sequence[int],
    max_lengths_per_key: Sequence[int],
    padding_value: int = 0,
) -> list[Tensor]:
    """Pad the values of each key to `[B, max_length]` or `[B, max_length, D]`.

    Args:
        values: `[L]` or `[L, D]`.
        lengths: `[K, B]`.
        offset_per_key: first value of each key, and the end, `[K + 1]`.
        max_lengths_per_key: the `max_length` of each key, `[K]`.
        padding_value: value of the entries beyond a sequence.

    Raises:
        RuntimeError: arguments differ in their number of keys.
    """
    begins, ends = offset_per_key[:-1], offset_per_key[1:]
    check_same_length(
        lengths=lengths, max_lengths_per_key=max_lengths_per_key, **{"offset_per_key[1:]": ends}
    )
    offsets = complete_cumsum(lengths)
    return [
        jagged_to_padded_dense(values[begin:end], [key_offsets], [max_length], padding_value)
        for begin, end, key_offsets, max_length in zip(
            begins, ends, offsets, max_lengths_per_key, strict=True
        )
    ]


for _name, _default in (("stacked_jagged_1d_to_dense", ""), ("stacked_jagged_2d_to_dense", "=0")):
    operator(
        f"{_name}(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key, "
        f"int padding_value{_default}) -> Tensor[]"
    )(_pad_keys)


@operator(
    "pack_segments_v2(Tensor t_in, Tensor lengths, SymInt max_length, bool pad_minf=False, "
    "bool return_presence_mask=False) -> (Tensor packed_segments, Tensor? presence_mask)"
)
def pack_segments_v2(
    t_in: Tensor,
    lengths: Tensor,
    max_length: int,
    pad_minf: bool = False,
    return_presence_mask: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Pad sequences to `[B, max_length, ...]` with 0, or with -inf if `pad_minf`.

    Args:
        t_in: `[L, ...]`.
        lengths: `[B]`.
        max_length: values per sequence in the result; longer sequences are cut.
        pad_minf: whether the padding is -inf.
        return_presence_mask: whether to return a mask, bool `[B, max_length]`, that is True for
            the values of the input; else the second result is None.

    Raises:
        RuntimeError: `max_length` is not positive.
    """
    check(max_length > 0, f"max_length must be positive, got {max_length}")
    padding = float("-inf") if pad_minf else 0.0
    packed = jagged_to_padded_dense(t_in, [complete_cumsum(lengths)], [max_length], padding)
    positions = torch.arange(max_length, device=lengths.device)
    return packed, positions < lengths.unsqueeze(1) if return_presence_mask else None


@operator("pack_segments")
def pack_segments(t_in: Tensor, lengths: Tensor, max_length: SymInt) -> Tensor:
    """Pad sequences with zeros to `[B, max_length, ...]`, see `pack_segments_v2`."""
    return pack_segments_v2(t_in, lengths, max_length)[0]
