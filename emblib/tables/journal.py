"""The rollback journal of a store in files: rows as they were at the last commit.

The file is a header, then records. The header has the epoch: the number of the commit to which the
records roll back. After a later commit the records are void. A record has the numbers of some rows
of a block, and the old bytes of these rows in each tensor of the block. It is written before the
rows change. So if the end of a process truncated a record, its rows have not changed. Header and
records have checksums; any other damage raises, unless the machine went down.

The end of a process loses no writes to files and mappings, but the end of the machine may. So the
header is synced once per epoch, before the first row changes, and has the machine's boot
id. If that id differs at opening, rows may have changed on the disk without their records: the
store then verifies all pages against their checksums (unless `Verify.OFF`).
"""

import contextlib
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops.pages import crc32
from emblib.tables import durable_files

_BOOT_ID_BYTES = 36
# Magic, epoch, boot id, CRC-32 of these.
_HEADER = struct.Struct(f"<8sQ{_BOOT_ID_BYTES}sI")
# Magic, block, number of rows, CRC-32 of the body, CRC-32 of these. The body follows: `rows` as
# int64, their old bytes in each of the block's tensors, and padding to whole words.
_RECORD = struct.Struct("<4sIQII")
_HEADER_MAGIC, _RECORD_MAGIC = b"emblib-1", b"rows"
_CHECKSUM = struct.Struct("<I")
_ROW_NUMBER_BYTES = 8  # an int64
_MAX_BODY_BYTES = 1 << 24  # of a record, to limit the memory of `append`


class Block(NamedTuple):
    """Consecutive rows of equal length; or the checksums of a file, one row per page.

    Attributes:
        first_row: number of the first row within the store.
        num_rows: number of rows.
        tensors: uint8 `[rows, bytes]` views of everything that is stored per row, e.g. of the
            weights and of each optimizer state.
    """

    first_row: int
    num_rows: int
    tensors: Sequence[Tensor]

    @property
    def row_bytes(self) -> int:
        """Return the bytes that a record has per row: its number, and its bytes in all tensors."""
        return _ROW_NUMBER_BYTES + sum(tensor.shape[1] for tensor in self.tensors)


class _Record(NamedTuple):
    """Old bytes of rows of a block: `rows` int64 `[n]`, and `images` with n rows per tensor."""

    block: Block
    rows: Tensor
    images: list[Tensor]


class JournalError(RuntimeError):
    """The journal is damaged, so the state of the last commit cannot be restored."""


class Journal:
    """The journal file of the store whose rows are `blocks`; the store has locked the directory.

    Calls must come from one thread at a time. Besides the errors named below, all of them raise
    OSError where the disk does, and SyncError where a sync fails.

    Attributes:
        may_miss_records: whether rows may have changed since the last commit without a record,
            because the machine went down or the file is missing. Then all pages must be verified.
            Final once `roll_back` was called.
    """

    def __init__(self, path: Path, blocks: Sequence[Block]) -> None:
        self.path = path
        self.blocks = blocks
        self.may_miss_records = not path.exists()
        self._handle = durable_files.open_file(path)
        self._end = 0  # 0: the epoch has no records yet

    def begin(self, epoch: int) -> None:
        """Start the journal that rolls back to commit `epoch`; does nothing if it is started.

        Call it before each `append`; after `clear` it starts a new journal.
        """
        if self._end:
            return
        header = _HEADER.pack(_HEADER_MAGIC, epoch, boot_id_of_machine(), 0)[: -_CHECKSUM.size]
        end = self._write(header + _CHECKSUM.pack(zlib.crc32(header)))
        durable_files.sync_file(self._handle, self.path)
        self._end = end  # not before: an interrupt must not leave a header that is never synced

    def append(self, block_index: int, rows: Tensor) -> Iterator[Tensor]:
        """Record the old bytes of rows of a block, by its index; yield the rows of each record.

        `rows` are int64 `[n]`, counted from the first row of the block. The caller must have called
        `begin` for this epoch; not checked. A row may be overwritten once it was yielded. If the
        caller stops the iteration, the remaining rows are not recorded.
        """
        max_rows = max(_MAX_BODY_BYTES // self.blocks[block_index].row_bytes, 1)
        for record_rows in rows.split(max_rows):
            self._end = self._write(self._pack_record(block_index, record_rows))
            yield record_rows

    def _pack_record(self, block_index: int, rows: Tensor) -> bytearray:
        """Return the record of rows of a block: header, row numbers, and present bytes of rows."""
        block = self.blocks[block_index]
        data = bytearray(_RECORD.size + _body_bytes(block, rows.numel()))
        body = memoryview(data)[_RECORD.size :]
        row_numbers, images = _body_views(block, rows.numel(), body)
        row_numbers.copy_(rows)
        for tensor, image in zip(block.tensors, images, strict=True):
            torch.index_select(tensor, 0, rows, out=image)
        checksum = crc32(torch.frombuffer(body, dtype=torch.uint8))
        head = _RECORD.pack(_RECORD_MAGIC, block_index, rows.numel(), checksum, 0)[
            : -_CHECKSUM.size
        ]
        data[: _RECORD.size] = head + _CHECKSUM.pack(zlib.crc32(head))
        return data

    def _write(self, data: bytes | bytearray) -> int:
        """Write all of `data` after the last record, or none; return the new end.

        Bytes that an interrupted call left after the last record are cut off first: the end of a
        longer record after a shorter one would look like damage.
        """
        if os.fstat(self._handle).st_size != self._end:
            durable_files.resize(self._handle, self._end)
        remaining, offset = memoryview(data), self._end
        try:
            while remaining:
                num_written = durable_files.write_at(self._handle, remaining, offset)
                remaining, offset = remaining[num_written:], offset + num_written
        except OSError as error:
            durable_files.resize(self._handle, self._end)
            raise OSError(
                error.errno,
                f"the journal cannot grow ({error.strerror}), so the rows that are about to be "
                "written stay as they are; it needs up to the size of the tables between two "
                "flushes: make room, or flush more often",
                str(self.path),
            ) from error
        return offset

    def clear(self) -> None:
        """Delete all records, after a commit or after rolling them back."""
        self._end = 0
        durable_files.resize(self._handle, 0)

    def close(self) -> None:
        """Close the file, which keeps its content."""
        os.close(self._handle)

    def roll_back(self, epoch: int) -> bool:
        """Restore the rows of commit `epoch`; return whether there were records to restore.

        Everything is read and verified before the first row is written. An interrupted roll-back
        can be repeated. After a restart of the machine, records from the first damaged one on are
        ignored.

        Raises:
            JournalError: a checksum is wrong, or the journal is of a later commit.
        """
        file_bytes = os.fstat(self._handle).st_size
        if file_bytes < _HEADER.size:
            return False  # the header is on the disk before the first row changes
        data = mmap.mmap(self._handle, file_bytes, access=mmap.ACCESS_COPY)
        if not any(data[: _HEADER.size]):
            # The power failed before the header was on the disk, so no row can have changed. The
            # store verifies this.
            self.may_miss_records = True
            return False
        journal_epoch, boot_id = self._read_header(memoryview(data))
        if journal_epoch > epoch:
            raise self._damage_error(
                f"it restores commit {journal_epoch}, but the tables are at commit {epoch}"
            )
        if journal_epoch < epoch:
            return False
        if boot_id != boot_id_of_machine() or not any(boot_id):
            self.may_miss_records = True
        records = list(self._read_records(memoryview(data)))
        if records:
            self.sync()  # rows must not reach the disk before the records that restore them
        for record in records:
            for tensor, image in zip(record.block.tensors, record.images, strict=True):
                tensor.index_copy_(0, record.rows, image)
        return bool(records)

    def sync(self) -> None:
        """Wait until all records are on the disk, where a power failure does not lose them."""
        if os.fstat(self._handle).st_size:
            durable_files.sync_file(self._handle, self.path)

    def _read_header(self, data: memoryview) -> tuple[int, bytes]:
        """Return epoch and boot id of a journal's header; raise JournalError if it is damaged."""
        magic, epoch, boot_id, checksum = _HEADER.unpack_from(data)
        if magic != _HEADER_MAGIC or checksum != zlib.crc32(data[: _HEADER.size - _CHECKSUM.size]):
            raise self._damage_error("its header has a wrong checksum")
        return epoch, boot_id

    def _read_records(self, data: memoryview) -> Iterator[_Record]:
        """Yield the verified records.

        After a restart of the machine the journal ends at the first record that did not reach the
        disk; checksums of pages tell whether its rows changed.
        """
        offset = _HEADER.size
        while offset + _RECORD.size <= len(data):
            magic, block_index, num_rows, checksum, head_checksum = _RECORD.unpack_from(
                data, offset
            )
            begin = offset + _RECORD.size
            if magic != _RECORD_MAGIC or head_checksum != zlib.crc32(
                data[offset : begin - _CHECKSUM.size]
            ):
                if self.may_miss_records:
                    return
                raise self._damage_error(f"the record at byte {offset} has a wrong head")
            block = self.blocks[block_index]
            end = begin + _body_bytes(block, num_rows)
            if end > len(data):
                return
            if checksum != zlib.crc32(data[begin:end]):
                if self.may_miss_records:
                    return
                raise self._damage_error(f"the record at byte {offset} has a wrong checksum")
            yield _Record(block, *_body_views(block, num_rows, data[begin:end]))
            offset = end

    def _damage_error(self, defect: str) -> JournalError:
        """Return the error for a damaged journal."""
        return JournalError(
            f"{self.path} is damaged: {defect}. The tables were written to since their last commit "
            "and cannot be restored to it; delete the directory and start from a checkpoint"
        )


def _body_bytes(block: Block, num_rows: int) -> int:
    # Whole words, so that the row numbers of the next record are aligned.
    return -(-num_rows * block.row_bytes // _ROW_NUMBER_BYTES) * _ROW_NUMBER_BYTES


def _body_views(block: Block, num_rows: int, body: memoryview) -> tuple[Tensor, list[Tensor]]:
    """Return row numbers and old bytes of a record, as views of its body."""
    row_numbers = torch.frombuffer(body, dtype=torch.int64, count=num_rows)
    offset, images = _ROW_NUMBER_BYTES * num_rows, []
    for tensor in block.tensors:
        tensor_row_bytes = tensor.shape[1]
        image = torch.frombuffer(
            body, dtype=torch.uint8, count=num_rows * tensor_row_bytes, offset=offset
        )
        images.append(image.view(num_rows, tensor_row_bytes))
        offset += num_rows * tensor_row_bytes
    return row_numbers, images


def boot_id_of_machine() -> bytes:
    """Return the machine's boot id, `_BOOT_ID_BYTES` long; zeros if it has none."""
    boot_id = b""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return boot_id.ljust(_BOOT_ID_BYTES, b"\0")[:_BOOT_ID_BYTES]


def warn_of_restart(directory: Path) -> None:
    """Warn that the machine went down while tables were trained; they have been verified."""
    warnings.warn(
        f"emblib: the tables in {directory} were being trained when this machine, or another that "
        "they were on, went down, or have lost their journal. They were restored to their last "
        "flush, and every page of them has been verified; steps after that flush are lost",
        stacklevel=2,
    )
