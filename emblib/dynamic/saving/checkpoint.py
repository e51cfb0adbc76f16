"""Checkpoints of dynamic tables: entries in and out, state dicts, snapshots slot by slot.

A state dict has entries (`emblib.dynamic.saving.entries`), sorted by route, so that equal contents
are the same bytes and fit tables of any capacity, number of buckets and dtype. Stamps and scores
are among them, so what would be evicted next is the same after a reload: `<table>.keys`,
`<table>.stamps`, `<table>.scores` where the order of eviction has any, `<table>.weight` and
`<table>.<state>`, each with one row a key, on the CPU; `hyper`, the numbers of the optimizer, and
`clock`, the tick; `index.hash_keys`, the number by table that its hash depends on, so that the
same keys evict each other after a reload. Without it tables keep their own.
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic.hash_index import HASH_KEYS
from emblib.dynamic.saving import dump_tables, dumps, dynamicemb_files, loading
from emblib.dynamic.saving.dump_tables import Header, Table, rows_at_a_time
from emblib.dynamic.saving.dumps import DumpMismatchError, Part, Report
from emblib.dynamic.saving.dynamicemb_files import Foreign, Layout
from emblib.dynamic.saving.entries import WEIGHT, Changes, Entries, RemovalLog, Rows
from emblib.dynamic.saving.loading import Loaded, Target
from emblib.dynamic.state import DynamicState
from emblib.tables import base
from emblib.tables.locks import atomic
from emblib.tables.parameters import caller_level

_CLOCK, _HYPER, _HASH_KEYS = "clock", "hyper", f"index.{HASH_KEYS}"
_SKETCH_HASH_KEYS = f"admission.sketches.{HASH_KEYS}"


class DynamicCheckpoint(DynamicState):
    """Dynamic tables that can be saved and loaded."""

    removals: RemovalLog | None = None

    def _target(self, table: int, hash_key: int | None = None) -> Target:
        return Target(
            index=self.index,
            table=table,
            name=self.table_names[table],
            views=self.table_rows(table),
            rows=self.value_rows(),
            initial_state=self.tables[table].initial_state,
            hash_key=hash_key,
        )

    @atomic
    def table_entries(self, table: int | str, since: int | None = None) -> Entries:
        """Keys, stamps, scores and rows of a table, or of what was used at `since` or later.

        Rows are copied when they are asked for, so training must not go on before that.
        """
        return loading.export(self._target(self.table_number(table)), since)

    @atomic
    def set_table_entries(
        self,
        table: int | str,
        entries: Entries,
        report: Report | None = None,
        *,
        hash_key: int | None = None,
    ) -> Loaded:
        """Let a table have these entries and no others; the best of them where not all fit.

        Rows are converted to the dtypes of the table; entries with the weight alone leave states at
        their first value. The clock goes on from the largest stamp at least.

        Args:
            table: its number or name.
            entries: what it has then.
            report: called as rows are written.
            hash_key: `index.hash_key` of the table that the entries are of, so that keys evict each
                other here as they would there; None keeps that of this table.

        Raises:
            ValueError: entries that do not fit, before anything is changed.
        """
        return loading.replace(self._target(self.table_number(table), hash_key), entries, report)

    def _restart_removals(self) -> None:
        if self.removals is not None:
            self.removals.restart(self.index.tick)

    # State dicts

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + _HYPER] = self.hyperparams
        destination[prefix + _CLOCK] = self.index.clock.cpu().clone()
        for t, name in enumerate(self.table_names):
            entries = self.table_entries(t)
            order = routing.canonical_order(entries.keys)
            for key, rows in _columns(entries).items():
                destination[f"{prefix}{name}.{key}"] = _gathered(rows, order)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; where `strict` refuses keys, it does before anything is written."""
        if strict:
            names = dict.fromkeys([*self._state_names(), *self._others()], self.hyperparams)
            for name in (_HASH_KEYS, _SKETCH_HASH_KEYS):
                if name not in state_dict:  # as in those of earlier versions
                    names.pop(name, None)
            base.check_keys(names, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        missing_keys, unexpected_keys, error_messages = arguments[2:]
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        names = self._state_names()
        missing_keys.extend(prefix + key for key in names if key not in given)
        unexpected_keys.extend(
            prefix + key
            for key in given
            if key not in names and key.split(".")[0] not in self._modules
        )
        try:
            found = self._entries_of(given)
            self._check_numbers(given.get(_HYPER))
            for t, entries in found.items():
                loading.check(self._target(t), entries)
            hash_keys = self._hash_keys_of(found, given.get(_HASH_KEYS))
        except (ValueError, TypeError) as error:
            error_messages.append(f"{prefix}: {error}")
            return
        self._take(found, int(given.get(_CLOCK, 0)), given.get(_HYPER), hash_keys=hash_keys)

    def _state_names(self) -> list[str]:
        kinds = ["keys", "stamps", *self.table_rows(0)] if self.tables else []
        if self.index.entries.shape[1] > 2:
            kinds.append("scores")
        return [_HYPER, _CLOCK, *(f"{name}.{kind}" for name in self.table_names for kind in kinds)]

    def _entries_of(self, state: Mapping[str, Tensor]) -> dict[int, Entries]:
        """The entries of those tables whose keys a state dict has."""
        found = {}
        for t, name in enumerate(self.table_names):
            columns = {
                kind: state[f"{name}.{kind}"].detach().cpu()
                for kind in ("keys", "stamps", "scores")
                if f"{name}.{kind}" in state
            }
            if "keys" not in columns:
                continue
            stamps = columns.get("stamps", torch.ones_like(columns["keys"]))
            rows: dict[str, Rows] = {
                kind: state[f"{name}.{kind}"]
                for kind in self.table_rows(t)
                if f"{name}.{kind}" in state
            }
            found[t] = Entries(columns["keys"], stamps, columns.get("scores"), rows)
        return found

    def _check_numbers(self, numbers: Tensor | None) -> None:
        if numbers is not None and numbers.shape != self.hyperparams.shape:
            raise ValueError(
                f"hyper has {numbers.numel()} numbers, this optimizer has "
                f"{self.hyperparams.numel()}: the checkpoint is of another one; without this key "
                "and with strict=False the rest can be loaded"
            )

    def _hash_keys_of(self, found: Mapping[int, Entries], saved: Tensor | None) -> dict[int, int]:
        """The hash keys of tables, of those that were saved; none where none were.

        They are those of all tables of a module, or of the tables that were found.
        """
        if saved is None or not found:
            return {}
        tables = range(len(self.tables)) if saved.numel() == len(self.tables) else list(found)
        if saved.dtype != torch.int64 or saved.dim() != 1 or saved.numel() != len(tables):
            raise ValueError(
                f"{_HASH_KEYS} must be int64, one a table = [{len(tables)}], got {saved.dtype} "
                f"{list(saved.shape)}; without it tables keep their own"
            )
        return dict(zip(tables, saved.tolist(), strict=True))

    @atomic
    def _take(
        self,
        found: Mapping[int, Entries],
        clock: int,
        numbers: Tensor | None,
        report: Report | None = None,
        *,
        hash_keys: Mapping[int, int] | None = None,
    ) -> dict[str, Loaded]:
        """Replace tables, clock and numbers; says what was left out."""
        keys = {} if hash_keys is None else hash_keys
        loaded = {
            self.table_names[t]: self.set_table_entries(t, entries, report, hash_key=keys.get(t))
            for t, entries in found.items()
        }
        newest = [entries.newest_stamp() for entries in found.values()]
        if len(found) == len(self.tables):
            self.index.set_tick(max([clock, *newest]))
            self.index.reset_stats()
        else:
            self.index.set_tick(max([clock, self.index.tick, *newest]))
        if numbers is not None:
            self.hyperparams.copy_(numbers)
        self._restart_removals()
        left_out = {name: done.left_out for name, done in loaded.items() if done.left_out}
        if left_out:
            warnings.warn(
                f"emblib: tables had no place for all entries they were loaded with; left out, "
                f"those that would have been evicted first, are {left_out}",
                stacklevel=caller_level(),
            )
        return loaded

    @atomic
    def _others(self) -> dict[str, Tensor]:
        """What the modules within this one save: counters of admission, scores."""
        names = self._state_names()
        return {
            f"{child}.{key}": value
            for child, module in self.named_children()
            for key, value in module.state_dict().items()
            if f"{child}.{key}" not in names
        }

    @atomic
    def _set_others(self, others: Mapping[str, Tensor], directory: str | Path) -> None:
        """Load the modules within this one; those that a dump has nothing of stay as they are.

        Raises:
            DumpError: what the dump in `directory` has does not fit, before anything is changed.
        """
        given = {
            child: {
                key.removeprefix(f"{child}."): value
                for key, value in others.items()
                if key.startswith(f"{child}.")
            }
            for child, _ in self.named_children()
        }
        with _naming(directory):
            if self.admission is not None and given["admission"]:
                self.admission.check_state_dict(given["admission"])
            if self.scores is not None and given["scores"]:
                dumps.check_state("scores", given["scores"], self.scores.state_dict())
        for child, module in self.named_children():
            if given[child]:
                module.load_state_dict(given[child])

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """What a state dict has that is no parameter or buffer, as attributes."""
        kinds = SimpleNamespace(stamps=0, keys=0, scores=0)
        for t in range(min(len(self.tables), 1)):
            kinds = SimpleNamespace(**vars(kinds), **self.table_rows(t))
        return SimpleNamespace(**{_CLOCK: 0, **dict.fromkeys(self.table_names, kinds)})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys([*self.table_names, _CLOCK], "_names_in_checkpoints")

    # Snapshots

    @atomic
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what `snapshot` was taken of, byte for byte.

        Raises:
            ValueError: it is of tables of other dims, capacities, loads or eviction, of another
                optimizer, precision or admission, or malformed; nothing is changed.
        """
        super().restore(snapshot)
        self._restart_removals()

    def dump_snapshot(self, directory: str | Path) -> None:
        """Write `snapshot()` to a directory, which then holds all of it or what it held."""
        dumps.write(directory, self.snapshot())

    def load_snapshot(self, directory: str | Path) -> None:
        """Become what `dump_snapshot` was called of, byte for byte.

        Raises:
            DumpError: there is no whole snapshot, it is damaged, or it is of another module (then
                the error is a ValueError too); nothing is changed.
        """
        snapshot = dumps.read(directory)
        with _naming(directory):
            self.restore(snapshot)


@contextlib.contextmanager
def _naming(directory: str | Path) -> Iterator[None]:
    """Turn a ValueError of a check into an error that names the directory."""
    try:
        yield
    except ValueError as error:
        raise DumpMismatchError(f"{directory} does not fit this module: {error}") from error


def _columns(entries: Entries) -> dict[str, Rows]:
    columns: dict[str, Rows] = {"keys": entries.keys, "stamps": entries.stamps}
    if entries.scores is not None:
        columns["scores"] = entries.scores
    return {**columns, **entries.rows}


def _gathered(rows: Rows, order: Tensor) -> Tensor:
    """Rows in some order, on the CPU."""
    out = torch.empty(order.numel(), *rows.shape[1:], dtype=rows.dtype)
    done = 0
    for part in order.split(rows_at_a_time(rows)):
        out[done : done + part.numel()] = rows[part].cpu()
        done += part.numel()
    return out


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
                that left are told as well, so `track_evictions` must have been called before it.
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
            str(tick) if identity is None else identity, tick, since, self.hyperparams.tolist()
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
            RuntimeError: `track_evictions` was not called.
            ValueError: keys that left then are not remembered any more.
        """
        if self.removals is None:
            raise RuntimeError(
                "changes need to know which keys left; call track_evictions() before the dump that "
                "they are changes of"
            )
        tables = {}
        for t, name in enumerate(self.table_names):
            removed = self._absent(t, self.removals.since(t, since))
            tables[name] = Changes(self.table_entries(t, since), removed)
        return ChangeSet(
            since, self.index.tick, tables, self.hyperparams.clone(), self.index.hash_keys
        )

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
        self.hyperparams.copy_(changes.numbers)
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
        told = {"lr": self.learning_rate} if arguments is None else arguments
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
