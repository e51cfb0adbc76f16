"""SqliteRows at paths that cannot be opened, and over files that are not whole."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from emblib import SqliteRows
from emblib.dynamic.tiers.store import StoredRows, StoredTable

TABLES = [StoredTable("t", 8)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Return a database with 500 rows."""
    path, keys = tmp_path / "rows.db", torch.arange(500)
    store = SqliteRows(path)
    store.open(TABLES)
    store.put(0, StoredRows(keys, keys, keys, torch.zeros(500, 8, dtype=torch.uint8)))
    store.flush([[]], "note")
    store.close()
    return path


@pytest.mark.parametrize("size", [0, 1, 4096, 9000])
def test_a_file_that_was_cut_off_is_refused(database: Path, size: int) -> None:
    os.truncate(database, size)
    with pytest.raises(RuntimeError, match=r"cut off.*checkpoint"):
        SqliteRows(database).open(TABLES)
    assert database.stat().st_size == size


@pytest.mark.parametrize("verify", ["open", "touch"])
def test_overwritten_pages_are_reported_with_the_file(database: Path, verify: str) -> None:
    content = bytearray(database.read_bytes())
    content[8192:-4096] = b"\xff" * (len(content) - 4096 - 8192)
    database.write_bytes(content)
    store = SqliteRows(database, verify=verify)

    def use() -> None:
        store.open(TABLES)
        store.read(0, torch.arange(500))
        for _ in store.iterate(0):
            pass

    with pytest.raises(RuntimeError, match=f"{database} is damaged"):
        use()
    store.close()


def test_a_log_without_its_database_is_refused(database: Path) -> None:
    store = SqliteRows(database)
    store.open(TABLES)
    store.erase(0, torch.arange(3))
    store.flush([[]], "another")
    copy = database.with_name("copy.db")
    shutil.copy(f"{database}-wal", f"{copy}-wal")
    store.close()
    with pytest.raises(RuntimeError, match=r"is missing.*copy.db-wal"):
        SqliteRows(copy).open(TABLES)
    assert not copy.exists()


def test_a_lost_table_is_refused(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("DROP TABLE rows_0")
    connection.close()
    with pytest.raises(RuntimeError, match="has lost rows_0"):
        SqliteRows(database).open(TABLES)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE users (name)")
    connection.close()
    text = tmp_path / "notes.txt"
    text.write_text("no database\n" * 1000)
    for path, message in ((other, "another program, with users"), (text, "not an SQLite database")):
        with pytest.raises(ValueError, match=message):
            SqliteRows(path).open(TABLES)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*; make it"):
        SqliteRows(tmp_path / "missing" / "rows.db").open(TABLES)
    with pytest.raises(IsADirectoryError, match="name a file"):
        SqliteRows(tmp_path).open(TABLES)
    assert not list(tmp_path.iterdir())


def test_a_new_store_that_was_never_flushed_opens_again(tmp_path: Path) -> None:
    for _ in range(2):
        store = SqliteRows(tmp_path / "rows.db")
        store.open(TABLES)
        assert store.size(0) == 0
        store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.db"]
