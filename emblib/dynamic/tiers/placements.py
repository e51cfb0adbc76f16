"""Placements: where the rows of a training batch go, as the backing tier has computed it.

`BackingTier.place` makes a `BatchPlacement`, one op a `OneOpPlacement`. Recording a placement is
repeatable, so an interrupted step can be completed.
"""

from typing import NamedTuple

from torch import Tensor

from emblib.dynamic.tiers.prefetched_rows import RowMoves


class SwappedRows(NamedTuple):
    """Result of `emblib.ops.tiers.tier_swap_` for the n misses of one table.

    The first two and `refused_misses` are on the device of the tables, the others on the CPU.

    Attributes:
        slots: int64 `[n]`, slot of each miss, -1 for none; overflow rows follow the slots.
        status: uint8 `[n]`, status of each miss.
        demoted: int64 `[3, k]`, keys, stamps and scores of the evicted keys.
        demoted_rows: uint8 `[k, row_bytes]`, their rows.
        refused_misses: int64 `[r]`, numbers of the misses that found no slot.
        found_slots: int64 `[m]`, slots of the misses that were in the store, -1 for none.
    """

    slots: Tensor
    status: Tensor
    demoted: Tensor
    demoted_rows: Tensor
    refused_misses: Tensor
    found_slots: Tensor


class BatchPlacement(NamedTuple):
    """Slots that the rows of a batch get; slots >= `DynamicSpec.rows` are overflow rows.

    Attributes:
        swaps: result of the swap of rows, per table.
        slots_by_position: int64 `[L]`, the slot of each position of the batch; None if no row is
            in an overflow row.
        overflow: int64 `[r, 3]` per table, keys, stamps and scores of the overflow rows.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    swaps: list[SwappedRows]
    slots_by_position: Tensor | None
    overflow: list[Tensor]
    moves: RowMoves
    counts: list[dict[str, int]]


class OneOpPlacement(NamedTuple):
    """Placement of a batch with misses that one op inserted.

    Attributes:
        overflow: int64 `[r, 3]` per table, keys, stamps and scores of the overflow rows.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    overflow: list[Tensor]
    moves: RowMoves
    counts: list[dict[str, int]]
