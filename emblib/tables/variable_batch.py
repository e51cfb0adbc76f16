"""Batches whose features differ in size (VBE): which bag is whose, and where its row goes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class VariableBatch(NamedTuple):
    """`bag_layout` int64 `[bags, 2]` of (feature, first element of the output); output elements."""

    bag_layout: Tensor
    columns: int


def variable_batch(
    batch_sizes: Sequence[Sequence[int]], dims: Sequence[int], num_bags: int, device: torch.device
) -> VariableBatch:
    """The layout of FBGEMM's variable batch embeddings.

    Bags come feature-major, those of a feature rank after rank: `batch_sizes[f][r]` bags of feature
    f from rank r. The output is one vector: rank after rank, for each rank feature after feature,
    for each the rows of its bags, `dims[f]` elements each.

    Raises:
        ValueError: not one list a feature, lists of different lengths, a negative size, or sizes
            that do not add up to `num_bags`.
    """
    if len(batch_sizes) != len(dims):
        raise ValueError(
            f"batch_sizes must have one list a feature = {len(dims)}, got {len(batch_sizes)}"
        )
    ranks = {len(sizes) for sizes in batch_sizes}
    if len(ranks) > 1:
        raise ValueError(
            f"batch_sizes must have the same number of ranks for every feature, got {sorted(ranks)}"
        )
    sizes = [size for row in batch_sizes for size in row]
    if any(size < 0 for size in sizes):
        raise ValueError(f"batch_sizes must be >= 0, got {min(sizes)}")
    if sum(sizes) != num_bags:
        raise ValueError(
            f"batch_sizes add up to {sum(sizes)} bags, but offsets has {num_bags} + 1 entries"
        )
    # Plain numbers so far, so that a compiled graph takes other sizes without being compiled anew.
    columns = sum(dim * sum(row) for dim, row in zip(dims, batch_sizes, strict=True))
    blocks = torch.tensor(sizes, dtype=torch.int64)
    dim = torch.tensor(list(dims), dtype=torch.int64).unsqueeze(1)
    shape = (len(dims), max(ranks, default=0))
    elements = (blocks.view(shape) * dim).t().reshape(-1)  # rank-major, as in the output
    starts = (elements.cumsum(0) - elements).view(shape[::-1]).t()  # of each block [F, ranks]
    first_bag = blocks.cumsum(0) - blocks
    # Bag i of a block with its first element at s and its first bag at b is at s + (i - b) * dim.
    dim_of_block = dim.expand(shape).reshape(-1)
    base = starts.reshape(-1) - first_bag * dim_of_block
    feature = torch.arange(shape[0]).repeat_interleave(shape[1])
    of_block = torch.stack([feature, base, dim_of_block], dim=1)
    of_bag = of_block.repeat_interleave(blocks, dim=0, output_size=num_bags)
    layout = of_bag[:, :2].clone()
    layout[:, 1] += torch.arange(num_bags) * of_bag[:, 2]
    return VariableBatch(layout.to(device, non_blocking=True), columns)
