"""Save and load the tables of a module, whole or as changes since a tick."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.dynamic.saving import dump_tables, dumps, fallback, loading, snapshots
from emblib.dynamic.saving.checkpoint import (
    INDEX_HASH_KEYS,
    check_child_state,
    check_hyperparameters,
    child_state,
    hash_keys_in,
    replace_entries,
    replace_tables,
    set_child_state,
    table_entries,
    target_of,
    warn_of_expiry,
)
from emblib.dynamic.saving.dump_tables import Dump, DumpedTable, Header
from emblib.dynamic.saving.dumps import Part, Report
from emblib.dynamic.saving.entries import Changes, Entries
from emblib.dynamic.saving.loading import Loaded
from emblib.dynamic.state import DynamicState, of_state, size
from emblib.specs import check_count
from emblib.tables.parameters import caller_level


@of_state
def save(
    state: DynamicState,
    directory: str | Path,
    *,
    since: int | None = None,
    part: Part = Part(),  # noqa: B008
    identity: str | None = None,
    report: Report | None = None,
) -> int:
    """Save the tables to a directory, which then holds all of this dump or its old content.

    If several ranks write parts and are cut short between two of them, it holds neither. Call it
    between steps, not between a forward and its backward.

    Args:
        state: the tables.
        directory: directory of the dump, created if it does not exist; an older dump in it is
            replaced.
        since: first tick of the changes to save, the return value of an earlier call; None saves
            all entries. Removed keys are saved too, so call `track_evictions` before that call.
        part: rank and number of ranks; each writes its part, into one directory.
        identity: text that all parts of one dump share; None is the tick.
        report: function that is called as rows are written.

    Returns:
        The tick to pass as `since` the next time.

    Raises:
        RuntimeError: `since` is set, and `track_evictions` was not called.
        TypeError: `since` is not an int.
        ValueError: the eviction log does not reach back to `since`, the tables have not reached it,
            or the directory holds something else than a dump of as many parts.
        BlockingIOError: the part is being written by another process.
        OSError: the directory cannot be written to.
    """
    identity = str(state.index.tick) if identity is None else identity
    tables = {name: _changes_of(state, t, since) for t, name in enumerate(state.table_names)}
    header = Header(identity, state.index.tick, since, state.hyperparams.tolist())
    fallback_rows = fallback.named_rows(state)
    return _write(state, directory, tables, header, part, report, child_state(state), fallback_rows)


def _write(
    state: DynamicState,
    directory: str | Path,
    tables: Mapping[str, Changes],
    header: Header,
    part: Part,
    report: Report | None,
    other_tensors: dict[str, Tensor],
    fallback_rows: dict[str, Tensor],
) -> int:
    """Write tables by name; return the tick of the dump.

    `other_tensors` is the state of the children of the module; of these a dump of changes has only
    the hash keys. `fallback_rows` are named as in state dicts.
    """
    dumped_tables = [
        DumpedTable(name, state.index.order, *changes) for name, changes in tables.items()
    ]
    if header.since is not None:
        other_tensors = {INDEX_HASH_KEYS: other_tensors[INDEX_HASH_KEYS]}
    other_tensors = {**other_tensors, **fallback.without_other_shards(fallback_rows, *part)}
    dump_tables.write(directory, dumped_tables, header, part, report, other_tensors)
    return header.clock


def _changes_of(state: DynamicState, table: int, since: int | None) -> Changes:
    """Return the changes of a table at tick `since` or later; None returns all entries."""
    if since is None:
        return Changes(table_entries(state, table), torch.empty(0, dtype=torch.int64, device="cpu"))
    removed = removed_since(state, table, since)
    return Changes(table_entries(state, table, since), removed)


@of_state
def load(
    state: DynamicState,
    directory: str | Path,
    *,
    part: Part = Part(),  # noqa: B008
    report: Report | None = None,
) -> dict[str, Loaded]:
    """Load what `save` wrote, or a snapshot; changes are applied to the content of the tables.

    All checksums and all tables are checked before the first table is changed.

    Args:
        state: the tables.
        directory: directory of the dump.
        part: rank and number of ranks; the dump may be of another number of ranks. Without effect
            on a snapshot, which is of one rank.
        report: function that is called as rows are loaded.

    Returns:
        The result per table of the dump; {} for a snapshot.

    Raises:
        DumpError: there is no whole dump, or it is damaged.
        RuntimeError: it is a snapshot, and the module has a backing store.
        ValueError: it is of other tables or another optimizer, a snapshot of other capacities, or
            of changes that begin after the tick of these tables or end before it.
    """
    if dumps.holds_snapshot(directory):
        snapshots.load(state, directory)
        return {}
    dump = dump_tables.read(directory, *part)
    hyperparameters = torch.tensor(dump.numbers, dtype=torch.float64, device="cpu")
    if dump.since is not None:
        changes_by_table = {
            name: Changes(table.entries, table.removed) for name, table in dump.tables.items()
        }
        hash_keys = dump.other_tensors.get(INDEX_HASH_KEYS)
        fallback_rows = {
            name: fallback.rows_of_table(dump.other_tensors, name) for name in changes_by_table
        }
        changes = ChangeSet(
            dump.since, dump.clock, changes_by_table, hyperparameters, hash_keys, fallback_rows
        )
        return apply_changes(state, changes, report)
    return _load_whole(state, directory, dump, hyperparameters, report)


def _load_whole(
    state: DynamicState,
    directory: str | Path,
    dump: Dump,
    hyperparameters: Tensor,
    report: Report | None,
) -> dict[str, Loaded]:
    """Replace all tables by those of a dump, after checking all of it."""
    if sorted(dump.tables) != sorted(state.table_names):
        raise ValueError(
            f"the dump has the tables {sorted(dump.tables)}, this module {state.table_names}; "
            "load single ones with set_table_entries"
        )
    check_hyperparameters(state, hyperparameters)
    entries = {state.table_number(name): table.entries for name, table in dump.tables.items()}
    for t, dumped_entries in entries.items():
        loading.check(target_of(state, t), dumped_entries)
        fallback.check_rows(
            state, t, fallback.rows_of_table(dump.other_tensors, state.table_names[t])
        )
    hash_keys = hash_keys_in(state, entries, dump.other_tensors.get(INDEX_HASH_KEYS))
    state_by_child = check_child_state(state, dump.other_tensors, directory)
    if state.expiry is not None:
        state.expiry.forget_times()  # a dump has no times if no ttl is a time
    set_child_state(state, state_by_child)
    return replace_tables(
        state,
        entries,
        clock=dump.clock,
        hyperparameters=hyperparameters,
        hash_keys=hash_keys,
        fallback_rows=dump.other_tensors,
        report=report,
    )


class ChangeSet(NamedTuple):
    """The changes of the tables of a module since a tick.

    Attributes:
        since: first tick of the changes: entries that were used or written, and removed keys.
        until: the tick to pass as `since` the next time.
        tables: changes by table name.
        hyperparameters: hyperparameters of the optimizer.
        hash_keys: hash keys of the tables, int64 `[T]`, which a copy without keys adopts; None if
            it keeps its own.
        fallback_rows: all fallback rows by table name, see `emblib.dynamic.saving.fallback`.
    """

    since: int
    until: int
    tables: dict[str, Changes]
    hyperparameters: Tensor
    hash_keys: Tensor | None = None
    fallback_rows: Mapping[str, fallback.FallbackRows] = {}


@of_state
def removed_since(state: DynamicState, table: int, since: int) -> Tensor:
    """Return the keys, int64 `[n]`, that left a table at tick `since` or later and are not in it.

    Raises:
        RuntimeError: `track_evictions` was not called.
        TypeError: the tick is not an int.
        ValueError: the eviction log does not reach back to the tick, or the tables have not reached
            it.
    """
    if check_count("since", since, minimum=0) > state.index.tick:
        raise ValueError(
            f"since is tick {since}, and these tables are at {state.index.tick}: it is of other "
            "tables, or of a time before an older checkpoint was loaded; save all entries instead"
        )
    if state.eviction_log is None:
        raise RuntimeError(
            "changes need to know which keys left; call track_evictions() before the dump that "
            "they are changes of"
        )
    if state.backing is not None:
        state.backing.write_back()  # the store may drop rows for new ones
    logged_keys = state.eviction_log.since(table, since)
    removed = loading.absent_keys(target_of(state, table), logged_keys)
    return removed if state.backing is None else state.backing.absent_keys(table, removed)


@of_state
def changes_since(
    state: DynamicState, since: int, table_indices: Sequence[int] | None = None
) -> ChangeSet:
    """Return the changes at tick `since` or later, for `apply_changes` to a copy of the tables.

    The batch of tick `since` is included again: an earlier save may have come before its backward.

    Args:
        state: the tables.
        since: the tick.
        table_indices: the numbers of the tables; None is all.

    Raises:
        Exception: see `removed_since`.
    """
    table_numbers = list(range(len(state.specs)) if table_indices is None else table_indices)
    tables = {state.table_names[t]: _changes_of(state, t, since) for t in table_numbers}
    hyperparameters = state.hyperparams.cpu().clone()
    hash_keys = state.index.hash_keys.cpu()[table_numbers]
    rows = {state.table_names[t]: fallback.rows_of(state, t) for t in table_numbers}
    return ChangeSet(since, state.index.tick, tables, hyperparameters, hash_keys, rows)


@of_state
def check_changes(state: DynamicState, changes: ChangeSet) -> dict[int, int]:
    """Check that changes fit the tables; return the hash keys in the changes, by table.

    Raises:
        ValueError: see `apply_changes`.
    """
    tick = state.index.tick
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
    check_hyperparameters(state, changes.hyperparameters)
    unknown_names = sorted({*changes.tables, *changes.fallback_rows} - {*state.table_names})
    if unknown_names:
        raise ValueError(
            f"changes are of the tables {unknown_names}, this module has {state.table_names}; "
            "leave out those that it lacks"
        )
    upserts = {
        state.table_number(name): table_changes.upserts
        for name, table_changes in changes.tables.items()
    }
    for t, entries in upserts.items():
        loading.check(target_of(state, t), entries)
    for name, rows in changes.fallback_rows.items():
        fallback.check_rows(state, state.table_number(name), rows)
    return hash_keys_in(state, upserts, changes.hash_keys)


@of_state
def apply_changes(
    state: DynamicState, changes: ChangeSet, report: Report | None = None
) -> dict[str, Loaded]:
    """Apply changes to a copy of the tables; the last changes may be applied twice.

    A copy with equal capacities and hash keys has a slot for every key; hash keys are equal if seed
    and table names are, or if it first loaded these tables. A warning counts keys that are lost.

    Raises:
        ValueError: these tables have not reached the first tick of the changes, or are past the
            last, or the changes do not fit them.
    """
    hash_keys = check_changes(state, changes)
    warn_of_expiry(state, {state.table_number(name) for name in changes.tables}, changes.until)
    counters = state.index.counters.clone()

    def apply() -> dict[str, Loaded]:
        nonlocal report
        report_once, report = report, None  # if it raises, the rest is applied without it
        loaded = {}
        for name, table_changes in changes.tables.items():
            t = state.table_number(name)
            if not size(state, t):
                state.index.clear_table(t, hash_keys.get(t))
            loaded[state.table_names[t]] = _apply_to_table(state, t, table_changes, report_once)
            if state.scores is not None:
                upserts = table_changes.upserts
                state.scores.continue_steps(t, upserts.stamps, upserts.scores)
            fallback.write_rows(state, t, changes.fallback_rows.get(name, {}))
        state.index.counters.copy_(counters)
        state.index.set_tick(max(state.index.tick, changes.until))
        if state.expiry is not None:
            state.expiry.now_us = state.expiry.read_clock()
            state.expiry.record_time(state.index.tick)
        state.load_hyperparams(changes.hyperparameters)
        state.restart_eviction_log()
        return loaded

    loaded = state.complete(apply)
    num_lost = {
        name: loaded_table.left_out + loaded_table.displaced
        for name, loaded_table in loaded.items()
    }
    if any(num_lost.values()):
        warnings.warn(
            "emblib: a copy had no slot for all keys of the tables that it follows; lost are "
            f"{ {name: count for name, count in num_lost.items() if count} }: give it the capacity "
            "and the seed of those tables, or load them whole",
            stacklevel=caller_level(),
        )
    return loaded


def _apply_to_table(
    state: DynamicState, table: int, changes: Changes, report: Report | None
) -> Loaded:
    """Apply the changes of one table."""
    target, (upserts, removed) = target_of(state, table), changes
    if state.backing is None:
        loading.erase(target, removed)
        return loading.put(target, upserts, report)
    # Changed entries go to the backing store, whichever tier they were in.
    state.backing.erase(table, removed)
    loading.erase(target, torch.cat([removed, upserts.keys]))
    state.record_evictions(table, removed)
    return state.backing.load_entries(table, upserts, report)


# One table of a module


class TableDump(NamedTuple):
    """The part of a dump that one table loads, checked.

    Attributes:
        entries: entries of the table.
        changes: changes to apply to the current entries; None for a dump of whole tables.
        clock: the tick of the dump.
        hyperparameters: hyperparameters of the optimizer.
        hash_key: hash key of the table at the time of the dump; None if unknown.
        state_by_child: the state of hash keys, counters, scores and times, see `check_child_state`;
            {} for changes, and unless both the dump and the module have one table.
        fallback_rows: the fallback rows of the table.
    """

    entries: Entries
    changes: ChangeSet | None
    clock: int
    hyperparameters: Tensor
    hash_key: int | None
    state_by_child: dict[str, dict[str, Tensor]]
    fallback_rows: dict[str, Tensor]


@of_state
def save_table(
    state: DynamicState,
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
        ValueError: the module has other tables with which this one shares counters, scores or
            times.
        Exception: see `save`.
    """
    other_tensors, changes = _state_of_table(state, table), _changes_of(state, table, since)
    header = Header(identity, state.index.tick, since, state.hyperparams.tolist())
    rows = fallback.rows_of(state, table)
    named_rows = {f"{name}.{fallback.FALLBACK}.{key}": value for key, value in rows.items()}
    return _write(
        state, directory, {name: changes}, header, part, report, other_tensors, named_rows
    )


def _state_of_table(state: DynamicState, table: int) -> dict[str, Tensor]:
    """Return the state of a table besides its entries: hash key, counters and scores.

    Raises:
        ValueError: several tables share counters, scores or times.
    """
    child_states = child_state(state)
    if len(state.specs) == 1:
        return child_states
    if state.child_modules().keys() - {"index", "row_initializer"}:
        raise ValueError(
            f"tables {state.table_names} of one module share admission counters, scores or times, "
            "which are not divided: save the module instead, or give this table a module of its own"
        )
    return {INDEX_HASH_KEYS: child_states[INDEX_HASH_KEYS][table : table + 1]}


@of_state
def read_table(
    state: DynamicState,
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
    dumped_table = dump.tables[name]
    hyperparameters = torch.tensor(dump.numbers, dtype=torch.float64, device="cpu")
    check_hyperparameters(state, hyperparameters)
    hash_keys = dump.other_tensors.get(INDEX_HASH_KEYS)
    if hash_keys is not None and len(dump.tables) > 1:
        table_index = list(dump.tables).index(name)
        hash_keys = hash_keys[table_index : table_index + 1]
    hash_key = None if hash_keys is None else int(hash_keys[0])
    rows = fallback.rows_of_table(dump.other_tensors, name)
    changes, state_by_child = None, {}
    if dump.since is None:
        loading.check(target_of(state, table), dumped_table.entries)
        fallback.check_rows(state, table, rows)
        if len(dump.tables) == len(state.specs) == 1:
            state_by_child = check_child_state(state, dump.other_tensors, directory)
    else:
        tables = {state.table_names[table]: Changes(dumped_table.entries, dumped_table.removed)}
        fallback_rows = {state.table_names[table]: rows}
        changes = ChangeSet(
            dump.since, dump.clock, tables, hyperparameters, hash_keys, fallback_rows
        )
        check_changes(state, changes)
    return TableDump(
        entries=dumped_table.entries,
        changes=changes,
        clock=dump.clock,
        hyperparameters=hyperparameters,
        hash_key=hash_key,
        state_by_child=state_by_child,
        fallback_rows=rows,
    )


@of_state
def set_table(state: DynamicState, table: int, dump: TableDump, report: Report | None) -> Loaded:
    """Load what `read_table` returned; its tensors must not have changed since.

    Hyperparameters, which all tables of the module share, are loaded from a dump of changes, and
    from a whole dump that has made more steps.
    """
    if dump.changes is not None:
        (loaded,) = apply_changes(state, dump.changes, report).values()
        return loaded

    warn_of_expiry(state, {table}, max(dump.clock, dump.entries.newest_stamp()))

    def write() -> Loaded:
        nonlocal report
        report_once, report = report, None  # if it raises, the rest is loaded without it
        loaded = replace_entries(state, table, dump.entries, report_once, hash_key=dump.hash_key)
        fallback.write_rows(state, table, dump.fallback_rows)
        set_child_state(state, dump.state_by_child)
        state.index.set_tick(max(dump.clock, state.index.tick))
        if float(dump.hyperparameters[Hyper.STEP]) > float(state.hyperparams[Hyper.STEP]):
            state.load_hyperparams(dump.hyperparameters)
        state.restart_eviction_log()
        return loaded

    return state.complete(write)
