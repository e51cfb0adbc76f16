"""State dicts and snapshots of dynamic tables: what is loaded is what was saved, and goes on."""

import copy
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    Precision,
    optim,
)
from emblib.checkpoints import set_table_entries, table_entries
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.saving import snapshots
from emblib.dynamic.saving.dumps import DumpError
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since
from emblib.ops.hash import TABLE_FIELDS, Keys
from emblib.tables.durable_files import json_checksum
from tests.dynamic.dynamic_cases import (
    EVICTIONS,
    admitting,
    assert_same_bytes,
    assert_same_content,
    assert_same_states,
    make,
    train,
    trained,
)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("capacities", [(256, 96), (512, 4096), (100_000, 200)])
def test_a_state_dict_fits_any_capacity(eviction: Eviction, capacities: tuple[int, int]) -> None:
    module, other = trained(make(eviction, (512, 512))), make(eviction, capacities)
    train(other, 77, 78)
    if min(capacities) < 200:  # both tables come to over 96 keys
        with warnings.catch_warnings(record=True) as told:
            other.load_state_dict(module.state_dict())
        assert "left out" in str(told[0].message)
        assert other.size(1) >= 90
        return
    other.load_state_dict(module.state_dict())
    assert_same_content(module, other)
    train(module, 20, 21)
    train(other, 20, 21)
    assert_same_content(module, other)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_full_tables_are_loaded_as_a_whole(eviction: Eviction) -> None:
    module, other = make(eviction, (64, 1024)), make(eviction, (64, 1024))
    train(module, *range(60), distinct=20_000)
    assert module.size(0) == 64
    assert module.size(1) > 1020
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(module.state_dict())
    assert_same_content(module, other)


def test_on_any_device(device: torch.device, tmp_path: Path) -> None:
    module, other = make(device=str(device)), make(capacities=(512, 512))
    module.track_evictions()
    train(module, 0, 1, 2)
    other.load_state_dict(module.state_dict())
    assert_same_content(module, other)
    since = module.save(tmp_path / "whole")
    train(module, 3, 4)
    module.erase(0, table_entries(module, 0).keys[:9].to(device))
    other.load(tmp_path / "whole")
    apply_changes(other, changes_since(module, since))
    assert_same_content(module, other)
    again = make(device=str(device))
    again.load_state_dict(other.state_dict())
    assert_same_content(module, again)


def test_what_a_state_dict_has() -> None:
    module = trained(make(Eviction.LFU))
    state = module.state_dict()
    rows, users = module.size(0), module.size(1)
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "hyper": tuple(module.hyperparams.shape),
        "clock": (1,),
        "index.hash_keys": (2,),
        "items.keys": (rows,),
        "items.stamps": (rows,),
        "items.scores": (rows,),
        "items.weight": (rows, 4),
        "items.exp_avg": (rows, 4),
        "items.exp_avg_sq": (rows,),
        "users.keys": (users,),
        "users.stamps": (users,),
        "users.scores": (users,),
        "users.weight": (users, 8),
        "users.exp_avg": (users, 8),
        "users.exp_avg_sq": (users,),
    }
    assert int(state["clock"]) == 12
    assert int(state["items.stamps"].max()) == 12


@pytest.mark.parametrize("initial", [None, 32])
def test_equal_contents_are_equal_bytes(initial: int | None) -> None:
    """However the tables came to them: other buckets, another order of insertion."""
    module = trained(make(capacities=(2048, 2048), initial_capacity=initial))
    other = make(capacities=(4096, 1024))
    other.load_state_dict(module.state_dict())
    files = [io.BytesIO(), io.BytesIO()]
    for each, file in zip((module, other), files, strict=True):
        torch.save(each.state_dict(), file)
    assert files[0].getvalue() == files[1].getvalue()


@pytest.mark.parametrize("eviction", EVICTIONS[:-1])
def test_what_is_evicted_next_survives_a_reload(eviction: Eviction) -> None:
    """Tables of one bucket, where nothing but the order decides what leaves."""
    module, other = make(eviction, (32, 32)), make(eviction, (32, 32))
    train(module, *range(9), distinct=40)
    other.load_state_dict(module.state_dict())
    for step in range(9, 30):
        train(module, step, distinct=40)
        train(other, step, distinct=40)
        assert_same_content(module, other)
    assert sum(table["evicted"] for table in other.stats().values()) > 20


def test_the_step_of_bias_corrections_and_of_scores_goes_on() -> None:
    module, other = trained(make(Eviction.STEP)), make(Eviction.STEP)
    module.set_learning_rate(0.3)
    other.load_state_dict(module.state_dict())
    assert (other.step, other.learning_rate) == (12, pytest.approx(0.3))
    assert other.eviction_score("items") == module.eviction_score("items") == 13


def test_admission_goes_on() -> None:
    """Counters with room for all keys; in a full one it matters where in it keys are."""
    module, other = trained(admitting(4096), 4), admitting(4096)
    other.load_state_dict(module.state_dict())
    for step in range(4, 12):
        train(module, step)
        train(other, step)
    assert_same_states(module.state_dict(), other.state_dict())
    assert module.size(0) > 0


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.float32, torch.float16])
def test_weights_of_another_dtype_are_converted(of: torch.dtype, to: torch.dtype) -> None:
    module = trained(make(precision=Precision(weights=of)))
    other = make(precision=Precision(weights=to))
    other.load_state_dict(module.state_dict())
    saved, loaded = module.state_dict()["items.weight"], other.state_dict()["items.weight"]
    assert (saved.dtype, loaded.dtype) == (of, to)
    assert torch.equal(saved.to(to), loaded)


def test_within_a_larger_model() -> None:
    model, other = (nn.ModuleDict({"tables": make(), "top": nn.Linear(20, 1)}) for _ in range(2))
    tables = model["tables"]
    assert isinstance(tables, DynamicEmbeddingBags)
    train(tables, 1, 2, 3)
    other.load_state_dict(model.state_dict())
    assert_same_states(model.state_dict(), other.state_dict())
    assert "tables.items.keys" in model.state_dict()


def test_a_saved_file_is_plain_tensors(tmp_path: Path) -> None:
    module, other = trained(make()), make()
    torch.save(module.state_dict(), tmp_path / "file")
    other.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    assert_same_content(module, other)


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module, other = trained(admitting(), 6), admitting()
    safetensors.save_file(module.state_dict(), tmp_path / "file")
    other.load_state_dict(safetensors.load_file(tmp_path / "file"))
    assert_same_states(module.state_dict(), other.state_dict())


def test_a_state_dict_does_not_follow_the_tables() -> None:
    module = trained(make())
    state = module.state_dict()
    kept = {key: value.clone() for key, value in state.items() if key != "hyper"}
    train(module, 50)
    for key, value in kept.items():
        assert torch.equal(state[key], value), key


def test_an_empty_module_is_saved_and_loaded() -> None:
    module, other = make(), trained(make())
    other.load_state_dict(module.state_dict())
    assert other.size(0) == other.size(1) == 0
    assert_same_content(module, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items.keys": None}, r"missing are \['items.keys'\]"),
        ({"items.weight": None}, r"missing are \['items.weight'\]"),
        ({"items.keys": torch.zeros(3)}, "items.keys: must be integers"),
        ({"items.stamps": torch.zeros(3, dtype=torch.int64)}, "items.stamps: size mismatch"),
        ({"items.weight": torch.zeros(5, 4)}, "items.weight: size mismatch"),
        ({"other.keys": torch.zeros(3)}, r"unexpected \['other.keys'\]"),
        ({"hyper": torch.zeros(3)}, r"hyper: size mismatch: it has shape \(3,\)"),
    ],
)
def test_a_bad_checkpoint_is_told(change: dict[str, torch.Tensor | None], message: str) -> None:
    module, other = trained(make()), trained(make(), 3)
    state = {**module.state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    before = other.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(state)
    assert_same_states(before, other.state_dict())


def test_another_optimizer_is_refused_and_its_weights_can_be_loaded() -> None:
    module, other = trained(make()), make(optimizer=optim.SGD(0.1))
    with pytest.raises(RuntimeError, match=r"unexpected \['items.exp_avg"):
        other.load_state_dict(module.state_dict())
    assert other.size(0) == 0
    state = module.state_dict()
    weights = {
        key: value for key, value in state.items() if "exp_avg" not in key and key != "hyper"
    }
    other.load_state_dict(weights, strict=False)
    assert torch.equal(other.state_dict()["items.weight"], state["items.weight"])


def test_one_table_of_two_can_be_loaded() -> None:
    module, other = trained(make()), trained(make(), 3)
    users = table_entries(other, "users").sorted()
    state = {key: value for key, value in module.state_dict().items() if key[:5] != "users"}
    other.load_state_dict(state, strict=False)
    assert torch.equal(other.state_dict()["items.keys"], state["items.keys"])
    assert torch.equal(table_entries(other, "users").sorted().keys, users.keys)


def test_a_table_can_be_exchanged_for_another() -> None:
    module, other = trained(make()), make()
    done = set_table_entries(other, "users", table_entries(module, "users"))
    assert (done.loaded, done.left_out) == (module.size(1), 0)
    assert other.size(0) == 0
    with pytest.raises(KeyError, match="no table 'shops'"):
        table_entries(other, "shops")


def test_changes_do_not_reach_back_to_an_exchanged_table() -> None:
    module, other = make(), trained(make())
    module.track_evictions()
    train(module, 0)
    since = module.num_training_steps
    train(module, 1)
    set_table_entries(module, "users", table_entries(other, "users"))
    with pytest.raises(ValueError, match="the log has evictions from tick"):
        changes_since(module, since)


# Snapshots


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("way", ["memory", "directory", "deepcopy"])
def test_a_snapshot_goes_on_to_the_same_bytes(eviction: Eviction, way: str, tmp_path: Path) -> None:
    module = trained(make(eviction, initial_capacity=32))
    other = make(eviction, initial_capacity=32)
    train(other, 77)
    if way == "memory":
        snapshots.restore(other, snapshots.take(module))
    elif way == "directory":
        snapshots.save(module, tmp_path)
        snapshots.load(other, tmp_path)
    else:
        other = copy.deepcopy(module)
    for step in range(20, 26):
        assert_same_bytes(module, other)
        train(module, step)
        train(other, step)
    assert_same_bytes(module, other)
    assert module.stats() == other.stats()


def test_a_snapshot_has_what_admission_counted(tmp_path: Path) -> None:
    module, other = trained(admitting(), 5), admitting()
    snapshots.save(module, tmp_path)
    snapshots.load(other, tmp_path)
    for step in range(5, 12):
        train(module, step)
        train(other, step)
    assert_same_bytes(module, other)
    assert_same_states(module.state_dict(), other.state_dict())


def test_a_snapshot_of_other_tables_is_refused(tmp_path: Path) -> None:
    module, other = trained(make()), trained(make(capacities=(512, 96)), 3)
    before = other.state_dict()
    snapshots.save(module, tmp_path)
    with pytest.raises(ValueError, match="same capacities"):
        snapshots.load(other, tmp_path)
    assert_same_states(before, other.state_dict())
    with pytest.raises(ValueError, match="same capacities"):
        other.load(tmp_path)
    assert_same_states(before, other.state_dict())
    same = make()
    same.load(tmp_path)
    assert_same_states(module.state_dict(), same.state_dict())


ONE = [DynamicSpec(256, 4, name="items")]
COUNTED = [replace(ONE[0], admission=FrequencyAdmission(2, ExactCounter(64)))]
SKETCHED = [replace(ONE[0], admission=FrequencyAdmission(2, CountMinSketch(64)))]
SCORED = [replace(ONE[0], eviction=Eviction.STEP)]
HALF = Precision(weights=torch.float16)
OTHERS: list[tuple[str, list[DynamicSpec], dict[str, Any], str]] = [
    ("dim", [replace(ONE[0], dim=8)], {}, r"weight of table 0 must be torch.float32 \[256, 8\]"),
    ("capacity", [replace(ONE[0], capacity=512)], {}, "same capacities"),
    ("tables", [*ONE, replace(ONE[0], name="users")], {}, "same capacities"),
    ("eviction", SCORED, {}, "index.entries must be"),
    ("no state", ONE, {"optimizer": optim.SGD(0.1)}, "must be a list of 1"),
    ("one state", ONE, {"optimizer": optim.Adagrad(0.1)}, "must be a list of 2"),
    ("state per row", ONE, {"optimizer": optim.PartialRowwiseAdam(0.1)}, "exp_avg_sq of table 0"),
    ("hyper", ONE, {"optimizer": optim.LAMB(0.1)}, r"hyper must be torch.float64 \[9\]"),
    ("precision", ONE, {"precision": HALF}, "weight of table 0 must be torch.float16"),
    ("counter", COUNTED, {}, "admission: there is none in the snapshot, some in this module"),
    ("sketch", SKETCHED, {}, "admission: there is none in the snapshot, some in this module"),
]


def _one(specs: list[DynamicSpec], **more: Any) -> DynamicEmbeddingBags:
    module = DynamicEmbeddingBags(specs, **{"optimizer": optim.Adam(0.1), **more})
    for step in range(3):
        ids = torch.arange(40) * (step + 1) + 1000 * len(more)
        offsets = torch.linspace(0, 40, 2 * len(specs) + 1).long()
        module(ids, offsets).square().sum().backward()
    return module


def _refuses(module: DynamicEmbeddingBags, source: Any, message: str) -> None:
    """Neither a snapshot nor a directory with one changes anything."""
    before, states = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    if isinstance(source, Path):
        with pytest.raises(DumpError, match=message) as told:
            snapshots.load(module, source)
        assert isinstance(told.value, ValueError)
        assert str(source) in str(told.value)
    else:
        with pytest.raises(ValueError, match=message):
            snapshots.restore(module, source)
    assert_same_bytes(before, module)
    assert_same_states(states, module.state_dict())


@pytest.mark.parametrize(
    ("specs", "more", "message"), [other[1:] for other in OTHERS], ids=[o[0] for o in OTHERS]
)
def test_a_snapshot_that_does_not_fit_changes_nothing(
    specs: list[DynamicSpec], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module, other = _one(ONE), _one(specs, **more)
    snapshots.save(module, tmp_path)
    _refuses(other, snapshots.take(module), message)
    _refuses(other, tmp_path, message)


def test_a_snapshot_with_another_admission_is_refused() -> None:
    _refuses(
        _one(ONE), snapshots.take(_one(COUNTED)), "there is some in the snapshot, none in this"
    )
    _refuses(_one(SKETCHED), snapshots.take(_one(COUNTED)), "admission.counter: there is some")
    _refuses(_one(COUNTED), snapshots.take(_one(SKETCHED)), "admission.counter: there is none")


def _nodes(tree: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries of a snapshot."""
    branches: Any = ()
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, list):
        branches = enumerate(tree)
    for name, branch in branches:
        yield (*path, name)
        yield from _nodes(branch, *path, name)


def _spoilt(value: Any) -> Iterator[Any]:
    """What a damaged manifest can make of an entry; `...` deletes it."""
    yield from (..., {}, [], 3, *([] if value is None else [None]))
    if isinstance(value, Tensor):
        yield from (value[None], value[..., 0], value[:0], value.to(torch.int16))
    elif isinstance(value, list):
        yield from (value[:-1], [*value, value[-1]])


def test_malformed_snapshots_change_nothing() -> None:
    """Whichever entry is missing, or is something else."""
    specs = [*COUNTED, replace(SKETCHED[0], name="users")]
    module, other = (
        _one([replace(spec, eviction=Eviction.STEP) for spec in specs]) for _ in range(2)
    )
    snapshot = snapshots.take(module)
    before, states = copy.deepcopy(other), copy.deepcopy(other.state_dict())
    paths = list(_nodes(snapshot))
    assert len(paths) == 38
    for *path, last in paths:
        parent = snapshot
        for name in path:
            parent = parent[name]
        value = parent[last]
        for wrong in _spoilt(value):
            if last == "hash_keys" and wrong is ...:  # as in snapshots of earlier versions
                continue
            kept = dict(parent) if isinstance(parent, dict) else list(parent)
            if wrong is ...:
                del parent[last]
            else:
                parent[last] = wrong
            with pytest.raises(ValueError, match=r"lacks|must be|there is|same cap"):
                snapshots.restore(other, snapshot)
            parent.clear()
            parent.update(kept) if isinstance(parent, dict) else parent.extend(kept)
    for buckets in (-1, 0, 9):
        snapshot["index"]["tables"][1, TABLE_FIELDS.index("buckets")] = buckets
        with pytest.raises(ValueError, match=f"has {buckets} buckets"):
            snapshots.restore(other, snapshot)
    snapshot["scores"]["more"] = torch.zeros(1)
    assert_same_bytes(before, other)
    assert_same_states(states, other.state_dict())
    snapshot["index"]["tables"][1, TABLE_FIELDS.index("buckets")] = 8
    with pytest.raises(ValueError, match=r"scores has \['more'\]"):
        snapshots.restore(other, snapshot)
    del snapshot["scores"]["more"]
    snapshots.restore(other, snapshot)
    assert_same_states(module.state_dict(), other.state_dict())


def test_what_a_dump_lacks_of_admission_and_scores_changes_nothing(tmp_path: Path) -> None:
    specs = [*COUNTED, replace(SKETCHED[0], name="users")]
    specs = [replace(spec, eviction=Eviction.STEP) for spec in specs]
    module, other = _one(specs), _one(specs, seed=1)
    states = copy.deepcopy(other.state_dict())
    module.save(tmp_path)
    file = tmp_path / "part_00000_of_00001.json"
    text = file.read_text()
    names = set(json.loads(text)["content"]["others"])
    assert names == {
        "index.hash_keys",
        "admission.counter.index.hash_keys",
        "admission.counter.0.keys",
        "admission.counter.0.counts",
        "admission.sketches.counters",
        "admission.sketches.batches",
        "admission.sketches.hash_keys",
        "scores.values",
        "scores.is_set",
    }
    for name in sorted(names):
        if name.endswith("hash_keys"):  # earlier versions have none
            continue
        saved = json.loads(text)["content"]
        described = saved["others"][name]
        for wrong in (..., {**described, "shape": [1, *described["shape"]]}):
            saved["others"] = {**json.loads(text)["content"]["others"], name: wrong}
            if wrong is ...:
                del saved["others"][name]
            file.write_text(json.dumps({"content": saved, "checksum": json_checksum(saved)}))
            with pytest.raises(DumpError, match=r"lacks|must be"):
                other.load(tmp_path)
            assert_same_states(states, other.state_dict())
    file.write_text(text)
    with pytest.raises(DumpError, match="admission has"):
        _one([COUNTED[0], replace(ONE[0], name="users")]).load(tmp_path)
    other.load(tmp_path)
    assert_same_states(module.state_dict(), other.state_dict())


def _seeded(seed: int) -> DynamicEmbeddingBags:
    specs = [DynamicSpec(128, 4, name=name) for name in ("items", "users")]
    return DynamicEmbeddingBags(specs, optim.SGD(0.1), feature_tables=[0, 1, 0], seed=seed)


def test_the_hash_of_keys_is_kept(tmp_path: Path) -> None:
    """So that the keys that share buckets share them after a reload, whatever the seed is."""
    module = trained(_seeded(1))
    module.save(tmp_path)
    saved = module.state_dict()
    assert saved["index.hash_keys"].tolist() == [module.index.hash_key(t) for t in range(2)]
    for load in (lambda o: o.load_state_dict(saved), lambda o: o.load(tmp_path)):
        other = _seeded(2)
        assert not torch.equal(other.index.hash_keys, module.index.hash_keys)
        load(other)
        assert_same_content(module, other)
        other.clear()
        assert torch.equal(other.index.hash_keys, module.index.hash_keys)
    assert torch.equal(copy.deepcopy(module).index.hash_keys, module.index.hash_keys)
    with pytest.raises(RuntimeError, match=r"hash_keys must be int64, one per table = \[2\]"):
        other.load_state_dict({**saved, "index.hash_keys": torch.zeros(3, dtype=torch.int64)})


def test_checkpoints_from_before_hash_keys_are_loaded() -> None:
    """Entries are placed by the table's own; slots are those of key 0."""
    module, other = trained(_seeded(1)), _seeded(2)
    state = dict(module.state_dict())
    del state["index.hash_keys"]
    own = other.index.hash_keys
    other.load_state_dict(state)
    assert torch.equal(other.index.hash_keys, own)
    for t in range(2):
        assert other.size(t) == module.size(t)
        assert int(other.find(t, state[f"{other.table_names[t]}.keys"]).min()) >= 0
    counting = admitting()
    state = dict(counting.state_dict())
    del state["admission.sketches.hash_keys"]
    counting.load_state_dict(state)
    assert counting.state_dict()["admission.sketches.hash_keys"].tolist() == [0, 0]
    spec = DynamicSpec(128, 1)
    first, second = HashIndex([spec]), HashIndex([spec], hash_keys=[5])
    keys = Keys.from_ids(torch.arange(100))
    first.insert(keys)
    snapshot = first.snapshot()
    second.restore({**snapshot, "tables": snapshot["tables"][:, :5]})
    assert second.hash_key(0) == 0
    assert torch.equal(first.find(keys), second.find(keys))
