"""Bags of different lengths: lengths to offsets and back."""

import torch
from torch import Tensor


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Offsets `[N + 1]` of bags with `lengths` `[...]` (flattened), in the same integer dtype.

    Raises:
        ValueError: lengths that are not integers, or negative (reads the device).
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be int32 or int64, got {lengths.dtype}")
    flat = lengths.flatten()
    if flat.numel() and int(flat.min()) < 0:
        raise ValueError(f"lengths must be >= 0, got {int(flat.min())}")
    return torch.cat([flat.new_zeros(1), flat.cumsum(0, dtype=flat.dtype)])


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Lengths `[N]` of the bags between `offsets` `[N + 1]`."""
    return offsets.diff()
