"""The software cache in dictionaries and lists, one row at a time: the definition of correct.

The cache is 32-way set-associative; rows have linear ids. `CacheModel.plan` processes one batch: it
finds, inserts, evicts and counts rows. `write_back` and `fetch` move one row between the cache and
the memory tier of its table. Missing rows take the ways of their set by these rules:

- sets are independent; LRU serves the missing rows of a set in ascending order, LFU those with the
  most lookups so far first, at equal lookups in ascending order
- a way may be taken if it is empty, or if its last use was before the oldest batch in flight
- empty ways are taken first. Then LRU takes the least recently used way; LFU takes the way whose
  row has the fewest lookups so far, at equal lookups the most recently used one
- LFU does not replace a row by a row with fewer lookups

The lookups so far (LFU) of a row include those of this batch, and are counted for rows outside the
cache too. The kernels of `csrc/cache` share no code and no data structure with this file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from emblib.columns import FeatureRow, Tier
from emblib.reference.random import finalise

WAYS = 32
MAX_LOOKUPS = 2**31 - 1  # the count of a row's lookups saturates here

COUNTERS = (
    "calls",  # plans in which the table was looked up; in the total: all plans
    "lookups",  # lookups of cached tables
    "unique",  # distinct rows, added up over the plans
    "unique_misses",  # distinct rows that were not in the cache when the plan began
    "conflict_unique_misses",  # rows among these that got no way, and are read from their tier
    "conflict_misses",  # lookups of rows that got no way
    "lookup_misses",  # lookups of all rows that were not in the cache when the plan began
    "write_backs",  # evicted rows, counted for their own table
)


def set_of(row: int, num_sets: int) -> int:
    """Return the set of a linear row: the high half of its hash, scaled to `[0, num_sets)`."""
    return (finalise(row) >> 32) * num_sets >> 32


@dataclass
class Way:
    """One way of a set: its linear row, None if empty, and the batch that last used the row."""

    row: int | None = None
    stamp: int = 0


@dataclass
class CachePlan:
    """Plan of a batch: where its rows are read, and which rows move before that.

    Attributes:
        slots: slot of each distinct row, `set * 32 + way`; None if it is read from its tier.
        fetched: the row that each fetched row evicts; None if the way was empty.
    """

    slots: dict[int, int | None] = field(default_factory=dict)
    fetched: dict[int, int | None] = field(default_factory=dict)


class CacheModel:
    """A cache that several tables share.

    Args:
        num_sets: number of sets, each of `WAYS` ways.
        policy: "lru" or "lfu".
        ranges: linear rows of each table, as (first row, number of rows).
    """

    def __init__(self, num_sets: int, policy: str, ranges: Sequence[tuple[int, int]]) -> None:
        self.sets = [[Way() for _ in range(WAYS)] for _ in range(num_sets)]
        self.policy = policy
        self.ranges = list(ranges)
        self.counts: Counter[int] = Counter()  # lookups of a row so far; LFU only
        self.table_counters = [dict.fromkeys(COUNTERS, 0) for _ in ranges]  # counters per table
        self.totals = dict.fromkeys(COUNTERS, 0)  # counters of all tables together

    def plan(self, lookups: Iterable[int], clock: int, oldest: int) -> CachePlan:
        """Plan batch number `clock`, and update cache and counters.

        `lookups` are linear rows; they may repeat, and those outside of `ranges` are ignored.
        `oldest` is the number of the oldest batch in flight: rows last used by that batch or a
        later one are not evicted.
        """
        lookups_of_row = Counter(row for row in lookups if self._table_of(row) >= 0)
        plan = CachePlan()
        missing_by_set: dict[int, list[int]] = {}
        for row, num_lookups in lookups_of_row.items():
            if self.policy == "lfu":
                self.counts[row] = min(self.counts[row] + num_lookups, MAX_LOOKUPS)
            set_index = set_of(row, len(self.sets))
            slot = self.locate(row)
            if slot is not None:
                self.sets[set_index][slot % WAYS].stamp = clock
                plan.slots[row] = slot
            else:
                missing_by_set.setdefault(set_index, []).append(row)
        for set_index, rows in missing_by_set.items():
            self._assign_ways(set_index, rows, plan, clock=clock, oldest=min(oldest, clock))
        missing_rows = {row for rows in missing_by_set.values() for row in rows}
        self._count_batch(lookups_of_row, plan, missing_rows)
        return plan

    def _assign_ways(
        self, set_index: int, rows: list[int], plan: CachePlan, *, clock: int, oldest: int
    ) -> None:
        """Assign the ways of a set to its missing rows, both in the order of the policy.

        Sorts `rows`, and writes their slots and evicted rows to `plan`.
        """
        is_lfu, ways = self.policy == "lfu", self.sets[set_index]
        rows.sort(key=lambda row: (-self.counts[row], row) if is_lfu else row)
        usable_ways = [w for w in range(WAYS) if ways[w].row is None or ways[w].stamp < oldest]
        usable_ways.sort(key=lambda w: (*self._sort_key(ways[w]), w))
        for row in rows:
            plan.slots[row] = None
            if not usable_ways:
                continue
            way = ways[usable_ways[0]]
            if is_lfu and way.row is not None and self.counts[row] < self.counts[way.row]:
                continue
            plan.slots[row] = set_index * WAYS + usable_ways.pop(0)
            plan.fetched[row] = way.row
            way.row, way.stamp = row, clock

    def _sort_key(self, way: Way) -> tuple[int, ...]:
        """Return the sort key of ways that may be taken: the lowest is taken first."""
        if way.row is None:
            return (0, 0, 0)
        if self.policy == "lfu":
            return (1, self.counts[way.row], -way.stamp)
        return (1, 0, way.stamp)

    def _table_of(self, row: int) -> int:
        """Return the table of a row; -1 if no table has it."""
        for t, (first_row, rows) in enumerate(self.ranges):
            if first_row <= row < first_row + rows:
                return t
        return -1

    def _count_batch(
        self, lookups_of_row: Counter[int], plan: CachePlan, missing_rows: set[int]
    ) -> None:
        """Add a planned batch, with the number of lookups of each row, to the counters."""
        for t in {self._table_of(row) for row in lookups_of_row}:
            self.table_counters[t]["calls"] += 1
        self.totals["calls"] += 1
        for row, num_lookups in lookups_of_row.items():
            has_no_way = plan.slots[row] is None
            for counters in (self.table_counters[self._table_of(row)], self.totals):
                counters["lookups"] += num_lookups
                counters["unique"] += 1
                counters["unique_misses"] += row in missing_rows
                counters["lookup_misses"] += num_lookups * (row in missing_rows)
                counters["conflict_unique_misses"] += has_no_way
                counters["conflict_misses"] += num_lookups * has_no_way
        for evicted in plan.fetched.values():
            if evicted is not None:
                self.table_counters[self._table_of(evicted)]["write_backs"] += 1
                self.totals["write_backs"] += 1

    def locate(self, row: int) -> int | None:
        """Return the current slot of a linear row, None if it is not in the cache."""
        set_index = set_of(row, len(self.sets))
        ways = [w for w, entry in enumerate(self.sets[set_index]) if entry.row == row]
        return set_index * WAYS + ways[0] if ways else None


@dataclass
class CacheMemory:
    """The tensors behind a cache, which `fetch` and `write_back` change.

    Attributes:
        weights: flat weights by `Tier`.
        states: optimizer states by `Tier`, flat; a state has one number per row or one per weight.
        tables: int64 `[T, 8]`, a row per table with the columns of `FeatureColumn`.
    """

    weights: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    tables: Tensor

    def _locations(self, row: int, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Return (view in the table's tier, view in the cache) of a row and of each state."""
        tables = [FeatureRow(*columns) for columns in self.tables.tolist()]
        table = next(t for t in tables if t.row_base <= row < t.row_base + t.rows)
        dim, tier, first_cached = table.dim, table.tier, slot * table.cache_stride
        row_in_table = row - table.row_base
        first = table.weight_offset + row_in_table * dim
        row_slice, slot_slice = slice(first, first + dim), slice(first_cached, first_cached + dim)
        pairs = [(self.weights[tier][row_slice], self.weights[Tier.CACHE][slot_slice])]
        for state, cached in zip(self.states[tier], self.states[Tier.CACHE], strict=True):
            if cached.numel() == self.weights[Tier.CACHE].numel():  # one number per weight
                pairs.append((state[row_slice], cached[slot_slice]))
            else:
                element = table.state_base + row_in_table
                pairs.append((state[element : element + 1], cached[slot : slot + 1]))
        return pairs

    def fetch(self, row: int, slot: int) -> None:
        """Copy a linear row and its states into a cache slot; narrower dtypes round to nearest."""
        for stored, cached in self._locations(row, slot):
            cached.copy_(stored)

    def write_back(self, row: int, slot: int) -> None:
        """Copy a linear row and its states from a slot back; narrower dtypes round to nearest."""
        for stored, cached in self._locations(row, slot):
            stored.copy_(cached)


def move(memory: CacheMemory, plan: CachePlan) -> None:
    """Fetch the rows of a plan, each after writing back the row that it evicts."""
    for row, evicted in plan.fetched.items():
        slot = plan.slots[row]
        assert slot is not None, "a fetched row has a slot"
        if evicted is not None:
            memory.write_back(evicted, slot)
        memory.fetch(row, slot)


def flush(memory: CacheMemory, model: CacheModel) -> None:
    """Write every row of the cache back to its table; the rows stay in the cache."""
    for set_index, ways in enumerate(model.sets):
        for w, way in enumerate(ways):
            if way.row is not None:
                memory.write_back(way.row, set_index * WAYS + w)
