"""Quotient-remainder storage: an id reads a row by its quotient and one by its remainder.

Id i reads row `i // divisor` of the quotients and row `i % divisor` of the remainders; no two ids
read the same two rows. Source: compositional embeddings (Shi et al., KDD 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from emblib.specs import check_count
from emblib.storage.base import TableDescription
from emblib.storage.composed import ComposedStorage
from emblib.storage.composed_lookup import Combine, Component


@dataclass(frozen=True)
class QuotientRemainder(ComposedStorage):
    """`ceil(num_embeddings / divisor)` rows by the quotient of an id, `divisor` by its remainder.

    Args:
        divisor: divisor of the ids; the square root of `num_embeddings` needs the least memory.
        combine: operation on the two rows, "multiply", "add" or "concatenate", see `Combine`.

    Example:
        >>> storage = emblib.storage.QuotientRemainder(100, "multiply")
        >>> table = emblib.EmbeddingBagConfig(10_000, 16, "user", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table])
        >>> sum(parameter.numel() for parameter in bags.parameters())  # 100 + 100 rows
        3200
    """

    divisor: int
    combine: Combine = Combine.MULTIPLY

    plan_name: ClassVar[str] = "QuotientRemainder"
    number_names: ClassVar[tuple[str, ...]] = ("divisor",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", check_count("divisor", self.divisor))
        object.__setattr__(self, "combine", Combine(self.combine))

    @classmethod
    def for_share(
        cls, num_embeddings: int, share: float, combine: Combine = Combine.MULTIPLY
    ) -> Self:
        """Return the storage whose components have about `share * num_embeddings` rows.

        Of the two divisors that give this size the larger is used: fewer ids share a remainder.

        Args:
            num_embeddings: the ids of the table.
            share: fraction of the rows of a table with one row per id, in (0, 1].
            combine: combination of the two rows, see `QuotientRemainder`.

        Raises:
            ValueError: `share` is not in (0, 1], or the two components need more rows, at least
                `2 * sqrt(num_embeddings)`.

        Example:
            >>> emblib.storage.QuotientRemainder.for_share(10_000, 0.25).divisor
            2495
        """
        num_embeddings = check_count("num_embeddings", num_embeddings)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be in (0, 1], got {share}")
        # The larger solution m of n / m + m = share * n.
        half = share * num_embeddings / 2
        if half**2 < num_embeddings:
            raise ValueError(
                f"{num_embeddings:,} ids need {2 * math.isqrt(num_embeddings):,} rows in two "
                f"components, which is more than {share:g} of them: raise share, or use another "
                "storage"
            )
        divisor = max(1, int(half + math.sqrt(half**2 - num_embeddings)))
        return cls(divisor, combine)

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError as the base does, and for a divisor above the number of ids."""
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
    def row_components(self) -> tuple[int, ...]:
        """Return component 0 (quotients), then component 1 (remainders)."""
        return (0, 1)

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the tables `quotients` and `remainders`; rows that are added start smaller."""
        scale = math.sqrt(0.5) if self.combine is Combine.ADD else 1.0
        quotients = -(-num_embeddings // self.divisor)
        return (
            Component("quotients", quotients, scale),
            Component("remainders", self.divisor, scale),
        )

    def mapping_numbers(self) -> tuple[int, ...]:
        """Return the divisor."""
        return (self.divisor,)

    @staticmethod
    def map_ids(ids: Tensor, numbers: Tensor, count: int) -> list[Tensor]:
        """Return quotients and remainders."""
        (divisor,) = numbers
        return [ids // divisor, ids % divisor]
