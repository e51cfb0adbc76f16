"""The index of dynamic tables: a hash table of T tables, stored in five or six tensors.

`index` is a list of
- `tags` uint8 `[S]`: 0 for an empty slot, else 8 bits of a hash of its key. 32 slots are a bucket
- `entries` int64 `[S, 2]` or `[S, 3]`: key, stamp (the clock at its last use) and, for orders other
  than "none" and "lru", score
- `tables` int64 `[T, 6]`: see `emblib.columns.HashTableColumn`
- `clock` int64 `[1]`: the number of training batches so far
- `counters` int64 `[T, 8]`: `COUNTERS`
- `queues` int64 `[S / 32, 8]`, on the CPU, optional: an earlier eviction order of each bucket. It
  makes evictions faster and changes no result. Zeros are always valid: write zeros before you write
  tags, stamps or scores, or set the clock back

A batch is `ids` int64 `[L]`, any 64 bits each, in segments: `ids[starts[f] : starts[f + 1]]` are
keys of table `tables[f]`; `starts` int64 `[F + 1]`, `tables` int64 `[F]`. On the CPU segments must
cover all ids; on a GPU ops ignore ids before the first segment. A slot is an int64, counted from
the first bucket of its table, -1 for none; the row of a key has the number of its slot.

A key may be in either of two buckets. A full bucket evicts its least entry in `order`: by stamp and
key ("lru"), by score and key ("lfu"), or by score, stamp and key ("lru_lfu", "assigned"); with
"none" it evicts nothing. Scores are counts of uses ("lfu", "lru_lfu"; at most 2^63 - 1) or set by
the caller ("assigned"). A batch does not evict its own keys. With `insert_policy` "wins" a new key
evicts the least entry; with "competes" it is refused if it would rank below every entry that it
could evict. A key that finds no entry to evict is refused. The ops take the codes of orders and
policies in `emblib.ops.codes`.

A training step is `touch_`, which finds and stamps the keys that hit and lists the distinct missing
keys (`Misses`); `grow_`, which splits as many buckets as `wanted_buckets` demands for them; and
`insert_`, which inserts them. With `slots` and `groups` of the batch, `insert_` also returns slot
and status of every position; a position that missed gets the slot and status of its miss.

The ops of the index follow; optional arguments may be None. All tensors must be contiguous and on
one device. Wrong input raises RuntimeError before anything changes; on a GPU the contents of
tensors are not checked.

- `find(index, *batch)` returns the slot of every position, int64 `[L]`
- `find_batch(index, features, ids, offsets, tables, fallback)`, on the CPU only, checks the offsets
  of a batch, too. `features` and `offsets` are those of `emblib.ops.tbe`, `tables` int64 `[F]` is
  the table of each feature. `fallback` int64 `[T, 2]`, or None, has the first fallback row of each
  table and the number of them: missing keys get one of these in place of -1, by the range of the
  key (`emblib.dynamic.keys.range_indices`). Returns offsets (int32), starts and slots of the batch;
  an empty list if there is no bag or if offsets are invalid
- `touch_(index, *batch, counts, batch_scores, order)` also records the uses: `counts` int64 `[L]`
  are the uses of each position, None for one each; `batch_scores` int64 `[T]` is the score that
  order "assigned" gives keys of a table; other orders ignore it. Returns the slots, then the fields
  of `Misses`
- `grow_(index, row_buffers, row_layout, *batch, slots, offsets, admitted)` grows tables for their
  misses, moves keys and rows of buckets that are split, and corrects `slots` of the batch in place.
  `row_layout` int64 `[T, P, 2]` has for each table and buffer the byte at which row 0 begins, and
  the bytes per row; `admitted` bool `[L]` says for each miss whether it counts, None counts all
- `insert_(index, ids, first, totals, offsets, admitted, batch_scores, order, insert_policy, slots,
  groups)` inserts misses: `ids` of the batch and the fields of its `Misses`; `totals` are their
  `counts`. Returns the fields of `InsertResult`, then slot and status by position, which are empty
  if `slots` and `groups` are None
- `touch_batch_(index, features, ids, offsets, tables, batch_scores, order, thresholds)`, on the CPU
  only, touches the keys of a training batch before `insert_batch_`, for callers that decide which
  keys they admit. Returns the slots of its distinct keys, table by table in the order of their
  first positions, int64 `[K]`, -1 for a missing key; then key, number of uses and table of each
  missing key in this order, int64 `[m]`; and, if `thresholds` int64 `[F]` are not None, the lowest
  threshold of the features that use it. Returns an empty list, and changes nothing, where
  `insert_batch_` does
- `insert_batch_(index, row_buffers, features, ids, offsets, tables, batch_scores, order,
  insert_policy, layout, rules, seed, fallback, touched, admitted, returns_misses)`, on the CPU
  only, is a training step in one call: it touches and inserts the keys of a batch, and writes their
  initial rows as `initial_rows_` does. `touched` is the first result of `touch_batch_` if that has
  touched the keys, else None, and `admitted` bool `[m]` whether each missing key is inserted; None
  inserts all. Returns the results of `find_batch`, with -1 also in tables with fallback rows, then
  the fields of `emblib.ops.tbe.Groups`, whose rows do not ascend here, and whose entries after the
  last group are unspecified. If keys were missing, it also returns the status of every position;
  unless `fallback` is None, the slots with the fallback rows of keys that got none; and, if
  `returns_misses`, the fields of `Misses` and `InsertResult` without entries past the last miss.
  Without `touched` it returns an empty list, and changes nothing, where `find_batch` does, if a
  table may have to grow, or if a table has too many lookups for one thread
- `erase_(index, *batch)` removes keys and returns by position the slot that it emptied, -1 if the
  key is missing or an earlier position has removed it
- `expire_(index, table, first_bucket, num_buckets, before)` removes the keys of these buckets that
  were last used before clock `before`. Returns which slots it freed, bool `[num_buckets * 32]`

The misses of a table are inserted in rounds. In round r (from 0) those of the first 8 * 4^r misses
per bucket choose a bucket that have no result yet. A miss chooses by the state at the beginning of
the round: its first bucket if that has more than 16 free slots, or no fewer than the second one;
else the second one. If both are full, it chooses the bucket with the lesser least entry. A bucket
then serves the misses that chose it, in order. It stops when half of its free slots, rounded up,
are taken; without free slots, half of its entries that may be evicted. The other misses choose
again in the next round. This limit balances the buckets, since misses of one round do not see each
other.

`initial_rows_(row_buffers, layout, rules, ids, first, offsets, slots, seed)` writes the initial
values of row `slots[i]` of each row buffer for miss i, unless `slots[i]` is -1. Misses are ordered
as `touch_` returns them: the key of miss i is `ids[first[i]]`, and table t has the misses
`[offsets[t], offsets[t + 1])`.

- `row_buffers`: float32 | float16 | bfloat16, flat: weights and states of all tables
- `layout` int64 `[T, P, 5]`: per table and buffer offset, stride (elements), rows, dim, stream
- `rules` float64 `[T, P, 7]`: parameters of the initial values, see `rule_of`

A value depends only on seed, stream, rule, key and element.

The next ops read and write rows by slot: `values` is `[slots, dim]` with contiguous rows, and slots
outside of it, such as -1, mean no row.

- `find_rows(index, *batch, values, default_value)` finds keys and reads their rows; missing keys
  read the default value. Returns the rows and which keys were found. The rows of table t begin with
  that of its first slot
- `read_rows(values, slots, default_value)` reads rows
- `start_rows_(values, slots, groups, first, starting, default_value, returns_rows)` writes the rows
  of the new keys of a batch, each the `starting` row of its first position, and returns the rows of
  all positions (none if not `returns_rows`)
- `write_rows_(values, slots, rows)` writes rows; of several rows for a slot the last one remains
- `add_rows_(values, slots, segments, permutation, count, rows)` adds rows to those in slots, one
  after the other in the order of positions, and rounds each sum. Its second to fifth argument are
  the results of `emblib.ops.primitives.group` for the slots of positions
- `evicted_rows(values, slots, status, evicted)` gathers keys, rows, stamps and scores of evicted
  keys in the order of the misses, and the number of evicted keys; entries after it are unspecified.
  `values` is a list, e.g. of weights and states, and so are the rows. Its other arguments are those
  of `InsertResult`. It must be called before the rows of new keys are written

The last two ops count the missing keys of an admission, on the CPU only. `keys` int64 `[L]` are
distinct within their table in `tables` int64 `[L]`; `counts` int64 `[L]` are their uses.

`hash_count_(index, keys, counts, tables)` counts in an index whose entries have scores, the counts,
but are evicted in the order "lru"; it advances the clock. Keys of a negative table are not counted.
Returns a list with the count of each key so far, int64 `[L]`: 0 without a table, and the uses of
this call alone for a key that was not in the index. Returns an empty list, and changes nothing, if
a table would have to grow.

`sketch_count_(counters, layout, keys, counts, tables)` counts in count-min sketches. `counters`
uint8 | int32 | int64 `[n]` are all sketches, and `layout` int64 `[T, 5]` says where each is
(`emblib.columns.SketchColumn`). Returns the uses of each key so far, int64 `[L]`, at most the
threshold of its table.

Every op is deterministic: the same bytes on any number of threads, on any device. The definition is
`emblib.reference.hash`. Sources: linear hashing (Litwin, 1980), the power of two choices (Azar et
al., 1994), tags as in F14 and SwissTable.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.columns import HashCounter, HashTableColumn, InitialKind, InsertStatus
from emblib.init import Constant, Initializer, KeyModulo, Normal, Uniform
from emblib.ops import codes
from emblib.specs import DynamicSpec

SLOTS_PER_BUCKET = 32
LOAD_UNIT = 1024  # slots: a load is a number of keys per 1024 slots
QUEUE_WORDS = 8  # int64 words of `queues` per bucket
_WORD_BYTES = 8
TABLE_FIELDS = tuple(column.name.lower() for column in HashTableColumn)
COUNTERS = tuple(column.name.lower() for column in HashCounter)
MAX_USES = 2**63 - 1  # the counter of uses of a key saturates here
ORDERS = tuple(codes.HASH_ORDER)
SCORED_ORDERS = ("lfu", "lru_lfu", "assigned")  # orders whose entries have a score


def bytes_per_slot(order: str, device: str) -> int:
    """Return the bytes of a tag, an entry and, on the CPU, the slot's share of a queue.

    `order` is one of `ORDERS`, `device` "cpu" or "cuda".
    """
    tag_bytes, entry_words = 1, 3 if order in SCORED_ORDERS else 2
    queue_bytes = _WORD_BYTES * QUEUE_WORDS // SLOTS_PER_BUCKET if device == "cpu" else 0
    return tag_bytes + _WORD_BYTES * entry_words + queue_bytes


class Keys(NamedTuple):
    """A batch of keys; the module docstring explains segments.

    Attributes:
        ids: int64 `[L]`, keys of all segments.
        starts: int64 `[F + 1]`, first key of each segment, then L.
        tables: int64 `[F]`, table of each segment.
    """

    ids: Tensor
    starts: Tensor
    tables: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor, table: int = 0) -> "Keys":
        """Make a batch of ids, int64 `[L]`, that all belong to one table."""
        n = ids.numel()
        # 0 and n by one kernel: the host would wait for a copy.
        starts = torch.arange(0, n + 1, n, device=ids.device) if n else ids.new_zeros(2)
        tables = starts[:1] if table == 0 else torch.full_like(starts[:1], table)
        return cls(ids.contiguous(), starts, tables)


def segments_of(keys: Keys) -> Tensor:
    """Return the segment of each position, int64 `[L]`; the nearest one of positions in none."""
    positions = torch.arange(keys.ids.numel(), device=keys.ids.device)
    segments = torch.searchsorted(keys.starts[1:], positions, right=True)
    return segments.clamp_(max=max(keys.tables.numel() - 1, 0))


def tables_of(keys: Keys) -> Tensor:
    """Return the table of each position, int64 `[L]`; see `segments_of`."""
    return keys.tables[segments_of(keys)]


class Misses(NamedTuple):
    """The distinct missing keys of a batch, ordered by table and first position.

    Entries of `first` and `counts` past `offsets[T]` are 0.

    Attributes:
        first: int64 `[L]`, the first position of each miss in `ids`.
        groups: int32 `[L]`: for every position the number of its miss, -1 for a hit.
        counts: int64 `[L]`, the number of uses of each miss.
        offsets: int64 `[T + 1]`: table t has the misses `[offsets[t], offsets[t + 1])`.
    """

    first: Tensor
    groups: Tensor
    counts: Tensor
    offsets: Tensor


class InsertResult(NamedTuple):
    """The result of inserting the misses of a batch; entries past the last miss are -1 and 0.

    Attributes:
        slots: int64 `[L]`, -1 where a key was not inserted.
        status: uint8 `[L]`: `NEW`, `EVICTING` (took the slot of an evicted key), `REFUSED` or
            `NOT_ADMITTED`; after a backing store has moved rows also `HIT`, for a row of the store.
        evicted: int64 `[L, 3]`: key, stamp and score of the evicted entry; unspecified where the
            status is not `EVICTING`.
    """

    slots: Tensor
    status: Tensor
    evicted: Tensor


class InsertedBatch(NamedTuple):
    """The slots of a batch after its insertion.

    Attributes:
        slots: int64 `[L]`, -1 for keys that were not inserted; with a backing store these have
            overflow rows.
        misses: the keys that were not in their table before; None if `insert_batch_` inserted the
            batch, or, on the CPU, if all keys hit.
        result: slots and status of the misses; None if `misses` is.
        status: uint8 `[L]`, status of the key at each position; None if all hit, or if only
            `result` has it. A backing store may change `result` later, but not this.
    """

    slots: Tensor
    misses: Misses | None = None
    result: InsertResult | None = None
    status: Tensor | None = None


MISS, HIT, NEW, EVICTING, REFUSED, NOT_ADMITTED, STORED = map(int, InsertStatus)

hash_find = torch.ops.emblib.hash_find.default
hash_find_batch = torch.ops.emblib.hash_find_batch.default  # on the CPU only
hash_touch_ = torch.ops.emblib.hash_touch_.default
hash_touch_batch_ = torch.ops.emblib.hash_touch_batch_.default  # on the CPU only
hash_grow_ = torch.ops.emblib.hash_grow_.default
hash_insert_ = torch.ops.emblib.hash_insert_.default
hash_insert_batch_ = torch.ops.emblib.hash_insert_batch_.default  # on the CPU only
hash_erase_ = torch.ops.emblib.hash_erase_.default
hash_expire_ = torch.ops.emblib.hash_expire_.default
hash_find_rows = torch.ops.emblib.hash_find_rows.default
hash_read_rows = torch.ops.emblib.hash_read_rows.default
hash_start_rows_ = torch.ops.emblib.hash_start_rows_.default
hash_write_rows_ = torch.ops.emblib.hash_write_rows_.default
hash_add_rows_ = torch.ops.emblib.hash_add_rows_.default
hash_evicted_rows = torch.ops.emblib.hash_evicted_rows.default
hash_count_ = torch.ops.emblib.hash_count_.default  # on the CPU only
sketch_count_ = torch.ops.emblib.sketch_count_.default  # on the CPU only


def wanted_buckets(num_keys: int, num_buckets: int, max_buckets: int, load_1024ths: int) -> int:
    """Return the number of buckets that `hash_grow_` gives a table for this many keys.

    A level of 2^n buckets is split while the number of keys grows by a quarter: from the number
    that fills the level to `load_1024ths` on, to 5/4 of it.

    Args:
        num_keys: number of keys.
        num_buckets: number of buckets now, which never shrinks.
        max_buckets: number of buckets that the table has memory for.
        load_1024ths: load at which the split of a level begins, in keys per 1024 slots (MAX_LOAD).
    """
    # Keys are counted in 1024ths, as the load is.
    keys_1024ths, bucket_keys_1024ths = num_keys * LOAD_UNIT, SLOTS_PER_BUCKET * load_1024ths
    level = 1
    while 4 * level <= max_buckets and 2 * level * bucket_keys_1024ths < keys_1024ths:
        level *= 2
    excess_1024ths = max(0, keys_1024ths - level * bucket_keys_1024ths)
    limit = 2 * level if 4 * level <= max_buckets else max_buckets
    return max(num_buckets, min(limit, level + -(-4 * excess_1024ths // bucket_keys_1024ths)))


@torch.library.register_fake("emblib::hash_find")
def _(index: list[Tensor], ids: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("emblib::hash_find_batch")
def _(
    index: list[Tensor],
    features: Tensor,
    ids: Tensor,
    offsets: Tensor,
    tables: Tensor,
    fallback: Tensor | None,
) -> list[Tensor]:
    int32_offsets = torch.empty_like(offsets, dtype=torch.int32)
    return [int32_offsets, ids.new_empty(features.shape[0] + 1), torch.empty_like(ids)]


@torch.library.register_fake("emblib::hash_touch_")
def _(
    index: list[Tensor], ids: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(ids),
        torch.empty_like(ids),
        torch.empty_like(ids, dtype=torch.int32),
        torch.empty_like(ids),
        ids.new_empty(index[2].size(0) + 1),
    )


@torch.library.register_fake("emblib::hash_insert_")
def _(
    index: list[Tensor],
    ids: Tensor,
    first: Tensor,
    totals: Tensor,
    offsets: Tensor,
    admitted: Tensor | None,
    batch_scores: Tensor | None,
    order: int,
    insert_policy: int,
    slots: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    positions = ids.new_empty(0 if slots is None else ids.numel())
    return (
        torch.empty_like(ids),
        torch.empty_like(ids, dtype=torch.uint8),
        ids.new_empty((ids.numel(), 3)),
        positions,
        torch.empty_like(positions, dtype=torch.uint8),
    )


@torch.library.register_fake("emblib::hash_touch_batch_")
def _(index: list[Tensor], features: Tensor, ids: Tensor, *rest: Any) -> list[Tensor]:
    context = torch.library.get_ctx()
    num_keys, num_missing = context.new_dynamic_size(), context.new_dynamic_size()
    return [ids.new_empty(num_keys), *(ids.new_empty(num_missing) for _ in range(3))]


@torch.library.register_fake("emblib::hash_insert_batch_")
def _(
    index: list[Tensor],
    row_buffers: list[Tensor],
    features: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *rest: Any,
) -> list[Tensor]:
    def ints(count: int) -> Tensor:
        return ids.new_empty(count, dtype=torch.int32)

    num_ids = ids.numel()
    groups = [torch.empty_like(ids), ints(num_ids + 1), ints(num_ids), ints(num_ids), ints(1)]
    found: list[Tensor] = hash_find_batch(index, features, ids, offsets, rest[0], None)
    return [*found, *groups]


@torch.library.register_fake("emblib::hash_erase_")
def _(index: list[Tensor], ids: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("emblib::hash_expire_")
def _(index: list[Tensor], table: int, first_bucket: int, num_buckets: int, before: int) -> Tensor:
    return index[0].new_empty(num_buckets * SLOTS_PER_BUCKET, dtype=torch.bool)


@torch.library.register_fake("emblib::hash_find_rows")
def _(
    index: list[Tensor],
    ids: Tensor,
    starts: Tensor,
    tables: Tensor,
    values: Tensor,
    default_value: float,
) -> tuple[Tensor, Tensor]:
    return values.new_empty(ids.numel(), values.size(1)), torch.empty_like(ids, dtype=torch.bool)


@torch.library.register_fake("emblib::hash_read_rows")
def _(values: Tensor, slots: Tensor, default_value: float) -> Tensor:
    return values.new_empty(slots.numel(), values.size(1))


@torch.library.register_fake("emblib::hash_start_rows_")
def _(
    values: Tensor,
    slots: Tensor,
    groups: Tensor,
    first: Tensor,
    starting: Tensor,
    default_value: float,
    returns_rows: bool,
) -> Tensor:
    return values.new_empty(slots.numel() if returns_rows else 0, values.size(1))


@torch.library.register_fake("emblib::hash_evicted_rows")
def _(
    values: list[Tensor], slots: Tensor, status: Tensor, evicted: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    n = slots.numel()
    rows = [v.new_empty(n, v.size(1)) for v in values]
    stamps, scores, count = slots.new_empty(n), slots.new_empty(n), slots.new_empty(1)
    return torch.empty_like(slots), rows, stamps, scores, count


@torch.library.register_fake("emblib::hash_count_")
def _(index: list[Tensor], keys: Tensor, counts: Tensor, tables: Tensor) -> list[Tensor]:
    return [torch.empty_like(keys)]


@torch.library.register_fake("emblib::sketch_count_")
def _(counters: Tensor, layout: Tensor, keys: Tensor, counts: Tensor, tables: Tensor) -> Tensor:
    return torch.empty_like(keys)


initial_rows_ = torch.ops.emblib.hash_initial_rows_.default


class InitialRule(NamedTuple):
    """A row of `rules`; the fields are those of `InitialRuleColumn`."""

    kind: float
    base: float = 0.0
    scale: float = 0.0
    first: float = 0.0
    span: float = 0.0
    low: float = 0.0
    high: float = 0.0


def rule_of(initializer: Initializer, spec: DynamicSpec) -> InitialRule:
    """Encode an initializer of a table for `initial_rows_`."""
    if isinstance(initializer, Uniform):
        bound = spec.capacity**-0.5
        low = -bound if initializer.low is None else initializer.low
        high = bound if initializer.high is None else initializer.high
        return InitialRule(InitialKind.UNIFORM, low, high - low, low=low, high=high)
    if isinstance(initializer, Constant):
        return InitialRule(InitialKind.CONSTANT, initializer.value)
    if isinstance(initializer, KeyModulo):
        return InitialRule(InitialKind.KEY_MODULO)
    mean, std = initializer.mean, initializer.std
    if isinstance(initializer, Normal):
        return InitialRule(InitialKind.NORMAL, mean, std, span=1.0, low=-math.inf, high=math.inf)
    begin, end = initializer.probabilities
    return InitialRule(InitialKind.NORMAL, mean, std, begin, end - begin, *initializer.bounds)
