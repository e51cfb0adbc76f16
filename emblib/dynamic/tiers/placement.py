"""Placement of a batch: the slots of its misses, and the rows that move between the tiers."""

from typing import NamedTuple

from torch import Tensor

from emblib.dynamic.tiers.prefetched_rows import RowMoves
from emblib.dynamic.tiers.store import StoredRows
from emblib.ops.hash import InsertResult, Misses


class SwappedRows(NamedTuple):
    """Result of `emblib.ops.tiers.tier_swap_` for one table."""

    slots: Tensor
    status: Tensor
    demoted: Tensor
    demoted_rows: Tensor
    refused: Tensor
    found_slots: Tensor


class BatchPlacement(NamedTuple):
    """Slots that the rows of a batch get; slots >= `DynamicSpec.rows` are overflow rows.

    Attributes:
        misses: slots and status by miss, per table, and what else the swap of rows returned.
        positions: int64 `[L]`, the slot of each position of the batch; None if no row is in an
            overflow row.
        overflow: keys that are served in overflow rows, per table, without values.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    misses: list[SwappedRows]
    positions: Tensor | None
    overflow: list[StoredRows]
    moves: RowMoves
    counts: list[dict[str, int]]


class BatchPlacementAtOnce(NamedTuple):
    """Placement of a batch with misses that one op inserted.

    Attributes:
        misses: the misses of the batch.
        result: slots and status by miss.
        overflow: keys that are served in overflow rows, per table, without values.
        moves: rows that move between the tiers.
        counts: counters of `TierStats` after the batch, per table.
    """

    misses: Misses
    result: InsertResult
    overflow: list[StoredRows]
    moves: RowMoves
    counts: list[dict[str, int]]
