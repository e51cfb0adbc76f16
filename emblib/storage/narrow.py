"""Narrow storage: stored rows are shorter than the rows of the table; zeros fill the rest.

The model needs no change, because lookups still return rows of the table's dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from emblib.specs import check_count
from emblib.storage.base import CutUnits, TableDescription
from emblib.storage.composed import ComposedStorage
from emblib.storage.composed_lookup import Component


@dataclass(frozen=True)
class Narrow(ComposedStorage):
    """Rows of `columns` values, followed by zeros up to the dim of the table.

    Args:
        columns: number of stored columns, at least 1 and fewer than the dim.

    Raises:
        TypeError: `columns` is not an int.
        ValueError: `columns` is below 1. Too many columns are found when a table is configured.

    Example:
        >>> table = emblib.EmbeddingBagConfig(10_000, 64, "user", storage=emblib.storage.Narrow(16))
        >>> bags = emblib.EmbeddingBagCollection([table])
        >>> sum(parameter.numel() for parameter in bags.parameters())  # instead of 640,000
        160000
    """

    columns: int

    plan_name: ClassVar[str] = "Narrow"

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", check_count("columns", self.columns))

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for `columns` that are not fewer than the dim, or an `init_fn`."""
        super().check_table(table)
        if self.columns >= table.embedding_dim:
            raise ValueError(
                f"columns of Narrow must be fewer than the {table.embedding_dim} of "
                f"{table.name!r}, got {self.columns}: use Dense()"
            )

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Allow no cut: the unit is the whole table."""
        return CutUnits(table.num_embeddings, table.embedding_dim)

    def num_stored_columns(self, dim: int) -> int:
        """Return `columns`."""
        return self.columns

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the table `weight`, with a row per id."""
        return (Component("weight", num_embeddings),)

    def mapping_constants(self) -> tuple[int, ...]:
        """Return one unused constant: `ComposedLookup` needs at least one per feature."""
        return (0,)

    @staticmethod
    def map_ids(ids: Tensor, constants: Tensor, count: int) -> list[Tensor]:
        """Return the ids: each id reads the row of its own number."""
        return [ids]
