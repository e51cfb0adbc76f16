"""Rows behind dynamic tables in files: mapped into memory, with commits that survive kills.

A directory holds one store: the files of `emblib.dynamic.tiers.disk`, `rows.json` (what the
tables are, the number of the last commit, how many places it knew, the checksums of the checksums,
and its note; replacing it is the commit), `journal` (rows as they were at the last commit, see
`emblib.tables.journal`) and `lock`.

The order that makes it safe is that of `DiskStore`: a place that was in use at the last commit is
in the journal before it changes, and everything is in the files before `rows.json` is replaced.
Places that were given since then need no journal: opening cuts them off. Checksums are renewed,
verified and journaled as those of `DiskStore` are.
"""

import json
import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.dynamic.tiers.store import BATCH, FoundRows, StoredRows, StoredTable, check_row
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction, Verify
from emblib.tables import durable_files, memory
from emblib.tables.durable_files import (
    LOCK,
    SyncGuard,
    close_in_forks,
    flush_directory,
    lock,
    make_directory,
    reading,
    refuse_strangers,
    replace_json,
    seal,
    unseal,
    zeros,
)
from emblib.tables.journal import Block, Journal, warn_of_restart
from emblib.tables.page_sums import (
    FORMAT,
    SUFFIX,
    UNCHECKED,
    WIDTH,
    PageSums,
    check_upgrade,
    explained,
    num_pages,
    pages_of,
)

# An index reserves address space for all that it may ever hold, and systems that limit that, or the
# data of a process, count it whole. So a small one is replaced by one of `_STEP` times its room.
_LEAST = 1 << 16
_STEP = 16
_ROOM = 0.75  # of an index, for keys: few find both of their buckets full below it


class SlotAllocator:
    """Places for keys: the ones freed last are given again first, then `high` and up."""

    def __init__(self) -> None:
        self._make(_LEAST)
        self._free: list[int] = []
        self.high = 0  # no place at or beyond was ever given

    def _make(self, capacity: int) -> None:
        """Return an empty map for a number of slots."""
        spec = DynamicSpec(
            capacity, 1, initial_capacity=min(1024, capacity), eviction=Eviction.NONE
        )
        # No place depends on the hash, so it is another one each time.
        self._index = HashIndex([spec], "cpu", [secrets.randbits(64) - (1 << 63)])
        self._by_slot = memory.reserve(spec.rows, torch.int64, torch.device("cpu"))
        self._crowded: dict[int, int] = {}  # keys both of whose buckets are full

    def _make_room(self, keys: int) -> None:
        """Take a larger index where `keys` more would crowd this one."""
        wanted = (self.size + keys) / _ROOM
        capacity = self._by_slot.numel()
        if wanted <= capacity:
            return
        while capacity < wanted:
            capacity *= _STEP
        there = self._index.export(0)
        crowded = torch.tensor([*self._crowded.items()], dtype=torch.int64).view(-1, 2)
        all_keys = torch.cat([there.keys, crowded[:, 0]])
        places = torch.cat([self._by_slot[there.slots], crowded[:, 1]])
        self._make(capacity)
        self._set(all_keys, places)

    def _use(self, table: int, before: int, rows: int) -> None:
        memory.use(self._by_slot, 0, before, rows)

    @property
    def size(self) -> int:
        """How many keys have one."""
        return self._index.size(0) + len(self._crowded)

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, -1 for none."""
        slots = self._index.find(Keys.of(keys))
        places = torch.where(slots < 0, -1, self._by_slot[slots.clamp(min=0)])
        if self._crowded:
            for at in (slots < 0).nonzero().view(-1).tolist():
                places[at] = self._crowded.get(int(keys[at]), -1)
        return places

    def add(self, keys: Tensor) -> Tensor:
        """Places for distinct keys that have none."""
        count = keys.numel()
        self._make_room(count)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = torch.arange(self.high, self.high + count - len(reused))
        self.high += fresh.numel()
        places = torch.cat([torch.tensor(reused, dtype=torch.int64), fresh])
        self._set(keys, places)
        return places

    def _set(self, keys: Tensor, places: Tensor) -> None:
        rows = RowBuffers([self._by_slot], torch.tensor([[[0, 8]]]), self._use)
        slots = self._index.insert(Keys.of(keys), rows=rows).slots
        there = slots >= 0
        self._by_slot[slots[there]] = places[there]
        crowded = zip(keys[~there].tolist(), places[~there].tolist(), strict=True)
        self._crowded.update(crowded)

    def remove(self, keys: Tensor) -> None:
        """Free the places of distinct keys that have one."""
        self._free += self.find(keys).tolist()
        slots = self._index.erase(Keys.of(keys))
        for key in keys[slots < 0].tolist():
            del self._crowded[key]

    def restore(self, keys: Tensor, places: Tensor, high: int) -> None:
        """Begin with these, the other places below `high` being free."""
        self._make(_LEAST)
        self._make_room(keys.numel())
        self._set(keys, places)
        free = torch.ones(high, dtype=torch.bool)
        free[places] = False
        self._free = free.nonzero().squeeze(1).flip(0).tolist()
        self.high = high


HEAD = 4  # int64 of a head
_LEAST_row_files = 1024  # places of a file


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


class RowFile:
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
        self.places = SlotAllocator()
        self._resize(max(committed, _LEAST_row_files), begin=True)

    def add_sums(self, committed: int) -> None:
        """Make room for checksums in the files of a store that has none yet."""
        for file, sums in zip(self._files, self._sum_files, strict=True):
            sums.grow(num_pages(committed * file.width))

    def find_keys(self) -> None:
        """Learn from the heads which key is where."""
        heads = self._words()[: self.committed]
        at = (heads[:, 0] != 0).nonzero().squeeze(1)
        self.places = SlotAllocator()
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

    def write(self, places: Tensor, rows: StoredRows) -> None:
        """Rows and heads at places that are in the journal."""
        used = torch.ones_like(places)
        heads = torch.stack([used, rows.keys, rows.stamps, rows.scores], dim=1)
        self._words().index_copy_(0, places, heads)
        self.values.rows.index_copy_(0, places, rows.values)

    def rows(self, places: Tensor) -> StoredRows:
        """Return the rows at slots, after verifying their pages at first use."""
        self.sums[1].check(pages_of(places * self.row_bytes, self.row_bytes))
        heads = self._words()[places]
        return StoredRows.from_words(heads[:, 1:].T.contiguous(), self.values.rows[places])

    def differing(self, places: Tensor, rows: StoredRows) -> Tensor:
        """Which of `rows` are not what their places hold."""
        current = self.rows(places)
        same = (current.keys == rows.keys) & (current.values == rows.values).all(dim=1)
        same &= (current.stamps == rows.stamps) & (current.scores == rows.scores)
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

    def found(self, keys: Tensor) -> FoundRows:
        """Return the rows of the stored keys."""
        at, places = self.here(keys)
        return FoundRows(at, self.rows(places))

    def free(self, places: Tensor) -> None:
        """Places in the journal that are used no more."""
        words = self._words()
        self.places.remove(words[places, 1])
        words[places, 0] = 0
        self.above[places] = 0

    def after_commit(self) -> None:
        """Record that the files hold the last commit."""
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


_JOURNAL, _STORE = "journal", "rows.json"
_WHAT = "DiskRows"
_FORMAT = 2


class DiskRows:
    """A `RowStore` in the files of a directory, e.g. `DiskRows("~/rows")`.

    It takes as many rows as fit on the disk. A row keeps its room there while it is above, so the
    files are as large as both tiers. Opening reads and verifies 32 bytes per row; when the rest is
    verified against its checksums, `verify` says.
    """

    def __init__(self, directory: str | Path, verify: Verify | str = Verify.TOUCH) -> None:
        self._verify = Verify(verify)
        self._shelves: list[RowFile] = []
        self._lock: int | None = None
        self._process = -1
        self.directory = Path(directory).expanduser()
        self._syncs = SyncGuard(self.directory)
        self.note = ""
        self._tables: list[StoredTable] = []
        close_in_forks(self)

    def open(self, tables: Sequence[StoredTable]) -> None:
        """See `RowStore`.

        Raises:
            BlockingIOError: the store is open elsewhere, in this process or another one.
            ValueError: the directory holds something else, or tables of another layout.
            RuntimeError: the files are damaged.
            ChecksumError: a page is not as the last commit left it.
        """
        self.close()
        self._syncs = SyncGuard(self.directory)
        self._tables = list(tables)
        make_directory(self.directory, _WHAT)
        if not (self.directory / _STORE).exists():
            refuse_strangers(self.directory, _WHAT, _STORE)
        self._lock, self._process = lock(self.directory / LOCK, _WHAT), os.getpid()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if not (self.directory / _STORE).exists():
            self._epoch, self._roots = 0, [[0, 0] for _ in self._tables]
            self._write_store(0, [0] * len(self._tables), "")
            flush_directory(self.directory)
        places = self._read_store()
        for t, (table, committed) in enumerate(zip(self._tables, places, strict=True)):
            shelf = RowFile(self.directory, t, table)
            self._shelves.append(shelf)
            if self._unchecked or self._verify is Verify.OFF:
                shelf.add_sums(committed)
            shelf.begin(committed)
        self._journal = Journal(self.directory / _JOURNAL, self._blocks())
        flush_directory(self.directory)  # the files' names, before anything relies on them
        if self._epoch:
            self._recover()
        self._journal.clear()
        for shelf in self._shelves:
            shelf.find_keys()

    def _blocks(self) -> list[Block]:
        """Return the journal's blocks: all rows, then all checksums."""
        sums = [block for shelf in self._shelves for block in shelf.sum_blocks]
        return [*(shelf.block for shelf in self._shelves), *sums]

    def _recover(self) -> None:
        """Go back to the last commit and verify what must be verified now."""
        if self._journal.roll_back(self._epoch):
            for shelf in self._shelves:
                shelf.flush()
        if self._verify is Verify.OFF:
            for sums in (sums for shelf in self._shelves for sums in shelf.sums):
                sums.accept_all()
            return
        interrupted = self._journal.interrupted
        with explained(interrupted=interrupted):
            for shelf, roots in zip(self._shelves, self._roots, strict=True):
                for sums, root in zip(shelf.sums, roots, strict=True):
                    sums.check_root(root)
                heads, values = shelf.sums
                heads.check_all()
                if interrupted or self._verify is Verify.OPEN:
                    values.check_all()
        if interrupted:
            warn_of_restart(self.directory)

    def _layout(self) -> dict[str, Any]:
        tables = [[table.name, table.row_bytes] for table in self._tables]
        return {"format": _FORMAT, **FORMAT, "byteorder": sys.byteorder, "tables": tables}

    def _read_store(self) -> list[int]:
        path = self.directory / _STORE
        with reading(path):
            saved = json.loads(path.read_text())
            layout = saved["layout"]
            self._unchecked = layout["format"] == UNCHECKED
            if self._unchecked:
                layout = {**layout, **FORMAT, "format": _FORMAT}
            else:
                saved = unseal(saved)
                self._roots = [[int(root) for root in pair] for pair in saved["checksums"]]
            self._epoch, self.note = int(saved["commit"]), str(saved["note"])
            places = [int(count) for count in saved["places"]]
        if self._unchecked:
            check_upgrade(self.directory, self._verify)
        if layout != self._layout():
            raise ValueError(
                f"{self.directory} holds tables of another layout: {layout}, asked for are "
                f"{self._layout()}; name another directory"
            )
        return places

    def _write_store(self, epoch: int, places: list[int], note: str) -> None:
        """Replace `rows.json` in one go."""
        content = {
            "commit": epoch,
            "places": places,
            "note": note,
            "checksums": self._roots,
            "layout": self._layout(),
        }
        replace_json(self.directory / _STORE, seal(content))

    def _shelf(self, table: int) -> RowFile:
        if self._process != os.getpid():
            raise RuntimeError(
                f"the store in {self.directory} is used by the process that opened it and until "
                "it is closed; open() it first"
            )
        return self._shelves[table]

    def _protect(self, table: int, places: Tensor) -> None:
        """Journal places as they were at the last commit, once between two commits."""
        self._syncs.check()
        shelf = self._shelves[table]
        places = places[shelf.journaled[places] == 0]
        if places.numel():
            with self._syncs.watch():
                self._journal.begin(self._epoch)
                self._journal.blocks = self._blocks()
                for part in self._journal.append(table, places):
                    shelf.journaled[part] = 1

    def _write(self, table: int, places: Tensor, new: Tensor, rows: StoredRows) -> None:
        shelf = self._shelves[table]
        try:
            shelf.change(places)
            self._protect(table, places)
        except (OSError, RuntimeError):
            shelf.places.remove(new)
            raise
        shelf.write(places, rows)

    def read(self, table: int, keys: Tensor) -> FoundRows:
        """See `RowStore`."""
        return self._shelf(table).found(keys.detach().to("cpu", torch.int64))

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`; nothing is written."""
        shelf = self._shelf(table)
        _, places = shelf.here(keys)
        shelf.above[places] = 1

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        """See `RowStore`; nothing leaves."""
        shelf = self._shelf(table)
        rows = check_row(self._tables[table], rows)
        places, new = shelf.place(rows.keys)
        self._write(table, places, new, rows)
        shelf.above[places] = 0
        return StoredRows.none(shelf.row_bytes)

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """See `RowStore`."""
        shelf = self._shelf(table)
        at, _ = shelf.here(keys)
        here = torch.zeros(keys.numel(), dtype=torch.bool)
        here[at] = True
        places = shelf.places.find(keys)
        self._free(table, places[places >= 0])
        return here

    def _free(self, table: int, places: Tensor) -> None:
        self._shelves[table].change_heads(places)
        self._protect(table, places)
        self._shelves[table].free(places)

    def expire(self, table: int, before: int) -> Tensor:
        """See `RowStore`."""
        shelf, gone = self._shelf(table), []
        for places in shelf.live().split(BATCH):
            rows = shelf.rows(places)
            old = rows.stamps < before
            self._free(table, places[old])
            gone.append(rows.keys[old])
        return torch.cat([torch.empty(0, dtype=torch.int64), *gone])

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[StoredRows]:
        """See `RowStore`."""
        shelf = self._shelf(table)
        for places in shelf.live().split(batch):
            if places.numel():
                yield shelf.rows(places)

    def size(self, table: int) -> int:
        """See `RowStore`."""
        return self._shelf(table).size()

    def clear(self, table: int) -> None:
        """See `RowStore`."""
        for places in self._shelf(table).live().split(BATCH):
            self._free(table, places)

    def flush(self, fast_rows: Sequence[Iterable[StoredRows]], note: str) -> None:
        """See `RowStore`; of the rows of the fast tier it writes those that changed."""
        for t, parts in enumerate(fast_rows):
            shelf = self._shelf(t)
            was_above = shelf.above.clone()
            for rows in parts:
                was_above = self._write_above(t, check_row(self._tables[t], rows), was_above)
            self._free(t, was_above.nonzero().squeeze(1))
        self._commit(note)

    def _write_above(self, table: int, rows: StoredRows, was_above: Tensor) -> Tensor:
        """Write rows of the tier above and mark them as such; they leave `was_above`."""
        shelf = self._shelves[table]
        places, new = shelf.place(rows.keys)
        differing = shelf.differing(places, rows)
        self._write(table, places[differing], new, rows.at(differing))
        shelf.above[places] = 1
        if was_above.numel() < shelf.count:
            was_above = torch.cat([was_above, shelf.above.new_zeros(shelf.count - len(was_above))])
        was_above[places] = 0
        return was_above

    def _commit(self, note: str) -> None:
        self._syncs.check()
        with self._syncs.watch():
            for t, shelf in enumerate(self._shelves):
                for kind, pages, fresh in shelf.sums_to_renew():
                    self._journal_sums(t, kind, pages)
                    shelf.sums[kind].sums.index_copy_(0, pages, fresh)
            # Rows and checksums must not be replaced on the disk before what leads back to them.
            self._journal.sync()
            for shelf in self._shelves:
                shelf.flush()
            self._roots = [shelf.roots() for shelf in self._shelves]
            self._write_store(self._epoch + 1, [s.top for s in self._shelves], note)
            flush_directory(self.directory)
        self._epoch += 1
        self.note = note
        for shelf in self._shelves:
            shelf.after_commit()
        self._journal.clear()

    def _journal_sums(self, table: int, kind: int, pages: Tensor) -> None:
        """Journal checksums of the last commit before they are replaced, once between commits."""
        sums = self._shelves[table].sums[kind]
        pages = sums.unjournaled(pages)
        if pages.numel():
            self._journal.begin(self._epoch)
            self._journal.blocks = self._blocks()
            for part in self._journal.append(len(self._shelves) + 2 * table + kind, pages):
                sums.note_journaled(part)

    def close(self) -> None:
        """See `RowStore`."""
        for shelf in self._shelves:
            shelf.close()
        if self._shelves and hasattr(self, "_journal"):
            self._journal.close()
            del self._journal
        if self._lock is not None:
            os.close(self._lock)
        self._shelves, self._lock, self._process = [], None, -1

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"the store in {self.directory} has one owner and cannot be copied or pickled; make a "
            "module with another store and load the state of this one into it"
        )
