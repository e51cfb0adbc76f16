"""The hash table of dynamic tables as lists of slots, key by key: the definition of correct.

`HashModel` is the state of all tables of an index. A training step calls `touch` and `misses` with
a batch, a list of (table, key) by position, then `grow` and `insert` with its misses; `find`,
`erase`, `expire` and `shrink` are separate calls. `index` returns the same state as the tensors of
`emblib.ops.hash`, whose docstring defines terms; `HashModel.of` reads them. Keys, stamps and scores
are signed: an unsigned id is the int64 of the same bits. `initial_row` defines the row of a new
key, `HashModel.count` and `sketch_count_` the counts of an admission. The kernels of `csrc/hash`
share no code and no data structure with this file.

The rules:

- a key is in one of its two buckets (`addresses`), of 32 slots each; a table with more keys gets
  more buckets by splitting some (`wanted_buckets`)
- entries rank by stamp and key ("lru"), by score and key ("lfu"), or by score, stamp and key
  ("lru_lfu", "assigned"); the lowest-ranked one is evicted. An entry that the current batch used is
  not evicted, and "none" evicts nothing
- missing keys that are admitted choose their bucket in rounds (`max_choosers`), all by the state at
  the beginning of the round. A key chooses its first bucket if that has more than 16 free slots, or
  no fewer than the second bucket; otherwise the second one. If both buckets are full, it chooses
  the bucket whose lowest evictable entry ranks lower
- a bucket then serves the keys that chose it, in order. It stops after half of its free slots, or
  of its evictable entries, rounded up; the remaining keys choose again in the next round
- a key whose buckets are full is refused if they have no evictable entry. With the policy
  "competes" it is also refused if it ranks below the entry that it would evict

Details:

- a slot is empty if its tag is 0; its `entries` are then unspecified
- if one of two full buckets has no evictable entry, the other bucket evicts
- the score of a new key is its number of uses ("lfu", "lru_lfu"), the score of its table
  ("assigned"), or else 0
- a present key is a hit, admitted or not: admission concerns missing keys
- moving a row does not change the bytes of its old slot
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from emblib.columns import InitialKind
from emblib.reference.random import mix, philox_counters

SLOTS_PER_BUCKET = 32
MAX_COMPARED_FREE = 16  # a first bucket with more free slots than this is chosen
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


def max_choosers(buckets: int, round_number: int) -> int:
    """Return how many missing keys of a table may have chosen a bucket after round `round_number`.

    Rounds count from 0. Few suffice, because each multiplies the number by CHOOSERS_GROWTH.
    """
    return FIRST_CHOOSERS * buckets * CHOOSERS_GROWTH**round_number


def wanted_buckets(num_keys: int, num_buckets: int, max_buckets: int, load_1024ths: int) -> int:
    """Return the number of buckets that `num_keys` keys need: from `num_buckets` to `max_buckets`.

    `load_1024ths` is the number of keys per 1024 slots above which a table grows. A level is 2^n
    buckets. While only some buckets of a level are split, an unsplit bucket gets twice the keys of
    a split one. To pass through this state quickly, all buckets of a level are split while the
    number of keys grows by a quarter from the load on. Then none is split until the next level is
    as full. The last level ends at `max_buckets`.
    """
    keys_1024ths, bucket_keys_1024ths = num_keys * 1024, SLOTS_PER_BUCKET * load_1024ths
    level = 1
    while 4 * level <= max_buckets and 2 * level * bucket_keys_1024ths < keys_1024ths:
        level *= 2
    excess_1024ths = max(0, keys_1024ths - level * bucket_keys_1024ths)
    limit = 2 * level if 4 * level <= max_buckets else max_buckets
    return max(num_buckets, min(limit, level + -(-4 * excess_1024ths // bucket_keys_1024ths)))


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
    num_uses: int = 0  # number of uses in the batch
    admitted: bool = True  # set by the caller before the insertion
    slot: int = -1  # slot in the table; -1 if the key got none
    status: int = NOT_ADMITTED
    evicted: HashEntry | None = None


@dataclass
class ReferenceHashTable:
    """One table: its slots, bucket after bucket, and counters."""

    buckets: int  # number of buckets in use
    max_buckets: int  # number of buckets that it has slots for
    load: int  # keys per 1024 slots above which it grows
    hash_key: int = 0  # selects the hash of its keys
    slots: list[HashEntry | None] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def __post_init__(self) -> None:
        self.slots = self.slots or [None] * (self.max_buckets * SLOTS_PER_BUCKET)

    @property
    def size(self) -> int:
        """Return the number of keys."""
        return sum(entry is not None for entry in self.slots)

    def bucket(self, number: int) -> list[HashEntry | None]:
        """Return the contents of the slots of a bucket, copied."""
        return self.slots[number * SLOTS_PER_BUCKET : (number + 1) * SLOTS_PER_BUCKET]

    def addresses(self, key: int) -> tuple[int, int]:
        """Return the two buckets of a key."""
        return addresses(key, self.buckets, self.hash_key)

    def find(self, key: int) -> int:
        """Return the slot of a key, -1 if it is missing."""
        for number in self.addresses(key):
            for way, entry in enumerate(self.bucket(number)):
                if entry is not None and entry.key == key:
                    return number * SLOTS_PER_BUCKET + way
        return -1

    def remove(self, slot: int, counter: str) -> None:
        """Empty a slot and add 1 to `counter`, a name of `COUNTERS`."""
        self.slots[slot] = None
        self.counters[counter] += 1

    def grow(self, keys: int) -> dict[int, int]:
        """Split buckets for `keys` keys (`wanted_buckets`); return {old: new slot} of moves."""
        old_buckets, self.buckets = (
            self.buckets,
            wanted_buckets(keys, self.buckets, self.max_buckets, self.load),
        )
        new_slots: dict[int, int] = {}
        for slot, entry in enumerate(self.slots[: old_buckets * SLOTS_PER_BUCKET]):
            if entry is None:
                continue
            first_bucket, _ = addresses(entry.key, old_buckets, self.hash_key)
            bucket = self.addresses(entry.key)[0 if first_bucket == slot // SLOTS_PER_BUCKET else 1]
            if bucket != slot // SLOTS_PER_BUCKET:
                new_slots[slot] = bucket * SLOTS_PER_BUCKET + self.bucket(bucket).index(None)
                self.slots[new_slots[slot]], self.slots[slot] = entry, None
        return new_slots


class HashModel:
    """Tables that share a clock: the sequential definition of every op.

    Args:
        tables: tables, which the model changes.
        order: eviction order, one of `ORDERS`.
        insert_policy: treatment of a key that ranks below every entry it could evict: "wins"
            inserts it, "competes" refuses it.
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
        miss_of_key: list[dict[int, Miss]] = [{} for _ in self.tables]
        for position, ((t, key), slot, count) in enumerate(zip(batch, slots, counts, strict=True)):
            if slot < 0:
                miss = miss_of_key[t].setdefault(key, Miss(key, []))
                miss.positions.append(position)
                miss.num_uses = min(miss.num_uses + count, MAX_USES)
        return [list(misses.values()) for misses in miss_of_key]

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
        """Run one round of a table's missing keys; return those left for the next round."""
        misses_of_choice: dict[tuple[int, bool], list[tuple[Miss, HashEntry]]] = {}
        for miss in pending:
            entry = HashEntry(miss.key, self.clock, self._first_score(miss, score))
            choice = self._choose(table, entry)
            if choice is None:
                miss.status = REFUSED
            else:
                misses_of_choice.setdefault(choice, []).append((miss, entry))
        for (bucket, must_evict), bucket_misses in misses_of_choice.items():
            self._insert_into_bucket(table, bucket, bucket_misses, must_evict=must_evict)
        return [miss for miss in pending if miss.slot < 0 and miss.status != REFUSED]

    def _insert_into_bucket(
        self,
        table: ReferenceHashTable,
        bucket: int,
        bucket_misses: Sequence[tuple[Miss, HashEntry]],
        *,
        must_evict: bool,
    ) -> None:
        """Insert keys in order into at most half of a bucket's usable slots, rounded up.

        These are the slots of evictable entries if `must_evict`, else the empty slots.
        """
        num_usable = (
            len(self._evictable_entries(table, bucket))
            if must_evict
            else table.bucket(bucket).count(None)
        )
        insert = self._replace_entry if must_evict else self._fill_slot
        max_inserts = (num_usable + 1) // 2
        for miss in bucket_misses:
            if max_inserts and insert(table, bucket, miss):
                max_inserts -= 1

    def _first_score(self, miss: Miss, batch_score: int) -> int:
        """Return the score of an entry when it is inserted; 0 if the order uses none."""
        if self.order in ("lfu", "lru_lfu"):
            return miss.num_uses
        return batch_score if self.order == "assigned" else 0

    def _choose(self, table: ReferenceHashTable, entry: HashEntry) -> tuple[int, bool] | None:
        """Return a missing key's bucket and whether it must evict there; None if it is refused."""
        first_bucket, second_bucket = table.addresses(entry.key)
        first_free, second_free = (
            table.bucket(number).count(None) for number in (first_bucket, second_bucket)
        )
        if first_free or second_free:
            is_first = first_free > MAX_COMPARED_FREE or first_free >= second_free
            return first_bucket if is_first else second_bucket, False
        candidates = [
            (self._candidate(table, number), number) for number in (first_bucket, second_bucket)
        ]
        ranked_buckets = [
            (self._rank(candidate), number)
            for candidate, number in candidates
            if candidate is not None
        ]
        if not ranked_buckets or self._is_refused(entry, min(ranked_buckets)[0]):
            return None
        return min(ranked_buckets)[1], True

    def _fill_slot(
        self, table: ReferenceHashTable, number: int, miss_and_entry: tuple[Miss, HashEntry]
    ) -> bool:
        """Insert the new key into the lowest empty slot of a bucket; return False if it is full."""
        miss, entry = miss_and_entry
        if None not in table.bucket(number):
            return False
        miss.slot, miss.status = number * SLOTS_PER_BUCKET + table.bucket(number).index(None), NEW
        table.slots[miss.slot] = entry
        return True

    def _replace_entry(
        self, table: ReferenceHashTable, number: int, miss_and_entry: tuple[Miss, HashEntry]
    ) -> bool:
        """Replace the lowest entry of a bucket by the new key; return False if it may evict none.

        In that case the key chooses again in the next round, and may be refused there.
        """
        miss, entry = miss_and_entry
        candidate = self._candidate(table, number)
        if candidate is None or self._is_refused(entry, self._rank(candidate)):
            return False
        miss.slot, miss.status = (
            number * SLOTS_PER_BUCKET + table.bucket(number).index(candidate),
            EVICTING,
        )
        miss.evicted, table.slots[miss.slot] = candidate, entry
        return True

    def _rank(self, entry: HashEntry) -> tuple[int, int, int]:
        """Return the sort key of entries: the smallest is evicted first."""
        has_score = self.order in ("lfu", "lru_lfu", "assigned")
        stamp = 0 if self.order == "lfu" else entry.stamp
        return entry.score if has_score else 0, stamp, entry.key

    def _candidate(self, table: ReferenceHashTable, number: int) -> HashEntry | None:
        """Return a bucket's eviction candidate: its lowest entry that this batch did not use."""
        return min(self._evictable_entries(table, number), key=self._rank, default=None)

    def _evictable_entries(self, table: ReferenceHashTable, number: int) -> list[HashEntry]:
        """Return the entries of a bucket that may be evicted: those that this batch did not use."""
        if self.order == "none":
            return []
        entries = [entry for entry in table.bucket(number) if entry is not None]
        return [entry for entry in entries if entry.stamp < self.clock]

    def _is_refused(self, entry: HashEntry, candidate_rank: tuple[int, int, int]) -> bool:
        """Return whether a new key ranks too low to evict an entry of rank `candidate_rank`."""
        return self.insert_policy == "competes" and self._rank(entry) < candidate_rank

    def count(self, batch: Batch, uses: Sequence[int]) -> list[int]:
        """Count the keys of a batch, distinct in each table, whose entries have counts as scores.

        Returns the counts so far. The count of a key that gets no slot is lost.
        """
        no_scores = [0] * len(self.tables)
        slots = self.touch(batch, uses, no_scores)
        misses = self.misses(batch, slots, uses)
        self.grow(misses)
        self.insert(misses, no_scores)
        counts = []
        for (t, key), slot, num_uses in zip(batch, slots, uses, strict=True):
            new_slot = self.tables[t].find(key)
            entry = self.tables[t].slots[new_slot] if new_slot >= 0 else None
            earlier_uses = entry.score if entry is not None and slot >= 0 else 0
            counts.append(min(earlier_uses + num_uses, MAX_USES))
            if entry is not None:
                entry.score = counts[-1]
        return counts

    # Changes outside of training batches

    def erase(self, batch: Batch) -> list[int]:
        """Remove keys; return the slot that each position freed, -1 if its key was not there."""
        freed_slots = []
        for t, key in batch:
            freed_slots.append(self.tables[t].find(key))
            if freed_slots[-1] >= 0:
                self.tables[t].remove(freed_slots[-1], "erased")
        return freed_slots

    def expire(self, table_index: int, window: tuple[int, int], before: int) -> list[int]:
        """Remove the keys of some buckets of a table whose stamp is below `before`.

        `window` is (first bucket, number of buckets). Returns the slots of the table that became
        free, ascending.
        """
        table, (first_bucket, num_buckets) = self.tables[table_index], window
        end_bucket = min(first_bucket + num_buckets, table.buckets)
        slots = range(first_bucket * SLOTS_PER_BUCKET, end_bucket * SLOTS_PER_BUCKET)
        entries = [(slot, table.slots[slot]) for slot in slots]
        freed_slots = [
            slot for slot, entry in entries if entry is not None and entry.stamp < before
        ]
        for slot in freed_slots:
            table.remove(slot, "expired")
        return freed_slots

    def shrink(self, table_index: int, buckets: int) -> list[HashEntry]:
        """Remove the buckets of a table from number `buckets` on; return the dropped entries.

        If the table has more entries than the remaining buckets have slots, some entries of the
        removed buckets are dropped, the lowest-ranked first. Their share of these entries is the
        share of all entries that lack a slot. The others are inserted like the missing keys of a
        batch, the highest-ranked first, and may evict entries; their stamps and scores stay.
        Entries that they evict, and entries that find no slot, are dropped too. Dropped entries
        count as evicted. The table must have at least `buckets` buckets; not checked.
        """
        table = self.tables[table_index]
        size, counters = table.size, dict(table.counters)
        displaced = [
            entry for entry in table.slots[buckets * SLOTS_PER_BUCKET :] if entry is not None
        ]
        displaced.sort(key=self._rank, reverse=True)
        num_lacking = max(0, size - buckets * SLOTS_PER_BUCKET)
        num_inserted = len(displaced) - num_lacking * len(displaced) // max(1, size)
        table.slots[buckets * SLOTS_PER_BUCKET :] = [None] * (
            (table.max_buckets - buckets) * SLOTS_PER_BUCKET
        )
        table.buckets = buckets
        misses = [Miss(entry.key, [], num_uses=entry.score) for entry in displaced[:num_inserted]]
        insert_policy, self.insert_policy = self.insert_policy, "wins"
        misses_by_table: list[list[Miss]] = [[] for _ in self.tables]
        misses_by_table[table_index] = misses
        self.insert(misses_by_table, [0] * len(self.tables))
        self.insert_policy = insert_policy
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

    # Conversion to and from tensors

    def index(self, *, has_scores: bool = False) -> list[Tensor]:
        """Return `[tags, entries, tables, clock, counters]`; words of empty slots are 0.

        Entries have a score if the order does, or if `has_scores`.
        """
        num_words = 3 if has_scores or self.order in ("lfu", "lru_lfu", "assigned") else 2
        # Arrays, because a tensor of a long list takes ten times as long.
        tags, entries = array("B"), array("q")
        for table in self.tables:
            for entry in table.slots:
                tags.append(0 if entry is None else tag_of(entry.key, table.hash_key))
                entries.extend(
                    (0, 0, 0) if entry is None else (entry.key, entry.stamp, entry.score)
                )
        rows, first_bucket = [], 0
        for table in self.tables:
            sizes = (table.buckets, table.max_buckets, table.size, table.load)
            rows.append((first_bucket, *sizes, table.hash_key))
            first_bucket += table.max_buckets
        counters = [list(table.counters.values()) for table in self.tables]
        return [
            torch.frombuffer(tags, dtype=torch.uint8),
            torch.frombuffer(entries, dtype=torch.int64).view(-1, 3)[:, :num_words].contiguous(),
            torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 6),
            torch.tensor([self.clock], device="cpu"),
            torch.tensor(counters, dtype=torch.int64, device="cpu").view(-1, len(COUNTERS)),
        ]

    @classmethod
    def of(cls, index: Sequence[Tensor], order: str, insert_policy: str = "wins") -> "HashModel":
        """Construct the model from the five tensors that `index` returns."""
        tags, entries, rows, clock, counters = (tensor.tolist() for tensor in index)
        tables = []
        for (first_bucket, buckets, max_buckets, _, load, hash_key), counts in zip(
            rows, counters, strict=True
        ):
            window = slice(
                first_bucket * SLOTS_PER_BUCKET, (first_bucket + max_buckets) * SLOTS_PER_BUCKET
            )
            slots = [
                HashEntry(*words) if tag else None
                for tag, words in zip(tags[window], entries[window], strict=True)
            ]
            counters_by_name = dict(zip(COUNTERS, counts, strict=True))
            tables.append(
                ReferenceHashTable(buckets, max_buckets, load, hash_key, slots, counters_by_name)
            )
        model = cls(tables, order, insert_policy)
        (model.clock,) = clock
        return model


# Rules of admission, expiry, and the rows of keys


def is_admitted(uses: int, features: Iterable[int], thresholds: Sequence[int]) -> bool:
    """Return whether a missing key with `uses` uses so far is admitted.

    The key needs the lowest of the `thresholds` of the `features` that use it in the batch.
    """
    return uses >= min(thresholds[feature] for feature in features)


def is_alive(last_uses: Mapping[int, int], ttls: Sequence[int | None], clock: int) -> bool:
    """Return whether a key has not expired: at least one feature used it within the feature's ttl.

    `last_uses` has the clock of the last use by each feature that used the key. `ttls`, by feature,
    are in batches; a feature with the ttl None keeps a key alive without limit.
    """
    return any(
        ttls[feature] is None or clock - used <= ttls[feature]  # type: ignore[operator]
        for feature, used in last_uses.items()
    )


def batch_of(ids: Tensor, starts: Tensor, segment_tables: Tensor) -> list[tuple[int, int]]:
    """Return the batch of `emblib.ops.hash.Keys`: segment f is `ids[starts[f]:starts[f + 1]]`."""
    lengths = starts.diff()
    tables = segment_tables.repeat_interleave(lengths)
    return list(zip(tables.tolist(), ids.tolist(), strict=True))


def fill_slots(slots: Tensor, inserted: Tensor, groups: Tensor) -> Tensor:
    """Return the slot, or the status, of every position.

    Position i has `slots[i]` if it hit (`groups[i]` is -1), else `inserted[groups[i]]`.
    """
    filled = slots.clone()
    filled[groups >= 0] = inserted[groups[groups >= 0].long()]
    return filled


def read_rows(values: Tensor, slots: Tensor, default_value: float) -> Tensor:
    """Return the row of each slot, `[n, dim]`; for slot -1 all values are `default_value`."""
    rows = values.new_full((slots.numel(), values.size(1)), default_value)
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
    """Write the initial row of each missing key: the `starting` row of its first position.

    Returns the rows of all positions after that, `[L, dim]`.

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
    """Write rows to slots (-1: none) in order; a later row of a slot overwrites an earlier one."""
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


_UINT32_MASK = 0xFFFFFFFF
_KEY_MODULUS = 100_000  # of `emblib.init.KeyModulo`


def initial_row(rule: Sequence[float], seed: int, stream: int, key: int, dim: int) -> Tensor:
    """Return the initial row of a key, float64 `[dim]` on the CPU.

    Args:
        rule: numbers of the distribution, see `InitialRuleColumn`.
        seed: seed of the random numbers.
        stream: number of the table and row buffer, see `InitialLayoutColumn`.
        key: key of any sign; its 64 bits count.
        dim: number of values.
    """
    kind, base, scale, first_probability, span, low, high = rule
    if kind == InitialKind.CONSTANT:
        return torch.full((dim,), base, dtype=torch.float64, device="cpu")
    if kind == InitialKind.KEY_MODULO:
        value = key % 2**64 % _KEY_MODULUS
        return torch.full((dim,), value, dtype=torch.float64, device="cpu")
    blocks = torch.arange(-(-dim // 4), device="cpu")
    words = [key & _UINT32_MASK, key >> 32 & _UINT32_MASK, stream & _UINT32_MASK]
    counters = torch.stack([*(torch.full_like(blocks, word) for word in words), blocks], dim=1)
    random = philox_counters(seed, counters).flatten()[:dim]
    if kind == InitialKind.UNIFORM:
        return base + scale * ((random >> 8).double() * 2.0**-24)
    # A truncated normal distribution by its inverse: a probability between those of its two ends.
    probability = first_probability + span * ((random.double() + 0.5) * 2.0**-32)
    return (base + scale * torch.special.ndtri(probability)).clamp(low, high)


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
                    row = initial_row(rule.tolist(), seed, stream, key, dim)
                    buffer[begin : begin + dim] = row.float().to(buffer.dtype)


def sketch_count_(
    counters: Tensor, layout: Tensor, keys: Tensor, counts: Tensor, tables: Tensor
) -> Tensor:
    """Count keys in count-min sketches, each by the state before the call, and raise the counters.

    Args:
        counters: int `[n]`, all sketches, changed in place.
        layout: int64 `[T, 5]`, see `SketchColumn`.
        keys: int64 `[L]`, distinct within each table.
        counts: int64 `[L]`, uses of each key, not negative.
        tables: int64 `[L]`, table of each key.

    Returns:
        int64 `[L]`, uses so far, at most the threshold of the table; the threshold if the table has
        no sketch.
    """
    cells_of_keys, new_counts = [], []
    for key, count, table in zip(keys.tolist(), counts.tolist(), tables.tolist(), strict=True):
        begin, width, depth, threshold, hash_key = layout[table].tolist()
        bits = mix((key ^ hash_key) % 2**64)
        low, high = bits % 2**31, bits >> 33 | 1
        columns = [(low + row * high) % 2**31 * width >> 31 for row in range(depth)]
        cells = [begin + row * width + column for row, column in enumerate(columns)]
        seen = min([threshold, *counters[cells].tolist()])
        cells_of_keys.append(cells)
        new_counts.append(min(threshold, seen + count))
    for cells, count in zip(cells_of_keys, new_counts, strict=True):
        for cell in cells:
            counters[cell] = max(int(counters[cell]), count)
    return torch.tensor(new_counts, dtype=torch.int64, device="cpu")
