"""Dumps of dynamic tables in directories, and copies that follow by what changed."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, optim
from emblib.checkpoints import load_dynamicemb, save_dynamicemb, set_table_entries, table_entries
from emblib.dynamic import keys
from emblib.dynamic.saving import entries
from emblib.dynamic.saving.dumps import DumpError, DumpProgress, Part
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since
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
    assert module.save(tmp_path) == 12
    loaded = other.load(tmp_path)
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
    module.save(tmp_path / "a")
    other.load(tmp_path / "a")
    assert_same_states(module.state_dict(), other.state_dict())
    module, other = trained(make(Eviction.STEP)), make(Eviction.STEP)
    module.save(tmp_path / "b")
    other.load(tmp_path / "b")
    assert other.eviction_score("users") == module.eviction_score("users") == 13


def test_what_finds_no_place_is_counted_and_told(tmp_path: Path) -> None:
    module, other = trained(make(capacities=(512, 512))), make(capacities=(64, 512))
    module.save(tmp_path)
    with pytest.warns(UserWarning, match=r"left out.* are \{'items': \d+\}"):
        loaded = other.load(tmp_path)
    assert loaded["items"].loaded + loaded["items"].left_out == module.size(0)
    assert other.size(0) == loaded["items"].loaded > 60
    kept, all_of_it = table_entries(other, "items"), table_entries(module, "items")
    gone = all_of_it.stamps[~torch.isin(all_of_it.keys, kept.keys)]
    assert float(gone.float().mean()) < float(kept.stamps.float().mean()) - 2


def test_long_work_is_reported(tmp_path: Path) -> None:
    module, told = trained(make()), list[DumpProgress]()
    module.save(tmp_path, report=told.append)
    assert {(each.table, each.done, each.total) for each in told} == {
        ("items", module.size(0), module.size(0)),
        ("users", module.size(1), module.size(1)),
    }
    told.clear()
    make().load(tmp_path, report=told.append)
    assert ("items", module.size(0), module.size(0)) in told


def test_the_same_tables_make_the_same_files(tmp_path: Path) -> None:
    module, other = trained(make()), make(capacities=(1024, 1024))
    other.load_state_dict(module.state_dict())
    module.save(tmp_path / "a")
    other.save(tmp_path / "b")
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
            set_table_entries(one, t, table_entries(module, t).owned(rank, writers))
        one.save(tmp_path, part=Part(rank, writers), identity="step 12")
    found = []
    for rank in range(readers):
        one = make(capacities=(256, 256))
        one.load(tmp_path, part=Part(rank, readers))
        mine = table_entries(one, "items")
        assert bool((keys.owner(mine.keys, readers) == rank).all())
        found.append(mine.sorted())
    whole, wanted = entries.concatenate(found).sorted(), table_entries(module, "items").sorted()
    for name in ("keys", "stamps"):
        assert torch.equal(getattr(whole, name), getattr(wanted, name))
    for name, rows in wanted.rows.items():
        assert torch.equal(torch.as_tensor(whole.rows[name]), torch.as_tensor(rows))


def test_a_dump_of_other_tables_is_refused(tmp_path: Path) -> None:
    trained(make()).save(tmp_path)
    other = make(optimizer=optim.Adam(0.1))
    with pytest.raises(ValueError, match="rows of shape"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match=r"hyper has|must have the rows"):
        make(optimizer=optim.SGD(0.1)).load(tmp_path)
    from emblib import DynamicSpec

    with pytest.raises(ValueError, match="the dump has the tables"):
        DynamicEmbeddingBags([DynamicSpec(32, 4, name="shops")]).load(tmp_path)
    assert other.size(0) == 0


def test_a_damaged_dump_changes_nothing(tmp_path: Path) -> None:
    module, other = trained(make()), trained(make(), 3)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    module.save(tmp_path)
    path = max(tmp_path.glob("*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DumpError, match="its checksum is wrong"):
        other.load(tmp_path)
    assert_same_states(before, other.state_dict())


# Changes


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_copy_follows_by_changes(eviction: Eviction, tmp_path: Path) -> None:
    """Through training, eviction, erasure and growth; each dump of changes is read once."""
    module = make(eviction, (160, 96), initial_capacity=32)
    module.track_evictions()
    train(module, 0, 1)
    since = module.save(tmp_path / "whole")
    copy = make(eviction, (4096, 4096))
    copy.load(tmp_path / "whole")
    for number in range(6):
        train(module, *range(3 * number, 3 * number + 3), distinct=400)
        module.erase(0, table_entries(module, 0).keys[::17])
        since = module.save(tmp_path / str(number), since=since)
        copy.load(tmp_path / str(number))
        for name in module.table_names:
            ours, theirs = table_entries(module, name).sorted(), table_entries(copy, name).sorted()
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
            changes = changes_since(module, since)
            since = changes.until
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (loaded,) = apply_changes(copy, changes).values()
            assert (loaded.left_out, loaded.displaced) == (0, 0)
            assert_same_content(module, copy)
    assert module.size(0) == capacity


def test_changes_since_a_step_that_was_not_reached_are_refused(tmp_path: Path) -> None:
    module = make()
    module.track_evictions()
    train(module, 0)
    for since, error in ((1.5, TypeError), (True, TypeError), (-1, ValueError), (2, ValueError)):
        for call in (
            lambda since: module.save(tmp_path / "changes", since=since),
            lambda since: changes_since(module, since),
            module.table_handles()["items"].evicted,
        ):
            with pytest.raises(error, match="since"):
                call(since)
    assert not (tmp_path / "changes").exists()


def test_a_copy_that_is_too_small_says_what_it_loses() -> None:
    module, copy = make(capacities=(256, 256)), make(capacities=(64, 256))
    module.track_evictions()
    train(module, *range(8), distinct=400)
    with pytest.warns(UserWarning, match=r"copy had no slot .* lost are \{'items': \d+\}"):
        loaded = apply_changes(copy, changes_since(module, 0))
    assert loaded["items"].left_out == module.size(0) - 64 > 0


def test_keys_that_expire_are_told(tmp_path: Path) -> None:
    module, copy = make(ttl=4), make()
    module.track_evictions()
    train(module, 0)
    since = module.save(tmp_path / "whole")
    copy.load(tmp_path / "whole")
    train(module, *range(1, 9))
    apply_changes(copy, changes_since(module, since))
    assert module.stats()["items"]["expired"] > 0
    assert torch.equal(table_entries(copy, 0).sorted().keys, table_entries(module, 0).sorted().keys)


def test_changes_may_be_applied_again(tmp_path: Path) -> None:
    module, copy = make(capacities=(96, 96)), make(capacities=(4096, 4096))
    module.track_evictions()
    train(module, 0, 1)
    copy.load_state_dict(module.state_dict())
    train(module, 2, 3, distinct=400)
    first = changes_since(module, 2)
    train(module, 4, 5, distinct=400)
    for changes in (first, first, changes_since(module, 2), changes_since(module, first.until)):
        apply_changes(copy, changes)
    assert_same_content(module, copy)


def test_a_change_is_small() -> None:
    module = trained(make(capacities=(8192, 8192)))
    module.track_evictions()
    train(module, 99)
    changed = changes_since(module, module.index.tick).tables["items"]
    ids, offsets = batch(99)
    read = torch.cat([ids[: offsets[4]], ids[offsets[8] :]]).unique()
    assert torch.equal(changed.upserts.keys.sort().values, read)
    assert changed.removed.numel() == 0


def test_a_row_that_is_trained_after_its_dump_is_told_the_next_time() -> None:
    module, copy = make(), make()
    module.track_evictions()
    out = module(*batch(1))
    copy.load_state_dict(module.state_dict())
    since = changes_since(module, 0).until
    out.sum().backward()
    apply_changes(copy, changes_since(module, since))
    assert_same_content(module, copy)


def test_a_gap_is_told_and_so_is_what_is_forgotten(tmp_path: Path) -> None:
    module, copy = make(capacities=(64, 64)), make()
    with pytest.raises(RuntimeError, match=r"call track_evictions\(\)"):
        changes_since(module, 0)
    module.track_evictions(max_keys=100)
    train(module, 0)
    copy.load_state_dict(module.state_dict())
    train(module, *range(1, 7), distinct=4000)
    with pytest.raises(ValueError, match="the log has evictions from tick"):
        changes_since(module, 1)
    train(module, 7, distinct=20)
    changes = changes_since(module, module.index.tick)
    with pytest.raises(ValueError, match="changes begin at tick 8, these tables are at 1"):
        apply_changes(copy, changes)
    later = trained(make())
    with pytest.raises(ValueError, match="lead to tick 8, these tables are at 12 already"):
        apply_changes(later, changes)


def test_changes_of_other_tables_are_refused() -> None:
    module = make()
    module.track_evictions()
    train(module, 0)
    changes = changes_since(module, 0)
    table_changes = changes.tables["items"]
    with pytest.raises(ValueError, match=r"changes are of the tables \['others'\]"):
        apply_changes(make(), changes._replace(tables={"others": table_changes}))


def test_a_load_forgets_removals() -> None:
    module = make()
    log = module.track_evictions()
    train(module, 0)
    module.erase(0, table_entries(module, 0).keys)
    module.load_state_dict(trained(make()).state_dict())
    assert module.eviction_log is log
    assert log.complete_from(0) == 12
    assert changes_since(module, 12).tables["items"].removed.numel() == 0


# Killed processes


@pytest.mark.slow
def test_training_goes_on_from_the_last_dump_wherever_it_is_killed(tmp_path: Path) -> None:
    """Before and within every call that changes a file, and before every growth of the table."""
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
        save_dynamicemb(module, tmp_path, name)
        done = load_dynamicemb(other, tmp_path, name)
        assert done.loaded == module.size(module.table_names.index(name))
        ours, theirs = table_entries(module, name).sorted(), table_entries(other, name).sorted()
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
    save_dynamicemb(module, tmp_path, "items", leave_out=["states"])
    load_dynamicemb(other, tmp_path, "items")
    assert module.admission is not None
    assert other.admission is not None
    for ours, theirs in zip(module.admission.counts(0), other.admission.counts(0), strict=True):
        assert torch.equal(ours, theirs)
    assert float(other.state_dict()["items.exp_avg"].abs().sum()) == 0
    with pytest.raises(ValueError, match="leave_out takes"):
        save_dynamicemb(module, tmp_path, "items", leave_out=["optim"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_page_on_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    names: dict[str, object] = {}
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)
    assert names["left_out"] == 0
