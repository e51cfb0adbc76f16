"""The state of dynamic tables without a module: insertion, questions, saving."""

import copy
from pathlib import Path

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, optim
from emblib.columns import Hyper
from emblib.dynamic import KeyStatus, state, training
from emblib.dynamic.saving import checkpoint, snapshots, table_dumps
from emblib.dynamic.state import DynamicState
from emblib.init import Constant
from emblib.ops.hash import InsertedBatch, Keys


def make_state(**options: object) -> DynamicState:
    spec = DynamicSpec(32, 4, initializer=Constant(2.0), **options)  # type: ignore[arg-type]
    return DynamicState([spec], ["t"], optim.Adagrad(0.1), hash_keys=[7])


def insert(
    tables: DynamicState, ids: torch.Tensor, counts: torch.Tensor | None = None
) -> InsertedBatch:
    with tables.lock, torch.no_grad():
        return training.insert_batch(tables, Keys.from_ids(ids), counts)


def test_a_batch_is_inserted_without_a_module() -> None:
    tables = make_state()
    first = insert(tables, torch.tensor([5, -3, 5]))
    assert first.slots[0] == first.slots[2] != first.slots[1]
    assert state.key_status(tables).tolist() == [KeyStatus.NEW] * 3
    assert state.size(tables, "t") == 2
    rows = tables.table_rows(0)
    assert rows["weight"][first.slots].tolist() == [[2.0] * 4] * 3
    assert not rows["sum"][first.slots].any()
    rows["weight"][first.slots[0]] = 9.0
    again = insert(tables, torch.tensor([5, 6]))
    assert again.slots[0] == first.slots[0], "a hit keeps its slot"
    assert state.key_status(tables).tolist() == [KeyStatus.HIT, KeyStatus.NEW]
    assert rows["weight"][again.slots].tolist() == [[9.0] * 4, [2.0] * 4]
    assert state.contains(tables, 0, torch.tensor([6, 7])).tolist() == [True, False]
    assert training.erase(tables, 0, torch.tensor([6, 7])).tolist() == [True, False]


def test_counts_decide_who_is_evicted() -> None:
    tables = make_state(eviction=Eviction.LFU)
    ids = torch.arange(32)
    insert(tables, ids, torch.where(ids == 9, 1, 5))
    state.track_evictions(tables)
    insert(tables, torch.tensor([100]))
    assert tables.eviction_log is not None
    assert tables.eviction_log.since(0, 2).tolist() == [9]
    training.clear(tables)
    assert state.size(tables, 0) == 0
    assert state.capacity(tables, 0) == 32


def test_entries_go_from_a_state_to_a_module_and_back(tmp_path: Path) -> None:
    tables = make_state()
    insert(tables, torch.arange(10))
    table_dumps.save(tables, tmp_path)
    module = DynamicEmbeddingBags([DynamicSpec(64, 4, name="t")], optim.Adagrad(0.1), seed=3)
    module.load(tmp_path)
    assert module.size("t") == 10
    assert module.table_rows("t")["weight"][module.find("t", torch.arange(10))].eq(2).all()
    other = make_state()
    entries = checkpoint.table_entries(module, "t")
    assert checkpoint.set_table_entries(other, 0, entries).loaded == 10
    snapshot = snapshots.take(other)
    training.erase(other, 0, torch.arange(5))
    snapshots.restore(other, snapshot)
    assert state.contains(other, 0, torch.arange(12)).tolist() == [True] * 10 + [False] * 2


def test_a_refused_hyperparameter_changes_nothing(tmp_path: Path) -> None:
    """Neither the number itself nor, where the whole module is loaded, its tables."""

    def module_of(*keys: int) -> DynamicEmbeddingBags:
        module = DynamicEmbeddingBags([DynamicSpec(32, 4, name="t")], optim.LARS(0.1), seed=0)
        module(torch.tensor(keys), torch.arange(len(keys) + 1)).sum().backward()
        return module

    source, module = module_of(1, 2, 3), module_of(4)
    before = copy.deepcopy(module.state_dict())
    source.hyperparams[Hyper.OPTIMIZER_ARGS] = 2.0
    source.save(tmp_path)
    snapshot = snapshots.take(source)
    for load, error in (
        (lambda: module.state.load_hyperparams(source.hyperparams), ValueError),
        (lambda: module.load_state_dict(source.state_dict()), RuntimeError),
        (lambda: module.load(tmp_path), ValueError),
        (lambda: snapshots.restore(module.state, snapshot), ValueError),
    ):
        with pytest.raises(error, match="momentum must be in"):
            load()
        after = module.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_copied_module_has_a_state_of_its_own() -> None:
    module = DynamicEmbeddingBags([DynamicSpec(32, 4, name="t")], optim.SGD(1.0), seed=0)
    offsets = torch.tensor([0, 1, 2])
    module(torch.tensor([1, 2]), offsets).sum().backward()
    other = copy.deepcopy(module)
    assert other.state.index is other.index is not module.index
    assert other.state.weights is other.weights
    other.set_learning_rate(0.0)
    other(torch.tensor([1, 3]), offsets).sum().backward()
    assert (module.size("t"), other.size("t")) == (2, 3)
    other.state.load_hyperparams(module.hyperparams)
    assert other.learning_rate == 1.0
    assert other.optimizer == module.optimizer


def test_tables_are_specs_by_number_and_handles_by_name() -> None:
    module = DynamicEmbeddingBags([DynamicSpec(32, 4, name="t")], seed=0)
    assert module.tables == (DynamicSpec(32, 4, name="t"),)
    assert module.tables[0].rows == 32
    assert module.table_handles()["t"].size() == 0
    with pytest.raises(TypeError, match=r"table_handles\(\)\['t'\]"):
        module.tables["t"]  # type: ignore[call-overload]
