"""Which place each key of a store has: a map from int64 keys to small numbers, used again."""

import secrets

import torch
from torch import Tensor

from emblib.dynamic import arena
from emblib.dynamic.hash_index import HashIndex, ValueRows
from emblib.dynamic_specs import DynamicSpec, Eviction
from emblib.ops.hash import Keys

# An index reserves address space for all that it may ever hold, and systems that limit that, or the
# data of a process, count it whole. So a small one is replaced by one of `_STEP` times its room.
_LEAST = 1 << 16
_STEP = 16
_ROOM = 0.75  # of an index, for keys: few find both of their buckets full below it


class KeyPlaces:
    """Places for keys: the ones freed last are given again first, then `high` and up."""

    def __init__(self) -> None:
        self._make(_LEAST)
        self._free: list[int] = []
        self.high = 0  # no place at or beyond was ever given

    def _make(self, capacity: int) -> None:
        """An empty map for as many slots."""
        spec = DynamicSpec(
            capacity, 1, initial_capacity=min(1024, capacity), eviction=Eviction.NONE
        )
        # No place depends on the hash, so it is another one each time.
        self._index = HashIndex([spec], "cpu", [secrets.randbits(64) - (1 << 63)])
        self._by_slot = arena.reserve(spec.rows, torch.int64, torch.device("cpu"))
        self._crowded: dict[int, int] = {}  # keys both of whose buckets are full

    def _make_room(self, keys: int) -> None:
        """Take a larger index where `keys` more would crowd this one."""
        wanted = (self.size + keys) / _ROOM
        capacity = self._by_slot.numel()
        if wanted <= capacity:
            return
        while capacity < wanted:
            capacity *= _STEP
        there = self._index.export(0)
        crowded = torch.tensor([*self._crowded.items()], dtype=torch.int64).view(-1, 2)
        held = torch.cat([there.keys, crowded[:, 0]])
        places = torch.cat([self._by_slot[there.slots], crowded[:, 1]])
        self._make(capacity)
        self._set(held, places)

    def _use(self, table: int, before: int, rows: int) -> None:
        arena.use(self._by_slot, 0, before, rows)

    @property
    def size(self) -> int:
        """How many keys have one."""
        return self._index.size(0) + len(self._crowded)

    def find(self, keys: Tensor) -> Tensor:
        """The place of each key, -1 for none."""
        slots = self._index.find(Keys.of(keys))
        places = torch.where(slots < 0, -1, self._by_slot[slots.clamp(min=0)])
        if self._crowded:
            for at in (slots < 0).nonzero().view(-1).tolist():
                places[at] = self._crowded.get(int(keys[at]), -1)
        return places

    def add(self, keys: Tensor) -> Tensor:
        """Places for distinct keys that have none."""
        count = keys.numel()
        self._make_room(count)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = torch.arange(self.high, self.high + count - len(reused))
        self.high += fresh.numel()
        places = torch.cat([torch.tensor(reused, dtype=torch.int64), fresh])
        self._set(keys, places)
        return places

    def _set(self, keys: Tensor, places: Tensor) -> None:
        rows = ValueRows([self._by_slot], torch.tensor([[[0, 8]]]), self._use)
        slots = self._index.insert(Keys.of(keys), rows=rows).slots
        there = slots >= 0
        self._by_slot[slots[there]] = places[there]
        crowded = zip(keys[~there].tolist(), places[~there].tolist(), strict=True)
        self._crowded.update(crowded)

    def remove(self, keys: Tensor) -> None:
        """Free the places of distinct keys that have one."""
        self._free += self.find(keys).tolist()
        slots = self._index.erase(Keys.of(keys))
        for key in keys[slots < 0].tolist():
            del self._crowded[key]

    def restore(self, keys: Tensor, places: Tensor, high: int) -> None:
        """Begin with these, the other places below `high` being free."""
        self._make(_LEAST)
        self._make_room(keys.numel())
        self._set(keys, places)
        free = torch.ones(high, dtype=torch.bool)
        free[places] = False
        self._free = free.nonzero().squeeze(1).flip(0).tolist()
        self.high = high
