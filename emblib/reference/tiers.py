"""Rows that move between a dynamic table and its store: the definition of `emblib.ops.tiers`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.reference.hash import EVICTING, HIT, NEW, REFUSED


def packed(row_buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Return the rows in slots, uint8 `[n, row_bytes]`: the bytes of all buffers in order."""
    return torch.cat(
        [buffer[slots].contiguous().view(torch.uint8) for buffer in row_buffers], dim=1
    )


def swap_(
    row_buffers: Sequence[Tensor],
    slots: Tensor,
    status: Tensor,
    evicted: Tensor,
    found: Tensor,
    rows: Tensor,
    first_overflow: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy the rows of evicted keys out of their slots, then write stored rows to theirs."""
    slots, status = slots.clone(), status.clone()
    is_evicting = status == EVICTING
    demoted, demoted_rows = evicted[is_evicting].T, packed(row_buffers, slots[is_evicting])
    refused = (status == REFUSED).nonzero().view(-1)
    slots[refused] = torch.arange(first_overflow, first_overflow + refused.numel())
    status[refused] = NEW
    status[found] = HIT
    found_slots = slots[found]
    at = 0
    for buffer in row_buffers:
        nbytes = buffer.shape[1] * buffer.itemsize
        values = rows[:, at : at + nbytes].clone(memory_format=torch.contiguous_format)
        for slot, row in zip(found_slots.tolist(), values.view(buffer.dtype), strict=True):
            if slot >= 0:
                buffer[slot] = row
        at += nbytes
    return slots, status, demoted, demoted_rows, refused, found_slots


def read(records: Tensor, slots: Tensor, row_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of slots that are not -1, their stamps and scores, and their rows."""
    positions = (slots >= 0).nonzero().view(-1)
    found = records[slots[positions]]
    words = found[:, :16].contiguous().view(torch.int64)
    return positions, words.T, found[:, 16 : 16 + row_bytes]


def write_(records: Tensor, slots: Tensor, stamps: Tensor, scores: Tensor, values: Tensor) -> None:
    """Write stamp, score and row to each slot that is not -1."""
    words = torch.stack([stamps, scores], dim=1)
    rows = torch.cat([words.view(torch.uint8), values], dim=1)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            records[slot, : row.numel()] = row
