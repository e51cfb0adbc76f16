"""Bags as dense tensors: lists of rows, padded matrices, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The bags as views of `values`, one tensor each (reads `lengths` back)."""
    return list(values.split(lengths.tolist()))


def join(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`rows` one after the other, and their lengths, int32.

    Raises:
        ValueError: no rows, whose dtype nobody could tell.
    """
    if not rows:
        raise ValueError("a list of bags must not be empty: use JaggedTensor.empty()")
    values = torch.cat(list(rows))
    lengths = [row.size(0) for row in rows]
    return values, torch.tensor(lengths, dtype=torch.int32, device=values.device)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """The first `lengths[b]` rows of each `padded[b]`, one after the other."""
    if padded.dim() < 2 or padded.size(0) != lengths.numel():
        raise ValueError(
            f"padded must be [{lengths.numel()}, N, ...] for {lengths.numel()} lengths, got "
            f"{list(padded.shape)}"
        )
    column = torch.arange(padded.size(1), device=padded.device)
    return padded[column < lengths.unsqueeze(1)]


def pad(values: Tensor, lengths: Tensor, offsets: Tensor, width: int, padding: float) -> Tensor:
    """`[B, width, ...]`: bag b in row b, cut or filled with `padding` (reads nothing back)."""
    shape = (lengths.numel(), width, *values.shape[1:])
    if not values.size(0):
        return values.new_full(shape, padding)
    column = torch.arange(width, device=values.device)
    position = offsets[:-1].unsqueeze(1) + column
    # Positions behind the last value are of padding alone.
    rows = values[position.clamp(max=values.size(0) - 1)]
    inside = (column < lengths.unsqueeze(1)).reshape(*shape[:2], *([1] * (values.dim() - 1)))
    return torch.where(inside, rows, rows.new_full((), padding))
