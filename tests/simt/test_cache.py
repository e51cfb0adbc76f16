"""Emulated cache against the model and the reference, and bit for bit against the CPU kernels."""

import pytest
import torch

from emblib.ops import cache
from emblib.reference import cache as reference
from tests.cache_cases import HYPER, Store, Trace, Twin, group
from tests.simt import emulated_cache as emulated

TRACES = {
    "small": Trace(),
    "lfu": Trace(policy="lfu"),
    "one_set": Trace(((50, 9), (80, 4)), 1, "lru", 8, 150, 1.0, seed=1),
    "one_set_lfu": Trace(((50, 9), (80, 4)), 1, "lfu", 10, 150, 1.0, seed=2),
    "ahead": Trace(((70, 3), (40, 5), (20, 1)), 3, "lru", 12, 70, 2.0, ahead=2, seed=3),
    "ahead_lfu": Trace(((70, 3), (40, 5), (20, 1)), 3, "lfu", 12, 70, 2.0, ahead=2, seed=4),
    "many_tables": Trace(tuple((9 + t, 1 + t) for t in range(12)), 2, "lfu", 6, 200, 1.0, seed=5),
    "wide": Trace(((60, 300), (60, 129)), 1, "lru", 5, 90, 2.0, seed=6),
    "large_batch": Trace(((3000, 2),), 5, "lfu", 3, 4000, 1.0, seed=7),
}


@pytest.mark.parametrize("name", TRACES)
def test_plan(name: str) -> None:
    twin = Twin(TRACES[name], emulated.plan_)
    for lookups in TRACES[name].lookup_batches():
        groups = group(lookups)
        _, row_slots, _ = twin.plan(lookups, groups)
        located = emulated.locate(twin.tags, twin.tables, groups[0], groups[3])
        assert torch.equal(located, row_slots)
        slots = emulated.lookup_slots(row_slots, *groups[1:])
        assert torch.equal(slots, cache.lookup_slots(row_slots, *groups[1:]))


def test_plan_of_nothing() -> None:
    twin = Twin(Trace(), emulated.plan_)
    for lookups in (torch.zeros(0, dtype=torch.int64), torch.tensor([-1, -1, 0, 6])):
        twin.plan(lookups, group(lookups))


DTYPES = {
    "same": (torch.float32, torch.float32, torch.float32),
    "half": (torch.float16, torch.float16, torch.bfloat16),
    "wider_cache": (torch.bfloat16, torch.float32, torch.float32),
    "narrower_cache": (torch.float32, torch.float16, torch.float16),
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["small", "one_set_lfu", "ahead", "wide"])
def test_move_and_flush(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    twin = Twin(TRACES[name], emulated.plan_)
    store = Store.make(twin, *dtypes)
    want = store.clone()
    for lookups in TRACES[name].lookup_batches():
        groups = group(lookups)
        plan, *moves = twin.plan(lookups, groups)
        arguments = (HYPER, twin.tables, groups[0], groups[3], *moves)
        emulated.move_(store.weights, store.states, *arguments)
        reference.move(want.memory, plan)
        assert store.same(want)
    emulated.flush_(store.weights, store.states, HYPER, twin.tables, twin.tags)
    reference.flush(want.memory, twin.model)
    assert store.same(want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_at_random_as_the_cpu_does(dtype: torch.dtype) -> None:
    twin = Twin(TRACES["wide"], cache.plan_)
    store = Store.make(twin, dtype, torch.float32, torch.float32)
    want, hyper = store.clone(), HYPER.clone()
    hyper[4] = 77
    for step, lookups in enumerate(TRACES["wide"].lookup_batches()):
        groups = group(lookups)
        _, *moves = twin.plan(lookups, groups)
        hyper[1] = step
        arguments = (hyper, twin.tables, groups[0], groups[3], *moves)
        emulated.move_(store.weights, store.states, *arguments)
        cache.move_(want.weights, want.states, *arguments, [])
        for side in (store, want):
            side.weights[3] += 0.001
        assert store.same(want)
    emulated.flush_(store.weights, store.states, hyper, twin.tables, twin.tags)
    cache.flush_(want.weights, want.states, hyper, twin.tables, twin.tags)
    assert store.same(want)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["small", "one_set_lfu", "wide"])
def test_rows_that_earlier_updates_may_write_are_fetched_later(
    name: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    twin = Twin(TRACES[name], emulated.plan_)
    store = Store.make(twin, *dtypes)
    want = store.clone()
    conflicts = torch.full((twin.tags.size(0),), -1)
    for step, lookups in enumerate(TRACES[name].lookup_batches()):
        groups = group(lookups)
        plan, row_slots, evicted = twin.plan(lookups, groups)
        rows, count = groups[0], groups[3]
        later = (torch.empty_like(rows), torch.empty_like(row_slots), torch.zeros_like(count))
        oldest = torch.tensor([step, step - 1])  # of two batches in flight
        sets_of_conflicts = conflicts >= step - 1
        memory = (store.weights, store.states, HYPER, twin.tables)
        arguments = (*memory, rows, count, row_slots, evicted)
        emulated.move_(*arguments, (oldest, conflicts, *later))
        listed = dict(zip(*(t[: int(later[2])].tolist() for t in later[:2]), strict=True))
        fetched = {row: plan.slots[row] for row in plan.fetched}
        expected = {
            r: s for r, s in fetched.items() if s is not None and sets_of_conflicts[s // 32]
        }
        # A set that gets its first conflict now may be taken for one of earlier ones.
        noted = (conflicts == step).nonzero().flatten().tolist()
        assert expected.items() <= listed.items() <= fetched.items()
        assert all(listed[r] // 32 in noted for r in listed.keys() - expected.keys())
        assert bool(noted) == any(s is None for s in plan.slots.values())
        emulated.move_(*memory, *later[:1], later[2], later[1], rows[:0])
        reference.move(want.memory, plan)
        assert store.same(want)
