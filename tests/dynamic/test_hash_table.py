"""HashTable: one bucket of it against a dict, larger ones against what must hold of any."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.dynamic.hash_table import HashTable, TableRows
from emblib.init import Constant
from emblib.ops.hash import EVICTING, HIT, NEW, REFUSED
from emblib.specs import DynamicSpec, Eviction, InsertPolicy
from tests.saved import saved_and_loaded

DIM = 3
EDGES = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 2**63 - 1, -(2**63)]
GIVEN = (Eviction.STEP, Eviction.CUSTOM)


class Model:
    """A table of one bucket: key -> [score, stamp, value]."""

    def __init__(self, spec: DynamicSpec) -> None:
        self.spec, self.tick = spec, 0
        self.rows: dict[int, list] = {}

    def rank(self, key: int, score: int, stamp: int) -> tuple[int, int, int]:
        eviction = self.spec.eviction
        scored = eviction not in (Eviction.LRU, Eviction.NONE)
        return (score if scored else 0, 0 if eviction is Eviction.LFU else stamp, key)

    def use(self, keys: Sequence[int], numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Statuses by position, and the evicted keys."""
        self.tick += 1
        given = self.spec.eviction in GIVEN
        totals: dict[int, int] = {}
        for key, number in zip(keys, numbers, strict=True):
            totals[key] = number if given else totals.get(key, 0) + number
        status, evicted = {}, []
        for key, total in totals.items():
            if key in self.rows:
                row = self.rows[key]
                row[0], row[1] = (total if given else row[0] + total), self.tick
                status[key] = HIT
        for key, total in totals.items():
            if key not in status:
                status[key] = self.place(key, total, evicted)
        return [status[key] for key in keys], evicted

    def place(self, key: int, total: int, evicted: list[int]) -> int:
        old = {k: r for k, r in self.rows.items() if r[1] < self.tick}
        full = len(self.rows) >= 32
        if full:
            if not old or self.spec.eviction is Eviction.NONE:
                return REFUSED
            victim = min(old, key=lambda k: self.rank(k, *old[k][:2]))
            mine = self.rank(key, total, self.tick)
            if self.spec.insert_policy is InsertPolicy.EVICT_IF_LOWER and mine < self.rank(
                victim, *old[victim][:2]
            ):
                return REFUSED
            del self.rows[victim]
            evicted.append(victim)
        self.rows[key] = [total, self.tick, None]
        return EVICTING if full else NEW


def value_of(number: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(number))


def contents(table: HashTable) -> dict[int, tuple[int, int, list[float]]]:
    found = {}
    for rows in table.export(5):
        for key, value, stamp, score in zip(*(part.tolist() for part in rows), strict=True):
            assert key not in found
            found[key] = (score, stamp, value)
    assert len(found) == table.size()
    return found


def compare(table: HashTable, model: Model) -> None:
    scored = model.spec.eviction not in (Eviction.LRU, Eviction.NONE)
    wanted = {
        key: (score if scored else 0, stamp, value.tolist())
        for key, (score, stamp, value) in model.rows.items()
    }
    assert contents(table) == wanted


def scores_for(spec: DynamicSpec, chance: random.Random, count: int) -> Tensor | None:
    if spec.eviction is Eviction.CUSTOM or (
        spec.eviction in (Eviction.LFU, Eviction.LRU_LFU) and chance.random() < 0.5
    ):
        return torch.tensor([chance.randrange(1, 9) for _ in range(count)], dtype=torch.int64)
    return None


@pytest.mark.parametrize("insert_policy", InsertPolicy)
@pytest.mark.parametrize("eviction", Eviction)
def test_one_bucket_is_the_model(eviction: Eviction, insert_policy: InsertPolicy) -> None:
    """Random calls with repeated keys; everything is compared after each."""
    chance = random.Random(f"{eviction}{insert_policy}")
    spec = DynamicSpec(32, DIM, eviction=eviction, insert_policy=insert_policy, default_value=7.0)
    table, model, fresh = HashTable(spec), Model(spec), 0
    pool = [*EDGES, *range(5, 60)]
    for _ in range(60):
        keys = chance.choices(pool, k=chance.choice([0, 1, 5, 31, 32, 33]))
        ids = torch.tensor(keys, dtype=torch.int64)
        fresh += 1000
        values = torch.stack([value_of(fresh + i) for i in range(len(keys))] or [value_of(0)])
        values = values[: len(keys)]
        scores = scores_for(spec, chance, len(keys))
        numbers = [1] * len(keys) if scores is None else scores.tolist()
        if eviction is Eviction.STEP:
            numbers = [model.tick + 1] * len(keys)
        call = chance.choice(["assign", "insert", "insert", "find_or_insert", "erase", "expire"])
        if call == "insert":
            before = {key: row[2] for key, row in model.rows.items()}
            status, evicted = model.use(keys, numbers)
            result = table.insert_and_evict(ids, values, scores)
            assert result.status.tolist() == status
            assert result.evicted.keys.tolist() == evicted
            for key, value in zip(evicted, result.evicted.values, strict=True):
                assert torch.equal(value, before[key])
            for key, value in zip(keys, values, strict=True):
                if key in model.rows:
                    model.rows[key][2] = value
        elif call == "find_or_insert":
            status, _ = model.use(keys, numbers)
            out, result = table.find_or_insert(ids, values, scores)
            assert result.status.tolist() == status
            for key, value, read in zip(keys, values, out, strict=True):
                row = model.rows.get(key)
                if row is not None and row[2] is None:
                    row[2] = value
                assert torch.equal(read, torch.full((DIM,), 7.0) if row is None else row[2])
        elif call == "assign":
            assert table.assign(ids, values).tolist() == [key in model.rows for key in keys]
            for key, value in zip(keys, values, strict=True):
                if key in model.rows:
                    model.rows[key][2] = value
        elif call == "erase":
            removed = [model.rows.pop(key, None) is not None for key in keys[:6]]
            assert table.erase(ids[:6]).tolist() == removed
        else:
            old = {key for key, row in model.rows.items() if row[1] < model.tick - 4}
            assert set(table.expire(model.tick - 4).tolist()) == old
            for key in old:
                del model.rows[key]
        compare(table, model)


@pytest.mark.parametrize(
    "scores",
    [torch.tensor([0.1, 0.9]), [0.1, 0.9], 0.5, True, 2**63, [1, 2**63], [[1], [2**64]], [1, None]],
)
def test_scores_that_would_lose_their_order(scores: Any) -> None:
    table, keys = HashTable(DynamicSpec(64, 1, eviction="custom")), torch.tensor([1, 2])
    for call in (
        lambda: table.insert_or_assign(keys, torch.ones(2, 1), scores),
        lambda: table.find_or_insert(keys, scores=scores),
        lambda: table.set_scores(keys, scores),
    ):
        with pytest.raises((TypeError, ValueError), match=r"scores? must be (an int|in |integers)"):
            call()
    assert table.size() == 0


def test_find_and_accumulate_and_scores() -> None:
    table = HashTable(DynamicSpec(1000, 2, eviction="custom", default_value=-1.0))
    keys = torch.tensor([5, -1, 5, 2**63 - 1])
    table.insert_or_assign(keys, torch.arange(8.0).view(4, 2), torch.tensor([1, 2, 3, 4]))
    values, there = table.find(torch.tensor([5, 6]))
    assert there.tolist() == [True, False]
    assert values.tolist() == [[4.0, 5.0], [-1.0, -1.0]]
    assert table.scores(keys)[0].tolist() == [3, 2, 3, 4]
    found = table.accumulate(torch.tensor([5, 7, 5]), torch.ones(3, 2))
    assert found.tolist() == [True, False, True]
    assert table.find(keys)[0].tolist() == [[6.0, 7.0], [2.0, 3.0], [6.0, 7.0], [6.0, 7.0]]
    assert table.set_scores(torch.tensor([-1, 8]), 77).tolist() == [True, False]
    assert table.scores(torch.tensor([-1, 8]))[0].tolist() == [77, 0]
    assert table.contains(torch.tensor([-1, 8])).tolist() == [True, False]
    table.values[table.slots(torch.tensor([-1]))] = 9.0
    assert table.find(torch.tensor([-1]))[0].tolist() == [[9.0, 9.0]]
    table.clear()
    assert table.size() == 0
    assert not table.contains(keys).any()


def test_values_follow_their_keys_as_the_table_grows() -> None:
    spec = DynamicSpec(5000, 2, initial_capacity=32)
    table = HashTable(spec)
    keys = torch.randperm(3000)
    for part in keys.split(170):
        table.insert_or_assign(part, torch.stack([part, -part], dim=1).float())
    assert 3000 / 0.6 <= table.capacity() <= 5024
    values, there = table.find(keys)
    assert there.all()
    assert torch.equal(values, torch.stack([keys, -keys], dim=1).float())
    reserved = HashTable(spec)
    reserved.reserve(3000)
    assert reserved.capacity() == table.capacity()


def test_new_rows_start_as_their_key_says() -> None:
    """And not as the batch, the order or the capacity say."""
    keys = torch.arange(100)
    small = HashTable(DynamicSpec(4096, 8), seed=3)
    whole, _ = small.find_or_insert(keys)
    again = HashTable(small.spec, seed=3)
    assert torch.equal(again.values[again.find_or_insert_slots(keys).slots], whole)
    other = HashTable(DynamicSpec(4096, 8, initial_capacity=64), seed=3)
    parts = [other.find_or_insert(part)[0] for part in keys.flip(0).split(7)]
    assert torch.equal(whole, torch.cat(parts).flip(0))
    assert not torch.equal(whole, HashTable(small.spec, seed=4).find_or_insert(keys)[0])
    bound = 4096**-0.5
    assert whole.abs().max() <= bound
    constant = HashTable(DynamicSpec(64, 8, initializer=Constant(2.5)), dtype=torch.bfloat16)
    assert (constant.find_or_insert(keys[:9])[0] == 2.5).all()


def test_empty_rows_are_never_read() -> None:
    table = HashTable(DynamicSpec(64, 4))
    table.values.fill_(float("nan"))
    keys = torch.arange(200) - 100
    out, result = table.find_or_insert(keys)
    assert (result.status == REFUSED).any()
    assert not out.isnan().any()
    assert not table.find(keys)[0].isnan().any()
    evicted = table.insert_and_evict(keys + 1000, torch.zeros(200, 4)).evicted
    assert evicted.keys.numel() == 64
    assert not evicted.values.isnan().any()


@pytest.mark.parametrize("eviction", Eviction)
def test_rows_load_into_another_capacity(eviction: Eviction) -> None:
    chance = random.Random(5)
    table = HashTable(DynamicSpec(640, DIM, eviction=eviction))
    for _ in range(5):
        keys = torch.randint(-400, 400, (200,))
        scores = scores_for(table.spec, chance, 200)
        table.insert_or_assign(keys, torch.randn(200, DIM), scores)
    other = HashTable(DynamicSpec(5000, DIM, eviction=eviction, initial_capacity=32))
    other.reserve(table.size())
    for rows in table.export(50):
        other.load(rows)
    assert contents(other) == contents(table)
    assert other.index.tick >= max(stamp for _, stamp, _ in contents(table).values())
    recent = [rows.keys for rows in table.export(since=table.index.tick)]
    assert set(torch.cat(recent).tolist()) <= set(keys.tolist())


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("stamps", [1]),
        ("stamps", [[1], [1]]),
        ("stamps", [0, -1]),
        ("stamps", [0, 1 << 62]),
        ("scores", [1]),
        ("values", [[0.0] * DIM]),
    ],
)
def test_rows_that_do_not_load_change_nothing(column: str, values: list) -> None:
    table = HashTable(DynamicSpec(64, DIM, eviction="lfu"))
    rows = TableRows(
        torch.arange(2), torch.ones(2, DIM), torch.tensor([3, 4]), torch.tensor([1, 2])
    )
    with pytest.raises(ValueError, match=column):
        table.load(rows._replace(**{column: torch.tensor(values)}))
    assert table.size() == table.index.tick == 0
    table.load(rows)
    assert contents(table).keys() == {0, 1}


def test_saved_and_copied() -> None:
    table = HashTable(DynamicSpec(320, DIM, eviction="lfu"))
    table.insert_or_assign(torch.randint(0, 999, (500,)), torch.randn(500, DIM))
    other = HashTable(DynamicSpec(3200, DIM, eviction="lfu"))
    other.load_state_dict(saved_and_loaded(table.state_dict()))
    twin = copy.deepcopy(table)
    assert contents(other) == contents(table) == contents(twin)
    assert other.index.tick == twin.index.tick == table.index.tick
    assert torch.equal(twin.index.entries, table.index.entries)
    twin.clear()
    assert table.size()


@pytest.mark.parametrize("eviction", Eviction)
def test_a_full_table_loads_whole(eviction: Eviction) -> None:
    chance = random.Random(6)
    table, other = (HashTable(DynamicSpec(1024, DIM, eviction=eviction)) for _ in range(2))
    while table.size() < 1024:
        keys = torch.randint(-4000, 4000, (500,))
        table.insert_or_assign(keys, torch.randn(500, DIM), scores_for(table.spec, chance, 500))
    other.load_state_dict(table.state_dict())
    assert contents(other) == contents(table)
    smaller = HashTable(DynamicSpec(512, DIM, eviction=eviction))
    with pytest.warns(UserWarning, match="no slot for 512 of the 1024 keys"):
        smaller.load_state_dict(table.state_dict())
    kept = contents(smaller)
    assert len(kept) == 512
    assert kept.items() <= contents(table).items()
    by_stamp = eviction in (Eviction.LRU, Eviction.NONE)
    ranks = [stamp if by_stamp else score for score, stamp, _ in contents(table).values()]
    kept_ranks = [stamp if by_stamp else score for score, stamp, _ in kept.values()]
    assert min(kept_ranks) >= sorted(ranks)[500], "all but a few of the best are kept"


def test_scores_below_zero_are_saved() -> None:
    table, other = (HashTable(DynamicSpec(32, DIM, eviction="custom")) for _ in range(2))
    table.insert_or_assign(torch.arange(2), torch.zeros(2, DIM), torch.tensor([-3, 5]))
    other.load_state_dict(table.state_dict())
    assert contents(other) == contents(table)


def test_eviction_queues_do_not_return_from_another_device() -> None:
    """Kernels there evict without them, and so they would name wrong victims."""
    table = HashTable(DynamicSpec(32, DIM))
    for keys in (range(40), range(40, 50)):
        table.insert_or_assign(torch.tensor(keys), torch.zeros(len(keys), DIM))
    assert table.index.queues.any()
    table.to("meta")
    assert len(table.index.tensors()) == 5
    table.to_empty(device="cpu")
    assert not table.index.queues.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.find(torch.tensor([[1]])), r"keys must be of shape \[n\]"),
        (lambda t: t.find(torch.tensor([1.0])), "keys must be int64"),
        (lambda t: t.insert_or_assign(torch.tensor([1]), torch.zeros(2, 3), 1), "of shape"),
        (lambda t: t.insert_or_assign(torch.tensor([1]), [[1.0, 2.0, 3.0]], 1), "values must be"),
        (lambda t: t.assign(torch.tensor([1]), torch.zeros(1, 3) * 1j), "real numbers"),
        (lambda t: t.insert_or_assign(torch.tensor([1]), torch.zeros(1, 3)), "needs scores"),
        (
            lambda t: t.insert_or_assign(
                torch.tensor([1]), torch.zeros(1, 3), torch.tensor([1, 1])
            ),
            "shape of keys",
        ),
        (lambda t: t.set_scores(torch.tensor([1]), torch.tensor([1, 1])), "shape of keys"),
        (lambda t: t.set_scores(torch.tensor([1]), {1: 2}), "scores must be an int, a sequence"),
    ],
)
def test_bad_input_is_told_before_anything_changes(call: object, message: str) -> None:
    table = HashTable(DynamicSpec(64, 3, eviction="custom"))
    with pytest.raises((ValueError, TypeError), match=message):
        call(table)
    assert table.size() == table.index.tick == 0


@pytest.mark.parametrize("eviction", ["lfu", "lru_lfu", "step"])
@pytest.mark.parametrize("scores", [-3, torch.tensor(-3), torch.tensor([1, -3])])
def test_uses_below_zero_are_refused(eviction: str, scores: Any) -> None:
    table, keys = HashTable(DynamicSpec(64, 1, eviction=eviction)), torch.tensor([1, 2])
    table.insert_or_assign(keys, torch.ones(2, 1))
    before = table.state_dict()
    calls: list[Any] = [lambda: table.set_scores(keys, scores)]
    if eviction != "step":
        calls += [
            lambda: table.insert_or_assign(keys, torch.zeros(2, 1), scores),
            lambda: table.find_or_insert(keys, scores=scores),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"scores must be >= 0 .*CUSTOM.*, got -3"):
            call()
    with pytest.raises(ValueError, match="scores must be >= 0"):
        table.load(next(table.export())._replace(scores=torch.tensor([-3, 1])))
    assert all(torch.equal(before[name], value) for name, value in table.state_dict().items())


def test_tables_without_scores_take_none() -> None:
    table = HashTable(DynamicSpec(64, 3))
    with pytest.raises(ValueError, match="scores are for"):
        table.insert_or_assign(torch.tensor([1]), torch.zeros(1, 3), 5)
    with pytest.raises(ValueError, match="has no scores"):
        table.set_scores(torch.tensor([1]), 5)
    with pytest.raises(TypeError, match="must be a DynamicSpec"):
        HashTable(64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be on meta"):
        HashTable(DynamicSpec(64, 3), device="meta")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: list(t.export(0)), "batch must be >= 1, got 0"),
        (lambda t: list(t.export(2.5)), "batch must be an int"),
        (lambda t: t.expire(0.5), "before must be an int"),
        (lambda t: t.reserve(-1), "keys must be >= 0"),
        (lambda t: t.reserve(1.5), "keys must be an int"),
    ],
)
def test_numbers_that_are_no_counts_are_named(call: Any, message: str) -> None:
    table = HashTable(DynamicSpec(64, 3))
    table.insert_or_assign(torch.tensor([3]), torch.ones(1, 3))
    with pytest.raises((ValueError, TypeError), match=message):
        call(table)
    assert table.size() == 1


def test_exported_rows_are_a_batch() -> None:
    table = HashTable(DynamicSpec(64, 3))
    assert list(table.export()) == []
    table.insert_or_assign(torch.tensor([3]), torch.ones(1, 3))
    (rows,) = table.export()
    assert isinstance(rows, TableRows)
    assert rows.values.tolist() == [[1.0, 1.0, 1.0]]
