"""Statistics of dynamic tables, compared with a count of the keys that come and go."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict

import numpy as np
import pytest
import torch

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    HostRows,
    KeyStatus,
    checkpoints,
    optim,
)
from emblib.dynamic import AgeHistogram, TableStatistics
from emblib.dynamic.statistics import AGE_BOUNDS, StatisticsCollector
from tests.interrupts import each_line

NAMES = ("item", "user")
PLACES = 1 << 12


def module(
    device: torch.device | str = "cpu",
    backing: BackingStore | None = None,
    eviction: Eviction = Eviction.LRU,
    **fields: object,
) -> DynamicEmbeddingBags:
    """Two small tables, read by three features."""
    specs = [
        DynamicSpec(capacity, 4, name=name, eviction=eviction, **fields)  # type: ignore[arg-type]
        for capacity, name in zip((64, 32), NAMES, strict=True)
    ]
    return DynamicEmbeddingBags(
        specs,
        optim.SGD(0.1),
        feature_tables=[0, 1, 0],
        seed=3,
        device=device,
        backing=backing,
    )


def batch(step: int, distinct: int = 250) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.rand(60, generator=generator).square() * distinct
    return drawn.long() * 0x9E3779B97F4A7C1 - 2**60


def train(bags: DynamicEmbeddingBags, ids: torch.Tensor) -> None:
    device = bags.hyperparams.device
    offsets = torch.arange(0, 61, 5, device=device)
    bags(ids.to(device), offsets).sum().backward()


class Model:
    """What the statistics of the tables must be, from their entries before and after each step."""

    def __init__(self, bags: DynamicEmbeddingBags) -> None:
        self.bags = bags
        self.ages: dict[str, list[int]] = {name: [] for name in NAMES}
        self.reinserted = Counter[str]()
        self.lost: Counter[tuple[str, KeyStatus]] = Counter()
        self._left: dict[str, set[int]] = {name: set() for name in NAMES}

    def stamps(self, table: int) -> dict[int, int]:
        """Return the step of the last use by key, of the fast tier."""
        entries = self.bags.index.export(table)
        return dict(zip(entries.keys.tolist(), entries.stamps.tolist(), strict=True))

    def step(self, ids: torch.Tensor) -> None:
        """Train a batch, and count."""
        before = [self.stamps(t) for t in range(2)]
        train(self.bags, ids)
        tick = self.bags.num_training_steps
        for t, name in enumerate(NAMES):
            after = self.stamps(t)
            self.reinserted[name] += len((after.keys() - before[t].keys()) & self._left[name])
            gone = before[t].keys() - after.keys()
            self.ages[name] += [tick - before[t][key] for key in gone]
            self._left[name] |= gone
        status = self.bags.key_status().view(3, 20)
        for feature, t in enumerate((0, 1, 0)):
            for code in (KeyStatus.REFUSED, KeyStatus.NOT_ADMITTED):
                self.lost[NAMES[t], code] += int((status[feature] == code).sum())

    def check(self) -> None:
        """Compare."""
        for name in NAMES:
            found, ages = self.bags.statistics(name), self.ages[name]
            assert found.eviction_ages is not None
            assert found.evicted == len(ages) == found.eviction_ages.num_keys
            assert found.eviction_ages.total_age == sum(ages)
            bins = Counter(next(i for i, b in enumerate(AGE_BOUNDS) if age <= b) for age in ages)
            assert Counter(dict(enumerate(found.eviction_ages.counts))) == bins
            assert found.reinserted == self.reinserted[name]
            assert found.refused_lookups == self.lost[name, KeyStatus.REFUSED]
            assert found.not_admitted_lookups == self.lost[name, KeyStatus.NOT_ADMITTED]


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU])
def test_counts_are_those_of_the_keys_that_come_and_go(
    device: torch.device, eviction: Eviction
) -> None:
    bags = module(device, eviction=eviction)
    bags.track_statistics(remember=PLACES)
    model = Model(bags)
    for step in range(40):
        model.step(batch(step))
    model.check()
    item = bags.statistics("item")
    assert item.reinserted
    assert item.evicted > 200
    assert item.load == item.keys / item.rows
    assert item.reinsertion_rate == item.reinserted / item.inserted
    assert item.hit_rate == item.hits / item.lookups
    assert sum(bags.statistics(name).nbytes for name in NAMES) == sum(bags.nbytes().values())


def test_lookups_without_a_row(device: torch.device) -> None:
    admission = FrequencyAdmission(2, ExactCounter(500))
    bags = module(device, eviction=Eviction.NONE, admission=admission)
    bags.track_statistics()
    model = Model(bags)
    for step in range(12):
        model.step(batch(step))
    assert bags.statistics("user").reinserted is None
    assert math.isnan(bags.statistics("user").reinsertion_rate)
    found = bags.statistics("user")
    assert found.refused_lookups == model.lost["user", KeyStatus.REFUSED] > 0
    assert found.not_admitted_lookups == model.lost["user", KeyStatus.NOT_ADMITTED] > 0
    assert found.refused <= found.refused_lookups
    assert found.not_admitted <= found.not_admitted_lookups


def test_demoted_rows_count_as_evicted_ones() -> None:
    bags = module(backing=BackingStore(HostRows(1_000, seed=1)))
    bags.track_statistics(remember=PLACES)
    model = Model(bags)
    for step in range(20):
        model.step(batch(step))
    found, ages = bags.statistics("item"), model.ages["item"]
    assert found.eviction_ages is not None
    assert found.tiers is not None
    assert found.evicted == found.tiers.demoted == found.eviction_ages.num_keys == len(ages)
    assert found.eviction_ages.total_age == sum(ages)
    # A promoted row was demoted before, by an eviction or when it found no slot.
    assert 0 < (found.reinserted or 0) <= found.tiers.promoted


@pytest.mark.parametrize(
    "replace_tables",
    [lambda bags: bags.clear(), lambda bags: bags.load_state_dict(bags.state_dict())],
)
def test_counts_of_replaced_tables_begin_together(
    replace_tables: Callable[[DynamicEmbeddingBags], object],
) -> None:
    bags = module(backing=BackingStore(HostRows(1_000, seed=1)))
    bags.track_statistics()
    for step in range(20):
        train(bags, batch(step))
    replace_tables(bags)
    numbers = bags.statistics("item")
    assert numbers.eviction_ages == AgeHistogram()
    assert numbers.tiers is not None
    assert not any(asdict(numbers.tiers).values())


def test_numbers_of_remembered_keys_may_be_of_numpy() -> None:
    bags = module()
    bags.track_statistics(remember=np.int64(100))  # type: ignore[arg-type]
    train(bags, batch(0))
    assert bags.statistics("item").reinserted == 0


def test_a_clear_keeps_the_memory_of_captured_steps() -> None:
    bags = module()
    bags.track_statistics(remember=100)
    train(bags, batch(0))
    assert bags.state.statistics is not None
    before = memory_of(bags.state.statistics)
    bags.clear()
    bags.reset_stats()
    train(bags, batch(0))
    assert memory_of(bags.state.statistics) == before


def memory_of(collector: StatisticsCollector) -> dict[str, int]:
    values = vars(collector).items()
    return {name: value.data_ptr() for name, value in values if isinstance(value, torch.Tensor)}


def test_memory_of_evicted_keys_is_bounded() -> None:
    """Of 64 places, key 0 included, no key is recognised that was never evicted."""
    bags = module()
    bags.track_statistics(remember=1)
    for first in range(0, 1200, 60):  # all keys are new, 0 is the first
        train(bags, torch.arange(first, first + 60))
    assert bags.statistics("item").evicted > 64
    assert bags.statistics("item").reinserted == bags.statistics("user").reinserted == 0
    train(bags, torch.arange(60))
    assert bags.statistics("item").reinserted is not None
    found = bags.statistics("item").reinserted or 0
    assert 0 <= found < 40  # nearly all are forgotten
    for first in (1200, 1260, 1200):
        train(bags, torch.arange(first, first + 60))
    assert (bags.statistics("item").reinserted or 0) > found


def test_reset_clear_and_copies(device: torch.device) -> None:
    bags = module(device)
    with pytest.raises(ValueError, match="remember must be"):
        bags.track_statistics(remember=-1)
    with pytest.raises(ValueError, match=r"remember must be at most 2\^40"):
        bags.track_statistics(remember=2**63 - 1)
    bags.track_statistics(remember=PLACES)
    for step in range(10):
        train(bags, batch(step))
    before = bags.statistics("item")
    bags.track_statistics(remember=PLACES)  # tracked already
    assert bags.statistics("item") == before
    copied = copy.deepcopy(bags)
    assert copied.statistics("item") == before
    train(copied, batch(0))
    assert bags.statistics("item") == before
    bags.reset_stats()
    empty = bags.statistics("item")
    assert (empty.evicted, empty.reinserted, empty.eviction_ages) == (0, 0, AgeHistogram())
    train(bags, batch(0))
    assert (bags.statistics("item").reinserted or 0) > 0  # evicted keys stay remembered
    bags.clear()
    train(bags, batch(1))
    assert bags.statistics("item").reinserted == 0


def test_moves_to_another_device_keep_the_counts() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs two devices")
    bags = module()
    bags.track_statistics(remember=PLACES)
    model = Model(bags)
    for step in range(10):
        model.step(batch(step))
    bags.to("cuda")
    for step in range(10, 20):
        model.step(batch(step))
    model.check()


def test_a_training_step_does_not_wait_on_a_gpu(
    no_host_waits: Callable[[], AbstractContextManager[None]],
) -> None:
    bags = module("cuda")
    bags.track_statistics(remember=PLACES)
    train(bags, batch(0))
    ids, offsets = batch(1).cuda(), torch.arange(0, 61, 5, device="cuda")
    with no_host_waits():
        bags(ids, offsets).sum().backward()


@pytest.mark.parametrize("store", ["none", "host"])
def test_an_interrupted_step_is_counted_once_or_not_at_all(store: str) -> None:
    def make() -> DynamicEmbeddingBags:
        bags = module(backing=BackingStore(HostRows(1_000, seed=1)) if store == "host" else None)
        bags.track_statistics(remember=PLACES)
        for step in range(4):
            train(bags, batch(step))
        return bags

    def counts(bags: DynamicEmbeddingBags) -> list[tuple[object, ...]]:
        found = [bags.statistics(name) for name in NAMES]
        return [(s.eviction_ages, s.reinserted, s.evicted, s.inserted) for s in found]

    before = counts(make())
    whole = make()
    train(whole, batch(9))
    after = counts(whole)
    seen = set()
    for attempt in each_line(step=7):
        bags = make()
        with attempt:
            train(bags, batch(9))
        found = counts(bags)
        assert found in (before, after), attempt.where
        seen.add(found == after)
    assert seen == {False, True}


def test_handles_and_merging() -> None:
    bags = module()
    handle = bags.table_handles()["item"]
    assert handle.statistics().eviction_ages is None
    handle.track_statistics(remember=PLACES)
    for step in range(6):
        train(bags, batch(step))
    one = handle.statistics()
    assert handle.local.statistics() == one == bags.statistics(0)
    assert handle.statistics_by_rank() == [one]
    both = TableStatistics.merged([one, one])
    assert (both.step, both.lookups, both.keys) == (one.step, 2 * one.lookups, 2 * one.keys)
    assert both.hit_rate == one.hit_rate
    assert one.eviction_ages is not None
    assert both.eviction_ages == one.eviction_ages + one.eviction_ages
    with pytest.raises(ValueError, match="at least one shard"):
        TableStatistics.merged([])
    fill = handle.bucket_fill()
    assert len(fill) == 33
    assert sum(fill) == one.rows // 32
    assert sum(number * count for number, count in enumerate(fill)) == one.keys


def test_histograms_of_ages() -> None:
    counts = [0] * (len(AGE_BOUNDS) + 1)
    assert math.isnan(AgeHistogram().mean)
    assert math.isnan(AgeHistogram().quantile(0.5))
    counts[0], counts[3] = 3, 1  # ages 1, and one in (4, 8]
    ages = AgeHistogram(tuple(counts), 3 + 7)
    assert (ages.num_keys, ages.mean) == (4, 2.5)
    assert (ages.quantile(0.5), ages.quantile(0.75), ages.quantile(0.9)) == (1, 1, 8)
    counts[-1] = 1
    later = AgeHistogram(tuple(counts), 2**40)
    assert later.quantile(1.0) == math.inf
    assert later.since(ages).counts[-1] == later.since(ages).num_keys == 1
    assert ages.since(later) == ages  # after a reset
    # After a reset more keys than before, of which 10 would have a total age of 20.
    old, young = ((0,) * 5 + (n,) + (0,) * 27 for n in (10, 20))
    assert AgeHistogram(young, 340).since(AgeHistogram(old, 320)) == AgeHistogram(young, 340)


def test_ages_above_all_bounds_are_counted() -> None:
    bags = module()
    bags.track_statistics()
    train(bags, torch.arange(60))
    bags.index.set_tick(2**40)
    for first in range(60, 600, 60):
        train(bags, torch.arange(first, first + 60))
    ages = bags.statistics("item").eviction_ages
    assert ages is not None
    assert ages.counts[-1] > 0
    assert checkpoints.table_entries(bags, 0).newest_stamp() > 2**40
