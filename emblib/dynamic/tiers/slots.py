"""SlotAllocator: map the keys of a `DiskRows` to slots of its files, and reuse free slots."""

import secrets

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction
from emblib.tables import memory

# An index reserves address space for its full capacity, and limits on the address space or data of
# a process count all of it. So an index starts small, and is replaced by larger ones as it fills.
_MIN_CAPACITY = 1 << 16
_GROWTH = 16
_MAX_LOAD = 0.75  # keys per slot of an index; below, few keys find both of their buckets full


class SlotAllocator:
    """A map from keys to slots of a file; the slots freed last are reused first.

    An interrupted call leaves it inconsistent; the owner then rebuilds it from the heads of the
    rows.
    """

    def __init__(self) -> None:
        self._make(_MIN_CAPACITY)
        self._free: list[int] = []
        self.high = 0  # end of the slots that were ever assigned

    def _make(self, capacity: int) -> None:
        """Create an empty map of a capacity."""
        spec = DynamicSpec(
            capacity, 1, initial_capacity=min(1024, capacity), eviction=Eviction.NONE
        )
        # Slots do not depend on the hash key, so a random one is used.
        self._index = HashIndex([spec], "cpu", [secrets.randbits(64) - (1 << 63)])
        self._by_slot = memory.reserve(spec.rows, torch.int64, torch.device("cpu"))
        self._overflow_keys: dict[int, int] = {}  # keys both of whose buckets are full

    def _reserve(self, keys: int) -> None:
        """Move to a larger index if `keys` further keys would exceed the maximum load."""
        wanted_slots = (self.size + keys) / _MAX_LOAD
        capacity = self._by_slot.numel()
        if wanted_slots <= capacity:
            return
        while capacity < wanted_slots:
            capacity *= _GROWTH
        entries = self._index.export(0)
        overflow = torch.tensor([*self._overflow_keys.items()], dtype=torch.int64).view(-1, 2)
        all_keys = torch.cat([entries.keys, overflow[:, 0]])
        slots_of_keys = torch.cat([self._by_slot[entries.slots], overflow[:, 1]])
        self._make(capacity)
        self._set(all_keys, slots_of_keys)

    def _use(self, table: int, rows_before: int, rows: int) -> None:
        memory.advise_growth(self._by_slot, 0, rows_before, rows)

    @property
    def size(self) -> int:
        """Return the number of keys with a slot."""
        return self._index.size(0) + len(self._overflow_keys)

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, -1 for none."""
        slots = self._index.find(Keys.of(keys))
        file_slots = torch.where(slots < 0, -1, self._by_slot[slots.clamp(min=0)])
        if self._overflow_keys:
            for at in (slots < 0).nonzero().view(-1).tolist():
                file_slots[at] = self._overflow_keys.get(int(keys[at]), -1)
        return file_slots

    def add(self, keys: Tensor) -> Tensor:
        """Assign slots to distinct keys that have none, and return them."""
        count = keys.numel()
        self._reserve(count)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        unused = torch.arange(self.high, self.high + count - len(reused))
        self.high += unused.numel()
        file_slots = torch.cat([torch.tensor(reused, dtype=torch.int64), unused])
        self._set(keys, file_slots)
        return file_slots

    def _set(self, keys: Tensor, file_slots: Tensor) -> None:
        rows = RowBuffers([self._by_slot], torch.tensor([[[0, 8]]]), self._use)
        slots = self._index.insert(Keys.of(keys), rows=rows).slots
        has_slot = slots >= 0
        self._by_slot[slots[has_slot]] = file_slots[has_slot]
        overflow = zip(keys[~has_slot].tolist(), file_slots[~has_slot].tolist(), strict=True)
        self._overflow_keys.update(overflow)

    def remove(self, keys: Tensor) -> None:
        """Free the slots of distinct keys, all of which have one."""
        self._free += self.find(keys).tolist()
        slots = self._index.erase(Keys.of(keys))
        for key in keys[slots < 0].tolist():
            del self._overflow_keys[key]

    def restore(self, keys: Tensor, file_slots: Tensor, high: int) -> None:
        """Replace the map by these keys and slots; the other slots below `high` are free."""
        self._make(_MIN_CAPACITY)
        self._reserve(keys.numel())
        self._set(keys, file_slots)
        free = torch.ones(high, dtype=torch.bool)
        free[file_slots] = False
        self._free = free.nonzero().squeeze(1).flip(0).tolist()
        self.high = high
