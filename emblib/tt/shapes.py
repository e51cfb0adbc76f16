"""Factors of a tensor-train table: row factors cover its rows, dim factors multiply to its dim.

Row factors are ceil-roots: the padding they add is below 1% from a few thousand rows on, and they
cost microseconds, where a search over prime factorisations takes seconds and may pad by 90%
(2**20 rows). Dim factors are exact: a table never has columns its user did not ask for.
"""

import math
from collections.abc import Iterator, Sequence


def row_factors(rows: int, cores: int) -> tuple[int, ...]:
    """Choose `cores` near-equal factors, descending, whose product is at least `rows`."""
    factors = []
    for left in range(cores, 0, -1):
        factor = _ceil_root(rows, left)
        factors.append(factor)
        rows = -(-rows // factor)
    return tuple(factors)


def dim_factors(dim: int, cores: int) -> tuple[int, ...]:
    """Choose the most balanced exact factors of `dim`, ascending; 1 if a prime forces it.

    Balanced means the least sum; among equals a last factor divisible by 4 wins, which suits vector
    registers. Ascending, because the work for a prefix grows with the first factors alone.
    """
    return min(
        _factorisations(dim, cores, 1),
        key=lambda factors: (sum(factors), factors[-1] % 4 != 0, factors),
    )


def check_ranks(
    ranks: Sequence[int], row_factors: Sequence[int], dim_factors: Sequence[int]
) -> None:
    """Raise ValueError unless every rank is in `[1, most]`.

    Rank k joins the first k cores to the others; as a matrix of `prod(p_j * q_j)` rows (j < k) by
    `prod(p_j * q_j)` columns (j >= k) the table has no rank above the smaller of the two, so a
    larger one would only add weights that can express nothing.
    """
    sizes = [p * q for p, q in zip(row_factors, dim_factors, strict=True)]
    for k, rank in enumerate(ranks, start=1):
        most = min(math.prod(sizes[:k]), math.prod(sizes[k:]))
        if not 1 <= rank <= most:
            raise ValueError(
                f"ranks[{k - 1}] must be in [1, {most}], what the cores on its two sides can use "
                f"(row_factors {tuple(row_factors)}, dim_factors {tuple(dim_factors)}), "
                f"got {rank}; lower it, or use fewer cores"
            )


def _ceil_root(value: int, degree: int) -> int:
    """Return the smallest r with `r**degree >= value`."""
    root = max(1, round(value ** (1.0 / degree)))
    while root**degree < value:
        root += 1
    while root > 1 and (root - 1) ** degree >= value:
        root -= 1
    return root


def _factorisations(value: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all ascending tuples of `parts` factors >= `least` with product `value`."""
    if parts == 1:
        if value >= least:
            yield (value,)
        return
    for factor in range(least, _ceil_root(value, parts) + 1):
        if value % factor == 0:
            for rest in _factorisations(value // factor, parts - 1, factor):
                yield (factor, *rest)
