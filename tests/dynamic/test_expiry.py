"""Scores of the STEP and CUSTOM kind, and the sweep that lets unused keys expire."""

import copy
import math
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import (
    BackingStore,
    CountMinSketch,
    DiskRows,
    DynamicEmbeddingBags,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ExactCounter,
    FrequencyAdmission,
    HostRows,
    KeyedJaggedTensor,
    checkpoints,
    optim,
)
from emblib.dynamic.eviction import EvictionScores, Expiry
from emblib.dynamic.hash_index import MAX_TICK, HashIndex
from emblib.dynamic.saving import snapshots
from emblib.dynamic.saving.checkpoint import table_entries
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction, PerFeature
from emblib.storage import Hash


@pytest.mark.parametrize("ttl", [1, 5, 8, 17, 100])
@pytest.mark.parametrize("buckets", [1, 2, 7, 64])
def test_every_bucket_has_its_turn(ttl: int, buckets: int) -> None:
    """Once in an eighth of the ttl, whichever step one begins with."""
    expiry = Expiry([DynamicSpec(32, 4), DynamicSpec(32 * buckets, 4, ttl=ttl)])
    period = max(1, ttl // 8)
    for start in (0, 1, 13):
        turns = [sweep for tick in range(start, start + period) for sweep in expiry.sweeps(tick)]
        assert all(s.table == 1 and s.first_bucket + s.num_buckets <= buckets for s in turns)
        seen = [b for s in turns for b in range(s.first_bucket, s.first_bucket + s.num_buckets)]
        assert set(seen) == set(range(buckets))


def test_keys_leave_after_more_than_their_ttl() -> None:
    (sweep,) = Expiry([DynamicSpec(32, 4, ttl=10)]).sweeps(25)
    assert sweep.first_alive_ticks == (15,)  # last used in step 14: not for 11 steps


def test_a_repeated_advance_skips_no_buckets() -> None:
    """Neither when several buckets are due per microsecond, nor when one is due in several."""
    for ttl_us in (97, 16 * 7 * 50 + 3):
        ttl = timedelta(microseconds=ttl_us)
        once, twice = (Expiry([DynamicSpec(32 * 7, 4, ttl=ttl)]) for _ in range(2))
        for tick, now in enumerate(range(0, 4 * ttl_us, 5), start=1):
            once.now_us = twice.now_us = now
            assert once.sweeps(tick) == twice.sweeps(tick)
            for expiry in (once, twice, twice):
                expiry.advance(tick)


def test_repeated_pauses_do_not_wrap_around() -> None:
    expiry = Expiry([DynamicSpec(32, 4, ttl=timedelta(hours=1))])
    expiry.now_us = 1
    expiry.record_time(1)
    for _ in range(3):
        expiry.skip_pause(timedelta.max)
    assert int(expiry.times.min()) >= 0
    expiry.load_state_dict(expiry.state_dict())


def test_without_a_ttl_nothing_is_swept() -> None:
    expiry = Expiry([DynamicSpec(32, 4)])
    assert not list(expiry.sweeps(100))


SPECS = [
    DynamicSpec(32, 4, name="a", eviction=Eviction.STEP),
    DynamicSpec(32, 4, name="b", eviction=Eviction.CUSTOM),
    DynamicSpec(32, 4, name="c", eviction=Eviction.CUSTOM),
]


def test_steps_count_and_custom_scores_stay(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    assert scores.by_table() == [1, None, None]
    scores.set_custom(7)
    scores.set_custom({2: -3})
    given = scores.batch_scores()
    scores.advance()
    assert given.tolist() == [1, 7, -3]
    assert scores.by_table() == [2, 7, -3]
    scores.set_steps({0: 40})
    scores.advance()
    assert scores.batch_scores().tolist() == [41, 7, -3]


def test_custom_scores_must_be_set_before_the_first_batch(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    scores.set_custom({1: 5})
    with pytest.raises(RuntimeError, match=r"need a score before their first batch.*'c'"):
        scores.batch_scores()
    again = EvictionScores(SPECS, device)
    again.load_state_dict(scores.state_dict())
    with pytest.raises(RuntimeError, match=r"\['c'\]"):
        again.batch_scores()
    again.set_custom({2: 6})
    assert pickle.loads(pickle.dumps(again)).batch_scores().tolist() == [1, 5, 6]


def test_scores_are_set_where_they_are_used(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    with pytest.raises(ValueError, match=r"only tables with Eviction.CUSTOM.*'a'"):
        scores.set_custom({0: 3})
    with pytest.raises(TypeError, match=r"a score must be an int, got 1.5"):
        scores.set_custom({1: 1.5})
    with pytest.raises(ValueError, match=r"\[-2\^63, 2\^63\)"):
        scores.set_custom({1: 2**63})
    with pytest.raises(ValueError, match=r"only tables with Eviction.STEP.*'b'"):
        scores.set_steps({1: 3})
    with pytest.raises(ValueError, match="no table has it"):
        EvictionScores(SPECS[:1], device).set_custom(3)
    assert scores.by_table() == [1, None, None]


def test_the_sweep_keeps_its_promise(device: torch.device) -> None:
    """In training, a key stays for its ttl after its last use, and an eighth more at most."""
    ttl, spec = 16, DynamicSpec(96, 4, ttl=16)
    index, expiry = HashIndex([spec], device), Expiry([spec])
    generator = torch.Generator().manual_seed(0)
    last_used: dict[int, int] = {}
    left, ages = 0, set()
    for _ in range(80):
        drawn = (torch.randn(2, generator=generator) * 12).round().long()
        starts = torch.tensor([0, 2], device=device)
        tables = torch.zeros(1, dtype=torch.int64, device=device)
        index.insert(Keys(drawn.to(device), starts, tables))
        tick = index.tick
        last_used |= dict.fromkeys(drawn.tolist(), tick)
        for sweep in expiry.sweeps(tick):
            gone = index.expire(
                sweep.table, sweep.first_alive_ticks[0], sweep.first_bucket, sweep.num_buckets
            ).tolist()
            ages |= {tick - last_used.pop(key) for key in gone}
            left += len(gone)
        assert sorted(index.export(0).keys.tolist()) == sorted(last_used)
        assert all(tick - used <= ttl + ttl // 8 for used in last_used.values())
    assert left == index.stats()[0]["expired"] > 10
    assert min(ages) > ttl


# Time to live by the clock


HOUR = timedelta(hours=1)
OFFSETS = torch.tensor([0, 2])


class Clock:
    """A clock that tests set, in seconds."""

    def __init__(self, seconds: float = 1e9) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Lives:
    """When keys were used last; they live for the ttl, and an eighth and a step more at most."""

    ttl: float
    last_used: dict[int, float] = field(default_factory=dict)
    gone: list[float] = field(default_factory=list)

    def check(self, present: set[int], now: float, longest_step: float) -> None:
        for key in self.last_used.keys() - present:
            self.gone.append(now - self.last_used.pop(key))
            assert self.gone[-1] >= self.ttl
        assert present == self.last_used.keys()
        limit = self.ttl * 9 / 8 + 2 * longest_step
        assert all(now - used <= limit for used in self.last_used.values())


def timed(
    device: torch.device | str = "cpu", ttl: timedelta = HOUR, **options: Any
) -> tuple[DynamicEmbeddingBags, Clock]:
    spec = DynamicSpec(options.pop("capacity", 256), 4, name="items", ttl=ttl)
    module = DynamicEmbeddingBags([spec], optim.SGD(0.1), seed=0, device=device, **options)
    clock = Clock()
    module.set_clock(clock)
    return module, clock


def use(module: DynamicEmbeddingBags, *keys: int) -> None:
    module(torch.tensor(keys).to(module.weights.device), OFFSETS.to(module.weights.device))


def present(module: DynamicEmbeddingBags) -> set[int]:
    return set(table_entries(module, 0).keys.tolist())


@pytest.mark.parametrize("longest_step", [0.3, 40.0, 900.0])
def test_keys_live_for_their_time(device: torch.device, longest_step: float) -> None:
    """Steps of any lengths, long pauses among them; the list of times stays short."""
    module, clock = timed(device)
    generator = torch.Generator().manual_seed(1)
    lives, begin = Lives(3600.0), clock.seconds
    steps = 400 if longest_step == 40 else 100
    while steps:
        steps -= 1
        keys = (torch.randn(2, generator=generator) * 12).round().long().tolist()
        use(module, *keys)
        lives.last_used |= dict.fromkeys(keys, clock.seconds)
        lives.check(present(module), clock.seconds, longest_step)
        clock.seconds += float(torch.rand((), generator=generator)) * longest_step
    assert bool(lives.gone) == (clock.seconds - begin > 2 * 3600)
    assert int((module.expiry.times[0, :, 0] <= MAX_TICK).sum()) <= 35


def test_a_clock_that_is_set_back_lets_nothing_expire_early() -> None:
    module, clock = timed()
    use(module, 1, 2)
    clock.seconds -= 1e6
    use(module, 3, 4)
    for _ in range(35):
        clock.seconds += 100.0
        use(module, 5, 6)
        assert {1, 2, 3, 4} <= present(module)
    for _ in range(8):
        clock.seconds += 100.0
        use(module, 5, 6)
    assert present(module) == {5, 6}


def test_expire_keys_does_not_wait_for_training(device: torch.device) -> None:
    module, clock = timed(device)
    use(module, 1, 2)
    clock.seconds += 3000
    use(module, 2, 3)
    assert module.expire_keys() == {"items": 0}
    clock.seconds += 600
    assert module.expire_keys("items") == {"items": 1}
    assert present(module) == {2, 3}
    clock.seconds += 3000
    assert module.table_handles()["items"].expire_keys() == 2
    assert module.stats()["items"]["expired"] == 3
    by_steps = DynamicEmbeddingBags([DynamicSpec(64, 4, ttl=8), DynamicSpec(64, 4)])
    with pytest.raises(ValueError, match="'table_1' without ttl: keys expire in tables"):
        by_steps.expire_keys(1)
    assert by_steps.expire_keys() == {"table_0": 0}


def _state_dict(module: DynamicEmbeddingBags, tmp_path: Path) -> DynamicEmbeddingBags:
    other, _ = timed(capacity=64)
    other.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    return other


def _dump(module: DynamicEmbeddingBags, tmp_path: Path) -> DynamicEmbeddingBags:
    other, _ = timed(capacity=64)
    module.save(tmp_path)
    other.load(tmp_path)
    return other


def _table_dump(module: DynamicEmbeddingBags, tmp_path: Path) -> DynamicEmbeddingBags:
    other, _ = timed()
    use(other, 8, 9)  # forgotten, with its times
    module.table_handles()["items"].save(tmp_path)
    other.table_handles()["items"].load(tmp_path)
    return other


def _snapshot(module: DynamicEmbeddingBags, tmp_path: Path) -> DynamicEmbeddingBags:
    other, _ = timed()
    snapshots.save(module, tmp_path)
    other.load(tmp_path)
    return other


def _store(module: DynamicEmbeddingBags, tmp_path: Path) -> DynamicEmbeddingBags:
    first, clock = timed(capacity=32, backing=BackingStore(DiskRows(tmp_path)))
    clock.seconds = module.expiry.clock.seconds
    for key in (*range(100, 200), 1):
        use(first, key, key)
    first.flush()
    first.close()
    return timed(capacity=32, backing=BackingStore(DiskRows(tmp_path)))[0]


@pytest.mark.parametrize(
    "restart", [copy.deepcopy, pickle.dumps, _state_dict, _dump, _table_dump, _snapshot, _store]
)
@pytest.mark.parametrize("skips", [False, True])
def test_ages_survive_a_restart(restart: Callable[..., Any], skips: bool, tmp_path: Path) -> None:
    """A pause counts, as the clock is that of the wall, unless it is left out."""
    module, clock = timed()
    use(module, 1, 2)
    if restart in (copy.deepcopy, pickle.dumps):
        again = restart(module)
        again = pickle.loads(again) if isinstance(again, bytes) else again
    else:
        again = restart(module, tmp_path)
    clock = Clock(clock.seconds + 3500)
    again.set_clock(clock)
    assert sum(again.expire_keys().values()) == 0
    clock.seconds += 200
    if skips:
        again.skip_pause()
    number = again.size(0)
    assert sum(again.expire_keys().values()) == (0 if skips else number)
    clock.seconds += 3700
    assert sum(again.expire_keys().values()) == (number if skips else 0)


def test_rows_in_a_store_expire_by_the_clock(tmp_path: Path) -> None:
    module, clock = timed(capacity=32, backing=BackingStore(DiskRows(tmp_path)))
    for key in range(0, 200, 2):
        use(module, key, key + 1)
    assert module.size(0) == 200
    clock.seconds += 3700
    use(module, 7, 8)
    assert module.stats()["items"]["inserted"] >= 2
    clock.seconds += 1
    module.expire_keys()
    assert present(module) == {7, 8}


def test_an_expired_key_that_is_not_admitted_again_is_logged() -> None:
    admission = FrequencyAdmission(2, ExactCounter(1000))
    spec = DynamicSpec(32, 2, ttl=16, admission=admission)
    bags = DynamicEmbeddingBags([spec], optim.SGD(0.1), backing=BackingStore(HostRows(4096)))
    log = bags.track_evictions()

    def train(*ids: int) -> None:
        bags(torch.tensor(ids), torch.tensor([0, len(ids)])).sum().backward()

    train(7, 7)
    for step in range(2, 18):  # other keys, which move 7 to the store
        train(*2 * [*range(100 * step, 100 * step + 32)])
    assert 7 in table_entries(bags, 0).keys
    assert 7 not in log.since(0, 1)
    train(7)
    assert 7 not in table_entries(bags, 0).keys
    assert 7 in log.since(0, 18)


def test_tables_by_the_clock_in_collections() -> None:
    """Two of one kind have modules of their own; copies of slices and state dicts have the ages."""
    tables = [
        EmbeddingBagConfig(64, 4, name, [name], storage=Hash(ttl=HOUR, seed=1)) for name in "ab"
    ]
    bags = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    bags(batch)
    other = EmbeddingBagCollection(tables, optimizer=optim.Adam(0.1))
    other.load_state_dict(bags.state_dict(), strict=False)
    for collection in (bags, other):
        for name in "ab":
            collection.tables[name].set_clock(Clock(time.time() + 3700))
        collection.tables["b"].skip_pause()
        assert [collection.tables[name].expire_keys() for name in "ab"] == [1, 0]


def test_replaced_tables_forget_the_times_of_the_old(tmp_path: Path) -> None:
    """Ticks of a module that was emptied, or that took a state without times, are others."""
    module, clock = timed()
    for _ in range(10):
        use(module, 1, 2)
    clock.seconds += 4000
    module.clear()
    use(module, 3, 4)
    assert module.expire_keys() == {"items": 0}
    source = DynamicEmbeddingBags([DynamicSpec(64, 4, name="items")], optim.SGD(0.1), seed=0)
    use(source, 5, 6)
    module.load_state_dict(source.state_dict(), strict=False)
    clock.seconds += 10
    assert module.expire_keys() == {"items": 0}
    clock.seconds += 3600
    assert module.expire_keys() == {"items": 2}
    for _ in range(100):
        use(module, 7, 8)
        clock.seconds += 100
    module.table_handles()["items"].set_entries(source.table_handles()["items"].entries())
    assert module.expire_keys() == {"items": 0}
    by_steps = DynamicEmbeddingBags([DynamicSpec(64, 4, name="items", ttl=8)], optim.SGD(0.1))
    source.table_handles()["items"].save(tmp_path)
    by_steps.table_handles()["items"].load(tmp_path)
    assert present(by_steps) == {5, 6}


def test_dumps_of_other_ttls_have_no_ages(tmp_path: Path) -> None:
    module, clock = timed()
    use(module, 1, 2)
    module.save(tmp_path)
    spec = DynamicSpec(64, 4, name="items", ttl=PerFeature(HOUR, 2 * HOUR))
    other = DynamicEmbeddingBags([spec], optim.SGD(0.1), feature_tables=[0, 0])
    clock.seconds += 9999
    other.set_clock(clock)
    other.load(tmp_path)
    assert other.expire_keys() == {"items": 0}
    clock.seconds += 7201
    assert other.expire_keys() == {"items": 2}


def test_a_refused_dump_leaves_the_ages_of_keys(tmp_path: Path) -> None:
    def counted(width: int) -> DynamicEmbeddingBags:
        admission = FrequencyAdmission(1, CountMinSketch(width))
        spec = DynamicSpec(64, 4, name="items", ttl=HOUR, admission=admission)
        return DynamicEmbeddingBags([spec], optim.SGD(0.1))

    module, clock = counted(2048), Clock()
    module.set_clock(clock)
    use(module, 1, 2)
    counted(1024).save(tmp_path)
    with pytest.raises(ValueError, match="sketches"):
        module.load(tmp_path)
    clock.seconds += 9999
    assert module.expire_keys() == {"items": 2}


def test_the_maximum_over_ranks_is_true_of_each() -> None:
    """Checkpoints of several ranks join their lists element by element."""
    generator = torch.Generator().manual_seed(2)
    ranks = [Expiry([DynamicSpec(32, 4, ttl=HOUR)]) for _ in range(3)]
    for tick in range(1, 200):
        for delay, rank in enumerate(ranks):
            rank.now_us += int(torch.randint(0, 100_000_000, (), generator=generator))
            if (tick + delay) % (delay + 1) == 0 or tick > 190:
                rank.record_time(tick)
    joined = Expiry([DynamicSpec(32, 4, ttl=HOUR)])
    joined.times = torch.stack([rank.times for rank in ranks]).amax(0)
    now = max(rank.now_us for rank in ranks)
    for later in range(0, 2 * 3600, 60):
        for expiry in (joined, *ranks):
            expiry.now_us = now + later * 1_000_000
        first_alive = [rank.first_alive_ticks(0, 200)[0] for rank in ranks]
        assert joined.first_alive_ticks(0, 200)[0] <= min(first_alive)
    assert joined.first_alive_ticks(0, 200) == (200,)


def test_a_load_tells_of_keys_of_other_tables_that_expire(tmp_path: Path) -> None:
    def make(num_steps: int) -> Any:
        specs = [DynamicSpec(64, 2, name="a"), DynamicSpec(64, 2, name="b", ttl=10)]
        module = DynamicEmbeddingBags([*specs, DynamicSpec(64, 2, name="c")], optim.SGD(0.1))
        for _ in range(num_steps):
            module(torch.tensor([1, 7, 8, 9]), torch.tensor([0, 1, 3, 4]))
        return module

    module = make(30)
    later, state_dict = module.table_handles(), module.state_dict()
    later["a"].save(tmp_path / "a")
    later["b"].save(tmp_path / "b")
    told = r"\['a'\] raises the step count .* from 2 to 30, at which 2 keys of 'b' expire"
    with pytest.warns(UserWarning, match=told):
        make(2).table_handles()["a"].load(tmp_path / "a")
    with pytest.warns(UserWarning, match=told):
        make(2).table_handles()["a"].set_entries(later["a"].entries())
    with pytest.warns(UserWarning, match=told):
        checkpoints.set_table_entries(make(2), "a", later["a"].entries())
    only_a = {key: value for key, value in state_dict.items() if key[:2] not in ("b.", "c.")}
    with pytest.warns(UserWarning, match=told):
        make(2).load_state_dict(only_a, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(2).load_state_dict(state_dict)
        make(2).table_handles()["b"].load(tmp_path / "b")
        make(25).table_handles()["a"].load(tmp_path / "a")  # keys of 25 steps live at 30
        make(0).table_handles()["a"].load(tmp_path / "a")


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_keys_without_steps_of_use_count_as_used_at_their_load(
    tmp_path: Path, eviction: str
) -> None:
    def make(num_steps: int) -> DynamicEmbeddingBags:
        specs = [DynamicSpec(64, 2, name=name, ttl=10, eviction=eviction) for name in "ab"]
        module = DynamicEmbeddingBags(specs, optim.SGD(0.1))
        for step in range(num_steps):
            module(torch.tensor([step, 2]), torch.tensor([0, 1, 2]))
        return module

    saved = make(3)
    checkpoints.save_dynamicemb(saved, tmp_path, "a")
    state_dict = saved.state_dict()
    kinds = ["keys", "weight", *(["scores"] if eviction == "lfu" else [])]
    only_a = {f"a.{kind}": state_dict[f"a.{kind}"] for kind in kinds}
    for load in (
        lambda module: checkpoints.load_dynamicemb(module, tmp_path, "a"),
        lambda module: module.load_state_dict(only_a, strict=False),
    ):
        module = make(40)
        load(module)
        assert module.expire_keys()["a"] == 0
        assert module.size("a") == 3


def test_wrong_times_are_refused() -> None:
    with pytest.raises(ValueError, match="ttl must be a positive time"):
        DynamicSpec(32, 4, ttl=timedelta(0))
    by_steps = DynamicEmbeddingBags([DynamicSpec(32, 4, ttl=8)])
    for call in (lambda: by_steps.set_clock(Clock()), by_steps.skip_pause):
        with pytest.raises(ValueError, match="no ttl that is a time"):
            call()
    module, _ = timed()
    damaged = module.state_dict()
    damaged["expiry.times"] = damaged["expiry.times"] - 2**62 - 2
    with pytest.raises(RuntimeError, match=r"expiry.times: counts must be >= 0"):
        module.load_state_dict(damaged)
    with pytest.raises(TypeError, match="a clock is a function"):
        module.set_clock(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a pause is a datetime\.timedelta"):
        module.skip_pause(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a pause must not be negative"):
        module.skip_pause(-HOUR)
    module.skip_pause(timedelta.max)
    for seconds in (-1.0, 1e30, math.nan, math.inf):
        module.set_clock(lambda seconds=seconds: seconds)
        with pytest.raises(ValueError, match=r"a clock must return seconds in \[0, 1e\+12\)"):
            use(module, 98, 99)
    module.set_clock(Clock())
    assert 99 not in present(module)  # nothing was changed
    use(module, 98, 99)
    two = [DynamicSpec(32, 4, name=name, ttl=HOUR) for name in "ab"]
    with pytest.raises(ValueError, match=r"share admission counters, scores or times"):
        DynamicEmbeddingBags(two).table_handles()["a"].save("nowhere")
