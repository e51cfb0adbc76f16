"""The journal of a DiskStore: torn, damaged, of other epochs and machines, and on full disks."""

import errno
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emblib.tables import journal
from emblib.tables.durable_files import ChecksumError, SyncError
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
    monkeypatch.setattr(journal, "boot_id_of_machine", lambda: b"another".ljust(36))
    with pytest.warns(
        UserWarning, match="restored to their last flush, and every page of them has been verified"
    ):
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


def test_a_header_of_an_earlier_start_without_records_is_not_the_end_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure that took the records and left a row that had changed."""
    store, before = committed(tmp_path)
    store.protect(torch.arange(10))
    os.truncate(tmp_path / "journal", 56)
    monkeypatch.setattr(journal, "boot_id_of_machine", lambda: b"another".ljust(36))
    store.close()
    with pytest.warns(UserWarning, match="restored to their last flush"):
        store = open_store(tmp_path)  # no row had changed
    assert same(store, before)
    store.protect(torch.arange(10))
    write_rows([store.weights, *store.states], torch.arange(3, 4), seed=4)
    store.close()
    os.truncate(tmp_path / "journal", 56)
    monkeypatch.setattr(journal, "boot_id_of_machine", lambda: b"a third one".ljust(36))
    for _ in range(2):
        with pytest.raises(ChecksumError, match=r"rows 0 to .* of table 'a'.*went down: rows"):
            open_store(tmp_path)


def test_a_lost_journal_means_that_everything_is_verified(tmp_path: Path) -> None:
    before = with_journal(tmp_path)
    (tmp_path / "journal").unlink()
    with pytest.raises(ChecksumError, match="is not as the last flush left it"):
        open_store(tmp_path)
    (tmp_path / "journal").unlink()
    for path, count in (("weights.bin", 0), ("state_sum.bin", 1), ("state_m.bin", 2)):
        (tmp_path / path).write_bytes(bytes(before[count].tolist()))
    with pytest.warns(UserWarning, match="or have lost their journal"):
        assert same(open_store(tmp_path), before)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_commit_that_finds_no_room_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And may be tried again: nothing that was synced is in doubt."""
    store, before = committed(tmp_path)
    store.protect(torch.arange(10))
    write_rows([store.weights, *store.states], torch.arange(10), seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            store.commit([8.0])
    assert store.committed_numbers == [7.0]
    assert not (tmp_path / "store.json.new").exists()
    store.protect(torch.arange(20, 30))
    write_rows([store.weights, *store.states], torch.arange(20, 30), seed=5)
    after = everything(store)
    copy = tmp_path.with_name(f"{tmp_path.name}_copy")
    shutil.copytree(tmp_path, copy)
    assert same(open_store(copy), before)
    store.commit([8.0])
    store.close()
    store = open_store(tmp_path)
    assert store.committed_numbers == [8.0]
    store.verify_all()
    assert same(store, after)


@pytest.mark.parametrize("call", ["fsync", "msync"])
@pytest.mark.parametrize("number", range(4))
def test_after_a_failed_sync_nothing_is_written_until_it_is_opened_again(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux may report the next sync as a success though the pages of the first one are lost.

    The fsyncs of a commit are of the journal twice, `store.json` and the directory; an msync is of
    a file or its checksums.
    """
    store, before = committed(tmp_path)
    left, fsync = [number], os.fsync

    def fail(*handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        fsync(*handle)

    left_in_files = [before]

    def epoch() -> None:
        store.protect(torch.arange(10))
        write_rows([store.weights, *store.states], torch.arange(10), seed=4)
        left_in_files.append(everything(store))
        store.commit([8.0])

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            left[0] = 0
            patch.setattr(store._files[number], "mapped", SimpleNamespace(flush=fail))
        with pytest.raises(SyncError, match="sync failed") as caught:
            epoch()
    assert caught.value.errno == errno.EIO
    assert store.committed_numbers == [7.0]
    for write in (
        lambda: store.commit([8.0]),
        lambda: store.protect(torch.arange(20)),
        lambda: store.writing_everything().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"a sync failed \(.*Open the directory in a new"):
            write()
    store.close()
    store = open_store(tmp_path)
    store.verify_all()
    assert same(store, left_in_files[store.committed_numbers == [8.0]])
    store.protect(torch.arange(10))
    store.commit([9.0])


def test_tables_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=163))
        with pytest.raises(OSError, match="of 164 bytes do not fit, 163 are free"):
            simple(tmp_path)
        # A process that ended before its first commit has left files without holes.
        (tmp_path / "weights.bin").write_bytes(b"x" * 160)
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=164 - _written(tmp_path)))
        simple(tmp_path).close()
    assert simple(tmp_path).is_new


def _written(directory: Path) -> int:
    """Return the bytes of the rows that are not holes of the file."""
    return len((directory / "weights.bin").read_bytes().strip(b"\0"))
