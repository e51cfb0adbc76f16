"""The hash table of dynamic tables as lists of slots, key by key: the definition of correct.

`HashModel` is the state of all tables of an index. A training step calls `touch` and `misses` with
a batch, a list of (table, key) by position, then `grow` and `insert` with its misses; `find`,
`erase`, `expire` and `shrink` are separate calls. `index` returns the same state as the tensors of
`emblib.ops.hash`, whose docstring defines terms; `HashModel.of` reads them. Keys, stamps and scores
are signed: an unsigned id is the int64 of the same bits. `values` defines the initial rows of new
keys. The kernels of `csrc/hash` share no code and no data structure with this file.

The rules:

- a key is in one of its two buckets (`addresses`), of 32 slots each; a table grows by splitting
  buckets as its keys grow (`wanted_buckets`)
- entries rank by stamp and key ("lru"), by score and key ("lfu"), by score, stamp and key
  ("lru_lfu", "assigned"); the lowest is evicted. No order evicts an entry that the current batch
  used, and "none" evicts nothing
- missing keys that are admitted choose their bucket in rounds (`max_choosers`), all by the state at
  the beginning of the round: the first bucket if it has more than 16 free slots or no fewer free
  slots than the second one, else the second one; if both are full, the one with the lower entry to
  evict
- a bucket then serves the keys that chose it in order, until half of its free slots, or of its
  entries that may be evicted, are taken, rounded up; the other keys choose again in the next round
- a key that would have to evict is refused if there is no such entry, or, with the policy
  "competes", if it ranks below the entry

Details:

- a slot is empty if its tag is 0; its `entries` are then unspecified
- if one of two full buckets has no entry that may be evicted, the other bucket evicts
- the score of a new key is its uses (lfu, lru_lfu), the score of its table (assigned), or else 0
- a present key that was not admitted is a hit like any other: admission concerns missing keys
- a row that moved leaves its old bytes unchanged
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from emblib.columns import InitialKind
from emblib.reference.random import mix, philox_counters

SLOTS = 32  # slots per bucket
PREFER_FIRST = 16  # a first bucket with more free slots than this is taken
FIRST_CHOOSERS = 8  # keys per bucket that may choose a bucket in the first round
CHOOSERS_GROWTH = 4  # keys that may have chosen after a round ÷ those after the previous round
# Eviction orders, and counters in the order of `HashCounter`.
ORDERS = ("none", "lru", "lfu", "lru_lfu", "assigned")
COUNTERS = (
    "lookups",
    "hits",
    "inserted",
    "evicted",
    "refused",
    "not_admitted",
    "expired",
    "erased",
)
HIT, NEW, EVICTING, REFUSED, NOT_ADMITTED = 1, 2, 3, 4, 5  # status of a key, see `InsertStatus`
MAX_USES = 2**63 - 1  # the counter of uses of a key saturates here

Batch = Sequence[tuple[int, int]]  # (table, key) of each position


@lru_cache(maxsize=1 << 16)  # the model asks for the same keys again and again
def hash_of(key: int, hash_key: int) -> int:
    """Hash a key with a table's `hash_key`; both are 64 bits of any sign."""
    return mix((key ^ hash_key) % 2**64)


def tag_of(key: int, hash_key: int = 0) -> int:
    """Return the tag of a key, 1 to 255, which is stored with its slot."""
    return 1 + ((hash_of(key, hash_key) >> 40 & 0xFFFF) * 255 >> 16)


@lru_cache(maxsize=1 << 16)
def addresses(key: int, buckets: int, hash_key: int = 0) -> tuple[int, int]:
    """Return the two buckets of a key, by linear hashing (Litwin, 1980); they may be equal."""
    mixed, mask = hash_of(key, hash_key), 2 ** (buckets - 1).bit_length() - 1
    hashes = (mixed & 0x7FFFFFFF, (mixed * 0x9E3779B97F4A7C15 % 2**64) >> 33)
    first_bucket, second_bucket = (
        h & mask if h & mask < buckets else h & mask >> 1 for h in hashes
    )
    return first_bucket, second_bucket


def max_choosers(buckets: int, number: int) -> int:
    """Return how many missing keys of a table have had their first choice after round `number`.

    Rounds count from 0. There are few of them, because the number grows by CHOOSERS_GROWTH.
    """
    return FIRST_CHOOSERS * buckets * CHOOSERS_GROWTH**number


def wanted_buckets(keys: int, buckets: int, max_buckets: int, load: int) -> int:
    """Return the buckets that `keys` keys need: from `buckets` to `max_buckets`.

    `load` is in 1024ths of the slots. An unsplit bucket gets twice the keys of a split one. So all
    2^n buckets of a level are split while the number of keys grows by a quarter from the load, and
    then none until the next level is as full. The last level ends at `max_buckets`.
    """
    load_of_bucket = SLOTS * load  # keys of a bucket, in 1024ths
    level = 1
    while 4 * level <= max_buckets and 2 * level * load_of_bucket < keys * 1024:
        level *= 2
    over = max(0, keys * 1024 - level * load_of_bucket)
    limit = 2 * level if 4 * level <= max_buckets else max_buckets
    return max(buckets, min(limit, level + -(-4 * over // load_of_bucket)))


@dataclass(eq=False)
class HashEntry:
    """The contents of an occupied slot."""

    key: int
    stamp: int  # clock of the batch that last used the key
    score: int = 0


@dataclass
class Miss:
    """A key of a batch that was missing, and the result of its insertion."""

    key: int
    positions: list[int]  # in the batch, ascending
    total: int = 0  # uses in the batch
    admitted: bool = True  # set by the caller before the insertion
    slot: int = -1  # of the table; -1 if the key got none
    status: int = NOT_ADMITTED
    evicted: HashEntry | None = None


@dataclass
class ReferenceHashTable:
    """One table: its slots, bucket after bucket, and counters."""

    buckets: int  # in use
    max_buckets: int  # that it has slots for
    load: int  # keys per slot, in 1024ths, above which it grows
    hash_key: int = 0  # selects the hash of its keys
    slots: list[HashEntry | None] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def __post_init__(self) -> None:
        self.slots = self.slots or [None] * (self.max_buckets * SLOTS)

    @property
    def size(self) -> int:
        """Return the number of keys."""
        return sum(entry is not None for entry in self.slots)

    def bucket(self, number: int) -> list[HashEntry | None]:
        """Return the contents of the slots of a bucket, copied."""
        return self.slots[number * SLOTS : (number + 1) * SLOTS]

    def addresses(self, key: int) -> tuple[int, int]:
        """Return the two buckets of a key."""
        return addresses(key, self.buckets, self.hash_key)

    def find(self, key: int) -> int:
        """Return the slot of a key, -1 if it is missing."""
        for number in self.addresses(key):
            for way, entry in enumerate(self.bucket(number)):
                if entry is not None and entry.key == key:
                    return number * SLOTS + way
        return -1

    def remove(self, slot: int, counter: str) -> None:
        """Empty a slot and add 1 to `counter`, a name of `COUNTERS`."""
        self.slots[slot] = None
        self.counters[counter] += 1

    def grow(self, keys: int) -> dict[int, int]:
        """Split buckets for `keys` keys (`wanted_buckets`); return moved keys' {old: new slot}."""
        old_buckets, self.buckets = (
            self.buckets,
            wanted_buckets(keys, self.buckets, self.max_buckets, self.load),
        )
        new_slots: dict[int, int] = {}
        for slot, entry in enumerate(self.slots[: old_buckets * SLOTS]):
            if entry is None:
                continue
            first_bucket, _ = addresses(entry.key, old_buckets, self.hash_key)
            bucket = self.addresses(entry.key)[0 if first_bucket == slot // SLOTS else 1]
            if bucket != slot // SLOTS:
                new_slots[slot] = bucket * SLOTS + self.bucket(bucket).index(None)
                self.slots[new_slots[slot]], self.slots[slot] = entry, None
        return new_slots


class HashModel:
    """Tables that share a clock: the sequential definition of every op.

    Args:
        tables: tables, which the model changes.
        order: eviction order, one of `ORDERS`.
        insert_policy: "wins" or "competes": whether a key that ranks below all it could evict is
            inserted or refused.
    """

    def __init__(
        self, tables: Sequence[ReferenceHashTable], order: str, insert_policy: str = "wins"
    ) -> None:
        self.tables = list(tables)
        self.order, self.insert_policy = order, insert_policy
        self.clock = 0  # number of batches so far

    # A batch

    def find(self, batch: Batch) -> list[int]:
        """Return the slot of every position's key, -1 if it is missing."""
        return [self.tables[t].find(key) for t, key in batch]

    def touch(self, batch: Batch, counts: Sequence[int], batch_scores: Sequence[int]) -> list[int]:
        """Begin a batch: find its keys and record their use; return slots, -1 for missing keys.

        Advances the clock and counts lookups and hits. `counts` are the uses of each position,
        `batch_scores` the scores by table ("assigned").
        """
        self.clock += 1
        slots = self.find(batch)
        for (t, _), slot, count in zip(batch, slots, counts, strict=True):
            table = self.tables[t]
            table.counters["lookups"] += 1
            if slot < 0:
                continue
            table.counters["hits"] += 1
            entry = table.slots[slot]
            assert entry is not None, "a key was found there"
            entry.stamp = self.clock
            if self.order in ("lfu", "lru_lfu"):
                entry.score = min(entry.score + count, MAX_USES)
            elif self.order == "assigned":
                entry.score = batch_scores[t]
        return slots

    def misses(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[Miss]]:
        """Return the distinct keys without a slot, per table, in order of first occurrence.

        `slots` must be what `touch` returned. Misses are `admitted` until the caller changes that.
        """
        misses_by_key: list[dict[int, Miss]] = [{} for _ in self.tables]
        for position, ((t, key), slot, count) in enumerate(zip(batch, slots, counts, strict=True)):
            if slot < 0:
                miss = misses_by_key[t].setdefault(key, Miss(key, []))
                miss.positions.append(position)
                miss.total = min(miss.total + count, MAX_USES)
        return [list(misses.values()) for misses in misses_by_key]

    def grow(self, misses: Sequence[Sequence[Miss]]) -> list[dict[int, int]]:
        """Grow every table for its admitted misses; return per table the slots that moved."""
        return [
            table.grow(table.size + sum(miss.admitted for miss in misses_of_table))
            for table, misses_of_table in zip(self.tables, misses, strict=True)
        ]

    def insert(self, misses: Sequence[Sequence[Miss]], batch_scores: Sequence[int]) -> None:
        """Insert or refuse every admitted miss; set its slot, status and evicted entry.

        Misses choose their buckets in rounds, see the rules above. `batch_scores` are the scores by
        table ("assigned"). All misses are counted by their status.
        """
        for table, misses_of_table, score in zip(self.tables, misses, batch_scores, strict=True):
            pending: list[Miss] = []
            begin = round_number = 0
            while pending or begin < len(misses_of_table):
                end = max_choosers(table.buckets, round_number)
                pending += [miss for miss in misses_of_table[begin:end] if miss.admitted]
                pending = self._run_round(table, pending, score)
                begin, round_number = end, round_number + 1
            for miss in misses_of_table:
                is_stored = miss.status in (NEW, EVICTING)
                table.counters["inserted"] += is_stored
                table.counters["evicted"] += miss.status == EVICTING
                table.counters["refused"] += miss.status == REFUSED
                table.counters["not_admitted"] += miss.status == NOT_ADMITTED

    def _run_round(self, table: ReferenceHashTable, pending: list[Miss], score: int) -> list[Miss]:
        """Run one round of a table's missing keys; return those left for the next."""
        chosen_by: dict[tuple[int, bool], list[tuple[Miss, HashEntry]]] = {}
        for miss in pending:
            entry = HashEntry(miss.key, self.clock, self._first_score(miss, score))
            choice = self._choose(table, entry)
            if choice is None:
                miss.status = REFUSED
            else:
                chosen_by.setdefault(choice, []).append((miss, entry))
        for (bucket, evict), bucket_misses in chosen_by.items():
            self._insert_into_bucket(table, bucket, bucket_misses, evict=evict)
        return [miss for miss in pending if miss.slot < 0 and miss.status != REFUSED]

    def _insert_into_bucket(
        self,
        table: ReferenceHashTable,
        bucket: int,
        bucket_misses: Sequence[tuple[Miss, HashEntry]],
        *,
        evict: bool,
    ) -> None:
        """Insert keys in order into at most half of a bucket's usable slots, rounded up."""
        num_usable = (
            len(self._evictable_entries(table, bucket))
            if evict
            else table.bucket(bucket).count(None)
        )
        max_inserts = (num_usable + 1) // 2
        for miss in bucket_misses:
            if max_inserts and (self._replace if evict else self._fill)(table, bucket, miss):
                max_inserts -= 1

    def _first_score(self, miss: Miss, batch_score: int) -> int:
        """Return the score of an entry when it is inserted; 0 if the order uses none."""
        if self.order in ("lfu", "lru_lfu"):
            return miss.total
        return batch_score if self.order == "assigned" else 0

    def _choose(self, table: ReferenceHashTable, entry: HashEntry) -> tuple[int, bool] | None:
        """Return a missing key's bucket and whether it must evict there; None if it is refused."""
        first_bucket, second_bucket = table.addresses(entry.key)
        free = [table.bucket(number).count(None) for number in (first_bucket, second_bucket)]
        if any(free):
            return (
                first_bucket if free[0] > PREFER_FIRST or free[0] >= free[1] else second_bucket
            ), False
        candidates = [
            (self._candidate(table, number), number) for number in (first_bucket, second_bucket)
        ]
        ranked = [
            (self._rank(candidate), number)
            for candidate, number in candidates
            if candidate is not None
        ]
        if not ranked or self._is_refused(entry, min(ranked)[0]):
            return None
        return min(ranked)[1], True

    def _fill(
        self, table: ReferenceHashTable, number: int, miss_and_entry: tuple[Miss, HashEntry]
    ) -> bool:
        """Insert the new key into the lowest empty slot of a bucket; return False if it is full."""
        miss, entry = miss_and_entry
        if None not in table.bucket(number):
            return False
        miss.slot, miss.status = number * SLOTS + table.bucket(number).index(None), NEW
        table.slots[miss.slot] = entry
        return True

    def _replace(
        self, table: ReferenceHashTable, number: int, miss_and_entry: tuple[Miss, HashEntry]
    ) -> bool:
        """Replace an entry of the bucket by the new key; return False if it may evict none.

        The key then chooses again, and may be refused.
        """
        miss, entry = miss_and_entry
        candidate = self._candidate(table, number)
        if candidate is None or self._is_refused(entry, self._rank(candidate)):
            return False
        miss.slot, miss.status = number * SLOTS + table.bucket(number).index(candidate), EVICTING
        miss.evicted, table.slots[miss.slot] = candidate, entry
        return True

    def _rank(self, entry: HashEntry) -> tuple[int, int, int]:
        """Return the sort key of entries: the smallest is evicted first."""
        scored = self.order in ("lfu", "lru_lfu", "assigned")
        stamp = 0 if self.order == "lfu" else entry.stamp
        return entry.score if scored else 0, stamp, entry.key

    def _candidate(self, table: ReferenceHashTable, number: int) -> HashEntry | None:
        """Return a bucket's eviction candidate: its lowest entry that this batch did not use."""
        return min(self._evictable_entries(table, number), key=self._rank, default=None)

    def _evictable_entries(self, table: ReferenceHashTable, number: int) -> list[HashEntry]:
        """Return the entries of a bucket that may be evicted."""
        if self.order == "none":
            return []
        return [e for e in table.bucket(number) if e is not None and e.stamp < self.clock]

    def _is_refused(self, entry: HashEntry, candidate: tuple[int, int, int]) -> bool:
        """Return whether a new key ranks too low to evict an entry of rank `candidate`."""
        return self.insert_policy == "competes" and self._rank(entry) < candidate

    # Without a batch of training

    def erase(self, batch: Batch) -> list[int]:
        """Remove keys; return the slot that each position freed, -1 if its key was not there."""
        freed = []
        for t, key in batch:
            freed.append(self.tables[t].find(key))
            if freed[-1] >= 0:
                self.tables[t].remove(freed[-1], "erased")
        return freed

    def expire(self, t: int, window: tuple[int, int], before: int) -> list[int]:
        """Remove keys whose stamp is below `before` from a window, (first bucket, num_buckets).

        Returns the slots of the table that became free, ascending.
        """
        table, (first_bucket, num_buckets) = self.tables[t], window
        end_bucket = min(first_bucket + num_buckets, table.buckets)
        slots = range(first_bucket * SLOTS, end_bucket * SLOTS)
        entries = [(slot, table.slots[slot]) for slot in slots]
        freed = [slot for slot, entry in entries if entry is not None and entry.stamp < before]
        for slot in freed:
            table.remove(slot, "expired")
        return freed

    def shrink(self, t: int, buckets: int) -> list[HashEntry]:
        """Remove the buckets of a table from number `buckets` on; return the dropped entries.

        Of the entries of the removed buckets, the lowest-ranked ones are dropped, in proportion to
        the entries of the table that have no slot left. The others are inserted, the highest-ranked
        first, like the missing keys of a batch that evict others; their stamps and scores stay.
        Entries that these evict, or that find no slot, are dropped too. Dropped entries count as
        evicted. The table must have at least `buckets` buckets; not checked.
        """
        table, size, counters = self.tables[t], self.tables[t].size, dict(self.tables[t].counters)
        displaced = [entry for entry in table.slots[buckets * SLOTS :] if entry is not None]
        displaced.sort(key=self._rank, reverse=True)
        num_lacking = max(0, size - buckets * SLOTS)
        num_inserted = len(displaced) - num_lacking * len(displaced) // max(1, size)
        table.slots[buckets * SLOTS :] = [None] * ((table.max_buckets - buckets) * SLOTS)
        table.buckets = buckets
        misses = [Miss(entry.key, [], total=entry.score) for entry in displaced[:num_inserted]]
        policy, self.insert_policy = self.insert_policy, "wins"
        of_tables: list[list[Miss]] = [[] for _ in self.tables]
        of_tables[t] = misses
        self.insert(of_tables, [0] * len(self.tables))
        self.insert_policy = policy
        dropped = displaced[num_inserted:]
        for miss, entry in zip(misses, displaced, strict=False):
            if miss.slot < 0:
                dropped.append(entry)
                continue
            table.slots[miss.slot] = entry
            if miss.evicted is not None:
                dropped.append(miss.evicted)
        table.counters = {**counters, "evicted": counters["evicted"] + len(dropped)}
        return dropped

    # As tensors

    def index(self) -> list[Tensor]:
        """Return `[tags, entries, tables, clock, counters]`; words of empty slots are 0."""
        words = 3 if self.order in ("lfu", "lru_lfu", "assigned") else 2
        # Arrays, because a tensor of a long list takes ten times as long.
        tags, entries = array("B"), array("q")
        for table in self.tables:
            for e in table.slots:
                tags.append(0 if e is None else tag_of(e.key, table.hash_key))
                entries.extend((0, 0, 0) if e is None else (e.key, e.stamp, e.score))
        rows, first_bucket = [], 0
        for x in self.tables:
            rows.append((first_bucket, x.buckets, x.max_buckets, x.size, x.load, x.hash_key))
            first_bucket += x.max_buckets
        return [
            torch.frombuffer(tags, dtype=torch.uint8),
            torch.frombuffer(entries, dtype=torch.int64).view(-1, 3)[:, :words].contiguous(),
            torch.tensor(rows).view(-1, 6),
            torch.tensor([self.clock]),
            torch.tensor([list(x.counters.values()) for x in self.tables]).view(-1, len(COUNTERS)),
        ]

    @classmethod
    def of(cls, index: Sequence[Tensor], order: str, insert_policy: str = "wins") -> "HashModel":
        """Construct the model from the five tensors that `index` returns."""
        tags, entries, rows, clock, counters = (tensor.tolist() for tensor in index)
        tables = []
        for (first_bucket, buckets, max_buckets, _, load, hash_key), counts in zip(
            rows, counters, strict=True
        ):
            window = slice(first_bucket * SLOTS, (first_bucket + max_buckets) * SLOTS)
            slots = [
                HashEntry(*words) if tag else None
                for tag, words in zip(tags[window], entries[window], strict=True)
            ]
            by_name = dict(zip(COUNTERS, counts, strict=True))
            tables.append(ReferenceHashTable(buckets, max_buckets, load, hash_key, slots, by_name))
        model = cls(tables, order, insert_policy)
        (model.clock,) = clock
        return model


# Features with rules of their own


def is_admitted(uses: int, features: Iterable[int], thresholds: Sequence[int]) -> bool:
    """Return whether a missing key with `uses` so far is admitted.

    It needs the lowest of the `thresholds` of the `features` that use it in the batch.
    """
    return uses >= min(thresholds[feature] for feature in features)


def is_alive(last_uses: Mapping[int, int], ttls: Sequence[int | None], clock: int) -> bool:
    """Return whether a key has not expired: some feature used it within its ttl, None for ever.

    `last_uses` is the clock of the last use by feature; features that never used the key are not in
    it. `ttls`, by feature, are in batches.
    """
    return any(
        ttls[feature] is None or clock - used <= ttls[feature]  # type: ignore[operator]
        for feature, used in last_uses.items()
    )


def positions(ids: Tensor, starts: Tensor, segment_tables: Tensor) -> list[tuple[int, int]]:
    """Return the batch of `emblib.ops.hash.Keys`: segment f is `ids[starts[f]:starts[f + 1]]`."""
    lengths = starts.diff()
    tables = segment_tables.repeat_interleave(lengths)
    return list(zip(tables.tolist(), ids.tolist(), strict=True))


def fill_slots(slots: Tensor, inserted: Tensor, groups: Tensor) -> Tensor:
    """Return the slot of every position: `slots` for hits, `inserted[groups]` for misses.

    Also used for statuses.
    """
    filled = slots.clone()
    filled[groups >= 0] = inserted[groups[groups >= 0].long()]
    return filled


def read_rows(values: Tensor, slots: Tensor, default_value: float) -> Tensor:
    """Return the row of each slot, `[n, dim]`; for slot -1 all values are `default_value`."""
    rows = torch.full((slots.numel(), values.size(1)), default_value, dtype=values.dtype)
    rows[slots >= 0] = values[slots[slots >= 0]]
    return rows


def start_rows_(
    values: Tensor,
    slots: Tensor,
    groups: Tensor,
    first: Tensor,
    starting: Tensor,
    default_value: float,
) -> Tensor:
    """Write the rows of missing keys, each the first of its `starting` rows.

    Returns the rows of all positions, `[L, dim]`.

    Args:
        values: `[slots, dim]`, changed in place.
        slots: int64 `[L]`, the slot of each position, -1 for none.
        groups: int `[L]`, the miss of each position, -1 for a hit.
        first: int `[misses]`, first position of each miss.
        starting: `[L, dim]`, the row that a position would start its key with.
        default_value: value of the rows of slot -1.
    """
    for position, group in enumerate(groups.tolist()):
        if group >= 0 and int(slots[position]) >= 0 and int(first[group]) == position:
            values[slots[position]] = starting[position]
    return read_rows(values, slots, default_value)


def write_rows_(values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows to slots (-1: none), in order: the last row of a slot wins."""
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            values[slot] = row


def add_rows_(values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Add rows to the rows at slots (-1: none), in order, each sum in the dtype of `values`."""
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            values[slot] += row


def evicted_rows(
    values: Sequence[Tensor], slots: Tensor, status: Tensor, evicted: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Return keys, rows, stamps and scores of the evicted keys, in the order of the misses.

    `evicted` is int64 `[misses, 3]`: key, stamp and score. The rows are a list, one per `values`.
    """
    is_evicting = status == EVICTING
    keys, stamps, scores = evicted[is_evicting].unbind(1)
    return keys, [matrix[slots[is_evicting]] for matrix in values], stamps, scores


_MASK = 0xFFFFFFFF
_KEY_MODULUS = 100_000  # of `emblib.init.KeyModulo`


def values(rule: Sequence[float], seed: int, stream: int, key: int, dim: int) -> Tensor:
    """Return the initial row of a key, float64 `[dim]`.

    Args:
        rule: numbers of the distribution, see `InitialRuleColumn`.
        seed: seed of the random numbers.
        stream: number of the table and row buffer, see `InitialLayoutColumn`.
        key: key of any sign; its 64 bits count.
        dim: number of values.
    """
    kind, base, scale, first_share, span, low, high = rule
    if kind == InitialKind.CONSTANT:
        return torch.full((dim,), base, dtype=torch.float64)
    if kind == InitialKind.KEY_MODULO:
        return torch.full((dim,), key % 2**64 % _KEY_MODULUS, dtype=torch.float64)
    blocks = torch.arange(-(-dim // 4))
    words = [key & _MASK, key >> 32 & _MASK, stream & _MASK]
    counters = torch.stack([*(torch.full_like(blocks, word) for word in words), blocks], dim=1)
    random = philox_counters(seed, counters).flatten()[:dim]
    if kind == InitialKind.UNIFORM:
        return base + scale * ((random >> 8).double() * 2.0**-24)
    # A truncated normal distribution, by its inverse: a share between the shares of its two ends.
    share = first_share + span * ((random.double() + 0.5) * 2.0**-32)
    return (base + scale * torch.special.ndtri(share)).clamp(low, high)


def initial_rows_(
    row_buffers: Sequence[Tensor],
    layout: Tensor,
    rules: Tensor,
    ids: Tensor,
    first: Tensor,
    offsets: Tensor,
    slots: Tensor,
    seed: int,
) -> None:
    """Write the rows of missing keys that got a slot, in all row buffers.

    Args:
        row_buffers: flat weights and states of all tables, changed in place.
        layout: int64 `[T, P, 5]`, see `InitialLayoutColumn`.
        rules: float64 `[T, P, 7]`, see `InitialRuleColumn`.
        ids: int64 `[L]`, the keys of the batch.
        first: int `[misses]`, first position of each miss, table after table.
        offsets: int `[T + 1]`, the misses of each table.
        slots: int64 `[misses]`, -1 for none; slots from ROWS of the layout on are not written.
        seed: seed of the random numbers.
    """
    for table in range(offsets.numel() - 1):
        for miss in range(int(offsets[table]), int(offsets[table + 1])):
            slot, key = int(slots[miss]), int(ids[first[miss]])
            for buffer, buffer_layout, rule in zip(
                row_buffers, layout[table], rules[table], strict=True
            ):
                offset, stride, rows, dim, stream = buffer_layout.tolist()
                if 0 <= slot < rows:
                    begin = offset + slot * stride
                    row = values(rule.tolist(), seed, stream, key, dim)
                    buffer[begin : begin + dim] = row.float().to(buffer.dtype)
