"""Dumps of dynamic tables in directories, and copies that follow by what changed."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, optim
from emblib.dynamic import keys
from emblib.dynamic.saving import entries
from emblib.dynamic.saving.dumps import DumpError, Part, Progress
from tests.dynamic import dynamic_kills
from tests.dynamic.dynamic_cases import (
    EVICTIONS,
    admitting,
    assert_same_content,
    assert_same_states,
    batch,
    make,
    train,
    trained,
)
from tests.tables.kills import run_alone


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_dump_is_loaded_into_other_capacities(eviction: Eviction, tmp_path: Path) -> None:
    module, other = trained(make(eviction, (512, 512))), make(eviction, (4096, 320))
    assert module.dump(tmp_path) == 12
    loaded = other.load_dump(tmp_path)
    assert {name: done.loaded for name, done in loaded.items()} == {
        "items": module.size(0),
        "users": module.size(1),
    }
    assert_same_content(module, other)
    train(module, 20)
    train(other, 20)
    assert_same_content(module, other)


def test_admission_and_scores_are_in_a_dump(tmp_path: Path) -> None:
    module, other = trained(admitting(4096), 5), admitting(4096)
    module.dump(tmp_path / "a")
    other.load_dump(tmp_path / "a")
    assert_same_states(module.state_dict(), other.state_dict())
    module, other = trained(make(Eviction.STEP)), make(Eviction.STEP)
    module.dump(tmp_path / "b")
    other.load_dump(tmp_path / "b")
    assert other.score("users") == module.score("users") == 13


def test_what_finds_no_place_is_counted_and_told(tmp_path: Path) -> None:
    module, other = trained(make(capacities=(512, 512))), make(capacities=(64, 512))
    module.dump(tmp_path)
    with pytest.warns(UserWarning, match=r"left out.* are \{'items': \d+\}"):
        loaded = other.load_dump(tmp_path)
    assert loaded["items"].loaded + loaded["items"].left_out == module.size(0)
    assert other.size(0) == loaded["items"].loaded > 60
    kept, all_of_it = other.table_entries("items"), module.table_entries("items")
    gone = all_of_it.stamps[~torch.isin(all_of_it.keys, kept.keys)]
    assert float(gone.float().mean()) < float(kept.stamps.float().mean()) - 2


def test_long_work_is_reported(tmp_path: Path) -> None:
    module, told = trained(make()), list[Progress]()
    module.dump(tmp_path, report=told.append)
    assert {(each.table, each.done, each.total) for each in told} == {
        ("items", module.size(0), module.size(0)),
        ("users", module.size(1), module.size(1)),
    }
    told.clear()
    make().load_dump(tmp_path, report=told.append)
    assert ("items", module.size(0), module.size(0)) in told


def test_the_same_tables_make_the_same_files(tmp_path: Path) -> None:
    module, other = trained(make()), make(capacities=(1024, 1024))
    other.load_state_dict(module.state_dict())
    module.dump(tmp_path / "a")
    other.dump(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("readers", [1, 2, 3, 4])
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_every_key_is_with_one_rank(writers: int, readers: int, tmp_path: Path) -> None:
    """Ranks that each train the keys they own, and others that load what those dumped."""
    module = trained(make(capacities=(1024, 1024)))
    for rank in range(writers):
        one = make(capacities=(1024, 1024))
        for t in range(2):
            one.set_table_entries(t, module.table_entries(t).owned(rank, writers))
        one.dump(tmp_path, part=Part(rank, writers), identity="step 12")
    found = []
    for rank in range(readers):
        one = make(capacities=(256, 256))
        one.load_dump(tmp_path, part=Part(rank, readers))
        mine = one.table_entries("items")
        assert bool((keys.owner(mine.keys, readers) == rank).all())
        found.append(mine.sorted())
    whole, wanted = entries.concatenate(found).sorted(), module.table_entries("items").sorted()
    for name in ("keys", "stamps"):
        assert torch.equal(getattr(whole, name), getattr(wanted, name))
    for name, rows in wanted.rows.items():
        assert torch.equal(torch.as_tensor(whole.rows[name]), torch.as_tensor(rows))


def test_a_dump_of_other_tables_is_refused(tmp_path: Path) -> None:
    trained(make()).dump(tmp_path)
    other = make(optimizer=optim.Adam(0.1))
    with pytest.raises(ValueError, match="rows of shape"):
        other.load_dump(tmp_path)
    with pytest.raises(ValueError, match=r"hyper has|must have the rows"):
        make(optimizer=optim.SGD(0.1)).load_dump(tmp_path)
    from emblib import DynamicSpec

    with pytest.raises(ValueError, match="the dump has the tables"):
        DynamicEmbeddingBags([DynamicSpec(32, 4, name="shops")]).load_dump(tmp_path)
    assert other.size(0) == 0


def test_a_damaged_dump_changes_nothing(tmp_path: Path) -> None:
    module, other = trained(make()), trained(make(), 3)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    module.dump(tmp_path)
    path = max(tmp_path.glob("*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DumpError, match="its checksum is wrong"):
        other.load_dump(tmp_path)
    assert_same_states(before, other.state_dict())


# Changes


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_copy_follows_by_changes(eviction: Eviction, tmp_path: Path) -> None:
    """Through training, eviction, erasure and growth; each dump of changes is read once."""
    module = make(eviction, (160, 96), initial_capacity=32)
    module.track_evictions()
    train(module, 0, 1)
    since = module.dump(tmp_path / "whole")
    copy = make(eviction, (4096, 4096))
    copy.load_dump(tmp_path / "whole")
    for number in range(6):
        train(module, *range(3 * number, 3 * number + 3), distinct=400)
        module.erase(0, module.table_entries(0).keys[::17])
        since = module.dump(tmp_path / str(number), since=since)
        copy.load_dump(tmp_path / str(number))
        for name in module.table_names:
            ours, theirs = module.table_entries(name).sorted(), copy.table_entries(name).sorted()
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.stamps, theirs.stamps)
            for key, rows in ours.rows.items():
                assert torch.equal(torch.as_tensor(rows), torch.as_tensor(theirs.rows[key]))
    assert (copy.index.tick, copy.step) == (module.index.tick, module.step)
    if eviction is not Eviction.NONE:
        assert module.stats()["items"]["evicted"] > 0


@pytest.mark.parametrize(
    ("capacity", "seeds"), [(1024, (0, 0)), (1056, (0, 0)), (8 * 33 * 32, (3, 4))]
)
def test_a_copy_as_large_as_a_full_table_loses_no_key(
    capacity: int, seeds: tuple[int, int]
) -> None:
    """Whatever the number of buckets, and where the copy began with another hash."""
    module, copy = (
        DynamicEmbeddingBags([DynamicSpec(capacity, 4)], optim.Adagrad(0.1), seed=seed)
        for seed in seeds
    )
    module.track_evictions()
    since, size = 0, capacity // 12
    generator = torch.Generator().manual_seed(0)
    for number in range(30):
        ids = torch.randint(0, 5 * capacity, (size,), generator=generator)
        (module(ids, torch.arange(size + 1)) * ids[:, None].sin()).sum().backward()
        if number % 3 == 2:
            changes = module.changes(since)
            since = changes.until
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (loaded,) = copy.apply_changes(changes).values()
            assert (loaded.left_out, loaded.displaced) == (0, 0)
            assert_same_content(module, copy)
    assert module.size(0) == capacity


def test_a_copy_that_is_too_small_says_what_it_loses() -> None:
    module, copy = make(capacities=(256, 256)), make(capacities=(64, 256))
    module.track_evictions()
    train(module, *range(8), distinct=400)
    with pytest.warns(UserWarning, match=r"copy had no place .* lost are \{'items': \d+\}"):
        loaded = copy.apply_changes(module.changes(0))
    assert loaded["items"].left_out == module.size(0) - 64 > 0


def test_keys_that_expire_are_told(tmp_path: Path) -> None:
    module, copy = make(ttl=4), make()
    module.track_evictions()
    train(module, 0)
    since = module.dump(tmp_path / "whole")
    copy.load_dump(tmp_path / "whole")
    train(module, *range(1, 9))
    copy.apply_changes(module.changes(since))
    assert module.stats()["items"]["expired"] > 0
    assert torch.equal(
        copy.table_entries(0).sorted().keys, module.table_entries(0).sorted().keys
    )  # fmt: skip


def test_changes_may_be_applied_again(tmp_path: Path) -> None:
    module, copy = make(capacities=(96, 96)), make(capacities=(4096, 4096))
    module.track_evictions()
    train(module, 0, 1)
    copy.load_state_dict(module.state_dict())
    train(module, 2, 3, distinct=400)
    first = module.changes(2)
    train(module, 4, 5, distinct=400)
    for changes in (first, first, module.changes(2), module.changes(first.until)):
        copy.apply_changes(changes)
    assert_same_content(module, copy)


def test_a_change_is_small() -> None:
    module = trained(make(capacities=(8192, 8192)))
    module.track_evictions()
    train(module, 99)
    changed = module.changes(module.index.tick).tables["items"]
    ids, offsets = batch(99)
    read = torch.cat([ids[: offsets[4]], ids[offsets[8] :]]).unique()
    assert torch.equal(changed.upserts.keys.sort().values, read)
    assert changed.removed.numel() == 0


def test_a_row_that_is_trained_after_its_dump_is_told_the_next_time() -> None:
    module, copy = make(), make()
    module.track_evictions()
    out = module(*batch(1))
    copy.load_state_dict(module.state_dict())
    since = module.changes(0).until
    out.sum().backward()
    copy.apply_changes(module.changes(since))
    assert_same_content(module, copy)


def test_a_gap_is_told_and_so_is_what_is_forgotten(tmp_path: Path) -> None:
    module, copy = make(capacities=(64, 64)), make()
    with pytest.raises(RuntimeError, match=r"call track_evictions\(\)"):
        module.changes(0)
    module.track_evictions(most=100)
    train(module, 0)
    copy.load_state_dict(module.state_dict())
    train(module, *range(1, 7), distinct=4000)
    with pytest.raises(ValueError, match="removals are known from tick"):
        module.changes(1)
    train(module, 7, distinct=20)
    changes = module.changes(module.index.tick)
    with pytest.raises(ValueError, match="changes are told from tick 8, these tables are at 1"):
        copy.apply_changes(changes)
    later = trained(make())
    with pytest.raises(ValueError, match="lead to tick 8, these tables are at 12 already"):
        later.apply_changes(changes)


def test_a_load_forgets_removals() -> None:
    module = make()
    log = module.track_evictions()
    train(module, 0)
    module.erase(0, module.table_entries(0).keys)
    module.load_state_dict(trained(make()).state_dict())
    assert module.removals is log
    assert log.reaches_back_to(0) == 12
    assert module.changes(12).tables["items"].removed.numel() == 0


# Killed processes


@pytest.mark.slow
def test_training_goes_on_from_the_last_dump_wherever_it_is_killed(tmp_path: Path) -> None:
    """Before, within and after every call that changes a file, and every growth of the table."""
    done = run_alone(dynamic_kills, "calls", tmp_path)
    for word in ("DUMPING", "GROWING", "old", "new"):
        assert f"'{word}'" in done, done


@pytest.mark.slow
def test_training_that_is_killed_again_and_again(tmp_path: Path) -> None:
    done = run_alone(dynamic_kills, "random", tmp_path)
    for word in ("LOADING", "TRAINING", "DUMPING"):
        assert f"'{word}'" in done, done


# DynamicEmb's files


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.Adam(0.1), optim.RowwiseAdagrad(0.1)])
@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU, Eviction.STEP])
def test_dynamicemb_files_there_and_back(
    optimizer: optim.Optimizer, eviction: Eviction, tmp_path: Path
) -> None:
    module, other = (make(eviction, optimizer=optimizer) for _ in range(2))
    train(module, *range(8))
    for name in module.table_names:
        module.dump_dynamicemb(tmp_path, name)
        done = other.load_dynamicemb(tmp_path, name)
        assert done.loaded == module.size(module.table_names.index(name))
        ours, theirs = module.table_entries(name).sorted(), other.table_entries(name).sorted()
        assert torch.equal(ours.keys, theirs.keys)
        for key, rows in ours.rows.items():
            assert torch.equal(torch.as_tensor(rows), torch.as_tensor(theirs.rows[key]))
        if eviction is Eviction.LRU:
            older = ours.stamps[:, None] < ours.stamps
            assert torch.equal(theirs.stamps[:, None] < theirs.stamps, older)
        else:
            assert ours.scores is not None
            assert theirs.scores is not None
            assert torch.equal(ours.scores, theirs.scores)


def test_dynamicemb_files_without_states_and_with_counts(tmp_path: Path) -> None:
    module, other = trained(admitting(4096), 5), admitting(4096)
    module.dump_dynamicemb(tmp_path, "items", leave_out=["states"])
    other.load_dynamicemb(tmp_path, "items")
    assert module.admission is not None
    assert other.admission is not None
    for ours, theirs in zip(module.admission.counts(0), other.admission.counts(0), strict=True):
        assert torch.equal(ours, theirs)
    assert float(other.state_dict()["items.exp_avg"].abs().sum()) == 0
    with pytest.raises(ValueError, match="leave_out takes"):
        module.dump_dynamicemb(tmp_path, "items", leave_out=["optim"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_page_on_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    names: dict[str, object] = {}
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)
    assert names["left_out"] == 0
