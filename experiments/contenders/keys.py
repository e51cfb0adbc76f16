"""The face of a table of keys: any 64-bit key to a row; what it can do beyond, it says itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import emblib
from experiments.contenders.registry import Missing, Unsupported, find
from experiments.machine.bandwidth import Lines

__all__ = ["KeyTable", "KeyTask", "Missing", "Unsupported", "build_keyed"]


@dataclass(frozen=True)
class KeyTask:
    """What a table of keys is built for."""

    slots: int  # the most keys it may hold
    dim: int  # float32 columns of a key's value
    device: torch.device
    resident: int  # keys that it will be filled with
    first: int = 0  # slots to begin with, of a table that grows; 0: all


class KeyTable(ABC):
    """Built with a KeyTask. `prepare`, `fill` and `erase` are never timed; the methods that
    `operations` names are.

    Slots are int64, `absent` for a key that is not there; equal keys have equal slots. Values are
    float32 [keys, dim].
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
        """A call's keys and values as its operations take them."""
        return keys.to(self.task.device), values.to(self.task.device)

    def ready(self) -> None:  # noqa: B027 most are as they were filled
        """Told when it was filled and found right: whatever checking left behind may go."""

    @abstractmethod
    def find_slots(self, prepared: Any) -> Tensor:
        """[keys] slots; nothing changes."""

    def find(self, prepared: Any) -> Tensor:
        """[keys, dim] values; what is given for a key that is not there is its own affair."""
        raise NotImplementedError

    def find_or_insert_slots(self, prepared: Any) -> Tensor:
        """[keys] slots; new keys are put in, where it can."""
        raise NotImplementedError

    def find_or_insert(self, prepared: Any) -> Tensor:
        """[keys, dim] values, those given for keys that were not there, which are put in."""
        raise NotImplementedError

    def insert_or_assign(self, prepared: Any) -> None:
        """The given values, for keys that were there as for others."""
        raise NotImplementedError

    def insert_and_evict(self, prepared: Any) -> Tensor:
        """As insert_or_assign; the keys that gave way."""
        raise NotImplementedError

    def erase(self, keys: Tensor) -> None:
        """Take keys out; those that are not there do not matter."""
        raise NotImplementedError

    def size(self) -> int:
        """Keys that are there; what it was filled with, of a table that cannot change."""
        return self.task.resident

    def nbytes(self) -> int:
        """Bytes of keys, what belongs to them, and values."""
        return 0


def build_keyed(name: str, task: KeyTask) -> KeyTable:
    """Make the table of keys; raises Unsupported with the reason where it cannot do the task."""
    table: KeyTable = find(name).load()(task)
    return table


Prepared = tuple[Tensor, Tensor]


class Scored(KeyTable):
    """All slots from the beginning."""

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

    def _spec(self) -> emblib.DynamicSpec:
        return emblib.DynamicSpec(
            self.task.slots, self.task.dim, initial_capacity=self.task.first or None
        )


class ScoredLRU(Scored):
    """As a cache: of its two buckets, the key that was not used for longest gives way."""


class ScoredLFU(ScoredLRU):
    """The key with the fewest uses gives way."""

    eviction = emblib.Eviction.LFU


PreparedQueries = tuple[Tensor, Tensor]


class SortedKeys(KeyTable):
    """All keys in one ascending tensor; a row's number is where its key is. Read only."""

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.keys = torch.empty(0, dtype=torch.int64, device=task.device)
        self.parts: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """The keys are kept until they are needed, since each merge would sort them all."""
        self.parts.append(keys.to(self.task.device))

    def prepare(self, keys: Tensor, values: Tensor) -> PreparedQueries:
        """With all keys merged."""
        if self.parts:
            self.keys = torch.cat([self.keys, *self.parts]).unique()
            self.parts = []
        prepared: PreparedQueries = super().prepare(keys, values)
        return prepared

    def find_slots(self, prepared: PreparedQueries) -> Tensor:
        """The distinct keys of the call, ascending, are looked up faster than all of them."""
        distinct, inverse = torch.unique(prepared[0], return_inverse=True)
        place = torch.searchsorted(self.keys, distinct).clamp_(max=len(self.keys) - 1)
        found = torch.where(self.keys[place] == distinct, place, -1)
        return found[inverse]

    def nbytes(self) -> int:
        """Of the keys."""
        return self.keys.nbytes


ENTRY_BYTES = 17  # of a slot: a key, what decides who gives way, and a tag


class RandomLines(KeyTable):
    """As many bytes as the keys of a table take; each key reads one line of them."""

    ceiling = True
    huge: ClassVar[bool] = False

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cpu":
            raise Unsupported("the ceiling of random lines is measured on the CPU")
        self.lines = Lines(ENTRY_BYTES * task.slots, huge=self.huge)
        self.alone = torch.get_num_threads() == 1

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """It holds no keys."""

    def prepare(self, keys: Tensor, values: Tensor) -> Tensor:
        """Where to read: finding that out is not what is measured."""
        return self.lines.places(keys)

    def find_slots(self, prepared: Tensor) -> Tensor:
        """The number of each line, read from it."""
        return self.lines.take(prepared) if self.alone else self.lines.read(prepared)

    def nbytes(self) -> int:
        """Of the lines."""
        return int(self.lines.words.nbytes)


class RandomHugeLines(RandomLines):
    """The same in huge pages."""

    huge = True
