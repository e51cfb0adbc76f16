"""Dumps of dynamic tables in directories, what changed since a tick, and DynamicEmb's files."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HASH_KEYS
from emblib.dynamic.saving import dump_tables, dynamicemb_files, loading, routing
from emblib.dynamic.saving.checkpoint import DynamicCheckpoint
from emblib.dynamic.saving.dump_tables import Header, Table
from emblib.dynamic.saving.dumps import Part, Report
from emblib.dynamic.saving.dynamicemb_files import Foreign, Layout
from emblib.dynamic.saving.entries import WEIGHT, Changes
from emblib.dynamic.saving.loading import Loaded, Target
from emblib.tables.bounds import caller_level
from emblib.tables.locks import atomic

_HASH_KEYS = f"index.{HASH_KEYS}"


class ChangeSet(NamedTuple):
    """What happened to the tables of a module since a tick.

    Attributes:
        since: entries used or written at this tick or later, and keys that left then.
        until: the tick to ask from the next time.
        tables: by name.
        numbers: of the optimizer.
        hash_keys: of the tables, int64 `[T]`, which a copy without keys takes; None leaves its own.
    """

    since: int
    until: int
    tables: dict[str, Changes]
    numbers: Tensor
    hash_keys: Tensor | None = None


class DynamicDumps(DynamicCheckpoint):
    """Dynamic tables that are dumped to directories and followed by copies of them."""

    # Dumps in directories

    @atomic
    def dump(
        self,
        directory: str | Path,
        *,
        since: int | None = None,
        part: Part = Part(),  # noqa: B008
        identity: str | None = None,
        report: Report | None = None,
    ) -> int:
        """Write the tables to a directory, which then holds all of this dump or what it held.

        Rows are gathered and written 16 MiB at a time. Call it between steps, not between a forward
        and its backward.

        Args:
            directory: made if it is not there; may hold an older dump, which this one replaces.
            since: only what changed at this tick or later; what an earlier `dump` returned. Keys
                that left are told as well, so `track_removals` must have been called before it.
            part: rank and number of ranks; each writes its part, into one directory.
            identity: of all parts, which must agree; left out, the tick.
            report: called as rows are written.

        Returns:
            The tick to give as `since` the next time.
        """
        tick = self.index.tick
        if since is None:
            tables = {
                name: Changes(self.table_entries(t), torch.empty(0, dtype=torch.int64))
                for t, name in enumerate(self.table_names)
            }
        else:
            tables = self.changes(since).tables
        dumped = [Table(name, self.index.order, *found) for name, found in tables.items()]
        header = Header(
            str(tick) if identity is None else identity, tick, since, self.hyper.tolist()
        )
        others = self._others()
        if since is not None:
            others = {_HASH_KEYS: others[_HASH_KEYS]}
        dump_tables.write(directory, dumped, header, part, report, others)
        return tick

    @atomic
    def load_dump(
        self,
        directory: str | Path,
        *,
        part: Part = Part(),  # noqa: B008
        report: Report | None = None,
    ) -> dict[str, Loaded]:
        """Load what `dump` wrote; changes are applied to the tables as they are.

        All checksums are compared, and all tables looked at, before the first is changed.

        Args:
            directory: of the dump.
            part: rank and number of ranks; the dump may be of another number.
            report: called as rows are loaded.

        Returns:
            What became of the entries of each table.

        Raises:
            DumpError: there is no whole dump, or it is damaged.
            ValueError: it is of other tables or another optimizer, or of changes since a tick that
                these tables have not reached.
        """
        dump = dump_tables.read(directory, *part)
        numbers = torch.tensor(dump.numbers, dtype=torch.float64)
        if dump.since is not None:
            changed = {n: Changes(t.entries, t.removed) for n, t in dump.tables.items()}
            hash_keys = dump.others.get(_HASH_KEYS)
            return self.apply_changes(
                ChangeSet(dump.since, dump.clock, changed, numbers, hash_keys), report
            )
        if sorted(dump.tables) != sorted(self.table_names):
            raise ValueError(
                f"the dump has the tables {sorted(dump.tables)}, this module {self.table_names}; "
                "load single ones with set_table_entries"
            )
        self._check_numbers(numbers)
        found = {self.table_number(n): table.entries for n, table in dump.tables.items()}
        for t, entries in found.items():
            loading.check(self._target(t), entries)
        own = self._hash_keys_of(found, dump.others.get(_HASH_KEYS))
        self._set_others(dump.others, directory)
        return self._take(found, dump.clock, numbers, report, hash_keys=own)

    # Changes

    @atomic
    def changes(self, since: int) -> ChangeSet:
        """What happened at tick `since` or later, for `apply_changes` of a copy of these tables.

        The tick of a batch is told again: it may not have been trained when it was told first.

        Raises:
            RuntimeError: `track_removals` was not called.
            ValueError: keys that left then are not remembered any more.
        """
        if self.removals is None:
            raise RuntimeError(
                "changes need to know which keys left; call track_removals() before the dump that "
                "they are changes of"
            )
        tables = {}
        for t, name in enumerate(self.table_names):
            removed = self._absent(t, self.removals.since(t, since))
            tables[name] = Changes(self.table_entries(t, since), removed)
        return ChangeSet(since, self.index.tick, tables, self.hyper.clone(), self.index.hash_keys)

    def _absent(self, table: int, keys: Tensor) -> Tensor:
        """Those of the keys that the table has not."""
        return loading.absent(self._target(table), keys)

    def _change(self, target: Target, changes: Changes, report: Report | None) -> Loaded:
        loading.erase(target, changes.removed)
        return loading.put(target, changes.upserts, report)

    @atomic
    def apply_changes(self, changes: ChangeSet, report: Report | None = None) -> dict[str, Loaded]:
        """Follow the tables that `changes` are of; the last ones may be applied again.

        A copy of the same capacities and the same `index.hash_keys` (that is, of the same seed and
        table names, or which began by loading these tables) has place for all keys. Any that is
        lost is counted in a warning.

        Raises:
            ValueError: these tables have not reached the tick that changes are told from, or are
                past the one that they lead to, or the changes do not fit them.
        """
        tick = self.index.tick
        if changes.since > tick:
            raise ValueError(
                f"changes are told from tick {changes.since}, these tables are at {tick}; apply "
                "those in between first"
            )
        if changes.until < tick:
            raise ValueError(
                f"changes lead to tick {changes.until}, these tables are at {tick} already: rows "
                "would be older than others; leave these changes out"
            )
        self._check_numbers(changes.numbers)
        targets = {name: self._target(self.table_number(name)) for name in changes.tables}
        for name, target in targets.items():
            loading.check(target, changes.tables[name].upserts)
        numbers = {self.table_number(name): changes.tables[name].upserts for name in targets}
        hash_keys = self._hash_keys_of(numbers, changes.hash_keys)
        counters = self.index.counters.clone()
        loaded = {}
        for name, target in targets.items():
            if not self.size(target.table):
                self.index.empty(target.table, hash_keys.get(target.table))
            loaded[name] = self._change(target, changes.tables[name], report)
        self.index.counters.copy_(counters)
        self.index.set_tick(max(self.index.tick, changes.until))
        self.hyper.copy_(changes.numbers)
        self._restart_removals()
        lost = {n: done.left_out + done.displaced for n, done in loaded.items()}
        if any(lost.values()):
            warnings.warn(
                "emblib: a copy had no place for all keys of the tables that it follows; lost are "
                f"{ {name: count for name, count in lost.items() if count} }: give it the capacity "
                "and the seed of those tables, or load them whole",
                stacklevel=caller_level(),
            )
        return loaded

    # DynamicEmb's files

    @atomic
    def dump_dynamicemb(
        self,
        directory: str | Path,
        table: int | str,
        arguments: Mapping[str, Any] | None = None,
        *,
        leave_out: Collection[str] = (),
    ) -> None:
        """Write a table as NVIDIA's DynamicEmb does, see `emblib.dynamic.saving.dynamicemb_files`.

        Args:
            directory: of the collection. Files of the table that are there stay until the new ones
                are written, so there must be room for both.
            table: its number or name.
            arguments: for `<table>_opt_args.json`; left out, the learning rate.
            leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.
        """
        t = self.table_number(table)
        foreign = self._foreign(t, arguments, leave_out)
        layout = Layout(self.index.order)
        dynamicemb_files.write(directory, self.table_names[t], layout, foreign, self.index.tick)

    @atomic
    def stage_dynamicemb(
        self,
        directory: str | Path,
        table: int | str,
        arguments: Mapping[str, Any],
        *,
        part: Part,
        leave_out: Collection[str] = (),
        uses_first: bool = False,
    ) -> None:
        """Write one rank's part as `dump_dynamicemb` does, beside what is there.

        It replaces that once `dynamicemb_files.commit` is called for the parts of all ranks.
        """
        t = self.table_number(table)
        dynamicemb_files.stage(
            directory,
            self.table_names[t],
            Layout(self.index.order, uses_first),
            self._foreign(t, arguments, leave_out),
            self.index.tick,
            part=part,
        )

    def _foreign(
        self, table: int, arguments: Mapping[str, Any] | None, leave_out: Collection[str]
    ) -> Foreign:
        """A table as DynamicEmb has it."""
        _check_left_out(leave_out)
        entries = self.table_entries(table).sorted()
        if "states" in leave_out:
            entries = replace(entries, rows={WEIGHT: entries.rows[WEIGHT]})
        counts = None
        if "counts" not in leave_out and self._counts_exactly(table):
            assert self.admission is not None
            counts = self.admission.counts(table)
        told = {"lr": float(self.hyper[0])} if arguments is None else arguments
        return Foreign(entries, told, counts)

    @atomic
    def load_dynamicemb(
        self,
        directory: str | Path,
        table: int | str,
        *,
        part: Part = Part(),  # noqa: B008
        leave_out: Collection[str] = (),
    ) -> Loaded:
        """Let a table be what DynamicEmb dumped, of whatever number of ranks.

        Numbers of the optimizer stay as they are. States that were not dumped begin anew.

        Args:
            directory: of the collection.
            table: its number or name, which is that of the files.
            part: rank and number of ranks that load.
            leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.

        Raises:
            DumpError: files are missing or cut short, or are of another dim or optimizer.
        """
        found = self.read_dynamicemb(directory, table, leave_out=leave_out)
        return self.take_dynamicemb(
            table, found.owned(lambda keys: routing.owner(keys, part.world_size) == part.rank)
        )

    @atomic
    def read_dynamicemb(
        self,
        directory: str | Path,
        table: int | str,
        *,
        rank: int | None = None,
        leave_out: Collection[str] = (),
        uses_first: bool = False,
    ) -> Foreign:
        """What `load_dynamicemb` would load, checked, for `take_dynamicemb`; changes nothing.

        Raises:
            DumpError: as there.
            ValueError: the entries do not fit the table.
        """
        _check_left_out(leave_out)
        t = self.table_number(table)
        views = [] if "states" in leave_out else list(self.table_rows(t).items())[1:]
        found = dynamicemb_files.read(
            directory,
            self.table_names[t],
            self.tables[t].dim,
            {name: view.shape[1] if view.dim() > 1 else 1 for name, view in views},
            Layout(self.index.order, uses_first),
            rank=rank,
        )
        loading.check(self._target(t), found.entries)
        return replace(found, counts=None) if "counts" in leave_out else found

    @atomic
    def take_dynamicemb(self, table: int | str, found: Foreign) -> Loaded:
        """Let a table be what `read_dynamicemb` found."""
        t = self.table_number(table)
        loaded = self.set_table_entries(t, found.entries)
        if found.counts is not None and self._counts_exactly(t):
            assert self.admission is not None
            self.admission.set_counts(t, found.counts[0], found.counts[1])
        return loaded

    def _counts_exactly(self, table: int) -> bool:
        return self.admission is not None and self.admission.counts_exactly(table)


def _check_left_out(leave_out: Collection[str]) -> None:
    unknown = sorted(set(leave_out) - {"states", "counts"})
    if unknown:
        raise ValueError(f"leave_out takes 'states' and 'counts', got {unknown}")
