"""The stores behind dynamic tables: against a dict, reopened at any point, and with bad input."""

import os
import random
import sqlite3
from pathlib import Path

import pytest
import torch

from emblib.dynamic.tiers import disk
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import RowStore, StoredRows, StoredTable
from emblib.tables import durable_files, journal
from tests.dynamic import store_kills
from tests.dynamic.row_store_cases import (
    EDGES,
    FILES,
    TABLES,
    as_dict,
    contents,
    random_rows,
    take,
)
from tests.tables.kills import run_alone

Table = dict[int, tuple[int, int, bytes]]


class Model:
    """Both tiers as dicts, and their state after the last commit."""

    def __init__(self) -> None:
        self.here: list[Table] = [{} for _ in TABLES]
        self.above: list[Table] = [{} for _ in TABLES]
        self.committed: list[Table] = [{} for _ in TABLES]

    def flush(self) -> None:
        both = zip(self.above, self.here, strict=True)
        self.committed = [above | here for above, here in both]

    def reopen(self) -> None:
        self.here = [dict(table) for table in self.committed]
        self.above = [{} for _ in TABLES]


def some_keys(chance: random.Random, most: int) -> list[int]:
    pool = [*EDGES, *range(5, 60)]
    return chance.sample(pool, chance.randrange(min(most, len(pool)) + 1))


def rows_of(table: Table, width: int) -> StoredRows:
    if not table:
        return StoredRows.none(width)
    stamps, scores, values = zip(*table.values(), strict=True)
    return StoredRows(
        torch.tensor(list(table)),
        torch.tensor(stamps),
        torch.tensor(scores),
        torch.tensor([list(value) for value in values], dtype=torch.uint8),
    )


def step(store: RowStore, model: Model, chance: random.Random, number: int) -> None:
    """One random call, on the store and on the model."""
    t = chance.randrange(len(TABLES))
    here, above, width = model.here[t], model.above[t], TABLES[t].row_bytes
    keys = some_keys(chance, 40)
    asked = torch.tensor(keys, dtype=torch.int64)
    match chance.choice(["put", "put", "take", "read", "erase", "expire", "clear", "used"]):
        case "put":
            rows = random_rows(keys, width, number)
            assert store.put(t, rows).keys.numel() == 0
            here |= as_dict(rows)
            for key in keys:
                above.pop(key, None)
        case "take":
            found = take(store, t, asked)
            assert as_dict(found.rows) == {key: here[key] for key in keys if key in here}
            above |= {key: here.pop(key) for key in keys if key in here}
        case "read":
            twice = torch.cat([asked, asked])
            found = store.read(t, twice)
            assert torch.equal(twice[found.positions], found.rows.keys)
            assert found.positions.numel() == 2 * sum(key in here for key in keys)
            assert as_dict(found.rows) == {key: here[key] for key in keys if key in here}
        case "erase":
            assert store.erase(t, asked).tolist() == [key in here for key in keys]
            for key in keys:
                here.pop(key, None)
                above.pop(key, None)
        case "expire":
            before = -(2**61)
            old = {key for key, (stamp, _, _) in here.items() if stamp < before}
            assert set(store.expire(t, before).tolist()) == old
            for key in old:
                del here[key]
        case "clear":
            if chance.random() < 0.2:
                store.clear(t)
                here.clear()
        case "used":
            for key in keys:  # the tier above trains its rows, loses some and makes others
                if key not in here:
                    above |= as_dict(random_rows([key], width, number + key % 97))
            for key in keys[::3]:
                above.pop(key, None)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("seed", range(3))
def test_a_store_is_a_dict_that_goes_back_to_its_last_flush(
    kind: str, seed: int, tmp_path: Path
) -> None:
    chance, model = random.Random(seed), Model()
    store = FILES[kind](tmp_path)
    store.open(TABLES)
    note = ""
    for number in range(150):
        step(store, model, chance, number)
        if chance.random() < 0.1:
            above = zip(model.above, TABLES, strict=True)
            note = str(number)
            store.flush([rows_of(rows, t.row_bytes).split(5) for rows, t in above], note)
            model.flush()
        if chance.random() < 0.1:
            store.close()
            store = FILES[kind](tmp_path)
            store.open(TABLES)
            assert store.note == note
            model.reopen()
        if number % 4 == 0:
            assert [contents(store, t) for t in range(len(TABLES))] == model.here
    store.close()


@pytest.mark.parametrize("kind", FILES)
def test_many_rows_come_back_from_files_that_grew(kind: str, tmp_path: Path) -> None:
    store = FILES[kind](tmp_path)
    store.open(TABLES)
    rows = random_rows(torch.randperm(5000), 40, seed=1)
    for part in rows.split(700):
        store.put(1, part)
    store.flush([[], []], "all")
    assert contents(store, 1) == as_dict(rows)
    store.close()
    store.open(TABLES)
    assert contents(store, 1) == as_dict(rows)
    assert store.size(0) == 0
    store.close()


@pytest.mark.parametrize("kind", FILES)
def test_a_store_has_one_owner(kind: str, tmp_path: Path) -> None:
    store, other = FILES[kind](tmp_path), FILES[kind](tmp_path)
    store.open(TABLES)
    with pytest.raises(BlockingIOError, match="one owner"):
        other.open(TABLES)
    store.close()
    other.open(TABLES)
    with pytest.raises(RuntimeError, match="not open in this process"):
        store.put(0, random_rows([1], 12, seed=0))
    other.close()


@pytest.mark.parametrize("kind", FILES)
def test_a_relative_path_is_that_of_the_first_directory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, rows = FILES[kind](Path()), random_rows([1, 2], 12, seed=0)
    store.open(TABLES)
    store.put(0, rows)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    store.flush([[], []], "")
    store.close()
    store.open(TABLES)
    assert contents(store, 0) == as_dict(rows)
    store.close()
    assert not os.listdir()


@pytest.mark.parametrize("kind", FILES)
def test_a_forked_process_may_not_write(kind: str, tmp_path: Path) -> None:
    store = FILES[kind](tmp_path)
    store.open(TABLES)
    process, store._process = store._process, -1  # as it looks after a fork
    with pytest.raises(RuntimeError, match="not open in this process"):
        store.lift(0, torch.tensor([1]))
    store._process = process
    store.close()


@pytest.mark.parametrize("kind", ["host", *FILES])
def test_only_opened_tables_are_used(kind: str, tmp_path: Path) -> None:
    store = HostRows(32) if kind == "host" else FILES[kind](tmp_path)
    store.open([StoredTable("a", 8)])
    keys = torch.tensor([1])
    for table in (1, -1, "0"):
        calls = [
            lambda t=table: store.size(t),
            lambda t=table: store.read(t, keys),
            lambda t=table: store.lift(t, keys),
            lambda t=table: store.put(t, random_rows([1], 8, seed=1)),
            lambda t=table: store.erase(t, keys),
            lambda t=table: store.expire(t, 1),
            lambda t=table: list(store.iterate(t)),
            lambda t=table: store.clear(t),
        ]
        for call in calls:
            with pytest.raises(IndexError, match=r"table must be in \[0, 1\)"):
                call()
    assert store.size(0) == 0
    store.close()


@pytest.mark.parametrize("kind", FILES)
def test_a_store_that_was_never_opened_says_so(kind: str, tmp_path: Path) -> None:
    store = FILES[kind](tmp_path)
    for call in (lambda: store.size(0), lambda: store.put(0, random_rows([1], 8, seed=1))):
        with pytest.raises(RuntimeError, match=r"not open in this process: call open\(tables\)"):
            call()


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("tables", [[StoredTable("a", 12)], [StoredTable("c", 12), TABLES[1]]])
def test_other_tables_are_refused(kind: str, tables: list[StoredTable], tmp_path: Path) -> None:
    store = FILES[kind](tmp_path)
    store.open(TABLES)
    store.put(0, random_rows([1], 12, seed=0))
    store.flush([[], []], "")
    store.close()
    with pytest.raises(ValueError, match="another layout"):
        store.open(tables)
    store.open(TABLES)
    assert store.size(0) == 1
    store.close()


@pytest.mark.parametrize("kind", FILES)
def test_rows_of_another_width_are_refused(kind: str, tmp_path: Path) -> None:
    store = FILES[kind](tmp_path)
    store.open(TABLES)
    with pytest.raises(ValueError, match=r"values of shape \[n, 12\]"):
        store.put(0, random_rows([1, 2], 40, seed=0))
    assert store.size(0) == 0
    store.close()


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds mine\.txt"):
        DiskRows(tmp_path).open(TABLES)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_damaged_files_are_told(tmp_path: Path) -> None:
    store = DiskRows(tmp_path / "rows")
    store.open(TABLES)
    store.put(0, random_rows(list(range(2000)), 12, seed=0))
    store.flush([[], []], "")
    store.close()
    path = tmp_path / "rows" / "rows_0.bin"
    os.truncate(path, 100)
    with pytest.raises(RuntimeError, match="shorter than its 2000 rows"):
        store.open(TABLES)
    (tmp_path / "rows" / "rows.json").write_text("{")
    with pytest.raises(RuntimeError, match="cannot be read"):
        store.open(TABLES)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the files cannot grow nor where the journal cannot."""
    store = DiskRows(tmp_path / "rows")
    store.open(TABLES)
    rows = random_rows(list(range(600)), 12, seed=0)
    store.put(0, rows)
    store.flush([[], []], "")
    full = OSError(28, "No space left on device")

    def fail(*_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="No space"):
            store.put(0, random_rows(list(range(500, 2000)), 12, seed=1))
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space"):
            store.put(0, random_rows([1, 2, 700], 12, seed=1))
    assert contents(store, 0) == as_dict(rows)
    more = random_rows(list(range(500, 2000)), 12, seed=1)
    store.put(0, more)
    store.flush([[], []], "")
    store.close()
    store.open(TABLES)
    assert contents(store, 0) == as_dict(rows) | as_dict(more)
    store.close()


@pytest.mark.parametrize("call", ["expire", "clear"])
def test_a_full_disk_removes_all_rows_or_none(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BATCH", 4)
    monkeypatch.setattr(journal, "_MAX_BODY_BYTES", 256)  # a few rows per record
    store, write_at, num_writes = DiskRows(tmp_path / "rows"), durable_files.write_at, 0
    store.open(TABLES)
    rows = random_rows(list(range(64)), 12, seed=0)
    store.put(0, rows)
    store.flush([[], []], "")

    def write_some(handle: int, data: memoryview, offset: int) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 4:
            raise OSError(28, "No space left on device")
        return write_at(handle, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "write_at", write_some)
        with pytest.raises(OSError, match="No space"):
            store.clear(0) if call == "clear" else store.expire(0, 2**62)
    assert contents(store, 0) == as_dict(rows)
    removed = rows.keys if call == "clear" else store.expire(0, 2**62)
    if call == "clear":
        store.clear(0)
    assert sorted(removed.tolist()) == list(range(64))
    assert store.size(0) == 0
    store.close()


def test_other_programs_read_what_was_committed(tmp_path: Path) -> None:
    store = SqliteRows(tmp_path / "rows.db")
    store.open(TABLES)
    store.put(0, random_rows([-1, 7], 12, seed=0))
    store.flush([[], []], "")
    store.put(0, random_rows([8], 12, seed=0))
    with sqlite3.connect(tmp_path / "rows.db") as reader:
        assert reader.execute("SELECT key FROM rows_0 ORDER BY key").fetchall() == [(-1,), (7,)]
    store.close()


def test_a_batch_that_fails_is_taken_back(tmp_path: Path) -> None:
    store = SqliteRows(tmp_path / "rows.db")
    store.open(TABLES)
    store.put(0, random_rows([1], 12, seed=0))
    store._run(
        "CREATE TRIGGER no BEFORE INSERT ON rows_0 WHEN new.key = 3 "
        "BEGIN SELECT RAISE(ABORT, 'no threes'); END"
    )
    with pytest.raises(sqlite3.IntegrityError, match="no threes"):
        store.put(0, random_rows([1, 2, 3, 4], 12, seed=1))
    assert contents(store, 0) == as_dict(random_rows([1], 12, seed=0))
    store.close()


def test_a_full_database_is_whole_or_of_no_use(tmp_path: Path) -> None:
    """SQLite may answer a full disk by undoing everything since the last commit."""
    store = SqliteRows(tmp_path / "rows.db")
    store.open(TABLES)
    committed, later = (random_rows(range(first, first + 50), 40, seed=1) for first in (0, 50))
    store.put(1, committed)
    store.flush([[], []], "")
    store.put(1, later)
    pages = store._run("PRAGMA page_count").fetchone()[0]
    store._run(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises((sqlite3.OperationalError, RuntimeError), match="full") as error:
        store.put(1, random_rows(range(100, 5000), 40, seed=1))
    if error.type is not RuntimeError:
        assert contents(store, 1) == as_dict(committed) | as_dict(later)
        store.close()
    store.open(TABLES)
    assert contents(store, 1) == as_dict(committed)
    store.close()


def test_a_transaction_that_is_gone_is_told(tmp_path: Path) -> None:
    store = SqliteRows(tmp_path / "rows.db")
    store.open(TABLES)
    store.put(1, random_rows([1], 40, seed=1))
    store._run("ROLLBACK")
    for _ in range(2):  # every later call says so, too
        with pytest.raises(RuntimeError, match="rolled back to its last flush"):
            store._run("no statement")
    with pytest.raises(RuntimeError, match="rolled back to its last flush"):
        store.size(1)
    store.open(TABLES)
    assert store.size(1) == 0
    store.close()


@pytest.mark.parametrize(
    "mode",
    ["disk", "sqlite", *(pytest.param(m, marks=pytest.mark.slow) for m in ("calls", "recovery"))],
)
def test_kills_lead_back_to_the_last_flush(mode: str, tmp_path: Path) -> None:
    """At any time, and for files before and within every call that changes one."""
    done = run_alone(store_kills, mode, tmp_path)
    wanted = ("WRITING", "FLUSHING") if mode in FILES else ("before", "within")
    assert all(word in done for word in wanted), done
