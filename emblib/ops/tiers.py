"""Rows that move between a dynamic table and the store behind it, on the CPU.

Between the tiers rows are packed, uint8 `[n, row_bytes]`: the bytes of a row in all row buffers,
weights, then optimizer states. A row that changes the tier is copied twice: out of one tier into a
packed matrix, and out of that into the other tier.

- `tier_swap_(row_buffers, slots, status, evicted, found, rows, first_overflow)` moves the rows of
  one table after the insertion of a batch. `row_buffers` are matrices by slot with the same number
  of rows. `slots` int64 `[n]`, `status` uint8 `[n]` and `evicted` int64 `[n, 3]` are results of
  `hash_insert_` for the table's misses. `found` int64 `[m]` are the misses that have a row in the
  store, in any order, and `rows` uint8 `[m, row_bytes]` these rows. The rows of evicted keys are
  copied out of their slots before stored rows are written there. Refused misses get the overflow
  rows from `first_overflow` on. Returns slots and status by miss, as they are then (`HIT` for
  stored rows, `NEW` for refused misses), keys, stamps and scores of evicted keys, int64 `[3, k]`,
  their rows, the refused misses, and the slots of `found`. A stored row without a slot, -1, is not
  written
- `tier_read(records, slots, row_bytes)` reads records of a store, uint8 `[S, stride]`: some words
  of 8 bytes, then the bytes of a row; either may be missing. Returns the positions of slots that
  are not -1, their words, int64 `[words, m]`, and rows, uint8 `[m, row_bytes]`
- `tier_write_(records, slots, words, values)` writes records to distinct slots; -1 is none

The definition is `emblib.reference.tiers`.
"""

import torch
from torch import Tensor

tier_swap_ = torch.ops.emblib.tier_swap_.default
tier_read = torch.ops.emblib.tier_read.default
tier_write_ = torch.ops.emblib.tier_write_.default


@torch.library.register_fake("emblib::tier_swap_")
def _(
    row_buffers: list[Tensor],
    slots: Tensor,
    status: Tensor,
    evicted: Tensor,
    found: Tensor,
    rows: Tensor,
    first_overflow: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    num_demoted, num_refused = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        torch.empty_like(slots),
        torch.empty_like(status),
        slots.new_empty(3, num_demoted),
        rows.new_empty(num_demoted, rows.size(1)),
        slots.new_empty(num_refused),
        torch.empty_like(found),
    )


@torch.library.register_fake("emblib::tier_read")
def _(records: Tensor, slots: Tensor, row_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        slots.new_empty(num_rows),
        slots.new_empty((records.size(1) - row_bytes) // 8, num_rows),
        records.new_empty(num_rows, row_bytes),
    )


@torch.library.register_fake("emblib::tier_write_")
def _(records: Tensor, slots: Tensor, words: Tensor, values: Tensor) -> None:
    return None
