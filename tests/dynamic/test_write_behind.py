"""`BackingStore(write_behind=True)`: a thread moves rows, and no result depends on it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from emblib import BackingStore, DynamicEmbeddingBags, HostRows, TierMode, optim
from emblib.checkpoints import table_entries
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since
from emblib.dynamic.tiers.store import RowStore, StoredRows, StoredTable
from tests.dynamic.row_store_cases import contents
from tests.dynamic.tier_cases import STORES, batch, specs


def make(
    store: RowStore, mode: TierMode = TierMode.CACHING, *, write_behind: bool = True
) -> DynamicEmbeddingBags:
    """Two tables of which most rows are in the store."""
    backing = BackingStore(store, mode, write_behind=write_behind)
    return DynamicEmbeddingBags(
        specs((32, 64), eviction="lfu"),
        optim.Adam(0.1),
        backing=backing,
        feature_tables=(0, 1, 0),
        seed=3,
    )


def train(module: DynamicEmbeddingBags, step: int) -> torch.Tensor:
    out = module(*batch(step))
    out.backward(torch.ones_like(out))
    return out


def assert_same(module: DynamicEmbeddingBags, other: DynamicEmbeddingBags) -> None:
    """All keys, stamps, scores, rows and states, and the counters of the tiers."""
    mine, theirs = module.state_dict(), other.state_dict()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert module.tier_stats() == other.tier_stats()


class GatedRows(HostRows):
    """A store whose `put` and `lift`, in any thread but the main one, wait for a gate."""

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__(capacity, "lfu", seed=5)
        self.gate, self.waits, self.is_full = threading.Event(), threading.Event(), False
        self.puts: list[bool] = []  # per call whether it came from the main thread

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        is_main = threading.current_thread() is threading.main_thread()
        self.puts.append(is_main)
        if not is_main:
            self.waits.set()
            assert self.gate.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().put(table, rows)


@pytest.mark.parametrize("mode", TierMode)
@pytest.mark.parametrize("kind", [*STORES, "small"])
def test_results_are_those_without_a_thread(kind: str, mode: TierMode, tmp_path: Path) -> None:
    """Bit for bit, the counters too, and with a last tier that drops rows."""
    modules = []
    for write_behind in (False, True):
        directory = tmp_path / str(write_behind)
        directory.mkdir()
        store = HostRows(96, "lfu", seed=1) if kind == "small" else STORES[kind](directory)
        modules.append(make(store, mode, write_behind=write_behind))
    for step in range(14):
        outs = [train(module, step) for module in modules]
        assert torch.equal(*outs)
        if step % 4 == 1:
            with torch.no_grad():
                assert torch.equal(*(module(*batch(99 + step)) for module in modules))
        if step % 5 == 3:
            erased = [module.erase(0, torch.arange(step, 40)) for module in modules]
            assert torch.equal(*erased)
            for module in modules:
                module.flush()
        if step == 6:
            for module in modules:
                module.reset_stats()
    assert_same(*modules)
    dropped = sum(line.dropped for line in modules[0].tier_stats().values())
    assert (dropped > 0) is (kind == "small")
    for module in modules:
        module.close()


def test_a_step_does_not_wait_for_the_store() -> None:
    store = GatedRows()
    module, other = make(store), make(HostRows(4096, "lfu", seed=5), write_behind=False)
    train(module, 0)  # evicts nothing
    module.size(0)
    store.puts.clear()
    train(module, 1)
    assert store.waits.wait(10)
    assert store.puts == [False], "the thread is in its first put, and the step has returned"
    opening = threading.Timer(0.05, store.gate.set)
    opening.start()
    train(module, 2)
    assert store.gate.is_set(), "the next step waits for the rows of the one before"
    opening.join()
    for step in range(3):
        train(other, step)
    assert_same(module, other)


def test_rows_that_are_moving_are_found() -> None:
    """By every call that reads the store."""

    def trained(module: DynamicEmbeddingBags) -> DynamicEmbeddingBags:
        for step in (0, 1):
            module.size(0)
            train(module, step)
        return module

    calls = {
        "size": lambda module: module.size(0),
        "stats": lambda module: module.tier_stats(),
        "keys": lambda module: sorted(table_entries(module, 0).keys.tolist()),
        "evaluation": lambda module: module.eval()(*batch(0)).tolist(),
        "state": lambda module: module.state_dict()["a.weight"].tolist(),
        "erase": lambda module: module.erase(0, torch.arange(-5, 500)).tolist(),
    }
    for name, call in calls.items():
        store = GatedRows()
        module = trained(make(store))
        assert store.waits.wait(10)
        opening = threading.Timer(0.02, store.gate.set)
        opening.start()
        expected = trained(make(HostRows(4096, "lfu", seed=5), write_behind=False))
        assert call(module) == call(expected), name
        opening.join()


def test_an_error_of_the_store_is_raised_by_the_next_call() -> None:
    """Once, and rows that the store did not take are in memory."""
    store = GatedRows()
    module, other = make(store), make(HostRows(4096, "lfu", seed=5), write_behind=False)
    store.gate.set()
    for step in range(3):
        train(module, step)
        train(other, step)
    module.size(0)  # all moves are made
    store.is_full = True
    store.waits.clear()
    train(module, 3)
    assert store.waits.wait(10)
    with pytest.raises(OSError, match="No space left"):
        train(module, 4)
    assert module.num_training_steps == 4
    train(other, 3)
    store.is_full = False
    for step in (4, 5, 6):
        assert torch.equal(train(module, step), train(other, step))
    mine, theirs = module.state_dict(), other.state_dict()
    assert [key for key in theirs if not torch.equal(mine[key], theirs[key])] == []


@pytest.mark.parametrize("name", ["train", "erase", "load"])
def test_a_call_that_raises_an_error_of_the_thread_changes_nothing(name: str) -> None:
    store = GatedRows()
    module = make(store)
    store.gate.set()
    for step in range(3):
        train(module, step)
    state = module.state_dict()
    store.is_full = True
    store.waits.clear()
    train(module, 3)
    assert store.waits.wait(10)
    index = module.state.index
    tick, keys = index.tick, index.export(0).keys.tolist()
    calls = {
        "train": lambda: train(module, 4),
        "erase": lambda: module.erase(0, torch.arange(500)),
        "load": lambda: module.load_state_dict(state),
    }
    with pytest.raises(OSError, match="No space left"):
        calls[name]()
    store.is_full = False
    assert index.tick == tick
    assert index.export(0).keys.tolist() == keys
    calls[name]()


def test_clear_cancels_what_a_store_cannot_take() -> None:
    store = GatedRows()
    module = make(store)
    store.gate.set()
    for step in range(3):
        train(module, step)
    module.size(0)  # all rows are written back
    store.is_full = True
    train(module, 3)
    module.reset_parameters()
    assert module.size(0) == module.size(1) == 0
    store.is_full = False
    train(module, 4)


def test_evictions_are_tracked_after_the_moves_of_the_last_step() -> None:
    store = GatedRows(96)
    module = make(store)
    for step in range(3):
        store.gate.set()
        train(module, step)
    module.size(0)
    store.gate.clear()
    store.waits.clear()
    train(module, 3)
    assert store.waits.wait(10)
    opening = threading.Timer(0.05, store.gate.set)
    opening.start()
    module.track_evictions()
    assert store.gate.is_set()
    opening.join()
    train(module, 4)


@pytest.mark.parametrize("ends", ["close", "del"])
def test_rows_in_motion_arrive_before_the_store_is_closed(ends: str, tmp_path: Path) -> None:
    def tables(store: RowStore, module: DynamicEmbeddingBags) -> list[StoredTable]:
        layout = module.state.layout
        return [StoredTable(name, layout.row_bytes(t)) for t, name in enumerate("ab")]

    store, expected_store = GatedRows(), GatedRows()
    module, expected = make(store), make(expected_store, write_behind=False)
    for step in range(3):
        store.gate.set()
        train(module, step)
        train(expected, step)
    opening = threading.Timer(0.05, store.gate.set)
    if store.gate.is_set():
        module.size(0)
        store.gate.clear()
    train(module, 3)
    train(expected, 3)
    opening.start()
    if ends == "close":
        module.close()
    del module
    opening.join()
    for t in range(2):
        assert contents(store, t) == contents(expected_store, t)


@pytest.mark.parametrize("kind", ["disk", "sqlite"])
def test_a_deleted_module_leaves_its_store_at_once(kind: str, tmp_path: Path) -> None:
    for _ in range(5):
        module = make(STORES[kind](tmp_path))
        for step in range(2):
            train(module, step)
        module.prefetch(*batch(2))
        del module


def test_the_log_of_evictions_is_complete() -> None:
    """Rows are moved in the step then."""
    store = GatedRows(96)
    source, follower = make(store), make(HostRows(4096, "lfu"))
    source.track_evictions()
    tick = source.num_training_steps
    for step in range(6):
        train(source, step)
        changes = changes_since(source, tick)
        apply_changes(follower, changes)
        tick = changes.until
        mine, theirs = follower.state_dict(), source.state_dict()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert all(store.puts)
    assert source.tier_stats()["a"].dropped


def test_a_process_ends_with_rows_in_motion(tmp_path: Path) -> None:
    """Also one that trains while it ends, when no thread can begin."""
    code = """
import atexit, sys, pathlib
from tests.dynamic.test_write_behind import make, train, STORES
def last(kind, module):
    for step in (1, 2):
        train(module, step)
    module.flush()
    print("flushed", kind, module.step)
for kind, make_store in STORES.items():
    directory = pathlib.Path(sys.argv[1], kind)
    directory.mkdir()
    module = make(make_store(directory))
    atexit.register(last, kind, module)
    train(module, 0)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    flushed = "".join(f"flushed {kind} 3\n" for kind in reversed(STORES))
    assert (done.returncode, done.stdout, done.stderr) == (0, flushed, "")


def test_a_wrong_choice_raises() -> None:
    with pytest.raises(TypeError, match="write_behind must be True or False, got 'yes'"):
        BackingStore(HostRows(10), write_behind="yes")  # type: ignore[arg-type]
