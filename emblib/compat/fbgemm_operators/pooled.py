"""Operators on pooled embeddings: permutations of columns, groups of keys, moves to one device."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators.checks import check, check_same_length
from emblib.compat.fbgemm_operators.jagged import segment_positions
from emblib.compat.fbgemm_operators.registry import SymInt, operator

# Permutations of columns: block i has the columns `offset_dim_list[i]` to `offset_dim_list[i + 1]`.

_PERMUTE = (
    "(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list, "
    "Tensor inv_offset_dim_list, Tensor inv_permute_list) -> Tensor"
)


def _permute_columns(
    pooled: Tensor, offset_dims: Tensor, permute: Tensor, num_columns: int | None
) -> Tensor:
    """Return the blocks of columns of `[B, columns]` that `permute` selects, in its order.

    `num_columns` is the number of columns of the result; None computes it, which waits for a GPU.
    """
    permute = permute.to(offset_dims.device)
    first_columns = offset_dims[:-1].index_select(0, permute)
    widths = offset_dims.diff().index_select(0, permute)
    column_indices = segment_positions(first_columns, widths, num_columns)
    return pooled.index_select(1, column_indices.to(pooled.device))


def permute_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """Return the blocks of columns in the order `permute_list`.

    Args:
        pooled_embs: `[B, columns]`.
        offset_dim_list: first column of each block, and the end, `[blocks + 1]`.
        permute_list: blocks in their new order, each of them once.
        inv_offset_dim_list: ignored.
        inv_permute_list: ignored.
    """
    return _permute_columns(pooled_embs, offset_dim_list, permute_list, pooled_embs.size(1))


for _name in (
    "permute_pooled_embs",
    "permute_pooled_embs_auto_grad",
    "permute_pooled_embs_split",
    "permute_pooled_embs_auto_grad_split",
):
    operator(_name + _PERMUTE)(permute_pooled_embs)


def permute_duplicate_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """Return the blocks of columns that `permute_list` selects; some may be missing or repeated.

    The arguments are those of `permute_pooled_embs`. Waits for a GPU.
    """
    return _permute_columns(pooled_embs, offset_dim_list, permute_list, None)


for _name in (
    "permute_duplicate_pooled_embs",
    "permute_duplicate_pooled_embs_auto_grad",
    "permute_duplicate_pooled_embs_split",
    "permute_duplicate_pooled_embs_auto_grad_split",
):
    operator(_name + _PERMUTE)(permute_duplicate_pooled_embs)


# Groups of keys


class _Block(NamedTuple):
    """The columns of a key."""

    tensor_index: int
    start: int
    width: int


def _block_of_key(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]]
) -> dict[str, _Block]:
    """Return the block of each key; the first one if several tensors have the key.

    Raises:
        RuntimeError: `keys` and `lengths`, or the lists in them, differ in length.
    """
    check_same_length(keys=keys, lengths=lengths)
    blocks: dict[str, _Block] = {}
    for tensor_index, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        check_same_length(**{f"keys[{tensor_index}]": names, f"lengths[{tensor_index}]": widths})
        start = 0
        for name, width in zip(names, widths, strict=True):
            blocks.setdefault(name, _Block(tensor_index, start, width))
            start += width
    return blocks


@operator("regroup_keyed_tensor")
def regroup_keyed_tensor(
    pooled_embs: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """Return the concatenated columns of the keys of each group.

    Args:
        pooled_embs: tensors `[B, columns]`.
        keys: keys of each tensor.
        lengths: number of columns of each key of each tensor.
        groups: keys of each result; if several tensors have a key, the first one is read.

    Returns:
        a tensor `[B, columns]` per group.

    Raises:
        KeyError: no tensor has a key of a group.
        RuntimeError: `pooled_embs`, `keys` and `lengths` differ in length.
    """
    check_same_length(pooled_embs=pooled_embs, keys=keys)
    blocks = _block_of_key(keys, lengths)

    def columns_of(key: str) -> Tensor:
        tensor_index, start, width = blocks[key]
        return pooled_embs[tensor_index].narrow(1, start, width)

    return [torch.cat([columns_of(key) for key in group], dim=1) for group in groups]


_LINK = 5  # last column of a permutation of `kt_regroup_arguments`


@operator("kt_regroup_arguments")
def kt_regroup_arguments(
    embs: Tensor,
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the arguments of `permute_multi_embedding` that regroup keys.

    The permutation, `[rows, 6]`, has one row per key of a group: input, output, first column in the
    input, first column in the output, number of columns, and a link. The link is 0 if the key is
    used once. If it is used several times, the link of its first row is the number of its second
    row; the link of each later row is the negative number of the key's next row, and the link of
    the last one the negative number of all rows.

    Args:
        embs: any tensor on the device of the results.
        keys: keys of each input.
        lengths: number of columns of each key of each input.
        groups: keys of each output.

    Returns:
        the permutation, the number of columns of each input, that of each output, all int32, and
        the latter once more as a list.

    Raises:
        KeyError: no input has a key of a group.
        RuntimeError: `keys` and `lengths` differ in length.
    """
    blocks = _block_of_key(keys, lengths)
    permutation: list[list[int]] = []
    widths = []
    rows_of_key: dict[str, list[int]] = {}
    for output, group in enumerate(groups):
        column = 0
        for key in group:
            tensor_index, start, width = blocks[key]
            rows_of_key.setdefault(key, []).append(len(permutation))
            permutation.append([tensor_index, output, start, column, width, 0])
            column += width
        widths.append(column)
    for row_numbers in rows_of_key.values():
        if len(row_numbers) > 1:
            permutation[row_numbers[0]][_LINK] = row_numbers[1]
            for row_number, next_row in zip(
                row_numbers[1:], [*row_numbers[2:], len(permutation)], strict=True
            ):
                permutation[row_number][_LINK] = -next_row
    device = embs.device
    return (
        torch.tensor(permutation, dtype=torch.int32, device=device).view(-1, _LINK + 1),
        torch.tensor([sum(row) for row in lengths], dtype=torch.int32, device=device),
        torch.tensor(widths, dtype=torch.int32, device=device),
        widths,
    )


@operator("permute_multi_embedding")
def permute_multi_embedding(
    pooled_embs: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[SymInt],
) -> list[Tensor]:
    """Return the outputs that the result of `kt_regroup_arguments` describes.

    Args:
        pooled_embs: inputs `[B, columns]`.
        permutes: the permutation, `[rows, 6]`.
        in_shapes: number of columns of each input.
        out_shapes: number of columns of each output.
        out_lengths: the same as a list.

    Returns:
        a tensor `[B, columns]` per output.
    """
    columns = permutes.long().unbind(1)
    first_input_columns = functional.pad(in_shapes.long().cumsum(0), (1, 0))
    first_output_columns = functional.pad(out_shapes.long().cumsum(0), (1, 0))
    block_starts = first_input_columns.index_select(0, columns[0]) + columns[2]
    order = torch.sort(first_output_columns.index_select(0, columns[1]) + columns[3]).indices
    num_columns = 0
    for output_columns in out_lengths:
        num_columns += output_columns
    column_indices = segment_positions(block_starts[order], columns[4][order], num_columns)
    permuted = torch.cat(list(pooled_embs), dim=1).index_select(
        1, column_indices.to(pooled_embs[0].device)
    )
    return list(permuted.split(list(out_lengths), dim=1))


# Rows


@operator("index_select_dim0")
def index_select_dim0(
    input: Tensor,
    indices: Tensor,
    consecutive_range_start: SymInt | None = 0,
    consecutive_range_length: SymInt | None = 0,
    skip_indices_sorting_fwd: bool | None = None,
) -> Tensor:
    """Return the rows `indices` of `input`; other arguments, for FBGEMM's kernel, are ignored."""
    return input.index_select(0, indices)


@operator("group_index_select_dim0")
def group_index_select_dim0(
    input_group: Sequence[Tensor], indices_group: Sequence[Tensor]
) -> list[Tensor]:
    """Return the rows `indices_group[i]` of `input_group[i]`, for each i.

    Raises RuntimeError if the groups differ in length.
    """
    check_same_length(input_group=input_group, indices_group=indices_group)
    pairs = zip(input_group, indices_group, strict=True)
    return [rows.index_select(0, indices) for rows, indices in pairs]


@operator("batch_index_select_dim0")
def batch_index_select_dim0(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Sequence[SymInt],
    input_rows: Sequence[SymInt],
    input_columns: Sequence[SymInt],
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """Return the selected rows of several matrices, flat.

    Args:
        inputs: the flat matrices, concatenated.
        indices: the selected rows of each matrix, concatenated.
        input_num_indices: number of selected rows of each matrix.
        input_rows: number of rows of each matrix.
        input_columns: number of columns of each matrix.
        permute_output_dim_0_1: whether the output has the first selected row of every matrix, then
            the second ones, and so on. The numbers of selected rows must be equal.

    Raises:
        RuntimeError: the three lists of numbers differ in length.
    """
    check_same_length(
        input_num_indices=input_num_indices, input_rows=input_rows, input_columns=input_columns
    )
    if not input_rows:
        return inputs[:0]
    sizes = [
        num_rows * columns for num_rows, columns in zip(input_rows, input_columns, strict=True)
    ]
    selected_rows = [
        matrix.view(num_rows, columns).index_select(0, matrix_indices)
        for matrix, num_rows, columns, matrix_indices in zip(
            inputs.split(sizes),
            input_rows,
            input_columns,
            indices.split(list(input_num_indices)),
            strict=True,
        )
    ]
    if permute_output_dim_0_1:
        return torch.cat(selected_rows, dim=1).flatten()
    return torch.cat([rows.flatten() for rows in selected_rows])


@operator("batch_index_select_dim0_tensor")
def batch_index_select_dim0_tensor(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Tensor,
    input_rows: Tensor,
    input_columns: Tensor,
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """Return the result of `batch_index_select_dim0`, for sizes in tensors. Waits for a GPU."""
    return batch_index_select_dim0(
        inputs,
        indices,
        input_num_indices.tolist(),
        input_rows.tolist(),
        input_columns.tolist(),
        permute_output_dim_0_1,
    )


# Devices


@operator("all_to_one_device")
def all_to_one_device(input_tensors: Sequence[Tensor], target_device: torch.device) -> list[Tensor]:
    """Return the tensors on one device. The host does not wait for copies to a GPU."""
    return [tensor.to(target_device, non_blocking=True) for tensor in input_tensors]


@operator("merge_pooled_embeddings")
def merge_pooled_embeddings(
    pooled_embeddings: Sequence[Tensor],
    uncat_dim_size: SymInt,
    target_device: torch.device,
    cat_dim: SymInt = 1,
) -> Tensor:
    """Concatenate tensors on `target_device`, along `cat_dim`; `uncat_dim_size` is ignored."""
    if any(tensor.is_meta for tensor in pooled_embeddings):  # while a graph is exported
        return torch.empty_like(torch.cat(list(pooled_embeddings), cat_dim), device=target_device)
    return torch.cat(all_to_one_device(pooled_embeddings, target_device), dim=cat_dim)


@operator("sum_reduce_to_one")
def sum_reduce_to_one(input_tensors: Sequence[Tensor], target_device: torch.device) -> Tensor:
    """Return the sum of one or more tensors on `target_device`, added in their order."""
    check(len(input_tensors) > 0, "input_tensors must have at least one tensor")
    total, *others = all_to_one_device(input_tensors, target_device)
    for tensor in others:
        total = total + tensor
    return total


@operator("is_uvm_tensor")
def is_uvm_tensor(t: Tensor) -> bool:
    """Return False: emblib has no tensors in managed memory; tables in host memory are pinned."""
    return False


@operator("new_unified_tensor")
def new_unified_tensor(self: Tensor, sizes: Sequence[int], is_host_mapped: bool) -> Tensor:
    """Return an uninitialised tensor of ordinary memory, in the dtype of `self` on the CPU.

    Raises:
        NotImplementedError: `self` is on a GPU.
    """
    if self.is_cuda:
        raise NotImplementedError(
            "memory that CPU and GPU share is a property of tables in emblib: a table with "
            "EmbeddingLocation.MANAGED, or emblib.Placement.MANAGED (docs/placement.md)"
        )
    return self.new_empty(sizes)


for _name in ("new_managed_tensor", "new_vanilla_managed_tensor", "new_host_mapped_tensor"):
    operator(f"{_name}(Tensor self, int[] sizes) -> Tensor")(
        lambda self, sizes: new_unified_tensor(self, sizes, False)
    )


@operator("check_feature_gate_key")
def check_feature_gate_key(key: str) -> bool:
    """Return whether a feature of FBGEMM is on: the environment has `FBGEMM_<key>=1`."""
    return os.environ.get(f"FBGEMM_{key}", "0") == "1"
