"""Tables on disk behind a small cache: trained as in memory, flushed without a loss, and killed."""

import errno
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emblib import CacheConfig, Placement, TableBatchedEmbeddingBags, TableSpec, optim
from tests.tables import training_kills
from tests.tables.kills import run_alone
from tests.tables.training_kills import SETTINGS, make, same_bits, train

LARGE, SMALL = SETTINGS["large"], SETTINGS["small"]


@pytest.mark.slow
def test_ten_million_rows_behind_a_cache_of_one_percent(tmp_path: Path) -> None:
    """More rows are trained than the cache holds; all updates are in the files after `flush`."""
    setting = replace(LARGE, lookups=10_000)
    module, plain = make(setting, tmp_path), make(setting, None)
    plain.load_state_dict(module.state_dict())
    for step in range(1, 26):
        train(module, setting, step)
        train(plain, setting, step)
        if step % 10 == 0:
            module.flush()
    assert module.row_cache is not None
    slots = module.row_cache.weights.numel() // 16
    assert 99_000 < slots < 101_000
    assert module.cache_stats().write_backs > 10_000
    module.flush()
    del module
    module = make(setting, tmp_path)
    assert module.step == 25
    assert same_bits(module, plain)


def test_what_was_not_flushed_is_undone(tmp_path: Path) -> None:
    module, plain = make(SMALL, tmp_path), make(SMALL, None)
    plain.load_state_dict(module.state_dict())
    for step in range(1, 5):
        train(module, SMALL, step)
        train(plain, SMALL, step)
    module.flush()
    for step in range(5, 9):
        train(module, SMALL, step)
    assert module.cache_stats().conflict_unique_misses, "rows are meant to change on disk as well"
    assert module.cache_stats().write_backs
    del module
    module = make(SMALL, tmp_path)
    assert module.step == 4
    assert same_bits(module, plain)


def test_a_checkpoint_moves_tables_to_disk_and_back(tmp_path: Path) -> None:
    plain = make(SMALL, None)
    for step in range(1, 4):
        train(plain, SMALL, step)
    module = make(SMALL, tmp_path)
    module.load_state_dict(plain.state_dict())
    del module
    module = make(SMALL, tmp_path)
    assert same_bits(module, plain)
    for step in range(4, 8):
        train(module, SMALL, step)
        train(plain, SMALL, step)
    back = make(SMALL, None)
    back.load_state_dict(module.state_dict())
    assert same_bits(back, plain)


def test_drawing_anew_is_committed(tmp_path: Path) -> None:
    module = make(SMALL, tmp_path)
    before = module.table_weights()[0].clone()
    module.reset_parameters()
    after = module.table_weights()[0].clone()
    assert not torch.equal(before, after)
    del module
    assert torch.equal(make(SMALL, tmp_path).table_weights()[0], after)


@pytest.mark.parametrize("write", ["load_state_dict", "reset_parameters"])
def test_a_full_disk_refuses_new_rows_and_keeps_the_old(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, plain = make(SMALL, tmp_path), make(SMALL, None)
    plain.load_state_dict(module.state_dict())
    other = {key: value.clone() for key, value in module.state_dict().items()}
    for step in range(1, 4):  # the last updates are in the cache alone
        train(module, SMALL, step)
        train(plain, SMALL, step)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            getattr(module, write)(*([other] if write == "load_state_dict" else []))
    assert same_bits(module, plain)
    module.flush()
    del module
    assert same_bits(make(SMALL, tmp_path), plain)


def test_opening_writes_nothing(tmp_path: Path) -> None:
    """So a process that is killed while it opens its tables leaves them as they were."""
    make(SMALL, tmp_path)
    before = (tmp_path / "store.json").read_bytes()
    make(SMALL, tmp_path)
    assert (tmp_path / "store.json").read_bytes() == before


def test_two_modules_do_not_share_a_directory(tmp_path: Path) -> None:
    module = make(SMALL, tmp_path)
    with pytest.raises(BlockingIOError, match="one owner"):
        make(SMALL, tmp_path)
    del module
    with pytest.raises(ValueError, match="another layout"):
        TableBatchedEmbeddingBags(
            [TableSpec(10, 4, placement=Placement.DISK)],
            optim.SGD(0.1),
            cache=CacheConfig(directory=tmp_path),
        )
    with pytest.raises(ValueError, match=r"CacheConfig\(directory="):
        TableBatchedEmbeddingBags([TableSpec(10, 4, placement=Placement.DISK)], optim.SGD(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("size", SETTINGS)
def test_killed_at_any_moment(size: str, tmp_path: Path) -> None:
    """`training_kills` compares bit by bit; here, that it killed what it was meant to."""
    done = run_alone(training_kills, size, tmp_path)
    for phase in training_kills.Phase:
        assert f"'{phase.name}': " in done


@pytest.mark.parametrize("room", [0, 500, 5000])
def test_a_full_disk_in_a_step_undoes_the_step_alone(room: int, tmp_path: Path) -> None:
    """A file-size limit stands for the full disk."""
    module, plain = make(SMALL, tmp_path), make(SMALL, None)
    plain.load_state_dict(module.state_dict())
    failed = 0
    for step in range(1, 13):
        size = (tmp_path / "journal").stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if step % 3 == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
            train(module, SMALL, step)
        except OSError:
            failed += 1
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        train(plain, SMALL, step)
        module.flush()
    assert failed
    assert same_bits(module, plain)
