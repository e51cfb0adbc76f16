"""Save and load the tables of a module, whole or as changes since a tick."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.dynamic.saving import dump_tables, dumps, loading, snapshots
from emblib.dynamic.saving.checkpoint import (
    INDEX_HASH_KEYS,
    check_child_state,
    check_hyperparameters,
    child_state,
    hash_keys_in,
    replace_tables,
    restart_eviction_log,
    set_child_state,
    set_table_entries,
    table_entries,
    target_of,
)
from emblib.dynamic.saving.dump_tables import Dump, DumpedTable, Header
from emblib.dynamic.saving.dumps import Part, Report
from emblib.dynamic.saving.entries import Changes, Entries
from emblib.dynamic.saving.loading import Loaded
from emblib.tables.locks import atomic
from emblib.tables.parameters import caller_level

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags


@atomic
def save(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    since: int | None = None,
    part: Part = Part(),  # noqa: B008
    identity: str | None = None,
    report: Report | None = None,
) -> int:
    """Save tables to a directory; see `DynamicEmbeddingBags.save`."""
    tick = module.index.tick
    if since is None:
        nothing = torch.empty(0, dtype=torch.int64)
        tables = {
            name: Changes(table_entries(module, t), nothing)
            for t, name in enumerate(module.table_names)
        }
    else:
        tables = changes_since(module, since).tables
    saved = [DumpedTable(name, module.index.order, *found) for name, found in tables.items()]
    identity = str(tick) if identity is None else identity
    header = Header(identity, tick, since, module.hyperparams.tolist())
    others = child_state(module)
    if since is not None:
        others = {INDEX_HASH_KEYS: others[INDEX_HASH_KEYS]}
    dump_tables.write(directory, saved, header, part, report, others)
    return tick


@atomic
def load(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    part: Part = Part(),  # noqa: B008
    report: Report | None = None,
) -> dict[str, Loaded]:
    """Load what `save` wrote, or a snapshot; see `DynamicEmbeddingBags.load`."""
    if dumps.holds_snapshot(directory):
        snapshots.load(module, directory)
        return {}
    dump = dump_tables.read(directory, *part)
    hyperparameters = torch.tensor(dump.numbers, dtype=torch.float64)
    if dump.since is not None:
        changed = {n: Changes(t.entries, t.removed) for n, t in dump.tables.items()}
        hash_keys = dump.others.get(INDEX_HASH_KEYS)
        changes = ChangeSet(dump.since, dump.clock, changed, hyperparameters, hash_keys)
        return apply_changes(module, changes, report)
    return _load_whole(module, directory, dump, hyperparameters, report)


def _load_whole(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    dump: Dump,
    hyperparameters: Tensor,
    report: Report | None,
) -> dict[str, Loaded]:
    if sorted(dump.tables) != sorted(module.table_names):
        raise ValueError(
            f"the dump has the tables {sorted(dump.tables)}, this module {module.table_names}; "
            "load single ones with set_table_entries"
        )
    check_hyperparameters(module, hyperparameters)
    found = {module.table_number(n): table.entries for n, table in dump.tables.items()}
    for t, entries in found.items():
        loading.check(target_of(module, t), entries)
    hash_keys = hash_keys_in(module, found, dump.others.get(INDEX_HASH_KEYS))
    set_child_state(module, dump.others, directory)
    return replace_tables(
        module,
        found,
        clock=dump.clock,
        hyperparameters=hyperparameters,
        hash_keys=hash_keys,
        report=report,
    )


class ChangeSet(NamedTuple):
    """The changes of the tables of a module since a tick.

    Attributes:
        since: the tick from which on entries that were used or written, and removed keys, are here.
        until: the tick to pass as `since` the next time.
        tables: changes by table name.
        hyperparameters: hyperparameters of the optimizer.
        hash_keys: hash keys of the tables, int64 `[T]`, which a copy without keys takes over; None
            leaves its own.
    """

    since: int
    until: int
    tables: dict[str, Changes]
    hyperparameters: Tensor
    hash_keys: Tensor | None = None


@atomic
def removed_since(module: "DynamicEmbeddingBags", table: int, since: int) -> Tensor:
    """Return the keys that left a table at tick `since` or later and are not in it again.

    Raises:
        RuntimeError: `track_evictions` was not called.
        ValueError: the eviction log does not reach back to the tick.
    """
    if module.eviction_log is None:
        raise RuntimeError(
            "changes need to know which keys left; call track_evictions() before the dump that "
            "they are changes of"
        )
    log = module.eviction_log.since(table, since)
    removed = loading.absent(target_of(module, table), log)
    return removed if module.backing is None else module.backing.absent(table, removed)


@atomic
def changes_since(
    module: "DynamicEmbeddingBags", since: int, chosen: Sequence[int] | None = None
) -> ChangeSet:
    """Return what changed at tick `since` or later, for `apply_changes` to a copy of the tables.

    The batch of that tick is included again: it may have been saved before it was trained.

    Args:
        module: module of the tables.
        since: the tick.
        chosen: the numbers of the tables; None is all.

    Raises:
        RuntimeError: `track_evictions` was not called.
        ValueError: the eviction log does not reach back to the tick.
    """
    numbers = list(range(len(module.tables)) if chosen is None else chosen)
    tables = {}
    for t in numbers:
        removed = removed_since(module, t, since)
        tables[module.table_names[t]] = Changes(table_entries(module, t, since), removed)
    hyperparameters = module.hyperparams.cpu().clone()
    hash_keys = module.index.hash_keys.cpu()[numbers]
    return ChangeSet(since, module.index.tick, tables, hyperparameters, hash_keys)


@atomic
def check_changes(module: "DynamicEmbeddingBags", changes: ChangeSet) -> dict[int, int]:
    """Return the hash keys in changes by table.

    Raises:
        ValueError: see `apply_changes`.
    """
    tick = module.index.tick
    if changes.since > tick:
        raise ValueError(
            f"changes begin at tick {changes.since}, these tables are at {tick}; apply those in "
            "between first"
        )
    if changes.until < tick:
        raise ValueError(
            f"changes lead to tick {changes.until}, these tables are at {tick} already: rows "
            "would be older than others; leave these changes out"
        )
    check_hyperparameters(module, changes.hyperparameters)
    upserts = {module.table_number(n): found.upserts for n, found in changes.tables.items()}
    for t, entries in upserts.items():
        loading.check(target_of(module, t), entries)
    return hash_keys_in(module, upserts, changes.hash_keys)


@atomic
def apply_changes(
    module: "DynamicEmbeddingBags", changes: ChangeSet, report: Report | None = None
) -> dict[str, Loaded]:
    """Apply the changes of other tables to a copy of them; the last ones may be applied again.

    A copy of the same capacities and the same `index.hash_keys` (that is, of the same seed and
    table names, or one that began by loading those tables) has a slot for every key. Keys that are
    lost are counted in a warning.

    Raises:
        ValueError: these tables have not reached the first tick of the changes, or are past the
            last, or the changes do not fit them.
    """
    hash_keys = check_changes(module, changes)
    counters = module.index.counters.clone()

    def apply() -> dict[str, Loaded]:
        nonlocal report
        now, report = report, None  # if it raises, the rest is applied without it
        loaded = {}
        for name, found in changes.tables.items():
            t = module.table_number(name)
            if not module.size(t):
                module.index.empty(t, hash_keys.get(t))
            loaded[module.table_names[t]] = _apply_to_table(module, t, found, now)
        module.index.counters.copy_(counters)
        module.index.set_tick(max(module.index.tick, changes.until))
        module.load_hyperparams(changes.hyperparameters)
        restart_eviction_log(module)
        return loaded

    loaded = module.complete(apply)
    lost = {n: done.left_out + done.displaced for n, done in loaded.items()}
    if any(lost.values()):
        warnings.warn(
            "emblib: a copy had no slot for all keys of the tables that it follows; lost are "
            f"{ {name: count for name, count in lost.items() if count} }: give it the capacity "
            "and the seed of those tables, or load them whole",
            stacklevel=caller_level(),
        )
    return loaded


def _apply_to_table(
    module: "DynamicEmbeddingBags", table: int, changes: Changes, report: Report | None
) -> Loaded:
    target, (upserts, removed) = target_of(module, table), changes
    if module.backing is None:
        loading.erase(target, removed)
        return loading.put(target, upserts, report)
    # Changed entries go to the backing store, whichever tier they were in.
    module.backing.erase(table, removed)
    loading.erase(target, torch.cat([removed, upserts.keys]))
    return module.backing.load_entries(table, upserts, report)


# One table of a module


class TableDump(NamedTuple):
    """The part of a dump that one table loads, checked.

    Attributes:
        directory: directory of the dump, for error messages.
        entries: entries of the table.
        changes: changes to apply to the present entries; None for a dump of whole tables.
        clock: the tick of the dump.
        hyperparameters: hyperparameters of the optimizer.
        hash_key: hash key of the table at the time of the dump; None if unknown.
        others: the state of admission counters and scores.
    """

    directory: Path
    entries: Entries
    changes: ChangeSet | None
    clock: int
    hyperparameters: Tensor
    hash_key: int | None
    others: dict[str, Tensor]


@atomic
def save_table(
    module: "DynamicEmbeddingBags",
    table: int,
    directory: str | Path,
    *,
    name: str,
    since: int | None,
    part: Part,
    identity: str,
    report: Report | None,
) -> int:
    """Save one table to a directory under a name, see `save`.

    Raises:
        ValueError: the module has other tables with which this one shares counters or scores.
    """
    tick, order = module.index.tick, module.index.order
    others = _state_of_table(module, table)
    if since is None:
        nothing = torch.empty(0, dtype=torch.int64)
        changes = Changes(table_entries(module, table), nothing)
    else:
        (changes,) = changes_since(module, since, [table]).tables.values()
        others = {INDEX_HASH_KEYS: others[INDEX_HASH_KEYS]}
    header = Header(identity, tick, since, module.hyperparams.tolist())
    saved = [DumpedTable(name, order, *changes)]
    dump_tables.write(directory, saved, header, part, report, others)
    return tick


def _state_of_table(module: "DynamicEmbeddingBags", table: int) -> dict[str, Tensor]:
    """Return the state of a table besides its entries: hash key, counters and scores."""
    state = child_state(module)
    if len(module.tables) == 1:
        return state
    if module.admission is not None or module.scores is not None:
        raise ValueError(
            f"tables {module.table_names} of one module share admission counters or scores, which "
            "are not divided: save the module instead, or give this table a module of its own"
        )
    return {INDEX_HASH_KEYS: state[INDEX_HASH_KEYS][table : table + 1]}


@atomic
def read_table(
    module: "DynamicEmbeddingBags",
    table: int,
    directory: str | Path,
    *,
    name: str,
    part: Part,
) -> TableDump:
    """Read and check what one table loads from a dump, for `set_table`; change nothing.

    Raises:
        DumpError: there is no whole dump, or it is damaged.
        ValueError: it has no table of this name, or it does not fit.
    """
    if dumps.holds_snapshot(directory):
        raise ValueError(
            f"{directory} holds a snapshot of a whole module; load it into the module instead"
        )
    dump = dump_tables.read(directory, *part)
    if name not in dump.tables:
        raise ValueError(f"{directory} has no table {name!r}, it has {sorted(dump.tables)}")
    found, numbers = dump.tables[name], torch.tensor(dump.numbers, dtype=torch.float64)
    check_hyperparameters(module, numbers)
    saved = dump.others.get(INDEX_HASH_KEYS)
    if saved is not None and len(dump.tables) > 1:
        at = list(dump.tables).index(name)
        saved = saved[at : at + 1]
    hash_key = None if saved is None else int(saved[0])
    others = dump.others if len(dump.tables) == len(module.tables) == 1 else {}
    changes = None
    if dump.since is None:
        loading.check(target_of(module, table), found.entries)
        check_child_state(module, others, directory)
    else:
        tables = {module.table_names[table]: Changes(found.entries, found.removed)}
        changes = ChangeSet(dump.since, dump.clock, tables, numbers, saved)
        check_changes(module, changes)
    return TableDump(Path(directory), found.entries, changes, dump.clock, numbers, hash_key, others)


@atomic
def set_table(
    module: "DynamicEmbeddingBags", table: int, dump: TableDump, report: Report | None
) -> Loaded:
    """Load what `read_table` returned.

    Hyperparameters belong to all tables of the module: those of the dump are taken if it has made
    more steps.
    """
    if dump.changes is not None:
        (loaded,) = apply_changes(module, dump.changes, report).values()
        return loaded

    def write() -> Loaded:
        nonlocal report
        now, report = report, None  # if it raises, the rest is loaded without it
        loaded = set_table_entries(module, table, dump.entries, now, hash_key=dump.hash_key)
        set_child_state(module, dump.others, dump.directory)
        module.index.set_tick(max(dump.clock, module.index.tick))
        if float(dump.hyperparameters[Hyper.STEP]) > float(module.hyperparams[Hyper.STEP]):
            module.load_hyperparams(dump.hyperparameters)
        restart_eviction_log(module)
        return loaded

    return module.complete(write)
