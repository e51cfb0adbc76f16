"""Batches in front of `HostRows` that one op inserts: the same bits as the ops one by one."""

import threading

import pytest
import torch
from torch import Tensor

from emblib import BackingStore, DynamicEmbeddingBags, HostRows, TierMode, optim
from emblib.dynamic import one_op
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.tiers.backing_tier import BackingTier
from emblib.specs import Eviction
from emblib.tables.calling_thread import CallingThread
from tests.dynamic.tier_cases import batch, prefetched, specs
from tests.interrupts import entries_of_conditions
from tests.thread_cases import in_fork

EVICTIONS = [Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU, Eviction.STEP]


def _module(eviction: Eviction, mode: TierMode, store_rows: int) -> DynamicEmbeddingBags:
    store = HostRows(store_rows, Eviction.LFU if eviction is Eviction.LFU else Eviction.LRU, seed=5)
    return DynamicEmbeddingBags(
        specs((32, 64), eviction=eviction),
        optim.Adam(0.1),
        backing=BackingStore(store, mode, max_misses=200),
        feature_tables=(0, 1, 0),
        seed=3,
    )


def _store(module: DynamicEmbeddingBags) -> HostRows:
    assert module.state.backing is not None
    store = module.state.backing.store.wrapped_store
    assert isinstance(store, HostRows)
    return store


def _assert_same_index(index: HashIndex, other: HashIndex) -> Tensor:
    """Compare all but the queues; return which slots are used."""
    used = index.tags != 0
    assert torch.equal(index.tags, other.tags)
    assert torch.equal(index.entries[used], other.entries[used])
    for name in ("tables", "clock", "counters"):
        assert torch.equal(getattr(index, name), getattr(other, name)), name
    return used


def _assert_same(module: DynamicEmbeddingBags, other: DynamicEmbeddingBags) -> None:
    _assert_same_index(module.state.index, other.state.index)
    pairs = zip(module.state.row_buffers, other.state.row_buffers, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    indices, records = _store(module)._indices, _store(module)._records
    for t, index in enumerate(_store(other)._indices):
        used = _assert_same_index(indices[t], index)
        assert torch.equal(
            records[t][: used.numel()][used], _store(other)._records[t][: used.numel()][used]
        )
    assert module.tier_stats() == other.tier_stats()


@pytest.mark.parametrize("store_rows", [96, 2048])
@pytest.mark.parametrize("mode", TierMode)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_equals_the_ops_one_by_one(
    eviction: Eviction,
    mode: TierMode,
    store_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    thread_counts: list[int],
) -> None:
    served: list[bool] = []

    def insert_in_one_op(*arguments: object) -> one_op.OneOpBatch | None:
        inserted = at_once(*arguments)  # type: ignore[arg-type]
        served.append(inserted is not None)
        return inserted

    at_once = one_op.insert_in_one_op
    monkeypatch.setattr(one_op, "insert_in_one_op", insert_in_one_op)
    module, other = (_module(eviction, mode, store_rows) for _ in range(2))
    for step in range(60):
        ids, offsets = batch(step, 40 if step % 3 else 110)
        torch.set_num_threads(thread_counts[step % len(thread_counts)])
        ones = torch.ones_like(ids)  # given counts are not for the op
        outs = module(ids, offsets), other(ids, offsets, counts=ones)
        assert torch.equal(*outs)
        assert torch.equal(module.key_status(), other.key_status())
        if step % 5 != 4:
            for out in outs:
                out.sin().sum().backward()
        if step % 7 == 6:  # an update after rows have moved
            late = module(*batch(step + 1000, 40)), other(*batch(step + 1000, 40), counts=ones[:40])
            for out in outs if outs[0].grad_fn is not None and step % 5 == 4 else late:
                out.sum().backward()
        _assert_same(module, other)
    assert all(served)
    stats = module.tier_stats()["a"]
    assert min(stats.hits, stats.backing_hits, stats.new, stats.promoted, stats.demoted) > 20
    assert stats.served_in_place > 20
    assert (stats.dropped > 20) is (store_rows == 96)


def test_more_distinct_keys_than_overflow_rows_are_inserted_one_by_one() -> None:
    module = _module(Eviction.LRU, TierMode.CACHING, 2048)
    offsets = torch.tensor([0, 150, 150, 250])  # 250 keys of the first table, 200 overflow rows
    with pytest.raises(RuntimeError, match="may have 200 ids of a table that are not in the fast"):
        module(torch.arange(250), offsets)
    assert module.size("a") == 0
    module(torch.arange(250) % 190, offsets)
    assert module.size("a") == 190


def test_prefetched_rows_are_used() -> None:
    module, other = (_module(Eviction.LRU, TierMode.CACHING, 2048) for _ in range(2))
    for step in range(6):
        ids, offsets = batch(step)
        if step:
            prefetched(module).prefetch(ids, offsets)
            assert module.state.backing is not None
            module.state.backing.store.wait()
            other.prefetch(ids, offsets)  # does nothing on the CPU
            assert other.weights.is_cuda or not other.state.backing.store.has_rows_in_memory
        assert torch.equal(module(ids, offsets), other(ids, offsets))
    assert module.tier_stats()["a"].prefetched > 20
    assert other.weights.is_cuda or other.tier_stats()["a"].prefetched == 0


def test_the_op_leaves_a_store_alone_while_the_thread_prefetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchanges: list[int] = []

    def exchange(store: HostRows, table: int, *rows: Tensor) -> Tensor:
        exchanges.append(table)
        dropped: Tensor = exchange_rows(store, table, *rows)
        return dropped

    exchange_rows = HostRows.exchange
    monkeypatch.setattr(HostRows, "exchange", exchange)
    module, other = (_module(Eviction.LRU, TierMode.CACHING, 2048) for _ in range(2))
    assert module.state.backing is not None
    store, released = module.state.backing.store, threading.Event()
    for step in range(9):
        if step == 3:
            store._prefetches.append(store._submit(lambda _: released.wait()))
        if step == 6:
            released.set()
            store.wait()
        exchanges.clear()
        out = module(*batch(step))
        assert bool(exchanges) is (3 <= step < 6)
        assert torch.equal(out, other(*batch(step)))
        _assert_same(module, other)


@pytest.mark.parametrize("mode", TierMode)
def test_rows_that_are_prefetched_at_the_last_moment_do_not_get_old(
    mode: TierMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may prefetch rows after the module has chosen the op, before the op runs."""
    chooses_op = False
    monkeypatch.setattr(BackingTier, "is_readable_by_ops", property(lambda _: chooses_op))
    module, other = (_module(Eviction.LFU, mode, 2048) for _ in range(2))
    assert module.state.backing is not None
    for step in range(24):
        ids, offsets = batch(step % 5)
        prefetched(module).prefetch(ids, offsets)
        module.state.backing.store.wait()
        chooses_op = step % 3 > 0  # in the other steps rows in memory are read
        out, wanted = module(ids, offsets), other(ids, offsets)
        assert torch.equal(out, wanted)
        for result in (out, wanted):
            result.sum().backward()
    assert module.tier_stats()["a"].served_in_place


class _Blocked:
    """Holds the thread of a module's store until it is released."""

    def __init__(self, module: DynamicEmbeddingBags) -> None:
        assert module.state.backing is not None
        self._released = threading.Event()
        module.state.backing.store._submit(lambda _: self._released.wait())

    def release(self) -> None:
        self._released.set()


def test_calls_of_the_thread_take_no_lock_that_ctrl_c_could_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = entries_of_conditions(monkeypatch)
    module, ids_of_prefetch = _behind(), batch(9)
    assert module.state.backing is not None
    for step in range(6):
        prefetched(module).prefetch(*ids_of_prefetch)
        module(*batch(step)).sum().backward()
    module.state.backing.store.wait()
    module.close()
    assert threading.get_ident() not in threads


def test_a_thread_makes_its_calls_before_it_ends() -> None:
    thread, made = CallingThread(), list[int]()
    for call in [thread.submit(made.append, number) for number in range(3)]:
        call.result()
    with pytest.raises(TypeError):
        thread.submit(made.append).result()
    thread.submit(made.append, 3)
    thread.stop()
    assert made == [0, 1, 2, 3]
    thread.submit(made.append, 4)
    del thread
    assert made == [0, 1, 2, 3, 4]


def _behind() -> DynamicEmbeddingBags:
    return DynamicEmbeddingBags(
        specs((32, 64)),
        optim.Adam(0.1),
        backing=BackingStore(HostRows(2048, seed=5), write_behind=True),
        feature_tables=(0, 1, 0),
        seed=3,
    )


def test_a_call_makes_the_moves_that_the_thread_has_not_begun() -> None:
    module = _behind()
    module(*batch(0))
    blocked = _Blocked(module)
    module(*batch(1))
    backing = module.state.backing
    assert backing is not None
    moves = backing._moves
    assert moves is not None
    assert moves.exchanged  # not made yet
    module(*batch(2))  # does not wait for the thread
    assert not moves.exchanged
    blocked.release()


def test_a_forked_process_has_the_moved_rows() -> None:
    module = _behind()
    for step in range(4):
        module(*batch(step)).sum().backward()
    expected = module(*batch(4))
    blocked = _Blocked(module)
    module(*batch(5))  # moves wait for the thread, and are made before the fork

    def compare() -> None:
        with torch.no_grad():
            module.eval()
            assert torch.equal(module(*batch(4)), expected)

    assert in_fork(compare) == ""
    blocked.release()
