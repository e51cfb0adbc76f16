"""Where values of a checkpoint are read to, and how they get from there to their place."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.sharding.boxes import Box, Span
from emblib.sharding.checkpoints import row_states
from emblib.sharding.checkpoints.sharded_table import RowStates, ShardedTable
from emblib.sharding.checkpoints.state_trees import Leaf
from emblib.sharding.groups_of_ranks import Ranks


class Target:
    """Read to `room`, which then is the value."""

    def __init__(self, leaf: Leaf, room: Any) -> None:
        self.leaf, self.room = leaf, room

    def finish(self) -> None:
        """Put what was read in its place."""
        self.leaf.replace(self.room)


class RowStateTarget(Target):
    """One number a row, saved and wanted of tables that may be cut by columns in different ways.

    Args:
        leaf: a `RowStates`, a `ShardedTable` `[R]` or a tensor `[R]`.
        size: as it was saved: `[R]`, or `[R, stretches]`.
        cuts: the columns between which the stretches are; None where they were not cut.
    """

    def __init__(self, leaf: Leaf, size: torch.Size, cuts: Sequence[int] | None) -> None:
        value: Tensor = leaf.value
        self._cuts = cuts
        self._width = size[1] if len(size) > 1 else 1
        spans = [(0, size[0])]
        if isinstance(value, ShardedTable):
            spans = [value.boxes[i].rows for i in value.parts]
        # Boxes of a rank may share rows; what is read is cut so that each row is read once.
        self._spans = _disjoint(spans)
        boxes = [Box(0, span, (0, self._width)) for span in self._spans]
        parts = {
            i: torch.empty(box.shape[: len(size)], dtype=value.dtype) for i, box in enumerate(boxes)
        }
        super().__init__(leaf, ShardedTable(size, boxes, parts, Ranks.single(), value.dtype))

    def finish(self) -> None:
        """The mean of the stretches that a box is of, for each box."""
        value = self.leaf.value
        if not isinstance(value, ShardedTable):
            value.copy_(self._rows((0, value.shape[0]), None))
            return
        for i, part in value.parts.items():
            box = value.boxes[i]
            columns = None
            if isinstance(value, RowStates):
                columns = (value.cuts[box.columns[0]], value.cuts[box.columns[1]])
            rows = self._rows(box.rows, columns)
            part.copy_(rows.view(-1, *[1] * (part.dim() - 1)).expand_as(part))

    def _rows(self, rows: Span, columns: Span | None) -> Tensor:
        """The numbers of a span of rows, for a span of columns or all."""
        found = [
            self.room.parts[i]
            for i, span in enumerate(self._spans)
            if rows[0] <= span[0] and span[1] <= rows[1]
        ]
        whole = torch.cat(found) if found else torch.empty(0, self._width)
        if self._cuts is None:
            return whole.view(-1)
        return row_states.averaged(whole, self._cuts, columns or (0, self._cuts[-1]))


def _disjoint(spans: Sequence[Span]) -> list[Span]:
    """The spans between the edges of some spans that are within one of them."""
    edges = sorted({edge for span in spans for edge in span})
    return [
        (start, end)
        for start, end in itertools.pairwise(edges)
        if any(span[0] <= start and end <= span[1] for span in spans)
    ]
