"""Handles of dynamic tables in one process: of a module, a collection and a model."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    HostRows,
    KeyedJaggedTensor,
    KeyStatus,
    init,
    optim,
)
from emblib.dynamic import DynamicTable, tables_of
from emblib.storage import Hash

IDS = torch.tensor([5, 2**62, -7, 5, 9, 10, 11, 9])


def module(device: torch.device, **options: Any) -> DynamicEmbeddingBags:
    """Tables "item" and "user", each with half of the ids of a batch."""
    eviction = options.pop("eviction", Eviction.LRU)
    specs = [DynamicSpec(64, 4, name=name, eviction=eviction) for name in ("item", "user")]
    return DynamicEmbeddingBags(specs, optim.Adam(0.1), seed=3, device=device, **options)


def train(bags: DynamicEmbeddingBags, ids: Tensor = IDS) -> None:
    offsets = torch.arange(0, ids.numel() + 1, ids.numel() // 4)
    device = bags.weights.device
    bags(ids.to(device), offsets.to(device)).sum().backward()


def rows_by_key(table: DynamicTable) -> dict[int, list[float]]:
    found = table.entries()
    weights = found.rows["weight"]
    return dict(zip(found.keys.tolist(), weights.tolist(), strict=True))


def test_counts_and_keys(device: torch.device) -> None:
    bags = module(device)
    train(bags)
    item, user = bags.table_handles()["item"], bags.table_handles()["user"]
    assert (item.size(), user.size(), user.capacity(), user.step()) == (3, 3, 64, 1)
    assert item.stats() == bags.stats()["item"]
    assert item.tier_stats() is None
    assert item.contains(torch.tensor([9, -7, -7])).tolist() == [False, True, True]
    assert user.contains(torch.tensor([9, -7])).tolist() == [True, False]
    assert user.erase(torch.tensor([9, 9, 5])).tolist() == [True, False, False]
    assert (item.size(), user.size()) == (3, 2)
    assert item.score() is None
    with pytest.raises(TypeError, match="since must be an int, got '1'"):
        item.entries(since="1")  # type: ignore[arg-type]
    assert isinstance(bags.tables[1], DynamicSpec)
    assert [spec.name for spec in bags.tables] == ["item", "user"]


def test_a_table_grows_in_advance_and_shrinks() -> None:
    specs = [DynamicSpec(1024, 4, name=name, initial_capacity=64) for name in ("item", "user")]
    item = DynamicEmbeddingBags(specs, optim.Adam(0.1)).table_handles()["item"]
    item.reserve(400)
    assert item.capacity() >= 400
    assert item.shrink(40) == 0
    assert item.capacity() == 64
    with pytest.raises(ValueError, match="shrinks to its initial_capacity"):
        item.shrink(32)
    item.reserve(1 << 50)  # at most to its capacity
    assert item.capacity() == 1024
    item.reserve(0)
    for call, rows in ((item.reserve, -1), (item.shrink, 0)):
        with pytest.raises(ValueError, match="rows must be"):
            call(rows)


def test_status_of_keys(device: torch.device) -> None:
    bags = module(device)
    asked = torch.tensor([9, 5, 77])
    with pytest.raises(RuntimeError, match="there was none"):
        bags.table_handles()["user"].key_status(asked)
    train(bags)
    new, hit, absent = KeyStatus.NEW, KeyStatus.HIT, KeyStatus.ABSENT
    assert bags.table_handles()["user"].key_status(asked).tolist() == [new, absent, absent]
    assert bags.table_handles()["item"].key_status(asked).tolist() == [absent, new, absent]
    ids = torch.tensor([5, 6, 7, 8, 77, 78, 79, 9])
    train(bags, ids)
    assert bags.table_handles()["user"].key_status(asked).tolist() == [hit, absent, new]
    by_position = bags.key_status().cpu()
    for name, half in (("item", ids[:4]), ("user", ids[4:])):
        own = by_position[:4] if name == "item" else by_position[4:]
        assert bags.table_handles()[name].key_status(half).tolist() == own.tolist()


def test_ids_that_were_overwritten_are_not_answered(device: torch.device) -> None:
    bags, ids = module(device), IDS.to(device, copy=True)
    train(bags, ids)
    ids[0] = 1
    with pytest.raises(RuntimeError, match="changed in place"):
        bags.table_handles()["item"].key_status(torch.tensor([5]))


def test_scores(device: torch.device) -> None:
    bags = module(device, eviction=Eviction.CUSTOM)
    item, user = bags.table_handles()["item"], bags.table_handles()["user"]
    item.set_score(7)
    user.set_score(-3)
    assert (item.score(), user.score()) == (7, -3)
    train(bags)
    assert set(user.entries().scores.tolist()) == {-3}
    stepped = module(device, eviction=Eviction.STEP)
    stepped.table_handles()["user"].set_step(40)
    assert (stepped.table_handles()["item"].score(), stepped.table_handles()["user"].score()) == (
        1,
        40,
    )
    plain = module(device)
    with pytest.raises(ValueError, match=r"no table has it"):
        plain.table_handles()["user"].set_score(1)


@pytest.mark.parametrize("tiered", [False, True])
def test_scores_of_keys(device: torch.device, tiered: bool) -> None:
    """A full table then evicts the keys with the lowest scores, wherever they were."""
    backing = BackingStore(HostRows(32, Eviction.CUSTOM, seed=0)) if tiered else None
    spec = DynamicSpec(32, 4, name="item", eviction=Eviction.CUSTOM)
    bags = DynamicEmbeddingBags([spec], optim.SGD(0.1), seed=3, device=device, backing=backing)
    item, offsets = bags.table_handles()["item"], torch.tensor([0, 16], device=device)
    item.set_score(100)
    first = torch.arange(64 if tiered else 32)
    for part in first.split(16):
        bags(part.to(device), offsets).sum().backward()
    assert item.size() == first.numel()
    some = torch.tensor([3, 1000, 5, 3])
    assert item.set_key_scores(some, torch.tensor([7, 1, 8, 2])).tolist() == [1, 0, 1, 1]
    entries = item.entries()
    scores = dict(zip(entries.keys.tolist(), entries.scores.tolist(), strict=True))
    assert (scores.pop(3), scores.pop(5)) == (7, 8)
    assert set(scores.values()) == {100}
    bags.track_evictions()
    bags(torch.tensor([2000, 2001], device=device), torch.tensor([0, 2], device=device)).sum()
    if not tiered:
        assert item.evicted(item.step()).tolist() == [3, 5]
    with pytest.raises(ValueError, match="one per key = 4, got 3"):
        item.set_key_scores(some, torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="must be integers"):
        item.set_key_scores(some, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    plain = module(device)
    with pytest.raises(ValueError, match="'item' evicts by lru"):
        plain.table_handles()["item"].set_key_scores(some, 1)


def test_entries_may_have_rows_from_elsewhere() -> None:
    """As documented; states of the optimizer start from their first value."""
    bags = DynamicEmbeddingBags([DynamicSpec(64, 4, name="user")], optim.Adam(0.1))
    table, keys, rows = bags.table_handles()["user"], torch.tensor([7, 2**62]), torch.rand(2, 4)
    with pytest.raises(TypeError, match=r"got dict; dataclasses.replace\(entries\(\), keys="):
        table.set_entries({7: rows[0]})  # type: ignore[arg-type]
    stamps = torch.zeros_like(keys)
    table.set_entries(replace(table.entries(), keys=keys, stamps=stamps, rows={"weight": rows}))
    assert torch.equal(bags.eval()(keys, torch.arange(3)), rows)


@pytest.mark.parametrize("tiered", [False, True])
def test_changes_reach_a_copy(device: torch.device, tiered: bool) -> None:
    """Of each table alone, whatever the other one does; the copy may have a store or not."""
    bags = module(device)
    with pytest.raises(RuntimeError, match="call track_evictions"):
        bags.table_handles()["user"].changes_since(0)
    user = bags.table_handles()["user"]
    user.track_evictions()
    train(bags)
    other = module(device, backing=BackingStore(HostRows(64)) if tiered else None)
    for method in (user.set_entries, user.apply_changes):
        with pytest.raises(TypeError, match=r"(entries|changes) must be .*, got NoneType"):
            method(None)  # type: ignore[arg-type]
    other.table_handles()["user"].set_entries(user.entries())
    step = user.step()
    other.index.set_tick(step)
    train(bags, IDS + 1)
    user.erase(torch.tensor([11]))
    changes = user.changes_since(step)
    assert (changes.until, changes.removed.tolist()) == (2, [11])
    assert user.evicted(step).tolist() == [11]
    assert sorted(changes.entries.keys.tolist()) == [9, 10, 12]  # of step 1 again, and step 2
    applied = other.table_handles()["user"].apply_changes(changes)
    assert applied.left_out == 0
    assert rows_by_key(other.table_handles()["user"]) == rows_by_key(user)
    assert other.table_handles()["item"].size() == 0
    other.index.set_tick(9)
    with pytest.raises(ValueError, match="already"):
        other.table_handles()["user"].apply_changes(changes)


def test_one_table_of_several_in_a_dump(device: torch.device, tmp_path: Path) -> None:
    bags = module(device)
    bags.track_evictions()
    train(bags)
    step = bags.table_handles()["user"].save(tmp_path / "user")
    train(bags, IDS + 1)
    bags.table_handles()["user"].save(tmp_path / "more", since=step)
    bags.save(tmp_path / "all")
    for directory in ("user", "all"):
        other = module(device)
        loaded = other.table_handles()["user"].load(tmp_path / directory)
        assert loaded.left_out == 0
        assert other.table_handles()["item"].size() == 0
        if directory == "user":
            assert other.step == 1  # the optimizer continues with the steps of the dump
            other.table_handles()["user"].load(tmp_path / "more")
        assert other.step == 2
        assert rows_by_key(other.table_handles()["user"]) == rows_by_key(
            bags.table_handles()["user"]
        )
        assert other.index.hash_key(1) == bags.index.hash_key(1)
    with pytest.raises(ValueError, match="has no table 'item'"):
        other.table_handles()["item"].load(tmp_path / "user")


def test_counters_shared_by_tables_are_not_lost_silently(tmp_path: Path) -> None:
    admission = FrequencyAdmission(2, ExactCounter(64))
    specs = [DynamicSpec(64, 4, name=name, admission=admission) for name in ("item", "user")]
    both = DynamicEmbeddingBags(specs, optim.SGD(0.1))
    with pytest.raises(ValueError, match="save the module instead"):
        both.table_handles()["user"].save(tmp_path / "dump")
    alone, other = (DynamicEmbeddingBags(specs[1:], optim.SGD(0.1)) for _ in range(2))
    offsets, ids = torch.tensor([0, 1]), torch.tensor([3])
    alone(ids, offsets)
    alone.table_handles()["user"].save(tmp_path / "dump")
    other.table_handles()["user"].load(tmp_path / "dump")
    other(ids, offsets)
    assert (
        other.table_handles()["user"].size() == 1
    )  # the second use, counting the one before the dump


def collection(device: torch.device) -> EmbeddingBagCollection:
    """Tables "user" (hash) and "country" (dense)."""
    tables = [
        EmbeddingBagConfig(64, 4, "user", ["u", "v"], storage=Hash()),
        EmbeddingBagConfig(16, 4, "country", ["c"]),
    ]
    return EmbeddingBagCollection(tables, device, optimizer=optim.Adam(0.1))


def batch(device: torch.device) -> KeyedJaggedTensor:
    values = torch.tensor([100, 200, 300, 1])
    kjt = KeyedJaggedTensor(["u", "v", "c"], values, lengths=torch.tensor([1, 1, 1, 0, 1, 0]))
    return kjt.to(device)


def test_of_a_collection_and_a_model(device: torch.device) -> None:
    model = nn.ModuleDict({"left": collection(device), "right": collection(device)})
    left: Any = model["left"]
    left(batch(device)).values().sum().backward()
    assert left.tables["user"].size() == 3
    tables = tables_of(model)
    assert sorted(tables) == ["left.user", "right.user"]
    assert (tables["left.user"].size(), tables["right.user"].size()) == (3, 0)
    assert tables_of(left).keys() == {"user"}
    moved = copy.deepcopy(left)
    moved.tables["user"].erase(torch.tensor([100]))
    assert (moved.tables["user"].size(), left.tables["user"].size()) == (2, 3)
    with pytest.raises(KeyError, match=r"several collections.*left\.user.*right\.user"):
        tables["user"]


def test_names_that_are_no_dynamic_table(device: torch.device) -> None:
    tables = collection(device).tables
    with pytest.raises(KeyError, match=r"'country' is stored as Dense"):
        tables["country"]
    with pytest.raises(KeyError, match=r"no table 'usr'.*did you mean 'user'"):
        tables["usr"]
    assert "country" not in tables
    assert tables.get("nothing") is None
    bags = module(device)
    with pytest.raises(KeyError, match="did you mean 'item'"):
        bags.table_handles()["items"]


def test_on_meta() -> None:
    made = EmbeddingBagCollection(
        [EmbeddingBagConfig(64, 4, "user", storage=Hash())], device="meta", optimizer=optim.SGD(0.1)
    )
    with pytest.raises(RuntimeError, match="no memory on meta"):
        made.tables["user"].size()
    made.to_empty(device="cpu")
    assert made.tables["user"].size() == 0


def test_states_of_a_torch_optimizer_in_a_collection(device: torch.device) -> None:
    """A key in the row of an evicted one makes its first step as in an empty table."""
    config = EmbeddingBagConfig(32, 4, "t", storage=Hash(initializer=init.Constant(0.0)))
    tables = EmbeddingBagCollection([config], device)
    optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
    tables.tables["t"].track_optimizer_state(optimizer)
    for first in (0, 0, 100):
        keys = torch.arange(first, first + 32, device=device)
        ones = torch.ones(32, dtype=torch.int64, device=device)
        tables(KeyedJaggedTensor(["t"], keys, lengths=ones)).values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    entries = tables.tables["t"].entries()
    new = entries.rows["weight"][entries.keys >= 100]
    torch.testing.assert_close(new, torch.full_like(new, -0.1))
    with pytest.raises(ValueError, match="among its own"):
        tables.tables["t"].track_optimizer_state(torch.optim.SGD(nn.Linear(1, 1).parameters()))
