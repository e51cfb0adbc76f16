"""Rows behind dynamic tables in files: mapped into memory, with commits that survive kills.

A directory holds one store: the files of `emblib.dynamic.tiers.row_files`, `rows.json` (what the
tables are, the number of the last commit, how many places it knew, the checksums of the checksums,
and its note; replacing it is the commit), `journal` (rows as they were at the last commit, see
`emblib.tables.journal`) and `lock`.

The order that makes it safe is that of `DiskStore`: a place that was in use at the last commit is
in the journal before it changes, and everything is in the files before `rows.json` is replaced.
Places that were given since then need no journal: opening cuts them off. Checksums are renewed,
verified and journaled as those of `DiskStore` are.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.tiers.row_files import Shelf
from emblib.dynamic.tiers.row_store import BATCH, Found, Rows, StoredTable, check_row
from emblib.specs import Verify
from emblib.tables.durable_files import SyncGuard, seal, unseal
from emblib.tables.files import (
    LOCK,
    close_in_forks,
    flush_directory,
    lock,
    make_directory,
    reading,
    refuse_strangers,
    replace_json,
)
from emblib.tables.journal import Block, Journal, warn_of_restart
from emblib.tables.page_sums import FORMAT, UNCHECKED, check_upgrade, explained

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
        self._shelves: list[Shelf] = []
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
            shelf = Shelf(self.directory, t, table)
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
        """All rows, then all checksums, as the journal knows them; tables are mapped anew."""
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

    def _shelf(self, table: int) -> Shelf:
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

    def _write(self, table: int, places: Tensor, new: Tensor, rows: Rows) -> None:
        shelf = self._shelves[table]
        try:
            shelf.change(places)
            self._protect(table, places)
        except (OSError, RuntimeError):
            shelf.places.remove(new)
            raise
        shelf.write(places, rows)

    def read(self, table: int, keys: Tensor) -> Found:
        """See `RowStore`."""
        return self._shelf(table).found(keys.detach().to("cpu", torch.int64))

    def lift(self, table: int, keys: Tensor) -> None:
        """See `RowStore`; nothing is written."""
        shelf = self._shelf(table)
        _, places = shelf.here(keys)
        shelf.above[places] = 1

    def put(self, table: int, rows: Rows) -> Rows:
        """See `RowStore`; nothing leaves."""
        shelf = self._shelf(table)
        rows = check_row(self._tables[table], rows)
        places, new = shelf.place(rows.keys)
        self._write(table, places, new, rows)
        shelf.above[places] = 0
        return Rows.none(shelf.row_bytes)

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

    def iterate(self, table: int, batch: int = BATCH) -> Iterator[Rows]:
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

    def flush(self, above: Sequence[Iterable[Rows]], note: str) -> None:
        """See `RowStore`; of what is above it writes the rows that changed."""
        for t, parts in enumerate(above):
            shelf = self._shelf(t)
            was_above = shelf.above.clone()
            for rows in parts:
                was_above = self._write_above(t, check_row(self._tables[t], rows), was_above)
            self._free(t, was_above.nonzero().squeeze(1))
        self._commit(note)

    def _write_above(self, table: int, rows: Rows, was_above: Tensor) -> Tensor:
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
