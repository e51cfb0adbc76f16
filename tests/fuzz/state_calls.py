"""Calls of the ops of the cache and of dynamic tables, see `tests.fuzz.calls`."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emblib.columns import FeatureColumn
from emblib.init import Normal, Uniform
from emblib.ops.codes import BOUNDS_CHECK, CACHE_POLICY, HASH_ORDER, INSERT_POLICY
from emblib.ops.hash import rule_of
from emblib.ops.primitives import group
from emblib.reference import hash, tiers
from emblib.reference.cache import CacheModel, flush, move
from emblib.reference.hash import HashModel
from emblib.specs import DynamicSpec, Eviction
from tests import cache_cases, hash_cases
from tests.fuzz.call import FLOATS, Arguments, Call, close, drawn_seed, same
from tests.ops import test_tiers

_ops = torch.ops.emblib


# The cache


def _cache(draw: random.Random) -> tuple[cache_cases.Twin, cache_cases.Groups, Tensor]:
    """A cache after some batches, and the next batch."""
    trace = cache_cases.Trace(
        ((90, 5), (60, 3)),
        draw.choice([1, 2, 3]),
        draw.choice(["lru", "lfu"]),
        draw.randint(1, 4),
        draw.choice([1, 60, 200]),
        seed=drawn_seed(draw),
    )
    twin = cache_cases.Twin(trace, _ops.cache_plan_)
    *before, last = trace.lookup_batches()
    for lookups in before:
        twin.plan(lookups, cache_cases.group(lookups))
    return twin, cache_cases.group(last), last


def _cache_plan(draw: random.Random) -> Call:
    twin, (rows, segments, _, count), lookups = _cache(draw)
    state = tuple(t.clone() for t in (twin.tags, twin.stamps, twin.counts, twin.counters))
    clock = torch.tensor([twin.now + 1, twin.now + 1])
    policy = CACHE_POLICY[twin.trace.policy]

    def check(arguments: Arguments, got: Any) -> None:
        twin.tags, twin.stamps, twin.counts, twin.counters = arguments[:4]
        plan = twin.model.plan(lookups.tolist(), twin.now + 1, twin.now + 1)
        twin._compare_plan(plan, (rows, segments, lookups, count), *got)
        twin.compare()

    return Call("cache_plan_", (*state, clock, twin.tables, rows, segments, count, policy), check)


def _cache_evictions(draw: random.Random) -> Call:
    arguments = _cache_plan(draw).arguments
    state = tuple(tensor.clone() for tensor in arguments[:4])
    _, evicted = _ops.cache_plan_(*(tensor.clone() for tensor in state), *arguments[4:])

    def check(used: Arguments, got: Any) -> None:
        assert torch.equal(got, evicted)
        assert all(map(torch.equal, used[:4], state))

    return Call("cache_evictions", arguments, check)


def _located(model: CacheModel, rows: list[int]) -> list[int]:
    found = [model.locate(row) if row >= cache_cases.UNCACHED else None for row in rows]
    return [-1 if slot is None else slot for slot in found]


def _cache_locate(draw: random.Random) -> Call:
    twin, (rows, _, _, count), _ = _cache(draw)

    def check(_: Arguments, got: Any) -> None:
        unique = int(count)
        assert got[:unique].tolist() == _located(twin.model, rows[:unique].tolist())
        assert (got[unique:] == -1).all()

    return Call("cache_locate", (twin.tags, twin.tables, rows, count), check)


def _cache_lookup_slots(draw: random.Random) -> Call:
    twin, (rows, segments, order, count), lookups = _cache(draw)
    row_slots = _ops.cache_locate(twin.tags, twin.tables, rows, count)

    def check(_: Arguments, got: Any) -> None:
        assert got.tolist() == _located(twin.model, lookups.tolist())

    return Call("cache_lookup_slots", (row_slots, segments, order, count), check)


def _store(draw: random.Random, twin: cache_cases.Twin) -> cache_cases.Store:
    return cache_cases.Store.make(
        twin, draw.choice(FLOATS), draw.choice(FLOATS), draw.choice(FLOATS)
    )


def _same_store(arguments: Arguments, want: cache_cases.Store) -> None:
    for got, tensor in zip(
        [*arguments[0], *arguments[1]], [*want.weights, *want.states], strict=True
    ):
        assert torch.equal(got, tensor)


def _cache_move(draw: random.Random) -> Call:
    twin, groups, lookups = _cache(draw)
    plan, row_slots, evicted = twin.plan(lookups, groups)
    store = _store(draw, twin)
    want = store.clone()

    def check(arguments: Arguments, _: Any) -> None:
        move(want.memory, plan)
        _same_store(arguments, want)

    call = (store.weights, store.states, cache_cases.HYPER, twin.tables, groups[0], groups[3])
    return Call("cache_move_", (*call, row_slots, evicted, []), check)


def _cache_prefetch(draw: random.Random) -> Call:
    """A batch of one feature per table, prefetched as by the ops of its parts."""
    twin, _, _ = _cache(draw)
    store, tables = _store(draw, twin), twin.tables
    state = [twin.tags, twin.stamps, twin.counts, twin.counters]
    state = [*(t.clone() for t in state), torch.tensor([twin.now, twin.now]), torch.full((2,), -1)]
    per_table = draw.choice([0, 1, 9])
    rows, firsts = tables[:, FeatureColumn.ROWS], tables[:, FeatureColumn.ROW_BASE]
    indices = torch.cat([torch.randint(int(n), (per_table,)) for n in rows])
    offsets = torch.arange(len(rows) + 1) * per_table
    batch = (tables, indices, offsets, None, int((firsts + rows).max()))
    policy, want = CACHE_POLICY[twin.trace.policy], store.clone()
    tags, stamps, counts, counters, clock, _ = (t.clone() for t in state)

    def check(arguments: Arguments, got: Any) -> None:
        groups = _ops.tbe_group(*batch, True)
        clock.copy_(torch.tensor([twin.now + 1, twin.now]))
        plan = (tags, stamps, counts, counters, clock, tables, groups[0], groups[1], groups[4])
        row_slots, evicted = _ops.cache_plan_(*plan, policy)
        moved = (tables, groups[0], groups[4], row_slots, evicted, [])
        _ops.cache_move_(want.weights, want.states, cache_cases.HYPER, *moved)
        number = int(groups[4])
        for part, result in zip(
            (groups[0][:number], row_slots[:number]), (got[0], got[5]), strict=True
        ):
            assert torch.equal(result[:number], part)
        assert all(map(torch.equal, (tags, stamps, counts, counters, clock), arguments[3][:5]))
        _same_store(arguments, want)

    memory = (store.weights, store.states, cache_cases.HYPER, state, tables, policy, 1, False)
    check_batch = (False, BOUNDS_CHECK["warning"], torch.zeros(2, dtype=torch.int64))
    return Call("cache_prefetch_", (*memory, *batch, *check_batch), check)


def _cache_flush(draw: random.Random) -> Call:
    twin, groups, lookups = _cache(draw)
    twin.plan(lookups, groups)
    store = _store(draw, twin)
    want = store.clone()

    def check(arguments: Arguments, _: Any) -> None:
        flush(want.memory, twin.model)
        _same_store(arguments, want)

    call = (store.weights, store.states, cache_cases.HYPER, twin.tables, twin.tags)
    return Call("cache_flush_", call, check)


# Dynamic tables


@dataclass
class _Hash:
    """Tables with some keys in them, the next batch, and the model of the same."""

    tables: hash_cases.Tables
    index: list[Tensor]
    batch: hash_cases.Batch
    draws: hash_cases.Draws
    slots: Tensor
    missing: tuple[Tensor, ...]

    @property
    def model(self) -> HashModel:
        index = [tensor.clone() for tensor in self.index]
        return HashModel.of(index, self.tables.order, self.tables.insert_policy)

    @property
    def batch_scores(self) -> list[int]:
        return self.batch.scores(len(self.tables.sizes))


def _hash(draw: random.Random) -> _Hash:
    order = draw.choice(list(HASH_ORDER))
    sizes = ((1, 3, 819), (2, 2, 1024)) if draw.random() < 0.7 else ((1, 7, 700),)
    tables = hash_cases.Tables(sizes, order, draw.choice(list(INSERT_POLICY)))
    twin = hash_cases.Twin(tables, _HASH_OPS, drawn_seed(draw))
    draws = hash_cases.Draws(len(sizes), most=draw.choice([5, 80]), seed=drawn_seed(draw))
    for _ in range(draw.randint(0, 3)):
        twin.train(draws.batch(), None)
    batch = draws.batch()
    used = [tensor.clone() for tensor in twin.index]
    scores = torch.zeros(len(sizes), dtype=torch.int64)
    slots, *missing = _ops.hash_touch_(used, *batch.keys, batch.counts, scores, HASH_ORDER[order])
    return _Hash(tables, twin.index, batch, draws, slots, tuple(missing))


_HASH_OPS: dict[str, Callable[..., Any]] = {
    name: getattr(_ops, f"hash_{name}").default for name in hash_cases.OPS
}


def _same_index(got: Sequence[Tensor], model: HashModel, *, has_scores: bool = False) -> None:
    tags, entries, *rest = model.index(has_scores=has_scores)
    assert torch.equal(got[0], tags)
    assert torch.equal(got[1][tags != 0], entries[tags != 0])
    for mine, theirs in zip(got[2:], rest, strict=True):
        same(mine, theirs)


def _hash_find(draw: random.Random) -> Call:
    case = _hash(draw)

    def check(_: Arguments, got: Any) -> None:
        assert got.tolist() == case.model.find(case.batch.positions)

    return Call("hash_find", (case.index, *case.batch.keys), check)


def _hash_find_batch(draw: random.Random) -> Call:
    case = _hash(draw)
    ids, starts, tables = case.batch.keys
    features = torch.zeros(tables.numel(), len(FeatureColumn), dtype=torch.int64)
    offsets = starts if draw.random() < 0.5 else starts.int()

    def check(_: Arguments, got: Any) -> None:
        if got:
            assert got[2].tolist() == case.model.find(case.batch.positions)

    fallback = None  # or no fallback rows in any table
    if draw.random() < 0.5:
        fallback = torch.zeros(case.index[2].shape[0], 2, dtype=torch.int64)
    return Call("hash_find_batch", (case.index, features, ids, offsets, tables, fallback), check)


def _hash_use(draw: random.Random) -> Call:
    case = _hash(draw)
    model, batch = case.model, case.batch

    def check(arguments: Arguments, got: Any) -> None:
        slots, *missing = got
        assert slots.tolist() == model.touch(batch.positions, batch.uses, case.batch_scores)
        _same_index(arguments[0], model)
        misses = model.misses(batch.positions, slots.tolist(), batch.uses)
        hash_cases.Twin(case.tables, {})._compare_misses(missing, misses)

    call = (
        case.index,
        *batch.keys,
        batch.counts,
        batch.batch_scores,
        HASH_ORDER[case.tables.order],
    )
    return Call("hash_touch_", call, check)


def _admitted(case: _Hash, misses: list[list[Any]]) -> Tensor | None:
    admitted = case.draws.admitted(case.batch.ids.numel())
    flat = [miss for missing in misses for miss in missing]
    for miss, into in zip(flat, [] if admitted is None else admitted.tolist(), strict=False):
        miss.admitted = into
    return admitted


def _hash_grow(draw: random.Random) -> Call:
    case = _hash(draw)
    model, batch, rows = case.model, case.batch, hash_cases.Rows(case.tables)
    misses = model.misses(batch.positions, case.slots.tolist(), batch.uses)
    admitted = _admitted(case, misses)
    before = list(zip(batch.positions, case.slots.tolist(), strict=True))

    def check(arguments: Arguments, _: Any) -> None:
        moved = model.grow(misses)
        assert arguments[6].tolist() == [moved[t].get(slot, slot) for (t, _), slot in before]
        _same_index(arguments[0], model)

    offsets = case.missing[3]
    call = (
        case.index,
        rows.row_buffers,
        rows.layout,
        *batch.keys,
        case.slots.clone(),
        offsets,
        admitted,
    )
    return Call("hash_grow_", call, check)


def _hash_place(draw: random.Random) -> Call:
    case = _hash(draw)
    model, batch = case.model, case.batch
    first, groups, totals, offsets = case.missing
    misses = model.misses(batch.positions, case.slots.tolist(), batch.uses)
    admitted = _admitted(case, misses)
    twin = hash_cases.Twin(case.tables, {})

    def check(arguments: Arguments, got: Any) -> None:
        model.insert(misses, case.batch_scores)
        twin._compare_placed(got[:3], misses)
        _same_index(arguments[0], model)

    codes = (HASH_ORDER[case.tables.order], INSERT_POLICY[case.tables.insert_policy])
    call = (case.index, batch.ids, first, totals, offsets, admitted, batch.batch_scores, *codes)
    return Call("hash_insert_", (*call, case.slots, groups), check)


def _hash_touch_batch(draw: random.Random) -> Call:
    case = _hash(draw)
    ids, starts, tables = case.batch.keys
    features = torch.zeros(tables.numel(), len(FeatureColumn), dtype=torch.int64)
    model, positions = case.model, case.batch.positions

    def check(arguments: Arguments, got: Any) -> None:
        if got:
            slots = model.touch(positions, [1] * len(positions), case.batch_scores)
            missing = Counter(p for p, slot in zip(positions, slots, strict=True) if slot < 0)
            _, keys, uses, tables_of_keys, *lowest = (tensor.tolist() for tensor in got)
            assert sorted(missing.items()) == sorted(
                zip(zip(tables_of_keys, keys, strict=True), uses, strict=True)
            )
            thresholds = starts.diff().repeat_interleave(starts.diff()).tolist()
            for values in lowest:
                for value, *miss in zip(values, tables_of_keys, keys, strict=True):
                    users = (t for t, p in zip(thresholds, positions, strict=True) if [*p] == miss)
                    assert value == min(users)
        return _same_index(arguments[0], model)

    batch = (features, ids, starts, tables, case.batch.batch_scores)
    # A feature's threshold is its number of lookups.
    thresholds = draw.choice([None, starts.diff()])
    call = (case.index, *batch, HASH_ORDER[case.tables.order], thresholds)
    return Call("hash_touch_batch_", call, check)


def _hash_insert_batch(draw: random.Random, first_overflow: int | None = None) -> Call:
    """Return a batch; refused keys have no slot, or rows from `first_overflow` on per table."""
    case = _hash(draw)
    model, counts = case.model, case.batch.counts
    ids, starts, tables = case.batch.keys
    num_tables = len(case.tables.sizes)
    offsets = starts if counts is None or draw.random() < 0.5 else starts.int()
    features = torch.zeros(tables.numel(), len(FeatureColumn), dtype=torch.int64)
    layout = torch.zeros(num_tables, 1, 5, dtype=torch.int64)
    layout[:, 0, 1:4] = torch.tensor([1, 64, 1])
    rule = rule_of(Uniform(-1.0, 1.0), DynamicSpec(64, 1))
    rules = torch.tensor([[rule]] * num_tables, dtype=torch.float64)
    positions, scores = case.batch.positions, case.batch_scores

    def check(arguments: Arguments, got: Any) -> None:
        if not got:
            return _same_index(arguments[0], model)
        slots = model.touch(positions, [1] * len(positions), scores)
        misses = model.misses(positions, slots, [1] * len(positions))
        model.insert(misses, scores)
        found = model.find(positions)
        if first_overflow is not None:
            refused = dict.fromkeys(p for p, slot in zip(positions, found, strict=True) if slot < 0)
            rows = [itertools.count(first_overflow) for _ in range(num_tables)]
            row_of = {(table, key): next(rows[table]) for table, key in refused}
            found = [row_of.get(p, slot) for p, slot in zip(positions, found, strict=True)]
        assert got[2].tolist() == found
        if first_overflow is None and arguments[-1] and any(misses):
            keys_of_misses = [miss.key for misses_of_table in misses for miss in misses_of_table]
            assert ids[got[-7]].tolist() == keys_of_misses
        return _same_index(arguments[0], model)

    codes = (HASH_ORDER[case.tables.order], INSERT_POLICY[case.tables.insert_policy])
    batch = (features, ids, offsets, tables, case.batch.batch_scores)
    call = (case.index, [torch.zeros(64)], *batch, *codes, layout, rules, 5, None, None, None)
    return Call("hash_insert_batch_", (*call, draw.random() < 0.5), check)


def _values(draw: random.Random, rows: int) -> Tensor:
    torch.manual_seed(drawn_seed(draw))
    return torch.randn(rows, draw.choice([1, 4, 7])).to(draw.choice(FLOATS))


def _hash_find_rows(draw: random.Random) -> Call:
    case = _hash(draw)
    values = _values(draw, case.index[0].numel())

    def check(_: Arguments, got: Any) -> None:
        firsts = case.index[2][:, 0] * hash_cases.SLOTS_PER_BUCKET
        slots = torch.tensor(case.model.find(case.batch.positions), dtype=torch.int64)
        tables = torch.tensor([t for t, _ in case.batch.positions], dtype=torch.int64)
        at = torch.where(slots >= 0, slots + firsts[tables], -1)
        same(got[0], hash.read_rows(values, at, 0.5))
        same(got[1], slots >= 0)

    return Call("hash_find_rows", (case.index, *case.batch.keys, values, 0.5), check)


def _slots_of_rows(draw: random.Random, rows: int) -> Tensor:
    count = draw.choice([0, 1, 40])
    return torch.tensor([draw.randrange(-1, rows) for _ in range(count)], dtype=torch.int64)


def _hash_read_rows(draw: random.Random) -> Call:
    values = _values(draw, 9)
    slots = _slots_of_rows(draw, 9)

    def check(_: Arguments, got: Any) -> None:
        same(got, hash.read_rows(values, slots, -2.0))

    return Call("hash_read_rows", (values, slots, -2.0), check)


def _hash_start_rows(draw: random.Random) -> Call:
    values = _values(draw, 9)
    slots = _slots_of_rows(draw, 9)
    count = slots.numel()
    starting = torch.randn(count, values.size(1)).to(values.dtype)
    # Positions of a slot that are missing have one group; its first position comes first.
    is_new = [draw.random() < 0.5 for _ in range(9)]
    numbers: dict[int, int] = {}
    groups, first = torch.full((count,), -1, dtype=torch.int32), torch.zeros(count).long()
    for position, slot in enumerate(slots.tolist()):
        if slot >= 0 and is_new[slot]:
            number = numbers.setdefault(slot, len(numbers))
            groups[position] = number
            if int((groups == number).sum()) == 1:
                first[number] = position
    want, reads = values.clone(), draw.random() < 0.7

    def check(arguments: Arguments, got: Any) -> None:
        rows = hash.start_rows_(want, slots, groups, first, starting, 1.0)
        same(got, rows if reads else rows[:0])
        same(arguments[0], want)

    call = (values, slots, groups, first, starting, 1.0, reads)
    return Call("hash_start_rows_", call, check)


def _hash_write_rows(draw: random.Random) -> Call:
    values = _values(draw, 9)
    slots = _slots_of_rows(draw, 9)
    rows, want = torch.randn(slots.numel(), values.size(1)).to(values.dtype), values.clone()

    def check(arguments: Arguments, _: Any) -> None:
        hash.write_rows_(want, slots, rows)
        same(arguments[0], want)

    return Call("hash_write_rows_", (values, slots, rows), check)


def _hash_add_rows(draw: random.Random) -> Call:
    values = _values(draw, 9)
    slots = _slots_of_rows(draw, 9)
    rows, want = torch.randn(slots.numel(), values.size(1)).to(values.dtype), values.clone()

    def check(arguments: Arguments, _: Any) -> None:
        hash.add_rows_(want, slots, rows)
        same(arguments[0], want)

    return Call("hash_add_rows_", (values, *group(slots, 9), rows), check)


def _hash_evicted_rows(draw: random.Random) -> Call:
    values = [_values(draw, 64) for _ in range(draw.choice([1, 3]))]
    count = draw.choice([0, 1, 40])
    slots = torch.randperm(64)[:count]
    status = torch.randint(2, 6, (count,), dtype=torch.uint8)
    words = torch.randint(-99, 99, (count, 3))

    def check(_: Arguments, got: Any) -> None:
        keys, rows, *parts, number = got
        wanted = hash.evicted_rows(values, slots, status, words)
        for part, want in zip(
            (keys, *rows, *parts), (wanted[0], *wanted[1], *wanted[2:]), strict=True
        ):
            assert int(number) == want.size(0)
            same(part[: want.size(0)], want)

    return Call("hash_evicted_rows", (values, slots, status, words), check)


def _hash_erase(draw: random.Random) -> Call:
    case = _hash(draw)
    model = case.model

    def check(arguments: Arguments, got: Any) -> None:
        assert got.tolist() == model.erase(case.batch.positions)
        _same_index(arguments[0], model)

    return Call("hash_erase_", (case.index, *case.batch.keys), check)


def _hash_expire(draw: random.Random) -> Call:
    case = _hash(draw)
    model, t = case.model, draw.randrange(len(case.tables.sizes))
    first = draw.randint(0, model.tables[t].buckets)
    window = (first, draw.randint(0, model.tables[t].buckets - first))
    before = draw.randint(0, 5)

    def check(arguments: Arguments, got: Any) -> None:
        freed = model.expire(t, window, before)
        assert got.nonzero().flatten().tolist() == [
            s - first * hash_cases.SLOTS_PER_BUCKET for s in freed
        ]
        _same_index(arguments[0], model)

    return Call("hash_expire_", (case.index, t, *window, before), check)


def _hash_initial_rows(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    count, dims = draw.choice([0, 1, 9]), [draw.choice([1, 4, 7]) for _ in range(2)]
    row_buffers = [torch.zeros(12 * dim, dtype=draw.choice(FLOATS)) for dim in dims]
    layout = torch.tensor([[[0, dim, 12, dim, k] for k, dim in enumerate(dims)]])
    spec = DynamicSpec(100, 8)
    rules = [rule_of(draw.choice([Uniform(), Normal()]), spec) for _ in dims]
    ids = torch.randint(-(2**63), 2**63 - 1, (count,))
    slots = torch.randperm(12)[:count] - 1
    rest = (ids, torch.arange(count), torch.tensor([0, count]), slots, drawn_seed(draw))
    rule_tensor = torch.tensor([rules], dtype=torch.float64)
    want = [plane.clone() for plane in row_buffers]

    def check(arguments: Arguments, _: Any) -> None:
        hash.initial_rows_(want, layout, rule_tensor, *rest)
        for got, plane in zip(arguments[0], want, strict=True):
            close(got, plane)

    return Call("hash_initial_rows_", (row_buffers, layout, rule_tensor, *rest), check)


def _sketch_count(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    count, threshold = draw.choice([0, 1, 9, 3000]), draw.choice([0, 1, 5, 200])
    counters = torch.randint(
        0, 4, (40,), dtype=draw.choice([torch.uint8, torch.int32, torch.int64])
    )
    layout = torch.tensor([[2, 7, 3, threshold, 11], [23, 17, 1, threshold, -9], [0, 0, 0, 0, 0]])
    keys = torch.randperm(4000)[:count] - 2000
    rest = (layout, keys, torch.randint(1, 9, (count,)), torch.randint(0, 3, (count,)))
    want = counters.clone()

    def check(arguments: Arguments, got: Any) -> None:
        same(got, hash.sketch_count_(want, *rest))
        same(arguments[0], want)

    return Call("sketch_count_", (counters, *rest), check)


def _hash_count(draw: random.Random) -> Call:
    generator = torch.Generator().manual_seed(drawn_seed(draw))
    tables = hash_cases.Tables(((1, 1, 1024), (2, 2, 1024)), hash_keys=(3, -9))
    model = tables.model()
    for _ in range(draw.randint(0, 3)):
        rows = torch.randperm(90, generator=generator)[:40].tolist()
        model.count([(draw.randrange(2), row) for row in rows], [1] * len(rows))
    keys = torch.randperm(90, generator=generator)[: draw.choice([0, 1, 60])]
    numbers = torch.randint(-1, 2, keys.shape, generator=generator)
    uses = torch.randint(0, 2 ** draw.choice([2, 63]) - 1, keys.shape, generator=generator)
    index = model.index(has_scores=True)

    def check(arguments: Arguments, got: Any) -> None:
        order = numbers.argsort(stable=True)
        order = order[numbers[order] >= 0]
        batch = list(zip(numbers[order].tolist(), keys[order].tolist(), strict=True))
        want = torch.zeros_like(keys)
        want[order] = torch.tensor(model.count(batch, uses[order].tolist()), dtype=torch.int64)
        same(got[0], want)
        _same_index(arguments[0], model, has_scores=True)

    return Call("hash_count_", (index, keys, uses, numbers), check)


def _tier_swap(draw: random.Random) -> Call:
    drawn = test_tiers.draw_swap(draw.choice(FLOATS), draw.choice([1, 6]), draw.choice([0, 1, 90]))
    buffers, *rest = drawn
    want_buffers = [buffer.clone() for buffer in buffers]
    want = tiers.swap_(want_buffers, *rest)

    def check(arguments: Arguments, got: Any) -> None:
        for one, other in zip((*got, *arguments[0]), (*want, *want_buffers), strict=True):
            same(one.flatten().clone().view(torch.uint8), other.flatten().clone().view(torch.uint8))

    return Call("tier_swap_", drawn, check)


def _empty_stores(num_tables: int, first_overflow: int) -> tuple[Any, ...]:
    """Return indices, records, orders and first overflow rows of empty stores."""
    stores = [test_tiers.StoreInMemory(32, Eviction.LRU).index.tensors() for _ in range(num_tables)]
    records = [torch.zeros(32, 20, dtype=torch.uint8) for _ in range(num_tables)]
    indices = [tensor for store in stores for tensor in store]
    return indices, records, [HASH_ORDER["lru"]] * num_tables, [first_overflow] * num_tables


def _tier_insert_batch(draw: random.Random) -> Call:
    """Return a batch in front of empty stores, so that no row moves."""
    rows = 1 << 14
    plain = _hash_insert_batch(draw, first_overflow=rows // 2)
    index, _, *rest, layout, rules, seed = plain.arguments[:12]
    num_tables = index[2].shape[0]
    layout = layout.clone()
    layout[:, 0, 2] = rows
    no_rows = [torch.empty(0, 3, dtype=torch.int64)] * num_tables
    in_store = (*_empty_stores(num_tables, rows // 2), no_rows, draw.choice([False, True]))
    call = (index, [torch.zeros(rows)], *rest, layout, rules, seed, *in_store)
    return Call("tier_insert_batch_", call, plain.check)


def _tier_find_batch(draw: random.Random) -> Call:
    """Return a batch in front of empty stores, so that no row is copied."""
    rows = 1 << 14
    plain, inserting = _hash_find_batch(draw), _hash_insert_batch(draw)
    index, *batch = plain.arguments
    num_tables = index[2].shape[0]
    layout = torch.zeros(num_tables, 1, 5, dtype=torch.int64)
    layout[:, 0, 1:4] = torch.tensor([1, rows, 1])
    rules = inserting.arguments[10][:1].expand(num_tables, -1, -1).contiguous()
    call = (index, [torch.zeros(rows)], *batch, layout, rules)
    return Call("tier_find_batch_", (*call, *_empty_stores(num_tables, rows // 2)), plain.check)


def _tier_put(draw: random.Random) -> Call:
    eviction = draw.choice([Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU])
    store, twin_store = (test_tiers.StoreInMemory(64, eviction) for _ in range(2))
    for number, count in enumerate([40, draw.choice([1, 90])]):
        rows = test_tiers.draw_rows(count, number, number)
        want = twin_store.put_op_by_op(*rows)
        if number == 0:
            store.put(*rows)

    def check(_: Arguments, got: Any) -> None:
        for one, other in zip(got, want, strict=True):
            same(one, other)

    order = HASH_ORDER[store.index.order]
    return Call("tier_put_", (store.index.tensors(), store.records, *rows, order), check)


def _tier_read(draw: random.Random) -> Call:
    records, slots, *_ = test_tiers.draw_records(draw.choice([0, 1, 90]))
    want = tiers.read(records, slots, 13)

    def check(_: Arguments, got: Any) -> None:
        for one, other in zip(got, want, strict=True):
            same(one, other)

    return Call("tier_read", (records, slots, 13), check)


def _tier_write(draw: random.Random) -> Call:
    drawn = test_tiers.draw_records(draw.choice([0, 1, 90]))
    want = drawn[0].clone()
    tiers.write_(want, *drawn[1:])

    def check(arguments: Arguments, _: Any) -> None:
        same(arguments[0], want)

    return Call("tier_write_", drawn, check)


STATE_CALLS: dict[str, Callable[[random.Random], Call]] = {
    "cache_plan_": _cache_plan,
    "cache_evictions": _cache_evictions,
    "cache_locate": _cache_locate,
    "cache_lookup_slots": _cache_lookup_slots,
    "cache_move_": _cache_move,
    "cache_flush_": _cache_flush,
    "cache_prefetch_": _cache_prefetch,
    "hash_find": _hash_find,
    "hash_find_batch": _hash_find_batch,
    "hash_touch_batch_": _hash_touch_batch,
    "hash_touch_": _hash_use,
    "hash_grow_": _hash_grow,
    "hash_insert_": _hash_place,
    "hash_insert_batch_": _hash_insert_batch,
    "hash_erase_": _hash_erase,
    "hash_expire_": _hash_expire,
    "hash_find_rows": _hash_find_rows,
    "hash_read_rows": _hash_read_rows,
    "hash_start_rows_": _hash_start_rows,
    "hash_write_rows_": _hash_write_rows,
    "hash_add_rows_": _hash_add_rows,
    "hash_evicted_rows": _hash_evicted_rows,
    "hash_initial_rows_": _hash_initial_rows,
    "hash_count_": _hash_count,
    "sketch_count_": _sketch_count,
    "tier_insert_batch_": _tier_insert_batch,
    "tier_find_batch_": _tier_find_batch,
    "tier_put_": _tier_put,
    "tier_swap_": _tier_swap,
    "tier_read": _tier_read,
    "tier_write_": _tier_write,
}
