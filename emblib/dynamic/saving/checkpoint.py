"""State dicts of dynamic tables, and their entries as functions over a module.

A state dict has entries (`emblib.dynamic.saving.entries`), sorted by route, so that equal contents
are equal bytes and fit tables of any capacity, number of buckets and dtype. Each of these has one
row per key, copied to the CPU: `<table>.keys`; `<table>.stamps` and, where eviction uses scores,
`<table>.scores`, so that eviction continues after a reload; `<table>.last_uses` where features have
several times to live; `<table>.weight` and `<table>.<state>`. `hyper` is the tensor of the
optimizer's hyperparameters, not a copy, and `clock` the tick. `index.hash_keys` has the hash key of
each table, so that the same keys share buckets after a reload; without it tables keep their hash
keys. `<table>.fallback.keys`, `.weight` and `.<state>` are the fallback rows
(`emblib.dynamic.saving.fallback`).
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic.hash_index import HASH_KEYS, MAX_TICK
from emblib.dynamic.saving import dumps, fallback, loading
from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import DumpMismatchError, Report
from emblib.dynamic.saving.entries import LAST_USES, Entries, Rows
from emblib.dynamic.saving.loading import Loaded, TableTarget
from emblib.dynamic.state import DynamicState, of_state, reset_stats
from emblib.specs import check_count
from emblib.tables import state_dicts
from emblib.tables.parameters import caller_level

CLOCK = "clock"
HYPER = "hyper"
INDEX_HASH_KEYS = f"index.{HASH_KEYS}"
_COLUMNS = ("keys", "stamps", "scores")
_SKETCH_HASH_KEYS = f"admission.sketches.{HASH_KEYS}"
OPTIONAL_NAMES = frozenset({INDEX_HASH_KEYS, _SKETCH_HASH_KEYS})
"""Names in state dicts that those of earlier versions lack."""


# Entries of a table


@of_state
def target_of(state: DynamicState, table: int, hash_key: int | None = None) -> TableTarget:
    """Return a table as the target that `emblib.dynamic.saving.loading` writes.

    `hash_key` is the hash key that the table gets when it is replaced; None keeps the current one.
    """
    return TableTarget(
        index=state.index,
        table=table,
        name=state.table_names[table],
        views=state.table_rows(table),
        rows=state.slot_rows(),
        initial_state=state.specs[table].initial_state,
        last_uses=None if state.last_uses is None else state.last_uses.view(table),
        hash_key=hash_key,
        complete=state.complete,
    )


@of_state
def table_entries(state: DynamicState, table: int | str, since: int | None = None) -> Entries:
    """Return the entries of a table, of both tiers: all, or those used at tick `since` or later.

    Rows are copied when they are indexed, so read them before training continues.

    Raises:
        KeyError, IndexError: there is no such table.
        TypeError, ValueError: `since` is not an int >= 0.
    """
    table = state.table_number(table)
    since = None if since is None else check_count("since", since, minimum=0)
    if state.backing is None:
        return loading.export(target_of(state, table), since)
    state.backing.write_back()
    fast = loading.export(target_of(state, table), since)
    return state.backing.join_entries(table, fast, since)


@of_state
def set_table_entries(
    state: DynamicState,
    table: int | str,
    entries: Entries,
    report: Report | None = None,
    *,
    hash_key: int | None = None,
    keeps_times: bool = False,
) -> Loaded:
    """Replace the entries of a table; if not all fit, keep those that would be evicted last.

    Rows are converted to the dtypes of the table; with the weight alone, states start from their
    first value. The tick becomes at least the largest stamp, of which `warn_of_expiry` warns, and
    the eviction log restarts. With a backing store all entries go there, and the fast tier is
    empty.

    Args:
        state: the tables.
        table: number or name of the table.
        entries: the new entries.
        report: function that is called as rows are written; None for none. If it raises, the other
            rows are written without it, and then its exception is raised.
        hash_key: `index.hash_key` of the table that the entries are from, so that keys share
            buckets as they do there; None keeps the hash key of this table.
        keeps_times: whether entries keep their times for `expiry`; else they count as used at the
            next step, where the ttl is a time.

    Raises:
        KeyError, IndexError: there is no such table.
        ValueError: the entries do not fit; then nothing is changed.
        Exception: the backing store or `report` raised it.
    """
    warn_of_expiry(state, {state.table_number(table)}, entries.newest_stamp())
    return replace_entries(
        state, table, entries, report, hash_key=hash_key, keeps_times=keeps_times
    )


@of_state
def replace_entries(
    state: DynamicState,
    table: int | str,
    entries: Entries,
    report: Report | None = None,
    *,
    hash_key: int | None = None,
    keeps_times: bool = False,
) -> Loaded:
    """Replace the entries of a table as `set_table_entries` does, without its warning."""
    table = state.table_number(table)
    target = target_of(state, table, hash_key)
    if state.backing is not None:
        loading.check(target, entries)

    def write() -> Loaded:
        nonlocal report
        report_once, report = report, None  # if it raises, the rest is loaded without it
        if state.backing is None:
            loaded = loading.replace(target, entries, report_once)
        else:
            state.backing.drop_overflow_rows()
            state.backing.store.clear(table)
            state.index.clear_table(table, hash_key)
            loaded = state.backing.load_entries(table, entries, report_once)
        if state.expiry is not None and not keeps_times:
            state.expiry.forget_times(table)
        if state.scores is not None:
            state.scores.continue_steps(table, entries.stamps, entries.scores)
        state.restart_eviction_log()
        return loaded

    return state.complete(write)


@of_state
def check_entries(state: DynamicState, table: int, entries: Entries) -> None:
    """Raise ValueError if entries do not fit a table; see `set_table_entries`."""
    loading.check(target_of(state, table), entries)


@of_state
def warn_of_expiry(state: DynamicState, loaded_tables: Collection[int], tick: int) -> None:
    """Warn if a load of some tables raises the tick so far that keys of others are too old.

    The tables of a module count the same steps. Where the ttl of a table is in steps, the next
    sweeps remove its keys unless it is loaded too.
    """
    current_tick = state.index.tick
    if tick <= current_tick or state.expiry is None:
        return
    for t, name in enumerate(state.table_names):
        first_alive = max(state.expiry.first_alive_ticks(t, current_tick))
        first_alive_later = min(state.expiry.first_alive_ticks(t, tick))
        if t in loaded_tables or first_alive_later <= first_alive:
            continue
        stamps = table_entries(state, t).stamps
        num_expired = int(((stamps >= first_alive) & (stamps < first_alive_later)).sum())
        if num_expired:
            warnings.warn(
                f"emblib: loading {[state.table_names[i] for i in sorted(loaded_tables)]} raises "
                f"the step count of all tables of its module from {current_tick} to {tick}, at "
                f"which {num_expired} keys of {name!r} expire: load {name!r} too before the next "
                "step, or give tables with a ttl in steps a module of their own",
                stacklevel=caller_level(),
            )


# State dicts


def write_state(state: DynamicState, destination: dict[str, Any], prefix: str) -> None:
    """Write the state of a module without that of its children (`_save_to_state_dict`)."""
    destination[prefix + HYPER] = state.hyperparams
    destination[prefix + CLOCK] = state.index.clock.cpu().clone()
    for t, name in enumerate(state.table_names):
        entries = table_entries(state, t)
        order = routing.canonical_order(entries.keys)
        columns: dict[str, Rows] = {"keys": entries.keys, "stamps": entries.stamps}
        if entries.scores is not None:
            columns["scores"] = entries.scores
        for key, rows in {**columns, **entries.rows}.items():
            destination[f"{prefix}{name}.{key}"] = _gather(rows, order)
    for key, value in fallback.named_rows(state).items():
        destination[prefix + key] = value


def _gather(rows: Rows, order: Tensor) -> Tensor:
    """Copy rows in the given order to the CPU, 16 MiB at a time."""
    gathered_rows = torch.empty(order.numel(), *rows.shape[1:], dtype=rows.dtype, device="cpu")
    num_gathered = 0
    for slots in order.split(rows_at_a_time(rows)):
        gathered_rows[num_gathered : num_gathered + slots.numel()] = rows[slots].cpu()
        num_gathered += slots.numel()
    return gathered_rows


def state_names(state: DynamicState) -> list[str]:
    """Return the names that `write_state` writes."""
    entry_names = ["keys", "stamps", *state.table_rows(0)] if state.specs else []
    if state.index.has_scores:
        entry_names.append("scores")
    names = [f"{name}.{entry_name}" for name in state.table_names for entry_name in entry_names]
    for t, name in enumerate(state.table_names):
        names += [f"{name}.{LAST_USES}"] if len(state.specs[t].lifetimes) > 1 else []
        names += [f"{name}.{fallback.FALLBACK}.{key}" for key in fallback.names_of(state, t)]
    return [HYPER, CLOCK, *names]


@of_state
def child_state(state: DynamicState) -> dict[str, Tensor]:
    """Return the state of the children of a module: admission, scores, times of use, hash keys."""
    names = state_names(state)
    return {
        f"{child}.{key}": value
        for child, child_module in state.child_modules().items()
        for key, value in child_module.state_dict().items()
        if f"{child}.{key}" not in names
    }


def expected_names(state: DynamicState, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the names that a strict load of a state dict requires, as keys of a dict."""
    names = dict.fromkeys([*state_names(state), *child_state(state)], state.hyperparams)
    for name in OPTIONAL_NAMES - state_dict.keys():
        names.pop(name, None)
    return names


def names_as_attributes(state: DynamicState) -> SimpleNamespace:
    """Return an attribute per state dict entry that is not a parameter or buffer.

    torch.distributed.checkpoint only asks whether they exist; values are placeholders.
    """
    table_attributes = SimpleNamespace(stamps=0, keys=0, scores=0, last_uses=0)
    for t in range(min(len(state.specs), 1)):
        table_attributes = SimpleNamespace(**vars(table_attributes), **state.table_rows(t))
        table_attributes.fallback = SimpleNamespace(keys=0, **state.table_rows(t))
    return SimpleNamespace(**{CLOCK: 0, **dict.fromkeys(state.table_names, table_attributes)})


def read_state(
    state: DynamicState,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
) -> None:
    """Read what `write_state` wrote (`_load_from_state_dict`).

    The caller must have found no `state_problems`.

    Args:
        state: the tables.
        state_dict: state dict of a model. Entries of tables that are called like a child of the
            module are removed from it.
        prefix: prefix of the names of the module.
        missing_keys: names that are missing are appended to it.
        unexpected_keys: names with the prefix that are not of the module are appended to it.
    """
    saved_entries = state_dicts.entries_under(prefix, state_dict)
    names, children = state_names(state), state.child_modules()
    missing_keys.extend(prefix + key for key in names if key not in saved_entries)
    unexpected_keys.extend(
        prefix + key
        for key in saved_entries
        if key not in names and key.split(".")[0] not in children
    )
    # To a child of the same name as a table, the entries of the table are unexpected.
    for name in names:
        if name.partition(".")[0] in children:
            state_dict.pop(prefix + name, None)
    entries = _entries_in(state, saved_entries)
    if state.expiry is not None:
        state.expiry.forget_times()  # torch loads the saved times after this
    replace_tables(
        state,
        entries,
        clock=int(saved_entries.get(CLOCK, 0)),
        hyperparameters=saved_entries.get(HYPER),
        hash_keys=hash_keys_in(state, entries, saved_entries.get(INDEX_HASH_KEYS)),
        fallback_rows=saved_entries,
    )


def state_problems(
    state: DynamicState, state_dict: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    """Yield messages of the invalid entries of a module in a state dict, without its children.

    Every entry that is wrong by itself has a message. Only if there is none, entries are checked
    together, up to the first problem.
    """
    saved_entries = state_dicts.entries_under(prefix, state_dict)
    problems = [
        *_tensor_problems(state, saved_entries),
        *state_dicts.number_problems(saved_entries, CLOCK, below=MAX_TICK),
        *state_dicts.entry_problems(saved_entries, {HYPER: state.hyperparams}),
    ]
    if not problems:
        try:
            entries = _entries_in(state, saved_entries)
            for t, entries_of_table in entries.items():
                loading.check(target_of(state, t), entries_of_table)
            hash_keys_in(state, entries, saved_entries.get(INDEX_HASH_KEYS))
            check_hyperparameters(state, saved_entries.get(HYPER))
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    yield from (f"{prefix}{problem}" for problem in problems)


def _tensor_problems(state: DynamicState, saved_entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message per entry that is not a tensor of the tables' dtype and shape."""
    int64_vector = torch.empty(0, dtype=torch.int64, device="cpu")
    for t, name in enumerate(state.table_names):
        keys = saved_entries.get(f"{name}.keys")
        num_keys = len(keys) if isinstance(keys, Tensor) and keys.dim() == 1 else None
        for kind, view in {**dict.fromkeys(_COLUMNS, int64_vector), **state.table_rows(t)}.items():
            key = f"{name}.{kind}"
            if key in saved_entries:
                problem = state_dicts.tensor_problem(
                    saved_entries[key], view, (num_keys, *view.shape[1:])
                )
                if problem:
                    yield f"{key}: {problem}"
        num_levels = len(state.specs[t].lifetimes) - 1
        if num_levels and f"{name}.{LAST_USES}" in saved_entries:
            shape = (num_keys, num_levels)
            if problem := state_dicts.tensor_problem(
                saved_entries[f"{name}.{LAST_USES}"], int64_vector, shape
            ):
                yield f"{name}.{LAST_USES}: {problem}"
        for problem in fallback.row_problems(state, t, fallback.rows_of_table(saved_entries, name)):
            yield f"{name}.{problem}"
    if INDEX_HASH_KEYS in saved_entries:
        problem = state_dicts.tensor_problem(saved_entries[INDEX_HASH_KEYS], int64_vector)
        if problem:
            yield f"{INDEX_HASH_KEYS}: {problem}"


def _entries_in(state: DynamicState, saved_entries: Mapping[str, Tensor]) -> dict[int, Entries]:
    """Return the entries of the tables whose keys a state dict has.

    Keys without stamps count as used at the saved tick; or now, if that is later and some tables
    are not loaded.
    """
    entries_by_table = {}
    tick = max(1, int(saved_entries.get(CLOCK, 0)))
    if any(f"{name}.keys" not in saved_entries for name in state.table_names):
        tick = max(tick, state.index.tick)
    for t, name in enumerate(state.table_names):
        columns = {
            kind: saved_entries[f"{name}.{kind}"].detach().cpu()
            for kind in _COLUMNS
            if f"{name}.{kind}" in saved_entries
        }
        if "keys" not in columns:
            continue
        stamps = columns.get("stamps", torch.full_like(columns["keys"], tick))
        rows: dict[str, Rows] = {
            kind: saved_entries[f"{name}.{kind}"]
            for kind in (*state.table_rows(t), LAST_USES)
            if f"{name}.{kind}" in saved_entries
        }
        entries_by_table[t] = Entries(columns["keys"], stamps, columns.get("scores"), rows)
    return entries_by_table


def check_hyperparameters(state: DynamicState, hyperparameters: Tensor | None) -> None:
    """Raise ValueError for hyperparameters that the optimizer of a module cannot have."""
    if hyperparameters is None:
        return
    if hyperparameters.shape != state.hyperparams.shape:
        raise ValueError(
            f"hyper has {hyperparameters.numel()} numbers, this optimizer has "
            f"{state.hyperparams.numel()}: the checkpoint is of another one; without this key and "
            "with strict=False the rest can be loaded"
        )
    state.check_hyperparams(hyperparameters)


def hash_keys_in(
    state: DynamicState, entries: Mapping[int, Entries], saved_hash_keys: Tensor | None
) -> dict[int, int]:
    """Return the saved hash keys by table; an empty dict if there are none, or no entries.

    `saved_hash_keys` are those of all tables, or of the tables in `entries`, in their order.

    Raises:
        ValueError: `saved_hash_keys` has another dtype or shape.
    """
    if saved_hash_keys is None or not entries:
        return {}
    num_tables = len(state.specs)
    tables = range(num_tables) if saved_hash_keys.numel() == num_tables else list(entries)
    if (
        saved_hash_keys.dtype != torch.int64
        or saved_hash_keys.dim() != 1
        or saved_hash_keys.numel() != len(tables)
    ):
        raise ValueError(
            f"{INDEX_HASH_KEYS} must be int64, one per table = [{len(tables)}], got "
            f"{saved_hash_keys.dtype} {list(saved_hash_keys.shape)}; without it "
            "tables keep their own"
        )
    return dict(zip(tables, saved_hash_keys.tolist(), strict=True))


@of_state
def replace_tables(
    state: DynamicState,
    entries: Mapping[int, Entries],
    *,
    clock: int,
    hyperparameters: Tensor | None,
    hash_keys: Mapping[int, int],
    fallback_rows: Mapping[str, Tensor],
    report: Report | None = None,
) -> dict[str, Loaded]:
    """Replace tables, clock and hyperparameters; warn of entries without slots, and of expiry.

    If all tables are replaced, the tick becomes the largest of `clock` and the stamps, and counters
    are reset. Otherwise the tick does not decrease either.

    Args:
        state: the tables.
        entries: new entries by number of the table; other tables stay as they are.
        clock: the saved tick.
        hyperparameters: hyperparameters of the optimizer; None keeps the current ones.
        hash_keys: hash keys by number of the table; a table without one keeps its hash key.
        fallback_rows: tensors by their names in state dicts, fallback rows among them; tables
            without any keep theirs.
        report: function that is called as rows are written, see `set_table_entries`.

    Returns:
        Numbers of loaded entries, by name of the table.

    Raises:
        ValueError: entries or hyperparameters do not fit. Tables may be replaced then, so callers
            check them first.
        Exception: the backing store or `report` raised it.
    """
    newest_stamps = [new_entries.newest_stamp() for new_entries in entries.values()]
    if entries:
        warn_of_expiry(state, entries.keys(), max([clock, *newest_stamps]))

    def write() -> dict[str, Loaded]:
        nonlocal report
        report_once, report = report, None  # if it raises, the rest is loaded without it
        loaded = {
            state.table_names[t]: replace_entries(
                state, t, new_entries, report_once, hash_key=hash_keys.get(t), keeps_times=True
            )
            for t, new_entries in entries.items()
        }
        for t, name in enumerate(state.table_names):
            fallback.write_rows(state, t, fallback.rows_of_table(fallback_rows, name))
        if len(entries) == len(state.specs):
            state.index.set_tick(max([clock, *newest_stamps]))
            reset_stats(state)
        else:
            state.index.set_tick(max([clock, state.index.tick, *newest_stamps]))
        if hyperparameters is not None:
            state.load_hyperparams(hyperparameters)
        state.restart_eviction_log()
        return loaded

    loaded = state.complete(write)
    num_left_out_by_table = {
        name: loaded_table.left_out
        for name, loaded_table in loaded.items()
        if loaded_table.left_out
    }
    if num_left_out_by_table:
        warnings.warn(
            f"emblib: tables had no slot for all entries they were loaded with; left out, those "
            f"that would have been evicted first, are {num_left_out_by_table}",
            stacklevel=caller_level(),
        )
    return loaded


@of_state
def set_child_state(
    state: DynamicState, state_by_child: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Load what `check_child_state` returned; children without a saved state stay as they are."""
    for child, child_module in state.child_modules().items():
        if state_by_child.get(child):
            child_module.load_state_dict(state_by_child[child])


def check_child_state(
    state: DynamicState, saved_states: Mapping[str, Tensor], directory: str | Path
) -> dict[str, dict[str, Tensor]]:
    """Return the saved state of each child of a module, after checking it; {} for none.

    `saved_states` has them by `<child>.<name>`. Times of use are dropped if the module has another
    number of ttls that are times.

    Raises:
        DumpMismatchError: the state in `directory` does not fit.
    """
    state_by_child = {
        child: state_dicts.entries_under(f"{child}.", saved_states)
        for child in state.child_modules()
    }
    with mismatch_errors_of(directory):
        if state.admission is not None and state_by_child["admission"]:
            state.admission.check_state_dict(state_by_child["admission"])
        if state.scores is not None and state_by_child["scores"]:
            dumps.check_state("scores", state_by_child["scores"], state.scores.state_dict())
        if state_by_child.get("expiry"):
            expected_state = state.child_modules()["expiry"].state_dict()
            times = state_by_child["expiry"].get("times", torch.empty(0, device="cpu"))
            if len(times) != len(expected_state["times"]):  # for other ttls: the ages are not known
                state_by_child["expiry"] = {}
            else:
                dumps.check_state("expiry", state_by_child["expiry"], expected_state)
    return state_by_child


@contextlib.contextmanager
def mismatch_errors_of(directory: str | Path) -> Iterator[None]:
    """Return a context that raises a ValueError as a `DumpMismatchError` of a directory."""
    try:
        yield
    except ValueError as error:
        raise DumpMismatchError(f"{directory} does not fit this module: {error}") from error
