"""Tables in files: weights and optimizer states mapped into memory, and commits that survive kills.

A directory holds one store:

- `weights.bin` and `state_<name>.bin`: the tables one after the other, and nothing else;
- `weights.bin.crc` and so on: the checksums of their pages, see `emblib.tables.page_sums`;
- `store.json`: the layout of the tables, the number of the last commit, the numbers that its caller
  saved with it (hyperparameters), and a checksum per file of checksums. Replacing this file is the
  commit;
- `journal`: old values of rows that changed since the last commit, see `emblib.tables.journal`;
- `lock`: locked by the process that has the store open.

Rows are written in place, through the mapping. The order of writes makes that safe. A row's old
bytes are in the journal before the row changes (except within `writing_everything`). A commit
writes the old checksums to the journal, syncs it, syncs all files, replaces `store.json`, syncs the
directory, and only then clears the journal. If a process ends in between, the next one that opens
the store writes the journal back.

After a power failure a changed row may be on the disk without its journal record. So if the machine
went down while rows were changing, opening verifies every page (unless `Verify.OFF`): the store is
as the last commit left it, or opening it raises.
"""

import contextlib
import itertools
import json
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.optim import State
from emblib.specs import TableSpec, Verify, check_float_dtype
from emblib.tables.durable_files import (
    LOCK,
    MappedFile,
    SyncGuard,
    check_directory,
    check_free_space,
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
    SUMS_SUFFIX,
    PageSums,
    check_upgrade,
    mentioning_restart,
    num_pages,
)

_JOURNAL, _STORE = "journal", "store.json"
_CONTENT = "DISK tables"  # for errors
_FORMAT = 2  # of the directory; stores of format 1 have no checksums
_COMMITTED, _OVERWRITING = "committed", "overwriting"  # the `status` in `store.json`


class _Commit(NamedTuple):
    """A commit in progress.

    Attributes:
        epoch: number of the commit.
        numbers: the saved numbers.
        versions: versions of `user_tensors` at the commit.
    """

    epoch: int
    numbers: list[float]
    versions: list[int]


class DiskStore:
    """Weights and optimizer states of tables, mapped from the files of a directory.

    Opening restores, bit for bit, the state of the last completed `commit`, whenever and however
    the previous process ended; if it cannot, it raises. The caller must call `protect` before it
    writes rows, or write inside `writing_everything`; not checked. Without another commit, the next
    opening undoes the writes to protected rows. A page that changed otherwise raises when it is
    verified.

    Calls must come from one thread at a time; not checked. In a forked process the store is closed:
    only its tensors can be read there.

    Args:
        directory: directory of the files, created with its parents if it is missing; must be empty
            or have a store of the same layout.
        tables: rows, dim and name of each; table t begins where table t-1 ends.
        dtype: dtype of the weights.
        states: optimizer states, float32 if `per_row`.
        state_dtype: dtype of the states that are as long as a row.
        verify: time at which pages are verified against their checksums, see `Verify`.

    Attributes:
        directory: directory of the files, with "~" expanded.
        is_new: whether the store had no commit when it was opened: then all values were zeros.
        weights: `[sum rows * dim]`.
        states: optimizer states in the order given, `[sum rows]` if `per_row`, else as long as the
            weights.
        user_tensors: weights, then states, as separate tensors over the same memory. A commit
            detects writes to them without `protect` by their versions.
        committed_numbers: numbers of the last commit; empty if there was none.

    Raises:
        BlockingIOError: the store is open elsewhere, in this process or another one.
        ValueError: the directory has other files, tables of another layout, or tables of an earlier
            version without checksums (unless `verify` is OFF); or a dtype that tables cannot have.
        RuntimeError: the files are damaged, or were being overwritten as a whole.
        ChecksumError: a page that opening verifies is not as the last commit left it.
        OSError: the directory cannot be written to, a page cannot be read, or the tables do not fit
            on the disk.
    """

    def __init__(
        self,
        directory: str | Path,
        tables: Sequence[TableSpec],
        dtype: torch.dtype,
        states: Sequence[State],
        state_dtype: torch.dtype,
        verify: Verify = Verify.TOUCH,
    ) -> None:
        check_float_dtype("the dtype of the weights", dtype)
        check_float_dtype("the dtype of the states", state_dtype)
        self.directory = Path(directory).expanduser().absolute()
        self._layout = _layout_of(tables, dtype, states, state_dtype)
        self._verify = verify
        self._committing: _Commit | None = None  # the commit in progress
        self._syncs = SyncGuard(self.directory)
        self._num_rows = sum(spec.rows for spec in tables)
        make_directory(self.directory, _CONTENT)
        if not (self.directory / _STORE).exists():
            check_directory(self.directory, _CONTENT, _STORE)
        handles = contextlib.ExitStack()
        handles.callback(os.close, lock_file(self.directory / LOCK, _CONTENT))
        self._close_handles = weakref.finalize(self, handles.close)
        self._process = os.getpid()
        close_in_forks(self)
        try:
            self._open(tables, states, handles)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        tables: Sequence[TableSpec],
        states: Sequence[State],
        handles: contextlib.ExitStack,
    ) -> None:
        """Open or create the files of a store, map them, and undo an interrupted commit."""
        self._read_store()
        num_elements = sum(spec.rows * spec.dim for spec in tables)
        files = [MappedFile(self.directory / "weights.bin", self._layout["weights"], num_elements)]
        for state, saved_state in zip(states, self._layout["states"], strict=True):
            path = self.directory / f"state_{state.name}.bin"
            files.append(
                MappedFile(
                    path, saved_state["dtype"], self._num_rows if state.per_row else num_elements
                )
            )
        sum_files = [_sums_file(file) for file in files]
        if self.is_new:
            for file in files:
                file.create()  # also frees the space of files that were never committed
            check_free_space(self.directory, sum(file.nbytes for file in [*files, *sum_files]))
        is_stale = self.is_new or self._lacks_sums
        for file in sum_files:
            if is_stale or (self._verify is Verify.OFF and not file.fits()):
                file.create()
        self._files = [*files, *sum_files]
        self.weights, *self.states = (file.map() for file in files)
        for file in sum_files:
            file.map()
        self.user_tensors = [file.alias() for file in files]
        self._versions = [tensor._version for tensor in self.user_tensors]
        self._sums = []
        for file, sum_file, per_row in zip(
            files, sum_files, [False, *(state.per_row for state in states)], strict=True
        ):
            itemsize = file.dtype.itemsize
            row_bytes_by_table = [itemsize if per_row else spec.dim * itemsize for spec in tables]
            self._sums.append(PageSums(file.path, partial(_describe, tables, row_bytes_by_table)))
            self._sums[-1].resize(file.mapped, sum_file.mapped)
        self._blocks = _make_blocks(
            tables, self.weights, list(zip(states, self.states, strict=True))
        )
        sum_blocks = [Block(0, sums.sums.shape[0], [sums.sums]) for sums in self._sums]
        self._journal = Journal(self.directory / _JOURNAL, [*self._blocks, *sum_blocks])
        handles.callback(self._journal.close)
        flush_directory(self.directory)  # the file names, before anything relies on them
        self._is_journaled, self._is_verified = (
            lazy_zeros(self._num_rows),
            lazy_zeros(self._num_rows),
        )
        if self.is_new:
            for sums in self._sums:
                sums.accept_all()
        else:
            self._recover([file.nbytes for file in files])
        self._journal.clear()

    def _recover(self, file_lengths: Sequence[int]) -> None:
        """Roll back to the last commit, and verify the pages that must be verified at opening."""
        if self._journal.roll_back(self._epoch):
            self._sync_files()
        if self._verify is Verify.OFF:
            for sums, length in zip(self._sums, file_lengths, strict=True):
                sums.length = length
                sums.accept_all()
            return
        with mentioning_restart(may_miss_records=self._journal.may_miss_records):
            for sums, length, root in zip(self._sums, file_lengths, self._roots, strict=True):
                sums.length = length
                sums.verify_root(root)
            if self._journal.may_miss_records or self._verify is Verify.OPEN:
                self.verify_all()
        if self._journal.may_miss_records:
            warn_of_restart(self.directory)

    def _read_store(self) -> None:
        """Read the last commit; a store without one starts empty."""
        path = self.directory / _STORE
        self._roots = [0] * (1 + len(self._layout["states"]))
        if not path.exists():
            self._write_store(0, [], _COMMITTED)
            flush_directory(self.directory)
        with raising_content_errors(path):
            content = json.loads(path.read_text())
            layout = content["layout"]
            self._lacks_sums = layout["format"] == FORMAT_WITHOUT_SUMS
            if not self._lacks_sums:
                content = unseal(content)
                self._roots = [int(root) for root in content["checksums"]]
            self._epoch, status = int(content["commit"]), content["status"]
            self.committed_numbers = [float(number) for number in content["numbers"]]
        if self._lacks_sums:
            check_upgrade(self.directory, self._verify)
        _check_layout(self.directory, layout, self._layout, is_upgrade=self._lacks_sums)
        self.is_new = self._epoch == 0
        self._may_change_all = self.is_new  # whether all rows may change until the next commit
        if status != _COMMITTED and not self.is_new:
            raise RuntimeError(
                f"the tables in {self.directory} were being overwritten whole (initialised or "
                "loaded from a checkpoint) when the process ended, so they mix old and new rows; "
                "delete the directory and start over"
            )

    def fetch(self, rows: Tensor) -> bool:
        """Read the pages of rows into memory, many at a time, if a probe finds some missing there.

        Args:
            rows: rows as `protect` takes them.

        Returns:
            bool: whether some pages were not in memory, and so were read.

        Raises:
            IndexError: no table has one of the rows.
            OSError: a page cannot be read.
        """
        rows = self._flat_rows(rows)
        has_read = False
        for block_index, local_rows in self._split_by_block(
            rows if len(self._blocks) == 1 else rows.sort().values
        ):
            for sums, tensor in zip(self._sums, self._blocks[block_index].tensors, strict=True):
                has_read |= sums.fetch(*_locate_rows(tensor, local_rows))
        return has_read

    def verify(self, rows: Tensor) -> None:
        """Verify the pages of rows that the caller is about to read, unless verified before.

        Args:
            rows: rows as `protect` takes them.

        Raises:
            IndexError: no table has one of the rows, unless all pages are verified already.
            ChecksumError: a page is not as the last commit left it.
            OSError: a page cannot be read.
        """
        if all(sums.all_verified for sums in self._sums):
            return
        rows = self._flat_rows(rows)
        rows = rows[self._is_verified[rows] == 0].unique()
        for block_index, local_rows in self._split_by_block(rows):
            for sums, tensor in zip(self._sums, self._blocks[block_index].tensors, strict=True):
                sums.verify(*_locate_rows(tensor, local_rows))
        self._is_verified[rows] = 1

    def verify_all(self) -> None:
        """Verify all pages that have not been verified yet.

        Raises:
            ChecksumError: a page is not as the last commit left it.
            OSError: a page cannot be read.
        """
        for sums in self._sums:
            sums.verify_all()

    def _flat_rows(self, rows: Tensor) -> Tensor:
        """Return row numbers as flat int64; raise IndexError for a row that no table has."""
        rows = rows.detach().to("cpu", torch.int64).flatten()
        if not rows.numel():
            return rows
        lowest, highest = rows.aminmax()
        if lowest < 0 or highest >= self._num_rows:
            raise IndexError(
                f"rows must be in [0, {self._num_rows}), the rows of all tables, got "
                f"{int(lowest)} to {int(highest)}"
            )
        return rows

    def _split_by_block(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (block index, rows within the block, int64) for each block with some of `rows`.

        `rows` ascend, unless there is only one block.
        """
        if not rows.numel():
            return
        first_rows = rows.new_tensor([block.first_row for block in self._blocks])
        block_ends = [*torch.searchsorted(rows, first_rows).tolist(), rows.numel()]
        for block_index, (start, end) in enumerate(itertools.pairwise(block_ends)):
            if start < end:
                yield block_index, rows[start:end] - self._blocks[block_index].first_row

    def protect(self, rows: Tensor) -> None:
        """Journal the committed values of rows that are about to be overwritten.

        A row is journaled once per commit. Rows that are journaled already cost one byte read each.
        Nothing is journaled before the first commit, or between `writing_everything` and the commit
        that follows it.

        Args:
            rows: integers of any shape, in any order, with or without repetition; a row is counted
                from the first row of the first table.

        Raises:
            IndexError: no table has one of the rows.
            RuntimeError: the store is closed, or a sync of it has failed.
            OSError: the disk is full, or a page cannot be read. The rows must not be written then;
                the store stays usable.
            SyncError: the disk failed; the store refuses to write until it is opened again.
            ChecksumError: the pages of the rows are not as the last commit left them.
        """
        self._check_usable()
        rows = self._flat_rows(rows)
        if self._may_change_all or not rows.numel():
            return
        rows = rows[self._is_journaled[rows] == 0].unique()
        for block_index, local_rows in self._split_by_block(rows):
            for sums, tensor in zip(self._sums, self._blocks[block_index].tensors, strict=True):
                sums.prepare_write(*_locate_rows(tensor, local_rows))
        with self._syncs.watch():
            for block_index, local_rows in self._split_by_block(rows):
                self._journal.begin(self._epoch)
                for journaled_rows in self._journal.append(block_index, local_rows):
                    self._is_journaled[journaled_rows + self._blocks[block_index].first_row] = 1

    def commit(self, numbers: Sequence[float]) -> None:
        """Commit the current tables and `numbers` as the state that opening restores.

        `numbers` are the caller's, and become `committed_numbers`. The method returns once tables
        and numbers are on the disk itself. If the process ends earlier, opening finds either this
        commit as a whole or the last one.

        Raises:
            RuntimeError: the store is closed, or a sync of it has failed.
            OSError: a write failed, e.g. to a full disk. The last commit stays valid, and `commit`
                may be called again.
            SyncError: the disk failed. Opening the store again finds the last commit or this one;
                until then the store refuses to write.
        """
        self._check_usable()
        numbers = [float(number) for number in numbers]
        with self._syncs.watch():
            self._renew_sums()
            # First the journal: without it, new rows on the disk could not be undone after a power
            # failure.
            self._journal.sync()
            self._sync_files()
            self._roots = [sums.root(length) for sums, length in self._sums_and_lengths()]
            self._committing = _Commit(
                self._epoch + 1, numbers, [tensor._version for tensor in self.user_tensors]
            )
            self._write_store(self._epoch + 1, numbers, _COMMITTED)
            self._finish_commit(self._committing)

    def _finish_commit(self, commit: "_Commit") -> None:
        """Start the epoch after a commit whose `store.json` is written; repeating it does nothing.

        Before this the journal would roll back to the previous commit.
        """
        flush_directory(self.directory)
        self._epoch = commit.epoch
        self.committed_numbers = commit.numbers
        self._may_change_all = False
        self._is_journaled = lazy_zeros(self._num_rows)
        self._versions = commit.versions
        for sums, length in self._sums_and_lengths():
            sums.after_commit(length)
        self._journal.clear()
        self._committing = None

    def _finish_interrupted_commit(self) -> None:
        """Finish an interrupted commit, if it had replaced `store.json` already."""
        commit = self._committing
        if commit is None:
            return
        content = unseal(json.loads((self.directory / _STORE).read_text()))
        if int(content["commit"]) == commit.epoch:
            with self._syncs.watch():
                self._finish_commit(commit)
        self._committing = None

    def _sums_and_lengths(self) -> Iterator[tuple[PageSums, int]]:
        for sums, tensor in zip(self._sums, [self.weights, *self.states], strict=True):
            yield sums, tensor.nbytes

    def _renew_sums(self) -> None:
        """Recompute the checksums of the files, after journaling the old ones."""
        for sums, tensor, version in zip(
            self._sums, self.user_tensors, self._versions, strict=True
        ):
            if tensor._version != version:
                sums.accept_all()
        if self._may_change_all:
            self._sync_files()  # only then are exactly the unwritten pages holes of the files
        for file_index, (sums, length) in enumerate(self._sums_and_lengths()):
            for pages, new_sums in sums.outdated_sums(length, skip_holes=self._may_change_all):
                if not self._may_change_all:
                    self._journal_sums(file_index, pages)
                sums.sums.index_copy_(0, pages, new_sums)

    def _journal_sums(self, file_index: int, pages: Tensor) -> None:
        """Journal checksums of file `file_index` before they are replaced, once per epoch."""
        pages = self._sums[file_index].pages_to_journal(pages)
        if pages.numel():
            self._journal.begin(self._epoch)
            for journaled_pages in self._journal.append(len(self._blocks) + file_index, pages):
                self._sums[file_index].note_journaled(journaled_pages)

    @contextlib.contextmanager
    def writing_everything(self) -> Iterator[None]:
        """Allow writes to all rows without journaling, from this context on until the next commit.

        Entering it also accepts the content of all pages: none is verified any more. The caller
        must commit. If the process ends before that, opening the store raises, unless it had no
        commit yet: then it opens as a new store. Raises as `commit` does.
        """
        self._check_usable()
        if not self._may_change_all:
            with self._syncs.watch():
                self._write_store(self._epoch, self.committed_numbers, _OVERWRITING)
                flush_directory(self.directory)
            self._may_change_all = True
            self._journal.clear()
        for sums in self._sums:
            sums.accept_all()
        yield

    def close(self) -> None:
        """Release the store for others to open, which undoes writes that are not committed.

        The tensors stay readable. Writing to them afterwards damages the store.
        """
        self._process = -1
        self._close_handles()

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"the store in {self.directory} is closed here: only the process that opened it "
                "writes to it, until it is closed; a forked process may only read its tensors, and "
                "lookups move rows: look up in the process that has the module"
            )
        self._syncs.check()
        self._finish_interrupted_commit()

    def _sync_files(self) -> None:
        for file in self._files:
            file.sync()

    def _write_store(self, epoch: int, numbers: list[float], status: str) -> None:
        """Replace `store.json` atomically."""
        content = {
            "commit": epoch,
            "status": status,
            "numbers": numbers,
            "checksums": self._roots,
            "layout": self._layout,
        }
        replace_json(self.directory / _STORE, seal(content))


def _layout_of(
    tables: Sequence[TableSpec],
    dtype: torch.dtype,
    states: Sequence[State],
    state_dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the properties that must be equal when the store is opened again."""

    def dtype_name(value_dtype: torch.dtype) -> str:
        return str(value_dtype).removeprefix("torch.")

    def dtype_of(state: State) -> torch.dtype:
        return torch.float32 if state.per_row else state_dtype

    state_entries = [
        {"name": state.name, "per_row": state.per_row, "dtype": dtype_name(dtype_of(state))}
        for state in states
    ]
    return {
        "format": _FORMAT,
        **CHECKSUM_FORMAT,
        "byteorder": sys.byteorder,
        "weights": dtype_name(dtype),
        "states": state_entries,
        "tables": [[spec.name, spec.rows, spec.dim] for spec in tables],
    }


def _check_layout(
    directory: Path,
    saved_layout: dict[str, Any],
    required_layout: dict[str, Any],
    *,
    is_upgrade: bool,
) -> None:
    """Raise ValueError unless a saved layout has the entries of `_layout_of`.

    An upgrade of a store without checksums ignores the entries of formats.
    """
    for key, value in required_layout.items():
        if is_upgrade and (key == "format" or key in CHECKSUM_FORMAT):
            continue
        if saved_layout.get(key) != value:
            raise ValueError(
                f"{directory} holds DISK tables of another layout: their {key} are "
                f"{saved_layout.get(key)}, asked for are {value}; name another directory, or "
                "move them with state_dict from a module that fits"
            )


def _sums_file(file: MappedFile) -> MappedFile:
    """Return the file of the checksums of a file."""
    path = file.path.with_name(file.path.name + SUMS_SUFFIX)
    return MappedFile(path, "int32", num_pages(file.nbytes))


def _describe(
    tables: Sequence[TableSpec], row_bytes_by_table: Sequence[int], begin: int, end: int
) -> str:
    """Return a text that names the rows in bytes `[begin, end)` of a file."""
    row_ranges, table_begin = [], 0
    for spec, row_bytes in zip(tables, row_bytes_by_table, strict=True):
        table_bytes = spec.rows * row_bytes
        if table_begin < end and begin < table_begin + table_bytes:
            first_row = max(begin - table_begin, 0) // row_bytes
            last_row = (min(end - table_begin, table_bytes) - 1) // row_bytes
            row_ranges.append(f"rows {first_row} to {last_row} of table {spec.name!r}")
        table_begin += table_bytes
    return ", ".join(row_ranges)


def _locate_rows(tensor: Tensor, rows: Tensor) -> tuple[Tensor, int, int]:
    """Return rows, bytes per row, and the first byte of `tensor`, a block's slice of a file."""
    return rows, tensor.shape[1], int(tensor.storage_offset())


def _make_blocks(
    tables: Sequence[TableSpec], weights: Tensor, states: Sequence[tuple[State, Tensor]]
) -> list[Block]:
    """Return the blocks of the files: neighbouring tables of one dim are one block."""
    blocks, first_row, first_element = [], 0, 0
    for dim, tables_of_block in itertools.groupby(tables, key=lambda spec: spec.dim):
        num_rows = sum(spec.rows for spec in tables_of_block)
        if num_rows == 0:
            continue
        elements = slice(first_element, first_element + num_rows * dim)
        tensors = [weights[elements]]
        tensors += [
            tensor[first_row : first_row + num_rows] if state.per_row else tensor[elements]
            for state, tensor in states
        ]
        byte_views = [tensor.view(torch.uint8).view(num_rows, -1) for tensor in tensors]
        blocks.append(Block(first_row, num_rows, byte_views))
        first_row, first_element = first_row + num_rows, first_element + num_rows * dim
    return blocks
