"""Hashed storage: ids share stored rows that hash functions select.

The row of an id is the sum of `functions` stored rows, each selected by one function of the id.
Function 0 is a hash or the remainder of the id. The others are hashes with different seeds. Two ids
often share one of their rows, but seldom all of them.

Sources: the hashing trick (Weinberger et al., ICML 2009); several functions whose rows are added,
as in hash embeddings (Svenstrup et al., NeurIPS 2017), without their weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from emblib.specs import OptionEnum, check_count
from emblib.storage.base import TableDescription
from emblib.storage.composed import ComposedStorage
from emblib.storage.composed_lookup import Component

_MAX_FUNCTIONS = 64  # function k of seed s hashes with the seed 64 * s + k
_MAX_SEEDS = 2**56


class RowHash(OptionEnum):
    """Function that selects the first row of an id.

    Example:
        >>> emblib.storage.Hashed(500_000, hash=emblib.storage.RowHash.REMAINDER).hash
        <RowHash.REMAINDER: 'remainder'>
    """

    MIXED = "mixed"
    """A hash of the id: ids that share a row are random."""
    REMAINDER = "remainder"
    """`id % rows`: the ids 0 to `rows - 1` have different first rows. Use it if ids are numbered by
    descending frequency: then the `rows` most frequent ids differ in their first row."""


@dataclass(frozen=True)
class Hashed(ComposedStorage):
    """A table of `rows` stored rows; the row of an id is the sum of `functions` of them.

    Args:
        rows: number of stored rows, 1 to `num_embeddings`.
        functions: number of stored rows that are added per id, 1 to 64. `hash` selects the first;
            hashes with different seeds select the others.
        hash: function that selects the first row.
        seed: seed of the hashes, 0 to 2^56.

    Raises:
        TypeError: `rows`, `functions` or `seed` is not an int.
        ValueError: a number out of its range, or an unknown `hash`. `rows` above `num_embeddings`
            is found when a table is configured.

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
    constant_names: ClassVar[tuple[str, ...]] = ("rows", "seed", "by_remainder")

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

    def mapping_constants(self) -> tuple[int, ...]:
        """Return `rows`, `seed`, and 1 if the first function is the remainder, else 0."""
        return self.rows, self.seed, int(self.hash is RowHash.REMAINDER)

    @staticmethod
    def map_ids(ids: Tensor, constants: Tensor, count: int) -> list[Tensor]:
        """Return the row that each function selects, see `ComposedStorage.map_ids`."""
        rows, seed, by_remainder = constants
        rows_by_function = [
            hash_ids(ids, seed * _MAX_FUNCTIONS + function) % rows for function in range(count)
        ]
        rows_by_function[0] = torch.where(by_remainder == 1, ids % rows, rows_by_function[0])
        return rows_by_function


# The constants of splitmix64 (Steele et al., OOPSLA 2014), as signed numbers.
_INCREMENT = -7046029254386353131
_FIRST_FACTOR, _SECOND_FACTOR = -4658895280553007687, -7723592293110705685


def hash_ids(ids: Tensor, seed: Tensor) -> Tensor:
    """Hash int64 ids into [0, 2^62) with the finaliser of splitmix64.

    `ids` and `seed`, int64, are broadcast to the shape of the result.
    """
    word = ids + (2 * seed + 1) * _INCREMENT  # int64 arithmetic wraps modulo 2^64
    word = (word ^ _shift_right(word, 30)) * _FIRST_FACTOR
    word = (word ^ _shift_right(word, 27)) * _SECOND_FACTOR
    return _shift_right(word ^ _shift_right(word, 31), 2)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Shift int64 words right as if they were unsigned."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
