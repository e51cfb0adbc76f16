"""Places in a full hash table: entries move to their other bucket until all have one.

Training gives a key one of its two buckets and never moves it for another's sake, so a table that
evicts has no free slots, while one that takes as many keys at once keeps a few of them out: both
their buckets are full, and there is room elsewhere. A load therefore moves what it has placed
(Dietzfelbinger and Weidling, 2007: tables of buckets with two choices can be filled nearly wholly).
Most find room by a few moves at random, many at a time; for the others the shortest chain of moves
to an empty slot is searched, as in a maximum matching, so none stays out that could have a place.
"""

import torch
from torch import Tensor

from emblib.dynamic.keys import GOLDEN, mix
from emblib.ops.hash import SLOTS

_AT_ONCE = 1 << 12  # entries that look for a place in one round
_PATIENCE = 50  # rounds without an entry more


def buckets_of(keys: Tensor, buckets: int, hash_key: int) -> Tensor:
    """The two buckets of each key in a table of so many, int64 `[2, N]`; see csrc/hash/hash.h."""
    mixed = mix(keys ^ hash_key)
    hashes = torch.stack([mixed & 0x7FFFFFFF, mixed * GOLDEN >> 33 & 0x7FFFFFFF])
    mask = (1 << (buckets - 1).bit_length()) - 1
    folded = hashes & mask
    return torch.where(folded < buckets, folded, folded & mask >> 1)


def tags_of(keys: Tensor, hash_key: int) -> Tensor:
    """The byte in `tags` that says a slot may hold the key."""
    return (1 + ((mix(keys ^ hash_key) >> 40 & 0xFFFF) * 255 >> 16)).to(torch.uint8)


def make_room(keys: Tensor, slots: Tensor, buckets: int, hash_key: int) -> Tensor:
    """Slots of entries that are all a table has, with as many as possible in a place.

    Args:
        keys: int64 `[N]`, distinct, the ones that matter most first.
        slots: int64 `[N]`, of each in one of its buckets, or -1.
        buckets: of the table.
        hash_key: of the table.

    Which entries stay out, if any, and where the others are follows from the input alone.
    """
    room = _Room(buckets_of(keys, buckets, hash_key), slots.clone(), buckets)
    waiting = (slots < 0).nonzero().view(-1)
    idle = step = 0
    while waiting.numel() and idle < _PATIENCE and int(room.free.sum()):
        step += 1
        some, rest = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
        settled = room.settle(some, step)
        left = some[~settled]
        if left.numel() and not bool(settled.any()):
            idle += 1
            left = room.change_places(left, step)
        else:
            idle = 0
        waiting = torch.cat([left, rest])
    for entry in waiting.sort().values.tolist():
        if not int(room.free.sum()):
            break
        room.search(entry)
    return room.slots


class _Room:
    """Who is where in a table; `free` `[buckets]` counts empty slots."""

    def __init__(self, of: Tensor, slots: Tensor, buckets: int) -> None:
        self._of, self.slots = of, slots
        self._holder = torch.full((buckets, SLOTS), -1)
        there = (slots >= 0).nonzero().view(-1)
        self._holder.view(-1)[slots[there]] = there
        self.free = (self._holder < 0).sum(1)
        # Buckets from which no chain of moves leads to an empty slot: none ever will, as nothing
        # that is outside of them moves in.
        self._closed = torch.zeros(buckets, dtype=torch.bool)

    def settle(self, waiting: Tensor, step: int) -> Tensor:
        """Give places to some of those that wait, by one move each at most; bool by entry."""
        neighbours = self._holder[self._of[:, waiting].T].reshape(waiting.numel(), -1)
        # Where each neighbour could go instead; an empty slot is taken as it is.
        empty = neighbours < 0
        elsewhere = self._other(neighbours.clamp(min=0))
        elsewhere = torch.where(
            empty, self._of[:, waiting].T.repeat_interleave(SLOTS, 1), elsewhere
        )
        possible = self.free[elsewhere] > 0
        column = (_noise(possible.shape, step) * possible).argmax(1, keepdim=True)
        chosen, goes_to = neighbours.gather(1, column)[:, 0], elsewhere.gather(1, column)[:, 0]
        settled = possible.gather(1, column)[:, 0] & _first_of_each(goes_to, possible.any(1))
        move = settled & (chosen >= 0)
        takes, gives = waiting[move], chosen[move]
        freed = self.slots[gives]
        self._put(gives, goes_to[move])
        self._hold(takes, freed)
        plain = settled & (chosen < 0)
        self._put(waiting[plain], goes_to[plain])
        return settled

    def change_places(self, waiting: Tensor, step: int) -> Tensor:
        """Let each take the slot of a neighbour, which waits instead."""
        slots = self._of[0, waiting] * SLOTS + (_noise((waiting.numel(),), step) % SLOTS)
        once = _first_of_each(slots, torch.ones_like(waiting, dtype=torch.bool))
        gone = self._holder.view(-1)[slots[once]]
        self.slots[gone] = -1
        self._hold(waiting[once], slots[once])
        # So that it is the other bucket's turn when they come back.
        self._of[:, waiting] = self._of[:, waiting].flip(0)
        return torch.cat([gone, waiting[~once]])

    def search(self, entry: int) -> None:
        """Give a place to one that waits, by the shortest chain of moves, if there is any."""
        seen, mover = self._closed.clone(), torch.full_like(self.free, -1)
        frontier = self._of[:, entry].unique()
        frontier = frontier[~seen[frontier]]
        mover[frontier] = entry  # who comes into a bucket where it is on the chain
        while frontier.numel():
            seen[frontier] = True
            empty = frontier[self.free[frontier] > 0]
            if empty.numel():
                self._shift(int(empty[0]), mover, entry)
                return
            members = self._holder[frontier].view(-1)
            reached = self._other(members)
            fresh = ~seen[reached]
            mover.scatter_reduce_(0, reached[fresh], members[fresh], "amin", include_self=False)
            frontier = reached[fresh].unique()
        self._closed = seen

    def _shift(self, bucket: int, mover: Tensor, entry: int) -> None:
        """Let every entry of a chain take the slot that the one before it leaves."""
        mine = int(mover[bucket])
        slot = bucket * SLOTS + int((self._holder[bucket] < 0).int().argmax())
        self.free[bucket] -= 1
        while mine != entry:
            left = int(self.slots[mine])
            self._hold(torch.tensor([mine]), torch.tensor([slot]))
            slot, mine = left, int(mover[left // SLOTS])
        self._hold(torch.tensor([entry]), torch.tensor([slot]))

    def _other(self, entries: Tensor) -> Tensor:
        """The bucket of each that it is not in."""
        return self._of[0, entries] + self._of[1, entries] - self.slots[entries] // SLOTS

    def _put(self, entries: Tensor, buckets: Tensor) -> None:
        """Into the first empty slots of buckets, which are distinct."""
        way = (self._holder[buckets] < 0).int().argmax(1)
        self._hold(entries, buckets * SLOTS + way)
        self.free[buckets] -= 1

    def _hold(self, entries: Tensor, slots: Tensor) -> None:
        self._holder.view(-1)[slots] = entries
        self.slots[entries] = slots


def _first_of_each(values: Tensor, valid: Tensor) -> Tensor:
    """Whether an element is the first valid one of its value."""
    numbers = torch.arange(values.numel())
    last = int(values.max()) + 1 if values.numel() else 0
    first = torch.full((last,), values.numel())
    first.scatter_reduce_(0, values[valid], numbers[valid], "amin")
    return valid & (first[values] == numbers)


def _noise(shape: tuple[int, ...], step: int) -> Tensor:
    """Positive numbers that look random and are the same on every machine."""
    count = 1
    for size in shape:
        count *= size
    numbers = torch.arange(count) + (step << 40)
    return (mix(numbers) >> 2 & 0x3FFFFFFFFFFFFFFF).view(shape) + 1
