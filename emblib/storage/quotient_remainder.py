"""Quotient-remainder storage: an id reads a row by its quotient and one by its remainder.

Unlike with a hash, no two ids read the same two rows. Source: compositional embeddings (Shi et al.,
KDD 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from emblib.specs import check_count
from emblib.storage.base import TableDescription
from emblib.storage.composed import Combine, Component, ComposedStorage


@dataclass(frozen=True)
class QuotientRemainder(ComposedStorage):
    """`ceil(num_embeddings / divisor)` rows by the quotient of an id, `divisor` by its remainder.

    Args:
        divisor: of the ids. The square root of their number needs least memory.
        combine: "multiply", "add" or "concatenate", which makes a row of the two, see `Combine`.

    Example:
        >>> storage.QuotientRemainder(4000, "multiply")  # of 10,000,000 ids: 6,500 rows
    """

    divisor: int
    combine: Combine = Combine.MULTIPLY

    plan_name: ClassVar[str] = "QuotientRemainder"

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", check_count("divisor", self.divisor))
        object.__setattr__(self, "combine", Combine(self.combine))

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for a divisor above the number of ids, odd halves, or an `init_fn`."""
        super().check_table(table)
        if self.divisor > table.num_embeddings:
            raise ValueError(
                f"divisor must be at most the {table.num_embeddings} ids of {table.name!r}, got "
                f"{self.divisor}"
            )

    @property
    def joining(self) -> Combine:
        """Return `combine`."""
        return self.combine

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the quotients, then the remainders."""
        return (0, 1)

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the tables `quotients` and `remainders`; rows that are added start smaller."""
        scale = math.sqrt(0.5) if self.combine is Combine.ADD else 1.0
        quotients = -(-num_embeddings // self.divisor)
        return (
            Component("quotients", quotients, scale),
            Component("remainders", self.divisor, scale),
        )

    def numbers(self) -> tuple[int, ...]:
        """Return the divisor."""
        return (self.divisor,)

    @staticmethod
    def rows_read(ids: Tensor, numbers: Tensor, count: int) -> list[Tensor]:
        """Return quotients and remainders."""
        (divisor,) = numbers
        return [ids // divisor, ids % divisor]
