"""The journal of a DiskStore: torn, damaged, of other epochs and machines, and on full disks."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emblib.tables import journal
from tests.tables.disk_kills import open_store, write_rows
from tests.tables.test_disk import committed, everything, same, simple


def with_journal(directory: Path) -> list[torch.Tensor]:
    """A store left with two records in its journal; returns what was committed."""
    store, before = committed(directory)
    for rows in (torch.arange(10), torch.arange(20, 40)):
        store.protect(rows)
        write_rows([store.weights, *store.states], rows, seed=4)
    store.close()
    return before


def test_a_torn_tail_is_of_rows_that_did_not_change(tmp_path: Path) -> None:
    """At every byte where the end of a process may have cut the last record."""
    store, before = committed(tmp_path)
    store.protect(torch.arange(10))
    write_rows([store.weights, *store.states], torch.arange(10), seed=4)
    path = tmp_path / "journal"
    start = path.stat().st_size
    store.protect(torch.arange(20, 22))
    store.close()
    whole = path.read_bytes()
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        store = open_store(tmp_path)
        assert same(store, before)
        store.close()


def test_a_torn_header_is_of_an_epoch_without_records(tmp_path: Path) -> None:
    store, before = committed(tmp_path)
    store.close()
    (tmp_path / "journal").write_bytes(b"emblib-1" + bytes(20))
    assert same(open_store(tmp_path), before)


@pytest.mark.parametrize("at", [3, 12, 50, 57, 70, 76, 90, 500, -1])
def test_a_damaged_journal_is_refused_and_nothing_is_written(tmp_path: Path, at: int) -> None:
    with_journal(tmp_path)
    path, weights = tmp_path / "journal", tmp_path / "weights.bin"
    data, before = bytearray(path.read_bytes()), weights.read_bytes()
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(journal.JournalError, match="damaged"):
        open_store(tmp_path)
    assert weights.read_bytes() == before
    assert path.read_bytes() == data


def test_the_journal_of_an_earlier_commit_means_nothing(tmp_path: Path) -> None:
    """As when the process ends between the commit and clearing the journal."""
    store, _ = committed(tmp_path)
    store.protect(torch.arange(10))
    old = (tmp_path / "journal").read_bytes()
    store.weights.fill_(5.0)
    store.commit([8.0])
    after = everything(store)
    store.close()
    (tmp_path / "journal").write_bytes(old)
    assert same(open_store(tmp_path), after)


def test_the_end_of_the_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = with_journal(tmp_path)
    monkeypatch.setattr(journal, "machine_start", lambda: b"another".ljust(36))
    with pytest.warns(UserWarning, match="led back to the last flush; if it lost power"):
        store = open_store(tmp_path)
    assert same(store, before)


def test_a_full_disk_stops_protect_and_the_store_goes_on(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: writes come short, then fail."""
    store, before = committed(tmp_path)
    store.protect(torch.arange(10))
    size = (tmp_path / "journal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    try:
        with pytest.raises(OSError, match="the journal cannot grow") as caught:
            store.protect(torch.arange(500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "journal").stat().st_size == size
    store.protect(torch.arange(500))
    write_rows([store.weights, *store.states], torch.arange(500), seed=4)
    store.close()
    assert same(open_store(tmp_path), before)


def test_a_commit_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = committed(tmp_path)
    store.protect(torch.arange(10))
    write_rows([store.weights, *store.states], torch.arange(10), seed=4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.commit([8.0])
    assert store.committed_numbers == [7.0]
    assert not (tmp_path / "store.json.new").exists()
    store.protect(torch.arange(20, 30))
    write_rows([store.weights, *store.states], torch.arange(20, 30), seed=5)
    store.close()
    store = open_store(tmp_path)
    assert same(store, before)
    store.protect(torch.arange(10))
    store.weights[0] = 1.0
    store.commit([8.0])
    store.close()
    assert open_store(tmp_path).committed_numbers == [8.0]


def test_tables_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=159))
        with pytest.raises(OSError, match="of 160 bytes do not fit, 159 are free"):
            simple(tmp_path)
    assert simple(tmp_path).created
