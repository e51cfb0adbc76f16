"""What a table is, as frozen descriptions, and the choices that are words."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import SupportsIndex

from emblib.tt import shapes


class Choice(Enum):
    """An enum of lower-case words; an unknown one is answered with those there are."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {choices}, got {value!r}")


class Pooling(Choice):
    """How the rows of a bag become one vector; NONE keeps one vector a lookup."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"


class BoundsCheck(Choice):
    """What happens to indices and offsets that are out of bounds.

    In every mode the kernels repair as they read (index -1 is skipped, any other invalid index
    reads row 0, offsets are clamped), so nothing is ever read outside a table. The mode says what
    you are told: FATAL raises before anything is written, WARNING warns, IGNORE repairs silently.
    NONE looks at nothing first: it is IGNORE for offsets that never decrease, and memory-safe but
    otherwise unspecified for others.
    """

    FATAL = "fatal"
    WARNING = "warning"
    IGNORE = "ignore"
    NONE = "none"


@dataclass(frozen=True)
class TableSpec:
    """A plain table of `rows` vectors of length `dim`."""

    rows: int
    dim: int
    name: str = ""

    def __post_init__(self) -> None:
        _check_size("rows", self.rows)
        _check_size("dim", self.dim)


@dataclass(frozen=True)
class TTSpec:
    """A table of `rows` vectors of length `dim`, kept as 2 to 4 tensor-train cores.

    `ranks` are the inner ranks (one less than there are cores). `row_factors` must multiply to at
    least `rows` and `dim_factors` to exactly `dim`; left out, `emblib.tt.shapes` chooses them.
    """

    rows: int
    dim: int
    ranks: tuple[int, ...]
    row_factors: tuple[int, ...] = field(default=())
    dim_factors: tuple[int, ...] = field(default=())
    name: str = ""

    def __post_init__(self) -> None:
        _check_size("rows", self.rows)
        _check_size("dim", self.dim)
        object.__setattr__(self, "ranks", tuple(self.ranks))
        cores = len(self.ranks) + 1
        if not 2 <= cores <= 4:
            raise ValueError(f"ranks must have 1 to 3 entries (2 to 4 cores), got {self.ranks}")
        for rank in self.ranks:
            _check_size("each rank", rank)
        rows = tuple(self.row_factors or ()) or shapes.row_factors(self.rows, cores)
        dims = tuple(self.dim_factors or ()) or shapes.dim_factors(self.dim, cores)
        object.__setattr__(self, "row_factors", rows)
        object.__setattr__(self, "dim_factors", dims)
        for name, factors in (("row_factors", rows), ("dim_factors", dims)):
            if len(factors) != cores:
                raise ValueError(
                    f"{name} must have one entry a core = {cores} (ranks has {cores - 1}), "
                    f"got {factors}"
                )
            for factor in factors:
                _check_size(f"each of {name}", factor)
        if math.prod(rows) < self.rows:
            raise ValueError(f"row_factors {rows} multiply to {math.prod(rows)} < rows {self.rows}")
        if math.prod(dims) != self.dim:
            raise ValueError(f"dim_factors {dims} must multiply to dim {self.dim}")

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """The ranks with the 1 at both ends: core k is `[p_k, R_k * q_k * R_{k+1}]`."""
        return (1, *self.ranks, 1)


def _check_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
