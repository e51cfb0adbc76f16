"""DiskRows: a backing store in memory-mapped files, whose commits survive a killed process.

The directory of a store has these files:

- `heads_<t>.bin` and `rows_<t>.bin` per table: a head (used, key, stamp, score) and the values per
  slot; each with a file of page checksums
- `rows.json`: the layout of the tables, the number of the last commit, its slots per table, the
  root checksums and the note; replacing this file is the commit
- `journal`: rows as of the last commit, see `emblib.tables.journal`
- `lock`

Writes are ordered as in `DiskStore`: a slot in use at the last commit is journaled before it
changes, and all files are flushed before `rows.json` is replaced. Slots assigned after the last
commit need no journal, since opening truncates the files. Checksums are updated, verified and
journaled as in `DiskStore`.
"""

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.tiers.slots import SlotAllocator
from emblib.dynamic.tiers.store import (
    BATCH,
    FoundRows,
    StoredRows,
    StoredTable,
    StoreShard,
    check_rows,
    check_table,
    not_open_error,
)
from emblib.ops import pages as page_ops
from emblib.ops import tiers
from emblib.specs import Verify
from emblib.tables import durable_files
from emblib.tables.durable_files import (
    LOCK,
    SyncGuard,
    check_directory,
    close_in_forks,
    flush_directory,
    lazy_zeros,
    lock_file,
    make_directory,
    raising_content_errors,
    replace_json,
    seal,
    unseal,
)
from emblib.tables.journal import Block, Journal, warn_of_restart
from emblib.tables.page_sums import (
    CHECKSUM_FORMAT,
    FORMAT_WITHOUT_SUMS,
    SUM_BYTES,
    SUMS_SUFFIX,
    PageSums,
    check_upgrade,
    mentioning_restart,
    num_pages,
)

_HEAD_WORDS = 4  # int64 per head: used (0 or 1), key, stamp, score
_MIN_SLOTS = 1024  # slots of the smallest file; not measured
_NO_WORDS = torch.empty(0, dtype=torch.int64, device="cpu")  # files of values have rows alone


class GrowingFile:
    """A file of rows of `row_bytes` bytes, mapped as `rows`, uint8 `[rows, row_bytes]`.

    Growing replaces `mapped` and `rows`; older ones stay readable as long as they are referenced.
    """

    def __init__(self, path: Path, row_bytes: int) -> None:
        self.path, self.row_bytes = path, row_bytes
        self._handle = durable_files.open_file(path)
        self.mapped: mmap.mmap | None = None
        self.rows = torch.empty(0, row_bytes, dtype=torch.uint8, device="cpu")

    def map_committed(self, num_rows: int) -> None:
        """Map the first `num_rows` rows and truncate the rest of the file.

        Raises RuntimeError if the file is shorter.
        """
        self._check_length(num_rows, "delete the directory and start from a checkpoint")
        durable_files.resize(self._handle, num_rows * self.row_bytes)
        self.grow(num_rows)

    def grow(self, num_rows: int) -> None:
        """Map the first `num_rows` rows, to which a shorter file grows by zeros; 0 changes nothing.

        Raises:
            OSError: the disk is full; the rows are unchanged.
        """
        nbytes = num_rows * self.row_bytes
        if not nbytes:
            return
        old_nbytes = os.fstat(self._handle).st_size
        if old_nbytes < nbytes:
            durable_files.allocate(self._handle, old_nbytes, nbytes - old_nbytes)
        self.mapped = mmap.mmap(self._handle, nbytes)
        self.mapped.madvise(mmap.MADV_RANDOM)
        self.rows = torch.frombuffer(self.mapped, dtype=torch.uint8).view(num_rows, self.row_bytes)

    def _check_length(self, num_rows: int, remedy: str) -> None:
        if os.fstat(self._handle).st_size < num_rows * self.row_bytes:
            raise RuntimeError(f"{self.path} is shorter than its {num_rows} rows; {remedy}")

    def check_length(self) -> None:
        """Raise RuntimeError if the file was cut off: using its mapping would end the process."""
        self._check_length(
            self.rows.shape[0],
            "it was cut off while it was open: open the directory again, which goes back to the "
            "last commit or says what is lost",
        )

    def flush(self) -> None:
        """Flush the file to the disk; wait until that is done."""
        durable_files.sync_file(self._handle, self.path)

    def close(self) -> None:
        """Close the file; the rows stay readable."""
        os.close(self._handle)


class _SlotsOfKeys(NamedTuple):
    """Keys of a table and their slots, int64 `[n]` each."""

    keys: Tensor
    slots: Tensor


class RowFile:
    """The files of one table: heads and rows by slot, the slot of each key, promoted rows.

    A promoted row keeps its slot, with the bytes of the last commit, until the next commit. The
    store makes one call at a time, and writes a row in this order: `assign` a slot, `change` it,
    journal it (`DiskRows._protect`), `write` it.

    Attributes:
        row_bytes: bytes of a row without its head.
        heads: file of heads, 32 bytes per slot.
        values: file of rows.
        sums: page checksums of `heads` and of `values`.
        num_slots: number of slots in the files.
        end_committed: end of the slots of the last commit; later slots were free then.
        allocator: slot of each key; keys in the fast tier are included.
        is_changing: whether slots of keys are being assigned or freed, see `recover`.
        is_journaled: uint8 `[num_slots]`, whether a slot needs no journal before it changes.
        is_in_fast_tier: uint8 `[num_slots]`, whether the row of a slot was promoted.
    """

    allocator: SlotAllocator

    def __init__(self, directory: Path, number: int, table: StoredTable) -> None:
        self.row_bytes = table.row_bytes
        self.heads = GrowingFile(directory / f"heads_{number}.bin", 8 * _HEAD_WORDS)
        self.values = GrowingFile(directory / f"rows_{number}.bin", self.row_bytes)
        self._files = (self.heads, self.values)
        self._sum_files = [
            GrowingFile(file.path.with_name(file.path.name + SUMS_SUFFIX), SUM_BYTES)
            for file in self._files
        ]
        self.sums = [
            PageSums(file.path, partial(_describe, table.name, file.row_bytes))
            for file in self._files
        ]
        self.num_slots = 0
        self.end_committed = 0
        self.is_changing = False
        self.is_journaled, self.is_in_fast_tier = lazy_zeros(0), lazy_zeros(0)
        # The result of the last read, unless slots were assigned or freed since.
        self._last_read: _SlotsOfKeys | None = None

    def map_committed(self, end_committed: int) -> None:
        """Map the slots of the last commit, before the journal is rolled back."""
        self.end_committed = end_committed
        self.allocator = SlotAllocator()
        self._resize(max(end_committed, _MIN_SLOTS), at_commit=True)

    def add_sums(self, end_committed: int) -> None:
        """Grow the checksum files to the committed slots: for a store that may have none."""
        for file, sum_file in zip(self._files, self._sum_files, strict=True):
            sum_file.grow(num_pages(end_committed * file.row_bytes))

    def find_keys(self) -> None:
        """Read the slot of each key from the heads."""
        heads = self._head_words()[: self.end_committed]
        slots = (heads[:, 0] != 0).nonzero().squeeze(1)
        self.allocator = SlotAllocator()
        self.allocator.restore(heads[slots, 1], slots, self.end_committed)

    def recover(self) -> None:
        """Read the slot of each key from the heads again, if a change of them was interrupted.

        A head is written after the values of its row, so an interrupted change is complete or
        absent. Only a replaced row may have new values with its old head, until it is put again.
        """
        if not self.is_changing:
            return
        self._last_read = None
        heads = self._head_words()[: self.num_slots]
        is_used = heads[:, 0] != 0
        slots = is_used.nonzero().squeeze(1)
        self.is_in_fast_tier[: self.num_slots] *= is_used
        allocator = SlotAllocator()
        end_slot = int(slots[-1]) + 1 if slots.numel() else 0
        allocator.restore(heads[slots, 1], slots, max(self.end_committed, end_slot))
        self.allocator = allocator
        self.is_changing = False

    def _resize(self, num_slots: int, *, at_commit: bool = False) -> None:
        """Grow the files to `num_slots` slots; `at_commit` first cuts them to the last commit."""
        for file, sum_file in zip(self._files, self._sum_files, strict=True):
            if at_commit:
                file.map_committed(self.end_committed)
                sum_file.map_committed(num_pages(self.end_committed * file.row_bytes))
            file.grow(num_slots)
            sum_file.grow(num_pages(num_slots * file.row_bytes))
        for file, sum_file, sums in zip(self._files, self._sum_files, self.sums, strict=True):
            sums.resize(file.mapped, sum_file.mapped)
            sums.length = self.end_committed * file.row_bytes
        is_journaled, is_in_fast_tier = lazy_zeros(num_slots), lazy_zeros(num_slots)
        if not at_commit:
            is_journaled[: self.num_slots] = self.is_journaled
            is_in_fast_tier[: self.num_slots] = self.is_in_fast_tier
        # Slots after the last commit need no journal.
        is_journaled[
            self.end_committed if at_commit else max(self.end_committed, self.num_slots) :
        ] = 1
        self.is_journaled, self.is_in_fast_tier, self.num_slots = (
            is_journaled,
            is_in_fast_tier,
            num_slots,
        )

    def _head_words(self) -> Tensor:
        """Return the heads of all slots as words, int64 `[num_slots, 4]`, as a view."""
        return self.heads.rows.view(torch.int64)

    @property
    def block(self) -> Block:
        """Return the journal's block of the table."""
        return Block(0, self.num_slots, [self.heads.rows, self.values.rows])

    @property
    def sum_blocks(self) -> list[Block]:
        """Return the journal's blocks of the checksums: of heads, of values."""
        return [Block(0, sums.sums.shape[0], [sums.sums]) for sums in self.sums]

    def change(self, slots: Tensor) -> None:
        """Prepare for writing rows and heads at slots: verify their pages, mark them as changed.

        Raises:
            ChecksumError: their pages differ from the last commit.
        """
        self._fetch(slots)
        self.change_heads(slots)
        _, value_sums = self.sums
        value_sums.prepare_write(slots, self.row_bytes)

    def change_heads(self, slots: Tensor) -> None:
        """Prepare for writing heads at slots, see `change`."""
        head_sums, _ = self.sums
        head_sums.prepare_write(slots, self.heads.row_bytes)

    def check_lengths(self) -> None:
        """Raise RuntimeError if a file was cut off while it was open."""
        for file in self._files:
            file.check_length()

    def _fetch(self, slots: Tensor) -> None:
        """Read the pages of rows that are not in memory, many at a time; -1 is no row.

        Raises:
            OSError: a page cannot be read.
        """
        head_sums, value_sums = self.sums
        value_sums.fetch(slots, self.row_bytes)
        head_sums.fetch(slots, self.heads.row_bytes)

    def sums_to_renew(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield kind (0 heads, 1 values), changed pages, int64, and their new checksums, uint8."""
        for kind, (file, sums) in enumerate(zip(self._files, self.sums, strict=True)):
            length = self.end_slot * file.row_bytes
            sums.extend(length)
            for pages, new_sums in sums.outdated_sums(length):
                yield kind, pages, new_sums

    def roots(self) -> list[int]:
        """Return the root checksums of heads and of values, for the slots in use."""
        files_and_sums = zip(self._files, self.sums, strict=True)
        return [sums.root(self.end_slot * file.row_bytes) for file, sums in files_and_sums]

    def assign(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of distinct keys, assigning missing ones, and the new keys; int64.

        Raises:
            OSError: the disk is full; no slot is assigned.
        """
        slots = self.allocator.find(keys)
        is_new = slots < 0
        new_keys = keys[is_new]
        if not new_keys.numel():
            return slots, new_keys
        self._last_read = None
        slots[is_new] = self.allocator.add(new_keys)
        if self.allocator.end_assigned > self.num_slots:
            try:
                self._resize(max(self.allocator.end_assigned, self.num_slots + self.num_slots // 4))
            except OSError:
                self.allocator.remove(new_keys)
                raise
        return slots, new_keys

    def write(self, slots: Tensor, rows: StoredRows) -> None:
        """Write rows and heads to slots; the caller must have changed and journaled the slots."""
        heads = torch.stack([torch.ones_like(slots), rows.keys, rows.stamps, rows.scores])
        tiers.tier_write_(self.values.rows, slots, _NO_WORDS, rows.values)
        tiers.tier_write_(self.heads.rows, slots, heads, rows.values[:, :0])

    def rows_at(self, slots: Tensor) -> StoredRows:
        """Return the rows at slots, after verifying their pages at first use."""
        return self.find_rows(slots).rows

    def find_rows(self, slots: Tensor) -> FoundRows:
        """Return the rows at slots, -1 for none, after verifying their pages at first use."""
        self._fetch(slots)
        _, value_sums = self.sums  # heads are verified when the store is opened
        value_sums.verify(slots, self.row_bytes)
        positions, words, _ = tiers.tier_read(self.heads.rows, slots, 0)
        _, _, rows = tiers.tier_read(self.values.rows, slots, self.row_bytes)
        return FoundRows(positions, StoredRows.from_words(words[1:], rows))

    def is_changed(self, slots: Tensor, rows: StoredRows) -> Tensor:
        """Return which of `rows`, keys included, differ from those in their slots, bool `[n]`."""
        stored_rows = self.rows_at(slots)
        is_equal = (stored_rows.keys == rows.keys) & (stored_rows.values == rows.values).all(dim=1)
        is_equal &= (stored_rows.stamps == rows.stamps) & (stored_rows.scores == rows.scores)
        return ~(is_equal & (self._head_words()[slots, 0] != 0))

    def find_stored(self, keys: Tensor) -> Tensor:
        """Return the slots of `keys`, int64 `[n]`; -1 if not stored, or in the fast tier."""
        return self.allocator.find(keys, self.is_in_fast_tier)

    @property
    def end_slot(self) -> int:
        """Return the end of the slots that may have a row."""
        # After a full disk `end_assigned` exceeds `num_slots`.
        return min(self.allocator.end_assigned, self.num_slots)

    def stored_slots(self) -> Tensor:
        """Return the slots of all rows that are not in the fast tier, int64, ascending."""
        is_used = self._head_words()[: self.end_slot, 0] != 0
        return (is_used & (self.is_in_fast_tier[: self.end_slot] == 0)).nonzero().squeeze(1)

    def stored_before(self, tick: int) -> tuple[Tensor, Tensor]:
        """Return slots and keys, int64 `[n]` each, of the stored rows with a stamp below `tick`."""
        slots, words = self.stored_slots(), self._head_words()
        slots = slots[words[slots, 2] < tick]
        return slots, words[slots, 1]

    def size(self) -> int:
        """Return the number of rows that are not in the fast tier."""
        return self.allocator.size - int(
            self.is_in_fast_tier[: self.end_slot].sum(dtype=torch.int64)
        )

    def read_stored(self, keys: Tensor) -> FoundRows:
        """Return the rows of the stored keys."""
        slots = self.find_stored(keys)
        found_rows = self.find_rows(slots)
        self._last_read = _SlotsOfKeys(found_rows.rows.keys, slots[found_rows.positions])
        return found_rows

    def mark_in_fast_tier(self, keys: Tensor) -> None:
        """Mark the rows of the stored keys as promoted."""
        last_read = self._last_read  # a batch promotes what it has read
        is_read = last_read is not None and torch.equal(last_read.keys, keys)
        slots = last_read.slots if last_read is not None and is_read else self.find_stored(keys)
        page_ops.mark_pages_([self.is_in_fast_tier], slots, 1, 0, 1)

    def unjournaled_slots(self, slots: Tensor) -> Tensor:
        """Return which of distinct slots, int64, have committed content that the journal lacks."""
        return page_ops.pages_without_mark(self.is_journaled, slots, 1, 0, 1)

    def free(self, slots: Tensor) -> None:
        """Free distinct slots with rows; the caller must have changed and journaled the slots."""
        words = self._head_words()
        self._last_read = None
        self.allocator.remove(words[slots, 1])
        words[slots, 0] = 0
        self.is_in_fast_tier[slots] = 0

    def after_commit(self) -> None:
        """Record that the files hold the last commit."""
        self.end_committed = self.end_slot
        self.is_journaled = lazy_zeros(self.num_slots)
        self.is_journaled[self.end_committed :] = 1
        for file, sums in zip(self._files, self.sums, strict=True):
            sums.after_commit(self.end_committed * file.row_bytes)

    def flush(self) -> None:
        """Flush all files to the disk."""
        for file in (*self._files, *self._sum_files):
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files, *self._sum_files):
            file.close()


def _describe(table: str, width: int, begin: int, end: int) -> str:
    """Describe the rows of a table in bytes `[begin, end)` of a file."""
    return f"rows {begin // width} to {(end - 1) // width} of table {table!r}"


_JOURNAL, _STORE = "journal", "rows.json"
_CLASS_NAME = "DiskRows"
_FORMAT = 2


class DiskRows:
    """A `RowStore` in the files of a directory, e.g. `DiskRows("~/rows")`.

    It stores as many rows as fit on the disk. A promoted row keeps its slot, so the files are as
    large as both tiers. `RowStore` defines the methods and which threads may call them; a forked
    process cannot use the store. After an OSError of a flush to the disk later writes raise, until
    the store is opened again.

    Args:
        directory: directory of the store, which `open` creates; `~` is expanded.
        verify: time at which rows are verified against their checksums: when a page is first used
            (TOUCH), when the store is opened (OPEN), or never (OFF). Unless it is OFF, opening
            verifies the heads, 32 bytes per row, and after a restart of the machine, or if the
            journal is missing, all rows.

    Example:
        >>> backing = emblib.BackingStore(emblib.DiskRows("rows"))
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.SGD(0.1), backing=backing)
        >>> pooled = bags(torch.arange(100), torch.tensor([0, 100]))
        >>> bags.flush()  # both tiers are in "rows" now; the next process continues from there
        >>> bags.size(0)
        100
        >>> bags.close()
    """

    def __init__(self, directory: str | Path, verify: Verify | str = Verify.TOUCH) -> None:
        self._verify = Verify(verify)
        self._row_files: list[RowFile] = []
        self._lock: int | None = None
        self._process = -1
        self.directory = Path(directory).expanduser().absolute()
        self._sync_guard = SyncGuard(self.directory)
        self.note = ""
        self._tables: list[StoredTable] = []
        self._is_committing = False  # whether a commit may have replaced `rows.json`
        self._is_committed = False  # whether it has, and `_finish_commit` is not done
        close_in_forks(self)

    def for_shard(self, shard: StoreShard) -> "DiskRows":
        """Return a store in a subdirectory, called `user` or `user.0_of_4`."""
        shard.warn_of_others(self.directory)
        return DiskRows(self.directory / shard.label, self._verify)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """See `RowStore`.

        Raises:
            BlockingIOError: the store is open elsewhere, in this process or another one.
            ValueError: the directory holds something else, or tables of another layout.
            RuntimeError: the files are damaged.
            ChecksumError: a page differs from the last commit.
            OSError: the files cannot be made, read or written.
        """
        self.close()
        self._sync_guard = SyncGuard(self.directory)
        self._is_committing = self._is_committed = False
        self._tables = list(tables)
        make_directory(self.directory, _CLASS_NAME)
        if not (self.directory / _STORE).exists():
            check_directory(self.directory, _CLASS_NAME, _STORE)
        self._lock, self._process = lock_file(self.directory / LOCK, _CLASS_NAME), os.getpid()
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise

    def _open_files(self) -> None:
        """Open the files, creating missing ones, and roll back to the last commit."""
        if not (self.directory / _STORE).exists():
            self._commit_number, self._roots = 0, [[0, 0] for _ in self._tables]
            self._write_store(0, [0] * len(self._tables), "")
            flush_directory(self.directory)
        slots = self._read_store()
        for t, (table, end_committed) in enumerate(zip(self._tables, slots, strict=True)):
            row_file = RowFile(self.directory, t, table)
            self._row_files.append(row_file)
            if self._lacks_sums or self._verify is Verify.OFF:
                row_file.add_sums(end_committed)
            row_file.map_committed(end_committed)
        self._journal = Journal(self.directory / _JOURNAL, self._blocks())
        flush_directory(self.directory)  # makes the names of the files durable
        if self._commit_number:
            self._recover()
        self._journal.clear()
        for row_file in self._row_files:
            row_file.find_keys()

    def _blocks(self) -> list[Block]:
        """Return the journal's blocks: all rows, then all checksums."""
        sum_blocks = [block for row_file in self._row_files for block in row_file.sum_blocks]
        return [*(row_file.block for row_file in self._row_files), *sum_blocks]

    def _recover(self) -> None:
        """Roll back to the last commit, and verify checksums as `verify` requires on opening."""
        if self._journal.roll_back(self._commit_number):
            for row_file in self._row_files:
                row_file.flush()
        if self._verify is Verify.OFF:
            for sums in (sums for row_file in self._row_files for sums in row_file.sums):
                sums.accept_all()
            return
        may_miss_records = self._journal.may_miss_records
        with mentioning_restart(may_miss_records=may_miss_records):
            for row_file, roots in zip(self._row_files, self._roots, strict=True):
                for sums, root in zip(row_file.sums, roots, strict=True):
                    sums.verify_root(root)
                head_sums, value_sums = row_file.sums
                head_sums.verify_all()
                if may_miss_records or self._verify is Verify.OPEN:
                    value_sums.verify_all()
        if may_miss_records:
            warn_of_restart(self.directory)

    def _layout(self) -> dict[str, Any]:
        """Return what must be equal when the store is opened again."""
        tables = [[table.name, table.row_bytes] for table in self._tables]
        return {"format": _FORMAT, **CHECKSUM_FORMAT, "byteorder": sys.byteorder, "tables": tables}

    def _read_store(self) -> list[int]:
        """Read the file of the store; return the number of committed slots per table."""
        path = self.directory / _STORE
        with raising_content_errors(path):
            content = json.loads(path.read_text())
            layout = content["layout"]
            self._lacks_sums = layout["format"] == FORMAT_WITHOUT_SUMS
            if self._lacks_sums:
                layout = {**layout, **CHECKSUM_FORMAT, "format": _FORMAT}
            else:
                content = unseal(content)
                self._roots = [[int(root) for root in pair] for pair in content["checksums"]]
            self._commit_number, self.note = int(content["commit"]), str(content["note"])
            slots = [int(count) for count in content["places"]]
        if self._lacks_sums:
            check_upgrade(self.directory, self._verify)
        if layout != self._layout():
            raise ValueError(
                f"{self.directory} holds tables of another layout: {layout}, asked for are "
                f"{self._layout()}; name another directory"
            )
        return slots

    def _write_store(self, commit_number: int, slots: list[int], note: str) -> None:
        """Replace `rows.json` atomically."""
        content = {
            "commit": commit_number,
            "places": slots,
            "note": note,
            "checksums": self._roots,
            "layout": self._layout(),
        }
        replace_json(self.directory / _STORE, seal(content))

    def _row_file(self, table: int) -> RowFile:
        """Return the file of a table, after completing a commit or change that was interrupted."""
        if self._process != os.getpid():
            raise not_open_error(self.directory)
        check_table(table, self._tables)
        self._finish_commit()
        row_file = self._row_files[table]
        row_file.check_lengths()
        row_file.recover()
        return row_file

    def _protect(self, table: int, slots: Tensor) -> None:
        """Journal the last commit's content of slots, once between two commits."""
        self._sync_guard.check()
        row_file = self._row_files[table]
        slots = row_file.unjournaled_slots(slots)
        if slots.numel():
            with self._sync_guard.watch():
                self._journal.begin(self._commit_number)
                self._journal.blocks = self._blocks()
                for journaled_slots in self._journal.append(table, slots):
                    row_file.is_journaled[journaled_slots] = 1

    def _write(self, table: int, slots: Tensor, new_keys: Tensor, rows: StoredRows) -> None:
        """Write rows into slots; if that fails before any is written, `new_keys` have none."""
        row_file = self._row_files[table]
        try:
            row_file.change(slots)
            self._protect(table, slots)
        except (OSError, RuntimeError):
            row_file.allocator.remove(new_keys)
            raise
        row_file.write(slots, rows)

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        return self._row_file(table).read_stored(keys.detach().to("cpu", torch.int64))

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`; this writes to no file."""
        self._row_file(table).mark_in_fast_tier(keys)

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`; no row is dropped."""
        row_file = self._row_file(table)
        rows = check_rows(self._tables[table], rows)
        row_file.is_changing = True
        slots, new_keys = row_file.assign(rows.keys)
        self._write(table, slots, new_keys, rows)
        row_file.is_in_fast_tier[slots] = 0
        row_file.is_changing = False
        return StoredRows.none(row_file.row_bytes)

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        row_file = self._row_file(table)
        is_stored = row_file.find_stored(keys) >= 0
        slots = row_file.allocator.find(keys)
        self._free(table, slots[slots >= 0])
        return is_stored

    def _free(self, table: int, slots: Tensor) -> None:
        """Free the slots of removed rows, all or, where the disk fails, none of them."""
        row_file = self._row_files[table]
        row_file.change_heads(slots)
        self._protect(table, slots)
        row_file.is_changing = True
        row_file.free(slots)
        row_file.is_changing = False

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        slots, keys = self._row_file(table).stored_before(before)
        self._free(table, slots)
        return keys

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`."""
        row_file = self._row_file(table)
        for slots in row_file.stored_slots().split(batch):
            if slots.numel():
                yield row_file.rows_at(slots)

    def size(self, table: int) -> int:
        """See `RowStore`."""
        return self._row_file(table).size()

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        self._free(table, self._row_file(table).stored_slots())

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`; writes only rows of the fast tier that changed."""
        self._finish_commit()
        for t, rows_of_table in enumerate(fast_rows):
            row_file = self._row_file(t)
            was_in_fast_tier = row_file.is_in_fast_tier.clone()
            for rows in rows_of_table:
                was_in_fast_tier = self._write_fast_rows(
                    t, check_rows(self._tables[t], rows), was_in_fast_tier
                )
            self._free(t, was_in_fast_tier.nonzero().squeeze(1))
        self._commit(note)

    def _write_fast_rows(self, table: int, rows: StoredRows, was_in_fast_tier: Tensor) -> Tensor:
        """Write rows of the fast tier and mark them; return `was_in_fast_tier` without them."""
        row_file = self._row_files[table]
        row_file.is_changing = True
        slots, new_keys = row_file.assign(rows.keys)
        row_file.is_in_fast_tier[slots] = (
            1  # before the heads are written, which mark slots as used
        )
        is_changed = row_file.is_changed(slots, rows)
        self._write(table, slots[is_changed], new_keys, rows.at(is_changed))
        row_file.is_changing = False
        if was_in_fast_tier.numel() < row_file.num_slots:
            was_in_fast_tier = torch.cat(
                [
                    was_in_fast_tier,
                    row_file.is_in_fast_tier.new_zeros(row_file.num_slots - len(was_in_fast_tier)),
                ]
            )
        was_in_fast_tier[slots] = 0
        return was_in_fast_tier

    def _commit(self, note: str) -> None:
        """Make the rows durable, with a note; a failure leaves the last commit."""
        self._sync_guard.check()
        with self._sync_guard.watch():
            for t, row_file in enumerate(self._row_files):
                for kind, pages, new_sums in row_file.sums_to_renew():
                    self._journal_sums(t, kind, pages)
                    row_file.sums[kind].sums.index_copy_(0, pages, new_sums)
            # The journal must be on the disk before rows and checksums are overwritten there.
            self._journal.sync()
            for row_file in self._row_files:
                row_file.flush()
            self._roots = [row_file.roots() for row_file in self._row_files]
            self._is_committing = True
            self._write_store(
                self._commit_number + 1, [row_file.end_slot for row_file in self._row_files], note
            )
            self._finish_commit()

    def _finish_commit(self) -> None:
        """Finish a commit, if one has replaced `rows.json` and was interrupted or has just done so.

        Before this the journal would roll back to the previous commit.
        """
        if not self._is_committing or self._sync_guard.has_failed:
            return
        path = self.directory / _STORE
        with raising_content_errors(path):
            content = unseal(json.loads(path.read_text()))
            commit_number, note = int(content["commit"]), str(content["note"])
        if commit_number > self._commit_number or self._is_committed:
            self._is_committed = True
            with self._sync_guard.watch():
                flush_directory(self.directory)
            self._commit_number, self.note = commit_number, note
            for row_file in self._row_files:
                row_file.after_commit()
            self._journal.clear()
        self._is_committing = self._is_committed = False

    def _journal_sums(self, table: int, kind: int, pages: Tensor) -> None:
        """Journal checksums of the last commit before they are replaced, once between commits."""
        sums = self._row_files[table].sums[kind]
        pages = sums.pages_to_journal(pages)
        if pages.numel():
            self._journal.begin(self._commit_number)
            self._journal.blocks = self._blocks()
            block_index = len(self._row_files) + 2 * table + kind  # see `_blocks`
            for journaled_pages in self._journal.append(block_index, pages):
                sums.note_journaled(journaled_pages)

    def close(self) -> None:
        """See `RowStore`."""
        for row_file in self._row_files:
            row_file.close()
        if self._row_files and hasattr(self, "_journal"):
            self._journal.close()
            del self._journal
        if self._lock is not None:
            os.close(self._lock)
        self._row_files, self._lock, self._process = [], None, -1

    def __del__(self) -> None:
        if hasattr(self, "_process"):  # else the constructor has raised
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"the store in {self.directory} has one owner and cannot be copied or pickled; make a "
            "module with another store and load the state of this one into it"
        )
