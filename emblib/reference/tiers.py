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
    """Return the positions of slots that are not -1, their words, and their rows."""
    positions = (slots >= 0).nonzero().view(-1)
    found, num_words = records[slots[positions]], (records.shape[1] - row_bytes) // 8
    words = torch.empty(num_words, positions.numel(), dtype=torch.int64)
    for number in range(num_words):
        word = found[:, 8 * number : 8 * number + 8].clone(memory_format=torch.contiguous_format)
        words[number] = word.view(torch.int64).view(-1)
    return positions, words, found[:, 8 * num_words : 8 * num_words + row_bytes]


def write_(records: Tensor, slots: Tensor, words: Tensor, values: Tensor) -> None:
    """Write words and row to each slot that is not -1."""
    heads = [word.clone().view(-1, 1).view(torch.uint8) for word in words]
    rows = torch.cat([*heads, values], dim=1)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            records[slot, : row.numel()] = row
