"""Tables of 64-bit keys: their interface, emblib's hash table, sorted keys, and a ceiling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import emblib
from experiments.config.schema import OPERATIONS
from experiments.contenders.registry import Unsupported as Unsupported
from experiments.machine.bandwidth import CacheLines

Prepared = tuple[Tensor, Tensor]  # keys int64 [n] and values float32 [n, dim]
ENTRY_BYTES = 17  # bytes per slot that a lookup may read in a table that evicts by LRU


@dataclass(frozen=True)
class KeyTask:
    """The size and device that a hash table is built for.

    Attributes:
        slots: maximum number of keys of a table that evicts or rejects some.
        dim: float32 columns of a value.
        device: device of the table.
        num_resident: number of keys to fill the table with, at most `slots`.
        initial_slots: slots of a growing table at first; 0 for `slots`. Other tables ignore it.
    """

    slots: int
    dim: int
    device: torch.device
    num_resident: int
    initial_slots: int = 0


class KeyTable(ABC):
    """A table of keys, built for a KeyTask.

    The operations named by `operations` are timed; `prepare` and `erase` are not. `fill` is timed
    only where growth is measured. `find_slots` must work even if `operations` does not name it; the
    other operations, and `erase`, raise NotImplementedError unless a table has them. An operation
    takes the result of `prepare`, whose values it may overwrite. It may leave work on the
    GPU's current stream. Keys and slots are int64 [n]; the slot of a missing key is `absent`, and
    equal keys have equal slots. Values are float32 [n, dim]. Results are on the table's device.

    Attributes:
        operations: names of the operations that the table has.
        has_erase: True if it has `erase`.
        period: number of calls after which its periodic work (an eviction) has happened once.
        is_ceiling: True if it stores no keys, but shows what memory allows a table at best.
        absent: slot of a missing key.
    """

    operations: ClassVar[tuple[str, ...]] = ("find_slots",)
    has_erase: ClassVar[bool] = False
    period: ClassVar[int] = 1
    is_ceiling: ClassVar[bool] = False

    def __init__(self, task: KeyTask) -> None:
        self.task = task
        self.absent = -1

    @abstractmethod
    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Insert keys; a table with a fixed number of slots evicts or rejects some beyond it.

        Called once or several times. Keys and values are on the host or on the table's device, and
        some keys may be in the table already.
        """

    def prepare(self, keys: Tensor, values: Tensor) -> Any:
        """Return a call's keys and values, which are on the host, as the operations take them."""
        return keys.to(self.task.device), values.to(self.task.device)

    def reset_after_checks(self) -> None:  # noqa: B027 most tables need nothing
        """Forget what the checks did to the table's statistics; called once, after verifying."""

    @abstractmethod
    def find_slots(self, prepared: Any) -> Tensor:
        """Return the slots of keys, without changing the table."""

    def find(self, prepared: Any) -> Tensor:
        """Return the values of keys, without changing the table; an absent key may have any."""
        raise NotImplementedError

    def find_or_insert_slots(self, prepared: Any) -> Tensor:
        """Return the slots of keys; insert absent keys that the table admits, at once or later."""
        raise NotImplementedError

    def find_or_insert(self, prepared: Any) -> Tensor:
        """Return the values of keys; insert absent keys with the given values.

        The value of a key for which a full table has no slot is unspecified.
        """
        raise NotImplementedError

    def insert_or_assign(self, prepared: Any) -> None:
        """Assign the given values to keys; insert absent keys."""
        raise NotImplementedError

    def insert_and_evict(self, prepared: Any) -> Tensor:
        """Insert or assign keys with the given values; return the evicted keys, in any order."""
        raise NotImplementedError

    def erase(self, keys: Tensor) -> None:
        """Erase keys, int64 on the table's device; ignore absent ones."""
        raise NotImplementedError

    @abstractmethod
    def size(self) -> int:
        """Return the number of keys in the table; for a ceiling, the keys that `fill` got."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of keys, their metadata, and values if they are stored.

        A ceiling returns the bytes of the memory that it reads.
        """


class EmblibHashTable(KeyTable):
    """emblib.HashTable of capacity `task.slots` from the beginning, which evicts by `eviction`."""

    operations = tuple(OPERATIONS)
    has_erase = True
    eviction: ClassVar[emblib.Eviction] = emblib.Eviction.LRU

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.table = emblib.HashTable(self._spec(), device=task.device)

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(self.task.slots, self.task.dim, eviction=self.eviction)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.table.insert_or_assign(keys.to(self.task.device), values.to(self.task.device))

    def find_slots(self, prepared: Prepared) -> Tensor:
        keys, _ = prepared
        return self.table.slots(keys)

    def find(self, prepared: Prepared) -> Tensor:
        keys, _ = prepared
        return self.table.find(keys)[0]

    def find_or_insert_slots(self, prepared: Prepared) -> Tensor:
        """Insert absent keys with the table's initial values; return the slots."""
        keys, _ = prepared
        return self.table.find_or_insert_slots(keys).slots

    def find_or_insert(self, prepared: Prepared) -> Tensor:
        return self.table.find_or_insert(*prepared)[0]

    def insert_or_assign(self, prepared: Prepared) -> None:
        self.table.insert_or_assign(*prepared)

    def insert_and_evict(self, prepared: Prepared) -> Tensor:
        evicted = self.table.insert_and_evict(*prepared).evicted
        assert evicted is not None
        return evicted.keys

    def erase(self, keys: Tensor) -> None:
        self.table.erase(keys)

    def size(self) -> int:
        return self.table.size()

    def nbytes(self) -> int:
        """Return the bytes of all slots that the table has at present."""
        return self.table.index.nbytes() + 4 * self.task.dim * self.table.capacity()


class GrowingHashTable(EmblibHashTable):
    """emblib.HashTable that grows from `initial_slots` slots on; a full one evicts by LRU."""

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(
            self.task.slots, self.task.dim, initial_capacity=self.task.initial_slots or None
        )


class EmblibHashTableLFU(EmblibHashTable):
    """emblib.HashTable whose full table evicts the least frequently used key."""

    eviction = emblib.Eviction.LFU


class SortedTable(KeyTable):
    """Base of tables that hold their keys in ascending order. Values are not stored.

    `fill` only collects keys, because adding keys means sorting all of them. `prepare` and `size`
    add the keys of many `fill`s at once. `task.slots` does not limit their number.

    Attributes:
        keys: distinct keys that were added, ascending, int64 `[n]` on the table's device.
        unsorted: keys that `fill` collected and that were not added yet.
    """

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.keys = torch.empty(0, dtype=torch.int64, device=task.device)
        self.unsorted: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.unsorted.append(keys.to(self.task.device))

    def prepare(self, keys: Tensor, values: Tensor) -> Any:
        """Add the collected keys, then return the keys and values of the call on the device."""
        self._add_collected()
        return super().prepare(keys, values)

    def size(self) -> int:
        self._add_collected()
        return len(self.keys)

    def _add_collected(self) -> None:
        if self.unsorted:
            self.keys = torch.cat([self.keys, *self.unsorted]).unique()
            self.unsorted = []
            self._load()

    def _load(self) -> None:
        """Load `keys`, which have changed, into the table."""


class SortedKeys(SortedTable):
    """PyTorch's searchsorted on an ascending tensor of all keys; a key's position is its slot.

    At least one key must have been added.
    """

    def find_slots(self, prepared: Prepared) -> Tensor:
        """Look up each distinct key once, in ascending order, which is faster than every key."""
        keys, _ = prepared
        distinct, inverse = torch.unique(keys, return_inverse=True)
        nearest = torch.searchsorted(self.keys, distinct).clamp_(max=len(self.keys) - 1)
        slots = torch.where(self.keys[nearest] == distinct, nearest, self.absent)
        return slots[inverse]

    def nbytes(self) -> int:
        return self.keys.nbytes


class RandomLines(KeyTable):
    """The ceiling of a lookup: one random cache line per key, in the bytes of a table's keys."""

    is_ceiling = True
    huge: ClassVar[bool] = False

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cpu":
            raise Unsupported("the ceiling of random lines is measured on the CPU")
        self.lines = CacheLines(ENTRY_BYTES * task.slots, huge=self.huge)
        self.num_filled = 0
        # NumPy gathers faster than torch on one thread, but does not use more.
        self.read_lines = (
            self.lines.read_by_numpy if torch.get_num_threads() == 1 else self.lines.read_by_torch
        )

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Count the keys, which are not stored."""
        self.num_filled += len(keys)

    def prepare(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the position of the word to read for each key, int64 [n]."""
        return self.lines.positions(keys)

    def find_slots(self, prepared: Tensor) -> Tensor:
        """Read the number that each line holds; it serves as the slot of the key."""
        return self.read_lines(prepared)

    def size(self) -> int:
        return self.num_filled

    def nbytes(self) -> int:
        return int(self.lines.words.nbytes)


class RandomHugeLines(RandomLines):
    """The ceiling of RandomLines, with memory in huge pages."""

    huge = True
