"""Hash tables of 64-bit keys: their interface, emblib's, PyTorch's, and the memory's ceiling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import emblib
from experiments.config.schema import OPERATIONS
from experiments.contenders.registry import Missing, Unsupported, find
from experiments.machine.bandwidth import Lines

__all__ = ["KeyTable", "KeyTask", "Missing", "Unsupported", "build_keyed"]


@dataclass(frozen=True)
class KeyTask:
    """The size and device that a hash table is built for."""

    slots: int  # the most keys it may hold
    dim: int  # float32 columns of a key's value
    device: torch.device
    resident: int  # keys that it will be filled with
    first: int = 0  # slots to begin with, of a table that grows; 0: all


class KeyTable(ABC):
    """A hash table, built for a KeyTask.

    The operations that `operations` names are timed; `prepare`, `fill` and `erase` never are. Slots
    are int64, `absent` for a missing key; equal keys have equal slots. Values are float32 [keys,
    dim].
    """

    operations: ClassVar[tuple[str, ...]] = ("find_slots",)
    erases: ClassVar[bool] = False
    period: ClassVar[int] = 1  # calls after which it has done all that it does from time to time
    ceiling: ClassVar[bool] = False  # it holds no keys, but shows what a table can reach at best

    def __init__(self, task: KeyTask) -> None:
        self.task = task
        self.absent = -1

    @abstractmethod
    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Put new keys in, as many as fit; called once or several times."""

    def prepare(self, keys: Tensor, values: Tensor) -> Any:
        """Lay out a call's keys and values for the operations."""
        return keys.to(self.task.device), values.to(self.task.device)

    def ready(self) -> None:  # noqa: B027 most are as they were filled
        """Discard what checking left behind, once the table is filled and verified."""

    @abstractmethod
    def find_slots(self, prepared: Any) -> Tensor:
        """Return [keys] slots; change nothing."""

    def find(self, prepared: Any) -> Tensor:
        """Return [keys, dim] values; those of absent keys are unspecified."""
        raise NotImplementedError

    def find_or_insert_slots(self, prepared: Any) -> Tensor:
        """Return [keys] slots; insert new keys where the table can."""
        raise NotImplementedError

    def find_or_insert(self, prepared: Any) -> Tensor:
        """Return [keys, dim] values; insert absent keys with the given values."""
        raise NotImplementedError

    def insert_or_assign(self, prepared: Any) -> None:
        """Assign the given values; insert absent keys."""
        raise NotImplementedError

    def insert_and_evict(self, prepared: Any) -> Tensor:
        """Insert or assign; return the evicted keys."""
        raise NotImplementedError

    def erase(self, keys: Tensor) -> None:
        """Take keys out; those that are not there do not matter."""
        raise NotImplementedError

    def size(self) -> int:
        """Return the number of keys."""
        return self.task.resident

    def nbytes(self) -> int:
        """Return the bytes of keys, their metadata and values."""
        return 0


def build_keyed(name: str, task: KeyTask) -> KeyTable:
    """Make the table of keys; raises Unsupported with the reason where it cannot do the task."""
    table: KeyTable = find(name).load()(task)
    return table


Prepared = tuple[Tensor, Tensor]


class Scored(KeyTable):
    """emblib.HashTable with all slots from the beginning, also as a cache with LRU eviction."""

    operations = tuple(OPERATIONS)
    erases = True
    eviction: ClassVar[emblib.Eviction] = emblib.Eviction.LRU

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.table = emblib.HashTable(self._spec(), device=task.device)

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(self.task.slots, self.task.dim, eviction=self.eviction)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Insert the keys."""
        self.table.insert_or_assign(keys.to(self.task.device), values.to(self.task.device))

    def find_slots(self, prepared: Prepared) -> Tensor:
        """Return the slots of the keys."""
        return self.table.slots(prepared[0])

    def find(self, prepared: Prepared) -> Tensor:
        """Return copies of the rows."""
        return self.table.find(prepared[0])[0]

    def find_or_insert_slots(self, prepared: Prepared) -> Tensor:
        """Insert new keys with rows that the table initialises."""
        return self.table.find_or_insert_slots(prepared[0]).slots

    def find_or_insert(self, prepared: Prepared) -> Tensor:
        """Insert new keys with the given rows."""
        return self.table.find_or_insert(*prepared)[0]

    def insert_or_assign(self, prepared: Prepared) -> None:
        """Assign the given rows to all keys."""
        self.table.insert_or_assign(*prepared)

    def insert_and_evict(self, prepared: Prepared) -> Tensor:
        """Insert; return the keys of the evicted rows."""
        evicted = self.table.insert_and_evict(*prepared).evicted
        assert evicted is not None
        return evicted.keys

    def erase(self, keys: Tensor) -> None:
        """Take them out."""
        self.table.erase(keys)

    def size(self) -> int:
        """Return the number of keys."""
        return self.table.size()

    def nbytes(self) -> int:
        """Return the bytes of the slots in use."""
        return self.table.index.nbytes() + 4 * self.task.dim * self.table.capacity()


class Growing(Scored):
    """emblib.HashTable that begins small and grows."""

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(
            self.task.slots, self.task.dim, initial_capacity=self.task.first or None
        )


class ScoredLFU(Scored):
    """emblib.HashTable as a cache: the least frequently used key is evicted."""

    eviction = emblib.Eviction.LFU


class SortedKeys(KeyTable):
    """All keys in one ascending tensor; a key's position is its slot. Read only."""

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.keys = torch.empty(0, dtype=torch.int64, device=task.device)
        self.parts: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Collect the keys until they are needed, since each merge would sort them all."""
        self.parts.append(keys.to(self.task.device))

    def prepare(self, keys: Tensor, values: Tensor) -> Prepared:
        """Merge the collected keys and lay out the call."""
        if self.parts:
            self.keys = torch.cat([self.keys, *self.parts]).unique()
            self.parts = []
        prepared: Prepared = super().prepare(keys, values)
        return prepared

    def find_slots(self, prepared: Prepared) -> Tensor:
        """Look up the distinct keys of the call, ascending, which is faster than all of them."""
        distinct, inverse = torch.unique(prepared[0], return_inverse=True)
        slots = torch.searchsorted(self.keys, distinct).clamp_(max=len(self.keys) - 1)
        slots_of = torch.where(self.keys[slots] == distinct, slots, -1)
        return slots_of[inverse]

    def nbytes(self) -> int:
        """Return the bytes of the keys."""
        return self.keys.nbytes


ENTRY_BYTES = 17  # of a slot: a key, the value that eviction compares, and a tag


class RandomLines(KeyTable):
    """Random cache lines in as many bytes as a table's keys take: one line per key."""

    ceiling = True
    huge: ClassVar[bool] = False

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cpu":
            raise Unsupported("the ceiling of random lines is measured on the CPU")
        self.lines = Lines(ENTRY_BYTES * task.slots, huge=self.huge)
        self.single_thread = torch.get_num_threads() == 1

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Ignore the keys: no table is held."""

    def prepare(self, keys: Tensor, values: Tensor) -> Tensor:
        """Compute where to read, which is not measured."""
        return self.lines.positions(keys)

    def find_slots(self, prepared: Tensor) -> Tensor:
        """Read the number of each line from the line."""
        return self.lines.take(prepared) if self.single_thread else self.lines.read(prepared)

    def nbytes(self) -> int:
        """Return the bytes of the lines."""
        return int(self.lines.words.nbytes)


class RandomHugeLines(RandomLines):
    """Random cache lines in huge pages."""

    huge = True
