"""SlotAllocator: map the keys of a `DiskRows` to slots of its files, and reuse free slots."""

import secrets

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.ops import pages, tiers
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction
from emblib.tables import memory

# An index reserves address space for its full capacity, and limits on the address space or data of
# a process count all of it. So an index starts small, and is replaced by larger ones as it fills.
_MIN_CAPACITY = 1 << 16
_GROWTH_FACTOR = 16  # factor from one capacity to the next; not measured
_MAX_LOAD = 0.75  # keys per slot of an index; below, few keys find both of their buckets full
_MIN_FREE_SLOTS = 1024  # entries of the smallest stack of free slots


class SlotAllocator:
    """A map from keys to slots of a file; the slots freed last are reused first.

    The map is in memory only. It has no lock: the owner makes one call at a time. An interrupted
    call leaves it inconsistent; the owner then rebuilds it from the heads of the rows (`restore`).

    The values by slot of a `HashIndex` are the slots in the file. A key both of whose buckets are
    full is in a dict instead.

    Attributes:
        end_assigned: 1 plus the largest slot that was ever assigned, 0 if none was.
    """

    def __init__(self) -> None:
        self._make_index(_MIN_CAPACITY)
        self._free_slots = torch.empty(
            _MIN_FREE_SLOTS, dtype=torch.int64, device="cpu"
        )  # a stack of free slots
        self._num_free = 0
        self.end_assigned = 0

    def _make_index(self, capacity: int) -> None:
        """Create an empty map of a capacity."""
        spec = DynamicSpec(
            capacity, 1, initial_capacity=min(1024, capacity), eviction=Eviction.NONE
        )
        # Slots do not depend on the hash key, so a random one is used.
        self._index = HashIndex([spec], "cpu", [secrets.randbits(64) - (1 << 63)])
        # The slot in the file by slot of the index, and the same memory as bytes.
        self._file_slots = memory.reserve(spec.rows, torch.int64, torch.device("cpu"))
        self._records = self._file_slots.view(torch.uint8).view(spec.rows, 8)
        self._overflow_keys: dict[int, int] = {}  # keys both of whose buckets are full

    def _reserve(self, num_keys: int) -> None:
        """Move to a larger index if `num_keys` further keys would exceed the maximum load."""
        required_slots = (self.size + num_keys) / _MAX_LOAD
        capacity = self._file_slots.numel()
        if required_slots <= capacity:
            return
        while capacity < required_slots:
            capacity *= _GROWTH_FACTOR
        entries = self._index.export(0)
        overflow_keys_and_slots = torch.tensor(
            [*self._overflow_keys.items()], dtype=torch.int64, device="cpu"
        ).view(-1, 2)
        all_keys = torch.cat([entries.keys, overflow_keys_and_slots[:, 0]])
        slots_of_keys = torch.cat([self._file_slots[entries.slots], overflow_keys_and_slots[:, 1]])
        self._make_index(capacity)
        self._insert_file_slots(all_keys, slots_of_keys)

    def _advise_growth(self, table: int, rows_before: int, rows: int) -> None:
        memory.advise_growth(self._file_slots, 0, rows_before, rows)

    @property
    def size(self) -> int:
        """Return the number of keys with a slot."""
        return self._index.size(0) + len(self._overflow_keys)

    def find(self, keys: Tensor, is_hidden: Tensor | None = None) -> Tensor:
        """Return the slot of each key, int64 `[n]`, -1 for none.

        Args:
            keys: int64 `[n]`, in any order; keys may repeat.
            is_hidden: uint8 by slot, nonzero for slots to return -1 for; None for none.
        """
        slots = self._index.find(Keys.from_ids(keys))
        slots_of_keys: Tensor = pages.file_slots(slots, self._file_slots, is_hidden)
        if self._overflow_keys:
            for position in (slots < 0).nonzero().view(-1).tolist():
                slot = self._overflow_keys.get(int(keys[position]), -1)
                is_visible = slot >= 0 and (is_hidden is None or not is_hidden[slot])
                slots_of_keys[position] = slot if is_visible else -1
        return slots_of_keys

    def add(self, keys: Tensor) -> Tensor:
        """Assign slots to keys, which must be distinct and have none; return them, int64 `[n]`."""
        num_keys = keys.numel()
        self._reserve(num_keys)
        num_reused = min(num_keys, self._num_free)
        self._num_free -= num_reused
        reused_slots = self._free_slots[self._num_free : self._num_free + num_reused].flip(0)
        new_slots = torch.arange(
            self.end_assigned, self.end_assigned + num_keys - num_reused, device="cpu"
        )
        self.end_assigned += new_slots.numel()
        file_slots = torch.cat([reused_slots, new_slots])
        self._insert_file_slots(keys, file_slots)
        return file_slots

    def _insert_file_slots(self, keys: Tensor, file_slots: Tensor) -> None:
        """Insert new keys with their slots in the file, int64 `[n]` each."""
        row_buffers = RowBuffers(
            [self._file_slots], torch.tensor([[[0, 8]]], device="cpu"), self._advise_growth
        )
        slots = self._index.insert(Keys.from_ids(keys), rows=row_buffers).slots
        no_values = self._records.new_empty(keys.numel(), 0)
        tiers.tier_write_(self._records, slots, file_slots, no_values)
        lowest_slot = int(slots.min()) if slots.numel() else 0
        if lowest_slot < 0:
            has_no_slot = slots < 0
            overflow_keys, overflow_slots = keys[has_no_slot], file_slots[has_no_slot]
            self._overflow_keys.update(
                zip(overflow_keys.tolist(), overflow_slots.tolist(), strict=True)
            )

    def remove(self, keys: Tensor) -> None:
        """Free the slots of keys, which must be distinct and have one each."""
        self._push_free(self.find(keys))
        slots = self._index.erase(Keys.from_ids(keys))
        for key in keys[slots < 0].tolist():
            del self._overflow_keys[key]

    def _push_free(self, slots: Tensor) -> None:
        """Add slots to the stack of free ones; the last one is reused first."""
        num_free = self._num_free + slots.numel()
        if num_free > self._free_slots.numel():
            stack = torch.empty(
                max(num_free, 2 * self._free_slots.numel()), dtype=torch.int64, device="cpu"
            )
            stack[: self._num_free] = self._free_slots[: self._num_free]
            self._free_slots = stack
        self._free_slots[self._num_free : num_free] = slots
        self._num_free = num_free

    def restore(self, keys: Tensor, file_slots: Tensor, end_assigned: int) -> None:
        """Replace the map by keys and their slots, int64 `[n]` each.

        Other slots below `end_assigned` are free. Keys must be distinct, and slots too; neither is
        checked.
        """
        self._make_index(_MIN_CAPACITY)
        self._reserve(keys.numel())
        self._insert_file_slots(keys, file_slots)
        is_free = torch.ones(end_assigned, dtype=torch.bool, device="cpu")
        is_free[file_slots] = False
        self._num_free = 0
        self._push_free(is_free.nonzero().squeeze(1).flip(0))
        self.end_assigned = end_assigned
