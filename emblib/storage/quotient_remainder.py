"""Quotient-remainder storage: the row of an id is composed of two rows of smaller tables.

Id i reads row `i // divisor` of the table `quotients` and row `i % divisor` of the table
`remainders`. Many ids share one of these rows; no two ids share both. Source: compositional
embeddings (Shi et al., KDD 2020).
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
    """A table `quotients` of `ceil(num_embeddings / divisor)` rows, and `remainders` of `divisor`.

    Args:
        divisor: divisor of the ids, 1 to `num_embeddings`. The square root of `num_embeddings`
            needs the least memory.
        combine: operation on the two rows, "multiply", "add" or "concatenate", see `Combine`.

    Raises:
        TypeError: `divisor` is not an int.
        ValueError: `divisor` is below 1, or `combine` is unknown. A `divisor` above
            `num_embeddings` is found when a table is configured.

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
    constant_names: ClassVar[tuple[str, ...]] = ("divisor",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", check_count("divisor", self.divisor))
        object.__setattr__(self, "combine", Combine(self.combine))

    @classmethod
    def for_share(
        cls, num_embeddings: int, share: float, combine: Combine = Combine.MULTIPLY
    ) -> Self:
        """Return the storage whose two tables have about `share * num_embeddings` rows together.

        Of the two divisors with this number of rows, the larger is used: fewer ids share a
        remainder.

        Args:
            num_embeddings: number of ids of the table.
            share: rows of the two tables together, as a fraction of `num_embeddings`, in (0, 1].
            combine: operation on the two rows, see `QuotientRemainder`.

        Raises:
            TypeError: `num_embeddings` is not an int, or `share` is not a number.
            ValueError: `num_embeddings` is below 1, `share` is not in (0, 1], `share *
                num_embeddings` is below the least number of rows, `2 * sqrt(num_embeddings)`, or
                `combine` is unknown.

        Example:
            >>> emblib.storage.QuotientRemainder.for_share(10_000, 0.25).divisor
            2495
        """
        num_embeddings = check_count("num_embeddings", num_embeddings)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be in (0, 1], got {share}")
        # The larger solution of num_embeddings / divisor + divisor = share * num_embeddings.
        half_rows = share * num_embeddings / 2
        if half_rows**2 < num_embeddings:
            raise ValueError(
                f"{num_embeddings:,} ids need {2 * math.isqrt(num_embeddings):,} rows in two "
                f"components, which is more than {share:g} of them: raise share, or use another "
                "storage"
            )
        divisor = max(1, int(half_rows + math.sqrt(half_rows**2 - num_embeddings)))
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
    def combine_mode(self) -> Combine:
        """Return `combine`."""
        return self.combine

    @property
    def row_components(self) -> tuple[int, ...]:
        """Return the component of each row: 0 is `quotients`, 1 is `remainders`."""
        return (0, 1)

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the tables `quotients` and `remainders`; rows that are added start smaller."""
        scale = math.sqrt(0.5) if self.combine is Combine.ADD else 1.0
        num_quotients = -(-num_embeddings // self.divisor)
        return (
            Component("quotients", num_quotients, scale),
            Component("remainders", self.divisor, scale),
        )

    def mapping_constants(self) -> tuple[int, ...]:
        """Return the divisor."""
        return (self.divisor,)

    @staticmethod
    def map_ids(ids: Tensor, constants: Tensor, count: int) -> list[Tensor]:
        """Return the quotient and the remainder of each id."""
        (divisor,) = constants
        return [ids // divisor, ids % divisor]
