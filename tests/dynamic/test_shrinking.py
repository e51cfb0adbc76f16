"""Tables that shrink: the keys that stay, those that leave, their rows, and the memory."""

import copy
import mmap
import random
import sys
from pathlib import Path

import pytest
import torch

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    HostRows,
    OnInsertFailure,
    checkpoints,
    init,
    optim,
)
from emblib.dynamic import StoredRows
from emblib.dynamic.shrinking import release_memory
from emblib.reference.hash import HashModel
from emblib.tables import memory
from tests.hash_cases import Batch
from tests.interrupts import each_line

EVICTIONS = [e for e in Eviction if e is not Eviction.NONE]
DIM = 4


def module(
    eviction: Eviction = Eviction.LRU, capacity: int = 512, **options: object
) -> DynamicEmbeddingBags:
    """Two tables that grow from 64 rows."""
    specs = [
        DynamicSpec(
            capacity, DIM, name=name, initial_capacity=64, eviction=eviction, initializer=FIRST
        )
        for name in ("item", "user")
    ]
    bags = DynamicEmbeddingBags(specs, optim.Adam(0.1), seed=1, **options)  # type: ignore[arg-type]
    if eviction is Eviction.CUSTOM:
        bags.set_eviction_score(1)
    return bags


FIRST = init.KeyModulo()


def train(bags: DynamicEmbeddingBags, step: int, distinct: int = 900) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(120, generator=generator).square() * distinct).long() - 50
    if bags.tables[0].eviction is Eviction.CUSTOM:
        bags.set_eviction_score(step % 7)
    bags(ids, torch.arange(0, 121, 30)).sum().backward()


def rows_of(bags: DynamicEmbeddingBags, table: int) -> dict[int, list[float]]:
    """Return weights and states of every key of the fast tier, with stamp and score."""
    exported = bags.index.export(table)
    columns = [exported.stamps.view(-1, 1)]
    if exported.scores is not None:
        columns.append(exported.scores.view(-1, 1))
    columns += [
        view[exported.slots].detach().reshape(len(exported.slots), -1)
        for view in bags.table_rows(table).values()
    ]
    rows = torch.cat([column.double() for column in columns], 1)
    return dict(zip(exported.keys.tolist(), rows.tolist(), strict=True))


def assert_same_index(bags: DynamicEmbeddingBags, model: HashModel) -> None:
    expected = model.index()
    found = bags.index.tensors()[:5]
    is_used = expected[0] != 0
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1][is_used], expected[1][is_used])
    for number in (2, 3, 4):
        assert torch.equal(found[number], expected[number])


@pytest.mark.parametrize("eviction", EVICTIONS, ids=lambda e: e.value)
def test_a_random_program_is_that_of_the_reference(eviction: Eviction) -> None:
    bags, draw = module(eviction), random.Random(3)
    steps = 0
    for _ in range(10):
        for _ in range(draw.randint(1, 8)):
            train(bags, steps)
            steps += 1
        if draw.random() < 0.3:
            bags.erase(0, torch.arange(0, 900, 3))
        table = draw.randint(0, 1)
        buckets = draw.randint(2, bags.index.buckets(table))
        model = HashModel.of(bags.index.tensors()[:5], bags.index.order)
        before, other = rows_of(bags, table), rows_of(bags, 1 - table)
        leaving = model.shrink(table, buckets)
        assert bags.shrink(table, buckets * 32) == len(leaving)
        assert_same_index(bags, model)
        after = rows_of(bags, table)
        assert after.keys() == before.keys() - {entry.key for entry in leaving}
        assert all(after[key] == before[key] for key in after)
        assert rows_of(bags, 1 - table) == other
        keys = torch.tensor(list(after))
        assert bool((bags.find(table, keys) >= 0).all())


@pytest.mark.parametrize("eviction", EVICTIONS, ids=lambda e: e.value)
def test_evictions_after_shrinks_are_those_of_one_reference(eviction: Eviction) -> None:
    """The reference follows all steps and has no eviction queues, which shrinks leave stale."""
    bags, draw = module(eviction, capacity=160), random.Random(7)
    model = HashModel.of(bags.index.tensors()[:5], bags.index.order)
    for _ in range(80):
        if draw.random() < 0.8:
            count = draw.randint(1, 40)
            ids = [[draw.randint(0, 400) for _ in range(count)] for _ in range(2)]
            if eviction is Eviction.CUSTOM:
                bags.set_eviction_score(draw.randint(-3, 3))
            scores = [bags.table_handles()[name].score() or 0 for name in ("item", "user")]
            bags(torch.tensor(ids[0] + ids[1]), torch.tensor([0, count, 2 * count]))
            batch, ones = Batch.of((0, ids[0]), (1, ids[1])).positions, [1] * (2 * count)
            misses = model.misses(batch, model.touch(batch, ones, scores), ones)
            model.grow(misses)
            model.insert(misses, scores)
        else:
            table = draw.randint(0, 1)
            buckets = draw.randint(2, bags.index.buckets(table))
            leaving = model.shrink(table, buckets)
            assert bags.shrink(table, buckets * 32) == len(leaving)
        assert_same_index(bags, model)
    assert bags.stats()["item"]["evicted"] > 200


def test_the_lowest_ranked_keys_leave() -> None:
    bags = module(capacity=4096)
    for first in range(0, 8192, 512):  # each table gets half
        ids = torch.arange(first, first + 512)
        bags(ids, torch.tensor([0, 256, 512])).sum().backward()
    stamps = bags.index.export(0).stamps
    num_evicted = bags.shrink("item", 3072)
    assert num_evicted == len(stamps) - bags.size(0) >= len(stamps) - 3072
    kept = bags.index.export(0).stamps
    ideal = stamps.sort(descending=True).values[: len(kept)]
    # The keys that stay are as young as the youngest, but for 5 % of the range of ages.
    assert float(ideal.double().mean() - kept.double().mean()) < 0.05 * 16
    assert bags.capacity(0) == 3072
    assert bags.size(0) > 3000


def test_it_grows_again_and_evicts_nothing_where_there_is_room() -> None:
    bags = module()
    train(bags, 0)
    bags.reserve("item", 400)
    assert bags.capacity("item") >= 400
    keys = bags.index.export(0).keys.sort().values
    assert bags.shrink("item", 64) == 0
    assert torch.equal(bags.index.export(0).keys.sort().values, keys)
    assert bags.shrink("item", 200) == 0  # it is smaller already
    assert bags.capacity("item") == 64
    for step in range(30):
        train(bags, step)
    assert bags.capacity("item") == 512


def test_what_cannot_shrink_says_so() -> None:
    bags = module()
    with pytest.raises(ValueError, match=r"shrinks to its initial_capacity, 64 rows, and not to 5"):
        bags.shrink("item", 5)
    with pytest.raises(ValueError, match=r"rows must be"):
        bags.shrink("item", 0)
    with pytest.raises(ValueError, match=r"evicts no keys \(Eviction\.NONE\)"):
        module(Eviction.NONE).shrink("item", 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU")
def test_a_table_on_cuda_says_so() -> None:
    with pytest.raises(ValueError, match=r"on cuda:0, where memory is allocated for the whole"):
        module(device="cuda").shrink("item", 64)


def test_backward_finds_the_rows_that_moved() -> None:
    """Keys that stay are updated, the others are counted."""
    bags = module()
    for step in range(12):
        train(bags, step)
    ids = torch.arange(1000, 1100)
    out = bags(ids, torch.tensor([0, 100, 100]))
    later = torch.arange(2000, 2400)
    bags(later, torch.tensor([0, 400, 400])).sum().backward()  # now those are the oldest
    present = bags.find(0, ids) >= 0
    bags.shrink("item", 64)
    dropped = int(bags.dropped_updates)
    before, stays = rows_of(bags, 0), bags.find(0, ids) >= 0
    out.sum().backward()
    after = rows_of(bags, 0)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == set(ids[stays].tolist())
    assert int(bags.dropped_updates) - dropped == int((~stays).sum()) > 0
    assert int(present.sum()) >= int(stays.sum())


def test_backward_right_after_a_shrink_finds_the_rows() -> None:
    """No other forward came in between that would make it look them up again."""
    bags = module()
    for step in range(12):
        train(bags, step)
    ids = torch.arange(5000, 5100)
    out = bags(ids, torch.tensor([0, 100, 100]))
    slots = bags.find(0, ids)
    bags.shrink("item", 256)
    now = bags.find(0, ids)
    assert bool((now != slots).any())
    assert bool((now >= 0).all())  # the youngest keys stay
    before = rows_of(bags, 0)
    out.sum().backward()
    after = rows_of(bags, 0)
    assert {key for key in before if before[key] != after[key]} == set(ids.tolist())


class FullStore(HostRows):
    """A store that refuses rows while it is full."""

    is_full = False

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        if self.is_full and rows.keys.numel():
            raise OSError("no space left")
        return super().put(table, rows)


def test_a_store_that_fails_loses_no_row() -> None:
    """The shrink is made and raises; the rows are in memory until the store takes them."""
    store = FullStore(2_000, seed=1)
    bags = module(backing=BackingStore(store))
    for step in range(12):
        train(bags, step)
    size, demoted = bags.size(0), bags.tier_stats()["item"].demoted
    before, keys = rows_of(bags, 0), checkpoints.table_entries(bags, 0).keys.sort().values
    store.is_full = True
    with pytest.raises(OSError, match="no space left"):
        bags.shrink("item", 64)
    assert (bags.capacity(0), bags.size(0)) == (64, size)
    num_evicted = len(before) - len(rows_of(bags, 0))
    assert bags.tier_stats()["item"].demoted == demoted + num_evicted > demoted
    entries = checkpoints.table_entries(bags, 0)
    assert torch.equal(entries.keys.sort().values, keys)
    store.is_full = False
    for step in range(12, 16):
        train(bags, step)
    assert bags.tier_stats()["item"].dropped == 0


def test_demoted_rows_are_read_from_the_store() -> None:
    """With a store, outputs are those of one large table."""

    def make(capacity: int, backing: BackingStore | None) -> DynamicEmbeddingBags:
        spec = DynamicSpec(capacity, DIM, name="t", initial_capacity=64, initializer=FIRST)
        return DynamicEmbeddingBags([spec], optim.Adam(0.1), seed=1, backing=backing)

    tiered = make(512, BackingStore(HostRows(4_000, seed=1)))
    large = make(8192, None)
    tiered.track_evictions()
    evicted = 0
    for step in range(24):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(120, generator=generator).square() * 900).long()
        outputs = [bags(ids, torch.arange(0, 121, 30)) for bags in (tiered, large)]
        assert torch.equal(*outputs)
        for out in outputs:
            out.sum().backward()
        if step % 4 == 3:
            before = tiered.tier_stats()["t"].demoted
            num_evicted = tiered.shrink(0, 64 + 32 * (step % 3))
            evicted += num_evicted
            assert tiered.tier_stats()["t"].demoted == before + num_evicted
            assert tiered.size(0) == large.size(0)
            assert tiered.tier_stats()["t"].dropped == 0
    assert evicted > 100
    assert not tiered.eviction_log or not len(tiered.eviction_log.since(0, 0))


def test_evictions_are_logged_and_counted() -> None:
    bags = module()
    log = bags.track_evictions()
    bags.track_statistics(remember=1000)
    for step in range(12):
        train(bags, step)
    before, keys = bags.statistics("item"), set(bags.index.export(0).keys.tolist())
    gone = set(log.since(0, 0).tolist())
    num_evicted = bags.shrink("item", 64)
    after = bags.statistics("item")
    assert after.evicted == before.evicted + num_evicted
    assert after.eviction_ages is not None
    assert after.eviction_ages.num_keys == after.evicted
    left = keys - set(bags.index.export(0).keys.tolist())
    assert set(log.since(0, 0).tolist()) == gone | left
    assert after.inserted == before.inserted
    # Keys that left by a shrink are remembered: all that return are counted.
    known = torch.tensor(sorted(left - gone))[:20]
    bags(known, torch.tensor([0, len(known), len(known)])).sum().backward()
    assert bags.statistics("item").reinserted == (before.reinserted or 0) + len(known)


def test_copies_and_checkpoints(tmp_path: Path) -> None:
    bags = module()
    for step in range(12):
        train(bags, step)
    bags.shrink("item", 96)
    copied = copy.deepcopy(bags)
    assert (copied.capacity(0), rows_of(copied, 0)) == (96, rows_of(bags, 0))
    other = module()
    other.load_state_dict(bags.state_dict())
    assert rows_of(other, 0) == rows_of(bags, 0)
    bags.save(tmp_path / "dump")
    third = module()
    third.load(tmp_path / "dump")
    assert rows_of(third, 1) == rows_of(bags, 1)
    for one in (bags, copied):
        train(one, 99)
    assert rows_of(copied, 0) == rows_of(bags, 0)


@pytest.mark.parametrize("store", ["none", "host"])
def test_an_interrupted_shrink_is_made_or_not_begun(store: str) -> None:
    def make() -> DynamicEmbeddingBags:
        backing = BackingStore(HostRows(2_000, seed=1)) if store == "host" else None
        bags = module(capacity=256, backing=backing)
        bags.track_statistics()
        for step in range(6):
            train(bags, step, 600)
        return bags

    def content(bags: DynamicEmbeddingBags) -> list[object]:
        entries = checkpoints.table_entries(bags, 0)
        weights = entries.rows["weight"][torch.arange(len(entries))]
        order = entries.keys.argsort()
        return [
            bags.capacity(0),
            rows_of(bags, 0),
            entries.keys[order].tolist(),
            weights[order].tolist(),
            bags.stats(),
            bags.statistics("item").eviction_ages,
            bags.tier_stats(),
        ]

    before, whole = content(make()), make()
    whole.shrink("item", 64)
    after, seen = content(whole), set()
    for attempt in each_line(step={"none": 5, "host": 23}[store]):
        bags = make()
        with attempt:
            bags.shrink("item", 64)
        found = content(bags)
        assert found in (before, after), attempt.where
        seen.add(found == after)
        train(bags, 50)
    assert seen == {False, True}


def test_memory_goes_back_to_the_system() -> None:
    if sys.platform != "linux":
        pytest.skip("pages are dropped on Linux only")
    spec = DynamicSpec(
        1 << 20,
        64,
        initial_capacity=64,
        on_insert_failure=OnInsertFailure.RAISE,
    )
    bags = DynamicEmbeddingBags([spec], optim.SGD(0.1), seed=1)
    bags.reserve(0, 100_000)
    rows = bags.capacity(0)
    bags.weights.data[: rows * 64].fill_(1.0)

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE

    before = resident()
    bags.shrink(0, 64)
    returned = before - resident()
    assert returned > 0.9 * (rows - 64) * 64 * 4
    assert not bags.weights.data[64 * 64 : rows * 64].any()
    ids = torch.arange(50_000)
    bags(ids, torch.tensor([0, 50_000])).sum().backward()
    assert bags.size(0) == 50_000


def test_release_keeps_what_is_in_use() -> None:
    tensor = memory.reserve(1 << 20, torch.float32, torch.device("cpu"))
    tensor.fill_(1.0)
    release_memory(tensor, 100, 1 << 19, 5000)
    assert bool((tensor[:5100] == 1.0).all())
    assert bool((tensor[100 + (1 << 19) :] == 1.0).all())
    release_memory(tensor, 0, 10, 20)  # grew, so nothing
    release_memory(tensor, 0, 10, 5)  # less than a page
    assert bool((tensor[:5100] == 1.0).all())
