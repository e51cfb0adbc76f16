"""Stores after power failures, failed syncs and flipped bits: the last flush, or a refusal."""

import errno
import gc
import json
import os
import sqlite3
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from emblib.dynamic.tiers import slots
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import StoredTable
from emblib.specs import Verify
from emblib.tables import journal
from emblib.tables.durable_files import ChecksumError, SyncError
from tests.dynamic.row_store_cases import TABLES, as_dict, contents, random_rows
from tests.tables.power_loss import Recorder, Replay, in_memory

SMALL = [StoredTable("a", 12)]
Table = dict[int, tuple[int, int, bytes]]


class Expected(NamedTuple):
    """What may be found: flush `acknowledged`, or the next one; or a refusal."""

    acknowledged: int
    under_way: bool = False
    may_refuse: bool = False


class History:
    """A store that is written to, with what each flush left."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(slots, "_MIN_CAPACITY", 4)
        directory.mkdir()
        self.recorder = Recorder(directory, expected=Expected(0))
        self.recorder.on_sync = self._on_sync
        self.recovering = False
        self.recorder.start(patch)
        self.flushes: list[Table] = [{}]
        self.store = DiskRows(directory)
        self.store.open(SMALL)

    @property
    def epoch(self) -> int:
        return len(self.flushes) - 1

    def _on_sync(self, path: Path) -> None:
        """Flushes and recoveries first sync the journal; from then on all can be undone."""
        expected = self.recorder.expected
        assert isinstance(expected, Expected)
        if expected.under_way or self.recovering:
            self.recorder.expected = expected._replace(may_refuse=False)

    def put(self, keys: list[int], seed: int) -> None:
        self.recorder.expect(Expected(self.epoch, may_refuse=self.epoch > 0))
        self.store.put(0, random_rows(keys, 12, seed))
        self.recorder.look("put")

    def erase(self, keys: list[int]) -> None:
        self.store.erase(0, torch.tensor(keys))
        self.recorder.look("erased")

    def flush(self) -> None:
        after = contents(self.store, 0)
        acknowledged = self.epoch
        self.flushes.append(after)
        self.recorder.expect(Expected(acknowledged, under_way=True, may_refuse=acknowledged > 0))
        self.store.flush([[]], str(self.epoch))
        self.recorder.expect(Expected(self.epoch))

    def end_and_recover(self) -> None:
        """The process ends, not the machine; the next one goes back to the last flush."""
        self.store.close()
        self.recorder.expect(Expected(self.epoch, may_refuse=True))
        self.recovering = True
        self.store.open(SMALL)
        self.recovering = False
        assert contents(self.store, 0) == self.flushes[-1]
        self.recorder.expect(Expected(self.epoch))

    def judge(self, directory: Path, expected: object, label: str) -> str:
        """Open what a failure left; fail where it is anything that it must not be."""
        assert isinstance(expected, Expected)
        where = f"at {label!r}, expected {expected}"
        store = DiskRows(directory)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store.open(SMALL)
            found = contents(store, 0)
        except (RuntimeError, ValueError) as error:
            if not expected.may_refuse:
                raise AssertionError(f"refused {where}") from error
            return "refused"
        number = int(store.note or 0)
        store.close()
        assert number in {expected.acknowledged, expected.acknowledged + expected.under_way}, where
        assert found == self.flushes[number], f"not what flush {number} left, {where}"
        return f"flush {number}"


@pytest.mark.parametrize("samples", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_orders_of_writes_after_power_failures(samples: int) -> None:
    with in_memory() as path, pytest.MonkeyPatch.context() as patch:
        history = History(path / "live", patch)
        history.put([1, 2, 3], seed=1)
        history.flush()
        history.put([2, 4], seed=2)
        history.erase([3])
        history.flush()
        history.put([5, 6, 7, 8, 9], seed=3)  # the files grow
        history.erase([1])
        history.flush()
        history.put([2], seed=4)
        history.end_and_recover()
        history.put([2], seed=5)
        history.store.close()
        history.recorder.close()
        replay = Replay(path / "replayed", history.judge, most=4 * samples, samples=samples)
        replay.run(history.recorder.points, patch)
    assert replay.done["exhaustive"]
    assert all(replay.done[f"flush {n}"] for n in range(4))
    assert replay.done["refused"]


def filled(directory: Path, verify: Verify | str = "touch") -> tuple[DiskRows, Table]:
    """A store that was flushed twice."""
    store = DiskRows(directory, verify)
    store.open(TABLES)
    for seed, keys in enumerate((range(1500), range(700, 1600))):
        store.put(1, random_rows(keys, 40, seed))
        store.flush([[], []], str(seed))
    return store, contents(store, 1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 2
    path.write_bytes(data)


@pytest.mark.parametrize("verify", ["touch", "open"])
def test_a_flipped_bit_anywhere_is_refused(verify: str, tmp_path: Path) -> None:
    store, table = filled(tmp_path)
    store.close()
    store = DiskRows(tmp_path, verify)
    for name in ("heads_1.bin", "rows_1.bin", "heads_1.bin.crc", "rows_1.bin.crc", "rows.json"):
        used = 1600 * {"heads_1.bin": 32, "rows_1.bin": 40}.get(name, 0)
        size = used or (tmp_path / name).stat().st_size
        if name.endswith(".crc"):
            size = 4 * -(-1600 * (32 if "heads" in name else 40) // 4096)
        for at in (0, size // 3, size // 2, size - 1):
            flip(tmp_path / name, at)
            with pytest.raises((RuntimeError, ValueError)) as caught:
                read_all(store)
            assert name in str(caught.value) or "another layout" in str(caught.value)
            flip(tmp_path / name, at)
    assert read_all(store) == table


def read_all(store: DiskRows) -> Table:
    """Open the store, read a table and close it."""
    try:
        store.open(TABLES)
        return contents(store, 1)
    finally:
        store.close()


def test_by_touch_only_rows_that_are_used_are_verified(tmp_path: Path) -> None:
    store, table = filled(tmp_path)
    store.close()
    flip(tmp_path / "rows_1.bin", 500 * 40)  # keys are at their places in this order
    store.open(TABLES)
    assert as_dict(store.read(1, torch.tensor([3, 1000])).rows) == {k: table[k] for k in (3, 1000)}
    for call in (
        lambda: store.read(1, torch.tensor([3, 501])),
        lambda: store.put(1, random_rows([501, 5000], 40, seed=3)),
        lambda: list(store.iterate(1)),
    ):
        with pytest.raises(ChecksumError, match=r"rows_1\.bin .*page 4 .*rows 409 to 511 of .*'b'"):
            call()
    assert store.size(1) == 1600
    more = random_rows([3, 1000, 6000], 40, seed=3)
    store.put(1, more)
    store.flush([[], []], "more")
    store.close()
    store.open(TABLES)
    assert as_dict(store.read(1, more.keys).rows) == as_dict(more)
    with pytest.raises(ChecksumError, match="page 4 "):
        list(store.iterate(1))
    store.close()
    store = DiskRows(tmp_path, "off")
    found = read_all(store)
    store.open(TABLES)
    store.flush([[], []], "taken as it is")
    store.close()
    store = DiskRows(tmp_path, "open")
    assert read_all(store) == found
    assert {k for k in table if found[k] != table[k]} == {3, 500, 1000}


@pytest.mark.parametrize("file", ["heads_0.bin", "rows_0.bin"])
def test_a_file_that_is_cut_off_while_it_is_open_is_told(file: str, tmp_path: Path) -> None:
    """Reading the mapping behind the end of the file would end the process."""
    store = DiskRows(tmp_path)
    store.open(SMALL)
    keys = torch.arange(5000)
    store.put(0, random_rows(keys, 12, 0))
    store.flush([[]], "")
    expected = contents(store, 0)
    path = tmp_path / file
    data = path.read_bytes()
    os.truncate(path, len(data) - 4096)
    for call in (
        lambda: store.read(0, keys),
        lambda: store.put(0, random_rows(keys, 12, 1)),
        lambda: store.put(0, random_rows([7000], 12, 1)),
    ):
        with pytest.raises(RuntimeError, match=rf"{file} is shorter than its \d+ rows"):
            call()
    path.write_bytes(data)  # the same file
    assert contents(store, 0) == expected
    store.close()


def test_rows_that_were_read_are_lifted_where_they_are_then(tmp_path: Path) -> None:
    """Slots of the last read may be freed and reused before its keys are lifted."""
    store = DiskRows(tmp_path)
    store.open(SMALL)
    keys = torch.arange(20)
    store.put(0, random_rows(keys, 12, 0))
    records = store.read(0, keys)
    store.erase(0, keys[:10])
    store.put(0, random_rows(torch.arange(100, 110), 12, 1))
    store.lift(0, records.rows.keys)
    assert contents(store, 0).keys() == {*range(100, 110)}
    records = store.read(0, torch.tensor([103, 101, 999, 108]))
    store.erase(0, torch.tensor([108]))
    store.lift(0, records.rows.keys)
    store.lift(0, records.rows.keys)
    assert contents(store, 0).keys() == {*range(100, 110)} - {101, 103, 108}
    store.close()


def test_a_store_without_checksums_gets_them_when_asked_to(tmp_path: Path) -> None:
    store, table = filled(tmp_path)
    store.close()
    path = tmp_path / "rows.json"
    content = json.loads(path.read_text())
    del content["checksum"], content["checksums"]
    tables = content["layout"]["tables"]
    content["layout"] = {"format": 1, "byteorder": content["layout"]["byteorder"], "tables": tables}
    path.write_text(json.dumps(content))
    for file in tmp_path.glob("*.crc"):
        file.unlink()
    with pytest.raises(ValueError, match=r'without checksums.*once with verify="off"'):
        store.open(TABLES)
    store = DiskRows(tmp_path, Verify.OFF)
    store.open(TABLES)
    assert contents(store, 1) == table
    store.flush([[], []], "checked")
    store.close()
    assert read_all(DiskRows(tmp_path, Verify.OPEN)) == table


@pytest.mark.parametrize("kind", [DiskRows, SqliteRows])
def test_a_store_that_was_not_made_is_not_closed(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_value))
    with pytest.raises(ValueError, match="Verify must be one of"):
        kind(tmp_path / "rows", verify="always")
    gc.collect()
    assert not ignored


def test_a_header_of_an_earlier_start_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table = filled(tmp_path)
    store.put(1, random_rows([3], 40, seed=8))
    store.close()
    records = (tmp_path / "journal").read_bytes()
    os.truncate(tmp_path / "journal", 56)
    monkeypatch.setattr(journal, "boot_id_of_machine", lambda: b"another".ljust(36))
    with pytest.raises(ChecksumError, match="went down: rows that changed reached the disk"):
        store.open(TABLES)
    (tmp_path / "journal").write_bytes(records)
    with pytest.warns(UserWarning, match="every page of them has been verified"):
        store.open(TABLES)
    assert contents(store, 1) == table
    store.close()


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_after_a_failed_sync_nothing_is_written_until_it_is_opened_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table = filled(tmp_path)
    rows, left, fsync = random_rows([3, 9999], 40, seed=8), [number], os.fsync

    def fail(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    def epoch() -> None:
        store.put(1, rows)
        store.flush([[], []], "second")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SyncError, match="sync failed"):
            epoch()
    for write in (
        lambda: store.flush([[], []], "third"),
        lambda: store.put(1, rows),
        lambda: store.erase(1, rows.keys),
    ):
        with pytest.raises(RuntimeError, match=r"a sync failed \(.*Open the directory in a new"):
            write()
    store.close()
    store.open(TABLES)
    assert contents(store, 1) == (table | as_dict(rows) if store.note == "second" else table)
    store.put(1, rows)
    store.flush([[], []], "third")
    store.close()


# SQLite


def test_a_flipped_bit_in_a_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    store = SqliteRows(path)
    store.open(TABLES)
    rows = random_rows(range(300), 40, seed=1)
    store.put(1, rows)
    store.flush([[], []], "")
    store.close()
    data = path.read_bytes()
    for key in (0, 150, 299):
        at = data.index(bytes(rows.values[key].tolist()))
        flip(path, at + 39)
        store.open(TABLES)
        assert store.read(1, torch.tensor([7, 8])).positions.numel() == 2
        for read in (
            lambda: store.read(1, torch.tensor([7, key])),  # noqa: B023
            lambda: list(store.iterate(1)),
        ):
            with pytest.raises(ChecksumError, match=f"the row of key {key} of table 'b' is not"):
                read()
        store.close()
        with pytest.raises(ChecksumError, match="is not as it was written"):
            SqliteRows(path, "open").open(TABLES)
        taken = SqliteRows(path, "off")
        taken.open(TABLES)
        assert contents(taken, 1).keys() == set(range(300))
        taken.close()
        flip(path, at + 39)
    store = SqliteRows(path, "open")
    store.open(TABLES)
    assert contents(store, 1) == as_dict(rows)
    store.close()


def change_in_file(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def test_a_changed_note_or_layout_of_a_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    store = SqliteRows(path)
    store.open(TABLES)
    store.flush([[], []], '{"lr": 0.125}')
    store.close()
    for old, new in ((b"0.125", b"0.925"), (b"table 1b 40", b"table 1b 41")):
        change_in_file(path, old, new)
        for verify in ("touch", "open"):
            with pytest.raises(ChecksumError, match="layout and the numbers of the optimizer"):
                SqliteRows(path, verify).open(TABLES)
        change_in_file(path, new, old)
    change_in_file(path, b"0.125", b"0.925")
    taken = SqliteRows(path, "off")
    taken.open(TABLES)
    assert taken.note == '{"lr": 0.925}'
    taken.flush([[], []], taken.note)
    taken.close()
    store.open(TABLES)
    assert store.note == '{"lr": 0.925}'
    store.close()


def test_a_row_of_a_database_does_not_expire_by_a_damaged_stamp(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    rows = random_rows(range(50), 40, seed=1)
    store = SqliteRows(path)
    store.open(TABLES)
    store.put(1, rows)
    store.flush([[], []], "")
    store.close()
    with sqlite3.connect(path) as other:
        other.execute("UPDATE rows_1 SET stamp = -5 WHERE key = 7")
    other.close()
    store.open(TABLES)
    with pytest.raises(ChecksumError, match="the row of key 7 of table 'b' is not"):
        store.expire(1, 0)
    assert store.size(1) == 50
    store.close()


def test_a_database_without_checksums_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    store = SqliteRows(path)
    store.open(TABLES)
    rows, above = random_rows(range(50), 40, seed=1), random_rows(range(100, 130), 12, seed=2)
    store.put(1, rows)
    store.flush([[above], []], "")
    store.close()
    with sqlite3.connect(path) as before:
        before.execute("UPDATE emblib SET value = '1' WHERE name = 'format'")
        before.execute("DELETE FROM emblib WHERE name = 'checksum'")
        for name in ("rows_0", "rows_1", "above_0", "above_1"):
            before.execute(f"ALTER TABLE {name} DROP COLUMN checksum")
    before.close()
    for _ in range(2):
        store = SqliteRows(path, "open")
        store.open(TABLES)
        assert contents(store, 1) == as_dict(rows)
        assert contents(store, 0) == as_dict(above)
        store.flush([[], []], "")
        store.close()
