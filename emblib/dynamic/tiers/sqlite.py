"""SqliteRows: a backing store in an SQLite database, one file that other programs can read.

Table t of a module is `rows_<t>(key, stamp, score, value, checksum)`. `checksum` is the CRC-32 of
the other columns, since SQLite has no page checksums. The table `emblib` holds the layout and the
note, with one checksum for both. All changes between two commits are one transaction, so SQLite
itself restores the last commit. A commit writes the rows of the fast tier to `above_<t>`; opening
the database moves them to `rows_<t>`.

The database is in WAL mode: other connections can read the last commit at any time.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.tiers.store import (
    BATCH,
    FoundRows,
    StoredRows,
    StoredTable,
    StoreShard,
    check_rows,
    check_table,
    match_keys,
    not_open_error,
)
from emblib.specs import Verify
from emblib.tables.durable_files import ChecksumError, json_checksum
from emblib.tables.locks import register_after_fork

_KEYS_PER_QUERY = 512  # SQLite before 3.32 takes at most 999 variables per statement
_MIN_DATABASE_BYTES = 512  # a database has at least one page, the smallest has 512 bytes
_FORMAT = "2"
_FORMAT_WITHOUT_CHECKSUMS = "1"  # the format before rows had checksums
_CHECKSUM = "checksum"  # checksum over the other entries of `emblib`
_COLUMNS = "key, stamp, score, value, checksum"
_CHECKED_NUMBERS = struct.Struct("<qqq")  # key, stamp and score, before the bytes of the row
_Record = tuple[int, int, int, bytes, int]


class SqliteRows:
    """A `RowStore` in an SQLite file, e.g. `SqliteRows("~/tables.db")`; takes any number of rows.

    Moving a row between the tiers costs tens of microseconds, so this store suits tables whose
    fast tier serves most lookups. `RowStore` defines the methods and which threads may call them; a
    forked process cannot use the store. An error of SQLite that rolls back the transaction, e.g. of
    a full disk, closes the store and raises RuntimeError.

    Args:
        path: path of the database, which `open` creates if it does not exist; `~` is expanded.
        verify: rows whose checksums are verified: those that are read (TOUCH), also all rows when
            the database is opened (OPEN), or none (OFF).

    Example:
        >>> backing = emblib.BackingStore(emblib.SqliteRows("rows.db"))
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.SGD(0.1), backing=backing)
        >>> pooled = bags(torch.arange(100), torch.tensor([0, 100]))
        >>> bags.size(0)
        100
        >>> bags.close()
    """

    def __init__(self, path: str | Path, verify: Verify | str = Verify.TOUCH) -> None:
        self._verify = Verify(verify)
        self._connection: sqlite3.Connection | None = None
        self._process = -1
        self._may_have_savepoint = False  # set before a savepoint is opened
        self._is_committing = False  # whether `flush` may have ended the transaction
        self._rollback_message = ""  # of the error that closed the store, until the next `open`
        self.path = Path(path).expanduser().absolute()
        self.note = ""
        self._tables: list[StoredTable] = []
        self._layout_entries: dict[str, str] = {}  # format and layout
        register_after_fork(self)

    def for_shard(self, shard: StoreShard) -> "SqliteRows":
        """Return a store in a file next to this one, e.g. `tables.user.0_of_4.db`."""
        file_shard = shard._replace(name=f"{self.path.stem}.{shard.name}")
        file_shard.warn_of_others(self.path.parent)
        return SqliteRows(self.path.with_name(file_shard.label + self.path.suffix), self._verify)

    def after_fork(self) -> None:
        """Leave the connection to the parent.

        Closing it in the child would roll back the parent's transaction in shared memory, so the
        child leaks a reference instead.
        """
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None

    def open(self, tables: Sequence[StoredTable]) -> None:
        """See `RowStore`.

        Raises:
            BlockingIOError: the database is open for writing elsewhere.
            OSError: the file cannot be opened or created.
            ValueError: the file is of another program, or has tables of another layout.
            RuntimeError: the file is truncated or damaged.
            ChecksumError: the data differ from their checksum.
        """
        self.close()
        self._tables = list(tables)
        self._may_have_savepoint = self._is_committing = False
        self._rollback_message = ""
        self._check_file()
        connection = None
        try:
            if not self.path.exists():
                self._create()
            connection = self._connect(self.path)
            connection.execute("PRAGMA synchronous=FULL")  # commits survive a power failure
            connection.execute("BEGIN IMMEDIATE")
            self._refuse_others(connection)
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            raise self._describe_error(error) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        try:
            self._create_tables()
        except BaseException:
            self.close()
            raise

    def _check_file(self) -> None:
        """Raise RuntimeError for a truncated file, which SQLite would treat as a new database.

        `_create` writes the first page before the file gets its name, so it is never empty.
        """
        has_log = os.path.exists(f"{self.path}-wal") and os.path.getsize(f"{self.path}-wal") > 0
        size = self.path.stat().st_size if self.path.is_file() else None
        if size is not None and size < _MIN_DATABASE_BYTES:
            defect = f"has {size} bytes, too few for a database: it was cut off, or never was one"
        elif not self.path.exists() and has_log:
            defect = f"is missing, and the log of its changes, {self.path.name}-wal, is still there"
        else:
            return
        raise RuntimeError(
            f"{self.path} {defect}; restore it, or delete what is left of it and load a checkpoint"
        )

    def _connect(self, path: Path) -> sqlite3.Connection:
        """Open the database; it fails at once if another process writes to it."""
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self) -> None:
        """Create a database without tables under a temporary name, then link it to its name."""
        new_path = self.path.with_name(
            f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.new"
        )
        try:
            self._connect(new_path).close()
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(new_path, self.path)
        finally:
            new_path.unlink(missing_ok=True)

    def _refuse_others(self, connection: sqlite3.Connection) -> None:
        """Raise an error for a database of another program, or a store that has lost tables.

        `_create_tables` refuses a store of another layout.
        """
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        kinds = ("rows", "above")
        expected_names = {f"{kind}_{t}" for kind in kinds for t in range(len(self._tables))}
        if names and "emblib" not in names:
            raise ValueError(
                f"{self.path} is a database of another program, with "
                f"{', '.join(sorted(names)[:4])}; name another file"
            )
        has_layout = names and connection.execute("SELECT 1 FROM emblib").fetchone()
        missing_names = sorted(expected_names - names)
        if names and (missing_names or not has_layout) and not self._has_other_layout(connection):
            lost_names = missing_names or ["the entries of emblib"]
            raise RuntimeError(
                f"{self.path} is damaged: it has lost {', '.join(lost_names)}; restore it, or "
                "delete it and load a checkpoint"
            )

    def _has_other_layout(self, connection: sqlite3.Connection) -> bool:
        """Return whether the database is a valid store with another number of tables."""
        query = "SELECT count(*) FROM emblib WHERE name LIKE 'table %'"
        return connection.execute(query).fetchone()[0] not in (0, len(self._tables))

    def _describe_error(self, error: sqlite3.Error) -> Exception:
        """Convert an SQLite error to one that names the cause and the remedy."""
        if "locked" in str(error):
            return BlockingIOError(
                f"{self.path} has one owner, and is open for writing elsewhere; close the module "
                "that has it, or name another file"
            )
        if "not a database" in str(error):
            return ValueError(f"{self.path} is not an SQLite database; name another file")
        if "malformed" in str(error):
            return RuntimeError(
                f"{self.path} is damaged or was cut off ({error}); restore it, or delete it and "
                "load a checkpoint"
            )
        folder = self.path.parent
        if self.path.is_dir():
            code, reason = errno.EISDIR, "it is a directory; name a file, e.g. one in it"
        elif not folder.is_dir():
            code, reason = errno.ENOENT, f"there is no directory {folder}; make it"
        else:
            code = errno.EACCES
            reason = "the file and its directory must be writable; name another file"
        return OSError(code, f"the database cannot be opened ({error}): {reason}", str(self.path))

    def _create_tables(self) -> None:
        """Create the tables, or check existing ones and move the rows of `above_<t>` down."""
        run = self._run
        run("CREATE TABLE IF NOT EXISTS emblib (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        saved_entries = dict(run("SELECT name, value FROM emblib"))
        checksum = saved_entries.pop(_CHECKSUM, None)
        is_unchecked = saved_entries.get("format") == _FORMAT_WITHOUT_CHECKSUMS
        if saved_entries and not is_unchecked and self._verify is not Verify.OFF:
            self._verify_entries(saved_entries, checksum)
        expected_layout = {"format": _FORMAT, "byteorder": sys.byteorder}
        expected_layout |= {
            f"table {t}": f"{table.name} {table.row_bytes}" for t, table in enumerate(self._tables)
        }
        saved_layout = {name: value for name, value in saved_entries.items() if name != "note"}
        saved_format = _FORMAT if is_unchecked else saved_entries.get("format")
        if saved_layout and saved_layout | {"format": saved_format} != expected_layout:
            raise ValueError(
                f"{self.path} holds tables of another layout: {saved_layout}, asked for are "
                f"{expected_layout}; name another file"
            )
        self.note = saved_entries.get("note", "")
        self._layout_entries = expected_layout
        self._write_entries(self.note)
        columns = (
            "(key INTEGER PRIMARY KEY, stamp INTEGER, score INTEGER, value BLOB NOT NULL, "
            "checksum INTEGER)"
        )
        for t in range(len(self._tables)):
            for kind in ("rows", "above"):
                run(f"CREATE TABLE IF NOT EXISTS {kind}_{t} {columns}")
                if is_unchecked:
                    self._add_checksums(f"{kind}_{t}")
            run(f"INSERT OR REPLACE INTO rows_{t} SELECT * FROM above_{t}")
            run(f"DELETE FROM above_{t}")
            if self._verify is Verify.OPEN:
                for _ in self.iterate(t):
                    pass

    def _verify_entries(self, saved_entries: dict[str, str], checksum: str | None) -> None:
        """Raise ChecksumError unless layout and note are as they were written."""
        if checksum != str(json_checksum(saved_entries)):
            raise ChecksumError(
                f"{self.path} is damaged: its layout and the numbers of the optimizer are not as "
                "they were written; load a checkpoint into another file, or take them as they are "
                'with verify="off"'
            )

    def _write_entries(self, note: str) -> None:
        """Write the layout and a note, with their checksum."""
        entries = {**self._layout_entries, "note": note}
        for name, value in {**entries, _CHECKSUM: str(json_checksum(entries))}.items():
            self._run("INSERT OR REPLACE INTO emblib VALUES (?, ?)", (name, value))

    def _add_checksums(self, name: str) -> None:
        """Add checksums to rows that an earlier version wrote without them."""
        assert self._connection is not None
        self._connection.create_function("emblib_checksum", 4, _checksum, deterministic=True)
        self._run(f"ALTER TABLE {name} ADD COLUMN checksum INTEGER")
        self._run(f"UPDATE {name} SET checksum = emblib_checksum(key, stamp, score, value)")

    def _run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement, in the transaction that the next flush commits.

        Raises:
            RuntimeError: the store is not open in this process, or was rolled back.
        """
        connection = self._opened()
        with self._close_on_rollback():
            if self._is_committing and not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")  # also where a flush was interrupted
            return connection.execute(statement, values)

    def _opened(self) -> sqlite3.Connection:
        """Return the connection; see `_run` for the error."""
        if self._rollback_message:
            raise RuntimeError(self._rollback_message)
        if self._connection is None or self._process != os.getpid():
            raise not_open_error(self.path)
        return self._connection

    def _rows_name(self, table: int) -> str:
        """Return the name of a table in the database; raise unless the table was opened."""
        self._opened()
        check_table(table, self._tables)
        return f"rows_{table}"

    def _fetch(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all records of a query."""
        with self._close_on_rollback():
            return self._run(query, values).fetchall()

    @contextlib.contextmanager
    def _close_on_rollback(self) -> Iterator[None]:
        """Close the store if an SQLite error rolled back the transaction: moved rows are lost.

        Raises:
            RuntimeError: the transaction was rolled back, or the file is damaged.
        """
        try:
            yield
        except sqlite3.Error as error:
            if self._connection is None or self._connection.in_transaction:
                if "malformed" in str(error):
                    raise self._describe_error(error) from error
                raise
            self.close()
            self._rollback_message = (
                f"{self.path} was rolled back to its last flush ({error}), so it no longer fits "
                "the tables in front of it; free disk space, open it in a new module and continue "
                "from there"
            )
            raise RuntimeError(self._rollback_message) from error

    def _write(self, kind: str, table: int, rows: StoredRows) -> None:
        """Write all rows to table `<kind>_<table>`, or none if an exception is raised.

        `kind` is "rows", or "above" for rows of the fast tier.
        """
        statement = f"INSERT OR REPLACE INTO {kind}_{table} VALUES (?, ?, ?, ?, ?)"
        self._run_for_each(statement, _to_records(rows))

    def _run_for_each(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement once per tuple of values; undo all if an exception is raised."""
        self._undo_batch()
        self._may_have_savepoint = True
        self._run("SAVEPOINT batch")
        assert self._connection is not None
        try:
            with self._close_on_rollback():
                self._connection.executemany(statement, values)
        except BaseException:
            self._undo_batch()
            raise
        self._run("RELEASE batch")
        self._may_have_savepoint = False

    def _undo_batch(self) -> None:
        """Undo the writes of an interrupted `_run_for_each`."""
        if self._may_have_savepoint and self._connection is not None:
            with contextlib.suppress(sqlite3.OperationalError):  # it ended, or was never begun
                self._connection.execute("ROLLBACK TO batch")
                self._connection.execute("RELEASE batch")
        self._may_have_savepoint = False

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        rows_name = self._rows_name(table)
        keys = keys.detach().to("cpu", torch.int64)
        records: list[_Record] = []
        for key_block in keys.unique().split(_KEYS_PER_QUERY):
            values = key_block.tolist()
            # All queries have the same text, so Python's cache of prepared statements has them.
            values += values[-1:] * (_KEYS_PER_QUERY - len(values))
            placeholders = ",".join("?" * len(values))
            query = f"SELECT {_COLUMNS} FROM {rows_name} WHERE key IN ({placeholders})"
            records += self._fetch(query, values) if key_block.numel() else ()
        return match_keys(keys, self._verified_rows(table, records))

    def _verified_rows(self, table: int, records: Sequence[_Record]) -> StoredRows:
        """Verify records and return them as rows."""
        if self._verify is not Verify.OFF:
            for key, stamp, score, value, checksum in records:
                if checksum != _checksum(key, stamp, score, value):
                    raise ChecksumError(
                        f"{self.path} is damaged: the row of key {key} of table "
                        f"{self._tables[table].name!r} is not as it was written; load a checkpoint "
                        'into another file, or take the rows as they are with verify="off"'
                    )
        return _to_rows(records, self._tables[table].row_bytes)

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`."""
        self._delete(table, keys)

    def _delete(self, table: int, keys: Tensor) -> None:
        statement = f"DELETE FROM {self._rows_name(table)} WHERE key = ?"
        self._run_for_each(statement, list(zip(keys.tolist(), strict=True)))

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`; no row is dropped."""
        self._rows_name(table)  # raises before `open`
        self._write("rows", table, check_rows(self._tables[table], rows))
        return StoredRows.none(self._tables[table].row_bytes)

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        is_stored = torch.zeros(keys.numel(), dtype=torch.bool, device="cpu")
        is_stored[self.read(table, keys).positions] = True
        self._delete(table, keys)
        return is_stored

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        rows_name = self._rows_name(table)
        expired_blocks = self._read_in_batches(
            f"{rows_name} WHERE stamp < {int(before)}", table, BATCH
        )
        expired_keys = [
            torch.empty(0, dtype=torch.int64, device="cpu"),
            *(rows.keys for rows in expired_blocks),
        ]
        self._run(f"DELETE FROM {rows_name} WHERE stamp < ?", (before,))
        return torch.cat(expired_keys)

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`; rows are in ascending order of keys."""
        return self._read_in_batches(f"{self._rows_name(table)} ORDER BY key", table, batch)

    def _read_in_batches(self, source: str, table: int, batch: int) -> Iterator[StoredRows]:
        """Yield the rows that a FROM clause selects from a table."""
        cursor = self._run(f"SELECT {_COLUMNS} FROM {source}")
        while True:
            with self._close_on_rollback():
                records = cursor.fetchmany(batch)
            if not records:
                return
            yield self._verified_rows(table, records)

    def size(self, table: int) -> int:
        """See `RowStore`."""
        return int(self._fetch(f"SELECT count(*) FROM {self._rows_name(table)}")[0][0])

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self._run(f"DELETE FROM {self._rows_name(table)}")

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`."""
        for t, rows_of_table in enumerate(fast_rows):
            self._run(f"DELETE FROM above_{t}")
            for rows in rows_of_table:
                self._write("above", t, check_rows(self._tables[t], rows))
        self._write_entries(note)
        self._is_committing = True
        self._run("COMMIT")
        self.note = note
        self._run("SELECT 1")  # begins the next transaction
        self._is_committing = False

    def close(self) -> None:
        """See `RowStore`."""
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()
        self._connection = None

    def __del__(self) -> None:
        if hasattr(self, "_process"):  # else the constructor has raised
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"the store in {self.path} has one owner and cannot be copied or pickled; make a "
            "module with another store and load the state of this one into it"
        )


def _checksum(key: int, stamp: int, score: int, value: bytes | memoryview) -> int:
    """Return the CRC-32 of a row of the database."""
    return zlib.crc32(value, zlib.crc32(_CHECKED_NUMBERS.pack(key, stamp, score)))


def _to_records(rows: StoredRows) -> Iterator[tuple[int, int, int, memoryview, int]]:
    """Yield rows as tuples of the columns of the database: key, stamp, score, value, checksum."""
    row_bytes = rows.values.shape[1]
    for block in rows.split():
        value_bytes = bytearray(block.values.numel())
        if value_bytes:
            torch.frombuffer(value_bytes, dtype=torch.uint8).copy_(block.values.flatten())
        memory = memoryview(value_bytes)
        words = zip(block.keys.tolist(), block.stamps.tolist(), block.scores.tolist(), strict=True)
        for i, (key, stamp, score) in enumerate(words):
            value = memory[i * row_bytes : (i + 1) * row_bytes]
            yield key, stamp, score, value, _checksum(key, stamp, score, value)


def _to_rows(records: Sequence[_Record], row_bytes: int) -> StoredRows:
    """Return the rows of records of the database, of `row_bytes` bytes each."""
    if not records:
        return StoredRows.none(row_bytes)
    words = torch.tensor(
        [record[:3] for record in records], dtype=torch.int64, device="cpu"
    ).T.contiguous()
    value_bytes = bytearray(b"".join(record[3] for record in records))
    if len(value_bytes) != len(records) * row_bytes:
        raise RuntimeError(
            f"the database has rows of other sizes than {row_bytes} bytes; only emblib may write "
            "to it"
        )
    values = (
        torch.frombuffer(value_bytes, dtype=torch.uint8)
        if row_bytes
        else torch.empty(0, device="cpu")
    )
    return StoredRows.from_words(words, values.to(torch.uint8).view(len(records), row_bytes))
