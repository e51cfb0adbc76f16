"""What dynamic tables, in one tier or two, promise to threads and forks."""

import copy
import threading
from pathlib import Path

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, HashTable
from tests.dynamic import thread_steps
from tests.dynamic.thread_steps import (
    DIM,
    KEYS,
    LOOKUPS,
    STEP,
    STORES,
    drawn,
    make,
    make_tiered,
    one_each,
    rows_of,
    steps,
    train,
)
from tests.tables.kills import run_alone
from tests.thread_cases import Meeting, held_elsewhere, together


def widen(module: DynamicEmbeddingBags) -> DynamicEmbeddingBags:
    """Let threads meet when keys have their places and nothing has been read there yet."""
    Meeting().after(module.index, "insert")
    Meeting().after(module.index, "find")
    return module


def test_two_threads_train_their_keys_as_one_does() -> None:
    """In a table that grows meanwhile, so that all rows move."""
    both, serial = (make(initial_capacity=64) for _ in range(2))
    widen(both)
    together(steps(both, 0), steps(both, 1))
    steps(serial, 0)()
    steps(serial, 1)()
    assert both.capacity(0) == serial.capacity(0) > 64, "the table is meant to have grown"
    assert both.step == both.num_training_steps == 60
    assert int(both.dropped_updates) == 0
    assert rows_of(both) == rows_of(serial)


def test_threads_that_evict_each_others_keys_see_whole_rows() -> None:
    module = widen(make(capacity=96))
    done = threading.Event()

    def write(part: int) -> None:
        try:
            steps(module, part)()
        finally:
            done.set()

    def read() -> None:
        step = 0
        while not done.is_set():
            keys, step = drawn(step), step + 1
            with torch.no_grad():
                out = module(*one_each(keys))
            assert bool(((out % STEP == keys[:, None]) | (out == 0)).all()), "rows of other keys"

    together(lambda: write(0), lambda: write(1), read)
    keys = torch.arange(KEYS)
    slots = module.find(0, keys)
    there = slots[slots >= 0]
    assert there.unique().numel() == there.numel() == module.size(0) <= module.capacity(0)
    counts = module.stats()["t"]
    assert counts["inserted"] - counts["evicted"] == module.size(0)
    assert counts["lookups"] == 60 * LOOKUPS


def test_a_key_that_leaves_between_forward_and_backward_is_counted() -> None:
    """By another thread: the row may be that of another key by then, which must not be updated."""
    module = make(capacity=32)
    old, new = torch.arange(32), torch.arange(100, 132)
    out = module(*one_each(old))
    together(lambda: train(module, new, grad=0.0))
    before = rows_of(module)
    out.backward(torch.ones_like(out))
    gone = [key for key in old.tolist() if key not in before]
    assert gone
    assert int(module.dropped_updates) == len(gone)
    after = rows_of(module)
    assert {key: after[key] for key in new.tolist() if key in after} == {
        key: before[key] for key in new.tolist() if key in before
    }


@pytest.mark.parametrize("write_behind", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_two_threads_train_their_keys_in_two_tiers_as_one_does(
    tmp_path: Path, store: str, write_behind: bool
) -> None:
    module = make_tiered(STORES[store](tmp_path), write_behind=write_behind)
    serial = make()
    widen(module)

    def ahead() -> None:
        for step in range(20):
            module.prefetch(*one_each(drawn(step)))
            with torch.no_grad():
                module(*one_each(drawn(step)))

    together(steps(module, 0, 20), steps(module, 1, 20), ahead)
    steps(serial, 0, 20)()
    steps(serial, 1, 20)()
    module.flush()
    assert rows_of(module) == rows_of(serial)
    module.close()


def test_a_scored_table_is_written_and_read_by_many_threads() -> None:
    """Values are their key; what is found is that, whatever leaves and comes meanwhile."""
    table = HashTable(DynamicSpec(64, DIM, eviction=Eviction.LRU))
    Meeting().after(table.index, "insert")
    Meeting().after(table.index, "find")

    def work(part: int) -> None:
        for step in range(30):
            keys = drawn(97 * step + part).unique()
            values = keys[:, None].expand(-1, DIM).float()
            if part % 2:
                table.insert_or_assign(keys, values)
            else:
                found, there = table.find(keys)
                assert torch.equal(found[there], values[there])

    together(*(lambda part=part: work(part) for part in range(4)))
    rows = next(table.export())
    assert torch.equal(rows.values, rows.keys[:, None].expand(-1, DIM).float())
    assert rows.keys.unique().numel() == table.size()


def test_state_dicts_are_taken_between_steps() -> None:
    """In what a thread saves every key has its row, whatever comes and goes meanwhile."""
    module = make(capacity=96)
    train(module, drawn(0))
    Meeting().after(module.index, "export")

    def save() -> None:
        for _ in range(10):
            saved = module.state_dict()
            keys, weights = saved["t.keys"], saved["t.weight"]
            assert torch.equal(weights % STEP, keys[:, None].expand(-1, DIM).float())

    together(steps(module, 0), save)


def test_copies_have_locks_of_their_own() -> None:
    module = make()
    train(module, drawn(1))
    twin = copy.deepcopy(module)
    assert twin._lock is not module._lock
    with held_elsewhere(module._lock):
        train(twin, drawn(2))
    table = HashTable(DynamicSpec(64, DIM))
    other = copy.deepcopy(table)
    with held_elsewhere(table._lock):
        other.insert_or_assign(torch.arange(3), torch.ones(3, DIM))
    assert (table.size(), other.size()) == (0, 3)


def test_forks(tmp_path: Path) -> None:
    """Tables of its own for the child, or a refusal; nothing for stores in files."""
    assert run_alone(thread_steps, "all", tmp_path).count("as promised") == 5
