"""The stores behind dynamic tables as a module uses them: reopened, full, killed, misused."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import BackingStore, DynamicEmbeddingBags, Precision, optim
from emblib.checkpoints import set_table_entries, table_entries
from emblib.dynamic.saving import snapshots
from emblib.dynamic.saving.dumps import DumpProgress
from emblib.dynamic.saving.entries import Entries
from emblib.dynamic.tiers import backing_tier
from emblib.dynamic.tiers import prefetched_rows as row_stage
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.store import FoundRows, StoredRows, StoredTable
from emblib.specs import DynamicSpec, Eviction
from tests.dynamic import tier_kills
from tests.dynamic.tier_cases import STORES, Pair, batch, prefetched, specs
from tests.tables.kills import run_alone


@pytest.mark.parametrize("kind", ["disk", "sqlite"])
def test_a_store_goes_on_where_it_was_flushed(kind: str, tmp_path: Path) -> None:
    pair = Pair(STORES[kind](tmp_path))
    for step in range(6):
        pair.train(step)
    pair.small.flush()
    tick = pair.small.index.tick
    unflushed = pair.small(*batch(77))
    unflushed.sum().backward()
    pair.small.close()
    pair.small = DynamicEmbeddingBags(
        specs((64, 32)),
        optim.Adam(0.1),
        backing=BackingStore(STORES[kind](tmp_path)),
        feature_tables=(0, 1, 0),
        seed=3,
    )
    assert pair.small.index.tick == tick
    assert pair.small.step == pair.big.step == 6
    pair.compare()
    for step in range(6, 12):
        pair.train(step)
        pair.small.flush()
    pair.compare()
    pair.small.close()


@pytest.mark.parametrize("kind", ["disk", "sqlite"])
def test_steps_go_on_where_a_store_was_flushed(kind: str, tmp_path: Path) -> None:
    def opened() -> DynamicEmbeddingBags:
        spec = DynamicSpec(32, 4, eviction=Eviction.STEP)
        backing = BackingStore(STORES[kind](tmp_path))
        return DynamicEmbeddingBags([spec], optim.SGD(0.1), backing=backing)

    for last in (3, 5):
        module = opened()
        for _ in range(2):
            module(torch.arange(3), torch.tensor([0, 3])).sum().backward()
        assert module.eviction_score(0) == last
        module.flush()
        module.close()
    store = STORES[kind](tmp_path)  # a note of an earlier version has no counts
    store.open([StoredTable("table_0", 16)])
    note = json.loads(store.note)
    del note["steps"]
    store.flush([[]], json.dumps(note))
    store.close()
    assert opened().eviction_score(0) == 5


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.STEP])
@pytest.mark.parametrize("flushes", [False, True])
def test_steps_go_on_from_the_rows_of_a_host_store(eviction: Eviction, flushes: bool) -> None:
    """Else rows of later steps would rank below those of before."""
    store, offsets = HostRows(64, eviction=eviction), torch.tensor([0, 32])

    def opened() -> DynamicEmbeddingBags:
        spec = DynamicSpec(32, 4, name="a", eviction=eviction)
        return DynamicEmbeddingBags([spec], optim.SGD(0.1), backing=BackingStore(store))

    first = opened()
    for step in range(20):
        first(torch.arange(step, step + 32), offsets)
        if flushes and step == 3:
            first.flush()
    first.close()
    second = opened()
    newest = max(int(rows.stamps.max()) for rows in store.iterate(0))
    assert second.num_training_steps == newest == 19
    for begin in range(1000, 1160, 32):
        second(torch.arange(begin, begin + 32), offsets)
    assert second.size(0) == 96
    assert min(int(rows.keys.min()) for rows in store.iterate(0)) >= 1000


def test_a_host_store_of_other_rows_is_refused() -> None:
    """Also where they take as many bytes, and no `flush` has noted what they are."""
    store = HostRows(64)

    def opened(optimizer: optim.Optimizer) -> DynamicEmbeddingBags:
        backing = BackingStore(store)
        return DynamicEmbeddingBags([DynamicSpec(32, 4, name="a")], optimizer, backing=backing)

    first = opened(optim.Adagrad(0.1))
    first(torch.arange(64), torch.tensor([0, 64]))
    assert first.size(0) == 64  # which writes the overflow rows back
    first.close()
    with pytest.raises(ValueError, match=r"the store holds rows of \[\['adagrad'\]"):
        opened(optim.LARS(0.1))
    second = opened(optim.Adagrad(0.1))
    second.clear()
    second.close()
    opened(optim.LARS(0.1)).close()  # an empty store fits all


@pytest.mark.parametrize("kind", ["disk", "sqlite"])
def test_a_store_is_let_go_of_with_its_module(kind: str, tmp_path: Path) -> None:
    module = DynamicEmbeddingBags(
        specs((32, 32)), optim.SGD(0.01), backing=BackingStore(STORES[kind](tmp_path))
    )
    module(torch.arange(100), torch.tensor([0, 50, 100])).sum().backward()
    module.prefetch(torch.arange(100), torch.tensor([0, 50, 100]))
    module.flush()
    del module
    module = DynamicEmbeddingBags(
        specs((32, 32)), optim.SGD(0.01), backing=BackingStore(STORES[kind](tmp_path))
    )
    assert module.size(0) == module.size(1) == 50


@pytest.mark.parametrize("rows", [64, 4096])
def test_keys_in_overflow_rows_are_in_the_table(rows: int) -> None:
    backing = BackingStore(HostRows(rows, seed=0))
    spec = DynamicSpec(32, 4, name="a")
    module = DynamicEmbeddingBags([spec], optim.SGD(0.01), backing=backing, seed=0)
    module.track_evictions()
    table, ids = module.table_handles()["a"], torch.arange(100)
    module(ids, torch.tensor([0, 100])).sum().backward()
    present, left = ids[table.contains(ids)], table.evicted(1)
    assert present.numel() + left.numel() == 100
    assert present.numel() == table.size() == min(rows + 32, 100)
    assert not torch.isin(left, present).any()


@pytest.mark.parametrize("kind", STORES)
def test_a_store_belongs_to_one_module(kind: str, tmp_path: Path) -> None:
    backing = BackingStore(STORES[kind](tmp_path))

    def make() -> DynamicEmbeddingBags:
        return DynamicEmbeddingBags(specs((32, 32)), optim.SGD(0.01), backing=backing)

    first = make()
    with pytest.raises(BlockingIOError, match="open in another module"):
        make()
    first.size(0)  # its store is still open
    first.close()
    second = make()
    del second
    make()


def test_a_store_of_other_rows_is_refused(tmp_path: Path) -> None:
    """Also where they take as many bytes."""

    def make(optimizer: optim.Optimizer, states: torch.dtype) -> DynamicEmbeddingBags:
        tiers = BackingStore(DiskRows(tmp_path))
        return DynamicEmbeddingBags(
            specs((32, 32)), optimizer, backing=tiers, precision=Precision(states=states)
        )

    module = make(optim.Adagrad(0.1), torch.float32)
    module.flush()
    module.close()
    with pytest.raises(ValueError, match="name another directory"):
        make(optim.SGD(0.1), torch.float32)
    with pytest.raises(ValueError, match="name another store"):
        make(optim.Adam(0.1), torch.float16)
    make(optim.Adagrad(0.1), torch.float32).close()


@pytest.mark.parametrize("kind", STORES)
def test_keys_are_erased_in_both_tiers(kind: str, tmp_path: Path) -> None:
    pair = Pair(STORES[kind](tmp_path))
    for step in range(4):
        pair.train(step)
    ids = torch.arange(-10, 200).repeat(2)
    for t in range(2):
        erased = [module.erase(t, ids) for module in (pair.big, pair.small)]
        assert torch.equal(*erased)
        assert erased[0].any()
    pair.compare()
    for step in range(4, 8):
        pair.train(step)
    pair.compare()
    for module in (pair.big, pair.small):
        module.reset_parameters()
        assert module.size(0) == module.size(1) == 0
    pair.train(9)
    pair.compare()
    pair.small.close()


def test_a_full_last_tier_lets_the_least_go() -> None:
    module = DynamicEmbeddingBags(
        specs((32, 32)),
        optim.SGD(0.01),
        backing=BackingStore(HostRows(64)),
        feature_tables=(0, 1, 0),
    )
    for step in range(20):
        module(*batch(step)).sum().backward()
    stats = module.tier_stats()["a"]
    assert stats.dropped > 0
    assert module.size(0) <= 32 + 64
    assert stats.new - stats.dropped == module.size(0)


class FullStore(HostRows):
    """Takes nothing in while it is full."""

    full = False

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().put(table, rows)


def test_rows_that_the_store_cannot_take_stay_in_memory() -> None:
    store = FullStore(4096)
    pair = Pair(store)
    for step in range(4):
        pair.train(step)
    held = {t: table_entries(pair.small, t).keys for t in range(2)}
    store.full = True
    failures = 0
    for step in range(4, 8):
        try:
            pair.small(*batch(step)).sum().backward()
        except OSError:
            failures += 1
    assert failures
    store.full = False
    for t, keys in held.items():
        assert set(keys.tolist()) <= set(table_entries(pair.small, t).keys.tolist())
    assert all(line.dropped == 0 for line in pair.small.tier_stats().values())


def bags_over(store: HostRows) -> DynamicEmbeddingBags:
    return DynamicEmbeddingBags(
        specs((32, 32)), optim.SGD(0.01), backing=BackingStore(store), feature_tables=(0, 1, 0)
    )


class KeepingStore(HostRows):
    """Lets go of nothing while it is stuck."""

    stuck = False

    def lift(self, table: int, keys: Tensor) -> None:
        if self.stuck:
            raise OSError(5, "Input/output error")
        super().lift(table, keys)


def test_rows_that_the_store_does_not_let_go_of_are_in_one_tier() -> None:
    store = KeepingStore(4096)
    module = bags_over(store)
    for step in range(4):
        module(*batch(step)).sum().backward()
    held = {t: set(table_entries(module, t).keys.tolist()) for t in range(2)}
    store.stuck = True
    for step in (0, 1):
        with pytest.raises(OSError, match="Input/output"):
            module(*batch(step))
    with pytest.raises(OSError, match="Input/output"):
        module.state_dict()
    store.stuck = False
    for t, keys in held.items():
        found = table_entries(module, t).keys.tolist()
        assert len(found) == len(set(found)), "a key is in one tier"
        assert keys <= set(found), "what was evicted moved down"
    for step in range(8):
        module(*batch(step)).sum().backward()
    for t in range(2):
        assert len(table_entries(module, t)) == module.size(t)


class SlowStore(HostRows):
    """Fails the first read of another thread, and takes its time for the second."""

    reads, asked = 0, threading.Event()

    def read(self, table: int, keys: Tensor) -> FoundRows:
        if threading.current_thread() is not threading.main_thread():
            self.reads += 1
            if self.reads == 1:
                self.asked.wait()
                raise OSError(5, "Input/output error")
            time.sleep(0.1)
        return super().read(table, keys)


def test_a_failed_prefetch_is_told_once_nothing_is_read_any_more() -> None:
    store = SlowStore(4096)
    module = bags_over(store)
    for step in range(4):
        module(*batch(step)).sum().backward()
    module.backing.store.start_prefetch(0, torch.tensor([1]))
    module.backing.store.start_prefetch(0, next(store.iterate(0)).keys[:5])
    store.asked.set()
    with pytest.raises(OSError, match="Input/output"):
        module.clear()
    assert store.reads == 2
    module.clear()
    assert [module.size(t) for t in range(2)] == [0, 0]


def test_a_load_leaves_the_best_in_a_last_tier_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backing_tier, "BATCH", 64)
    keys = torch.arange(1024)
    given = Entries(keys, 1024 - keys, None, {"weight": torch.ones(1024, 6)})
    module = DynamicEmbeddingBags(
        specs((32, 32)), optim.SGD(0.1), backing=BackingStore(HostRows(512))
    )
    told: list[DumpProgress] = []
    loaded = set_table_entries(module, "a", given, told.append)
    assert loaded.loaded == module.size(0)
    kept = table_entries(module, "a").keys
    assert int((kept < 512).sum()) > 0.85 * 512
    assert told[0] == DumpProgress("a", 64, 1024)
    assert told[-1] == DumpProgress("a", 1024, 1024)


def test_prefetched_rows_are_in_memory() -> None:
    pair = Pair(HostRows(4096))
    for step in range(8):
        pair.train(step)
    for step in range(8, 12):
        pair.small.prefetch(*batch(step))
        pair.small.prefetch(*batch(step + 1))
        pair.small.backing.store.wait()
        pair.train(step)
    pair.compare()
    assert all(line.prefetched for line in pair.small.tier_stats().values())
    pair.small.reset_stats()
    assert all(line.prefetched == 0 for line in pair.small.tier_stats().values())


def test_prefetch_changes_nothing_of_a_last_tier_that_is_full() -> None:
    states = []
    for ahead in (0, 3):
        tiers = BackingStore(HostRows(64, seed=0))
        module = DynamicEmbeddingBags(
            specs((32, 32)), optim.SGD(0.01), backing=tiers, feature_tables=(0, 1, 0), seed=0
        )
        for step in range(12):
            for coming in range(step + 1, step + 1 + ahead):
                prefetched(module).prefetch(*batch(coming))
                module.backing.store.wait()
            module(*batch(step)).sum().backward()
        states.append(module.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_rows_that_an_exchange_drops_are_in_memory_no_longer() -> None:
    """The thread may prefetch them between the insertion of a batch and its moves."""
    host = HostRows(32, seed=0)
    store = row_stage.PrefetchedRows(host, [StoredTable("a", 8)])
    old, new = torch.arange(32), torch.arange(100, 120)
    values = torch.zeros(32, 8, dtype=torch.uint8)
    store.put(0, StoredRows(old, torch.zeros(32, dtype=torch.int64), old, values))
    store.prefetch(0, old)
    entries = torch.stack([new, torch.full_like(new, 9), new], 1)
    dropped = store.exchange(0, old[:0], entries, values[:20])
    assert dropped.numel()
    assert not store.read(0, dropped).positions.numel()
    assert store.read(0, old).positions.numel() == host.read(0, old).positions.numel()


def test_the_first_error_of_a_repeated_put_is_raised() -> None:
    class Broken(HostRows):
        causes = iter(["the cause", "closed"])

        def put(self, table: int, rows: StoredRows) -> StoredRows:
            raise RuntimeError(next(self.causes))

    store = row_stage.PrefetchedRows(Broken(32), [StoredTable("a", 8)])
    moves, keys = row_stage.RowMoves(), torch.arange(4)
    moves.demoted[0] = StoredRows(keys, keys, keys, torch.zeros(4, 8, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="the cause"):
        store.apply_moves(moves)
    assert store.read(0, keys).positions.numel() == 4  # unstored rows
    assert store.num_prefetched(0, keys) == 0


def test_an_erase_that_raises_keeps_rows_that_are_not_stored() -> None:
    class Broken(HostRows):
        def erase(self, table: int, keys: Tensor) -> Tensor:
            raise OSError(5, "Input/output error")

    store = row_stage.PrefetchedRows(Broken(32), [StoredTable("a", 8)])
    keys = torch.arange(4)
    store.add_unstored(0, StoredRows(keys, keys, keys, torch.zeros(4, 8, dtype=torch.uint8)))
    with pytest.raises(OSError, match="Input/output"):
        store.erase(0, keys)
    assert store.size(0) == 4


def test_a_key_of_a_put_that_stored_a_part_expires_once() -> None:
    class Broken(HostRows):
        def put(self, table: int, rows: StoredRows) -> StoredRows:
            super().put(table, rows.at(slice(1)))
            raise MemoryError

    store = row_stage.PrefetchedRows(Broken(32), [StoredTable("a", 8)])
    moves, keys, stamps = row_stage.RowMoves(), torch.tensor([1, 2, 3]), torch.tensor([0, 0, 9])
    moves.demoted[0] = StoredRows(keys, stamps, keys, torch.zeros(3, 8, dtype=torch.uint8))
    with pytest.raises(MemoryError):
        store.apply_moves(moves)
    assert store.wrapped_store.size(0) == 1
    assert store.expire(0, 5).tolist() == [1, 2]
    assert store.size(0) == 1


def test_an_older_row_in_the_store_expires_without_the_newer_unstored_one() -> None:
    store = row_stage.PrefetchedRows(HostRows(32), [StoredTable("a", 8)])
    keys, values = torch.tensor([1]), torch.zeros(1, 8, dtype=torch.uint8)
    store.put(0, StoredRows(keys, torch.tensor([0]), keys, values))
    store.add_unstored(0, StoredRows(keys, torch.tensor([9]), keys, values))
    assert not store.expire(0, 5).numel()
    assert store.read(0, keys).rows.stamps.tolist() == [9]
    assert store.wrapped_store.size(0) == 0
    assert store.expire(0, 10).tolist() == [1]


def test_prefetched_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_stage, "MAX_PREFETCHED", 100)
    store = HostRows(4096)
    module = bags_over(store)
    for step in range(20):
        module(*batch(step)).sum().backward()
    for step in range(20):
        prefetched(module).prefetch(*batch(step))
    module.backing.store.wait()
    staged = module.backing.store._prefetched_blocks[0]
    assert 0 < sum(rows.keys.numel() for rows in staged) <= 100
    size = module.size(0)  # puts rows back that were served in place
    assert store.size(0) + module.index.size(0) == size


def test_bad_arguments_are_told(tmp_path: Path) -> None:
    spec = [DynamicSpec(32, 4)]
    with pytest.raises(TypeError, match="must be a BackingStore"):
        DynamicEmbeddingBags(spec, optim.SGD(0.01), backing=HostRows(64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a RowStore"):
        BackingStore("rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"External\(\) keeps its state outside"):
        DynamicEmbeddingBags(spec, optim.External(), backing=BackingStore(HostRows(64)))
    with pytest.raises(ValueError, match="needs an eviction"):
        HostRows(64, "none")
    with pytest.raises(ValueError, match="one per table"):
        DynamicEmbeddingBags(spec, optim.SGD(0.01), backing=BackingStore(HostRows((64, 64))))
    module = DynamicEmbeddingBags(
        spec, optim.SGD(0.01), backing=BackingStore(DiskRows(tmp_path / "rows"), max_misses=10)
    )
    with pytest.raises(RuntimeError, match="may have 10 ids"):
        module(torch.arange(20), torch.tensor([0, 20]))
    with pytest.raises(TypeError, match="copied or pickled"):
        module.__getstate__()
    with pytest.raises(RuntimeError, match="state_dict"):
        snapshots.take(module)
    with pytest.raises(RuntimeError, match="have no slots"):
        snapshots.restore(module, {})
    with pytest.raises(BlockingIOError, match="one owner"):
        DynamicEmbeddingBags(
            spec, optim.SGD(0.01), backing=BackingStore(DiskRows(tmp_path / "rows"))
        )
    module.close()


@pytest.mark.parametrize("kind", ["disk", "sqlite", "disk_behind", "sqlite_behind"])
def test_kills_lead_back_to_the_last_flush(kind: str, tmp_path: Path) -> None:
    """At any time, and in the middle of moving rows down."""
    done = run_alone(tier_kills, kind, tmp_path)
    assert "DEMOTING" in done
    assert "steps" in done


@pytest.mark.parametrize("training", [True, False])
def test_gradient_of_sample_weights_of_rows_that_went_below(training: bool) -> None:
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 4)], optim.SGD(0.1), backing=BackingStore(HostRows(1000))
    )
    ids, offsets = torch.arange(4), torch.arange(0, 5, 2)
    module(ids, offsets).sum().backward()
    module.eval()
    rows = module(ids, torch.arange(5)).detach().clone()
    module.train(training)
    weights = torch.full((4,), 2.0, requires_grad=True)
    out = module(ids, offsets, weights)
    module.train()
    for first in (100, 140, 180):
        module(torch.arange(first, first + 30), torch.tensor([0, 30])).sum().backward()
    assert module.find(0, ids).tolist() == [-1] * 4, "not above any more"
    out.backward(torch.full_like(out, 3.0))
    torch.testing.assert_close(weights.grad, 3.0 * rows.sum(1))
    module.eval()
    change = module(ids, torch.arange(5)).detach() - rows
    torch.testing.assert_close(change, torch.full_like(rows, -0.6 if training else 0.0))
    assert int(module.dropped_updates) == 0
