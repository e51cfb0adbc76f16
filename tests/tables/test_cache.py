"""RowCache as a module: what is in flight, sizes, counters, copies. The ops have other tests."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emblib.ops.autograd import Tiers
from emblib.ops.tbe import Groups
from emblib.optim import SGD, Adam, PartialRowwiseAdam
from emblib.optim.base import Optimizer
from emblib.specs import CacheConfig, CachePolicy, Placement, Precision, TableSpec
from emblib.tables.memory import lay_out
from emblib.tables.row_cache import CacheStats, RowCache, number_of_sets
from tests.cache_cases import group
from tests.saved import saved_and_loaded

TABLES = (
    TableSpec(40, 6, "first", Placement.MANAGED_CACHING),
    TableSpec(10, 3, "plain"),
    TableSpec(90, 5, "second", Placement.DISK),
)
LAYOUT = lay_out(TABLES)
FIRST = LAYOUT.first_cached_row


def make(
    options: CacheConfig | None = None,
    optimizer: Optimizer | None = None,
    precision: Precision | None = None,
    device: str = "cpu",
) -> RowCache:
    """The cache of TABLES."""
    optimizer = SGD(0.1) if optimizer is None else optimizer
    options = CacheConfig(sets=1) if options is None else options
    precision = Precision() if precision is None else precision
    names = [spec.name for spec in TABLES]
    return RowCache.from_options(LAYOUT, names, optimizer.states, options, precision, device)


def groups_of(rows: Tensor) -> Groups:
    """The groups of lookups of linear rows."""
    unique, segments, lookups, count = group(rows)
    return Groups(unique, segments, lookups, torch.zeros_like(lookups), count)


def enter(cache: RowCache) -> int:
    ticket = cache.new_ticket()
    cache.enter(ticket)
    return ticket


def fetch(cache: RowCache, groups: Groups) -> Tensor:
    """Bring rows of no values into the cache; return their slots."""
    optimizer = PartialRowwiseAdam(0.1)
    weights = [torch.zeros(n) for n in LAYOUT.num_elements]
    per_row = [tensor.numel() < cache.weights.numel() for tensor in cache.states]
    states = [
        torch.zeros(LAYOUT.num_rows[tier] if by_row else LAYOUT.num_elements[tier])
        for tier in range(3)
        for by_row in per_row
    ]
    memory = [*weights, cache.weights], [*states, *cache.states]
    (slots,) = cache.fetch(Tiers(*memory, optimizer.hyperparams(), torch.float32), [groups])
    return slots


def bring_in(cache: RowCache, rows: Tensor) -> Tensor:
    """The slots of the distinct rows of a batch that is let go at once."""
    ticket = enter(cache)
    slots = fetch(cache, groups_of(rows))
    cache.release(ticket)
    return slots


def test_sizes_follow_the_options() -> None:
    assert make(CacheConfig(sets=3)).tags.shape == (3, 32)
    assert make(CacheConfig(load_factor=0.2)).layout.num_sets == 1
    assert make(CacheConfig(load_factor=1.0)).layout.num_sets == math.ceil(130 / 32)
    cache = make(CacheConfig(sets=2, dtype=torch.float16), PartialRowwiseAdam(0.1))
    assert cache.weights.dtype == torch.float16
    assert cache.weights.numel() == 64 * 8, "rows begin at multiples of 16 bytes in float32"
    assert [state.numel() for state in cache.states] == [64 * 8, 64]
    assert cache.counts.numel() == 0
    lfu = make(CacheConfig(CachePolicy.LFU, sets=2), Adam(0.1), Precision(states=torch.bfloat16))
    assert lfu.counts.shape == (130,)
    assert [state.dtype for state in lfu.states] == [torch.bfloat16] * 2
    assert lfu.nbytes() == sum(tensor.nbytes for tensor in lfu.buffers())


def test_has_at_most_one_set_per_row() -> None:
    cache = make(CacheConfig(sets=2**40), Adam(0.1))
    assert cache.layout.num_sets == cache.layout.num_cached_rows == 130


def test_fits_into_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(CacheConfig(sets=2), PartialRowwiseAdam(0.1))
    slot = 8 * 4 + 16 + 8 * 4 + 4  # row, tag and stamp, element-wise and row-wise state
    assert cache.layout.bytes_per_set == 32 * slot
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 32 * slot + 7, 0))
    for options, sets in (
        (CacheConfig(sets=99), 99),
        (CacheConfig(sets=500), 100),
        (CacheConfig(sets=500, reserved_bytes=60 * 32 * slot), 40),
        (CacheConfig(sets=500, reserved_bytes=10**9), 1),
        (CacheConfig(load_factor=1.0), 5),
    ):
        assert number_of_sets(options, cache.layout, cuda) == sets
    assert number_of_sets(CacheConfig(sets=99), cache.layout, torch.device("cpu")) == 99
    large = replace(cache.layout, table_features=((0, 0, 2**45, 8, 0, 1, 0, 8),))
    assert number_of_sets(CacheConfig(), large, torch.device("cpu")) * 32 < 2**31


def test_counts_whole_and_by_table() -> None:
    cache = make()
    rows = FIRST + torch.tensor([0, 0, 3, 50, 50, 50])
    bring_in(cache, torch.cat([rows, torch.tensor([2, -1])]))  # a table without cache, and a skip
    bring_in(cache, FIRST + torch.tensor([50, 50, 51]))
    stats = cache.stats()
    assert isinstance(stats, CacheStats)
    assert (stats.calls, stats.lookups, stats.unique) == (2, 9, 5)
    assert (stats.unique_misses, stats.lookup_misses) == (4, 7)
    assert (stats.conflict_unique_misses, stats.conflict_misses, stats.write_backs) == (0, 0, 0)
    assert stats.hit_rate == pytest.approx(2 / 9)
    assert stats.unique_hit_rate == pytest.approx(1 / 5)
    assert list(stats.tables) == ["first", "second"]
    first, second = stats.tables.values()
    assert (first.calls, first.lookups, first.unique_misses) == (1, 3, 2)
    assert (second.calls, second.lookups, second.unique, second.lookup_misses) == (2, 6, 3, 4)
    events = dict(stats.events())
    assert events["lookups"] == 9
    assert events["second.unique"] == 3
    assert len(events) == 3 * 8
    cache.reset_stats()
    assert cache.stats().lookups == 0
    assert math.isnan(cache.stats().hit_rate)


def test_conflicts_and_write_backs_are_counted() -> None:
    cache = make()
    slots = bring_in(cache, FIRST + torch.arange(40).repeat(2))  # into 32 ways
    assert (slots[:40] >= 0).sum() == 32
    stats = cache.stats()
    assert (stats.conflict_unique_misses, stats.conflict_misses) == (8, 16)
    bring_in(cache, FIRST + torch.arange(40, 45))
    assert cache.stats().write_backs == cache.stats().tables["first"].write_backs == 5


def test_rows_stay_until_their_batch_leaves() -> None:
    cache = make()
    first = enter(cache)
    fetch(cache, groups_of(FIRST + torch.arange(20)))
    second = enter(cache)
    assert int((fetch(cache, groups_of(FIRST + torch.arange(20, 40)))[:20] < 0).sum()) == 8
    cache.release(second)  # in any order
    slots = bring_in(cache, FIRST + torch.arange(40, 60))
    assert (slots < 0).all(), "all since the oldest batch in flight stay"
    cache.release(first)
    assert (bring_in(cache, FIRST + torch.arange(60, 92))[:32] >= 0).all()
    cache.release(first)  # a second time changes nothing
    assert cache.clock.tolist() == [4, 4]


def test_numbers_live_on_the_device_and_only_grow() -> None:
    """What `enter` does to the clock does not depend on it: a graph may replay them."""
    cache = make()
    cache.clock += 100
    ticket = enter(cache)
    assert cache.clock.tolist() == [101, 101]
    second = enter(cache)
    assert cache.clock.tolist() == [102, 101]
    cache.release(ticket)
    cache.release(second)
    enter(cache)
    assert cache.clock.tolist() == [103, 103]


def test_find_knows_what_changed_since() -> None:
    cache = make()
    groups = groups_of(FIRST + torch.arange(40))
    ticket = enter(cache)
    slots = fetch(cache, groups)
    cache.release(ticket)
    assert torch.equal(cache.find(groups), slots)
    missing = FIRST + torch.arange(40)[slots < 0]
    bring_in(cache, missing)
    found = cache.find(groups)
    assert (found[slots < 0] >= 0).all()
    assert int((found < 0).sum()) == 8
    by_lookup = cache.slots_of_lookups(groups, found)
    assert torch.equal(by_lookup, found)


def test_reset_forgets_everything_but_the_counters() -> None:
    cache = make(CacheConfig(CachePolicy.LFU, sets=1))
    enter(cache)
    fetch(cache, groups_of(FIRST + torch.arange(30)))
    cache.reset()
    assert (cache.tags == -1).all()
    assert (cache.stamps == -1).all()
    assert cache.counts is not None
    assert not cache.counts.any()
    assert cache.stats().lookups == 30
    assert (bring_in(cache, FIRST + torch.arange(30, 62))[:32] >= 0).all()


def test_fetch_and_flush_carry_rows_and_states() -> None:
    optimizer = PartialRowwiseAdam(0.1)
    cache = make(optimizer=optimizer)
    hyper = optimizer.hyperparams()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(n, generator=generator) for n in LAYOUT.num_elements]
    states = [
        torch.rand(LAYOUT.num_rows[tier] if state.per_row else LAYOUT.num_elements[tier])
        for tier in range(3)
        for state in optimizer.states
    ]
    before = [tensor.clone() for tensor in (*weights, *states)]
    tiers = Tiers([*weights, cache.weights], [*states, *cache.states], hyper, torch.float32)
    groups = groups_of(FIRST + torch.arange(38, 42))  # of both tables
    ticket = enter(cache)
    (slots,) = cache.fetch(tiers, [groups])
    cache.release(ticket)
    row = cache.weights.view(-1, 8)[int(slots[1])]
    assert torch.equal(row[:6], weights[1].view(40, 6)[39])
    row += 1
    cache.states[1][int(slots[2])] = -5.0
    cache.flush(tiers)
    assert torch.equal(weights[1].view(40, 6)[39], before[1].view(40, 6)[39] + 1)
    assert states[2 * 2 + 1][0] == -5.0
    changed = [int((a != b).sum()) for a, b in zip((*weights, *states), before, strict=True)]
    assert sum(changed) == 6 + 1


def test_copies_are_independent_and_nothing_is_in_flight_there() -> None:
    cache = make()
    enter(cache)
    fetch(cache, groups_of(FIRST + torch.arange(32)))
    for other in (copy.deepcopy(cache), saved_and_loaded(cache, weights_only=False)):
        assert torch.equal(other.tags, cache.tags)
        assert (bring_in(other, FIRST + torch.arange(32, 64))[:32] >= 0).all()
    assert (bring_in(cache, FIRST + torch.arange(32, 64))[:32] < 0).all()
    assert cache.state_dict() == {}


def test_keeps_its_dtypes_and_comes_off_meta_empty() -> None:
    cache = make(CacheConfig(CachePolicy.LFU, sets=2), Adam(0.1)).half()
    assert cache.weights.dtype == torch.float32
    born = make(CacheConfig(CachePolicy.LFU, sets=2), Adam(0.1), device="meta").to_empty(
        device="cpu"
    )
    for name, tensor in make(CacheConfig(CachePolicy.LFU, sets=2), Adam(0.1)).named_buffers():
        if name in {"tags", "stamps", "counts", "counters", "clock", "conflicts", "table_features"}:
            assert torch.equal(getattr(born, name), tensor), name
    assert (bring_in(born, FIRST + torch.arange(10))[:10] >= 0).all()


def test_repr_says_how_large_it_is() -> None:
    assert repr(make(CacheConfig(sets=3))) == "RowCache(96 slots in 3 sets, lru)"
