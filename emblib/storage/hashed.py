"""Hashed storage: ids share rows that hash functions select.

The row of an id is the sum of `functions` rows of one table: function 0 is a hash or the remainder
of the id, the others are hashes with different seeds. So with several functions few ids share all
their rows.

Sources: the hashing trick (Weinberger et al., ICML 2009); several functions whose rows are added,
as in hash embeddings (Svenstrup et al., NeurIPS 2017), without their weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from emblib.specs import Choice, check_count
from emblib.storage.base import TableDescription
from emblib.storage.composed import ComposedStorage
from emblib.storage.composed_lookup import Component

_MAX_FUNCTIONS = 64  # hash functions per seed
_MAX_SEEDS = 2**56


class RowHash(Choice):
    """Function that selects the first row of an id.

    Example:
        >>> emblib.storage.Hashed(500_000, hash=emblib.storage.RowHash.REMAINDER).hash
        <RowHash.REMAINDER: 'remainder'>
    """

    MIXED = "mixed"
    """A hash of the id: which ids share a row is random."""
    REMAINDER = "remainder"
    """`id % rows`: where ids are in order of frequency, the first rows of the `rows` most frequent
    ones differ."""


@dataclass(frozen=True)
class Hashed(ComposedStorage):
    """`rows` stored rows; the row of an id is the sum of those that its hash functions select.

    Args:
        rows: number of stored rows, at most `num_embeddings`.
        functions: number of rows that are added per id, 1 to 64; `hash` selects the first row, hash
            functions with different seeds select the others.
        hash: function that selects the first row.
        seed: seed of the hash functions, 0 to 2^56.

    Example:
        >>> storage = emblib.storage.Hashed(rows=500, functions=2)
        >>> table = emblib.EmbeddingBagConfig(10_000, 16, "user", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table])
        >>> sum(parameter.numel() for parameter in bags.parameters())  # instead of 160,000
        8000
    """

    rows: int
    functions: int = 1
    hash: RowHash = RowHash.MIXED
    seed: int = 0

    plan_name: ClassVar[str] = "Hashed"
    number_names: ClassVar[tuple[str, ...]] = ("rows", "seed", "by_remainder")

    def __post_init__(self) -> None:
        for name in ("rows", "functions"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        if self.functions > _MAX_FUNCTIONS or self.seed > _MAX_SEEDS:
            raise ValueError(
                f"functions must be at most {_MAX_FUNCTIONS} and seed at most {_MAX_SEEDS}, got "
                f"{self.functions} and {self.seed}"
            )
        object.__setattr__(self, "hash", RowHash(self.hash))

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for more rows than ids, or an `init_fn`."""
        super().check_table(table)
        if self.rows > table.num_embeddings:
            raise ValueError(
                f"rows of Hashed must be at most the {table.num_embeddings} ids of "
                f"{table.name!r}, got {self.rows}: use Dense()"
            )

    @property
    def row_components(self) -> tuple[int, ...]:
        """Return component 0 once per function."""
        return (0,) * self.functions

    def components(self, num_embeddings: int) -> tuple[Component, ...]:
        """Return the table `weight`; its initial values shrink by sqrt(functions)."""
        return (Component("weight", self.rows, 1.0 / math.sqrt(self.functions)),)

    def mapping_numbers(self) -> tuple[int, ...]:
        """Return rows, seed, and whether the first function is the remainder."""
        return self.rows, self.seed, int(self.hash is RowHash.REMAINDER)

    @staticmethod
    def map_ids(ids: Tensor, numbers: Tensor, count: int) -> list[Tensor]:
        """Return the row that each function selects."""
        rows, seed, by_remainder = numbers
        rows_by_function = [
            mixed(ids, seed * _MAX_FUNCTIONS + number) % rows for number in range(count)
        ]
        rows_by_function[0] = torch.where(by_remainder == 1, ids % rows, rows_by_function[0])
        return rows_by_function


# The constants of splitmix64 (Steele et al., OOPSLA 2014), as signed numbers.
_INCREMENT = -7046029254386353131
_FIRST_FACTOR, _SECOND_FACTOR = -4658895280553007687, -7723592293110705685


def mixed(ids: Tensor, number: Tensor) -> Tensor:
    """Hash int64 ids into [0, 2^62) with splitmix64's finaliser; `number` seeds the hash.

    `ids` may have any shape, which the result has too.
    """
    z = ids + (2 * number + 1) * _INCREMENT  # int64 arithmetic wraps modulo 2^64
    z = (z ^ _shift_right(z, 30)) * _FIRST_FACTOR
    z = (z ^ _shift_right(z, 27)) * _SECOND_FACTOR
    return _shift_right(z ^ _shift_right(z, 31), 2)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
