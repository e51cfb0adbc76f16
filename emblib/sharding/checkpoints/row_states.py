"""Optimizer states of one number a row, where a table is cut by columns.

A row-wise optimizer that sees some columns of a row keeps the mean over those. So each column box
has its own number, and a checkpoint has one for each stretch of columns between two cuts. Into
boxes that are cut otherwise goes the mean over their columns: of sums and moving averages of means
this is what the box would have itself, had its gradients been the same; of counts, which are equal
in all boxes of a row, it is the count.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.sharding.boxes import Box, Span


def cuts_of(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The columns at which any box begins or ends."""
    return tuple(sorted({edge for box in boxes for edge in box.columns}))


def stretches(columns: Span, cuts: Sequence[int]) -> Span:
    """The numbers of the stretches between `cuts` that a span of columns is made of."""
    return cuts.index(columns[0]), cuts.index(columns[1])


def averaged(states: Tensor, cuts: Sequence[int], columns: Span) -> Tensor:
    """The mean of `[R, stretches]` over a span of columns, `[R]`; exact where all are equal.

    The mean is weighted by how many columns of the span a stretch has.
    """
    weights = [
        max(min(end, columns[1]) - max(start, columns[0]), 0)
        for start, end in itertools.pairwise(cuts)
    ]
    total = torch.zeros(states.shape[0], dtype=torch.float64, device=states.device)
    for column, weight in enumerate(weights):
        if weight:
            total.add_(states[:, column], alpha=weight)
    return (total / (columns[1] - columns[0])).to(states.dtype)
