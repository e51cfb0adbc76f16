"""Checksums of the pages of a store's files at the last commit.

`<file>.crc` has a CRC-32 for each page, 4096 bytes, of `<file>`. A commit replaces the checksums of
changed pages, after the old ones are written to the journal, like rows. The manifest of the store
has the format and, for each file, the checksum of its checksums, called the root. So after a
recovery each page that the last commit covered can be verified to be as the commit left it.
"""

import contextlib
import errno
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from emblib.ops import pages as page_ops
from emblib.specs import Verify
from emblib.tables.durable_files import ChecksumError, fetch_rows, lazy_zeros

PAGE_BYTES = 4096  # bytes that have one checksum
SUMS_SUFFIX = ".crc"  # of the name of the file of checksums
SUM_BYTES = 4  # bytes of a checksum
# What a manifest says of the checksums; files of another format are refused.
CHECKSUM_FORMAT = {"page_bytes": PAGE_BYTES, "page_checksum": "crc32"}
FORMAT_WITHOUT_SUMS = 1  # the format of stores before there were checksums
_PAGES_PER_STEP = 1 << 18  # pages that are processed at a time, 1 GiB of the file
_PAGES_PER_READ = 1 << 12  # pages that are read from the disk at a time, 16 MiB
_SUM_OF_ZEROS = torch.tensor(
    [*zlib.crc32(bytes(PAGE_BYTES)).to_bytes(SUM_BYTES, sys.byteorder)],
    dtype=torch.uint8,
    device="cpu",
)  # checksum of a page of zeros
_REMEDY = (
    "restore the tables from a checkpoint into another directory, or take the bytes as they are "
    'with verify="off": the next flush then makes new checksums'
)


def num_pages(nbytes: int) -> int:
    """Return the number of pages that `nbytes` take."""
    return -(-nbytes // PAGE_BYTES)


def check_upgrade(directory: Path, verify: Verify) -> None:
    """Raise ValueError for files without checksums, unless `verify` is OFF, which upgrades them."""
    if verify is not Verify.OFF:
        raise ValueError(
            f"the files in {directory} were written by an earlier version, without checksums, so "
            'they cannot be verified; open them once with verify="off" and flush(), which adds '
            "the checksums"
        )


@contextlib.contextmanager
def mentioning_restart(*, may_miss_records: bool) -> Iterator[None]:
    """Context for verifying a store at opening, in which ChecksumErrors may mention a restart.

    They do if `may_miss_records`, that of the store's `Journal`, is true.
    """
    try:
        yield
    except ChecksumError as error:
        if not may_miss_records:
            raise
        raise ChecksumError(
            f"{error}. The tables were being trained when this machine, or another that they were "
            "on, went down: rows that changed reached the disk before their journal did"
        ) from error


class PageSums:
    """The checksums of the pages of one file.

    `verify` and `prepare_write` compare pages with them. A commit replaces those of changed pages
    (`outdated_sums`).

    Some methods take `rows`, int64 `[n]`, `row_bytes` and `first_byte`. Row r is `row_bytes` bytes
    from `first_byte + r * row_bytes` on, and -1 is no row. By default rows are pages. Methods that
    read pages also raise OSError if one cannot be read.

    Args:
        path: path of the file with the pages.
        describe: function that names the rows in bytes `[begin, end)`, for errors.

    Attributes:
        length: bytes of the file that the last commit covered; the rest has no checksums.
        sums: uint8 `[pages, 4]`, the mapped checksums.
        all_verified: whether no page needs to be verified any more.
    """

    def __init__(self, path: Path, describe: Callable[[int, int], str]) -> None:
        self.path, self._describe = path, describe
        self.length = 0
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sum_bytes = memoryview(b"")
        self.sums = torch.empty(0, SUM_BYTES, dtype=torch.uint8, device="cpu")
        # Flags per page: verified or written since opening; changed since the commit; journaled.
        self._is_verified, self._is_changed, self._is_journaled = (
            lazy_zeros(0),
            lazy_zeros(0),
            lazy_zeros(0),
        )
        self.all_verified = self._all_changed = False

    def resize(self, data: mmap.mmap | None, sums: mmap.mmap | None) -> None:
        """Use new mappings of the file and of its checksums, after a change of their size.

        Flags of pages stay; new pages have none.
        """
        self._data = self._data[:0] if data is None else torch.frombuffer(data, dtype=torch.uint8)
        self._sum_bytes = memoryview(b"" if sums is None else sums)
        if sums is not None:
            self.sums = torch.frombuffer(sums, dtype=torch.uint8).view(-1, SUM_BYTES)
        self._is_verified, self._is_changed, self._is_journaled = (
            _extend_flags(flags, self.sums.shape[0])
            for flags in (self._is_verified, self._is_changed, self._is_journaled)
        )

    @property
    def pages(self) -> int:
        """Return the number of pages that the last commit covered."""
        return num_pages(self.length)

    def fetch(self, rows: Tensor, row_bytes: int, first_byte: int = 0) -> bool:
        """Read the pages of rows that are about to be used; return False if they are in memory.

        A probe of some of the pages decides, see `fetch_rows`.

        Raises:
            OSError: a page cannot be read.
        """
        return fetch_rows(self.path, self._data, rows, row_bytes, first_byte)

    def verify(self, rows: Tensor, row_bytes: int = PAGE_BYTES, first_byte: int = 0) -> None:
        """Verify the pages of rows that were not verified yet.

        Raises:
            ChecksumError: a page is not as the last commit left it.
        """
        if self.all_verified:
            return
        is_verified = self._is_verified[: self.pages]
        pages = page_ops.pages_without_mark(is_verified, rows, row_bytes, first_byte, PAGE_BYTES)
        if pages.numel():
            self._verify_pages(pages.unique())

    def verify_all(self) -> None:
        """Verify every page that was not verified yet.

        Raises:
            ChecksumError: a page is not as the last commit left it.
        """
        if self.all_verified:
            return
        for start in range(0, self.pages, _PAGES_PER_STEP):
            is_verified = self._is_verified[start : min(start + _PAGES_PER_STEP, self.pages)]
            pages = (is_verified == 0).nonzero().squeeze(1) + start
            self._verify_pages(pages, skip_holes=True)
        self.all_verified = True

    def _verify_pages(self, pages: Tensor, *, skip_holes: bool = False) -> None:
        """Compare the checksums of pages, int64 `[n]`; raise ChecksumError if one differs."""
        if not pages.numel():
            return
        present_sums = self._sums_of(pages, self.length, skip_holes=skip_holes)
        damaged_pages = pages[(present_sums != self.sums[pages]).any(dim=1)]
        if damaged_pages.numel():
            raise self._damage_error(damaged_pages.tolist())
        self._is_verified[pages] = 1

    def _damage_error(self, damaged_pages: list[int]) -> ChecksumError:
        """Return the error that names the first wrong page."""
        begin = damaged_pages[0] * PAGE_BYTES
        end = min(begin + PAGE_BYTES, self.length)
        omitted = f", and {len(damaged_pages) - 1} more pages" if len(damaged_pages) > 1 else ""
        return ChecksumError(
            f"{self.path} is damaged: page {damaged_pages[0]} (bytes {begin} to {end - 1}, "
            f"{self._describe(begin, end)}){omitted} is not as the last flush left it; {_REMEDY}"
        )

    def verify_root(self, expected_root: int) -> None:
        """Verify the checksums themselves against the root in the manifest.

        Raises:
            ChecksumError: their root is not `expected_root`.
        """
        if self.root(self.length) != expected_root:
            raise ChecksumError(
                f"{self.path}{SUMS_SUFFIX} is damaged: it is not as the last flush left it, so no "
                f"row of {self.path} can be verified; {_REMEDY}"
            )

    def accept_all(self) -> None:
        """Verify no page any more; the next commit recomputes the checksums of all pages."""
        self.all_verified = self._all_changed = True

    def prepare_write(self, rows: Tensor, row_bytes: int = PAGE_BYTES, first_byte: int = 0) -> None:
        """Note rows that are about to be written; verify the current content of their pages first.

        Raises:
            ChecksumError: a page is not as the last commit left it.
        """
        self.verify(rows, row_bytes, first_byte)
        page_ops.mark_pages_(
            [self._is_verified, self._is_changed], rows, row_bytes, first_byte, PAGE_BYTES
        )

    def extend(self, length: int) -> None:
        """Note that the next commit covers `length` bytes; verify the last page if it grows.

        Raises:
            ChecksumError: that page is not as the last commit left it.
        """
        if length > self.length:
            self.prepare_write(
                torch.arange(self.length // PAGE_BYTES, num_pages(length), device="cpu")
            )

    def outdated_sums(
        self, length: int, *, skip_holes: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pages, int64 `[n]`, whose checksums are out of date, and new ones, uint8 `[n, 4]`.

        Args:
            length: bytes of the file that the checksums are to cover.
            skip_holes: whether holes of the file count as zeros without being read; the file must
                have been synced.
        """
        page_count = num_pages(length)
        for start in range(0, page_count, _PAGES_PER_STEP):
            stop = min(start + _PAGES_PER_STEP, page_count)
            if self._all_changed:
                pages = torch.arange(start, stop, device="cpu")
            else:
                pages = self._is_changed[start:stop].nonzero().squeeze(1) + start
            sums = self._sums_of(pages, length, skip_holes=skip_holes)
            is_different = (sums != self.sums[pages]).any(dim=1)
            if is_different.any():
                yield pages[is_different], sums[is_different]

    def pages_to_journal(self, pages: Tensor) -> Tensor:
        """Return those of `pages`, int64 `[n]`, whose committed checksums are not journaled yet."""
        return pages[(pages < self.pages) & (self._is_journaled[pages] == 0)]

    def note_journaled(self, pages: Tensor) -> None:
        """Note that the committed checksums of `pages` are in the journal."""
        self._is_journaled[pages] = 1

    def root(self, length: int) -> int:
        """Return the root: the checksum of the checksums of the first `length` bytes."""
        return zlib.crc32(self._sum_bytes[: num_pages(length) * SUM_BYTES])

    def after_commit(self, length: int) -> None:
        """Note that a commit has written the current checksums, for `length` bytes."""
        self.length = length
        self.all_verified |= self._all_changed
        self._all_changed = False
        self._is_changed, self._is_journaled = (lazy_zeros(self.sums.shape[0]) for _ in range(2))

    def _sums_of(self, pages: Tensor, length: int, *, skip_holes: bool = False) -> Tensor:
        """Return the checksums of the present content of pages, uint8 `[n, 4]`."""
        if skip_holes and pages.numel():
            is_read = ~(_in_holes(self.path, pages) & (pages < length // PAGE_BYTES))
            sums = _SUM_OF_ZEROS.repeat(pages.numel(), 1)
            sums[is_read] = self._sums_of(pages[is_read], length)
            return sums
        sums_of_blocks = [torch.empty(0, SUM_BYTES, dtype=torch.uint8, device="cpu")]
        for block in pages.split(_PAGES_PER_READ):
            self.fetch(block, PAGE_BYTES)
            sums_of_blocks.append(page_ops.page_crc32(self._data[:length], block, PAGE_BYTES))
        return torch.cat(sums_of_blocks)


def _extend_flags(flags: Tensor, num_flags: int) -> Tensor:
    """Return uint8 flags `[num_flags]` that begin with `flags`; the others are 0."""
    extended = lazy_zeros(num_flags)
    extended[: flags.numel()] = flags
    return extended


def _in_holes(path: Path, pages: Tensor) -> Tensor:
    """Return which of ascending pages lie in a hole of the file, bool `[n]`; False if unknown."""
    first_page, last_page = int(pages[0]), int(pages[-1])
    has_data = torch.zeros(last_page - first_page + 1, dtype=torch.bool, device="cpu")
    handle = os.open(path, os.O_RDONLY)
    try:
        offset, end = first_page * PAGE_BYTES, (last_page + 1) * PAGE_BYTES
        while offset < end:
            begin = os.lseek(handle, offset, os.SEEK_DATA)
            offset = os.lseek(handle, begin, os.SEEK_HOLE)
            has_data[
                max(begin // PAGE_BYTES - first_page, 0) : max(num_pages(offset) - first_page, 0)
            ] = True
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data up to the end of the file
            has_data[:] = True
    finally:
        os.close(handle)
    return ~has_data[pages - first_page]
