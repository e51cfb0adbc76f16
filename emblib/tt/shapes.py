"""Factors of a tensor-train table: row factors cover its rows, dim factors multiply to its dim.

Row factors are rounded-up roots. Three of them pad about 10,000 rows by up to 5 %, 100,000 by
2.2 %, 10 million by 0.5 %. Dim factors are exact: a table has no columns that the user did not ask
for.

Rows share core slices if their ids share digits, so ids near each other share most of them. Ids are
often ordered, e.g. by frequency; then the most frequent ids share all core slices but the last. A
permutation of ids, `(multiplier * id + offset) % rows`, distributes those of more than a few rows.
It is a bijection, since the multiplier has no factor in common with the number of rows.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple


def row_factors(rows: int, num_cores: int) -> tuple[int, ...]:
    """Choose `num_cores` near-equal factors, descending, whose product is at least `rows` >= 1.

    Raises:
        ValueError: an argument is below 1.
    """
    _check_sizes(rows=rows, num_cores=num_cores)
    factors = []
    for cores_left in range(num_cores, 0, -1):
        factor = _ceil_root(rows, cores_left)
        factors.append(factor)
        rows = -(-rows // factor)
    return tuple(factors)


def dim_factors(dim: int, num_cores: int) -> tuple[int, ...]:
    """Choose the most balanced exact factors of `dim` >= 1, ascending; some are 1 if need be.

    Balanced means the least sum; among equal sums a last factor divisible by 4 is preferred, for
    vector registers. They ascend because the work per prefix depends on the first factors only.

    Raises:
        ValueError: an argument is below 1.
    """
    _check_sizes(dim=dim, num_cores=num_cores)
    return min(
        _factorisations(dim, num_cores, 1),
        key=lambda factors: (sum(factors), factors[-1] % 4 != 0, factors),
    )


def _check_sizes(**sizes: int) -> None:
    """Raise ValueError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")


def max_ranks(row_factors: Sequence[int], dim_factors: Sequence[int]) -> tuple[int, ...]:
    """Return the largest rank that the cores on the two sides of each cut can use.

    Rank k connects the first k cores to the others. As a matrix of `prod(p_j * q_j)` rows (j < k)
    by `prod(p_j * q_j)` columns (j >= k) the table has at most the smaller of the two as its rank,
    so that is the largest rank with an effect.
    """
    sizes = [p * q for p, q in zip(row_factors, dim_factors, strict=True)]
    return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))


def check_ranks(
    ranks: Sequence[int], row_factors: Sequence[int], dim_factors: Sequence[int]
) -> None:
    """Raise ValueError unless there is a rank per cut that its cores can use, see `max_ranks`."""
    for k, (rank, max_rank) in enumerate(
        zip(ranks, max_ranks(row_factors, dim_factors), strict=True)
    ):
        if not 1 <= rank <= max_rank:
            raise ValueError(
                f"ranks[{k}] must be in [1, {max_rank}], what the cores on its two sides can use "
                f"(row_factors {tuple(row_factors)}, dim_factors {tuple(dim_factors)}), "
                f"got {rank}; lower it, use TTSpec.usable(), or use fewer cores"
            )


class Permutation(NamedTuple):
    """A permutation of the ids of a table: id i has row `(multiplier * i + offset) % rows`."""

    multiplier: int
    offset: int


AS_GIVEN = Permutation(1, 0)
"""The permutation that changes nothing."""


_MARGINS = 5  # multipliers are at least rows // 5, and as far below the rows; not measured


def permutation(rows: int, seed: int) -> Permutation:
    """Return the permutation of a table, drawn from a seed; `AS_GIVEN` below 5 rows."""
    margin = rows // _MARGINS
    if margin == 0:
        return AS_GIVEN
    draw = random.Random(seed)
    # Multipliers near 0 or `rows` would leave neighbours together. Those near half of `rows` leave
    # ids at distance 2 together, but are not excluded: stored tables depend on the draw.
    while math.gcd(multiplier := draw.randrange(margin, rows - margin), rows) > 1:
        pass
    return Permutation(multiplier, draw.randrange(rows))


def inverse(permutation: Permutation, rows: int) -> Permutation:
    """Return the inverse of a permutation, whose multiplier must be coprime to `rows`."""
    multiplier, offset = permutation
    if rows == 1:
        return AS_GIVEN
    inverse_multiplier = pow(multiplier, -1, rows)
    return Permutation(inverse_multiplier, -inverse_multiplier * offset % rows)


def _ceil_root(value: int, degree: int) -> int:
    """Return the smallest r with `r**degree >= value`."""
    root = max(1, round(value ** (1.0 / degree)))
    while root**degree < value:
        root += 1
    while root > 1 and (root - 1) ** degree >= value:
        root -= 1
    return root


def _factorisations(value: int, num_factors: int, min_factor: int) -> Iterator[tuple[int, ...]]:
    """Yield all ascending tuples of `num_factors` factors >= `min_factor` with product `value`."""
    if num_factors == 1:
        if value >= min_factor:
            yield (value,)
        return
    for factor in range(min_factor, _ceil_root(value, num_factors) + 1):
        if value % factor == 0:
            for other_factors in _factorisations(value // factor, num_factors - 1, factor):
                yield (factor, *other_factors)
