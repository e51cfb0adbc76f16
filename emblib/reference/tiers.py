"""Rows that move between a dynamic table and its store: the definition of `emblib.ops.tiers`.

Arguments and results are those of the ops. `row_buffers` are matrices by slot, such as weights and
optimizer states. A *packed* row, uint8 `[row_bytes]`, has the bytes of one row in all buffers, one
buffer after the other. A record of a store has some 8-byte words (stamp, score), then a packed row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.reference.hash import EVICTING, HIT, NEW, REFUSED


def pack_rows(row_buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
    """Return the packed rows in slots `[n]`, uint8 `[n, row_bytes]`."""
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
    """Copy the rows of evicted keys out of their slots, then write stored rows to theirs.

    Args:
        row_buffers: changed in place.
        slots: int64 `[n]`, the slot of each miss after its insertion, -1 for none.
        status: uint8 `[n]`, the result of the insertion of each miss (`InsertStatus`).
        evicted: int64 `[n, 3]`, key, stamp and score of the key that each miss evicted.
        found: int64 `[m]`, numbers of the misses that have a row in the store.
        rows: uint8 `[m, row_bytes]`, these rows.
        first_overflow: the overflow row of the first refused miss; the next ones get the rows after
            it.

    Returns:
        Slots `[n]`, which for refused misses are overflow rows; status `[n]`, NEW for refused
        misses and HIT for `found`; keys, stamps and scores of evicted keys, int64 `[3, k]`, and
        their packed rows; numbers of the refused misses; the slots of `found`.
    """
    slots, status = slots.clone(), status.clone()
    is_evicting = status == EVICTING
    demoted, demoted_rows = evicted[is_evicting].T, pack_rows(row_buffers, slots[is_evicting])
    refused = (status == REFUSED).nonzero().view(-1)
    slots[refused] = torch.arange(
        first_overflow, first_overflow + refused.numel(), device=slots.device
    )
    status[refused] = NEW
    status[found] = HIT
    found_slots = slots[found]
    first_byte = 0
    for buffer in row_buffers:
        nbytes = buffer.shape[1] * buffer.itemsize
        values = rows[:, first_byte : first_byte + nbytes].clone(
            memory_format=torch.contiguous_format
        )
        for slot, row in zip(found_slots.tolist(), values.view(buffer.dtype), strict=True):
            if slot >= 0:
                buffer[slot] = row
        first_byte += nbytes
    return slots, status, demoted, demoted_rows, refused, found_slots


def read(records: Tensor, slots: Tensor, row_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of slots that are not -1, and the words and rows of their records.

    `records` is uint8 `[S, record_bytes]`. With m such positions, the words are int64 `[words, m]`,
    as many as fit before a row, and the rows uint8 `[m, row_bytes]`.
    """
    positions = (slots >= 0).nonzero().view(-1)
    selected_records = records[slots[positions]]
    num_words = (records.shape[1] - row_bytes) // 8
    words = torch.empty(num_words, positions.numel(), dtype=torch.int64, device=records.device)
    for number in range(num_words):
        word = selected_records[:, 8 * number : 8 * number + 8].clone(
            memory_format=torch.contiguous_format
        )
        words[number] = word.view(torch.int64).view(-1)
    return positions, words, selected_records[:, 8 * num_words : 8 * num_words + row_bytes]


def write_(records: Tensor, slots: Tensor, words: Tensor, values: Tensor) -> None:
    """Write records to slots `[n]`, -1 for none: words, int64 `[words, n]`, then rows `values`.

    The rows are uint8 `[n, row_bytes]`. Bytes of a record after its row are not changed.
    """
    word_bytes = [word.clone().view(-1, 1).view(torch.uint8) for word in words]
    new_records = torch.cat([*word_bytes, values], dim=1)
    for slot, record in zip(slots.tolist(), new_records, strict=True):
        if slot >= 0:
            records[slot, : record.numel()] = record
