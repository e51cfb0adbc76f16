"""emblib.HashTable: vectors by key, the least scored give way."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

import emblib
from experiments.contenders.key_table import KeyTable, KeyTask

Prepared = tuple[Tensor, Tensor]


class Scored(KeyTable):
    """All slots from the beginning."""

    name = "scored"
    label = "HashTable"
    dense = True
    operations = (
        "find", "find_slots", "find_or_insert", "find_or_insert_slots", "insert_or_assign",
        "insert_and_evict",
    )  # fmt: skip
    erases = True
    eviction: ClassVar[emblib.Eviction] = emblib.Eviction.LRU

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.table = emblib.HashTable(self._spec(), device=task.device)

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(self.task.slots, self.task.dim, eviction=self.eviction)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """As new keys come."""
        self.table.insert_or_assign(keys.to(self.task.device), values.to(self.task.device))

    def find_slots(self, prepared: Prepared) -> Tensor:
        """Rows of its values."""
        return self.table.slots(prepared[0])

    def find(self, prepared: Prepared) -> Tensor:
        """Copies of its rows."""
        return self.table.find(prepared[0])[0]

    def find_or_insert_slots(self, prepared: Prepared) -> Tensor:
        """New keys get rows that the table initialises."""
        return self.table.find_or_insert_slots(prepared[0]).slots

    def find_or_insert(self, prepared: Prepared) -> Tensor:
        """New keys get the given rows."""
        return self.table.find_or_insert(*prepared)[0]

    def insert_or_assign(self, prepared: Prepared) -> None:
        """All keys get the given rows."""
        self.table.insert_or_assign(*prepared)

    def insert_and_evict(self, prepared: Prepared) -> Tensor:
        """With the rows that gave way, of which the keys are told here."""
        evicted = self.table.insert_and_evict(*prepared).evicted
        assert evicted is not None
        return evicted.keys

    def erase(self, keys: Tensor) -> None:
        """Take them out."""
        self.table.erase(keys)

    def size(self) -> int:
        """Keys that are there."""
        return self.table.size()

    def nbytes(self) -> int:
        """Of the slots in use."""
        return self.table.index.nbytes() + 4 * self.task.dim * self.table.capacity()


class Growing(Scored):
    """A few slots at first; it takes more as it needs them."""

    name = "scored_growing"
    label = "HashTable, growing"

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(
            self.task.slots, self.task.dim, initial_capacity=self.task.first or None
        )


class ScoredLRU(Scored):
    """As a cache: of its two buckets, the key that was not used for longest gives way."""

    name = "scored_lru"
    label = "LRU table"
    variants = "cache"


class ScoredLFU(ScoredLRU):
    """The key with the fewest uses gives way."""

    name = "scored_lfu"
    label = "LFU table"
    eviction = emblib.Eviction.LFU
