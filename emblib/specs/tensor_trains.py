"""Description of tensor-train tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from emblib.specs.checks import (
    OptionEnum,
    check_count,
    check_float_dtype,
    check_sequence,
    check_table_name,
    normalise_counts,
    normalise_dim,
)
from emblib.tt import shapes

_LOG = logging.getLogger(__name__)


class IdOrder(OptionEnum):
    """Row that an id reads: row `id` (AS_GIVEN), or the row that a bijection assigns (PERMUTED)."""

    AS_GIVEN = "as_given"
    PERMUTED = "permuted"


def check_cores(
    ranks: Sequence[int],
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
    *,
    computed: int | None = None,
) -> None:
    """Check ranks and factors of 2 to 4 cores.

    Args:
        ranks: inner ranks, one fewer than cores.
        row_factors: one factor per core; () is not checked.
        dim_factors: one factor per core; () is not checked.
        computed: placeholder for a factor that is computed later, which is not checked; None if
            there is none.

    Raises:
        TypeError: a rank or factor is not an int.
        ValueError: a rank or factor is below 1, there are not 1 to 3 ranks, or there is not one
            factor per core.
    """
    num_cores = len(ranks) + 1
    if not 2 <= num_cores <= 4:
        raise ValueError(f"ranks must have 1 to 3 entries (2 to 4 cores), got {ranks}")
    for rank in ranks:
        check_count("each rank", rank)
    for name, factors in (("row_factors", row_factors), ("dim_factors", dim_factors)):
        if factors and len(factors) != num_cores:
            raise ValueError(
                f"{name} must have one entry per core = {num_cores} (ranks has "
                f"{num_cores - 1}), got {factors}"
            )
        for factor in factors:
            if factor != computed:
                check_count(f"each of {name}", factor)


@dataclass(frozen=True)
class TTSpec:
    """A table of `rows` vectors of length `dim`, stored as 2 to 4 tensor-train cores.

    Neighbouring rows share slices of cores.

    Args:
        rows: number of rows, >= 1.
        dim: elements per row, 1 to 2^25.
        ranks: the inner ranks, one fewer than cores.
        row_factors: one factor per core, whose product is at least `rows`; () lets
            `emblib.tt.shapes` choose them.
        dim_factors: one factor per core, whose product is `dim`; () lets `emblib.tt.shapes` choose
            them.
        name: name of the table in messages.
        ids: order of the ids in the rows. PERMUTED maps ids to rows by a bijection; choose it if
            ids are in random order or in order of frequency (see `emblib.tt.shapes`).
        seed: seed of the bijection, >= 0; unused with AS_GIVEN.

    Raises:
        TypeError: a number is not an int; or ranks or factors are not a sequence.
        ValueError: a number is out of range, the factors do not fit, there are not 2 to 4 cores,
            `name` is not a string or has dots, or the order is unknown.

    Example:
        >>> spec = emblib.TTSpec(rows=1_000_000, dim=64, ranks=(16, 16))
        >>> spec.row_factors, spec.dim_factors
        ((100, 100, 100), (4, 4, 4))
        >>> spec.numel, spec.rows * spec.dim
        (115200, 64000000)
    """

    rows: int
    dim: int
    ranks: tuple[int, ...]
    row_factors: tuple[int, ...] = field(default=())
    dim_factors: tuple[int, ...] = field(default=())
    name: str = ""
    ids: IdOrder = IdOrder.AS_GIVEN
    seed: int = 0

    def __post_init__(self) -> None:
        normalise_counts(self, "rows")
        normalise_dim(self)
        check_table_name(self.name)
        object.__setattr__(self, "ranks", check_sequence("ranks", self.ranks, "(16, 16)"))
        object.__setattr__(self, "ids", IdOrder(self.ids))
        object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        row_factors, dim_factors = (
            () if factors is None else check_sequence(name, factors, example)
            for name, factors, example in (
                ("row_factors", self.row_factors, "(100, 100, 100)"),
                ("dim_factors", self.dim_factors, "(4, 4, 4)"),
            )
        )
        check_cores(self.ranks, row_factors, dim_factors)
        # Plain ints, which a header of a frozen file can have.
        object.__setattr__(self, "ranks", tuple(map(int, self.ranks)))
        row_factors, dim_factors = tuple(map(int, row_factors)), tuple(map(int, dim_factors))
        num_cores = len(self.ranks) + 1
        row_factors = row_factors or shapes.row_factors(self.rows, num_cores)
        dim_factors = dim_factors or shapes.dim_factors(self.dim, num_cores)
        object.__setattr__(self, "row_factors", row_factors)
        object.__setattr__(self, "dim_factors", dim_factors)
        if math.prod(row_factors) < self.rows:
            raise ValueError(
                f"row_factors {row_factors} multiply to {math.prod(row_factors)} < rows {self.rows}"
            )
        if math.prod(dim_factors) != self.dim:
            raise ValueError(f"dim_factors {dim_factors} must multiply to dim {self.dim}")

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """Return the ranks with the 1 at both ends: core k is `[p_k, R_k * q_k * R_{k+1}]`."""
        return (1, *self.ranks, 1)

    @property
    def permutation(self) -> shapes.Permutation:
        """Return the permutation of ids: id i has row `(multiplier * i + offset) % rows`."""
        if self.ids is IdOrder.AS_GIVEN:
            return shapes.AS_GIVEN
        return shapes.permutation(self.rows, self.seed)

    @property
    def numel(self) -> int:
        """Return the number of values of the cores."""
        full_ranks = self.full_ranks
        factors = zip(self.row_factors, self.dim_factors, full_ranks, full_ranks[1:], strict=False)
        return sum(p * left_rank * q * right_rank for p, q, left_rank, right_rank in factors)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the cores in float32; in 16 bits they are half."""
        return torch.float32.itemsize * self.numel

    def usable(self) -> TTSpec:
        """Return this spec with ranks lowered to those that its cores can use; log a change."""
        max_ranks = shapes.max_ranks(self.row_factors, self.dim_factors)
        ranks = tuple(map(min, self.ranks, max_ranks))
        if ranks == self.ranks:
            return self
        _LOG.info(
            "ranks %s of table %r are more than its cores can use, they are %s now",
            self.ranks,
            self.name,
            ranks,
        )
        return replace(self, ranks=ranks)

    @classmethod
    def for_bytes(
        cls,
        rows: int,
        dim: int,
        nbytes: int,
        *,
        cores: int = 3,
        like: TTSpec | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TTSpec:
        """Return the spec with the largest ranks whose cores take at most `nbytes` in `dtype`.

        All ranks are equal, except where the cores can use only a lower one. The other fields are
        those of `like`, whose factors must fit `rows` and `dim`. Without `like` there are `cores`
        cores with factors of `emblib.tt.shapes`.

        Raises:
            TypeError: `rows` or `dim` is not an int.
            ValueError: cores of rank 1 take more bytes, the factors of `like` do not fit, `cores`
                is outside 2 to 4, or `dtype` is not in `FLOAT_DTYPES`.

        Example:
            >>> emblib.TTSpec.for_bytes(1_000_000, 64, 1 << 20).ranks
            (24, 24)
        """
        check_float_dtype("dtype", dtype)
        template = (
            cls(rows, dim, (1,) * (cores - 1))
            if like is None
            else replace(like, rows=rows, dim=dim)
        )
        max_numel = nbytes // dtype.itemsize
        max_ranks = shapes.max_ranks(template.row_factors, template.dim_factors)

        def with_rank(rank: int) -> TTSpec:
            return replace(template, ranks=tuple(min(rank, max_rank) for max_rank in max_ranks))

        if with_rank(1).numel > max_numel:
            raise ValueError(
                f"a tensor train of {rows} x {dim} takes at least "
                f"{with_rank(1).numel * dtype.itemsize} bytes with "
                f"{len(max_ranks) + 1} cores, more than {nbytes}; use more cores, or raise the "
                "bytes"
            )
        low, high = 1, max(max_ranks)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if with_rank(middle).numel <= max_numel else (low, middle - 1)
            )
        return with_rank(low)
