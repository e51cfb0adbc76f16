"""Work of a batch of lookups in a tensor train: the multiply-adds of its products.

A row is the product of a left and a right half, which rows share: with cores G_0, G_1, ... the left
half is G_0 G_1 (G_0 if there are two cores), the right half the product of the others. Forward
computes each distinct half and each distinct row once. Backward computes the gradients of both
halves from the rows' gradients, then the gradients of the cores. It computes halves of two cores
again unless forward saved them, as it does on a GPU, and with the first left ones on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class TTWork(NamedTuple):
    """Work of a batch of lookups in one table.

    Attributes:
        rows: number of distinct rows.
        lefts, rights: number of distinct left and right halves.
        forward, backward: multiply-adds of the products; sums of bags and updates are not counted.
            `backward` has all left halves again, and no right ones.

    Example:
        >>> bags = emblib.TableBatchedTTEmbeddingBags([emblib.TTSpec(1_000_000, 64, (16, 16))])
        >>> (work,) = bags.work(torch.arange(1000), torch.arange(0, 1001, 20))
        >>> work.rows
        1000
    """

    rows: int
    lefts: int
    rights: int
    forward: int
    backward: int

    @classmethod
    def of(
        cls,
        dim_factors: Sequence[int],
        full_ranks: Sequence[int],
        *,
        rows: int,
        lefts: int,
        rights: int,
    ) -> TTWork:
        """Return the work of a batch in a train of 2 to 4 cores.

        Args:
            dim_factors: q, one per core.
            full_ranks: R with the 1 at both ends, one number more than cores.
            rows: number of distinct rows.
            lefts: number of distinct left halves.
            rights: number of distinct right halves.
        """
        num_cores = len(dim_factors)
        num_left_cores = 1 if num_cores == 2 else 2
        per_row = math.prod(dim_factors) * full_ranks[num_left_cores]
        per_left = _multiply_adds_of_half(
            dim_factors[:num_left_cores], full_ranks[: num_left_cores + 1]
        )
        per_right = _multiply_adds_of_half(
            dim_factors[num_left_cores:], full_ranks[num_left_cores:]
        )
        halves = lefts * per_left + rights * per_right
        backward = 2 * rows * per_row + 2 * halves + lefts * per_left
        return cls(rows, lefts, rights, halves + rows * per_row, backward)


def _multiply_adds_of_half(dim_factors: Sequence[int], ranks: Sequence[int]) -> int:
    """Return the multiply-adds of a half: of one product of two cores; 0 for one core."""
    if len(dim_factors) == 1:
        return 0
    return math.prod(dim_factors) * math.prod(ranks)
