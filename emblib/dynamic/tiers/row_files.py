"""Files of rows that grow: one mapped file per kind of bytes, and a place for every key.

Two files hold a table: `heads_<t>.bin` with four int64 per place (used or not, key, stamp, score)
and `rows_<t>.bin` with the values; the checksums of their pages are in `heads_<t>.bin.crc` and
`rows_<t>.bin.crc`. All are mapped, and get their disk space before they are written: a mapping that
finds no room ends the process.
"""

import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from emblib.dynamic.tiers.key_places import KeyPlaces
from emblib.dynamic.tiers.row_store import Found, Rows, StoredTable
from emblib.tables import durable_files
from emblib.tables.files import zeros
from emblib.tables.journal import Block
from emblib.tables.page_sums import SUFFIX, WIDTH, PageSums, num_pages, pages_of

HEAD = 4  # int64 of a head
_LEAST = 1024  # places of a file


class GrowingFile:
    """Rows of `width` bytes in one file, mapped as `rows`, uint8 `[count, width]`."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self._handle = durable_files.open_file(path)
        self.mapped: mmap.mmap | None = None
        self.rows = torch.empty(0, width, dtype=torch.uint8)

    def begin(self, count: int) -> None:
        """Map the first `count` rows and forget the rest of the file."""
        if os.fstat(self._handle).st_size < count * self.width:
            raise RuntimeError(
                f"{self.path} is shorter than its {count} rows; delete the directory and start "
                "from a checkpoint"
            )
        durable_files.resize(self._handle, count * self.width)
        self.grow(count)

    def grow(self, count: int) -> None:
        """At least `count` rows; new ones are zeros.

        Raises:
            OSError: the disk is full; the rows are as before.
        """
        size = count * self.width
        if not size:
            return
        begin = os.fstat(self._handle).st_size
        if begin < size:
            durable_files.allocate(self._handle, begin, size - begin)
        self.mapped = mmap.mmap(self._handle, size)
        self.mapped.madvise(mmap.MADV_RANDOM)
        self.rows = torch.frombuffer(self.mapped, dtype=torch.uint8).view(count, self.width)

    def flush(self) -> None:
        """Have what was written on the disk itself."""
        durable_files.sync_file(self._handle, self.path)

    def close(self) -> None:
        """Close the file; the rows stay readable."""
        os.close(self._handle)


class Shelf:
    """One table in its files: where each key is, and which keys are above.

    A row that is lifted keeps its place, with the bytes of the last commit, until a commit says
    where it went. Places beyond `committed` were free at the last commit.
    """

    def __init__(self, directory: Path, number: int, table: StoredTable) -> None:
        self.row_bytes = table.row_bytes
        self.heads = GrowingFile(directory / f"heads_{number}.bin", 8 * HEAD)
        self.values = GrowingFile(directory / f"rows_{number}.bin", self.row_bytes)
        self._files = (self.heads, self.values)
        self._sum_files = [
            GrowingFile(file.path.with_name(file.path.name + SUFFIX), WIDTH) for file in self._files
        ]
        self.sums = [
            PageSums(file.path, partial(_describe, table.name, file.width)) for file in self._files
        ]
        self.count = 0
        self.committed = 0
        self.journaled, self.above = zeros(0), zeros(0)  # uint8 by place

    def begin(self, committed: int) -> None:
        """Map what was there at the last commit, before it is rolled back to."""
        self.committed = committed
        self.places = KeyPlaces()
        self._resize(max(committed, _LEAST), begin=True)

    def add_sums(self, committed: int) -> None:
        """Make room for checksums in the files of a store that has none yet."""
        for file, sums in zip(self._files, self._sum_files, strict=True):
            sums.grow(num_pages(committed * file.width))

    def find_keys(self) -> None:
        """Learn from the heads which key is where."""
        heads = self._words()[: self.committed]
        at = (heads[:, 0] != 0).nonzero().squeeze(1)
        self.places = KeyPlaces()
        self.places.restore(heads[at, 1], at, self.committed)

    def _resize(self, count: int, *, begin: bool = False) -> None:
        for file, sum_file in zip(self._files, self._sum_files, strict=True):
            if begin:
                file.begin(self.committed)
                sum_file.begin(num_pages(self.committed * file.width))
            file.grow(count)
            sum_file.grow(num_pages(count * file.width))
        for file, sum_file, sums in zip(self._files, self._sum_files, self.sums, strict=True):
            sums.resize(file.mapped, sum_file.mapped)
            sums.length = self.committed * file.width
        journaled, above = zeros(count), zeros(count)
        if not begin:
            journaled[: self.count], above[: self.count] = self.journaled, self.above
        journaled[max(self.committed, 0 if begin else self.count) :] = 1
        self.journaled, self.above, self.count = journaled, above, count

    def _words(self) -> Tensor:
        return self.heads.rows.view(torch.int64)

    @property
    def block(self) -> Block:
        """The table as the journal knows it."""
        return Block(0, self.count, [self.heads.rows, self.values.rows])

    @property
    def sum_blocks(self) -> list[Block]:
        """The checksums of heads and values as the journal knows them."""
        return [Block(0, sums.sums.shape[0], [sums.sums]) for sums in self.sums]

    def change(self, places: Tensor) -> None:
        """Note that rows and heads at places are about to be written.

        Raises:
            ChecksumError: what else is on their pages is not as the last commit left it.
        """
        self.change_heads(places)
        self.sums[1].change(pages_of(places * self.row_bytes, self.row_bytes))

    def change_heads(self, places: Tensor) -> None:
        """Note that heads at places are about to be written, see `change`."""
        self.sums[0].change(pages_of(places * self.heads.width, self.heads.width))

    def sums_to_renew(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield 0 for heads or 1 for values, pages that changed, and their new checksums."""
        for kind, (file, sums) in enumerate(zip(self._files, self.sums, strict=True)):
            length = self.top * file.width
            sums.extend(length)
            for pages, fresh in sums.renewed(length):
                yield kind, pages, fresh

    def roots(self) -> list[int]:
        """Return the checksums of the checksums, for the places in use."""
        pairs = zip(self._files, self.sums, strict=True)
        return [sums.root(self.top * file.width) for file, sums in pairs]

    def place(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Places for distinct keys, and which of the keys are new."""
        places = self.places.find(keys)
        new = keys[places < 0]
        places[places < 0] = self.places.add(new)
        if self.places.high > self.count:
            try:
                self._resize(max(self.places.high, self.count + self.count // 4))
            except OSError:
                self.places.remove(new)
                raise
        return places, new

    def write(self, places: Tensor, rows: Rows) -> None:
        """Rows and heads at places that are in the journal."""
        used = torch.ones_like(places)
        heads = torch.stack([used, rows.keys, rows.stamps, rows.scores], dim=1)
        self._words().index_copy_(0, places, heads)
        self.values.rows.index_copy_(0, places, rows.values)

    def rows(self, places: Tensor) -> Rows:
        """The rows at places, whose pages are verified before their first use."""
        self.sums[1].check(pages_of(places * self.row_bytes, self.row_bytes))
        heads = self._words()[places]
        return Rows.of(heads[:, 1:].T.contiguous(), self.values.rows[places])

    def differing(self, places: Tensor, rows: Rows) -> Tensor:
        """Which of `rows` are not what their places hold."""
        mine = self.rows(places)
        same = (mine.keys == rows.keys) & (mine.values == rows.values).all(dim=1)
        same &= (mine.stamps == rows.stamps) & (mine.scores == rows.scores)
        return ~(same & (self._words()[places, 0] != 0))

    def here(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the keys that are here and not above, and their places."""
        places = self.places.find(keys)
        at = (places >= 0).nonzero().squeeze(1)
        at = at[self.above[places[at]] == 0]
        return at, places[at]

    @property
    def top(self) -> int:
        """No place at or beyond holds a row."""
        return min(self.places.high, self.count)  # more were given where the disk was full

    def live(self) -> Tensor:
        """Places of all keys that are here and not above, ascending."""
        used = self._words()[: self.top, 0] != 0
        return (used & (self.above[: self.top] == 0)).nonzero().squeeze(1)

    def size(self) -> int:
        """How many keys are here and not above."""
        return self.places.size - int(self.above[: self.top].sum(dtype=torch.int64))

    def found(self, keys: Tensor) -> Found:
        """The rows of the keys that are here."""
        at, places = self.here(keys)
        return Found(at, self.rows(places))

    def free(self, places: Tensor) -> None:
        """Places in the journal that are used no more."""
        words = self._words()
        self.places.remove(words[places, 1])
        words[places, 0] = 0
        self.above[places] = 0

    def after_commit(self) -> None:
        """What is in the files now is the last commit."""
        self.committed = self.top
        self.journaled = zeros(self.count)
        self.journaled[self.committed :] = 1
        for file, sums in zip(self._files, self.sums, strict=True):
            sums.after_commit(self.committed * file.width)

    def flush(self) -> None:
        """Have what was written on the disk itself."""
        for file in (*self._files, *self._sum_files):
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files, *self._sum_files):
            file.close()


def _describe(table: str, width: int, begin: int, end: int) -> str:
    """Which rows of a table lie in bytes `[begin, end)` of a file."""
    return f"rows {begin // width} to {(end - 1) // width} of table {table!r}"
