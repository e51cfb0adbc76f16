"""The ops of the cache against the model in plain Python: every slot, stamp, counter and bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib import ops
from emblib.ops import cache, tbe
from emblib.ops.codes import BOUNDS_CHECK, CACHE_POLICY
from emblib.reference import cache as reference
from tests.cache_cases import HYPER, UNCACHED, Groups, Store, Trace, Twin, group, on
from tests.conftest import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

devices = st.sampled_from([torch.device(device) for device in DEVICES])
traces = st.builds(
    Trace,
    sizes=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 9)), min_size=1, max_size=4).map(
        tuple
    ),
    sets=st.integers(1, 5),
    policy=st.sampled_from(["lru", "lfu"]),
    batches=st.integers(1, 25),
    lookups=st.integers(0, 200),
    skew=st.sampled_from([1.0, 2.0, 5.0]),
    ahead=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=150, deadline=None)
@given(traces, devices)
def test_plans_as_the_model_does(trace: Trace, device: torch.device) -> None:
    twin = Twin(trace, on(device, cache.plan_))
    for lookups in trace.lookup_batches():
        groups = group(lookups)
        _, row_slots, _ = twin.plan(lookups, groups)
        located = on(device, cache.locate)(twin.tags, twin.tables, groups[0], groups[3])
        assert torch.equal(located, row_slots)
        slots = on(device, cache.lookup_slots)(row_slots, *groups[1:])
        placed = {row: twin.model.locate(row) for row in lookups.tolist()}
        assert slots.tolist() == [
            -1 if placed[row] is None else placed[row] for row in lookups.tolist()
        ]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_long_trace(device: torch.device, policy: str) -> None:
    trace = Trace(((300, 4), (500, 4)), 6, policy, 400, 150, 3.0, ahead=2, seed=4)
    twin = Twin(trace, on(device, cache.plan_))
    for lookups in trace.lookup_batches():
        twin.plan(lookups, group(lookups))
    assert twin.model.totals["conflict_misses"] > 0
    assert twin.model.totals["write_backs"] > 100


@settings(max_examples=60, deadline=None)
@given(traces, st.tuples(*[st.sampled_from(DTYPES)] * 3), devices)
def test_moves_as_the_reference_does(
    trace: Trace, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    twin = Twin(trace, on(device, cache.plan_))
    store = Store.make(twin, *dtypes)
    want = store.clone()
    for lookups in trace.lookup_batches():
        groups = group(lookups)
        plan, row_slots, evicted = twin.plan(lookups, groups)
        arguments = (HYPER, twin.tables, groups[0], groups[3], row_slots, evicted, [])
        on(device, cache.move_)(store.weights, store.states, *arguments)
        reference.move(want.memory, plan)
        assert store.same(want)
    on(device, cache.flush_)(store.weights, store.states, HYPER, twin.tables, twin.tags)
    reference.flush(want.memory, twin.model)
    assert store.same(want)


@settings(max_examples=60, deadline=None)
@given(traces, st.sampled_from(DTYPES))
def test_loses_no_update(trace: Trace, dtype: torch.dtype) -> None:
    """Batches planned ahead, updated one after the other where their rows are by then."""
    twin = Twin(trace, cache.plan_)
    store = Store.make(twin, dtype, dtype, torch.float32)
    plain = store.clone()
    planned: list[Groups] = []

    def train() -> None:
        rows, _, _, count = planned.pop(0)
        slots = cache.locate(twin.tags, twin.tables, rows, count)
        for row, slot in zip(rows[: int(count)].tolist(), slots.tolist(), strict=False):
            store.touch(row, slot, twin.now)
            plain.touch(row, -1, twin.now)

    for lookups in trace.lookup_batches():
        groups = group(lookups)
        _, row_slots, evicted = twin.plan(lookups, groups)
        arguments = (HYPER, twin.tables, groups[0], groups[3], row_slots, evicted, [])
        cache.move_(store.weights, store.states, *arguments)
        planned.append(groups)
        if len(planned) > trace.ahead:
            train()
    while planned:
        train()
    cache.flush_(store.weights, store.states, HYPER, twin.tables, twin.tags)
    assert store.same(plain, tiers=3)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_same_bits_on_any_number_of_threads(policy: str, thread_counts: list[int]) -> None:
    trace = Trace(((60_000, 12), (50_000, 16)), 700, policy, 3, 90_000, 1.5, seed=8)
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        twin = Twin(trace, cache.plan_)
        store = Store.make(twin, torch.float16, torch.float32, torch.bfloat16)
        hyper, out = HYPER.clone(), []
        hyper[4] = 3
        for lookups in trace.lookup_batches():
            rows, segments, positions, count = group(lookups)
            state = (twin.tags, twin.stamps, twin.counts, twin.counters, torch.tensor([1, 1]))
            moves = cache.plan_(*state, twin.tables, rows, segments, count, CACHE_POLICY[policy])
            arguments = (hyper, twin.tables, rows, count, *moves, [])
            cache.move_(store.weights, store.states, *arguments)
            out += [*moves, cache.lookup_slots(moves[0], segments, positions, count)]
        cache.flush_(store.weights, store.states, hyper, twin.tables, twin.tags)
        out += [twin.tags, twin.stamps, twin.counters, *store.weights, *store.states]
        results.append(out)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_hashes_spread_rows_evenly() -> None:
    for sets in (1, 3, 64, 100, 1000):
        found = torch.tensor([reference.set_of(row, sets) for row in range(200 * sets)])
        counts = torch.bincount(found, minlength=sets)
        assert counts.numel() == sets
        assert 100 < int(counts.min()) <= 200 <= int(counts.max()) < 300


def _one_set(policy: str) -> tuple[Twin, Tensor]:
    """A cache of one set that holds cached rows 0 to 31, and the linear row of the first."""
    twin = Twin(Trace(((100, 4),), 1, policy), cache.plan_)
    first = torch.tensor(UNCACHED)
    for row in range(32):
        lookups = first + torch.full((1 + row % 3,), row)
        twin.plan(lookups, group(lookups))
    return twin, first


def test_lru_evicts_the_one_not_used_for_longest() -> None:
    twin, first = _one_set("lru")
    for new, old in ((40, 0), (41, 1), (2, None), (42, 3)):
        plan, _, _ = twin.plan(lookups := (first + new).view(1), group(lookups))
        brought_in = {} if old is None else {int(first) + new: int(first) + old}
        assert plan.fetched == brought_in


def test_lfu_keeps_what_is_used_more_often() -> None:
    twin, first = _one_set("lfu")
    lookups = first + torch.arange(0, 32, 3).repeat_interleave(5)  # all but 1, 4, ... and 2, 5, ...
    twin.plan(lookups, group(lookups))
    plan, _, _ = twin.plan(lookups := (first + 50).view(1), group(lookups))
    assert plan.slots == {int(first) + 50: None}, "used once, all others at least twice"
    plan, _, _ = twin.plan(lookups, group(lookups))
    assert plan.fetched == {int(first) + 50: int(first) + 31}, "of equal ones the last one used"


def test_batches_in_flight_keep_their_rows() -> None:
    twin = Twin(Trace(((100, 4),), 1, "lru", ahead=1), cache.plan_)
    for start, conflicts in ((0, 0), (20, 8), (40, 0)):
        lookups = UNCACHED + torch.arange(start, start + 20)
        plan, _, _ = twin.plan(lookups, group(lookups))
        assert sum(slot is None for slot in plan.slots.values()) == conflicts


def test_counts_saturate() -> None:
    twin, first = _one_set("lfu")
    twin.counts[60] = twin.model.counts[int(first) + 60] = 2**31 - 3
    for _ in range(3):
        lookups = torch.full((5,), int(first) + 60)
        twin.plan(lookups, group(lookups))
    assert int(twin.stamps.max()) >> 32 == 2**31 - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_write_back_rounds_without_bias(dtype: torch.dtype) -> None:
    rows, dim = 20_000, 6
    tables = torch.tensor([[0, 0, rows, dim, 0, 1, 0, 8]])
    sets = rows // 32
    tags = torch.arange(sets * 32).view(sets, 32)
    empty = torch.empty(0, dtype=dtype)
    value = 1.0 + 2.0**-12
    weights = [empty, torch.zeros(rows * dim, dtype=dtype), empty]
    weights.append(torch.full((sets * 32 * 8,), value))
    hyper = HYPER.clone()
    cache.flush_(weights, [], hyper, tables, tags)
    assert (weights[1] == 1.0).all(), "to nearest"
    hyper[4] = 11
    cache.flush_(weights, [], hyper, tables, tags)
    drawn = weights[1].double()
    spread = float(drawn.std()) / drawn.numel() ** 0.5
    assert abs(float(drawn.mean()) - value) < 5 * spread
    hyper[1] += 1
    again = weights[1].clone()
    cache.flush_(weights, [], hyper, tables, tags)
    assert not torch.equal(again, weights[1]), "another step draws other numbers"


def _arguments(policy: str) -> tuple[Twin, Store, Groups, tuple[Tensor, Tensor]]:
    twin = Twin(Trace(((60, 5), (40, 8)), 2, policy), cache.plan_)
    store = Store.make(twin, torch.float16, torch.float32, torch.float32)
    lookups = UNCACHED + torch.arange(90).repeat(2)
    groups = group(lookups)
    _, row_slots, evicted = twin.plan(lookups, groups)
    return twin, store, groups, (row_slots, evicted)


def test_a_flush_needs_hyper(device: torch.device) -> None:
    """On a GPU the numbers are read by the kernel, to which an empty tensor is a null pointer."""
    twin, store, _, _ = _arguments("lru")
    arguments = (store.weights, store.states, HYPER[:0], twin.tables, twin.tags)
    with pytest.raises(RuntimeError, match="hyper must have at least 5 entries"):
        on(device, cache.flush_)(*arguments)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_evictions_are_those_of_the_plan_and_change_nothing(policy: str, ahead: int) -> None:
    def plan(*arguments: Any) -> tuple[Tensor, Tensor]:
        before = [x.clone() for x in arguments if isinstance(x, Tensor)]
        evicted = cache.evictions(*arguments)
        after = [x for x in arguments if isinstance(x, Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        row_slots, planned = cache.plan_(*arguments)
        assert torch.equal(evicted, planned)
        return row_slots, planned

    trace = Trace(((60, 5), (150, 8)), 3, policy, batches=30, ahead=ahead, seed=5)
    twin = Twin(trace, plan)
    for lookups in trace.lookup_batches():
        twin.plan(lookups, group(lookups))
    assert int(twin.counters[-1, cache.COUNTERS.index("write_backs")]) > 50


def test_opcheck() -> None:
    policy = "lfu"
    twin, store, (rows, segments, lookups, count), moves = _arguments(policy)
    state = (twin.tags, twin.stamps, twin.counts, twin.counters, torch.tensor([3, 3]))
    batch = (twin.tables, rows, segments, count, CACHE_POLICY[policy])
    memory = (store.weights, store.states, HYPER, twin.tables)
    located = (twin.tags, twin.tables, rows, count)
    torch.library.opcheck(torch.ops.emblib.cache_plan_.default, (*state, *batch))
    torch.library.opcheck(torch.ops.emblib.cache_evictions.default, (*state, *batch))
    torch.library.opcheck(torch.ops.emblib.cache_locate.default, located)
    slots = (moves[0], segments, lookups, count)
    torch.library.opcheck(torch.ops.emblib.cache_lookup_slots.default, slots)
    torch.library.opcheck(torch.ops.emblib.cache_move_.default, (*memory, rows, count, *moves, []))
    torch.library.opcheck(torch.ops.emblib.cache_flush_.default, (*memory, twin.tags))


def _prefetch_arguments(policy: str, device: torch.device, ids: list[int]) -> tuple[Any, ...]:
    """The arguments of `cache_prefetch_` up to `check`: a batch of one feature per table."""
    twin, store, _, _ = _arguments(policy)
    state = [twin.tags, twin.stamps, twin.counts, twin.counters, torch.tensor([3, 3])]
    state = [t.to(device) for t in (*state, torch.full((2,), -1))]
    pinned = [t if device.type == "cpu" else t.pin_memory() for t in store.weights[1:3]]
    weights = [store.weights[0].to(device), *pinned, store.weights[3].to(device)]
    tables, indices = twin.tables.to(device), torch.tensor(ids).to(device)
    offsets = (torch.arange(4) * (len(ids) // 3)).to(device)
    memory = (weights, [], HYPER.to(device), state, tables)
    batch = (tables, indices, offsets, None, UNCACHED + 100, False)
    return (*memory, CACHE_POLICY[policy], 1, False, *batch)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_prefetch_is_its_parts(policy: str, device: torch.device) -> None:
    ids = [1, 2, 3, 50, 7, 50, 30, -1, 31]
    arguments = _prefetch_arguments(policy, device, ids)
    weights, _, hyper, state, tables = arguments[:5]
    features, indices, offsets, bag_layout, total_rows, _ = arguments[8:]
    twins = [
        t.clone() if t.is_cuda or device.type == "cpu" else t.clone().pin_memory() for t in weights
    ]
    tags, stamps, counts, counters, clock, _ = twin_state = [t.clone() for t in state]
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    results = cache.prefetch_(*arguments, BOUNDS_CHECK["warning"], violations)
    groups = tbe.tbe_group(features, indices, offsets, bag_layout, total_rows)
    rows, segments, lookups, _, count = groups
    clock.copy_(torch.tensor([4, 3]))
    plan = (tags, stamps, counts, counters, clock, tables, rows, segments, count)
    row_slots, evicted = cache.plan_(*plan, CACHE_POLICY[policy])
    later = [] if device.type == "cpu" else twin_state[4:]
    cache.move_(twins, [], hyper, tables, rows, count, row_slots, evicted, later)
    slots = cache.lookup_slots(row_slots, segments, lookups, count)
    number = int(count)
    parts = [rows[:number], segments[: number + 1], lookups, groups[3], count, row_slots, slots]
    for part, result in zip(parts, results, strict=False):
        assert torch.equal(result[: part.numel()], part)
    for part, result in zip([*twins, *twin_state], [*weights, *state], strict=True):
        assert torch.equal(result, part)
    assert len(results) == (7 if device.type == "cpu" else 8)
    assert violations.tolist() == [0, 0]


def test_a_prefetch_of_an_invalid_batch(device: torch.device) -> None:
    """The CPU prefetches nothing of it, a GPU repairs it."""
    arguments = _prefetch_arguments("lfu", device, [1, 2, 3, 50, 7, 500])
    before = [t.clone() for t in arguments[3]]
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    results = cache.prefetch_(*arguments, BOUNDS_CHECK["warning"], violations)
    if device.type == "cpu":
        assert not results
        assert all(torch.equal(a, b) for a, b in zip(before, arguments[3], strict=True))
    else:
        assert results[0][: int(results[4])].tolist() == [1, 2, 10, 57, 67, 74]
        assert violations.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (3, [], "cache must be .*, got 0 tensors"),
        (5, 7, "policy must be one of .*, got 7"),
        (6, -1, "lag must be >= 0, got -1"),
        (7, True, "on the CPU all rows move at once"),
        (0, [torch.zeros(1)] * 3, "a list of 4 tensors"),
        (9, torch.zeros(6), "indices must be int32 or int64"),
    ],
)
def test_wrong_input_of_a_prefetch(argument: int, value: object, message: str) -> None:
    """Nothing has changed then."""
    arguments = list(_prefetch_arguments("lfu", torch.device("cpu"), [1, 2, 3, 50, 7, 30]))
    state, violations = arguments[3], torch.zeros(2, dtype=torch.int64)
    before = [tensor.clone() for tensor in state]
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=message):
        cache.prefetch_(*arguments, BOUNDS_CHECK["warning"], violations)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))


def test_opcheck_of_a_prefetch() -> None:
    arguments = _prefetch_arguments("lfu", torch.device("cpu"), [1, 2, 3, 50, 7, 30])
    violations = torch.zeros(2, dtype=torch.int64)
    # It returns a list and mutates: compiled code does not call it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*arguments, BOUNDS_CHECK["warning"], violations)
    torch.library.opcheck(torch.ops.emblib.cache_prefetch_.default, arguments, test_utils=checks)


def test_empty_batch_and_no_cached_table() -> None:
    twin = Twin(Trace(), cache.plan_)
    lookups = torch.zeros(0, dtype=torch.int64)
    twin.plan(lookups, group(lookups))
    twin.plan(lookups := torch.tensor([0, 3, 3, -1]), group(lookups))
    rows, segments, _, count = group(lookups)
    uncached = twin.tables[:1]
    counters = torch.zeros(2, 8, dtype=torch.int64)
    state = (twin.tags, twin.stamps, twin.counts, counters, torch.tensor([9, 9]))
    row_slots, _ = cache.plan_(*state, uncached, rows, segments, count, CACHE_POLICY["lru"])
    assert (row_slots == -1).all()
    assert counters.tolist() == [[0] * 8, [1] + [0] * 7]


def test_wrong_input_is_refused() -> None:
    twin, store, (rows, segments, lookups, count), moves = _arguments("lru")
    clock = torch.tensor([3, 3])

    def plan(**changed: object) -> None:
        given = {
            "tags": twin.tags,
            "stamps": twin.stamps,
            "counts": torch.zeros(0, dtype=torch.int32),
            "counters": twin.counters,
            "clock": clock,
            "tables": twin.tables,
            "rows": rows,
            "segments": segments,
            "count": count,
            "policy": CACHE_POLICY["lru"],
        }
        cache.plan_(*(given | changed).values())

    def move(**changed: object) -> None:
        given = {
            "weights": store.weights,
            "states": store.states,
            "hyper": HYPER,
            "tables": twin.tables,
            "rows": rows,
            "count": count,
            "row_slots": moves[0],
            "evicted": moves[1],
            "later": [],
        }
        cache.move_(*(given | changed).values())

    shuffled, gap = twin.tables.flip(0).contiguous(), twin.tables.clone()
    far, wide = rows.clone(), twin.tables.clone()
    far[1:3], wide[1:, 7] = torch.tensor([2**63 - 1, -5]), 2**62
    gap[2, 1] += 5
    outside = twin.tables.clone()
    outside[1, 0] += 10_000
    for call, changed, message in (
        (plan, {"policy": 2}, "policy must be one of .*, got 2"),
        (plan, {"policy": CACHE_POLICY["lfu"]}, "one entry per cached row = 100, got 0"),
        (
            plan,
            {"policy": CACHE_POLICY["lfu"], "counts": torch.zeros(3).int()},
            "one entry per cached row = 100",
        ),
        (plan, {"tags": twin.tags.view(-1)}, r"tags must be \[sets, 32\]"),
        (plan, {"stamps": twin.stamps[:1]}, "stamps must have 64 entries, got 32"),
        (plan, {"counters": twin.counters[:2]}, "counters must have 32 entries"),
        (plan, {"rows": rows.flip(0).contiguous()}, "rows must be distinct, ascending"),
        (plan, {"rows": rows + 1000}, "of the tables"),
        (plan, {"rows": rows.int()}, "rows must be int64"),
        (plan, {"segments": segments[:-1]}, "segments must have"),
        (plan, {"count": count + 1000}, "count must be in"),
        (plan, {"rows": far}, "rows must be distinct, ascending"),
        (plan, {"tables": wide}, "below 2.31"),
        (plan, {"tables": shuffled}, "tables must ascend"),
        (plan, {"tables": gap}, "without a gap"),
        (move, {"weights": store.weights[:3]}, "a list of 4 tensors"),
        (move, {"states": store.states[:3]}, "4 times at most"),
        (move, {"hyper": HYPER[:2]}, "at least 5 entries"),
        (move, {"tables": outside}, "lies outside the weights of tier 1"),
        (move, {"evicted": moves[1][:3]}, "evicted must have"),
        (move, {"later": [clock, clock]}, "on the CPU all rows move at once"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changed)
    with pytest.raises(RuntimeError, match="one call of tbe_group"):
        cache.lookup_slots(moves[0], segments, lookups + 1000, count)
    far_segments = segments.clone()
    far_segments[1:3] = torch.tensor([2 * 10**9, -2 * 10**9])
    with pytest.raises(RuntimeError, match="one call of tbe_group"):
        cache.lookup_slots(moves[0], far_segments, lookups, count)


def test_foreign_tags_are_only_evicted() -> None:
    """Tags of no table have no count to write; nothing outside the counts is touched."""
    twin, _, (rows, segments, _, count), _ = _arguments("lfu")
    tags, stamps = torch.full_like(twin.tags, 1 << 40), torch.zeros_like(twin.stamps)
    state = (tags, stamps, twin.counts, twin.counters, torch.tensor([3, 3]))
    _, evicted = cache.plan_(*state, twin.tables, rows, segments, count, CACHE_POLICY["lfu"])
    assert set(evicted.tolist()) <= {1 << 40, -2}


def test_constants_agree() -> None:
    assert ops.cache.COUNTERS == reference.COUNTERS
    assert ops.cache.WAYS == reference.WAYS
