"""HostRows: a dict while nothing is evicted, then the least rows leave."""

import numpy
import pytest
import torch

from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.store import StoredRows, StoredTable
from emblib.specs import Eviction
from tests.dynamic.row_store_cases import EDGES, TABLES, as_dict, contents, random_rows, take

EVICTIONS = [eviction for eviction in Eviction if eviction is not Eviction.NONE]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_rows_come_back_as_they_were_put(eviction: Eviction) -> None:
    store = HostRows((4096, 2048), eviction)
    store.open(TABLES)
    rows = random_rows([*EDGES, *range(10, 900)], 40, seed=1)
    assert not store.put(1, rows).keys.numel()
    again = random_rows([*EDGES[:3], *range(850, 950)], 40, seed=2)
    assert not store.put(1, again).keys.numel()
    wanted = as_dict(rows) | as_dict(again)
    assert contents(store, 1) == wanted
    taken = take(store, 1, torch.tensor([5, 10, -1, 10]))
    assert taken.positions.tolist() == [1, 2, 3]
    assert set(as_dict(taken.rows)) == {10, -1}
    gone = set(store.expire(1, 0).tolist())
    assert gone == {k for k, row in wanted.items() if row[0] < 0} - {10, -1}
    assert store.erase(1, torch.tensor([10, 11])).tolist() == [False, 11 not in gone]
    assert store.size(0) == 0
    store.flush([[], []], "kept")
    assert store.note == "kept"
    store.clear(1)
    assert contents(store, 1) == {}


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_least_rows_leave_a_full_bucket(eviction: Eviction) -> None:
    """One bucket, so the order is exact; what comes in always stays."""
    store = HostRows(32, eviction)
    store.open([StoredTable("a", 8)])
    first, second = random_rows(range(32), 8, seed=1), random_rows(range(100, 110), 8, seed=2)
    store.put(0, first)
    left = store.put(0, second)
    rows = as_dict(first)

    def rank(key: int) -> tuple[int, int, int]:
        stamp, score, _ = rows[key]
        scored = eviction is not Eviction.LRU
        return (score if scored else 0, 0 if eviction is Eviction.LFU else stamp, key)

    least = sorted(rows, key=rank)[:10]
    assert as_dict(left) == {key: rows[key] for key in least}
    kept = {key: row for key, row in rows.items() if key not in least}
    assert contents(store, 0) == kept | as_dict(second)


def test_rows_of_one_put_do_not_evict_each_other() -> None:
    store = HostRows(32)
    store.open([StoredTable("a", 8)])
    store.put(0, random_rows(range(32), 8, seed=1))
    new = random_rows(range(100, 140), 8, seed=2)
    dropped = as_dict(store.put(0, new))
    kept = contents(store, 0)
    assert set(range(32)) < set(dropped)
    assert len(kept) == 32
    assert set(dropped) | set(kept) == {*range(32), *range(100, 140)}


def test_a_store_without_tables_says_so() -> None:
    store, keys = HostRows(32), torch.tensor([1])
    for method in (store.read, store.lift, store.erase):
        with pytest.raises(RuntimeError, match="call open"):
            method(0, keys)
    with pytest.raises(RuntimeError, match="call open"):
        store.put(0, random_rows([1], 8, seed=1))
    with pytest.raises(RuntimeError, match="call open"):
        store.size(0)


def test_rows_stay_after_close() -> None:
    store, table = HostRows(32), StoredTable("a", 8)
    store.open([table])
    rows = random_rows(range(5), 8, seed=1)
    store.put(0, rows)
    store.close()
    store.open([table])
    assert contents(store, 0) == as_dict(rows)
    with pytest.raises(ValueError, match="make one for each module"):
        store.open([StoredTable("b", 8)])


def test_an_open_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*arguments: object) -> torch.Tensor:
        raise MemoryError

    store = HostRows(32)
    with monkeypatch.context() as patch:
        patch.setattr("emblib.tables.memory.reserve", raise_error)
        with pytest.raises(MemoryError):
            store.open(TABLES)
    store.open(TABLES)
    rows = random_rows(range(3), 40, seed=1)
    store.put(1, rows)
    assert contents(store, 1) == as_dict(rows)


def test_more_rows_than_there_is_room_leave_at_once() -> None:
    store = HostRows(32)
    store.open([StoredTable("a", 8)])
    rows = random_rows(range(50), 8, seed=1)
    left = store.put(0, rows)
    assert left.keys.numel() == 18
    assert as_dict(left) | contents(store, 0) == as_dict(rows)
    assert not store.put(0, StoredRows.none(8)).keys.numel()


def test_a_capacity_is_any_integer() -> None:
    assert HostRows(numpy.int64(100)).capacity == 100
    assert HostRows([numpy.int64(100), 5]).capacity == (100, 5)
    for capacity in (1e6, True, [1.5], None):
        with pytest.raises(TypeError, match="capacity must be an int"):
            HostRows(capacity)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="capacity must be an int, got '10'"):
        HostRows("10")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one number, or one per table, got none"):
        HostRows([])


def test_it_is_opened_again_for_the_same_tables_alone() -> None:
    store = HostRows(32)
    store.open(TABLES)
    store.put(0, random_rows([1], 12, seed=1))
    store.open(TABLES)
    assert store.size(0) == 1
    with pytest.raises(ValueError, match="make one for each module"):
        store.open(TABLES[:1])
