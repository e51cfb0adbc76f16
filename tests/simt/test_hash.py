"""The emulated hash table against the model, call by call: every slot, counter and byte."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from emblib.ops import hash
from emblib.ops.codes import HASH_ORDER
from emblib.reference.hash import NEW, ORDERS, SLOTS_PER_BUCKET, HashEntry, addresses
from emblib.specs import DynamicSpec
from tests.hash_cases import (
    BATCH_SIZES,
    EDGE_KEYS,
    HASH_KEYS,
    Batch,
    Draws,
    Tables,
    Twin,
    unmix,
)
from tests.ops import test_hash_rows
from tests.ops.test_initial import INITIALIZERS, SEED
from tests.simt.emulated_hash import OPS, ROW_OPS, find_rows, initial_rows_


@pytest.mark.parametrize("insert_policy", ["wins", "competes"])
@pytest.mark.parametrize("order", ORDERS)
def test_calls_do_what_the_model_does(order: str, insert_policy: str) -> None:
    tables = Tables(((1, 7, 700), (2, 2, 819), (3, 5, 1024)), order, insert_policy, HASH_KEYS)
    twin = Twin(tables, OPS)
    draws = Draws(3, keys=700, most=300, seed=len(order))
    for _ in range(25):
        twin.step(draws)
    twin.erase(draws.batch())
    counts = [table.counters for table in twin.model.tables]
    for counter in ("hits", "inserted", "refused", "not_admitted", "expired", "erased"):
        assert sum(line[counter] for line in counts) > 0, counter
    assert any(line["evicted"] for line in counts) == (order != "none")


EDGES = Tables(((1, 3, 819), (1, 1, 1024)), "lfu")


def test_every_key_is_a_key() -> None:
    twin = Twin(EDGES, OPS)
    twin.find(Batch.of((0, EDGE_KEYS), (1, EDGE_KEYS)))
    misses = twin.train(Batch.of((0, EDGE_KEYS)))
    assert [miss.key for miss in misses[0] if miss.status == NEW] == list(EDGE_KEYS)
    twin.find(Batch.of((0, EDGE_KEYS), (1, EDGE_KEYS)))
    twin.erase(Batch.of((0, EDGE_KEYS), (1, EDGE_KEYS), (0, EDGE_KEYS)))
    assert [table.size for table in twin.model.tables] == [0, 0]


@pytest.mark.parametrize("n", BATCH_SIZES)
def test_batches_of_awkward_sizes(n: int) -> None:
    twin = Twin(EDGES, OPS)
    for keys in (range(n), range(n // 2, n // 2 + n)):
        twin.train(Batch.of((0, keys), (1, keys), (0, keys), (1, [])))
    twin.train(Batch.of())
    twin.erase(Batch.of((1, range(n)), (1, range(n))))


def test_many_tables_and_segments() -> None:
    """More tables than a block has threads, and more segments."""
    twin = Twin(Tables(((1, 2, 300),) * 300), OPS)
    segments = [(t * 7 % 300, range(t, t + t % 13)) for t in range(310)]
    twin.train(Batch.of(*segments))
    assert sum(table.buckets == 2 for table in twin.model.tables) > 50
    twin.erase(Batch.of(*segments[::2]))


def _train(twin: Twin, keys: Sequence[int], score: int) -> None:
    batch = Batch.of((0, keys), batch_scores=[score])
    batch.counts = torch.full((len(keys),), score)
    twin.train(batch)


@pytest.mark.parametrize("insert_policy", ["wins", "competes"])
@pytest.mark.parametrize("order", ["lru", "lfu", "assigned"])
def test_crowds_at_one_bucket(order: str, insert_policy: str) -> None:
    """More keys at a time than a warp has lanes, both to fill a bucket and to replace in it."""
    twin = Twin(Tables(((80, 80, 1024),), order, insert_policy), OPS)
    table, twin.model.clock = twin.model.tables[0], 3
    keys = [
        unmix(slot % SLOTS_PER_BUCKET << 40 | slot // SLOTS_PER_BUCKET)
        for slot in range(80 * SLOTS_PER_BUCKET)
    ]
    for slot, key in enumerate(keys):  # all are full, and the entries of bucket 3 the least
        bucket, way = divmod(slot, SLOTS_PER_BUCKET)
        stamp, score = (1, way) if bucket == 3 else (2, 50)
        table.slots[slot] = HashEntry(key, stamp, score if order != "lru" else 0)
    twin.rows.write(0, list(range(len(keys))), keys)
    twin.index = twin.model.index()
    crowd = [unmix(high << 40 | 3) for high in range(100, 220)]
    assert {addresses(key, 80)[0] for key in crowd} == {3}
    _train(twin, crowd, 16)  # all of them in the first round
    own = [entry.key for entry in table.bucket(3) if entry is not None]
    competes = insert_policy == "competes" and order != "lru"
    assert len(set(own) & set(crowd)) in ((16, 17) if competes else (32,))
    twin.erase(Batch.of((0, own)))
    _train(twin, crowd[::-1], 16)
    assert None not in table.bucket(3)


@pytest.mark.parametrize("insert_policy", ["wins", "competes"])
@pytest.mark.parametrize("order", ["none", "lfu"])
def test_many_new_keys_in_small_tables(order: str, insert_policy: str) -> None:
    """More keys than the wide rounds let choose; most find no entry that they may evict."""
    twin = Twin(Tables(((1, 1, 1024), (2, 2, 1024)), order, insert_policy), OPS)
    twin.train(Batch.of((0, range(40)), (1, range(40))))
    twin.train(Batch.of((0, range(100, 3_000)), (1, range(100, 700))))
    assert all(table.counters["refused"] > 500 for table in twin.model.tables)


@pytest.mark.parametrize("order", ["lfu", "lru_lfu"])
def test_counts_stop_at_the_largest(order: str) -> None:
    """Within a warp and over warps, of keys that are there and of missing ones."""
    twin = Twin(Tables(((1, 1, 1024),), order), OPS)
    for counts in ([2**62] * 300, [2**63 - 1] * 300, None):
        batch = Batch.of((0, [1, 2, 3] * 100))
        batch.counts = None if counts is None else torch.tensor(counts)
        twin.train(batch)
    assert [e.score for e in twin.model.tables[0].slots if e is not None] == [2**63 - 1] * 3


@pytest.mark.parametrize("buckets", [1, 2, 3, 5, 8, 13])
def test_growth_over_several_levels(buckets: int) -> None:
    twin = Twin(Tables(((buckets, 70, 700), (1, 130, 819))), OPS)
    total = 0
    for size in (25, 9, 200, 90):
        keys = [key * 0x5DEECE66D for key in range(total, total + size)]
        repeated = list(range(max(0, total - 40), total))
        hits = [key * 0x5DEECE66D for key in repeated]
        twin.train(Batch.of((0, keys), (1, hits + keys)))
        total += size
    assert [table.size for table in twin.model.tables] == [total, total]


def test_large_tables() -> None:
    """Batches that several blocks share, and rounds that leave few keys for the last kernel."""
    twin = Twin(Tables(((3, 60, 819), (40, 40, 1024)), "lru_lfu"), OPS)
    draws = Draws(2, keys=3_000, skew=1.0, most=1, seed=1)
    draws.most, done = 2_500, 0
    while done < 3:
        batch = draws.batch()
        if batch.ids.numel() > 1_200:
            twin.train(batch, draws.admitted(batch.ids.numel()))
            done += 1
    assert sum(table.size for table in twin.model.tables) > 1_500


@pytest.mark.parametrize("order", ["lru", "none"])
def test_few_keys_in_many_buckets(order: str) -> None:
    """Only the chains of buckets that they may choose are cleared, also where keys share one."""
    twin = Twin(Tables(((2, 2, 1024), (198, 198, 1024)), order), OPS)
    for begin in range(0, 120, 6):
        keys = range(begin, begin + 6)
        twin.train(Batch.of((0, keys), (1, keys)))
    assert [table.size for table in twin.model.tables] == [64, 120]


def test_padding_before_the_segments() -> None:
    """Positions before the first segment have no table, whatever the order of the others."""
    batch = Batch.of((1, range(300)), (0, range(40, 400)), (1, range(250, 350)))
    results = []
    for padding in (0, 5, 600):
        twin = Twin(EDGES, OPS)
        twin.train(Batch.of((0, range(60)), (1, range(30))))
        ids, starts, tables = batch.keys
        ids = torch.cat([torch.full((padding,), 7), ids])
        call = (ids, starts + padding, tables, None, None, HASH_ORDER["lfu"])
        slots, first, groups, totals, offsets = OPS["touch_"](twin.index, *call)
        assert bool((slots[:padding] == -1).all())
        assert bool((groups[:padding] == -1).all())
        count = int(offsets[-1])
        assert not first[count:].any()
        assert not totals[count:].any()
        parts = (slots[padding:], first[:count] - padding, groups[padding:], totals[:count])
        results.append((*parts, offsets, *twin.index))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_broken_segments() -> None:
    """Any answer, but no access outside the arrays (the sanitized run looks at that)."""
    twin = Twin(EDGES, OPS)
    twin.train(Batch.of((0, range(60)), (1, range(30))))
    for starts, tables in (([7, -3, 2**40, 20], [1, -1, 5]), ([90, 80, 5], [0, 1])):
        keys = (torch.arange(50), torch.tensor(starts), torch.tensor(tables))
        slots, *found = OPS["touch_"](twin.index, *keys, None, None, HASH_ORDER["lfu"])
        offsets = found[3]
        assert torch.equal(slots, OPS["find"](twin.index, *keys))
        assert int(slots.min()) >= -1
        assert int(slots.max()) < 3 * SLOTS_PER_BUCKET
        assert 0 <= int(offsets[2]) <= 50
        assert 0 <= int(found[0].min()) <= int(found[0].max()) < 50
        rows = (twin.rows.row_buffers, twin.rows.layout)
        OPS["grow_"](twin.index, *rows, *keys, slots, offsets, None)
        OPS["erase_"](twin.index, *keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_initial_rows_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    """Tables of all initializers and dims, whose misses share warps; a state besides."""
    dims = (1, 130, 8, 3, 64, 4, 21)
    counts = (70, 5, 33, 0, 40, 1, 9)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    total, most = int(offsets[-1]), max(counts)
    places, elements = [], 2
    for t, dim in enumerate(dims):
        places.append([[elements, dim + 1, most, dim, t], [t * most, 1, most, 1, t]])
        elements += most * (dim + 1)
    initializers: Sequence[Any] = INITIALIZERS
    rules = [[hash.rule_of(x, DynamicSpec(100, 8))] * 2 for x in initializers]
    some = torch.Generator().manual_seed(3)
    ids = torch.randint(-(2**63), 2**63 - 1, (total + 9,), generator=some)
    slots = torch.cat([torch.randperm(most, generator=some)[:count] for count in counts])
    slots[::5] = -1
    batch_scores = (torch.tensor(places), torch.tensor(rules, dtype=torch.float64), ids)
    first = torch.randperm(total + 9, generator=some)[:total].clone()
    call = (*batch_scores, first, offsets, slots, SEED)
    want = [torch.full((elements,), 9.0, dtype=dtype), torch.full((most * len(dims),), 9.0)]
    got = [buffer.clone() for buffer in want]
    hash.initial_rows_(want, *call)
    initial_rows_(got, *call)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dtype", "dim"), test_hash_rows.KINDS)
def test_rows_are_those_of_the_reference(dtype: torch.dtype, dim: int) -> None:
    test_hash_rows.check_reads_and_writes(ROW_OPS, dtype, dim)
    test_hash_rows.check_sums(ROW_OPS, dtype, dim)
    test_hash_rows.check_starts(ROW_OPS, dtype, dim)
    test_hash_rows.check_evicted(ROW_OPS, dtype, dim)


@pytest.mark.parametrize(("dtype", "dim"), test_hash_rows.KINDS[:4])
def test_found_rows_are_those_of_the_reference(dtype: torch.dtype, dim: int) -> None:
    test_hash_rows.check_finds(find_rows, test_hash_rows.twin_with_keys(OPS), dtype, dim)


def test_misses_of_many_segments_are_numbered_by_table() -> None:
    """Segments of tables in any order, more of them than a block has threads, and of one key."""
    twin = Twin(Tables(((2, 2, 1024),) * 3), OPS)
    segments = [(f * 7 % 3, [f % 50, f % 11, f]) for f in range(600)]
    twin.train(Batch.of(*segments))
    twin.train(Batch.of(*segments[::-1]))
