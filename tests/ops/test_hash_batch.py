"""Ops on whole batches: index, rows, slots and groups that the ops one by one make."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from emblib.columns import FeatureRow
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import range_indices
from emblib.init import Uniform
from emblib.ops import hash, tbe, tiers
from emblib.ops.codes import HASH_ORDER, INSERT_POLICY
from emblib.specs import DynamicSpec, Eviction, InsertPolicy
from tests.hash_cases import EDGE_KEYS, HASH_KEYS

FEATURE_TABLES = torch.tensor([1, 0, 1])  # a table with two features, not in the order of tables
FALLBACK = torch.tensor([[64, 0], [160, 7]])  # first fallback row of each table, and their number
DIM = 3


class Tables:
    """Two tables with rows, overflow rows behind them, and one row-wise state."""

    def __init__(
        self, eviction: Eviction, policy: InsertPolicy, rows: tuple[int, int], overflow: int = 0
    ) -> None:
        self.specs = [
            DynamicSpec(count, DIM, eviction=eviction, insert_policy=policy) for count in rows
        ]
        self.index = HashIndex(self.specs, hash_keys=HASH_KEYS[:2])
        first = [0, self.specs[0].rows + overflow]
        total = sum(spec.rows + overflow for spec in self.specs)
        self.rows = [torch.zeros(total * DIM), torch.zeros(total)]
        self.features = torch.tensor(
            [
                FeatureRow(
                    weight_offset=first[t] * DIM,
                    row_base=first[t],
                    rows=self.specs[t].rows,
                    dim=DIM,
                    column=DIM * f,
                    state_base=first[t],
                    cache_stride=0,
                )
                for f, t in enumerate(FEATURE_TABLES.tolist())
            ]
        )
        self.total_rows = total
        layout = [
            [(at * DIM, DIM, spec.rows + overflow, DIM, t), (at, 1, spec.rows + overflow, 1, t)]
            for t, (at, spec) in enumerate(zip(first, self.specs, strict=True))
        ]
        rules = [[hash.rule_of(Uniform(-1.0, 1.0), spec)] * 2 for spec in self.specs]
        self.initial = (torch.tensor(layout), torch.tensor(rules, dtype=torch.float64), 7)
        self.codes = (
            HASH_ORDER[self.index.order],
            INSERT_POLICY[self.index.insert_policy],
        )

    def touch(
        self, ids: Tensor, offsets: Tensor, scores: Tensor | None, thresholds: Tensor | None = None
    ) -> list[Tensor]:
        batch = (self.features, ids, offsets, FEATURE_TABLES, scores)
        results: list[Tensor] = hash.hash_touch_batch_(
            self.index.tensors(), *batch, self.codes[0], thresholds
        )
        return results

    def at_once(
        self,
        ids: Tensor,
        offsets: Tensor,
        scores: Tensor | None,
        *admission: Tensor | bool | None,
    ) -> list[Tensor]:
        batch = (self.features, ids, offsets, FEATURE_TABLES, scores)
        results: list[Tensor] = hash.hash_insert_batch_(
            self.index.tensors(), self.rows, *batch, *self.codes, *self.initial, *admission
        )
        return results

    def find(self, ids: Tensor, offsets: Tensor, fallback: Tensor | None = None) -> list[Tensor]:
        results: list[Tensor] = hash.hash_find_batch(
            self.index.tensors(), self.features, ids, offsets, FEATURE_TABLES, fallback
        )
        return results

    def one_by_one(
        self, ids: Tensor, offsets: Tensor, scores: Tensor | None, *, admits: bool = False
    ) -> list[Tensor]:
        """Return slots, status and groups; with `admits` insert only keys of `_is_admitted`."""
        starts = offsets[:: (offsets.numel() - 1) // len(FEATURE_TABLES)].long().contiguous()
        keys = hash.Keys(ids, starts, FEATURE_TABLES)

        def admit(keys: hash.Keys, misses: hash.Misses) -> Tensor:
            return _is_admitted(keys.ids[misses.first])

        inserted = self.index.insert(keys, batch_scores=scores, admit=admit if admits else None)
        if inserted.misses is not None and inserted.result is not None:
            misses = (inserted.misses.first, inserted.misses.offsets, inserted.result.slots)
            hash.initial_rows_(self.rows, *self.initial[:2], ids, *misses, self.initial[2])
        status = inserted.status
        if status is None:
            status = torch.full_like(inserted.slots, hash.HIT, dtype=torch.uint8)
        groups = tbe.group(self.features, inserted.slots, offsets, self.total_rows)
        self.inserted = inserted
        return [inserted.slots, status, *groups]


def _same_misses(results: list[Tensor], inserted: hash.InsertedBatch) -> None:
    """Compare the misses that one op returned with those of the ops one by one."""
    assert inserted.misses is not None
    assert inserted.result is not None
    first, groups, counts, offsets, *insert_results = results
    num_misses = int(inserted.misses.offsets[-1])
    for got, want in (
        (first, inserted.misses.first[:num_misses]),
        (groups, inserted.misses.groups),
        (counts, inserted.misses.counts[:num_misses]),
        (offsets, inserted.misses.offsets),
        *zip(insert_results[:2], (part[:num_misses] for part in inserted.result), strict=False),
    ):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    is_evicting = insert_results[1] == hash.EVICTING
    evicted = inserted.result.evicted[:num_misses]
    assert torch.equal(insert_results[2][is_evicting], evicted[is_evicting])


def _is_admitted(keys: Tensor) -> Tensor:
    return keys % 3 != 0


def _with_fallback(keys: hash.Keys, slots: Tensor) -> Tensor:
    """Return slots in which missing keys of the second table have fallback rows."""
    has_fallback = (slots < 0) & (hash.tables_of(keys) == 1)
    return torch.where(has_fallback, 160 + range_indices(keys.ids, 7), slots)


def _batches(count: int, most: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    some = torch.Generator().manual_seed(seed)
    pool = torch.cat([torch.tensor(EDGE_KEYS), torch.arange(-20, 180)])
    for _ in range(count):
        bags = 3 * int(torch.randint(1, 5, (), generator=some))
        sizes = torch.randint(0, most, (bags,), generator=some)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        ids = pool[torch.randint(0, len(pool), (int(offsets[-1]),), generator=some)]
        yield ids, offsets.int() if bags % 2 else offsets


def _sorted(groups: list[Tensor]) -> list[list[tuple[int, int]]]:
    """Return the lookups and bags of each row, by ascending row, each after the row."""
    rows, segments, lookups, bags, count = (tensor.tolist() for tensor in groups)
    each = [
        [(row, 0), *zip(lookups[begin:end], bags[begin:end], strict=True)]
        for row, begin, end in zip(rows, segments, segments[1 : count[0] + 1], strict=False)
    ]
    return sorted(each)


@pytest.mark.parametrize("policy", InsertPolicy)
@pytest.mark.parametrize("eviction", Eviction)
def test_equals_the_ops_one_by_one(eviction: Eviction, policy: InsertPolicy) -> None:
    threads = torch.get_num_threads()
    first, second = (Tables(eviction, policy, (64, 160)) for _ in range(2))
    # The last ones are large enough for several threads.
    batches = (*_batches(24, 30, seed=1), *_batches(3, 2000, seed=2), *_batches(1, 50_000, seed=3))
    num_not_admitted = 0
    for step, (ids, offsets) in enumerate(batches):
        scores = torch.tensor([step % 7, 3 - step % 5]) if first.index.order == "assigned" else None
        torch.set_num_threads(1 + step % 3)
        found = first.find(ids, offsets)
        rows = first.find(ids, offsets, FALLBACK)[2]
        admits, returns_misses = step % 3 == 1, step % 4 < 2
        admission: tuple[Tensor | None, Tensor | None] = (None, None)
        fallback = FALLBACK if step % 2 else None
        if admits:
            thresholds = torch.tensor([step, 7, 9]) if step % 2 else None
            slots_of_keys, missing, uses, tables_of_missing, *lowest = first.touch(
                ids, offsets, scores, thresholds
            )
            admission = (slots_of_keys, _is_admitted(missing))
            assert int((slots_of_keys < 0).sum()) == missing.numel()
        results = first.at_once(ids, offsets, scores, fallback, *admission, returns_misses)
        torch.set_num_threads(threads)
        keys = hash.Keys(ids, results[1], FEATURE_TABLES)
        found_slots = second.index.find(keys)
        assert all(map(torch.equal, found, (*results[:2], found_slots)))
        assert torch.equal(rows, _with_fallback(keys, found_slots))
        if admits:
            lookups = [*zip(hash.tables_of(keys).tolist(), ids.tolist(), strict=True)]
            is_missing = (found_slots < 0).tolist()
            counts = Counter(itertools.compress(lookups, is_missing))
            want = sorted(counts.items(), key=lambda item: item[0][0])
            got = zip(tables_of_missing.tolist(), missing.tolist(), strict=True)
            assert [*zip(got, uses.tolist(), strict=True)] == want
            if thresholds is not None:
                by_lookup = thresholds[hash.segments_of(keys)].tolist()
                want_lowest = [
                    min(itertools.compress(by_lookup, map(lookup.__eq__, lookups)))
                    for lookup, _ in want
                ]
                assert lowest[0].tolist() == want_lowest
            num_not_admitted += int((~_is_admitted(missing)).sum())
        slots, status, *groups = second.one_by_one(ids, offsets, scores, admits=admits)
        repaired, starts, mine, *rest = results
        assert repaired.tolist() == offsets.tolist()
        assert starts.tolist() == offsets[:: len(offsets) // 3].tolist()
        assert torch.equal(mine, slots)
        has_misses = bool((status != hash.HIT).any())
        num_extra = 1 + (fallback is not None) + 7 * returns_misses if has_misses else 0
        assert len(rest) == 5 + num_extra
        if has_misses and returns_misses:
            _same_misses(rest[-7:], second.inserted)
            del rest[-7:]
        if has_misses and fallback is not None:
            assert torch.equal(rest.pop(), _with_fallback(keys, slots))
        if has_misses:
            assert torch.equal(rest.pop(), status)
        assert _sorted(rest) == _sorted(groups)
        tags, entries, *others = first.index.tensors()[:5]
        wanted = second.index.tensors()
        assert torch.equal(tags, wanted[0])
        assert torch.equal(entries[tags != 0], wanted[1][tags != 0])
        assert all(torch.equal(a, b) for a, b in zip(others, wanted[2:5], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first.rows, second.rows, strict=True))
    assert min(int(size) for size in first.index.tables[:, 3]) > 30
    assert num_not_admitted > 50


def test_does_not_serve_a_table_that_threads_would_wait_for() -> None:
    tables = Tables(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, (64, 160))
    count = 1 << 17  # one of the two tables has all lookups
    ids, offsets = torch.zeros(count, dtype=torch.int64), torch.tensor([0, 0, count, count])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert tables.at_once(ids, offsets, None)
        touched = tables.touch(ids, offsets, None)
        torch.set_num_threads(5)
        assert tables.at_once(ids, offsets, None) == []
        assert tables.touch(ids, offsets, None) == []
        assert tables.at_once(ids, offsets, None, None, touched[0])
    finally:
        torch.set_num_threads(threads)


def test_does_not_serve_what_needs_the_host() -> None:
    tables = Tables(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, (64, 160))
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 4, 6])
    for wrong in ([0, 2, 4, 5], [1, 2, 4, 6], [0, 4, 2, 6], [0, -2, 4, 6], [0, 2, 4, 2**33]):
        before = [tensor.clone() for tensor in tables.index.tensors()]
        assert tables.find(ids, torch.tensor(wrong)) == []
        assert tables.at_once(ids, torch.tensor(wrong), None) == []
        assert tables.touch(ids, torch.tensor(wrong), None) == []
        assert all(map(torch.equal, before, tables.index.tensors()))
    tables.specs = [DynamicSpec(640, DIM, initial_capacity=32) for _ in range(2)]
    tables.index = HashIndex(tables.specs, hash_keys=HASH_KEYS[:2])
    assert tables.at_once(ids, offsets, None)
    before = [tensor.clone() for tensor in tables.index.tensors()]
    assert tables.at_once(torch.arange(60), offsets * 10, None) == []
    assert tables.touch(torch.arange(60), offsets * 10, None) == []
    assert all(map(torch.equal, before, tables.index.tensors()))
    for admission, message in (
        ((None, torch.ones(1, dtype=torch.bool)), "admitted needs touched"),
        ((torch.zeros(5, dtype=torch.int64), None), "touched must be contiguous with 6 entries"),
        ((torch.full((6,), 32), None), "touched must be slots of table 0, below 32, got 32"),
        ((torch.full((6,), -2), None), "touched must be slots of table 0, below 32, got -2"),
        ((torch.arange(-1, 5), torch.ones(2, dtype=torch.bool)), "one entry per missing key = 1"),
        ((torch.arange(-1, 5), torch.ones(1)), "admitted must be bool"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tables.at_once(ids, offsets, None, None, *admission)
        assert all(map(torch.equal, before, tables.index.tensors()))
    with pytest.raises(RuntimeError, match="ids must be int64"):
        tables.at_once(ids.int(), offsets, None)
    with pytest.raises(RuntimeError, match="ids must be int64"):
        tables.find(ids.int(), offsets)
    for fallback, message in (
        (FALLBACK.int(), "fallback must be int64"),
        (FALLBACK[:1], r"fallback must be contiguous and \[T, 2\] for T = 2"),
        (-FALLBACK, "table 0 must have at most 2\\^31 - 1 fallback rows, got 0 from row -64"),
        (FALLBACK << 30, "table 1 must have at most .* got 7516192768 from row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tables.find(ids, offsets, fallback)
    tables.rows = [rows[:9] for rows in tables.rows]
    with pytest.raises(RuntimeError, match="layout must place the rows"):
        tables.at_once(ids, offsets, None)


def test_opcheck() -> None:
    tables = Tables(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, (64, 160))
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 4, 6])
    tables.one_by_one(ids, offsets, None)
    batch = (tables.features, ids, offsets, FEATURE_TABLES, None)
    arguments = (tables.index.tensors(), tables.rows, *batch, *tables.codes, *tables.initial)
    # It returns a list and mutates: compiled code does not call it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.emblib.hash_insert_batch_.default, arguments, test_utils=checks)
    torch.library.opcheck(
        torch.ops.emblib.hash_touch_batch_.default,
        (tables.index.tensors(), *batch, tables.codes[0]),
        test_utils=checks,
    )
    found_batch = (tables.features, ids, offsets, FEATURE_TABLES, FALLBACK)
    find_arguments = (tables.index.tensors(), *found_batch)
    torch.library.opcheck(
        torch.ops.emblib.hash_find_batch.default, find_arguments, test_utils=checks
    )
    counters, layout = torch.zeros(8, dtype=torch.uint8), torch.tensor([(0, 4, 2, 3, 5)])
    sketched = (counters, layout, ids, torch.ones_like(ids), torch.zeros_like(ids))
    torch.library.opcheck(torch.ops.emblib.sketch_count_.default, sketched, test_utils=checks)
    counter = HashIndex([DynamicSpec(32, 1)], has_scores=True)
    counted = (counter.tensors(), *sketched[2:])
    torch.library.opcheck(torch.ops.emblib.hash_count_.default, counted, test_utils=checks)
    stores = [HashIndex([DynamicSpec(32, 1)], hash_keys=[5]).tensors() for _ in range(2)]
    records = [torch.zeros(32, 16 + 4 * (DIM + 1), dtype=torch.uint8) for _ in range(2)]
    indices = [tensor for store in stores for tensor in store]
    no_overflow = [torch.empty(0, 3, dtype=torch.int64)] * 2
    in_store = (indices, records, [HASH_ORDER["lru"]] * 2, [64, 160], no_overflow, False)
    assert tiers.tier_insert_batch_(*arguments, *in_store) == []  # there are no overflow rows
    tables = Tables(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, (64, 160), overflow=8)
    tables.one_by_one(ids, offsets, None)
    batch = (tables.features, ids, offsets, FEATURE_TABLES, None)
    arguments = (tables.index.tensors(), tables.rows, *batch, *tables.codes, *tables.initial)
    torch.library.opcheck(
        torch.ops.emblib.tier_insert_batch_.default, (*arguments, *in_store), test_utils=checks
    )
    found_in = (arguments[0], tables.rows, *found_batch, *tables.initial[:2], *in_store[:4])
    torch.library.opcheck(torch.ops.emblib.tier_find_batch_.default, found_in, test_utils=checks)


class TablesWithStores(Tables):
    """Tables in front of stores in host memory, with 100 overflow rows each."""

    def __init__(self, eviction: Eviction, policy: InsertPolicy, store_order: Eviction) -> None:
        super().__init__(eviction, policy, (64, 160), overflow=100)
        specs = [DynamicSpec(rows, 1, eviction=store_order) for rows in (32, 32)]
        self.stores = [HashIndex([spec], hash_keys=[5]) for spec in specs]
        stride = 16 + 4 * DIM + 4
        self.records = [torch.zeros(spec.rows, stride, dtype=torch.uint8) for spec in specs]
        self.store_order = HASH_ORDER[self.stores[0].order]

    def store_arguments(self) -> tuple[list[Tensor], list[Tensor], list[int], list[int]]:
        """Return indices, records and orders of the stores, and the first overflow rows."""
        indices = [tensor for store in self.stores for tensor in store.tensors()]
        return indices, self.records, [self.store_order] * 2, [64, 160]

    def insert(
        self, ids: Tensor, offsets: Tensor, overflow: list[Tensor], *, changes_stores: bool
    ) -> tuple[list[Tensor], list[tiers.SwappedMisses]]:
        """Return all results but groups and those about moves, and the latter."""
        results = tiers.tier_insert_batch_(
            self.index.tensors(),
            self.rows,
            self.features,
            ids,
            offsets,
            FEATURE_TABLES,
            None,
            *self.codes,
            *self.initial,
            *self.store_arguments(),
            overflow,
            changes_stores,
        )
        first, width = 10, len(tiers.SwappedMisses._fields)
        swapped = [results[i : i + width] for i in range(first, len(results), width)]
        return results[:3] + results[8:first], [tiers.SwappedMisses(*parts) for parts in swapped]

    def find_in_stores(
        self, ids: Tensor, offsets: Tensor, fallback: Tensor | None = None
    ) -> list[Tensor]:
        results: list[Tensor] = tiers.tier_find_batch_(
            self.index.tensors(),
            self.rows,
            self.features,
            ids,
            offsets,
            FEATURE_TABLES,
            fallback,
            *self.initial[:2],
            *self.store_arguments(),
        )
        return results

    def write_back(self, overflow: list[Tensor]) -> list[int]:
        """Put overflow rows into the stores; return how many rows each store dropped."""
        num_dropped, first_rows = [], (64, 164 + 160)
        for t, (store, entries) in enumerate(zip(self.stores, overflow, strict=True)):
            rows = slice(first_rows[t], first_rows[t] + entries.shape[0])
            weights = self.rows[0].view(-1, DIM)[rows].view(torch.uint8)
            packed = torch.cat([weights, self.rows[1].view(-1, 1)[rows].view(torch.uint8)], dim=1)
            arguments = (self.records[t], entries[:0, 0].clone(), entries, packed, self.store_order)
            num_dropped.append(tiers.tier_put_(store.tensors(), *arguments)[0].shape[0])
        return num_dropped

    def move(self, swapped: list[tiers.SwappedMisses]) -> list[Tensor]:
        """Make the moves that the op has left; return the keys that each store dropped."""
        return [
            tiers.tier_put_(
                store.tensors(), records, s.promoted, s.demoted, s.demoted_rows, self.store_order
            )[0][:, 0]
            for store, records, s in zip(self.stores, self.records, swapped, strict=False)
        ]


@pytest.mark.parametrize("policy", InsertPolicy)
@pytest.mark.parametrize("store_order", [Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU])
@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU])
def test_the_op_changes_stores_as_puts_do(
    eviction: Eviction, store_order: Eviction, policy: InsertPolicy, thread_counts: list[int]
) -> None:
    one, other = (TablesWithStores(eviction, policy, store_order) for _ in range(2))
    num_dropped = num_promoted = num_refused = num_dropped_for_overflow = 0
    overflow = no_overflow = [torch.empty(0, 3, dtype=torch.int64)] * 2
    for step, (ids, offsets) in enumerate(_batches(60, 30, seed=4)):
        dropped_for_overflow = other.write_back(overflow)
        results, left = other.insert(ids, offsets, no_overflow, changes_stores=False)
        want_dropped = other.move(left)
        torch.set_num_threads(thread_counts[step % len(thread_counts)])
        got, swapped = one.insert(ids, offsets, overflow, changes_stores=True)
        if not got:  # declined, with nothing changed: a table has too few overflow rows
            one.write_back(overflow)
        overflow = [part.refused for part in swapped] or no_overflow
        for rows in (*one.rows, *other.rows):
            rows += 0.5  # the update of the step
        if swapped:
            assert got[-1][:, -1].tolist() == dropped_for_overflow
            got[-1][:, -1] = 0
            num_dropped_for_overflow += sum(dropped_for_overflow)
        if not left:  # no key was missing: the results describe only the overflow rows
            got, swapped = got[: len(results)], []
        same = [*zip(got, results, strict=True)]
        same += [(part.refused, full.refused) for part, full in zip(swapped, left, strict=True)]
        same += [(part.dropped, keys) for part, keys in zip(swapped, want_dropped, strict=True)]
        for part, full in zip(swapped, left, strict=True):
            assert not part.demoted.numel() + part.demoted_rows.numel() + part.promoted.numel()
            assert not full.dropped.numel()
            num_promoted += full.promoted.numel()
            num_refused += full.refused.shape[0]
            num_dropped += part.dropped.numel()
        same += zip(one.rows, other.rows, strict=True)
        indices = zip([one.index, *one.stores], [other.index, *other.stores], strict=True)
        for mine, wanted in indices:
            used = wanted.tags != 0
            same += [(mine.tags, wanted.tags), (mine.entries[used], wanted.entries[used])]
            same += zip(mine.tensors()[2:5], wanted.tensors()[2:5], strict=True)
        for t, records in enumerate(one.records):
            used = other.stores[t].tags != 0
            same.append((records[used], other.records[t][used]))
        assert all(torch.equal(x, y) for x, y in same)
    assert num_promoted > 100
    assert min(num_dropped, num_refused, num_dropped_for_overflow) >= 10


def test_rows_in_stores_are_found_in_overflow_rows(thread_counts: list[int]) -> None:
    """Slots and entries of a program of dictionaries; the index and the stores do not change."""
    tables = TablesWithStores(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, Eviction.LFU)
    no_overflow = [torch.empty(0, 3, dtype=torch.int64)] * 2
    num_stored = 0
    for step, (ids, offsets) in enumerate(_batches(60, 60, seed=5)):
        torch.set_num_threads(thread_counts[step % len(thread_counts)])
        tensors = [*tables.index.tensors(), *tables.records]
        tensors += [tensor for store in tables.stores for tensor in store.tensors()]
        before = [tensor.clone() for tensor in tensors]
        results = tables.find_in_stores(ids, offsets)
        assert all(map(torch.equal, before, tensors))
        starts = offsets[:: len(offsets) // 3].tolist()
        table_of = [t for f, t in enumerate([1, 0, 1]) for _ in range(starts[f + 1] - starts[f])]
        keys = hash.Keys(ids, torch.tensor(starts), FEATURE_TABLES)
        want, stored = tables.index.find(keys).tolist(), [dict[int, int](), dict[int, int]()]
        in_store = [store.find(hash.Keys.from_ids(ids)).tolist() for store in tables.stores]
        for i, (key, t) in enumerate(zip(ids.tolist(), table_of, strict=True)):
            if want[i] < 0 and in_store[t][i] >= 0:
                stored[t].setdefault(key, in_store[t][i])
                want[i] = (64, 160)[t] + list(stored[t]).index(key)
        num_stored += sum(map(len, stored))
        assert [tensor.tolist() for tensor in results[:3]] == [offsets.tolist(), starts, want]
        _check_copies(tables, results[3:], stored)
        slots = tables.find_in_stores(ids, offsets, FALLBACK)[2]
        assert torch.equal(slots, _with_fallback(keys, results[2]))
        tables.insert(ids, offsets, no_overflow, changes_stores=True)
    assert num_stored > 500


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _check_copies(
    tables: TablesWithStores, entries: list[Tensor], stored: list[dict[int, int]]
) -> None:
    """Check entries and overflow rows; `stored` maps keys to slots of the store, by table."""
    for t, (first_row, slots_of_keys) in enumerate(zip((64, 164 + 160), stored, strict=True)):
        if not entries:
            assert not slots_of_keys
            continue
        records = tables.records[t][list(slots_of_keys.values())]
        words = records[:, :16].contiguous().view(torch.int64)
        assert entries[t].tolist() == [
            [key, *pair] for key, pair in zip(slots_of_keys, words.tolist(), strict=True)
        ]
        rows = slice(first_row, first_row + len(slots_of_keys))
        weights = _as_bytes(tables.rows[0].view(-1, DIM)[rows])
        states = _as_bytes(tables.rows[1].view(-1, 1)[rows])
        assert torch.equal(torch.cat([weights, states], dim=1), records[:, 16:])


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, [], "each of 2 tables needs the 6 tensors of an index"),
        (1, [torch.zeros(32, 31, dtype=torch.uint8)] * 2, "two words and a row of 16 bytes"),
        (1, [torch.zeros(31, 32, dtype=torch.uint8)] * 2, "for each of 32 slots"),
        (1, [torch.zeros(32, dtype=torch.uint8)] * 2, "records must be a matrix, got 1 dimensions"),
        (2, [HASH_ORDER["none"]] * 2, "evicts by stamps or by counts"),
        (2, [HASH_ORDER["lfu"]] * 2, "entries of 3 words"),
        (2, [HASH_ORDER["lru"]], "first_overflow and overflow, got 12, 2, 1, 2 and 2"),
        (3, [63, 160], r"first_overflow must be in \[64, 64\]"),
        (3, [64, 161], r"first_overflow must be in \[160, 160\]"),
        (4, [torch.ones(1, 3, dtype=torch.int64)] * 2, "entries of overflow rows"),
        (4, [torch.ones(0, 3)] * 2, "overflow must be int64"),
        (4, [torch.ones(0, 3, dtype=torch.int64)], "got 12, 2, 2, 2 and 1"),
    ],
)
def test_wrong_stores_raise_before_anything_changes(
    number: int, value: object, message: str
) -> None:
    tables = Tables(Eviction.LRU, InsertPolicy.ALWAYS_EVICT, (64, 160))
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 4, 6])
    batch = (tables.features, ids, offsets, FEATURE_TABLES, None)
    arguments = (tables.index.tensors(), tables.rows, *batch, *tables.codes, *tables.initial)
    stores = [HashIndex([DynamicSpec(32, 1)], hash_keys=[5]).tensors() for _ in range(2)]
    records = [torch.zeros(32, 16 + 4 * (DIM + 1), dtype=torch.uint8) for _ in range(2)]
    orders, indices = [HASH_ORDER["lru"]] * 2, [x for store in stores for x in store]
    no_overflow = [torch.empty(0, 3, dtype=torch.int64)] * 2
    in_store: list[object] = [indices, records, orders, [64, 160], no_overflow, True]
    in_store[number] = value
    before = [tensor.clone() for tensor in tables.index.tensors()]
    with pytest.raises(RuntimeError, match=message):
        tiers.tier_insert_batch_(*arguments, *in_store)
    if number < 4:
        with pytest.raises(RuntimeError, match=message):
            tiers.tier_find_batch_(*arguments[:6], None, *tables.initial[:2], *in_store[:4])
    assert all(map(torch.equal, before, tables.index.tensors()))
